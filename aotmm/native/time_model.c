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

/* Round up, as ceil; numbers from 2^53 on have no fraction. */
static double up(double number) {
  if (number >= 0x1p53) return number;
  const double whole = (double)(int64_t)number;
  return whole < number ? whole + 1 : whole;
}

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
  const aotmm_constants *c = constants_of(s, kernel);
  const aotmm_problem *p = s->problem;
  const int64_t down = ceil_div(p->M, k->block_m), across = ceil_div(p->N, k->block_n);
  const int64_t tiles = saturated(saturated(down, across), p->batch);
  const double rows = down > 1 ? (double)p->M / (double)down : (double)p->M;
  const double cols = across > 1 ? (double)p->N / (double)across : (double)p->N;
  const double line = (double)k->block_k * k->element_bytes;
  const double bytes_a = rows * (1 + AOTMM_SPLIT_A * place->lines_a) * line;
  const double bytes_b = cols * (1 + AOTMM_SPLIT_B * place->lines_b) * line;
  return (tiling){.place = place,
                  .kernel = kernel,
                  .tiles = tiles,
                  .steps = steps_of(kernel, p->K),
                  .concurrent = concurrent_tiles(s, kernel),
                  .rows = rows,
                  .cols = cols,
                  .read = s->bytes_moved * c->ns_per_byte,
                  .take_step = (bytes_a / k->num_ctas + bytes_b) * c->ns_per_taken_byte,
                  .load_step = (bytes_a + bytes_b) * c->ns_per_loaded_byte,
                  .sums_slice = (double)tiles * k->block_m * k->block_n * (4 * AOTMM_SUMS) * c->ns_per_byte};
}

double set_terms(const query *s, const tiling *of, uint32_t split, double reduce, terms *t) {
  const aotmm_constants *c = constants_of(s, of->kernel);
  const double work_tiles = (double)(of->tiles ? of->tiles : 1) * split; /* an empty product counts as one tile */
  t->waves = work_tiles / (double)of->concurrent;
  t->rounds = up(t->waves);
  t->steps = split == 1 ? (double)of->steps : (double)ceil_div(of->steps, split);
  const double tile_steps = t->rounds * t->steps;
  t->fixed = c->base_ns + t->rounds * c->ns_per_tile;
  t->multiply = tile_steps * c->ns_per_k_step;
  t->take = tile_steps * of->take_step;
  t->load = work_tiles * t->steps * of->load_step;
  t->read = of->read;
  t->sums = split == 1 ? 0 : split * of->sums_slice + reduce;
  const double most_a = t->multiply > t->take ? t->multiply : t->take, most_b = t->load > t->read ? t->load : t->read;
  return t->fixed + (most_a > most_b ? most_a : most_b) + t->sums;
}

double least_in_slices(const query *s, const tiling *of) {
  const aotmm_constants *c = constants_of(s, of->kernel);
  const double all = (double)of->tiles * (double)of->steps, load = all * of->load_step;
  const double multiply = all * c->ns_per_k_step / (double)of->concurrent, most = multiply > load ? multiply : load;
  const double least = c->base_ns + c->ns_per_tile + (most > of->read ? most : of->read) + 2 * of->sums_slice;
  return least * (1 - 1e-9); /* whatever is rounded */
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

/* Four sums side by side: a processor adds them at once. */
static double output(const aotmm_network *network, const double hidden[AOTMM_HIDDEN]) {
  double sums[4] = {0};
  _Static_assert(AOTMM_HIDDEN % 4 == 0, "AOTMM_HIDDEN");
  for (int j = 0; j < AOTMM_HIDDEN; j += 4)
    for (int lane = 0; lane < 4; lane++)
      sums[lane] += (hidden[j + lane] > 0 ? hidden[j + lane] : 0) * network->outputs[j + lane];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
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
  const double size = log2(t->time), share = 1 / t->time, wave = one ? t->waves : 1;
  const double plan[AOTMM_PLAN_INPUTS] = {size,
                                          t->multiply * share,
                                          t->take * share,
                                          t->read * share,
                                          t->load * share,
                                          t->sums * share,
                                          t->fixed * share,
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
