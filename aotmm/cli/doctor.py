"""`aotmm doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from aotmm.cli import report
from aotmm.cli.options import json_option, pack_option
from aotmm.cli.output import print_json


@click.command()
@pack_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, folder: Path | None, as_json: bool) -> None:
    """Check torch, driver, packs and GPUs.

    For each GPU it prints the pack that it would use and how, or the command that builds a missing one. The exit code
    is 0 unless a pack is missing or broken, or a driver fails; a machine without a GPU is fine.
    """
    from aotmm.runtime.diagnosis import diagnose

    found = diagnose(folder)
    if as_json:
        print_json(asdict(found))
    else:
        click.echo(report.doctor_text(found))
    ctx.exit(found.exit_code)
