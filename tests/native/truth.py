"""What a right product is, in numpy: the formulas of tests/gpu/judge.py on storage arrays of the interpreters' types.

bound = inexact + u_out (|want| + inexact) + eta, where inexact = lipschitz * error of the argument + error of the
activation. The argument's is that of the scaled sum and one rounding to fp32 for each scale and for the bias
(docs/numerics.md). The sum's is the deterministic bound of block FMA analysis (Blanchard, Higham et al. 2020) or, for
zero-mean data, six standard deviations of independent roundings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotmm.problem import FORMULAS

Array = np.ndarray[Any, np.dtype[Any]]

U_ACC = 2.0**-24  # the interpreters round to nearest
U_FP32 = 2.0**-24  # of the epilogue
U_OUT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
ETA = {"fp16": 2.0**-25, "bf16": 2.0**-134, "fp32": 2.0**-150}
LARGEST = {"fp16": 65504.0, "bf16": float.fromhex("0x1.fep127"), "fp32": float.fromhex("0x1.fffffep127")}
SMALLEST_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}
TF32_INPUT = 2.0**-9 + 2.0**-20  # operands of more than 10 bits are cut
# Largest slope of each activation: by how much it can magnify an error of the sum.
LIPSCHITZ = {"gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "sigmoid": 0.25}


def activated(x: Array, activation: str, slope: float) -> Array:
    """The activation of float64 values; leaky_relu in the kernels' fp32 arithmetic."""
    sigmoid = 1 / (1 + np.exp(-x))
    if activation == "gelu":
        return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x * math.sqrt(0.5))))
    if activation == "gelu_tanh":  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), without its cancellation
        return np.asarray(x / (1 + np.exp(-1.5957691216057308 * (x + 0.044715 * x**3))))
    if activation == "leaky_relu":
        return np.where(x >= 0, x, (x.astype(np.float32) * np.float32(slope)).astype(np.float64))
    found = {"none": x, "relu": np.where(x < 0, 0.0, x), "silu": x * sigmoid, "sigmoid": sigmoid, "tanh": np.tanh(x)}
    return found[activation] if activation in found else np.vectorize(FORMULAS[activation], otypes=[float])(x)


def epilogue_error(x: Array, y: Array, activation: str) -> Array:
    """What evaluating the epilogue in fp32 may add, for the exact argument x and value y: a few units of 2^-23.

    The exponential of sigmoids has a relative error that grows with its argument, and overflows before y vanishes;
    gelu's argument is a fit as well; tanh is the difference of a sigmoid and a constant.
    """
    if activation in ("gelu", "gelu_tanh", "silu", "sigmoid"):
        argument = 1.6 * (x + 0.0448 * x**3) if activation in ("gelu", "gelu_tanh") else x
        fit = 2.0**-19 * np.abs(x) if activation == "gelu" else 0.0
        return np.asarray(fit + 2.0**-22 * np.abs(y) * (4 + np.abs(argument)) + 2.0**-120)
    return np.asarray((2.0**-19 if activation == "tanh" else 2.0**-22) * np.abs(y) + 2.0**-24 * np.abs(x))


@dataclass(frozen=True)
class Epilogue:
    """What is done to the sums: float64 factors and a bias that broadcast, an activation."""

    activation: str = "none"
    slope: float = 0.01
    bias: Array | None = None
    scale_a: Array | None = None
    scale_b: Array | None = None


@dataclass(frozen=True)
class Judgement:
    """How far a result is from the truth.

    Attributes:
        mismatches: elements that are not the correctly rounded value, NaN being equal to NaN.
        det, prob: largest error over the deterministic and the probabilistic bound; inf where `patterns` is False.
        patterns: NaN and infinities are where they ought to be.
        worst: the element farthest off, for people.
    """

    mismatches: int
    det: float
    prob: float
    patterns: bool
    worst: str


def judge(
    got: Array, rounded: Array, want: Array, x: Array, bounds: tuple[Array, Array], out: str, activation: str
) -> Judgement:
    """Compares values `got` with `want`, the epilogue of x; all in float64.

    Args:
        rounded: `want` as the output type holds it.
        bounds: how far the argument x may be off, by both bounds.
    """
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    mismatches = int((~same).sum())
    if out == "int32" or got.size == 0:
        ratio = float("inf") if mismatches else 0.0
        return Judgement(mismatches, ratio, ratio, patterns=True, worst="")
    ratios = []
    error = np.abs(got - want)
    for inner in bounds:
        inexact = inner + epilogue_error(x, want, activation)
        ratios.append(error / (inexact + U_OUT[out] * (np.abs(want) + inexact) + ETA[out]))
    may_overflow = np.isfinite(x) & (np.abs(want) + bounds[0] + U_OUT[out] * np.abs(want) >= LARGEST[out])
    regular = np.isfinite(x) & np.isfinite(want) & np.isfinite(got)  # the limits, like sigmoid(inf), are exact
    right = regular | same | (may_overflow & np.isinf(got) & (np.sign(got) == np.sign(want)))
    ratios = [np.where(regular, ratio, np.where(right, 0.0, np.inf)) for ratio in ratios]
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratios[1])), got.shape))
    worst = f"{place}: got {got[place]!r}, expected {want[place]!r}"
    return Judgement(mismatches, float(ratios[0].max()), float(ratios[1].max()), bool(right.all()), worst)


def truth(a: Array, b: Array, epilogue: Epilogue, *, dtype: str, flushes: bool) -> tuple[Array, Array, Any]:
    """The epilogue's argument x, its value, and by how much x may be off (both bounds), for float64 operands.

    Args:
        a, b: (batch, M, K) and (batch, K, N).
        dtype: their type: tf32 units cut it.
        flushes: subnormal fp16 and bf16 operands count as zero, as MI200's matrix units take them.
    """
    k = a.shape[-1]
    x, spread, square = a @ b, np.abs(a) @ np.abs(b), np.sqrt((a * a) @ (b * b))
    det = k * U_ACC / (1 - k * U_ACC) * spread
    prob = 8 * U_ACC * max(1.0, k / 16) ** 0.5 * 6 * square
    if dtype == "tf32":
        one_sided = 2.0**-9 * np.abs(x)
        det, prob = det + TF32_INPUT * spread + one_sided, prob + TF32_INPUT * square + one_sided
    if flushes and dtype in SMALLEST_NORMAL:
        small = [np.where(np.abs(m) < SMALLEST_NORMAL[dtype], np.abs(m), 0.0) for m in (a, b)]
        lost = small[0] @ np.abs(b) + np.abs(a) @ small[1] + k * 2.0**-126
        det, prob = det + lost, prob + lost
    scales = [factor for factor in (epilogue.scale_a, epilogue.scale_b) if factor is not None]
    for factor in scales:
        x, det, prob = x * factor, det * np.abs(factor), prob * np.abs(factor)
    rounded = len(scales) * U_FP32 / (1 - len(scales) * U_FP32)
    det, prob = (inner + rounded * (np.abs(x) + inner) for inner in (det, prob))
    if epilogue.bias is not None:
        x = x + epilogue.bias
        det, prob = (inner + U_FP32 * (np.abs(x) + inner) for inner in (det, prob))
    steepest = max(LIPSCHITZ.get(epilogue.activation, 1.0), epilogue.slope * (epilogue.activation == "leaky_relu"))
    return x, activated(x, epilogue.activation, epilogue.slope), (steepest * det, steepest * prob)
