"""The computed part of the default set: candidates and their times (`tiles/`) -> losses -> entries of the config set.

Times are those of the candidates' table: measured ones, and for problems drawn at random those that its network
predicts. The result depends on these files and on the constants of this module and of `choose` alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aotmm.build.products import code_of
from aotmm.build.variants import FOLDER, Entry, config_set, variants
from aotmm.errors import SpecError
from aotmm.kernels import VECTOR_BYTES, Variant, block_guards
from aotmm.pack import table
from aotmm.pack.schema import Config, Kernel
from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.pack.time_model import MOST_WAVES, concurrent_tiles, most_slices
from aotmm.problem import DTYPES, LAYOUTS, SPLITS
from aotmm.target import target
from aotmm.timing.draw import distribution, draw
from aotmm.timing.problems import Case
from aotmm.tune.candidates import LEAST_WAVES
from aotmm.tune.choose import Bounds, ClassLoss, Group, Losses, Pairs, by_class, extend
from aotmm.tune.models import Gpu, predicted, samples

FILE = FOLDER / "default.toml"
TILES = Path(__file__).parent / "tiles"
SWEEPS = Bounds(1.003, 1.02)
RANDOM = Bounds(1.002, 1.015)
SEED, COUNT = 77, 2500  # of the problems drawn

# The classes of products whose candidates were timed: neither batches nor thin ones.
_CLASSES = ("layers", "multiples", "squares", "gradients", "odd", "offsets", "fp8", "fp8_fast")
_TIMED = ("fp16", "fp8e4")  # of the candidates
_MEASURED = 2.0  # weight of a measured problem; of a predicted one 1
_MARKS = "# ---- {} of what `aotmm tune --arch {} --choose` writes"

_Problems = list[tuple[str, ShapeTimes]]  # with their classes


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The candidates: entries of the config set, a kernel of each by group and config, and their times.

    `images` has the config whose kernel has the same image (`products.code_of`), by config.
    """

    entries: tuple[Entry, ...]
    kernels: dict[Group, dict[str, Kernel]]
    images: dict[str, str]
    reduce: Kernel
    times: Table
    gpu: Gpu

    @classmethod
    def read(cls, arch: str) -> _Candidates:
        """Read the candidates of `arch`. Raises SpecError if there are none."""
        known = sorted(path.stem for path in TILES.glob("*.toml"))
        if arch not in known:
            raise SpecError(f"no candidates for {arch} in {TILES}, only for {', '.join(known)}")
        found, times = config_set(str(TILES / f"{arch}.toml")), table.read_whole(TILES / f"{arch}.json")
        wanted = variants(found, target(arch), _TIMED)
        images = {variant.config_name: code_of(variant).config_name for variant in wanted}
        kernels = [_kernel(variant) for variant in wanted]
        products: dict[Group, dict[str, Kernel]] = {}
        for kernel in kernels:
            if kernel.role in ("product", "partial") and kernel.layout != "any":
                group = kernel.layout, *kernel.types
                products.setdefault(group, {})[kernel.config_name] = kernel
        reduce = next(kernel for kernel in kernels if kernel.role == "reduce")
        return cls(found.entries, products, images, reduce, times, Gpu(target(arch), times))

    def name(self, entry: Entry, group: Group) -> str | None:
        """Return the name of an entry's config, None if the entry has no kernel in the group."""
        return next((name for name, kernel in self.kernels[group].items() if _is_of(kernel, entry)), None)


class Chosen(NamedTuple):
    """The computed part of the default set of an arch.

    Attributes:
        text: its entries, as TOML.
        pairs: number of pairs of a tile and a layout.
        images: number of their images, of one type; shapes of a cluster share one.
        losses: by class of problems.
    """

    arch: str
    text: str
    pairs: int
    images: int
    losses: list[ClassLoss]


def choose(arch: str) -> Chosen:
    """Choose the tiles of `arch`.

    Those with every activation and partials come first, so that they count: most random problems need no partial, and
    few rows with a K of many thousands need nothing else. Those with `bias_relu` come last, so that they keep no other
    tile out.

    Raises:
        SpecError: there are no candidates for `arch`. ArtifactError: their times are refused.
    """
    candidates = _Candidates.read(arch)
    random, sweeps = _losses(candidates)
    pairs: Pairs = {group: [] for group in candidates.kernels}
    _add(pairs, candidates, lambda entry: entry.split or "full" in entry.epilogues)
    extend(pairs, sweeps, SWEEPS)
    extend(pairs, random, RANDOM)
    _add(pairs, candidates, lambda entry: "bias_relu" in entry.epilogues)
    text = "\n".join(_entries(pairs, candidates))
    images = sum(len({candidates.images[name] for name in names}) for names in pairs.values())
    return Chosen(arch, text, sum(map(len, pairs.values())), images, by_class(pairs, random, sweeps))


def write(chosen: Chosen, path: Path = FILE) -> None:
    """Replace the computed part of the config set in `path`. Raises SpecError if the file has no marks around it."""
    begin, end = (_MARKS.format(word, chosen.arch) for word in ("Begin", "End"))
    head, has_begin, rest = path.read_text().partition(begin)
    _, has_end, tail = rest.partition(end)
    if not (has_begin and has_end):
        raise SpecError(f"{path} has no lines {begin!r} and {end!r}; set them around the entries to replace")
    path.write_text(f"{head}{begin}\n\n{chosen.text}\n{end}{tail}")


def _add(pairs: Pairs, candidates: _Candidates, wanted: Callable[[Entry], bool]) -> None:
    """Add all tiles that are wanted in any case."""
    for entry in candidates.entries:
        for group, names in pairs.items():
            name = candidates.name(entry, group)
            if wanted(entry) and name is not None and name not in names:
                names.append(name)


def _losses(candidates: _Candidates) -> tuple[dict[Group, Losses], dict[Group, Losses]]:
    """Return the losses on random problems, drawn and measured ones, and on those of the sweeps."""
    drawn = list(_drawn(candidates))
    timed = [("measured" if shape.drawn else "sweeps", shape) for shape in candidates.times.shapes]
    random, sweeps = {}, {}
    for group in candidates.kernels:
        mine = [row for row in timed if _group(row[1]) == group]
        new = [row for row in drawn if _group(row[1]) == group]
        random[group] = _of_group(candidates, group, new, [row for row in mine if row[1].drawn])
        sweeps[group] = _of_group(candidates, group, [], [row for row in mine if not row[1].drawn])
    return random, sweeps


def _of_group(candidates: _Candidates, group: Group, drawn: _Problems, timed: _Problems) -> Losses:
    kernels = candidates.kernels[group]
    parts = []
    for rows, is_drawn in ((drawn, True), (timed, False)):
        shapes, timed_kernels = [shape for _, shape in rows], [*kernels.values(), candidates.reduce]
        found = samples(timed_kernels, candidates.gpu, shapes, shifted=False)  # none of them began early
        least = np.full((len(rows), len(kernels)), np.inf)
        ns = predicted(found, candidates.times) if is_drawn else found.ns
        np.minimum.at(least, (found.product, found.key), ns)
        parts.append(least)
    weight = np.array([1.0] * len(drawn) + [_MEASURED] * len(timed))
    names = sorted(kernels)
    images = [candidates.images[name] for name in names]
    return Losses.of_times(names, images, np.concatenate(parts), weight, [name for name, _ in drawn + timed])


def _drawn(candidates: _Candidates) -> Iterator[tuple[str, ShapeTimes]]:
    """Yield random problems, with the plans of all candidates that were timed and a class each."""
    timed = {model.key for model in candidates.times.models}
    for name, cases in draw(distribution(), SEED, COUNT, _CLASSES).items():
        for case in cases:
            shape, group = case.shape, (case.shape.layout, case.element_bytes, case.kind)
            rows = (
                (shape.K if shape.layout[0] == "n" else shape.M) * case.element_bytes,
                (shape.N if shape.layout[1] == "n" else shape.K) * case.element_bytes,
                shape.N * DTYPES[case.output].bytes,
            )
            if any(row % VECTOR_BYTES for row in rows):  # for other kernels
                continue
            plans = [
                Sample(config_name, split, pdl, copies=0, ns=1)
                for config_name, kernel in candidates.kernels[group].items()
                if (config_name, *group[1:]) in timed
                for split in _splits(kernel, case, candidates.times.multiprocessors)
                for pdl in (False, True)
            ]
            yield name, case.timed(plans, drawn=True)


def _splits(kernel: Kernel, case: Case, multiprocessors: int) -> list[int]:
    if kernel.role == "product":
        return [1]
    config, shape = kernel.config, case.shape
    tiles = math.ceil(shape.M / config.block_m) * math.ceil(shape.N / config.block_n)
    most = most_slices(shape.K, config.block_k)
    at_once = concurrent_tiles(multiprocessors, kernel.num_ctas)
    return [s for s in SPLITS if s <= most and LEAST_WAVES <= tiles * s / at_once <= MOST_WAVES]


def _group(shape: ShapeTimes) -> Group:
    return shape.layout, shape.element_bytes, shape.kind


def _is_of(kernel: Kernel, entry: Entry) -> bool:
    tile = kernel.family, kernel.config, kernel.role == "partial", kernel.fast_accum
    same = tile == (entry.family, Config(**entry.numbers), entry.split, entry.fast_accum)
    return same and kernel.dtype_a in entry.dtypes and kernel.layout in entry.layouts


def _kernel(variant: Variant) -> Kernel:
    """Return what times depend on of a variant's kernel; what a compiler finds out is None."""
    names = [field.name for field in fields(Kernel)]
    known: dict[str, Any] = {name: getattr(variant, name, None) for name in names}
    return Kernel(**known | {"vector_bytes": VECTOR_BYTES, "guards": block_guards(variant)})


def _entries(pairs: Pairs, candidates: _Candidates) -> Iterator[str]:
    """Yield the entries of a config set, in a fixed order."""
    found = []
    for entry in candidates.entries:
        layouts = {group[0] for group, names in pairs.items() if candidates.name(entry, group) in names}
        if layouts:
            numbers = entry.numbers["block_m"], entry.numbers["block_n"], entry.numbers["block_k"]
            order = -DTYPES[entry.dtypes[0]].bytes, entry.fast_accum, entry.split, entry.family, numbers
            found.append((order, _entry(entry, [name for name in LAYOUTS if name in layouts])))
    yield from (text for _, text in sorted(found))


def _entry(entry: Entry, layouts: list[str]) -> str:
    values: dict[str, object] = {"family": entry.family, "archs": entry.archs, "dtypes": entry.dtypes}
    if layouts != list(LAYOUTS):
        values["layouts"] = layouts
    if not entry.split:
        values |= {"epilogues": entry.epilogues} | ({"outputs": entry.outputs} if entry.outputs else {})
    values |= entry.numbers
    values |= {name: True for name in ("split", "fast_accum") if getattr(entry, name)}
    values["source"] = entry.source
    return "\n".join(["[[config]]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""])
