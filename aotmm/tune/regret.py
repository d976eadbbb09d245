"""Quality of a table: the regret of the launcher's own selection.

Regret of a choice is its time divided by that of the fastest plan measured on the shape: 1 is perfect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import Launcher
from aotmm.runtime.tuning import CDevice
from aotmm.target import target
from aotmm.timing.problems import Case, Shape
from aotmm.tune.candidates import for_invariance, output_of, problem_of
from aotmm.tune.cases import type_of

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
        """Return the regret by kind of product: its origin, bytes of an element, its kind, and offsets."""
        found: dict[str, list[Choice]] = {}
        for choice in self.choices:
            shape = choice.shape
            kind = f"{'random' if shape.drawn else 'sweeps'}, {shape.element_bytes} bytes"
            kind += f", {shape.kind}" * (shape.kind != "plain") + ", offsets" * bool(shape.offset_a or shape.offset_b)
            kind += ", batches" * (shape.batch > 1)
            found.setdefault(kind, []).append(choice)
        return {kind: Regret(tuple(choices)) for kind, choices in sorted(found.items())}

    def _found(self) -> list[float]:
        return [choice.regret for choice in self.choices if choice.regret is not None]


def held_out_regret(launcher: Launcher, device: CDevice, table: Table, types: Mapping[str, str]) -> Regret:
    """Return the regret on the held-out shapes of a selection that knows the models and the other shapes.

    `types` are those that were measured, as of `cases.types_of`. Needs no GPU. The launcher keeps `table`.
    """
    known = tuple(shape for shape in table.shapes if not shape.held_out)
    held_out = [shape for shape in table.shapes if shape.held_out]
    return _regret(launcher, device, replace(table, shapes=known), held_out, table, types)


def model_regret(launcher: Launcher, device: CDevice, table: Table, types: Mapping[str, str]) -> Regret:
    """Return the regret on the fitted shapes of a selection that knows only the models."""
    known = [shape for shape in table.shapes if not shape.held_out]
    return _regret(launcher, device, replace(table, shapes=()), known, table, types)


def _regret(
    launcher: Launcher, device: CDevice, by: Table, shapes: Sequence[ShapeTimes], after: Table, types: Mapping[str, str]
) -> Regret:
    row = target(launcher.arch)
    not_chosen = {kernel.config_name for kernel in launcher.kernels if for_invariance(kernel)}
    rows = {
        (*_product(shape), shape.kind): tuple(each for each in shape.times if each.config_name not in not_chosen)
        for shape in after.shapes
    }
    launcher.retune(by)
    try:
        choices = []
        for shape in shapes:
            # Relaxed products may use exact kernels, which have rows of their own.
            kinds = {shape.kind} | ({"plain"} if shape.kind == "relaxed" else set())
            times = {kind: rows.get((*_product(shape), kind), ()) for kind in sorted(kinds)}
            if any(times.values()):
                choices.append(_choice(launcher, device, shape, times, type_of(shape, types, row)))
        return Regret(tuple(choices))
    finally:
        launcher.retune(after)


def _product(shape: ShapeTimes) -> tuple[object, ...]:
    """Return all of a product but its kind."""
    return shape.element_bytes, shape.layout, shape.M, shape.N, shape.K, shape.offset_a, shape.offset_b, shape.batch


def _choice(
    launcher: Launcher, device: CDevice, shape: ShapeTimes, times: dict[str, tuple[Sample, ...]], dtype: str
) -> Choice:
    sizes = Shape(shape.M, shape.N, shape.K, shape.layout)
    fast, scaled = shape.kind == "relaxed" and dtype != "tf32", shape.kind == "block_scaled"
    case = Case(sizes, dtype, fast_accum=fast, batch=shape.batch, block_scaled=scaled)
    addresses = (_ALIGNED + shape.offset_a, _ALIGNED + shape.offset_b, *(_ALIGNED,) * (3 if scaled else 1))
    problem = problem_of(case, output_of(launcher, dtype), *addresses)
    plan = launcher.select(problem, device, WORKSPACE_LIMIT)
    kernel = launcher.kernels[plan.kernel]
    best = min((sample for samples in times.values() for sample in samples), key=lambda sample: sample.ns)
    text = kernel.config_name + f" split {plan.split}" * (plan.split > 1) + f" copies {plan.copies}" * bool(plan.copies)
    text += " pdl" * plan.pdl
    for sample in times[kernel.kind]:
        if sample[:-1] == (kernel.config_name, plan.split, plan.pdl, plan.copies):
            return Choice(shape, text, sample.ns / best.ns, best)
    return Choice(shape, text, None, best)
