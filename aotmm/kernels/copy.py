"""Family `copy`: copy a matrix, bit by bit, between the caller's memory and the workspace.

Other kernels need rows that are contiguous and 16-byte aligned; other operands and results are copied. Either side may
be unaligned, so no alignment is guarded: neighbouring threads take neighbouring elements, 16 for each thread, and all
loads are issued before the first store. Layouts are the memory order of the source and of the destination: "nn" copies
rows to rows, "tn" and "nt" transpose the matrix in shared memory, "any" has any strides.

M and N are the rows and columns of the destination. A launch has ceil(M / BLOCK_M) * ceil(N / BLOCK_N) programs.

`beside` is 1 for a copy that follows another one of its product, which it does not depend on: both copy at once. The
first lets it start only after all kernels before have ended. It ends after the first, so what follows waits for both.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aotmm.kernels import Specialisation, Variant
from aotmm.problem import COPY_QUANTITIES, DTYPES

UNIT_STRIDES = {
    "nn": ("stride_sn", "stride_dn"),
    "nt": ("stride_sn", "stride_dm"),
    "tn": ("stride_sm", "stride_dn"),
}


@triton.jit
def copy(
    source_ptr,
    dest_ptr,
    M,
    N,
    stride_sm,
    stride_sn,
    stride_dm,
    stride_dn,
    beside,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Set destination (M, N) to source (M, N)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M
    first_n = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    # Numbers within the tile, so that the addresses of a thread's elements are one register and constants.
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    source_ptrs = source_ptr + first_m * stride_sm + first_n * stride_sn + rows * stride_sm + cols * stride_sn
    dest_ptrs = dest_ptr + first_m * stride_dm + first_n * stride_dn + rows * stride_dm + cols * stride_dn
    if PDL:
        if beside == 0:
            gdc_wait()  # the previous kernel may write the source, or read the destination
        gdc_launch_dependents()
    if (first_m + BLOCK_M <= M) & (first_n + BLOCK_N <= N):  # masks cost as much as the memory
        tl.store(dest_ptrs, tl.load(source_ptrs))
    else:
        inside = (rows < M - first_m) & (cols < N - first_n)
        tl.store(dest_ptrs, tl.load(source_ptrs, mask=inside), mask=inside)
    if PDL:
        if beside != 0:
            gdc_wait()


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel that copies elements as wide as `variant.dtype_a`'s."""
    config, bytes_ = variant.config, DTYPES[variant.dtype_a].bytes
    unit = UNIT_STRIDES.get(variant.layout, ())
    pdl = variant.target.pdl
    constants: dict[str, Any] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PDL": pdl}
    types = {
        "source_ptr": f"*i{8 * bytes_}",
        "dest_ptr": f"*i{8 * bytes_}",
        **dict.fromkeys(("M", "N"), "i32" if unit else "i64"),
        **dict.fromkeys(("stride_sm", "stride_sn", "stride_dm", "stride_dn"), "i64"),
        "beside": "i32",
    }
    return Specialisation(
        copy,
        {name: type_ for name, type_ in types.items() if name not in unit},
        constants | dict.fromkeys(unit, 1),
        vector_bytes=bytes_ if unit else 1,
        quantities=COPY_QUANTITIES,
        pdl=pdl,
    )
