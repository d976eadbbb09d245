"""Family `swapped`: the transposed product C^T = B^T A^T, for C of few rows ("few tokens"). For Hopper.

A wgmma has 64 rows but as few as 8 columns: here columns of B are its rows, and the tile of C has 16 to 64 rows without
waste. Such products read all of B once, so what counts is how many bytes are on their way: stages are deep.
"""

from __future__ import annotations

from aotmm.kernels import WARPGROUP, Specialisation, Variant, hopper
from aotmm.kernels.cooperative import cooperative


def specialise(variant: Variant) -> Specialisation:
    """The swapped kernel of `variant`: a warpgroup for every four of its num_warps."""
    return hopper.specialise(cooperative, variant, parts=variant.config.num_warps // WARPGROUP, swapped=True)
