"""Right products pass the check, and wrong ones of every kind do not."""

from __future__ import annotations

import pytest
import torch

from aotmm.timing.check import Truth, truth
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape
from tests.unit.bench.samples import product

CPU = torch.device("cpu")
CASES = [
    Case(Shape(700, 90, 130, "nt"), "fp16"),
    Case(Shape(65, 33, 257, "tn"), "bf16"),
    Case(Shape(300, 64, 128, "nt"), "fp8e4", fast_accum=True),
    Case(Shape(100, 96, 64, "nt"), "fp16", activation="relu"),
    Case(Shape(257, 48, 1000, "nt"), "bf16", activation="gelu"),
    Case(Shape(70, 90, 130, "nn"), "tf32"),
    Case(Shape(700, 40, 64, "nt"), "fp16", batch=3),
]
EXACT = Case(Shape(90, 60, 50, "nt"), "int8")


def _operands(case: Case) -> Operands:
    torch.manual_seed(1)
    return Pool(CPU).operands(case, cache_bytes=1)[0]


def _truth(operands: Operands) -> Truth:
    return truth(operands.a, operands.b, operands.out.dtype, operands.epilogue)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_that_is_rounded_once_is_right(case: Case) -> None:
    """The exact product, rounded to the output's type, is within what is allowed, and uses it."""
    operands = _operands(case)
    found = _truth(operands).error(product(case, operands))
    assert 0 < found <= 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_products(case: Case) -> None:
    """An element that was not written, one K step too few, a shifted tile, a forgotten column: all are seen."""
    operands = _operands(case)
    right, good = _truth(operands), product(case, operands)
    cut = Operands(operands.a[..., :-1], operands.b[..., :-1, :], operands.out, operands.epilogue)
    assert right.error(product(case, cut)) > 1
    unwritten = good.clone()
    unwritten[..., 3, 7] = float("nan")
    assert right.error(unwritten) == float("inf")
    shifted = good.clone()
    shifted[..., -64:, :] = good[..., -64:, :].roll(1, dims=-1)
    assert right.error(shifted) > 1
    column = good.clone()
    column[..., -1] = column[..., -2]
    assert right.error(column) > 1


def test_products_of_integers_are_exact() -> None:
    """int8 gives int32, of which not one may be off by one."""
    operands = _operands(EXACT)
    good = (operands.a.long() @ operands.b.long()).int()
    assert _truth(operands).error(good) == 0
    good[3, 7] += 1
    assert _truth(operands).error(good) > 1


def test_members_of_a_batch_are_compared() -> None:
    """The first member, one in the middle and the last one: the wrong bits of another are seen in each."""
    operands = _operands(CASES[-1])
    right, good = _truth(operands), product(CASES[-1], operands)
    for member in range(3):
        wrong = good.clone()
        wrong[member] = good[member - 1]
        assert right.error(wrong) > 1


def test_sums_of_tf32_may_drift() -> None:
    """Each of K / 8 additions may be cut, and a quarter of the cuts adds up."""
    K = 2**14
    a, b = torch.ones(1, K), torch.ones(K, 1)
    allowed = truth(a, b, torch.float32).allowed.item()
    sums = 2.0**-23 * 6 * K**0.5 * (8 * (K / 8) ** 0.5 + K / 32)
    assert allowed == pytest.approx(sums + 2.0**-24 * (K + sums), rel=1e-6)


def test_separate_kernels_may_round_more_often() -> None:
    """bf16 product, bias and relu one by one: three roundings, more than one, not more than three."""
    case = Case(Shape(200, 200, 300, "nt"), "bf16", activation="relu")
    operands = _operands(case)
    stepwise = torch.relu((operands.a.double() @ operands.b.double()).bfloat16() + operands.epilogue.bias)
    right = _truth(operands)
    assert right.error(stepwise) > 1
    assert right.error(stepwise, roundings=3) <= 1
