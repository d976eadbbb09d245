"""The targets, and whether figures meet them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotmm.bench.results import Results, Row, Times
from aotmm.bench.summary import (
    CSV_HEADER,
    TARGET_HEADER,
    Line,
    csv_rows,
    first_result,
    goals,
    lines,
    other_table,
    overhead,
    row_text,
    target_table,
)
from aotmm.timing.problems import Case, Shape
from tests.unit.bench.samples import sample

# What the work was asked to reach: geometric mean and worst ratio, by sweep.
WANTED = [
    ("torch", ("squares256",), 1.02, 0.93),
    ("torch", ("squares128",), 1.04, 0.92),
    ("torch", ("llm",), 1.00, 0.92),
    ("torch", ("llm",), 1.05, 0.95),
    ("torch", ("tall_skinny", "big_k", "ragged"), 0.98, 0.88),
    ("torch", ("unaligned",), 0.80, 0.60),
    ("scaled_mm", ("fp8",), 1.00, 0.92),
    ("scaled_mm", ("fp8",), 1.00, 0.92),
    ("unfused", ("epilogue",), 1.10, 1.00),
    ("tutorial", ("squares256", "squares128"), 1.30, 1.00),  # up to 3072 cubed
    ("tutorial", ("squares256", "squares128"), 1.18, 1.00),  # power limits the larger ones
]


def _row(shape: Shape, ratio: float, sweep: str = "llm") -> Row:
    times = {"aotmm": _times(10.0), "aotmm_plain": _times(20.0), "torch": _times(10.0 * ratio)}
    return Row(Case(shape, "fp16"), (sweep,), times, {})


def _times(us: float) -> Times:
    return Times((us,) * 3, (us + 10,), launches=3, error=0.5)


def _line(results: Results, work: str) -> Line:
    return next(line for line in lines(results) if line.goal.work == work)


def test_targets_are_those_that_were_set() -> None:
    """No target is softened, and figures beside them have none."""
    stated = [row for row in goals() if row.mean is not None]
    assert [(row.against, row.sweeps, row.mean, row.worst) for row in stated] == WANTED
    assert [row.most_m for row in stated if row.against == "tutorial"] == [3072, 2**31]
    assert all(row.ours == "aotmm" for row in stated)
    assert all(row.worst is None for row in goals() if row.mean is None)


def test_a_line() -> None:
    """Mean, worst and where it was, of the rows that count; the plain and isolated columns beside them."""
    small = _row(Shape(64, 4096, 4096, "nt"), 3.0)
    rows = [_row(Shape(128, 4096, 4096, "nt"), 2.0), _row(Shape(256, 4096, 4096, "nt"), 0.5), small]
    line = _line(Results({}, rows), "LLM layers, M >= 128")
    assert (line.shapes, line.worst, line.where) == (2, 0.5, "256x4096x4096 nt fp16")
    assert line.mean == pytest.approx(1.0)
    assert line.plain == pytest.approx(0.5)
    assert line.plain_worst == pytest.approx(0.25)
    assert line.isolated == pytest.approx((30 / 20 * 15 / 20) ** 0.5)
    assert line.status == "missed"
    few = _line(Results({}, rows), "LLM layers, M <= 64")
    assert (few.shapes, few.status) == (1, "met")


def test_a_product_that_was_not_computed_misses_the_target() -> None:
    """Leaving out a shape, or computing it wrongly, is not a way to meet a target."""
    good, bad = _row(Shape(8, 64, 64, "nt"), 2.0), _row(Shape(16, 64, 64, "nt"), 2.0)
    bad = replace(bad, times={"torch": bad.times["torch"]}, not_run={"aotmm": "wrong: 3 times what is allowed"})
    line = _line(Results({}, [good, bad]), "LLM layers, M <= 64")
    assert (line.shapes, line.status) == (1, "missed")
    assert line.not_run == ("16x64x64 nt fp16: wrong: 3 times what is allowed",)


def test_tables() -> None:
    """A cell for each column; every provider and every reason not to run has a row in the CSV."""
    found = sample()
    table = target_table(found)
    assert len(table) == 2 * len([row for row in goals() if row.sweeps != ("fp8",)]) + 2
    assert {len(row) for row in table} == {len(TARGET_HEADER)}
    rows = list(csv_rows(found))
    assert {len(row) for row in rows} == {len(CSV_HEADER)}
    assert len(rows) == sum(len(row.times) + len(row.not_run) for row in found.rows)
    by_name = [dict(zip(CSV_HEADER, row, strict=True)) for row in rows[:3]]
    assert [row["provider"] for row in by_name] == ["aotmm", "aotmm_plain", "torch"]
    assert by_name[0]["ratio"] == pytest.approx(1.05, abs=1e-3)
    assert by_name[2]["ratio"] == 1.0
    assert "there is no nvcc" in str(rows)
    assert "aotmm 3." in row_text(found.rows[0])
    assert "(1.05)" in row_text(found.rows[0])


def test_first_result() -> None:
    """Sooner than torch, and fifty times sooner than JIT and autotune."""
    found = first_result(sample())
    assert [(what, status) for what, _, status in found] == [
        ("first result, torch.matmul", "met"),
        ("first result, tutorial", "met"),
    ]
    slow = Results({}, other={"first_result": {"aotmm": {"sum": 100.0}, "torch.matmul": {"sum": 90.0}}})
    assert [status for *_, status in first_result(slow)] == ["missed"]
    assert first_result(Results({})) == []


def test_other_measurements() -> None:
    """A row for each method, a column for each figure of any of them; texts stay as they are."""
    header, rows = other_table("invariant", {"all": {"mean": 0.99, "least of": "64x8x8 nt bf16"}, "few": {}})
    assert header == ("invariant", "mean", "least of")
    assert rows == [("all", "0.990", "64x8x8 nt bf16"), ("few", "", "")]


def test_overhead() -> None:
    """A status of each call, model and expert layer that has a limit."""
    limit = "call, lib.matmul(a, b)", "0.50 of torch's time, at most 0.55"
    assert overhead(sample()) == [(*limit, "met")]
    slow = Results({}, other={"overhead": {"lib.matmul(a, b)": {"min us": 5.0, "of torch's": 0.6, "at most": 0.55}}})
    assert [status for *_, status in overhead(slow)] == ["missed"]
    ratios = {"of torch's": 0.9, "at most": 0.8}
    others = Results({}, other={"models": {"BERT": ratios}, "expert_layers": {"Mixtral, 64 tokens": ratios}})
    found = "0.90 of torch's time, at most 0.80", "missed"
    assert overhead(others) == [("model, BERT", *found), ("expert layer, Mixtral, 64 tokens", *found)]
    assert overhead(Results({})) == []


@pytest.mark.parametrize(
    ("error", "memory", "found"), [(1.1, 1.02, "met"), (1.11, 1.0, "missed"), (1.0, 1.03, "missed")]
)
def test_models_have_limits_of_error_and_memory(error: float, memory: float, found: str) -> None:
    """A model as fast as asked misses its target by 11 % more error than torch's, or 3 % more memory."""
    row = {"of torch's": 0.9, "at most": 1.01, "error": error, "memory": memory}
    ((name, text, met),) = overhead(Results({}, other={"models": {"BERT": row}}))
    assert (name, met) == ("model, BERT", found)
    assert text == (
        f"0.90 of torch's time, at most 1.01; {error:.2f} of torch's error, at most 1.10; "
        f"{memory:.2f} of torch's memory, at most 1.02"
    )
