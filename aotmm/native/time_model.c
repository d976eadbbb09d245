/* The time model of launcher.h. */
#include "core.h"

#include <stddef.h>

static const int32_t min_m_from[] = AOTMM_MIN_M;

/* Return the index in AOTMM_MIN_M for M rows. */
int min_m_index(int64_t M) {
  int index = 0;
  for (int i = 1; i < AOTMM_MIN_M_COUNT; i++) index += M >= min_m_from[i];
  return index;
}

double copy_time(const query *s, int kernel, const quantities *copy, int element_bytes) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  return c->base_ns + (double)copy->value[AOTMM_COPY_M] * (double)copy->value[AOTMM_COPY_N] * (2 * element_bytes) * c->ns_per_byte;
}

double reduce_time(const query *s, int kernel, uint32_t split) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  const aotmm_problem *p = s->problem;
  return c->base_ns + (double)p->M * (double)p->N * (4 * split + bytes_of_dtype[p->dtype_c]) * c->ns_per_byte;
}

/* Return the tiles that a device computes at once, at least 1. */
int64_t concurrent_tiles(const query *s, uint32_t kernel) {
  int64_t blocks = (int64_t)s->device->multiprocessors * constants_of(s, kernel)->occupancy;
  uint32_t together = aotmm_kernels[kernel].num_ctas;
  return together == 1 ? blocks : blocks < together ? 1 : blocks / together;
}

/* Return the bytes that a tile loads in a step; rows across cache lines count SPLIT_LINES times. */
static double loads_of(const query *s, int placement, uint32_t kernel) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  return (double)k->block_k * ((double)k->block_m * s->placements[placement].row_a + (double)k->block_n * s->placements[placement].col_b);
}

/* A kernel computes while it loads, but for this part of the shorter one. */
#define ALONE 0.4

static double overlapped(double busy, double moving) {
  return busy > moving ? busy + ALONE * moving : moving + ALONE * busy;
}

/* `steps` are those of a slice. */
double main_time(const query *s, int placement, uint32_t kernel, int64_t work_tiles, int64_t steps, double bytes) {
  const aotmm_constants *c = constants_of(s, kernel);
  double busy = (double)ceil_div(work_tiles, concurrent_tiles(s, kernel)) * ((double)steps * c->ns_per_k_step + c->ns_per_tile);
  double moving = bytes * c->ns_per_byte + (double)work_tiles * (double)steps * loads_of(s, placement, kernel) * c->ns_per_loaded_byte;
  return c->base_ns + overlapped(busy, moving);
}

/* Return the measured time of a kernel on this shape, or NULL. */
const aotmm_time *measured_time(const query *s, uint32_t kernel) {
  const aotmm_time *times_ = s->measured[aotmm_kernels[kernel].fast_accum];
  uint16_t config_name = s->tuning->config_names[kernel];
  return times_ && config_name != AOTMM_UNMEASURED && times_[config_name].ns ? times_ + config_name : NULL;
}
