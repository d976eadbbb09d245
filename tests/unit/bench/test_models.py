"""`aotmm bench models` where it cannot run; tests/gpu/test_bench.py runs a model."""

from __future__ import annotations

import importlib.util

import pytest

from aotmm.bench import models


def test_says_that_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only row names the package and the extra that has it, and has no figures."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert models.measure() == {'not run: transformers is not installed; pip install "aotmm[models]"': {}}
