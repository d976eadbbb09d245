"""CPU time per asynchronous call on 16 x 16 fp16 tensors, ours and torch's in turn in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import aotmm

_CALLS = 400  # fewer than the launch queue holds, so that no call waits for the GPU
_ROUNDS = 40


def measure() -> dict[str, dict[str, float]]:
    """Microseconds per call of each way to multiply, least and median over the rounds; every way is checked first."""
    lib = aotmm.load()
    a, b = (torch.randn(16, 16, device="cuda").half() for _ in range(2))
    out = torch.empty(16, 16, device="cuda", dtype=torch.float16)
    op = torch.ops.aotmm.mm
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "lib.matmul(a, b)": lambda: lib.matmul(a, b),
        "lib.matmul(a, b, out=out)": lambda: lib.matmul(a, b, out=out),
        "torch.ops.aotmm.mm(a, b)": lambda: op(a, b),
        "torch.matmul(a, b)": lambda: torch.matmul(a, b),
        "torch.mm(a, b, out=out)": lambda: torch.mm(a, b, out=out),
    }
    want = a.double() @ b.double()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        error = float((way().double() - want).abs().max())
        if error > 2.0**-9 * float(want.abs().max()):
            raise RuntimeError(f"{name} is wrong by {error}")
    for _ in range(_ROUNDS):
        for name, way in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                way()
            times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: {"min us": min(row), "median us": statistics.median(row)} for name, row in times.items()}
