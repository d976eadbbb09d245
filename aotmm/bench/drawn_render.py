"""Files for people of random problems: CSV, a plot, markdown and one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from aotmm.bench.drawn_summary import Section, drawn_goals, merged_facts, sections
from aotmm.bench.render import needs_plots, page, write_csv, write_page
from aotmm.bench.results import Results
from aotmm.bench.summary import CSV_HEADER, csv_rows, failures


def render_drawn(runs: Sequence[Results], folder: Path) -> list[Path]:
    """Write results.csv, the plot, report.md and report.html of all runs to `folder`; return their paths.

    Raises:
        SpecError: as `drawn_summary.lines`; or matplotlib or jinja2 is not installed, and results.csv and report.md are
            written all the same.
    """
    tables = sections(runs)
    folder.mkdir(parents=True, exist_ok=True)
    rows = ((run.facts["seed"], *row) for run in runs for row in csv_rows(run))
    written = [write_csv(folder, ("seed", *CSV_HEADER), rows), folder / "report.md"]
    written[1].write_text("\n".join(markdown(tables)) + "\n", encoding="utf-8")
    with needs_plots(folder):
        from aotmm.bench import plots

        drawn = plots.draw_figures(runs, drawn_goals(runs[0].facts))
        text = page(
            "drawn.html.jinja",
            drawn,
            facts=merged_facts(runs),
            sections=tables,
            wrong=[text for run in runs for text in failures(run)],
        )
    return [*written, *write_page(folder, drawn, text)]


def markdown(tables: Sequence[Section]) -> Iterator[str]:
    """Yield the lines of a document with these tables."""
    for title, text, header, rows in tables:
        yield from (f"## {title}", "", *[text, ""] * bool(text), _row(header), _row(["---"] * len(header)))
        yield from map(_row, rows)
        yield ""


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell.replace('|', chr(92) + '|')} |" for cell in cells)
