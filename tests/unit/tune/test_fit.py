"""The fit finds what times follow, on products that it did not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from aotmm.pack import table
from aotmm.pack.schema import Config, Kernel
from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.pack.time_model import FITTED, HIDDEN
from aotmm.problem import LAYOUTS, SPLITS
from aotmm.target import target
from aotmm.tune import fit as fitting
from aotmm.tune.fit import Fitted, fit
from aotmm.tune.models import Gpu, Samples, formula, inputs, predicted, samples
from tests.samples import kernel

FACTS = 132, 1980, 4916, 60 << 20
EMPTY = Table("sm90", "made up", *FACTS, "none", "none", "0", "2026-11-20", 0, None, (), ())
GPU = Gpu(target("sm90"), EMPTY)
TILES = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 128))


def kernels() -> tuple[Kernel, ...]:
    """A product of each tile with pdl, a partial of the middle one without, and its reduce."""
    plain = replace(kernel("plain"), vector_bytes=16, pdl=True, fast_accum=False)
    found = []
    for m, n in TILES:
        config = Config(m, n, 64, 4, 8)
        found.append(replace(plain, name=f"{m}x{n}", config_name=f"ws_{m}x{n}", family="cooperative", config=config))
    partial = replace(found[2], name="split", role="partial", config_name="ws_split", pdl=False)
    return *found, partial, replace(plain, name="reduce", role="reduce", config_name="reduce")


def measured(count: int, seed: int, noise: float = 0.02) -> list[ShapeTimes]:
    """Random products and the time of every plan on a GPU that the formula does not describe.

    Every second tile of it costs 15 % more than predicted. The fewer tiles there are, from half a wave down to a
    quarter, the less they cost, by up to 30 %. Pdl saves 1 us of launches that fill the GPU and costs as much where
    they do not.
    """
    rng, kinds = np.random.default_rng(seed), kernels()[:-1]
    shapes = []
    for _ in range(count):
        M, N, K = (8 * max(1, int(2 ** rng.uniform(2, 9))) for _ in range(3))
        samples_ = []
        for each in kinds:
            steps = K // each.config.block_k
            able = [split for split in SPLITS if steps >= 2 * split] if each.role == "partial" else [1]
            ways = [(split, pdl) for split in able for pdl in ((False, True) if each.pdl else (False,))]
            samples_ += [Sample(each.config_name, split, pdl, 0, 1) for split, pdl in ways]
        layout = str(rng.choice(LAYOUTS))
        shapes.append(ShapeTimes(2, layout, "plain", M, N, K, 0, 0, False, tuple(samples_)))  # noqa: FBT003
    found = samples(kernels(), GPU, shapes)
    factors = 1 + 0.15 * (found.key % 2)
    waves, pdl = found.plain["wave up to 1"], found.plain["pdl"]
    times = (
        formula(found.parts) * factors * (1 - 0.3 * np.clip(2 - 4 * waves, 0, 1))
        + np.where(waves < 1, 1000, -1000) * pdl
    )
    times *= np.exp(rng.normal(0, noise, len(times)))
    number = iter(np.maximum(1, times.round()).astype(int).tolist())
    return [replace(shape, times=tuple(each._replace(ns=next(number)) for each in shape.times)) for shape in shapes]


def regrets(found: Samples, times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """For each product the time of the plan that is fastest by `times`, over the fastest measured one."""
    of = [np.flatnonzero(found.product == number) for number in np.unique(found.product)]
    return [float(found.ns[rows[np.argmin(times[rows])]] / found.ns[rows].min()) for rows in of]


def corrected(found: Samples, by: Fitted) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The times of samples by what was fitted, as a table has it: its weights are rounded."""
    done = table.write(replace(EMPTY, network=by.network, models=by.models))
    return predicted(found, table.parse(done, "the table"))


def samples_of(shapes: Sequence[ShapeTimes]) -> Samples:
    """What the fit gets."""
    return samples(kernels(), GPU, shapes)


def test_good_plans_on_products_that_were_not_fitted() -> None:
    """Next to no regret where the formula alone has much, and times within a few percent, the noise being 2 %."""
    fitted, unseen = fit(samples_of(measured(300, seed=1))), samples_of(measured(100, seed=2))
    times = corrected(unseen, fitted)
    by_formula, ours = regrets(unseen, formula(unseen.parts)), regrets(unseen, times)
    assert np.mean(by_formula) > 1.05
    assert np.mean(ours) < 1.015
    assert max(ours) < 1.15
    near = unseen.ns < 1.5 * np.array([unseen.ns[unseen.product == each].min() for each in unseen.product])
    assert np.median(np.abs(np.log(times / unseen.ns))[near]) < 0.05


def test_no_model_of_types_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network knows nothing of them, unless the table that the fit begins with does."""
    monkeypatch.setattr(fitting, "_RESTARTS", 1)
    found = samples_of(measured(20, seed=6))
    others = [(name, 1, "block_scaled") for name, *_ in found.keys]
    more = replace(found, keys=[*found.keys, *others], kernels=np.concatenate([found.kernels, found.kernels]))
    fitted = fit(more)
    assert {model.types for model in fitted.models} == {(2, "plain")}
    start = replace(
        EMPTY,
        network=fitted.network,
        models=tuple(replace(m, element_bytes=1, kind="block_scaled") for m in fitted.models),
    )
    assert {model.types for model in fit(more, start).models} == {(2, "plain"), (1, "block_scaled")}


def test_times_of_what_is_chosen_are_right_on_average() -> None:
    """Of each product the plan that is predicted to be fastest: on those of the fit, and nearly so on others.

    Without a shift they take 3 % longer than predicted here, because the loss has the regret in it.
    """
    seen, unseen = samples_of(measured(300, seed=1)), samples_of(measured(100, seed=2))
    fitted = fit(seen)
    for found, most in ((seen, 0.001), (unseen, 0.02)):
        times = corrected(found, fitted)
        of = [np.flatnonzero(found.product == number) for number in np.unique(found.product)]
        chosen = [rows[np.argmin(times[rows])] for rows in of]
        errors = np.log(found.ns[chosen] / times[chosen])
        assert abs(errors.mean()) < most
        assert np.median(np.abs(errors)) < 0.03


def test_from_the_table_of_another_device() -> None:
    """After 20 products a fit from that table on has little regret; one from nothing has twice as much."""
    first = fit(samples_of(measured(300, seed=1)))
    table_of_another = replace(EMPTY, network=first.network, models=first.models)
    few, unseen = samples_of(measured(20, seed=3)), samples_of(measured(100, seed=2))
    alone, begun = (fit(few, start) for start in (None, table_of_another))
    of_alone, of_begun = (np.mean(regrets(unseen, corrected(unseen, each))) - 1 for each in (alone, begun))
    assert of_begun < 0.006
    assert of_alone > 2 * of_begun


def test_a_config_without_times_keeps_what_the_start_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors are those of the start, changed as all are; without a start, those of an unknown config."""
    monkeypatch.setattr(fitting, "_EPOCHS", 1)  # the network is of no interest here
    monkeypatch.setattr(fitting, "_RESTARTS", 1)
    first = fit(samples_of(measured(100, seed=1)))
    untimed = next(number for number, model in enumerate(first.models) if model.config_name == "ws_128x256")
    models = list(first.models)
    models[untimed] = replace(models[untimed], factors=tuple(1.5 * each for each in models[untimed].factors))
    start = replace(EMPTY, network=first.network, models=tuple(models))
    some = [
        replace(shape, times=tuple(each for each in shape.times if each.config_name != "ws_128x256"))
        for shape in measured(100, seed=2)
    ]
    found = samples_of(some)
    assert found.keys[untimed] == models[untimed].key
    assert untimed not in found.key
    begun, alone = fit(found, start), fit(found)
    assert begun.models[untimed].factors == pytest.approx(models[untimed].factors, rel=0.25)
    assert alone.models[untimed].factors == pytest.approx(alone.network.factors)


def test_factors_that_times_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of times by the formula with other constants the fit finds these: for all configs, and for one that differs."""
    monkeypatch.setattr(fitting, "_EPOCHS", 1)  # the network is of no interest here
    monkeypatch.setattr(fitting, "_RESTARTS", 1)
    plain = samples_of(measured(1500, seed=8))
    common = np.array([2.0, 2.0, 1.6, 1.6, 1.6])
    truth, step = np.tile(common, (len(plain.keys), 1)), FITTED.index("ns_per_k_step")
    slow = plain.keys.index(("ws_128x256", 2, "plain"))
    truth[slow, step] *= 2
    ns = inputs(plain, truth)[1] * np.exp(np.random.default_rng(8).normal(0, 0.01, len(plain.ns)))
    found = fit(replace(plain, ns=ns))
    own, shared = np.array([model.factors for model in found.models]), np.array(found.network.factors)
    assert np.abs(np.log(own / truth)).max() < np.log(1.3)
    assert (np.abs(np.log(shared / common)) < np.log(common) / 2).all()
    assert own[slow, step] > 1.5 * shared[step]
    assert own[:, step].argmax() == slow
    errors = np.abs(np.log(inputs(plain, own)[1] / ns))
    assert np.median(np.abs(np.log(formula(plain.parts) / ns))) > 0.5
    assert np.median(errors) < 0.025
    assert np.quantile(errors, 0.9) < 0.07


def test_the_same_samples_give_the_same_network() -> None:
    """A fit has a seed: the table does not depend on when or where it is made."""
    few = samples_of(measured(12, seed=3))
    assert fit(few) == fit(few)


def test_a_few_wrong_times_do_not_matter() -> None:
    """One time in thirty that is twice too long or too short."""
    rng, shapes = np.random.default_rng(4), measured(300, seed=1)
    wrong = [
        replace(
            shape,
            times=tuple(
                each._replace(ns=max(1, int(each.ns * rng.choice((0.5, 2))))) if rng.random() < 1 / 30 else each
                for each in shape.times
            ),
        )
        for shape in shapes
    ]
    unseen = samples_of(measured(100, seed=2))
    assert np.mean(regrets(unseen, corrected(unseen, fit(samples_of(wrong))))) < 1.03


def test_every_config_has_a_model() -> None:
    """Also one that was never timed, and one product is enough for finite weights.

    One that was not timed has what an unknown config has, and nothing of its own.
    """
    (shape,) = measured(1, seed=5)
    found = fit(samples_of([replace(shape, times=shape.times[:3])]))
    assert [model.config_name for model in found.models] == sorted(each.config_name for each in kernels()[:-1])
    assert np.isfinite(found.network.inputs).all()
    for model in found.models:
        assert np.isfinite([model.shift, *model.factors, *model.hidden]).all()
    timed = {sample.config_name for sample in shape.times[:3]}
    others = [model for model in found.models if model.config_name not in timed]
    assert others
    for model in others:
        assert (model.shift, model.factors, model.hidden) == (0.0, found.network.factors, (0.0,) * HIDDEN)


def test_samples_with_copies_are_not_fitted() -> None:
    """They have the time of the copies in them, which the formula knows."""
    (shape,) = measured(1, seed=6)
    copied = replace(shape, times=(*shape.times, shape.times[0]._replace(copies=1, ns=10**9)))
    assert len(samples_of([copied]).ns) == len(shape.times)


def test_kernels_that_are_not_there_are_not_fitted() -> None:
    """A table may know configs that a pack no longer has."""
    (shape,) = measured(1, seed=6)
    more = replace(shape, times=(*shape.times, shape.times[0]._replace(config_name="gone")))
    assert len(samples_of([more]).ns) == len(shape.times)
