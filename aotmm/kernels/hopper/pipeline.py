"""The ring of shared memory between the warps that load and those that multiply."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from aotmm.kernels import GROUP_LINES, LINE_BYTES, PLANE_BUFFERS, PLANES
from aotmm.kernels.epilogue import MATRIX, adds_matrix
from aotmm.kernels.hopper.cluster import (
    PRODUCERS,
    THREADS,
    WARPS,
    Cluster,
    arrive,
    arrive_elsewhere,
    expect,
    init_barrier,
    load_for_all,
    meet,
)
from aotmm.kernels.hopper.scales import arrive_for_scales, load_scales, power_of_two, scale_buffers
from aotmm.kernels.order import count_of_groups, end_of, ends_at_once, group_of, place

GROUP = gl.constexpr(GROUP_LINES)
OF_FP32 = gl.constexpr(PLANES)
IN_TURN = gl.constexpr(PLANE_BUFFERS)


@gluon.aggregate
class Tiling:
    """The constants of a block's work.

    It multiplies ROWS rows of X by COLUMNS columns of Y: a tile, or its part of the tile of a cluster if the launch has
    clusters (CLUSTERED). X_MAP, Y_MAP and Y1_MAP are then the names of their tensor maps in PTX. X has PARTS slabs of
    ROWS // PARTS rows, one for each consumer that works on a tile. A slab's sums are COLS wide, of which those past
    COLUMNS are not computed (`mma`), or COLS and COLS1 side by side. A stage of Y fills BOXES of the boxes that the
    compiler knows: along K by one transfer, else by one for each. A matrix that is added comes through the ring too, in
    boxes of BIAS columns of each slab (`bias_boxes`). Results are stored WIDTH columns at a time, the last ones TAIL at
    a time; IN_TURNS by a loop. If GROUPED, rows of C are in groups, each with a matrix B of its own; if GROUPED_K, each
    matrix of C sums a group of K. With block scales (X_GROUP is not 0) X_GROUP rows of a slab have one, and Y_GROUP
    columns (`scales`). Each of SLICES blocks of a cluster multiplies a slice of K (`slices`). A block multiplies SERIAL
    slices one after another, and adds their sums (`mma`). If ANY_C, rows of C may lie anywhere. Consumers multiply
    Y_PLANES planes of Y that they write to shared memory: those of fp32 (`mma.multiply_split`), or one of tf32 that
    lies along K (`mma.multiply_turned`).
    """

    CLUSTERED: gl.constexpr
    X_MAP: gl.constexpr
    Y_MAP: gl.constexpr
    Y1_MAP: gl.constexpr
    PARTS: gl.constexpr
    ROWS: gl.constexpr
    COLUMNS: gl.constexpr
    COLS: gl.constexpr
    COLS1: gl.constexpr
    WIDTH: gl.constexpr
    TAIL: gl.constexpr
    BOXES: gl.constexpr
    BIAS: gl.constexpr
    IN_TURNS: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr
    X_K_MAJOR: gl.constexpr
    Y_K_MAJOR: gl.constexpr
    X_IN_REGISTERS: gl.constexpr
    SWAPPED: gl.constexpr
    GROUPED: gl.constexpr
    GROUPED_K: gl.constexpr
    PARTIAL: gl.constexpr
    PRECISE: gl.constexpr
    X_GROUP: gl.constexpr
    Y_GROUP: gl.constexpr
    SCALED: gl.constexpr
    EPILOGUE: gl.constexpr
    SLICES: gl.constexpr
    SERIAL: gl.constexpr
    ANY_C: gl.constexpr
    Y_PLANES: gl.constexpr


@gluon.aggregate
class Work:
    """The work tiles of a launch: tiles of (rows, cols) of `batch` products, times slices of K.

    `steps` is the number of steps along all of K, the first of which begins `k_shift` elements before the first along
    K. `ends` is the address of the ends of the groups of rows of C or of K, of which there are `batch`, or with
    `group_rows` of their numbers of rows (`order`). Others read neither.
    `bias_rank` is that of what is added.
    """

    rows: gl.tensor
    cols: gl.tensor
    K: gl.tensor
    k_shift: gl.base_value
    steps: gl.tensor
    batch: gl.tensor
    group_m: gl.tensor
    split: gl.tensor
    ends: gl.base_value
    group_rows: gl.base_value
    bias_rank: gl.base_value
    cluster: Cluster
    tiling: Tiling

    @gluon.jit
    def tiles(self):
        """Return the tiles down X and across Y."""
        t = self.tiling
        return gl.cdiv(self.rows, t.ROWS * self.cluster.down), gl.cdiv(self.cols, t.COLUMNS * self.cluster.across)

    @gluon.jit
    def count(self):
        """Return the number of work tiles."""
        tiles_x, tiles_y = self.tiles()
        if self.tiling.GROUPED:
            M, tiles_n, block_m = self.grouped()
            return count_of_groups(ends_at_once(), self.ends, self.batch, M, self.group_rows, tiles_n, block_m)
        else:
            return tiles_x * tiles_y * self.batch * self.split

    @gluon.jit
    def grouped(self):
        """Return the rows of C in all groups, the tiles across C, and the rows of a tile of C."""
        t = self.tiling
        tiles_x, tiles_y = self.tiles()
        if t.SWAPPED:
            return self.cols, tiles_x, t.COLUMNS * self.cluster.across
        else:
            return self.rows, tiles_y, t.ROWS * self.cluster.down

    @gluon.jit
    def place(self, unit):
        """Return (first row, first column, matrix) of this block's part of a work tile: that of the sums it writes.

        The fourth is the row of C behind the last that the tile may write, of grouped products. The matrices of slice
        `part` are numbers part * batch to part * batch + batch - 1. Slices are outermost, tiles in groups of rows of C.
        So tiles that share a slice of an operand run side by side.
        """
        t = self.tiling
        c = self.cluster
        if t.GROUPED:
            M, tiles_n, block_m = self.grouped()
            matrix, before, first, end = group_of(
                unit, ends_at_once(), self.ends, self.batch, M, self.group_rows, tiles_n, block_m
            )
            m, n = place(unit - before, gl.cdiv(end - first, block_m), tiles_n, self.group_m)
            if t.SWAPPED:
                return (n * c.down + c.x) * t.ROWS, first + (m * c.across + c.y) * t.COLUMNS, matrix, end
            else:
                return first + (m * c.down + c.x) * t.ROWS, (n * c.across + c.y) * t.COLUMNS, matrix, end
        else:
            tiles_x, tiles_y = self.tiles()
            tile = unit % (tiles_x * tiles_y)
            if t.SWAPPED:
                y, x = place(tile, tiles_y, tiles_x, self.group_m)
            else:
                x, y = place(tile, tiles_x, tiles_y, self.group_m)
            row, col = (x * c.down + c.x) * t.ROWS, (y * c.across + c.y) * t.COLUMNS
            if t.SWAPPED:
                col = self.within(col, self.cols, t.COLUMNS, t.Y_K_MAJOR)
            else:
                row = self.within(row, self.rows, t.ROWS, t.X_K_MAJOR)
            return row, col, unit // (tiles_x * tiles_y), None

    @gluon.jit
    def within(self, begin, size, SIZE: gl.constexpr, K_MAJOR: gl.constexpr):
        """Return where a tile of SIZE rows of C begins: earlier than at `begin`, if it ended past the last row there.

        TMA fills lines past the end slowly. Rows that two tiles compute have the same bits. But a matrix that is added
        may lie where the result comes to, and block scales are those of tiles at multiples of their size. Columns of C
        stay: nothing is gained, and stores are wider where they begin at multiples.
        """
        t = self.tiling
        if K_MAJOR and t.X_GROUP == 0:
            moved = gl.minimum(begin, gl.maximum(size - SIZE, 0))
            return gl.where(self.bias_rank == MATRIX, begin, moved) if adds_matrix(t.EPILOGUE) else moved
        else:
            return begin

    @gluon.jit
    def steps_of(self, matrix):
        """Return the first step along K of the sums of a matrix, and the first one after them.

        Steps of a group of K are counted from its first element.
        """
        t = self.tiling
        if t.PARTIAL:
            part = matrix // self.batch
            return part * self.steps // self.split, (part + 1) * self.steps // self.split
        elif t.SLICES > 1:
            part = self.cluster.number
            return part * self.steps // t.SLICES, (part + 1) * self.steps // t.SLICES
        elif t.GROUPED_K:
            return gl.to_tensor(0), gl.cdiv(gl.maximum(self.size(matrix), 0), t.BLOCK_K)
        else:
            return gl.to_tensor(0), self.steps

    @gluon.jit
    def size(self, matrix):
        """Return the elements of a group of K, of all of K if it has no groups."""
        if self.tiling.GROUPED_K:
            return end_of(matrix, self.ends, self.batch, self.K) - self.begin(matrix)
        else:
            return self.K

    @gluon.jit
    def begin(self, matrix):
        """Return the element of K at which step 0 of a matrix begins."""
        if self.tiling.GROUPED_K:
            return end_of(matrix - 1, self.ends, self.batch, self.K)
        else:
            return 0 - self.k_shift  # before the first element TMA finds zeros

    @gluon.jit
    def stages(self, unit):
        """Return the stages of the ring that the operands of a work tile fill."""
        if self.tiling.GROUPED_K:
            _, _, matrix, _ = self.place(unit)
            first, end = self.steps_of(matrix)
            return end - first
        else:
            return self.steps

    @gluon.jit
    def member(self, matrix):
        """Return the number in the batch."""
        return matrix % self.batch if self.tiling.PARTIAL else matrix


@gluon.jit
def of_batch(member, stride):
    """Return the number of a member's matrix in its tensor map, which has one if all members share it."""
    return gl.where(stride == 0, 0, member)


@gluon.constexpr_function
def of_matrix(layout):
    """Return the layout in shared memory of boxes of one matrix."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


@gluon.constexpr_function
def of_plane(width):
    """Return the layout in shared memory of a plane of Y, whose lines have so many numbers of bf16."""
    return gl.NVMMASharedLayout(min(2 * width, LINE_BYTES), 16, rank=2)


@gluon.constexpr_function
def of_turned():
    """Return the layout in shared memory of a plane of Y of 32-bit numbers, whose lines lie along K."""
    return gl.NVMMASharedLayout(LINE_BYTES, 32, rank=2)


@gluon.aggregate
class Ring:
    """STAGES buffers of boxes of X and Y in shared memory; `full` and `empty` tell each stage's turn.

    Boxes of a matrix that is added have stages of their own (`bias_box`). A stage also has the block scales of
    its step, if there are any. A consumer warpgroup releases a stage ONCE for each peer, in clusters without block
    scales, or once for each of its warps.

    Where consumers write planes of Y to shared memory, they release a stage when they have done so and have loaded X:
    `planes_full` and `planes_empty` tell for each stage that all have written their parts, and have multiplied them.
    """

    x: gl.shared_memory_descriptor
    y: gl.shared_memory_descriptor
    y1: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    x_scales: gl.base_value
    y_scales: gl.base_value
    planes: gl.base_value
    planes_full: gl.base_value
    planes_empty: gl.base_value
    ONCE: gl.constexpr


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Allocate COUNT boxes in shared memory."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape[1:], of_matrix(desc.layout))


@gluon.jit
def barriers(COUNT: gl.constexpr, arrivals):
    """Make COUNT barriers that so many arrivals complete."""
    found = mbarrier.allocate_mbarrier(batch=COUNT)
    for i in gl.static_range(COUNT):
        init_barrier(found.index(i), arrivals)
    return found


@gluon.jit
def make_ring(x_desc, y_desc, y1_desc, cluster, tiling):
    """Make an empty ring.

    A stage is empty when every consumer of all peers has left it. It is full when its bytes are there, every producer
    here has seen that it is empty, and every peer that its own is. Otherwise a peer that needs nothing of a third one
    could run ahead of it and release a stage twice; and a producer whose turn it is not could come so late that the
    stage is empty once more, and wait for a time that may never come.
    """
    t = tiling
    SCALED: gl.constexpr = t.X_GROUP > 0
    ONCE: gl.constexpr = t.CLUSTERED and not SCALED
    HERE: gl.constexpr = PRODUCERS if t.CLUSTERED else 1
    full = barriers(t.STAGES, cluster.peers() - 1 + HERE + (THREADS * HERE if SCALED else 0))
    empty = barriers(t.STAGES, (1 if ONCE else WARPS) * t.PARTS * cluster.peers())
    x = buffers(x_desc, t.STAGES * t.PARTS)
    y = buffers(y_desc, t.STAGES * t.BOXES)
    y1 = buffers(y1_desc, t.STAGES) if t.COLS1 > 0 else y
    if SCALED:
        x_scales = scale_buffers(power_of_two(t.ROWS // t.X_GROUP), t.STAGES)
        y_scales = scale_buffers(t.COLS // t.Y_GROUP, t.STAGES)
        return Ring(x, y, y1, full, empty, x_scales, y_scales, 0, 0, 0, ONCE)
    elif t.Y_PLANES > 0:
        SHAPE: gl.constexpr = y_desc.block_type.shape[1:]
        if t.Y_PLANES == OF_FP32:
            planes = gl.allocate_shared_memory(gl.bfloat16, [OF_FP32 * IN_TURN] + SHAPE, of_plane(SHAPE[1]))
        else:
            LINES: gl.constexpr = of_turned()
            planes = gl.allocate_shared_memory(gl.float32, [IN_TURN, SHAPE[1], SHAPE[0]], LINES)
        made, used = barriers(t.STAGES, t.PARTS), barriers(t.STAGES, t.PARTS)
        return Ring(x, y, y1, full, empty, 0, 0, planes, made, used, ONCE)
    else:
        return Ring(x, y, y1, full, empty, 0, 0, 0, 0, 0, ONCE)


@gluon.constexpr_function
def bias_boxes(tiling: Any) -> int:
    """Return the boxes of each slab, of a matrix that is added, that a stage has: more than one if Y has room for them.

    The fewer stages, the sooner producers may load the last box: each waits until a step of K has left its stage.
    """
    whole = tiling.BOXES == 1 and tiling.COLS1 == 0
    return max(tiling.COLS // tiling.ROWS, 1) if whole else 1


@gluon.jit
def bias_box(ring, bias_desc, stage, SLAB: gl.constexpr, INDEX: gl.constexpr, tiling):
    """Return the place of a slab's box number INDEX in a stage of a matrix that is added: the buffer of X, or of Y."""
    t = tiling
    BOXES: gl.constexpr = bias_boxes(t)
    BOX: gl.constexpr = bias_desc.block_type.shape[1:]
    if BOXES > 1:
        boxes = ring.y.index(stage).reinterpret(bias_desc.dtype, [BOXES * t.PARTS] + BOX, of_matrix(bias_desc.layout))
        return boxes.index(INDEX * t.PARTS + SLAB)
    else:
        return ring.x.index(stage * t.PARTS + SLAB).reinterpret(bias_desc.dtype, BOX, of_matrix(bias_desc.layout))


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring; the phase flips when the ring wraps."""
    wraps = (stage == STAGES - 1).to(gl.int32)
    return (stage + 1) * (1 - wraps), phase ^ wraps


@gluon.jit
def load(
    desc, z, along, k, bar, smem, cluster, tiling, K_MAJOR: gl.constexpr, ALONG: gl.constexpr,
    MAP: gl.constexpr = None, SEVERAL: gl.constexpr = False, mask=None, LINES: gl.constexpr = None,
):  # fmt: skip
    """Start copying ALONG rows of X or columns of Y from `along` on, and BLOCK_K of K from `k` on, to a stage.

    With clusters and a MAP, SEVERAL sends them to that stage of all blocks of `mask`; else they come to this block's.
    Boxes along K are LINES high then.
    """
    BLOCK_K: gl.constexpr = tiling.BLOCK_K
    if tiling.CLUSTERED and MAP is not None:
        BITS: gl.constexpr = desc.dtype.primitive_bitwidth
        if K_MAJOR:
            load_for_all(smem, k, along, z, bar, SEVERAL, mask, cluster, BITS, MAP, BLOCK_K, ALONG, LINES)
        else:
            load_for_all(smem, along, k, z, bar, SEVERAL, mask, cluster, BITS, MAP, ALONG, BLOCK_K, BLOCK_K)
    else:
        gl.barrier()  # of the producers: the barrier expects these bytes before any of them can come
        if K_MAJOR:
            tma.async_load(desc, [z, along, k], bar, smem)
        else:
            tma.async_load(desc, [z, k, along], bar, smem)


@gluon.jit
def load_x(desc, z, along, k, bar, ring, stage, cluster, tiling, PART: gl.constexpr, SEVERAL: gl.constexpr):
    """Start copying the rows of X, a box of PART rows for each slab."""
    t = tiling
    if t.CLUSTERED:
        x = ring.x.index(stage * t.PARTS)
        load(desc, z, along, k, bar, x, cluster, t, t.X_K_MAJOR, t.ROWS, t.X_MAP, SEVERAL, cluster.of_x, PART)
    else:
        for i in gl.static_range(t.PARTS):
            x = ring.x.index(stage * t.PARTS + i)
            load(desc, z, along + i * PART, k, bar, x, cluster, t, t.X_K_MAJOR, PART)


@gluon.jit
def load_y(desc, z, along, k, bar, ring, stage, cluster, tiling, COLS: gl.constexpr, SEVERAL: gl.constexpr):
    """Start copying COLS columns of Y, all of a stage's boxes."""
    t = tiling
    if t.Y_K_MAJOR or t.CLUSTERED:
        y = ring.y.index(stage * t.BOXES)
        load(desc, z, along, k, bar, y, cluster, t, t.Y_K_MAJOR, COLS, t.Y_MAP, SEVERAL, cluster.of_y, COLS)
    else:
        BOX: gl.constexpr = COLS // t.BOXES
        for i in gl.static_range(t.BOXES):
            load(desc, z, along + i * BOX, k, bar, ring.y.index(stage * t.BOXES + i), cluster, t, t.Y_K_MAJOR, BOX)


@gluon.jit
def release(ring, cluster, stage, pred):
    """Release a stage of all peers, as a consumer that has read all of it.

    Each peer gets one arrival of a warpgroup if ring.ONCE, else one of each of its warps. One is enough where wgmma
    reads the stage, which ends for all warps of a warpgroup together; X in registers was loaded before. It saves three
    of four messages to other blocks. CUTLASS releases stages in the same way (`PipelineTmaAsync`).
    """
    arrive(ring.empty.index(stage), cluster, pred, ring.ONCE)


@gluon.jit
def pass_planes(ring, tiling, stage):
    """Count a stage of an added matrix, which has no planes, as written and multiplied.

    So the barriers of planes keep the turns of the ring.
    """
    if tiling.Y_PLANES > 0:
        mbarrier.arrive(ring.planes_full.index(stage), count=1)
        mbarrier.arrive(ring.planes_empty.index(stage), count=1)


@gluon.jit
def produce_boxes(bias_desc, ring, work, epilogue, z, row, col, stage, phase, X: gl.constexpr):
    """Fill stages from `stage` on with boxes of a matrix that is added to a tile; return the stage and phase after."""
    t = work.tiling
    c = work.cluster
    PART: gl.constexpr = t.ROWS // t.PARTS
    BOXES: gl.constexpr = bias_boxes(t)
    count = gl.where(epilogue.boxed(), BOXES * t.PARTS * bias_desc.nbytes_per_cta, 0) if X else gl.to_tensor(0)
    member = of_batch(z, epilogue.stride_bias_z)
    for i in range(epilogue.stages(t)):
        bar = ring.full.index(stage)
        mbarrier.wait(ring.empty.index(stage), phase)
        expect(bar, count, c)
        if X:
            arrive_elsewhere(bar, c)
        if epilogue.boxed():
            for b in gl.static_range(BOXES):
                for j in gl.static_range(t.PARTS):
                    box = bias_box(ring, bias_desc, stage, j, b, t)
                    n = col + (i * BOXES + b) * t.BIAS
                    load(bias_desc, member, row + j * PART, n, bar, box, c, t, not t.SWAPPED, PART)
        arrive_for_scales(bar, t)
        stage, phase = next_stage(stage, phase, t.STAGES)
    return stage, phase


@gluon.jit
def box_lines(LINES: gl.constexpr, K_MAJOR: gl.constexpr, size):
    """Return the lines of a box of LINES: along K no more than the matrix has, in whole groups (`TensorMap.fits`)."""
    if K_MAJOR:
        return gl.minimum(LINES, gl.cdiv(size, GROUP) * GROUP)
    else:
        return LINES


@gluon.jit
def lines(work, PART: gl.constexpr, COLS: gl.constexpr):
    """Return the lines of a stage: of its boxes of PART rows of X, and of Y, of which the first has COLS columns."""
    t = work.tiling
    found = t.PARTS * box_lines(PART, t.X_K_MAJOR, work.rows) + box_lines(COLS, t.Y_K_MAJOR, work.cols)
    if t.COLS1 > 0:
        found += box_lines(t.COLS1, t.Y_K_MAJOR, work.cols)
    return found


@gluon.aggregate
class Sources:
    """What producers load: tensor maps and block scales.

    The strides of X and Y lead from one product of a batch to the next.
    """

    x: gl.base_value
    y: gl.base_value
    y1: gl.base_value
    bias: gl.base_value
    stride_xz: gl.tensor
    stride_yz: gl.tensor
    x_scales: gl.base_value
    y_scales: gl.base_value


@gluon.aggregate
class Task:
    """What a producer loads for a work tile: rows of X from `row` and columns of Y from `col` on, over some steps of K.

    The steps are those from `first` to before `end`, of matrices number `z` of the batch.
    """

    row: gl.tensor
    col: gl.tensor
    matrix: gl.tensor
    z: gl.tensor
    first: gl.tensor
    end: gl.tensor


@gluon.jit
def task_of(work, unit):
    """Return the task of work tile number `unit`."""
    row, col, matrix, _ = work.place(unit)
    first, end = work.steps_of(matrix)
    return Task(row, col, matrix, work.member(matrix), first, end)


@gluon.jit
def fill(sources, ring, work, epilogue, task, total, count, X: gl.constexpr, Y: gl.constexpr, SEVERAL: gl.constexpr):
    """Fill stage after stage with boxes of X, of Y or of both, as a producer warp that expects `count` bytes for each.

    There are `total` work tiles; `task` is the first. If SEVERAL, peers take turns: each box is for all of them. Return
    the stage and phase after the last.
    """
    t = work.tiling
    c = work.cluster
    PART: gl.constexpr = t.ROWS // t.PARTS
    BOX: gl.constexpr = sources.y.block_type.shape[1 if t.Y_K_MAJOR else 2]
    COLS: gl.constexpr = BOX * t.BOXES
    stage = 0
    phase = 1
    for unit in range(c.first, total, c.count):
        begin = work.begin(task.matrix)
        x_z = of_batch(task.z, sources.stride_xz)
        y_z = of_batch(task.z, sources.stride_yz)
        for step in range(task.first, task.end):
            k = begin + step * t.BLOCK_K
            bar = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            expect(bar, count, c)
            if X:
                arrive_elsewhere(bar, c)
                if c.loads_x(step) if SEVERAL else True:
                    load_x(sources.x, x_z, task.row, k, bar, ring, stage, c, t, PART, SEVERAL)
            if Y:
                if c.loads_y(step) if SEVERAL else True:
                    load_y(sources.y, y_z, task.col, k, bar, ring, stage, c, t, COLS, SEVERAL)
                    if t.COLS1 > 0:
                        y1 = ring.y1.index(stage)
                        load(
                            sources.y1, y_z, task.col + t.COLS, k, bar, y1, c, t, t.Y_K_MAJOR, t.COLS1, t.Y1_MAP,
                            SEVERAL, c.of_y, t.COLS1,
                        )  # fmt: skip
            load_scales(ring, bar, sources.x_scales, sources.y_scales, task.z, task.row, task.col, step, stage, t)
            stage, phase = next_stage(stage, phase, t.STAGES)
        if adds_matrix(t.EPILOGUE):
            stage, phase = produce_boxes(
                sources.bias, ring, work, epilogue, task.z, task.row, task.col, stage, phase, X
            )
        if unit + c.count < total:
            task = task_of(work, unit + c.count)
    return stage, phase


@gluon.jit
def produce(sources, ring, work, epilogue):
    """Fill stage after stage with the boxes that this block's consumers multiply, as a producer warp.

    In clusters there are two. One tells the peers that a stage is being filled and loads X, the other loads Y: the
    instructions for all of it would take one warp longer than tensor cores take for a step of a small tile. Each has
    loops of its own: with a branch in a loop the assembler would keep all addresses of the kernel, those of consumers
    too, in registers of threads, and move them to uniform ones in each step.
    """
    t = work.tiling
    c = work.cluster
    EARLY: gl.constexpr = not (t.GROUPED or t.GROUPED_K)
    PART: gl.constexpr = t.ROWS // t.PARTS
    BOX: gl.constexpr = sources.y.block_type.shape[1 if t.Y_K_MAJOR else 2]
    bytes_ = lines(work, PART, BOX * t.BOXES) * (t.BLOCK_K * sources.y.dtype.primitive_bitwidth // 8)
    # Operands, and the ends of groups, may be results of the previous kernel. The first task, a chain of divisions, is
    # found while that one ends. Consumers come after, through `full`.
    if not EARLY:
        gdc_wait()
    total = work.count()
    task = task_of(work, c.first)
    meet(c)
    if EARLY:
        # Always so. It is asked because the assembler would wait first and divide then.
        if task.row | task.col | task.matrix | task.z | task.first | task.end | bytes_ >= 0:
            gdc_wait()
    if not t.CLUSTERED:
        fill(sources, ring, work, epilogue, task, total, bytes_, True, True, False)
    else:
        if c.first_producer():
            if c.across > 1:
                stage, phase = fill(sources, ring, work, epilogue, task, total, bytes_, True, False, True)
            else:
                stage, phase = fill(sources, ring, work, epilogue, task, total, bytes_, True, False, False)
        else:
            none = gl.to_tensor(0)
            if c.down > 1:
                stage, phase = fill(sources, ring, work, epilogue, task, total, none, False, True, True)
            else:
                stage, phase = fill(sources, ring, work, epilogue, task, total, none, False, True, False)
        for _ in range(t.STAGES):  # a block must not leave while others may still arrive at its barriers
            mbarrier.wait(ring.empty.index(stage), phase)
            stage, phase = next_stage(stage, phase, t.STAGES)
