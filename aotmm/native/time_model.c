/* The time model of launcher.h: the formula, and its correction by the network of a tuning table. */
#include "core.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <float.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

float copy_time(const query *s, int kernel, const quantities *copy, int together, int element_bytes) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  const int64_t *value = copy->value;
  const float elements = (float)value[AOTMM_COPY_BATCH] * (float)value[AOTMM_COPY_M] * (float)value[AOTMM_COPY_N];
  return (together ? 0 : c->base_ns) + elements * (float)(2 * element_bytes) * c->ns_per_byte;
}

float reduce_time(const query *s, int kernel, uint32_t split) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  const aotmm_problem *p = s->problem;
  const float bytes = (float)(4 * split + (uint32_t)bytes_of_dtype[p->dtype_c]);
  return c->base_ns + (float)p->batch * (float)p->M * (float)p->N * bytes * c->ns_per_byte;
}

int64_t usable(const aotmm_device *device, int64_t blocks) {
  return blocks > 2 ? (int64_t)device->multiprocessors * AOTMM_USABLE / AOTMM_OF_MULTIPROCESSORS : device->multiprocessors;
}

/* Return the tiles that a device computes at once, `beside` on each multiprocessor or one on a cluster of them; at least 1. */
int64_t concurrent_tiles(const query *s, uint32_t kernel) {
  const int64_t together = num_ctas(aotmm_kernels + kernel), blocks = usable(s->device, together);
  return together == 1 ? blocks * (int64_t)aotmm_tiles[kernel].beside : blocks < together ? 1 : blocks / together;
}

/* ---- the formula */

/* Floats that are computed at once; compilers make two vectors of it for processors with shorter ones. */
typedef float vector __attribute__((vector_size(4 * LANES)));

typedef int32_t int_vector __attribute__((vector_size(4 * LANES)));

INLINE vector vector_at(const float *first) {
  vector found;
  memcpy(&found, first, sizeof found);
  return found;
}

INLINE int_vector numbers_at(const int32_t *first) {
  int_vector found;
  memcpy(&found, first, sizeof found);
  return found;
}

INLINE vector lesser(vector a, vector b) {
  for (int i = 0; i < LANES; i++) a[i] = a[i] < b[i] ? a[i] : b[i];
  return a;
}

INLINE vector greater(vector a, vector b) {
  for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
}

/* Return the numbers where `mask` is -1, and 0 where it is 0. */
INLINE vector where(int_vector mask, vector numbers) { return (vector)(mask & (int_vector)numbers); }

/* Round numbers down and up. Processors without an instruction for it, which have no FMA either, call functions. */
INLINE vector down_to_wholes(vector numbers) {
  for (int i = 0; i < LANES; i++) numbers[i] = __builtin_floorf(numbers[i]);
  return numbers;
}

INLINE vector up_to_wholes(vector numbers) {
  for (int i = 0; i < LANES; i++) numbers[i] = __builtin_ceilf(numbers[i]);
  return numbers;
}

INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE float smaller(float a, float b) { return a < b ? a : b; }

/* Return the part of an operand's lines that begin within a unit of so many bytes, or k_shift elements before. */
static float split_lines(const quantities *q, int operand, int64_t element_bytes, int64_t unit) {
  const operand_values *o = operands + operand;
  const int by_rows = contiguous(q, o->col_stride);
  const int64_t pitch = q->value[by_rows ? o->row_stride : o->col_stride];
  const int64_t address = behind(q->value[o->pointer], -q->value[AOTMM_PRODUCT_K_SHIFT] * element_bytes);
  const int64_t rest = (int64_t)(rest_of(pitch, element_bytes, (uint64_t)unit) |
                                 rest_of(q->value[o->batch_stride], element_bytes, (uint64_t)unit));
  if (rest == 0) return (address & (unit - 1)) != 0;
  const int64_t least = rest & -rest; /* lines begin at multiples of it, or none does */
  return address & (least - 1) ? 1 : 1 - (float)least / (float)unit;
}

/* What the formula takes from plans but for their kernels. */
typedef struct given {
  lanes lines_a, lines_b, split, reduce;
  lanes least_steps, most_waves; /* of slices */
} given;

INLINE void set_given(const query *s, const placement *place, uint32_t split, float reduce, int i, given *to) {
  const int any = s->order.slices || split == 1; /* a number that is asked for is valid */
  to->lines_a[i] = place->lines_a, to->lines_b[i] = place->lines_b;
  to->split[i] = (float)split, to->reduce[i] = reduce;
  to->least_steps[i] = any ? 0 : split > AOTMM_USUAL_SPLIT ? AOTMM_LONG_STEPS : AOTMM_LEAST_STEPS;
  to->most_waves[i] = any ? INFINITY : AOTMM_MOST_WAVES;
}

static inline void set_lane(aotmm_octet *to, int i, uint32_t kernel, const aotmm_constants *constants) {
  const aotmm_tile *tile = aotmm_tiles + kernel;
  const aotmm_constants *c = constants + kernel;
  to->block_m[i] = tile->block_m, to->block_n[i] = tile->block_n, to->block_k[i] = tile->block_k;
  to->of_cluster[i] = tile->of_cluster, to->share_a[i] = tile->share_a, to->share_b[i] = tile->share_b;
  to->beside[i] = tile->beside, to->busy[i] = tile->busy;
  to->line[i] = tile->line, to->sum_bytes[i] = tile->sum_bytes;
  to->base_ns[i] = c->base_ns, to->ns_per_k_step[i] = c->ns_per_k_step, to->ns_per_tile[i] = c->ns_per_tile;
  to->ns_per_byte[i] = c->ns_per_byte, to->ns_per_taken_byte[i] = c->ns_per_taken_byte;
  to->ns_per_loaded_byte[i] = c->ns_per_loaded_byte;
}

void set_octets(const aotmm_tuning *tuning) {
  for (uint32_t i = 0; i < LANES * aotmm_octet_count; i++) {
    const uint16_t *kernels = aotmm_order + aotmm_siblings[i].first;
    const int count = aotmm_siblings[i].count, partial = aotmm_products[*kernels].role == AOTMM_ROLE_PARTIAL;
    aotmm_octet *to = tuning->octets + i / LANES;
    set_lane(to, (int)(i % LANES), *kernels, tuning->table.constants);
    to->epilogue[i % LANES] = !count ? -1 : partial ? AOTMM_EPILOGUE_COUNT : aotmm_products[kernels[count - 1]].epilogue;
  }
}

/* A loop over all lanes, without calls and branches, so that compilers compute several at once. */
INLINE void formula_of(const query *s, const sizes *size, const aotmm_octet *k, const given *g, terms *restrict t) {
  const float M = size->M, N = size->N, K = size->K, batch = size->batch;
  const float others = s->multiprocessors - s->in_clusters; /* exact; compilers gather the one or the other by its address */
  for (int i = 0; i < LANES; i++) {
    const float part = k->of_cluster[i], at_once = s->in_clusters + (part < 0.5f ? 0 : others);
    const float down = larger(1, __builtin_ceilf(M / k->block_m[i])), across = larger(1, __builtin_ceilf(N / k->block_n[i]));
    const float work_tiles = down * across * batch * g->split[i];
    t->work_tiles[i] = work_tiles;
    t->rows[i] = M / down, t->cols[i] = N / across;
    const float steps = __builtin_ceilf(K / k->block_k[i]) / g->split[i];
    t->steps[i] = __builtin_ceilf(steps);
    const float places = larger(1, __builtin_floorf(at_once * part)), concurrent = places * k->beside[i];
    t->concurrent[i] = concurrent, t->waves[i] = work_tiles / concurrent;
    t->valid[i] = -((steps >= g->least_steps[i]) & (t->waves[i] <= g->most_waves[i]));
    const float whole = __builtin_floorf(t->waves[i]), rest = __builtin_ceilf(larger(0, work_tiles - whole * concurrent) / places);
    t->rounds[i] = whole + smaller(rest, 1) * larger(rest, k->busy[i]) / larger(k->beside[i], k->busy[i]);
    const float bytes_a = t->rows[i] * (1 + (float)AOTMM_SPLIT_A * g->lines_a[i]) * k->line[i];
    const float bytes_b = t->cols[i] * (1 + (float)AOTMM_SPLIT_B * g->lines_b[i]) * k->line[i];
    t->fixed[i] = k->base_ns[i] + t->rounds[i] * k->ns_per_tile[i];
    t->multiply[i] = t->rounds[i] * t->steps[i] * k->ns_per_k_step[i];
    t->take[i] = t->rounds[i] * t->steps[i] * ((bytes_a * k->share_a[i] + bytes_b * k->share_b[i]) * k->ns_per_taken_byte[i]);
    t->load[i] = work_tiles * t->steps[i] * ((bytes_a + bytes_b) * k->ns_per_loaded_byte[i]);
    t->read[i] = size->bytes_moved * k->ns_per_byte[i];
    t->sums[i] = work_tiles * k->block_m[i] * k->block_n[i] * k->sum_bytes[i] * k->ns_per_byte[i];
    const float squares = t->multiply[i] * t->multiply[i] + t->take[i] * t->take[i] + t->load[i] * t->load[i] + t->read[i] * t->read[i];
    t->time[i] = t->fixed[i] + __builtin_sqrtf(squares) + t->sums[i] + g->reduce[i];
    t->sums[i] += g->reduce[i];
  }
}

/* Of groups of rows, the time is the geometric mean over routings, and the other terms are those of equal groups. */
INLINE void formula(const query *s, int routings, const aotmm_octet *k, const given *g, terms *restrict t) {
  terms other;
  formula_of(s, s->sizes, k, g, t);
  if (routings == 1) return;
  formula_of(s, s->sizes + 1, k, g, &other);
  for (int i = 0; i < LANES; i++) t->time[i] = __builtin_sqrtf(t->time[i] * other.time[i]);
}

/* Set what the formula takes from at most LANES plans. */
INLINE void gather(const query *s, const candidate *plans, int count, aotmm_octet *kernels, given *g) {
  for (int i = 0; i < LANES; i++) {
    const candidate *each = plans + (i < count ? i : 0);
    set_lane(kernels, i, each->kernel, s->table->constants);
    set_given(s, each->place, each->split, each->reduce, i, g);
  }
}

INLINE void terms_of(const query *s, const candidate *plans, int count, terms *restrict t) {
  aotmm_octet kernels;
  given g;
  gather(s, plans, count, &kernels, &g);
  formula(s, s->routings, &kernels, &g, t);
}

/* `routings` is a constant, since masks that live across a branch are narrowed and widened. */
INLINE int times_by(const query *s, int routings, const alike_plans *all, octet_plans *restrict plans, int number) {
  const placement *place = all->place;
  const int_vector lane = {0, 1, 2, 3, 4, 5, 6, 7}, infinite = (int_vector)((vector){0} + INFINITY);
  int count = 0;
  given g;
  for (int i = 0; i < LANES; i++) set_given(s, place, all->split, 0, i, &g);
  for (uint32_t first = all->first; first < all->end; first += LANES) {
    const aotmm_octet *kernels = s->octets + first / LANES;
    octet_plans *to = plans + count;
    int32_t any = 0;
    terms t;
    if (kernels->block_m[0] > all->rows) break;
    formula(s, routings, kernels, &g, &t);
    const int_vector valid =
        numbers_at(t.valid) & (vector_at(kernels->block_m) <= all->rows) & (numbers_at(kernels->epilogue) >= s->epilogue);
    const vector least = lesser(vector_at(t.time) + all->reduce + place->time, (vector){0} + FLT_MAX);
    const int_vector numbered = ((int_vector)least & ~PLAN_NUMBER) | ((number + count) * LANES + lane);
    const int_vector found = (valid & numbered) | (~valid & infinite);
    memcpy(to->least, &found, sizeof found);
    memcpy(to->time, t.time, sizeof t.time);
    memcpy(to->work_tiles, t.work_tiles, sizeof t.work_tiles);
    to->place = all->place, to->siblings = first, to->split = all->split;
    for (int i = 0; i < LANES; i++) any |= valid[i];
    count += any != 0;
  }
  return count;
}

INLINE int times_of(const query *s, const alike_plans *all, octet_plans *restrict plans, int number) {
  return s->routings == 1 ? times_by(s, 1, all, plans, number) : times_by(s, ROUTINGS, all, plans, number);
}

INLINE float fastest_of(const octet_plans *plans, int count) {
  vector least = vector_at(plans[count - 1].least);
  for (int octet = 0; octet + 1 < count; octet += 2)
    least = lesser(lesser(vector_at(plans[octet].least), vector_at(plans[octet + 1].least)), least);
  return smaller(smaller(smaller(least[0], least[4]), smaller(least[2], least[6])),
                 smaller(smaller(least[1], least[5]), smaller(least[3], least[7])));
}

/* ---- the network */

enum { VECTORS = AOTMM_HIDDEN / LANES, SECOND_VECTORS = AOTMM_SECOND / LANES /* of nodes; registers with AVX2 hold 8 */ };
_Static_assert(AOTMM_HIDDEN % LANES == 0 && AOTMM_SECOND % LANES == 0, "nodes");
enum { LAUNCHES = 2 /* of a plan, without pdl and with it */, TOGETHER = 4 /* launches whose second nodes registers hold */ };
enum { PART = 4 /* vectors of hidden nodes, which registers hold for two plans */ };
_Static_assert(AOTMM_HIDDEN <= 64 && VECTORS % PART == 0, "active_nodes, set_nodes");
_Static_assert(TOGETHER == 2 * LAUNCHES && LANES * LAUNCHES % TOGETHER == 0, "TOGETHER");

INLINE vector positive(vector x) {
  for (int i = 0; i < LANES; i++) x[i] = x[i] > 0 ? x[i] : 0;
  return x;
}

/* Return a * b + c, rounded once: half of the instructions. Processors without it call a function for each number. */
INLINE vector fused(float a, vector b, vector c) {
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a, b[i], c[i]);
  return c;
}

INLINE float sum(vector x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Add inputs, times their weights, to the hidden nodes. */
INLINE void add(vector hidden[VECTORS], const float (*weights)[AOTMM_HIDDEN], const float *inputs, int count) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < VECTORS; v++) hidden[v] = fused(inputs[i], vector_at(weights[i] + v * LANES), hidden[v]);
}

/* Return the hidden nodes that are not 0 in all launches, as bits; a float holds those of two vectors. */
INLINE uint64_t active_nodes(const float hidden[TOGETHER][AOTMM_HIDDEN]) {
  const vector bits = {1, 2, 4, 8, 16, 32, 64, 128};
  uint64_t found = 0;
  for (int first = 0; first < AOTMM_HIDDEN; first += 2 * LANES) {
    vector low = {0}, high = {0};
    for (int launch = 0; launch < TOGETHER; launch++)
      low += vector_at(hidden[launch] + first), high += vector_at(hidden[launch] + first + LANES);
    found |= (uint64_t)(int32_t)sum(where(low > 0, bits) + where(high > 0, 256 * bits)) << first;
  }
  return found;
}

/* Set the outputs of some launches by their hidden nodes, of which about half are 0 in all. Each weight is loaded once. */
INLINE void set_outputs(const aotmm_network *network, const float hidden[TOGETHER][AOTMM_HIDDEN], float found[TOGETHER]) {
  vector nodes[TOGETHER][SECOND_VECTORS];
  for (int launch = 0; launch < TOGETHER; launch++)
    for (int v = 0; v < SECOND_VECTORS; v++) nodes[launch][v] = vector_at(network->second_bias + v * LANES);
  for (uint64_t left = active_nodes(hidden); left; left &= left - 1)
    for (int i = __builtin_ctzll(left), v = 0; v < SECOND_VECTORS; v++) {
      const vector weights = vector_at(network->second[i] + v * LANES);
      for (int launch = 0; launch < TOGETHER; launch++) nodes[launch][v] = fused(hidden[launch][i], weights, nodes[launch][v]);
    }
  for (int launch = 0; launch < TOGETHER; launch++) {
    vector parts = {0};
    for (int v = 0; v < SECOND_VECTORS; v++) parts += positive(nodes[launch][v]) * vector_at(network->outputs + v * LANES);
    found[launch] = sum(parts);
  }
}

/* Return logarithms to the base 2 of positive numbers, without calls: 2 / ln(2) * artanh((m - 1) / (m + 1)) and the exponent,
   m from the root of 1/2 to that of 2, where what is left out of the series is about 1e-9. */
INLINE vector logarithms(vector numbers) {
  enum { ROOT_OF_HALF = 0x3f3504f3 /* as a float's bits */, EXPONENT = 1 << 23 };
  const int_vector bits = (int_vector)numbers, exponents = (bits - ROOT_OF_HALF) >> 23;
  const vector m = (vector)(bits - exponents * EXPONENT), x = (m - 1) / (m + 1), y = x * x;
  const vector series = 2.88539008f + y * (0.961796694f + y * (0.577078016f + y * (0.412198583f + y * 0.320598898f)));
  return __builtin_convertvector(exponents, vector) + x * series;
}

INLINE float logarithm(float size) { return size > 1 ? log2f(size) : 0; }

INLINE int a_by_columns(const quantities *q) { return !contiguous(q, AOTMM_PRODUCT_STRIDE_AK); }

INLINE int b_by_columns(const quantities *q) {
  return contiguous(q, AOTMM_PRODUCT_STRIDE_BK) && !contiguous(q, AOTMM_PRODUCT_STRIDE_BN);
}

INLINE void hidden_of(const query *s, placement *place) {
  const aotmm_problem *p = s->problem;
  const quantities *q = &place->q;
  const float inputs[AOTMM_PROBLEM_INPUTS] = {logarithm((float)p->M),
                                              logarithm((float)p->N),
                                              logarithm((float)p->K),
                                              logarithm(s->sizes[0].bytes_moved),
                                              a_by_columns(q),
                                              b_by_columns(q),
                                              place->lines_a,
                                              place->lines_b,
                                              place->sectors_a,
                                              place->sectors_b,
                                              logarithm((float)p->batch)};
  vector hidden[VECTORS] = {{0}};
  add(hidden, s->table->network->problem, inputs, AOTMM_PROBLEM_INPUTS);
  memcpy(place->hidden, hidden, sizeof hidden);
}

INLINE void inputs_by(const query *s, const candidate *plans, int count, const aotmm_octet *k, const given *g, const terms *t,
                      plan_inputs *restrict to) {
  const float M = (float)s->problem->M, N = (float)s->problem->N, K = (float)s->problem->K;
  const float line = K * (float)bytes_of_dtype[s->problem->dtype_a];
  const vector ones = (vector){0} + 1, time = vector_at(t->time), waves = vector_at(t->waves), rounds = vector_at(t->rounds);
  const vector block_m = vector_at(k->block_m), block_n = vector_at(k->block_n), block_k = vector_at(k->block_k);
  const vector split = vector_at(g->split), concurrent = vector_at(t->concurrent);
  const vector clustered = where(vector_at(k->of_cluster) < 1, ones);
  lanes alternates, across_K, root;
  for (int i = 0; i < LANES; i++) {
    const candidate *each = plans + (i < count ? i : 0);
    alternates[i] = (float)s->table->corrections[each->kernel].alternates;
    across_K[i] = (float)(a_by_columns(&each->place->q) && !b_by_columns(&each->place->q));
  }
  const vector share = 1 / time, part = 1 / rounds, half = where(waves <= 0.5f, ones), one = where(waves <= 1, ones);
  const vector turns = down_to_wholes(rounds), odd = vector_at(alternates) * (turns - 2 * down_to_wholes(turns / 2));
  const vector of_M = M / block_m, of_N = N / block_n, of_K = K / block_k;
  const vector down = greater(ones, up_to_wholes(of_M)), across = greater(ones, up_to_wholes(of_N));
  const vector steps = greater(ones, vector_at(t->steps)), all_steps = up_to_wholes(of_K), past = all_steps - of_K;
  /* the time of memory if each wave of tiles reads its rows of A and columns of B once */
  const vector tiles = vector_at(t->work_tiles) / split, at_once = lesser(tiles, concurrent);
  const vector rows = at_once * block_m, cols = at_once * block_n;
  const vector square = rows * block_n;
  for (int i = 0; i < LANES; i++) root[i] = __builtin_sqrtf(square[i]);
  const vector sides = lesser(2 * vector_at(root), lesser(rows, ones * M) + lesser(cols, ones * N));
  const vector reread = greater(ones, tiles / concurrent) * (sides * line) * vector_at(k->ns_per_byte);
  const vector log_time = logarithms(time), wave = lesser(waves, ones), other = one - half;
  const vector inputs[AOTMM_PLAN_INPUTS] = {log_time,
                                            vector_at(t->multiply) * share,
                                            vector_at(t->take) * share,
                                            vector_at(t->read) * share,
                                            vector_at(t->load) * share,
                                            vector_at(t->fixed) * share,
                                            lesser(ones, reread * share),
                                            wave,
                                            lesser(waves, 2 * ones),
                                            waves - (rounds - 1),
                                            part,
                                            logarithms(steps),
                                            past,
                                            past / steps,
                                            vector_at(across_K) * past,
                                            vector_at(t->rows) / block_m,
                                            vector_at(t->cols) / block_n,
                                            1 - (down - of_M),
                                            1 - (across - of_N),
                                            1 / down,
                                            1 / across,
                                            one,
                                            half,
                                            odd * lesser(ones, 2 * part),
                                            vector_at(t->sums) * share,
                                            logarithms(split),
                                            vector_at(t->steps) - all_steps / split,
                                            clustered * vector_at(g->lines_a),
                                            clustered * vector_at(g->lines_b)};
  const vector pdl[AOTMM_PDL_INPUTS] = {ones, half, other, log_time, log_time * other, wave};
  memcpy(to->of, inputs, sizeof inputs);
  memcpy(to->pdl, pdl, sizeof pdl);
  memcpy(to->time, t->time, sizeof t->time);
}

INLINE void inputs_of(const query *s, const candidate *plans, int count, plan_inputs *restrict to) {
  aotmm_octet kernels;
  given g;
  terms t;
  gather(s, plans, count, &kernels, &g);
  formula(s, s->routings, &kernels, &g, &t);
  inputs_by(s, plans, count, &kernels, &g, &t, to);
}

/* Add inputs of the plans in two lanes, times their weights, to the sums of hidden nodes from `first` on, and set these nodes.
   Each weight is loaded once for both. */
INLINE void add_to_both(vector sums[2][PART], const float (*weights)[AOTMM_HIDDEN], int first, const lanes *inputs, int count,
                        int lane, float (*nodes)[AOTMM_HIDDEN]) {
  for (int i = 0; i < count; i++)
    for (int v = 0; v < PART; v++)
      for (int plan = 0; plan < 2; plan++)
        sums[plan][v] = fused(inputs[i][lane + plan], vector_at(weights[i] + first + v * LANES), sums[plan][v]);
  for (int plan = 0; plan < 2; plan++)
    for (int v = 0; v < PART; v++) {
      const vector each = positive(sums[plan][v]);
      memcpy(nodes[LAUNCHES * plan] + first + v * LANES, &each, sizeof each);
    }
}

/* Set the hidden nodes of the launches of two plans, in a lane and the next one. */
INLINE void set_nodes(const query *s, const candidate *const plans[2], const plan_inputs *from, int lane,
                      float (*nodes)[AOTMM_HIDDEN]) {
  const aotmm_network *network = s->table->network;
  /* The last two inputs are 0 without clusters, the three before them without slices. */
  const int clustered = num_ctas(aotmm_kernels + plans[0]->kernel) > 1 || num_ctas(aotmm_kernels + plans[1]->kernel) > 1;
  const int count = AOTMM_PLAN_INPUTS - (clustered ? 0 : plans[0]->split > 1 || plans[1]->split > 1 ? 2 : 5);
  for (int first = 0; first < AOTMM_HIDDEN; first += PART * LANES) {
    vector sums[2][PART];
    for (int plan = 0; plan < 2; plan++) {
      const float *own = s->table->corrections[plans[plan]->kernel].hidden + first, *problem = plans[plan]->place->hidden + first;
      for (int v = 0; v < PART; v++) sums[plan][v] = vector_at(own + v * LANES) + vector_at(problem + v * LANES);
    }
    add_to_both(sums, network->plan, first, from->of, count, lane, nodes);
    add_to_both(sums, network->pdl, first, from->pdl, AOTMM_PDL_INPUTS, lane, nodes + 1);
  }
}

INLINE void times_by_network(const query *s, const candidate *plans, const plan_inputs *inputs, int first, int end, lanes time,
                             int pdl[LANES]) {
  float hidden[LANES * LAUNCHES][AOTMM_HIDDEN], outputs[LANES * LAUNCHES];
  for (int i = first; i < end; i += 2) /* two plans are TOGETHER launches */
    set_nodes(s, (const candidate *const[]){plans + i, plans + (i + 1 < end ? i + 1 : i)}, inputs, i, hidden + LAUNCHES * i);
  for (int launch = LAUNCHES * first; launch < LAUNCHES * end; launch += TOGETHER)
    set_outputs(s->table->network, hidden + launch, outputs + launch);
  for (int i = first; i < end; i++) {
    const float plain = outputs[LAUNCHES * i], early = outputs[LAUNCHES * i + 1];
    pdl[i] = aotmm_kernels[plans[i].kernel].pdl && early <= plain;
    time[i] = inputs->time[i] * expf((pdl[i] ? early : plain) + s->table->corrections[plans[i].kernel].shift);
  }
}

/* ---- for any processor, and for those that compute eight numbers at once, products and sums in one */

static void hidden_anywhere(const query *s, placement *place) { hidden_of(s, place); }

static void terms_anywhere(const query *s, const candidate *plans, int count, terms *restrict t) { terms_of(s, plans, count, t); }

static int times_anywhere(const query *s, const alike_plans *all, octet_plans *restrict plans, int number) {
  return times_of(s, all, plans, number);
}

static float fastest_anywhere(const octet_plans *plans, int count) { return fastest_of(plans, count); }

static void inputs_anywhere(const query *s, const candidate *plans, int count, plan_inputs *restrict to) { inputs_of(s, plans, count, to); }

static void correct_anywhere(const query *s, const candidate *plans, const plan_inputs *inputs, int first, int end, lanes time,
                             int pdl[LANES]) {
  times_by_network(s, plans, inputs, first, end, time, pdl);
}

static void (*set_hidden)(const query *, placement *) = hidden_anywhere; /* what the problem adds to the hidden nodes */
void (*set_terms)(const query *, const candidate *, int, terms *restrict) = terms_anywhere;
int (*set_times)(const query *, const alike_plans *, octet_plans *restrict, int number) = times_anywhere;
float (*fastest)(const octet_plans *, int count) = fastest_anywhere;
void (*set_inputs)(const query *, const candidate *, int, plan_inputs *restrict) = inputs_anywhere;
void (*correct)(const query *, const candidate *, const plan_inputs *, int, int, lanes, int[LANES]) = correct_anywhere;

#if defined __x86_64__ && !defined AOTMM_ANYWHERE
__attribute__((target("avx2,fma"))) static void hidden_avx2(const query *s, placement *place) { hidden_of(s, place); }

__attribute__((target("avx2,fma"))) static void terms_avx2(const query *s, const candidate *plans, int count, terms *restrict t) {
  terms_of(s, plans, count, t);
}

__attribute__((target("avx2,fma"))) static int times_avx2(const query *s, const alike_plans *all, octet_plans *restrict plans,
                                                           int number) {
  return times_of(s, all, plans, number);
}

__attribute__((target("avx2,fma"))) static float fastest_avx2(const octet_plans *plans, int count) { return fastest_of(plans, count); }

__attribute__((target("avx2,fma"))) static void inputs_avx2(const query *s, const candidate *plans, int count,
                                                            plan_inputs *restrict to) {
  inputs_of(s, plans, count, to);
}

__attribute__((target("avx2,fma"))) static void correct_avx2(const query *s, const candidate *plans, const plan_inputs *inputs,
                                                             int first, int end, lanes time, int pdl[LANES]) {
  times_by_network(s, plans, inputs, first, end, time, pdl);
}

/* As __builtin_cpu_supports, which not every compiler links into a shared library. */
__attribute__((constructor)) static void use_avx2(void) {
  enum { SAVED = 6 /* by the system: registers of 16 and of 32 bytes */ };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & SAVED) != SAVED || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return;
  set_hidden = hidden_avx2, set_terms = terms_avx2, set_times = times_avx2, fastest = fastest_avx2;
  set_inputs = inputs_avx2, correct = correct_avx2;
}
#endif

void describe(const query *s, placement *place) {
  const int64_t bytes_a = bytes_of_dtype[s->problem->dtype_a], bytes_b = bytes_of_dtype[s->problem->dtype_b];
  place->lines_a = split_lines(&place->q, 0, bytes_a, LINE_BYTES);
  place->lines_b = split_lines(&place->q, 1, bytes_b, LINE_BYTES);
  place->sectors_a = split_lines(&place->q, 0, bytes_a, SECTOR_BYTES);
  place->sectors_b = split_lines(&place->q, 1, bytes_b, SECTOR_BYTES);
  if (s->network) set_hidden(s, place);
}
