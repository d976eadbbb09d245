"""The tuning table's file: canonical bytes, and a strict reader that says where a file is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotmm.errors import ArtifactError
from aotmm.pack import table
from aotmm.pack.table import Model, Sample, ShapeTimes, Table
from aotmm.pack.time_model import FITTED, HIDDEN, INPUTS, SECOND, Network
from aotmm.target import TARGETS

FAST = Sample("ws_a", 1, pdl=True, copies=0, ns=900)
SLOW = Sample("ws_a", 1, pdl=False, copies=0, ns=1000)
COPIED = Sample("ws_a", 1, pdl=False, copies=3, ns=800)
SPLIT = Sample("ws_a_split", 4, pdl=False, copies=0, ns=700)

NETWORK = Network(
    inputs=tuple((row / 8,) * HIDDEN for row in range(len(INPUTS))),
    bias=(-1.5,) * HIDDEN,
    second=tuple((node / 4,) * SECOND for node in range(HIDDEN)),
    second_bias=(0.25,) * SECOND,
    outputs=(0.5,) * SECOND,
    shift=2.25,
    factors=(0.75, 1.5, 1.25, 2.0, 3.0),
)
MODELS = (
    Model("ws_a", 2, kind="plain", shift=-0.125, factors=(1.0, 0.5, 2.0, 0.001, 1000.0), hidden=(0.25,) * HIDDEN),
    Model("ws_a_split", 2, kind="plain", shift=0.25, factors=(1.0,) * len(FITTED), hidden=(-0.5,) * HIDDEN),
)
TABLE = Table(
    arch="sm90",
    device="NVIDIA H200",
    multiprocessors=132,
    clock_mhz=1980,
    memory_gbps=4916,
    l2_bytes=60 << 20,
    driver="580.1",
    torch="2.11.0",
    aotmm="0.1.0",
    date="2026-11-20",
    seed=4,
    network=NETWORK,
    models=MODELS,
    shapes=(
        ShapeTimes(2, "nn", "plain", 256, 512, 1024, 0, 0, False, (SLOW, COPIED, FAST, SPLIT)),  # noqa: FBT003
        ShapeTimes(2, "nn", "plain", 256, 512, 1024, 16, 126, False, (SLOW,), drawn=True),  # noqa: FBT003
        ShapeTimes(2, "nt", "plain", 1, 512, 1024, 0, 0, True, ()),  # noqa: FBT003
    ),
)


def test_a_table_survives_the_round_trip() -> None:
    """What is written is read back equal, and written again gives the same bytes."""
    data = table.write(TABLE)
    assert table.parse(data, "t") == TABLE
    assert table.write(table.parse(data, "t")) == data


def test_rows_and_samples_are_written_in_order() -> None:
    """The same table in another order gives the same bytes."""
    shuffled = replace(
        TABLE,
        models=TABLE.models[::-1],
        shapes=(*TABLE.shapes[:0:-1], replace(TABLE.shapes[0], times=(SPLIT, FAST, COPIED, SLOW))),
    )
    assert table.write(shuffled) == table.write(TABLE)


def test_the_file_has_a_line_per_row() -> None:
    """One line per model and shape; samples name their config by number."""
    lines = table.write(TABLE).decode().splitlines()
    assert '"config_names": ["ws_a","ws_a_split"],' in lines
    assert (
        ' {"element_bytes":2,"layout":"nn","kind":"plain","M":256,"N":512,"K":1024,'
        '"offset_a":0,"offset_b":0,"batch":1,"drawn":false,"held_out":false,'
        '"times":{"config":[0,0,0,1],"split":[1,1,1,4],"pdl":[0,0,1,0],"copies":[0,3,0,0],"ns":[1000,800,900,700]}},'
    ) in lines


def test_weights_are_rounded() -> None:
    """Four digits: equal fits give equal files on every machine."""
    factors = (1 / 3, *(1.0,) * (len(FITTED) - 1))
    network = replace(NETWORK, outputs=(1.23456789,) * SECOND, shift=1e-7 / 3, factors=factors)
    model = replace(MODELS[0], shift=0.123456789, factors=factors, hidden=(-1.23456789,) * HIDDEN)
    found = table.parse(table.write(replace(TABLE, network=network, models=(model,))), "t")
    assert found.network is not None
    assert (found.network.outputs[0], found.network.shift, found.network.factors[0]) == (1.235, 3.333e-8, 0.3333)
    (read,) = found.models
    assert (read.shift, read.factors[0], read.hidden[0]) == (0.1235, 0.3333, -1.235)


def test_a_table_may_have_no_network() -> None:
    """Then launchers go by the formula alone."""
    plain = replace(TABLE, network=None, models=())
    assert table.parse(table.write(plain), "t") == plain


@pytest.mark.parametrize(("name", "like"), [
    ("wide_128x192x64_s4_w8", "wide_128x192x64_s5_w8"),
    ("wide_128x160x64_s5_w8", "wide_128x192x64_s5_w8"),
    ("wide_64x128x64_s9_w4", "wide_64x112x64_s9_w4"),
    ("wide_256x192x64_s5_w8_c2x1", "wide_128x192x64_s5_w8"),
    ("wide_128x192x64_s4_w8_split", None),
    ("tall_128x192x64_s4_w8", None),
    ("ws_b", None),
])  # fmt: skip
def test_a_config_without_a_model_has_that_of_the_nearest_tile(name: str, like: str | None) -> None:
    """Of its family, role, width and sums; sides of the tile weigh most. Without one it has the network's factors."""
    names = ("wide_128x192x64_s5_w8", "wide_64x112x64_s9_w4", "tall_128x192x64_s4_w8_split")
    models = tuple(replace(MODELS[0], config_name=each, shift=float(i)) for i, each in enumerate(names))
    others = tuple(replace(model, element_bytes=1, shift=9.0) for model in models)
    (found,) = replace(TABLE, models=(*MODELS, *models, *others)).models_of([(name, 2, "plain")])
    assert found.config_name == name
    if like is None:
        assert TABLE.network is not None
        assert (found.factors, found.shift, found.hidden) == (TABLE.network.factors, 0.0, (0.0,) * HIDDEN)
    else:
        assert replace(found, config_name=like) == models[names.index(like)]


def test_the_best_sample_of_each_schedule() -> None:
    """Of all splits and launches of a config without copies the fastest counts."""
    assert TABLE.shapes[0].best() == {"ws_a": FAST, "ws_a_split": SPLIT}


def _change(path: tuple[str | int, ...], value: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        spot: Any = body
        for key in path[:-1]:
            spot = spot[key]
        spot[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(("format",), 1), "format 1, this version of aotmm reads 12"),
        (_change(("more",), 1), r"unknown keys \['more'\]"),
        (lambda body: body.pop("seed"), r"missing keys \['seed'\]"),
        (_change(("arch",), "sm70"), "arch: expected one of sm80, .*, found 'sm70'"),
        (_change(("date",), "today"), "date: expected a text like"),
        (_change(("device",), 3), "device: expected a text like"),
        (_change(("device",), 'a"b'), "device: expected a text like"),
        (_change(("device",), "x" * 108), "device: expected a text like"),
        (_change(("multiprocessors",), 0), "multiprocessors: expected an integer from 1 to"),
        (_change(("clock_mhz",), -1), "clock_mhz: expected an integer from 0 to"),
        (lambda body: body.pop("l2_bytes"), r"missing keys \['l2_bytes'\]"),
        (_change(("seed",), 1.5), "seed: expected an integer from 0 to 9007199254740991, found 1.5"),
        (_change(("config_names",), ["ws_a", "ws_a"]), "config_names: 'ws_a' is there 2 times"),
        (_change(("config_names", 0), 'a"b'), r"config_names\[0\]: expected a text like .* found 'a\"b'"),
        (_change(("models",), {}), "models: expected a list"),
        (_change(("models", 0), []), r"models\[0\]: expected an object"),
        (_change(("models", 0, "config_name"), ""), r"models\[0\]: config_name: expected a text"),
        (_change(("models", 0, "element_bytes"), 3), "element_bytes: expected one of 1, 2, 4, found 3"),
        (_change(("models", 0, "element_bytes"), value=True), "element_bytes: expected one of 1, 2, 4, found True"),
        (_change(("models", 0, "shift"), 11), "shift: expected a number from -10.0 to 10.0, found 11"),
        (_change(("models", 0, "shift"), "1"), "shift: expected a number from -10.0 to 10.0, found '1'"),
        (_change(("models", 0, "speed"), 1), r"models\[0\]: unknown keys \['speed'\]"),
        (lambda body: body["models"][1].pop("factors"), r"models\[1\]: unknown keys \[\], missing keys \['factors'\]"),
        (lambda body: body["models"][1].pop("hidden"), r"models\[1\]: unknown keys \[\], missing keys \['hidden'\]"),
        (lambda body: body["models"][0]["factors"].pop(), r"models\[0\]: factors: expected a list of 5, found \[1.0, "),
        (lambda body: body["models"][0]["factors"].append(1), r"models\[0\]: factors: expected a list of 5, found \["),
        (_change(("models", 0, "factors"), 1.0), r"models\[0\]: factors: expected a list of 5, found 1.0"),
        (_change(("models", 0, "factors", 4), 0), r"factors\[4\]: expected a number from 0.001 to 1000.0, found 0"),
        (_change(("models", 0, "factors", 0), -1), r"factors\[0\]: expected a number from 0.001 to 1000.0, found -1"),
        (_change(("models", 0, "factors", 0), 1001), r"factors\[0\]: expected a number from .* to 1000.0, found 1001"),
        (_change(("models", 0, "factors", 0), value=True), r"factors\[0\]: expected a number from .*, found True"),
        (_change(("models", 0, "factors", 0), None), r"factors\[0\]: expected a number from .*, found None"),
        (lambda body: body["models"][0]["hidden"].pop(), rf"\[0\]: hidden: expected a list of {HIDDEN}, found"),
        (lambda body: body["models"][0]["hidden"].append(0), rf"\[0\]: hidden: expected a list of {HIDDEN}, found"),
        (_change(("models", 0, "hidden", 3), -1e7), r"hidden\[3\]: expected a number from -1000000.0 to 1000000.0"),
        (_change(("models", 1, "config_name"), "ws_a"), r"models: \('ws_a', 2, 'plain'\) is there 2 times"),
        (lambda body: body.pop("network"), r"missing keys \['network'\]"),
        (_change(("network",), []), r"network: expected an object, found \[\]"),
        (lambda body: body["network"].pop("bias"), r"network: unknown keys \[\], missing keys \['bias'\]"),
        (lambda body: body["network"]["inputs"].pop(), rf"network: inputs: expected a list of {len(INPUTS)}, found"),
        (_change(("network", "inputs", 3), []), rf"network: inputs\[3\]: expected a list of {HIDDEN}, found"),
        (lambda body: body["network"]["second"].pop(), rf"network: second: expected a list of {HIDDEN}, found"),
        (_change(("network", "second", 3), []), rf"network: second\[3\]: expected a list of {SECOND}, found"),
        (_change(("network", "inputs", 3, 5), 1e7), r"network: inputs\[3\]\[5\]: expected a number from -1000000.0 to"),
        (lambda body: body["network"].pop("factors"), r"network: unknown keys \[\], missing keys \['factors'\]"),
        (lambda body: body["network"]["factors"].pop(), r"network: factors: expected a list of 5, found \["),
        (_change(("network", "factors", 1), 1e-4), r"network: factors\[1\]: expected a number from 0.001 to 1000.0"),
        (_change(("network", "shift"), None), "network: shift: expected a number from -1000000.0 to"),
        (_change(("shapes", 0, "layout"), "any"), "layout: expected one of nn, nt, tn, tt, found 'any'"),
        (_change(("shapes", 0, "kind"), "exact"), "kind: expected one of plain, relaxed, block_scaled, found"),
        (_change(("shapes", 0, "M"), 0), "M: expected an integer from 1 to 9007199254740991, found"),
        (_change(("shapes", 0, "offset_a"), 128), "offset_a: expected an integer from 0 to 127, found 128"),
        (_change(("shapes", 0, "offset_b"), -1), "offset_b: expected an integer from 0 to 127, found -1"),
        (lambda body: body["shapes"][1].update(offset_a=0, offset_b=0), "shapes: .* 256, 512, 1024, 0, 0.* 2 times"),
        (_change(("shapes", 0, "M"), 2**53), "M: expected an integer from 1 to 9007199254740991, found"),
        (lambda body: body["shapes"].append(body["shapes"][0]), "'nn', 'plain', 256, 512, 1024.* is there 2 times"),
        (
            lambda body: body["shapes"][0]["times"]["ns"].pop(),
            r"shapes\[0\]: times: columns of different lengths: 4, 4, 4, 4, 3",
        ),
        (lambda body: body["shapes"][0]["times"].pop("ns"), r"times: unknown keys \[\], missing keys \['ns'\]"),
        (
            _change(("shapes", 0, "times", "config", 0), 2),
            r"shapes\[0\]: times: config 2 is unknown, config_names has 2",
        ),
        (
            _change(("shapes", 0, "times", "split", 0), 0),
            r"times: split\[0\]: expected an integer from 1 to .*, found 0",
        ),
        (
            _change(("shapes", 0, "times", "pdl", 0), value=True),
            r"times: pdl\[0\]: expected an integer .* 1, found True",
        ),
        (
            _change(("shapes", 0, "times", "copies", 0), 8),
            r"times: copies\[0\]: expected an integer from 0 to 7, found 8",
        ),
        (_change(("shapes", 0, "times", "ns", 0), 1.5), r"times: ns\[0\]: expected an integer from 1 to .*, found 1.5"),
        (_change(("shapes", 0, "times", "pdl", 0), 1), r"times: \(0, 1, 1, 0\) is there 2 times"),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(change: Callable[[dict[str, Any]], None], message: str) -> None:
    """Every rule of the format, with the spot in the message."""
    body = json.loads(table.write(TABLE))
    change(body)
    with pytest.raises(ArtifactError, match=message) as error:
        table.parse(json.dumps(body).encode(), "here")
    assert str(error.value).startswith("here: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a tuning table"),
        (b"\xff", "not a tuning table"),
        (b"[" * 100_000, "not a tuning table"),
        (b"[]", r"expected an object, found \[\]"),
        (b'{"format": 1, "format": 1}', "a key twice"),
        (b" " * (table.MAX_TABLE_BYTES + 1), "33554433 bytes, a tuning table has at most 33554432"),
        (table.write(TABLE).replace(b"2.25", b"1e999"), "network: shift: expected a number from .* found inf"),
        (table.write(TABLE).replace(b"2.25", b"NaN"), "number NaN is not JSON"),
    ],
)
def test_bytes_that_are_no_table_are_refused(data: bytes, message: str) -> None:
    """Broken JSON, other JSON, numbers that are none, too many bytes."""
    with pytest.raises(ArtifactError, match=message):
        table.parse(data, "here")


def test_reading_a_file(tmp_path: Path) -> None:
    """A file is read; one that is not there is an ArtifactError that says what makes one."""
    path = tmp_path / "sm90.json"
    with pytest.raises(ArtifactError, match="aotmm tune"):
        table.read(path)
    path.write_bytes(table.write(TABLE))
    assert table.read(path) == TABLE


def test_the_shipped_tables_are_canonical() -> None:
    """The tables of this checkout are exactly what `files` writes, in the files of their arch and device.

    Those that are shipped have no drawn products, and the others nothing else.
    """
    drawn = set(table.TABLES.glob("*.drawn.json"))
    found = set(table.TABLES.glob("*.json")) - drawn
    for path in found:
        each = table.read_whole(path)
        assert table.shipped_path(each.arch, each.device) == path
        assert table.files(each, path) == {file: file.read_bytes() for file in (path, table.drawn_path(path))}
    assert {table.drawn_path(path) for path in found} == drawn
    shipped = [each for arch in TARGETS for each in table.shipped(arch)]
    assert sorted(each.device for each in shipped) == sorted(table.read(path).device for path in found)
    assert not any(shape.drawn for each in shipped for shape in each.shapes)


def test_drawn_products_have_a_file_of_their_own(tmp_path: Path) -> None:
    """A fit reads both, and says which is missing; a table without a seed has one file."""
    path, kept = tmp_path / "sm90.json", tuple(shape for shape in TABLE.shapes if not shape.drawn)
    assert 0 < len(kept) < len(TABLE.shapes)
    for file, content in table.files(TABLE, path).items():
        file.write_bytes(content)
    assert table.read(path) == replace(TABLE, shapes=kept)
    assert set(table.read_whole(path).shapes) == set(TABLE.shapes)
    (tmp_path / "sm90.drawn.json").unlink()
    with pytest.raises(ArtifactError, match=r"sm90\.drawn\.json cannot be read"):
        table.read_whole(path)
    alone = replace(TABLE, seed=None, shapes=kept)
    assert list(table.files(alone, path)) == [path]
    path.write_bytes(table.write(alone))
    assert table.read_whole(path) == alone


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "sm90-h200.json"),
        ("NVIDIA H100 80GB HBM3", "sm90-h100-80gb-hbm3.json"),
        ("AMD Instinct MI250X / MI250", "sm90-instinct-mi250x-mi250.json"),
        ("a GPU", "sm90-a-gpu.json"),
    ],
)
def test_tables_are_named_after_their_device(device: str, name: str) -> None:
    """In words that any file system takes."""
    assert table.shipped_path("sm90", device).name == name
