"""The CUDA driver by itself, for images that no launcher would launch here: in torch's context, on device 0."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotmm.pack.schema import AnyKernel

MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute


class CallError(Exception):
    """A driver call that failed, with the driver's number."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code}")
        self.call, self.code = call, code


@dataclass(frozen=True)
class Function:
    """A kernel that was loaded."""

    kernel: AnyKernel
    library: ctypes.c_void_p
    handle: ctypes.c_void_p

    def launch(self, programs: int, parameters: bytes) -> None:
        """Launches it on torch's current stream."""
        block = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = [ctypes.addressof(block) + item.offset for item in self.kernel.parameters]
        self._launch((programs, 1, 1), pointers, torch.cuda.current_stream().cuda_stream)

    def launch_values(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """Launches it with these ctypes values as its parameters, in order, on the default stream."""
        self._launch(grid, [ctypes.addressof(value) for value in values], 0)

    def _launch(self, grid: tuple[int, int, int], pointers: list[int], stream: int) -> None:
        _call(
            "cuLaunchKernel",
            self.handle,
            *(ctypes.c_uint(n) for n in (*grid, self.kernel.threads, 1, 1, self.kernel.shared_bytes)),
            ctypes.c_void_p(stream),
            (ctypes.c_void_p * len(pointers))(*pointers),
            None,
        )

    def unload(self) -> None:
        """Gives it back; nothing of it may run any more."""
        _call("cuLibraryUnload", self.library)


def load(kernel: AnyKernel, image: bytes) -> Function:
    """`kernel` from `image`, a cubin or PTX as a string that ends in 0. Raises CallError."""
    _enter()
    library, handle = ctypes.c_void_p(), ctypes.c_void_p()
    none = ctypes.c_void_p()
    _call("cuLibraryLoadData", ctypes.byref(library), image, none, none, 0, none, none, 0)
    try:
        _call("cuLibraryGetKernel", ctypes.byref(handle), library, kernel.symbol.encode())
        if kernel.shared_bytes:
            _call("cuKernelSetAttribute", MAX_DYNAMIC_SHARED, kernel.shared_bytes, handle, 0)
    except CallError:
        _call("cuLibraryUnload", library)
        raise
    return Function(kernel, library, handle)


def synchronize() -> None:
    """Waits for all that was launched. Raises CallError if one of them failed; then nothing runs here any more."""
    _call("cuCtxSynchronize")


def _enter() -> None:
    """Makes torch's context, the primary one, current in this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)


def _call(name: str, *arguments: object) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise CallError(name, code)
