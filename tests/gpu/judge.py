"""What a right product is, on the GPU: exact inputs, error bounds, and operands in every memory layout.

u_acc = 2^-23 (tensor cores cut), u_out by output type. Sources: Blanchard, Higham et al. 2020 (block FMA error
analysis) for the deterministic bound of a sum; the probabilistic one has six standard deviations for the worst case.
Each scale and the bias round once more, to fp32 (docs/numerics.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aotmm.problem import DTYPES

U_ACC = 2.0**-23
U_FP32 = 2.0**-24  # of the epilogue
U_OUT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
ETA = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}
# Hopper's fp8 tensor cores keep about 14 bits between two promotions to fp32. Source: DeepSeek-V3 technical report.
U_FP8 = 2.0**-13
# Largest integer that the type holds with every smaller one.
LARGEST_INTEGER = {"fp16": 2048, "bf16": 256, "fp32": 4096, "tf32": 2048, "fp8e5": 8, "fp8e4": 16, "int8": 127}


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


def activated(x: torch.Tensor, activation: str, slope: float = 0.01) -> torch.Tensor:
    """The activation of float64 values x, with torch's formulas; leaky_relu in the kernels' fp32 arithmetic."""
    functional = torch.nn.functional
    if activation == "relu":
        return functional.relu(x)
    if activation == "leaky_relu":
        return torch.where(x >= 0, x.float(), x.float() * torch.tensor(slope, device=x.device)).double()
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "gelu_tanh":
        # torch's formula, (1 + tanh(y)) / 2 = sigmoid(2 y), without its cancellation
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
    return {"none": x.clone, "silu": lambda: functional.silu(x), "sigmoid": x.sigmoid, "tanh": x.tanh}[activation]()


# Largest slope of each activation: by how much it can magnify an error of the sum.
LIPSCHITZ = {"gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1, "sigmoid": 0.25}


def epilogue_error(x: torch.Tensor, y: torch.Tensor, activation: str) -> torch.Tensor:
    """What evaluating the epilogue in fp32 may add, for the exact argument x and value y: a few units of 2^-23.

    The exponential of sigmoids has a relative error that grows with its argument, and overflows before y vanishes;
    gelu's argument is a fit as well; tanh is the difference of a sigmoid and a constant.
    """
    if activation in ("gelu", "gelu_tanh", "silu", "sigmoid"):
        argument = 1.6 * (x + 0.0448 * x**3) if activation in ("gelu", "gelu_tanh") else x
        fit = 2.0**-19 * x.abs() if activation == "gelu" else 0.0
        return fit + 2.0**-22 * y.abs() * (4 + argument.abs()) + 2.0**-120
    return (2.0**-19 if activation == "tanh" else 2.0**-22) * y.abs() + 2.0**-24 * x.abs()


@dataclass(frozen=True)
class Epilogue:
    """What is done to the sums: fp32 scales (M, 1) and (1, N), a bias that broadcasts, an activation."""

    activation: str = "none"
    slope: float = 0.01
    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None


def judge(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, name: str, epilogue: Epilogue, *, exact: bool, fast: bool = False
) -> Judgement:
    """Compares c with the epilogue of a @ b; a, b are float64 values that are exact in the operands' type.

    exact: everything before the output's rounding is exact, so c must be the correctly rounded value, bit for bit.
    """
    product, spread, square = a @ b, a.abs() @ b.abs(), ((a * a) @ (b * b)).sqrt()
    scales = [factor.double() for factor in (epilogue.scale_a, epilogue.scale_b) if factor is not None]
    for factor in scales:
        product, spread, square = product * factor, spread * factor.abs(), square * factor.abs()
    x = product if epilogue.bias is None else product + epilogue.bias.double()
    want = activated(x, epilogue.activation, epilogue.slope)
    mismatches = int((c != want.to(c.dtype)).sum()) if exact else 0
    if c.dtype is torch.int32:
        return Judgement(mismatches, float(mismatches > 0), float(mismatches > 0))
    k = a.shape[-1]
    u_acc = U_FP8 if name.startswith("fp8") else U_ACC
    if fast:
        u_acc = U_FP8
    lipschitz = max(
        LIPSCHITZ.get(epilogue.activation, 1.0), epilogue.slope if epilogue.activation == "leaky_relu" else 0
    )
    rounding = U_OUT[c.dtype]
    det_inner = (k * u_acc / (1 - k * u_acc) if k * u_acc < 1 else float("inf")) * spread
    prob_inner = (8 * u_acc * max(1.0, k / 16) ** 0.5 * 6) * square
    scaled = len(scales) * U_FP32 / (1 - len(scales) * U_FP32)
    added = 0.0 if epilogue.bias is None else U_FP32
    error = (c.double() - want).abs()
    ratios = []
    for summed in (det_inner, prob_inner):
        inner = summed + scaled * (product.abs() + summed)
        inner = inner + added * (x.abs() + inner)
        inexact = lipschitz * inner + epilogue_error(x, want, epilogue.activation)
        bound = inexact + rounding * (want.abs() + inexact) + ETA[c.dtype]
        ratios.append(float((error / bound).nan_to_num(nan=float("inf")).max()) if c.numel() else 0.0)
    return Judgement(mismatches, *ratios)
