"""A table as a launcher holds it: constants and corrections of each kernel of a pack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotmm.pack.schema import Config, Kernel
from aotmm.pack.table import Model
from aotmm.pack.time_model import FITTED, HIDDEN, constants, fitted
from aotmm.pack.tuning import UNMEASURED, Tuning, tuning
from aotmm.target import target
from tests.samples import kernel
from tests.unit.pack.test_table import MODELS, NETWORK, TABLE

H200 = target("sm90")
KNOWN = replace(
    kernel("known"), config_name="ws_a", family="pingpong", config=Config(128, 256, 64, 4, 8), fast_accum=False
)
SPLIT = replace(KNOWN, name="split", role="partial", family="cooperative", config_name="ws_a_split")
UNKNOWN = replace(KNOWN, name="unknown", family="tile", config_name="tile")
HELPERS = tuple(replace(KNOWN, name=role, role=role, config_name=role) for role in ("reduce", "copy"))
NONE = (0.0,) * HIDDEN


def _of(*kernels: Kernel, models: tuple[Model, ...] = MODELS) -> Tuning:
    return tuning(replace(TABLE, models=models), kernels, H200)


def test_a_config_with_a_model() -> None:
    """Its factors, hidden and shift are its own; hidden and shift are added to those of the network."""
    found = _of(KNOWN, SPLIT)
    for each, model, own, correction in zip((KNOWN, SPLIT), MODELS, found.constants, found.corrections, strict=True):
        assert own == fitted(constants(each, H200, TABLE), model.factors)
        assert correction.hidden == tuple(value + model.hidden[0] for value in NETWORK.hidden(each))
        assert correction.shift == NETWORK.shift + model.shift
    assert [correction.alternates for correction in found.corrections] == [1, 0]


def test_a_config_without_a_model() -> None:
    """It has the network's factors, and nothing of its own on the network."""
    found = _of(UNKNOWN, KNOWN)
    assert found.constants[0] == fitted(constants(UNKNOWN, H200, TABLE), NETWORK.factors)
    assert found.corrections[0] == (NETWORK.hidden(UNKNOWN), NETWORK.shift, 0)


@pytest.mark.parametrize("other", [replace(KNOWN, dtype_a="fp8e4", fast_accum=False), replace(KNOWN, fast_accum=True)])
def test_a_model_is_for_one_width_and_one_kind(other: Kernel) -> None:
    """A kernel of the same config with other elements, or of another kind, is not known by it."""
    mine = Model("ws_a", 1 if other.dtype_a == "fp8e4" else 2, other.kind, 0.5, (2.0,) * len(FITTED), NONE)
    found = _of(other, models=(*MODELS, mine))
    assert found.constants == [fitted(constants(other, H200, TABLE), mine.factors)]
    assert found.corrections[0].shift == NETWORK.shift + 0.5


@pytest.mark.parametrize("other", [replace(KNOWN, dtype_a="fp8e4"), replace(KNOWN, fast_accum=True)])
def test_types_without_any_model_have_the_formulas_times(other: Kernel) -> None:
    """The network knows nothing of them: no factors, no hidden node above 0, and a shift that takes its output away."""
    found = _of(other)
    assert found.constants == [constants(other, H200, TABLE)]
    ((hidden, shift, _),) = found.corrections
    assert max(hidden) < -1e6
    output = sum(max(b, 0.0) * weight for b, weight in zip(NETWORK.second_bias, NETWORK.outputs, strict=True))
    assert output + shift == pytest.approx(0.0, abs=1e-12)
    assert output != 0


@pytest.mark.parametrize("role", ["grouped_m", "grouped_k"])
def test_kernels_of_groups_have_the_factors_of_their_tile(role: str) -> None:
    """And nothing of the network, which selection leaves out for them."""
    grouped = replace(KNOWN, role=role, config_name=f"ws_a_{role}")
    found = _of(grouped)
    assert found.constants == [fitted(constants(grouped, H200, TABLE), MODELS[0].factors)]
    assert found.corrections == [(NONE, 0.0, 0)]


def test_reduces_and_copies_are_not_fitted() -> None:
    """Their constants are the data sheet's, also where a model has their name, and no network corrects them."""
    models = tuple(replace(MODELS[0], config_name=each.config_name) for each in HELPERS)
    found = _of(*HELPERS, models=models)
    assert found.constants == [constants(each, H200, TABLE) for each in HELPERS]
    assert found.corrections == [(NONE, 0.0, 0)] * 2


def test_without_a_network_constants_are_the_data_sheets() -> None:
    """Of the device of the table; without a table, of the nominal one, and nothing is measured."""
    every = (KNOWN, SPLIT, UNKNOWN, *HELPERS)
    slow = replace(TABLE, clock_mhz=990, network=None, models=())
    found = tuning(slow, every, H200)
    assert (found.constants, found.corrections) == ([constants(each, H200, slow) for each in every], [])
    assert constants(KNOWN, H200, slow) != constants(KNOWN, H200)
    assert tuning(None, every, H200) == Tuning(
        [constants(each, H200) for each in every], [], [UNMEASURED] * len(every), 0, [], []
    )


def test_measured_times() -> None:
    """Those of shapes that begin at a line and were not drawn, by number of the config; other kernels have none."""
    found = _of(UNKNOWN, SPLIT, KNOWN)
    assert (found.config_numbers, found.config_count) == ([UNMEASURED, 1, 0], 2)
    assert found.shapes == [(256, 512, 1024, 2, 0, 0)]
    assert found.times == [[(900, 1, 1), (700, 4, 0)]]
