"""`aotmm bench models` where it cannot run; tests/gpu/test_bench.py runs a model."""

from __future__ import annotations

import importlib.util

import pytest

from aotmm.bench import models
from aotmm.errors import SpecError


def test_says_that_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package and the extra that has it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        SpecError, match=r'models needs transformers, of the models extra: pip install "aotmm\[models\]"'
    ):
        models.measure()
