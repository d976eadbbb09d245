"""Block scales of fp8: from global memory through the ring to the warpgroups that multiply.

A stage has one step along K, which is one block of it. Its scales lie in shared memory beside its boxes, one for each
group of X_GROUP rows of X and of Y_GROUP columns of Y that share one. Producers copy them with cp.async, which
takes any stride and alignment, and counts as an arrival of each of their threads at the stage's barrier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from aotmm.kernels.hopper.cluster import THREADS
from aotmm.problem import BLOCK_SCALE_K

SCALED_COLUMNS = gl.constexpr(BLOCK_SCALE_K)


@gluon.constexpr_function
def power_of_two(number: int) -> int:
    """Return the least power of two from `number` on."""
    return 1 << (number - 1).bit_length()


@gluon.aggregate
class BlockScales:
    """The block scales of one operand in global memory, or zeros without any.

    Attributes:
        ptr: address. size: rows of X or columns of Y. block: of these, so many share one.
        stride, stride_k, stride_z: from one to the next, in elements: along X or Y, along K, in a batch.
    """

    ptr: gl.base_value
    size: gl.base_value
    block: gl.base_value
    stride: gl.base_value
    stride_k: gl.base_value
    stride_z: gl.base_value

    @gluon.jit
    def load(self, smem, z, first, step, COUNT: gl.constexpr, GROUP: gl.constexpr):
        """Start copying the scales of COUNT groups, from `first` on, of a step."""
        PRODUCERS_HERE: gl.constexpr = gl.num_warps()
        i = first + gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [THREADS], [PRODUCERS_HERE], [0])) * GROUP
        block = i // (SCALED_COLUMNS if GROUP > 1 else self.block)
        start = self.ptr + z.to(gl.int64) * self.stride_z + step.to(gl.int64) * self.stride_k
        async_copy.async_load(smem, start + block.to(gl.int64) * self.stride, mask=i < self.size)


@gluon.jit
def block_scales(a_ptr, b_ptr, az, am, ak, bz, bk, bn, block_columns, M, N, tiling):
    """Return the block scales of X and of Y."""
    t = tiling
    if t.X_GROUP == 0:
        none = BlockScales(0, 0, 0, 0, 0, 0)
        return none, none
    else:
        a = BlockScales(a_ptr, M, gl.to_tensor(1), am, ak, az)
        b = BlockScales(b_ptr, N, block_columns, bn, bk, bz)
        if t.SWAPPED:
            return b, a
        else:
            return a, b


@gluon.jit
def scale_buffers(COUNT: gl.constexpr, STAGES: gl.constexpr):
    """Allocate shared memory for COUNT scales in each stage."""
    return gl.allocate_shared_memory(gl.float32, [STAGES, COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def arrive_for_scales(bar, tiling):
    """Arrive at the barrier of a stage, once for each thread of the producers, when its scales are there."""
    if tiling.X_GROUP > 0:
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def load_scales(ring, bar, x_scales, y_scales, z, row, col, step, stage, tiling):
    """Start copying the block scales of a step of a tile to a stage, if there are any, as the producers."""
    t = tiling
    if t.X_GROUP > 0:
        x_scales.load(ring.x_scales.index(stage), z, row, step, power_of_two(t.ROWS // t.X_GROUP), t.X_GROUP)
        y_scales.load(ring.y_scales.index(stage), z, col, step, t.COLS // t.Y_GROUP, t.Y_GROUP)
        arrive_for_scales(bar, t)


@gluon.jit
def held_scales(ring, tiling, SLAB: gl.constexpr, stage, acc):
    """Return the scales of a stage that a thread needs for its sums of slab SLAB: of X and of Y, as 4-D tensors.

    Their dimensions are groups of rows, rows of a group, groups of columns, columns of a group.
    """
    t = tiling
    XS: gl.constexpr = t.ROWS // t.PARTS // t.X_GROUP
    YS: gl.constexpr = t.COLS // t.Y_GROUP
    LAYOUT: gl.constexpr = acc.reshape([XS, t.X_GROUP, YS, t.Y_GROUP]).type.layout
    OF_X: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    OF_Y: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    x = ring.x_scales.index(stage).slice(SLAB * XS, XS).load(OF_X)
    y = ring.y_scales.index(stage).slice(0, YS).load(OF_Y)
    x = gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)
    y = gl.expand_dims(gl.expand_dims(gl.expand_dims(y, 0), 1), 3)
    return x, y


@gluon.jit
def add_scaled(acc, product, x_scales, y_scales, tiling):
    """Return acc + product * (scale of X * scale of Y): the scales' product is rounded, then the sum."""
    t = tiling
    SHAPE: gl.constexpr = [acc.shape[0] // t.X_GROUP, t.X_GROUP, t.COLS // t.Y_GROUP, t.Y_GROUP]
    sums = gl.fma(product.reshape(SHAPE), x_scales * y_scales, acc.reshape(SHAPE))
    return gl.convert_layout(sums.reshape(acc.shape), acc.type.layout, assert_trivial=True)
