/* Launch: check a plan against a product, complete it, and launch its kernels. */
#include "core.h"

#include <string.h>

/* The launches of a plan. */
typedef struct launches {
  quantities q; /* of the main kernel and the reduce */
  uint32_t grid;
  int reduce, copies[OPERANDS]; /* kernels: -1 for no reduce; of operands that are copied */
  quantities copied[OPERANDS];  /* of the copies */
} launches;

static int unfit(const aotmm_plan *plan, const aotmm_problem *p, int ordinal) {
  return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "",
                    "kernel %s, split %u, copies %u, groups of %u, panels of %lld x %lld, %llu bytes of workspace do not "
                    "fit M=%lld N=%lld K=%lld",
                    aotmm_kernels[plan->kernel].name, plan->split, plan->copies, plan->group_m, (long long)plan->panel_m,
                    (long long)plan->panel_n, (unsigned long long)plan->workspace_bytes, (long long)p->M, (long long)p->N, (long long)p->K);
}

/* Return whether `size` rows or columns can be cut into panels of `extent`. */
static int is_panel(int64_t extent, int64_t size) {
  return extent == 0 || extent >= size || (extent > 0 && extent % PANEL == 0);
}

/* Return the begin of the next panel; `size` after the last. */
static int64_t after(int64_t begin, int64_t extent, int64_t size) {
  return extent && extent < size - begin ? begin + extent : size;
}

static int64_t moved_by(int64_t address, int64_t elements, int64_t stride, int64_t element_bytes) {
  return address ? (int64_t)((uint64_t)address + (uint64_t)elements * (uint64_t)stride * (uint64_t)element_bytes) : 0;
}

/* Change the quantities of a product to those of its panel that begins at an element of C. Strides stay, even if only
   one row or column is left: a plan for one panel is for all. */
static void set_panel(quantities *q, const aotmm_plan *plan, const aotmm_problem *p, int64_t row, int64_t col) {
  const struct {
    uint16_t pointer, row_stride, col_stride; /* AOTMM_PRODUCT_ZERO: the same for all rows or columns */
    int32_t element_bytes;
  } operands_[] = {
      {AOTMM_PRODUCT_A_PTR, AOTMM_PRODUCT_STRIDE_AM, AOTMM_PRODUCT_ZERO, bytes_of_dtype[p->dtype_a]},
      {AOTMM_PRODUCT_B_PTR, AOTMM_PRODUCT_ZERO, AOTMM_PRODUCT_STRIDE_BN, bytes_of_dtype[p->dtype_b]},
      {AOTMM_PRODUCT_C_PTR, AOTMM_PRODUCT_STRIDE_CM, AOTMM_PRODUCT_STRIDE_CN, bytes_of_dtype[p->dtype_c]},
      {AOTMM_PRODUCT_BIAS_PTR, AOTMM_PRODUCT_STRIDE_BIAS_M, AOTMM_PRODUCT_STRIDE_BIAS_N, bytes_of_dtype[p->dtype_c]},
      {AOTMM_PRODUCT_SCALE_A_PTR, AOTMM_PRODUCT_STRIDE_SCALE_A, AOTMM_PRODUCT_ZERO, bytes_of_dtype[AOTMM_FP32]},
      {AOTMM_PRODUCT_SCALE_B_PTR, AOTMM_PRODUCT_ZERO, AOTMM_PRODUCT_STRIDE_SCALE_B, bytes_of_dtype[AOTMM_FP32]},
      {AOTMM_PRODUCT_BLOCK_SCALE_A_PTR, AOTMM_PRODUCT_STRIDE_BLOCK_AM, AOTMM_PRODUCT_ZERO, bytes_of_dtype[AOTMM_FP32]},
  };
  int64_t *value = q->value, *blocks_of_b = value + AOTMM_PRODUCT_BLOCK_SCALE_B_PTR;
  if (*blocks_of_b) /* panels begin at a multiple of a block's columns */
    *blocks_of_b = moved_by(*blocks_of_b, col / value[AOTMM_PRODUCT_BLOCK_COLUMNS], value[AOTMM_PRODUCT_STRIDE_BLOCK_BN],
                            bytes_of_dtype[AOTMM_FP32]);
  for (unsigned i = 0; i < sizeof operands_ / sizeof *operands_; i++) {
    int64_t *address = value + operands_[i].pointer;
    *address = moved_by(*address, row, value[operands_[i].row_stride], operands_[i].element_bytes);
    *address = moved_by(*address, col, value[operands_[i].col_stride], operands_[i].element_bytes);
  }
  value[AOTMM_PRODUCT_M] = after(row, plan->panel_m, p->M) - row;
  value[AOTMM_PRODUCT_N] = after(col, plan->panel_n, p->N) - col;
  value[AOTMM_PRODUCT_C_SPAN] = value[AOTMM_PRODUCT_N];
  for (int i = 0; i < OPERANDS; i++) set_extent(q, i);
}

/* Check a plan against the panel of a product that begins at an element of C, and complete it. */
static int resolve(const aotmm_plan *plan, const aotmm_problem *p, int64_t row, int64_t col, const aotmm_device *device,
                   int ordinal, int64_t workspace, launches *all) {
  const uint32_t kernel = plan->kernel;
  const aotmm_kernel *k = aotmm_kernels + kernel;
  const int partial = aotmm_products[kernel].role == AOTMM_ROLE_PARTIAL;
  int64_t used = 0, address = workspace;
  if (!is_panel(plan->panel_m, p->M) || !is_panel(plan->panel_n, p->N)) return unfit(plan, p, ordinal);
  set_quantities(&all->q, p);
  if (plan->panel_m | plan->panel_n) set_panel(&all->q, plan, p, row, col);
  all->q.value[AOTMM_PRODUCT_GROUP_M] = plan->group_m;
  const order wanted = order_of(p);
  const int64_t M = all->q.value[AOTMM_PRODUCT_M], N = all->q.value[AOTMM_PRODUCT_N];
  all->reduce = -1;
  if (!same_types(kernel, p) ||
      (partial ? plan->split < 2 || plan->split > slice_limit(p) || steps_of(kernel, p->K) < plan->split : plan->split != 1) ||
      plan->copies >> OPERANDS || (partial && plan->copies & AOTMM_COPY_C) ||
      (wanted.kernels && !keeps_order(wanted, kernel)) || (partial && wanted.slices && plan->split != wanted.slices) ||
      plan->group_m < 1 || plan->group_m > AOTMM_MAX_GROUP ||
      ((p->batch != 1 || p->grouped) && (plan->panel_m || plan->panel_n)) || (plan->copies && (p->grouped || p->K == 0)))
    return unfit(plan, p, ordinal);
  if (plan->copies) {
    copy_layout layouts[OPERANDS];
    set_layouts(layouts, &all->q, p, plan->copies);
    used = bytes_of_copies(layouts, plan->copies);
    quantities moved;
    set_copies(&moved, &all->q, p, layouts, plan->copies, workspace);
    for (int i = 0; i < OPERANDS; i++)
      if (plan->copies >> i & 1) set_copy(all->copied + i, &all->q, &moved, i, layouts + i);
    if (copies_for(p, all->copied, plan->copies, device, all->copies)) return unfit(plan, p, ordinal);
    all->q = moved;
  }
  address = behind(workspace, used);
  if (partial) {
    int64_t sums = set_sums(&all->q, kernel, plan->split, address);
    used += sums;
    address = behind(address, sums);
    if ((all->reduce = reduce_for(p, &all->q, device)) < 0) return unfit(plan, p, ordinal);
  }
  const int64_t work_tiles = saturated(all_tiles_of(kernel, p, M, N), plan->split);
  all->grid = grid_of(kernel, work_tiles, device);
  if (k->global_scratch_bytes) {
    all->q.value[AOTMM_PRODUCT_GLOBAL_SCRATCH] = address;
    used += scratch_of(k, all->grid);
  }
  if (!guards_hold(kernel, &all->q) || !all->grid || k->shared_bytes > (uint32_t)device->shared_bytes ||
      used > max_workspace || (uint64_t)used > plan->workspace_bytes)
    return unfit(plan, p, ordinal);
  if (used && (!workspace || workspace & (AOTMM_WORKSPACE_ALIGNMENT - 1)))
    return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "workspace at address %#llx: the plan needs %lld bytes at a multiple of %d",
                      (unsigned long long)workspace, (long long)used, AOTMM_WORKSPACE_ALIGNMENT);
  return AOTMM_OK;
}

/* Launch one kernel of a plan: blocks of a cluster lie beside each other along both axes of the grid. */
static int launch_tiles(uint32_t kernel, const quantities *q, uint32_t blocks, int pdl, int ordinal, void *stream) {
  const uint32_t across = aotmm_kernels[kernel].cluster_n;
  return launch(kernel, q, (const uint32_t[]){blocks / across, across, 1}, pdl, ordinal, stream);
}

static int launch_helper(const aotmm_plan *plan, int kernel, const quantities *q, const aotmm_device *device, int ordinal,
                         void *stream) {
  return launch_tiles((uint32_t)kernel, q, helper_grid((uint32_t)kernel, q, device), plan->pdl ? SPREAD : AFTER, ordinal, stream);
}

/* Launch the copies of A and B that `wanted` has, both at once if one kernel makes them. */
static int launch_copies(const aotmm_plan *plan, const launches *all, uint32_t wanted, const aotmm_device *device, int ordinal,
                         void *stream) {
  if (wanted == (AOTMM_COPY_A | AOTMM_COPY_B) && all->copies[0] == all->copies[1]) {
    quantities both = all->copied[0];
    set_other_copy(&both, all->copied + 1);
    if (helper_grid((uint32_t)all->copies[0], &both, device))
      return launch_helper(plan, all->copies[0], &both, device, ordinal, stream);
  }
  int status = AOTMM_OK;
  for (int i = 0; i < 2 && status == AOTMM_OK; i++)
    if (wanted >> i & 1) status = launch_helper(plan, all->copies[i], all->copied + i, device, ordinal, stream);
  return status;
}

/* Launch everything. `copied` has the previous panel's copies of A and B, which are not made again. */
static int launch_all(const aotmm_plan *plan, const launches *all, const quantities *copied, const aotmm_device *device,
                      int ordinal, void *stream) {
  uint32_t wanted = plan->copies & (AOTMM_COPY_A | AOTMM_COPY_B);
  for (int i = 0; i < 2 && copied; i++)
    if (plan->copies >> i & 1 && !memcmp(copied + i, all->copied + i, sizeof *copied)) wanted &= ~(1u << i);
  int status = launch_copies(plan, all, wanted, device, ordinal, stream);
  if (status == AOTMM_OK) status = launch_tiles(plan->kernel, &all->q, all->grid, plan->pdl ? EARLY : AFTER, ordinal, stream);
  if (status == AOTMM_OK && all->reduce >= 0) status = launch_helper(plan, all->reduce, &all->q, device, ordinal, stream);
  if (status == AOTMM_OK && plan->copies & AOTMM_COPY_C)
    status = launch_helper(plan, all->copies[2], all->copied + 2, device, ordinal, stream);
  return status;
}

/* Return the begin of the last panel. */
static int64_t last_of(int64_t extent, int64_t size) { return extent ? (size - 1) / extent * extent : 0; }

/* Load the kernels of all that is launched. */
static int load_all(const aotmm_plan *plan, const launches *all, int ordinal) {
  int status = load(plan->kernel, ordinal);
  if (status == AOTMM_OK && all->reduce >= 0) status = load((uint32_t)all->reduce, ordinal);
  for (int i = 0; i < OPERANDS && status == AOTMM_OK; i++)
    if (plan->copies >> i & 1) status = load((uint32_t)all->copies[i], ordinal);
  return status;
}

/* Check a plan against the first and the last panels, which stand for all; load their kernels if `loads` is set. The last
   panels may take another reduce or other copies than the first. */
static int check_panels(const aotmm_plan *plan, const aotmm_problem *p, const aotmm_device *device, int ordinal,
                        int64_t workspace, int loads) {
  const int64_t last_row = last_of(plan->panel_m, p->M), last_col = last_of(plan->panel_n, p->N);
  launches all;
  for (int64_t row = 0; row < p->M; row = after(row, last_row, p->M))
    for (int64_t col = 0; col < p->N; col = after(col, last_col, p->N)) {
      int status = resolve(plan, p, row, col, device, ordinal, workspace, &all);
      if (status || (loads && (status = load_all(plan, &all, ordinal)))) return status;
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

static int known(const aotmm_plan *plan) {
  if (plan->kernel < aotmm_kernel_count) return AOTMM_OK;
  return aotmm_fail(AOTMM_INVALID, 0, -1, "", "kernel %u: the pack has %u", plan->kernel, aotmm_kernel_count);
}

int aotmm_run(const aotmm_plan *plan, const aotmm_problem *problem, int ordinal, void *stream, void *workspace) {
  const aotmm_device *device;
  const int64_t address = (int64_t)(intptr_t)workspace;
  const int cut = plan->panel_m || plan->panel_n;
  launches all;
  void *saved;
  int status = valid(problem);
  if (status || problem->M == 0 || problem->N == 0) return status;
  if ((status = known(plan)) || (status = driver_device(ordinal, &device)) ||
      (status = cut ? check_panels(plan, problem, device, ordinal, address, 0)
                    : resolve(plan, problem, 0, 0, device, ordinal, address, &all)) ||
      (status = driver_enter(ordinal, &saved)))
    return status;
  status = cut ? launch_panels(plan, problem, device, ordinal, stream, address)
               : launch_all(plan, &all, NULL, device, ordinal, stream);
  driver_leave(saved);
  return status;
}

int aotmm_load(const aotmm_plan *plan, const aotmm_problem *problem, int ordinal) {
  const aotmm_device *device;
  void *saved;
  int status = valid(problem);
  if (status || problem->M == 0 || problem->N == 0) return status;
  if ((status = known(plan)) || (status = driver_device(ordinal, &device)) || (status = driver_enter(ordinal, &saved)))
    return status;
  status = check_panels(plan, problem, device, ordinal, AOTMM_WORKSPACE_ALIGNMENT, 1);
  driver_leave(saved);
  return status;
}

int aotmm_matmul(const aotmm_problem *problem, int ordinal, void *stream) {
  aotmm_plan plan;
  int status = aotmm_plan_for(problem, ordinal, 0, &plan);
  return status ? status : aotmm_run(&plan, problem, ordinal, stream, NULL);
}
