"""Stand-ins for a GPU: a stopwatch that runs calls on the CPU and makes its times up, providers, and whole results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotmm.bench.cases import COMPARISONS, work
from aotmm.bench.providers import Call, Provider
from aotmm.bench.results import Results, Row, Times
from aotmm.timing.draw import distribution
from aotmm.timing.operands import Operands, torch_dtype
from aotmm.timing.problems import Case, Shape, read

_SPEED = {
    "tutorial": 0.6,
    "cutlass": 0.9,
    "aotmm": 1.05,
    "aotmm_plain": 0.98,
    "scaled_mm": 1.2,
    "unfused": 0.7,
    "addmm": 0.8,
}


@dataclass
class FakeStopwatch:
    """Runs calls on the CPU; `recorded` has the launches of every recording, `replayed` the order of what was timed."""

    us: float = 100.0
    recorded: list[int] = field(default_factory=list)
    replayed: list[Call] = field(default_factory=list)
    alone_calls: int = 0

    def record(self, call: Call, sets: Sequence[Operands], launches: int) -> Callable[[], float]:
        """As `Stopwatch.record`."""
        self.recorded.append(launches)

        def run() -> float:
            for number in range(min(launches, len(sets))):
                call(sets[number])
            self.replayed.append(call)
            return self.us

        return run

    def alone(self, call: Call, operands: Operands) -> float:
        """As `Stopwatch.alone`."""
        call(operands)
        self.alone_calls += 1
        return self.us + 10


def product(case: Case, operands: Operands) -> torch.Tensor:
    """What a right provider writes, rounded once."""
    x = operands.a.double() @ operands.b.double()
    if case.element_bytes == 1:
        x = x * float(operands.epilogue.scale_a) * float(operands.epilogue.scale_b)
    if case.activation is not None:
        x = x + operands.epilogue.bias.double()
        x = x if case.activation == "none" else getattr(torch.nn.functional, case.activation)(x)
    return x.to(torch_dtype(case.output))


def right(name: str = "right") -> Provider:
    """A provider that multiplies rightly."""
    return Provider(name, "", lambda case, _: lambda operands: operands.out.copy_(product(case, operands)))


def sample() -> Results:
    """A run of everything, with times that follow from the work and a speed for each provider."""
    shapes = read()
    rows = []
    for number, item in enumerate(work(shapes, list(COMPARISONS))):
        case = item.case
        base = 3.0 + case.shape.macs / 3.5e8 + case.bytes / 4e6
        times = {
            name: Times(
                graph_us=tuple(base / _SPEED.get(name, 1.0) * (1 + 0.01 * ((number + turn) % 3)) for turn in range(5)),
                isolated_us=() if name == "aotmm_plain" else (base + 10, base + 11, base + 12),
                launches=100,
                error=0.9,
                note="tile <&> co" if name == "aotmm" else "",
            )
            for name in item.providers
        }
        not_run = {}
        if number % 5 == 0 and "cutlass" in times:
            del times["cutlass"]
            not_run["cutlass"] = "there is no nvcc on the PATH"
        state = {"clocks.sm": 1980.0, "clocks.mem": 3201.0, "power.draw": 500.0, "temperature.gpu": 50.0}
        rows.append(Row(case, item.sweeps, times, not_run, state))
    facts = {"date": "2026-11-20", "device": "a sample", "copy_bytes_per_s": 4.3e12, "cache_bytes": 60 << 20}
    other = {
        "first_result": {
            "aotmm": {"import": 1.0, "sum": 30.0},
            "torch.matmul": {"sum": 90.0},
            "tutorial": {"sum": 3e4},
        },
        "overhead": {
            "torch.matmul(a, b)": {"min us": 8.0, "median us": 9.0},
            "lib.matmul(a, b)": {"min us": 4.0, "median us": 4.5, "of torch's": 0.5, "at most": 0.55},
        },
    }
    return Results(facts, rows, other)


def drawn_facts(**given: Any) -> dict[str, Any]:
    """Facts of a run of random problems, by default of ratios, seed 1."""
    return {
        "date": "2026-11-26",
        "device": "NVIDIA H200",
        "cache_bytes": 1,
        "seed": 1,
        "figure": "ratio",
    } | given


def drawn_row(
    name: str,
    figure: float | None,
    *,
    M: int = 16,
    dtype: str = "fp16",
    pair: tuple[str, str] | None = None,
    not_run: dict[str, str] | None = None,
) -> Row:
    """A random problem of a class. Its ratio to torch is `figure`; or its regret, if the pair is chosen and best.

    The slower of us takes 10 us; without a figure there are only our times.
    """
    key = name if name == "biased" else dtype
    ours, theirs = pair or ("aotmm", {"fp8e4": "scaled_mm", "int8": "int_mm", "biased": "addmm"}.get(key, "torch"))
    regret = ours == "chosen"
    times = {ours: Times((10.0 * (figure or 1.0) if regret else 10.0,) * 5, (), 3, 0.5, "tile a, 9.00 us predicted")}
    if figure is not None:
        times[theirs] = Times((10.0 if regret else 10.0 * figure,) * 5, (), 3, 0.5, "nvjet")
    case = Case(Shape(M, 64, 32, "nt"), dtype, fast_accum=name == "fp8_fast")
    return Row(case, (name,), times=times, not_run=not_run or {})


def drawn_sample(seed: int) -> Results:
    """A run with a few problems of every class."""
    rows = [
        drawn_row(each.name, 0.7 + 0.1 * number, M=1 << number, dtype=each.dtypes[0])
        for each in distribution().classes
        for number in range(12)
    ]
    rows[0].not_run["torch"] = "failed: <no> | way"
    del rows[0].times["torch"]
    return Results(drawn_facts(seed=seed), rows)
