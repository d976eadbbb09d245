"""The order of tiles: in groups of rows of tiles, so that programs that run together share operands in L2.

Source of the idea: Triton tutorial 03, "Matrix Multiplication".
"""

from __future__ import annotations

import triton


@triton.jit
def place(pid, tiles_m, tiles_n, group_m):
    """Return row and column of tile number `pid`, in groups of `group_m` rows of tiles."""
    tiles_per_group = group_m * tiles_n
    first_m = pid // tiles_per_group * group_m
    group_rows = min(tiles_m - first_m, group_m)
    return first_m + pid % tiles_per_group % group_rows, pid % tiles_per_group // group_rows
