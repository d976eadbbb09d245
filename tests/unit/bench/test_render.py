"""Everything that people read is made of results.json alone, anywhere, and loads nothing."""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aotmm.bench import results
from aotmm.bench.drawn_render import render_drawn
from aotmm.bench.render import render
from aotmm.errors import SpecError
from tests.unit.bench.samples import drawn_sample, sample

PNG = b"\x89PNG\r\n\x1a\n"


def test_all_files(tmp_path: Path) -> None:
    """CSV, three plots and the report, from results that were written and read again."""
    results.write(sample(), tmp_path)
    found = results.read(tmp_path)
    written = render(found, tmp_path)
    assert [path.name for path in written] == [
        "results.csv", "squares.png", "ratio.png", "roofline.png", "report.html",
    ]  # fmt: skip
    for path in written[1:4]:
        assert path.read_bytes().startswith(PNG)
    with written[0].open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(row.times) + len(row.not_run) for row in found.rows)
    assert render(found, tmp_path) == written, "and once more over them"


def test_tables_of_the_report_are_even(tmp_path: Path) -> None:
    """Every row of a table has as many columns as its first."""
    page = (render(sample(), tmp_path)[-1]).read_text()
    for body in re.findall(r"<table>(.*?)</table>", page, re.DOTALL):
        rows = [re.findall(r"<t[hd]([^>]*)>", row) for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL)]
        spans = [sum(int((re.findall(r'colspan="(\d+)"', cell) or [1])[0]) for cell in row) for row in rows]
        assert len(set(spans)) == 1, spans


def test_the_report_loads_nothing(tmp_path: Path) -> None:
    """No address in it, all images inside, every shape listed, text from kernels escaped."""
    page = (render(sample(), tmp_path)[-1]).read_text()
    assert not re.search(r"https?://|//[a-z]", re.sub(r"base64,[^\"]*", "", page))
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
    parser.feed(page)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags}
    images = [str(attributes["src"]) for tag, attributes in tags if tag == "img"]
    assert len(images) == 3
    assert all(source.startswith("data:image/png;base64,") for source in images)
    for row in sample().rows:
        assert str(row.case) in page
    assert "tile &lt;&amp;&gt; co" in page
    assert 'class="missed"' in page
    assert "first result, torch.matmul" in page


def test_a_part_of_a_run(tmp_path: Path) -> None:
    """Results with further measurements only, or with one sweep, have a report too, without the plots they lack."""
    found = sample()
    found.rows = []
    assert [path.name for path in render(found, tmp_path)] == ["results.csv", "report.html"]
    found = sample()
    found.rows = found.of("squares256", "fp16")
    assert [path.name for path in render(found, tmp_path)] == ["results.csv", "squares.png", "ratio.png", "report.html"]


def test_random_problems(tmp_path: Path) -> None:
    """CSV with seeds, tables in markdown, a plot, and a page that loads nothing."""
    runs = [drawn_sample(1), drawn_sample(2)]
    written = render_drawn(runs, tmp_path)
    assert [path.name for path in written] == ["results.csv", "report.md", "figures.png", "report.html"]
    with written[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["seed"] for row in rows} == {"1", "2"}
    assert len(rows) == sum(len(row.times) + len(row.not_run) for run in runs for row in run.rows)
    document = written[1].read_text()
    assert document.startswith("## Random problems against torch, seeds 1, 2\n\n")
    assert "| all of these classes | 2 seeds | 94 | " in document
    assert r"failed: <no> \| way" in document
    tables = [line for line in document.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {13, 8, 5}
    assert written[2].read_bytes().startswith(PNG)
    page = written[3].read_text()
    assert not re.search(r"https?://|//[a-z]|<script", re.sub(r"base64,[^\"]*", "", page))
    assert "failed: &lt;no&gt; | way" in page
    assert "<tr><th>seed</th><td>1; 2</td></tr>" in page
    assert page.count('class="met"') + page.count('class="missed"') == 27 * 3


def test_random_problems_without_a_baseline(tmp_path: Path) -> None:
    """There is no ratio to plot; tables and page are there."""
    run = drawn_sample(1)
    run.rows = [replace(row, times={"aotmm": row.times["aotmm"]}, not_run={}) for row in run.rows]
    assert [path.name for path in render_drawn([run], tmp_path)] == ["results.csv", "report.md", "report.html"]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CSV is written all the same, and the error says how to get the rest elsewhere."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "aotmm.bench.plots", raising=False)
    with pytest.raises(SpecError, match=r"need matplotlib.*aotmm bench --render"):
        render(sample(), tmp_path)
    assert (tmp_path / "results.csv").is_file()
