"""Tables of functions: written and read again, strictly; their rows joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotmm.errors import ArtifactError
from aotmm.pack.function_table import FunctionTable, Measured, Time, is_one, joined, parse, read, write

ROW = Measured("f", "f_a", (1024, -3), (Time("f_a", 900), Time("f_b", 700), Time("f_c", 700)))
TABLE = FunctionTable("sm90", "NVIDIA H100", "2.13.0", "0.1.0", "2026-11-25", (ROW, Measured("g", "g", (), ROW.times)))


def test_round_trip(tmp_path: Path) -> None:
    """A table is read as it was written, a line for each call, and told from one of products."""
    path = tmp_path / "table.json"
    path.write_bytes(write(TABLE))
    assert read(path) == TABLE
    assert len(path.read_text().splitlines()) == 13
    assert is_one(path)
    path.write_text('{"format": 9}')
    assert not is_one(path)
    assert not is_one(tmp_path / "none")
    assert ROW.chosen == "f_b"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": 2}, "tuning table format 2, this version of aotmm reads 1; make it again: aotmm tune --kernel"),
        ({"kind": "products"}, "kind: expected one of functions, found 'products'"),
        ({"arch": "sm70"}, "arch: expected one of"),
        ({"more": 1}, r"unknown keys \['more'\]"),
        ({"measured": [["f"]]}, r"measured\[0\]: expected an object"),
    ],
)
def test_refused(changed: dict[str, Any], words: str) -> None:
    """Anything else is refused with its place."""
    with pytest.raises(ArtifactError, match=words):
        parse(json.dumps(json.loads(write(TABLE)) | changed).encode(), "t.json")


def test_rows() -> None:
    """A call has times, and is there once; in a join the new one counts."""
    twice = r"measured\[1\]: f_a at \[1024, -3\] is there before"
    for rows, words in (((ROW, ROW), twice), ((Measured("f", "f", (), ()),), "no times")):
        with pytest.raises(ArtifactError, match=words):
            parse(write(FunctionTable(*("sm90", "H100", "2", "0", "2026-11-25"), rows)), "t.json")
    again = Measured("f", "f_a", (1024, -3), (Time("f_a", 1),))
    assert joined(TABLE.measured, [again]) == (again, TABLE.measured[1])


def test_missing(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(ArtifactError, match=r"tuning table .*none\.json cannot be read.*aotmm tune --kernel"):
        read(tmp_path / "none.json")
