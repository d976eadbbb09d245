"""`aotmm build`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from aotmm.cli import report
from aotmm.cli.options import dtypes_option, jobs_option, json_option, refuse_ignored, scheduler_option
from aotmm.cli.output import kernels_done, needs_build_extra, print_json, processes
from aotmm.pack.files import data_folder, in_checkout
from aotmm.target import HOSTS, TARGETS, host, targets

if TYPE_CHECKING:
    from aotmm.build import Report


@click.command()
@click.option(
    "--arch", "archs", multiple=True, metavar="ARCH", help=f"Build for it; repeatable: {', '.join(TARGETS)}, or all."
)
@click.option(
    "--configs",
    default="default",
    show_default=True,
    metavar="SET|FILE",
    help="Config set: tutorial, classic, default, or a TOML file.",
)
@dtypes_option
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="FILE.py:NAME",
    help="Build this Triton kernel of your own instead of products, for what FILE.toml says; repeatable.",
)
@click.option("--describe", is_flag=True, help="Print a TOML to start from for each --kernel, and build nothing.")
@click.option(
    "--host",
    "machine",
    default="",
    metavar="HOST",
    show_default="this machine's",
    help=f"Processor of the machines that load the packs: {', '.join(HOSTS)}.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=lambda: data_folder("artifacts") if in_checkout() else None,
    show_default="artifacts/ of a checkout; an installation's own packs are not overwritten unasked",
    help="Folder to write DIR/<arch>/ to; replaces packs that are there.",
)
@jobs_option
@scheduler_option
@click.option(
    "--cache",
    "location",
    metavar="DIR|URL",
    help="Cache of compiled kernels, which machines may share; a URL needs the cache extra.  "
    "[default: .cache in --out]",
)
@click.option(
    "--cache-size",
    metavar="SIZE",
    default="20G",
    show_default=True,
    help="Limit of the cache, as 500M or 20G; the least recently used kernels are dropped.",
)
@json_option
def build(
    *,
    archs: tuple[str, ...],
    configs: str,
    dtypes: tuple[str, ...],
    kernels: tuple[str, ...],
    describe: bool,
    machine: str,
    out: Path | None,
    jobs: int,
    scheduler: str | None,
    location: str | None,
    cache_size: str,
    as_json: bool,
) -> None:
    """Compile kernels and write one pack per arch. Needs no GPU.

    Kernels that an earlier build compiled are reused, and a pack that is up to date is left alone.
    """
    refuse_ignored(("with --kernel", bool(kernels), ("configs", "dtypes")))
    if describe:
        _describe(kernels, archs)
        return
    if not archs:
        raise click.UsageError(f"say at least one --arch; known: {', '.join(TARGETS)}, or all")
    if kernels and click.get_current_context().get_parameter_source("out") is ParameterSource.DEFAULT:
        raise click.UsageError("say --out with --kernel: a folder for packs of your own")
    if host(machine) != host() and click.get_current_context().get_parameter_source("out") is ParameterSource.DEFAULT:
        raise click.UsageError(f"say --out: the packs of a checkout are for {host()}, not for {host(machine)}")
    if out is None:
        raise click.UsageError("say --out: the packs that this installation brought are not overwritten unasked")
    refuse_ignored(
        ("with --scheduler, whose workers say how many processes they run", scheduler is not None, ("jobs",))
    )
    with needs_build_extra():
        from aotmm import build as builder
        from aotmm.build.cache import Cache
    cache = Cache(out / ".cache" if location is None else location, _bytes(cache_size))
    try:
        with kernels_done(processes(jobs) if scheduler is None else f"on {scheduler}") as progress:
            reports = builder.build(
                archs,
                out,
                configs=configs,
                dtypes=dtypes,
                kernels=kernels,
                machine=machine,
                jobs=jobs,
                scheduler=scheduler,
                cache=cache,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"packs in {out} that were not finished are as they were; kernels that did compile are kept"
        ) from None
    if as_json:
        print_json([_report_to(row) for row in reports])
    else:
        click.echo(report.build_text(reports))


def _describe(kernels: tuple[str, ...], archs: tuple[str, ...]) -> None:
    """Print a TOML to start from for each of `kernels`, as their files are for the first of `archs`."""
    if not kernels:
        raise click.UsageError("--describe is for --kernel FILE.py:NAME")
    with needs_build_extra():
        from aotmm.build.compile import toolchain
        from aotmm.build.own.describe import describe
    toolchain()  # says so if there is no Triton
    (row, *_) = targets(archs or ("sm80",))
    click.echo("\n".join(describe(words, row) for words in kernels), nl=False)


def _bytes(text: str) -> int:
    """Return the size in `text` ("500M", "20G") in bytes."""
    units = {"M": 1 << 20, "G": 1 << 30}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal():
        raise click.UsageError(f"--cache-size {text!r} is no size like 500M or 20G")
    return int(number) * units[unit]


def _report_to(row: Report) -> dict[str, object]:
    dropped = [{"kernel": name, "reason": reason} for name, reason in row.dropped]
    return asdict(row) | {"folder": str(row.folder), "dropped": dropped}
