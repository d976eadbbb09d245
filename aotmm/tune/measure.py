"""Time prebuilt kernels on one GPU: every config of the pack that fits a case, each checked before its time counts.

Graphs of several launches are replayed, with operands that rotate through more memory than a cache holds.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from aotmm.problem import DTYPES
from aotmm.runtime.launcher import Problem
from aotmm.runtime.pack import open_pack
from aotmm.tune.candidates import Candidate, candidates, output_of, problem_of
from aotmm.tune.cases import Case
from aotmm.tune.race import race
from aotmm.tune.workers import Outcome, Running

_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_POOL_BYTES = 2 << 30  # of random operands, and as much for results: many times any cache
_MEMORY_PARTS = 8  # of the GPU's memory; a pool is at most one part
_PART = 1 << 28  # random numbers made at once
# Largest error over |c| + sqrt(K), the size of the sums' own rounding: twice the rounding of the result, and for fp8
# the loss of tensor cores with 14-bit sums. It tells wrong kernels from right ones, not good from better.
_TOLERANCE = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-10}
_NARROW_TOLERANCE = {False: 2.0**-6, True: 2.0**-3}  # by fast_accum


class GpuMeasurer:
    """`workers.Measurer` of cases on GPU number `ordinal` with the pack in `folder`.

    Attributes:
        device: facts of the GPU.
    """

    def __init__(self, folder: Path, ordinal: int) -> None:
        torch.cuda.set_device(ordinal)
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # of the reference
        self._ordinal = ordinal
        self._launcher = open_pack(folder).launcher
        self.device = self._launcher.device(ordinal)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = min(_POOL_BYTES, torch.cuda.get_device_properties(ordinal).total_memory // _MEMORY_PARTS)
        self._random: dict[str, torch.Tensor] = {}
        self._results = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._turn = 0  # operands used so far: rotation continues from one graph to the next

    def measure(self, case: Case, left_out: frozenset[str], tell: Callable[[Running], None]) -> Outcome:
        """Measure as `workers.Measurer`. Raises torch's errors, and DriverError."""
        with torch.cuda.stream(self._stream):
            operands = self._operands(case)
            chosen = candidates(self._launcher, self.device, operands.problem(0), left_out)
            need = max((candidate.plan.workspace_bytes for candidate in chosen), default=0)
            if need > self._workspace.numel():
                self._workspace = torch.empty(need, dtype=torch.uint8, device="cuda")
            return race(chosen, _GpuTimer(self, operands), tell)

    def launch(self, candidate: Candidate, problem: Problem) -> None:
        """Launch a candidate once on the measurer's stream."""
        self._launcher.run(candidate.plan, problem, self._ordinal, self._stream.cuda_stream, self._workspace.data_ptr())

    def turns(self, count: int) -> range:
        """Return the numbers of the next `count` operands."""
        self._turn += count
        return range(self._turn - count, self._turn)

    def _operands(self, case: Case) -> Operands:
        """Return the case's operands, as views of memory that all cases share."""
        sizes = sizes_of(case, output_of(self._launcher, case.dtype))
        a, b, c = sizes
        random = self._random.get(case.dtype)
        if random is None or random.numel() * random.itemsize < 2 * (a + b):
            self._random.clear()
            count = max(self._pool, 2 * (a + b)) // case.element_bytes
            random = self._random[case.dtype] = normal(count, case.dtype, "cuda")
        if self._results.numel() < 2 * c:
            self._results = torch.empty(max(self._pool, 2 * c), dtype=torch.uint8, device="cuda")
        return Operands(case, output_of(self._launcher, case.dtype), random, self._results, sizes)


@dataclass(frozen=True, slots=True)
class Operands:
    """Many sets of operands of one case; results are checked with set 0.

    A and B are views of `random`, C is a view of `results`; `sizes` are the bytes of A, B and C.
    """

    case: Case
    dtype_c: str
    random: torch.Tensor
    results: torch.Tensor
    sizes: tuple[int, int, int]

    def problem(self, number: int) -> Problem:
        """Return the product of set `number`, modulo the number of sets."""
        a, b, c = self.sizes
        at = self.random.data_ptr() + number % (self.random.numel() * self.random.itemsize // (a + b)) * (a + b)
        c_ptr = self.results.data_ptr() + number % (self.results.numel() // c) * c
        return problem_of(self.case, self.dtype_c, at, at + a, c_ptr)

    def result(self) -> torch.Tensor:
        """Return C of set 0, (M, N)."""
        row, case = DTYPES[self.dtype_c], self.case
        flat = self.results[: case.M * case.N * row.bytes].view(getattr(torch, row.torch))
        return flat.view(case.M, case.N)

    def reference(self) -> torch.Tensor:
        """Return the right C of set 0, in fp32."""
        case, start = self.case, self.sizes[0] // self.case.element_bytes
        a = self.random[: case.M * case.K].float()
        b = self.random[start : start + case.K * case.N].float()
        a = a.view(case.M, case.K) if case.layout[0] == "n" else a.view(case.K, case.M).T
        b = b.view(case.K, case.N) if case.layout[1] == "n" else b.view(case.N, case.K).T
        return a @ b


class _GpuTimer:
    """`race.Timer` of one case. Every measurement ends with set 0, whose result is known."""

    def __init__(self, gpu: GpuMeasurer, operands: Operands) -> None:
        self._gpu, self._operands = gpu, operands
        self._want = operands.reference()
        self._size = self._want.abs() + math.sqrt(operands.case.K)

    def single(self, candidate: Candidate) -> float:
        """Time as `race.Timer.single`."""
        self._operands.result().fill_(float("nan"))
        return _timed(lambda: self._gpu.launch(candidate, self._operands.problem(0)))

    def record(self, candidate: Candidate, launches: int) -> Callable[[], float]:
        """Record as `race.Timer.record`."""
        self._operands.result().fill_(float("nan"))
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            for number in (*self._gpu.turns(launches - 1), 0):
                self._gpu.launch(candidate, self._operands.problem(number))
        return lambda: _timed(graph.replay) / launches

    def error(self, candidate: Candidate) -> str | None:  # noqa: ARG002 - it was the last to write set 0
        """Check as `race.Timer.error`."""
        case = self._operands.case
        most = _NARROW_TOLERANCE[case.fast_accum] if case.element_bytes == 1 else _TOLERANCE[self._operands.dtype_c]
        error = float(((self._operands.result() - self._want).abs() / self._size).max())
        return None if error <= most else f"error {error:.3g}, rounding alone is below {most:.3g}"


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Record the launches on the current stream in the block as `graph`.

    No garbage is collected meanwhile: freeing a graph while another is recorded makes the recording fail.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def sizes_of(case: Case, dtype_c: str) -> tuple[int, int, int]:
    """Return the bytes of A, B and C, each up to the possible begin of the next."""
    counts = (
        case.M * case.K * case.element_bytes,
        case.K * case.N * case.element_bytes,
        case.M * case.N * DTYPES[dtype_c].bytes,
    )
    a, b, c = (-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)
    return a, b, c


def normal(count: int, dtype: str, device: str) -> torch.Tensor:
    """Return `count` random numbers N(0, 1) of `dtype`, rounded from fp32, because fp8 has no generator."""
    flat = torch.empty(count, dtype=getattr(torch, DTYPES[dtype].torch), device=device)
    for part in flat.split(_PART):  # type: ignore[no-untyped-call]
        part.copy_(torch.randn(part.numel(), device=device))
    return flat


def _timed(run: Callable[[], object]) -> float:
    """Return the nanoseconds that the GPU takes for the launches of `run`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e6
