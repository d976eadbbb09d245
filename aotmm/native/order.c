/* The order in which a product adds up, if its bits must not depend on other rows: launcher.h, "Batch invariance". */
#include "core.h"

enum { FEW = AOTMM_FEW_SLICES, MANY = 8 };
enum { LEAST_K = 4096, MANY_FROM = 16384, WIDE = 16 /* times as many columns as K has slices for */ };
/* Of slices one after another, which many rows do not pay for. */
enum { LEAST_SERIAL_K = 2048, MOST_SERIAL_N = 1536, SERIAL_WIDE = 2, NARROW = 8 /* all N are multiples */, HALF_STEPS = AOTMM_WHOLE_STEPS / 2 };

/* Return the slices of K for N columns; `serial`: whether there are kernels that add slices one after another. */
static order sliced(const char *kernels, int64_t N, int64_t K, int serial) {
  const int wide = K >= LEAST_K && K / WIDE >= N;
  const int narrow = serial && K >= LEAST_SERIAL_K && K / SERIAL_WIDE >= N && N <= MOST_SERIAL_N && N % NARROW == 0;
  if (wide && K >= MANY_FROM && K % (MANY * AOTMM_WHOLE_STEPS) == 0) return (order){kernels, MANY, AOTMM_WHOLE_STEPS};
  if ((wide || narrow) && K % (FEW * AOTMM_WHOLE_STEPS) == 0) return (order){kernels, FEW, AOTMM_WHOLE_STEPS};
  if (narrow && K % (FEW * HALF_STEPS) == 0) return (order){kernels, FEW, HALF_STEPS};
  return (order){kernels, 1, 0};
}

/* Return the order that a problem asks for. */
order order_of(const aotmm_problem *p) {
  if (!p->batch_invariant || p->K == 0 || p->grouped == AOTMM_GROUPED_K) return (order){NULL, 0, 0};
  const aotmm_orders *all = &aotmm_orders_of[p->dtype_a][p->dtype_b][p->dtype_c];
  const int relaxed = is_relaxed(p);
  int plainest = epilogue(p);
  const int scaled = p->block_scale_a_ptr ? AOTMM_BLOCK_SCALES : p->scale_a_ptr || p->scale_b_ptr ? AOTMM_SCALES : AOTMM_NO_SCALES;
  /* a matrix of one row is a vector, so both have the order of the first, if the pack has products with one */
  if (plainest == AOTMM_EPILOGUE_BIAS && all->order[AOTMM_EPILOGUE_BIAS_RELU][relaxed][scaled]) plainest = AOTMM_EPILOGUE_BIAS_RELU;
  const int number = all->order[plainest][relaxed][scaled], slices = all->sliced[plainest][relaxed][scaled];
  if (!number) return (order){NULL, 0, 0};
  if (!slices) return (order){aotmm_order_names[number], 1, 0};
  return sliced(aotmm_order_names[number], p->N, p->K, slices == 2 && p->stride_bk < p->stride_bn);
}

/* Return whether plans with this kernel, a product or a partial, may add up in that order. Without an order none adds slices
   one after another, which gains nothing. */
int keeps_order(order wanted, uint32_t kernel) {
  const aotmm_product *k = aotmm_products + kernel;
  const aotmm_tile *tile = aotmm_tiles + kernel;
  const int partial = k->role == AOTMM_ROLE_PARTIAL;
  if (!wanted.kernels) return tile->slices == tile->cluster_k;
  if (k->order != wanted.kernels) return 0;
  if (wanted.slices == 1) return !partial && tile->slices == 1;
  return (partial || tile->slices == wanted.slices) && tile->block_k <= wanted.step * tile->cluster_k;
}
