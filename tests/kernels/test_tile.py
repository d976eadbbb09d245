"""The tile kernels as they are shipped: every image of the default packs is executed, and products of all kinds.

The images run in interpreters, not on GPUs; what that proves stands in docs/architecture.md. What is judged: integer
products bit for bit, random ones against the error bounds of numerical analysis, and that every byte of C is stored
exactly once and nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from aotmm.kernels import BLOCK_SCALED
from aotmm.pack.schema import Kernel
from aotmm.problem import ACTIVATIONS, DTYPES
from aotmm.runtime.pack import open_pack
from aotmm.target import TARGETS
from tests.native.emulation import ARCHS, Outcome, Product, execute, execute_kernels, in_worker, submit

Figures = Callable[[str, list[Outcome]], None]
Counted = Callable[[str, Iterable[str]], None]

LAYOUTS = ("nn", "nt", "tn", "tt")
# One activation of each epilogue: what comes before it in a kernel is the same for all of them.
REPRESENTATIVES = {epilogue: activation for activation, epilogue in ACTIVATIONS.items()}.values()
IMAGES_PER_CALL = 4
EDGE = Product(70, 90, 100)
LARGEST_K = 1024
SHARED_OF_8_9 = 101_376  # bytes. Source: CUDA programming guide, table of compute capabilities
SHAPES_PER_IMAGE = 6
BLOCKS_IN_TURN = ("blocks", "block columns")
# By what a kernel has: activations that keep integers exact, and those that random numbers get.
EXACT = {"none": ("none",), "bias_relu": ("relu", "leaky_relu"), "full": ("leaky_relu", "relu")}
ROUNDED = {
    "none": ("none",),
    "bias_relu": ("leaky_relu", "none", "relu"),
    "full": ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh"),
}


def products_of(kernel: Kernel, number: int) -> list[Product]:
    """Products that keep the guards of `kernel` and reach every part of it.

    Two tiles less an edge in both directions with more steps than stages, so that the pipeline fills, runs and drains;
    random numbers in padded rows; a batch; less than one step of K; the smallest product; and no K at all. Whatever the
    kernel can do to its sums is done, each time something else. A kernel without a guard on alignment gets none, and a
    generic one gets operands that no guard would admit.
    """
    step = {guard.value: guard.operand for guard in kernel.guards if guard.relation == "multiple_of"}
    config, integer = kernel.config, kernel.dtype_c == "int32"

    def at_least(name: str, size: int) -> int:
        return -(-size // step.get(name, 1)) * step.get(name, 1)

    def sized(m: int, n: int, k: int, **more: object) -> Product:
        sizes = {"M": at_least("M", m), "N": at_least("N", n), "K": at_least("K", k)}
        return replace(plain, **sizes, **more)  # type: ignore[arg-type]

    def finished(turn: int, bias: str, scales: str, *, exact: bool) -> dict[str, object]:
        names = (EXACT if exact else ROUNDED)[kernel.epilogue]
        return {
            "activation": names[(number + turn) % len(names)],
            "bias": "" if kernel.epilogue == "none" else bias,
            "scales": kind if (kind := blocks(turn)) else "" if integer else scales,
            "exact": exact or integer,
        }

    def blocks(turn: int) -> str:
        return BLOCKS_IN_TURN[(number + turn) % 2] if BLOCK_SCALED in kernel.guards else ""

    plain = Product(
        M=2 * config.block_m - step.get("M", 1),
        N=2 * config.block_n - step.get("N", 1),
        K=at_least("K", (config.num_stages + 1) * config.block_k + 1),
        dtype=kernel.dtype_a,
        out=kernel.dtype_c,
        layout="nn" if kernel.layout == "any" else kernel.layout,
    )
    aligned = "a_ptr" in step
    free = {} if aligned else {"padding": 3, "offset": 1, "gap": 5}
    odd = free | ({"layout": "tt", "step_c": 2} if kernel.layout == "any" else {})
    m, n, k = config.block_m, config.block_n, config.block_k
    return [
        replace(plain, **finished(0, "vector", "", exact=True)),  # type: ignore[arg-type]
        sized(m + 1, n // 2 + 1, 2 * k + 1, **{"padding": 16} | odd | finished(1, "matrix", "rows", exact=False)),
        sized(
            m // 2 + 1, 9, k + 1, batch=3, shared=number % 2 == 1,
            **{"padding": 16, "gap": 32} | free | finished(2, "vector", "tensor", exact=number % 3 == 0),
        ),
        sized(m // 2 + 3, n + 1, k // 2 + 1, batch=2, **odd | finished(3, "matrix", "tensor", exact=False)),
        sized(1, 1, 1, scales=blocks(0), **free),
        sized(m // 4 + 1, n // 4 + 1, 0, **finished(4, "vector", "rows", exact=kernel.epilogue != "full")),
    ]  # fmt: skip


def _wrong(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.parametrize(("arch", "dtype"), [(arch, dtype) for arch in ARCHS for dtype in TARGETS[arch].dtypes])
def test_every_image_is_right(
    arch: str, dtype: str, interpreted_pack: Callable[[str], Path], figures: Figures, counted: Counted
) -> None:
    """Every image of the default pack computes its products, launched through the pack's own library."""
    folder = interpreted_pack(arch)
    kernels = open_pack(folder).manifest.kernels
    numbers = [n for n, kernel in enumerate(kernels) if kernel.dtype_a == dtype and kernel.role == "product"]
    work = [(number, product) for number in numbers for product in products_of(kernels[number], number)]
    futures = [
        submit(execute_kernels, folder, [item for item in work if item[0] in numbers[first : first + IMAGES_PER_CALL]])
        for first in range(0, len(numbers), IMAGES_PER_CALL)
    ]
    outcomes = [outcome for future in futures for outcome in future.result()]
    figures(f"{arch} {dtype}, every image", outcomes)
    assert _wrong(outcomes) == []
    assert {outcome.kernel for outcome in outcomes} == {kernels[number].name for number in numbers}
    assert len(outcomes) == len(work) == SHAPES_PER_IMAGE * len(numbers) > 0
    counted(arch, {outcome.kernel for outcome in outcomes})


def test_smaller_gpus_of_the_major_lack_large_tiles_alone(interpreted_pack: Callable[[str], Path]) -> None:
    """Of sm80's kernels, 8.6 and 8.9 have the shared memory of all but family `multistage`, and others for its work."""
    kernels = open_pack(interpreted_pack("sm80")).manifest.kernels
    assert {kernel.family for kernel in kernels if kernel.shared_bytes > SHARED_OF_8_9} == {"multistage"}
    kinds = [
        {
            (kernel.role, kernel.dtype_a, kernel.dtype_c, kernel.layout, kernel.vector_bytes)
            for kernel in kernels
            if (kernel.family == "multistage") == large
        }
        for large in (True, False)
    ]
    assert kinds[0] < kinds[1]


@pytest.mark.parametrize(("dtype", "layout"), [*(("fp16", layout) for layout in LAYOUTS), ("bf16", "nt")])
@pytest.mark.parametrize("arch", ARCHS)
def test_products(
    arch: str, dtype: str, layout: str, interpreted_pack: Callable[[str], Path], figures: Figures
) -> None:
    """Products of every size, alignment and stride are right with whatever kernel is selected for them.

    All of them in two layouts, one for each type. The other layouts differ in strides, so they get what those decide.
    """
    edge = replace(EDGE, dtype=dtype, out=dtype, layout=layout)
    products = [
        edge,
        replace(edge, exact=False),
        replace(edge, M=128, N=128, K=128),
        replace(edge, M=127, N=129, K=65),
        replace(edge, padding=5),
        replace(edge, M=64, N=72, K=80, padding=8),
        replace(edge, step_c=3, padding=1, offset=3, exact=False),
        replace(edge, batch=2, gap=3, exact=False),
    ]
    more = [
        replace(edge, M=1, N=1, K=1),
        replace(edge, M=33, N=17, K=50),
        replace(edge, M=33, N=17, K=50, exact=False),
        replace(edge, M=1, N=130, K=64),
        replace(edge, M=130, N=1, K=64),
        replace(edge, K=0),
        replace(edge, offset=1),
        replace(edge, M=64, N=64, K=64, offset=1, exact=False),
        replace(edge, step_c=2),
        replace(edge, activation="leaky_relu"),
        replace(edge, activation="leaky_relu", exact=False),
        replace(edge, out="fp32"),
        replace(edge, out="fp32", activation="leaky_relu", exact=False),
        replace(edge, K=LARGEST_K, exact=False),
        replace(edge, special=True, exact=False),
        replace(edge, M=64, N=72, K=80, batch=3, shared=True),
    ]
    products += more if (dtype, layout) in (("fp16", "nn"), ("bf16", "nt")) else []
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


@pytest.mark.parametrize(
    ("product", "room"),
    [
        pytest.param(Product(8, 8, 128, layout="nt"), "padding", id="rows"),
        pytest.param(Product(8, 8, 128, layout="tn"), "padding", id="along-k"),
        pytest.param(Product(8, 8, 64, batch=2), "gap", id="batch"),
    ],
)
def test_operands_around_2_gib(product: Product, room: str, interpreted_pack: Callable[[str], Path]) -> None:
    """On AMD, kernels that load by buffers are right up to the last element that these reach, others beyond it."""
    folder, limit = interpreted_pack("gfx90a"), (2**31 - 16) // 2  # elements
    lines, length = {"nt": (product.M, product.K), "tn": (product.K, product.M), "nn": (2, product.M * product.K)}[
        product.layout
    ]
    most = (limit - length) // (lines - 1) // 8 * 8 - length
    products = [
        replace(product, padding=size) if room == "padding" else replace(product, gap=size) for size in (most, most + 8)
    ]
    outcomes = in_worker(execute, folder, products)
    assert _wrong(outcomes) == []
    epilogues = {kernel.name: kernel.epilogue for kernel in open_pack(folder).manifest.kernels}
    assert [epilogues[outcome.kernel] == "full" for outcome in outcomes] == [False, True]


@pytest.mark.parametrize("arch", ARCHS)
def test_strides_beyond_2_31(arch: str, interpreted_pack: Callable[[str], Path]) -> None:
    """C as well: rows 2^31 elements apart need a generic kernel, matrices that far apart do not."""
    folder = interpreted_pack(arch)
    rows = Product(8, 8, 64, padding=2**31, bias="matrix", scales="rows")
    matrices = Product(8, 8, 64, batch=2, gap=2**31 + 2**20, bias="matrix", activation="relu")
    types = [("int8", "int32"), ("fp8e5", "fp16"), ("fp32", "fp32")]
    plain = [replace(rows, dtype=dtype, out=out, bias="", scales="") for dtype, out in types]
    outcomes = in_worker(execute, folder, [rows, matrices, *plain])
    assert _wrong(outcomes) == []
    layouts = {kernel.name: kernel.layout for kernel in open_pack(folder).manifest.kernels}
    assert [layouts[outcome.kernel] for outcome in outcomes] == ["any", "nn", "any", "any", "any"]


@pytest.mark.parametrize("activation", REPRESENTATIVES)
@pytest.mark.parametrize("arch", ARCHS)
def test_epilogues(arch: str, activation: str, interpreted_pack: Callable[[str], Path], figures: Figures) -> None:
    """Each epilogue with each kind of bias and scales, in batches, and for K = 0, where it is that of the bias."""
    exact = ACTIVATIONS[activation] != "full"
    edge = replace(EDGE, activation=activation, exact=False, slope=0.3)
    whole = replace(EDGE, activation=activation, exact=exact)
    products = [
        edge,
        replace(edge, bias="vector"),
        replace(edge, bias="matrix", layout="tn"),
        replace(edge, bias="vector", scales="tensor", dtype="bf16", out="bf16"),
        replace(edge, bias="matrix", scales="rows", out="fp32"),
        replace(edge, scales="rows", dtype="fp32", out="fp32", layout="nt"),
        replace(edge, M=64, N=72, K=80, bias="vector", dtype="fp8e5", layout="nt"),
        replace(edge, M=64, N=64, K=64, bias="vector", scales="rows"),
        replace(edge, M=33, N=40, batch=3, bias="matrix", scales="tensor", gap=8),
        replace(edge, M=33, N=40, batch=2, shared=True, bias="vector", padding=3),
        replace(whole, bias="vector", scales="rows"),
        replace(whole, M=64, N=64, K=64, bias="matrix", scales="tensor"),
        replace(whole, K=0, bias="vector"),
        replace(whole, K=0, bias="matrix", out="fp32", batch=2),
        replace(edge, K=0, dtype="bf16", out="bf16"),
    ]
    outcomes = in_worker(execute, interpreted_pack(arch), products)
    figures(f"{arch} {activation}", outcomes)
    assert _wrong(outcomes) == []
    assert len(outcomes) == len(products)


@pytest.mark.parametrize("scales", ["", "rows", "tensor", "a", "b"])
@pytest.mark.parametrize("arch", ARCHS)
def test_scales_and_a_bias_that_cancels(
    arch: str, scales: str, interpreted_pack: Callable[[str], Path], figures: Figures
) -> None:
    """Where a bias takes away the scaled sum, what is left is the error of few sums, of the scales and of the addition.

    So for K of 1 and 2 the bound needs all their terms, and nothing hides a term that it lacks.
    """
    edge = replace(EDGE, bias="cancelling", scales=scales, out="fp32", exact=False)
    products = [
        replace(edge, K=k, dtype=dtype, layout=layout)
        for k in (1, 2)
        for dtype, layout in (("fp32", "nn"), ("fp16", "nt"), ("bf16", "tn"))
    ]
    products += [replace(edge, K=1, out="fp16"), replace(edge, K=2, dtype="bf16", out="bf16")]
    outcomes = in_worker(execute, interpreted_pack(arch), products)
    figures(f"{arch} bias that cancels", outcomes)
    assert _wrong(outcomes) == []
    assert max(outcome.det for outcome in outcomes) > 0.5


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("arch", ARCHS)
def test_special_values(arch: str, activation: str, interpreted_pack: Callable[[str], Path], figures: Figures) -> None:
    """NaN and infinities stay in their rows and go through every activation as through torch's.

    An activation sees sums in fp32, whatever the operands are, so one of each epilogue gets every type.
    """
    edge = replace(EDGE, activation=activation, exact=False, special=True)
    every = ("fp16", "bf16", "fp32", "fp8e5", *(("tf32",) if "tf32" in TARGETS[arch].dtypes else ()))
    outputs = {dtype: DTYPES[dtype].output for dtype in (every if activation in REPRESENTATIVES else every[:1])}
    products = [replace(edge, dtype=dtype, out=out) for dtype, out in outputs.items()]
    products += [
        replace(edge, M=64, N=64, K=64, layout="nt", dtype=dtype, out=out, bias="vector", scales="rows")
        for dtype, out in outputs.items()
    ]
    outcomes = in_worker(execute, interpreted_pack(arch), products)
    figures(f"{arch} NaN and infinities", outcomes)
    assert _wrong(outcomes) == []
    assert len(outcomes) == len(products)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("arch", ARCHS)
def test_activations(arch: str, activation: str, interpreted_pack: Callable[[str], Path], figures: Figures) -> None:
    """Each activation of every magnitude that a bias can have, of both signs, of infinities and NaN, against float64.

    K is 0, so that the argument is the bias itself and the only errors are the activation's own and the rounding.
    """
    plain = Product(64, 64, 0, activation=activation, slope=0.3, bias="matrix", exact=False, extreme=True)
    products = [replace(plain, dtype=out, out=out) for out in ("fp16", "bf16", "fp32")]
    outcomes = in_worker(execute, interpreted_pack(arch), products)
    figures(f"{arch} activations alone", outcomes)
    assert _wrong(outcomes) == []
    assert len(outcomes) == len(products)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(arch, dtype) for arch in ARCHS for dtype in TARGETS[arch].dtypes if dtype not in ("fp16", "bf16")],
)
def test_other_types(arch: str, dtype: str, interpreted_pack: Callable[[str], Path], figures: Figures) -> None:
    """What `test_products` does for 16 bits, in fewer products: layouts, alignments and outputs of the other types."""
    out = DTYPES[dtype].output
    edge = replace(EDGE, dtype=dtype, out=out)
    outputs = [out] if out == "int32" else ["fp16", "bf16", "fp32"]
    products = [replace(edge, layout=layout, exact=exact) for layout in LAYOUTS for exact in (True, False)]
    products += [
        replace(edge, M=64, N=64, K=128, layout=layout, out=output) for layout in LAYOUTS for output in outputs
    ]
    products += [
        replace(edge, M=1, N=1, K=1),
        replace(edge, M=127, N=129, K=65, exact=False),
        replace(edge, K=0),
        replace(edge, padding=5, offset=1),
        replace(edge, offset=3, step_c=3, padding=1, exact=False),
        replace(edge, M=64, N=64, K=64, batch=3, gap=16),
        replace(edge, M=33, N=17, K=50, batch=2, shared=True, exact=False),
        replace(edge, K=LARGEST_K, exact=False),
    ]
    outcomes = in_worker(execute, interpreted_pack(arch), products)
    figures(f"{arch} {dtype}, selected", outcomes)
    assert _wrong(outcomes) == []
    assert len(outcomes) == len(products)
