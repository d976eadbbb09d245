"""The check of a product: a comparison with float64, within the proven error bound of its sums.

u_acc = 2^-23: tensor cores truncate where fp32 rounds. Source: Blanchard, Higham et al. 2020 (block FMA error analysis)
for the deterministic bound; the probabilistic one replaces the worst case by six standard deviations. Both must hold.
Each scale rounds the sum once more, to fp32 (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from aotmm.bench.cases import Case, Operands

_U_ACC = 2.0**-23
# Hopper's fp8 tensor cores keep about 14 bits between two promotions to fp32. Source: DeepSeek-V3 technical report.
_U_FP8 = 2.0**-13
_SCALES = 2 * 2.0**-24 / (1 - 2 * 2.0**-24)  # relative error of two roundings to fp32
_U_OUT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
_BAND = 64  # one of so many rows is compared: no tile has fewer, so every tile and every column is checked
_ALL = 256  # up to so many rows, every one is compared
_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
}
_SLOPE: dict[str | None, float] = {"gelu": 1.13}  # largest slope of an activation, which magnifies errors of the sum


@dataclass(frozen=True, slots=True)
class Truth:
    """Right values of some rows of C: exact values, and the error allowed to a result that is rounded once.

    Attributes:
        rows: their numbers.
        want: float64 values. allowed: the smaller of the two bounds.
        rounded: error allowed to one more rounding to the output's type.
    """

    rows: torch.Tensor
    want: torch.Tensor
    allowed: torch.Tensor
    rounded: torch.Tensor


def truth(case: Case, operands: Operands) -> Truth:
    """Return the truth about `operands`, in float64."""
    M, K = case.shape.M, case.shape.K
    rows = torch.arange(M, device=operands.a.device)
    if M > _ALL:
        starts = rows[::_BAND]
        rows = torch.cat([(starts + torch.randint_like(starts, _BAND)).clamp(max=M - 1), rows[-1:]])
    a, b = operands.a[rows].double(), operands.b.double()
    scale = float(operands.scale_a) * float(operands.scale_b) if case.scaled else 1.0
    product = a @ b * scale
    x = product if case.activation is None else product + operands.bias.double()
    want = _ACTIVATIONS[case.activation](x)
    u_acc, u_out = _U_FP8 if case.scaled else _U_ACC, _U_OUT[case.output]
    spread = a.abs() @ b.abs()
    worst = K * u_acc / (1 - K * u_acc) * spread if K * u_acc < 1 else torch.full_like(spread, float("inf"))
    likely = 6 * 8 * u_acc * max(1.0, K / 16) ** 0.5 * (a.square_() @ b.square_()).sqrt()
    sums = scale * torch.minimum(worst, likely)
    if case.scaled:
        sums += _SCALES * (product.abs() + sums)
    # The epilogue in fp32: gelu subtracts numbers of size x.
    inexact = _SLOPE.get(case.activation, 1.0) * sums + 2.0**-21 * x.abs()
    allowed = inexact + u_out * (want.abs() + inexact) + _SMALLEST[case.output]
    return Truth(rows, want, allowed, 2 * u_out * (scale * spread + x.abs() + want.abs()))


def error(truth: Truth, out: torch.Tensor, roundings: int) -> float:
    """Return the largest error of `out` (M, N) over the allowed one; infinite if any element is NaN.

    Args:
        roundings: number of roundings to the output's type.
    """
    if not bool(out.isfinite().all()):
        return float("inf")
    allowed = truth.allowed + (roundings - 1) * truth.rounded
    return float(((out[truth.rows].double() - truth.want).abs() / allowed).max())
