"""Which products are measured, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotmm.errors import SpecError
from aotmm.pack.table import ShapeTimes
from aotmm.target import target
from aotmm.timing.draw import distribution, draw
from aotmm.timing.problems import Case, Shape, Shapes, Sweep
from aotmm.tune.cases import cases, type_of, types_of

SQUARES = Sweep("squares", "", tuple(Shape(64 * i, 64 * i, 64 * i, "nn") for i in range(1, 41)))
AGAIN = Sweep("again", "", SQUARES.shapes[:10])
SKINNY = Sweep("skinny", "", tuple(Shape(i, 4096, 4096, "nt", "a name") for i in range(1, 11)))
FP8 = Sweep("fp8", "", (Shape(1024, 1024, 1024, "nt"),))
SHAPES = Shapes(7, (SQUARES, AGAIN, SKINNY, FP8))

UNTIMED = ("int8",)  # its kernels go by times of fp8
STAND_IN = {"bf16": "fp16", "fp8e5": "fp8e4"}  # of types that take the same time


def _cases(dtypes: tuple[str, ...], arch: str, drawn: dict[str, list[Case]] | None = None) -> list[Case]:
    return cases(SHAPES, drawn or {}, types_of(dtypes, target(arch)), target(arch))


def test_one_type_stands_for_those_that_take_the_same_time() -> None:
    """fp16 on the other sweeps, fp8e4 on its own, both ways to sum; every product once."""
    found = _cases((), "sm90")
    assert len(found) == len(set(found)) == 40 + 10 + 2
    fp8 = [case for case in found if case.element_bytes == 1]
    assert fp8 == [Case(FP8.shapes[0], "fp8e4", fast_accum=fast) for fast in (False, True)]
    assert {case.dtype for case in found if case.element_bytes == 2} == {"fp16"}


def test_what_an_arch_does_not_have_is_left_out() -> None:
    """sm80 has no e4m3, so fp8 is not measured there unless it is asked for."""
    assert {case.dtype for case in _cases((), "sm80")} == {"fp16"}
    asked = _cases(("fp8e5",), "sm80")
    assert [(case.dtype, case.fast_accum) for case in asked] == [("fp8e5", False)]


@pytest.mark.parametrize("part", [0.2, 0.5])
def test_every_part_has_the_same_mix(part: float) -> None:
    """Where time runs out, each sweep was seen to the same part, and not only its small shapes."""
    found = _cases((), "sm90")
    first = found[: int(part * len(found))]
    for sweep in (SQUARES, SKINNY):
        shapes = {str(shape) for shape in sweep.shapes}
        seen = [case for case in first if str(case.shape) in shapes]
        assert len(seen) == pytest.approx(part * len(shapes), abs=2)
    assert max(case.shape.M for case in first) > 64 * 30


@pytest.mark.parametrize(
    ("dtypes", "arch", "message"),
    [
        (("fp64",), "sm90", "'fp64' cannot be tuned on sm90; these can: fp16, bf16, fp8e4, fp8e5, tf32, fp32"),
        (("fp8e4",), "sm80", "'fp8e4' cannot be tuned on sm80; these can: fp16, bf16, fp8e5, tf32, fp32"),
        (("fp16", "fp32", "bf16"), "sm90", "fp16 and bf16 take the same time in a table; tune one of them"),
    ],
)
def test_types_that_cannot_be_meant(dtypes: tuple[str, ...], arch: str, message: str) -> None:
    """Unknown types, types of another arch, two that take the same time."""
    with pytest.raises(SpecError, match=message):
        types_of(dtypes, target(arch))


def test_the_type_of_a_measured_shape() -> None:
    """That which was measured; of another size the first that the arch has; 4 bytes are tf32 only if relaxed."""

    def of(element_bytes: int, kind: str, dtypes: tuple[str, ...], arch: str) -> str:
        sizes = (8, 8, 8, 0, 0)
        shape = ShapeTimes(element_bytes, "nn", kind, *sizes, held_out=False, times=())
        return type_of(shape, types_of(dtypes, target(arch)), target(arch))

    assert (of(2, "plain", (), "sm90"), of(2, "plain", ("bf16",), "sm90")) == ("fp16", "bf16")
    assert (of(1, "plain", ("fp16",), "sm90"), of(1, "plain", ("fp16",), "sm80")) == ("fp8e4", "fp8e5")
    assert (of(4, "plain", (), "sm90"), of(4, "relaxed", (), "sm90")) == ("fp32", "tf32")


@pytest.mark.parametrize(("arch", "dtype"), [("sm90", "fp8e4"), ("sm80", "fp8e5")])
def test_block_scales_are_timed_in_the_first_fp8_of_the_arch(arch: str, dtype: str) -> None:
    """Its kernels with block scales are for that type alone, whichever of fp8 is asked for."""
    scaled = Case(Shape(8, 2112, 7168, "nt"), "fp8e4", block_scaled=True)
    found = cases(Shapes(7, ()), {"block_scaled": [scaled]}, types_of(("fp8e5",), target(arch)), target(arch))
    assert found == [replace(scaled, dtype=dtype)]


def test_random_problems_are_in_the_types_that_are_measured() -> None:
    """bf16 as fp16, with its offsets; fast sums after the precise ones that selection may choose as well; once each."""
    drawn = draw(distribution(), 7, 100)
    found = _cases((), "sm90", drawn)
    assert len(found) == len(set(found))
    assert {case.dtype for case in found} == {"fp16", "fp8e4", "tf32", "fp32"}
    every = {
        replace(case, dtype=STAND_IN.get(case.dtype, case.dtype))
        for x in drawn.values()
        for case in x
        if case.dtype not in UNTIMED
    }
    precise = {replace(case, fast_accum=False) for case in every}
    assert set(found) - set(_cases((), "sm90")) == every | precise
    assert any(case.offset_a or case.offset_b for case in found)
    for case in found:
        assert not case.fast_accum or found.index(replace(case, fast_accum=False)) < found.index(case)


@pytest.mark.parametrize(
    ("dtypes", "arch", "kinds"),
    [
        (("bf16",), "sm90", {("bf16", False)}),
        (("fp8e5",), "sm90", {("fp8e5", False), ("fp8e5", True)}),
        ((), "sm80", {("fp16", False), ("tf32", False), ("fp32", False)}),
        (("fp8e5", "fp16"), "sm80", {("fp16", False), ("fp8e5", False)}),
    ],
)
def test_random_problems_that_cannot_be_measured_are_left_out(
    dtypes: tuple[str, ...], arch: str, kinds: set[tuple[str, bool]]
) -> None:
    """What has none of the types, or sums that the arch cannot do."""
    found = _cases(dtypes, arch, draw(distribution(), 7, 50))
    assert {(case.dtype, case.fast_accum) for case in found} == kinds
    assert len(found) > len(_cases(dtypes, arch))


def test_every_part_has_random_problems_too() -> None:
    """Where time runs out, each class and each sweep was seen to the same part."""
    drawn = draw(distribution(), 7, 200)
    found = _cases((), "sm90", drawn)
    first = set(found[: len(found) // 4])
    for name, cases_of_class in drawn.items():
        if {case.dtype for case in cases_of_class} <= set(UNTIMED):
            assert not any(case.dtype in UNTIMED for case in found), name
            continue
        mine = [replace(case, dtype=STAND_IN.get(case.dtype, case.dtype)) for case in cases_of_class]
        assert sum(case in first for case in mine) == pytest.approx(len(mine) / 4, abs=2)
    assert sum(str(case.shape) in {str(shape) for shape in SQUARES.shapes} for case in first) == pytest.approx(
        10, abs=2
    )
