"""The tile kernels as they are shipped: every image of the default packs is executed, and products of all kinds.

The images run in interpreters, not on GPUs; what that proves stands in docs/architecture.md. What is judged: integer
products bit for bit, random ones against the error bounds of numerical analysis, and that every byte of C is stored
exactly once and nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aotmm.manifest import Kernel
from aotmm.runtime.pack import open_pack
from aotmm.target import TARGETS
from tests.native.emulation import ARCHS, Outcome, Product, execute, execute_kernels, in_worker, submit

Figures = Callable[[str, list[Outcome]], None]

LAYOUTS = ("nn", "nt", "tn", "tt")
IMAGES_PER_CALL = 4
EDGE = Product(70, 90, 100)
LARGEST_K = 2048


def products_of(kernel: Kernel) -> list[Product]:
    """Products that keep the promises of `kernel` and reach every part of it.

    Two tiles less an edge in both directions with more steps than stages, so that the pipeline fills, runs and drains;
    random numbers in padded rows; the smallest product; and no K at all. A kernel that promises nothing gets operands
    that keep no promise.
    """
    step = {promise.value: promise.operand for promise in kernel.promises if promise.relation == "multiple_of"}
    config = kernel.config

    def at_least(name: str, size: int) -> int:
        return -(-size // step.get(name, 1)) * step.get(name, 1)

    plain = Product(
        M=2 * config.block_m - step.get("M", 1),
        N=2 * config.block_n - step.get("N", 1),
        K=at_least("K", (config.num_stages + 1) * config.block_k + 1),
        dtype=kernel.dtype_a,
        out=kernel.dtype_c,
        layout="nn" if kernel.layout == "any" else kernel.layout,
        activation=kernel.activation,
    )
    loose = replace(
        plain,
        M=at_least("M", config.block_m + 1),
        N=at_least("N", config.block_n // 2 + 1),
        K=at_least("K", 2 * config.block_k + 1),
        exact=False,
        padding=16,
    )
    if kernel.layout == "any":
        loose = replace(loose, layout="tt", padding=3, offset=1, step_c=2)
    smallest = replace(plain, M=step.get("M", 1), N=step.get("N", 1), K=step.get("K", 1))
    return [plain, loose, smallest, replace(plain, K=0)]


def _wrong(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.parametrize(("arch", "dtype"), [(arch, dtype) for arch in ARCHS for dtype in TARGETS[arch].dtypes])
def test_every_image_is_right(arch: str, dtype: str, interpreted_pack: Callable[[str], Path], figures: Figures) -> None:
    """Every image of the default pack computes its products, launched through the pack's own library."""
    folder = interpreted_pack(arch)
    kernels = open_pack(folder).manifest.kernels
    numbers = [number for number, kernel in enumerate(kernels) if kernel.dtype_a == dtype]
    work = [(number, product) for number in numbers for product in products_of(kernels[number])]
    futures = [
        submit(execute_kernels, folder, [item for item in work if item[0] in numbers[first : first + IMAGES_PER_CALL]])
        for first in range(0, len(numbers), IMAGES_PER_CALL)
    ]
    outcomes = [outcome for future in futures for outcome in future.result()]
    figures(f"{arch} {dtype}, every image", outcomes)
    assert _wrong(outcomes) == []
    assert {outcome.kernel for outcome in outcomes} == {kernels[number].name for number in numbers}
    assert len(outcomes) == len(work) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_products(
    arch: str, dtype: str, layout: str, interpreted_pack: Callable[[str], Path], figures: Figures
) -> None:
    """Products of every size, alignment and stride are right with whatever kernel is selected for them."""
    edge = replace(EDGE, dtype=dtype, out=dtype, layout=layout)
    products = [
        edge,
        replace(edge, exact=False),
        replace(edge, M=1, N=1, K=1),
        replace(edge, M=33, N=17, K=50),
        replace(edge, M=33, N=17, K=50, exact=False),
        replace(edge, M=1, N=130, K=64),
        replace(edge, M=130, N=1, K=64),
        replace(edge, M=128, N=128, K=128),
        replace(edge, M=127, N=129, K=65),
        replace(edge, K=0),
        replace(edge, padding=5),
        replace(edge, M=64, N=72, K=80, padding=8),
        replace(edge, offset=1),
        replace(edge, M=64, N=64, K=64, offset=1, exact=False),
        replace(edge, step_c=2),
        replace(edge, step_c=3, padding=1, offset=3, exact=False),
        replace(edge, activation="leaky_relu"),
        replace(edge, activation="leaky_relu", exact=False),
        replace(edge, out="fp32"),
        replace(edge, out="fp32", activation="leaky_relu", exact=False),
        replace(edge, K=LARGEST_K, exact=False),
        replace(edge, special=True, exact=False),
    ]
    outcomes = in_worker(execute, interpreted_pack(arch), products)
    figures(f"{arch} {dtype}, selected", outcomes)
    assert _wrong(outcomes) == []
    assert len(outcomes) == len(products)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_subnormal_inputs(arch: str, dtype: str, interpreted_pack: Callable[[str], Path], figures: Figures) -> None:
    """Subnormal inputs count in full on sm80; on gfx90a, whose matrix units flush them, nothing else is lost."""
    scale = {"fp16": -16, "bf16": -128}[dtype]
    product = replace(EDGE, dtype=dtype, out="fp32", exact=False, scale=scale)
    outcomes = in_worker(execute, interpreted_pack(arch), [product, replace(product, M=64, N=64, K=64)])
    figures(f"{arch} {dtype}, subnormal", outcomes)
    assert _wrong(outcomes) == []


@pytest.mark.parametrize("dtype", ["fp16", "fp8e5"])
def test_legacy_entry_point(dtype: str, interpreted_pack: Callable[[str], Path]) -> None:
    """On gfx90a the entry that loads its arguments itself works as well as the one that finds them in registers."""
    product = replace(EDGE, dtype=dtype)
    outcomes = in_worker(execute, interpreted_pack("gfx90a"), [product, replace(product, K=0)], preload=False)
    assert _wrong(outcomes) == []


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(Product(8, 8, 128, layout="nt"), id="rows-of-a-and-b"),
        pytest.param(Product(8, 8, 130, layout="tn"), id="along-k"),
        pytest.param(Product(8, 8, 9, layout="tn"), id="one-step-of-k"),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_extents_around_2_31(arch: str, product: Product, interpreted_pack: Callable[[str], Path]) -> None:
    """Operands of up to 2^31 elements are right with a specialised kernel, larger ones with a generic one."""
    folder = interpreted_pack(arch)
    lines, length = (product.M, product.K) if product.layout == "nt" else (product.K, product.M)
    leading = (2**31 - length) // (lines - 1) // 8 * 8
    admitted, beyond = (replace(product, padding=padding) for padding in (leading - length, leading + 8 - length))
    outcomes = in_worker(execute, folder, [admitted, beyond, replace(product, padding=2**31)])
    assert _wrong(outcomes) == []
    layouts = {kernel.name: kernel.layout for kernel in open_pack(folder).manifest.kernels}
    assert [layouts[outcome.kernel] for outcome in outcomes] == [product.layout, "any", "any"]
