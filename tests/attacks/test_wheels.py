"""Wheels whose list of files is not what is in them, or that are hardly wheels."""

from __future__ import annotations

import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from aotmm.errors import ArtifactError
from aotmm.pack.files import read
from aotmm.pack.verify import verify
from aotmm.runtime.pack import open_pack
from tests.attacks.corpus import wheel
from tests.build.packs import content, tiny_pack

RECORD = "packs-1.dist-info/RECORD"
LIBRARY = "packs/sm80/libaotmm_sm80.so"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A wheel with one pack."""
    files = {f"packs/sm80/{name}": data for name, data in content(tiny_pack("sm80")).items()}
    return wheel(tmp_path / "packs-1-py3-none-any.whl", files)


def found(path: Path) -> dict[str | None, str]:
    """The violations of the list of files (None) and of each pack."""
    return {row.arch: "\n".join(row.violations) for row in verify(path)}


def changed(path: Path, change: Callable[[dict[str, bytes]], object]) -> dict[str | None, str]:
    """What is found after `change` of the files of the wheel, its list among them."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # which may have no name
    return found(path)


def replaced(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], object]:
    """A change of one file."""
    return lambda files: files.update({name: files[name].replace(old, new)})


def test_whole(whole: Path) -> None:
    """A whole wheel verifies, as does the pack in it."""
    assert found(whole) == {None: "", "sm80": ""}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.update({LIBRARY: files[LIBRARY] + b"\n"}), f"{LIBRARY} was altered"),
        (lambda files: files.pop("packs/sm80/launcher.c"), "packs/sm80/launcher.c is missing"),
        (lambda files: files.update({"more.py": b""}), f"{RECORD} does not list more.py"),
        (lambda files: files.update({"../more.py": b""}), "'../more.py' leads out of it"),
        (lambda files: files.update({"/etc/more": b""}), "'/etc/more' leads out of it"),
        (lambda files: files.update({"": b""}), "'' leads out of it"),
        (lambda files: files.pop(RECORD), "0 files RECORD, expected one"),
        (lambda files: files.update({"other-1.dist-info/RECORD": b""}), "2 files RECORD, expected one"),
        (lambda files: files.update({RECORD: b"\xff"}), "cannot be read"),
        (lambda files: files.update({RECORD: b"a,b\n"}), "cannot be read"),
        (lambda files: files.update({RECORD: b"a,b,c,d\n"}), "cannot be read"),
        (lambda files: files.update({RECORD: b"\n"}), "cannot be read"),
        (replaced(RECORD, b",", b",-"), "cannot be read"),
        (replaced(RECORD, b"sha256=", b"md5="), "was altered"),
        (replaced(RECORD, b"sha256=", b""), "was altered"),
    ],
    ids=range(15),
)
def test_wrong_list(whole: Path, change: Callable[[dict[str, bytes]], object], words: str) -> None:
    """Whatever is not what the wheel's own list says is told."""
    assert words in changed(whole, change)[None]


def test_pack_that_is_wrong_although_the_list_is_right(tmp_path: Path) -> None:
    """A pack is compared with its own manifest too."""
    files = {f"packs/sm80/{name}": data for name, data in content(tiny_pack("sm80")).items()}
    files[LIBRARY] = files[LIBRARY][:-1]
    verdicts = found(wheel(tmp_path / "packs-1-py3-none-any.whl", files))
    assert verdicts[None] == ""
    assert "libaotmm_sm80.so was altered" in verdicts["sm80"]


def test_a_file_twice(whole: Path) -> None:
    """Two files of one name, of which readers take different ones, are told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(whole, "a") as archive:
            archive.writestr(LIBRARY, tiny_pack("sm80").joinpath("libaotmm_sm80.so").read_bytes())
    assert f"{LIBRARY} is in it 2 times" in found(whole)[None]


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\5\6" + 18 * b"\xff"], ids=["empty", "short", "no directory"])
def test_no_wheel(tmp_path: Path, data: bytes) -> None:
    """A file that is no zip file is an ArtifactError."""
    (tmp_path / "x.whl").write_bytes(data)
    with pytest.raises(ArtifactError, match="cannot be read"):
        verify(tmp_path / "x.whl")


def test_nothing_to_verify(tmp_path: Path) -> None:
    """A folder without packs is an ArtifactError, not a success."""
    with pytest.raises(ArtifactError, match="neither a pack nor packs nor a wheel"):
        verify(tmp_path)


def test_links_above_the_pack_are_followed(tmp_path: Path) -> None:
    """Only inside a pack are links refused: where it lies is its user's business."""
    shutil.copytree(tiny_pack("sm80"), tmp_path / "store" / "sm80")
    (tmp_path / "packs").symlink_to(tmp_path / "store")
    (tmp_path / "sm80").symlink_to(tmp_path / "store" / "sm80")
    for folder in (tmp_path / "packs" / "sm80", tmp_path / "sm80"):
        assert open_pack(folder).launcher.kernels
        assert [row.violations for row in verify(folder)] == [()]
    assert read(tmp_path / "sm80", "launcher.c", 3) == b"/* "
