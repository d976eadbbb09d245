"""Samples -> models: each config's launches in the time model's quantities, and the fitted constants.

The formulas of the model are in `templates/launcher.h.jinja`; the quantities here are theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aotmm.pack.schema import Kernel, occupancy
from aotmm.pack.table import MIN_M, Model, Sample, ShapeTimes
from aotmm.problem import DTYPES
from aotmm.target import Target
from aotmm.tune.fit import Constants, Fit, Point, fit, fit_helper

# Selection launches an unmeasured product with pdl below the first time; below the second if its tiles leave no room
# for those of the next launch.
_PDL_NS, _FULL_PDL_NS = 50_000, 12_000
_LINE_BYTES, _SPLIT_LINES = 128, 3  # of caches; weight of a load across them
_SUM_BYTES = 4  # of an element of partial sums
_OUTPUT_BYTES = 2  # of an element of C: measured products write fp16 or bf16
_REDUCE_BASE_NS = 1000.0  # only the sum of it and the partial's is measured
_REDUCE_TBPS = (2.0, 4.0, 8.0)  # partial sums come back from memory or from L2
_LEAST_WEIGHT = 0.01  # of a sample that is far from the best
_ROUNDS = 3  # of fits, each after the common error that the last one leaves for all configs of a product
_COMMON_PRIOR = 2.0  # weight, in samples, of a common error of 0
_ROWS_CENTRES = (4.0, 7.0, 10.0)  # log2 M at the centre of the model of each range of rows
_ROWS_SPREAD = 1.2  # distance from it, in log2 M, at which samples lose 40 % of their weight

_Product = tuple[int, str, int, int, int]


class Key(NamedTuple):
    """Key of shared constants."""

    config_name: str
    element_bytes: int
    fast_accum: bool


class Fitted(NamedTuple):
    """A model, the number of its samples, and the root mean square of its relative error, if known."""

    model: Model
    samples: int
    error: float | None


class Gpu(NamedTuple):
    """The GPU's part in the number of waves."""

    target: Target
    multiprocessors: int


class _Timed(NamedTuple):
    shape: ShapeTimes
    sample: Sample
    kernel: Kernel
    weight: float


def fit_models(kernels: Sequence[Kernel], gpu: Gpu, shapes: Iterable[ShapeTimes]) -> list[Fitted]:
    """Return the models of every config with samples on `shapes`, and of their helper kernels."""
    kinds: dict[Key, Kernel] = {}
    for kernel in kernels:
        kinds.setdefault(_key(kernel), kernel)
    plain: dict[Key, list[_Timed]] = {}
    copied: dict[Key, list[_Timed]] = {}
    for shape in shapes:
        best = min((sample.ns for sample in shape.times), default=0)
        early = {(sample[:2], sample.copies): sample.ns for sample in shape.times if sample.pdl}
        for sample in shape.times:
            key = Key(sample.config_name, shape.element_bytes, shape.fast_accum)
            if key in kinds:
                row = _Timed(shape, sample, kinds[key], max(_LEAST_WEIGHT, (best / sample.ns) ** 3))
                if sample.pdl == _is_early(row, early.get((sample[:2], sample.copies), math.inf), gpu):
                    (copied if sample.copies else plain).setdefault(key, []).append(row)
    reduce = _fit_reduce([rows for rows in plain.values() if rows[0].kernel.role == "partial"], gpu)
    found = _fit_all(plain, gpu, reduce)
    copy = _fit_copy({key: rows for key, rows in copied.items() if key in found}, gpu, found, reduce)
    fitted = [
        Fitted(Model(*key, rows, *result.constants), len(plain[key]), result.error)
        for key, results in sorted(found.items())
        for rows, result in zip(MIN_M, results, strict=True)
    ]
    for role, helper, rows in (("reduce", reduce, plain), ("copy", copy, copied)):
        if helper is not None:
            count = sum(len(timed) for key, timed in rows.items() if role == "copy" or kinds[key].role == "partial")
            keys = sorted({_key(kernel) for kernel in kernels if kernel.role == role})
            fitted += [Fitted(Model(*key, rows, *helper), count, None) for key in keys for rows in MIN_M]
    return fitted


def _key(kernel: Kernel) -> Key:
    return Key(kernel.config_name, DTYPES[kernel.dtype_a].bytes, kernel.fast_accum)


def _is_early(row: _Timed, early: float, gpu: Gpu) -> bool:
    """Return whether selection uses pdl for this launch, if it is unmeasured and takes `early` ns with it."""
    slots = _slots(row.kernel, gpu)
    full = slots // 2 < _tiles(row) * row.sample.split <= slots
    return row.kernel.role == "product" and early < (_FULL_PDL_NS if full else _PDL_NS)


def _slots(kernel: Kernel, gpu: Gpu) -> int:
    """Return the tiles that the GPU computes at once."""
    return max(1, gpu.multiprocessors * occupancy(kernel, gpu.target) // kernel.num_ctas)


def _tiles(row: _Timed) -> int:
    config = row.kernel.config
    return math.ceil(row.shape.M / config.block_m) * math.ceil(row.shape.N / config.block_n)


def _fit_all(timed: dict[Key, list[_Timed]], gpu: Gpu, reduce: Constants | None) -> dict[Key, tuple[Fit, ...]]:
    """Return the models of all configs, one for each range of rows, without the error that they share on a product.

    A shared slowdown, as from a lower clock of the GPU, does not tell the fastest config.
    """
    common: defaultdict[_Product, float] = defaultdict(float)  # logarithms of measured over predicted times
    for _ in range(_ROUNDS):
        found = {key: _fit(rows, gpu, reduce, common) for key, rows in timed.items()}
        wrong: defaultdict[_Product, float] = defaultdict(float)
        weights: defaultdict[_Product, float] = defaultdict(float)
        for key, rows in timed.items():
            for row in rows:
                point = _point(row, gpu, reduce)
                wrong[_product(row)] += point.weight * math.log(point.ns / _time(point, found[key].constants))
                weights[_product(row)] += point.weight
        common = defaultdict(
            float, {product: wrong[product] / (weight + _COMMON_PRIOR) for product, weight in weights.items()}
        )
    return {
        key: tuple(_fit(rows, gpu, reduce, common, (found[key].constants, centre)) for centre in _ROWS_CENTRES)
        for key, rows in timed.items()
    }


def _fit(
    rows: list[_Timed],
    gpu: Gpu,
    reduce: Constants | None,
    common: defaultdict[_Product, float],
    near: tuple[Constants, float] | None = None,
) -> Fit:
    """Return the model of a config; `near` has its constants over all rows and the log2 M to fit around."""
    points = [_point(row, gpu, reduce) for row in rows]
    points = [
        point._replace(ns=point.ns / math.exp(common[_product(row)])) for row, point in zip(rows, points, strict=True)
    ]
    if near is None:
        return fit(points)
    start, centre = near
    return fit(
        [point._replace(weight=point.weight * _near(row, centre)) for row, point in zip(rows, points, strict=True)],
        start,
    )


def _near(row: _Timed, centre: float) -> float:
    """Return the weight of a sample for the model of the rows around 2^`centre`; the last ones have no upper end."""
    rows = min(max(math.log2(row.shape.M), _ROWS_CENTRES[0]), _ROWS_CENTRES[-1])
    return math.exp(-(((rows - centre) / _ROWS_SPREAD) ** 2) / 2)


def _time(point: Point, constants: Constants) -> float:
    return point.known + constants.time(point.waves, point.steps, point.bytes, point.loads)


def _product(row: _Timed) -> _Product:
    """Return the product of a sample; sums may be fast or precise."""
    shape = row.shape
    return shape.element_bytes, shape.layout, shape.M, shape.N, shape.K


def _point(row: _Timed, gpu: Gpu, reduce: Constants | None) -> Point:
    """Return a sample without copies in the model's quantities."""
    shape, (_, split, *_), kernel = row.shape, row.sample, row.kernel
    config = kernel.config
    units = _tiles(row) * split
    steps = math.ceil(math.ceil(shape.K / config.block_k) / split)
    waves = math.ceil(units / _slots(kernel, gpu))
    lines = _lines(row)
    loads = (
        units * steps * config.block_k * (config.block_m * lines[0] + config.block_n * lines[1]) * shape.element_bytes
    )
    moved = (shape.M * shape.K + shape.K * shape.N) * shape.element_bytes
    known = 0.0
    if kernel.role == "partial":
        moved += units * config.block_m * config.block_n * _SUM_BYTES
        if reduce is not None:
            known = _reduce_time(row, reduce)
    else:
        moved += shape.M * shape.N * _OUTPUT_BYTES
    return Point(waves, steps, moved, loads, float(row.sample.ns), known, row.weight)


def _lines(row: _Timed) -> tuple[int, int]:
    """Return the weights of loads of A and of B."""
    shape, copies = row.shape, row.sample.copies
    pitches = (shape.K if shape.layout[0] == "n" else shape.M, shape.N if shape.layout[1] == "n" else shape.K)
    split_a, split_b = (
        pitch * shape.element_bytes % _LINE_BYTES > 0 and not copies >> operand & 1
        for operand, pitch in enumerate(pitches)
    )
    return _SPLIT_LINES if split_a else 1, _SPLIT_LINES if split_b else 1


def _reduce_time(row: _Timed, reduce: Constants) -> float:
    shape = row.shape
    return reduce.time(0, 0, shape.M * shape.N * (_SUM_BYTES * row.sample.split + _OUTPUT_BYTES), 0)


def _fit_reduce(partials: list[list[_Timed]], gpu: Gpu) -> Constants | None:
    """Return the constants of the reduce with which the partials' own models fit best; None without partials."""
    if not partials:
        return None
    choices = [Constants(_REDUCE_BASE_NS, 0.0, 0.0, 1e-3 / tbps, 0.0) for tbps in _REDUCE_TBPS]
    return min(choices, key=lambda reduce: sum(_fit(rows, gpu, reduce, defaultdict(float)).error for rows in partials))


def _fit_copy(
    copied: dict[Key, list[_Timed]], gpu: Gpu, models: dict[Key, tuple[Fit, ...]], reduce: Constants | None
) -> Constants | None:
    """Return the constants of one copy, from the times of plans with copies less their kernels' predictions."""
    found = []
    for key, rows in copied.items():
        for row in rows:
            point = _point(row, gpu, reduce)
            shape = row.shape
            rest = point.ns - _time(point, models[key][bisect_right(MIN_M, shape.M) - 1].constants)
            sizes = (
                shape.M * shape.K * shape.element_bytes,
                shape.K * shape.N * shape.element_bytes,
                shape.M * shape.N * _OUTPUT_BYTES,
            )
            moved = [2 * size for bit, size in enumerate(sizes) if row.sample.copies >> bit & 1]
            found.append((len(moved), sum(moved), rest))
    return fit_helper(found) if found else None
