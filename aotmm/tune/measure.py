"""Time prebuilt kernels on one GPU: every config of the pack that fits a case, each checked before its time counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from aotmm.problem import BLOCK_SCALE_K
from aotmm.runtime.launcher import Problem
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from aotmm.timing.check import truth
from aotmm.timing.graph import idle, recorded
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case
from aotmm.tune.candidates import Candidate, output_of, problem_of, to_time
from aotmm.tune.race import HOPELESS, HOPELESS_BY_OWN_TABLE, race
from aotmm.tune.workers import Outcome, Running

# Part of the nominal speed of dense products. Of slower ones the order of plans hardly depends on power
# (docs/experiments/tuning.md, "Rests").
_BUSY = 0.3


class GpuMeasurer:
    """`workers.Measurer` of cases on GPU number `ordinal` with the pack in `folder`.

    Attributes:
        device: facts of the GPU.
    """

    def __init__(self, folder: Path, ordinal: int) -> None:
        torch.cuda.set_device(ordinal)
        self._ordinal = ordinal
        self._launcher = open_pack(folder).launcher
        self.device = self._launcher.device(ordinal)
        known = self._launcher.origin(self.device).measured
        self._hopeless = HOPELESS_BY_OWN_TABLE if known else HOPELESS
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = Pool(torch.device("cuda", ordinal))
        self._cache_bytes = torch.cuda.get_device_properties(ordinal).L2_cache_size
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cuda")

    def measure(self, case: Case, left_out: frozenset[str], heartbeat: Callable[[Running], None]) -> Outcome:
        """Measure as `workers.Measurer`. Raises torch's errors, and DriverError."""
        with torch.cuda.stream(self._stream):
            output = output_of(self._launcher, case.dtype)
            sets = self._pool.operands(case, self._cache_bytes, output)
            memories = [(row.a, row.b, row.out, *_block_scales(case)) for row in sets]
            problems = [problem_of(case, output, *(memory.data_ptr() for memory in each)) for each in memories]
            chosen = to_time(self._launcher, self.device, problems[0], left_out)
            need = max((candidate.plan.workspace_bytes for candidate in chosen), default=0)
            if need > self._workspace.numel():
                self._workspace = torch.empty(need, dtype=torch.uint8, device="cuda")
            busy = busy_ns(case, target(self._launcher.arch).tflops)
            return race(chosen, GpuTimer(self.launch, problems, sets[0], busy), heartbeat, self._hopeless)

    def launch(self, candidate: Candidate, problem: Problem) -> None:
        """Launch a candidate once on the measurer's stream."""
        self._launcher.run(candidate.plan, problem, self._ordinal, self._stream.cuda_stream, self._workspace.data_ptr())


def busy_ns(case: Case, tflops: float) -> float:
    """Return the longest time of a case that keeps tensor cores busy (`race.Timer.busy_ns`).

    Args:
        tflops: nominal speed in fp16; those in other types are taken to be that times 2 / `element_bytes`.
    """
    return case.batch * case.shape.macs * case.element_bytes / (_BUSY * tflops * 1e3)


def _block_scales(case: Case) -> tuple[torch.Tensor, ...]:
    """Return the scales of A and B of a case with block scales: ones, so that the product is that without any."""
    if not case.block_scaled:
        return ()
    blocks, wide = (math.ceil(size / BLOCK_SCALE_K) for size in (case.shape.K, case.shape.N))
    return torch.ones(case.shape.M * blocks, device="cuda"), torch.ones(wide * blocks, device="cuda")


class GpuTimer:
    """`race.Timer` of one case. Every measurement ends with the first set, whose result is known."""

    def __init__(
        self, launch: Callable[[Candidate, Problem], None], problems: Sequence[Problem], first: Operands, busy_ns: float
    ) -> None:
        """Keep the `problems`, one for each set of operands; `first` has the operands of the first."""
        self.sets, self.busy_ns = len(problems), busy_ns
        self._launch, self._problems, self._first = launch, problems, first
        self._truth = truth(first.a, first.b, first.out.dtype)

    def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
        """Record as `race.Timer.record`."""
        self._first.unset()
        in_turn = [self._problems[number % len(self._problems)] for number in range(1 - launches, 1)]
        return recorded(lambda problem: self._launch(candidate, problem), in_turn)

    def error(self, candidate: Candidate) -> str | None:  # noqa: ARG002 - it was the last to write the first set
        """Check as `race.Timer.error`."""
        error = self._truth.error(self._first.out)
        return None if error <= 1 else f"its error is {error:.3g} times what is allowed"

    def rest(self, ns: float) -> None:
        """Rest as `race.Timer.rest`."""
        idle(ns)
