/* The guards of kernels, in the generated tables, and the kernels and grids of launches. */
#include "core.h"

static inline int guard_test_holds(const aotmm_guard_test *c, const quantities *q) {
  return ((uint64_t)q->value[c->value] & c->mask) - c->least <= c->span || q->free >> c->value & 1;
}

/* Return whether the guards of a kernel hold. */
int guards_hold(uint32_t kernel, const quantities *q) {
  const aotmm_guard_test *c = aotmm_guard_tests + aotmm_guard_tests_of[kernel].first, *end = c + aotmm_guard_tests_of[kernel].count;
  while (c < end && guard_test_holds(c, q)) c++;
  return c == end;
}

/* Return whether the guards on the sums of slices hold. */
int sum_guards_hold(uint32_t kernel, const quantities *q) {
  const aotmm_guard_test *first = aotmm_guard_tests + aotmm_guard_tests_of[kernel].first;
  const aotmm_guard_test *c = first + aotmm_guard_tests_of[kernel].count;
  for (; c > first && c[-1].value >= AOTMM_PRODUCT_WORKSPACE_PTR; c--)
    if (!guard_test_holds(c - 1, q)) return 0;
  return 1;
}

static int holds(const aotmm_guard *guard, const quantities *q) {
  int64_t value = q->value[guard->value], operand = guard->operand;
  return guard->relation == AOTMM_EQUALS        ? value == operand
         : guard->relation == AOTMM_MULTIPLE_OF ? !(value & (operand - 1))
         : guard->relation == AOTMM_BELOW       ? value < operand
                                                : value >= operand;
}

/* Return the number of the first broken guard of a kernel, in its own order; `guard_count` if all hold. */
uint32_t first_failed_guard(const aotmm_kernel *k, const quantities *q) {
  uint32_t i = 0;
  while (i < k->guard_count && (holds(k->guards + i, q) || q->free >> k->guards[i].value & 1)) i++;
  return i;
}

/* Return whether the kernel uses a tensor map. Free strides count as the kernel sees them: as 0. */
int uses_map(const aotmm_tensor_map *map, const quantities *q) {
  uint32_t i = 0;
  while (i < map->guard_count && holds(map->guards + i, q)) i++;
  return i == map->guard_count;
}

/* ---- kernels for a problem, and their grids */

/* Return the blocks of a launch of `work_tiles`; 0 if a grid cannot have so many. */
uint32_t grid_of(const aotmm_kernel *k, int64_t work_tiles, const aotmm_device *device) {
  if (work_tiles > MAX_GRID || work_tiles * num_ctas(k) > MAX_GRID) return 0;
  if (k->persistent) {
    int64_t most = (int64_t)k->occupancy * device->multiprocessors / num_ctas(k);
    if (work_tiles > most) work_tiles = most ? most : 1;
  }
  uint64_t blocks = (uint64_t)work_tiles * num_ctas(k);
  return blocks * k->threads > driver_max_threads ? 0 : (uint32_t)blocks;
}

/* Return the blocks of a copy or a reduce; 0 if a grid cannot have so many. */
uint32_t helper_grid(uint32_t kernel, const quantities *q, const aotmm_device *device) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  int copy = k->role == AOTMM_ROLE_COPY;
  int64_t M = q->value[copy ? AOTMM_COPY_M : AOTMM_PRODUCT_M], N = q->value[copy ? AOTMM_COPY_N : AOTMM_PRODUCT_N];
  return grid_of(k, saturated(tiles_of(kernel, M, N), copy ? 1 : q->value[AOTMM_PRODUCT_BATCH]), device);
}

/* Return the first kernel of a group that has the epilogue and whose guards hold, or -1. */
static int helper_for(aotmm_group group, int32_t epilogue, const quantities *q, const aotmm_device *device) {
  for (int i = 0; i < group.count; i++) {
    uint32_t number = aotmm_order[group.first + i];
    const aotmm_kernel *k = aotmm_kernels + number;
    if (k->epilogue >= epilogue && k->shared_bytes <= (uint32_t)device->shared_bytes &&
        guards_hold(number, q) && helper_grid(number, q, device))
      return (int)number;
  }
  return -1;
}

/* Return the plainest epilogue that the problem needs. */
int32_t epilogue(const aotmm_problem *p) {
  static const int32_t least[] = AOTMM_ACTIVATION_EPILOGUES;
  return p->bias_ptr && least[p->activation] < AOTMM_EPILOGUE_BIAS_RELU ? AOTMM_EPILOGUE_BIAS_RELU : least[p->activation];
}

int copy_for(const aotmm_problem *p, const quantities *copy, int i, const aotmm_device *device) {
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  return helper_for(aotmm_copies[bytes_of_dtype[types[i]]], 0, copy, device);
}

int reduce_for(const aotmm_problem *p, const quantities *q, const aotmm_device *device) {
  return helper_for(aotmm_reduces[p->dtype_c], epilogue(p), q, device);
}

int same_types(const aotmm_kernel *k, const aotmm_problem *p) {
  int a = k->dtype_a == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_a, b = k->dtype_b == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_b;
  if (a != p->dtype_a || b != p->dtype_b) return 0;
  if (k->role == AOTMM_ROLE_PARTIAL) return (k->dtype_c == AOTMM_INT32) == (p->dtype_c == AOTMM_INT32); /* its sums */
  return k->dtype_c == p->dtype_c && k->epilogue >= epilogue(p);
}

/* Return the bytes of scratch memory of a kernel's blocks. */
int64_t scratch_of(const aotmm_kernel *k, uint32_t grid) {
  return k->global_scratch_bytes ? region((int64_t)grid * k->global_scratch_bytes) : 0;
}
