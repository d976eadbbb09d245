"""Slices of K in a cluster: each block multiplies one, and the sums meet in shared memory without a second kernel.

Slab p of a tile belongs to block p of the cluster. Every other block writes its sums of that slab to the owner's shared
memory (`st.async`), as they lie in registers: a thread of the owner reads what the same thread of another block wrote.
The owner adds them in the order of their slices, so the bits are the same every time. Source: PTX ISA, "st.async".
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from aotmm.kernels.hopper.pipeline import barriers

_ROWS = 64  # of an instruction
_THREADS = 128  # of a warpgroup
WARPGROUP_THREADS = gl.constexpr(_THREADS)
_VECTOR = 4  # sums that one access moves


@gluon.aggregate
class Exchange:
    """Room for the sums of a slab from all other blocks of the cluster, and the barrier that they complete."""

    sums: gl.base_value
    full: gl.base_value


@gluon.constexpr_function
def registers(rows: int, width: int, columns: int) -> list[int]:
    """Return the registers with sums that are computed: the first `columns` of tensors `width` wide."""
    each, used = width * _ROWS // _THREADS, columns * _ROWS // _THREADS
    return [group * each + i for group in range(rows // _ROWS) for i in range(used)]


@gluon.constexpr_function
def place_of_thread(name: str, address: str, block: str) -> list[str]:
    """Return PTX that puts the address of this thread's first sums in a buffer of another block, or its own."""
    return [
        f"mapa.shared::cluster.u32 {name}, {address}, {block};",
        "mov.u32 thread, %tid.x;",
        f"and.b32 thread, thread, {_THREADS - 1};",
        f"mad.lo.u32 {name}, thread, {4 * _VECTOR}, {name};",
    ]


@gluon.constexpr_function
def sent(rows: int, width: int, columns: int) -> str:
    """Return PTX that writes a slab's sums to another block. Operands: the sums, a buffer, a barrier, that block."""
    count, used = rows * width // _THREADS, registers(rows, width, columns)
    lines = [".reg .b32 there, thread, bar;", *place_of_thread("there", f"${count}", f"${count + 2}")]
    lines.append(f"mapa.shared::cluster.u32 bar, ${count + 1}, ${count + 2};")
    for i in range(0, len(used), _VECTOR):
        four = ", ".join(f"${number}" for number in used[i : i + _VECTOR])
        lines.append(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
            f"[there + {4 * i * _THREADS}], {{{four}}}, [bar];"
        )
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def added(rows: int, width: int, columns: int) -> str:
    """Return PTX that adds sums from a buffer. Operands: results, sums that they replace, the buffer, this block."""
    count, used = rows * width // _THREADS, registers(rows, width, columns)
    lines = [".reg .b32 here, thread;", ".reg .f32 w, x, y, z;"]
    lines += place_of_thread("here", f"${2 * count}", f"${2 * count + 1}")
    for i in range(0, len(used), _VECTOR):
        lines.append(f"ld.shared.v4.f32 {{w, x, y, z}}, [here + {4 * i * _THREADS}];")
        lines += [
            f"add.f32 ${number}, ${number}, {name};" for number, name in zip(used[i : i + _VECTOR], "wxyz", strict=True)
        ]
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def constraints(count: int, results: int, others: int) -> str:
    """Return LLVM's constraints for `count` sums, the first operands or in the place of results, and other operands."""
    sums = ["f"] * count if results == 0 else ["=f"] * results + [str(i) for i in range(count)]
    return ",".join(sums + ["r"] * others + ["~{memory}"])


@gluon.constexpr_function
def pieces(columns: int) -> int:
    """Return into how many buffers a slab's sums are cut, whose sizes are powers of two."""
    return columns // (columns & -columns)


@gluon.jit
def make_exchange(tiling):
    """Allocate an exchange, if blocks multiply slices."""
    t = tiling
    if t.SLICES > 1:
        COUNT: gl.constexpr = pieces(t.COLUMNS)
        SIZE: gl.constexpr = t.ROWS // t.PARTS * t.COLUMNS // COUNT
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        return Exchange(gl.allocate_shared_memory(gl.float32, [(t.SLICES - 1) * COUNT, SIZE], LAYOUT), barriers(1, 1))
    else:
        return Exchange(0, 0)


@gluon.jit
def expect_slices(exchange, cluster, tiling, SLAB: gl.constexpr):
    """Say how many bytes will come, as the consumer of the slab that this block owns, before any block may send."""
    t = tiling
    if t.SLICES > 1:
        BYTES: gl.constexpr = (t.SLICES - 1) * 4 * (t.ROWS // t.PARTS) * t.COLUMNS
        mbarrier.expect(exchange.full.index(0), BYTES, pred=cluster.number == SLAB)


@gluon.jit
def add_slices(acc, exchange, cluster, tiling, SLAB: gl.constexpr):
    """Return the sums of a slab over all slices of K in the block that owns it; others send theirs."""
    t = tiling
    if t.SLICES > 1:
        ROWS: gl.constexpr = acc.shape[0]
        WIDTH: gl.constexpr = acc.shape[1]
        SUMS: gl.constexpr = ROWS * WIDTH // WARPGROUP_THREADS
        if cluster.number == SLAB:
            mbarrier.wait(exchange.full.index(0), 0)
            ADDED: gl.constexpr = added(ROWS, WIDTH, t.COLUMNS)
            IN_PLACE: gl.constexpr = constraints(SUMS, SUMS, 2)
            for i in gl.static_range(t.SLICES - 1):
                buffer = exchange.sums.index(i * pieces(t.COLUMNS))
                acc = gl.inline_asm(ADDED, IN_PLACE, [acc, buffer, cluster.number], acc.type, is_pure=False)
        else:
            SENT: gl.constexpr = sent(ROWS, WIDTH, t.COLUMNS)
            GIVEN: gl.constexpr = constraints(SUMS, 0, 3)
            place = cluster.number - (cluster.number > SLAB).to(gl.int32)
            buffer = exchange.sums.index(place * pieces(t.COLUMNS))
            gl.inline_asm(SENT, GIVEN, [acc, buffer, exchange.full.index(0), gl.to_tensor(SLAB)], [], is_pure=False)
    return acc
