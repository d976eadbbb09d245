/* The order in which a product adds up, if its bits must not depend on other rows: launcher.h, "Batch invariance". */
#include "core.h"

enum { LEAST_K = 4096, MANY_FROM = 16384, FEW = 4, MANY = 8, WIDE = 16 /* times as many columns as K has slices for */ };

/* Return the number of slices of K for N columns. */
static uint8_t slices_of(int64_t N, int64_t K) {
  if (K < LEAST_K || K / WIDE < N) return 1;
  if (K >= MANY_FROM && K % (MANY * AOTMM_WHOLE_STEPS) == 0) return MANY;
  return K % (FEW * AOTMM_WHOLE_STEPS) == 0 ? FEW : 1;
}

/* Return the order that a problem asks for. */
order order_of(const aotmm_problem *p) {
  if (!p->batch_invariant || p->K == 0 || p->grouped == AOTMM_GROUPED_K) return (order){NULL, 0};
  const aotmm_orders *all = &aotmm_orders_of[p->dtype_a][p->dtype_b][p->dtype_c];
  const int relaxed = (p->dtype_a == AOTMM_FP32 ? p->allow_tf32 : p->fast_accum) != 0;
  const int plainest = epilogue(p);
  const int scaled = p->block_scale_a_ptr ? AOTMM_BLOCK_SCALES : p->scale_a_ptr || p->scale_b_ptr ? AOTMM_SCALES : AOTMM_NO_SCALES;
  const int number = all->order[plainest][relaxed][scaled];
  if (!number) return (order){NULL, 0};
  return (order){aotmm_order_names[number], all->sliced[plainest][relaxed][scaled] ? slices_of(p->N, p->K) : 1};
}

/* Return whether plans with this kernel, a product or a partial, may add up in that order. */
int keeps_order(order wanted, uint32_t kernel) {
  const aotmm_product *k = aotmm_products + kernel;
  const int partial = k->role == AOTMM_ROLE_PARTIAL;
  if (!wanted.kernels) return 1;
  if (k->order != wanted.kernels) return 0;
  return wanted.slices == 1 ? !partial && aotmm_tiles[kernel].cluster_k == 1 : partial && k->block_k <= AOTMM_WHOLE_STEPS;
}
