"""The launcher of a pack of a user's own functions in Python: the C interface of its `launcher.h`."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cached_property
from typing import TYPE_CHECKING

from aotmm.errors import ArtifactError, NoKernelError
from aotmm.problem import ABI, CONSTEXPR, POINTER_CODES
from aotmm.runtime.launcher import NO_KERNEL, OK, CError, error_of, of_library
from aotmm.runtime.tuning import CDevice

if TYPE_CHECKING:
    from aotmm.pack.schema import Guard, OwnKernel

AXES = 3  # of a grid
TRAILING = 2  # quantities that a call does not give
_WORDS = {"equals": "not", "multiple_of": "not a multiple of", "below": "not below", "at_least": "below"}


class _COwn(Structure):
    """aotmm_own of launcher.h."""

    _fields_ = [
        ("abi", c_uint32),
        ("kernel_count", c_uint32),
        ("function_count", c_uint32),
        ("arch", c_char_p),
        ("kernels", c_void_p),
        ("functions", c_void_p),
        ("choose", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, POINTER(c_uint32))),
        ("check", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, POINTER(c_uint32))),
        ("launch", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, POINTER(c_int64), c_int, c_void_p)),
        ("device", CFUNCTYPE(c_int, c_int, POINTER(CDevice))),
        ("preload", CFUNCTYPE(c_int, c_int)),
        ("last_error", CFUNCTYPE(POINTER(CError))),
    ]


class Values:
    """The values of one call: those of the function's quantities in order, and bits of those that are left open."""

    def __init__(self, values: Sequence[int], open_: int = 0) -> None:
        """Take 64-bit values; unsigned ones wrap around."""
        self.array = (c_int64 * len(values))(*values)
        self.open = open_


class OwnLauncher:
    """The functions of one pack's library. It is thread-safe."""

    def __init__(self, library: ctypes.CDLL, arch: str, kernels: Callable[[], tuple[OwnKernel, ...]]) -> None:
        """Wrap the launcher of pack `arch` in `library`; `kernels` reads the pack's list when it is needed."""
        entry = getattr(library, f"aotmm_own_{arch}", None)
        if entry is None:
            raise ArtifactError(f"the library of pack {arch} has no aotmm_own_{arch}; build the pack again")
        entry.restype = POINTER(_COwn)
        self._library = library  # stays loaded as long as its functions are held
        self._c = entry().contents
        self._read_kernels = kernels
        if self._c.abi != ABI:
            raise ArtifactError(
                f"the library of pack {arch} has ABI {self._c.abi}, this version of aotmm {ABI}; build the pack again"
            )

    @cached_property
    def kernels(self) -> tuple[OwnKernel, ...]:
        """Return the kernels by number. Raises ArtifactError if the list is not that of the library."""
        return of_library(self._read_kernels(), self._c.kernel_count, self._c.arch)

    def choose(self, function: int, values: Values) -> OwnKernel:
        """Return the first kernel whose guards hold; needs no GPU. Raises NoKernelError, ValueError."""
        kernel = c_uint32()
        self._raise(self._c.choose(function, values.array, values.open, byref(kernel)), values)
        return self.kernels[kernel.value]

    def broken(self, values: Values, kernel: int) -> Guard | None:
        """Return the first guard of kernel number `kernel` that does not hold, None if all do. Raises ValueError."""
        number = c_uint32()
        self._raise(self._c.check(kernel, values.array, values.open, byref(number)), values)
        guards = self.kernels[kernel].guards
        return guards[number.value] if number.value < len(guards) else None

    def launch(
        self, function: int, values: Values, grid: tuple[int, int, int] | None, ordinal: int, stream: int
    ) -> None:
        """Launch function number `function` in `grid` blocks, or in those of the pack's own expression.

        Raises:
            NoKernelError: no kernel's guards hold, or the pack has no code for the device; the message has each
                kernel's broken guard. DriverError. ValueError: the grid is missing or not possible.
        """
        blocks = None if grid is None else (c_int64 * AXES)(*grid)
        status = self._c.launch(function, values.array, values.open, blocks, ordinal, stream)
        if status != OK:
            self._raise(status, values, function)

    def preload(self, ordinal: int) -> None:
        """Load every kernel that fits device `ordinal`. Raises DriverError."""
        self._raise(self._c.preload(ordinal), Values(()))

    def reasons(self, function: str, values: Values) -> list[str]:
        """Return why each kernel of a function that does not serve a call does not, in words."""
        found = []
        for number, kernel in enumerate(self.kernels):
            if kernel.function == function and (guard := self.broken(values, number)) is not None:
                found.append(f"{kernel.name}: {_words(kernel, guard, values)}")
        return found

    def _raise(self, status: int, values: Values, function: int | None = None) -> None:
        if status == OK:
            return
        error = error_of(self._c.last_error().contents)
        if status == NO_KERNEL and function is not None:
            name = list(dict.fromkeys(kernel.function for kernel in self.kernels))[function]
            reasons = self.reasons(name, values)
            if reasons:
                raise NoKernelError("\n  ".join([f"no kernel of {name} serves this call", *reasons]))
        raise error


def _words(kernel: OwnKernel, guard: Guard, values: Values) -> str:
    """Return what is wrong with the value of a guard."""
    value = values.array[kernel.quantities.index(guard.value)]
    argument, _, is_type = guard.value.partition(".")
    row = next((row for row in kernel.arguments if row.name == argument), None)
    if is_type and row is not None:
        known = POINTER_CODES[value] if 0 <= value < len(POINTER_CODES) else f"of type {value}"
        return f"{argument} is {known}, it takes {row.type}"
    if row is not None and row.type == CONSTEXPR:
        return f"it is for {argument}={json.loads(row.value)!r}"
    return f"{guard.value}={value} is {_WORDS[guard.relation]} {guard.operand}"
