"""Checked before it is timed, all in turn, and as often as the time allows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from aotmm.bench.cases import Work
from aotmm.bench.protocol import BRIEF, in_turn, launches_for, measure, orders
from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.bench.results import Row
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape
from tests.unit.bench.samples import FakeStopwatch, product, right

CASE = Case(Shape(100, 64, 96, "nt"), "fp16")


def _measure(stopwatch: FakeStopwatch, *providers: Provider) -> Row:
    pool = Pool(torch.device("cpu"))
    return measure(Work(CASE, ("mine",), ()), providers, pool, stopwatch, cache_bytes=1)


def _wrong(call: Call) -> Provider:
    return Provider("wrong", "", lambda _case, _sets: call)


def _almost(operands: Operands) -> None:
    operands.out.copy_(product(CASE, operands))
    operands.out[77, 33] *= 1.01


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda operands: operands.out.zero_(), id="zeros"),
        pytest.param(torch.is_tensor, id="nothing written"),
        pytest.param(_almost, id="one element off by 1 %"),
    ],
)
def test_a_wrong_product_is_not_timed(call: Call) -> None:
    """Its one graph is that of the check: it is never replayed for a figure, and the row says that it is wrong."""
    stopwatch = FakeStopwatch()
    row = _measure(stopwatch, right(), _wrong(call))
    assert list(row.times) == ["right"]
    assert row.not_run["wrong"].startswith("wrong: the largest error is ")
    assert call not in stopwatch.replayed
    assert stopwatch.recorded.count(3) == 2, "checks of both over three sets"


def test_a_product_may_be_returned() -> None:
    """A result that is not in `out` is the one that counts, whatever `out` has."""

    def wrong(operands: Operands) -> torch.Tensor:
        operands.out.copy_(product(CASE, operands))
        return operands.out + 1

    returning = Provider("right", "", lambda case, _: lambda operands: product(case, operands))
    row = _measure(FakeStopwatch(), returning, _wrong(wrong))
    assert list(row.times) == ["right"]
    assert row.not_run["wrong"].startswith("wrong: the largest error is ")


def test_wrong_only_with_the_last_operands() -> None:
    """What is right for the first set alone, as a kernel that keeps an old descriptor, is refused too."""
    firsts: list[Operands] = []

    def prepare(_: Case, sets: Sequence[Operands]) -> Call:
        firsts.append(sets[0])
        return lambda operands: operands.out.copy_(product(CASE, firsts[0]))

    row = _measure(FakeStopwatch(), Provider("stale", "", prepare))
    assert row.not_run["stale"].startswith("wrong")


def test_a_provider_that_cannot_run_says_why() -> None:
    """The reason is in the row; the others are measured."""

    def refuse(_case: Case, _sets: Sequence[Operands]) -> Call:
        raise NotRunError("no nvcc here")

    def fail(_: Operands) -> None:
        raise ValueError("illegal address")

    row = _measure(FakeStopwatch(), Provider("absent", "", refuse), right(), _wrong(fail))
    assert row.not_run == {"absent": "no nvcc here", "wrong": "failed: ValueError: illegal address"}
    assert list(row.times) == ["right"]
    assert row.sweeps == ("mine",)


def test_what_a_row_holds() -> None:
    """A figure per round and per single call, launches in whole turns over the sets, the error of the check."""
    stopwatch = FakeStopwatch(us=100.0)
    row = _measure(stopwatch, right("x"), right("y"))
    for times in row.times.values():
        assert times.graph_us == (100.0,) * 9, "as many rounds as 20 ms hold of 21 x 100 us"
        assert set(times.isolated_us) == {110.0}
        assert times.launches == 21
        assert times.error <= 1
    assert stopwatch.alone_calls == sum(len(times.isolated_us) for times in row.times.values())
    assert row.ratio("x", "y") == 1.0


def test_brief_effort() -> None:
    """Twice the time for each graph, five rounds whatever they take, no single calls; checked all the same."""
    stopwatch = FakeStopwatch(us=30.0)
    pool = Pool(torch.device("cpu"))
    providers = [right(), _wrong(_almost)]
    work = Work(CASE, ("mine",), ())
    row = measure(work, providers, pool, stopwatch, cache_bytes=1, effort=BRIEF)
    assert row.times["right"].graph_us == (30.0,) * 5
    assert (row.times["right"].launches, row.times["right"].isolated_us) == (135, ())
    assert stopwatch.alone_calls == 0
    assert row.not_run["wrong"].startswith("wrong: the largest error is ")


def test_the_gpu_rests_before_each_replay(rests: list[float]) -> None:
    """Twice as long as the slowest replay, whoever's turn it is; the round that warms up has no rests."""
    events: list[object] = []

    def replay(name: str, us: float) -> Callable[[], float]:
        def run() -> float:
            events.append((name, len(rests)))
            return us

        return run

    in_turn({"slow": (replay("slow", 3.0), 10), "fast": (replay("fast", 2.0), 10)}, BRIEF)
    assert rests == pytest.approx([2 * 3.0 * 10 * 1e3] * 10)
    names = [("slow", "fast")[number % 2] for number in range(12)]
    assert events == [*zip(names, (0, 0, *range(1, 11)), strict=True)]


def test_launches() -> None:
    """About 2 ms of products in one graph, in whole turns over the sets, and one turn at least."""
    assert launches_for(100.0, 3) == 21
    assert launches_for(5000.0, 3) == 3
    assert launches_for(2.0, 300) == 1200
    assert launches_for(0.0, 4) == 1024


def test_two_take_strict_turns() -> None:
    """A B A B: each always follows the other."""
    assert [*itertools.chain(*orders(("a", "b"), 3))] == ["a", "b", "a", "b", "a", "b"]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 6])
def test_of_more_each_follows_every_other(count: int) -> None:
    """Every round has each once; over a whole design each comes right after each other one equally often."""
    names = tuple("abcdef"[:count])
    rounds = list(orders(names, 2 * count))
    assert all(sorted(order) == list(names) for order in rounds)
    followed = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert set(followed.values()) == ({2} if count > 1 else set())
    assert len(followed) == count * (count - 1)


def test_rounds_interleave() -> None:
    """Every run takes part in every round; the warm-up round is not among the figures."""
    log: list[str] = []

    def run(name: str, us: float) -> float:
        log.append(name)
        return us

    samples = in_turn({"a": (lambda: run("a", 300.0), 10), "b": (lambda: run("b", 400.0), 10)})
    assert log == ["a", "b"] * 6
    assert samples == {"a": [300.0] * 5, "b": [400.0] * 5}
    assert in_turn({}) == {}
