"""`aotmm.override()`: these kernels compute torch's own products while it lasts; torch computes everything else."""

from __future__ import annotations

import threading
from functools import partial
from types import TracebackType
from typing import Any

import torch

import aotmm
from aotmm.errors import ArtifactError
from aotmm.problem import LEAKY_SLOPE
from aotmm.runtime import ops
from aotmm.runtime.library import Library

_KEY = "CUDA"  # on ROCm too
_HALVES = (torch.float16, torch.bfloat16)
# The ops that override.c cannot register, because alpha and beta are Scalars: dimensions by name.
_WITH_SCALARS = {"addmm": 2, "addmm.out": 2, "baddbmm": 3, "baddbmm.out": 3}

# The ops that it registers. A kernel of its own key calls torch's kernel, so that exceptions pass.
_WITHOUT = ("mm", "mm.out", "bmm", "bmm.out")
_OWN_KEY = "PrivateUse3"  # no GPU's

_lock = threading.Lock()
_active = 0
_kernels: torch.library.Library | None = None


class Override:
    """An override of torch's products, for the whole process, from its construction until `remove` or the block's end.

    Overrides nest: torch's own kernels are back when the last one is removed.
    """

    def __init__(self) -> None:
        self._removed = False
        global _active  # noqa: PLW0603 - torch's registry is one per process too
        with _lock:
            if _active == 0:
                _begin(aotmm.load())
            _active += 1

    def remove(self) -> None:
        """End it; a second call does nothing. Raises ArtifactError if torch does not take its kernels back."""
        global _active  # noqa: PLW0603
        with _lock:
            if self._removed:
                return
            self._removed = True
            _active -= 1
            if _active == 0:
                _end()

    def __enter__(self) -> Override:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _begin(library: Library) -> None:
    global _kernels  # noqa: PLW0603
    if not ops.serves_gpus():
        return
    own = {name: torch.library.get_kernel(f"aten::{name}", _KEY) for name in (*_WITHOUT, *_WITH_SCALARS)}
    registered = ops.registered()
    _kernels = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _WITHOUT:
        _kernels.impl(name, partial(_repeat, registered, own[name]), _OWN_KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    try:
        registered.override(_KEY, library.number, _OWN_KEY)
    except ArtifactError:
        _end()
        raise
    for name, dim in _WITH_SCALARS.items():
        kernel = partial(_multiply, library.number, registered, own[name], dim)
        _kernels.impl(name, kernel, _KEY, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]


def _end() -> None:
    global _kernels  # noqa: PLW0603
    if _kernels is None:
        return
    ops.registered().restore()
    _kernels._destroy()  # type: ignore[no-untyped-call] # noqa: SLF001 - no other way ends it
    _kernels = None


def _repeat(registered: ops.Ops, own: Any, keys: Any, *operands: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """Compute mm, bmm or an out variant by `own`, torch's kernel. override.c cannot let an exception pass."""
    try:
        return own.call_boxed(keys, *operands, **out)  # type: ignore[no-any-return]
    except BaseException:
        registered.give_back()
        raise


def _multiply(
    library: int,
    registered: ops.Ops,
    own: Any,
    dim: int,
    keys: Any,
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **rest: Any,
) -> torch.Tensor:
    """Compute addmm, baddbmm or an out variant: `bias + a @ b` and `a @ b` by ours, the rest by `own`, torch's."""
    beta, alpha, out = rest.get("beta", 1), rest.get("alpha", 1), rest.get("out")
    tf32 = a.dtype is torch.float32 and ops.tf32_allowed()
    fits = (
        alpha == 1
        and beta in (0, 1)
        and (library, a.device.index or 0) not in registered.unsupported
        and (a.dtype in _HALVES or tf32)  # torch is faster in fp32 (docs/torch.md)
        and a.dtype is b.dtype is bias.dtype
        and a.dim() == b.dim() == dim >= bias.dim()
        and (dim == 2 or a.shape[0] == b.shape[0])  # noqa: PLR2004 - matrices
        and (out is None or out.dtype is a.dtype)
    )
    if fits:
        arguments: tuple[Any, ...] = (a, b, bias if beta else None)
        if tf32 or library:  # else the op fills in its defaults faster than Python passes them
            arguments += (None, None, 0, LEAKY_SLOPE, tf32, False, library)
        try:
            if out is None:
                return torch.ops.aotmm.mm.default(*arguments)  # type: ignore[no-any-return]
            return torch.ops.aotmm.mm.out(*arguments, out=out)  # type: ignore[no-any-return]
        except RuntimeError:
            if not registered.declined():
                raise
    return own.call_boxed(keys, bias, a, b, **rest)  # type: ignore[no-any-return]
