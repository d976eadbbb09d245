"""The committed shapes: what the sweeps say they are, and a held-out fifth that does not move."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotmm.errors import SpecError
from aotmm.timing.problems import Shape, Sweep, held_out, read

OURS = read()
VECTOR = 8  # 16-bit elements in 16 bytes
# Llama 3: element_bytes of the input and of the output, gate and up in one.
LAYERS = {
    "8B qkv": (4096, (32 + 2 * 8) * 128),
    "8B o": (4096, 4096),
    "8B up": (4096, 2 * 14336),
    "8B down": (14336, 4096),
    "70B qkv": (8192, (64 + 2 * 8) * 128),
    "70B o": (8192, 8192),
    "70B up": (8192, 2 * 28672),
    "70B down": (28672, 8192),
}
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def _rows(shape: Shape) -> tuple[int, int, int]:
    """Elements from one row (column) of A, B and C to the next."""
    return shape.K if shape.layout[0] == "n" else shape.M, shape.N if shape.layout[1] == "n" else shape.K, shape.N


def _squares(sizes: range, layout: str) -> list[Shape]:
    return [Shape(size, size, size, layout) for size in sizes]


def test_sweeps_are_those_of_the_benchmark() -> None:
    """Squares, layers and fp8 shapes are exactly the stated lists."""
    llm = [Shape(m, n, k, "nt", name) for name, (k, n) in LAYERS.items() for m in TOKENS]
    assert list(OURS.sweep("squares256").shapes) == _squares(range(512, 8193, 256), "nn")
    assert list(OURS.sweep("squares128").shapes) == _squares(range(256, 4097, 128), "nn")
    assert list(OURS.sweep("llm").shapes) == llm
    assert list(OURS.sweep("fp8").shapes) == _squares(range(1024, 8193, 512), "nt") + llm
    assert list(OURS.sweep("epilogue").shapes) == _squares(range(1024, 4097, 256), "nt")


@pytest.mark.parametrize("name", ["tall_skinny", "big_k", "ragged", "unaligned"])
def test_other_sweeps_are_large_and_mixed(name: str) -> None:
    """At least 12 different shapes, in every layout."""
    shapes = {(shape.M, shape.N, shape.K, shape.layout) for shape in OURS.sweep(name).shapes}
    assert len(shapes) == len(OURS.sweep(name).shapes) >= 12
    assert {layout for *_, layout in shapes} == {"nn", "nt", "tn", "tt"}


@pytest.mark.parametrize("sweep", OURS.sweeps, ids=lambda sweep: sweep.name)
def test_rows_are_aligned_where_a_sweep_says_so(sweep: Sweep) -> None:
    """Every row starts at 16 bytes, but for `unaligned`, where one at least does not and no size is below 1024."""
    for shape in sweep.shapes:
        aligned = all(row % VECTOR == 0 for row in _rows(shape))
        assert aligned == (sweep.name != "unaligned"), shape
        if sweep.name == "unaligned":
            assert min(shape.M, shape.N, shape.K) >= 1024
        if sweep.name == "ragged":
            assert any(size % 128 for size in (shape.M, shape.N, shape.K)), shape


def test_a_fifth_is_held_out() -> None:
    """One shape in five over all, and between a sixth and a quarter of every sweep; a shape's name does not matter."""
    every = {(s.M, s.N, s.K, s.layout) for sweep in OURS.sweeps for s in sweep.shapes}
    held = {key for key in every if held_out(OURS.held_out_seed, Shape(*key))}
    assert len(held) == round(len(every) / 5)
    for sweep in OURS.sweeps:
        share = sum(held_out(OURS.held_out_seed, shape) for shape in sweep.shapes) / len(sweep.shapes)
        assert 1 / 6 <= share <= 1 / 4, sweep.name
        assert all(held_out(OURS.held_out_seed, s) == ((s.M, s.N, s.K, s.layout) in held) for s in sweep.shapes)


def test_the_held_out_shapes_do_not_move() -> None:
    """The split is part of what was measured: these are held out, by a digest that no Python version changes."""
    held = [shape.M for shape in OURS.sweep("squares256").shapes if held_out(OURS.held_out_seed, shape)]
    assert held == [2560, 2816, 3328, 5120, 5888, 6144, 6656]


def test_offsets_are_held_out_by_themselves() -> None:
    """A product whose operands begin elsewhere is another one, so one in five of these too."""
    shapes = [Shape(size, 1024, 512, "nt") for size in range(1000)]
    at_lines, behind = ([held_out(7, shape, offsets) for shape in shapes] for offsets in ((0, 0), (16, 0)))
    assert at_lines == [held_out(7, shape) for shape in shapes] != behind
    assert 160 < sum(behind) < 240


def test_what_is_no_file_of_shapes(tmp_path: Path) -> None:
    """A file that cannot be read, or has a wrong entry, is named together with what is wrong."""
    path = tmp_path / "shapes.json"
    with pytest.raises(SpecError, match=r"shapes\.json is no file of shapes: FileNotFoundError"):
        read(path)
    for entry in ("[1, 2, 3]", '[1, 2, 3, "xx"]', '[0, 2, 3, "nn"]', '[1, 2, 3, "nn", "a", "b"]', "3"):
        path.write_text(f'{{"held_out_seed": 1, "sweeps": {{"mine": {{"about": "", "shapes": [{entry}]}}}}}}')
        with pytest.raises(SpecError, match="no file of shapes"):
            read(path)
    path.write_text('{"held_out_seed": 1, "sweeps": {"mine": {"about": "", "shapes": [[1, 2, 3, "tn", "x"]]}}}')
    assert read(path).sweep("mine").shapes == (Shape(1, 2, 3, "tn", "x"),)
    with pytest.raises(SpecError, match="unknown sweep 'other'; known: mine"):
        read(path).sweep("other")
