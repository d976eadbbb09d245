"""Decides what a wheel holds: the package, templates, packs and what serves torch; or one pack alone, of `wheels.py`.

Refuses one without packs, or with a file that is altered or for other machines than its tag says.

Beside the wheel it writes what is in it (an SBOM, which the wheel holds too) and what it was made from (provenance).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import re
import struct
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from aotmm.errors import ArtifactError
from aotmm.pack import manifest
from aotmm.pack.manifest import Provenance
from aotmm.runtime.pack import open_pack, read_verified
from aotmm.target import HOSTS, host

GLIBC = (2, 17)  # what the tag guards and `aotmm.build.link` links for
TORCH_LIBRARIES = ("libaotmm_torch.so", "_direct_call.abi3.so")
ELF_MACHINE = 18  # where an ELF file says what it is for


class WheelHook(BuildHookInterface[BuilderConfig]):
    """Adds what is built or lies outside the package to a wheel, and names the platform that it is for.

    Its table, which `wheels.py` fills, may have `archs`, the packs to take (else all that are built), `host`, the
    processor that they are for (else this machine's), and `package`: a name makes a wheel of its pack and no more.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fills in the wheel's extra files and its tag; an editable install needs neither."""
        if version == "editable":
            return
        root, machine = Path(self.root), self.config.get("host", "")
        package = self.config.get("package", "")
        try:
            built, self._made = _built_files(root, self.config.get("archs", []), machine, package)
        except ArtifactError as error:
            self.app.abort(
                f"a wheel needs the built packs and the libraries for torch: {error}\n"
                "In a checkout, `make wheel` builds everything. A source distribution cannot be installed directly: "
                "install a wheel, or build one in the unpacked sources with `make wheel`."
            )
        self._folder = TemporaryDirectory()
        self._sbom = Path(self._folder.name, f"{self.metadata.name}.cdx.json")
        core = self.metadata.core
        self._sbom.write_bytes(_json(_sbom(core.name, self.metadata.version, built, self._made, core.dependencies)))
        if not package:
            built |= {path: f"aotmm/templates/{path.name}" for path in sorted(root.glob("templates/*.jinja"))}
        build_data["force_include"] |= {str(path): place for path, place in built.items()}
        build_data["sbom_files"].append(str(self._sbom))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine or platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Makes the wheel as small as deflate gets it, and writes SBOM and provenance beside it."""
        if version == "editable":
            return
        wheel = Path(artifact_path)
        _compress(wheel)
        wheel.with_name(f"{wheel.name}.cdx.json").write_bytes(self._sbom.read_bytes())
        wheel.with_name(f"{wheel.name}.provenance.json").write_bytes(_json(_provenance(wheel, self._made)))
        self._folder.cleanup()


def _json(body: object) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1) + "\n").encode()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tools(made: dict[str, Provenance]) -> list[str]:
    """What made the wheel and its packs, each with its version."""
    names = {f"triton {row.triton}" for row in made.values()} | {row.c_compiler for row in made.values()}
    names |= {row.assembler for row in made.values()}
    return sorted([*names, f"hatchling {importlib.metadata.version('hatchling')}"])


def _compress(wheel: Path) -> None:
    """Writes the files of a wheel again, by zlib's best level: hatchling takes the usual one, which is 3 % larger."""
    smaller = wheel.with_suffix(".smaller")
    with ZipFile(wheel) as given, ZipFile(smaller, "w") as written:
        for entry in given.infolist():
            written.writestr(entry, given.read(entry), ZIP_DEFLATED, 9)
    smaller.replace(wheel)


def _sbom(
    name: str, version: str, built: dict[Path, str], made: dict[str, Provenance], required: list[str]
) -> dict[str, object]:
    """What the wheel holds and needs, and what that was made with, as CycloneDX; equal for equal wheels.

    Of a pack its manifest and its library are listed: the manifest has the digests of all other files.
    """
    parts = {path: place for path, place in built.items() if path.suffix == ".so" or path.name == manifest.FILE_NAME}
    files = [
        {
            "type": "file",
            "bom-ref": place,
            "name": place,
            "hashes": [{"alg": "SHA-256", "content": _sha256(path)}],
        }
        for path, place in parts.items()
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
                "bom-ref": name,
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{quote(version)}",
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": files + libraries,
        "dependencies": [{"ref": name, "dependsOn": [*parts.values(), *names]}],
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


def _built_files(
    root: Path, archs: list[str], machine: str, package: str
) -> tuple[dict[Path, str], dict[str, Provenance]]:
    """Where in the wheel each built file goes that it ships, each checked, and what made each pack, by its arch.

    `aotmm.pack.files` looks for packs in aotmm/artifacts; a wheel of one pack has it in the folder `package`.

    Raises:
        ArtifactError: a pack or a library for torch is missing, altered, or for other machines than the tag says.
    """
    packs = root / "build" / machine if machine else root / "artifacts"
    native = root / "aotmm/native" if host(machine) == host() else packs
    placed = {} if package else {native / name: f"aotmm/native/{name}" for name in TORCH_LIBRARIES}
    for path in placed:
        if not path.is_file():
            raise ArtifactError(f"{path.relative_to(root)} is missing")
    folders = [packs / arch for arch in sorted(archs)] or [
        path for path in sorted(packs.glob("[!.]*")) if path.is_dir()
    ]
    if not folders:
        raise ArtifactError(f"there is no pack in {packs.relative_to(root)}/")
    libraries = {path: path.read_bytes() for path in placed}
    made = {}
    for pack in [open_pack(folder, machine) for folder in folders]:
        made[pack.arch] = pack.head.provenance
        contents = {file.path: read_verified(pack.folder, file) for file in manifest.files(pack.manifest)}
        libraries |= {pack.folder / name: data for name, data in contents.items() if name.endswith(".so")}
        place = package or f"aotmm/artifacts/{pack.arch}"
        placed |= {pack.folder / name: f"{place}/{name}" for name in [manifest.FILE_NAME, *contents]}
    for path, data in libraries.items():
        (found,) = struct.unpack_from("<H", data, ELF_MACHINE)
        if found != HOSTS.get(machine or platform.machine(), found):
            raise ArtifactError(f"{path.relative_to(root)} is for ELF machine {found}, not for {host(machine)}")
        needed = max((tuple(map(int, pair)) for pair in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)), default=(0, 0))
        if needed > GLIBC:
            raise ArtifactError(
                f"{path.relative_to(root)} needs glibc {needed[0]}.{needed[1]}, the wheel's tag guards "
                f"{GLIBC[0]}.{GLIBC[1]}; unset CC and build again"
            )
    return placed, made
