/* torch.ops.aotmm.*: registered through LibTorch's stable C interface, computed by launchers.
 *
 * There is no torch header and no link to torch. Functions are looked up at run time, so one binary serves every torch
 * from 2.10 on, CUDA and ROCm, and every Python. Source: torch/csrc/inductor/aoti_torch/c/shim.h,
 * torch/csrc/stable/c/shim.h.
 *
 * A boxed kernel gets its arguments on `stack` and owns the tensor handles there. Errors are recorded for Python
 * (aotmm_torch_last_error), then raised by aoti_torch_check, whose C++ exception passes through these frames. */
#include <stdio.h>
#include <string.h>

#include "torch_ops.h"

enum { DRY_RUN = 255 /* number of a library of `dry_run` alone */ };
enum { MAX_LIBRARIES = DRY_RUN + 1, MAX_DEVICES = 32, MAX_PACKS = 8 /* for a device */ };
enum { DTYPES = sizeof((int[])AOTMM_DEFAULT_OUTPUTS) / sizeof(int) };

struct torch_functions torch;
static void (*delete_value)(void *);
static int (*current_stream)(int32_t device, void **); /* NULL in a torch without GPU support: the default stream */

#define SYMBOL(name) {#name, &torch.name}
static const struct {
  const char *name;
  void *slot;
} symbols[] = {
    SYMBOL(aoti_torch_get_dim),
    SYMBOL(aoti_torch_get_sizes),
    SYMBOL(aoti_torch_get_strides),
    SYMBOL(aoti_torch_get_dtype),
    SYMBOL(aoti_torch_get_device_type),
    SYMBOL(aoti_torch_get_device_index),
    SYMBOL(torch_get_const_data_ptr),
    SYMBOL(torch_get_mutable_data_ptr),
    SYMBOL(aoti_torch_empty_strided),
    SYMBOL(aoti_torch_delete_tensor_object),
    SYMBOL(aoti_torch_library_init_impl),
    SYMBOL(aoti_torch_delete_library_object),
    SYMBOL(torch_library_impl),
    SYMBOL(aoti_torch_check),
    SYMBOL(aoti_torch_device_type_cuda),
    SYMBOL(aoti_torch_dtype_float16),
    SYMBOL(aoti_torch_dtype_bfloat16),
    SYMBOL(aoti_torch_dtype_float32),
    SYMBOL(aoti_torch_dtype_float8_e5m2),
    SYMBOL(aoti_torch_dtype_float8_e4m3fn),
    SYMBOL(aoti_torch_dtype_int8),
    SYMBOL(aoti_torch_dtype_int32),
};

static __thread torch_error last_error;

static int32_t torch_dtypes[DTYPES], cuda_type;
static const int default_outputs[DTYPES] = AOTMM_DEFAULT_OUTPUTS;
static int (*resolver)(int library, int device);
static const aotmm_launcher *launchers[MAX_LIBRARIES][MAX_DEVICES][MAX_PACKS + 1]; /* in turn, up to a NULL */

EXPORT const char aotmm_torch_key[] = AOTMM_KEY; /* digest of this library's sources */

EXPORT const torch_error *aotmm_torch_last_error(void) { return &last_error; }

/* Bind the launcher of number `rank` for products of library number `library` on device `device`. A product goes to the
   lowest rank that has a kernel for it; bind higher ranks first. Return AOTMM_INVALID for a number out of range, or a
   launcher of another ABI. */
EXPORT int aotmm_torch_bind(int library, int device, int rank, const aotmm_launcher *launcher) {
  if (library < 0 || library >= DRY_RUN || device < 0 || device >= MAX_DEVICES || rank < 0 || rank >= MAX_PACKS ||
      launcher->abi != AOTMM_ABI || launcher->problem_bytes != sizeof(aotmm_problem))
    return AOTMM_INVALID;
  __atomic_store_n(&launchers[library][device][rank], launcher, __ATOMIC_RELEASE);
  return AOTMM_OK;
}

static int fail(int kind, const char *text) {
  last_error.kind = kind;
  memset(&last_error.error, 0, sizeof last_error.error);
  snprintf(last_error.error.text, sizeof last_error.error.text, "%s", text);
  return 1;
}

/* ------------------------------------------------------------------------------------------- operands */

static const int32_t bytes_of_dtype[DTYPES] = AOTMM_ELEMENT_BYTES;

EXPORT int aotmm_torch_view(tensor_t handle, int writable, view *v) {
  int64_t dim, *sizes, *strides;
  int32_t type, dtype, device;
  const void *input = NULL;
  void *output = NULL;
  if (torch.aoti_torch_get_dim(handle, &dim) || torch.aoti_torch_get_device_type(handle, &type))
    return fail(KIND_TORCH, "torch cannot describe an operand");
  *v = (view){.dim = (int32_t)dim, .dtype = -1, .device = -1};
  if (type != cuda_type) return 0; /* the rest need not exist */
  if (torch.aoti_torch_get_sizes(handle, &sizes) || torch.aoti_torch_get_strides(handle, &strides) ||
      torch.aoti_torch_get_dtype(handle, &dtype) || torch.aoti_torch_get_device_index(handle, &device) ||
      (writable ? torch.torch_get_mutable_data_ptr(handle, &output) : torch.torch_get_const_data_ptr(handle, &input)))
    return fail(KIND_TORCH, "torch cannot describe an operand");
  v->sizes = sizes, v->strides = strides, v->device = device;
  v->address = (uint64_t)(writable ? output : input);
  for (int known = 0; known < DTYPES; known++)
    if (torch_dtypes[known] == dtype) v->dtype = known;
  return 0;
}

static int as_matrix(const view *v, matrix *m) {
  if (v->device < 0) return fail(KIND_TYPE, "aotmm multiplies CUDA and ROCm tensors, so move these to a GPU (tensor.cuda())");
  int32_t dim = v->dim;
  if (dim != 2 && dim != 3) return fail(KIND_VALUE, "aotmm::mm multiplies tensors of 2 or 3 dimensions");
  if (v->dtype < 0) return fail(KIND_TYPE, "aotmm has no kernels for this dtype");
  const int64_t *sizes = v->sizes, *strides = v->strides;
  *m = (matrix){.batch = dim == 3 ? sizes[0] : 1, .z_stride = dim == 3 ? strides[0] : 0,
                .rows = sizes[dim - 2], .cols = sizes[dim - 1],
                .row_stride = strides[dim - 2], .col_stride = strides[dim - 1],
                .address = v->address, .dim = dim, .dtype = v->dtype, .device = v->device,
                .bytes = bytes_of_dtype[v->dtype]};
  return 0;
}

/* -------------------------------------------------------------------------------------------- the call */

/* A request for launchers. */
typedef struct call {
  const request *request;
  aotmm_problem problem;
  int32_t device;
} call;

static int set_operands(call *c, matrix *a, matrix *b) {
  const request *r = c->request;
  if (as_matrix(&r->a, a) || as_matrix(&r->b, b)) return 1;
  if (a->device != b->device) return fail(KIND_VALUE, "the operands are on different devices");
  if (a->cols != b->rows) return fail(KIND_VALUE, "the inner sizes differ: a is (M, K), b must be (K, N)");
  if (a->batch != b->batch && a->batch != 1 && b->batch != 1)
    return fail(KIND_VALUE, "the batch sizes differ, and neither is 1");
  aotmm_problem *p = &c->problem;
  c->device = a->device;
  p->batch = a->batch == 1 ? b->batch : a->batch;
  p->a_ptr = (int64_t)a->address, p->b_ptr = (int64_t)b->address;
  p->M = a->rows, p->N = b->cols, p->K = a->cols;
  p->stride_am = a->row_stride, p->stride_ak = a->col_stride, p->stride_az = a->batch == 1 ? 0 : a->z_stride;
  p->stride_bk = b->row_stride, p->stride_bn = b->col_stride, p->stride_bz = b->batch == 1 ? 0 : b->z_stride;
  p->dtype_a = a->dtype, p->dtype_b = b->dtype;
  p->activation = r->activation, p->slope = (float)r->slope;
  p->allow_tf32 = r->allow_tf32, p->fast_accum = r->fast_accum, p->batch_invariant = r->batch_invariant;
  return 0;
}

static void set_output(call *c, const matrix *m) {
  c->problem.c_ptr = (int64_t)m->address;
  c->problem.stride_cm = m->row_stride, c->problem.stride_cn = m->col_stride;
  c->problem.stride_cz = m->batch == 1 ? 0 : m->z_stride;
  c->problem.dtype_c = m->dtype;
}

/* Return whether matrices follow each other as their rows do. */
static int follow(int64_t z_stride, int64_t rows, int64_t row_stride) {
  int64_t apart;
  return !__builtin_mul_overflow(rows, row_stride, &apart) && z_stride == apart;
}

/* Read the last dimensions of a bias or scale, right-aligned: missing ones have size 1 and stride 0. */
static int right_aligned(const view *v, int32_t device, int64_t size[3], int64_t stride[3]) {
  if (v->device != device) return fail(KIND_VALUE, "a bias or scale is on another device");
  if (v->dim > 3) return fail(KIND_VALUE, "a bias or scale has more than 3 dimensions");
  for (int i = 0; i < 3; i++) {
    int at = i + v->dim - 3;
    size[i] = at < 0 ? 1 : v->sizes[at], stride[i] = at < 0 || v->sizes[at] == 1 ? 0 : v->strides[at];
  }
  return 0;
}

/* Return whether a bias or scale is the result itself, each element read before it is written, or apart from it. */
static int apart_from_result(const aotmm_problem *p, uint64_t address, int32_t bytes, const int64_t size[3],
                             const int64_t stride[3]) {
  matrix out = {.batch = p->batch, .rows = p->M, .cols = p->N, .z_stride = p->stride_cz, .row_stride = p->stride_cm,
                .col_stride = p->stride_cn, .address = (uint64_t)p->c_ptr, .bytes = bytes_of_dtype[p->dtype_c]};
  matrix factor = {.batch = size[0], .rows = size[1], .cols = size[2], .z_stride = stride[0], .row_stride = stride[1],
                   .col_stride = stride[2], .address = address, .bytes = bytes};
  int same = address == out.address && bytes == out.bytes && size[0] == p->batch && size[1] == p->M &&
             size[2] == p->N && (p->batch == 1 || stride[0] == p->stride_cz) &&
             (p->M == 1 || stride[1] == p->stride_cm) && (p->N == 1 || stride[2] == p->stride_cn);
  return same || !share_memory(&out, &factor);
}

/* The last dimensions of the scales of an operand, right-aligned. */
typedef struct factors {
  int64_t size[3], stride[3];
  int64_t address;
} factors;

static int read_scale(const call *c, const view *scale, factors *found) {
  if (right_aligned(scale, c->device, found->size, found->stride)) return 1;
  if (scale->dtype != AOTMM_FP32) return fail(KIND_TYPE, "scales must be float32");
  if (!apart_from_result(&c->problem, scale->address, bytes_of_dtype[AOTMM_FP32], found->size, found->stride))
    return fail(KIND_VALUE, "out shares memory with a scale");
  found->address = (int64_t)scale->address;
  return 0;
}

/* Return the factors with rows and columns exchanged: those of a transposed operand. */
static factors exchanged(const factors *f) {
  return (factors){.size = {f->size[0], f->size[2], f->size[1]}, .stride = {f->stride[0], f->stride[2], f->stride[1]},
                   .address = f->address};
}

static int is_one_of(int64_t size, int64_t first, int64_t second) { return size == 1 || size == first || size == second; }

/* Return whether factors are for blocks along K, of which there are `blocks`: not one for all, nor one per row or column. */
static int is_in_blocks(const factors *a, const factors *b, int64_t blocks, int64_t cols) {
  return (a->size[2] != 1 && a->size[2] == blocks) || (b->size[1] != 1 && b->size[1] == blocks) ||
         (b->size[2] != 1 && b->size[2] != cols);
}

/* Set fp32 factors: one for all, one for each row of A and column of B, or block scales. Their sizes tell which. If the
   product is `turned`, A is the caller's b transposed, and B the caller's a. */
static int set_scales(call *c, int turned) {
  const request *r = c->request;
  aotmm_problem *p = &c->problem;
  const int64_t blocks = ceil_div(p->K, AOTMM_BLOCK_SCALE_K), wide = ceil_div(p->N, AOTMM_BLOCK_SCALE_K);
  const int64_t rows = p->group_rows ? p->group_rows : p->M, matrices = p->grouped && !p->group_rows ? 1 : p->batch;
  factors a = {.size = {1, 1, 1}}, b = {.size = {1, 1, 1}};
  if ((r->scale_a && read_scale(c, r->scale_a, &a)) || (r->scale_b && read_scale(c, r->scale_b, &b))) return 1;
  if (turned) {
    const factors of_rows = exchanged(&b);
    b = exchanged(&a), a = of_rows;
  }
  if (!is_one_of(a.size[0], matrices, 1) || !is_one_of(a.size[1], rows, 1) || !is_one_of(a.size[2], blocks, 1))
    return fail(KIND_VALUE, turned ? "scale_b must be one number, (1, N), or (ceil(K / 128), N) for blocks of K"
                                   : "scale_a must be one number, (M, 1), or (M, ceil(K / 128)) for blocks of K");
  if (!is_one_of(b.size[0], p->batch, 1) || !is_one_of(b.size[1], blocks, 1) || !is_one_of(b.size[2], p->N, wide))
    return fail(KIND_VALUE, turned ? "scale_a must be one number, (M, 1), or (M, ceil(K / 128)) or (ceil(M / 128), "
                                     "ceil(K / 128)) for blocks of K, for each group"
                                   : "scale_b must be one number, (1, N), or (ceil(K / 128), N) or (ceil(K / 128), "
                                     "ceil(N / 128)) for blocks of K");
  if (!is_in_blocks(&a, &b, blocks, p->N)) {
    if (!p->grouped && (a.size[0] != 1 || b.size[0] != 1))
      return fail(KIND_VALUE, "scales of rows and columns are the same for every matrix of a batch");
    if (rows == 1) a.stride[1] = a.stride[0];
    const int64_t count = a.size[0] * a.size[1];
    if (p->group_rows && count != 1 && (count != p->M || (matrices > 1 && !follow(a.stride[0], rows, a.stride[1]))))
      return fail(KIND_VALUE, "scale_a must be one number, or have one for each row of all matrices, evenly in memory");
    p->scale_a_ptr = a.address, p->stride_scale_a = a.stride[1];
    p->scale_b_ptr = b.address, p->stride_scale_b = b.stride[2], p->stride_scale_bz = b.stride[0];
    return 0;
  }
  if (p->K == 0) return 0; /* there is no block */
  if (!r->scale_a || !r->scale_b) return fail(KIND_VALUE, "scales of blocks of K need both scale_a and scale_b");
  if (p->dtype_a != AOTMM_FP8E4 && p->dtype_a != AOTMM_FP8E5) return fail(KIND_TYPE, "scales of blocks of K are for float8");
  if (p->grouped && p->batch > 1 && (turned ? r->scale_a : r->scale_b)->dim < 3)
    return fail(KIND_VALUE, turned ? "scale_a of blocks of K must be (groups, M, ceil(K / 128)) or (groups, ceil(M / 128), ceil(K / 128))"
                                   : "scale_b of blocks of K must be (groups, ceil(K / 128), N) or (groups, ceil(K / 128), ceil(N / 128))");
  if (p->group_rows && p->batch > 1 && a.stride[0] < saturated(rows, a.stride[1]))
    return fail(KIND_VALUE, "scale_a of blocks of K must have the matrices' scales one behind the other, at least rows apart");
  p->block_scale_a_ptr = a.address, p->block_scale_b_ptr = b.address;
  p->stride_block_az = a.stride[0], p->stride_block_am = a.stride[1], p->stride_block_ak = a.stride[2];
  p->stride_block_bz = b.stride[0], p->stride_block_bk = b.stride[1], p->stride_block_bn = b.stride[2];
  p->block_columns = b.size[2] == p->N && p->N > 1 ? 1 : AOTMM_BLOCK_SCALE_K;
  return 0;
}

static int set_epilogue(call *c) {
  const request *r = c->request;
  aotmm_problem *p = &c->problem;
  if (r->bias) {
    int64_t size[3], stride[3];
    if (right_aligned(r->bias, c->device, size, stride)) return 1;
    if (r->bias->dtype != p->dtype_c) return fail(KIND_TYPE, "bias must have the dtype of the result");
    const int64_t result[3] = {p->batch, p->M, p->N};
    for (int i = 0; i < 3; i++)
      if (size[i] != 1 && size[i] != result[i]) return fail(KIND_VALUE, "bias must broadcast to the result");
    if (!apart_from_result(p, r->bias->address, bytes_of_dtype[p->dtype_c], size, stride))
      return fail(KIND_VALUE, "out shares memory with bias, and is not the same elements");
    p->bias_ptr = (int64_t)r->bias->address;
    p->stride_bias_z = stride[0], p->stride_bias_m = stride[1], p->stride_bias_n = stride[2];
  }
  return r->scale_a || r->scale_b ? set_scales(c, 0) : 0;
}

/* Make a batch with one B a matrix of all its rows, if these lie evenly: tiles can then have rows of several
   matrices. */
static void merge_rows(aotmm_problem *p) {
  if (p->batch == 1 || p->stride_bz || p->stride_scale_a || p->stride_block_bz) return;
  if (p->M == 1) {
    p->stride_am = p->stride_az, p->stride_cm = p->stride_cz, p->stride_bias_m = p->stride_bias_z;
    p->stride_block_am = p->stride_block_az;
  }
  int64_t rows;
  if (!follow(p->stride_az, p->M, p->stride_am) || !follow(p->stride_cz, p->M, p->stride_cm) ||
      !follow(p->stride_bias_z, p->M, p->stride_bias_m) || !follow(p->stride_block_az, p->M, p->stride_block_am) ||
      __builtin_mul_overflow(p->M, p->batch, &rows))
    return;
  p->M = rows, p->batch = 1;
  p->stride_az = p->stride_cz = p->stride_bias_z = p->stride_block_az = 0;
}

static const aotmm_launcher *const *launchers_of(int64_t library, int device) {
  if (library < 0 || library >= MAX_LIBRARIES || device < 0 || device >= MAX_DEVICES) {
    fail(KIND_VALUE, "no such library, or more devices than aotmm can number");
    return NULL;
  }
  const aotmm_launcher **slots = launchers[library][device];
  const aotmm_launcher *first = __atomic_load_n(slots, __ATOMIC_ACQUIRE);
  if (!first && resolver && !resolver((int)library, device)) first = __atomic_load_n(slots, __ATOMIC_ACQUIRE);
  if (first) return slots;
  fail(KIND_RESOLVER, "no pack of aotmm serves this device");
  return NULL;
}

int aotmm_torch_splits_fp32(int64_t library, int device) {
  enum { UNKNOWN, NO, YES };
  static int8_t found[MAX_LIBRARIES][MAX_DEVICES];
  const aotmm_launcher *const *slots = launchers_of(library, device);
  if (!slots) return -1;
  int8_t *known = &found[library][device], split = __atomic_load_n(known, __ATOMIC_RELAXED);
  if (split != UNKNOWN) return split == YES;
  for (; *slots && split == UNKNOWN; slots++)
    for (uint32_t i = 0; i < (*slots)->kernel_count && split != YES; i++) {
      const aotmm_product *k = (*slots)->products + i;
      if (k->role == AOTMM_ROLE_PRODUCT && k->dtype_a == AOTMM_FP32) split = strncmp(k->order, "wgmma", 5) ? NO : YES;
    }
  if (split == UNKNOWN) split = NO;
  __atomic_store_n(known, split, __ATOMIC_RELAXED);
  return split == YES;
}

/* Allocate the memory of a plan with torch's allocator, on torch's current stream of the device, where the plan is
   launched. The caller deletes it once everything is launched, before it has run: the allocator gives a block that was
   freed on a stream only to later work of the same stream. During a capture it comes from the graph's own pool, which
   lives as long as the graph. Return NULL if there is not enough. */
static tensor_t workspace_of(const aotmm_plan *plan, int32_t device, void **address) {
  const int64_t size = (int64_t)plan->workspace_bytes, stride = 1;
  tensor_t memory = NULL;
  if (torch.aoti_torch_empty_strided(1, &size, &stride, torch_dtypes[AOTMM_INT8], cuda_type, device, &memory))
    return NULL;
  if (torch.torch_get_mutable_data_ptr(memory, address) == 0) return memory;
  torch.aoti_torch_delete_tensor_object(memory);
  return NULL;
}

static int launch(const call *);

/* Compute the members of a batch one by one, where no plan for all of them keeps the order: their copies, or their sums of
   slices, need more memory than there is, or than the limit. One member needs less, and may be computed in panels. */
static int launch_members(const call *c) {
  const int64_t bytes_a = bytes_of_dtype[c->problem.dtype_a], bytes_b = bytes_of_dtype[c->problem.dtype_b];
  const int64_t bytes_c = bytes_of_dtype[c->problem.dtype_c];
  call member = *c;
  aotmm_problem *p = &member.problem;
  p->batch = 1;
  for (int64_t left = c->problem.batch; left; left--) {
    if (launch(&member)) return 1;
    p->a_ptr += p->stride_az * bytes_a, p->b_ptr += p->stride_bz * bytes_b, p->c_ptr += p->stride_cz * bytes_c;
    if (p->bias_ptr) p->bias_ptr += p->stride_bias_z * bytes_c;
    if (p->block_scale_a_ptr) {
      p->block_scale_a_ptr += p->stride_block_az * bytes_of_dtype[AOTMM_FP32];
      p->block_scale_b_ptr += p->stride_block_bz * bytes_of_dtype[AOTMM_FP32];
    }
  }
  return 0;
}

/* Compute the product by the best plan; if its memory is missing, by one without a workspace, which is only slower. */
static int launch(const call *c) {
  const aotmm_problem *p = &c->problem;
  if (p->batch == 0 || p->M == 0 || p->N == 0) return 0;
  const aotmm_launcher *const *next = launchers_of(c->request->library, c->device), *launcher;
  if (!next) return 1;
  void *stream = NULL, *address = NULL;
  if (current_stream && current_stream(c->device, &stream))
    return fail(KIND_TORCH, "torch does not tell its current stream");
  aotmm_plan plan;
  tensor_t workspace = NULL;
  int status;
  do {
    launcher = *next++;
    status = launcher->plan(p, c->device, AOTMM_WORKSPACE_LIMIT, &plan);
  } while (status == AOTMM_NO_KERNEL && *next);
  if (status == AOTMM_OK && plan.workspace_bytes && !(workspace = workspace_of(&plan, c->device, &address)))
    status = launcher->plan(p, c->device, 0, &plan);
  if (status == AOTMM_NO_ORDER && p->batch > 1 && !p->grouped) return launch_members(c);
  if (status == AOTMM_OK) status = launcher->run(&plan, p, c->device, stream, address);
  if (workspace) torch.aoti_torch_delete_tensor_object(workspace);
  if (status == AOTMM_OK) return 0;
  last_error.kind = KIND_LAUNCHER;
  last_error.error = *launcher->last_error();
  return 1;
}

/* Make a new row-major result of operands of type `input`, a matrix (dim 2) or a batch of them, which the caller owns. */
static int new_result(const call *c, int32_t input, int dim, const int64_t sizes[3], matrix *m, tensor_t *result) {
  int64_t output = c->request->out_dtype;
  if (output < -1 || output >= DTYPES || (output >= 0 && torch_dtypes[output] < 0))
    return fail(KIND_TYPE, "aotmm cannot write this dtype");
  int64_t rows = sizes[1] > 0 ? sizes[1] : 1, cols = sizes[2] > 0 ? sizes[2] : 1;
  int64_t strides[] = {saturated(rows, cols), cols, 1};
  *m = (matrix){.batch = sizes[0], .rows = sizes[1], .cols = sizes[2],
                .z_stride = strides[0], .row_stride = strides[1], .col_stride = 1,
                .dtype = output < 0 ? default_outputs[input] : (int32_t)output};
  int skip = 3 - dim;
  void *address = NULL;
  if (torch.aoti_torch_empty_strided(3 - skip, sizes + skip, strides + skip, torch_dtypes[m->dtype], cuda_type,
                                     c->device, result) ||
      torch.torch_get_mutable_data_ptr(*result, &address))
    return fail(KIND_TORCH, "torch cannot allocate the result");
  m->address = (uint64_t)address;
  return 0;
}

/* Check an `out` of given dimensions and sizes; the first does not count for a matrix. */
static int check_output(const call *c, const matrix *a, const matrix *b, int dim, const int64_t sizes[3], const char *shape,
                        const matrix *m) {
  if (m->device != c->device) return fail(KIND_VALUE, "out is on another device than the operands");
  if (m->dim != dim || (dim == 3 && m->batch != sizes[0]) || m->rows != sizes[1] || m->cols != sizes[2])
    return fail(KIND_VALUE, shape);
  if (overlaps_itself(m)) return fail(KIND_VALUE, "elements of out share memory");
  if (share_memory(m, a) || share_memory(m, b)) return fail(KIND_VALUE, "out shares memory with an operand");
  return 0;
}

EXPORT int aotmm_torch_multiply(const request *r, tensor_t *result) {
  call c = {.request = r};
  matrix a, b, m;
  tensor_t made = NULL;
  if (set_operands(&c, &a, &b)) return 1;
  const int dim = a.dim == 2 && b.dim == 2 ? 2 : 3;
  const int64_t sizes[] = {c.problem.batch, a.rows, b.cols};
  static const char shape[] = "out has the wrong shape, it must be (M, N) or (batch, M, N)";
  int failed = r->out ? as_matrix(r->out, &m) || check_output(&c, &a, &b, dim, sizes, shape, &m)
                      : new_result(&c, a.dtype, dim, sizes, &m, &made);
  if (!failed) {
    set_output(&c, &m);
    failed = set_epilogue(&c);
    if (!failed) merge_rows(&c.problem);
    failed = failed || launch(&c);
  }
  if (!failed && made) *result = made;
  if (failed && made) torch.aoti_torch_delete_tensor_object(made);
  return failed;
}

/* ------------------------------------------------------------------------------------------ grouped products */

static matrix transposed(const matrix *m) {
  matrix found = *m;
  found.rows = m->cols, found.cols = m->rows;
  found.row_stride = m->col_stride, found.col_stride = m->row_stride;
  return found;
}

/* Make a batch one matrix of all rows, if these lie evenly. */
static int as_rows(matrix *m) {
  if (m->rows == 1) m->row_stride = m->z_stride;
  if (m->batch > 1 && m->rows > 0 && !follow(m->z_stride, m->rows, m->row_stride))
    return fail(KIND_VALUE, "the matrices of a, and of out, must follow each other as their rows do");
  m->rows = saturated(m->rows, m->batch), m->batch = 1;
  return 0;
}

/* Set the operands of a grouped product, and what is in groups. Groups of columns of B are those of rows of B^T, whose
   product is C^T; `*turned` tells. Groups of two batches are the first rows of each matrix of A. */
static int set_groups(call *c, matrix *a, matrix *b, int *turned) {
  const request *r = c->request;
  const view *ends = r->offsets;
  if (as_matrix(&r->a, a) || as_matrix(&r->b, b)) return 1;
  if (a->device != b->device || ends->device != a->device) return fail(KIND_VALUE, "a, b and offs are on different devices");
  if (ends->dim != 1) return fail(KIND_VALUE, "offs must have one dimension, the ends of the groups, or rows their numbers");
  if (ends->dtype != AOTMM_INT32) return fail(KIND_TYPE, "offs, or rows, must be int32");
  if (a->cols != b->rows) return fail(KIND_VALUE, "the inner sizes differ: a is (..., M, K), b must be (..., K, N)");
  aotmm_problem *p = &c->problem;
  const int64_t groups = ends->sizes[0];
  *turned = a->dim == 3 && b->dim == 2;
  if (a->dim == 3 && b->dim == 3) {
    if (a->batch != groups) return fail(KIND_VALUE, "offs, or rows, must have one number for each matrix");
    p->group_rows = a->rows;
    if (as_rows(a)) return 1;
  }
  if (*turned) {
    const matrix of_rows = transposed(b);
    *b = transposed(a), *a = of_rows;
  }
  if (b->dim == 3 && b->batch != groups) return fail(KIND_VALUE, "offs, or rows, must have one number for each matrix");
  if (groups > 1 && ends->strides[0] != 1) return fail(KIND_VALUE, "offs, or rows, must be contiguous");
  c->device = a->device;
  p->grouped = b->dim == 3 ? AOTMM_GROUPED_M : AOTMM_GROUPED_K;
  p->offsets_ptr = (int64_t)ends->address, p->batch = groups;
  p->a_ptr = (int64_t)a->address, p->b_ptr = (int64_t)b->address;
  p->M = a->rows, p->N = b->cols, p->K = a->cols;
  p->stride_am = a->row_stride, p->stride_ak = a->col_stride;
  p->stride_bk = b->row_stride, p->stride_bn = b->col_stride, p->stride_bz = b->z_stride;
  p->dtype_a = a->dtype, p->dtype_b = b->dtype;
  p->activation = r->activation, p->slope = (float)r->slope;
  p->allow_tf32 = r->allow_tf32, p->fast_accum = r->fast_accum, p->batch_invariant = r->batch_invariant;
  if (p->grouped == AOTMM_GROUPED_M) p->expected_rows = r->expected_rows;
  return 0;
}

/* Set a bias of N, or one for each group. */
static int set_bias_of_groups(call *c, const view *bias, int turned) {
  aotmm_problem *p = &c->problem;
  if (bias->device != c->device) return fail(KIND_VALUE, "a bias or scale is on another device");
  if (bias->dtype != p->dtype_c) return fail(KIND_TYPE, "bias must have the dtype of the result");
  if (turned || p->grouped != AOTMM_GROUPED_M) return fail(KIND_VALUE, "a bias is for groups of rows of a: b must be a batch");
  const int one = bias->dim == 1 && bias->sizes[0] == p->N;
  if (!one && (bias->dim != 2 || bias->sizes[0] != p->batch || bias->sizes[1] != p->N))
    return fail(KIND_VALUE, "bias must be (N) or (groups, N)");
  const matrix out = {.batch = 1, .rows = p->M, .cols = p->N, .row_stride = p->stride_cm, .col_stride = p->stride_cn,
                      .address = (uint64_t)p->c_ptr, .bytes = bytes_of_dtype[p->dtype_c]};
  const matrix added = {.batch = 1, .rows = one ? 1 : p->batch, .cols = p->N, .row_stride = one ? 0 : bias->strides[0],
                        .col_stride = bias->strides[bias->dim - 1], .address = bias->address, .bytes = out.bytes};
  if (share_memory(&out, &added)) return fail(KIND_VALUE, "out shares memory with bias");
  p->bias_ptr = (int64_t)bias->address;
  p->stride_bias_z = one ? 0 : bias->strides[0], p->stride_bias_n = bias->strides[bias->dim - 1];
  return 0;
}

static int set_scales_of_groups(call *c, int turned) {
  if (c->problem.grouped != AOTMM_GROUPED_M)
    return fail(KIND_VALUE, "scales are for rows of a or columns of b in groups, not for K");
  return set_scales(c, turned);
}

EXPORT int aotmm_torch_multiply_groups(const request *r, tensor_t *result) {
  call c = {.request = r};
  matrix a, b, m;
  tensor_t made = NULL;
  int turned;
  if (set_groups(&c, &a, &b, &turned)) return 1;
  aotmm_problem *p = &c.problem;
  const int batches = r->a.dim == 3 && r->b.dim == 3, dim = p->grouped == AOTMM_GROUPED_M && !batches ? 2 : 3;
  const int64_t sizes[] = {p->batch, batches ? p->group_rows : turned ? p->N : p->M, turned ? p->M : p->N};
  static const char shape[] = "out has the wrong shape, it must be (M, N) or (groups, M, N)";
  int failed = r->out ? as_matrix(r->out, &m) || check_output(&c, &a, &b, dim, sizes, shape, &m)
                      : new_result(&c, a.dtype, dim, sizes, &m, &made);
  if (!failed && batches) failed = as_rows(&m);
  if (!failed) {
    set_output(&c, &m);
    if (p->grouped == AOTMM_GROUPED_M) p->stride_cz = 0;
    if (turned) p->stride_cm = m.col_stride, p->stride_cn = m.row_stride;
    failed = (r->bias && set_bias_of_groups(&c, r->bias, turned)) ||
             ((r->scale_a || r->scale_b) && set_scales_of_groups(&c, turned)) || launch(&c);
  }
  if (!failed && made) *result = made;
  if (failed && made) torch.aoti_torch_delete_tensor_object(made);
  return failed;
}

EXPORT int aotmm_torch_declined(void) {
  return last_error.kind != KIND_LAUNCHER || last_error.error.status == AOTMM_NO_KERNEL;
}

/* ------------------------------------------------------------------------------------------ the dry run */

/* `explain` asks for the first launch of `matmul`. It calls `matmul` of library DRY_RUN, whose launcher records the
   problem and refuses it. Nothing is launched, and products of other libraries pay nothing for it. */
static __thread aotmm_problem recorded;

static int record(const aotmm_problem *problem, int ordinal, uint64_t workspace_limit, aotmm_plan *plan) {
  (void)ordinal, (void)workspace_limit, (void)plan;
  recorded = *problem;
  return AOTMM_DRIVER;
}

static const aotmm_error *refusal(void) {
  static const aotmm_error error = {.status = AOTMM_DRIVER, .text = "a dry run launches nothing"};
  return &error;
}

static const aotmm_launcher dry_run = {.plan = record, .last_error = refusal};

EXPORT const int aotmm_torch_dry_run = DRY_RUN;

/* Return the problem of the calling thread's last product of library DRY_RUN. */
EXPORT const aotmm_problem *aotmm_torch_problem(void) { return &recorded; }

/* ------------------------------------------------------------------------------------------- the ops */

static double as_double(value v) {
  double number;
  memcpy(&number, &v, sizeof number);
  return number;
}

static tensor_t optional_tensor(value v) {
  if (!v) return NULL;
  tensor_t handle = (tensor_t)*(value *)v;
  delete_value((void *)v);
  return handle;
}

/* Read the arguments of the schemas in runtime/ops.py, multiply, and free the arguments; `out` stays the caller's. */
static int multiply_stack(const value *stack, int64_t out_dtype, tensor_t out, tensor_t *result) {
  tensor_t owned[] = {(tensor_t)stack[0], (tensor_t)stack[1], optional_tensor(stack[2]), optional_tensor(stack[3]),
                      optional_tensor(stack[4])};
  view bias, scale_a, scale_b, written;
  request r = {.bias = owned[2] ? &bias : NULL,
               .scale_a = owned[3] ? &scale_a : NULL,
               .scale_b = owned[4] ? &scale_b : NULL,
               .out = out ? &written : NULL,
               .activation = (int64_t)stack[5],
               .slope = as_double(stack[6]),
               .allow_tf32 = (int)(stack[7] & 1),
               .fast_accum = (int)(stack[8] & 1),
               .batch_invariant = (int)(stack[9] & 1),
               .library = (int64_t)stack[10],
               .out_dtype = out_dtype};
  int failed = aotmm_torch_view(owned[0], 0, &r.a) || aotmm_torch_view(owned[1], 0, &r.b) ||
               (r.bias && aotmm_torch_view(owned[2], 0, &bias)) || (r.scale_a && aotmm_torch_view(owned[3], 0, &scale_a)) ||
               (r.scale_b && aotmm_torch_view(owned[4], 0, &scale_b)) || (out && aotmm_torch_view(out, 1, &written)) ||
               aotmm_torch_multiply(&r, result);
  for (int i = 0; i < 5; i++)
    if (owned[i]) torch.aoti_torch_delete_tensor_object(owned[i]);
  return failed;
}

static void raise(void) { torch.aoti_torch_check(0, "aotmm::mm", "aotmm", 0, last_error.error.text); }

/* mm(..., int out_dtype=-1) -> Tensor */
static void op_mm(value *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  tensor_t result = NULL;
  if (multiply_stack(stack, (int64_t)stack[11], NULL, &result)) raise();
  stack[0] = (value)result;
}

/* mm.out(..., *, Tensor(a!) out) -> Tensor(a!) */
static void op_mm_out(value *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  tensor_t out = (tensor_t)stack[11];
  if (multiply_stack(stack, -1, out, NULL)) {
    torch.aoti_torch_delete_tensor_object(out);
    raise();
  }
  stack[0] = (value)out;
}

/* As `multiply_stack`, with the schemas of runtime/grouped.py. */
static int multiply_groups(const value *stack, int64_t out_dtype, tensor_t out, tensor_t *result) {
  enum { TENSORS = 6 };
  tensor_t owned[TENSORS] = {(tensor_t)stack[0],        (tensor_t)stack[1],        (tensor_t)stack[2],
                             optional_tensor(stack[3]), optional_tensor(stack[4]), optional_tensor(stack[5])};
  view offsets, bias, scale_a, scale_b, written;
  request r = {.offsets = &offsets,
               .bias = owned[3] ? &bias : NULL,
               .scale_a = owned[4] ? &scale_a : NULL,
               .scale_b = owned[5] ? &scale_b : NULL,
               .out = out ? &written : NULL,
               .activation = (int64_t)stack[6],
               .slope = as_double(stack[7]),
               .allow_tf32 = (int)(stack[8] & 1),
               .fast_accum = (int)(stack[9] & 1),
               .batch_invariant = (int)(stack[10] & 1),
               .library = (int64_t)stack[11],
               .expected_rows = (int64_t)stack[12],
               .out_dtype = out_dtype};
  const int failed = aotmm_torch_view(owned[0], 0, &r.a) || aotmm_torch_view(owned[1], 0, &r.b) ||
                     aotmm_torch_view(owned[2], 0, &offsets) || (r.bias && aotmm_torch_view(owned[3], 0, &bias)) ||
                     (r.scale_a && aotmm_torch_view(owned[4], 0, &scale_a)) ||
                     (r.scale_b && aotmm_torch_view(owned[5], 0, &scale_b)) || (out && aotmm_torch_view(out, 1, &written)) ||
                     aotmm_torch_multiply_groups(&r, result);
  for (int i = 0; i < TENSORS; i++)
    if (owned[i]) torch.aoti_torch_delete_tensor_object(owned[i]);
  return failed;
}

/* grouped_mm(..., int out_dtype=-1) -> Tensor */
static void op_grouped_mm(value *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  tensor_t result = NULL;
  if (multiply_groups(stack, (int64_t)stack[13], NULL, &result)) raise();
  stack[0] = (value)result;
}

/* grouped_mm.out(..., *, Tensor(a!) out) -> Tensor(a!) */
static void op_grouped_mm_out(value *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  tensor_t out = (tensor_t)stack[13];
  if (multiply_groups(stack, -1, out, NULL)) {
    torch.aoti_torch_delete_tensor_object(out);
    raise();
  }
  stack[0] = (value)out;
}

/* ---------------------------------------------------------------------------------------------- setup */

/* Look up torch's functions with `find`, which returns NULL for a missing one. Register the kernels of the ops for
   every device, so that a wrong device is an error of ours too. To be called once. Return NULL, or the function that
   torch lacks or the registration that it refused. */
EXPORT const char *aotmm_torch_connect(void *(*find)(const char *), int (*resolve)(int, int)) {
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = find(symbols[i].name);
    if (!found) return symbols[i].name;
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  void *stream = find("aoti_torch_get_current_cuda_stream");
  memcpy(&current_stream, &stream, sizeof stream);
  cuda_type = torch.aoti_torch_device_type_cuda();
  memset(torch_dtypes, 0xff, sizeof torch_dtypes); /* -1: no such type in torch */
  torch_dtypes[AOTMM_FP16] = torch.aoti_torch_dtype_float16();
  torch_dtypes[AOTMM_BF16] = torch.aoti_torch_dtype_bfloat16();
  torch_dtypes[AOTMM_FP32] = torch.aoti_torch_dtype_float32();
  torch_dtypes[AOTMM_FP8E5] = torch.aoti_torch_dtype_float8_e5m2();
  torch_dtypes[AOTMM_FP8E4] = torch.aoti_torch_dtype_float8_e4m3fn();
  torch_dtypes[AOTMM_INT8] = torch.aoti_torch_dtype_int8();
  torch_dtypes[AOTMM_INT32] = torch.aoti_torch_dtype_int32();
  /* C++'s new made the holder of an optional argument; torch exports the matching delete from 2.13 on. */
  void *free_value = find("torch_delete_stable_ivalue");
  if (!free_value) free_value = find("_ZdlPv");
  if (!free_value) return "operator delete";
  memcpy(&delete_value, &free_value, sizeof free_value);
  resolver = resolve;
  for (int device = 0; device < MAX_DEVICES; device++) launchers[DRY_RUN][device][0] = &dry_run;
  void *kernels;
  if (torch.aoti_torch_library_init_impl("aotmm", "CompositeExplicitAutograd", "aotmm", 0, &kernels) ||
      torch.torch_library_impl(kernels, "mm", op_mm, TORCH_2_10) ||
      torch.torch_library_impl(kernels, "mm.out", op_mm_out, TORCH_2_10) ||
      torch.torch_library_impl(kernels, "grouped_mm", op_grouped_mm, TORCH_2_10) ||
      torch.torch_library_impl(kernels, "grouped_mm.out", op_grouped_mm_out, TORCH_2_10))
    return "the implementation of torch.ops.aotmm";
  return NULL;
}
