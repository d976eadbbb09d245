"""Family `multistage`: what its source relies on, and that the interpreter sees where it lacks a barrier or a wait.

test_tile.py and test_helpers.py show that its images are right, tests/native/test_batch_invariance.py that they give
the bits of family `tile`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.build.packs import default_pack
from tests.config_sets import config_set, tile
from tests.native.emulation import Product, missing
from tests.native.mutants import Mutant, executed

ARCH = "sm80"
CONFIGS = config_set(
    tile(64, 64, 32, 3, 4, family="multistage", archs=["sm80"], dtypes=["fp16"]),
    dtypes=["fp16"],
    layouts=["nt"],
    epilogues=["none"],
)
KERNEL = "kernels/multistage.py"
# After so many steps the place that the last copies go to, and the one that is read last, are where results pass.
PRODUCTS = {f"{steps} steps": Product(72, 80, 32 * steps - 8, layout="nt") for steps in (5, 6)}
EVERY = tuple(PRODUCTS)

FIRST = "    async_copy.wait_group(STAGES - 2)\n    gl.barrier()\n"
NEXT = (
    "        async_copy.wait_group(STAGES - 2)\n"
    "        # All copies of the next step are there, and all threads have read this one.\n"
    "        gl.barrier()\n"
)
LAST = "    async_copy.wait_group(0)\n    gl.barrier()\n"
NO_DATA = "reads shared bytes that this group never wrote"
NOT_WAITED = "race: (reads|writes) shared bytes to which a copy has begun that was not waited for"
NOT_SYNCHRONISED = "race: reads shared bytes that another wave wrote since the last barrier"
STILL_READ = "race: writes shared bytes that another wave reads in the same barrier interval"
BOTH_WRITE = "race: two waves write different values into the same shared bytes in one barrier interval"
# By what is wrong: the mutant, and the words of the fault, or of the judge if no memory is touched that should not be.
MUTANTS = {
    "no barrier before the first step": (
        Mutant(KERNEL, FIRST, FIRST.replace("gl.barrier()", ""), EVERY),
        NOT_SYNCHRONISED,
    ),
    "no barrier in a step": (Mutant(KERNEL, NEXT, NEXT.replace("gl.barrier()", ""), EVERY), NOT_SYNCHRONISED),
    "no barrier before results pass through the ring": (
        Mutant(KERNEL, LAST, LAST.replace("gl.barrier()", ""), EVERY),
        f"{STILL_READ}|{BOTH_WRITE}",
    ),
    "one step too few waited for, before the first": (
        Mutant(KERNEL, FIRST, FIRST.replace("- 2", "- 1"), EVERY),
        f"{NO_DATA}|{NOT_WAITED}",
    ),
    "one step too few waited for": (
        Mutant(KERNEL, NEXT, NEXT.replace("- 2", "- 1"), EVERY),
        f"{NO_DATA}|{NOT_WAITED}",
    ),
    "copies not waited for before results pass through the ring": (
        Mutant(KERNEL, LAST, LAST.replace("async_copy.wait_group(0)", ""), EVERY),
        NOT_WAITED,
    ),
    "a step is copied where this one is read": (
        Mutant(KERNEL, "free = gl.where(stage == 0, STAGES - 1, stage - 1)", "free = stage", EVERY),
        STILL_READ,
    ),
    "a part is not multiplied": (
        Mutant(KERNEL, "in gl.static_range(1, BLOCK_K // PART)", "in gl.static_range(1, 1)", EVERY),
        "error/bound",
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the unmodified sources compiled: mutants compile only what they change."""
    if reason := missing(ARCH):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cache")
    outcomes = executed(None, ARCH, CONFIGS, PRODUCTS, folder)
    assert [outcome for outcome in outcomes.values() if outcome.complaints] == []
    assert all(outcome.kernel.startswith("multistage") for outcome in outcomes.values())
    return folder


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, cache: Path) -> None:
    """The kernel as it is is right; without one of its barriers or waits, each product shows it, by the fault."""
    mutant, words = MUTANTS[name]
    outcomes = executed(mutant, ARCH, CONFIGS, PRODUCTS, cache)
    complaints = {product: " ".join(outcome.complaints) for product, outcome in outcomes.items()}
    assert {product: text for product, text in complaints.items() if not re.search(words, text)} == {}


def test_results_take_no_memory_of_their_own() -> None:
    """They pass through the ring's, so that a block has no more shared memory than its stages."""
    kernels = [kernel for kernel in open_pack(default_pack(ARCH)).manifest.kernels if kernel.family == "multistage"]
    assert {kernel.role for kernel in kernels} == {"product", "partial"}
    for kernel in kernels:
        config = kernel.config
        ring = config.num_stages * config.block_k * (config.block_m + config.block_n) * 2
        assert kernel.shared_bytes == ring <= target(ARCH).shared_bytes, kernel.name
        assert kernel.spill_bytes == 0, kernel.name
