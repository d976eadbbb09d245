/* Functions of a user's own, called from Python without a step in it: arguments become values, and the pack's library
 * launches. DLPack's C exchange API reads tensors. What this does not take (a number of another class, a DLPack object, a
 * wrong argument) goes to `slow`, which does the same in Python or says what is wrong. */
#include <stdlib.h>
#include <string.h>

#include "function_call.h"
#include "limited_api.h"
#include "launcher.h"
#include "own_table.h"

enum { MAX_DEVICES = 32, AXES = 3, EQUAL = 2 /* Py_EQ */, MAX_VALUES = 64 };
/* By place in KINDS of runtime/function_call.py. */
enum { POINTER, INTEGER, FP32, FP64, CHOICE };
static const char *const capsule_name = "aotmm.function";

/* Types behind pointers by DLPack's code (DLDataTypeCode) and bits. */
static const struct {
  uint8_t code, bits;
  int32_t type;
} types[] = {{2, 16, AOTMM_TYPE_FP16}, {4, 16, AOTMM_TYPE_BF16}, {2, 32, AOTMM_TYPE_FP32}, {2, 64, AOTMM_TYPE_FP64},
             {10, 8, AOTMM_TYPE_FP8E4NV}, {12, 8, AOTMM_TYPE_FP8E5}, {11, 8, AOTMM_TYPE_FP8E4B8},
             {13, 8, AOTMM_TYPE_FP8E5B16}, {6, 8, AOTMM_TYPE_I1}, {0, 8, AOTMM_TYPE_I8}, {0, 16, AOTMM_TYPE_I16},
             {0, 32, AOTMM_TYPE_I32}, {0, 64, AOTMM_TYPE_I64}, {1, 8, AOTMM_TYPE_U8}, {1, 16, AOTMM_TYPE_U16},
             {1, 32, AOTMM_TYPE_U32}, {1, 64, AOTMM_TYPE_U64}};

/* ---- torch, filled by `connect_functions` */

static int (*describe)(void *tensor, DLTensor *);
static int (*current_stream)(int32_t device, void **);
static PyObject *tensor_type, *parameter_type;
static int32_t device_types[2];

/* ---- one function */

typedef struct argument {
  PyObject *name, *choices; /* choices: (value, its number) of each */
  int kind, value, type;    /* numbers of quantities; -1: none */
  unsigned allowed;         /* types behind a pointer, as bits */
  int required;
} argument;

typedef struct function_state {
  PyObject *rows, *constants, *slow, *failed; /* `rows` keeps names and choices */
  struct {
    const aotmm_own *pack; /* NULL: not bound */
    uint32_t number;
  } devices[MAX_DEVICES];
  Py_ssize_t places, count; /* arguments by place, and all */
  int value_count;          /* quantities that a call gives */
  argument arguments[];
} function_state;

/* The values of a call. */
typedef struct call_values {
  int64_t value[MAX_VALUES];
  uint64_t open;
  int device; /* -1: no tensor yet */
} call_values;

static int read_pointer(const argument *a, PyObject *object, call_values *c) {
  DLTensor t;
  int32_t type = AOTMM_TYPE_NONE;
  uint64_t address = 0;
  if (object != &_Py_NoneStruct) {
    if (object->type != tensor_type && object->type != parameter_type) return 0;
    if (describe(object, &t)) {
      PyErr_Clear();
      return 0;
    }
    if ((t.device_type != device_types[0] && t.device_type != device_types[1]) || t.lanes != 1) return 0;
    if (c->device >= 0 && c->device != t.device_id) return 0;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
      if (types[i].code == t.code && types[i].bits == t.bits) type = types[i].type;
    if (type == AOTMM_TYPE_NONE) return 0;
    c->device = t.device_id;
    address = (uint64_t)t.data + t.byte_offset;
  }
  if (!(a->allowed >> type & 1)) return 0;
  c->value[a->value] = (int64_t)address;
  if (a->type >= 0) {
    c->value[a->type] = type;
    c->open &= ~(1ull << a->type);
  }
  return 1;
}

static int read_number(const argument *a, PyObject *object, call_values *c) {
  if (a->kind == INTEGER) {
    int overflow;
    if (object->type != &PyLong_Type && object->type != &PyBool_Type) return 0;
    c->value[a->value] = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
  }
  if (object->type != &PyFloat_Type && object->type != &PyLong_Type) return 0;
  const double given = PyFloat_AsDouble(object);
  const float narrow = (float)given;
  uint32_t bits;
  if (given == -1 && PyErr_Occurred()) { /* too large an integer */
    PyErr_Clear();
    return 0;
  }
  if (a->kind == FP64) return memcpy(&c->value[a->value], &given, sizeof given), 1;
  if (__builtin_isinf(narrow) && !__builtin_isinf(given)) return 0;
  memcpy(&bits, &narrow, sizeof bits);
  c->value[a->value] = bits;
  return 1;
}

/* Find the number of a chosen value. Floats are left to Python, for which 0.0 and -0.0 are two values. */
static int read_choice(const argument *a, PyObject *object, call_values *c) {
  if (object->type != &PyLong_Type && object->type != &PyBool_Type && object->type != &PyUnicode_Type &&
      object != &_Py_NoneStruct)
    return 0;
  for (Py_ssize_t i = 0, count = PyTuple_Size(a->choices); i < count; i++) {
    PyObject *choice = PyTuple_GetItem(a->choices, i), *value = PyTuple_GetItem(choice, 0);
    if (value->type != object->type) continue; /* 1 is not true */
    const int equal = PyObject_RichCompareBool(value, object, EQUAL);
    if (equal < 0) return -1;
    if (!equal) continue;
    if (a->value >= 0) c->value[a->value] = PyLong_AsLong(PyTuple_GetItem(choice, 1));
    return 1;
  }
  return 0;
}

/* Set the values of a call. Return 1, 0 if Python has to look at it, -1 for an exception. */
static int read_arguments(const function_state *f, PyObject *const *given, call_values *c) {
  int read = 1;
  memset(c->value, 0, (size_t)f->value_count * sizeof *c->value);
  c->open = ~0ull, c->device = -1;
  for (Py_ssize_t i = 0; i < f->count && read == 1; i++) {
    const argument *a = f->arguments + i;
    if (!given[i]) {
      if (a->required) return 0;
      continue;
    }
    read = a->kind == POINTER  ? read_pointer(a, given[i], c)
           : a->kind == CHOICE ? read_choice(a, given[i], c)
                               : read_number(a, given[i], c);
    if (a->value >= 0) c->open &= ~(1ull << a->value);
  }
  return read == 1 && (c->device < 0 || c->device >= MAX_DEVICES || !f->devices[c->device].pack) ? 0 : read;
}

/* Put the arguments of a call in their places. Return 0 if Python has to say what is wrong with them. */
static int place(const function_state *f, PyObject *const *objects, Py_ssize_t count, PyObject *names, PyObject **given) {
  const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
  if (count > f->places) return 0;
  memset(given, 0, (size_t)f->count * sizeof *given);
  memcpy(given, objects, (size_t)count * sizeof *given);
  for (Py_ssize_t n = 0; n < named; n++) {
    PyObject *name = PyTuple_GetItem(names, n); /* interned, as those of the rows */
    Py_ssize_t i = 0;
    while (i < f->count && f->arguments[i].name != name) i++;
    if (i == f->count || given[i]) return 0;
    given[i] = objects[count + n];
  }
  return 1;
}

/* Read a grid: an integer, or a tuple of up to three. Return 0 for anything else. */
static int read_grid(PyObject *object, int64_t *grid) {
  const int one = object->type == &PyLong_Type;
  if (!one && object->type != &PyTuple_Type) return 0;
  const Py_ssize_t count = one ? 1 : PyTuple_Size(object);
  if (count < 1 || count > AXES) return 0;
  for (Py_ssize_t i = 0; i < AXES; i++) {
    PyObject *blocks = one ? object : PyTuple_GetItem(object, i < count ? i : 0);
    int overflow = 0;
    if (blocks->type != &PyLong_Type) return 0;
    grid[i] = i < count ? PyLong_AsLongLongAndOverflow(blocks, &overflow) : 1;
    if (overflow) return 0;
  }
  return 1;
}

/* Compute a grid of the arguments and of what the kernel was compiled for. Return 1, 0 or -1 as `read_arguments`. */
static int compute_grid(const function_state *f, PyObject *compute, PyObject *const *given, uint32_t kernel, int64_t *grid) {
  PyObject *found = PyDict_Copy(PyTuple_GetItem(f->constants, kernel));
  int read = found ? 1 : -1;
  for (Py_ssize_t i = 0; i < f->count && read == 1; i++)
    if (given[i] && PyDict_SetItem(found, f->arguments[i].name, given[i])) read = -1;
  PyObject *blocks = read == 1 ? PyObject_CallFunctionObjArgs(compute, found, NULL) : NULL;
  if (found) Py_DecRef(found);
  if (!blocks) return -1;
  read = read_grid(blocks, grid);
  Py_DecRef(blocks);
  return read;
}

/* A call as Python made it: the function, which is for `slow` alone, the grid, and arguments by place and name. */
typedef struct python_call {
  PyObject *function, *grid, *const *objects, *names;
  Py_ssize_t count;
} python_call;

/* Call `slow` likewise. */
static PyObject *in_python(const function_state *f, const python_call *p) {
  PyObject *whole = PyTuple_New(p->count + 2), *named = p->names ? PyDict_New() : NULL, *done = NULL;
  int failed = !whole || (p->names && !named);
  for (Py_ssize_t i = -2; i < p->count && !failed; i++)
    failed = PyTuple_SetItem(whole, i + 2, new_reference(i == -2 ? p->function : i == -1 ? p->grid : p->objects[i]));
  for (Py_ssize_t n = 0; p->names && n < PyTuple_Size(p->names) && !failed; n++)
    failed = PyDict_SetItem(named, PyTuple_GetItem(p->names, n), p->objects[p->count + n]);
  if (!failed) done = PyObject_Call(f->slow, whole, named);
  if (whole) Py_DecRef(whole);
  if (named) Py_DecRef(named);
  return done;
}

static PyObject *launch_call(const function_state *f, const python_call *p) {
  PyObject *given[f->count + 1]; /* no array is empty */
  call_values c;
  int64_t grid[AXES];
  uint32_t kernel = 0;
  void *stream;
  int computed = 0, mine = place(f, p->objects, p->count, p->names, given);
  if (mine == 1) mine = read_arguments(f, given, &c);
  if (mine == 1 && p->grid != &_Py_NoneStruct && !read_grid(p->grid, grid)) {
    computed = mine = PyCallable_Check(p->grid);
    if (computed) {
      const aotmm_own *pack = f->devices[c.device].pack;
      const uint32_t number = f->devices[c.device].number;
      mine = !pack->choose(number, c.value, c.open, c.device, &kernel);
      if (mine) mine = compute_grid(f, p->grid, given, kernel - pack->functions[number].first_kernel, grid);
    }
  }
  if (mine < 0) return NULL;
  if (!mine || current_stream(c.device, &stream)) return in_python(f, p);
  const aotmm_own *pack = f->devices[c.device].pack;
  const int64_t *blocks = p->grid == &_Py_NoneStruct ? NULL : grid;
  void *thread = PyEval_SaveThread(); /* a full launch queue blocks */
  const int status = computed ? pack->run(kernel, c.value, c.open, blocks, c.device, stream)
                              : pack->launch(f->devices[c.device].number, c.value, c.open, blocks, c.device, stream);
  PyEval_RestoreThread(thread);
  if (status == AOTMM_OK) return new_reference(&_Py_NoneStruct);
  /* Python words a call that is not possible; nothing was launched. What the driver refused is not tried again. */
  if (status == AOTMM_NO_KERNEL || status == AOTMM_INVALID) return in_python(f, p);
  PyObject *device = Py_BuildValue("(i)", c.device), *raised = device ? PyObject_Call(f->failed, device, NULL) : NULL;
  if (device) Py_DecRef(device);
  return raised;
}

/* (function, grid, arguments by place and name): launch. */
static PyObject *call_function(PyObject *capsule, PyObject *const *objects, Py_ssize_t count, PyObject *names) {
  const function_state *f = PyCapsule_GetPointer(capsule, capsule_name);
  return launch_call(f, &(python_call){objects[0], objects[1], objects + 2, names, count - 2});
}

/* (arguments by place and name), of what `in_grid` made: launch. */
static PyObject *call_in_grid(PyObject *made_of, PyObject *const *objects, Py_ssize_t count, PyObject *names) {
  const function_state *f = PyCapsule_GetPointer(PyTuple_GetItem(made_of, 0), capsule_name);
  return launch_call(f, &(python_call){PyTuple_GetItem(made_of, 1), PyTuple_GetItem(made_of, 2), objects, names, count});
}

/* (function, grid) -> what launches in that grid. */
static PyObject *in_grid(PyObject *capsule, PyObject *const *objects, Py_ssize_t count) {
  static PyMethodDef call = {"launch_in_grid", {.with_names = call_in_grid}, METH_FASTCALL | METH_KEYWORDS, NULL};
  (void)count;
  PyObject *made_of = PyTuple_Pack(3, capsule, objects[0], objects[1]);
  PyObject *made = made_of ? PyCFunction_NewEx(&call, made_of, NULL) : NULL;
  if (made_of) Py_DecRef(made_of);
  return made;
}

/* (ordinal, address of a pack's aotmm_own, number of the function in it): serve a device from now on. */
static PyObject *bind_device(PyObject *capsule, PyObject *const *arguments, Py_ssize_t count) {
  function_state *f = PyCapsule_GetPointer(capsule, capsule_name);
  const long device = count == 3 ? PyLong_AsLong(arguments[0]) : -1;
  if (device >= 0 && device < MAX_DEVICES) {
    f->devices[device].number = (uint32_t)PyLong_AsLong(arguments[2]);
    f->devices[device].pack = PyLong_AsVoidPtr(arguments[1]);
  }
  return PyErr_Occurred() ? NULL : new_reference(&_Py_NoneStruct);
}

static void destroy(PyObject *capsule) {
  function_state *f = PyCapsule_GetPointer(capsule, capsule_name);
  PyObject *held[] = {f->rows, f->constants, f->slow, f->failed};
  for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_DecRef(held[i]);
  free(f);
}

PyObject *make_function(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  static PyMethodDef call = {"launch", {.with_names = call_function}, METH_FASTCALL | METH_KEYWORDS, NULL};
  static PyMethodDef bind = {"bind", {bind_device}, METH_FASTCALL, NULL};
  static PyMethodDef with_grid = {"in_grid", {in_grid}, METH_FASTCALL, NULL};
  (void)module;
  if (count != 6) {
    PyErr_SetString(PyExc_RuntimeError, "function takes 6 arguments");
    return NULL;
  }
  PyObject *rows = arguments[0];
  const Py_ssize_t length = PyTuple_Size(rows);
  if (length < 0) return NULL;
  function_state *f = calloc(1, sizeof *f + (size_t)length * sizeof *f->arguments);
  if (!f) {
    PyErr_SetString(PyExc_RuntimeError, "no memory");
    return NULL;
  }
  f->count = length, f->places = PyLong_AsLong(arguments[1]), f->value_count = (int)PyLong_AsLong(arguments[2]);
  for (Py_ssize_t i = 0; i < length && !PyErr_Occurred(); i++) {
    argument *a = f->arguments + i;
    PyArg_ParseTuple(PyTuple_GetItem(rows, i), "OiiiIiO", &a->name, &a->kind, &a->value, &a->type, &a->allowed, &a->required,
                     &a->choices);
  }
  PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(f, capsule_name, destroy);
  if (!capsule) {
    free(f);
    return NULL;
  }
  f->rows = new_reference(rows), f->constants = new_reference(arguments[3]);
  f->slow = new_reference(arguments[4]), f->failed = new_reference(arguments[5]);
  PyMethodDef *definitions[] = {&call, &with_grid, &bind};
  PyObject *made = PyTuple_New(3);
  for (int i = 0; i < 3 && made; i++) {
    PyObject *one = PyCFunction_NewEx(definitions[i], capsule, NULL);
    if (one && !PyTuple_SetItem(made, i, one)) continue;
    Py_DecRef(made);
    made = NULL;
  }
  Py_DecRef(capsule);
  return made;
}

PyObject *connect_functions(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  (void)module;
  if (count != 6) {
    PyErr_SetString(PyExc_RuntimeError, "connect_functions takes 6 arguments");
    return NULL;
  }
  const DLExchange *exchange = PyCapsule_GetPointer(arguments[0], "dlpack_exchange_api");
  void *stream = exchange ? PyLong_AsVoidPtr(arguments[1]) : NULL;
  for (int i = 0; i < 2 && exchange; i++) device_types[i] = (int32_t)PyLong_AsLong(arguments[2 + i]);
  if (PyErr_Occurred()) return NULL;
  if (exchange->major != 1 || !exchange->describe) {
    PyErr_SetString(PyExc_RuntimeError, "DLPack 1's description of tensors is missing");
    return NULL;
  }
  describe = exchange->describe;
  memcpy(&current_stream, &stream, sizeof stream);
  tensor_type = new_reference(arguments[4]), parameter_type = new_reference(arguments[5]);
  return new_reference(&_Py_NoneStruct);
}
