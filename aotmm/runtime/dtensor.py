"""DTensor's rules to split a product over the devices of a mesh: by rows, columns, batch or along K."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

_Placements = list[Any]


def register() -> None:
    """Register the rules of aotmm::mm, if this process uses DTensor."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.aotmm.mm.default)(_rules)


def _in_blocks(scale: Any, along_k: int) -> bool:
    """Return whether a scale has a factor for each of several blocks of K, its dimension `along_k`, -1 or -2."""
    return scale is not None and scale.ndim >= -along_k and scale.shape[along_k] != 1


def _rules(
    a: Any, b: Any, bias: Any = None, scale_a: Any = None, scale_b: Any = None, activation: int = 0, *_: Any
) -> list[tuple[_Placements, _Placements]]:
    """Return the options of one mesh dimension: the placements of the result and of the tensor arguments."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    rank = max(a.ndim, b.ndim)
    factors = [factor for factor in (bias, scale_a, scale_b) if factor is not None]

    def split(tensor: Any, dim: int) -> Any:
        """Return the tensor's part for a part of the result's dimension `dim`, all of it if it is broadcast."""
        mine = dim - rank + tensor.ndim
        return Shard(mine) if mine >= 0 and tensor.shape[mine] != 1 else Replicate()

    def rule(result: Any, of_a: Any, of_b: Any, of_factors: _Placements) -> tuple[_Placements, _Placements]:
        return [result], [of_a, of_b, *of_factors]

    rows, columns = rank - 2, rank - 1
    whole = rule(Replicate(), Replicate(), Replicate(), [Replicate()] * len(factors))
    if _in_blocks(scale_a, -1) or _in_blocks(scale_b, -2):  # parts of K or N would cut blocks
        parts = [Replicate() if factor is scale_b else split(factor, rows) for factor in factors]
        return [whole, rule(Shard(rows), Shard(a.ndim - 2), Replicate(), parts)]
    found = [
        whole,
        rule(Shard(rows), Shard(a.ndim - 2), Replicate(), [split(factor, rows) for factor in factors]),
        rule(Shard(columns), Replicate(), Shard(b.ndim - 1), [split(factor, columns) for factor in factors]),
    ]
    if rank > 2:  # noqa: PLR2004 - a batch
        found.append(rule(Shard(0), split(a, 0), split(b, 0), [split(factor, 0) for factor in factors]))
    if activation == 0:  # an activation is of the whole sum; a bias is added as a share of it
        shares = [Partial() if factor is bias else Replicate() for factor in factors]
        found.append(rule(Partial(), Shard(a.ndim - 1), Shard(b.ndim - 2), shares))
    return found
