"""Opening packs: whole ones load, whatever is missing or altered is told and never loaded."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path

import pytest

from aotmm.errors import ArtifactError
from aotmm.pack.files import data_folder
from aotmm.pack.manifest import FILE_NAME, KERNELS_NAME, File, Manifest, file, write
from aotmm.runtime.launcher import Problem
from aotmm.runtime.pack import Pack, load_verified, open_pack, open_packs, read_verified
from aotmm.runtime.tuning import CDevice
from aotmm.target import host
from tests.samples import kernel, manifest

LIBRARY = b"not a library".ljust(999)
HOST = host()


def write_pack(folder: Path, entry: Manifest) -> Path:
    """A pack in `folder` that has its manifest and an alleged library."""
    folder.mkdir(parents=True)
    for name, data in write(entry).items():
        (folder / name).write_bytes(data)
    (folder / entry.library.path).write_bytes(LIBRARY)
    return folder


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A pack whose manifest is right and whose library is none."""
    entry = dataclasses.replace(manifest(kernel("one"), kernel("two"), library=LIBRARY), host=HOST)
    return write_pack(tmp_path / "packs" / "sm80", entry)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Copies of the packs that `make artifacts` built."""
    folder = data_folder("artifacts")
    if not list(folder.glob(f"*/{FILE_NAME}")):
        pytest.skip("no packs in artifacts/; make artifacts builds them")
    return Path(shutil.copytree(folder, tmp_path / "packs", ignore=shutil.ignore_patterns(".cache", ".lock")))


# ------------------------------------------------------------------------------------------------------------- opening
def test_open(fake: Path) -> None:
    """Opening a pack reads its head; the list of kernels is read when asked for."""
    (fake / KERNELS_NAME).rename(fake / "moved")
    pack = open_pack(fake)
    assert (pack.arch, pack.folder, pack.head.host) == ("sm80", fake, HOST)
    with pytest.raises(ArtifactError, match=rf"pack .*: {KERNELS_NAME} cannot be read: .*; build the pack again"):
        _ = pack.manifest
    (fake / "moved").rename(fake / KERNELS_NAME)
    assert [entry.name for entry in pack.manifest.kernels] == ["one", "two"]


@pytest.mark.parametrize("exists", [False, True])
def test_no_pack(tmp_path: Path, *, exists: bool) -> None:
    """A missing or half-written folder, which has no manifest yet, is no pack; the error has the command to build."""
    folder = tmp_path / "sm80"
    if exists:
        folder.mkdir()
        (folder / "libaotmm_sm80.so").write_bytes(LIBRARY)
    with pytest.raises(ArtifactError) as caught:
        open_pack(folder)
    assert str(caught.value) == (
        f"{folder} is not a pack: it has no manifest.json; build one: aotmm build --arch sm80 --out {tmp_path}"
    )


def test_unreadable_pack(tmp_path: Path) -> None:
    """A manifest that cannot be read is an ArtifactError with the reason."""
    (tmp_path / "sm80" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(ArtifactError, match=r"pack .*/sm80 cannot be read: .*Is a directory"):
        open_pack(tmp_path / "sm80")


def test_pack_for_another_machine(tmp_path: Path) -> None:
    """A pack whose library is for another processor is refused before its library is looked at."""
    folder = write_pack(tmp_path / "sm80", dataclasses.replace(manifest(), host="riscv64-linux-gnu"))
    (folder / "libaotmm_sm80.so").unlink()
    said = f"is for riscv64-linux-gnu, this machine is {HOST}; build it here, or anywhere with aotmm build --host "
    with pytest.raises(ArtifactError, match=f"{said}{HOST.partition('-')[0]}$"):
        open_pack(folder)
    assert open_pack(folder, "riscv64").head.host == "riscv64-linux-gnu"


@pytest.mark.parametrize("name", [FILE_NAME, KERNELS_NAME])
def test_altered_manifest(fake: Path, name: str) -> None:
    """One altered byte in either half of the manifest is noticed."""
    data = (fake / name).read_bytes()
    (fake / name).write_bytes(data.replace(b"tests, by hand", b"tests, by hond").replace(b"3.9.0", b"3.9.1"))
    assert (fake / name).read_bytes() != data
    with pytest.raises(ArtifactError, match="was altered"):
        _ = open_pack(fake).manifest


def test_list_of_another_pack(fake: Path) -> None:
    """The list of kernels of another pack is not taken for this one's, though it is a right list."""
    (fake / KERNELS_NAME).write_bytes(write(manifest(kernel("three")))[KERNELS_NAME])
    with pytest.raises(ArtifactError, match=rf"{KERNELS_NAME} was altered: .*; build the pack again"):
        _ = open_pack(fake).manifest


def test_open_packs(fake: Path) -> None:
    """A folder of packs gives them all by name, a pack gives itself; hidden folders and files are none."""
    entry = dataclasses.replace(manifest(), host=HOST)
    write_pack(fake.parent / "gfx90a", dataclasses.replace(entry, arch="gfx90a"))
    write_pack(fake.parent / ".sm90.new", dataclasses.replace(entry, arch="sm90"))
    (fake.parent / ".cache").mkdir()
    (fake.parent / "README.md").write_text("")
    assert [pack.arch for pack in open_packs(fake.parent)] == ["gfx90a", "sm80"]
    assert [pack.folder for pack in open_packs(fake)] == [fake]


def test_open_packs_where_none_are(tmp_path: Path) -> None:
    """A missing folder and one without packs are told apart, each with the command to build."""
    command = f"build some: aotmm build --arch ... --out {tmp_path}"
    with pytest.raises(ArtifactError, match=f"no packs in {tmp_path}; {command}"):
        open_packs(tmp_path)
    with pytest.raises(ArtifactError, match=f"no packs: {tmp_path}/absent is not a folder; {command}/absent"):
        open_packs(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"PK, but no zip file")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArtifactError, match=f"no packs: {path} is not a folder"):
            open_packs(path)


def test_one_bad_pack_among_others(fake: Path) -> None:
    """A refused pack is not passed over."""
    (fake.parent / "sm90").mkdir()
    (fake.parent / "sm90" / FILE_NAME).write_text("{}")
    with pytest.raises(ArtifactError, match=r"sm90/manifest\.json: pack format None"):
        open_packs(fake.parent)


# --------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(
    "data", [b"", LIBRARY[:-1], LIBRARY + b"\n", b"N" + LIBRARY[1:]], ids=["empty", "cut", "longer", "altered"]
)
def test_altered_file(fake: Path, data: bytes) -> None:
    """A file of another size or content is told with both digests, and its library is not loaded."""
    entry = open_pack(fake).head.library
    assert read_verified(fake, entry) == LIBRARY
    (fake / entry.path).write_bytes(data)
    for action in (lambda: read_verified(fake, entry), lambda: open_pack(fake).launcher):
        with pytest.raises(ArtifactError) as caught:
            action()
        assert str(caught.value).startswith(f"pack {fake}: libaotmm_sm80.so was altered: sha256 ")
        assert f"the manifest says {entry.sha256[:12]}... ({len(LIBRARY)} bytes)" in str(caught.value)


def test_missing_file(fake: Path) -> None:
    """A missing library is an ArtifactError that names it."""
    (fake / "libaotmm_sm80.so").unlink()
    with pytest.raises(ArtifactError, match=r"libaotmm_sm80\.so cannot be read: .*; build the pack again"):
        _ = open_pack(fake).launcher


def test_endless_file(fake: Path) -> None:
    """No more is read of a file than the manifest says it has."""
    with (fake / "zero").open("wb") as handle:
        handle.truncate(1 << 40)
    with pytest.raises(ArtifactError, match=r"zero was altered: sha256 .* \(more bytes\)"):
        read_verified(fake, File("zero", file("zero", b"").sha256, 1000))


def test_library_that_is_none(fake: Path) -> None:
    """A library with the right digest that the loader refuses is an ArtifactError with the loader's words."""
    with pytest.raises(ArtifactError, match=r"libaotmm_sm80\.so cannot be loaded: .*"):
        _ = open_pack(fake).launcher


# ----------------------------------------------------------------------------------------------------------- libraries
def chosen(pack: Pack) -> str | None:
    """The kernel that the pack's library takes for some product."""
    problem = Problem(64, 64, 64, (64, 1), (64, 1), (64, 1), "fp16", "fp16", "fp16", "none", 256, 256, 256)
    selection = pack.launcher.explain(problem, CDevice(108, 65_536))
    return selection.chosen.kernel.name if selection.chosen else None


def test_real_packs(real: Path) -> None:
    """Packs that were built open, and their libraries answer."""
    packs = open_packs(real)
    assert packs
    for pack in packs:
        assert chosen(pack) in {entry.name for entry in pack.manifest.kernels}
        assert pack.launcher is pack.launcher


def test_packs_are_not_confused(real: Path) -> None:
    """Libraries that are loaded one after the other, and one pack opened twice, are each their own."""
    first, again = open_packs(real), open_packs(real)
    launchers = [pack.launcher for pack in first + again]
    assert len({launcher.address for launcher in launchers}) == len(launchers)
    for pack, launcher in zip(first + again, launchers, strict=True):
        assert launcher._c.arch.decode() == pack.arch
        assert launcher._c.kernel_count == len(pack.manifest.kernels)


def test_what_was_checked_is_what_runs(real: Path) -> None:
    """The library comes from the bytes that were checked: the file may change or vanish afterwards."""
    pack = open_packs(real)[0]
    library = load_verified(pack.folder, pack.head.library)
    path = pack.folder / pack.head.library.path
    path.write_bytes(b"\0" * path.stat().st_size)
    path.unlink()
    assert getattr(library, f"aotmm_launcher_{pack.arch}")() != 0


def test_altered_real_library(real: Path) -> None:
    """One flipped bit in a library of megabytes is noticed before anything of it runs."""
    pack = open_packs(real)[0]
    path = pack.folder / pack.head.library.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="was altered"):
        _ = pack.launcher


def test_library_without_the_entry_point(real: Path) -> None:
    """A library of another arch, passed off with a right digest, is refused."""
    one, *others = open_packs(real)
    if not others:
        pytest.skip("this needs two packs in artifacts/; make artifacts builds them")
    data = (others[0].folder / others[0].head.library.path).read_bytes()
    (one.folder / one.head.library.path).write_bytes(data)
    entry = dataclasses.replace(one.manifest, library=file(one.head.library.path, data))
    for name, content in write(entry).items():
        (one.folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"has no aotmm_launcher_{one.arch}; build the pack again"):
        _ = open_pack(one.folder).launcher


def test_threads_open_one_launcher(real: Path) -> None:
    """Threads that ask for the launcher at once get the same one."""
    pack, found, barrier = open_packs(real)[0], [], threading.Barrier(16)

    def ask() -> None:
        barrier.wait()
        found.append(pack.launcher)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(map(id, found))) == 1
