"""The epilogue of kernels of every family: scales, bias, activation of the sums, in this order."""

from __future__ import annotations

from types import ModuleType

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aotmm.problem import ACTIVATIONS, FORMULAS, DType

_CODES = tuple(ACTIVATIONS)
RELU = tl.constexpr(_CODES.index("relu"))
LEAKY_RELU = tl.constexpr(_CODES.index("leaky_relu"))
GELU = tl.constexpr(_CODES.index("gelu"))
GELU_TANH = tl.constexpr(_CODES.index("gelu_tanh"))
SIGMOID = tl.constexpr(_CODES.index("sigmoid"))
SILU = tl.constexpr(_CODES.index("silu"))
TANH = tl.constexpr(_CODES.index("tanh"))
FIRST_FORMULA = tl.constexpr(len(ACTIVATIONS) - len(FORMULAS))
FORMULA_NAMES = tl.constexpr(tuple(FORMULAS))
formulas = ModuleType("formulas")  # Triton can call a module's functions by their names
vars(formulas).update({name: triton.jit(formula) for name, formula in FORMULAS.items()})
VECTOR, MATRIX = tl.constexpr(1), tl.constexpr(2)  # bias_rank


@triton.constexpr_function
def adds_matrix(epilogue: str) -> bool:
    """Return whether kernels with this epilogue add a matrix, too, and not a vector alone."""
    return epilogue not in ("none", "bias")


def epilogue_types(c: DType) -> dict[str, str]:
    """Return the arguments of an epilogue with results of type `c`, and their Triton types."""
    return {
        "bias_ptr": f"*{c.triton}",
        **dict.fromkeys(("bias_rank", "stride_bias_m", "stride_bias_n"), "i64"),
        **dict.fromkeys(("scale_a_ptr", "scale_b_ptr"), "*fp32"),
        **dict.fromkeys(("stride_scale_a", "stride_scale_b", "activation"), "i64"),
        "slope": "fp32",
    }


@triton.jit
def scale(acc, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b, rows, cols, M, N):
    """Return acc times one fp32 per row of A and one per column of B; with stride 0 one is for all.

    A pointer is null without a scale: a branch that costs nothing (docs/performance.md, "Epilogue").
    """
    if scale_a_ptr.to(tl.int64) != 0:
        acc *= tl.load(scale_a_ptr + rows.to(tl.int64) * stride_scale_a, mask=rows < M, other=0.0)[:, None]
    if scale_b_ptr.to(tl.int64) != 0:
        acc *= tl.load(scale_b_ptr + cols.to(tl.int64) * stride_scale_b, mask=cols < N, other=0.0)[None, :]
    return acc


@triton.jit
def add_bias(acc, bias_ptr, bias_rank, stride_bias_m, stride_bias_n, rows, cols, M, N):
    """Return acc plus a vector of N (bias_rank 1) or an (M, N) matrix (2) of the result's type."""
    if bias_rank == VECTOR:
        bias = tl.load(bias_ptr + cols.to(tl.int64) * stride_bias_n, mask=cols < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    elif bias_rank == MATRIX:
        offsets = rows.to(tl.int64)[:, None] * stride_bias_m + cols.to(tl.int64)[None, :] * stride_bias_n
        bias = tl.load(bias_ptr + offsets, mask=(rows[:, None] < M) & (cols[None, :] < N), other=0.0)
        acc += bias.to(tl.float32)
    return acc


@triton.jit
def linear(x, activation, slope):
    """Apply identity, relu or leaky_relu; NaN stays NaN."""
    if activation == RELU:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif activation == LEAKY_RELU:
        x = tl.where(x >= 0, x, slope * x)
    return x


@triton.jit
def logistic(x, z):
    """Return x / (1 + 2^z)."""
    return libdevice.fast_dividef(x, 1.0 + tl.exp2(z))


@triton.jit
def activate(x, activation, slope):
    """Apply any activation by its number in `problem.ACTIVATIONS`, in fp32.

    All but the linear ones are sigmoids, s(z) = 1 / (1 + 2^z), of odd functions of x: with y = -x log2(e), silu is
    x s(y), tanh 2 s(2 y) - 1, and gelu_tanh x s(2 sqrt(2 / pi) y (1 + 0.044715 x^2)), because (1 + tanh(x)) / 2 is
    s(2 y). gelu is x times the normal distribution, whose logit is fitted by a polynomial (weighted least squares in
    float64, weights moved until the error is even): the result is off by less than 2^-19 of |x|, where torch's own
    1 + erf(x) is off by 2^-24. Its last term takes z to where s is 0 or 1 for large |x|.

    Each has code of its own without a branch, so that the exponentials and divisions of some elements overlap with the
    polynomials of others.
    """
    if activation == GELU:
        square = x * x
        p = -4.111699544481201e-06 * square + 1.0587493755831e-04
        p = p * square + 2.534137035e-04
        p = p * square - 0.105005941
        x = logistic(x, x * (p * square - 2.30216535))
    elif activation == SILU:
        x = logistic(x, x * -1.4426950408889634)
    elif activation == GELU_TANH:
        x = logistic(x, x * (-2.302208198144325 - 0.1029432395800235 * (x * x)))
    elif activation == SIGMOID:
        x = logistic(1.0, x * -1.4426950408889634)
    elif activation == TANH:
        square = x * x
        # 2 s - 1 loses the digits of a small x
        series = x - x * square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
        x = tl.where(square < 1 / 64, series, logistic(2.0, x * -2.8853900817779268) - 1.0)
    elif activation < FIRST_FORMULA:
        x = linear(x, activation, slope)
    else:
        for number in tl.static_range(len(FORMULA_NAMES)):
            if activation == FIRST_FORMULA + number:
                x = tl.where(x == x, getattr(formulas, FORMULA_NAMES[number])(x), x)  # noqa: PLR0124 - NaN, which min and max drop
    return x


@triton.jit
def finish(
    acc,
    bias_ptr,
    bias_rank,
    stride_bias_m,
    stride_bias_n,
    scale_a_ptr,
    scale_b_ptr,
    stride_scale_a,
    stride_scale_b,
    activation,
    slope,
    rows,
    cols,
    M,
    N,
    EPILOGUE: tl.constexpr,
):
    """Return the result in fp32 for sums `acc` of rows `rows` and columns `cols`, some of them past the edge.

    Sums in int32, which come with epilogue "none" alone, have no scales either and are returned as they are.
    """
    if acc.dtype != tl.int32:
        acc = scale(acc, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b, rows, cols, M, N)
    if EPILOGUE != "none":
        acc = add_bias(acc, bias_ptr, bias_rank, stride_bias_m, stride_bias_n, rows, cols, M, N)
    if EPILOGUE == "bias_relu":
        acc = linear(acc, activation, slope)
    elif EPILOGUE == "full":
        acc = activate(acc, activation, slope)
    return acc
