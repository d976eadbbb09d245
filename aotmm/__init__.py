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
    "load",
    "matmul",
    "max_autotune",
    "override",
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


def override() -> Override:
    """Sends torch's own products to this installation's kernels, until `.remove()` or the end of a `with` block.

    torch.mm, bmm, addmm and baddbmm of GPU tensors, and so torch.matmul, torch.nn.functional.linear, modules, their
    gradients, autocast and vmap, in every thread. What the kernels do not take (float64, complex, int; alpha other than
    1, beta other than 0 and 1; a GPU without a pack) torch computes as always. fp32 follows torch's tf32 setting.
    Calls nest. Begin and end it while no other thread multiplies: torch's registry is not made for more. torch before
    2.15 says once on stderr that a kernel was overridden; this is it. A torch without GPU support is left alone.

    Raises:
        ArtifactError: there are no packs, or this torch does not let its products be sent elsewhere.
    """
    from aotmm.runtime.override import Override

    return Override()


def max_autotune() -> AbstractContextManager[None]:
    """Within it, torch.compile in a max-autotune mode times the default library's kernels too, and takes the fastest.

    Compiled code keeps what was chosen. Only torch.mm has such a choice.
    """
    from aotmm.runtime import inductor

    return inductor.max_autotune()
