"""The packs of the default library: those that other distributions add, and those of this installation.

A distribution adds packs by an entry point of the group "aotmm.packs" that names a package whose folder has a pack per
arch: docs/packs.md. The package is found, never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from aotmm.errors import ArtifactError
from aotmm.pack.files import data_folder
from aotmm.runtime.pack import open_packs

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from aotmm.runtime.pack import Pack

GROUP = "aotmm.packs"


def find_packs(path: Path | None) -> list[Pack]:
    """The packs in `path`; without one those of the default library, in the order in which they are asked for kernels.

    That is: those that other distributions add, by the names of these, then this installation's own.

    Raises:
        ArtifactError: there is none, or one is refused; the message names the distribution that brought it.
    """
    if path is not None:
        return open_packs(path)
    return [*(pack for entry in entries() for pack in added(entry)), *open_packs(own())]


def own() -> Path:
    """The folder of this installation's packs; it need not exist."""
    return data_folder("artifacts").resolve()


def entries() -> list[EntryPoint]:
    """What other distributions add, by their names."""
    found = importlib.metadata.entry_points(group=GROUP)
    return sorted(found, key=lambda entry: (owner(entry), entry.name))


def owner(entry: EntryPoint) -> str:
    """Name and version of the distribution that `entry` is of."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a distribution without metadata"


def added(entry: EntryPoint) -> list[Pack]:
    """The packs that `entry` adds. Raises ArtifactError, with the name of its distribution."""
    name = owner(entry)
    try:
        packs = open_packs(folder_of(entry))
    except (ArtifactError, OSError) as error:
        raise ArtifactError(
            f"{name} adds packs to aotmm (entry point {entry.name} = {entry.value}) that cannot be used: {error}; "
            f"or uninstall it: pip uninstall {name.partition(' ')[0]}"
        ) from error
    for pack in packs:
        pack.owner = name
    return packs


def folder_of(entry: EntryPoint) -> Path:
    """Where the package is that `entry` names, found without importing it or what it is in. Raises ArtifactError."""
    top, *rest = entry.value.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # sys.modules has a module of that name that nobody found, as __main__
        spec = None
    folders = [Path(root, *rest) for root in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if folder.is_dir():
            return folder.resolve()
    raise ArtifactError(f"there is no package {entry.value}{f' in {folders[0]}' if folders else ''}")
