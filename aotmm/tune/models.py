"""Samples -> models: what each schedule's launches amount to in the time model's terms, and the constants they give.

`templates/launcher.h.jinja` states the model; the quantities here are those of its formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from aotmm.kernel import Kernel, resident
from aotmm.problem import DTYPES
from aotmm.table import Model, Sample, Shape
from aotmm.target import Target
from aotmm.tune.fit import Constants, Fit, Point, fit, fit_helper

_PROGRAMMATIC_NS = 30_000  # below which selection launches a product programmatically that was not measured
_SUM_BYTES = 4  # of an element of partial sums
_OUTPUT_BYTES = 2  # of an element of C: what is measured writes fp16 or bf16
_REDUCE_BASE_NS = 1000.0  # cannot be told from that of the partial before it: only their sum shows
_REDUCE_TBPS = (2.0, 4.0, 8.0)  # partial sums come back from memory or from L2
_LEAST_WEIGHT = 0.01  # of a sample that is far from the best


class Key(NamedTuple):
    """What shares constants."""

    schedule: str
    width: int
    fast_accum: bool


class Fitted(NamedTuple):
    """A model, how many samples it rests on, and the relative error that it leaves: root mean square, if known."""

    model: Model
    samples: int
    error: float | None


class Gpu(NamedTuple):
    """What the number of waves depends on, beside the kernel."""

    target: Target
    multiprocessors: int


class _Timed(NamedTuple):
    shape: Shape
    sample: Sample
    kernel: Kernel
    weight: float


def fit_models(kernels: Sequence[Kernel], gpu: Gpu, shapes: Iterable[Shape]) -> list[Fitted]:
    """The models of every schedule that has samples on `shapes`, and of the kernels that work for them."""
    kinds: dict[Key, Kernel] = {}
    for kernel in kernels:
        kinds.setdefault(_key(kernel), kernel)
    plain: dict[Key, list[_Timed]] = {}
    copied: dict[Key, list[_Timed]] = {}
    for shape in shapes:
        for sample in _like_selection(shape):
            key = Key(sample.schedule, shape.width, shape.fast_accum)
            if key in kinds:
                weight = max(_LEAST_WEIGHT, (min(s.ns for s in shape.times) / sample.ns) ** 2)
                rows = copied if sample.copies else plain
                rows.setdefault(key, []).append(_Timed(shape, sample, kinds[key], weight))
    reduce = _fit_reduce([rows for rows in plain.values() if rows[0].kernel.role == "partial"], gpu)
    found = {key: _fit(rows, gpu, reduce) for key, rows in plain.items()}
    copy = _fit_copy({key: rows for key, rows in copied.items() if key in found}, gpu, found, reduce)
    fitted = [
        Fitted(Model(*key, *result.constants), len(plain[key]), result.error) for key, result in sorted(found.items())
    ]
    for role, helper, rows in (("reduce", reduce, plain), ("copy", copy, copied)):
        if helper is not None:
            count = sum(len(timed) for key, timed in rows.items() if role == "copy" or kinds[key].role == "partial")
            keys = sorted({_key(kernel) for kernel in kernels if kernel.role == role})
            fitted += [Fitted(Model(*key, *helper), count, None) for key in keys]
    return fitted


def _key(kernel: Kernel) -> Key:
    return Key(kernel.schedule, DTYPES[kernel.dtype_a].bytes, kernel.fast_accum)


def _like_selection(shape: Shape) -> Iterator[Sample]:
    """The samples that were launched as selection launches what was not measured on its shape."""
    programmatic = {sample[:2] + sample[3:4]: sample.ns for sample in shape.times if sample.programmatic}
    for sample in shape.times:
        early = programmatic.get(sample[:2] + sample[3:4], math.inf)
        if sample.programmatic == (sample.split == 1 and early < _PROGRAMMATIC_NS):
            yield sample


def _fit(rows: list[_Timed], gpu: Gpu, reduce: Constants | None) -> Fit:
    return fit([_point(row, gpu, reduce) for row in rows])


def _point(row: _Timed, gpu: Gpu, reduce: Constants | None) -> Point:
    """A sample without copies in the model's terms."""
    shape, (_, split, *_), kernel = row.shape, row.sample, row.kernel
    config = kernel.config
    rows, cols = math.ceil(shape.M / config.block_m), math.ceil(shape.N / config.block_n)
    steps = math.ceil(math.ceil(shape.K / config.block_k) / split)
    waves = math.ceil(rows * cols * split / (gpu.multiprocessors * resident(kernel, gpu.target)))
    moved = (shape.M * shape.K + shape.K * shape.N) * shape.width
    known = 0.0
    if kernel.role == "partial":
        moved += split * rows * cols * config.block_m * config.block_n * _SUM_BYTES
        if reduce is not None:
            known = _reduce_time(row, reduce)
    else:
        moved += shape.M * shape.N * _OUTPUT_BYTES
    return Point(waves, steps, moved, float(row.sample.ns), known, row.weight)


def _reduce_time(row: _Timed, reduce: Constants) -> float:
    shape = row.shape
    return reduce.time(0, 0, shape.M * shape.N * (_SUM_BYTES * row.sample.split + _OUTPUT_BYTES))


def _fit_reduce(partials: list[list[_Timed]], gpu: Gpu) -> Constants | None:
    """Constants of the reduce with which the partials' own models fit best; None without partials."""
    if not partials:
        return None
    choices = [Constants(_REDUCE_BASE_NS, 0.0, 0.0, 1e-3 / tbps) for tbps in _REDUCE_TBPS]
    return min(choices, key=lambda reduce: sum(_fit(rows, gpu, reduce).error for rows in partials))


def _fit_copy(
    copied: dict[Key, list[_Timed]], gpu: Gpu, models: dict[Key, Fit], reduce: Constants | None
) -> Constants | None:
    """Constants of one copy, from what the plans with copies take longer than the models of their kernels say."""
    found = []
    for key, rows in copied.items():
        for row in rows:
            point = _point(row, gpu, reduce)
            rest = point.ns - point.known - models[key].constants.time(point.waves, point.steps, point.bytes)
            shape = row.shape
            sizes = (
                shape.M * shape.K * shape.width,
                shape.K * shape.N * shape.width,
                shape.M * shape.N * _OUTPUT_BYTES,
            )
            moved = [2 * size for bit, size in enumerate(sizes) if row.sample.copies >> bit & 1]
            found.append((len(moved), sum(moved), rest))
    return fit_helper(found) if found else None
