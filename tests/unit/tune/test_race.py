"""The race: who is timed how often, and what counts, with a timer that makes times up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from aotmm.pack.table import Sample
from aotmm.runtime.launcher import Plan
from aotmm.tune.candidates import Candidate
from aotmm.tune.race import race
from aotmm.tune.workers import Running


def candidate(config_name: str, *, split: int = 1, pdl: bool = False, cost: int = 0) -> Candidate:
    """A way to compute the case, of which nothing or some cost is predicted."""
    return Candidate("ws", config_name, Plan(kernel=0, split=split, pdl=pdl, cost=cost))


@dataclass
class MadeUp:
    """A timer: ns by config, and which configs are wrong; it counts what it is asked to do."""

    ns: dict[str, float]
    sets: int = 3
    busy_ns: float = 0
    replays: list[str] = field(default_factory=list)
    launches: dict[str, list[int]] = field(default_factory=dict)

    def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
        """Times grow with each replay, so that medians are seen."""
        name = candidate.config_name
        self.launches.setdefault(name, []).append(launches)

        def replay() -> float:
            self.replays.append(name)
            return self.ns[name] + self.replays.count(name)

        return replay

    def rest(self, ns: float) -> None:
        """Rests are among the replays, in microseconds."""
        self.replays.append(f"{ns / 1e3:.0f} us")

    def error(self, candidate: Candidate) -> str | None:
        """With three slices all is wrong."""
        return "error 9" if candidate.plan.split == 3 else None


def _run(timer: MadeUp, *chosen: Candidate) -> tuple[dict[str, int], dict[str, str]]:
    outcome = race(chosen, timer, lambda _: None)
    return {sample.config_name: sample.ns for sample in outcome.samples}, outcome.wrong


def test_those_that_may_be_the_fastest_take_turns() -> None:
    """Up to 1.2 times the best: two replays at first, five in turn, back and forth; the median of those counts."""
    timer = MadeUp({"a": 100_000, "b": 115_000})
    times, wrong = _run(timer, candidate("a"), candidate("b"))
    assert times == {"a": 100_005, "b": 115_005}
    assert wrong == {}
    assert timer.replays == ["a", "a", "b", "b", *"abbaabbaab"]


def test_what_is_clearly_slower_is_timed_once() -> None:
    """Whether it came before the best or after it; the second of its replays counts, as the first loads the kernel."""
    timer = MadeUp({"slow": 130_000, "best": 100_000, "slower": 300_000})
    times, _ = _run(timer, candidate("slow"), candidate("best"), candidate("slower"))
    assert times == {"slow": 130_002, "best": 100_005, "slower": 300_002}
    assert timer.replays.count("slow") == timer.replays.count("slower") == 2


def test_what_is_predicted_to_be_fast_takes_turns_in_any_case() -> None:
    """Up to 1.2 times the best time, if the prediction is its own; a first time may be much too long."""

    class SlowAtFirst(MadeUp):
        def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
            replay, first = super().record(candidate, launches), len(self.launches[candidate.config_name]) == 1
            return lambda: replay() + 30_000 * (first and candidate.config_name != "best")

    def foreseen(config_name: str, cost: int) -> Candidate:
        return replace(candidate(config_name, cost=cost), foreseen=True)

    timer = SlowAtFirst({"near": 105_000, "best": 100_000, "far": 105_000, "other": 105_000})
    plans = foreseen("near", 120_000), foreseen("best", 120_000), foreseen("far", 120_010), candidate("other", cost=1)
    times, _ = _run(timer, *plans)
    assert times == {"near": 105_005, "best": 100_005, "far": 135_002, "other": 135_002}


def test_what_is_predicted_to_be_hopeless_is_not_timed() -> None:
    """From 1.6 times the best time on, or as asked for; what nothing is predicted of is."""
    costs = {"best": 90_000, "near": 130_000, "far": 160_000, "hopeless": 160_010, "unknown": 0}
    plans = [candidate(name, cost=cost) for name, cost in costs.items()]
    timer = MadeUp({name: 300_000 if name == "unknown" else 100_000 for name in costs})
    times, _ = _run(timer, *plans)
    assert times.keys() == {"best", "near", "far", "unknown"}
    assert "hopeless" not in timer.launches
    samples = race(plans, MadeUp(timer.ns), lambda _: None, 1.3).samples
    assert {sample.config_name for sample in samples} == {"best", "near", "unknown"}


def test_predictions_that_are_all_too_long_leave_none_out() -> None:
    """The best so far was predicted to take twice its time, so what is near its prediction may be near its time."""
    costs = {"best": 200_000, "near": 250_000, "hopeless": 320_200}
    timer = MadeUp(dict.fromkeys(costs, 100_000))
    times, _ = _run(timer, *(candidate(name, cost=cost) for name, cost in costs.items()))
    assert times.keys() == {"best", "near"}


def test_graphs_are_long_enough_and_not_too_long() -> None:
    """About 0.15 ms to look, in at most 100 launches, and 0.4 ms in turn; a long one is looked at once."""
    timer = MadeUp({"tiny": 3_000, "small": 70_000, "large": 400_000, "long": 3_000_000})
    for config_name, ns in timer.ns.items():
        _run(timer, candidate(config_name, cost=int(ns)))
    assert timer.launches == {"tiny": [50, 133], "small": [3, 6], "large": [2, 3], "long": [1, 2]}


def test_graphs_have_all_sets_if_they_are_not_too_many() -> None:
    """Otherwise operands would lie in the cache; no graph gets four times as long for that."""
    timer = MadeUp({"small": 70_000, "medium": 200_000, "large": 300_000}, sets=9)
    for config_name, ns in timer.ns.items():
        _run(timer, candidate(config_name, cost=int(ns)))
    assert timer.launches == {"small": [8, 9], "medium": [4, 8], "large": [2, 4]}


@pytest.mark.parametrize("first", [False, True])
def test_the_other_way_to_launch_the_slow_is_not_timed(first: bool) -> None:  # noqa: FBT001
    """With pdl or without, whichever is predicted; that of the others is."""
    timer = MadeUp({"a": 100_000, "slow": 130_000})
    plans = [candidate(name, pdl=pdl) for name in ("a", "slow") for pdl in (first, not first)]
    samples = race(plans, timer, lambda _: None).samples
    assert {(sample.config_name, sample.pdl) for sample in samples} == {("a", False), ("a", True), ("slow", first)}


def test_nothing_of_a_wrong_config_counts() -> None:
    """A wrong result makes a config's other plans worthless too, and it is run no more."""
    timer = MadeUp({"a": 100_000, "b": 110_000})
    times, wrong = _run(timer, *(candidate("a", split=split) for split in (2, 3, 4)), candidate("b"))
    assert list(times) == ["b"]
    assert wrong == {"a": "split 3, copies 0: error 9"}
    assert len(timer.launches["a"]) == 2  # not with split 4


def test_every_launch_is_announced() -> None:
    """So that a hang has a name."""
    beats: list[Running] = []
    race([candidate("a"), candidate("b", split=4)], MadeUp({"a": 1e5, "b": 1e5}), beats.append)
    assert beats[:2] == [Running("ws", "a", "split 1, copies 0"), Running("ws", "b", "split 4, copies 0")]
    assert len(beats) == 2 + 2 * (1 + 5)


def test_a_busy_gpu_rests_before_each_turn() -> None:
    """Three turns of 1 ms, each after a rest twice as long: without any, all run at the clock of their mean power."""
    timer = MadeUp({"a": 100_000, "b": 115_000}, busy_ns=100_002)
    times, _ = _run(timer, candidate("a"), candidate("b"))
    assert timer.launches == {"a": [3, 10], "b": [3, 9]}
    a, b = ("2000 us", "a"), ("2070 us", "b")
    assert timer.replays == ["a", "a", "b", "b", *a, *b, *b, *a, *a, *b]
    assert times == {"a": 100_004, "b": 115_004}


@pytest.mark.parametrize(("ns", "turns"), [(100_000, 5), (600_000, 3)])
def test_a_gpu_that_waits_for_memory_takes_no_rests(ns: int, turns: int) -> None:
    """A product that takes longer than a busy one would; long ones have fewer turns."""
    timer = MadeUp({"a": ns}, busy_ns=ns - 1)
    _run(timer, candidate("a"))
    assert timer.replays == ["a"] * (2 + turns)


def test_nothing_to_time() -> None:
    """A case that no kernel fits has no samples."""
    assert race([], MadeUp({}), lambda _: None) == ((), {})


def test_samples_say_what_was_launched() -> None:
    """Split, launch and copies are the plan's."""
    plan = Plan(kernel=3, split=4, copies=3, pdl=True, cost=1)
    assert Candidate("ws", "a", plan).sample(99.6) == Sample("a", 4, pdl=True, copies=3, ns=100)
