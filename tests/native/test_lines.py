"""Operands that begin within a cache line: where steps along K begin, and copies: where, by which rules, and right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aotmm.kernels import WARP_SPECIALISED
from aotmm.pack import table
from aotmm.runtime.launcher import COPY_A, COPY_B, Plan, Problem
from aotmm.runtime.tuning import CDevice
from aotmm.target import target
from tests.build.packs import default_pack, pack_of
from tests.config_sets import config_set, tile
from tests.native.emulation import Emulator, Product, missing, own_process
from tests.native.reference import Reference
from tests.native.test_core import load_apart, same
from tests.native.test_plans import BIG, arguments, number_of

H200 = CDevice(132, target("sm90").shared_bytes, 1980, 4916, 0, b"NVIDIA H200")
LIMIT, PROBLEMS = 2**31, 80
TILE = config_set(tile(64, 64, 32, 3, 4, archs=["sm80"], dtypes=["fp16"]), dtypes=["fp16"], epilogues=["none"])


def layer(M: int, N: int, K: int, off_a: int = 0, off_b: int = 0) -> Problem:
    """A product of layout nt in fp16 whose operands begin so many bytes behind a cache line; nothing is read."""
    pointers = ((1 << 40) + off_a, (2 << 40) + off_b, 3 << 40)
    return Problem(M, N, K, (K, 1), (1, K), (N, 1), "fp16", "fp16", "fp16", "none", *pointers)


def test_a_small_operand_off_a_line_is_copied() -> None:
    """The H200's table has A of a few rows copied if it begins within a line, and nothing that is large or on a line.

    Not if the other is off a line, too: steps begin where boxes of the larger one lie on lines, and copies on a line.
    """
    mm, few = load_apart("sm90"), (200, 8192, 8192)
    copied = mm.select(layer(*few, 48), H200, LIMIT)
    assert copied.steps[:2] in {("copy A", "product"), ("copy A", "partial")}
    assert copied.copies == COPY_A
    bytes_ = 2 * few[0] * few[2]
    for problem, limit in (
        (layer(*few), LIMIT),
        (layer(*few, 0, 80), LIMIT),  # B is too large
        (layer(*few, 48, 80), LIMIT),
        (layer(8000, 8192, 8192, 48), LIMIT),  # and so is this A
        (layer(*few, 48), bytes_ - 1),
        (replace(layer(*few, 48), batch=2, batch_strides=(1 << 30,) * 3), LIMIT),
        (layer(146, 512, 512, 48), LIMIT),  # it takes less time than a copy is worth
    ):
        assert mm.select(problem, H200, limit).copies == 0, (problem, limit)
    assert copied.cost < 0.95 * mm.select(layer(*few, 48), H200, bytes_ - 1).cost
    turned = mm.select(layer(8192, 200, 8192, 0, 48), H200, LIMIT)
    assert turned.copies == COPY_B, "the operand of fewer bytes"


def test_as_by_the_reference() -> None:
    """Over random products whose operands begin anywhere, choices are those of the rules written down in Python."""
    mm, tables, rng = load_apart("sm90"), table.shipped("sm90"), np.random.default_rng(20261129)
    reference, taken = Reference(mm.kernels, target("sm90"), tables), 0
    for _ in range(PROBLEMS):
        m, n, k = (8 * int(2 ** rng.uniform(low, high)) for low, high in ((3, 6), (7, 10), (8, 11)))
        off_a, off_b = (16 * int(number) for number in rng.integers(0, 8, 2))
        few, whole, both = (bool(number) for number in rng.integers(2, size=3))
        sizes = (m, n) if few else (n, m)
        problem = layer(*sizes, k // 64 * 64 if whole else k, off_a, off_b if both else 0)
        limit = int(rng.choice((2**20, LIMIT), p=(0.1, 0.9)))
        best, chosen = reference.select(problem, H200, limit), mm.select(problem, H200, limit)
        assert best is not None
        assert same(problem, chosen, best, network=True), (problem, limit, chosen, best)
        taken += bool(chosen.copies)
    assert PROBLEMS // 20 <= taken <= PROBLEMS // 2, taken


LAYER = layer(256, 512, 1024, 48, 80)
BY_ROWS, BY_COLUMNS = (512, 1), (1, 256)  # of B and of A, across K


@pytest.mark.parametrize(
    ("problem", "elements"),
    [
        (LAYER, 40),
        (layer(512, 256, 1024, 48, 80), 24),
        (layer(512, 512, 1024, 48, 80), 40),
        (layer(256, 512, 1024, 96, 80), 48),
        (layer(512, 256, 1024, 80, 32), 16),
        (layer(256, 512, 1024, 48), 0),
        (layer(256, 512, 1024, 0, 80), 0),
        (layer(256, 512, 1000, 48, 80), 0),
        (layer(256, 512, 960, 48, 80), 0),
        (replace(LAYER, strides_b=BY_ROWS), 0),
        (replace(LAYER, strides_a=BY_COLUMNS), 0),
        (replace(LAYER, batch=2, batch_strides=(256 * 1024, 512 * 1024, 256 * 512)), 40),
        (replace(LAYER, batch=2, batch_strides=(256 * 1024, 512 * 1024 + 8, 256 * 512)), 0),
        (replace(LAYER, batch_invariant=True), 0),
    ],
    ids=[
        "B", "larger A", "B of equals", "A in sectors", "B in sectors", "B on a line", "A on a line", "pitch", "short",
        "B across K", "A across K", "batch", "gap", "batch_invariant",
    ],
)  # fmt: skip
@own_process
def test_where_steps_begin(problem: Problem, elements: int) -> None:
    """Steps begin before K where boxes of one operand can lie on lines, and those of the other in no more sectors."""
    emulator = Emulator(default_pack("sm90"), execute=False)
    plan = emulator.launcher.plan(problem, 0, 0)
    emulator.launcher.run(plan, problem, 0, 0, 0)
    kernel = emulator.kernels[plan.kernel]
    assert kernel.family in WARP_SPECIALISED
    last, block = kernel.parameters[-1], emulator.driver.launches[0].params
    begin = len(block) - last.offset - last.bytes  # tensor maps are at multiples of 64 bytes of constant memory
    assert arguments(kernel, block[begin:])["k_shift"] == elements
    assert emulator.driver.misuse == []


@pytest.mark.parametrize(("copies", "name"), [(COPY_A, "M"), (COPY_B, "N")])
@own_process
def test_executed(copies: int, name: str) -> None:
    """A product is right with a copy that no kernel needs, and the copy's rows are whole cache lines."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    emulator = Emulator(pack_of("sm80", TILE, "lines"))
    product = Product(72, 88, 104, layout="nt", offset=8)
    number = number_of(emulator, "product", "nt")
    outcome = emulator.run(product, plan=Plan(number, copies=copies, workspace_bytes=BIG >> 4))
    assert outcome.complaints == ()
    first, second = emulator.driver.launches
    copier = emulator.kernel_of(first.image)
    found = arguments(copier, first.params)
    assert {found["M"], found["N"]} == {getattr(product, name), product.K}
    stride = arguments(emulator.kernels[number], second.params)["stride_am" if copies == COPY_A else "stride_bn"]
    assert 2 * stride % 128 == 0
    assert stride >= product.K
