"""The examples run, each in a process of its own, as README shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_example(example: Path) -> None:
    """It succeeds and says something."""
    if example.name == "compiled.py":
        pytest.importorskip("triton", reason="Inductor needs Triton for what is not a product")
    if example.name == "experts.py":
        pytest.importorskip("transformers", "5", reason="transformers lets experts be replaced from 5 on")
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout
