"""Providers as far as they go without a GPU: torch's own calls, and what CUTLASS is compiled with."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from aotmm.bench import nvcc
from aotmm.bench.providers import NAMES, NotRunError, cutlass, library, provider
from aotmm.problem import LAYOUTS
from aotmm.timing.check import truth
from aotmm.timing.operands import Pool
from aotmm.timing.problems import Case, Shape

SOURCE = (Path(cutlass.__file__).parent / "cutlass.cu").read_text()


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every provider is found under its name; without its library it says so when it is asked to multiply."""
    assert [provider(name).name for name in NAMES] == list(NAMES)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "aotmm.bench.providers.tutorial", raising=False)
    with pytest.raises(NotRunError, match="triton is not installed"):
        provider("tutorial").prepare(Case(Shape(8, 8, 8, "nn"), "fp16"), [])


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("torch", Case(Shape(70, 90, 50, "nt"), "fp16")),
        ("unfused", Case(Shape(70, 90, 50, "nt"), "bf16", activation="relu")),
        ("unfused", Case(Shape(70, 90, 50, "nn"), "bf16", activation="gelu")),
        ("addmm", Case(Shape(70, 90, 50, "nt"), "bf16", activation="none")),
        ("addmm", Case(Shape(70, 90, 50, "nt"), "bf16", activation="relu")),
        ("addmm", Case(Shape(70, 90, 50, "tn"), "bf16", activation="gelu")),
    ],
)
def test_torch(name: str, case: Case) -> None:
    """torch's calls write the case's result within what their roundings allow."""
    torch.manual_seed(2)
    sets = Pool(torch.device("cpu")).operands(case, cache_bytes=1)
    row = provider(name)
    row.prepare(case, sets)(sets[0])
    right = truth(sets[0].a, sets[0].b, sets[0].out.dtype, sets[0].epilogue)
    assert right.error(sets[0].out, row.roundings) <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_mm_gets_copies(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """It takes rows of A and columns of B alone. Others are copied, within the call, so that this is timed too."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, **_: given.extend(operands))
    case = Case(Shape(48, 32, 64, layout), "fp8e4")
    sets = Pool(torch.device("cpu")).operands(case, cache_bytes=1)
    provider("scaled_mm").prepare(case, sets)(sets[0])
    for operand, tensor in zip((sets[0].a, sets[0].b.mT), (given[0], given[1].mT), strict=True):
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.int8), operand.view(torch.int8))
        assert (tensor.data_ptr() == operand.data_ptr()) == operand.is_contiguous()


def test_torch_mm_has_no_epilogue() -> None:
    """A case with an activation is not for torch.mm."""
    with pytest.raises(NotRunError, match="no epilogue"):
        library.PROVIDERS[0].prepare(Case(Shape(8, 8, 8, "nn"), "fp16", activation="relu"), [])


@pytest.mark.parametrize("config", [*cutlass.HOPPER_CONFIGS, *cutlass.AMPERE_CONFIGS], ids=cutlass.name)
def test_macros(config: cutlass.Config) -> None:
    """What a configuration defines is what the source reads, and only Hopper's have a config."""
    macros = dict(text.removeprefix("-D").split("=") for text in cutlass.definitions(config, "bf16", "nt"))
    assert macros["ELEMENT"] == "cutlass::bfloat16_t"
    assert (macros["LAYOUT_A"], macros["LAYOUT_B"]) == ("RowMajor", "ColumnMajor")
    assert ("SCHEDULE" in macros) == (config in cutlass.HOPPER_CONFIGS)
    assert all(re.search(rf"\b{name}\b", SOURCE) for name in macros)


def test_cutlass_is_not_run_without_its_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvcc, no package, or a product that it is not built for: said, not raised as an error."""
    prepare = provider("cutlass").prepare
    for case, reason in (
        (Case(Shape(512, 512, 512, "nt"), "fp16"), "layout nn"),
        (Case(Shape(256, 512, 512, "nn"), "fp16"), "sizes 512 to 8192"),
    ):
        with pytest.raises(NotRunError, match=reason):
            prepare(case, [])
    for case, reason in (
        (Case(Shape(64, 64, 64, "nn"), "tf32"), "plain 16-bit products"),
        (Case(Shape(64, 60, 64, "nn"), "fp16"), "16-byte rows"),
        (Case(Shape(60, 64, 64, "tn"), "fp16"), "16-byte rows"),
    ):
        with pytest.raises(NotRunError, match=reason):
            next(cutlass.calls(case, [], cutlass.AMPERE_CONFIGS, 108))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NotRunError, match="nvidia-cutlass is not installed: pip install"):
        cutlass.build(cutlass.AMPERE_CONFIGS, "fp16", "nn")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(NotRunError, match="no nvcc on the PATH"):
        nvcc.built(tmp_path / "any.cu", "any", [])


def test_slices_of_cutlass() -> None:
    """Its kernels for Ampere split K into slices of four steps at least, where the tiles are too few for two waves."""
    config = (128, 128, 32, 64, 64, 4)
    assert cutlass._options(config, Case(Shape(256, 256, 4096, "nn"), "fp16"), 108) == (1, 2, 4, 8)
    assert cutlass._options(config, Case(Shape(256, 256, 256, "nn"), "fp16"), 108) == (1, 2)
    assert cutlass._options(config, Case(Shape(1280, 1280, 4096, "nn"), "fp16"), 108) == (1, 2)
    assert cutlass._options(config, Case(Shape(4096, 4096, 4096, "nn"), "fp16"), 108) == (1,)
