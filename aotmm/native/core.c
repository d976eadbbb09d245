/* Selection and launch: everything that does not depend on the driver. */
#include "core.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GRID = 0x7fffffff, MIN_STEPS = 2 /* along K, of a slice */, PROGRAMMATIC_BELOW_NS = 50000 };
enum { FULL_PROGRAMMATIC_BELOW_NS = 12000 /* of a launch that does not leave room for the next */, SPLIT_LINES = 3 };
enum { LINE_BYTES = 128 /* lines in the workspace start at multiples of it */, VECTOR_BYTES = 16 };
enum { PANEL = 128 /* panels begin at multiples of it: all addresses in them are aligned alike, up to 128 bytes */ };
static const int64_t max_workspace = 1ll << 40;
static const int32_t element_bytes[] = AOTMM_ELEMENT_BYTES;

/* For what selection does for every kernel: a call costs as much as what it is for. */
#define HOT static inline __attribute__((always_inline))
/* For what it does for few products: whatever that calls is not taken apart for its sake. */
#define COLD static __attribute__((noinline, cold))

static __thread aotmm_error last_error;
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

int aotmm_fail(int status, int code, int device, const char *call, const char *format, ...) {
  va_list list;
  last_error.status = status;
  last_error.code = code;
  last_error.device = device;
  snprintf(last_error.call, sizeof last_error.call, "%s", call);
  va_start(list, format);
  vsnprintf(last_error.text, sizeof last_error.text, format, list);
  va_end(list);
  return status;
}

int aotmm_fail_forked(int ordinal) {
  return aotmm_fail(AOTMM_NO_DRIVER, 0, ordinal, "fork",
                    "device %d cannot be used: this process was forked after the GPU's driver had been opened, and GPU "
                    "contexts do not survive fork; start such processes with multiprocessing.get_context(\"spawn\")",
                    ordinal);
}

const aotmm_error *aotmm_last_error(void) { return &last_error; }

/* ------------------------------------------------------------------------------------------------- selection */

/* Distance in elements from the first to the last element of a (rows, cols) operand; the largest int64 when more. */
static int64_t extent(int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride) {
  int64_t down, across, sum;
  if (rows == 0 || cols == 0) return 0;
  if (__builtin_mul_overflow(rows - 1, row_stride, &down) || __builtin_mul_overflow(cols - 1, col_stride, &across) ||
      __builtin_add_overflow(down, across, &sum))
    return INT64_MAX;
  return sum;
}

static int valid(const aotmm_problem *p) {
  if (p->M < 0 || p->N < 0 || p->K < 0)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "M=%lld N=%lld K=%lld: sizes are not negative", (long long)p->M,
                      (long long)p->N, (long long)p->K);
  if (p->batch < 1)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "batch=%lld: at least 1", (long long)p->batch);
  const int64_t strides[] = {p->stride_am,      p->stride_ak,      p->stride_bk,      p->stride_bn,     p->stride_cm,
                             p->stride_cn,      p->stride_az,      p->stride_bz,      p->stride_cz,     p->stride_bias_z,
                             p->stride_bias_m,  p->stride_bias_n,  p->stride_scale_a, p->stride_scale_b};
  int64_t signs = 0;
  for (unsigned i = 0; i < sizeof strides / sizeof *strides; i++) signs |= strides[i];
  for (unsigned i = 0; signs < 0 && i < sizeof strides / sizeof *strides; i++)
    if (strides[i] < 0)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "stride %lld: strides are not negative", (long long)strides[i]);
  const struct {
    const char *name;
    int64_t number;
    int count;
  } codes[] = {{"dtype_a", p->dtype_a, AOTMM_DTYPE_COUNT},
               {"dtype_b", p->dtype_b, AOTMM_DTYPE_COUNT},
               {"dtype_c", p->dtype_c, AOTMM_DTYPE_COUNT},
               {"activation", p->activation, AOTMM_ACTIVATION_COUNT}};
  for (int i = 0; i < 4; i++)
    if (codes[i].number < 0 || codes[i].number >= codes[i].count)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "%s=%lld: there are 0 to %d", codes[i].name,
                        (long long)codes[i].number, codes[i].count - 1);
  if (p->dtype_c == AOTMM_INT32 && (p->scale_a_ptr || p->scale_b_ptr || p->bias_ptr || p->activation))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "int32 results have no scales, bias or activation");
  return AOTMM_OK;
}

static int valid_device(const aotmm_device *device) {
  if (device->multiprocessors >= 1) return AOTMM_OK;
  return aotmm_fail(AOTMM_INVALID, 0, -1, "", "multiprocessors=%d: at least 1; did `device` fail?",
                    device->multiprocessors);
}

/* Every quantity of a problem, indexed by AOTMM_VALUE_*. The stride of a dimension of size 1 multiplies only 0: it is
   taken as 0, and a promise that it equals something, or is at least something, holds. */
typedef struct quantities {
  int64_t value[AOTMM_VALUE_COUNT];
  uint64_t free; /* bit set: a stride of that kind */
} quantities;
_Static_assert(AOTMM_VALUE_COUNT <= 64, "quantities.free has a bit for each");

/* The matrices of a product, in the order of AOTMM_COPY_*. */
enum { OPERANDS = 3 };
static const struct {
  uint16_t pointer, rows, cols, row_stride, col_stride, extent;
} operands[OPERANDS] = {
    {AOTMM_VALUE_A_PTR, AOTMM_VALUE_M, AOTMM_VALUE_K, AOTMM_VALUE_STRIDE_AM, AOTMM_VALUE_STRIDE_AK, AOTMM_VALUE_A_EXTENT},
    {AOTMM_VALUE_B_PTR, AOTMM_VALUE_K, AOTMM_VALUE_N, AOTMM_VALUE_STRIDE_BK, AOTMM_VALUE_STRIDE_BN, AOTMM_VALUE_B_EXTENT},
    {AOTMM_VALUE_C_PTR, AOTMM_VALUE_M, AOTMM_VALUE_N, AOTMM_VALUE_STRIDE_CM, AOTMM_VALUE_STRIDE_CN, AOTMM_VALUE_C_EXTENT},
};

static void set_extent(quantities *q, int operand) {
  int64_t *value = q->value;
  value[operands[operand].extent] = extent(value[operands[operand].rows], value[operands[operand].row_stride],
                                           value[operands[operand].cols], value[operands[operand].col_stride]);
}

static void set_quantities(quantities *q, const aotmm_problem *p) {
  static const struct {
    uint16_t size, strides[3];
  } dimensions[] = {
      {AOTMM_VALUE_M, {AOTMM_VALUE_STRIDE_AM, AOTMM_VALUE_STRIDE_CM, AOTMM_VALUE_STRIDE_BIAS_M}},
      {AOTMM_VALUE_N, {AOTMM_VALUE_STRIDE_BN, AOTMM_VALUE_STRIDE_CN, AOTMM_VALUE_STRIDE_BIAS_N}},
      {AOTMM_VALUE_K, {AOTMM_VALUE_STRIDE_AK, AOTMM_VALUE_STRIDE_BK, AOTMM_VALUE_STRIDE_BK}},
      {AOTMM_VALUE_BATCH, {AOTMM_VALUE_STRIDE_AZ, AOTMM_VALUE_STRIDE_BZ, AOTMM_VALUE_STRIDE_CZ}},
  };
  int64_t *value = q->value;
  memcpy(value, p, AOTMM_VALUE_SLOPE * sizeof *value);
  memset(value + AOTMM_VALUE_SLOPE, 0, sizeof *q - AOTMM_VALUE_SLOPE * sizeof *value);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 3 && value[dimensions[i].size] == 1; k++) {
      value[dimensions[i].strides[k]] = 0;
      q->free |= 1ull << dimensions[i].strides[k];
    }
  memcpy(value + AOTMM_VALUE_SLOPE, &p->slope, sizeof p->slope);
  for (int i = 0; i < OPERANDS; i++) set_extent(q, i);
  value[AOTMM_VALUE_BIAS_RANK] = !p->bias_ptr ? 0 : value[AOTMM_VALUE_STRIDE_BIAS_M] ? 2 : 1;
  value[AOTMM_VALUE_SPLIT] = 1;
  value[AOTMM_VALUE_C_SPAN] = p->N;
}

HOT int kept(const aotmm_condition *c, const quantities *q) {
  return ((uint64_t)q->value[c->value] & c->mask) - c->least <= c->span || q->free >> c->value & 1;
}

/* Whether the promises of a kernel hold. */
static int keeps(uint32_t kernel, const quantities *q) {
  const aotmm_condition *c = aotmm_conditions + aotmm_promised[kernel].first, *end = c + aotmm_promised[kernel].count;
  while (c < end && kept(c, q)) c++;
  return c == end;
}

/* Whether those of them hold that are about the sums of slices. */
static int keeps_sums(uint32_t kernel, const quantities *q) {
  const aotmm_condition *first = aotmm_conditions + aotmm_promised[kernel].first;
  const aotmm_condition *c = first + aotmm_promised[kernel].count;
  for (; c > first && c[-1].value >= AOTMM_VALUE_WORKSPACE_PTR; c--)
    if (!kept(c - 1, q)) return 0;
  return 1;
}

/* The number of the first promise of a kernel that is broken, in its own order; `promise_count` if all hold. */
static uint32_t first_broken(const aotmm_kernel *k, const quantities *q) {
  uint32_t i = 0;
  for (; i < k->promise_count; i++) {
    const aotmm_promise *promise = k->promises + i;
    int64_t value = q->value[promise->value], operand = promise->operand;
    int holds = promise->relation == AOTMM_EQUALS        ? value == operand
                : promise->relation == AOTMM_MULTIPLE_OF ? !(value & (operand - 1))
                : promise->relation == AOTMM_BELOW       ? value < operand
                                                         : value >= operand;
    if (!holds && !(q->free >> promise->value & 1)) break;
  }
  return i;
}

HOT int64_t ceil_div(int64_t a, int64_t b) {
  if (((uint64_t)a | (uint64_t)b) >> 32) return a / b + (a % b != 0);
  uint32_t quotient = (uint32_t)a / (uint32_t)b; /* most are small, and division is slow */
  return (int64_t)quotient + (quotient * (uint32_t)b != (uint32_t)a);
}

/* What is left of a product of any stride and the bytes of an element when it is divided by a power of two. */
HOT uint64_t rest_of(int64_t stride, int64_t width, uint64_t power) {
  return (uint64_t)stride * (uint64_t)width & (power - 1);
}

/* Not negative, and the largest int64 when the product is more. */
HOT int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* Bytes of a region of the workspace for that many; more than max_workspace when they are. */
static int64_t region(int64_t bytes) {
  if (bytes > max_workspace) return max_workspace + 1;
  return (bytes + AOTMM_WORKSPACE_ALIGNMENT - 1) & -(int64_t)AOTMM_WORKSPACE_ALIGNMENT;
}

/* ---- operands in the workspace */

/* Where a matrix lies in the workspace: `lines` lines of `length` contiguous elements, `pitch` elements apart. Lines are
   columns if it is transposed, else rows. */
typedef struct place {
  int transposed;
  int64_t lines, length, pitch, bytes;
} place;

static int unit(const quantities *q, int stride) { return q->value[stride] == 1 || q->free >> stride & 1; }

/* Whether lines that far apart all start at a multiple of 16 bytes, and are more than one line. */
static int aligned(const quantities *q, int stride, int64_t width) {
  return (q->value[stride] > 0 && !rest_of(q->value[stride], width, VECTOR_BYTES)) || q->free >> stride & 1;
}

/* Whether an operand lies as the fast kernels need it. For 1-byte types they take row-major A and column-major B only:
   tensor cores turn 16-bit elements alone. */
static int lies_well(const quantities *q, int i, int64_t width) {
  int rows = unit(q, operands[i].col_stride) && aligned(q, operands[i].row_stride, width);
  int cols = unit(q, operands[i].row_stride) && aligned(q, operands[i].col_stride, width);
  if (q->value[operands[i].pointer] & (VECTOR_BYTES - 1)) return 0;
  if (i == 2 && rest_of(q->value[AOTMM_VALUE_C_SPAN], width, VECTOR_BYTES)) return 0;
  return i == 0 ? rows || (cols && width > 1) : i == 1 ? cols || (rows && width > 1) : rows;
}

/* The place for a copy: in the memory order of the operand, where that is one that fast kernels take. */
static place place_of(const quantities *q, int i, int64_t width) {
  int rows = unit(q, operands[i].col_stride), cols = unit(q, operands[i].row_stride);
  place found = {.transposed = i == 0 ? width > 1 && cols && !rows : i == 1 ? width == 1 || !rows : 0};
  found.lines = q->value[found.transposed ? operands[i].cols : operands[i].rows];
  found.length = q->value[found.transposed ? operands[i].rows : operands[i].cols];
  int64_t bytes = times(found.length, width);
  if (bytes > max_workspace) bytes = max_workspace + 1; /* refused later, but no overflow now */
  bytes = (bytes + LINE_BYTES - 1) & -(int64_t)LINE_BYTES;
  found.pitch = bytes / width;
  found.bytes = region(times(bytes, found.lines));
  return found;
}

static int64_t bytes_of_copies(const place *places, uint32_t copies) {
  int64_t bytes = 0;
  for (int i = 0; i < OPERANDS; i++)
    if (copies >> i & 1) bytes += places[i].bytes;
  return bytes;
}

/* Of an address: whatever a caller says it is, it only wraps around. */
static int64_t behind(int64_t address, int64_t bytes) { return (int64_t)((uint64_t)address + (uint64_t)bytes); }

/* The same problem with the operands of `copies` in a workspace at `address`. */
static void set_copies(quantities *moved, const quantities *q, const place *places, uint32_t copies, int64_t address) {
  *moved = *q;
  for (int i = 0; i < OPERANDS; i++) {
    if (!(copies >> i & 1)) continue;
    int lines = places[i].transposed ? operands[i].col_stride : operands[i].row_stride;
    int along = places[i].transposed ? operands[i].row_stride : operands[i].col_stride;
    moved->value[operands[i].pointer] = address;
    moved->value[lines] = q->free >> lines & 1 ? 0 : places[i].pitch;
    moved->value[along] = q->free >> along & 1 ? 0 : 1;
    set_extent(moved, i);
    if (i == 2) moved->value[AOTMM_VALUE_C_SPAN] = places[i].pitch;
    address = behind(address, places[i].bytes);
  }
}

/* What a copy kernel is launched with: the operand is the source, or the destination if it is C; `moved` has the other
   side. Lines of the destination are its contiguous ones. */
static void set_copy(quantities *made, const quantities *q, const quantities *moved, int i, const place *to) {
  const quantities *from = i == 2 ? moved : q, *into = i == 2 ? q : moved;
  int turned = i == 2 ? unit(q, AOTMM_VALUE_STRIDE_CM) && !unit(q, AOTMM_VALUE_STRIDE_CN) : to->transposed;
  int rows = turned ? operands[i].cols : operands[i].rows, cols = turned ? operands[i].rows : operands[i].cols;
  int lines = turned ? operands[i].col_stride : operands[i].row_stride;
  int along = turned ? operands[i].row_stride : operands[i].col_stride;
  aotmm_problem copy = {.a_ptr = from->value[operands[i].pointer],
                        .c_ptr = into->value[operands[i].pointer],
                        .M = q->value[rows],
                        .N = q->value[cols],
                        .K = q->value[cols],
                        .stride_am = from->value[lines],
                        .stride_ak = from->value[along],
                        .stride_cm = into->value[lines],
                        .stride_cn = into->value[along],
                        .batch = 1};
  set_quantities(made, &copy);
}

/* ---- grids and helpers */

/* Blocks of a launch of that many units of work; 0 if a grid cannot have so many. */
static uint32_t grid_of(const aotmm_kernel *k, int64_t units, const aotmm_device *device) {
  if (units > MAX_GRID || units * k->num_ctas > MAX_GRID) return 0;
  if (k->persistent) {
    int64_t most = (int64_t)k->resident * device->multiprocessors / k->num_ctas;
    if (units > most) units = most ? most : 1;
  }
  uint64_t blocks = (uint64_t)units * k->num_ctas;
  return blocks * k->threads > driver_max_threads ? 0 : (uint32_t)blocks;
}

HOT int64_t tiles_of(uint32_t kernel, int64_t M, int64_t N) {
  return times(ceil_div(M, aotmm_kernels[kernel].block_m), ceil_div(N, aotmm_kernels[kernel].block_n));
}

/* Steps along K. */
HOT int64_t steps_of(uint32_t kernel, int64_t K) { return ceil_div(K, aotmm_kernels[kernel].block_k); }

/* The first kernel of a group that has the epilogue and keeps its promises, or -1. */
static int helper_for(aotmm_group group, int32_t epilogue, const quantities *q, const aotmm_device *device) {
  for (int i = 0; i < group.count; i++) {
    uint32_t number = aotmm_order[group.first + i];
    const aotmm_kernel *k = aotmm_kernels + number;
    if (k->epilogue >= epilogue && k->shared_bytes <= (uint32_t)device->shared_bytes &&
        keeps(number, q) && grid_of(k, tiles_of(number, q->value[AOTMM_VALUE_M], q->value[AOTMM_VALUE_N]), device))
      return (int)number;
  }
  return -1;
}

/* The least epilogue that the problem needs. */
static int32_t epilogue(const aotmm_problem *p) {
  static const int32_t least[] = AOTMM_ACTIVATION_EPILOGUES;
  return p->bias_ptr && least[p->activation] < AOTMM_EPILOGUE_LINEAR ? AOTMM_EPILOGUE_LINEAR : least[p->activation];
}

static int copy_for(const aotmm_problem *p, const quantities *copy, int i, const aotmm_device *device) {
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  return helper_for(aotmm_copies[element_bytes[types[i]]], 0, copy, device);
}

static int reduce_for(const aotmm_problem *p, const quantities *q, const aotmm_device *device) {
  return helper_for(aotmm_reduces[p->dtype_c], epilogue(p), q, device);
}

/* Places the partial sums of a kernel in `q`; returns their bytes. */
static int64_t set_sums(quantities *q, uint32_t kernel, int64_t split, int64_t address) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  int64_t rows = times(ceil_div(q->value[AOTMM_VALUE_M], k->block_m), k->block_m);
  int64_t cols = times(ceil_div(q->value[AOTMM_VALUE_N], k->block_n), k->block_n);
  q->value[AOTMM_VALUE_WORKSPACE_PTR] = address;
  q->value[AOTMM_VALUE_WORKSPACE_STRIDE_M] = cols;
  q->value[AOTMM_VALUE_WORKSPACE_STRIDE_Z] = times(rows, cols);
  q->value[AOTMM_VALUE_SPLIT] = split;
  return region(times(times(rows, cols), 4 * split));
}

static void set_no_sums(quantities *q) {
  q->value[AOTMM_VALUE_WORKSPACE_PTR] = 0;
  q->value[AOTMM_VALUE_WORKSPACE_STRIDE_M] = q->value[AOTMM_VALUE_WORKSPACE_STRIDE_Z] = 0;
  q->value[AOTMM_VALUE_SPLIT] = 1;
}

/* ---- the time model, as launcher.h writes it */

static const aotmm_tuning *tuning = &aotmm_built_tuning;

/* Single precision, in which bounds on times are: what is taken off a number before it is rounded up and off a time, more than
   they can be wrong by with their own number (up to MAX_BOUNDS) for the last bits, what a bound takes into account, and what is
   in its place where there is nothing more to look for. */
enum { MAX_BOUNDS = 512 };
#define SLACK 1e-6f
#define LESS (1 - 20 * SLACK - MAX_BOUNDS * 0x1p-23f)
#define MOST 1e37f
#define DONE 1e38f

/* Not more than x. */
static float less_than(double x) { return x < 1e30 ? (float)x * LESS : 1e30f; }

/* A product is cut into `down` times `across` panels of C, of so many rows and columns; the last ones have fewer. */
typedef struct panels {
  int64_t rows, cols, down, across, last_rows, last_cols;
} panels;

/* How many panels a copy of an operand is made for. */
static int64_t panels_of_copy(const panels *cut, int operand) {
  return operand == 0 ? cut->across : operand == 1 && cut->across == 1 ? cut->down : 1;
}

/* One search for a plan. */
typedef struct query {
  const aotmm_problem *problem; /* of one panel */
  const panels *cut;            /* NULL: one panel is all of it */
  const aotmm_device *device;
  const aotmm_tuning *tuning;
  int rows;      /* place in AOTMM_ROWS */
  int64_t limit; /* of the workspace */
  double bytes_read, bytes_moved; /* of A and B; by a product */
  float M, N, K, batch, per_multiprocessor, all_read, all_written; /* what bounds take; bytes of a product */
  float least_reduce; /* no reduce takes less */
  int32_t epilogue;   /* the least that the problem needs */
  uint32_t units;     /* as in aotmm_span, of all ways */
  uint32_t excluded;  /* copies that would take more than the limit */
  int count;          /* ways to place the operands, the one without copies first */
  struct {
    uint32_t copies;
    int64_t bytes; /* of the copies */
    double time;   /* of copying */
    float row_a, col_b; /* bytes of an element of A and of B, as loads_of counts them */
    float least_time;
    quantities q;
  } ways[OPERANDS];
  const aotmm_time *measured[2]; /* of this shape, by schedule; by fast_accum; NULL if there is none */
} query;

HOT const aotmm_constants *constants_of(const query *s, uint32_t kernel) { return s->tuning->constants[kernel] + s->rows; }

static double copy_time(const query *s, int kernel, const quantities *copy, int width) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  return c->base + (double)copy->value[AOTMM_VALUE_M] * (double)copy->value[AOTMM_VALUE_N] * (2 * width) * c->byte;
}

static double reduce_time(const query *s, int kernel, uint32_t split) {
  const aotmm_constants *c = constants_of(s, (uint32_t)kernel);
  const aotmm_problem *p = s->problem;
  return c->base + (double)p->M * (double)p->N * (4 * split + element_bytes[p->dtype_c]) * c->byte;
}

/* Units of work that a device takes at once, at least 1. */
HOT int64_t slots_of(const query *s, uint32_t kernel) {
  int64_t blocks = (int64_t)s->device->multiprocessors * constants_of(s, kernel)->blocks;
  uint32_t together = aotmm_kernels[kernel].num_ctas;
  return together == 1 ? blocks : blocks < together ? 1 : blocks / together;
}

/* Bytes that a tile loads in a step; those of rows that lie across cache lines count SPLIT_LINES times. */
HOT double loads_of(const query *s, int way, uint32_t kernel) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  return (double)k->block_k * ((double)k->block_m * s->ways[way].row_a + (double)k->block_n * s->ways[way].col_b);
}

/* A kernel computes while it loads, but for this part of whichever takes less. */
#define ALONE 0.4

HOT double overlapped(double busy, double moving) {
  return busy > moving ? busy + ALONE * moving : moving + ALONE * busy;
}

/* `steps` are those of a slice. */
HOT double main_time(const query *s, int way, uint32_t kernel, int64_t units, int64_t steps, double bytes) {
  const aotmm_constants *c = constants_of(s, kernel);
  double busy = (double)ceil_div(units, slots_of(s, kernel)) * ((double)steps * c->step + c->tile);
  double moving = bytes * c->byte + (double)units * (double)steps * loads_of(s, way, kernel) * c->load;
  return c->base + overlapped(busy, moving);
}

static int64_t as_cost(double time) { return time < 9e18 ? (int64_t)time : INT64_MAX; }

/* What was measured of a kernel on this shape, or NULL. */
HOT const aotmm_time *measured_time(const query *s, uint32_t kernel) {
  const aotmm_time *times_ = s->measured[aotmm_kernels[kernel].fast_accum];
  uint16_t schedule = s->tuning->schedules[kernel];
  return times_ && schedule != AOTMM_UNMEASURED && times_[schedule].ns ? times_ + schedule : NULL;
}

/* Where a search for a shape begins in aotmm_tuning.places. */
static uint32_t place_in(const aotmm_tuning *t, const aotmm_shape *shape) {
  uint64_t sum = (uint64_t)shape->M * 0x9e3779b97f4a7c15 + (uint64_t)shape->N * 0xc2b2ae3d27d4eb4f +
                 (uint64_t)shape->K * 0x165667b19e3779f9 +
                 (uint64_t)(shape->width << 4 | shape->fast_accum << 3 | shape->layout) * 0x27d4eb2f165667c5;
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

/* The times of a shape, or NULL. */
static const aotmm_time *find_times(const aotmm_tuning *t, const aotmm_shape *wanted) {
  for (uint32_t place = place_in(t, wanted); t->places[place]; place = (place + 1) & (t->place_count - 1)) {
    const aotmm_shape *shape = t->shapes + t->places[place] - 1;
    if (shape->M == wanted->M && shape->N == wanted->N && shape->K == wanted->K && shape->width == wanted->width &&
        shape->fast_accum == wanted->fast_accum && shape->layout == wanted->layout)
      return t->times + (size_t)(t->places[place] - 1) * t->schedule_count;
  }
  return NULL;
}

static void find_measured(query *s) {
  const aotmm_problem *p = s->problem;
  const quantities *q = &s->ways[0].q;
  int rows_a = unit(q, AOTMM_VALUE_STRIDE_AK), cols_a = unit(q, AOTMM_VALUE_STRIDE_AM);
  int rows_b = unit(q, AOTMM_VALUE_STRIDE_BN), cols_b = unit(q, AOTMM_VALUE_STRIDE_BK);
  if (p->batch != 1 || !(rows_a || cols_a) || !(rows_b || cols_b)) return;
  aotmm_shape wanted = {.M = p->M, .N = p->N, .K = p->K, .width = element_bytes[p->dtype_a]};
  wanted.layout = rows_a ? (rows_b ? AOTMM_LAYOUT_NN : AOTMM_LAYOUT_NT) : rows_b ? AOTMM_LAYOUT_TN : AOTMM_LAYOUT_TT;
  for (wanted.fast_accum = 0; wanted.fast_accum <= (p->fast_accum != 0); wanted.fast_accum++)
    s->measured[wanted.fast_accum] = find_times(s->tuning, &wanted);
}

/* ---- search */

static uint32_t units_of(const quantities *q) {
  uint32_t units = 0;
  for (int i = 0; AOTMM_VALUE_STRIDE_AM + i <= AOTMM_VALUE_STRIDE_CN; i++)
    units |= (uint32_t)unit(q, AOTMM_VALUE_STRIDE_AM + i) << i;
  return units;
}

static const int32_t rows_from[] = AOTMM_ROWS;

/* Which of the table's constants are for M rows. */
static int place_of_rows(int64_t M) {
  int place = 0;
  for (int i = 1; i < AOTMM_ROWS_COUNT; i++) place += M >= rows_from[i];
  return place;
}

/* What the last way's quantities say of it. */
static void describe_way(query *s) {
  const quantities *q = &s->ways[s->count - 1].q;
  const int64_t *value = q->value;
  int64_t rows_a = value[unit(q, AOTMM_VALUE_STRIDE_AK) ? AOTMM_VALUE_STRIDE_AM : AOTMM_VALUE_STRIDE_AK];
  int64_t cols_b = value[unit(q, AOTMM_VALUE_STRIDE_BK) ? AOTMM_VALUE_STRIDE_BN : AOTMM_VALUE_STRIDE_BK];
  s->ways[s->count - 1].least_time = less_than(s->ways[s->count - 1].time);
  uint32_t width_a = (uint32_t)element_bytes[s->problem->dtype_a], width_b = (uint32_t)element_bytes[s->problem->dtype_b];
  s->units |= units_of(q);
  s->ways[s->count - 1].row_a = (float)(width_a * (rest_of(rows_a, width_a, LINE_BYTES) ? SPLIT_LINES : 1));
  s->ways[s->count - 1].col_b = (float)(width_b * (rest_of(cols_b, width_b, LINE_BYTES) ? SPLIT_LINES : 1));
}

/* Adds the way of placing operands that copies those in `copies`, if there are kernels that can. */
static void add_way(query *s, const place *places, uint32_t copies) {
  const aotmm_problem *p = s->problem;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  int64_t bytes = bytes_of_copies(places, copies);
  double time = 0;
  if (bytes > s->limit) {
    s->excluded = copies;
    return;
  }
  quantities *moved = &s->ways[s->count].q;
  set_copies(moved, &s->ways[0].q, places, copies, AOTMM_WORKSPACE_ALIGNMENT);
  for (int i = 0; i < OPERANDS; i++) {
    if (!(copies >> i & 1)) continue;
    quantities copy;
    set_copy(&copy, &s->ways[0].q, moved, i, places + i);
    int kernel = copy_for(p, &copy, i, s->device);
    if (kernel < 0) return;
    double each = copy_time(s, kernel, &copy, element_bytes[types[i]]);
    time += s->cut ? each / (double)panels_of_copy(s->cut, i) : each;
  }
  s->ways[s->count].copies = copies;
  s->ways[s->count].bytes = bytes;
  s->ways[s->count].time = time;
  s->count++;
  describe_way(s);
}

static void start(query *s, const aotmm_problem *p, const panels *cut, const aotmm_device *device, uint64_t limit) {
  s->problem = p;
  s->cut = cut;
  s->device = device;
  s->tuning = __atomic_load_n(&tuning, __ATOMIC_ACQUIRE);
  s->M = (float)p->M, s->N = (float)p->N, s->K = (float)p->K, s->batch = (float)p->batch;
  s->per_multiprocessor = 1 / (float)device->multiprocessors;
  s->rows = place_of_rows(p->M);
  s->epilogue = epilogue(p);
  s->limit = limit < (uint64_t)max_workspace ? (int64_t)limit : max_workspace;
  s->units = s->excluded = 0;
  s->count = 1;
  s->ways[0].copies = 0;
  s->ways[0].bytes = 0;
  s->ways[0].time = 0;
  set_quantities(&s->ways[0].q, p);
  if (cut) s->ways[0].q.value[AOTMM_VALUE_C_SPAN] = cut->last_cols; /* the others' are multiples of PANEL */
  describe_way(s);
  s->bytes_read = (double)p->M * (double)p->K * element_bytes[p->dtype_a] +
                  (double)p->K * (double)p->N * element_bytes[p->dtype_b];
  const double written = (double)p->M * (double)p->N * element_bytes[p->dtype_c];
  s->bytes_moved = (double)p->batch * (s->bytes_read + written);
  s->all_read = (float)((double)p->batch * s->bytes_read), s->all_written = (float)((double)p->batch * written);
  s->measured[0] = s->measured[1] = NULL;
  if (!cut) find_measured(s);
  if (s->limit == 0 || p->batch != 1 || p->M == 0 || p->N == 0 || p->K == 0) return;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  place places[OPERANDS];
  uint32_t needed = 0;
  for (int i = 0; i < OPERANDS; i++) {
    if (lies_well(&s->ways[0].q, i, element_bytes[types[i]])) continue;
    needed |= 1u << i;
    places[i] = place_of(&s->ways[0].q, i, element_bytes[types[i]]);
  }
  if (needed & ~(uint32_t)AOTMM_COPY_C) add_way(s, places, needed & ~(uint32_t)AOTMM_COPY_C);
  if (needed & AOTMM_COPY_C) add_way(s, places, needed);
}

static int same_types(const aotmm_kernel *k, const aotmm_problem *p) {
  int a = k->dtype_a == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_a, b = k->dtype_b == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_b;
  return a == p->dtype_a && b == p->dtype_b &&
         (k->role == AOTMM_ROLE_PARTIAL || (k->dtype_c == p->dtype_c && k->epilogue >= epilogue(p)));
}

/* Whether the promises of a kernel hold for the last panel. */
COLD int keeps_in_last(const query *s, int way, uint32_t kernel) {
  quantities last = s->ways[way].q;
  last.value[AOTMM_VALUE_M] = s->cut->last_rows, last.value[AOTMM_VALUE_N] = s->cut->last_cols;
  return keeps(kernel, &last);
}

/* Whether the promises of a kernel hold in a way, for all panels. A reduce writes any C, so it is never copied. For a partial the sums are taken
   to lie as any promise wants them; `plan_partial` knows better. */
static int keeps_in(const query *s, int way, uint32_t kernel) {
  uint32_t not_copied = aotmm_kernels[kernel].role == AOTMM_ROLE_PARTIAL ? AOTMM_COPY_C : 0;
  return !(s->ways[way].copies & not_copied) && keeps(kernel, &s->ways[way].q) &&
         (!s->cut || keeps_in_last(s, way, kernel));
}

/* Scratch memory behind a kernel's blocks, in bytes. */
static int64_t scratch_of(const aotmm_kernel *k, uint32_t grid) {
  return k->global_scratch_bytes ? region((int64_t)grid * k->global_scratch_bytes) : 0;
}

static int bits(uint32_t copies) { return __builtin_popcount(copies); }

/* Whether `a` is chosen over `b` where both cost the same. */
static int preferred(const aotmm_plan *a, const aotmm_plan *b) {
  const aotmm_kernel *k = aotmm_kernels + a->kernel, *other = aotmm_kernels + b->kernel;
  if (bits(a->copies) != bits(b->copies)) return bits(a->copies) < bits(b->copies);
  if (k->epilogue != other->epilogue) return k->epilogue < other->epilogue;
  if (k->vector_bytes != other->vector_bytes) return k->vector_bytes > other->vector_bytes;
  return a->kernel != b->kernel ? a->kernel < b->kernel : a->split < b->split;
}

/* The best plan so far, of any kernel (cost < 0: none), and why there is none, as in aotmm_verdict. */
typedef struct search {
  aotmm_plan best;
  double time; /* from which on a plan costs more */
  int64_t found;
} search;

static search nothing_found(void) { return (search){.best.cost = -1, .time = INFINITY}; }

/* Predicted time from which on a launch does not gain from beginning before the one before it ends. */
static double programmatic_below(const query *s, uint32_t kernel, int64_t units) {
  int64_t slots = slots_of(s, kernel);
  return units > slots / 2 && units <= slots ? FULL_PROGRAMMATIC_BELOW_NS : PROGRAMMATIC_BELOW_NS;
}

/* Makes the plan with these slices, which takes less than to->time, the best if it is; returns why it does not fit. */
static int32_t consider(const query *s, int way, uint32_t kernel, uint32_t split, double time,
                        const aotmm_time *measured, int64_t tiles, int64_t sums, search *to) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  int64_t cost = as_cost(time);
  int64_t units = times(tiles, split);
  int programmatic = measured ? measured->programmatic
                              : k->role == AOTMM_ROLE_PRODUCT && time - s->ways[way].time < programmatic_below(s, kernel, units);
  aotmm_plan plan = {.kernel = kernel,
                     .split = split,
                     .copies = s->ways[way].copies,
                     .programmatic = (uint32_t)(programmatic && k->programmatic),
                     .measured = measured != NULL,
                     .cost = cost};
  if (to->best.cost == cost && !preferred(&plan, &to->best)) return AOTMM_FITS;
  plan.grid = grid_of(k, units, s->device);
  to->found = units;
  if (!plan.grid && units) return AOTMM_TOO_MANY_BLOCKS;
  to->found = s->ways[way].bytes + sums + scratch_of(k, plan.grid);
  if (to->found > s->limit) return AOTMM_TOO_MUCH_WORKSPACE;
  plan.workspace_bytes = (uint64_t)to->found;
  to->best = plan;
  to->time = (double)cost + 1;
  return AOTMM_FITS;
}

static int32_t plan_product(const query *s, int way, uint32_t kernel, search *to) {
  const aotmm_problem *p = s->problem;
  int64_t tiles = times(tiles_of(kernel, p->M, p->N), p->batch);
  const aotmm_time *measured = way == 0 ? measured_time(s, kernel) : NULL;
  double time = measured ? measured->ns
                         : main_time(s, way, kernel, tiles, steps_of(kernel, p->K), s->bytes_moved) + s->ways[way].time;
  return time >= to->time ? AOTMM_FITS : consider(s, way, kernel, 1, time, measured, tiles, 0, to);
}

static int32_t plan_partial(query *s, int way, uint32_t kernel, search *to) {
  static const uint8_t splits[] = AOTMM_SPLITS;
  const aotmm_problem *p = s->problem;
  int64_t tiles = tiles_of(kernel, p->M, p->N), steps = steps_of(kernel, p->K);
  if (p->batch != 1 || tiles == 0 || steps < 2 * MIN_STEPS) return AOTMM_NO_SPLIT;
  const aotmm_time *measured = way == 0 ? measured_time(s, kernel) : NULL;
  quantities *q = &s->ways[way].q;
  set_sums(q, kernel, AOTMM_MAX_SPLIT, AOTMM_WORKSPACE_ALIGNMENT);
  int reduce = keeps_sums(kernel, q) ? reduce_for(p, q, s->device) : -1;
  int64_t slab = q->value[AOTMM_VALUE_WORKSPACE_STRIDE_Z];
  set_no_sums(q);
  if (reduce < 0) return AOTMM_NO_SPLIT;
  const aotmm_constants *c = constants_of(s, kernel);
  int32_t reason = AOTMM_NO_SPLIT;
  int fits = 0;
  for (unsigned i = sizeof splits; i-- > 0;) { /* the less slices, the longer each takes */
    uint32_t split = splits[i];
    if (measured ? split != measured->split : steps < (int64_t)split * MIN_STEPS) continue;
    int64_t own = ceil_div(steps, split);
    if (!measured && c->base + (double)own * c->step >= to->time) return AOTMM_FITS;
    double time = measured ? measured->ns
                           : main_time(s, way, kernel, times(tiles, split), own, s->bytes_read + split * 4.0 * (double)slab) +
                                 reduce_time(s, reduce, split) + s->ways[way].time;
    reason = time >= to->time ? AOTMM_FITS
                              : consider(s, way, kernel, split, time, measured, tiles, region(times(slab, 4 * split)), to);
    fits |= reason == AOTMM_FITS;
  }
  return fits ? AOTMM_FITS : reason;
}

static int32_t plan_kernel(query *s, int way, uint32_t kernel, search *to) {
  int product = aotmm_kernels[kernel].role == AOTMM_ROLE_PRODUCT;
  return product ? plan_product(s, way, kernel, to) : plan_partial(s, way, kernel, to);
}

/* The best plan with one kernel, or why there is none. */
COLD int32_t search_kernel(query *s, uint32_t kernel, search *to) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  int way = 0;
  while (way < s->count && !keeps_in(s, way, kernel)) way++;
  if (way == s->count) return AOTMM_BROKEN_PROMISE;
  if (k->shared_bytes <= (uint32_t)s->device->shared_bytes) return plan_kernel(s, way, kernel, to);
  to->found = s->device->shared_bytes;
  return AOTMM_TOO_MUCH_SHARED;
}

/* ---- bounds: the time model in single precision, for many kernels at once, never more than the model says */

/* Macros, because how functions take vectors depends on the processor. */
#define ALL(x) ((aotmm_floats){0} + (x))
#define LESSER(a, b)                                                                     \
  ({                                                                                     \
    aotmm_floats a_ = a, b_ = b;                                                         \
    for (int i_ = 0; i_ < AOTMM_LANES; i_++) a_[i_] = a_[i_] < b_[i_] ? a_[i_] : b_[i_]; \
    a_;                                                                                  \
  })

/* Rounded up, where x is already less by SLACK: from 2^23 on there are no fractions. */
#define WHOLE 0x1p23f
#define UP(x) ((x) + 0.5f + WHOLE - WHOLE)

/* Bounds of the lanes of a span, of each way in turn. The last bits of each are its number. */
typedef union bounds {
  aotmm_floats block[MAX_BOUNDS / AOTMM_LANES];
  float lane[MAX_BOUNDS];
} bounds;
_Static_assert(AOTMM_MAX_LANES * OPERANDS <= MAX_BOUNDS, "each has a number");
#define NUMBERS                                                           \
  ({                                                                      \
    aotmm_bits lanes_;                                                    \
    for (int i_ = 0; i_ < AOTMM_LANES; i_++) lanes_[i_] = i_;             \
    lanes_;                                                               \
  })
#define NUMBERED(bound, block, numbers) \
  ((aotmm_floats)(((aotmm_bits)(bound) & -MAX_BOUNDS) | ((numbers) + (block) * AOTMM_LANES)))

HOT aotmm_candidates *candidates_of(const aotmm_tuning *t, int rows) { return t->candidates + (uint32_t)rows * aotmm_block_count; }

static void set_candidate(const aotmm_tuning *t, int rows, const aotmm_lane *from, aotmm_candidates *to, int lane) {
  to->class[lane] = from->class;
  to->fast_accum[lane] = -1;
  to->base[lane] = DONE;
  if (!from->count) return;
  const aotmm_kernel *k = aotmm_kernels + aotmm_order[from->first];
  const aotmm_constants *c = t->constants[aotmm_order[from->first]] + rows;
  const float m = (float)k->block_m, n = (float)k->block_n, depth = (float)k->block_k, byte = less_than(c->byte);
  const uint16_t schedule = t->schedules[aotmm_order[from->first]];
  const int partial = k->role == AOTMM_ROLE_PARTIAL;
  uint32_t blocks = c->blocks; /* the most: kernels of a lane differ in them */
  for (int i = 1; i < from->count; i++) {
    uint32_t others = t->constants[aotmm_order[from->first + i]][rows].blocks;
    if (others > blocks) blocks = others;
  }
  to->per_m[lane] = (1 - SLACK) / m;
  to->per_n[lane] = (1 - SLACK) / n;
  to->per_k[lane] = (1 - SLACK) / depth;
  to->per_block[lane] = (1 - SLACK) * (float)k->num_ctas / (float)blocks;
  to->base[lane] = less_than(c->base);
  to->step[lane] = less_than(c->step);
  to->tile[lane] = less_than(c->tile) * (partial ? 2 : 1);
  to->byte[lane] = byte;
  to->byte_c[lane] = partial ? 0 : byte;
  to->sums[lane] = partial ? 2 * 4 * m * n * byte : 0;
  to->load_a[lane] = depth * m * less_than(c->load);
  to->load_b[lane] = depth * n * less_than(c->load);
  to->half[lane] = partial ? 0 : 0.5f;
  to->whole[lane] = partial ? 0 : WHOLE;
  to->partial[lane] = (float)partial;
  if (schedule != AOTMM_UNMEASURED) to->schedule[lane] = schedule, to->fast_accum[lane] = k->fast_accum;
}

static void set_candidates(const aotmm_tuning *t) {
  memset(t->candidates, 0, AOTMM_ROWS_COUNT * aotmm_block_count * sizeof *t->candidates);
  for (int rows = 0; rows < AOTMM_ROWS_COUNT; rows++)
    for (uint32_t i = 0; i < aotmm_block_count * AOTMM_LANES; i++)
      set_candidate(t, rows, aotmm_lanes + i, candidates_of(t, rows) + i / AOTMM_LANES, i % AOTMM_LANES);
}

__attribute__((constructor)) static void prepare(void) {
  set_candidates(&aotmm_built_tuning);
  set_places(&aotmm_built_tuning);
}

/* A partial has two slices at least, and does no better than to keep all multiprocessors busy all the time. */
HOT void set_bounds(const query *s, int ways, const aotmm_candidates *c, int count, bounds *to) {
  const float M = s->M, N = s->N, K = s->K, batch = s->batch, per_multiprocessor = s->per_multiprocessor;
  const aotmm_bits numbers = NUMBERS;
  const float read = s->all_read, written = s->all_written, reduce = s->least_reduce;
  for (int i = 0; i < count; i++, c++) {
    aotmm_floats tiles = UP(M * c->per_m) * UP(N * c->per_n) * batch, steps = UP(K * c->per_k);
    aotmm_floats waves = tiles * LESSER(per_multiprocessor * c->per_block, ALL(1 - SLACK));
    aotmm_floats busy = (waves + c->half + c->whole - c->whole) * (steps * c->step + c->tile);
    aotmm_floats moved = read * c->byte + written * c->byte_c + tiles * c->sums, loaded = tiles * steps;
    aotmm_floats rest = c->base + c->partial * reduce;
    for (int way = 0; way < ways; way++) {
      aotmm_floats moving = moved + loaded * (s->ways[way].row_a * c->load_a + s->ways[way].col_b * c->load_b);
      aotmm_floats time = busy + moving - (float)(1 - ALONE) * LESSER(busy, moving) + s->ways[way].least_time;
      to->block[way * count + i] = NUMBERED(LESSER(time, ALL(MOST)) + rest, way * count + i, numbers);
    }
  }
}

/* Puts the times that were measured of this shape in the place of the bounds without copies. */
HOT void set_measured(const aotmm_time *times_, int fast_accum, const aotmm_candidates *c, int count, bounds *to) {
  for (int i = 0; i < count; i++, c++) {
    aotmm_bits ns;
    for (int lane = 0; lane < AOTMM_LANES; lane++) ns[lane] = (int32_t)times_[c->schedule[lane]].ns;
    aotmm_bits measured = (ns != 0) & (c->fast_accum == fast_accum);
    aotmm_floats times = NUMBERED(LESS * __builtin_convertvector(ns, aotmm_floats), i, NUMBERS);
    to->block[i] = (aotmm_floats)((measured & (aotmm_bits)times) | (~measured & (aotmm_bits)to->block[i]));
  }
}

HOT float least_bound(const bounds *all, int count) {
  aotmm_floats leasts = all->block[0];
  for (int i = 1; i < count; i++) leasts = LESSER(all->block[i], leasts);
  float least = leasts[0];
  for (int i = 1; i < AOTMM_LANES; i++) least = leasts[i] < least ? leasts[i] : least;
  return least;
}

/* ---- search */

/* Of a lane only the plainest kernel that fits counts. */
static void consider_lane(query *s, int way, const aotmm_lane *lane, search *to) {
  for (int i = 0; i < lane->count; i++) {
    uint32_t kernel = aotmm_order[lane->first + i];
    const aotmm_kernel *k = aotmm_kernels + kernel;
    if ((k->role == AOTMM_ROLE_PARTIAL || k->epilogue >= s->epilogue) &&
        (int32_t)k->shared_bytes <= s->device->shared_bytes && plan_kernel(s, way, kernel, to) == AOTMM_FITS)
      return;
  }
}

/* Considers the lanes of a span that may take less time than the best plan so far, the most promising first. Promises are
   looked at for those alone. */
HOT void consider_lanes(query *s, const aotmm_span *span, search *to) {
  const aotmm_lane *lanes = aotmm_lanes + span->first * AOTMM_LANES;
  const aotmm_candidates *candidates = candidates_of(s->tuning, s->rows) + span->first;
  struct {
    int8_t way, keeps; /* the first that is not known to break a promise; whether it is known to keep them */
  } classes[AOTMM_MAX_LANES], *class;
  bounds found;
  memset(classes, 0, sizeof classes);
  if (s->count == 1) /* most have one way: then the loop over them is none */
    set_bounds(s, 1, candidates, span->count, &found);
  else
    set_bounds(s, s->count, candidates, span->count, &found);
  for (int i = 0; i < 2; i++)
    if (s->measured[i]) set_measured(s->measured[i], i, candidates, span->count, &found);
  for (;;) {
    union {
      float bound;
      uint32_t bits;
    } least = {least_bound(&found, span->count * s->count)};
    if (least.bound > DONE / 2 || least.bound > to->time) return;
    int number = (int)(least.bits % MAX_BOUNDS), first = 0, way = 0;
    for (; number >= first + span->count * AOTMM_LANES; way++) first += span->count * AOTMM_LANES;
    const aotmm_lane *lane = lanes + number - first;
    class = classes + lane->class;
    while (!class->keeps && class->way <= way) {
      class->keeps = (int8_t)keeps_in(s, class->way, aotmm_order[lane->first]);
      class->way += !class->keeps;
    }
    if (class->way == way) {
      found.lane[number] = DONE;
      consider_lane(s, way, lane, to);
    } else /* the class fits an earlier way, or not this one */
      for (int i = 0; i < span->count; i++)
        found.block[way * span->count + i] +=
            (aotmm_floats)((candidates[i].class == lane->class) & (aotmm_bits)ALL(DONE));
  }
}

/* It is compiled twice, for two kinds of processors. */
static void consider_baseline(query *s, const aotmm_span *span, search *to) { consider_lanes(s, span, to); }

static void (*consider_span)(query *, const aotmm_span *, search *) = consider_baseline;

#ifdef __x86_64__
__attribute__((target("avx2"))) static void consider_avx2(query *s, const aotmm_span *span, search *to) {
  consider_lanes(s, span, to);
}

/* As __builtin_cpu_supports, for which not every compiler brings what it needs in a shared library. */
__attribute__((constructor)) static void use_avx2(void) {
  enum { SAVED = 6 /* by the system: registers of 16 and of 32 bytes */ };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & SAVED) == SAVED && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_AVX2) consider_span = consider_avx2;
}
#endif

static void consider_group(query *s, aotmm_group group, search *to) {
  const aotmm_span *before = NULL;
  for (const aotmm_span *span = aotmm_spans + group.first, *end = span + group.count; span < end; span++) {
    if (span->units & ~s->units || (before && span->units != before->units && !(span->units & ~before->units)))
      continue; /* `before` has its lanes */
    consider_span(s, span, to);
    before = span;
  }
}

static double least_reduce(const query *s) {
  aotmm_group group = aotmm_reduces[s->problem->dtype_c];
  double least = INFINITY;
  for (int i = 0; i < group.count; i++) {
    double time = reduce_time(s, aotmm_order[group.first + i], 2);
    if (time < least) least = time;
  }
  return least;
}

HOT void search_all(query *s, search *to) {
  const aotmm_problem *p = s->problem;
  s->least_reduce = s->limit && p->batch == 1 ? less_than(least_reduce(s)) : DONE;
  consider_group(s, aotmm_mains[p->dtype_a][p->dtype_b][p->dtype_c], to);
}

/* ---- panels: products whose copies exceed the limit, in parts of C whose copies do not */

/* The fewest parts of at most `most` elements, a multiple of PANEL, as equal as multiples of it can be. */
static int64_t evenly(int64_t size, int64_t most) {
  return size <= most ? size : times(ceil_div(ceil_div(size, ceil_div(size, most)), PANEL), PANEL);
}

/* Whether the excluded copies fit the limit for a panel of that many rows and columns. */
static int copies_fit(const query *s, int64_t rows, int64_t cols) {
  const aotmm_problem *p = s->problem;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  quantities part = s->ways[0].q;
  place places[OPERANDS];
  part.value[AOTMM_VALUE_M] = rows, part.value[AOTMM_VALUE_N] = cols;
  for (int i = 0; i < OPERANDS; i++)
    if (s->excluded >> i & 1) places[i] = place_of(&part, i, element_bytes[types[i]]);
  return bytes_of_copies(places, s->excluded) <= s->limit;
}

/* Panels of at most that many columns, and of as many rows as the limit lets them have: of 0 rows if it lets them have none. */
static panels cut_at(const query *s, int64_t most_cols) {
  const int64_t M = s->problem->M, N = s->problem->N, cols = evenly(N, most_cols);
  int64_t few = 0, many = ceil_div(M, PANEL); /* multiples of PANEL that fit, and that may */
  while (few < many) {
    int64_t middle = many - (many - few) / 2;
    int64_t rows = times(middle, PANEL);
    if (copies_fit(s, rows < M ? rows : M, cols))
      few = middle;
    else
      many = middle - 1;
  }
  if (few == 0) return (panels){0};
  const int64_t rows = evenly(M, times(few, PANEL)), down = ceil_div(M, rows), across = ceil_div(N, cols);
  return (panels){rows, cols, down, across, M - (down - 1) * rows, N - (across - 1) * cols};
}

enum { ANY_KERNEL = UINT32_MAX };

/* Puts the best plan in panels, with this kernel or with any, in the place of a plan that takes longer (cost < 0: of none). */
COLD void consider_panels(const query *whole, uint32_t kernel, aotmm_plan *best) {
  const int64_t N = whole->problem->N;
  for (int64_t most = 0; most < N;) {
    most = most == 0 ? PANEL : most < N - most ? 2 * most : N;
    const panels cut = cut_at(whole, most);
    if (cut.rows == 0) continue;
    aotmm_problem part = *whole->problem;
    part.M = cut.rows, part.N = cut.cols;
    query s;
    search found = nothing_found();
    start(&s, &part, &cut, whole->device, (uint64_t)whole->limit);
    if (kernel == ANY_KERNEL)
      search_all(&s, &found);
    else
      search_kernel(&s, kernel, &found);
    if (found.best.cost < 0) continue;
    found.best.cost = times(times(cut.down, cut.across), found.best.cost);
    found.best.panel_m = cut.rows, found.best.panel_n = cut.cols;
    if (best->cost < 0 || found.best.cost < best->cost) *best = found.best;
  }
}

static int choose(const aotmm_problem *p, const aotmm_device *device, uint64_t limit, aotmm_plan *plan) {
  query s;
  search found = nothing_found();
  start(&s, p, NULL, device, limit);
  search_all(&s, &found);
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

/* Why no plan within the limit has this kernel, or the best one that has. */
static int judge(const aotmm_problem *p, const aotmm_device *device, uint64_t limit, uint32_t kernel, aotmm_verdict *verdict) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  query s;
  search found = nothing_found();
  start(&s, p, NULL, device, limit);
  int32_t reason = search_kernel(&s, kernel, &found);
  if (s.excluded) consider_panels(&s, kernel, &found.best);
  if (found.best.cost >= 0) {
    verdict->plan = found.best;
    return AOTMM_OK;
  }
  verdict->reason = reason;
  verdict->found = found.found;
  if (reason != AOTMM_BROKEN_PROMISE) return AOTMM_OK;
  verdict->promise = first_broken(k, &s.ways[0].q);
  if (verdict->promise == k->promise_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "",
                      "kernel %s keeps all %u promises of its list but not those that are looked at; build the pack again",
                      k->name, k->promise_count);
  verdict->found = s.ways[0].q.value[k->promises[verdict->promise].value];
  return AOTMM_OK;
}

int aotmm_check(const aotmm_problem *problem, const aotmm_device *device, uint64_t limit, uint32_t kernel,
                aotmm_verdict *verdict) {
  int status = valid(problem);
  if (status || (status = valid_device(device))) return status;
  if (kernel >= aotmm_kernel_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", kernel, aotmm_kernel_count);
  const aotmm_kernel *k = aotmm_kernels + kernel;
  memset(verdict, 0, sizeof *verdict);
  if (k->role != AOTMM_ROLE_PRODUCT && k->role != AOTMM_ROLE_PARTIAL)
    verdict->reason = AOTMM_NO_PRODUCT;
  else if (!same_types(k, problem))
    verdict->reason = AOTMM_OTHER_TYPES;
  else
    return judge(problem, device, limit, kernel, verdict);
  return AOTMM_OK;
}

/* ---- memory of plans */

/* Raised by `retune`, which makes all that is remembered out of date. */
static uint32_t generation = 1;

enum { MEMORIES = 64, WORDS = sizeof(aotmm_problem) / sizeof(uint64_t) };
static __thread struct memory {
  uint64_t problem[WORDS]; /* its addresses reduced to what promises can see of them */
  uint64_t limit;
  int32_t ordinal;
  uint32_t generation; /* 0: empty */
  aotmm_plan plan;
} memories[MEMORIES];

HOT void reduce(uint64_t words[WORDS], const aotmm_problem *p) {
  static const uint8_t addresses[] = {AOTMM_VALUE_A_PTR,    AOTMM_VALUE_B_PTR,       AOTMM_VALUE_C_PTR,
                                      AOTMM_VALUE_BIAS_PTR, AOTMM_VALUE_SCALE_A_PTR, AOTMM_VALUE_SCALE_B_PTR};
  const uint64_t seen = (uint64_t)aotmm_pointer_alignment;
  memcpy(words, p, sizeof *p);
  for (unsigned i = 0; i < sizeof addresses; i++) {
    uint64_t address = words[addresses[i]];
    words[addresses[i]] = (address & (seen - 1)) | (address ? seen : 0);
  }
}

/* Whether that is remembered, but for addresses that promises cannot tell apart. */
HOT int remembered(const struct memory *memory, const aotmm_problem *p) {
  uint64_t words[WORDS], differ = 0;
  reduce(words, p);
  for (int i = 0; i < WORDS; i++) differ |= words[i] ^ memory->problem[i];
  return !differ;
}

/* Of what differs between most problems; the rest is compared only. */
static struct memory *memory_of(const aotmm_problem *p) {
  uint64_t sum = (uint64_t)p->M * 0x9e3779b97f4a7c15 + (uint64_t)p->N * 0xc2b2ae3d27d4eb4f +
                 (uint64_t)p->K * 0x165667b19e3779f9 + (uint64_t)p->stride_am * 0x27d4eb2f165667c5 +
                 (uint64_t)p->stride_bk * 0x85ebca6b2c2b2ae3 + (uint64_t)p->stride_cm * 0xff51afd7ed558ccd +
                 ((uint64_t)(p->bias_ptr != 0) ^ (uint64_t)p->activation << 20 ^ (uint64_t)p->batch << 8) * 0xc4ceb9fe1a85ec53;
  return memories + (sum ^ sum >> 32) * 0x9e3779b97f4a7c15 / (UINT64_MAX / MEMORIES + 1);
}

int aotmm_plan_for(const aotmm_problem *problem, int ordinal, uint64_t limit, aotmm_plan *plan) {
  _Static_assert(sizeof *problem == sizeof memories->problem, "whole words");
  uint32_t now = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
  struct memory *memory = memory_of(problem);
  if (memory->generation == now && memory->ordinal == ordinal && memory->limit == limit &&
      remembered(memory, problem)) {
    *plan = memory->plan;
    return AOTMM_OK;
  }
  const aotmm_device *device;
  int status = valid(problem);
  if (status) return status;
  if (problem->M == 0 || problem->N == 0) {
    *plan = (aotmm_plan){.split = 1};
    return AOTMM_OK;
  }
  if ((status = driver_device(ordinal, &device)) || (status = choose(problem, device, limit, plan))) return status;
  reduce(memory->problem, problem);
  memory->limit = limit, memory->ordinal = ordinal, memory->generation = now, memory->plan = *plan;
  return AOTMM_OK;
}

/* ---------------------------------------------------------------------------------------------------- launch */

int aotmm_device_facts(int ordinal, aotmm_device *device) {
  const aotmm_device *facts;
  int status = driver_device(ordinal, &facts);
  if (status == AOTMM_OK) *device = *facts;
  return status;
}

/* The kernel's function on the current device, loaded at its first use. */
static int function_of(uint32_t kernel, int ordinal, aotmm_function *function) {
  aotmm_function *slot = &aotmm_functions[kernel][ordinal];
  *function = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (*function) return AOTMM_OK;
  pthread_mutex_lock(&load_lock);
  int status = AOTMM_OK;
  *function = *slot;
  if (!*function) {
    status = driver_load(aotmm_kernels + kernel, ordinal, function);
    if (status == AOTMM_OK) __atomic_store_n(slot, *function, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&load_lock);
  return status;
}

/* The maps that this thread encoded last: the driver takes as long for one as the rest of a launch. They are functions of
   what is compared here alone. */
enum { MAPS = 64 };
static __thread struct encoded {
  const aotmm_tensor_map *map; /* NULL: empty */
  int64_t address, inner, outer, stride_bytes;
  _Alignas(AOTMM_TENSOR_MAP_ALIGNMENT) unsigned char bytes[AOTMM_TENSOR_MAP_BYTES];
} maps[MAPS];

/* Whether the bias is a matrix that TMA can copy. Kernels ask the same (kernels/hopper.py) before they use its map. */
static int boxed(const quantities *q, int64_t stride_bytes) {
  return q->value[AOTMM_VALUE_BIAS_RANK] == 2 && q->value[AOTMM_VALUE_STRIDE_BIAS_N] == 1 &&
         (q->value[AOTMM_VALUE_BIAS_PTR] | stride_bytes) % VECTOR_BYTES == 0;
}

static int encode(const aotmm_kernel *kernel, const aotmm_parameter *parameter, const quantities *q, int ordinal,
                  void *encoded) {
  const aotmm_tensor_map *map = kernel->maps + parameter->map - 1;
  int64_t address = q->value[parameter->value], inner = q->value[map->inner], outer = q->value[map->outer];
  int64_t stride_bytes = times(q->value[map->stride], map->element_bytes);
  if (outer == 1) /* the stride of one line is 0, which the driver does not take */
    stride_bytes = (inner * map->element_bytes + VECTOR_BYTES - 1) & -(int64_t)VECTOR_BYTES;
  if (parameter->value == AOTMM_VALUE_BIAS_PTR && !boxed(q, stride_bytes)) {
    memset(encoded, 0, AOTMM_TENSOR_MAP_BYTES);
    return AOTMM_OK;
  }
  struct encoded *last = maps + ((uint64_t)address + (uintptr_t)map) * 0x9e3779b97f4a7c15 / (UINT64_MAX / MAPS + 1);
  if (last->map != map || last->address != address || last->inner != inner || last->outer != outer ||
      last->stride_bytes != stride_bytes) {
    last->map = NULL;
    int status = driver_encode(kernel, map, address, inner, outer, stride_bytes, ordinal, last->bytes);
    if (status) return status;
    last->map = map, last->address = address, last->inner = inner, last->outer = outer;
    last->stride_bytes = stride_bytes;
  }
  memcpy(encoded, last->bytes, sizeof last->bytes);
  return AOTMM_OK;
}

/* Launches a kernel on the device that is current. */
static int launch(uint32_t number, const quantities *q, uint32_t grid, int programmatic, int ordinal, void *stream) {
  const aotmm_kernel *kernel = aotmm_kernels + number;
  _Alignas(AOTMM_TENSOR_MAP_ALIGNMENT) unsigned char encoded[AOTMM_MAX_MAPS][AOTMM_TENSOR_MAP_BYTES];
  void *parameters[AOTMM_MAX_PARAMETERS]; /* which the driver copies, of narrower ones the low bytes: all is little-endian */
  aotmm_function function;
  int status;
  for (uint32_t i = 0; i < kernel->parameter_count; i++) {
    const aotmm_parameter *parameter = kernel->parameters + i;
    if (!parameter->map) {
      parameters[i] = (void *)(uintptr_t)(q->value + parameter->value);
      continue;
    }
    parameters[i] = encoded[parameter->map - 1];
    if ((status = encode(kernel, parameter, q, ordinal, parameters[i]))) return status;
  }
  if ((status = function_of(number, ordinal, &function))) return status;
  return driver_launch(function, kernel, grid, programmatic && kernel->programmatic, stream, parameters, ordinal);
}

/* Everything that a plan launches. */
typedef struct launches {
  quantities q; /* of the main kernel and the reduce */
  uint32_t grid;
  int reduce, copies[OPERANDS]; /* kernels, -1 for none */
  quantities copied[OPERANDS];  /* of the copies */
} launches;

static uint32_t helper_grid(int kernel, const quantities *q, const aotmm_device *device) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  return grid_of(k, tiles_of((uint32_t)kernel, q->value[AOTMM_VALUE_M], q->value[AOTMM_VALUE_N]), device);
}

static int unfit(const aotmm_plan *plan, const aotmm_problem *p, int ordinal) {
  return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "",
                    "kernel %s, split %u, copies %u, panels of %lld x %lld, %llu bytes of workspace do not fit M=%lld N=%lld "
                    "K=%lld",
                    aotmm_kernels[plan->kernel].name, plan->split, plan->copies, (long long)plan->panel_m,
                    (long long)plan->panel_n, (unsigned long long)plan->workspace_bytes, (long long)p->M, (long long)p->N, (long long)p->K);
}

/* Whether rows or columns of that number can be cut so. */
static int is_panel(int64_t extent, int64_t size) {
  return extent == 0 || extent >= size || (extent > 0 && extent % PANEL == 0);
}

/* Where the next panel begins; at `size` if that was the last. */
static int64_t after(int64_t begin, int64_t extent, int64_t size) {
  return extent && extent < size - begin ? begin + extent : size;
}

static int64_t moved_by(int64_t address, int64_t elements, int64_t stride, int64_t width) {
  return address ? (int64_t)((uint64_t)address + (uint64_t)elements * (uint64_t)stride * (uint64_t)width) : 0;
}

/* Makes the quantities of a product those of its panel that begins at an element of C. Strides stay what they are, even where
   only one row or column is left: a plan for one panel is for all. */
static void set_panel(quantities *q, const aotmm_plan *plan, const aotmm_problem *p, int64_t row, int64_t col) {
  const struct {
    uint16_t pointer, row_stride, col_stride; /* AOTMM_VALUE_ZERO: it is the same in all rows or columns */
    int32_t width;
  } operands_[] = {
      {AOTMM_VALUE_A_PTR, AOTMM_VALUE_STRIDE_AM, AOTMM_VALUE_ZERO, element_bytes[p->dtype_a]},
      {AOTMM_VALUE_B_PTR, AOTMM_VALUE_ZERO, AOTMM_VALUE_STRIDE_BN, element_bytes[p->dtype_b]},
      {AOTMM_VALUE_C_PTR, AOTMM_VALUE_STRIDE_CM, AOTMM_VALUE_STRIDE_CN, element_bytes[p->dtype_c]},
      {AOTMM_VALUE_BIAS_PTR, AOTMM_VALUE_STRIDE_BIAS_M, AOTMM_VALUE_STRIDE_BIAS_N, element_bytes[p->dtype_c]},
      {AOTMM_VALUE_SCALE_A_PTR, AOTMM_VALUE_STRIDE_SCALE_A, AOTMM_VALUE_ZERO, element_bytes[AOTMM_FP32]},
      {AOTMM_VALUE_SCALE_B_PTR, AOTMM_VALUE_ZERO, AOTMM_VALUE_STRIDE_SCALE_B, element_bytes[AOTMM_FP32]},
  };
  int64_t *value = q->value;
  for (unsigned i = 0; i < sizeof operands_ / sizeof *operands_; i++) {
    int64_t *address = value + operands_[i].pointer;
    *address = moved_by(*address, row, value[operands_[i].row_stride], operands_[i].width);
    *address = moved_by(*address, col, value[operands_[i].col_stride], operands_[i].width);
  }
  value[AOTMM_VALUE_M] = after(row, plan->panel_m, p->M) - row;
  value[AOTMM_VALUE_N] = after(col, plan->panel_n, p->N) - col;
  value[AOTMM_VALUE_C_SPAN] = value[AOTMM_VALUE_N];
  for (int i = 0; i < OPERANDS; i++) set_extent(q, i);
}

/* Checks a plan against the panel of a product that begins at an element of C, and completes it. */
static int resolve(const aotmm_plan *plan, const aotmm_problem *p, int64_t row, int64_t col, const aotmm_device *device,
                   int ordinal, int64_t workspace, launches *all) {
  const uint32_t kernel = plan->kernel;
  const aotmm_kernel *k = aotmm_kernels + kernel;
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  int partial = k->role == AOTMM_ROLE_PARTIAL;
  int64_t used = 0, address = workspace;
  if (!is_panel(plan->panel_m, p->M) || !is_panel(plan->panel_n, p->N)) return unfit(plan, p, ordinal);
  set_quantities(&all->q, p);
  if (plan->panel_m | plan->panel_n) set_panel(&all->q, plan, p, row, col);
  const int64_t M = all->q.value[AOTMM_VALUE_M], N = all->q.value[AOTMM_VALUE_N];
  all->reduce = -1;
  if ((!partial && k->role != AOTMM_ROLE_PRODUCT) || !same_types(k, p) ||
      (partial ? plan->split < 2 || plan->split > AOTMM_MAX_SPLIT || steps_of(kernel, p->K) < plan->split : plan->split != 1) ||
      plan->copies >> OPERANDS || (partial && plan->copies & AOTMM_COPY_C) ||
      (p->batch != 1 && (partial || plan->copies || plan->panel_m || plan->panel_n)) || (plan->copies && p->K == 0))
    return unfit(plan, p, ordinal);
  if (plan->copies) {
    place places[OPERANDS];
    for (int i = 0; i < OPERANDS; i++)
      if (plan->copies >> i & 1) places[i] = place_of(&all->q, i, element_bytes[types[i]]);
    used = bytes_of_copies(places, plan->copies);
    quantities moved;
    set_copies(&moved, &all->q, places, plan->copies, workspace);
    for (int i = 0; i < OPERANDS; i++) {
      all->copies[i] = -1;
      if (!(plan->copies >> i & 1)) continue;
      set_copy(all->copied + i, &all->q, &moved, i, places + i);
      if ((all->copies[i] = copy_for(p, all->copied + i, i, device)) < 0) return unfit(plan, p, ordinal);
    }
    all->q = moved;
  }
  address = behind(workspace, used);
  if (partial) {
    int64_t sums = set_sums(&all->q, kernel, plan->split, address);
    used += sums;
    address = behind(address, sums);
    if ((all->reduce = reduce_for(p, &all->q, device)) < 0) return unfit(plan, p, ordinal);
  }
  int64_t units = times(times(tiles_of(kernel, M, N), p->batch), plan->split);
  all->grid = grid_of(k, units, device);
  if (k->global_scratch_bytes) {
    all->q.value[AOTMM_VALUE_GLOBAL_SCRATCH] = address;
    used += scratch_of(k, all->grid);
  }
  if (!keeps(kernel, &all->q) || !all->grid || k->shared_bytes > (uint32_t)device->shared_bytes ||
      used > max_workspace || (uint64_t)used > plan->workspace_bytes)
    return unfit(plan, p, ordinal);
  if (used && (!workspace || workspace & (AOTMM_WORKSPACE_ALIGNMENT - 1)))
    return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "workspace at address %#llx: the plan needs %lld bytes at a multiple of %d",
                      (unsigned long long)workspace, (long long)used, AOTMM_WORKSPACE_ALIGNMENT);
  return AOTMM_OK;
}

static int launch_copy(const launches *all, int i, const aotmm_device *device, int ordinal, void *stream) {
  return launch((uint32_t)all->copies[i], all->copied + i, helper_grid(all->copies[i], all->copied + i, device), 0,
                ordinal, stream);
}

/* A copy of A or B that the panel before made, to `copied`, is still there. */
static int launch_all(const aotmm_plan *plan, const launches *all, const quantities *copied, const aotmm_device *device,
                      int ordinal, void *stream) {
  int status;
  for (int i = 0; i < 2; i++)
    if (plan->copies >> i & 1 && !(copied && !memcmp(copied + i, all->copied + i, sizeof *copied)) &&
        (status = launch_copy(all, i, device, ordinal, stream)))
      return status;
  status = launch(plan->kernel, &all->q, all->grid, (int)plan->programmatic, ordinal, stream);
  if (status == AOTMM_OK && all->reduce >= 0)
    status = launch((uint32_t)all->reduce, &all->q, helper_grid(all->reduce, &all->q, device), (int)plan->programmatic,
                    ordinal, stream);
  if (status == AOTMM_OK && plan->copies & AOTMM_COPY_C) status = launch_copy(all, 2, device, ordinal, stream);
  return status;
}

/* Where the last panel begins. */
static int64_t last_of(int64_t extent, int64_t size) { return extent ? (size - 1) / extent * extent : 0; }

/* Checks a plan against panels of every kind: the first and the last ones stand for all. */
static int check_panels(const aotmm_plan *plan, const aotmm_problem *p, const aotmm_device *device, int ordinal,
                        int64_t workspace) {
  launches all;
  for (int64_t row = 0; row < p->M; row = after(row, last_of(plan->panel_m, p->M), p->M))
    for (int64_t col = 0; col < p->N; col = after(col, last_of(plan->panel_n, p->N), p->N)) {
      int status = resolve(plan, p, row, col, device, ordinal, workspace, &all);
      if (status) return status;
    }
  return AOTMM_OK;
}

static int launch_panels(const aotmm_plan *plan, const aotmm_problem *p, const aotmm_device *device, int ordinal,
                         void *stream, int64_t workspace) {
  launches all;
  quantities copied[OPERANDS];
  for (int64_t row = 0; row < p->M; row = after(row, plan->panel_m, p->M))
    for (int64_t col = 0; col < p->N; col = after(col, plan->panel_n, p->N)) {
      int status = resolve(plan, p, row, col, device, ordinal, workspace, &all);
      if (status || (status = launch_all(plan, &all, row | col ? copied : NULL, device, ordinal, stream))) return status;
      memcpy(copied, all.copied, sizeof copied);
    }
  return AOTMM_OK;
}

int aotmm_run(const aotmm_plan *plan, const aotmm_problem *problem, int ordinal, void *stream, void *workspace) {
  const aotmm_device *device;
  const int64_t address = (int64_t)(intptr_t)workspace;
  const int cut = plan->panel_m || plan->panel_n;
  launches all;
  void *saved;
  int status = valid(problem);
  if (status || problem->M == 0 || problem->N == 0) return status;
  if (plan->kernel >= aotmm_kernel_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", plan->kernel, aotmm_kernel_count);
  if ((status = driver_device(ordinal, &device)) ||
      (status = cut ? check_panels(plan, problem, device, ordinal, address)
                    : resolve(plan, problem, 0, 0, device, ordinal, address, &all)) ||
      (status = driver_enter(ordinal, &saved)))
    return status;
  status = cut ? launch_panels(plan, problem, device, ordinal, stream, address)
               : launch_all(plan, &all, NULL, device, ordinal, stream);
  driver_leave(saved);
  return status;
}

int aotmm_matmul(const aotmm_problem *problem, int ordinal, void *stream) {
  aotmm_plan plan;
  int status = aotmm_plan_for(problem, ordinal, 0, &plan);
  return status ? status : aotmm_run(&plan, problem, ordinal, stream, NULL);
}

int aotmm_preload(int ordinal) {
  const aotmm_device *device;
  void *saved;
  int status = driver_device(ordinal, &device);
  if (status || (status = driver_enter(ordinal, &saved))) return status;
  for (uint32_t i = 0; i < aotmm_kernel_count && status == AOTMM_OK; i++) {
    aotmm_function function;
    if (aotmm_kernels[i].shared_bytes <= (uint32_t)device->shared_bytes) status = function_of(i, ordinal, &function);
  }
  driver_leave(saved);
  return status;
}

/* ---------------------------------------------------------------------------------------------------- tuning */

/* What the table says of a kernel; constants that it lacks stay what they were built with. */
static void tune_kernel(const aotmm_table *table, uint32_t number, aotmm_constants *constants, uint16_t *schedule) {
  const aotmm_kernel *k = aotmm_kernels + number;
  memcpy(constants, aotmm_built_tuning.constants[number], sizeof aotmm_built_tuning.constants[number]);
  *schedule = AOTMM_UNMEASURED;
  for (uint32_t i = 0; i < table->model_count; i++) {
    const aotmm_model *m = table->models + i;
    if (m->width == k->width && m->fast_accum == k->fast_accum && !strcmp(m->schedule, k->schedule))
      constants[place_of_rows(m->rows)] = (aotmm_constants){m->base, m->step, m->tile, m->byte, m->load, k->resident};
  }
  for (uint32_t i = 0; i < table->schedule_count; i++)
    if (!strcmp(table->schedules[i], k->schedule)) *schedule = (uint16_t)i;
}

static int before(const aotmm_shape *a, const aotmm_shape *b) {
  if (a->width != b->width) return a->width < b->width;
  if (a->fast_accum != b->fast_accum) return a->fast_accum < b->fast_accum;
  if (a->layout != b->layout) return a->layout < b->layout;
  if (a->M != b->M) return a->M < b->M;
  return a->N != b->N ? a->N < b->N : a->K < b->K;
}

int aotmm_retune(const aotmm_table *table) {
  for (uint32_t i = 0; i < table->model_count; i++) {
    const aotmm_model *m = table->models + i;
    if (!(m->base >= 0 && m->step >= 0 && m->tile >= 0 && m->byte >= 0 && m->load >= 0))
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "model %u of the table has a constant that is no number from 0", i);
    if (rows_from[place_of_rows(m->rows)] != m->rows)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "model %u of the table is for rows from %d on: AOTMM_ROWS has no such number",
                        i, m->rows);
  }
  for (uint32_t i = 1; i < table->shape_count; i++)
    if (!before(table->shapes + i - 1, table->shapes + i))
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "shape %u of the table is not in ascending order", i);
  /* one block: the new tuning and what it points to, in order of alignment */
  size_t time_count = (size_t)table->shape_count * table->schedule_count;
  uint32_t place_count = 2;
  while (place_count < 2 * table->shape_count) place_count *= 2;
  size_t bytes = AOTMM_ROWS_COUNT * aotmm_block_count * sizeof(aotmm_candidates) + sizeof(aotmm_tuning) +
                 aotmm_kernel_count * (AOTMM_ROWS_COUNT * sizeof(aotmm_constants) + sizeof(uint16_t)) +
                 table->shape_count * sizeof(aotmm_shape) + time_count * sizeof(aotmm_time) + place_count * sizeof(uint32_t);
  aotmm_candidates *candidates = aligned_alloc(sizeof(aotmm_floats), (bytes + sizeof(aotmm_floats) - 1) & -sizeof(aotmm_floats));
  if (!candidates) return aotmm_fail(AOTMM_INVALID, 0, -1, "", "no memory for a table of %u shapes", table->shape_count);
  aotmm_tuning *fresh = (aotmm_tuning *)(candidates + AOTMM_ROWS_COUNT * aotmm_block_count);
  aotmm_constants(*constants)[AOTMM_ROWS_COUNT] = (void *)(fresh + 1);
  aotmm_shape *shapes = (aotmm_shape *)(constants + aotmm_kernel_count);
  aotmm_time *new_times = (aotmm_time *)(shapes + table->shape_count);
  uint32_t *places = (uint32_t *)(new_times + time_count);
  uint16_t *schedules = (uint16_t *)(places + place_count);
  if (table->shape_count) memcpy(shapes, table->shapes, table->shape_count * sizeof *shapes);
  if (time_count) memcpy(new_times, table->times, time_count * sizeof *new_times);
  for (uint32_t i = 0; i < aotmm_kernel_count; i++) tune_kernel(table, i, constants[i], schedules + i);
  *fresh = (aotmm_tuning){candidates,          constants,   schedules, shapes, new_times, places, table->shape_count,
                          table->schedule_count, place_count};
  set_candidates(fresh);
  set_places(fresh);
  __atomic_store_n(&tuning, fresh, __ATOMIC_RELEASE);
  __atomic_add_fetch(&generation, 1, __ATOMIC_RELEASE);
  return AOTMM_OK;
}
