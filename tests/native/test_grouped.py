"""Grouped products: exact over ragged groups, in bounds, independent of the offsets, with the single product's bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotmm.errors import NoKernelError
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import Plan, Problem
from tests.build.packs import pack_of
from tests.native.emulation import ARCHS, Emulator, missing, own_process, submit
from tests.native.groups import CONFIGS, Case, Grouped, able, outcomes, run

MANY = 512  # groups
PER_CALL = 4


@pytest.fixture(params=ARCHS)
def folder(request: pytest.FixtureRequest) -> Path:
    """A pack of a grouped tile of each form and the generic kernels."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return pack_of(request.param, CONFIGS)


def ragged(rng: np.random.Generator, count: int, most: int) -> tuple[int, ...]:
    """Sizes of so many groups: about half of them empty, the others of 1 to `most` elements."""
    return tuple(int(size) for size in rng.integers(1, most + 1, count) * rng.integers(0, 2, count))


def products() -> list[Grouped]:
    """Groups of every kind, for kernels of each form, type and alignment."""
    rng = np.random.default_rng(22)
    every: dict[str, Any] = {"out": "fp32", "dtype": "bf16"}
    rows = Grouped("M", (5, 0, 33, 1), 40, 48, behind=7)
    eight: dict[str, Any] = {"out": "fp32", "dtype": "fp8e5"}
    loose: dict[str, Any] = {"layout": "tt", "padding": 3, "offset": 1, "step_c": 2}
    sums = Grouped("K", (5, 0, 33, 1), 40, 40, behind=7, layout="tn")
    fp32: dict[str, Any] = {"out": "fp32", "dtype": "fp32"}
    tf32 = fp32 | {"dtype": "tf32"}
    return [
        rows,
        replace(rows, sizes=(1,), behind=0),
        replace(rows, sizes=(0, 0, 0), behind=3),
        replace(rows, sizes=(0, 70, 0), layout="nn", bias="vector", activation="relu"),
        replace(rows, sizes=ragged(rng, 9, 40), N=72, other=40, bias="matrix", **every),
        replace(rows, sizes=ragged(rng, MANY, 3), N=8, other=8, behind=0),
        replace(rows, sizes=ragged(rng, 130, 2), N=8, other=16, layout="nn", dtype="bf16", out="bf16"),
        replace(rows, sizes=ragged(rng, 5, 40), N=33, other=17, bias="matrix", **loose),
        replace(rows, other=0, bias="vector"),
        replace(rows, room=33, behind=0, bias="vector"),
        replace(rows, sizes=ragged(rng, 9, 7), room=7, N=33, other=17, **loose),
        replace(rows, scales="rows", other=144, **eight),
        replace(rows, scales="rows", room=40, N=33, other=17, padding=3, offset=1, step_c=2, **eight),
        replace(rows, scales=128, N=136, other=272, **eight),
        replace(rows, scales=1, other=272, room=40, behind=0, **eight),
        replace(rows, scales=128, sizes=(0, 9, 1), room=9, N=130, other=130, layout="tt", padding=3, **eight),
        sums,
        replace(sums, sizes=(0, 70, 1), **every),
        replace(sums, sizes=ragged(rng, 64, 3), N=8, other=8),
        replace(sums, sizes=ragged(rng, 4, 40), N=33, other=35, padding=3, offset=1, layout="nt", step_c=2),
        replace(sums, sizes=(0, 0), behind=0),
        *(
            product
            for of_type in (fp32, tf32)
            for product in (
                replace(rows, sizes=ragged(rng, 9, 40), N=72, bias="vector", activation="relu", **of_type),
                replace(rows, sizes=ragged(rng, 130, 2), N=8, other=16, layout="nn", **of_type),
                replace(rows, room=33, behind=0, scales="rows", **of_type),
                replace(rows, N=33, other=17, **loose | of_type),
                replace(sums, sizes=(0, 70, 1, 2), **of_type),
                replace(sums, sizes=(5, 0, 33, 2), behind=8, layout="nt", **of_type),
                replace(sums, sizes=ragged(rng, 4, 40), N=33, other=35, layout="nt", step_c=2, **of_type),
            )
        ),
    ]


@own_process
def test_tf32_is_rounded(folder: Path) -> None:
    """Operands just below a number of tf32 count as that number by each kernel of tf32: none cuts them."""
    emulator = Emulator(folder)
    tried = set()
    for grouped, layout in (("M", "nt"), ("M", "nn"), ("K", "tn")):
        case = Case(Grouped(grouped, (5, 0, 33, 1), 40, 48, dtype="tf32", out="fp32", layout=layout))
        for name in "AB":
            case.operands[name].view[...] *= 1 - 2.0**-13
        for kernel, plan in able(emulator, case.problem()):
            if kernel.dtype_a == "tf32":
                assert run(emulator, case, plan) == [], kernel.name
                tried.add(kernel.name)
    assert tried == {
        kernel.name for kernel in emulator.kernels if kernel.dtype_a == "tf32" and "grouped" in kernel.role
    }


def test_ragged_groups(folder: Path) -> None:
    """Every kernel that takes a product has every bit right, and neither reads nor writes behind the groups."""
    work = products()
    parts = [work[first : first + PER_CALL] for first in range(0, len(work), PER_CALL)]
    found = [outcome for part in [submit(outcomes, folder, part) for part in parts] for outcome in part.result()]
    assert [(product, made) for product, made in found if any(made.values())] == []
    assert all(made for _, made in found)
    used = {name for _, made in found for name in made}
    assert len([name for name in used if "_any_" in name]) >= len(used) // 3 > 0
    assert {name.rsplit("_", 1)[-1] for name in used} == {"m", "k"}


@own_process
def test_offsets_may_change(folder: Path) -> None:
    """One plan serves whatever offsets the device has: launched again, as a graph is, it computes the new groups."""
    emulator = Emulator(folder)
    first = Case(Grouped("M", (9, 0, 30, 1), 40, 32))
    ((_, plan), *_) = able(emulator, first.problem())
    assert run(emulator, first, plan) == []
    for sizes in ((0, 40, 0, 0), (10, 10, 10, 10), (1, 0, 2, 0), (0, 0, 0, 0)):
        case = Case(Grouped("M", sizes, 40, 32, behind=40 - sum(sizes)))
        again = Plan(plan.kernel, grid=plan.grid, group_m=plan.group_m)
        assert run(emulator, case, again) == []
        assert emulator.driver.launches[0].grid == (plan.grid, 1, 1)


@own_process
def test_one_plan_for_all_offsets(folder: Path) -> None:
    """The plan is the same for every address of the offsets, and its grid has room for any routing."""
    emulator = Emulator(folder)
    problem = Case(Grouped("M", (9, 0, 30, 1), 40, 32)).problem()
    plan = emulator.launcher.plan(problem, 0, WORKSPACE_LIMIT)
    moved = replace(problem, offsets_ptr=problem.offsets_ptr + 4096)
    assert emulator.launcher.plan(moved, 0, WORKSPACE_LIMIT) == plan
    config = emulator.kernels[plan.kernel].config
    most = max(
        sum(-(-size // config.block_m) for size in sizes)
        for sizes in [(first, second, 40 - first - second) for first in range(41) for second in range(41 - first)]
    )
    assert plan.grid >= most * -(-40 // config.block_n)


@own_process
def test_wrong_offsets_stay_inside(folder: Path) -> None:
    """Offsets that no caller may give, behind the last row, before the first or falling, make no access elsewhere."""
    emulator = Emulator(folder)
    for ends in ((9, 4000, 4000, 4001), (-5, -9, 3, 40), (40, 40, 5, -(2**31)), (0, 2**31 - 1, 2**31 - 1, 39)):
        case = Case(Grouped("M", (9, 0, 30, 1), 40, 32))
        case.ends[:] = ends
        for _, plan in able(emulator, case.problem()):
            run(emulator, case, plan, results="rw")  # wrong groups may share rows
            assert emulator.driver.faults == []
            assert emulator.driver.misuse == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets_ptr": 0}, "offsets_ptr=0"),
        ({"offsets_ptr": 6}, "offsets_ptr=0x6"),
        ({"batch_strides": (8, 0, 0)}, "stride_az=8"),
        ({"batch_strides": (0, 64, 64)}, "stride_cz=64"),
        ({"group_rows": 2}, "group_rows=2 expected_rows=0 of batch=1 groups in M=3 rows"),
        ({"group_rows": -3}, "group_rows=-3"),
        ({"expected_rows": -1}, "expected_rows=-1"),
        ({"stride_scale_bz": 8}, "stride_scale_bz=8 without scale_b_ptr"),
        ({"grouped": "none", "expected_rows": 1}, "they are of groups of rows alone"),
        ({"grouped": "K", "group_rows": 3}, "they are of groups of rows alone"),
        ({"grouped": "K", "scale_a_ptr": 64}, "scales of a product with K in groups: it has none"),
    ],
)
def test_wrong_problems(changes: dict[str, object], message: str) -> None:
    """A grouped problem without offsets, or with strides between what is one matrix, is refused by its values."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    submit(_refused, pack_of("sm80", CONFIGS), changes, message).result()


def _refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    problem = Case(Grouped("M", (3,), 8, 8)).problem(**changes)
    with pytest.raises(ValueError, match=message):
        Emulator(folder).launcher.plan(problem, 0, 0)


@own_process
def test_single_products_bits(folder: Path) -> None:
    """With batch_invariant the rows of a group have the bits of the product of its matrix alone, of any numbers."""
    emulator = Emulator(folder)
    sizes, N, K = (7, 0, 40, 1), 64, 200
    case = Case(Grouped("M", sizes, N, K, dtype="fp16", out="fp32"))
    rng = np.random.default_rng(5)
    for name in "AB":
        view = case.operands[name].view
        view[...] = rng.standard_normal(view.shape)
    problem = case.problem(batch_invariant=True)
    plan = emulator.launcher.plan(problem, 0, WORKSPACE_LIMIT)
    run(emulator, case, plan, problem)
    got = case.operands["C"].view.copy()
    begin = 0
    for group, size in enumerate(sizes):
        if size:
            run(emulator, case, *_single(emulator, case, problem, group, begin, size))
            part = slice(begin, begin + size)
            assert (case.operands["C"].view[:, part] == got[:, part]).all()
        begin += size


def _single(
    emulator: Emulator, case: Case, problem: Problem, group: int, begin: int, size: int
) -> tuple[Plan, Problem]:
    """The product of one group alone, in the same memory, and the plan for it."""
    (_, row_a, _), (of_b, *_), (_, row_c, _) = (case.operands[name].strides for name in "ABC")
    alone = replace(
        problem, grouped="none", offsets_ptr=0, batch=1, batch_strides=(0, 0, 0), M=size,
        a_ptr=problem.a_ptr + 2 * begin * row_a, b_ptr=problem.b_ptr + 2 * group * of_b,
        c_ptr=problem.c_ptr + 4 * begin * row_c,
    )  # fmt: skip
    return emulator.launcher.plan(alone, 0, 0), alone


@own_process
def test_sliced_order_is_refused(folder: Path) -> None:
    """A product that batch_invariant cuts into slices of K has no grouped plan; the error says slices."""
    emulator = Emulator(folder)
    kernels = tuple(kernel for kernel in emulator.kernels if kernel.role == "partial")
    problem = Case(Grouped("M", (3,), 8, 8)).problem(batch_invariant=True, K=4096)
    if kernels:
        with pytest.raises(NoKernelError, match="slices of K"):
            emulator.launcher.plan(problem, 0, WORKSPACE_LIMIT)
    else:
        assert emulator.launcher.plan(problem, 0, WORKSPACE_LIMIT).split == 1
