"""CPU time per asynchronous call on 16 x 16 tensors (32 x 16 of one byte), ours and torch's in turn in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    a, b = (torch.randint(-3, 4, (16, 16), device="cuda").half() for _ in range(2))  # every type here holds them
    out, weight = torch.empty_like(a), b.clone().requires_grad_()
    op = torch.ops.aotmm.mm

    @torch.compile(fullgraph=True)
    def ours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return lib.matmul(x, y)

    @torch.compile(fullgraph=True)
    def theirs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, y)

    matmul, mm, mm_out = "torch.matmul(a, b)", "torch.mm(a, b)", "torch.mm(a, b, out=out)"
    mm_compiled, mm_grad = "torch.mm, compiled", "torch.mm, b requires a gradient"
    methods = {
        matmul: Method(lambda: torch.matmul(a, b)),
        mm: Method(lambda: torch.mm(a, b)),
        mm_out: Method(lambda: torch.mm(a, b, out=out)),
        mm_compiled: Method(lambda: theirs(a, b)),
        mm_grad: Method(lambda: torch.mm(a, weight)),
        "lib.matmul(a, b)": Method(lambda: lib.matmul(a, b), matmul, 0.55),
        "lib.matmul(a, b, out=out)": Method(lambda: lib.matmul(a, b, out=out), mm_out, 0.40),
        "torch.ops.aotmm.mm(a, b)": Method(lambda: op(a, b), matmul, 0.70),
        "lib.matmul, compiled": Method(lambda: ours(a, b), mm_compiled, 0.90),
        "lib.matmul, b requires a gradient": Method(lambda: lib.matmul(a, weight), mm_grad, 1.0),
    }
    for name, (call, at_most) in _overridden(a, b).items():
        for given, suffix in ((b, ""), (weight, ", gradient")):
            methods[name + suffix] = Method(partial(call, given))
            methods[f"{name}{suffix}, override"] = Method(partial(call, given), name + suffix, at_most, aotmm.override)
    for name, product in _of_bytes(a, b).items():
        methods[name] = Method(product)
        methods[f"{name}, override"] = Method(product, name, 1.0, aotmm.override)
    right = truth(a, b, a.dtype)
    for name, method in methods.items():
        with method.context():
            right.confirm(method.call().detach().view(-1, *a.shape)[0].to(a.dtype), name)
    return methods


def _overridden(a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]]:
    """Return products of `a` and a weight by name, and the part of torch's time that they may take in the override.

    The weight is b, or a copy of it that requires a gradient.
    """
    linear = torch.nn.functional.linear
    batch, bias = a.expand(2, -1, -1).contiguous(), torch.zeros(a.shape[1], device="cuda", dtype=a.dtype)
    out = torch.empty_like(a)
    layers = {}
    for recorded in (False, True):
        layers[recorded] = torch.nn.Linear(len(b), len(b)).to(b).requires_grad_(recorded)
        layers[recorded].weight.data = b.T
        torch.nn.init.zeros_(layers[recorded].bias)
    return {
        "torch.mm": (lambda weight: torch.mm(a, weight), 0.85),
        "torch.bmm": (lambda weight: torch.bmm(batch, weight.expand(2, -1, -1)), 0.85),
        "linear": (lambda weight: linear(a, weight.T), 0.85),
        "matmul of 3 dimensions": (lambda weight: torch.matmul(batch, weight), 0.85),
        "torch.addmm": (lambda weight: torch.addmm(bias, a, weight), 1.0),
        "torch.addmm(out=)": (lambda weight: torch.addmm(bias, a, weight.detach(), out=out), 1.0),
        "torch.baddbmm": (lambda weight: torch.baddbmm(bias, batch, weight.expand(2, -1, -1)), 1.0),
        "linear with bias": (lambda weight: linear(a, weight.T, bias), 1.0),
        "nn.Linear": (lambda weight: layers[weight.requires_grad](a), 1.0),
    }


def _of_bytes(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return products of int8 and fp8 that hold a, twice below itself, and b in columns, as torch asks for."""
    int8, fp8 = (
        (torch.cat((a, a)).to(dtype), b.T.to(dtype).contiguous().T) for dtype in (torch.int8, torch.float8_e4m3fn)
    )
    one = torch.ones((), device="cuda")
    return {
        "torch._int_mm": lambda: torch._int_mm(*int8),  # noqa: SLF001 - no public name
        "torch._scaled_mm": lambda: torch._scaled_mm(*fp8, one, one, out_dtype=a.dtype),  # noqa: SLF001 - likewise
    }
