"""Grouped products in interpreters: operands whose groups lie one behind the other, and what a launch made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aotmm.pack.schema import Kernel
from aotmm.problem import BLOCK_SCALE_K, DTYPES
from aotmm.runtime.launcher import Plan, Problem
from tests.config_sets import Value, config_set, tile
from tests.emulators import numerics
from tests.native.emulation import STORAGE, Array, Emulator, Operand, place
from tests.native.emulation import Product as Placement

# A tile of each form, and what every set gets for its types: generic kernels of both forms.
_FMA: dict[str, Value] = {"archs": ["sm80"], "family": "fma", "dtypes": ["fp32"]}
_ROWS_FP8: dict[str, Value] = {"dtypes": ["fp8e5"], "grouped": "M"}
_HALF: dict[str, Value] = {"dtypes": ["fp16", "bf16"], "outputs": ["fp16", "bf16", "fp32"]}
CONFIGS = config_set(
    tile(64, 64, 32, 2, 4),
    tile(32, 32, 32, 2, 2, dtypes=["fp32", "tf32"], grouped="M", layouts=["nn", "nt"], epilogues=["full"]),
    tile(32, 32, 32, 2, 2, dtypes=["fp32", "tf32"], grouped="K", layouts=["tn"]),
    tile(32, 32, 16, 3, 2, grouped="M", layouts=["nn", "nt"], **_FMA),
    tile(32, 32, 16, 3, 2, grouped="K", layouts=["nt", "tn"], **_FMA),
    tile(32, 32, 128, 2, 2, dtypes=["fp8e5"], block_scales="any"),
    tile(32, 32, 64, 2, 2, epilogues=["full"], outputs=["fp16", "fp32"], **_ROWS_FP8),
    tile(32, 32, 128, 2, 2, block_scales="any", outputs=["fp32"], **_ROWS_FP8),
    tile(32, 32, 32, 2, 2, grouped="M", layouts=["nn", "nt"], epilogues=["full"], **_HALF),
    tile(32, 32, 32, 2, 2, grouped="K", layouts=["tn"], **_HALF),
    dtypes=["fp16", "bf16", "fp8e5", "fp32", "tf32"],
    layouts=["nt"],
    epilogues=["none"],
)


@dataclass(frozen=True, slots=True)
class Grouped:
    """One grouped product of integers, which has to be right bit for bit.

    Attributes:
        grouped: "M" or "K".
        sizes: of the groups along that dimension.
        behind: elements of it that are in no group: NaN in the operands.
        other: M of groups of K, K of groups of rows.
        dtype: input type; "tf32" for fp32 operands that may be rounded to it.
        layout, padding, offset: as in `emulation.Product`.
        bias: "" for none, "vector" for one in each group, "matrix" for one of C's shape.
        room: rows that each group of rows has room for; 0 if they lie one behind the other.
        scales: "" for none, "rows" for one for each row, and each column in each group, or of blocks of K: of as many
            columns of B as the number says.
    """

    grouped: str
    sizes: tuple[int, ...]
    N: int
    other: int
    behind: int = 0
    dtype: str = "fp16"
    out: str = "fp16"
    layout: str = "nt"
    padding: int = 0
    offset: int = 0
    step_c: int = 1
    bias: str = ""
    activation: str = "none"
    room: int = 0
    scales: str | int = ""


class Case:
    """The operands of a grouped product, the problem that the launcher gets, and the bytes that C has to have."""

    def __init__(self, product: Grouped) -> None:
        """Draw integers whose sums are exact in every order; what must not be read or changed is NaN."""
        self.product = product
        ends: Any = np.cumsum(product.sizes)
        begins: Any = ends - product.sizes
        if product.room:
            begins = np.arange(len(product.sizes)) * product.room
            ends = begins + product.sizes
        length = product.room * len(product.sizes) or int(ends[-1]) + product.behind
        self.M, self.K = (length, product.other) if product.grouped == "M" else (product.other, length)
        groups, N = len(product.sizes), product.N
        a, b, _ = numerics.integer_inputs(
            self.M, N, max(self.K, 1), product.dtype, product.out, batch=(groups,), signed=True, accumulator_bits=24
        )
        a = a[:1, :, : self.K]
        b = b[:, : self.K] if product.grouped == "M" else b[:1, : self.K]
        nan = numerics.encode(np.array([np.nan]), product.dtype)[0]
        spans = list(zip(begins, ends, strict=True))
        self.rows = np.concatenate([np.arange(low, high) for low, high in spans])
        if product.grouped == "M":
            a[:, np.setdiff1d(np.arange(self.M), self.rows)] = nan
        else:
            self.rows = np.arange(self.M)
            a[:, :, ends[-1] :], b[:, ends[-1] :] = nan, nan
        results = 1 if product.grouped == "M" else groups
        c = np.full((results, self.M, N), 0, STORAGE[product.out])
        c.view(np.uint8)[...] = 0xFF
        loose = Placement(1, 1, 1, padding=product.padding, offset=product.offset)
        self.operands = {
            "A": place(a, loose, transposed=product.layout[0] == "t"),
            "B": place(b, loose, transposed=product.layout[1] == "t"),
            "C": place(c, loose, transposed=False, step=product.step_c),
        }
        self.ends = np.array(product.sizes if product.room else ends, np.int32)
        exact_a, exact_b = numerics.decode(a, product.dtype), numerics.decode(b, product.dtype)
        exact_a, exact_b = self._scale(np.random.default_rng(1), exact_a, exact_b)
        if product.grouped == "M":
            parts = [exact_a[0, low:high] @ exact_b[group] for group, (low, high) in enumerate(spans)]
            self.want = np.concatenate(parts)[None]
        else:
            self.want = np.stack([exact_a[0, :, low:high] @ exact_b[0, low:high] for low, high in spans])
        self._add_bias(np.random.default_rng(0), spans)
        if product.activation == "relu":
            self.want = np.maximum(self.want, 0)

    def _scale(self, rng: np.random.Generator, a: Array, b: Array) -> tuple[Array, Array]:
        """Draw scales, powers of two, place them amid NaN, and return the operands times theirs."""
        product = self.product
        if not product.scales:
            return a, b
        of_rows = product.scales == "rows"
        groups, wide = len(product.sizes), product.N if of_rows else -(-product.N // int(product.scales))
        blocks = 1 if of_rows else max(1, -(-self.K // BLOCK_SCALE_K))
        matrices = (groups, product.room) if product.room and not of_rows else (1, self.M)
        loose = Placement(1, 1, 1, padding=3, offset=1, gap=2)
        found = []
        for name, shape in (("scale_a", (*matrices, blocks)), ("scale_b", (groups, blocks, wide))):
            values = (2.0 ** rng.integers(-1, 1, shape)).astype(np.float32)
            self.operands[f"block_{name}" * (not of_rows) or name] = place(values, loose, transposed=name == "scale_b")
            found.append(values.astype(float))
        of_a = found[0].reshape(1, self.M, blocks)
        if of_rows:
            return a * of_a, b * found[1]
        of_k = np.arange(self.K) // BLOCK_SCALE_K
        of_n = np.arange(product.N) // int(product.scales)
        return a * of_a[..., of_k], b * found[1][:, of_k][..., of_n]

    def _add_bias(self, rng: np.random.Generator, spans: Sequence[tuple[int, int]]) -> None:
        product = self.product
        self.bias_strides = (0, 0, 1)
        if not product.bias:
            return
        shape = (len(spans), 1, product.N) if product.bias == "vector" else (1, self.M, product.N)
        values = rng.integers(-64, 65, shape).astype(float)
        self.operands["bias"] = bias = place(
            numerics.encode(values, product.out), Placement(1, 1, 1, padding=3, offset=1, gap=2), transposed=False
        )
        batch, rows, cols = bias.strides
        self.bias_strides = (batch, 0, cols) if product.bias == "vector" else (0, rows, cols)
        if product.bias == "vector":
            values = np.concatenate(
                [np.repeat(values[group], high - low, 0) for group, (low, high) in enumerate(spans)]
            )
        self.want = self.want + (
            values[: self.want.shape[1]] if product.bias == "vector" else values[:, : self.want.shape[1]]
        )

    def problem(self, **more: Any) -> Problem:
        """What the launcher gets."""
        product = self.product
        (_, *a), (z_b, *b), (z_c, *c) = (self.operands[name].strides for name in "ABC")
        bias = self.operands.get("bias")
        of_rows = product.grouped == "M"
        fields: dict[str, Any] = {
            "M": self.M,
            "N": product.N,
            "K": self.K,
            "strides_a": tuple(a),
            "strides_b": tuple(b),
            "strides_c": tuple(c),
            "batch": len(product.sizes),
            "batch_strides": (0, z_b if of_rows else 0, 0 if of_rows else z_c),
            **dict.fromkeys(("dtype_a", "dtype_b"), DTYPES[product.dtype].storage),
            "dtype_c": product.out,
            "allow_tf32": product.dtype == "tf32",
            "a_ptr": self.operands["A"].address,
            "b_ptr": self.operands["B"].address,
            "c_ptr": self.operands["C"].address,
            "grouped": product.grouped,
            "offsets_ptr": int(self.ends.ctypes.data),
            "bias_ptr": bias.address if bias else 0,
            "bias_strides": self.bias_strides,
            "activation": product.activation,
            "group_rows": product.room,
        }
        fields |= self._of_scales()
        return Problem(**fields | more)

    def _of_scales(self) -> dict[str, Any]:
        product, operands = self.product, self.operands
        if product.scales == "rows":
            (_, row, _), (group, _, column) = operands["scale_a"].strides, operands["scale_b"].strides
            strides: dict[str, Any] = {"scale_strides": (row, column), "stride_scale_bz": group}
            return strides | {f"{name}_ptr": operands[name].address for name in ("scale_a", "scale_b")}
        if not product.scales:
            return {}
        (group, *of_a), of_b = (operands[f"block_scale_{name}"].strides for name in "ab")
        strides = {"block_strides_a": (group if product.room else 0, *of_a), "block_strides_b": of_b}
        addresses = {f"block_scale_{name}_ptr": operands[f"block_scale_{name}"].address for name in "ab"}
        return strides | addresses | {"block_columns": product.scales}

    def buffers(self, results: str) -> list[tuple[str, Array, str]]:
        """All that a kernel may touch; `results` is the driver's word for what it may do to C."""
        pieces = [("ends", self.ends, "r")]
        for name, operand in self.operands.items():
            pieces += [
                (f"{name}{number}", buffer, results if name == "C" else "r")
                for number, buffer in enumerate(operand.buffers)
            ]
        return pieces

    def complaints(self) -> list[str]:
        """What is wrong with C: other bits than the exact result has, or a change behind the last group or beside C."""
        operand = self.operands["C"]
        got, want = operand.view[:, self.rows], numerics.encode(self.want, self.product.out)
        found = []
        if wrong := int((got != want).sum()):
            found.append(f"{wrong} of {want.size} elements are wrong, the first at {np.argwhere(got != want)[0]}")
        # each row by itself: a selection of rows is a copy, and has other addresses
        rows = [Operand(operand.view[:, row : row + 1], operand.buffers).bytes_of_elements() for row in self.rows]
        for buffer in operand.buffers:
            outside = np.ones(buffer.nbytes, bool)
            for inside in rows:
                at = inside - buffer.ctypes.data
                outside[at[(at >= 0) & (at < buffer.nbytes)]] = False
            if (buffer.view(np.uint8)[outside] != 0xFF).any():
                found.append("memory outside of the groups was changed")
        return found


def able(emulator: Emulator, problem: Problem) -> list[tuple[Kernel, Plan]]:
    """The kernels that take a problem, each with its plan."""
    device = emulator.launcher.device(0)
    found = [emulator.launcher.check(problem, device, number) for number in range(len(emulator.kernels))]
    return [(evaluation.kernel, evaluation.plan) for evaluation in found if evaluation.plan is not None]


def run(
    emulator: Emulator, case: Case, plan: Plan, problem: Problem | None = None, *, results: str = "w1"
) -> list[str]:
    """What is wrong after the launch of a plan, before which C is NaN."""
    for buffer in case.operands["C"].buffers:
        buffer.view(np.uint8)[...] = 0xFF
    emulator.driver.buffers = case.buffers(results)
    emulator.driver.launches.clear()
    emulator.launcher.run(plan, problem or case.problem(), 0, 0)
    faults = [*emulator.driver.faults, *emulator.driver.misuse]
    if len(emulator.driver.launches) != 1:
        faults.append(f"{len(emulator.driver.launches)} launches")
    return faults + case.complaints()


def outcomes(folder: Path, products: Sequence[Grouped]) -> list[tuple[Grouped, dict[str, list[str]]]]:
    """What every kernel that takes a product made of it, by name."""
    emulator = Emulator(folder)
    found = []
    for product in products:
        case = Case(product)
        made = {kernel.name: run(emulator, case, plan) for kernel, plan in able(emulator, case.problem())}
        found.append((product, made))
    return found
