"""The calls of `aotmm bench own`. It needs torch alone: a process that times the import of aotmm runs this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """A call of a function, and what it must compute.

    Attributes:
        arguments: by place. grid: blocks.
        jits, ours: constexprs that Triton's JIT and we must be told.
        out: what it writes. want: the right result. error: the largest that is allowed.
    """

    arguments: tuple[Any, ...]
    grid: tuple[int, ...]
    jits: dict[str, Any]
    ours: dict[str, Any]
    out: torch.Tensor
    want: torch.Tensor
    error: float


def _add() -> Case:
    x, y = (torch.randn(4096, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    return Case((x, y, out, 4096), (4,), {"BLOCK": 1024}, {}, out, x + y, 0.0)


def _softmax() -> Case:
    x = torch.randn(64, 1000, device="cuda")
    out = torch.empty_like(x)
    constexprs = {"BLOCK": 1024}
    want = x.double().softmax(1)
    return Case((out, x, 1000, 1000, 64, 1000), (64,), constexprs, constexprs, out, want, 1e-6)


def _layer_norm() -> Case:
    x = torch.randn(64, 1024, device="cuda", dtype=torch.float16)
    weight, bias = (torch.randn(1024, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    want = torch.nn.functional.layer_norm(x.double(), (1024,), weight.double(), bias.double(), 1e-5)
    return Case((x, out, weight, bias, 1024, 1024, 1e-5), (64,), {}, {}, out, want, 2e-2)


CASES: dict[str, Callable[[], Case]] = {
    "add_kernel": _add,
    "softmax_kernel": _softmax,
    "layer_norm_kernel": _layer_norm,
}
