"""Right products pass the check, and wrong ones of every kind do not."""

from __future__ import annotations

import pytest
import torch

from aotmm.bench.cases import Case, Operands, Pool
from aotmm.bench.check import error, truth
from aotmm.tune.shapes import Shape
from tests.unit.bench.samples import product

CPU = torch.device("cpu")
CASES = [
    Case(Shape(700, 90, 130, "nt"), "fp16"),
    Case(Shape(65, 33, 257, "tn"), "bf16"),
    Case(Shape(300, 64, 128, "nt"), "fp8e4", fast_accum=True),
    Case(Shape(100, 96, 64, "nt"), "fp16", activation="relu"),
    Case(Shape(257, 48, 1000, "nt"), "bf16", activation="gelu"),
]


def _operands(case: Case) -> Operands:
    torch.manual_seed(1)
    return Pool(CPU).operands(case, cache_bytes=1)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_that_is_rounded_once_is_right(case: Case) -> None:
    """The exact product, rounded to the output's type, is within what is allowed, and uses it."""
    operands = _operands(case)
    found = error(truth(case, operands), product(case, operands), roundings=1)
    assert 0 < found <= 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_products(case: Case) -> None:
    """An element that was not written, one K step too few, a shifted tile, a forgotten column: all are seen."""
    operands = _operands(case)
    true, good = truth(case, operands), product(case, operands)
    cut = Operands(operands.a[:, :-1], operands.b[:-1], operands.out, operands.bias, operands.scale_a, operands.scale_b)
    assert error(true, product(case, cut), roundings=1) > 1
    unwritten = good.clone()
    unwritten[3, 7] = float("nan")
    assert error(true, unwritten, roundings=1) == float("inf")
    shifted = good.clone()
    shifted[-64:] = good[-64:].roll(1, dims=1)
    assert error(true, shifted, roundings=1) > 1
    column = good.clone()
    column[:, -1] = column[:, -2]
    assert error(true, column, roundings=1) > 1


def test_separate_kernels_may_round_more_often() -> None:
    """bf16 product, bias and relu one by one: three roundings, more than one, not more than three."""
    case = Case(Shape(200, 200, 300, "nt"), "bf16", activation="relu")
    operands = _operands(case)
    stepwise = torch.relu((operands.a.double() @ operands.b.double()).bfloat16() + operands.bias)
    true = truth(case, operands)
    assert error(true, stepwise, roundings=1) > 1
    assert error(true, stepwise, roundings=3) <= 1
