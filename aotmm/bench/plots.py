"""Plots of a run, as PNG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from matplotlib.figure import Figure

from aotmm.bench.cases import COMPARISONS
from aotmm.bench.results import Results, Row, spread
from aotmm.bench.summary import Goal, baseline

_COLORS = {"aotmm": "#0072b2", "torch": "#000000", "tutorial": "#d55e00", "cutlass": "#009e73", "scaled_mm": "#000000"}
_DTYPE_COLORS = {"fp16": "#0072b2", "bf16": "#e69f00", "fp8e4": "#cc79a7"}
_LABELS = {
    "torch": "cuBLAS (torch)",
    "tutorial": "Triton tutorial, JIT",
    "cutlass": "CUTLASS, best of its configurations",
}
_SKINNY_M = 64  # most rows or columns of a product on the roofline plot


def draw(results: Results) -> dict[str, bytes]:
    """Return every plot that the results have figures for: PNG by file name."""
    plots = {"squares.png": _squares(results), "ratio.png": _ratios(results), "roofline.png": _roofline(results)}
    return {name: _png(figure) for name, figure in plots.items() if figure is not None}


def draw_figures(runs: Sequence[Results], goals: Sequence[Goal]) -> dict[str, bytes]:
    """Return the plot of the figures of random problems, if there are any: a box for each goal.

    A box is between the quartiles, with the median; whiskers are at 5 and 95 %, and what is beyond is dots.
    """
    rows = [row for run in runs for row in run.rows]
    boxes = {
        goal.work: values
        for goal in goals
        if (values := [value for row in rows if goal.counts(row) and (value := goal.figure(row)) is not None])
    }
    if not boxes:
        return {}
    figure = Figure(figsize=(14, 5.5))
    axis = figure.subplots()
    axis.boxplot([*boxes.values()], whis=(5, 95), flierprops={"markersize": 2})
    labels = [f"{name} ({len(values)})" for name, values in boxes.items()]
    axis.set_xticks(range(1, len(boxes) + 1), labels, rotation=30, ha="right")
    _logarithmic(axis)
    at_most = goals[0].at_most
    axis.set_ylabel(
        "time of the chosen plan over that of the best" if at_most else f"times faster than {goals[0].against}"
    )
    return {"figures.png": _png(figure)}


def _squares(results: Results) -> Figure | None:
    """Plot TFLOP/s over the size of square products, like the tutorials, with the quantiles at 20 and 80 %."""
    squares = [row for row in results.rows if {"squares256", "squares128"} & set(row.sweeps)]
    dtypes = list(dict.fromkeys(row.case.dtype for row in squares))
    if not squares:
        return None
    figure = Figure(figsize=(7 * len(dtypes), 5))
    axes = figure.subplots(1, len(dtypes), squeeze=False, sharey=True)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        rows = sorted((row for row in squares if row.case.dtype == dtype), key=lambda row: row.case.shape.M)
        for name, color in _COLORS.items():
            mine = [row for row in rows if name in row.times]
            if mine:
                sizes = [row.case.shape.M for row in mine]
                axis.plot(sizes, [row.tflops(name) for row in mine], color=color, label=_LABELS.get(name, name))
                low, high = zip(*(_band(row, name) for row in mine), strict=True)
                axis.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
        axis.set(title=f"{dtype}, M = N = K, layout nn", xlabel="M = N = K")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0][0].set_ylabel("TFLOP/s")
    return figure


def _band(row: Row, name: str) -> tuple[float, float]:
    _, low, high = spread(row.times[name].graph_us)
    return 2e-6 * row.case.macs / high, 2e-6 * row.case.macs / low


def _ratios(results: Results) -> Figure | None:
    """Plot the ratio of every shape: a column per sweep, in the order of the shapes' work, with geometric means."""
    dtypes = list(dict.fromkeys(row.case.dtype for row in results.rows))
    columns = [
        (sweep, {dtype: rows for dtype in dtypes if (rows := _with_ratio(results.of(sweep, dtype)))})
        for sweep in COMPARISONS
        if _with_ratio(results.of(sweep))
    ]
    if not columns:
        return None
    figure = Figure(figsize=(14, 5.5))
    axis = figure.subplots()
    labels: dict[str, Any] = {}
    for position, (_, found) in enumerate(columns):
        for dtype, rows in found.items():
            values = [ratio for ratio, _ in sorted(rows, key=lambda pair: pair[1].case.macs)]
            positions = [position + 0.06 + 0.88 * number / len(values) for number in range(len(values))]
            labels[dtype] = axis.scatter(positions, values, s=9, color=_DTYPE_COLORS.get(dtype, "#666666"))
            color = _DTYPE_COLORS.get(dtype, "#666666")
            axis.hlines(geometric_mean(values), position + 0.04, position + 0.96, color=color, linewidth=1.5)
        axis.axvline(position, color="#dddddd", linewidth=0.8)
    _logarithmic(axis)
    axis.set_xticks([position + 0.5 for position in range(len(columns))], [sweep for sweep, _ in columns])
    axis.set_xlim(0, len(columns))
    axis.set(title="Every shape, in the order of work; lines are geometric means", ylabel="times faster than torch")
    axis.legend(labels.values(), labels.keys())
    return figure


def _logarithmic(axis: Any) -> None:
    """Scale the axis of ratios, on which twice and half as fast are equally far from 1."""
    axis.axhline(1.0, color="#000000", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.set_yticks([0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0], minor=False)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axis.grid(axis="y", alpha=0.3)


def _with_ratio(rows: Iterable[Row]) -> list[tuple[float, Row]]:
    found = ((row.ratio("aotmm", baseline(row)), row) for row in rows)
    return [(ratio, row) for ratio, row in found if ratio is not None]


def _roofline(results: Results) -> Figure | None:
    """Plot TFLOP/s over operations per byte of skinny products, under copy bandwidth and the best product."""
    skinny = [
        row
        for row in (*results.of("llm"), *results.of("tall_skinny"))
        if min(row.case.shape.M, row.case.shape.N) <= _SKINNY_M and "aotmm" in row.times
    ]
    if not skinny:
        return None
    figure = Figure(figsize=(9, 6))
    axis = figure.subplots()
    intensity = [_intensity(row) for row in skinny]
    for name, marker in (("torch", "x"), ("aotmm", "o")):
        rows = [row for row in skinny if name in row.times]
        axis.scatter(
            [_intensity(row) for row in rows],
            [row.tflops(name) for row in rows],
            s=22,
            marker=marker,
            color=_COLORS[name],
            label=_LABELS.get(name, name),
        )
    bandwidth = results.facts["copy_bytes_per_s"]
    best = max(row.tflops(name) for row in results.rows for name in row.times if row.case.dtype in ("fp16", "bf16"))
    edges = [min(intensity), min(max(intensity) * 4, best * 1e12 / bandwidth), max(intensity) * 4]
    axis.plot(
        edges,
        [min(edge * bandwidth * 1e-12, best) for edge in edges],
        color="#888888",
        label=f"copy {bandwidth * 1e-12:.2f} TB/s, best product {best:.0f} TFLOP/s",
    )
    axis.set(
        xscale="log",
        yscale="log",
        title=f"Products with M or N up to {_SKINNY_M}",
        xlabel="operations per byte that must be moved",
        ylabel="TFLOP/s",
    )
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return figure


def _intensity(row: Row) -> float:
    return 2 * row.case.macs / row.case.bytes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()
