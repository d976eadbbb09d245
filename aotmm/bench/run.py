"""One run of `aotmm bench`: the sweeps, then the further measurements, written as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aotmm.bench import (
    ablation,
    epilogue_cost,
    expert_layers,
    facts,
    first_result,
    models,
    overhead,
    own,
    results,
    scaling,
)
from aotmm.bench.cases import COMPARISONS, Work, work
from aotmm.bench.protocol import GraphStopwatch, measure
from aotmm.bench.providers import NAMES, provider
from aotmm.bench.results import Results, Row
from aotmm.bench.session import continued, gpu, keep, refuse_unknown
from aotmm.errors import SpecError
from aotmm.timing import problems
from aotmm.timing.operands import Pool

# Further measurements, by name.
SUBJECTS: dict[str, Callable[[], Any]] = {
    "first_result": first_result.measure,
    "overhead": overhead.measure,
    "epilogue_cost": epilogue_cost.measure,
    "scaling": scaling.measure,
    "models": models.measure,
    "expert_layers": expert_layers.measure,
    "own": own.measure,
}
WHAT = (*COMPARISONS, *SUBJECTS)
_OPTIONAL = ("models", "expert_layers", "own")  # need packages, or packs, that nothing else does: only if asked for
_ALONE = ("random", "invariant", "grouped", "blocks", "ampere", "build_scaling")  # runs of other modules


def run(
    what: Sequence[str],
    folder: Path,
    progress: Callable[[Row | str], None],
    *,
    dtypes: Sequence[str] = (),
    providers: Sequence[str] = (),
    every: int = 1,
) -> Results:
    """Measure, and write `folder`/results.json every few seconds, so that a run that ends early can be continued.

    Args:
        what: of `WHAT`; everything if empty.
        folder: its results are kept and not measured again, if they are of the same machine and software.
        progress: called with every row, and the name of every further measurement, when it is done.
        dtypes, providers, every: as in `cases.work`.

    Raises:
        SpecError: a name is unknown, torch sees no GPU, or `folder` has results of other software.
        AotmmError: as `aotmm.load` and `matmul`.
    """
    refuse_unknown("measurement", what, (*WHAT, *_ALONE))
    if not set(_ALONE).isdisjoint(what):
        raise SpecError(f"{', '.join(_ALONE[:-1])} and {_ALONE[-1]} are no part of another run: ask for each alone")
    refuse_unknown("provider", providers, NAMES)
    ordinal = gpu()
    found = continued(folder, facts.collect(ordinal))
    wanted = what or tuple(name for name in WHAT if name not in _OPTIONAL)
    done = {row.case for row in found.rows}
    sweeps = [name for name in wanted if name in COMPARISONS]
    todo = [
        x for x in work(problems.read(), sweeps, dtypes=dtypes, providers=providers, every=every) if x.case not in done
    ]
    keep(todo, _measurer(ordinal, found.facts["cache_bytes"]), found, folder, progress, ordinal=ordinal)
    torch.cuda.empty_cache()  # for the processes of first_result
    for name, subject in SUBJECTS.items():
        if name in wanted and name not in found.other:
            found.other[name] = subject()
            results.write(found, folder)
            progress(name)
    return found


def _measurer(ordinal: int, cache_bytes: int) -> Callable[[Work], Row]:
    pool, stopwatch = Pool(torch.device("cuda", ordinal)), GraphStopwatch()

    def measured(item: Work) -> Row:
        providers = [provider(name) for name in item.providers]
        return measure(item, providers, pool, stopwatch, cache_bytes=cache_bytes)

    return measured


def run_ablation(folder: Path) -> Results:
    """Add the ablation to the results in `folder`. Raises SpecError, AotmmError as `run`."""
    found = continued(folder, facts.collect(gpu()))
    found.other["ablation"] = ablation.measure()
    results.write(found, folder)
    return found
