"""Grouped products of expert layers that are drawn at random (`timing/experts.py`), against torch's `grouped_mm`.

All of our kernels that may be fast take turns with the chosen one, which gives the regret of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aotmm.bench import facts
from aotmm.bench.cases import Work
from aotmm.bench.drawn import left, mixed
from aotmm.bench.drawn_summary import GROUPED
from aotmm.bench.protocol import Effort, GraphStopwatch, compare
from aotmm.bench.providers import Call, Provider
from aotmm.bench.providers.own import described, library
from aotmm.bench.regret import schedule
from aotmm.bench.results import Results, Row
from aotmm.bench.session import continued, gpu, keep
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import Launcher, Plan, Problem
from aotmm.timing.experts import draw, experts
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case
from aotmm.tune.candidates import candidates

# Problems of the class with all targets, and a third as many of each other one. On an H100 their launches are predicted
# to take 50 s; with checks and recordings a run is meant to take about 3 minutes.
_COUNT = 150
_EFFORT = Effort(4000.0, 60000.0, (3, 5), isolated=False)  # three rounds if a replay takes more than 12 ms
# Times the predicted time of the chosen plan. On an H100 only the kernels for any strides have more, 5 at least.
# All five tiles of Hopper are timed: predictions for them are 3.5 at most (600 problems of two seeds).
_HOPELESS = 4.0
_OURS, _TORCH, _BEST = "aotmm", "torch", "best"
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)  # noqa: SLF001 - its name in older torch


def run_grouped(seed: int, folder: Path, progress: Callable[[Row], None], *, count: int | None = None) -> Results:
    """Measure random problems, and write `folder`/results.json every few seconds, so that a run can go on.

    Rows have the times of "aotmm", which is `lib.grouped_mm`, of "torch", of the other kernels by the names of their
    configs, and of the "best" of all of ours. All allocate their results, so that no result is nearer to the cache.

    Args:
        seed, count: as of `experts.draw`; by default as many as shall take 3 minutes.
        folder: its results are kept and not measured again, if they are of the same seed, machine and software.
        progress: called with every row when it is done.

    Raises:
        SpecError: torch sees no GPU, or `folder` has results of another seed or software.
        AotmmError: as `aotmm.load` and `grouped_mm`.
    """
    ordinal = gpu()
    found = continued(folder, facts.collect(ordinal) | {"seed": seed, "figure": GROUPED})
    todo = work(seed, count or _COUNT)
    keep(left(todo, found), _measurer(ordinal, found.facts["cache_bytes"]), found, folder, progress, ordinal=ordinal)
    return found


def work(seed: int, count: int) -> list[Work]:
    """Return problems that are drawn, each of its class, and of its class and routing."""
    return [
        Work(case, (name, f"{name}, {case.groups.routing}"), ())
        for name, case in mixed(draw(experts(), seed, count))
        if case.groups
    ]


def _measurer(ordinal: int, cache_bytes: int) -> Callable[[Work], Row]:
    pool, stopwatch, launcher = Pool(torch.device("cuda", ordinal)), GraphStopwatch(), library().launcher(ordinal)

    def measured(item: Work) -> Row:
        torch.cuda.empty_cache()  # results in graphs of before have memory that no other graph can take
        sets = pool.operands(item.case, cache_bytes)
        options = {id(x): _options(item.case, x) for x in sets}
        problems = {id(x): library().problem(x.a, x.b, offs=x.offs, **options[id(x)]) for x in sets}
        first = problems[id(sets[0])]
        chosen = launcher.plan(first, ordinal, WORKSPACE_LIMIT)
        others = rivals(launcher, ordinal, first, chosen)
        providers = [
            provider(
                _OURS,
                lambda x: library().grouped_mm(x.a, x.b, offs=x.offs, **options[id(x)]),
                described(launcher, chosen),
            ),
            provider(_TORCH, lambda x: _torchs(x, options[id(x)])),
            *(
                provider(name, launches(launcher, plan, problems), described(launcher, plan))
                for name, plan in others.items()
            ),
        ]
        return with_best(Row(item.case, item.sweeps, *compare(item.case, sets, providers, stopwatch, _EFFORT)))

    return measured


def _options(case: Case, x: Operands) -> dict[str, Any]:
    """Return the other arguments of `lib.grouped_mm`: of fp8 a scale for each row, and each column in each group."""
    scale_a, scale_b = x.epilogue.scale_a, x.epilogue.scale_b
    if scale_a is None or scale_b is None:
        return {}
    rows, columns = scale_a.expand(len(x.a), 1).contiguous(), scale_b.expand(len(x.b), 1, case.shape.N).contiguous()
    return {"scale_a": rows, "scale_b": columns, "out_dtype": x.out.dtype, "fast_accum": case.fast_accum}


def _torchs(x: Operands, options: Mapping[str, Any]) -> torch.Tensor:
    """Return torch's product, of these options of ours."""
    if not options:
        return _grouped_mm(x.a, x.b, offs=x.offs)
    scales = options["scale_a"][:, 0], options["scale_b"][:, 0]
    return torch._scaled_grouped_mm(  # noqa: SLF001 - its name in every torch
        x.a, x.b, *scales, x.offs, out_dtype=options["out_dtype"], use_fast_accum=options["fast_accum"]
    )


def rivals(launcher: Launcher, ordinal: int, problem: Problem, chosen: Plan) -> dict[str, Plan]:
    """Return the plans of the kernels that may be faster than the chosen one, by config, each launched as foreseen."""
    return {
        each.config_name: each.plan
        for each in candidates(launcher, launcher.device(ordinal), problem)
        if each.foreseen
        and each.plan.cost <= _HOPELESS * chosen.cost
        and schedule(launcher, each.plan) != schedule(launcher, chosen)
    }


def launches(launcher: Launcher, plan: Plan, problems: Mapping[int, Problem]) -> Call:
    """Return the launch of a plan into a new tensor; `problems` has that of each set of operands, by its id."""

    def call(x: Operands) -> torch.Tensor:
        out = torch.empty_like(x.out)
        workspace = torch.empty(plan.workspace_bytes, device=out.device, dtype=torch.uint8)
        problem = replace(problems[id(x)], c_ptr=out.data_ptr())
        address = workspace.data_ptr() if plan.workspace_bytes else 0
        launcher.run(plan, problem, x.out.device.index, torch.cuda.current_stream().cuda_stream, address)
        return out

    return call


def provider(name: str, call: Call, note: str = "") -> Provider:
    """Return the provider of a call that is the same for all operands, with a note on it."""
    return Provider(name, "", lambda _case, _sets: call, describe=lambda _case, _operands: note)


def with_best(row: Row, others: Collection[str] = (_TORCH,)) -> Row:
    """Return the row with the times of the fastest kernel of ours, and the reasons why others of ours have none.

    Args:
        others: the providers that are not ours.
    """
    ours = {name: times for name, times in row.times.items() if name not in others}
    wrong = [f"{name}: {why}" for name, why in row.not_run.items() if name not in (_OURS, *others)]
    return replace(
        row,
        times=row.times | ({_BEST: ours[min(ours, key=row.us)]} if ours else {}),
        not_run=row.not_run | ({_BEST: "; ".join(wrong)} if wrong else {}),
    )
