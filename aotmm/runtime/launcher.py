"""A pack's launcher library in Python: the C interface of `launcher.h` and its results as values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from aotmm.errors import ArtifactError, NoKernelError
from aotmm.problem import (
    ACTIVATIONS,
    DTYPE_CODES,
    GROUPED,
    LEAKY_SLOPE,
    PRODUCT_QUANTITIES,
    STATED_QUANTITIES,
    USUAL_GROUP,
    WORKSPACE_LIMIT,
)
from aotmm.runtime.c_interface import OK, CError, CInterface
from aotmm.runtime.tuning import CDevice, COrigin, CTable, Origin, c_table

if TYPE_CHECKING:
    from aotmm.pack.schema import Kernel
    from aotmm.pack.table import Table

(
    FITS,
    OTHER_TYPES,
    BROKEN_GUARD,
    TOO_MUCH_SHARED,
    TOO_MANY_BLOCKS,
    NO_PRODUCT,
    NO_SPLIT,
    TOO_MUCH_WORKSPACE,
    OTHER_ORDER,
) = range(9)
COPY_A, COPY_B, COPY_C = 1, 2, 4
# Fields of Problem: their C fields, and their values by the number that C has for them.
_STRIDES = {
    "strides_a": ("stride_am", "stride_ak"),
    "strides_b": ("stride_bk", "stride_bn"),
    "strides_c": ("stride_cm", "stride_cn"),
    "batch_strides": ("stride_az", "stride_bz", "stride_cz"),
    "bias_strides": ("stride_bias_z", "stride_bias_m", "stride_bias_n"),
    "scale_strides": ("stride_scale_a", "stride_scale_b"),
    "block_strides_a": ("stride_block_az", "stride_block_am", "stride_block_ak"),
    "block_strides_b": ("stride_block_bz", "stride_block_bk", "stride_block_bn"),
}
_CODES: dict[str, tuple[Any, ...]] = {
    "activation": tuple(ACTIVATIONS),
    "grouped": tuple(GROUPED),
    **dict.fromkeys(("dtype_a", "dtype_b", "dtype_c"), DTYPE_CODES),
    **dict.fromkeys(("allow_tf32", "fast_accum", "batch_invariant"), (False, True)),
}
# By stride: the size that it equals in a matrix without gaps between its lines.
_SIZE_OF = {"stride_am": "K", "stride_ak": "M", "stride_bk": "N", "stride_bn": "K", "stride_cm": "N", "stride_cn": "M"}


class CProblem(Structure):
    """aotmm_problem."""

    _fields_ = [
        *((name, c_int64) for name in PRODUCT_QUANTITIES[:STATED_QUANTITIES]),
        ("slope", c_float),
        *((name, c_int32) for name in ("dtype_a", "dtype_b", "dtype_c")),
    ]


class CPlan(Structure):
    """aotmm_plan."""

    _fields_ = [
        *((name, c_uint32) for name in ("kernel", "split", "copies", "grid", "group_m", "pdl", "measured")),
        ("workspace_bytes", c_uint64),
        *((name, c_int64) for name in ("cost", "panel_m", "panel_n")),
    ]


class CEvaluation(Structure):
    """aotmm_evaluation."""

    _fields_ = [("reason", c_int32), ("guard", c_uint32), ("found", c_int64), ("plan", CPlan)]


class CTorchError(Structure):
    """torch_error of native/torch_ops.h: the kind of failure and the error."""

    _fields_ = [("kind", c_int32), ("error", CError)]


class _CLauncher(Structure):
    _fields_ = [
        ("abi", c_uint32),
        ("problem_bytes", c_uint32),
        ("kernel_count", c_uint32),
        ("arch", c_char_p),
        ("kernels", c_void_p),
        ("products", c_void_p),
        ("check", CFUNCTYPE(c_int, POINTER(CProblem), POINTER(CDevice), c_uint64, c_uint32, POINTER(CEvaluation))),
        ("select", CFUNCTYPE(c_int, POINTER(CProblem), POINTER(CDevice), c_uint64, POINTER(CPlan))),
        ("device", CFUNCTYPE(c_int, c_int, POINTER(CDevice))),
        ("origin", CFUNCTYPE(c_int, POINTER(CDevice), POINTER(COrigin))),
        ("plan", CFUNCTYPE(c_int, POINTER(CProblem), c_int, c_uint64, POINTER(CPlan))),
        ("run", CFUNCTYPE(c_int, POINTER(CPlan), POINTER(CProblem), c_int, c_void_p, c_void_p)),
        ("matmul", CFUNCTYPE(c_int, POINTER(CProblem), c_int, c_void_p)),
        ("retune", CFUNCTYPE(c_int, POINTER(CTable))),
        ("preload", CFUNCTYPE(c_int, c_int)),
        ("load", CFUNCTYPE(c_int, POINTER(CPlan), POINTER(CProblem), c_int)),
        ("last_error", CFUNCTYPE(POINTER(CError))),
    ]


@dataclass(frozen=True, slots=True)
class Problem:
    """One product, a batch of equal ones, or a grouped one, as `aotmm_problem` of launcher.h describes it.

    C (batch, M, N) = activation(scale_a * scale_b * (A (batch, M, K) @ B (batch, K, N)) + bias). Pointers are device
    addresses, strides count elements: (row, column) of one matrix, and from one matrix of A, B, C to the next. Block
    scales are those of launcher.h: (matrix, row, block of K) of A and (matrix, block of K, columns) of B.
    """

    M: int
    N: int
    K: int
    strides_a: tuple[int, int]
    strides_b: tuple[int, int]
    strides_c: tuple[int, int]
    dtype_a: str
    dtype_b: str
    dtype_c: str
    activation: str = "none"
    a_ptr: int = 0
    b_ptr: int = 0
    c_ptr: int = 0
    allow_tf32: bool = False
    fast_accum: bool = False
    batch_invariant: bool = False
    grouped: str = "none"
    offsets_ptr: int = 0
    group_rows: int = 0
    expected_rows: int = 0
    batch: int = 1
    batch_strides: tuple[int, int, int] = (0, 0, 0)
    bias_ptr: int = 0
    bias_strides: tuple[int, int, int] = (0, 0, 1)
    scale_a_ptr: int = 0
    scale_b_ptr: int = 0
    scale_strides: tuple[int, int] = (0, 0)
    stride_scale_bz: int = 0
    block_scale_a_ptr: int = 0
    block_scale_b_ptr: int = 0
    block_strides_a: tuple[int, int, int] = (0, 0, 0)
    block_strides_b: tuple[int, int, int] = (0, 0, 0)
    block_columns: int = 0
    slope: float = LEAKY_SLOPE

    @classmethod
    def from_c(cls, problem: CProblem) -> Problem:
        """Return a C problem as a value."""
        fields = {name: getattr(problem, name) for name, *_ in CProblem._fields_}
        for name, strides in _STRIDES.items():
            fields[name] = tuple(fields.pop(stride) for stride in strides)
        for name, values in _CODES.items():
            fields[name] = values[fields[name]]
        return cls(**fields)

    def to_c(self) -> CProblem:
        """Return it for the C interface."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        for name, strides in _STRIDES.items():
            fields.update(zip(strides, fields.pop(name), strict=True))
        for name, values in _CODES.items():
            fields[name] = values.index(fields[name])
        return CProblem(**fields)


@lru_cache(maxsize=1024)
def _read_only(problem: Problem) -> CProblem:
    """Return a problem for functions that only read it: tuning launches a few hundred of them again and again."""
    return problem.to_c()


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to compute a product: `aotmm_plan` of launcher.h.

    Attributes:
        kernel: number of the product or partial.
        split: slices of K, 1 for a product.
        copies: operands in the workspace: COPY_A | COPY_B | COPY_C.
        grid: blocks of `kernel`, for a whole panel.
        group_m: rows of tiles of C that are computed together.
        pdl: may start before the previous work on the stream ends.
        measured: `cost` was measured for this very shape, else it is predicted.
        workspace_bytes: device memory that running it needs.
        cost: ns.
        panel_m, panel_n: rows and columns of C that are computed at a time; 0 for all.
    """

    kernel: int
    split: int = 1
    copies: int = 0
    grid: int = 0
    group_m: int = USUAL_GROUP
    pdl: bool = False
    measured: bool = False
    workspace_bytes: int = 0
    cost: int = 0
    panel_m: int = 0
    panel_n: int = 0

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the steps of a panel, in order: "copy A", "copy B", "product" or "partial" and "reduce", "copy C".

        Copies of A and B by one kernel are one launch. A copy of A or B that the previous panel made is not made again.
        """
        copies = [f"copy {name}" for bit, name in enumerate("ABC") if self.copies >> bit & 1]
        before = [name for name in copies if name != "copy C"]
        main = ["product"] if self.split == 1 else ["partial", "reduce"]
        return (*before, *main, *copies[len(before) :])

    @property
    def order(self) -> str:
        """Return the order of its tiles, for people."""
        return f"tiles in groups of {self.group_m} rows" if self.group_m > 1 else "tiles row by row"

    @classmethod
    def from_c(cls, plan: CPlan) -> Plan:
        """Return a C plan as a value."""
        fields = {name: getattr(plan, name) for name, *_ in CPlan._fields_}
        return cls(**fields | {name: bool(fields[name]) for name in ("pdl", "measured")})

    def to_c(self) -> CPlan:
        """Return it for the C interface."""
        return CPlan(*(getattr(self, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of selection for one kernel: the best plan with it, or why it does not fit.

    `same_types` tells whether it has the problem's types and epilogue, so that the reason is another one.
    """

    kernel: Kernel
    same_types: bool
    rejected: str | None
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Selection:
    """The plan for a problem, and the evaluation of every kernel of the pack, in the pack's order."""

    chosen: Evaluation | None
    evaluations: tuple[Evaluation, ...]

    def __str__(self) -> str:
        lines = ["no kernel fits"]
        if self.chosen is not None:
            lines = [f"{self.chosen.kernel.name}: {_described(self.chosen.plan)}"]
        for other in self.evaluations:
            if other.same_types and other is not self.chosen:
                why = other.rejected or f"fits too, {_described(other.plan)}"
                lines.append(f"  {other.kernel.name}: {why}")
        return "\n".join(lines)


class Launcher(CInterface["Kernel"]):
    """The functions of one launcher library. It is thread-safe."""

    def __init__(self, library: ctypes.CDLL, arch: str, kernels: Callable[[], tuple[Kernel, ...]]) -> None:
        """Wrap the launcher of pack `arch` in `library`; `kernels` reads the pack's list when it is needed."""
        super().__init__(library, "aotmm_launcher", arch, _CLauncher, kernels)
        if self._c.problem_bytes != ctypes.sizeof(CProblem):
            raise ArtifactError(
                f"the library of pack {arch} takes problems of {self._c.problem_bytes} bytes, this version of aotmm "
                f"makes {ctypes.sizeof(CProblem)}; build the pack again"
            )

    def device(self, ordinal: int) -> CDevice:
        """Return the facts of an existing device. Raises DriverError."""
        facts = CDevice()
        self._raise(self._c.device(ordinal, byref(facts)))
        return facts

    def origin(self, device: CDevice) -> Origin:
        """Return the tuning table that selection on `device` goes by. Needs no GPU. Raises ValueError."""
        origin = COrigin()
        self._raise(self._c.origin(byref(device), byref(origin)))
        return Origin.from_c(origin)

    def check(
        self, problem: Problem, device: CDevice, kernel: int, workspace_limit: int = WORKSPACE_LIMIT
    ) -> Evaluation:
        """Return the best plan with kernel number `kernel` and a workspace of at most that many bytes, or why not.

        Needs no GPU. Raises ValueError.
        """
        found = CEvaluation()
        self._raise(self._c.check(byref(_read_only(problem)), byref(device), workspace_limit, kernel, byref(found)))
        entry = self.kernels[kernel]
        return Evaluation(
            kernel=entry,
            same_types=found.reason not in (OTHER_TYPES, NO_PRODUCT),
            rejected=_reason(entry, found, problem),
            plan=Plan.from_c(found.plan) if found.reason == FITS else None,
        )

    def select(self, problem: Problem, device: CDevice, workspace_limit: int = WORKSPACE_LIMIT) -> Plan:
        """Return the best plan with a workspace of at most that many bytes. Raises NoKernelError, ValueError."""
        plan = CPlan()
        self._raise(self._c.select(byref(_read_only(problem)), byref(device), workspace_limit, byref(plan)))
        return Plan.from_c(plan)

    def explain(self, problem: Problem, device: CDevice, workspace_limit: int = WORKSPACE_LIMIT) -> Selection:
        """Return the selection for `problem` on `device`; needs no GPU. Raises ValueError for negative sizes."""
        numbers = range(len(self.kernels))
        evaluations = tuple(self.check(problem, device, number, workspace_limit) for number in numbers)
        try:
            plan = self.select(problem, device, workspace_limit)
        except NoKernelError:
            return Selection(None, evaluations)
        chosen = replace(evaluations[plan.kernel], rejected=None, plan=plan)
        return Selection(chosen, (*evaluations[: plan.kernel], chosen, *evaluations[plan.kernel + 1 :]))

    def plan(self, problem: Problem, ordinal: int, workspace_limit: int) -> Plan:
        """Return the best plan on device `ordinal`. Raises NoKernelError, DriverError, ValueError."""
        plan = CPlan()
        self._raise(self._c.plan(byref(_read_only(problem)), ordinal, workspace_limit, byref(plan)))
        return Plan.from_c(plan)

    def run(self, plan: Plan, problem: Problem, ordinal: int, stream: int, workspace: int = 0) -> None:
        """Launch `plan` with device memory at address `workspace`.

        Of the plan only kernel, split, copies, group_m, pdl, workspace_bytes, panel_m and panel_n count.

        Raises:
            NoKernelError: the plan does not fit the problem. DriverError, ValueError.
        """
        self._raise(self._c.run(byref(plan.to_c()), byref(_read_only(problem)), ordinal, stream, workspace))

    def matmul(self, problem: Problem, ordinal: int, stream: int) -> None:
        """Select a plan without a workspace and launch it. Raises as `plan`."""
        self._raise(self._c.matmul(byref(_read_only(problem)), ordinal, stream))

    def launch(self, kernel: int, problem: Problem, ordinal: int, stream: int) -> None:
        """Launch kernel number `kernel`, a product, after checking its guards. Raises as `run`."""
        self.run(Plan(kernel), problem, ordinal, stream)

    def retune(self, table: Table) -> None:
        """Select by `table` alone from now on, in every thread, scaled on other devices than its own.

        Models that it lacks stay as they were for its device.
        """
        self._raise(self._c.retune(byref(c_table(table, self.kernels))))

    def preload(self, ordinal: int) -> None:
        """Load every kernel that fits device `ordinal`. Raises DriverError."""
        self._raise(self._c.preload(ordinal))

    def load(self, plan: Plan, problem: Problem, ordinal: int) -> None:
        """Load the kernels that `run` launches for this plan. Raises as `run`."""
        self._raise(self._c.load(byref(plan.to_c()), byref(_read_only(problem)), ordinal))

    def _raise(self, status: int) -> None:
        if status != OK:
            self.fail()


def _described(plan: Plan | None) -> str:
    if plan is None:
        return ""
    how = "measured" if plan.measured else "predicted"
    panels = f" in panels of {plan.panel_m} x {plan.panel_n}" if plan.panel_m else ""
    grid = f"grid of {plan.grid} blocks, {plan.order}"
    return f"{' + '.join(plan.steps)}{panels}, {grid}, {plan.cost / 1000:.2f} us {how}"


def _reason(kernel: Kernel, found: CEvaluation, problem: Problem) -> str | None:
    value = found.found
    if found.reason == BROKEN_GUARD:
        guard = kernel.guards[found.guard]
        words = {
            "equals": f"not {guard.operand}",
            "multiple_of": f"not divisible by {guard.operand}",
            "below": f"not below {guard.operand}",
            "at_least": f"below {guard.operand}",
        }
        size = _SIZE_OF.get(guard.value)
        if guard.relation == "multiple_of" and size is not None and getattr(problem, size) == value:
            # the user knows, and could change, the size
            return f"{size}={value}, which is {guard.value} too, is {words['multiple_of']}"
        return f"{guard.value}={value} is {words[guard.relation]}"
    reasons = {
        OTHER_TYPES: f"it is for {kernel.dtype_a} x {kernel.dtype_b} -> {kernel.dtype_c}, epilogue {kernel.epilogue}",
        TOO_MUCH_SHARED: f"needs {kernel.shared_bytes} B of shared memory per block, the device has {value} B",
        TOO_MANY_BLOCKS: f"would need {value} blocks of {kernel.threads} threads, which is more than a grid can have",
        NO_PRODUCT: f"it is a {kernel.role}, which other kernels' plans launch",
        NO_SPLIT: "K is not split: fewer than 4 steps along K, more tiles than the device computes at once, "
        "or no kernel that reduces to C",
        TOO_MUCH_WORKSPACE: f"needs {value} B of device memory to work in",
        OTHER_ORDER: f"adds up another way than batch_invariant asks for: {kernel.order}, K "
        + ("in slices" if kernel.role == "partial" or kernel.config.slices > 1 else "as a whole")
        if problem.batch_invariant
        else "adds slices of K one after another, for batch_invariant alone",
    }
    return reasons.get(found.reason)
