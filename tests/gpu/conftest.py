"""What runs on whatever GPU is there."""

from __future__ import annotations

import pytest
import torch

import aotmm
from aotmm.runtime.library import Library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the ring where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def lib() -> Library:
    """The packs of this checkout."""
    return aotmm.load()


@pytest.fixture
def generator() -> torch.Generator:
    """The same random numbers in every run."""
    return torch.Generator("cuda").manual_seed(20261120)
