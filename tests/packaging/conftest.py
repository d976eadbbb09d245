"""Wheels that several tests look at: the largest takes 20 s to make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import aotmm
from tests.build.packs import ROOT
from tests.samples import SHIPPED

Make = Callable[..., dict[str, Path]]


@pytest.fixture(scope="session")
def make() -> Make:
    """Make the wheels that `wheels.py` makes with some arguments, in a folder, and return them by name and version."""

    def run(folder: Path, *words: str | Path, root: Path = ROOT) -> dict[str, Path]:
        command = [sys.executable, root / "wheels.py", "--directory", folder, *words]
        settings = os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return {"-".join(Path(line).name.split("-")[:2]): Path(line) for line in done.stdout.splitlines()}

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, make: Make) -> Path:
    """The wheel of all packs, as `make wheel` makes it from the checkout."""
    return make(tmp_path_factory.mktemp("wheel"), *SHIPPED)[f"aotmm-{aotmm.__version__}"]
