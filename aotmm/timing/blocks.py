"""Products with block scales drawn at random: layers of DeepSeek-V3, which `blocks.json` lists, in fp8.

The classes are:

* layers: a layer on random rows, log-uniform from 4 on, a multiple of 4, because torch and DeepGEMM want scales of rows
  in lines of 16 bytes.
* experts: expert layers as class "experts" of `experts.json` has them, the rows of each expert rounded up to a multiple
  of 128, which is DeepGEMM's contiguous layout.
* cubes: M = N = K, those of the list, once each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from aotmm.pack.decode import decode, parse_json
from aotmm.timing import experts
from aotmm.timing.draw import between
from aotmm.timing.problems import Case, Shape

FILE = Path(__file__).parent / "blocks.json"
ROWS = 4  # M of a layer is a multiple
ALIGNMENT = 128  # rows at which groups begin
_MAX_BYTES = 1 << 20
_Size = Annotated[int, range(1, 2**31)]


@dataclass(frozen=True, slots=True)
class Layers:
    """The content of `blocks.json`: (N, K) of layers, and sizes of cubes."""

    about: str
    most_rows: _Size
    layers: Annotated[tuple[tuple[_Size, _Size], ...], range(1, 1000)]
    cubes: Annotated[tuple[_Size, ...], range(1, 1000)]


def layers(path: Path = FILE) -> Layers:
    """Return the layers in the file `path`, by default ours. Raises ArtifactError if it is none."""
    return decode(Layers, parse_json(path.read_bytes(), str(path), "list of layers", _MAX_BYTES), str(path))


def draw(known: Layers, models: experts.Experts, seed: int, count: int) -> dict[str, list[Case]]:
    """Return `count` random layers, a third as many expert layers, and all cubes, by class."""
    numbers = random.Random(f"{seed} layers")  # noqa: S311 - not for secrets
    found = []
    for _ in range(count):
        N, K = numbers.choice(known.layers)
        M = between(ROWS, known.most_rows, ROWS, numbers)
        found.append(Case(Shape(M, N, K, "nt", "DeepSeek V3"), "fp8e4"))
    return {
        "layers": found,
        "experts": [_aligned(case) for case in experts.draw(models, seed, max(1, count // 3))["experts"]],
        "cubes": [Case(Shape(size, size, size, "nt", "cube"), "fp8e4") for size in known.cubes],
    }


def _aligned(case: Case) -> Case:
    """Return the case in fp8, with groups of whole multiples of ALIGNMENT."""
    assert case.groups is not None  # noqa: S101 - as `experts.draw` makes them
    sizes = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in case.groups.sizes)
    groups, shape = replace(case.groups, sizes=sizes), replace(case.shape, M=sum(sizes))
    return replace(case, shape=shape, dtype="fp8e4", groups=groups)
