"""examples/c on the GPUs that are there, compiled with this machine's own compilers: no Python and no torch in them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from aotmm.runtime.library import Library

EXAMPLES = Path(__file__).parents[2] / "examples" / "c"
COMPILERS = {"c": ("cc", "gcc", "clang"), "cpp": ("c++", "g++", "clang++")}
OPTIONS = {"c": ("-std=c11", "-D_DEFAULT_SOURCE"), "cpp": ("-std=c++17",)}


def compiled(suffix: str, pack: Path, folder: Path) -> Path:
    """The program in that language."""
    compiler = next(filter(None, map(shutil.which, COMPILERS[suffix])), None)
    if compiler is None:
        pytest.skip(f"this needs one of {', '.join(COMPILERS[suffix])}")
    if torch.version.hip:
        pytest.skip("the example is for NVIDIA GPUs")
    program = folder / "matmul"
    words = [*OPTIONS[suffix], "-Wall", "-Wextra", "-Werror", "-O1", f"-I{pack}", f"-I{EXAMPLES}"]
    subprocess.run([compiler, *words, "-o", program, EXAMPLES / f"matmul.{suffix}", "-ldl"], check=True)
    return program


def run(program: Path, *words: str | Path) -> list[str]:
    """The lines that a program prints which must succeed."""
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("sizes", [(), (1000, 1000, 1000), (33, 40, 65536)], ids=str)
def test_c(lib: Library, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """The C program is right on every GPU."""
    pack = lib.pack_for(0)
    lines = run(compiled("c", pack.folder, tmp_path), pack.folder / pack.head.library.path, *map(str, sizes))
    assert len(lines) == torch.cuda.device_count()
    for number, line in enumerate(lines):
        assert re.match(rf"GPU {number}: .*: 0 of \d+ elements are wrong", line)


def test_cpp(lib: Library, tmp_path: Path) -> None:
    """So is the C++ program, on the first."""
    pack = lib.pack_for(0)
    (line,) = run(compiled("cpp", pack.folder, tmp_path), pack.folder / pack.head.library.path, pack.arch)
    assert line.endswith(": 0 of 60000 elements are wrong")


def test_newer_than_the_pack(lib: Library, tmp_path: Path) -> None:
    """The pack for sm80 serves a newer GPU from C too, by its PTX."""
    pack = next(pack for pack in lib.packs if pack.arch == "sm80")
    lines = run(compiled("c", pack.folder, tmp_path), pack.folder / pack.head.library.path)
    assert all(line.endswith("elements are wrong") and ": 0 of" in line for line in lines)
