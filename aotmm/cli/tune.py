"""`aotmm tune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from aotmm.cli.options import FILE, json_option, pack_option, packs_of, refuse_ignored, scheduler_option
from aotmm.cli.output import needs_torch, print_json, shapes_done
from aotmm.errors import AotmmError, SpecError
from aotmm.pack.files import in_checkout
from aotmm.pack.table import shipped, shipped_path
from aotmm.target import TARGETS


@click.command()
@click.option("--arch", required=True, metavar="ARCH", help=f"Pack whose kernels are timed: {', '.join(TARGETS)}.")
@click.option(
    "--shapes",
    "file",
    metavar="FILE",
    type=FILE,
    help="File of shapes to time, instead of aotmm/timing/shapes.json and random problems.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    metavar="N",
    show_default="that of the samples to continue from, or a new one",
    help="Seed of the random problems.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    metavar="N",
    help="Random problems to time, as of aotmm bench random, without a bias, and 0.16 times as many layers with block "
    "scales.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Type to measure, also for those that take the same time; repeatable.  [default: fp16, fp8e4, tf32, fp32]",
)
@click.option(
    "--budget",
    default="8m",
    show_default=True,
    metavar="TIME",
    help="Begin no shape after it: 90s, 8m, 1h. The same command again continues.",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Table to write.  [default: that of the GPU in this checkout]",
)
@click.option("--keep", is_flag=True, help="Add to the times of the table, instead of replacing them.")
@click.option("--refit", is_flag=True, help="Fit the models of the table again, without timing. Needs no GPU.")
@click.option(
    "--start",
    metavar="FILE",
    type=FILE,
    help="For --refit: begin with the models of this table. Tiles without times in the other keep these.",
)
@click.option(
    "--choose", is_flag=True, help="Compute the tiles of the default set from aotmm/tune/tiles. Needs no GPU."
)
@click.option(
    "--kernel",
    "functions",
    multiple=True,
    metavar="NAME",
    help="Time the variants of this function of your own instead of products; repeatable.",
)
@click.option(
    "--calls",
    metavar="FILE.py",
    type=FILE,
    help="For --kernel: the calls to time. A function NAME(launch) in it calls launch[grid](...) for each.",
)
@scheduler_option
@pack_option
@json_option
def tune(
    *,
    arch: str,
    file: Path | None,
    seed: int | None,
    count: int,
    dtypes: tuple[str, ...],
    budget: str,
    out: Path | None,
    keep: bool,
    refit: bool,
    start: Path | None,
    choose: bool,
    functions: tuple[str, ...],
    calls: Path | None,
    scheduler: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Time the prebuilt kernels on this machine's GPUs, or a cluster's.

    The problems are drawn at random; the shapes of aotmm/timing/shapes.json are timed beside them. The times, and
    models fitted to them, go to a table. aotmm build puts the checkout's table into its packs;
    aotmm.load(table=FILE) selects by any other. A kernel that hangs is killed, and a wrong one is not timed; both are
    named, and are an error in the end. A tenth of the random problems tests the selection.

    With --kernel and --calls the variants of functions of your own are timed (docs/own-kernels.md), on the current GPU.
    """
    measuring = ("file", "seed", "count", "keep", "budget", "scheduler")
    of_functions = ("functions", "calls")
    refuse_ignored(
        ("with --choose", choose, (*measuring, *of_functions, "dtypes", "out", "refit", "start", "folder")),
        ("with --refit", refit, (*measuring, *of_functions)),
        ("with --shapes", file is not None, ("seed", "count")),
        (
            "with --kernel",
            bool(functions),
            ("file", "seed", "count", "budget", "scheduler", "dtypes"),
        ),
        ("without --kernel", not functions, ("calls",)),
        ("without --refit", not refit, ("start",)),
    )
    if functions:
        _tune_functions(arch, functions, calls, out, folder, keep=keep, as_json=as_json)
        return
    if choose:
        _choose(arch, as_json=as_json)
        return
    if out is None:
        if not in_checkout():
            raise click.UsageError("say --out: the table that this installation brought is not overwritten unasked")
        if refit:
            known = ", ".join(str(shipped_path(arch, each.device)) for each in shipped(arch)) or "none"
            raise click.UsageError(f"say which table to fit again: --out FILE; those of {arch} here: {known}")
    from aotmm.runtime.installed import find_packs

    with needs_torch("aotmm tune"):
        from aotmm.timing import problems
        from aotmm.tune import session, summary
    seconds = _seconds(budget)
    packs = find_packs(folder)
    pack = packs_of(packs, arch, folder)[0]
    measured = None
    if refit and out is not None:
        quality = session.refit(pack, out, dtypes, start)
    else:
        shapes = problems.read() if file is None else problems.read(file)
        with shapes_done(arch, budget) as progress:
            measured, quality, out = session.tune(
                pack,
                packs,
                shapes,
                out,
                dtypes=dtypes,
                seed=seed,
                count=count if file is None else 0,
                keep=keep,
                budget_s=seconds,
                scheduler=scheduler,
                progress=progress,
            )
    if as_json:
        print_json(summary.body(measured, quality) | {"table": str(out)})
    else:
        for line in summary.text(measured, quality):
            click.echo(line)
        click.echo(f"wrote {out}")
    if measured is not None and measured.left_out:
        raise AotmmError(f"{len(measured.left_out)} left out: {', '.join(measured.left_out)}; the others are in {out}")


def _tune_functions(
    arch: str,
    names: tuple[str, ...],
    calls: Path | None,
    out: Path | None,
    folder: Path | None,
    *,
    keep: bool,
    as_json: bool,
) -> None:
    """Write a table of functions, and print the fastest variant of each call."""
    if calls is None or out is None:
        raise click.UsageError("say --calls and --out with --kernel")
    import aotmm
    from aotmm.pack import function_table

    with needs_torch("aotmm tune"):
        from aotmm.tune import functions
    lib = aotmm.load(folder)
    packs = [pack for pack in packs_of(lib.packs, arch, folder) if set(names) <= set(pack.head.functions)]
    if not packs:
        raise SpecError(f"no pack for {arch} in {folder or 'the installation'} has {', '.join(names)}")
    table, left = functions.tune(lib, packs[0], names, calls)
    if keep and out.exists():
        before = function_table.read(out)
        table = replace(table, measured=function_table.joined(before.measured, table.measured))
    out.write_bytes(function_table.write(table))
    if as_json:
        print_json(asdict(table) | {"left_out": [row._asdict() for row in left], "table": str(out)})
    else:
        for row in table.measured:
            ns = {time.kernel: time.ns for time in row.times}
            both = ", ".join(f"{name} {ns[name] / 1e3:.2f} us" for name in dict.fromkeys((row.chosen, row.first)))
            click.echo(f"{row.function} at {list(row.sizes)}: {both}")
        click.echo(f"wrote {out}")
    if left:
        raise AotmmError("\n".join([f"{len(left)} left out", *(f"{row.kernel}: {row.reason}" for row in left)]))


def _choose(arch: str, *, as_json: bool) -> None:
    """Write the computed part of the default set, and print the losses of the whole set by class of problems."""
    if not in_checkout():
        raise click.UsageError("--choose writes the default set of a checkout, and this is an installation")
    with needs_torch("aotmm tune"):
        from aotmm.tune import default_set
    chosen = default_set.choose(arch)
    default_set.write(chosen)
    if as_json:
        print_json({"pairs": chosen.pairs, "images": chosen.images, "losses": [row._asdict() for row in chosen.losses]})
        return
    click.echo(f"{chosen.pairs} pairs of a tile and a layout, {chosen.images} images; loss against all candidates:")
    for row in chosen.losses:
        figures = f"mean {row.mean:.4f}, 95 % {row.quantile:.3f}, worst {row.worst:.3f}"
        click.echo(f"  {row.name:10}  {row.problems:5} problems  {figures}")
    click.echo(f"wrote {default_set.FILE}")


def _seconds(text: str) -> float:
    """Return the time in `text` ("90s", "8m", "1h") in seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal():
        raise click.UsageError(f"--budget {text!r} is no time like 90s, 8m or 1h")
    return float(number) * units[unit]
