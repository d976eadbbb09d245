"""Family `copy`: copy a matrix, bit by bit, between the caller's memory and the workspace.

Other kernels need rows that are contiguous and 16-byte aligned; other operands and results are copied. Either side may
be unaligned, so no alignment is guarded: neighbouring threads take neighbouring elements, 16 for each thread, and all
loads are issued before the first store. Layouts are the memory order of the source and of the destination: "nn" copies
rows to rows, "tn" and "nt" transpose the matrix in shared memory, "any" has any strides.

A copy is launched with quantities of its own: `a_ptr`, `stride_am` and `stride_ak` are the source, `c_ptr`, `stride_cm`
and `stride_cn` the destination, M and N its rows and columns, batch is 1. A launch has
ceil(M / BLOCK_M) * ceil(N / BLOCK_N) programs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from aotmm.kernels import Specialisation, Variant
from aotmm.problem import DTYPES

UNIT_STRIDES = {"nn": ("stride_ak", "stride_cn"), "nt": ("stride_ak", "stride_cm"), "tn": ("stride_am", "stride_cn")}


@triton.jit
def copy(
    a_ptr,
    c_ptr,
    M,
    N,
    stride_am,
    stride_ak,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute C (M, N) = A (M, N)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M
    first_n = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    # Numbers within the tile, so that the addresses of a thread's elements are one register and constants.
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    a_ptrs = a_ptr + first_m * stride_am + first_n * stride_ak + rows * stride_am + cols * stride_ak
    c_ptrs = c_ptr + first_m * stride_cm + first_n * stride_cn + rows * stride_cm + cols * stride_cn
    if (first_m + BLOCK_M <= M) & (first_n + BLOCK_N <= N):  # masks cost as much as the memory
        tl.store(c_ptrs, tl.load(a_ptrs))
    else:
        inside = (rows < M - first_m) & (cols < N - first_n)
        tl.store(c_ptrs, tl.load(a_ptrs, mask=inside), mask=inside)


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel that copies elements as wide as `variant.dtype_a`'s."""
    config, bytes_ = variant.config, DTYPES[variant.dtype_a].bytes
    unit = UNIT_STRIDES.get(variant.layout, ())
    constants: dict[str, Any] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    types = {
        "a_ptr": f"*i{8 * bytes_}",
        "c_ptr": f"*i{8 * bytes_}",
        **dict.fromkeys(("M", "N"), "i32" if unit else "i64"),
        **dict.fromkeys(("stride_am", "stride_ak", "stride_cm", "stride_cn"), "i64"),
    }
    return Specialisation(
        copy,
        {name: type_ for name, type_ in types.items() if name not in unit},
        constants | dict.fromkeys(unit, 1),
        vector_bytes=bytes_ if unit else 1,
    )
