"""The choice of tiles takes the fewest that keep losses within bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aotmm.tune import choose
from aotmm.tune.choose import Bounds, Group, Losses, by_class, extend

NT, NN = ("nt", 2, "plain"), ("nn", 2, "plain")
EXACT = Bounds(1.0, 1.0)


def losses(*ns: tuple[float, ...], weight: float = 1.0, name: str = "class", images: str = "") -> Losses:
    """The losses of candidates a, b, c ... with these times on each problem, and `images` or one each."""
    names = [chr(ord("a") + number) for number in range(len(ns[0]))]
    return Losses.of_times(names, list(images) or names, np.array(ns), np.full(len(ns), weight), [name] * len(ns))


def chosen(bounds: Bounds, **groups: Losses) -> dict[str, list[str]]:
    """What is chosen, by layout."""
    pairs: dict[Group, list[str]] = {(layout, 2, "plain"): [] for layout in groups}
    extend(pairs, {(layout, 2, "plain"): each for layout, each in groups.items()}, bounds)
    return {group[0]: names for group, names in pairs.items()}


# a is good everywhere, b the best of the first two problems, c of the last.
THREE = losses((11, 10, 30), (11, 10, 30), (11, 30, 10))


def test_the_tile_of_most_gain_comes_first() -> None:
    """A tile that is good everywhere comes before those that are the best somewhere, in the order of their gains."""
    assert chosen(EXACT, nt=THREE) == {"nt": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("bounds", "names"),
    [
        (Bounds(1.1001, 1.1001), ["a"]),
        (Bounds(1.05, 1.1001), ["a", "b"]),
        (Bounds(1.1001, 1.05), ["a", "b", "c"]),
    ],
)
def test_both_bounds_hold(bounds: Bounds, names: list[str]) -> None:
    """With a alone every loss is 1.1; with b too the mean is 1.1 ** (1 / 3), and the quantile still 1.1."""
    assert chosen(bounds, nt=THREE) == {"nt": names}


def test_a_tile_counts_for_its_layout_alone() -> None:
    """The same tile is chosen once for each layout; a group whose problems weigh more comes first."""
    first, second = losses((10, 20), name="x"), losses((10, 20), weight=2.0, name="y")
    assert chosen(EXACT, nt=first, nn=second) == {"nt": ["a"], "nn": ["a"]}
    assert chosen(Bounds(1.5, 3.1), nt=first, nn=second) == {"nt": [], "nn": ["a"]}


def test_tiles_chosen_before_count() -> None:
    """What is there already is not chosen again, and keeps out what gains nothing beside it."""
    pairs: dict[Group, list[str]] = {NT: ["b", "c"]}
    extend(pairs, {NT: THREE}, EXACT)
    assert pairs == {NT: ["b", "c"]}


def test_never_more_than_most_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of images is bounded, whatever the losses are."""
    monkeypatch.setattr(choose, "MOST_IMAGES", 2)
    assert chosen(EXACT, nt=THREE) == {"nt": ["a", "b"]}


def test_a_shared_image_costs_less() -> None:
    """Of two that gain about the same the one whose image is there comes first, though its gain is a little less."""
    rows = ((11, 10, 30), (11, 10, 30), (11, 30, 10.1))
    assert chosen(EXACT, nt=losses(*rows)) == {"nt": ["a", "b", "c"]}
    assert chosen(EXACT, nt=losses(*rows, images="aba")) == {"nt": ["a", "c", "b"]}


def test_problems_without_plans_are_left_out() -> None:
    """A problem that no candidate has a plan for has no loss, and a plan that is missing is as bad as can be."""
    found = losses((math.inf, math.inf), (10, math.inf), (10, 1000))
    assert np.exp(found.log) == pytest.approx(np.array([[1.0, 3.0], [1.0, 3.0]]))
    assert found.classes == ["class"] * 2


def test_losses_by_class() -> None:
    """The losses of a class are of its problems in all groups, weighted."""
    pairs: dict[Group, list[str]] = {NT: ["a"], NN: ["a"]}
    first = {NT: losses((10, 10), name="x"), NN: losses((20, 10), weight=3.0, name="x")}
    rows = by_class(pairs, first, {NT: losses((15, 10), name="y")})
    assert [row[:2] for row in rows] == [("x", 2), ("y", 1)]
    assert [row[2:] for row in rows] == [pytest.approx((2**0.75, 2.0, 2.0)), pytest.approx((1.5, 1.5, 1.5))]
