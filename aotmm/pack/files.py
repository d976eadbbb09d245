"""The data folders: inside the package in a wheel, beside it in a checkout or an editable install."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def in_checkout() -> bool:
    """Return whether this is a checkout or an editable install, where artifacts lie beside the sources."""
    return not place(Path(__file__).parents[1] / "templates").is_dir()


def data_folder(name: str) -> Path:
    """Return the folder "templates" or "artifacts" of this installation; it need not exist."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if place(installed).is_dir() else package.parent / name


def place(path: Path) -> Traversable:
    """Return the file or folder at `path`, which need not exist and may lie in a zip file, as in `sys.path`.

    A zip file is opened anew each time, because the children of a fork would share an open handle.

    Raises:
        OSError: a folder on the way may not be searched, or a zip file is damaged.
    """
    if not path.exists():
        for parent in path.parents:
            if parent.is_file():
                import zipfile  # only here: `import aotmm` should be quick

                if zipfile.is_zipfile(parent):
                    with damage_told(parent):
                        return zipfile.Path(parent).joinpath(*path.relative_to(parent).parts)
    return path


def read(folder: Path, name: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file. Raises OSError as `opened`."""
    with opened(folder, name) as stream:
        return stream.read(limit)


@contextmanager
def opened(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open the file `name` ("/" between folders) below `folder` to be read, also inside a zip file.

    Raises:
        OSError: there is none, it is no plain file, a link leads to it, or it cannot be read.
    """
    path = folder / name
    found = place(path)
    if found is not path:
        with damage_told(path), found.open("rb") as stream:
            yield stream
        return
    below = [path, *path.parents][: len(Path(name).parts)]
    links = [str(part.relative_to(folder)) for part in below if part.is_symlink()]
    if links:
        raise OSError(errno.ELOOP, f"{links[-1]} is a link; copy the files that links lead to")
    # Do not wait for a pipe that took the file's place meanwhile.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a plain file")
        yield stream


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Turn zipfile's exceptions for a file that is damaged, or no zip file, into an OSError."""
    import struct
    import zipfile
    import zlib

    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,
        OverflowError,
        RuntimeError,
        ValueError,
    ) as error:
        raise OSError(errno.EIO, f"{path}: damaged, or no zip file: {error or type(error).__name__}") from error


def build_command(arch: str, folder: Path | None) -> str:
    """Return the command that adds a pack of `arch` to those in `folder`, or to those that `aotmm.load()` finds."""
    if folder is None and not in_checkout():
        return f'aotmm build --arch {arch} --out packs, then aotmm.load("packs")'
    return f"aotmm build --arch {arch} --out {data_folder('artifacts') if folder is None else folder}"
