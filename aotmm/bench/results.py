"""Results of a run, as values and as `results.json`; every figure of the report is computed from them."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aotmm.errors import SpecError
from aotmm.timing.problems import Case, case_of

FILE_NAME = "results.json"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Times:
    """One provider's times of one case.

    Attributes:
        graph_us: microseconds per product in a replayed graph, one figure per round.
        isolated_us: microseconds from the call to the end of the wait for it, likewise; may be empty.
        launches: products in the graph.
        error: largest error over the allowed one.
        note: the launched kernel or plan.
    """

    graph_us: tuple[float, ...]
    isolated_us: tuple[float, ...]
    launches: int
    error: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One case, measured.

    Attributes:
        sweeps: those that it belongs to.
        times: by provider. not_run: why a provider has none.
        state: of the GPU afterwards (`facts.STATE`).
        figures: of all timings of a case that was timed several times; `times` are those of the median one.
    """

    case: Case
    sweeps: tuple[str, ...]
    times: dict[str, Times]
    not_run: dict[str, str]
    state: dict[str, float] = field(default_factory=dict)
    figures: tuple[float, ...] = ()

    def us(self, provider: str) -> float:
        """Return median microseconds per product, back to back."""
        return statistics.median(self.times[provider].graph_us)

    def tflops(self, provider: str) -> float:
        """Return 10^12 multiplications and additions per second."""
        return 2e-6 * self.case.macs / self.us(provider)

    def ratio(self, provider: str, against: str) -> float | None:
        """Return the median over the rounds of `provider`'s speedup over `against`; None if one was not run."""
        return self._ratio(provider, against, "graph_us")

    def isolated_ratio(self, provider: str, against: str) -> float | None:
        """Return the same of single calls that are waited for."""
        return self._ratio(provider, against, "isolated_us")

    def _ratio(self, provider: str, against: str, kind: str) -> float | None:
        if provider not in self.times or against not in self.times:
            return None
        ours, theirs = (getattr(self.times[name], kind) for name in (provider, against))
        return statistics.median(y / x for x, y in zip(ours, theirs, strict=True)) if ours and theirs else None


@dataclass(slots=True)
class Results:
    """A whole run.

    Attributes:
        facts: of the machine and its software.
        rows: cases in the order in which they were measured.
        other: further measurements by name (`bench.SUBJECTS`).
    """

    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    other: dict[str, Any] = field(default_factory=dict)

    def of(self, sweep: str, dtype: str = "") -> list[Row]:
        """Return the rows of a sweep, of one dtype if it is named."""
        return [row for row in self.rows if sweep in row.sweeps and dtype in ("", row.case.dtype)]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the quantiles at 20 and 80 %."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, _, _, high = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), low, high


def to_json(results: Results) -> dict[str, Any]:
    """Return the content of results.json."""
    return {"format": FORMAT, **asdict(results)}


def write(results: Results, folder: Path) -> None:
    """Write `folder`/results.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(to_json(results), indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    temporary.replace(folder / FILE_NAME)


def read(folder: Path) -> Results:
    """Return the results in `folder`. Raises SpecError if there are none that this version reads."""
    path = folder / FILE_NAME
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.pop("format") == FORMAT:
            return Results(body["facts"], [_row(row) for row in body["rows"]], body["other"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpecError(
            f"{path} is no result of aotmm bench: {type(error).__name__} {error}; aotmm bench --out {folder} makes one"
        ) from error
    raise SpecError(f"{path} is not of format {FORMAT}, which this version reads; measure again, into another folder")


def _row(body: dict[str, Any]) -> Row:
    times = {
        name: Times(**(times | {kind: tuple(times[kind]) for kind in ("graph_us", "isolated_us")}))
        for name, times in body["times"].items()
    }
    lists: dict[str, Any] = {name: tuple(body[name]) for name in ("sweeps", "figures") if name in body}
    return Row(**(body | {"case": case_of(body["case"]), "times": times} | lists))
