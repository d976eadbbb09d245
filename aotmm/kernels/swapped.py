"""Family `swapped`: the transposed product C^T = B^T A^T. For Hopper.

A wgmma has 64 rows but any multiple of 8 columns: here columns of B are its rows, and the tile of C has as many rows as
fill the GPU evenly, where A lies along K. With few rows ("few tokens") nothing is wasted either: such products read all
of B once, so what counts is how many bytes are on their way, and stages are deep.
"""

from __future__ import annotations

from aotmm.kernels import WARPGROUP, Specialisation, Variant, hopper
from aotmm.kernels.cooperative import cooperative


def specialise(variant: Variant) -> Specialisation:
    """The swapped kernel of `variant`: a warpgroup for every four of its num_warps."""
    return hopper.specialise(cooperative, variant, parts=variant.config.num_warps // WARPGROUP, swapped=True)
