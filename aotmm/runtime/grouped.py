"""Grouped products of torch tensors: the op aotmm::grouped_mm, its shapes, and its gradients, which are grouped too."""

from __future__ import annotations

import functools
from typing import Any

import torch

from aotmm.problem import LEAKY_SLOPE
from aotmm.runtime import ops
from aotmm.runtime.autograd import by_columns
from aotmm.runtime.views import grouped_shape

_MATRIX = 2  # dimensions
_BATCH = 3
_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor offs, Tensor? bias=None, Tensor? scale_a=None, Tensor? scale_b=None, int activation=0, "
    f"float slope={LEAKY_SLOPE}, bool allow_tf32=False, bool fast_accum=False, bool batch_invariant=False, "
    "int library=0, int expected_rows=0"
)
_SCHEMAS = (
    f"grouped_mm({_ARGUMENTS}, int out_dtype=-1) -> Tensor",
    f"grouped_mm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)",
)
_OUT_DTYPE = 9  # position behind the bias
# From the bias on: torch leaves out defaults at the end.
_DEFAULTS: tuple[Any, ...] = (None, None, None, 0, LEAKY_SLOPE, False, False, False, 0, 0, -1)


def _fake(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None = None, *options: Any
) -> torch.Tensor:
    del bias
    code = options[_OUT_DTYPE] if len(options) > _OUT_DTYPE else -1
    return a.new_empty(grouped_shape(a, b, offs), dtype=ops.result_dtype(a.dtype, code))


def _fake_out(*operands: object, out: torch.Tensor, **options: object) -> torch.Tensor:  # noqa: ARG001
    return out


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, offs, bias, scale_a, scale_b, activation, _, *options, _ = inputs + _DEFAULTS[len(inputs) - 3 :]
    of_a, of_b = ctx.needs_input_grad[:2]
    if activation:
        raise NotImplementedError("a grouped product with a fused activation has no gradient; apply it to the result")
    if scale_a is not None or scale_b is not None or a.dim() == b.dim() == _BATCH:
        raise NotImplementedError("a grouped product with scales or of two batches has no gradient")
    ctx.save_for_backward(a if of_b else None, b if of_a else None, offs)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.types = a.dtype, b.dtype
    ctx.turned = by_columns(b)
    ctx.options = options
    ctx.count = len(inputs)
    del output


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a, b and bias.

    Elements behind the last group have no gradient: what is there is undefined, as in the product.
    """
    a, b, offs = ctx.saved_tensors
    plain = (None, None, None, 0, LEAKY_SLOPE, *ctx.options, -1)
    product = torch.ops.aotmm.grouped_mm.default
    gradient = gradient.to(ctx.types[0])
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        of_a = product(gradient, b.mT, offs, *plain)
    if ctx.needs_input_grad[1]:
        of_b = product(gradient.mT, a, offs, *plain).mT if ctx.turned else product(a.mT, gradient, offs, *plain)
    if ctx.bias is not None and ctx.needs_input_grad[3]:
        shape, dtype = ctx.bias
        ones = gradient.new_ones(1, gradient.shape[0])
        # a sum, which tf32 would only make less precise
        output = (None, None, None, 0, LEAKY_SLOPE, False, *ctx.options[1:], ops.output_code(torch.float32))
        of_groups = product(ones, gradient, offs, *output)[:, 0]
        of_bias = (of_groups if len(shape) == _MATRIX else of_groups.sum(0)).to(dtype)
    return (of_a, of_b, None, of_bias, *(None,) * len(_DEFAULTS))[: ctx.count]


@functools.cache
def register() -> torch.library.Library:
    """Register the fake of aotmm::grouped_mm and its gradients, as long as the result lives."""
    fragment = torch.library.Library("aotmm", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        fragment.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))  # type: ignore[no-untyped-call]
    torch.library.register_fake("aotmm::grouped_mm", _fake, lib=fragment)
    torch.library.register_fake("aotmm::grouped_mm.out", _fake_out, lib=fragment)
    torch.library.register_autograd("aotmm::grouped_mm", _gradients, setup_context=_setup, lib=fragment)
    return fragment
