"""What several of these tests need: an installed wheel, the packs, and a stand-in for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aotmm
from aotmm.runtime import composite
from aotmm.runtime.library import Library
from tests.runtime.installation import install
from tests.runtime.stand_in import Call, stand_in


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch.compile's cache in a folder of the tests, for the processes that they start too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout; it is installed in `site` beside it."""
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="session")
def site(wheel: Path) -> Path:
    """A folder with the wheel installed in it and nothing else."""
    return wheel.parent / "site"


@pytest.fixture(scope="session")
def lib() -> Library:
    """The packs that `make artifacts` built."""
    return aotmm.load()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """The calls of aotmm::mm and its overload, which compute on the CPU while the fixture lasts.

    Operands may be float64 too, for numerical derivatives.
    """
    monkeypatch.setattr(composite, "_DIFFERENTIABLE", (*composite._DIFFERENTIABLE, torch.float64))
    _, kernels, found = stand_in()
    yield found
    kernels._destroy()  # type: ignore[no-untyped-call]
