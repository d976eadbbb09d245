"""The torch ops `torch.ops.aotmm.*`: registers them through the native library and turns its errors into Python's."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

import aotmm
from aotmm.errors import ArtifactError
from aotmm.problem import DTYPE_CODES, DTYPES

_LIBRARY = Path(aotmm.__file__).parent / "native" / "libaotmm_torch.so"
_TYPE, _VALUE, _LAUNCHER, _RESOLVER, _TORCH = range(1, 6)
_OK, _FAILED = 0, 1
_Resolver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)

# Both spellings of every type: torch's, and the code that the ops take.
TORCH_DTYPES = {getattr(torch, row.torch): row.storage for row in DTYPES.values()}
OUTPUT_CODES = {dtype: DTYPE_CODES.index(name) for dtype, name in TORCH_DTYPES.items()}


class Ops:
    """The registered ops. There is one per process; `register` makes it."""

    def __init__(self, native: ctypes.CDLL, resolve: Callable[[int, int], int]) -> None:
        """`resolve(library, device)` is called once per library and device and answers with a launcher's address."""
        self._native = native
        self._native.aotmm_torch_bind.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self._native.aotmm_torch_init.argtypes = [ctypes.c_void_p, ctypes.c_void_p, _Resolver]
        self._native.aotmm_torch_init.restype = ctypes.c_char_p
        self._resolve = resolve
        self._callback = _Resolver(self._on_first_use)  # the native side keeps its address
        self._unresolved = threading.local()
        lacking = self._native.aotmm_torch_init(_torch_library("cpu"), _gpu_library(), self._callback)
        if lacking is not None:
            raise ArtifactError(
                f"torch {torch.__version__} does not take aotmm's ops, for want of {lacking.decode()}; "
                "aotmm needs torch 2.10 or newer"
            )

    def _on_first_use(self, library: int, device: int) -> int:
        try:
            self._native.aotmm_torch_bind(library, device, self._resolve(library, device))
        except Exception as error:  # noqa: BLE001 - it cannot pass through C, `reraise` raises it
            self._unresolved.error = error
            return _FAILED
        return _OK

    def reraise(self, cause: RuntimeError, a: object, b: object, out: object) -> NoReturn:
        """Raises what the calling thread's last op meant by the RuntimeError that torch made of it."""
        from aotmm.runtime.launcher import CTorchError, error_of  # only here: `load` should be quick

        self._native.aotmm_torch_last_error.restype = ctypes.POINTER(CTorchError)
        failure = self._native.aotmm_torch_last_error().contents
        text = failure.error.text.decode(errors="replace")
        if not text or text not in str(cause):
            raise cause  # not ours
        operands = f"{text}: a is {_describe(a)}, b is {_describe(b)}"
        if out is not None:
            operands += f", out is {_describe(out)}"
        if failure.kind == _TYPE:
            raise TypeError(operands) from None
        if failure.kind == _VALUE:
            raise ValueError(operands) from None
        if failure.kind == _LAUNCHER:
            raise error_of(failure.error) from None
        if failure.kind == _RESOLVER:
            error = self._unresolved.error
            del self._unresolved.error
            raise error from None
        raise cause


_lock = threading.Lock()
_ops: Ops | None = None


def register(resolve: Callable[[int, int], int]) -> Ops:
    """The process's ops, registered at the first call.

    Raises:
        ArtifactError: the native library is missing, or this torch does not take it.
    """
    global _ops  # noqa: PLW0603 - torch's registry is one per process too
    with _lock:
        if _ops is None:
            try:
                native = ctypes.CDLL(str(_LIBRARY))
            except OSError as error:
                raise ArtifactError(
                    f"{_LIBRARY} cannot be loaded: {error}; in a checkout, `make artifacts` builds it"
                ) from error
            _ops = Ops(native, resolve)
            torch.library.register_fake("aotmm::mm", _fake_mm)
            torch.library.register_fake("aotmm::mm.out", _fake_mm_out)
        return _ops


def _fake_mm(  # the op's schema: torch calls it by position
    a: torch.Tensor,
    b: torch.Tensor,
    activation: int = 0,  # noqa: ARG001
    out_dtype: int = -1,
    allow_tf32: bool = False,  # noqa: ARG001, FBT001, FBT002
    library: int = 0,  # noqa: ARG001
) -> torch.Tensor:
    output = DTYPES[TORCH_DTYPES[a.dtype]].output if out_dtype < 0 else DTYPE_CODES[out_dtype]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=getattr(torch, DTYPES[output].torch))


def _fake_mm_out(
    a: torch.Tensor,  # noqa: ARG001
    b: torch.Tensor,  # noqa: ARG001
    activation: int = 0,  # noqa: ARG001
    allow_tf32: bool = False,  # noqa: ARG001, FBT001, FBT002
    library: int = 0,  # noqa: ARG001
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    return out


def _torch_library(part: str) -> int:
    """Handle of one of torch's own libraries, which are loaded already; 0 if this torch has none of that name."""
    name = f"libtorch_{part}.so"
    for place in (name, str(Path(torch.__file__).parent / "lib" / name)):
        try:
            return ctypes.CDLL(place, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle  # noqa: SLF001 - what dlsym takes
        except OSError:
            continue
    return 0


def _gpu_library() -> int:
    return _torch_library("cuda") or _torch_library("hip")


def _describe(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
