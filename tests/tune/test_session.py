"""From cases to a table with the launcher's own selection, on times that a known model made up."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotmm.cli import main
from aotmm.errors import ArtifactError, NoKernelError
from aotmm.pack import table
from aotmm.pack.files import data_folder
from aotmm.pack.schema import Kernel, occupancy
from aotmm.pack.table import Table
from aotmm.problem import DTYPES, SPLITS
from aotmm.runtime.devices import Device
from aotmm.runtime.launcher import Plan
from aotmm.runtime.pack import Pack, open_packs
from aotmm.runtime.tuning import nominal_device
from aotmm.target import target
from aotmm.timing import problems
from aotmm.timing.problems import Case, Shape, held_out
from aotmm.tune import session
from aotmm.tune.candidates import candidates, output_of, problem_of
from aotmm.tune.cases import cases
from aotmm.tune.record import Environment
from tests.unit.tune.fakes import Fake, case, pool

H200 = nominal_device(target("sm90"))
ENVIRONMENT = Environment(
    *("sm90", "NVIDIA H200", 132, 1980, 4916, 60 << 20, "580.1", "2.11.0", "0.1.0", "ab" * 32),
    problems.read().held_out_seed,
)
ADDRESS = 4096
DTYPES_OF = {2: "fp16", 1: "fp8e4"}


@pytest.fixture(scope="module")
def pack() -> Pack:
    """The sm90 pack that `make artifacts` built."""
    return next(pack for pack in open_packs(data_folder("artifacts")) if pack.arch == "sm90")


def _product(M: int, N: int, K: int, layout: str = "nn", dtype: str = "fp16") -> Case:
    return Case(Shape(M, N, K, layout), dtype)


# ------------------------------------------------------------------------------------------------------- candidates
def _candidates(pack: Pack, wanted: Case, left_out: frozenset[str] = frozenset()) -> list[tuple[str, Plan]]:
    problem = problem_of(wanted, output_of(pack.launcher, wanted.dtype), ADDRESS, ADDRESS, ADDRESS)
    return [(found.config_name, found.plan) for found in candidates(pack.launcher, H200, problem, left_out)]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8e4"])
def test_every_config_that_fits_is_a_candidate_once(pack: Pack, dtype: str) -> None:
    """Of each config every split and launch once, by its plainest kernel; what is expected to be fast comes first."""
    found = _candidates(pack, _product(512, 512, 8192, "nt", dtype))
    plans = [(config_name, plan.split, plan.pdl) for config_name, plan in found]
    assert len(plans) == len(set(plans))
    kernels = pack.launcher.kernels
    mine = [k for k in kernels if k.dtype_a == k.dtype_b == dtype and not k.fast_accum and k.layout in ("nt", "any")]
    assert {config_name for config_name, _ in found} == {
        k.config_name for k in mine if k.role in ("product", "partial")
    }
    for config_name, plan in found:
        same = [k for k in mine if k.config_name == config_name and k.dtype_c == kernels[plan.kernel].dtype_c]
        assert kernels[plan.kernel].epilogue == min((k.epilogue for k in same), key=("none", "bias_relu", "full").index)
        assert plan.pdl <= kernels[plan.kernel].pdl
    order = list(dict.fromkeys(plan.kernel for _, plan in found))
    costs = {plan.kernel: plan.cost for _, plan in found}
    assert [costs[kernel] for kernel in order] == sorted(costs[kernel] for kernel in order)


def test_sensible_splits(pack: Pack) -> None:
    """All of them for few tiles and a large K; at least 2 steps for each slice; few where there are tiles enough."""

    def splits(wanted: Case) -> set[int]:
        return {plan.split for config_name, plan in _candidates(pack, wanted) if config_name.endswith("_split")}

    assert splits(_product(256, 256, 65536)) == set(SPLITS)
    assert max(splits(_product(256, 256, 512))) <= 4
    assert max(splits(_product(8192, 8192, 8192))) == 2


def test_workspaces_are_what_running_needs(pack: Pack) -> None:
    """Plans of every split have the workspace that the launcher itself gives a plan of that split."""
    wanted = _product(1000, 1000, 8192)
    problem = problem_of(wanted, "fp16", ADDRESS, ADDRESS, ADDRESS)
    for _, plan in _candidates(pack, wanted):
        theirs = pack.launcher.check(problem, H200, plan.kernel).plan
        assert theirs is not None
        if theirs.split == plan.split:
            assert theirs.workspace_bytes == plan.workspace_bytes
        elif plan.split > theirs.split:
            assert plan.workspace_bytes > theirs.workspace_bytes


def test_what_is_left_out_is_no_candidate(pack: Pack) -> None:
    """By config and by family."""
    wanted = _product(512, 512, 512)
    config_names = {config_name for config_name, _ in _candidates(pack, wanted)}
    one = min(config_names)
    assert {config_name for config_name, _ in _candidates(pack, wanted, frozenset({one}))} == config_names - {one}
    assert {config_name.partition("_")[0] for config_name, _ in _candidates(pack, wanted, frozenset({"tile"}))} == {
        config_name.partition("_")[0] for config_name in config_names
    } - {"tile"}


# ----------------------------------------------------------------------------------------------- simulated sweeps
def _simulated(kernel: Kernel, wanted: Case, plan: Plan) -> float:
    """A time by the launcher's model, with constants that depend on the config, and a little noise."""
    dice = random.Random(f"{kernel.config_name} {wanted} {plan.split}")  # noqa: S311 - no secret
    efficiency = random.Random(kernel.config_name).uniform(0.6, 0.95)  # noqa: S311 - no secret
    config, element_bytes = kernel.config, DTYPES[wanted.dtype].bytes
    M, N, K = wanted.shape.M, wanted.shape.N, wanted.shape.K
    rows, cols = math.ceil(M / config.block_m), math.ceil(N / config.block_n)
    blocks = occupancy(kernel, target("sm90"))
    waves = math.ceil(rows * cols * plan.split / (H200.multiprocessors * blocks // kernel.num_ctas))
    steps = math.ceil(math.ceil(K / config.block_k) / plan.split)
    step = config.block_m * config.block_n * config.block_k / (7000 * efficiency) * blocks * 16 / kernel.vector_bytes
    sizes = (M * K * element_bytes, K * N * element_bytes, M * N * 2)
    moved, more = sizes[0] + sizes[1] + sizes[2], 0.0
    if kernel.role == "partial":
        moved += plan.split * rows * cols * config.block_m * config.block_n * 4 - sizes[2]
        more += 1200 + M * N * (4 * plan.split + 2) / 4000
    more += sum(1500 + 2 * size / 3000 for bit, size in enumerate(sizes) if plan.copies >> bit & 1)
    busy, moving = waves * (steps * step + 900), moved / 3900
    ns = 2200 + max(busy, moving) + 0.4 * min(busy, moving) + more
    noisy: float = ns * dice.gauss(1, 0.01)
    return noisy


@pytest.fixture(scope="module")
def measured(pack: Pack) -> session.Measurement:
    """A third of the sweeps of `shapes.json`, timed by `_simulated`."""
    precise = [one for one in cases(problems.read(), (), target("sm90")) if not one.fast_accum]
    wanted = [
        one
        for kept in precise[::3]
        for one in (kept, replace(kept, fast_accum=True))
        if one.element_bytes == 1 or one == kept
    ]
    launcher = pack.launcher
    samples = {}
    for one in wanted:
        problem = problem_of(one, output_of(launcher, one.dtype), ADDRESS, ADDRESS, ADDRESS)
        samples[one] = tuple(
            found.sample(_simulated(launcher.kernels[found.plan.kernel], one, found.plan))
            for found in candidates(launcher, H200, problem)
        )
    return session.Measurement(ENVIRONMENT, samples, {}, len(wanted))


@pytest.fixture(scope="module")
def fitted(pack: Pack, measured: session.Measurement) -> tuple[Table, session.Quality]:
    """The table of these times, and how good it is."""
    return session.fit(pack, session.table_of(measured), DTYPES_OF)


def test_selection_by_the_models_is_nearly_the_best(
    pack: Pack, measured: session.Measurement, fitted: tuple[Table, session.Quality]
) -> None:
    """Where times follow the model, the launcher chooses well on shapes that it has never seen."""
    made, quality = fitted
    unseen = [one for one in measured.samples if held_out(ENVIRONMENT.seed, one.shape)]
    assert len(quality.held_out.choices) == len(unseen) > 15
    assert len(quality.models.choices) == len(measured.samples) - len(unseen)
    for regret in (quality.held_out, quality.models):
        assert regret.unmeasured == 0
        assert regret.mean < 1.015
        assert regret.worst < 1.15
    # Configs that are far from the best everywhere count little, so their models stay near where they began.
    errors = [row.error for row in quality.fitted if row.error is not None]
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.25
    roles = {kernel.config_name: kernel.role for kernel in pack.launcher.kernels}
    assert {roles[model.config_name] for model in made.models} == {"product", "partial", "reduce", "copy"}


def test_selection_by_the_table_is_the_best(pack: Pack, fitted: tuple[Table, session.Quality]) -> None:
    """With its times in the table, the best plan without copies is chosen, as it was measured."""
    made, launcher = fitted[0], pack.launcher
    launcher.retune(made)
    for shape in made.shapes:
        best = min(shape.best().values(), key=lambda sample: sample.ns)
        if shape.fast_accum or best.ns > min(sample.ns for sample in shape.times):
            continue  # precise sums or copies may pay
        dtype = DTYPES_OF[shape.element_bytes]
        one = Case(Shape(shape.M, shape.N, shape.K, shape.layout), dtype, fast_accum=shape.fast_accum)
        plan = launcher.select(problem_of(one, output_of(launcher, dtype), ADDRESS, ADDRESS, ADDRESS), H200)
        assert plan.measured
        assert (launcher.kernels[plan.kernel].config_name, plan.split, plan.cost) == (
            best.config_name,
            best.split,
            best.ns,
        )


def test_models_do_not_see_held_out_shapes(
    pack: Pack, measured: session.Measurement, fitted: tuple[Table, session.Quality]
) -> None:
    """Other times on held-out shapes give the same models."""
    changed = {
        one: tuple(
            sample._replace(ns=(7 if held_out(ENVIRONMENT.seed, one.shape) else 1) * sample.ns) for sample in samples
        )
        for one, samples in measured.samples.items()
    }
    other = session.Measurement(ENVIRONMENT, changed, {}, measured.total)
    made, _ = session.fit(pack, session.table_of(other), DTYPES_OF)
    assert made.models == fitted[0].models
    assert made.shapes != fitted[0].shapes


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fifth_is_held_out_as_the_shapes_say(dtype: str) -> None:
    """The split in a table is that of the shapes, whatever the type."""
    found = cases(problems.read(), (dtype,), target("sm90"))
    made = session.table_of(session.Measurement(ENVIRONMENT, dict.fromkeys(found, ()), {}, len(found)))
    held_out = {(row.M, row.N, row.K, row.layout) for row in made.shapes if row.held_out}
    ours = [shape for sweep in problems.read().sweeps if sweep.name != "fp8" for shape in sweep.shapes]
    assert held_out == {(s.M, s.N, s.K, s.layout) for s in ours if problems.read().held_out(s)}


def test_what_was_left_out_is_not_in_the_table(measured: session.Measurement) -> None:
    """Neither where it failed nor where it had worked before."""
    names = {sample.config_name for samples in measured.samples.values() for sample in samples}
    bad = min(names)
    found = session.table_of(session.Measurement(ENVIRONMENT, measured.samples, {bad: "it hangs"}, measured.total))
    assert {sample.config_name for shape in found.shapes for sample in shape.times} == names - {bad}


# ---------------------------------------------------------------------------------------------------------- measure
def test_a_budget_ends_a_measurement_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """What was left is measured by the next call, and nothing twice."""
    wanted = [case(size) for size in range(1, 41)]
    fake = Fake(tmp_path / "log", pause_s=0.02)
    events: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, text: str) -> None:
        events.append((done, total, text))

    def run(budget_s: float) -> session.Measurement:
        with pool(fake) as gpus:
            return session.measure(wanted, gpus, ENVIRONMENT, tmp_path / "record", budget_s=budget_s, progress=progress)

    first = run(2.0)
    assert not first.complete
    second = run(100.0)
    assert second.complete
    assert list(second.samples) == wanted
    assert events[0] == (0, 40, "")
    assert (len(first.samples), 40, "") in events
    assert events[-1] == (40, 40, "40x40x40 nn fp16")
    begun = [int(line.split()[-1]) for line in (tmp_path / "log").read_text().splitlines() if "begins" in line]
    assert sorted(begun) == list(range(1, 41))


def test_what_hung_is_not_run_by_the_next_call(tmp_path: Path) -> None:
    """The record remembers what was left out, and why."""
    hanging = Fake(tmp_path / "log", trouble=(("tile_a", "hang"),))
    events: list[str] = []

    def progress(_done: int, _total: int, text: str) -> None:
        events.append(text)

    def run(fake: Fake) -> session.Measurement:
        wanted, record = [case(1), case(2)], tmp_path / "record"
        with pool(fake) as gpus:
            return session.measure(wanted, gpus, ENVIRONMENT, record, budget_s=100, progress=progress)

    assert list(run(hanging).left_out) == ["tile_a"]
    assert events[1].startswith("left out tile_a: it gave no sign of life")
    events.clear()
    assert list(run(Fake(tmp_path / "log")).left_out) == ["tile_a"]
    assert events == [""]


# ------------------------------------------------------------------------------------------------------ command line
def test_only_gpus_of_the_pack_and_of_one_model_are_measured(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that another pack serves better is left alone, and so is one of another model."""
    found = [Device(0, "A100", "sm80"), Device(1, "H200", "sm90"), Device(2, "H100", "sm90"), Device(3, "H200", "sm90")]
    monkeypatch.setattr(session, "devices", lambda: found)
    assert [gpu.ordinal for gpu in session.serving(pack, [pack])] == [1, 3]
    monkeypatch.setattr(session, "devices", lambda: found[:1])
    with pytest.raises(NoKernelError, match=r"no GPU here that the pack for sm90 .*; GPUs: A100 \(sm80\)"):
        session.serving(pack, [pack])


def _tune(*words: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["tune", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_without_a_gpu_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code of a missing kernel, and nothing is written."""
    monkeypatch.setattr(session, "devices", list)
    code, _, text = _tune("--arch", "sm90", "--out", tmp_path / "sm90.json")
    assert (code, text) == (NoKernelError.exit_code, text)
    assert "GPUs: none" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("budget", ["8", "m", "8x", "-1s", "1.5h"])
def test_budgets_that_are_none(budget: str, tmp_path: Path) -> None:
    """A number and a unit."""
    code, _, text = _tune("--arch", "sm90", "--out", tmp_path / "sm90.json", f"--budget={budget}")
    assert code == 2
    assert "is no time like 90s, 8m or 1h" in text


def test_refit(measured: session.Measurement, tmp_path: Path) -> None:
    """A table's models can be fitted again anywhere; what was measured stays as it is."""
    path = tmp_path / "sm90.json"
    session.write(session.table_of(measured), path)
    code, text, _ = _tune("--arch", "sm90", "--out", path, "--refit")
    assert code == 0
    assert "regret, held-out shapes: mean 1.0" in text
    made = table.read(path)
    assert made.models
    assert made.shapes == table.parse(table.write(session.table_of(measured)), "t").shapes
    code, text, _ = _tune("--arch", "sm90", "--out", path, "--refit", "--json")
    body = json.loads(text)
    assert body["regret"]["held_out"]["mean"] < 1.03
    assert body["table"] == str(path)
    assert table.read(path) == made


def test_refit_of_nothing(tmp_path: Path) -> None:
    """There must be a table."""
    code, _, text = _tune("--arch", "sm90", "--out", tmp_path / "none.json", "--refit")
    assert code == ArtifactError.exit_code
    assert "make one: aotmm tune" in text


def test_progress_in_a_log(
    measured: session.Measurement,
    fitted: tuple[Table, session.Quality],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a terminal tuning tells that it begins, each tenth, and what is left out."""

    def tune(*_: object, progress: session.Progress, **__: object) -> tuple[session.Measurement, session.Quality, Path]:
        for step in ((4, 20, ""), (5, 20, "a shape"), (5, 20, "left out tile_a: it hangs"), (6, 20, "a shape")):
            progress(*step)
        return measured, fitted[1], tmp_path / "sm90.json"

    monkeypatch.setattr(session, "tune", tune)
    code, _, error = _tune("--arch", "sm90", "--out", tmp_path / "sm90.json")
    assert (code, error.splitlines()[:3]) == (
        0,
        ["sm90: 20 shapes within 8m", "sm90: 20 % (5 of 20 shapes)", "left out tile_a: it hangs"],
    )
    assert re.fullmatch(r"sm90: 30 % \(6 of 20 shapes\), about \d+ \w+ left", error.splitlines()[3])


def test_a_kernel_that_was_left_out_is_an_error_in_the_end(
    measured: session.Measurement,
    fitted: tuple[Table, session.Quality],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was found is printed, and the command fails with the name."""
    found = replace(measured, left_out={"tile_a": "its result is wrong"})
    monkeypatch.setattr(session, "tune", lambda *_, **__: (found, fitted[1], tmp_path / "sm90.json"))
    code, text, error = _tune("--arch", "sm90", "--out", tmp_path / "sm90.json")
    assert code == 1
    assert "left out tile_a: its result is wrong" in text
    assert "error: 1 left out: tile_a" in error
