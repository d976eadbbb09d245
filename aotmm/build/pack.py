"""Step 5, files -> pack: write a pack beside the previous one and replace that in one step."""

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
    """Yield a fresh folder that becomes `folder` when the block ends well, and vanishes when it does not.

    `folder` stays unchanged until the new pack is complete and on disk.

    Raises:
        PackError: the files cannot be written (permission, full disk), or the file system cannot replace a folder.
    """
    folder = folder.resolve()  # a link stays one
    fresh = folder.with_name(f".{folder.name}.new")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)  # left by a killed build; the lock of `build` makes it ours
        fresh.mkdir()
        yield fresh
        _sync(fresh)
        _exchange(fresh, folder)
    except OSError as error:
        raise PackError(f"pack {folder} cannot be written: {error}; the previous pack is as it was") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush every file and folder under `folder`, so that a crash cannot leave a pack of empty files."""
    for place, _, names in os.walk(folder):
        for path in [Path(place) / name for name in names] + [Path(place)]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _exchange(fresh: Path, folder: Path) -> None:
    """Exchange `fresh` and `folder` in one step.

    Raises:
        PackError: the file system cannot do that. Two renames would do, but between them there is no pack.
    """
    if not folder.exists():
        fresh.rename(folder)
        return
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None or swap(_AT_FDCWD, bytes(fresh), _AT_FDCWD, bytes(folder), _RENAME_EXCHANGE):
        why = "this C library has no renameat2" if swap is None else os.strerror(ctypes.get_errno())
        raise PackError(
            f"pack {folder} cannot be replaced in one step, for its file system does not exchange folders ({why}); "
            f"remove that pack and build again, from the kernels that are kept, or use an --out on another file system"
        )
