"""Variants of the kernel in `kernels.py`, compiled, and integer operands for them: the interpreters' own tests."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aotmm.target import target
from tests.emulators import core, gfx90a, numerics, sm80
from tests.emulators.core import Array
from tests.emulators.kernels import matmul

_TRITON = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "tf32": "fp32", "fp8e4": "u8", "int8": "i8", "int32": "i32"}
ADDRESSES = {"A": 1 << 44, "B": 2 << 44, "C": 3 << 44}
UNIT = ("sak", "sbn", "scn")  # strides that kernels are told to be 1


@dataclass(frozen=True)
class Variant:
    """One specialisation, whose operands are row-major.

    Attributes:
        split: how many pieces of K are added to C atomically.
        switch: whether a run-time argument chooses an activation.
        aligned: pointers, rows and K are multiples of 16 elements.
        options: of Triton's compiler, beside warps and stages.
    """

    dtype: str = "fp16"
    out: str = "fp16"
    tile: tuple[int, int, int] = (64, 64, 32)
    split: int = 1
    order: str = "relaxed"
    switch: bool = False
    precision: str = "ieee"
    aligned: bool = True
    warps: int = 4
    stages: int = 2
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Image:
    """A compiled variant: its bytes, the kernel's symbol, dynamic shared memory, and threads of a block."""

    variant: Variant
    arch: str
    data: bytes
    symbol: str
    shared: int
    threads: int


@functools.cache
def image(variant: Variant, arch: str) -> Image:
    """`variant`, compiled for "gfx90a" or "sm80"."""
    row = target(arch)
    signature = dict.fromkeys(matmul.arg_names, "i64") | dict.fromkeys(("M", "N", "K", "act"), "i32")
    operand, out = f"*{_TRITON[variant.dtype]}", f"*{_TRITON[variant.out]}"
    signature |= {"a_ptr": operand, "b_ptr": operand, "c_ptr": out}
    constants: dict[str, object] = {
        **dict(zip(("BM", "BN", "BK"), variant.tile, strict=True)),
        "SPLIT": variant.split,
        "SWITCH": variant.switch,
        "CAST": variant.dtype,
        "ACC": tl.int32 if variant.dtype == "int8" else tl.float32,
        "PREC": variant.precision,
        "SEM": variant.order,
        **dict.fromkeys(UNIT, 1),
        **({} if variant.switch else {"act": 0}),
    }
    signature |= dict.fromkeys(constants, "constexpr")
    names = ("a_ptr", "b_ptr", "c_ptr", "saz", "sam", "sbz", "sbk", "scz", "scm", "K") if variant.aligned else ()
    attributes = {(matmul.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    with tempfile.TemporaryDirectory(prefix="aotmm-triton-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = triton.compile(
            ASTSource(matmul, signature, constants, attributes),
            target=GPUTarget(row.backend, 80 if arch == "sm80" else arch, 32 if arch == "sm80" else 64),
            options={"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
            | dict(variant.options),
        )
    meta = compiled.metadata
    data = compiled.asm["cubin" if arch == "sm80" else "hsaco"]
    return Image(variant, arch, data, meta.name, meta.shared, (32 if arch == "sm80" else 64) * variant.warps)


@dataclass
class Problem:
    """The operands of a launch, as they may be altered before it.

    Attributes:
        c: what has to come out.
        memory: A, B and C as they lie in memory: rows of whole 16 elements, or as they are.
        modes: how a kernel may use each.
        parameters: (value, type) in the order of the kernel's.
    """

    grid: core.Size
    c: Array
    memory: dict[str, Array]
    modes: dict[str, str]
    addresses: dict[str, int]
    parameters: list[tuple[int, str]]

    @property
    def buffers(self) -> core.Buffers:
        """What the interpreter gets."""
        return [(name, array, self.addresses[name], self.modes[name]) for name, array in self.memory.items()]

    def complaints(self, stats: core.Stats) -> list[str]:
        """What is wrong with C: elements, and bytes that were not stored or must not be."""
        rows, cols = self.c.shape[1:]
        found, size = self.memory["C"][:, :rows, :cols], self.c.itemsize
        stores = stats.stores["C"].reshape(*self.memory["C"].shape[:2], -1)
        inside, beside = stores[:, :, : cols * size], stores[:, :, cols * size :]
        wrong = int((found.view(f"u{size}") != self.c.view(f"u{size}")).sum())
        once = bool((inside == 1).all()) or (self.modes["C"] == "rw" and bool((inside > 0).all()))
        checks = {f"{wrong} wrong elements": not wrong, "not every element is stored once": once}
        checks["bytes beside C are stored"] = not beside.any()
        return [complaint for complaint, right in checks.items() if not right]


def problem(variant: Variant, m: int, n: int, k: int, *, batch: int = 1, act: int = 0) -> Problem:
    """Integer operands of a launch whose result is exact in any order, partial sums of pieces included.

    K is made a multiple of 16 where a guard of the variant says so.
    """
    k = -(-k // 16) * 16 if variant.aligned else k
    bits = 11 if variant.split > 1 and variant.out == "fp16" else 24
    signed = variant.switch
    a, b, c = numerics.integer_inputs(
        m, n, k, variant.dtype, variant.out, batch=(batch,), signed=signed, accumulator_bits=bits
    )
    if act:
        exact = numerics.decode(c, variant.out)
        c = numerics.encode(np.where(exact >= 0, exact, exact * {1: 0.0, 2: 0.5}[act] + 0.0), variant.out)
    memory = {name: _lying(array, variant) for name, array in (("A", a), ("B", b), ("C", np.zeros_like(c)))}
    strides: dict[str, int] = {}
    for row, name in (("sa", "A"), ("sb", "B"), ("sc", "C")):
        last = "k" if row == "sb" else "m"
        strides |= {f"{row}z": memory[name].shape[1] * memory[name].shape[2], f"{row}{last}": memory[name].shape[2]}
    parameters: list[tuple[int, str]] = [*((ADDRESSES[name], "*") for name in "ABC")]
    parameters += [(size, "i32") for size in (m, n, k)] + [(stride, "i64") for stride in strides.values()]
    parameters += [(act, "i32")] if variant.switch else []
    grid = (-(-m // variant.tile[0]) * -(-n // variant.tile[1]), variant.split, batch)
    modes = {"A": "r", "B": "r", "C": "w1" if variant.split == 1 else "rw"}
    return Problem(grid, c, memory, modes, dict(ADDRESSES), parameters)


def _lying(matrices: Array, variant: Variant) -> Array:
    batch, rows, cols = matrices.shape
    width = -(-cols // 16) * 16 if variant.aligned else cols
    found = np.zeros((batch, rows, width), matrices.dtype)
    found[:, :, :cols] = matrices
    return found


def run(
    compiled: Image, task: Problem, *, shared: int | None = None, budget: int = core.MAX_INSTRUCTIONS
) -> core.Stats:
    """Executes `task`, perhaps with another amount of shared memory. Raises Fault."""
    launch: core.Launch = sm80.launch if compiled.arch == "sm80" else gfx90a.launch
    return launch(
        compiled.data,
        compiled.symbol,
        task.grid,
        (compiled.threads, 1, 1),
        task.parameters,
        compiled.shared if shared is None else shared,
        task.buffers,
        max_instructions=budget,
    )
