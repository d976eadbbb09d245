"""Time the variants of a user's own functions that fit a call; each is checked against the first before it counts."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import aotmm
from aotmm.errors import NoKernelError, SpecError
from aotmm.pack.function_table import FunctionTable, Measured, Time
from aotmm.runtime.function_call import current_stream
from aotmm.runtime.functions import Function, blocks_of
from aotmm.runtime.own import OwnLauncher, Values
from aotmm.runtime.pack import Pack
from aotmm.runtime.signature import Signature
from aotmm.timing.graph import recorded
from aotmm.tune.race import in_turn

_LOOK_NS, _TURN_NS = 150_000, 400_000  # of one replay, as of products
_LEAST_NS = 2_000  # shorter than any launch
_MOST_LAUNCHES = 512
_CONTENDER = 1.2  # times the best, up to which variants are timed in turn
_ROUNDS = 5


class Left(NamedTuple):
    """A variant that was not timed, and why."""

    kernel: str
    reason: str


class Calls:
    """Stands for a function while its calls are measured: each call of it is a row of the table.

    Attributes:
        measured: the rows. left: variants that gave other results than the first that fits.
    """

    def __init__(self, function: Function, pack: Pack, record: Callable[..., Callable[[], float]] = recorded) -> None:
        """Measure `function` in `pack`; `record` makes launches on the current stream a graph, and times that."""
        self._function, self._record = function, record
        self._launcher: OwnLauncher = pack.own_launcher
        self._number = pack.head.functions.index(function.name)
        self._kernels = self._launcher.numbers(function.name)
        self._signature = Signature(function.name, [self._launcher.kernels[number] for number in self._kernels])
        self.measured: list[Measured] = []
        self.left: list[Left] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return what measures a call in `grid`."""
        return partial(self._measure, grid)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Measure a call in the pack's own grid."""
        self._measure(None, *arguments, **named)

    def _measure(self, grid: Any, *arguments: Any, **named: Any) -> None:
        values, given = self._signature.bound(arguments, named)
        ordinal = self._function.device_of((*arguments, *named.values())).index or 0
        first = self._launcher.choose(self._number, values, ordinal)
        fitting = [number for number in self._kernels if self._launcher.broken(values, number) is None]
        fitting.remove(first)
        launches: dict[int, Callable[[], None]] = {
            number: partial(self._launch, number, values, self._blocks(number, grid, given), ordinal)
            for number in (first, *fitting)
        }
        right = self._right(launches, [value for value in given.values() if isinstance(value, torch.Tensor)])
        times = self._race({number: launches[number] for number in right})
        kernel = self._launcher.kernels[first]
        sizes = tuple(values.array[kernel.quantities.index(name)] for name in kernel.sizes)
        rows = tuple(Time(self._launcher.kernels[number].name, max(1, round(ns))) for number, ns in times.items())
        self.measured.append(Measured(self._function.name, kernel.name, sizes, rows))

    def _blocks(self, number: int, grid: Any, given: dict[str, Any]) -> tuple[int, int, int] | None:
        constants = self._signature.constants[number - self._kernels.start]
        return blocks_of(self._function.name, grid(given | constants) if callable(grid) else grid)

    def _launch(self, number: int, values: Values, blocks: Any, ordinal: int, _turn: int = 0) -> None:
        self._launcher.run(number, values, blocks, ordinal, current_stream(ordinal))

    def _right(self, launches: dict[int, Callable[[], None]], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the kernels whose results are those of the first, from equal operands, up to roundings."""
        before = [tensor.clone() for tensor in tensors]
        want: list[torch.Tensor] = []
        found = []
        for number, launch in launches.items():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            try:
                launch()
                want = want or [tensor.clone() for tensor in tensors]
                torch.testing.assert_close(list(tensors), want, equal_nan=True)
            except (NoKernelError, AssertionError) as error:  # too much shared memory, or another result
                self.left.append(Left(self._launcher.kernels[number].name, str(error).splitlines()[0]))
            else:
                found.append(number)
        return found

    def _race(self, launches: dict[int, Callable[[], None]]) -> dict[int, float]:
        """Return the ns per launch of each: of the fastest in turn, of the others by one replay."""
        looks = {number: self._replay(launch, _LOOK_NS, _LOOK_NS)() for number, launch in launches.items()}
        looks = {number: self._replay(launch, looks[number], _LOOK_NS)() for number, launch in launches.items()}
        racing = [number for number, ns in looks.items() if ns <= _CONTENDER * min(looks.values())]
        times = in_turn([self._replay(launches[number], looks[number], _TURN_NS) for number in racing], _ROUNDS)
        return looks | dict(zip(racing, times, strict=True))

    def _replay(self, launch: Callable[..., None], expected_ns: float, replay_ns: float) -> Callable[[], float]:
        """Return what replays so many launches that they take about `replay_ns`: ns per launch."""
        count = max(1, min(_MOST_LAUNCHES, round(replay_ns / max(expected_ns, _LEAST_NS))))
        return self._record(lambda _turn: launch(), range(count))


def tune(lib: Any, pack: Pack, names: Sequence[str], file: Path) -> tuple[FunctionTable, list[Left]]:
    """Return the table of the calls that `file` makes, and the variants that were left out.

    The file has a Python function of the name of each function of `names`. It is called with what stands for that, and
    calls it as it likes: each call is measured.

    Raises:
        SpecError: the file has no such function, or makes no call. TypeError, ValueError, NoKernelError: of a call.
    """
    module = runpy.run_path(str(file))
    rows: list[Measured] = []
    left: list[Left] = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for name in names:
        if not callable(module.get(name)):
            raise SpecError(f"{file} has no function {name}(launch), which makes the calls that are measured")
        calls = Calls(lib[name], pack)
        with torch.cuda.stream(stream):
            module[name](calls)
        if not calls.measured:
            raise SpecError(f"{file}: {name} made no call of what it was given")
        rows += calls.measured
        left += calls.left
    unique = {(row.function, row.first, row.sizes): row for row in rows}
    today = datetime.now(tz=timezone.utc).date().isoformat()
    made_by = (pack.arch, torch.cuda.get_device_name(), torch.__version__, aotmm.__version__, today)
    return FunctionTable(*made_by, tuple(unique.values())), left
