"""A pack's launcher library, seen from Python: the C interface of `launcher.h` and its answers as values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from functools import cached_property

from aotmm.errors import AotmmError, ArtifactError, DriverError, NoKernelError
from aotmm.kernel import Kernel
from aotmm.problem import ABI, ACTIVATIONS, DTYPE_CODES, LEAKY_SLOPE, STATED_VALUES, VALUES

OK, INVALID, NO_KERNEL, NO_DRIVER, DRIVER = range(5)
FITS, OTHER_TYPES, BROKEN_PROMISE, TOO_MUCH_SHARED, TOO_MANY_BLOCKS = range(5)


class CProblem(Structure):
    """aotmm_problem."""

    _fields_ = [
        *((name, c_int64) for name in VALUES[:STATED_VALUES]),
        ("slope", c_float),
        *((name, c_int32) for name in ("dtype_a", "dtype_b", "dtype_c")),
    ]


class CDevice(Structure):
    """aotmm_device."""

    _fields_ = [("multiprocessors", c_int32), ("shared_bytes", c_int32)]


class _CVerdict(Structure):
    _fields_ = [
        ("reason", c_int32),
        ("promise", c_uint32),
        ("found", c_int64),
        ("cost", c_int64),
        ("grid", c_uint32),
        ("waves", c_uint32),
    ]


class CError(Structure):
    """aotmm_error."""

    _fields_ = [
        ("status", c_int32),
        ("code", c_int32),
        ("device", c_int32),
        ("call", c_char * 40),
        ("text", c_char * 512),
    ]


class CTorchError(Structure):
    """torch_error of native/torch_ops.c: what kind of failure, and which."""

    _fields_ = [("kind", c_int32), ("error", CError)]


class _CLauncher(Structure):
    _fields_ = [
        ("abi", c_uint32),
        ("problem_bytes", c_uint32),
        ("kernel_count", c_uint32),
        ("arch", c_char_p),
        ("kernels", c_void_p),
        ("check", CFUNCTYPE(c_int, POINTER(CProblem), POINTER(CDevice), c_uint32, POINTER(_CVerdict))),
        ("select", CFUNCTYPE(c_int, POINTER(CProblem), POINTER(CDevice), POINTER(c_uint32))),
        ("device", CFUNCTYPE(c_int, c_int, POINTER(CDevice))),
        ("matmul", CFUNCTYPE(c_int, POINTER(CProblem), c_int, c_void_p)),
        ("launch", CFUNCTYPE(c_int, c_uint32, POINTER(CProblem), c_int, c_void_p)),
        ("preload", CFUNCTYPE(c_int, c_int)),
        ("last_error", CFUNCTYPE(POINTER(CError))),
    ]


@dataclass(frozen=True, slots=True)
class Problem:
    """One product, or a batch of equal ones, as `aotmm_problem` of launcher.h describes it.

    C (batch, M, N) = activation(scale_a * scale_b * (A (batch, M, K) @ B (batch, K, N)) + bias). Pointers are device
    addresses, strides count elements: (row, column) of one matrix, and from one matrix of A, B, C to the next.
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
    batch: int = 1
    batch_strides: tuple[int, int, int] = (0, 0, 0)
    bias_ptr: int = 0
    bias_strides: tuple[int, int, int] = (0, 0, 1)
    scale_a_ptr: int = 0
    scale_b_ptr: int = 0
    scale_strides: tuple[int, int] = (0, 0)
    slope: float = LEAKY_SLOPE

    def to_c(self) -> CProblem:
        """The same as the C interface takes it."""
        return CProblem(
            a_ptr=self.a_ptr,
            b_ptr=self.b_ptr,
            c_ptr=self.c_ptr,
            M=self.M,
            N=self.N,
            K=self.K,
            **dict(zip(("stride_am", "stride_ak"), self.strides_a, strict=True)),
            **dict(zip(("stride_bk", "stride_bn"), self.strides_b, strict=True)),
            **dict(zip(("stride_cm", "stride_cn"), self.strides_c, strict=True)),
            **dict(zip(("stride_az", "stride_bz", "stride_cz"), self.batch_strides, strict=True)),
            **dict(zip(("stride_bias_z", "stride_bias_m", "stride_bias_n"), self.bias_strides, strict=True)),
            **dict(zip(("stride_scale_a", "stride_scale_b"), self.scale_strides, strict=True)),
            batch=self.batch,
            bias_ptr=self.bias_ptr,
            scale_a_ptr=self.scale_a_ptr,
            scale_b_ptr=self.scale_b_ptr,
            activation=tuple(ACTIVATIONS).index(self.activation),
            allow_tf32=self.allow_tf32,
            fast_accum=self.fast_accum,
            slope=self.slope,
            dtype_a=DTYPE_CODES.index(self.dtype_a),
            dtype_b=DTYPE_CODES.index(self.dtype_b),
            dtype_c=DTYPE_CODES.index(self.dtype_c),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What selection says of one kernel: why it does not fit (None if it does), its cost, grid and waves.

    `same_types` tells whether it is for the problem's types and epilogue, so that a promise is what it lacks.
    """

    kernel: Kernel
    same_types: bool
    rejected: str | None
    cost: int
    grid: int
    waves: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel for a problem, and the verdict on every kernel of the pack, in the pack's order."""

    chosen: Verdict | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        chosen = self.chosen
        lines = ["no kernel fits"]
        if chosen is not None:
            lines = [f"{chosen.kernel.name}: grid of {chosen.grid} blocks, {chosen.waves} waves, cost {chosen.cost}"]
        for verdict in self.verdicts:
            if verdict.same_types and verdict is not chosen:
                lines.append(f"  {verdict.kernel.name}: {verdict.rejected or f'fits too, cost {verdict.cost}'}")
        return "\n".join(lines)


class Launcher:
    """The functions of one launcher library. Safe from any thread."""

    def __init__(self, library: ctypes.CDLL, arch: str, kernels: Callable[[], tuple[Kernel, ...]]) -> None:
        """The launcher of pack `arch` in `library`; `kernels` reads the pack's list when it is asked for."""
        entry = getattr(library, f"aotmm_launcher_{arch}", None)
        if entry is None:
            raise ArtifactError(f"the library of pack {arch} has no aotmm_launcher_{arch}; build the pack again")
        entry.restype = POINTER(_CLauncher)
        self._library = library  # stays loaded as long as its functions are held
        self._table = entry()
        self._c = self._table.contents
        self._read_kernels = kernels
        found = (self._c.abi, self._c.problem_bytes)
        if found != (ABI, ctypes.sizeof(CProblem)):
            raise ArtifactError(
                f"the library of pack {arch} has (ABI, problem bytes) {found}, this version of aotmm "
                f"{(ABI, ctypes.sizeof(CProblem))}; build the pack again"
            )

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels by number. Raises ArtifactError if the list is not that of the library."""
        kernels = self._read_kernels()
        if len(kernels) != self._c.kernel_count:
            raise ArtifactError(
                f"the manifest of pack {self._c.arch.decode()} has {len(kernels)} kernels, its library "
                f"{self._c.kernel_count}; build the pack again"
            )
        return kernels

    @property
    def address(self) -> int:
        """Address of the C function table, for the torch library."""
        return ctypes.cast(self._table, c_void_p).value or 0

    def device(self, ordinal: int) -> CDevice:
        """Facts of a device that is there. Raises DriverError."""
        facts = CDevice()
        self._raise(self._c.device(ordinal, byref(facts)))
        return facts

    def explain(self, problem: Problem, device: CDevice) -> Selection:
        """What selection makes of `problem` on `device`; needs no GPU. Raises ValueError for negative sizes."""
        c_problem, chosen = problem.to_c(), c_uint32()
        verdicts = []
        for number, kernel in enumerate(self.kernels):
            verdict = _CVerdict()
            self._raise(self._c.check(byref(c_problem), byref(device), number, byref(verdict)))
            verdicts.append(
                Verdict(
                    kernel=kernel,
                    same_types=verdict.reason != OTHER_TYPES,
                    rejected=_reason(kernel, verdict),
                    cost=verdict.cost,
                    grid=verdict.grid,
                    waves=verdict.waves,
                )
            )
        status = self._c.select(byref(c_problem), byref(device), byref(chosen))
        if status == NO_KERNEL:
            return Selection(None, tuple(verdicts))
        self._raise(status)
        return Selection(verdicts[chosen.value], tuple(verdicts))

    def matmul(self, problem: Problem, ordinal: int, stream: int) -> None:
        """Selects and launches. Raises NoKernelError, DriverError, ValueError."""
        self._raise(self._c.matmul(byref(problem.to_c()), ordinal, stream))

    def launch(self, kernel: int, problem: Problem, ordinal: int, stream: int) -> None:
        """Launches kernel number `kernel` after checking its promises. Raises as `matmul`."""
        self._raise(self._c.launch(kernel, byref(problem.to_c()), ordinal, stream))

    def preload(self, ordinal: int) -> None:
        """Loads every kernel that fits device `ordinal`. Raises DriverError."""
        self._raise(self._c.preload(ordinal))

    def _raise(self, status: int) -> None:
        if status != OK:
            raise error_of(self._c.last_error().contents)


def error_of(error: CError) -> AotmmError | ValueError:
    """The exception for a failure that the C side recorded."""
    text = error.text.decode(errors="replace")
    if error.status == INVALID:
        return ValueError(text)
    if error.status == NO_KERNEL:
        return NoKernelError(text)
    return DriverError(text, call=error.call.decode(), code=error.code, device=error.device)


def _reason(kernel: Kernel, verdict: _CVerdict) -> str | None:
    if verdict.reason == OTHER_TYPES:
        return f"it is for {kernel.dtype_a} x {kernel.dtype_b} -> {kernel.dtype_c}, epilogue {kernel.epilogue}"
    if verdict.reason == BROKEN_PROMISE:
        promise = kernel.promises[verdict.promise]
        words = {
            "equals": f"not {promise.operand}",
            "multiple_of": f"not divisible by {promise.operand}",
            "below": f"not below {promise.operand}",
        }
        return f"{promise.value}={verdict.found} is {words[promise.relation]}"
    if verdict.reason == TOO_MUCH_SHARED:
        return f"needs {kernel.shared_bytes} B of shared memory per block, the device has {verdict.found} B"
    if verdict.reason == TOO_MANY_BLOCKS:
        return f"would need {verdict.found} blocks of {kernel.threads} threads, which is more than a grid can have"
    return None
