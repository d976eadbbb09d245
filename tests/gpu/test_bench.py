"""`aotmm bench` on the GPU that is there, over shapes so small that it takes seconds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from aotmm.bench import expert_layers, models
from aotmm.bench import run as bench
from aotmm.bench.cases import COMPARISONS
from aotmm.bench.drawn import run_drawn
from aotmm.bench.grouped import run_grouped
from aotmm.bench.protocol import GraphStopwatch
from aotmm.bench.providers import NotRunError, provider
from aotmm.bench.results import FORMAT, Row, read
from aotmm.bench.summary import LIMIT, RATIO
from aotmm.cli import main
from aotmm.errors import SpecError
from aotmm.runtime import ops
from aotmm.runtime.library import Library
from aotmm.timing import problems
from aotmm.timing.check import truth
from aotmm.timing.draw import distribution
from aotmm.timing.experts import Experts, Model
from aotmm.timing.operands import Pool
from aotmm.timing.problems import Case, Shape

ENTRIES = [[256, 256, 256, "nn"], [256, 264, 200, "nn"]]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every sweep has two small shapes, fp8 and epilogue one, in nt."""
    sweeps = {name: ENTRIES if name not in ("fp8", "epilogue") else [[256, 256, 256, "nt"]] for name in COMPARISONS}
    body = {name: {"about": "", "shapes": rows} for name, rows in sweeps.items()}
    (tmp_path / "tiny.json").write_text(json.dumps({"held_out_seed": 1, "sweeps": body}))
    found = problems.read(tmp_path / "tiny.json")
    monkeypatch.setattr("aotmm.bench.run.problems.read", lambda: found)


@pytest.mark.usefixtures("tiny")
def test_a_run(tmp_path: Path, lib: Library) -> None:
    """One command measures, checks, writes everything, and continues what it finds."""
    fp8 = any(kernel.dtype_a == "fp8e4" for kernel in lib.pack_for(0).manifest.kernels)
    what = ["squares256", "ragged", "epilogue", *["fp8"] * fp8]
    arguments = ["bench", *what, "--out", str(tmp_path)]
    for name in ("aotmm", "aotmm_plain", "torch", "unfused", "addmm", "scaled_mm"):
        arguments += ["--provider", name]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    for name in ("results.json", "results.csv", "ratio.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 0
    rows = read(tmp_path).rows
    assert len(rows) == 2 * 2 + 2 * 2 + 2 * fp8
    for row in rows:
        assert not row.not_run, row
        assert {"aotmm", "aotmm_plain"} < set(row.times)
        assert all(0 < times.error <= 1 for times in row.times.values())
        assert all(us > 0 for times in row.times.values() for us in times.graph_us)
        assert not row.times["aotmm_plain"].isolated_us
        assert row.times["aotmm"].note
    again: list[Row | str] = []
    bench.run(what, tmp_path, again.append, providers=["aotmm"])
    assert again == [], "all of it was there"


def test_random_problems(tmp_path: Path, lib: Library) -> None:
    """A few of every class are right, have short timings and names of torch's kernels, and are not measured again."""
    fp8 = any(kernel.dtype_a == "fp8e4" for kernel in lib.pack_for(0).manifest.kernels)
    classes = [each.name for each in distribution().classes if fp8 or "fp8e4" not in each.dtypes]
    arguments = ["bench", "random", "--seed", "5", "--count", "12", "--classes", ",".join(classes)]
    found = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    for name in ("results.json", "results.csv", "report.md", "figures.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 0
    rows = read(tmp_path).rows
    assert {row.sweeps[0] for row in rows} == set(classes)
    for row in rows:
        assert "aotmm" not in row.not_run, row
        assert all(0 <= times.error <= 1 and len(times.graph_us) == 5 for times in row.times.values())
        assert all(times.error > 0 for times in row.times.values()) or row.case.dtype == "int8", "only int8 is exact"
        assert all(times.note for times in row.times.values()), "few enough for all to be among the worst"
    again: list[Row] = []
    run_drawn(5, tmp_path, again.append, count=12, classes=classes)
    assert again == [], "all of it was there"


def test_regret(tmp_path: Path) -> None:
    """The chosen plan and the best one are right, and timed in turns."""
    arguments = ["bench", "random", "--regret", "--seed", "5", "--count", "2", "--classes", "layers,squares"]
    found = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    for row in read(tmp_path).rows:
        assert list(row.times) == ["chosen", "best"], row
        assert all(0 < times.error <= 1 and len(times.graph_us) == 5 for times in row.times.values())
        assert row.times["chosen"].note


def test_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of small experts and their gradients are right by every kernel that is timed, and not measured again.

    On Hopper torch's are timed, too. Elsewhere they wait for the GPU, so that no graph can be recorded of them.
    """
    small = Experts("", 256, 4096, 8, (Model("small", 8, 512, 1024), Model("many", 64, 256, 128)))
    monkeypatch.setattr("aotmm.bench.grouped.experts", lambda: small)
    found = CliRunner().invoke(main, ["bench", "grouped", "--seed", "5", "--count", "6", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    for name in ("results.json", "results.csv", "report.md", "figures.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 0
    rows = read(tmp_path).rows
    assert len(rows) == 6 + 2 + 2 + 2 + 2 + 2
    hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    for row in rows:
        assert {"aotmm", "best", *["torch"] * hopper} <= set(row.times), row
        assert row.not_run.keys() <= {"torch"}, row
        # fewer than five rounds where a replay takes long, as on a GPU that others use, too
        assert all(0 < times.error <= 1 and len(times.graph_us) in range(3, 6) for times in row.times.values())
        assert row.times["best"].note
        ratio = row.ratio("aotmm", "best")
        assert ratio is not None
        assert 0.2 < ratio < 1.2
    again: list[Row] = []
    run_grouped(5, tmp_path, again.append, count=6)
    assert again == [], "all of it was there"


def test_results_of_another_machine_are_not_continued(tmp_path: Path) -> None:
    """A folder with results of other software is refused, and named with what differs."""
    (tmp_path / "results.json").write_text(
        json.dumps({"format": FORMAT, "facts": {"torch": "0.1"}, "rows": [], "other": {}})
    )
    with pytest.raises(SpecError, match=r"torch 0\.1 and now"):
        bench.run(["squares256"], tmp_path, lambda _: None)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tutorial(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial's kernel, just in time, is right on a shape that its tiles do not divide."""
    pytest.importorskip("triton")
    from aotmm.bench.providers import tutorial

    every = tutorial.configs("cuda" if torch.version.hip is None else "hip")
    monkeypatch.setattr(tutorial, "configs", lambda _: every[4:6])
    tutorial._kernel.cache_clear()
    case = Case(Shape(200, 264, 104, "nn"), dtype)
    _check("tutorial", case)
    tutorial._kernel.cache_clear()


def test_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUTLASS kernel is right, where nvcc and the headers are."""
    from aotmm.bench.providers import cutlass

    monkeypatch.setattr(cutlass, "HOPPER_CONFIGS", cutlass.HOPPER_CONFIGS[:1])
    monkeypatch.setattr(cutlass, "AMPERE_CONFIGS", cutlass.AMPERE_CONFIGS[-1:])
    try:
        _check("cutlass", Case(Shape(520, 768, 512, "nn"), "fp16"))
    except NotRunError as reason:
        pytest.skip(str(reason))


def _check(name: str, case: Case) -> None:
    row: Any = provider(name)
    sets = Pool(torch.device("cuda", 0)).operands(case, cache_bytes=1)
    run = GraphStopwatch().record(row.prepare(case, sets), sets, len(sets))
    for operands in sets:
        operands.out.fill_(float("nan"))
    assert run() > 0
    right = truth(sets[-1].a, sets[-1].b, sets[-1].out.dtype, sets[-1].epilogue)
    assert right.error(sets[-1].out, row.roundings) <= 1
    assert row.describe(case, sets[0])


def _small() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    return Qwen3MoeModel(
        Qwen3MoeConfig(
            vocab_size=1, num_hidden_layers=1, hidden_size=256, moe_intermediate_size=128, num_experts=8,
            num_experts_per_tok=2,
        )
    )  # fmt: skip


def test_an_expert_layer() -> None:
    """By the example's backend a layer's result, and the gradient of its tokens, are those of experts in fp32."""
    pytest.importorskip("transformers", minversion="5", reason="the example is a backend of transformers")
    runpy.run_path(str(expert_layers._EXAMPLE))
    torch.manual_seed(1)
    with torch.device("cuda"):
        works = [expert_layers._inferring(_small, 64, graph=False), expert_layers._training(_small, 64)]
    for work in works:
        with work.ours():
            found = work.step().double()
        right = work.exact().double()
        assert (found - right).norm() / right.norm() < 0.02


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own, of its compiler
def test_a_model() -> None:
    """A model trains on both kinds of kernels in turn; the error of a gradient and the memory are about equal."""
    row = models.measured(lambda: models._encoder(tf32=True), 1.01)
    assert set(row) == {"torch ms", "aotmm ms", RATIO, LIMIT, "error", "memory"}
    assert ops.registered().counts(1)[0] > 0, "products by ours in the last override"
    assert 0.5 < row["error"] < 2
    assert 0.9 < row["memory"] < 1.1
