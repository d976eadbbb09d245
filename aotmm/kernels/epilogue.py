"""What kernels of every family do to their sums before they store them: scales, bias, activation, in this order."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aotmm.problem import ACTIVATIONS

_CODES = tuple(ACTIVATIONS)
RELU = tl.constexpr(_CODES.index("relu"))
LEAKY_RELU = tl.constexpr(_CODES.index("leaky_relu"))
GELU = tl.constexpr(_CODES.index("gelu"))
GELU_TANH = tl.constexpr(_CODES.index("gelu_tanh"))
SIGMOID = tl.constexpr(_CODES.index("sigmoid"))
SILU = tl.constexpr(_CODES.index("silu"))
TANH = tl.constexpr(_CODES.index("tanh"))
INFINITY = tl.constexpr(float("inf"))
VECTOR, MATRIX = tl.constexpr(1), tl.constexpr(2)  # bias_rank


@triton.jit
def scale(acc, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b, rows, cols, M, N):
    """acc times one fp32 per row of A and one per column of B; strides of 0 take the same for all.

    A pointer is null where there is no scale: a branch that costs nothing (docs/performance.md, "Epilogue").
    """
    if scale_a_ptr.to(tl.int64) != 0:
        acc *= tl.load(scale_a_ptr + rows.to(tl.int64) * stride_scale_a, mask=rows < M, other=0.0)[:, None]
    if scale_b_ptr.to(tl.int64) != 0:
        acc *= tl.load(scale_b_ptr + cols.to(tl.int64) * stride_scale_b, mask=cols < N, other=0.0)[None, :]
    return acc


@triton.jit
def add_bias(acc, bias_ptr, bias_rank, stride_bias_m, stride_bias_n, rows, cols, M, N):
    """acc plus a vector of N (bias_rank 1) or an (M, N) matrix (2) of the result's type."""
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
    """Identity, relu or leaky_relu without a branch: slope 1 and a floor of -inf change nothing. NaN stays NaN."""
    slope = tl.where(activation == LEAKY_RELU, slope, 1.0)
    floor = tl.where(activation == RELU, 0.0, -INFINITY)
    return tl.maximum(tl.where(x >= 0, x, slope * x), floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, activation, slope):
    """Any activation by its number in `problem.ACTIVATIONS`, in fp32, with torch's formulas."""
    if activation == GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == TANH:
        x = libdevice.tanh(x)
    elif (activation == GELU_TANH) | (activation == SILU) | (activation == SIGMOID):
        # gelu_tanh is x * sigmoid(2 y), because (1 + tanh(y)) / 2 = sigmoid(2 y), and keeps its relative precision
        y = tl.where(activation == GELU_TANH, 1.5957691216057308 * (x + 0.044715 * x * x * x), x)
        sigmoid = 1.0 / (1.0 + tl.exp(-y))
        x = tl.where(activation == SIGMOID, sigmoid, x * sigmoid)
    else:
        x = linear(x, activation, slope)
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
    """The result in fp32 for sums `acc` of rows `rows` and columns `cols`, some of which may be past the edge."""
    acc = scale(acc, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b, rows, cols, M, N)
    if EPILOGUE != "none":
        acc = add_bias(acc, bias_ptr, bias_rank, stride_bias_m, stride_bias_n, rows, cols, M, N)
    if EPILOGUE == "linear":
        acc = linear(acc, activation, slope)
    elif EPILOGUE == "smooth":
        acc = activate(acc, activation, slope)
    return acc
