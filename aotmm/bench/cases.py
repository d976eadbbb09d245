"""The measured cases: products of each sweep, their providers, and random operands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from aotmm.problem import DTYPES
from aotmm.tune.shapes import Shape, Shapes

_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_LEAST_SETS, _MOST_SETS = 3, 512
_LEAST_POOL = 2**28  # elements
_SCALES = (0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Case:
    """One product that is measured.

    Attributes:
        dtype: of A and B (`problem.DTYPES`). C has it too; for fp8 operands C is bf16.
        activation: that after a bias vector of N; None for the plain product.
        fast_accum: fp8 sums in the tensor cores' own precision.
    """

    shape: Shape
    dtype: str
    activation: str | None = None
    fast_accum: bool = False

    def __str__(self) -> str:
        bias = f", bias and {self.activation}" if self.activation else ""
        return f"{self.shape} {self.dtype}{bias}{', fast sums' if self.fast_accum else ''}"

    @property
    def scaled(self) -> bool:
        """Return whether A and B have scales."""
        return self.storage.itemsize == 1

    @property
    def storage(self) -> torch.dtype:
        """Return the type of A and B."""
        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype].torch)
        return dtype

    @property
    def output(self) -> torch.dtype:
        """Return the type of C."""
        return torch.bfloat16 if self.storage.itemsize == 1 else self.storage

    @property
    def bytes(self) -> int:
        """Return the least traffic: A and B read, C written."""
        M, N, K = self.shape.M, self.shape.N, self.shape.K
        return (M * K + K * N) * self.storage.itemsize + M * N * self.output.itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of one sweep's shapes: every dtype with every variant, by every provider."""

    dtypes: tuple[str, ...]
    providers: tuple[str, ...]
    variants: tuple[dict[str, str | bool], ...] = ({},)


_BOTH = ("fp16", "bf16")
_PLAIN = Plan(_BOTH, ("aotmm", "aotmm_plain", "torch"))
_SQUARES = Plan(_BOTH, ("aotmm", "aotmm_plain", "torch", "tutorial", "cutlass"))
PLANS = {
    "squares256": _SQUARES,
    "squares128": _SQUARES,
    "llm": _PLAIN,
    "tall_skinny": _PLAIN,
    "big_k": _PLAIN,
    "ragged": _PLAIN,
    "unaligned": _PLAIN,
    "fp8": Plan(("fp8e4",), ("aotmm", "aotmm_plain", "scaled_mm"), ({"fast_accum": False}, {"fast_accum": True})),
    "epilogue": Plan(
        _BOTH, ("aotmm", "aotmm_plain", "unfused", "addmm"), ({"activation": "relu"}, {"activation": "gelu"})
    ),
}


@dataclass(slots=True)
class Work:
    """A case with the sweeps that it belongs to and the providers that multiply it."""

    case: Case
    sweeps: tuple[str, ...]
    providers: tuple[str, ...]


def work(
    shapes: Shapes, sweeps: Sequence[str], *, dtypes: Sequence[str] = (), providers: Sequence[str] = (), every: int = 1
) -> list[Work]:
    """Return the cases of `sweeps`, each once, although sweeps share shapes.

    Args:
        dtypes, providers: only these; all of a sweep's plan if empty.
        every: take one shape in `every` of each sweep.

    Raises:
        SpecError: there is no sweep of that name.
    """
    found: dict[Case, Work] = {}
    for name in sweeps:
        plan = PLANS[shapes.sweep(name).name]
        multipliers = tuple(x for x in plan.providers if not providers or x in providers)
        for case in _cases(plan, shapes.sweep(name).shapes[::every], dtypes):
            known = found.setdefault(case, Work(case, (), ()))
            known.sweeps = (*known.sweeps, name)
            known.providers = tuple(dict.fromkeys((*known.providers, *multipliers)))
    return list(found.values())


def _cases(plan: Plan, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Iterator[Case]:
    for dtype in plan.dtypes:
        if not dtypes or dtype in dtypes:
            for shape in shapes:
                for variant in plan.variants:
                    yield Case(shape, dtype, **variant)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Operands:
    """A (M, K), B (K, N), `out` (M, N); for cases that have them, a bias (N) and one fp32 scale for each operand."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor


class Pool:
    """Normal random numbers on `device` for all operands, so that a case takes no time to fill memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def operands(self, case: Case, cache_bytes: int) -> list[Operands]:
        """Return at least three sets of operands that share no memory, together at least twice `cache_bytes`."""
        M, N, K = case.shape.M, case.shape.N, case.shape.K
        count = max(_LEAST_SETS, min(_MOST_SETS, math.ceil(2 * cache_bytes / case.bytes)))
        sizes = [_padded(M * K, case.storage), _padded(K * N, case.storage)]
        numbers = self._take(case.storage, count * sum(sizes))
        places = iter(torch.split(numbers[: count * sum(sizes)], sizes * count))
        outs = torch.empty(count, _padded(M * N, case.output), device=self.device, dtype=case.output)
        bias = self._take(case.output, N)[:N]
        scale_a, scale_b = (torch.tensor(scale, device=self.device) for scale in _SCALES)
        return [
            Operands(
                _matrix(next(places), M, K, case.shape.layout[0]),
                _matrix(next(places), K, N, case.shape.layout[1]),
                out[: M * N].view(M, N),
                bias,
                scale_a,
                scale_b,
            )
            for out in outs
        ]

    def _take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return at least `count` random numbers of `dtype`."""
        memory = self._memory.pop(dtype, None)
        if memory is None or len(memory) < count:
            del memory  # before its successor is allocated
            drawn = torch.bfloat16 if dtype.itemsize == 1 else dtype
            least = _LEAST_POOL if self.device.type == "cuda" else 0
            memory = torch.randn(max(count, least), device=self.device, dtype=drawn).to(dtype)
        self._memory[dtype] = memory
        return memory


def _padded(count: int, dtype: torch.dtype) -> int:
    """Return the least number of elements from `count` on that keeps the next operand aligned."""
    step = _ALIGNMENT // dtype.itemsize
    return math.ceil(count / step) * step


def _matrix(memory: torch.Tensor, rows: int, cols: int, layout: str) -> torch.Tensor:
    values = memory[: rows * cols]
    return values.view(rows, cols) if layout == "n" else values.view(cols, rows).T
