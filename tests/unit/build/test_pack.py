"""Putting a pack in its place: all of it or nothing."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aotmm.build import pack
from aotmm.build.pack import new_pack
from aotmm.errors import CompileError, PackError
from tests.build.packs import content


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


@pytest.mark.parametrize("lacking", ["system call", "file system"])
def test_a_place_that_cannot_exchange_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Where a pack cannot be replaced in one step it is not touched at any moment, and the error says what to do."""
    folder = tmp_path / "sm80"
    folder.mkdir()
    (folder / "manifest.json").write_text("previous")
    identity = folder.stat().st_ino
    seen: list[int] = []
    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        seen.append(1)
        return rename(self, target)

    def refuse(*_arguments: object) -> int:
        ctypes.set_errno(errno.EINVAL)  # Source: renameat2(2), "the file system does not support one of the flags"
        return -1

    functions = {} if lacking == "system call" else {"renameat2": refuse}
    fake = SimpleNamespace(CDLL=lambda *_args, **_options: SimpleNamespace(**functions), get_errno=ctypes.get_errno)
    monkeypatch.setattr(pack, "ctypes", fake)
    monkeypatch.setattr(Path, "rename", watched)
    words = "no renameat2" if lacking == "system call" else "Invalid argument"
    with pytest.raises(PackError, match=rf"does not exchange folders \(.*{words}\); remove that pack and build again"):
        write(folder, "new")
    assert (seen, folder.stat().st_ino) == ([], identity)
    assert content(tmp_path) == {"sm80/manifest.json": b"previous"}
    write(tmp_path / "sm90", "first")
    assert content(tmp_path / "sm90") == {"manifest.json": b"first"}


def write(folder: Path, text: str) -> None:
    """Puts a pack of one file in `folder`."""
    with new_pack(folder) as fresh:
        (fresh / "manifest.json").write_text(text)


def test_readers_always_find_a_pack(tmp_path: Path) -> None:
    """While packs replace each other again and again, whoever opens the manifest finds a whole one."""
    folder = tmp_path / "sm80"
    write(folder, "0")
    program = "import sys\nprint(flush=True)\nwhile True:\n    open(sys.argv[1]).read()\n"
    command = [sys.executable, "-c", program, str(folder / "manifest.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        for number in range(200):
            write(folder, str(number))
        assert reader.poll() is None
        reader.kill()


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
