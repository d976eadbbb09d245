"""The order of tiles: the kernels' own source in Python, and images that are given the first tiles alone."""

from __future__ import annotations

import functools
import importlib
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from aotmm.build.products import I32_LIMIT
from aotmm.pack.schema import Kernel
from aotmm.problem import GROUPS
from aotmm.runtime.pack import open_pack
from tests.agreement import launch_of
from tests.build.packs import plans_pack
from tests.native.emulation import ARCHS, in_worker, interpreter, missing
from tests.samples import code_in

Tiles = list[tuple[int, int]]
PART = 16, 128  # rows and columns of C of a block
SIZES = [(1, 1), (1, 7), (7, 1), (3, 5), (9, 4), (16, 3), (17, 2), (40, 3)]


def wanted(tiles_m: int, tiles_n: int, group_m: int) -> Tiles:
    """(row, column) of each tile: groups of rows from the top, in each the columns from the left, each downwards."""
    return [
        (row, column)
        for first in range(0, tiles_m, group_m)
        for column in range(tiles_n)
        for row in range(first, min(first + group_m, tiles_m))
    ]


def placed(tiles_m: int, tiles_n: int, group_m: int) -> Tiles:
    """What `place` makes of each number."""
    place = importlib.import_module("aotmm.kernels.order").place.fn
    return [place(number, tiles_m, tiles_n, group_m) for number in range(tiles_m * tiles_n)]


def placed_on_hopper(
    tiles_m: int,
    tiles_n: int,
    group_m: int,
    *,
    swapped: bool,
    cluster: tuple[int, int],
    block: tuple[int, int],
    along_k: bool = False,
) -> Tiles:
    """What `Work.place` makes of each work tile of two slices, for a block of a cluster: its first row and column of C.

    The second slice's order is the first one's. Three rows and five columns of the last tile are past the end.
    """
    pipeline = importlib.import_module("aotmm.kernels.hopper.pipeline")
    part_m, part_n = PART

    def turned(of_m: int, of_n: int) -> tuple[int, int]:
        return (of_n, of_m) if swapped else (of_m, of_n)

    rows, cols = turned(tiles_m * cluster[0] * part_m - 3, tiles_n * cluster[1] * part_n - 5)
    of_x, of_y = turned(part_m, part_n)
    down, across = turned(*cluster)
    x, y = turned(*block)
    tiling = SimpleNamespace(ROWS=of_x, COLUMNS=of_y, SWAPPED=swapped, GROUPED=False, EPILOGUE="none", X_GROUP=0)
    tiling.X_K_MAJOR = tiling.Y_K_MAJOR = along_k
    place_of = SimpleNamespace(down=down, across=across, x=x, y=y)
    work = SimpleNamespace(rows=rows, cols=cols, group_m=group_m, tiling=tiling, cluster=place_of)
    work.tiles, work.within = (functools.partial(each.fn, work) for each in (pipeline.Work.tiles, pipeline.Work.within))
    language = SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min, maximum=max)
    count = tiles_m * tiles_n
    with mock.patch.multiple(pipeline, gl=language, place=pipeline.place.fn):
        found = [pipeline.Work.place.fn(work, unit) for unit in range(2 * count)]
    assert [(part, end) for *_, part, end in found] == [(0, None)] * count + [(1, None)] * count
    begins = [turned(row, col) for row, col, *_ in found]
    assert begins[:count] == begins[count:]
    return begins[:count]


def in_parts(begins: Tiles) -> Tiles:
    """The same in numbers of parts."""
    return [(m // PART[0], n // PART[1]) for m, n in begins]


@pytest.mark.parametrize(("tiles_m", "tiles_n"), SIZES)
def test_groups_of_rows(tiles_m: int, tiles_n: int) -> None:
    """In every family, `swapped` too, tiles are in groups of rows of C, the last of which may have fewer."""
    for group_m in (*GROUPS, 3):
        order = wanted(tiles_m, tiles_n, group_m)
        assert in_worker(placed, tiles_m, tiles_n, group_m) == order
        for swapped in (False, True):
            alone = functools.partial(placed_on_hopper, swapped=swapped, cluster=(1, 1), block=(0, 0))
            assert in_parts(in_worker(alone, tiles_m, tiles_n, group_m)) == order
            last = max(0, PART[0] * (tiles_m - 1) - 3)  # ends with C, if A lies along K; columns stay
            moved = [(min(row * PART[0], last), column * PART[1]) for row, column in order]
            assert in_worker(functools.partial(alone, along_k=True), tiles_m, tiles_n, group_m) == moved


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (2, 2), (1, 4), (4, 2)])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_blocks_of_a_cluster_divide_its_tile(swapped: bool, cluster: tuple[int, int]) -> None:  # noqa: FBT001
    """Each block of a cluster computes a part of the same tile of C: the one at its own place in the cluster."""
    down, across = cluster
    order = wanted(5, 3, 2)
    for block in itertools.product(range(down), range(across)):
        found = in_worker(placed_on_hopper, 5, 3, 2, swapped=swapped, cluster=cluster, block=block)
        assert in_parts(found) == [(down * row + block[0], across * column + block[1]) for row, column in order]


def test_largest_group_overflows_nothing() -> None:
    """The number of a tile below the largest group of the widest C fits 32 bits in the narrowest tiles."""
    assert max(GROUPS) * -(-(I32_LIMIT - 1) // 16) < 2**31


def first_written(arch: str, image: bytes, kernel: Kernel, group_m: int, programs: int) -> Tiles:
    """The tiles, of 2 x 2, that the first programs of an image write."""
    launch = launch_of(kernel)
    launch.values["group_m"] = group_m
    addresses = {name: int(array.ctypes.data) for name, array in launch.memory.items()}
    result = launch.memory[launch.written]
    before = result.copy()
    interpreter(arch)(
        image,
        kernel.symbol,
        (programs, 1, 1),
        (kernel.threads, 1, 1),
        launch.parameters(kernel, addresses),
        kernel.shared_bytes,
        [(name, array, addresses[name], "rw" if array is result else "r") for name, array in launch.memory.items()],
    )
    changed = (result.view("u1") != before.view("u1")).reshape(*result.shape, -1).any(-1)
    changed = changed.reshape(-1, *changed.shape[-2:])[0]  # of a partial the first slice of the first member
    rows, cols = kernel.config.block_m, kernel.config.block_n
    return [
        (i, j) for i in (0, 1) for j in (0, 1) if changed[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols].any()
    ]


@pytest.mark.parametrize("arch", ARCHS)
def test_launches_choose_the_order(arch: str) -> None:
    """Products and partials, generic ones too, compute a group of rows first: its size is what the launch says."""
    if reason := missing(arch):
        pytest.skip(reason)
    folder = plans_pack(arch)
    code = code_in(folder)
    kernels = [kernel for kernel in open_pack(folder).manifest.kernels if kernel.role in ("product", "partial")]
    assert {kernel.layout for kernel in kernels} >= {"nn", "nt", "any"}
    first_two = {1: [(0, 0), (0, 1)], 2: [(0, 0), (1, 0)], 16: [(0, 0), (1, 0)]}
    for kernel in kernels:
        for group_m, tiles in first_two.items():
            assert in_worker(first_written, arch, code(kernel.image), kernel, group_m, 2) == tiles, kernel.name
