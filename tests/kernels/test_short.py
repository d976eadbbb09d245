"""Family `short`: right on the interpreters up to a K of one step, and each of its masks is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.packs import pack_of
from tests.config_sets import config_set, tile
from tests.native.emulation import Product, execute, missing
from tests.native.mutants import Mutant, executed

LAYOUTS = ("nn", "nt", "tn", "tt")
CONFIGS = config_set(
    tile(32, 32, 32, 1, 2, family="short", dtypes=["fp16", "bf16"]),
    dtypes=["fp16", "bf16"],
    layouts=list(LAYOUTS),
    epilogues=["none", "full"],
)
KERNEL = "kernels/short.py"
# Rows, columns and K end within a block; an operand of a batch ends within its block, too.
PRODUCTS = {
    f"{layout} {K}": Product(40, 24, K, layout=layout, batch=batch, padding=8)
    for layout in LAYOUTS
    for K, batch in ((8, 1), (24, 3), (32, 1))
}
SEEN = ("nn 8", "nt 24", "tt 24")
STORED = "(rows[:, None] < M) & (cols[None, :] < N)"
MUTANTS = {
    "K of A not masked": Mutant(KERNEL, "(rows[:, None] < M) & (ks[None, :] < K)", "(rows[:, None] < M)", SEEN),
    "rows of A not masked": Mutant(KERNEL, "(rows[:, None] < M) & (ks[None, :] < K)", "(ks[None, :] < K)", SEEN),
    "K of B not masked": Mutant(KERNEL, "(ks[:, None] < K) & (cols[None, :] < N)", "(cols[None, :] < N)", SEEN),
    "rows of C not masked": Mutant(KERNEL, STORED, "(cols[None, :] < N)", SEEN),
    "columns of C not masked": Mutant(KERNEL, STORED, "(rows[:, None] < M)", SEEN),
    "columns of B not masked": Mutant(KERNEL, "(ks[:, None] < K) & (cols[None, :] < N)", "(ks[:, None] < K)", SEEN),
}


@pytest.mark.parametrize("arch", ["sm80", "gfx90a"])
def test_every_k_of_a_step_is_right(arch: str) -> None:
    """Products of integers are exact, those of random numbers within the bounds; nothing else is read or written."""
    if reason := missing(arch):
        pytest.skip(reason)
    folder = pack_of(arch, CONFIGS)
    products = [*PRODUCTS.values(), Product(33, 40, 16, dtype="bf16", out="bf16", layout="nt", exact=False)]
    products += [Product(40, 24, 24, activation="gelu", bias="vector", exact=False)]
    products += [Product(40, 24, 0), Product(40, 24, 5, layout="tn"), Product(40, 24, 31, layout="tn")]
    outcomes = execute(folder, products)
    assert [outcome.complaints for outcome in outcomes if outcome.complaints] == []
    assert all(outcome.kernel.startswith("short") for outcome in outcomes)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path) -> None:
    """Without one of its masks each product reads what is not there, or has a wrong sum."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    outcomes = executed(MUTANTS[name], "sm80", CONFIGS, PRODUCTS, tmp_path)
    silent = [product for product, outcome in outcomes.items() if not outcome.complaints]
    assert silent == []


def test_a_longer_k_goes_elsewhere() -> None:
    """K is a guard, at most one step: a longer one is multiplied, and not by these kernels."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    (outcome,) = execute(pack_of("sm80", CONFIGS), [Product(40, 24, 40)])
    assert not outcome.complaints
    assert not outcome.kernel.startswith("short")
