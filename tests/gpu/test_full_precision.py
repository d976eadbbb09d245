"""fp32 in full precision: errors at most twice torch's, and infinite where torch's is. On Hopper numbers are split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aotmm.runtime.library import Library
from tests.gpu.conftest import fp32_precision

LIMIT_S = 120
MOST = 2.0  # of torch's error
SHAPES = [(128, 128, 64), (4096, 64, 128), (300, 520, 1600), (64, 4096, 4096), (1000, 3080, 800), (178, 512, 18944)]


@pytest.fixture(autouse=True)
def ieee() -> Iterator[None]:
    """torch's products of fp32 in fp32."""
    with fp32_precision("ieee"):
        yield


def ordered(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same matrix or batch, with rows ("n") or columns ("t") one after another in memory."""
    return x if layout == "n" else x.mT.contiguous().mT


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("signs", ["both", "one"])
def test_errors_are_torchs(
    lib: Library, generator: torch.Generator, layout: str, shape: tuple[int, int, int], signs: str
) -> None:
    """The mean square of errors is at most that of torch's times four, also where all products have one sign."""
    m, n, k = shape
    a, b = (torch.randn(*size, device="cuda", generator=generator) for size in ((m, k), (k, n)))
    if signs == "one":
        a, b = a.abs(), b.abs()
    a, b = ordered(a, layout[0]), ordered(b, layout[1])
    want = a.double() @ b.double()
    ours, own = ((c.double() - want).square().mean().sqrt() for c in (lib.matmul(a, b), a @ b))
    assert ours <= MOST * own


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", [(256, 256, 256), (300, 136, 100), (16, 520, 4096), (129, 64, 32)], ids=str)
def test_what_is_not_finite_is_where_torchs_is(
    lib: Library, generator: torch.Generator, layout: str, shape: tuple[int, int, int]
) -> None:
    """Infinite numbers, NaN and zeros at random places give the infinities and NaN that torch gives."""
    m, n, k = shape
    for count in (1, 3, 30):
        a, b = (torch.randn(*size, device="cuda", generator=generator) for size in ((m, k), (k, n)))
        for x in (a, b):
            for value in (torch.inf, -torch.inf, torch.nan, 0.0):
                places = torch.randint(x.numel(), (count,), device="cuda", generator=generator)
                x.view(-1)[places] = value
        a, b = ordered(a, layout[0]), ordered(b, layout[1])
        got, want = lib.matmul(a, b), a @ b
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got[got.isinf()], want[want.isinf()])


def test_large_and_small_numbers(lib: Library) -> None:
    """The largest number of bf16 is multiplied as it is; a number of 2^-109 or more keeps all of its bits."""
    eye = torch.eye(64, device="cuda")
    large = torch.full((64, 64), 3.3895e38, device="cuda")
    assert torch.equal(lib.matmul(large, eye), large)
    small = torch.full((64, 64), 1.2345678 * 2.0**-109, device="cuda")
    assert torch.equal(lib.matmul(small, eye), small)
