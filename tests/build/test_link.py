"""Launcher libraries: what they need of a machine, what they show, and what they hold."""

from __future__ import annotations

import importlib.util
import io
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from aotmm.build import build, link, render
from aotmm.errors import CompileError, SpecError
from aotmm.pack.verify import verify
from aotmm.runtime.pack import open_pack
from aotmm.target import HOSTS, host, target
from tests.build.packs import content, relinked, tiny_pack
from tests.samples import SHIPPED, code_in, installed, kernel

# What the direct call's module takes of CPython, all of it in the limited API of Python 3.10.
GLIBC_LIBRARY = r"(libc|libm|libdl|libpthread|ld-linux)\b.*\.so\.\d"

TEXTS = render.texts(target("sm80"), (kernel("one"),))


def library(folder: Path) -> ELFFile:
    """The launcher library of a pack."""
    return ELFFile(io.BytesIO((folder / f"libaotmm_{folder.name}.so").read_bytes()))


@pytest.fixture(params=SHIPPED)
def pack(request: pytest.FixtureRequest) -> Path:
    """A small pack of every arch that wheels ship."""
    return tiny_pack(request.param)


def test_needs_nothing_but_glibc(pack: Path) -> None:
    """No launcher links anything but glibc's own libraries."""
    dynamic = library(pack).get_section_by_name(".dynamic")
    assert all(re.fullmatch(GLIBC_LIBRARY, tag.needed) for tag in dynamic.iter_tags("DT_NEEDED"))
    assert [tag.soname for tag in dynamic.iter_tags("DT_SONAME")] == [f"libaotmm_{pack.name}.so"]


def test_needs_no_new_glibc(pack: Path) -> None:
    """No launcher asks for a symbol version above glibc 2.17."""
    found = {
        version.name
        for _, versions in library(pack).get_section_by_name(".gnu.version_r").iter_versions()
        for version in versions
    }
    numbers = {tuple(map(int, re.fullmatch(r"GLIBC_([0-9.]+)", name)[1].split("."))) for name in found}  # type: ignore[index]
    assert numbers
    assert max(numbers) <= tuple(map(int, link.GLIBC.split("."))) == (2, 17)


def test_shows_one_symbol(pack: Path) -> None:
    """A launcher exports its entry point and nothing that could clash with another pack's."""
    symbols = library(pack).get_section_by_name(".dynsym").iter_symbols()
    assert [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF"] == [f"aotmm_launcher_{pack.name}"]


def test_has_no_debug_sections(pack: Path) -> None:
    """A launcher carries no debug information and no symbol table."""
    names = [section.name for section in library(pack).iter_sections()]
    assert not [name for name in names if "debug" in name or name == ".symtab"]


def test_images_are_in_the_pack_once(pack: Path) -> None:
    """No image is a file of the pack; each is in the library once, or not at all if it is made of another."""
    data = (pack / f"libaotmm_{pack.name}.so").read_bytes()
    for made in open_pack(pack).manifest.kernels:
        assert data.count(code_in(pack)(made.image)) == made.image.whole, made.name
    files = {"manifest.json", "kernels.json", "launcher.c", "launcher.h", f"libaotmm_{pack.name}.so"}
    assert {path.name for path in pack.iterdir()} == files


def test_changed_input_is_never_an_old_library(tmp_path: Path) -> None:
    """Linking the same launcher.c with other images or another table gives another library.

    The compiler's cache does not see images, and knows tables.h by its name.
    """
    other = TEXTS | {"tables.h": TEXTS["tables.h"].replace("1410", "1411")}
    assert other != TEXTS
    command = link.compiler()[0]
    libraries: set[bytes] = set()
    for texts, images in ((TEXTS, b"these are images"), (TEXTS, b"others of one size"), (other, b"others of one size")):
        folder = tmp_path / str(len(libraries))
        folder.mkdir()
        path, begin = link.link_launcher(target("sm80"), folder, texts, images, command)
        libraries.add(path.read_bytes())
        assert path.read_bytes()[begin:].startswith(images)
        assert sorted(each.name for each in folder.iterdir()) == ["launcher.c", "launcher.h", path.name]
    assert len(libraries) == 3


def test_images_that_are_not_embedded_are_refused(tmp_path: Path) -> None:
    """A library that does not hold the images fails the link."""
    source = TEXTS["launcher.c"].replace(f'.incbin \\"{render.IMAGES}\\"', ".byte 1")
    with pytest.raises(CompileError, match=r"libaotmm_sm80\.so does not hold images\.bin"):
        link.link_launcher(
            target("sm80"), tmp_path, TEXTS | {"launcher.c": source}, b"bytes that no library has", link.compiler()[0]
        )


def test_library_for_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CC that links for another processor than the one that is asked for is found out."""
    other = next(name for name in HOSTS if name != platform.machine())
    monkeypatch.setenv("CC", f"{sys.executable} -m ziglang cc -target {host(other)}")
    said = rf"for {host()} gave a library for ELF machine {HOSTS[other]}, not {HOSTS[platform.machine()]}: .*unset CC$"
    with pytest.raises(CompileError, match=said):
        link.link_launcher(target("sm80"), tmp_path, TEXTS, b"images", link.compiler()[0])
    path, _ = link.link_launcher(target("sm80"), tmp_path, TEXTS, b"images", link.compiler()[0], other)
    assert path.is_file()


@pytest.mark.parametrize("arch", SHIPPED)
def test_other_processor(arch: str, tmp_path: Path) -> None:
    """What is linked for aarch64 has its machine number, needs glibc 2.17, shows one symbol; all else is as here."""
    shutil.copytree(tiny_pack(arch).parent / ".cache", tmp_path / ".cache")
    pack = build((arch,), tmp_path, configs=str(tiny_pack(arch).parents[1] / "tiny.toml"), machine="aarch64")[0].folder
    elf = library(pack)
    assert elf["e_machine"] == "EM_AARCH64"
    dynamic = elf.get_section_by_name(".dynamic")
    assert {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")} <= {
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
    }
    asked = elf.get_section_by_name(".gnu.version_r").iter_versions()
    assert {version.name for _, versions in asked for version in versions} == {"GLIBC_2.17"}
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    assert [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF"] == [f"aotmm_launcher_{arch}"]
    assert open_pack(pack, "aarch64").head.host == "aarch64-linux-gnu"
    there, here = content(pack), content(tiny_pack(arch))
    differing = {name for name in here if there[name] != here[name]}
    assert there.keys() == here.keys()
    assert differing == (set() if platform.machine() == "aarch64" else {"manifest.json", f"libaotmm_{arch}.so"})
    assert [row.violations for row in verify(pack)] == [()]


def test_library_key_depends_on_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The key changes with each text, the images, the compiler, and each native file of the arch, and only then."""
    row = target("sm80")

    def key(*, changed: str = "", images: bytes = b"i", name: str = "zig", machine: str = "") -> str:
        texts = {file: "changed" if file == changed else "same" for file in TEXTS}
        return link.library_key(row, texts, images, name, machine)

    found = [key(), *(key(changed=file) for file in TEXTS)]
    found += [key(images=b"j"), key(name="gcc"), key(machine="riscv64")]
    assert key() == found[0]
    for path in link.NATIVE.iterdir():
        if path.suffix in (".c", ".h"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(link, "NATIVE", tmp_path)
    assert key() == found[0]
    for name in (*link.LAUNCH_CORE, "cuda.c"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\n")
        found.append(key())
    assert len(set(found)) == len(found) == 8 + len(link.LAUNCH_CORE)
    (tmp_path / "hip.c").write_bytes(b"")
    assert key() == found[-1]


def test_compiler_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """CC names another compiler, with arguments, and provenance says which; one that does not run is told."""
    monkeypatch.setenv("CC", f"{sys.executable} -m ziglang cc -target x86_64-linux-gnu.2.28")
    command, name = link.compiler()
    assert command == (sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28")
    assert "clang version" in name
    monkeypatch.setenv("CC", "no-such-compiler --fast")
    with pytest.raises(CompileError, match=r"CC=no-such-compiler --fast does not run: .*unset CC to use ziglang"):
        link.compiler()


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc, whose warnings differ")
def test_gcc(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources have none of gcc's warnings, which would be errors, and its library is a launcher."""
    monkeypatch.setenv("CC", "gcc")
    kernels = open_pack(pack).manifest.kernels
    (tmp_path / pack.name).mkdir()
    made = open_pack(relinked(pack, tmp_path / pack.name, kernels))
    assert made.launcher.kernels == made.manifest.kernels


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ziglang and CC the error says what to install."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    advice = installed(monkeypatch)
    with pytest.raises(SpecError) as caught:
        link.compiler()
    assert str(caught.value) == f"aotmm build needs a C compiler (ziglang, or set CC){advice}"
