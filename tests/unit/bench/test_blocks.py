"""Products with block scales: what is drawn, the check, rows and targets, with stand-ins for GPU and kernels."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aotmm.bench import blocks, preload, results
from aotmm.bench.blocks import run_blocks, with_scales, work
from aotmm.bench.drawn_summary import BLOCKS, drawn_goals, sections
from aotmm.bench.facts import State
from aotmm.bench.providers import Call
from aotmm.bench.results import Row
from aotmm.runtime.launcher import Plan
from aotmm.timing.blocks import Layers, draw, layers
from aotmm.timing.check import truth
from aotmm.timing.correctness import Epilogue, block_scaled
from aotmm.timing.experts import Experts, Model, experts
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import read
from tests.unit.bench.samples import FakeStopwatch, drawn_facts

TINY = Layers("", 80, ((72, 272), (136, 144)), (160,))
MODELS = Experts("", 8, 40, 3, (Model("tiny", 3, 272, 144),))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_problems_are_of_the_model(seed: int) -> None:
    """Layers are the listed ones on multiples of 4 rows; groups of experts begin at multiples of 128; all is fp8."""
    known, drawn = layers(), draw(layers(), experts(), seed, 9)
    assert {name: len(cases) for name, cases in drawn.items()} == {"layers": 9, "experts": 3, "cubes": 4}
    for name, cases in drawn.items():
        for case in cases:
            M, N, K = case.shape.M, case.shape.N, case.shape.K
            assert (case.dtype, case.shape.layout, case.output) == ("fp8e4", "nt", "bf16")
            if name == "layers":
                assert [N, K] in [list(layer) for layer in known.layers]
                assert 4 <= M <= 8192
                assert M % 4 == 0
            if case.groups is not None:
                assert not any(size % 128 for size in case.groups.sizes)
                assert sum(case.groups.sizes) == M
    assert drawn == draw(layers(), experts(), seed, 9)


def test_layers_are_those_that_tuning_never_knows() -> None:
    """Tuning times layers of the same kind, but fits no model to the tenth that is held out."""
    known = read()
    found = [item.case for item in work(5, 20) if "layers" in item.sweeps]
    assert len(found) == 20
    assert all(known.held_out(case) and case.kind == "block_scaled" for case in found)


def test_bands() -> None:
    """Layers of up to 64 and 128 rows are classes of their own, which have targets."""
    found = work(3, 60)
    assert {item.sweeps for item in found} == {
        ("layers",), ("layers", "layers, M up to 128"),
        ("layers", "layers, M up to 64", "layers, M up to 128"), ("experts",), ("cubes",),
    }  # fmt: skip
    assert all(item.case.shape.M <= 64 for item in found if "layers, M up to 64" in item.sweeps)
    goals = drawn_goals(drawn_facts(figure=BLOCKS))
    targets = {(goal.sweeps[0], goal.against): (goal.mean, goal.worst) for goal in goals if goal.mean is not None}
    assert targets == {
        ("layers", "torch"): (1.1, 0.95),
        ("layers, M up to 64", "torch"): (1.8, None),
        ("layers", "deep_gemm"): (0.97, None),
        ("layers, M up to 128", "deep_gemm"): (1.05, None),
        ("cubes", "unscaled"): (0.97, None),
    }


def _operands(name: str) -> list[Operands]:
    (case, *_) = draw(TINY, MODELS, 1, 3)[name]
    return [with_scales(case, x, ones=False) for x in Pool(torch.device("cpu")).operands(case, cache_bytes=1)]


def _product(x: Operands) -> torch.Tensor:
    """What a right product is."""
    assert x.block_scales is not None
    of_a, of_b = (scale.double() for scale in x.block_scales)
    a, b = x.a.double(), x.b.double()
    if x.offs is None:
        left, right = block_scaled(a, b, of_a, of_b)
        return (left @ right).to(x.out.dtype)  # type: ignore[no-any-return]
    parts, begin = [], 0
    for group, end in enumerate(x.offs.tolist()):
        left, right = block_scaled(a[begin:end], b[group], of_a[begin:end], of_b[group])
        parts.append(left @ right)
        begin = end
    return torch.cat(parts).to(x.out.dtype)


@pytest.mark.parametrize("name", ["layers", "experts", "cubes"])
def test_the_check(name: str) -> None:
    """It takes the right product, and refuses one whose scale of any block is another's."""
    for x in _operands(name):
        right = truth(x.a, x.b, x.out.dtype, x.epilogue, x.offs, x.block_scales)
        assert 0 < right.error(_product(x)) <= 1
        of_a, of_b = x.block_scales or (x.a, x.b)
        for wrong in ((of_a.flip(1), of_b), (of_a, of_b.flip(-1)), (of_a.flip(0), of_b)):
            assert right.error(_product(replace(x, block_scales=wrong))) > 1
        assert of_a.stride(0) == 1, "lines along M"
        assert of_b.stride(-1) % 4 == 0, "torch wants blocks of K in fours"


class _Library:
    """Multiplies on the CPU; its launcher chooses kernel 0 of two configs."""

    kernels = tuple(SimpleNamespace(name=name, config_name=name, fast_accum=False) for name in "ab")

    def launcher(self, _ordinal: int) -> _Library:
        return self

    def plan(self, _problem: object, _ordinal: int, _limit: int) -> Plan:
        return Plan(0, cost=10)

    def problem(self, *_operands: torch.Tensor, **_: object) -> None:
        return None

    def matmul(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **options: Any) -> torch.Tensor:
        scales_ = options["scale_a"], options["scale_b"]
        return out.copy_(_product(Operands(a, b, out, Epilogue(), options.get("offs"), scales_)))

    grouped_mm = matmul


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class has its rivals; what is not here is told with its reason; our own product is compared for cubes."""

    def launched(_launcher: _Library, _plan: Plan, _problems: object) -> Call:
        return lambda x: x.out.copy_(_product(x))

    def unscaled(x: Operands) -> torch.Tensor:
        assert all(bool((scale == 1).all()) for scale in x.block_scales or ())
        return x.out.copy_(_product(x))

    here = drawn_facts(cache_bytes=1)
    del here["seed"], here["figure"]
    monkeypatch.setattr(blocks, "gpu", lambda: 0)
    monkeypatch.setattr(preload, "measure", lambda seed: {"problems": 797.0, "ms": 10.0 * seed})
    monkeypatch.setattr(blocks, "library", _Library)
    monkeypatch.setattr(blocks, "rivals", lambda *_: {"b": Plan(1, cost=9)})
    monkeypatch.setattr(blocks, "launches", launched)
    monkeypatch.setattr(blocks, "_unscaled", unscaled)
    monkeypatch.setattr(blocks, "GraphStopwatch", FakeStopwatch)
    monkeypatch.setattr(blocks, "Pool", lambda _: Pool(torch.device("cpu")))
    monkeypatch.setattr(blocks, "layers", lambda: TINY)
    monkeypatch.setattr(blocks, "experts", lambda: MODELS)
    monkeypatch.setattr("aotmm.bench.facts.collect", lambda _: dict(here))
    monkeypatch.setattr("aotmm.bench.facts.watched", lambda _: nullcontext(State()))
    seen: list[Row] = []
    run_blocks(5, tmp_path, seen.append, count=3)
    rows = results.read(tmp_path).rows
    assert [row.case for row in rows] == [row.case for row in seen]
    assert sorted(row.sweeps[0] for row in rows) == ["cubes", "experts", "layers", "layers", "layers"]
    for row in rows:
        assert {"aotmm", "b", "best"} <= row.times.keys()
        assert ("unscaled" in row.times) == (row.sweeps[0] == "cubes")
        assert row.not_run["deep_gemm"].startswith("deep_gemm is not here")
        assert ("torch" in row.times or "torch" in row.not_run) == (row.sweeps[0] != "experts")
    found = sections([results.read(tmp_path)])
    assert "fp8 with block scales" in found[0].title
    (preloading,) = [section for section in found if section.title == "Preloading in a fresh process"]
    assert (preloading.header, preloading.rows) == (("seed", "problems", "ms"), [("5", "797", "50")])


def test_preloaded_problems() -> None:
    """They are 797, of DeepSeek-V3 alone, dense and in groups; a seed gives the same."""
    found = preload.cases(3)
    assert len(found) == 797
    assert found == preload.cases(3) != preload.cases(4)
    assert {len(case.groups.sizes) if case.groups else 0 for case in found} == {0, 32}
    assert all("DeepSeek V3" in case.shape.name and case.dtype == "fp8e4" for case in found)
