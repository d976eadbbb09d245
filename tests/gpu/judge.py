"""What a right product is, on the GPU: exact inputs, error bounds, and operands in every memory layout.

u_acc = 2^-23 (tensor cores cut), u_out by output type. Sources: Blanchard, Higham et al. 2020 (block FMA error
analysis) for `bound_det`; the probabilistic bound replaces the worst case by six standard deviations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aotmm.problem import DTYPES

U_ACC = 2.0**-23
U_OUT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
ETA = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}
# Hopper's fp8 tensor cores keep about 14 bits between two promotions to fp32. Source: DeepSeek-V3 technical report.
U_FP8 = 2.0**-13
# Largest integer that the type holds with every smaller one.
LARGEST_INTEGER = {"fp16": 2048, "bf16": 256, "fp32": 4096, "tf32": 2048, "fp8e5": 8, "fp8e4": 16}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for one of `aotmm.problem.DTYPES`."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch)
    return dtype


@dataclass(frozen=True)
class Judgement:
    """How far a result is from the truth: mismatching elements, and largest error over the two bounds."""

    mismatches: int
    det: float
    prob: float


def lay_out(values: torch.Tensor, dtype: torch.dtype, layout: str, *, pad: int = 0, offset: int = 0) -> torch.Tensor:
    """`values` (rows, cols) as a view of poisoned memory.

    Row-major ("n") or column-major ("t"), leading dimension padded by `pad` elements, starting `offset` elements into
    the allocation.
    """
    rows, cols = values.shape if layout == "n" else values.shape[::-1]
    pitch = cols + pad
    memory = torch.full((rows * pitch + offset,), float("nan"), device=values.device, dtype=torch.float32).to(dtype)
    view = memory[offset:].view(rows, pitch)[:, :cols] if rows * pitch else memory.new_empty(rows, cols)
    view = view if layout == "n" else view.T
    view.copy_(values)
    return view


def integers(
    m: int, n: int, k: int, name: str, output: torch.dtype, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 integer matrices whose product has no rounding before the last step, in any order of summation.

    Entries are as large as the accumulator allows and every column of the product has one sign, so that results are
    large enough to need rounding to `output`. For fp8 the sums stay below 2^13, which Hopper's tensor cores keep.
    """
    limit = 2.0**13 if name.startswith("fp8") else 2.0**24
    if output is torch.float16:
        limit = min(limit, 60000.0)
    top = max(1, min(LARGEST_INTEGER[name], int((limit / max(1, k)) ** 0.5)))
    density = min(1.0, limit / max(1, k * top * top))

    def draw(rows: int, cols: int) -> torch.Tensor:
        values = torch.randint(0, top + 1, (rows, cols), generator=generator, device=generator.device).double()
        keep = torch.rand((rows, cols), generator=generator, device=generator.device) < density
        return values * keep

    sign = torch.randint(0, 2, (1, n), generator=generator, device=generator.device).double() * 2 - 1
    return draw(m, k), draw(k, n) * sign


def random(rows: int, cols: int, name: str, *, generator: torch.Generator) -> torch.Tensor:
    """float64 normal random matrix of values that `name` holds exactly (for tf32: 10 bits of mantissa)."""
    values = torch.randn((rows, cols), generator=generator, device=generator.device)
    if name == "tf32":
        return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()
    return values.to(torch_dtype(name)).double()


def activated(product: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of an exact product, in the fp32 arithmetic that the kernels have."""
    if activation == "leaky_relu":
        return torch.where(product >= 0, product.float(), product.float() * torch.tensor(0.01, device=product.device))
    return product


def judge(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, name: str, activation: str, *, exact: bool) -> Judgement:
    """Compares c with activation(a @ b); a, b are float64 values that are exact in the operands' type."""
    product, spread = a @ b, a.abs() @ b.abs()
    want = activated(product, activation)
    mismatches = int((c != want.to(c.dtype)).sum()) if exact else 0
    k = a.shape[1]
    u_acc = U_FP8 if name.startswith("fp8") else U_ACC
    rounding = U_OUT[c.dtype]
    det_inner = (k * u_acc / (1 - k * u_acc) if k * u_acc < 1 else float("inf")) * spread
    prob_inner = (8 * u_acc * max(1.0, k / 16) ** 0.5 * 6) * ((a * a) @ (b * b)).sqrt()
    error = (c.double() - want.double()).abs()
    ratios = []
    for inner in (det_inner, prob_inner):
        bound = inner + rounding * (product.abs() + inner) + ETA[c.dtype] + 2.0**-24 * product.abs()
        ratios.append(float((error / bound).nan_to_num(nan=float("inf")).max()) if c.numel() else 0.0)
    return Judgement(mismatches, *ratios)
