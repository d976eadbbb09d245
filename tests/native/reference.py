"""Selection a second time: the text of launcher.h and docs/format.md in Python, to compare the C code with.

Quantities are dicts in which None stands for the stride of a dimension of size 1: it multiplies only 0, and whatever
is guarded of it being equal to or at least something holds. The formula is in floats, operation by operation as it is
written there, so that its times are the launcher's to the last bit. The network is in doubles.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from aotmm.kernels import WARP_SPECIALISED
from aotmm.pack.schema import Kernel, occupancy
from aotmm.pack.table import Model, Sample, Table
from aotmm.pack.time_model import (
    HIDDEN,
    KERNEL_INPUTS,
    PDL_INPUTS,
    PLAN_INPUTS,
    PROBLEM_INPUTS,
    Constants,
    Network,
    Nominal,
    constants,
    kernel_inputs,
    nominal,
)
from aotmm.problem import ACTIVATIONS, DTYPES, EPILOGUES, GROUPS, LAYOUTS, SPLITS
from aotmm.runtime.launcher import Plan, Problem
from aotmm.runtime.tuning import CDevice
from aotmm.target import HIDDEN_FACTS, HiddenFacts, Target

MAX_GRID = 2**31 - 1
MOST_JOINED = 1 << 30  # rows of matrices that are copied as one matrix, and elements of rows that are copied as one row
MOST_IDLE, IDLE_PART = 1 << 19, 4  # elements of threads beyond the ends of rows, and their part of all
MAX_WORKSPACE = 2**40
PDL_NS = 50_000
FULL_PDL_NS = 12_000  # of a launch that leaves no room for the next one
Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32
ONE = F32(1)
SPLIT_A, SPLIT_B = F32(0.9), F32(1.2)  # that loads take longer if all lines of A or of B begin within a cache line
SUM_BYTES = F32(5.6)  # in bytes of memory, of an element of partial sums
LINE, SECTOR = 128, 32  # bytes of a cache line, and of its parts
TALL = 64  # rows of a tile, above which half of them have to be of C
# Plans by the formula that the network sees, so many at once, and what stops it.
SHORTLIST, AT_ONCE, LEAST_CORRECTION = 14, 2, F32(0.85)
# Of a copy of an operand that begins within a cache line: its most bytes, and parts of the time, taken and gained.
LINE_COPY, LINE_PART, LINE_GAIN = 8 << 20, 8, 20
SHIFTED_K = 1024  # the least K before which steps may begin
MIN_STEPS = 2  # of a slice
LEAVE_NONE_OVER = 2  # blocks of a cluster, up to which every multiprocessor has one
MOST_WAVES = 2  # of slices
USUAL_SPLIT, LONG_STEPS, LONGEST_K = 16, 16, 2**27  # more slices than the usual ones have more steps, and not any K
SEEN_ADDRESS = 256  # where a workspace is taken to be
PANEL = 128  # panels have a multiple of so many rows and columns, or all

Values = dict[str, int | None]

KEEPS: dict[str, Callable[[int, int], bool]] = {
    "equals": lambda value, operand: value == operand,
    "multiple_of": lambda value, operand: value % operand == 0,
    "below": lambda value, operand: value < operand,
    "at_least": lambda value, operand: value >= operand,
}


@dataclass(frozen=True, slots=True)
class Operand:
    """Names of the quantities of A, B or C."""

    pointer: str
    rows: str
    cols: str
    row_stride: str
    col_stride: str
    batch_stride: str
    extent: str
    reach: str


OPERANDS = (
    Operand("a_ptr", "M", "K", "stride_am", "stride_ak", "stride_az", "a_extent", "a_reach"),
    Operand("b_ptr", "K", "N", "stride_bk", "stride_bn", "stride_bz", "b_extent", "b_reach"),
    Operand("c_ptr", "M", "N", "stride_cm", "stride_cn", "stride_cz", "c_extent", "c_reach"),
)
A, B, C = range(3)


# ------------------------------------------------------------------------------------------------------ quantities
def quantities(problem: Problem) -> Values:
    """What guards are about and parameters hold."""
    p, sizes = problem, {"M": problem.M, "N": problem.N, "K": problem.K, "batch": problem.batch}
    found: Values = {
        name: int(getattr(p, name)) for name in ("a_ptr", "b_ptr", "c_ptr", "bias_ptr", "scale_a_ptr", "scale_b_ptr")
    }
    found |= sizes | {"allow_tf32": int(p.allow_tf32), "fast_accum": int(p.fast_accum), "zero": 0}
    found["activation"] = list(ACTIVATIONS).index(p.activation)
    (found["slope"],) = struct.unpack("<I", struct.pack("<f", p.slope))
    found |= dict(zip(("stride_scale_a", "stride_scale_b"), p.scale_strides, strict=True))
    found["stride_bias_z"] = p.bias_strides[0]
    for names, dimensions, strides in (
        (("stride_am", "stride_ak"), "MK", p.strides_a),
        (("stride_bk", "stride_bn"), "KN", p.strides_b),
        (("stride_cm", "stride_cn"), "MN", p.strides_c),
        (("stride_bias_m", "stride_bias_n"), "MN", p.bias_strides[1:]),
        (("stride_az", "stride_bz", "stride_cz"), ("batch",) * 3, p.batch_strides),
    ):
        for name, dimension, stride in zip(names, dimensions, strides, strict=True):
            found[name] = None if sizes[dimension] == 1 else stride
    found["bias_rank"] = (2 if found["stride_bias_m"] else 1) if p.bias_ptr else 0
    found |= {"workspace_ptr": 0, "workspace_stride_m": 0, "workspace_stride_z": 0, "split": 1, "global_scratch": 0}
    found["c_span"] = p.N
    own = ("block_scale_a_ptr", "block_scale_b_ptr", "block_columns", "stride_scale_bz", "group_rows", "expected_rows")
    found |= {name: getattr(p, name) for name in own}
    found |= dict(zip(("stride_block_az", "stride_block_am", "stride_block_ak"), p.block_strides_a, strict=True))
    found |= dict(zip(("stride_block_bz", "stride_block_bk", "stride_block_bn"), p.block_strides_b, strict=True))
    return with_shift(with_extents(found), p)


def with_shift(values: Values, p: Problem) -> Values:
    """The same with the elements before K at which steps begin, if both operands lie along K and begin within lines."""
    offsets = []
    for number, along, across in ((A, "stride_ak", "stride_am"), (B, "stride_bk", "stride_bn")):
        width = DTYPES[p.dtype_b if number else p.dtype_a].bytes
        by_rows = values[OPERANDS[number].col_stride] in (1, None)
        gaps = [(values[name] or 0) * width for name in (across, f"stride_{'ab'[number]}z")]
        if by_rows == (number == A) and values[along] in (1, None) and not any(gap % LINE for gap in gaps):
            offsets.append(sized(values, OPERANDS[number].pointer) % LINE)
    shift = 0
    if len(offsets) == len("AB") and all(offsets) and not any(each % 16 for each in offsets) and p.K >= SHIFTED_K:
        same = offsets[0] % SECTOR == offsets[1] % SECTOR
        larger = int(sized(values, "N") >= sized(values, "M"))
        shift = offsets[larger] if same else next((each for each in offsets if each % SECTOR == 0), 0)
    whole = p.batch_invariant or p.grouped != "none" or p.block_scale_a_ptr
    return values | {"k_shift": 0 if whole else shift // DTYPES[p.dtype_a].bytes}


def with_extents(values: Values) -> Values:
    """The same with what follows from sizes and strides."""
    found = dict(values)
    for operand in OPERANDS:
        rows, cols = sized(values, operand.rows), sized(values, operand.cols)
        strides = (values[operand.row_stride], values[operand.col_stride])
        last = sum((size - 1) * (stride or 0) for size, stride in zip((rows, cols), strides, strict=True))
        found[operand.extent] = min(last, 2**63 - 1) if rows and cols else 0
        others = (sized(values, "batch") - 1) * (values[operand.batch_stride] or 0)
        found[operand.reach] = min(others + sized(found, operand.extent), 2**63 - 1)
    return found


def sized(values: Values, name: str) -> int:
    """A quantity that is never None."""
    value = values[name]
    assert value is not None
    return value


def keeps_guards(kernel: Kernel, values: Values) -> bool:
    """Whether every guard of `kernel` holds."""
    for guard in kernel.guards:
        value = values[guard.value]
        if value is None:
            value = guard.operand if guard.relation in ("equals", "at_least") else 0
        if not KEEPS[guard.relation](value, guard.operand):
            return False
    return True


def epilogue_of(problem: Problem) -> int:
    """The least epilogue that `problem` needs, by number."""
    added = "none" if not problem.bias_ptr else "bias_relu" if problem.bias_strides[1] else "bias"
    return max(EPILOGUES.index(ACTIVATIONS[problem.activation]), EPILOGUES.index(added))


def same_types(kernel: Kernel, problem: Problem) -> bool:
    """Whether plans for `problem` may have `kernel` in their middle, by types and epilogue."""
    inputs = (DTYPES[kernel.dtype_a].storage, DTYPES[kernel.dtype_b].storage) == (problem.dtype_a, problem.dtype_b)
    if kernel.role != "product":
        return inputs and kernel.role == "partial" and (kernel.dtype_c == "int32") == (problem.dtype_c == "int32")
    return inputs and kernel.dtype_c == problem.dtype_c and EPILOGUES.index(kernel.epilogue) >= epilogue_of(problem)


def guarded(kernel: Kernel) -> set[tuple[str, str]]:
    """The quantities and relations of the kernel's guards."""
    return {(guard.value, guard.relation) for guard in kernel.guards}


def slices_of(columns: int, K: int, serial: bool) -> tuple[int, int]:  # noqa: FBT001
    """The slices of K under `batch_invariant`, and the longest step whose multiples they are.

    K is sliced where it is large and at least 16 times the columns. Kernels that add slices one after another do it for
    up to 1536 columns, a multiple of 8, and a K of twice as many at least.
    """
    large = 16 * columns <= K
    for split, least in ((8, 16384), (4, 4096)):
        if large and least <= K and not K % (128 * split):
            return split, 128
    steps = [step for step in (128, 64) if not K % (4 * step)]
    if serial and steps and max(2048, 2 * columns) <= K and columns <= 1536 and not columns % 8:
        return 4, steps[0]
    return 1, 0


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def tiles(kernel: Kernel, rows: int, cols: int) -> int:
    """Tiles of a matrix. Those of one row go over the ends of rows."""
    if kernel.config.block_m == 1:
        return ceil_div(rows * cols, kernel.config.block_n)
    return ceil_div(rows, kernel.config.block_m) * ceil_div(cols, kernel.config.block_n)


# ---------------------------------------------------------------------------------------------------------- copies
@dataclass(frozen=True, slots=True)
class Place:
    """Where a matrix lies in the workspace: lines of `length` contiguous elements, `pitch` apart."""

    transposed: bool
    lines: int
    length: int
    pitch: int
    bytes: int


def lies_well(values: Values, number: int, element_bytes: int) -> bool:
    """Whether fast kernels take an operand as it is."""
    operand = OPERANDS[number]

    def contiguous(along: str, across: str) -> bool:
        unit, stride = values[along], values[across]
        return unit in (1, None) and (stride is None or (stride > 0 and stride * element_bytes % 16 == 0))

    rows = contiguous(operand.col_stride, operand.row_stride)
    cols = contiguous(operand.row_stride, operand.col_stride)
    if number == C and sized(values, "c_span") * element_bytes % 16:
        return False
    turned = {A: cols and element_bytes > 1, B: cols, C: False}[number]
    straight = {A: rows, B: rows and element_bytes > 1, C: rows}[number]
    begins = sized(values, operand.pointer), (values[operand.batch_stride] or 0) * element_bytes
    return all(begin % 16 == 0 for begin in begins) and (straight or turned)


def matrices(values: Values, number: int) -> int:
    """How many matrices an operand has: one if the products of a batch share it."""
    return sized(values, "batch") if values[OPERANDS[number].batch_stride] else 1


def worth_along_m(values: Values, element_bytes: int, *, threads_multiply: bool) -> bool:
    """Whether A and B are of fp32 in full precision, both along K, and threads multiply: then A may lie along M.

    A copy that A needs lies along K.
    """
    if not threads_multiply or element_bytes != 4 or values["allow_tf32"] or not lies_well(values, A, element_bytes):
        return False
    units = {name: values[name] in (1, None) for name in ("stride_am", "stride_ak", "stride_bk", "stride_bn")}
    return units == {"stride_am": False, "stride_ak": True, "stride_bk": True, "stride_bn": False}


def has_rows(values: Values) -> bool:
    """Whether operands of the epilogue have rows."""
    return values["bias_rank"] == 2 or bool(values["scale_a_ptr"] and values["stride_scale_a"])


def place(values: Values, number: int, element_bytes: int, *, threads_multiply: bool) -> Place:
    """Where a copy of an operand lies."""
    operand = OPERANDS[number]
    rows, cols = values[operand.col_stride] in (1, None), values[operand.row_stride] in (1, None)
    along_k = element_bytes == 1 or is_tf32(values, element_bytes)
    across = worth_along_m(values, element_bytes, threads_multiply=threads_multiply)
    across |= not along_k and cols and not rows
    transposed = {A: across, B: along_k or not rows, C: False}[number]
    sizes = sized(values, operand.rows), sized(values, operand.cols)
    lines, length = sizes[::-1] if transposed else sizes
    pitch = ceil_div(length * element_bytes, 128) * 128 // element_bytes
    size = matrices(values, number) * lines * pitch * element_bytes
    return Place(transposed, lines, length, pitch, ceil_div(size, 256) * 256)


def all_places(
    values: Values, widths: Sequence[int], chosen: Iterable[int], *, threads_multiply: bool
) -> dict[int, Place]:
    """Where all copies of a plan lie. C's has whole vectors of rows beside an A that is turned for its own sake."""
    found = {number: place(values, number, widths[number], threads_multiply=threads_multiply) for number in chosen}
    turned = A in found and worth_along_m(values, widths[A], threads_multiply=threads_multiply)
    if turned and C in found and widths[C] == 4 and not has_rows(values):
        lines = ceil_div(found[C].lines, 4) * 4
        size = matrices(values, C) * lines * found[C].pitch * 4
        found[C] = replace(found[C], lines=lines, bytes=ceil_div(size, 256) * 256)
    return found


def with_copies(values: Values, places: dict[int, Place], address: int) -> Values:
    """The problem with the operands of `places` in a workspace."""
    found = dict(values)
    if {A, C} <= places.keys() and places[A].transposed:
        found["M"] = places[C].lines  # whole vectors, of fp32 that threads multiply
    for number, where in sorted(places.items()):
        operand = OPERANDS[number]
        strides = (operand.row_stride, operand.col_stride)
        lines, along = strides[::-1] if where.transposed else strides
        found[operand.pointer] = address
        found[lines] = None if values[lines] is None else where.pitch
        found[along] = None if values[along] is None else 1
        if matrices(values, number) > 1:
            found[operand.batch_stride] = where.lines * where.pitch
        if number == C:
            found["c_span"] = where.pitch
        address += where.bytes
    return with_extents(found)


def copy_values(values: Values, moved: Values, number: int, where: Place) -> Values:
    """What the copy of an operand into the workspace, or of C out of it, is launched with."""
    operand = OPERANDS[number]
    source, target = (moved, values) if number == C else (values, moved)
    cols_first = values["stride_cm"] in (1, None) and values["stride_cn"] not in (1, None)
    turned = cols_first if number == C else where.transposed
    sizes, strides = (operand.rows, operand.cols), (operand.row_stride, operand.col_stride)
    if turned:
        sizes, strides = sizes[::-1], strides[::-1]
    sides = {"s": (source, "source_ptr"), "d": (target, "dest_ptr")}
    found: Values = {"M": sized(values, sizes[0]), "N": sized(values, sizes[1]), "zero": 0}
    found["batch"] = matrices(values, number)
    for side, (of, pointer) in sides.items():
        found[pointer] = of[operand.pointer]
        found[f"stride_{side}z"] = of[operand.batch_stride] or 0
        for name, size, stride in zip("mn", "MN", strides, strict=True):
            found[f"stride_{side}{name}"] = None if found[size] == 1 else of[stride] or 0
    found = joined(found)
    nothing: Values = {name: None if name[:-1] in ("stride_s", "stride_d") else 0 for name in found}
    nothing |= {"stride_sz": 0, "stride_dz": 0}
    return found | {f"other_{name}": value for name, value in nothing.items() if name != "zero"}


def joined(copy: Values) -> Values:
    """A copy of matrices whose rows follow each other on both sides, as one of a single matrix."""
    batch, rows = sized(copy, "batch"), sized(copy, "M")
    if batch == 1 or batch * rows > MOST_JOINED:
        return copy
    if rows == 1 and copy["stride_sn"] == copy["stride_dn"] == 1:
        found = copy | {f"stride_{side}m": copy[f"stride_{side}z"] for side in "sd"}
    elif rows > 1 and all(copy[f"stride_{side}z"] == rows * sized(copy, f"stride_{side}m") for side in "sd"):
        found = dict(copy)
    else:
        return copy
    return found | {"M": batch * rows, "batch": 1, "stride_sz": 0, "stride_dz": 0}


def widths_of(problem: Problem) -> list[int]:
    """Bytes of an element of A, B and C."""
    return [DTYPES[name].bytes for name in (problem.dtype_a, problem.dtype_b, problem.dtype_c)]


def badly_lying(problem: Problem, values: Values) -> list[int]:
    """The operands that fast kernels do not take as they are: of two of 32 bits one has to lie along K."""
    found = [
        number
        for number, element_bytes in enumerate(widths_of(problem))
        if not lies_well(values, number, element_bytes)
    ]
    across = values["stride_ak"] not in (1, None) and values["stride_bk"] not in (1, None)
    if across and not {A, B} & set(found) and is_tf32(values, DTYPES[problem.dtype_a].bytes):
        rows, cols = problem.M * matrices(values, A), problem.N * matrices(values, B)
        found.insert(0, A if rows <= cols else B)
    return found


def is_relaxed(problem: Problem) -> bool:
    """Whether a problem allows less exact kernels."""
    return problem.allow_tf32 if problem.dtype_a == "fp32" else problem.fast_accum


def is_tf32(values: Values, element_bytes: int) -> bool:
    """Whether elements are of 32 bits and may be rounded."""
    return element_bytes == 4 and bool(values["allow_tf32"])


# ---------------------------------------------------------------------------------------------------------- panels
@dataclass(frozen=True, slots=True)
class Panels:
    """How C is cut: rows and columns of a panel, how many panels there are, and what the last ones have."""

    rows: int
    cols: int
    down: int
    across: int
    last_rows: int
    last_cols: int

    @property
    def count(self) -> int:
        """All panels."""
        return self.down * self.across


def whole(problem: Problem) -> tuple[Problem, Panels]:
    """The problem in one panel."""
    return problem, Panels(problem.M, problem.N, 1, 1, problem.M, problem.N)


def panels(
    problem: Problem, limit: int, slices: int = 0, *, threads_multiply: bool
) -> Iterator[tuple[Problem, Panels]]:
    """The ways to cut a problem, and the problem of one panel; none if all copies fit in the workspace.

    slices: of K, if their number is given and above 1; then the sums have to fit too.
    """
    p, values = problem, quantities(problem)
    if limit == 0 or p.batch != 1 or 0 in (p.M, p.N, p.K):
        return
    widths, needed = widths_of(p), badly_lying(p, values)

    def fits(rows: int, cols: int) -> bool:
        sizes = values | {"M": rows, "N": cols}
        numbers = (number for number in needed if not (slices and number == C))
        places = all_places(sizes, widths, numbers, threads_multiply=threads_multiply)
        copies = sum(where.bytes for where in places.values())
        return copies + 4 * slices * (ceil_div(rows, PANEL) * ceil_div(cols, PANEL) * PANEL**2) <= limit

    def evenly(size: int, most: int) -> int:
        return size if size <= most else ceil_div(ceil_div(size, ceil_div(size, most)), PANEL) * PANEL

    if fits(p.M, p.N) and not slices:
        return
    for most in (*itertools.takewhile(lambda cols: cols < p.N, (PANEL << i for i in itertools.count())), p.N):
        cols = evenly(p.N, most)
        numbers = range(1, ceil_div(p.M, PANEL) + 1)
        fitting = bisect.bisect_left(numbers, True, key=lambda number: not fits(min(number * PANEL, p.M), cols))  # noqa: FBT003
        if fitting:
            rows = evenly(p.M, fitting * PANEL)
            down, across = ceil_div(p.M, rows), ceil_div(p.N, cols)
            cut = Panels(rows, cols, down, across, p.M - (down - 1) * rows, p.N - (across - 1) * cols)
            yield replace(p, M=rows, N=cols), cut


def in_panels(plan: Plan, cut: Panels) -> Plan:
    """The plan for one panel as that for all."""
    if cut.count == 1:
        return plan
    return replace(plan, cost=min(plan.cost * cut.count, 2**63 - 1), panel_m=cut.rows, panel_n=cut.cols)


# ------------------------------------------------------------------------------------------------------- selection
@dataclass(frozen=True, slots=True)
class Way:
    """One way to place the operands, and what the copies take."""

    copies: int
    bytes: int
    ns: F32
    values: Values


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what its prediction is made of; a measured one has no terms."""

    plan: Plan  # cost: measured, or by the formula
    way: Way
    terms: Terms | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that is chosen, and all that it was chosen from, with and without pdl if the kernel supports it."""

    plan: Plan
    among: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """A time by the formula and its parts, without copies."""

    time: F32
    multiply: F32
    take: F32
    read: F32
    load: F32
    sums: F32
    fixed: F32
    waves: F32
    rounds: F32
    steps: F32
    rows: F32
    cols: F32
    lines_a: float
    lines_b: float


class Floats(NamedTuple):
    """Constants of a kernel as the launcher has them."""

    base_ns: F32
    ns_per_k_step: F32
    ns_per_tile: F32
    ns_per_byte: F32
    ns_per_taken_byte: F32
    ns_per_loaded_byte: F32


class WhenAsked(dict[int, Floats]):
    """The constants of kernels by number, each computed when it is asked for: one problem needs those of few."""

    def __init__(self, compute: Callable[[int], Floats]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, number: int) -> Floats:
        return self.setdefault(number, self._compute(number))


def rounded(*values: float) -> Floats:
    """Constants, which are computed in doubles."""
    return Floats(*map(F32, values))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Those of a device over those of a table's device; `own`: the table is its own."""

    table: Table | Nominal
    own: bool
    multiprocessors: float = 1.0
    clock: float = 1.0
    sustained: float = 1.0
    memory: float = 1.0

    @property
    def multiply(self) -> float:
        """Of the products of one multiprocessor."""
        return self.clock if self.sustained == 1 else self.sustained

    @property
    def distance(self) -> float:
        """How far apart the devices are."""
        compute = self.multiprocessors * self.multiply
        return max(compute, 1 / compute) * max(self.memory, 1 / self.memory)


def hidden_facts(name: str) -> HiddenFacts:
    """What is listed for the GPU of that name, or that it is a slice of."""
    return HIDDEN_FACTS.get(name.partition(" MIG ")[0], HiddenFacts())


def speeds(table: Table | Nominal, device: CDevice) -> Speeds:
    """Those of a device over those of the table's, or of the one that estimates are for."""

    def ratio(name: str) -> float:
        mine, theirs = getattr(device, name), getattr(table, name)
        return float(mine / theirs) if mine > 0 and theirs > 0 else 1.0

    name = device.name.decode()
    if name and name == table.device:
        return Speeds(table, own=True)
    sustained = hidden_facts(name).sustained / hidden_facts(table.device).sustained
    facts = ratio("multiprocessors"), ratio("clock_mhz"), sustained, ratio("memory_gbps")
    return Speeds(table, False, *facts)  # noqa: FBT003


def first_fit(kernel: Kernel, ways: list[Way], cut: Panels) -> Way | None:
    """The first way in which a kernel keeps its guards, in the last panel too; a partial has none that copies C."""
    last: Values = {"M": cut.last_rows, "N": cut.last_cols} if cut.count > 1 else {}
    for way in ways:
        kept = keeps_guards(kernel, way.values) and keeps_guards(kernel, way.values | last)
        if kept and not (kernel.role == "partial" and way.copies >> C & 1):
            return way
    return None


class Reference:
    """Selection over the kernels of one pack, with the constants, network and times of `tables`, one of each device."""

    def __init__(self, kernels: tuple[Kernel, ...], target: Target, tables: Sequence[Table]) -> None:
        self.kernels = kernels
        self.target = target
        self.tables = tuple(tables)
        self._constants: dict[object, WhenAsked] = {}
        self._hidden: dict[tuple[str, int], Array] = {}
        self._weights: dict[str, tuple[Array, ...]] = {}
        self._orders: dict[Problem, tuple[str, int, int]] = {}
        self._helpers = {
            role: [(number, kernel) for number, kernel in enumerate(kernels) if kernel.role == role]
            for role in ("reduce", "copy")
        }
        self._kinds = [(k.role, k.config_name, frozenset(k.guards), k.fast_accum) for k in kernels]
        keys = sorted({key_of(kernel) for kernel in kernels})
        self._models = {(table.device, model.key): model for table in tables for model in table.models_of(keys)}
        self._timed = {(table.device, *model.types) for table in tables for model in table.models}
        self._times_of: dict[str, dict[tuple[object, ...], dict[str, Sample]]] = {}
        # on the device of the last question, as the next ones
        self.constants = WhenAsked(lambda number: rounded(*self._fitted(self.kernels[number], None)))
        self.table: Table | None = None
        self.shapes: dict[tuple[object, ...], dict[str, Sample]] = {}
        self.order = "", 0, 0  # of the last question
        self._begins_early = any(kernel.family in WARP_SPECIALISED for kernel in kernels)
        self._threads_multiply = any(kernel.family == "fma" for kernel in kernels) and not any(map(is_split, kernels))

    def on(self, device: CDevice) -> Reference:
        """Itself, with constants and times for a device."""
        if not self.tables:
            self.constants = self._scaled(speeds(nominal(self.target), device), device)
            return self
        own = [table for table in self.tables if table.device == device.name.decode()]
        found, table = min(
            ((speeds(table, device), table) for table in own or self.tables), key=lambda pair: pair[0].distance
        )
        self.table = table
        self.constants = self._of_table(table) if found.own else self._scaled(found, device)
        self.shapes = self._measured(table) if found.own else {}
        return self

    def _measured(self, table: Table) -> dict[tuple[object, ...], dict[str, Sample]]:
        """Times by shape and config of this pack, of operands that begin at lines."""
        if table.device not in self._times_of:
            names = {kernel.config_name for kernel in self.kernels}
            shapes: dict[tuple[object, ...], dict[str, Sample]] = {}
            for shape in table.shapes:
                key = (shape.element_bytes, shape.kind, shape.layout, shape.M, shape.N, shape.K)
                splits = (1, *SPLITS)
                best = {name: each for name, each in shape.best().items() if name in names and each.split in splits}
                if best and not (shape.drawn or shape.offset_a or shape.offset_b):
                    shapes[key] = best
            self._times_of[table.device] = shapes
        return self._times_of[table.device]

    @property
    def network(self) -> Network | None:
        """That of the table."""
        return self.table.network if self.table else None

    def _of_table(self, table: Table | None) -> WhenAsked:
        key = table and table.device
        if key not in self._constants:
            self._constants[key] = WhenAsked(lambda number: rounded(*self._fitted(self.kernels[number], table)))
        return self._constants[key]

    def _fitted(self, kernel: Kernel, table: Table | None) -> Constants:
        """Constants of the data sheet, times the factors of the table for a config."""
        c = constants(kernel, self.target, table)
        if table is None or table.network is None or kernel.role in ("reduce", "copy"):
            return c
        if (table.device, *key_of(kernel)[1:]) not in self._timed:
            return c
        model = self._models.get((table.device, key_of(kernel)))
        base, tile, step, taken, loaded = model.factors if model else table.network.factors
        return Constants(
            base_ns=c.base_ns * base,
            ns_per_k_step=c.ns_per_k_step * step,
            ns_per_tile=c.ns_per_tile * tile,
            ns_per_byte=c.ns_per_byte,
            ns_per_taken_byte=c.ns_per_taken_byte * taken,
            ns_per_loaded_byte=c.ns_per_loaded_byte * loaded,
        )

    def _scaled(self, by: Speeds, device: CDevice) -> WhenAsked:
        tensor = hidden_facts(device.name.decode()).tensor_tflops
        table = by.table if isinstance(by.table, Table) else None
        key = (by.table.device, by.multiprocessors, by.clock, by.sustained, by.memory, tensor)
        if key not in self._constants:
            of_table = self._of_table(table)

            def constant(number: int) -> Floats:
                kernel = self.kernels[number]
                share = max(sharing(kernel, self.target), keeping_busy(kernel, self.target))
                return scaled(kernel, of_table[number], by, tensor / share)

            self._constants[key] = WhenAsked(constant)
        return self._constants[key]

    # ---- launches
    def grid(self, kernel: Kernel, units: int, device: CDevice) -> int | None:
        """Blocks of a launch; None if a grid cannot have so many."""
        blocks = units * kernel.num_ctas
        if blocks > MAX_GRID:
            return None
        if kernel.persistent:
            slots = occupancy(kernel, self.target) * device.multiprocessors // kernel.num_ctas
            blocks = min(units, max(slots, 1)) * kernel.num_ctas
        return None if self.target.backend == "hip" and blocks * kernel.threads >= 2**32 else blocks

    def helper(self, role: str, suits: Callable[[Kernel], bool], values: Values, device: CDevice) -> int | None:
        """Number of the reduce or copy that plans have: the plainest epilogue, then what guards most."""

        def rank(number: int) -> tuple[int, ...]:
            kernel = self.kernels[number]
            return EPILOGUES.index(kernel.epilogue), -kernel.vector_bytes, -len(kernel.guards), number

        batch = sized(values, "batch")
        fitting = [
            number
            for number, kernel in self._helpers[role]
            if suits(kernel)
            and kernel.shared_bytes <= device.shared_bytes
            and keeps_guards(kernel, values)
            and not (kernel.config.block_m == 1 and sized(values, "M") * sized(values, "N") > MOST_JOINED)
            and self.grid(kernel, batch * tiles(kernel, sized(values, "M"), sized(values, "N")), device)
        ]
        return min(fitting, key=rank, default=None)

    def copiers(self, problem: Problem, copies: dict[int, Values], device: CDevice) -> dict[int, int | None]:
        """The copy kernels of operands: over the ends of rows if threads of others had too few elements of A and B."""

        def fitting(number: int, *, over: bool) -> int | None:
            def suits(kernel: Kernel) -> bool:
                width = widths_of(problem)[number]
                return DTYPES[kernel.dtype_a].bytes == width and (kernel.config.block_m == 1) is over

            return self.helper("copy", suits, copies[number], device)

        def elements(kernel: int, number: int) -> int:
            values, config = copies[number], self.kernels[kernel].config
            count = tiles(self.kernels[kernel], sized(values, "M"), sized(values, "N"))
            return sized(values, "batch") * count * config.block_m * config.block_n

        usual = {number: fitting(number, over=False) for number in copies}
        over = {number: found for number in copies if (found := fitting(number, over=True)) is not None}
        for numbers in ((A, B), (C,)):
            chosen = [number for number in numbers if number in over]
            if any(usual[number] is None for number in chosen):
                continue
            least = sum(elements(over[number], number) for number in chosen)
            idle = sum(elements(usual[number] or 0, number) for number in chosen) - least
            if idle > MOST_IDLE and idle > least // IDLE_PART:
                usual |= {number: over[number] for number in chosen}
        return usual

    def reducer(self, problem: Problem, values: Values, device: CDevice) -> int | None:
        """The reduce kernel for a problem."""
        least = epilogue_of(problem)
        return self.helper(
            "reduce",
            lambda kernel: kernel.dtype_c == problem.dtype_c and EPILOGUES.index(kernel.epilogue) >= least,
            values,
            device,
        )

    # ---- plans
    def ways(self, problem: Problem, device: CDevice, limit: int, cut: Panels) -> Iterator[Way]:
        """How the operands may lie, without copies first."""
        values = self._shifted(quantities(problem) | {"c_span": cut.last_cols})
        yield Way(0, 0, F32(0), values)
        if limit == 0 or 0 in (problem.M, problem.N, problem.K):
            return
        widths, needed = widths_of(problem), badly_lying(problem, values)
        served = cut.across, cut.down if cut.across == 1 else 1, 1
        operands = [number for number in needed if number != C]
        choices = [operands, needed if C in needed else []]
        threads = self._threads_multiply
        if worth_along_m(values, widths[A], threads_multiply=threads):
            if problem.M % 4 == 0:
                choices += [[A, *operands], [A, *needed] if C in needed else []]
            elif widths[C] == 4 and not has_rows(values):
                choices += [[A, *operands, C]]
        for chosen in dict.fromkeys(map(tuple, choices)):
            if chosen and (way := self._way(problem, device, limit, chosen, values, served)):
                yield way

    def _shifted(self, values: Values) -> Values:
        """The same, for kernels that begin no step early if the pack has none that does."""
        return values if self._begins_early else values | {"k_shift": 0}

    def _way(
        self, problem: Problem, device: CDevice, limit: int, chosen: tuple[int, ...], values: Values,
        served: tuple[int, ...] = (1, 1, 1),
    ) -> Way | None:  # fmt: skip
        """The operands with copies of those that are chosen; None if they exceed the limit or there are no kernels."""
        widths = widths_of(problem)
        places = all_places(values, widths, chosen, threads_multiply=self._threads_multiply)
        moved = self._shifted(with_shift(with_copies(values, places, SEEN_ADDRESS), problem))
        copies = [(number, copy_values(values, moved, number, places[number])) for number in chosen]
        kernels = list(self.copiers(problem, dict(copies), device).values())
        size = sum(where.bytes for where in places.values())
        if size > limit or None in kernels:
            return None
        ns = F32(0)
        for kernel, (number, copied) in zip(kernels, copies, strict=True):
            c = self.constants[kernel or 0]
            elements = F32(sized(copied, "batch")) * F32(sized(copied, "M")) * F32(sized(copied, "N"))
            together = number == B and A in chosen and kernel == kernels[0] and set(served) == {1}
            base = F32(0) if together else c.base_ns
            ns += (base + elements * F32(2 * widths[number]) * c.ns_per_byte) / F32(served[number])
        return Way(sum(1 << number for number in chosen), size, ns, moved)

    def _lined(self, problem: Problem, device: CDevice, limit: int, choice: Choice) -> Choice:
        """The choice, or the one with a copy of A or B on whole cache lines."""
        best, p = choice.plan, problem
        if (
            self.network is None
            or limit == 0
            or best.copies
            or (p.batch, p.grouped) != (1, "none")
            or 0 in (p.M, p.N, p.K)
        ):
            return choice
        values, widths = quantities(p), widths_of(p)
        if worth_along_m(values, widths[A], threads_multiply=self._threads_multiply):
            return choice
        sizes = {
            number: place(values, number, widths[number], threads_multiply=self._threads_multiply).bytes
            for number in (B, A)
            if lies_well(values, number, widths[number]) and sized(values, OPERANDS[number].pointer) % 128
        }
        number = min(sizes, key=sizes.__getitem__, default=None)
        if number is None or sizes[number] > LINE_COPY:
            return choice
        way = self._way(p, device, limit, (number,), values)
        if way is None or way.ns > F32(best.cost) / F32(LINE_PART):
            return choice
        known = best.cost - best.cost // LINE_GAIN
        _, cut = whole(p)
        plans = self._finalists(p, self._considered(p, device, limit, cut, [way]), known)
        found = min(plans, key=self._rank, default=best)
        return Choice(found, (*choice.among, *plans)) if found.cost < known else choice

    def check(self, problem: Problem, device: CDevice, number: int, limit: int) -> Choice | str:
        """The best plan with one kernel, or the kind of reason why there is none."""
        self.on(device)
        if self.kernels[number].role in ("reduce", "copy"):
            return "no product"
        if not same_types(self.kernels[number], problem):
            return "types"
        self.order = self.order_of(problem)
        if not self._keeps_order(self.kernels[number]):
            return "order"
        found: list[tuple[Panels, list[Plan]]] = []
        reasons = []
        for part, cut in self._cuts(problem, limit):
            if found and found[0][1] and self.order[1] > 1:
                break  # panels are for want of a plan without them
            tried = self._plans(part, device, number, list(self.ways(part, device, limit, cut)), limit, cut)
            found.append((cut, self._finalists(part, [each for each in tried if isinstance(each, Planned)])))
            reasons += [each for each in tried if isinstance(each, str)]
        return self._choice(found) or reasons[0]

    def select(self, problem: Problem, device: CDevice, limit: int) -> Choice | None:
        """The best plan of all."""
        self.on(device)
        self.order = self.order_of(problem)
        found: list[tuple[Panels, list[Plan]]] = []
        for part, cut in self._cuts(problem, limit):
            if not (found and found[0][1] and self.order[1] > 1):
                ways = list(self.ways(part, device, limit, cut))
                found.append((cut, self._finalists(part, self._considered(part, device, limit, cut, ways))))
        choice = self._choice(found)
        return choice and self._lined(problem, device, limit, choice)

    def _cuts(self, problem: Problem, limit: int) -> Iterator[tuple[Problem, Panels]]:
        yield whole(problem)
        slices = self.order[1] if self.order[1] > 1 else 0
        yield from panels(problem, limit, slices, threads_multiply=self._threads_multiply)

    # ---- batch invariance
    def order_of(self, problem: Problem) -> tuple[str, int, int]:
        """The order that the kernels of a problem have to keep, "" for any, and the slices of K, 0 for any number.

        The third is the longest step along K. A matrix of one row is a vector: both have one order. It is found once
        for each problem, because many kernels are asked about one.
        """
        if problem not in self._orders:
            self._orders[problem] = self._found_order(problem)
        return self._orders[problem]

    def _found_order(self, p: Problem) -> tuple[str, int, int]:
        if not p.batch_invariant or p.K == 0 or p.dtype_c == "int32":
            return "", 0, 0
        if p.bias_ptr and not p.bias_strides[1]:
            of_matrix = self.order_of(replace(p, bias_strides=(p.bias_strides[0], max(p.N, 1), p.bias_strides[2])))
            if of_matrix[0]:
                return of_matrix
        found: collections.Counter[str] = collections.Counter()  # kernels with any epilogue
        best: dict[str, tuple[bool, bool, float]] = {}
        plain = replace(p, bias_ptr=0, activation="none")
        for kernel in self.kernels:
            special = kernel.relaxed
            if kernel.role != "product" or not same_types(kernel, plain) or special > is_relaxed(p):
                continue
            about = guarded(kernel)
            if (p.scale_a_ptr or p.scale_b_ptr) and ("scale_a_ptr", "equals") in about:
                continue
            if bool(p.block_scale_a_ptr) != (("block_scale_a_ptr", "at_least") in about):
                continue
            order = str(kernel.order)
            found[order] += 1
            if not same_types(kernel, p):
                continue
            able = not {("M", "multiple_of"), ("N", "multiple_of"), ("K", "multiple_of")} & about
            before = best.get(order, (False, False, 0.0))
            seldom = kernel.order.promoted or math.inf if p.dtype_a.startswith("fp8") else 0
            best[order] = max(before[0], able), special, seldom
        if not best:
            return "", 0, 0
        chosen = max(best, key=lambda order: (*best[order], found[order], order))
        sliced = any(
            kernel.role == "partial"
            and kernel.config.block_k <= 128
            and same_types(kernel, p)
            and str(kernel.order) == chosen
            for kernel in self.kernels
        )
        serial = p.strides_b[0] < p.strides_b[1] and any(
            kernel.role == "product"
            and kernel.config.serial_k == 4
            and same_types(kernel, p)
            and str(kernel.order) == chosen
            for kernel in self.kernels
        )
        return chosen, *(slices_of(p.N, p.K, serial) if sliced else (1, 0))

    def _keeps_order(self, kernel: Kernel) -> bool:
        order, slices, step = self.order
        config = kernel.config
        if not order:
            return config.serial_k == 1
        if slices == 1:
            able = kernel.role == "product" and config.cluster_k * config.serial_k == 1
        else:
            able = kernel.role == "partial" or config.cluster_k * config.serial_k == slices
            able &= config.block_k // config.cluster_k <= step
        return str(kernel.order) == order and able

    def _choice(self, found: list[tuple[Panels, list[Plan]]]) -> Choice | None:
        """The best of the best plans of every way to cut the product, the first ones if they cost the same."""
        best = [in_panels(min(plans, key=self._rank), cut) for cut, plans in found if plans]
        if not best:
            return None
        among = tuple(in_panels(plan, cut) for cut, plans in found for plan in plans)
        return Choice(min(best, key=lambda plan: plan.cost), among)

    def _considered(self, problem: Problem, device: CDevice, limit: int, cut: Panels, ways: list[Way]) -> list[Planned]:
        """Plans with the plainest kernel of each kind."""
        plainest: dict[object, tuple[int, int]] = {}
        for number, kernel in enumerate(self.kernels):
            if same_types(kernel, problem) and kernel.shared_bytes <= device.shared_bytes and self._keeps_order(kernel):
                key, rank = self._kinds[number], (EPILOGUES.index(kernel.epilogue), number)
                plainest[key] = min(plainest.get(key, rank), rank)
        plans = [
            each for _, number in plainest.values() for each in self._plans(problem, device, number, ways, limit, cut)
        ]
        return [each for each in plans if isinstance(each, Planned) and not self._left_out(problem, each, plainest)]

    def _left_out(self, problem: Problem, planned: Planned, plainest: dict[object, tuple[int, int]]) -> bool:
        """Whether a plan, predicted, has less than half of a tall tile's rows to do, and there are lower tiles."""
        kernel, measured = self.kernels[planned.plan.kernel], planned.plan.measured
        if not self.network or measured or kernel.config.block_m <= max(TALL, 2 * problem.M):
            return False
        role, _, guards, _ = self._kinds[planned.plan.kernel]
        others = [number for _, number in plainest.values() if self.kernels[number].config.block_m <= TALL]
        return any((self._kinds[number][0], self._kinds[number][2]) == (role, guards) for number in others)

    def _finalists(self, problem: Problem, considered: list[Planned], known: float = math.inf) -> list[Plan]:
        """Measured plans, and those that the formula likes most, as the network sees them. `known`: the best so far."""

        def rank(each: tuple[Planned, Terms]) -> tuple[float, ...]:
            return float(each[1].time + each[0].way.ns), *self._order(each[0].plan)

        predicted = sorted(((each, each.terms) for each in considered if each.terms), key=rank)[:SHORTLIST]
        plans = [each.plan for each in considered if not each.terms]
        if self.network is None:
            return plans + [each.plan for each, _ in predicted[:1]]
        for first in range(0, len(predicted), AT_ONCE):
            best = min([known, *(plan.cost for plan in plans)])
            if F32(best) < LEAST_CORRECTION * F32(rank(predicted[first])[0]):
                break
            group = predicted[first : first + AT_ONCE]
            plans += [plan for each in group for plan in self._corrected(problem, *each)]
        return plans

    def _rank(self, plan: Plan) -> tuple[float, ...]:
        return plan.cost, *self._order(plan), not plan.pdl

    def _order(self, plan: Plan) -> tuple[int, ...]:
        """The order of plans that take as long."""
        kernel = self.kernels[plan.kernel]
        copies = plan.copies.bit_count()
        return copies, EPILOGUES.index(kernel.epilogue), -kernel.vector_bytes, plan.kernel, plan.split

    # ---- plans with one kernel
    def _plans(
        self, problem: Problem, device: CDevice, number: int, ways: list[Way], limit: int, cut: Panels
    ) -> list[Planned | str]:
        """Those with one kernel, and the kinds of reasons against others, of which the first counts."""
        kernel, p = self.kernels[number], problem
        partial = kernel.role == "partial"
        way = first_fit(kernel, ways, cut)
        if way is None:
            return ["guard"]
        if kernel.shared_bytes > device.shared_bytes:
            return ["shared"]
        units = tiles(kernel, p.M, p.N) * p.batch
        if not partial:
            return [self._plan(problem, device, number, way, 1, units, (0, F32(0)), limit, cut)]
        slots, sample = (
            concurrent(kernel, device, self.target),
            self._times(problem, way, kernel, cut).get(kernel.config_name),
        )
        slab = units * kernel.config.block_m * kernel.config.block_n
        cols = ceil_div(p.N, kernel.config.block_n) * kernel.config.block_n
        values = way.values | {
            "workspace_ptr": SEEN_ADDRESS, "workspace_stride_m": cols, "workspace_stride_z": slab // p.batch,
            "split": SPLITS[-1],
        }  # fmt: skip
        if units == 0 or not keeps_guards(kernel, values):
            return ["no split"]
        reduce = self.reducer(problem, values, device)
        if reduce is None:
            return ["no split"]

        def tried(split: int) -> bool:
            least = MIN_STEPS if split <= USUAL_SPLIT else LONG_STEPS
            deep = ceil_div(p.K, kernel.config.block_k) >= least * split
            deep &= split <= USUAL_SPLIT or p.K < LONGEST_K
            few = units <= slots and units * split <= MOST_WAVES * slots
            return deep and (split == sample.split if sample else few)

        given = self.order[1]
        splits = [given] if given else list(filter(tried, SPLITS))
        if kernel.layout == "any" and not sample and not given:
            splits = [split for split in splits if 4 * split * slab <= limit][-1:] or splits[:1]
        plans: list[Planned | str] = []
        for split in splits:
            c, sums = self.constants[reduce], ceil_div(4 * split * slab, 256) * 256
            ns = (
                c.base_ns
                + F32(p.batch) * F32(p.M) * F32(p.N) * F32(4 * split + DTYPES[p.dtype_c].bytes) * c.ns_per_byte
            )
            plans.append(self._plan(problem, device, number, way, split, units, (sums, ns), limit, cut))
        return plans or ["no split"]

    def _times(self, problem: Problem, way: Way, kernel: Kernel, cut: Panels) -> dict[str, Sample]:
        """The measured times of the shape, for kernels of its kind."""
        layout = layout_of(way.values)
        if way.copies or cut.count > 1 or problem.batch != 1 or layout is None or problem.block_scale_a_ptr:
            return {}
        if (kernel.relaxed and not is_relaxed(problem)) or problem.a_ptr % LINE or problem.b_ptr % LINE:
            return {}
        element_bytes = DTYPES[problem.dtype_a].bytes
        times = self.shapes.get((element_bytes, kernel.kind, layout, problem.M, problem.N, problem.K), {})
        given = self.order[1]
        return times if given < 2 else {name: each for name, each in times.items() if each.split in (1, given)}

    def _plan(
        self,
        problem: Problem,
        device: CDevice,
        number: int,
        way: Way,
        split: int,
        units: int,
        reduction: tuple[int, F32],
        limit: int,
        cut: Panels,
    ) -> Planned | str:
        """A plan; `reduction` is the room for sums in bytes and the time of the reduce."""
        kernel = self.kernels[number]
        grid = self.grid(kernel, units * split, device)
        if grid is None:
            return "blocks"
        size = way.bytes + reduction[0]
        if size > limit:
            return "workspace"
        sample = self._times(problem, way, kernel, cut).get(kernel.config_name)
        terms = None if sample else self._terms(problem, device, number, way, split, reduction[1])
        plan = Plan(
            kernel=number,
            split=split,
            copies=way.copies,
            grid=grid,
            group_m=group(
                kernel, problem, concurrent(kernel, device, self.target), alternates=self.network is not None
            ),
            pdl=sample.pdl and kernel.pdl if sample else early_by_formula(kernel, terms),
            measured=sample is not None,
            workspace_bytes=size,
            cost=sample.ns if sample else cost(terms.time + way.ns) if terms else 0,
        )
        return Planned(plan, way, terms)

    # ---- the time model
    def _terms(self, problem: Problem, device: CDevice, number: int, way: Way, split: int, reduce_ns: F32) -> Terms:
        kernel, p, c = self.kernels[number], problem, self.constants[number]
        config = kernel.config
        m, n, k, batch = F32(p.M), F32(p.N), F32(p.K), F32(p.batch)
        block_m, block_n, block_k = F32(config.block_m), F32(config.block_n), F32(config.block_k)
        down, across = max(ONE, np.ceil(m / block_m)), max(ONE, np.ceil(n / block_n))
        work_tiles = down * across * batch * F32(split)
        waves = work_tiles / F32(concurrent(kernel, device, self.target))
        beside, busy = F32(sharing(kernel, self.target)), F32(keeping_busy(kernel, self.target))
        whole = np.floor(waves)
        slots = F32(concurrent(kernel, device, self.target))
        rest = np.ceil(max(F32(0), work_tiles - whole * slots) / (slots / beside))
        rounds = whole + (max(rest, busy) / max(beside, busy) if rest else F32(0))
        steps = np.ceil(np.ceil(k / block_k) / F32(split))
        line = F32(config.block_k * DTYPES[kernel.dtype_a].bytes)
        lines_a, lines_b = split_lines(way.values, A, p.dtype_a), split_lines(way.values, B, p.dtype_b)
        rows, cols = m / down, n / across
        bytes_a, bytes_b = rows * (ONE + SPLIT_A * F32(lines_a)) * line, cols * (ONE + SPLIT_B * F32(lines_b)) * line
        width_a, width_b, width_c = map(F32, widths_of(p))
        fixed = c.base_ns + rounds * c.ns_per_tile
        slices = F32(0)
        if kernel.role == "partial":
            slices = work_tiles * block_m * block_n * SUM_BYTES * c.ns_per_byte
        with np.errstate(over="ignore"):  # what takes centuries
            multiply = rounds * steps * c.ns_per_k_step
            taken = (bytes_a / F32(config.cluster_m) + bytes_b / F32(config.cluster_n)) / F32(config.cluster_k)
            take = rounds * steps * (taken * c.ns_per_taken_byte)
            load = work_tiles * steps * ((bytes_a + bytes_b) * c.ns_per_loaded_byte)
            read = batch * (m * k * width_a + k * n * width_b + m * n * width_c) * c.ns_per_byte
            root = np.sqrt(multiply * multiply + take * take + load * load + read * read)
            time = fixed + root + slices + reduce_ns
        parts = (multiply, take, read, load, slices + reduce_ns, fixed)
        found = Terms(time, *parts, waves, rounds, steps, rows, cols, lines_a, lines_b)
        assert {type(each) for each in (*parts, time, waves, rounds, steps, rows, cols)} == {F32}
        return found

    def _corrected(self, problem: Problem, planned: Planned, t: Terms) -> list[Plan]:
        """The plan with its time by the network, without pdl and, if its kernel can, with it."""
        kernel, way = self.kernels[planned.plan.kernel], planned.way
        assert self.table is not None
        assert self.network is not None
        waves, rounds, time = float(t.waves), float(t.rounds), float(t.time)
        half, other_half, clustered = waves <= 0.5, 0.5 < waves <= 1, kernel.num_ctas > 1
        odd = kernel.family == "pingpong" and rounds % 2 == 1
        a_by_columns = way.values["stride_ak"] not in (1, None)
        b_by_columns = way.values["stride_bk"] in (1, None) and way.values["stride_bn"] not in (1, None)
        config = kernel.config
        of_m, of_n, of_k = (
            float(F32(size) / F32(block))
            for size, block in zip(
                (problem.M, problem.N, problem.K), (config.block_m, config.block_n, config.block_k), strict=True
            )
        )
        down, across, steps = max(1, math.ceil(of_m)), max(1, math.ceil(of_n)), math.ceil(of_k)
        past = steps - of_k
        inputs: dict[str, float] = {
            "log2 M": log2(problem.M),
            "log2 N": log2(problem.N),
            "log2 K": log2(problem.K),
            "log2 bytes": log2(bytes_moved(problem)),
            "A by columns": a_by_columns,
            "B by columns": b_by_columns,
            "lines_a": t.lines_a,
            "lines_b": t.lines_b,
            "sectors_a": split_lines(way.values, A, problem.dtype_a, SECTOR),
            "sectors_b": split_lines(way.values, B, problem.dtype_b, SECTOR),
            "log2 batch": log2(problem.batch),
            "log2 time": log2(time),
            **{part: float(getattr(t, part)) / time for part in ("multiply", "take", "read", "load", "sums", "fixed")},
            "reread": min(1.0, self._reread(problem, planned, t) / time),
            "wave up to 1": min(waves, 1),
            "wave up to 2": min(waves, 2),
            "last wave": float(t.waves - (t.rounds - ONE)),
            "1 / waves": 1 / rounds,
            "odd": odd and min(1, 2 / rounds),
            "half a wave": half,
            "one wave": half or other_half,
            "log2 steps": log2(float(t.steps)),
            "log2 split": log2(planned.plan.split),
            "past K": past,
            "past K / steps": past / max(1.0, float(t.steps)),
            "past K, across K": a_by_columns and not b_by_columns and past,
            "uneven": float(F32(t.steps) - F32(steps) / F32(planned.plan.split)),  # a difference of floats: it rounds
            "last rows": 1 - (down - of_m),
            "last columns": 1 - (across - of_n),
            "1 / down": 1 / down,
            "1 / across": 1 / across,
            "rows": float(t.rows) / kernel.config.block_m,
            "columns": float(t.cols) / kernel.config.block_n,
            "clustered lines_a": clustered and t.lines_a,
            "clustered lines_b": clustered and t.lines_b,
            "pdl": 1,
            "the other half": other_half,
            "log2 time, the other half": other_half and log2(time),
        }
        model = self._models.get((self.table.device, key_of(kernel)))
        shift = self.network.shift + (model.shift if model else 0.0)

        timed = (self.table.device, *key_of(kernel)[1:]) in self._timed

        def plan(*names: str) -> Plan:
            values = [inputs[name] for name in names]
            with np.errstate(over="ignore", invalid="ignore"):  # of a time without end
                output = self._output(planned.plan.kernel, values, model) + shift
                ns = time * float(np.exp(output)) if timed else time
            return replace(planned.plan, pdl="pdl" in names, cost=cost(ns + float(way.ns)))

        plain = plan(*PROBLEM_INPUTS, *PLAN_INPUTS)
        return [plain, plan(*PROBLEM_INPUTS, *PLAN_INPUTS, *PDL_INPUTS)] if kernel.pdl else [plain]

    def _reread(self, problem: Problem, planned: Planned, t: Terms) -> float:
        """Time of memory if each wave of tiles reads its rows of A and columns of B once."""
        kernel, M, N = self.kernels[planned.plan.kernel], problem.M, problem.N
        block_m, block_n = kernel.config.block_m, kernel.config.block_n
        tiles = max(1, math.ceil(M / block_m)) * max(1, math.ceil(N / block_n)) * problem.batch
        waves = float(t.waves) / planned.plan.split
        at_once = min(tiles, tiles / waves)
        sides = min(2 * math.sqrt(at_once * block_m * block_n), min(at_once * block_m, M) + min(at_once * block_n, N))
        bytes_of_line = problem.K * DTYPES[kernel.dtype_a].bytes
        return max(1.0, waves) * sides * bytes_of_line * float(self.constants[planned.plan.kernel].ns_per_byte)

    def _output(self, number: int, inputs: Sequence[float], model: Model | None) -> float:
        """The network's output for a kernel and the inputs of problem and plan, with or without those of pdl."""
        network = self.network
        assert self.table is not None
        assert network is not None
        first, key = len(KERNEL_INPUTS), (self.table.device, number)
        if self.table.device not in self._weights:
            weights = network.inputs, network.bias, network.second, network.second_bias, network.outputs
            self._weights[self.table.device] = tuple(np.array(each) for each in weights)
        rows, bias, second, second_bias, outputs = self._weights[self.table.device]
        if key not in self._hidden:
            own = model.hidden if model else (0.0,) * HIDDEN
            self._hidden[key] = bias + own + np.array(kernel_inputs(self.kernels[number]), float) @ rows[:first]
        nodes = self._hidden[key] + np.array(inputs, float) @ rows[first : first + len(inputs)]
        return float(np.fmax(0.0, np.fmax(0.0, nodes) @ second + second_bias) @ outputs)


def concurrent(kernel: Kernel, device: CDevice, target: Target) -> int:
    """Tiles that a device computes at once; the multiprocessors that large clusters leave over compute none."""
    blocks = kernel.num_ctas
    usable = int(device.multiprocessors)
    if blocks > LEAVE_NONE_OVER:
        usable = usable * 10 // 11
    return max(1, usable // blocks) * sharing(kernel, target)


def sharing(kernel: Kernel, target: Target) -> int:
    """Tiles that share a multiprocessor: of its registers a thread has 96 and one for each sum."""
    if keeping_busy(kernel, target) == 1:
        return 1
    config = kernel.config
    registers = config.block_m * config.block_n + kernel.threads * 96
    stages = config.num_stages - 1 if kernel.family == "tile" else config.num_stages
    ring = stages * config.block_k * (config.block_m + config.block_n) * DTYPES[kernel.dtype_a].bytes
    return max(1, min(65536 // registers, (target.shared_bytes + 1024) // (ring + 1024)))


def keeping_busy(kernel: Kernel, target: Target) -> float:
    """Tiles on a multiprocessor that take no longer than one alone."""
    if kernel.family in ("tile", "multistage", "short"):
        return 1.5 if target.backend == "cuda" and not target.fast_accum else 1
    return 3.5 if kernel.family == "fma" else 1


def early_by_formula(kernel: Kernel, terms: Terms | None) -> bool:
    """Whether a launch is pdl where no network says so."""
    if terms is None or not kernel.pdl or kernel.role != "product":
        return False
    return bool(terms.time < F32(FULL_PDL_NS if F32(0.5) < terms.waves <= ONE else PDL_NS))


def cost(ns: float | F32) -> int:
    """The cost of a plan that takes so long."""
    return int(ns) if ns < F32(9e18) else 2**63 - 1


def log2(size: float) -> float:
    """That of a size, of 1 for 0."""
    return math.log2(size) if size > 1 else 0.0


def key_of(kernel: Kernel) -> tuple[str, int, str]:
    """The model of a kernel."""
    return kernel.config_name.removesuffix(f"_{kernel.role}"), DTYPES[kernel.dtype_a].bytes, kernel.kind


def bytes_moved(problem: Problem) -> float:
    """A and B read and C written."""
    p, (width_a, width_b, width_c) = problem, widths_of(problem)
    return float(p.batch) * (float(p.M) * p.K * width_a + float(p.K) * p.N * width_b + float(p.M) * p.N * width_c)


def split_lines(values: Values, number: int, dtype: str, unit: int = LINE) -> float:
    """The part of an operand's contiguous rows or columns that begin within a unit of bytes."""
    operand = OPERANDS[number]
    by_rows = values[operand.col_stride] in (1, None)
    pitch = (values[operand.row_stride if by_rows else operand.col_stride] or 0) * DTYPES[dtype].bytes
    address = sized(values, operand.pointer)
    address -= sized(values, "k_shift") * DTYPES[dtype].bytes
    least = math.gcd(pitch, (values[f"stride_{'abc'[number]}z"] or 0) * DTYPES[dtype].bytes, unit)
    if least == unit:
        return float(address % unit != 0)
    return 1.0 if address % least else 1 - least / unit


def group(kernel: Kernel, problem: Problem, slots: int, *, alternates: bool) -> int:
    """Rows of tiles in a group, if `slots` tiles are computed at once, and whether it is known what alternates."""
    block_m, block_n = kernel.config.block_m, kernel.config.block_n
    down, across = ceil_div(problem.M, block_m), ceil_div(problem.N, block_n)
    everything = tiles(kernel, problem.M, problem.N)
    if alternates and kernel.family == "pingpong" and kernel.num_ctas > 1:
        near = min(slots, 8 // kernel.num_ctas)
    elif everything <= slots:
        near = min(everything, 24 // kernel.num_ctas)
    else:
        near = slots // 2
    near = max(near, 1)

    def elements(group_m: int) -> float:
        columns = min(near / min(group_m, max(down, 1), near), float(max(across, 1)))
        return near / columns * block_m + columns * block_n

    choices = [group_m for group_m in GROUPS if group_m == 1 or group_m // 2 < down]
    return min(choices, key=lambda group_m: (elements(group_m), group_m))


def is_split(kernel: Kernel) -> bool:
    """Whether it multiplies fp32 as six products of bf16."""
    return kernel.dtype_a == "fp32" and kernel.family in ("cooperative", "swapped")


def scaled(kernel: Kernel, c: Floats, by: Speeds, tensor: float) -> Floats:
    """Constants of a kernel on another device, where a tile has `tensor` TFLOP/s, or as they are if 0."""
    base, step, tile, byte, taken, loaded = map(float, c)
    step, config = step / by.multiply, kernel.config
    if tensor and kernel.role in ("product", "partial"):  # that of a tile's part of a multiprocessor
        macs = float(config.block_m * config.block_n * config.block_k)
        bytes_ = 6 * DTYPES["bf16"].bytes if is_split(kernel) else DTYPES[kernel.dtype_a].bytes
        step = max(step, macs * bytes_ / (1000 * tensor * kernel.num_ctas))
    load = by.multiprocessors * by.clock
    return rounded(base, step, tile / by.clock, byte / by.memory, taken / by.clock, loaded / load)


def layout_of(values: Values) -> str | None:
    """The layout that a table would call this, None if neither stride of an operand is 1."""
    order = ""
    for row, col in (("stride_am", "stride_ak"), ("stride_bk", "stride_bn")):
        order += "n" if values[col] in (1, None) else "t" if values[row] in (1, None) else "?"
    return order if order in LAYOUTS else None
