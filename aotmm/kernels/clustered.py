"""Family `clustered`: two blocks of a cluster share a tile, and the columns of B that one of them loads. For Hopper.

Every block has half of the rows of A, and all columns of B, which come from the L2 cache once for both (multicast).
Where the pitch of a row is no multiple of 128 bytes, each row of a box touches two lines of the cache, and the cache is
what limits a product: there it is up to 1.2 times faster. Elsewhere one block alone is.
"""

from __future__ import annotations

from aotmm.kernels import WARPGROUP, Specialisation, Variant, hopper
from aotmm.kernels.cooperative import cooperative


def specialise(variant: Variant) -> Specialisation:
    """The clustered kernel of `variant`: a tile of block_m rows for both blocks, each with num_warps that multiply."""
    return hopper.specialise(cooperative, variant, parts=variant.config.num_warps // WARPGROUP, ctas=variant.num_ctas)
