"""Warp-specialised kernels for Hopper (sm90), written in Gluon.

One warp, in clusters two, copies boxes of both operands, and of a matrix that is added to their product, into a ring of
shared memory through tensor maps (TMA). Consumer warpgroups multiply them with wgmma, one in flight, and release every
stage through a barrier. Blocks are persistent, but for those of slices: sums leave through shared memory and TMA stores
while the next tile is loaded. A width that is no power of two is one instruction (`mma`), or two accumulators side by
side (`specialisation`).

The multiplication is of X (rows, K) by Y (K, columns): X = A and Y = B, or transposed, X = B^T and Y = A^T, because a
wgmma always has 64 rows and C may have fewer.

Families differ in the work of consumer warpgroups. `cooperative`: one to three multiply the slabs of one tile; it also
splits K (role "partial"). `pingpong`: two take tiles in turn; one multiplies while the other writes.

`swapped`: columns of B are the 64 rows of a wgmma, and the tile of C has as many rows as fill the GPU evenly. Few rows
waste nothing either. Such products read all of B once, so many bytes must be in flight: stages are deep.

Blocks of any of them may work in clusters of up to 8 (`cluster`). The blocks of a cluster share a tile of C, each
computes a part of it. What several of them multiply, rows of A or columns of B, comes from the L2 cache once for all of
them (multicast). A launch says how many blocks a cluster has along M and N; the code for it is the same. In other
kernels of `cooperative` and `swapped` each block of a cluster multiplies a slice of K (`slices`).

Numbers of fp32 are split into three of bf16 first, and a stage is released when they are (`mma.multiply_split`).

tf32 is multiplied along K alone. X comes through registers if it lies across K (`mma.multiply_registers`); if Y does so
as well, it is turned in shared memory (`mma.multiply_turned`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from aotmm.kernels import WARPGROUP, Specialisation, Variant
from aotmm.kernels.hopper import specialisation
from aotmm.kernels.hopper.cooperative import cooperative
from aotmm.kernels.hopper.pingpong import pingpong


class _Family(NamedTuple):
    """The jit function of a family, whether its warpgroups share a tile, and whether X is B^T."""

    function: Any
    shared: bool = True
    swapped: bool = False


_FAMILIES = {
    "cooperative": _Family(cooperative),
    "pingpong": _Family(pingpong, shared=False),
    "swapped": _Family(cooperative, swapped=True),
}


def specialise(variant: Variant) -> Specialisation:
    """Return how the kernel of `variant` is compiled; a warpgroup has four of its num_warps."""
    row = _FAMILIES[variant.family]
    parts = variant.config.num_warps // WARPGROUP if row.shared else 1
    return specialisation.specialise(row.function, variant, parts=parts, swapped=row.swapped)
