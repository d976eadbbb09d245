"""The operands that products are timed with."""

from __future__ import annotations

import itertools

import pytest
import torch

from aotmm.timing.operands import Pool, torch_dtype
from aotmm.timing.problems import Case, Shape

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8e4", "tf32", "fp32"])
def test_operands(dtype: str, layout: str) -> None:
    """Contiguous in their layout, aligned, random, more than twice the cache together, and none shares memory."""
    case = Case(Shape(70, 90, 50, layout), dtype)
    sets = Pool(CPU).operands(case, cache_bytes=10 * case.bytes)
    assert len(sets) == 20
    for operands in sets:
        for tensor, (rows, cols), order in ((operands.a, (70, 50), layout[0]), (operands.b, (50, 90), layout[1])):
            assert tensor.shape == (rows, cols)
            assert (tensor if order == "n" else tensor.T).is_contiguous()
            assert tensor.dtype is torch_dtype(case.dtype)
            assert (tensor.data_ptr() - sets[0].a.data_ptr()) % 256 == 0
            assert 0.8 < float(tensor.float().std()) < 1.2
        assert operands.out.shape == (70, 90)
        assert operands.out.dtype is (torch.bfloat16 if dtype == "fp8e4" else torch_dtype(case.dtype))
    spans = sorted((tensor.data_ptr(), tensor.numel() * tensor.itemsize) for x in sets for tensor in (x.a, x.b, x.out))
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))


def test_operands_of_a_batch() -> None:
    """Matrices follow each other without a gap; the layout is that of each."""
    case = Case(Shape(70, 90, 50, "nt"), "fp16", batch=3)
    operands = Pool(CPU).operands(case, cache_bytes=1)[0]
    assert (operands.a.shape, operands.b.shape, operands.out.shape) == ((3, 70, 50), (3, 50, 90), (3, 70, 90))
    assert operands.a.is_contiguous()
    assert operands.b.mT.is_contiguous()
    assert operands.out.is_contiguous()


def test_tf32_holds_its_operands() -> None:
    """Thirteen bits of the fraction are 0, so that nothing is rounded, and all others are random."""
    bits = Pool(CPU).operands(Case(Shape(64, 64, 64, "nn"), "tf32"), cache_bytes=1)[0].a.view(torch.int32)
    assert not (bits & 0x1FFF).any()
    assert len(set((bits >> 13 & 0x3FF).flatten().tolist())) > 512


def test_integers_are_uniform_and_unset() -> None:
    """Operands of int8 have all its numbers, and C gets the number that no right product has."""
    operands = Pool(CPU).operands(Case(Shape(64, 64, 256, "nt"), "int8"), cache_bytes=1)[0]
    assert len(set(operands.a.flatten().tolist())) == 256
    operands.unset()
    assert (operands.out == -(2**31)).all()


def test_large_operands_come_in_three_sets_and_small_ones_not_in_thousands() -> None:
    """The number of sets is at least 3, and at most 512."""
    pool = Pool(CPU)
    assert len(pool.operands(Case(Shape(64, 64, 64, "nn"), "fp16"), cache_bytes=1)) == 3
    assert len(pool.operands(Case(Shape(1, 1, 1, "nn"), "fp16"), cache_bytes=1 << 20)) == 512
