"""The figures: medians, quantiles, ratios over rounds; and the file that they are computed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotmm.bench.results import Row, Times, read, spread, to_json, write
from aotmm.errors import SpecError
from aotmm.timing.problems import Case, Shape
from tests.unit.bench.samples import sample


def _times(graph_us: tuple[float, ...], isolated_us: tuple[float, ...] = ()) -> Times:
    return Times(graph_us, isolated_us, launches=3, error=0.5)


def test_spread() -> None:
    """Median with the quantiles at 20 and 80 %, interpolated between samples."""
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == (3.5, 2.0, 5.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


def test_ratios_are_of_the_same_round() -> None:
    """The ratio is the median over rounds, so that a clock that drifts through the run does not count."""
    row = Row(
        Case(Shape(1000, 1000, 1000, "nn"), "fp16"),
        ("mine",),
        times={
            "ours": _times((1.0, 2.0, 4.0), (10.0,)),
            "theirs": _times((2.0, 4.0, 7.0), (15.0,)),
            "third": _times((1.0,) * 3),
        },
        not_run={},
    )
    assert row.ratio("ours", "theirs") == 2.0
    assert row.isolated_ratio("ours", "theirs") == 1.5
    assert row.ratio("ours", "absent") is None
    assert row.isolated_ratio("ours", "third") is None
    assert row.us("ours") == 2.0
    assert row.tflops("ours") == pytest.approx(1000.0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """results.json holds everything, and nothing is left beside it."""
    found = sample()
    write(found, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert read(tmp_path) == found
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(to_json(found)))


def test_what_is_no_result(tmp_path: Path) -> None:
    """No file, no JSON, another format, a row without its case: named with what is wrong."""
    with pytest.raises(SpecError, match=r"results\.json is no result of aotmm bench: FileNotFoundError"):
        read(tmp_path)
    body = to_json(sample())
    for text, error in (
        ("{", "JSONDecodeError"),
        (json.dumps(body | {"format": 1}), "not of format 2"),
        (json.dumps(body | {"rows": [{}]}), "KeyError"),
    ):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(SpecError, match=error):
            read(tmp_path)
