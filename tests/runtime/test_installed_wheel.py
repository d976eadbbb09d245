"""An installed wheel does its work with torch alone: no Triton, no template engine, no compiler, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotmm.target import TARGETS

ROOT = Path(__file__).parents[2]

# Starts every program below: it forbids imports, and after `arm()` also processes and files opened for writing.
GUARD = """
import os, sys

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "jinja2", "ziglang"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked)

def arm():
    def hook(event, arguments):
        if event in {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"}:
            raise AssertionError(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise AssertionError(f"{arguments[0]} is opened for writing")
    sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    for command in (
        ("hatchling", "build", "-t", "wheel", "-d", folder / "dist"),
        (
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "-f",
            folder / "dist",
            "--target",
            folder / "site",
            "aotmm",
        ),
    ):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def _run(site: Path, tmp_path: Path, program: str, *arguments: str) -> str:
    """What `program` prints when it runs with the installed wheel ahead of everything, far from the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", GUARD + program, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_load(site: Path, tmp_path: Path) -> None:
    """`load()` finds the wheel's own packs and opens every launcher, starting no process and writing no file."""
    printed = _run(
        site,
        tmp_path,
        """
import torch
arm()
import aotmm
lib = aotmm.load()
print(aotmm.__file__)
for pack in lib.packs:
    print(pack.folder, len(pack.launcher.kernels) > 0)
assert callable(torch.ops.aotmm.mm)
assert "click" not in sys.modules
""",
    )
    packs = [f"{site}/aotmm/artifacts/{arch} True" for arch in sorted(TARGETS)]
    assert printed.splitlines() == [f"{site}/aotmm/__init__.py", *packs]


def test_product(site: Path, tmp_path: Path) -> None:
    """A product runs where a GPU is; a tensor on the CPU is refused by name."""
    _run(
        site,
        tmp_path,
        """
import torch
import aotmm
gpu = torch.cuda.is_available()
a = torch.ones(16, 16, device="cuda" if gpu else "cpu", dtype=torch.float16)
arm()
lib = aotmm.load()
try:
    lib.matmul(torch.ones(16, 16), torch.ones(16, 16))
except TypeError as error:
    assert "cpu" in str(error), error
else:
    raise AssertionError("a CPU tensor was taken")
if gpu:
    assert (lib.matmul(a, a) == 16).all()
""",
    )


def test_doctor(site: Path, tmp_path: Path) -> None:
    """`aotmm doctor` checks every file of the installed packs and finds nothing wrong."""
    printed = _run(site, tmp_path, "from aotmm.cli import main; main()", "doctor")
    for arch in TARGETS:
        assert f"{site}/aotmm/artifacts/{arch}" in printed
