"""What the warp-specialised kernels for Hopper (sm90) share. They are written in Gluon.

One warp copies boxes of both operands, and of a matrix that is added to their product, into a ring of shared memory
through tensor maps (TMA); consumer warpgroups multiply them with wgmma, one in flight, and hand every stage back
through a barrier. Sums leave through shared memory and TMA stores while the next tile is being loaded: blocks are
persistent. Widths that are no power of two are one instruction where Y lies along K (`wgmma`), else two accumulators
side by side.

The multiplication is of X (rows, K) by Y (K, columns): X = A and Y = B, or transposed, X = B^T and Y = A^T (family
`swapped`), because a wgmma always has 64 rows and C may have fewer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from aotmm.kernel import Promise
from aotmm.kernels import (
    LINE_BYTES,
    MOST_COLUMNS,
    VECTOR_BYTES,
    WARPGROUP,
    WORKSPACE_TYPES,
    Descriptor,
    Specialisation,
    Variant,
)
from aotmm.kernels.epilogue import MATRIX, VECTOR, activate, epilogue_types, linear
from aotmm.kernels.order import place
from aotmm.kernels.wgmma import GROUP_LINES, multiply_add
from aotmm.problem import DTYPES

# Registers per thread, by consumer warpgroups: what the 64 K registers of a multiprocessor leave beside the producer.
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = {1: 240, 2: 232, 3: 160}
LEAST_WIDTH = 16  # columns of a wgmma here: one 32-byte swizzle
BARRIER_BYTES = 512  # more than all barriers take
BOX_ALIGNMENT = gl.constexpr(VECTOR_BYTES)  # of a matrix that TMA copies, and of its rows
SWIZZLED_BYTES = gl.constexpr(LINE_BYTES)
FILLED_ROWS = gl.constexpr(16)  # of a matrix that TMA cannot copy, at once: 8 elements for each thread


@gluon.aggregate
class Tiling:
    """What a block computes at a time, and how; all of it is constant.

    CTAS blocks of a cluster share a tile: they have equal parts of the rows of each slab, and the same columns.
    X has PARTS slabs of ROWS // PARTS rows, one for each consumer that works on a tile; Y has COLUMNS columns. A slab's
    sums are COLS wide, of which those past COLUMNS are not computed (`wgmma`), or COLS and COLS1 side by side. A stage
    of Y is one transfer, into BOXES of the boxes that the compiler knows. A matrix that is added comes through the ring
    too, BIAS columns of each slab in a stage. Results leave WIDTH columns at a time, the last of them TAIL at a time;
    IN_TURNS by a loop.
    """

    CTAS: gl.constexpr
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
    GROUP: gl.constexpr
    STAGES: gl.constexpr
    X_K_MAJOR: gl.constexpr
    Y_K_MAJOR: gl.constexpr
    SWAPPED: gl.constexpr
    PARTIAL: gl.constexpr
    PRECISE: gl.constexpr
    SCALED: gl.constexpr
    EPILOGUE: gl.constexpr


@gluon.aggregate
class Work:
    """The units of a launch: tiles of (rows, cols), times slices of `steps` steps along K."""

    rows: gl.tensor
    cols: gl.tensor
    steps: gl.tensor
    split: gl.tensor
    tiling: Tiling

    @gluon.jit
    def count(self):
        """How many units there are."""
        t = self.tiling
        return gl.cdiv(self.rows, t.ROWS) * gl.cdiv(self.cols, t.COLUMNS) * self.split

    @gluon.jit
    def place(self, unit):
        """(first row, first column, slice) of a unit: slices outermost, tiles in groups of GROUP rows of tiles.

        Tiles that share a slice of an operand are so launched side by side.
        """
        t = self.tiling
        tiles_x = gl.cdiv(self.rows, t.ROWS)
        tiles_y = gl.cdiv(self.cols, t.COLUMNS)
        x, y = place(unit % (tiles_x * tiles_y), tiles_x, tiles_y, t.GROUP)
        return x * t.ROWS, y * t.COLUMNS, unit // (tiles_x * tiles_y)

    @gluon.jit
    def steps_of(self, part):
        """First step of a slice, and the first that is no more of it."""
        return part * self.steps // self.split, (part + 1) * self.steps // self.split


@gluon.aggregate
class Ring:
    """STAGES buffers of boxes of X and Y in shared memory; `full` and `empty` say whose turn each stage is.

    Boxes of a matrix that is added have stages of their own, in the buffers of X.

    `all_empty` says it for all blocks of the cluster, in the first of them, which loads Y for all.
    """

    x: gl.shared_memory_descriptor
    y: gl.shared_memory_descriptor
    y1: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    all_empty: gl.shared_memory_descriptor


@gluon.aggregate
class Ending:
    """The operands of the epilogue, and where partial sums go."""

    M: gl.tensor
    N: gl.tensor
    workspace_ptr: gl.tensor
    workspace_stride_m: gl.tensor
    workspace_stride_z: gl.tensor
    bias_ptr: gl.tensor
    bias_rank: gl.tensor
    stride_bias_m: gl.tensor
    stride_bias_n: gl.tensor
    scale_a_ptr: gl.tensor
    scale_b_ptr: gl.tensor
    stride_scale_a: gl.tensor
    stride_scale_b: gl.tensor
    activation: gl.tensor
    slope: gl.tensor

    @gluon.jit
    def stages(self, tiling):
        """How many stages of the ring a matrix takes that is added to a tile; 0 if none is."""
        t = tiling
        if t.EPILOGUE == "none":
            return 0
        else:
            return gl.where(self.bias_rank == MATRIX, (t.COLUMNS + t.BIAS - 1) // t.BIAS, 0)

    @gluon.jit
    def boxed(self):
        """Whether TMA can copy that matrix. If not, its tensor map is empty."""
        BYTES: gl.constexpr = self.bias_ptr.dtype.element_ty.primitive_bitwidth // 8
        odd = (self.bias_ptr.to(gl.int64) | self.stride_bias_m * BYTES) % BOX_ALIGNMENT
        return (self.stride_bias_n == 1) & (odd == 0)


@gluon.aggregate
class Factors:
    """What the epilogue needs of one slab, in fp32: one number per row of C, and two per column."""

    scale_a: gl.base_value
    scale_b: gl.base_value
    bias: gl.base_value


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """COUNT boxes in shared memory."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr, SHARED: gl.constexpr = False):
    """COUNT barriers, each of which ARRIVALS arrivals complete: of every block, or SHARED, of both blocks of a pair."""
    found = mbarrier.allocate_mbarrier(batch=COUNT, two_ctas=SHARED)
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def make_ring(x_desc, y_desc, y1_desc, tiling):
    """An empty ring. A stage is full when its bytes are there, and empty when every consumer has left it."""
    t = tiling
    full = barriers(t.STAGES, 1)
    empty = barriers(t.STAGES, t.PARTS)
    all_empty = barriers(t.STAGES, t.PARTS, True) if t.CTAS > 1 else empty
    x = buffers(x_desc, t.STAGES * t.PARTS)
    y = buffers(y_desc, t.STAGES * t.BOXES)
    y1 = buffers(y1_desc, t.STAGES) if t.COLS1 > 0 else y
    return Ring(x, y, y1, full, empty, all_empty)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage of the ring after this one; the phase flips when the ring wraps."""
    wraps = (stage == STAGES - 1).to(gl.int32)
    return (stage + 1) * (1 - wraps), phase ^ wraps


@gluon.jit
def load(desc, along, k, bar, smem, K_MAJOR: gl.constexpr, MULTICAST: gl.constexpr):
    """Starts copying a box that begins at `along` (row of X or column of Y) and `k`; MULTICAST, to every block."""
    gl.barrier()  # of this warp: the barrier expects these bytes before any of them can come
    if K_MAJOR:
        tma.async_load(desc, [along, k], bar, smem, multicast=MULTICAST)
    else:
        tma.async_load(desc, [k, along], bar, smem, multicast=MULTICAST)


@gluon.jit
def produce(x_desc, y_desc, y1_desc, bias_desc, ring, work, ending):
    """The producer warp: fills stage after stage with what the consumers of this block will multiply."""
    gdc_wait()  # operands may be results of the kernel before this one; consumers come after, through `full`
    t = work.tiling
    Y_BYTES: gl.constexpr = t.COLUMNS * t.BLOCK_K * y_desc.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = t.PARTS * x_desc.nbytes_per_cta + Y_BYTES
    TOGETHER: gl.constexpr = t.CTAS > 1
    stage = 0
    phase = 1
    for unit in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        row, col, part = work.place(unit)
        first, end = work.steps_of(part)
        for step in range(first, end):
            k = step * t.BLOCK_K
            bar = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            for i in gl.static_range(t.PARTS):
                x = row + i * (t.ROWS // t.PARTS)
                load(x_desc, x, k, bar, ring.x.index(stage * t.PARTS + i), t.X_K_MAJOR, False)
            if TOGETHER:
                mbarrier.wait(ring.all_empty.index(stage), phase)
            load(y_desc, col, k, bar, ring.y.index(stage * t.BOXES), t.Y_K_MAJOR, TOGETHER)
            if t.COLS1 > 0:
                load(y1_desc, col + t.COLS, k, bar, ring.y1.index(stage), t.Y_K_MAJOR, TOGETHER)
            stage, phase = next_stage(stage, phase, t.STAGES)
        if t.EPILOGUE != "none":
            for i in range(ending.stages(t)):
                bar = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                if ending.boxed():
                    mbarrier.expect(bar, t.PARTS * bias_desc.nbytes_per_cta)
                    for j in gl.static_range(t.PARTS):
                        x = row + j * (t.ROWS // t.PARTS)
                        box = bias_box(ring, bias_desc, stage * t.PARTS + j)
                        load(bias_desc, x, col + i * t.BIAS, bar, box, not t.SWAPPED, False)
                else:
                    mbarrier.arrive(bar)  # consumers fetch it themselves
                stage, phase = next_stage(stage, phase, t.STAGES)


@gluon.jit
def as_factor(smem, TRANSPOSED: gl.constexpr):
    """One buffer of a ring, as the multiplication sees it."""
    return smem.permute((1, 0)) if TRANSPOSED else smem


@gluon.jit
def hand_back(ring, tiling, stage, pred):
    """This consumer is done with a stage."""
    mbarrier.arrive(ring.empty.index(stage), pred=pred)
    if tiling.CTAS > 1:
        mbarrier.arrive(ring.all_empty.index(stage), pred=pred)


@gluon.jit
def multiply(ring, tiling, SLAB: gl.constexpr, stage, phase, first, end, added_to=None, added_phase=0, awaited=-1):
    """The sums of slab SLAB over steps `first` to `end`, which begin at `stage`; the last product may be in flight.

    Step `awaited` waits for the barrier `added_to` too, if there is one and `awaited` is not negative.
    """
    t = tiling
    PART: gl.constexpr = t.ROWS // t.PARTS
    COLS1: gl.constexpr = t.COLS1 if t.COLS1 > 0 else t.COLS  # of an accumulator that is not used, and vanishes
    BITS: gl.constexpr = ring.x.dtype.primitive_bitwidth
    PAIR: gl.constexpr = [[1, 0]] if t.CTAS > 1 else []
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, t.COLS, 256 // BITS], PAIR)
    LAYOUT1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS1, 256 // BITS], PAIR)
    acc = gl.zeros([PART, t.COLS], gl.float32, LAYOUT)
    acc1 = gl.zeros([PART, COLS1], gl.float32, LAYOUT1)
    for step in range(first, end):
        if t.EPILOGUE != "none" and added_to is not None and step == awaited:
            mbarrier.wait(added_to, added_phase)
        mbarrier.wait(ring.full.index(stage), phase)
        x = as_factor(ring.x.index(stage * t.PARTS + SLAB), not t.X_K_MAJOR)
        y = as_factor(ring.y.index(stage * t.BOXES), t.Y_K_MAJOR)
        if t.PRECISE:
            # what Hopper's fp8 tensor cores add up is moved to fp32 after every step
            product = multiply_add(x, y, acc, False, t.COLUMNS - t.COLS1, t.X_K_MAJOR)
            if t.COLS1 > 0:
                y1 = as_factor(ring.y1.index(stage), t.Y_K_MAJOR)
                product1 = warpgroup_mma(x, y1, acc1, use_acc=False, is_async=True)
                product, product1 = warpgroup_mma_wait(0, deps=(product, product1))
                acc1 += product1
            else:
                product = warpgroup_mma_wait(0, deps=(product,))
            hand_back(ring, t, stage, True)
            acc += product
        else:
            acc = multiply_add(x, y, acc, step > first, t.COLUMNS - t.COLS1, t.X_K_MAJOR)
            if t.COLS1 > 0:
                y1 = as_factor(ring.y1.index(stage), t.Y_K_MAJOR)
                acc1 = warpgroup_mma(x, y1, acc1, use_acc=step > first, is_async=True)
                acc, acc1 = warpgroup_mma_wait(2, deps=(acc, acc1))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            # The stage before is computed, not carried along: the compiler takes a variable that begins as another
            # carried one to be constant.
            hand_back(ring, t, (stage + t.STAGES - 1) % t.STAGES, step > first)
        stage, phase = next_stage(stage, phase, t.STAGES)
    return acc, acc1, stage, phase


@gluon.jit
def settle(ring, tiling, acc, acc1, stage):
    """The sums when the last product is done; its stage, the one before `stage`, is handed back."""
    t = tiling
    if not t.PRECISE:
        if t.COLS1 > 0:
            acc, acc1 = warpgroup_mma_wait(0, deps=(acc, acc1))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        hand_back(ring, t, (stage + t.STAGES - 1) % t.STAGES, True)
    return acc, acc1


@gluon.jit
def fetch(ptr, stride, given, first, size, OTHER: gl.constexpr, COUNT: gl.constexpr):
    """COUNT numbers from `first` on, as fp32; OTHER past `size` and where none are given."""
    PER_THREAD: gl.constexpr = COUNT // 128 if COUNT > 128 else 1
    i = first + gl.arange(0, COUNT, layout=gl.BlockedLayout([PER_THREAD], [32], [4], [0]))
    return gl.load(ptr + i.to(gl.int64) * stride, mask=(i < size) & given, other=OTHER).to(gl.float32)


@gluon.jit
def fetch_factors(row, col, room, ending, tiling):
    """Starts reading what the epilogue of the slab at `row` of X and `col` of Y needs.

    It is read before the products and used after them: nothing waits for it.
    """
    e = ending
    t = tiling
    if t.EPILOGUE == "none" and not t.SCALED:
        return Factors(0, 0, 0)
    else:
        MS: gl.constexpr = room.scale_a.shape[1]
        NS: gl.constexpr = room.bias.shape[1]
        m = col if t.SWAPPED else row
        n = row if t.SWAPPED else col
        bias = fetch(e.bias_ptr, e.stride_bias_n, e.bias_rank == VECTOR, n, e.N, 0.0, NS)
        if t.SCALED:
            scale_a = fetch(e.scale_a_ptr, e.stride_scale_a, e.scale_a_ptr.to(gl.int64) != 0, m, e.M, 1.0, MS)
            scale_b = fetch(e.scale_b_ptr, e.stride_scale_b, e.scale_b_ptr.to(gl.int64) != 0, n, e.N, 1.0, NS)
        else:
            scale_a = bias  # not used
            scale_b = bias
        return Factors(scale_a, scale_b, bias)


@gluon.jit
def room_for_factors(tiling, COUNT: gl.constexpr):
    """Shared memory through which factors reach the threads that need them, COUNT times."""
    t = tiling
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PART: gl.constexpr = t.ROWS // t.PARTS
    WIDE: gl.constexpr = t.COLS if t.COLS1 == 0 else 2 * t.COLS
    MS: gl.constexpr = t.COLS if t.SWAPPED else PART
    NS: gl.constexpr = PART if t.SWAPPED else WIDE
    if t.EPILOGUE == "none" and not t.SCALED:
        return Factors(0, 0, 0)
    else:
        bias = gl.allocate_shared_memory(gl.float32, [COUNT, NS], LAYOUT)
        scale_a = gl.allocate_shared_memory(gl.float32, [COUNT, MS], LAYOUT) if t.SCALED else bias
        scale_b = gl.allocate_shared_memory(gl.float32, [COUNT, NS], LAYOUT) if t.SCALED else bias
        return Factors(scale_a, scale_b, bias)


@gluon.jit
def put_factors(room, INDEX: gl.constexpr, held, tiling):
    """What was read, in shared memory."""
    if tiling.EPILOGUE == "none" and not tiling.SCALED:
        return room
    else:
        placed = Factors(room.scale_a.index(INDEX), room.scale_b.index(INDEX), room.bias.index(INDEX))
        placed.bias.store(held.bias)
        if tiling.SCALED:
            placed.scale_a.store(held.scale_a)
            placed.scale_b.store(held.scale_b)
        return placed


@gluon.jit
def scaled(sums, factors):
    """scale_a * scale_b * sums, for factors that are in shared memory."""
    sums *= factors.scale_a.load(gl.SliceLayout(1, sums.type.layout))[:, None]
    sums *= factors.scale_b.load(gl.SliceLayout(0, sums.type.layout))[None, :]
    return sums


@gluon.jit
def conclude(sums, factors, ending, tiling):
    """activation(scales * sums + bias) for a chunk of C, of whose factors it is given; a matrix is already added."""
    e = ending
    if tiling.SCALED and (tiling.EPILOGUE == "none" or e.bias_rank != MATRIX):
        sums = scaled(sums, factors)
    if tiling.EPILOGUE != "none":
        sums += factors.bias.load(gl.SliceLayout(0, sums.type.layout))[None, :]
        if e.activation != 0:
            if tiling.EPILOGUE == "linear":
                sums = linear(sums, e.activation, e.slope)
            else:
                sums = activate(sums, e.activation, e.slope)
    return sums


@gluon.jit
def part_of(factors, OFFSET: gl.constexpr, M_COUNT: gl.constexpr, N_COUNT: gl.constexpr, tiling):
    """The factors of M_COUNT rows and N_COUNT columns of C, which are columns OFFSET... of a slab."""
    t = tiling
    M_OFFSET: gl.constexpr = OFFSET if t.SWAPPED else 0
    N_OFFSET: gl.constexpr = 0 if t.SWAPPED else OFFSET
    bias = factors.bias.slice(N_OFFSET, N_COUNT)
    scale_a = factors.scale_a.slice(M_OFFSET, M_COUNT) if t.SCALED else bias
    scale_b = factors.scale_b.slice(N_OFFSET, N_COUNT) if t.SCALED else bias
    return Factors(scale_a, scale_b, bias)


@gluon.jit
def halves(sums):
    """The left and the right half of the columns."""
    return sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store(chunk, m, n, c_desc, c_smem):
    """Rounds a chunk, and lets it go to row m and column n of C."""
    tma.store_wait(0)
    gl.barrier()  # one thread waited for the store before
    c_smem.store(chunk.to(c_desc.dtype))
    fence_async_shared()
    gl.barrier()  # one thread stores what all have written
    tma.async_store(c_desc, [m, n], c_smem)


@gluon.jit
def leave(sums, row, col, part, c_desc, c1_desc, c_smem, c1_smem, factors, OFFSET: gl.constexpr, ending, tiling):
    """Writes the sums of rows `row`... and columns `col`..., OFFSET... of the tile, WIDTH or TAIL columns at a time."""
    e = ending
    t = tiling
    SIZE: gl.constexpr = sums.shape[1]
    WHOLE: gl.constexpr = SIZE == t.WIDTH and OFFSET + SIZE <= t.COLUMNS
    if OFFSET < t.COLUMNS:
        if not (WHOLE or SIZE == t.TAIL):
            left, right = halves(sums)
            HALF: gl.constexpr = SIZE // 2
            leave(left, row, col, part, c_desc, c1_desc, c_smem, c1_smem, factors, OFFSET, e, t)
            leave(right, row, col + HALF, part, c_desc, c1_desc, c_smem, c1_smem, factors, OFFSET + HALF, e, t)
        else:
            if t.SWAPPED:
                chunk = sums.permute((1, 0))
                m = col
                n = row
            else:
                chunk = sums
                m = row
                n = col
            if t.PARTIAL:
                ms = m + gl.arange(0, chunk.shape[0], layout=gl.SliceLayout(1, chunk.type.layout))
                ns = n + gl.arange(0, chunk.shape[1], layout=gl.SliceLayout(0, chunk.type.layout))
                slab = e.workspace_ptr + part.to(gl.int64) * e.workspace_stride_z
                gl.store(slab + ms.to(gl.int64)[:, None] * e.workspace_stride_m + ns[None, :], chunk)
            else:
                if t.SCALED or t.EPILOGUE != "none":
                    if OFFSET == 0:
                        gl.barrier()  # all factors are in shared memory
                    chunk = conclude(chunk, part_of(factors, OFFSET, chunk.shape[0], chunk.shape[1], t), e, t)
                if SIZE == t.WIDTH:
                    store(chunk, m, n, c_desc, c_smem)
                else:
                    store(chunk, m, n, c1_desc, c1_smem)


@gluon.jit
def leave_in_turns(sums, row, col, c_desc, c_smem, factors, ending, tiling):
    """`leave` with an activation, as a loop over quarters: code for every column does not fit the instruction cache.

    Registers cannot be indexed, so the quarters change places. What else was tried: docs/performance.md.
    """
    WIDTH: gl.constexpr = sums.shape[1] // 4
    left, right = halves(sums)
    first, second = halves(left)
    third, fourth = halves(right)
    scale_b = factors.scale_b.reinterpret(gl.float32, [4, WIDTH], factors.scale_b.layout)
    bias = factors.bias.reinterpret(gl.float32, [4, WIDTH], factors.bias.layout)
    for i in range(4):
        n = col + i * WIDTH
        gl.barrier()  # all factors are in shared memory
        chunk = conclude(first, Factors(factors.scale_a, scale_b.index(i), bias.index(i)), ending, tiling)
        store(chunk, row, n, c_desc, c_smem)
        first, second, third = second, third, fourth


@gluon.jit
def bias_box(ring, bias_desc, index):
    """A buffer of X, in which a box of a matrix that is added has room."""
    return ring.x.index(index).reinterpret(bias_desc.dtype, bias_desc.block_type.shape, bias_desc.layout)


@gluon.jit
def fill(box, m, n, ending):
    """Copies the box at row m and column n of a matrix that TMA cannot copy."""
    e = ending
    COLS: gl.constexpr = box.shape[1]
    # rows follow each other in shared memory only where one is a line of the swizzle
    LINES: gl.constexpr = COLS * box.dtype.primitive_bitwidth // 8 <= SWIZZLED_BYTES
    ROWS: gl.constexpr = min(box.shape[0], FILLED_ROWS) if LINES else box.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    parts = box.reinterpret(box.dtype, [box.shape[0] // ROWS, ROWS, COLS], box.layout)
    cols = (n + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    for i in range((gl.minimum(e.M - m, box.shape[0]) + ROWS - 1) // ROWS):
        rows = (m + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))[:, None]
        ptrs = e.bias_ptr + rows.to(gl.int64) * e.stride_bias_m + cols.to(gl.int64) * e.stride_bias_n
        values = gl.load(ptrs, mask=(rows < e.M) & (cols < e.N), other=0.0)
        gl.barrier()  # others may still read the box before, or what TMA put there
        parts.index(i).store(values)
    fence_async_shared()  # the next stage there is written by TMA


@gluon.jit
def add_matrix(
    sums, row, col, ring, bias_desc, SLAB: gl.constexpr, stage, phase, factors, OFFSET: gl.constexpr, ending, tiling
):
    """Scales the sums of rows `row`... and columns `col`..., OFFSET... of the tile, and adds a matrix to them.

    Its first box is in `stage` of the ring. Returns the sums, and the stage and phase after the last box. Blocks of a
    cluster would have to hand stages back to each other, too: their kernels add no matrix.
    """
    t = tiling
    SIZE: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = sums.type.layout
    if OFFSET < t.COLUMNS:
        if SIZE == t.BIAS:
            mbarrier.wait(ring.full.index(stage), phase)
            box = bias_box(ring, bias_desc, stage * t.PARTS + SLAB)
            if not ending.boxed():
                fill(box, col if t.SWAPPED else row, row if t.SWAPPED else col, ending)
            gl.barrier()  # all of the box is there, whoever filled it
            chunk = sums.permute((1, 0)) if t.SWAPPED else sums
            if t.SCALED:
                chunk = scaled(chunk, part_of(factors, OFFSET, chunk.shape[0], chunk.shape[1], t))
            chunk += box.load(chunk.type.layout).to(gl.float32)
            sums = chunk.permute((1, 0)) if t.SWAPPED else chunk
            fence_async_shared()  # else TMA could overwrite what is still being read
            mbarrier.arrive(ring.empty.index(stage))
            stage, phase = next_stage(stage, phase, t.STAGES)
        else:
            HALF: gl.constexpr = SIZE // 2
            left, right = halves(sums)
            left, stage, phase = add_matrix(
                left, row, col, ring, bias_desc, SLAB, stage, phase, factors, OFFSET, ending, t
            )  # fmt: skip
            right, stage, phase = add_matrix(
                right, row, col + HALF, ring, bias_desc, SLAB, stage, phase, factors, OFFSET + HALF, ending, t
            )
            sums = gl.join(left, right).permute((0, 2, 1)).reshape([sums.shape[0], SIZE])
    return gl.convert_layout(sums, LAYOUT, assert_trivial=True), stage, phase


@gluon.jit
def add_boxes(acc, acc1, row, col, ring, bias_desc, SLAB: gl.constexpr, stage, phase, factors, ending, tiling):
    """`add_matrix` for all of a slab, before any result leaves, so that the stages are soon free again."""
    e = ending
    t = tiling
    acc, stage, phase = add_matrix(acc, row, col, ring, bias_desc, SLAB, stage, phase, factors, 0, e, t)
    if t.COLS1 > 0:
        acc1, stage, phase = add_matrix(
            acc1, row, col + t.COLS, ring, bias_desc, SLAB, stage, phase, factors, t.COLS, e, t
        )
    return acc, acc1, stage, phase


@gluon.jit
def leave_tile(acc, acc1, row, col, part, c_desc, c1_desc, c_smem, c1_smem, factors, ending, tiling):
    """Writes the sums of one slab of a tile."""
    t = tiling
    if t.IN_TURNS:
        leave_in_turns(acc, row, col, c_desc, c_smem, factors, ending, t)
    else:
        leave(acc, row, col, part, c_desc, c1_desc, c_smem, c1_smem, factors, 0, ending, t)
        if t.COLS1 > 0:
            leave(acc1, row, col + t.COLS, part, c_desc, c1_desc, c_smem, c1_smem, factors, t.COLS, ending, t)


@gluon.jit
def await_operands(tiling):
    """The kernel before this one may have written what the epilogue reads; the producer waits for the rest."""
    if tiling.SCALED or tiling.EPILOGUE != "none":
        gdc_wait()


def specialise(function: Any, variant: Variant, *, parts: int, swapped: bool = False, ctas: int = 1) -> Specialisation:
    """A kernel of these families for `variant`.

    It promises what tensor maps need: one unit stride, 16-byte rows; and a K of at least 1, because the first product
    of a tile sets its sums. Kernels of 16-bit operands promise that there are no scales.

    Args:
        function: the jit function.
        parts: consumer warpgroups that work on one tile.
        swapped: whether X is B^T.
        ctas: blocks of a cluster, which share a tile of block_m rows.
    """
    config = variant.config
    rows, columns = (config.block_n, config.block_m) if swapped else (config.block_m, config.block_n)
    partial = variant.role == "partial"
    eight_bit = DTYPES[variant.dtype_a].bytes == 1
    scaled = eight_bit and not partial
    a, b = _operand(variant, "a"), _operand(variant, "b")
    x, y = (b, a) if swapped else (a, b)
    part = rows // parts
    divided, whole = (True, False) if ctas > 1 else (None, None)
    cols = 1 << (columns.bit_length() - 1)
    cols1 = columns - cols
    line = config.block_k * DTYPES[variant.dtype_a].bytes
    joined = bool(cols1) and y["inner"] == "K" and (line, part, ctas) == (LINE_BYTES, 64, 1) and columns <= MOST_COLUMNS
    in_turns = variant.epilogue == "smooth" and not swapped and not cols1
    width = cols if swapped and not cols1 else cols // 4 if in_turns else _width(variant, part, cols, cols1, ctas)
    tail = _least_power(columns % width) or width
    descriptors = {"x_desc": _described(x, part, config.block_k, divided)}
    if joined:
        # the compiler is told of the least box, the unit in which shared memory is laid out; its transfer takes all
        descriptors["y_desc"] = dataclasses.replace(_described(y, GROUP_LINES, config.block_k, None), outer=columns)
        cols, cols1 = 2 * cols, 0
    else:
        descriptors["y_desc"] = _described(y, cols, config.block_k, whole)
    if cols1:
        descriptors["y1_desc"] = _described(y, cols1, config.block_k, whole)
    # as many columns of C as a line of X has room for
    bias = min(cols, cols1 or cols, min(line, LINE_BYTES) // DTYPES[variant.dtype_c].bytes)
    if not partial:
        descriptors["c_desc"] = _result(variant, (width, part) if swapped else (part, width), divided)
        if tail < width:
            descriptors["c1_desc"] = _result(variant, (tail, part) if swapped else (part, tail), divided)
    constants: dict[str, Any] = {
        "CTAS": ctas,
        "PARTS": parts,
        "ROWS": rows,
        "COLUMNS": columns,
        "COLS": cols,
        "COLS1": cols1,
        "WIDTH": width,
        "TAIL": tail,
        "BOXES": columns // GROUP_LINES if joined else 1,
        "BIAS": bias,
        "IN_TURNS": in_turns,
        "BLOCK_K": config.block_k,
        "GROUP": config.group_m,
        "STAGES": config.num_stages,
        "X_K_MAJOR": x["inner"] == "K",
        "Y_K_MAJOR": y["inner"] == "K",
        "SWAPPED": swapped,
        "PARTIAL": partial,
        "PRECISE": eight_bit and not variant.fast_accum,
        "SCALED": scaled,
        "EPILOGUE": variant.epilogue,
        "PRODUCER": PRODUCER_REGISTERS,
        "CONSUMER": CONSUMER_REGISTERS[config.num_warps // WARPGROUP],
    }
    c = DTYPES[variant.dtype_c]
    types = {
        **dict.fromkeys(("M", "N", "K"), "i32"),
        **WORKSPACE_TYPES,
        **epilogue_types(c),
    }
    promises = [Promise("batch", "equals", 1), Promise("K", "at_least", 1)]
    if variant.fast_accum:
        promises.append(Promise("fast_accum", "equals", 1))
    if not partial and not scaled:
        promises += [Promise("scale_a_ptr", "equals", 0), Promise("scale_b_ptr", "equals", 0)]
    for row in {descriptor.value: descriptor for descriptor in descriptors.values()}.values():
        promises += _described_promises(row)
    if not partial:
        # measured on an H200: a TMA store fills the last 16 bytes of a row with zeros past its end
        promises.append(Promise("c_span", "multiple_of", VECTOR_BYTES // c.bytes))
    if variant.epilogue != "none":  # of any alignment (`Ending.boxed`)
        descriptors["bias_desc"] = _bias(variant, (bias, part) if swapped else (part, bias))
    return Specialisation(
        function,
        types,
        constants | {name: None for name in function.arg_names if name not in {*types, *constants, *descriptors}},
        promises=tuple(promises),
        vector_bytes=VECTOR_BYTES,
        descriptors=descriptors,
        persistent=True,
        programmatic=True,
        # Tests compare images that were compiled with and without the compiler's search for missing ones. Barriers of
        # scales beside other factors are left to the compiler.
        fenced=True,
        synchronised=not scaled or variant.epilogue == "none",
    )


def _operand(variant: Variant, name: str) -> dict[str, str]:
    """How A or B lies in memory: what runs along `inner` and `outer`, and the strides of both."""
    size, along = ("M", "am") if name == "a" else ("N", "bn")
    across = "ak" if name == "a" else "bk"
    k_major = variant.layout["ab".index(name)] == ("n" if name == "a" else "t")
    inner, outer = (("K", across), (size, along)) if k_major else ((size, along), ("K", across))
    return {
        "value": f"{name}_ptr",
        "dtype": variant.dtype_a if name == "a" else variant.dtype_b,
        "inner": inner[0],
        "outer": outer[0],
        "unit": f"stride_{inner[1]}",
        "stride": f"stride_{outer[1]}",
    }


def _described(operand_: dict[str, str], along: int, block_k: int, divided: bool | None) -> Descriptor:
    """Boxes of `along` rows of X, or columns of Y, and block_k of K.

    In a cluster every block has a part of the box if it is `divided`, else all of it; None: there is no cluster.
    """
    k_major = operand_["inner"] == "K"
    return Descriptor(
        value=operand_["value"],
        dtype=operand_["dtype"],
        sizes=(operand_["outer"], operand_["inner"]),
        strides=(operand_["stride"], operand_["unit"]),
        box=(along, block_k) if k_major else (block_k, along),
        cluster=() if divided is None else ((int(divided and k_major), int(divided and not k_major)),),
    )


def _described_promises(row: Descriptor) -> list[Promise]:
    """What TMA needs of a matrix."""
    return [
        Promise(row.strides[1], "equals", 1),
        Promise(row.strides[0], "multiple_of", VECTOR_BYTES // DTYPES[row.dtype].bytes),
        Promise(row.strides[0], "at_least", 1),
        Promise(row.value, "multiple_of", VECTOR_BYTES),
    ]


def _result(variant: Variant, box: tuple[int, int], divided: bool | None) -> Descriptor:
    cluster_ = () if divided is None else ((1, 0),)
    return Descriptor("c_ptr", variant.dtype_c, ("M", "N"), ("stride_cm", "stride_cn"), box, cluster_)


def _bias(variant: Variant, box: tuple[int, int]) -> Descriptor:
    return Descriptor("bias_ptr", variant.dtype_c, ("M", "N"), ("stride_bias_m", "stride_bias_n"), box)


def _least_power(number: int) -> int:
    """The largest power of two that divides `number`; 0 for 0."""
    return number & -number


def _width(variant: Variant, part: int, cols: int, cols1: int, ctas: int) -> int:
    """Columns of results that leave together: the most that fit in shared memory, at most a row without conflicts.

    Every consumer has room of its own for `part` rows of them, beside the ring and the factors of the epilogue.
    """
    config, c, element = variant.config, DTYPES[variant.dtype_c], DTYPES[variant.dtype_a].bytes
    consumers = config.num_warps // WARPGROUP
    part //= ctas
    taken = config.num_stages * (config.block_m // ctas + config.block_n) * config.block_k * element + BARRIER_BYTES
    if element == 1 or variant.epilogue != "none":
        taken += consumers * 4 * (part + 2 * cols * (2 if cols1 else 1))
    width = min(cols, LINE_BYTES // c.bytes)
    while width > LEAST_WIDTH:
        tail = _least_power((cols + cols1) % width)
        columns = width + tail
        if taken + consumers * part * columns * c.bytes <= variant.target.shared_bytes:
            break
        width //= 2
    return width
