"""Scratch memory of kernels of a user's own, which Triton's compiler asks for: it comes from torch's allocator."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from aotmm.runtime.own import Allocate, Release


@cache
def callbacks() -> tuple[Any, Any]:
    """Return what a launcher allocates by, once per process.

    Memory is of torch's current stream, that of the launch, and given back before the launch has run: the allocator
    gives it only to later work of the same stream.
    """
    import torch

    numbers = itertools.count(1)
    held: dict[int, Any] = {}

    def allocate(size: int, ordinal: int, _stream: int | None, address: Any) -> int | None:
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", ordinal))
        except RuntimeError:  # out of memory, also in words of torch's own; nothing may be raised through C
            return None
        number = next(numbers)
        held[number] = memory
        address[0] = memory.data_ptr()
        return number

    return Allocate(allocate), Release(lambda number: held.pop(number, None))
