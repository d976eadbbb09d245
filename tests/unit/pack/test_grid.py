"""Expressions of a grid: what they may have, and what they are in C."""

from __future__ import annotations

import pytest

from aotmm.errors import SpecError
from aotmm.pack.grid import in_c

VALUES = {"n": "values[3]", "BLOCK": "128ll"}


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("n", "values[3]"),
        (" cdiv(n, BLOCK) ", "ceil_div_of(values[3], 128ll, failed)"),
        ("triton.cdiv(n, BLOCK)", "ceil_div_of(values[3], 128ll, failed)"),
        ("n + 2 * BLOCK", "add(values[3], multiply(2ll, 128ll, failed), failed)"),
        ("min(n // 2, 7) - 1", "subtract(least(floor_div(values[3], 2ll, failed), 7ll, failed), 1ll, failed)"),
        ("max(1, n)", "most(1ll, values[3], failed)"),
    ],
)
def test_in_c(expression: str, wanted: str) -> None:
    """Each operation is a call of C's that can fail; names are what the launch has for them."""
    assert in_c(expression, VALUES) == wanted


@pytest.mark.parametrize(
    "expression",
    [
        *("", "n +", "n / 2", "n % 2", "-n", "n ** 2", "1.5", "True", "n[0]", "n if n else 1", "'text'", "n; n"),
        *("cdiv(n)", "cdiv(n, 2, 3)", "pow(n, 2)", "min(n, b=2)", "9007199254740992", "(" * 300 + "n" + ")" * 300),
    ],
)
def test_refused(expression: str) -> None:
    """All else is refused with the expression and what is allowed."""
    with pytest.raises(SpecError, match=r"grid .*(no expression|not one) of integers, arguments"):
        in_c(expression, VALUES)


def test_unknown_names() -> None:
    """A name that no value is known of is refused with those that are known."""
    with pytest.raises(SpecError, match="grid 'm': m is no integer argument or constexpr; those are: n, BLOCK"):
        in_c("m", VALUES)
