"""Functions of a user's own without a step of Python: native/function_call.c, where this Python and torch allow it."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from aotmm.problem import AUTOTUNE, CONSTEXPR, DESCRIPTOR, FLOAT_TYPES, OPTIONS, POINTER_CODES, POINTER_TYPES
from aotmm.runtime.signature import Signature

KINDS = ("pointer", "integer", "fp32", "fp64", "choice")  # by number in function_call.c


class InPython:
    """Calls of one function in Python, where this Python does not take native/function_call.c, with its methods."""

    def _prepare(self, *arguments: Any) -> None:
        self._slow: Callable[..., None] = arguments[-2]

    def _bind(self, ordinal: int, address: int, number: int) -> None:
        """Do nothing: no GPU is served without Python."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return what launches the function in `grid`."""
        return partial(self._slow, self, grid)


if TYPE_CHECKING:
    Calls = InPython
else:
    try:
        from aotmm.native._direct_call import Function as Calls
    except ImportError:  # not built, or for no free-threaded Python
        Calls = InPython


def arguments_of(signature: Signature) -> tuple[Any, ...]:
    """Return what `_prepare` takes first: the arguments of a function, and the constexprs of its kernels."""
    rows = [_row(signature, name) for name in signature.names]
    rows += [_chosen(signature, name, required=False) for name in OPTIONS]
    return tuple(rows), len(signature.names), len(signature.quantities), signature.constants


def _row(signature: Signature, name: str) -> tuple[Any, ...]:
    """Return an argument as C takes it: native/function_call.h."""
    name, types = sys.intern(name), signature.types[name]  # names in calls are interned, so that C compares addresses
    first = next(iter(types))
    if first.startswith(DESCRIPTOR):  # no type is allowed in C, so that Python takes the call
        return name, KINDS.index("pointer"), _number(signature, name), -1, 0, True, ()
    if first in (CONSTEXPR, AUTOTUNE):
        return _chosen(signature, name, required=CONSTEXPR in types and name in signature.choices)
    value, type_ = (_number(signature, key) for key in (name, f"{name}.type"))
    if first in POINTER_CODES:
        allowed = sum(1 << POINTER_CODES.index(each) for each in types)
        return name, KINDS.index("pointer"), value, type_, allowed, True, ()
    return name, KINDS.index(first if first in FLOAT_TYPES else "integer"), value, -1, 0, True, ()


def _chosen(signature: Signature, name: str, *, required: bool) -> tuple[Any, ...]:
    return sys.intern(name), KINDS.index("choice"), _number(signature, name), -1, 0, required, signature.values_of(name)


def _number(signature: Signature, quantity: str) -> int:
    """Return the number of a quantity, -1 for none."""
    return signature.quantities.index(quantity) if quantity in signature.quantities else -1


def current_stream(ordinal: int) -> int:
    """Return torch's current stream of GPU `ordinal`."""
    import torch

    return int(torch.cuda.current_stream(ordinal).cuda_stream)


@cache
def connected() -> bool:
    """Return whether C may launch: whether this Python and torch support it."""
    import torch

    from aotmm.runtime import direct_call, ops

    place = direct_call.place_of_tensor()
    of_tensors = (b"data_ptr", b"dtype", b"device_type", b"device_index")
    functions = [ops.find(name) for name in (*(b"aoti_torch_get_" + name for name in of_tensors), ops.STREAM)]
    numbers = [ops.find(f"aoti_torch_{name}".encode()) for name in ("device_type_cuda", *_dtypes())]
    if Calls is InPython or place is None or None in functions or None in numbers:
        return False
    gpu, *dtypes = (ctypes.CFUNCTYPE(ctypes.c_int32)(address)() for address in numbers)
    module = importlib.import_module("aotmm.native._direct_call")
    module.connect_functions(*functions, gpu, place, tuple(dtypes), torch.Tensor, torch.nn.Parameter)
    return True


def _dtypes() -> list[str]:
    """Return torch's names of the types behind pointers, in their order."""
    return [f"dtype_{name}" for name in POINTER_TYPES.values()]
