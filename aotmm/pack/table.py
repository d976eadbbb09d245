"""The tuning table of one arch: times that `aotmm tune` measured, and the constants of the time model fitted to them.

Only this module reads or writes the file. Reading is strict: any other content is refused. A table has one line per
model and per shape, so that two tables compare well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from aotmm.errors import ArtifactError
from aotmm.problem import LAYOUTS, SPLITS
from aotmm.target import TARGETS

FORMAT = 3
MAX_TABLE_BYTES = 32 << 20
MIN_M = (1, 33, 257)  # a model is for C of at least so many rows, up to the next one's
_WIDTHS = (1, 2, 4)
_MAX_INT = 2**53
_NAME = r"[A-Za-z0-9_]{1,120}"  # launchers hold it as a C string
_DATE = r"\d{4}-\d{2}-\d{2}"
_SAMPLE_FIELDS = 5
_CONSTANTS = ("base_ns", "ns_per_k_step", "ns_per_tile", "ns_per_byte", "ns_per_loaded_byte")
_MAX_COPIES = 8


class Sample(NamedTuple):
    """Median time of one config on one shape, in ns.

        `split` is the number of slices of K, 1 for kernels that do not split. A split product's time includes the
    reduction. `pdl` tells whether it was launched with programmatic dependent launch. `copies` names the matrices that
    are copied to aligned places, also in the time: 1 for A, 2 for B, 4 for C.
    """

    config_name: str
    split: int
    pdl: bool
    copies: int
    ns: int


@dataclass(frozen=True, slots=True)
class Model:
    """Constants of the time of one config for elements of `element_bytes` and an M of at least `min_m`.

    The formula is in `templates/launcher.h.jinja`. Reduces and copies have `base_ns` and `ns_per_byte` only.
    """

    config_name: str
    element_bytes: int
    fast_accum: bool
    min_m: int
    base_ns: float
    ns_per_k_step: float
    ns_per_tile: float
    ns_per_byte: float
    ns_per_loaded_byte: float

    @property
    def key(self) -> tuple[str, int, bool, int]:
        """Return the config, types and rows that it is for."""
        return self.config_name, self.element_bytes, self.fast_accum, self.min_m


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """One measured shape and its times; `held_out` shapes test the models and are not fitted."""

    element_bytes: int
    layout: str
    fast_accum: bool
    M: int
    N: int
    K: int
    held_out: bool
    times: tuple[Sample, ...]

    def best(self) -> dict[str, Sample]:
        """Return the fastest sample without copies of each config, by config."""
        ranked = sorted((sample for sample in self.times if not sample.copies), key=lambda sample: (sample.ns, sample))
        return {sample.config_name: sample for sample in reversed(ranked)}


@dataclass(frozen=True, slots=True)
class Table:
    """One file: place and time of the measurement, the models, and the measured shapes.

    `date` is YYYY-MM-DD; `seed` is that of the held-out split.
    """

    arch: str
    device: str
    driver: str
    torch: str
    aotmm: str
    date: str
    seed: int
    models: tuple[Model, ...]
    shapes: tuple[ShapeTimes, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured part of a table as launchers hold it: `aotmm_shape` and `aotmm_time` of launcher.h, field by field.

    Attributes:
        configs: names, in order.
        shapes: M, N, K, element_bytes, fast_accum, layout (its number), in the launcher's order.
        times: by shape and config: ns, split, pdl of the best; zeros where there is none.
    """

    config_names: list[str]
    shapes: list[tuple[int, ...]]
    times: list[list[tuple[int, ...]]]


def measured(table: Table, config_names: Collection[str]) -> Measured:
    """Return the part of `table` that selection uses, for those of `config_names` that it knows."""
    rows = []
    for shape in sorted(
        table.shapes, key=lambda s: (s.element_bytes, s.fast_accum, LAYOUTS.index(s.layout), s.M, s.N, s.K)
    ):
        best = {
            name: (sample.ns, sample.split, int(sample.pdl))
            for name, sample in shape.best().items()
            if name in config_names and sample.split in (1, *SPLITS)
        }
        if best:
            layout = LAYOUTS.index(shape.layout)
            rows.append(((shape.M, shape.N, shape.K, shape.element_bytes, int(shape.fast_accum), layout), best))
    names = sorted({name for _, best in rows for name in best})
    return Measured(
        names, [key for key, _ in rows], [[best.get(name, (0, 0, 0)) for name in names] for _, best in rows]
    )


def shipped(arch: str) -> Table | None:
    """Return the table of `arch` in this installation, if there is one. Raises ArtifactError as `read`."""
    path = shipped_path(arch)
    return read(path) if path.exists() else None


def shipped_path(arch: str) -> Path:
    """Return the path of the table of `arch` in this installation; it need not exist."""
    return Path(__file__).parents[1] / "tune" / "tables" / f"{arch}.json"


def read(path: str | Path) -> Table:
    """Return the table in the file `path`.

    Raises:
        ArtifactError: it cannot be read, or is refused as `parse` refuses it.
    """
    try:
        with Path(path).open("rb") as handle:
            data = handle.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"tuning table {path} cannot be read: {error}; make one: aotmm tune") from error
    return parse(data, str(path))


def parse(data: bytes, where: str) -> Table:
    """Return the table in `data`; `where` names it in errors.

    Raises:
        ArtifactError: too large, not strict JSON, another format version, unknown or missing keys, values of other
            types or out of range, or the same model, shape or sample twice.
    """
    if len(data) > MAX_TABLE_BYTES:
        raise ArtifactError(f"{where}: more than {MAX_TABLE_BYTES} bytes, which no tuning table has")
    try:
        body = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not a tuning table: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise ArtifactError(
            f"{where}: tuning table format {found!r}, this version of aotmm reads {FORMAT}; make it again: aotmm tune"
        )
    _check_keys(body, {"format", "config_names", *_names(Table)}, where)
    config_names = [
        _text(name, _NAME, f"{where}: configs") for name in _list(body["config_names"], f"{where}: configs")
    ]
    _check_unique(config_names, f"{where}: configs")
    models = tuple(
        _model(row, f"{where}: models[{index}]") for index, row in enumerate(_list(body["models"], f"{where}: models"))
    )
    _check_unique([row.key for row in models], f"{where}: models")
    shapes = tuple(
        _shape(row, config_names, f"{where}: shapes[{index}]")
        for index, row in enumerate(_list(body["shapes"], f"{where}: shapes"))
    )
    _check_unique([(s.element_bytes, s.layout, s.fast_accum, s.M, s.N, s.K) for s in shapes], f"{where}: shapes")
    return Table(
        arch=_word(body["arch"], tuple(TARGETS), f"{where}: arch"),
        **{name: _text(body[name], ".{1,200}", f"{where}: {name}") for name in ("device", "driver", "torch", "aotmm")},
        date=_text(body["date"], _DATE, f"{where}: date"),
        seed=_int(body["seed"], 0, f"{where}: seed"),
        models=models,
        shapes=shapes,
    )


def write(table: Table) -> bytes:
    """Return the canonical bytes of `table`; `parse` returns an equal one if its rows are in order and not too precise.

    Rows are sorted. Constants are rounded to five digits, which is more than any measurement has.
    """
    config_names = sorted({sample.config_name for shape in table.shapes for sample in shape.times})
    number = {name: index for index, name in enumerate(config_names)}
    models = [
        {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in asdict(row).items()}
        for row in sorted(table.models, key=lambda row: (row.element_bytes, row.fast_accum, row.config_name, row.min_m))
    ]
    shapes = [
        {name: getattr(shape, name) for name in _names(ShapeTimes)}
        | {"times": [[number[s.config_name], *map(int, s[1:])] for s in sorted(shape.times)]}
        for shape in sorted(table.shapes, key=lambda s: (s.element_bytes, s.fast_accum, s.layout, s.M, s.N, s.K))
    ]
    head: dict[str, object] = {name: getattr(table, name) for name in _names(Table) if name not in {"models", "shapes"}}
    lines = [
        f'"{name}": {_line(value)}' for name, value in {"format": FORMAT, **head, "config_names": config_names}.items()
    ]
    for name, rows in (("models", models), ("shapes", shapes)):
        lines.append(f'"{name}": [' + ",".join(f"\n {_line(row)}" for row in rows) + "\n]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _model(body: object, where: str) -> Model:
    row = _object(body, Model, where)
    return Model(
        config_name=_text(row["config_name"], _NAME, f"{where}: config"),
        element_bytes=_word(row["element_bytes"], _WIDTHS, f"{where}: element_bytes"),
        fast_accum=_bool(row["fast_accum"], f"{where}: fast_accum"),
        min_m=_word(row["min_m"], MIN_M, f"{where}: min_m"),
        **{name: _constant(row[name], f"{where}: {name}") for name in _CONSTANTS},
    )


def _shape(body: object, config_names: list[str], where: str) -> ShapeTimes:
    row = _object(body, ShapeTimes, where)
    times = tuple(
        _sample(item, config_names, f"{where}: times[{index}]")
        for index, item in enumerate(_list(row["times"], f"{where}: times"))
    )
    _check_unique([sample[:-1] for sample in times], f"{where}: times")
    return ShapeTimes(
        element_bytes=_word(row["element_bytes"], _WIDTHS, f"{where}: element_bytes"),
        layout=_word(row["layout"], LAYOUTS, f"{where}: layout"),
        fast_accum=_bool(row["fast_accum"], f"{where}: fast_accum"),
        **{name: _int(row[name], 1, f"{where}: {name}") for name in ("M", "N", "K")},
        held_out=_bool(row["held_out"], f"{where}: held_out"),
        times=times,
    )


def _sample(body: object, config_names: list[str], where: str) -> Sample:
    items = _list(body, where)
    if len(items) != _SAMPLE_FIELDS:
        raise ArtifactError(f"{where}: expected [config, split, pdl, copies, ns], found {items!r}")
    return Sample(
        config_name=config_names[_word(items[0], range(len(config_names)), f"{where}: config")],
        split=_int(items[1], 1, f"{where}: split"),
        pdl=bool(_word(items[2], range(2), f"{where}: pdl")),
        copies=_word(items[3], range(_MAX_COPIES), f"{where}: copies"),
        ns=_int(items[4], 1, f"{where}: ns"),
    )


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(", ", ": "))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError(f"a key twice in {[key for key, _ in pairs]}")
    return body


def _check_keys(body: dict[str, Any], wanted: set[str], where: str) -> None:
    if body.keys() != wanted:
        unknown, missing = sorted(body.keys() - wanted), sorted(wanted - body.keys())
        raise ArtifactError(f"{where}: unknown keys {unknown}, missing keys {missing}")


def _check_unique(items: list[Any], where: str) -> None:
    if len(set(items)) != len(items):
        twice = next(item for item in items if items.count(item) > 1)
        raise ArtifactError(f"{where}: {twice!r} is there twice")


def _object(body: object, kind: type, where: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ArtifactError(f"{where}: expected an object, found {body!r}")
    _check_keys(body, set(_names(kind)), where)
    return body


def _list(body: object, where: str) -> list[Any]:
    if not isinstance(body, list):
        raise ArtifactError(f"{where}: expected a list, found {body!r}")
    return body


def _text(body: object, pattern: str, where: str) -> str:
    if not isinstance(body, str) or not re.fullmatch(pattern, body):
        raise ArtifactError(f"{where}: expected a text like {pattern}, found {body!r}")
    return body


def _word(body: Any, known: Any, where: str) -> Any:
    if type(body) not in {str, int} or body not in known:
        raise ArtifactError(f"{where}: {body!r} is not one of {', '.join(map(str, known))}")
    return body


def _bool(body: object, where: str) -> bool:
    if not isinstance(body, bool):
        raise ArtifactError(f"{where}: expected true or false, found {body!r}")
    return body


def _int(body: object, least: int, where: str) -> int:
    if type(body) is not int or not least <= body < _MAX_INT:
        raise ArtifactError(f"{where}: expected an integer from {least}, found {body!r}")
    return body


def _constant(body: object, where: str) -> float:
    if type(body) not in {int, float} or not math.isfinite(body) or body < 0:  # type: ignore[arg-type, operator]
        raise ArtifactError(f"{where}: expected a number from 0, found {body!r}")
    return float(body)  # type: ignore[arg-type]
