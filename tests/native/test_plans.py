"""Plans: slices of K, copies, tensor maps and workspaces, executed by interpreters or recorded by fake drivers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotmm.errors import DriverError, NoKernelError
from aotmm.pack.schema import Guard, Kernel, Parameter, TensorMap, occupancy
from aotmm.pack.table import Model, Sample, ShapeTimes, Table
from aotmm.pack.time_model import FITTED, HIDDEN, INPUTS, SECOND, Network, constants
from aotmm.problem import SPLITS
from aotmm.runtime.launcher import COPY_A, COPY_B, COPY_C, CPlan, Plan, Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice, CShape, c_table
from aotmm.target import target
from tests.build.packs import plans_pack, relinked
from tests.native.emulation import ARCHS, Case, Emulator, Product, missing, own_process

STREAM = 0x5EA0
ON_CUDA = pytest.mark.parametrize("pack", ["sm80"], indirect=True)
ON_HIP = pytest.mark.parametrize("pack", ["gfx90a"], indirect=True)
DEEP = Product(70, 136, 520)  # 3 x 3 tiles of 64, 9 steps along K
BIG = 64 << 20
AS_IT_IS = (1.0,) * len(FITTED)  # factors of the formula's constants


@pytest.fixture(params=ARCHS)
def pack(request: pytest.FixtureRequest) -> Path:
    """A pack of one tile as product and as partial, with what helps them."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return plans_pack(request.param)


@pytest.fixture(params=[arch for arch in ARCHS if arch != "sm80"])
def lone_pack(request: pytest.FixtureRequest) -> Path:
    """The same where the formula gives a tile a multiprocessor alone; reference.py has sm80, whose tiles share."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return plans_pack(request.param)


def number_of(emulator: Emulator, role: str, layout: str = "nn") -> int:
    """The kernel of that role and layout that can do most after the sum."""
    found = [
        (k.epilogue == "bias_relu", n) for n, k in enumerate(emulator.kernels) if (k.role, k.layout) == (role, layout)
    ]
    return max(found)[1]


def problem_of(m: int, n: int, k: int, **changes: Any) -> Problem:
    """A row-major fp16 product at addresses that nothing is read from."""
    plain = Problem(m, n, k, (k, 1), (n, 1), (n, 1), "fp16", "fp16", "fp16", "none", 1 << 40, 2 << 40, 3 << 40)
    return replace(plain, **changes)


def arguments(kernel: Kernel, block: bytes) -> dict[str, int]:
    """The values in a parameter block, by quantity."""
    return {
        item.value: int.from_bytes(block[item.offset : item.offset + item.bytes], "little", signed=True)
        for item in kernel.parameters
    }


def changed_pack(pack: Path, folder: Path, change: Any) -> Path:
    """A copy of `pack` with every kernel's entry changed, and with other tables in its launcher."""
    return relinked(pack, folder, [change(kernel) for kernel in open_pack(pack).manifest.kernels])


# -------------------------------------------------------------------------------------------------------- execution
PRODUCTS = {
    "whole tiles": replace(DEEP, M=64, N=128, K=512),
    "edges": DEEP,
    "scattered C": replace(DEEP, step_c=2),
    "unaligned": replace(DEEP, offset=1, padding=3),
    "epilogue": replace(DEEP, bias="matrix", activation="relu", scales="rows"),
    "column-major B": replace(DEEP, layout="nt", offset=1),
    "random": replace(DEEP, exact=False),
}


@pytest.mark.parametrize("role", ["product", "partial"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@own_process
def test_executed(pack: Path, product: Product, role: str) -> None:
    """Products in slices of K and by copies are right, whatever lay in the workspace before."""
    emulator = Emulator(pack)
    outcome = emulator.run(product, number_of(emulator, role, product.layout))
    assert outcome.complaints == ()
    plan = outcome.plan
    assert plan is not None
    assert (plan.split > 1) == (role == "partial")
    assert plan.workspace_bytes > 0 or (role == "product" and plan.copies == 0)


@own_process
def test_every_number_of_slices(pack: Path) -> None:
    """Each number of slices that K has steps for gives the same exact sums, the last slices being shorter or not."""
    emulator = Emulator(pack)
    partial = number_of(emulator, "partial")
    for split in [split for split in SPLITS if split <= 9]:
        outcome = emulator.run(DEEP, plan=Plan(partial, split, workspace_bytes=BIG >> 4))
        assert outcome.complaints == (), split
        assert emulator.driver.launches[0].grid == (6 * split, 1, 1)


@own_process
def test_sums_are_in_order(pack: Path) -> None:
    """A split product is the same bits every time: the fp32 sums of the slices, added from the first to the last."""
    emulator = Emulator(pack)
    product = replace(DEEP, out="fp32", exact=False)
    kernel, seen = number_of(emulator, "partial"), set()
    for _ in range(2):
        case = Case(product)
        plan = Plan(kernel, 4, workspace_bytes=BIG >> 4)
        workspace = emulator.place(case, plan)
        emulator.launcher.run(plan, case.problem, 0, 0, workspace)
        seen.add(case.operands["C"].view.tobytes())
    assert len(seen) == 1
    memory = next(array for name, array, _ in emulator.driver.buffers if name == "workspace")
    slabs = memory.view(np.float32)[: 4 * 128 * 192].reshape(4, 128, 192)
    total = slabs[0]
    for slab in slabs[1:]:
        total = total + slab
    assert total[:70, :136].tobytes() == case.operands["C"].view.tobytes()


@own_process
def test_chosen_by_itself(pack: Path) -> None:
    """Selection splits what is deep and narrow, copies what is unaligned and large, and neither without a workspace."""
    emulator = Emulator(pack, execute=False)
    mm, device = emulator.launcher, emulator.launcher.device(0)
    deep, large = problem_of(512, 512, 65_536), problem_of(4096, 4096, 4096)
    assert mm.select(deep, device).split > 1
    assert mm.select(deep, device, 0).split == 1
    assert mm.select(large, device).steps == ("product",)
    shifted = replace(large, a_ptr=large.a_ptr + 2)
    assert mm.select(shifted, device).steps == ("copy A", "product")
    assert mm.select(shifted, device, 0).steps == ("product",)
    assert mm.select(replace(large, strides_c=(1, 4096)), device).steps[-1] in ("copy C", "reduce")
    apart = (4096 * 4096,) * 3
    assert mm.select(replace(shifted, batch=2, batch_strides=apart), device).steps == ("copy A", "product")
    between = replace(large, batch=2, batch_strides=(4096 * 4096 + 1, *apart[1:]))
    assert mm.select(between, device).steps == ("copy A", "product"), "the second matrix is not aligned"
    for problem in (deep, large, shifted):
        plan = mm.select(problem, device)
        for limit in (plan.workspace_bytes - 1, plan.workspace_bytes):
            assert mm.select(problem, device, max(limit, 0)).workspace_bytes <= max(limit, 0)
        assert mm.select(problem, device, plan.workspace_bytes) == plan


@own_process
def test_loaded_before_it_runs(pack: Path) -> None:
    """`load` loads the kernels of a plan and launches nothing, so that `run` finds all of them; it refuses as `run`."""
    emulator = Emulator(pack, execute=False)
    mm, device = emulator.launcher, emulator.launcher.device(0)
    deep, large = problem_of(512, 512, 65_536), problem_of(4096, 4096, 4096)
    shifted, seen = replace(large, a_ptr=large.a_ptr + 2), 0
    for problem, launches in ((deep, 2), (large, 1), (shifted, 2)):
        plan = mm.select(problem, device)
        assert len(plan.steps) == launches
        mm.load(plan, problem, 0)
        assert emulator.driver.launches == []
        loaded = emulator.driver.live_modules
        assert loaded > seen, "it has a kernel that no plan before had"
        seen = loaded
        mm.run(plan, problem, 0, 0, 1 << 40 if plan.workspace_bytes else 0)
        assert emulator.driver.live_modules == loaded
        emulator.driver.launches.clear()
    mm.load(mm.select(deep, device), replace(deep, M=0), 0)
    with pytest.raises(ValueError, match="kernel 999: the pack has"):
        mm.load(Plan(999), deep, 0)
    with pytest.raises(NoKernelError, match="do not fit M=512"):
        mm.load(mm.select(deep, device), replace(deep, dtype_c="bf16"), 0)
    assert emulator.driver.misuse == []


# ----------------------------------------------------------------------------------------------------------- panels
CUT = Product(129, 136, 72, padding=3, offset=1)  # 2 x 2 panels of 128 x 128, the last ones of one row and of 8 columns
ODD = replace(CUT, N=129)
CUTS = {
    "rows": ("product", CUT, 128, 0),
    "columns": ("product", replace(CUT, layout="nt"), 0, 128),
    "both": ("product", replace(CUT, exact=False), 128, 128),
    "scattered C": ("product", replace(CUT, step_c=2, bias="vector", activation="relu", scales="tensor"), 128, 128),
    "epilogue": ("product", replace(CUT, bias="matrix", activation="relu", scales="rows"), 128, 128),
    "slices": ("partial", replace(CUT, K=264, bias="matrix", activation="relu", scales="rows"), 128, 128),
}


@pytest.mark.parametrize(("role", "product", "panel_m", "panel_n"), CUTS.values(), ids=CUTS)
@own_process
def test_panels_executed(pack: Path, role: str, product: Product, panel_m: int, panel_n: int) -> None:
    """Products in panels of rows, of columns and of both are right, with all that happens to sums, copied or sliced."""
    emulator = Emulator(pack)
    plan = Plan(
        number_of(emulator, role, product.layout),
        split=2 if role == "partial" else 1,
        copies=COPY_A | COPY_B | (COPY_C if role == "product" else 0),
        workspace_bytes=BIG >> 4,
        panel_m=panel_m,
        panel_n=panel_n,
    )
    assert emulator.run(product, plan=plan).complaints == ()


@pytest.mark.parametrize(
    "product",
    [replace(ODD, layout="tt"), replace(ODD, K=0, bias="vector"), replace(ODD, bias="matrix", scales="rows")],
    ids=["column-major", "no K", "epilogue"],
)
@own_process
def test_panels_without_copies(pack: Path, product: Product) -> None:
    """The generic kernel computes panels of operands as they lie; single rows and columns are left at the end."""
    emulator = Emulator(pack)
    kind = "product", "any", product.out
    generic = next(n for n, k in enumerate(emulator.kernels) if (k.role, k.layout, k.dtype_c) == kind)
    assert emulator.run(product, plan=Plan(generic, panel_m=128, panel_n=128)).complaints == ()


@own_process
def test_panels_as_selected(pack: Path) -> None:
    """Where copies exceed the limit the product is cut along the operand that is copied, or along both; and runs so."""
    emulator = Emulator(pack, execute=False)
    mm, device = emulator.launcher, emulator.launcher.device(0)
    size = 2048
    even = problem_of(size, size, size)
    odd_a = replace(even, strides_a=(size + 1, 1))
    odd_b, both = (replace(problem, strides_b=(size + 1, 1)) for problem in (even, odd_a))
    all_of_it = (size * size + 4096) * 2  # of one copy, as far as rows of 128 bytes matter
    for problem, panels in ((odd_a, (512, size)), (odd_b, (size, 512))):
        copied = mm.select(problem, device, all_of_it)
        cut = mm.select(problem, device, all_of_it // 4)
        assert (copied.copies.bit_count(), copied.panel_m, copied.panel_n) == (1, 0, 0)
        assert (cut.copies, cut.panel_m, cut.panel_n) == (copied.copies, *panels)
        assert cut.workspace_bytes <= all_of_it // 4
        assert copied.cost < cut.cost < mm.select(problem, device, 0).cost
    cut = mm.select(both, device, all_of_it)
    assert cut.panel_m < size
    assert cut.panel_n < size
    for limit in (0, 1, 2**16, 2**20, all_of_it // 3, all_of_it, 3 * all_of_it):
        plan = mm.select(both, device, limit)
        assert plan.workspace_bytes <= limit
        assert plan == mm.plan(both, 0, limit) == mm.plan(both, 0, limit), "remembered"
        emulator.launcher.run(plan, both, 0, 0, 1 << 44)
    assert emulator.driver.misuse == []


@own_process
def test_selected_panels_fit(pack: Path) -> None:
    """`run` takes every plan in panels that selection gives, whatever is left for the last of them."""
    emulator, rng, cut = Emulator(pack, execute=False), np.random.default_rng(6), 0
    mm, device = emulator.launcher, emulator.launcher.device(0)
    for _ in range(150):
        m, n, k = (int(rng.integers(1, 300)) * int(rng.choice((1, 8, 16))) for _ in range(3))
        pads = rng.integers(0, 3, 3)
        lines = zip("abc", (k, n, n), pads, strict=True)
        strides = {f"strides_{name}": (size + int(pad), 1) for name, size, pad in lines}
        problem = problem_of(m, n, k, **strides)
        plan = mm.select(problem, device, int(rng.choice((2**18, 2**20, 2**22))))
        emulator.launcher.run(plan, problem, 0, 0, 1 << 44)
        cut += plan.panel_m > 0
    assert cut > 10
    assert emulator.driver.misuse == []


@own_process
def test_panels_share_copies(pack: Path) -> None:
    """A is copied once for a row of panels, B for every panel, or once where there is one column of equal panels."""
    emulator = Emulator(pack, execute=False)
    problem, base = problem_of(512, 512, 64, a_ptr=(1 << 40) + 2, b_ptr=(2 << 40) + 2), 1 << 44
    product, copier = (number_of(emulator, role) for role in ("product", "copy"))

    def launched(panel_m: int, panel_n: int) -> str:
        emulator.driver.launches.clear()
        plan = Plan(product, copies=COPY_A | COPY_B, workspace_bytes=BIG, panel_m=panel_m, panel_n=panel_n)
        emulator.launcher.run(plan, problem, 0, 0, base)
        steps = ""
        for launch in emulator.driver.launches:
            if emulator.role(launch.image) == "product":
                steps += "."
                continue
            found = arguments(emulator.kernels[copier], launch.params)
            sources = "".join("?AB"[found[name] >> 40] for name in ("source_ptr", "other_source_ptr") if found[name])
            steps += sources if len(sources) == 1 else f"({sources})"
        return steps

    assert launched(0, 0) == "(AB)."
    assert launched(256, 256) == "(AB).B." * 2
    assert launched(512, 128) == "(AB).B.B.B."
    assert launched(128, 512) == "(AB).A.A.A."
    assert launched(384, 512) == "(AB).(AB).", "what is left of A is smaller, so that B lies elsewhere"
    assert emulator.driver.misuse == []


@own_process
def test_one_launch_copies_both_operands(pack: Path) -> None:
    """Copies of A and B are one launch if one kernel makes them. C's is alone, and so is one of another kernel."""
    emulator = Emulator(pack, execute=False)
    product = number_of(emulator, "product")

    def launched(copies: int, steps_a: int = 1) -> list[tuple[str, ...]]:
        emulator.driver.launches.clear()
        addresses = ((number + 1 << 40) + 2 * (copies >> number & 1) for number in range(3))
        where = dict(zip(("a_ptr", "b_ptr", "c_ptr"), addresses, strict=True))
        problem = problem_of(512, 512, 64, **where)
        row, col = problem.strides_a
        problem = replace(problem, strides_a=(steps_a * row, steps_a * col))
        plan = Plan(product, copies=copies, workspace_bytes=BIG)
        emulator.launcher.run(plan, problem, 0, 0, 1 << 44)
        copies_ = [launch for launch in emulator.driver.launches if emulator.role(launch.image) == "copy"]
        found = [arguments(emulator.kernel_of(launch.image), launch.params) for launch in copies_]
        sources = [[values[name] for name in ("source_ptr", "other_source_ptr")] for values in found]
        return [tuple("WABC"[each >> 40 if each < 1 << 44 else 0] for each in row if each) for row in sources]

    assert launched(COPY_A) == [("A",)]
    assert launched(COPY_B) == [("B",)]
    assert launched(COPY_A | COPY_B) == [("A", "B")]
    assert launched(COPY_A | COPY_B | COPY_C) == [("A", "B"), ("W",)], "out of the workspace"
    assert launched(COPY_A | COPY_B, 2) == [("A",), ("B",)], "no row of A is contiguous"
    assert emulator.driver.misuse == []


BATCHES = {
    "matrices apart": replace(DEEP, batch=3, gap=5, padding=3, offset=1),
    "one B for all": replace(DEEP, batch=3, shared=True, gap=5, padding=3, offset=1, layout="nt"),
    "scattered C": replace(DEEP, batch=2, step_c=2, bias="matrix", scales="rows"),
}


@pytest.mark.parametrize("role", ["product", "partial"])
@pytest.mark.parametrize("product", BATCHES.values(), ids=BATCHES)
@own_process
def test_batches_with_copies(pack: Path, product: Product, role: str) -> None:
    """Every matrix of an operand is copied, or the one that all products share, and every C that no kernel stores.

    Matrices that follow each other are copied as one.
    """
    emulator = Emulator(pack)
    kernel = number_of(emulator, role, product.layout)
    copies = COPY_A | COPY_B | (COPY_C if role == "product" else 0)
    plan = Plan(kernel, 3 if role == "partial" else 1, copies=copies, workspace_bytes=BIG >> 4)
    assert emulator.run(product, plan=plan).complaints == ()
    copied = [launch for launch in emulator.driver.launches if emulator.role(launch.image) == "copy"]
    values = [arguments(emulator.kernel_of(launch.image), launch.params) for launch in copied]
    batches = [
        (value[f"{which}batch"], value[f"{which}M"])
        for value in values
        for which in ("", "other_")
        if value[f"{which}batch"]
    ]
    count, rows_of_b = product.batch, product.K if product.layout == "nn" else product.N
    if product.gap:
        want = [(count, product.M), (1 if product.shared else count, rows_of_b), (count, product.M)]
    else:
        want = [(1, count * product.M), (1, count * rows_of_b), (1, count * product.M)]
    assert batches == (want if role == "product" else want[:2])


@own_process
def test_bytes_are_turned_by_words(many_kernels: Path) -> None:
    """Copies that turn a matrix of single bytes move words if all of it lies on words, else bytes; both are right."""
    emulator = Emulator(many_kernels)
    for m, batch, gap, padding, offset, by_words in (
        (256, 1, 0, 4, 0, True), (256, 1, 0, 4, 4, True), (256, 2, 4, 4, 0, True),
        (256, 1, 0, 3, 0, False), (256, 1, 0, 4, 1, False), (254, 1, 0, 6, 0, False), (256, 2, 1, 4, 0, False),
    ):  # fmt: skip
        emulator.driver.launches.clear()
        of_batch: dict[str, Any] = {"batch": batch, "gap": gap, "padding": padding, "offset": offset}
        outcome = emulator.run(Product(m, 256, 1024, "int8", "int32", "tn", **of_batch))
        assert outcome.complaints == ()
        kernels = [emulator.kernel_of(launch.image) for launch in emulator.driver.launches]
        words = [Guard("stride_sn", "multiple_of", 4) in kernel.guards for kernel in kernels if kernel.role == "copy"]
        assert (words[0], all(words)) == (by_words, by_words), (m, of_batch)  # of A, and of B too


# ------------------------------------------------------------------------------------------------------- workspaces
@own_process
def test_workspace_is_used_as_planned(pack: Path) -> None:
    """Copies of A, of B, of C and the sums follow each other at multiples of 256 bytes, in lines of 128."""
    emulator = Emulator(pack, execute=False)
    base, run = 1 << 44, emulator.launcher.run
    problem = problem_of(70, 136, 520, a_ptr=(1 << 40) + 2, b_ptr=(2 << 40) + 2, c_ptr=(3 << 40) + 2)
    sizes = {"A": 70 * 576 * 2, "B": 520 * 192 * 2, "C": 70 * 192 * 2, "sums": 3 * 128 * 192 * 4}
    sizes = {name: -(-size // 256) * 256 for name, size in sizes.items()}
    a, b, c = base, base + sizes["A"], base + sizes["A"] + sizes["B"]

    product = number_of(emulator, "product")
    plan = emulator.plan(problem, product)
    assert (plan.copies, plan.workspace_bytes) == (COPY_A | COPY_B | COPY_C, c + sizes["C"] - base)
    run(plan, problem, 0, STREAM, base)
    first, main, last = emulator.driver.launches
    assert {launch.stream for launch in emulator.driver.launches} == {STREAM}
    copier = emulator.kernel_of(first.image)
    found = arguments(copier, first.params)
    of_a = {"source_ptr": problem.a_ptr, "dest_ptr": a, "M": 70, "N": 520, "stride_sm": 520, "stride_dm": 576}
    of_b = {"source_ptr": problem.b_ptr, "dest_ptr": b, "M": 520, "N": 136, "stride_sm": 136, "stride_dm": 192}
    assert of_a.items() | {f"other_{name}": value for name, value in of_b.items()}.items() <= found.items()
    found = arguments(emulator.kernels[product], main.params)
    assert (found["a_ptr"], found["b_ptr"], found["c_ptr"]) == (a, b, c)
    assert (found["stride_am"], found["stride_bk"], found["stride_cm"]) == (576, 192, 192)
    found = arguments(copier, last.params)
    assert (found["source_ptr"], found["dest_ptr"], found["stride_sm"], found["stride_dm"]) == (
        c,
        problem.c_ptr,
        192,
        136,
    )

    partial = number_of(emulator, "partial")
    plan = replace(emulator.plan(problem, partial), split=3, workspace_bytes=c + sizes["sums"] - base)
    assert plan.copies == COPY_A | COPY_B, "a reduce writes any C"
    emulator.driver.launches.clear()
    run(plan, problem, 0, STREAM, base)
    main, last = emulator.driver.launches[1:]
    found = arguments(emulator.kernels[partial], main.params)
    sums = {"workspace_ptr": c, "workspace_stride_m": 192, "workspace_stride_z": 128 * 192, "split": 3}
    assert sums.items() <= (found | sums).items()
    assert found["workspace_ptr"] == c
    reducer = emulator.kernel_of(last.image)
    assert sums.items() <= arguments(reducer, last.params).items()
    assert emulator.driver.misuse == []


def _digest(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()


@own_process
def test_plans_that_do_not_fit(pack: Path) -> None:
    """`run` refuses, before any launch, what would read or write where it must not, and names kernel and problem."""
    emulator = Emulator(pack, execute=False)
    problem = problem_of(70, 136, 520)
    product, partial = number_of(emulator, "product"), number_of(emulator, "partial")
    need = 3 * 128 * 192 * 4
    good = [(Plan(product), problem), (Plan(partial, 3, workspace_bytes=need), problem)]
    twice = replace(problem, batch=2, batch_strides=(70 * 520, 520 * 136, 70 * 136))
    good.append((Plan(partial, 3, workspace_bytes=2 * need), replace(problem, batch=2)))
    good.append((Plan(product, copies=COPY_A, workspace_bytes=2 * 70 * 1152), twice))
    wrong = [
        (Plan(product, 2, workspace_bytes=BIG), problem),
        (Plan(partial, 1, workspace_bytes=BIG), problem),
        (Plan(partial, 0, workspace_bytes=BIG), problem),
        (Plan(partial, 10, workspace_bytes=BIG), problem),  # more slices than steps
        (Plan(partial, SPLITS[-1] + 1, workspace_bytes=BIG), problem_of(70, 136, 52000)),
        (Plan(partial, 2**31, workspace_bytes=BIG), problem),
        (Plan(partial, 3, workspace_bytes=need - 1), problem),
        (Plan(partial, 3, COPY_C, workspace_bytes=BIG), problem),
        (Plan(product, copies=8, workspace_bytes=BIG), problem),
        (Plan(product, copies=COPY_A), problem),
        (Plan(partial, 3, workspace_bytes=2 * need - 1), replace(problem, batch=2)),
        (Plan(product, copies=COPY_A, workspace_bytes=2 * 70 * 1152 - 1), twice),
        (Plan(product, copies=COPY_A, workspace_bytes=BIG), replace(problem, K=0)),
        (Plan(number_of(emulator, "product", "nt")), problem),
        (Plan(product), replace(problem, a_ptr=problem.a_ptr + 2)),
        (Plan(product), replace(problem, activation="tanh")),
        (Plan(product), replace(problem, dtype_c="fp32")),
        (Plan(partial, 3, workspace_bytes=BIG), replace(problem, dtype_c="int32")),  # its sums are fp32
        (Plan(partial, 3, workspace_bytes=BIG), replace(problem, activation="tanh")),  # no reduce has it
        (Plan(number_of(emulator, "copy")), problem),
        (Plan(product), problem_of(2**33, 2**33, 8)),
        *((Plan(product, group_m=number), problem) for number in (0, 17, 2**32 - 1)),
        (Plan(partial, 3, workspace_bytes=BIG, group_m=0), problem),
        (Plan(product, panel_m=64), problem),
        (Plan(product, panel_n=-128), problem),
        (Plan(product, panel_m=-(2**63)), problem),
        (Plan(product, panel_m=128), problem_of(256, 136, 520, batch=2)),
        (Plan(product, panel_n=128), problem_of(256, 257, 520, strides_b=(264, 1), strides_c=(264, 1))),  # 1 is left
        (Plan(product, copies=COPY_A, workspace_bytes=128 * 1152 - 1, panel_m=128), problem_of(256, 136, 520)),
    ]
    for plan, what in wrong:
        with pytest.raises(NoKernelError, match=f"kernel {emulator.kernels[plan.kernel].name}, split .* do not fit M="):
            emulator.launcher.run(plan, what, 0, 0, 1 << 44)
    with pytest.raises(ValueError, match="kernel 999: the pack has"):
        emulator.launcher.run(Plan(999), problem, 0, 0)
    for address in (0, (1 << 44) + 128):
        with pytest.raises(ValueError, match=f"the plan needs {need} bytes at a multiple of 256"):
            emulator.launcher.run(*good[1], 0, 0, address)
    with pytest.raises(ValueError, match="sizes are not negative"):
        emulator.launcher.run(good[0][0], replace(problem, M=-1), 0, 0)
    assert emulator.driver.launches == []
    for plan, fitting in good:
        emulator.launcher.run(plan, fitting, 0, 0, 1 << 44)
        emulator.launcher.run(plan, replace(fitting, M=0), 0, 0)
    assert len(emulator.driver.launches) == 7
    assert emulator.driver.misuse == []


def test_no_workspace_is_too_large_to_count(pack: Path) -> None:
    """Workspaces that would pass 2^40 bytes are refused without an overflow."""
    mm = open_pack(pack).launcher
    device = CDevice(108, 166_912)
    for m, n in ((2**30, 2**12), (2**31 - 2**17, 2**31 - 2**17), (2**20, 2**20)):
        problem = problem_of(m, n, 4096, a_ptr=2)
        for number, kernel in enumerate(mm.kernels):
            if kernel.role in ("product", "partial"):
                plan = mm.check(problem, device, number).plan
                assert plan is None or plan.workspace_bytes <= 2**40
        try:
            assert mm.select(problem, device).workspace_bytes <= 2**40
        except NoKernelError:
            assert pack.name == "gfx90a" or m * n > 2**40, "more blocks than a grid can have"


@own_process
def test_scratch_memory_of_kernels(pack: Path, tmp_path: Path) -> None:
    """Scratch that a kernel asks for is in the workspace, for every block; without a workspace it is not taken."""

    def scratchy(kernel: Kernel) -> Kernel:
        if kernel.role != "product":
            return kernel
        parameters = tuple(
            replace(item, value="global_scratch" if item.name == "global_scratch" else item.value)
            for item in kernel.parameters
        )
        return replace(kernel, parameters=parameters, global_scratch_bytes=384)

    emulator = Emulator(changed_pack(pack, tmp_path, scratchy), execute=False)
    problem, product = problem_of(70, 136, 520), number_of(emulator, "product")
    plan = emulator.plan(problem, product)
    assert (plan.grid, plan.workspace_bytes) == (6, 6 * 384)
    emulator.launcher.run(plan, problem, 0, 0, 1 << 44)
    assert arguments(emulator.kernels[product], emulator.driver.launches[0].params)["global_scratch"] == 1 << 44
    with pytest.raises(NoKernelError):
        emulator.launcher.matmul(problem, 0, 0)


@pytest.mark.parametrize(
    ("rows", "multiprocessors", "group_m"),
    [
        (4096, 32, 4),  # half of what is computed at once, 4 x 4 tiles
        (4096, 132, 8),  # likewise 8 x 8.25
        (4096, 16, 2),  # 2 x 4, as well as 4 x 2
        (4096, 2, 1),
        (4096, 100_000, 4),  # all tiles at once: of 24 beside each other 4 x 6, less than 8 x 3
        (512, 512, 4),  # likewise
        (64, 64, 1),  # one row of tiles
        (192, 64, 4),  # three
        (0, 64, 1),
    ],
)
def test_groups_read_least(lone_pack: Path, rows: int, multiprocessors: int, group_m: int) -> None:
    """Groups have the rows for which tiles beside each other read least: 24, or half of what is computed at once."""
    mm = open_pack(lone_pack).launcher
    for role in ("product", "partial"):
        number = next(n for n, k in enumerate(mm.kernels) if (k.role, k.layout) == (role, "nn"))
        problem, device = problem_of(rows, 4096, 4096), CDevice(multiprocessors, 166_912)
        plan, tiles = mm.check(problem, device, number).plan, rows // 64 * 64
        split = 0 < tiles <= multiprocessors
        assert plan is None if role == "partial" and not split else plan and plan.group_m == group_m


@own_process
def test_plans_choose_the_group(pack: Path) -> None:
    """Kernels get the group_m of the plan, in every panel."""
    emulator = Emulator(pack, execute=False)
    product, partial = number_of(emulator, "product"), number_of(emulator, "partial")
    for group_m in (1, 3, 16):
        emulator.driver.launches.clear()
        plan = Plan(partial, 2, group_m=group_m, workspace_bytes=BIG)
        emulator.launcher.run(plan, problem_of(70, 136, 520), 0, 0, 1 << 44)
        cut = Plan(product, group_m=group_m, copies=COPY_A, workspace_bytes=BIG, panel_m=128)
        emulator.launcher.run(cut, problem_of(256, 136, 520), 0, 0, 1 << 44)
        mains = {emulator.kernels[number].image.sha256: emulator.kernels[number] for number in (product, partial)}
        found = [
            arguments(mains[_digest(launch.image)], launch.params)["group_m"]
            for launch in emulator.driver.launches
            if _digest(launch.image) in mains
        ]
        assert found == [group_m] * 3


# ------------------------------------------------------------------------------------------------------- launching
@own_process
def test_persistent_grid(pack: Path, tmp_path: Path) -> None:
    """A persistent kernel gets as many blocks as the device holds at once, and no more than there is work."""
    folder = changed_pack(pack, tmp_path, lambda kernel: replace(kernel, persistent=kernel.role == "product"))
    mm = open_pack(folder).launcher
    product = max(n for n, k in enumerate(mm.kernels) if (k.role, k.layout) == ("product", "nn"))
    held = occupancy(mm.kernels[product], target(pack.name))
    for size, multiprocessors in ((8192, 108), (8192, 20), (640, 108), (64, 108)):
        plan = mm.check(problem_of(size, size, size), CDevice(multiprocessors, 166_912), product).plan
        assert plan is not None
        assert plan.grid == min((size // 64) ** 2, multiprocessors * held)


@ON_CUDA
@own_process
def test_programmatic_launches(pack: Path, tmp_path: Path) -> None:
    """Short products of kernels that can are launched programmatically, long ones not; a plan may say otherwise."""
    folder = changed_pack(pack, tmp_path, lambda kernel: replace(kernel, pdl=kernel.role != "copy"))
    emulator = Emulator(folder, execute=False)

    def early(plan: Plan, problem: Problem) -> list[bool]:
        """Of each launch of a plan: whether it was pdl."""
        before, found = len(emulator.driver.calls), []
        emulator.launcher.run(plan, problem, 0, 0, 1 << 44)
        for call in emulator.driver.calls[before:]:
            if call.name == "cuLaunchKernelEx":
                found.append(False)
            elif call.name == "attribute" and call.arguments == {"id": "6", "value": "1,0,0"}:
                found[-1] = True
        return found

    short, long_ = problem_of(256, 256, 256), problem_of(2048, 2048, 2048)
    product, partial = number_of(emulator, "product"), number_of(emulator, "partial")
    assert (emulator.plan(short, product).pdl, emulator.plan(long_, product).pdl) == (True, False)
    for problem in (short, long_):
        for said in (False, True):
            assert early(Plan(product, pdl=said), problem) == [said]
            split = Plan(partial, 2, pdl=said, workspace_bytes=BIG)
            assert early(split, problem) == [said, said]  # a reduce is launched as its partial is
    copied = Plan(product, copies=COPY_A, pdl=True, workspace_bytes=BIG)
    assert early(copied, short) == [False, True]
    assert not emulator.plan(short, partial).pdl
    assert emulator.driver.misuse == []


@ON_CUDA
@own_process
def test_early_copies_and_reduces_spread(pack: Path, tmp_path: Path) -> None:
    """They ask for so much shared memory that a multiprocessor has room for its part of the blocks, and no more.

    Products, and launches that are not early, ask for what they use.
    """
    emulator = Emulator(changed_pack(pack, tmp_path, lambda kernel: replace(kernel, pdl=True)), execute=False)
    device, reserved, parts = emulator.launcher.device(0), 1024, set()
    plans = (number_of(emulator, "product"), 1), (number_of(emulator, "partial"), 2)
    for rows, early, (number, split) in itertools.product((64, 8192, 2**20), (False, True), plans):
        problem = problem_of(rows, 512, 520)
        plan = Plan(number, split, COPY_A, pdl=early, workspace_bytes=2**33)
        emulator.driver.launches.clear()
        emulator.launcher.run(plan, problem, 0, 0, 1 << 44)
        for launch in emulator.driver.launches:
            kernel = emulator.kernel_of(launch.image)
            room = (device.shared_bytes + reserved) // (launch.shared + reserved)
            part = -(-launch.grid[0] // device.multiprocessors)
            if early and kernel.role in ("copy", "reduce"):
                assert room == part or (launch.shared == kernel.shared_bytes and room < part), (kernel.name, rows)
                parts.add(part)
            else:
                assert launch.shared == kernel.shared_bytes
    assert min(parts) == 1 < max(parts)


def with_map(
    kernel: Kernel,
    *,
    value: str,
    inner: str,
    strides: tuple[str, str],
    guards: tuple[Guard, ...] = (),
    fits: bool = False,
) -> Kernel:
    """The kernel with a map of (batch, M, `inner`) matrices at `value` besides, which its binary knows nothing of."""
    if kernel.role != "product" or kernel.layout != "nn":
        return kernel
    mapped = TensorMap(
        "fp16", inner, "M", "batch", *strides, box_inner=64, box_outer=32, swizzle=3, guards=guards, fits=fits
    )
    end = -(-(kernel.parameters[-1].offset + 8) // 64) * 64
    return replace(kernel, parameters=(*kernel.parameters, Parameter("map", "tensordesc", value, end, 128, mapped)))


with_map_of_a = functools.partial(with_map, value="a_ptr", inner="K", strides=("stride_am", "stride_az"))
BOXED = (
    Guard("bias_rank", "equals", 2),
    Guard("stride_bias_n", "equals", 1),
    Guard("bias_ptr", "multiple_of", 16),
    Guard("stride_bias_m", "multiple_of", 8),
    Guard("stride_bias_z", "multiple_of", 8),
)
with_map_of_bias = functools.partial(
    with_map, value="bias_ptr", inner="N", strides=("stride_bias_m", "stride_bias_z"), guards=BOXED
)


@ON_CUDA
@own_process
def test_tensor_maps(pack: Path, tmp_path: Path) -> None:
    """A map is encoded once, of the matrix as it lies, copied or not; the driver takes the stride of a single line."""
    emulator = Emulator(changed_pack(pack, tmp_path, with_map_of_a), execute=False)
    product = number_of(emulator, "product")
    base, a = 1 << 44, 1 << 40
    apart, shared = {"batch_strides": (70 * 520, 0, 70 * 136)}, {"batch_strides": (0, 520 * 136, 70 * 136)}
    cases = [
        (problem_of(70, 136, 520), {"address": hex(a), "dim0": "520", "dim1": "70", "dim2": "1"}),
        (problem_of(70, 136, 520, batch=3, **apart), {"dim0": "520", "dim1": "70", "dim2": "3"}),
        (problem_of(70, 136, 520, batch=3, **shared), {"dim0": "520", "dim1": "70", "dim2": "1"}),
        (problem_of(70, 136, 520, a_ptr=a + 2), {"address": hex(base), "dim0": "520", "dim1": "70"}),
        (problem_of(1, 136, 520), {"address": hex(a), "dim0": "520", "dim1": "1"}),
        (problem_of(1, 136, 528, strides_a=(3, 1)), {"address": hex(a), "dim0": "528", "dim1": "1"}),
    ]
    for problem, wanted in cases:
        for _ in range(2):
            emulator.launcher.run(emulator.plan(problem, product), problem, 0, 0, base)
        *_, call = [call for call in emulator.driver.calls if call.name == "cuTensorMapEncodeTiled"]
        fixed = {"type": "6", "rank": "3", "box0": "64", "box1": "32", "swizzle": "3"}
        assert {name: call.arguments[name] for name in fixed | wanted} == fixed | wanted
    assert [call.name for call in emulator.driver.calls].count("cuTensorMapEncodeTiled") == len(cases)
    emulator.driver.fail_next("cuTensorMapEncodeTiled", 1)
    before = len(emulator.driver.launches)
    with pytest.raises(DriverError, match="cuTensorMapEncodeTiled failed on CUDA device 0 for kernel tile_fp16"):
        emulator.launcher.run(Plan(product), problem_of(70, 136, 520), 0, 0)
    assert len(emulator.driver.launches) == before
    emulator.launcher.run(Plan(product), problem_of(70, 136, 520), 0, 0)
    assert len(emulator.driver.launches) == before + 1, "what failed is not remembered"
    assert emulator.driver.misuse == []


@ON_CUDA
@own_process
def test_a_box_has_no_more_lines_than_the_matrix(pack: Path, tmp_path: Path) -> None:
    """If its map says so: as many as there are, in groups of 8, and no more than the box."""
    emulator = Emulator(changed_pack(pack, tmp_path, functools.partial(with_map_of_a, fits=True)), execute=False)
    for M, lines in ((1, 8), (8, 8), (9, 16), (24, 24), (25, 32), (32, 32), (33, 32), (500, 32)):
        problem = problem_of(M, 136, 520)
        emulator.launcher.run(emulator.plan(problem, number_of(emulator, "product")), problem, 0, 0, 1 << 44)
        *_, call = [call for call in emulator.driver.calls if call.name == "cuTensorMapEncodeTiled"]
        assert (call.arguments["dim1"], call.arguments["box1"]) == (str(M), str(lines))
    assert emulator.driver.misuse == []


@ON_CUDA
@own_process
def test_a_bias_that_no_tensor_map_describes_has_an_empty_one(pack: Path, tmp_path: Path) -> None:
    """No bias, a vector, and a matrix whose rows are not of whole 16 bytes are launched without asking the driver."""
    emulator = Emulator(changed_pack(pack, tmp_path, with_map_of_bias), execute=False)
    product, base, r = number_of(emulator, "product"), 1 << 44, 1 << 41
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"bias_ptr": r}, False),
        ({"bias_ptr": r, "bias_strides": (0, 136, 1)}, True),
        ({"bias_ptr": r + 2, "bias_strides": (0, 136, 1)}, False),
        ({"bias_ptr": r, "bias_strides": (0, 137, 1)}, False),
        ({"bias_ptr": r + 16, "bias_strides": (0, 8, 1)}, True),
        ({"bias_ptr": r, "bias_strides": (0, 8, 2)}, False),
        ({"bias_ptr": r, "bias_strides": (4, 136, 1), "batch": 2}, False),
        ({"bias_ptr": r, "bias_strides": (70 * 136, 136, 1), "batch": 2}, True),
    ]
    for fields, mapped in cases:
        problem = problem_of(70, 136, 520, **fields)
        before = len(emulator.driver.calls)
        emulator.launcher.run(Plan(product), problem, 0, 0, base)
        made = [call for call in emulator.driver.calls[before:] if call.name == "cuTensorMapEncodeTiled"]
        assert bool(made) == mapped, fields
        for call in made:
            wanted = {"address": hex(fields["bias_ptr"]), "dim0": "136", "dim1": "70"}
            assert {name: call.arguments[name] for name in wanted} == wanted
    before = len(emulator.driver.calls)
    emulator.launcher.run(Plan(product), problem_of(1, 136, 520, bias_ptr=r), 0, 0, base)
    assert "cuTensorMapEncodeTiled" not in [call.name for call in emulator.driver.calls[before:]], "one row, a vector"
    assert len(emulator.driver.launches) == len(cases) + 1
    assert emulator.driver.misuse == []


@ON_HIP
@own_process
def test_hip_has_no_tensor_maps(pack: Path, tmp_path: Path) -> None:
    """A kernel with a tensor map is refused on HIP, in words."""
    emulator = Emulator(changed_pack(pack, tmp_path, with_map_of_a), execute=False)
    with pytest.raises(NoKernelError, match="takes tensor maps, which HIP does not have"):
        emulator.launcher.run(Plan(number_of(emulator, "product")), problem_of(70, 136, 520), 0, 0)


# ---------------------------------------------------------------------------------------------- memory and tables
def table_of(
    arch: str,
    *times: Sample,
    network: Network | None = None,
    models: tuple[Model, ...] = (),
    device: str = "a fake",
) -> Table:
    """A table with these times for 512 x 512 x 1024 and no other shape, by default of the fake driver's device."""
    shape = ShapeTimes(2, "nn", "plain", 512, 512, 1024, 0, 0, held_out=False, times=times)
    facts = 108, 1410, 1555, 40 << 20
    return Table(arch, device, *facts, "none", "none", "0", "2026-11-20", 0, network, models, (shape,))


def network_of(shift: float, pdl: float = 0.0) -> Network:
    """A network of one node in each layer, which adds `shift` to the logarithm of every time, and `pdl` with pdl."""
    nothing, none = (0.0,) * HIDDEN, (0.0,) * SECOND
    one = (1.0, *none[1:])
    inputs = [nothing] * len(INPUTS)
    inputs[INPUTS.index("pdl")] = (pdl, *nothing[1:])
    second = (one, *(none,) * (HIDDEN - 1))
    return Network(tuple(inputs), (10.0, *nothing[1:]), second, none, one, shift - 10, AS_IT_IS)


def model_of(
    kernel: Kernel,
    shift: float = 0.0,
    *,
    node: float = 0.0,
    factors: tuple[float, ...] = AS_IT_IS,
    element_bytes: int = 2,
) -> Model:
    """A model of a kernel's config, which adds `node` to the one node of `network_of`."""
    hidden = (node, *(0.0,) * (HIDDEN - 1))
    return Model(kernel.config_name, element_bytes, kernel.kind, shift, factors, hidden)


def other_config() -> Model:
    """A model of a config that no pack has: the table has models of its types, and of the others none."""
    return Model("another", 2, "plain", 0.0, AS_IT_IS, (0.0,) * HIDDEN)


@own_process
def test_tables(pack: Path) -> None:
    """A table's time for a shape decides there, if operands begin at lines; the next table replaces the times."""
    emulator = Emulator(pack, execute=False)
    mm, shape, other = emulator.launcher, problem_of(512, 512, 1024), problem_of(512, 512, 1032)
    product, partial = (emulator.kernels[number_of(emulator, role)].config_name for role in ("product", "partial"))
    times = Sample(product, 1, True, 0, 700), Sample(partial, 6, False, 0, 600)  # noqa: FBT003
    mm.retune(table_of(emulator.arch))
    before = mm.plan(shape, 0, BIG), mm.plan(other, 0, BIG)
    mm.retune(table_of(emulator.arch, *times))
    found = mm.plan(shape, 0, BIG)
    assert (found.split, found.cost, found.measured, found.pdl) == (6, 600, True, False)
    found = mm.plan(shape, 0, 0)
    assert (found.split, found.cost, found.measured, found.pdl) == (1, 700, True, False)
    assert mm.plan(other, 0, BIG) == before[1]
    assert not mm.plan(replace(shape, batch=2), 0, BIG).measured
    for address in (2, 16, 64):
        assert not mm.plan(replace(shape, a_ptr=shape.a_ptr + address), 0, BIG).measured
        assert not mm.plan(replace(shape, b_ptr=shape.b_ptr + address), 0, BIG).measured
    assert mm.plan(replace(shape, a_ptr=shape.a_ptr + 128), 0, BIG).measured
    nothing = replace(table_of(emulator.arch), shapes=())
    mm.retune(nothing)
    assert (mm.plan(shape, 0, BIG), mm.plan(other, 0, BIG)) == before


@own_process
def test_a_config_that_was_not_timed_on_a_shape_is_predicted_there(pack: Path) -> None:
    """A tile that joined the set after a shape was measured can be chosen for it, timed elsewhere or nowhere."""
    emulator = Emulator(pack, execute=False)
    mm, device, shape = emulator.launcher, emulator.launcher.device(0), problem_of(512, 512, 1024)
    product, partial = (emulator.kernels[number_of(emulator, role)].config_name for role in ("product", "partial"))
    slow = table_of(emulator.arch, Sample(partial, 6, pdl=False, copies=0, ns=10**9))
    elsewhere = replace(slow.shapes[0], K=2048, times=(Sample(product, 1, pdl=False, copies=0, ns=500),))
    for shapes in (slow.shapes, (slow.shapes[0], elsewhere)):
        mm.retune(replace(slow, shapes=shapes))
        found = mm.select(shape, device, BIG)
        assert (emulator.kernels[found.kernel].config_name, found.measured) == (product, False)


@own_process
def test_a_network_corrects_times(pack: Path) -> None:
    """The output of the network is the logarithm of a factor; a config adds to nodes and output; pdl is if faster."""
    emulator = Emulator(pack, execute=False)
    mm, device, problem = emulator.launcher, emulator.launcher.device(0), problem_of(512, 512, 1024)
    number = number_of(emulator, "product")
    kernel = emulator.kernels[number]

    def plan(network: Network | None, *models: Model) -> Plan:
        mm.retune(table_of(emulator.arch, network=network, models=(other_config(), *models)))
        found = mm.check(problem, device, number, 0).plan
        assert found is not None
        return found

    formula = plan(None)
    assert plan(network_of(0.0)).cost == pytest.approx(formula.cost, abs=2)
    assert plan(network_of(0.5)).cost == pytest.approx(formula.cost * np.exp(0.5), abs=2)
    shifted = plan(network_of(0.5), model_of(kernel, 0.25))
    assert shifted.cost == pytest.approx(formula.cost * np.exp(0.75), abs=2)
    for node, log_ratio in ((0.25, 0.75), (-0.25, 0.25), (-100, -9.5)):  # a node that is negative counts as 0
        own = plan(network_of(0.5), model_of(kernel, node=node))
        assert own.cost == pytest.approx(formula.cost * np.exp(log_ratio), abs=2)
    other = model_of(kernel, 0.25, node=0.25, element_bytes=1)
    assert plan(network_of(0.5), other) == plan(network_of(0.5))
    for pdl in (-0.1, 0.0, 0.1):
        found = plan(network_of(0.0, pdl))
        assert found.pdl == (kernel.pdl and pdl <= 0)
        assert found.cost == pytest.approx(formula.cost * np.exp(min(pdl, 0) if kernel.pdl else 0), abs=2)


FACTORS = {
    "none": AS_IT_IS,
    **{name: tuple(7.0 if name == each else 1.0 for each in FITTED) for name in FITTED},
    "all": (0.5, 2.0, 3.0, 5.0, 0.25),
}


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@own_process
def test_factors_multiply_constants(lone_pack: Path, factors: tuple[float, ...]) -> None:
    """Those of a config, or of all configs without a model, are of the data sheet's times in the formula."""
    emulator = Emulator(lone_pack, execute=False)
    mm, device, problem = emulator.launcher, emulator.launcher.device(0), problem_of(512, 512, 1024)
    number = number_of(emulator, "product")
    kernel = emulator.kernels[number]

    def cost(of_others: tuple[float, ...], *models: Model) -> int:
        network = replace(network_of(0.0), factors=of_others)
        mm.retune(table_of(emulator.arch, network=network, models=(other_config(), *models)))
        found = mm.check(problem, device, number, 0).plan
        assert found is not None
        return found.cost

    c = constants(kernel, target(emulator.arch), table_of(emulator.arch))
    of_base, of_tile, of_step, of_taken, of_loaded = factors
    steps, taken = 1024 // kernel.config.block_k, 2 * 64 * kernel.config.block_k * 2  # bytes of a step of a tile
    parts = (
        steps * c.ns_per_k_step * of_step,
        steps * taken * c.ns_per_taken_byte * of_taken,
        64 * steps * taken * c.ns_per_loaded_byte * of_loaded,  # of 64 tiles, all at once
        (2 * 512 * 1024 + 512 * 512) * 2 * c.ns_per_byte,
    )
    wanted = pytest.approx(c.base_ns * of_base + c.ns_per_tile * of_tile + math.hypot(*parts), rel=1e-6, abs=1)
    assert cost(factors) == wanted
    assert cost(AS_IT_IS, model_of(kernel, factors=factors)) == wanted
    assert cost(factors, model_of(kernel)) == cost(AS_IT_IS)
    assert cost(factors, model_of(kernel, element_bytes=1)) == wanted


@pytest.mark.parametrize(("multiprocessors", "split"), [(3, None), (4, 2), (5, 2), (10, 5), (64, 16)])
def test_slices_are_of_at_most_two_waves(lone_pack: Path, multiprocessors: int, split: int | None) -> None:
    """Four tiles are split for a device that computes all at once, into slices of which it computes half at once.

    By the formula five slices would be faster than two on 5 multiprocessors: four rounds of a fifth of the steps.
    """
    mm, problem = open_pack(lone_pack).launcher, problem_of(128, 128, 1 << 16)
    (number,) = (n for n, k in enumerate(mm.kernels) if (k.role, k.layout) == ("partial", "nn"))
    found = mm.check(problem, CDevice(multiprocessors, 166_912), number)
    assert (found.plan and found.plan.split) == split
    if split is None:
        assert "more tiles than the device computes at once" in str(found.rejected)
    else:
        need = 2 * 128 * 128 * 4  # of two slices
        assert mm.check(problem, CDevice(multiprocessors, 166_912), number, need).plan is not None
        rejected = mm.check(problem, CDevice(multiprocessors, 166_912), number, need - 1).rejected
        assert rejected == f"needs {need} B of device memory to work in"


@own_process
def test_measured_slices_are_kept(pack: Path) -> None:
    """What was measured keeps its slices on a device of that name, however many waves they are."""
    emulator = Emulator(pack, execute=False)
    mm, number, shape = emulator.launcher, number_of(emulator, "partial"), problem_of(512, 512, 1024)
    sample = Sample(emulator.kernels[number].config_name, 8, pdl=False, copies=0, ns=600)
    mm.retune(table_of(emulator.arch, sample))
    few = CDevice(3, 166_912, 0, 0, 0, b"a fake")
    found = mm.check(shape, few, number).plan
    assert found is not None
    assert (found.split, found.measured, found.cost) == (8, True, 600)
    assert mm.check(replace(shape, M=448), few, number).plan is None


@own_process
def test_tables_that_are_no_tables(pack: Path) -> None:
    """`retune` refuses shapes out of order and numbers of configs that the table does not have, and changes nothing."""
    emulator = Emulator(pack, execute=False)
    mm, problem = emulator.launcher, problem_of(512, 512, 1024)
    product = emulator.kernels[number_of(emulator, "product")].config_name
    table = table_of(emulator.arch, Sample(product, 1, pdl=False, copies=0, ns=700))
    mm.retune(table)
    for second in (CShape(M=1, N=1, K=1, element_bytes=2), CShape(M=1, N=1, K=1, element_bytes=1)):
        wrong = c_table(table, emulator.kernels)
        wrong.shapes, wrong.shape_count = (CShape * 2)(CShape(M=1, N=1, K=1, element_bytes=2), second), 2
        with pytest.raises(ValueError, match="shape 1 of the table is not in ascending order"):
            mm._raise(mm._c.retune(ctypes.byref(wrong)))
    wrong = c_table(table, emulator.kernels)
    wrong.config_numbers[1] = 1
    with pytest.raises(ValueError, match="kernel 1 has times of config 1, the table has 1 configs"):
        mm._raise(mm._c.retune(ctypes.byref(wrong)))
    assert mm.plan(problem, 0, BIG).cost == 700


@own_process
def test_a_plan_is_remembered_for_what_it_holds_for(pack: Path) -> None:
    """Asking again after the problem changed in any field gives what a fresh selection gives."""
    emulator = Emulator(pack, execute=False)
    mm, device, rng = emulator.launcher, emulator.launcher.device(0), np.random.default_rng(0)
    problem, seen = problem_of(512, 512, 1024), set()
    for _ in range(4000):
        changes: list[dict[str, Any]] = [
            {"a_ptr": (1 << 40) + int(rng.choice([0, 2, 16, 256]))},
            {"b_ptr": (2 << 40) + int(rng.choice([0, 8, 512]))},
            {"c_ptr": (3 << 40) + int(rng.choice([0, 2]))},
            {"bias_ptr": int(rng.choice([0, 4 << 40, (4 << 40) + 2]))},
            {"scale_a_ptr": int(rng.choice([0, 5 << 40]))},
            {"activation": str(rng.choice(["none", "relu"]))},
            {"M": int(rng.choice([64, 512])), "batch": int(rng.choice([1, 1, 2]))},
            {"strides_a": (int(rng.choice([1024, 1025])), 1)},
            {"strides_b": (int(rng.choice([512, 520])), 1)},
            {"strides_c": (int(rng.choice([512, 513])), 1)},
            {"dtype_c": str(rng.choice(["fp16", "fp32"]))},
        ]
        problem = replace(problem, **changes[rng.integers(len(changes))])
        limit = int(rng.choice([0, BIG]))
        plan = mm.plan(problem, 0, limit)
        assert plan == mm.select(problem, device, limit), problem
        seen.add(plan)
    assert len(seen) > 10


@own_process
def test_threads_remember_for_themselves(pack: Path) -> None:
    """Threads that plan while another retunes get the plan of one table or the other, and of the last in the end."""
    emulator = Emulator(pack, execute=False)
    mm, problem = emulator.launcher, problem_of(512, 512, 1024)
    config_name = emulator.kernels[number_of(emulator, "product")].config_name
    tables = [table_of(emulator.arch, Sample(config_name, 1, pdl=False, copies=0, ns=ns)) for ns in (11, 22)]
    mm.retune(tables[0])
    stop, costs = threading.Event(), set()

    def work() -> None:
        while not stop.is_set():
            costs.add(mm.plan(problem, 0, BIG).cost)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(200):
        mm.retune(tables[turn % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert costs <= {11, 22}
    assert mm.plan(problem, 0, BIG).cost == 22


def test_empty_products_have_empty_plans(pack: Path) -> None:
    """Products without elements have plans that launch nothing, found without a driver."""
    mm = open_pack(pack).launcher
    for problem in (problem_of(0, 64, 64), problem_of(64, 0, 64)):
        assert mm.plan(problem, 0, BIG) == Plan(0, group_m=1)


def test_plans_as_values() -> None:
    """A plan goes to C and back unchanged, and says what it launches."""
    cut = {"panel_m": 128, "panel_n": 2**40}
    plan = Plan(7, 4, COPY_A | COPY_B, 99, 16, pdl=True, measured=True, workspace_bytes=2**40, cost=123, **cut)
    assert Plan.from_c(plan.to_c()) == plan
    assert ctypes.sizeof(CPlan) == 64
    assert plan.steps == ("copy A", "copy B", "partial", "reduce")
    assert Plan(0, copies=COPY_C).steps == ("product", "copy C")
