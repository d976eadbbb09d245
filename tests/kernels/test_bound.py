"""The bound of gfx90a's kernels by static analysis: its formula, and what the default pack reaches by it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from aotmm.pack.manifest import Manifest
from aotmm.problem import LAYOUTS
from aotmm.runtime.launcher import Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import listed_device
from tests.emulators import bound, core
from tests.emulators.bound import Bounded, Loop

Pack = Callable[[str], Path]

ASKED = 0.80
NEAR = 0.85
LARGE = 128 * 128  # elements of a large tile
MFMA = "v_mfma_f32_16x16x16f16 v[0:3], v[8:9], v[10:11], v[0:3]"  # 32 clocks
READ = "ds_read_b128 v[20:23], v90"  # 8 clocks of the LDS
LOAD = "buffer_load_dwordx4 v[24:27], v91, s[8:11], 0 offen"


@pytest.fixture
def rows(interpreted_pack: Pack) -> list[Bounded]:
    """The bounds of the default pack."""
    try:
        bound.find_mca()
    except core.ToolMissingError as error:
        pytest.skip(str(error))
    return _bounds(interpreted_pack("gfx90a"))


@functools.cache
def _bounds(folder: Path) -> list[Bounded]:
    return bound.bounds(folder)


@pytest.mark.parametrize(
    ("stretches", "waves", "blocks", "issue"),
    [
        pytest.param(((1024, 1024),), 4, 1, 1.0, id="matrix-instructions-alone"),
        pytest.param(((2048, 1024),), 4, 1, 0.5, id="one-wave-waits"),
        pytest.param(((2048, 1024),), 8, 1, 1.0, id="another-wave-fills"),
        pytest.param(((1024, 0), (1024, 1024)), 8, 1, 2048 / 3072, id="no-wave-passes-a-barrier-alone"),
        pytest.param(((1024, 0), (1024, 1024)), 8, 2, 1.0, id="another-block-fills"),
        pytest.param(((4096, 1024),), 4, 3, 0.75, id="three-blocks"),
    ],
)
def test_issue(stretches: tuple[tuple[int, int], ...], waves: int, blocks: int, issue: float) -> None:
    """Waves of a block fill each other's waits between two barriers, blocks fill each other's everywhere."""
    assert Loop((MFMA,) * 32, stretches).bound(waves, blocks).issue == pytest.approx(issue)


@pytest.mark.parametrize(
    ("lines", "lds", "loads"),
    [
        pytest.param((MFMA,) * 32, 1.0, 1.0, id="neither"),
        pytest.param((*[MFMA] * 32, *[READ] * 64), 0.5, 1.0, id="4-waves-share-the-lds"),
        pytest.param((*[MFMA] * 32, *["ds_read_u16 v20, v90"] * 128), 1.0, 1.0, id="narrow-reads-cost-4-bytes"),
        pytest.param((*[MFMA] * 32, *["ds_read2_b32 v[20:21], v90 offset1:1"] * 128), 0.5, 1.0, id="two-reads"),
        pytest.param((*[MFMA] * 5, *[LOAD] * 2, "s_waitcnt vmcnt(0)"), 1.0, 0.5, id="one-loop-on-the-way"),
        pytest.param((*[MFMA] * 5, *[LOAD] * 2, "s_waitcnt vmcnt(2)"), 1.0, 1.0, id="two-loops"),
        pytest.param((*[MFMA] * 5, *[LOAD, "s_waitcnt vmcnt(0)"] * 2), 1.0, 0.25, id="one-load"),
    ],
)
def test_lds_and_loads(lines: tuple[str, ...], lds: float, loads: float) -> None:
    """The LDS serves 128 bytes in a clock, and memory brings what is on the way once in its latency of 320."""
    found = Loop(lines, ((1, 0),)).bound(4, 1)
    assert [found.lds, found.loads] == pytest.approx([lds, loads])


def test_loops_are_steps_along_k(rows: list[Bounded]) -> None:
    """What was found is the main loop: it makes the products of one step of BLOCK_K, each once."""
    tiles = {row.kernel.name: row.kernel.config for row in rows}
    wanted = {name: tile.block_m * tile.block_n * tile.block_k for name, tile in tiles.items()}
    assert {row.kernel.name: row.loop.products * row.waves for row in rows} == wanted


def test_every_kernel_has_one(rows: list[Bounded], manifest: Manifest) -> None:
    """Of the kernels of the pack, only those of groups and those without matrix instructions are left out."""
    left = {kernel.role for kernel in manifest.kernels} - {row.kernel.role for row in rows}
    multiplying = [kernel for kernel in manifest.kernels if kernel.role in ("product", "partial")]
    assert (left, len(rows)) == ({"copy", "reduce", "grouped_m", "grouped_k"}, len(multiplying))


@pytest.fixture
def manifest(interpreted_pack: Pack) -> Manifest:
    """That of the default pack."""
    return open_pack(interpreted_pack("gfx90a")).manifest


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_large_tiles(dtype: str, rows: list[Bounded]) -> None:
    """Every large tile can keep the matrix units busy for what is asked, at the occupancy that it reaches."""
    large = [
        row
        for row in rows
        if row.kernel.dtype_a == dtype and row.kernel.config.block_m * row.kernel.config.block_n >= LARGE
    ]
    assert {row.kernel.layout for row in large} == set(LAYOUTS)
    assert {row.kernel.name: row.bound for row in large if row.bound.use < ASKED} == {}


def test_loads_have_no_branches(rows: list[Bounded]) -> None:
    """Where guards on reaches allow buffers, no load in the loop hangs on a branch."""
    by_buffers = [row for row in rows if any(guard.value == "a_reach" for guard in row.kernel.guards)]
    assert {row.kernel.role for row in by_buffers} == {"product", "partial"}
    assert [row.kernel.name for row in by_buffers if "execz" in " ".join(row.loop.lines)] == []


def test_the_lds_is_read_in_vectors(rows: list[Bounded]) -> None:
    """In 16 bits, tiles of 64 rows and more read no single elements from the LDS, however the operands lie."""
    wide = [row for row in rows if row.kernel.config.block_m >= 64 and row.kernel.vector_bytes == 16]
    wide = [row for row in wide if row.kernel.dtype_a in ("fp16", "bf16")]
    assert {row.kernel.layout for row in wide} == set(LAYOUTS)
    assert [row.kernel.name for row in wide if "ds_read_u16" in " ".join(row.loop.lines)] == []


def test_nothing_spills(manifest: Manifest) -> None:
    """No kernel of the default set keeps registers in memory."""
    assert [kernel.name for kernel in manifest.kernels if kernel.spill_bytes] == []


def test_best_tiles(rows: list[Bounded]) -> None:
    """Products of many tiles are bounded by their last wave, small ones by whole tiles, those of 16 rows by memory."""
    found = {product: bound.best(_of(rows, "fp16", "nt"), product, 104) for product in bound.PRODUCTS}
    uses = [round(use, 2) for use, _, _ in found.values()]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] >= 0.95
    assert uses[-1] == pytest.approx(16 * 4096 * bound.MEMORY_BYTES / (512 * 104 * 2 * (2 * 16 + 4096)), rel=0.05)


@pytest.mark.parametrize("name", ["AMD Instinct MI210", "AMD Instinct MI250", "AMD Instinct MI250X"])
def test_selection_knows_the_device(name: str, rows: list[Bounded], interpreted_pack: Pack) -> None:
    """The formula chooses tiles whose bound is near the best on the compute units of each device, in every layout."""
    launcher, device = open_pack(interpreted_pack("gfx90a")).launcher, listed_device(name)
    assert device.multiprocessors in bound.UNITS.values()
    kernels = {row.kernel.name: row for row in rows}
    for (M, N, K), layout in itertools.product(bound.PRODUCTS, LAYOUTS):
        problem = Problem(
            M=M,
            N=N,
            K=K,
            strides_a=(K, 1) if layout[0] == "n" else (1, M),
            strides_b=(N, 1) if layout[1] == "n" else (1, K),
            strides_c=(N, 1),
            dtype_a="bf16",
            dtype_b="bf16",
            dtype_c="bf16",
        )
        plan = launcher.select(problem, device)
        row = kernels[launcher.kernels[plan.kernel].name]
        most, _, _ = bound.best(_of(rows, "bf16", layout), (M, N, K), device.multiprocessors)
        use = bound.product_use(row, (M, N, K), plan.split, device.multiprocessors)
        assert use >= NEAR * most, (row.kernel.name, plan.split, M, N, K)


def _of(rows: list[Bounded], dtype: str, layout: str) -> list[Bounded]:
    return [
        row for row in rows if (row.kernel.dtype_a, row.kernel.layout, row.kernel.vector_bytes) == (dtype, layout, 16)
    ]
