"""The cases to measure: random ones and those of the sweeps, with one type for each element_bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from aotmm.errors import SpecError
from aotmm.problem import DTYPES
from aotmm.target import Target
from aotmm.timing.problems import Case, Shapes, Sweep

# Types that stand for all of their element_bytes: their speed is that of the tensor cores and of memory. In this order.
TUNABLE = ("fp16", "bf16", "fp8e4", "fp8e5", "tf32")
DEFAULTS = ("fp16", "fp8e4", "tf32")
FP8_SWEEP = "fp8"  # the sweep of one-byte types; the others are of two-byte types, and four-byte types have none


def types_of(dtypes: Iterable[str], target: Target) -> dict[int, str]:
    """Return the type to measure for each element_bytes: those of `dtypes`, by default `DEFAULTS`.

    Raises:
        SpecError: a type that cannot be tuned or that the arch does not have, or two of one element_bytes.
    """
    chosen = tuple(dtypes) or tuple(name for name in DEFAULTS if name in target.dtypes)
    for name in chosen:
        if name not in TUNABLE or name not in target.dtypes:
            able = ", ".join(name for name in TUNABLE if name in target.dtypes)
            raise SpecError(f"dtype {name!r} cannot be tuned on {target.name}; these can: {able}")
    found = {DTYPES[name].bytes: name for name in chosen}
    if len(found) != len(chosen):
        raise SpecError(f"a table has one type of each element_bytes, found {', '.join(chosen)}; tune one of them")
    return found


def cases(shapes: Shapes, drawn: Mapping[str, Sequence[Case]], types: Mapping[int, str], target: Target) -> list[Case]:
    """Return every product of the sweeps and of the drawn classes in `types`, once each.

    Sweeps and classes are mixed evenly, so that a run that stops early has seen the same part of each.

    Args:
        drawn: as of `draw.draw`; what has a type that is not among `types`, or sums that `target` cannot do, is left
            out.
        types: as of `types_of`.
    """
    groups = [
        list(_of(sweep, name, target))
        for element_bytes, name in types.items()
        for sweep in shapes.sweeps
        if element_bytes == (1 if sweep.name == FP8_SWEEP else 2)
    ]
    groups += [list(_drawn(each, types, target)) for each in drawn.values()]
    positions: dict[Case, float] = {}  # in a run from 0 to 1
    for group in groups:
        for index, case in enumerate(group):
            positions.setdefault(case, (index + 0.5) / len(group))
    return sorted(positions, key=lambda case: (positions[case], str(case)))


def _of(sweep: Sweep, dtype: str, target: Target) -> Iterator[Case]:
    fast_too = target.fast_accum and DTYPES[dtype].bytes == 1
    # Not in the order of size, so that the first part of a sweep has shapes of all sizes.
    for shape in sorted(sweep.shapes, key=lambda shape: sha256(str(shape).encode()).digest()):
        yield from _sums(Case(replace(shape, name=""), dtype, fast_accum=fast_too))


def _drawn(found: Iterable[Case], types: Mapping[int, str], target: Target) -> Iterator[Case]:
    for case in found:
        if case.dtype in TUNABLE and case.element_bytes in types and (target.fast_accum or not case.fast_accum):
            yield from _sums(replace(case, dtype=types[case.element_bytes]))


def _sums(case: Case) -> Iterator[Case]:
    """Yield a case, after the one of precise sums if it is fast: selection may choose either."""
    if case.fast_accum:
        yield replace(case, fast_accum=False)
    yield case
