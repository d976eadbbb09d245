/* Registers torch.ops.aotmm.* through LibTorch's stable C interface and sends products to launchers.
 *
 * No torch header and no link to torch: the functions are looked up at run time, so one binary serves every torch from
 * 2.10 on, CUDA and ROCm, and every Python. Source: torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h.
 *
 * A boxed kernel gets its arguments on `stack` and owns the tensor handles there. Errors are recorded for Python
 * (aotmm_torch_last_error), then raised by aoti_torch_check, whose C++ exception passes through these frames. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "launcher.h"

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t value;      /* StableIValue */
typedef struct tensor *tensor_t; /* AtenTensorHandle */

enum { MAX_LIBRARIES = 256, MAX_DEVICES = 32, DTYPES = sizeof((int[])AOTMM_DEFAULT_OUTPUTS) / sizeof(int) };
#define TORCH_2_10 (2ull << 56 | 10ull << 48) /* the version whose calling conventions are used */

/* Found in libtorch_cpu, but for the stream. Each returns 0 or an error. */
static struct {
  int (*aoti_torch_get_dim)(tensor_t, int64_t *);
  int (*aoti_torch_get_sizes)(tensor_t, int64_t **);
  int (*aoti_torch_get_strides)(tensor_t, int64_t **);
  int (*aoti_torch_get_dtype)(tensor_t, int32_t *);
  int (*aoti_torch_get_device_type)(tensor_t, int32_t *);
  int (*aoti_torch_get_device_index)(tensor_t, int32_t *);
  int (*torch_get_const_data_ptr)(tensor_t, const void **);
  int (*torch_get_mutable_data_ptr)(tensor_t, void **);
  int (*aoti_torch_empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor_t *);
  int (*aoti_torch_delete_tensor_object)(tensor_t);
  int (*aoti_torch_library_init_def)(const char *, const char *, uint32_t, void **);
  int (*aoti_torch_library_init_impl)(const char *, const char *, const char *, uint32_t, void **);
  int (*aoti_torch_library_def)(void *, const char *);
  int (*torch_library_impl)(void *, const char *, void (*)(value *, uint64_t, uint64_t), uint64_t);
  void (*aoti_torch_check)(_Bool, const char *, const char *, uint32_t, const char *);
  int32_t (*aoti_torch_device_type_cuda)(void);
  int32_t (*aoti_torch_dtype_float16)(void);
  int32_t (*aoti_torch_dtype_bfloat16)(void);
  int32_t (*aoti_torch_dtype_float32)(void);
  int32_t (*aoti_torch_dtype_float8_e5m2)(void);
  int32_t (*aoti_torch_dtype_float8_e4m3fn)(void);
} torch;
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
    SYMBOL(aoti_torch_library_init_def),
    SYMBOL(aoti_torch_library_init_impl),
    SYMBOL(aoti_torch_library_def),
    SYMBOL(torch_library_impl),
    SYMBOL(aoti_torch_check),
    SYMBOL(aoti_torch_device_type_cuda),
    SYMBOL(aoti_torch_dtype_float16),
    SYMBOL(aoti_torch_dtype_bfloat16),
    SYMBOL(aoti_torch_dtype_float32),
    SYMBOL(aoti_torch_dtype_float8_e5m2),
    SYMBOL(aoti_torch_dtype_float8_e4m3fn),
};

/* What went wrong in the calling thread's last op. */
enum { KIND_TYPE = 1, KIND_VALUE = 2, KIND_LAUNCHER = 3, KIND_RESOLVER = 4, KIND_TORCH = 5 };
typedef struct torch_error {
  int32_t kind;
  aotmm_error error;
} torch_error;
static __thread torch_error last_error;

static int32_t torch_dtypes[DTYPES], cuda_type;
static const int default_outputs[DTYPES] = AOTMM_DEFAULT_OUTPUTS;
static int (*resolver)(int library, int device);
static const aotmm_launcher *launchers[MAX_LIBRARIES][MAX_DEVICES];

EXPORT const char aotmm_torch_key[] = AOTMM_KEY; /* digest of what this library was built from */

EXPORT const torch_error *aotmm_torch_last_error(void) { return &last_error; }

/* The launcher that products of library number `library` on device `device` go to. */
EXPORT int aotmm_torch_bind(int library, int device, const aotmm_launcher *launcher) {
  if (library < 0 || library >= MAX_LIBRARIES || device < 0 || device >= MAX_DEVICES) return AOTMM_INVALID;
  __atomic_store_n(&launchers[library][device], launcher, __ATOMIC_RELEASE);
  return AOTMM_OK;
}

static int fail(int kind, const char *text) {
  last_error.kind = kind;
  memset(&last_error.error, 0, sizeof last_error.error);
  snprintf(last_error.error.text, sizeof last_error.error.text, "%s", text);
  return 1;
}

/* ------------------------------------------------------------------------------------------- operands */

typedef struct matrix {
  int64_t rows, cols, row_stride, col_stride;
  uint64_t address;
  int32_t dtype, device, bytes; /* AOTMM_*, ordinal, of one element */
} matrix;

static const int32_t element_bytes[DTYPES] = AOTMM_ELEMENT_BYTES;

static int read_matrix(tensor_t handle, int writable, matrix *m) {
  int64_t dim, *sizes, *strides;
  int32_t type, dtype;
  if (torch.aoti_torch_get_dim(handle, &dim) || torch.aoti_torch_get_device_type(handle, &type))
    return fail(KIND_TORCH, "torch cannot describe an operand");
  if (type != cuda_type) return fail(KIND_TYPE, "aotmm multiplies CUDA and ROCm tensors");
  if (dim != 2) return fail(KIND_VALUE, "aotmm multiplies matrices: every tensor must have 2 dimensions");
  const void *input = NULL;
  void *output = NULL;
  if (torch.aoti_torch_get_sizes(handle, &sizes) || torch.aoti_torch_get_strides(handle, &strides) ||
      torch.aoti_torch_get_dtype(handle, &dtype) || torch.aoti_torch_get_device_index(handle, &m->device) ||
      (writable ? torch.torch_get_mutable_data_ptr(handle, &output) : torch.torch_get_const_data_ptr(handle, &input)))
    return fail(KIND_TORCH, "torch cannot describe an operand");
  for (m->dtype = 0; m->dtype < DTYPES && torch_dtypes[m->dtype] != dtype; m->dtype++) {}
  if (m->dtype == DTYPES) return fail(KIND_TYPE, "aotmm has no kernels for this dtype");
  m->bytes = element_bytes[m->dtype];
  m->rows = sizes[0], m->cols = sizes[1], m->row_stride = strides[0], m->col_stride = strides[1];
  m->address = (uint64_t)(writable ? output : input);
  return 0;
}

/* Do two elements of the matrix share memory? True also for some exotic strides where none do. */
static int overlaps_itself(const matrix *m) {
  int rows_inner = m->rows > 1 && (m->cols <= 1 || m->row_stride < m->col_stride);
  int64_t inner = rows_inner ? m->row_stride : m->col_stride, inner_size = rows_inner ? m->rows : m->cols;
  int64_t outer = rows_inner ? m->col_stride : m->row_stride, outer_size = rows_inner ? m->cols : m->rows;
  return (inner_size > 1 && inner < 1) || (outer_size > 1 && outer < (inner_size - 1) * inner + 1);
}

/* Do two matrices share memory? Side by side in the same rows (or columns) they do not, although their address ranges
   do; other interleaved views count as sharing. */
static int share_memory(const matrix *x, const matrix *y) {
  if (!x->rows || !x->cols || !y->rows || !y->cols) return 0;
  uint64_t x_bytes = (uint64_t)((x->rows - 1) * x->row_stride + (x->cols - 1) * x->col_stride + 1) * x->bytes;
  uint64_t y_bytes = (uint64_t)((y->rows - 1) * y->row_stride + (y->cols - 1) * y->col_stride + 1) * y->bytes;
  if (x->address + x_bytes <= y->address || y->address + y_bytes <= x->address) return 0;
  int across = x->row_stride >= x->col_stride;
  uint64_t pitch = (uint64_t)(across ? x->row_stride : x->col_stride) * x->bytes;
  if (pitch == 0 || pitch != (uint64_t)(across ? y->row_stride : y->col_stride) * y->bytes) return 1;
  uint64_t x_width = (uint64_t)(across ? (x->cols - 1) * x->col_stride : (x->rows - 1) * x->row_stride) * x->bytes +
                     (uint64_t)x->bytes;
  uint64_t y_width = (uint64_t)(across ? (y->cols - 1) * y->col_stride : (y->rows - 1) * y->row_stride) * y->bytes +
                     (uint64_t)y->bytes;
  uint64_t x_start = x->address % pitch, y_start = y->address % pitch;
  uint64_t distance = (y_start + pitch - x_start) % pitch; /* from x's window forward to y's */
  return distance < x_width || pitch - distance < y_width;
}

static int check_operands(const matrix *a, const matrix *b) {
  if (a->device != b->device) return fail(KIND_VALUE, "the operands are on different devices");
  if (a->dtype != b->dtype) return fail(KIND_TYPE, "the operands have different dtypes");
  if (a->cols != b->rows) return fail(KIND_VALUE, "the inner sizes differ: a is (M, K), b must be (K, N)");
  return 0;
}

static int check_output(const matrix *a, const matrix *b, const matrix *c) {
  if (c->device != a->device) return fail(KIND_VALUE, "out is on another device than the operands");
  if (c->rows != a->rows || c->cols != b->cols) return fail(KIND_VALUE, "out has the wrong shape, it must be (M, N)");
  if (overlaps_itself(c)) return fail(KIND_VALUE, "elements of out share memory");
  if (share_memory(c, a) || share_memory(c, b)) return fail(KIND_VALUE, "out shares memory with an operand");
  return 0;
}

/* --------------------------------------------------------------------------------------------- launch */

static int multiply(const matrix *a, const matrix *b, const matrix *c, int64_t activation, int allow_tf32,
                    int64_t library) {
  if (library < 0 || library >= MAX_LIBRARIES || a->device < 0 || a->device >= MAX_DEVICES)
    return fail(KIND_VALUE, "no such library, or more devices than aotmm can number");
  const aotmm_launcher **slot = &launchers[library][a->device];
  const aotmm_launcher *launcher = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (!launcher) {
    if (!resolver || resolver((int)library, a->device))
      return fail(KIND_RESOLVER, "no pack of aotmm serves this device");
    launcher = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  }
  void *stream = NULL;
  if (current_stream && current_stream(a->device, &stream))
    return fail(KIND_TORCH, "torch does not tell its current stream");
  aotmm_problem problem = {
      .a_ptr = (int64_t)a->address, .b_ptr = (int64_t)b->address, .c_ptr = (int64_t)c->address,
      .M = a->rows, .N = b->cols, .K = a->cols,
      .stride_am = a->row_stride, .stride_ak = a->col_stride,
      .stride_bk = b->row_stride, .stride_bn = b->col_stride,
      .stride_cm = c->row_stride, .stride_cn = c->col_stride,
      .allow_tf32 = allow_tf32,
      .dtype_a = a->dtype, .dtype_b = b->dtype, .dtype_c = c->dtype,
      .activation = (int32_t)activation,
  };
  if (launcher->matmul(&problem, a->device, stream) == AOTMM_OK) return 0;
  last_error.kind = KIND_LAUNCHER;
  last_error.error = *launcher->last_error();
  return 1;
}

static void raise(void) { torch.aoti_torch_check(0, "aotmm::mm", "aotmm", 0, last_error.error.text); }

/* mm(Tensor a, Tensor b, int activation, int out_dtype, bool allow_tf32, int library) -> Tensor */
static void op_mm(value *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  tensor_t a_handle = (tensor_t)stack[0], b_handle = (tensor_t)stack[1], c_handle = NULL;
  int64_t activation = (int64_t)stack[2], output = (int64_t)stack[3], library = (int64_t)stack[5];
  int allow_tf32 = (int)(stack[4] & 1);
  matrix a, b;
  int failed = read_matrix(a_handle, 0, &a) || read_matrix(b_handle, 0, &b) || check_operands(&a, &b);
  if (!failed && (output < -1 || output >= DTYPES)) failed = fail(KIND_TYPE, "aotmm cannot write this dtype");
  if (!failed) {
    matrix c = {.rows = a.rows, .cols = b.cols, .row_stride = b.cols, .col_stride = 1, .device = a.device};
    int64_t sizes[2] = {c.rows, c.cols}, strides[2] = {c.cols > 0 ? c.cols : 1, 1};
    void *address = NULL;
    c.dtype = output < 0 ? default_outputs[a.dtype] : (int32_t)output;
    if (torch.aoti_torch_empty_strided(2, sizes, strides, torch_dtypes[c.dtype], cuda_type, a.device, &c_handle) ||
        torch.torch_get_mutable_data_ptr(c_handle, &address)) {
      failed = fail(KIND_TORCH, "torch cannot allocate the result");
    } else {
      c.address = (uint64_t)address;
      failed = multiply(&a, &b, &c, activation, allow_tf32, library);
    }
  }
  torch.aoti_torch_delete_tensor_object(a_handle);
  torch.aoti_torch_delete_tensor_object(b_handle);
  if (failed && c_handle) torch.aoti_torch_delete_tensor_object(c_handle);
  if (failed) raise();
  stack[0] = (value)c_handle;
}

/* mm.out(Tensor a, Tensor b, int activation, bool allow_tf32, int library, *, Tensor(a!) out) -> Tensor(a!) */
static void op_mm_out(value *stack, uint64_t arguments, uint64_t results) {
  (void)arguments, (void)results;
  tensor_t a_handle = (tensor_t)stack[0], b_handle = (tensor_t)stack[1], c_handle = (tensor_t)stack[5];
  int64_t activation = (int64_t)stack[2], library = (int64_t)stack[4];
  int allow_tf32 = (int)(stack[3] & 1);
  matrix a, b, c;
  int failed = read_matrix(a_handle, 0, &a) || read_matrix(b_handle, 0, &b) || read_matrix(c_handle, 1, &c) ||
               check_operands(&a, &b) || check_output(&a, &b, &c) ||
               multiply(&a, &b, &c, activation, allow_tf32, library);
  torch.aoti_torch_delete_tensor_object(a_handle);
  torch.aoti_torch_delete_tensor_object(b_handle);
  if (failed) {
    torch.aoti_torch_delete_tensor_object(c_handle);
    raise();
  }
  stack[0] = (value)c_handle;
}

/* ---------------------------------------------------------------------------------------------- setup */

/* Looks up torch's functions in the handles of libtorch_cpu and libtorch_cuda or libtorch_hip (NULL without GPU
   support), and registers the ops for every device, so that a wrong device is answered here too. To be called once.
   Returns NULL, or what torch lacks or refused. */
EXPORT const char *aotmm_torch_init(void *cpu, void *gpu, int (*resolve)(int, int)) {
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(cpu, symbols[i].name);
    if (!found) return symbols[i].name;
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  void *found = gpu ? dlsym(gpu, "aoti_torch_get_current_cuda_stream") : NULL;
  if (gpu && !found) return "aoti_torch_get_current_cuda_stream";
  memcpy(&current_stream, &found, sizeof found);
  cuda_type = torch.aoti_torch_device_type_cuda();
  memset(torch_dtypes, 0xff, sizeof torch_dtypes); /* -1: no such type in torch */
  torch_dtypes[AOTMM_FP16] = torch.aoti_torch_dtype_float16();
  torch_dtypes[AOTMM_BF16] = torch.aoti_torch_dtype_bfloat16();
  torch_dtypes[AOTMM_FP32] = torch.aoti_torch_dtype_float32();
  torch_dtypes[AOTMM_FP8E5] = torch.aoti_torch_dtype_float8_e5m2();
  torch_dtypes[AOTMM_FP8E4] = torch.aoti_torch_dtype_float8_e4m3fn();
  resolver = resolve;
  void *schemas, *kernels;
  if (torch.aoti_torch_library_init_def("aotmm", "aotmm", 0, &schemas) ||
      torch.aoti_torch_library_def(schemas, "mm(Tensor a, Tensor b, int activation=0, int out_dtype=-1, "
                                            "bool allow_tf32=False, int library=0) -> Tensor") ||
      torch.aoti_torch_library_def(schemas, "mm.out(Tensor a, Tensor b, int activation=0, bool allow_tf32=False, "
                                            "int library=0, *, Tensor(a!) out) -> Tensor(a!)"))
    return "the definition of torch.ops.aotmm (is another copy of aotmm loaded in this process?)";
  if (torch.aoti_torch_library_init_impl("aotmm", "CompositeExplicitAutograd", "aotmm", 0, &kernels) ||
      torch.torch_library_impl(kernels, "mm", op_mm, TORCH_2_10) ||
      torch.torch_library_impl(kernels, "mm.out", op_mm_out, TORCH_2_10))
    return "the implementation of torch.ops.aotmm";
  return NULL;
}
