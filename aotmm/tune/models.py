"""Samples -> parts of the launcher's formula and inputs of its network, for many plans at once.

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
from aotmm.pack.table import Model, ShapeTimes, Table
from aotmm.pack.time_model import (
    FITTED,
    KERNEL_INPUTS,
    LINE_BYTES,
    PDL_INPUTS,
    PLAN_INPUTS,
    PROBLEM_INPUTS,
    SECTOR_BYTES,
    SHIFTED_K,
    SPLIT_A,
    SPLIT_B,
    SUMS,
    Constants,
    Device,
    Network,
    beside,
    busy,
    concurrent_tiles,
    constants,
    kernel_inputs,
)
from aotmm.target import Target
from aotmm.tune.cases import TUNABLE

_SUM_BYTES = 4  # of an element of partial sums
_ALIGNED = 16  # bytes; tensor maps begin at multiples
_Array = NDArray[np.float64]
Key = tuple[str, int, str]  # config, element_bytes, kind


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
        parts: of the time by the formula with constants of the data sheet, in ns, (n, 7): those of `FITTED`, in this
            order, memory, and the sums of slices.
        plain: inputs of the network that do not depend on the constants, by name, (n,) each; also "pdl".
        kernels: `KERNEL_INPUTS` of each config, (keys, inputs).
        ns: time that was measured.
    """

    keys: list[Key]
    product: NDArray[np.int64]
    key: NDArray[np.int64]
    parts: _Array
    plain: dict[str, _Array]
    kernels: _Array
    ns: _Array


def samples(kernels: Sequence[Kernel], gpu: Gpu, shapes: Iterable[ShapeTimes], *, shifted: bool = True) -> Samples:
    """Return the samples of `shapes` whose configs are among those of `kernels`.

    Args:
        shifted: whether steps of the kernels for Hopper may begin before the first element along K.
    """
    found: dict[Key, Kernel] = {}
    for kernel in kernels:
        if kernel.role in ("product", "partial") and kernel.dtype_a in TUNABLE:
            found.setdefault((kernel.config_name, *kernel.types), kernel)
    keys = sorted(found)
    reduce = next((constants(kernel, *gpu) for kernel in kernels if kernel.role == "reduce"), None)
    table = {key: _row(found[key], gpu, number) for number, key in enumerate(keys)}
    shifted = shifted and gpu.target.fast_accum  # no other arch has such kernels
    products, rows = [], []
    for number, shape in enumerate(shapes):
        described = _described(shape, shifted=shifted)
        for sample in shape.times:
            key = (sample.config_name, shape.element_bytes, shape.kind)
            if key in table and not sample.copies:
                products.append(number)
                rows.append((*described, *table[key], sample.split, sample.pdl, sample.ns))
    columns = dict(zip(_COLUMNS, np.array(rows, dtype=float).reshape(-1, len(_COLUMNS)).T, strict=True))
    parts, plain = _parts(columns, gpu, reduce)
    return Samples(
        keys,
        np.array(products, dtype=np.int64),
        columns["key"].astype(np.int64),
        parts,
        plain,
        np.array([kernel_inputs(found[key]) for key in keys]).reshape(len(keys), len(KERNEL_INPUTS)),
        columns["ns"],
    )


def inputs(found: Samples, factors: _Array) -> tuple[_Array, _Array]:
    """Return `INPUTS` (n, inputs) and the times by the formula (n,) in ns, by `factors` (keys, FITTED) of constants."""
    every = np.ones((len(found.keys), found.parts.shape[1]))
    every[:, : factors.shape[1]] = factors
    parts = found.parts * every[found.key]
    time = formula(parts)
    base, tile, multiply, take, load, read, sums = (parts / time[:, None]).T
    size, plain = np.log2(time), found.plain
    known = plain | {"log2 time": size, "multiply": multiply, "take": take, "read": read, "load": load, "sums": sums}
    known |= {"reread": np.minimum(1, plain["ns of reread"] / time)}
    known |= {"fixed": base + tile, "log2 time, the other half": size * plain["the other half"]}
    columns = [known[name] for name in (*PROBLEM_INPUTS, *PLAN_INPUTS)]
    columns += [known[name] * plain["pdl"] for name in PDL_INPUTS]  # that of "pdl" is 1 or 0 either way
    return np.concatenate([found.kernels[found.key], np.stack(columns, axis=1)], axis=1), time


def formula(parts: _Array) -> _Array:
    """Return the times (n,) of `Samples.parts` (n, 7)."""
    time: _Array = parts[:, :2].sum(axis=1) + np.sqrt((parts[:, 2:6] ** 2).sum(axis=1)) + parts[:, 6]
    return time


def predicted(found: Samples, table: Table) -> _Array:
    """Return the times that `table` predicts for samples, in ns. Types without a model have those of the formula.

    Raises:
        ArtifactError: it has none.
    """
    if table.network is None:
        raise ArtifactError(f"the table of {table.device} has no network; fit one: aotmm tune --refit --out FILE")
    times = corrected(found, table.network, table.models_of(found.keys))
    return np.where(without_model(found, table), formula(found.parts), times)


def without_model(found: Samples, table: Table) -> NDArray[np.bool_]:
    """Return which samples (n,) are of types that `table` has no model of: their times are those of the formula."""
    modelled = {model.types for model in table.models}
    return np.array([key[1:] not in modelled for key in found.keys], dtype=bool)[found.key]


def corrected(found: Samples, network: Network, of_keys: Sequence[Model]) -> _Array:
    """Return the times of samples in ns by a network and the model of each of `found.keys`."""
    values, times = inputs(found, np.array([model.factors for model in of_keys]).reshape(-1, len(FITTED)))
    hidden = values @ np.array(network.inputs) + np.array(network.bias)
    hidden += np.array([model.hidden for model in of_keys])[found.key]
    second = np.maximum(0, hidden) @ np.array(network.second) + np.array(network.second_bias)
    shift = network.shift + np.array([model.shift for model in of_keys])[found.key]
    times *= np.exp(np.maximum(0, second) @ np.array(network.outputs) + shift)
    return times


_SPLIT_COLUMNS = ("lines_a", "lines_b", "sectors_a", "sectors_b")
_SHAPE_COLUMNS = ("M", "N", "K", "batch", "by_columns_a", "by_columns_b", "bytes", *_SPLIT_COLUMNS)
_TILE_COLUMNS = ("block_m", "block_n", "block_k", "cluster_m", "cluster_n", "cluster_k")
_KERNEL_COLUMNS = ("key", *_TILE_COLUMNS, "partial", "alternates", "beside", "busy", *Constants._fields)
_COLUMNS = (*_SHAPE_COLUMNS, *_KERNEL_COLUMNS, "split", "pdl", "ns")


def _row(kernel: Kernel, gpu: Gpu, number: int) -> tuple[float, ...]:
    """Return the values of `_KERNEL_COLUMNS`."""
    config, partial = kernel.config, kernel.role == "partial"
    blocks = config.block_m, config.block_n, config.block_k, config.cluster_m, config.cluster_n, config.cluster_k
    sharing = beside(kernel, gpu.target), busy(kernel, gpu.target)
    return (number, *blocks, partial, kernel.family == "pingpong", *sharing, *constants(kernel, *gpu))


def _described(shape: ShapeTimes, *, shifted: bool) -> tuple[float, ...]:
    """Return the values of `_SHAPE_COLUMNS`."""
    M, N, K = shape.M, shape.N, shape.K
    by_columns_a = shape.layout[0] == "t" and min(M, K) > 1  # one row or column is contiguous both ways
    by_columns_b = shape.layout[1] == "t" and min(K, N) > 1
    a = shape.offset_a, *((M, K) if by_columns_a else (K, M))
    b = shape.offset_b, *((K, N) if by_columns_b else (N, K))
    shift = _shift(a, b, shape) if shifted and by_columns_b and not by_columns_a else 0
    a, b = (a[0] - shift, *a[1:]), (b[0] - shift, *b[1:])
    parts = (_split(*each, shape, unit) for unit in (LINE_BYTES, SECTOR_BYTES) for each in (a, b))
    return M, N, K, shape.batch, by_columns_a, by_columns_b, shape.element_bytes, *parts


def _shift(a: tuple[int, int, int], b: tuple[int, int, int], shape: ShapeTimes) -> int:
    """Return the bytes of k_shift (launcher.h) for operands as of `_split`, which both lie along K."""
    if (
        shape.kind == "block_scaled"
        or shape.K < SHIFTED_K
        or any(_pitch(*each[1:], shape) % LINE_BYTES for each in (a, b))
    ):
        return 0
    first, second = (each[0] % LINE_BYTES for each in (a, b))
    if not (first and second) or (first | second) % _ALIGNED:
        return 0
    if (first - second) % SECTOR_BYTES == 0:
        return second if shape.N >= shape.M else first
    return next((each for each in (first, second) if each % SECTOR_BYTES == 0), 0)


def _pitch(pitch: int, lines: int, shape: ShapeTimes) -> int:
    """Return bytes between lines and between matrices, of which all that counts is the largest power of 2 in both."""
    return pitch * shape.element_bytes * (lines > 1) | lines * pitch * shape.element_bytes * (shape.batch > 1)


def _split(offset: int, pitch: int, lines: int, shape: ShapeTimes, unit: int) -> float:
    """Return the part of a matrix's lines that begin within a cache line or sector, a `unit` of bytes."""
    rest = _pitch(pitch, lines, shape) % unit
    if rest == 0:
        return float(offset % unit != 0)
    least = rest & -rest
    return 1.0 if offset % least else 1 - least / unit


def _parts(d: dict[str, _Array], gpu: Gpu, reduce: Constants | None) -> tuple[_Array, dict[str, _Array]]:
    """Return the parts of the formula and the inputs that do not depend on constants: see launcher.h."""
    M, N, K, batch, split = d["M"], d["N"], d["K"], d["batch"], d["split"]
    down, across = np.ceil(M / d["block_m"]), np.ceil(N / d["block_n"])
    num_ctas = d["cluster_m"] * d["cluster_n"] * d["cluster_k"]
    tiles, places = (
        down * across * batch,
        np.vectorize(concurrent_tiles, otypes=[float])(gpu.device.multiprocessors, num_ctas),
    )
    concurrent = places * d["beside"]
    units, at_once = tiles * split, np.minimum(tiles, concurrent)
    waves = units / concurrent
    whole = np.floor(waves)
    rest = np.ceil(np.maximum(0, units - whole * concurrent) / places)
    shared = np.maximum(d["beside"], d["busy"])
    rounds = whole + np.minimum(rest, 1) * np.maximum(rest, d["busy"]) / shared
    all_steps = np.ceil(K / d["block_k"])
    steps, past = np.ceil(all_steps / split), all_steps - K / d["block_k"]
    line = d["block_k"] * d["bytes"]
    rows, cols = M / down, N / across
    bytes_a, bytes_b = rows * (1 + SPLIT_A * d["lines_a"]) * line, cols * (1 + SPLIT_B * d["lines_b"]) * line
    output = np.maximum(d["bytes"], 2)  # of an element of C: measured products write fp16, bf16, or fp32
    taken = (bytes_a / d["cluster_m"] + bytes_b / d["cluster_n"]) / d["cluster_k"]
    moved = batch * ((M * K + K * N) * d["bytes"] + M * N * output)
    sums = units * d["block_m"] * d["block_n"] * (_SUM_BYTES * SUMS) * d["ns_per_byte"]
    if reduce is not None:
        sums = sums + reduce.base_ns + batch * M * N * (_SUM_BYTES * split + output) * reduce.ns_per_byte
    parts = (
        d["base_ns"],
        rounds * d["ns_per_tile"],
        rounds * steps * d["ns_per_k_step"],
        rounds * steps * taken * d["ns_per_taken_byte"],
        units * steps * (bytes_a + bytes_b) * d["ns_per_loaded_byte"],
        moved * d["ns_per_byte"],
        np.where(d["partial"] > 0, sums, 0),
    )
    half, one = (waves <= 0.5) * 1.0, (waves <= 1) * 1.0  # noqa: PLR2004 - half of the multiprocessors
    clustered = (num_ctas > 1) * 1.0
    square = 2 * np.sqrt(at_once * d["block_m"] * d["block_n"])
    sides = np.minimum(square, np.minimum(at_once * d["block_m"], M) + np.minimum(at_once * d["block_n"], N))
    plain = {
        "ns of reread": np.maximum(1, tiles / concurrent) * sides * K * d["bytes"] * d["ns_per_byte"],
        **{f"log2 {name}": np.log2(d[name]) for name in "MNK"},
        "log2 bytes": np.log2(moved),
        "log2 batch": np.log2(batch),
        "A by columns": d["by_columns_a"],
        "B by columns": d["by_columns_b"],
        "lines_a": d["lines_a"],
        "lines_b": d["lines_b"],
        "sectors_a": d["sectors_a"],
        "sectors_b": d["sectors_b"],
        "wave up to 1": np.minimum(waves, 1),
        "wave up to 2": np.minimum(waves, 2),
        "last wave": waves - (rounds - 1),
        "1 / waves": 1 / rounds,
        "odd": d["alternates"] * (rounds % 2) * np.minimum(1, 2 / rounds),
        "half a wave": half,
        "one wave": one,
        "the other half": one - half,
        "log2 steps": np.log2(steps),
        "past K": past,
        "past K / steps": past / steps,
        "past K, across K": past * d["by_columns_a"] * (1 - d["by_columns_b"]),
        "uneven": steps - all_steps / split,
        "last rows": 1 - (down - M / d["block_m"]),
        "last columns": 1 - (across - N / d["block_n"]),
        "1 / down": 1 / down,
        "1 / across": 1 / across,
        "log2 split": np.log2(split),
        "rows": rows / d["block_m"],
        "columns": cols / d["block_n"],
        "clustered lines_a": clustered * d["lines_a"],
        "clustered lines_b": clustered * d["lines_b"],
        "pdl": d["pdl"],
    }
    return np.stack(parts, axis=1), plain
