"""The fewest pairs of a tile and a layout whose loss is within bounds, of candidates whose times are known.

The loss of a set on a problem is the time of its fastest plan over that of the fastest candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_PAIRS = 160  # of a set: with more, `make artifacts` takes over 6 minutes and the wheel has over 12 MB
_FARTHEST = 3.0  # greater losses count as this
_LARGE = 2.0  # weight of the square of a gain's logarithm: a few large losses are worse than many small ones
_PART = 0.95  # of problems, for the quantile

_Array = NDArray[np.float64]
Group = tuple[str, int, bool]  # layout, element_bytes, fast_accum
Pairs = dict[Group, list[str]]  # names of configs


class Bounds(NamedTuple):
    """Geometric mean and 95 % quantile of the losses on problems, at most."""

    mean: float
    quantile: float


class Losses(NamedTuple):
    """Losses of the candidates of a group on some problems.

    Attributes:
        names: of the candidates' configs.
        log: logarithms of the losses, (problems, candidates).
        weight, classes: of the problems.
    """

    names: list[str]
    log: _Array
    weight: _Array
    classes: list[str]

    @classmethod
    def of_times(cls, names: list[str], ns: _Array, weight: _Array, classes: list[str]) -> Losses:
        """Return the losses for times, (problems, candidates), infinite where a candidate has no plan.

        Problems that no candidate has a plan for are left out.
        """
        known = np.isfinite(ns).any(axis=1)
        loss = np.minimum(ns[known] / ns[known].min(axis=1, keepdims=True), _FARTHEST)
        return cls(names, np.log(loss), weight[known], [name for name, is_known in zip(classes, known, strict=True) if is_known])

    def of(self, chosen: Iterable[str]) -> _Array:
        """Return the logarithms of the losses of a set, (problems,)."""
        columns = [self.names.index(name) for name in chosen]
        return self.log[:, columns].min(axis=1, initial=math.log(_FARTHEST))

    def gains(self, chosen: Iterable[str]) -> _Array:
        """Return what each candidate would lessen the losses of a set by, (candidates,)."""
        now = self.of(chosen)[:, None]
        less = now - np.minimum(now, self.log)
        return self.weight @ (less + _LARGE * less**2)


class ClassLoss(NamedTuple):
    """Losses on the problems of one class: geometric mean, 95 % quantile, worst."""

    name: str
    problems: int
    mean: float
    quantile: float
    worst: float


def extend(chosen: Pairs, losses: Mapping[Group, Losses], bounds: Bounds) -> None:
    """Add the pair of most gain to `chosen`, until its losses are within `bounds`, or it has `MOST_PAIRS`."""
    while sum(map(len, chosen.values())) < MOST_PAIRS:
        loss = _loss("", np.concatenate([each.of(chosen[group]) for group, each in losses.items()]), _weights(losses))
        gains = {group: each.gains(chosen[group]) for group, each in losses.items()}
        group = max(gains, key=lambda each: float(gains[each].max()))
        if (loss.mean <= bounds.mean and loss.quantile <= bounds.quantile) or gains[group].max() <= 0:
            return
        chosen[group].append(losses[group].names[int(gains[group].argmax())])


def by_class(chosen: Pairs, *all_losses: Mapping[Group, Losses]) -> list[ClassLoss]:
    """Return the losses of a set by class of problems."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for losses in all_losses:
        for group, each in losses.items():
            for row in zip(each.classes, each.of(chosen[group]), each.weight, strict=True):
                rows.setdefault(row[0], []).append(row[1:])
    return [_loss(name, *np.array(found).T) for name, found in rows.items()]


def _loss(name: str, log: _Array, weight: _Array) -> ClassLoss:
    order = np.argsort(log, kind="stable")
    total = np.cumsum(weight[order])
    quantile = log[order][np.searchsorted(total, _PART * total[-1])]
    values = (float(np.exp(each)) for each in (log @ weight / weight.sum(), quantile, log.max()))
    return ClassLoss(name, len(log), *values)


def _weights(losses: Mapping[Group, Losses]) -> _Array:
    return np.concatenate([each.weight for each in losses.values()])
