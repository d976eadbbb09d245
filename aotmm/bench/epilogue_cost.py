"""The cost of an epilogue: `lib.matmul` with bias and activation, relative to the plain product."""

from __future__ import annotations

import statistics
from functools import partial

import torch

from aotmm.bench.protocol import GraphStopwatch, in_turn, repeated
from aotmm.bench.providers.own import activation_of, library
from aotmm.timing.check import truth
from aotmm.timing.correctness import Epilogue
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape

_SIZES = (2048, 4096, 8192)
# Dimensions of the bias, which is a residual if it is a matrix, and the activation.
_EPILOGUES: dict[str, tuple[int, str]] = {
    "none": (0, "none"),
    "bias": (1, "none"),
    "bias, relu": (1, "relu"),
    "bias, gelu": (1, "gelu"),
    "bias, silu": (1, "silu"),
    "residual": (2, "none"),
}


def measure() -> dict[str, dict[str, float]]:
    """Return times relative to the plain product, by size and epilogue: medians over rounds in turn. fp16, nt."""
    pool = Pool(torch.device("cuda"))
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    return {f"{size}^3": _relative(Case(Shape(size, size, size, "nt"), "fp16"), pool, cache_bytes) for size in _SIZES}


def _relative(case: Case, pool: Pool, cache_bytes: int) -> dict[str, float]:
    sets, stopwatch = pool.operands(case, cache_bytes), GraphStopwatch()
    matrix = torch.randn(case.shape.M, case.shape.N, device="cuda", dtype=sets[0].out.dtype)
    biases = (None, matrix[0], matrix)
    runs = {}
    for name, (dimensions, activation) in _EPILOGUES.items():
        epilogue = Epilogue(activation, bias=biases[dimensions])
        call = partial(_call, epilogue)
        call(sets[0])
        truth(sets[0].a, sets[0].b, sets[0].out.dtype, epilogue).confirm(sets[0].out, f"the product with {name}")
        runs[name] = repeated(stopwatch, call, sets)
    samples = in_turn(runs)
    return {
        name: statistics.median(x / y for x, y in zip(times, samples["none"], strict=True))
        for name, times in samples.items()
    }


def _call(epilogue: Epilogue, operands: Operands) -> object:
    options = {"bias": epilogue.bias, "activation": activation_of(epilogue)}
    return library().matmul(operands.a, operands.b, out=operands.out, **options)
