"""One run of `aotmm bench random`: problems that are drawn by a seed, measured until none is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aotmm.bench import facts, results
from aotmm.bench.cases import Work
from aotmm.bench.drawn_summary import RATIO, drawn_goals, worst
from aotmm.bench.profile import launched
from aotmm.bench.protocol import BRIEF, GraphStopwatch, measure, precision
from aotmm.bench.providers import provider
from aotmm.bench.results import Results, Row
from aotmm.bench.session import continued, gpu, keep, refuse_unknown
from aotmm.bench.summary import Goal
from aotmm.timing import problems
from aotmm.timing.draw import Distribution, distribution, draw
from aotmm.timing.operands import Pool
from aotmm.timing.problems import Case

_PROVIDERS = ("aotmm", "torch", "scaled_mm", "int_mm", "addmm")
_COUNT = 550  # problems of the classes that are not apart: about 5 minutes with those that are


def run_drawn(
    seed: int,
    folder: Path,
    progress: Callable[[Row], None],
    *,
    count: int | None = None,
    classes: Sequence[str] = (),
    providers: Sequence[str] = (),
) -> Results:
    """Measure held-out random problems, and write `folder`/results.json every few seconds, so that a run can go on.

    A problem that is slower than its class's worst target is timed three times, and the median counts.

    Args:
        seed, count, classes: as of `draw.draw`; by default as many as take 5 minutes.
        folder: its results are kept and not measured again, if they are of the same seed, machine and software.
        progress: called with every row when it is done.
        providers: only these of aotmm and torch's: torch, scaled_mm (for fp8), int_mm (for int8), addmm (with a bias).

    Raises:
        SpecError: a name is unknown, torch sees no GPU, or `folder` has results of another seed or software.
        AotmmError: as `aotmm.load` and `matmul`.
    """
    refuse_unknown("provider", providers, _PROVIDERS)
    todo = work(distribution(), seed, count or _COUNT, classes, providers)
    ordinal = gpu()
    found = continued(folder, facts.collect(ordinal) | {"seed": seed, "figure": RATIO})
    keep(left(todo, found), _measurer(ordinal, found.facts), found, folder, progress, ordinal=ordinal)
    _name_kernels(found, ordinal)
    results.write(found, folder)
    return found


def work(
    known: Distribution, seed: int, count: int, classes: Sequence[str] = (), providers: Sequence[str] = ()
) -> list[Work]:
    """Return held-out problems that are drawn, so that no table has their times.

    Raises:
        SpecError: as `draw.draw`.
    """
    found = []
    for name, case in mixed(draw(known, seed, count, classes, among=problems.read().held_out)):
        multipliers = ("aotmm", _torchs(case))
        chosen = tuple(x for x in multipliers if not providers or x in providers)
        if chosen:
            found.append(Work(case, (name,), chosen))
    return found


def _torchs(case: Case) -> str:
    """Return the name of torch's own product."""
    if case.activation:
        return "addmm"
    return "int_mm" if case.dtype == "int8" else "scaled_mm" if case.element_bytes == 1 else "torch"


def mixed(classes: Mapping[str, Sequence[Case]]) -> list[tuple[str, Case]]:
    """Return the problems with their classes, mixed evenly: a run that stops early has seen the same part of each."""
    found = [
        ((number + 0.5) / len(cases), name, case)
        for name, cases in classes.items()
        for number, case in enumerate(cases)
    ]
    return [(name, case) for _, name, case in sorted(found, key=lambda row: row[0])]


def left(todo: Sequence[Work], found: Results) -> list[Work]:
    """Return the work that has no row yet. A problem that was drawn twice is measured twice."""
    done = Counter((row.sweeps, row.case) for row in found.rows)
    rest = []
    for item in todo:
        key = (item.sweeps, item.case)
        if done[key]:
            done[key] -= 1
        else:
            rest.append(item)
    return rest


def _measurer(ordinal: int, known: dict[str, Any]) -> Callable[[Work], Row]:
    pool, stopwatch, goals = Pool(torch.device("cuda", ordinal)), GraphStopwatch(), drawn_goals(known)

    def measured(item: Work) -> Row:
        providers = [provider(name) for name in item.providers]
        cache_bytes = known["cache_bytes"]
        return confirmed(
            lambda: measure(item, providers, pool, stopwatch, cache_bytes=cache_bytes, effort=BRIEF),
            goals,
        )

    return measured


def confirmed(measured: Callable[[], Row], goals: Sequence[Goal]) -> Row:
    """Return a measured row. If it misses a worst target, it is the median one of three."""
    row = measured()
    for goal in goals:
        figure = goal.figure(row) if goal.counts(row) else None
        if figure is not None and goal.misses(figure, goal.worst):
            return _median([row, measured(), measured()], goal)
    return row


def _median(rows: Sequence[Row], goal: Goal) -> Row:
    """Return the row of the median figure, with all figures; the first one that lacks a figure, if any does."""
    figures = []
    for row in rows:
        figure = goal.figure(row)
        if figure is None:
            return row
        figures.append(figure)
    middle = sorted(range(len(rows)), key=figures.__getitem__)[len(rows) // 2]
    return replace(rows[middle], figures=tuple(figures))


def _name_kernels(found: Results, ordinal: int) -> None:
    """Note torch's kernels of the worst problems, once all are timed."""
    pool = Pool(torch.device("cuda", ordinal))
    for _, row, goal in [*worst([found]), *worst([found], apart=True)]:
        if not row.times[goal.against].note:
            operands = pool.operands(row.case, cache_bytes=1)[0]
            with precision(row.case):
                note = launched(provider(goal.against).prepare(row.case, [operands]), operands)
            row.times[goal.against] = replace(row.times[goal.against], note=note)
