/* Selection and launch: everything that does not depend on the driver. */
#include "core.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MAX_GRID = 0x7fffffff };

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
  for (unsigned i = 0; i < sizeof strides / sizeof *strides; i++)
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
   taken as 0, and any promise about it holds. */
typedef struct quantities {
  int64_t value[AOTMM_VALUE_COUNT];
  uint64_t free; /* bit set: a stride of that kind */
} quantities;

static quantities quantities_of(const aotmm_problem *p) {
  static const struct {
    uint16_t size, strides[3];
  } dimensions[] = {
      {AOTMM_VALUE_M, {AOTMM_VALUE_STRIDE_AM, AOTMM_VALUE_STRIDE_CM, AOTMM_VALUE_STRIDE_BIAS_M}},
      {AOTMM_VALUE_N, {AOTMM_VALUE_STRIDE_BN, AOTMM_VALUE_STRIDE_CN, AOTMM_VALUE_STRIDE_BIAS_N}},
      {AOTMM_VALUE_K, {AOTMM_VALUE_STRIDE_AK, AOTMM_VALUE_STRIDE_BK, AOTMM_VALUE_STRIDE_BK}},
      {AOTMM_VALUE_BATCH, {AOTMM_VALUE_STRIDE_AZ, AOTMM_VALUE_STRIDE_BZ, AOTMM_VALUE_STRIDE_CZ}},
  };
  quantities q = {.free = 0};
  int64_t *value = q.value;
  memcpy(value, p, AOTMM_VALUE_SLOPE * sizeof *value);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 3 && value[dimensions[i].size] == 1; k++) {
      value[dimensions[i].strides[k]] = 0;
      q.free |= 1ull << dimensions[i].strides[k];
    }
  memcpy(value + AOTMM_VALUE_SLOPE, &p->slope, sizeof p->slope);
  value[AOTMM_VALUE_A_EXTENT] = extent(p->M, value[AOTMM_VALUE_STRIDE_AM], p->K, value[AOTMM_VALUE_STRIDE_AK]);
  value[AOTMM_VALUE_B_EXTENT] = extent(p->K, value[AOTMM_VALUE_STRIDE_BK], p->N, value[AOTMM_VALUE_STRIDE_BN]);
  value[AOTMM_VALUE_C_EXTENT] = extent(p->M, value[AOTMM_VALUE_STRIDE_CM], p->N, value[AOTMM_VALUE_STRIDE_CN]);
  value[AOTMM_VALUE_BIAS_RANK] = !p->bias_ptr ? 0 : value[AOTMM_VALUE_STRIDE_BIAS_M] ? 2 : 1;
  return q;
}
_Static_assert(AOTMM_VALUE_COUNT <= 64, "quantities.free has a bit for each");

static int kept(const aotmm_promise *promise, const quantities *q) {
  int64_t found = q->value[promise->value];
  switch (promise->relation) {
    case AOTMM_EQUALS: return found == promise->operand || q->free >> promise->value & 1;
    case AOTMM_MULTIPLE_OF: return found % promise->operand == 0;
    default: return found < promise->operand;
  }
}

static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* Time of the whole product in arbitrary units: the multiprocessor with most tiles does them one after the other, and
   a step of a tile costs its multiply-adds plus its loads, which are slower when they are narrow. 64 is where loading
   a 128 x 128 tile costs as much as multiplying it, a first guess until tables are measured. */
static int64_t cost(const aotmm_kernel *k, int64_t waves, int64_t K) {
  int64_t macs = (int64_t)k->block_m * k->block_n * k->mac_cost;
  int64_t loads = (int64_t)(k->block_m + k->block_n) * 64 * (16 / k->vector_bytes);
  double total = (double)waves * (double)(macs / 8 + loads) * (double)(ceil_div(K, k->block_k) + 1) * k->block_k;
  total *= 1 + 0.02 * k->epilogue; /* measured with nothing to do in it: docs/performance.md, "Epilogue" */
  return total < 9e18 ? (int64_t)total : INT64_MAX;
}

/* The least epilogue that the problem needs. */
static int32_t epilogue(const aotmm_problem *p) {
  static const int32_t least[] = AOTMM_ACTIVATION_EPILOGUES;
  return p->bias_ptr && least[p->activation] < AOTMM_EPILOGUE_LINEAR ? AOTMM_EPILOGUE_LINEAR : least[p->activation];
}

static int same_types(const aotmm_kernel *k, const aotmm_problem *p) {
  int a = k->dtype_a == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_a, b = k->dtype_b == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_b;
  return a == p->dtype_a && b == p->dtype_b && k->dtype_c == p->dtype_c && k->epilogue >= epilogue(p);
}

static void judge(const aotmm_kernel *k, const aotmm_problem *p, const quantities *q, const aotmm_device *device,
                  aotmm_verdict *verdict) {
  memset(verdict, 0, sizeof *verdict);
  if (!same_types(k, p)) {
    verdict->reason = AOTMM_OTHER_TYPES;
    return;
  }
  for (uint32_t i = 0; i < k->promise_count; i++)
    if (!kept(k->promises + i, q)) {
      verdict->reason = AOTMM_BROKEN_PROMISE;
      verdict->promise = i;
      verdict->found = q->value[k->promises[i].value];
      return;
    }
  if (k->shared_bytes > (uint32_t)device->shared_bytes) {
    verdict->reason = AOTMM_TOO_MUCH_SHARED;
    verdict->found = device->shared_bytes;
    return;
  }
  int64_t tiles;
  if (__builtin_mul_overflow(ceil_div(p->M, k->block_m), ceil_div(p->N, k->block_n), &tiles) ||
      __builtin_mul_overflow(tiles, p->batch, &tiles))
    tiles = INT64_MAX;
  if (tiles > MAX_GRID / k->num_ctas || (uint64_t)tiles * k->num_ctas > driver_max_threads / k->threads) {
    verdict->reason = AOTMM_TOO_MANY_BLOCKS;
    verdict->found = tiles;
    return;
  }
  int64_t waves = ceil_div(tiles, device->multiprocessors);
  verdict->grid = (uint32_t)tiles * k->num_ctas;
  verdict->waves = (uint32_t)waves;
  verdict->cost = cost(k, waves, p->K);
}

int aotmm_check(const aotmm_problem *problem, const aotmm_device *device, uint32_t kernel, aotmm_verdict *verdict) {
  int status = valid(problem);
  if (status || (status = valid_device(device))) return status;
  if (kernel >= aotmm_kernel_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", kernel, aotmm_kernel_count);
  quantities q = quantities_of(problem);
  judge(aotmm_kernels + kernel, problem, &q, device, verdict);
  return AOTMM_OK;
}

static int choose(const aotmm_problem *problem, const quantities *q, const aotmm_device *device, uint32_t *kernel,
                  aotmm_verdict *best) {
  int found = 0;
  for (uint32_t i = 0; i < aotmm_kernel_count; i++) {
    aotmm_verdict verdict;
    judge(aotmm_kernels + i, problem, q, device, &verdict);
    if (verdict.reason == AOTMM_FITS && (!found || verdict.cost < best->cost)) {
      found = 1;
      *best = verdict;
      *kernel = i;
    }
  }
  if (found) return AOTMM_OK;
  return aotmm_fail(AOTMM_NO_KERNEL, 0, -1, "",
                    "no kernel of pack %s has these types and epilogue and fits M=%lld N=%lld K=%lld; `check` says why",
                    aotmm_arch, (long long)problem->M, (long long)problem->N, (long long)problem->K);
}

int aotmm_select(const aotmm_problem *problem, const aotmm_device *device, uint32_t *kernel) {
  aotmm_verdict verdict;
  int status = valid(problem);
  if (status || (status = valid_device(device))) return status;
  quantities q = quantities_of(problem);
  return choose(problem, &q, device, kernel, &verdict);
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

static int run(uint32_t number, const quantities *q, uint32_t grid, int ordinal, void *stream) {
  const aotmm_kernel *kernel = aotmm_kernels + number;
  _Alignas(64) unsigned char block[AOTMM_MAX_PARAMETER_BYTES];
  void *parameters[AOTMM_MAX_PARAMETERS];
  for (uint32_t i = 0; i < kernel->parameter_count; i++) {
    const aotmm_parameter *parameter = kernel->parameters + i;
    parameters[i] = block + parameter->offset;
    memcpy(parameters[i], q->value + parameter->value, parameter->bytes); /* little-endian: the low bytes */
  }
  void *saved;
  aotmm_function function;
  int status = driver_enter(ordinal, &saved);
  if (status) return status;
  status = function_of(number, ordinal, &function);
  if (status == AOTMM_OK) status = driver_launch(function, kernel, grid, stream, parameters, ordinal);
  driver_leave(saved);
  return status;
}

int aotmm_matmul(const aotmm_problem *problem, int ordinal, void *stream) {
  const aotmm_device *device;
  aotmm_verdict verdict;
  uint32_t kernel;
  int status = valid(problem);
  if (status || problem->M == 0 || problem->N == 0) return status;
  if ((status = driver_device(ordinal, &device))) return status;
  quantities q = quantities_of(problem);
  if ((status = choose(problem, &q, device, &kernel, &verdict))) return status;
  return run(kernel, &q, verdict.grid, ordinal, stream);
}

int aotmm_launch(uint32_t kernel, const aotmm_problem *problem, int ordinal, void *stream) {
  const aotmm_device *device;
  aotmm_verdict verdict;
  int status = driver_device(ordinal, &device);
  if (status || (status = aotmm_check(problem, device, kernel, &verdict))) return status;
  if (verdict.reason != AOTMM_FITS)
    return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "", "kernel %s does not fit M=%lld N=%lld K=%lld",
                      aotmm_kernels[kernel].name, (long long)problem->M, (long long)problem->N, (long long)problem->K);
  if (problem->M == 0 || problem->N == 0) return AOTMM_OK;
  quantities q = quantities_of(problem);
  return run(kernel, &q, verdict.grid, ordinal, stream);
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
