/* A problem: its validity, its quantities, and the placement of copies of its operands in the workspace. */
#include "core.h"

#include <string.h>

/* Return the distance in elements from the first to the last element of a (rows, cols) operand, at most INT64_MAX. */
static int64_t extent(int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride) {
  int64_t down, across, sum;
  if (rows == 0 || cols == 0) return 0;
  if (__builtin_mul_overflow(rows - 1, row_stride, &down) || __builtin_mul_overflow(cols - 1, col_stride, &across) ||
      __builtin_add_overflow(down, across, &sum))
    return INT64_MAX;
  return sum;
}

static int valid_groups(const aotmm_problem *p) {
  const int rows = p->grouped == AOTMM_GROUPED_M;
  if (!rows && (p->group_rows || p->expected_rows || p->stride_scale_bz))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "group_rows=%lld expected_rows=%lld stride_scale_bz=%lld: they are of groups of "
                      "rows alone", (long long)p->group_rows, (long long)p->expected_rows, (long long)p->stride_scale_bz);
  if (!p->grouped) return AOTMM_OK;
  if (!rows && (p->scale_a_ptr || p->scale_b_ptr || p->block_scale_a_ptr))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "scales of a product with K in groups: it has none");
  if (!p->offsets_ptr || p->offsets_ptr % (int64_t)sizeof(int32_t))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "offsets_ptr=%#llx: the ends of groups are int32 numbers on the device",
                      (unsigned long long)p->offsets_ptr);
  if (p->stride_az || (rows ? p->stride_cz : p->stride_bz))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "stride_az=%lld stride_bz=%lld stride_cz=%lld: what is in groups is one matrix, "
                      "with a stride of 0", (long long)p->stride_az, (long long)p->stride_bz, (long long)p->stride_cz);
  if (p->group_rows < 0 || p->expected_rows < 0 || (p->group_rows && saturated(p->group_rows, p->batch) != p->M))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "group_rows=%lld expected_rows=%lld of batch=%lld groups in M=%lld rows: they "
                      "are not negative, and M has room for group_rows of each group", (long long)p->group_rows,
                      (long long)p->expected_rows, (long long)p->batch, (long long)p->M);
  if (p->stride_scale_bz && !p->scale_b_ptr)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "stride_scale_bz=%lld without scale_b_ptr", (long long)p->stride_scale_bz);
  if (p->block_scale_a_ptr && p->batch > 1 && p->stride_block_az < saturated(p->group_rows, p->stride_block_am))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "stride_block_az=%lld: block scales of A's %lld rows of a group, %lld apart, lie "
                      "before those of the next group", (long long)p->stride_block_az, (long long)p->group_rows,
                      (long long)p->stride_block_am);
  if (p->stride_block_az && !p->group_rows)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "stride_block_az=%lld: block scales of rows of one matrix are 0 apart",
                      (long long)p->stride_block_az);
  return AOTMM_OK;
}

int valid(const aotmm_problem *p) {
  if (p->M < 0 || p->N < 0 || p->K < 0)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "M=%lld N=%lld K=%lld: sizes are not negative", (long long)p->M,
                      (long long)p->N, (long long)p->K);
  if (p->batch < 1)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "batch=%lld: at least 1", (long long)p->batch);
  const int64_t strides[] = {p->stride_am,      p->stride_ak,      p->stride_bk,      p->stride_bn,     p->stride_cm,
                             p->stride_cn,      p->stride_az,      p->stride_bz,      p->stride_cz,     p->stride_bias_z,
                             p->stride_bias_m,  p->stride_bias_n,  p->stride_scale_a, p->stride_scale_b,
                             p->stride_scale_bz, p->stride_block_az, p->stride_block_am, p->stride_block_ak, p->stride_block_bz,
                             p->stride_block_bk, p->stride_block_bn};
  int64_t signs = 0;
  for (unsigned i = 0; i < sizeof strides / sizeof *strides; i++) signs |= strides[i];
  for (unsigned i = 0; signs < 0 && i < sizeof strides / sizeof *strides; i++)
    if (strides[i] < 0)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "stride %lld: strides are not negative", (long long)strides[i]);
  const struct {
    const char *name;
    int64_t number;
    int count;
  } codes[] = {{"dtype_a", p->dtype_a, AOTMM_DTYPE_COUNT},
               {"dtype_b", p->dtype_b, AOTMM_DTYPE_COUNT},
               {"dtype_c", p->dtype_c, AOTMM_DTYPE_COUNT},
               {"activation", p->activation, AOTMM_ACTIVATION_COUNT},
               {"grouped", p->grouped, AOTMM_GROUPED_COUNT}};
  for (unsigned i = 0; i < sizeof codes / sizeof *codes; i++)
    if (codes[i].number < 0 || codes[i].number >= codes[i].count)
      return aotmm_fail(AOTMM_INVALID, 0, -1, "", "%s=%lld: there are 0 to %d", codes[i].name,
                        (long long)codes[i].number, codes[i].count - 1);
  if (p->dtype_c == AOTMM_INT32 && (p->scale_a_ptr || p->scale_b_ptr || p->bias_ptr || p->activation))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "int32 results have no scales, bias or activation");
  if (!p->block_scale_a_ptr != !p->block_scale_b_ptr)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "block scales of %s alone: both operands have them, or none",
                      p->block_scale_a_ptr ? "A" : "B");
  if (p->block_scale_a_ptr && (bytes_of_dtype[p->dtype_a] != 1 || p->dtype_a == AOTMM_INT8))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "block scales of dtype_a=%d: they are for fp8", p->dtype_a);
  if (p->block_scale_a_ptr && p->block_columns != 1 && p->block_columns != AOTMM_BLOCK_SCALE_K)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "block_columns=%lld: 1 or %d", (long long)p->block_columns,
                      AOTMM_BLOCK_SCALE_K);
  return valid_groups(p);
}

int valid_device(const aotmm_device *device) {
  if (device->multiprocessors < 1)
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "multiprocessors=%d: at least 1; did `device` fail?",
                      device->multiprocessors);
  if (!memchr(device->name, 0, sizeof device->name))
    return aotmm_fail(AOTMM_INVALID, 0, -1, "", "the name of the device has no end in its %d bytes", AOTMM_NAME_BYTES);
  return AOTMM_OK;
}

const operand_values operands[OPERANDS] = {
    {AOTMM_PRODUCT_A_PTR, AOTMM_PRODUCT_M, AOTMM_PRODUCT_K, AOTMM_PRODUCT_STRIDE_AM, AOTMM_PRODUCT_STRIDE_AK,
     AOTMM_PRODUCT_STRIDE_AZ, AOTMM_PRODUCT_A_EXTENT, AOTMM_PRODUCT_A_REACH},
    {AOTMM_PRODUCT_B_PTR, AOTMM_PRODUCT_K, AOTMM_PRODUCT_N, AOTMM_PRODUCT_STRIDE_BK, AOTMM_PRODUCT_STRIDE_BN,
     AOTMM_PRODUCT_STRIDE_BZ, AOTMM_PRODUCT_B_EXTENT, AOTMM_PRODUCT_B_REACH},
    {AOTMM_PRODUCT_C_PTR, AOTMM_PRODUCT_M, AOTMM_PRODUCT_N, AOTMM_PRODUCT_STRIDE_CM, AOTMM_PRODUCT_STRIDE_CN,
     AOTMM_PRODUCT_STRIDE_CZ, AOTMM_PRODUCT_C_EXTENT, AOTMM_PRODUCT_C_REACH},
};

void set_extent(quantities *q, int operand) {
  const operand_values *o = operands + operand;
  int64_t *value = q->value, reach;
  value[o->extent] = extent(value[o->rows], value[o->row_stride], value[o->cols], value[o->col_stride]);
  if (__builtin_mul_overflow(value[AOTMM_PRODUCT_BATCH] - 1, value[o->batch_stride], &reach) ||
      __builtin_add_overflow(reach, value[o->extent], &reach))
    reach = INT64_MAX;
  value[o->reach] = reach;
}

/* Make the strides of a dimension free if its size is 1. */
static void free_strides(quantities *q, int size, const uint16_t *strides, int count) {
  for (int i = 0; i < count && q->value[size] == 1; i++) {
    q->value[strides[i]] = 0;
    q->free |= 1ull << strides[i];
  }
}

/* Return the bytes from the begin of a cache line to an operand that lies along K; 0 if its rows or columns do not all begin at
   the same byte of a line. A matrix that is contiguous both ways lies in rows. */
static int64_t within_line(const quantities *q, int i, int64_t element_bytes) {
  const operand_values *o = operands + i;
  const int along = i == 0 ? o->col_stride : o->row_stride, across = i == 0 ? o->row_stride : o->col_stride;
  const uint64_t pitch = rest_of(q->value[across], element_bytes, LINE_BYTES);
  const uint64_t gap = rest_of(q->value[o->batch_stride], element_bytes, LINE_BYTES);
  const int along_k = contiguous(q, along) && contiguous(q, o->col_stride) == (i == 0);
  return along_k && !(pitch | gap) ? q->value[o->pointer] & (LINE_BYTES - 1) : 0;
}

/* Set how far before the first element along K steps may begin: launcher.h has the rule. */
static void set_shift(quantities *q, const aotmm_problem *p) {
  const int64_t element_bytes = bytes_of_dtype[p->dtype_a];
  const int64_t a = within_line(q, 0, element_bytes), b = within_line(q, 1, bytes_of_dtype[p->dtype_b]);
  const int64_t larger = q->value[AOTMM_PRODUCT_N] >= q->value[AOTMM_PRODUCT_M] ? b : a;
  const int64_t in_sectors = a % SECTOR_BYTES == 0 ? a : b % SECTOR_BYTES == 0 ? b : 0;
  const int whole = p->batch_invariant || p->grouped || p->block_scale_a_ptr;
  const int able = aotmm_begins_early && a && b && !((a | b) & (VECTOR_BYTES - 1)) && p->K >= AOTMM_SHIFTED_K && !whole;
  q->value[AOTMM_PRODUCT_K_SHIFT] = able ? ((a - b) % SECTOR_BYTES ? in_sectors : larger) / element_bytes : 0;
}

void set_quantities(quantities *q, const aotmm_problem *p) {
  static const struct {
    uint16_t size, strides[3];
  } dimensions[] = {
      {AOTMM_PRODUCT_M, {AOTMM_PRODUCT_STRIDE_AM, AOTMM_PRODUCT_STRIDE_CM, AOTMM_PRODUCT_STRIDE_BIAS_M}},
      {AOTMM_PRODUCT_N, {AOTMM_PRODUCT_STRIDE_BN, AOTMM_PRODUCT_STRIDE_CN, AOTMM_PRODUCT_STRIDE_BIAS_N}},
      {AOTMM_PRODUCT_K, {AOTMM_PRODUCT_STRIDE_AK, AOTMM_PRODUCT_STRIDE_BK, AOTMM_PRODUCT_STRIDE_BK}},
      {AOTMM_PRODUCT_BATCH, {AOTMM_PRODUCT_STRIDE_AZ, AOTMM_PRODUCT_STRIDE_BZ, AOTMM_PRODUCT_STRIDE_CZ}},
  };
  int64_t *value = q->value;
  memset(q, 0, sizeof *q);
  memcpy(value, p, AOTMM_PRODUCT_SLOPE * sizeof *value);
  for (int i = 0; i < 4; i++) free_strides(q, dimensions[i].size, dimensions[i].strides, 3);
  memcpy(value + AOTMM_PRODUCT_SLOPE, &p->slope, sizeof p->slope);
  for (int i = 0; i < OPERANDS; i++) set_extent(q, i);
  value[AOTMM_PRODUCT_BIAS_RANK] = !p->bias_ptr ? 0 : value[AOTMM_PRODUCT_STRIDE_BIAS_M] ? 2 : 1;
  /* kernels count rows through all groups */
  if (p->group_rows) value[AOTMM_PRODUCT_STRIDE_BLOCK_AZ] -= saturated(p->group_rows, value[AOTMM_PRODUCT_STRIDE_BLOCK_AM]);
  value[AOTMM_PRODUCT_SPLIT] = 1;
  value[AOTMM_PRODUCT_C_SPAN] = p->N;
  set_shift(q, p);
}

/* Round bytes up to a region of the workspace; the result is max_workspace + 1 if they exceed max_workspace. */
int64_t region(int64_t bytes) {
  if (bytes > max_workspace) return max_workspace + 1;
  return (bytes + AOTMM_WORKSPACE_ALIGNMENT - 1) & -(int64_t)AOTMM_WORKSPACE_ALIGNMENT;
}

/* ---- copies of operands in the workspace */

/* Return whether lines with this stride all start at a multiple of 16 bytes, or there is only one. */
static int aligned(const quantities *q, int stride, int64_t element_bytes) {
  return (q->value[stride] > 0 && !rest_of(q->value[stride], element_bytes, VECTOR_BYTES)) || q->free >> stride & 1;
}

/* Return whether the fast kernels take the placement of an operand. For 1-byte types they take row-major A and
   column-major B only: tensor cores transpose only 16-bit elements. */
int lies_well(const quantities *q, int i, int64_t element_bytes) {
  int rows = contiguous(q, operands[i].col_stride) && aligned(q, operands[i].row_stride, element_bytes);
  int cols = contiguous(q, operands[i].row_stride) && aligned(q, operands[i].col_stride, element_bytes);
  if (q->value[operands[i].pointer] & (VECTOR_BYTES - 1)) return 0;
  if (rest_of(q->value[operands[i].batch_stride], element_bytes, VECTOR_BYTES)) return 0;
  if (i == 2 && rest_of(q->value[AOTMM_PRODUCT_C_SPAN], element_bytes, VECTOR_BYTES)) return 0;
  return i == 0 ? rows || (cols && element_bytes > 1) : i == 1 ? cols || (rows && element_bytes > 1) : rows;
}

/* Return whether elements are of 32 bits and tensor cores may round them. These read such elements along K. */
static int is_tf32(const quantities *q, int64_t element_bytes) {
  return element_bytes == bytes_of_dtype[AOTMM_FP32] && q->value[AOTMM_PRODUCT_ALLOW_TF32];
}

/* Return how many matrices an operand has: one if all products of a batch share it. */
static int64_t matrices_of(const quantities *q, int i) {
  return q->value[operands[i].batch_stride] ? q->value[AOTMM_PRODUCT_BATCH] : 1;
}

/* Of tf32 operands one has to lie along K for the fastest kernels of large products. Return the smaller one (AOTMM_COPY_A or
   AOTMM_COPY_B), to be copied so, if neither does, else 0. */
uint32_t needed_along_k(const quantities *q, int64_t element_bytes) {
  if (!is_tf32(q, element_bytes) || contiguous(q, AOTMM_PRODUCT_STRIDE_AK) || contiguous(q, AOTMM_PRODUCT_STRIDE_BK)) return 0;
  const int64_t rows = saturated(q->value[AOTMM_PRODUCT_M], matrices_of(q, 0));
  const int64_t cols = saturated(q->value[AOTMM_PRODUCT_N], matrices_of(q, 1));
  return rows <= cols ? AOTMM_COPY_A : AOTMM_COPY_B;
}

/* Return AOTMM_COPY_A if threads multiply fp32 matrices that both lie well along K, else 0. A copy of A along M may save time
   then: registers of their steps collide less. */
uint32_t worth_along_m(const quantities *q, int64_t element_bytes) {
  if (!aotmm_threads_multiply || element_bytes != bytes_of_dtype[AOTMM_FP32] || is_tf32(q, element_bytes)) return 0;
  const int a_along_k = !contiguous(q, AOTMM_PRODUCT_STRIDE_AM) && lies_well(q, 0, element_bytes);
  const int b_along_k = !contiguous(q, AOTMM_PRODUCT_STRIDE_BN) && contiguous(q, AOTMM_PRODUCT_STRIDE_BK);
  return a_along_k && b_along_k ? AOTMM_COPY_A : 0;
}

/* Return the bytes of the matrices of a copy, which follow each other. */
static int64_t bytes_of_copy(const quantities *q, int i, const copy_layout *layout, int64_t element_bytes) {
  return region(saturated(saturated(saturated(layout->pitch, element_bytes), layout->lines), matrices_of(q, i)));
}

/* Return the layout of a copy: in the memory order of the operand if the fast kernels take that, but A along M if that is worth it. */
static copy_layout layout_of_copy(const quantities *q, int i, int64_t element_bytes) {
  int rows = contiguous(q, operands[i].col_stride), cols = contiguous(q, operands[i].row_stride);
  int along_k = element_bytes == 1 || is_tf32(q, element_bytes);
  int along_m = i == 0 && (worth_along_m(q, element_bytes) || (!along_k && cols && !rows));
  copy_layout found = {.transposed = along_m || (i == 1 && (along_k || !rows))};
  found.lines = q->value[found.transposed ? operands[i].cols : operands[i].rows];
  found.length = q->value[found.transposed ? operands[i].rows : operands[i].cols];
  int64_t bytes = saturated(found.length, element_bytes);
  if (bytes > max_workspace) bytes = max_workspace + 1; /* no overflow here; refused later */
  bytes = (bytes + LINE_BYTES - 1) & -(int64_t)LINE_BYTES;
  found.pitch = bytes / element_bytes;
  found.bytes = bytes_of_copy(q, i, &found, element_bytes);
  return found;
}

/* Return the rows of a copy of C beside one of A. If that lies along M for its own sake, they are whole vectors, as fast kernels
   ask of M: the last few stay in the workspace. Not so if operands of the epilogue have rows, which end where the caller's do. */
int64_t rows_of_c(const quantities *q, const aotmm_problem *p) {
  const int64_t bytes_a = bytes_of_dtype[p->dtype_a], bytes_c = bytes_of_dtype[p->dtype_c];
  const int64_t *value = q->value, rows = value[AOTMM_PRODUCT_M], vector = VECTOR_BYTES / bytes_a;
  const int of_rows = value[AOTMM_PRODUCT_BIAS_RANK] == 2 || (value[AOTMM_PRODUCT_SCALE_A_PTR] && value[AOTMM_PRODUCT_STRIDE_SCALE_A]);
  return of_rows || bytes_c != bytes_a || !worth_along_m(q, bytes_a) ? rows : saturated(ceil_div(rows, vector), vector);
}

/* Set the layouts of the copies of a problem, of which `q` may have a part. */
void set_layouts(copy_layout *layouts, const quantities *q, const aotmm_problem *p, uint32_t copies) {
  const int32_t types[OPERANDS] = {p->dtype_a, p->dtype_b, p->dtype_c};
  for (int i = 0; i < OPERANDS; i++)
    if (copies >> i & 1) layouts[i] = layout_of_copy(q, i, bytes_of_dtype[types[i]]);
  if (!(copies & AOTMM_COPY_A && copies & AOTMM_COPY_C)) return;
  copy_layout *c = layouts + 2;
  c->lines = rows_of_c(q, p);
  c->bytes = bytes_of_copy(q, 2, c, bytes_of_dtype[p->dtype_c]);
}

int64_t bytes_of_copies(const copy_layout *layouts, uint32_t copies) {
  int64_t bytes = 0;
  for (int i = 0; i < OPERANDS; i++)
    if (copies >> i & 1) bytes += layouts[i].bytes;
  return bytes;
}

/* Set `moved` to the same problem with the operands of `copies` in a workspace at `address`. Kernels
   compute all rows of a copy of C. */
void set_copies(quantities *moved, const quantities *q, const aotmm_problem *p, const copy_layout *layouts, uint32_t copies,
                int64_t address) {
  *moved = *q;
  if (copies & AOTMM_COPY_C) moved->value[AOTMM_PRODUCT_M] = layouts[2].lines;
  for (int i = 0; i < OPERANDS; i++) {
    if (!(copies >> i & 1)) continue;
    int lines = layouts[i].transposed ? operands[i].col_stride : operands[i].row_stride;
    int along = layouts[i].transposed ? operands[i].row_stride : operands[i].col_stride;
    moved->value[operands[i].pointer] = address;
    moved->value[lines] = q->free >> lines & 1 ? 0 : layouts[i].pitch;
    moved->value[along] = q->free >> along & 1 ? 0 : 1;
    moved->value[operands[i].batch_stride] = matrices_of(q, i) > 1 ? saturated(layouts[i].lines, layouts[i].pitch) : 0;
    set_extent(moved, i);
    if (i == 2) moved->value[AOTMM_PRODUCT_C_SPAN] = layouts[i].pitch;
    address = behind(address, layouts[i].bytes);
  }
  set_shift(moved, p);
}

/* Make one matrix of those that a copy moves, if their rows follow each other on both sides. */
static void join_matrices(int64_t *value) {
  const int64_t M = value[AOTMM_COPY_M], rows = saturated(M, value[AOTMM_COPY_BATCH]);
  if (value[AOTMM_COPY_BATCH] < 2 || rows > MOST_JOINED) return;
  if (M == 1 && value[AOTMM_COPY_STRIDE_SN] == 1 && value[AOTMM_COPY_STRIDE_DN] == 1) {
    value[AOTMM_COPY_STRIDE_SM] = value[AOTMM_COPY_STRIDE_SZ];
    value[AOTMM_COPY_STRIDE_DM] = value[AOTMM_COPY_STRIDE_DZ];
  } else if (M == 1 || value[AOTMM_COPY_STRIDE_SZ] != saturated(M, value[AOTMM_COPY_STRIDE_SM]) ||
             value[AOTMM_COPY_STRIDE_DZ] != saturated(M, value[AOTMM_COPY_STRIDE_DM])) {
    return;
  }
  value[AOTMM_COPY_M] = rows;
  value[AOTMM_COPY_BATCH] = 1;
  value[AOTMM_COPY_STRIDE_SZ] = value[AOTMM_COPY_STRIDE_DZ] = 0;
}

/* Set the quantities of a copy. The operand is the source, but C is the destination; `moved` has the other side. The
   copy's rows are the contiguous lines of its destinations. */
void set_copy(quantities *copy, const quantities *q, const quantities *moved, int i, const copy_layout *to) {
  const quantities *from = i == 2 ? moved : q, *into = i == 2 ? q : moved;
  int turned = i == 2 ? contiguous(q, AOTMM_PRODUCT_STRIDE_CM) && !contiguous(q, AOTMM_PRODUCT_STRIDE_CN) : to->transposed;
  int rows = turned ? operands[i].cols : operands[i].rows, cols = turned ? operands[i].rows : operands[i].cols;
  int lines = turned ? operands[i].col_stride : operands[i].row_stride;
  int along = turned ? operands[i].row_stride : operands[i].col_stride;
  int64_t *value = copy->value;
  memset(copy, 0, sizeof *copy);
  for (int stride = AOTMM_COPY_OTHER_STRIDE_SM; stride <= AOTMM_COPY_OTHER_STRIDE_DN; stride++) copy->free |= 1ull << stride;
  value[AOTMM_COPY_SOURCE_PTR] = from->value[operands[i].pointer];
  value[AOTMM_COPY_DEST_PTR] = into->value[operands[i].pointer];
  value[AOTMM_COPY_M] = q->value[rows];
  value[AOTMM_COPY_N] = q->value[cols];
  value[AOTMM_COPY_BATCH] = matrices_of(q, i);
  value[AOTMM_COPY_STRIDE_SZ] = from->value[operands[i].batch_stride];
  value[AOTMM_COPY_STRIDE_DZ] = into->value[operands[i].batch_stride];
  value[AOTMM_COPY_STRIDE_SM] = from->value[lines];
  value[AOTMM_COPY_STRIDE_SN] = from->value[along];
  value[AOTMM_COPY_STRIDE_DM] = into->value[lines];
  value[AOTMM_COPY_STRIDE_DN] = into->value[along];
  join_matrices(value);
  free_strides(copy, AOTMM_COPY_M, (const uint16_t[]){AOTMM_COPY_STRIDE_SM, AOTMM_COPY_STRIDE_DM}, 2);
  free_strides(copy, AOTMM_COPY_N, (const uint16_t[]){AOTMM_COPY_STRIDE_SN, AOTMM_COPY_STRIDE_DN}, 2);
}

/* Add another copy to the launch of a copy. */
void set_other_copy(quantities *copy, const quantities *other) {
  for (int i = 0; i <= AOTMM_COPY_STRIDE_DN; i++) {
    const int to = AOTMM_COPY_OTHER_SOURCE_PTR + i;
    copy->value[to] = other->value[i];
    copy->free = (copy->free & ~(1ull << to)) | (other->free >> i & 1) << to;
  }
}

/* ---- sums of slices in the workspace */

/* Place the partial sums of a kernel in `q` and return their bytes. */
int64_t set_sums(quantities *q, uint32_t kernel, int64_t split, int64_t address) {
  const aotmm_product *k = aotmm_products + kernel;
  int64_t rows = saturated(ceil_div(q->value[AOTMM_PRODUCT_M], k->block_m), k->block_m);
  int64_t cols = saturated(ceil_div(q->value[AOTMM_PRODUCT_N], k->block_n), k->block_n);
  q->value[AOTMM_PRODUCT_WORKSPACE_PTR] = address;
  q->value[AOTMM_PRODUCT_WORKSPACE_STRIDE_M] = cols;
  q->value[AOTMM_PRODUCT_WORKSPACE_STRIDE_Z] = saturated(rows, cols);
  q->value[AOTMM_PRODUCT_SPLIT] = split;
  return region(saturated(saturated(saturated(rows, cols), q->value[AOTMM_PRODUCT_BATCH]), 4 * split));
}

void set_no_sums(quantities *q) {
  q->value[AOTMM_PRODUCT_WORKSPACE_PTR] = 0;
  q->value[AOTMM_PRODUCT_WORKSPACE_STRIDE_M] = q->value[AOTMM_PRODUCT_WORKSPACE_STRIDE_Z] = 0;
  q->value[AOTMM_PRODUCT_SPLIT] = 1;
}
