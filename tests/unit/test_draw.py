"""The random draw: reproducible, and of the distribution that its file states."""

from __future__ import annotations

import math

import pytest

from aotmm.errors import SpecError
from aotmm.timing.draw import Class, distribution, draw

KNOWN = distribution()


def test_same_seed_gives_same_problems_whatever_the_other_classes_and_the_count() -> None:
    """Draw the same problems again, whatever the other classes and the count."""
    whole = draw(KNOWN, 7, 400)
    assert whole == draw(KNOWN, 7, 400)
    assert draw(KNOWN, 7, 40, ["odd"])["odd"] == whole["odd"][: len(draw(KNOWN, 7, 40, ["odd"])["odd"])]
    assert all(draw(KNOWN, 8, 400)[name] != cases for name, cases in whole.items())


def test_shares_of_what_is_not_apart_are_a_whole() -> None:
    """Shares of the classes that are not apart add up to 1."""
    assert sum(each.share for each in KNOWN.classes if not each.apart) == pytest.approx(1)


@pytest.mark.parametrize("each", KNOWN.classes, ids=lambda each: each.name)
def test_problems_are_of_the_distribution(each: Class) -> None:
    """Problems have the sizes, types, layouts and offsets of their class, and all of these come."""
    layers = {(layer.N, layer.K) for layer in KNOWN.layers}
    cases = draw(KNOWN, 3, 3000, [each.name])[each.name]
    assert {case.dtype for case in cases} == set(each.dtypes)
    assert {case.shape.layout for case in cases} == set(each.layouts)
    assert {case.offset_a for case in cases} == {case.offset_b for case in cases} == set(each.offsets)
    assert all(case.fast_accum == each.fast_accum for case in cases)
    assert {case.activation for case in cases} == {"none" if each.bias else None}
    assert not any(each.offsets) or all(case.offset_a or case.offset_b for case in cases)
    if each.most_batch == 1:
        assert {case.batch for case in cases} == {1}
    else:
        assert min(case.batch for case in cases) == 2
        assert each.most_batch / 2 < max(case.batch for case in cases) <= each.most_batch
        assert all(case.bytes <= case.element_bytes * 2**28 for case in cases)
    for case in cases:
        M, N, K = case.shape.M, case.shape.N, case.shape.K
        kinds = {
            "layer": (N, K) in layers and each.least <= M <= each.most,
            "gradient": (M, N) in layers and each.least <= K <= each.most,
            "free": all(size % each.step == 0 and each.least <= size <= each.most for size in (M, N, K)),
            "odd": (M % 2 or N % 2 or K % 2) and all(each.least <= size <= each.most for size in (M, N, K)),
            "few_rows": M <= 16 and case.shape.layout[0] == "n" and N % each.step == K % each.step == 0,
            "scores": K in (64, 128) and case.shape.layout == "nt" and M % each.step == N % each.step == 0,
            "values": N in (64, 128) and case.shape.layout == "nn" and M % each.step == K % each.step == 0,
            "long": (M < 32 or N < 32)
            and K <= 500_000
            and K % each.step == 0
            and case.shape.layout == ("nt" if "nt" in each.layouts else case.shape.layout),
            "tall": M <= 1_000_000 and K <= 128 and M % each.step == N % each.step == K % each.step == 0,
            "square": M == N == K and M % each.step == 0 and each.least <= M <= each.most,
        }
        assert any(kinds[kind] for kind in each.sizes)


def test_tokens_of_layers_are_log_uniform_over_all_integers() -> None:
    """Tokens have the parts of a log-uniform law in each band, and every remainder by 8."""
    tokens = [case.shape.M for case in draw(KNOWN, 11, 8000, ["layers"])["layers"]]
    for least, most in ((1, 16), (17, 256), (257, 1024), (1025, 8192)):
        part = sum(least <= M <= most for M in tokens) / len(tokens)
        # rounding gives an integer m what lies from m - 1/2 to m + 1/2
        ends = [min(max(end, 1), 8192) for end in (least - 0.5, most + 0.5)]
        assert part == pytest.approx(math.log(ends[1] / ends[0]) / math.log(8192), abs=0.03)
    assert len({M % 8 for M in tokens}) == 8


def test_unknown_class_is_named() -> None:
    """An unknown class is an error that lists the known ones."""
    with pytest.raises(SpecError, match="unknown class even; known: layers, multiples"):
        draw(KNOWN, 1, 10, ["even"])


def test_a_part_of_all_problems() -> None:
    """As many are drawn as of all, in the same order, and no others."""
    few = draw(KNOWN, 7, 40, among=lambda case: case.shape.M % 16 < 8)
    for name, cases in draw(KNOWN, 7, 400).items():
        assert len(few[name]) == len(draw(KNOWN, 7, 40)[name])
        assert few[name] == [case for case in cases if case.shape.M % 16 < 8][: len(few[name])]
