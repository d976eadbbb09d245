"""Small packs for the fake drivers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.packs import tiny_pack
from tests.native.emulation import ARCHS, missing


@pytest.fixture(params=ARCHS)
def pack(request: pytest.FixtureRequest) -> Path:
    """The folder of a small pack, for CUDA and for HIP unless a test names the arch."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return tiny_pack(request.param)
