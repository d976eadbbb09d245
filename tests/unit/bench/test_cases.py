"""What is measured, and the operands that it is measured with."""

from __future__ import annotations

import itertools

import pytest
import torch

from aotmm.bench.cases import PLANS, Case, Pool, work
from aotmm.bench.providers import NAMES
from aotmm.errors import SpecError
from aotmm.tune.shapes import Shape, read

SHAPES = read()
CPU = torch.device("cpu")


def test_every_sweep_has_a_plan_of_known_providers() -> None:
    """No sweep is forgotten, and none asks for a provider that there is not."""
    assert list(PLANS) == [sweep.name for sweep in SHAPES.sweeps]
    assert {name for plan in PLANS.values() for name in plan.providers} == set(NAMES)


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


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8e4"])
def test_operands(dtype: str, layout: str) -> None:
    """Contiguous in their layout, aligned, random, more than twice the cache together, and none shares memory."""
    case = Case(Shape(70, 90, 50, layout), dtype)
    sets = Pool(CPU).operands(case, cache_bytes=10 * case.bytes)
    assert len(sets) == 20
    for operands in sets:
        for tensor, (rows, cols), order in ((operands.a, (70, 50), layout[0]), (operands.b, (50, 90), layout[1])):
            assert tensor.shape == (rows, cols)
            assert (tensor if order == "n" else tensor.T).is_contiguous()
            assert tensor.dtype is case.storage
            assert (tensor.data_ptr() - sets[0].a.data_ptr()) % 256 == 0
            assert 0.8 < float(tensor.float().std()) < 1.2
        assert operands.out.shape == (70, 90)
        assert operands.out.dtype is (torch.bfloat16 if dtype == "fp8e4" else case.storage)
    places = sorted((tensor.data_ptr(), tensor.numel() * tensor.itemsize) for x in sets for tensor in (x.a, x.b, x.out))
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(places))


def test_large_operands_come_in_three_sets_and_small_ones_not_in_thousands() -> None:
    """The number of sets is at least 3, and at most 512."""
    pool = Pool(CPU)
    assert len(pool.operands(Case(Shape(64, 64, 64, "nn"), "fp16"), cache_bytes=1)) == 3
    assert len(pool.operands(Case(Shape(1, 1, 1, "nn"), "fp16"), cache_bytes=1 << 20)) == 512
