"""A tuning table as a launcher holds it: what it says of each kernel of one pack. `aotmm_table` of launcher.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aotmm.pack.time_model import HIDDEN, Constants, constants, fitted
from aotmm.problem import LAYOUTS, SPLITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aotmm.pack.schema import Kernel
    from aotmm.pack.table import Model, Table
    from aotmm.pack.time_model import Network
    from aotmm.target import Target

UNMEASURED = 0xFFFF  # number of a config without times
_NEVER = -1e30  # more than all inputs of a hidden node can add


class Correction(NamedTuple):
    """The network's part for one kernel: `aotmm_correction`.

    Attributes:
        hidden: what its inputs, the bias and its config add to the hidden nodes.
        shift: added to the output.
        alternates: its warpgroups take tiles in turn, 0 or 1.
    """

    hidden: tuple[float, ...]
    shift: float
    alternates: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """A table for the kernels of a pack, or the estimates of one without a table.

    Attributes:
        constants, corrections, config_numbers: by kernel. Without a network there are no corrections.
        config_count: number of configs that have times.
        shapes: M, N, K, element_bytes, relaxed, layout (its number), in ascending order of the fields reversed.
        times: by shape and config: ns, split, pdl of the best sample; zeros where there is none.
    """

    constants: list[Constants]
    corrections: list[Correction]
    config_numbers: list[int]
    config_count: int
    shapes: list[tuple[int, ...]]
    times: list[list[tuple[int, ...]]]


def tuning(table: Table | None, kernels: Sequence[Kernel], target: Target) -> Tuning:
    """Return what `table` says of `kernels`; without a table their estimates on the nominal device of `target`."""
    of_kernels = [constants(kernel, target, table) for kernel in kernels]
    if table is None:
        return Tuning(of_kernels, [], [UNMEASURED] * len(kernels), 0, [], [])
    corrections = []
    if table.network is not None:
        corrections = [Correction((0.0,) * HIDDEN, 0.0, 0)] * len(kernels)
        products = [number for number, kernel in enumerate(kernels) if kernel.role not in ("reduce", "copy")]
        modelled = {model.types for model in table.models}
        for number, model in zip(products, table.models_of(_key(kernels[number]) for number in products), strict=True):
            kernel, known, network = kernels[number], model.types in modelled, table.network
            if known:
                of_kernels[number] = fitted(of_kernels[number], model.factors)
            if kernel.role in ("product", "partial"):
                corrections[number] = _correction(kernel, network, model) if known else _uncorrected(network)
    names, shapes, times = _measured(table, {kernel.config_name for kernel in kernels})
    numbers = {name: number for number, name in enumerate(names)}
    config_numbers = [numbers.get(kernel.config_name, UNMEASURED) for kernel in kernels]
    return Tuning(of_kernels, corrections, config_numbers, len(names), shapes, times)


def _key(kernel: Kernel) -> tuple[str, int, str]:
    """Return the key of a kernel's model. Grouped ones go by their tile's: docs/experiments/tuning.md, "Groups"."""
    return kernel.config_name.removesuffix(f"_{kernel.role}"), *kernel.types


def _uncorrected(network: Network) -> Correction:
    """Return the part of a kernel whose time is the formula's: its hidden nodes stay at 0.

    Such are those of types that the table has no model of, of which the network knows nothing.
    """
    output = sum(max(bias, 0.0) * weight for bias, weight in zip(network.second_bias, network.outputs, strict=True))
    return Correction((_NEVER,) * HIDDEN, -output, 0)


def _correction(kernel: Kernel, network: Network, model: Model) -> Correction:
    hidden = tuple(a + b for a, b in zip(network.hidden(kernel), model.hidden, strict=True))
    return Correction(hidden, network.shift + model.shift, int(kernel.family == "pingpong"))


def _measured(
    table: Table, config_names: set[str]
) -> tuple[list[str], list[tuple[int, ...]], list[list[tuple[int, ...]]]]:
    """Return the configs that have times, the shapes whose operands begin at a line, and their times."""
    rows = []
    for shape in table.shapes:
        best = {
            name: (sample.ns, sample.split, int(sample.pdl))
            for name, sample in shape.best().items()
            if name in config_names and sample.split in (1, *SPLITS)
        }
        rare = shape.offset_a or shape.offset_b or shape.batch > 1 or shape.kind == "block_scaled"
        if best and not (shape.drawn or rare):
            kind = shape.element_bytes, int(shape.kind == "relaxed"), LAYOUTS.index(shape.layout)
            rows.append(((*kind, shape.M, shape.N, shape.K), best))
    rows.sort(key=lambda row: row[0])
    names = sorted({name for _, best in rows for name in best})
    return (
        names,
        [(*sizes, *kind) for (*kind, M, N, K), _ in rows for sizes in [(M, N, K)]],
        [[best.get(name, (0, 0, 0)) for name in names] for _, best in rows],
    )
