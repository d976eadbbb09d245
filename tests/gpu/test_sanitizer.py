"""Products under NVIDIA's memory and race checkers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# racecheck does not follow how warp-specialised kernels hand over: it reports the word by which Triton's own code tells
# waiting warps what to do (written and read on either side of a barrier of all warps), and knows neither mbarriers nor
# TMA. Their races are looked for by tests/gpu/test_plans.py, in chains of products.
RACECHECK = ["--kernel-regex-exclude", "kns=cooperative", "--kernel-regex-exclude", "kns=pingpong"]


@pytest.mark.parametrize(
    ("tool", "options", "clean"),
    [
        ("memcheck", [], "ERROR SUMMARY: 0 errors"),
        ("racecheck", RACECHECK, "0 hazards displayed (0 errors, 0 warnings)"),
    ],
)
def test_sanitizer_finds_nothing(tool: str, options: list[str], clean: str, limit: Callable[[int], None]) -> None:
    """compute-sanitizer sees no access outside an allocation and no race in shared memory; every result is right."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on PATH")
    limit(330)
    done = subprocess.run(
        [program, "--tool", tool, *options, sys.executable, "-m", "tests.gpu.sanitize"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine")
    assert "28 of 28 right" in done.stdout, done.stdout + done.stderr
    assert clean in done.stdout, done.stdout
