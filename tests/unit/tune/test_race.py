"""The race: who is timed how often, and what counts, with a timer that makes times up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aotmm.pack.table import Sample
from aotmm.runtime.launcher import Plan
from aotmm.tune.candidates import Candidate
from aotmm.tune.race import race
from aotmm.tune.workers import Running


def candidate(config_name: str, *, split: int = 1, pdl: bool = False) -> Candidate:
    """A way to compute the case."""
    return Candidate("ws", config_name, Plan(kernel=0, split=split, pdl=pdl))


@dataclass
class MadeUp:
    """A timer: ns by config, and which configs are wrong; it counts what it is asked to do."""

    ns: dict[str, float]
    wrong: tuple[str, ...] = ()
    waiting_ns: float = 10_000  # of a launch alone
    loading_ns: float = 10_000  # of the first launch
    singles: list[str] = field(default_factory=list)
    replays: list[str] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)

    def single(self, candidate: Candidate) -> float:
        """The first one loads the kernel."""
        first = candidate.config_name not in self.singles
        self.singles.append(candidate.config_name)
        return self.ns[candidate.config_name] + (self.loading_ns if first else self.waiting_ns)

    def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
        """Times grow with each replay, so that medians are seen."""
        name = candidate.config_name
        self.launches[name] = launches

        def replay() -> float:
            self.replays.append(name)
            return self.ns[name] + self.replays.count(name)

        return replay

    def error(self, candidate: Candidate) -> str | None:
        """As asked."""
        return "error 9" if candidate.config_name in self.wrong else None


def _run(timer: MadeUp, *chosen: Candidate) -> tuple[dict[str, int], dict[str, str]]:
    outcome = race(chosen, timer, lambda _: None)
    return {sample.config_name: sample.ns for sample in outcome.samples}, outcome.wrong


def test_those_that_may_be_the_fastest_take_turns() -> None:
    """Up to 1.5 times the best: two replays at first, seven in turn; the median of those counts."""
    timer = MadeUp({"a": 100_000, "b": 120_000})
    times, wrong = _run(timer, candidate("a"), candidate("b"))
    assert times == {"a": 100_006, "b": 120_006}
    assert wrong == {}
    assert timer.replays == ["a", "a", "b", "b", *"abbaabbaabbaab"]


def test_what_is_clearly_slower_is_timed_once() -> None:
    """Whether it came before the best or after it."""
    timer = MadeUp({"slow": 200_000, "best": 100_000, "slower": 300_000})
    times, _ = _run(timer, candidate("slow"), candidate("best"), candidate("slower"))
    assert times == {"slow": 200_002, "best": 100_006, "slower": 300_002}
    assert timer.replays.count("slow") == timer.replays.count("slower") == 2


def test_what_is_hopeless_is_not_even_replayed() -> None:
    """One launch of milliseconds tells enough, once the kernel is loaded."""
    timer = MadeUp({"best": 100_000, "good": 120_000, "hopeless": 20_000_000}, loading_ns=5_000_000)
    times, _ = _run(timer, *map(candidate, timer.ns))
    assert times["hopeless"] == 20_010_000
    assert set(timer.launches) == {"best", "good"}
    assert timer.singles == ["best", "good", "good", "hopeless", "hopeless"]


def test_graphs_are_long_enough_and_not_too_long() -> None:
    """About 0.7 ms a replay, 2 to 100 launches; a launch alone that was mostly waiting does not decide."""
    timer = MadeUp({"tiny": 3_000, "small": 70_000, "large": 3_000_000})
    for config_name in timer.ns:
        _run(timer, candidate(config_name))
    assert timer.launches == {"tiny": 100, "small": 9, "large": 2}


def test_programmatic_launches_of_the_slow_are_not_timed() -> None:
    """Those of the others are."""
    timer = MadeUp({"a": 100_000, "slow": 300_000})
    plans = [candidate(name, pdl=early) for name in ("a", "slow") for early in (False, True)]
    samples = race(plans, timer, lambda _: None).samples
    assert sorted((sample.config_name, sample.pdl) for sample in samples) == [
        ("a", False),
        ("a", True),
        ("slow", False),
    ]


def test_nothing_of_a_wrong_config_counts() -> None:
    """A wrong result makes a config's other plans worthless too, and it is run no more."""

    class WrongWhenSplit(MadeUp):
        def error(self, candidate: Candidate) -> str | None:
            return "error 9" if candidate.plan.split == 3 else None

    timer = WrongWhenSplit({"a": 100_000, "b": 110_000})
    times, wrong = _run(timer, *(candidate("a", split=split) for split in (2, 3, 4)), candidate("b"))
    assert list(times) == ["b"]
    assert wrong == {"a": "split 3, copies 0: error 9"}
    assert timer.singles.count("a") == 2  # not with split 4


def test_every_launch_is_announced() -> None:
    """So that a hang has a name."""
    beats: list[Running] = []
    race([candidate("a"), candidate("b", split=4)], MadeUp({"a": 1e5, "b": 1e5}), beats.append)
    assert beats[:2] == [Running("ws", "a", "split 1, copies 0"), Running("ws", "b", "split 4, copies 0")]
    assert len(beats) == 2 + 2 * 7 + 2 + 2 * 3


def test_long_replays_decide_between_the_fastest() -> None:
    """Who is slower when the GPU is busy for milliseconds loses; the others' times stay, the best one's level too."""

    class Throttled(MadeUp):
        def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
            if launches * self.ns[candidate.config_name] < 5e6:
                return super().record(candidate, launches)
            self.replays.append(f"long {candidate.config_name}")
            return lambda: {"hungry": 150_000.0, "modest": 120_000.0}[candidate.config_name]

    timer = Throttled({"hungry": 100_000, "modest": 105_000, "third": 130_000})
    times, _ = _run(timer, *map(candidate, timer.ns))
    assert times == {"modest": 100_006, "hungry": 125_008, "third": 130_006}
    assert timer.replays[-2:] == ["long hungry", "long modest"]


def test_short_products_have_no_final() -> None:
    """They draw little power."""
    timer = MadeUp({"a": 10_000, "b": 10_000})
    _run(timer, *map(candidate, timer.ns))
    assert max(timer.launches.values()) <= 70


def test_nothing_to_time() -> None:
    """A case that no kernel fits has no samples."""
    assert race([], MadeUp({}), lambda _: None) == ((), {})


def test_samples_say_what_was_launched() -> None:
    """Split, launch and copies are the plan's."""
    plan = Plan(kernel=3, split=4, copies=3, pdl=True, cost=1)
    assert Candidate("ws", "a", plan).sample(99.6) == Sample("a", 4, pdl=True, copies=3, ns=100)
