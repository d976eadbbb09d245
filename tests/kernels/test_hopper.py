"""The warp-specialised kernels for Hopper: what the compiler made of them, and what the manifest says of that.

Nothing is executed here: no interpreter runs wgmma and TMA. The results of these kernels are what tests/gpu runs.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from aotmm.build import compile, products  # noqa: A004 (the step of that name)
from aotmm.build.compile import compile_variant
from aotmm.build.products import I32_LIMIT
from aotmm.kernels import LINE_BYTES, PLANE_BUFFERS, Specialisation, Variant
from aotmm.kernels.hopper import mma, pipeline
from aotmm.kernels.hopper.specialisation import REGISTERS
from aotmm.pack.schema import Config, Kernel, TensorMap
from aotmm.problem import DTYPES
from aotmm.target import target
from tests.native.emulation import in_worker

SM90 = target("sm90")
LAYOUTS = {"nn": "fp16", "nt": "bf16", "tn": "fp16", "tt": "bf16"}  # both types, which differ in nothing here
# Small rings, so that they compile fast: block_m, block_n, block_k, num_stages, num_warps, blocks of a cluster.
CONFIGS = {
    "cooperative-1": ("cooperative", Config(64, 64, 64, 4, 4)),
    "cooperative-1-wide": ("cooperative", Config(64, 96, 64, 4, 4)),
    "cooperative-2": ("cooperative", Config(128, 64, 64, 3, 8)),
    "cooperative-2-wide": ("cooperative", Config(128, 144, 64, 3, 8)),
    "cooperative-3": ("cooperative", Config(192, 64, 64, 3, 12)),
    "cooperative-3-wide": ("cooperative", Config(192, 192, 64, 3, 12)),
    "pingpong": ("pingpong", Config(64, 128, 64, 4, 8)),
    "pingpong-wide": ("pingpong", Config(64, 96, 64, 4, 8)),
    "clustered": ("cooperative", Config(256, 64, 64, 3, 8, cluster_m=2)),
    "clustered-wide": ("cooperative", Config(256, 144, 64, 3, 8, cluster_m=2)),
    "pingpong-clustered": ("pingpong", Config(128, 128, 64, 4, 8, cluster_m=2, cluster_n=2)),
    "swapped-clustered": ("swapped", Config(16, 256, 64, 4, 4, cluster_n=4)),
    "sliced": ("cooperative", Config(128, 64, 128, 3, 8, cluster_k=2)),
    "sliced-swapped": ("swapped", Config(16, 64, 256, 4, 4, cluster_k=4)),
    "serial": ("cooperative", Config(128, 64, 64, 3, 8, serial_k=4)),
    "serial-clustered": ("cooperative", Config(256, 128, 64, 3, 8, cluster_m=2, serial_k=2)),
    "serial-swapped": ("swapped", Config(40, 128, 64, 4, 8, serial_k=4)),
    "swapped": ("swapped", Config(16, 128, 64, 4, 8)),
    "swapped-tall": ("swapped", Config(32, 128, 64, 4, 4)),
}
# Widths that are one instruction or nothing.
ODD = {
    "cooperative-odd": ("cooperative", Config(128, 208, 64, 3, 8)),
    "pingpong-odd": ("pingpong", Config(64, 112, 64, 4, 8)),
    "swapped-odd": ("swapped", Config(200, 128, 64, 3, 8)),
    "swapped-low": ("swapped", Config(40, 128, 64, 4, 8)),
    "swapped-three": ("swapped", Config(104, 192, 64, 3, 12)),
    "swapped-whole": ("swapped", Config(256, 128, 64, 3, 8)),  # of int8 an instruction that Gluon does not know
    "swapped-twice": ("swapped", Config(96, 256, 64, 3, 8)),  # each warpgroup multiplies twice the rows of a wgmma
    "cooperative-twice": ("cooperative", Config(256, 112, 64, 3, 8)),
    "clustered-odd": ("cooperative", Config(256, 416, 64, 3, 8, cluster_m=2, cluster_n=2)),
    "clustered-across": ("cooperative", Config(256, 224, 64, 3, 8, cluster_m=2, cluster_n=2)),
    "sliced-odd": ("swapped", Config(40, 128, 128, 3, 8, cluster_k=2)),
}
# Some of them where the operand that has them does not lie along K: its stages are boxes of a line of columns each.
ACROSS = (
    ("cooperative-odd", "nn"), ("cooperative-odd", "tn"), ("pingpong-odd", "nn"), ("cooperative-twice", "tn"),
    ("swapped-odd", "tn"), ("swapped-three", "tt"), ("swapped-twice", "tt"), ("swapped-low", "tn"),
    ("clustered-across", "nn"),
)  # fmt: skip
# Sums that leave the tensor cores at every step need registers for two tiles: not every tile can have them.
EIGHT_BIT = (
    "cooperative-1", "cooperative-2-wide", "cooperative-3", "pingpong", "swapped", "swapped-clustered", "sliced",
)  # fmt: skip
# X comes through registers if it does not lie along K, and then every step waits for its product.
TF32 = (
    ("cooperative-2", "nt"), ("cooperative-2-wide", "tt"), ("swapped", "nn"), ("swapped-odd", "nt"), ("pingpong", "nt"),
    ("clustered", "tt"), ("cooperative-2", "tn"), ("swapped", "tn"),
)  # fmt: skip
INT8 = ("cooperative-2", "cooperative-1-wide", "swapped", "swapped-twice", "swapped-whole")
SPLITS = ("cooperative-1", "cooperative-2-wide", "swapped", "clustered")
PADDING_WARPS = 3  # of the producer's warpgroup one warp loads, in a cluster two
ROW_BYTES = 128  # the widest box of a swizzled tensor map


def variant(name: str, layout: str = "nt", dtype: str = "fp16", **fields: Any) -> Variant:
    """A product of tile `name`, with a line of 128 bytes of K; of fp8 with the sums in fp32 unless told otherwise."""
    family, config = (CONFIGS | ODD)[name]
    element_bytes = DTYPES[dtype].bytes
    return replace(
        Variant(
            target=SM90,
            family=family,
            dtype_a=dtype,
            dtype_b=dtype,
            dtype_c="bf16" if dtype.startswith("fp8") else DTYPES[dtype].output,
            layout=layout,
            aligned=True,
            epilogue="none",
            fast_accum=False,
            config=replace(config, block_k=config.block_k * 2 // element_bytes),
            source="tests",
        ),
        **fields,
    )


# Threads store C, whose rows may lie anywhere.
STORED_BY_THREADS = [
    variant("cooperative-2-wide", "nt", aligned=False),
    variant("pingpong", "tn", "bf16", aligned=False),
    variant("swapped-odd", "nt", aligned=False),
    variant("sliced", "nt", aligned=False),
    variant("clustered-wide", "nn", aligned=False),
]
# Each family once in every layout, because the layout decides how boxes lie; its other tiles in one alone.
FIRST = ("cooperative-2-wide", "pingpong-wide", "clustered-wide", "swapped")
PRODUCTS = [
    *(variant(name, layout, dtype) for name in FIRST for layout, dtype in LAYOUTS.items()),
    *(variant(name, "nt", "bf16") for name in CONFIGS if name not in FIRST),
    *(variant(name, layout, "bf16") for name in ODD for layout in ("nn" if name.startswith("swapped") else "tt", "nt")),
    *(variant(name, layout, "bf16") for name, layout in ACROSS),
    *(variant(name, "nt", "fp8e4", fast_accum=fast) for name in EIGHT_BIT for fast in (False, True)),
    variant("pingpong-odd", "nt", "fp8e4", fast_accum=True),
    variant("swapped-odd", "nt", "fp8e5", fast_accum=True),
    variant("swapped-twice", "nt", "fp8e4", fast_accum=True),
    *(variant(name, layout, "tf32") for name, layout in TF32),
    *(variant(name, "nt", "int8") for name in INT8),
    *STORED_BY_THREADS,
]
PARTIALS = [
    *(variant(name, role="partial", dtype_c="fp32") for name in (*SPLITS, "swapped-odd")),
    variant("swapped-odd", "tt", role="partial", dtype_c="fp32"),
    variant("swapped", "nn", "tf32", role="partial"),
    variant("swapped", "tn", "tf32", role="partial"),
    variant("swapped", "nt", "int8", role="partial"),
]
FINISHED = [
    variant("cooperative-2", epilogue="bias"),
    variant("cooperative-2-wide", "nn", epilogue="bias"),
    variant("pingpong", epilogue="bias"),
    variant("swapped-odd", epilogue="bias"),
    variant("pingpong-clustered", epilogue="bias"),
    variant("sliced-swapped", epilogue="bias"),
    variant("serial", epilogue="bias"),
    variant("cooperative-1", "nt", "fp8e4", epilogue="bias"),
    variant("cooperative-2", "nt", "tf32", epilogue="bias"),
    variant("cooperative-2", "tn", "tf32", epilogue="bias"),
    variant("swapped", "tn", "tf32", epilogue="full"),
    variant("cooperative-2", epilogue="bias_relu"),
    variant("cooperative-2", epilogue="full"),
    variant("pingpong", epilogue="full"),
    variant("swapped", epilogue="bias_relu"),
    variant("cooperative-2-wide", epilogue="bias_relu"),
    variant("cooperative-2-wide", "nn", epilogue="bias_relu"),
    variant("pingpong-odd", epilogue="full"),
    variant("pingpong-odd", "tn", epilogue="full"),
    variant("swapped-odd", epilogue="bias_relu"),
    variant("swapped-odd", "tt", epilogue="bias_relu"),
    variant("swapped-twice", epilogue="bias_relu"),
    variant("clustered", epilogue="bias_relu"),
    variant("clustered-wide", "nn", epilogue="bias_relu"),
    variant("pingpong-clustered", epilogue="full"),
    variant("swapped-clustered", epilogue="bias_relu"),
    variant("sliced", epilogue="full"),
    variant("sliced-swapped", epilogue="bias_relu"),
    variant("serial", epilogue="full"),
    variant("pingpong", epilogue="full", aligned=False),
    variant("swapped-tall", epilogue="bias_relu"),
    variant("swapped", epilogue="bias_relu", dtype_c="fp32"),
    variant("cooperative-1", "nt", "fp8e4", epilogue="full", fast_accum=True),
]
ALL = [*PRODUCTS, *PARTIALS, *FINISHED]
# Producers, too, read the ends of groups.
GROUPED = [
    *(variant(name, role="grouped_m") for name in ("cooperative-2", "pingpong", "clustered", "swapped-clustered")),
    *(variant(name, "tn", role="grouped_k") for name in ("cooperative-2", "clustered")),
    variant("clustered", "nt", "fp8e4", role="grouped_m"),
]
# Every way in which threads share memory, with each other, with TMA and with other blocks: boxes, results whole and in
# turns, factors of fp8, vectors, a bias that TMA cannot copy.
SHARING = [
    variant("cooperative-2-wide", "nn", epilogue="bias"),
    variant("pingpong", epilogue="bias"),
    variant("swapped-odd", epilogue="bias"),
    variant("cooperative-1", "nt", "fp8e4", epilogue="bias"),
    variant("pingpong", epilogue="full"),
    variant("cooperative-2-wide", "nn", epilogue="bias_relu"),
    variant("swapped-odd", epilogue="bias_relu"),
    variant("swapped-odd", "tt", epilogue="bias_relu"),
    variant("clustered-across", "nn", "bf16"),
    variant("cooperative-1", "nt", "fp8e4", epilogue="full", fast_accum=True),
    variant("cooperative-1", "nt", "fp8e4", epilogue="full"),
    variant("cooperative-3-wide", "tt", "bf16"),
    variant("clustered-wide", "nn", epilogue="bias_relu"),
    variant("pingpong-clustered", epilogue="full"),
    variant("swapped-clustered", epilogue="bias_relu"),
    # of slices one branch would be the other way round
    *(made for made in STORED_BY_THREADS if made.config.cluster_k == 1),
    PARTIALS[0],
]
VALUE = r"%[\w.]+"  # of the compiler, in its TTGIR
ARITHMETIC: dict[str, Callable[[int, int], int]] = {  # of numbers that are not negative
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "divsi": operator.floordiv,
    "remsi": operator.mod, "minsi": min, "maxsi": max, "andi": operator.and_, "ori": operator.or_,
    "eq": operator.eq, "sge": operator.ge, "sgt": operator.gt, "slt": operator.lt,
}  # fmt: skip
SYNCHRONISING = re.compile(r"\b(?:bar|barrier|fence)\.[\w.:]+")
BEFORE_A_WAIT = re.compile(
    r"bar\.(?:warp\.)?sync[^;]*;\s*(?:(?:add|mov|shl)\.[^;]*;\s*)*"
    r"// begin inline asm\s*\{\s*\.reg \.pred complete;\s*waitLoop:"
)
LOADED = re.compile(r"(?:async_tma_copy_global_to_local |cp\.async\.bulk\.tensor)")
ARRIVED = re.compile(
    r'(?:ttng\.arrive_barrier|ttg\.inline_asm "[^"]*mbarrier\.arrive\.s[^"]*" \{constraints = "[^"]*"[^}]*\}) (%\w+)'
)
FILLED = re.compile(r'ttg\.inline_asm "[^"]*expect_tx[^"]*" \{constraints = "[^"]*"[^}]*\} (%\w+), (%\w+)')
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

    def listening(variant: compile.Buildable, plan: Specialisation) -> compile._Stages:
        found = stages(variant, plan)
        return found._replace(lower=[kept(stage) for stage in found.lower])

    compile._known.clear()
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


def make_optimised(made: Variant) -> Made:
    """As `make`, but with every pass that builds leave out, except for those that do something to inline PTX.

    These are the search for missing barriers, and the folding of what a block without a cluster knows of its own.
    """
    still = {"add_membar", "add_sccp"}
    with pytest.MonkeyPatch.context() as patch:
        left_out = compile._only_needed_passes
        patch.setattr(
            compile,
            "_only_needed_passes",
            lambda variant, plan: left_out(variant, replace(plan, unneeded=tuple(still & set(plan.unneeded)))),
        )
        patch.setattr(products, "_TENSOR_MEMORY_PASSES", ())
        patch.setattr(products, "_CLUSTER_PASSES", ())
        return make(made)


@functools.cache
def compiled(made: Variant) -> Made:
    """`make` in a worker process, once per session: pytest's own process never imports Triton."""
    return in_worker(make, made)


def consumers(made: Variant) -> int:
    """How many warpgroups multiply."""
    return made.config.num_warps // 4


def slabs(made: Variant) -> int:
    """How many warpgroups share a tile."""
    return 1 if made.family == "pingpong" else consumers(made)


def block(made: Variant) -> tuple[int, int]:
    """Rows of X and columns of Y that a block multiplies: all of a tile's, or its part of a cluster's."""
    config = made.config
    sides = config.block_m // config.cluster_m, config.block_n // config.cluster_n
    return sides[::-1] if made.family == "swapped" else sides


def depth(made: Variant) -> int:
    """Elements of K that a block multiplies in a step: all of a tile's, or those of its slice."""
    return made.config.block_k // made.config.cluster_k


def widths(made: Variant) -> list[int]:
    """The columns of each product: all of a block's in one, or the largest power of two in them and what is left."""
    _, columns = block(made)
    first = 1 << (columns.bit_length() - 1)
    one = first == columns or (y_along_k(made) and not in_registers(made)) or boxes_across(made)
    return [columns] if one else [first, columns - first]


def y_along_k(made: Variant) -> bool:
    """Whether the operand of which a product has columns lies along K."""
    return made.layout[0] == "n" if made.family == "swapped" else made.layout[1] == "t"


def boxes_across(made: Variant) -> int:
    """In how many boxes, a line wide, the columns of one product lie that no tensor has and that do not lie along K.

    0 if there is no such product: two powers of two are two products then, unless swapped.
    """
    _, columns = block(made)
    known = columns.bit_count() == 1 or (columns.bit_count() == 2 and made.family != "swapped")
    return 0 if y_along_k(made) or known else -(-columns * DTYPES[made.dtype_a].bytes // ROW_BYTES)


def loaded(made: Variant, rows: int = 1 << 20, columns: int = 1 << 20) -> int:
    """Rows of X and columns of Y, of so many, that come to a stage: those of a block, and the rest of the last box.

    Along K, a box has no more than the matrix, in groups of 8.
    """

    def in_box(size: int, box: int) -> int:
        return min(box, -(-size // 8) * 8)

    of_x, of_y = block(made)
    x_along_k = made.layout[1] == "t" if made.family == "swapped" else made.layout[0] == "n"
    part = of_x // slabs(made)
    found = slabs(made) * (in_box(rows, part) if x_along_k else part)
    if y_along_k(made):
        return found + sum(in_box(columns, width) for width in widths(made))
    return found + max(of_y, boxes_across(made) * ROW_BYTES // DTYPES[made.dtype_a].bytes)


def in_registers(made: Variant) -> bool:
    """Whether X comes through registers: it has 32-bit elements and does not lie along K."""
    return made.dtype_a == "tf32" and made.layout != "nt"


def turned(made: Variant) -> bool:
    """Whether consumers turn Y: it has 32-bit elements, and X and Y do not lie along K."""
    return made.dtype_a == "tf32" and made.layout == "tn"


def adds_matrices(made: Variant) -> bool:
    """Whether a matrix can be added to the product."""
    return made.epilogue not in ("none", "bias")


def boxes(made: Variant) -> int:
    """In how many boxes a matrix is added to a slab: as wide as all its widths allow, and 128 bytes of C at most."""
    if not adds_matrices(made):
        return 0
    _, columns = block(made)
    wide = min(
        *(1 << (width.bit_length() - 1) for width in widths(made)), ROW_BYTES // DTYPES[made.dtype_c].bytes, columns
    )
    return -(-columns // wide)


def stages_of_matrix(made: Variant) -> int:
    """In how many stages the boxes come: Y's buffer has several of each slab, where it has the room for them."""
    rows, columns = block(made)
    together = max(columns // rows, 1) if columns.bit_count() == 1 else 1
    return boxes(made) // together


def chunks(made: Variant, most: int) -> set[int]:
    """In how many columns at a time the sums may leave: `most`, and what divides the rest."""
    _, columns = block(made)
    return {most, (columns % most) & -(columns % most)} - {0}


def groups(ttgir: str) -> list[list[str]]:
    """The lines of what each group of warps does."""
    lines = ttgir.splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r"    (default \{|partition\d+\()", line)]
    return [lines[first:end] for first, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def partitions(ttgir: str) -> list[list[str]]:
    """The lines of what each group of warps with work does, the producer's last."""
    return [lines for lines in groups(ttgir) if "scf.for" in "\n".join(lines)]


def setup(ttgir: str) -> list[str]:
    """The lines of what all warps do before each group of them has work of its own."""
    return ttgir[: ttgir.index("ttg.warp_specialize")].splitlines()


def kernel_names(lines: list[str]) -> dict[str, str]:
    """The special registers that some of a kernel's values are; without clusters each block is one."""
    text = "\n".join(lines)
    found = dict(re.findall(rf'({VALUE}) = ttg\.inline_asm "mov\.u32 \$0, %([\w.]+);"', text))
    for operation, register in (("get_program_id", "clusterid.x"), ("get_num_programs", "nclusterid.x")):
        found |= dict.fromkeys(re.findall(rf"({VALUE}) = tt\.{operation} x", text), register)
    return found


def captured(ttgir: str, lines: list[str]) -> dict[str, str]:
    """The kernel's names for the values that a group of warps gets, by the group's own names."""
    given = re.search(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    assert given is not None
    names = re.findall(r"(%arg\d+): ", lines[0])
    return dict(zip(names, given[1].split(", "), strict=True)) if names else {}  # the first group has the kernel's own


def indentation(line: str) -> int:
    """The number of spaces at its beginning."""
    return len(line) - len(line.lstrip())


def conditions(lines: tuple[str, ...] | list[str], at: int) -> list[str]:
    """The conditions of the branches that a line is in, the inner one first; "else" if it is in their second part."""
    found: list[str] = []
    indent = indentation(lines[at])
    for line in reversed(lines[:at]):
        if indentation(line) < indent:
            indent = indentation(line)
            if head := re.match(rf" *(?:{VALUE}(?::\d+)? = )?scf\.if ({VALUE}) |.*(else) {{", line):
                found.append(head[1] or head[2])
    return found


def taken(lines: list[str], condition: str, *, holds: bool) -> list[str]:
    """The lines with one part of the branch on `condition` in the place of both: the one for when it `holds`, or not.

    What the branch gives goes by the names that it has in that part.
    """
    heads = [re.match(rf"( *)({VALUE}):\d+ = scf\.if {re.escape(condition)} ", line) for line in lines]
    ((first, head),) = ((n, head) for n, head in enumerate(heads) if head)
    middle, last, *_ = (n for n in range(first + 1, len(lines)) if lines[n].startswith(f"{head[1]}}}"))
    assert "else" in lines[middle]
    *part, end = lines[first + 1 : middle] if holds else lines[middle + 1 : last]
    given = end.partition("scf.yield ")[2].partition(" : ")[0].split(", ")
    after = [re.sub(rf"{re.escape(head[2])}#(\d+)", lambda found: given[int(found[1])], line) for line in lines[last:]]
    return [*lines[:first], *part, *after[1:]]


def ways(made: Variant) -> dict[tuple[str, bool], list[str]]:
    """What producer warps do, by the operands that they load and whether several blocks of the cluster share them.

    In a cluster the first of two loads X and the other Y. How many blocks share X and Y is how many there are along N
    and M, or M and N if swapped; those with slices of K share none. Without a cluster one warp loads both.
    """
    ttgir = compiled(made).ttgir
    producing = partitions(ttgir)[-1]
    if made.num_ctas == 1:
        return {("xy", False): producing}
    names = kernel_names(setup(ttgir))
    given = {inner: names.get(outer, outer) for inner, outer in captured(ttgir, producing).items()}
    (number,) = re.findall(rf'({VALUE}) = ttg\.inline_asm "[^"]*shfl\.sync', "\n".join(producing))
    (first,) = re.findall(rf"({VALUE}) = arith\.cmpi eq, {number}, %c0_i32", "\n".join(producing))
    sliced = made.config.cluster_k > 1
    found = {}
    for operand in ("x", "y"):
        lines = taken(producing, first, holds=operand == "x")
        along = "x" if (operand == "x") == (made.family == "swapped") else "y"
        blocks = [
            inner for inner, what in given.items() if what == ("%c1_i32" if sliced else f"cluster_nctaid.{along}")
        ]
        pattern = rf"({VALUE}) = arith\.cmpi sgt, (?:{'|'.join(blocks)}), %c1_i32"
        (condition,) = re.findall(pattern, "\n".join(lines))
        for several in (False,) if sliced else (False, True):
            found[operand, several] = taken(lines, condition, holds=several)
    return found


@dataclass(frozen=True)
class Loop:
    """An scf.for: between what it counts, what it carries ({name: initial value}), what its next turn gets.

    Also its results' name and its lines.
    """

    bounds: tuple[str, ...]
    carried: dict[str, str]
    next: tuple[str, ...]
    results: str
    first: int
    last: int
    body: tuple[str, ...]


def loops(lines: list[str]) -> Iterator[Loop]:
    """Every loop in `lines`, inner ones after what they are in."""
    for first, line in enumerate(lines):
        if head := re.match(rf"( *)(?:({VALUE})(?::\d+)? = )?scf\.for ", line):
            last = next(n for n in range(first + 1, len(lines)) if lines[n].startswith(f"{head[1]}}}"))
            carried = re.findall(rf"({VALUE}) = (%[\w.#]+)", line.partition("iter_args(")[2])
            given = lines[last - 1].partition("scf.yield ")[2].partition(" : ")[0]
            bounds = tuple(re.findall(rf" (?:=|to|step) ({VALUE})", line.partition(" iter_args(")[0]))
            body = tuple(lines[first + 1 : last])
            yield Loop(bounds, dict(carried), tuple(given.split(", ")), head[2] or "", first, last, body)


def derived(lines: tuple[str, ...] | list[str], seeds: set[str]) -> set[str]:
    """The values in `lines` that are computed from `seeds`, these included."""
    found = set(seeds)
    for line in lines:
        result, equals, rest = line.strip().partition(" = ")
        if equals and "scf.for" not in rest and found & set(re.findall(VALUE, rest)):
            found |= set(re.findall(VALUE, result))
    return found


def operands(lines: tuple[str, ...] | list[str], operation: str) -> list[str]:
    """The first operand of every `operation`."""
    return re.findall(rf"{re.escape(operation)} (%\w+)", "\n".join(lines))


@functools.cache
def definitions(text: str) -> dict[str, tuple[str, str, int]]:
    """The operation, operands and bits of every number that is computed."""
    found = re.findall(rf"({VALUE}) = arith\.(\w+) ([^:]+?) : i(\d+)", text)
    return {name: (operation, operands, int(bits)) for name, operation, operands, bits in found}


def evaluated(lines: tuple[str, ...] | list[str], name: str, given: Callable[[str], int]) -> int:
    """The value of `name`, computed in as many bits as the compiler does, from constants and values that are given."""
    defined = definitions("\n".join(lines))

    @functools.cache
    def value(each: str) -> int:
        if each not in defined:
            return given(each)
        operation, text, bits = defined[each]
        first, *others = text.split(", ")
        if operation == "constant":
            return int(first)
        if operation in ("extsi", "extui"):
            return value(first)
        if operation == "trunci":  # to 32 bits, the only ones
            return (value(first) + (1 << 31)) % (1 << 32) - (1 << 31)
        if operation == "select":
            return value(others[0] if value(first) else others[1])
        kind, pair = (first, others) if operation == "cmpi" else (operation, [first, *others])
        half = 1 << (bits - 1)
        return (ARITHMETIC[kind](*map(value, pair)) + half) % (2 * half) - half

    return value(name)


def computed(lines: tuple[str, ...] | list[str], name: str, arguments: list[int]) -> int:
    """The value of `name`, computed from constants and these arguments, in the order in which it needs them."""
    left = iter(arguments)
    return evaluated(lines, name, functools.cache(lambda _: next(left)))


def arrivals(lines: tuple[str, ...] | list[str]) -> list[str]:
    """The barrier of every arrival."""
    return ARRIVED.findall("\n".join(lines))


def indices(lines: tuple[str, ...] | list[str]) -> dict[str, str]:
    """The index of all that is taken out of an array in shared memory, but not of a part of one of its elements."""
    text = "\n".join(lines)
    parted = set(re.findall(r"(%\w+) = ttg\.memdesc_reinterpret", text))
    found = re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[(%\w+)(?:#\d+)?\]", text)
    return {name: index for name, array, index in found if array not in parted}


def passes_stages(loop: Loop) -> bool:
    """Whether it is a loop over a tile's stages of the ring: it waits for them, fills or releases them.

    No loop is in it.
    """
    text = "\n".join(loop.body)
    return "ttng.wait_barrier" in text and bool(LOADED.search(text) or arrivals(loop.body)) and "scf.for" not in text


def always(body: tuple[str, ...]) -> str:
    """What a loop does in every turn, without what is under a condition."""
    indent = min(map(indentation, body))
    return "\n".join(line for line in body if indentation(line) == indent)


def of_tiles(lines: list[str]) -> tuple[Loop, list[Loop]]:
    """A producer's loop over tiles, and those over stages in it."""
    tiles, *inner = (loop for loop in loops(lines) if "scf.for" in "\n".join(loop.body) or passes_stages(loop))
    return tiles, inner


def stage_and_phase(loop: Loop) -> tuple[str, str]:
    """The stage and the phase that a loop waits for in every turn."""
    ((barrier, phase),) = re.findall(rf"ttng\.wait_barrier ({VALUE}), ({VALUE}),", always(loop.body))
    return indices(loop.body)[barrier], phase


def results_of(loop: Loop, names: tuple[str, ...]) -> list[str]:
    """What a loop gives in the end of what it carries by these names."""
    return [f"{loop.results}#{list(loop.carried).index(name)}" for name in names]


def written(lines: tuple[str, ...] | list[str], name: str) -> str:
    """How `name` is computed, written out."""
    found = dict(re.findall(rf"({VALUE}) = ([^:]+?) :", "\n".join(lines)))

    def text(each: str) -> str:
        return re.sub(VALUE, lambda match: f"({text(match[0])})", found[each]) if each in found else each

    return text(name)


def held_by_no_carry(lines: list[str], expected: int = 1) -> list[str]:
    """What is wrong with the ring in one group of warps, whose tiles have so many loops over stages."""
    found = list(loops(lines))
    inner = [loop for loop in found if passes_stages(loop)]
    if len(inner) != expected:
        return [f"{len(inner)} loops over stages"]
    return [what for i in range(expected) for what in wrong_with(inner[i], inner[:i], found, lines)]


def held_ahead(lines: list[str], planes: int = 0) -> list[str]:
    """What is wrong with the ring in a group of warps that waits for the stage after the one that it carries.

    One that turns Y also waits for the plane of the stage that it carries, and for the turn of the next one's: `planes`
    is 1.
    """
    found = list(loops(lines))
    (loop,) = (each for each in found if passes_stages(each))
    around = next(other for other in found if other.first < loop.first < loop.last < other.last)
    waits = re.findall(r"ttng\.wait_barrier (%\w+), (%\w+),", "\n".join(loop.body))
    awaited = [(indices(loop.body)[barrier], phase) for barrier, phase in waits]
    now = [names for names in awaited if names[0] in loop.carried]
    (stage, phase), *turns = [names for names in awaited if names[0] not in loop.carried]
    following = derived(loop.body, set(loop.carried))
    wrong = [f"{name} does not follow what is carried" for name in (stage, phase) if name not in following]
    wrong += [f"{phase} is not carried" for _, phase in now if phase not in loop.carried]
    before = derived(loop.body, {stage, phase})
    wrong += [f"{name} does not follow the next stage" for names in turns for name in names if name not in before]
    if (len(now), len(turns)) != (planes, planes):
        wrong.append(f"waits for {len(now)} planes and {len(turns)} turns")
    wrong += [f"{name} is not carried on" for name in (stage, phase) if name not in loop.next]
    begun = derived(lines[around.first + 1 : loop.first], set(around.carried))
    firsts = [start for start, after in zip(loop.carried.values(), loop.next, strict=True) if after in (stage, phase)]
    wrong += [f"{start} is the same for every tile" for start in firsts if start not in begun]
    return wrong


def wrong_with(loop: Loop, earlier: list[Loop], found: list[Loop], lines: list[str]) -> list[str]:
    """What in a loop over stages does not follow the stage and phase that it carries, or the loop before it left."""
    *outer, around = (other for other in found if other.first < loop.first < loop.last < other.last)
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
    wrong += [f"{name} is no stage" for name in arrivals(loop.body) if name not in index]
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
        f"{name} is the same for every tile" for each in (*outer, around)
        for name, after in zip(each.carried, each.next, strict=True) if name == after
    ]  # fmt: skip
    for tiles in outer:  # around the loop over slices
        carried = derived(lines[tiles.first + 1 : around.first], set(tiles.carried))
        begun = [around.carried[loop.carried[name]] for name in sorted(stages | phases)]
        wrong += [f"{start} is the same for every tile" for start in begun if start not in carried]
    return wrong


# -------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("made", SHARING, ids=lambda made: made.name)
def test_passes_that_are_left_out_change_nothing(made: Variant) -> None:
    """Images are the same with the passes that builds leave out, the search for missing fences among them."""
    assert in_worker(make_optimised, made).kernel.image == compiled(made).kernel.image


@pytest.mark.parametrize("made", SHARING, ids=lambda made: made.name)
def test_no_fence_and_no_barrier_is_missing(made: Variant) -> None:
    """The compiler's search for missing ones, which builds leave out, would add what is not needed alone.

    It takes PTX that arrives at a barrier for any access to it, so it has all warps meet before each wait for a stage.
    """
    ours, searched = compiled(made).ptx, in_worker(make_searched, made).ptx
    found, all_of_them = (Counter(SYNCHRONISING.findall(text)) for text in (ours, searched))
    # builds of fp8 with bias search for barriers, but not for fences; with both there are fewer before waits
    assert (found - all_of_them).keys() <= {"bar.warp.sync"}
    added = all_of_them - found
    assert added.keys() <= {"bar.sync", "bar.warp.sync"}
    # the store, the barrier and the read of a bias are behind one condition each time, which the search does not know
    behind = consumers(made) if made.epilogue == "bias" and not made.dtype_a.startswith("fp8") else 0
    before_waits = len(BEFORE_A_WAIT.findall(searched)) - len(BEFORE_A_WAIT.findall(ours))
    assert all_of_them.total() - found.total() == before_waits + behind


@every_variant
def test_resources(made: Variant) -> None:
    """It compiles; a block can have its threads, registers and memory; only those that add a matrix may spill."""
    kernel = compiled(made).kernel
    assert kernel.threads == 32 * (made.config.num_warps + 1 + PADDING_WARPS)
    assert kernel.threads * kernel.registers <= 64 * 1024
    assert 0 < kernel.shared_bytes <= SM90.shared_bytes
    element = DTYPES[made.dtype_a].bytes
    config = made.config
    assert kernel.shared_bytes > config.num_stages * loaded(made) * depth(made) * element
    assert (kernel.global_scratch_bytes, kernel.profile_scratch_bytes) == (0, 0)
    assert (kernel.persistent, kernel.pdl, kernel.num_ctas) == (config.cluster_k == 1, True, made.num_ctas)
    if not adds_matrices(made):
        assert kernel.spill_bytes == 0


@pytest.mark.parametrize("made", [*PRODUCTS, *PARTIALS], ids=lambda made: made.name)
def test_tensor_maps(made: Variant) -> None:
    """Each map is of the right matrix, in the order that its layout has in memory, in boxes no wider than a swizzle.

    X is A, whose slabs are loaded one by one, and Y is B, whose widths are; swapped kernels have them the other way.
    Boxes are as large as what a block multiplies, whoever loads them.
    """
    element = DTYPES[made.dtype_a].bytes
    swapped = made.family == "swapped"
    rows = block(made)[0] // slabs(made)

    def expected(matrix: str, along: int) -> tuple[str, TensorMap]:
        size, across, k = ("M", "stride_am", "stride_ak") if matrix == "a" else ("N", "stride_bn", "stride_bk")
        if made.layout["ab".index(matrix)] == {"a": "n", "b": "t"}[matrix]:
            inner, outer, stride, extent, box_outer = "K", size, across, depth(made), along
        else:
            inner, outer, stride, extent, box_outer = size, "K", k, along, depth(made)
        box = min(extent, ROW_BYTES // element)
        swizzle = {32: 1, 64: 2, 128: 3}[box * element]
        between = f"stride_{matrix}z"
        row = TensorMap(
            made.dtype_a, inner, outer, "batch", stride, between, box, box_outer, swizzle, fits=inner == "K"
        )
        return f"{matrix}_ptr", row

    x, y = ("b", "a") if swapped else ("a", "b")
    wanted = [("x_desc", *expected(x, rows))]
    lines = [ROW_BYTES // element] if boxes_across(made) else widths(made)
    wanted += [(name, *expected(y, along)) for name, along in zip(("y_desc", "y1_desc"), lines, strict=False)]
    maps = [p for p in compiled(made).kernel.parameters if p.tensor_map and p.name != "bias_desc"]
    found = [(p.name, p.value, p.tensor_map) for p in maps]
    results = found[len(wanted) :]
    assert found[: len(wanted)] == wanted
    assert bool(results) == (made.role == "product")
    c = DTYPES[made.dtype_c].bytes
    for name, value, row in results:
        assert (name, value) in {("c_desc", "c_ptr"), ("c1_desc", "c_ptr")}
        assert row is not None
        assert (row.dtype, row.inner, row.outer, row.batch) == (made.dtype_c, "N", "M", "batch")
        assert (row.stride, row.batch_stride) == ("stride_cm", "stride_cz")
        assert row.box_inner * c == {1: 32, 2: 64, 3: 128}[row.swizzle]
        along, across = (row.box_outer, row.box_inner) if swapped else (row.box_inner, row.box_outer)
        first = results[0][2]
        assert first is not None
        assert along in chunks(made, first.box_outer if swapped else first.box_inner)
        assert rows % across == 0 if swapped else across == rows


@pytest.mark.parametrize("made", STORED_BY_THREADS, ids=lambda made: made.name)
def test_threads_store_c_of_any_rows(made: Variant) -> None:
    """TMA stores nothing then, and the map of C is never encoded: its guard does not hold."""
    found = compiled(made)
    assert "async_tma_copy_local_to_global" not in found.ttgir
    assert found.ttgir.count("tt.store") >= consumers(made)
    never = [p.tensor_map.guards for p in found.kernel.parameters if p.tensor_map and p.value == "c_ptr"]
    assert never
    assert all(
        [(guard.value, guard.relation, guard.operand) for guard in row] == [("zero", "equals", 1)] for row in never
    )
    aligned = compiled(replace(made, aligned=True)).ttgir
    assert "async_tma_copy_local_to_global" in aligned
    assert "tt.store" not in aligned


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("sliced", True),
        ("pingpong", True),
        ("swapped-tall", True),
        ("pingpong-wide", False),
        ("cooperative-2-wide", False),
        ("swapped", False),
    ],
)
def test_threads_store_whole_rows_in_vectors(name: str, whole: bool) -> None:  # noqa: FBT001
    """Where one chunk has all columns of a tile there are stores of 16 bytes too, for C of aligned rows."""
    ptx = compiled(variant(name, aligned=False)).ptx
    assert ("st.global.v4.b32" in ptx) == whole
    assert "st.global.b16" in ptx


@every_variant
def test_map_of_a_residual(made: Variant) -> None:
    """Where a matrix can be added it comes in boxes that fit a buffer of X; nothing is guarded of it."""
    kernel = compiled(made).kernel
    found = [parameter for parameter in kernel.parameters if parameter.name == "bias_desc"]
    assert bool(found) == adds_matrices(made)
    assert not [guard for guard in kernel.guards if "bias" in guard.value]
    for parameter in found:
        row = parameter.tensor_map
        assert row is not None
        assert (parameter.value, row.dtype) == ("bias_ptr", made.dtype_c)
        assert (row.inner, row.outer, row.batch) == ("N", "M", "batch")
        assert (row.stride, row.batch_stride) == ("stride_bias_m", "stride_bias_z")
        swapped = made.family == "swapped"
        rows = block(made)[0] // slabs(made)
        high, wide = (row.box_inner, row.box_outer) if swapped else (row.box_outer, row.box_inner)
        assert rows % high == 0 if swapped else high == rows
        assert min(widths(made)) % wide == 0 or len(widths(made)) == 1
        slab = rows * depth(made) * DTYPES[made.dtype_a].bytes
        assert row.box_inner * DTYPES[made.dtype_c].bytes == {1: 32, 2: 64, 3: 128}[row.swizzle]
        assert rows * wide * DTYPES[made.dtype_c].bytes <= slab


@pytest.mark.parametrize("made", [made for made in FINISHED if made.epilogue == "bias"], ids=lambda made: made.name)
def test_a_bias_is_awaited(made: Variant) -> None:
    """All threads meet between the store of a vector and its reads, and after these, before that of the next tile."""
    *multiplying, _ = partitions(compiled(made).ttgir)
    for lines in multiplying:
        kinds = {
            "store": r"local_store .* -> !ttg\.memdesc<\d+xf32,",
            "read": r"local_load .* : !ttg\.memdesc<\d+xf32,",
            "meet": r"ttg\.barrier all",
        }
        order = [kind for line in lines for kind, pattern in kinds.items() if re.search(pattern, line)]
        assert order.index("store") < order.index("read")
        text = " ".join(order)
        assert not re.search(r"store read|read$|read store", text), text


@pytest.mark.parametrize("made", [*filter(adds_matrices, FINISHED)], ids=lambda made: made.name)
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
    """What is guarded is what tensor maps, 32-bit sizes, scales and the first product of a tile need, and no more.

    Each slice of a cluster, or of a block, has a first product.
    """
    element, c = DTYPES[made.dtype_a].bytes, DTYPES[made.dtype_c].bytes
    unit = {
        "a": ("stride_am", "stride_ak") if made.layout[0] == "n" else ("stride_ak", "stride_am"),
        "b": ("stride_bk", "stride_bn") if made.layout[1] == "n" else ("stride_bn", "stride_bk"),
        "c": ("stride_cm", "stride_cn"),
    }
    boxed = made.role == "product" and made.aligned
    matrices = {"a": element, "b": element} | ({"c": c} if boxed else {})
    least = depth(made) * (made.config.slices - 1) + 1
    wanted = [("K", "at_least", least), *((size, "below", I32_LIMIT) for size in ("M", "N", "K", "batch"))]
    for matrix, size in matrices.items():
        outer, inner = unit[matrix]
        wanted += [
            (inner, "equals", 1),
            (outer, "multiple_of", 16 // size),
            (outer, "at_least", 1),
            (f"stride_{matrix}z", "multiple_of", 16 // size),
            (f"{matrix}_ptr", "multiple_of", 16),
        ]
    if made.role == "product":
        wanted.append(("c_span", "multiple_of", 16 // c) if boxed else ("stride_cn", "equals", 1))
        if not made.dtype_a.startswith("fp8"):
            wanted += [("scale_a_ptr", "equals", 0), ("scale_b_ptr", "equals", 0)]
    if made.dtype_a.startswith("fp8"):
        wanted.append(("block_scale_a_ptr", *(("at_least", 1) if made.block_scales else ("equals", 0))))
    if made.block_scales == "128x128":
        wanted.append(("block_columns", "equals", 128))
    if made.fast_accum:
        wanted.append(("fast_accum", "equals", 1))
    if made.dtype_a == "tf32":
        wanted.append(("allow_tf32", "equals", 1))
    guards = [(p.value, p.relation, p.operand) for p in compiled(made).kernel.guards]
    assert sorted(guards) == sorted(wanted)


def launches(made: Variant) -> Iterator[dict[str, int]]:
    """Kernel parameters and special registers of small and large launches, but for the number of their work tiles.

    Of clusters it is the last block.
    """
    across = 1 if made.config.cluster_k > 1 else 4
    cluster = {"cluster_nctaid.x": 2, "cluster_ctaid.x": 1, "cluster_nctaid.y": across, "cluster_ctaid.y": across - 1}
    cluster["cluster_ctarank"] = made.config.cluster_k - 1
    most, parts = I32_LIMIT - 1, 3 if made.role == "partial" else 1
    for m, n, k, batch in ((1, 1, 4096, 1), (most, 1, most, 1), (1, most, 4096, 1), (999, 3001, most, 7)):
        for group, split, rank in ((1, 1, 0), (8, parts, 2)):
            sizes = {"%M": m, "%N": n, "%K": k, "%batch": batch, "%group_m": group, "%split": split, "%bias_rank": rank}
            yield sizes | {"%k_shift": 0 if rank else LINE_BYTES - 1} | cluster


def always_holds(made: Variant, lines: list[str], condition: str) -> bool:
    """Whether a condition of producers holds for the first work tile of each launch, and for the last."""
    ttgir = compiled(made).ttgir
    outer, inner = setup(ttgir), captured(ttgir, lines)
    names = kernel_names(outer)

    def number(name: str, launch: dict[str, int]) -> int:
        def of_kernel(each: str) -> int:
            return evaluated(outer, inner[each], lambda found: launch[names.get(found, found)])

        return evaluated(lines, name, functools.cache(of_kernel))

    tiles, *_ = loops(lines)
    first, last, _ = tiles.bounds
    for launch in launches(made):
        total = number(last, launch)
        assert total > 0
        for unit in (0, total - 1):
            numbers = launch | {"clusterid.x": unit}
            assert number(first, numbers) == unit
            if not number(condition, numbers):
                return False
    return True


def waits_of(lines: list[str]) -> list[int]:
    """Where a group of warps waits for the kernel before."""
    return [n for n, line in enumerate(lines) if "tt.grid_dependency_wait" in line]


@pytest.mark.parametrize("made", [*ALL, *GROUPED], ids=lambda made: made.name)
def test_programmatic_launches(made: Variant) -> None:
    """Whoever reads global memory first waits for the kernel before; the next one is let go once, at the beginning.

    Consumers without an epilogue read nothing but ends of groups: what they multiply comes through the producer. They
    wait in any case, or for a vector that is added if they read nothing else.
    """
    found = compiled(made)
    assert found.ptx.count("griddepcontrol.launch_dependents") == 1
    assert "griddepcontrol.wait" in found.ptx
    text = found.ttgir
    assert text.index("tt.grid_dependency_launch_dependents") < text.index("ttg.warp_specialize")
    readers = 0
    for lines in partitions(text):
        reads = [n for n, line in enumerate(lines) if LOADED.search(line) or "tt.load" in line]
        waits = waits_of(lines)
        readers += bool(reads)
        assert len(waits) == bool(reads)
        if reads:
            assert waits[0] < min(reads)
            assert not any(loop.first < waits[0] < loop.last for loop in loops(lines))
    grouped = made.role.startswith("grouped")
    scaled = made.dtype_a.startswith("fp8") and made.role != "partial"
    assert readers == 1 + (consumers(made) if scaled or grouped or made.epilogue != "none" else 0)
    *multiplying, _ = partitions(text)
    for lines in multiplying:
        asked = [condition for at in waits_of(lines) for condition in conditions(lines, at)]
        assert len(asked) == (made.epilogue == "bias" and not scaled)
        for condition in asked:
            (rank,) = re.findall(rf"{condition} = arith\.cmpi eq, ({VALUE}), %c1_i64", "\n".join(lines))
            assert captured(text, lines).get(rank, rank) == "%bias_rank"
    if readers == 1:
        first = re.search(r"cp\.async\.bulk\.tensor\.3d\.shared::(?:cta|cluster)\.global", found.ptx)
        assert first is not None
        assert found.ptx.index("griddepcontrol.wait") < first.start()


@pytest.mark.parametrize("made", [*ALL, *GROUPED], ids=lambda made: made.name)
def test_producers_wait(made: Variant) -> None:
    """Producers wait for the kernel before whatever the launch. They have found their first tile then.

    They wait behind a condition that is always met. If ends of groups tell where the first tile is, they wait first.
    """
    producing = partitions(compiled(made).ttgir)[-1]
    (waiting,) = waits_of(producing)
    asked = conditions(producing, waiting)
    if made.role.startswith("grouped"):
        assert asked == []
        return
    (condition,) = asked
    assert always_holds(made, producing, condition)
    divisions = [n for n, line in enumerate(producing) if re.search(r"arith\.(?:div|rem)", line)]
    assert min(divisions) < waiting
    tiles = min(loop.first for loop in loops(producing))
    assert not any(waiting < n < tiles for n in divisions)


def waits_first(made: Variant, launched: Iterable[tuple[dict[str, int], Iterable[int]]]) -> None:
    """A kernel lets the next one go, and waits for the one before, on every path, before it touches memory.

    A branch around the wait alone is never taken in `launched`, sizes and numbers of programs.
    """
    found = compiled(made)
    assert found.kernel.pdl
    at = [match.start() for match in re.finditer(r"griddepcontrol\.(?:launch_dependents|wait)", found.ptx)]
    assert at == [found.ptx.index(f"griddepcontrol.{word}") for word in ("launch_dependents", "wait")]
    accesses = [match.start() for match in re.finditer(r"\b(?:ld|st)\.(?:global|shared)|\bcp\.async", found.ptx)]
    assert at[-1] < min(accesses)
    before = found.ptx[: min(accesses)]
    past = re.search(
        r"setp\.lt\.s64\s+(%p\d+), %rd\d+, 0;\s+@(%p\d+) bra\s+(\$\w+);\n"
        r"(?:\s*//.*\n)*\s*griddepcontrol\.wait ;\n(?:\s*//.*\n)*\3:",
        before,
    )
    assert past is not None
    assert past[1] == past[2]
    early = before[: past.start()]  # 64-bit divisions have branches, which all end there
    assert set(re.findall(r"\bbra(?:\.uni)?\s+(\$\w+);", early)) <= set(
        re.findall(r"^\s*(\$\w+):", early, re.MULTILINE)
    )
    assert not re.search(r"\b(?:brx|ret|exit)\b", early)
    lines = found.ttgir.splitlines()
    (waited,) = (n for n, line in enumerate(lines) if "tt.grid_dependency_wait" in line)
    (condition,) = conditions(lines, waited)
    numbers = [name for name, register in kernel_names(lines).items() if register == "clusterid.x"]
    for sizes, programs in launched:
        for number in programs:
            assert evaluated(lines, condition, (sizes | dict.fromkeys(numbers, number)).__getitem__)


SIZES = [(1, 1), (I32_LIMIT - 1, 1), (1, I32_LIMIT - 1), (99, 3001)]


@pytest.mark.parametrize("layout", ["nn", "any"])
def test_reduce_waits_first(layout: str) -> None:
    """A reduce waits for its partial. It finds its tile meanwhile."""
    config = Config(4, 128, 1, 5, 4)
    made = Variant(SM90, "reduce", "fp32", "fp32", "fp16", layout, True, "full", False, config, "tests", "reduce")  # noqa: FBT003
    tiles = [(m, n, -(-m // config.block_m) * -(-n // config.block_n)) for m, n in SIZES]
    batches = [(1, 1, I32_LIMIT - 1, 1), *((m, n, 7, count) for m, n, count in tiles)]
    waits_first(made, [({"%M": m, "%N": n}, (0, batch * count - 1)) for m, n, batch, count in batches])


@pytest.mark.parametrize(
    ("dtype", "layout", "aligned"),
    [("fp16", "nn", False), ("fp16", "nt", False), ("fp16", "any", False), ("int8", "tn", True)],
)
def test_copies_wait_first(dtype: str, layout: str, aligned: bool) -> None:  # noqa: FBT001
    """A copy of one or two operands waits for what may write them. It finds its tile and its matrix meanwhile."""
    over_rows = layout == "nn"
    config = Config(1, 2048, 1, 1, 4) if over_rows else Config(64, 64, 1, 1, 8)
    made = Variant(SM90, "copy", *(dtype,) * 3, layout, aligned, "none", False, config, "tests", "copy")  # noqa: FBT003
    launched = []
    for (m, n), (other_m, other_n), batch in itertools.product(SIZES, [(0, 0), *SIZES], (1, 3)):
        both = (m, n), (other_m, other_n)
        tiles = (-(-rows * cols // 2048) if over_rows else -(-rows // 64) * -(-cols // 64) for rows, cols in both)
        first, other = (batch * count for count in tiles)
        sizes = {"%M": m, "%N": n, "%other_M": other_m, "%other_N": other_n, "%batch": batch, "%other_batch": batch}
        launched.append((sizes, {0, first - 1, first + other - 1}))
    waits_first(made, launched)


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

    So do all of the producers' loops, and those over the boxes of a matrix that is added, which go on from there. Each
    begins with stage 0 of an empty ring. Gluon takes a variable that begins as another carried one to be constant,
    without a word; every stage handed back would be the first, and the producer would wait for ever.
    """
    working = partitions(compiled(made).ttgir)
    assert len(working) == consumers(made) + 1
    *multiplying, producing = working
    check = functools.partial(held_ahead, planes=int(turned(made))) if in_registers(made) else held_by_no_carry
    assert [check(lines) for lines in multiplying] == [[]] * len(multiplying)
    assert LOADED.search("\n".join(producing))
    for lines in ways(made).values():
        assert held_by_no_carry(lines, 2 if adds_matrices(made) else 1) == []
        assert LOADED.search("\n".join(lines))
        tiles, inner = of_tiles(lines)
        begun = [loop.carried[name] for loop in inner for name in stage_and_phase(loop)]
        left = [name for loop in inner for name in results_of(loop, stage_and_phase(loop))]
        carried = list(tiles.carried)
        assert begun[2:] == left[:-2]
        assert [tiles.next[carried.index(name)] for name in begun[:2]] == left[-2:]
        assert [computed(lines, tiles.carried[name], []) for name in begun[:2]] == [0, 1]
    precise = made.dtype_a.startswith("fp8") and not made.fast_accum
    for lines in multiplying:
        (loop,) = (found for found in loops(lines) if passes_stages(found))
        assert "ttng.warp_group_dot" in "\n".join(loop.body)
        # who turns Y says so, and that all of the plane is multiplied
        assert len(arrivals(loop.body)) == (3 if turned(made) else 1)
        # the last stage of a tile is handed back after the loop, unless every step waits for its product, and boxes are
        after = lines[loop.last + 1 :]
        around = {each.results for each in loops(lines) if each.first < loop.first < loop.last < each.last}
        index, following = indices(after), derived(after, {loop.results, *around})
        late = [name for name in arrivals(after) if index.get(name) in following]
        handed = stages_of_matrix(made) * (3 if turned(made) else 1)
        assert len(late) == (0 if precise or in_registers(made) else 1) + handed


class Number(int):
    """A number whose comparisons are numbers, too, as in the kernels."""

    def __lt__(self, other: int) -> Number:  # type: ignore[misc, override]
        return Number(int(self) < int(other))

    def to(self, _kind: object) -> Number:
        """Return it as a number of that kind."""
        return self


@pytest.mark.parametrize("stages", range(2, 17))
def test_planes_take_turns(stages: int) -> None:
    """Buffers of planes alternate from stage to stage, whatever their number, and wait for the last stage but one."""
    waits: list[tuple[int, int]] = []
    empty = SimpleNamespace(index=int)
    language = SimpleNamespace(where=lambda wraps, yes, no: yes if wraps else no, int32=int)
    barrier = SimpleNamespace(wait=lambda stage, phase: waits.append((stage, int(phase))))
    tiling = SimpleNamespace(STAGES=stages)
    with patch.multiple(mma, gl=language, mbarrier=barrier, IN_TURN=PLANE_BUFFERS):
        for number in range(4 * stages):
            stage, phase = Number(number % stages), number // stages & 1
            assert mma.turn_of.fn(stage, phase, tiling) == number % PLANE_BUFFERS
            mma.await_turn.fn(SimpleNamespace(planes_empty=empty), tiling, stage, phase)
    before = [number - PLANE_BUFFERS for number in range(4 * stages)]
    assert waits == [(number % stages, number // stages & 1) for number in before]


@every_variant
def test_instructions(made: Variant) -> None:
    """Products have the widths of the tile and none wider, as many columns of sums as that, and follow one another.

    A wgmma of a width that no tensor has is written out: it has the registers of its own columns only. Of a cluster
    the compiler may make two loops: for blocks that own a slab or have peers, and for others.
    """
    text = compiled(made).ptx
    found = re.findall(r"wgmma\.mma_async\S+\.m64n(\d+)k\d+\S*\s*\{([^}]*)\}", text)
    assert {int(width) for width, _ in found} == set(widths(made))
    assert all(2 * len(sums.split(",")) == int(width) for width, sums in found)
    rows = block(made)[0] // slabs(made)
    steps = depth(made) * DTYPES[made.dtype_a].bytes // 32
    once = consumers(made) * steps * (rows // 64) * len(widths(made))
    assert len(found) in ([once, 2 * once] if made.num_ctas > 1 else [once])
    assert compiled(made).kernel.spill_bytes == 0 or adds_matrices(made)


def test_boxes_are_read_as_the_compiler_reads_its_own() -> None:
    """What is written out for columns in several boxes has descriptors, steps and orders of Triton's instruction."""
    made = variant("cooperative-odd", "tn")
    ours, triton = (compiled(replace(made, config=replace(made.config, block_n=n))).ptx for n in (208, 256))
    descriptors = {name: int(bits) for name, bits in re.findall(r"or\.b64 ([xy]), [xy], (\d+);", ours)}
    (swizzle,) = {int(bits) for bits in re.findall(r"or\.b64\s+%rd\d+, %rd\d+, (\d+);", triton)}
    apart = descriptors["y"] ^ swizzle  # the distance of boxes alone
    (step,) = {int(step) for step in re.findall(r"add\.s64 y, y, (\d+);", ours)}
    added = {int(bits) for bits in re.findall(r"(?:or|add)\.[bs]32\s+%r\d+, %r\d+, (\d+);", triton)}
    assert apart % (1 << 16) == 0
    assert {bits for bits in added if bits >= apart} == {apart + number * step for number in range(4)}
    assert apart == 64 * ROW_BYTES // 16 << 16
    orders = [set(re.findall(r"wgmma\.mma_async[^;]*((?:, \d){4});", text)) for text in (ours, triton)]
    assert orders == 2 * [{", 1, 1, 1, 1"}]


@pytest.mark.parametrize("name", ["cooperative-2", "cooperative-2-wide", "cooperative-odd", "pingpong-odd"])
def test_what_is_cleared_behind_a_group_of_k(name: str) -> None:
    """A stage that ends with rows of another group is cleared in all boxes, of X and of Y, in a loop of its own."""
    made = variant(name, "tn", role="grouped_k")
    *multiplying, _ = partitions(compiled(made).ttgir)
    for lines in multiplying:
        whole, last = ("\n".join(found.body) for found in loops(lines) if passes_stages(found))
        assert "ttg.local_store" not in whole
        assert last.count("ttg.local_store") == 1 + (boxes_across(made) or len(widths(made)))


@every_variant
def test_how_a_stage_is_filled(made: Variant) -> None:
    """A stage is filled when it is empty, and expects its own bytes; blocks of a cluster load in turns, for all peers.

    So each of them tells its peers that its stage is empty, before it loads: the producer of X does, which expects all
    bytes. That of Y expects none. What no other block needs comes to this one alone, in every step.
    """
    for (operand, several), producing in ways(made).items():
        loop, *_ = (found for found in loops(producing) if passes_stages(found))
        lines = loop.body
        (waited,), ((filled, expected),) = operands(lines, "ttng.wait_barrier"), FILLED.findall("\n".join(lines))
        assert waited != filled
        x_along_k = loaded(made, rows=1) < loaded(made)
        for sizes in ((3, 5), (70, 9), (1 << 20, 1 << 20)):
            known = [size for size, along in zip(sizes, (x_along_k, y_along_k(made)), strict=True) if along]
            wanted = loaded(made, *sizes) * depth(made) * DTYPES[made.dtype_a].bytes if "x" in operand else 0
            assert computed(producing, expected, known) == wanted
        tells = made.num_ctas > 1 and operand == "x"
        assert arrivals(lines) == [filled] * tells
        words = "ttng.wait_barrier|expect_tx|mapa.shared::cluster.u32 there|scf.if|" + LOADED.pattern
        found = [match[0].strip() for line in lines if (match := re.search(words, line))]
        load = "cp.async.bulk.tensor" if made.num_ctas > 1 else "async_tma_copy_global_to_local"
        # inline PTX of a cluster copies all boxes
        rows, each = (slabs(made), boxes_across(made) or 1) if made.num_ctas == 1 else (1, 1)
        count = rows * ("x" in operand) + len(widths(made)) * each * ("y" in operand)
        told = ["mapa.shared::cluster.u32 there"] * tells
        assert found == ["ttng.wait_barrier", "expect_tx", *told, *["scf.if"] * several, *[load] * count]
        assert sum(bool(LOADED.search(line)) for line in always(lines).splitlines()) == (0 if several else count)
        assert "\n".join(lines).count("multicast::cluster [box]") == ("\n".join(lines).count("[box]") if several else 0)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 200])
def test_the_last_tile_ends_with_the_matrix(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles hold each line once or more, and none past the end if a tile's are there; exceptions begin at multiples."""
    numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(pipeline, "gl", numbers)

    def begins(*, along_k: bool = True, epilogue: str = "none", bias_rank: int = 0, group: int = 0) -> list[int]:
        work = SimpleNamespace(bias_rank=bias_rank, tiling=SimpleNamespace(EPILOGUE=epilogue, X_GROUP=group))
        within = pipeline.Work.within.fn
        return [within(work, begin, size, 64, along_k) for begin in range(0, size, 64)]

    multiples = list(range(0, size, 64))
    moved = begins()
    assert {line for begin in moved for line in range(begin, min(begin + 64, size))} == set(range(size))
    assert max(moved) == max(0, size - 64)
    assert moved[:-1] == multiples[:-1]
    assert begins(epilogue="full", bias_rank=1) == begins(epilogue="bias", bias_rank=1) == moved
    assert begins(epilogue="full", bias_rank=2) == begins(along_k=False) == begins(group=1) == multiples


def awaited_at_stages(made: Variant, down: int, across: int) -> tuple[set[int], set[int]]:
    """The arrivals that a full stage and an empty one await, of each stage."""
    lines = setup(compiled(made).ttgir)
    made_of = re.findall(r'mbarrier\.init[^"]*" \{constraints = "r,r"[^}]*\} %\w+, (%\w+)', "\n".join(lines))
    counts = [computed(lines, count, [down, across]) for count in made_of]
    stages = made.config.num_stages
    return set(counts[:stages]), set(counts[stages : 2 * stages])


@pytest.mark.parametrize("name", ["cooperative-1", "cooperative-2", "clustered", "swapped-clustered"])
def test_who_arrives_with_block_scales(name: str) -> None:
    """Every thread of every producer also arrives when its scales are there, and every warp of a consumer releases.

    Each producer copies its part of the scales of both operands, whichever operand it loads.
    """
    made = variant(name, dtype="fp8e4", block_scales="128x128")
    down, across = (2, 4) if made.num_ctas > 1 else (1, 1)
    peers, producers = down + across - 1, 2 if made.num_ctas > 1 else 1
    full, empty = awaited_at_stages(made, down, across)
    assert full == {peers - 1 + producers + 32 * producers}
    assert empty == {4 * slabs(made) * peers}
    for lines in ways(made).values():
        _, (filling,) = of_tiles(lines)
        assert always(filling.body).count("ttng.async_copy_mbarrier_arrive") == 1
        assert always(filling.body).count("ttg.async_copy_global_to_local") == 2
    assert compiled(made).kernel.spill_bytes == 0


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_registers_suffice(consumers: int) -> None:
    """A block has as many registers as its threads begin with, and each warpgroup gets a multiple of 8 of them."""
    begins = min(65536 // (128 * (consumers + 1)) // 8 * 8, 248)
    for consumer, producer in REGISTERS[consumers]:
        assert consumers * consumer + producer <= (consumers + 1) * begins
        assert consumer % 8 == producer % 8 == 0


@every_variant
def test_who_arrives_at_a_stage(made: Variant) -> None:
    """Each producer of a block, and one of each peer, tells that its own stage is empty. In a cluster there are two.

    Each consumer of all peers releases it: in a cluster with one arrival, else with one of each warp. Blocks with
    slices of K have no peers.
    """
    down, across = (2, 4) if made.config.cluster_k == 1 < made.num_ctas else (1, 1)
    peers, producers = down + across - 1, 2 if made.num_ctas > 1 else 1
    full, empty = awaited_at_stages(made, down, across)
    assert full == {peers - 1 + producers}
    assert empty == {(1 if made.num_ctas > 1 else 4) * slabs(made) * peers}
    assert f"num_warps({producers})" in partitions(compiled(made).ttgir)[-1][0]


@every_variant
def test_each_producer_has_an_operand(made: Variant) -> None:
    """In a cluster the first of two warps expects the bytes of a stage and loads X, the second loads Y.

    Without a cluster one warp does all. Only the first expects the boxes of a matrix that is added, too.
    """
    of_x, of_y = {0}, set(range(1, 1 + len(widths(made))))
    for (operand, _), producing in ways(made).items():
        _, inner = of_tiles(producing)
        numbers = re.findall(r"mov\.b64 map, \w+_param_(\d+);", "\n".join(producing))
        if made.num_ctas == 1:
            assert numbers == []
            assert "shfl.sync" not in "\n".join(producing)
            continue
        in_first = re.findall(r"mov\.b64 map, \w+_param_(\d+);", "\n".join(inner[0].body))
        assert in_first == numbers
        assert {int(number) // 7 for number in numbers} == {"x": of_x, "y": of_y}[operand]
        expected = [count for loop in inner for _, count in FILLED.findall("\n".join(loop.body))]
        assert len(expected) == (2 if adds_matrices(made) else 1)
        assert {bool(re.match("%c0_i32", count)) for count in expected} == {operand == "y"}


def meetings(loop: Loop) -> list[list[str]]:
    """Under which conditions all producers of a block meet in a loop."""
    meeting = [n for n, line in enumerate(loop.body) if "ttg.barrier" in line]
    return [[written(loop.body, condition) for condition in conditions(loop.body, n)] for n in meeting]


CLUSTERED = [made for made in (*ALL, *GROUPED) if made.num_ctas > 1]


@pytest.mark.parametrize("made", CLUSTERED, ids=lambda made: made.name)
def test_producers_meet_each_other(made: Variant) -> None:
    """Both producers of a block in a cluster have as many stages, and the same barriers in the loops over them.

    Each has loops of its own. At a barrier in the loop of one alone it would wait for ever.
    """
    found = ways(made)
    seen = []
    for lines in found.values():
        tiles, inner = of_tiles(lines)
        counted = [[written(tiles.body, tiles.carried.get(each, each)) for each in loop.bounds] for loop in inner]
        seen.append((tiles.bounds, counted, [meetings(loop) for loop in inner]))
    assert seen == seen[:1] * len(found)
    # those of the compiler, too, which it adds in some kernels
    marks = re.findall(r"\bbar\.sync\s+\d+, 64;|expect_tx\.shared::cta\.b64 _, \[here\]", compiled(made).ptx)
    order = "".join("f" if "expect_tx" in mark else "m" for mark in marks)
    assert order.count("f") == len(found) * (2 if adds_matrices(made) else 1)
    assert re.fullmatch(rf"(m*(?:fm*){{{order.count('f') // len(found)}}})\1{{{len(found) - 1}}}m*", order)


@every_variant
def test_multicasts(made: Variant) -> None:
    """In a cluster every copy of X or Y is made to several blocks, or to this one if there is no peer; else never.

    Blocks with slices of K share no operand. Boxes side by side in shared memory are copies of their own, through the
    tensor map of their operand.
    """
    found = compiled(made)
    copy = r"^cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\S*?(\.multicast::cluster)?\s"
    copies = re.findall(copy, found.ptx, re.MULTILINE)
    if made.num_ctas == 1:
        assert copies == []
        assert "multicast" not in found.ptx
        return
    offsets = [p for p in found.kernel.parameters if p.name in ("x_desc", "y_desc", "y1_desc") and p.tensor_map]
    wanted = Counter[str]()
    for number, (row, count) in enumerate(zip(offsets, (slabs(made), 1, 1), strict=False)):
        assert row.tensor_map is not None
        along = row.tensor_map.inner != "K"
        across = [block(made)[0] // slabs(made), *widths(made)][number]
        boxes_of_one = -(-(across if along else depth(made)) // row.tensor_map.box_inner)
        wanted[f"{made.family.replace('swapped', 'cooperative')}_param_{7 * number}"] += count * boxes_of_one
    kinds = [""] if made.config.cluster_k > 1 else ["", ".multicast::cluster"]
    assert Counter(copies) == dict.fromkeys(kinds, wanted.total())
    blocks = re.findall(r"mov\.b64 map, (\w+);(.*?)DONE:", found.ptx, re.DOTALL)
    named = Counter[str]()
    for name, text in blocks:
        named[name] += len(re.findall(r"^cp\.async", text, re.MULTILINE))
    assert named == Counter({name: len(kinds) * count for name, count in wanted.items()})


def awaited_array(loop: Loop) -> str:
    """The array of barriers of which a loop waits for one."""
    (waited,) = operands(loop.body, "ttng.wait_barrier")
    (array,) = re.findall(rf"{waited} = ttg\.memdesc_index (%\w+)\[", "\n".join(loop.body))
    return str(array)


@every_variant
def test_blocks_meet_and_leave(made: Variant) -> None:
    """Blocks of a cluster meet before any touches another's barriers, and leave when nobody may arrive at theirs.

    Every warp takes part in that. The barriers are made, and made known, before. Producers wait for all stages in the
    end, from the one on at which they are, whatever they loaded.
    """
    found = compiled(made)
    text, clustered = found.ttgir, made.num_ctas > 1
    assert text.count("barrier.cluster.arrive") == (len(groups(text)) if clustered else 0)
    producing = partitions(text)[-1]
    idle = [loop for loop in loops(producing) if not arrivals(loop.body)]
    leaving = [loop for loop in idle if not LOADED.search("\n".join(loop.body))]
    if not clustered:
        assert leaving == []
        assert len(groups(text)) == consumers(made) + 1
        return
    before = "\n".join(setup(text))
    assert before.rindex("mbarrier.init") < before.rindex("fence.mbarrier_init.release.cluster")
    for lines in groups(text):
        (meeting,) = (n for n, line in enumerate(lines) if "barrier.cluster.arrive" in line)
        used = [n for n, line in enumerate(lines) if "mbarrier.arrive" in line or "wait_barrier" in line]
        assert meeting < min(used, default=len(lines))
        assert conditions(lines, meeting) == []
    warps = re.findall(r"^    partition\d+\(.*num_warps\((\d+)\)", text, re.MULTILINE)
    assert 4 + sum(map(int, warps)) == found.kernel.threads // 32
    (leave,) = leaving
    assert conditions(producing, leave.first) == []
    for lines in ways(made).values():
        tiles, (filling, *_) = of_tiles(lines)
        *_, last = loops(lines)
        assert last.body == leave.body
        assert last.first > tiles.last
        assert [computed(lines, bound, []) for bound in last.bounds] == [0, made.config.num_stages, 1]
        carried = tuple(filling.carried[name] for name in stage_and_phase(filling))
        assert [last.carried[name] for name in stage_and_phase(last)] == results_of(tiles, carried)
        assert awaited_array(last) == awaited_array(filling)


SLICED = [made for made in PRODUCTS if made.config.cluster_k > 1]


@pytest.mark.parametrize("made", SLICED, ids=lambda made: made.name)
def test_slices_meet(made: Variant) -> None:
    """Each warpgroup sends all sums of its slab to the block that owns it, or expects and adds those of all others."""
    rows, columns = block(made)
    sums = rows // slabs(made) * columns  # of a slab
    others = made.config.cluster_k - 1
    found = compiled(made)
    *multiplying, _ = partitions(found.ttgir)
    for lines in multiplying:
        text = "\n".join(lines)
        assert len(re.findall(r"st\.async\S*\.v4\.f32", text)) == sums // 128 // 4
        assert len(re.findall(r"ld\.shared\.v4\.f32", text)) == others * sums // 128 // 4
        assert len(re.findall(r"add\.f32 ", text)) == others * sums // 128
        expected = re.findall(r"ttng\.barrier_expect %\w+, (\d+),", text)
        assert expected == [str(others * 4 * sums)]
        assert text.index("ttng.barrier_expect") < text.index("barrier.cluster.arrive")


SERIAL = [made for made in PRODUCTS if made.config.serial_k > 1]


@pytest.mark.parametrize("made", SERIAL, ids=lambda made: made.name)
def test_slices_one_after_another(made: Variant) -> None:
    """A loop over the slices adds the sums of each to zeros once, in fp32, when all its products are done."""
    rows, columns = block(made)
    *multiplying, _ = partitions(compiled(made).ttgir)
    for lines in multiplying:
        found = list(loops(lines))
        over_steps = next(loop for loop in found if passes_stages(loop))
        over_slices = [loop for loop in found if loop.first < over_steps.first and over_steps.last < loop.last][-1]
        inner = range(over_steps.first - over_slices.first - 1, over_steps.last - over_slices.first)
        around = [line for number, line in enumerate(over_slices.body) if number not in inner]
        added = [number for number, line in enumerate(around) if "arith.addf" in line]
        assert len(added) == 1
        assert any("warp_group_dot_wait" in line and "pendings = 0" in line for line in around[: added[0]])
        assert re.search(rf" to %c{made.config.serial_k}_i32(_\d+)? step %c1_i32", lines[over_slices.first])
    sums = consumers(made) * rows // slabs(made) * columns // 128  # registers
    assert len(re.findall(r"\badd\.(?:rn\.)?f32 ", compiled(made).ptx)) == sums


@dataclass(frozen=True)
class Share:
    """Of a block in a cluster: blocks with its rows of X and its columns of Y, its peers, steps at which it loads."""

    x: frozenset[int]
    y: frozenset[int]
    peers: int
    loads_x: tuple[bool, ...]
    loads_y: tuple[bool, ...]


def shares(down: int, across: int, swapped: bool) -> list[Share]:  # noqa: FBT001
    """What the sources say of every block of a cluster, in the order of their numbers: first along M, then along N."""
    from aotmm.kernels.hopper.cluster import Cluster, sharing

    m, n = (across, down) if swapped else (down, across)
    found = []
    for number in range(down * across):
        at_n, at_m = divmod(number, m)
        x, y = (at_n, at_m) if swapped else (at_m, at_n)
        this = SimpleNamespace(down=down, across=across, x=x, y=y)
        turns = [[bool(loads.fn(this, step)) for step in range(8)] for loads in (Cluster.loads_x, Cluster.loads_y)]
        of_a, of_b = (frozenset(i for i in range(32) if mask >> i & 1) for mask in sharing.fn(m, n, at_m, at_n))
        of_x, of_y = (of_b, of_a) if swapped else (of_a, of_b)
        found.append(Share(of_x, of_y, int(Cluster.peers.fn(this)), tuple(turns[0]), tuple(turns[1])))
    return found


class Numbers(np.ndarray[Any, Any]):
    """An array with the one method of Gluon's tensors that arrivals need."""

    def to(self, kind: Any) -> Any:  # noqa: D102 - Gluon's, as those below
        return self.astype(kind)


WINDOW = 1 << 24  # bytes from the shared memory of a block to that of the next
BARRIER = 1000  # its address
OF_LANES: dict[str, Callable[..., Any]] = {  # the instructions of arrivals
    "mov.u32": lambda a: a,
    "shr.u32": operator.rshift,
    "and.b32": operator.and_,
    "add.u32": operator.add,
    "mapa.shared::cluster.u32": lambda address, block: address + WINDOW * block,
    "setp.ne.b32": operator.ne,
    "setp.ne.and.b32": lambda a, b, c: (a != b) & c,
}


class Lanes:
    """Stands in for Gluon where threads arrive: it runs their inline PTX, and keeps at which blocks' barriers they do.

    Where no operand differs between threads, they are those of one warp.
    """

    int32 = np.int32

    def __init__(self) -> None:
        self.told: list[Counter[int]] = []

    @staticmethod
    def BlockedLayout(*_: Any) -> None:  # noqa: D102, N802
        return None

    @staticmethod
    def arange(first: int, end: int, layout: None) -> Any:  # noqa: D102, ARG004
        return np.arange(first, end, dtype=np.int32).view(Numbers)

    @staticmethod
    def to_tensor(value: Any) -> Any:  # noqa: D102
        return np.array(value).view(Numbers)

    def inline_asm(self, text: Any, constraints: str, operands: list[Any], *_: Any, **_named: Any) -> Any:  # noqa: D102
        results = constraints.count("=")
        lanes = np.arange(max(32, *map(np.size, operands))) % 32
        known = {f"${number}": each for number, each in enumerate(operands, results)} | {"%laneid": lanes}
        for instruction in text.value.strip("{} ;").split(";"):
            first, *words = re.findall(r"[^\s,\[\]]+", instruction)
            if first.startswith("@"):
                operation, _, place = words
                assert operation.startswith("mbarrier.arrive.shared::")
                places = np.broadcast_to(known[place], lanes.shape)[known[first[1:]] != 0]
                assert (places % WINDOW == BARRIER).all()
                self.told.append(Counter((places // WINDOW).tolist()))
            elif first != ".reg":
                to, *inputs = words
                known[to] = OF_LANES[first](*(known[each] if each in known else int(each) for each in inputs))
        return known["$0"] if results else None


@dataclass(frozen=True)
class Arrivals:
    """Of a block in a cluster: how often it arrives at others' barriers, and who they are.

    Attributes:
        released, held: as a consumer, if it is to release a stage and if not.
        told: as a producer.
        alone: as a consumer of a block without a cluster, which knows its own shared memory as that of number 0.
    """

    released: Counter[int]
    held: Counter[int]
    told: Counter[int]
    alone: Counter[int]
    peers: frozenset[int]


def arrivals_of(down: int, across: int, once: bool) -> list[Arrivals]:  # noqa: FBT001
    """What the sources say of every block of a cluster, in the order of their numbers."""
    from aotmm.kernels.hopper import cluster

    constants = {name: getattr(cluster, name).value for name in ("THREADS", "WARPS", "PRODUCERS")}
    lanes = Lanes()
    found = []
    with patch.multiple(cluster, gl=lanes, window=cluster.window.fn, **constants):
        for number in range(down * across):
            at_n, at_m = divmod(number, down)
            of_x, of_y = cluster.sharing.fn(down, across, at_m, at_n)
            this = SimpleNamespace(of_x=np.int32(of_x), of_y=np.int32(of_y), CLUSTERED=True)
            alone = SimpleNamespace(of_x=np.int32(1), of_y=np.int32(1), CLUSTERED=False)
            cluster.arrive.fn(BARRIER, this, pred=True, ONCE=once)
            cluster.arrive.fn(BARRIER, this, pred=False, ONCE=once)
            cluster.arrive_elsewhere.fn(BARRIER, this)
            cluster.arrive.fn(BARRIER, alone, pred=True, ONCE=once)
            peers = frozenset(i for i in range(32) if (of_x | of_y) >> i & 1)
            released, held, told, own = lanes.told
            found.append(Arrivals(released, held, told, own, peers))
            lanes.told.clear()
    return found


@pytest.mark.parametrize(("down", "across"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_arrivals_at_peers(down: int, across: int) -> None:
    """A warpgroup arrives at each peer's barrier once, or with all four warps; a producer does at all but its own.

    A consumer that has nothing to release arrives nowhere, and one without a cluster at its own barrier alone.
    """
    for once in (True, False):
        times = 1 if once else 4
        for number, block in enumerate(in_worker(arrivals_of, down, across, once)):
            assert block.released == dict.fromkeys(block.peers, times)
            assert block.held == {}
            assert block.told == dict.fromkeys(block.peers - {number}, 1)
            assert block.alone == {0: times}


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize(("down", "across"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_blocks_load_in_turns(down: int, across: int, swapped: bool) -> None:  # noqa: FBT001
    """At each step one of the blocks with the same rows of X loads them for all, and one likewise of Y; all take turns.

    What they arrive at is expected: a block has as many peers as there are blocks that share something with it.
    """
    found = in_worker(shares, down, across, swapped)
    for side, turns in (("x", "loads_x"), ("y", "loads_y")):
        alike = {getattr(share, side) for share in found}
        assert sorted(number for blocks in alike for number in blocks) == list(range(down * across))
        assert {len(blocks) for blocks in alike} == {across if side == "x" else down}
        for blocks in alike:
            loading = [[number for number in blocks if getattr(found[number], turns)[step]] for step in range(8)]
            assert {len(each) for each in loading} == {1}
            assert {number for each in loading for number in each} == blocks
    for number, share in enumerate(found):
        assert number in share.x & share.y
        assert share.peers == len(share.x | share.y)


def test_the_guard_sees_the_trap() -> None:
    """A loop that hands back the stage with which its tile began is found, as is one that carries no phase."""
    lines = partitions(compiled(variant("cooperative-2")).ttgir)[0]
    (loop,) = (found for found in loops(lines) if passes_stages(found))
    (barrier,) = arrivals(loop.body)
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
