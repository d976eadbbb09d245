"""Small packs for the fake drivers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.packs import default_pack, tiny_pack
from tests.native.emulation import ARCHS, missing


@pytest.fixture(params=ARCHS)
def pack(request: pytest.FixtureRequest) -> Path:
    """The folder of a small pack, for CUDA and for HIP unless a test names the arch."""
    return tiny_pack(_executable(request.param))


@pytest.fixture(params=ARCHS)
def many_kernels(request: pytest.FixtureRequest) -> Path:
    """The folder of the default pack, for CUDA and for HIP."""
    return default_pack(_executable(request.param))


def _executable(arch: str) -> str:
    """`arch`, if this machine has what a fake driver for it needs."""
    if reason := missing(arch):
        pytest.skip(reason)
    return arch
