"""Measurements of one case, with launches that the CPU does: the operands behind each launch, and the check."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aotmm.problem import LAYOUTS
from aotmm.runtime.launcher import Plan, Problem
from aotmm.timing.operands import Pool
from aotmm.timing.problems import Case, Shape
from aotmm.tune import measure
from aotmm.tune.candidates import Candidate, problem_of
from aotmm.tune.measure import GpuTimer

CANDIDATE = Candidate("tile", "tile_a", Plan(kernel=0))


@pytest.mark.parametrize("dtype", ["fp16", "fp8e4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_problem_has_the_strides_of_its_operands(layout: str, dtype: str) -> None:
    """A and B, read by a problem's strides as a kernel does, are the operands that the check multiplies."""
    case = Case(Shape(5, 7, 33, layout), dtype)
    operands = Pool(torch.device("cpu")).operands(case, 1, "bf16")[0]
    problem = problem_of(case, "bf16", *(x.data_ptr() for x in (operands.a, operands.b, operands.out)))
    assert torch.equal(operands.a.as_strided((5, 33), problem.strides_a).float(), operands.a.float())
    assert torch.equal(operands.b.as_strided((33, 7), problem.strides_b).float(), operands.b.float())
    assert operands.out.stride() == problem.strides_c
    assert operands.out.dtype is torch.bfloat16


@pytest.mark.parametrize(("K", "blocks"), [(256, 2), (300, 3)])
def test_a_problem_has_the_strides_of_its_block_scales(K: int, blocks: int) -> None:
    """Those of A have neighbours along M, those of B, one for each block, along K."""
    problem = problem_of(Case(Shape(8, 384, K, "nt"), "fp8e4", block_scaled=True), "bf16", 16, 32, 48, 64, 80)
    assert (problem.block_scale_a_ptr, problem.block_scale_b_ptr, problem.block_columns) == (64, 80, 128)
    numbers = torch.arange(8 * blocks)
    _, row, block = problem.block_strides_a
    assert torch.equal(numbers.as_strided((8, blocks), (row, block)), numbers.view(blocks, 8).t())
    _, block, columns = problem.block_strides_b
    numbers = numbers[: 3 * blocks]
    assert torch.equal(numbers.as_strided((blocks, 3), (block, columns)), numbers.view(3, blocks).t())


def test_every_set_has_its_turn_and_the_first_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs go through all sets and end with the first; its result is right, or wrong, or was never written."""
    torch.manual_seed(3)
    order: list[int] = []
    factor = 1.0
    case = Case(Shape(300, 40, 64, "nt"), "fp16")
    sets = Pool(torch.device("cpu")).operands(case, cache_bytes=2 * case.bytes)
    assert len(sets) == 4
    problems = [problem_of(case, "fp16", 0, 0, number) for number in range(len(sets))]

    def launch(_: Candidate, problem: Problem) -> None:
        order.append(problem.c_ptr)
        row = sets[problem.c_ptr]
        row.out.copy_(factor * (row.a.double() @ row.b.double()))

    monkeypatch.setattr(measure, "recorded", lambda launch, sets: [launch(each) for each in sets])
    timer = GpuTimer(launch, problems, sets[0], 7.0)
    assert (timer.sets, timer.busy_ns) == (4, 7.0)
    for launches, wanted in ((2, [3, 0]), (4, [1, 2, 3, 0]), (6, [3, 0, 1, 2, 3, 0])):
        order.clear()
        timer.record(CANDIDATE, launches)
        assert order == wanted
        assert timer.error(CANDIDATE) is None
    factor = 1.01
    timer.record(CANDIDATE, 2)
    assert "times what is allowed" in str(timer.error(CANDIDATE))
    sets[0].out[7, 7] = float("nan")
    assert timer.error(CANDIDATE) == "its error is inf times what is allowed"


@pytest.mark.parametrize(("dtype", "us"), [("fp16", 57.8), ("fp8e4", 28.9), ("tf32", 115.7)])
def test_busy_products(dtype: str, us: float) -> None:
    """2048 cubed takes 58 us at three tenths of 990 TFLOP/s, half of it in fp8; all products of a batch count."""
    case = Case(Shape(2048, 2048, 2048, "nt"), dtype)
    found = measure.busy_ns(case, 990)
    assert found == pytest.approx(1e3 * us, rel=1e-3)
    assert measure.busy_ns(replace(case, batch=4), 990) == 4 * found
    assert measure.busy_ns(case, 330) == pytest.approx(3 * found)
