"""Mutants of whole packs, at random but the same each time, and what becomes of them: `python -m tests.attacks.fuzz`.

Bytes of any file are changed, and nobody hides it; or values of manifests and bytes of images, with all digests put
right again, as somebody would who writes packs; or bytes of a wheel.
"""

from __future__ import annotations

import collections
import contextlib
import random
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotmm.errors import ArtifactError
from aotmm.pack.binary import differences, guarded, read_image, read_ptx
from aotmm.pack.manifest import FILE_NAME, KERNELS_NAME
from aotmm.pack.verify import damage_told, verify
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.attacks.corpus import change_head, change_image, change_kernels, wheel
from tests.build.packs import content, tiny_pack

MUTANTS = 100_000
ARCHS = ("sm80", "gfx90a")
_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53,
    2**64,
    0.5,
    "",
    "x",
    "../x",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
)


@dataclass
class Tally:
    """What became of the mutants of one kind.

    Attributes:
        refused, taken: how many were refused, and how many verify although they differ in content, or load.
        same: those that are what they were made from, in all that is read of them.
        foreign: the errors that are none of aotmm's.
        slowest_ms: CPU time of the one that took longest.
    """

    refused: int = 0
    taken: int = 0
    same: int = 0
    foreign: list[str] = field(default_factory=list)
    slowest_ms: float = 0.0

    def __str__(self) -> str:
        counts = f"{self.refused} refused, {self.taken} taken, {self.same} the same, {len(self.foreign)} foreign errors"
        return f"{counts}, slowest {self.slowest_ms:.1f} ms"


@contextlib.contextmanager
def _judged(tally: Tally) -> Iterator[None]:
    """Counts an error of the block, and how long that took."""
    start = time.process_time()
    try:
        yield
    except ArtifactError:
        tally.refused += 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        tally.foreign.append(repr(error))
    tally.slowest_ms = max(tally.slowest_ms, (time.process_time() - start) * 1000)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` after one change of a few bytes, of its length, or of the order of its parts."""
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    few, found = chance.randrange(1, 9), bytearray(data)
    match chance.randrange(8):
        case 0:
            for place in chance.choices(range(len(data)), k=few):
                found[place] ^= 1 << chance.randrange(8)
        case 1:
            found[:] = data[:start] + chance.randbytes(few) + data[start + few :]
        case 2:
            found[:] = data[:start]
        case 3:
            found[:] = data + chance.randbytes(few)
        case 4:
            found[:] = data[:start] + data[start + few :]
        case 5:
            found[:] = data[:start] + data[start:end][:4096] + data[start:]
        case 6:
            found[:] = data[:start] + bytes(min(end - start, 64)) + data[start + min(end - start, 64) :]
        case _:
            found[:] = data[end:] + data[:end]
    return bytes(found)


def mutated_value(body: Any, chance: random.Random) -> None:
    """Changes one value or key somewhere inside the list or object `body`."""
    while True:
        places = list(body) if isinstance(body, dict) else list(range(len(body)))
        if not places:
            return
        place = chance.choice(places)
        if not isinstance(body[place], dict | list) or chance.random() < 0.1:
            break
        body = body[place]
    match chance.randrange(4):
        case 0:
            del body[place]
        case 1 if isinstance(body, dict):
            body[f"{place}x"] = body[place]
        case 2 if isinstance(body, list):
            body.append(body[place])
        case _:
            body[place] = chance.choice(_VALUES)


class Fuzzer:
    """Packs and a wheel of them in `folder`, which mutants take the place of, one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - the same each time
        self.packs = [Path(shutil.copytree(tiny_pack(arch), folder / arch)) for arch in ARCHS]
        self.whole = {pack: content(pack) for pack in self.packs}
        self.files = {
            f"packs/{pack.name}/{name}": data for pack in self.packs for name, data in self.whole[pack].items()
        }
        self.wheel = wheel(folder / "packs-1-py3-none-any.whl", self.files)
        self.kernels = {pack: open_pack(pack).manifest.kernels[0] for pack in self.packs}
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)

    def run(self, mutants: int) -> dict[str, Tally]:
        """Makes and judges that many."""
        kinds = (self._plain, self._plain, self._signed, self._zipped)
        for number in range(mutants):
            kinds[number % len(kinds)]()
        return self.tallies

    def _plain(self) -> None:
        """A file with other bytes: never loaded, and found by `verify`."""
        pack = self.chance.choice(self.packs)
        name = self.chance.choice([FILE_NAME, KERNELS_NAME, *self.whole[pack]])
        path, data = pack / name, self.whole[pack][name]
        other = mutated(data, self.chance)
        if other == data:
            return
        path.write_bytes(other)
        tally = self.tallies[f"altered {'sources' if 'launcher' in name else path.suffix}"]
        with _judged(tally):
            if name in (FILE_NAME, KERNELS_NAME) or path.suffix == ".so":
                with contextlib.suppress(ArtifactError):
                    opened = open_pack(pack)
                    _ = (opened.manifest, opened.launcher)
                    tally.taken += 1
            _raise_violations(pack)
            tally.taken += 1
        path.write_bytes(data)

    def _signed(self) -> None:
        """A pack of another content whose digests are right: nothing but an ArtifactError ever comes of it."""
        pack = self.chance.choice(self.packs)
        match self.chance.randrange(4):
            case 0:
                name = "manifest.json, digests right"
                change_head(pack, lambda body: mutated_value(body, self.chance))
            case 1:
                name = "kernels.json, digests right"
                change_kernels(pack, lambda body: mutated_value(body, self.chance))
            case _:
                name = "images, digests right"
                kind = "ptx" if pack.name == "sm80" and self.chance.random() < 0.5 else "image"
                change_image(pack, lambda data: self._alone(pack, mutated(data, self.chance), kind), kind)
        tally = self.tallies[name]
        with _judged(tally):
            _ = open_pack(pack).manifest
            _raise_violations(pack)
            if content(pack) == self.whole[pack]:
                tally.same += 1
            else:
                tally.taken += 1
        for path, data in self.whole[pack].items():
            if path in (FILE_NAME, KERNELS_NAME) or path.endswith(".so"):
                (pack / path).write_bytes(data)

    def _alone(self, pack: Path, data: bytes, kind: str) -> bytes:
        """What the mutant of the first kernel's image says of itself, were there no digests and no library; `data`."""
        kernel = self.kernels[pack]
        tally = self.tallies[f"{kind} by itself, digests right"]
        with _judged(tally):
            found = (read_ptx if kind == "ptx" else read_image)(data, kind)
            if differences(found, guarded(kernel, target(pack.name))):
                raise ArtifactError(kind)
            tally.taken += 1
        return data

    def _zipped(self) -> None:
        """A wheel with other bytes: found by `verify`, unless all that a zip reader takes from it is the same."""
        data = self.wheel.read_bytes()
        self.wheel.write_bytes(mutated(data, self.chance))
        tally = self.tallies["a wheel"]
        with _judged(tally):
            _raise_violations(self.wheel)
            if _unzipped(self.wheel) == self.files:
                tally.same += 1
            else:
                tally.taken += 1
        self.wheel.write_bytes(data)


def _raise_violations(path: Path) -> None:
    found = [words for verification in verify(path) for words in verification.violations]
    if found:
        raise ArtifactError("\n".join(found))


def _unzipped(path: Path) -> dict[str, bytes]:
    with damage_told(path), zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def main() -> None:
    """Runs as many mutants as the command line says, and says what became of them; fails if one was taken."""
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else MUTANTS
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aotmm-fuzz-") as folder:
        tallies = Fuzzer(Path(folder), seed=6).run(wanted)
    for name, tally in sorted(tallies.items()):
        sys.stdout.write(f"{name}: {tally}\n")
    sys.stdout.write(f"{wanted} mutants in {time.monotonic() - start:.0f} s\n")
    foreign = {words for tally in tallies.values() for words in tally.foreign}
    taken = sum(tally.taken for name, tally in tallies.items() if "digests right" not in name)
    if foreign or taken:
        sys.exit(f"{taken} altered ones were taken; foreign errors: {sorted(foreign)}")


if __name__ == "__main__":
    main()
