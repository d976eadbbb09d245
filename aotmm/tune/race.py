"""The race of candidates: all are timed once, and those that may be the fastest in turn afterwards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from aotmm.tune.candidates import Candidate
from aotmm.tune.workers import Outcome, Running

_REPLAY_NS = 700_000  # of one replay: long against the launch of a graph and the events' resolution
_LEAST_NS = 2_000  # shorter than any launch
_LAUNCHES = (2, 100)  # in one graph
_SINGLE_NS = 1_000_000  # a launch of at least this is timed alone
_CONTENDER = 1.5  # times the best so far, up to which a candidate stays in the race
_ROUNDS = 7
# A GPU that runs one kernel for milliseconds lowers its clock by that kernel's power, which changes the winner. So the
# fastest are raced once more in long replays, if launches are long enough to draw much power.
_FINAL_NS = 6_000_000  # of one replay
_FINAL_ROUNDS = 3
_FINALIST = 1.12
_FINAL_FROM_NS = 20_000


class Timer(Protocol):
    """Timer of the candidates of one case. Times are in ns per launch."""

    def single(self, candidate: Candidate) -> float:
        """Return the time of one launch, including the extra cost of a kernel's first launch."""

    def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
        """Return a function that replays so many launches and times them."""

    def error(self, candidate: Candidate) -> str | None:
        """Return the fault of the last result of `candidate`; None if it is right."""


class _Contender(NamedTuple):
    candidate: Candidate
    replay: Callable[[], float]
    ns: float


def race(chosen: Iterable[Candidate], timer: Timer, heartbeat: Callable[[Running], None]) -> Outcome:
    """Time `chosen`, those expected to be fast first, and call `heartbeat` before each launch.

    A candidate that is clearly slower than the best so far is timed once, which is enough for the models, and not again
    with pdl. No sample of a config that is wrong anywhere counts.
    """
    wrong: dict[str, str] = {}
    slow: list[tuple[Candidate, float]] = []
    contenders: list[_Contender] = []
    best = math.inf
    for candidate in chosen:
        if candidate.config_name in wrong or (candidate.plan.pdl and candidate.plain() in dict(slow)):
            continue
        heartbeat(Running(candidate.family, candidate.config_name, str(candidate)))
        found = _try(candidate, timer, best)
        error = timer.error(candidate)
        if error is not None:
            wrong[candidate.config_name] = f"{candidate}: {error}"
        elif isinstance(found, _Contender) and found.ns <= _CONTENDER * best:
            contenders.append(found)
            best = min(best, found.ns)
        else:
            slow.append((candidate, found.ns if isinstance(found, _Contender) else found))
    contenders = [row for row in contenders if row.candidate.config_name not in wrong]
    slow += [(row.candidate, row.ns) for row in contenders if row.ns > _CONTENDER * best]
    samples = [candidate.sample(ns) for candidate, ns in slow if candidate.config_name not in wrong]
    racing = [row for row in contenders if row.ns <= _CONTENDER * best]
    times = _rounds(racing, _ROUNDS, heartbeat)
    if times and min(times) >= _FINAL_FROM_NS:
        times = _final(racing, times, timer, heartbeat)
    samples += [row.candidate.sample(ns) for row, ns in zip(racing, times, strict=True)]
    return Outcome(tuple(samples), wrong)


def _try(candidate: Candidate, timer: Timer, best: float) -> _Contender | float:
    """Time a candidate first; return only a number if it is so slow that one launch is enough."""
    limit = max(_SINGLE_NS, 2 * _CONTENDER * best)
    ns = timer.single(candidate)
    if ns > limit:  # perhaps because it was loaded
        ns = timer.single(candidate)
    if ns > limit:
        return ns
    launches = _launches(min(ns, _CONTENDER * best))
    replay, ns = _replayed(candidate, timer, launches)
    if launches * ns < _REPLAY_NS / 2 and launches < _LAUNCHES[1]:  # a single launch was mostly waiting
        replay, ns = _replayed(candidate, timer, _launches(ns))
    return _Contender(candidate, replay, ns)


def _launches(ns: float) -> int:
    return max(_LAUNCHES[0], min(_LAUNCHES[1], round(_REPLAY_NS / max(ns, _LEAST_NS))))


def _replayed(candidate: Candidate, timer: Timer, launches: int) -> tuple[Callable[[], float], float]:
    replay = timer.record(candidate, launches)
    replay()  # warms up
    return replay, replay()


def _rounds(racing: list[_Contender], rounds: int, heartbeat: Callable[[Running], None]) -> list[float]:
    """Return the median time of each."""
    times: list[list[float]] = [[] for _ in racing]
    for number in range(rounds):
        # Back and forth, so that no candidate always follows the same one.
        for index in range(len(racing))[:: 1 if number % 2 == 0 else -1]:
            candidate = racing[index].candidate
            heartbeat(Running(candidate.family, candidate.config_name, str(candidate)))
            times[index].append(racing[index].replay())
    return [statistics.median(found) for found in times]


def _final(
    racing: list[_Contender], times: list[float], timer: Timer, heartbeat: Callable[[Running], None]
) -> list[float]:
    """Return the times after a race of the fastest in long replays, which decides between them.

    Their times are scaled so that the best is as fast as before: the others were not raced at that clock.
    """
    indices = [index for index, ns in enumerate(times) if ns <= _FINALIST * min(times)]
    if len(indices) == 1:
        return times
    finalists = []
    for index in indices:
        candidate = racing[index].candidate
        heartbeat(Running(candidate.family, candidate.config_name, str(candidate)))
        replay, ns = _replayed(candidate, timer, max(_LAUNCHES[0], round(_FINAL_NS / times[index])))
        finalists.append(_Contender(candidate, replay, ns))
    found = _rounds(finalists, _FINAL_ROUNDS, heartbeat)
    scale = min(times) / min(found)
    decided = list(times)
    for index, ns in zip(indices, found, strict=True):
        decided[index] = ns * scale
    return decided
