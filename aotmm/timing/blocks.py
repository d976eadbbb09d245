"""Products with block scales drawn at random: layers of DeepSeek-V3, which `blocks.json` lists, in fp8.

The classes are:

* layers: a layer on random rows, log-uniform from 4 on, a multiple of 4, because torch and DeepGEMM want scales of rows
  in lines of 16 bytes.
* experts: expert layers as class "experts" of `experts.json` has them, the rows of each expert rounded up to a multiple
  of 128, which is DeepGEMM's contiguous layout.
* cubes: M = N = K, those of the list, once each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
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


def draw(
    known: Layers, models: experts.Experts, seed: int, count: int, *, among: Callable[[Case], bool] = lambda _: True
) -> dict[str, list[Case]]:
    """Return `count` random layers of those `among`, a third as many expert layers, and all cubes, by class.

    Draws go on until there are enough layers, so some must be `among`.
    """
    return {
        "layers": list(itertools.islice(filter(among, draw_layers(known, seed)), count)),
        "experts": [_aligned(case) for case in experts.draw(models, seed, max(1, count // 3))["experts"]],
        "cubes": [_scaled(Shape(size, size, size, "nt", "cube")) for size in known.cubes],
    }


def draw_layers(known: Layers, seed: int) -> Iterator[Case]:
    """Yield random layers without end; the same seed gives the same."""
    numbers = random.Random(f"{seed} layers")  # noqa: S311 - not for secrets
    while True:
        N, K = numbers.choice(known.layers)
        yield _scaled(Shape(between(ROWS, known.most_rows, ROWS, numbers), N, K, "nt", "DeepSeek V3"))


def _scaled(shape: Shape) -> Case:
    return Case(shape, "fp8e4", block_scaled=True)


def _aligned(case: Case) -> Case:
    """Return the case in fp8, with groups of whole multiples of ALIGNMENT."""
    assert case.groups is not None  # noqa: S101 - as `experts.draw` makes them
    sizes = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in case.groups.sizes)
    groups, shape = replace(case.groups, sizes=sizes), replace(case.shape, M=sum(sizes))
    return replace(case, shape=shape, dtype="fp8e4", groups=groups, block_scaled=True)
