"""Family `tile`: one program computes one BLOCK_M x BLOCK_N tile of C with plain pointer arithmetic.

Any strides, any sizes, any batch, on every target. Programs are numbered in groups of GROUP_M rows of tiles, so that
programs that run together share rows of A and columns of B in the L2 cache.
Source of the idea: Triton tutorial 03, "Matrix Multiplication".
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from aotmm.kernel import Promise
from aotmm.kernels import Specialisation, Variant
from aotmm.kernels.epilogue import finish
from aotmm.problem import DTYPES, unit_strides

SIZES = ("M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
BATCH_STRIDES = ("stride_az", "stride_bz", "stride_cz")
VECTOR_BYTES = 16
# Hopper's fp8 tensor cores keep about 14 bits; sums are moved to fp32 after this many products, as cuBLAS does
# without fast accumulation. Source: DeepSeek-V3 technical report, section 3.3.2.
IMPRECISE_K = 128


@triton.jit
def tile(
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
    stride_az,
    stride_bz,
    stride_cz,
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
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
):
    """C (batch, M, N) = A (batch, M, K) @ B (batch, K, N) and the epilogue, summed in fp32 (int8: in int32)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    z = tl.program_id(0) // (tiles_m * tiles_n)
    pid = tl.program_id(0) % (tiles_m * tiles_n)
    tiles_per_group = GROUP_M * tiles_n
    first_m = pid // tiles_per_group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % tiles_per_group % group_rows
    tile_n = pid % tiles_per_group // group_rows

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    z = z.to(tl.int64)
    # Rows and columns past the edge wrap around: they read valid memory and are not stored.
    a_ptrs = a_ptr + z * stride_az + (rows % M)[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b_ptr + z * stride_bz + ks[:, None] * stride_bk + (cols % N)[None, :] * stride_bn
    ACC: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=ks[None, :] < K - k, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE, out_dtype=ACC)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk

    if a_ptr.dtype.element_ty != tl.int8:
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
    c_ptrs = c_ptr + z * stride_cz + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def specialise(variant: Variant) -> Specialisation:
    """The tile kernel of `variant`.

    Layout "any" promises nothing and computes every offset in 64 bits. The others promise the unit strides of their
    layout and 32-bit offsets within one matrix, which makes loads coalesced; aligned ones also 16-byte rows, which
    makes the compiler issue 16-byte loads and stores.
    """
    config, a, b, c = variant.config, DTYPES[variant.dtype_a], DTYPES[variant.dtype_b], DTYPES[variant.dtype_c]
    precise = variant.dtype_a.startswith("fp8") and not variant.fast_accum
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "EPILOGUE": variant.epilogue,
        "PRECISION": "tf32" if variant.dtype_a == "tf32" else "ieee",
        "MAX_IMPRECISE": min(IMPRECISE_K, config.block_k) if precise else None,
    }
    types = {
        "a_ptr": f"*{a.triton}",
        "b_ptr": f"*{b.triton}",
        "c_ptr": f"*{c.triton}",
        **dict.fromkeys(SIZES, "i64" if variant.layout == "any" else "i32"),
        **dict.fromkeys(BATCH_STRIDES, "i64"),
        "bias_ptr": f"*{c.triton}",
        **dict.fromkeys(("bias_rank", "stride_bias_z", "stride_bias_m", "stride_bias_n"), "i64"),
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "stride_scale_a": "i64",
        "stride_scale_b": "i64",
        "activation": "i64",
        "slope": "fp32",
    }
    promises = (Promise("fast_accum", "equals", 1),) if variant.fast_accum else ()
    if variant.layout == "any":
        return Specialisation(tile, types, constants, promises=promises, vector_bytes=1)

    unit = (*unit_strides(variant.layout), "stride_cn")
    multiples: dict[str, int] = {}
    if variant.aligned:
        multiples = _multiples(unit, {"a": a.bytes, "b": b.bytes, "c": c.bytes})
    return Specialisation(
        tile,
        {name: type_ for name, type_ in types.items() if name not in unit},
        constants | dict.fromkeys(unit, 1),
        multiples,
        promises + tuple(Promise(extent, "below", 2**31) for extent in ("a_extent", "b_extent", "c_extent")),
        VECTOR_BYTES if variant.aligned else a.bytes,
    )


def _multiples(unit: tuple[str, ...], size: dict[str, int]) -> dict[str, int]:
    """What makes every row (column, where the layout says so) of every matrix start at, and fill, 16 bytes."""
    vector = {operand: VECTOR_BYTES // bytes_ for operand, bytes_ in size.items()}
    found = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), VECTOR_BYTES)
    for name in ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", *BATCH_STRIDES):
        if name not in unit:
            found[name] = vector[name[len("stride_")]]
    contiguous = (("M" if "stride_am" in unit else "K", "a"), ("K" if "stride_bk" in unit else "N", "b"), ("N", "c"))
    for name, operand in contiguous:
        found[name] = max(found.get(name, 1), vector[operand])
    return found
