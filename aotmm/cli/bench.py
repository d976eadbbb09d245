"""`aotmm bench`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotmm.cli import report
from aotmm.cli.options import FILE, FOLDER, json_option, refuse_ignored
from aotmm.cli.output import needs_build_extra, needs_torch, print_json
from aotmm.errors import WrongResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aotmm.bench.results import Results


@click.command()
@click.argument("what", nargs=-1, metavar="[WHAT]...")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    show_default="bench-results; random, invariant, grouped, blocks and ampere: a folder in it, named by the seed",
    help="Folder for results.json, tables and plots; a run that it has results of is continued.",
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(("fp16", "bf16", "fp8e4")), help="Only this type.")
@click.option("--provider", "providers", multiple=True, metavar="NAME", help="Only this provider; repeatable.")
@click.option("--every", type=click.IntRange(min=1), default=1, metavar="N", help="One shape in N of each sweep.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    show_default="a new one",
    help="Seed of the random problems; the same one draws the same problems.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="what takes 5 minutes",
    help="Random problems of the classes in the overall figure; the others have their shares beside them.",
)
@click.option(
    "--classes",
    multiple=True,
    metavar="NAME",
    help="Only this class of random problems; repeatable, or with commas.",
)
@click.option("--regret", is_flag=True, help="For random: time all plans, and the chosen one against the best.")
@click.option("--table", metavar="FILE", type=FILE, help="For --regret: choose by this table of aotmm tune.")
@click.option("--overhead", is_flag=True, help="Measure only the cost of calls, as WHAT overhead does.")
@click.option("--ablation", is_flag=True, help="Measure grouped against row-major order of tiles instead.")
@click.option(
    "--render",
    "rendered",
    multiple=True,
    metavar="DIR",
    type=FOLDER,
    help="Make tables, plots and report of DIR/results.json again, without measuring; of several seeds, in --out.",
)
@json_option
def bench(
    *,
    what: tuple[str, ...],
    out: Path | None,
    dtypes: tuple[str, ...],
    providers: tuple[str, ...],
    every: int,
    seed: int | None,
    count: int | None,
    classes: tuple[str, ...],
    regret: bool,
    table: Path | None,
    overhead: bool,
    ablation: bool,
    rendered: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measure this GPU and other libraries on it.

    WHAT is one of: squares256, squares128, llm, tall_skinny, big_k, ragged, unaligned, fp8, epilogue (shapes, in
    aotmm/timing/shapes.json), first_result, overhead, epilogue_cost, scaling (1, 2 and 4 GPUs). By default all of
    these. Three are not among them: models runs whole models in the override, and needs the models extra; expert_layers
    runs layers of Mixtral and Qwen3 MoE by a checkout's examples/experts.py, against transformers' grouped_mm, and
    needs that extra, too; own measures launches of the functions in examples/own against the driver and Triton's JIT.
    random, alone, measures problems that are drawn now, of the classes in aotmm/timing/distribution.json.
    invariant, alone, measures the price of batch_invariant on layers that are drawn now.
    grouped, alone, measures grouped products of expert layers that are drawn now, of the models in
    aotmm/timing/experts.json, against torch's grouped_mm, and the choice of their kernels.
    blocks, alone, measures fp8 products with block scales that are drawn now, of DeepSeek-V3's layers and the expert
    layers above, against torch, DeepGEMM where it is installed, and our own fp8 without block scales.
    ampere, alone, measures the pack for sm80 on a newer GPU, through its PTX, against CUTLASS' kernels for Ampere.
    build_scaling, alone, measures builds with a simulated compiler. It needs no GPU, but the build and cluster extras.
    Providers: aotmm, aotmm_plain, torch, scaled_mm, int_mm, unfused, addmm, tutorial, cutlass. Every product is checked
    before it is timed.
    """
    of_sweeps, of_random = ("dtypes", "every"), ("seed", "count", "classes", "regret", "table")
    of_products = (*of_sweeps, "providers", *of_random)
    drawn, builds = what == ("random",), what == ("build_scaling",)
    seeded = drawn or what in (("invariant",), ("grouped",), ("blocks",), ("ampere",))
    refuse_ignored(
        ("with --render", bool(rendered), ("what", *of_products, "overhead", "ablation")),
        ("with --render", len(rendered) == 1, ("out",)),
        ("with --ablation", ablation, ("what", *of_products, "overhead")),
        ("with --overhead", overhead, ("what", *of_products)),
        ("on build_scaling", builds, ("out", *of_products)),
        ("on random", drawn, of_sweeps),
        (f"on {', '.join(what)}", seeded and not drawn, (*of_sweeps, "providers", "classes", "regret", "table")),
        ("on anything but random", not seeded, of_random),
        ("with --regret", regret, ("providers",)),
        ("without --regret", not regret, ("table",)),
    )
    if builds:
        _bench_builds(as_json=as_json)
        return
    with needs_torch("aotmm bench"):
        from aotmm.bench import results, summary
        from aotmm.bench.ampere import run_ampere
        from aotmm.bench.blocks import run_blocks
        from aotmm.bench.cases import COMPARISONS
        from aotmm.bench.drawn import run_drawn
        from aotmm.bench.grouped import run_grouped
        from aotmm.bench.invariant import run_invariant
        from aotmm.bench.regret import run_regret
        from aotmm.bench.run import run, run_ablation
    alone: dict[str, Callable[..., Results]] = {
        "invariant": run_invariant,
        "grouped": run_grouped,
        "blocks": run_blocks,
        "ampere": run_ampere,
    }
    unswept = bool(what) and not seeded and COMPARISONS.keys().isdisjoint(what)
    refuse_ignored((f"on {', '.join(what)}", unswept, (*of_sweeps, "providers")))

    def progress(row: results.Row | str) -> None:
        click.echo(row if isinstance(row, str) else summary.row_text(row), err=True)

    folder = rendered[0] if len(rendered) == 1 else out or Path("bench-results")
    if rendered:
        runs = [results.read(each) for each in rendered]
    elif seeded:
        seed = secrets.randbits(32) if seed is None else seed
        click.echo(f"seed {seed}", err=True)
        folder = out or folder / f"{'regret' if regret else what[0]}-{seed}"
        names = [name for words in classes for name in words.split(",")]
        if not drawn:
            runs = [alone[what[0]](seed, folder, progress, count=count)]
        elif regret:
            runs = [run_regret(seed, folder, progress, count=count, classes=names, table=table)]
        else:
            runs = [run_drawn(seed, folder, progress, count=count, classes=names, providers=providers)]
    elif ablation:
        runs = [run_ablation(folder)]
    else:
        wanted = ("overhead",) if overhead else what
        runs = [run(wanted, folder, progress, dtypes=dtypes, providers=providers, every=every)]
    _show(runs, folder, as_json=as_json)


def _show(runs: Sequence[Results], folder: Path, *, as_json: bool) -> None:
    """Print the results and write their files to `folder`. Raises WrongResultError if a product of ours is wrong."""
    from aotmm.bench import drawn_summary, results, summary
    from aotmm.bench.drawn_render import render_drawn
    from aotmm.bench.render import render

    drawn = drawn_summary.are_drawn(runs)
    if as_json:
        print_json(drawn_summary.to_json(runs) if drawn else results.to_json(runs[0]))
    elif drawn:
        for title, text, header, rows in drawn_summary.sections(runs):
            click.echo(f"{title}\n{text + chr(10) * bool(text)}{report.table(header, rows)}\n")
    else:
        _print_sweeps(runs[0])
    for path in render_drawn(runs, folder) if drawn else render(runs[0], folder):
        click.echo(f"wrote {path}", err=True)
    wrong = [text for found in runs for text in summary.failures(found)]
    if wrong:
        raise WrongResultError(f"aotmm did not compute, or not rightly: {'; '.join(wrong)}")


def _print_sweeps(found: Results) -> None:
    """Print the targets of the sweeps, and the further measurements."""
    from aotmm.bench import summary

    click.echo(report.table(summary.TARGET_HEADER, summary.target_table(found)))
    for name, text, status in [*summary.first_result(found), *summary.overhead(found)]:
        click.echo(f"{name}: {text} {status}")
    for name, values in found.other.items():
        click.echo(f"\n{report.table(*summary.other_table(name, values))}")


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
