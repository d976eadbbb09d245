"""The constants of the launcher's time model (`templates/launcher.h.jinja`), fitted to measured times.

    busy = waves * (steps * step + tile)    moving = bytes * byte + loads * load
    time = base + max(busy, moving) + 0.4 * min(busy, moving)

The fit is least squares of the logarithm of the time, because selection compares ratios. Every constant is positive and
drawn a little to its start: a constant that no sample determines stays at its physical estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

_PRIOR = 0.1  # weight of the start, in samples: with less, constants that few samples determine are far off
_LOAD = 5e-5  # ns per byte that tiles load, to start from: 20 TB/s, more than any L2
_SERIAL = 0.4  # part of the shorter of computing and moving that does not overlap with the other
_OUTLIER = 0.1  # relative error from which on a sample counts less
_BANDWIDTHS = (1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0)  # TB/s that helper kernels may reach; the last ones from L2
_Array = NDArray[np.float64]


class Point(NamedTuple):
    """One measured launch, by the quantities of the model, in ns.

    `loads` are the bytes that all tiles load. `known` is the part of its time that other models predict. `weight` is 1
    for the fastest of its shape.
    """

    waves: int
    steps: int
    bytes: int
    loads: int
    ns: float
    known: float = 0.0
    weight: float = 1.0


class Constants(NamedTuple):
    """Constants of `Model`, in ns."""

    base_ns: float
    ns_per_k_step: float
    ns_per_tile: float
    ns_per_byte: float
    ns_per_loaded_byte: float

    def time(self, waves: int, steps: int, bytes_moved: int, loads: int) -> float:
        """Return the predicted time in ns."""
        busy, moving = (
            waves * (steps * self.ns_per_k_step + self.ns_per_tile),
            bytes_moved * self.ns_per_byte + loads * self.ns_per_loaded_byte,
        )
        return self.base_ns + max(busy, moving) + _SERIAL * min(busy, moving)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants, and the root mean square of their relative error."""

    constants: Constants
    error: float


def fit(points: Sequence[Point], start: Constants | None = None) -> Fit:
    """Return the constants for the launches of one config; the more their shapes differ, the better. Needs one point.

    Constants that no launch determines stay at `start`, by default at physical estimates.
    """
    samples = _Samples(*np.array(points, dtype=float).T)
    starts = [np.log(each) for each in (_starts(samples) if start is None else [start])]
    found = [least_squares(samples.residuals, each, samples.slopes, method="lm", args=(each,)) for each in starts]
    best = min(found, key=lambda result: float(result.cost)).x
    error = np.sqrt(np.average(samples.wrong(best) ** 2, weights=samples.weight))
    return Fit(Constants(*np.exp(best).tolist()), float(error))


def fit_helper(times: Sequence[tuple[float, float, float]]) -> Constants:
    """Return constants of a kernel that only moves memory, from (count, bytes, ns) of one or several launches together.

    ns is a measured time less the other kernels' part; it may be noisy, even negative.
    """
    counts, sizes, ns = np.array(times).T
    best, least = Constants(0.0, 0.0, 0.0, 0.0, 0.0), float("inf")
    for bandwidth in _BANDWIDTHS:
        byte = 1e-3 / bandwidth
        base = max(0.0, float(np.median((ns - sizes * byte) / counts)))
        # Relative to the time, but at least to that of a launch: differences of similar times are noise.
        loss = float(np.mean(np.abs(counts * base + sizes * byte - ns) / (np.abs(ns) + 1000.0)))
        if loss < least:
            best, least = Constants(base, 0.0, 0.0, byte, 0.0), loss
    return best


class _Samples(NamedTuple):
    """The fields of all points, as columns. `logs` are the logarithms of constants, (5,)."""

    waves: _Array
    steps: _Array
    moved: _Array
    loads: _Array
    ns: _Array
    known: _Array
    weight: _Array

    def wrong(self, logs: _Array) -> _Array:
        """Return the logarithms of predicted over measured times."""
        wrong: _Array = np.log((self.known + self._parts(logs).sum(axis=1)) / self.ns)
        return wrong

    def residuals(self, logs: _Array, start: _Array) -> _Array:
        """Return the values whose squares add up to twice the loss, (points + 5,).

        Those of samples are roots of a Huber loss, in which outliers count less. The last five draw the constants to
        `start`.
        """
        wrong = self.wrong(logs)
        roots = np.where(np.abs(wrong) < _OUTLIER, wrong, np.copysign(_outlier_root(wrong), wrong))
        return np.concatenate([np.sqrt(self.weight) * roots, math.sqrt(_PRIOR) * (logs - start)])

    def slopes(self, logs: _Array, _start: _Array) -> _Array:
        """Return the derivatives of `residuals` by `logs`, (points + 5, 5)."""
        parts = self._parts(logs)
        shares = parts / (self.known + parts.sum(axis=1))[:, None]
        scales = np.sqrt(self.weight) * _OUTLIER / _outlier_root(self.wrong(logs))
        return np.concatenate([shares * scales[:, None], math.sqrt(_PRIOR) * np.eye(len(logs))])

    def _parts(self, logs: _Array) -> _Array:
        """Return the part of each constant in the times, (points, 5)."""
        ones = np.ones_like(self.ns)
        parts = np.exp(logs) * np.stack([ones, self.waves * self.steps, self.waves, self.moved, self.loads], axis=1)
        computes = parts[:, 1:3].sum(axis=1) > parts[:, 3:].sum(axis=1)
        parts[~computes, 1:3] *= _SERIAL
        parts[computes, 3:] *= _SERIAL
        return parts


def _outlier_root(wrong: _Array) -> _Array:
    """Return the root of twice the Huber loss of errors from `_OUTLIER` on, and `_OUTLIER` for smaller ones."""
    return np.sqrt(_OUTLIER * (2 * np.maximum(np.abs(wrong), _OUTLIER) - _OUTLIER))


def _starts(samples: _Samples) -> list[tuple[float, ...]]:
    """Return the constants to start from: fast and slow memory, small and large base."""
    rest = np.maximum(samples.ns - samples.known, 0.1 * samples.ns)
    step = np.quantile(rest / (samples.waves * samples.steps), 0.1)
    byte = np.quantile(rest / samples.moved, 0.02)
    base = min(rest.min() / 2, 3000.0)
    return [(base * scale, step, 4 * step, byte * slower, _LOAD) for scale in (1.0, 0.3) for slower in (0.5, 1.0, 1.5)]
