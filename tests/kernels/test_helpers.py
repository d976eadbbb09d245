"""The kernels that work for others, as they are shipped: partial sums, their reduction, and copies.

Each is executed by itself, without the launcher, so that what passes between two kernels is looked at. What is judged
is every bit of the result, and that every byte of it is stored exactly once and nothing else is touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aotmm.kernels import BLOCK_SCALED
from aotmm.pack.schema import Guard, Kernel
from aotmm.problem import ACTIVATIONS, BLOCK_SCALE_K, DTYPES, SPLITS
from aotmm.runtime.pack import open_pack
from tests.emulators import numerics
from tests.native.emulation import ARCHS, STORAGE, Array, Operand, Product, interpreter, place, submit
from tests.samples import code_in

Counted = Callable[[str, Iterable[str]], None]

PLAIN = Product(0, 0, 0)  # where place() looks for paddings
ODD = replace(PLAIN, padding=3, offset=1)
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def launched(
    arch: str,
    kernel: Kernel,
    image: bytes,
    values: dict[str, int],
    programs: int,
    operands: dict[str, Operand],
    written: str,
) -> list[str]:
    """Executes a kernel; what is wrong with the memory that it touched. `values` must keep its guards."""
    assert [guard for guard in kernel.guards if not kept(guard, values)] == []
    last = kernel.parameters[-1]
    block = bytearray(last.offset + last.bytes)
    for parameter in kernel.parameters:
        data = values.get(parameter.value, 0).to_bytes(parameter.bytes, "little", signed=True)
        block[parameter.offset : parameter.offset + parameter.bytes] = data
    stats = interpreter(arch)(
        image,
        kernel.symbol,
        (programs, 1, 1),
        (kernel.threads, 1, 1),
        bytes(block),
        kernel.shared_bytes,
        [
            (name, operand.buffers[0], operand.buffers[0].ctypes.data, "w1" if name == written else "r")
            for name, operand in operands.items()
        ],
    )
    result = operands[written]
    wanted = np.zeros(result.buffers[0].nbytes, np.uint8)
    wanted[result.bytes_of_elements() - result.buffers[0].ctypes.data] = 1
    stray = int((stats.stores[written] != wanted).sum())
    return [f"{kernel.name}: {stray} bytes are not stored as often as they should be"] if stray else []


def kept(guard: Guard, values: dict[str, int]) -> bool:
    """Whether `values` keep a guard; what they do not say is 0."""
    value = values.get(guard.value, 0)
    return {
        "equals": value == guard.operand,
        "multiple_of": value % max(guard.operand, 1) == 0,
        "below": value < guard.operand,
        "at_least": value >= guard.operand,
    }[guard.relation]


def differences(kernel: Kernel, got: Array, want: Array) -> list[str]:
    """What is wrong with the bits of a result."""
    wrong = np.argwhere(got.view(BITS[got.itemsize]) != want.view(BITS[want.itemsize]))
    return [f"{kernel.name}: {len(wrong)} wrong elements, the first at {tuple(wrong[0])}"] if len(wrong) else []


def tiles(size: int, block: int) -> int:
    """How many blocks cover `size`."""
    return -(-size // block)


def unset(dtype: str, shape: tuple[int, ...]) -> Array:
    """Sums of slices, fp32 or int32, before any of them is stored: numbers that no right sum has."""
    kind = STORAGE[dtype]
    return np.full(shape, np.nan if dtype == "fp32" else np.iinfo(kind).min, kind)


def strides_of(operand: Operand, row: str, col: str) -> dict[str, int]:
    """The strides of a matrix by the names of their quantities."""
    return {row: operand.strides[1], col: operand.strides[2]}


# ------------------------------------------------------------------------------------------------------- partial sums
def partial_sums(arch: str, kernel: Kernel, image: bytes) -> list[str]:
    """What is wrong with the partial sums of ragged integer products, in slices of equal and of different size."""
    config = kernel.config
    step = {guard.value: guard.operand for guard in kernel.guards if guard.relation == "multiple_of"}
    complaints = []
    for split, steps in ((2, 4), (3, 7)):
        m, n = (2 * size - step.get(name, 1) for name, size in (("M", config.block_m), ("N", config.block_n)))
        k = (steps - 1) * config.block_k + step.get("K", 1)
        bits = 31 if kernel.dtype_c == "int32" else 22 if BLOCK_SCALED in kernel.guards else 24
        a, b, _ = numerics.integer_inputs(m, n, k, kernel.dtype_a, kernel.dtype_c, accumulator_bits=bits)
        sums = unset(kernel.dtype_c, (split, 2 * config.block_m, 2 * config.block_n))
        operands = {
            "A": place(a[None], replace(PLAIN, padding=32), transposed=kernel.layout[0] == "t"),
            "B": place(b[None], replace(PLAIN, padding=32), transposed=kernel.layout[1] == "t"),
            "sums": place(sums, PLAIN, transposed=False),
        }
        values = {
            "a_ptr": operands["A"].address,
            "b_ptr": operands["B"].address,
            "M": m,
            "N": n,
            "K": k,
            "batch": 1,
            "split": split,
            "group_m": 2,
            **strides_of(operands["A"], "stride_am", "stride_ak"),
            **strides_of(operands["B"], "stride_bk", "stride_bn"),
            "workspace_ptr": operands["sums"].address,
            "workspace_stride_z": operands["sums"].strides[0],
            "workspace_stride_m": operands["sums"].strides[1],
            "fast_accum": int(kernel.fast_accum),
            "allow_tf32": int(kernel.dtype_a == "tf32"),
        }
        a, b = numerics.decode(a, kernel.dtype_a), numerics.decode(b, kernel.dtype_b)
        if BLOCK_SCALED in kernel.guards:
            a, b = block_scaled(a, b, operands, values)
        complaints += launched(arch, kernel, image, values, 4 * split, operands, "sums")
        for part in range(split):
            ks = slice(*(number * steps // split * config.block_k for number in (part, part + 1)))
            want = (a[:, ks] @ b[ks]).astype(sums.dtype)
            complaints += differences(kernel, operands["sums"].view[part, :m, :n].copy(), want)
    return complaints


def block_scaled(a: Array, b: Array, operands: dict[str, Operand], values: dict[str, int]) -> tuple[Array, Array]:
    """A and B times scales of their blocks, 1 or 2 at random, which become operands."""
    rng, (m, k), n = np.random.default_rng(1), a.shape, b.shape[1]
    blocks = tiles(k, BLOCK_SCALE_K)
    of_a, of_b = (2.0 ** rng.integers(0, 2, shape).astype(np.float32) for shape in ((m, blocks), (blocks, n)))
    operands["block_scale_a"] = place(of_a[None], ODD, transposed=True)
    operands["block_scale_b"] = place(of_b[None], ODD, transposed=False)
    values |= {
        "block_scale_a_ptr": operands["block_scale_a"].address,
        "block_scale_b_ptr": operands["block_scale_b"].address,
        **strides_of(operands["block_scale_a"], "stride_block_am", "stride_block_ak"),
        **strides_of(operands["block_scale_b"], "stride_block_bk", "stride_block_bn"),
        "block_columns": 1,
    }
    return a * of_a.repeat(BLOCK_SCALE_K, 1)[:, :k], b * of_b.repeat(BLOCK_SCALE_K, 0)[:k]


# ---------------------------------------------------------------------------------------------------------- reduction
def reduced(arch: str, kernel: Kernel, image: bytes) -> list[str]:
    """What is wrong with sums of partial sums: in order, for any number of slices and a batch, with an epilogue."""
    config = kernel.config
    rng, complaints = np.random.default_rng(0), []
    aligned, integer = kernel.layout != "any", kernel.dtype_a == "int32"
    m, n = 2 * config.block_m + 1, 2 * config.block_n + (8 if aligned else 3)
    for split, batch, finished in ((2, 3, False), (7, 1, False), (16, 2, not integer), (SPLITS[-1], 1, False)):
        shape = split, batch, m, n
        sums = unset(kernel.dtype_a, (split, batch, tiles(m, 16) * 16, tiles(n, 16) * 16))
        if integer:  # up to the ends of int32, beyond which sums wrap around
            sums[..., :m, :n] = rng.integers(-(2**31), 2**31, shape)
        else:
            sums[..., :m, :n] = rng.integers(-8, 9, shape) if finished else rng.standard_normal(shape)
        want = np.zeros((batch, m, n), sums.dtype)
        for part in sums[..., :m, :n]:
            want += part
        c = np.empty((batch, m, n), STORAGE[kernel.dtype_c])
        c.view(np.uint8)[...] = 0xFF
        operands = {
            "sums": place(sums.reshape(-1, *sums.shape[2:]), PLAIN, transposed=False),
            "C": place(c, replace(PLAIN, padding=24), transposed=False)
            if aligned
            else place(c, ODD, transposed=split == 2, step=3),
        }
        values = {
            "c_ptr": operands["C"].address,
            "M": m,
            "N": n,
            "batch": batch,
            "split": split,
            "stride_cz": operands["C"].strides[0],
            **strides_of(operands["C"], "stride_cm", "stride_cn"),
            "workspace_ptr": operands["sums"].address,
            "workspace_stride_z": operands["sums"].strides[0],
            "workspace_stride_m": operands["sums"].strides[1],
        }
        if finished:
            factors, bias = 2.0 ** rng.integers(-1, 2, m).astype(np.float32), rng.integers(-9, 9, (batch, m, n))
            operands["scale_a"] = place(factors[None, :, None], ODD, transposed=False)
            operands["bias"] = place(numerics.encode(bias.astype(float), kernel.dtype_c), ODD, transposed=True)
            values |= {
                "scale_a_ptr": operands["scale_a"].address,
                "stride_scale_a": operands["scale_a"].strides[1],
                "bias_ptr": operands["bias"].address,
                "bias_rank": 2,
                "stride_bias_z": operands["bias"].strides[0],
                **strides_of(operands["bias"], "stride_bias_m", "stride_bias_n"),
                "activation": tuple(ACTIVATIONS).index("relu"),
            }
            want = np.maximum(want * factors[:, None] + bias, 0)
        programs = batch * tiles(m, config.block_m) * tiles(n, config.block_n)
        complaints += launched(arch, kernel, image, values, programs, operands, "C")
        right = numerics.encode(want.astype(float), kernel.dtype_c)
        complaints += differences(kernel, operands["C"].view.copy(), right)
    return complaints


# ------------------------------------------------------------------------------------------------------------- copies
def copied(arch: str, kernel: Kernel, image: bytes) -> list[str]:
    """What is wrong with copies of two matrices, in tiles whole and ragged, between places that start where they may.

    They are the first operand of a launch, or the other.
    """
    config, rng, complaints = kernel.config, np.random.default_rng(0), []
    word = max((guard.operand for guard in kernel.guards if guard.relation == "multiple_of"), default=1)
    sizes = [(config.block_m + 3 * word, config.block_n + 5 * word)]
    if config.block_m == 1:  # tiles go over the ends of rows: of long ones, short ones, and columns
        sizes += [(70, 43), (config.block_n + 3, 1), (1, config.block_n + 3), (5, config.block_n)]
    anywhere = replace(PLAIN, padding=3 * word, offset=word, gap=7 * word)
    size = DTYPES[kernel.dtype_a].bytes
    orders = ("nn", "nt", "tn", "tt") if kernel.layout == "any" else (kernel.layout,)
    for (m, n), order, (mine, none) in itertools.product(sizes, orders, (("", "other_"), ("other_", ""))):
        source = rng.integers(0, 2 ** (8 * size), (2, m, n), BITS[size])
        step = 2 if kernel.layout == "any" else 1
        operands = {
            "source": place(source, anywhere, transposed=order[0] == "t", step=step),
            "copy": place(~source, replace(anywhere, padding=5 * word), transposed=order[1] == "t", step=step),
        }
        strides = strides_of(operands["source"], "stride_sm", "stride_sn")
        strides |= strides_of(operands["copy"], "stride_dm", "stride_dn")
        copied = {"source_ptr": operands["source"].address, "dest_ptr": operands["copy"].address, "M": m, "N": n}
        copied |= {"batch": 2, "stride_sz": operands["source"].strides[0], "stride_dz": operands["copy"].strides[0]}
        values = {f"{mine}{name}": value for name, value in (copied | strides).items()}
        values |= {f"{none}{name}": stride for name, stride in strides.items()}
        down, across = (1, m * n) if config.block_m == 1 else (m, n)
        programs = 2 * tiles(down, config.block_m) * tiles(across, config.block_n)
        complaints += launched(arch, kernel, image, values, programs, operands, "copy")
        complaints += differences(kernel, operands["copy"].view.copy(), source)
    return complaints


CHECKS: dict[str, Callable[[str, Kernel, bytes], list[str]]] = {
    "partial": partial_sums,
    "reduce": reduced,
    "copy": copied,
}


def images(folder: Path, role: str) -> Iterator[tuple[Kernel, bytes]]:
    """The kernels of a pack that have `role`, with what a GPU would run."""
    code = code_in(folder)
    for kernel in open_pack(folder).manifest.kernels:
        if kernel.role == role:
            yield kernel, code(kernel.image)


@pytest.mark.parametrize("role", CHECKS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_image_is_right(arch: str, role: str, interpreted_pack: Callable[[str], Path], counted: Counted) -> None:
    """Every image of the default pack that works for others does what it is for, bit by bit."""
    found = list(images(interpreted_pack(arch), role))
    futures = [submit(CHECKS[role], arch, kernel, image) for kernel, image in found]
    assert [complaint for future in futures for complaint in future.result()] == []
    assert futures
    counted(arch, [kernel.name for kernel, _ in found])
