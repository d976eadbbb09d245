"""The warp-specialised kernels for Hopper: what the compiler made of them, and what the manifest says of that.

Nothing is executed here: no interpreter runs wgmma and TMA. The results of these kernels are what tests/gpu runs.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from aotmm.build import compile  # noqa: A004 (the step of that name)
from aotmm.build.compile import I32_LIMIT, compile_variant
from aotmm.kernels import Specialisation, Variant
from aotmm.pack.schema import Config, Kernel, TensorMap
from aotmm.problem import DTYPES
from aotmm.target import target
from tests.native.emulation import in_worker

SM90 = target("sm90")
LAYOUTS = {"nn": "fp16", "nt": "bf16", "tn": "fp16", "tt": "bf16"}  # both types, which differ in nothing here
# Small rings, so that they compile fast: block_m, block_n, block_k, num_stages, num_warps.
CONFIGS = {
    "cooperative-1": ("cooperative", Config(64, 64, 64, 4, 4)),
    "cooperative-1-wide": ("cooperative", Config(64, 96, 64, 4, 4)),
    "cooperative-2": ("cooperative", Config(128, 64, 64, 3, 8)),
    "cooperative-2-wide": ("cooperative", Config(128, 144, 64, 3, 8)),
    "cooperative-3": ("cooperative", Config(192, 64, 64, 3, 12)),
    "cooperative-3-wide": ("cooperative", Config(192, 192, 64, 3, 12)),
    "pingpong": ("pingpong", Config(64, 128, 64, 4, 8)),
    "pingpong-wide": ("pingpong", Config(64, 96, 64, 4, 8)),
    "clustered": ("clustered", Config(256, 64, 64, 3, 8)),
    "clustered-wide": ("clustered", Config(256, 144, 64, 3, 8)),
    "swapped": ("swapped", Config(16, 128, 64, 4, 8)),
    "swapped-tall": ("swapped", Config(32, 128, 64, 4, 4)),
}
# Widths that are one instruction or nothing, where the operand that has them lies along K.
ODD = {
    "cooperative-odd": ("cooperative", Config(128, 208, 64, 3, 8)),
    "pingpong-odd": ("pingpong", Config(64, 112, 64, 4, 8)),
    "swapped-odd": ("swapped", Config(200, 128, 64, 3, 8)),
}
# Sums that leave the tensor cores at every step need registers for two tiles: not every tile can have them.
EIGHT_BIT = ("cooperative-1", "cooperative-2-wide", "cooperative-3", "pingpong", "swapped")
SPLITS = ("cooperative-1", "cooperative-2-wide", "swapped")
PADDING_WARPS = 3  # the producer is one warp of a warpgroup
ROW_BYTES = 128  # the widest box of a swizzled tensor map


def variant(name: str, layout: str = "nt", dtype: str = "fp16", **fields: Any) -> Variant:
    """A product of tile `name`; of fp8 with the sums in fp32 unless told otherwise."""
    family, config = (CONFIGS | ODD)[name]
    eight_bit = DTYPES[dtype].bytes == 1
    return replace(
        Variant(
            target=SM90,
            family=family,
            dtype_a=dtype,
            dtype_b=dtype,
            dtype_c="bf16" if eight_bit else dtype,
            layout=layout,
            aligned=True,
            epilogue="none",
            fast_accum=False,
            config=replace(config, block_k=128) if eight_bit else config,
            source="tests",
        ),
        **fields,
    )


# Each family once in every layout, because the layout decides how boxes lie; its other tiles in one alone.
FIRST = ("cooperative-2-wide", "pingpong-wide", "clustered-wide", "swapped")
PRODUCTS = [
    *(variant(name, layout, dtype) for name in FIRST for layout, dtype in LAYOUTS.items()),
    *(variant(name, "nt", "bf16") for name in CONFIGS if name not in FIRST),
    *(variant(name, layout, "bf16") for name in ODD for layout in (("nn" if name == "swapped-odd" else "tt"), "nt")),
    *(variant(name, "nt", "fp8e4", fast_accum=fast) for name in EIGHT_BIT for fast in (False, True)),
    variant("pingpong-odd", "nt", "fp8e4", fast_accum=True),
    variant("swapped-odd", "nt", "fp8e5", fast_accum=True),
]
PARTIALS = [variant(name, role="partial", dtype_c="fp32") for name in (*SPLITS, "swapped-odd")]
FINISHED = [
    variant("cooperative-2", epilogue="bias_relu"),
    variant("cooperative-2", epilogue="full"),
    variant("pingpong", epilogue="full"),
    variant("swapped", epilogue="bias_relu"),
    variant("cooperative-2-wide", epilogue="bias_relu"),
    variant("cooperative-2-wide", "nn", epilogue="bias_relu"),
    variant("pingpong-odd", epilogue="full"),
    variant("swapped-odd", epilogue="bias_relu"),
    variant("swapped-tall", epilogue="bias_relu"),
    variant("swapped", epilogue="bias_relu", dtype_c="fp32"),
    variant("cooperative-1", "nt", "fp8e4", epilogue="full", fast_accum=True),
]
ALL = [*PRODUCTS, *PARTIALS, *FINISHED]
# Every way in which threads share memory, with each other and with TMA: boxes, results whole and in turns, factors of
# fp8, vectors, a bias that TMA cannot copy.
SHARING = [
    variant("pingpong", epilogue="full"),
    variant("cooperative-2-wide", "nn", epilogue="bias_relu"),
    variant("swapped-odd", epilogue="bias_relu"),
    variant("cooperative-1", "nt", "fp8e4", epilogue="full", fast_accum=True),
    variant("cooperative-1", "nt", "fp8e4", epilogue="full"),
    variant("cooperative-3-wide", "tt", "bf16"),
    PARTIALS[0],
]
SYNCHRONISING = re.compile(r"\b(?:bar|barrier|fence)\.[\w.:]+")
every_variant = pytest.mark.parametrize("made", ALL, ids=lambda made: made.name)


# ------------------------------------------------------------------------------------------------- what is looked at
@dataclass(frozen=True)
class Made:
    """A compiled kernel: its manifest entry, and the compiler's two texts of it."""

    kernel: Kernel
    ttgir: str
    ptx: str


def make(made: Variant) -> Made:
    """Compiles as a build does, and keeps the texts that a build does not."""
    texts: list[str] = []
    stages = compile._stages

    def kept(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = stage(*arguments)
            texts.append(str(result))
            return result

        return run

    def listening(variant: Variant, plan: Specialisation) -> compile._Stages:
        found = stages(variant, plan)
        return found._replace(lower=[kept(stage) for stage in found.lower])

    compile._twins.clear()
    compile._stages = listening
    try:
        kernel = compile_variant(made, "key").kernel
    finally:
        compile._stages = stages
    _, ttgir, _, ptx = texts
    return Made(kernel, ttgir, ptx)


def make_searched(made: Variant) -> Made:
    """As `make`, but with all of the compiler's passes, its search for missing fences and barriers among them."""
    left_out = compile._only_needed_passes
    compile._only_needed_passes = lambda *_: nullcontext()  # type: ignore[assignment]
    try:
        return make(made)
    finally:
        compile._only_needed_passes = left_out


@functools.cache
def compiled(made: Variant) -> Made:
    """`make` in a worker process, once per session: pytest's own process never imports Triton."""
    return in_worker(make, made)


def both(made: Variant) -> tuple[Made, Made]:
    """As a build compiles it, and with all of the compiler's passes."""
    return compiled(made), in_worker(make_searched, made)


def consumers(made: Variant) -> int:
    """How many warpgroups multiply."""
    return made.config.num_warps // 4


def slabs(made: Variant) -> int:
    """How many warpgroups share a tile."""
    return 1 if made.family == "pingpong" else consumers(made)


def widths(made: Variant) -> list[int]:
    """The columns of each product: all of the tile's in one, or the largest power of two in them and what is left."""
    swapped = made.family == "swapped"
    columns = made.config.block_m if swapped else made.config.block_n
    first = 1 << (columns.bit_length() - 1)
    along_k = made.layout[0] == "n" if swapped else made.layout[1] == "t"
    return [columns] if first == columns or (along_k and made.num_ctas == 1) else [first, columns - first]


def boxes(made: Variant) -> int:
    """In how many boxes a matrix is added to a slab: as wide as all its widths allow, and 128 bytes of C at most."""
    if made.epilogue == "none":
        return 0
    columns = made.config.block_m if made.family == "swapped" else made.config.block_n
    wide = min(
        *(1 << (width.bit_length() - 1) for width in widths(made)), ROW_BYTES // DTYPES[made.dtype_c].bytes, columns
    )
    return -(-columns // wide)


def chunks(made: Variant, most: int) -> set[int]:
    """In how many columns at a time the sums may leave: `most`, and what divides the rest."""
    swapped = made.family == "swapped"
    columns = made.config.block_m if swapped else made.config.block_n
    return {most, (columns % most) & -(columns % most)} - {0}


def partitions(ttgir: str) -> list[list[str]]:
    """The lines of what each group of warps does, the producer's last."""
    lines = ttgir.splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r"    (default \{|partition\d+\()", line)]
    return [lines[first:end] for first, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


@dataclass(frozen=True)
class Loop:
    """An scf.for: what it carries ({name: initial value}), what its next turn gets, its results' name, its lines."""

    carried: dict[str, str]
    next: tuple[str, ...]
    results: str
    first: int
    last: int
    body: tuple[str, ...]


def loops(lines: list[str]) -> Iterator[Loop]:
    """Every loop in `lines`, inner ones after what they are in."""
    for first, line in enumerate(lines):
        if head := re.match(r"( *)(?:(%\w+)(?::\d+)? = )?scf\.for ", line):
            last = next(n for n in range(first + 1, len(lines)) if lines[n].startswith(f"{head[1]}}}"))
            carried = re.findall(r"(%\w+) = (%[\w#]+)", line.partition("iter_args(")[2])
            given = lines[last - 1].partition("scf.yield ")[2].partition(" : ")[0]
            yield Loop(
                dict(carried), tuple(given.split(", ")), head[2] or "", first, last, tuple(lines[first + 1 : last])
            )


def derived(lines: tuple[str, ...] | list[str], seeds: set[str]) -> set[str]:
    """The values in `lines` that are computed from `seeds`, these included."""
    found = set(seeds)
    for line in lines:
        result, equals, rest = line.strip().partition(" = ")
        if equals and "scf.for" not in rest and found & set(re.findall(r"%\w+", rest)):
            found |= set(re.findall(r"%\w+", result))
    return found


def operands(lines: tuple[str, ...] | list[str], operation: str) -> list[str]:
    """The first operand of every `operation`."""
    return re.findall(rf"{re.escape(operation)} (%\w+)", "\n".join(lines))


def indices(lines: tuple[str, ...] | list[str]) -> dict[str, str]:
    """The index of everything that is taken out of an array in shared memory."""
    return dict(re.findall(r"(%\w+) = ttg\.memdesc_index %\w+\[(%\w+)(?:#\d+)?\]", "\n".join(lines)))


def passes_stages(loop: Loop) -> bool:
    """Whether it is a loop over stages of the ring: it waits for them, and no loop is in it."""
    text = "\n".join(loop.body)
    return "ttng.wait_barrier" in text and "scf.for" not in text


def always(body: tuple[str, ...]) -> str:
    """What a loop does in every turn, without what is under a condition."""
    indent = min(len(line) - len(line.lstrip()) for line in body)
    return "\n".join(line for line in body if len(line) - len(line.lstrip()) == indent)


def held_by_no_carry(lines: list[str], expected: int = 1) -> list[str]:
    """What is wrong with the ring in one group of warps, whose tiles have so many loops over stages."""
    found = list(loops(lines))
    inner = [loop for loop in found if passes_stages(loop)]
    if len(inner) != expected:
        return [f"{len(inner)} loops over stages"]
    return [what for i in range(expected) for what in wrong_with(inner[i], inner[:i], found, lines)]


def wrong_with(loop: Loop, earlier: list[Loop], found: list[Loop], lines: list[str]) -> list[str]:
    """What in a loop over stages does not follow the stage and phase that it carries, or the loop before it left."""
    around = next(other for other in found if other.first < loop.first < loop.last < other.last)
    wrong = [f"{name} never changes" for name, after in zip(loop.carried, loop.next, strict=True) if name == after]
    names, index = list(loop.carried), indices(loop.body)
    # the stage is what buffers and barriers are indexed with, the phase what is waited for
    waits = re.findall(r"ttng\.wait_barrier (%\w+), (%\w+),", always(loop.body))
    stages = {index.get(barrier, "") for barrier, _ in waits}
    phases = {phase for _, phase in waits}
    wrong += [f"{value} is not carried" for value in sorted(stages | phases) if value not in names]
    if wrong:
        return wrong
    following = derived(loop.body, stages)
    wrong += [f"{name} = [{at}] does not follow the stage" for name, at in index.items() if at not in following]
    wrong += [f"{name} is no stage" for name in operands(loop.body, "ttng.arrive_barrier") if name not in index]
    for name in sorted(stages | phases):
        after = loop.next[names.index(name)]
        wrong += [] if after in following else [f"the next {name} does not follow the stage"]
    # from tile to tile
    before = lines[around.first + 1 : loop.first]
    left = {f"{other.results}#{i}" for other in earlier for i in range(len(other.carried))}
    carried = derived(before, set(around.carried)) | left
    wrong += [
        f"{name} begins with {loop.carried[name]}, whatever the tile"
        for name in sorted(stages | phases)
        if loop.carried[name] not in carried
    ]
    wrong += [
        f"{name} is the same for every tile" for name, after in zip(around.carried, around.next, strict=True)
        if name == after
    ]  # fmt: skip
    return wrong


# -------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("made", SHARING, ids=lambda made: made.name)
def test_no_fence_and_no_barrier_is_missing(made: Variant) -> None:
    """The compiler's search for missing ones, which builds leave out, would add none: images are the same."""
    ours, searched = both(made)
    assert searched.kernel.image == ours.kernel.image


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("clustered")])
def test_nothing_is_missing_in_clusters(name: str) -> None:
    """There the search would repeat the fence after the setup and the barrier at the end, and add nothing else."""
    ours, searched = (Counter(SYNCHRONISING.findall(made.ptx)) for made in both(variant(name)))
    assert ours - searched == Counter()
    added = searched - ours
    assert added.pop("barrier.sync")  # how the parts of a block agree on it
    assert added == {
        "fence.mbarrier_init.release.cluster": 1,
        "barrier.cluster.arrive.aligned": 1,
        "barrier.cluster.wait.aligned": 1,
    }


@every_variant
def test_resources(made: Variant) -> None:
    """It compiles; threads, registers and shared memory are those that a block can have; only epilogues may spill."""
    kernel = compiled(made).kernel
    assert kernel.threads == 32 * (made.config.num_warps + 1 + PADDING_WARPS)
    assert kernel.threads * kernel.registers <= 64 * 1024
    assert 0 < kernel.shared_bytes <= SM90.shared_bytes
    element = DTYPES[made.dtype_a].bytes
    config = made.config
    lines = config.block_m // made.num_ctas + config.block_n
    assert kernel.shared_bytes > config.num_stages * lines * config.block_k * element
    assert (kernel.global_scratch_bytes, kernel.profile_scratch_bytes) == (0, 0)
    assert (kernel.persistent, kernel.pdl, kernel.num_ctas) == (True, True, made.num_ctas)
    if made.epilogue == "none":
        assert kernel.spill_bytes == 0


@pytest.mark.parametrize("made", [*PRODUCTS, *PARTIALS], ids=lambda made: made.name)
def test_tensor_maps(made: Variant) -> None:
    """Each map is of the right matrix, in the order that its layout has in memory, in boxes no wider than a swizzle.

    X is A, whose slabs are loaded one by one, and Y is B, whose widths are; swapped kernels have them the other way.
    Each block of a cluster loads its own part of a slab.
    """
    config, element = made.config, DTYPES[made.dtype_a].bytes
    swapped = made.family == "swapped"
    rows = (config.block_n if swapped else config.block_m) // slabs(made) // made.num_ctas

    def expected(matrix: str, along: int) -> tuple[str, TensorMap]:
        size, across, k = ("M", "stride_am", "stride_ak") if matrix == "a" else ("N", "stride_bn", "stride_bk")
        if made.layout["ab".index(matrix)] == {"a": "n", "b": "t"}[matrix]:
            inner, outer, stride, extent, box_outer = "K", size, across, config.block_k, along
        else:
            inner, outer, stride, extent, box_outer = size, "K", k, along, config.block_k
        box = min(extent, ROW_BYTES // element)
        swizzle = {32: 1, 64: 2, 128: 3}[box * element]
        return f"{matrix}_ptr", TensorMap(made.dtype_a, inner, outer, stride, box, box_outer, swizzle)

    x, y = ("b", "a") if swapped else ("a", "b")
    wanted = [("x_desc", *expected(x, rows))]
    wanted += [(name, *expected(y, width)) for name, width in zip(("y_desc", "y1_desc"), widths(made), strict=False)]
    maps = [p for p in compiled(made).kernel.parameters if p.tensor_map and p.name != "bias_desc"]
    found = [(p.name, p.value, p.tensor_map) for p in maps]
    results = found[len(wanted) :]
    assert found[: len(wanted)] == wanted
    assert bool(results) == (made.role == "product")
    c = DTYPES[made.dtype_c].bytes
    for name, value, row in results:
        assert (name, value) in {("c_desc", "c_ptr"), ("c1_desc", "c_ptr")}
        assert row is not None
        assert (row.dtype, row.inner, row.outer, row.stride) == (made.dtype_c, "N", "M", "stride_cm")
        assert row.box_inner * c == {1: 32, 2: 64, 3: 128}[row.swizzle]
        along, across = (row.box_outer, row.box_inner) if swapped else (row.box_inner, row.box_outer)
        first = results[0][2]
        assert first is not None
        assert along in chunks(made, first.box_outer if swapped else first.box_inner)
        assert rows % across == 0 if swapped else across == rows


@every_variant
def test_map_of_a_residual(made: Variant) -> None:
    """Where a matrix can be added it comes in boxes that fit a buffer of X; nothing is guarded of it."""
    kernel = compiled(made).kernel
    found = [parameter for parameter in kernel.parameters if parameter.name == "bias_desc"]
    assert bool(found) == (made.epilogue != "none")
    assert not [guard for guard in kernel.guards if "bias" in guard.value]
    for parameter in found:
        row = parameter.tensor_map
        assert row is not None
        assert (parameter.value, row.dtype) == ("bias_ptr", made.dtype_c)
        assert (row.inner, row.outer, row.stride) == ("N", "M", "stride_bias_m")
        swapped = made.family == "swapped"
        rows = (made.config.block_n if swapped else made.config.block_m) // slabs(made)
        high, wide = (row.box_inner, row.box_outer) if swapped else (row.box_outer, row.box_inner)
        assert rows % high == 0 if swapped else high == rows
        assert min(widths(made)) % wide == 0 or len(widths(made)) == 1
        slab = rows * made.config.block_k * DTYPES[made.dtype_a].bytes
        assert row.box_inner * DTYPES[made.dtype_c].bytes == {1: 32, 2: 64, 3: 128}[row.swizzle]
        assert rows * wide * DTYPES[made.dtype_c].bytes <= slab


@pytest.mark.parametrize("made", FINISHED, ids=lambda made: made.name)
def test_pieces_of_a_filled_box(made: Variant) -> None:
    """What consumers fill themselves they cut into rows only where these follow each other: lines of one swizzle."""
    *multiplying, _ = partitions(compiled(made).ttgir)
    for lines in multiplying:
        boxes_filled = re.findall(r"memdesc_reinterpret .*-> !ttg\.memdesc<(\d+)x\d+x(\d+)xb?f(\d+),", "\n".join(lines))
        assert boxes_filled
        for pieces, columns, bits in boxes_filled:
            assert int(pieces) == 1 or int(columns) * int(bits) // 8 <= ROW_BYTES


@every_variant
def test_guards(made: Variant) -> None:
    """What is guarded is what tensor maps, 32-bit sizes and the first product of a tile need, and nothing else."""
    element, c = DTYPES[made.dtype_a].bytes, DTYPES[made.dtype_c].bytes
    unit = {
        "a": ("stride_am", "stride_ak") if made.layout[0] == "n" else ("stride_ak", "stride_am"),
        "b": ("stride_bk", "stride_bn") if made.layout[1] == "n" else ("stride_bn", "stride_bk"),
        "c": ("stride_cm", "stride_cn"),
    }
    matrices = {"a": element, "b": element} | ({"c": c} if made.role == "product" else {})
    wanted = [("batch", "equals", 1), ("K", "at_least", 1), *((size, "below", I32_LIMIT) for size in "MNK")]
    for matrix, size in matrices.items():
        outer, inner = unit[matrix]
        wanted += [
            (inner, "equals", 1),
            (outer, "multiple_of", 16 // size),
            (outer, "at_least", 1),
            (f"{matrix}_ptr", "multiple_of", 16),
        ]
    if made.role == "product":
        wanted.append(("c_span", "multiple_of", 16 // c))
        if element == 2:
            wanted += [("scale_a_ptr", "equals", 0), ("scale_b_ptr", "equals", 0)]
    if made.fast_accum:
        wanted.append(("fast_accum", "equals", 1))
    guards = [(p.value, p.relation, p.operand) for p in compiled(made).kernel.guards]
    assert sorted(guards) == sorted(wanted)


@every_variant
def test_programmatic_launches(made: Variant) -> None:
    """Whoever reads global memory first waits for the kernel before; the next one is let go once, at the beginning.

    Consumers without an epilogue read nothing: what they multiply comes through the producer.
    """
    found = compiled(made)
    assert found.ptx.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol.wait" in found.ptx
    text = found.ttgir
    assert text.index("tt.grid_dependency_launch_dependents") < text.index("ttg.warp_specialize")
    readers = 0
    for lines in partitions(text):
        reads = [n for n, line in enumerate(lines) if "async_tma_copy_global_to_local" in line or "tt.load" in line]
        waits = [n for n, line in enumerate(lines) if "tt.grid_dependency_wait" in line]
        readers += bool(reads)
        assert len(waits) == bool(reads)
        if reads:
            assert waits[0] < min(reads)
            assert not any(loop.first < waits[0] < loop.last for loop in loops(lines))
    scaled = DTYPES[made.dtype_a].bytes == 1 and made.role == "product"
    assert readers == 1 + (consumers(made) if scaled or made.epilogue != "none" else 0)
    if readers == 1:
        assert found.ptx.index("griddepcontrol.wait") < found.ptx.index("cp.async.bulk.tensor.2d.shared::cta.global")


@pytest.mark.parametrize("layout", ["nn", "any"])
def test_reduce_waits_first(layout: str) -> None:
    """A reduce lets the next kernel go and waits for its partial, on every path, before it touches memory."""
    config = Config(4, 128, 1, 5, 4)
    made = Variant(SM90, "reduce", "fp32", "fp32", "fp16", layout, True, "full", False, config, "tests", "reduce")  # noqa: FBT003
    found = compiled(made)
    assert found.kernel.pdl
    at = [found.ptx.index(f"griddepcontrol.{word}") for word in ("launch_dependents", "wait")]
    accesses = [match.start() for match in re.finditer(r"\b(?:ld|st)\.(?:global|shared)|\bcp\.async", found.ptx)]
    assert at == sorted(at)
    assert at[-1] < min(accesses)
    assert not re.search(r"\b(?:bra|brx)\b", found.ptx[: at[-1]])


def test_partial_of_pointers_lets_nothing_go() -> None:
    """A partial that waits for nothing lets no kernel start early: its reduce starts when all its blocks have ended."""
    config = Config(64, 64, 64, 3, 4)
    made = Variant(SM90, "tile", "fp16", "fp16", "fp32", "nn", True, "none", False, config, "tests", "partial")  # noqa: FBT003
    found = compiled(made)
    assert not found.kernel.pdl
    assert "griddepcontrol" not in found.ptx


@every_variant
def test_stages_are_carried(made: Variant) -> None:
    """In every group of warps the loop over K carries stage and phase, and hands back a stage that follows from it.

    So does the producer's loop over the boxes of a matrix that is added, which goes on from there. Gluon takes a
    variable that begins as another carried one to be constant, without a word; every stage handed back would be the
    first, and the producer would wait for ever.
    """
    groups = partitions(compiled(made).ttgir)
    assert len(groups) == consumers(made) + 1
    *multiplying, producing = groups
    assert [held_by_no_carry(lines) for lines in multiplying] == [[]] * len(multiplying)
    assert held_by_no_carry(producing, 1 if made.epilogue == "none" else 2) == []
    assert "async_tma_copy_global_to_local" in "\n".join(producing)
    precise = DTYPES[made.dtype_a].bytes == 1 and not made.fast_accum
    for lines in multiplying:
        (loop,) = (found for found in loops(lines) if passes_stages(found))
        assert "ttng.warp_group_dot" in "\n".join(loop.body)
        assert len(operands(loop.body, "ttng.arrive_barrier")) == made.num_ctas
        # the last stage of a tile is handed back after the loop, unless every step waits for its product, and boxes are
        after = lines[loop.last + 1 :]
        index, following = indices(after), derived(after, {loop.results})
        late = [name for name in operands(after, "ttng.arrive_barrier") if index.get(name) in following]
        assert len(late) == (0 if precise else made.num_ctas) + boxes(made)


@every_variant
def test_instructions(made: Variant) -> None:
    """Products have the widths of the tile and none wider, as many columns of sums as that, and follow one another.

    A wgmma of a width that no tensor has is written out: it has the registers of its own columns only.
    """
    text = compiled(made).ptx
    found = re.findall(r"wgmma\.mma_async\S+\.m64n(\d+)k\d+\S*\s*\{([^}]*)\}", text)
    assert {int(width) for width, _ in found} == set(widths(made))
    assert all(2 * len(sums.split(",")) == int(width) for width, sums in found)
    rows = (made.config.block_n if made.family == "swapped" else made.config.block_m) // slabs(made) // made.num_ctas
    steps = made.config.block_k * DTYPES[made.dtype_a].bytes // 32
    assert len(found) == consumers(made) * steps * (rows // 64) * len(widths(made))
    assert compiled(made).kernel.spill_bytes == 0 or made.epilogue != "none"


@every_variant
def test_what_blocks_of_a_cluster_share(made: Variant) -> None:
    """Only Y is loaded for both blocks, when both have left its stage; neither begins or leaves without the other."""
    text = compiled(made).ttgir
    loop, *_ = (found for found in loops(partitions(text)[-1]) if passes_stages(found))
    step = r"ttng\.(wait_barrier|async_tma_copy_global_to_local).*?( \{multicast\})?(?= :)"
    steps = re.findall(step, "\n".join(loop.body))
    own = [("wait_barrier", "")] + slabs(made) * [("async_tma_copy_global_to_local", "")]
    loads = len(widths(made))
    if made.num_ctas > 1:
        assert steps == [*own, ("wait_barrier", ""), *loads * [("async_tma_copy_global_to_local", " {multicast}")]]
        setup, _, work = text.partition("ttg.warp_specialize")
        made_barriers, fence, barrier = (
            setup.rindex(word) for word in ("init_barrier", "fence.mbarrier_init", "cluster_barrier")
        )
        assert made_barriers < fence < barrier
        assert work.rindex("ttng.cluster_barrier") > work.rindex("ttg.warp_return")
    else:
        assert steps == [*own, *loads * [("async_tma_copy_global_to_local", "")]]
        assert "ttng.cluster_barrier" not in text


def test_the_guard_sees_the_trap() -> None:
    """A loop that hands back the stage with which its tile began is found, as is one that carries no phase."""
    lines = partitions(compiled(variant("cooperative-2")).ttgir)[0]
    (loop,) = (found for found in loops(lines) if passes_stages(found))
    (barrier,) = operands(loop.body, "ttng.arrive_barrier")
    stage, phase = list(loop.carried)[:2]
    text = "\n".join(lines)
    index = indices(loop.body)[barrier]
    for old, new, words in (
        (f"[{index}]", f"[{loop.carried[stage]}]", "does not follow the stage"),
        (f"scf.yield {loop.next[0]}, {loop.next[1]},", f"scf.yield {loop.next[0]}, {phase},", "never changes"),
        (f", {phase}, %true", f", {loop.carried[phase]}, %true", "is not carried"),
    ):
        assert text.count(old) == 1
        assert words in " ".join(held_by_no_carry(text.replace(old, new).splitlines()))
