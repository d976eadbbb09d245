/* The guards of kernels, in the generated tables. */
#include "kernel.h"

/* Return whether the guards of a kernel hold. */
int guards_hold(uint32_t kernel, const quantities *q) {
  const aotmm_guard_test *c = aotmm_guard_tests + aotmm_guard_tests_of[kernel].first, *end = c + aotmm_guard_tests_of[kernel].count;
  while (c < end && guard_test_holds(c, q)) c++;
  return c == end;
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
