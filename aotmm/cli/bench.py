"""`aotmm bench`."""

from __future__ import annotations

from pathlib import Path

import click

from aotmm.cli import report
from aotmm.cli.options import FOLDER, json_option, refuse_ignored
from aotmm.cli.output import needs_build_extra, needs_torch, print_json
from aotmm.errors import WrongResultError


@click.command()
@click.argument("what", nargs=-1, metavar="[WHAT]...")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default="bench-results",
    show_default=True,
    help="Folder for results.json, tables and plots; a run that it has results of is continued.",
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(("fp16", "bf16", "fp8e4")), help="Only this type.")
@click.option("--provider", "providers", multiple=True, metavar="NAME", help="Only this provider; repeatable.")
@click.option("--every", type=click.IntRange(min=1), default=1, metavar="N", help="One shape in N of each sweep.")
@click.option("--overhead", is_flag=True, help="Measure only the cost of calls, as WHAT overhead does.")
@click.option("--ablation", is_flag=True, help="Measure grouped against row-major order of tiles instead.")
@click.option(
    "--render",
    "rendered",
    metavar="DIR",
    type=FOLDER,
    help="Make tables, plots and report of DIR/results.json again, without measuring.",
)
@json_option
def bench(
    *,
    what: tuple[str, ...],
    out: Path,
    dtypes: tuple[str, ...],
    providers: tuple[str, ...],
    every: int,
    overhead: bool,
    ablation: bool,
    rendered: Path | None,
    as_json: bool,
) -> None:
    """Measure this GPU and other libraries on it.

    WHAT is one of: squares256, squares128, llm, tall_skinny, big_k, ragged, unaligned, fp8, epilogue (shapes, in
    aotmm/timing/shapes.json), first_result, overhead, epilogue_cost, scaling (1, 2 and 4 GPUs); by default all.
    build_scaling, alone, measures builds with a simulated compiler. It needs no GPU, but the build and cluster extras.
    Providers: aotmm, aotmm_plain, torch, scaled_mm, unfused, addmm, tutorial, cutlass. Every product is checked before
    it is timed.
    """
    of_sweeps = ("dtypes", "providers", "every")
    builds = what == ("build_scaling",)
    refuse_ignored(
        ("with --render", rendered is not None, ("what", "out", *of_sweeps, "overhead", "ablation")),
        ("with --ablation", ablation, ("what", *of_sweeps, "overhead")),
        ("with --overhead", overhead, ("what", *of_sweeps)),
        ("on build_scaling", builds, ("out", *of_sweeps)),
    )
    if builds:
        _bench_builds(as_json=as_json)
        return
    with needs_torch("aotmm bench"):
        from aotmm.bench import results, summary
        from aotmm.bench.cases import COMPARISONS
        from aotmm.bench.render import render
        from aotmm.bench.run import run, run_ablation
    refuse_ignored((f"on {', '.join(what)}", bool(what) and COMPARISONS.keys().isdisjoint(what), of_sweeps))

    folder = rendered or out
    if rendered is not None:
        found = results.read(rendered)
    elif ablation:
        found = run_ablation(out)
    else:

        def progress(row: results.Row | str) -> None:
            click.echo(row if isinstance(row, str) else summary.row_text(row), err=True)

        wanted = ("overhead",) if overhead else what
        found = run(wanted, out, progress, dtypes=dtypes, providers=providers, every=every)
    if as_json:
        print_json(results.to_json(found))
    else:
        click.echo(report.table(summary.TARGET_HEADER, summary.target_table(found)))
        for name, text, status in [*summary.first_result(found), *summary.overhead(found)]:
            click.echo(f"{name}: {text} {status}")
        for name, values in found.other.items():
            click.echo(f"\n{report.table(*summary.other_table(name, values))}")
    for path in render(found, folder):
        click.echo(f"wrote {path}", err=True)
    wrong = summary.failures(found)
    if wrong:
        raise WrongResultError(f"aotmm did not compute, or not rightly: {'; '.join(wrong)}")


def _bench_builds(*, as_json: bool) -> None:
    """Print the cost of builds as the work grows."""
    with needs_build_extra():
        from aotmm.bench import build_scaling
    found = build_scaling.measure()
    if as_json:
        print_json(found)
        return
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    rows = [
        (name, *(f"{row[column]:.1f}" if column in row else "" for column in columns)) for name, row in found.items()
    ]
    click.echo(report.table(("build_scaling", *columns), rows))
