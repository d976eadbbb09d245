"""Grouped against row-major order of tiles: kernels that differ only in GROUP_M (`ablation.toml`)."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import torch

import aotmm
from aotmm.bench.protocol import GraphStopwatch, in_turn, repeated
from aotmm.errors import SpecError
from aotmm.runtime.launcher import Launcher, Problem
from aotmm.timing.check import truth
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape

CONFIGS = Path(__file__).parent / "ablation.toml"
_ALIGNED = 16  # bytes of every access of a kernel for aligned rows
_PAIR = 2
_SIZES = (1024, 2048, 4096, 8192, 16384)


def measure(pack: Path) -> dict[str, dict[str, float]]:
    """Return the speedup of the grouped kernel by tile and size: medians over rounds in turn. fp16, layout nn.

    Args:
        pack: folder of the pack that was built from `CONFIGS`.

    Raises:
        SpecError: the pack has no two kernels that differ only in GROUP_M.
    """
    launcher = aotmm.load(pack).launcher(torch.cuda.current_device())
    pairs = _pairs(launcher)
    if not pairs:
        raise SpecError(f"no two kernels in {pack} differ in GROUP_M alone; build it with --configs {CONFIGS}")
    pool, stopwatch = Pool(torch.device("cuda")), GraphStopwatch()
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    found: dict[str, dict[str, float]] = {name: {} for name in pairs}
    for size in _SIZES:
        case = Case(Shape(size, size, size, "nn"), "fp16")
        sets = pool.operands(case, cache_bytes)
        right = truth(sets[0].a, sets[0].b, sets[0].out.dtype)
        for name, numbers in pairs.items():
            runs = {}
            for order, number in numbers.items():
                call = partial(_launch, launcher, number)
                sets[0].out.fill_(float("nan"))
                call(sets[0])
                right.confirm(sets[0].out, f"{launcher.kernels[number].name} on {case}")
                runs[order] = repeated(stopwatch, call, sets)
            times = in_turn(runs)
            found[name][f"{size}^3"] = statistics.median(
                rows / groups for rows, groups in zip(times["row-major"], times["grouped"], strict=True)
            )
    return found


def _pairs(launcher: Launcher) -> dict[str, dict[str, int]]:
    """Return the numbers of the kernels for aligned rows in "row-major" and "grouped" order, by their tile."""
    found: dict[str, dict[str, int]] = {}
    for number, kernel in enumerate(launcher.kernels):
        config = kernel.config
        if kernel.role == "product" and kernel.vector_bytes == _ALIGNED:
            tile = f"{config.block_m}x{config.block_n}x{config.block_k}, {config.num_warps} warps"
            found.setdefault(tile, {})["row-major" if config.group_m == 1 else "grouped"] = number
    return {tile: pair for tile, pair in found.items() if len(pair) == _PAIR}


def _launch(launcher: Launcher, number: int, operands: Operands) -> None:
    """Launch kernel `number` on torch's current stream."""
    (M, K), N = operands.a.shape, operands.b.shape[1]
    a, b, c = (tensor.data_ptr() for tensor in (operands.a, operands.b, operands.out))
    problem = Problem(M, N, K, (K, 1), (N, 1), (N, 1), "fp16", "fp16", "fp16", a_ptr=a, b_ptr=b, c_ptr=c)
    launcher.launch(number, problem, torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
