/* Tuning tables: those that the library was built with or that of `retune`, the one of a device, its models scaled for
   other devices, and the measured times of a shape. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

/* ---- measured times */

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
  if ((p->a_ptr | p->b_ptr) & (LINE_BYTES - 1)) return; /* measured times are of operands that begin at a line */
  if (p->batch != 1 || !(rows_a || cols_a) || !(rows_b || cols_b)) return;
  aotmm_shape key = {.M = p->M, .N = p->N, .K = p->K, .element_bytes = bytes_of_dtype[p->dtype_a]};
  key.layout = rows_a ? (rows_b ? AOTMM_LAYOUT_NN : AOTMM_LAYOUT_NT) : rows_b ? AOTMM_LAYOUT_TN : AOTMM_LAYOUT_TT;
  for (key.fast_accum = 0; key.fast_accum <= (p->fast_accum != 0); key.fast_accum++)
    s->measured[key.fast_accum] = find_times(s->tuning, &key);
}

__attribute__((constructor)) static void prepare(void) {
  for (uint32_t i = 0; i < aotmm_built_tuning_count; i++) set_places(aotmm_built_tunings + i);
}

/* ---- tables and devices */

/* What selection on a device goes by, as launcher.h has it. */
typedef struct scaling {
  const aotmm_tuning *table;
  int measured;
  double clock, multiply, load, memory; /* speeds of the device over those of the table's */
  double tensor_tflops;                 /* of one of its multiprocessors, 0 for no limit */
} scaling;

/* A table's models for another device. Nodes are only added, in front, so that other threads may read them. */
typedef struct scaled {
  scaling by;
  aotmm_tuning tuning;
  struct scaled *next;
  aotmm_constants constants[]; /* by kernel */
} scaled;

/* The tables in use: at first the built ones, then that of the last `retune`. */
typedef struct tables {
  const aotmm_tuning *first;
  const uint32_t *count;
  scaled *others; /* made of them so far */
} tables;

static tables built = {aotmm_built_tunings, &aotmm_built_tuning_count, NULL};
static tables *current = &built;
static uint32_t generation = 1;

uint32_t tuning_generation(void) { return __atomic_load_n(&generation, __ATOMIC_ACQUIRE); }

/* Return what drivers do not tell of a device; nothing if it is not in the list. */
static aotmm_hidden_facts hidden_facts(const aotmm_device *device) {
  const char *end = memchr(device->name, 0, sizeof device->name), *slice = strstr(device->name, " MIG ");
  size_t length = (size_t)((slice ? slice : end) - device->name);
  for (const aotmm_hidden_facts *each = aotmm_hidden; each->name; each++)
    if (strlen(each->name) == length && !memcmp(each->name, device->name, length)) return *each;
  return (aotmm_hidden_facts){.sustained = 1};
}

/* Return the ratio of two facts, 1 if one of them is not known. */
static double ratio(int32_t device, int32_t table) { return device > 0 && table > 0 ? (double)device / table : 1; }

static scaling scaling_by(const aotmm_tuning *table, const aotmm_device *device) {
  if (table->device.multiprocessors == 0) return (scaling){table, 0, 1, 1, 1, 1, 0}; /* estimates are of the arch */
  if (device->name[0] && !strcmp(device->name, table->device.name)) return (scaling){table, 1, 1, 1, 1, 1, 0};
  const aotmm_hidden_facts hidden = hidden_facts(device);
  const double clock = ratio(device->clock_mhz, table->device.clock_mhz);
  const double sustained = hidden.sustained / hidden_facts(&table->device).sustained;
  return (scaling){.table = table,
                   .clock = clock,
                   .multiply = sustained != 1 ? sustained : clock,
                   .load = ratio(device->multiprocessors, table->device.multiprocessors) * clock,
                   .memory = ratio(device->memory_gbps, table->device.memory_gbps),
                   .tensor_tflops = hidden.tensor_tflops};
}

static double compute(const scaling *by, const aotmm_device *device) {
  return by->measured ? 1 : ratio(device->multiprocessors, by->table->device.multiprocessors) * by->multiply;
}

static double apart(double speed) { return speed < 1 ? 1 / speed : speed; }

/* Return how selection on a device follows from the tables: by its own one, or by the nearest. */
static scaling scaling_of(const tables *all, const aotmm_device *device) {
  scaling best = scaling_by(all->first, device);
  double least = apart(compute(&best, device)) * apart(best.memory);
  for (uint32_t i = 1; i < *all->count && !best.measured; i++) {
    scaling by = scaling_by(all->first + i, device);
    double distance = apart(compute(&by, device)) * apart(by.memory);
    if (by.measured || distance < least) best = by, least = distance;
  }
  return best;
}

static int same(const scaling *a, const scaling *b) {
  return a->table == b->table && a->clock == b->clock && a->multiply == b->multiply && a->load == b->load &&
         a->memory == b->memory && a->tensor_tflops == b->tensor_tflops;
}

static aotmm_constants scaled_constants(const aotmm_constants *c, const aotmm_kernel *k, const scaling *by) {
  aotmm_constants to = *c;
  to.ns_per_k_step /= by->multiply;
  to.ns_per_tile /= by->clock;
  to.ns_per_byte /= by->memory;
  to.ns_per_taken_byte /= by->clock;
  to.ns_per_loaded_byte /= by->load;
  if (by->tensor_tflops > 0 && (k->role == AOTMM_ROLE_PRODUCT || k->role == AOTMM_ROLE_PARTIAL)) {
    double macs = (double)k->block_m * (double)k->block_n * (double)k->block_k;
    double least = macs * k->element_bytes / (1000 * by->tensor_tflops * k->num_ctas);
    if (to.ns_per_k_step < least) to.ns_per_k_step = least;
  }
  return to;
}

/* Return the tuning that a scaling gives: made once, and the table itself where nothing is scaled or memory is short. */
static const aotmm_tuning *tuning_by(tables *all, const scaling *by) {
  static uint32_t no_places[2];
  if (by->measured || by->table->device.multiprocessors == 0) return by->table;
  scaled *head = __atomic_load_n(&all->others, __ATOMIC_ACQUIRE);
  for (scaled *each = head; each; each = each->next)
    if (same(&each->by, by)) return &each->tuning;
  scaled *fresh = malloc(sizeof *fresh + aotmm_kernel_count * sizeof *fresh->constants);
  if (!fresh) return by->table;
  fresh->by = *by;
  for (uint32_t i = 0; i < aotmm_kernel_count; i++)
    fresh->constants[i] = scaled_constants(by->table->constants + i, aotmm_kernels + i, by);
  fresh->tuning = (aotmm_tuning){.device = by->table->device,
                                 .constants = fresh->constants,
                                 .network = by->table->network,
                                 .corrections = by->table->corrections,
                                 .config_names = by->table->config_names,
                                 .places = no_places,
                                 .place_count = 2};
  fresh->next = head; /* another thread's may come between: the same one twice does no harm */
  while (!__atomic_compare_exchange_n(&all->others, &fresh->next, fresh, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) continue;
  return &fresh->tuning;
}

static const aotmm_tuning *tuning_in(tables *all, const aotmm_device *device) {
  const scaling by = scaling_of(all, device);
  return tuning_by(all, &by);
}

const aotmm_tuning *tuning_for(const aotmm_device *device) {
  return tuning_in(__atomic_load_n(&current, __ATOMIC_ACQUIRE), device);
}

int aotmm_origin_of(const aotmm_device *device, aotmm_origin *origin) {
  int status = valid_device(device);
  if (status) return status;
  const scaling by = scaling_of(__atomic_load_n(&current, __ATOMIC_ACQUIRE), device);
  *origin = (aotmm_origin){.measured = by.measured,
                           .compute = compute(&by, device),
                           .memory = by.memory,
                           .tensor_tflops = by.tensor_tflops * device->multiprocessors};
  memcpy(origin->name, by.table->device.name, sizeof origin->name);
  return AOTMM_OK;
}

/* ---- retune */

/* Set a kernel's constants, correction and config from a table; return whether there is a correction if it needs one. */
static int tune_kernel(const aotmm_table *table, uint32_t number, aotmm_constants *constants, aotmm_correction *correction,
                        uint16_t *config_name) {
  const aotmm_kernel *k = aotmm_kernels + number;
  const scaling by = scaling_by(aotmm_built_tunings, &table->device);
  *constants = scaled_constants(aotmm_built_tunings->constants + number, k, &by);
  int found = !table->network || (k->role != AOTMM_ROLE_PRODUCT && k->role != AOTMM_ROLE_PARTIAL);
  memset(correction, 0, sizeof *correction);
  *config_name = AOTMM_UNMEASURED;
  for (uint32_t i = 0; i < table->model_count; i++) {
    const aotmm_model *m = table->models + i;
    if (m->element_bytes != k->element_bytes || m->fast_accum != k->fast_accum || strcmp(m->config_name, k->config_name)) continue;
    memcpy(correction->hidden, m->hidden, sizeof m->hidden);
    correction->shift = m->shift, correction->alternates = m->alternates;
    found = 1;
  }
  for (uint32_t i = 0; i < table->config_count; i++)
    if (!strcmp(table->config_names[i], k->config_name)) *config_name = (uint16_t)i;
  return found;
}

static int precedes(const aotmm_shape *a, const aotmm_shape *b) {
  if (a->element_bytes != b->element_bytes) return a->element_bytes < b->element_bytes;
  if (a->fast_accum != b->fast_accum) return a->fast_accum < b->fast_accum;
  if (a->layout != b->layout) return a->layout < b->layout;
  if (a->M != b->M) return a->M < b->M;
  return a->N != b->N ? a->N < b->N : a->K < b->K;
}

int aotmm_retune(const aotmm_table *table) {
  for (uint32_t i = 1; i < table->shape_count; i++)
    if (!precedes(table->shapes + i - 1, table->shapes + i))
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "shape %u of the table is not in ascending order", i);
  int status = valid_device(&table->device);
  if (status) return status;
  /* one block: the new tables, their only tuning and its arrays, in order of alignment */
  static const uint32_t one = 1;
  struct retuned {
    tables all;
    aotmm_tuning tuning;
    aotmm_network network;
  } *fresh;
  size_t time_count = (size_t)table->shape_count * table->config_count;
  uint32_t place_count = 2;
  while (place_count < 2 * table->shape_count) place_count *= 2;
  size_t bytes = sizeof *fresh + aotmm_kernel_count * (sizeof(aotmm_constants) + sizeof(aotmm_correction) + sizeof(uint16_t)) +
                 table->shape_count * sizeof(aotmm_shape) + time_count * sizeof(aotmm_time) + place_count * sizeof(uint32_t);
  fresh = malloc(bytes);
  if (!fresh) return aotmm_fail(AOTMM_INVALID, 0, -1, "", "no memory for a table of %u shapes", table->shape_count);
  aotmm_constants *constants = (aotmm_constants *)(fresh + 1);
  aotmm_correction *corrections = (aotmm_correction *)(constants + aotmm_kernel_count);
  aotmm_shape *shapes = (aotmm_shape *)(corrections + aotmm_kernel_count);
  aotmm_time *new_times = (aotmm_time *)(shapes + table->shape_count);
  uint32_t *places = (uint32_t *)(new_times + time_count);
  uint16_t *config_names = (uint16_t *)(places + place_count);
  if (table->shape_count) memcpy(shapes, table->shapes, table->shape_count * sizeof *shapes);
  if (time_count) memcpy(new_times, table->times, time_count * sizeof *new_times);
  for (uint32_t i = 0; i < aotmm_kernel_count; i++)
    if (!tune_kernel(table, i, constants + i, corrections + i, config_names + i)) {
      free(fresh);
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "the table has a network and no model of config %s", aotmm_kernels[i].config_name);
    }
  if (table->network) fresh->network = *table->network;
  fresh->tuning = (aotmm_tuning){table->device, constants, table->network ? &fresh->network : NULL, corrections, config_names, shapes,
                                 new_times, places, table->shape_count, table->config_count, place_count};
  set_places(&fresh->tuning);
  fresh->all = (tables){&fresh->tuning, &one, NULL};
  __atomic_store_n(&current, &fresh->all, __ATOMIC_RELEASE);
  __atomic_add_fetch(&generation, 1, __ATOMIC_RELEASE);
  return AOTMM_OK;
}
