"""The ring of shared memory between the loading warp and the multiplying ones."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from aotmm.kernels.order import place


@gluon.aggregate
class Tiling:
    """The constants of a block's work.

    CTAS blocks of a cluster share a tile: they have equal parts of the rows of each slab, and the same columns.
    X has PARTS slabs of ROWS // PARTS rows, one for each consumer that works on a tile; Y has COLUMNS columns. A slab's
    sums are COLS wide, of which those past COLUMNS are not computed (`wgmma`), or COLS and COLS1 side by side. A stage
    of Y is one transfer, into BOXES of the boxes that the compiler knows. A matrix that is added comes through the ring
    too, BIAS columns of each slab in a stage. Results are stored WIDTH columns at a time, the last ones TAIL at a time;
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
    """The work tiles of a launch: tiles of (rows, cols), times slices of `steps` steps along K."""

    rows: gl.tensor
    cols: gl.tensor
    steps: gl.tensor
    group_m: gl.tensor
    split: gl.tensor
    tiling: Tiling

    @gluon.jit
    def count(self):
        """Return the number of work tiles."""
        t = self.tiling
        return gl.cdiv(self.rows, t.ROWS) * gl.cdiv(self.cols, t.COLUMNS) * self.split

    @gluon.jit
    def place(self, unit):
        """Return (first row, first column, slice) of a work tile: slices outermost, tiles in groups of rows of C.

        So tiles that share a slice of an operand run side by side.
        """
        t = self.tiling
        tiles_x = gl.cdiv(self.rows, t.ROWS)
        tiles_y = gl.cdiv(self.cols, t.COLUMNS)
        tile = unit % (tiles_x * tiles_y)
        if t.SWAPPED:
            y, x = place(tile, tiles_y, tiles_x, self.group_m)
        else:
            x, y = place(tile, tiles_x, tiles_y, self.group_m)
        return x * t.ROWS, y * t.COLUMNS, unit // (tiles_x * tiles_y)

    @gluon.jit
    def steps_of(self, part):
        """Return the first step of a slice, and the first one after it."""
        return part * self.steps // self.split, (part + 1) * self.steps // self.split


@gluon.aggregate
class Ring:
    """STAGES buffers of boxes of X and Y in shared memory; `full` and `empty` tell each stage's turn.

    Boxes of a matrix that is added have stages of their own, in the buffers of X.

    `all_empty` is for all blocks of the cluster, in the first of them, which loads Y for all.
    """

    x: gl.shared_memory_descriptor
    y: gl.shared_memory_descriptor
    y1: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    all_empty: gl.shared_memory_descriptor


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Allocate COUNT boxes in shared memory."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr, SHARED: gl.constexpr = False):
    """Make COUNT barriers that ARRIVALS arrivals complete: of every block, or SHARED, of both blocks of a pair."""
    found = mbarrier.allocate_mbarrier(batch=COUNT, two_ctas=SHARED)
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def make_ring(x_desc, y_desc, y1_desc, tiling):
    """Make an empty ring. A stage is full when its bytes are there, and empty when every consumer has left it."""
    t = tiling
    full = barriers(t.STAGES, 1)
    empty = barriers(t.STAGES, t.PARTS)
    all_empty = barriers(t.STAGES, t.PARTS, True) if t.CTAS > 1 else empty
    x = buffers(x_desc, t.STAGES * t.PARTS)
    y = buffers(y_desc, t.STAGES * t.BOXES)
    y1 = buffers(y1_desc, t.STAGES) if t.COLS1 > 0 else y
    return Ring(x, y, y1, full, empty, all_empty)


@gluon.jit
def bias_box(ring, bias_desc, index):
    """Return a buffer of X, which has room for a box of a matrix that is added."""
    return ring.x.index(index).reinterpret(bias_desc.dtype, bias_desc.block_type.shape, bias_desc.layout)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring; the phase flips when the ring wraps."""
    wraps = (stage == STAGES - 1).to(gl.int32)
    return (stage + 1) * (1 - wraps), phase ^ wraps


@gluon.jit
def load(desc, along, k, bar, smem, K_MAJOR: gl.constexpr, MULTICAST: gl.constexpr):
    """Start copying a box that begins at `along` (row of X or column of Y) and `k`; MULTICAST, to every block."""
    gl.barrier()  # of this warp: the barrier expects these bytes before any of them can come
    if K_MAJOR:
        tma.async_load(desc, [along, k], bar, smem, multicast=MULTICAST)
    else:
        tma.async_load(desc, [k, along], bar, smem, multicast=MULTICAST)


@gluon.jit
def consumer_release(ring, tiling, stage, pred):
    """Release a stage by this consumer."""
    mbarrier.arrive(ring.empty.index(stage), pred=pred)
    if tiling.CTAS > 1:
        mbarrier.arrive(ring.all_empty.index(stage), pred=pred)


@gluon.jit
def produce(x_desc, y_desc, y1_desc, bias_desc, ring, work, epilogue):
    """Fill stage after stage with the boxes that this block's consumers multiply, as the producer warp."""
    gdc_wait()  # operands may be results of the previous kernel; consumers come after, through `full`
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
            for i in range(epilogue.stages(t)):
                bar = ring.full.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                if epilogue.boxed():
                    mbarrier.expect(bar, t.PARTS * bias_desc.nbytes_per_cta)
                    for j in gl.static_range(t.PARTS):
                        x = row + j * (t.ROWS // t.PARTS)
                        box = bias_box(ring, bias_desc, stage * t.PARTS + j)
                        load(bias_desc, x, col + i * t.BIAS, bar, box, not t.SWAPPED, False)
                else:
                    mbarrier.arrive(bar)  # consumers fetch it themselves
                stage, phase = next_stage(stage, phase, t.STAGES)
