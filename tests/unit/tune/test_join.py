"""Times of two sessions in one table."""

from __future__ import annotations

import math
from dataclasses import replace

from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.tune.join import joined

EMPTY = Table(
    *("sm90", "NVIDIA H200", 132, 1980, 4916, 60 << 20, "580", "2.11.0", "0.1.0", "2026-11-25", 7, None, ()), shapes=()
)


def _shape(M: int, **ns: int) -> ShapeTimes:
    """A product whose configs, in one way of launching, take so many ns."""
    times = tuple(Sample(name, 1, pdl=False, copies=0, ns=each) for name, each in ns.items())
    kind = {"element_bytes": 2, "layout": "nn", "kind": "plain", "offset_a": 0, "offset_b": 0, "held_out": False}
    return ShapeTimes(M=M, N=64, K=64, times=times, **kind)  # type: ignore[arg-type]


def _joined(old: list[ShapeTimes], new: list[ShapeTimes], configs: str = "abc") -> dict[int, dict[str, int]]:
    """Times by rows of C and config."""
    found = joined(replace(EMPTY, shapes=tuple(old)), replace(EMPTY, shapes=tuple(new)), set(configs))
    return {shape.M: {sample.config_name: sample.ns for sample in shape.times} for shape in found.shapes}


def test_products_of_either_stay() -> None:
    """As they are."""
    assert _joined([_shape(8, a=10)], [_shape(16, b=20)]) == {8: {"a": 10}, 16: {"b": 20}}


def test_a_product_of_both_has_the_mean() -> None:
    """After the common factor of the old session, here 2, is taken out; plans that it alone has are scaled too.

    The mean is geometric, as all means of times here.
    """
    old, new = _shape(8, a=1000, b=2000, c=3000), _shape(8, a=2000, b=4000)
    assert _joined([old], [new]) == {8: {"a": 2000, "b": 4000, "c": 6000}}
    factor = math.sqrt(2000 / 1000 * 2000 / 2000)
    both = {"a": round(math.sqrt(1000 * factor * 2000)), "b": round(math.sqrt(2000 * factor * 2000))}
    assert _joined([_shape(8, a=1000, b=2000)], [_shape(8, a=2000, b=2000)]) == {8: both}


def test_the_fastest_tell_the_factor() -> None:
    """Ten of them: slow plans were timed once."""
    fast = {f"f{number}": 1000 + number for number in range(10)}
    configs = {*fast, "slow"}
    old, new = _shape(8, **fast, slow=9000), _shape(8, **fast, slow=4000)
    found = joined(replace(EMPTY, shapes=(old,)), replace(EMPTY, shapes=(new,)), configs)
    assert {sample.config_name: sample.ns for sample in found.shapes[0].times} == fast | {"slow": 6000}


def test_without_a_common_plan_the_new_times_count() -> None:
    """For nothing tells the factor."""
    assert _joined([_shape(8, a=1000)], [_shape(8, b=2000)]) == {8: {"b": 2000}}


def test_configs_that_are_gone_leave() -> None:
    """With the products that nothing else is known of."""
    assert _joined([_shape(8, a=10, b=20), _shape(16, a=30)], [], configs="b") == {8: {"b": 20}}


def test_the_seed_is_that_of_drawn_products() -> None:
    """The old one if the new session has none: the file of drawn products depends on it."""
    new = replace(EMPTY, seed=None)
    assert (joined(EMPTY, new, ()).seed, joined(new, replace(EMPTY, seed=8), ()).seed) == (7, 8)
