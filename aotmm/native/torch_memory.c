/* Whether elements of matrices share memory, of one or of two. */
#include "torch_ops.h"

static int64_t plus(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

/* A dimension of more than one element: size, and stride in bytes. */
typedef struct axis {
  int64_t size, stride;
} axis;

/* List the axes of a matrix by rising stride and return their number. */
static int axes_of(const matrix *m, axis axes[3]) {
  const axis all[] = {{m->cols, saturated(m->col_stride, m->bytes)}, {m->rows, saturated(m->row_stride, m->bytes)},
                      {m->batch, saturated(m->z_stride, m->bytes)}};
  int count = 0;
  for (int i = 0; i < 3; i++) {
    if (all[i].size < 2) continue;
    int at = count++;
    for (; at > 0 && axes[at - 1].stride > all[i].stride; at--) axes[at] = axes[at - 1];
    axes[at] = all[i];
  }
  return count;
}

/* Return whether two elements of the matrix share memory; 1 also for some exotic strides where none do. */
int overlaps_itself(const matrix *m) {
  if (!m->batch || !m->rows || !m->cols) return 0;
  axis axes[3];
  int count = axes_of(m, axes);
  int64_t covered = m->bytes;
  for (int i = 0; i < count; i++) {
    if (axes[i].stride < covered) return 1;
    covered = plus(covered, saturated(axes[i].size - 1, axes[i].stride));
  }
  return 0;
}

static int64_t gcd(int64_t a, int64_t b) {
  while (b) {
    int64_t rest = a % b;
    a = b, b = rest;
  }
  return a;
}

/* Return the distance from x to the next begin of y, repeated every `pitch` bytes. */
static int64_t distance(const matrix *x, const matrix *y, int64_t pitch) {
  uint64_t apart = y->address > x->address ? y->address - x->address : x->address - y->address;
  int64_t rest = (int64_t)(apart % (uint64_t)pitch);
  return y->address > x->address || rest == 0 ? rest : pitch - rest;
}

/* Return the end of a matrix's memory. */
static uint64_t end_of(const matrix *m) {
  int64_t rows = plus(saturated(m->batch - 1, m->z_stride), saturated(m->rows - 1, m->row_stride));
  int64_t bytes = saturated(plus(plus(rows, saturated(m->cols - 1, m->col_stride)), 1), m->bytes);
  return m->address + (uint64_t)bytes < m->address ? UINT64_MAX : m->address + (uint64_t)bytes;
}

/* Return whether two matrices share memory. They do not if their address ranges are apart. They do not either if both
   repeat at one pitch, and the ranges of their inner axes are apart: columns side by side in the same rows, heads of
   the same tokens. Other interleaved views count as sharing. */
int share_memory(const matrix *x, const matrix *y) {
  if (!x->batch || !x->rows || !x->cols || !y->batch || !y->rows || !y->cols) return 0;
  if (end_of(x) <= y->address || end_of(y) <= x->address) return 0;
  axis of_x[3], of_y[3];
  int count_x = axes_of(x, of_x), count_y = axes_of(y, of_y);
  int64_t width_x = x->bytes;
  for (int i = 0; i <= count_x; i++) {
    int64_t width_y = y->bytes;
    for (int j = 0; j <= count_y; j++) {
      int64_t pitch = 0;
      for (int k = i; k < count_x; k++) pitch = gcd(of_x[k].stride, pitch);
      for (int k = j; k < count_y; k++) pitch = gcd(of_y[k].stride, pitch);
      if (pitch && width_x <= pitch && width_y <= pitch) {
        int64_t from_x = distance(x, y, pitch);
        if (from_x >= width_x && pitch - from_x >= width_y) return 0;
      }
      if (j < count_y) width_y = plus(width_y, saturated(of_y[j].size - 1, of_y[j].stride));
    }
    if (i < count_x) width_x = plus(width_x, saturated(of_x[i].size - 1, of_x[i].stride));
  }
  return 1;
}
