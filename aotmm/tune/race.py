"""The race of candidates: all that may be good are timed once, and the fastest in turn afterwards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from aotmm.timing.graph import REST
from aotmm.tune.candidates import Candidate
from aotmm.tune.workers import Outcome, Running

_LOOK_NS = 150_000  # of the first replays: long against the events' resolution
_TURN_NS = 400_000  # of one replay in turn: long against the launch of a graph too
_LEAST_NS = 2_000  # shorter than any launch
# Launches in one graph; for a first look one is enough if it is long. In turn, small products have all sets of
# operands, so that they are read from memory, as among a model's other layers: from the cache other plans are faster.
_LEAST_LAUNCHES, _LOOK_LAUNCHES, _TURN_LAUNCHES = 2, 100, 512
_LONG_NS = 500_000
# Times the best so far, or what was predicted of it if that is longer: a candidate with a longer prediction is not
# timed. Predictions by the device's own table are nearer: on unseen problems this loses 0.07 % of speed on average, and
# times a third (docs/experiments/tuning.md).
HOPELESS, HOPELESS_BY_OWN_TABLE = 1.6, 1.4
_OTHER_LAUNCH = 1.2  # times the best so far: a candidate that is slower is not launched in the other way, too
_CONTENDER = 1.2  # times the best, up to which candidates are timed in turn
# Times the best, up to which a prediction has a candidate timed in turn even if its first time was long: one first time
# in a hundred is 1.3 times the one in turn, and a wrong time of what selection would take makes the fit avoid it.
_FORESEEN = 1.2
_ROUNDS, _LONG_ROUNDS = 5, 3
_BUSY_TURN_NS = 1_000_000  # after a rest: such times differ so little that three are enough


class Timer(Protocol):
    """Timer of the candidates of one case. Times are in ns per launch.

    Attributes:
        sets: operands that take turns; they do not fit the caches together.
        busy_ns: launches that take no longer keep the tensor cores so busy that their turns begin with rests.
    """

    sets: int
    busy_ns: float

    def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
        """Return a function that replays so many launches and times them."""

    def error(self, candidate: Candidate) -> str | None:
        """Return the fault of the last result of `candidate`; None if it is right."""

    def rest(self, ns: float) -> None:
        """Let the GPU idle."""


class _Look(NamedTuple):
    candidate: Candidate
    ns: float


def race(
    chosen: Iterable[Candidate], timer: Timer, heartbeat: Callable[[Running], None], hopeless: float = HOPELESS
) -> Outcome:
    """Time `chosen`, those expected to be fast first, and call `heartbeat` before each launch.

    A candidate is not timed if its prediction is more than `hopeless` times the longer of two: the least time so far,
    and the prediction of the plan that had it. Types without a model are predicted up to twice as slow as they are.
    A candidate that is clearly slower than the best so far is timed once, which is enough for the models, and not again
    in the other way, with or without pdl. No sample of a config that is wrong anywhere counts.
    """
    wrong: dict[str, str] = {}
    looks: list[_Look] = []
    once: dict[Candidate, float] = {}  # those launched in one of the two ways, by the same without pdl
    best, foreseen = math.inf, math.inf  # the least time so far, and the longer one of it and its prediction
    for candidate in chosen:
        too_slow = candidate.plan.cost > hopeless * foreseen or once.get(candidate.plain(), 0) > _OTHER_LAUNCH * best
        if candidate.config_name in wrong or too_slow:
            continue
        ns = _look(candidate, timer, best, heartbeat)
        error = timer.error(candidate)
        if error is not None:
            wrong[candidate.config_name] = f"{candidate}: {error}"
            continue
        looks.append(_Look(candidate, ns))
        if ns < best:
            best, foreseen = ns, max(ns, candidate.plan.cost)
        once[candidate.plain()] = ns
    looks = [look for look in looks if look.candidate.config_name not in wrong]
    best = min((look.ns for look in looks), default=0.0)
    racing = [look for look in looks if _contends(look, best)]
    busy = best <= timer.busy_ns
    rounds = _LONG_ROUNDS if busy or best > _LONG_NS else _ROUNDS
    times = _in_turn(racing, timer, heartbeat, rounds, busy=busy)
    samples = [look.candidate.sample(look.ns) for look in looks if not _contends(look, best)]
    samples += [look.candidate.sample(ns) for look, ns in zip(racing, times, strict=True)]
    return Outcome(tuple(samples), wrong)


def _contends(look: _Look, best: float) -> bool:
    candidate = look.candidate
    return look.ns <= _CONTENDER * best or (candidate.foreseen and candidate.plan.cost <= _FORESEEN * best)


def _look(candidate: Candidate, timer: Timer, best: float, heartbeat: Callable[[Running], None]) -> float:
    """Return the time of a candidate in a short replay, after one that loads it and warms up."""
    heartbeat(Running(candidate.family, candidate.config_name, str(candidate)))
    expected = min(candidate.plan.cost or math.inf, best)
    expected = expected if math.isfinite(expected) else _LOOK_NS
    launches = 1 if expected > _LONG_NS else _launches(_LOOK_NS, expected, timer.sets, _LOOK_LAUNCHES)
    replay = timer.record(candidate, launches)
    replay()
    return replay()


def _launches(replay_ns: float, ns: float, sets: int, most: int) -> int:
    """Return the launches of a replay: as long as asked for, or up to four times that to have all sets."""
    launches = round(replay_ns / max(ns, _LEAST_NS))
    return max(_LEAST_LAUNCHES, min(most, max(launches, min(sets, 4 * launches))))


def _in_turn(
    racing: Sequence[_Look], timer: Timer, heartbeat: Callable[[Running], None], rounds: int, *, busy: bool
) -> list[float]:
    """Return the median time of each over the rounds."""
    turn_ns = _BUSY_TURN_NS if busy else _TURN_NS
    launches = [_launches(turn_ns, look.ns, timer.sets, _TURN_LAUNCHES) for look in racing]
    replays = []
    for look, count in zip(racing, launches, strict=True):
        heartbeat(Running(look.candidate.family, look.candidate.config_name, str(look.candidate)))
        replays.append(timer.record(look.candidate, count))

    def heard(index: int) -> float:
        candidate, ns = racing[index]
        heartbeat(Running(candidate.family, candidate.config_name, str(candidate)))
        if busy:
            timer.rest(REST * launches[index] * ns)
        return replays[index]()

    return in_turn([partial(heard, index) for index in range(len(racing))], rounds)


def in_turn(replays: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Return the median of each of `replays`, which measure something in ns, over the rounds."""
    times: list[list[float]] = [[] for _ in replays]
    for number in range(rounds):
        # Back and forth, so that no candidate always follows the same one.
        for index in range(len(replays))[:: 1 if number % 2 == 0 else -1]:
            times[index].append(replays[index]())
    return [statistics.median(found) for found in times]
