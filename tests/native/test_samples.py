"""The fit sees what the launcher computes: `tune.models` and the time model of launcher.h give the same times."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aotmm.pack.schema import KINDS, Kernel
from aotmm.pack.table import Sample, ShapeTimes
from aotmm.problem import BLOCK_SCALE_K, DTYPES, LAYOUTS, SPLITS
from aotmm.runtime.launcher import Plan, Problem
from aotmm.runtime.tuning import CDevice, measured_device
from aotmm.target import Target, target
from aotmm.tune.models import Gpu, formula, inputs, predicted, samples, without_model
from tests.native.reference import AT_ONCE, LEAST_CORRECTION, LONG_STEPS, USUAL_SPLIT, ceil_div, concurrent, tiles
from tests.native.test_core import ROUNDED, load_apart, tuning_for
from tests.samples import SHIPPED

SHAPES = 120
BIG = 1 << 40
SCALED: dict[str, Any] = {"block_scale_a_ptr": 4096, "block_scale_b_ptr": 4096, "block_columns": BLOCK_SCALE_K}


def draw(rng: np.random.Generator) -> ShapeTimes:
    """A product of sizes of any scale, aligned or not, that begins anywhere in a cache line."""
    step = int(rng.choice((1, 8, 64, 64)))
    m, n, k = (max(1, int(2 ** rng.uniform(0, 13)) // step * step) for _ in range(3))
    width = int(rng.choice((1, 2, 4)))
    offset_a, offset_b = (int(rng.choice((0, 0, 0, 16, 64, 2 * width))) for _ in range(2))
    kind = str(rng.choice(KINDS[: {1: 3, 2: 1, 4: 2}[width]]))
    return ShapeTimes(width, str(rng.choice(LAYOUTS)), kind, m, n, k, offset_a, offset_b, held_out=False, times=())


def problem_of(shape: ShapeTimes, dtype: str) -> Problem:
    """The same product for the launcher."""
    m, n, k = shape.M, shape.N, shape.K
    strides_a = (1, m) if shape.layout[0] == "t" else (k, 1)
    strides_b = (1, k) if shape.layout[1] == "t" else (n, 1)
    return Problem(
        *(m, n, k, strides_a, strides_b, (n, 1)),
        *(dtype, dtype, DTYPES[dtype].output),
        a_ptr=4096 + shape.offset_a,
        b_ptr=4096 + shape.offset_b,
        c_ptr=4096,
        allow_tf32=shape.kind == "relaxed" and dtype == "fp32",
        fast_accum=shape.kind == "relaxed" and dtype != "fp32",
        **(SCALED if shape.kind == "block_scaled" else {}),
    )


def plans_of(kernel: Kernel, shape: ShapeTimes, device: CDevice, row: Target) -> list[Sample]:
    """Every number of slices that K has steps for, in at most two waves, with and without pdl if the kernel can."""
    steps, work = ceil_div(shape.K, kernel.config.block_k), tiles(kernel, shape.M, shape.N)
    deep = [split for split in SPLITS if steps >= split * (2 if split <= USUAL_SPLIT else LONG_STEPS)]
    splits = [split for split in deep if split * work <= 2 * concurrent(kernel, device, row)]
    splits = splits if kernel.role == "partial" else [1]
    splits = splits if kernel.layout != "any" else splits[-1:]  # generic ones are considered with the most slices only
    ways = (True, False) if kernel.pdl else (False,)
    return [Sample(kernel.config_name, split, pdl, 0, 1) for split in splits for pdl in ways]


def looked_at(among: list[Sample], by_formula: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """The times of the plans that the network sees before it stops: some at once, fastest by the formula first."""
    slices = {each.split: time for each, time in zip(among, by_formula, strict=True)}
    ordered = sorted(slices, key=lambda split: (slices[split], split))
    found: list[float] = []
    for first in range(0, len(ordered), AT_ONCE):
        if found and min(found) < LEAST_CORRECTION * slices[ordered[first]]:
            break
        group = ordered[first : first + AT_ONCE]
        found += [time for each, time in zip(among, times, strict=True) if each.split in group]
    return np.array(found)


@pytest.mark.parametrize("network", [False, True], ids=["formula", "network"])
@pytest.mark.parametrize("arch", SHIPPED)
def test_samples_have_the_launchers_times(arch: str, network: bool) -> None:  # noqa: FBT001
    """For every kernel the launcher takes the plan that is fastest by these inputs and weights, and costs as much."""
    rng, mm, row = np.random.default_rng(5), load_apart(arch), target(arch)
    table = replace(tuning_for(arch, network=network), shapes=())
    mm.retune(table)
    device = measured_device(table, row.shared_bytes)
    dtypes = {4: "fp32", 2: "fp16", 1: "fp8e4" if "fp8e4" in row.dtypes else "fp8e5"}
    cases: list[tuple[ShapeTimes, Kernel, Plan, list[Sample]]] = []
    timed: list[ShapeTimes] = []
    for _ in range(SHAPES):
        shape = draw(rng)
        problem = problem_of(shape, dtypes[shape.element_bytes])
        able: list[tuple[Kernel, Plan, list[Sample]]] = []
        for number, kernel in enumerate(mm.kernels):
            of_kind = kernel.kind == shape.kind and (kernel.dtype_c == problem.dtype_c or kernel.role == "partial")
            plan = mm.check(problem, device, number, BIG).plan if of_kind else None
            if plan is not None and not plan.copies:
                able.append((kernel, plan, plans_of(kernel, shape, device, row)))
        cases += [(shape, *each) for each in able]
        timed.append(replace(shape, times=tuple(sample for _, _, among in able for sample in among)))
    found = samples(mm.kernels, Gpu(row, table), timed)
    of_every = predicted(found, table) if network else formula(found.parts)
    scaled = inputs(found, np.array([model.factors for model in table.models_of(found.keys)]))[1]
    scaled = np.where(without_model(found, table), formula(found.parts), scaled)
    ends = np.cumsum([len(among) for *_, among in cases])
    assert len(of_every) == ends[-1]
    seen = collections.Counter[str]()
    for (shape, kernel, plan, among), times, parts in zip(
        cases, *(np.split(x, ends[:-1]) for x in (of_every, scaled)), strict=True
    ):
        # the formula knows no pdl: both have its time
        chosen = next(
            i for i, each in enumerate(among) if each.split == plan.split and each.pdl in (plan.pdl, not network)
        )
        where = shape, kernel.name, plan
        assert plan.cost == pytest.approx(times[chosen], abs=1 + ROUNDED * times[chosen]), where
        least = (looked_at(among, parts, times) if network else times).min()
        assert plan.cost == pytest.approx(least, abs=1 + ROUNDED * least), where
        seen.update([kernel.role, f"pdl {plan.pdl}", "odd" if shape.K % 8 or shape.offset_a else "aligned"])
    assert min(seen["product"], seen["partial"], seen["odd"], seen["aligned"]) > 20, seen
    assert arch != "sm90" or min(seen["pdl True"], seen["pdl False"]) > 20, seen
