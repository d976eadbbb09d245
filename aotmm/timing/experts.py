"""Grouped products drawn at random: layers of mixtures of experts, of the models that `experts.json` lists.

A layer is gate and up in one, with 2 * intermediate outputs, or down. Weights are stored (groups, N, K), in bf16 or
fp8.
The rows of all experts together are log-uniform. They are routed in one of three ways, each as likely as the others:

* uniform: each row goes to any expert.
* zipf: the most popular expert gets twice as many rows as the second, three times as many as the third, and so on.
* one: all rows go to one expert.

The classes are:

* experts: a layer, layout nt.
* few: a layer of which each expert has 1 to `most_few` rows, any number as likely as the others.
* activations: gradients of a layer's rows, which are rows in groups with the weights in the other layout, nn.
* weights: gradients of its weights, sums over each expert's rows: K in groups, layout tn.
* fp8: a layer in fp8 e4m3 with a scale for each row of A, and each column of B in each group; fp8 fast: likewise, by
  fast sums.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from aotmm.pack.decode import decode, parse_json
from aotmm.timing.draw import between
from aotmm.timing.problems import Case, Groups, Shape

FILE = Path(__file__).parent / "experts.json"
ROUTINGS = ("uniform", "zipf", "one")
# Of the problems of a run, by class.
SHARES = {"experts": 1.0, "few": 1 / 3, "activations": 1 / 3, "weights": 1 / 3, "fp8": 1 / 3, "fp8 fast": 1 / 3}
_MAX_BYTES = 1 << 20
_Size = Annotated[int, range(1, 2**31)]


class Model(NamedTuple):
    """A model's name, its number of experts, and the sizes of each."""

    name: str
    experts: Annotated[int, range(2, 2**31)]
    hidden: _Size
    intermediate: _Size


@dataclass(frozen=True, slots=True)
class Experts:
    """The content of `experts.json`."""

    about: str
    least_rows: _Size
    most_rows: _Size
    most_few: _Size
    models: Annotated[tuple[Model, ...], range(1, 1000)]


def experts(path: Path = FILE) -> Experts:
    """Return the models in the file `path`, by default ours. Raises ArtifactError if it is none."""
    return decode(Experts, parse_json(path.read_bytes(), str(path), "list of experts", _MAX_BYTES), str(path))


def draw(known: Experts, seed: int, count: int) -> dict[str, list[Case]]:
    """Return random problems by class; the same seed gives the same.

    A class has `count` times its share of problems, rounded up. Those of a smaller count are the first of a larger one.
    """
    found = {}
    for name, share in SHARES.items():
        numbers = random.Random(f"{seed} {name}")  # noqa: S311 - not for secrets
        found[name] = [_case(name, known, numbers) for _ in range(math.ceil(count * share))]
    return found


def _case(name: str, known: Experts, numbers: random.Random) -> Case:
    model, part = numbers.choice(known.models), numbers.choice(("up", "down"))
    N, K = (2 * model.intermediate, model.hidden) if part == "up" else (model.hidden, model.intermediate)
    if name == "few":
        routing = f"1 to {known.most_few} each"
        sizes = tuple(numbers.randint(1, known.most_few) for _ in range(model.experts))
    else:
        routing = numbers.choice(ROUTINGS)
        sizes = routed(routing, model.experts, between(known.least_rows, known.most_rows, 1, numbers), numbers)
    rows = sum(sizes)
    shapes = {"activations": (rows, K, N, "nn"), "weights": (N, K, rows, "tn")}
    shape = Shape(*shapes.get(name, (rows, N, K, "nt")), f"{model.name} {part}")
    groups = Groups("K" if name == "weights" else "M", routing, sizes)
    return Case(shape, "fp8e4" if name.startswith("fp8") else "bf16", fast_accum=name == "fp8 fast", groups=groups)


def routed(routing: str, count: int, rows: int, numbers: random.Random) -> tuple[int, ...]:
    """Return how many of `rows` each of `count` experts gets; which ones are popular is random, too."""
    order = numbers.sample(range(count), count)
    popularity = {
        "uniform": [1.0] * count,
        "zipf": [1 / rank for rank in range(1, count + 1)],
        "one": [1.0] + [0.0] * (count - 1),
    }
    found = Counter(numbers.choices(order, popularity[routing], k=rows))
    return tuple(found[expert] for expert in range(count))
