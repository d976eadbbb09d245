"""The product as steps that torch sees: casts of autocast, gradients, views, activation around the op aotmm::mm.

`Library.matmul` uses this module if its faster path does not apply: gradients, autocast, torch.func, torch.compile,
tensor subclasses. `torch.ops.aotmm.matmul` is the same as an op, which torch decomposes into these steps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from aotmm.problem import ACTIVATIONS, LEAKY_SLOPE
from aotmm.runtime import autograd, dtensor, ops
from aotmm.runtime.views import by_views

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CAST = (torch.float16, torch.bfloat16, torch.float32)  # types that autocast casts
_DIFFERENTIABLE = (torch.float16, torch.bfloat16, torch.float32)
_NAMES = tuple(ACTIVATIONS)
_OUT_DTYPE = 8  # position behind the bias in the schema of aotmm::mm
_SCHEMA = (
    "matmul(Tensor a, Tensor b, Tensor? bias=None, Tensor? scale_a=None, Tensor? scale_b=None, str activation='none', "
    f"float slope={LEAKY_SLOPE}, bool fast_accum=False, bool batch_invariant=False, "
    "ScalarType? out_dtype=None, int library=0) -> Tensor"
)


def needed(a: torch.Tensor, b: torch.Tensor, *factors: torch.Tensor | None) -> bool:
    """Return whether a product of these tensors needs this module."""
    recording = torch.is_grad_enabled()
    return (
        (recording and (a.requires_grad or b.requires_grad))
        or autograd.transformed()
        or torch.is_autocast_enabled("cuda")
        or type(a) not in _PLAIN
        or type(b) not in _PLAIN
        or any(
            factor is not None and (type(factor) not in _PLAIN or (recording and factor.requires_grad))
            for factor in factors
        )
    )


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    activation: str = "none",
    slope: float = LEAKY_SLOPE,
    fast_accum: bool = False,  # noqa: FBT001, FBT002 - the op's schema: torch calls it by position
    batch_invariant: bool = False,  # noqa: FBT001, FBT002
    out_dtype: torch.dtype | None = None,
    library: int = 0,
) -> torch.Tensor:
    """Return activation(scale_a * scale_b * (a @ b) + bias) of any rank, in a new tensor.

    If a gradient may be required, torch applies the activation to the rounded sum; else it is fused.

    Raises:
        TypeError, ValueError: as `Library.matmul`.
        NotImplementedError: the product has no gradient, and one is required.
    """
    if activation not in _NAMES:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(_NAMES)}")
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        a, b = _cast(a, dtype), _cast(b, dtype)
        bias = None if bias is None else _cast(bias, out_dtype or ops.default_output(a.dtype))
        with torch.autocast("cuda", enabled=False):
            return matmul(
                a, b, bias, scale_a, scale_b, activation, slope, fast_accum, batch_invariant, out_dtype, library
            )
    required = False
    for tensor in (a, b, bias, scale_a, scale_b):
        if tensor is not None:
            required = required or tensor.requires_grad
            if type(tensor) not in _PLAIN:
                dtensor.register()
    tf32 = a.dtype is torch.float32 and ops.tf32_allowed()
    rest = (tf32, fast_accum, batch_invariant, library, -1 if out_dtype is None else ops.output_code(out_dtype))
    if (required and torch.is_grad_enabled()) or (autograd.transformed() and a.dtype in _DIFFERENTIABLE):
        _check_gradient(a, b, scale_a, scale_b)

        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return autograd.multiply(a, b, bias, (0, LEAKY_SLOPE, *rest))

        result = by_views(product, a, b, bias, rows_scaled=False)
        return result if activation == "none" else activated(result, activation, slope)
    fused = (_NAMES.index(activation), slope, *rest)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.aotmm.mm.default(a, b, bias, scale_a, scale_b, *fused)  # type: ignore[no-any-return]

    return by_views(launch, a, b, bias, rows_scaled=scale_a is not None and scale_a.numel() > 1)


@functools.cache
def register() -> torch.library.Library:
    """Register aotmm::matmul, and aotmm::mm with autocast, vmap and DTensor, as long as the result lives."""
    dtensor.register()
    fragment = torch.library.Library("aotmm", "FRAGMENT")  # type: ignore[no-untyped-call]
    fragment.define(_SCHEMA)  # type: ignore[no-untyped-call]
    fragment.impl("matmul", matmul, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    # Also before torch.func splits its levels: between them the gradient is not torch.func's.
    fragment.impl("matmul", matmul, "FuncTorchDynamicLayerFrontMode")  # type: ignore[no-untyped-call]
    fragment.impl("mm", _autocast_mm, "AutocastCUDA")  # type: ignore[no-untyped-call]
    torch.library.register_vmap("aotmm::mm", _vmap_mm, lib=fragment)
    return fragment


def _check_gradient(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> None:
    if a.dtype not in _DIFFERENTIABLE or b.dtype not in _DIFFERENTIABLE:
        reason = f"of {a.dtype} x {b.dtype}"
    elif scale_a is not None or scale_b is not None:
        reason = "with scales"
    else:
        return
    advice = "compute it outside of torch.func" if autograd.transformed() else "use torch.no_grad() or detach()"
    raise NotImplementedError(f"a product {reason} has no gradient, and one may be asked for; {advice}")


def activated(x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """Apply the activation by torch, which knows its derivatives."""
    functional = torch.nn.functional
    if activation == "leaky_relu":
        return functional.leaky_relu(x, slope)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    found: torch.Tensor = getattr(functional, activation)(x)
    return found


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype in _CAST else tensor


def _autocast_mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any) -> torch.Tensor:
    """Compute aotmm::mm of operands in autocast's dtype."""
    dtype = torch.get_autocast_dtype("cuda")
    a, b = _cast(a, dtype), _cast(b, dtype)
    bias = None if bias is None else _cast(bias, ops.result_dtype(a.dtype, _code(rest)))
    with torch.autocast("cuda", enabled=False):
        return torch.ops.aotmm.mm.default(a, b, bias, *rest)  # type: ignore[no-any-return]


def _vmap_mm(
    info: Any,
    in_dims: tuple[int | None, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    *rest: Any,
) -> tuple[torch.Tensor, int]:
    """Compute aotmm::mm for every index of a further dimension, in one launch if memory allows it."""
    if any(dim is not None for dim in in_dims[3:5]):
        raise NotImplementedError("torch.vmap over the scales of aotmm::mm: they are the same for every matrix")

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.aotmm.mm.default(a, b, bias, scale_a, scale_b, *rest)  # type: ignore[no-any-return]

    rows_scaled = scale_a is not None and scale_a.numel() > 1
    return autograd.over_batch(launch, info.batch_size, (*in_dims, None), a, b, bias, rows_scaled=rows_scaled), 0


def _code(rest: tuple[Any, ...]) -> int:
    """Return out_dtype from the arguments after the bias; torch leaves out defaults."""
    return rest[_OUT_DTYPE] if len(rest) > _OUT_DTYPE else -1
