"""What wheels and source distributions hold, and which ones are refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import click
import pytest
from elftools.elf.elffile import ELFFile

import aotmm
from aotmm.build import link
from aotmm.errors import SpecError
from aotmm.pack import manifest
from aotmm.pack.verify import verify
from aotmm.runtime.pack import open_pack
from tests.samples import SHIPPED

ROOT = Path(__file__).parents[2]
PLATFORM = f"manylinux_{link.GLIBC.replace('.', '_')}_{platform.machine()}"
WHEEL = f"aotmm-{aotmm.__version__}-py3-none-{PLATFORM}.whl"
SDIST = f"aotmm-{aotmm.__version__}"
MAX_WHEEL_BYTES = 17_000_000
GLIBC_LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
FOLDERS = ("aotmm", "docs", "examples", "templates", "tests")
TORCH_LIBRARY = Path("aotmm/native/libaotmm_torch.so")
DIRECT_CALL = Path("aotmm/native/_direct_call.abi3.so")


def _run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | environment)


def _build(target: str, root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return _run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out, cwd=root)


def _tracked() -> list[Path]:
    """Every file of the checkout that git tracks, or would if all in the project's folders were added."""
    git = ("git", "-c", "safe.directory=*", "ls-files", "-z")  # the checkout may belong to another user
    names: list[str] = []
    for options in (("--cached",), ("--others", "--exclude-standard", *FOLDERS)):
        done = _run(*git, *options, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        names += done.stdout.split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def _pack_files(arch: str) -> list[str]:
    folder = ROOT / "artifacts" / arch
    return [manifest.FILE_NAME, *(file.path for file in manifest.files(open_pack(folder).manifest))]


def _names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.removeprefix(f"{SDIST}/") for name in archive.getnames()}


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built from the checkout."""
    out = tmp_path_factory.mktemp("sdist")
    done = _build("sdist", ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / f"{SDIST}.tar.gz"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the checkout as git knows it: nothing that is built."""
    root = tmp_path / "checkout"
    for path in _tracked():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    return root


@pytest.fixture
def built(sources: Path) -> Path:
    """The same with the libraries for torch and one pack."""
    for library in (TORCH_LIBRARY, DIRECT_CALL):
        shutil.copy(ROOT / library, sources / library)
    shutil.copytree(ROOT / "artifacts" / "gfx90a", sources / "artifacts" / "gfx90a")
    return sources


def test_wheel_holds_exactly_its_files(wheel: Path) -> None:
    """The wheel has the package, the templates, what serves torch and every file of every pack, and nothing else.

    The candidates of the default set, and the random problems of tables, are for checkouts.
    """
    candidates, tables = Path("aotmm/tune/tiles"), Path("aotmm/tune/tables")
    drawn = {path for path in _tracked() if path.parent == tables and path.name.endswith(".drawn.json")}
    assert drawn
    ours = {path for path in _tracked() if path.parts[0] == "aotmm" and candidates not in path.parents}
    expected = {str(path) for path in ours - drawn}
    expected |= {f"aotmm/{path}" for path in _tracked() if path.parts[0] == "templates"}
    expected |= {str(TORCH_LIBRARY), str(DIRECT_CALL)}
    expected |= {f"aotmm/artifacts/{arch}/{name}" for arch in SHIPPED for name in _pack_files(arch)}
    information = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "sboms/aotmm.cdx.json")
    expected |= {f"{SDIST}.dist-info/{name}" for name in information}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sorted(names) == sorted(expected)


def test_sdist_holds_exactly_the_sources(sdist: Path) -> None:
    """The source distribution has what git tracks, and nothing else."""
    assert _names(sdist) == {str(path) for path in _tracked()} | {"PKG-INFO"}


def test_sdist_leaves_out_what_lies_around(sdist: Path, built: Path, tmp_path: Path) -> None:
    """Neither packs in their place or elsewhere nor a library get into the source distribution."""
    for folder in (built, built / "tests", built / "aotmm"):
        shutil.copytree(built / "artifacts" / "gfx90a", folder / "gfx90a", dirs_exist_ok=True)
    assert _build("sdist", built, tmp_path).returncode == 0
    assert _names(tmp_path / sdist.name) == _names(sdist)


def test_wheel_metadata(wheel: Path) -> None:
    """One wheel serves every Python of the platform, and asks for torch and click alone."""
    assert wheel.name == WHEEL
    with zipfile.ZipFile(wheel) as archive:
        tags = archive.read(f"{SDIST}.dist-info/WHEEL").decode().splitlines()
        metadata = archive.read(f"{SDIST}.dist-info/METADATA").decode().splitlines()
    assert f"Tag: py3-none-{PLATFORM}" in tags
    assert "Root-Is-Purelib: false" in tags
    assert "Requires-Python: >=3.10" in metadata
    required = {line for line in metadata if line.startswith("Requires-Dist: ") and "extra ==" not in line}
    assert required == {"Requires-Dist: torch>=2.10", "Requires-Dist: click>=8.1"}


def test_sbom_and_provenance(wheel: Path) -> None:
    """Both lie beside the wheel and name what is in it, by digest, what it needs and what it was made with."""
    sbom = json.loads(wheel.with_name(f"{WHEEL}.cdx.json").read_text())
    provenance = json.loads(wheel.with_name(f"{WHEEL}.provenance.json").read_text())
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
        assert json.loads(archive.read(f"{SDIST}.dist-info/sboms/aotmm.cdx.json")) == sbom
    listed = {part["name"]: part["hashes"][0]["content"] for part in sbom["components"] if part["type"] == "file"}
    executed = {name for name in inside if name.endswith((".so", manifest.FILE_NAME))}
    assert listed == {name: inside[name] for name in executed}
    assert [part["name"] for part in sbom["components"] if part["type"] == "library"] == ["click", "torch"]
    assert {part["name"].split()[0] for part in sbom["formulation"][0]["components"]} == {
        *("hatchling", "llvm", "ptxas", "triton", "ziglang"),
    }
    references = [part["bom-ref"] for part in sbom["components"]]
    assert sorted(sbom["dependencies"][0]["dependsOn"]) == sorted(set(references))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert provenance["subject"] == [{"name": WHEEL, "digest": {"sha256": digest}}]
    assert provenance["predicate"]["buildDefinition"]["externalParameters"].keys() == set(SHIPPED)


def test_wheel_verifies(wheel: Path) -> None:
    """What is built verifies: the wheel's own list and every pack in it."""
    assert [(row.arch, row.violations) for row in verify(wheel)] == [
        (None, ()),
        *((arch, ()) for arch in sorted(SHIPPED)),
    ]


def test_wheel_is_small(wheel: Path) -> None:
    """The wheel with every pack stays below 17 MB, which bounds the default set (`aotmm.tune.choose`)."""
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_libraries_need_only_glibc(wheel: Path) -> None:
    """No shared library of the wheel links anything but parts of glibc."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = {Path(name).name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert libraries.keys() == {TORCH_LIBRARY.name, DIRECT_CALL.name, *(f"libaotmm_{arch}.so" for arch in SHIPPED)}
    for name, data in libraries.items():
        dynamic = ELFFile(io.BytesIO(data)).get_section_by_name(".dynamic")
        assert {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")} <= GLIBC_LIBRARIES, name


def test_wheel_is_reproducible(wheel: Path, built: Path, tmp_path: Path) -> None:
    """What a frontend builds of the same sources in another folder, with other file times, has the same bytes."""
    for arch in SHIPPED:
        shutil.rmtree(built / "artifacts" / arch, ignore_errors=True)
        shutil.copytree(ROOT / "artifacts" / arch, built / "artifacts" / arch, copy_function=shutil.copy)
    assert _build("wheel", built, tmp_path).returncode == 0
    assert (tmp_path / WHEEL).read_bytes() == wheel.read_bytes()


def _no_packs(root: Path) -> None:
    shutil.rmtree(root / "artifacts" / "gfx90a")


def _no_torch_library(root: Path) -> None:
    (root / TORCH_LIBRARY).unlink()


def _no_direct_call(root: Path) -> None:
    (root / DIRECT_CALL).unlink()


def _half_a_pack(root: Path) -> None:
    (root / "artifacts/gfx90a" / manifest.FILE_NAME).unlink()


def _altered_library(root: Path) -> None:
    library = root / "artifacts/gfx90a/libaotmm_gfx90a.so"
    library.write_bytes(library.read_bytes() + b"\0")


def _altered_manifest(root: Path) -> None:
    path = root / "artifacts/gfx90a" / manifest.FILE_NAME
    path.write_text(path.read_text().replace('"arch": "gfx90a"', '"arch": "sm80"'))


def _newer_glibc(root: Path) -> None:
    with (root / TORCH_LIBRARY).open("ab") as handle:
        handle.write(b"GLIBC_2.34\0")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_no_packs, "there is no pack in artifacts/"),
        (_no_torch_library, "libaotmm_torch.so is missing"),
        (_no_direct_call, "_direct_call.abi3.so is missing"),
        (_half_a_pack, "it has no manifest.json"),
        (_altered_library, "was altered"),
        (_altered_manifest, "the file was altered"),
        (_newer_glibc, "needs glibc 2.34"),
    ],
)
def test_wheel_that_could_not_run_is_refused(harm: object, reason: str, built: Path, tmp_path: Path) -> None:
    """No wheel is made without whole packs and the libraries for torch; the message says why and what to do."""
    assert callable(harm)
    harm(built)
    done = _build("wheel", built, tmp_path / "out")
    assert done.returncode == 1
    assert reason in done.stdout + done.stderr
    assert "make wheel" in done.stdout + done.stderr
    assert not list((tmp_path / "out").glob("*.whl"))


def test_wheel_from_sdist_is_refused(sdist: Path, tmp_path: Path) -> None:
    """A wheel of the source distribution, which has no packs, is refused with the same message, seen through pip."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    done = _run(sys.executable, "-m", "pip", "wheel", *offline, "-w", tmp_path, sdist, cwd=tmp_path)
    assert done.returncode != 0
    assert "libaotmm_torch.so is missing" in done.stdout + done.stderr
    assert "make wheel" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_editable_install_needs_no_packs(sources: Path, tmp_path: Path) -> None:
    """An editable install works in a fresh clone, where nothing is built, and copies nothing."""
    program = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    done = _run(sys.executable, "-c", program, cwd=sources)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as archive:
        assert [name for name in archive.namelist() if ".dist-info/" not in name] == ["_aotmm.pth"]


def test_installed_wheel_without_torch(wheel: Path, tmp_path: Path) -> None:
    """An installed wheel asks for click; with that alone it imports, finds its packs and lists their kernels."""
    venv = tmp_path / "venv"
    assert _run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path).returncode == 0
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin/python")
    done = _run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    site = next(venv.glob("lib/python*/site-packages"))
    alone = {"PYTHONPATH": ""}  # without the checkout that the tests themselves may import
    bare = _run(venv / "bin/aotmm", "list", cwd=tmp_path, **alone)
    assert bare.returncode == SpecError.exit_code
    assert bare.stderr == 'error: the command line needs click: pip install "click>=8.1"\n'
    shutil.copytree(Path(click.__file__).parent, site / "click")

    where = _run(venv / "bin/python", "-c", "import aotmm; print(aotmm.__file__)", cwd=tmp_path, **alone)
    assert where.stdout.strip() == str(site / "aotmm/__init__.py"), where.stderr
    version = _run(venv / "bin/aotmm", "--version", cwd=tmp_path, **alone)
    assert aotmm.__version__ in version.stdout, version.stderr
    listed = _run(venv / "bin/aotmm", "list", "--json", cwd=tmp_path, **alone)
    assert listed.returncode == 0, listed.stderr
    json.loads(listed.stdout)
    for arch in SHIPPED:
        assert arch in listed.stdout
