"""Files for people, made only of the results: CSV, plots, and one HTML page that loads nothing."""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping
from pathlib import Path

from aotmm.bench.providers import NAMES, provider
from aotmm.bench.results import Results
from aotmm.bench.summary import (
    CSV_HEADER,
    TARGET_HEADER,
    csv_rows,
    failures,
    figure,
    first_result,
    other_table,
    overhead,
    target_table,
)
from aotmm.errors import SpecError

_TEMPLATE = Path(__file__).parent / "report.html.jinja"


def render(results: Results, folder: Path) -> list[Path]:
    """Write results.csv, the plots and report.html to `folder`; return their paths.

    Raises:
        SpecError: matplotlib or jinja2 is not installed; results.csv is written all the same.
    """
    table = folder / "results.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_HEADER)
        writer.writerows(csv_rows(results))
    try:
        from aotmm.bench import plots

        drawn = plots.draw(results)
        page = html(results, drawn)
    except ModuleNotFoundError as error:
        raise SpecError(
            f"plots and report need {error.name}: pip install matplotlib jinja2, then aotmm bench --render {folder}, "
            "here or where you copy it"
        ) from error
    written = [table]
    for name, png in drawn.items():
        (folder / name).write_bytes(png)
        written.append(folder / name)
    (folder / "report.html").write_text(page, encoding="utf-8")
    return [*written, folder / "report.html"]


def html(results: Results, plots: Mapping[str, bytes]) -> str:
    """Return the report, with the plots in it."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        facts=results.facts,
        header=TARGET_HEADER,
        targets=target_table(results),
        first=[*first_result(results), *overhead(results)],
        wrong=failures(results),
        plots={name: base64.b64encode(png).decode() for name, png in plots.items()},
        rows=results.rows,
        names=[name for name in NAMES if any(name in row.times for row in results.rows)],
        about={name: provider(name).about for name in NAMES},
        other=[other_table(name, values) for name, values in results.other.items()],
        figure=figure,
    )
