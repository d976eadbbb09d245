"""Timing of a case: every provider is checked, then all of them replay their graphs in turn.

Random operands have more sets than the L2 cache holds, and a graph has many products, so that no provider profits from
launch costs or a warm cache. Every round has all providers, so that none profits from drifting clocks. The GPU rests
before each replay, so that none runs at the clock that another one's power allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from aotmm.bench.cases import Work
from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.bench.results import Row, Times
from aotmm.timing.check import Truth, truth
from aotmm.timing.graph import REST, idle, recorded
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case

_MOST_LAUNCHES = 1024  # in one graph
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """Time spent on one case.

    Attributes:
        graph_us: of one replay, which has to be long against the events' resolution and the launch of a graph.
        total_us: of all replays of one provider, without their rests, as far as the least and the most rounds allow.
        rounds: their least and largest number, after a warm-up round.
        isolated: whether single calls are timed too.
    """

    graph_us: float
    total_us: float
    rounds: tuple[int, int]
    isolated: bool


THOROUGH = Effort(2000.0, 20000.0, (5, 11), isolated=True)
# For thousands of cases, each of which counts little. Of replays of 0.5 to 4 ms, each after a rest twice as long, those
# of 4 ms gave one plan's times the least spread (docs/experiments/hopper-kernels.md, "Rests").
BRIEF = Effort(4000.0, 0.0, (5, 5), isolated=False)


class Stopwatch(Protocol):
    """Timer of calls."""

    def record(self, call: Call, sets: Sequence[Operands], launches: int) -> Callable[[], float]:
        """Record `launches` calls over `sets` in turn; the returned function runs them all: microseconds per call."""

    def alone(self, call: Call, operands: Operands) -> float:
        """Return microseconds from the call, with an idle GPU, to its end."""


class GraphStopwatch:
    """Timer of CUDA graphs by events, and of single calls by the wall clock."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Record on `stream`, which is not the default one; by default on a new one."""
        self._stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, call: Call, sets: Sequence[Operands], launches: int) -> Callable[[], float]:
        """Record as `Stopwatch.record`."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            call(sets[0])  # outside the graph: loads and allocates once
            torch.cuda.synchronize()
            replay = recorded(call, [sets[number % len(sets)] for number in range(launches)])
        return lambda: replay() * 1e-3

    def alone(self, call: Call, operands: Operands) -> float:
        """Time as `Stopwatch.alone`."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(operands)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6


@dataclass(frozen=True, slots=True)
class _Ready:
    """A provider whose product is right: its call, its graph and the number of products in that."""

    call: Call
    run: Callable[[], float]
    launches: int
    error: float
    note: str


def measure(
    work: Work,
    providers: Sequence[Provider],
    pool: Pool,
    stopwatch: Stopwatch,
    *,
    cache_bytes: int,
    effort: Effort = THOROUGH,
) -> Row:
    """Return the times of one case, on operands from the pool, as `compare`."""
    sets = pool.operands(work.case, cache_bytes)
    with precision(work.case):
        return Row(work.case, work.sweeps, *compare(work.case, sets, providers, stopwatch, effort))


@contextmanager
def precision(case: Case) -> Iterator[None]:
    """Let torch, and aotmm with it, multiply fp32 operands in tf32 if the case's type is that, and not otherwise."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def compare(
    case: Case, sets: Sequence[Operands], providers: Sequence[Provider], stopwatch: Stopwatch, effort: Effort
) -> tuple[dict[str, Times], dict[str, str]]:
    """Return the times by provider, and why others have none.

    A provider that cannot run, that fails, or whose product is wrong is not timed.
    """
    checked = (sets[0], sets[-1])
    truths = [(x, truth(x.a, x.b, x.out.dtype, x.epilogue, x.offs, x.block_scales)) for x in checked]
    ready: dict[str, _Ready] = {}
    not_run: dict[str, str] = {}
    for provider in providers:
        try:
            ready[provider.name] = _prepared(provider, case, sets, truths, stopwatch, effort.graph_us)
        except NotRunError as reason:
            not_run[provider.name] = str(reason)
        except Exception as failure:  # noqa: BLE001 - whatever a library raises, it is not timed and the others are
            not_run[provider.name] = f"failed: {type(failure).__name__}: {failure}"
    del truths
    graph_us = in_turn({name: (row.run, row.launches) for name, row in ready.items()}, effort)
    single = tuple(x.name for x in providers if effort.isolated and x.isolated and x.name in ready)
    isolated_us: dict[str, list[float]] = {name: [] for name in ready}
    for number, order in enumerate(orders(single, _singles(graph_us, effort))):
        for name in order:
            isolated_us[name].append(stopwatch.alone(ready[name].call, sets[number % len(sets)]))
    times = {
        name: Times(_rounded(graph_us[name]), _rounded(isolated_us[name]), row.launches, row.error, row.note)
        for name, row in ready.items()
    }
    return times, not_run


def _prepared(
    provider: Provider,
    case: Case,
    sets: Sequence[Operands],
    truths: Sequence[tuple[Operands, Truth]],
    stopwatch: Stopwatch,
    graph_us: float,
) -> _Ready:
    """Return the provider, checked by the results of a graph over all `sets`.

    Args:
        truths: some of the sets, and the truths of their results.

    Raises:
        NotRunError: it cannot run, or its product is wrong.
    """
    call = provider.prepare(case, sets)
    made = {id(operands): operands for operands in sets}

    def kept(operands: Operands) -> None:
        result = call(operands)
        if isinstance(result, torch.Tensor):
            made[id(operands)] = replace(operands, out=result)

    run = stopwatch.record(kept, sets, len(sets))
    for operands in made.values():
        operands.unset()
    estimate = run()
    largest = max(true.error(made[id(operands)].out, provider.roundings) for operands, true in truths)
    if not largest <= 1:
        raise NotRunError(f"wrong: the largest error is {largest:.3g} times what is allowed")
    launches = launches_for(estimate, len(sets), graph_us)
    if launches != len(sets):
        run = stopwatch.record(call, sets, launches)
    return _Ready(call, run, launches, largest, provider.describe(case, sets[0]))


def repeated(stopwatch: Stopwatch, call: Call, sets: Sequence[Operands]) -> tuple[Callable[[], float], int]:
    """Return a recording of as many calls as one replay shall have, and their number."""
    launches = launches_for(stopwatch.record(call, sets, len(sets))(), len(sets))
    return stopwatch.record(call, sets, launches), launches


def launches_for(us: float, sets: int, graph_us: float = THOROUGH.graph_us) -> int:
    """Return the number of products of `us` microseconds for one graph: whole turns over the sets."""
    turns = math.ceil(min(graph_us / max(us, 0.1), _MOST_LAUNCHES) / sets)
    return max(1, turns) * sets


def in_turn(runs: Mapping[str, tuple[Callable[[], float], int]], effort: Effort = THOROUGH) -> dict[str, list[float]]:
    """Return microseconds per product of every run, one figure per round after a warm-up round.

    There are as many rounds as the slowest one's time allows.

    Args:
        runs: functions from `Stopwatch.record`, and the numbers of their products.
    """
    if not runs:
        return {}
    longest = max(run() * launches for run, launches in runs.values())
    rounds = max(effort.rounds[0], min(effort.rounds[1], int(effort.total_us / longest)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for order in orders(tuple(runs), rounds):
        for name in order:
            idle(REST * longest * 1e3)
            samples[name].append(runs[name][0]())
    return samples


def orders(names: tuple[str, ...], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of each round: two names alternate; of more, each comes after every other equally often.

    The previous run decides clocks and temperature, so that none may always follow the same one. Source: Williams 1949,
    designs balanced for residual effects (balanced after as many rounds as names, twice as many if that is odd).
    """
    count = len(names)
    zigzag = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]  # 0, n - 1, 1, n - 2, ...
    for number in range(rounds):
        shift = number if count > _PAIR else 0
        order = tuple(names[(index + shift) % count] for index in zigzag)
        yield order[::-1] if count % 2 and number // count % 2 else order


def _singles(graph_us: dict[str, list[float]], effort: Effort) -> int:
    """Return the number of single calls of each provider that fit into the time."""
    slowest = max((max(times) for times in graph_us.values()), default=0.0)
    return max(effort.rounds[0], min(25, int(effort.total_us / (slowest + 30))))


def _rounded(samples: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(sample, 3) for sample in samples)
