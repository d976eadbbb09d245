"""`aotmm bench models` and `expert_layers` where they cannot run; tests/gpu/test_bench.py runs a model."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from aotmm.bench import expert_layers, models
from aotmm.errors import SpecError


@pytest.mark.parametrize("subject", [models, expert_layers], ids=["models", "expert_layers"])
def test_says_that_transformers_is_missing(subject: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the measurement, the package, what was found, and the extra that has it."""

    def missing(_name: str) -> str:
        raise PackageNotFoundError

    name = subject.__name__.rpartition(".")[2]
    for version, why in ((missing, "it is not installed"), (lambda _name: "4.57.6", r"found 4\.57\.6")):
        monkeypatch.setattr(models, "version", version)
        message = rf'{name} needs transformers 5, of the models extra \({why}\): pip install "aotmm\[models\]"'
        with pytest.raises(SpecError, match=message):
            subject.measure()


def test_says_that_timm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models need timm beside transformers; the error names it."""

    def found(name: str) -> str:
        if name == "timm":
            raise PackageNotFoundError
        return "5.17.0"

    monkeypatch.setattr(models, "version", found)
    with pytest.raises(SpecError, match=r"^models needs timm 1, of the models extra \(it is not installed\)"):
        models.measure()


def test_says_that_the_example_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Expert layers are measured by the checkout's example; without it the error names the file."""
    monkeypatch.setattr(models, "version", lambda _name: "5.17.0")
    monkeypatch.setattr(expert_layers, "_EXAMPLE", tmp_path / "experts.py")
    with pytest.raises(SpecError, match=r"the example of a checkout; there is no .*experts\.py"):
        expert_layers.measure()
