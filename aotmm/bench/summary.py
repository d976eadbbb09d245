"""Results against the targets (`targets.json`), and as flat rows for tables and CSV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from aotmm.bench.results import Results, Row, spread

_FILE = Path(__file__).parent / "targets.json"
_FIRST_TARGET = 50.0  # least speedup of the first result over JIT and autotune
RATIO, LIMIT = "of torch's", "at most"  # of the cost of a call
# Other measurements with such limits, how their lines begin, and the most that further figures may be of torch's.
_LIMITED: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("overhead", "call", {}),
    ("models", "model", {"error": 1.1, "memory": 1.02}),
    ("expert_layers", "expert layer", {}),
)
OURS = ("aotmm", "chosen", "best")  # whose wrong products fail a run
MET, MISSED, NO_TARGET = "met", "missed", ""


@dataclass(frozen=True, slots=True)
class Goal:
    """The target of `ours` against another provider on the rows of some sweeps, or of some classes of random problems.

    mean: least geometric mean of the ratios. quantile: least one at 5 %. worst: least ratio. Each is None without a
    target.
    least_m, most_m, fast_accum: limits of the rows that count.
    at_most: the figures are our time over the other's instead, at least 1, and the targets their largest mean, quantile
    at 95 % and value.
    """

    work: str
    sweeps: tuple[str, ...]
    ours: str
    against: str
    mean: float | None = None
    quantile: float | None = None
    worst: float | None = None
    least_m: int = 0
    most_m: int = 2**31
    fast_accum: bool | None = None
    at_most: bool = False

    def counts(self, row: Row) -> bool:
        """Return whether the row is one of those that count."""
        return (
            not set(row.sweeps).isdisjoint(self.sweeps)
            and self.least_m <= row.case.shape.M <= self.most_m
            and (self.fast_accum is None or row.case.fast_accum is self.fast_accum)
        )

    def figure(self, row: Row) -> float | None:
        """Return the row's figure; None if one of the two was not run."""
        ratio = row.ratio(self.ours, self.against)
        return max(1.0, 1 / ratio) if ratio is not None and self.at_most else ratio

    def misses(self, figure: float, limit: float | None) -> bool:
        """Return whether a figure is on the wrong side of its limit, if there is one."""
        return limit is not None and (figure > limit if self.at_most else figure < limit)


@dataclass(frozen=True, slots=True)
class Line:
    """A goal and its figures for one dtype.

    Attributes:
        shapes: number of ratios. mean, worst: of them. where: the case of the worst one.
        plain: geometric mean without pdl. isolated: of single calls.
        not_run: reasons, by case, for rows without a ratio because of us.
    """

    goal: Goal
    dtype: str
    shapes: int
    mean: float
    worst: float
    where: str
    plain: float | None
    plain_worst: float | None
    isolated: float | None
    not_run: tuple[str, ...]

    @property
    def status(self) -> str:
        """Return whether the target is met, in words. A missing or wrong product of ours misses it."""
        if self.goal.mean is None or self.goal.worst is None:
            return NO_TARGET
        reached = self.mean >= self.goal.mean and self.worst >= self.goal.worst and not self.not_run
        return MET if reached else MISSED


def targets() -> dict[str, Any]:
    """Return the content of `targets.json`."""
    body: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return body


def goals(group: str = "sweeps") -> list[Goal]:
    """Return the targets of one group of `targets.json`."""
    return [Goal(**(row | {"sweeps": tuple(row["sweeps"])})) for row in targets()[group]]


def lines(results: Results) -> list[Line]:
    """Return one line per target and dtype that has figures."""
    return [
        line
        for goal in goals()
        for dtype in dict.fromkeys(row.case.dtype for row in results.rows)
        for line in _line(goal, dtype, [row for row in results.rows if row.case.dtype == dtype and goal.counts(row)])
    ]


def _line(goal: Goal, dtype: str, rows: Sequence[Row]) -> Iterator[Line]:
    found = [(ratio, row) for row in rows if (ratio := row.ratio(goal.ours, goal.against)) is not None]
    if not found:
        return
    plain = [row.ratio(f"{goal.ours}_plain", goal.against) for row in rows]
    yield Line(
        goal=goal,
        dtype=dtype,
        shapes=len(found),
        mean=geometric_mean(ratio for ratio, _ in found),
        worst=min(ratio for ratio, _ in found),
        where=str(min(found, key=lambda pair: pair[0])[1].case),
        plain=_mean(plain),
        plain_worst=min((ratio for ratio in plain if ratio is not None), default=None),
        isolated=_mean([row.isolated_ratio(goal.ours, goal.against) for row in rows]),
        not_run=tuple(f"{row.case}: {row.not_run[goal.ours]}" for row in rows if goal.ours in row.not_run),
    )


def failures(results: Results) -> list[str]:
    """Return the cases that aotmm did not compute, or wrongly, each with the reason."""
    return [f"{row.case}: {row.not_run[name]}" for row in results.rows for name in OURS if name in row.not_run]


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


TARGET_HEADER = (
    "work", "dtype", "against", "shapes", "mean", "target", "worst", "target", "", "worst case",
    "plain mean", "plain worst", "isolated",
)  # fmt: skip


def target_table(results: Results) -> list[tuple[str, ...]]:
    """Return the targets under `TARGET_HEADER`. With a ratio above 1, aotmm is faster."""
    return [
        (
            line.goal.work,
            line.dtype,
            line.goal.against,
            str(line.shapes),
            figure(line.mean),
            figure(line.goal.mean),
            figure(line.worst),
            figure(line.goal.worst),
            line.status,
            line.where,
            figure(line.plain),
            figure(line.plain_worst),
            figure(line.isolated),
        )
        for line in lines(results)
    ]


def first_result(results: Results) -> list[tuple[str, str, str]]:
    """Return the targets of the first result: name, figure, evaluation; empty if it was not measured."""
    sums = {method: steps["sum"] for method, steps in results.other.get("first_result", {}).items()}
    if "aotmm" not in sums:
        return []
    found = []
    for method, times in sums.items():
        if method != "aotmm":
            ratio, least = times / sums["aotmm"], 1.0 if method == "torch.matmul" else _FIRST_TARGET
            found.append(
                (
                    f"first result, {method}",
                    f"{times:.0f} ms, ours {sums['aotmm']:.0f} ms: {ratio:.1f} times sooner, at least {least:.0f}",
                    MET if ratio >= least else MISSED,
                )
            )
    return found


def overhead(results: Results) -> list[tuple[str, str, str]]:
    """Return the targets of calls, models and expert layers: name, figure, evaluation; empty if not measured."""
    found = []
    for subject, what, further in _LIMITED:
        for method, figures in results.other.get(subject, {}).items():
            if LIMIT in figures:
                limits = {"time": (figures[RATIO], figures[LIMIT])}
                limits |= {name: (figures[name], limit) for name, limit in further.items() if name in figures}
                text = "; ".join(
                    f"{value:.2f} of torch's {name}, at most {most:.2f}" for name, (value, most) in limits.items()
                )
                met = all(value <= most for value, most in limits.values())
                found.append((f"{what}, {method}", text, MET if met else MISSED))
    return found


def other_table(name: str, values: dict[str, dict[str, float | str]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of a further measurement: a row per method, a column per figure."""
    columns = tuple(dict.fromkeys(column for figures in values.values() for column in figures))
    rows = [(method, *(_figure(figures.get(column, "")) for column in columns)) for method, figures in values.items()]
    return (name, *columns), rows


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


CSV_HEADER = (
    "sweeps", "M", "N", "K", "layout", "name", "dtype", "activation", "fast_accum", "provider",
    "us", "us_q20", "us_q80", "tflops", "gb_per_s", "ratio_to", "ratio", "isolated_us", "isolated_us_q20",
    "isolated_us_q80", "launches", "error", "note",
)  # fmt: skip


def csv_rows(results: Results) -> Iterator[tuple[object, ...]]:
    """Yield one row per case and provider under `CSV_HEADER`; if it was not run, the note has the reason."""
    for row in results.rows:
        case, shape = row.case, row.case.shape
        base = baseline(row)
        what = (
            " ".join(row.sweeps), shape.M, shape.N, shape.K, shape.layout, shape.name, case.dtype,
            case.activation or "", case.fast_accum,
        )  # fmt: skip
        for name, times in row.times.items():
            us, low, high = spread(times.graph_us)
            ratio = row.ratio(base, name) if base else None
            yield (
                *what, name, us, low, high, round(row.tflops(name), 2), round(case.bytes / us * 1e-3, 1), base,
                "" if ratio is None else round(1 / ratio, 4),
                *((round(x, 2) for x in spread(times.isolated_us)) if times.isolated_us else ("", "", "")),
                times.launches, round(times.error, 4), times.note,
            )  # fmt: skip
        for name, reason in row.not_run.items():
            yield (*what, name, *[""] * (len(CSV_HEADER) - len(what) - 2), f"not run: {reason}")


def baseline(row: Row) -> str:
    """Return the provider that others of a row are compared with: the first of torch's that ran, or our best plan."""
    return next((name for name in ("torch", "scaled_mm", "unfused", "best") if name in row.times), "")


def row_text(row: Row) -> str:
    """Return one line of progress: times, and ratios to torch's."""
    base = baseline(row)
    parts = [str(row.case).ljust(34)]
    for name in dict.fromkeys((*row.times, *row.not_run)):
        if name in row.times:
            ratio = row.ratio(name, base) if base and name != base else None
            parts.append(f"{name} {row.us(name):.1f} us" + (f" ({ratio:.2f})" if ratio else ""))
        if name in row.not_run:
            parts.append(f"{name} not run: {row.not_run[name][:100]}")
    return "  ".join(parts)


def figure(value: float | None) -> str:
    """Return a ratio as it is printed."""
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"  # noqa: PLR2004 - three digits
