"""The tuning table of functions of a user's own on one device: which variant was measured to be the fastest.

Only this module reads or writes the file; reading is strict. A table has one line per measured call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, NamedTuple

from aotmm.errors import ArtifactError
from aotmm.pack.decode import check_format, decode, parse_json, refuse
from aotmm.problem import MAX_SIZES
from aotmm.target import TARGETS

FORMAT = 1
KIND = "functions"
_MAX_BYTES = 8 << 20
_MAX_ROWS = range(1 << 16)
_Text = Annotated[str, ".{1,200}"]
_Size = Annotated[int, range(1 - 2**53, 2**53)]


class Time(NamedTuple):
    """Median time of a kernel, in ns per launch."""

    kernel: str
    ns: Annotated[int, range(1, 2**53)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One call and its times.

    Attributes:
        function: its name. first: the kernel that serves such calls without a table, the first that fits.
        sizes: values of the kernel's `sizes`, in their order.
        times: of `first` and of the others that fit.
    """

    function: str
    first: str
    sizes: Annotated[tuple[_Size, ...], range(MAX_SIZES + 1)]
    times: tuple[Time, ...]

    @property
    def chosen(self) -> str:
        """Return the fastest kernel; of equally fast ones the first."""
        return min(self.times, key=lambda time: time.ns).kernel


@dataclass(frozen=True, slots=True)
class FunctionTable:
    """One file: place and time of the measurement, and what was measured. `device` is torch's name of the GPU."""

    arch: Annotated[str, tuple(TARGETS)]
    device: _Text
    torch: _Text
    aotmm: _Text
    date: Annotated[str, r"\d{4}-\d{2}-\d{2}"]
    measured: Annotated[tuple[Measured, ...], _MAX_ROWS]


@dataclass(frozen=True, slots=True)
class _File(FunctionTable):
    format: int
    kind: Annotated[str, (KIND,)]


def is_one(path: Path) -> bool:
    """Return whether a file is a table of functions, by the second line that `write` gives it."""
    try:
        with path.open("rb") as handle:
            return f'"kind": "{KIND}"'.encode() in handle.read(100)
    except OSError:
        return False  # who reads it says why it cannot be read


def parse(data: bytes, where: str) -> FunctionTable:
    """Return the table in `data`; `where` names it in errors.

    Raises:
        ArtifactError: too large, not strict JSON, another format version, unknown or missing keys, values of other
            types or out of range, a call without times, or one twice.
    """
    body = parse_json(data, where, "tuning table", _MAX_BYTES)
    check_format(body, FORMAT, where, "tuning table", "make it again: aotmm tune --kernel")
    file = decode(_File, body, where)
    seen: set[tuple[object, ...]] = set()
    problems = []
    for number, row in enumerate(file.measured):
        place, key = f"{where}: measured[{number}]", (row.function, row.first, row.sizes)
        if not row.times:
            problems.append(f"{place}: no times")
        if key in seen:
            problems.append(f"{place}: {row.first} at {list(row.sizes)} is there before")
        seen.add(key)
    refuse(problems)
    return FunctionTable(**{field.name: getattr(file, field.name) for field in fields(FunctionTable)})


def write(table: FunctionTable) -> bytes:
    """Return the canonical bytes of `table`, its rows in order; `parse` returns an equal one."""
    head = {"format": FORMAT, "kind": KIND} | {
        field.name: getattr(table, field.name) for field in fields(FunctionTable) if field.name != "measured"
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    rows = sorted(table.measured, key=lambda row: (row.function, row.first, row.sizes))
    lines.append('"measured": [' + ",".join(f"\n {json.dumps(asdict(row))}" for row in rows) + "\n]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read(path: Path) -> FunctionTable:
    """Return the table in the file `path`. Raises ArtifactError as `parse`, and if it cannot be read."""
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ArtifactError(f"tuning table {path} cannot be read: {error}; make one: aotmm tune --kernel") from error


def joined(old: Sequence[Measured], new: Sequence[Measured]) -> tuple[Measured, ...]:
    """Return the rows of both; where both have a call, the new one's."""
    rows = {(row.function, row.first, row.sizes): row for row in (*old, *new)}
    return tuple(rows.values())
