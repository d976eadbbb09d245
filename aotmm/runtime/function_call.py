"""Functions of a user's own without a step of Python: native/function_call.c, where this Python and torch allow it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from aotmm.problem import AUTOTUNE, CONSTEXPR, DESCRIPTOR, FLOAT_TYPES, POINTER_CODES
from aotmm.runtime.signature import OPTIONS, Signature

KINDS = ("pointer", "integer", "fp32", "fp64", "choice")  # by number in function_call.c


class FunctionCall(NamedTuple):
    """Calls of one function.

    Attributes:
        launch: (function, grid, *arguments, **named), on a GPU that is bound in C, on any other by `slow`.
        in_grid: (function, grid) -> what launches arguments so.
        bind: (ordinal, address of a pack's table of functions, number of the function there): serve a GPU.
    """

    launch: Callable[..., None]
    in_grid: Callable[[Any, Any], Callable[..., None]]
    bind: Callable[[int, int, int], None]


def of(signature: Signature, slow: Callable[..., None], failed: Callable[[int], None]) -> FunctionCall:
    """Return the calls of a function.

    Args:
        signature: its arguments. slow: launches in Python, all that C does not take.
        failed: raises the last error of a GPU's launcher.
    """
    module = _module()
    if module is None:
        return FunctionCall(slow, partial(partial, slow), lambda _ordinal, _address, _number: None)
    rows = [_row(signature, name) for name in signature.names]
    rows += [_chosen(signature, name, required=False) for name in OPTIONS]
    counts = len(signature.names), len(signature.quantities)
    return FunctionCall(*module.function(tuple(rows), *counts, signature.constants, slow, failed))


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
def _module() -> Any:
    """Return the module of native/function_call.c, connected; None if this Python or torch does not support it."""
    import torch

    from aotmm.runtime import direct_call, ops

    stream = ops.find(ops.STREAM)
    try:
        module = importlib.import_module("aotmm.native._direct_call")  # not built, or for no free-threaded Python
        exchange = torch.Tensor.__dlpack_c_exchange_api__
    except (ImportError, AttributeError):
        return None
    if stream is None:
        return None
    module.connect_functions(exchange, stream, *direct_call.DEVICES, torch.Tensor, torch.nn.Parameter)
    return module
