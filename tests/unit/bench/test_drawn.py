"""A run of random problems, with stand-ins for GPU and libraries: what is drawn, continued, timed again and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from aotmm.bench import drawn, profile, results
from aotmm.bench.drawn import confirmed, run_drawn, work
from aotmm.bench.drawn_summary import drawn_goals
from aotmm.bench.facts import State
from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.bench.results import Row
from aotmm.errors import SpecError
from aotmm.timing import problems
from aotmm.timing.draw import Class, Distribution, Layer, distribution, draw
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, Shape
from tests.unit.bench.samples import FakeStopwatch, drawn_facts, drawn_row, right

_BOTH = ("fp16", "bf16")
_FREE: dict[str, Any] = {
    "step": 8,
    "layouts": ("nt",),
    "dtypes": _BOTH,
    "fast_accum": False,
    "offsets": (0,),
    "most_batch": 1,
    "bias": False,
}
TINY = Distribution(
    "",
    (Layer(16, 32, ""),),
    (
        Class("layers", "", apart=False, share=0.75, sizes=("layer",), least=1, most=64, **_FREE),
        Class("squares", "", apart=False, share=0.25, sizes=("square",), least=8, most=64, **_FREE),
        Class("fp8", "", apart=True, share=0.25, sizes=("free",), least=16, most=64, **_FREE | {"dtypes": ("fp8e4",)}),
        Class("biased", "", apart=True, share=0.25, sizes=("layer",), least=1, most=64, **_FREE | {"bias": True}),
    ),
)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """No GPU, a tiny distribution, providers that are always right; what `facts.collect` finds can be changed."""
    here = drawn_facts()
    del here["seed"], here["figure"]
    monkeypatch.setattr(drawn, "gpu", lambda: 0)
    monkeypatch.setattr("aotmm.bench.facts.collect", lambda _: dict(here))
    monkeypatch.setattr("aotmm.bench.facts.watched", lambda _: nullcontext(State()))
    monkeypatch.setattr(drawn, "GraphStopwatch", FakeStopwatch)
    monkeypatch.setattr(drawn, "Pool", lambda _: Pool(torch.device("cpu")))
    monkeypatch.setattr(drawn, "provider", right)
    monkeypatch.setattr(drawn, "distribution", lambda: TINY)
    monkeypatch.setattr(drawn, "launched", lambda _call, operands: f"nvjet_{len(operands.a)}")
    return here


def _run(seed: int, folder: Path, **options: Any) -> list[str]:
    """What a run reports, in order."""
    reported: list[str] = []
    run_drawn(seed, folder, lambda row: reported.append(f"{row.sweeps[0]} {row.case}"), **options)
    return reported


def _held_out(seed: int, count: int) -> dict[str, list[Case]]:
    return draw(TINY, seed, count, among=problems.read().held_out)


def _drawn(seed: int, count: int) -> Counter[str]:
    return Counter(f"{name} {case}" for name, cases in _held_out(seed, count).items() for case in cases)


def test_all_that_is_drawn_is_measured(tmp_path: Path) -> None:
    """As often as it was drawn, by us and by torch's product of its type, in graphs of 4 ms, without single calls.

    All of it is held out, so that no table has its times.
    """
    assert Counter(_run(5, tmp_path, count=8)) == _drawn(5, 8)
    found = results.read(tmp_path)
    assert (found.facts["seed"], found.facts["figure"]) == (5, "ratio")
    for row in found.rows:
        assert problems.read().held_out(row.case)
        theirs = {"fp8": "scaled_mm", "biased": "addmm"}.get(row.sweeps[0], "torch")
        assert list(row.times) == ["aotmm", theirs]
        for times in row.times.values():
            assert (len(times.graph_us), times.isolated_us) == (5, ())
            assert 4000 <= times.launches * 100 < 5000


def test_a_run_is_continued(tmp_path: Path, stand_ins: dict[str, Any]) -> None:
    """The same seed in the same folder measures only what is not there, with a larger count too, on another day too."""

    def stop(row: Row) -> None:
        if row.sweeps == ("squares",):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_drawn(5, tmp_path, stop, count=8)
    first = [f"{row.sweeps[0]} {row.case}" for row in results.read(tmp_path).rows]
    assert 0 < len(first) < 10
    stand_ins["date"] = "2026-11-27"
    assert Counter(first) + Counter(_run(5, tmp_path, count=8)) == _drawn(5, 8)
    assert Counter(_run(5, tmp_path, count=16)) == _drawn(5, 16) - _drawn(5, 8)
    assert _run(5, tmp_path, count=16) == []


def test_one_folder_has_one_seed(tmp_path: Path) -> None:
    """Another seed, and the regret of the same, need another folder."""
    _run(5, tmp_path, count=1)
    with pytest.raises(SpecError, match=r"has results of another run: seed 5 and now 6; choose another --out"):
        _run(6, tmp_path, count=1)
    found = results.read(tmp_path)
    found.facts["figure"] = "regret"
    results.write(found, tmp_path)
    with pytest.raises(SpecError, match="figure regret and now ratio"):
        _run(5, tmp_path, count=1)


def test_a_part_of_the_draw(tmp_path: Path) -> None:
    """Classes and providers narrow it; unknown ones are named, before a GPU is looked for."""
    assert set(_run(5, tmp_path, count=8, classes=["fp8"], providers=["aotmm"])) <= set(_drawn(5, 8))
    for row in results.read(tmp_path).rows:
        assert (row.sweeps, list(row.times)) == (("fp8",), ["aotmm"])
    with pytest.raises(SpecError, match="unknown class cubes; known: layers, squares, fp8, biased"):
        _run(5, tmp_path, classes=["cubes"])
    with pytest.raises(SpecError, match="unknown provider mkl"):
        _run(5, tmp_path, providers=["mkl"])


def test_classes_are_mixed_evenly() -> None:
    """The first tenth of a run has a tenth of every class."""
    found = work(distribution(), 3, 1000)
    whole, tenth = (Counter(item.sweeps for item in part) for part in (found, found[: len(found) // 10]))
    assert {name: round(count / 10) for name, count in whole.items()} == pytest.approx(tenth, abs=1)


@pytest.mark.parametrize(
    ("timings", "wanted", "figures"),
    [
        pytest.param([0.95], 0.95, (), id="above the class's worst: once"),
        pytest.param([0.87, 0.70, 0.90], 0.87, (0.87, 0.70, 0.90), id="below: the median of three"),
        pytest.param([0.50, 0.99, 0.98], 0.98, (0.50, 0.99, 0.98), id="an outlier does not count"),
    ],
)
def test_a_miss_is_timed_three_times(timings: list[float], wanted: float, figures: tuple[float, ...]) -> None:
    """The band's own limit decides, 0.88 for up to 16 rows, not the lower one over all classes."""
    left = iter(timings)
    row = confirmed(lambda: drawn_row("layers", next(left)), drawn_goals(drawn_facts()))
    assert row.ratio("aotmm", "torch") == pytest.approx(wanted)
    assert row.figures == pytest.approx(figures)
    assert list(left) == []


def test_other_bands_have_other_limits() -> None:
    """0.87 is a miss at 16 rows and none at 17; regrets are timed once, whatever they are."""
    measured = Counter[str]()

    def counted(name: str, **options: Any) -> Callable[[], Row]:
        def measure() -> Row:
            measured[name] += 1
            return drawn_row("layers", 0.87, **options)

        return measure

    confirmed(counted("few"), goals := drawn_goals(drawn_facts()))
    confirmed(counted("some", M=17), goals)
    assert measured == {"few": 3, "some": 1}


def test_what_turns_out_wrong_is_not_averaged_away() -> None:
    """A product that is wrong in the second timing is the result."""
    wrong = drawn_row("layers", None, not_run={"aotmm": "wrong"})
    rows = iter([drawn_row("layers", 0.1), wrong, drawn_row("layers", 0.1)])
    assert confirmed(lambda: next(rows), drawn_goals(drawn_facts())) is wrong


def test_several_timings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the figures of all three."""
    rows = iter(drawn_row("squares", figure) for figure in (0.5, 0.6, 0.7))
    monkeypatch.setattr(drawn, "measure", lambda *_, **__: next(rows))
    _run(5, tmp_path, count=1, classes=["squares"])
    assert results.read(tmp_path).rows[0].figures == pytest.approx((0.5, 0.6, 0.7))


def test_the_worst_have_names_of_torchs_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 30 worst and the 30 worst apart, when everything is timed, and kept in the file; others have none."""
    _run(5, tmp_path, count=48)
    notes = [(row, times.note) for row in results.read(tmp_path).rows for times in row.times.values() if times.note]
    assert Counter(row.sweeps[0] in ("fp8", "biased") for row, _ in notes) == {False: 30, True: 24}
    assert all(note == f"nvjet_{row.case.shape.M}" for row, note in notes)

    def again(*_: object) -> str:
        raise AssertionError("they are known")

    monkeypatch.setattr(drawn, "launched", again)
    assert _run(5, tmp_path, count=48) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_profiler_that_fails() -> None:
    """The name is unknown, with the reason, and the run goes on."""
    operands = Pool(torch.device("cpu")).operands(Case(Shape(8, 8, 8, "nn"), "fp16"), 1)[0]
    assert profile.launched(lambda _: None, operands).startswith("unknown: ")


def test_what_torch_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has our times and torch's reason, and is not asked for a kernel's name."""

    def refuse(_case: Case, _sets: Sequence[Operands]) -> Call:
        raise NotRunError("not divisible by 16")

    monkeypatch.setattr(drawn, "provider", lambda name: right(name) if name == "aotmm" else Provider(name, "", refuse))
    _run(5, tmp_path, count=2)
    for row in results.read(tmp_path).rows:
        assert list(row.times) == ["aotmm"]
        assert set(row.not_run.values()) == {"not divisible by 16"}
