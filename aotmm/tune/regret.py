"""Quality of a table: the regret of the launcher's own selection.

Regret of a choice is its time divided by that of the fastest plan measured on the shape: 1 is perfect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import Launcher
from aotmm.runtime.tuning import CDevice
from aotmm.timing.problems import Case, Shape
from aotmm.tune.candidates import for_invariance, output_of, problem_of

_ALIGNED = 4096  # an address that breaks no guard
_PARTS = 20  # the last of so many quantiles is that at 95 %


class Choice(NamedTuple):
    """The selection for a shape, in words; its regret, None if that plan was not measured; and the best plan."""

    shape: ShapeTimes
    chosen: str
    regret: float | None
    best: Sample


@dataclass(frozen=True, slots=True)
class Regret:
    """The choices on some shapes, and statistics of those with measured plans."""

    choices: tuple[Choice, ...]

    @property
    def mean(self) -> float:
        """Return the geometric mean of the regret; 1 without choices."""
        found = self._found()
        return statistics.geometric_mean(found) if found else 1.0

    @property
    def quantile(self) -> float:
        """Return the quantile at 95 %, interpolated between two regrets; 1 without choices."""
        found = self._found()
        return statistics.quantiles(found, n=_PARTS, method="inclusive")[-1] if len(found) > 1 else self.worst

    @property
    def worst(self) -> float:
        """Return the largest regret; 1 without choices."""
        return max(self._found(), default=1.0)

    @property
    def unmeasured(self) -> int:
        """Return the number of choices that were not measured."""
        return sum(choice.regret is None for choice in self.choices)

    def worst_choices(self, count: int) -> list[Choice]:
        """Return the choices of the largest regret."""
        return sorted(self.choices, key=lambda choice: -(choice.regret or math.inf))[:count]

    def by_kind(self) -> dict[str, Regret]:
        """Return the regret of each kind of product: origin, bytes of an element, kind of sums, offsets of operands."""
        found: dict[str, list[Choice]] = {}
        for choice in self.choices:
            shape = choice.shape
            kind = f"{'random' if shape.drawn else 'sweeps'}, {shape.element_bytes} bytes"
            kind += ", fast sums" * shape.fast_accum + ", offsets" * bool(shape.offset_a or shape.offset_b)
            kind += ", batches" * (shape.batch > 1)
            found.setdefault(kind, []).append(choice)
        return {kind: Regret(tuple(choices)) for kind, choices in sorted(found.items())}

    def _found(self) -> list[float]:
        return [choice.regret for choice in self.choices if choice.regret is not None]


def held_out_regret(launcher: Launcher, device: CDevice, table: Table, dtypes: dict[int, str]) -> Regret:
    """Return the regret on the held-out shapes of a selection that knows the models and the other shapes.

    `dtypes` has the type that was measured for each element_bytes. Needs no GPU. The launcher keeps `table`.
    """
    known = tuple(shape for shape in table.shapes if not shape.held_out)
    held_out = [shape for shape in table.shapes if shape.held_out]
    return _regret(launcher, device, replace(table, shapes=known), held_out, table, dtypes)


def model_regret(launcher: Launcher, device: CDevice, table: Table, dtypes: dict[int, str]) -> Regret:
    """Return the regret on the fitted shapes of a selection that knows only the models."""
    known = [shape for shape in table.shapes if not shape.held_out]
    return _regret(launcher, device, replace(table, shapes=()), known, table, dtypes)


def _regret(
    launcher: Launcher, device: CDevice, by: Table, shapes: Sequence[ShapeTimes], after: Table, dtypes: dict[int, str]
) -> Regret:
    not_chosen = {kernel.config_name for kernel in launcher.kernels if for_invariance(kernel)}
    rows = {
        (*_product(shape), shape.fast_accum): tuple(each for each in shape.times if each.config_name not in not_chosen)
        for shape in after.shapes
    }
    launcher.retune(by)
    try:
        choices = []
        for shape in shapes:
            # Products that allow fast sums may use precise ones, which have rows of their own.
            kinds = (False, True) if shape.fast_accum else (False,)
            times = {fast: rows.get((*_product(shape), fast), ()) for fast in kinds}
            if any(times.values()):
                choices.append(_choice(launcher, device, shape, times, dtypes[shape.element_bytes]))
        return Regret(tuple(choices))
    finally:
        launcher.retune(after)


def _product(shape: ShapeTimes) -> tuple[object, ...]:
    """Return all of a product but its kind of sums."""
    return shape.element_bytes, shape.layout, shape.M, shape.N, shape.K, shape.offset_a, shape.offset_b, shape.batch


def _choice(
    launcher: Launcher, device: CDevice, shape: ShapeTimes, times: dict[bool, tuple[Sample, ...]], dtype: str
) -> Choice:
    sizes = Shape(shape.M, shape.N, shape.K, shape.layout)
    case = Case(sizes, dtype, fast_accum=shape.fast_accum, batch=shape.batch)
    addresses = (_ALIGNED + shape.offset_a, _ALIGNED + shape.offset_b, _ALIGNED)
    problem = problem_of(case, output_of(launcher, dtype), *addresses)
    plan = launcher.select(problem, device, WORKSPACE_LIMIT)
    kernel = launcher.kernels[plan.kernel]
    best = min((sample for samples in times.values() for sample in samples), key=lambda sample: sample.ns)
    text = kernel.config_name + f" split {plan.split}" * (plan.split > 1) + f" copies {plan.copies}" * bool(plan.copies)
    text += " pdl" * plan.pdl
    for sample in times[kernel.fast_accum]:
        if sample[:-1] == (kernel.config_name, plan.split, plan.pdl, plan.copies):
            return Choice(shape, text, sample.ns / best.ns, best)
    return Choice(shape, text, None, best)
