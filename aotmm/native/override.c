/* aotmm.override(): aten::mm and aten::bmm for GPUs, below autograd, autocast and vmap, which stay torch's own.
 *
 * Products that our kernels do not take go to torch's, through the functions that AOTInductor's programs call. These
 * reach the kernel itself, not the dispatcher, so nothing recurses. They turn exceptions into a status, and before
 * torch 2.13 log them. So a Python kernel repeats the products that they refuse, and before 2.13 computes all.
 * runtime/override.py registers it for a dispatch key of our own. It calls torch's kernel, and exceptions pass.
 *
 * addmm and baddbmm have arguments that the stable interface does not carry (Scalar); runtime/override.py registers
 * them. */
#include <string.h>

#include "torch_ops.h"

/* at::Tensor as C++ returns it: at an address of the caller, as C returns a struct of more than two words. */
typedef struct returned {
  void *tensor, *unused[2];
} returned;

/* torch's own products. `find` knows them by these names. */
static struct {
  int (*mm_out)(tensor_t out, tensor_t, tensor_t);
  int (*bmm_out)(tensor_t out, tensor_t, tensor_t);
  int (*new_tensor)(tensor_t *); /* an undefined one */
  /* at::_ops::mm::redispatch(c10::DispatchKeySet, at::Tensor const &, at::Tensor const &), mm_out and bmm likewise */
  returned (*dispatch_mm)(uint64_t keys, tensor_t, tensor_t);
  returned (*dispatch_bmm)(uint64_t keys, tensor_t, tensor_t);
  void *(*dispatch_mm_out)(uint64_t keys, tensor_t, tensor_t, tensor_t out);
  void *(*dispatch_bmm_out)(uint64_t keys, tensor_t, tensor_t, tensor_t out);
} own;
static const char *const names[] = {
    "aoti_torch_cuda_mm_out",
    "aoti_torch_cuda_bmm_out",
    "aoti_torch_new_uninitialized_tensor",
    "_ZN2at4_ops2mm10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_",
    "_ZN2at4_ops3bmm10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_",
    "_ZN2at4_ops6mm_out10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_RS4_",
    "_ZN2at4_ops7bmm_out10redispatchEN3c1014DispatchKeySetERKNS_6TensorES6_RS4_",
};
enum { NAMES = sizeof names / sizeof *names };

/* Tensors that the Python kernel's product owns. C cannot free them when an exception passes, so that kernel does. */
static __thread struct handed {
  tensor_t tensors[3];
  struct handed *outer;
} *handed;

static uint64_t python_keys; /* the DispatchKeySet of Python's kernels */
static int silent; /* torch's C functions log nothing, from 2.13 on */
static int (*tf32_allowed)(void);
static int64_t library;
static uint32_t unsupported; /* GPUs for which there is no pack, a bit for each */
static void *registration; /* torch's handle, NULL where nothing is registered */

/* Return whether we multiply a type. fp32 without tf32 is faster with torch's kernels (docs/torch.md). */
static int type_taken(const request *r) {
  return r->a.dtype == AOTMM_FP16 || r->a.dtype == AOTMM_BF16 || (r->a.dtype == AOTMM_FP32 && r->allow_tf32);
}

/* torch.mm multiplies matrices of one floating type, torch.bmm as many of them on both sides. */
static int taken(const request *r, int dim) {
  const view *a = &r->a, *b = &r->b;
  return a->device >= 0 && b->device >= 0 && a->dim == dim && b->dim == dim && a->dtype == b->dtype &&
         !(a->device < 32 && unsupported >> a->device & 1) &&
         type_taken(r) && (dim == 2 || a->sizes[0] == b->sizes[0]) && (!r->out || r->out->dtype == a->dtype);
}

/* Return whether our kernels computed it. If not, `*wrong` is the driver's failure, or NULL: then torch computes it. */
static int ours(tensor_t a, tensor_t b, tensor_t out, int dim, tensor_t *result, const char **wrong) {
  view written;
  request r = {.out = out ? &written : NULL, .library = library, .out_dtype = -1};
  if (read_view(a, 0, &r.a) || read_view(b, 0, &r.b) || (out && read_view(out, 1, &written))) return 0;
  r.allow_tf32 = r.a.dtype == AOTMM_FP32 && tf32_allowed();
  if (!taken(&r, dim)) return 0;
  if (aotmm_torch_multiply(&r, result) == 0) return 1;
  if (aotmm_torch_last_error()->kind == KIND_RESOLVER && r.a.device < 32)
    __atomic_fetch_or(&unsupported, 1u << r.a.device, __ATOMIC_RELAXED);
  if (!aotmm_torch_declined()) *wrong = aotmm_torch_last_error()->error.text;
  return 0;
}

/* Make an empty tensor for torch's own kernel to write to, of the result's size if the operands have one; else that
   kernel reports the fault of the operands. */
static int empty_result(tensor_t a, tensor_t b, int dim, tensor_t *result) {
  int64_t dims[2], *sizes[2], shape[3] = {0}, strides[3] = {1, 1, 1};
  int32_t dtype, type, device;
  if (torch.aoti_torch_get_dim(a, &dims[0]) || torch.aoti_torch_get_dim(b, &dims[1]) ||
      torch.aoti_torch_get_sizes(a, &sizes[0]) || torch.aoti_torch_get_sizes(b, &sizes[1]) ||
      torch.aoti_torch_get_dtype(a, &dtype) || torch.aoti_torch_get_device_type(a, &type) ||
      torch.aoti_torch_get_device_index(a, &device))
    return 1;
  if (dims[0] == dim && dims[1] == dim) {
    memcpy(shape, sizes[0], (size_t)(dim - 1) * sizeof *shape);
    shape[dim - 1] = sizes[1][dim - 1];
    for (int i = dim - 2; i >= 0; i--) strides[i] = strides[i + 1] * (shape[i + 1] > 0 ? shape[i + 1] : 1);
  }
  return torch.aoti_torch_empty_strided(dim, shape, strides, dtype, type, device, result);
}

/* Compute the product by torch's own kernel. Return 0, or 1 if it failed, or would log a failure. */
static int torchs(tensor_t a, tensor_t b, tensor_t out, int dim, tensor_t *result) {
  if (!silent || (!out && empty_result(a, b, dim, result))) return 1;
  int failed = (dim == 2 ? own.mm_out : own.bmm_out)(*result, a, b);
  if (failed && !out) {
    torch.aoti_torch_delete_tensor_object(*result);
    *result = NULL;
  }
  return failed;
}

/* Compute the same from Python, so that exceptions pass. Return the failure before that, or NULL. */
static const char *pythons(tensor_t a, tensor_t b, tensor_t out, int dim, tensor_t *result) {
  if (!out && own.new_tensor(result)) return "torch has no memory for a tensor";
  struct handed mine = {{a, b, *result}, handed};
  handed = &mine;
  if (out) {
    (dim == 2 ? own.dispatch_mm_out : own.dispatch_bmm_out)(python_keys, a, b, out);
  } else {
    returned made = (dim == 2 ? own.dispatch_mm : own.dispatch_bmm)(python_keys, a, b);
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
static void multiply(value *stack, int dim, int into_out) {
  tensor_t a = (tensor_t)stack[0], b = (tensor_t)stack[1], out = into_out ? (tensor_t)stack[2] : NULL, result = out;
  const char *wrong = NULL;
  if (!ours(a, b, out, dim, &result, &wrong) && !wrong && torchs(a, b, out, dim, &result))
    wrong = pythons(a, b, out, dim, &result);
  torch.aoti_torch_delete_tensor_object(a);
  torch.aoti_torch_delete_tensor_object(b);
  if (wrong) {
    if (out) torch.aoti_torch_delete_tensor_object(out);
    torch.aoti_torch_check(0, "aotmm::override", "aotmm", 0, wrong);
  }
  stack[0] = (value)result;
}

#define OVERRIDE(name, dim, into_out)                                        \
  static void name(value *stack, uint64_t arguments, uint64_t results) {     \
    (void)arguments, (void)results;                                          \
    multiply(stack, dim, into_out);                                          \
  }
OVERRIDE(mm, 2, 0)
OVERRIDE(mm_out, 2, 1)
OVERRIDE(bmm, 3, 0)
OVERRIDE(bmm_out, 3, 1)

/* Undo aotmm_torch_override. Return NULL, or the step that torch refused. */
EXPORT const char *aotmm_torch_restore(void) {
  if (registration && torch.aoti_torch_delete_library_object(registration))
    return "the removal of the kernels of aten::mm and aten::bmm";
  registration = NULL;
  return NULL;
}

/* Send torch's products of dispatch key `key` to library number `to`. `find` is that of aotmm_torch_connect, `tf32`
   returns torch's setting, `keys` is the DispatchKeySet of Python's kernels. Return NULL, or the function that torch
   lacks or the step that it refused. */
EXPORT const char *aotmm_torch_override(const char *key, int to, void *(*find)(const char *), int (*tf32)(void),
                                        uint64_t keys) {
  void *found[NAMES];
  for (int i = 0; i < NAMES; i++)
    if (!(found[i] = find(names[i]))) return names[i];
  memcpy(&own, found, sizeof own);
  silent = find("torch_exception_get_what_without_backtrace") != NULL, python_keys = keys;
  library = to, tf32_allowed = tf32, unsupported = 0;
  if (torch.aoti_torch_library_init_impl("aten", key, "aotmm", 0, &registration) ||
      torch.torch_library_impl(registration, "mm", mm, TORCH_2_10) ||
      torch.torch_library_impl(registration, "mm.out", mm_out, TORCH_2_10) ||
      torch.torch_library_impl(registration, "bmm", bmm, TORCH_2_10) ||
      torch.torch_library_impl(registration, "bmm.out", bmm_out, TORCH_2_10)) {
    aotmm_torch_restore();
    return "kernels for aten::mm and aten::bmm";
  }
  return NULL;
}
