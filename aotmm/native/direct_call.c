/* _direct_call.abi3.so: `lib.matmul` without torch's dispatcher, for plain GPU tensors where nothing is recorded; and for
 * aotmm.override() the kernels of aten::addmm and aten::baddbmm, which torch calls with Python's arguments, and the product of
 * that of aten::_scaled_mm.
 *
 * aotmm_torch_view reads tensors, aotmm_torch_multiply multiplies, libtorch_python wraps results. If a mode, a
 * transform or autograd is involved, `matmul` returns NotImplemented, and the op serves the call. This file needs no torch
 * header. Sources: torch/csrc/stable/c/shim.h; c10/core/impl/LocalDispatchKeySet.h. */
#include <dlfcn.h>
#include <string.h>

#include "function_call.h"
#include "limited_api.h"
#include "torch_ops.h"

/* ---- torch, filled by `connect` */

static int (*read)(tensor_t, int writable, view *);
static int (*multiply)(const request *, tensor_t *);
static int (*add_product)(const tensor_t operands[3], const view *bias, const view *a, const view *b, const view *out,
                          int dim, tensor_t *result, const char **wrong);
static const torch_error *(*last_error)(void);
static int (*delete_tensor)(tensor_t);
static int (*to_python)(tensor_t, void *type, void **); /* torch 2.14 */
static PyObject *(*wrap)(tensor_t);                     /* THPVariable_Wrap, before it */
static void *c10;
static _Bool (*is_grad_enabled)(void);
static int64_t (*modes)(void); /* PythonTorchFunctionTLS::stack_len: as function_modes, if torch exports it */
static PyObject *tensor_type, *parameter_type, *is_neg, *requires_grad, *function_modes, *forward_ad, *increment_version;
static PyObject *(*get)(PyObject *descriptor, PyObject *tensor, PyObject *type); /* of requires_grad */
static PyObject *current_level; /* a name in forward_ad, which is a module's dict */
static PyObject *out_name;      /* of the argument of out forms */
static Py_ssize_t place_of_tensor; /* in Python's tensor: that of C++ */

/* The dispatcher's state of this thread: two words; a bit that differs from torch's default is a mode that is on. */
static __thread const uint64_t *key_set;
static uint64_t inference_keys[2]; /* in inference mode */
static int trusted;                /* both words were tested */

static const uint64_t *keys(void) {
  if (!key_set) key_set = dlsym(c10, "_ZN3c104impl26raw_local_dispatch_key_setE"); /* the calling thread's own */
  return key_set;
}

static int quiet(void) {
  const uint64_t *now = keys();
  return !(now[0] | now[1]) || (now[0] == inference_keys[0] && now[1] == inference_keys[1]);
}

/* Return 1 if a call or an attribute gave `plain`, 0 for anything else, -1 for an exception. */
static int is(PyObject *got, PyObject *plain) {
  if (!got) return -1;
  Py_DecRef(got);
  return got == plain;
}

/* Compare with a small int, likewise. */
static int equals(PyObject *got, long plain) {
  if (!got) return -1;
  long number = PyLong_AsLong(got);
  Py_DecRef(got);
  return number == -1 && PyErr_Occurred() ? -1 : number == plain;
}

/* Return C++'s tensor in Python's. */
static tensor_t in_cpp(PyObject *tensor) { return (tensor_t)((char *)tensor + place_of_tensor); }

/* Return 1 and the view of a plain GPU tensor, 0 for anything else, -1 for an exception. With `recorded` autograd
   records, and it is set if the tensor requires a gradient. */
static int plain(PyObject *tensor, int writable, int *recorded, view *v) {
  if (tensor->type != tensor_type && tensor->type != parameter_type) return 0;
  if (read(in_cpp(tensor), writable, v)) return 0;
  if (v->device < 0 || v->dtype < 0 || !v->address || v->dim > 3) return 0;
  /* Lazily negated tensors are imaginary parts of conjugates: no two of their elements are neighbours. The stride of a
     single element may be any. Not noticed are those that as_strided gave other strides (docs/torch.md). */
  int clean = 1, odd = 0;
  for (int i = 0; i < v->dim; i++) odd |= v->sizes[i] > 1 && v->strides[i] & 1;
  if (!odd) clean = is(PyObject_CallFunctionObjArgs(is_neg, tensor, NULL), &_Py_FalseStruct);
  if (clean != 1 || !recorded) return clean;
  int free = is(get(requires_grad, tensor, tensor->type), &_Py_FalseStruct);
  *recorded |= free == 0;
  return free < 0 ? -1 : 1;
}

/* Return 1 if no mode of torch is on, 0 or -1 as `plain`. */
static int nothing_watches(void) {
  if (!trusted || !quiet()) return 0;
  int found = modes ? modes() == 0 : equals(PyObject_CallNoArgs(function_modes), 0);
  if (found != 1) return found;
  PyObject *level = PyDict_GetItemWithError(forward_ad, current_level);
  return level ? equals(new_reference(level), -1) : -!!PyErr_Occurred();
}

/* Return whether the product depends on a setting of torch: tf32 for fp32. */
static int unsettled(const request *r) {
  return r->a.dtype == AOTMM_FP32 || r->b.dtype == AOTMM_FP32 || (r->out && r->out->dtype == AOTMM_FP32) ||
         (r->bias && r->bias->dtype == AOTMM_FP32);
}

/* Return whether autograd can record the product by the Function of runtime/autograd.py. */
static int differentiable(const request *r) {
  return !r->out && !r->activation && r->a.dtype == r->b.dtype && (r->a.dtype == AOTMM_FP16 || r->a.dtype == AOTMM_BF16);
}

/* Return Python's tensor of a result, and free that. */
static PyObject *given(tensor_t result) {
  void *object = NULL;
  if (!to_python) object = wrap(result);
  else if (to_python(result, NULL, &object) && !PyErr_Occurred())
    PyErr_SetString(PyExc_RuntimeError, "torch makes no Python tensor of the result");
  delete_tensor(result);
  return object;
}

/* matmul(library, a, b, out, bias, activation, batch_invariant): out and bias may be None, activation is None or (number,
   slope). Return None if only a gradient is left to record. */
static PyObject *matmul(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != 7) {
    PyErr_SetString(PyExc_RuntimeError, "matmul takes 7 arguments");
    return NULL;
  }
  PyObject *out = arguments[3] == &_Py_NoneStruct ? NULL : arguments[3];
  PyObject *bias = arguments[4] == &_Py_NoneStruct ? NULL : arguments[4];
  view written, added;
  request r = {.out = out ? &written : NULL, .bias = bias ? &added : NULL, .library = PyLong_AsLong(arguments[0]),
               .out_dtype = -1, .batch_invariant = arguments[6] != &_Py_FalseStruct};
  if (arguments[5] != &_Py_NoneStruct) {
    PyObject *activation = PyTuple_GetItem(arguments[5], 0), *slope = PyTuple_GetItem(arguments[5], 1);
    if (!activation || !slope) return NULL;
    r.activation = PyLong_AsLong(activation), r.slope = PyFloat_AsDouble(slope);
  }
  int required = 0, *recorded = is_grad_enabled() ? &required : NULL, mine = nothing_watches();
  if (mine == 1) mine = plain(arguments[1], 0, recorded, &r.a);
  if (mine == 1) mine = plain(arguments[2], 0, recorded, &r.b);
  if (mine == 1 && out) mine = plain(out, 1, recorded, &written);
  if (mine == 1 && bias) mine = plain(bias, 0, recorded, &added);
  if (mine < 0) return NULL;
  if (mine && (r.a.dim < 2 || r.b.dim < 2 || unsettled(&r) || (required && !differentiable(&r)))) mine = 0;
  if (!mine) return new_reference(&_Py_NotImplementedStruct);
  if (required) return new_reference(&_Py_NoneStruct);

  tensor_t result = NULL;
  void *thread = PyEval_SaveThread(); /* a full launch queue blocks */
  int failed = multiply(&r, &result);
  PyEval_RestoreThread(thread);
  if (failed) {
    PyErr_SetString(PyExc_RuntimeError, last_error()->error.text);
    return NULL;
  }
  if (out) {
    PyObject *written_to = PyTuple_Pack(1, out);
    PyObject *done = written_to ? PyObject_CallFunctionObjArgs(increment_version, written_to, NULL) : NULL;
    if (written_to) Py_DecRef(written_to);
    if (!done) return NULL;
    Py_DecRef(done);
    return new_reference(out);
  }
  return given(result);
}

/* scaled(library, a, b, scale_a, scale_b, bias, fast_accum, batch_invariant, number of the result's dtype) -> the product; bias may
   be None. torch's dispatcher has done what belongs to autograd and modes. Return NotImplemented unless tensors are plain. */
static PyObject *scaled(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != 9) {
    PyErr_SetString(PyExc_RuntimeError, "scaled takes 9 arguments");
    return NULL;
  }
  const int biased = arguments[5] != &_Py_NoneStruct;
  view bias, scale_a, scale_b;
  request r = {.bias = biased ? &bias : NULL, .scale_a = &scale_a, .scale_b = &scale_b, .library = PyLong_AsLong(arguments[0]),
               .out_dtype = PyLong_AsLong(arguments[8]), .fast_accum = arguments[6] != &_Py_FalseStruct,
               .batch_invariant = arguments[7] != &_Py_FalseStruct};
  view *const views[] = {&r.a, &r.b, &scale_a, &scale_b, &bias};
  int mine = 1;
  for (int i = 0; i < 4 + biased && mine == 1; i++) mine = plain(arguments[1 + i], 0, NULL, views[i]);
  if (mine < 0) return NULL;
  if (!mine) return new_reference(&_Py_NotImplementedStruct);
  tensor_t result = NULL;
  void *thread = PyEval_SaveThread();
  const int failed = multiply(&r, &result);
  PyEval_RestoreThread(thread);
  if (!failed) return given(result);
  PyErr_SetString(PyExc_RuntimeError, last_error()->error.text);
  return NULL;
}

/* (set of keys, bias, a, b, and by name beta, alpha, out) -> bias + a @ b. torch leaves out a beta or alpha of 1. `self` is
   (dimensions of a and b, the functions that compute other forms and what is left to torch). torch's dispatcher has done
   what belongs to autograd and modes. */
static PyObject *added(PyObject *self, PyObject *arguments, PyObject *names) {
  view bias, a, b, written;
  const Py_ssize_t named = names ? PyDict_Size(names) : 0;
  PyObject *out = named == 1 ? PyDict_GetItemWithError(names, out_name) : NULL;
  if (!out && PyErr_Occurred()) return NULL;
  int mine = PyTuple_Size(arguments) == 4 && named == (out != NULL);
  if (mine) mine = plain(PyTuple_GetItem(arguments, 1), 0, NULL, &bias);
  if (mine == 1) mine = plain(PyTuple_GetItem(arguments, 2), 0, NULL, &a);
  if (mine == 1) mine = plain(PyTuple_GetItem(arguments, 3), 0, NULL, &b);
  if (mine == 1 && out) mine = plain(out, 1, NULL, &written);
  if (mine < 0) return NULL;
  if (mine) {
    const int dim = (int)PyLong_AsLong(PyTuple_GetItem(self, 0));
    tensor_t operands[3];
    for (int i = 0; i < 3; i++) operands[i] = in_cpp(PyTuple_GetItem(arguments, 1 + i));
    tensor_t result = NULL;
    const char *wrong = NULL;
    void *thread = PyEval_SaveThread();
    int done = add_product(operands, &bias, &a, &b, out ? &written : NULL, dim, &result, &wrong);
    PyEval_RestoreThread(thread);
    if (done) return out ? new_reference(out) : given(result);
    if (wrong) {
      PyErr_SetString(PyExc_RuntimeError, wrong);
      return NULL;
    }
  }
  return PyObject_Call(PyTuple_GetItem(self, mine ? 2 : 1), arguments, names);
}

/* adder(dimensions, other forms, torch's) -> the function above. */
static PyObject *adder(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  static PyMethodDef definition = {"add_product", {.with_keywords = added}, METH_VARARGS | METH_KEYWORDS, NULL};
  (void)module;
  if (count != 3) {
    PyErr_SetString(PyExc_RuntimeError, "adder takes 3 arguments");
    return NULL;
  }
  PyObject *self = PyTuple_Pack(3, arguments[0], arguments[1], arguments[2]);
  PyObject *made = self ? PyCFunction_NewEx(&definition, self, NULL) : NULL;
  if (self) Py_DecRef(self);
  return made;
}

/* connect(handles of libaotmm_torch, libtorch_cpu, libtorch_python and libc10, the byte of a Python tensor at which that of
   C++ begins, the torch functions that matmul calls) -> the name of a missing function, or None. */
static PyObject *connect(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != 12) return Py_BuildValue("s", "12 arguments");
  void *handles[4];
  for (int i = 0; i < 4; i++) handles[i] = PyLong_AsVoidPtr(arguments[i]);
  place_of_tensor = PyLong_AsLong(arguments[4]);
  if (PyErr_Occurred()) return NULL;
  const char *key = dlsym(handles[0], "aotmm_torch_key");
  if (!key || strcmp(key, AOTMM_KEY)) return Py_BuildValue("s", "a libaotmm_torch.so of the same build");
  c10 = handles[3];
  const struct {
    void *library;
    const char *name;
    void *slot;
    int optional;
  } symbols[] = {{handles[0], "aotmm_torch_view", &read, 0},
                 {handles[0], "aotmm_torch_multiply", &multiply, 0},
                 {handles[0], "aotmm_torch_add_product", &add_product, 0},
                 {handles[0], "aotmm_torch_last_error", &last_error, 0},
                 {handles[1], "aoti_torch_delete_tensor_object", &delete_tensor, 0},
                 {handles[1], "aoti_torch_grad_mode_is_enabled", &is_grad_enabled, 0},
                 {handles[1], "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", &modes, 1},
                 {handles[2], "torch_tensor_to_pyobject", &to_python, 1},
                 {handles[2], "_Z16THPVariable_WrapRKN2at10TensorBaseE", &wrap, 1}};
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(symbols[i].library, symbols[i].name);
    if (!found && !symbols[i].optional) return Py_BuildValue("s", symbols[i].name);
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  if (!to_python && !wrap) return Py_BuildValue("s", "a way to make Python tensors");
  if (!keys()) return Py_BuildValue("s", "the dispatcher's state of a thread");
  PyObject **slots[] = {&tensor_type, &parameter_type, &is_neg, &requires_grad, &function_modes, &forward_ad,
                        &increment_version};
  for (int i = 0; i < 7; i++) *slots[i] = new_reference(arguments[5 + i]);
  get = PyType_GetSlot(requires_grad->type, DESCR_GET);
  if (!get) return PyErr_Occurred() ? NULL : Py_BuildValue("s", "a descriptor of requires_grad");
  current_level = PyUnicode_InternFromString("_current_level"), out_name = PyUnicode_InternFromString("out");
  return current_level && out_name ? new_reference(&_Py_NoneStruct) : NULL;
}

/* key_set() -> the two words of the calling thread. */
static PyObject *read_keys(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module, (void)arguments, (void)count;
  return Py_BuildValue("(KK)", (unsigned long long)keys()[0], (unsigned long long)keys()[1]);
}

/* trust(first, second): enable `matmul`; the words are those of inference mode. */
static PyObject *trust(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  for (int i = 0; i < 2 && i < count; i++) inference_keys[i] = (uint64_t)PyLong_AsVoidPtr(arguments[i]);
  if (PyErr_Occurred()) return NULL;
  trusted = 1;
  return new_reference(&_Py_NoneStruct);
}

static PyMethodDef methods[] = {{"matmul", {matmul}, METH_FASTCALL, NULL},
                                {"scaled", {scaled}, METH_FASTCALL, NULL},
                                {"adder", {adder}, METH_FASTCALL, NULL},
                                {"connect", {connect}, METH_FASTCALL, NULL},
                                {"key_set", {read_keys}, METH_FASTCALL, NULL},
                                {"trust", {trust}, METH_FASTCALL, NULL},
                                {"connect_functions", {connect_functions}, METH_FASTCALL, NULL},
                                {0}};
static PyModuleDef definition = {.head = {.refcount = 1}, .name = "_direct_call", .size = -1, .methods = methods};

EXPORT PyObject *PyInit__direct_call(void) {
  PyObject *module = PyModule_Create2(&definition, ABI_VERSION);
  if (!module || !add_functions(module)) return module;
  Py_DecRef(module);
  return NULL;
}
