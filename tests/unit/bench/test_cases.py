"""The measured cases and their providers."""

from __future__ import annotations

import pytest

from aotmm.bench.cases import COMPARISONS, work
from aotmm.bench.providers import NAMES
from aotmm.errors import SpecError
from aotmm.timing.problems import read

SHAPES = read()


def test_every_sweep_is_compared_with_known_providers() -> None:
    """No sweep is forgotten, and none asks for a provider that there is not; int8 is in random problems alone."""
    assert list(COMPARISONS) == [sweep.name for sweep in SHAPES.sweeps]
    assert {name for plan in COMPARISONS.values() for name in plan.providers} == set(NAMES) - {"int_mm"}


def test_a_shape_of_two_sweeps_is_measured_once() -> None:
    """Both square sweeps have 1024^3; its one case belongs to both and is measured in both types."""
    found = work(SHAPES, ["squares256", "squares128"])
    assert len({item.case for item in found}) == len(found) == 2 * (31 + 31 - 15)
    shared = [item for item in found if item.case.shape.M == 1024]
    assert [(item.case.dtype, item.sweeps) for item in shared] == [
        ("fp16", ("squares256", "squares128")),
        ("bf16", ("squares256", "squares128")),
    ]


def test_a_part_of_the_work() -> None:
    """Types, providers and every n-th shape narrow what is measured; fp8 has both kinds of sums."""
    found = work(SHAPES, ["squares256"], dtypes=["bf16"], providers=["torch", "aotmm"], every=10)
    assert [item.case.shape.M for item in found] == [512, 3072, 5632, 8192]
    assert {(item.case.dtype, item.providers) for item in found} == {("bf16", ("aotmm", "torch"))}
    assert [item.case.fast_accum for item in work(SHAPES, ["fp8"])[:4]] == [False, True, False, True]
    with pytest.raises(SpecError, match="unknown sweep 'cubes'"):
        work(SHAPES, ["cubes"])
