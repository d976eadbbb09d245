"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rests of the GPU between replays, in ns, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr("aotmm.bench.protocol.idle", found.append)
    return found
