"""Grouped products: what is drawn, what the check refuses, rows and figures, with stand-ins for GPU and kernels."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aotmm.bench import grouped, results
from aotmm.bench.drawn_summary import GROUPED, Line, drawn_goals, lines, sections
from aotmm.bench.facts import State
from aotmm.bench.grouped import run_grouped, with_best
from aotmm.bench.providers import Call
from aotmm.bench.results import Results, Row, Times
from aotmm.bench.summary import failures
from aotmm.runtime.launcher import Plan
from aotmm.timing.check import Truth, truth
from aotmm.timing.correctness import Epilogue
from aotmm.timing.experts import ROUTINGS, SHARES, Experts, Model, draw, experts, routed
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Groups, Shape, case_of
from aotmm.tune.candidates import Candidate
from tests.unit.bench.samples import FakeStopwatch, drawn_facts

SEEDS = st.integers(0, 2**32 - 1)
SIZES = (1, 0, 300, 2, 40)
FORMS = {
    "layer": Case(Shape(343, 48, 64, "nt"), "bf16", groups=Groups("M", "any", SIZES)),
    "activations": Case(Shape(343, 48, 64, "nn"), "bf16", groups=Groups("M", "any", SIZES)),
    "weights": Case(Shape(304, 48, 343, "tn"), "bf16", groups=Groups("K", "any", SIZES)),
}
TINY = Experts("", 8, 40, 3, (Model("tiny", 3, 32, 24), Model("wide", 4, 16, 48)))


def _product(x: Operands, *, shift: int = 0) -> torch.Tensor:
    """What a right product is; with a `shift`, each group has another's matrix or sums."""
    assert x.offs is not None
    ends = x.offs.tolist()
    spans = list(pairwise([0, *ends]))
    a, b = x.a.double(), x.b.double()
    for scale in (x.epilogue.scale_a, x.epilogue.scale_b):
        a = a if scale is None else a * scale
    if b.dim() > a.dim():
        parts = [a[begin:end] @ b[(group + shift) % len(b)] for group, (begin, end) in enumerate(spans)]
        return torch.cat(parts).to(x.out.dtype)
    return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in spans]).roll(shift, 0).to(x.out.dtype)


def _scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """torch's product with a scale for each row, and each column in each group; a CPU has none."""
    del use_fast_accum
    spans = pairwise([0, *offs.tolist()])
    parts = [(a[lo:hi].double() @ b[g].double()) * scale_b[g] for g, (lo, hi) in enumerate(spans)]
    return (torch.cat(parts) * scale_a[:, None]).to(out_dtype)


# ---------------------------------------------------------------------------------------------------- what is drawn
@settings(max_examples=10, deadline=None, derandomize=True)
@given(SEEDS)
def test_problems_are_of_the_models(seed: int) -> None:
    """Sizes are a layer's or its gradients', rows within the range, and those of all groups are the rows."""
    known = experts()
    layers = {
        (count, N, K) for _, count, hidden, inner in known.models for N, K in ((2 * inner, hidden), (hidden, inner))
    }
    drawn = draw(known, seed, 6)
    assert {name: len(cases) for name, cases in drawn.items()} == {
        "experts": 6,
        "few": 2,
        "activations": 2,
        "weights": 2,
        "fp8": 2,
        "fp8 fast": 2,
    }
    for name, cases in drawn.items():
        for case in cases:
            assert case.groups is not None
            M, N, K = case.shape.M, case.shape.N, case.shape.K
            rows, *layer = {"activations": (M, K, N), "weights": (K, M, N)}.get(name, (M, N, K))
            sizes = case.groups.sizes
            assert (len(sizes), *layer) in layers
            assert sum(sizes) == rows
            assert case.groups.dimension == ("K" if name == "weights" else "M")
            assert case.shape.layout == {"activations": "nn", "weights": "tn"}.get(name, "nt")
            assert (case.dtype, case.fast_accum) == ("fp8e4" if "fp8" in name else "bf16", name == "fp8 fast")
            if name == "few":
                assert 1 <= min(sizes) <= max(sizes) <= 8
            else:
                assert case.groups.routing in ROUTINGS
                assert 256 <= rows <= 65536


@settings(max_examples=5, deadline=None, derandomize=True)
@given(SEEDS)
def test_the_same_seed_draws_the_same(seed: int) -> None:
    """A smaller count draws the first of a larger one, and another seed draws others; JSON keeps every problem."""
    whole = draw(TINY, seed, 12)
    assert whole == draw(TINY, seed, 12)
    for name, cases in draw(TINY, seed, 6).items():
        assert cases == whole[name][: len(cases)]
    assert draw(TINY, seed + 1, 12) != whole
    for cases in whole.values():
        assert [case_of(json.loads(json.dumps(asdict(case)))) for case in cases] == cases


@settings(max_examples=20, deadline=None, derandomize=True)
@given(SEEDS, st.sampled_from(ROUTINGS), st.integers(2, 128), st.integers(1, 2000))
def test_every_row_is_routed(seed: int, routing: str, count: int, rows: int) -> None:
    """The sizes of the groups are those of all rows; one expert gets all of them if it is asked for."""
    sizes = routed(routing, count, rows, random.Random(seed))  # noqa: S311 - no secret
    assert (len(sizes), sum(sizes)) == (count, rows)
    assert routing != "one" or max(sizes) == rows


def test_routings_differ() -> None:
    """Uniform shares are about equal; by Zipf's law the first is 2, 3 and 4 times the second, third and fourth."""
    numbers = random.Random(1)  # noqa: S311 - no secret
    equal = routed("uniform", 8, 80_000, numbers)
    assert max(abs(size - 10_000) for size in equal) < 500
    first, *rest = sorted(routed("zipf", 8, 80_000, numbers), reverse=True)
    assert [first / size for size in rest[:3]] == pytest.approx([2, 3, 4], rel=0.05)


def test_the_models() -> None:
    """They are those that the figures were asked for: experts, hidden and intermediate sizes."""
    assert {model[1:] for model in experts().models} == {
        (8, 4096, 14336), (128, 2048, 768), (32, 7168, 2048), (32, 2880, 2880),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- operands and the check
def _operands(case: Case) -> Operands:
    torch.manual_seed(1)
    return Pool(torch.device("cpu")).operands(case, cache_bytes=1)[0]


def _truth(x: Operands) -> Truth:
    return truth(x.a, x.b, x.out.dtype, x.epilogue, x.offs)


@pytest.mark.parametrize(("form", "shapes"), [
    ("layer", ((343, 64), (5, 64, 48), (343, 48))),
    ("activations", ((343, 64), (5, 64, 48), (343, 48))),
    ("weights", ((304, 343), (343, 48), (5, 304, 48))),
])  # fmt: skip
def test_operands(form: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """They have torch's forms and are aligned; as many sets as twice the cache needs, without weights of no row."""
    case = FORMS[form]
    sets = Pool(torch.device("cpu")).operands(case, cache_bytes=2 * case.bytes)
    assert len(sets) == 4
    assert len(Pool(torch.device("cpu")).operands(case, cache_bytes=1)) == 1
    for x in sets:
        assert (x.a.shape, x.b.shape, x.out.shape) == shapes
        assert x.offs is not None
        assert (x.offs.dtype, x.offs.tolist()) == (torch.int32, list(accumulate(SIZES)))
        for tensor, order in ((x.a, case.shape.layout[0]), (x.b, case.shape.layout[1])):
            assert (tensor if order == "n" else tensor.mT).is_contiguous()
            assert tensor.data_ptr() % 16 == 0
    of_b = 5 if form == "weights" else 4
    matrices = {"weights": 304 * 343 + 343 * 48 + of_b * 304 * 48}.get(form, 343 * 64 + of_b * 64 * 48 + 343 * 48)
    assert case.bytes == 2 * matrices


@pytest.mark.parametrize("form", FORMS)
def test_torchs_product_is_right(form: str) -> None:
    """torch's own product and the exact one, rounded once, pass the check."""
    x = _operands(FORMS[form])
    assert 0 < _truth(x).error(_product(x)) <= 1
    assert 0 < _truth(x).error(grouped._grouped_mm(x.a, x.b, offs=x.offs)) <= 1


@pytest.mark.parametrize("form", ["layer", "activations"])
def test_a_wrong_row_is_refused(form: str) -> None:
    """The first and the last row of every group are compared: each is seen if it is wrong, or another group's."""
    x = _operands(FORMS[form])
    right, good, other = _truth(x), _product(x), _product(x, shift=1)
    for begin, end in pairwise([0, *accumulate(SIZES)]):
        for row in {begin, end - 1} if begin < end else ():
            for wrong in (good[row].roll(1), other[row], torch.zeros_like(good[row])):
                bad = good.clone()
                bad[row] = wrong
                assert right.error(bad) > 1, row


@pytest.mark.parametrize("form", FORMS)
def test_what_was_not_written_is_refused(form: str) -> None:
    """One NaN is seen wherever it is, compared or not; so is a shift of all groups, and a column that is missing."""
    x = _operands(FORMS[form])
    right, good = _truth(x), _product(x)
    for row in range(good.shape[-2]):
        unwritten = good.clone()
        unwritten[..., row, 7] = float("nan")
        assert right.error(unwritten) == float("inf")
    assert right.error(_product(x, shift=1)) > 1
    column = good.clone()
    column[..., -1] = column[..., -2]
    assert right.error(column) > 1


def test_each_sum_is_of_its_group() -> None:
    """Of K in groups every group is compared, and one without elements is zero."""
    x = _operands(FORMS["weights"])
    right, good, other = _truth(x), _product(x), _product(x, shift=1)
    for group in range(len(SIZES)):
        wrong = good.clone()
        wrong[group] = other[group]
        assert right.error(wrong) > 1
    good[1] = 1e-30
    assert right.error(good) > 1


# ----------------------------------------------------------------------------------------------------------- a run
class _Library:
    """Multiplies on the CPU; its launcher chooses kernel 0 of 4 configs, of which the last is hopelessly slow."""

    kernels = tuple(SimpleNamespace(name=name, config_name=name, fast_accum=False) for name in "abcd")
    costs = (10, 9, 39, 41)

    def launcher(self, _ordinal: int) -> _Library:
        return self

    def device(self, _ordinal: int) -> None:
        return None

    def plan(self, _problem: object, _ordinal: int, _limit: int) -> Plan:
        return Plan(0, cost=self.costs[0])

    def problem(self, _a: torch.Tensor, _b: torch.Tensor, *, offs: torch.Tensor, **_: object) -> torch.Tensor:
        return offs

    def grouped_mm(self, a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor, **options: Any) -> torch.Tensor:
        return grouped._torchs(Operands(a, b, a, Epilogue(), offs), options)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Stand-ins for GPU and library; the kernels with these numbers leave their results as they are."""
    found: set[int] = set()

    def candidates(launcher: _Library, _device: None, _problem: object) -> list[Candidate]:
        plans = [Plan(number, cost=cost) for number, cost in enumerate(launcher.costs)]
        names = [(launcher.kernels[plan.kernel].config_name, plan) for plan in plans]
        return [Candidate("", name, plan, foreseen=foreseen) for name, plan in names for foreseen in (True, False)]

    def launches(_launcher: _Library, plan: Plan, _problems: object) -> Call:
        return lambda x: torch.full_like(x.out, float("nan")) if plan.kernel in found else _product(x)

    here = drawn_facts(cache_bytes=1)
    del here["seed"], here["figure"]
    library = _Library()
    monkeypatch.setattr(grouped, "gpu", lambda: 0)
    monkeypatch.setattr(grouped, "library", lambda: library)
    monkeypatch.setattr(grouped, "candidates", candidates)
    monkeypatch.setattr(grouped, "launches", launches)
    monkeypatch.setattr(grouped, "GraphStopwatch", FakeStopwatch)
    monkeypatch.setattr(grouped, "Pool", lambda _: Pool(torch.device("cpu")))
    monkeypatch.setattr(grouped, "experts", lambda: TINY)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", _scaled_product)
    monkeypatch.setattr("aotmm.bench.facts.collect", lambda _: dict(here))
    monkeypatch.setattr("aotmm.bench.facts.watched", lambda _: nullcontext(State()))
    return found


@pytest.mark.usefixtures("wrong")
def test_a_run(tmp_path: Path) -> None:
    """Ours, torch's and every other kernel worth timing take turns; a folder is continued, problem by problem."""
    first: list[Row] = []

    def stop(row: Row) -> None:
        first.append(row)
        if len(first) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_grouped(5, tmp_path, stop, count=3)
    later: list[Row] = []
    run_grouped(5, tmp_path, later.append, count=3)
    rows = results.read(tmp_path).rows
    assert [row.case for row in rows] == [row.case for row in first + later]
    assert sorted(row.sweeps[0] for row in rows) == [
        "activations", *["experts"] * 3, "few", "fp8", "fp8 fast", "weights",
    ]  # fmt: skip
    for row in rows:
        assert row.case.groups is not None
        assert row.sweeps[1] == f"{row.sweeps[0]}, {row.case.groups.routing}"
        assert list(row.times) == ["aotmm", "torch", "b", "c", "best"], "not d, and a once, as what is chosen"
        assert not row.not_run
        assert all(len(times.graph_us) == 5 for times in row.times.values())


def test_a_wrong_kernel_fails_the_run(wrong: set[int], tmp_path: Path) -> None:
    """It is named, and not the best one; the others are timed."""
    wrong.add(1)
    (row, *_) = run_grouped(5, tmp_path, lambda _: None, count=1).rows
    assert list(row.times) == ["aotmm", "torch", "c", "best"]
    assert row.not_run["best"].startswith("b: wrong: the largest error is inf")
    assert any("b: wrong" in text for text in failures(results.read(tmp_path)))


# --------------------------------------------------------------------------------------------------------- figures
def _row(name: str, us: dict[str, Sequence[float]], routing: str = "zipf") -> Row:
    times = {method: Times(tuple(samples), (), 3, 0.5, f"{method}'s kernel") for method, samples in us.items()}
    return with_best(Row(FORMS["layer"], (name, f"{name}, {routing}"), times, {}))


def _lines(*rows: Row) -> dict[str, Line]:
    return {line.goal.work: line for line in lines([Results(drawn_facts(figure=GROUPED), list(rows))])}


def test_targets_are_those_that_were_set() -> None:
    """Layers and few rows have targets, gradients and regrets have none, and each class has a line of either kind."""
    goals = drawn_goals(drawn_facts(figure=GROUPED))
    wanted = {goal.sweeps: (goal.mean, goal.quantile, goal.worst) for goal in goals if goal.mean is not None}
    of_fp8 = {(name,): (1.1, None, None) for name in ("fp8", "fp8 fast")}
    assert wanted == {("experts",): (1.15, 1.0, 0.92), ("few",): (1.3, None, None)} | of_fp8
    for against in ("torch", "best"):
        assert {name for goal in goals if goal.against == against for name in goal.sweeps} >= set(SHARES)
    assert all(goal.at_most == (goal.against == "best") for goal in goals)


def test_the_best_is_the_fastest_of_ours() -> None:
    """The chosen kernel may be it. torch's is never. It has the least median, not the least sample."""
    slow, fast = [10.0, 10.0, 1.0], [9.0, 9.0, 9.0]
    assert _row("few", {"aotmm": slow, "torch": [1.0] * 3, "b": fast}).times["best"].note == "b's kernel"
    assert _row("few", {"aotmm": fast, "torch": [1.0] * 3, "b": slow}).times["best"].note == "aotmm's kernel"
    assert "best" not in _row("few", {"torch": fast}).times


def test_figures() -> None:
    """Ratios are torch's time over ours, regrets ours over the best; means are geometric, quantiles at 5 and 95 %."""
    rows = [
        _row("experts", {"aotmm": [10.0] * 3, "torch": [10 * ratio] * 3, "b": [10 / regret] * 3}, routing)
        for ratio, regret, routing in ((1.0, 1.0, "zipf"), (2.0, 0.5, "one"), (4.0, 1.25, "one"))
    ]
    found = _lines(*rows)
    whole = found["256 to 65536 rows"]
    assert whole.problems == 3
    assert (whole.mean, whole.quantile, whole.worst) == pytest.approx((2.0, 1.1, 1.0))
    assert whole.status == "met"
    assert found["of these, all rows to one expert"].mean == pytest.approx(8**0.5)
    regret = found["regret, 256 to 65536 rows"]
    assert (regret.mean, regret.quantile, regret.worst) == pytest.approx((1.25 ** (1 / 3), 1.225, 1.25))
    assert (regret.status, regret.goal.at_most) == ("", True)


@pytest.mark.parametrize(("name", "ratios", "status"), [
    ("experts", (1.2, 1.2, 1.2), "met"),
    ("experts", (1.1, 1.1, 1.1), "missed"),
    ("experts", (2.0, 0.95, 0.95), "missed"),
    ("experts", (*[2.0] * 60, 0.91), "missed"),
    ("experts", (*[2.0] * 60, 0.93), "met"),
    ("few", (1.4, 1.4, 1.2), "met"),
    ("few", (1.2, 1.2, 1.4), "missed"),
    ("weights", (0.5,), ""),
])  # fmt: skip
def test_each_target_may_be_missed(name: str, ratios: tuple[float, ...], status: str) -> None:
    """Mean, quantile at 5 % and worst count, each where it has a target."""
    rows = [_row(name, {"aotmm": [1.0], "torch": [ratio]}) for ratio in ratios]
    first, *_ = (line for line in _lines(*rows).values() if name in line.goal.sweeps)
    assert first.status == status


def test_the_report() -> None:
    """The worst problems have rows, groups, routing, N, K, both times and our kernel; gradients stand apart."""
    us: dict[str, Any] = {"aotmm": [10.0], "torch": [5.0]}
    run = Results(drawn_facts(figure=GROUPED), [_row("experts", us), _row("weights", us)])
    targets, worst, apart = sections([run])
    assert targets.title == "Grouped products against torch, seed 1"
    assert "held" not in targets.text
    assert worst.rows == [
        (
            "343x48x64 nt bf16, rows in 5 groups (any)",
            "experts",
            "0.500",
            "10.00",
            "5.00",
            "aotmm's kernel",
            "torch's kernel",
        )
    ]
    assert [row[1] for row in apart.rows] == ["weights"]
