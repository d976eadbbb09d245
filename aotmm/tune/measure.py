"""Times prebuilt kernels on one GPU: every schedule of the pack that fits a case, each checked before its time counts.

A graph of several launches is replayed, over operands that rotate through more memory than a cache holds; candidates
take turns, so that clocks that drift do not favour one. A candidate that is clearly slower than the best so far is
timed once, which is enough for the models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from aotmm.problem import DTYPES
from aotmm.runtime.launcher import Problem
from aotmm.runtime.pack import open_pack
from aotmm.table import Sample
from aotmm.tune.candidates import Candidate, candidates, output_of, problem_of
from aotmm.tune.cases import Case
from aotmm.tune.workers import Outcome, Running

_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_POOL_BYTES = 2 << 30  # of random operands, and as much of results: many times any cache
_REPLAY_NS = 700_000  # of one graph: long against the launch of a graph and the events' resolution
_LEAST_NS = 2_000  # shorter than any launch
_LAUNCHES = (2, 100)  # in one graph
_SINGLE_NS = 1_000_000  # from which on one launch is long enough to be timed alone
_CONTENDER = 1.5  # times the best so far, up to which a candidate stays in the race
_ROUNDS = 5
# Largest error over |c| + sqrt(K), the size of the sums' own rounding: twice the rounding of the result, and for fp8
# what tensor cores with 14-bit sums lose. It is for telling wrong kernels from right ones, not good from better.
_TOLERANCE = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-10}
_NARROW_TOLERANCE = {False: 2.0**-6, True: 2.0**-3}  # by fast_accum


class GpuMeasurer:
    """Measures cases on GPU number `ordinal` with the pack in `folder`; `workers.Measurer`."""

    def __init__(self, folder: Path, ordinal: int) -> None:
        torch.cuda.set_device(ordinal)
        self._ordinal = ordinal
        self._launcher = open_pack(folder).launcher
        self._device = self._launcher.device(ordinal)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._random: dict[str, torch.Tensor] = {}
        self._results = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._turn = 0  # operands used so far: rotation goes on from one graph to the next
        torch.backends.cuda.matmul.fp32_precision = "ieee"

    def measure(self, case: Case, left_out: frozenset[str], tell: Callable[[Running], None]) -> Outcome:
        """As `workers.Measurer`. Raises torch's errors, and DriverError."""
        with torch.cuda.stream(self._stream):
            return self._measure(case, left_out, tell)

    def _measure(self, case: Case, left_out: frozenset[str], tell: Callable[[Running], None]) -> Outcome:
        dtype_c = output_of(self._launcher, case.dtype)
        operands = self._operands(case, dtype_c)
        race = _Race(self, operands, tell)
        chosen = candidates(self._launcher, self._device, operands.problem(0), left_out)
        need = max((candidate.plan.workspace_bytes for candidate in chosen), default=0)
        if need > self._workspace.numel():
            self._workspace = torch.empty(need, dtype=torch.uint8, device="cuda")
        for candidate in chosen:
            race.enter(candidate)
        return Outcome(tuple(race.finish()), race.wrong)

    def launch(self, candidate: Candidate, problem: Problem) -> None:
        """One launch of a candidate on the measurer's stream."""
        self._launcher.run(candidate.plan, problem, self._ordinal, self._stream.cuda_stream, self._workspace.data_ptr())

    def turns(self, count: int) -> range:
        """The numbers of the next `count` operands."""
        self._turn += count
        return range(self._turn - count, self._turn)

    def _operands(self, case: Case, dtype_c: str) -> _Operands:
        """The case's operands, as views of random data that all cases share."""
        a, b = (_aligned(size * case.width) for size in (case.M * case.K, case.K * case.N))
        c = _aligned(case.M * case.N * DTYPES[dtype_c].bytes)
        pool = min(_POOL_BYTES, torch.cuda.get_device_properties(self._ordinal).total_memory // 8)
        random = self._random.get(case.dtype)
        if random is None or random.numel() * random.itemsize < 2 * (a + b):
            self._random.clear()
            random = self._random[case.dtype] = _normal(max(pool, 2 * (a + b)) // case.width, case.dtype)
        if self._results.numel() < 2 * c:
            self._results = torch.empty(max(pool, 2 * c), dtype=torch.uint8, device="cuda")
        return _Operands(case, dtype_c, random, self._results, (a, b, c))


@dataclass(frozen=True, slots=True)
class _Operands:
    """Many sets of operands of one case; set 0 is the one that results are checked with.

    `random` is what A and B are views of, `results` what C is; `sizes` are the bytes of A, B and C.
    """

    case: Case
    dtype_c: str
    random: torch.Tensor
    results: torch.Tensor
    sizes: tuple[int, int, int]

    def problem(self, number: int) -> Problem:
        """The product of set `number`, modulo as many as there are."""
        a, b, c = self.sizes
        at = self.random.data_ptr() + number % (self.random.numel() * self.random.itemsize // (a + b)) * (a + b)
        c_ptr = self.results.data_ptr() + number % (self.results.numel() // c) * c
        return problem_of(self.case, self.dtype_c, at, at + a, c_ptr)

    def result(self) -> torch.Tensor:
        """C of set 0, (M, N)."""
        case, size = self.case, DTYPES[self.dtype_c].bytes
        flat = self.results[: case.M * case.N * size].view(getattr(torch, DTYPES[self.dtype_c].torch))
        return flat.view(case.M, case.N)

    def reference(self) -> torch.Tensor:
        """What C of set 0 must be, in fp32."""
        case, (a, _, _) = self.case, self.sizes
        first = self.random[: case.M * case.K].float()
        second = self.random[a // case.width :][: case.K * case.N].float()
        first = first.view(case.M, case.K) if case.layout[0] == "n" else first.view(case.K, case.M).T
        second = second.view(case.K, case.N) if case.layout[1] == "n" else second.view(case.N, case.K).T
        return first @ second


class _Race:
    """The candidates of one case: each is tried once, and those that may be the fastest take turns afterwards."""

    def __init__(self, gpu: GpuMeasurer, operands: _Operands, tell: Callable[[Running], None]) -> None:
        self.wrong: dict[str, str] = {}
        self._gpu, self._operands, self._tell = gpu, operands, tell
        self._want = operands.reference()
        self._allowed = self._want.abs() + math.sqrt(operands.case.K)
        case = operands.case
        self._tolerance = _NARROW_TOLERANCE[case.fast_accum] if case.width == 1 else _TOLERANCE[operands.dtype_c]
        self._best = math.inf
        self._slow: list[Sample] = []  # timed once, and out
        self._graphs: list[tuple[Candidate, torch.cuda.CUDAGraph, int, float]] = []  # launches, ns of the first replay

    def enter(self, candidate: Candidate) -> None:
        """Tries a candidate; it is in the race if it is right and not much slower than the best so far."""
        if candidate.schedule in self.wrong:
            return
        if candidate.plan.programmatic and self._hopeless(candidate):
            return
        self._tell(Running(candidate.family, candidate.schedule, str(candidate)))
        self._operands.result().fill_(float("nan"))
        ns = self._timed(lambda: self._gpu.launch(candidate, self._operands.problem(0)))
        limit = max(_SINGLE_NS, 2 * _CONTENDER * self._best)
        if ns > limit:  # perhaps because it was loaded
            ns = self._timed(lambda: self._gpu.launch(candidate, self._operands.problem(0)))
        if ns > limit:
            if self._right(candidate):
                self._slow.append(candidate.sample(ns))
            return
        graph, count, ns = self._record(candidate, min(ns, _CONTENDER * self._best))
        if count * ns < _REPLAY_NS / 2 and count < _LAUNCHES[1]:
            graph, count, ns = self._record(candidate, ns)
        if not self._right(candidate):
            return
        self._best = min(self._best, ns)
        if ns > _CONTENDER * self._best:
            self._slow.append(candidate.sample(ns))
        else:
            self._graphs.append((candidate, graph, count, ns))

    def finish(self) -> Iterator[Sample]:
        """Lets what is left in the race take turns, and gives every sample."""
        yield from (sample for sample in self._slow if sample.schedule not in self.wrong)
        rows = [row for row in self._graphs if row[0].schedule not in self.wrong]
        racing = [row for row in rows if row[3] <= _CONTENDER * self._best]
        yield from (candidate.sample(ns) for candidate, _, _, ns in rows if ns > _CONTENDER * self._best)
        times: list[list[float]] = [[] for _ in racing]
        for number in range(_ROUNDS):
            # Forth and back: no candidate always follows the same one.
            for place in range(len(racing))[:: 1 if number % 2 == 0 else -1]:
                candidate, graph, count, _ = racing[place]
                self._tell(Running(candidate.family, candidate.schedule, str(candidate)))
                times[place].append(self._timed(graph.replay) / count)
        for (candidate, *_), found in zip(racing, times, strict=True):
            yield candidate.sample(statistics.median(found))

    def _hopeless(self, candidate: Candidate) -> bool:
        """Whether the same plan without programmatic launches was out of the race at once."""
        plain = candidate.sample(1)._replace(programmatic=False)[:-1]
        return any(sample[:-1] == plain for sample in self._slow)

    def _record(self, candidate: Candidate, expected_ns: float) -> tuple[torch.cuda.CUDAGraph, int, float]:
        """A graph that was replayed, its launches, and their time in ns.

        The last launch is of set 0, whose result is known.
        """
        count = max(_LAUNCHES[0], min(_LAUNCHES[1], round(_REPLAY_NS / max(expected_ns, _LEAST_NS))))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for number in (*self._gpu.turns(count - 1), 0):
                self._gpu.launch(candidate, self._operands.problem(number))
        finally:
            graph.capture_end()
        graph.replay()
        return graph, count, self._timed(graph.replay) / count

    def _timed(self, run: Callable[[], object]) -> float:
        """Nanoseconds that the GPU takes for what `run` launches."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6

    def _right(self, candidate: Candidate) -> bool:
        """Whether the result of set 0 is the product; notes it as wrong if not."""
        error = float(((self._operands.result() - self._want).abs() / self._allowed).max())
        if not error <= self._tolerance:
            self.wrong[candidate.schedule] = (
                f"{candidate}: error {error:.3g}, at most {self._tolerance:.3g} is rounding"
            )
        return error <= self._tolerance


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _normal(count: int, dtype: str) -> torch.Tensor:
    """`count` random numbers N(0, 1) of `dtype`, made in parts because fp8 has no generator of its own."""
    flat = torch.empty(count, dtype=getattr(torch, DTYPES[dtype].torch), device="cuda")
    for part in flat.split(1 << 28):  # type: ignore[no-untyped-call]
        part.copy_(torch.randn(part.numel(), device="cuda"))
    return flat
