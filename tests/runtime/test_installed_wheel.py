"""An installed wheel does its work with torch alone: no Triton, no template engine, no compiler, no checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.runtime.installation import WATCHED_USE, run
from tests.samples import SHIPPED

CLI = "from aotmm.cli import main; main()"
PROBE = f"""
{WATCHED_USE}
import os
print(aotmm.__file__, os.access(sys.argv[1], os.W_OK), events)
"""
TWO_COPIES = """
import aotmm
aotmm.load()
for name in [name for name in sys.modules if name.partition(".")[0] == "aotmm"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
import aotmm
try:
    aotmm.load()
except aotmm.ArtifactError as error:
    print(error)
"""
THREADS = """
import threading
import aotmm, torch
barrier, found = threading.Barrier(32), []
def ask():
    barrier.wait()
    found.append(aotmm.load())
threads = [threading.Thread(target=ask) for _ in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), len(set(map(id, found))))
"""


def test_load_and_product(site: Path, tmp_path: Path) -> None:
    """`load()` finds the wheel's own packs and opens every launcher; a product is right where there is a GPU."""
    printed = run(
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
    packs = [f"{site}/aotmm/artifacts/{arch} True" for arch in sorted(SHIPPED)]
    assert printed.splitlines() == [f"{site}/aotmm/__init__.py", *packs]


def test_nowhere_to_write(site: Path) -> None:
    """An installation that may not be written to works without HOME, and writes no file anywhere."""
    for path in (site, *site.rglob("*")):
        path.chmod(0o555)
    printed = run(site, Path("/"), PROBE, str(site), homeless=True)
    assert printed.splitlines() == [f"{site}/aotmm/__init__.py False []"]


def test_doctor(site: Path, tmp_path: Path) -> None:
    """`aotmm doctor` checks every file of the installed packs and finds nothing wrong."""
    printed = run(site, tmp_path, CLI, "doctor")
    for arch in SHIPPED:
        assert f"{site}/aotmm/artifacts/{arch}" in printed


def test_two_copies(site: Path, tmp_path: Path) -> None:
    """A second copy of aotmm in one process is refused by an error that names both."""
    other = tmp_path / "other"
    shutil.copytree(site, other)
    printed = run(site, tmp_path, TWO_COPIES, str(other))
    assert printed.startswith("another copy of aotmm is in use in this process")
    assert f"{site}/aotmm/native/libaotmm_torch.so; this one is aotmm" in printed
    assert f" in {other}/aotmm; leave one of them on sys.path" in printed


def test_threads_load_one_library(site: Path, tmp_path: Path) -> None:
    """32 threads that make the process's first call of `load` get the same library."""
    assert run(site, tmp_path, THREADS) == "32 1\n"
