/* Functions of a user's own: choose the first kernel whose guards hold, compute its grid, and launch it. */
#include "own.h"

#include <stdio.h>
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

/* Say which guard each kernel of a function breaks, as far as there is room. */
static int no_kernel(const aotmm_own_function *function, const quantities *q, int ordinal) {
  char text[sizeof(((aotmm_error *)0)->text)];
  size_t end = 0;
  for (uint32_t i = 0; i < function->kernel_count && end < sizeof text; i++) {
    const aotmm_kernel *kernel = aotmm_kernels + function->first_kernel + i;
    const uint32_t number = first_failed_guard(kernel, q);
    const aotmm_guard *guard = kernel->guards + number;
    static const char *const words[] = {"not", "not a multiple of", "not below", "below"};
    end += (size_t)(number == kernel->guard_count
                        ? snprintf(text + end, sizeof text - end, "; %s: needs %u B of shared memory", kernel->name,
                                   kernel->shared_bytes)
                        : snprintf(text + end, sizeof text - end, "; %s: %s=%lld is %s %lld", kernel->name,
                                   kernel->quantities[guard->value], (long long)q->value[guard->value],
                                   words[guard->relation], (long long)guard->operand));
  }
  return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "", "no kernel of %s serves this call%s", function->name, text);
}

static int unknown(uint32_t function) {
  return aotmm_fail(AOTMM_INVALID, 0, -1, "", "function %u: the pack has %u", function, aotmm_own_function_count);
}

int aotmm_own_check(uint32_t kernel, const int64_t *values, uint64_t open, uint32_t *guard) {
  quantities q;
  if (kernel >= aotmm_kernel_count)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", kernel, aotmm_kernel_count);
  const aotmm_own_function *function = aotmm_own_functions;
  while (kernel - function->first_kernel >= function->kernel_count) function++;
  set_values(&q, function, values, open);
  *guard = first_failed_guard(aotmm_kernels + kernel, &q);
  return AOTMM_OK;
}

static int choose(const aotmm_own_function *function, const quantities *q, const aotmm_device *device, int ordinal,
                  uint32_t *kernel) {
  for (uint32_t i = 0; i < function->kernel_count; i++)
    if (fits(function->first_kernel + i, q, device)) {
      *kernel = function->first_kernel + i;
      return AOTMM_OK;
    }
  return no_kernel(function, q, ordinal);
}

int aotmm_own_choose(uint32_t function, const int64_t *values, uint64_t open, uint32_t *kernel) {
  quantities q;
  if (function >= aotmm_own_function_count) return unknown(function);
  set_values(&q, aotmm_own_functions + function, values, open);
  return choose(aotmm_own_functions + function, &q, NULL, -1, kernel);
}

/* Check a grid and set its blocks. */
static int set_blocks(uint32_t kernel, const int64_t *grid, int ordinal, uint32_t *blocks) {
  uint64_t threads = aotmm_kernels[kernel].threads;
  for (int i = 0; i < AXES; i++) {
    if (grid[i] < 0 || grid[i] > (i ? MAX_GRID_YZ : MAX_GRID) || grid[i] * threads > driver_max_threads)
      return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "kernel %s: a grid of %lld x %lld x %lld blocks is not possible",
                        aotmm_kernels[kernel].name, (long long)grid[0], (long long)grid[1], (long long)grid[2]);
    blocks[i] = (uint32_t)grid[i];
  }
  return AOTMM_OK;
}

int aotmm_own_launch(uint32_t number, const int64_t *values, uint64_t open, const int64_t *grid, int ordinal, void *stream) {
  const aotmm_device *device;
  quantities q;
  uint32_t kernel, blocks[AXES];
  int64_t own[AXES] = {1, 1, 1};
  void *saved;
  int status;
  if (number >= aotmm_own_function_count) return unknown(number);
  const aotmm_own_function *function = aotmm_own_functions + number;
  set_values(&q, function, values, open);
  if ((status = driver_device(ordinal, &device)) || (status = choose(function, &q, device, ordinal, &kernel))) return status;
  if (!grid) {
    if (!aotmm_own_grids[kernel])
      return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "%s has no grid of its own; give one", function->name);
    if (aotmm_own_grids[kernel](q.value, own))
      return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "the grid of %s divides by 0 or overflows", function->name);
    grid = own;
  }
  if ((status = set_blocks(kernel, grid, ordinal, blocks))) return status;
  if (!blocks[0] || !blocks[1] || !blocks[2]) return AOTMM_OK; /* no blocks, nothing to do */
  if ((status = driver_enter(ordinal, &saved))) return status;
  status = launch(kernel, &q, blocks, 0, ordinal, stream);
  driver_leave(saved);
  return status;
}
