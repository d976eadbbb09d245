"""Time of a product on the GPU against torch's (cuBLAS, rocBLAS) in the same run.

Both run as replayed graphs over rotating random operands, in turn, so that neither launch cost nor a warm cache nor
drifting clocks count for one of them. Results are compared with a float64 product first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

import aotmm

_ROTATED_BYTES = 256 << 20  # more than any L2 cache holds
_REPLAYED_MACS = 10**10  # work in one replay of small products, long against the events' resolution
_PAIRS = 9
_SHAPES = (
    (256, 256, 256, "nn"),
    (512, 512, 512, "nn"),
    (1024, 1024, 1024, "nn"),
    (2048, 2048, 2048, "nn"),
    (4096, 4096, 4096, "nn"),
    (4096, 4096, 4096, "nt"),
    (8192, 8192, 8192, "nn"),
    (16, 4096, 4096, "nt"),
    (512, 4096, 4096, "nt"),
    (3000, 3080, 2056, "nn"),
    (3000, 3080, 2057, "nn"),
    (3000, 3080, 2057, "nt"),
    (3000, 3080, 2057, "tn"),
    (3000, 3080, 2057, "tt"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One shape: microseconds of both, ratio torch / aotmm (above 1 is faster than torch), and its spread."""

    shape: str
    aotmm_us: float
    torch_us: float
    ratio: float
    least: float
    most: float


def measure() -> list[Row]:
    """fp16 products of several shapes."""
    lib = aotmm.load()
    rows = []
    for m, n, k, layout in _SHAPES:
        sets = max(2, min(64, _ROTATED_BYTES // (2 * (m * k + k * n + m * n))))
        operands = [(_random(m, k, layout[0]), _random(k, n, layout[1])) for _ in range(sets)]
        outs = [torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16) for _ in range(sets)]
        ours, theirs = lib.matmul, torch.mm
        _check(ours, operands[0], outs[0])
        repeats = max(1, _REPLAYED_MACS // (m * n * k * sets))
        mine, other = _graph(ours, operands, outs, repeats), _graph(theirs, operands, outs, repeats)
        pairs = [(replay(mine) / (sets * repeats), replay(other) / (sets * repeats)) for _ in range(_PAIRS + 2)][2:]
        ratios = [y / x for x, y in pairs]
        rows.append(
            Row(
                f"{m}x{n}x{k} {layout}",
                statistics.median(x for x, _ in pairs),
                statistics.median(y for _, y in pairs),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            )
        )
    return rows


def _random(rows: int, cols: int, layout: str) -> torch.Tensor:
    if layout == "t":
        return torch.randn(cols, rows, device="cuda", dtype=torch.float16).T
    return torch.randn(rows, cols, device="cuda", dtype=torch.float16)


def _check(
    multiply: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    a, b = (x.double() for x in operands)
    multiply(*operands, out=out)
    bound = 2.0**-11 * (a @ b).abs() + 2.0**-20 * a.shape[1] ** 0.5 * ((a * a) @ (b * b)).sqrt() + 2.0**-24
    worst = float(((out.double() - a @ b).abs() / bound).nan_to_num(nan=float("inf")).max())
    if worst > 1:
        raise RuntimeError(f"{tuple(a.shape)} x {tuple(b.shape)} is wrong: error / bound {worst}")


def _graph(
    multiply: Callable[..., torch.Tensor],
    operands: list[tuple[torch.Tensor, torch.Tensor]],
    outs: list[torch.Tensor],
    repeats: int,
) -> torch.cuda.CUDAGraph:
    multiply(*operands[0], out=outs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for (a, b), out in zip(operands, outs, strict=True):
                multiply(a, b, out=out)
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
