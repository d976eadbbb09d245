"""What an epilogue adds to a product: `lib.matmul` with bias and activation, relative to the plain product."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from aotmm.bench.cases import Case, Operands, Pool
from aotmm.bench.protocol import GraphStopwatch, in_turn, launches_for
from aotmm.bench.providers.own import library
from aotmm.tune.shapes import Shape

_SIZES = (2048, 4096, 8192)
_EPILOGUES: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"bias": True},
    "bias, relu": {"bias": True, "activation": "relu"},
    "bias, gelu": {"bias": True, "activation": "gelu"},
    "bias, silu": {"bias": True, "activation": "silu"},
    "residual": {"residual": True},
}


def measure() -> dict[str, dict[str, float]]:
    """Time relative to the plain product, by size and epilogue: medians over rounds in turn. fp16, layout nt."""
    pool = Pool(torch.device("cuda"))
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    return {f"{size}^3": _relative(Case(Shape(size, size, size, "nt"), "fp16"), pool, cache_bytes) for size in _SIZES}


def _relative(case: Case, pool: Pool, cache_bytes: int) -> dict[str, float]:
    sets, stopwatch = pool.operands(case, cache_bytes), GraphStopwatch()
    vector = torch.randn(case.shape.N, device="cuda", dtype=case.output)
    matrix = torch.randn(case.shape.M, case.shape.N, device="cuda", dtype=case.output)
    runs = {}
    for name, options in _EPILOGUES.items():
        bias = vector if "bias" in options else matrix if "residual" in options else None
        call = partial(_call, bias, options.get("activation"))
        _check(call, sets[0], bias, options.get("activation"))
        launches = launches_for(stopwatch.record(call, sets, len(sets))(), len(sets))
        runs[name] = stopwatch.record(call, sets, launches), launches
    samples = in_turn(runs)
    return {
        name: statistics.median(x / y for x, y in zip(times, samples["none"], strict=True))
        for name, times in samples.items()
    }


def _call(bias: torch.Tensor | None, activation: str | None, operands: Operands) -> object:
    return library().matmul(operands.a, operands.b, out=operands.out, bias=bias, activation=activation)


def _check(call: partial[object], operands: Operands, bias: torch.Tensor | None, activation: str | None) -> None:
    """Raises RuntimeError if the product is wrong."""
    call(operands)
    want = operands.a.double() @ operands.b.double()
    want = want if bias is None else want + bias.double()
    want = want if activation is None else getattr(torch.nn.functional, activation)(want)
    worst = float(((operands.out.double() - want).abs() / (want.abs() + 1)).max())
    if not worst < 2.0**-9:
        raise RuntimeError(f"the product with {activation} is wrong: relative error {worst}")
