"""Builds where the machine refuses something: files, memory, a home. Real processes, clear errors, no traceback."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from aotmm import build as building
from aotmm.build import build, link, torch_library
from aotmm.build.compile import Compiled
from aotmm.errors import AotmmError, CompileError, PackError
from aotmm.kernels import Variant
from aotmm.pack.decode import MAX_ITEMS
from aotmm.pack.manifest import file
from aotmm.workers import dask as clusters
from tests.build.packs import ROOT, tiny_pack
from tests.config_sets import config_set, tile
from tests.samples import kernel, manifest

CONFIGS = config_set(tile(64, 64, 32, 2, 4), dtypes=["fp16"])
LINK = """
import sys
from pathlib import Path
from aotmm.build.torch_library import link_torch_library
print(link_torch_library(Path(sys.argv[1])))
"""


def limited(limit: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`aotmm build` in a shell that has set a limit."""
    command = shlex.join([sys.executable, "-c", "from aotmm.cli import main; main(prog_name='aotmm')", "build"])
    rest = shlex.join(map(str, words))
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["/bin/sh", "-c", f"{limit} && exec {command} {rest}"],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A config set of one tile in every layout and epilogue: 17 kernels."""
    (tmp_path / "tests.toml").write_text(CONFIGS)
    return tmp_path / "tests.toml"


def test_fewer_files_than_processes_need(tmp_path: Path, configs: Path) -> None:
    """Where not all of --jobs can be started the error says so, the reason, and to try fewer."""
    done = limited("ulimit -n 20", "--arch=sm80", f"--configs={configs}", f"--out={tmp_path / 'out'}", "--jobs=16")
    assert done.returncode == CompileError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "was lost: a process for it cannot be started: [Errno 24] Too many open files; " in line
    assert line.endswith("try fewer --jobs")
    assert not (tmp_path / "out" / "sm80").exists()


@pytest.mark.parametrize("kilobytes", [40_000, 120_000])
def test_little_memory(tmp_path: Path, configs: Path, kilobytes: int) -> None:
    """Where threads cannot be started, or the compiler not be loaded, one line says it."""
    limit = f"ulimit -v {kilobytes}"
    done = limited(limit, "--arch=sm80", f"--configs={configs}", f"--out={tmp_path / 'out'}", "--jobs=4")
    assert done.returncode in (AotmmError.exit_code, CompileError.exit_code), done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"^error: .*(cannot be started|was lost: ImportError|out of memory)", done.stderr, re.MULTILINE)
    assert not (tmp_path / "out" / "sm80").exists()


@pytest.mark.parametrize("home", [None, "/dev/null/nowhere"])
def test_without_a_home(tmp_path: Path, home: str | None) -> None:
    """Libraries are linked where HOME is not set, or no folder: ziglang gets a folder of the process, which goes."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "out").mkdir()
    names = ("HOME", "XDG_CACHE_HOME", "ZIG_GLOBAL_CACHE_DIR", "CC")
    settings = {name: value for name, value in os.environ.items() if name not in names}
    settings |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)} | ({} if home is None else {"HOME": home})
    command = [sys.executable, "-c", LINK, str(tmp_path / "out")]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    names_of = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names_of == sorted([torch_library.LIBRARY.name, torch_library.DIRECT_CALL.name])
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [("gcc '", "does not run: No closing quotation"), ("/bin/sh -c :", "has no --version"), (" ", "does not run: ")],
)
def test_compilers_that_are_none(monkeypatch: pytest.MonkeyPatch, command: str, words: str) -> None:
    """A CC that cannot be split, or that says nothing of itself, is an error that names it and what to do."""
    monkeypatch.setenv("CC", command)
    with pytest.raises(CompileError, match=f"CC={command} {words}.*unset CC to use ziglang"):
        link.compiler()


@pytest.mark.parametrize("address", ["xyz://h", "tcp://", "h", "tcp://h:x", "tls://127.0.0.1:9", "inproc://x"])
def test_addresses_of_no_scheduler(
    tmp_path: Path, configs: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """An address that nobody can have is told before Dask makes a client, which would wait for itself at the end."""
    import distributed

    monkeypatch.setattr(clusters, "_CONNECT_S", 0.5)
    monkeypatch.setattr(distributed, "Client", lambda *_words, **_more: pytest.fail("a client was made"))
    with pytest.raises(AotmmError, match=rf"no Dask scheduler at {address}: .*; say one like tcp://host:8786"):
        build(("sm80",), tmp_path / "out", configs=str(configs), scheduler=address)


# ------------------------------------------------------------------------------------------------- advice that is right
def fails(how: str, _variant: Variant, _key: str) -> Compiled:
    """A compiler that raises, or is killed."""
    if how == "raises":
        raise AttributeError("'Kernel' object has no attribute 'x'")
    os.kill(os.getpid(), 9)
    raise AssertionError


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "was lost: AttributeError: 'Kernel' object has no attribute 'x'"),
        (
            "is killed",
            "was lost: its process ended with code -9; if that was for want of memory or files, try fewer --jobs",
        ),
    ],
)
def test_advice_for_lost_compilers(tmp_path: Path, how: str, words: str) -> None:
    """Fewer jobs are advised where a process was killed, not where its code is wrong."""
    configs = str(tiny_pack("sm80").parents[1] / "tiny.toml")
    with pytest.raises(CompileError) as caught:
        build(("sm80",), tmp_path, configs=configs, compiler=partial(fails, how), jobs=1)
    assert str(caught.value).endswith(words)


def test_advice_for_manifests_that_cannot_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer kernels are advised where there are too many, not where a file has a wrong path."""
    whole = replace(manifest(kernel("one")), library=file("../library", b""))
    with pytest.raises(PackError, match=r"is not a plain path inside the pack$"):
        building._write_manifest(tmp_path, whole)
    many = tuple(kernel(str(number)) for number in range(MAX_ITEMS + 1))
    with pytest.raises(PackError, match=f"of at most {MAX_ITEMS}, .*; build fewer kernels$"):
        building._write_manifest(tmp_path, manifest(*many))
    monkeypatch.setattr("aotmm.pack.manifest.MAX_MANIFEST_BYTES", 5000)
    with pytest.raises(PackError, match=r"bytes, a manifest has at most 5000; build fewer kernels$"):
        building._write_manifest(tmp_path, manifest(*many[:10]))
    assert list(tmp_path.iterdir()) == []
