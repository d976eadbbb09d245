"""What runs on whatever GPU is there, each test under a time limit."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import aotmm
from aotmm.runtime.library import Library

LIMIT_S = 180  # of a test; a module whose tests are quick has a LIMIT_S of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the ring where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def terminal(pytestconfig: pytest.Config) -> Iterator[int]:
    """A file descriptor of stderr as it was before pytest caught it."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        copy = os.dup(2)
    yield copy
    os.close(copy)


@pytest.fixture(autouse=True)
def limit(terminal: int, request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Ends the whole run with a traceback if a test takes longer, for nothing can be done on a GPU whose kernel hangs.

    A test that has reason to take longer calls it with the seconds that it needs from then on.
    """

    def end_after(seconds: int) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=terminal)

    end_after(getattr(request.module, "LIMIT_S", LIMIT_S))
    yield end_after
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def fp32_precision(name: str) -> Iterator[None]:
    """torch's products of fp32 in that precision, and the setting as it was afterwards."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture(scope="session")
def lib() -> Library:
    """The packs of this checkout."""
    return aotmm.load()


@pytest.fixture
def generator() -> torch.Generator:
    """The same random numbers in every run."""
    return torch.Generator("cuda").manual_seed(20261120)
