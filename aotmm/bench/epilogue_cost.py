"""The cost of an epilogue: `lib.matmul` with bias and activation, relative to the plain product."""

from __future__ import annotations

import statistics
from functools import partial

import torch

from aotmm.bench.cases import Case, Operands, Pool
from aotmm.bench.protocol import GraphStopwatch, in_turn, launches_for
from aotmm.bench.providers.own import library
from aotmm.tune.shapes import Shape

_SIZES = (2048, 4096, 8192)
# Dimensions of the bias, which is a residual if it is a matrix, and the activation.
_EPILOGUES: dict[str, tuple[int, str | None]] = {
    "none": (0, None),
    "bias": (1, None),
    "bias, relu": (1, "relu"),
    "bias, gelu": (1, "gelu"),
    "bias, silu": (1, "silu"),
    "residual": (2, None),
}


def measure() -> dict[str, dict[str, float]]:
    """Return times relative to the plain product, by size and epilogue: medians over rounds in turn. fp16, nt."""
    pool = Pool(torch.device("cuda"))
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    return {f"{size}^3": _relative(Case(Shape(size, size, size, "nt"), "fp16"), pool, cache_bytes) for size in _SIZES}


def _relative(case: Case, pool: Pool, cache_bytes: int) -> dict[str, float]:
    sets, stopwatch = pool.operands(case, cache_bytes), GraphStopwatch()
    matrix = torch.randn(case.shape.M, case.shape.N, device="cuda", dtype=case.output)
    biases = (None, matrix[0], matrix)
    runs = {}
    for name, (dimensions, activation) in _EPILOGUES.items():
        call = partial(_call, biases[dimensions], activation)
        _check(call, sets[0], biases[dimensions], activation)
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
    """Raise RuntimeError if the product is wrong."""
    call(operands)
    want = operands.a.double() @ operands.b.double()
    want = want if bias is None else want + bias.double()
    want = want if activation is None else getattr(torch.nn.functional, activation)(want)
    size = want.abs() + operands.a.shape[1] ** 0.5  # sums of K products are rounded as numbers of about sqrt(K)
    worst = float(((operands.out.double() - want).abs() / size).max())
    if not worst < 2.0**-10:
        raise RuntimeError(f"the product with {activation} is wrong: relative error {worst}")
