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
                 (uint64_t)(shape->element_bytes << 4 | shape->relaxed << 3 | shape->layout) * 0x27d4eb2f165667c5;
  return (uint32_t)(sum >> 32) & (t->place_count - 1);
}

static void set_places(const aotmm_tuning *t) {
  memset(t->places, 0, t->place_count * sizeof *t->places);
  for (uint32_t i = 0; i < t->table.shape_count; i++) {
    uint32_t place = place_in(t, t->table.shapes + i);
    while (t->places[place]) place = (place + 1) & (t->place_count - 1);
    t->places[place] = i + 1;
  }
}

/* Return the times of a shape, or NULL. */
static const aotmm_time *find_times(const aotmm_tuning *t, const aotmm_shape *key) {
  for (uint32_t place = place_in(t, key); t->places[place]; place = (place + 1) & (t->place_count - 1)) {
    const aotmm_shape *shape = t->table.shapes + t->places[place] - 1;
    if (shape->M == key->M && shape->N == key->N && shape->K == key->K && shape->element_bytes == key->element_bytes &&
        shape->relaxed == key->relaxed && shape->layout == key->layout)
      return t->table.times + (size_t)(t->places[place] - 1) * t->table.config_count;
  }
  return NULL;
}

void find_measured(query *s, const aotmm_tuning *tuning) {
  const aotmm_problem *p = s->problem;
  const quantities *q = &s->placements[0].q;
  int rows_a = contiguous(q, AOTMM_PRODUCT_STRIDE_AK), cols_a = contiguous(q, AOTMM_PRODUCT_STRIDE_AM);
  int rows_b = contiguous(q, AOTMM_PRODUCT_STRIDE_BN), cols_b = contiguous(q, AOTMM_PRODUCT_STRIDE_BK);
  s->measured[0] = s->measured[1] = NULL;
  if ((p->a_ptr | p->b_ptr) & (LINE_BYTES - 1)) return; /* measured times are of operands that begin at a line */
  if (p->batch != 1 || !(rows_a || cols_a) || !(rows_b || cols_b) || p->block_scale_a_ptr) return;
  aotmm_shape key = {.M = p->M, .N = p->N, .K = p->K, .element_bytes = bytes_of_dtype[p->dtype_a]};
  key.layout = rows_a ? (rows_b ? AOTMM_LAYOUT_NN : AOTMM_LAYOUT_NT) : rows_b ? AOTMM_LAYOUT_TN : AOTMM_LAYOUT_TT;
  const int most = is_relaxed(p);
  for (key.relaxed = 0; key.relaxed <= most; key.relaxed++) s->measured[key.relaxed] = find_times(tuning, &key);
}

__attribute__((constructor)) static void prepare(void) {
  for (uint32_t i = 0; i < aotmm_built_tuning_count; i++) {
    set_places(aotmm_built_tunings + i);
    set_octets(aotmm_built_tunings + i);
  }
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
  aotmm_constants constants[]; /* by kernel; the tuning's octets follow */
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

/* Return how selection on a device without a table of its own follows from another one's. */
static scaling scaling_by(const aotmm_tuning *table, const aotmm_device *device) {
  const aotmm_hidden_facts hidden = hidden_facts(device);
  const double clock = ratio(device->clock_mhz, table->table.device.clock_mhz);
  const double sustained = hidden.sustained / hidden_facts(&table->table.device).sustained;
  return (scaling){.table = table,
                   .clock = clock,
                   .multiply = sustained != 1 ? sustained : clock,
                   .load = ratio(device->multiprocessors, table->table.device.multiprocessors) * clock,
                   .memory = ratio(device->memory_gbps, table->table.device.memory_gbps),
                   .tensor_tflops = hidden.tensor_tflops};
}

static double compute(const scaling *by, const aotmm_device *device) {
  return by->measured ? 1 : ratio(device->multiprocessors, by->table->table.device.multiprocessors) * by->multiply;
}

static double apart(double speed) { return speed < 1 ? 1 / speed : speed; }

/* Return how selection on a device follows from the tables: by its own one, or by the nearest. */
static scaling scaling_of(const tables *all, const aotmm_device *device) {
  for (uint32_t i = 0; i < *all->count && device->name[0]; i++)
    if (!strcmp(device->name, all->first[i].table.device.name)) return (scaling){all->first + i, 1, 1, 1, 1, 1, 0};
  scaling best = scaling_by(all->first, device);
  double least = apart(compute(&best, device)) * apart(best.memory);
  for (uint32_t i = 1; i < *all->count; i++) {
    scaling by = scaling_by(all->first + i, device);
    double distance = apart(compute(&by, device)) * apart(by.memory);
    if (distance < least) best = by, least = distance;
  }
  return best;
}

static int same(const scaling *a, const scaling *b) {
  return a->table == b->table && a->clock == b->clock && a->multiply == b->multiply && a->load == b->load &&
         a->memory == b->memory && a->tensor_tflops == b->tensor_tflops;
}

static aotmm_constants scaled_constants(const aotmm_constants *c, uint32_t kernel, const scaling *by) {
  const aotmm_product *k = aotmm_products + kernel;
  const aotmm_tile *tile = aotmm_tiles + kernel;
  aotmm_constants to = *c;
  to.ns_per_k_step /= by->multiply;
  to.ns_per_tile /= by->clock;
  to.ns_per_byte /= by->memory;
  to.ns_per_taken_byte /= by->clock;
  to.ns_per_loaded_byte /= by->load;
  if (by->tensor_tflops > 0 && (k->role == AOTMM_ROLE_PRODUCT || k->role == AOTMM_ROLE_PARTIAL)) {
    double macs = (double)k->block_m * (double)k->block_n * (double)k->block_k;
    double part = by->tensor_tflops / (double)(tile->beside > tile->busy ? tile->beside : tile->busy); /* a tile's */
    double least = macs * (double)tile->tensor_bytes / (1000 * part * num_ctas(aotmm_kernels + kernel));
    if (to.ns_per_k_step < least) to.ns_per_k_step = least;
  }
  return to;
}

/* Return the tuning that a scaling gives: made once, and the table itself where nothing is scaled or memory is short. */
static const aotmm_tuning *tuning_by(tables *all, const scaling *by) {
  static uint32_t no_places[2];
  if (by->measured) return by->table;
  scaled *head = __atomic_load_n(&all->others, __ATOMIC_ACQUIRE);
  for (scaled *each = head; each; each = each->next)
    if (same(&each->by, by)) return &each->tuning;
  scaled *fresh = malloc(sizeof *fresh + aotmm_kernel_count * sizeof *fresh->constants +
                         aotmm_octet_count * sizeof *fresh->tuning.octets);
  if (!fresh) return by->table;
  fresh->by = *by;
  for (uint32_t i = 0; i < aotmm_kernel_count; i++)
    fresh->constants[i] = scaled_constants(by->table->table.constants + i, i, by);
  fresh->tuning = (aotmm_tuning){.table = by->table->table, .places = no_places, .place_count = 2};
  fresh->tuning.table.constants = fresh->constants;
  fresh->tuning.octets = (aotmm_octet *)(void *)(fresh->constants + aotmm_kernel_count);
  set_octets(&fresh->tuning);
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
  memcpy(origin->name, by.table->table.device.name, sizeof origin->name);
  return AOTMM_OK;
}

/* ---- retune */

static int precedes(const aotmm_shape *a, const aotmm_shape *b) {
  if (a->element_bytes != b->element_bytes) return a->element_bytes < b->element_bytes;
  if (a->relaxed != b->relaxed) return a->relaxed < b->relaxed;
  if (a->layout != b->layout) return a->layout < b->layout;
  if (a->M != b->M) return a->M < b->M;
  return a->N != b->N ? a->N < b->N : a->K < b->K;
}

/* Copy bytes to *end, move it behind them and return the copy. */
static void *append(char **end, const void *from, size_t bytes) {
  void *copy = *end;
  if (bytes) memcpy(copy, from, bytes);
  *end += bytes;
  return copy;
}

int aotmm_retune(const aotmm_table *table) {
  const uint32_t kernels = aotmm_kernel_count;
  for (uint32_t i = 1; i < table->shape_count; i++)
    if (!precedes(table->shapes + i - 1, table->shapes + i))
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "shape %u of the table is not in ascending order", i);
  int status = valid_device(&table->device);
  if (status) return status;
  for (uint32_t i = 0; i < kernels; i++)
    if (table->config_numbers[i] >= table->config_count && table->config_numbers[i] != AOTMM_UNMEASURED)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u has times of config %u, the table has %u configs", i,
                        table->config_numbers[i], table->config_count);
  /* one block: the new tables, their only tuning and its arrays, in order of alignment */
  static const uint32_t one = 1;
  struct retuned {
    tables all;
    aotmm_tuning tuning;
    aotmm_network network;
  } *fresh;
  const size_t times = (size_t)table->shape_count * table->config_count;
  uint32_t place_count = 2;
  while (place_count < 2 * table->shape_count) place_count *= 2;
  fresh = malloc(sizeof *fresh + kernels * (sizeof(aotmm_constants) + sizeof(aotmm_correction) + sizeof(uint16_t)) +
                 table->shape_count * sizeof(aotmm_shape) + times * sizeof(aotmm_time) +
                 aotmm_octet_count * sizeof(aotmm_octet) + place_count * sizeof(uint32_t));
  if (!fresh) return aotmm_fail(AOTMM_INVALID, 0, -1, "", "no memory for a table of %u shapes", table->shape_count);
  char *end = (char *)(fresh + 1);
  aotmm_tuning *to = &fresh->tuning;
  to->table = *table;
  to->table.constants = append(&end, table->constants, kernels * sizeof *table->constants);
  if (table->network) {
    to->table.corrections = append(&end, table->corrections, kernels * sizeof *table->corrections);
    fresh->network = *table->network;
    to->table.network = &fresh->network;
  }
  to->table.shapes = append(&end, table->shapes, table->shape_count * sizeof *table->shapes);
  to->table.times = append(&end, table->times, times * sizeof *table->times);
  to->octets = (aotmm_octet *)(void *)end;
  end += aotmm_octet_count * sizeof *to->octets;
  to->places = (uint32_t *)(void *)end;
  to->place_count = place_count;
  end += place_count * sizeof *to->places;
  to->table.config_numbers = append(&end, table->config_numbers, kernels * sizeof *table->config_numbers);
  set_places(to);
  set_octets(to);
  fresh->all = (tables){to, &one, NULL};
  __atomic_store_n(&current, &fresh->all, __ATOMIC_RELEASE);
  __atomic_add_fetch(&generation, 1, __ATOMIC_RELEASE);
  return AOTMM_OK;
}
