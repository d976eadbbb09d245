"""Packs on disk: finds them, checks them, and opens their launchers from the bytes that were checked."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aotmm import manifest
from aotmm.errors import ArtifactError
from aotmm.manifest import MAX_FILE_BYTES, File, Head, Manifest
from aotmm.target import TARGETS

if TYPE_CHECKING:
    from aotmm.runtime.launcher import Launcher
    from aotmm.table import Table

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Pack:
    """A pack whose manifest.json was read and checked. Its library and its list of kernels are read when needed.

    Attributes:
        folder: where it is.
        head: arch, library and provenance.
        table: times that its launcher is to go by instead of those that it was built with; set before that is opened.
    """

    def __init__(self, folder: Path, head: Head) -> None:
        self.folder = folder
        self.head = head
        self.table: Table | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self.arch} pack in {self.folder}>"

    @property
    def arch(self) -> str:
        """The architecture that the kernels are built for."""
        return self.head.arch

    @cached_property
    def manifest(self) -> Manifest:
        """The whole manifest. Raises ArtifactError if the list of kernels is missing, altered or refused."""
        data = read_verified(self.folder, self.head.kernels_file)
        return manifest.read_kernels(self.head, data, str(self.folder / self.head.kernels_file.path))

    @property
    def launcher(self) -> Launcher:
        """The pack's launcher, opened once.

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
            launcher.retune(self.table)
        return launcher


def open_pack(folder: Path) -> Pack:
    """The pack in `folder`.

    Raises:
        ArtifactError: there is none, it is half written, for another machine, or its manifest is refused.
    """
    path = folder / manifest.FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        arch = folder.name if folder.name in TARGETS else "ARCH"
        raise ArtifactError(
            f"{folder} is not a pack: it has no {manifest.FILE_NAME}; "
            f"build one: aotmm build --arch {arch} --out {folder.parent}"
        ) from error
    except OSError as error:
        raise ArtifactError(f"pack {folder} cannot be read: {error}") from error
    head = manifest.read_head(data, str(path))
    host = f"{platform.machine()}-linux-gnu"
    if head.host != host:
        raise ArtifactError(f"pack {folder} is for {head.host}, this machine is {host}; build it here")
    return Pack(folder, head)


def open_packs(path: Path) -> list[Pack]:
    """The pack in `path`, or the packs in its subfolders, ordered by name; other subfolders are not looked at.

    Raises:
        ArtifactError: there is none, or one is refused.
    """
    if (path / manifest.FILE_NAME).exists():
        return [open_pack(path)]
    if not path.is_dir():
        raise ArtifactError(f"no packs: {path} is not a folder; build some: aotmm build --arch ... --out {path}")
    places = sorted(entry for entry in path.glob("[!.]*") if entry.is_dir())
    found = [open_pack(place) for place in places if place.name in TARGETS or (place / manifest.FILE_NAME).exists()]
    if not found:
        raise ArtifactError(f"no packs in {path}; build some: aotmm build --arch ... --out {path}")
    return found


def read_verified(folder: Path, file: File) -> bytes:
    """The content of one file of a pack, read once and compared with the manifest.

    Raises:
        ArtifactError: missing, too large, or other bytes than the manifest says.
    """
    path = folder / file.path
    try:
        with path.open("rb") as handle:
            data = handle.read(min(file.bytes, MAX_FILE_BYTES) + 1)
    except OSError as error:
        raise ArtifactError(f"pack {folder}: {file.path} cannot be read: {error}; build the pack again") from error
    found = hashlib.sha256(data).hexdigest()
    if len(data) != file.bytes or found != file.sha256:
        raise ArtifactError(
            f"pack {folder}: {file.path} was altered: sha256 {found[:12]}..., the manifest says "
            f"{file.sha256[:12]}... ({file.bytes} bytes); build the pack again"
        )
    return data


def load_verified(folder: Path, file: File) -> ctypes.CDLL:
    """A library of a pack, loaded from the very bytes that were checked: a sealed memory file, not the path again."""
    data = read_verified(folder, file)
    handle = os.memfd_create(Path(file.path).name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(handle, "wb", closefd=False) as stream:
            stream.write(data)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
        # The descriptor stays open: the loader knows libraries by name, and would take the next one that got the same
        # number for this one.
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError as error:
        os.close(handle)
        raise ArtifactError(f"pack {folder}: {file.path} cannot be loaded: {error}") from error
