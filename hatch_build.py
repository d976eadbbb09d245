"""Decides what a wheel holds beside the package: templates, packs and what serves torch. Refuses one without them."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from aotmm import manifest
from aotmm.errors import ArtifactError
from aotmm.runtime.pack import open_pack, read_verified

GLIBC = (2, 17)  # what the tag promises and `aotmm.build.link` links for
TORCH_LIBRARIES = (Path("aotmm/native/libaotmm_torch.so"), Path("aotmm/native/_fast.abi3.so"))


class WheelHook(BuildHookInterface[BuilderConfig]):
    """Adds what is built or lies outside the package to a wheel, and names the platform that it is for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fills in the wheel's extra files and its tag; an editable install needs neither."""
        if version == "editable":
            return
        root = Path(self.root)
        try:
            built = _built_files(root)
        except ArtifactError as error:
            self.app.abort(
                f"a wheel needs the built packs and the libraries for torch: {error}\n"
                "In a checkout, `make wheel` builds everything. A source distribution cannot be installed directly: "
                "install a wheel, or build one in the unpacked sources with `make wheel`."
            )
        templates = [path.relative_to(root) for path in sorted(root.glob("templates/*.jinja"))]
        build_data["force_include"] |= {str(root / path): _place(path) for path in [*templates, *built]}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"


def _place(path: Path) -> str:
    """Where a file of the checkout goes in the wheel (`aotmm.folders` looks there)."""
    return str(path if path.parts[0] == "aotmm" else "aotmm" / path)


def _built_files(root: Path) -> list[Path]:
    """Every built file that a wheel ships, relative to `root`, each checked.

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
    for pack in map(open_pack, folders):
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
    return found
