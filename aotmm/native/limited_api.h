/* What the modules of this folder use of CPython, without Python.h: a part of the limited API of Python 3.10 (PEP 384,
   PEP 590), so that one binary serves every Python. */
#ifndef AOTMM_LIMITED_API_H
#define AOTMM_LIMITED_API_H

#include <stddef.h>
#include <stdint.h>

/* ---- CPython */

typedef intptr_t Py_ssize_t;
typedef struct PyObject {
  Py_ssize_t refcount;
  struct PyObject *type;
} PyObject;
typedef PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t); /* METH_FASTCALL */
enum { METH_VARARGS = 1, METH_KEYWORDS = 2, METH_FASTCALL = 0x80, ABI_VERSION = 3, DESCR_GET = 54 /* Py_tp_descr_get */ };
typedef struct PyMethodDef {
  const char *name;
  union {
    function call;
    PyObject *(*with_keywords)(PyObject *, PyObject *, PyObject *); /* METH_VARARGS | METH_KEYWORDS */
  };
  int flags;
  const char *doc;
} PyMethodDef;
typedef struct PyMemberDef {
  const char *name;
  int type;
  Py_ssize_t offset;
  int flags;
  const char *doc;
} PyMemberDef;
typedef struct PyType_Slot {
  int slot;
  void *function;
} PyType_Slot;
typedef struct PyType_Spec {
  const char *name;
  int size, item_size;
  unsigned flags;
  PyType_Slot *slots;
} PyType_Spec;
/* Py_mp_subscript and its like; Py_TPFLAGS_*, of which the limited API has HAVE_VECTORCALL since 3.12, and Python since 3.9;
   of PyMemberDef; PY_VECTORCALL_ARGUMENTS_OFFSET. */
enum { MP_SUBSCRIPT = 5, TP_CALL = 50, TP_DEALLOC = 52, TP_METHODS = 64, TP_TRAVERSE = 71, TP_MEMBERS = 72,
       TP_FREE = 74 };
enum { DISALLOW_INSTANTIATION = 1 << 7, IMMUTABLETYPE = 1 << 8, BASETYPE = 1 << 10, HAVE_VECTORCALL = 1 << 11,
       HAVE_GC = 1 << 14 };
enum { T_PYSSIZET = 19, READONLY = 1 };
#define VECTORCALL_ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
typedef struct PyModuleDef {
  PyObject head;
  PyObject *(*init)(void);
  Py_ssize_t index;
  PyObject *copy;
  const char *name, *doc;
  Py_ssize_t size;
  PyMethodDef *methods;
  void *slots, *traverse, *clear, *free;
} PyModuleDef;

extern PyObject _Py_NotImplementedStruct, _Py_NoneStruct, _Py_FalseStruct;
extern PyObject *PyExc_RuntimeError;
extern PyObject PyLong_Type, PyFloat_Type, PyBool_Type, PyUnicode_Type, PyTuple_Type; /* a type is an object */
PyObject *PyModule_Create2(PyModuleDef *, int version);
PyObject *PyObject_CallNoArgs(PyObject *);
PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
PyObject *PyDict_GetItemWithError(PyObject *, PyObject *key);
PyObject *PyUnicode_InternFromString(const char *);
PyObject *PyTuple_Pack(Py_ssize_t, ...);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_New(Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *); /* takes the reference */
PyObject *PySequence_Concat(PyObject *, PyObject *);
PyObject *PyDict_New(void);
PyObject *PyDict_Copy(PyObject *);
int PyDict_SetItem(PyObject *, PyObject *key, PyObject *value);
int PyCallable_Check(PyObject *);
int PyObject_RichCompareBool(PyObject *, PyObject *, int operator);
Py_ssize_t PyDict_Size(PyObject *);
PyObject *PyObject_Call(PyObject *, PyObject *tuple, PyObject *keywords);
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *self, PyObject *module);
PyObject *PyType_FromSpec(PyType_Spec *);
int PyModule_AddObjectRef(PyObject *module, const char *name, PyObject *);
PyObject *_PyObject_GC_New(PyObject *type);
void PyObject_GC_Track(void *);
void PyObject_GC_UnTrack(void *);
void PyObject_GC_Del(void *);
void *PyType_GetSlot(PyObject *type, int slot);
PyObject *Py_BuildValue(const char *, ...);
int PyArg_ParseTuple(PyObject *, const char *, ...);
long PyLong_AsLong(PyObject *);
long long PyLong_AsLongLongAndOverflow(PyObject *, int *overflow);
void *PyLong_AsVoidPtr(PyObject *);
double PyFloat_AsDouble(PyObject *);
PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
void PyErr_SetString(PyObject *, const char *);
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);

static inline PyObject *new_reference(PyObject *object) {
  Py_IncRef(object);
  return object;
}

#endif
