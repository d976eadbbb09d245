"""The committed shapes: what the sweeps say they are, and a held-out tenth that does not move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotmm.errors import SpecError
from aotmm.timing.problems import Case, Shape, Sweep, read

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


def _cases(sizes: Iterable[int], **options: Any) -> list[Case]:
    return [Case(Shape(size, 1000, 504, "nt"), "fp16", **options) for size in sizes]


def test_a_tenth_is_held_out() -> None:
    """One product in ten, whatever its type; those whose operands begin elsewhere by themselves."""
    sizes = range(1, 2001)
    at_lines, behind = (list(map(OURS.held_out, _cases(sizes, offset_a=offset))) for offset in (0, 16))
    assert at_lines != behind
    for each in (at_lines, behind):
        assert 160 < sum(each) < 240
    assert at_lines == [OURS.held_out(replace(case, dtype="bf16", fast_accum=True)) for case in _cases(sizes)]


def test_products_of_sweeps_are_not_held_out() -> None:
    """Their times are part of tables; the same sizes behind a line of memory are other products."""
    cases = [Case(shape, "fp16") for sweep in OURS.sweeps for shape in sweep.shapes]
    assert all(map(OURS.swept, cases))
    assert not any(map(OURS.held_out, cases))
    elsewhere = [replace(case, offset_b=32) for case in cases]
    assert not any(map(OURS.swept, elsewhere))
    assert 0.05 < sum(map(OURS.held_out, elsewhere)) / len(elsewhere) < 0.15


def test_the_held_out_products_do_not_move() -> None:
    """The split is part of what was measured: these are held out, by a digest that no Python version changes."""
    assert [case.shape.M for case in _cases(range(1, 60)) if OURS.held_out(case)] == [13, 38, 46, 57, 59]


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
