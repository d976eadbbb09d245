"""Config sets of tests, as the texts of their TOML files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = str | int | bool | Sequence[str]


def config_set(*entries: str, **defaults: Value) -> str:
    """A config set of `entries`, with the fields `defaults` for all of them."""
    return _lines(defaults | {"source": "tests"}) + "".join(f"\n[[config]]\n{entry}" for entry in entries)


def tile(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int, **fields: Value) -> str:
    """An entry of one tile, with other fields of it by their names."""
    sizes = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    return _lines(fields | sizes | {"num_stages": num_stages, "num_warps": num_warps})


def _lines(fields: Mapping[str, Value]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())  # JSON's words are TOML's
