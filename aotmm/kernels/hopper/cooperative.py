"""Families `cooperative` and `swapped`: consumer warpgroups of a block multiply the slabs of one tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents

from aotmm.kernels.epilogue import adds_matrix
from aotmm.kernels.hopper.cluster import PRODUCERS, cluster_of, meet
from aotmm.kernels.hopper.epilogue import (
    Epilogue,
    add_boxes,
    await_operands,
    epilogue_memory,
    fetch_factors,
    put_factors,
    store_tile,
)
from aotmm.kernels.hopper.mma import drain, multiply
from aotmm.kernels.hopper.pipeline import Sources, Tiling, Work, buffers, make_ring, produce
from aotmm.kernels.hopper.scales import block_scales
from aotmm.kernels.hopper.slices import add_slices, expect_slices, make_exchange


@gluon.jit
def consume(ring, exchange, bias_desc, c_desc, c1_desc, c_smem, c1_smem, memory, work, epilogue, SLAB: gl.constexpr):
    """Multiply slab SLAB of tile after tile, as a consumer warpgroup."""
    t = work.tiling
    expect_slices(exchange, work.cluster, t, SLAB)
    meet(work.cluster)
    await_operands(epilogue, t)
    stage = 0
    phase = 0
    for unit in range(work.cluster.first, work.count(), work.cluster.count):
        row, col, matrix, limit = work.place(unit)
        row += SLAB * (t.ROWS // t.PARTS)
        held = fetch_factors(matrix, row, col, memory, epilogue, t)
        first, end = work.steps_of(matrix)
        size = work.size(matrix)
        acc, acc1, stage, phase = multiply(ring, work.cluster, t, SLAB, stage, phase, first, end, size)
        acc, acc1 = drain(ring, work.cluster, t, acc, acc1, stage, end > first if t.GROUPED_K else True)
        acc = add_slices(acc, exchange, work.cluster, t, SLAB)
        factors = put_factors(memory, SLAB, held, epilogue, t)
        if adds_matrix(t.EPILOGUE) and epilogue.stages(t) > 0:
            acc, acc1, stage, phase = add_boxes(
                acc, acc1, matrix, row, col, ring, work.cluster, bias_desc, SLAB, stage, phase, factors, epilogue, t
            )  # fmt: skip
        if t.SLICES == 1 or work.cluster.number == SLAB:
            store_tile(
                acc, acc1, matrix, row, col, limit, c_desc, c1_desc, c_smem.index(SLAB), c1_smem.index(SLAB), factors,
                epilogue, t,
            )  # fmt: skip
    if not t.PARTIAL:
        tma.store_wait(0)


@gluon.jit
def cooperative(
    x_desc, y_desc, y1_desc, bias_desc, c_desc, c1_desc, M, N, K, k_shift, batch, stride_az, stride_bz, group_m, split,
    workspace_ptr, workspace_stride_m, workspace_stride_z, bias_ptr, bias_rank, stride_bias_z, stride_bias_m,
    stride_bias_n, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b, stride_scale_bz, activation, slope, c_ptr,
    stride_cz, stride_cm, offsets_ptr, group_rows, block_scale_a_ptr, block_scale_b_ptr, stride_block_az,
    stride_block_am, stride_block_ak, stride_block_bz, stride_block_bk, stride_block_bn, block_columns,
    CLUSTERED: gl.constexpr, X_MAP: gl.constexpr, Y_MAP: gl.constexpr, Y1_MAP: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, COLS: gl.constexpr, COLS1: gl.constexpr, WIDTH: gl.constexpr,
    TAIL: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr, IN_TURNS: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, X_IN_REGISTERS: gl.constexpr,
    SWAPPED: gl.constexpr, GROUPED: gl.constexpr, GROUPED_K: gl.constexpr, PARTIAL: gl.constexpr, PRECISE: gl.constexpr,
    X_GROUP: gl.constexpr, Y_GROUP: gl.constexpr, SCALED: gl.constexpr, EPILOGUE: gl.constexpr, SLICES: gl.constexpr,
    SERIAL: gl.constexpr, ANY_C: gl.constexpr, Y_PLANES: gl.constexpr, PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute C (batch, M, N) = A (batch, M, K) @ B (batch, K, N) and the epilogue, or partial sums; K is not 0."""
    gdc_launch_dependents()  # the next kernel may start when blocks of this one have left; it waits for all of them
    t = Tiling(
        CLUSTERED, X_MAP, Y_MAP, Y1_MAP, PARTS, ROWS, COLUMNS, COLS, COLS1, WIDTH, TAIL, BOXES, BIAS, IN_TURNS, BLOCK_K,
        STAGES, X_K_MAJOR, Y_K_MAJOR, X_IN_REGISTERS, SWAPPED, GROUPED, GROUPED_K, PARTIAL, PRECISE, X_GROUP, Y_GROUP,
        SCALED, EPILOGUE, SLICES, SERIAL, ANY_C, Y_PLANES,
    )  # fmt: skip
    cluster = cluster_of(CLUSTERED, SLICES, SWAPPED)
    steps = gl.cdiv(K + k_shift, BLOCK_K)
    work = Work(
        N if SWAPPED else M, M if SWAPPED else N, K, k_shift, steps, batch, group_m, split, offsets_ptr, group_rows,
        bias_rank, cluster, t,
    )  # fmt: skip
    stride_xz = stride_bz if SWAPPED else stride_az
    stride_yz = stride_az if SWAPPED else stride_bz
    x_scales, y_scales = block_scales(
        block_scale_a_ptr, block_scale_b_ptr, stride_block_az, stride_block_am, stride_block_ak, stride_block_bz,
        stride_block_bk, stride_block_bn, block_columns, M, N, t,
    )  # fmt: skip
    ring = make_ring(x_desc, y_desc, y1_desc, cluster, t)
    c = ring.x if PARTIAL else buffers(c_desc, PARTS)
    c1 = buffers(c1_desc, PARTS) if TAIL < WIDTH and not PARTIAL else c
    memory = epilogue_memory(t, PARTS)
    exchange = make_exchange(t)
    epilogue = Epilogue(
        M, N, workspace_ptr, workspace_stride_m, workspace_stride_z, bias_ptr, bias_rank, stride_bias_z, stride_bias_m,
        stride_bias_n, scale_a_ptr, scale_b_ptr, stride_scale_a, stride_scale_b, stride_scale_bz, activation, slope,
        c_ptr, stride_cz, stride_cm,
    )  # fmt: skip
    sources = Sources(x_desc, y_desc, y1_desc, bias_desc, stride_xz, stride_yz, x_scales, y_scales)
    # Warps that load, and their registers. In clusters the two others of their warpgroup only take part in `meet`.
    PRODUCING: gl.constexpr = [PRODUCERS, 2] if CLUSTERED else [1]
    FEW: gl.constexpr = [PRODUCER, PRODUCER] if CLUSTERED else [PRODUCER]
    if CLUSTERED:
        gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}")
    if PARTS == 1:
        gl.warp_specialize(
            [
                (consume, (ring, exchange, bias_desc, c_desc, c1_desc, c, c1, memory, work, epilogue, gl.constexpr(0))),
                (produce, (sources, ring, work, epilogue)),
            ]
            + ([(meet, (cluster,))] if CLUSTERED else []),
            PRODUCING,
            FEW,
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (consume, (ring, exchange, bias_desc, c_desc, c1_desc, c, c1, memory, work, epilogue, gl.constexpr(0))),
                (consume, (ring, exchange, bias_desc, c_desc, c1_desc, c, c1, memory, work, epilogue, gl.constexpr(1))),
                (produce, (sources, ring, work, epilogue)),
            ]
            + ([(meet, (cluster,))] if CLUSTERED else []),
            [4] + PRODUCING,
            [CONSUMER] + FEW,
        )
    else:
        gl.warp_specialize(
            [
                (consume, (ring, exchange, bias_desc, c_desc, c1_desc, c, c1, memory, work, epilogue, gl.constexpr(0))),
                (consume, (ring, exchange, bias_desc, c_desc, c1_desc, c, c1, memory, work, epilogue, gl.constexpr(1))),
                (consume, (ring, exchange, bias_desc, c_desc, c1_desc, c, c1, memory, work, epilogue, gl.constexpr(2))),
                (produce, (sources, ring, work, epilogue)),
            ]
            + ([(meet, (cluster,))] if CLUSTERED else []),
            [4, 4] + PRODUCING,
            [CONSUMER, CONSUMER] + FEW,
        )
