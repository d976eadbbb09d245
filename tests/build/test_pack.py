"""Putting a pack in its place: all of it or nothing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from aotmm.build import pack
from aotmm.build.pack import new_pack
from aotmm.errors import CompileError, PackError
from tests.build.packs import content


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the system call that exchanges two folders."""
    if request.param == "two renames":
        monkeypatch.setattr(pack, "ctypes", SimpleNamespace(CDLL=lambda *_args, **_options: SimpleNamespace()))
    elif not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("this C library has no renameat2")


@pytest.mark.usefixtures("swap")
def test_replaces_the_previous_pack(tmp_path: Path) -> None:
    """A new pack takes the place of the previous one, of which nothing stays behind."""
    folder = tmp_path / "packs" / "sm80"
    for text in ("first", "second", "third"):
        with new_pack(folder) as fresh:
            (fresh / text).mkdir()
            (fresh / text / "file").write_text(text)
            assert not (folder / text).exists()
        assert content(folder) == {f"{text}/file": text.encode()}
    assert [path.name for path in folder.parent.iterdir()] == ["sm80"]


@pytest.mark.parametrize(
    ("raised", "seen"), [(CompileError("no"), CompileError), (OSError(28, "No space left on device"), PackError)]
)
def test_failure_leaves_the_previous_pack(tmp_path: Path, raised: Exception, seen: type[Exception]) -> None:
    """A failure half way leaves the previous pack as it is and nothing of the new one."""
    folder = tmp_path / "sm80"
    folder.mkdir()
    (folder / "manifest.json").write_text("previous")

    def write_half() -> None:
        with new_pack(folder) as fresh:
            (fresh / "half").mkdir()
            raise raised

    with pytest.raises(seen) as caught:
        write_half()
    assert content(tmp_path) == {"sm80/manifest.json": b"previous"}
    assert [path.name for path in tmp_path.iterdir()] == ["sm80"]
    if seen is PackError:
        assert "No space left on device" in str(caught.value)
        assert "the previous pack is as it was" in str(caught.value)


def test_failed_exchange_leaves_the_previous_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new pack cannot be moved in after the previous one was moved out, the previous one is moved back."""
    folder = tmp_path / "sm80"
    folder.mkdir()
    (folder / "manifest.json").write_text("previous")
    monkeypatch.setattr(pack, "ctypes", SimpleNamespace(CDLL=lambda *_args, **_options: SimpleNamespace()))
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == ".sm80.new":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PackError, match="Input/output error"), new_pack(folder) as fresh:
        (fresh / "manifest.json").write_text("new")
    assert content(folder) == {"manifest.json": b"previous"}


def test_what_a_killed_build_left_is_cleared(tmp_path: Path) -> None:
    """Files that a killed build left behind are not part of the next pack."""
    left = tmp_path / ".sm80.new" / "more"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    with new_pack(tmp_path / "sm80") as fresh:
        (fresh / "manifest.json").write_text("new")
    assert content(tmp_path) == {"sm80/manifest.json": b"new"}


def test_unwritable_place(tmp_path: Path) -> None:
    """A place that cannot be written is a PackError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match="cannot be written"), new_pack(tmp_path / "file" / "sm80"):
        pytest.fail("there is no folder to write to")
