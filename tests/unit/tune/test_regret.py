"""Which configs nobody would miss, and what a regret is."""

from __future__ import annotations

from aotmm.pack.table import Sample, ShapeTimes
from aotmm.tune.regret import Choice, Regret, prune


def shape(size: int, element_bytes: int = 2, **times: int) -> ShapeTimes:
    """A square with these times."""
    samples = tuple(Sample(name, 1, pdl=False, copies=0, ns=ns) for name, ns in times.items())
    return ShapeTimes(element_bytes, "nn", fast_accum=False, M=size, N=size, K=size, held_out=False, times=samples)


def test_what_is_never_the_best_is_pruned_first() -> None:
    """A config that is slower everywhere costs nothing; the one before the last stays, because it would cost."""
    shapes = [shape(1, a=100, b=200, c=150), shape(2, a=200, b=100, c=150)]
    assert [(row.config_name, row.mean, row.worst) for row in prune(shapes)] == [("c", 1.0, 1.0)]


def test_of_two_equals_one_stays() -> None:
    """Each could be left out, but not both."""
    shapes = [shape(size, a=100, b=100) for size in range(1, 9)]
    assert len(list(prune(shapes))) == 1


def test_a_little_regret_is_accepted() -> None:
    """0.4 % on average is; 10 % on one shape of a hundred is not, although the average is 0.1 %."""
    everywhere = [shape(size, a=1000, b=1004) for size in range(1, 9)]
    assert [row.config_name for row in prune(everywhere)] == ["a"] or [
        row.config_name for row in prune(everywhere)
    ] == ["b"]
    once = [shape(size, a=1000, b=1000) for size in range(1, 100)] + [shape(100, a=1100, b=1000)]
    assert [row.config_name for row in prune(once)] == ["a"]


def test_what_is_alone_on_a_shape_stays() -> None:
    """Even where it is slow everywhere else."""
    shapes = [shape(size, a=100, any=900) for size in range(1, 9)] + [shape(9, any=900)]
    assert list(prune(shapes)) == []


def test_element_sizes_are_evaluated_apart() -> None:
    """A config can be of use for one element_bytes only."""
    shapes = [shape(1, element_bytes=1, a=100, b=120), shape(1, element_bytes=2, a=120, b=100)]
    assert [(row.element_bytes, row.config_name) for row in prune(shapes)] == [(1, "b"), (2, "a")]


def test_shapes_without_times_do_not_count() -> None:
    """Nothing was measured there."""
    assert list(prune([shape(1)])) == []


def test_regret_sums_up_what_was_measured() -> None:
    """Geometric mean and worst of the known choices; the unknown ones are counted, and shown first."""
    best = Sample("a", 1, pdl=False, copies=0, ns=100)
    choices = [Choice(shape(size), "a", regret, best) for size, regret in enumerate((1.0, 1.21, None, 1.0), 1)]
    found = Regret(tuple(choices))
    assert found.mean == (1.21) ** (1 / 3)
    assert found.worst == 1.21
    assert found.unmeasured == 1
    assert [choice.shape.M for choice in found.worst_choices(2)] == [3, 2]
    assert (Regret(()).mean, Regret(()).worst) == (1.0, 1.0)
