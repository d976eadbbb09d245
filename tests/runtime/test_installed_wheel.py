"""An installed wheel does its work with torch alone: no Triton, no template engine, no compiler, no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotmm.target import TARGETS

ROOT = Path(__file__).parents[2]

# Starts every program below.
BLOCK_BUILD_LIBRARIES = """
import sys

class Block:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "jinja2", "ziglang"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block)
"""


def _module(*command: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    _module("hatchling", "build", "-t", "wheel", "-d", folder)
    _module("pip", "install", "-q", "--no-deps", "--target", folder / "site", next(folder.glob("*.whl")))
    return folder / "site"


def _run(site: Path, tmp_path: Path, program: str, *arguments: str) -> str:
    """What `program` prints when it runs with the installed wheel ahead of everything, far from the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_BUILD_LIBRARIES + program, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_load_and_product(site: Path, tmp_path: Path) -> None:
    """`load()` finds the wheel's own packs and opens every launcher; a product is right where there is a GPU."""
    printed = _run(
        site,
        tmp_path,
        """
import torch
import aotmm
lib = aotmm.load()
print(aotmm.__file__)
for pack in lib.packs:
    print(pack.folder, len(pack.launcher.kernels) > 0)
if torch.cuda.is_available():
    a = torch.ones(16, 16, device="cuda", dtype=torch.float16)
    assert (lib.matmul(a, a) == 16).all()
""",
    )
    packs = [f"{site}/aotmm/artifacts/{arch} True" for arch in sorted(TARGETS)]
    assert printed.splitlines() == [f"{site}/aotmm/__init__.py", *packs]


def test_doctor(site: Path, tmp_path: Path) -> None:
    """`aotmm doctor` checks every file of the installed packs and finds nothing wrong."""
    printed = _run(site, tmp_path, "from aotmm.cli import main; main()", "doctor")
    for arch in TARGETS:
        assert f"{site}/aotmm/artifacts/{arch}" in printed
