"""The direct call on a GPU: the op's bits by a shorter way, on the right stream and device, and nothing kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aotmm.runtime.library import Library
from aotmm.timing.operands import torch_dtype
from tests.gpu.judge import lay_out, random
from tests.gpu.test_matmul import dtypes

SIZES = [(1, 1, 1), (70, 90, 100), (128, 256, 512), (64, 64, 16384)]  # the last one in slices of K
RACE = """
import threading, torch, aotmm
lib = aotmm.load()
a, b = (torch.randint(-4, 5, (96, 96), device="cuda").half() for _ in range(2))
want, wrong, start = (a.double() @ b.double()).half(), [], threading.Barrier(32)
def work():
    start.wait()
    for _ in range(20):
        if not torch.equal(lib.matmul(a, b), want): wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, len(wrong)
"""


@pytest.fixture(autouse=True)
def connected(lib: Library) -> None:
    """The direct call is there."""
    if not lib.has_direct_call:
        pytest.skip("this Python does not load the direct call's module")


def taken(lib: Library, *arguments: object, out: object = None, bias: object = None) -> bool:
    """Whether the direct call multiplies these."""
    return isinstance(lib._direct_call(0, *arguments, out, bias, None, False), torch.Tensor)  # noqa: FBT003 - not batch_invariant


@pytest.mark.parametrize("name", sorted({*dtypes(), "int8"} - {"fp32"}))
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_the_ops_bits(lib: Library, generator: torch.Generator, name: str, layout: str) -> None:
    """Every type that it takes gives the op's bits: aligned or not, new or into `out`, with and without a workspace."""
    for m, n, k in SIZES:
        for offset in (0, 1):
            a = lay_out(random(m, k, name, generator=generator), torch_dtype(name), layout[0], offset=offset)
            b = lay_out(random(k, n, name, generator=generator), torch_dtype(name), layout[1], offset=offset)
            want = torch.ops.aotmm.mm(a, b)
            assert taken(lib, a, b)
            assert torch.equal(lib.matmul(a, b), want)
            out = torch.empty_like(want)
            version = out._version
            assert lib.matmul(a, b, out=out) is out
            assert out._version == version + 1
            assert torch.equal(out, want)


def test_bias_activation_and_batches(lib: Library, generator: torch.Generator) -> None:
    """They go the same way to the same bits."""
    a, b = (torch.randn(3, 64, 64, device="cuda", generator=generator).half() for _ in range(2))
    bias = torch.randn(64, device="cuda", generator=generator).half()
    assert taken(lib, a, b, bias=bias)
    want = torch.ops.aotmm.mm(a, b, bias, activation=3)
    assert torch.equal(lib.matmul(a, b, bias=bias, activation="gelu"), want)


def test_what_the_op_serves(lib: Library) -> None:
    """Autocast, modes that watch and gradients have their say."""
    a, b = (torch.randn(32, 32, device="cuda").half() for _ in range(2))
    assert taken(lib, a, b)
    with torch.no_grad():
        assert taken(lib, a, torch.nn.Parameter(b))
    assert not taken(lib, a, torch.nn.Parameter(b))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert not taken(lib, a, b)
    with torch.inference_mode():
        assert taken(lib, a, b)
        assert lib.matmul(a, b).is_inference()
    assert not taken(lib, a.float(), b.float())
    assert not taken(lib, a, b.cpu())
    seen = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        lib.matmul(a, b)
    assert any(name.startswith("aotmm") for name in seen)


def test_results_are_tensors_like_any(lib: Library) -> None:
    """They can be resized, recorded on a stream, and given a gradient."""
    a, b = (torch.randn(32, 32, device="cuda").half() for _ in range(2))
    c = lib.matmul(a, b)
    c.record_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    assert c.is_leaf
    c.requires_grad_()
    c.sum().backward()  # type: ignore[no-untyped-call]
    assert c.grad is not None
    assert lib.matmul(a, b).resize_(64, 64).shape == (64, 64)


def test_the_current_stream(lib: Library) -> None:
    """The product waits for what its stream computes, and memory that was freed is used again in order."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    b = torch.eye(64, device="cuda").half()
    total = torch.zeros(64, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for number in range(1000):
            if number % 100 == 0:
                torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            a = torch.full((64, 64), float(number % 7), device="cuda", dtype=torch.half)
            c = lib.matmul(a, b)
            del a
            total += c
            del c
    side.synchronize()
    assert bool((total == sum(number % 7 for number in range(1000))).all())


def test_another_device(lib: Library) -> None:
    """Tensors on a device that is not the current one are multiplied there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    a, b = (torch.randn(64, 64, device="cuda:1").half() for _ in range(2))
    assert torch.cuda.current_device() == 0
    assert taken(lib, a, b)
    c = lib.matmul(a, b)
    assert c.device == a.device
    assert torch.equal(c, torch.ops.aotmm.mm(a, b))


def test_graph(lib: Library) -> None:
    """A captured product computes anew at each replay, into the same memory."""
    a, b = (torch.randn(128, 128, device="cuda").half() for _ in range(2))
    lib.matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert taken(lib, a, b)
        c = lib.matmul(a, b)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(c, torch.ops.aotmm.mm(a, b))


def test_first_calls_race() -> None:
    """32 threads whose first call is everyone's first are all right."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_leaks(lib: Library) -> None:
    """100,000 calls leave the memory and the reference counts as they were."""
    a, b = (torch.randn(64, 64, device="cuda").half() for _ in range(2))
    out = lib.matmul(a, b)
    torch.cuda.synchronize()
    memory, counts = torch.cuda.memory_allocated(), [sys.getrefcount(x) for x in (a, b, out)]
    for number in range(100_000):
        lib.matmul(a, b) if number % 2 else lib.matmul(a, b, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == memory
    assert [sys.getrefcount(x) for x in (a, b, out)] == counts


def test_errors(lib: Library) -> None:
    """What does not fit is the same typed error, in every thread its own."""
    a, b = torch.zeros(4, 8, device="cuda").half(), torch.zeros(9, 4, device="cuda").half()
    found: list[str] = []

    def work() -> None:
        with pytest.raises(ValueError, match=r"the inner sizes differ.*a is \(4, 8\) float16 on cuda:0") as caught:
            lib.matmul(a, b)
        found.append(str(caught.value))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    with pytest.raises(ValueError, match="out shares memory with an operand"):
        lib.matmul(a[:, :4], a[:, :4], out=a[:, :4])
