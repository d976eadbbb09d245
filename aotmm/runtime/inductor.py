"""Let Inductor's max-autotune time these kernels beside its own, and use them if they are faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import aotmm
from aotmm.errors import NoKernelError


def aotmm_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out = a @ b with the default library. Inductor's code calls it by this name.

    Raises:
        NotImplementedError: no kernel multiplies these types on this GPU, so that Inductor leaves this choice out.
    """
    try:
        aotmm.matmul(a, b, out=out)
    except (TypeError, NoKernelError) as error:
        raise NotImplementedError(str(error)) from error


@contextmanager
def max_autotune() -> Iterator[None]:
    """Let max-autotune choose the default library's kernels for code that is compiled within the block."""
    from torch._inductor import config  # only here: it takes seconds
    from torch._inductor.kernel.mm import lazy_register_extern_choice

    aotmm.load()
    lazy_register_extern_choice(aotmm_mm)  # so that code from Inductor's cache finds it too
    before = config.external_matmul
    config.external_matmul = [*before, aotmm_mm]
    try:
        yield
    finally:
        config.external_matmul = before
