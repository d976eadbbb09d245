"""Random problems against the targets: statistics by class and by rows, and the worst problems."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from aotmm.bench import results
from aotmm.bench.results import Results, Row
from aotmm.bench.summary import MET, MISSED, NO_TARGET, OURS, Goal, figure, goals, targets
from aotmm.errors import SpecError

# The figures of a run (its fact "figure").
RATIO, REGRET, AMPERE, GROUPED, BLOCKS = "ratio", "regret", "ampere", "grouped", "blocks"
_COMMON = ("figure", "table", "device", "aotmm", "packs", "torch", "cuda")  # facts that runs of one report share
PRELOAD = "preload"  # the further measurement of BLOCKS
_WORST = 30  # problems in a list
_WIDTH = 200  # characters of a reason
_PARTS = 20  # the first and the last of so many quantiles are those at 5 and 95 %
_TITLES = {
    RATIO: "Random problems against torch",
    REGRET: "Regret of the chosen plans",
    AMPERE: "Kernels for sm80 on another GPU, a proxy for an A100",
    GROUPED: "Grouped products against torch",
    BLOCKS: "fp8 with block scales against torch and DeepGEMM",
}
_UNSEEN = "All problems are of the tenth of which no table has times."
_TEXTS = {
    RATIO: "A ratio is torch's time over ours: above 1 is faster. Means are geometric. torch.mm, "
    "torch.bmm, torch.addmm of products with a bias, torch._int_mm, or torch._scaled_mm with the same kind of sums. "
    f"{_UNSEEN}",
    REGRET: "A regret is the time of the chosen plan over that of the best of all plans worth timing, the two timed in "
    f"turns: 1 is perfect, also if the race's best is slower in turns. Means are geometric. {_UNSEEN}",
    AMPERE: "A ratio is the time of CUTLASS' kernels for Ampere over ours, which run through their PTX; a regret is "
    "the time of the chosen plan over that of the best. No figure tells the speed of an A100: it has other clocks, "
    f"caches and memory. Means are geometric. {_UNSEEN}",
    GROUPED: "A ratio is the time of torch's grouped_mm over ours: above 1 is faster. A regret is the time of the "
    "chosen kernel over that of the fastest that fits, itself among them: 1 is perfect. All are timed in turns. "
    "Means are geometric.",
    BLOCKS: "A ratio is the time of torch, of DeepGEMM after its warm-up, or of our own product without block scales "
    "over ours: above 1 is faster. A regret is the time of the chosen kernel over that of the fastest that fits, "
    "itself among them: 1 is perfect. All are timed in turns. Means are geometric.",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A goal and its figures over one seed, or over all.

    Attributes:
        seed: in words.
        problems: number of figures; of our times if there are none.
        mean, quantile, worst: of the figures; None without any. where: the problem of the worst one.
        tflops: geometric mean of ours.
        failed: number of problems that we computed wrongly, or not at all.
    """

    goal: Goal
    seed: str
    problems: int
    mean: float | None
    quantile: float | None
    worst: float | None
    where: str
    tflops: float
    failed: int

    @property
    def status(self) -> str:
        """Return whether the targets are met, in words. A missing or wrong product of ours misses them."""
        pairs = ((self.mean, self.goal.mean), (self.quantile, self.goal.quantile), (self.worst, self.goal.worst))
        wanted = [(value, limit) for value, limit in pairs if limit is not None]
        if not wanted or (self.mean is None and not self.failed):
            return NO_TARGET
        missed = any(value is None or self.goal.misses(value, limit) for value, limit in wanted)
        return MISSED if missed or self.failed else MET


class Found(NamedTuple):
    """A problem's figure, and the goal that it is of."""

    figure: float
    row: Row
    goal: Goal


class Section(NamedTuple):
    """A table with its title and what it shows."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def are_drawn(runs: Sequence[Results]) -> bool:
    """Return whether the runs are of random problems. Raises SpecError for several runs that are not."""
    drawn = all("figure" in run.facts for run in runs)
    if len(runs) > 1 and not drawn:
        raise SpecError("only runs of random problems make one report; show every other run by itself")
    return drawn


def drawn_goals(facts: dict[str, Any]) -> list[Goal]:
    """Return the targets of a run with these facts; the first is that over the classes that are not apart.

    Regrets have a target over those classes alone. An H100 has other targets than an H200.
    """
    if facts["figure"] in (AMPERE, GROUPED, BLOCKS):
        return goals(facts["figure"])
    known, found = targets(), goals("random")
    if facts["figure"] == REGRET:
        limits = known["regret_of_another_table" if facts.get("table") else "regret"]
        bare = {"ours": "chosen", "against": "best", "at_most": True, "mean": None, "quantile": None, "worst": None}
        return [replace(goal, **(bare | (limits if goal is found[0] else {}))) for goal in found]
    less = sum(less for name, less in known["random_mean_less_on"].items() if name in facts["device"])
    return [replace(goal, mean=None if goal.mean is None else goal.mean - less) for goal in found]


def lines(runs: Sequence[Results]) -> list[Line]:
    """Return the lines of every goal that has rows: over all runs, then of each run if there are several.

    Raises:
        SpecError: two runs are of one seed, or of different devices or software.
    """
    _refuse_different(runs)
    seeds = [(_seed(run), [run]) for run in runs]
    groups = seeds if len(runs) == 1 else [(f"{len(runs)} seeds", list(runs)), *seeds]
    found: list[Line] = []
    for goal in drawn_goals(runs[0].facts):
        for seed, members in groups:
            rows = [row for run in members for row in run.rows if goal.counts(row)]
            found += _line(goal, seed, rows)
    return found


def _line(goal: Goal, seed: str, rows: Sequence[Row]) -> Iterator[Line]:
    if not rows:
        return
    found = _figures(goal, rows)
    values = [each.figure for each in found]
    speeds = [row.tflops(goal.ours) for row in rows if goal.ours in row.times]
    yield Line(
        goal=goal,
        seed=seed,
        problems=len(found) or len(speeds),
        mean=statistics.geometric_mean(values) if values else None,
        quantile=quantile(values, at_most=goal.at_most) if values else None,
        worst=found[0].figure if found else None,
        where=str(found[0].row.case) if found else "",
        tflops=statistics.geometric_mean(speeds) if speeds else 0.0,
        failed=sum(not row.not_run.keys().isdisjoint(OURS) for row in rows),
    )


def _figures(goal: Goal, rows: Iterable[Row]) -> list[Found]:
    """Return the figures of the rows that have one, the worst first."""
    found = [Found(value, row, goal) for row in rows if (value := goal.figure(row)) is not None]
    return sorted(found, key=lambda each: each.figure, reverse=goal.at_most)


def quantile(values: Sequence[float], *, at_most: bool) -> float:
    """Return the quantile at 5 %, or at 95 % if the values shall be small, interpolated between two of them."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=_PARTS, method="inclusive")[-1 if at_most else 0]


def worst(runs: Sequence[Results], *, apart: bool = False) -> list[Found]:
    """Return the worst problems, of the classes that are apart or of the others."""
    known = drawn_goals(runs[0].facts)
    rows = [row for run in runs for row in run.rows if known[0].counts(row) != apart]
    found = [each for row in rows for each in _figures(next(goal for goal in known if goal.counts(row)), [row])]
    return sorted(found, key=lambda each: each.figure, reverse=known[0].at_most)[:_WORST]


def sections(runs: Sequence[Results]) -> list[Section]:
    """Return everything that a report of the runs shows, table by table.

    Raises:
        SpecError: as `lines`.
    """
    kind = runs[0].facts["figure"]
    found = [Section(_title(runs), _TEXTS[kind], *_target_table(runs))]
    for words, apart in (("", False), (" of the classes apart", True)):
        rows = worst(runs, apart=apart)
        if rows:
            found.append(Section(f"The {len(rows)} worst{words}", "", *_worst_table(kind, rows)))
    preloads = [(_seed(run), run.other[PRELOAD]) for run in runs if PRELOAD in run.other]
    if preloads:
        rows_of = [(seed, *(f"{value:.0f}" for value in values.values())) for seed, values in preloads]
        found.append(Section("Preloading in a fresh process", "", ("seed", *preloads[0][1]), rows_of))
    reasons = not_run(runs)
    if reasons:
        found.append(Section("Not run", "", ("", "reason", "problems", "such as"), reasons))
    return found


def _title(runs: Sequence[Results]) -> str:
    seeds = ", ".join(map(_seed, runs))
    table = runs[0].facts.get("table")
    return f"{_TITLES[runs[0].facts['figure']]}, seed{'s' * (len(runs) > 1)} {seeds}" + f", table {table}" * bool(table)


def merged_facts(runs: Sequence[Results]) -> dict[str, Any]:
    """Return the facts of all runs: where they differ, every value."""
    names = dict.fromkeys(name for run in runs for name in run.facts)
    found = {name: list(dict.fromkeys(str(run.facts.get(name)) for run in runs)) for name in names}
    return {name: "; ".join(values) for name, values in found.items()}


def _target_table(runs: Sequence[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    found = lines(runs)
    kinds = {line.goal.at_most for line in found}
    header = (
        "drawn", "seed", "problems", "mean", "target", " or ".join("95 %" if kind else "5 %" for kind in sorted(kinds)),
        "target", "worst", "target", "",
        "TFLOP/s", "worst problem",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            line.goal.work,
            line.seed,
            str(line.problems),
            figure(line.mean),
            figure(line.goal.mean),
            figure(line.quantile),
            figure(line.goal.quantile),
            figure(line.worst),
            figure(line.goal.worst),
            line.status,
            f"{line.tflops:.1f}",
            line.where,
        )
        for line in found
    ]
    return header, rows


def _worst_table(kind: str, found: Sequence[Found]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = {
        RATIO: ("problem", "class", "ratio", "our us", "torch's us", "our plan", "torch's kernels"),
        GROUPED: ("problem", "class", "ratio", "our us", "torch's us", "our kernel", ""),
        BLOCKS: ("problem", "class", "ratio", "our us", "the other's us", "our kernel", ""),
        REGRET: ("problem", "class", "regret", "chosen us", "best us", "chosen", "best"),
        AMPERE: ("problem", "class", "ratio", "our us", "CUTLASS' us", "our plan", "CUTLASS' kernel"),
    }[kind]
    rows = []
    for each in found:
        row, pair = each.row, (each.goal.ours, each.goal.against)
        us, notes = (f"{row.us(name):.2f}" for name in pair), (row.times[name].note for name in pair)
        rows.append((str(row.case), row.sweeps[0], figure(each.figure), *us, *notes))
    return header, rows


def to_json(runs: Sequence[Results]) -> dict[str, Any]:
    """Return the lines, and all that was measured."""
    found = [asdict(line) | {"status": line.status} for line in lines(runs)]
    return {"lines": found, "runs": [results.to_json(run) for run in runs]}


def not_run(runs: Sequence[Results]) -> list[tuple[str, ...]]:
    """Return providers and reasons, each with the number of problems and one of them; numbers in reasons may differ."""
    found: dict[tuple[str, str], list[tuple[str, Row]]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            for name, reason in row.not_run.items():
                found[name, re.sub(r"[\d.]+", "", reason)].append((reason, row))
    return [
        (name, " ".join(rows[0][0].split())[:_WIDTH], str(len(rows)), str(rows[0][1].case))
        for (name, _), rows in found.items()
    ]


def _seed(run: Results) -> str:
    return str(run.facts["seed"])


def _refuse_different(runs: Sequence[Results]) -> None:
    first = runs[0].facts
    for run in runs[1:]:
        other = [name for name in _COMMON if first.get(name) != run.facts.get(name)]
        if other:
            there = ", ".join(f"{name} {first.get(name)} and {run.facts.get(name)}" for name in other)
            raise SpecError(f"runs of different devices or programs are not one report: {there}")
    seeds = [_seed(run) for run in runs]
    if len(set(seeds)) < len(seeds):
        raise SpecError(f"a seed counts once, found {', '.join(seeds)}")
