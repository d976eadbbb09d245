"""The definition of a right product: its error is within the bounds of docs/numerics.md.

Arrays are float64, of torch or of numpy. The deterministic bound of a sum is that of block FMA analysis (Blanchard,
Higham, Lopez, Mary, Pranesh 2020). The probabilistic one, for zero-mean data, has six standard deviations of
independent roundings for the worst case. A right product is within both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aotmm.problem import BLOCK_SCALE_K

U_TENSOR_CORE = 2.0**-23  # tensor cores cut fp32 sums
# tf32: an instruction adds half as many products as one of 16-bit types, and long sums show that cuts add up.
TF32: dict[str, Any] = {"block": 8, "drift": 0.25}
U_FP32 = 2.0**-24  # fp32 rounds them, as it does in the epilogue
# Hopper's fp8 tensor cores keep about 14 bits between two promotions to fp32. Source: DeepSeek-V3 technical report.
U_FP8 = 2.0**-13
# Half a unit of the result's type, and half of its smallest number, which is all that int32, being exact, may be off.
U_OUT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24, "int32": 0.0}
ETA = {"fp16": 2.0**-25, "bf16": 2.0**-134, "fp32": 2.0**-150, "int32": 0.5}
_SLOPES = {"gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "sigmoid": 0.25}  # largest ones, which magnify errors
_DEVIATIONS = 6


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to the sums: factors and a bias that broadcast, None without them, and an activation.

    Attributes:
        activation: one of `problem.ACTIVATIONS`. slope: that of leaky_relu.
    """

    activation: str = "none"
    slope: float = 0.01
    bias: Any = None
    scale_a: Any = None
    scale_b: Any = None


def sizes(a: Any, b: Any) -> tuple[Any, Any]:
    """Return |A||B| and the square root of A^2 B^2, the sizes of sums in the two bounds."""
    return abs(a) @ abs(b), ((a * a) @ (b * b)) ** 0.5


def sum_errors(
    k: int, spread: Any, deviation: Any, u: float, *, block: int = 16, drift: float = 0.0
) -> tuple[Any, Any]:
    """Return the deterministic and the probabilistic bound of a sum of k products in any order, for its `sizes`.

    Args:
        u: relative error of the accumulator's rounding or cutting.
        block: products that are added to the accumulator at once.
        drift: part of each cut that all have in common, as they are towards zero.
    """
    deterministic = k * u / (1 - k * u) * spread if k * u < 1 else spread + float("inf")
    additions = max(1.0, k / block)
    return deterministic, _DEVIATIONS * (8 * additions**0.5 + drift * additions) * u * deviation


def block_scaled(a: Any, b: Any, scale_a: Any, scale_b: Any) -> tuple[Any, Any]:
    """Return the operands (..., M, K) and (..., K, N) times their block scales: they multiply to the exact product.

    Args:
        scale_a: (..., M, blocks of K). scale_b: (..., blocks of K, N or blocks of N).
    """
    blocks = [k // BLOCK_SCALE_K for k in range(a.shape[-1])]
    columns = list(range(b.shape[-1]))
    if scale_b.shape[-1] != b.shape[-1]:
        columns = [n // BLOCK_SCALE_K for n in columns]
    return a * scale_a[..., blocks], b * scale_b[..., blocks, :][..., columns]


def block_scaled_error(error: Any, spread: Any) -> Any:
    """Return the bound of sums with block scales, for that without the rounding of a block's two scales to one."""
    return error + U_FP32 * (spread + error)


def argument(product: Any, error: Any, epilogue: Epilogue) -> tuple[Any, Any]:
    """Return the activation's argument and its bound, for exact sums and theirs.

    Each scale and the bias round once more, to fp32.
    """
    scales = [scale for scale in (epilogue.scale_a, epilogue.scale_b) if scale is not None]
    for scale in scales:
        product, error = product * scale, error * abs(scale)
    if scales:  # a bound of many sums in fp8 is infinite, and 0 times that is none
        rounded = len(scales) * U_FP32 / (1 - len(scales) * U_FP32)
        error = error + rounded * (abs(product) + error)
    if epilogue.bias is None:
        return product, error
    x = product + epilogue.bias
    return x, error + U_FP32 * (abs(x) + error)


def allowed(want: Any, x: Any, error: Any, epilogue: Epilogue, output: str) -> Any:
    """Return the error allowed to a result of type `output`, whose exact value and argument are `want` and x.

    `error` is the bound of the argument.
    """
    slope = abs(epilogue.slope) if epilogue.activation == "leaky_relu" else 0.0
    inexact = max(_SLOPES.get(epilogue.activation, 1.0), slope) * error + _formula_error(x, want, epilogue.activation)
    return inexact + U_OUT[output] * (abs(want) + inexact) + ETA[output]


def _formula_error(x: Any, y: Any, activation: str) -> Any:
    """Return what evaluating the activation in fp32 may add, for the exact argument x and value y.

    The exponential of sigmoids has a relative error that grows with its argument, and overflows before y vanishes;
    gelu's argument is a fit as well; tanh is the difference of a sigmoid and a constant.
    """
    if activation in ("none", "relu"):
        return 0.0
    if activation in ("gelu", "gelu_tanh", "silu", "sigmoid"):
        exponent = 1.6 * (x + 0.0448 * x**3) if activation in ("gelu", "gelu_tanh") else x
        fit = 2.0**-19 * abs(x) if activation == "gelu" else 0.0
        return fit + 2.0**-22 * abs(y) * (4 + abs(exponent)) + 2.0**-120
    return (2.0**-19 if activation == "tanh" else 2.0**-22) * abs(y) + 2.0**-24 * abs(x)
