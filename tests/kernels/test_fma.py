"""Family `fma`: facts that its source relies on. test_tile.py and tests/gpu show that its images are right."""

from __future__ import annotations

import pytest

from aotmm.runtime.pack import open_pack
from tests.build.packs import default_pack


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_shared_memory_is_the_ring(arch: str) -> None:
    """No layout is converted through shared memory, which would need barriers that the source does not have."""
    kernels = [kernel for kernel in open_pack(default_pack(arch)).manifest.kernels if kernel.family == "fma"]
    in_groups = {"grouped_k"} if arch == "sm90" else {"grouped_m", "grouped_k"}  # Hopper's rows are of other families
    assert {kernel.role for kernel in kernels} == {"product", "partial"} | in_groups
    for kernel in kernels:
        config = kernel.config
        ring = config.num_stages * config.block_k * (config.block_m + config.block_n) * 4
        assert kernel.shared_bytes == ring, kernel.name
