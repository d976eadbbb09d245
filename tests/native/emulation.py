"""Runs products through a pack's launcher on a fake driver, whose launches execute the image in an interpreter.

The fake drivers carry the names of the real ones, so whatever uses one runs in worker processes: `in_worker` calls a
function there, `own_process` makes a test run there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import mmap
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from aotmm.errors import AotmmError, NoKernelError
from aotmm.pack.schema import Kernel
from aotmm.problem import BLOCK_SCALE_K, DTYPES, WORKSPACE_LIMIT
from aotmm.runtime.launcher import Plan, Problem
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from aotmm.timing.correctness import ETA, Epilogue
from tests.build import packs
from tests.emulators import core, fake_driver, gfx90a, numerics, sm80
from tests.native.truth import Judgement, judge, truth

ARCHS = ("sm80", "gfx90a")
BLOCKS = {"blocks": BLOCK_SCALE_K, "block columns": 1}  # columns of B by kinds of block scales
SPARSE_BYTES = 1 << 26
MAP_NORESERVE = 0x4000  # Source: mmap(2), Linux; Python has it from 3.13 on
STORAGE: dict[str, Any] = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32, "int32": np.int32}
FP8_SPECIAL = {"fp8e5": (0x7F, 0x7C, 0xFC)}  # NaN and infinities, which `numerics.encode` saturates

Array = np.ndarray[Any, np.dtype[Any]]
P = ParamSpec("P")
R = TypeVar("R")


# ---------------------------------------------------------------------------------------------- the interpreters
def interpreter(arch: str) -> core.Launch:
    """What executes an image for `arch`, gfx90a or one of 8.x."""
    return sm80.launch if target(arch).backend == "cuda" else gfx90a.launch


def missing(arch: str) -> str | None:
    """What this machine lacks to execute images of `arch`, None if nothing."""
    try:
        fake_driver.compiler()
        (core.find_objdump if target(arch).backend == "hip" else core.find_nvdisasm)()
    except (core.ToolMissingError, fake_driver.CompilerMissingError) as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------------------ processes
@functools.cache
def _workers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        min(os.cpu_count() or 1, 8),
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(packs.session_folder(),),
    )


def _begin(folder: Path) -> None:
    """Lets this worker find what this session built, and what any part of the tests disassembled: both take long."""
    packs.share_folder(folder)
    core.share_listings(packs.ROOT / "build" / "listings")


def submit(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Starts `function` in a worker process."""
    try:
        return _workers().submit(function, *args, **kwargs)
    except BrokenProcessPool:  # a test before this one crashed its worker
        _workers.cache_clear()
        return _workers().submit(function, *args, **kwargs)


def in_worker(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `function` in a worker process."""
    return submit(function, *args, **kwargs).result()


def own_process(test: Callable[P, None]) -> Callable[P, None]:
    """The test, run in a worker process; its arguments travel there by value."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_worker(_run_test, test.__module__, test.__qualname__, args, kwargs)

    return run


def fresh_process(test: Callable[P, None]) -> Callable[P, None]:
    """The test, run in a process that no other test uses: for a driver of its own, or memory that is measured."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(_run_test, test.__module__, test.__qualname__, args, kwargs).result()

    return run


def _run_test(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
    except AssertionError as error:  # only pytest's own process shows the values of an assertion
        lines = traceback.TracebackException.from_exception(error, capture_locals=True).format()
        raise AssertionError("".join(lines)) from None


# ------------------------------------------------------------------------------------------------------- products
@dataclass(frozen=True, slots=True)
class Product:
    """One product to execute and how its operands lie in memory.

    Attributes:
        dtype: the kernel's input type: "tf32" is fp32 operands with allow_tf32.
        slope: of leaky_relu.
        bias: "" for none, "vector" of N, "matrix" of C's shape, "cancelling" for one that leaves rounding errors alone.
        scales: "" for none, "tensor" for one factor each, "rows" for one per row of A and per column of B, "a" or "b"
            for those of one operand. Of blocks of K: "blocks" for one per row of A and per 128 columns of B,
            "block columns" for one per row of A and per column of B.
        batch: how many matrices; `shared` gives all of them the same B, by a batch stride of 0.
        gap: elements between the matrices of a batch, beside the padding.
        padding: elements between the rows of a row-major operand (the columns of a column-major one).
        offset: elements from a 16-byte boundary to the first element of each operand.
        step_c: elements from one column of C to the next.
        exact: integers, whose product must come out bit for bit; else normal random numbers and error bounds.
        scale: power of two that random A is multiplied with.
        special: NaN and infinities in A, which must stay in their rows.
        extreme: the bias has every magnitude that its type has, zeros, infinities and NaN.
    """

    M: int
    N: int
    K: int
    dtype: str = "fp16"
    out: str = "fp16"
    layout: str = "nn"
    activation: str = "none"
    slope: float = 0.125
    bias: str = ""
    scales: str = ""
    batch: int = 1
    shared: bool = False
    gap: int = 0
    padding: int = 0
    offset: int = 0
    step_c: int = 1
    exact: bool = True
    scale: int = 0
    special: bool = False
    extreme: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What executing one product came to; it is right if `complaints` is empty.

    Attributes:
        plan: what was launched, None if nothing was.
        det, prob: largest error relative to the deterministic and the probabilistic bound.
        mismatches: elements that are not bit-equal to the correctly rounded product.
        seconds: what executing it took.
    """

    product: Product
    kernel: str
    plan: Plan | None = None
    det: float = 0.0
    prob: float = 0.0
    mismatches: int = 0
    complaints: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Operand:
    """A batch of matrices in memory: elements (batch, rows, cols), and the pieces of memory that a kernel may touch."""

    view: Array
    buffers: tuple[Array, ...]

    @property
    def address(self) -> int:
        """Address of the first element, never null."""
        return int(self.view.ctypes.data)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Batch, row and column stride in elements."""
        batch, rows, cols = (stride // self.view.itemsize for stride in self.view.strides)
        return batch, rows, cols

    def bytes_of_elements(self) -> Array:
        """The address of every byte of every element."""
        batch, rows, cols = (
            np.arange(size) * stride for size, stride in zip(self.view.shape, self.view.strides, strict=True)
        )
        elements = batch[:, None, None, None] + rows[:, None, None] + cols[:, None] + np.arange(self.view.itemsize)
        return np.asarray(self.address + elements).ravel()


def panels(plan: Plan, product: Product | Problem) -> int:
    """In how many parts a plan computes C."""
    down, across = -(-product.M // (plan.panel_m or product.M)), -(-product.N // (plan.panel_n or product.N))
    return down * across


def place(values: Array, product: Product, *, transposed: bool, step: int = 1) -> Operand:
    """`values` (batch, rows, cols) in memory as `product` wants it; between them is NaN, in int8 -1.

    Large operands take no memory but their elements: each row is a buffer of its own, nothing lies between.
    """
    values = values.swapaxes(1, 2) if transposed else values
    batch, lines, length = values.shape
    size = values.itemsize
    leading = length * step + product.padding
    pitch = lines * leading + product.gap
    count = (batch - 1) * pitch + (lines - 1) * leading + (length - 1) * step + 1 if values.size else 1
    sparse = count * size > SPARSE_BYTES
    memory = _reserve(count * size) if sparse else np.full((count + product.offset) * size + 16, 0xFF, np.uint8)
    start = -memory.ctypes.data % 16 + product.offset * size
    buffer = memory[start : start + count * size].view(values.dtype)
    view = as_strided(buffer, values.shape, (pitch * size, leading * size, step * size))
    view[...] = values
    rows = tuple(row for matrix in view for row in matrix)
    return Operand(view.swapaxes(1, 2) if transposed else view, rows if sparse else (buffer,))


def _reserve(size: int) -> Array:
    """Addresses for `size` bytes, without memory behind them until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


def extremes(shape: tuple[int, ...], dtype: str) -> Array:
    """Values of `dtype` of both signs: half where activations bend, half of every magnitude; zeros, infinities, NaN."""
    count = int(np.prod(shape)) // 4
    magnitudes = np.concatenate(
        [
            np.linspace(0.0, 12.0, count),
            np.geomspace(2 * ETA[dtype], numerics.LARGEST[dtype], count - 2),
            [np.inf, np.nan],
        ]
    )
    values = np.concatenate([magnitudes, -magnitudes])
    return np.resize(values, shape)


@dataclass(slots=True)
class Case:
    """The operands of a product, and the problem that the launcher gets."""

    product: Product
    a: Array = field(init=False)
    b: Array = field(init=False)
    epilogue: Epilogue = field(init=False)
    operands: dict[str, Operand] = field(init=False)
    block_scales: tuple[Array, Array] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        product = self.product
        rng = np.random.default_rng(0)
        self.a, self.b = self._integers() if product.exact else self._random(rng)
        if product.special:
            storage = DTYPES[product.dtype].storage
            values = numerics.encode(np.array([np.nan, np.inf, -np.inf]), storage)
            self.a[:, [3, 5, 7], [1, 0, product.K - 1]] = FP8_SPECIAL.get(storage, values)
        c = np.empty((product.batch, product.M, product.N), STORAGE[product.out])
        c.view(np.uint8)[...] = 0xFF
        self.operands = {
            "A": place(self.a, product, transposed=product.layout[0] == "t"),
            "B": place(self.b[:1] if product.shared else self.b, product, transposed=product.layout[1] == "t"),
            "C": place(c, product, transposed=False, step=product.step_c),
        }
        self._place_epilogue(rng)

    def _integers(self) -> tuple[Array, Array]:
        product = self.product
        a, b, _ = numerics.integer_inputs(
            product.M,
            product.N,
            product.K,
            product.dtype,
            product.out,
            batch=(product.batch,),
            signed=product.activation != "none" or product.dtype == "int8",
            accumulator_bits=31 if product.dtype == "int8" else 24 - 2 * (product.scales in BLOCKS),
        )
        return (a, np.repeat(b[:1], product.batch, axis=0)) if product.shared else (a, b)

    def _random(self, rng: np.random.Generator) -> tuple[Array, Array]:
        product = self.product
        storage = DTYPES[product.dtype].storage  # tf32 kernels get all 23 bits and round them
        a = rng.standard_normal((product.batch, product.M, product.K)) * 2.0**product.scale
        b = rng.standard_normal((product.batch, product.K, product.N))
        if product.shared:
            b[:] = b[0]
        if storage == "int8":
            a, b = np.clip(np.round(40 * a), -128, 127), np.clip(np.round(40 * b), -128, 127)
        return numerics.encode(a, storage), numerics.encode(b, storage)

    def _place_epilogue(self, rng: np.random.Generator) -> None:
        """Bias and scales: integers and powers of two where the result has to be exact; NaN lies around them."""
        product = self.product
        bias = scale_a = scale_b = None
        loose = replace(product, padding=3, offset=1, gap=2)
        shape = (product.batch, 1 if product.bias == "vector" else product.M, product.N)
        if product.bias and product.bias != "cancelling":
            bias = rng.integers(-64, 65, shape).astype(float) if product.exact else rng.standard_normal(shape)
            if product.extreme:
                bias = extremes(shape, product.out)
            bias[:] = bias if product.bias == "matrix" else bias[0]
        if product.scales in BLOCKS:
            self._place_block_scales(rng)
        elif product.scales:
            count_a, count_b = (1, 1) if product.scales == "tensor" else (product.M, product.N)
            scale_a, scale_b = (
                (2.0 ** rng.integers(-2, 1, size) if product.exact else rng.uniform(0.5, 2, size)).astype(np.float32)
                for size in ((1, count_a, 1), (1, 1, count_b))
            )
            scale_a = None if product.scales == "b" else scale_a
            scale_b = None if product.scales == "a" else scale_b
        if product.bias == "cancelling":
            bias = -numerics.decode(self.a, product.dtype) @ numerics.decode(self.b, product.dtype)
            for factor in (scale_a, scale_b):
                bias = bias if factor is None else bias * factor.astype(float)
        if bias is not None:
            stored = numerics.encode(bias, product.out)
            bias = numerics.decode(stored, product.out)
            self.operands["bias"] = place(stored[:1] if product.bias == "vector" else stored, loose, transposed=False)
        if scale_a is not None:
            self.operands["scale_a"] = place(scale_a, loose, transposed=False)
        if scale_b is not None:
            self.operands["scale_b"] = place(scale_b, loose, transposed=False, step=2)
        self.epilogue = Epilogue(
            product.activation,
            product.slope,
            bias,
            None if scale_a is None else scale_a.astype(float),
            None if scale_b is None else scale_b.astype(float),
        )

    def _place_block_scales(self, rng: np.random.Generator) -> None:
        """Block scales of A, whose rows are contiguous, and of B, whose blocks of K are; NaN lies around them."""
        product = self.product
        blocks = max(1, -(-product.K // BLOCK_SCALE_K))
        sizes_ = (product.batch, product.M, blocks), (product.batch, blocks, -(-product.N // BLOCKS[product.scales]))
        loose = replace(product, padding=3, offset=1, gap=2)
        found = [
            (2.0 ** rng.integers(-1, 1, size) if product.exact else rng.uniform(0.5, 2, size)).astype(np.float32)
            for size in sizes_
        ]
        if product.shared:
            found[1][:] = found[1][0]
        for name, values in zip(("block_scale_a", "block_scale_b"), found, strict=True):
            self.operands[name] = place(values, loose, transposed=True)
        self.block_scales = found[0].astype(float), found[1].astype(float)

    @property
    def problem(self) -> Problem:
        """What the launcher gets."""
        product, operands = self.product, self.operands
        a, b, c = (operands[name].strides for name in "ABC")
        storage = DTYPES[product.dtype].storage
        bias, scale_a, scale_b = (operands.get(name) for name in ("bias", "scale_a", "scale_b"))
        per_row = product.scales != "tensor"
        bias_strides = (0, 0, 1)
        if bias is not None:
            bias_strides = (0, 0, bias.strides[2]) if product.bias == "vector" else bias.strides
        return Problem(
            M=product.M,
            N=product.N,
            K=product.K,
            strides_a=a[1:],
            strides_b=b[1:],
            strides_c=c[1:],
            dtype_a=storage,
            dtype_b=storage,
            dtype_c=product.out,
            activation=product.activation,
            a_ptr=operands["A"].address,
            b_ptr=operands["B"].address,
            c_ptr=operands["C"].address,
            allow_tf32=product.dtype == "tf32",
            batch=product.batch,
            batch_strides=(a[0], 0 if product.shared else b[0], c[0]),
            bias_ptr=bias.address if bias else 0,
            bias_strides=bias_strides,
            scale_a_ptr=scale_a.address if scale_a else 0,
            scale_b_ptr=scale_b.address if scale_b else 0,
            scale_strides=(
                scale_a.strides[1] if scale_a and per_row else 0,
                scale_b.strides[2] if scale_b and per_row else 0,
            ),
            slope=product.slope,
            **self._blocks(),
        )

    def _blocks(self) -> dict[str, Any]:
        """The block scales of a problem."""
        if self.product.scales not in BLOCKS:
            return {}
        a, b = (self.operands[f"block_scale_{name}"] for name in "ab")
        return {
            "block_scale_a_ptr": a.address,
            "block_scale_b_ptr": b.address,
            "block_strides_a": a.strides,
            "block_strides_b": (0 if self.product.shared else b.strides[0], *b.strides[1:]),
            "block_columns": BLOCKS[self.product.scales],
        }

    def buffers(self) -> list[tuple[str, Array, str]]:
        """All that a kernel may touch: nothing of A and B when K is 0, all of C once."""
        return [
            (f"{name}{number}", buffer, "w1" if name == "C" else "r")
            for name, operand in self.operands.items()
            if self.product.K or name not in "AB"
            for number, buffer in enumerate(operand.buffers)
        ]

    def judge(self, arch: str) -> Judgement:
        """How far from the truth is what C holds now."""
        product = self.product
        with np.errstate(all="ignore"):
            a, b = numerics.decode(self.a, product.dtype), numerics.decode(self.b, product.dtype)
            x, want, bounds = truth(
                a, b, self.epilogue, dtype=product.dtype, flushes=arch == "gfx90a", block_scales=self.block_scales
            )
            got = numerics.decode(self.operands["C"].view, product.out)
            rounded = numerics.decode(numerics.encode(want, product.out), product.out)
            return judge(got, rounded, want, x, bounds, product.out, self.epilogue)

    def stray_stores(self, launches: list[dict[str, Array]]) -> int:
        """Bytes of C that all launches together did not store exactly once, and bytes beside it that they stored."""
        elements, stray = self.operands["C"].bytes_of_elements(), 0
        for number, buffer in enumerate(self.operands["C"].buffers):
            wanted = np.zeros(buffer.nbytes, np.uint8)
            inside = elements - buffer.ctypes.data
            wanted[inside[(inside >= 0) & (inside < buffer.nbytes)]] = 1
            stored = np.sum([stores[f"C{number}"] for stores in launches], axis=0)
            stray += int((stored != wanted).sum())
        return stray

    def complaints(self, found: Judgement) -> list[str]:
        """What is wrong with a result, if anything."""
        right = found.patterns and (found.mismatches == 0 if self.product.exact else max(found.det, found.prob) <= 1)
        what = (
            f"error/bound {found.det:.3f} (probabilistic {found.prob:.3f}), {found.mismatches} elements not bit-equal"
        )
        pattern = "" if found.patterns else ", NaN or infinities elsewhere"
        return [] if right else [f"{what}{pattern}; worst {found.worst}"]


class Emulator:
    """A pack's launcher and a fake driver, both fresh. Only in a worker process; one at a time per backend."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """`options` are the fake driver's: devices, arch, version, execute, and the interpreter's own."""
        pack = open_pack(folder)
        self.arch = pack.arch
        self.driver = fake_driver.FakeDriver(target(pack.arch).backend, **{"arch": pack.arch} | options)
        self.launcher = pack.launcher
        self.kernels = pack.manifest.kernels

    def copies_both(self, launch: fake_driver.Launch) -> bool:
        """Whether a launch copies two matrices."""
        found = [each for each in self.kernel_of(launch.image).parameters if each.value == "other_M"]
        return any(any(launch.params[each.offset : each.offset + each.bytes]) for each in found)

    def run(self, product: Product, kernel: int | None = None, plan: Plan | None = None) -> Outcome:
        """Executes `product` by `plan`; without one by the best plan with that kernel, or of all."""
        case, begin = Case(product), time.perf_counter()
        name = "none"
        try:
            if plan is None:
                plan = self.plan(case.problem, kernel)
            name = self.kernels[plan.kernel].name
            workspace = self.place(case, plan)
            self.launcher.run(plan, case.problem, 0, 0, workspace)
        except AotmmError as error:
            return Outcome(product, name, complaints=(str(error), *self.driver.faults, *self.driver.misuse))
        launches = self.driver.launches
        found = case.judge(self.arch)
        complaints = [*self.driver.faults, *self.driver.misuse]
        roles = [self.role(launch.image) for launch in launches]
        wanted = [step.partition(" ")[0] for step in plan.steps] * panels(plan, product)
        if plan.panel_m or plan.panel_n:  # some copies are used again
            roles, wanted = ([role for role in steps if role != "copy"] for steps in (roles, wanted))
        elif self.copies_both(launches[0]):
            wanted = wanted[1:]
        if roles != wanted:
            complaints.append(f"images were launched that the plan {plan} does not have")
        mains = [launch.image for launch in launches if self.role(launch.image) in ("product", "partial")]
        if {hashlib.sha256(image).hexdigest() for image in mains} != {self.kernels[plan.kernel].image.sha256}:
            complaints.append("another image than the kernel's was launched")
        executed = [launch.stats.stores for launch in launches if launch.stats is not None]
        if len(executed) < len(launches):
            complaints.append("a launch was not executed")
        elif stray := case.stray_stores(executed):
            complaints.append(f"{stray} bytes of C's memory are not stored as often as they should be")
        complaints += case.complaints(found)
        seconds = time.perf_counter() - begin
        return Outcome(product, name, plan, found.det, found.prob, found.mismatches, tuple(complaints), seconds)

    def plan(self, problem: Problem, kernel: int | None = None) -> Plan:
        """The best plan with that kernel, or of all. Raises NoKernelError."""
        if kernel is None:
            return self.launcher.plan(problem, 0, WORKSPACE_LIMIT)
        verdict = self.launcher.check(problem, self.launcher.device(0), kernel)
        if verdict.plan is None:
            raise NoKernelError(f"{verdict.kernel.name}: {verdict.rejected}")
        return verdict.plan

    def place(self, case: Case, plan: Plan) -> int:
        """Forgets earlier launches and gives the driver the operands and a workspace of NaN; its address."""
        memory = np.full(plan.workspace_bytes + 256, 0xFF, np.uint8)
        start = -memory.ctypes.data % 256
        workspace = memory[start : start + plan.workspace_bytes]
        self.driver.buffers = [*case.buffers(), *([("workspace", workspace, "rw")] if plan.workspace_bytes else [])]
        self.driver.launches.clear()
        return int(workspace.ctypes.data) if plan.workspace_bytes else 0

    def kernel_of(self, image: bytes) -> Kernel:
        """The first kernel that has this image."""
        digest = hashlib.sha256(image).hexdigest()
        return next(kernel for kernel in self.kernels if kernel.image.sha256 == digest)

    def role(self, image: bytes) -> str:
        """The role of the kernel that has this image."""
        return self.kernel_of(image).role

    def selected(self, problem: Problem) -> Kernel:
        """The kernel that the launcher takes for `problem` on device 0 without a workspace."""
        return self.kernels[self.launcher.select(problem, self.launcher.device(0), 0).kernel]


def execute(folder: Path, products: list[Product], **options: Any) -> list[Outcome]:
    """What becomes of each product with the kernel that the pack's launcher selects."""
    emulator = Emulator(folder, **options)
    return [emulator.run(product) for product in products]


def execute_kernels(folder: Path, work: list[tuple[int, Product]], **options: Any) -> list[Outcome]:
    """What becomes of each product with the kernel of that number."""
    emulator = Emulator(folder, **options)
    return [emulator.run(product, kernel) for kernel, product in work]


def execute_plans(folder: Path, work: list[tuple[Plan, Product]], **options: Any) -> list[Outcome]:
    """What becomes of each product by that plan."""
    emulator = Emulator(folder, **options)
    return [emulator.run(product, plan=plan) for plan, product in work]
