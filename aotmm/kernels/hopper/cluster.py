"""Clusters: blocks of one launch that share operands, so that each box comes from the L2 cache once for several.

A launch says how many blocks a cluster has, down and across its tile of C. One image serves every shape, but for slices
of K (`slices`), whose number is compiled in. Blocks beside each other multiply the same rows of X, blocks below each
other the same columns of Y. They load a shared box in turns, each for all of them (multicast).

Everything that Gluon fixes when it compiles a cluster is PTX here. Addresses in shared memory reach inline PTX without
the number of their block in the cluster; `mapa` puts one in. Source: PTX ISA, "cp.async.bulk.tensor", "mbarrier".
"""

from __future__ import annotations

import itertools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from aotmm.kernels import LINE_BYTES, WARP, WARPGROUP

LINE = gl.constexpr(LINE_BYTES)
THREADS = gl.constexpr(WARP)
WARPS = gl.constexpr(WARPGROUP)
PRODUCERS = gl.constexpr(2)  # warps that load, of a block in a cluster: one X, the other Y
_INIT = gl.constexpr(
    "{ .reg .pred first; .reg .b32 number, here; mov.u32 number, %cluster_ctarank; "
    "mapa.shared::cluster.u32 here, $0, number; mov.u32 number, %tid.x; setp.eq.u32 first, number, 0; "
    "@first mbarrier.init.shared::cta.b64 [here], $1; }"
)
_EXPECT_HERE = gl.constexpr(
    "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
    "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }"
)
_EXPECT = gl.constexpr(
    "{ .reg .pred first; .reg .b32 here; elect.sync _|first, -1; mapa.shared::cluster.u32 here, $0, $2; "
    "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [here], $1; }"
)
_ARRIVE_HERE = gl.constexpr(
    "{ .reg .pred told; setp.ne.b32 told, $1, 0; setp.ne.and.b32 told, $2, 0, told; "
    "@told mbarrier.arrive.shared::cta.b64 _, [$0]; }"
)
# `release` at the scope of the cluster would wait for all writes to global memory: half of the speed.
_ARRIVE = gl.constexpr(
    "{ .reg .pred told; .reg .b32 there; setp.ne.b32 told, $2, 0; setp.ne.and.b32 told, $3, 0, told; "
    "add.u32 there, $0, $1; @told mbarrier.arrive.shared::cluster.b64 _, [there]; }"
)
_ARRIVE_AS_WARP = gl.constexpr(
    "{ .reg .pred told; .reg .b32 lane, there, mask; mov.u32 lane, %laneid; shr.u32 mask, $1, lane; "
    "and.b32 mask, mask, 1; setp.ne.b32 told, mask, 0; mov.u32 there, 0; "
    "mapa.shared::cluster.u32 there, there, lane; add.u32 there, there, $0; "
    "@told mbarrier.arrive.shared::cluster.b64 _, [there]; }"
)
_WINDOW = gl.constexpr("{ .reg .b32 zero; mov.u32 zero, 0; mapa.shared::cluster.u32 $0, zero, $1; }")
# The number of a warp among the producers, the first of which has an even number in the block. Only behind a shuffle
# does the assembler know that all threads of a warp have the same.
_PRODUCER = gl.constexpr(
    "{ .reg .b32 number; mov.u32 number, %tid.x; bfe.u32 number, number, 5, 1; "
    "shfl.sync.idx.b32 $0, number, 0, 31, -1; }"
)
_MEET = gl.constexpr("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;")


@gluon.jit
def special(REGISTER: gl.constexpr):
    """Return the value of a special register. Source: PTX ISA, "Special Registers"."""
    TEXT: gl.constexpr = "mov.u32 $0, %" + REGISTER + ";"
    return gl.inline_asm(TEXT, "=r", [], gl.int32)


@gluon.aggregate
class Cluster:
    """A cluster of `down` by `across` blocks along X and Y, in which this block is at (x, y).

    It is cluster number `first` of the launch's `count`, and this block number `number` in it. `of_x` and `of_y` are
    masks of the blocks that multiply this one's rows of X and its columns of Y; it is in both. If not CLUSTERED, every
    block is one.
    """

    first: gl.tensor
    count: gl.tensor
    down: gl.tensor
    across: gl.tensor
    x: gl.tensor
    y: gl.tensor
    number: gl.tensor
    of_x: gl.tensor
    of_y: gl.tensor
    CLUSTERED: gl.constexpr

    @gluon.jit
    def peers(self):
        """Return the number of this block's peers: those that share an operand with it, itself too."""
        return self.down + self.across - 1

    @gluon.jit
    def first_producer(self):
        """Return whether this producer warp is the first of its two, which loads X; the other loads Y."""
        return gl.inline_asm(_PRODUCER, "=r", [], gl.int32) == 0

    @gluon.jit
    def loads_x(self, step):
        """Return whether it is this block's turn to load X for its peers; their numbers are powers of two."""
        return step & (self.across - 1) == self.y

    @gluon.jit
    def loads_y(self, step):
        """Return whether it is its turn to load Y; that of X is at another step where possible."""
        return (step + 1) & (self.down - 1) == self.x


@gluon.jit
def sharing(m, n, at_m, at_n):
    """Return masks of the blocks with the rows of A, and the columns of B, of one at (at_m, at_n) of m by n blocks."""
    row = (1 << m) - 1  # of blocks along M; its first ones are a geometric series
    return ((1 << m * n) - 1) // row << at_m, row << at_n * m


@gluon.jit
def cluster_of(CLUSTERED: gl.constexpr, SLICES: gl.constexpr, SWAPPED: gl.constexpr):
    """Return the cluster of this block; M is along the first dimension of the launch, N along the second.

    Blocks that multiply slices of K share no operand, so each is alone.
    """
    one = gl.to_tensor(1)
    none = gl.to_tensor(0)
    if not CLUSTERED:
        return Cluster(gl.program_id(0), gl.num_programs(0), one, one, none, none, none, one, one, CLUSTERED)
    else:
        first = special("clusterid.x")
        count = special("nclusterid.x")
        number = special("cluster_ctarank")
        if SLICES > 1:
            own = one << number
            return Cluster(first, count, one, one, none, none, number, own, own, CLUSTERED)
        else:
            m = special("cluster_nctaid.x")
            n = special("cluster_nctaid.y")
            at_m = special("cluster_ctaid.x")
            at_n = special("cluster_ctaid.y")
            of_a, of_b = sharing(m, n, at_m, at_n)
            if SWAPPED:
                return Cluster(first, count, n, m, at_n, at_m, number, of_b, of_a, CLUSTERED)
            else:
                return Cluster(first, count, m, n, at_m, at_n, number, of_a, of_b, CLUSTERED)


@gluon.jit
def meet(cluster):
    """Wait until all threads of the cluster are here: before that, a block must not use another's barriers."""
    if cluster.CLUSTERED:
        gl.inline_asm(_MEET, is_pure=False)


@gluon.jit
def init_barrier(bar, arrivals):
    """Make a barrier that so many arrivals complete, by the first thread of the block."""
    gl.inline_asm(_INIT, "r,r", [bar, gl.to_tensor(arrivals)], [], is_pure=False)


@gluon.jit
def expect(bar, count, cluster):
    """Arrive at the barrier `bar`, which so many bytes shall complete, as a producer: each for itself.

    Gluon's takes a constant number of bytes. Bytes may come before it: the phase ends with the last arrival.
    """
    if cluster.CLUSTERED:
        gl.inline_asm(_EXPECT, "r,r,r,~{memory}", [bar, count, cluster.number], [], is_pure=False)
    else:
        gl.inline_asm(_EXPECT_HERE, "r,r,~{memory}", [bar, count], [], is_pure=False)


@gluon.jit
def window(block):
    """Return where the shared memory of a block of the cluster begins; each thread may name another block.

    Were `mapa` asked for a barrier's own address, the assembler would keep that, and with it the addresses of all
    buffers and the number of the stage, in registers of threads. It moved them to uniform ones in each step then.
    """
    return gl.inline_asm(_WINDOW, "=r,r", [block], gl.int32)


@gluon.jit
def arrive(bar, cluster, pred, ONCE: gl.constexpr):
    """Arrive at the barrier `bar` of all peers as a warpgroup: once if ONCE, else once for each of its warps."""
    thread = gl.arange(0, WARPS * THREADS, layout=gl.BlockedLayout([1], [THREADS], [WARPS], [0]))
    block = thread % THREADS
    told = (cluster.of_x | cluster.of_y) >> block & 1
    if ONCE:
        told *= (thread // THREADS == block % WARPS).to(gl.int32)
    now = gl.to_tensor(pred).to(gl.int32)
    if cluster.CLUSTERED:
        gl.inline_asm(_ARRIVE, "r,r,r,r,~{memory}", [bar, window(block), told, now], [], is_pure=False)
    else:
        gl.inline_asm(_ARRIVE_HERE, "r,r,r,~{memory}", [bar, told, now], [], is_pure=False)


@gluon.jit
def arrive_elsewhere(bar, cluster):
    """Arrive at the barrier `bar` of all peers but this block, as one warp."""
    if cluster.CLUSTERED:
        gl.inline_asm(_ARRIVE_AS_WARP, "r,r,~{memory}", [bar, cluster.of_x ^ cluster.of_y], [], is_pure=False)


@gluon.constexpr_function
def copies(tensor_map: str, boxes: tuple[int, int], line: int, lines: int, bytes_: int, several: bool) -> str:
    """Return PTX that copies boxes one after another to all blocks of a mask if `several`, else to this one.

    A multicast to one block takes longer than a plain copy. Operands are the address of the first box in shared memory,
    where it begins along its lines, the number of its first line, that of its matrix, the barrier, the number of this
    block, the mask. A branch of the one elected thread around all copies leaves them in uniform registers.

    Args:
        tensor_map: the parameter of the kernel.
        boxes: one below the other, and of these so many side by side.
        line, lines, bytes_: elements of a line, lines, and bytes of a box.
    """
    copy = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
    copy, mask = (f"{copy}.multicast::cluster", ", mask") if several else (copy, "")
    text = [
        ".reg .pred one;", ".reg .b16 mask;", ".reg .b32 first, box, begin, below, bar;", ".reg .b64 map;",
        f"mov.b64 map, {tensor_map};", "cvta.param.u64 map, map;",
        "mapa.shared::cluster.u32 first, $0, $5;", "mapa.shared::cluster.u32 bar, $4, $5;",
        "elect.sync _|one, -1;", "@!one bra DONE;", "cvt.u16.u32 mask, $6;",
    ]  # fmt: skip
    for number, (down, across) in enumerate(itertools.product(*map(range, boxes))):
        text += [
            f"add.s32 box, first, {number * bytes_};",
            f"add.s32 begin, $1, {across * line};",
            f"add.s32 below, $2, {down * lines};",
            f"{copy} [box], [map, {{begin, below, $3}}], [bar]{mask};",
        ]
    return "\n".join(["{", *text, "DONE:", "}"])


@gluon.jit
def load_for_all(
    smem, inner, outer, matrix, bar, SEVERAL: gl.constexpr, mask, cluster, BITS: gl.constexpr, MAP: gl.constexpr,
    INNER: gl.constexpr, OUTER: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """Start copying OUTER lines of INNER elements of BITS each, from (matrix, outer, inner) on.

    They come to all blocks of `mask` if SEVERAL, else to this one. Boxes have LINES lines.
    """
    ELEMENTS: gl.constexpr = min(INNER, LINE * 8 // BITS)  # 32 columns are half a line
    BOXES: gl.constexpr = (OUTER // LINES, INNER // ELEMENTS)
    BYTES: gl.constexpr = LINES * ELEMENTS * BITS // 8
    TEXT: gl.constexpr = copies(MAP, BOXES, ELEMENTS, LINES, BYTES, SEVERAL)
    gl.inline_asm(TEXT, "r,r,r,r,r,r,r", [smem, inner, outer, matrix, bar, cluster.number, mask], [], is_pure=False)
