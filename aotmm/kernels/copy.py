"""Family `copy`: copy matrices, bit by bit, between the caller's memory and the workspace.

Other kernels need rows that are contiguous and 16-byte aligned; other operands and results are copied. Either side may
be unaligned, so no alignment is guarded: neighbouring threads take neighbouring elements, 16 for each thread, and all
loads are issued before the first store. Layouts are the memory order of the source and of the destination: "nn" copies
rows to rows, "tn" and "nt" transpose the matrix in shared memory, "any" has any strides.

Tiles of one row (BLOCK_M = 1, layout "nn") go over the ends of rows: such a matrix is one line of M * N elements, at
most 2^30, so that no thread is idle where rows are short or end within a tile.

Loads of single bytes do not reach the memory's speed. The `aligned` kernel, in layout "tn", moves words of four: a
thread has 4 x 4 bytes of the matrix in four words, and turns them in registers. Both sides and their rows lie on whole
words, and M and N are multiples of four.

M and N are the rows and columns of each destination. A launch has batch * ceil(M / BLOCK_M) * ceil(N / BLOCK_N)
programs; of tiles of one row batch * ceil(M * N / BLOCK_N).

One launch may copy both operands of a product: `other` is the second, of 0 x 0 if there is none. Its programs follow
those of the first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aotmm.kernels import Specialisation, Variant
from aotmm.problem import COPY_QUANTITIES, DTYPES

_UNIT_STRIDES = {
    "nn": ("stride_sn", "stride_dn"),
    "nt": ("stride_sn", "stride_dm"),
    "tn": ("stride_sm", "stride_dn"),
}
_WORD = 4  # bytes
_STRIDES = "stride_sz", "stride_dz", "stride_sm", "stride_sn", "stride_dm", "stride_dn"


@triton.jit
def copy(
    source_ptr,
    dest_ptr,
    M,
    N,
    batch,
    stride_sz,
    stride_dz,
    stride_sm,
    stride_sn,
    stride_dm,
    stride_dn,
    other_source_ptr,
    other_dest_ptr,
    other_M,
    other_N,
    other_batch,  # noqa: ARG001 - the grid has its programs
    other_stride_sz,
    other_stride_dz,
    other_stride_sm,
    other_stride_sn,
    other_stride_dm,
    other_stride_dn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Set destination (batch, M, N) to source (batch, M, N), and likewise the other destination.

    If WORD is 4, pointers are to words of four bytes, and M, N, strides and blocks count bytes. What is first, left, a
    row or a column below is then one of squares of WORD x WORD bytes.
    """
    if PDL:
        gdc_launch_dependents()
    tiles = batch * _tiles(M, N, BLOCK_M, BLOCK_N)
    first = tl.program_id(0) < tiles
    number = tl.where(first, tl.program_id(0), tl.program_id(0) - tiles)
    source_ptr = tl.where(first, source_ptr, other_source_ptr)
    dest_ptr = tl.where(first, dest_ptr, other_dest_ptr)
    M, N = tl.where(first, M, other_M), tl.where(first, N, other_N)
    stride_sz, stride_dz = tl.where(first, stride_sz, other_stride_sz), tl.where(first, stride_dz, other_stride_dz)
    stride_sm, stride_sn = tl.where(first, stride_sm, other_stride_sm), tl.where(first, stride_sn, other_stride_sn)
    stride_dm, stride_dn = tl.where(first, stride_dm, other_stride_dm), tl.where(first, stride_dn, other_stride_dn)
    tiles = _tiles(M, N, BLOCK_M, BLOCK_N)
    source_ptr += (number // tiles).to(tl.int64) * (stride_sz // WORD)
    dest_ptr += (number // tiles).to(tl.int64) * (stride_dz // WORD)
    number %= tiles
    if BLOCK_M == 1:
        begin = number * BLOCK_N
        first_m = (begin // N).to(tl.int64)
        first_n = begin % N
        rows = _rows_below(first_n, N, BLOCK_N)
        places = first_n + tl.arange(0, BLOCK_N)
        left = M * N - begin
        source_ptrs = source_ptr + first_m * stride_sm + rows * (stride_sm - N) + places
        dest_ptr += first_m * stride_dm
        _wait(first_m + first_n, PDL)
        if left >= BLOCK_N:  # masks cost as much as the memory
            values = tl.load(source_ptrs)
            tl.store(dest_ptr + rows * (stride_dm - N) + places, values)
        else:
            inside = tl.arange(0, BLOCK_N) < left
            values = tl.load(source_ptrs, mask=inside)
            tl.store(dest_ptr + rows * (stride_dm - N) + places, values, mask=inside)
    else:
        tiles_n = tl.cdiv(N, BLOCK_N)
        first_m = (number // tiles_n).to(tl.int64) * (BLOCK_M // WORD)
        first_n = (number % tiles_n).to(tl.int64) * (BLOCK_N // WORD)
        # Numbers within the tile, so that the addresses of a thread's elements are one register and constants.
        rows = tl.arange(0, BLOCK_M // WORD)[:, None]
        cols = tl.arange(0, BLOCK_N // WORD)[None, :]
        source_ptrs = source_ptr + first_m * stride_sm + first_n * stride_sn + rows * stride_sm + cols * stride_sn
        dest_ptrs = dest_ptr + first_m * stride_dm + first_n * stride_dn + rows * stride_dm + cols * stride_dn
        _wait(first_m + first_n, PDL)
        left_m, left_n = M // WORD - first_m, N // WORD - first_n
        if (left_m >= BLOCK_M // WORD) & (left_n >= BLOCK_N // WORD):  # masks cost as much as the memory
            _move(source_ptrs, dest_ptrs, stride_sn // WORD, stride_dm // WORD, None, WORD)
        else:
            inside = (rows < left_m) & (cols < left_n)
            _move(source_ptrs, dest_ptrs, stride_sn // WORD, stride_dm // WORD, inside, WORD)


@triton.jit
def _wait(place, PDL: tl.constexpr):
    """Wait for the previous kernel, which may write the source or read the destination, after `place` is computed."""
    if PDL:
        # The condition always holds. It is there because the assembler would wait before it divides.
        if place >= 0:
            gdc_wait()


@triton.jit
def _tiles(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tiles of a matrix."""
    if BLOCK_M == 1:
        return tl.cdiv(M * N, BLOCK_N)
    else:
        return tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)


@triton.jit
def _rows_below(first, N, BLOCK: tl.constexpr):
    """Return how many rows below that of column `first` elements lie that follow it, one after another."""
    places = first + tl.arange(0, BLOCK)
    if N >= BLOCK:
        rows = (places >= N).to(tl.int32)
    else:  # `places` is less than 2 * BLOCK: the error is less than 0.5 / N, the distance from a whole number
        rows = ((places.to(tl.float32) + 0.5) * (1.0 / N.to(tl.float32))).to(tl.int32)
    return rows


@triton.jit
def _move(source_ptrs, dest_ptrs, source_line, dest_line, inside, WORD: tl.constexpr):
    """Copy elements, or turn squares of four words, whose lines are `source_line` and `dest_line` words apart."""
    if WORD == 1:
        tl.store(dest_ptrs, tl.load(source_ptrs, mask=inside), mask=inside)
    else:
        a = tl.load(source_ptrs, mask=inside)
        b = tl.load(source_ptrs + source_line, mask=inside)
        c = tl.load(source_ptrs + 2 * source_line, mask=inside)
        d = tl.load(source_ptrs + 3 * source_line, mask=inside)
        even_ab, odd_ab = _zipped(a, b)
        even_cd, odd_cd = _zipped(c, d)
        tl.store(dest_ptrs, even_ab & 0xFFFF | even_cd << 16, mask=inside)
        tl.store(dest_ptrs + dest_line, odd_ab & 0xFFFF | odd_cd << 16, mask=inside)
        tl.store(dest_ptrs + 2 * dest_line, even_ab >> 16 & 0xFFFF | even_cd & ~0xFFFF, mask=inside)
        tl.store(dest_ptrs + 3 * dest_line, odd_ab >> 16 & 0xFFFF | odd_cd & ~0xFFFF, mask=inside)


@triton.jit
def _zipped(a, b):
    """Return the even bytes of two words in turns, those of `a` first, and the odd ones."""
    even, odd = 0x00FF00FF, ~0x00FF00FF
    return a & even | (b & even) << 8, a >> 8 & even | b & odd


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel that copies elements as wide as `variant.dtype_a`'s."""
    config, bytes_ = variant.config, DTYPES[variant.dtype_a].bytes
    unit = _UNIT_STRIDES.get(variant.layout, ())
    word = _WORD if variant.aligned else 1
    prefixes = "", "other_"
    ones = {prefix + name: 1 for prefix in prefixes for name in unit}
    pdl = variant.target.pdl
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WORD": word,
        "PDL": pdl,
    }
    types = {
        "source_ptr": f"*i{8 * bytes_ * word}",
        "dest_ptr": f"*i{8 * bytes_ * word}",
        **dict.fromkeys(("M", "N", "batch"), "i32" if unit else "i64"),
        **dict.fromkeys(_STRIDES, "i64"),
    }
    types = {prefix + name: type_ for prefix in prefixes for name, type_ in types.items() if prefix + name not in ones}
    return Specialisation(
        copy,
        types,
        constants | ones,
        multiples={name: word for name in types if not name.endswith("batch")} if word > 1 else {},
        vector_bytes=bytes_ * word if unit else 1,
        quantities=COPY_QUANTITIES,
        pdl=pdl,
    )
