"""The cases to measure: random ones and those of the sweeps, in one of the types that take the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from aotmm.errors import SpecError
from aotmm.pack.table import ShapeTimes
from aotmm.problem import DTYPES
from aotmm.target import Target
from aotmm.timing.problems import Case, Shapes, Sweep

# Types in a row take the same time. By default the first one is measured for all of them, where the arch has it.
_ALIKE = (("fp16", "bf16"), ("fp8e4", "fp8e5"), ("tf32",), ("fp32",))
TUNABLE = tuple(name for alike in _ALIKE for name in alike)
FP8_SWEEP = "fp8"  # the sweep of one-byte types; the others are of two-byte types, and four-byte types have none


def types_of(dtypes: Iterable[str], target: Target) -> dict[str, str]:
    """Return the type to measure for each type that is tuned: one of `dtypes`, by default the first of those alike.

    Raises:
        SpecError: a type that cannot be tuned or that the arch does not have, or two that take the same time.
    """
    chosen = tuple(dtypes) or tuple(alike[0] for alike in _ALIKE if alike[0] in target.dtypes)
    for name in chosen:
        if name not in TUNABLE or name not in target.dtypes:
            able = ", ".join(name for name in TUNABLE if name in target.dtypes)
            raise SpecError(f"dtype {name!r} cannot be tuned on {target.name}; these can: {able}")
    for alike in _ALIKE:
        if len(both := [name for name in chosen if name in alike]) > 1:
            raise SpecError(f"{' and '.join(both)} take the same time in a table; tune one of them")
    return {name: measured for measured in chosen for alike in _ALIKE if measured in alike for name in alike}


def type_of(shape: ShapeTimes, types: Mapping[str, str], target: Target) -> str:
    """Return the type in which a shape was measured: of `types`, as of `types_of`, or else the first that it may be.

    Kernels with block scales are of the first type of fp8 alone.
    """
    if shape.element_bytes == DTYPES["fp32"].bytes:
        return "tf32" if shape.kind == "relaxed" else "fp32"
    first = _first(shape.element_bytes, target)
    return first if shape.kind == "block_scaled" else types.get(first, first)


def _first(element_bytes: int, target: Target) -> str:
    """Return the first type of so many bytes that the arch has."""
    return next(name for name in TUNABLE if DTYPES[name].bytes == element_bytes and name in target.dtypes)


def cases(shapes: Shapes, drawn: Mapping[str, Sequence[Case]], types: Mapping[str, str], target: Target) -> list[Case]:
    """Return every product of the sweeps and of the drawn classes in `types`, once each.

    Sweeps and classes are mixed evenly, so that a run that stops early has seen the same part of each.

    Args:
        drawn: as of `draw.draw`; what has a type that is not among `types`, or sums that `target` cannot do, is left
            out.
        types: as of `types_of`.
    """
    groups = [
        list(_of(sweep, name, target))
        for name in dict.fromkeys(types.values())
        for sweep in shapes.sweeps
        if DTYPES[name].bytes == (1 if sweep.name == FP8_SWEEP else 2)
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


def _drawn(found: Iterable[Case], types: Mapping[str, str], target: Target) -> Iterator[Case]:
    for case in found:
        if case.dtype in types and (target.fast_accum or not case.fast_accum):
            dtype = _first(case.element_bytes, target) if case.block_scaled else types[case.dtype]
            yield from _sums(replace(case, dtype=dtype))


def _sums(case: Case) -> Iterator[Case]:
    """Yield a case, after the one of precise sums if it is fast: selection may choose either."""
    if case.fast_accum:
        yield replace(case, fast_accum=False)
    yield case
