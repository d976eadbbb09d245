"""Family `multistage`: large tiles of 16-bit products by mma.sync, on NVIDIA GPUs: one block computes one tile of C.

Roles, sizes, strides and guards are those of family `tile` with aligned rows. Steps of A and B come through a ring of
STAGES in shared memory, as in `fma`. Each warp holds two parts of a step in registers, 16 along K: while one is
multiplied, the next is loaded, also across steps. So there is one barrier in a step, and no warp waits for shared
memory behind it. The structure is that of CUTLASS' MmaMultistage; docs/experiments/ampere.md has what it gains.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from aotmm.kernels import VECTOR_BYTES, Specialisation, Variant, tile
from aotmm.kernels.epilogue import finish
from aotmm.kernels.fma import copy_layout, fill, of_ring, operand

PART = gl.constexpr(16)  # steps of K that one instruction takes
VECTOR_BITS = gl.constexpr(8 * VECTOR_BYTES)


@gluon.constexpr_function
def sums_layout(block_m, block_n, warps):
    """Return the warps of the sums, so that each reads least: their tiles are as square as possible."""
    shapes = [(block_m // down, block_n * down // warps, down) for down in (1, 2, 4, 8) if down <= warps]
    *_, down = min(shapes, key=lambda shape: (abs(shape[0] - shape[1]), shape[2]))
    return gl.NVMMADistributedLayout([2, 0], [down, warps // down], [16, 8])


@gluon.jit
def part_of(ring, stage, NUMBER: gl.constexpr, ALONG_K: gl.constexpr, INDEX: gl.constexpr, SUMS: gl.constexpr):
    """Return part NUMBER of a stage of an operand in registers: A if INDEX is 0, else B."""
    part = ring.index(stage).slice(NUMBER * PART, PART, 1 if ALONG_K else 0)
    if (INDEX == 1) == ALONG_K:
        part = part.permute([1, 0])
    return part.load(gl.DotOperandLayout(INDEX, SUMS, 2))


@gluon.jit
def multiply(
    a, b, first_k, last_k, K, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, A_ALONG_K: gl.constexpr,
    B_ALONG_K: gl.constexpr, SUMS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the product of two operands over K from first_k, where they begin, to last_k.

    At the end no thread reads shared memory or copies to it any more.
    """
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUMS)
    for stage in gl.static_range(STAGES - 1):
        a, b = fill(a, b, stage, K - first_k - stage * BLOCK_K)
    async_copy.wait_group(STAGES - 2)
    gl.barrier()
    stage = 0
    x = part_of(a.ring, 0, 0, A_ALONG_K, 0, SUMS)
    y = part_of(b.ring, 0, 0, B_ALONG_K, 1, SUMS)
    for k in range(first_k, last_k, BLOCK_K):
        # All threads have read the step before, whose place is filled now.
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        a, b = fill(a, b, free, K - k - (STAGES - 1) * BLOCK_K)
        for part in gl.static_range(1, BLOCK_K // PART):
            next_x = part_of(a.ring, stage, part, A_ALONG_K, 0, SUMS)
            next_y = part_of(b.ring, stage, part, B_ALONG_K, 1, SUMS)
            acc = mma_v2(x, y, acc)
            x = next_x
            y = next_y
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        async_copy.wait_group(STAGES - 2)
        # All copies of the next step are there, and all threads have read this one.
        gl.barrier()
        next_x = part_of(a.ring, stage, 0, A_ALONG_K, 0, SUMS)
        next_y = part_of(b.ring, stage, 0, B_ALONG_K, 1, SUMS)
        acc = mma_v2(x, y, acc)
        x = next_x
        y = next_y
    async_copy.wait_group(0)
    gl.barrier()
    return acc


@gluon.jit
def multistage(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, stride_az,
    stride_bz, stride_cz, bias_ptr, bias_rank, stride_bias_z, stride_bias_m, stride_bias_n, scale_a_ptr, scale_b_ptr,
    stride_scale_a, stride_scale_b, activation, slope, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr, B_ALONG_K: gl.constexpr, WIDTH: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) @ B (batch, K, N) and the epilogue, summed in fp32.

    Results pass through shared memory, where the ring was, so that each thread stores 16 bytes of a row.
    """
    SUMS: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps())
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
    VECTOR: gl.constexpr = VECTOR_BITS // c_ptr.dtype.element_ty.primitive_bitwidth
    ROWS: gl.constexpr = copy_layout([BLOCK_M, BLOCK_N], VECTOR, gl.num_warps())
    rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))
    cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ROWS))
    c = gl.convert_layout(acc.to(c_ptr.dtype.element_ty), ROWS)
    c_ptrs = c_ptr + z * stride_cz + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    gl.store(c_ptrs, c, mask=(rows[:, None] < M) & (cols[None, :] < N))


@gluon.jit
def partial(
    a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_az, stride_bz, batch, workspace_ptr,
    workspace_stride_m, workspace_stride_z, split, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr, B_ALONG_K: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Compute slice `part` of the workspace (split, batch, whole tiles of M and N) = A @ B over part of K."""
    SUMS: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps())
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


def specialise(variant: Variant) -> Specialisation:
    """Return the kernel of `variant`, with the guards of family `tile` for the same layout and aligned rows."""
    return of_ring(variant, {"product": multistage, "partial": partial})
