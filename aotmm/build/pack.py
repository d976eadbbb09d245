"""Step 5, files -> pack: writes a pack beside the previous one and puts it in its place in one step."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aotmm.errors import PackError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Source: renameat2(2)


@contextmanager
def new_pack(folder: Path) -> Iterator[Path]:
    """A fresh folder that becomes `folder` when the block ends well, and vanishes when it does not.

    What was in `folder` stays as it is until the new pack is complete and on disk.

    Raises:
        PackError: the files cannot be written (permission, full disk).
    """
    folder = folder.resolve()  # a link stays one
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)  # what a killed build left; the lock of `build` makes it ours
        fresh.mkdir()
        yield fresh
        _sync(fresh)
        _exchange(fresh, folder)
    except OSError as error:
        raise PackError(f"pack {folder} cannot be written: {error}; the previous pack is as it was") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flushes every file and folder under `folder`, so that a crash cannot leave a pack of empty files."""
    for place, _, names in os.walk(folder):
        for path in [Path(place) / name for name in names] + [Path(place)]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _exchange(fresh: Path, folder: Path) -> None:
    """Puts `fresh` in the place of `folder`; what was there ends up at `fresh`."""
    if not folder.exists():
        fresh.rename(folder)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None and not swap(_AT_FDCWD, bytes(fresh), _AT_FDCWD, bytes(folder), _RENAME_EXCHANGE):
        return
    old = folder.with_name(f".{folder.name}.old")  # file systems without exchange: two renames
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)
