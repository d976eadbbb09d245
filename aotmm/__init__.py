"""Triton's matmul, compiled ahead of time: prebuilt GPU kernels for torch tensors, with no compiler at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotmm.errors import (
    AotmmError,
    ArtifactError,
    CompileError,
    DriverError,
    NoKernelError,
    PackError,
    SpecError,
    WrongResultError,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from aotmm.runtime.library import Library
    from aotmm.runtime.override import Override

__version__ = "0.1.0"
__all__ = [
    "AotmmError",
    "ArtifactError",
    "CompileError",
    "DriverError",
    "NoKernelError",
    "PackError",
    "SpecError",
    "WrongResultError",
    "grouped_mm",
    "load",
    "matmul",
    "max_autotune",
    "override",
]

_default: Library | None = None


def load(path: str | Path | None = None, *, table: str | Path | None = None) -> Library:
    """Return the library of the packs in `path`, by default this installation's; see `aotmm.runtime.library.load`.

    `table` is a file that `aotmm tune` wrote. Its times replace those that the packs were built with.
    """
    from aotmm.runtime import library

    return library.load(path, table=table)


def matmul(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return `aotmm.load().matmul(a, b, ...)`: this installation's packs are loaded at the first call."""
    return _loaded().matmul(a, b, **options)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return `aotmm.load().grouped_mm(a, b, ...)`: this installation's packs are loaded at the first call."""
    return _loaded().grouped_mm(a, b, **options)


def _loaded() -> Library:
    global _default  # noqa: PLW0603 - the packs are loaded once
    if _default is None:
        _default = load()
    return _default


def override(*, batch_invariant: bool = False) -> Override:
    """Send torch's own products to this installation's kernels, until `.remove()` or the end of a `with` block.

    This covers torch.mm, bmm, addmm and baddbmm of GPU tensors in every thread, and so torch.matmul, modules,
    gradients, autocast and vmap, and torch._int_mm, _scaled_mm, _grouped_mm and _scaled_grouped_mm. torch still
    computes the products that the kernels do not take, as those of float64, or that it is faster at; docs/torch.md
    ("The override") lists them. The result's `repr` tells how many there were of each kind. With `batch_invariant` a
    row of each product has the same bits in every batch (docs/numerics.md). Then all fp32, and every alpha and
    beta, are computed here too, and `repr` tells of products that torch computes.

    Overrides nest, with the same `batch_invariant`. Begin and end them while no other thread multiplies: torch's
    registry is not thread-safe. torch before 2.15 reports the override once on stderr. A torch without GPU support is
    left alone.

    Raises:
        ArtifactError: there are no packs, or this torch does not let its products be sent elsewhere.
        ValueError: an override with another `batch_invariant` is active.
    """
    from aotmm.runtime.override import Override

    return Override(batch_invariant=batch_invariant)


def max_autotune() -> AbstractContextManager[None]:
    """Let torch.compile in a max-autotune mode time the default library's kernels too, within a `with` block.

    Compiled code keeps the fastest kernel. Only torch.mm has such a choice.
    """
    from aotmm.runtime import inductor

    return inductor.max_autotune()
