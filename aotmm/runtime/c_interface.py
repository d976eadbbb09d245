"""What the launchers of products and functions have in common in Python: opening the C interface, and its errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char, c_int32, c_void_p
from functools import cached_property
from typing import Generic, NoReturn, TypeVar

from aotmm.errors import AotmmError, ArtifactError, DriverError, NoKernelError
from aotmm.problem import ABI

OK, INVALID, NO_KERNEL, NO_DRIVER, DRIVER, NO_ORDER = range(6)  # aotmm_status
_AnyKernel = TypeVar("_AnyKernel")


class CError(Structure):
    """aotmm_error."""

    _fields_ = [
        ("status", c_int32),
        ("code", c_int32),
        ("device", c_int32),
        ("call", c_char * 40),
        ("text", c_char * 512),
    ]


class CInterface(Generic[_AnyKernel]):
    """The C functions of one pack's library, and its kernels. It is thread-safe."""

    def __init__(
        self,
        library: ctypes.CDLL,
        symbol: str,
        arch: str,
        table: type[Structure],
        kernels: Callable[[], tuple[_AnyKernel, ...]],
    ) -> None:
        """Take the `table` of C functions, whose first field is an ABI, that `symbol`_`arch` of `library` returns.

        `kernels` reads the pack's list when it is needed.

        Raises:
            ArtifactError: the library lacks it, or has it of another version.
        """
        self._library = library  # stays loaded as long as its functions are held
        entry = getattr(library, f"{symbol}_{arch}", None)
        if entry is None:
            raise ArtifactError(f"the library of pack {arch} has no {symbol}_{arch}; build the pack again")
        entry.restype = POINTER(table)
        self._table = entry()
        self._c = self._table.contents
        if self._c.abi != ABI:
            raise ArtifactError(
                f"the library of pack {arch} has ABI {self._c.abi}, this version of aotmm {ABI}; build the pack again"
            )
        self._read_kernels = kernels

    @cached_property
    def kernels(self) -> tuple[_AnyKernel, ...]:
        """Return the kernels by number. Raises ArtifactError if the manifest's list is not that of the library."""
        kernels, count = self._read_kernels(), self._c.kernel_count
        if len(kernels) != count:
            raise ArtifactError(
                f"the manifest of pack {self.arch} has {len(kernels)} kernels, its library {count}; "
                "build the pack again"
            )
        return kernels

    @property
    def arch(self) -> str:
        """Return the arch of the pack."""
        return bytes(self._c.arch).decode()

    @property
    def address(self) -> int:
        """Return the address of the C function table, for other libraries in C."""
        return ctypes.cast(self._table, c_void_p).value or 0

    def fail(self) -> NoReturn:
        """Raise the last failure of this thread."""
        raise error_of(self._c.last_error().contents)


def error_of(error: CError) -> AotmmError | ValueError:
    """Return the exception for a failure that the C side recorded."""
    text = error.text.decode(errors="replace")
    if error.status == INVALID:
        return ValueError(text)
    if error.status in (NO_KERNEL, NO_ORDER):
        return NoKernelError(text)
    return DriverError(text, call=error.call.decode(), code=error.code, device=error.device)
