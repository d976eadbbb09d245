"""Regret of the launcher's choices on random problems: all plans worth timing race, then the chosen one and the best.

The two take turns once more, so that neither profits from the luck of the first race.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import aotmm
from aotmm.bench import facts
from aotmm.bench.cases import Work
from aotmm.bench.drawn import left, work
from aotmm.bench.drawn_summary import REGRET
from aotmm.bench.protocol import BRIEF, GraphStopwatch, Stopwatch, compare
from aotmm.bench.providers import Provider
from aotmm.bench.providers.own import described, launches
from aotmm.bench.results import Results, Row, Times
from aotmm.bench.session import continued, gpu, keep
from aotmm.errors import SpecError
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import Launcher, Plan, Problem
from aotmm.runtime.tuning import CDevice
from aotmm.target import target
from aotmm.timing.correctness import Epilogue
from aotmm.timing.draw import distribution
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case
from aotmm.tune.candidates import Candidate, candidates, problem_of
from aotmm.tune.measure import GpuTimer, busy_ns
from aotmm.tune.race import HOPELESS, race

_COUNT = 150  # problems of the classes that are not apart: each has hundreds of plans


def run_regret(
    seed: int,
    folder: Path,
    progress: Callable[[Row], None],
    *,
    count: int | None = None,
    classes: Sequence[str] = (),
    table: Path | None = None,
) -> Results:
    """Measure the regret of random problems, as `drawn.run_drawn`: rows with the times of "chosen" and "best".

    Products with a bias are left out. On Hopper they have the plans and predictions of those without.

    Args:
        table: file of times to choose by, instead of those of the packs.

    Raises:
        SpecError, AotmmError: as `drawn.run_drawn`, and as `aotmm.load` for the table.
    """
    drawn = work(distribution(), seed, count or _COUNT, classes)
    todo = [item for item in drawn if not item.case.activation]
    if drawn and not todo:
        raise SpecError(f"classes {', '.join(classes)}: regret is of products without a bias; name other classes")
    ordinal = gpu()
    launcher = aotmm.load(table=table).launcher(ordinal)
    name = "" if table is None else f"{table.name}, {sha256(table.read_bytes()).hexdigest()[:16]}"
    found = continued(folder, facts.collect(ordinal) | {"seed": seed, "figure": REGRET, "table": name})
    measured = _measurer(launcher, ordinal, found.facts)
    keep(left(todo, found), measured, found, folder, progress, ordinal=ordinal)
    return found


def _measurer(launcher: Launcher, ordinal: int, known: dict[str, Any]) -> Callable[[Work], Row]:
    pool, stopwatch = Pool(torch.device("cuda", ordinal)), GraphStopwatch()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def measured(item: Work) -> Row:
        with torch.cuda.stream(stream):  # graphs are not recorded on the default one
            # Plain products, as tuning times them: scales would hide which kernels of a config fit.
            sets = [replace(x, epilogue=Epilogue()) for x in pool.operands(item.case, known["cache_bytes"])]
            problems = [_problem(item.case, operands) for operands in sets]
            chosen = launcher.plan(problems[0], ordinal, WORKSPACE_LIMIT)
            plans, wrong = raced(item.case, sets, problems, launcher, launcher.device(ordinal), ordinal)
            best = min(plans, key=lambda row: row[0])[1].plan if plans else chosen
            times, not_run = compared(item.case, sets, problems, launcher, (chosen, best), stopwatch)
        return Row(item.case, item.sweeps, times=times, not_run=not_run | wrong)

    return measured


def raced(
    case: Case,
    sets: Sequence[Operands],
    problems: Sequence[Problem],
    launcher: Launcher,
    device: CDevice,
    ordinal: int,
    hopeless: float = HOPELESS,
) -> tuple[list[tuple[int, Candidate]], dict[str, str]]:
    """Return ns and plan of a race of all plans worth timing, and the faults of configs whose products are wrong.

    Products that allow fast sums may use precise ones.

    Args:
        device: what plans are made for. hopeless: as of `race`.
    """
    found: list[tuple[int, Candidate]] = []
    wrong: dict[str, str] = {}
    for fast_accum in dict.fromkeys((False, case.fast_accum)):
        kind = [replace(problem, fast_accum=fast_accum) for problem in problems]
        chosen = candidates(launcher, device, kind[0])
        need = max((candidate.plan.workspace_bytes for candidate in chosen), default=0)
        workspace = torch.empty(need, device=sets[0].a.device, dtype=torch.uint8)

        def launch(candidate: Candidate, problem: Problem, memory: torch.Tensor = workspace) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            launcher.run(candidate.plan, problem, ordinal, stream, memory.data_ptr())

        busy = busy_ns(case, target(launcher.arch).tflops)
        outcome = race(chosen, GpuTimer(launch, kind, sets[0], busy), lambda _: None, hopeless)
        plans = {candidate.sample(0)[:-1]: candidate for candidate in chosen}
        found += [(sample.ns, plans[sample[:-1]]) for sample in outcome.samples]
        wrong |= outcome.wrong
    faults = {"aotmm": "wrong: " + "; ".join(f"{name}: {fault}" for name, fault in wrong.items())} if wrong else {}
    return found, faults


def compared(
    case: Case,
    sets: Sequence[Operands],
    problems: Sequence[Problem],
    launcher: Launcher,
    plans: tuple[Plan, Plan],
    stopwatch: Stopwatch,
) -> tuple[dict[str, Times], dict[str, str]]:
    """Return the times of the chosen plan and of the best, in turns, and why one has none.

    Plans that are the same are timed once.
    """
    by_set = {id(operands): problem for operands, problem in zip(sets, problems, strict=True)}
    names = ("chosen", "best") if len({schedule(launcher, plan) for plan in plans}) > 1 else ("chosen",)

    def provider(name: str, plan: Plan) -> Provider:
        return Provider(
            name,
            "",
            lambda _case, _sets: launches(launcher, plan, by_set, sets[0].a.device),
            describe=lambda _case, _operands: described(launcher, plan),
        )

    providers = [provider(name, plan) for name, plan in zip(names, plans, strict=False)]
    times, not_run = compare(case, sets, providers, stopwatch, BRIEF)
    if len(names) == 1 and times:
        times["best"] = times["chosen"]
    return times, not_run


def schedule(launcher: Launcher, plan: Plan) -> tuple[object, ...]:
    """Return what makes plans equally fast: kernels of one config differ in epilogues and guards alone."""
    kernel = launcher.kernels[plan.kernel]
    return kernel.config_name, kernel.fast_accum, plan.split, plan.pdl, plan.copies


def _problem(case: Case, operands: Operands) -> Problem:
    return problem_of(case, case.output, *(x.data_ptr() for x in (operands.a, operands.b, operands.out)))
