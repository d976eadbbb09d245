"""The price of `batch_invariant`: layers of real models on random rows, against our own choice and others' ways.

Others are a published Triton kernel of one tile (`providers.one_tile`), where Triton is installed, and cuBLAS without a
workspace, which then does not split K. Its variables are read once, so it is timed by a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
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
from aotmm.timing.check import truth
from aotmm.timing.draw import distribution
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape

_COUNT, _MOST = 120, 8192  # products: about 4 minutes; rows
_BANDS = {"1 to 64 rows": (1, 64), "65 to 1023 rows": (65, 1023), "1024 rows on": (1024, _MOST), "all": (1, _MOST)}
_STARVED = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
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


def _measure(cases: list[Case]) -> dict[str, dict[str, float]]:
    """Return by band of rows the others' times over ours: geometric mean, 5 % quantile and least."""
    others = _starved(cases)
    ratios: list[dict[str, float]] = []
    for case, starved in zip(cases, others, strict=True):
        us = _times(case, ours=True)
        mine = us.pop("ours")
        ratios.append({name: each / mine for name, each in (us | {_CUBLAS: starved}).items()})
    return {
        f"{band}, {name}": _figures(
            [row[name] for row, case in zip(ratios, cases, strict=True) if least <= case.shape.M <= most]
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


def _figures(ratios: list[float]) -> dict[str, float]:
    if not ratios:
        return {}
    return {
        "mean": statistics.geometric_mean(ratios),
        "5 %": quantile(ratios, at_most=False),
        "least": min(ratios),
        "products": len(ratios),
    }


def _times(case: Case, *, ours: bool) -> dict[str, float]:
    """Return microseconds of a product by each way of this process: ours and Triton's, or torch's alone."""
    pool = Pool(torch.device("cuda"))
    sets, stopwatch = pool.operands(case, torch.cuda.get_device_properties().L2_cache_size), GraphStopwatch()
    calls: dict[str, Call] = {"torch": lambda x: torch.mm(x.a, x.b, out=x.out)}
    if ours:
        calls = {"ours": partial(_call, invariant=True), _OWN: partial(_call, invariant=False)}
        if importlib.util.find_spec("triton") is not None:
            from aotmm.bench.providers.one_tile import matmul

            calls[_TILE] = lambda x: matmul(x.a, x.b, x.out)
    runs = {}
    for name, call in calls.items():
        call(sets[0])
        truth(sets[0].a, sets[0].b, sets[0].out.dtype, sets[0].epilogue).confirm(sets[0].out, f"the product by {name}")
        runs[name] = repeated(stopwatch, call, sets)
    return {name: statistics.median(samples) for name, samples in in_turn(runs).items()}


def _call(operands: Operands, *, invariant: bool) -> object:
    return library().matmul(operands.a, operands.b, out=operands.out, batch_invariant=invariant)


def _starved(cases: list[Case]) -> list[float]:
    """Return the microseconds of torch's products in a process whose cuBLAS has no workspace."""
    sizes = json.dumps([(case.shape.M, case.shape.N, case.shape.K) for case in cases])
    command = [sys.executable, "-c", "from aotmm.bench.invariant import starved; starved()", sizes]
    done = subprocess.run(command, env=os.environ | _STARVED, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def starved() -> None:
    """Time the products of the sizes in the first argument, and write microseconds to stdout. For `_starved`."""
    cases = [Case(Shape(M, N, K, "nt"), "bf16") for M, N, K in json.loads(sys.argv[1])]
    found = [_times(case, ours=False)["torch"] for case in cases]
    sys.stdout.write(json.dumps(found) + "\n")
