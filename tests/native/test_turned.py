"""Copies of A along M, for fp32 operands in full precision that both lie along K: where they are offered and taken."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aotmm.pack.time_model import HIDDEN, INPUTS, Network
from aotmm.problem import LAYOUTS
from aotmm.runtime.launcher import COPY_A, COPY_B, COPY_C, Plan, Problem
from aotmm.runtime.tuning import CDevice
from aotmm.target import target
from tests.build.packs import default_pack, pack_of
from tests.config_sets import Value, config_set, tile
from tests.native.emulation import Case, Emulator, Product, missing, own_process
from tests.native.reference import Reference
from tests.native.test_core import load_apart, same, tuning_for
from tests.native.test_plans import BIG, arguments, network_of, number_of, other_config, table_of

FMA: dict[str, Value] = {"family": "fma", "archs": ["sm80"], "dtypes": ["fp32"]}
CONFIGS = config_set(
    tile(32, 32, 16, 3, 1, **FMA),
    tile(32, 32, 16, 3, 1, **FMA, split=True),
    dtypes=["fp32"],
    epilogues=["none", "bias_relu"],
)
SIZE, PROBLEMS = 2048, 120
A_BYTES = 4 * SIZE * SIZE
PLAIN = Product(64, 96, 128, dtype="fp32", out="fp32", layout="nt")
RAGGED = replace(PLAIN, M=68, N=72, K=104)


def threads(**options: Any) -> Emulator:
    """A launcher of one tile of family fma, as product and as partial, in every layout."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    return Emulator(pack_of("sm80", CONFIGS, "threads"), **options)


def problem_of(layout: str = "nt", size: int = SIZE, **changes: Any) -> Problem:
    """A square product of aligned fp32 operands at addresses that nothing is read from."""
    rows, cols = (size, 1), (1, size)
    a, b = ({"n": rows, "t": cols}[order] for order in layout)
    plain = Problem(size, size, size, a, b, rows, "fp32", "fp32", "fp32", "none", 1 << 40, 2 << 40, 3 << 40)
    return replace(plain, **changes)


def favouring_a_by_columns(weight: float) -> Network:
    """A network by which a product takes exp(weight) times as long if rows of A are not contiguous."""
    found = network_of(0.0)
    inputs = list(found.inputs)
    inputs[INPUTS.index("A by columns")] = (weight, *(0.0,) * (HIDDEN - 1))
    return replace(found, inputs=tuple(inputs))


def tuned(emulator: Emulator, weight: float) -> None:
    """Gives the launcher that network, for fp32, too."""
    kinds = itertools.product((2, 4), ("plain", "relaxed"))
    models = tuple(replace(other_config(), element_bytes=size, kind=kind) for size, kind in kinds)
    network = favouring_a_by_columns(weight)
    emulator.launcher.retune(table_of(emulator.arch, network=network, models=models))


# -------------------------------------------------------------------------------------------------------- selection
@own_process
def test_taken_where_it_saves_time() -> None:
    """A large product takes the copy if the table has kernels for A across K faster by more than the copy, else not."""
    emulator = threads(execute=False)
    mm, device, problem = emulator.launcher, emulator.launcher.device(0), problem_of()

    def chosen(weight: float, of: Problem) -> tuple[str, Plan]:
        tuned(emulator, weight)
        plan = mm.select(of, device)
        return emulator.kernels[plan.kernel].layout, plan

    layout, plain = chosen(0.0, problem)
    assert (layout, plain.copies, plain.workspace_bytes) == ("nt", 0, 0)
    layout, turned = chosen(-0.1, problem)
    assert (layout, turned.steps, turned.workspace_bytes) == ("tt", ("copy A", "product"), A_BYTES)
    assert plain.cost * 0.9 < turned.cost < plain.cost
    for few in (problem_of(size=64), replace(problem, N=64)):  # the copy takes as long as the product, or longer
        assert chosen(-0.1, few)[1].copies == 0
    assert chosen(-0.1, replace(problem, batch_invariant=True))[1].copies == COPY_A, "all layouts have one order"
    assert mm.plan(problem, 0, BIG) == turned
    emulator.launcher.run(turned, problem, 0, 0, 1 << 44)
    assert emulator.driver.misuse == []


def not_offered() -> dict[str, Problem]:
    """Products for which A is not turned."""
    groups: dict[str, Any] = {"grouped": "M", "batch": 4, "offsets_ptr": 1 << 36, "batch_strides": (0, SIZE * SIZE, 0)}
    return {
        **{layout: problem_of(layout) for layout in LAYOUTS if layout != "nt"},
        "tf32": problem_of(allow_tf32=True),
        "fp16": problem_of(dtype_a="fp16", dtype_b="fp16", dtype_c="fp16"),
        "bf16": problem_of(dtype_a="bf16", dtype_b="bf16", dtype_c="bf16"),
        "groups": problem_of(**groups),
        "one row": problem_of(M=1),
        "one column": problem_of(N=1),
        "no K": problem_of(K=0),
        "a bias matrix of rows that are no multiple of 4": problem_of(
            M=SIZE + 2, bias_ptr=4 << 40, bias_strides=(0, SIZE, 1)
        ),
        "scales of such rows": problem_of(M=SIZE + 2, scale_a_ptr=4 << 40, scale_b_ptr=5 << 40, scale_strides=(1, 0)),
    }


@own_process
def test_rows_that_are_no_whole_vectors() -> None:
    """If M is no multiple of 4 C is copied too: the kernel computes rows up to one, and those of C are copied back."""
    emulator = threads(execute=False)
    mm, device, problem = emulator.launcher, emulator.launcher.device(0), problem_of(M=SIZE - 3)
    tuned(emulator, -0.1)
    plan = mm.select(problem, device)
    assert (plan.steps, plan.workspace_bytes) == (("copy A", "product", "copy C"), 2 * A_BYTES)
    odd_c = replace(problem, c_ptr=problem.c_ptr + 4, b_ptr=problem.b_ptr + 4)
    assert mm.select(odd_c, device).copies == COPY_A | COPY_B | COPY_C
    assert mm.select(problem, device, 2 * A_BYTES - 1).copies == 0
    vector = replace(problem, bias_ptr=4 << 40, bias_strides=(0, 0, 1), activation="relu")
    scaled = replace(problem, scale_a_ptr=4 << 40, scale_b_ptr=5 << 40)
    for each in (vector, scaled):
        assert mm.select(each, device).copies == COPY_A | COPY_C
    slices = mm.check(problem, device, number_of(emulator, "partial", "tt"))
    assert slices.plan is None, "a reduce writes the caller's C"


@own_process
def test_a_copy_of_c_alone_has_its_rows() -> None:
    """Without a copy of A that is turned, C's has M lines, and the kernel's M is the product's."""
    emulator = threads(execute=False)
    odd = problem_of("nt", 104, M=61, N=72, c_ptr=(3 << 40) + 4)
    for layout, copies, lines in (("nt", COPY_C, 61), ("tt", COPY_A | COPY_C, 64)):
        number = number_of(emulator, "product", layout)
        found = emulator.launcher.check(odd, emulator.launcher.device(0), number).plan
        a_bytes = 104 * 256 if copies & COPY_A else 0
        c_bytes = -(-lines * 384 // 256) * 256  # 72 columns take three lines of 128 bytes
        assert found is not None
        assert (found.copies, found.workspace_bytes) == (copies, a_bytes + c_bytes)
        emulator.launcher.run(found, odd, 0, 0, 1 << 44)
        main = next(each for each in emulator.driver.launches if emulator.role(each.image) == "product")
        assert arguments(emulator.kernels[number], main.params)["M"] == lines
        emulator.driver.launches.clear()


@own_process
def test_not_offered_to_others() -> None:
    """Other layouts, types and groups have no plan that copies, whatever a table says."""
    emulator = Emulator(default_pack("sm80"), execute=False)
    mm, device = emulator.launcher, emulator.launcher.device(0)
    tuned(emulator, -3.0)
    for name, problem in not_offered().items():
        copies = [row.plan.copies for row in mm.explain(problem, device).evaluations if row.plan is not None]
        assert set(copies) == {0}, name


@pytest.mark.parametrize("arch", ["sm90", "gfx90a"])
@own_process
def test_not_offered_where_threads_do_not_multiply(arch: str) -> None:
    """Tensor cores of sm90 and matrix units of gfx90a multiply fp32, so there nothing is turned."""
    emulator = Emulator(default_pack(arch), execute=False)
    tuned(emulator, -3.0)
    evaluations = emulator.launcher.explain(problem_of(), emulator.launcher.device(0)).evaluations
    assert {row.plan.copies for row in evaluations if row.plan is not None} == {0}


@own_process
def test_the_workspace_may_be_too_small() -> None:
    """Below the bytes of the copy the operands stay, in one piece: panels are for copies that are needed."""
    emulator = threads(execute=False)
    mm, device, problem = emulator.launcher, emulator.launcher.device(0), problem_of()
    tuned(emulator, -0.1)
    for limit in (0, A_BYTES // 4, A_BYTES - 1):
        plan = mm.select(problem, device, limit)
        assert (plan.steps, plan.panel_m, plan.panel_n) == (("product",), 0, 0)
    assert mm.select(problem, device, A_BYTES).copies == COPY_A


@own_process
def test_with_copies_that_are_needed() -> None:
    """With a copy that B or C needs, A may be turned too; a copy that A needs lies along K, as A does."""
    emulator = threads(execute=False)
    mm, device, problem = emulator.launcher, emulator.launcher.device(0), problem_of()
    tuned(emulator, -0.1)
    wanted = {
        ("a", "tt"): None,
        ("a", "nt"): COPY_A,
        ("b", "tt"): COPY_A | COPY_B,
        ("b", "nt"): COPY_B,
        ("c", "tt"): COPY_A | COPY_C,
        ("c", "nt"): COPY_C,
    }
    for (name, layout), copies in wanted.items():
        odd = replace(problem, **{f"{name}_ptr": getattr(problem, f"{name}_ptr") + 4})
        found = mm.check(odd, device, number_of(emulator, "product", layout)).plan
        assert (found and found.copies) == copies, (name, layout)
    cut = mm.select(replace(problem, a_ptr=problem.a_ptr + 4), device, A_BYTES // 4)
    assert (emulator.kernels[cut.kernel].layout, cut.copies, cut.panel_m > 0) == ("nt", COPY_A, True)


def test_as_by_the_reference() -> None:
    """Over random products, aligned or not, plans with A turned are those of the rules written down in Python."""
    arch, rng = "sm80", np.random.default_rng(20261128)
    mm, tables = load_apart(arch), (tuning_for(arch, network=False),)  # the formula alone
    mm.retune(*tables)
    reference = Reference(mm.kernels, target(arch), tables)
    numbers = [
        number
        for number, kernel in enumerate(mm.kernels)
        if (kernel.family, kernel.layout) == ("fma", "tt") and kernel.role in ("product", "partial")
    ]
    device = CDevice(132, target(arch).shared_bytes, 1980, 4916, 0, b"NVIDIA H200")
    checked = 0
    for _ in range(PROBLEMS):
        m, n, k = (4 * int(16 * 2 ** rng.uniform(0, 7)) + bool(rng.random() < 0.05) for _ in range(3))
        m += int(rng.choice((0, 1, 2, 3), p=(0.5, 0.2, 0.2, 0.1)))
        pads = [int(pad) for pad in rng.choice((0, 4, 1), 3, p=(0.7, 0.2, 0.1))]
        strides = {"strides_a": (k + pads[0], 1), "strides_b": (1, k + pads[1]), "strides_c": (n + pads[2], 1)}
        addresses = rng.choice((256, 260), 3, p=(0.9, 0.1))
        pointers = {name: int(each) for name, each in zip(("a_ptr", "b_ptr", "c_ptr"), addresses, strict=True)}
        problem = problem_of("nt", SIZE, M=m, N=n, K=k, **strides, **pointers)
        problem = replace(problem, batch_invariant=bool(rng.random() < 0.2))
        limit = int(rng.choice((2**20, 2**24, 2**31), p=(0.1, 0.2, 0.7)))
        number = int(rng.choice(numbers))
        wanted, found = reference.check(problem, device, number, limit), mm.check(problem, device, number, limit).plan
        if isinstance(wanted, str):
            assert found is None, (problem, mm.kernels[number].name)
        else:
            assert found is not None, (problem, mm.kernels[number].name)
            assert same(problem, found, wanted, network=False), (problem, found, wanted)
            checked += found.copies & COPY_A
        best, chosen = reference.select(problem, device, limit), mm.select(problem, device, limit)
        assert best is not None
        assert same(problem, chosen, best, network=False), (problem, limit, chosen, best)
    assert checked >= PROBLEMS // 10


# -------------------------------------------------------------------------------------------------------- execution
PRODUCTS = {
    "whole tiles": PLAIN,
    "edges": RAGGED,
    "padded": replace(RAGGED, padding=4),
    "scattered C": replace(RAGGED, step_c=2),
    "epilogue": replace(RAGGED, bias="matrix", activation="relu", scales="rows"),
    "random": replace(RAGGED, exact=False),
}


@pytest.mark.parametrize("role", ["product", "partial"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@own_process
def test_executed(product: Product, role: str) -> None:
    """Products with A turned are right, whole and in slices, and the copy has a line for each step of K."""
    emulator = threads()
    number = number_of(emulator, role, "tt")
    outcome = emulator.run(product, number)
    assert outcome.complaints == ()
    assert outcome.plan is not None
    assert outcome.plan.copies & COPY_A
    copy, main = emulator.driver.launches[0], emulator.kernels[number]
    copier = next(k for k in emulator.kernels if k.image.sha256 == hashlib.sha256(copy.image).hexdigest())
    found = arguments(copier, copy.params)
    assert (found["M"], found["N"]) == (product.K, product.M)
    launch = next(each for each in emulator.driver.launches if emulator.role(each.image) == role)
    assert arguments(main, launch.params)["stride_ak"] % 32 == 0, "lines are whole cache lines"


@pytest.mark.parametrize("rows", [61, 66, 67])
@pytest.mark.parametrize("more", [{}, {"bias": "vector", "activation": "relu"}, {"batch": 3, "gap": 8, "shared": True}])
@own_process
def test_rows_that_are_no_whole_vectors_executed(rows: int, more: dict[str, Any]) -> None:
    """Products of any number of rows are right with A turned, and only C is written, though the kernel has more."""
    emulator = threads()
    number = number_of(emulator, "product", "tt")
    outcome = emulator.run(replace(RAGGED, M=rows, **more), number)
    assert outcome.complaints == ()
    assert outcome.plan is not None
    assert outcome.plan.steps == ("copy A", "product", "copy C")
    main = next(each for each in emulator.driver.launches if emulator.role(each.image) == "product")
    assert arguments(emulator.kernels[outcome.plan.kernel], main.params)["M"] == -(-rows // 4) * 4


@own_process
def test_a_needed_copy_executed() -> None:
    """A copy that A needs lies along K, a line for each row of A, when the plan is made and when it is launched."""
    emulator = threads()
    product = replace(RAGGED, offset=1)
    outcome = emulator.run(product, number_of(emulator, "product", "nt"))
    assert outcome.complaints == ()
    assert outcome.plan is not None
    assert outcome.plan.copies & COPY_A
    copy = emulator.driver.launches[0]
    copier = next(k for k in emulator.kernels if k.image.sha256 == hashlib.sha256(copy.image).hexdigest())
    found = arguments(copier, copy.params)
    assert (found["M"], found["N"]) == (product.M, product.K)


@own_process
def test_panels_executed() -> None:
    """Panels have copies of their own rows of A."""
    emulator = threads()
    number = number_of(emulator, "product", "tt")
    for copies in (COPY_A, COPY_A | COPY_B | COPY_C):
        plan = Plan(number, copies=copies, workspace_bytes=BIG >> 4, panel_m=128, panel_n=128)
        assert emulator.run(replace(PLAIN, M=132, N=136, K=72), plan=plan).complaints == ()


@own_process
def test_same_bits() -> None:
    """A product has the same bits with A turned and as it lies: each sum is one chain over K in every layout."""
    emulator = threads()
    case, device, bits = Case(replace(RAGGED, K=520, exact=False)), emulator.launcher.device(0), []
    for layout in ("nt", "tt"):
        plan = emulator.launcher.check(case.problem, device, number_of(emulator, "product", layout)).plan
        assert plan is not None
        assert plan.copies == (COPY_A if layout == "tt" else 0)
        emulator.launcher.run(plan, case.problem, 0, 0, emulator.place(case, plan))
        bits.append(case.operands["C"].view.tobytes())
    assert emulator.driver.faults == []
    assert bits[0] == bits[1]
