"""A stand-in for the kernels, so that what lies above the op aotmm::mm runs on CPU tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import aotmm
from aotmm.problem import ACTIVATIONS
from aotmm.runtime import composite, ops
from aotmm.runtime.library import Library

_DEFAULTS = (None, None, None, 0, 0.01, False, False, False, 0, -1)  # of aotmm::mm, behind its operands


class Call(NamedTuple):
    """What one call of aotmm::mm was given: both operands' shapes and strides, the number of its activation, flags."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    activation: int
    tf32: bool
    batch_invariant: bool


def stand_in() -> tuple[Library, torch.library.Library, list[Call]]:
    """The library, what computes aotmm::mm of CPU tensors until it is destroyed, in float64, and its calls."""
    lib = aotmm.load()
    found: list[Call] = []

    def mm(a: torch.Tensor, b: torch.Tensor, *given: Any) -> torch.Tensor:
        rest: tuple[Any, ...] = (*given, *_DEFAULTS[len(given) :])
        bias, scale_a, scale_b, activation, slope, tf32, _, invariant, _, output = rest
        found.append(Call((tuple(a.shape), tuple(b.shape)), (a.stride(), b.stride()), activation, tf32, invariant))
        x = a.double() @ b.double()
        for scale in (scale_a, scale_b):
            x = x if scale is None else x * scale
        x = x if bias is None else x + bias.double()
        name = tuple(ACTIVATIONS)[activation]
        x = x if name == "none" else composite.activated(x, name, slope)
        dtype = a.dtype if a.dtype is torch.float64 else ops.result_dtype(a.dtype, output)
        return x.to(dtype).contiguous()

    def mm_out(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(mm(*arguments))

    kernels = torch.library.Library("aotmm", "IMPL")  # type: ignore[no-untyped-call]
    kernels.impl("mm", mm, "CPU")  # type: ignore[no-untyped-call]
    kernels.impl("mm.out", mm_out, "CPU")  # type: ignore[no-untyped-call]
    return lib, kernels, found
