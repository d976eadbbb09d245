"""Where the data folders are: inside the package in a wheel, beside it in a checkout or an editable install."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def in_checkout() -> bool:
    """Whether this is a checkout or an editable install, where what is built lies beside its sources."""
    return not (Path(__file__).parents[1] / "templates").is_dir()


def data_folder(name: str) -> Path:
    """The folder "templates" or "artifacts" of this installation; it need not exist."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def read(folder: Path, name: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file. Raises OSError as `opened` does."""
    with opened(folder, name) as stream:
        return stream.read(limit)


@contextmanager
def opened(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open the file `name` ("/" between folders) below `folder` to be read.

    Raises:
        OSError: there is none, it is no plain file, a link leads to it, or it cannot be read.
    """
    path = folder / name
    below = [path, *path.parents][: len(Path(name).parts)]
    links = [str(part.relative_to(folder)) for part in below if part.is_symlink()]
    if links:
        raise OSError(errno.ELOOP, f"{links[-1]} is a link; copy the files that links lead to")
    # A pipe that took the file's place meanwhile is not waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a plain file")
        yield stream


def build_command(arch: str, folder: Path | None) -> str:
    """What adds a pack of `arch` to those in `folder`, or to those that `aotmm.load()` finds."""
    if folder is None and not in_checkout():
        return f'aotmm build --arch {arch} --out packs, then aotmm.load("packs")'
    return f"aotmm build --arch {arch} --out {data_folder('artifacts') if folder is None else folder}"
