"""Products past torch's dispatcher or without Python: `lib.matmul`, the override's addmm, baddbmm, _scaled_mm."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

Matmul = Callable[..., Any]
"""matmul(library, a, b, out, bias, activation, batch_invariant): return the product; None if only its gradient is
missing, so that `autograd.record` must compute it; or NotImplemented if the op must."""
Scaled = Callable[..., Any]
"""scaled(library, a, b, scale_a, scale_b, bias, fast_accum, batch_invariant, output): return the product, in the dtype
of `ops.output_code`, for a kernel below autograd; or NotImplemented if the op must."""
Adder = Callable[[int, Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""adder(dim, other_forms, torchs): return a kernel of aten::addmm (2) or baddbmm (3), and of its out form. It calls
`other_forms` if there is more than plain tensors, and `torchs` for products that are left to torch."""


class DirectCall(NamedTuple):
    """The functions of native/direct_call.c."""

    matmul: Matmul
    scaled: Scaled
    adder: Adder


def connect(ours: ctypes.CDLL, torch_library: Callable[[str], ctypes.CDLL | None]) -> DirectCall:
    """Return the functions of native/direct_call.c, or `DECLINED` if this Python or torch does not support them.

    Args:
        ours: libaotmm_torch.so, initialised.
        torch_library: finds one of torch's own libraries.
    """
    place = place_of_tensor()
    if place is None:
        return DECLINED
    try:
        module = importlib.import_module("aotmm.native._direct_call")  # not built, or for no free-threaded Python
        libraries = [ours, *(torch_library(name) for name in ("torch_cpu", "torch_python", "c10"))]
        handles = [library._handle for library in libraries if library is not None]  # noqa: SLF001 - what dlsym takes
        lacking = module.connect(
            *handles,
            place,
            torch.Tensor,
            torch.nn.Parameter,
            torch.Tensor.is_neg,
            torch.Tensor.requires_grad,
            torch._C._len_torch_function_stack,  # noqa: SLF001 - no official name tells
            vars(forward_ad),
            torch._C._increment_version,  # noqa: SLF001 - half the price of the official name
        )
    except (ImportError, AttributeError):
        return DECLINED
    if lacking is not None:  # then the module is not connected, and may not be called
        return DECLINED
    inference = inference_keys(module.key_set)
    if inference is None or not isinstance(getattr(forward_ad, "_current_level", None), int):
        return DECLINED
    module.trust(*inference)
    return DirectCall(module.matmul, module.scaled, module.adder)


def place_of_tensor() -> int | None:
    """Return the byte of Python's tensors at which that of C++ begins, whose address torch's C functions take.

    It is no official interface. So it is where what `_cdata` tells lies in each of several tensors, None if nowhere.
    """
    tensors = [torch.empty(0), torch.nn.Parameter(torch.empty(2)), torch.empty(2, 3).t()]
    for place in range(object.__basicsize__, torch.Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p)):
        if all(ctypes.c_void_p.from_address(id(each) + place).value == each._cdata for each in tensors):  # noqa: SLF001
            return place
    return None


def _declined(*_: object) -> object:
    """Return NotImplemented, so that the op serves the call."""
    return NotImplemented


def _in_python(_dim: int, other_forms: Callable[..., Any], _torchs: Callable[..., Any]) -> Callable[..., Any]:
    return other_forms


DECLINED = DirectCall(_declined, _declined, _in_python)


def inference_keys(key_set: Callable[[], tuple[int, int]]) -> tuple[int, int] | None:
    """Return the dispatcher's two words in inference mode, None if they do not behave as expected.

    They are no official interface: they must be zero without a mode, nonzero in every mode, and zero again.
    """
    seen: list[tuple[int, int]] = []

    def look() -> None:
        some_mode = TorchDispatchMode()  # type: ignore[no-untyped-call]
        modes = (torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), some_mode)
        for mode in modes:
            with mode:
                seen.append(key_set())
            seen.append(key_set())

    thread = threading.Thread(target=look)  # the caller's modes are not on there
    thread.start()
    thread.join()
    in_modes, between = seen[::2], seen[1::2]
    quiet = (0, 0)
    return in_modes[0] if set(between) == {quiet} and quiet not in in_modes else None
