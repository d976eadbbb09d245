"""The launcher of a pack of a user's own functions in Python: the C interface of its `launcher.h`."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

from aotmm.errors import ArtifactError, NoKernelError
from aotmm.problem import CONSTEXPR, MAX_SIZES, POINTER_CODES
from aotmm.runtime.c_interface import NO_KERNEL, OK, CError, CInterface

if TYPE_CHECKING:
    from aotmm.pack.function_table import FunctionTable
    from aotmm.pack.schema import Guard, OwnKernel
    from aotmm.runtime.tuning import CDevice

Grid = tuple[int, int, int] | None  # blocks along x, y and z; None for those of the pack's own expression
AXES = 3  # of a grid
ANY_DEVICE = -1  # instead of an ordinal
TRAILING = 2  # quantities that a call does not give
_WORDS = {"equals": "not", "multiple_of": "not a multiple of", "below": "not below", "at_least": "below"}


# aotmm_allocate and aotmm_release of launcher.h.
Allocate = CFUNCTYPE(c_void_p, c_uint64, c_int, c_void_p, POINTER(c_uint64))
Release = CFUNCTYPE(None, c_void_p)


class _CChoice(Structure):
    """aotmm_own_choice of launcher.h."""

    _fields_ = [("first", c_uint32), ("chosen", c_uint32), ("sizes", c_int64 * MAX_SIZES)]


class _COwn(Structure):
    """aotmm_own of launcher.h."""

    _fields_ = [
        ("abi", c_uint32),
        ("kernel_count", c_uint32),
        ("function_count", c_uint32),
        ("arch", c_char_p),
        ("kernels", c_void_p),
        ("functions", c_void_p),
        ("choose", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, c_int, POINTER(c_uint32))),
        ("check", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, POINTER(c_uint32))),
        ("run", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, POINTER(c_int64), c_int, c_void_p)),
        ("launch", CFUNCTYPE(c_int, c_uint32, POINTER(c_int64), c_uint64, POINTER(c_int64), c_int, c_void_p)),
        ("retune", CFUNCTYPE(c_int, POINTER(_CChoice), c_uint32)),
        ("allocate_by", CFUNCTYPE(None, Allocate, Release)),
        ("device", CFUNCTYPE(c_int, c_int, c_void_p)),
        ("preload", CFUNCTYPE(c_int, c_int)),
        ("last_error", CFUNCTYPE(POINTER(CError))),
    ]


class Values:
    """The values of one call: those of the function's quantities in order, and bits of those that are left open."""

    def __init__(self, values: Sequence[int], open_: int = 0) -> None:
        """Take 64-bit values; unsigned ones wrap around."""
        self.array = (c_int64 * len(values))(*values)
        self.open = open_


class Choice(NamedTuple):
    """What serves a call of a function.

    Attributes:
        chosen: the kernel that is launched, None if none fits.
        fitting: all that fit, in the order in which they are tried. rejected: the others, and why.
    """

    chosen: str | None
    fitting: tuple[str, ...]
    rejected: dict[str, str]

    def __str__(self) -> str:
        lines = [self.chosen or "no kernel serves this call"]
        if self.chosen not in (None, *self.fitting[:1]):
            lines[0] += f", measured faster than {self.fitting[0]} at the nearest sizes of the table"
        lines += [f"{name}: fits too" for name in self.fitting if name != self.chosen]
        return "\n  ".join([*lines, *(f"{name}: {reason}" for name, reason in self.rejected.items())])


class OwnLauncher(CInterface["OwnKernel"]):
    """The functions of one pack's library. It is thread-safe."""

    def __init__(self, library: ctypes.CDLL, arch: str, kernels: Callable[[], tuple[OwnKernel, ...]]) -> None:
        """Wrap the launcher of pack `arch` in `library`; `kernels` reads the pack's list when it is needed."""
        super().__init__(library, "aotmm_own", arch, _COwn, kernels)

    def choose(self, function: int, values: Values, ordinal: int = ANY_DEVICE) -> int:
        """Return the number of the first kernel whose guards hold, and that fits GPU `ordinal`.

        Raises:
            NoKernelError: there is none. DriverError, ValueError. For any device no GPU is needed.
        """
        kernel = c_uint32()
        status = self._c.choose(function, values.array, values.open, ordinal, byref(kernel))
        self._raise(status, values, function)
        return kernel.value

    def broken(self, values: Values, kernel: int) -> Guard | None:
        """Return the first guard of kernel number `kernel` that does not hold, None if all do. Raises ValueError."""
        number = c_uint32()
        self._raise(self._c.check(kernel, values.array, values.open, byref(number)), values)
        guards = self.kernels[kernel].guards
        return guards[number.value] if number.value < len(guards) else None

    def launch(self, function: int, values: Values, grid: Grid, ordinal: int, stream: int) -> None:
        """Launch function number `function` in `grid` blocks, or in those of the pack's own expression.

        Raises:
            NoKernelError: no kernel's guards hold, or the pack has no code for the device; the message has each
                kernel's broken guard. DriverError. ValueError: the grid is missing or not possible.
        """
        status = self._c.launch(function, values.array, values.open, _blocks(grid), ordinal, stream)
        self._raise(status, values, function)

    def run(self, kernel: int, values: Values, grid: Grid, ordinal: int, stream: int) -> None:
        """Launch kernel number `kernel` likewise. Raises as `launch`."""
        self._raise(self._c.run(kernel, values.array, values.open, _blocks(grid), ordinal, stream), values)

    def retune(self, table: FunctionTable) -> None:
        """Choose by `table` from now on, in every thread. Raises ArtifactError if it is not of these kernels."""
        numbers = {kernel.name: number for number, kernel in enumerate(self.kernels)}
        sizes = {kernel.name: len(kernel.sizes) for kernel in self.kernels}
        functions = {kernel.function for kernel in self.kernels}  # the table may have those of other packs, too
        rows = [row for row in table.measured if row.function in functions]
        wrong = [row for row in rows if sizes.get(row.first) != len(row.sizes) or row.chosen not in sizes]
        if wrong:
            raise ArtifactError(
                f"the tuning table of {table.date} is of other kernels than pack {self.arch} has: {wrong[0].first} at "
                f"{list(wrong[0].sizes)}, the fastest {wrong[0].chosen}; measure again: aotmm tune --kernel"
            )
        choices = sorted(
            (_CChoice(numbers[row.first], numbers[row.chosen], row.sizes) for row in rows), key=lambda row: row.first
        )
        self._raise(self._c.retune((_CChoice * len(choices))(*choices), len(choices)), Values(()))

    def allocate_by(self, allocate: Any, release: Any) -> None:
        """Take scratch memory from `Allocate` and `Release` objects, which have to live as long as the process."""
        self._c.allocate_by(allocate, release)

    def device(self, ordinal: int) -> CDevice:
        """Return the facts of an existing device. Raises DriverError."""
        from aotmm.runtime.tuning import CDevice  # only here: a launch needs none of that module

        facts = CDevice()
        self._raise(self._c.device(ordinal, byref(facts)), Values(()))
        return facts

    def preload(self, ordinal: int) -> None:
        """Load every kernel that fits device `ordinal`. Raises DriverError."""
        self._raise(self._c.preload(ordinal), Values(()))

    def numbers(self, function: str) -> range:
        """Return the numbers of the kernels of a function."""
        found = [number for number, kernel in enumerate(self.kernels) if kernel.function == function]
        return range(found[0], found[-1] + 1)

    def explain(self, function: int, values: Values) -> Choice:
        """Return what serves a call on any device, and why other kernels do not. Needs no GPU."""
        members = self.numbers(self._name(function))
        broken = {number: self.broken(values, number) for number in members}
        names = {number: self.kernels[number].name for number in members}
        return Choice(
            names[self.choose(function, values)] if None in broken.values() else None,
            tuple(names[number] for number, guard in broken.items() if guard is None),
            {names[n]: _words(self.kernels[n], guard, values) for n, guard in broken.items() if guard is not None},
        )

    def _name(self, function: int) -> str:
        return list(dict.fromkeys(kernel.function for kernel in self.kernels))[function]

    def _raise(self, status: int, values: Values, function: int | None = None) -> None:
        if status == OK:
            return
        if status == NO_KERNEL and function is not None:
            found = self.explain(function, values)
            if not found.fitting:  # else it is for the device
                reasons = (f"{name}: {reason}" for name, reason in found.rejected.items())
                raise NoKernelError("\n  ".join([f"no kernel of {self._name(function)} serves this call", *reasons]))
        self.fail()


def _blocks(grid: Grid) -> Any:
    return None if grid is None else (c_int64 * AXES)(*grid)


def _words(kernel: OwnKernel, guard: Guard, values: Values) -> str:
    """Return what is wrong with the value of a guard."""
    value = values.array[kernel.quantities.index(guard.value)]
    argument, _, part = guard.value.partition(".")
    row = next((row for row in kernel.arguments if row.name == argument), None)
    if part == "type" and row is not None:
        known = POINTER_CODES[value] if 0 <= value < len(POINTER_CODES) else f"of type {value}"
        return f"{argument} is {known}, it takes {row.type}"
    if row is not None and row.type == CONSTEXPR:
        return f"it is for {argument}={json.loads(row.value)!r}"
    return f"{guard.value}={value} is {_WORDS[guard.relation]} {guard.operand}"
