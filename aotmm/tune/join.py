"""Times of two sessions on GPUs of one model, in one table.

All times of a product differ between sessions by a few per cent, those of single plans by 3.4 % more. So the mean of
two sessions chooses better than either (docs/experiments/tuning.md, "Fourth day").
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from aotmm.pack.table import Sample, ShapeTimes, Table

_FASTEST = 10  # plans that tell the common factor of a product's times


def joined(old: Table, new: Table, configs: Collection[str]) -> Table:
    """Return `new`, without models, with the times that `old` has of these configs too.

    Of a product that both have, each plan gets the mean of its times after those of `old` are scaled to `new`. If they
    have no plan of it in common, `new` counts alone.
    """
    shapes = {shape.product: _of(shape, configs) for shape in old.shapes}
    for shape in new.shapes:
        before = shapes.get(shape.product)
        shapes[shape.product] = shape if before is None else _mean(before, shape)
    kept = tuple(shape for shape in shapes.values() if shape.times)
    return replace(new, seed=old.seed if new.seed is None else new.seed, network=None, models=(), shapes=kept)


def _of(shape: ShapeTimes, configs: Collection[str]) -> ShapeTimes:
    return replace(shape, times=tuple(sample for sample in shape.times if sample.config_name in configs))


def _mean(old: ShapeTimes, new: ShapeTimes) -> ShapeTimes:
    before, after = ({sample[:-1]: sample.ns for sample in shape.times} for shape in (old, new))
    common = sorted(before.keys() & after.keys(), key=lambda plan: (after[plan], plan))[:_FASTEST]
    if not common:
        return new
    factor = math.exp(sum(math.log(after[plan] / before[plan]) for plan in common) / len(common))
    scaled = {plan: ns * factor for plan, ns in before.items()}
    times = {plan: math.sqrt(ns * scaled.get(plan, ns)) for plan, ns in after.items()}
    return replace(new, times=tuple(Sample(*plan, max(1, round(ns))) for plan, ns in (scaled | times).items()))
