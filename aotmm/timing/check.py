"""The check of a product on its device: a comparison of many rows with float64, by the bounds of `correctness`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotmm.timing.correctness import (
    TF32,
    U_FP8,
    U_OUT,
    U_TENSOR_CORE,
    Epilogue,
    allowed,
    argument,
    block_scaled,
    block_scaled_error,
    sizes,
    sum_errors,
)
from aotmm.timing.operands import torch_dtype

OUTPUT_NAMES = {torch_dtype(name): name for name in U_OUT}
_BAND = 16  # one of so many rows is compared, and every column: hardly a tile has fewer rows
_ALL = 256  # up to so many rows, every one is compared


@dataclass(frozen=True, slots=True)
class Truth:
    """Right values of some rows of C: exact values, and the error allowed to a result that is rounded once.

    Attributes:
        where: the index of these rows of C; of a batch those of some members.
        want: float64 values. allowed: the smaller of the two bounds.
        rounded: error allowed to one more rounding to the output's type.
    """

    where: tuple[torch.Tensor, ...]
    want: torch.Tensor
    allowed: torch.Tensor
    rounded: torch.Tensor

    def error(self, out: torch.Tensor, roundings: int = 1) -> float:
        """Return the largest error of `out`, C, over the allowed one; infinite if any element is not finite.

        Args:
            roundings: number of roundings to the output's type.
        """
        bound = self.allowed + (roundings - 1) * self.rounded
        largest = ((out[self.where].double() - self.want).abs() / bound).max()
        return float(largest.where(out.isfinite().all(), math.inf))  # one wait for the device

    def confirm(self, out: torch.Tensor, name: str) -> None:
        """Raise RuntimeError, with `name`, if `out` is not right."""
        error = self.error(out)
        if not error <= 1:
            raise RuntimeError(f"{name} is wrong: its error is {error:.3g} times what is allowed")


def truth(
    a: torch.Tensor,
    b: torch.Tensor,
    output: torch.dtype,
    epilogue: Epilogue | None = None,
    offs: torch.Tensor | None = None,
    block_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Truth:
    """Return the truth about the product of a (M, K) and b (K, N), or batches of them, in type `output`, in float64.

    Of a grouped product every group is compared, of groups of rows their first and their last row too.

    Args:
        a, b: fp16, bf16, fp32 or fp8, of tf32 what it holds; or int8.
        epilogue: with a bias of N or (M, N), and scales of one element.
        offs: ends of groups of K, or of rows of a if b has a matrix for each; the last one is the whole size. A grouped
            product has no bias here.
        block_scales: of a and b, which are then one matrix each, or a and its groups' matrices.
    """
    count = a.shape[-2]
    rows = torch.arange(count, device=a.device)
    if count > _ALL:
        starts = rows[::_BAND]
        rows = torch.cat([(starts + torch.randint_like(starts, _BAND)).clamp(max=count - 1), rows[-1:]])
    where: tuple[torch.Tensor, ...] = (rows,)
    join = torch.cat
    if offs is not None and b.dim() > a.dim():
        begins = torch.cat([offs.new_zeros(1), offs[:-1]])
        filled = offs > begins
        rows = torch.cat([rows, begins[filled], offs[filled] - 1]).sort().values
        where = (rows,)
    elif offs is not None:
        where, join = (torch.arange(len(offs), device=a.device)[:, None], rows), torch.stack
    elif a.dim() > 2:  # noqa: PLR2004 - a batch
        members = torch.tensor([0, len(a) // 2, len(a) - 1], device=a.device)
        a, b, where = a[members], b[members], (members[:, None], rows)
    epilogue = epilogue or Epilogue()
    if epilogue.bias is not None and epilogue.bias.dim() > 1:
        epilogue = replace(epilogue, bias=epilogue.bias[rows])
    u_acc = 0.0 if a.dtype is torch.int8 else U_FP8 if a.itemsize == 1 else U_TENSOR_CORE
    u_out = U_OUT[OUTPUT_NAMES[output]]
    kind = TF32 if a.dtype is torch.float32 else {}  # of `sum_errors`
    pairs = _products(a[..., rows, :], b, offs, rows)
    if block_scales is not None:
        of_a = block_scales[0][rows]
        scales = _products(of_a, block_scales[1], offs if b.dim() > a.dim() else None, rows)
        pairs = (
            block_scaled(x.double(), y.double(), of_x.double(), of_y.double())
            for (x, y), (of_x, of_y) in zip(pairs, scales, strict=True)
        )
    found = [_sums(x, y, u_acc, kind) for x, y in pairs]
    if block_scales is not None:
        found = [(product, spread, block_scaled_error(error, spread)) for product, spread, error in found]
    product, spread, error = (join(each) for each in zip(*found, strict=True))
    del found
    x, error = argument(product, error, epilogue)
    want = activated(x, epilogue.activation, epilogue.slope)
    scaled_spread, _ = argument(spread, 0.0, replace(epilogue, bias=None))
    rounded = 2 * u_out * (abs(scaled_spread) + abs(x) + abs(want))
    return Truth(where, want, allowed(want, x, error, epilogue, OUTPUT_NAMES[output]), rounded)


def _products(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the operands of each product that `truth` compares; `a` has these rows alone."""
    if offs is None:
        yield a, b
    elif b.dim() > a.dim():
        parts = a.tensor_split(torch.searchsorted(rows, offs[:-1].long()).tolist())
        yield from ((part, b[group]) for group, part in enumerate(parts) if len(part))
    else:
        ends = offs[:-1].tolist()
        yield from zip(a.tensor_split(ends, dim=1), b.tensor_split(ends), strict=True)


def _sums(
    a: torch.Tensor, b: torch.Tensor, u_acc: float, kind: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the product, the sizes of its sums, and the smaller of their two bounds."""
    a, b = a.double(), b.double()
    spread, deviation = sizes(a, b)
    return a @ b, spread, torch.minimum(*sum_errors(a.shape[-1], spread, deviation, u_acc, **kind))


def activated(x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """Return the activation of float64 values, by torch's formulas; leaky_relu in the kernels' fp32 arithmetic."""
    if activation == "leaky_relu":
        return torch.where(x >= 0, x.float(), x.float() * torch.tensor(slope, device=x.device)).double()
    if activation == "gelu_tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 y), without its cancellation
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
    if activation == "none":
        return x
    found: torch.Tensor = getattr(torch.nn.functional, activation)(x)
    return found
