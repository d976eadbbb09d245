"""Family `swapped`: the transposed product C^T = B^T A^T, for C of few rows ("few tokens"). For Hopper.

A wgmma has 64 rows but as few as 8 columns: here columns of B are its rows, and the tile of C has 16 to 64 rows without
waste. Such products read all of B once, so what counts is how many bytes are on their way: stages are deep.
"""

from __future__ import annotations

from aotmm.kernels import Specialisation, Variant, hopper
from aotmm.kernels.cooperative import cooperative


def specialise(variant: Variant) -> Specialisation:
    """The swapped kernel of `variant`: its num_warps are those of its consumers."""
    return hopper.specialise(cooperative, variant, parts=variant.config.num_warps // variant.first_warps, swapped=True)
