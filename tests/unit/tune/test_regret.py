"""The figures of a regret."""

from __future__ import annotations

import pytest

from aotmm.pack.table import Sample, ShapeTimes
from aotmm.tune.regret import Choice, Regret

BEST = Sample("a", 1, pdl=False, copies=0, ns=100)


def choice(size: int, regret: float | None, *, element_bytes: int = 2, offset: int = 0, drawn: bool = False) -> Choice:
    """A choice for a square."""
    square = ShapeTimes(
        *(element_bytes, "nn"),
        kind="plain",
        M=size,
        N=size,
        K=size,
        offset_a=offset,
        offset_b=0,
        drawn=drawn,
        held_out=True,
        times=(BEST,),
    )
    return Choice(square, "a", regret, BEST)


def test_regret_sums_up_what_was_measured() -> None:
    """Geometric mean, quantile and worst of the known choices; the unknown ones are counted, and shown first."""
    found = Regret(tuple(choice(size, regret) for size, regret in enumerate((1.0, 1.21, None, 1.0), 1)))
    assert found.mean == (1.21) ** (1 / 3)
    assert found.quantile == pytest.approx(1.189)  # nine tenths of the way from the second to the third
    assert found.worst == 1.21
    assert found.unmeasured == 1
    assert [each.shape.M for each in found.worst_choices(2)] == [3, 2]


def test_one_in_twenty_may_be_worse_than_the_quantile() -> None:
    """It tells how often a choice is bad, which neither the mean nor the worst one does."""
    rare = Regret(tuple(choice(size, 1.5 if size == 1 else 1.0) for size in range(100)))
    often = Regret(tuple(choice(size, 1.5 if size < 10 else 1.0) for size in range(100)))
    assert (rare.quantile, often.quantile) == (1.0, 1.5)
    assert Regret((choice(1, 1.3),)).quantile == 1.3


def test_without_choices_there_is_nothing_to_regret() -> None:
    """Every figure is 1."""
    nothing = Regret(())
    assert (nothing.mean, nothing.quantile, nothing.worst, nothing.by_kind()) == (1.0, 1.0, 1.0, {})


def test_kinds_are_evaluated_apart() -> None:
    """By origin, bytes of an element and offsets of operands; every choice once."""
    found = Regret(
        (
            choice(1, 1.0),
            choice(2, 1.1, drawn=True),
            choice(3, 1.2, drawn=True),
            choice(4, 1.4, element_bytes=1, drawn=True),
            choice(5, 1.3, offset=16, drawn=True),
        )
    )
    assert {kind: (each.worst, len(each.choices)) for kind, each in found.by_kind().items()} == {
        "random, 1 bytes": (1.4, 1),
        "random, 2 bytes": (1.2, 2),
        "random, 2 bytes, offsets": (1.3, 1),
        "sweeps, 2 bytes": (1.0, 1),
    }
