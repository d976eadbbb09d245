"""The shapes to tune and measure, by sweep (`shapes.json`), and the fifth of them that tuning does not see."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotmm.errors import SpecError
from aotmm.problem import LAYOUTS

FILE = Path(__file__).parent / "shapes.json"
_PARTS = 5  # one of them is held out


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A (M, K) @ B (K, N); "n" is row-major, "t" column-major, A's before B's. `name` is its origin."""

    M: int
    N: int
    K: int
    layout: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.M}x{self.N}x{self.K} {self.layout}"

    @property
    def macs(self) -> int:
        """Return the multiply-adds of the product."""
        return self.M * self.N * self.K


@dataclass(frozen=True, slots=True)
class Sweep:
    """Shapes of one kind, in the order in which they are measured."""

    name: str
    about: str
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The content of a file of shapes."""

    held_out_seed: int
    sweeps: tuple[Sweep, ...]

    def sweep(self, name: str) -> Sweep:
        """Return the sweep called `name`. Raises SpecError if there is none."""
        for sweep in self.sweeps:
            if sweep.name == name:
                return sweep
        raise SpecError(f"unknown sweep {name!r}; known: {', '.join(sweep.name for sweep in self.sweeps)}")

    def held_out(self, shape: Shape) -> bool:
        """Return whether tuning must not see `shape`: one shape in five, chosen by its sizes and layout only."""
        digest = hashlib.sha256(f"{self.held_out_seed} {shape}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % _PARTS == 0


def read(path: Path = FILE) -> Shapes:
    """Return the sweeps in the file `path`, by default ours.

    Raises:
        SpecError: the file cannot be read, or an entry is not [M, N, K, layout] or [M, N, K, layout, name].
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return Shapes(
            held_out_seed=int(body["held_out_seed"]),
            sweeps=tuple(
                Sweep(name, str(sweep["about"]), tuple(_shape(entry) for entry in sweep["shapes"]))
                for name, sweep in body["sweeps"].items()
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"{path} is no file of shapes: {type(error).__name__} {error}; aotmm/tune/shapes.json is one"
        ) from error


def _shape(entry: list[Any]) -> Shape:
    M, N, K, layout, *name = entry
    if layout not in LAYOUTS or len(name) > 1 or not all(isinstance(size, int) and size > 0 for size in (M, N, K)):
        raise ValueError(f"found {entry}, wanted [M, N, K, layout] or [M, N, K, layout, name]")
    return Shape(M, N, K, layout, *name)
