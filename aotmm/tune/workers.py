"""Measuring on many GPUs at once, where kernels may hang: a pool of processes, one per GPU.

A kernel that never ends cannot be stopped from within its process, and after a fault every later call there fails. So
only worker processes (`aotmm.workers.pool`) touch a GPU. The parent gives them cases. It leaves out the config that a
process was running when it was lost, and the whole family at its second such config.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple, Protocol

from aotmm.errors import AotmmError
from aotmm.pack.table import Sample
from aotmm.runtime.tuning import CDevice
from aotmm.timing.problems import Case
from aotmm.workers.pool import Heartbeat, Timeouts, Worker, WorkerDiedError, WorkerPool

_STRIKES = 2  # configs of one family that hang before all of it is left out
TIMEOUTS = Timeouts()


class Running(NamedTuple):
    """The next launch of a measurer: a config of a family, and the launch in words."""

    family: str
    config_name: str
    detail: str


class Outcome(NamedTuple):
    """All samples of one case, and the configs whose results are wrong there, with their faults."""

    samples: tuple[Sample, ...]
    wrong: dict[str, str]


class Measurer(Protocol):
    """A process's measurer: it has one GPU and measures one case after another."""

    @property
    def device(self) -> CDevice:
        """Return the facts of the GPU."""

    def measure(self, case: Case, left_out: frozenset[str], heartbeat: Callable[[Running], None]) -> Outcome:
        """Time every config and family that is not in `left_out`, and call `heartbeat` before each launch."""


class Done(NamedTuple):
    """A case was measured."""

    case: Case
    outcome: Outcome


class LeftOut(NamedTuple):
    """A config or family was left out."""

    name: str
    why: str


def measuring(make: Callable[[], Measurer]) -> Worker:
    """Return a process's worker, with a measurer of `make`; a task is a case with `left_out`, or asks the device."""
    measurer = make()

    def work(task: tuple[Case, frozenset[str]] | None, heartbeat: Heartbeat) -> Outcome | CDevice:
        return measurer.device if task is None else measurer.measure(*task, heartbeat)

    return work


def device_of(pool: WorkerPool) -> CDevice:
    """Return the facts of a pool's GPUs, all of one model. Raises AotmmError if its processes cannot start."""
    try:
        found: CDevice = pool.submit(None).result()
    except WorkerDiedError as error:
        raise AotmmError(f"a measuring process failed before its first case: {error.why}") from error
    return found


def measure_all(
    cases: Sequence[Case],
    pool: WorkerPool,
    *,
    left_out: frozenset[str] = frozenset(),
    deadline: float = float("inf"),
    stall_s: float = TIMEOUTS.stall_s,
) -> Iterator[Done | LeftOut]:
    """Measure `cases` with a pool whose worker factory is `measuring`, and yield each event as it happens.

    Args:
        left_out: configs and families not to run.
        deadline: no case is begun after it (`time.monotonic`).
        stall_s: seconds that the pool may take for the next case.

    Raises:
        AotmmError: a process cannot start, or ends while it runs no kernel, or nothing happens for too long.
    """
    book = _Book(set(left_out), {})
    waiting, running = deque(cases), dict[Future[Any], Case]()
    while True:
        while waiting and len(running) < max(1, pool.places()) and time.monotonic() < deadline:
            case = waiting.popleft()
            running[pool.submit((case, frozenset(book.left_out)))] = case
        if not running:
            return
        done, _ = wait(running, timeout=stall_s, return_when=FIRST_COMPLETED)
        if not done:
            raise AotmmError(f"no shape was measured for {stall_s:g} s; GPUs of the pool now: {pool.places()}")
        for future in done:
            case = running.pop(future)
            try:
                outcome: Outcome = future.result()
            except WorkerDiedError as error:
                yield from book.lost(case, error)
                waiting.appendleft(case)
                continue
            yield Done(case, outcome)
            for config_name, why in outcome.wrong.items():
                yield from book.leave_out(config_name, f"its result is wrong on {case}: {why}")


class _Book(NamedTuple):
    """Configs and families left out so far, and the number of configs of each family that hung or failed."""

    left_out: set[str]
    strikes: dict[str, int]

    def lost(self, case: Case, error: WorkerDiedError) -> Iterator[LeftOut]:
        """Leave out the config that was running when a process was lost."""
        if error.last is None:
            raise AotmmError(f"a measuring process failed before the first kernel of {case}: {error.why}") from error
        family, config_name, detail = error.last
        yield from self.leave_out(config_name, f"{error.why}, on {case}, {detail}")
        self.strikes[family] = self.strikes.get(family, 0) + 1
        if self.strikes[family] >= _STRIKES:
            yield from self.leave_out(family, f"{_STRIKES} of its configs hang or fail")

    def leave_out(self, name: str, why: str) -> Iterator[LeftOut]:
        """Leave out a config or family, once."""
        if name not in self.left_out:
            self.left_out.add(name)
            yield LeftOut(name, why)
