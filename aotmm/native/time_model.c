/* The time model of launcher.h: the formula, and its correction by the network of a tuning table. */
#include "core.h"

#include <math.h>
#include <string.h>

enum { LINE = LINE_BYTES };

double copy_time(const query *s, int kernel, const quantities *copy, int element_bytes) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  return c->base_ns + (double)copy->value[AOTMM_COPY_M] * (double)copy->value[AOTMM_COPY_N] * (2 * element_bytes) * c->ns_per_byte;
}

double reduce_time(const query *s, int kernel, uint32_t split) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  const aotmm_problem *p = s->problem;
  return c->base_ns + (double)p->M * (double)p->N * (4 * split + bytes_of_dtype[p->dtype_c]) * c->ns_per_byte;
}

/* Return the tiles that a device computes at once, one on each multiprocessor; at least 1. */
int64_t concurrent_tiles(const query *s, uint32_t kernel) {
  int64_t blocks = s->device->multiprocessors;
  uint32_t together = aotmm_kernels[kernel].num_ctas;
  return together == 1 ? blocks : blocks < together ? 1 : blocks / together;
}

/* Return the part of the lines of a matrix, `pitch` bytes apart, that begin within a cache line. */
double part_of_split_lines(int64_t address, int64_t pitch, int64_t lines) {
  const int64_t rest = pitch & (LINE - 1), least = rest & -rest; /* starts differ by multiples of `least` */
  if (rest == 0 || lines == 1) return (address & (LINE - 1)) != 0;
  return address & (least - 1) ? 1 : 1 - (double)least / LINE;
}

/* Weights of a load, by the part of split lines: what one multiprocessor takes in, and what the cache gives. */
#define SPLIT_A 0.9
#define SPLIT_B 1.2
#define SUMS 1.4 /* the time of a byte of partial sums over that of a byte of memory */

double formula(const query *s, int placement, uint32_t kernel, uint32_t split, int64_t tiles, double reduce, terms *t) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  const aotmm_constants *c = constants_of(s, kernel);
  const aotmm_problem *p = s->problem;
  const int64_t units = saturated(tiles, split), down = ceil_div(p->M, k->block_m), across = ceil_div(p->N, k->block_n);
  const double waves_ = (double)units / (double)concurrent_tiles(s, kernel), waves = ceil(waves_);
  const double steps = (double)ceil_div(steps_of(kernel, p->K), split);
  const double line = (double)k->block_k * k->element_bytes;
  const double rows = (double)p->M / (double)down * (1 + SPLIT_A * s->placements[placement].lines_a) * line;
  const double cols = (double)p->N / (double)across * (1 + SPLIT_B * s->placements[placement].lines_b) * line;
  t->waves = waves_;
  t->rounds = waves;
  t->steps = steps;
  t->rows = (double)p->M / ((double)down * k->block_m);
  t->cols = (double)p->N / ((double)across * k->block_n);
  t->fixed = c->base_ns + waves * c->ns_per_tile;
  t->multiply = waves * steps * c->ns_per_k_step;
  t->take = waves * steps * (rows / k->num_ctas + cols) * c->ns_per_taken_byte;
  t->load = (double)units * steps * (rows + cols) * c->ns_per_loaded_byte;
  t->read = s->bytes_moved * c->ns_per_byte;
  t->sums = split == 1 ? 0 : (double)units * k->block_m * k->block_n * (4 * SUMS) * c->ns_per_byte + reduce;
  t->time = t->fixed + sqrt(t->multiply * t->multiply + t->take * t->take + t->load * t->load + t->read * t->read) + t->sums;
  return t->time;
}

/* ---- the network */

static void add_inputs(double hidden[AOTMM_HIDDEN], const double (*weights)[AOTMM_HIDDEN], const double *inputs, int count) {
  for (int i = 0; i < count; i++)
    for (int j = 0; j < AOTMM_HIDDEN; j++) hidden[j] += inputs[i] * weights[i][j];
}

static double logarithm(int64_t size) { return log2((double)(size > 0 ? size : 1)); }

void set_problem_inputs(query *s, int placement) {
  const aotmm_network *network = s->tuning->network;
  const aotmm_problem *p = s->problem;
  const quantities *q = &s->placements[placement].q;
  if (!network) return;
  const double inputs[AOTMM_PROBLEM_INPUTS] = {logarithm(p->M),
                                               logarithm(p->N),
                                               logarithm(p->K),
                                               !contiguous(q, AOTMM_PRODUCT_STRIDE_AK),
                                               contiguous(q, AOTMM_PRODUCT_STRIDE_BK) && !contiguous(q, AOTMM_PRODUCT_STRIDE_BN),
                                               bytes_of_dtype[p->dtype_a] == 1,
                                               p->fast_accum != 0,
                                               s->placements[placement].lines_a,
                                               s->placements[placement].lines_b};
  memset(s->placements[placement].hidden, 0, sizeof s->placements[placement].hidden);
  add_inputs(s->placements[placement].hidden, network->problem, inputs, AOTMM_PROBLEM_INPUTS);
}

static double output(const aotmm_network *network, const double hidden[AOTMM_HIDDEN]) {
  double sum = 0;
  for (int j = 0; j < AOTMM_HIDDEN; j++) sum += (hidden[j] > 0 ? hidden[j] : 0) * network->outputs[j];
  return sum;
}

double corrected(const query *s, int placement, uint32_t kernel, uint32_t split, const terms *t, int *pdl) {
  const aotmm_network *network = s->tuning->network;
  const aotmm_kernel *k = aotmm_kernels + kernel;
  const aotmm_correction *own = s->tuning->corrections + kernel;
  const double last = t->waves == t->rounds ? 1 : t->waves - (t->rounds - 1), wave = t->waves < 1 ? t->waves : 1;
  const int half = t->waves <= 0.5, other_half = !half && t->waves <= 1, odd = (int64_t)t->rounds & 1;
  const double size = log2(t->time);
  const double plan[AOTMM_PLAN_INPUTS] = {
      size,           t->multiply / t->time, t->take / t->time, t->read / t->time, t->load / t->time, t->sums / t->time,
      t->fixed / t->time, wave, t->waves < 2 ? t->waves : 2, last, 1 / t->rounds,
      own->alternates && odd ? (t->rounds < 2 ? 1 : 2 / t->rounds) : 0, half, t->waves <= 1, log2(t->steps), log2(split), t->rows, t->cols,
      k->num_ctas > 1 ? s->placements[placement].lines_a : 0, k->num_ctas > 1 ? s->placements[placement].lines_b : 0};
  double hidden[AOTMM_HIDDEN];
  for (int j = 0; j < AOTMM_HIDDEN; j++) hidden[j] = own->hidden[j] + s->placements[placement].hidden[j];
  add_inputs(hidden, network->plan, plan, AOTMM_PLAN_INPUTS);
  const double plain = output(network, hidden);
  *pdl = 0;
  if (!k->pdl) return t->time * exp(plain + own->shift);
  const double launch[AOTMM_PDL_INPUTS] = {1, half, other_half, size, other_half ? size : 0, wave};
  add_inputs(hidden, network->pdl, launch, AOTMM_PDL_INPUTS);
  const double early = output(network, hidden);
  *pdl = early <= plain;
  return t->time * exp((*pdl ? early : plain) + own->shift);
}

/* Return the measured time of a kernel on this shape, or NULL. */
const aotmm_time *measured_time(const query *s, uint32_t kernel) {
  const aotmm_time *times_ = s->measured[aotmm_kernels[kernel].fast_accum];
  uint16_t config_name = s->tuning->config_names[kernel];
  return times_ && config_name != AOTMM_UNMEASURED && times_[config_name].ns ? times_ + config_name : NULL;
}
