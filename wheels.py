"""Makes wheels of packs that are built: `make wheel` and `make kernels` run it.

Each is the wheel of pyproject.toml with a few entries of that changed, and `hatch_build.py` decides what it holds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import tomllib
from hatchling.builders.wheel import WheelBuilder

from aotmm import __version__
from aotmm.target import targets

ROOT = Path(__file__).parent


def main() -> None:
    """Makes aotmm with the packs of some architectures, or for each of these a wheel with its pack alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("archs", nargs="+", metavar="ARCH", help="all stands for every one")
    parser.add_argument("--host", default="", help="processor of packs in build/HOST; else those in artifacts/")
    parser.add_argument("--kernels", action="store_true", help="a wheel aotmm-kernels-ARCH for each pack")
    parser.add_argument("--label", action="store_true", help="name the packs in the version: 0.1.0+sm90")
    parser.add_argument("--directory", default="dist")
    given = parser.parse_args()
    archs = [row.name for row in targets(given.archs)]
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if given.kernels:
        configs = [_kernels(facts, arch, given.host) for arch in archs]
    else:
        configs = [_whole(facts, archs, given.host, label=given.label)]
    for config in configs:
        for path in WheelBuilder(str(ROOT), config=config).build(directory=given.directory, versions=["standard"]):
            print(path)  # noqa: T201 - what a command says


def _whole(facts: dict[str, Any], archs: list[str], host: str, *, label: bool) -> dict[str, Any]:
    """aotmm with the packs of `archs`."""
    facts["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"] = {"archs": archs, "host": host}
    if label:  # a local version: nobody takes it for the wheel with all packs
        facts["project"]["dynamic"].remove("version")
        facts["project"]["version"] = f"{__version__}+{'.'.join(sorted(archs))}"
    return facts


def _kernels(facts: dict[str, Any], arch: str, host: str) -> dict[str, Any]:
    """The pack of `arch` alone, for the aotmm of this very version, which finds it by the metadata: docs/packs.md."""
    package = f"aotmm_kernels_{arch}"
    kept = ("requires-python", "license", "license-files", "classifiers")
    project = {key: facts["project"][key] for key in kept} | {
        "name": package.replace("_", "-"),
        "version": __version__,
        "description": f"The kernels of aotmm for {arch}",
        "dependencies": [f"aotmm=={__version__}"],
        "entry-points": {"aotmm.packs": {arch: package}},
    }
    hook = {"archs": [arch], "host": host, "package": package}
    wheel = {"bypass-selection": True, "hooks": {"custom": hook}}
    return {"project": project, "tool": {"hatch": {"build": {"targets": {"wheel": wheel}}}}}


if __name__ == "__main__":
    main()
