"""Files for people, made only of the results: CSV, plots, and one HTML page that loads nothing."""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

_FOLDER = Path(__file__).parent


def render(results: Results, folder: Path) -> list[Path]:
    """Write results.csv, the plots and report.html to `folder`; return their paths.

    Raises:
        SpecError: matplotlib or jinja2 is not installed; results.csv is written all the same.
    """
    written = [write_csv(folder, CSV_HEADER, csv_rows(results))]
    with needs_plots(folder):
        from aotmm.bench import plots

        drawn = plots.draw(results)
        text = page(
            "report.html.jinja",
            drawn,
            facts=results.facts,
            header=TARGET_HEADER,
            targets=target_table(results),
            first=[*first_result(results), *overhead(results)],
            wrong=failures(results),
            rows=results.rows,
            names=[name for name in NAMES if any(name in row.times for row in results.rows)],
            about={name: provider(name).about for name in NAMES},
            other=[other_table(name, values) for name, values in results.other.items()],
            figure=figure,
        )
    return [*written, *write_page(folder, drawn, text)]


def write_csv(folder: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write `folder`/results.csv and return its path."""
    path = folder / "results.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path


@contextmanager
def needs_plots(folder: Path) -> Iterator[None]:
    """Turn a failed import in the block into a SpecError that says how the files of `folder` are made elsewhere."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SpecError(
            f"plots and report need {error.name}: pip install matplotlib jinja2, then aotmm bench --render {folder}, "
            "here or where you copy it"
        ) from error


def page(template: str, plots: Mapping[str, bytes], **values: Any) -> str:
    """Return the report that a template of this folder makes of `values`, with the plots in it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    encoded = {name: base64.b64encode(png).decode() for name, png in plots.items()}
    return environment.get_template(template).render(plots=encoded, **values)


def write_page(folder: Path, plots: Mapping[str, bytes], text: str) -> list[Path]:
    """Write the plots and `folder`/report.html; return their paths."""
    for name, png in plots.items():
        (folder / name).write_bytes(png)
    (folder / "report.html").write_text(text, encoding="utf-8")
    return [*(folder / name for name in plots), folder / "report.html"]
