"""Streams, graphs, threads and devices, forward and backward, as users of torch have them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import aotmm.nn
from aotmm.runtime.library import Library
from tests.gpu.plans import chosen

LOOPS = 1000
# 32 threads of a fresh process that begin at once, on two shapes and with gradients; each checks what it gets.
RACE = """
import threading
import torch, aotmm
lib = aotmm.load()
ones = torch.ones(64, 64, device="cuda", dtype=torch.float16)
wide = torch.ones(4, 64, 96, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
gate, right = threading.Barrier(32), []

def work(number):
    x = wide.clone().requires_grad_() if number % 2 else ones
    gate.wait()
    if number % 2:
        y = lib.matmul(x, wide.mT, activation="relu")
        y.sum().backward()
        good = bool((y == 96).all()) and bool((x.grad == 64).all())
    else:
        good = bool((lib.matmul(x, ones) == 64).all())
    right.append(good)

threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert right == [True] * 32, right
"""


def test_gradients_on_a_side_stream(lib: Library) -> None:
    """Forward and backward on a side stream, their memory freed and reused at once, are right 1,000 times."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    ones = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(LOOPS):
            x = torch.full((64, 64), float(i % 7), device="cuda", dtype=torch.float16, requires_grad=True)
            w = torch.full((64, 64), float(i % 3), device="cuda", dtype=torch.float16, requires_grad=True)
            y = lib.matmul(x, w)
            y.backward(ones)  # type: ignore[no-untyped-call]
            assert x.grad is not None
            assert w.grad is not None
            wrong += (y != 64.0 * (i % 7) * (i % 3)).sum()
            wrong += (x.grad != 64.0 * (i % 3)).sum() + (w.grad != 64.0 * (i % 7)).sum()
            del x, w, y
    stream.synchronize()
    assert int(wrong) == 0


def test_memory_of_another_stream(lib: Library) -> None:
    """Operands made on one stream and used on another, with torch's own means to say so, 1,000 times."""
    maker, user = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    ones = torch.ones(96, 96, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for i in range(LOOPS):
        with torch.cuda.stream(maker):
            a = torch.full((96, 96), float(i % 5), device="cuda", dtype=torch.bfloat16)
        user.wait_stream(maker)
        with torch.cuda.stream(user):
            c = lib.matmul(a, ones)
            a.record_stream(user)
            del a
            wrong += (c != 96.0 * (i % 5)).sum()
            del c
    user.synchronize()
    assert int(wrong) == 0


@pytest.mark.parametrize("warm", [True, False])
def test_graph_of_a_training_step(lib: Library, *, warm: bool) -> None:
    """Forward and backward in one graph, captured warm or with kernels that were never used; each replay is right."""
    n, k = (136, 72) if warm else (152, 88)  # which nothing else here uses
    x = torch.ones(40, k, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(k, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ones = torch.ones(40, n, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = lib.matmul(x, w)
        return y, torch.autograd.grad(y, w, ones)[0]

    torch.ones(1, device="cuda", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call] # torch's threads
    if warm:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, gradient = step()
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (y == value * k).all()
        assert (gradient == value * 40).all()


def test_graph_with_a_workspace(lib: Library) -> None:
    """Products that need a workspace may be captured, with what torch allocates in between, and replayed often."""
    a, b = (torch.randn(shape, device="cuda").half() for shape in ((64, 16384), (16384, 64)))
    odd = torch.randn(513, 1025, device="cuda").half()
    assert max(chosen(lib, a, b)[1].workspace_bytes, chosen(lib, odd, odd.T)[1].workspace_bytes) > 0
    want = [lib.matmul(a, b), lib.matmul(odd, odd.T)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = lib.matmul(a, b)
        torch.full((1 << 20,), torch.nan, device="cuda")
        second = lib.matmul(odd, odd.T)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, want[0])
    assert torch.equal(second, want[1])


def test_threads_race_for_the_first_call() -> None:
    """32 threads whose first call is the process's first call all get right results."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_gradients_on_another_device(lib: Library) -> None:
    """Forward and backward of tensors on a GPU that is not the current one run there, current device unchanged."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    x = torch.ones(3, 64, 32, device="cuda:1", dtype=torch.float16, requires_grad=True)
    layer = aotmm.nn.Linear(32, 48, device="cuda:1", dtype=torch.float16)
    layer(x).sum().backward()
    lib.matmul(x, x.detach().mT).sum().backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 192).all()
    assert x.grad is not None
    assert (x.grad.device, torch.cuda.current_device()) == (torch.device("cuda:1"), 0)


def test_inference_mode(lib: Library) -> None:
    """Inference tensors are multiplied, into others too."""
    with torch.inference_mode():
        a = torch.ones(48, 48, device="cuda", dtype=torch.float16)
        c = lib.matmul(a, a, bias=a[0], activation="relu")
        assert c.is_inference()
        assert (lib.matmul(a, c, out=torch.empty_like(c)) == 48 * 49).all()


def test_layer(lib: Library) -> None:
    """`aotmm.nn.Linear` is torch's layer, up to rounding, and says where its tensors must be."""
    theirs = torch.nn.Linear(128, 96, device="cuda")
    ours = aotmm.nn.Linear(128, 96, device="cuda")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 7, 128, device="cuda")
    for module in (ours, theirs):
        module(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        assert ours(x).dtype is torch.bfloat16
    assert lib.packs
    with pytest.raises(TypeError, match="on cpu"):
        ours(x.cpu())
