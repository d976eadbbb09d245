"""Family `tile`: one program computes one BLOCK_M x BLOCK_N tile of C with plain pointer arithmetic.

Any strides, any sizes, any batch, on every target.

Of groups of rows (role "grouped_m") a program finds the group of its tile by the ends of all groups. Of groups of K
("grouped_k") it sums one group.

If C has few tiles and K is large, role "partial" is used: a program computes one slice of K of one tile, and family
`reduce` adds them up. Slices are the outermost order: programs that run together read the same part of K.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from aotmm.kernels import (
    BLOCK_SCALE_TYPES,
    NOT_FOR_PLAIN_KERNELS,
    VECTOR_BYTES,
    WORKSPACE_MULTIPLES,
    WORKSPACE_TYPES,
    Specialisation,
    Variant,
    block_guards,
)
from aotmm.kernels.epilogue import epilogue_types, finish
from aotmm.kernels.order import GROUPS_AT_ONCE, end_of, group_of, place
from aotmm.pack.schema import Guard
from aotmm.problem import BLOCK_SCALE_K, DTYPES, unit_strides

SIZES = ("M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
_IN_GROUPS = {"grouped_m": {"M": "i32", "group_rows": "i32"}, "grouped_k": {"K": "i32"}}  # by role: what offsets count
BATCH_STRIDES = ("stride_az", "stride_bz", "stride_cz")
# Hopper's fp8 tensor cores keep about 14 bits; sums are moved to fp32 after this many products, as cuBLAS does
# without fast accumulation. Source: DeepSeek-V3 technical report, section 3.3.2.
IMPRECISE_K = 128
# Of memory that AMD's buffer instructions reach, as Triton uses them ("tt.pointer_range" 32). The last 16 stay unused,
# because a buffer of Triton's ends two bytes before 2 GiB.
BUFFER_BYTES = 2**31 - VECTOR_BYTES
SCALED_K = tl.constexpr(BLOCK_SCALE_K)


@triton.jit
def nearest_tf32(x):
    """Return fp32 numbers rounded to the 10 bits of tf32, ties away from zero, as cuBLAS does.

    Tensor cores cut what they get, which makes sums too small by up to 2^-10 of their terms.
    """
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def multiply(
    a_ptr,
    b_ptr,
    rows,
    cols,
    first_k,
    last_k,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr = False,
    block_scale_a_ptr=None,
    block_scale_b_ptr=None,
    stride_block_am=None,
    stride_block_ak=None,
    stride_block_bk=None,
    stride_block_bn=None,
    block_columns=None,
):
    """Return the product of `rows` of A and `cols` of B over K from first_k, a multiple of BLOCK_K, to last_k.

    With block scales each step is summed on its own, and the sum times its scales is added with one rounding.
    """
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    ACC: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((rows.shape[0], cols.shape[0]), dtype=ACC)
    for k in range(first_k, last_k, BLOCK_K):
        a = tl.load(a_ptrs, mask=ks[None, :] < K - k, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < K - k, other=0.0)
        if PRECISION == "tf32":
            a, b = nearest_tf32(a), nearest_tf32(b)
        if BLOCK_SCALED:
            block = (k // SCALED_K).to(tl.int64)
            scale_a = tl.load(block_scale_a_ptr + rows.to(tl.int64) * stride_block_am + block * stride_block_ak)
            columns = (cols // block_columns).to(tl.int64)
            scale_b = tl.load(block_scale_b_ptr + block * stride_block_bk + columns * stride_block_bn)
            part = tl.dot(a, b, out_dtype=ACC)
            acc = tl.fma(part, scale_a[:, None] * scale_b[None, :], acc)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE, out_dtype=ACC)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def tile_of(M, N, group_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the matrix of this program's tile, counted over slices and batch, and its first row and column."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    matrix = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, group_m)
    return matrix, tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def slice_of(part, split, K, BLOCK_K: tl.constexpr):
    """Return the first K of slice `part` of `split`, and the K behind its last: whole steps, equal within one."""
    steps = tl.cdiv(K, BLOCK_K)
    first_k = part * steps // split * BLOCK_K
    return first_k, min((part + 1) * steps // split * BLOCK_K, K)


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
    group_m,
    block_scale_a_ptr,
    block_scale_b_ptr,
    stride_block_az,
    stride_block_am,
    stride_block_ak,
    stride_block_bz,
    stride_block_bk,
    stride_block_bn,
    block_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
):
    """Compute C (batch, M, N) = A (batch, M, K) @ B (batch, K, N) and the epilogue, summed in fp32 (int8: int32)."""
    matrix, row, col = tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = matrix.to(tl.int64)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    # Rows and columns past the edge wrap around: they read valid memory and are not stored.
    acc = multiply(
        a_ptr + z * stride_az,
        b_ptr + z * stride_bz,
        rows % M,
        cols % N,
        0,
        K,
        K,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        BLOCK_K,
        PRECISION,
        MAX_IMPRECISE,
        BLOCK_SCALED,
        block_scale_a_ptr + z * stride_block_az if BLOCK_SCALED else block_scale_a_ptr,
        block_scale_b_ptr + z * stride_block_bz if BLOCK_SCALED else block_scale_b_ptr,
        stride_block_am,
        stride_block_ak,
        stride_block_bk,
        stride_block_bn,
        block_columns,
    )
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


@triton.jit
def partial(
    a_ptr,
    b_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_az,
    stride_bz,
    batch,
    workspace_ptr,
    workspace_stride_m,
    workspace_stride_z,
    split,
    group_m,
    block_scale_a_ptr,
    block_scale_b_ptr,
    stride_block_az,
    stride_block_am,
    stride_block_ak,
    stride_block_bz,
    stride_block_bk,
    stride_block_bn,
    block_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
):
    """Compute slice `part` of the workspace (split, batch, whole tiles of M and N) = A @ B over part of K."""
    matrix, row, col = tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = (matrix % batch).to(tl.int64)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    first_k, last_k = slice_of(matrix // batch, split, K, BLOCK_K)
    acc = multiply(
        a_ptr + z * stride_az + first_k.to(tl.int64) * stride_ak,
        b_ptr + z * stride_bz + first_k.to(tl.int64) * stride_bk,
        rows % M,
        cols % N,
        first_k,
        last_k,
        K,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        BLOCK_K,
        PRECISION,
        MAX_IMPRECISE,
        BLOCK_SCALED,
        block_scale_a_ptr + z * stride_block_az if BLOCK_SCALED else block_scale_a_ptr,
        block_scale_b_ptr + z * stride_block_bz if BLOCK_SCALED else block_scale_b_ptr,
        stride_block_am,
        stride_block_ak,
        stride_block_bk,
        stride_block_bn,
        block_columns,
    )
    slab = workspace_ptr + matrix.to(tl.int64) * workspace_stride_z
    tl.store(slab + rows.to(tl.int64)[:, None] * workspace_stride_m + cols[None, :], acc)


@triton.jit
def grouped_m(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    batch,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    stride_bz,
    offsets_ptr,
    group_rows,
    bias_ptr,
    bias_rank,
    stride_bias_z,
    stride_bias_m,
    stride_bias_n,
    scale_a_ptr,
    scale_b_ptr,
    stride_scale_a,
    stride_scale_b,
    stride_scale_bz,
    activation,
    slope,
    group_m,
    block_scale_a_ptr,
    block_scale_b_ptr,
    stride_block_az,
    stride_block_am,
    stride_block_ak,
    stride_block_bz,
    stride_block_bk,
    stride_block_bn,
    block_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute C (M, N) = A (M, K) @ B (batch, K, N) and the epilogue, for `batch` groups of rows of A."""
    tiles_n = tl.cdiv(N, BLOCK_N).to(tl.int32)
    group, before, first, end = group_of(
        tl.program_id(0), tl.arange(0, AT_ONCE), offsets_ptr, batch, M, group_rows, tiles_n, BLOCK_M
    )
    if group >= batch:  # there are fewer tiles than there may be
        return
    tile_m, tile_n = place(tl.program_id(0) - before, tl.cdiv(end - first, BLOCK_M), tiles_n, group_m)
    z = group.to(tl.int64)
    rows = first + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows behind the group's last are others' or wrap around.
    acc = multiply(
        a_ptr,
        b_ptr + z * stride_bz,
        rows % M,
        cols % N,
        0,
        K,
        K,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        BLOCK_K,
        PRECISION,
        MAX_IMPRECISE,
        BLOCK_SCALED,
        block_scale_a_ptr + z * stride_block_az if BLOCK_SCALED else block_scale_a_ptr,
        block_scale_b_ptr + z * stride_block_bz if BLOCK_SCALED else block_scale_b_ptr,
        stride_block_am,
        stride_block_ak,
        stride_block_bk,
        stride_block_bn,
        block_columns,
    )
    acc = finish(
        acc,
        bias_ptr + z * stride_bias_z,
        bias_rank,
        stride_bias_m,
        stride_bias_n,
        scale_a_ptr,
        scale_b_ptr + z * stride_scale_bz,
        stride_scale_a,
        stride_scale_b,
        activation,
        slope,
        rows,
        cols,
        end,
        N,
        EPILOGUE,
    )
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < end) & (cols[None, :] < N))


@triton.jit
def grouped_k(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    batch,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    stride_cz,
    offsets_ptr,
    group_m,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE: tl.constexpr,
):
    """Compute each matrix of C (batch, M, N) = A (M, K) @ B (K, N) over its own group of K."""
    matrix, row, col = tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = matrix.to(tl.int64)
    first = end_of(matrix - 1, offsets_ptr, batch, K)
    size = end_of(matrix, offsets_ptr, batch, K) - first
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    acc = multiply(
        a_ptr + first.to(tl.int64) * stride_ak,
        b_ptr + first.to(tl.int64) * stride_bk,
        rows % M,
        cols % N,
        0,
        size,
        size,
        stride_am,
        stride_ak,
        stride_bk,
        stride_bn,
        BLOCK_K,
        PRECISION,
        MAX_IMPRECISE,
    )
    c_ptrs = c_ptr + z * stride_cz + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def specialise(variant: Variant) -> Specialisation:
    """Return the tile kernel of `variant`.

    Layout "any" has no guard and computes every offset in 64 bits. The others have guards on the unit strides of their
    layout and on 32-bit offsets within one matrix, so that loads are coalesced. Aligned ones also guard 16-byte rows,
    so that the compiler issues 16-byte loads and stores. On AMD those without the epilogue "full" guard operands of
    less than 2 GiB, too, all matrices of a batch together, which buffer instructions load. "full" serves larger ones.
    """
    config, a, b, c = variant.config, DTYPES[variant.dtype_a], DTYPES[variant.dtype_b], DTYPES[variant.dtype_c]
    precise = variant.dtype_a.startswith("fp8") and not variant.fast_accum
    function = _FUNCTIONS[variant.role]
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EPILOGUE": variant.epilogue,
        "PRECISION": "tf32" if variant.dtype_a == "tf32" else "ieee",
        "MAX_IMPRECISE": min(IMPRECISE_K, config.block_k) if precise else None,
        "AT_ONCE": GROUPS_AT_ONCE,
        "BLOCK_SCALED": bool(variant.block_scales),
    }
    types = {
        "a_ptr": f"*{a.triton}",
        "b_ptr": f"*{b.triton}",
        "c_ptr": f"*{c.triton}",
        **dict.fromkeys(SIZES, "i64" if variant.layout == "any" else "i32"),
        **_IN_GROUPS.get(variant.role, {}),
        **dict.fromkeys((*BATCH_STRIDES, "stride_bias_z", "stride_scale_bz"), "i64"),
        **epilogue_types(c),
        **WORKSPACE_TYPES,
        "workspace_ptr": f"*{c.triton}",
        "batch": "i32",
        "group_m": "i32",
        "offsets_ptr": "*i32",
    }
    if variant.block_scales:
        types |= BLOCK_SCALE_TYPES
    else:
        constants |= dict.fromkeys(BLOCK_SCALE_TYPES)
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = {name: type_ for name, type_ in types.items() if name in function.arg_names}
    bytes_ = {name: row.bytes for name, row in {"a": a, "b": b, "c": c}.items() if f"{name}_ptr" in types}
    guards = (*block_guards(variant), *((Guard("fast_accum", "equals", 1),) if variant.fast_accum else ()))
    if variant.role == "grouped_k":
        guards += (Guard("scale_a_ptr", "equals", 0), Guard("scale_b_ptr", "equals", 0))
    promoted = constants["MAX_IMPRECISE"] if precise and variant.target.fast_accum else 0
    rounded = "kernel" if variant.dtype_a == "tf32" else ""
    if variant.layout == "any":
        return Specialisation(
            function,
            types,
            constants,
            guards=guards,
            vector_bytes=1,
            promoted=promoted,
            rounded=rounded,
            unneeded=NOT_FOR_PLAIN_KERNELS,
        )

    unit = (*unit_strides(variant.layout), "stride_cn")
    multiples = _multiples(unit, bytes_) | WORKSPACE_MULTIPLES if variant.aligned else {}
    buffered = variant.target.backend == "hip" and variant.aligned and variant.epilogue != "full"
    reaches = {"a_reach": BUFFER_BYTES // a.bytes, "b_reach": BUFFER_BYTES // b.bytes} if buffered else {}
    limits = {f"{operand}_extent": 2**31 for operand in bytes_} | reaches
    return Specialisation(
        function,
        {name: type_ for name, type_ in types.items() if name not in unit},
        constants | {name: 1 for name in unit if name in types},
        {name: number for name, number in multiples.items() if name in types},
        guards + tuple(Guard(name, "below", limit) for name, limit in limits.items()),
        VECTOR_BYTES if variant.aligned else a.bytes,
        promoted=promoted,
        rounded=rounded,
        unneeded=NOT_FOR_PLAIN_KERNELS,
        buffers=("a_ptr", "b_ptr") if buffered else (),
    )


_FUNCTIONS = {"product": tile, "partial": partial, "grouped_m": grouped_m, "grouped_k": grouped_k}  # by role


def _multiples(unit: tuple[str, ...], bytes_: dict[str, int]) -> dict[str, int]:
    """Return the divisors with which every row (or column, by the layout) starts at, and fills, 16 bytes."""
    vector = {operand: VECTOR_BYTES // size for operand, size in bytes_.items()}
    found = {f"{operand}_ptr": VECTOR_BYTES for operand in vector}
    for name in ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", *BATCH_STRIDES):
        if name not in unit and name[len("stride_")] in vector:
            found[name] = vector[name[len("stride_")]]
    contiguous = (("M" if "stride_am" in unit else "K", "a"), ("K" if "stride_bk" in unit else "N", "b"), ("N", "c"))
    for name, operand in contiguous:
        found[name] = max(found.get(name, 1), vector.get(operand, 1))
    return {name: number for name, number in found.items() if number > 1}
