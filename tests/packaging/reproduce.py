"""Builds packs, libraries and wheels twice, as two people on two machines would, and compares every byte.

`make reproduce` does so with the default config set: `python -m tests.packaging.reproduce`.
"""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from aotmm.target import HOSTS
from tests.samples import SHIPPED

ROOT = Path(__file__).parents[2]
_SHORTEST = 5  # a shorter user or host name is found by chance
_BUILT = ("artifacts/[!.]*/**/*", "aotmm/native/*.so", "build/*/*.so", "build/*/[!.]*/**/*", "dist/*")
# Folder, umask, compiler processes (0: all processors), and what differs in the environment.
_PEOPLE = (
    ("one", 0o022, 3, {"TZ": "UTC", "LC_ALL": "C", "USER": "one-of-many", "PYTHONHASHSEED": "1"}),
    ("another/place with spaces", 0o077, 0, {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}),
)


def build_twice(folder: Path, archs: tuple[str, ...], configs: str) -> list[dict[str, bytes]]:
    """Every built file of both builds by its path in the checkout; wheels by their contents too.

    Raises:
        CalledProcessError: a build failed.
    """
    return [_build(folder / name, archs, configs, umask, jobs, more) for name, umask, jobs, more in _PEOPLE]


def traces(folder: Path) -> list[bytes]:
    """What must not be in any file: names of folders, of the user and of the machine."""
    names = [str(path) for path in (folder, ROOT, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir()))]
    names += [name for name in (platform.node(), getpass.getuser(), "one-of-many") if len(name) >= _SHORTEST]
    return [name.encode() for name in names if name != "/"]


def _build(
    root: Path, archs: tuple[str, ...], configs: str, umask: int, jobs: int, more: dict[str, str]
) -> dict[str, bytes]:
    """One build, in a copy of the checkout at `root`."""
    listed = ("git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
    home = root.parent / f"home of {root.name}"
    home.mkdir()
    settings = os.environ | {"PYTHONPATH": str(root), "HOME": str(home)} | more
    packs = ["build", *(f"--arch={arch}" for arch in archs), "--configs", configs]
    command = [sys.executable, "-c", "from aotmm.cli import main; main()", *packs]
    processes = ["--jobs", str(jobs)] if jobs else []
    other = next(name for name in HOSTS if name != platform.machine())
    make = [sys.executable, "wheels.py"]
    for step in (
        [*command, *processes],
        [*command, *processes, "--host", other, "--out", f"build/{other}", "--cache", "artifacts/.cache"],
        [*make, *archs],
        [*make, "--label", archs[0]],
        [*make, "--kernels", *archs],
        [*make, "--host", other, *archs],
    ):
        subprocess.run(step, cwd=root, umask=umask, env=settings, check=True, capture_output=True)
    found = {path.relative_to(root).as_posix(): path for form in _BUILT for path in root.glob(form) if path.is_file()}
    contents = {name: path.read_bytes() for name, path in sorted(found.items()) if path.name != "README.md"}
    for name in [name for name in contents if name.endswith(".whl")]:
        with zipfile.ZipFile(root / name) as archive:
            contents |= {f"{name}/{inside}": archive.read(inside) for inside in archive.namelist()}
    return contents


def main() -> None:
    """Builds everything twice and fails where a byte differs, or a file says where it was built."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aotmm-reproduce-") as name:
        one, other = build_twice(Path(name), SHIPPED, "default")
        found = [trace for path, data in one.items() for trace in traces(Path(name)) if trace in data]
    differing = sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))
    size = sum(map(len, one.values()))
    sys.stdout.write(f"{len(one)} files, {size / 1e6:.0f} MB, built twice in {time.monotonic() - start:.0f} s\n")
    if differing or found:
        sys.exit(f"differ: {differing}; traces of where they were built: {found}")
    sys.stdout.write("all bit-identical, none with a path, a user's or a machine's name\n")


if __name__ == "__main__":
    main()
