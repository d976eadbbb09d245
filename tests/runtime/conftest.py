"""What several of these tests need: an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.installation import install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout; it is installed in `site` beside it."""
    return install(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="session")
def site(wheel: Path) -> Path:
    """A folder with the wheel installed in it and nothing else."""
    return wheel.parent / "site"
