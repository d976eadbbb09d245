"""Compiled kernels of earlier builds, one entry per key, so that only changed kernels are compiled, on any machine.

A cache is a folder, or a place that fsspec reaches by a URL. Keys are digests of everything that an image depends on,
so writers of the same key write the same bytes and need not know of each other. Entries hold their own digest: an entry
that is half written or altered counts as absent and is written again. A whole entry may still be forged:
`aotmm.build.gate` compares it with the wanted variant.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from aotmm.build.compile import Compiled
from aotmm.errors import ArtifactError, PackError, SpecError
from aotmm.pack import files as folders
from aotmm.pack import manifest

LIMIT_BYTES = 20 << 30
_ABANDONED_S = 86400.0  # age of a half-written entry whose writer must be gone
_USED = ".used"
# Only entries and half-written ones are ever deleted.
_ENTRY = re.compile(r"[0-9a-f]{64}")
_HALF = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{32}")
_ENOUGH = 0.9  # of the limit stays when entries are dropped, so that not every build has to drop some


class Store(Protocol):
    """A place for entries. Every method may raise OSError, and any error of fsspec's implementations."""

    def read(self, key: str) -> bytes:
        """Return the bytes of an entry."""

    def write(self, key: str, data: bytes) -> None:
        """Make or replace an entry, and note that it was used now."""

    def use(self, keys: set[str]) -> None:
        """Note that entries were used now; missing ones do not matter."""

    def sizes(self) -> dict[str, int]:
        """Return the size of every entry in bytes."""

    def used(self, keys: Iterable[str]) -> dict[str, float]:
        """Return when entries were last used, in seconds since 1970, where that is known."""

    def drop(self, keys: list[str]) -> None:
        """Delete entries; missing ones do not matter."""


class Cache:
    """Compiled kernels by key, at most `limit_bytes` of them.

    Args:
        place: a folder, or a URL that fsspec knows ("s3://bucket/folder").

    Raises:
        SpecError: fsspec is not installed, or does not know the URL.
    """

    def __init__(self, place: Path | str, limit_bytes: int = LIMIT_BYTES) -> None:
        self.place = place
        self._limit_bytes = limit_bytes
        self._store: Store = _Remote(str(place)) if "://" in str(place) else _Folder(Path(place))
        self._used: set[str] = set()

    def get(self, key: str) -> Compiled | None:
        """Return the kernel stored under `key`, or None."""
        try:
            digest, _, body = self._store.read(key).partition(b"\n")
        except Exception:  # noqa: BLE001 (whatever fsspec's implementations raise: what cannot be read is compiled)
            return None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        try:
            stored = json.loads(body)
            kernel = manifest.kernel_from(stored["kernel"], key)
            ptx = None if stored["ptx"] is None else base64.b64decode(stored["ptx"])
            found = Compiled(kernel, base64.b64decode(stored["image"]), ptx)
        except (ValueError, KeyError, TypeError, RecursionError, ArtifactError):
            return None  # written by another version, or by somebody who means harm
        if kernel.key != key:
            return None  # copied from another name
        self._used.add(key)
        return found

    def put(self, key: str, compiled: Compiled) -> None:
        """Store `compiled` under `key`.

        Raises:
            PackError: it cannot be written (permission, full disk).
        """
        stored = {
            "kernel": manifest.kernel_to(compiled.kernel),
            "image": base64.b64encode(compiled.image).decode(),
            "ptx": None if compiled.ptx is None else base64.b64encode(compiled.ptx).decode(),
        }
        body = json.dumps(stored).encode()
        try:
            self._store.write(key, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        except Exception as error:
            raise PackError(f"a compiled kernel cannot be kept in {self.place}: {error}") from error
        self._used.add(key)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Note the entries that the block used, and drop the least recently used ones beyond the limit.

        Raises:
            PackError: this fails, and the block itself raised nothing.
        """
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the block's own error counts
                self._settle()
            raise
        try:
            self._settle()
        except Exception as error:
            raise PackError(f"the cache in {self.place} cannot be kept in order: {error}") from error

    def _settle(self) -> None:
        self._store.use(self._used)
        self._used = set()
        sizes = self._store.sizes()
        left = sum(sizes.values())
        if left <= self._limit_bytes:
            return
        used, dropped = self._store.used(sizes), []
        for key in sorted(sizes, key=lambda key: (used.get(key, 0.0), key)):
            if left <= self._limit_bytes * _ENOUGH:
                break
            dropped.append(key)
            left -= sizes[key]
        self._store.drop(dropped)


class _Folder:
    """A folder, which machines may share. Entries are published by rename; their access time is when they were used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes:
        return folders.read(self._folder, key, manifest.MAX_FILE_BYTES)  # no endless pipe, no other file

    def write(self, key: str, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{key}.{uuid.uuid4().hex}"  # process numbers are those of one machine
        try:
            temporary.write_bytes(data)
            temporary.replace(self._folder / key)
        finally:
            temporary.unlink(missing_ok=True)

    def use(self, keys: set[str]) -> None:
        now = time.time_ns()
        for key in keys:
            with suppress(OSError):  # evicted by another build, or another user's
                path = self._folder / key
                os.utime(path, ns=(now, path.lstat().st_mtime_ns), follow_symlinks=False)

    def sizes(self) -> dict[str, int]:
        return {name: facts.st_size for name, facts in self._files()}

    def used(self, keys: Iterable[str]) -> dict[str, float]:  # noqa: ARG002 - all are as easy to tell
        return {name: facts.st_atime for name, facts in self._files()}

    def drop(self, keys: list[str]) -> None:
        for key in keys:
            (self._folder / key).unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every entry, and the half-written ones of writers that are gone."""
        with suppress(FileNotFoundError), os.scandir(self._folder) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    facts = file.stat(follow_symlinks=False)
                    abandoned = _HALF.fullmatch(file.name) and facts.st_mtime < time.time() - _ABANDONED_S
                    if _ENTRY.fullmatch(file.name) or abandoned:
                        yield file.name, facts


class _Remote:
    """A place that fsspec reaches. Object stores keep no time of access: another object beside each entry has it."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError as error:
            raise SpecError(f'a cache in {url} needs the cache extra: pip install "aotmm[cache]"') from error
        try:
            self._system, self._root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise SpecError(f"fsspec cannot open the cache in {url}: {error}") from error

    def read(self, key: str) -> bytes:
        data: bytes = self._system.cat_file(self._path(key))
        return data

    def write(self, key: str, data: bytes) -> None:
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(self._path(key), data)
        self.use({key})

    def use(self, keys: set[str]) -> None:
        if keys:
            self._system.pipe({self._path(key) + _USED: repr(time.time()).encode() for key in keys})

    def sizes(self) -> dict[str, int]:
        self._system.invalidate_cache()  # of listings
        try:
            found = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        names = {path.rpartition("/")[2]: facts["size"] for path, facts in found.items()}
        return {name: size for name, size in names.items() if _ENTRY.fullmatch(name)}

    def used(self, keys: Iterable[str]) -> dict[str, float]:
        paths = {self._path(key) + _USED: key for key in keys}
        found = self._system.cat(list(paths), on_error="omit")
        return {paths[path]: float(text) for path, text in found.items() if re.fullmatch(rb"\d+\.\d+", text)}

    def drop(self, keys: list[str]) -> None:
        for key in keys:
            for path in (self._path(key), self._path(key) + _USED):
                with suppress(FileNotFoundError):
                    self._system.rm_file(path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"
