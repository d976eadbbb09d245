"""Specialisation of the kernels for Hopper: tiles, boxes of tensor maps, and guards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from aotmm.kernels import (
    BLOCK_SCALE_TYPES,
    GROUP_LINES,
    LINE_BYTES,
    MOST_COLUMNS,
    PLANE_BUFFERS,
    PLANES,
    VECTOR_BYTES,
    WARPGROUP,
    WORKSPACE_TYPES,
    Descriptor,
    Specialisation,
    Variant,
    block_guards,
)
from aotmm.kernels.epilogue import adds_matrix, epilogue_types
from aotmm.pack.schema import Guard
from aotmm.problem import BLOCK_SCALE_K, DTYPES

# Registers per thread of consumers and of producers, by consumer warpgroups and by the burden of producers (`_burden`):
# with fewer some spill. Together they have at most what the block starts with: 64 K of a multiprocessor, or 168 for
# each of 384 threads. The first consumer has what the others leave, so one alone needs no number.
REGISTERS = {
    1: ((0, 24), (0, 56), (0, 88), (0, 88)),
    2: ((232, 24), (232, 40), (224, 56), (208, 88)),
    3: ((160, 24), (160, 32), (160, 32), (152, 56)),
}
PAIR = 2  # widths side by side
LEAST_WIDTH = 16  # columns of a wgmma here: one 32-byte swizzle
MOST_TRANSPOSED = 2  # bytes of an element that a wgmma reads in any order from shared memory
BARRIER_BYTES = 512  # more than all barriers take
# Every fence between threads' writes to shared memory and reads of TMA or wgmma there stands in the source. So does
# every barrier between threads that share memory (add_membar), but for those of scales beside other factors, in
# searches for groups, and in the arrivals of those that write planes of Y. No layout is left to the compiler, and the
# optimisations find nothing.
UNNEEDED = (
    "add_proxy_fence_insertion", "add_infer_coalesced_encodings", "add_resolve_auto_encodings", "add_tma_lowering",
    "add_sccp", "add_loop_aware_cse", "add_combine_tensor_select_and_if", "add_symbol_dce", "add_nvvm_to_llvm",
)  # fmt: skip


def specialise(function: Any, variant: Variant, *, parts: int, swapped: bool = False) -> Specialisation:
    """Return a kernel of these families for `variant`.

    Its guards are the needs of tensor maps: one unit stride, 16-byte rows; and a K of at least one step for each slice,
    because the first product of a tile sets its sums. Only kernels of fp8 have scales, by a guard. If the variant is
    not `aligned`, threads store C, whose rows may lie anywhere.

    Args:
        function: the jit function.
        parts: consumer warpgroups that work on one tile.
        swapped: whether X is B^T.
    """
    config = variant.config
    block = config.block_m // config.cluster_m, config.block_n // config.cluster_n
    rows, columns = block[::-1] if swapped else block
    partial, grouped = variant.role == "partial", variant.role == "grouped_m"
    shifted = variant.role in ("product", "partial") and not variant.block_scales
    fp8 = variant.dtype_a.startswith("fp8")
    scaled = fp8 and not partial and not variant.block_scales
    x, y = (_operand(variant, name) for name in ("ba" if swapped else "ab"))
    part, depth = rows // parts, config.block_k // config.cluster_k
    cols = 1 << (columns.bit_length() - 1)
    cols1 = columns - cols
    line = depth * DTYPES[variant.dtype_a].bytes
    split = variant.dtype_a == "fp32"
    turned = variant.dtype_a == "tf32" and "K" not in (x["inner"], y["inner"])
    in_registers = split or (DTYPES[variant.dtype_a].bytes > MOST_TRANSPOSED and x["inner"] != "K")
    one = part in (64, 128) and columns <= MOST_COLUMNS and line == LINE_BYTES and not in_registers
    along_k = y["inner"] == "K"
    boxes, wide = _boxes(columns, y, swapped=swapped) if one else (0, 0)
    loaded = boxes * wide or columns
    in_turns = variant.epilogue == "full" and not swapped and not cols1
    narrow = DTYPES[variant.dtype_c].bytes <= MOST_TRANSPOSED
    whole = cols if swapped and narrow and not cols1 else cols // 4 if in_turns else 0
    width = whole or _width(variant, rows, loaded, part, cols, cols1, swapped=swapped)
    tail = _least_power(columns % width) or width
    descriptors = {"x_desc": _described(x, part, depth)}
    if boxes:
        # the compiler gets the least box, the unit of the layout of shared memory; along K one transfer takes all
        descriptors["y_desc"] = dataclasses.replace(_described(y, wide, depth), outer=columns if along_k else 0)
        cols, cols1 = 2 * cols, 0
    else:
        descriptors["y_desc"] = _described(y, cols, depth)
    if cols1:
        descriptors["y1_desc"] = _described(y, cols1, depth)
    registers = REGISTERS[config.num_warps // WARPGROUP][_burden(variant, pair=cols1 > 0)]
    # as many columns of C as a line of X has room for
    bias = min(cols, cols1 or cols, min(line, LINE_BYTES) // DTYPES[variant.dtype_c].bytes)
    if not partial:
        descriptors["c_desc"] = _result(variant, (width, part) if swapped else (part, width))
        if tail < width:
            descriptors["c1_desc"] = _result(variant, (tail, part) if swapped else (part, tail))
    constants: dict[str, Any] = {
        "CLUSTERED": variant.num_ctas > 1,
        **_maps(function, descriptors, clustered=variant.num_ctas > 1),
        "PARTS": parts,
        "ROWS": rows,
        "COLUMNS": columns,
        "COLS": cols,
        "COLS1": cols1,
        "WIDTH": width,
        "TAIL": tail,
        "BOXES": boxes or 1,
        "BIAS": bias,
        "IN_TURNS": in_turns,
        "BLOCK_K": depth,
        "STAGES": config.num_stages,
        "X_K_MAJOR": x["inner"] == "K",
        "Y_K_MAJOR": along_k,
        "X_IN_REGISTERS": in_registers,
        **({} if shifted else {"k_shift": 0}),
        "SWAPPED": swapped,
        "GROUPED": grouped,
        "GROUPED_K": variant.role == "grouped_k",
        "PARTIAL": partial,
        "PRECISE": fp8 and not variant.fast_accum,
        **_groups(variant, part, columns, swapped=swapped),
        "SCALED": scaled,
        "EPILOGUE": variant.epilogue,
        "SLICES": config.cluster_k,
        "SERIAL": config.serial_k,
        "ANY_C": not variant.aligned,
        "Y_PLANES": PLANES if split else int(turned),
        "PRODUCER": registers[1],
        "CONSUMER": registers[0],
    }
    c = DTYPES[variant.dtype_c]
    types = {
        **dict.fromkeys(("M", "N", "K", "batch", "group_m"), "i32"),
        **dict.fromkeys(("stride_az", "stride_bz", "stride_bias_z"), "i64"),
        **WORKSPACE_TYPES,
        **({"workspace_ptr": f"*{c.triton}"} if partial else {}),
        **epilogue_types(c),
        **({"c_ptr": f"*{c.triton}", "stride_cm": "i64"} if grouped or not variant.aligned else {}),
        **({"group_rows": "i32"} if grouped else {"stride_cz": "i64"} if not variant.aligned else {}),
        **({"k_shift": "i32"} if shifted else {}),
        **({"stride_scale_bz": "i64"} if grouped and scaled else {}),
        **({"offsets_ptr": "*i32"} if variant.role.startswith("grouped") else {}),
        **(BLOCK_SCALE_TYPES if variant.block_scales else {}),
    }
    vector = VECTOR_BYTES // c.bytes
    multiples = {"c_ptr": VECTOR_BYTES, "stride_cm": vector, "N": vector} if grouped else {}  # for stores of threads
    guards = _guards(variant, descriptors.values(), depth, vector)
    if adds_matrix(variant.epilogue):  # of any alignment (`Epilogue.boxed`)
        descriptors["bias_desc"] = _bias(variant, (bias, part) if swapped else (part, bias))
    return Specialisation(
        function,
        types,
        constants | {name: None for name in function.arg_names if name not in {*types, *constants, *descriptors}},
        multiples,
        guards=guards,
        vector_bytes=VECTOR_BYTES,
        promoted=depth if constants["PRECISE"] or split else 0,
        rounded="load" if variant.dtype_a == "tf32" else "",
        descriptors=descriptors,
        persistent=config.cluster_k == 1,
        pdl=True,
        unneeded=UNNEEDED + ("add_membar",) * (not grouped and (not scaled or not adds_matrix(variant.epilogue))),
    )


def _burden(variant: Variant, *, pair: bool) -> int:
    """Return how much the producers of `variant` keep beside the facts of a tile: 0 to 3.

    In clusters these are masks, and also a third operand, if Y is a `pair` of them, or the slice of K of partial sums.
    Addresses of block scales are most: they count as 1 without clusters, and as 3 in them.
    """
    clustered = variant.num_ctas > 1
    if variant.block_scales:
        return 3 if clustered else 1
    return clustered + (clustered and (pair or variant.role == "partial"))


def _guards(variant: Variant, maps: Iterable[Descriptor], depth: int, vector: int) -> tuple[Guard, ...]:
    """Return the guards of a kernel with these maps, that of a residual left out.

    Args:
        depth: elements of K that a block multiplies in a step.
        vector: elements of C in 16 bytes.
    """
    config, product = variant.config, variant.role != "partial"
    guards = [Guard("K", "at_least", 1 + depth * (config.cluster_k * config.serial_k - 1)), *block_guards(variant)]
    if variant.fast_accum:
        guards.append(Guard("fast_accum", "equals", 1))
    if product and (variant.block_scales or not variant.dtype_a.startswith("fp8")):
        guards += [Guard("scale_a_ptr", "equals", 0), Guard("scale_b_ptr", "equals", 0)]
    for row in {each.value: each for each in maps if not each.guards}.values():
        guards += _described_guards(row)
    if not variant.aligned:
        guards.append(Guard("stride_cn", "equals", 1))
    elif product:
        # measured on an H200: a TMA store fills the last 16 bytes of a row with zeros past its end
        guards.append(Guard("c_span", "multiple_of", vector))
    return tuple(guards)


def _groups(variant: Variant, part: int, columns: int, *, swapped: bool) -> dict[str, int]:
    """Return the rows of X in a slab of `part`, and the columns of Y in a tile of `columns`, that share a block scale.

    Slabs and tiles begin at multiples of their size. Without block scales both are 0.
    """
    if not variant.block_scales:
        return {"X_GROUP": 0, "Y_GROUP": 0}
    wide = 1 if variant.block_scales == "any" else BLOCK_SCALE_K  # columns of B
    of_b = math.gcd(wide, part if swapped else columns)
    return {"X_GROUP": of_b if swapped else 1, "Y_GROUP": 1 if swapped else of_b}


def _maps(function: Any, descriptors: dict[str, Descriptor], *, clustered: bool) -> dict[str, str]:
    """Return the names in PTX of the tensor maps of X and Y, which `load_for_all` writes out; "" without clusters.

    A descriptor is passed as seven parameters (`build.parameters`), the first of which is its tensor map. Those of X
    and Y are the kernel's first.
    """
    maps = dict.fromkeys(("X_MAP", "Y_MAP", "Y1_MAP"), "")
    for i, name in enumerate(maps):
        if clustered and f"{name[:-4].lower()}_desc" in descriptors:
            maps[name] = f"{function.__name__}_param_{7 * i}"
    return maps


def _operand(variant: Variant, name: str) -> dict[str, str]:
    """Return the layout of A or B in memory: the dimensions `inner` and `outer`, and their strides."""
    size, along = ("M", "am") if name == "a" else ("N", "bn")
    across = "ak" if name == "a" else "bk"
    k_major = variant.layout["ab".index(name)] == ("n" if name == "a" else "t")
    inner, outer = (("K", across), (size, along)) if k_major else ((size, along), ("K", across))
    return {
        "value": f"{name}_ptr",
        "dtype": variant.dtype_a if name == "a" else variant.dtype_b,
        "inner": inner[0],
        "outer": outer[0],
        "batch_stride": f"stride_{name}z",
        "unit": f"stride_{inner[1]}",
        "stride": f"stride_{outer[1]}",
    }


def _described(operand_: dict[str, str], along: int, block_k: int) -> Descriptor:
    """Return the descriptor of boxes of `along` rows of X, or columns of Y, and block_k of K."""
    k_major = operand_["inner"] == "K"
    return Descriptor(
        value=operand_["value"],
        dtype=operand_["dtype"],
        sizes=("batch", operand_["outer"], operand_["inner"]),
        strides=(operand_["batch_stride"], operand_["stride"], operand_["unit"]),
        box=(along, block_k) if k_major else (block_k, along),
        fits=k_major,
    )


def _described_guards(row: Descriptor) -> list[Guard]:
    """Return the guards that TMA needs for a matrix."""
    return [
        Guard(row.strides[2], "equals", 1),
        Guard(row.strides[1], "multiple_of", VECTOR_BYTES // DTYPES[row.dtype].bytes),
        Guard(row.strides[1], "at_least", 1),
        Guard(row.strides[0], "multiple_of", VECTOR_BYTES // DTYPES[row.dtype].bytes),
        Guard(row.value, "multiple_of", VECTOR_BYTES),
    ]


def _result(variant: Variant, box: tuple[int, int]) -> Descriptor:
    sizes, strides = ("batch", "M", "N"), ("stride_cz", "stride_cm", "stride_cn")
    never = () if variant.aligned else (Guard("zero", "equals", 1),)  # threads store C: only its boxes are used
    return Descriptor("c_ptr", variant.dtype_c, sizes, strides, box, guards=never)


def _bias(variant: Variant, box: tuple[int, int]) -> Descriptor:
    vector = VECTOR_BYTES // DTYPES[variant.dtype_c].bytes
    boxed = (  # a matrix that TMA can copy; the kernel checks the same (`Epilogue.boxed`)
        Guard("bias_rank", "equals", 2),
        Guard("stride_bias_n", "equals", 1),
        Guard("bias_ptr", "multiple_of", VECTOR_BYTES),
        Guard("stride_bias_m", "multiple_of", vector),
        Guard("stride_bias_z", "multiple_of", vector),
    )
    sizes, strides = ("batch", "M", "N"), ("stride_bias_z", "stride_bias_m", "stride_bias_n")
    return Descriptor("bias_ptr", variant.dtype_c, sizes, strides, box, guards=boxed)


def _least_power(number: int) -> int:
    """Return the largest power of two that divides `number`; 0 for 0."""
    return number & -number


def _boxes(columns: int, y: dict[str, str], *, swapped: bool) -> tuple[int, int]:
    """Return how many boxes a stage of Y has, and the columns of each, if one instruction has a width of no tensor.

    Else both are 0: for a power of two, and for a sum of two across K unless swapped, which is two instructions. Across
    K boxes are a line wide, and the last one may reach past the tile.
    """
    along_k = y["inner"] == "K"
    if columns.bit_count() == 1 or (columns.bit_count() == PAIR and not along_k and not swapped):
        return 0, 0
    wide = GROUP_LINES if along_k else LINE_BYTES // DTYPES[y["dtype"]].bytes
    return -(-columns // wide), wide


def _width(variant: Variant, rows: int, loaded: int, part: int, cols: int, cols1: int, *, swapped: bool) -> int:
    """Return the columns of one store: the most that fit in shared memory, at most a row without conflicts.

    If these are all columns of a tile, one store of threads has the columns of two such rows (`epilogue.store`).

    Every consumer has room of its own for `part` rows of them, beside the ring, whose stages have `rows` of X and
    `loaded` columns of Y, and the factors of the epilogue.
    """
    config, c, element = variant.config, DTYPES[variant.dtype_c], DTYPES[variant.dtype_a].bytes
    consumers = config.num_warps // WARPGROUP
    taken = config.num_stages * (rows + loaded) * config.block_k // config.cluster_k * element + BARRIER_BYTES
    if variant.dtype_a == "fp32":
        taken += PLANE_BUFFERS * PLANES * loaded * config.block_k // config.cluster_k * DTYPES["bf16"].bytes
    elif variant.dtype_a == "tf32" and variant.layout == "tn":
        taken += PLANE_BUFFERS * loaded * config.block_k * element
    taken += (config.cluster_k - 1) * 4 * part * (cols + cols1)
    wide = cols * (2 if cols1 else 1)
    if variant.dtype_a.startswith("fp8") or adds_matrix(variant.epilogue):
        taken += consumers * 4 * (part + 2 * wide)
    elif variant.epilogue == "bias":
        taken += consumers * 4 * (part if swapped else wide)
    if variant.block_scales:
        taken += config.num_stages * 4 * (rows + cols)
    width = min(cols, LINE_BYTES // c.bytes)
    if not (variant.aligned or swapped or cols1) and cols * c.bytes == 2 * LINE_BYTES:
        width = cols
    while width > LEAST_WIDTH:
        tail = _least_power((cols + cols1) % width)
        stored = width + tail
        if taken + consumers * part * stored * c.bytes <= variant.target.shared_bytes:
            break
        width //= 2
    return width
