"""The fit finds the constants that times were made with."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from aotmm.tune.fit import Constants, Point, fit, fit_helper

ENOUGH = 2000  # launches, for what the fit starts from to count next to nothing
TRUTH = Constants(2500.0, 85.0, 900.0, 2.4e-4, 5e-5)


def _points(truth: Constants, count: int, noise: float, *, block: tuple[int, int] = (128, 256)) -> list[Point]:
    """Launches of random shapes on 132 multiprocessors, and times with some noise."""
    rng = random.Random(count)  # noqa: S311 - no secret
    found = []
    for _ in range(count):
        M, N, K = (int(2 ** rng.uniform(low, 13.5)) + 1 for low in (0, 5, 6))
        units = math.ceil(M / block[0]) * math.ceil(N / block[1])
        steps, moved = math.ceil(K / 64), 2 * (M * K + K * N + M * N)
        sizes = (math.ceil(units / 132), steps, moved, units * steps * 64 * sum(block) * 2)
        found.append(Point(*sizes, truth.time(*sizes) * rng.gauss(1, noise)))
    return found


def test_constants_are_found() -> None:
    """Each constant within 15 % from 200 launches with 2 % of noise."""
    found = fit(_points(TRUTH, 200, 0.02))
    for ours, true in zip(found.constants, TRUTH, strict=True):
        assert ours == pytest.approx(true, rel=0.15)
    assert found.error == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(
    "truth",
    [
        Constants(1200.0, 300.0, 100.0, 2.2e-4, 1e-5),
        Constants(4000.0, 30.0, 6000.0, 1e-3, 5e-5),
        Constants(2000.0, 60.0, 1e3, 1e-4, 1e-4),
    ],
)
def test_times_are_predicted(truth: Constants) -> None:
    """New launches within 5 %, for configs bound by arithmetic, by memory and by their epilogue."""
    found = fit(_points(truth, ENOUGH, 0.0)).constants
    for point in _points(truth, 60, 0.0):
        assert found.time(point.waves, point.steps, point.bytes, point.loads) == pytest.approx(point.ns, rel=0.05)


def test_a_few_wrong_times_do_not_matter() -> None:
    """One time in twenty that is 5 times too long."""
    points = _points(TRUTH, ENOUGH, 0.01)
    points[::20] = [point._replace(ns=5 * point.ns) for point in points[::20]]
    for ours, true in zip(fit(points).constants, TRUTH, strict=True):
        assert ours == pytest.approx(true, rel=0.1)


def test_known_parts_are_not_fitted_again() -> None:
    """What other models account for does not end up in the constants."""
    points = [point._replace(ns=point.ns + 5000, known=5000.0) for point in _points(TRUTH, ENOUGH, 0.0)]
    for ours, true in zip(fit(points).constants, TRUTH, strict=True):
        assert ours == pytest.approx(true, rel=0.05)


def test_what_no_launch_tells_stays_as_it_was() -> None:
    """Launches that count next to nothing do not move the constants that a fit starts from."""
    points = [point._replace(ns=2 * point.ns, weight=1e-6) for point in _points(TRUTH, 50, 0.0)]
    assert fit(points, TRUTH).constants == pytest.approx(TRUTH, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_launches_give_something_positive(count: int) -> None:
    """Constants that nothing is known of stay positive and finite, and what is known fits."""
    points = _points(TRUTH, 50, 0.0)[:count]
    found = fit(points).constants
    assert all(0 < value < 1e5 for value in found)
    for point in points:
        assert found.time(point.waves, point.steps, point.bytes, point.loads) == pytest.approx(point.ns, rel=0.1)


def test_helpers() -> None:
    """Base and bandwidth of copies, from what one to three of them took together, with noise."""
    rng = random.Random(1)  # noqa: S311 - no secret
    rows = []
    for count, size in itertools.product((1, 2, 3), (1e5, 1e6, 1e7, 1e8, 1e9)):
        ns = count * 1800 + size / 3000
        rows.append((float(count), size, ns * rng.gauss(1, 0.03)))
    found = fit_helper(rows)
    assert found.ns_per_byte == pytest.approx(1 / 3000)
    assert found.base_ns == pytest.approx(1800, rel=0.15)
    assert (found.ns_per_k_step, found.ns_per_tile) == (0.0, 0.0)


def test_helpers_of_no_cost() -> None:
    """Differences that are nothing but noise give constants that are not negative."""
    found = fit_helper([(1.0, 1e5, -300.0), (1.0, 1e6, 200.0), (2.0, 1e6, -100.0)])
    assert all(value >= 0 for value in found)
