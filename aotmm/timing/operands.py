"""Random operands of the products that are timed: more sets than the L2 cache holds, in memory that all cases share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from aotmm.problem import DTYPES
from aotmm.timing.correctness import Epilogue
from aotmm.timing.problems import Case

_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_LEAST_SETS, _MOST_SETS = 3, 512
_LEAST_POOL = 2**28  # elements
_SCALES = (0.5, 0.25)
_TF32_MASK = ~((1 << 13) - 1)  # without the lowest bits of the fraction, which tf32 lacks


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for one of `problem.DTYPES`."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch)
    return dtype


@dataclass(frozen=True, slots=True)
class Operands:
    """A (M, K), B (K, N), `out` (M, N), and the case's bias (N), activation and fp32 scales of fp8 operands.

    If the case is a batch, A, B and `out` have it as their first dimension. Of a grouped product B or `out` has one for
    the groups, and `offs` is the end of each. Block scales of A and of B are those that `lib.matmul` has. Their
    benchmark adds them to operands of a pool.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue
    offs: torch.Tensor | None = None
    block_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def unset(self) -> None:
        """Fill C with numbers that no right product has: NaN, or the least integer."""
        self.out.fill_(float("nan") if self.out.is_floating_point() else torch.iinfo(self.out.dtype).min)


class Pool:
    """Random numbers on `device` for all operands, so that a case takes no time to fill memory.

    They are normal, of tf32 such as it holds, and of int8 uniform.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}

    def operands(self, case: Case, cache_bytes: int, output: str = "") -> list[Operands]:
        """Return at least three sets of operands that share no memory, together at least twice `cache_bytes`.

        Of a grouped product one set that is so large is enough: its weights may be gigabytes.

        Args:
            output: the type of C; by default the case's.
        """
        M, N, K = case.shape.M, case.shape.N, case.shape.K
        of_a, of_b, of_c = case.matrices
        inputs, outputs = torch_dtype(case.dtype), torch_dtype(output or case.output)
        least = 1 if case.groups else _LEAST_SETS
        count = max(least, min(_MOST_SETS, math.ceil(2 * cache_bytes / case.bytes)))
        skipped = [offset // inputs.itemsize for offset in (case.offset_a, case.offset_b)]
        sizes = [_padded(skipped[0] + of_a * M * K, inputs), _padded(skipped[1] + of_b * K * N, inputs)]
        numbers = self._take(case.dtype, count * sum(sizes))
        parts = iter(torch.split(numbers[: count * sum(sizes)], sizes * count))
        outs = torch.empty(count, _padded(of_c * M * N, outputs), device=self.device, dtype=outputs)
        bias = torch.randn(N, device=self.device, dtype=outputs) if case.activation else None
        scaled = case.dtype.startswith("fp8")
        scales = [torch.tensor(scale, device=self.device) if scaled else None for scale in _SCALES]
        epilogue = Epilogue(case.activation or "none", 0.0, bias, *scales)
        ends = list(accumulate(case.groups.sizes)) if case.groups else None
        offs = None if ends is None else torch.tensor(ends, device=self.device, dtype=torch.int32)
        return [
            Operands(
                _matrices(next(parts)[skipped[0] :], of_a, M, K, case.shape.layout[0]),
                _matrices(next(parts)[skipped[1] :], of_b, K, N, case.shape.layout[1]),
                _matrices(out, of_c, M, N, "n"),
                epilogue,
                offs,
            )
            for out in outs
        ]

    def _take(self, dtype: str, count: int) -> torch.Tensor:
        """Return at least `count` random numbers of `dtype`."""
        memory = self._memory.pop(dtype, None)
        if memory is None or len(memory) < count:
            del memory  # before its successor is allocated
            least = _LEAST_POOL if self.device.type == "cuda" else 0
            memory = _random(dtype, max(count, least), self.device)
        self._memory[dtype] = memory
        return memory


def _random(name: str, count: int, device: torch.device) -> torch.Tensor:
    dtype = torch_dtype(name)
    if dtype is torch.int8:
        return torch.randint(-128, 128, (count,), device=device, dtype=dtype)
    memory = torch.randn(count, device=device, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    if name == "tf32":
        memory.view(torch.int32).bitwise_and_(_TF32_MASK)
    return memory.to(dtype)


def _padded(count: int, dtype: torch.dtype) -> int:
    """Return the least number of elements from `count` on that keeps the next operand aligned."""
    step = _ALIGNMENT // dtype.itemsize
    return math.ceil(count / step) * step


def _matrices(memory: torch.Tensor, batch: int, rows: int, cols: int, layout: str) -> torch.Tensor:
    """Return a matrix, or a batch of more than one, at the beginning of `memory`."""
    values = memory[: batch * rows * cols]
    found = values.view(batch, rows, cols) if layout == "n" else values.view(batch, cols, rows).mT
    return found if batch > 1 else found[0]
