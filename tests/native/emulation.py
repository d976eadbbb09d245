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
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from aotmm.errors import AotmmError
from aotmm.manifest import Kernel
from aotmm.problem import DTYPES
from aotmm.runtime.launcher import Problem
from aotmm.runtime.pack import open_pack
from aotmm.target import target

SHARED = Path(__file__).parents[2].parent / "shared"
ARCHS = ("sm80", "gfx90a")
SPARSE_BYTES = 1 << 30
MAP_NORESERVE = 0x4000  # Source: mmap(2), Linux; Python has it from 3.13 on
STORAGE: dict[str, Any] = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32, "fp8e5": np.uint8}

Array = np.ndarray[Any, np.dtype[Any]]
P = ParamSpec("P")
R = TypeVar("R")


# ---------------------------------------------------------------------------------------------- the interpreters
def emulators(name: str) -> Any:
    """Module `name` of the interpreters; they are not part of this repository but may lie beside it."""
    if str(SHARED) not in sys.path:
        sys.path.append(str(SHARED))
    return importlib.import_module(f"emulators.{name}")


def missing(arch: str) -> str | None:
    """What this machine lacks to execute images of `arch`, None if nothing."""
    if not (SHARED / "emulators").is_dir():
        return "the interpreters are not beside the checkout, in ../shared/emulators"
    core, fake = emulators("core"), emulators("fake_driver")
    try:
        fake.compiler()
        (core.find_objdump if arch == "gfx90a" else core.find_nvdisasm)()
    except (core.ToolMissing, fake.CompilerMissing) as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------------------ processes
@functools.cache
def _workers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=get_context("spawn"))


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
        padding: elements between the rows of a row-major operand (the columns of a column-major one).
        offset: elements from a 16-byte boundary to the first element of each operand.
        step_c: elements from one column of C to the next.
        exact: integers, whose product must come out bit for bit; else normal random numbers and error bounds.
        scale: power of two that random A is multiplied with.
        special: NaN and infinities in A, which must stay in their rows.
    """

    M: int
    N: int
    K: int
    dtype: str = "fp16"
    out: str = "fp16"
    layout: str = "nn"
    activation: str = "none"
    padding: int = 0
    offset: int = 0
    step_c: int = 1
    exact: bool = True
    scale: int = 0
    special: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What executing one product came to; it is right if `complaints` is empty.

    Attributes:
        det, prob: largest error relative to the deterministic and the probabilistic bound.
        mismatches: elements that are not bit-equal to the correctly rounded product.
    """

    product: Product
    kernel: str
    det: float = 0.0
    prob: float = 0.0
    mismatches: int = 0
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in memory: its elements (rows, cols), and the pieces of memory that a kernel may touch."""

    view: Array
    buffers: tuple[Array, ...]

    @property
    def address(self) -> int:
        """Address of the first element, never null."""
        return int(self.view.ctypes.data)

    @property
    def strides(self) -> tuple[int, int]:
        """Row and column stride in elements."""
        rows, cols = self.view.strides
        return rows // self.view.itemsize, cols // self.view.itemsize

    def bytes_of_elements(self) -> Array:
        """The address of every byte of every element."""
        rows, cols = (np.arange(size) * stride for size, stride in zip(self.view.shape, self.view.strides, strict=True))
        elements = rows[:, None, None] + cols[:, None] + np.arange(self.view.itemsize)
        return np.asarray(self.address + elements).ravel()


def place(values: Array, product: Product, *, transposed: bool, step: int = 1) -> Operand:
    """`values` in memory as `product` wants it; what lies between them is NaN in every type.

    Operands of gigabytes take no memory but their elements: each row is a buffer of its own, nothing lies between.
    """
    lines, length = values.shape[::-1] if transposed else values.shape
    size = values.itemsize
    leading = length * step + product.padding
    count = (lines - 1) * leading + (length - 1) * step + 1 if values.size else 1
    sparse = count * size > SPARSE_BYTES
    memory = _reserve(count * size) if sparse else np.full((count + product.offset) * size + 16, 0xFF, np.uint8)
    start = -memory.ctypes.data % 16 + product.offset * size
    buffer = memory[start : start + count * size].view(values.dtype)
    view = as_strided(buffer, (lines, length), (leading * size, step * size))
    view[...] = values.T if transposed else values
    return Operand(view.T if transposed else view, tuple(view) if sparse else (buffer,))


def _reserve(size: int) -> Array:
    """Addresses for `size` bytes, without memory behind them until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


def activate(values: Array, name: str) -> Array:
    """The activation of exact fp32 sums, as fp32 arithmetic gives it."""
    scaled = (np.float32(0.01) * values.astype(np.float32)).astype(np.float64)
    return np.where(values >= 0, values, scaled) if name == "leaky_relu" else values


@dataclass(slots=True)
class Case:
    """The operands of a product, and the problem that the launcher gets."""

    product: Product
    a: Array = field(init=False)
    b: Array = field(init=False)
    operands: dict[str, Operand] = field(init=False)

    def __post_init__(self) -> None:
        numerics, product = emulators("numerics"), self.product
        rng = np.random.default_rng(0)
        if product.exact:
            signed = product.activation != "none"
            self.a, self.b, _ = numerics.integer_inputs(
                product.M, product.N, product.K, product.dtype, product.out, signed=signed
            )
        else:
            storage = DTYPES[product.dtype].storage  # tf32 kernels get all 23 bits and round them
            a, b = rng.standard_normal((product.M, product.K)), rng.standard_normal((product.K, product.N))
            self.a, self.b = numerics.encode(a * 2.0**product.scale, storage), numerics.encode(b, storage)
        if product.special:
            rows = numerics.encode(np.array([np.nan, np.inf, -np.inf]), DTYPES[product.dtype].storage)
            self.a[[3, 5, 7], [1, 0, product.K - 1]] = rows
        c = np.empty((product.M, product.N), STORAGE[product.out])
        c.view(np.uint8)[...] = 0xFF
        self.operands = {
            "A": place(self.a, product, transposed=product.layout[0] == "t"),
            "B": place(self.b, product, transposed=product.layout[1] == "t"),
            "C": place(c, product, transposed=False, step=product.step_c),
        }

    @property
    def problem(self) -> Problem:
        """What the launcher gets."""
        product, (a, b, c) = self.product, self.operands.values()
        storage = DTYPES[product.dtype].storage
        return Problem(
            product.M,
            product.N,
            product.K,
            a.strides,
            b.strides,
            c.strides,
            storage,
            storage,
            product.out,
            product.activation,
            a.address,
            b.address,
            c.address,
            allow_tf32=product.dtype == "tf32",
        )

    def buffers(self) -> list[tuple[str, Array, str]]:
        """All that a kernel may touch: nothing of A and B when K is 0, all of C once."""
        names = "ABC" if self.product.K else "C"
        return [
            (f"{name}{number}", buffer, "w1" if name == "C" else "r")
            for name in names
            for number, buffer in enumerate(self.operands[name].buffers)
        ]

    def judge(self, arch: str) -> Any:
        """The `numerics.Report` on what C holds now."""
        numerics, product = emulators("numerics"), self.product
        with np.errstate(invalid="ignore"):
            sums = numerics.decode(self.a, product.dtype) @ numerics.decode(self.b, product.dtype)
        expected, slack = None, np.zeros(1)
        if product.activation != "none":
            expected = activate(sums, product.activation) if product.exact else np.where(sums >= 0, sums, 0.01 * sums)
        if product.activation != "none" and not product.exact:
            slack = 2.0**-22 * np.abs(sums)  # two roundings in fp32
        if product.dtype == "tf32" and not product.exact:
            slack = slack + 2.0**-9 * np.abs(sums)  # operands are cut to 10 bits, which errs to one side
        return numerics.check(
            self.operands["C"].view,
            self.a,
            self.b,
            dtype=product.dtype,
            out=product.out,
            exact=product.exact,
            flushes=arch == "gfx90a",
            u_acc=numerics.U_NEAREST,
            expected=expected,
            slack=slack,
        )

    def stray_stores(self, stores: dict[str, Array]) -> int:
        """Bytes of C that were not stored exactly once, and bytes beside it that were stored."""
        elements, stray = self.operands["C"].bytes_of_elements(), 0
        for number, buffer in enumerate(self.operands["C"].buffers):
            wanted = np.zeros(buffer.nbytes, np.uint8)
            inside = elements - buffer.ctypes.data
            wanted[inside[(inside >= 0) & (inside < buffer.nbytes)]] = 1
            stray += int((stores[f"C{number}"] != wanted).sum())
        return stray


# ----------------------------------------------------------------------------------------------------- the driver
class Emulator:
    """A pack's launcher and a fake driver, both fresh. Only in a worker process; one at a time per backend."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """`options` are the fake driver's: devices, arch, version, execute, and the interpreter's own."""
        pack = open_pack(folder)
        self.arch = pack.arch
        self.driver = emulators("fake_driver").FakeDriver(target(pack.arch).backend, **options)
        self.launcher = pack.launcher
        self.kernels = pack.manifest.kernels

    def run(self, product: Product, kernel: int | None = None) -> Outcome:
        """Executes `product` with kernel number `kernel`, or with the one that the launcher selects."""
        case = Case(product)
        self.driver.buffers = case.buffers()
        self.driver.launches.clear()
        name = "none"
        try:
            if kernel is None:
                self.launcher.matmul(case.problem, 0, 0)
                kernel = self.kernels.index(self.selected(case.problem))
            else:
                self.launcher.launch(kernel, case.problem, 0, 0)
            name = self.kernels[kernel].name
        except AotmmError as error:
            return Outcome(product, name, complaints=(str(error), *self.driver.faults, *self.driver.misuse))
        (launch,) = self.driver.launches
        report = case.judge(self.arch)
        complaints = [*self.driver.faults, *self.driver.misuse]
        if hashlib.sha256(launch.image).hexdigest() != self.kernels[kernel].image.sha256:
            complaints.append("another image than the pack's was launched")
        if stray := case.stray_stores(launch.stats.stores):
            complaints.append(f"{stray} bytes of C's memory are not stored as often as they should be")
        if not report.ok:
            complaints.append(report.message)
        return Outcome(product, name, report.det, report.prob, report.mismatches, tuple(complaints))

    def selected(self, problem: Problem) -> Kernel:
        """The kernel that the launcher takes for `problem` on device 0."""
        chosen = self.launcher.explain(problem, self.launcher.device(0)).chosen
        assert chosen is not None
        return chosen.kernel


def execute(folder: Path, products: list[Product], **options: Any) -> list[Outcome]:
    """What becomes of each product with the kernel that the pack's launcher selects."""
    emulator = Emulator(folder, **options)
    return [emulator.run(product) for product in products]


def execute_kernels(folder: Path, work: list[tuple[int, Product]], **options: Any) -> list[Outcome]:
    """What becomes of each product with the kernel of that number."""
    emulator = Emulator(folder, **options)
    return [emulator.run(product, kernel) for kernel, product in work]
