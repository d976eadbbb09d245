"""The epilogue of a slab: scales, bias and activation of the sums, shared memory, and TMA stores to C."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from aotmm.kernels import LINE_BYTES, VECTOR_BYTES
from aotmm.kernels.epilogue import MATRIX, VECTOR, activate, adds_matrix, linear
from aotmm.kernels.hopper.cluster import THREADS
from aotmm.kernels.hopper.pipeline import bias_box, bias_boxes, next_stage, pass_planes, release

BOX_ALIGNMENT = gl.constexpr(VECTOR_BYTES)  # of a matrix that TMA copies, and of its rows
SWIZZLED_BYTES = gl.constexpr(LINE_BYTES)
FILLED_ROWS = gl.constexpr(16)  # of a matrix that TMA cannot copy, at once: 8 elements for each thread


@gluon.aggregate
class Epilogue:
    """The operands of the epilogue, the place of partial sums, and that of C, if threads store it."""

    M: gl.tensor
    N: gl.tensor
    workspace_ptr: gl.tensor
    workspace_stride_m: gl.tensor
    workspace_stride_z: gl.tensor
    bias_ptr: gl.tensor
    bias_rank: gl.tensor
    stride_bias_z: gl.tensor
    stride_bias_m: gl.tensor
    stride_bias_n: gl.tensor
    scale_a_ptr: gl.tensor
    scale_b_ptr: gl.tensor
    stride_scale_a: gl.tensor
    stride_scale_b: gl.tensor
    stride_scale_bz: gl.base_value
    activation: gl.tensor
    slope: gl.tensor
    c_ptr: gl.base_value
    stride_cz: gl.base_value
    stride_cm: gl.base_value

    @gluon.jit
    def stages(self, tiling):
        """Return the stages of the ring for a matrix that is added to a tile; 0 if none is."""
        t = tiling
        if not adds_matrix(t.EPILOGUE):
            return 0
        else:
            COLUMNS: gl.constexpr = bias_boxes(t) * t.BIAS
            return gl.where(self.bias_rank == MATRIX, (t.COLUMNS + COLUMNS - 1) // COLUMNS, 0)

    @gluon.jit
    def bias_of(self, matrix):
        """Return the address of the bias of a member of the batch."""
        return self.bias_ptr + matrix.to(gl.int64) * self.stride_bias_z

    @gluon.jit
    def scale_b_of(self, matrix, tiling):
        """Return the address of the scales of columns of B: each group of rows has its own."""
        if tiling.GROUPED:
            return self.scale_b_ptr + matrix.to(gl.int64) * self.stride_scale_bz
        else:
            return self.scale_b_ptr

    @gluon.jit
    def matrix_of_c(self, matrix):
        """Return the address of a matrix of C, if threads store it."""
        return self.c_ptr + matrix.to(gl.int64) * self.stride_cz

    @gluon.jit
    def in_vectors(self):
        """Return whether rows of C begin at multiples of 16 bytes and have whole ones."""
        BYTES: gl.constexpr = self.c_ptr.dtype.element_ty.primitive_bitwidth // 8
        sizes = self.stride_cz | self.stride_cm | self.N
        return (self.c_ptr.to(gl.int64) | sizes * BYTES) % BOX_ALIGNMENT == 0

    @gluon.jit
    def boxed(self):
        """Return whether TMA can copy that matrix. If not, its tensor map is empty."""
        BYTES: gl.constexpr = self.bias_ptr.dtype.element_ty.primitive_bitwidth // 8
        strides = self.stride_bias_z | self.stride_bias_m
        odd = (self.bias_ptr.to(gl.int64) | strides * BYTES) % BOX_ALIGNMENT
        return (self.stride_bias_n == 1) & (odd == 0)


@gluon.aggregate
class Factors:
    """Scales and bias of one slab, in fp32: one number per row of C, and two per column."""

    scale_a: gl.base_value
    scale_b: gl.base_value
    bias: gl.base_value


@gluon.jit
def fetch(ptr, stride, given, first, size, OTHER: gl.constexpr, COUNT: gl.constexpr):
    """Load COUNT numbers from `first` on as fp32; use OTHER past `size` and if none are given."""
    PER_THREAD: gl.constexpr = COUNT // 128 if COUNT > 128 else 1
    i = first + gl.arange(0, COUNT, layout=gl.BlockedLayout([PER_THREAD], [32], [4], [0]))
    return gl.load(ptr + i.to(gl.int64) * stride, mask=(i < size) & given, other=OTHER).to(gl.float32)


@gluon.jit
def fetch_factors(matrix, row, col, memory, epilogue, tiling):
    """Start reading the factors of the epilogue of the slab at `row` of X and `col` of Y.

    They are read before the products and used after them: nothing waits for them.
    """
    e = epilogue
    t = tiling
    if t.EPILOGUE == "none" and not t.SCALED:
        return Factors(0, 0, 0)
    else:
        MS: gl.constexpr = memory.scale_a.shape[1]
        NS: gl.constexpr = memory.bias.shape[1]
        m = col if t.SWAPPED else row
        n = row if t.SWAPPED else col
        bias = fetch(e.bias_of(matrix), e.stride_bias_n, e.bias_rank == VECTOR, n, e.N, 0.0, NS)
        if t.SCALED:
            scale_a = fetch(e.scale_a_ptr, e.stride_scale_a, e.scale_a_ptr.to(gl.int64) != 0, m, e.M, 1.0, MS)
            scale_b = fetch(e.scale_b_of(matrix, t), e.stride_scale_b, e.scale_b_ptr.to(gl.int64) != 0, n, e.N, 1.0, NS)
        else:
            scale_a = bias  # not used
            scale_b = bias
        return Factors(scale_a, scale_b, bias)


@gluon.jit
def epilogue_memory(tiling, COUNT: gl.constexpr):
    """Allocate shared memory through which factors reach the threads that need them, COUNT times."""
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
def has_bias(epilogue, tiling):
    """Return whether to add a vector: where nothing else may follow, a product without one takes no time for it."""
    if tiling.EPILOGUE == "bias":
        return epilogue.bias_rank == VECTOR
    else:
        return tiling.EPILOGUE != "none"


@gluon.jit
def put_factors(memory, INDEX: gl.constexpr, held, epilogue, tiling):
    """Put the factors that were read into shared memory."""
    if tiling.EPILOGUE == "none" and not tiling.SCALED:
        return memory
    else:
        placed = Factors(memory.scale_a.index(INDEX), memory.scale_b.index(INDEX), memory.bias.index(INDEX))
        if has_bias(epilogue, tiling):
            placed.bias.store(held.bias)
        if tiling.SCALED:
            placed.scale_a.store(held.scale_a)
            placed.scale_b.store(held.scale_b)
        return placed


@gluon.jit
def scaled(sums, factors):
    """Return scale_a * scale_b * sums, for factors in shared memory.

    The product is rounded: no compiler makes one operation of a `mul.rn` and the addition of a matrix, as none does in
    family `tile`, where a branch lies between. So both give the same bits.
    """
    sums *= factors.scale_a.load(gl.SliceLayout(1, sums.type.layout))[:, None]
    scale_b = factors.scale_b.load(gl.SliceLayout(0, sums.type.layout))[None, :]
    ROUNDED: gl.constexpr = "mul.rn.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(ROUNDED, "=f,f,f", [sums, scale_b], gl.float32, is_pure=True, pack=1)


@gluon.jit
def finish(sums, factors, epilogue, tiling):
    """Return activation(scales * sums + bias) for a chunk of C and its factors; a matrix is already added."""
    e = epilogue
    if tiling.SCALED and (not adds_matrix(tiling.EPILOGUE) or e.bias_rank != MATRIX):
        sums = scaled(sums, factors)
    if has_bias(e, tiling):
        sums += factors.bias.load(gl.SliceLayout(0, sums.type.layout))[None, :]
    if adds_matrix(tiling.EPILOGUE):
        if e.activation != 0:
            if tiling.EPILOGUE == "bias_relu":
                sums = linear(sums, e.activation, e.slope)
            else:
                sums = activate(sums, e.activation, e.slope)
    return sums


@gluon.jit
def part_of(factors, OFFSET: gl.constexpr, M_COUNT: gl.constexpr, N_COUNT: gl.constexpr, tiling):
    """Return the factors of M_COUNT rows and N_COUNT columns of C, which are columns OFFSET... of a slab."""
    t = tiling
    M_OFFSET: gl.constexpr = OFFSET if t.SWAPPED else 0
    N_OFFSET: gl.constexpr = 0 if t.SWAPPED else OFFSET
    bias = factors.bias.slice(N_OFFSET, N_COUNT)
    scale_a = factors.scale_a.slice(M_OFFSET, M_COUNT) if t.SCALED else bias
    scale_b = factors.scale_b.slice(N_OFFSET, N_COUNT) if t.SCALED else bias
    return Factors(scale_a, scale_b, bias)


@gluon.jit
def halves(sums):
    """Return the left and the right half of the columns."""
    return sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def store(chunk, matrix, m, n, limit, c_desc, c_smem, epilogue, tiling):
    """Round a chunk, and start its store to row m and column n of a matrix of C.

    Of grouped products, rows from `limit` on belong to others: a chunk that has some is stored by threads. So is every
    chunk of C if its rows may lie anywhere. A chunk with all columns of its tile may be whole rows of C. Then a warp
    stores several at once: sectors of memory in which one row ends and the next begins are written once. TMA writes
    each row apart.
    """
    t = tiling
    VECTOR_LENGTH: gl.constexpr = BOX_ALIGNMENT * 8 // c_smem.dtype.primitive_bitwidth
    WHOLE_ROWS: gl.constexpr = chunk.shape[1] == (t.ROWS if t.SWAPPED else t.COLUMNS)
    tma.store_wait(0)
    gl.barrier()  # one thread waited for the store before, or others may still read
    c_smem.store(chunk.to(c_desc.dtype))
    fence_async_shared()
    gl.barrier()  # one thread stores the writes of all
    if t.ANY_C:
        if WHOLE_ROWS and epilogue.in_vectors():
            c_ptr = gl.multiple_of(epilogue.matrix_of_c(matrix), BOX_ALIGNMENT)
            store_rows(c_smem, c_ptr, m, n, epilogue.M, epilogue, VECTOR_LENGTH)
        else:
            store_rows(c_smem, epilogue.matrix_of_c(matrix), m, n, epilogue.M, epilogue, 1)
    elif not t.GROUPED:
        tma.async_store(c_desc, [matrix, m, n], c_smem)
    elif m + chunk.shape[0] <= limit:
        tma.async_store(c_desc, [0, m, n], c_smem)
    else:
        store_rows(c_smem, epilogue.c_ptr, m, n, limit, epilogue, VECTOR_LENGTH)


@gluon.jit
def store_rows(c_smem, c_ptr, m, n, limit, epilogue, VECTOR_LENGTH: gl.constexpr):
    """Store the rows below `limit` of a chunk at row m and column n of the matrix at `c_ptr`.

    VECTOR_LENGTH elements are stored at once. It divides the distance of rows and their length.
    """
    ROWS: gl.constexpr = c_smem.shape[0]
    COLS: gl.constexpr = c_smem.shape[1]
    ACROSS: gl.constexpr = min(COLS // VECTOR_LENGTH, THREADS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR_LENGTH], [THREADS // ACROSS, ACROSS], [4, 1], [1, 0])
    rows = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = n + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    starts = rows.to(gl.int64) * (epilogue.stride_cm // VECTOR_LENGTH) * VECTOR_LENGTH
    inside = cols // VECTOR_LENGTH < epilogue.N // VECTOR_LENGTH
    mask = (rows < limit)[:, None] & inside[None, :]
    gl.store(c_ptr + starts[:, None] + cols[None, :], c_smem.load(LAYOUT), mask=mask)


@gluon.jit
def store_slab(
    sums, matrix, row, col, limit, c_desc, c1_desc, c_smem, c1_smem, factors, OFFSET: gl.constexpr, epilogue, tiling
):
    """Write the sums of rows `row`... and columns `col`..., OFFSET... of the tile, WIDTH or TAIL columns at a time."""
    e = epilogue
    t = tiling
    SIZE: gl.constexpr = sums.shape[1]
    WHOLE: gl.constexpr = SIZE == t.WIDTH and OFFSET + SIZE <= t.COLUMNS
    if OFFSET < t.COLUMNS:
        if not (WHOLE or SIZE == t.TAIL):
            left, right = halves(sums)
            HALF: gl.constexpr = SIZE // 2
            store_slab(left, matrix, row, col, limit, c_desc, c1_desc, c_smem, c1_smem, factors, OFFSET, e, t)
            store_slab(
                right, matrix, row, col + HALF, limit, c_desc, c1_desc, c_smem, c1_smem, factors, OFFSET + HALF, e, t
            )
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
                slab = e.workspace_ptr + matrix.to(gl.int64) * e.workspace_stride_z
                gl.store(slab + ms.to(gl.int64)[:, None] * e.workspace_stride_m + ns[None, :], chunk)
            else:
                if t.SCALED or t.EPILOGUE != "none":
                    if OFFSET == 0 and (t.SCALED or has_bias(e, t)):
                        gl.barrier()  # all factors are in shared memory
                    chunk = finish(chunk, part_of(factors, OFFSET, chunk.shape[0], chunk.shape[1], t), e, t)
                if SIZE == t.WIDTH:
                    store(chunk, matrix, m, n, limit, c_desc, c_smem, e, t)
                else:
                    store(chunk, matrix, m, n, limit, c1_desc, c1_smem, e, t)


@gluon.jit
def store_in_parts(sums, matrix, row, col, limit, c_desc, c_smem, factors, epilogue, tiling):
    """Do `store_slab` with an activation as a loop over quarters: code for all columns exceeds the instruction cache.

    Registers cannot be indexed, so the quarters change places. For alternatives see docs/experiments/activations.md.
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
        chunk = finish(first, Factors(factors.scale_a, scale_b.index(i), bias.index(i)), epilogue, tiling)
        store(chunk, matrix, row, n, limit, c_desc, c_smem, epilogue, tiling)
        first, second, third = second, third, fourth


@gluon.jit
def fill(box, matrix, m, n, epilogue):
    """Copy the box at row m and column n of a matrix that is added, which TMA cannot copy."""
    e = epilogue
    COLS: gl.constexpr = box.shape[1]
    # rows follow each other in shared memory only if each is a line of the swizzle
    LINES: gl.constexpr = COLS * box.dtype.primitive_bitwidth // 8 <= SWIZZLED_BYTES
    ROWS: gl.constexpr = min(box.shape[0], FILLED_ROWS) if LINES else box.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    parts = box.reinterpret(box.dtype, [box.shape[0] // ROWS, ROWS, COLS], box.layout)
    cols = (n + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    for i in range((gl.minimum(e.M - m, box.shape[0]) + ROWS - 1) // ROWS):
        rows = (m + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))[:, None]
        ptrs = e.bias_of(matrix) + rows.to(gl.int64) * e.stride_bias_m + cols.to(gl.int64) * e.stride_bias_n
        values = gl.load(ptrs, mask=(rows < e.M) & (cols < e.N), other=0.0)
        gl.barrier()  # others may still read the last box, or TMA's data
        parts.index(i).store(values)
    fence_async_shared()  # the next stage there is written by TMA


@gluon.jit
def add_matrix(
    sums, matrix, row, col, ring, cluster, bias_desc, SLAB: gl.constexpr, stage, phase, factors, OFFSET: gl.constexpr,
    epilogue, tiling,
):  # fmt: skip
    """Scale the sums of rows `row`... and columns `col`..., OFFSET... of the tile, and add a matrix to them.

    Its first box is in `stage` of the ring. Return the sums, and the stage and phase after the last box.
    """
    t = tiling
    SIZE: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = sums.type.layout
    if OFFSET < t.COLUMNS:
        if SIZE == t.BIAS:
            BOXES: gl.constexpr = bias_boxes(t)
            INDEX: gl.constexpr = OFFSET // SIZE % BOXES
            if INDEX == 0:
                mbarrier.wait(ring.full.index(stage), phase)
            box = bias_box(ring, bias_desc, stage, SLAB, INDEX, t)
            if not epilogue.boxed():
                fill(box, matrix, col if t.SWAPPED else row, row if t.SWAPPED else col, epilogue)
            gl.barrier()  # all of the box is there
            chunk = sums.permute((1, 0)) if t.SWAPPED else sums
            if t.SCALED:
                chunk = scaled(chunk, part_of(factors, OFFSET, chunk.shape[0], chunk.shape[1], t))
            chunk += box.load(chunk.type.layout).to(gl.float32)
            sums = chunk.permute((1, 0)) if t.SWAPPED else chunk
            if INDEX == BOXES - 1:
                fence_async_shared()  # else TMA could overwrite it during reads
                gl.barrier()  # all warps have read it: one arrival may release it for all
                release(ring, cluster, stage, True)
                pass_planes(ring, t, stage)
                stage, phase = next_stage(stage, phase, t.STAGES)
        else:
            HALF: gl.constexpr = SIZE // 2
            left, right = halves(sums)
            left, stage, phase = add_matrix(
                left, matrix, row, col, ring, cluster, bias_desc, SLAB, stage, phase, factors, OFFSET, epilogue, t
            )  # fmt: skip
            right, stage, phase = add_matrix(
                right, matrix, row, col + HALF, ring, cluster, bias_desc, SLAB, stage, phase, factors, OFFSET + HALF,
                epilogue, t,
            )  # fmt: skip
            sums = gl.join(left, right).permute((0, 2, 1)).reshape([sums.shape[0], SIZE])
    return gl.convert_layout(sums, LAYOUT, assert_trivial=True), stage, phase


@gluon.jit
def add_boxes(
    acc, acc1, matrix, row, col, ring, cluster, bias_desc, SLAB: gl.constexpr, stage, phase, factors, epilogue, tiling
):
    """Do `add_matrix` for all of a slab, before any result leaves, so that the stages are soon free."""
    e = epilogue
    t = tiling
    acc, stage, phase = add_matrix(
        acc, matrix, row, col, ring, cluster, bias_desc, SLAB, stage, phase, factors, 0, e, t
    )  # fmt: skip
    if t.COLS1 > 0:
        acc1, stage, phase = add_matrix(
            acc1, matrix, row, col + t.COLS, ring, cluster, bias_desc, SLAB, stage, phase, factors, t.COLS, e, t
        )
    return acc, acc1, stage, phase


@gluon.jit
def store_tile(acc, acc1, matrix, row, col, limit, c_desc, c1_desc, c_smem, c1_smem, factors, epilogue, tiling):
    """Write the sums of one slab of a tile."""
    t = tiling
    if t.IN_TURNS:
        store_in_parts(acc, matrix, row, col, limit, c_desc, c_smem, factors, epilogue, t)
    else:
        store_slab(acc, matrix, row, col, limit, c_desc, c1_desc, c_smem, c1_smem, factors, 0, epilogue, t)
        if t.COLS1 > 0:
            store_slab(
                acc1, matrix, row, col + t.COLS, limit, c_desc, c1_desc, c_smem, c1_smem, factors, t.COLS, epilogue, t
            )


@gluon.jit
def await_operands(epilogue, tiling):
    """Wait for the previous kernel, which may have written what consumers read; producers wait for A and B."""
    if tiling.SCALED or tiling.GROUPED or tiling.GROUPED_K or has_bias(epilogue, tiling):
        gdc_wait()
