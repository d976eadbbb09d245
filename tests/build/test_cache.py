"""The cache of compiled kernels: what it gives back, and what it does not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from aotmm.build.cache import Cache
from aotmm.build.compile import Compiled
from aotmm.errors import PackError
from aotmm.manifest import kernel_to
from tests.samples import kernel

KEY = "0" * 64
WITH_TEXT = Compiled(kernel("one", ptx=True), bytes(range(256)), b"// text")
WITHOUT_TEXT = Compiled(kernel("one"), b"image", None)


def sealed(body: bytes) -> bytes:
    """A cache entry with `body` and the digest of it."""
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize("compiled", [WITH_TEXT, WITHOUT_TEXT], ids=["text", "no-text"])
def test_round_trip(tmp_path: Path, compiled: Compiled) -> None:
    """What was put comes back equal, and nothing else lies in the folder."""
    cache = Cache(tmp_path / "new" / "cache")
    assert cache.get(KEY) is None
    cache.put(KEY, compiled)
    assert cache.get(KEY) == compiled
    assert [path.name for path in (tmp_path / "new" / "cache").iterdir()] == [KEY]


def test_every_cut_and_every_flipped_byte_counts_as_absent(tmp_path: Path) -> None:
    """An entry that was cut or altered anywhere is not used."""
    cache = Cache(tmp_path)
    cache.put(KEY, WITHOUT_TEXT)
    whole = (tmp_path / KEY).read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / KEY).write_bytes(whole[:size])
        assert cache.get(KEY) is None, size
    for place in range(0, len(whole), 3):
        (tmp_path / KEY).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.get(KEY) is None, place


@pytest.mark.parametrize(
    "stored",
    [
        [],
        {},
        {"kernel": {}, "image": "", "ptx": None},
        {"kernel": kernel_to(WITHOUT_TEXT.kernel), "image": ""},
        {"kernel": kernel_to(WITHOUT_TEXT.kernel), "ptx": None},
        {"kernel": kernel_to(WITHOUT_TEXT.kernel), "image": "A", "ptx": None},
        {"kernel": kernel_to(WITHOUT_TEXT.kernel), "image": 3, "ptx": None},
    ],
)
def test_entry_of_another_version_counts_as_absent(tmp_path: Path, stored: object) -> None:
    """An intact entry that another version wrote is not used."""
    (tmp_path / KEY).write_bytes(sealed(json.dumps(stored).encode()))
    assert Cache(tmp_path).get(KEY) is None


def test_unreadable_entry_counts_as_absent(tmp_path: Path) -> None:
    """An entry that cannot be read is not used."""
    (tmp_path / KEY).mkdir()
    assert Cache(tmp_path).get(KEY) is None


def test_unwritable_cache(tmp_path: Path) -> None:
    """A kernel that cannot be kept is a PackError with the folder and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match=r"cannot be kept in .*/file/cache: .*Not a directory"):
        Cache(tmp_path / "file" / "cache").put(KEY, WITH_TEXT)
