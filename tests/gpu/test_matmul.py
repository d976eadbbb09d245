"""`lib.matmul` on this GPU: layouts, strides, types, streams, and what users do wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from aotmm.errors import NoKernelError
from aotmm.runtime.devices import best_pack, device
from aotmm.runtime.library import Library
from aotmm.timing.correctness import Epilogue
from aotmm.timing.operands import torch_dtype
from tests.gpu.judge import integers, judge, lay_out, random

SIZES = [(1, 1, 1), (3, 5, 7), (70, 90, 100), (128, 128, 128), (257, 129, 255), (512, 768, 896), (33, 65, 0)]


def dtypes() -> list[str]:
    """The input types of the pack that serves this GPU."""
    if not torch.cuda.is_available():
        return ["fp16"]
    import aotmm

    found = best_pack(aotmm.load().packs, device(0).arch)
    assert found is not None
    kernels = [kernel for kernel in found[0].manifest.kernels if kernel.role == "product"]
    return sorted({kernel.dtype_a for kernel in kernels if kernel.dtype_a == kernel.dtype_b} - {"tf32", "int8"})


@pytest.mark.parametrize("name", dtypes())
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("pad", "offset"), [(0, 0), (16, 0), (1, 0), (8, 1), (0, 4)])
def test_any_strides(lib: Library, generator: torch.Generator, name: str, layout: str, pad: int, offset: int) -> None:
    """Every layout, padding and alignment gives the exact product of integers, with and without activation."""
    for (m, n, k), activation in itertools.product(SIZES, (None, "leaky_relu")):
        output = torch.float16 if name.startswith("fp8") else torch_dtype(name)
        a, b = integers(m, n, k, name, output, generator=generator)
        a_view = lay_out(a, torch_dtype(name), layout[0], pad=pad, offset=offset)
        b_view = lay_out(b, torch_dtype(name), layout[1], pad=pad, offset=offset)
        c = lib.matmul(a_view, b_view, activation=activation)
        assert c.dtype is output
        assert c.is_contiguous()
        assert judge(c, a, b, name, Epilogue(activation or "none"), exact=True).mismatches == 0, (m, n, k, activation)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", dtypes())
def test_output_types(lib: Library, generator: torch.Generator, name: str, out_dtype: torch.dtype) -> None:
    """Every output type is rounded once from the fp32 sum, into a new tensor and into `out` of any strides."""
    a, b = integers(70, 90, 100, name, out_dtype, generator=generator)
    a_view, b_view = (lay_out(x, torch_dtype(name), "n") for x in (a, b))
    assert judge(lib.matmul(a_view, b_view, out_dtype=out_dtype), a, b, name, Epilogue(), exact=True).mismatches == 0
    for out in (
        torch.empty(70, 90, device="cuda", dtype=out_dtype),
        torch.empty(90, 70, device="cuda", dtype=out_dtype).T,
        torch.empty(70, 300, device="cuda", dtype=out_dtype)[:, 5:275:3],
    ):
        assert lib.matmul(a_view, b_view, out=out) is out
        assert judge(out, a, b, name, Epilogue(), exact=True).mismatches == 0


def test_tutorial_checks(lib: Library) -> None:
    """The checks that Triton tutorial 03 makes of its own kernel, at its tolerances."""
    torch.manual_seed(0)
    a = torch.rand((512, 512), device="cuda", dtype=torch.float16) - 0.5
    b = torch.rand((512, 512), device="cuda", dtype=torch.float16) - 0.5
    assert torch.allclose(lib.matmul(a, b), torch.matmul(a, b), atol=1e-2, rtol=0)
    if "fp8e5" in dtypes():
        a8, b8 = a.to(torch.float8_e5m2), b.T.to(torch.float8_e5m2)
        want = torch.matmul(a8.half(), b8.half())
        assert torch.allclose(lib.matmul(a8, b8), want, atol=0.125, rtol=0)
    a = torch.randn((512, 896), device="cuda", dtype=torch.float16)
    b = torch.randn((896, 768), device="cuda", dtype=torch.float16)
    torch.testing.assert_close(lib.matmul(a, b), torch.matmul(a, b), rtol=1e-3, atol=1e-3)


def test_empty_and_broadcast_operands(lib: Library) -> None:
    """No rows or columns gives an empty result; K = 0 gives zeros; a stride of 0 is a stride like another."""
    assert lib.matmul(torch.empty(0, 8, device="cuda").half(), torch.empty(8, 5, device="cuda").half()).shape == (0, 5)
    assert lib.matmul(torch.empty(4, 8, device="cuda").half(), torch.empty(8, 0, device="cuda").half()).shape == (4, 0)
    zeros = lib.matmul(torch.empty(4, 0, device="cuda").half(), torch.empty(0, 6, device="cuda").half())
    assert (zeros == 0).all()
    row = torch.ones(1, 64, device="cuda", dtype=torch.float16).expand(32, 64)
    assert (lib.matmul(row, torch.ones(64, 16, device="cuda").half()) == 64).all()


@pytest.mark.parametrize("scales", ["", "rows", "tensor", "a", "b"])
@pytest.mark.parametrize("name", dtypes())
def test_scales_and_a_bias_that_cancels(lib: Library, generator: torch.Generator, name: str, scales: str) -> None:
    """Where a bias takes away the scaled sum, what is left is within the bounds, for few sums and for aligned ones."""
    m, n = 72, 96

    def factors(*shape: int) -> torch.Tensor:
        size = (1, 1) if scales == "tensor" else shape
        return torch.rand(size, generator=generator, device=generator.device) * 1.5 + 0.5

    for k, layout in itertools.product((1, 2, 16), ("nn", "nt")):
        a, b = random(m, k, name, generator=generator), random(k, n, name, generator=generator)
        scale_a = factors(m, 1) if scales in ("rows", "tensor", "a") else None
        scale_b = factors(1, n) if scales in ("rows", "tensor", "b") else None
        scaled = a @ b
        for factor in (scale_a, scale_b):
            scaled = scaled if factor is None else scaled * factor.double()
        bias = -scaled.float()
        a_view, b_view = (lay_out(x, torch_dtype(name), order) for x, order in ((a, layout[0]), (b, layout[1])))
        c = lib.matmul(a_view, b_view, bias=bias, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
        found = judge(c, a, b, name, Epilogue("none", 0.01, bias, scale_a, scale_b), exact=False)
        assert found.det <= 1, (k, layout, found)
        assert found.prob < 1, (k, layout, found)


@pytest.mark.parametrize("setting", ["set_float32_matmul_precision", "allow_tf32", "fp32_precision"])
def test_tf32_follows_torch(setting: str) -> None:
    """fp32 is exact in fp32 by default, and tf32 where the user allowed it, by whichever of torch's settings."""
    program = f"""
import torch, aotmm
lib = aotmm.load()
a, b = torch.full((64, 64), 1 + 2.0**-12, device="cuda"), torch.eye(64, device="cuda")
assert (lib.matmul(a, b) == a).all()
setting = {setting!r}
if setting == "set_float32_matmul_precision":
    torch.set_float32_matmul_precision("high")
else:
    setattr(torch.backends.cuda.matmul, setting, True if setting == "allow_tf32" else "tf32")
has_tf32 = any(kernel.dtype_a == "tf32" for kernel in lib.pack_for(0).manifest.kernels)
assert (lib.matmul(a, b) != a).all() == has_tf32
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_streams_and_reuse(lib: Library) -> None:
    """Products on a side stream, freed and reused at once, are those of their own inputs, 1,000 times."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ones = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    with torch.cuda.stream(stream):
        for i in range(1000):
            a = torch.full((64, 64), float(i % 7), device="cuda", dtype=torch.float16)
            c = lib.matmul(a, ones)
            wrong += (c != 64.0 * (i % 7)).sum()
            del a, c
    stream.synchronize()
    assert int(wrong) == 0


def test_graph_capture_of_a_cold_kernel(lib: Library) -> None:
    """The first use of a kernel may be inside a graph capture; replay computes with the new contents."""
    a = torch.ones(48, 40, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(40, 56, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(48, 56, device="cuda", dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lib.matmul(a, b, out=out, activation="leaky_relu")
    a.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 80).all()


def test_repeats_are_bitwise_equal(lib: Library) -> None:
    """The same problem gives the same bits, 100 times."""
    a, b = torch.randn(300, 500, device="cuda").half(), torch.randn(500, 200, device="cuda").half()
    first = lib.matmul(a, b)
    assert all(torch.equal(first, lib.matmul(a, b)) for _ in range(100))


def test_wrong_arguments(lib: Library) -> None:
    """What does not fit is refused with both shapes and dtypes; nothing is launched."""
    half = torch.zeros(4, 8, device="cuda", dtype=torch.float16)
    cases: list[tuple[type[Exception], str, tuple[Any, Any], dict[str, Any]]] = [
        (TypeError, r"CUDA and ROCm.*\(4, 8\) float16 on cpu", (half.cpu(), half.T), {}),
        (TypeError, "multiplies fp16 x fp32.*float16.*float32.*it has", (half, half.T.float()), {}),
        (TypeError, "no kernels for this dtype.*float64", (half.double(), half.T.double()), {}),
        (ValueError, r"inner sizes differ.*\(4, 8\).*\(4, 8\)", (half, half), {}),
        (ValueError, "at least 1 dimension", (half[0, 0], half.T), {}),
        (ValueError, "batch sizes differ", (half.repeat(2, 1, 1), half.T.repeat(3, 1, 1)), {}),
        (ValueError, "bias must broadcast to the result.*bias is \\(8,\\)", (half, half.T), {"bias": half[0]}),
        (TypeError, "bias must have the dtype", (half, half.T), {"bias": torch.zeros(4, device="cuda")}),
        (ValueError, "scale_a must be one number", (half, half.T), {"scale_a": torch.zeros(3, 1, device="cuda")}),
        (ValueError, "wrong shape", (half, half.T), {"out": torch.zeros(4, 5, device="cuda")}),
        (ValueError, "share memory", (half, half.T), {"out": torch.zeros(4, 1, device="cuda").expand(4, 4)}),
        (ValueError, "shares memory with an operand", (half[:, :4], half.T[:4]), {"out": half[:, :4]}),
        (TypeError, "out_dtype is for a new result", (half, half.T), {"out": half, "out_dtype": torch.float16}),
        (ValueError, "unknown activation 'swish'", (half, half.T), {"activation": "swish"}),
        (TypeError, "takes tensors", (half, [[1.0]]), {}),
        (NotImplementedError, "out= has no gradient", (half.clone().requires_grad_(), half.T), {"out": half[:, :4]}),
        (
            TypeError,
            "unknown out_dtype torch.float8_e5m2; known: torch.float16",
            (half, half.T),
            {"out_dtype": torch.float8_e5m2},
        ),
        (
            NoKernelError,
            "these types and epilogue.*it has: fp16 x fp16 -> ",
            (half, half.T),
            {"out_dtype": torch.int32},
        ),
        (TypeError, "bias must be a tensor, found list", (half, half.T), {"bias": [0.0] * 4}),
        (TypeError, "scale_a must be a tensor, found float", (half, half.T), {"scale_a": 2.0}),
        (
            NotImplementedError,
            "with scales has no gradient",
            (half, half.T),
            {"bias": half[:, 0].clone().requires_grad_(), "scale_a": torch.ones(1, device="cuda")},
        ),
    ]
    for error, text, operands, options in cases:
        with pytest.raises(error, match=text):
            lib.matmul(*operands, **options)
    square = torch.zeros(4, 8, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match="out shares memory with bias"):
        lib.matmul(half, half.T, bias=square[:, 1:5], out=square[:, :4])
    assert (lib.matmul(half, half.T, bias=square[:, :4], out=square[:, :4]) == 0).all(), "in place is fine"
    single = torch.zeros(8, 4, device="cuda")
    with pytest.raises(ValueError, match="out shares memory with a scale"):
        lib.matmul(half, half.T, scale_b=single[:1], out=single[:4])
    both = torch.zeros(4, 16, device="cuda", dtype=torch.float16)
    assert lib.matmul(half, half.T, out=both[:, :4]) is not None, "an out beside its operands is fine"


def test_other_device(lib: Library) -> None:
    """Tensors on a GPU that is not the current one are multiplied there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    a = torch.ones(64, 64, device="cuda:1", dtype=torch.float16)
    assert (lib.matmul(a, a) == 64).all()
    with pytest.raises(ValueError, match="different devices"):
        lib.matmul(a, a.to("cuda:0"))


def test_out_beside_its_operands(lib: Library) -> None:
    """Results interleaved with their operands are accepted and right: heads of the same tokens, halves of a batch."""
    tokens = torch.ones(10, 4, 16, device="cuda", dtype=torch.float16)
    heads = tokens.permute(1, 0, 2)
    lib.matmul(heads[:2], torch.ones(2, 16, 16, device="cuda").half(), out=heads[2:])
    assert (tokens[:, :2] == 1).all()
    assert (tokens[:, 2:] == 16).all()
    pairs = torch.ones(5, 2, 16, 16, device="cuda", dtype=torch.float16)
    lib.matmul(pairs[:, 0], pairs[:, 0].clone(), out=pairs[:, 1])
    assert (pairs[:, 0] == 1).all()
    assert (pairs[:, 1] == 16).all()


def test_out_is_a_change_that_autograd_sees(lib: Library) -> None:
    """Overwriting a tensor that a gradient needs is torch's error, not a wrong gradient."""
    x = torch.ones(4, 4, device="cuda", dtype=torch.float16, requires_grad=True)
    saved = torch.ones(4, 4, device="cuda", dtype=torch.float16)
    y = (x * saved).sum()
    lib.matmul(torch.ones(4, 8, device="cuda").half(), torch.ones(8, 4, device="cuda").half(), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()  # type: ignore[no-untyped-call]
