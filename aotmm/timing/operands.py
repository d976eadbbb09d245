"""Random operands of the products that are timed: more sets than the L2 cache holds, in memory that all cases share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aotmm.problem import DTYPES
from aotmm.timing.correctness import Epilogue
from aotmm.timing.problems import Case

_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_LEAST_SETS, _MOST_SETS = 3, 512
_LEAST_POOL = 2**28  # elements
_SCALES = (0.5, 0.25)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for one of `problem.DTYPES`."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch)
    return dtype


@dataclass(frozen=True, slots=True)
class Operands:
    """A (M, K), B (K, N), `out` (M, N), and the case's bias (N), activation and fp32 scales of fp8 operands.

    If the case is a batch, A, B and `out` have it as their first dimension.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue


class Pool:
    """Normal random numbers on `device` for all operands, so that a case takes no time to fill memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def operands(self, case: Case, cache_bytes: int, output: str = "") -> list[Operands]:
        """Return at least three sets of operands that share no memory, together at least twice `cache_bytes`.

        Args:
            output: the type of C; by default the case's.
        """
        M, N, K, batch = case.shape.M, case.shape.N, case.shape.K, case.batch
        inputs, outputs = torch_dtype(case.dtype), torch_dtype(output or case.output)
        count = max(_LEAST_SETS, min(_MOST_SETS, math.ceil(2 * cache_bytes / case.bytes)))
        skipped = [offset // inputs.itemsize for offset in (case.offset_a, case.offset_b)]
        sizes = [_padded(skipped[0] + batch * M * K, inputs), _padded(skipped[1] + batch * K * N, inputs)]
        numbers = self._take(inputs, count * sum(sizes))
        parts = iter(torch.split(numbers[: count * sum(sizes)], sizes * count))
        outs = torch.empty(count, _padded(batch * M * N, outputs), device=self.device, dtype=outputs)
        bias = torch.randn(N, device=self.device, dtype=outputs) if case.activation else None
        scaled = case.element_bytes == 1
        scales = [torch.tensor(scale, device=self.device) if scaled else None for scale in _SCALES]
        epilogue = Epilogue(case.activation or "none", 0.0, bias, *scales)
        return [
            Operands(
                _matrices(next(parts)[skipped[0] :], batch, M, K, case.shape.layout[0]),
                _matrices(next(parts)[skipped[1] :], batch, K, N, case.shape.layout[1]),
                _matrices(out, batch, M, N, "n"),
                epilogue,
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


def _matrices(memory: torch.Tensor, batch: int, rows: int, cols: int, layout: str) -> torch.Tensor:
    """Return a matrix, or a batch of more than one, at the beginning of `memory`."""
    values = memory[: batch * rows * cols]
    found = values.view(batch, rows, cols) if layout == "n" else values.view(batch, cols, rows).mT
    return found if batch > 1 else found[0]
