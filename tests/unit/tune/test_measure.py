"""Operands of a measurement: addresses and tensors speak of the same memory."""

from __future__ import annotations

import pytest
import torch

from aotmm.problem import DTYPES, LAYOUTS
from aotmm.tune.cases import Case
from aotmm.tune.measure import Operands, normal, sizes_of


def _operands(layout: str, dtype: str = "fp16") -> Operands:
    case = Case(dtype, fast_accum=False, layout=layout, M=5, N=7, K=33, held_out=False)
    return Operands(
        case, "bf16", normal(2000, dtype, "cpu"), torch.zeros(4096, dtype=torch.uint8), sizes_of(case, "bf16")
    )


@pytest.mark.parametrize("dtype", ["fp16", "fp8e4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_product_at_the_addresses(layout: str, dtype: str) -> None:
    """A and B, read by address and strides as a kernel does, give the reference, in every layout."""
    operands = _operands(layout, dtype)
    problem = operands.problem(0)
    size = DTYPES[dtype].bytes
    starts = [(pointer - operands.random.data_ptr()) // size for pointer in (problem.a_ptr, problem.b_ptr)]
    a = operands.random.as_strided((5, 33), problem.strides_a, starts[0]).float()
    b = operands.random.as_strided((33, 7), problem.strides_b, starts[1]).float()
    assert torch.equal(operands.reference(), a @ b)
    assert operands.result().data_ptr() == problem.c_ptr
    assert operands.result().shape == (5, 7)
    assert operands.result().dtype == torch.bfloat16


def test_operands_rotate_and_do_not_overlap() -> None:
    """Sets follow each other in aligned places, as many as there is room for, and then begin again."""
    operands = _operands("nn")
    a, b, c = operands.sizes
    assert (a, b, c) == (512, 512, 256)
    problems = [operands.problem(number) for number in range(4)]
    start = operands.random.data_ptr()
    assert [problem.a_ptr - start for problem in problems] == [0, 1024, 2048, 0]
    assert all(problem.b_ptr - problem.a_ptr == a for problem in problems)
    first = operands.results.data_ptr()
    assert [operands.problem(number).c_ptr - first for number in (0, 1, 15, 16)] == [0, c, 15 * c, 0]


def test_random_numbers_are_normal() -> None:
    """Mean 0, deviation 1, also of a type that has no generator."""
    for dtype in ("fp16", "fp8e4"):
        values = normal(100_000, dtype, "cpu").float()
        assert abs(float(values.mean())) < 0.02
        assert float(values.std()) == pytest.approx(1, abs=0.02)
