"""tf32: errors are torch's, since operands are rounded to nearest as torch's are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aotmm.runtime.library import Library
from tests.gpu.conftest import fp32_precision
from tests.gpu.test_full_precision import ordered

MOST = 1.1  # of torch's error; operands that are cut have 2.7 times of it
SHAPES = [(128, 128, 64), (300, 520, 1600), (16, 4096, 4096), (1000, 3080, 800), (64, 72, 36864), (77, 301, 1023)]


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    """torch's products of fp32 in tf32."""
    with fp32_precision("tf32"):
        yield


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [(), (5,)], ids=["one", "batch"])
def test_errors_are_torchs(
    lib: Library, generator: torch.Generator, layout: str, shape: tuple[int, int, int], batch: tuple[int, ...]
) -> None:
    """The root of the mean square of errors is at most 1.1 times torch's, and they are not towards zero."""
    m, n, k = shape
    a, b = (torch.randn(*batch, *size, device="cuda", generator=generator) for size in ((m, k), (k, n)))
    a, b = ordered(a, layout[0]), ordered(b, layout[1])
    want = a.double() @ b.double()
    ours, own = ((c.double() - want) for c in (lib.matmul(a, b), a @ b))
    assert ours.square().mean().sqrt() <= MOST * own.square().mean().sqrt()
    towards_zero = -(ours * want.sign()).mean()  # cut operands: 7e-4 of the mean size
    assert towards_zero <= 1e-4 * want.abs().mean()
