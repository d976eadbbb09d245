"""`aotmm bench models` and `expert_layers` where they cannot run; tests/gpu/test_bench.py runs a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from aotmm.bench import expert_layers, models
from aotmm.errors import SpecError


@pytest.mark.parametrize("subject", [models, expert_layers], ids=["models", "expert_layers"])
def test_says_that_transformers_is_missing(subject: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the measurement, the package and the extra that has it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    name = subject.__name__.rpartition(".")[2]
    with pytest.raises(
        SpecError, match=rf'{name} needs transformers, of the models extra: pip install "aotmm\[models\]"'
    ):
        subject.measure()


def test_says_that_the_example_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Expert layers are measured by the checkout's example; without it the error names the file."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(expert_layers, "_EXAMPLE", tmp_path / "experts.py")
    with pytest.raises(SpecError, match=r"the example of a checkout; there is no .*experts\.py"):
        expert_layers.measure()
