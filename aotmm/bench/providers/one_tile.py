"""A batch-invariant product as published for Triton: persistent blocks, one tile for every size, sums in one order.

It is our own kernel with the structure of thinking-machines-lab/batch_invariant_ops (2025): tiles of 128 x 128 x 64 for
16-bit types, 3 stages, 8 warps, rows of tiles in groups of 8, one block on each multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_stages": 3, "num_warps": 8}


@triton.jit
def one_tile(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute C (M, N) = A (M, K) @ B (K, N); block i of BLOCKS takes tiles i, i + BLOCKS and so on."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, BLOCKS, flatten=True):
        first_m = tile // tiles_in_group * GROUP_M
        rows_in_group = min(tiles_m - first_m, GROUP_M)
        rows = (first_m + tile % tiles_in_group % rows_in_group) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile % tiles_in_group // rows_in_group * BLOCK_N + tl.arange(0, BLOCK_N)
        a_rows = tl.max_contiguous(tl.multiple_of(tl.where(rows < M, rows, 0), BLOCK_M), BLOCK_M)
        b_cols = tl.max_contiguous(tl.multiple_of(tl.where(cols < N, cols, 0), BLOCK_N), BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + a_rows[:, None] * stride_am + ks[None, :] * stride_ak, mask=ks[None, :] < K, other=0.0)
            b = tl.load(b_ptr + ks[:, None] * stride_bk + b_cols[None, :] * stride_bn, mask=ks[:, None] < K, other=0.0)
            acc = tl.dot(a, b, acc)
        c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out` (M, N) = a (M, K) @ b (K, N) of fp16 or bf16."""
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    blocks = torch.cuda.get_device_properties(a.device).multi_processor_count
    tiles = triton.cdiv(M, _TILE["BLOCK_M"]) * triton.cdiv(N, _TILE["BLOCK_N"])
    launch: Any = one_tile[(min(blocks, tiles),)]
    launch(a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride(), BLOCKS=blocks, **_TILE)
    return out
