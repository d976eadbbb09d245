"""Products under NVIDIA's memory and race checkers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# racecheck does not follow how warp-specialised kernels hand over: it reports the word by which Triton's own code tells
# waiting warps what to do (written and read on either side of a barrier of all warps), and knows neither mbarriers nor
# TMA. racecheck of CUDA 13.0 ends with an error of its own where blocks of a cluster write to each other. Chains of
# products in tests/gpu/test_plans.py look for races of these kernels.
WARP_SPECIALISED = ["cooperative", "pingpong", "swapped"]


@pytest.mark.parametrize(
    ("tool", "left_out", "least", "clean"),
    [
        ("memcheck", [], 28, "ERROR SUMMARY: 0 errors"),
        ("racecheck", WARP_SPECIALISED, 7, "0 hazards displayed (0 errors, 0 warnings)"),
    ],
)
def test_sanitizer_finds_nothing(
    tool: str, left_out: list[str], least: int, clean: str, limit: Callable[[int], None]
) -> None:
    """compute-sanitizer sees no access outside an allocation and no race in shared memory; every result is right."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on PATH")
    limit(330)
    done = subprocess.run(
        [program, "--tool", tool, sys.executable, "-m", "tests.gpu.sanitize", *left_out],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine")
    right = re.search(r"^(\d+) of \1 right$", done.stdout, re.MULTILINE)
    assert right, done.stdout + done.stderr
    assert int(right[1]) >= least, done.stdout
    assert clean in done.stdout, done.stdout
