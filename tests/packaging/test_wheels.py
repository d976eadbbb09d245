"""Wheels that fit their users: small ones, packs alone, another processor; their tags, and every Python there is."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import click
import pytest
from elftools.elf.elffile import ELFFile

import aotmm
from aotmm.build import link
from aotmm.pack.verify import verify
from aotmm.target import HOSTS
from tests.build.packs import ROOT, other_host
from tests.emulators import fake_driver
from tests.samples import SHIPPED

OTHER = next(name for name in HOSTS if name != platform.machine())
VERSION = aotmm.__version__
SMALL = "sm80"  # the arch of the wheels with one pack; sm90's are made more slowly
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
Make = Callable[..., dict[str, Path]]
PAGE_BYTES = 1 << 16  # aarch64 kernels may have pages of 64 KiB, GH200's do

# Multiplies with the pack of the arch that the fake driver has: its launches, of one product, are computed here.
PRODUCT = """
import ctypes, sys
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.installed import find_packs
from aotmm.runtime.launcher import Problem

M, N, K = 8, 17, 32  # rows of no tensor map, whose kernels get addresses
arch, fake = sys.argv[2], ctypes.CDLL(sys.argv[1])
pack = next(pack for pack in find_packs(None) if pack.arch == arch)
types = {"*fp32": ctypes.c_void_p, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}

def launched(image, size, name, grid, block, shared, params, stream, device, captured):
    kernel = next(kernel for kernel in pack.manifest.kernels if kernel.image.bytes == size)
    given = {
        item.value: ctypes.cast(pointer, ctypes.POINTER(types[item.type])).contents.value
        for item, pointer in zip(kernel.parameters, params) if item.type in types
    }
    a, b, c = (ctypes.cast(given[name], ctypes.POINTER(ctypes.c_float)) for name in ("a_ptr", "b_ptr", "c_ptr"))
    assert (given["M"], given["N"], given["K"]) == (M, N, K)
    for i in range(M):
        for j in range(N):
            c[i * N + j] = sum(a[i * K + k] * b[k * N + j] for k in range(K))
    return 0

given = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
launch = ctypes.CFUNCTYPE(
    ctypes.c_int, *given, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_int, ctypes.c_int
)(launched)
fake.fake_setup(launch, 1, arch.encode(), 12080)
a, b, c = ((ctypes.c_float * size)(*(i % 7 - 3 for i in range(size))) for size in (M * K, K * N, M * N))
addresses = dict(zip(("a_ptr", "b_ptr", "c_ptr"), map(ctypes.addressof, (a, b, c))))
problem = Problem(M, N, K, (K, 1), (N, 1), (N, 1), "fp32", "fp32", "fp32", **addresses)
plan = pack.launcher.plan(problem, 0, 0)
pack.launcher.run(plan, problem, 0, 0)
wanted = [sum(a[i * K + k] * b[k * N + j] for k in range(K)) for i in range(M) for j in range(N)]
print(plan.steps, list(c) == wanted, str(pack.folder), pack.owner)
"""
# Imports the module of the stable ABI, whose symbols this Python has to have, all of them.
STABLE_ABI = (
    "import aotmm.native._direct_call as module; print(sorted(name for name in vars(module) if name[0] != '_'))"
)


def _run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str) -> str:
    settings = os.environ | {"PYTHONPATH": ""} | environment
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=settings)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr * fails


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, make: Make, wheel: Path) -> dict[str, Path]:
    """What `make wheel`, `make wheel ARCH=sm80` and `make kernels` make, by name and version."""
    folder = tmp_path_factory.mktemp("wheels")
    found = {f"aotmm-{VERSION}": wheel} | make(folder, "--label", SMALL) | make(folder, "--kernels", *SHIPPED)
    assert found.keys() == {
        *(f"aotmm-{VERSION}", f"aotmm-{VERSION}+{SMALL}"),
        *(f"aotmm_kernels_{arch}-{VERSION}" for arch in SHIPPED),
    }
    return found


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory, make: Make) -> dict[str, Path]:
    """The same for another processor, of one pack."""
    root = tmp_path_factory.mktemp("other") / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("aotmm", "templates"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("README.md", "LICENSE", "pyproject.toml", "hatch_build.py", "wheels.py"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(other_host(OTHER, SMALL), root / "build" / OTHER)
    folder = root.parent
    found = make(folder, "--host", OTHER, "--label", SMALL, root=root)
    return found | make(folder, "--host", OTHER, "--kernels", SMALL, root=root)


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_small_wheel(wheels: dict[str, Path]) -> None:
    """The wheel of one arch is the other one without the packs of others, and is not taken for it."""
    whole, small = (_contents(wheels[f"aotmm-{version}"]) for version in (VERSION, f"{VERSION}+{SMALL}"))
    others = tuple(f"aotmm/artifacts/{arch}" for arch in SHIPPED if arch != SMALL)
    wanted = {name for name in whole if not name.startswith(others)}
    said = f"aotmm-{VERSION}+{SMALL}.dist-info"
    assert small.keys() == {name.replace(f"aotmm-{VERSION}.dist-info", said) for name in wanted}
    assert all(small[name] == whole[name] for name in wanted if ".dist-info" not in name)
    assert f"Version: {VERSION}+{SMALL}\n" in small[f"{said}/METADATA"].decode()


@pytest.mark.parametrize("arch", SHIPPED)
def test_kernels_wheel(wheels: dict[str, Path], arch: str) -> None:
    """A pack-only wheel has the pack and metadata, nothing that Python runs, and asks for this very aotmm."""
    name = f"aotmm_kernels_{arch}"
    inside, said = _contents(wheels[f"{name}-{VERSION}"]), f"{name}-{VERSION}.dist-info"
    pack = {path.removeprefix(f"{name}/"): data for path, data in inside.items() if not path.startswith(said)}
    folder = ROOT / "artifacts" / arch
    assert pack == {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    metadata = Parser().parsestr(inside[f"{said}/METADATA"].decode())
    assert metadata.get_all("Requires-Dist") == [f"aotmm=={VERSION}"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert inside[f"{said}/entry_points.txt"].decode().split() == ["[aotmm.packs]", arch, "=", name]
    assert f"{said}/licenses/LICENSE" in inside
    bill = json.loads(inside[f"{said}/sboms/aotmm-kernels-{arch}.cdx.json"])
    assert bill["metadata"]["component"]["name"] == f"aotmm-kernels-{arch}"
    assert [part["name"] for part in bill["components"]] == [
        f"{name}/manifest.json",
        f"{name}/libaotmm_{arch}.so",
        "aotmm",
    ]
    wheel = wheels[f"{name}-{VERSION}"]
    provenance = json.loads(wheel.with_name(f"{wheel.name}.provenance.json").read_text())
    assert [subject["name"] for subject in provenance["subject"]] == [wheel.name]
    assert [(row.arch, row.violations) for row in verify(wheel)] == [(None, ()), (arch, ())]


def test_pack_that_is_not_built(tmp_path: Path) -> None:
    """A wheel of a pack that is not there is refused, with what to do."""
    said = _run(
        *(sys.executable, ROOT / "wheels.py", "--directory", tmp_path, "--kernels", "--host", "riscv64", "sm90"),
        cwd=ROOT,
        fails=True,
        PYTHONPATH=str(ROOT),
    )
    assert "build/riscv64/sm90 is not a pack" in said
    assert not list(tmp_path.glob("*.whl"))


# ---------------------------------------------------------------------------------------------------------------- tags
def test_tags(wheels: dict[str, Path], others: dict[str, Path]) -> None:
    """auditwheel finds every wheel to be what its tag says: any Python, this glibc and later, one processor."""
    for wheel in [*wheels.values(), *others.values()]:
        said = " ".join(_run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent).split())
        machine = OTHER if wheel in others.values() else platform.machine()
        tag = f"manylinux_{link.GLIBC.replace('.', '_')}_{machine}"
        assert wheel.name.endswith(f"-py3-none-{tag}.whl")
        assert f'is consistent with the following platform tag: "{tag}"' in said


def test_stable_abi(wheels: dict[str, Path], others: dict[str, Path], tmp_path: Path) -> None:
    """abi3audit finds nothing in the module that the limited API of Python 3.10 lacks, for either processor."""
    for number, wheel in enumerate((wheels[f"aotmm-{VERSION}"], others[f"aotmm-{VERSION}+{SMALL}"])):
        module = tmp_path / str(number) / "_direct_call.abi3.so"
        module.parent.mkdir()
        module.write_bytes(_contents(wheel)["aotmm/native/_direct_call.abi3.so"])
        words = ("abi3audit", "--strict", "--assume-minimum-abi3", "3.10", "--report", module)
        (report,) = json.loads(_run(sys.executable, "-m", *words, cwd=tmp_path))["specs"].values()
        assert report["kind"] == "object"
        assert report["object"]["result"] == {
            "is_abi3": True,
            "is_abi3_baseline_compatible": True,
            "baseline": "3.10",
            "computed": "3.10",
            "non_abi3_symbols": [],
            "future_abi3_objects": {},
        }


def test_other_processor(others: dict[str, Path]) -> None:
    """A wheel for another processor has its libraries, which load with pages of 64 KiB, and this one's all else."""
    for wheel in others.values():
        inside = _contents(wheel)
        for name in [name for name in inside if name.endswith(".so")]:
            elf = ELFFile(io.BytesIO(inside[name]))
            assert elf["e_machine"] == {"aarch64": "EM_AARCH64", "x86_64": "EM_X86_64"}[OTHER]
            for segment in elf.iter_segments("PT_LOAD"):
                assert segment["p_align"] % PAGE_BYTES == 0 or OTHER == "x86_64", name
        assert [row.violations for row in verify(wheel)] == [(), ()]
    inside, here = _contents(others[f"aotmm-{VERSION}+{SMALL}"]), ROOT / "artifacts" / SMALL
    for path in [path for path in here.rglob("*") if path.is_file()]:
        same = inside[f"aotmm/artifacts/{SMALL}/{path.relative_to(here)}"] == path.read_bytes()
        assert same == (path.name not in ("manifest.json", f"libaotmm_{SMALL}.so")), path


# ------------------------------------------------------------------------------------------------------------- Pythons
@pytest.fixture(scope="session", params=PYTHONS)
def python(request: pytest.FixtureRequest) -> Path:
    """A Python of that version, one on PATH or of pyenv."""
    wanted = f"python{request.param}"
    named = shutil.which(wanted)
    for path in [
        *([Path(named)] if named else []),
        *sorted(Path.home().glob(f".pyenv/versions/{request.param}.*/bin/{wanted}")),
    ]:
        done = subprocess.run([path, "-c", "import ctypes, venv"], capture_output=True, check=False)
        if not done.returncode:  # pyenv has names on PATH that run nothing
            return path
    pytest.skip(f"no Python {request.param} on PATH or in ~/.pyenv")


@pytest.fixture
def clean(python: Path, tmp_path: Path, wheels: dict[str, Path]) -> Path:
    """The Python of a new environment with aotmm for sm80, the kernels for sm90, and click."""
    venv = tmp_path / "venv"
    _run(python, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    site = next(venv.glob("lib/python*/site-packages"))
    shutil.copytree(Path(click.__file__).parent, site / "click")
    version = site.parent.name.removeprefix("python")
    # This pip asks the wheels' tags whether that Python may have them, and does not have to run there.
    words = ("install", "--no-deps", "--no-index", "--only-binary=:all:", "--python-version", version, "--platform")
    chosen = [wheels[f"aotmm-{VERSION}+{SMALL}"], wheels[f"aotmm_kernels_sm90-{VERSION}"]]
    tag = chosen[0].stem.split("-")[-1]
    _run(sys.executable, "-m", "pip", *words, tag, "--target", site, *chosen, cwd=tmp_path)
    return venv / "bin/python"


@pytest.mark.skipif(platform.machine() not in HOSTS, reason="wheels are for x86_64 and aarch64")
def test_every_python(clean: Path, tmp_path: Path) -> None:
    """In a clean environment of each Python both wheels work together: commands, stable ABI, a product by each pack."""
    site = next(clean.parents[1].glob("lib/python*/site-packages"))
    program = "from aotmm.cli import main; main()"
    listed = json.loads(_run(clean, "-c", program, "list", "--json", cwd=tmp_path))
    mine = {"sm90": (f"{site}/aotmm_kernels_sm90", f"aotmm-kernels-sm90 {VERSION}")}
    mine[SMALL] = (f"{site}/aotmm/artifacts/{SMALL}", "")
    assert {row["arch"]: (row["folder"], row["owner"]) for row in listed} == mine
    found = json.loads(_run(clean, "-c", program, "doctor", "--json", cwd=tmp_path))
    assert {row["arch"]: row["folder"] for row in found["packs"]} == {arch: mine[arch][0] for arch in mine}
    assert (found["exit_code"], found["torch"]) == (0, None)
    assert "intact" in _run(clean, "-c", program, "verify", cwd=tmp_path)
    assert "chosen" in _run(clean, "-c", program, "explain", "--arch", "sm80", "512", "512", "512", cwd=tmp_path)
    assert "'matmul'" in _run(clean, "-c", STABLE_ABI, cwd=tmp_path)
    driver = fake_driver.built("cuda")
    for arch, (folder, owner) in mine.items():
        printed = _run(clean, "-c", PRODUCT, driver, arch, cwd=tmp_path)
        assert printed.strip() == f"('product',) True {folder} {owner}".strip()
