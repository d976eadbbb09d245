/* The time model of launcher.h: the formula, and its correction by the network of a tuning table. */
#include "core.h"

#include <math.h>
#include <string.h>

double copy_time(const query *s, int kernel, const quantities *copy, int element_bytes) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  return c->base_ns + (double)copy->value[AOTMM_COPY_M] * (double)copy->value[AOTMM_COPY_N] * (2 * element_bytes) * c->ns_per_byte;
}

double reduce_time(const query *s, int kernel, uint32_t split) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  const aotmm_problem *p = s->problem;
  return c->base_ns + (double)p->M * (double)p->N * (4 * split + (uint32_t)bytes_of_dtype[p->dtype_c]) * c->ns_per_byte;
}

/* Return the tiles that a device computes at once, one on each multiprocessor or cluster of them; at least 1. */
int64_t concurrent_tiles(const query *s, uint32_t kernel) {
  const int64_t blocks = s->device->multiprocessors, together = aotmm_kernels[kernel].num_ctas;
  return together == 1 ? blocks : blocks < together ? 1 : blocks / together;
}

/* ---- the formula */

/* Return the part of an operand's lines that begin within a cache line. */
static double split_lines(const quantities *q, int operand, int64_t element_bytes) {
  const operand_values *o = operands + operand;
  const int by_rows = contiguous(q, o->col_stride);
  const int64_t lines = q->value[by_rows ? o->rows : o->cols], address = q->value[o->pointer];
  const int64_t rest = (int64_t)rest_of(q->value[by_rows ? o->row_stride : o->col_stride], element_bytes, LINE_BYTES);
  if (rest == 0 || lines == 1) return (address & (LINE_BYTES - 1)) != 0;
  const int64_t least = rest & -rest; /* lines begin at multiples of it, or none does */
  return address & (least - 1) ? 1 : 1 - (double)least / LINE_BYTES;
}

tiling tiling_of(const query *s, const placement *place, uint32_t kernel) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  const aotmm_problem *p = s->problem;
  const int64_t down = ceil_div(p->M, k->block_m), across = ceil_div(p->N, k->block_n);
  const double line = (double)k->block_k * k->element_bytes;
  const double rows = down > 1 ? (double)p->M / (double)down : (double)p->M;
  const double cols = across > 1 ? (double)p->N / (double)across : (double)p->N;
  return (tiling){.place = place,
                  .kernel = kernel,
                  .tiles = saturated(saturated(down, across), p->batch),
                  .steps = steps_of(kernel, p->K),
                  .concurrent = concurrent_tiles(s, kernel),
                  .rows = rows,
                  .cols = cols,
                  .bytes_a = rows * (1 + AOTMM_SPLIT_A * place->lines_a) * line,
                  .bytes_b = cols * (1 + AOTMM_SPLIT_B * place->lines_b) * line};
}

double set_terms(const query *s, const tiling *of, uint32_t split, double reduce, terms *t) {
  const aotmm_kernel *k = aotmm_kernels + of->kernel;
  const aotmm_constants *c = constants_of(s, of->kernel);
  const int64_t tiles = of->tiles ? of->tiles : 1; /* an empty product counts as one tile */
  const int64_t work_tiles = split == 1 ? tiles : saturated(tiles, split);
  t->waves = (double)work_tiles / (double)of->concurrent;
  t->rounds = (double)ceil_div(work_tiles, of->concurrent);
  t->steps = (double)(split == 1 ? of->steps : ceil_div(of->steps, split));
  t->fixed = c->base_ns + t->rounds * c->ns_per_tile;
  t->multiply = t->rounds * t->steps * c->ns_per_k_step;
  t->take = t->rounds * t->steps * (of->bytes_a / k->num_ctas + of->bytes_b) * c->ns_per_taken_byte;
  t->load = (double)work_tiles * t->steps * (of->bytes_a + of->bytes_b) * c->ns_per_loaded_byte;
  t->read = s->bytes_moved * c->ns_per_byte;
  t->sums = split == 1 ? 0 : (double)work_tiles * k->block_m * k->block_n * (4 * AOTMM_SUMS) * c->ns_per_byte + reduce;
  const double most_a = t->multiply > t->take ? t->multiply : t->take, most_b = t->load > t->read ? t->load : t->read;
  return t->fixed + (most_a > most_b ? most_a : most_b) + t->sums;
}

double least_in_slices(const query *s, const tiling *of) {
  const aotmm_kernel *k = aotmm_kernels + of->kernel;
  const aotmm_constants *c = constants_of(s, of->kernel);
  const double all = (double)of->tiles * (double)of->steps, read = s->bytes_moved * c->ns_per_byte;
  const double multiply = all * c->ns_per_k_step / (double)of->concurrent, load = all * (of->bytes_a + of->bytes_b) * c->ns_per_loaded_byte;
  const double most = multiply > load ? multiply : load;
  const double sums = (double)of->tiles * k->block_m * k->block_n * (8 * AOTMM_SUMS) * c->ns_per_byte; /* of 2 slices */
  return (c->base_ns + c->ns_per_tile + (most > read ? most : read) + sums) * (1 - 1e-9); /* whatever is rounded */
}

double formula(const terms *t) {
  const double squares = t->multiply * t->multiply + t->take * t->take + t->load * t->load + t->read * t->read;
  return t->fixed + sqrt(squares) + t->sums;
}

/* ---- the network */

/* Add inputs, times their weights, to the hidden nodes. Of most plans several inputs are 0. */
static inline void add(double hidden[AOTMM_HIDDEN], const double (*weights)[AOTMM_HIDDEN], const double *inputs, int count) {
  for (int i = 0; i < count; i++) {
    if (inputs[i] == 0) continue;
    for (int j = 0; j < AOTMM_HIDDEN; j++) hidden[j] += inputs[i] * weights[i][j];
  }
}

static double output(const aotmm_network *network, const double hidden[AOTMM_HIDDEN]) {
  double sum = 0;
  for (int j = 0; j < AOTMM_HIDDEN; j++) sum += (hidden[j] > 0 ? hidden[j] : 0) * network->outputs[j];
  return sum;
}

static double logarithm(double size) { return size > 1 ? log2(size) : 0; }

/* Set what the problem adds to the hidden nodes. */
static void set_hidden(const query *s, placement *place) {
  const aotmm_problem *p = s->problem;
  const quantities *q = &place->q;
  const double inputs[AOTMM_PROBLEM_INPUTS] = {logarithm((double)p->M),
                                               logarithm((double)p->N),
                                               logarithm((double)p->K),
                                               !contiguous(q, AOTMM_PRODUCT_STRIDE_AK),
                                               contiguous(q, AOTMM_PRODUCT_STRIDE_BK) && !contiguous(q, AOTMM_PRODUCT_STRIDE_BN),
                                               place->lines_a,
                                               place->lines_b};
  memset(place->hidden, 0, sizeof place->hidden);
  add(place->hidden, s->table->network->problem, inputs, AOTMM_PROBLEM_INPUTS);
}

void describe(const query *s, placement *place) {
  place->lines_a = split_lines(&place->q, 0, bytes_of_dtype[s->problem->dtype_a]);
  place->lines_b = split_lines(&place->q, 1, bytes_of_dtype[s->problem->dtype_b]);
  if (s->table->network) set_hidden(s, place);
}

double corrected(const query *s, const tiling *of, uint32_t split, const terms *t, int *pdl) {
  const aotmm_network *network = s->table->network;
  const aotmm_kernel *k = aotmm_kernels + of->kernel;
  const aotmm_correction *own = s->table->corrections + of->kernel;
  const int odd = own->alternates && (int64_t)t->rounds & 1, clustered = k->num_ctas > 1;
  const int half = t->waves <= 0.5, one = t->waves <= 1;
  const double size = log2(t->time), wave = one ? t->waves : 1;
  const double plan[AOTMM_PLAN_INPUTS] = {size,
                                          t->multiply / t->time,
                                          t->take / t->time,
                                          t->read / t->time,
                                          t->load / t->time,
                                          t->sums / t->time,
                                          t->fixed / t->time,
                                          wave,
                                          t->waves < 2 ? t->waves : 2,
                                          t->waves - (t->rounds - 1),
                                          1 / t->rounds,
                                          !odd ? 0 : t->rounds < 2 ? 1 : 2 / t->rounds,
                                          half,
                                          one,
                                          logarithm(t->steps),
                                          logarithm(split),
                                          of->rows / k->block_m,
                                          of->cols / k->block_n,
                                          clustered ? of->place->lines_a : 0,
                                          clustered ? of->place->lines_b : 0};
  double hidden[AOTMM_HIDDEN];
  for (int j = 0; j < AOTMM_HIDDEN; j++) hidden[j] = own->hidden[j] + of->place->hidden[j];
  add(hidden, network->plan, plan, AOTMM_PLAN_INPUTS);
  double log_ratio = output(network, hidden);
  *pdl = 0;
  if (k->pdl) {
    const double launch[AOTMM_PDL_INPUTS] = {1, half, one && !half, size, one && !half ? size : 0, wave};
    add(hidden, network->pdl, launch, AOTMM_PDL_INPUTS);
    const double early = output(network, hidden);
    *pdl = early <= log_ratio;
    if (*pdl) log_ratio = early;
  }
  return t->time * exp(log_ratio + own->shift);
}

/* Return the measured time of a kernel on this shape, or NULL. */
const aotmm_time *measured_time(const query *s, uint32_t kernel) {
  const aotmm_time *all = s->measured[aotmm_kernels[kernel].fast_accum];
  const uint16_t number = s->table->config_numbers[kernel];
  return all && number != AOTMM_UNMEASURED && all[number].ns ? all + number : NULL;
}
