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
from aotmm.timing.check import truth

_CALLS = 400  # fewer than the launch queue holds, so that no call waits for the GPU
_ROUNDS = 40


class Method(NamedTuple):
    """A call in its context; if it is ours, it may take `at_most` that part of the time of `against`."""

    call: Callable[[], torch.Tensor]
    against: str = ""
    at_most: float | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def measure() -> dict[str, dict[str, float]]:
    """Return by method: least and median microseconds over the rounds, the ratio of the least ones, and its limit.

    Raises:
        RuntimeError: a method computes a wrong product; nothing was timed.
    """
    methods = _methods()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(_ROUNDS):
        for name, (call, _, _, context) in methods.items():
            with context():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    found = {name: {"min us": min(row), "median us": statistics.median(row)} for name, row in times.items()}
    for name, method in methods.items():
        if method.against:
            found[name][RATIO] = min(times[name]) / min(times[method.against])
        if method.at_most is not None:
            found[name][LIMIT] = method.at_most
    return found


def _methods() -> dict[str, Method]:
    """Return every method, after one right product of each."""
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
    methods = {
        matmul: Method(lambda: torch.matmul(a, b)),
        mm: Method(lambda: torch.mm(a, b)),
        mm_out: Method(lambda: torch.mm(a, b, out=out)),
        mm_compiled: Method(lambda: theirs(a, b)),
        mm_grad: Method(lambda: torch.mm(a, weight)),
        linear_bias: Method(lambda: linear(a, b.T, bias)),
        "lib.matmul(a, b)": Method(lambda: lib.matmul(a, b), matmul, 0.55),
        "lib.matmul(a, b, out=out)": Method(lambda: lib.matmul(a, b, out=out), mm_out, 0.40),
        "torch.ops.aotmm.mm(a, b)": Method(lambda: op(a, b), matmul, 0.70),
        "lib.matmul, compiled": Method(lambda: ours(a, b), mm_compiled, 0.90),
        "lib.matmul, b requires a gradient": Method(lambda: lib.matmul(a, weight), mm_grad, 1.0),
        f"{mm_grad}, override": Method(lambda: torch.mm(a, weight), mm_grad, 1.0, aotmm.override),
        f"{mm}, override": Method(lambda: torch.mm(a, b), mm, context=aotmm.override),
        f"{linear_bias}, override": Method(lambda: linear(a, b.T, bias), linear_bias, context=aotmm.override),
    }
    right = truth(a, b, a.dtype)
    for name, method in methods.items():
        with method.context():
            right.confirm(method.call().detach(), name)
    return methods
