"""Whatever `torch.matmul` takes: a generated matrix of types, layouts, alignments, sizes, epilogues and batch forms."""

from __future__ import annotations

import itertools
import json
import random as python_random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies

import aotmm
from aotmm.pack.files import data_folder
from aotmm.problem import ACTIVATIONS, DTYPES, input_types
from aotmm.runtime.devices import best_pack, device
from aotmm.runtime.library import Library
from aotmm.timing.correctness import U_FP8, U_OUT, Epilogue
from aotmm.timing.operands import torch_dtype
from tests.gpu.judge import Judgement, integers, judge, lay_out, random
from tests.gpu.plans import chosen

SIZES = (0, 1, 2, 3, 7, 31, 127, 128, 129)
LARGE = (255, 500, 1000)
OFFSETS = (0, 1, 2, 4, 8)
LAYOUTS = ("nn", "nt", "tn", "tt")
# Batch dimensions of A and of B, and what is done to them: None leaves the operand as it is.
BATCHES = (((), ()), ((3,), (3,)), ((2, 3), ()), ((), (2,)), ((2, 1), (1, 3)), ((1,), (4,)), ((0,), (1,)))
PER_CELL = 60
EXACT_ACTIVATIONS = [name for name, least in ACTIVATIONS.items() if least != "full"]


def libraries() -> list[Any]:
    """Folders of packs that run on this GPU: all of them, and, where it is not the best, sm80 alone, by its PTX."""
    if not torch.cuda.is_available():
        return [pytest.param(None, id="none", marks=pytest.mark.skip(reason="no GPU here"))]
    folder = data_folder("artifacts")
    best = best_pack(aotmm.load(folder).packs, device(0).arch)
    assert best is not None
    return [folder] if best[0].arch == "sm80" or torch.version.hip else [folder, folder / "sm80"]


def types(lib: Library) -> list[str]:
    """The input types of the pack that serves this GPU, tf32 aside, which is fp32 to a user."""
    kernels = lib.pack_for(0).manifest.kernels
    pairs = sorted({(kernel.dtype_a, kernel.dtype_b) for kernel in kernels if kernel.role == "product"})
    return [a if a == b else f"{a}-{b}" for a, b in pairs if a != "tf32"]


def epilogue_for(
    dice: python_random.Random, output: torch.dtype, shape: tuple[int, ...], *, exact: bool, generator: torch.Generator
) -> Epilogue:
    """A random epilogue for a result of `shape`; exact ones are integers and powers of two."""
    if output is torch.int32 or dice.random() < 0.3:
        return Epilogue()
    activation = dice.choice(EXACT_ACTIVATIONS if exact else list(ACTIVATIONS))
    bias = None
    if dice.random() < 0.5:
        of_bias = shape[-1:] if dice.random() < 0.5 else shape
        bias = torch.randint(-64, 65, of_bias, generator=generator, device="cuda").to(output)
    scale_a = torch.full((), 0.5, device="cuda") if dice.random() < 0.3 else None
    scale_b = None
    if dice.random() < 0.3 and len(shape) == len("MN"):
        scale_b = torch.randint(-2, 1, (1, shape[1]), generator=generator, device="cuda").float().exp2()
    return Epilogue(activation, 0.125, bias, scale_a, scale_b)


def options_of(epilogue: Epilogue) -> dict[str, Any]:
    """The keyword arguments of `matmul` for an epilogue."""
    activation: object = None if epilogue.activation == "none" else epilogue.activation
    if activation == "leaky_relu":
        activation = ("leaky_relu", epilogue.slope)
    return {
        "bias": epilogue.bias,
        "activation": activation,
        "scale_a": epilogue.scale_a,
        "scale_b": epilogue.scale_b,
    }


@pytest.mark.parametrize("folder", libraries(), ids=str)
def test_generated_products(
    folder: Path, generator: torch.Generator, capsys: pytest.CaptureFixture[str], limit: Callable[[int], None]
) -> None:
    """Over 10,000 distinct products: integer ones are exact, random ones within both bounds, and only C is stored."""
    lib, dice = aotmm.load(folder), python_random.Random(3)  # noqa: S311 - no secret
    seen: set[object] = set()
    worst = Judgement(0, 0.0, 0.0)
    cells = list(itertools.product(types(lib), LAYOUTS, OFFSETS))
    per_cell = max(PER_CELL, -(-11_000 // len(cells)))
    for (name, layout, offset), turn in itertools.product(cells, range(per_cell)):
        if turn == 0:
            limit(60)
        m, n, k = (dice.choice(SIZES if turn % 10 else SIZES + LARGE) for _ in range(3))
        batch_a, batch_b = dice.choice(BATCHES) if turn % 3 == 0 else BATCHES[0]
        pad = dice.choice((0, 0, 1, 8))
        dtype_a, dtype_b = input_types(name)
        output = torch_dtype(DTYPES[dtype_a].output)
        if output is not torch.int32 and turn % 4 == 0:
            output = dice.choice((torch.float16, torch.bfloat16, torch.float32))
        exact = turn % 2 == 0
        if exact:
            a, b = integers(m, n, k, name, output, generator=generator)
        else:
            a, b = random(m, k, dtype_a, generator=generator), random(k, n, dtype_b, generator=generator)
        a, b = a.expand(*batch_a, m, k), b.expand(*batch_b, k, n)
        a_view = lay_out(a, torch_dtype(dtype_a), layout[0], pad=pad, offset=offset)
        b_view = lay_out(b, torch_dtype(dtype_b), layout[1], pad=pad, offset=offset)
        shape = tuple((a @ b).shape)
        epilogue = epilogue_for(dice, output, shape, exact=exact, generator=generator)
        memory = torch.full((*shape[:-2], m + 2, n + pad + 2), -7.0, device="cuda").to(output)
        c = memory[..., 1 : m + 1, 1 : n + 1]
        if turn % 5 == 0:
            c = lib.matmul(a_view, b_view, out_dtype=output, **options_of(epilogue))
        else:
            lib.matmul(a_view, b_view, out=c, **options_of(epilogue))
            frame = memory.clone()
            frame[..., 1 : m + 1, 1 : n + 1] = -7
            assert (frame == -7).all(), "stored outside C"
        found = judge(c, a, b, name, epilogue, exact=exact)
        where = f"{name} {layout} {batch_a}x{batch_b} {m}x{n}x{k} off {offset} pad {pad} {output} {epilogue.activation}"
        assert c.shape == shape, where
        assert found.mismatches == 0, f"{where}: {found}"
        assert found.det <= 1, f"{where}: {found}"
        assert found.prob < 1, f"{where}: {found}"
        seen.add((where, None if epilogue.bias is None else epilogue.bias.shape, exact))
        worst = Judgement(0, max(worst.det, found.det), max(worst.prob, found.prob))
    with capsys.disabled():
        print(json.dumps({"packs": folder.name, "distinct products": len(seen), "mismatches": 0, "worst": str(worst)}))  # noqa: T201
    assert len(seen) >= 10_000


VECTORS = [
    ((5,), (5,)),
    ((5,), (5, 4)),
    ((3, 5), (5,)),
    ((5,), (2, 5, 4)),
    ((2, 3, 5), (5,)),
    ((2, 2, 3, 5), (2, 5, 4)),
]


@pytest.mark.parametrize(("shape_a", "shape_b"), VECTORS)
@pytest.mark.parametrize("given", [False, True])
def test_ranks(lib: Library, shape_a: tuple[int, ...], shape_b: tuple[int, ...], given: bool) -> None:  # noqa: FBT001
    """Vectors, matrices and batches give the shape and values of torch.matmul, into a new tensor or a given one."""
    a = torch.arange(1, 1 + torch.Size(shape_a).numel(), device="cuda").half().reshape(shape_a)
    b = torch.arange(1, 1 + torch.Size(shape_b).numel(), device="cuda").half().reshape(shape_b)
    want = torch.matmul(a.double(), b.double())
    out = torch.full(want.shape, -1.0, device="cuda", dtype=torch.float32) if given else None
    c = lib.matmul(a, b, out=out) if given else lib.matmul(a, b, out_dtype=torch.float32)
    assert c.shape == want.shape
    assert (c == want).all()
    bias = torch.ones(want.shape, device="cuda")
    assert (lib.matmul(a, b, bias=bias, out_dtype=torch.float32) == want + 1).all()


sizes = strategies.integers(0, 70)
steps = strategies.sampled_from((0, 1, 2, 3, 7, 8, 16, 64, 72, 128))
views = strategies.tuples(steps, steps, strategies.integers(0, 9))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(m=sizes, n=sizes, k=sizes, of_a=views, of_b=views, wide=strategies.booleans())
def test_arbitrary_strides(
    m: int,
    n: int,
    k: int,
    of_a: tuple[int, int, int],
    of_b: tuple[int, int, int],
    wide: bool,  # noqa: FBT001
) -> None:
    """Whatever non-negative strides and offsets two views have, zeros and overlaps included, the product is exact."""
    memory = torch.arange(70 * 128 * 2 + 10, device="cuda").remainder(7).sub(3).half()
    a = memory.as_strided((m, k), of_a[:2], of_a[2])
    b = memory.as_strided((k, n), of_b[:2], of_b[2])
    out_dtype = torch.float32 if wide else None
    want = a.double() @ b.double()
    assert (aotmm.matmul(a, b, out_dtype=out_dtype) == want).all()


def test_strides_of_every_kind(lib: Library) -> None:
    """Permuted, sliced, expanded and interleaved operands and results need no copy and are exact."""
    generator = torch.Generator("cuda").manual_seed(1)
    base = torch.randint(-3, 4, (4, 6, 8, 10), generator=generator, device="cuda").half()
    cases = [
        (base.permute(0, 2, 1, 3), base.permute(0, 2, 3, 1)),
        (base[::2, :, ::3], base[::2, :, ::3].mT),
        (base.permute(3, 1, 0, 2)[::3], base.permute(3, 1, 2, 0)[::3]),
        (base[:, :1].expand(4, 5, 8, 10), base[:1, :5].mT),
    ]
    for a, b in cases:
        want = a.double() @ b.double()
        assert (lib.matmul(a, b) == want).all()
        wide = torch.full((*want.shape[:-1], 2 * want.shape[-1] + 3), -1.0, device="cuda", dtype=torch.float16)
        lib.matmul(a, b, out=wide[..., 1:-2:2])
        assert (wide[..., 1:-2:2] == want).all()
        assert (wide[..., ::2] == -1).all()


def test_more_than_2_to_31_elements(lib: Library) -> None:
    """An operand of over 2^31 elements, by rows or by stride alone, is read and written where it is."""
    rows = 2**31 // 64 + 257
    a = torch.zeros(rows, 64, device="cuda", dtype=torch.float16)
    a[-1], a[0] = 3, 1
    b = torch.ones(64, 8, device="cuda", dtype=torch.float16)
    c = lib.matmul(a, b)
    assert (c[-1] == 192).all()
    assert (c[0] == 64).all()
    assert (c[1:-1] == 0).all()
    memory = torch.zeros(2**31 + 2**20, device="cuda", dtype=torch.float16)
    far = memory.as_strided((2, 16), (2**31 + 64, 1))
    far.fill_(2)
    assert (lib.matmul(far, torch.ones(16, 16, device="cuda").half()) == 32).all()


def test_nan_and_inf(lib: Library) -> None:
    """NaN and Inf are where torch's product and activation have them, and nowhere else."""
    a = torch.randn(70, 40, device="cuda").half()
    b = torch.randn(40, 90, device="cuda").half()
    a[3, 5], a[20, 1], b[7, 9], b[8, 60] = float("nan"), float("inf"), float("-inf"), float("nan")
    product = a.float() @ b.float()
    functional = torch.nn.functional
    for name, reference in {
        None: lambda x: x,
        "relu": functional.relu,
        "leaky_relu": functional.leaky_relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }.items():
        got, want = lib.matmul(a, b, activation=name, out_dtype=torch.float32), reference(product)  # type: ignore[no-untyped-call]
        assert (got.isnan() == want.isnan()).all(), name
        assert (got.isinf() == want.isinf()).all(), name


def test_scaled_products_mean_what_torch_means(lib: Library) -> None:
    """fp8 products with scales per tensor or per row and column agree with torch._scaled_mm within two roundings."""
    if torch.version.hip or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch._scaled_mm needs fp8 tensor cores")
    generator = torch.Generator("cuda").manual_seed(2)
    a = torch.randn(64, 128, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(96, 128, generator=generator, device="cuda").to(torch.float8_e4m3fn).T
    for rows, cols in ((False, False), (True, True)):
        scale_a = torch.rand((64, 1) if rows else (), generator=generator, device="cuda") + 0.5
        scale_b = torch.rand((1, 96) if cols else (), generator=generator, device="cuda") + 0.5
        want = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
        for fast in (False, True):
            got = lib.matmul(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, fast_accum=fast)
            spread = (a.double().abs() @ b.double().abs()) * scale_a.double() * scale_b.double()
            bound = 2 * (U_OUT["bf16"] * want.double().abs() + U_FP8 * spread)
            assert ((got.double() - want.double()).abs() <= bound).all()


def test_unsupported_types_say_what_there_is(lib: Library) -> None:
    """Types that no kernel multiplies are a TypeError with both operands and the pairs that exist."""
    half, full = torch.zeros(4, 4, device="cuda").half(), torch.zeros(4, 4, device="cuda")
    with pytest.raises(
        TypeError, match=r"multiplies fp16 x fp32: a is \(4, 4\) float16.*it has: bf16 x bf16, fp16 x fp16"
    ):
        lib.matmul(half, full)


def test_explain_names_the_kernel_that_runs(lib: Library) -> None:
    """explain gives the kernel and its plan, and for each rejected kernel of the types the guard it lacks."""
    a, b = torch.zeros(100, 64, device="cuda").half(), torch.zeros(64, 80, device="cuda").half()
    found = lib.explain(a, b)
    kernel, plan = chosen(lib, a, b)
    assert kernel.layout == "nn"
    assert str(found).startswith(f"{kernel.name}: {' + '.join(plan.steps)}, grid of {plan.grid} blocks, ")
    rejected = [verdict.rejected for verdict in found.evaluations if verdict.same_types and verdict.rejected]
    assert any("is not 1" in reason for reason in rejected)
    assert chosen(lib, a.repeat(8, 1, 1), b[None]) == chosen(lib, a.repeat(8, 1), b), "one b for all is more rows of a"
    with pytest.raises(TypeError, match=r"no kernels for this dtype: .* float64 on cuda"):
        lib.explain(a, b.double())
    kernel, plan = chosen(lib, a[:, 1:], b[1:])
    assert "copy A" in plan.steps or not any(guard.value == "a_ptr" for guard in kernel.guards)
