"""Regret on random problems, with stand-ins for launcher, race and GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import aotmm
from aotmm.bench import regret, results
from aotmm.bench.facts import State
from aotmm.bench.providers import Call
from aotmm.bench.regret import run_regret
from aotmm.bench.results import Row
from aotmm.bench.summary import failures
from aotmm.errors import SpecError
from aotmm.runtime.launcher import Plan, Problem
from aotmm.timing.draw import Distribution, draw
from aotmm.timing.operands import Operands, Pool
from aotmm.tune.candidates import Candidate
from aotmm.tune.workers import Outcome
from tests.unit.bench.samples import FakeStopwatch, drawn_facts
from tests.unit.bench.test_drawn import TINY


class _Kernel(NamedTuple):
    name: str
    config_name: str
    fast_accum: bool


@dataclass
class _Launcher:
    """Chooses plan `chosen`; kernels 0 and 1 are of one config, 2 of another, 3 has fast sums."""

    chosen: Plan = field(default_factory=lambda: Plan(0, cost=9000))
    kernels: tuple[_Kernel, ...] = (
        _Kernel("a_plain", "a", fast_accum=False),
        _Kernel("a_vector", "a", fast_accum=False),
        _Kernel("b_plain", "b", fast_accum=False),
        _Kernel("c_fast", "c", fast_accum=True),
    )
    times_ns: dict[Plan, int] = field(default_factory=lambda: {Plan(1): 200, Plan(2, split=4): 100, Plan(3): 150})
    wrong: dict[str, str] = field(default_factory=dict)
    raced: list[tuple[bool, list[Plan]]] = field(default_factory=list)
    arch: str = "sm90"

    def plan(self, _problem: Problem, _ordinal: int, _limit: int) -> Plan:
        """The choice."""
        return self.chosen

    def device(self, _ordinal: int) -> None:
        """No facts: `candidates` has a stand-in too."""


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> _Launcher:
    """A launcher whose plans are candidates by its times, which a race finds; launches multiply on the CPU."""
    found = _Launcher()

    def candidates(launcher: _Launcher, _device: None, problem: Problem) -> list[Candidate]:
        kind = [plan for plan in launcher.times_ns if launcher.kernels[plan.kernel].fast_accum == problem.fast_accum]
        launcher.raced.append((problem.fast_accum, kind))
        return [Candidate("ws", launcher.kernels[plan.kernel].config_name, plan) for plan in kind]

    def race(chosen: Sequence[Candidate], _timer: object, _heartbeat: object, _hopeless: float) -> Outcome:
        samples = [each.sample(found.times_ns[each.plan]) for each in chosen if each.config_name not in found.wrong]
        return Outcome(tuple(samples), found.wrong)

    def launches(_launcher: _Launcher, _plan: Plan, problems: Mapping[int, Problem], _device: torch.device) -> Call:
        def call(operands: Operands) -> object:
            assert problems[id(operands)].a_ptr == operands.a.data_ptr()
            return operands.out.copy_(operands.a.double() @ operands.b.double())

        return call

    monkeypatch.setattr(regret, "gpu", lambda: 0)
    monkeypatch.setattr("aotmm.bench.facts.collect", lambda _: _facts())
    monkeypatch.setattr("aotmm.bench.facts.watched", lambda _: nullcontext(State()))
    monkeypatch.setattr(regret, "GraphStopwatch", FakeStopwatch)
    monkeypatch.setattr(regret, "Pool", lambda _: Pool(torch.device("cpu")))
    monkeypatch.setattr(regret, "distribution", lambda: TINY)
    monkeypatch.setattr(regret, "GpuTimer", lambda *_: None)
    monkeypatch.setattr(regret, "candidates", candidates)
    monkeypatch.setattr(regret, "race", race)
    monkeypatch.setattr(regret, "launches", launches)
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr("aotmm.load", lambda **_: type("Library", (), {"launcher": lambda *_: found})())
    return found


def _facts() -> dict[str, Any]:
    facts = drawn_facts()
    del facts["seed"], facts["figure"]
    return facts


def _rows(folder: Path, known: Distribution = TINY, **options: Any) -> list[Row]:
    run_regret(5, folder, lambda _: None, count=4, **options)
    found = results.read(folder).rows
    named = options.get("classes") or [each.name for each in known.classes if not each.bias]
    assert len(found) == sum(map(len, draw(known, 5, 4, named).values()))
    return found


def test_products_with_a_bias_have_none(tmp_path: Path) -> None:
    """They are left out, and asked for alone they are refused."""
    with pytest.raises(SpecError, match="classes biased: regret is of products without a bias; name other classes"):
        run_regret(5, tmp_path, lambda _: None, count=4, classes=["biased"])


def test_the_chosen_takes_turns_with_the_best(tmp_path: Path) -> None:
    """Both are timed once more after the race, and the row names both plans; fp8 is multiplied without scales."""
    for row in _rows(tmp_path):
        assert list(row.times) == ["chosen", "best"]
        assert row.times["chosen"].note == "a_plain, 9.00 us predicted"
        assert row.times["best"].note == "b_plain, split 4, 0.00 us predicted"
        assert all(len(times.graph_us) == 5 for times in row.times.values())
        assert not row.not_run
    assert (found := results.read(tmp_path)).facts["figure"] == "regret"
    assert found.facts["table"] == ""


@pytest.mark.parametrize("chosen", [Plan(2, split=4, cost=9000), Plan(2, split=4, measured=True)])
def test_the_best_has_no_regret(chosen: Plan, launcher: _Launcher, tmp_path: Path) -> None:
    """It is timed once, and 1 exactly."""
    launcher.chosen = chosen
    for row in _rows(tmp_path):
        assert row.times["chosen"] == row.times["best"]
        assert row.ratio("chosen", "best") == 1.0


def test_kernels_of_one_config_are_the_same(launcher: _Launcher, tmp_path: Path) -> None:
    """A choice that differs from the best in its guards alone has no regret; in split, pdl, copies it may have."""
    launcher.times_ns = {Plan(1): 100}
    assert all(row.times["chosen"] == row.times["best"] for row in _rows(tmp_path / "same"))
    for number, best in enumerate((Plan(1, split=2), Plan(1, pdl=True), Plan(1, copies=1))):
        launcher.times_ns = {best: 100}
        for row in _rows(tmp_path / str(number), classes=["squares"]):
            assert row.times["chosen"].note != row.times["best"].note


def test_fast_sums_may_be_precise(launcher: _Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fast sums are allowed the precise kernels race too, and the best of both counts; else they alone do."""
    known = Distribution("", TINY.layers, tuple(replace(x, fast_accum=True) for x in TINY.classes[2:]))
    _rows(tmp_path / "precise", classes=["squares"])
    assert {kind for kind, _ in launcher.raced} == {False}
    launcher.raced.clear()
    monkeypatch.setattr(regret, "distribution", lambda: known)
    for best, note in ((Plan(3), "c_fast"), (Plan(2, split=4), "b_plain")):
        launcher.times_ns[best] = 50
        for row in _rows(tmp_path / note, known):
            assert row.times["best"].note.startswith(note)
        launcher.times_ns[best] = 60
    assert {kind for kind, _ in launcher.raced} == {False, True}


def test_wrong_plans_fail_the_run(launcher: _Launcher, tmp_path: Path) -> None:
    """A config with a wrong product is named and is not the best; the regret against the others is there."""
    launcher.wrong = {"b": "split 4: its error is 7 times what is allowed"}
    rows = _rows(tmp_path)
    assert all(row.times["best"] == row.times["chosen"] for row in rows)
    found = failures(results.read(tmp_path))
    assert len(found) == len(rows)
    assert all(text.endswith("wrong: b: split 4: its error is 7 times what is allowed") for text in found)


def test_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded, named in the results with its digest, and its results are in a folder of their own."""
    table, known, loaded = tmp_path / "h200.json", aotmm.load(), []

    def load(**given: Path) -> object:
        loaded.append(given)
        return known

    table.write_text("{}")
    monkeypatch.setattr("aotmm.load", load)
    _rows(tmp_path / "out", table=table)
    assert loaded == [{"table": table}]
    named = f"h200.json, {sha256(b'{}').hexdigest()[:16]}"
    assert results.read(tmp_path / "out").facts["table"] == named
    with pytest.raises(SpecError, match=r"table h200\.json, .* and now ;"):
        run_regret(5, tmp_path / "out", lambda _: None, count=4)
