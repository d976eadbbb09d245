"""Gradients of products of matrices and of batches of matrices: each is again a product, of transposed views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from aotmm.problem import LEAKY_SLOPE
from aotmm.runtime import ops
from aotmm.runtime.views import by_views, result_shape

# Arguments of aotmm::mm after the tensors: activation (none here), slope, allow_tf32, fast_accum, batch_invariant,
# library, out_dtype.
Options = tuple[int, float, bool, bool, bool, int, int]
_INVARIANT = 4  # of these
_PLAIN = (0, LEAKY_SLOPE, False, False, False, 0, -1)  # the op's defaults
_Gradients = tuple[torch.Tensor | None, ...]
_BATCHED = 3  # dimensions


def transformed() -> bool:
    """Return whether functorch (torch.func) or forward-mode AD is active."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0  # noqa: SLF001 - no public getters


def tracked(*tensors: torch.Tensor | None) -> bool:
    """Return whether functorch or forward-mode AD tracks one of the tensors."""
    if not transformed():
        return False
    wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - no public getter
    unpack: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
    return any(x is not None and (wrapped(x) or unpack(x).tangent is not None) for x in tensors)


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options) -> torch.Tensor:
    """Return a @ b + bias of matrices or batches of them, differentiable any number of times.

    Args:
        a, b, bias: as `torch.ops.aotmm.mm` takes them; fp16, bf16 or fp32.
    """
    if transformed():
        return _Transformed.apply(a, b, bias, options)  # type: ignore[no-untyped-call,no-any-return]
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return record(a, b, bias, options)
    return _forward(a, b, bias, options)


def _forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options) -> torch.Tensor:
    if options[-1] < 0:  # the types that the direct call takes here, fp16 and bf16, depend on no other option
        product = ops.registered().direct_call(options[-2], a, b, None, bias, None, options[_INVARIANT])
        if product is not None and product is not NotImplemented:
            return product  # type: ignore[no-any-return]
    if bias is None and options == _PLAIN:  # the op fills in its defaults faster than Python passes them
        return torch.ops.aotmm.mm.default(a, b)  # type: ignore[no-any-return]
    return torch.ops.aotmm.mm.default(a, b, bias, None, None, *options)  # type: ignore[no-any-return]


class _Recorded(torch.autograd.Function):
    """Function for reverse mode only: without `setup_context` it costs less than half."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options
    ) -> torch.Tensor:
        of_a, of_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if of_b else None, b if of_a else None)  # no activation is kept for a frozen weight
        ctx.rest = a.shape, b.shape, by_columns(b), None if bias is None else bias.shape, options
        return _forward(a, b, bias, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> _Gradients:
        return _gradients(ctx, gradient)


# `multiply` if a gradient is required and nothing transforms it: Function.apply without its support of functorch.
record: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Options], torch.Tensor]
record = super(torch.autograd.Function, _Recorded).apply


class _Transformed(torch.autograd.Function):
    """Function for torch.func and forward mode."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, options: Options) -> torch.Tensor:
        return _forward(a, b, bias, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004 - torch's
        a, b, bias, options = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.set_materialize_grads(False)
        ctx.rest = a.shape, b.shape, by_columns(b), None if bias is None else bias.shape, options

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> _Gradients:
        return (None,) * 4 if gradient is None else _gradients(ctx, gradient)

    @staticmethod
    def jvp(
        ctx: Any, of_a: torch.Tensor | None, of_b: torch.Tensor | None, of_bias: torch.Tensor | None, *_: None
    ) -> torch.Tensor:
        """Return the tangent; each term is the bias of the product that adds the next."""
        a, b = ctx.saved_tensors
        options = ctx.rest[-1]
        if of_a is None and of_b is None:
            assert of_bias is not None  # noqa: S101 - torch asks for none if there is no tangent at all
            return of_bias.expand(result_shape(a, b)).clone()
        tangent = of_bias
        if of_a is not None:
            tangent = multiply(of_a, b, tangent, options)
        if of_b is not None:
            tangent = multiply(a, of_b, tangent, options)
        assert tangent is not None  # noqa: S101 - one of the two is there
        return tangent

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
    ) -> tuple[torch.Tensor, int]:
        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return multiply(a, b, bias, options)

        return over_batch(product, info.batch_size, in_dims, a, b, bias), 0


def over_batch(
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    size: int,
    in_dims: tuple[Any, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rows_scaled: bool = False,
) -> torch.Tensor:
    """Compute `torch.vmap` of `product`, the new dimension first; in_dims are its places in a, b and bias."""
    rank = max(x.dim() - (dim is not None) for x, dim in zip((a, b), in_dims, strict=False))

    def aligned(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Return x with the new dimension first, then as many dimensions of 1 as the result's rank needs."""
        x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
        return x.reshape(x.shape[0], *(1,) * (rank - x.dim() + 1), *x.shape[1:])

    a, b = aligned(a, in_dims[0]), aligned(b, in_dims[1])
    if a.shape[0] == b.shape[0] == 1:
        a = a.expand(size, *a.shape[1:])
    if bias is not None and in_dims[2] is not None:
        bias = aligned(bias, in_dims[2])
    return by_views(product, a, b, bias, rows_scaled=rows_scaled)


def _gradients(ctx: Any, gradient: torch.Tensor) -> _Gradients:
    """Return the gradients of a, b and bias for the result's, by the kernels of the operands' dtype."""
    a, b = ctx.saved_tensors
    shape_a, shape_b, turned, shape_of_bias, (*rest, _) = ctx.rest
    options = (*rest, -1)
    needed = ctx.needs_input_grad
    of_a = _of_a(gradient.to(b.dtype), shape_a, b, options) if needed[0] else None
    of_b = _of_b(gradient.to(a.dtype), a, shape_b, options, turned=turned) if needed[1] else None
    of_bias = gradient.sum_to_size(shape_of_bias) if needed[2] else None
    return of_a, of_b, of_bias, None


def _of_a(gradient: torch.Tensor, shape: torch.Size, b: torch.Tensor, options: Options) -> torch.Tensor:
    if not _shared(shape, gradient):
        return multiply(gradient, b.mT, None, options)
    # The sum over the batch is one product with the batch as part of K: not a view, but rounded once.
    batch, rows, columns = gradient.shape
    long = gradient.transpose(0, 1).reshape(rows, batch * columns)
    b = b.expand(batch, *b.shape[-2:])
    return multiply(long, b.mT.reshape(batch * columns, b.shape[-2]), None, options).reshape(shape)


def by_columns(b: torch.Tensor) -> bool:
    """Return whether columns of b are contiguous, not rows, as in W.T of a layer's weight.

    torch copies a gradient that lies otherwise.
    """
    return b.stride(-2) == 1 != b.stride(-1)


def _of_b(
    gradient: torch.Tensor, a: torch.Tensor, shape: torch.Size, options: Options, *, turned: bool
) -> torch.Tensor:
    """Return the gradient of b, in b's memory order unless members of a batch must have the bits of single products."""
    shared = _shared(shape, gradient)
    if gradient.dim() < _BATCHED or shared:  # a weight's: a sum over all rows depends on them anyway
        activation, slope, tf32, fast_accum, _, library, output = options
        options = (activation, slope, tf32, fast_accum, False, library, output)
    if shared:
        batch, rows, columns = gradient.shape
        a = a.expand(batch, *a.shape[-2:]).reshape(batch * rows, a.shape[-1])
        gradient = gradient.reshape(batch * rows, columns)
    if turned and not options[_INVARIANT]:
        found = multiply(gradient.mT, a, None, options).mT
    else:
        found = multiply(a.mT, gradient, None, options)
    return found.reshape(shape) if shared else found


def _shared(operand: torch.Size, gradient: torch.Tensor) -> bool:
    """Return whether an operand of this shape was multiplied with every matrix of a batch."""
    return gradient.dim() == _BATCHED and (len(operand) < _BATCHED or operand[0] != gradient.shape[0])
