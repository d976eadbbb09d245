"""The cases to measure: those of the sweeps, with one type for each element_bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256

from aotmm.errors import SpecError
from aotmm.problem import DTYPES
from aotmm.target import Target
from aotmm.timing.problems import Case, Shapes, Sweep

# Types that stand for all of their element_bytes: their speed is that of the tensor cores and of memory. In this order.
TUNABLE = ("fp16", "bf16", "fp8e4", "fp8e5")
DEFAULTS = ("fp16", "fp8e4")
FP8_SWEEP = "fp8"  # the sweep of one-byte types; the others are of two-byte types


def cases(shapes: Shapes, dtypes: Iterable[str], target: Target) -> list[Case]:
    """Return every product of the sweeps in `dtypes`, by default `DEFAULTS`, once each.

    The sweeps and types are mixed evenly, so that a run that stops early has seen the same part of each.

    Raises:
        SpecError: a type that cannot be tuned or that the arch does not have, or two of one element_bytes.
    """
    chosen = tuple(dtypes) or tuple(name for name in DEFAULTS if name in target.dtypes)
    for name in chosen:
        if name not in TUNABLE or name not in target.dtypes:
            able = ", ".join(name for name in TUNABLE if name in target.dtypes)
            raise SpecError(f"dtype {name!r} cannot be tuned on {target.name}; these can: {able}")
    if len({DTYPES[name].bytes for name in chosen}) != len(chosen):
        raise SpecError(f"a table has one type of each element_bytes, found {', '.join(chosen)}; tune one of them")
    positions: dict[Case, float] = {}  # in a run from 0 to 1
    for name in chosen:
        for sweep in shapes.sweeps:
            if (sweep.name == FP8_SWEEP) != (DTYPES[name].bytes == 1):
                continue
            found = list(_of(sweep, name, target))
            for index, case in enumerate(found):
                positions.setdefault(case, (index + 0.5) / len(found))
    return sorted(positions, key=lambda case: (positions[case], str(case)))


def _of(sweep: Sweep, dtype: str, target: Target) -> Iterator[Case]:
    accumulations = (False, True) if target.fast_accum and DTYPES[dtype].bytes == 1 else (False,)
    # Not in the order of size, so that the first part of a sweep has shapes of all sizes.
    for shape in sorted(sweep.shapes, key=lambda shape: sha256(str(shape).encode()).digest()):
        for fast in accumulations:
            yield Case(replace(shape, name=""), dtype, fast_accum=fast)
