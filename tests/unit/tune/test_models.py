"""Times that a table predicts for samples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aotmm.errors import ArtifactError
from aotmm.pack.schema import Config
from aotmm.pack.table import Model, Sample, ShapeTimes
from aotmm.pack.time_model import FITTED, HIDDEN, INPUTS, KERNEL_INPUTS, PDL_INPUTS, SECOND, Network, constants
from aotmm.target import target
from aotmm.tune.models import Gpu, Samples, formula, inputs, predicted, samples
from tests.samples import kernel
from tests.unit.tune.test_fit import EMPTY, measured, samples_of

RNG = np.random.default_rng(3)
NETWORK = Network(
    inputs=tuple(tuple(row) for row in RNG.normal(0, 0.02, (len(INPUTS), HIDDEN)).tolist()),
    bias=tuple(RNG.normal(0, 0.1, HIDDEN).tolist()),
    second=tuple(tuple(row) for row in RNG.normal(0, 0.3, (HIDDEN, SECOND)).tolist()),
    second_bias=tuple(RNG.normal(0, 0.1, SECOND).tolist()),
    outputs=tuple(RNG.normal(0, 0.1, SECOND).tolist()),
    shift=0.125,
    factors=(2.0, 0.5, 1.5, 0.25, 3.0),
)
KNOWN = Model(
    "ws_64x64",
    2,
    kind="plain",
    shift=-0.5,
    factors=(0.5, 2.0, 0.75, 4.0, 1.25),
    hidden=tuple(RNG.normal(0, 0.5, HIDDEN).tolist()),
)
PLAIN = (1.0,) * len(FITTED)


@pytest.fixture(scope="module")
def found() -> Samples:
    """Every plan for a few products."""
    return samples_of(measured(8, seed=7))


def time_of(found: Samples, row: int, factors: tuple[float, ...]) -> float:
    """The formula, as launcher.h has it, with factors of the constants."""
    base, tile, multiply, take, load, read, sums = found.parts[row] * (*factors, 1, 1)
    return float(base + tile + math.sqrt(multiply**2 + take**2 + load**2 + read**2) + sums)


def test_parts_are_summed_up_by_the_formula(found: Samples) -> None:
    """Factors of 1 are the data sheet's constants, others those of each config; memory and sums have none."""
    assert formula(found.parts) == pytest.approx([time_of(found, row, PLAIN) for row in range(len(found.ns))])
    factors = np.exp(np.random.default_rng(4).normal(0, 1, (len(found.keys), len(FITTED))))
    rows = [(row, tuple(factors[key])) for row, key in enumerate(found.key)]
    assert inputs(found, factors)[1] == pytest.approx([time_of(found, *row) for row in rows])


def test_inputs_are_of_the_time_with_factors(found: Samples) -> None:
    """Parts count as shares of the formula's time; what is known of kernels, problems and pdl stays as it is."""
    factors = np.full((len(found.keys), len(FITTED)), 2.0)
    values, times = inputs(found, factors)
    named = dict(zip(INPUTS[: -len(PDL_INPUTS)], values.T, strict=False))
    assert named["log2 time"] == pytest.approx(np.log2(times))
    assert named["fixed"] == pytest.approx(2 * found.parts[:, :2].sum(axis=1) / times)
    for number, name in enumerate(("multiply", "take", "load"), 2):
        assert named[name] == pytest.approx(2 * found.parts[:, number] / times)
    for number, name in enumerate(("read", "sums"), 5):
        assert named[name] == pytest.approx(found.parts[:, number] / times)
    assert named["reread"] == pytest.approx(np.minimum(1, found.plain["ns of reread"] / times))
    assert (values[:, : len(KERNEL_INPUTS)] == found.kernels[found.key]).all()
    assert all((named[name] == column).all() for name, column in found.plain.items() if name in named)
    pdl = values[:, -len(PDL_INPUTS) :]
    assert (pdl[found.plain["pdl"] == 0] == 0).all()
    assert (pdl[found.plain["pdl"] == 1][:, 0] == 1).all()


def test_predictions_go_by_the_model_of_each_config(found: Samples) -> None:
    """Its factors, hidden and shift; a config without a model has the network's factors and nothing of its own."""
    times = predicted(found, replace(EMPTY, network=NETWORK, models=(KNOWN,)))
    unknown = Model("", 2, kind="plain", shift=0.0, factors=NETWORK.factors, hidden=(0.0,) * HIDDEN)
    models = [KNOWN if key == KNOWN.key else unknown for key in found.keys]
    values, _ = inputs(found, np.array([model.factors for model in models]))
    for row, key in enumerate(found.key):
        model = models[key]
        sums = [bias + own for bias, own in zip(NETWORK.bias, model.hidden, strict=True)]
        for value, weights in zip(values[row], NETWORK.inputs, strict=True):
            sums = [each + value * weight for each, weight in zip(sums, weights, strict=True)]
        nodes = np.maximum(0, sums) @ np.array(NETWORK.second) + NETWORK.second_bias
        output = sum(max(0.0, each) * weight for each, weight in zip(nodes, NETWORK.outputs, strict=True))
        output += NETWORK.shift + model.shift
        assert times[row] == pytest.approx(time_of(found, row, model.factors) * math.exp(output))
    assert {key == KNOWN.key for key in (found.keys[number] for number in found.key)} == {True, False}


@pytest.mark.parametrize("other", [replace(KNOWN, element_bytes=1), replace(KNOWN, kind="relaxed")])
def test_a_model_is_for_one_width_and_one_kind(found: Samples, other: Model) -> None:
    """One of the same config for other elements, or another kind, changes nothing: the formula's times stay."""
    without = predicted(found, replace(EMPTY, network=NETWORK))
    assert (without == formula(found.parts)).all()
    assert (predicted(found, replace(EMPTY, network=NETWORK, models=(other,))) == without).all()
    assert (predicted(found, replace(EMPTY, network=NETWORK, models=(KNOWN,))) != without).any()


def test_no_prediction_without_a_network(found: Samples) -> None:
    """The error says how to fit one."""
    with pytest.raises(ArtifactError, match="the table of made up has no network; fit one: aotmm tune --refit"):
        predicted(found, EMPTY)


@pytest.mark.parametrize(
    ("cluster", "multiprocessors", "tiles"),
    [
        ((1, 1), 132, 132),
        ((2, 1), 132, 66),
        ((1, 2), 114, 57),
        ((2, 2), 132, 30),
        ((1, 4), 114, 25),
        ((4, 2), 132, 15),
        ((2, 4), 114, 12),
    ],
)
def test_rounds_of_clusters(cluster: tuple[int, int], multiprocessors: int, tiles: int) -> None:
    """Of clusters of more than two blocks, some multiprocessors have none; a tile more begins the second round."""
    config = Config(128, 128, 64, 4, 8, cluster_m=cluster[0], cluster_n=cluster[1])
    made = replace(kernel("made"), role="product", config_name="ws", config=config, fast_accum=False)
    gpu = Gpu(target("sm90"), replace(EMPTY, multiprocessors=multiprocessors))
    times = (Sample("ws", 1, pdl=False, copies=0, ns=1),)
    shapes = [
        ShapeTimes(2, "nt", "plain", 128 * count, 128, 4096, 0, 0, False, times)  # noqa: FBT003
        for count in (tiles, tiles + 1)
    ]
    found = samples((made,), gpu, shapes)
    assert found.parts[:, 1] / constants(made, *gpu).ns_per_tile == pytest.approx([1, 2])


def test_clusters_take_in_less() -> None:
    """Into one multiprocessor come A over the blocks of a cluster along M, and B over those along N."""
    shape = ShapeTimes(2, "nt", "plain", 128, 256, 4096, 0, 0, False, (Sample("ws", 1, pdl=False, copies=0, ns=1),))  # noqa: FBT003
    taken = {}
    for cluster in ((1, 1), (2, 1), (1, 2), (4, 2)):
        config = Config(128, 256, 64, 4, 8, cluster_m=cluster[0], cluster_n=cluster[1])
        made = replace(kernel("made"), role="product", config_name="ws", config=config, fast_accum=False)
        taken[cluster] = samples((made,), Gpu(target("sm90"), EMPTY), [shape]).parts[0, 3]
    a, b = 128 / 384, 256 / 384
    shares = {cluster: ns / taken[1, 1] for cluster, ns in taken.items()}
    assert shares == pytest.approx({(1, 1): 1, (2, 1): a / 2 + b, (1, 2): a + b / 2, (4, 2): a / 4 + b / 2})


def test_slices_share_steps() -> None:
    """Of two blocks with slices of K each has half of the steps and takes in half of A and B; both load all."""
    shape = ShapeTimes(2, "nt", "plain", 128, 256, 4096, 0, 0, False, (Sample("ws", 1, pdl=False, copies=0, ns=1),))  # noqa: FBT003
    parts = []
    for config in (Config(128, 256, 64, 4, 8), Config(128, 256, 128, 4, 8, cluster_k=2)):
        made = replace(kernel("made"), role="product", config_name="ws", config=config, fast_accum=False)
        parts.append(samples((made,), Gpu(target("sm90"), EMPTY), [shape]).parts[0])
    *_, multiply, take, load, _, _ = (two / one if one else 1 for one, two in zip(*parts, strict=True))
    assert (multiply, take, load) == pytest.approx((0.5, 0.5, 1))


@pytest.mark.parametrize(
    ("layout", "K", "split", "expected"),
    [
        ("nt", 4096, 1, (0, 0, 0, 0)),
        ("nt", 4080, 1, (0.25, 0.25 / 64, 0, 0)),
        ("tn", 4080, 1, (0.25, 0.25 / 64, 0.25, 0)),
        ("tt", 4080, 1, (0.25, 0.25 / 64, 0, 0)),
        ("nt", 4080, 3, (0.25, 0.25 / 22, 0, 22 - 64 / 3)),
    ],
)
def test_inputs_of_what_lies_past_the_edges(layout: str, K: int, split: int, expected: tuple[float, ...]) -> None:
    """The part of the last step past K, of slices that are not equal, and how full the last of so many tiles are."""
    config = Config(128, 256, 64, 4, 8)
    made = replace(kernel("made"), role="product", config_name="ws", config=config, fast_accum=False)
    times = (Sample("ws", split, pdl=False, copies=0, ns=1),)
    shape = ShapeTimes(2, layout, "plain", 3 * 128 - 32, 256, K, 0, 0, False, times)  # noqa: FBT003
    plain = samples((made,), Gpu(target("sm90"), EMPTY), [shape]).plain
    found = [plain[name][0] for name in ("past K", "past K / steps", "past K, across K", "uneven")]
    assert found == pytest.approx(expected)
    edges = [plain[name][0] for name in ("last rows", "last columns", "1 / down", "1 / across")]
    assert edges == pytest.approx([0.75, 1, 1 / 3, 1])


@pytest.mark.parametrize(
    ("layout", "offsets", "K", "shifted", "lines", "sectors"),
    [
        ("nt", (48, 80), 1024, True, (1, 0), (0, 0)),
        ("nt", (96, 80), 1024, True, (0, 1), (0, 1)),
        ("nt", (80, 0), 1024, True, (1, 0), (1, 0)),
        ("nt", (48, 80), 960, True, (1, 1), (1, 1)),
        ("nn", (48, 80), 1024, True, (1, 1), (1, 1)),
        ("nt", (48, 80), 1024, False, (1, 1), (1, 1)),
    ],
    ids=["in sectors", "one in sectors", "one on a line", "short", "B across K", "never"],
)
def test_inputs_of_operands_within_lines(
    layout: str,
    offsets: tuple[int, int],
    K: int,
    shifted: bool,  # noqa: FBT001
    lines: tuple[int, int],
    sectors: tuple[int, int],
) -> None:
    """Operands that begin within lines lie on them, or in whole sectors, where kernels begin before K."""
    config = Config(128, 256, 64, 4, 8)
    made = replace(kernel("made"), role="product", config_name="ws", config=config, fast_accum=False)
    times = (Sample("ws", 1, pdl=False, copies=0, ns=1),)
    shape = ShapeTimes(2, layout, "plain", 128, 256, K, *offsets, False, times)  # noqa: FBT003
    plain = samples((made,), Gpu(target("sm90"), EMPTY), [shape], shifted=shifted).plain
    assert (plain["lines_a"][0], plain["lines_b"][0]) == lines
    assert (plain["sectors_a"][0], plain["sectors_b"][0]) == sectors
