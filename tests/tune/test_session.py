"""From cases to a table with the launcher's own selection, on times that a known model made up."""

from __future__ import annotations

import errno
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aotmm.cli import main
from aotmm.errors import AotmmError, ArtifactError, NoKernelError, SpecError
from aotmm.kernels import BLOCK_SCALED
from aotmm.pack import table
from aotmm.pack.files import data_folder
from aotmm.pack.schema import Kernel
from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.problem import EPILOGUES, SPLITS
from aotmm.runtime.devices import Device
from aotmm.runtime.launcher import COPY_A, Plan, Problem
from aotmm.runtime.pack import Pack, open_packs
from aotmm.runtime.tuning import nominal_device
from aotmm.target import target
from aotmm.timing import problems
from aotmm.timing.blocks import draw_layers, layers
from aotmm.timing.draw import distribution, draw
from aotmm.timing.problems import Case, Shape, Shapes, Sweep
from aotmm.tune import session
from aotmm.tune.candidates import Candidate, candidates, output_of, problem_of, to_time
from aotmm.tune.cases import TUNABLE, cases, type_of, types_of
from aotmm.tune.models import Gpu, formula, samples
from aotmm.tune.record import Environment, Record
from aotmm.tune.regret import held_out_regret
from aotmm.workers.pool import WorkerPool
from tests.unit.tune.fakes import CONFIGS, Fake, case, pool

H200 = nominal_device(target("sm90"))
ENVIRONMENT = Environment(
    *("sm90", "NVIDIA H200", 132, 1980, 4916, 60 << 20, "580.1", "2.11.0", "0.1.0", "ab" * 32), seed=7
)
ADDRESS = 4096
SHAPES = problems.read()
DTYPES_OF = types_of(("fp16", "fp8e4"), target("sm90"))


def _built(arch: str) -> Pack:
    return next(pack for pack in open_packs(data_folder("artifacts")) if pack.arch == arch)


@pytest.fixture(scope="module")
def pack() -> Pack:
    """The sm90 pack that `make artifacts` built."""
    return _built("sm90")


def _product(M: int, N: int, K: int, layout: str = "nn", dtype: str = "fp16") -> Case:
    return Case(Shape(M, N, K, layout), dtype)


def _problem(pack: Pack, wanted: Case) -> Problem:
    addresses = ADDRESS + wanted.offset_a, ADDRESS + wanted.offset_b, ADDRESS
    return problem_of(wanted, output_of(pack.launcher, wanted.dtype), *addresses)


# ------------------------------------------------------------------------------------------------------- candidates
def _candidates(pack: Pack, wanted: Case, left_out: frozenset[str] = frozenset()) -> list[tuple[str, Plan]]:
    problem = _problem(pack, wanted)
    return [(found.config_name, found.plan) for found in candidates(pack.launcher, H200, problem, left_out)]


def _tiles(kernel: Kernel, M: int, N: int) -> int:
    return math.ceil(M / kernel.config.block_m) * math.ceil(N / kernel.config.block_n)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8e4"])
def test_every_config_that_fits_is_a_candidate_once(pack: Pack, dtype: str) -> None:
    """Of each config every split and launch once, by its plainest kernel; what is expected to be fast comes first.

    Slices are for partials whose tiles run all at once.
    """
    found = _candidates(pack, _product(512, 528, 8192, "nt", dtype))  # of no sweep
    plans = [(config_name, plan.split, plan.pdl) for config_name, plan in found]
    assert len(plans) == len(set(plans))
    kernels = pack.launcher.kernels
    mine = [k for k in kernels if k.dtype_a == k.dtype_b == dtype and not k.fast_accum and k.layout in ("nt", "any")]
    mine = [k for k in mine if BLOCK_SCALED not in k.guards and k.config.serial_k == 1]  # which is slower for its order
    mine = [k for k in mine if k.family != "short"]  # K has more than one step
    mine = [k for k in mine if k.role != "product" or k.dtype_c == output_of(pack.launcher, dtype)]
    products, partials = ([k for k in mine if k.role == role] for role in ("product", "partial"))
    at_once = [k for k in partials if _tiles(k, 512, 528) <= H200.multiprocessors // k.num_ctas]
    assert 0 < len(at_once) < len(partials)
    assert {config_name for config_name, _ in found} == {k.config_name for k in (*products, *at_once)}
    for config_name, plan in found:
        same = [k for k in mine if k.config_name == config_name and k.dtype_c == kernels[plan.kernel].dtype_c]
        assert kernels[plan.kernel].epilogue == min((k.epilogue for k in same), key=EPILOGUES.index)
        assert plan.pdl <= kernels[plan.kernel].pdl
    order = list(dict.fromkeys(plan.kernel for _, plan in found))
    costs = {plan.kernel: plan.cost for _, plan in found}
    assert [costs[kernel] for kernel in order] == sorted(costs[kernel] for kernel in order)


def test_plans_with_a_turned_are_timed_too() -> None:
    """Where threads multiply fp32, each config has plans of it along K without a copy, of layout tt with A turned."""
    pack = _built("sm80")
    kernels = [k for k in pack.launcher.kernels if k.family == "fma"]
    found = _candidates(pack, _product(1024, 1024, 8192, "nt", "fp32"))
    plans = [(config_name, plan.copies, plan.split) for config_name, plan in found]
    assert len(plans) == len(set(plans))
    for layout, copies in (("nt", 0), ("tt", COPY_A)):
        names = {k.config_name for k in kernels if k.layout == layout and k.role == "product"}
        taken = {plan.kernel for _, plan in found if plan.copies == copies}
        taken_names = {pack.launcher.kernels[number].config_name for number in taken}
        assert names <= taken_names, layout
        assert {pack.launcher.kernels[number].layout for number in taken} <= {layout, "any"}
    other = _candidates(pack, _product(1024, 1024, 8192, "tt", "fp32"))
    assert {plan.copies for _, plan in other} == {0}


def test_what_batch_invariant_alone_takes_is_timed_too(pack: Pack) -> None:
    """Kernels that add slices one after another, where the rule asks for slices; they come last."""
    problem = _problem(pack, _product(512, 1024, 4096, "nt"))
    free = candidates(pack.launcher, H200, problem)
    timed = to_time(pack.launcher, H200, problem)
    serial = {k.config_name for k in pack.launcher.kernels if k.config.serial_k > 1 and k.role == "product"}
    assert timed[: len(free)] == free
    assert {candidate.config_name for candidate in timed[len(free) :]} == serial != set()
    wide = _problem(pack, _product(512, 4096, 4096, "nt"))
    assert to_time(pack.launcher, H200, wide) == candidates(pack.launcher, H200, wide)


def test_the_foreseen_plan_of_each_config_is_the_launchers_own(pack: Pack) -> None:
    """One for each config; plans with another split or launch are not."""
    problem = _problem(pack, _product(256, 256, 4096))
    found = candidates(pack.launcher, H200, problem)
    foreseen = [each for each in found if each.foreseen]
    assert sorted(each.config_name for each in foreseen) == sorted({each.config_name for each in found})
    assert len(foreseen) < len(found)
    assert all(each.plan == pack.launcher.check(problem, H200, each.plan.kernel).plan for each in foreseen)


def test_sensible_splits(pack: Pack) -> None:
    """For few tiles and a large K all that take a quarter of the GPU to two waves; at least 2 steps for each slice.

    None where not all tiles run at once. In clusters of four blocks, of which 30 run at once, slices are fewer.
    """

    def splits(wanted: Case, *, clustered: bool = False) -> set[int]:
        return {
            plan.split
            for name, plan in _candidates(pack, wanted)
            if name.endswith("_split") and ("_c" in name) == clustered
        }

    assert splits(_product(16, 64, 2**18)) == {48, 64, 96, 128}
    assert splits(_product(256, 256, 65536)) == {split for split in SPLITS if split <= 64}  # of 16 steps of 64
    assert max(splits(_product(256, 256, 512))) <= 8  # of 16 steps
    assert splits(_product(1024, 2048, 8184)) == {2}
    assert splits(_product(8192, 8192, 8184)) == set()
    assert splits(_product(32, 16, 1056)) == {3, 4, 6, 8, 12, 16}  # the two largest, for each block_k
    assert splits(_product(16, 64, 2**18), clustered=True) == {8, 12, 16, 24, 32, 48}
    assert splits(_product(256, 256, 65536), clustered=True) == {2, 3, 4, 5, 6, 8, 12}
    assert splits(_product(256, 256, 512), clustered=True) == {2, 3, 4}
    assert splits(_product(1024, 2048, 8184), clustered=True) == set()
    assert splits(_product(8192, 8192, 8184), clustered=True) == set()
    assert splits(_product(32, 16, 1056), clustered=True) == {6, 8}


def test_workspaces_are_what_running_needs(pack: Pack) -> None:
    """Plans of every split have the workspace that the launcher itself gives a plan of that split."""
    wanted = _product(1000, 1000, 8192)
    problem = _problem(pack, wanted)
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
def _simulated(pack: Pack, wanted: Sequence[Case]) -> dict[Case, tuple[Sample, ...]]:
    """Times by the launcher's formula, with a constant factor of each config, and a little noise."""
    found = {one: candidates(pack.launcher, H200, _problem(pack, one)) for one in wanted}
    plain = [
        one.timed((each.sample(1)._replace(copies=0) for each in mine), drawn=False) for one, mine in found.items()
    ]
    times = iter(formula(samples(pack.launcher.kernels, Gpu(target("sm90"), ENVIRONMENT), plain).parts).tolist())
    return {one: tuple(_noisy(one, each, next(times)) for each in mine) for one, mine in found.items()}


def _noisy(wanted: Case, one: Candidate, ns: float) -> Sample:
    shape = wanted.shape
    sizes = (shape.M * shape.K * wanted.element_bytes, shape.K * shape.N * wanted.element_bytes, shape.M * shape.N * 2)
    dice = random.Random(f"{one.config_name} {wanted} {one.plan.split}")  # noqa: S311 - no secret
    factor = random.Random(one.config_name).uniform(0.8, 1.2)  # noqa: S311 - no secret
    copying = sum(1500 + 2 * size / 3000 for bit, size in enumerate(sizes) if one.plan.copies >> bit & 1)
    return one.sample(ns * factor * dice.gauss(1, 0.01) + copying)


@pytest.fixture(scope="module")
def measured(pack: Pack) -> session.Measurement:
    """A third of the sweeps of `shapes.json` and of random problems, and some held-out ones, timed by `_simulated`."""
    drawn = draw(distribution(), ENVIRONMENT.seed or 0, 150)
    held_out = draw(distribution(), ENVIRONMENT.seed or 0, 30, among=SHAPES.held_out)
    for name in ("odd", "biased"):  # small copies take longer here than the launcher expects; a bias is not timed
        del drawn[name], held_out[name]
    precise = [one for one in cases(SHAPES, drawn, DTYPES_OF, target("sm90")) if not one.fast_accum][::3]
    unseen = cases(Shapes(0, ()), held_out, DTYPES_OF, target("sm90"))
    precise += [one for one in unseen if not one.fast_accum and one not in precise]
    wanted = [
        one
        for kept in precise
        for one in (kept, replace(kept, fast_accum=True))
        if one.element_bytes == 1 or one == kept
    ]
    return session.Measurement(ENVIRONMENT, _simulated(pack, wanted), {}, len(wanted))


@pytest.fixture(scope="module")
def fitted(pack: Pack, measured: session.Measurement) -> tuple[Table, session.Quality]:
    """The table of these times, and how good it is."""
    return session.fit(pack, session.table_of(measured, SHAPES), DTYPES_OF)


def test_selection_by_the_models_is_nearly_the_best(
    pack: Pack, measured: session.Measurement, fitted: tuple[Table, session.Quality]
) -> None:
    """Where times follow the model, the launcher chooses well on shapes that it has never seen.

    Every choice was timed, but for the few that copy what begins within a cache line, which never are.
    """
    made, quality = fitted
    unseen = [one for one in measured.samples if SHAPES.held_out(one)]
    assert len(quality.held_out.choices) == len(unseen) > 30
    assert {"random, 1 bytes", "random, 2 bytes"} < quality.held_out.by_kind().keys()
    assert not any(kind.startswith("sweeps") for kind in quality.held_out.by_kind())
    assert len(quality.models.choices) == len(measured.samples) - len(unseen)
    for regret in (quality.held_out, quality.models):
        not_timed = [choice for choice in regret.choices if choice.regret is None]
        assert len(not_timed) == regret.unmeasured < len(regret.choices) / 20
        for choice in not_timed:
            assert " copies " in choice.chosen
            assert choice.shape.offset_a or choice.shape.offset_b
        assert regret.mean < 1.02  # which is asked of a real one
        assert regret.worst < 1.2
    roles = {kernel.config_name: kernel.role for kernel in pack.launcher.kernels}
    assert {roles[model.config_name] for model in made.models} == {"product", "partial"}


def test_what_batch_invariant_alone_takes_is_no_better_plan(pack: Pack, fitted: tuple[Table, session.Quality]) -> None:
    """Times of kernels that selection never takes otherwise do not count as the best, however short they are."""
    made, quality = fitted
    serial = next(kernel.config_name for kernel in pack.launcher.kernels if kernel.config.serial_k > 1)
    shortest = Sample(serial, 1, pdl=False, copies=0, ns=1)
    shapes = tuple(replace(shape, times=(*shape.times, shortest)) for shape in made.shapes)
    found = held_out_regret(pack.launcher, H200, replace(made, shapes=shapes), DTYPES_OF)
    assert [(x.chosen, x.regret) for x in found.choices] == [(x.chosen, x.regret) for x in quality.held_out.choices]


def test_selection_by_the_table_is_the_best(pack: Pack, fitted: tuple[Table, session.Quality]) -> None:
    """With its times in the table, the best plan without copies is chosen for a sweep's shape, as it was measured.

    A plan with copies, whose time is predicted in any case, is chosen only if it is foreseen to be faster.
    Launchers do not hold the times of random problems, which nobody asks for again.
    """
    made, launcher = fitted[0], pack.launcher
    launcher.retune(made)
    for shape in made.shapes:
        dtype, sizes = type_of(shape, DTYPES_OF, target("sm90")), Shape(shape.M, shape.N, shape.K, shape.layout)
        one = Case(sizes, dtype, None, shape.kind == "relaxed", shape.offset_a, shape.offset_b)
        plan = launcher.select(_problem(pack, one), H200)
        assert not (shape.drawn and plan.measured)
        if shape.drawn or shape.kind != "plain":
            continue  # precise sums may pay
        best = min(shape.best().values(), key=lambda sample: sample.ns)
        if plan.copies:
            assert plan.cost < best.ns
            continue
        assert plan.measured
        assert (launcher.kernels[plan.kernel].config_name, plan.split, plan.cost) == (
            best.config_name,
            best.split,
            best.ns,
        )


def test_models_do_not_know_held_out_problems(
    pack: Pack, measured: session.Measurement, fitted: tuple[Table, session.Quality]
) -> None:
    """Other times of these give the same models and choices: all that ships is judged by problems that it never saw."""
    changed = {
        one: tuple(sample._replace(ns=(7 if SHAPES.held_out(one) else 1) * sample.ns) for sample in found)
        for one, found in measured.samples.items()
    }
    other = session.Measurement(ENVIRONMENT, changed, {}, measured.total)
    made, quality = session.fit(pack, session.table_of(other, SHAPES), DTYPES_OF)
    assert quality == replace(fitted[1], held_out=quality.held_out)
    assert [x.chosen for x in quality.held_out.choices] == [x.chosen for x in fitted[1].held_out.choices]
    assert (made.network, made.models) == (fitted[0].network, fitted[0].models)


def test_nothing_was_measured(pack: Pack) -> None:
    """A run without time for any case has a table without a network, and nothing to regret."""
    made, quality = session.fit(pack, session.table_of(session.Measurement(ENVIRONMENT, {}, {}, 9), SHAPES), DTYPES_OF)
    assert (made.network, made.models, made.shapes) == (None, (), ())
    assert (quality.held_out.choices, quality.models.choices) == ((), ())


def test_rows_of_random_problems_say_so() -> None:
    """Unless a sweep has the same shape; one in ten is held out, and none of the sweeps."""
    found = cases(SHAPES, draw(distribution(), 7, 400), DTYPES_OF, target("sm90"))
    times: dict[Case, tuple[Sample, ...]] = {one: (Sample("tile", 1, pdl=False, copies=0, ns=1000),) for one in found}
    made = session.table_of(session.Measurement(ENVIRONMENT, times, {}, len(times)), SHAPES)
    swept = {replace(shape, name="") for sweep in SHAPES.sweeps for shape in sweep.shapes}
    exact = [one for one in found if one.shape in swept and not one.offset_a + one.offset_b]
    drawn = [row for row in made.shapes if row.drawn]
    assert len(drawn) == len(found) - len(exact) > 600
    assert 0.05 < sum(row.held_out for row in drawn) / len(drawn) < 0.15
    assert not any(row.held_out for row in made.shapes if not row.drawn)
    assert any(row.offset_a or row.offset_b for row in drawn)


def test_the_table_has_what_the_fit_needs() -> None:
    """Samples that are far from the best of their product are left out, those with copies and those without apart."""
    times = {0: (1000, 2400, 2600), 3: (400, 990, 1010)}
    found = tuple(
        Sample(f"tile_{number}", 1, pdl=False, copies=copies, ns=ns)
        for copies, each in times.items()
        for number, ns in enumerate(each)
    )
    made = session.table_of(session.Measurement(ENVIRONMENT, {case(64): found, case(65): ()}, {}, 2), SHAPES)
    assert [[sample.ns for sample in row.times] for row in made.shapes] == [[1000, 2400, 400, 990], []]


def test_what_was_left_out_is_not_in_the_table(measured: session.Measurement) -> None:
    """Neither where it failed nor where it had worked before."""
    names = {sample.config_name for found in measured.samples.values() for sample in found}
    bad = min(names)
    wanted = session.Measurement(ENVIRONMENT, measured.samples, {bad: "it hangs"}, measured.total)
    found = session.table_of(wanted, SHAPES)
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


SMALL = Shapes(1, (Sweep("squares", "", tuple(Shape(8 * i, 8 * i, 8 * i, "nn") for i in range(1, 5))),))


@pytest.fixture
def on_a_fake(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., session.Measurement]:
    """`session.tune` on a GPU that is none, to `tmp_path`/sm90.json."""
    fake: list[Fake] = []

    @contextmanager
    def gpus(*_: object) -> Iterator[tuple[WorkerPool, dict[str, str]]]:
        with pool(fake[0]) as found:
            yield found, {"GPU": "NVIDIA H200", "driver": "580", "torch": "2"}

    monkeypatch.setattr(session, "_local_gpus", gpus)
    monkeypatch.setattr(session, "fit", lambda _pack, raw, _types: (raw, None))

    def tune(
        configs: tuple[tuple[str, str], ...] = tuple(CONFIGS.items()),
        trouble: tuple[tuple[str, str], ...] = (),
        **options: Any,
    ) -> session.Measurement:
        out = tmp_path / "sm90.json"
        fake[:] = [Fake(tmp_path / "log", configs=configs, trouble=trouble)]
        return session.tune(pack, [pack], SMALL, out, progress=lambda *_: None, **options)[0]

    return tune


def test_the_same_command_goes_on_with_the_seed(on_a_fake: Callable[..., session.Measurement], tmp_path: Path) -> None:
    """It is new in each run, but that of the samples that are there; another one is refused; the table names it."""
    first = on_a_fake(count=3, budget_s=0)
    assert not first.complete
    with pytest.raises(ArtifactError, match=f"seed {first.environment.seed}, not 5"):
        on_a_fake(count=3, seed=5, budget_s=0)
    second = on_a_fake(count=3, budget_s=100)
    assert second.complete
    assert second.environment.seed == first.environment.seed
    plain = [each.name for each in distribution().classes if not each.bias]
    drawn = draw(distribution(), second.environment.seed or 0, 3, plain)
    made = table.read_whole(tmp_path / "sm90.json")
    assert made.seed == second.environment.seed
    (scaled,) = itertools.islice(draw_layers(layers(), second.environment.seed or 0), 1)  # of three problems a sixth
    assert {(Shape(row.M, row.N, row.K, row.layout), row.kind) for row in made.shapes if row.drawn} == {
        *((one.shape, one.kind) for each in drawn.values() for one in _precise_too(each) if one.dtype in TUNABLE),
        (replace(scaled.shape, name=""), "block_scaled"),
    }
    assert sum(not row.drawn for row in made.shapes) == 4
    assert on_a_fake(count=3, budget_s=0).environment.seed != first.environment.seed


def _precise_too(drawn: list[Case]) -> list[Case]:
    """Problems, and those of fast sums with precise ones, which selection may choose."""
    return drawn + [replace(one, fast_accum=False) for one in drawn]


def test_shapes_of_ones_own_are_all(on_a_fake: Callable[..., session.Measurement], tmp_path: Path) -> None:
    """Without random problems there is no seed."""
    assert len(on_a_fake(budget_s=100).samples) == 4
    made = table.read(tmp_path / "sm90.json")
    assert (made.seed, [row.drawn for row in made.shapes]) == (None, [False] * 4)


def test_a_large_table_is_not_replaced_by_a_small_one(
    on_a_fake: Callable[..., session.Measurement], measured: session.Measurement, tmp_path: Path
) -> None:
    """Nothing is measured then, and the files stay."""
    path = tmp_path / "sm90.json"
    session.write(session.table_of(measured, SHAPES), path)
    before = {each: each.read_bytes() for each in tmp_path.glob("*.json")}
    known = len(table.read(table.drawn_path(path)).shapes)
    with pytest.raises(AotmmError, match=f"sm90.json has times of {known} random problems, which 0 would replace"):
        on_a_fake(budget_s=100)
    assert {each: each.read_bytes() for each in tmp_path.glob("*.json")} == before


def test_a_table_is_added_to(
    on_a_fake: Callable[..., session.Measurement], measured: session.Measurement, tmp_path: Path
) -> None:
    """Its products stay, in both files, with the seed if the new ones are not drawn; the new ones come to them."""
    path = tmp_path / "sm90.json"
    session.write(session.table_of(measured, SHAPES), path)
    before = table.read_whole(path)
    new = on_a_fake(keep=True, budget_s=100)
    after = table.read_whole(path)
    assert after.seed == before.seed
    assert {row.product: row for row in after.shapes}.items() >= {row.product: row for row in before.shapes}.items()
    assert len(after.shapes) == len(before.shapes) + len(new.samples)


def _real(pack: Pack, count: int) -> tuple[tuple[str, str], ...]:
    """Some configs of the pack, and their families."""
    found = {kernel.config_name: kernel.family for kernel in pack.launcher.kernels if kernel.role == "product"}
    return tuple(itertools.islice(found.items(), count))


def test_what_is_added_counts_once_however_often_the_run_stops(
    pack: Pack, on_a_fake: Callable[..., session.Measurement], tmp_path: Path
) -> None:
    """Times of the table and new ones have the same weight, also if the run takes several calls."""
    path, record, configs = tmp_path / "sm90.json", tmp_path / "sm90.json.partial", _real(pack, 3)
    on_a_fake(configs=configs, budget_s=100)
    new = table.read(path)

    def older(row: ShapeTimes) -> ShapeTimes:
        return replace(row, times=tuple(s._replace(ns=s.ns * (100 + n)) for n, s in enumerate(row.times)))

    old = replace(new, shapes=tuple(map(older, new.shapes)))
    session.write(old, path)
    on_a_fake(configs=configs, keep=True, budget_s=100)
    at_once = table.read(path).shapes
    assert len({sample.ns for sample in at_once[0].times}) == len(configs)
    session.write(old, path)
    found = session.environment_of(pack, H200, "580", "2", None)
    for number, one in enumerate(cases(SMALL, {}, DTYPES_OF, target("sm90"))[:3]):
        with closing(Record(record, found)) as partial:  # as a call leaves it that had time for one more
            partial.add(one, tuple(Sample(name, 1, pdl=False, copies=0, ns=1000) for name, _ in configs))
        assert len(on_a_fake(configs=configs, keep=True, budget_s=0).samples) == number + 1
    on_a_fake(configs=configs, keep=True, budget_s=100)
    assert table.read(path).shapes == at_once
    assert [each.name for each in tmp_path.glob("sm90.json*")] == ["sm90.json"]


def test_what_fails_now_is_not_kept(pack: Pack, on_a_fake: Callable[..., session.Measurement], tmp_path: Path) -> None:
    """Times that a table has of a config are not added to when the config is wrong or hangs."""
    configs = _real(pack, 3)
    bad, *good = (name for name, _ in configs)
    on_a_fake(configs=configs, budget_s=100)
    measured = on_a_fake(configs=configs, trouble=((bad, "wrong"),), keep=True, budget_s=100)
    assert list(measured.left_out) == [bad]
    found = table.read(tmp_path / "sm90.json").shapes
    assert {sample.config_name for row in found for sample in row.times} == set(good)


@pytest.mark.parametrize("there", [True, False])
def test_only_a_table_of_this_gpu_is_added_to(
    on_a_fake: Callable[..., session.Measurement],
    measured: session.Measurement,
    tmp_path: Path,
    there: bool,  # noqa: FBT001 - a parameter
) -> None:
    """Nothing is measured otherwise."""
    path = tmp_path / "sm90.json"
    if there:
        session.write(replace(session.table_of(measured, SHAPES), device="NVIDIA GH200"), path)
    why = "has times of NVIDIA GH200, and this is NVIDIA H200" if there else "cannot be read"
    with pytest.raises(ArtifactError, match=why):
        on_a_fake(keep=True, budget_s=100)
    assert not (tmp_path / "log").exists()


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


def test_the_command_draws_unless_it_has_shapes(
    measured: session.Measurement,
    fitted: tuple[Table, session.Quality],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--seed` and `--count` reach the draw, `--shapes` replaces it; the seed is printed."""
    asked: list[tuple[object, object]] = []

    def tune(*_: object, **options: object) -> tuple[session.Measurement, session.Quality, Path]:
        asked.append((options["seed"], options["count"]))
        return measured, fitted[1], tmp_path / "sm90.json"

    monkeypatch.setattr(session, "tune", tune)
    words = ("--arch", "sm90", "--out", tmp_path / "sm90.json")
    code, text, _ = _tune(*words, "--seed", "3", "--count", "50")
    assert code == 0
    assert f"seed of the random ones: {ENVIRONMENT.seed}" in text
    assert _tune(*words)[0] == _tune(*words, "--shapes", problems.FILE)[0] == 0
    assert asked == [(3, 50), (None, 600), (None, 0)]
    code, _, text = _tune(*words, "--shapes", problems.FILE, "--seed", "3", "--count", "50")
    assert (code, "--seed, --count: no effect with --shapes" in text) == (2, True)


def _fewer(measured: session.Measurement) -> session.Measurement:
    """All held-out problems, and a quarter of the others, which is enough for models that are as good."""
    others = itertools.islice((one for one in measured.samples if not SHAPES.held_out(one)), 0, None, 4)
    kept = {*others, *filter(SHAPES.held_out, measured.samples)}
    found = {one: times for one, times in measured.samples.items() if one in kept}
    return session.Measurement(measured.environment, found, {}, len(found))


def test_refit(measured: session.Measurement, tmp_path: Path) -> None:
    """A table's models can be fitted again anywhere, from another's on too; what was measured stays as it is."""
    path, raw = tmp_path / "sm90.json", session.table_of(_fewer(measured), SHAPES)
    session.write(raw, path)
    code, text, _ = _tune("--arch", "sm90", "--out", path, "--refit")
    assert code == 0
    assert "regret, held-out shapes: mean 1.0" in text
    assert "  random, 2 bytes: mean 1.0" in text
    assert "targets on held-out shapes: mean 1.02, 95 % quantile 1.06, worst 1.20" in text
    made = table.read_whole(path)
    assert made.models
    assert any(shape.drawn for shape in made.shapes)
    assert set(made.shapes) == set(table.parse(table.write(raw), "t").shapes)
    code, text, _ = _tune("--arch", "sm90", "--out", path, "--refit", "--json")
    body = json.loads(text)
    held_out = body["regret"]["held_out"]
    assert 1 <= held_out["mean"] < 1.03
    assert held_out["mean"] <= held_out["quantile_95"] <= held_out["worst"]
    assert sum(kind["shapes"] for kind in held_out["kinds"].values()) == held_out["shapes"]
    assert body["table"] == str(path)
    assert table.read_whole(path) == made
    start = made if made.network is None else replace(made, network=replace(made.network, shift=made.network.shift + 1))
    session.write(start, tmp_path / "start.json")
    code, _, _ = _tune("--arch", "sm90", "--out", path, "--refit", "--start", tmp_path / "start.json")
    assert code == 0
    assert table.read_whole(path).network not in (made.network, start.network)
    assert table.read_whole(path).shapes == made.shapes


def test_refit_of_nothing(tmp_path: Path) -> None:
    """There must be a table."""
    code, _, text = _tune("--arch", "sm90", "--out", tmp_path / "none.json", "--refit")
    assert code == ArtifactError.exit_code
    assert "make one: aotmm tune" in text


def test_refit_refuses_other_tables(measured: session.Measurement, tmp_path: Path) -> None:
    """A table for another arch, or of other kernels, stays as it is, and so it does if the start has no models."""
    path, other = tmp_path / "sm90.json", tmp_path / "other.json"
    made = session.table_of(measured, SHAPES)
    unknown = (Sample("tile_1x1x1_s1_w1", 1, pdl=False, copies=0, ns=1000),)
    words = {
        "is a table for sm80, and the pack in": (replace(made, arch="sm80"), None),
        "has no times of the kernels in": (
            replace(made, shapes=tuple(replace(row, times=unknown) for row in made.shapes)),
            None,
        ),
        "other.json has no models to begin with; fit some: aotmm tune --refit --out": (made, made),
        "other.json is a table for sm80, and the pack": (made, replace(made, arch="sm80")),
    }
    for why, (mine, start) in words.items():
        session.write(mine, path)
        before = path.read_bytes()
        if start is not None:
            session.write(start, other)
        code, _, text = _tune(
            "--arch", "sm90", "--out", path, "--refit", *(() if start is None else ("--start", other))
        )
        assert (code, why in text, path.read_bytes()) == (ArtifactError.exit_code, True, before), text
    code, _, text = _tune("--arch", "sm90", "--out", path, "--refit", "--dtype", "int8")
    assert (code, "dtype 'int8' cannot be tuned on sm90" in text) == (SpecError.exit_code, True)


def test_a_table_of_several_types_is_fitted_whatever_the_call_measured(
    pack: Pack, measured: session.Measurement
) -> None:
    """With --dtype a call measures one type, and the table that it is added to has others."""
    some = dict(itertools.islice(measured.samples.items(), 60))
    assert {one.element_bytes for one in some} == {1, 2}
    made, quality = session.fit(
        pack,
        session.table_of(session.Measurement(ENVIRONMENT, some, {}, 60), SHAPES),
        types_of(("fp16",), target("sm90")),
    )
    assert {row.shape.element_bytes for row in quality.models.choices} == {1, 2}
    assert made.network is not None


def test_a_table_that_has_no_place_leaves_the_old_one(
    measured: session.Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of its two files changes, and nothing else stays behind."""
    path = tmp_path / "sm90.json"
    made = session.table_of(measured, SHAPES)
    session.write(made, path)
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    assert len(before) == 2
    write, room = Path.write_bytes, 1

    def full(self: Path, data: bytes) -> int:
        nonlocal room
        room -= 1
        if room < 0:
            write(self, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(AotmmError, match="No space left on device"):
        session.write(replace(made, date="2000-01-01"), path)
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before


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
