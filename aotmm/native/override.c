/* aotmm.override(): aten::mm, bmm and _int_mm for GPUs, below autograd, autocast and vmap, which stay torch's own.
 *
 * Products that our kernels do not take go to torch's, through the functions that AOTInductor's programs call. These
 * reach the kernel itself, not the dispatcher, so nothing recurses. They turn exceptions into a status, and before
 * torch 2.13 log them. So a Python kernel repeats the products that they refuse, and before 2.13 computes those that
 * torch might refuse.
 * runtime/override.py registers it for a dispatch key of our own. It calls torch's kernel, and exceptions pass.
 *
 * addmm and baddbmm have arguments that the stable interface does not carry (Scalar). direct_call.c has their kernels, and
 * runtime/override.py those of their other forms and of _scaled_mm. */
#include <string.h>

#include "torch_ops.h"

/* at::Tensor as C++ returns it: at an address of the caller, as C returns a struct of more than two words. */
typedef struct returned {
  void *tensor, *unused[2];
} returned;

/* torch's own products. `find` knows them by these names. */
enum { MM, BMM, INT_MM, KINDS };
typedef struct torchs_own {
  int (*into)(tensor_t out, tensor_t, tensor_t);
  /* at::_ops::mm::redispatch(c10::DispatchKeySet, at::Tensor const &, at::Tensor const &), likewise the others */
  returned (*dispatch)(uint64_t keys, tensor_t, tensor_t);
  void *(*dispatch_out)(uint64_t keys, tensor_t, tensor_t, tensor_t out);
} torchs_own;
static struct {
  torchs_own kinds[KINDS];
  int (*new_tensor)(tensor_t *); /* an undefined one */
  int (*add_into[INT_MM])(tensor_t out, tensor_t bias, tensor_t, tensor_t, double beta, double alpha);
} own;
#define REDISPATCH "10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_"
static const char *const names[] = {
    "aoti_torch_cuda_mm_out",
    "_ZN2at4_ops2mm" REDISPATCH,
    "_ZN2at4_ops6mm_out" REDISPATCH "RS4_",
    "aoti_torch_cuda_bmm_out",
    "_ZN2at4_ops3bmm" REDISPATCH,
    "_ZN2at4_ops7bmm_out" REDISPATCH "RS4_",
    "aoti_torch_cuda__int_mm_out",
    "_ZN2at4_ops7_int_mm" REDISPATCH,
    "_ZN2at4_ops11_int_mm_out" REDISPATCH "RS4_",
    "aoti_torch_new_uninitialized_tensor",
    "aoti_torch_cuda_addmm_out",
    "aoti_torch_cuda_baddbmm_out",
};
enum { NAMES = sizeof names / sizeof *names };
static const int dims[] = {2, 3, 2};
#define TOO_MANY (1ll << 40) /* elements of a result for any GPU */

/* Tensors that the Python kernel's product owns. C cannot free them when an exception passes, so that kernel does. */
static __thread struct handed {
  tensor_t tensors[3];
  struct handed *outer;
} *handed;

static uint64_t python_keys; /* the DispatchKeySet of Python's kernels */
static int silent; /* torch's C functions log nothing, from 2.13 on */
static int (*tf32_allowed)(void);
static int64_t library;
static int batch_invariant;
static uint32_t unsupported; /* GPUs for which there is no pack, a bit for each */
static void *registration; /* torch's handle, NULL where nothing is registered */

/* Products since the outermost override began, by their fate: that of the numbers in runtime/override.py. */
enum { OURS, OTHER_TYPE, FULL_PRECISION, NO_PACK, DECLINED, COPIED, FATES };
static uint64_t counts[FATES];

/* Return whether a product of this fate is left to torch for its speed. torch does not refuse it, but for its bias. */
static int is_faster_by_torch(int fate) { return fate == FULL_PRECISION || fate == COPIED; }

/* Count a product, and return its fate. */
EXPORT int aotmm_torch_count(int fate) {
  __atomic_fetch_add(&counts[fate], 1, __ATOMIC_RELAXED);
  return fate;
}

EXPORT const uint64_t *aotmm_torch_counts(void) { return counts; }

enum { VECTOR_BYTES = 16, LEAST_K = 32, LEAST = 8, LEAST_IN_BATCH = 32 /* rows, and columns */ };

/* Bytes of a batch that are copied, from which memory and not the L2 cache has them, and the multiply-adds for each up to which the
   copies take longest. */
enum { IN_MEMORY = 32 << 20, FEW_FOR_EACH_BYTE = 64 };

static int64_t bytes_of_element(const view *v) { return v->dtype == AOTMM_FP32 ? 4 : 2; }

/* Return whether rows of a matrix are whole vectors, as tensor maps need them, or columns unless it is `by_rows_alone`. */
static int has_whole_vectors(const view *v, int by_rows_alone) {
  const int64_t *sizes = v->sizes + v->dim - 2, *strides = v->strides + v->dim - 2, vector = VECTOR_BYTES / bytes_of_element(v);
  const int whole[] = {sizes[0] == 1 || (strides[0] > 0 && strides[0] % vector == 0),
                       sizes[1] == 1 || (strides[1] > 0 && strides[1] % vector == 0)};
  const int by_rows = (strides[1] == 1 || sizes[1] == 1) && whole[0], by_columns = (strides[0] == 1 || sizes[0] == 1) && whole[1];
  return v->address % VECTOR_BYTES == 0 && (by_rows || (by_columns && !by_rows_alone)) &&
         (v->dim == 2 || v->sizes[0] == 1 || v->strides[0] % vector == 0);
}

/* Return the bytes of an operand of a batch that a plan for tensor maps copies. */
static int64_t copied_bytes(const view *v) {
  const int64_t matrices = v->strides[0] ? v->sizes[0] : 1;
  return has_whole_vectors(v, 0) ? 0 : saturated(saturated(matrices, v->sizes[1]), v->sizes[2]) * bytes_of_element(v);
}

/* Return whether copies take most of the time of a batch of 16 bits or tf32, which torch multiplies as it lies (docs/torch.md). Of
   tf32 the result is copied, too. */
static int is_mostly_copied(const request *r) {
  const int64_t sums = saturated(r->a.sizes[0], saturated(r->a.sizes[1], r->b.sizes[2]));
  const int of_result = r->a.dtype == AOTMM_FP32 && r->b.sizes[2] % (VECTOR_BYTES / 4);
  const int64_t bytes = copied_bytes(&r->a) + copied_bytes(&r->b) + (of_result ? 4 * sums : 0);
  return bytes > IN_MEMORY && saturated(sums, r->a.sizes[2]) / FEW_FOR_EACH_BYTE < bytes;
}

static void set_unsupported(int device) {
  if (device < 32) __atomic_fetch_or(&unsupported, 1u << device, __ATOMIC_RELAXED);
}

/* Return whether fp32 in full precision is ours: faster than torch's where tensor cores multiply it, nothing has to be copied,
   no matrix is added, and there are enough rows, columns and products (docs/torch.md). */
static int is_fast(const request *r, int dim) {
  const int64_t M = r->a.sizes[dim - 2], N = r->b.sizes[dim - 1], K = r->a.sizes[dim - 1], least = dim == 2 ? LEAST : LEAST_IN_BATCH;
  const view *out = r->out, *bias = r->bias;
  if (M < least || N < least || K < LEAST_K || N % (VECTOR_BYTES / 4) || !has_whole_vectors(&r->a, 0) || !has_whole_vectors(&r->b, 0) ||
      (out && (out->dim != dim || !has_whole_vectors(out, 1))) || (bias && bias->dim > 1 && bias->sizes[bias->dim - 2] > 1))
    return 0;
  const int split = aotmm_torch_splits_fp32(r->library, r->a.device);
  if (split < 0) set_unsupported(r->a.device);
  return split > 0;
}

/* Return what to do with a product: torch's are of matrices of one type, and torch.bmm's of as many on both sides. */
static int fate_of(const request *r, int kind) {
  const view *a = &r->a, *b = &r->b;
  const int dim = dims[kind], wanted = kind == INT_MM ? AOTMM_INT32 : a->dtype;
  const int known = kind == INT_MM ? a->dtype == AOTMM_INT8
                                   : a->dtype == AOTMM_FP16 || a->dtype == AOTMM_BF16 || a->dtype == AOTMM_FP32;
  if (!known || a->dtype != b->dtype) return OTHER_TYPE;
  const int fits = a->device >= 0 && a->device == b->device && a->dim == dim && b->dim == dim &&
                   (dim == 2 || a->sizes[0] == b->sizes[0]) && a->sizes[dim - 1] == b->sizes[dim - 2] &&
                   (!r->out || r->out->dtype == wanted) &&
                   (!r->bias || (r->bias->dtype == a->dtype && r->bias->dim <= dim));
  if (!fits) return DECLINED;
  const int64_t elements = saturated(saturated(a->sizes[dim - 2], b->sizes[dim - 1]), dim == 2 ? 1 : a->sizes[0]);
  if (elements >= TOO_MANY) return DECLINED;
  const int lacking = a->device < 32 && unsupported >> a->device & 1;
  if (a->dtype == AOTMM_FP32 && !r->allow_tf32 && !r->batch_invariant && (lacking || !is_fast(r, dim))) return FULL_PRECISION;
  if (lacking) return NO_PACK;
  return kind == BMM && !r->batch_invariant && is_mostly_copied(r) ? COPIED : OURS;
}

/* Return the product's fate. If it is not ours, `*wrong` is the driver's failure, or NULL: then torch computes it. */
static int computed(request *r, int kind, tensor_t *result, const char **wrong) {
  r->library = library, r->out_dtype = -1, r->batch_invariant = batch_invariant;
  r->allow_tf32 = r->a.dtype == AOTMM_FP32 && tf32_allowed();
  int fate = fate_of(r, kind);
  if (fate != OURS) return aotmm_torch_count(fate);
  if (aotmm_torch_multiply(r, result) == 0) return aotmm_torch_count(OURS);
  fate = DECLINED;
  if (aotmm_torch_last_error()->kind == KIND_RESOLVER) {
    set_unsupported(r->a.device);
    fate = NO_PACK;
  }
  if (aotmm_torch_declined()) return aotmm_torch_count(fate);
  *wrong = aotmm_torch_last_error()->error.text;
  return fate; /* nobody computes it */
}

static int computed_of(tensor_t a, tensor_t b, tensor_t out, int kind, tensor_t *result, const char **wrong) {
  view written;
  request r = {.out = out ? &written : NULL};
  if (aotmm_torch_view(a, 0, &r.a) || aotmm_torch_view(b, 0, &r.b) || (out && aotmm_torch_view(out, 1, &written)))
    return aotmm_torch_count(DECLINED);
  return computed(&r, kind, result, wrong);
}

/* Make an empty tensor for torch's own kernel to write to, of the result's size if the operands have one; else that
   kernel reports the fault of the operands. */
static int empty_result(tensor_t a, tensor_t b, int kind, tensor_t *result) {
  int64_t ranks[2], *sizes[2], shape[3] = {0}, strides[3] = {1, 1, 1};
  int32_t dtype, type, device;
  const int dim = dims[kind];
  if (torch.aoti_torch_get_dim(a, &ranks[0]) || torch.aoti_torch_get_dim(b, &ranks[1]) ||
      torch.aoti_torch_get_sizes(a, &sizes[0]) || torch.aoti_torch_get_sizes(b, &sizes[1]) ||
      torch.aoti_torch_get_dtype(a, &dtype) || torch.aoti_torch_get_device_type(a, &type) ||
      torch.aoti_torch_get_device_index(a, &device))
    return 1;
  if (kind == INT_MM) dtype = torch.aoti_torch_dtype_int32();
  if (ranks[0] == dim && ranks[1] == dim) {
    memcpy(shape, sizes[0], (size_t)(dim - 1) * sizeof *shape);
    shape[dim - 1] = sizes[1][dim - 1];
    for (int i = dim - 2; i >= 0; i--) strides[i] = strides[i + 1] * (shape[i + 1] > 0 ? shape[i + 1] : 1);
  }
  return torch.aoti_torch_empty_strided(dim, shape, strides, dtype, type, device, result);
}

/* Compute bias + a @ b, of these views, by torch's own kernel. Return 0, or 1 if the bias does not fit or torch fails. */
static int torchs_sum(const tensor_t operands[3], const request *r, int kind, tensor_t *result) {
  const view *bias = r->bias;
  const int dim = dims[kind];
  const int64_t shape[3] = {r->a.sizes[0], r->a.sizes[dim - 2], r->b.sizes[dim - 1]}; /* of a matrix the last two */
  if (bias->device != r->a.device) return 1;
  for (int i = 1; i <= bias->dim; i++)
    if (bias->sizes[bias->dim - i] != 1 && bias->sizes[bias->dim - i] != shape[3 - i]) return 1;
  if (empty_result(operands[1], operands[2], kind, result)) return 1;
  if (!own.add_into[kind](*result, operands[0], operands[1], operands[2], 1, 1)) return 0;
  torch.aoti_torch_delete_tensor_object(*result);
  *result = NULL;
  return 1;
}

/* Compute bias + a @ b of so many dimensions, into `out` if there is one: by our kernels, or without `out` by torch's, if those are
   faster. Return whether it did, and `*wrong` as above. `operands` has the tensors of the views bias, a and b. */
EXPORT int aotmm_torch_add_product(const tensor_t operands[3], const view *bias, const view *a, const view *b,
                                   const view *out, int dim, tensor_t *result, const char **wrong) {
  request r = {.a = *a, .b = *b, .out = out, .bias = bias};
  const int kind = dim == 2 ? MM : BMM, fate = computed(&r, kind, result, wrong);
  return fate == OURS || (is_faster_by_torch(fate) && !out && !torchs_sum(operands, &r, kind, result));
}

/* Compute the product by torch's own kernel. Return 0, or 1 if it failed, or would log a failure. */
static int torchs(tensor_t a, tensor_t b, tensor_t out, int kind, int fate, tensor_t *result) {
  if ((!silent && (!is_faster_by_torch(fate) || out)) || (!out && empty_result(a, b, kind, result))) return 1;
  int failed = own.kinds[kind].into(*result, a, b);
  if (failed && !out) {
    torch.aoti_torch_delete_tensor_object(*result);
    *result = NULL;
  }
  return failed;
}

/* Compute the same from Python, so that exceptions pass. Return the failure before that, or NULL. */
static const char *pythons(tensor_t a, tensor_t b, tensor_t out, int kind, tensor_t *result) {
  if (!out && own.new_tensor(result)) return "torch has no memory for a tensor";
  struct handed mine = {{a, b, *result}, handed};
  handed = &mine;
  if (out) {
    own.kinds[kind].dispatch_out(python_keys, a, b, out);
  } else {
    returned made = own.kinds[kind].dispatch(python_keys, a, b);
    memcpy(*result, &made.tensor, sizeof made.tensor); /* an undefined tensor needs no free */
  }
  handed = mine.outer;
  return NULL;
}

/* Free the tensors of the product that Python's kernel failed to compute, before it raises. */
EXPORT void aotmm_torch_give_back(void) {
  for (int i = 0; i < 3; i++) torch.aoti_torch_delete_tensor_object(handed->tensors[i]);
  handed = handed->outer;
}

/* (self, mat2) or (self, mat2, out) on the stack -> the result. */
static void multiply(value *stack, int kind, int into_out) {
  tensor_t a = (tensor_t)stack[0], b = (tensor_t)stack[1], out = into_out ? (tensor_t)stack[2] : NULL, result = out;
  const char *wrong = NULL;
  const int fate = computed_of(a, b, out, kind, &result, &wrong);
  if (fate != OURS && !wrong && torchs(a, b, out, kind, fate, &result)) wrong = pythons(a, b, out, kind, &result);
  torch.aoti_torch_delete_tensor_object(a);
  torch.aoti_torch_delete_tensor_object(b);
  if (wrong) {
    if (out) torch.aoti_torch_delete_tensor_object(out);
    torch.aoti_torch_check(0, "aotmm::override", "aotmm", 0, wrong);
  }
  stack[0] = (value)result;
}

#define OVERRIDE(name, kind, into_out)                                       \
  static void name(value *stack, uint64_t arguments, uint64_t results) {     \
    (void)arguments, (void)results;                                          \
    multiply(stack, kind, into_out);                                         \
  }
OVERRIDE(mm, MM, 0)
OVERRIDE(mm_out, MM, 1)
OVERRIDE(bmm, BMM, 0)
OVERRIDE(bmm_out, BMM, 1)
OVERRIDE(int_mm, INT_MM, 0)
OVERRIDE(int_mm_out, INT_MM, 1)

/* Undo aotmm_torch_override. Return NULL, or the step that torch refused. */
EXPORT const char *aotmm_torch_restore(void) {
  if (registration && torch.aoti_torch_delete_library_object(registration))
    return "the removal of the kernels of aten::mm, bmm and _int_mm";
  registration = NULL;
  return NULL;
}

/* Send torch's products of dispatch key `key` to library number `to`, `invariant` ones if that is not 0. `find` is that of aotmm_torch_connect, `tf32`
   returns torch's setting, `keys` is the DispatchKeySet of Python's kernels. Return NULL, or the function that torch
   lacks or the step that it refused. */
EXPORT const char *aotmm_torch_override(const char *key, int to, int invariant, void *(*find)(const char *), int (*tf32)(void),
                                        uint64_t keys) {
  void *found[NAMES];
  for (int i = 0; i < NAMES; i++)
    if (!(found[i] = find(names[i]))) return names[i];
  memcpy(&own, found, sizeof own);
  silent = find("torch_exception_get_what_without_backtrace") != NULL, python_keys = keys;
  library = to, batch_invariant = invariant, tf32_allowed = tf32, unsupported = 0;
  memset(counts, 0, sizeof counts);
  if (torch.aoti_torch_library_init_impl("aten", key, "aotmm", 0, &registration) ||
      torch.torch_library_impl(registration, "mm", mm, TORCH_2_10) ||
      torch.torch_library_impl(registration, "mm.out", mm_out, TORCH_2_10) ||
      torch.torch_library_impl(registration, "bmm", bmm, TORCH_2_10) ||
      torch.torch_library_impl(registration, "bmm.out", bmm_out, TORCH_2_10) ||
      torch.torch_library_impl(registration, "_int_mm", int_mm, TORCH_2_10) ||
      torch.torch_library_impl(registration, "_int_mm.out", int_mm_out, TORCH_2_10)) {
    aotmm_torch_restore();
    return "kernels for aten::mm, bmm and _int_mm";
  }
  return NULL;
}
