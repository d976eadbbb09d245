/* Functions of a user's own, called from Python without a step in it: arguments become values, and the pack's library
 * launches. torch's C interface reads tensors. What this does not take (a number of another class, a DLPack object, a
 * wrong argument) goes to `slow`, which does the same in Python or says what is wrong.
 *
 * The driver's launch pushes code and data of all else out of the nearest caches. So what a call reads lies together, and
 * it calls few functions of Python. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "function_call.h"
#include "limited_api.h"
#include "launcher.h"
#include "own_table.h"

enum { MAX_DEVICES = 32, AXES = 3, EQUAL = 2 /* Py_EQ */, MAX_VALUES = 64 };
/* By place in KINDS of runtime/function_call.py. */
enum { POINTER, INTEGER, FP32, FP64, CHOICE };

/* ---- torch, filled by `connect_functions`. Functions return 0, or 1 for an exception of torch's. */

static int (*data_of)(void *tensor, void **);
static int (*dtype_of)(void *tensor, int32_t *);
static int (*device_type_of)(void *tensor, int32_t *);
static int (*device_of)(void *tensor, int32_t *);
static int (*current_stream)(int32_t device, void **);
static PyObject *tensor_type, *parameter_type;
static Py_ssize_t place_of_tensor; /* in Python's tensor: that of C++, which is what the functions take */
static int32_t gpu;                /* torch's number of the type of device */
enum { DTYPES = 64 };
static uint8_t types[DTYPES]; /* behind pointers, by torch's number of a dtype; AOTMM_TYPE_NONE: none */

/* ---- one function */

typedef struct argument {
  uint8_t kind, required;
  int8_t value, type; /* numbers of quantities; -1: none */
  uint32_t allowed;   /* types behind a pointer, as bits */
} argument;

typedef struct function_state {
  PyObject *rows, *constants, *slow, *failed; /* `rows` keeps names and choices */
  PyObject **names, **choices;                /* by argument; choices: (value, its number) of each */
  struct {
    const aotmm_own *pack; /* NULL: not bound */
    uint32_t number;
  } devices[MAX_DEVICES];
  int32_t places, count, value_count; /* arguments by place, and all; quantities that a call gives */
  argument arguments[];
} function_state;

/* The values of a call. */
typedef struct call_values {
  int64_t value[MAX_VALUES];
  uint64_t open;
  int device; /* -1: no tensor yet */
} call_values;

static int read_pointer(const argument *a, PyObject *object, call_values *c) {
  int32_t type = AOTMM_TYPE_NONE;
  void *address = NULL;
  if (object != &_Py_NoneStruct) {
    if (object->type != tensor_type && object->type != parameter_type) return 0;
    void *tensor = (char *)object + place_of_tensor;
    int32_t device_type, device, dtype;
    if (device_type_of(tensor, &device_type) || device_type != gpu || device_of(tensor, &device) ||
        (c->device >= 0 && c->device != device) || dtype_of(tensor, &dtype) || dtype < 0 || dtype >= DTYPES)
      return 0;
    type = types[dtype];
    if (type == AOTMM_TYPE_NONE || data_of(tensor, &address)) return 0;
    c->device = device;
  }
  if (!(a->allowed >> type & 1)) return 0;
  c->value[a->value] = (intptr_t)address;
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
static int read_choice(const argument *a, PyObject *choices, PyObject *object, call_values *c) {
  if (object->type != &PyLong_Type && object->type != &PyBool_Type && object->type != &PyUnicode_Type &&
      object != &_Py_NoneStruct)
    return 0;
  for (Py_ssize_t i = 0, count = PyTuple_Size(choices); i < count; i++) {
    PyObject *choice = PyTuple_GetItem(choices, i), *value = PyTuple_GetItem(choice, 0);
    if (value->type != object->type) continue; /* 1 is not true */
    const int equal = PyObject_RichCompareBool(value, object, EQUAL);
    if (equal < 0) return -1;
    if (!equal) continue;
    if (a->value >= 0) c->value[a->value] = PyLong_AsLong(PyTuple_GetItem(choice, 1));
    return 1;
  }
  return 0;
}

/* A call as Python made it: the function, which is for `slow` alone, the grid, and arguments by place and name. */
typedef struct python_call {
  PyObject *function, *grid, *const *objects, *names; /* names: NULL for none */
  Py_ssize_t count;
} python_call;

/* Set the values of a call from its first arguments; the others are left out. Return 1, 0 if Python has to look at it, -1 for
   an exception. */
static int read_arguments(const function_state *f, PyObject *const *given, int32_t first, call_values *c) {
  int read = 1;
  for (int i = 0; i < f->value_count; i++) c->value[i] = 0;
  c->open = ~0ull, c->device = -1;
  for (int32_t i = 0; i < f->count && read == 1; i++) {
    const argument *a = f->arguments + i;
    if (i >= first || !given[i]) {
      if (a->required) return 0;
      continue;
    }
    read = a->kind == POINTER  ? read_pointer(a, given[i], c)
           : a->kind == CHOICE ? read_choice(a, f->choices[i], given[i], c)
                               : read_number(a, given[i], c);
    if (a->value >= 0) c->open &= ~(1ull << a->value);
  }
  return read == 1 && (c->device < 0 || c->device >= MAX_DEVICES || !f->devices[c->device].pack) ? 0 : read;
}

/* Put the arguments of a call in their places. Return 0 if Python has to say what is wrong with them. */
static int place(const function_state *f, const python_call *p, PyObject **given) {
  memset(given, 0, (size_t)f->count * sizeof *given);
  memcpy(given, p->objects, (size_t)p->count * sizeof *given);
  for (Py_ssize_t n = 0, named = PyTuple_Size(p->names); n < named; n++) {
    PyObject *name = PyTuple_GetItem(p->names, n); /* interned, as those of the rows */
    int32_t i = 0;
    while (i < f->count && f->names[i] != name) i++;
    if (i == f->count || given[i]) return 0;
    given[i] = p->objects[p->count + n];
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

/* Return the grid that `compute` gives for the arguments and for what the kernel was compiled for; NULL for an exception. */
static PyObject *compute_grid(const function_state *f, PyObject *compute, PyObject *const *given, int32_t first,
                              uint32_t kernel) {
  PyObject *found = PyDict_Copy(PyTuple_GetItem(f->constants, kernel));
  int failed = !found;
  for (int32_t i = 0; i < first && !failed; i++)
    if (given[i]) failed = PyDict_SetItem(found, f->names[i], given[i]);
  PyObject *blocks = failed ? NULL : PyObject_CallFunctionObjArgs(compute, found, NULL);
  if (found) Py_DecRef(found);
  return blocks;
}

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
  PyObject *placed[p->names ? f->count + 1 : 1], *const *given = p->names ? placed : p->objects; /* no array is empty */
  const int32_t first = p->names ? f->count : (int32_t)p->count; /* of `given` */
  call_values c;
  int64_t grid[AXES];
  const aotmm_own *pack = NULL;
  uint32_t number = 0, kernel = 0;
  void *stream;
  int computed = 0, mine = p->count <= f->places && (!p->names || place(f, p, placed));
  if (mine) mine = read_arguments(f, given, first, &c);
  if (mine < 0) return NULL;
  if (mine) pack = f->devices[c.device].pack, number = f->devices[c.device].number;
  if (mine && p->grid != &_Py_NoneStruct && !read_grid(p->grid, grid)) {
    computed = PyCallable_Check(p->grid);
    mine = computed && !pack->choose(number, c.value, c.open, c.device, &kernel);
  }
  if (mine && computed) {
    PyObject *blocks = compute_grid(f, p->grid, given, first, kernel - pack->functions[number].first_kernel);
    if (!blocks) return NULL;
    const python_call known = {p->function, blocks, p->objects, p->names, p->count};
    const int readable = read_grid(blocks, grid);
    PyObject *done = readable ? NULL : in_python(f, &known); /* which does not compute it again */
    Py_DecRef(blocks);
    if (!readable) return done;
  }
  if (!mine || current_stream(c.device, &stream)) return in_python(f, p);
  const int64_t *blocks = p->grid == &_Py_NoneStruct ? NULL : grid;
  void *thread = PyEval_SaveThread(); /* a full launch queue blocks */
  const int status = computed ? pack->run(kernel, c.value, c.open, blocks, c.device, stream)
                              : pack->launch(number, c.value, c.open, blocks, c.device, stream);
  PyEval_RestoreThread(thread);
  if (status == AOTMM_OK) return new_reference(&_Py_NoneStruct);
  /* Python words a call that is not possible; nothing was launched. What the driver refused is not tried again. */
  if (status == AOTMM_NO_KERNEL || status == AOTMM_INVALID) return in_python(f, p);
  PyObject *device = Py_BuildValue("(i)", c.device), *raised = device ? PyObject_Call(f->failed, device, NULL) : NULL;
  if (device) Py_DecRef(device);
  return raised;
}

/* ---- types of Python */

/* An object with these calls: the class Function of runtime/functions.py is derived from its type. */
typedef struct function_object {
  PyObject head;
  function_state *state; /* NULL: not prepared */
} function_object;

/* What `function[grid]` is. */
typedef struct in_grid {
  PyObject head;
  PyObject *(*call)(PyObject *, PyObject *const *, size_t count, PyObject *names); /* of PEP 590 */
  PyObject *function, *grid;
} in_grid;

static PyObject *in_grid_type;
static in_grid *spare; /* the last one that was freed, for the next, as most live for one call; it counts its type */

static function_state *state_of(PyObject *function) { return ((function_object *)function)->state; }

static PyObject *call_in_grid(PyObject *self, PyObject *const *objects, size_t count, PyObject *names) {
  const in_grid *made = (in_grid *)self;
  return launch_call(state_of(made->function), &(python_call){made->function, made->grid, objects, names,
                                                              (Py_ssize_t)(count & ~VECTORCALL_ARGUMENTS_OFFSET)});
}

/* The same for callers that know no vectors. */
static PyObject *call_by_tuple(PyObject *self, PyObject *arguments, PyObject *names) {
  const in_grid *made = (in_grid *)self;
  PyObject *first = PyTuple_Pack(2, made->function, made->grid), *whole = first ? PySequence_Concat(first, arguments) : NULL;
  PyObject *done = whole ? PyObject_Call(state_of(made->function)->slow, whole, names) : NULL;
  if (first) Py_DecRef(first);
  if (whole) Py_DecRef(whole);
  return done;
}

/* function[grid] */
static PyObject *subscript(PyObject *function, PyObject *grid) {
  in_grid *made = spare;
  if (!state_of(function)) {
    PyErr_SetString(PyExc_RuntimeError, "the function is not prepared");
    return NULL;
  }
  if (made) spare = NULL, made->head.refcount = 1;
  else if (!(made = (in_grid *)_PyObject_GC_New(in_grid_type))) return NULL;
  made->call = call_in_grid, made->function = new_reference(function), made->grid = new_reference(grid);
  PyObject_GC_Track(made);
  return &made->head;
}

/* For the garbage collector. A cycle has another object to clear, as with tuples. */
static int visit_in_grid(PyObject *self, int (*visit)(PyObject *, void *), void *of) {
  const in_grid *made = (in_grid *)self;
  PyObject *held[] = {made->function, made->grid, self->type};
  int stop = 0;
  for (int i = 0; i < 3 && !stop; i++) stop = visit(held[i], of);
  return stop;
}

static void free_in_grid(PyObject *self) {
  const in_grid *made = (in_grid *)self;
  PyObject *type = self->type;
  PyObject_GC_UnTrack(self);
  Py_DecRef(made->function), Py_DecRef(made->grid);
  if (!spare) {
    spare = (in_grid *)self;
    return;
  }
  PyObject_GC_Del(self);
  Py_DecRef(type);
}

static void free_state(function_state *f) {
  PyObject *held[] = {f->rows, f->constants, f->slow, f->failed};
  for (size_t i = 0; i < sizeof held / sizeof *held; i++)
    if (held[i]) Py_DecRef(held[i]);
  free(f->names), free(f->choices), free(f);
}

static void free_function(PyObject *self) {
  PyObject *type = self->type;
  void (*release)(PyObject *) = PyType_GetSlot(type, TP_FREE);
  if (state_of(self)) free_state(state_of(self));
  release(self);
  Py_DecRef(type);
}

/* _prepare(rows, places, values, constants, slow, failed), once. */
static PyObject *prepare(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  const Py_ssize_t length = count == 6 ? PyTuple_Size(arguments[0]) : -1;
  if (length < 0 || state_of(self)) {
    PyErr_SetString(PyExc_RuntimeError, "_prepare takes 6 arguments, once");
    return NULL;
  }
  function_state *f = calloc(1, sizeof *f + (size_t)length * sizeof *f->arguments);
  if (f) f->names = calloc((size_t)length + 1, sizeof *f->names), f->choices = calloc((size_t)length + 1, sizeof *f->choices);
  if (!f || !f->names || !f->choices) {
    if (f) free_state(f);
    PyErr_SetString(PyExc_RuntimeError, "no memory");
    return NULL;
  }
  f->rows = new_reference(arguments[0]), f->constants = new_reference(arguments[3]);
  f->slow = new_reference(arguments[4]), f->failed = new_reference(arguments[5]);
  f->count = (int32_t)length, f->places = (int32_t)PyLong_AsLong(arguments[1]);
  f->value_count = (int)PyLong_AsLong(arguments[2]);
  for (Py_ssize_t i = 0; i < length && !PyErr_Occurred(); i++) {
    argument *a = f->arguments + i;
    PyArg_ParseTuple(PyTuple_GetItem(f->rows, i), "OBBBIBO", f->names + i, &a->kind, &a->value, &a->type, &a->allowed,
                     &a->required, f->choices + i);
  }
  if (PyErr_Occurred()) {
    free_state(f);
    return NULL;
  }
  ((function_object *)self)->state = f;
  return new_reference(&_Py_NoneStruct);
}

/* _bind(ordinal, address of a pack's aotmm_own, number of the function in it): serve a device from now on. */
static PyObject *bind_device(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  function_state *f = state_of(self);
  const long device = f && count == 3 ? PyLong_AsLong(arguments[0]) : -1;
  if (device >= 0 && device < MAX_DEVICES) {
    f->devices[device].number = (uint32_t)PyLong_AsLong(arguments[2]);
    f->devices[device].pack = PyLong_AsVoidPtr(arguments[1]);
  }
  return PyErr_Occurred() ? NULL : new_reference(&_Py_NoneStruct);
}

int add_functions(PyObject *module) {
  static PyMethodDef methods[] = {{"_prepare", {prepare}, METH_FASTCALL, NULL},
                                  {"_bind", {bind_device}, METH_FASTCALL, NULL},
                                  {0}};
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(in_grid, call), READONLY, NULL}, {0}};
  static PyType_Slot function_slots[] = {
      {TP_METHODS, methods}, {MP_SUBSCRIPT, subscript}, {TP_DEALLOC, free_function}, {0}};
  static PyType_Slot in_grid_slots[] = {
      {TP_MEMBERS, members}, {TP_CALL, call_by_tuple}, {TP_DEALLOC, free_in_grid}, {TP_TRAVERSE, visit_in_grid}, {0}};
  static PyType_Spec of_function = {"aotmm.native._direct_call.Function", sizeof(function_object), 0, BASETYPE,
                                    function_slots};
  static PyType_Spec of_in_grid = {"aotmm.native._direct_call.InGrid", sizeof(in_grid), 0,
                                   HAVE_GC | HAVE_VECTORCALL | IMMUTABLETYPE | DISALLOW_INSTANTIATION, in_grid_slots};
  PyObject *function_type = PyType_FromSpec(&of_function);
  in_grid_type = PyType_FromSpec(&of_in_grid);
  return !function_type || !in_grid_type || PyModule_AddObjectRef(module, "Function", function_type);
}

PyObject *connect_functions(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  void *const slots[] = {&data_of, &dtype_of, &device_type_of, &device_of, &current_stream};
  (void)module;
  if (count != 10) {
    PyErr_SetString(PyExc_RuntimeError, "connect_functions takes 10 arguments");
    return NULL;
  }
  for (int i = 0; i < 5; i++) {
    void *found = PyLong_AsVoidPtr(arguments[i]);
    memcpy(slots[i], &found, sizeof found);
  }
  gpu = (int32_t)PyLong_AsLong(arguments[5]), place_of_tensor = PyLong_AsLong(arguments[6]);
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments[7]); i++) {
    const long dtype = PyLong_AsLong(PyTuple_GetItem(arguments[7], i));
    if (dtype >= 0 && dtype < DTYPES) types[dtype] = (uint8_t)(i + 1);
  }
  if (PyErr_Occurred()) return NULL;
  tensor_type = new_reference(arguments[8]), parameter_type = new_reference(arguments[9]);
  return new_reference(&_Py_NoneStruct);
}
