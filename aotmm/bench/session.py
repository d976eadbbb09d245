"""What the runs have in common: the GPU, results that are continued, and rows that are written as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from aotmm.bench import facts, results
from aotmm.bench.cases import Work
from aotmm.bench.results import Results, Row
from aotmm.errors import SpecError

_VARYING = ("date", "copy_bytes_per_s")  # facts that may differ between a run and its continuation
_PERIOD_S = 5.0  # between two writes of the results


def refuse_unknown(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise SpecError if any of `names` is not known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SpecError(f"unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}")


def gpu() -> int:
    """Return the number of the measured GPU. Raises SpecError if there is none."""
    if not torch.cuda.is_available():
        raise SpecError(
            f"torch {torch.__version__} sees no GPU to measure; --render DIR shows what was measured elsewhere"
        )
    return torch.cuda.current_device()


def continued(folder: Path, here: dict[str, Any]) -> Results:
    """Return the results in `folder`, or none. Raises SpecError if their facts are not those of `here`."""
    if not (folder / results.FILE_NAME).exists():
        return Results(here)
    found = results.read(folder)
    there = found.facts
    other = [name for name in {**there, **here} if name not in _VARYING and there.get(name) != here.get(name)]
    if other:
        pairs = ", ".join(f"{name} {there.get(name)} and now {here.get(name)}" for name in other)
        raise SpecError(f"{folder} has results of another run: {pairs}; choose another --out")
    return found


def keep(
    todo: Iterable[Work],
    measure: Callable[[Work], Row],
    found: Results,
    folder: Path,
    progress: Callable[[Row], None],
    *,
    ordinal: int,
) -> None:
    """Add the rows of `todo` to `found`, with the GPU's state, and write `folder`/results.json every few seconds."""
    written = time.monotonic()
    try:
        with facts.watched(ordinal) as state:
            for item in todo:
                row = measure(item)
                row.state.update(state.take())
                found.rows.append(row)
                progress(row)
                if time.monotonic() - written > _PERIOD_S:
                    results.write(found, folder)
                    written = time.monotonic()
    finally:
        results.write(found, folder)
