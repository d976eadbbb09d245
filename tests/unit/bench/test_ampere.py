"""The run of sm80's kernels against CUTLASS': equal tiles, entries that are timed once, tables, and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aotmm.bench import ampere
from aotmm.bench.drawn_summary import AMPERE, drawn_goals, sections
from aotmm.bench.providers import Call, NotRunError, cutlass
from aotmm.bench.results import Results, Row, Times
from aotmm.pack.schema import Config
from aotmm.pack.table import Sample, ShapeTimes, parse, write
from aotmm.runtime.launcher import Plan
from aotmm.runtime.tuning import CDevice
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape
from aotmm.tune.candidates import Candidate
from tests.unit.bench.samples import drawn_facts

CASE = Case(Shape(64, 256, 32, "nn"), "fp16")
TILES = (Config(64, 64, 64, 4, 4), Config(64, 256, 32, 4, 4), Config(128, 128, 32, 4, 4), Config(64, 256, 32, 8, 4))
LAUNCHER: Any = SimpleNamespace(kernels=[SimpleNamespace(config=config) for config in TILES])


class Stopwatch:
    """Runs what it is to time, and takes 2 us for it."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, call: Call, sets: Sequence[Operands], _launches: int) -> Callable[[], float]:
        """As `GraphStopwatch`."""
        self.recorded += 1

        def run() -> float:
            for operands in sets:
                call(operands)
            return 2.0

        return run


def test_equal_tiles() -> None:
    """CUTLASS' fastest kernel without slices with a tile of ours that the product fills, and our fastest of it."""
    plans = [(100 + number, Candidate("tile", "", Plan(number))) for number in range(4)]
    plans += [(1, Candidate("tile", "", Plan(1, split=2))), (1, Candidate("tile", "", Plan(1, copies=1)))]
    times = {(64, 64, 64, 32, 32, 4): 9.0, (64, 256, 32, 64, 64, 4): 8.0, (128, 128, 32, 64, 64, 4): 7.0}
    theirs: Any = {
        (config, slices): (us / slices, (config, slices)) for config, us in times.items() for slices in (1, 2)
    }
    assert set(times) < {*cutlass.AMPERE_CONFIGS}
    found: Any = ampere._same_tile(CASE, LAUNCHER, plans, theirs)
    assert found == (Plan(1), ((64, 256, 32, 64, 64, 4), 1)), "the product is lower than the third"
    small = replace(CASE, shape=Shape(16, 16, 32, "nn"))
    assert ampere._same_tile(small, LAUNCHER, plans, theirs) is None


def test_equal_entries_are_timed_once() -> None:
    """The chosen plan may be the best one; one that is wrong has no time under any name, and the reason is kept."""
    sets = Pool(torch.device("cpu")).operands(CASE, cache_bytes=1)

    def right(operands: Operands) -> None:
        operands.out.copy_(operands.a.float() @ operands.b.float())

    def wrong(operands: Operands) -> None:
        operands.out.fill_(7)

    entries = {
        name: ampere._Entry(key, call, 1, key)
        for name, key, call in (
            ("chosen", "a", right),
            ("best", "a", right),
            ("cutlass", "b", wrong),
            ("tile", "b", wrong),
        )
    }
    stopwatch: Any = Stopwatch()
    times, not_run = ampere._in_turns(CASE, sets, entries, stopwatch)
    assert set(times) == {"chosen", "best"}
    assert times["chosen"] is times["best"]
    assert (times["best"].note, set(not_run)) == ("a", {"cutlass"})
    assert "wrong" in not_run["cutlass"]
    assert stopwatch.recorded == 3, "twice what is right, once what is wrong"


def test_times_become_tables() -> None:
    """Those of all plans, with the multiprocessors of their context; a problem that was drawn twice is there once."""
    times = (Sample("tile_64x64x64_s4_w4", 1, pdl=False, copies=0, ns=900),)
    shape = ShapeTimes(2, "nn", "plain", 64, 256, 32, 0, 0, False, times)  # noqa: FBT003
    facts = drawn_facts(figure=AMPERE, torch="2.11", aotmm="0.1.0", driver_version="580")
    found = Results(facts, [], {"samples": {"part": [asdict(shape), asdict(shape)], "whole": []}})
    device = CDevice(104, 232448, 1980, 3352, 1 << 20, b"NVIDIA H100 80GB HBM3")
    table = ampere._table(found, "part", device)
    assert (table.arch, table.multiprocessors, table.shapes) == ("sm80", 104, (shape,))
    assert parse(write(table), "there") == table


def test_its_targets_and_report() -> None:
    """Those that were set: sets, equal tiles and regret, whole and in a part of the GPU, under a title that warns."""
    goals = drawn_goals(drawn_facts(figure=AMPERE))
    wanted = {("best", "cutlass", 1.0, 0.92), ("tile", "cutlass_tile", 0.97, None), ("chosen", "best", 1.06, None)}
    for context in ("whole", "part"):
        set_here = {
            (x.ours, x.against, x.mean, x.quantile) for x in goals if context in x.sweeps and x.mean is not None
        }
        assert set_here == wanted
    assert all(goal.at_most == (goal.against == "best") for goal in goals)
    us = {"chosen": 12.0, "best": 10.0, "cutlass": 11.0}
    rows = [
        Row(CASE, ("squares", context), {name: Times((time,) * 5, (), 1, 0.5) for name, time in us.items()}, {})
        for context in ("whole", "part")
    ]
    (title, text, header, lines), worst = sections([Results(drawn_facts(figure=AMPERE), rows)])
    assert "a proxy for an A100" in title
    assert "No figure tells the speed of an A100" in text
    assert "5 % or 95 %" in header
    assert [row[3] for row in lines if row[0].startswith("regret")] == ["1.200", "1.200"]
    assert worst.rows[0][2] == "1.100"


def test_cutlass_is_asked_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that refuse the sizes are left out; if all do, CUTLASS is not run."""

    def calls(*_: object) -> list[tuple[cutlass.Config, int, Call]]:
        def refuse(_: Operands) -> None:
            raise NotRunError("status 7")

        return [(config, 1, refuse if number else print) for number, config in enumerate(cutlass.AMPERE_CONFIGS[:2])]

    monkeypatch.setattr(cutlass, "calls", calls)
    sets = Pool(torch.device("cpu")).operands(CASE, cache_bytes=1)

    class Refusing(Stopwatch):
        def record(self, call: Call, sets: Sequence[Operands], launches: int) -> Callable[[], float]:
            if call is not print:
                call(sets[0])
            return super().record(lambda _: None, sets, launches)

    stopwatch: Any = Refusing()
    assert list(ampere._cutlass(CASE, sets, 108, stopwatch)) == [(cutlass.AMPERE_CONFIGS[0], 1)]
    monkeypatch.setattr(cutlass, "calls", lambda *_: calls()[1:])
    with pytest.raises(NotRunError, match="none of the CUTLASS kernels takes these sizes"):
        ampere._cutlass(CASE, sets, 108, stopwatch)
