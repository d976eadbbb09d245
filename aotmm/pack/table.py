"""The tuning table of one device: times that `aotmm tune` measured, and the network that was fitted to them.

Only this module reads or writes the file. Reading is strict: any other content is refused. A table has one line per
model and per shape, so that two tables compare well.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from aotmm.errors import ArtifactError
from aotmm.pack.decode import check_format, decode, parse_json, refuse
from aotmm.pack.schema import KINDS
from aotmm.pack.time_model import FITTED, HIDDEN, LINE_BYTES, Factors, Network, Node, Weight
from aotmm.problem import DEVICE_NAME_BYTES, LAYOUTS
from aotmm.target import TARGETS

TABLES = Path(__file__).parents[1] / "tune" / "tables"
FORMAT = 12
_DRAWN = ".drawn.json"
MAX_TABLE_BYTES = 32 << 20
_MAX_ROWS = range(1 << 20)
_Name = Annotated[str, "[A-Za-z0-9_]{1,120}"]  # launchers hold it as a C string
_Text = Annotated[str, ".{1,200}"]
_Kind = Annotated[str, KINDS]
_ElementBytes = Annotated[int, (1, 2, 4)]
_Positive = Annotated[int, range(1, 2**53)]
_Fact = Annotated[int, range(2**31)]
_Offset = Annotated[int, range(LINE_BYTES)]


# A config's name: family, block_m, block_n, block_k, stages, warps, cluster_m, cluster_n, cluster_k, serial_k, and all
# else. The weights are of the logarithms of its numbers in the distance of two tiles:
# docs/experiments/tuning.md, "Configs without a model".
_TILE = re.compile(r"(\w+)_(\d+)x(\d+)x(\d+)_s(\d+)_w(\d+)(?:_c(\d+)x(\d+)(?:x(\d+))?)?(?:_k(\d+))?(\w*)")
_WEIGHTS = (2.0, 2.0, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0, 1.0)


class Sample(NamedTuple):
    """Median time of one config on one shape, in ns.

    `split` is the number of slices of K, 1 for kernels that do not split. A split product's time includes the
    reduction. `pdl` tells whether it was launched with programmatic dependent launch. `copies` names the matrices that
    are copied, also in the time: 1 for A, 2 for B, 4 for C.
    """

    config_name: str
    split: int
    pdl: bool
    copies: int
    ns: int


@dataclass(frozen=True, slots=True)
class Model:
    """The formula and the network of one config, for elements of `element_bytes` and products of a kind.

    `factors` are those of the constants `time_model.FITTED`; `hidden` is added to the hidden nodes, `shift` to the
    output.
    """

    config_name: _Name
    element_bytes: _ElementBytes
    kind: _Kind
    shift: Annotated[float, (-10.0, 10.0)]
    factors: Factors
    hidden: Annotated[tuple[Weight, ...], Node]

    @property
    def key(self) -> tuple[str, int, str]:
        """Return the config and types that it is for."""
        return self.config_name, *self.types

    @property
    def types(self) -> tuple[int, str]:
        """Return the types that it is for."""
        return self.element_bytes, self.kind


@dataclass(frozen=True, slots=True)
class _Product:
    element_bytes: _ElementBytes
    layout: Annotated[str, LAYOUTS]
    kind: _Kind
    M: _Positive
    N: _Positive
    K: _Positive
    offset_a: _Offset
    offset_b: _Offset
    batch: _Positive = field(default=1, kw_only=True)
    drawn: bool = field(default=False, kw_only=True)
    held_out: bool

    @property
    def product(self) -> tuple[object, ...]:
        """Return all that tells it from other products."""
        kind = self.element_bytes, self.layout, self.kind
        return (*kind, self.M, self.N, self.K, self.offset_a, self.offset_b, self.batch)


@dataclass(frozen=True, slots=True)
class ShapeTimes(_Product):
    """One measured product and its times.

    `kind` is one of `schema.KINDS`. `offset_a` and `offset_b` are bytes from a 128-byte line of memory to the first
    element of A and of B. `batch` is the number of products. `drawn` ones are random, so launchers do not keep their
    times. `held_out` ones, all of them drawn, test the fit, which has none.
    """

    times: tuple[Sample, ...]

    def best(self) -> dict[str, Sample]:
        """Return the fastest sample without copies of each config, by config."""
        ranked = sorted((sample for sample in self.times if not sample.copies), key=lambda sample: (sample.ns, sample))
        return {sample.config_name: sample for sample in reversed(ranked)}


@dataclass(frozen=True, slots=True)
class _Origin:
    arch: Annotated[str, tuple(TARGETS)]
    device: Annotated[str, f"[A-Za-z0-9 ._()/+-]{{1,{DEVICE_NAME_BYTES - 1}}}"]  # likewise
    multiprocessors: Annotated[int, range(1, 2**31)]
    clock_mhz: _Fact
    memory_gbps: _Fact
    l2_bytes: _Fact
    driver: _Text
    torch: _Text
    aotmm: _Text
    date: Annotated[str, r"\d{4}-\d{2}-\d{2}"]
    seed: int | None
    network: Network | None
    models: Annotated[tuple[Model, ...], _MAX_ROWS]


@dataclass(frozen=True, slots=True)
class Table(_Origin):
    """One file: place and time of the measurement, the models, and the measured shapes.

    `device` is the driver's name, and the facts are its: the clock of the multiprocessors (MHz), the bandwidth of the
    memory (10^9 bytes per second), the L2 cache (bytes); 0 for unknown. `date` is YYYY-MM-DD; `seed` is that of the
    drawn products, None if there are none.
    """

    shapes: tuple[ShapeTimes, ...]

    def models_of(self, keys: Iterable[tuple[str, int, str]]) -> list[Model]:
        """Return the models of configs, as `Model.key` names them.

        One without has that of the nearest tile of its family and types, else the factors of `network` alone.
        """
        found = {model.key: model for model in self.models}
        tiles = [(tile, model) for model in self.models if (tile := _TILE.fullmatch(model.config_name))]
        factors = (1.0,) * len(FITTED) if self.network is None else self.network.factors
        return [found.get(key) or _nearest(key, tiles) or Model(*key, 0.0, factors, (0.0,) * HIDDEN) for key in keys]


def _nearest(key: tuple[str, int, str], tiles: Iterable[tuple[re.Match[str], Model]]) -> Model | None:
    """Return the model of the nearest tile that differs from a config in its numbers alone, under the config's name."""
    tile = _TILE.fullmatch(key[0])
    if tile is None:
        return None
    near = [
        (_distance(tile, other), model.config_name, model)
        for other, model in tiles
        if model.types == key[1:] and _alike(tile, other)
    ]
    return replace(min(near)[2], config_name=key[0]) if near else None


def _alike(one: re.Match[str], other: re.Match[str]) -> bool:
    """Return whether two tiles are of one family, with the same access and role."""
    return (one[1], one[len(_WEIGHTS) + 2]) == (other[1], other[len(_WEIGHTS) + 2])


def _distance(one: re.Match[str], other: re.Match[str]) -> float:
    """Return how far the numbers of two tiles are apart."""
    pairs = zip(_WEIGHTS, one.groups("1")[1:-1], other.groups("1")[1:-1], strict=True)
    return sum(weight * abs(math.log2(max(1, int(x)) / max(1, int(y)))) for weight, x, y in pairs)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The samples of a shape in the file, by field: as rows they would take a third more room in a wheel.

    A sample's config is an index into the file's `config_names`.
    """

    config: tuple[int, ...]
    split: tuple[_Positive, ...]
    pdl: tuple[Annotated[int, range(2)], ...]
    copies: tuple[Annotated[int, range(8)], ...]
    ns: tuple[_Positive, ...]

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Return the columns in the order of a sample's fields."""
        return self.config, self.split, self.pdl, self.copies, self.ns


@dataclass(frozen=True, slots=True)
class _Columned(_Product):
    """A shape in the file."""

    times: _Columns


@dataclass(frozen=True, slots=True)
class _File(_Origin):
    """A table as the file has it."""

    format: int
    config_names: tuple[_Name, ...]
    shapes: Annotated[tuple[_Columned, ...], _MAX_ROWS]


def shipped(arch: str) -> tuple[Table, ...]:
    """Return the tables of `arch` in this installation, ordered by file, as `read`."""
    return tuple(read(path) for path in sorted(TABLES.glob(f"{arch}-*.json")) if not is_drawn(path))


def shipped_path(arch: str, device: str) -> Path:
    """Return the path of the table of `arch` for `device` in this installation; it need not exist."""
    words = re.sub(r"^(nvidia|amd) |[^a-z0-9]+", lambda found: "" if found[1] else "-", device.lower()).strip("-")
    return TABLES / f"{arch}-{words}.json"


def drawn_path(path: Path) -> Path:
    """Return the path of the drawn products of the table in `path`, a table without models.

    Only a fit needs them, and they are most of a table: so launchers are built sooner, and wheels do not have them.
    """
    return path.with_name(path.stem + _DRAWN)


def is_drawn(path: Path) -> bool:
    """Return whether a file is named like the drawn products of a table."""
    return path.name.endswith(_DRAWN)


def read_whole(path: Path) -> Table:
    """Return the table in the file `path` with its drawn products. Raises ArtifactError as `read`."""
    found = read(path)
    if found.seed is None:
        return found
    return replace(found, shapes=tuple(sorted(found.shapes + read(drawn_path(path)).shapes, key=_order)))


def files(table: Table, path: Path) -> dict[Path, bytes]:
    """Return the files of `table`, to be written to `path`: those of `read_whole`."""
    kept, drawn = (tuple(shape for shape in table.shapes if shape.drawn == which) for which in (False, True))
    found = {path: write(replace(table, shapes=kept))}
    if table.seed is not None:
        found[drawn_path(path)] = write(replace(table, network=None, models=(), shapes=drawn))
    return found


def read(path: str | Path) -> Table:
    """Return the table in the file `path`, without its drawn products.

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
    body = parse_json(data, where, "tuning table", MAX_TABLE_BYTES)
    check_format(body, FORMAT, where, "tuning table", "make it again: aotmm tune")
    file = decode(_File, body, where)
    names = file.config_names
    problems = [
        *_repeated(names, f"{where}: config_names"),
        *_repeated([model.key for model in file.models], f"{where}: models"),
        *_repeated([shape.product for shape in file.shapes], f"{where}: shapes"),
    ]
    for index, shape in enumerate(file.shapes):
        place = f"{where}: shapes[{index}]: times"
        columns = shape.times.columns
        if len(set(map(len, columns))) > 1:
            problems.append(f"{place}: columns of different lengths: {', '.join(str(len(each)) for each in columns)}")
        problems += _repeated(list(zip(*columns[:-1], strict=False)), place)
        unknown = sorted({config for config in shape.times.config if config >= len(names)})
        problems += [f"{place}: config {config} is unknown, config_names has {len(names)}" for config in unknown]
    refuse(problems)
    return Table(
        **{name: getattr(file, name) for name in _names(_Origin)},
        shapes=tuple(
            ShapeTimes(
                **{name: getattr(shape, name) for name in _names(_Product)},
                times=tuple(
                    Sample(names[config], split, bool(pdl), copies, ns)
                    for config, split, pdl, copies, ns in zip(*shape.times.columns, strict=True)
                ),
            )
            for shape in file.shapes
        ),
    )


def write(table: Table) -> bytes:
    """Return the canonical bytes of `table`; `parse` returns an equal one if its rows are in order and not too precise.

    Rows are sorted. Weights are rounded to four digits, which is more than any measurement has.
    """
    config_names = sorted({sample.config_name for shape in table.shapes for sample in shape.times})
    number = {name: index for index, name in enumerate(config_names)}
    models = [
        _rounded(asdict(row))
        for row in sorted(table.models, key=lambda row: (row.element_bytes, row.kind, row.config_name))
    ]
    shapes = [
        {name: getattr(shape, name) for name in _names(ShapeTimes)} | {"times": _columns(shape.times, number)}
        for shape in sorted(table.shapes, key=_order)
    ]
    head: dict[str, object] = {name: getattr(table, name) for name in _names(Table) if name not in {"models", "shapes"}}
    head["network"] = None if table.network is None else _rounded(asdict(table.network))
    lines = [
        f'"{name}": {_line(value)}' for name, value in {"format": FORMAT, **head, "config_names": config_names}.items()
    ]
    for name, rows in (("models", models), ("shapes", shapes)):
        lines.append(f'"{name}": [' + ",".join(f"\n {_line(row)}" for row in rows) + "\n]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _columns(times: Iterable[Sample], number: Mapping[str, int]) -> dict[str, list[int]]:
    """Return samples as the file has them; `number` has the index of each config."""
    rows = [(number[sample.config_name], *map(int, sample[1:])) for sample in sorted(times)]
    return {name: [row[i] for row in rows] for i, name in enumerate(_names(_Columns))}


def _order(s: ShapeTimes) -> tuple[object, ...]:
    return s.element_bytes, s.kind, s.layout, s.batch, s.M, s.N, s.K, s.offset_a, s.offset_b


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _rounded(value: Any) -> Any:
    """Return a value of JSON with all its floats rounded."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _repeated(items: Sequence[object], where: str) -> list[str]:
    if len(set(items)) == len(items):
        return []
    return [f"{where}: {item!r} is there {count} times" for item, count in Counter(items).items() if count > 1]
