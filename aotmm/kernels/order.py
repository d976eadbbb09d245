"""The order of tiles: in groups of rows of tiles, so that programs that run together share operands in L2.

Source of the idea: Triton tutorial 03, "Matrix Multiplication".
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return row and column of tile number `pid`, in groups of GROUP_M rows of tiles."""
    tiles_per_group = GROUP_M * tiles_n
    first_m = pid // tiles_per_group * GROUP_M
    group_rows = min(tiles_m - first_m, GROUP_M)
    return first_m + pid % tiles_per_group % group_rows, pid % tiles_per_group // group_rows
