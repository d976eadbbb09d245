"""Family `short`: products of 16 bits whose K is one step: one program computes one tile of C, without a loop.

Sizes, strides and guards are those of family `tile` with aligned rows, and K is at most BLOCK_K. Such a product moves
more than it multiplies. What counts is that many small blocks share a multiprocessor, and that a block loads no more
of K than there may be (docs/experiments/hopper-kernels.md, "Kernels for the tails of random problems").
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from aotmm.kernels import Specialisation, Variant, tile
from aotmm.kernels.epilogue import finish
from aotmm.pack.schema import Guard


@triton.jit
def short(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_az,
    stride_bz, stride_cz, bias_ptr, bias_rank, stride_bias_z, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
    stride_scale_a, stride_scale_b, activation, slope, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) @ B (batch, K, N) and the epilogue, summed in fp32."""
    matrix, row, col = tile.tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = matrix.to(tl.int64)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + z * stride_az + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b_ptr + z * stride_bz + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0)
    b = tl.load(b_ptrs, mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0)
    acc = finish(
        tl.dot(a, b), bias_ptr + z * stride_bias_z, bias_rank, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
        stride_scale_a, stride_scale_b, activation, slope, rows, cols, M, N, EPILOGUE,
    )  # fmt: skip
    c_ptrs = c_ptr + z * stride_cz + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel of `variant`, with the guards of family `tile` for the same layout and aligned rows."""
    made = tile.specialise(variant)
    one_step = Guard("K", "below", variant.config.block_k + 1)
    names = short.arg_names
    return replace(
        made,
        function=short,
        types={name: type_ for name, type_ in made.types.items() if name in names},
        constants={name: value for name, value in made.constants.items() if name in names},
        guards=(*made.guards, one_step),
    )
