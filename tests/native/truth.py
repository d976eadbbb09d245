"""Products in the interpreters against `aotmm.timing.correctness`, in numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotmm.problem import FORMULAS
from aotmm.timing.correctness import (
    U_FP32,
    U_OUT,
    Epilogue,
    allowed,
    argument,
    block_scaled,
    block_scaled_error,
    sizes,
    sum_errors,
)
from tests.emulators import numerics
from tests.emulators.numerics import LARGEST

Array = np.ndarray[Any, np.dtype[Any]]

SMALLEST_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}


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
    got: Array, rounded: Array, want: Array, x: Array, bounds: tuple[Array, Array], out: str, epilogue: Epilogue
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
    ratios = [np.abs(got - want) / allowed(want, x, bound, epilogue, out) for bound in bounds]
    may_overflow = np.isfinite(x) & (np.abs(want) + bounds[0] + U_OUT[out] * np.abs(want) >= LARGEST[out])
    regular = np.isfinite(x) & np.isfinite(want) & np.isfinite(got)  # the limits, like sigmoid(inf), are exact
    right = regular | same | (may_overflow & np.isinf(got) & (np.sign(got) == np.sign(want)))
    ratios = [np.where(regular, ratio, np.where(right, 0.0, np.inf)) for ratio in ratios]
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratios[1])), got.shape))
    worst = f"{place}: got {got[place]!r}, expected {want[place]!r}"
    return Judgement(mismatches, float(ratios[0].max()), float(ratios[1].max()), bool(right.all()), worst)


def truth(
    a: Array,
    b: Array,
    epilogue: Epilogue,
    *,
    dtype: str,
    flushes: bool,
    block_scales: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Any]:
    """The epilogue's argument x, its value, and by how much x may be off (both bounds), for float64 operands.

    Args:
        a, b: (batch, M, K) and (batch, K, N).
        dtype: their type: tf32 operands are rounded first.
        flushes: subnormal fp16 and bf16 operands count as zero, as MI200's matrix units take them.
        block_scales: those of a (batch, M, blocks of K) and b (batch, blocks of K, N or blocks of N).
    """
    if dtype == "tf32":
        a, b = numerics.nearest_tf32(a), numerics.nearest_tf32(b)
    if block_scales is not None:
        a, b = block_scaled(a, b, *block_scales)
    k, product = a.shape[-1], a @ b
    spread, deviation = sizes(a, b)
    det, prob = sum_errors(k, spread, deviation, U_FP32)  # interpreters round to nearest
    if flushes and dtype in SMALLEST_NORMAL:
        small = [np.where(np.abs(m) < SMALLEST_NORMAL[dtype], np.abs(m), 0.0) for m in (a, b)]
        lost = small[0] @ np.abs(b) + np.abs(a) @ small[1] + k * 2.0**-126
        det, prob = det + lost, prob + lost
    if block_scales is not None:
        det, prob = (block_scaled_error(error, spread) for error in (det, prob))
    (x, det), (_, prob) = (argument(product, error, epilogue) for error in (det, prob))
    return x, activated(x, epilogue.activation, epilogue.slope), (det, prob)
