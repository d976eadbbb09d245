"""Samples -> inputs of the network: the launcher's formula and what the network sees of a plan, for many plans at once.

The launcher computes the same (`native/time_model.c`); a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aotmm.errors import ArtifactError
from aotmm.pack.schema import Kernel
from aotmm.pack.table import ShapeTimes, Table
from aotmm.pack.time_model import LINE_BYTES, SPLIT_A, SPLIT_B, SUMS, Constants, Device, constants, kernel_inputs
from aotmm.problem import DTYPES
from aotmm.target import Target
from aotmm.tune.cases import TUNABLE

_SUM_BYTES, _OUTPUT_BYTES = 4, 2  # of an element of partial sums, and of C: measured products write fp16 or bf16
_Array = NDArray[np.float64]
Key = tuple[str, int, bool]  # config, element_bytes, fast_accum


class Gpu(NamedTuple):
    """The GPU that was measured."""

    target: Target
    device: Device


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples without copies, one row each, ordered by product.

    Attributes:
        product: number of the product, ascending.
        key: number of the config in `keys`.
        inputs: `time_model.INPUTS`, (n, inputs).
        formula: time by the formula in ns. ns: that was measured.
    """

    keys: list[Key]
    product: NDArray[np.int64]
    key: NDArray[np.int64]
    inputs: _Array
    formula: _Array
    ns: _Array


def samples(kernels: Sequence[Kernel], gpu: Gpu, shapes: Iterable[ShapeTimes]) -> Samples:
    """Return the samples of `shapes` whose configs are among those of `kernels`."""
    found: dict[Key, Kernel] = {}
    for kernel in kernels:
        if kernel.role in ("product", "partial") and kernel.dtype_a in TUNABLE:
            found.setdefault((kernel.config_name, DTYPES[kernel.dtype_a].bytes, kernel.fast_accum), kernel)
    keys = sorted(found)
    reduce = next((constants(kernel, *gpu) for kernel in kernels if kernel.role == "reduce"), None)
    table = {key: _row(found[key], constants(found[key], *gpu), number) for number, key in enumerate(keys)}
    products, rows = [], []
    for number, shape in enumerate(shapes):
        described = _described(shape)
        for sample in shape.times:
            key = (sample.config_name, shape.element_bytes, shape.fast_accum)
            if key in table and not sample.copies:
                products.append(number)
                rows.append((*described, *table[key], sample.split, sample.pdl, sample.ns))
    columns = dict(zip(_COLUMNS, np.array(rows, dtype=float).reshape(-1, len(_COLUMNS)).T, strict=True))
    inputs, formula = _inputs(columns, gpu, reduce)
    kernel_part = np.array([kernel_inputs(found[key]) for key in keys])
    numbers = columns["key"].astype(np.int64)
    return Samples(
        keys,
        np.array(products, dtype=np.int64),
        numbers,
        np.concatenate([kernel_part[numbers], inputs], axis=1),
        formula,
        columns["ns"],
    )


def predicted(found: Samples, table: Table) -> _Array:
    """Return the times that the network of `table` predicts for samples, in ns.

    Raises:
        ArtifactError: it has none.
    """
    network = table.network
    if network is None:
        raise ArtifactError(f"the table of {table.device} has no network; fit one: aotmm tune --refit --out FILE")
    hidden = np.maximum(0, found.inputs @ np.array(network.inputs) + np.array(network.bias))
    shifts = {model.key: model.shift for model in table.models}
    own = np.array([shifts.get(key, 0.0) for key in found.keys])
    times: _Array = found.formula * np.exp(hidden @ np.array(network.outputs) + network.shift + own[found.key])
    return times


_SHAPE_COLUMNS = ("M", "N", "K", "by_columns_a", "by_columns_b", "bytes", "lines_a", "lines_b")
_KERNEL_COLUMNS = ("key", "block_m", "block_n", "block_k", "num_ctas", "partial", "alternates", *Constants._fields)
_COLUMNS = (*_SHAPE_COLUMNS, *_KERNEL_COLUMNS, "split", "pdl", "ns")


def _row(kernel: Kernel, c: Constants, number: int) -> tuple[float, ...]:
    """Return the values of `_KERNEL_COLUMNS`."""
    config, partial = kernel.config, kernel.role == "partial"
    blocks = config.block_m, config.block_n, config.block_k
    return (number, *blocks, kernel.num_ctas, partial, kernel.family == "pingpong", *c)


def _described(shape: ShapeTimes) -> tuple[float, ...]:
    """Return the values of `_SHAPE_COLUMNS`."""
    M, N, K = shape.M, shape.N, shape.K
    by_columns_a = shape.layout[0] == "t" and min(M, K) > 1  # one row or column is contiguous both ways
    by_columns_b = shape.layout[1] == "t" and min(K, N) > 1
    lines_a = _split_lines(shape.offset_a, *((M, K) if by_columns_a else (K, M)), shape)
    lines_b = _split_lines(shape.offset_b, *((K, N) if by_columns_b else (N, K)), shape)
    return M, N, K, by_columns_a, by_columns_b, shape.element_bytes, lines_a, lines_b


def _split_lines(offset: int, pitch: int, lines: int, shape: ShapeTimes) -> float:
    """Return the part of a matrix's lines that begin within a cache line."""
    rest = pitch * shape.element_bytes % LINE_BYTES
    if rest == 0 or lines == 1:
        return float(offset % LINE_BYTES != 0)
    least = rest & -rest
    return 1.0 if offset % least else 1 - least / LINE_BYTES


def _inputs(d: dict[str, _Array], gpu: Gpu, reduce: Constants | None) -> tuple[_Array, _Array]:
    """Return the inputs of problems and plans, and the formula: see launcher.h."""
    M, N, K, split, pdl = d["M"], d["N"], d["K"], d["split"], d["pdl"]
    down, across = np.ceil(M / d["block_m"]), np.ceil(N / d["block_n"])
    units = down * across * split
    waves = units / np.maximum(1, gpu.device.multiprocessors // d["num_ctas"])
    rounds = np.ceil(waves)
    steps = np.ceil(np.ceil(K / d["block_k"]) / split)
    line = d["block_k"] * d["bytes"]
    rows, cols = M / down, N / across
    bytes_a, bytes_b = rows * (1 + SPLIT_A * d["lines_a"]) * line, cols * (1 + SPLIT_B * d["lines_b"]) * line
    fixed = d["base_ns"] + rounds * d["ns_per_tile"]
    multiply = rounds * steps * d["ns_per_k_step"]
    take = rounds * steps * (bytes_a / d["num_ctas"] + bytes_b) * d["ns_per_taken_byte"]
    load = units * steps * (bytes_a + bytes_b) * d["ns_per_loaded_byte"]
    read = ((M * K + K * N) * d["bytes"] + M * N * _OUTPUT_BYTES) * d["ns_per_byte"]
    sums = units * d["block_m"] * d["block_n"] * (_SUM_BYTES * SUMS) * d["ns_per_byte"]
    if reduce is not None:
        sums = sums + reduce.base_ns + M * N * (_SUM_BYTES * split + _OUTPUT_BYTES) * reduce.ns_per_byte
    sums = np.where(d["partial"] > 0, sums, 0)
    time = fixed + np.sqrt(multiply**2 + take**2 + load**2 + read**2) + sums
    wave, half = np.minimum(waves, 1), (waves <= 0.5) * 1.0  # noqa: PLR2004 - half of the multiprocessors
    other_half = (waves <= 1) - half
    odd = d["alternates"] * (rounds % 2) * np.minimum(1, 2 / rounds)
    clustered = d["num_ctas"] > 1
    size = np.log2(time)
    problem = (
        *(np.log2(each) for each in (M, N, K)),
        *(d[name] for name in ("by_columns_a", "by_columns_b", "lines_a", "lines_b")),
    )
    plan = (
        *(size, multiply / time, take / time, read / time, load / time, sums / time, fixed / time),
        *(wave, np.minimum(waves, 2), waves - (rounds - 1), 1 / rounds, odd, half, waves <= 1),
        *(np.log2(steps), np.log2(split)),
        *(rows / d["block_m"], cols / d["block_n"], clustered * d["lines_a"], clustered * d["lines_b"]),
    )
    launch = (1, half, other_half, size, other_half * size, wave)
    columns = [*problem, *plan, *(pdl * each for each in launch)]
    return np.stack([np.broadcast_to(each, M.shape) for each in columns], axis=1).astype(float), time
