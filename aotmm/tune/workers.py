"""Measuring in processes that may hang: one worker per GPU, watched, killed and replaced where it stops telling.

A kernel that never ends cannot be stopped from within its process, and a fault ends every later call there. So what
touches a GPU is in workers; the parent deals cases out to them and leaves out the schedule that a worker was running
when it fell silent or died, and the whole family at its second such schedule.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol

from aotmm.errors import AotmmError
from aotmm.table import Sample
from aotmm.tune.cases import Case

_STRIKES = 2  # schedules of one family that hang before all of it is left out
_FAREWELL_S = 5.0


class Running(NamedTuple):
    """What a measurer is about to run: a schedule of a family, with words that tell which launch."""

    family: str
    schedule: str
    detail: str


class Outcome(NamedTuple):
    """All samples of one case, and the schedules whose results are wrong there, with what is wrong."""

    samples: tuple[Sample, ...]
    wrong: dict[str, str]


class Measurer(Protocol):
    """What a worker runs: it has one GPU and measures one case after another."""

    def measure(self, case: Case, left_out: frozenset[str], tell: Callable[[Running], None]) -> Outcome:
        """Times every schedule and family that is not in `left_out`, and calls `tell` before each launch of one."""


class Done(NamedTuple):
    """A case was measured."""

    case: Case
    outcome: Outcome


class LeftOut(NamedTuple):
    """A schedule or family is measured no more."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a worker may take to start, and then between two signs of life."""

    start_s: float = 240.0
    silence_s: float = 20.0


PATIENCE = Patience()


def measure_all(
    cases: Sequence[Case],
    makers: Sequence[Callable[[], Measurer]],
    *,
    left_out: frozenset[str] = frozenset(),
    deadline: float = float("inf"),
    patience: Patience = PATIENCE,
) -> Iterator[Done | LeftOut]:
    """Measures `cases` with one worker per maker, side by side, and yields what happens as it happens.

    Args:
        makers: make the measurer of each worker, in its process; they are pickled.
        left_out: schedules and families not to run.
        deadline: no case is begun after it (`time.monotonic`).

    Raises:
        AotmmError: a worker cannot start, or ends while it runs no kernel.
    """
    crew = _Crew(deque(cases), deadline, patience, set(left_out))
    try:
        for make in makers[: len(cases)]:
            crew.workers.append(_Worker(make, patience.start_s))
        while crew.workers:
            pause = min(worker.until for worker in crew.workers) - time.monotonic()
            heard = wait([worker.pipe for worker in crew.workers], timeout=max(0.0, pause))
            for worker in list(crew.workers):
                if worker.pipe in heard or time.monotonic() > worker.until:
                    yield from crew.attend(worker, heard=worker.pipe in heard)
    finally:
        for worker in crew.workers:
            worker.kill()


class _Worker:
    """One process with its measurer: what it is doing, and until when it must tell something."""

    def __init__(self, make: Callable[[], Measurer], start_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent used
        self.make = make
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(make, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.until = time.monotonic() + start_s
        self.case: Case | None = None
        self.running: Running | None = None

    def give(self, case: Case, left_out: frozenset[str]) -> None:
        """Lets the process measure `case`."""
        self.case, self.running = case, None
        with suppress(OSError):  # it is gone: the next that is heard is its end
            self.pipe.send((case, left_out))

    def hear(self) -> Outcome | Running | str | None:
        """The next message: an outcome, a sign of life, text if the process failed, None when it is ready."""
        try:
            message: Outcome | Running | str | None = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with code {self.process.exitcode}"
        if isinstance(message, Running):
            self.running = message
        return message

    def end(self) -> None:
        """Lets the process end by itself, for a while."""
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(timeout=_FAREWELL_S)
        self.kill()

    def kill(self) -> None:
        """Ends the process, whatever it does; one that the driver holds is not waited for."""
        self.process.kill()
        self.process.join(timeout=_FAREWELL_S)
        self.pipe.close()


@dataclass(slots=True)
class _Crew:
    """The workers, what they still have to do, and what was left out so far."""

    waiting: deque[Case]
    deadline: float
    patience: Patience
    left_out: set[str]
    workers: list[_Worker] = field(default_factory=list)
    strikes: dict[str, int] = field(default_factory=dict)

    def attend(self, worker: _Worker, *, heard: bool) -> Iterator[Done | LeftOut]:
        """Deals with one message of `worker`, or with its silence."""
        message = worker.hear() if heard else "it gave no sign of life and was killed"
        worker.until = time.monotonic() + self.patience.silence_s
        if isinstance(message, str):
            yield from self._replace(worker, message)
        elif isinstance(message, Outcome) and worker.case is not None:
            yield Done(worker.case, message)
            for schedule, why in message.wrong.items():
                yield from self._leave_out(schedule, f"its result is wrong on {worker.case}: {why}")
            self._occupy(worker)
        elif message is None:
            self._occupy(worker)

    def _occupy(self, worker: _Worker) -> None:
        if self.waiting and time.monotonic() < self.deadline:
            worker.give(self.waiting.popleft(), frozenset(self.left_out))
        else:
            self.workers.remove(worker)
            worker.end()

    def _replace(self, worker: _Worker, why: str) -> Iterator[LeftOut]:
        """Leaves out what `worker` was running, and lets another one try its case again without that."""
        self.workers.remove(worker)
        worker.kill()
        if worker.running is None or worker.case is None:
            doing = f"before the first kernel of {worker.case}" if worker.case else "before its first case"
            raise AotmmError(f"a measuring process failed {doing}: {why}")
        family, schedule, detail = worker.running
        yield from self._leave_out(schedule, f"{why}, on {worker.case}, {detail}")
        self.strikes[family] = self.strikes.get(family, 0) + 1
        if self.strikes[family] >= _STRIKES:
            yield from self._leave_out(family, f"{_STRIKES} of its schedules hang or fail")
        self.waiting.appendleft(worker.case)
        self.workers.append(_Worker(worker.make, self.patience.start_s))

    def _leave_out(self, name: str, why: str) -> Iterator[LeftOut]:
        if name not in self.left_out:
            self.left_out.add(name)
            yield LeftOut(name, why)


def _work(make: Callable[[], Measurer], pipe: Connection) -> None:
    """A worker's process: measures what comes through `pipe` until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends its workers
    try:
        measurer = make()
        pipe.send(None)
        while (task := pipe.recv()) is not None:
            case, left_out = task
            pipe.send(measurer.measure(case, left_out, pipe.send))
    except EOFError:  # the parent is gone
        return
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
        pipe.send(f"{type(error).__name__}: {error}")
