"""Products on the GPU against `aotmm.timing.correctness`: exact inputs, and operands in every memory layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aotmm.timing.check import OUTPUT_NAMES, activated
from aotmm.timing.correctness import TF32, U_FP8, U_TENSOR_CORE, Epilogue, allowed, argument, sizes, sum_errors
from aotmm.timing.operands import torch_dtype
from tests.emulators.numerics import LARGEST_INTEGER


@dataclass(frozen=True)
class Judgement:
    """How far a result is from the truth: mismatching elements, and largest error over the two bounds."""

    mismatches: int
    det: float
    prob: float


def lay_out(values: torch.Tensor, dtype: torch.dtype, layout: str, *, pad: int = 0, offset: int = 0) -> torch.Tensor:
    """`values` (..., rows, cols) as a view of poisoned memory.

    Row-major ("n") or column-major ("t"), leading dimension padded by `pad` elements, starting `offset` elements into
    the allocation.
    """
    *batch, rows, cols = values.shape if layout == "n" else values.mT.shape
    pitch = cols + pad
    poison = 127 if dtype is torch.int8 else float("nan")
    count = math.prod(batch) * rows * pitch
    memory = torch.full((count + offset,), poison, device=values.device, dtype=torch.float32).to(dtype)
    view = memory[offset:].view(*batch, rows, pitch)[..., :cols] if count else memory.new_empty(*batch, rows, cols)
    view = view if layout == "n" else view.mT
    view.copy_(values)
    return view


def integers(
    m: int, n: int, k: int, name: str, output: torch.dtype, *, generator: torch.Generator, batch: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 integer matrices whose product has no rounding before the last step, in any order of summation.

    Entries are as large as the accumulator allows and every column of the product has one sign, so that results are
    large enough to need rounding to `output`. For fp8 the sums stay below 2^13, which Hopper's tensor cores keep.
    """
    limit = 2.0**13 if name.startswith("fp8") else 2.0**31 if name == "int8" else 2.0**24
    if output is torch.float16:
        limit = min(limit, 60000.0)
    top = max(1, min(*(LARGEST_INTEGER[part] for part in name.split("-")), int((limit / max(1, k)) ** 0.5)))
    density = min(1.0, limit / max(1, k * top * top))

    def draw(rows: int, cols: int) -> torch.Tensor:
        shape = (*batch, rows, cols)
        values = torch.randint(0, top + 1, shape, generator=generator, device=generator.device).double()
        return values * (torch.rand(shape, generator=generator, device=generator.device) < density)

    sign = torch.randint(0, 2, (1, n), generator=generator, device=generator.device).double() * 2 - 1
    return draw(m, k), draw(k, n) * sign


def random(rows: int, cols: int, name: str, *, generator: torch.Generator) -> torch.Tensor:
    """float64 normal random matrix of values that `name` holds exactly (for tf32: 10 bits of mantissa)."""
    values = torch.randn((rows, cols), generator=generator, device=generator.device)
    if name == "int8":
        return (values * 40).round().clamp(-128, 127).double()
    if name == "tf32":
        return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()
    return values.to(torch_dtype(name)).double()


def judge(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, name: str, epilogue: Epilogue, *, exact: bool, fast: bool = False
) -> Judgement:
    """Compares c with the epilogue of a @ b; a, b are float64 values that are exact in the operands' type.

    exact: everything before the output's rounding is exact, so c must be the correctly rounded value, bit for bit.
    """
    u_acc = U_FP8 if fast or name.startswith("fp8") else U_TENSOR_CORE
    product = a @ b
    errors = sum_errors(a.shape[-1], *sizes(a, b), u_acc, **(TF32 if name == "tf32" else {}))
    bounds = [argument(product, error, epilogue) for error in errors]
    want = activated(bounds[0][0], epilogue.activation, epilogue.slope)
    mismatches = int((c != want.to(c.dtype)).sum()) if exact else 0
    if c.dtype is torch.int32:
        return Judgement(mismatches, float(mismatches > 0), float(mismatches > 0))
    ratios = []
    for x, inexact in bounds:
        ratio = (c.double() - want).abs() / allowed(want, x, inexact, epilogue, OUTPUT_NAMES[c.dtype])
        ratios.append(float(ratio.nan_to_num(nan=float("inf")).max()) if c.numel() else 0.0)
    return Judgement(mismatches, *ratios)
