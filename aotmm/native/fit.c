/* The kernels that fit a problem, and the grids of their launches. */
#include "core.h"

/* Return whether the guards on the sums of slices hold. */
int sum_guards_hold(uint32_t kernel, const quantities *q) {
  const aotmm_guard_test *first = aotmm_guard_tests + aotmm_guard_tests_of[kernel].first;
  const aotmm_guard_test *c = first + aotmm_guard_tests_of[kernel].count;
  for (; c > first && c[-1].value >= AOTMM_PRODUCT_WORKSPACE_PTR; c--)
    if (!guard_test_holds(c - 1, q)) return 0;
  return 1;
}

/* Return the blocks of a launch of `work_tiles`; 0 if a grid cannot have so many. */
uint32_t grid_of(uint32_t kernel, int64_t work_tiles, const aotmm_device *device) {
  const aotmm_kernel *k = aotmm_kernels + kernel;
  if (work_tiles > MAX_GRID || work_tiles * num_ctas(k) > MAX_GRID) return 0;
  if (k->persistent) {
    int64_t most = (int64_t)aotmm_products[kernel].occupancy * device->multiprocessors / num_ctas(k);
    if (work_tiles > most) work_tiles = most ? most : 1;
  }
  uint64_t blocks = (uint64_t)work_tiles * num_ctas(k);
  return blocks * k->threads > driver_max_threads ? 0 : (uint32_t)blocks;
}

/* Return the tiles of a batch of matrices, of which three quantities are M, N and their number. Those of one row go over the ends
   of rows; of matrices too large for that there are too many. */
static int64_t tiles_of_batch(uint32_t kernel, const int64_t *value, int M, int N, int batch) {
  if (aotmm_products[kernel].block_m != 1) return saturated(tiles_of(kernel, value[M], value[N]), value[batch]);
  const int64_t elements = saturated(value[M], value[N]);
  return elements > MOST_JOINED ? INT64_MAX : saturated(tiles_of(kernel, 1, elements), value[batch]);
}

/* Return the blocks of a copy or a reduce; 0 if a grid cannot have so many. */
uint32_t helper_grid(uint32_t kernel, const quantities *q, const aotmm_device *device) {
  const int64_t *value = q->value;
  if (aotmm_products[kernel].role != AOTMM_ROLE_COPY)
    return grid_of(kernel, tiles_of_batch(kernel, value, AOTMM_PRODUCT_M, AOTMM_PRODUCT_N, AOTMM_PRODUCT_BATCH), device);
  const int64_t first = tiles_of_batch(kernel, value, AOTMM_COPY_M, AOTMM_COPY_N, AOTMM_COPY_BATCH);
  const int64_t other = tiles_of_batch(kernel, value, AOTMM_COPY_OTHER_M, AOTMM_COPY_OTHER_N, AOTMM_COPY_OTHER_BATCH);
  return first > MAX_GRID || other > MAX_GRID ? 0 : grid_of(kernel, first + other, device);
}

/* Return the elements that the threads of a copy have, those beyond the ends of rows too. */
static int64_t elements_of_copy(int kernel, const quantities *copy, const aotmm_device *device) {
  const aotmm_product *k = aotmm_products + kernel;
  return (int64_t)helper_grid((uint32_t)kernel, copy, device) * k->block_m * k->block_n;
}

/* Return the first kernel of a group that has the epilogue and whose guards hold, or -1. Its tiles go `over_rows` or not. */
static int helper_for(aotmm_group group, int32_t epilogue, const quantities *q, const aotmm_device *device, int over_rows) {
  for (int i = 0; i < group.count; i++) {
    uint32_t number = aotmm_order[group.first + i];
    if (aotmm_products[number].epilogue >= epilogue && (aotmm_products[number].block_m == 1) == over_rows &&
        aotmm_kernels[number].shared_bytes <= (uint32_t)device->shared_bytes && guards_hold(number, q) && helper_grid(number, q, device))
      return (int)number;
  }
  return -1;
}

/* Return the plainest epilogue that the problem needs. */
int32_t epilogue(const aotmm_problem *p) {
  static const int32_t least[] = AOTMM_ACTIVATION_EPILOGUES;
  const int32_t bias = !p->bias_ptr ? AOTMM_EPILOGUE_NONE : p->stride_bias_m ? AOTMM_EPILOGUE_BIAS_RELU : AOTMM_EPILOGUE_BIAS;
  return bias > least[p->activation] ? bias : least[p->activation];
}

/* Choose kernels for the copies of some operands, for which tiles go over the ends of rows if others left many threads idle. Return
   0, or 1 if there is none for an operand. */
static int choose_copies(const aotmm_problem *p, const quantities *copied, uint32_t copies, const aotmm_device *device, int *kernels) {
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  int over[OPERANDS];
  int64_t least = 0, idle = 0;
  for (int i = 0; i < OPERANDS; i++) {
    if (!(copies >> i & 1)) continue;
    const aotmm_group group = aotmm_copies[bytes_of_dtype[types[i]]];
    kernels[i] = helper_for(group, 0, copied + i, device, 0);
    if (kernels[i] < 0) return 1;
    over[i] = helper_for(group, 0, copied + i, device, 1);
    if (over[i] < 0) continue;
    const int64_t elements = elements_of_copy(over[i], copied + i, device);
    least += elements;
    idle += elements_of_copy(kernels[i], copied + i, device) - elements;
  }
  for (int i = 0; i < OPERANDS && idle > MOST_IDLE && idle > least / IDLE_PART; i++)
    if (copies >> i & 1 && over[i] >= 0) kernels[i] = over[i];
  return 0;
}

/* Choose the kernels that copy operands: A and B together, since one launch may copy both. Return 0, or 1 if one has none. */
int copies_for(const aotmm_problem *p, const quantities *copied, uint32_t copies, const aotmm_device *device, int *kernels) {
  return choose_copies(p, copied, copies & (AOTMM_COPY_A | AOTMM_COPY_B), device, kernels) ||
         choose_copies(p, copied, copies & AOTMM_COPY_C, device, kernels);
}

int reduce_for(const aotmm_problem *p, const quantities *q, const aotmm_device *device) {
  return helper_for(aotmm_reduces[p->dtype_c], epilogue(p), q, device, 0);
}

int same_types(uint32_t kernel, const aotmm_problem *p) {
  static const int32_t roles[] = AOTMM_GROUPED_ROLES;
  const aotmm_product *k = aotmm_products + kernel;
  int a = k->dtype_a == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_a, b = k->dtype_b == AOTMM_TF32 ? AOTMM_FP32 : k->dtype_b;
  if (a != p->dtype_a || b != p->dtype_b) return 0;
  if (k->role == AOTMM_ROLE_PARTIAL) return !p->grouped && (k->dtype_c == AOTMM_INT32) == (p->dtype_c == AOTMM_INT32); /* its sums */
  return k->role == roles[p->grouped] && k->dtype_c == p->dtype_c && k->epilogue >= epilogue(p);
}

/* Return the bytes of scratch memory of a kernel's blocks. */
int64_t scratch_of(const aotmm_kernel *k, uint32_t grid) {
  return k->global_scratch_bytes ? region((int64_t)grid * k->global_scratch_bytes) : 0;
}
