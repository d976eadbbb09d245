"""Which products are measured, and in which order."""

from __future__ import annotations

import pytest

from aotmm.errors import SpecError
from aotmm.target import target
from aotmm.timing.problems import Case, Shape, Shapes, Sweep
from aotmm.tune.cases import cases

SQUARES = Sweep("squares", "", tuple(Shape(64 * i, 64 * i, 64 * i, "nn") for i in range(1, 41)))
AGAIN = Sweep("again", "", SQUARES.shapes[:10])
SKINNY = Sweep("skinny", "", tuple(Shape(i, 4096, 4096, "nt", "a name") for i in range(1, 11)))
FP8 = Sweep("fp8", "", (Shape(1024, 1024, 1024, "nt"),))
SHAPES = Shapes(7, (SQUARES, AGAIN, SKINNY, FP8))


def test_one_type_stands_for_each_element_size() -> None:
    """fp16 on the other sweeps, fp8e4 on its own, both ways to sum; every product once."""
    found = cases(SHAPES, (), target("sm90"))
    assert len(found) == len(set(found)) == 40 + 10 + 2
    fp8 = [case for case in found if case.element_bytes == 1]
    assert fp8 == [Case(FP8.shapes[0], "fp8e4", fast_accum=fast) for fast in (False, True)]
    assert {case.dtype for case in found if case.element_bytes == 2} == {"fp16"}


def test_what_an_arch_does_not_have_is_left_out() -> None:
    """sm80 has no e4m3, so fp8 is not measured there unless it is asked for."""
    assert {case.dtype for case in cases(SHAPES, (), target("sm80"))} == {"fp16"}
    asked = cases(SHAPES, ("fp8e5",), target("sm80"))
    assert [(case.dtype, case.fast_accum) for case in asked] == [("fp8e5", False)]


@pytest.mark.parametrize("part", [0.2, 0.5])
def test_every_part_has_the_same_mix(part: float) -> None:
    """Where time runs out, each sweep was seen to the same part, and not only its small shapes."""
    found = cases(SHAPES, (), target("sm90"))
    first = found[: int(part * len(found))]
    for sweep in (SQUARES, SKINNY):
        shapes = {str(shape) for shape in sweep.shapes}
        seen = [case for case in first if str(case.shape) in shapes]
        assert len(seen) == pytest.approx(part * len(shapes), abs=2)
    assert max(case.shape.M for case in first) > 64 * 30


@pytest.mark.parametrize(
    ("dtypes", "arch", "message"),
    [
        (("fp64",), "sm90", "'fp64' cannot be tuned on sm90; these can: fp16, bf16, fp8e4, fp8e5"),
        (("fp8e4",), "sm80", "'fp8e4' cannot be tuned on sm80; these can: fp16, bf16, fp8e5"),
        (("fp16", "bf16"), "sm90", "one type of each element_bytes, found fp16, bf16"),
    ],
)
def test_types_that_cannot_be_meant(dtypes: tuple[str, ...], arch: str, message: str) -> None:
    """Unknown types, types of another arch, two of one element_bytes."""
    with pytest.raises(SpecError, match=message):
        cases(SHAPES, dtypes, target(arch))
