"""Packs on disk: find them, check them, and open their launchers from the checked bytes."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from aotmm.errors import ArtifactError
from aotmm.pack import manifest
from aotmm.pack.files import opened, read
from aotmm.pack.manifest import MAX_FILE_BYTES, File, Head, Manifest
from aotmm.target import TARGETS, host

if TYPE_CHECKING:
    from aotmm.pack.function_table import FunctionTable
    from aotmm.pack.schema import Image
    from aotmm.pack.table import Table
    from aotmm.runtime.launcher import Launcher
    from aotmm.runtime.own import OwnLauncher

    AnyTable = Table | FunctionTable

_PIECE_BYTES = 1 << 20  # of a file: few enough for a processor's cache
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Pack:
    """A pack whose manifest.json was read and checked. Its library and its list of kernels are read when needed.

    Attributes:
        folder: its path.
        head: arch, library and provenance.
        owner: name and version of the distribution that added it to the default library; "" for all other packs.
        table: times that replace those that its launcher was built with, or those of its functions; to be set before
            that is opened.
    """

    def __init__(self, folder: Path, head: Head) -> None:
        self.folder = folder
        self.head = head
        self.owner = ""
        self.table: AnyTable | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.arch} pack in {self.folder}{f' of {self.owner}' if self.owner else ''}>"

    def __reduce__(self) -> tuple[Callable[..., Pack], tuple[object, ...]]:
        return _reopen, (self.folder, self.owner, self.table)

    @property
    def arch(self) -> str:
        """Return the architecture that the kernels are built for."""
        return self.head.arch

    @cached_property
    def manifest(self) -> Manifest:
        """Return the whole manifest. Raises ArtifactError if the list of kernels is missing, altered or refused."""
        data = read_verified(self.folder, self.head.kernels_file)
        return manifest.read_kernels(self.head, data, str(self.folder / self.head.kernels_file.path))

    def code(self, image: Image) -> bytes:
        """Return an image or PTX of a kernel, from the library. Raises ArtifactError if that is missing or altered."""
        return manifest.code(self.head, image, read_verified(self.folder, self.head.library), f"pack {self.folder}")

    @property
    def launcher(self) -> Launcher:
        """Return the pack's launcher, opened once.

        Raises:
            ArtifactError: the library is missing, altered, or of another version.
        """
        with self._lock:
            return self._launcher

    @cached_property
    def _launcher(self) -> Launcher:
        from aotmm.runtime.launcher import Launcher  # not before a launch: `load` should be quick

        launcher = Launcher(load_verified(self.folder, self.head.library), self.arch, lambda: self.manifest.kernels)
        if self.table is not None:
            launcher.retune(cast("Table", self.table))
        return launcher

    @property
    def own_launcher(self) -> OwnLauncher:
        """Return the launcher of a pack of functions, opened once. Raises ArtifactError as `launcher`."""
        with self._lock:
            return self._own_launcher

    @cached_property
    def _own_launcher(self) -> OwnLauncher:
        from aotmm.runtime.own import OwnLauncher

        launcher = OwnLauncher(load_verified(self.folder, self.head.library), self.arch, lambda: self.manifest.own)
        if self.table is not None:
            launcher.retune(cast("FunctionTable", self.table))
        return launcher


def _reopen(folder: Path, owner: str, table: AnyTable | None) -> Pack:
    """Open the same pack in another process, or as a copy in this one; its launcher is opened anew."""
    pack = open_pack(folder)
    pack.owner, pack.table = owner, table
    return pack


def open_pack(folder: Path, machine: str = "") -> Pack:
    """Return the pack in `folder`, whose library is for this machine, or for processor `machine`.

    Raises:
        ArtifactError: there is none, it is half written, for another machine, or its manifest is refused.
    """
    path = folder / manifest.FILE_NAME
    try:
        data = read(folder, manifest.FILE_NAME, manifest.MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        arch = folder.name if folder.name in TARGETS else "ARCH"
        raise ArtifactError(
            f"{folder} is not a pack: it has no {manifest.FILE_NAME}; "
            f"build one: aotmm build --arch {arch} --out {folder.parent}"
        ) from error
    except OSError as error:
        raise unreadable(f"pack {folder}", error) from error
    head = manifest.read_head(data, str(path))
    if head.host != host(machine):
        raise ArtifactError(
            f"pack {folder} is for {head.host}, this machine is {host(machine)}; build it here, or anywhere with "
            f"aotmm build --host {host(machine).partition('-')[0]}"
        )
    return Pack(folder, head)


def open_packs(path: Path) -> list[Pack]:
    """Return the pack in `path`, or the packs in its subfolders, ordered by name; other subfolders are ignored.

    Raises:
        ArtifactError: there is none, or one is refused.
    """
    try:
        folders = _pack_folders(path)
    except OSError as error:
        raise unreadable(f"packs in {path}", error) from error
    found = [open_pack(folder) for folder in folders]
    if not found:
        raise ArtifactError(f"no packs in {path}; build some: aotmm build --arch ... --out {path}")
    return found


def unreadable(what: str, error: OSError) -> ArtifactError:
    """Return the error for a part `what` of packs that cannot be read, with advice."""
    todo = "let this user read it" if isinstance(error, PermissionError) else "build the pack again"
    return ArtifactError(f"{what} cannot be read: {error}; {todo}")


def _pack_folders(path: Path) -> list[Path]:
    if (path / manifest.FILE_NAME).is_file():
        return [path]
    if not path.is_dir():
        raise ArtifactError(f"no packs: {path} is not a folder; build some: aotmm build --arch ... --out {path}")
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    packs = [entry for entry in folders if entry.name in TARGETS or (entry / manifest.FILE_NAME).is_file()]
    return sorted(packs)


def read_verified(folder: Path, file: File) -> bytes:
    """Return the content of one file of a pack, read once and compared with the manifest.

    Raises:
        ArtifactError: it is missing, behind a link, no plain file, or differs from the manifest.
    """
    return b"".join(_verified(folder, file))


def _verified(folder: Path, file: File) -> Iterator[bytes]:
    """Yield the content of a file in pieces, each digested while a cache still holds it.

    Raises:
        ArtifactError: as `read_verified`; a wrong digest is known only after the last piece.
    """
    digest, size, most = hashlib.sha256(), 0, min(file.bytes, MAX_FILE_BYTES) + 1
    try:
        with opened(folder, file.path) as stream:
            while piece := stream.read(min(_PIECE_BYTES, most - size)):
                digest.update(piece)
                size += len(piece)
                yield piece
    except OSError as error:
        raise unreadable(f"pack {folder}: {file.path}", error) from error
    altered = manifest.mismatch(file, size, digest.hexdigest())
    if altered is not None:
        raise ArtifactError(f"pack {folder}: {altered}; build the pack again")


def load_verified(folder: Path, file: File) -> ctypes.CDLL:
    """Return a library of a pack, loaded from the checked bytes, not from the path again."""
    try:
        return load_library(_verified(folder, file), Path(file.path).name)
    except OSError as error:
        raise ArtifactError(f"pack {folder}: {file.path} cannot be loaded: {error}") from error


def load_library(pieces: Iterable[bytes], name: str) -> ctypes.CDLL:
    """Return the shared library of these bytes, from a memory file that nobody can change.

    Raises:
        OSError: there is no memory, or the loader refuses it. Errors of `pieces` pass; nothing is loaded then.
    """
    handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(handle, "wb", closefd=False) as stream:
            stream.writelines(pieces)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
        # The descriptor stays open: the loader knows libraries by name, and would take the next one that got the same
        # number for this one.
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except BaseException:
        os.close(handle)
        raise
