"""The products to measure: those of the sweeps, with one type for each element_bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from aotmm.errors import SpecError
from aotmm.problem import DTYPES
from aotmm.target import Target
from aotmm.tune.shapes import Shapes, Sweep

# Types that stand for all of their element_bytes: their speed is that of the tensor cores and of memory. In this order.
TUNABLE = ("fp16", "bf16", "fp8e4", "fp8e5")
DEFAULTS = ("fp16", "fp8e4")
NARROW_SWEEP = "fp8"  # the sweep of one-byte types; the others are of two-byte types


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One product to measure: A (M, K) @ B (K, N) of `dtype`, contiguous in `layout`, C row-major.

    `fast_accum` is as in `matmul`; `held_out` cases test the models and are not fitted.
    """

    dtype: str
    fast_accum: bool
    layout: str
    M: int
    N: int
    K: int
    held_out: bool

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} {self.layout} {self.dtype}" + " fast" * self.fast_accum

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element of A and B."""
        return DTYPES[self.dtype].bytes


def cases(shapes: Shapes, dtypes: Iterable[str], target: Target) -> list[Case]:
    """Return every product of the sweeps in `dtypes`, by default `DEFAULTS`, once each.

    The sweeps and types are mixed evenly, so that a run that stops early has seen the same part of each.

    Raises:
        SpecError: a type that cannot be tuned or that the arch does not have, or two of one element_bytes.
    """
    wanted = tuple(dtypes) or tuple(name for name in DEFAULTS if name in target.dtypes)
    for name in wanted:
        if name not in TUNABLE or name not in target.dtypes:
            able = ", ".join(name for name in TUNABLE if name in target.dtypes)
            raise SpecError(f"dtype {name!r} cannot be tuned on {target.name}; these can: {able}")
    widths = [DTYPES[name].bytes for name in wanted]
    if len(set(widths)) != len(widths):
        raise SpecError(f"a table has one type of each element_bytes, found {', '.join(wanted)}; tune one of them")
    placed: dict[Case, float] = {}
    for name in wanted:
        for sweep in shapes.sweeps:
            if (sweep.name == NARROW_SWEEP) != (DTYPES[name].bytes == 1):
                continue
            found = list(_of(sweep, shapes, name, target))
            for index, case in enumerate(found):
                placed.setdefault(case, (index + 0.5) / len(found))
    return sorted(placed, key=lambda case: (placed[case], case))


def _of(sweep: Sweep, shapes: Shapes, dtype: str, target: Target) -> Iterable[Case]:
    accumulations = (False, True) if target.fast_accum and DTYPES[dtype].bytes == 1 else (False,)
    # Not in the order of size, so that the first part of a sweep has shapes of all sizes.
    for shape in sorted(sweep.shapes, key=lambda shape: sha256(str(shape).encode()).digest()):
        for fast in accumulations:
            yield Case(dtype, fast, shape.layout, shape.M, shape.N, shape.K, shapes.held_out(shape))
