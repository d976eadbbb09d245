"""The command line. Only this package and `__main__`, which starts it, print or exit.

Each command has a module; `report` has their tables. A command imports its dependencies when it runs.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import click

from aotmm import __version__
from aotmm.cli.bench import bench
from aotmm.cli.build import build
from aotmm.cli.doctor import doctor
from aotmm.cli.explain import explain
from aotmm.cli.packs import inspect, list_, verify
from aotmm.cli.tune import tune
from aotmm.errors import AotmmError

INTERRUPTED = 130  # the shells' code for SIGINT: 128 + 2


def _drop_refused_output() -> None:
    """Close stdout if it cannot write what it holds: Python would try again at exit, and set exit code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()


class _Commands(click.Group):
    """Group that turns the library's errors into text and exit codes."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run as any click group, but print failures of the machine (full disk, no memory) in one line."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.echo(f"error: the system refused: {error}", err=True)
            _drop_refused_output()
        except MemoryError:
            click.echo("error: out of memory", err=True)
        sys.exit(AotmmError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AotmmError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as stop:
            click.echo(f"interrupted: {stop}" if str(stop) else "interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aotmm")
def main() -> None:
    """Triton's matmul, compiled ahead of time."""


for _command in (build, list_, inspect, verify, explain, doctor, tune, bench):
    main.add_command(_command)
