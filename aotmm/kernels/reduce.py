"""Family `reduce`: add up the partial sums of the slices of K, apply the epilogue and write C.

It follows a kernel of role "partial" on the same stream. Slices are added in their order, so that a product has the
same bits every time. Layout "nn" writes rows of C that are contiguous and 16-byte aligned, "any" writes any C.

A launch has batch * ceil(M / BLOCK_M) * ceil(N / BLOCK_N) programs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aotmm.kernels import (
    NOT_FOR_PLAIN_KERNELS,
    VECTOR_BYTES,
    WORKSPACE_MULTIPLES,
    WORKSPACE_TYPES,
    Specialisation,
    Variant,
)
from aotmm.kernels.epilogue import epilogue_types, finish
from aotmm.problem import DTYPES


@triton.jit
def reduce(
    c_ptr,
    M,
    N,
    batch,
    stride_cz,
    stride_cm,
    stride_cn,
    workspace_ptr,
    workspace_stride_m,
    workspace_stride_z,
    split,
    bias_ptr,
    bias_rank,
    stride_bias_z,
    stride_bias_m,
    stride_bias_n,
    scale_a_ptr,
    scale_b_ptr,
    stride_scale_a,
    stride_scale_b,
    activation,
    slope,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute C (batch, M, N) = epilogue of the sum of `split` slices of partial sums, with rows of workspace_stride_m.

    Sums of int8 products have no epilogue.
    """
    if PDL:
        gdc_launch_dependents()
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    z = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // tiles_n * BLOCK_M
    col = tile % tiles_n * BLOCK_N
    if PDL:
        # The previous kernel writes the partial sums. The condition always holds. It is there because the assembler
        # would wait before it divides.
        if row + col + z >= 0:
            gdc_wait()
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    # Columns past the edge of C but in the workspace are read: a mask at N would make loads narrow.
    inside = (rows < M)[:, None] & (cols < workspace_stride_m)[None, :]
    slab = workspace_ptr + z * workspace_stride_z + rows.to(tl.int64)[:, None] * workspace_stride_m + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=workspace_ptr.dtype.element_ty)
    for _ in tl.range(0, split, num_stages=STAGES):
        acc += tl.load(slab, mask=inside, other=0)
        slab += batch * workspace_stride_z
    acc = finish(
        acc,
        bias_ptr + z * stride_bias_z,
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
        EPILOGUE,
    )
    c_ptrs = c_ptr + z * stride_cz + rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel that adds up sums to `variant.dtype_c`, for aligned rows of C ("nn") or any C ("any")."""
    config, target, c = variant.config, variant.target, DTYPES[variant.dtype_c]
    pdl = target.pdl
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "EPILOGUE": variant.epilogue,
        "PDL": pdl,
    }
    types = {
        "c_ptr": f"*{c.triton}",
        "M": "i32",
        "N": "i32",
        "batch": "i32",
        "stride_cz": "i64",
        "stride_cm": "i64",
        "stride_cn": "i64",
        **WORKSPACE_TYPES,
        "workspace_ptr": f"*{DTYPES[variant.dtype_a].triton}",
        "stride_bias_z": "i64",
        **epilogue_types(c),
    }
    multiples = dict(WORKSPACE_MULTIPLES)
    if variant.layout == "nn":
        del types["stride_cn"]
        constants["stride_cn"] = 1
        multiples["c_ptr"] = VECTOR_BYTES
        multiples |= dict.fromkeys(("stride_cz", "stride_cm", "N"), VECTOR_BYTES // c.bytes)
    return Specialisation(
        reduce,
        types,
        constants,
        multiples,
        vector_bytes=VECTOR_BYTES,
        pdl=pdl,
        unneeded=NOT_FOR_PLAIN_KERNELS,
    )
