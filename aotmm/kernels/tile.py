"""Family `tile`: one program computes one BLOCK_M x BLOCK_N tile of C with plain pointer arithmetic.

Any strides, any sizes, on every target. Programs are numbered in groups of GROUP_M rows of tiles, so that programs
that run together share rows of A and columns of B in the L2 cache.
Source of the idea: Triton tutorial 03, "Matrix Multiplication".
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from aotmm.kernels import Specialisation, Variant
from aotmm.manifest import Promise
from aotmm.problem import DTYPES, unit_strides

INTEGERS = ("M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
):
    """C (M, N) = ACTIVATION(A (M, K) @ B (K, N)), accumulated in fp32, rounded once to the type of C."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_per_group = GROUP_M * tiles_n
    first_m = pid // tiles_per_group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % tiles_per_group % group_rows
    tile_n = pid % tiles_per_group // group_rows

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows and columns past the edge wrap around: they read valid memory and are not stored.
    a_ptrs = a_ptr + (rows % M)[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b_ptr + ks[:, None] * stride_bk + (cols % N)[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=ks[None, :] < K - k, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk

    if ACTIVATION == "leaky_relu":
        acc = tl.where(acc >= 0, acc, 0.01 * acc)
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def specialise(variant: Variant) -> Specialisation:
    """The tile kernel of `variant`.

    Layout "any" promises nothing and computes every offset in 64 bits. The others promise unit strides for their
    layout, 16-byte rows and 32-bit offsets, which is what makes the compiler issue 16-byte loads and stores.
    """
    config, a, b, c = variant.config, DTYPES[variant.dtype_a], DTYPES[variant.dtype_b], DTYPES[variant.dtype_c]
    fp8 = variant.dtype_a.startswith("fp8")
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "ACTIVATION": variant.activation,
        "PRECISION": "tf32" if variant.dtype_a == "tf32" else "ieee",
        "MAX_IMPRECISE": min(IMPRECISE_K, config.block_k) if fp8 else 0,
    }
    pointers = {"a_ptr": f"*{a.triton}", "b_ptr": f"*{b.triton}", "c_ptr": f"*{c.triton}"}
    if variant.layout == "any":
        return Specialisation(tile, pointers | dict.fromkeys(INTEGERS, "i64"), constants, vector_bytes=a.bytes)

    unit = (*unit_strides(variant.layout), "stride_cn")
    along_a, along_b = ("M" if "stride_am" in unit else "K"), ("K" if "stride_bk" in unit else "N")
    multiples = dict.fromkeys(pointers, VECTOR_BYTES)
    for name, element in (("stride_am", a), ("stride_ak", a), ("stride_bk", b), ("stride_bn", b), ("stride_cm", c)):
        if name not in unit:
            multiples[name] = VECTOR_BYTES // element.bytes
    for name, element in ((along_a, a), (along_b, b), ("N", c)):
        multiples[name] = max(multiples.get(name, 1), VECTOR_BYTES // element.bytes)
    return Specialisation(
        tile,
        pointers | {name: "i32" for name in INTEGERS if name not in unit},
        constants | dict.fromkeys(unit, 1),
        multiples,
        tuple(Promise(extent, "below", 2**31) for extent in ("a_extent", "b_extent", "c_extent")),
        VECTOR_BYTES,
    )
