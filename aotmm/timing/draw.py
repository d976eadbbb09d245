"""Problems drawn at random: `distribution.json` states the distribution.

The sizes of a class are of one or several kinds, each as likely as the others:

* layer: M is a number of tokens, any integer of the range; N and K are a layer's; the layout is nt if the class has it.
* gradient: of a layer's weight: M and N are the layer's, K is a number of tokens, any integer of the range.
* free: M, N and K are multiples of the class's step in the range. odd: the same, at least one of them odd.
* square: M = N = K, a multiple of the step in the range.
* scores, values: the two products of attention heads of 64 or 128 elements: K is that, in layout nt, or N is, in nn, if
  the class has that layout.
* few_rows: M is 1 to 16, and rows of A are contiguous.
* long: K is up to 500,000, and M or N is 1 to 31. tall: M is up to 1,000,000, and K up to 128.

A batch has 2 to `most_batch` products, log-uniform. It, a long and a tall product have 2^28 elements at most in A, B
and C together.
A size is log-uniform: a real number whose logarithm is uniform, rounded to a multiple of the step. Layers, layouts,
types and offsets are uniform. If offsets other than 0 are listed, at least one operand has one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from aotmm.errors import SpecError
from aotmm.pack.decode import decode, parse_json
from aotmm.problem import DTYPES, LAYOUTS
from aotmm.timing.problems import Case, Shape

FILE = Path(__file__).parent / "distribution.json"
_MAX_BYTES = 1 << 20
_Size = Annotated[int, range(1, 2**31)]
_KINDS = ("layer", "gradient", "free", "odd", "square", "few_rows", "scores", "values", "long", "tall")
_LAYOUT = {"layer": "nt", "scores": "nt", "values": "nn", "long": "nt"}  # of these kinds, in classes that have it
_HEADS, _FEW_ROWS = (64, 128), 16
_THIN, _LONG_K, _TALL_M, _SHORT_K = 31, 500_000, 1_000_000, 128
_MOST_ELEMENTS = 2**28  # of a batch, and of a long or tall product


@dataclass(frozen=True, slots=True)
class Class:
    """One class of problems.

    Attributes:
        apart: reported apart, and not part of the figure over all classes.
        share: of the problems of a run. Those of the classes that are not apart add up to 1.
        sizes: kinds of sizes. least, most, step: of the sizes that are drawn.
        offsets: bytes from a 128-byte line of memory to the first element of A and of B.
        most_batch: products of one problem; it is no batch if this is 1.
        bias: whether a bias vector is added.
    """

    name: str
    about: str
    apart: bool
    share: float
    sizes: Annotated[tuple[Annotated[str, _KINDS], ...], range(1, len(_KINDS) + 1)]
    least: _Size
    most: _Size
    step: _Size
    layouts: tuple[Annotated[str, LAYOUTS], ...]
    dtypes: tuple[Annotated[str, tuple(DTYPES)], ...]
    fast_accum: bool
    offsets: tuple[int, ...]
    most_batch: _Size
    bias: bool


class Layer(NamedTuple):
    """Outputs, inputs and name of a layer of a model."""

    N: int
    K: int
    name: str


@dataclass(frozen=True, slots=True)
class Distribution:
    """The content of `distribution.json`."""

    about: str
    layers: tuple[Layer, ...]
    classes: tuple[Class, ...]


def distribution(path: Path = FILE) -> Distribution:
    """Return the distribution in the file `path`, by default ours. Raises ArtifactError if it is none."""
    return decode(Distribution, parse_json(path.read_bytes(), str(path), "distribution", _MAX_BYTES), str(path))


def draw(
    known: Distribution,
    seed: int,
    count: int,
    classes: Collection[str] = (),
    *,
    among: Callable[[Case], bool] = lambda _: True,
) -> dict[str, list[Case]]:
    """Return random problems by class; the same seed gives the same.

    A class has `count` times its share of problems, rounded up. Those of a smaller count are the first of a larger one,
    and do not depend on the other classes.

    Args:
        classes: their names; all if empty.
        among: whether a problem may be drawn; by default every one. Each class needs one at least: draws go on until
            there are enough.

    Raises:
        SpecError: a name is unknown.
    """
    names = [each.name for each in known.classes]
    unknown = [name for name in classes if name not in names]
    if unknown:
        raise SpecError(f"unknown class {', '.join(unknown)}; known: {', '.join(names)}")
    found = {}
    for each in known.classes:
        if not classes or each.name in classes:
            numbers = random.Random(f"{seed} {each.name}")  # noqa: S311 - not for secrets
            drawn = (_case(each, known, numbers) for _ in itertools.count())
            found[each.name] = list(itertools.islice(filter(among, drawn), math.ceil(count * each.share)))
    return found


def _case(each: Class, known: Distribution, numbers: random.Random) -> Case:
    layout, dtype = numbers.choice(each.layouts), numbers.choice(each.dtypes)
    offset_a, offset_b = numbers.choice(each.offsets), numbers.choice(each.offsets)
    while any(each.offsets) and not (offset_a or offset_b):
        offset_a, offset_b = numbers.choice(each.offsets), numbers.choice(each.offsets)
    kind = numbers.choice(each.sizes)
    if kind == "few_rows":
        layout = "n" + layout[1]
    elif _LAYOUT.get(kind) in each.layouts:
        layout = _LAYOUT[kind]
    shape = Shape(*_sizes(kind, each, known, numbers), layout)
    activation = "none" if each.bias else None  # behind a bias
    case = Case(shape, dtype, activation, fast_accum=each.fast_accum, offset_a=offset_a, offset_b=offset_b)
    if each.most_batch > 1:
        case = replace(case, batch=between(2, each.most_batch, 1, numbers))
    elif kind not in ("long", "tall"):
        return case
    M, N, K = case.shape.M, case.shape.N, case.shape.K
    return case if case.batch * (M * K + K * N + M * N) <= _MOST_ELEMENTS else _case(each, known, numbers)


def _sizes(kind: str, each: Class, known: Distribution, numbers: random.Random) -> tuple[int, int, int]:
    """Return M, N, K."""
    if kind == "square":
        side = _size(each, each.step, numbers)
        return side, side, side
    if kind in ("layer", "gradient"):
        N, K, _ = numbers.choice(known.layers)
        tokens = _size(each, 1, numbers)
        return (tokens, N, K) if kind == "layer" else (N, K, tokens)
    M, N, K = (_size(each, each.step, numbers) for _ in range(3))
    if kind == "few_rows":
        return between(1, _FEW_ROWS, 1, numbers), N, K
    if kind in ("scores", "values"):
        head = numbers.choice(_HEADS)
        return (M, N, head) if kind == "scores" else (M, head, K)
    if kind in ("long", "tall"):
        return _thin(kind, M, N, each, numbers)
    while kind == "odd" and not (M % 2 or N % 2 or K % 2):
        M, N, K = (_size(each, each.step, numbers) for _ in range(3))
    return M, N, K


def _thin(kind: str, M: int, N: int, each: Class, numbers: random.Random) -> tuple[int, int, int]:
    """Return M, N, K of a long or a tall product; M and N are those of a free one."""
    if kind == "tall":
        tall = between(each.least, _TALL_M, each.step, numbers)
        return tall, N, between(each.step, _SHORT_K, each.step, numbers)
    few, K = between(1, _THIN, 1, numbers), between(each.least, _LONG_K, each.step, numbers)
    return numbers.choice(((few, N, K), (M, few, K)))


def _size(each: Class, step: int, numbers: random.Random) -> int:
    """Return a log-uniform multiple of `step` in the range of the class."""
    return between(each.least, each.most, step, numbers)


def between(least: int, most: int, step: int, numbers: random.Random) -> int:
    """Return a log-uniform multiple of `step` in a range."""
    size = math.exp(numbers.uniform(math.log(least), math.log(most)))
    return min(max(round(size / step), math.ceil(least / step)), most // step) * step
