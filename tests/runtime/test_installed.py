"""The default library: packs that other distributions add, and what is said of those that cannot be used."""

from __future__ import annotations

import dataclasses
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

import aotmm
from aotmm.errors import ArtifactError
from aotmm.runtime import library
from aotmm.runtime.devices import Device
from aotmm.runtime.installed import find_packs, own
from tests.runtime.installation import ROOT, module, run
from tests.runtime.pretend import FUNCTIONS
from tests.runtime.test_installed_wheel import CLI
from tests.runtime.test_pack import write_pack
from tests.samples import SHIPPED, manifest

BLOCKS = dict(re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "packs.md").read_text(), re.DOTALL))
OWN = sorted(SHIPPED)
SHOW = """
import aotmm
lib = aotmm.load()
print(lib)
print([(pack.arch, pack.owner, len(pack.launcher.kernels) > 0) for pack in lib.packs])
print("acme_kernels" in sys.modules)
"""
SHOW_FUNCTION = """
import torch, sys
import aotmm
softmax = aotmm.load()["softmax_kernel"]
print([pack.owner for pack in aotmm.load().packs if "softmax_kernel" in pack.head.functions])
print(softmax)
x = torch.zeros(16, 256)
print(softmax.explain(x, x, 256, 256, 16, 256, BLOCK=256).chosen)
print("acme_softmax" in sys.modules)
"""
# Which pack serves GPUs of the architectures in its arguments.
SERVING = """
import sys
import aotmm
from aotmm.runtime import library
from aotmm.runtime.devices import Device
lib = aotmm.load()
print(lib)
for arch in sys.argv[1:]:
    library.device = lambda ordinal: Device(ordinal, "Some GPU", arch)
    print(arch, lib.pack_for(0).folder)
"""


def add(site: Path, distribution: str, package: str, *archs: str, version: str = "1.0") -> None:
    """Puts a distribution with packs for `archs` into `site`; their manifests are right, their libraries none."""
    metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[aotmm.packs]\nours = {package}\n")
    for arch in archs:
        entry = dataclasses.replace(manifest(), arch=arch, host=f"{platform.machine()}-linux-gnu")
        write_pack(site.joinpath(*package.split("."), arch), entry)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path for distributions."""
    folder = tmp_path / "added"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_example(site: Path, tmp_path: Path) -> None:
    """The wheel that docs/packs.md shows, built and installed, adds its pack: load, list and doctor find it."""
    project, target = tmp_path / "project", tmp_path / "target"
    shutil.copytree(own() / "sm90", project / "packs" / "sm90")  # what its first command builds
    (project / "pyproject.toml").write_text(BLOCKS["toml"])
    module("hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=project)
    module("pip", "install", "-q", "--no-deps", "--target", target, next(tmp_path.glob("*.whl")))
    assert len([line for line in BLOCKS["toml"].splitlines() if line]) <= 15

    path = f"{target}:{site}"
    packs = [("sm90", "acme-kernels 1.0", True), *((arch, "", True) for arch in OWN)]
    assert run(path, tmp_path, SHOW).splitlines() == [
        "<aotmm.Library of sm90 of acme-kernels 1.0, gfx90a, sm80, sm90>",
        str(packs),
        "False",
    ]
    where = f"{target}/acme_kernels/sm90 (added by acme-kernels 1.0)"
    for command in ("list", "doctor"):
        assert where in run(path, tmp_path, CLI, command)

    (target / "acme_kernels/sm90/manifest.json").write_text("{}")
    said = "acme-kernels 1.0 adds packs to aotmm (entry point acme = acme_kernels) that cannot be used: "
    assert f"aotmm.errors.ArtifactError: {said}" in run(path, tmp_path, SHOW, fails=True)
    told = run(path, tmp_path, CLI, "doctor", fails=True)
    assert said in told
    assert f"{site}/aotmm/artifacts/sm90" in told, "doctor goes on"


@pytest.mark.skipif(not FUNCTIONS.is_dir(), reason="no packs of examples/own; build them: make own")
def test_functions(site: Path, tmp_path: Path) -> None:
    """The wheel that docs/own-kernels.md shows, built and installed, adds its functions, verifies, and has an owner."""
    project, target = tmp_path / "project", tmp_path / "target"
    *_, text = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "own-kernels.md").read_text(), re.DOTALL)
    for arch in ("sm80", "sm90"):
        shutil.copytree(FUNCTIONS / arch, project / "packs" / arch)
    (project / "pyproject.toml").write_text(text)
    module("hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=project)
    wheel = next(tmp_path.glob("*.whl"))
    module("pip", "install", "-q", "--no-deps", "--target", target, wheel)
    path = f"{target}:{site}"
    assert run(path, tmp_path, SHOW_FUNCTION).splitlines() == [
        "['acme-softmax 1.0', 'acme-softmax 1.0']",
        "<softmax_kernel(out_ptr, in_ptr, out_stride, in_stride, n_rows, n_cols, BLOCK) of sm80, sm90>",
        "softmax_kernel_fp32_fp32_BLOCK256_special",
        "False",
    ]
    for command in ("list", "doctor"):
        said = run(path, tmp_path, CLI, command)
        for arch in ("sm80", "sm90"):
            assert f"{target}/acme_softmax/{arch} (added by acme-softmax 1.0)" in said
    assert "intact" in run(path, tmp_path, CLI, "verify", str(wheel))


def test_small_wheel_and_kernels(tmp_path: Path) -> None:
    """aotmm with one pack and aotmm-kernels-sm80 beside it have both packs; each GPU gets that of its very arch."""
    for words in (("--label", "sm90"), ("--kernels", "sm80")):
        module("wheels", "--directory", tmp_path, *words)
    site = tmp_path / "site"
    module("pip", "install", "-q", "--no-deps", "--target", site, *tmp_path.glob("*.whl"))
    assert run(site, tmp_path, SERVING, "sm80", "sm86", "sm90").splitlines() == [
        f"<aotmm.Library of sm80 of aotmm-kernels-sm80 {aotmm.__version__}, sm90>",
        f"sm80 {site}/aotmm_kernels_sm80",
        f"sm86 {site}/aotmm_kernels_sm80",
        f"sm90 {site}/aotmm/artifacts/sm90",
    ]


def test_order(added: Path) -> None:
    """Added packs come by the names of their distributions, whatever they are for, and before those of aotmm."""
    add(added, "zeta-kernels", "zeta", "sm90")
    add(added, "acme-kernels", "acme.kernels.packs", "sm80", "sm90", version="2.1")
    found = [(pack.arch, pack.owner) for pack in find_packs(None)]
    acme, zeta = "acme-kernels 2.1", "zeta-kernels 1.0"
    assert found == [("sm80", acme), ("sm90", acme), ("sm90", zeta), *((arch, "") for arch in OWN)]
    assert [pack.owner for pack in find_packs(own())] == [""] * len(OWN), "a path has what is there alone"
    assert not {"acme", "acme.kernels", "zeta"} & set(sys.modules)


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("absent_package", "there is no package absent_package; "),
        ("acme.absent", r"there is no package acme\.absent in .*/acme/absent; "),
        ("__main__", "there is no package __main__; "),
        ("acme", "no packs in .*/acme; build some: "),
        ("json.decoder", r"there is no package json\.decoder in .*/json/decoder; "),
    ],
)
def test_what_cannot_be_used(added: Path, package: str, text: str) -> None:
    """A distribution whose packs are not there is not passed over: the error names it and its entry point."""
    add(added, "acme-kernels", package)
    (added / "acme").mkdir()
    begin = rf"acme-kernels 1\.0 adds packs to aotmm \(entry point ours = {re.escape(package)}\) that cannot be used: "
    with pytest.raises(ArtifactError, match=f"{begin}{text}.*or uninstall it: pip uninstall acme-kernels$"):
        aotmm.load()


def test_packs_for_one_arch_are_asked_in_turn(added: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packs that fit a GPU all of the best one's arch are asked, in their order."""
    add(added, "acme-kernels", "acme", "sm80", "sm90")
    lib = aotmm.load()
    for arch, asked in (
        ("sm90", [("sm90", "acme-kernels 1.0"), ("sm90", "")]),
        ("sm86", [("sm80", "acme-kernels 1.0"), ("sm80", "")]),
        ("gfx90a", [("gfx90a", "")]),
    ):
        monkeypatch.setattr(library, "device", lambda ordinal, arch=arch: Device(ordinal, "Some GPU", arch))
        assert [(pack.arch, pack.owner) for pack in lib.packs_for(0)] == asked
        assert lib.pack_for(0) is lib.packs_for(0)[0]
