"""One run of `aotmm bench`: the sweeps, then the further measurements, written as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from aotmm.bench import ablation, epilogue_cost, facts, first_result, overhead, results, scaling
from aotmm.bench.cases import COMPARISONS, Work, work
from aotmm.bench.protocol import GraphStopwatch, measure
from aotmm.bench.providers import NAMES, provider
from aotmm.bench.results import Results, Row
from aotmm.errors import SpecError
from aotmm.timing import problems
from aotmm.timing.operands import Pool

# Further measurements, by name.
SUBJECTS: dict[str, Callable[[], Any]] = {
    "first_result": first_result.measure,
    "overhead": overhead.measure,
    "epilogue_cost": epilogue_cost.measure,
    "scaling": scaling.measure,
}
WHAT = (*COMPARISONS, *SUBJECTS)
_VARYING = ("date", "copy_bytes_per_s")  # facts that may differ between a run and its continuation
_PERIOD_S = 5.0  # between two writes of the results


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
    for kind, names, known_names in (("measurement", what, WHAT), ("provider", providers, NAMES)):
        unknown = [name for name in names if name not in known_names]
        if unknown:
            raise SpecError(f"unknown {kind} {', '.join(unknown)}; known: {', '.join(known_names)}")
    ordinal = _gpu()
    found = _known(folder, facts.collect(ordinal))
    known = problems.read()
    wanted = what or WHAT
    done = {row.case for row in found.rows}
    sweeps = [name for name in wanted if name in COMPARISONS]
    todo = [x for x in work(known, sweeps, dtypes=dtypes, providers=providers, every=every) if x.case not in done]
    written = time.monotonic()
    try:
        for row in _rows(todo, known, ordinal, found.facts["cache_bytes"]):
            found.rows.append(row)
            progress(row)
            if time.monotonic() - written > _PERIOD_S:
                results.write(found, folder)
                written = time.monotonic()
        torch.cuda.empty_cache()  # for the processes of first_result
        for name, subject in SUBJECTS.items():
            if name in wanted and name not in found.other:
                found.other[name] = subject()
                progress(name)
    finally:
        results.write(found, folder)
    return found


def run_ablation(folder: Path) -> Results:
    """Add the ablation to the results in `folder`. Raises SpecError, AotmmError as `run`."""
    found = _known(folder, facts.collect(_gpu()))
    found.other["ablation"] = ablation.measure()
    results.write(found, folder)
    return found


def _gpu() -> int:
    """Return the number of the measured GPU. Raises SpecError if there is none."""
    if not torch.cuda.is_available():
        raise SpecError(
            f"torch {torch.__version__} sees no GPU to measure; --render DIR shows what was measured elsewhere"
        )
    return torch.cuda.current_device()


def _rows(todo: Sequence[Work], known: problems.Shapes, ordinal: int, cache_bytes: int) -> Iterator[Row]:
    """Yield the rows of `todo`, with the state of the GPU meanwhile."""
    pool, stopwatch = Pool(torch.device("cuda", ordinal)), GraphStopwatch()
    with facts.watched(ordinal) as state:
        for item in todo:
            providers = [provider(name) for name in item.providers]
            held_out = known.held_out(item.case.shape)
            row = measure(item, providers, pool, stopwatch, cache_bytes=cache_bytes, held_out=held_out)
            row.state.update(state.take())
            yield row


def _known(folder: Path, here: dict[str, Any]) -> Results:
    """Return the results in `folder`, or none. Raises SpecError if they are of another machine or software."""
    if not (folder / results.FILE_NAME).exists():
        return Results(here)
    found = results.read(folder)
    other = [name for name in here if name not in _VARYING and found.facts.get(name) != here[name]]
    if other:
        there = ", ".join(f"{name} {found.facts.get(name)} and now {here[name]}" for name in other)
        raise SpecError(f"{folder} has results of another machine or software: {there}; choose another --out")
    return found
