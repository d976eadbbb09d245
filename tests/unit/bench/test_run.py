"""A run as a whole, with stand-ins for GPU and libraries: what is kept, continued, refused and saved."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from aotmm.bench import results
from aotmm.bench import run as bench
from aotmm.bench.facts import STATE, State
from aotmm.bench.results import Row
from aotmm.errors import SpecError
from aotmm.timing.operands import Pool
from aotmm.timing.problems import Shape, Shapes, Sweep
from tests.unit.bench.samples import FakeStopwatch, right

FACTS = {
    "device": "a stand-in",
    "torch": torch.__version__,
    "cache_bytes": 1,
    "date": "2026-11-20",
    "copy_bytes_per_s": 1e12,
}
SHAPES = Shapes(
    1,
    (
        Sweep("squares256", "", (Shape(32, 32, 32, "nn"), Shape(64, 64, 64, "nn"))),
        Sweep("llm", "", (Shape(16, 64, 32, "nt"),)),
    ),
)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """No GPU, tiny sweeps, providers that are always right; what `facts.collect` finds can be changed."""
    here: dict[str, Any] = dict(FACTS)
    monkeypatch.setattr(bench, "gpu", lambda: 0)
    monkeypatch.setattr("aotmm.bench.facts.collect", lambda _: dict(here))
    monkeypatch.setattr("aotmm.bench.facts.watched", lambda _: nullcontext(State()))
    monkeypatch.setattr(bench, "GraphStopwatch", FakeStopwatch)
    monkeypatch.setattr(bench, "Pool", lambda _: Pool(torch.device("cpu")))
    monkeypatch.setattr(bench, "provider", right)
    monkeypatch.setattr("aotmm.timing.problems.read", lambda: SHAPES)
    monkeypatch.setattr(bench, "SUBJECTS", {"overhead": lambda: {"a call": {"us": 1.0}}})
    return here


def _run(folder: Path, *what: str, **options: Any) -> list[str]:
    """What a run reports, in order."""
    reported: list[str] = []
    bench.run(what, folder, lambda row: reported.append(row if isinstance(row, str) else str(row.case)), **options)
    return reported


def test_a_run_is_continued(tmp_path: Path, stand_ins: dict[str, Any]) -> None:
    """What a folder has is not measured again; the rest is added, on another day too."""
    first = ["32x32x32 nn fp16", "64x64x64 nn fp16"]
    assert _run(tmp_path, "squares256", dtypes=["fp16"]) == first
    stand_ins["date"] = "2026-11-21"
    second = ["32x32x32 nn bf16", "64x64x64 nn bf16", "16x64x32 nt fp16", "16x64x32 nt bf16", "overhead"]
    assert _run(tmp_path, "squares256", "llm", "overhead") == second
    assert _run(tmp_path, "squares256", "llm", "overhead") == []
    found = results.read(tmp_path)
    assert [str(row.case) for row in found.rows] == first + second[:-1]
    assert found.other == {"overhead": {"a call": {"us": 1.0}}}
    assert found.facts["date"] == "2026-11-20"


def test_other_software_does_not_continue_a_run(tmp_path: Path, stand_ins: dict[str, Any]) -> None:
    """Figures of two versions are never in one file."""
    _run(tmp_path, "llm")
    stand_ins["torch"] = "3.0"
    with pytest.raises(SpecError, match=r"torch .* and now 3\.0; choose another --out"):
        _run(tmp_path, "llm")


def test_a_run_that_breaks_off_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were measured are written, whatever ended the run."""

    def stop(row: Row | str) -> None:
        if isinstance(row, Row) and row.case.shape.M == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.run(["squares256"], tmp_path, stop)
    assert [row.case.shape.M for row in results.read(tmp_path).rows] == [32, 64]
    monkeypatch.setattr("aotmm.bench.session._PERIOD_S", 0.0)
    assert len(_run(tmp_path, "squares256")) == 2


def test_the_state_of_the_gpu() -> None:
    """Medians of what was read since the last time; lines with fields that the GPU does not tell are left out."""
    state = State()
    state.read(["1980, 3201, 500.5, 51\n", "1900, 3201, [N/A], 51\n", "1700, 3201, 600.5, 53\n", "\n"])
    assert state.take() == dict(zip(STATE, (1840.0, 3201.0, 550.5, 52.0), strict=True))
    assert state.take() == {}
