/* Functions of a user's own: choose the first kernel whose guards hold, compute its grid, and launch it. */
#include "own.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AXES = 3, MAX_GRID_YZ = 0xffff /* CUDA programming guide, "Technical Specifications" */ };

/* Set the quantities of a launch: those of a call, a zero, and no scratch. */
static void set_values(quantities *q, const aotmm_own_function *function, const int64_t *values, uint64_t open) {
  memcpy(q->value, values, function->value_count * sizeof *values);
  q->value[function->value_count] = q->value[function->value_count + 1] = 0;
  q->free = open;
}

static int fits(uint32_t kernel, const quantities *q, const aotmm_device *device) {
  return guards_hold(kernel, q) && (!device || aotmm_kernels[kernel].shared_bytes <= (uint32_t)device->shared_bytes);
}

/* Write why a kernel does not serve a launch to `text` of `room` bytes; return the length. */
static size_t reason(char *text, size_t room, uint32_t number, const quantities *q) {
  static const char *const words[] = {"not", "not a multiple of", "not below", "below"};
  const aotmm_kernel *kernel = aotmm_kernels + number;
  const uint32_t failed = first_failed_guard(kernel, q);
  const aotmm_guard *guard = kernel->guards + failed;
  return (size_t)(failed == kernel->guard_count
                      ? snprintf(text, room, "; %s: needs %u B of shared memory", kernel->name, kernel->shared_bytes)
                      : snprintf(text, room, "; %s: %s=%lld is %s %lld", kernel->name, kernel->quantities[guard->value],
                                 (long long)q->value[guard->value], words[guard->relation], (long long)guard->operand));
}

/* Fail for `count` kernels of a function, with the reason against each as far as there is room. */
static int no_kernel(const aotmm_own_function *function, uint32_t first, uint32_t count, const quantities *q, int ordinal) {
  char text[sizeof(((aotmm_error *)0)->text)];
  size_t end = 0;
  for (uint32_t i = 0; i < count && end < sizeof text; i++) end += reason(text + end, sizeof text - end, first + i, q);
  return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "", "no kernel of %s serves this call%s", function->name, text);
}

static int unknown(uint32_t function) {
  return aotmm_fail(AOTMM_INVALID, 0, -1, "", "function %u: the pack has %u", function, aotmm_own_function_count);
}

/* Return the function of an existing kernel, NULL after a failure if there is no such kernel. */
static const aotmm_own_function *of_kernel(uint32_t kernel) {
  const aotmm_own_function *function = aotmm_own_functions;
  if (kernel >= aotmm_kernel_count) {
    aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", kernel, aotmm_kernel_count);
    return NULL;
  }
  while (kernel - function->first_kernel >= function->kernel_count) function++;
  return function;
}

int aotmm_own_check(uint32_t kernel, const int64_t *values, uint64_t open, uint32_t *guard) {
  const aotmm_own_function *function = of_kernel(kernel);
  quantities q;
  if (!function) return AOTMM_INVALID;
  set_values(&q, function, values, open);
  *guard = first_failed_guard(aotmm_kernels + kernel, &q);
  return AOTMM_OK;
}

/* Measured choices: those of a kernel, as the first that fits, are `count` from `begin` on. */
typedef struct measured {
  double sizes[AOTMM_OWN_SIZES]; /* logarithms */
  uint32_t chosen;
} measured;
static struct tuning {
  measured *choices;
  struct {
    uint32_t begin, count;
  } of[]; /* by kernel */
} *tuning;

static double size_of(int64_t value) { return log2(value > 1 ? (double)value : 1); }

int aotmm_own_retune(const aotmm_own_choice *choices, uint32_t count) {
  struct tuning *made = calloc(1, sizeof *made + aotmm_kernel_count * sizeof *made->of);
  measured *copies = malloc((count + 1) * sizeof *copies);
  int valid = made && copies;
  for (uint32_t i = 0; i < count && valid; i++) {
    const aotmm_own_choice *from = choices + i;
    const aotmm_own_function *function = of_kernel(from->first);
    valid = function && from->chosen - function->first_kernel < function->kernel_count &&
            (!i || from->first >= from[-1].first);
    if (!valid) break;
    if (!made->of[from->first].count++) made->of[from->first].begin = i;
    copies[i].chosen = from->chosen;
    for (uint32_t n = 0; n < AOTMM_OWN_SIZES; n++) copies[i].sizes[n] = size_of(from->sizes[n]);
  }
  if (!valid) {
    free(made), free(copies);
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "%u measured choices: not in order, of other kernels, or no memory", count);
  }
  made->choices = copies;
  __atomic_store_n(&tuning, made, __ATOMIC_RELEASE); /* the one before stays: another thread may be reading it */
  return AOTMM_OK;
}

/* Return the kernel that was the fastest at the nearest sizes, where `first` is the first to fit; if that does not fit, or
   nothing was measured, `first`. */
static uint32_t fastest(uint32_t first, const aotmm_own_function *function, const quantities *q,
                        const aotmm_device *device) {
  const struct tuning *now = __atomic_load_n(&tuning, __ATOMIC_ACQUIRE);
  if (!now || !now->of[first].count) return first;
  const measured *next = now->choices + now->of[first].begin, *end = next + now->of[first].count, *best = NULL;
  double sizes[AOTMM_OWN_SIZES], least = INFINITY;
  for (uint32_t n = 0; n < function->size_count; n++) sizes[n] = size_of(q->value[function->sizes[n]]);
  for (; next < end; next++) {
    double distance = 0;
    for (uint32_t n = 0; n < function->size_count; n++) distance += fabs(next->sizes[n] - sizes[n]);
    if (distance < least) least = distance, best = next;
  }
  return fits(best->chosen, q, device) ? best->chosen : first;
}

static int choose(const aotmm_own_function *function, const quantities *q, const aotmm_device *device, int ordinal,
                  uint32_t *kernel) {
  for (uint32_t i = 0; i < function->kernel_count; i++)
    if (fits(function->first_kernel + i, q, device)) {
      *kernel = fastest(function->first_kernel + i, function, q, device);
      return AOTMM_OK;
    }
  return no_kernel(function, function->first_kernel, function->kernel_count, q, ordinal);
}

int aotmm_own_choose(uint32_t function, const int64_t *values, uint64_t open, int ordinal, uint32_t *kernel) {
  const aotmm_device *device = NULL;
  quantities q;
  int status;
  if (function >= aotmm_own_function_count) return unknown(function);
  if (ordinal >= 0 && (status = driver_device(ordinal, &device))) return status;
  set_values(&q, aotmm_own_functions + function, values, open);
  return choose(aotmm_own_functions + function, &q, device, ordinal, kernel);
}

/* Where scratch memory comes from. */
static struct memory {
  aotmm_allocate allocate;
  aotmm_release release;
} *memory;

void aotmm_own_allocate_by(aotmm_allocate allocate, aotmm_release release) {
  struct memory *made = malloc(sizeof *made);
  if (!made) return;
  *made = (struct memory){allocate, release};
  __atomic_store_n(&memory, made, __ATOMIC_RELEASE); /* the one before stays: another thread may be reading it */
}

/* Launch a kernel with scratch memory for each of its blocks. `address` is its quantity. */
static int launch_with_scratch(uint32_t kernel, quantities *q, int64_t *address, const uint32_t blocks[AXES], int ordinal,
                               void *stream) {
  const struct memory *now = __atomic_load_n(&memory, __ATOMIC_ACQUIRE);
  uint64_t bytes = aotmm_kernels[kernel].global_scratch_bytes;
  for (int i = 0; i < AXES; i++)
    if (__builtin_mul_overflow(bytes, blocks[i], &bytes)) bytes = UINT64_MAX;
  if (!now)
    return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "kernel %s needs %llu B of scratch memory; say by allocate_by where "
                      "it comes from", aotmm_kernels[kernel].name, (unsigned long long)bytes);
  uint64_t begin = 0;
  void *taken = now->allocate(bytes, ordinal, stream, &begin);
  if (!taken)
    return aotmm_fail(AOTMM_DRIVER, 0, ordinal, "allocate", "no %llu B of scratch memory for kernel %s",
                      (unsigned long long)bytes, aotmm_kernels[kernel].name);
  *address = (int64_t)begin;
  const int status = launch(kernel, q, blocks, EARLY, ordinal, stream);
  now->release(taken);
  return status;
}

/* Check a grid and set its blocks: those of a cluster lie side by side along x. */
static int set_blocks(uint32_t kernel, const int64_t *grid, int ordinal, uint32_t *blocks) {
  const uint64_t threads = aotmm_kernels[kernel].threads;
  const int64_t clusters = num_ctas(aotmm_kernels + kernel);
  for (int i = 0; i < AXES; i++) {
    const int64_t most = i ? MAX_GRID_YZ : MAX_GRID / clusters;
    if (grid[i] < 0 || grid[i] > most || (uint64_t)grid[i] * threads * (uint64_t)clusters > driver_max_threads)
      return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "kernel %s: a grid of %lld x %lld x %lld blocks is not possible",
                        aotmm_kernels[kernel].name, (long long)grid[0], (long long)grid[1], (long long)grid[2]);
    blocks[i] = (uint32_t)(i ? grid[i] : grid[i] * clusters);
  }
  return AOTMM_OK;
}

/* Launch a kernel that fits, in `grid` or in that of its own expression. */
static int launch_in(uint32_t kernel, const aotmm_own_function *function, quantities *q, const int64_t *grid,
                     int ordinal, void *stream) {
  uint32_t blocks[AXES];
  int64_t own[AXES] = {1, 1, 1};
  void *saved;
  int status;
  if (!grid) {
    if (!aotmm_own_grids[kernel])
      return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "%s has no grid of its own; give one", function->name);
    if (aotmm_own_grids[kernel](q->value, own))
      return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "the grid of %s divides by 0 or overflows", function->name);
    grid = own;
  }
  if ((status = set_blocks(kernel, grid, ordinal, blocks))) return status;
  if (!blocks[0] || !blocks[1] || !blocks[2]) return AOTMM_OK; /* no blocks, nothing to do */
  if ((status = driver_enter(ordinal, &saved))) return status;
  status = aotmm_kernels[kernel].global_scratch_bytes
               ? launch_with_scratch(kernel, q, q->value + function->value_count + 1, blocks, ordinal, stream)
               : launch(kernel, q, blocks, EARLY, ordinal, stream);
  driver_leave(saved);
  return status;
}

int aotmm_own_run(uint32_t kernel, const int64_t *values, uint64_t open, const int64_t *grid, int ordinal, void *stream) {
  const aotmm_own_function *function = of_kernel(kernel);
  const aotmm_device *device;
  quantities q;
  int status;
  if (!function) return AOTMM_INVALID;
  if ((status = driver_device(ordinal, &device))) return status;
  set_values(&q, function, values, open);
  if (!fits(kernel, &q, device)) return no_kernel(function, kernel, 1, &q, ordinal);
  return launch_in(kernel, function, &q, grid, ordinal, stream);
}

int aotmm_own_launch(uint32_t number, const int64_t *values, uint64_t open, const int64_t *grid, int ordinal, void *stream) {
  const aotmm_device *device;
  quantities q;
  uint32_t kernel;
  int status;
  if (number >= aotmm_own_function_count) return unknown(number);
  const aotmm_own_function *function = aotmm_own_functions + number;
  if ((status = driver_device(ordinal, &device))) return status;
  set_values(&q, function, values, open);
  if ((status = choose(function, &q, device, ordinal, &kernel))) return status;
  return launch_in(kernel, function, &q, grid, ordinal, stream);
}
