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
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from aotmm.runtime.library import Library

__version__ = "0.1.0"
__all__ = [
    "AotmmError",
    "ArtifactError",
    "CompileError",
    "DriverError",
    "NoKernelError",
    "PackError",
    "SpecError",
    "load",
    "matmul",
]

_default: Library | None = None


def load(path: str | Path | None = None, *, table: str | Path | None = None) -> Library:
    """The library of the packs in `path`, by default those of this installation; see `aotmm.runtime.library.load`.

    `table` is a file that `aotmm tune` wrote: what it measured decides instead of what was measured for the packs.
    """
    from aotmm.runtime import library

    return library.load(path, table=table)


def matmul(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """`aotmm.load().matmul(a, b, ...)`: the product with this installation's packs, loaded at the first call."""
    global _default  # noqa: PLW0603 - the packs are loaded once
    if _default is None:
        _default = load()
    return _default.matmul(a, b, **options)
