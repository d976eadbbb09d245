/* Selection: the plan of lowest cost over all kernels, placements of operands and slices of K. */
#include "core.h"

#include <math.h>
#include <string.h>

enum { MIN_STEPS = 2 /* along K, of a slice */, PDL_BELOW_NS = 50000 };
enum { FULL_PDL_BELOW_NS = 12000 /* for a launch that leaves no room for the next */ };
enum { SHORTLIST = 16 /* plans of least time by the formula, of which the network chooses */ };

/* Return the number of panels that share a copy of an operand. */
static int64_t panels_of_copy(const panels *cut, int operand) {
  return operand == 0 ? cut->across : operand == 1 && cut->across == 1 ? cut->down : 1;
}

static uint32_t contiguous_strides(const quantities *q) {
  uint32_t found = 0;
  for (int i = 0; AOTMM_PRODUCT_STRIDE_AM + i <= AOTMM_PRODUCT_STRIDE_CN; i++)
    found |= (uint32_t)contiguous(q, AOTMM_PRODUCT_STRIDE_AM + i) << i;
  return found;
}

/* Set the fields of the last placement that follow from its quantities. */
static void complete_placement(query *s) {
  s->contiguous |= contiguous_strides(&s->placements[s->count - 1].q);
  describe(s, &s->placements[s->count - 1]);
}

/* Add the placement that copies the operands in `copies`, if there are kernels for that. */
static void add_placement(query *s, const copy_layout *layouts, uint32_t copies) {
  const aotmm_problem *p = s->problem;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  int64_t bytes = bytes_of_copies(layouts, copies);
  double time = 0;
  if (bytes > s->limit) {
    s->excluded = copies;
    return;
  }
  quantities *moved = &s->placements[s->count].q;
  set_copies(moved, &s->placements[0].q, layouts, copies, AOTMM_WORKSPACE_ALIGNMENT);
  for (int i = 0; i < OPERANDS; i++) {
    if (!(copies >> i & 1)) continue;
    quantities copy;
    set_copy(&copy, &s->placements[0].q, moved, i, layouts + i);
    int kernel = copy_for(p, &copy, i, s->device);
    if (kernel < 0) return;
    double each = copy_time(s, kernel, &copy, bytes_of_dtype[types[i]]);
    time += s->cut ? each / (double)panels_of_copy(s->cut, i) : each;
  }
  s->placements[s->count].copies = copies;
  s->placements[s->count].bytes = bytes;
  s->placements[s->count].time = time;
  s->count++;
  complete_placement(s);
}

static void start(query *s, const aotmm_problem *p, const panels *cut, const aotmm_device *device, uint64_t limit) {
  const aotmm_tuning *tuning = tuning_for(device);
  s->problem = p;
  s->cut = cut;
  s->device = device;
  s->table = &tuning->table;
  s->epilogue = epilogue(p);
  s->limit = limit < (uint64_t)max_workspace ? (int64_t)limit : max_workspace;
  s->contiguous = s->excluded = 0;
  s->count = 1;
  s->placements[0].copies = 0;
  s->placements[0].bytes = 0;
  s->placements[0].time = 0;
  set_quantities(&s->placements[0].q, p);
  if (cut) s->placements[0].q.value[AOTMM_PRODUCT_C_SPAN] = cut->last_cols; /* the others' are multiples of PANEL */
  complete_placement(s);
  s->bytes_moved = (double)p->batch * ((double)p->M * (double)p->K * bytes_of_dtype[p->dtype_a] +
                                       (double)p->K * (double)p->N * bytes_of_dtype[p->dtype_b] +
                                       (double)p->M * (double)p->N * bytes_of_dtype[p->dtype_c]);
  s->measured[0] = s->measured[1] = NULL;
  if (!cut) find_measured(s, tuning);
  if (s->limit == 0 || p->batch != 1 || p->M == 0 || p->N == 0 || p->K == 0) return;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  copy_layout layouts[OPERANDS];
  uint32_t needed = 0;
  for (int i = 0; i < OPERANDS; i++) {
    if (lies_well(&s->placements[0].q, i, bytes_of_dtype[types[i]])) continue;
    needed |= 1u << i;
    layouts[i] = layout_of_copy(&s->placements[0].q, i, bytes_of_dtype[types[i]]);
  }
  if (needed & ~(uint32_t)AOTMM_COPY_C) add_placement(s, layouts, needed & ~(uint32_t)AOTMM_COPY_C);
  if (needed & AOTMM_COPY_C) add_placement(s, layouts, needed);
}

/* Return whether the guards of a kernel hold for the last panel. */
static int guards_hold_in_last(const query *s, int placement, uint32_t kernel) {
  quantities last = s->placements[placement].q;
  last.value[AOTMM_PRODUCT_M] = s->cut->last_rows, last.value[AOTMM_PRODUCT_N] = s->cut->last_cols;
  return guards_hold(kernel, &last);
}

/* Return whether the guards of a kernel hold in a placement, for all panels. A partial's reduce writes any C, so C is
   not copied. Guards on a partial's sums count as held here; `plan_partial` checks them. */
static int guards_hold_in(const query *s, int placement, uint32_t kernel) {
  uint32_t not_copied = aotmm_kernels[kernel].role == AOTMM_ROLE_PARTIAL ? AOTMM_COPY_C : 0;
  return !(s->placements[placement].copies & not_copied) && guards_hold(kernel, &s->placements[placement].q) &&
         (!s->cut || guards_hold_in_last(s, placement, kernel));
}

static int bits(uint32_t copies) { return __builtin_popcount(copies); }

/* Return whether `a` is chosen over `b` at the same cost. */
static int preferred(const aotmm_plan *a, const aotmm_plan *b) {
  const aotmm_kernel *k = aotmm_kernels + a->kernel, *other = aotmm_kernels + b->kernel;
  if (bits(a->copies) != bits(b->copies)) return bits(a->copies) < bits(b->copies);
  if (k->epilogue != other->epilogue) return k->epilogue < other->epilogue;
  if (k->vector_bytes != other->vector_bytes) return k->vector_bytes > other->vector_bytes;
  return a->kernel != b->kernel ? a->kernel < b->kernel : a->split < b->split;
}

/* A plan by the formula. */
typedef struct entry {
  aotmm_plan plan; /* cost: that of the formula */
  tiling of;
  terms t;
} entry;

/* The plans of least time so far, of any kernel, and `found` as in aotmm_evaluation. */
typedef struct search {
  int count, limit;   /* entries, and those to keep: SHORTLIST for the network, 1 without one */
  int slowest;        /* the entry that is left out next */
  int64_t most;       /* its cost; INT64_MAX while there are fewer entries than to keep */
  aotmm_plan best;    /* of measured plans, and of all in the end; cost < 0: none */
  int64_t found;
  aotmm_group tests;      /* guards of the last kernel that was looked at, */
  int partial, placement; /* its role, and where they hold */
  entry list[SHORTLIST];
} search;

static void nothing_found(search *empty, const query *s) {
  empty->count = empty->slowest = 0, empty->found = 0, empty->best.cost = -1;
  empty->most = INT64_MAX;
  empty->partial = -1;
  empty->limit = s->table->network ? SHORTLIST : 1;
}

static int64_t as_cost(double time) { return time < 9e18 ? (int64_t)time : INT64_MAX; }

/* Return whether a plan of this time is of no use by now. */
static int too_slow(const search *to, double time) { return as_cost(time) > to->most; }

/* Return whether plan `a` is chosen over `b`. */
static int better(const aotmm_plan *a, const aotmm_plan *b) {
  return a->cost != b->cost ? a->cost < b->cost : preferred(a, b);
}

static void keep_better(aotmm_plan *best, const aotmm_plan *plan) {
  if (best->cost < 0 || better(plan, best)) *best = *plan;
}

/* Return where to put a plan: behind the others, or in place of the slowest one; NULL if that is better. */
static entry *room_for(search *to, const aotmm_plan *plan) {
  if (to->count < to->limit) return to->list + to->count++;
  return better(plan, &to->list[to->slowest].plan) ? to->list + to->slowest : NULL;
}

static void find_slowest(search *to) {
  if (to->count < to->limit) return;
  to->slowest = 0;
  for (int i = 1; i < to->count; i++)
    if (better(&to->list[to->slowest].plan, &to->list[i].plan)) to->slowest = i;
  to->most = to->list[to->slowest].plan.cost;
}

/* Complete a plan, or return the reason why it does not fit. */
static int32_t complete(const query *s, const tiling *of, int64_t sums, aotmm_plan *plan, search *to) {
  const aotmm_kernel *k = aotmm_kernels + plan->kernel;
  const int64_t work_tiles = saturated(of->tiles, plan->split);
  plan->grid = grid_of(k, work_tiles, s->device);
  plan->copies = of->place->copies;
  to->found = work_tiles;
  if (!plan->grid && work_tiles) return AOTMM_TOO_MANY_BLOCKS;
  to->found = of->place->bytes + sums + scratch_of(k, plan->grid);
  if (to->found > s->limit) return AOTMM_TOO_MUCH_WORKSPACE;
  plan->workspace_bytes = (uint64_t)to->found;
  return AOTMM_FITS;
}

/* Consider a plan that was measured. */
static int32_t consider_measured(const query *s, const tiling *of, uint32_t split, int64_t sums, const aotmm_time *time, search *to) {
  aotmm_plan plan = {.kernel = of->kernel, .split = split, .measured = 1, .cost = time->ns};
  plan.pdl = time->pdl && aotmm_kernels[of->kernel].pdl;
  const int32_t reason = complete(s, of, sums, &plan, to);
  if (reason == AOTMM_FITS) keep_better(&to->best, &plan);
  return reason;
}

/* Consider a plan that takes `reduce` ns beside its main kernel and copies. */
static int32_t consider(const query *s, const tiling *of, uint32_t split, int64_t sums, double reduce, search *to) {
  terms t;
  if (too_slow(to, set_terms(s, of, split, reduce, &t) + of->place->time)) return AOTMM_FITS;
  t.time = formula(&t);
  if (too_slow(to, t.time + of->place->time)) return AOTMM_FITS;
  aotmm_plan plan = {.kernel = of->kernel, .split = split, .cost = as_cost(t.time + of->place->time)};
  const int32_t reason = complete(s, of, sums, &plan, to);
  if (reason != AOTMM_FITS) return reason;
  entry *each = room_for(to, &plan);
  if (!each) return AOTMM_FITS;
  each->plan = plan, each->of = *of, each->t = t;
  find_slowest(to);
  return AOTMM_FITS;
}

/* Return whether a launch is `pdl` by the formula alone. */
static int starts_early(const entry *each) {
  const aotmm_kernel *k = aotmm_kernels + each->of.kernel;
  const int64_t tiles = saturated(each->of.tiles, each->plan.split), concurrent = each->of.concurrent;
  const int full = tiles > concurrent / 2 && tiles <= concurrent;
  return k->pdl && k->role == AOTMM_ROLE_PRODUCT && each->t.time < (full ? FULL_PDL_BELOW_NS : PDL_BELOW_NS);
}

/* Decide between the plans of the list, by the network if there is one, and those that were measured. */
static void decide(const query *s, search *to) {
  for (entry *each = to->list, *end = to->list + to->count; each < end; each++) {
    int pdl;
    if (s->table->network)
      each->plan.cost = as_cost(corrected(s, &each->of, each->plan.split, &each->t, &pdl) + each->of.place->time);
    else
      pdl = starts_early(each);
    each->plan.pdl = (uint32_t)pdl;
    keep_better(&to->best, &each->plan);
  }
}

static int32_t plan_product(const query *s, const placement *place, uint32_t kernel, search *to) {
  const tiling of = tiling_of(s, place, kernel);
  const aotmm_time *measured = place->copies ? NULL : measured_time(s, kernel);
  return measured ? consider_measured(s, &of, 1, 0, measured, to) : consider(s, &of, 1, 0, 0, to);
}

static int32_t plan_partial(query *s, placement *place, uint32_t kernel, search *to) {
  static const uint8_t splits[] = AOTMM_SPLITS;
  const aotmm_problem *p = s->problem;
  const tiling of = tiling_of(s, place, kernel);
  if (p->batch != 1 || of.tiles == 0 || of.steps < 2 * MIN_STEPS) return AOTMM_NO_SPLIT;
  const aotmm_time *measured = place->copies ? NULL : measured_time(s, kernel);
  if (!measured && too_slow(to, least_in_slices(s, &of) + place->time)) return AOTMM_FITS;
  quantities *q = &place->q;
  set_sums(q, kernel, AOTMM_MAX_SPLIT, AOTMM_WORKSPACE_ALIGNMENT);
  const int reduce = sum_guards_hold(kernel, q) ? reduce_for(p, q, s->device) : -1;
  const int64_t slab = q->value[AOTMM_PRODUCT_WORKSPACE_STRIDE_Z];
  set_no_sums(q);
  if (reduce < 0) return AOTMM_NO_SPLIT;
  const aotmm_constants *c = constants_of(s, kernel);
  int32_t reason = AOTMM_NO_SPLIT;
  int fits = 0;
  for (unsigned i = sizeof splits; i-- > 0;) { /* fewer slices take longer each */
    const uint32_t split = splits[i];
    if (of.steps < (int64_t)split * MIN_STEPS || (measured && split != measured->split)) continue;
    const int64_t sums = region(saturated(slab, 4 * split));
    if (measured)
      reason = consider_measured(s, &of, split, sums, measured, to);
    else if (too_slow(to, c->base_ns + (double)ceil_div(of.steps, split) * c->ns_per_k_step))
      return AOTMM_FITS;
    else
      reason = consider(s, &of, split, sums, reduce_time(s, reduce, split), to);
    fits |= reason == AOTMM_FITS;
  }
  return fits ? AOTMM_FITS : reason;
}

static int32_t plan_kernel(query *s, int number, uint32_t kernel, search *to) {
  placement *place = s->placements + number;
  const int product = aotmm_kernels[kernel].role == AOTMM_ROLE_PRODUCT;
  return product ? plan_product(s, place, kernel, to) : plan_partial(s, place, kernel, to);
}

/* Find the best plan with one kernel, or return the reason why there is none. */
static int32_t search_kernel(query *s, uint32_t kernel, search *to) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  int placement = 0;
  while (placement < s->count && !guards_hold_in(s, placement, kernel)) placement++;
  if (placement == s->count) return AOTMM_BROKEN_GUARD;
  if (k->shared_bytes <= (uint32_t)s->device->shared_bytes) return plan_kernel(s, placement, kernel, to);
  to->found = s->device->shared_bytes;
  return AOTMM_TOO_MUCH_SHARED;
}

/* Return whether a config has times in the table, and none on this shape, where others were faster. */
static int known_slow(const query *s, uint32_t kernel) {
  return s->measured[aotmm_kernels[kernel].fast_accum] && s->table->config_numbers[kernel] != AOTMM_UNMEASURED &&
         !measured_time(s, kernel);
}

/* Return the first placement where the guards of a kernel hold, or their count. Neighbours mostly have equal guards. */
static int placement_of(const query *s, uint32_t kernel, search *to) {
  const aotmm_group tests = aotmm_guard_tests_of[kernel];
  const int partial = aotmm_kernels[kernel].role == AOTMM_ROLE_PARTIAL;
  if (to->tests.first != tests.first || to->tests.count != tests.count || to->partial != partial) {
    to->tests = tests, to->partial = partial, to->placement = 0;
    while (to->placement < s->count && !guards_hold_in(s, to->placement, kernel)) to->placement++;
  }
  return to->placement;
}

/* Consider the plainest sibling that fits, in the first placement where its guards hold. */
static void consider_siblings(query *s, const aotmm_siblings *siblings, search *to) {
  const int placement = placement_of(s, aotmm_order[siblings->first], to);
  if (placement == 0 && known_slow(s, aotmm_order[siblings->first])) return;
  for (int i = 0; i < siblings->count && placement < s->count; i++) {
    uint32_t kernel = aotmm_order[siblings->first + i];
    const aotmm_kernel *k = aotmm_kernels + kernel;
    if ((k->role == AOTMM_ROLE_PARTIAL || k->epilogue >= s->epilogue) &&
        k->shared_bytes <= (uint32_t)s->device->shared_bytes && plan_kernel(s, placement, kernel, to) == AOTMM_FITS)
      return;
  }
}

static void search_all(query *s, search *to) {
  const aotmm_problem *p = s->problem;
  aotmm_group group = aotmm_mains[p->dtype_a][p->dtype_b][p->dtype_c];
  for (const aotmm_siblings *each = aotmm_siblings_of + group.first, *end = each + group.count; each < end; each++)
    if (!(each->contiguous & ~s->contiguous)) consider_siblings(s, each, to);
}

/* ---- panels: parts of C, for products whose copies exceed the limit */

/* Return the size of the fewest, about equal parts of at most `most` elements; a multiple of PANEL, or all. */
static int64_t evenly(int64_t size, int64_t most) {
  return size <= most ? size : saturated(ceil_div(ceil_div(size, ceil_div(size, most)), PANEL), PANEL);
}

/* Return whether the excluded copies fit the limit for a panel of so many rows and columns. */
static int copies_fit(const query *s, int64_t rows, int64_t cols) {
  const aotmm_problem *p = s->problem;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  quantities part = s->placements[0].q;
  copy_layout layouts[OPERANDS];
  part.value[AOTMM_PRODUCT_M] = rows, part.value[AOTMM_PRODUCT_N] = cols;
  for (int i = 0; i < OPERANDS; i++)
    if (s->excluded >> i & 1) layouts[i] = layout_of_copy(&part, i, bytes_of_dtype[types[i]]);
  return bytes_of_copies(layouts, s->excluded) <= s->limit;
}

/* Return panels of at most so many columns, and of the most rows that the limit allows; 0 rows if it allows none. */
static panels cut_at(const query *s, int64_t most_cols) {
  const int64_t M = s->problem->M, N = s->problem->N, cols = evenly(N, most_cols);
  int64_t few = 0, many = ceil_div(M, PANEL); /* multiples of PANEL that fit, and that may fit */
  while (few < many) {
    int64_t middle = many - (many - few) / 2;
    int64_t rows = saturated(middle, PANEL);
    if (copies_fit(s, rows < M ? rows : M, cols))
      few = middle;
    else
      many = middle - 1;
  }
  if (few == 0) return (panels){0};
  const int64_t rows = evenly(M, saturated(few, PANEL)), down = ceil_div(M, rows), across = ceil_div(N, cols);
  return (panels){rows, cols, down, across, M - (down - 1) * rows, N - (across - 1) * cols};
}

/* Return the group_m of launcher.h. */
static uint32_t group_of(const query *s, uint32_t kernel) {
  static const uint8_t groups[] = AOTMM_GROUPS;
  const int64_t block_m = aotmm_kernels[kernel].block_m, block_n = aotmm_kernels[kernel].block_n;
  const int64_t down = ceil_div(s->problem->M, block_m), tiles = tiles_of(kernel, s->problem->M, s->problem->N);
  int64_t at_once = concurrent_tiles(s, kernel), fewest = INT64_MAX;
  uint32_t best = 0;
  if (at_once > tiles) at_once = tiles;
  for (unsigned i = 0; i < sizeof groups && (i == 0 || groups[i - 1] < down); i++) {
    int64_t rows = i && groups[i] > down ? down : groups[i];
    int64_t elements = rows * block_m + ceil_div(at_once, rows) * block_n;
    if (elements < fewest || (elements == fewest && groups[i] == AOTMM_USUAL_GROUP)) fewest = elements, best = groups[i];
  }
  return best;
}

enum { ANY_KERNEL = UINT32_MAX };

/* Replace *best by the best plan in panels, with this kernel or with any, if that costs less (cost < 0: no plan). */
static __attribute__((noinline, cold)) void consider_panels(const query *whole, uint32_t kernel, aotmm_plan *best) {
  const int64_t N = whole->problem->N;
  for (int64_t most = 0; most < N;) {
    most = most == 0 ? PANEL : most < N - most ? 2 * most : N;
    const panels cut = cut_at(whole, most);
    if (cut.rows == 0) continue;
    aotmm_problem part = *whole->problem;
    part.M = cut.rows, part.N = cut.cols;
    query s;
    search found;
    start(&s, &part, &cut, whole->device, (uint64_t)whole->limit);
    nothing_found(&found, &s);
    if (kernel == ANY_KERNEL)
      search_all(&s, &found);
    else
      search_kernel(&s, kernel, &found);
    decide(&s, &found);
    if (found.best.cost < 0) continue;
    found.best.cost = saturated(saturated(cut.down, cut.across), found.best.cost);
    found.best.group_m = group_of(&s, found.best.kernel);
    found.best.panel_m = cut.rows, found.best.panel_n = cut.cols;
    if (best->cost < 0 || found.best.cost < best->cost) *best = found.best;
  }
}

int choose(const aotmm_problem *p, const aotmm_device *device, uint64_t limit, aotmm_plan *plan) {
  query s;
  search found;
  start(&s, p, NULL, device, limit);
  nothing_found(&found, &s);
  search_all(&s, &found);
  decide(&s, &found);
  if (found.best.cost >= 0) found.best.group_m = group_of(&s, found.best.kernel);
  if (s.excluded) consider_panels(&s, ANY_KERNEL, &found.best);
  *plan = found.best;
  if (plan->cost >= 0) return AOTMM_OK;
  return aotmm_fail(AOTMM_NO_KERNEL, 0, -1, "",
                    "no kernel of pack %s has these types and epilogue and fits M=%lld N=%lld K=%lld; `check` says why",
                    aotmm_arch, (long long)p->M, (long long)p->N, (long long)p->K);
}

int aotmm_select(const aotmm_problem *problem, const aotmm_device *device, uint64_t limit, aotmm_plan *plan) {
  int status = valid(problem);
  if (status || (status = valid_device(device))) return status;
  return choose(problem, device, limit, plan);
}

/* Find the best plan within the limit that has this kernel, or the reason why there is none. */
static int evaluate(const aotmm_problem *p, const aotmm_device *device, uint64_t limit, uint32_t kernel, aotmm_evaluation *evaluation) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  query s;
  search found;
  start(&s, p, NULL, device, limit);
  nothing_found(&found, &s);
  int32_t reason = search_kernel(&s, kernel, &found);
  decide(&s, &found);
  if (found.best.cost >= 0) found.best.group_m = group_of(&s, kernel);
  if (s.excluded) consider_panels(&s, kernel, &found.best);
  if (found.best.cost >= 0) {
    evaluation->plan = found.best;
    return AOTMM_OK;
  }
  evaluation->reason = reason;
  evaluation->found = found.found;
  if (reason != AOTMM_BROKEN_GUARD) return AOTMM_OK;
  evaluation->guard = first_failed_guard(k, &s.placements[0].q);
  if (evaluation->guard == k->guard_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "",
                      "kernel %s keeps all %u guards of its list but not those that are looked at; build the pack again",
                      k->name, k->guard_count);
  evaluation->found = s.placements[0].q.value[k->guards[evaluation->guard].value];
  return AOTMM_OK;
}

int aotmm_check(const aotmm_problem *problem, const aotmm_device *device, uint64_t limit, uint32_t kernel,
                aotmm_evaluation *evaluation) {
  int status = valid(problem);
  if (status || (status = valid_device(device))) return status;
  if (kernel >= aotmm_kernel_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", kernel, aotmm_kernel_count);
  const aotmm_kernel *k = aotmm_kernels + kernel;
  memset(evaluation, 0, sizeof *evaluation);
  if (k->role != AOTMM_ROLE_PRODUCT && k->role != AOTMM_ROLE_PARTIAL)
    evaluation->reason = AOTMM_NO_PRODUCT;
  else if (!same_types(k, problem))
    evaluation->reason = AOTMM_OTHER_TYPES;
  else
    return evaluate(problem, device, limit, kernel, evaluation);
  return AOTMM_OK;
}
