"""The fewest pairs of a tile and a layout whose loss is within bounds, of candidates whose times are known.

The loss of a set on a problem is the time of its fastest plan over that of the fastest candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_IMAGES = 311  # of a tile and a layout: `make artifacts` may take 9 minutes, the wheel have 17 MB
_SHARED = 0.25  # cost of a pair that shares the image of another; else it is 1
_FARTHEST = 3.0  # greater losses count as this
_LARGE = 2.0  # weight of the square of a gain's logarithm: a few large losses are worse than many small ones
_PART = 0.95  # of problems, for the quantile

_Array = NDArray[np.float64]
Group = tuple[str, int, str]  # layout, element_bytes, kind
Pairs = dict[Group, list[str]]  # names of configs


class Bounds(NamedTuple):
    """Geometric mean and 95 % quantile of the losses on problems, at most."""

    mean: float
    quantile: float


class Losses(NamedTuple):
    """Losses of the candidates of a group on some problems.

    Attributes:
        names: of the candidates' configs.
        images: of the candidates; some share one.
        log: logarithms of the losses, (problems, candidates).
        weight, classes: of the problems.
    """

    names: list[str]
    images: list[str]
    log: _Array
    weight: _Array
    classes: list[str]

    @classmethod
    def of_times(cls, names: list[str], images: list[str], ns: _Array, weight: _Array, classes: list[str]) -> Losses:
        """Return the losses for times, (problems, candidates), infinite where a candidate has no plan.

        Problems that no candidate has a plan for are left out.
        """
        known = np.flatnonzero(np.isfinite(ns).any(axis=1))
        loss = np.minimum(ns[known] / ns[known].min(axis=1, keepdims=True), _FARTHEST)
        return cls(names, images, np.log(loss), weight[known], [classes[number] for number in known])

    def of(self, chosen: Iterable[str]) -> _Array:
        """Return the logarithms of the losses of a set, (problems,)."""
        columns = [self.names.index(name) for name in chosen]
        found: _Array = self.log[:, columns].min(axis=1, initial=math.log(_FARTHEST))
        return found

    def gains(self, chosen: Iterable[str]) -> _Array:
        """Return what each candidate would lessen the losses of a set by, over its cost, (candidates,)."""
        now = self.of(chosen)[:, None]
        less = now - np.minimum(now, self.log)
        there = self.images_of(chosen)
        cost = np.array([_SHARED if image in there else 1 for image in self.images])
        found: _Array = self.weight @ (less + _LARGE * less**2) / cost
        return found

    def images_of(self, chosen: Iterable[str]) -> set[str]:
        """Return the images of a set."""
        return {self.images[self.names.index(name)] for name in chosen}


class ClassLoss(NamedTuple):
    """Losses on the problems of one class: geometric mean, 95 % quantile, worst."""

    name: str
    problems: int
    mean: float
    quantile: float
    worst: float


def extend(chosen: Pairs, losses: Mapping[Group, Losses], bounds: Bounds) -> None:
    """Add pairs to `chosen`, that of most gain over its cost at a time.

    It ends when the losses are within `bounds`, when no pair lessens them, or with `MOST_IMAGES`.
    """
    weight = np.concatenate([each.weight for each in losses.values()])
    while sum(len(each.images_of(chosen[group])) for group, each in losses.items()) < MOST_IMAGES:
        log = np.concatenate([each.of(chosen[group]) for group, each in losses.items()])
        mean, quantile, _ = _figures(log, weight)
        gains = {group: each.gains(chosen[group]) for group, each in losses.items()}
        group = max(gains, key=lambda each: float(gains[each].max()))
        if (mean <= bounds.mean and quantile <= bounds.quantile) or gains[group].max() <= 0:
            return
        chosen[group].append(losses[group].names[int(gains[group].argmax())])


def by_class(chosen: Pairs, *all_losses: Mapping[Group, Losses]) -> list[ClassLoss]:
    """Return the losses of a set by class of problems."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for losses in all_losses:
        for group, each in losses.items():
            for name, log, weight in zip(each.classes, each.of(chosen[group]), each.weight, strict=True):
                rows.setdefault(name, []).append((log, weight))
    return [ClassLoss(name, len(found), *_figures(*np.array(found).T)) for name, found in rows.items()]


def _figures(log: _Array, weight: _Array) -> tuple[float, float, float]:
    """Return geometric mean, quantile and worst."""
    order = np.argsort(log, kind="stable")
    total = np.cumsum(weight[order])
    quantile = log[order][np.searchsorted(total, _PART * total[-1])]
    return float(np.exp(log @ weight / weight.sum())), float(np.exp(quantile)), float(np.exp(log.max()))
