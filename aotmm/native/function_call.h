/* Functions of a user's own in the module _direct_call (function_call.c). Arguments are Python's, by METH_FASTCALL. */
#ifndef AOTMM_FUNCTION_CALL_H
#define AOTMM_FUNCTION_CALL_H

#include "limited_api.h"

/* Add the type Function to the module; return whether that failed. Its objects have
 * _prepare(rows, places, values, constants, slow, failed), once:
 *   rows       of each argument and then of each option: (name, kind, number of its value, number of its type, bits of the
 *              types it may have, whether a call must have it, ((value, number), ...)); -1 for no number
 *   places     arguments that may be given by place
 *   values     quantities that a call gives
 *   constants  of each kernel: a dict of what it was compiled for, for grids that are computed
 *   slow       launch(function, grid, *arguments, **named), in Python
 *   failed     failed(ordinal) raises the last error of that GPU's launcher
 * _bind(ordinal, address of aotmm_own, number of the function): launch without Python on that GPU, from now on.
 * function[grid](*arguments, **named) launches; grid None: in the pack's own. */
int add_functions(PyObject *module);

/* connect_functions(addresses of torch's functions that tell a tensor's data, dtype, type of device and device, and the current
   stream; torch's number of the type of device; the byte of a Python tensor at which that of C++ begins; torch's numbers of
   the types behind pointers, in their order; Tensor, Parameter), once before. */
PyObject *connect_functions(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif
