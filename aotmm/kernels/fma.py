"""Family `fma`: fp32 products in full precision, on NVIDIA GPUs: one block computes one BLOCK_M x BLOCK_N tile of C.

There are no tensor cores for fp32, so each thread multiplies and adds for itself. Any strides within the layout, any
sizes, any batch, rows of any alignment. Roles as in family `tile`.

Steps of A and B come through a ring of STAGES in shared memory (cp.async). An operand lies there as it does in global
memory, so that copies are 16 bytes wide (4 where rows are not aligned). Threads read it 16 bytes at once, too: four
steps of K of one row if it lies along K, else four rows. Lanes take rows beside each other, or groups of four, and a
swizzle moves those of eight lanes to different banks. docs/experiments/fp32.md has what that gains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from aotmm.kernels import LINE_BYTES, VECTOR_BYTES, WARP, Specialisation, Variant, tile
from aotmm.kernels.epilogue import finish
from aotmm.kernels.order import end_of, ends_at_once, group_of, place
from aotmm.problem import DTYPES

VECTOR = VECTOR_BYTES // 4  # elements of the widest access


@gluon.constexpr_function
def copy_layout(shape, vector, warps):
    """Return the threads that copy a step of an operand of such a shape, `vector` elements each."""
    lanes = min(WARP, shape[1] // vector)
    across = min(warps, max(1, shape[1] // (WARP * vector)))
    return gl.BlockedLayout([1, vector], [WARP // lanes, lanes], [warps // across, across], [1, 0])


@gluon.constexpr_function
def shared_layout(shape, along_k, bits):
    """Return the place of a step of an operand with elements of so many bits.

    What threads or ldmatrix read at once, eight rows from one column on, lies in different banks. Of fp32 that does not
    lie along K, threads read a part of one row.
    """
    if bits == 32 and not along_k:
        return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vector, line = VECTOR_BYTES * 8 // bits, LINE_BYTES * 8 // bits  # elements
    return gl.SwizzledSharedLayout(vector, max(1, line // shape[1]), min(line, shape[1]) // vector, [1, 0])


@gluon.constexpr_function
def sums_layout(block_m, block_n, warps, a_along_k, b_along_k):
    """Return the threads of the sums, so that each reads least: as many rows of A as columns of B.

    Of an operand along K it should hold fewer, since it gets four steps of each at once.
    """
    size = [1 if a_along_k else VECTOR, 1 if b_along_k else VECTOR]
    found = []
    for lanes in (4, 8):
        for down in (1, 2, 4, 8):
            m, n = block_m // down, block_n * down // warps
            if down <= warps and m >= VECTOR * lanes and n >= VECTOR * WARP // lanes:
                rows, cols = m // lanes, n * lanes // WARP
                held = rows * (4 if a_along_k else 1) + cols * (4 if b_along_k else 1)
                found.append((rows + cols, held, m + n, [lanes, WARP // lanes], [down, warps // down]))
    *_, threads, places = min(found)
    return gl.BlockedLayout(size, threads, places, [1, 0])


@gluon.aggregate
class Operand:
    """The next step of one operand in global memory, and its ring of steps in shared memory."""

    ptr: gl.tensor
    advance: gl.base_value
    offsets: gl.tensor
    ks: gl.tensor
    ring: gl.shared_memory_descriptor

    @gluon.jit
    def fill(self, stage, left):
        """Start copying the next step, zeros for steps of K from `left` on. Return the operand of the step after it."""
        async_copy.async_load(self.ring.index(stage), self.ptr + self.offsets, mask=self.ks < left)
        return Operand(self.ptr + self.advance, self.advance, self.offsets, self.ks, self.ring)


@gluon.jit
def operand(
    ptr, first, size, stride, stride_k, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    ALONG_K: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Return the operand with BLOCK rows (columns of B) from `first` on. Those past the edge wrap around.

    Offsets are below 2^31 by the kernel's guards.
    """
    SHAPE: gl.constexpr = [BLOCK, BLOCK_K] if ALONG_K else [BLOCK_K, BLOCK]
    COPY: gl.constexpr = copy_layout(SHAPE, WIDTH, gl.num_warps())
    ks = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0 if ALONG_K else 1, COPY))
    rows = (first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1 if ALONG_K else 0, COPY))) % size
    if ALONG_K:
        ks = ks[None, :]
        rows = rows[:, None]
    else:
        ks = ks[:, None]
        rows = rows[None, :]
    offsets = (rows * stride + ks * stride_k).to(gl.uint32).to(gl.uint64)
    PLACE: gl.constexpr = shared_layout(SHAPE, ALONG_K, ptr.dtype.element_ty.primitive_bitwidth)
    ring = gl.allocate_shared_memory(ptr.dtype.element_ty, [STAGES] + SHAPE, PLACE)
    return Operand(ptr, BLOCK_K * stride_k, offsets, ks, ring)


@gluon.jit
def fill(a, b, stage, left):
    """Start copying the next step of both operands, as one group. Return the operands of the step after it."""
    a = a.fill(stage, left)
    b = b.fill(stage, left)
    async_copy.commit_group()
    return a, b


@gluon.jit
def multiply(
    a, b, first_k, last_k, K, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, A_ALONG_K: gl.constexpr,
    B_ALONG_K: gl.constexpr, SUMS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the product of two operands over K from first_k, where they begin, to last_k."""
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUMS)
    for stage in gl.static_range(STAGES - 1):
        a, b = fill(a, b, stage, K - first_k - stage * BLOCK_K)
    stage = 0
    for k in range(first_k, last_k, BLOCK_K):
        async_copy.wait_group(STAGES - 2)
        # All copies of this step are there, and all threads have read the one whose place is filled next.
        gl.barrier()
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        a, b = fill(a, b, free, K - k - (STAGES - 1) * BLOCK_K)
        a_step = a.ring.index(stage)
        b_step = b.ring.index(stage)
        if not A_ALONG_K:
            a_step = a_step.permute([1, 0])
        if B_ALONG_K:
            b_step = b_step.permute([1, 0])
        acc = gl.dot_fma(
            a_step.load(gl.DotOperandLayout(0, SUMS, 0)), b_step.load(gl.DotOperandLayout(1, SUMS, 0)), acc
        )
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    return acc


@gluon.jit
def fma(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_az,
    stride_bz, stride_cz, bias_ptr, bias_rank, stride_bias_z, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
    stride_scale_a, stride_scale_b, activation, slope, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr, B_ALONG_K: gl.constexpr, WIDTH: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) @ B (batch, K, N) and the epilogue, summed in fp32."""
    SUMS: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps(), A_ALONG_K, B_ALONG_K)
    matrix, row, col = tile.tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = matrix.to(gl.int64)
    a = operand(a_ptr + z * stride_az, row, M, stride_am, stride_ak, BLOCK_M, BLOCK_K, STAGES, A_ALONG_K, WIDTH)
    b = operand(b_ptr + z * stride_bz, col, N, stride_bn, stride_bk, BLOCK_N, BLOCK_K, STAGES, B_ALONG_K, WIDTH)
    acc = multiply(a, b, 0, K, K, BLOCK_K, STAGES, A_ALONG_K, B_ALONG_K, SUMS, BLOCK_M, BLOCK_N)
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SUMS))
    acc = finish(
        acc, bias_ptr + z * stride_bias_z, bias_rank, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
        stride_scale_a, stride_scale_b, activation, slope, rows, cols, M, N, EPILOGUE,
    )  # fmt: skip
    c_ptrs = c_ptr + z * stride_cz + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    gl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


@gluon.jit
def partial(
    a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_az, stride_bz, batch, workspace_ptr,
    workspace_stride_m, workspace_stride_z, split, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr, B_ALONG_K: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Compute slice `part` of the workspace (split, batch, whole tiles of M and N) = A @ B over part of K."""
    SUMS: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps(), A_ALONG_K, B_ALONG_K)
    matrix, row, col = tile.tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = (matrix % batch).to(gl.int64)
    first_k, last_k = tile.slice_of(matrix // batch, split, K, BLOCK_K)
    a_ptr += z * stride_az + first_k.to(gl.int64) * stride_ak
    b_ptr += z * stride_bz + first_k.to(gl.int64) * stride_bk
    a = operand(a_ptr, row, M, stride_am, stride_ak, BLOCK_M, BLOCK_K, STAGES, A_ALONG_K, WIDTH)
    b = operand(b_ptr, col, N, stride_bn, stride_bk, BLOCK_N, BLOCK_K, STAGES, B_ALONG_K, WIDTH)
    acc = multiply(a, b, first_k, last_k, K, BLOCK_K, STAGES, A_ALONG_K, B_ALONG_K, SUMS, BLOCK_M, BLOCK_N)
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SUMS))
    slab = workspace_ptr + matrix.to(gl.int64) * workspace_stride_z
    gl.store(slab + rows.to(gl.int64)[:, None] * workspace_stride_m + cols[None, :], acc)


@gluon.jit
def grouped_m(
    a_ptr, b_ptr, c_ptr, M, N, K, batch, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_bz,
    offsets_ptr, group_rows, bias_ptr, bias_rank, stride_bias_z, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
    stride_scale_a, stride_scale_b, stride_scale_bz, activation, slope, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr, B_ALONG_K: gl.constexpr, WIDTH: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Compute C (M, N) = A (M, K) @ B (batch, K, N) and the epilogue, for `batch` groups of rows of A."""
    SUMS: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps(), A_ALONG_K, B_ALONG_K)
    tiles_n = gl.cdiv(N, BLOCK_N)
    group, before, first, end = group_of(
        gl.program_id(0), ends_at_once(), offsets_ptr, batch, M, group_rows, tiles_n, BLOCK_M
    )
    if group >= batch:  # there are fewer tiles than there may be
        return
    tile_m, tile_n = place(gl.program_id(0) - before, gl.cdiv(end - first, BLOCK_M), tiles_n, group_m)
    row = first + tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    z = group.to(gl.int64)
    a = operand(a_ptr, row, M, stride_am, stride_ak, BLOCK_M, BLOCK_K, STAGES, A_ALONG_K, WIDTH)
    b = operand(b_ptr + z * stride_bz, col, N, stride_bn, stride_bk, BLOCK_N, BLOCK_K, STAGES, B_ALONG_K, WIDTH)
    acc = multiply(a, b, 0, K, K, BLOCK_K, STAGES, A_ALONG_K, B_ALONG_K, SUMS, BLOCK_M, BLOCK_N)
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SUMS))
    acc = finish(
        acc, bias_ptr + z * stride_bias_z, bias_rank, stride_bias_m, stride_bias_n, scale_a_ptr,
        scale_b_ptr + z * stride_scale_bz, stride_scale_a, stride_scale_b, activation, slope, rows, cols, end, N,
        EPILOGUE,
    )  # fmt: skip
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    gl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < end) & (cols[None, :] < N))


@gluon.jit
def grouped_k(
    a_ptr, b_ptr, c_ptr, M, N, K, batch, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_cz,
    offsets_ptr, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr, B_ALONG_K: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Compute each matrix of C (batch, M, N) = A (M, K) @ B (K, N) over its own group of K."""
    SUMS: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps(), A_ALONG_K, B_ALONG_K)
    matrix, row, col = tile.tile_of(M, N, group_m, BLOCK_M, BLOCK_N)
    z = matrix.to(gl.int64)
    first = end_of(matrix - 1, offsets_ptr, batch, K)
    size = end_of(matrix, offsets_ptr, batch, K) - first
    a_ptr += first.to(gl.int64) * stride_ak
    b_ptr += first.to(gl.int64) * stride_bk
    a = operand(a_ptr, row, M, stride_am, stride_ak, BLOCK_M, BLOCK_K, STAGES, A_ALONG_K, WIDTH)
    b = operand(b_ptr, col, N, stride_bn, stride_bk, BLOCK_N, BLOCK_K, STAGES, B_ALONG_K, WIDTH)
    acc = multiply(a, b, 0, size, size, BLOCK_K, STAGES, A_ALONG_K, B_ALONG_K, SUMS, BLOCK_M, BLOCK_N)
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SUMS))
    c_ptrs = c_ptr + z * stride_cz + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    gl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def of_ring(variant: Variant, functions: dict[str, Any]) -> Specialisation:
    """Return that of the functions, by role, which `variant` has, with the guards of family `tile` for it.

    Every barrier between threads that share memory stands in its source, but for those of searches for groups.
    """
    of_tile, function = tile.specialise(variant), functions[variant.role]
    constants = {name: value for name, value in of_tile.constants.items() if name in function.arg_names}
    constants |= {
        "STAGES": variant.config.num_stages,
        "A_ALONG_K": variant.layout[0] == "n",
        "B_ALONG_K": variant.layout[1] == "t",
        "WIDTH": of_tile.vector_bytes // DTYPES[variant.dtype_a].bytes,
    }
    unneeded = () if variant.role == "grouped_m" else ("add_membar",)
    return replace(of_tile, function=function, constants=constants, unneeded=unneeded)


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel of `variant`, with the guards of family `tile` for the same layout and alignment."""
    # No layout is left to the compiler, so none is converted through shared memory (tests/kernels/test_fma.py).
    return of_ring(variant, {"product": fma, "partial": partial, "grouped_m": grouped_m, "grouped_k": grouped_k})
