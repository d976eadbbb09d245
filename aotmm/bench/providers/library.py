"""torch's own products: cuBLAS, cuBLASLt, rocBLAS or hipBLASLt, as torch chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.timing.operands import Operands, torch_dtype
from aotmm.timing.problems import Case

_INT_ROWS, _INT_STEP = 16, 8  # of torch._int_mm
_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda product: product,
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
}


def _mm(case: Case, _: Sequence[Operands]) -> Call:
    if case.activation is not None:
        raise NotRunError("torch.mm has no epilogue")
    product = torch.mm if case.batch == 1 else torch.bmm
    return lambda operands: product(operands.a, operands.b, out=operands.out)


def _scaled_mm(case: Case, _: Sequence[Operands]) -> Call:
    output = torch_dtype(case.output)

    def call(operands: Operands) -> object:
        return torch._scaled_mm(  # noqa: SLF001 - torch has no public name for it
            operands.a.contiguous(),  # it takes rows of A and columns of B alone: others are copied
            operands.b.mT.contiguous().mT,
            scale_a=operands.epilogue.scale_a,
            scale_b=operands.epilogue.scale_b,
            out_dtype=output,
            use_fast_accum=case.fast_accum,
            out=operands.out,
        )

    return call


def _int_mm(case: Case, _: Sequence[Operands]) -> Call:
    M, N, K = case.shape.M, case.shape.N, case.shape.K
    if M <= _INT_ROWS or N % _INT_STEP or K % _INT_STEP:
        raise NotRunError(f"torch._int_mm takes more than {_INT_ROWS} rows, and multiples of {_INT_STEP} of N and K")
    return lambda operands: torch._int_mm(operands.a, operands.b, out=operands.out)  # noqa: SLF001 - likewise


def _unfused(case: Case, _: Sequence[Operands]) -> Call:
    activate = _ACTIVATIONS[case.activation]

    def call(operands: Operands) -> object:
        return activate(torch.mm(operands.a, operands.b, out=operands.out).add_(operands.epilogue.bias))

    return call


def _addmm(case: Case, _: Sequence[Operands]) -> Call:
    activate = _ACTIVATIONS[case.activation]

    def call(operands: Operands) -> object:
        return activate(torch.addmm(operands.epilogue.bias, operands.a, operands.b, out=operands.out))

    return call


# cuBLAS may add the parts of a split sum in 16 bits, as torch allows it by default
# (torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction): one more rounding.
PROVIDERS = (
    Provider("torch", "torch.mm(out=), or torch.bmm: cuBLAS, or rocBLAS on AMD", _mm, roundings=2),
    Provider(
        "scaled_mm",
        "torch._scaled_mm, one scale per operand, and copies where A or B does not lie along K",
        _scaled_mm,
        roundings=2,
    ),
    Provider("int_mm", "torch._int_mm", _int_mm),
    Provider("unfused", "torch.mm, then one kernel that adds the bias and one that activates", _unfused, roundings=4),
    Provider("addmm", "torch.addmm, which fuses the bias where cuBLASLt can, then the activation", _addmm, roundings=3),
)
