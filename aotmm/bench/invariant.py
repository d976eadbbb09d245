"""The price of `batch_invariant`: layers of real models on random rows, against our own choice and others' ways.

Others are a published Triton kernel of one tile (`providers.one_tile`), where Triton is installed, and cuBLAS without a
workspace, which then does not split K. Its variables are read once, so it runs in a process of its own, in turn with
the others: clocks follow the power of what ran before.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from aotmm.bench import facts, results
from aotmm.bench.drawn_summary import quantile
from aotmm.bench.protocol import GraphStopwatch, in_turn, repeated
from aotmm.bench.providers import Call
from aotmm.bench.providers.own import library
from aotmm.bench.results import Results
from aotmm.bench.session import continued, gpu
from aotmm.errors import AotmmError
from aotmm.timing.check import truth
from aotmm.timing.draw import distribution
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape

_COUNT, _MOST = 120, 8192  # products: about 4 minutes; rows
_BANDS = {"1 to 64 rows": (1, 64), "65 to 1023 rows": (65, 1023), "1024 rows on": (1024, _MOST), "all": (1, _MOST)}
_STARVED = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
_REPLAY = "replay"
_OWN, _TILE, _CUBLAS = "own choice", "one Triton tile", "cuBLAS without workspace"


def run_invariant(seed: int, folder: Path, progress: Callable[[str], None], *, count: int | None = None) -> Results:
    """Measure `count` random layers, by default as many as take 4 minutes, and write `folder`/results.json.

    Raises:
        SpecError: torch sees no GPU, or `folder` has results of another seed or software.
        AotmmError: as `aotmm.load` and `matmul`.
    """
    found = continued(folder, facts.collect(gpu()) | {"seed": seed})
    if "invariant" not in found.other:
        found.other["invariant"] = _measure(drawn(seed, count or _COUNT))
        results.write(found, folder)
        progress("invariant")
    return found


def _measure(cases: list[Case]) -> dict[str, dict[str, float | str]]:
    """Return by band of rows the others' times over ours: mean, 5 % quantile, least, and the least's product."""
    with _starved() as other:
        times = [_times(case, other) for case in cases]
    ratios = [{name: each / row["ours"] for name, each in row.items() if name != "ours"} for row in times]
    return {
        f"{band}, {name}": _figures(
            [(row[name], str(case)) for row, case in zip(ratios, cases, strict=True) if least <= case.shape.M <= most]
        )
        for band, (least, most) in _BANDS.items()
        for name in ratios[0]
    }


def drawn(seed: int, count: int) -> list[Case]:
    """Return layers of the distribution on log-uniform rows, bf16, layout nt."""
    source, layers = random.Random(seed), distribution().layers  # noqa: S311 - no secret
    found = []
    for _ in range(count):
        layer = source.choice(layers)
        found.append(Case(Shape(round(float(_MOST ** source.random())), layer.N, layer.K, "nt"), "bf16"))
    return found


def _figures(products: list[tuple[float, str]]) -> dict[str, float | str]:
    """Return the figures of ratios, each with the product that has it."""
    if not products:
        return {}
    ratios = [ratio for ratio, _ in products]
    return {
        "mean": statistics.geometric_mean(ratios),
        "5 %": quantile(ratios, at_most=False),
        "least": min(ratios),
        "least of": min(products)[1],
        "products": len(ratios),
    }


def _times(case: Case, other: _Starved) -> dict[str, float]:
    """Return microseconds of a product by each way."""
    calls: dict[str, Call] = {"ours": partial(_call, invariant=True), _OWN: partial(_call, invariant=False)}
    if importlib.util.find_spec("triton") is not None:
        from aotmm.bench.providers.one_tile import matmul

        calls[_TILE] = lambda x: matmul(x.a, x.b, x.out)
    record = _recorder(case)
    runs = {name: record(call, name) for name, call in calls.items()}
    samples = in_turn(runs | {_CUBLAS: other.recorded(case)})
    return {name: statistics.median(each) for name, each in samples.items()}


def _recorder(case: Case) -> Callable[[Call, str], tuple[Callable[[], float], int]]:
    """Return a function that records a way to multiply, if its product is right, as `repeated`; all on one pool."""
    sets = Pool(torch.device("cuda")).operands(case, torch.cuda.get_device_properties().L2_cache_size)
    first, stopwatch = sets[0], GraphStopwatch()
    true = truth(first.a, first.b, first.out.dtype, first.epilogue)

    def recorded(call: Call, name: str) -> tuple[Callable[[], float], int]:
        first.unset()  # no product of another way
        call(first)
        true.confirm(first.out, f"the product by {name}")
        return repeated(stopwatch, call, sets)

    return recorded


def _call(operands: Operands, *, invariant: bool) -> object:
    return library().matmul(operands.a, operands.b, out=operands.out, batch_invariant=invariant)


class _Starved:
    """The process of torch whose cuBLAS has no workspace."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def recorded(self, case: Case) -> tuple[Callable[[], float], int]:
        """Return a function that replays the product there, as `Stopwatch.record`, and the number of launches."""
        launches = round(self._asked([case.shape.M, case.shape.N, case.shape.K]))
        return lambda: self._asked(_REPLAY), launches

    def _asked(self, question: object) -> float:
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            return float(self._process.stdout.readline())  # type: ignore[union-attr]
        except (OSError, ValueError) as error:
            with suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr] # which ends it, if it has not failed itself
            raise AotmmError(f"the process of {_CUBLAS} failed with exit code {self._process.wait()}") from error


@contextmanager
def _starved() -> Iterator[_Starved]:
    command = [sys.executable, "-c", "from aotmm.bench.invariant import starved; starved()"]
    environment = os.environ | _STARVED
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield _Starved(process)
        finally:
            process.kill()


def starved() -> None:
    """Answer lines of stdin, for `_Starved`: sizes by the number of launches that are recorded, others by a replay."""
    run: Callable[[], float] = float
    for line in sys.stdin:
        question = json.loads(line)
        if question == _REPLAY:
            answer = run()
        else:
            M, N, K = question
            case = Case(Shape(M, N, K, "nt"), "bf16")
            run, answer = _recorder(case)(lambda x: torch.mm(x.a, x.b, out=x.out), _CUBLAS)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
