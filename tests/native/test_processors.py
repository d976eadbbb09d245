"""The time model's code for processors with AVX2 and FMA, and that for any other: they do not differ in one bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aotmm.build import link
from aotmm.errors import NoKernelError
from aotmm.pack import table
from aotmm.runtime.launcher import Launcher, Plan
from aotmm.runtime.pack import open_pack
from tests.build.packs import opened_pack, relinked
from tests.native.test_core import draw, usual
from tests.samples import SHIPPED

PROBLEMS, LIMIT = 2000, 1 << 40  # bytes of a workspace


def chosen(mm: Launcher, arch: str) -> list[Plan | None]:
    """The plans for random problems on random devices, always the same ones; None where there is none."""
    rng, found = np.random.default_rng(9), list[Plan | None]()
    for number in range(PROBLEMS):
        problem, device = (usual if number % 2 else draw)(rng, arch)
        try:
            found.append(mm.select(problem, device, LIMIT))
        except NoKernelError:
            found.append(None)
    return found


@pytest.mark.skipif(
    not {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()),
    reason="all code here is that for any processor",
)
@pytest.mark.parametrize("arch", SHIPPED)
def test_any_processor(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher without AVX2 and FMA takes the same plans, and predicts the same times."""
    whole = opened_pack(arch)
    monkeypatch.setattr(link, "FLAGS", (*link.FLAGS, "-DAOTMM_ANYWHERE"))
    anywhere = open_pack(relinked(whole.folder, tmp_path, whole.manifest.kernels, table.shipped(arch)))
    plans = chosen(whole.launcher, arch)
    assert chosen(anywhere.launcher, arch) == plans
    assert sum(plan is not None for plan in plans) > PROBLEMS / 2
