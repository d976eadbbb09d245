"""Grouped against row-major order of tiles: the chosen plans, and the same with groups of one row."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from aotmm.bench.protocol import GraphStopwatch, in_turn, repeated
from aotmm.bench.providers.own import launches, library, plan_of, problems_of
from aotmm.timing.check import truth
from aotmm.timing.operands import Pool
from aotmm.timing.problems import Case, Shape

_SIZES = (1024, 2048, 4096, 8192, 16384)


def measure() -> dict[str, dict[str, float]]:
    """Return `group_m` of the chosen plan by size, and its speedup over groups of 1: medians over rounds in turn.

    fp16, layout nn.
    """
    pool, stopwatch = Pool(torch.device("cuda")), GraphStopwatch()
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    found: dict[str, dict[str, float]] = {"group_m": {}, "speedup": {}}
    for size in _SIZES:
        case = Case(Shape(size, size, size, "nn"), "fp16")
        sets = pool.operands(case, cache_bytes)
        right = truth(sets[0].a, sets[0].b, sets[0].out.dtype)
        chosen = plan_of(case, sets[0])
        launcher = library().launcher(sets[0].a.device.index)
        runs = {}
        for order, plan in (("grouped", chosen), ("row-major", replace(chosen, group_m=1))):
            call = launches(launcher, plan, problems_of(case, sets), sets[0].a.device)
            sets[0].unset()
            call(sets[0])
            right.confirm(sets[0].out, f"{plan} on {case}")
            runs[order] = repeated(stopwatch, call, sets)
        times = in_turn(runs)
        found["group_m"][f"{size}^3"] = chosen.group_m
        found["speedup"][f"{size}^3"] = statistics.median(
            rows / groups for rows, groups in zip(times["row-major"], times["grouped"], strict=True)
        )
    return found
