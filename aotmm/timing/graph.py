"""Times of launches on the GPU: CUDA graphs of many, measured by events."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

_Set = TypeVar("_Set")
# A rest before a replay, in lengths of that. A GPU lowers its clock by the mean power that it drew before. So all that
# take turns without rests have one clock, and what draws much power seems faster beside another kernel than alone
# (docs/experiments/hopper-kernels.md, "Rests").
REST = 2.0
_PAUSE_CYCLES = 50_000  # about 25 us, more than it takes to launch a graph


def recorded(launch: Callable[[_Set], object], sets: Sequence[_Set]) -> Callable[[], float]:
    """Record the launches of every one of `sets`, in order, on the current stream, not the default one, as a graph.

    No garbage is collected meanwhile: freeing a graph while another is recorded makes the recording fail.

    Returns:
        A function that replays the graph: ns per launch.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            for each in sets:
                launch(each)
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return lambda: elapsed_ns(graph.replay) / len(sets)


def idle(ns: float) -> None:
    """Let this process, and so its GPU, idle for so many nanoseconds."""
    time.sleep(ns * 1e-9)


def elapsed_ns(run: Callable[[], object]) -> float:
    """Return the nanoseconds that the GPU takes for the launches of `run` on the current stream.

    The GPU pauses before, so that it does not wait for the first launch.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no other way
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6
