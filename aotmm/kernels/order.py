"""The order of tiles: in groups of rows of tiles, so that programs that run together share operands in L2.

Tiles of a grouped product are those of one group after another. Groups of rows lie one behind the other, and `offsets`
has their ends. If `group_rows` is not 0, each has room for so many rows, and `offsets` has how many it uses.

Source of the idea: Triton tutorial 03, "Matrix Multiplication".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from aotmm.kernels import WARP

GROUPS_AT_ONCE = 128  # ends of groups that a warp loads together: 16 bytes for each thread
_AT_ONCE, _THREADS = gl.constexpr(GROUPS_AT_ONCE), gl.constexpr(WARP)


@triton.jit
def place(pid, tiles_m, tiles_n, group_m):
    """Return row and column of tile number `pid`, in groups of `group_m` rows of tiles."""
    tiles_per_group = group_m * tiles_n
    first_m = pid // tiles_per_group * group_m
    group_rows = min(tiles_m - first_m, group_m)
    return first_m + pid % tiles_per_group % group_rows, pid % tiles_per_group // group_rows


@triton.jit
def end_of(group, offsets_ptr, groups, size):
    """Return the end of a group, or of several, from 0 to `size` whatever the offsets are; 0 if there is none."""
    end = tl.load(offsets_ptr + group, mask=(group >= 0) & (group < groups), other=0)
    return tl.minimum(tl.maximum(end, 0), size)


@triton.jit
def rows_of(group, offsets_ptr, groups, M, group_rows):
    """Return the first row of a group, or of several, and the row behind its last."""
    number = end_of(group, offsets_ptr, groups, M)
    room = group * group_rows
    first = tl.where(group_rows > 0, room, end_of(group - 1, offsets_ptr, groups, M))
    return first, tl.where(group_rows > 0, room + tl.minimum(number, group_rows), number)


@triton.jit
def tiles_of(group, offsets_ptr, groups, M, group_rows, tiles_n, block_m):
    """Return the numbers of tiles of some groups of rows."""
    first, end = rows_of(group, offsets_ptr, groups, M, group_rows)
    return tl.maximum(end - first + block_m - 1, 0) // block_m * tiles_n


@gluon.jit
def ends_at_once():
    """Return numbers from 0 on, of as many groups as each warp looks at together."""
    WARPS_HERE: gl.constexpr = gl.num_warps()
    return gl.arange(0, _AT_ONCE, layout=gl.BlockedLayout([_AT_ONCE // _THREADS], [_THREADS], [WARPS_HERE], [0]))


@triton.jit
def count_of_groups(i, offsets_ptr, groups, M, group_rows, tiles_n, block_m):
    """Return the number of tiles of all groups of rows; `i` is a range from 0 on."""
    count = 0
    for first in range(0, groups, i.shape[0]):
        count += tl.sum(tiles_of(first + i, offsets_ptr, groups, M, group_rows, tiles_n, block_m))
    return count


@triton.jit
def group_of(tile, i, offsets_ptr, groups, M, group_rows, tiles_n, block_m):
    """Return the group of tile number `tile`, the number of its first tile, its first row, and the row behind its last.

    Tiles begin at the first row of their group. Behind the last tile, the group is number `groups` or more. `i` is a
    range from 0 on.
    """
    group = 0
    before = 0
    count = 0
    for first in range(0, groups, i.shape[0]):
        behind = count + tl.cumsum(tiles_of(first + i, offsets_ptr, groups, M, group_rows, tiles_n, block_m))
        passed = behind <= tile
        group += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, behind, 0)))
        count = tl.max(behind)
    begin, end = rows_of(group, offsets_ptr, groups, M, group_rows)
    return group, before, begin, end
