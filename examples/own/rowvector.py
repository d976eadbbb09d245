"""A kernel family of one's own: one row of A times B, with multiplications and sums instead of tensor cores.

Config sets name it by its module: family = "own.rowvector". What it takes and gives is in docs/extending.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aotmm.kernels import VECTOR_BYTES, Family, Specialisation, Variant
from aotmm.kernels.epilogue import epilogue_types, finish
from aotmm.pack.schema import Guard
from aotmm.problem import DTYPES

# What entries of config sets may ask for: products of 16-bit types, no slices of K.
FAMILY = Family(dtypes=("fp16", "bf16"), roles=("product",))


@triton.jit
def rowvector(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_ak, stride_bk, stride_bn, stride_cn,
    bias_ptr, bias_rank, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b,
    activation, slope,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C (1, N) = A (1, K) @ B (K, N) and the epilogue: every program has BLOCK_N columns of C, sums are fp32."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = (first + ks).to(tl.int64)
        a = tl.load(a_ptr + k * stride_ak, mask=k < K, other=0.0)
        b_ptrs = b_ptr + cols.to(tl.int64)[:, None] * stride_bn + k[None, :] * stride_bk
        b = tl.load(b_ptrs, mask=(cols < N)[:, None] & (k < K)[None, :], other=0.0)
        sums += a.to(tl.float32)[None, :] * b.to(tl.float32)
    c = finish(
        tl.sum(sums, axis=1)[None, :], bias_ptr, bias_rank, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
        stride_scale_a, stride_scale_b, activation, slope, tl.arange(0, 1), cols, M, N, EPILOGUE,
    )  # fmt: skip
    tl.store(c_ptr + cols[None, :] * stride_cn, c.to(c_ptr.dtype.element_ty), mask=(cols < N)[None, :])


def specialise(variant: Variant) -> Specialisation:
    """The kernel of `variant`, for B of 16-byte columns, contiguous along K: a linear layer's weight, transposed."""
    a, c, config = DTYPES[variant.dtype_a], DTYPES[variant.dtype_c], variant.config
    vector = VECTOR_BYTES // a.bytes
    return Specialisation(
        rowvector,
        types={
            "a_ptr": f"*{a.triton}",
            "b_ptr": f"*{a.triton}",
            "c_ptr": f"*{c.triton}",
            "N": "i32",
            "K": "i32",
            "stride_bn": "i64",
            **epilogue_types(c),
        },
        constants={
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "EPILOGUE": variant.epilogue,
            # A constant that is a quantity of the product is a guard: who selects kernels checks it.
            "M": 1,
            "stride_ak": 1,
            "stride_bk": 1,
            "stride_cn": 1,
        },
        multiples={"a_ptr": VECTOR_BYTES, "b_ptr": VECTOR_BYTES, "stride_bn": vector, "K": vector},
        guards=(Guard("batch", "equals", 1),),
        vector_bytes=VECTOR_BYTES,
    )
