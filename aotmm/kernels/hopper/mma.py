"""Hopper's matrix instruction with any number of columns, and the products of a slab.

A wgmma multiplies any multiple of 8 columns up to 256, but Gluon's tensors, and so its products, have a power of two of
them. Here the sums are a tensor of the next power of two. The instruction gets its first registers, those of existing
columns. Nothing reads the others, so the assembler removes them.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from aotmm.kernels import GROUP_LINES, LINE_BYTES, VECTOR_BYTES
from aotmm.kernels.epilogue import adds_matrix
from aotmm.kernels.hopper.cluster import THREADS
from aotmm.kernels.hopper.pipeline import IN_TURN, OF_FP32, next_stage, release
from aotmm.kernels.hopper.scales import add_scaled, held_scales

# Source: PTX ISA, "wgmma.mma_async" and "Matrix descriptor".
_ROWS = 64  # of one instruction
_THREADS = 128  # of a warpgroup
_STEP_BYTES = 32  # along K, of one instruction
_UNIT = 16  # bytes: of addresses and distances in descriptors
_DESCRIPTOR = (1 << 62) | (GROUP_LINES * LINE_BYTES // _UNIT << 32)  # that swizzle, groups one after another
_BOXES_APART = 16  # the bit of a descriptor where the distance of boxes begins, which are a line wide
VECTOR_UNIT = gl.constexpr(VECTOR_BYTES)
# Of two numbers: cvt puts its second operand into the lower half. Each rest is exact.
SPLIT_PTX = gl.constexpr("""{
.reg .b32 x, y;
.reg .f32 a, b, c, d;
cvt.rn.bf16x2.f32 $0, $4, $3;
shl.b32 x, $0, 16;
and.b32 y, $0, 0xffff0000;
mov.b32 a, x;
mov.b32 b, y;
sub.f32 c, $3, a;
sub.f32 d, $4, b;
cvt.rn.bf16x2.f32 $1, d, c;
shl.b32 x, $1, 16;
and.b32 y, $1, 0xffff0000;
mov.b32 a, x;
mov.b32 b, y;
sub.f32 c, c, a;
sub.f32 d, d, b;
cvt.rn.bf16x2.f32 $2, d, c;
}""")
MOST_INT8 = gl.constexpr(224)  # columns of a product of int8 that Gluon knows
_PTX_TYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "tf32", "fp8e4nv": "e4m3", "fp8e5": "e5m2", "int8": "s8"}


@gluon.constexpr_function
def products(rows: int, width: int, columns: int, x_type: Any, y_type: Any, x_k_major: bool, y_k_major: bool) -> str:
    """Return PTX that adds `rows` of X times `columns` columns of Y over a line (128 bytes) of K to sums `width` wide.

    Its operands are the sums as results, the sums, addresses of X and Y in shared memory, whether to add at all. If Y
    does not lie along K, its columns are in boxes one after another, as many as fill a line in each.
    """
    registers = width * _ROWS // _THREADS  # of the sums of an instruction's rows
    x_address, y_address, added = (f"${2 * rows // _ROWS * registers + i}" for i in range(3))
    kinds = [_PTX_TYPES[str(kind)] for kind in (x_type, y_type)]
    of_16_bits, integer = kinds[0] in ("f16", "bf16"), kinds[0] == "s8"
    depth = _STEP_BYTES * 8 // x_type.primitive_bitwidth
    shape = f"m64n{columns}k{depth}.{'s32' if integer else 'f32'}.{kinds[0]}.{kinds[1]}"
    # a step along K is within a line, or `depth` lines further
    x_step = (_STEP_BYTES if x_k_major else depth * LINE_BYTES) // _UNIT
    y_step = (_STEP_BYTES if y_k_major else depth * LINE_BYTES) // _UNIT
    box = LINE_BYTES // _STEP_BYTES * depth * LINE_BYTES // _UNIT
    x_slab = _ROWS * LINE_BYTES // _UNIT  # from the rows of an instruction to the next, in both orders of X
    signs = "" if integer else ", 1, 1"
    orders = f", {int(not x_k_major)}, {int(not y_k_major)}" if of_16_bits else ""
    lines = [".reg .pred add;", ".reg .b64 x, y, slab;", f"setp.ne.b32 add, {added}, 0;", "wgmma.fence.sync.aligned;"]
    for name, address, apart in (("x", x_address, 1), ("y", y_address, 1 if y_k_major else box)):  # 1: there is but one
        lines += [
            f"cvt.u64.u32 {name}, {address};",
            f"bfe.u64 {name}, {name}, 4, 14;",
            f"or.b64 {name}, {name}, {_DESCRIPTOR | apart << _BOXES_APART};",
        ]
    for step in range(LINE_BYTES // _STEP_BYTES):
        if step:
            lines += [f"add.s64 x, x, {x_step};", f"add.s64 y, y, {y_step};"]
        adds = "1" if step else "add"
        for slab in range(rows // _ROWS):
            first = slab * registers
            sums = ", ".join(f"${first + i}" for i in range(columns * _ROWS // _THREADS))
            lines.append(f"add.s64 slab, x, {slab * x_slab};")
            lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, slab, y, {adds}{signs}{orders};")
    return "\n".join(["{", *lines, "wgmma.commit_group.sync.aligned;", "}"])


@gluon.constexpr_function
def in_place(rows: int, width: int, integer: bool) -> str:
    """Return LLVM's constraints for the operands of `products`: results replace the sums."""
    registers = rows * width // _THREADS
    return ",".join(["=r" if integer else "=f"] * registers + [str(i) for i in range(registers)] + ["r"] * 3)


@gluon.jit
def multiply_add(x, y, acc, add, COLUMNS: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr):
    """Start acc + x @ y, or x @ y if not `add`, for the first COLUMNS columns of `acc`.

    If acc has more, or Gluon does not know the instruction, x has 64 rows or 128, and lines of 128 bytes in shared
    memory: along K if X_K_MAJOR, else along its rows. So has y: along K if Y_K_MAJOR, else it is the first of boxes
    that follow each other, each a line wide.
    """
    if acc.shape[1] == COLUMNS and not (x.dtype == gl.int8 and COLUMNS > MOST_INT8):
        return warpgroup_mma(x, y, acc, use_acc=add, is_async=True)
    else:
        TEXT: gl.constexpr = products(acc.shape[0], acc.shape[1], COLUMNS, x.dtype, y.dtype, X_K_MAJOR, Y_K_MAJOR)
        IN_PLACE: gl.constexpr = in_place(acc.shape[0], acc.shape[1], x.dtype == gl.int8)
        return gl.inline_asm(TEXT, IN_PLACE, [acc, x, y, gl.to_tensor(add).to(gl.int32)], acc.type)


@gluon.jit
def as_factor(smem, TRANSPOSED: gl.constexpr):
    """Return one buffer of a ring as the multiplication needs it."""
    return smem.permute((1, 0)) if TRANSPOSED else smem


@gluon.jit
def clear_from(box, rows):
    """Set the rows of a box from number `rows` on to zero."""
    VECTOR: gl.constexpr = VECTOR_UNIT * 8 // box.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = min(box.shape[1] // VECTOR, THREADS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [THREADS // ACROSS, ACROSS], [4, 1], [1, 0])
    row = gl.arange(0, box.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    values = box.load(LAYOUT)
    box.store(gl.where((row < rows)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def clear_others(ring, tiling, SLAB: gl.constexpr, stage, rows):
    """Set what a stage has of the next group of K to zero, its rows from number `rows` on.

    Both factors are cleared: 0 times NaN would not be 0.
    """
    t = tiling
    clear_from(ring.x.index(stage * t.PARTS + SLAB), rows)
    for i in gl.static_range(t.BOXES):
        clear_from(ring.y.index(stage * t.BOXES + i), rows)
    if t.COLS1 > 0:
        clear_from(ring.y1.index(stage), rows)
    fence_async_shared()
    gl.barrier()  # a wgmma reads what all threads wrote


@gluon.jit
def multiply_precise(ring, cluster, tiling, SLAB: gl.constexpr, stage, acc, acc1):
    """Add the product of a stage in fp32: the sums of Hopper's fp8 tensor cores move there after every step."""
    t = tiling
    x = as_factor(ring.x.index(stage * t.PARTS + SLAB), not t.X_K_MAJOR)
    y = as_factor(ring.y.index(stage * t.BOXES), t.Y_K_MAJOR)
    product = multiply_add(x, y, acc, False, t.COLUMNS - t.COLS1, t.X_K_MAJOR, t.Y_K_MAJOR)
    if t.COLS1 > 0:
        y1 = as_factor(ring.y1.index(stage), t.Y_K_MAJOR)
        product1 = warpgroup_mma(x, y1, acc1, use_acc=False, is_async=True)
        product, product1 = warpgroup_mma_wait(0, deps=(product, product1))
        acc1 += product1
    else:
        product = warpgroup_mma_wait(0, deps=(product,))
    release(ring, cluster, stage, True)
    acc += product
    return acc, acc1


@gluon.jit
def multiply_stage(ring, cluster, tiling, SLAB: gl.constexpr, stage, acc, acc1, add, IN_FLIGHT: gl.constexpr):
    """Start the product of a stage, end it unless IN_FLIGHT, and release the stage before if there is one (`add`)."""
    t = tiling
    x = as_factor(ring.x.index(stage * t.PARTS + SLAB), not t.X_K_MAJOR)
    y = as_factor(ring.y.index(stage * t.BOXES), t.Y_K_MAJOR)
    acc = multiply_add(x, y, acc, add, t.COLUMNS - t.COLS1, t.X_K_MAJOR, t.Y_K_MAJOR)
    if t.COLS1 > 0:
        y1 = as_factor(ring.y1.index(stage), t.Y_K_MAJOR)
        acc1 = warpgroup_mma(x, y1, acc1, use_acc=add, is_async=True)
        acc, acc1 = warpgroup_mma_wait(2 if IN_FLIGHT else 0, deps=(acc, acc1))
    else:
        acc = warpgroup_mma_wait(1 if IN_FLIGHT else 0, deps=(acc,))
    # The stage before is computed, not carried along: the compiler takes a variable that begins as another carried one
    # to be constant.
    release(ring, cluster, (stage + t.STAGES - 1) % t.STAGES, add)
    return acc, acc1


@gluon.jit
def multiply_boxes(
    ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, first, end, acc, acc1, added_to, added_phase, awaited, size
):
    """Do `multiply` with both factors in shared memory; the last product may be in flight.

    The last step of a group of K, if it is not full, has a loop of its own: a branch in the main loop took up to 9 % of
    the time.
    """
    t = tiling
    whole = end
    if t.GROUPED_K:
        whole = gl.maximum(size // t.BLOCK_K, first)
    for step in range(first, whole):
        if adds_matrix(t.EPILOGUE) and added_to is not None and step == awaited:
            mbarrier.wait(added_to, added_phase)
        mbarrier.wait(ring.full.index(stage), phase)
        if t.PRECISE:
            acc, acc1 = multiply_precise(ring, cluster, t, SLAB, stage, acc, acc1)
        else:
            acc, acc1 = multiply_stage(ring, cluster, t, SLAB, stage, acc, acc1, step > first, True)
        stage, phase = next_stage(stage, phase, t.STAGES)
    if t.GROUPED_K:
        for step in range(whole, end):
            mbarrier.wait(ring.full.index(stage), phase)
            clear_others(ring, t, SLAB, stage, size - step * t.BLOCK_K)
            # were a product in flight here, or behind this loop, the assembler would wait after every wgmma
            if t.COLS1 > 0:
                acc, acc1 = warpgroup_mma_wait(0, deps=(acc, acc1))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            acc, acc1 = multiply_stage(ring, cluster, t, SLAB, stage, acc, acc1, step > first, False)
            stage, phase = next_stage(stage, phase, t.STAGES)
    return acc, acc1, stage, phase


@gluon.jit
def multiply_scaled(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, first, end, acc):
    """Do `multiply` with block scales, in one accumulator and without `added_to`.

    Those of the next step are read while a product is in flight. A step's own would come between its instructions, and
    delay the last ones: the tensor cores then took up to 20 % longer.
    """
    t = tiling
    mbarrier.wait(ring.full.index(stage), phase)
    x_scales, y_scales = held_scales(ring, t, SLAB, stage, acc)
    for step in range(first, end):
        x = as_factor(ring.x.index(stage * t.PARTS + SLAB), not t.X_K_MAJOR)
        y = as_factor(ring.y.index(stage * t.BOXES), t.Y_K_MAJOR)
        product = multiply_add(x, y, acc, False, t.COLUMNS, t.X_K_MAJOR, t.Y_K_MAJOR)
        later, later_phase = next_stage(stage, phase, t.STAGES)
        mbarrier.wait(ring.full.index(later), later_phase, pred=step + 1 < end)
        # the last step reads its own again
        later_x, later_y = held_scales(ring, t, SLAB, gl.where(step + 1 < end, later, stage), acc)
        product = warpgroup_mma_wait(0, deps=(product,))
        release(ring, cluster, stage, True)
        acc = add_scaled(acc, product, x_scales, y_scales, t)
        x_scales, y_scales = later_x, later_y
        stage, phase = later, later_phase
    return acc, stage, phase


@gluon.jit
def in_other_registers(x, zero):
    """Return 32-bit `x` in registers of its own, written after what came before; `zero` is 0, unknown to compilers.

    An assignment would not do: the assembler joins its sides. Loads then write what a product in flight reads, as far
    as it sees, so it waits after every wgmma (ptxas, C7513).
    """
    zeros = gl.full(x.shape, zero, gl.int32, x.type.layout)
    return gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zeros], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def multiply_registers(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, first, end, acc, acc1):
    """Do `multiply` with X in registers: 32-bit elements that do not lie along K there. All products are done.

    X of the next step is loaded while a product is in flight. Only then do registers of X change.
    """
    t = tiling
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 1)
    mbarrier.wait(ring.full.index(stage), phase)
    x = ring.x.index(stage * t.PARTS + SLAB).permute((1, 0)).load(LAYOUT)
    for step in range(first, end):
        y = as_factor(ring.y.index(stage * t.BOXES), t.Y_K_MAJOR)
        acc = warpgroup_mma(x, y, acc, use_acc=step > first, is_async=True)
        if t.COLS1 > 0:
            y1 = as_factor(ring.y1.index(stage), t.Y_K_MAJOR)
            acc1 = warpgroup_mma(x, y1, acc1, use_acc=step > first, is_async=True)
        later, later_phase = next_stage(stage, phase, t.STAGES)
        mbarrier.wait(ring.full.index(later), later_phase, pred=step + 1 < end)
        later_x = ring.x.index(later * t.PARTS + SLAB).permute((1, 0)).load(LAYOUT)
        if t.COLS1 > 0:
            acc, acc1, x = warpgroup_mma_wait(0, deps=(acc, acc1, x))
        else:
            acc, x = warpgroup_mma_wait(0, deps=(acc, x))
        release(ring, cluster, stage, True)
        x = in_other_registers(later_x, end >> 31)
        stage, phase = later, later_phase
    return acc, acc1, stage, phase


@gluon.jit
def split(values):
    """Return the planes of fp32 `values`, three bf16 tensors: the nearest numbers, those nearest to the rest, the rest.

    Their sum is exact, as 24 bits are three times 8, unless the last plane is below the least number of bf16. Numbers
    nearer to infinity than to the largest of bf16 count as infinite (docs/numerics.md).
    """
    return gl.inline_asm_elementwise(
        SPLIT_PTX, "=&r,=&r,=r,r,r", [values], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def turn_of(stage, phase, tiling):
    """Return the number of a stage's turn among IN_TURN: stages are counted on when the ring wraps."""
    return (stage + phase * tiling.STAGES) & (IN_TURN - 1)


@gluon.jit
def await_turn(ring, tiling, stage, phase):
    """Wait until all have multiplied the planes of the last stage but one, in whose place those of `stage` come."""
    wraps = stage < IN_TURN
    before = gl.where(wraps, stage + tiling.STAGES, stage) - IN_TURN
    mbarrier.wait(ring.planes_empty.index(before), phase ^ wraps.to(gl.int32))


@gluon.jit
def pass_turn(ring, cluster, stage):
    """Tell that planes of a stage are written, and release the stage, of which all has been read.

    Triton's arrival begins with a barrier of the warpgroup: all threads have written, and have read the stage.
    """
    fence_async_shared()
    mbarrier.arrive(ring.planes_full.index(stage), count=1)
    release(ring, cluster, stage, True)


@gluon.jit
def split_stage(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, LAYOUT: gl.constexpr):
    """Split the numbers of a stage and release it. Return the planes of slab SLAB of X.

    Those of Y go to shared memory in the order of its boxes. Each consumer writes a part, when all have multiplied the
    planes of the last stage but one, which were there.
    """
    t = tiling
    mbarrier.wait(ring.full.index(stage), phase)
    x = split(as_factor(ring.x.index(stage * t.PARTS + SLAB), not t.X_K_MAJOR).load(LAYOUT))
    y = ring.y.index(stage)
    LINES: gl.constexpr = y.shape[0] // t.PARTS
    VECTOR: gl.constexpr = VECTOR_UNIT // 4
    ACROSS: gl.constexpr = min(y.shape[1] // VECTOR, THREADS)
    OF_Y: gl.constexpr = gl.BlockedLayout([1, VECTOR], [THREADS // ACROSS, ACROSS], [4, 1], [1, 0])
    planes = split(y.slice(SLAB * LINES, LINES).load(OF_Y))
    await_turn(ring, t, stage, phase)
    plane = OF_FP32 * turn_of(stage, phase, t)
    for i in gl.static_range(OF_FP32):
        ring.planes.index(plane + i).slice(SLAB * LINES, LINES).store(planes[i])
    pass_turn(ring, cluster, stage)
    return x


@gluon.jit
def multiply_split(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, first, end, acc):
    """Do `multiply` for fp32: six of the nine products of planes, which tensor cores add up for a step. All are done.

    The other three are less than the rounding of one product (docs/numerics.md). Planes of a step are made while that
    before is multiplied. The largest product of a step is added by itself, and first: it alone is infinite where the
    sum is, since the planes behind an infinite number are NaN. The others count only where the sum is finite then.
    """
    t = tiling
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    INFINITY: gl.constexpr = float("inf")
    high, middle, low = split_stage(ring, cluster, t, SLAB, stage, phase, LAYOUT)
    for step in range(first, end):
        mbarrier.wait(ring.planes_full.index(stage), phase)
        plane = OF_FP32 * turn_of(stage, phase, t)
        y_high = as_factor(ring.planes.index(plane), t.Y_K_MAJOR)
        y_middle = as_factor(ring.planes.index(plane + 1), t.Y_K_MAJOR)
        y_low = as_factor(ring.planes.index(plane + 2), t.Y_K_MAJOR)
        product = warpgroup_mma(high, y_high, acc, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        acc += product
        # The smallest first, to lose less of them; and A before B, so that bits do not depend on the family.
        if t.SWAPPED:
            product = warpgroup_mma(high, y_low, product, use_acc=False, is_async=True)
            product = warpgroup_mma(low, y_high, product, is_async=True)
            product = warpgroup_mma(middle, y_middle, product, is_async=True)
            product = warpgroup_mma(high, y_middle, product, is_async=True)
            product = warpgroup_mma(middle, y_high, product, is_async=True)
        else:
            product = warpgroup_mma(low, y_high, product, use_acc=False, is_async=True)
            product = warpgroup_mma(high, y_low, product, is_async=True)
            product = warpgroup_mma(middle, y_middle, product, is_async=True)
            product = warpgroup_mma(middle, y_high, product, is_async=True)
            product = warpgroup_mma(high, y_middle, product, is_async=True)
        later, later_phase = next_stage(stage, phase, t.STAGES)
        if step + 1 < end:
            later_high, later_middle, later_low = split_stage(ring, cluster, t, SLAB, later, later_phase, LAYOUT)
        else:
            later_high, later_middle, later_low = high, middle, low
        product, high, middle, low = warpgroup_mma_wait(0, deps=(product, high, middle, low))
        acc = gl.where(gl.abs(acc) < INFINITY, acc + product, acc)
        mbarrier.arrive(ring.planes_empty.index(stage), count=1)
        high, middle, low = later_high, later_middle, later_low
        stage, phase = later, later_phase
    return acc, stage, phase


@gluon.jit
def turn_stage(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, LAYOUT: gl.constexpr):
    """Write Y of a stage to shared memory along K, and release the stage. Return slab SLAB of X.

    Each consumer writes a part, when all have multiplied the plane of the last stage but one, which was there.
    """
    t = tiling
    mbarrier.wait(ring.full.index(stage), phase)
    x = as_factor(ring.x.index(stage * t.PARTS + SLAB), not t.X_K_MAJOR).load(LAYOUT)
    y = ring.y.index(stage)
    PART: gl.constexpr = y.shape[1] // t.PARTS
    ACROSS: gl.constexpr = min(PART, THREADS)
    VECTOR: gl.constexpr = VECTOR_UNIT // 4
    OF_Y: gl.constexpr = gl.BlockedLayout([VECTOR, 1], [THREADS // ACROSS, ACROSS], [4, 1], [0, 1])
    lines = y.slice(SLAB * PART, PART, dim=1).load(OF_Y)
    await_turn(ring, t, stage, phase)
    ring.planes.index(turn_of(stage, phase, t)).slice(SLAB * PART, PART).store(lines.permute((1, 0)))
    pass_turn(ring, cluster, stage)
    return x


@gluon.jit
def multiply_turned(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, first, end, acc):
    """Do `multiply` for 32-bit elements that lie across K: X in registers, Y turned. All products are done.

    Y of a step is turned while that before is multiplied.
    """
    t = tiling
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 1)
    x = turn_stage(ring, cluster, t, SLAB, stage, phase, LAYOUT)
    for step in range(first, end):
        mbarrier.wait(ring.planes_full.index(stage), phase)
        y = as_factor(ring.planes.index(turn_of(stage, phase, t)), True)
        acc = warpgroup_mma(x, y, acc, use_acc=step > first, is_async=True)
        later, later_phase = next_stage(stage, phase, t.STAGES)
        later_x = x
        if step + 1 < end:
            later_x = turn_stage(ring, cluster, t, SLAB, later, later_phase, LAYOUT)
        acc, x = warpgroup_mma_wait(0, deps=(acc, x))
        mbarrier.arrive(ring.planes_empty.index(stage), count=1)
        x = later_x
        stage, phase = later, later_phase
    return acc, stage, phase


@gluon.jit
def multiply_serially(ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, steps, acc, acc1, size):
    """Do `multiply` in SERIAL slices of K, each with sums of its own, which are added as `reduce` adds them.

    So a row has the bits that it has from kernels that multiply slices side by side. All products are done.
    """
    t = tiling
    total = gl.zeros_like(acc)
    for part in range(t.SERIAL):
        first, end = part * steps // t.SERIAL, (part + 1) * steps // t.SERIAL
        sums, acc1, stage, phase = multiply_boxes(
            ring, cluster, t, SLAB, stage, phase, first, end, acc, acc1, None, 0, -1, size
        )
        sums = warpgroup_mma_wait(0, deps=(sums,))
        release(ring, cluster, (stage + t.STAGES - 1) % t.STAGES, True)
        total += sums
    return total, acc1, stage, phase


@gluon.jit
def multiply(
    ring, cluster, tiling, SLAB: gl.constexpr, stage, phase, first, end, size, added_to=None, added_phase=0, awaited=-1
):
    """Return the sums of slab SLAB over steps `first` to `end`, from `stage` on; `drain` completes them.

    `size` is the number of elements of K (`Work.size`). Step `awaited` waits for the barrier `added_to` too, if there
    is one and `awaited` is not negative.
    """
    t = tiling
    PART: gl.constexpr = t.ROWS // t.PARTS
    COLS1: gl.constexpr = t.COLS1 if t.COLS1 > 0 else t.COLS  # of an unused accumulator, which vanishes
    BITS: gl.constexpr = 16 if t.Y_PLANES == OF_FP32 else ring.x.dtype.primitive_bitwidth
    SUMS: gl.constexpr = gl.int32 if ring.x.dtype == gl.int8 else gl.float32
    acc = gl.zeros([PART, t.COLS], SUMS, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, t.COLS, 256 // BITS]))
    acc1 = gl.zeros([PART, COLS1], SUMS, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS1, 256 // BITS]))
    if t.Y_PLANES == 1:
        acc, stage, phase = multiply_turned(ring, cluster, t, SLAB, stage, phase, first, end, acc)
        return acc, acc1, stage, phase
    elif t.Y_PLANES == OF_FP32:
        acc, stage, phase = multiply_split(ring, cluster, t, SLAB, stage, phase, first, end, acc)
        return acc, acc1, stage, phase
    elif t.X_GROUP > 0:
        acc, stage, phase = multiply_scaled(ring, cluster, t, SLAB, stage, phase, first, end, acc)
        return acc, acc1, stage, phase
    elif t.SERIAL > 1:
        return multiply_serially(ring, cluster, t, SLAB, stage, phase, end, acc, acc1, size)
    elif t.X_IN_REGISTERS:
        return multiply_registers(ring, cluster, t, SLAB, stage, phase, first, end, acc, acc1)
    else:
        return multiply_boxes(
            ring, cluster, t, SLAB, stage, phase, first, end, acc, acc1, added_to, added_phase, awaited, size
        )


@gluon.jit
def drain(ring, cluster, tiling, acc, acc1, stage, pred):
    """Return the sums when the last product is done; release its stage, the one before `stage`, if `pred`: one was."""
    t = tiling
    if not (t.PRECISE or t.X_IN_REGISTERS or t.SERIAL > 1):
        if t.COLS1 > 0:
            acc, acc1 = warpgroup_mma_wait(0, deps=(acc, acc1))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        release(ring, cluster, (stage + t.STAGES - 1) % t.STAGES, pred)
    return acc, acc1
