"""Decides what a wheel holds beside the package: templates, packs and what serves torch. Refuses one without them.

Beside the wheel it writes what is in it (an SBOM, which the wheel holds too) and what it was made from (provenance).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from aotmm import __version__, manifest
from aotmm.errors import ArtifactError
from aotmm.manifest import Provenance
from aotmm.runtime.pack import open_pack, read_verified

GLIBC = (2, 17)  # what the tag promises and `aotmm.build.link` links for
TORCH_LIBRARIES = (Path("aotmm/native/libaotmm_torch.so"), Path("aotmm/native/_fast.abi3.so"))


SBOM_NAME = "aotmm.cdx.json"


class WheelHook(BuildHookInterface[BuilderConfig]):
    """Adds what is built or lies outside the package to a wheel, and names the platform that it is for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fills in the wheel's extra files and its tag; an editable install needs neither."""
        if version == "editable":
            return
        root = Path(self.root)
        try:
            built, self._made = _built_files(root)
        except ArtifactError as error:
            self.app.abort(
                f"a wheel needs the built packs and the libraries for torch: {error}\n"
                "In a checkout, `make wheel` builds everything. A source distribution cannot be installed directly: "
                "install a wheel, or build one in the unpacked sources with `make wheel`."
            )
        self._folder = TemporaryDirectory()
        self._sbom = Path(self._folder.name, SBOM_NAME)
        self._sbom.write_bytes(_json(_sbom(root, built, self._made, self.metadata.core.dependencies)))
        templates = [path.relative_to(root) for path in sorted(root.glob("templates/*.jinja"))]
        build_data["force_include"] |= {str(root / path): _place(path) for path in [*templates, *built]}
        build_data["sbom_files"].append(str(self._sbom))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Writes SBOM and provenance beside the wheel."""
        if version == "editable":
            return
        wheel = Path(artifact_path)
        wheel.with_name(f"{wheel.name}.cdx.json").write_bytes(self._sbom.read_bytes())
        wheel.with_name(f"{wheel.name}.provenance.json").write_bytes(_json(_provenance(wheel, self._made)))
        self._folder.cleanup()


def _place(path: Path) -> str:
    """Where a file of the checkout goes in the wheel (`aotmm.folders` looks there)."""
    return str(path if path.parts[0] == "aotmm" else "aotmm" / path)


def _json(body: object) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1) + "\n").encode()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tools(made: dict[str, Provenance]) -> list[str]:
    """What made the wheel and its packs, each with its version."""
    names = {f"triton {row.triton}" for row in made.values()} | {row.c_compiler for row in made.values()}
    names |= {row.assembler for row in made.values()}
    return sorted([*names, f"hatchling {importlib.metadata.version('hatchling')}"])


def _sbom(root: Path, built: list[Path], made: dict[str, Provenance], required: list[str]) -> dict[str, object]:
    """What the wheel holds and needs, and what that was made with, as CycloneDX; equal for equal wheels.

    Of a pack its manifest and its library are listed: the manifest has the digests of all other files.
    """
    parts = [path for path in built if path.suffix == ".so" or path.name == manifest.FILE_NAME]
    files = [
        {
            "type": "file",
            "bom-ref": _place(path),
            "name": _place(path),
            "hashes": [{"alg": "SHA-256", "content": _sha256(root / path)}],
        }
        for path in parts
    ]
    names = {re.split(r"[^\w.-]", line)[0]: line for line in sorted(required)}
    libraries = [
        {"type": "library", "bom-ref": name, "name": name, "purl": f"pkg:pypi/{name}", "description": f"needed: {line}"}
        for name, line in names.items()
    ]
    tools = [{"type": "application", "bom-ref": f"tool {name}", "name": name} for name in _tools(made)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": "aotmm",
                "name": "aotmm",
                "version": __version__,
                "purl": f"pkg:pypi/aotmm@{__version__}",
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": files + libraries,
        "dependencies": [{"ref": "aotmm", "dependsOn": [_place(path) for path in parts] + list(names)}],
        "formulation": [{"components": tools}],
    }


def _provenance(wheel: Path, made: dict[str, Provenance]) -> dict[str, object]:
    """What the wheel was made from and by, as an in-toto statement of SLSA provenance, without a time or a host."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": wheel.name, "digest": {"sha256": _sha256(wheel)}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:aotmm:make-wheel:1",
                "externalParameters": {arch: {"config_set": row.config_set} for arch, row in made.items()},
                "internalParameters": {arch: dataclasses.asdict(row) for arch, row in made.items()},
                "resolvedDependencies": [{"name": name} for name in _tools(made)]
                + [
                    {"name": f"kernel sources of {arch}", "digest": {"sha256": row.kernel_sources}}
                    for arch, row in made.items()
                ],
            },
            "runDetails": {"builder": {"id": "urn:aotmm:hatch_build"}},
        },
    }


def _built_files(root: Path) -> tuple[list[Path], dict[str, Provenance]]:
    """Every built file that a wheel ships, relative to `root`, each checked, and what made each pack, by its arch.

    Raises:
        ArtifactError: a pack or a library for torch is missing, altered, or for other machines than the tag says.
    """
    for path in TORCH_LIBRARIES:
        if not (root / path).is_file():
            raise ArtifactError(f"{path} is missing")
    folders = [path for path in sorted((root / "artifacts").glob("[!.]*")) if path.is_dir()]
    if not folders:
        raise ArtifactError("there is no pack in artifacts/")
    libraries, found = {path: (root / path).read_bytes() for path in TORCH_LIBRARIES}, [*TORCH_LIBRARIES]
    made = {}
    for pack in map(open_pack, folders):
        made[pack.arch] = pack.head.provenance
        folder = pack.folder.relative_to(root)
        contents = {folder / file.path: read_verified(pack.folder, file) for file in manifest.files(pack.manifest)}
        libraries |= {path: data for path, data in contents.items() if path.suffix == ".so"}
        found += [folder / manifest.FILE_NAME, *contents]
    for path, data in libraries.items():
        needed = max((tuple(map(int, pair)) for pair in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)), default=(0, 0))
        if needed > GLIBC:
            raise ArtifactError(
                f"{path} needs glibc {needed[0]}.{needed[1]}, the wheel's tag promises {GLIBC[0]}.{GLIBC[1]}; "
                "unset CC and build again"
            )
    return found, made
