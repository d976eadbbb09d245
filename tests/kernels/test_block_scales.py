"""Block scales of fp8, executed: every kernel that takes them, and the launcher's choice of these and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from aotmm.kernels import BLOCK_SCALED
from aotmm.pack.schema import Kernel
from aotmm.runtime.launcher import Plan
from aotmm.runtime.pack import open_pack
from aotmm.target import TARGETS
from tests.build.packs import BLOCKS, pack_of
from tests.native.emulation import (
    ARCHS,
    Outcome,
    Product,
    execute,
    execute_kernels,
    execute_plans,
    in_worker,
    missing,
)

Figures = Callable[[str, list[Outcome]], None]
KINDS = ("blocks", "block columns")
TYPES = [(arch, dtype) for arch in ARCHS for dtype in ("fp8e5", "fp8e4") if dtype in TARGETS[arch].dtypes]


def products(dtype: str, scales: str) -> list[Product]:
    """Products whose rows, columns and K end within a tile, a block of columns and a block of K, or do not."""
    plain = Product(65, 144, 272, dtype=dtype, out="bf16", layout="nt", scales=scales)
    return [
        plain,
        replace(plain, exact=False),
        replace(plain, M=64, N=128, K=256),
        replace(plain, M=3, N=130, K=129, padding=3, offset=1, exact=False),
        replace(plain, M=1, N=1, K=1),
        replace(plain, M=5, N=7, K=0),
        replace(plain, M=20, N=40, K=144, batch=3, gap=16),
        replace(plain, M=20, N=40, K=144, batch=2, shared=True, exact=False),
        replace(plain, bias="matrix", activation="relu", out="fp32", exact=False),
        replace(plain, out="fp16", layout="tn"),
    ]


def _names(outcomes: list[Outcome], kernels: tuple[Kernel, ...]) -> set[bool]:
    by_name = {kernel.name: kernel for kernel in kernels}
    return {BLOCK_SCALED in by_name[outcome.kernel].guards for outcome in outcomes}


@pytest.mark.parametrize("scales", KINDS)
@pytest.mark.parametrize(("arch", "dtype"), TYPES)
def test_selected_products_are_right(arch: str, dtype: str, scales: str, figures: Figures) -> None:
    """Whatever is selected for a product with block scales is right, and is a kernel that takes them."""
    if reason := missing(arch):
        pytest.skip(reason)
    folder = pack_of(arch, BLOCKS)
    outcomes = in_worker(execute, folder, products(dtype, scales))
    figures(f"{arch} {dtype}, {scales}", outcomes)
    assert [outcome for outcome in outcomes if outcome.complaints] == []
    assert _names(outcomes, open_pack(folder).manifest.kernels) == {True}


@pytest.mark.parametrize(("arch", "dtype"), TYPES)
def test_every_kernel_is_right(arch: str, dtype: str, figures: Figures) -> None:
    """Each kernel with block scales computes products with either kind of them: partials in slices of K."""
    if reason := missing(arch):
        pytest.skip(reason)
    folder = pack_of(arch, BLOCKS)
    kernels = open_pack(folder).manifest.kernels
    plain = Product(65, 80, 656, dtype=dtype, layout="nt")
    work = [
        (number, replace(plain, out="bf16" if kernel.role == "partial" else kernel.dtype_c, scales=scales, exact=exact))
        for number, kernel in enumerate(kernels)
        if BLOCK_SCALED in kernel.guards and kernel.dtype_a == dtype
        for scales, exact in (("blocks", True), ("block columns", False))
    ]
    outcomes = in_worker(execute_kernels, folder, work)
    figures(f"{arch} {dtype}, every kernel with block scales", outcomes)
    assert [outcome for outcome in outcomes if outcome.complaints] == []
    assert {kernels[number].role for number, _ in work} == {"product", "partial"}


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_without_them_take_no_block_scales(arch: str) -> None:
    """Other products have kernels without block scales, which refuse a product that has some."""
    if reason := missing(arch):
        pytest.skip(reason)
    folder = pack_of(arch, BLOCKS)
    kernels = open_pack(folder).manifest.kernels
    plain = Product(65, 80, 144, dtype="fp8e5", out="bf16", layout="nt", scales="rows")
    outcomes = in_worker(execute, folder, [plain, replace(plain, scales="")])
    assert [outcome for outcome in outcomes if outcome.complaints] == []
    assert _names(outcomes, kernels) == {False}
    work = [
        (number, replace(plain, scales="blocks"))
        for number, kernel in enumerate(kernels)
        if kernel.role == "product"
        and (kernel.dtype_a, kernel.dtype_c) == ("fp8e5", "bf16")
        and BLOCK_SCALED not in kernel.guards
    ]
    refused = in_worker(execute_kernels, folder, work)
    assert len(refused) == len(work) > 0
    assert all("block_scale_a_ptr" in outcome.complaints[0] for outcome in refused)


@pytest.mark.parametrize("scales", KINDS)
def test_panels(scales: str) -> None:
    """Each panel of C is computed with the scales of its own rows and columns."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    folder = pack_of("sm80", BLOCKS)
    number = next(
        number
        for number, kernel in enumerate(open_pack(folder).manifest.kernels)
        if BLOCK_SCALED in kernel.guards and (kernel.role, kernel.layout) == ("product", "nt")
    )
    product = Product(130, 272, 144, dtype="fp8e5", out="bf16", layout="nt", scales=scales)
    outcomes = in_worker(execute_plans, folder, [(Plan(number, panel_m=128, panel_n=128), product)])
    assert [outcome for outcome in outcomes if outcome.complaints] == []
