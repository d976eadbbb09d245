"""The cache of compiled kernels: what it gives back, and what it does not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from aotmm.build.cache import Cache
from aotmm.build.compile import Compiled
from aotmm.errors import PackError, SpecError
from aotmm.pack.manifest import kernel_to
from tests.build.packs import run_python
from tests.samples import kernel

KEY = "0" * 64
# Processes that put, read and drop the same few entries, in a cache that holds less than half of them.
WRITES = """
import random, sys
from dataclasses import replace
from aotmm.build.cache import Cache
from aotmm.build.compile import Compiled
from tests.samples import kernel
cache, dice, hits = Cache(sys.argv[1], 40_000), random.Random(sys.argv[2]), 0
for turn in range(150):
    number = dice.randrange(8)
    key = f"{number:064x}"
    made = Compiled(replace(kernel("one"), key=key), bytes([number]) * 7_000, None)
    with cache.settled():
        found = cache.get(key)
        assert found is None or found == made, "what was read is not what was written"
        hits += found is not None
        if found is None:
            cache.put(key, made)
print(hits)
"""
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


# ------------------------------------------------------------------------------------------- shared between machines
@pytest.fixture(params=["folder", "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a cache is: a folder, fsspec's memory, or a folder that fsspec reaches."""
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/shared", recursive=True) if fsspec.filesystem("memory").exists(
            "/shared"
        ) else 0
    return {"folder": str(tmp_path), "memory": "memory://shared", "file": f"file://{tmp_path}"}[request.param]


def made(number: int, size: int = 1000) -> Compiled:
    """A kernel whose key is `number`."""
    return Compiled(replace(kernel("one"), key=f"{number:064x}"), bytes([number]) * size, None)


def keep(cache: Cache, *numbers: int) -> None:
    """Puts kernels, one build after another."""
    for number in numbers:
        with cache.settled():
            cache.put(f"{number:064x}", made(number))


def kept(cache: Cache) -> list[int]:
    """The numbers of the kernels that are there."""
    return [number for number in range(20) if cache.get(f"{number:064x}") is not None]


def test_another_machine_finds_it(place: str) -> None:
    """What one put, another reads from the same place; what nobody put is absent."""
    keep(Cache(place), 1)
    assert Cache(place).get(f"{1:064x}") == made(1)
    assert Cache(place).get(f"{2:064x}") is None


def test_altered_entries_are_written_again(place: str) -> None:
    """An entry that was altered, cut, or copied from another key is absent, and the next one takes its place."""
    keep(Cache(place), 1, 2)
    system, root = fsspec.core.url_to_fs(place)
    whole = system.cat_file(f"{root}/{1:064x}")
    for data in (whole[:-1], whole[:99] + b"?" + whole[100:], b"", system.cat_file(f"{root}/{2:064x}")):
        system.pipe_file(f"{root}/{1:064x}", data)
        assert kept(Cache(place)) == [2]
        keep(Cache(place), 1)
        assert kept(Cache(place)) == [1, 2]


def test_what_was_used_least_recently_is_dropped(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the least recently used entries go, by any machine's use, down to a tenth below it."""
    size = len(json.dumps(kernel_to(made(1).kernel))) + 1500  # a little more than an entry has
    clock = iter(range(1_700_000_000, 1_800_000_000, 60))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock) * 10**9)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    keep(Cache(place), 1, 2, 3, 4)
    reader = Cache(place)
    with reader.settled():
        assert reader.get(f"{1:064x}") is not None
    keep(Cache(place, 4 * size), 5)
    assert kept(Cache(place)) == [1, 4, 5]


def test_nothing_else_is_dropped(tmp_path: Path) -> None:
    """Of a folder that has other files too, only entries are counted and deleted, and what dead writers left."""
    (tmp_path / "thesis.tex").write_text("x" * 10_000)
    (tmp_path / ".profile").write_text("x" * 10_000)
    for age, mark in ((0, "a"), (10 * 86400, "b")):
        half = tmp_path / f".{KEY}.{mark * 32}"
        half.write_text("x" * 10_000)
        os.utime(half, (half.stat().st_atime - age, half.stat().st_mtime - age))
    keep(Cache(tmp_path, 100), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{KEY}.{'a' * 32}", ".profile", "thesis.tex"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_many_writers(tmp_path: Path, scheme: str) -> None:
    """Processes that write, read and drop the same entries at once never read a wrong one, fail, or pass the limit."""

    def run(seed: int) -> subprocess.CompletedProcess[str]:
        return run_python(WRITES, f"{scheme}{tmp_path}", str(seed))

    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(run, range(4)))
    for process in done:
        assert process.returncode == 0, process.stderr
        assert int(process.stdout) > 0
    with Cache(f"{scheme}{tmp_path}", 40_000).settled():
        pass
    left = [path for path in tmp_path.iterdir() if not path.name.endswith(".used")]
    assert 0 < sum(path.stat().st_size for path in left) <= 40_000
    assert not [path for path in left if path.name.startswith(".")]


def test_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL of an unknown kind, and any without fsspec, are SpecErrors that say so; one that fails is a PackError."""
    with pytest.raises(SpecError, match=r"fsspec cannot open the cache in nowhere://x: .*nowhere"):
        Cache("nowhere://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match="a compiled kernel cannot be kept in file://"):
        Cache(f"file://{tmp_path}/file/cache").put(KEY, WITH_TEXT)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SpecError, match=r'needs the cache extra: pip install "aotmm\[cache\]"'):
        Cache("memory://x")
