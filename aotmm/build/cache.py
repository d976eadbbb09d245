"""Compiled kernels of earlier builds, one file per key, so that only what changed is compiled."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

from aotmm import manifest
from aotmm.build.compile import Compiled
from aotmm.errors import ArtifactError, PackError


class Cache:
    """A folder of compiled kernels.

    Entries are published by rename, so that readers and other writers never see half of one; an entry that does not
    match its digest counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Compiled | None:
        """The kernel stored under `key`, or None."""
        try:
            digest, _, body = (self.folder / key).read_bytes().partition(b"\n")
        except OSError:
            return None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        try:
            stored = json.loads(body)
            kernel = manifest.kernel_from(stored["kernel"], key)
            ptx = None if stored["ptx"] is None else base64.b64decode(stored["ptx"])
            return Compiled(kernel, base64.b64decode(stored["image"]), ptx)
        except (ValueError, KeyError, TypeError, ArtifactError):
            return None  # written by another version

    def put(self, key: str, compiled: Compiled) -> None:
        """Stores `compiled` under `key`.

        Raises:
            PackError: it cannot be written (permission, full disk).
        """
        stored = {
            "kernel": manifest.kernel_to(compiled.kernel),
            "image": base64.b64encode(compiled.image).decode(),
            "ptx": None if compiled.ptx is None else base64.b64encode(compiled.ptx).decode(),
        }
        body = json.dumps(stored).encode()
        temporary = self.folder / f".{key}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                temporary.replace(self.folder / key)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise PackError(f"a compiled kernel cannot be kept in {self.folder}: {error}") from error
