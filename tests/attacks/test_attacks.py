"""Each rule of the pack format has a pack that breaks it, which is refused for that reason and in no other way."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from aotmm.build import compile as compiling
from aotmm.errors import ArtifactError
from aotmm.pack.binary import differences, guarded, read_image
from aotmm.pack.verify import verify
from aotmm.runtime import pack as packs
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.attacks.corpus import ATTACKS, LIBRARY, Attack, _several_files
from tests.build.packs import tiny_pack
from tests.samples import code_in


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A whole pack that a test may break."""
    return Path(shutil.copytree(tiny_pack("sm80"), tmp_path / "sm80"))


def load(folder: Path) -> None:
    """What a program does with a pack before its first launch."""
    assert open_pack(folder).launcher.kernels


def found(folder: Path) -> str:
    """All violations that verifying the pack finds, or the error if there is no pack."""
    try:
        (verification,) = verify(folder)
    except ArtifactError as error:
        return f"{error}; it has no manifest.json"
    return "\n".join(verification.violations)


def test_the_whole_pack_is_whole(pack: Path) -> None:
    """What the attacks start from loads, and verifies without a word."""
    load(pack)
    assert found(pack) == ""


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(attack: Attack, pack: Path) -> None:
    """The broken pack is told with its rule, and where a program would use what is broken it does not load."""
    attack.harm(pack)
    said = found(pack)
    assert said
    assert attack.words in said
    if attack.loading:
        with pytest.raises(ArtifactError) as caught:
            load(pack)
        assert attack.words in str(caught.value)


def test_names_of_attacks_are_unique() -> None:
    """Each attack has a name of its own."""
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


def test_everything_wrong_is_told(pack: Path) -> None:
    """One error names all that is wrong with a manifest, and one verification all that is wrong with files."""
    _several_files(pack)
    assert [f"{name} was altered" in found(pack) for name in (LIBRARY, "launcher.c", "launcher.h")] == [True] * 3
    next(attack for attack in ATTACKS if attack.name == "several at once").harm(pack)
    with pytest.raises(ArtifactError) as caught:
        _ = open_pack(pack).manifest
    assert [words in str(caught.value) for words in ("threads: ", "found 'xx'", "symbol: ")] == [True] * 3


def test_swapped_between_check_and_use(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is replaced after its digest was compared, and before it is opened, is not the one that runs."""
    other = (tiny_pack("gfx90a") / "libaotmm_gfx90a.so").read_bytes()
    seal = fcntl.fcntl

    def swap_first(handle: int, command: int, seals: int) -> int:
        (pack / LIBRARY).write_bytes(other)
        return seal(handle, command, seals)

    monkeypatch.setattr(fcntl, "fcntl", swap_first)
    launcher = open_pack(pack).launcher
    assert (pack / LIBRARY).read_bytes() == other
    assert launcher._c.arch == b"sm80"


def test_loaded_bytes_are_sealed() -> None:
    """Nobody, this process included, can write to the memory that a library is loaded from."""
    data = (tiny_pack("sm80") / LIBRARY).read_bytes()
    before = memories()
    packs.load_library([data], LIBRARY)
    (handle,) = memories() - before
    for action in (lambda: os.write(handle, b"x"), lambda: os.truncate(handle, 0)):
        with pytest.raises(PermissionError):
            action()


def memories() -> set[int]:
    """The open files of this process that lie in memory only."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the folder
            if "memfd:" in str(path.readlink()):
                found.add(int(path.name))
    return found


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a"])
def test_images_say_what_the_manifest_says(arch: str) -> None:
    """The reader finds of every kernel what its compiler said, on every arch."""
    folder = tiny_pack(arch)
    code = code_in(folder)
    for kernel in open_pack(folder).manifest.kernels:
        facts = read_image(code(kernel.image), kernel.name)
        assert (facts.arch, facts.symbol, facts.registers) == (arch, kernel.symbol, kernel.registers)
        assert [size for _, size in facts.parameters] == [item.bytes for item in kernel.parameters]
        assert dataclasses.replace(facts, debug=()) == facts
        assert differences(facts, guarded(kernel, target(arch))) == []


def test_an_image_that_wants_clusters_is_refused(tmp_path: Path) -> None:
    """An image that runs in clusters of one size alone says so; launches may have others, so it is not a kernel's."""
    kernel = open_pack(tiny_pack("sm90")).manifest.kernels[0]
    for asked, blocks in (("", 1), (".reqnctapercluster 2, 2, 1", 4)):
        lines = ".version 8.0", ".target sm_90a", ".address_size 64", ".visible .entry tile() .reqntid 128", asked
        (tmp_path / "tile.ptx").write_text("\n".join([*lines, "{ ret; }", ""]))
        command = [str(compiling._ptxas(compiling.toolchain()[1])), "-arch=sm_90a", "-o", "tile.cubin", "tile.ptx"]
        subprocess.run(command, cwd=tmp_path, check=True)
        facts = read_image((tmp_path / "tile.cubin").read_bytes(), "tile")
        assert facts.num_ctas == blocks
        told = [words for words in differences(facts, guarded(kernel, target("sm90"))) if "num_ctas" in words]
        assert told == ([f"num_ctas {blocks}, the manifest has 1"] if blocks > 1 else [])
