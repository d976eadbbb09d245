"""CPU time per asynchronous call on 16 x 16 fp16 tensors, ours and torch's in turn in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

import aotmm
from aotmm.bench.summary import LIMIT, RATIO

_CALLS = 400  # fewer than the launch queue holds, so that no call waits for the GPU
_ROUNDS = 40


class Way(NamedTuple):
    """A way to multiply, in its context; if it is ours, it may take `at_most` that part of the time of `against`."""

    call: Callable[[], torch.Tensor]
    against: str = ""
    at_most: float | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def measure() -> dict[str, dict[str, float]]:
    """Return by way: least and median microseconds over the rounds, the ratio of the least ones, and its limit.

    Raises:
        RuntimeError: a way computes a wrong product; nothing was timed.
    """
    ways = _ways()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, (call, _, _, context) in ways.items():
            with context():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    found = {name: {"min us": min(row), "median us": statistics.median(row)} for name, row in times.items()}
    for name, way in ways.items():
        if way.against:
            found[name][RATIO] = min(times[name]) / min(times[way.against])
        if way.at_most is not None:
            found[name][LIMIT] = way.at_most
    return found


def _ways() -> dict[str, Way]:
    """Return every way, after one right product of each."""
    lib = aotmm.load()
    a, b = (torch.randn(16, 16, device="cuda").half() for _ in range(2))
    out, weight = torch.empty_like(a), b.clone().requires_grad_()
    bias = torch.zeros(16, device="cuda").half()
    op, linear = torch.ops.aotmm.mm, torch.nn.functional.linear

    @torch.compile(fullgraph=True)
    def ours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return lib.matmul(x, y)

    @torch.compile(fullgraph=True)
    def theirs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, y)

    matmul, mm, mm_out = "torch.matmul(a, b)", "torch.mm(a, b)", "torch.mm(a, b, out=out)"
    mm_compiled, mm_grad = "torch.mm, compiled", "torch.mm, b requires a gradient"
    linear_bias = "linear with bias"
    ways = {
        matmul: Way(lambda: torch.matmul(a, b)),
        mm: Way(lambda: torch.mm(a, b)),
        mm_out: Way(lambda: torch.mm(a, b, out=out)),
        mm_compiled: Way(lambda: theirs(a, b)),
        mm_grad: Way(lambda: torch.mm(a, weight)),
        linear_bias: Way(lambda: linear(a, b.T, bias)),
        "lib.matmul(a, b)": Way(lambda: lib.matmul(a, b), matmul, 0.55),
        "lib.matmul(a, b, out=out)": Way(lambda: lib.matmul(a, b, out=out), mm_out, 0.40),
        "torch.ops.aotmm.mm(a, b)": Way(lambda: op(a, b), matmul, 0.70),
        "lib.matmul, compiled": Way(lambda: ours(a, b), mm_compiled, 0.90),
        "lib.matmul, b requires a gradient": Way(lambda: lib.matmul(a, weight), mm_grad, 1.0),
        f"{mm_grad}, override": Way(lambda: torch.mm(a, weight), mm_grad, 1.0, aotmm.override),
        f"{mm}, override": Way(lambda: torch.mm(a, b), mm, context=aotmm.override),
        f"{linear_bias}, override": Way(lambda: linear(a, b.T, bias), linear_bias, context=aotmm.override),
    }
    want = a.double() @ b.double()
    for name, way in ways.items():
        with way.context():
            error = float((way.call().detach().double() - want).abs().max())
        if not error <= 2.0**-9 * float(want.abs().max()):
            raise RuntimeError(f"{name} is wrong by {error}")
    return ways
