"""Verify packs and wheels as a whole without running them: digests, and the facts in kernels' files."""

from __future__ import annotations

import base64
import collections
import csv
import errno
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aotmm.errors import ArtifactError
from aotmm.pack import files as folders
from aotmm.pack import manifest
from aotmm.pack.binary import differences, guarded, read_image, read_ptx
from aotmm.pack.manifest import MAX_FILE_BYTES, File, Head, Manifest
from aotmm.target import target

_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")
_PACK = re.compile(rf"(.*/)?{re.escape(manifest.FILE_NAME)}")


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of verifying one pack, or the list of files of one wheel: all `violations`, none if it is intact.

    `arch` is None for a wheel, and for a pack whose manifest was refused. `owner` is the distribution that added it to
    the packs that `aotmm.load()` finds, "" for any other.
    """

    place: str
    arch: str | None
    files: int
    kernels: int
    violations: tuple[str, ...]
    owner: str = ""


Rebuild = Callable[[Head], Path]
"""Build the pack of a manifest again, from this machine's sources, and return its folder."""


class _Source(NamedTuple):
    """Files to verify: their place and names, and a function that reads the first bytes of one or raises OSError."""

    place: str
    names: frozenset[str]
    read: Callable[[str, int], bytes]


def verify(path: Path, rebuild: Rebuild | None = None) -> list[Verification]:
    """Verify the pack in `path`, the packs in its subfolders, or a wheel and the packs in it.

    With `rebuild` each intact pack is built again and compared bit for bit.

    Raises:
        ArtifactError: there is nothing to verify. Errors of `rebuild` pass.
    """
    try:
        if path.is_file():
            return _wheel(path, rebuild)
        sources = [_folder(folder) for folder in _packs(path)]
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    if not sources:
        raise ArtifactError(f"neither a pack nor packs nor a wheel: {path}")
    return [_pack(source, rebuild) for source in sources]


def _packs(path: Path) -> list[Path]:
    """Return the pack in `path`, or those in its subfolders. Raises OSError."""
    if (path / manifest.FILE_NAME).is_file():
        return [path]
    inside = [entry for entry in path.iterdir() if not entry.name.startswith(".")] if path.is_dir() else []
    return sorted(folder for folder in inside if folder.is_dir() and (folder / manifest.FILE_NAME).exists())


def _folder(folder: Path) -> _Source:
    """Return the content of a folder. Raises OSError."""
    names = frozenset(_names(folder))
    return _Source(str(folder), names, lambda name, limit: folders.read(folder, name, limit))


def _names(folder: Path) -> Iterator[str]:
    """Yield everything below `folder` but folders; links are not followed."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            yield from (f"{entry.name}/{name}" for name in _names(entry))
        else:
            yield entry.name


def _wheel(path: Path, rebuild: Rebuild | None) -> list[Verification]:
    """Verify the wheel's own list of files, and every pack in it."""
    with damage_told(path), zipfile.ZipFile(path) as archive:

        def read(prefix: str, name: str, limit: int) -> bytes:
            with damage_told(path), archive.open(prefix + name) as stream:
                return stream.read(limit)

        names = [name for name in archive.namelist() if not name.endswith("/")]
        found = [_record(_Source(str(path), frozenset(names), partial(read, "")), names)]
        for prefix in sorted(name[: -len(manifest.FILE_NAME)] for name in set(names) if _PACK.fullmatch(name)):
            inside = frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))
            found.append(_pack(_Source(f"{path}/{prefix}", inside, partial(read, prefix)), rebuild))
        return found


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Turn zipfile's exceptions for a file that is damaged, or no zip file, into an OSError."""
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


def _record(source: _Source, names: list[str]) -> Verification:
    """Verify a wheel by its RECORD. Source: PyPA specifications, "Recording installed projects"."""
    violations = [f"{name} is in it {count} times" for name, count in collections.Counter(names).items() if count > 1]
    outside = [name for name in source.names if name[:1] in ("", "/") or ".." in name.split("/")]
    violations += [f"{name!r} leads out of it" for name in outside]
    lists = [name for name in source.names if _RECORD.fullmatch(name)]
    if len(lists) != 1:
        return Verification(
            source.place, None, len(names), 0, (*violations, f"{len(lists)} files RECORD, expected one")
        )
    try:
        text = source.read(lists[0], manifest.MAX_MANIFEST_BYTES).decode()
        listed = [_row(*row) for row in csv.reader(io.StringIO(text)) if row[0] != lists[0]]
    except (OSError, ValueError, TypeError, IndexError, csv.Error) as error:
        return Verification(source.place, None, len(names), 0, (*violations, f"{lists[0]} cannot be read: {error}"))
    violations += [words for _, words in (_read(source, file) for file in listed) if words is not None]
    violations += _unlisted(source, listed, lists[0])
    return Verification(source.place, None, len(names), 0, tuple(violations))


def _row(name: str, digest: str, size: str) -> File:
    """Return the file of a line of RECORD; a digest other than sha256 matches no file. Raises ValueError."""
    algorithm, _, value = digest.partition("=")
    sha256 = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    if not size.isdecimal():
        raise ValueError(f"{name} has {size!r} bytes")
    return File(name, sha256 if algorithm == "sha256" else "", int(size))


def _pack(source: _Source, rebuild: Rebuild | None) -> Verification:
    """Verify one pack: manifest, digests, images, and with `rebuild` that building it again gives the same."""
    try:
        whole = _manifest(source)
    except ArtifactError as error:
        return Verification(source.place, None, len(source.names), 0, tuple(str(error).splitlines()))
    contents, violations = _contents(source, manifest.files(whole), manifest.FILE_NAME)
    library = contents.get(whole.library.path)
    if library is not None:
        violations += _images(whole, library)
    if rebuild is not None and not violations:
        violations = _compared(source, _folder(rebuild(whole)))
    return Verification(source.place, whole.arch, len(source.names), len(whole.every), tuple(violations))


def _manifest(source: _Source) -> Manifest:
    """Return the whole manifest. Raises ArtifactError."""
    try:
        data = source.read(manifest.FILE_NAME, manifest.MAX_MANIFEST_BYTES + 1)
        head = manifest.read_head(data, manifest.FILE_NAME)
        listed = source.read(head.kernels_file.path, manifest.MAX_MANIFEST_BYTES + 1)
    except (OSError, KeyError) as error:
        raise ArtifactError(f"the manifest cannot be read: {error}") from error
    altered = manifest.altered(head.kernels_file, listed)
    if altered is not None:
        raise ArtifactError(altered)
    return manifest.read_kernels(head, listed, head.kernels_file.path)


def _contents(source: _Source, listed: list[File], name: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the intact listed files by name, and the faults of the others; `name` is the list."""
    contents, violations = {}, []
    for file in listed:
        data, words = _read(source, file)
        if words is None:
            contents[file.path] = data
        else:
            violations.append(words)
    return contents, violations + _unlisted(source, listed, name)


def _read(source: _Source, file: File) -> tuple[bytes, str | None]:
    """Return the file, and its fault or None."""
    if file.path not in source.names:
        return b"", f"{file.path} is missing"
    try:
        data = source.read(file.path, min(file.bytes, MAX_FILE_BYTES) + 1)
    except OSError as error:
        return b"", f"{file.path} cannot be read: {error}"
    return data, manifest.altered(file, data)


def _unlisted(source: _Source, listed: list[File], name: str) -> list[str]:
    extra = source.names - {file.path for file in listed} - {name}
    return [f"{name} does not list {path}" for path in sorted(extra)]


def _images(whole: Manifest, library: bytes) -> list[str]:
    """Return the faults of the kernels' code in `library`, each by itself."""
    row, violations = target(whole.arch), []
    for kernel in whole.every:
        wanted = guarded(kernel, row)
        if kernel.shared_bytes > row.shared_bytes:
            violations.append(f"{kernel.name} needs {kernel.shared_bytes} B of shared memory, {row.name} has less")
        for kind, image, reader in ((row.image, kernel.image, read_image), ("ptx", kernel.ptx, read_ptx)):
            if image is None:
                continue
            name = f"{kernel.name}.{kind}"
            try:
                found = differences(reader(manifest.code(whole, image, library, name), name), wanted)
                violations += [f"{name}: {words}" for words in found]
            except ArtifactError as error:
                violations.append(str(error))
            end = whole.images.offset + image.offset + image.bytes
            if kind == "ptx" and image.whole and library[end : end + 1] != b"\0":  # drivers read on until then
                violations.append(f"{name}: no zero byte follows it in {whole.library.path}")
    return violations


def _compared(source: _Source, fresh: _Source) -> list[str]:
    """Return the differences between a pack and the same pack built again."""
    there, here = _manifest(source).provenance, _manifest(fresh).provenance
    violations = [
        f"it was built with {name} {getattr(there, name)!r}, here that is {getattr(here, name)!r}"
        for name in there.__slots__
        if getattr(there, name) != getattr(here, name)
    ]
    for name in sorted(source.names | fresh.names):
        if name not in source.names or name not in fresh.names:
            violations.append(f"{name} is {'not built' if name in source.names else 'built too'} here")
        elif source.read(name, MAX_FILE_BYTES) != fresh.read(name, MAX_FILE_BYTES):
            violations.append(f"{name} is not what is built here")
    return violations
