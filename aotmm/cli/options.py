"""Options that several commands share, and the refusal of arguments without effect."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from aotmm.errors import ArtifactError
from aotmm.pack.files import build_command
from aotmm.problem import INPUTS
from aotmm.target import target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aotmm.runtime.pack import Pack

FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)

pack_option = click.option(
    "--pack",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    show_default="the packs that aotmm.load() finds",
    default=None,
    help="Folder of one pack or of packs.",
)
dtypes_option = click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help=f"Input type instead of the set's own; repeatable: {', '.join(INPUTS)}.",
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="all processors",
    help="Compiler processes.",
)
scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Use the Dask cluster of this scheduler, such as tcp://host:8786; needs the cluster extra.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def refuse_ignored(*rules: tuple[str, bool, tuple[str, ...]]) -> None:
    """Refuse parameters of the command that were given and would be ignored.

    Each rule has a condition in words, its value, and the names of the parameters that then have no effect.
    """
    context = click.get_current_context()
    for words, holds, names in rules:
        given = [
            parameter.opts[0] if isinstance(parameter, click.Option) else parameter.opts[0].upper()
            for parameter in context.command.params
            if parameter.name in names
            and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
            and context.params[parameter.name] != ()  # click counts an empty list of arguments as given
        ]
        if holds and given:
            raise click.UsageError(f"{', '.join(given)}: no effect {words}")


def packs_of(packs: Sequence[Pack], arch: str, folder: Path | None) -> list[Pack]:
    """Return the packs of `arch`. Raises SpecError for an unknown arch, ArtifactError if there is none."""
    target(arch)
    found = [pack for pack in packs if pack.arch == arch]
    if not found:
        has = ", ".join(pack.arch for pack in packs)
        raise ArtifactError(
            f"no pack for {arch} in {folder or 'the installation'}, which has {has}; "
            f"build it: {build_command(arch, folder)}"
        )
    return found
