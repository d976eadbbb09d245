/* Selection: the plan of lowest cost over all kernels, placements of operands and slices of K. */
#include "core.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { PDL_BELOW_NS = 50000, FULL_PDL_BELOW_NS = 12000 /* for a launch that leaves no room for the next */ };
enum { ANY_GRID = 1 << 18 /* work tiles of which any grid can have so many, of at most 16 * 1024 threads each */ };
enum { TALL = 64 /* rows of a tile, above which half of them have to be of C */ };

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
static void add_placement(query *s, uint32_t copies) {
  const aotmm_problem *p = s->problem;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  copy_layout layouts[OPERANDS];
  set_layouts(layouts, &s->placements[0].q, p, copies);
  int64_t bytes = bytes_of_copies(layouts, copies);
  float time = 0;
  if (bytes > s->limit) {
    s->excluded = copies;
    return;
  }
  quantities *moved = &s->placements[s->count].q, copied[OPERANDS];
  int kernels[OPERANDS];
  set_copies(moved, &s->placements[0].q, p, layouts, copies, AOTMM_WORKSPACE_ALIGNMENT);
  for (int i = 0; i < OPERANDS; i++)
    if (copies >> i & 1) set_copy(copied + i, &s->placements[0].q, moved, i, layouts + i);
  if (copies_for(p, copied, copies, s->device, kernels)) return;
  for (int i = 0; i < OPERANDS; i++) {
    if (!(copies >> i & 1)) continue;
    const int together = i == 1 && copies & AOTMM_COPY_A && kernels[0] == kernels[1] && !s->cut;
    const float each = copy_time(s, kernels[i], copied + i, together, bytes_of_dtype[types[i]]);
    time += s->cut ? each / (float)panels_of_copy(s->cut, i) : each;
  }
  s->placements[s->count].copies = copies;
  s->placements[s->count].bytes = bytes;
  s->placements[s->count].time = time;
  s->count++;
  complete_placement(s);
}

/* Add the placements with these copies of A and B, and with that of C, too, if fast kernels need it. */
static void add_placements(query *s, uint32_t operands, uint32_t copy_c) {
  if (operands) add_placement(s, operands);
  if (copy_c) add_placement(s, operands | copy_c);
}

static sizes sizes_of(const aotmm_problem *p, float batch, float M, float K) {
  const float N = (float)p->N;
  const float bytes = batch * (M * K * (float)bytes_of_dtype[p->dtype_a] + K * N * (float)bytes_of_dtype[p->dtype_b] +
                               M * N * (float)bytes_of_dtype[p->dtype_c]);
  return (sizes){.batch = batch, .M = M, .N = N, .K = K, .bytes_moved = bytes};
}

static void start(query *s, const aotmm_problem *p, const panels *cut, const aotmm_device *device, uint64_t limit) {
  const aotmm_tuning *tuning = tuning_for(device);
  s->problem = p;
  s->cut = cut;
  s->device = device;
  s->table = &tuning->table;
  s->octets = tuning->octets;
  s->multiprocessors = (float)device->multiprocessors, s->in_clusters = (float)usable(device, AOTMM_MOST_BLOCKS);
  s->epilogue = epilogue(p);
  s->order = order_of(p);
  s->limit = limit < (uint64_t)max_workspace ? (int64_t)limit : max_workspace;
  s->contiguous = s->needed = s->excluded = 0;
  s->first = 0, s->count = 1;
  s->placements[0].copies = 0;
  s->placements[0].bytes = 0;
  s->placements[0].time = 0;
  const int64_t rows = p->expected_rows && p->expected_rows < p->M ? p->expected_rows : p->M;
  const float M = (float)rows, K = (float)p->K;
  const float groups = (float)(p->grouped == AOTMM_GROUPED_M && rows < p->batch ? (rows ? rows : 1) : groups_of(p));
  s->routings = p->grouped == AOTMM_GROUPED_M ? ROUTINGS : 1;
  s->sizes[0] = p->grouped == AOTMM_GROUPED_M   ? sizes_of(p, groups, M / groups, K)
                : p->grouped == AOTMM_GROUPED_K ? sizes_of(p, groups, M, K / groups)
                                                : sizes_of(p, (float)p->batch, M, K);
  s->sizes[1] = sizes_of(p, 1, M, K);
  s->network = p->grouped ? NULL : s->table->network;
  set_quantities(&s->placements[0].q, p);
  if (cut) s->placements[0].q.value[AOTMM_PRODUCT_C_SPAN] = cut->last_cols; /* the others' are multiples of PANEL */
  complete_placement(s);
  s->measured[0] = s->measured[1] = NULL;
  if (!cut && !p->grouped) find_measured(s, tuning);
  if (s->limit == 0 || p->grouped || p->M == 0 || p->N == 0 || p->K == 0) return;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  uint32_t needed = 0;
  for (int i = 0; i < OPERANDS; i++)
    if (!lies_well(&s->placements[0].q, i, bytes_of_dtype[types[i]])) needed |= 1u << i;
  if (!(needed & ~(uint32_t)AOTMM_COPY_C)) needed |= needed_along_k(&s->placements[0].q, bytes_of_dtype[p->dtype_a]);
  s->needed = needed & ~(uint32_t)AOTMM_COPY_C;
  add_placements(s, s->needed, needed & AOTMM_COPY_C);
  const uint32_t excluded = s->excluded; /* panels are for copies that are needed */
  const uint32_t more = worth_along_m(&s->placements[0].q, bytes_of_dtype[p->dtype_a]);
  /* Fast kernels with A along M ask for whole vectors of rows, which C has, or a copy of it may have. */
  if (more && !rest_of(p->M, bytes_of_dtype[p->dtype_a], VECTOR_BYTES))
    add_placements(s, s->needed | more, needed & AOTMM_COPY_C);
  else if (more && !rest_of(rows_of_c(&s->placements[0].q, p), bytes_of_dtype[p->dtype_a], VECTOR_BYTES))
    add_placement(s, needed | more | AOTMM_COPY_C);
  s->excluded = excluded;
}

/* Return whether the guards of a kernel hold for the last panel. */
static int guards_hold_in_last(const query *s, int placement, uint32_t kernel) {
  quantities last = s->placements[placement].q;
  last.value[AOTMM_PRODUCT_M] = s->cut->last_rows, last.value[AOTMM_PRODUCT_N] = s->cut->last_cols;
  return guards_hold(kernel, &last);
}

/* Return whether the guards of a kernel hold in a placement, for all panels. A partial's reduce writes any C, so C is
   not copied. Guards on a partial's sums count as held here; `consider` checks them. */
static int guards_hold_in(const query *s, int placement, uint32_t kernel) {
  uint32_t not_copied = aotmm_products[kernel].role == AOTMM_ROLE_PARTIAL ? AOTMM_COPY_C : 0;
  return !(s->placements[placement].copies & not_copied) && guards_hold(kernel, &s->placements[placement].q) &&
         (!s->cut || guards_hold_in_last(s, placement, kernel));
}

/* The plans of least time so far, and `found` as in aotmm_evaluation. */
typedef struct search {
  int count, limit;           /* plans of the list, and those to keep: SHORTLIST for the network, 1 without one */
  candidate list[SHORTLIST];  /* the fastest first */
  float times[SHORTLIST];     /* by the formula, with copies */
  int waiting;                /* octets of plans that are still to be considered */
  octet_plans plans[MOST_OCTETS];
  aotmm_plan best;            /* of measured plans, and of all in the end; cost < 0: none */
  int32_t reason;             /* against the first plan that did not fit: of a partial, the one of fewest slices */
  int64_t found;
  int summed, reduce;         /* the last partial whose sums were placed, and the kernel that adds them, -1 for none */
  int64_t slab;               /* elements of one slice's sums, of the whole batch */
} search;

static void nothing_found(search *empty, const query *s) {
  empty->count = empty->waiting = 0, empty->found = 0, empty->best.cost = -1;
  empty->reason = AOTMM_NO_SPLIT;
  empty->summed = -1;
  empty->limit = s->network ? SHORTLIST : 1;
}

static int64_t as_cost(float time) { return time < 9e18f ? (int64_t)time : INT64_MAX; }

static int bits(uint32_t copies) { return __builtin_popcount(copies); }

/* Return whether `a` is chosen over `b` at the same time. */
static int preferred(uint32_t copies_a, uint32_t kernel_a, uint32_t split_a, uint32_t copies_b, uint32_t kernel_b, uint32_t split_b) {
  const aotmm_product *a = aotmm_products + kernel_a, *b = aotmm_products + kernel_b;
  if (bits(copies_a) != bits(copies_b)) return bits(copies_a) < bits(copies_b);
  if (a->epilogue != b->epilogue) return a->epilogue < b->epilogue;
  if (a->vector_bytes != b->vector_bytes) return a->vector_bytes > b->vector_bytes;
  return a != b ? a < b : split_a < split_b;
}

static int better(const aotmm_plan *plan, const aotmm_plan *best) {
  if (best->cost < 0 || plan->cost != best->cost) return best->cost < 0 || plan->cost < best->cost;
  return preferred(plan->copies, plan->kernel, plan->split, best->copies, best->kernel, best->split);
}

/* Return whether a plan of this time is of no use by now. */
static int too_slow(const search *to, float time) { return to->count == to->limit && time > to->times[to->count - 1]; }

/* Return whether `a`, which takes so long, comes before number `b` of the list. */
static int faster(const search *to, const candidate *a, float time, int b) {
  const candidate *other = to->list + b;
  if (time != to->times[b]) return time < to->times[b];
  return preferred(a->place->copies, a->kernel, a->split, other->place->copies, other->kernel, other->split);
}

/* Set the grid and the workspace of a plan, or return the reason why it does not fit. */
static int32_t complete(const query *s, const candidate *from, aotmm_plan *plan, int64_t *found) {
  const int64_t work_tiles = saturated(all_tiles_of(from->kernel, s->problem, s->problem->M, s->problem->N), from->split);
  *found = work_tiles;
  plan->grid = grid_of(from->kernel, work_tiles, s->device);
  if (!plan->grid && work_tiles) return AOTMM_TOO_MANY_BLOCKS;
  *found = from->place->bytes + from->sum_bytes + scratch_of(aotmm_kernels + from->kernel, plan->grid);
  if (*found > s->limit) return AOTMM_TOO_MUCH_WORKSPACE;
  plan->kernel = from->kernel, plan->split = from->split, plan->copies = from->place->copies;
  plan->workspace_bytes = (uint64_t)*found;
  return AOTMM_FITS;
}

/* Set what a plan with a partial needs for its sums, or return 0 if no reduce can add them. */
static int set_sums_of(const query *s, candidate *each, search *to) {
  if (to->summed != (int)each->kernel) {
    quantities *q = &each->place->q;
    set_sums(q, each->kernel, AOTMM_MAX_SPLIT, AOTMM_WORKSPACE_ALIGNMENT);
    to->summed = (int)each->kernel;
    to->reduce = sum_guards_hold(each->kernel, q) ? reduce_for(s->problem, q, s->device) : -1;
    to->slab = saturated(q->value[AOTMM_PRODUCT_WORKSPACE_STRIDE_Z], s->problem->batch);
    set_no_sums(q);
  }
  if (to->reduce < 0) return 0;
  each->sum_bytes = region(saturated(to->slab, 4 * each->split));
  each->reduce = reduce_time(s, to->reduce, each->split);
  return 1;
}

/* Return whether a plan of about so many work tiles fits. */
static int fits(const query *s, const candidate *each, float work_tiles, search *to) {
  aotmm_plan plan;
  int64_t found = each->place->bytes + each->sum_bytes;
  if (work_tiles < ANY_GRID && found <= s->limit && !aotmm_kernels[each->kernel].global_scratch_bytes) return 1;
  const int32_t reason = complete(s, each, &plan, &found);
  if (reason != AOTMM_FITS && to->reason == AOTMM_NO_SPLIT) to->reason = reason, to->found = found;
  return reason == AOTMM_FITS;
}

/* Put a plan into the list if it fits and is among the fastest. Its `time` by the formula lacks reduce and copies. */
static void consider(const query *s, candidate *each, float time, float work_tiles, search *to) {
  if (aotmm_products[each->kernel].role == AOTMM_ROLE_PARTIAL && !set_sums_of(s, each, to)) return;
  time = time + each->reduce + each->place->time;
  if (to->count == to->limit && !faster(to, each, time, to->count - 1)) return;
  if (!fits(s, each, work_tiles, to)) return;
  int number = to->count < to->limit ? to->count++ : to->count - 1;
  for (; number > 0 && faster(to, each, time, number - 1); number--)
    to->list[number] = to->list[number - 1], to->times[number] = to->times[number - 1];
  to->list[number] = *each, to->times[number] = time;
}

static const uint8_t whole[] = {1}, splits[] = AOTMM_SPLITS;

uint32_t slice_limit(const aotmm_problem *p) { return p->K < AOTMM_LONGEST_K ? AOTMM_MAX_SPLIT : AOTMM_USUAL_SPLIT; }

/* Numbers of slices of K, in ascending order. */
typedef struct slicings {
  const uint8_t *splits;
  int count;
} slicings;

/* Return the largest number of slices that K has enough steps for. */
static int64_t deepest(uint32_t kernel, const aotmm_problem *p) {
  const int64_t steps = steps_of(kernel, p->K), few = steps / AOTMM_LEAST_STEPS, many = steps / AOTMM_LONG_STEPS;
  const int64_t usual = few < AOTMM_USUAL_SPLIT ? few : AOTMM_USUAL_SPLIT;
  return many > usual ? many : usual;
}

/* Return the numbers to try with kernels like this one. */
static slicings slicings_of(const query *s, uint32_t kernel, int generic) {
  const aotmm_problem *p = s->problem;
  const aotmm_product *k = aotmm_products + kernel;
  const uint8_t *given = &s->order.slices;
  if (k->role != AOTMM_ROLE_PARTIAL) return (slicings){whole, !*given || aotmm_tiles[kernel].slices == *given};
  if (*given) return (slicings){given, *given > 1 && p->M && p->N};
  slicings found = {splits, p->M && p->N ? (int)sizeof splits : 0};
  while (found.count && splits[found.count - 1] > slice_limit(p)) found.count--;
  if (!generic || !found.count) return found;
  const int64_t tiles = saturated(tiles_of(kernel, p->M, p->N), p->batch);
  const int64_t wide = AOTMM_MOST_WAVES * concurrent_tiles(s, kernel) / tiles;
  if (wide < splits[0]) return (slicings){splits, 0};
  const int64_t deep = deepest(kernel, p), fit = s->limit / saturated(saturated(tiles, 4 * k->block_m), k->block_n);
  while (found.count > 1 && (splits[found.count - 1] > deep || splits[found.count - 1] > wide || splits[found.count - 1] > fit))
    found.count--;
  return (slicings){splits + found.count - 1, 1};
}

/* Return the measured time of a kernel in a placement, with the slices that are asked for, or NULL. */
static const aotmm_time *timed(const query *s, const placement *place, uint32_t kernel) {
  const aotmm_time *found = place->copies ? NULL : measured_time(s, kernel);
  const int any = !s->order.slices || aotmm_products[kernel].role != AOTMM_ROLE_PARTIAL;
  return found && (any || found->split == s->order.slices) ? found : NULL;
}

/* Consider the measured plan of a kernel, and return whether there is one. */
static int consider_measured(const query *s, placement *place, uint32_t kernel, search *to) {
  const aotmm_time *measured = timed(s, place, kernel);
  const int partial = aotmm_products[kernel].role == AOTMM_ROLE_PARTIAL;
  if (!measured) return 0;
  candidate each = {.place = place, .kernel = kernel, .split = partial ? measured->split : 1};
  if (partial && (each.split < splits[0] || each.split > slice_limit(s->problem) ||
                  each.split > deepest(kernel, s->problem) || !set_sums_of(s, &each, to)))
    return 1;
  aotmm_plan plan = {.measured = 1, .cost = measured->ns, .pdl = measured->pdl && aotmm_kernels[kernel].pdl};
  to->reason = complete(s, &each, &plan, &to->found);
  if (to->reason == AOTMM_FITS && better(&plan, &to->best)) to->best = plan;
  return 1;
}

/* Return whether a launch is `pdl` by the formula alone. */
static int starts_early(const candidate *each, const terms *t, int i) {
  const int full = t->waves[i] > 0.5f && t->waves[i] <= 1;
  return aotmm_kernels[each->kernel].pdl && aotmm_products[each->kernel].role != AOTMM_ROLE_PARTIAL &&
         t->time[i] < (full ? FULL_PDL_BELOW_NS : PDL_BELOW_NS);
}

/* Return whether a plan that takes so long by the formula is likely no better than the best. */
static int hopeless(const search *to, float time) {
  return to->best.cost >= 0 && (float)to->best.cost < (float)AOTMM_LEAST_CORRECTION * time;
}

/* Decide between the plans of the list, by the network if there is one, and those that were measured. */
static void decide(const query *s, search *to) {
  _Static_assert(AOTMM_AT_ONCE % 2 == 0 && LANES % AOTMM_AT_ONCE == 0, "plans at once are pairs of one octet");
  const candidate *chosen = NULL;
  plan_inputs inputs;
  int64_t found;
  for (int number = 0; number < to->count && !(s->network && hopeless(to, to->times[number])); number += AOTMM_AT_ONCE) {
    const int first = number % LANES, count = to->count - (number - first);
    const candidate *octet = to->list + number - first;
    const int end = count < first + AOTMM_AT_ONCE ? count : first + AOTMM_AT_ONCE;
    int pdl[LANES];
    terms t;
    if (s->network) {
      if (first == 0) set_inputs(s, octet, count < LANES ? count : LANES, &inputs);
      correct(s, octet, &inputs, first, end, t.time, pdl);
    } else {
      set_terms(s, octet, end, &t);
      for (int i = first; i < end; i++) pdl[i] = starts_early(octet + i, &t, i);
    }
    for (int i = first; i < end; i++) {
      const aotmm_plan plan = {.kernel = octet[i].kernel, .split = octet[i].split, .copies = octet[i].place->copies,
                               .pdl = (uint32_t)pdl[i], .cost = as_cost(t.time[i] + octet[i].place->time)};
      if (!better(&plan, &to->best)) continue;
      to->best = plan, chosen = octet + i;
    }
  }
  if (chosen) complete(s, chosen, &to->best, &found);
}

/* Return the number of the first placement that is looked at where the guards of a kernel hold, or of all placements. */
static int placement_of(const query *s, uint32_t kernel) {
  int placement = s->first;
  while (placement < s->count && !guards_hold_in(s, placement, kernel)) placement++;
  return placement;
}

/* Return whether a kernel takes any strides. */
static int is_generic(uint32_t kernel) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  for (uint32_t i = 0; i < k->guard_count; i++) {
    const aotmm_guard *guard = k->guards + i;
    if (guard->value >= AOTMM_PRODUCT_STRIDE_AM && guard->value <= AOTMM_PRODUCT_STRIDE_CN) return 0;
  }
  return 1;
}

/* Find the best plan with one kernel, or return the reason why there is none. */
static int32_t search_kernel(query *s, uint32_t kernel, search *to) {
  const int number = placement_of(s, kernel);
  placement *place = s->placements + number;
  if (number == s->count) return AOTMM_BROKEN_GUARD;
  to->found = s->device->shared_bytes;
  if (aotmm_kernels[kernel].shared_bytes > (uint32_t)s->device->shared_bytes) return AOTMM_TOO_MUCH_SHARED;
  const slicings all = slicings_of(s, kernel, is_generic(kernel));
  if (all.count && !consider_measured(s, place, kernel, to)) {
    for (int i = 0; i < all.count; i++) {
      candidate each = {.place = place, .kernel = kernel, .split = all.splits[i]};
      terms t;
      set_terms(s, &each, 1, &t);
      if (t.valid[0]) consider(s, &each, t.time[0], t.work_tiles[0], to);
    }
  }
  decide(s, to);
  return to->reason;
}

enum { NO_KERNEL = UINT32_MAX };

/* Return the plainest sibling that has the epilogue and fits the device, or NO_KERNEL. */
static uint32_t plainest(const query *s, aotmm_group siblings) {
  const uint16_t *kernel = aotmm_order + siblings.first, *end = kernel + siblings.count;
  for (; kernel < end; kernel++) {
    const aotmm_product *k = aotmm_products + *kernel;
    if ((k->role == AOTMM_ROLE_PARTIAL || k->epilogue >= s->epilogue) &&
        aotmm_kernels[*kernel].shared_bytes <= (uint32_t)s->device->shared_bytes)
      return keeps_order(s->order, *kernel) ? *kernel : NO_KERNEL; /* siblings have one order */
  }
  return NO_KERNEL;
}

/* Return the most rows that tiles may have. If there is a tile of at most TALL rows, which come first, then no more than half
   of a taller one may lie behind C. */
static float most_rows(const query *s, const aotmm_alike *alike) {
  const aotmm_group *siblings = aotmm_siblings + alike->first, *end = siblings + alike->count;
  for (; s->network && siblings < end && aotmm_tiles[aotmm_order[siblings->first]].block_m <= TALL; siblings++) {
    if (plainest(s, *siblings) != NO_KERNEL) return fmaxf(TALL, 2 * (float)s->problem->M);
  }
  return FLT_MAX;
}

/* Return a time that every reduce takes at least. */
static float least_reduce(const query *s) {
  const aotmm_group group = aotmm_reduces[s->problem->dtype_c];
  float least = INFINITY;
  for (int i = 0; i < group.count; i++) least = fminf(least, reduce_time(s, aotmm_order[group.first + i], splits[0]));
  return least;
}

/* Consider the plans that wait, the fastest first, until all others are too slow. */
static void consider_waiting(const query *s, search *to) {
  union {
    float time;
    int32_t bits;
  } least;
  while (to->waiting && (least.time = fastest(to->plans, to->waiting)) < INFINITY) {
    const int number = least.bits & PLAN_NUMBER, lane = number % LANES;
    octet_plans *plans = to->plans + number / LANES;
    least.bits -= number; /* no plan that waits takes less */
    if (too_slow(to, least.time)) break;
    plans->least[lane] = INFINITY;
    const uint32_t kernel = plainest(s, aotmm_siblings[plans->siblings + (uint32_t)lane]);
    if (kernel != NO_KERNEL)
      consider(s, &(candidate){.place = plans->place, .kernel = kernel, .split = plans->split}, plans->time[lane],
               plans->work_tiles[lane], to);
  }
  to->waiting = 0;
}

/* Leave out plans of kernels that were timed. */
static void leave_timed_out(const query *s, octet_plans *plans) {
  for (uint32_t i = 0; i < LANES; i++)
    if (timed(s, plans->place, aotmm_order[aotmm_siblings[plans->siblings + i].first])) plans->least[i] = INFINITY;
}

/* Return whether the sums of so many slices may fit the workspace. */
static int sums_may_fit(const query *s, const placement *place, uint32_t split) {
  return split == 1 || saturated(saturated(saturated(s->problem->M, s->problem->N), s->problem->batch), 4 * split) <= s->limit - place->bytes;
}

/* Let the plans of kernels of equal guards wait to be considered, but those that were measured at once. */
static void search_alike(const query *s, const aotmm_alike *alike, placement *place, search *to) {
  const slicings all = slicings_of(s, aotmm_order[aotmm_siblings[alike->first].first], !alike->contiguous);
  if (!all.count) return;
  const uint32_t first = alike->first, end = first + alike->count;
  for (uint32_t i = first; i < end && is_measured(s); i++) {
    const uint32_t kernel = plainest(s, aotmm_siblings[i]);
    if (kernel != NO_KERNEL) consider_measured(s, place, kernel, to);
  }
  alike_plans plans = {.place = place, .rows = most_rows(s, alike)};
  plans.reduce = all.splits == whole ? 0 : least_reduce(s);
  for (plans.first = first; plans.first < end; plans.first = plans.end) {
    plans.end = end - plans.first < MOST_PLANS ? end : plans.first + MOST_PLANS;
    for (int i = 0; i < all.count && sums_may_fit(s, place, all.splits[i]); i++) {
      if (to->waiting + (int)ceil_div(plans.end - plans.first, LANES) > MOST_OCTETS) consider_waiting(s, to);
      octet_plans *added = to->plans + to->waiting;
      plans.split = all.splits[i];
      const int count = set_times(s, &plans, added, to->waiting);
      if (!count) break; /* there is none with more slices either */
      to->waiting += count;
      for (; is_measured(s) && added < to->plans + to->waiting; added++) leave_timed_out(s, added);
    }
  }
}

static void search_all(query *s, search *to) {
  const aotmm_problem *p = s->problem;
  const aotmm_group group = aotmm_mains[p->grouped][p->dtype_a][p->dtype_b][p->dtype_c];
  for (const aotmm_alike *each = aotmm_alikes + group.first, *end = each + group.count; each < end; each++) {
    if (each->contiguous & ~s->contiguous) continue;
    const int placement = placement_of(s, aotmm_order[aotmm_siblings[each->first].first]);
    if (placement < s->count) search_alike(s, each, s->placements + placement, to);
  }
  consider_waiting(s, to);
  decide(s, to);
}

/* Return the blocks that count as beside each other for group_m, as in launcher.h, in tiles. */
static int64_t near_tiles(const query *s, uint32_t kernel, int64_t tiles) {
  const int64_t together = num_ctas(aotmm_kernels + kernel), concurrent = concurrent_tiles(s, kernel);
  const int alternates = s->table->network && s->table->corrections[kernel].alternates;
  int64_t near = concurrent / 2;
  if (alternates && together > 1) {
    near = AOTMM_ALTERNATING_NEIGHBOURS / together;
    if (near > concurrent) near = concurrent;
  } else if (tiles <= concurrent) {
    near = AOTMM_NEIGHBOURS / together;
    if (near > tiles) near = tiles;
  }
  return near > 0 ? near : 1;
}

/* Return the group_m of launcher.h. */
static uint32_t group_of(const query *s, uint32_t kernel) {
  static const uint8_t groups[] = AOTMM_GROUPS;
  const int64_t block_m = aotmm_products[kernel].block_m, block_n = aotmm_products[kernel].block_n;
  const int64_t down = ceil_div(s->problem->M, block_m), across = s->problem->N ? ceil_div(s->problem->N, block_n) : 1;
  const int64_t near = near_tiles(s, kernel, tiles_of(kernel, s->problem->M, s->problem->N));
  double fewest = DBL_MAX;
  uint32_t best = 0;
  for (unsigned i = 0; i < sizeof groups && (i == 0 || groups[i - 1] < down); i++) {
    int64_t rows = i && groups[i] > down ? down : groups[i];
    if (rows > near) rows = near;
    double columns = (double)near / (double)rows;
    if (columns > (double)across) columns = (double)across;
    double elements = (double)near / columns * (double)block_m + columns * (double)block_n;
    if (elements < fewest) fewest = elements, best = groups[i];
  }
  return best;
}

/* ---- a copy of an operand that begins within a cache line */

/* Return whether fast kernels take an operand as it lies, and it begins within a cache line. */
static int off_a_line(const query *s, int i) {
  const int32_t types[2] = {s->problem->dtype_a, s->problem->dtype_b};
  const quantities *q = &s->placements[0].q;
  return lies_well(q, i, bytes_of_dtype[types[i]]) && q->value[operands[i].pointer] & (LINE_BYTES - 1);
}

/* Replace *best, a plan without copies, by one with a copy of A or B on whole cache lines if that costs clearly less. It is the
   one of them that begins within a line and has fewer bytes; its copy takes a small part of the time of *best. */
static __attribute__((noinline, cold)) void consider_lines(query *s, aotmm_plan *best) {
  const int first = s->count;
  copy_layout layouts[OPERANDS];
  int64_t fewest = AOTMM_LINE_COPY;
  uint32_t copy = 0;
  search found;
  for (int i = 0; i < 2; i++) {
    if (!off_a_line(s, i)) continue;
    set_layouts(layouts, &s->placements[0].q, s->problem, 1u << i);
    if (layouts[i].bytes <= fewest) fewest = layouts[i].bytes, copy = 1u << i;
  }
  if (!copy) return;
  add_placement(s, copy);
  if (s->count == first || s->placements[first].time > (float)best->cost / AOTMM_LINE_PART) return;
  s->first = first;
  nothing_found(&found, s);
  found.best = *best;
  found.best.cost -= best->cost / AOTMM_LINE_GAIN;
  search_all(s, &found);
  if (!found.best.copies) return;
  *best = found.best;
  best->group_m = group_of(s, best->kernel);
}

/* ---- panels: parts of C, for products whose copies exceed the limit */

/* Return the size of the fewest, about equal parts of at most `most` elements; a multiple of PANEL, or all. */
static int64_t evenly(int64_t size, int64_t most) {
  return size <= most ? size : saturated(ceil_div(ceil_div(size, ceil_div(size, most)), PANEL), PANEL);
}

static int64_t whole_panels(int64_t size) { return saturated(ceil_div(size, PANEL), PANEL); }

/* Return whether the excluded copies, or those of A and B and the sums of a given number of slices, fit the limit for a
   panel of so many rows and columns. */
static int copies_fit(const query *s, int64_t rows, int64_t cols) {
  const aotmm_problem *p = s->problem;
  const int sliced = s->order.slices > 1; /* then C is not copied */
  const uint32_t copies = sliced ? s->needed : s->excluded;
  const int64_t sums = sliced ? saturated(whole_panels(rows), saturated(whole_panels(cols), 4 * s->order.slices)) : 0;
  quantities part = s->placements[0].q;
  copy_layout layouts[OPERANDS];
  part.value[AOTMM_PRODUCT_M] = rows, part.value[AOTMM_PRODUCT_N] = cols;
  set_layouts(layouts, &part, p, copies);
  return sums <= s->limit && bytes_of_copies(layouts, copies) <= s->limit - sums;
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
    s.order = whole->order;
    nothing_found(&found, &s);
    if (kernel == ANY_KERNEL)
      search_all(&s, &found);
    else
      search_kernel(&s, kernel, &found);
    if (found.best.cost < 0) continue;
    found.best.cost = saturated(saturated(cut.down, cut.across), found.best.cost);
    found.best.group_m = group_of(&s, found.best.kernel);
    found.best.panel_m = cut.rows, found.best.panel_n = cut.cols;
    if (best->cost < 0 || found.best.cost < best->cost) *best = found.best;
  }
}

/* Return whether panels of one product are to be tried: for copies that exceed the limit; with a given number of slices, if
   there is no plan without them. */
static int needs_panels(const query *s, const aotmm_plan *best) {
  if (s->problem->grouped || s->problem->batch != 1) return 0;
  return s->order.slices > 1 ? best->cost < 0 && s->limit && s->problem->M && s->problem->N : s->excluded != 0;
}

/* Return whether a copy on whole cache lines may pay: no operand is copied, or turned for its own sake, and there is a network. */
static int may_have_lines(const query *s, const aotmm_plan *best) {
  const aotmm_problem *p = s->problem;
  return s->network && s->limit > 0 && best->cost >= 0 && !best->copies && p->batch == 1 && !p->grouped && p->M && p->N && p->K &&
         !worth_along_m(&s->placements[0].q, bytes_of_dtype[p->dtype_a]);
}

int choose(const aotmm_problem *p, const aotmm_device *device, uint64_t limit, aotmm_plan *plan) {
  query s;
  search found;
  start(&s, p, NULL, device, limit);
  nothing_found(&found, &s);
  search_all(&s, &found);
  if (found.best.cost >= 0) found.best.group_m = group_of(&s, found.best.kernel);
  if (needs_panels(&s, &found.best)) consider_panels(&s, ANY_KERNEL, &found.best);
  if (may_have_lines(&s, &found.best)) consider_lines(&s, &found.best);
  *plan = found.best;
  if (plan->cost >= 0) return AOTMM_OK;
  if (s.order.kernels)
    return aotmm_fail(AOTMM_NO_ORDER, 0, -1, "",
                      "no kernel of pack %s that adds up as batch_invariant asks (%s, slices of K: %d) takes these operands of M=%lld "
                      "N=%lld K=%lld batch=%lld in a workspace of %lld bytes; `check` says why; align the operands to 16 bytes, or give "
                      "more memory",
                      aotmm_arch, s.order.kernels, s.order.slices, (long long)p->M, (long long)p->N, (long long)p->K,
                      (long long)p->batch, (long long)s.limit);
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
  if (found.best.cost >= 0) found.best.group_m = group_of(&s, kernel);
  if (needs_panels(&s, &found.best)) consider_panels(&s, kernel, &found.best);
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
  const int32_t role = aotmm_products[kernel].role;
  memset(evaluation, 0, sizeof *evaluation);
  if (role == AOTMM_ROLE_REDUCE || role == AOTMM_ROLE_COPY)
    evaluation->reason = AOTMM_NO_PRODUCT;
  else if (!same_types(kernel, problem))
    evaluation->reason = AOTMM_OTHER_TYPES;
  else if (!keeps_order(order_of(problem), kernel))
    evaluation->reason = AOTMM_OTHER_ORDER;
  else
    return evaluate(problem, device, limit, kernel, evaluation);
  return AOTMM_OK;
}
