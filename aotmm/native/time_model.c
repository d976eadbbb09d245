/* The time model of launcher.h, and the tuning tables with its constants and the measured times. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static const aotmm_tuning *tuning = &aotmm_built_tuning;
static uint32_t generation = 1;

const aotmm_tuning *current_tuning(void) { return __atomic_load_n(&tuning, __ATOMIC_ACQUIRE); }

uint32_t tuning_generation(void) { return __atomic_load_n(&generation, __ATOMIC_ACQUIRE); }

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

/* ---- tables */

/* Return the place in aotmm_tuning.places where the search for a shape begins. */
static uint32_t place_in(const aotmm_tuning *t, const aotmm_shape *shape) {
  uint64_t sum = (uint64_t)shape->M * 0x9e3779b97f4a7c15 + (uint64_t)shape->N * 0xc2b2ae3d27d4eb4f +
                 (uint64_t)shape->K * 0x165667b19e3779f9 +
                 (uint64_t)(shape->element_bytes << 4 | shape->fast_accum << 3 | shape->layout) * 0x27d4eb2f165667c5;
  return (uint32_t)(sum >> 32) & (t->place_count - 1);
}

static void set_places(const aotmm_tuning *t) {
  memset(t->places, 0, t->place_count * sizeof *t->places);
  for (uint32_t i = 0; i < t->shape_count; i++) {
    uint32_t place = place_in(t, t->shapes + i);
    while (t->places[place]) place = (place + 1) & (t->place_count - 1);
    t->places[place] = i + 1;
  }
}

/* Return the times of a shape, or NULL. */
static const aotmm_time *find_times(const aotmm_tuning *t, const aotmm_shape *key) {
  for (uint32_t place = place_in(t, key); t->places[place]; place = (place + 1) & (t->place_count - 1)) {
    const aotmm_shape *shape = t->shapes + t->places[place] - 1;
    if (shape->M == key->M && shape->N == key->N && shape->K == key->K && shape->element_bytes == key->element_bytes &&
        shape->fast_accum == key->fast_accum && shape->layout == key->layout)
      return t->times + (size_t)(t->places[place] - 1) * t->config_count;
  }
  return NULL;
}

void find_measured(query *s) {
  const aotmm_problem *p = s->problem;
  const quantities *q = &s->placements[0].q;
  int rows_a = contiguous(q, AOTMM_PRODUCT_STRIDE_AK), cols_a = contiguous(q, AOTMM_PRODUCT_STRIDE_AM);
  int rows_b = contiguous(q, AOTMM_PRODUCT_STRIDE_BN), cols_b = contiguous(q, AOTMM_PRODUCT_STRIDE_BK);
  if (p->batch != 1 || !(rows_a || cols_a) || !(rows_b || cols_b)) return;
  aotmm_shape key = {.M = p->M, .N = p->N, .K = p->K, .element_bytes = bytes_of_dtype[p->dtype_a]};
  key.layout = rows_a ? (rows_b ? AOTMM_LAYOUT_NN : AOTMM_LAYOUT_NT) : rows_b ? AOTMM_LAYOUT_TN : AOTMM_LAYOUT_TT;
  for (key.fast_accum = 0; key.fast_accum <= (p->fast_accum != 0); key.fast_accum++)
    s->measured[key.fast_accum] = find_times(s->tuning, &key);
}

__attribute__((constructor)) static void prepare(void) { set_places(&aotmm_built_tuning); }

/* Set a kernel's constants and config from a table; the built-in values replace constants that it lacks. */
static void tune_kernel(const aotmm_table *table, uint32_t number, aotmm_constants *constants, uint16_t *config_name) {
  const aotmm_kernel *k = aotmm_kernels + number;
  memcpy(constants, aotmm_built_tuning.constants[number], sizeof aotmm_built_tuning.constants[number]);
  *config_name = AOTMM_UNMEASURED;
  for (uint32_t i = 0; i < table->model_count; i++) {
    const aotmm_model *m = table->models + i;
    if (m->element_bytes == k->element_bytes && m->fast_accum == k->fast_accum && !strcmp(m->config_name, k->config_name))
      constants[min_m_index(m->min_m)] = (aotmm_constants){m->base_ns, m->ns_per_k_step, m->ns_per_tile, m->ns_per_byte, m->ns_per_loaded_byte, k->occupancy};
  }
  for (uint32_t i = 0; i < table->config_count; i++)
    if (!strcmp(table->config_names[i], k->config_name)) *config_name = (uint16_t)i;
}

static int before(const aotmm_shape *a, const aotmm_shape *b) {
  if (a->element_bytes != b->element_bytes) return a->element_bytes < b->element_bytes;
  if (a->fast_accum != b->fast_accum) return a->fast_accum < b->fast_accum;
  if (a->layout != b->layout) return a->layout < b->layout;
  if (a->M != b->M) return a->M < b->M;
  return a->N != b->N ? a->N < b->N : a->K < b->K;
}

int aotmm_retune(const aotmm_table *table) {
  for (uint32_t i = 0; i < table->model_count; i++) {
    const aotmm_model *m = table->models + i;
    if (!(m->base_ns >= 0 && m->ns_per_k_step >= 0 && m->ns_per_tile >= 0 && m->ns_per_byte >= 0 && m->ns_per_loaded_byte >= 0))
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "model %u of the table has a constant that is no number from 0", i);
    if (min_m_from[min_m_index(m->min_m)] != m->min_m)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "model %u of the table is for M from %d on: AOTMM_MIN_M has no such number",
                        i, m->min_m);
  }
  for (uint32_t i = 1; i < table->shape_count; i++)
    if (!before(table->shapes + i - 1, table->shapes + i))
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "shape %u of the table is not in ascending order", i);
  /* one block: the new tuning and its arrays, in order of alignment */
  size_t time_count = (size_t)table->shape_count * table->config_count;
  uint32_t place_count = 2;
  while (place_count < 2 * table->shape_count) place_count *= 2;
  size_t bytes = sizeof(aotmm_tuning) +
                 aotmm_kernel_count * (AOTMM_MIN_M_COUNT * sizeof(aotmm_constants) + sizeof(uint16_t)) +
                 table->shape_count * sizeof(aotmm_shape) + time_count * sizeof(aotmm_time) + place_count * sizeof(uint32_t);
  aotmm_tuning *fresh = malloc(bytes);
  if (!fresh) return aotmm_fail(AOTMM_INVALID, 0, -1, "", "no memory for a table of %u shapes", table->shape_count);
  aotmm_constants(*constants)[AOTMM_MIN_M_COUNT] = (void *)(fresh + 1);
  aotmm_shape *shapes = (aotmm_shape *)(constants + aotmm_kernel_count);
  aotmm_time *new_times = (aotmm_time *)(shapes + table->shape_count);
  uint32_t *places = (uint32_t *)(new_times + time_count);
  uint16_t *config_names = (uint16_t *)(places + place_count);
  if (table->shape_count) memcpy(shapes, table->shapes, table->shape_count * sizeof *shapes);
  if (time_count) memcpy(new_times, table->times, time_count * sizeof *new_times);
  for (uint32_t i = 0; i < aotmm_kernel_count; i++) tune_kernel(table, i, constants[i], config_names + i);
  *fresh = (aotmm_tuning){constants,   config_names, shapes, new_times, places, table->shape_count,
                          table->config_count, place_count};
  set_places(fresh);
  __atomic_store_n(&tuning, fresh, __ATOMIC_RELEASE);
  __atomic_add_fetch(&generation, 1, __ATOMIC_RELEASE);
  return AOTMM_OK;
}
