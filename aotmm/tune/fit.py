"""The constants of the launcher's time model (`templates/launcher.h.jinja`), fitted to measured times.

    busy = waves * (steps * step + tile)    moving = bytes * byte + loads * load
    time = base + max(busy, moving) + 0.4 * min(busy, moving)

The fit is least squares of the logarithm of the time, because selection compares ratios. Every constant is positive and
drawn a little to its start: a constant that no sample determines stays at its physical estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

_ITERATIONS = 60
_PRIOR = 0.1  # weight of the start, in samples: with less, constants that few samples determine are far off
_LOAD = 5e-5  # ns per byte that tiles load, to start from: 20 TB/s, more than any L2
_SERIAL = 0.4  # part of the shorter of computing and moving that does not overlap with the other
_OUTLIER = 0.1  # relative error from which on a sample counts less
_BANDWIDTHS = (1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0)  # TB/s that helper kernels may reach; the last ones from L2


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
    with _one_thread():
        samples = _Samples(*torch.tensor(points, dtype=torch.float64).T)
        starts = _starts(samples) if start is None else torch.tensor([start], dtype=torch.float64).log()
        logs, losses = _descend(samples, starts)
        best = logs[losses.argmin()]
        wrong = (samples.predicted(best[None])[0] - samples.ns.log()).square()
        error = (wrong.mul(samples.weight).sum() / samples.weight.sum()).sqrt()
        return Fit(Constants(*best.exp().tolist()), float(error))


def fit_helper(times: Sequence[tuple[float, float, float]]) -> Constants:
    """Return constants of a kernel that only moves memory, from (count, bytes, ns) of one or several launches together.

    ns is a measured time less the other kernels' part; it may be noisy, even negative.
    """
    rows = torch.tensor(times, dtype=torch.float64)
    best, least = Constants(0.0, 0.0, 0.0, 0.0, 0.0), float("inf")
    for bandwidth in _BANDWIDTHS:
        byte = 1e-3 / bandwidth
        base = max(0.0, float(((rows[:, 2] - rows[:, 1] * byte) / rows[:, 0]).median()))
        wrong = rows[:, 0] * base + rows[:, 1] * byte - rows[:, 2]
        # Relative to the time, but at least to that of a launch: differences of similar times are noise.
        loss = float((wrong / (rows[:, 2].abs() + 1000.0)).abs().mean())
        if loss < least:
            best, least = Constants(base, 0.0, 0.0, byte, 0.0), loss
    return best


class _Samples(NamedTuple):
    """The fields of all points, as columns."""

    waves: torch.Tensor
    steps: torch.Tensor
    moved: torch.Tensor
    loads: torch.Tensor
    ns: torch.Tensor
    known: torch.Tensor
    weight: torch.Tensor

    def predicted(self, logs: torch.Tensor) -> torch.Tensor:
        """Return logarithms of the times (starts, points) for constants with logarithms `logs` (starts, 5)."""
        return torch.log(self.known + sum(self._parts(logs)))

    def derivatives(self, logs: torch.Tensor) -> torch.Tensor:
        """Return the derivatives (starts, points, 5) of `predicted` by `logs`."""
        parts = self._parts(logs)
        return torch.stack(parts, -1) / (self.known + sum(parts))[..., None]

    def _parts(self, logs: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each constant in the time, (starts, points) each."""
        base, step, tile, byte, load = logs.exp().T[..., None]
        busy = [self.waves * self.steps * step, self.waves * tile]
        moving = [self.moved * byte, self.loads * load]
        computes = sum(busy) > sum(moving)
        shares = (torch.where(computes, 1.0, _SERIAL), torch.where(computes, _SERIAL, 1.0))
        return [base.expand_as(computes), *(shares[0] * part for part in busy), *(shares[1] * part for part in moving)]


def _starts(samples: _Samples) -> torch.Tensor:
    """Return logarithms of the descent's initial constants: fast and slow memory, small and large base."""
    rest = (samples.ns - samples.known).clamp(min=0.1 * samples.ns)
    step = float((rest / (samples.waves * samples.steps)).quantile(0.1))
    byte = float((rest / samples.moved).quantile(0.02))
    base = min(float(rest.min()) / 2, 3000.0)
    rows = [(base * scale, step, 4 * step, byte * slower, _LOAD) for scale in (1.0, 0.3) for slower in (0.5, 1.0, 1.5)]
    return torch.tensor(rows, dtype=torch.float64).log()


def _descend(samples: _Samples, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Levenberg-Marquardt from each start; return the final logarithms (starts, 5) and their losses."""
    logs, damping, prior = (
        starts,
        torch.full((len(starts),), 1e-2).double(),
        _PRIOR * torch.eye(starts.shape[1]).double(),
    )
    loss = _loss(samples, logs, starts)
    for _ in range(_ITERATIONS):
        wrong = samples.predicted(logs) - samples.ns.log()
        slopes = samples.derivatives(logs)
        weighted = (slopes * (samples.weight * _confidence(wrong))[..., None]).mT
        normal = weighted @ slopes + prior
        gradient = (weighted @ wrong[..., None])[..., 0] + _PRIOR * (logs - starts)
        damped = normal + damping[:, None, None] * torch.diag_embed(normal.diagonal(dim1=1, dim2=2))
        candidates = logs - torch.linalg.solve(damped, gradient).clamp(-1, 1)
        found = _loss(samples, candidates, starts)
        better = found < loss
        logs = torch.where(better[:, None], candidates, logs)
        loss = torch.where(better, found, loss)
        damping = torch.where(better, damping / 3, damping * 4)
    return logs, loss


def _confidence(wrong: torch.Tensor) -> torch.Tensor:
    """Return the weight of each error in a Huber loss: outliers count less."""
    return _OUTLIER / wrong.abs().clamp(min=_OUTLIER)


def _loss(samples: _Samples, logs: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    wrong = (samples.predicted(logs) - samples.ns.log()).abs()
    huber = torch.where(wrong < _OUTLIER, wrong.square() / 2, _OUTLIER * (wrong - _OUTLIER / 2))
    return (samples.weight * huber).sum(1) + _PRIOR * (logs - starts).square().sum(1) / 2


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: on such small matrices, several take many times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
