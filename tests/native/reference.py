"""Selection a second time: the text of launcher.h and docs/format.md in Python, to compare the C code with.

Quantities are dicts in which None stands for the stride of a dimension of size 1: it multiplies only 0, and whatever
is guarded of it being equal to or at least something holds.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from aotmm.build.render import constants
from aotmm.pack.schema import Kernel, occupancy
from aotmm.pack.table import MIN_M, Sample, Table
from aotmm.problem import ACTIVATIONS, DTYPES, EPILOGUES, GROUPS, LAYOUTS, SPLITS
from aotmm.runtime.launcher import Plan, Problem
from aotmm.runtime.tuning import CDevice, measured_device
from aotmm.target import HIDDEN_FACTS, HiddenFacts, Target

MAX_GRID = 2**31 - 1
MAX_WORKSPACE = 2**40
PDL_NS = 50_000
FULL_PDL_NS = 12_000  # of a launch that leaves no room for the next one
SPLIT_LINES = 3  # times that a load across cache lines counts
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
    extent: str


OPERANDS = (
    Operand("a_ptr", "M", "K", "stride_am", "stride_ak", "a_extent"),
    Operand("b_ptr", "K", "N", "stride_bk", "stride_bn", "b_extent"),
    Operand("c_ptr", "M", "N", "stride_cm", "stride_cn", "c_extent"),
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
    return with_extents(found)


def with_extents(values: Values) -> Values:
    """The same with what follows from sizes and strides."""
    found = dict(values)
    for operand in OPERANDS:
        rows, cols = sized(values, operand.rows), sized(values, operand.cols)
        strides = (values[operand.row_stride], values[operand.col_stride])
        last = sum((size - 1) * (stride or 0) for size, stride in zip((rows, cols), strides, strict=True))
        found[operand.extent] = min(last, 2**63 - 1) if rows and cols else 0
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
    return max(
        EPILOGUES.index(ACTIVATIONS[problem.activation]), EPILOGUES.index("bias_relu" if problem.bias_ptr else "none")
    )


def same_types(kernel: Kernel, problem: Problem) -> bool:
    """Whether plans for `problem` may have `kernel` in their middle, by types and epilogue."""
    inputs = (DTYPES[kernel.dtype_a].storage, DTYPES[kernel.dtype_b].storage) == (problem.dtype_a, problem.dtype_b)
    if kernel.role != "product":
        return inputs and kernel.role == "partial"
    return inputs and kernel.dtype_c == problem.dtype_c and EPILOGUES.index(kernel.epilogue) >= epilogue_of(problem)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def tiles(kernel: Kernel, rows: int, cols: int) -> int:
    """Tiles of a matrix."""
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
    return sized(values, operand.pointer) % 16 == 0 and (straight or turned)


def place(values: Values, number: int, element_bytes: int) -> Place:
    """Where a copy of an operand lies."""
    operand = OPERANDS[number]
    rows, cols = values[operand.col_stride] in (1, None), values[operand.row_stride] in (1, None)
    transposed = {A: element_bytes > 1 and cols and not rows, B: element_bytes == 1 or not rows, C: False}[number]
    sizes = sized(values, operand.rows), sized(values, operand.cols)
    lines, length = sizes[::-1] if transposed else sizes
    pitch = ceil_div(length * element_bytes, 128) * 128 // element_bytes
    return Place(transposed, lines, length, pitch, ceil_div(lines * pitch * element_bytes, 256) * 256)


def with_copies(values: Values, places: dict[int, Place], address: int) -> Values:
    """The problem with the operands of `places` in a workspace."""
    found = dict(values)
    for number, where in sorted(places.items()):
        operand = OPERANDS[number]
        strides = (operand.row_stride, operand.col_stride)
        lines, along = strides[::-1] if where.transposed else strides
        found[operand.pointer] = address
        found[lines] = None if values[lines] is None else where.pitch
        found[along] = None if values[along] is None else 1
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
    for side, (of, pointer) in sides.items():
        found[pointer] = of[operand.pointer]
        for name, size, stride in zip("mn", "MN", strides, strict=True):
            found[f"stride_{side}{name}"] = None if found[size] == 1 else of[stride] or 0
    return found


def widths_of(problem: Problem) -> list[int]:
    """Bytes of an element of A, B and C."""
    return [DTYPES[name].bytes for name in (problem.dtype_a, problem.dtype_b, problem.dtype_c)]


def badly_lying(problem: Problem, values: Values) -> list[int]:
    """The operands that fast kernels do not take as they are."""
    return [
        number
        for number, element_bytes in enumerate(widths_of(problem))
        if not lies_well(values, number, element_bytes)
    ]


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


def panels(problem: Problem, limit: int) -> Iterator[tuple[Problem, Panels]]:
    """The ways to cut a problem, and the problem of one panel; none if all copies fit in the workspace."""
    p, values = problem, quantities(problem)
    if limit == 0 or p.batch != 1 or 0 in (p.M, p.N, p.K):
        return
    widths, needed = widths_of(p), badly_lying(p, values)

    def fits(rows: int, cols: int) -> bool:
        sizes = values | {"M": rows, "N": cols}
        return sum(place(sizes, number, widths[number]).bytes for number in needed) <= limit

    def evenly(size: int, most: int) -> int:
        return size if size <= most else ceil_div(ceil_div(size, ceil_div(size, most)), PANEL) * PANEL

    if fits(p.M, p.N):
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
    ns: float
    values: Values


Constants = tuple[float, float, float, float, float, int]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Those of a device over those of a table's device; `own`: the table is its own."""

    table: Table
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


def speeds(table: Table, device: CDevice) -> Speeds:
    """Those of a device over those of the table's."""

    def ratio(name: str) -> float:
        mine, theirs = getattr(device, name), getattr(table, name)
        return float(mine / theirs) if mine > 0 and theirs > 0 else 1.0

    name = device.name.decode()
    if name == table.device:
        return Speeds(table, own=True)
    sustained = hidden_facts(name).sustained / hidden_facts(table.device).sustained
    facts = ratio("multiprocessors"), ratio("clock_mhz"), sustained, ratio("memory_gbps")
    return Speeds(table, False, *facts)  # noqa: FBT003


class Reference:
    """Selection over the kernels of one pack, with the constants and times of `tables`, one of each device.

    `before` has the models that they lack: that of a launcher that was retuned.
    """

    def __init__(
        self, kernels: tuple[Kernel, ...], target: Target, tables: Sequence[Table], before: Reference | None = None
    ) -> None:
        self.kernels = kernels
        self.target = target
        self.tables = tuple(tables)
        self.before = before
        self._constants: dict[object, list[list[Constants]]] = {}
        self.constants: list[list[Constants]] = []  # on the device of the last question, as the next one
        self.shapes: dict[tuple[object, ...], dict[str, Sample]] = {}

    def on(self, device: CDevice) -> Reference:
        """Itself, with constants and times for a device."""
        if not self.tables:
            self.constants = self._of_table(None)
            return self
        own = [table for table in self.tables if table.device == device.name.decode()]
        found = min((speeds(table, device) for table in own or self.tables), key=lambda each: each.distance)
        self.constants = self._of_table(found.table) if found.own else self._scaled(found, device)
        self.shapes = {
            (shape.element_bytes, shape.fast_accum, shape.layout, shape.M, shape.N, shape.K): shape.best()
            for shape in (found.table.shapes if found.own else ())
        }
        return self

    def _of_table(self, table: Table | None) -> list[list[Constants]]:
        key = table and table.device
        if key not in self._constants:
            known = set() if table is None else {model.key for model in table.models}
            before = self.before and table and self.before.on(measured_device(table, 0)).constants
            self._constants[key] = [
                [
                    before[number][place]
                    if before
                    and (kernel.config_name, DTYPES[kernel.dtype_a].bytes, kernel.fast_accum, rows) not in known
                    else constants(kernel, self.target, table, rows)
                    for place, rows in enumerate(MIN_M)
                ]
                for number, kernel in enumerate(self.kernels)
            ]
        return self._constants[key]

    def _scaled(self, by: Speeds, device: CDevice) -> list[list[Constants]]:
        tensor = hidden_facts(device.name.decode()).tensor_tflops
        key = (by.table.device, by.multiprocessors, by.clock, by.sustained, by.memory, tensor)
        if key not in self._constants:
            self._constants[key] = [
                [scaled(kernel, each, by, tensor) for each in ranges]
                for kernel, ranges in zip(self.kernels, self._of_table(by.table), strict=True)
            ]
        return self._constants[key]

    def constants_of(self, problem: Problem, number: int) -> Constants:
        """Those of a kernel for the rows of a problem."""
        return self.constants[number][max(bisect.bisect_right(MIN_M, problem.M) - 1, 0)]

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

        fitting = [
            number
            for number, kernel in enumerate(self.kernels)
            if kernel.role == role
            and suits(kernel)
            and kernel.shared_bytes <= device.shared_bytes
            and keeps_guards(kernel, values)
            and self.grid(kernel, tiles(kernel, sized(values, "M"), sized(values, "N")), device)
        ]
        return min(fitting, key=rank, default=None)

    def copier(self, element_bytes: int, values: Values, device: CDevice) -> int | None:
        """The copy kernel for elements of that many bytes."""
        return self.helper("copy", lambda kernel: DTYPES[kernel.dtype_a].bytes == element_bytes, values, device)

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
        values = quantities(problem) | {"c_span": cut.last_cols}
        yield Way(0, 0, 0.0, values)
        if limit == 0 or problem.batch != 1 or 0 in (problem.M, problem.N, problem.K):
            return
        widths, needed = widths_of(problem), badly_lying(problem, values)
        served = cut.across, cut.down if cut.across == 1 else 1, 1
        operands = [number for number in needed if number != C]
        for chosen in dict.fromkeys((tuple(operands), tuple(needed) if C in needed else ())):
            if not chosen:
                continue
            places = {number: place(values, number, widths[number]) for number in chosen}
            moved = with_copies(values, places, SEEN_ADDRESS)
            copies = [(number, copy_values(values, moved, number, places[number])) for number in chosen]
            kernels = [self.copier(widths[number], copied, device) for number, copied in copies]
            size = sum(where.bytes for where in places.values())
            if size <= limit and None not in kernels:
                ns = 0.0
                for kernel, (number, copied) in zip(kernels, copies, strict=True):
                    base, _, _, byte, *_ = self.constants_of(problem, kernel or 0)
                    elements = float(sized(copied, "M")) * float(sized(copied, "N"))
                    ns += (base + elements * (2 * widths[number]) * byte) / served[number]
                yield Way(sum(1 << number for number in chosen), size, ns, moved)

    def check(self, problem: Problem, device: CDevice, number: int, limit: int) -> Plan | str:
        """The best plan with one kernel, or the kind of reason why there is none."""
        self.on(device)
        if self.kernels[number].role not in ("product", "partial"):
            return "no product"
        if not same_types(self.kernels[number], problem):
            return "types"
        found = []
        for part, cut in (whole(problem), *panels(problem, limit)):
            plan = self._best(part, device, number, list(self.ways(part, device, limit, cut)), limit, cut)
            found.append(in_panels(plan, cut) if isinstance(plan, Plan) else plan)
        plans = [plan for plan in found if isinstance(plan, Plan)]
        return min(plans, key=lambda plan: plan.cost) if plans else found[0]

    def select(self, problem: Problem, device: CDevice, limit: int) -> Plan | None:
        """The best plan of all."""
        self.on(device)
        found = [
            in_panels(plan, cut)
            for part, cut in (whole(problem), *panels(problem, limit))
            if (plan := self._select(part, device, limit, cut)) is not None
        ]
        return min(found, key=lambda plan: plan.cost, default=None)

    def _select(self, problem: Problem, device: CDevice, limit: int, cut: Panels) -> Plan | None:
        plainest: dict[object, tuple[tuple[int, int], Plan]] = {}
        ways = list(self.ways(problem, device, limit, cut))
        for number, kernel in enumerate(self.kernels):
            plan = self._best(problem, device, number, ways, limit, cut) if same_types(kernel, problem) else "types"
            if isinstance(plan, Plan):
                key = (kernel.role, kernel.config_name, kernel.guards)
                rank = (EPILOGUES.index(kernel.epilogue), number)
                plainest[key] = min(plainest.get(key, (rank, plan)), (rank, plan), key=lambda row: row[0])
        return min((plan for _, plan in plainest.values()), key=self._rank, default=None)

    def _best(
        self, problem: Problem, device: CDevice, number: int, ways: list[Way], limit: int, cut: Panels
    ) -> Plan | str:
        kernel = self.kernels[number]
        partial = kernel.role == "partial"
        last: Values = {"M": cut.last_rows, "N": cut.last_cols}

        def fits(way: Way) -> bool:
            kept = keeps_guards(kernel, way.values) and keeps_guards(kernel, way.values | last)
            return kept and not (partial and way.copies >> C & 1)

        way = next(filter(fits, ways), None)
        if way is None:
            return "guard"
        if kernel.shared_bytes > device.shared_bytes:
            return "shared"
        found = (self._partial if partial else self._product)(problem, device, number, way, limit, cut)
        plans = [plan for plan in found if isinstance(plan, Plan)]
        return min(plans, key=lambda plan: plan.cost) if plans else found[-1]

    def _rank(self, plan: Plan) -> tuple[int, ...]:
        kernel = self.kernels[plan.kernel]
        copies = plan.copies.bit_count()
        return plan.cost, copies, EPILOGUES.index(kernel.epilogue), -kernel.vector_bytes, plan.kernel

    def _product(
        self, problem: Problem, device: CDevice, number: int, way: Way, limit: int, cut: Panels
    ) -> list[Plan | str]:
        kernel, p = self.kernels[number], problem
        units = tiles(kernel, p.M, p.N) * p.batch
        written = float(p.M) * float(p.N) * DTYPES[p.dtype_c].bytes
        ns = self._main_ns(problem, device, number, way, units, 1, float(p.batch) * (bytes_read(p) + written))
        return [self._plan(problem, device, number, way, 1, units, 0, (ns, ns + way.ns), limit, cut)]

    def _partial(
        self, problem: Problem, device: CDevice, number: int, way: Way, limit: int, cut: Panels
    ) -> list[Plan | str]:
        kernel, p = self.kernels[number], problem
        steps = ceil_div(p.K, kernel.config.block_k)
        units = tiles(kernel, p.M, p.N)
        slab = units * kernel.config.block_m * kernel.config.block_n
        cols = ceil_div(p.N, kernel.config.block_n) * kernel.config.block_n
        values = way.values | {
            "workspace_ptr": SEEN_ADDRESS, "workspace_stride_m": cols, "workspace_stride_z": slab, "split": SPLITS[-1]
        }  # fmt: skip
        if p.batch != 1 or units == 0 or not keeps_guards(kernel, values):
            return ["no split"]
        reduce = self.reducer(problem, values, device)
        if reduce is None:
            return ["no split"]
        base, _, _, byte, *_ = self.constants_of(problem, reduce)
        plans: list[Plan | str] = ["no split"]
        for split in SPLITS:
            if steps < 2 * split:
                continue
            sample = self._measured(problem, way, kernel, cut)
            if sample is not None and sample.split != split:
                continue
            moved = bytes_read(p) + split * 4.0 * slab
            ns = self._main_ns(problem, device, number, way, units, split, moved)
            rest = base + float(p.M) * float(p.N) * (4 * split + DTYPES[p.dtype_c].bytes) * byte
            sums = ceil_div(4 * split * slab, 256) * 256
            times = ns, ns + rest + way.ns
            plans.append(self._plan(problem, device, number, way, split, units, sums, times, limit, cut))
        return plans

    def _main_ns(
        self, problem: Problem, device: CDevice, number: int, way: Way, tiles: int, split: int, moved: float
    ) -> float:
        base, step, tile, byte, load, blocks = self.constants_of(problem, number)
        config, units = self.kernels[number].config, tiles * split
        waves = ceil_div(units, max(1, device.multiprocessors * blocks // self.kernels[number].num_ctas))
        steps = ceil_div(ceil_div(problem.K, config.block_k), split)
        row, col = (
            element_bytes * (SPLIT_LINES if pitch * element_bytes % 128 else 1)
            for pitch, element_bytes in pitches(problem, way.values)
        )
        loads = float(config.block_k * (config.block_m * row + config.block_n * col))
        busy = float(waves) * (float(steps) * step + tile)
        moving = moved * byte + float(units) * float(steps) * loads * load
        return base + (max(busy, moving) + 0.4 * min(busy, moving))

    def _measured(self, problem: Problem, way: Way, kernel: Kernel, cut: Panels) -> Sample | None:
        layout = layout_of(way.values)
        if way.copies or cut.count > 1 or problem.batch != 1 or layout is None:
            return None
        if kernel.fast_accum and not problem.fast_accum:
            return None
        element_bytes = DTYPES[problem.dtype_a].bytes
        shape = (element_bytes, kernel.fast_accum, layout, problem.M, problem.N, problem.K)
        sample = self.shapes.get(shape, {}).get(kernel.config_name)
        return sample if sample is not None and sample.split in (1, *SPLITS) else None

    def _plan(
        self,
        problem: Problem,
        device: CDevice,
        number: int,
        way: Way,
        split: int,
        units: int,
        sums: int,
        ns: tuple[float, float],
        limit: int,
        cut: Panels,
    ) -> Plan | str:
        """A plan; `ns` is the predicted time of the main kernel, and of all."""
        kernel = self.kernels[number]
        grid = self.grid(kernel, units * split, device)
        if grid is None:
            return "blocks"
        size = way.bytes + sums
        if size > limit:
            return "workspace"
        sample = self._measured(problem, way, kernel, cut)
        blocks = self.constants_of(problem, number)[-1]
        slots = max(1, device.multiprocessors * blocks // kernel.num_ctas)
        least = FULL_PDL_NS if slots // 2 < units * split <= slots else PDL_NS
        early = sample.pdl if sample else kernel.role == "product" and ns[1] - way.ns < least
        return Plan(
            kernel=number,
            split=split,
            copies=way.copies,
            grid=grid,
            group_m=group(kernel, problem, slots),
            pdl=early and kernel.pdl,
            measured=sample is not None,
            workspace_bytes=size,
            cost=sample.ns if sample else int(ns[1]) if ns[1] < 9e18 else 2**63 - 1,
        )


def group(kernel: Kernel, problem: Problem, slots: int) -> int:
    """Rows of tiles that are computed together, if `slots` tiles are computed at once."""
    block_m, block_n = kernel.config.block_m, kernel.config.block_n
    down = ceil_div(problem.M, block_m)
    at_once = min(slots, tiles(kernel, problem.M, problem.N))

    def elements(group_m: int) -> int:
        rows = min(group_m, max(down, 1))
        return rows * block_m + ceil_div(at_once, rows) * block_n

    choices = [group_m for group_m in GROUPS if group_m == 1 or group_m // 2 < down]
    return min(choices, key=lambda group_m: (elements(group_m), group_m != 8, group_m))


def scaled(kernel: Kernel, of: Constants, by: Speeds, tensor: float) -> Constants:
    """Constants of a kernel on another device, whose multiprocessors have `tensor` TFLOP/s, or as they are if 0."""
    base, step, tile, byte, load, blocks = of
    step, config = step / by.multiply, kernel.config
    if tensor and kernel.role in ("product", "partial"):
        macs = float(config.block_m * config.block_n * config.block_k)
        step = max(step, macs * blocks * DTYPES[kernel.dtype_a].bytes / (1000 * tensor * kernel.num_ctas))
    return base, step, tile / by.clock, byte / by.memory, load / (by.multiprocessors * by.clock), blocks


def bytes_read(problem: Problem) -> float:
    """Bytes of A and B."""
    m, n, k = float(problem.M), float(problem.N), float(problem.K)
    return m * k * DTYPES[problem.dtype_a].bytes + k * n * DTYPES[problem.dtype_b].bytes


def pitches(problem: Problem, values: Values) -> Iterator[tuple[int, int]]:
    """How far apart rows of A and columns of B are if contiguous, else columns and rows; bytes of an element."""
    for along, across, dtype in (
        ("stride_ak", "stride_am", problem.dtype_a),
        ("stride_bk", "stride_bn", problem.dtype_b),
    ):
        yield values[across if values[along] in (1, None) else along] or 0, DTYPES[dtype].bytes


def layout_of(values: Values) -> str | None:
    """The layout that a table would call this, None if neither stride of an operand is 1."""
    order = ""
    for row, col in (("stride_am", "stride_ak"), ("stride_bk", "stride_bn")):
        order += "n" if values[col] in (1, None) else "t" if values[row] in (1, None) else "?"
    return order if order in LAYOUTS else None
