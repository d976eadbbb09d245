"""`aotmm.override()` on a GPU: which kernels torch's products run, their values and gradients, and that it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import aotmm
from aotmm.runtime.library import Library
from aotmm.timing.check import OUTPUT_NAMES
from aotmm.timing.correctness import Epilogue
from tests.gpu.judge import judge

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of its profiler and its compiler
STEPS = 50
Call = Callable[[], torch.Tensor]


def ours(lib: Library, call: Call) -> int:
    """How many of our kernels `call` launches."""
    symbols = {kernel.symbol for kernel in lib.kernels}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.name in symbols for event in profile.events())


def near(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether got is a @ b (+ bias), within the bounds."""
    found = judge(got, a.double(), b.double(), OUTPUT_NAMES[a.dtype], Epilogue(bias=bias), exact=False)
    return max(found.det, found.prob) <= 1


@pytest.fixture
def ieee() -> Iterator[None]:
    """fp32 products in fp32, and the setting as it was afterwards."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products(lib: Library, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Every form of product runs our kernels and is within the bound; afterwards torch's run, with the same bits."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    a, b, bias = tensor(96, 200), tensor(200, 72), tensor(72)
    x, y, residual = tensor(3, 96, 200), tensor(3, 200, 72), tensor(96, 72)
    out, outs = tensor(96, 72), tensor(3, 96, 72)
    calls: dict[str, tuple[Call, torch.Tensor, torch.Tensor, torch.Tensor | None]] = {
        "mm": (lambda: torch.mm(a, b), a, b, None),
        "mm.out": (lambda: torch.mm(a, b, out=out), a, b, None),
        "matmul": (lambda: a @ b, a, b, None),
        "matmul of a batch": (lambda: x @ b, x, b, None),
        "bmm": (lambda: torch.bmm(x, y), x, y, None),
        "bmm.out": (lambda: torch.bmm(x, y, out=outs), x, y, None),
        "addmm": (lambda: torch.addmm(residual, a, b), a, b, residual),
        "addmm.out": (lambda: torch.addmm(bias, a, b, out=out), a, b, bias),
        "baddbmm": (lambda: torch.baddbmm(residual, x, y), x, y, residual),
        "linear": (lambda: functional.linear(x, b.T, bias), x, b, bias),
        "linear without bias": (lambda: functional.linear(x, b.T), x, b, None),
        "transposed": (lambda: torch.mm(b.T, a.T).T, a, b, None),
    }
    own = {name: call().clone() for name, (call, *_) in calls.items()}
    with aotmm.override():
        for name, (call, left, right, added) in calls.items():
            assert near(call(), left, right, added), name
            assert call().stride() == own[name].stride(), name
            assert ours(lib, call), name
    for name, (call, *_) in calls.items():
        assert not ours(lib, call), name
        assert torch.equal(call(), own[name]), name


def test_quantised_products(lib: Library, generator: torch.Generator) -> None:
    """_int_mm is exact; _scaled_mm is within the bound, with one scale and with one per row; both are ours."""
    i, j = (torch.randint(-128, 128, size, device="cuda", dtype=torch.int8) for size in ((96, 256), (256, 64)))
    a, b = (torch.randn(rows, 256, device="cuda", generator=generator).to(torch.float8_e4m3fn) for rows in (96, 64))
    one, half = (torch.tensor(number, device="cuda") for number in (1.0, 0.5))
    rows, cols = torch.rand(96, 1, device="cuda") + 0.5, torch.rand(1, 64, device="cuda") + 0.5
    bias = torch.randn(64, device="cuda", generator=generator).bfloat16()
    want = i.double() @ j.double()
    scales = {True: (one, half), False: (rows, cols)}

    def scaled(fast: bool, added: torch.Tensor | None) -> torch.Tensor:  # noqa: FBT001
        result = torch.bfloat16
        return torch._scaled_mm(a, b.t(), *scales[fast], bias=added, out_dtype=result, use_fast_accum=fast)

    with aotmm.override() as override:
        assert torch.equal(torch._int_mm(i, j).double(), want)
        assert ours(lib, lambda: torch._int_mm(i, j))
        assert ours(lib, lambda: torch._int_mm(i, j, out=torch.empty(96, 64, device="cuda", dtype=torch.int32)))
        found = [(scaled(fast, added), fast, added) for fast in (True, False) for added in (None, bias)]
        assert ours(lib, lambda: scaled(True, bias))  # noqa: FBT003
        assert repr(override) == "<aotmm.override: 8 products by aotmm, 0 by torch>"
    for result, fast, added in found:
        whole = scales[fast][0].expand(96, 1), scales[fast][1].expand(1, 64)
        epilogue = Epilogue(bias=added, scale_a=whole[0], scale_b=whole[1])
        judged = judge(result, a.double(), b.t().double(), "fp8e4", epilogue, exact=False, fast=fast)
        assert max(judged.det, judged.prob) <= 1


def test_everything_else_is_torchs(lib: Library) -> None:
    """Types and factors that are not ours give torch's bits and torch's errors."""
    a, b, c = (torch.randn(64, 64, device="cuda", dtype=torch.double) for _ in range(3))
    calls: list[Call] = [
        lambda: torch.mm(a, b),
        lambda: torch.bmm(a[None], b[None]),
        lambda: torch.mm(a.to(torch.complex64), b.to(torch.complex64)),
        lambda: torch.addmm(c, a, b, alpha=0.5),
        lambda: torch.addmm(c.half(), a.half(), b.half(), beta=0.5),
    ]
    own = [call() for call in calls]
    with aotmm.override():
        for call, want in zip(calls, own, strict=True):
            assert not ours(lib, call)
            assert torch.equal(call(), want)
        assert torch.equal(torch.mm(a.cpu(), b.cpu()), a.cpu() @ b.cpu())


def raised(call: Call) -> tuple[type[Exception], str]:
    """What a call that has to fail raises; of texts about memory what does not depend on what is free just then."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller compares it
        call()
    return caught.type, str(caught.value).partition(". GPU ")[0]


def test_errors_are_torchs(capfd: pytest.CaptureFixture[str]) -> None:
    """What torch raises comes out as without the override, type and text, in every thread; nothing is on stderr."""
    a, b, bias = (torch.zeros(shape, device="cuda").half() for shape in ((4, 8), (8, 6), (6,)))
    x, y = (torch.zeros(shape, device="cuda").half() for shape in ((3, 4, 8), (3, 8, 6)))
    calls: list[Call] = [
        lambda: torch.mm(a, a),
        lambda: torch.bmm(x, y[:2]),
        lambda: torch.bmm(x, x),
        lambda: torch.addmm(bias, a, a),
        lambda: torch.baddbmm(bias, x, y[:2]),
        lambda: torch.mm(a[0], b),
        lambda: torch.mm(a, b.float()),
        lambda: torch.addmm(bias, a, b.float()),
        lambda: torch.mm(a.int(), b.int()),
        lambda: torch.mm(a, b.cpu()),
        lambda: torch.mm(a.cpu(), b),
        lambda: torch.bmm(x, y.cpu()),
        lambda: torch.addmm(bias, a, b.cpu()),
        lambda: torch.mm(a, b, out=torch.empty(4, 6, device="cuda")),
        lambda: torch.mm(a, b, out=torch.empty(4, 6).half()),
        lambda: torch.bmm(x, y, out=torch.empty(3, 4, 6, device="cuda")),
        lambda: torch.mm(a.clone().requires_grad_(), a),
        lambda: torch.func.vmap(torch.mm)(x, x),
    ]
    own = [raised(call) for call in calls]
    with aotmm.override(), ThreadPoolExecutor(1) as thread:
        capfd.readouterr()  # torch before 2.15 says that kernels are overridden
        assert [raised(call) for call in calls] == own
        assert list(thread.map(raised, calls)) == own
        assert capfd.readouterr().err == ""


def test_no_memory_is_torchs_error() -> None:
    """A product that torch has no memory for is torch's error, whoever multiplies; afterwards there is memory."""
    tall, wide = (torch.zeros(1, 1, device="cuda").half().expand(shape) for shape in ((2**21, 1), (1, 2**21)))
    calls: list[Call] = [
        lambda: torch.mm(tall, wide),
        lambda: torch.mm(tall.double(), wide.double()),
        lambda: torch.bmm(tall[None], wide[None]),
        lambda: torch.addmm(wide, tall, wide),
        lambda: torch.baddbmm(wide, tall[None], wide[None]),
        lambda: torch.nn.functional.linear(tall, wide.T),
    ]
    own = [raised(call) for call in calls]
    assert {kind for kind, _ in own} == {torch.OutOfMemoryError}
    gc.collect()  # tracebacks
    before = torch.cuda.memory_allocated()
    with aotmm.override():
        assert [raised(call) for call in calls] == own
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(torch.mm(tall[:5], wide[:, :5]), torch.zeros(5, 5, device="cuda").half())


def test_tf32_is_torchs_setting(lib: Library, generator: torch.Generator) -> None:
    """fp32 is ours in fp32 where tensor cores multiply it, else torch's, and ours in tf32 where torch may."""
    a, b = (torch.randn(256, 256, device="cuda", generator=generator) for _ in range(2))
    split = torch.cuda.get_device_capability() == (9, 0)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        own = lib.matmul(a, b) if split else torch.mm(a, b)
        with aotmm.override():
            assert torch.equal(torch.mm(a, b), own)
            assert near(own, a, b)
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            got = torch.mm(a, b)
            assert torch.equal(got, lib.matmul(a, b))
            assert not near(got, a, b)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("ieee")
def test_gradients(lib: Library, generator: torch.Generator) -> None:
    """torch's own formulas run our kernels: first and second derivatives, autocast, vmap, graphs."""
    x = torch.randn(48, 64, device="cuda", generator=generator, requires_grad=True)
    w = torch.randn(64, 32, device="cuda", generator=generator, requires_grad=True)
    with aotmm.override():
        (first,) = torch.autograd.grad((x @ w).square().sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (x @ w).dtype is torch.bfloat16
            assert ours(lib, lambda: x.detach() @ w.detach())
        assert ours(lib, lambda: torch.func.vmap(torch.mm)(x.detach().half()[None], w.detach().half()[None]))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = x @ w
        graph.replay()
    exact_x, exact_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    (want,) = torch.autograd.grad((exact_x @ exact_w).square().sum(), exact_w, create_graph=True)
    (want_second,) = torch.autograd.grad(want.sum(), exact_x)
    for got, to in ((first, want), (second, want_second), (captured, exact_x @ exact_w)):
        assert float((got.double() - to).abs().max() / to.abs().max()) < 2.0**-18


def _curve(noise: float) -> torch.Tensor:
    """The losses of a small transformer over some steps; `noise` is added to its initial weights, relatively."""
    torch.manual_seed(20261120)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 128), layer, torch.nn.Linear(128, 64)).cuda()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + noise * torch.randn_like(weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = torch.randint(64, (16, 33), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def test_training(lib: Library) -> None:
    """An unmodified model trains on our kernels; its losses differ no more than rounding its weights makes them."""
    plain = _curve(0.0)
    noise = max(float((_curve(2.0**-9) - plain).abs().max()), float((_curve(-(2.0**-9)) - plain).abs().max()))
    with aotmm.override():
        assert ours(lib, lambda: _curve(0.0)) > STEPS
        losses = _curve(0.0)
    assert plain[-1] < plain[0]
    assert float((losses - plain).abs().max()) <= 3 * noise


def test_example() -> None:
    """The example runs."""
    example = Path(__file__).parents[2] / "examples" / "override.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("largest gradient ")


def test_compiled(lib: Library) -> None:
    """Inductor's call of torch's mm is ours while it lasts."""
    a, b = (torch.randn(64, 64, device="cuda").half() for _ in range(2))
    compiled = torch.compile(lambda x, y: torch.mm(x, y) + 1, fullgraph=True)
    compiled(a, b)
    with aotmm.override():
        assert ours(lib, lambda: compiled(a, b))
    assert not ours(lib, lambda: compiled(a, b))
