"""Step 1, configs -> variants: read a config set and list the kernels to build for one arch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotmm.errors import SpecError
from aotmm.kernels import (
    BLOCK_SCALES,
    LINE_BYTES,
    MOST_BLOCKS,
    MOST_COLUMNS,
    NUMBERS,
    WARP,
    WARP_SPECIALISED,
    Family,
    Variant,
    module_of,
)
from aotmm.pack.schema import Config
from aotmm.problem import BLOCK_SCALE_K, DTYPES, EPILOGUES, GROUPED, INPUTS, LAYOUTS, OUTPUTS, input_types
from aotmm.target import TARGETS, Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_RENAMED = {"linear": "bias_relu", "smooth": "full"}  # epilogues, until format 4
FOLDER = Path(__file__).parent.parent / "configs"
_COPIED = {1: "int8", 2: "fp16", 4: "int32"}  # by bytes: a copy moves bits, so one type stands for all of its width
PARTS_OF_SETS = ("generic", "helpers")  # files with the entries that every set gets
BACKENDS = ("cuda", "hip")
DEFAULT_STAGES = {"cuda": 3, "hip": 2}  # Source: default options of Triton 3.9's two backends.
_LISTS = {
    "dtypes": INPUTS,
    "layouts": LAYOUTS,
    "epilogues": EPILOGUES,
    "outputs": OUTPUTS,
    "archs": tuple(TARGETS),
}
_REQUIRED = ("block_m", "block_n", "block_k", "num_warps")
_CLUSTER = {
    "block_m": "cluster_m",
    "block_n": "cluster_n",
    "block_k": "cluster_k",
}  # blocks of a cluster along that side
_HIP_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")


# Hopper's: 64 rows or a multiple for each warpgroup, a width of one instruction or two, and a ring of stages.
_WIDTHS = (*range(16, 257, 16), 272, 288, 320)
_TWO = 2  # instructions, of a width each that is a power of two
_TWO_BYTES, _FOUR = 2, 4  # of an element
_INT8_STEP, _INT8_ANY = 16, 32  # of the widths of an instruction, of which smaller ones are multiples of 8
_WGMMA = NUMBERS | {
    "block_m": (64, 128, 192, 256, 384),
    "block_n": _WIDTHS,
    "block_k": (32, 64, 128),
    "num_stages": tuple(range(2, 17)),
    "num_warps": (4, 8, 12),
    "cluster_m": (1, 2, 4),
    "cluster_n": (1, 2, 4),
    "cluster_k": (1, 2, 4, 8),
    "serial_k": (1, 2, 4, 8),
}
_WGMMA_DTYPES = ("fp16", "bf16", "tf32", "fp8e5", "fp8e4", "fp8e4-fp8e5", "fp8e5-fp8e4", "int8")
_FMA = NUMBERS | {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64),
    "num_stages": tuple(range(2, 9)),
    "num_warps": (1, 2, 4, 8),
}
_MULTISTAGE = _FMA | {"block_m": (64, 128, 256), "block_n": (64, 128, 256), "num_warps": (4, 8)}
_NOT_HOPPERS = ("none", "bias_relu", "full")  # only in Hopper's families a bias vector alone costs nothing
_NVIDIA = tuple(name for name, row in TARGETS.items() if row.backend == "cuda")
FAMILIES = {
    "tile": Family(roles=("product", "partial", "grouped_m", "grouped_k"), epilogues=_NOT_HOPPERS),
    "short": Family(
        NUMBERS | {"num_stages": (1,)},
        dtypes=("fp16", "bf16"),
        roles=("product",),
        any_rows="",
        epilogues=_NOT_HOPPERS,
    ),
    "fma": Family(
        _FMA,
        _NVIDIA,
        ("fp32",),
        sums=range(16, 129),
        roles=("product", "partial", "grouped_m", "grouped_k"),
        epilogues=_NOT_HOPPERS,
    ),
    "multistage": Family(
        _MULTISTAGE, _NVIDIA, ("fp16", "bf16"), any_rows="", sums=range(16, 129), epilogues=_NOT_HOPPERS
    ),
    "cooperative": Family(
        _WGMMA,
        ("sm90",),
        (*_WGMMA_DTYPES, "fp32"),
        warpgroups="block_m",
        width="block_n",
        roles=("product", "partial", "grouped_m", "grouped_k"),
        any_rows="C",
    ),
    "pingpong": Family(
        _WGMMA | {"block_m": (64, 128), "num_warps": (8,), "cluster_k": (1,), "serial_k": (1,)},
        ("sm90",),
        _WGMMA_DTYPES,
        width="block_n",
        roles=("product", "grouped_m", "grouped_k"),
        any_rows="C",
    ),
    "swapped": Family(
        _WGMMA | {"block_m": (*range(16, 257, 8),), "block_n": (64, 128, 192, 256)},
        ("sm90",),
        (*_WGMMA_DTYPES, "fp32"),
        warpgroups="block_n",
        width="block_m",
        roles=("product", "partial", "grouped_m"),
        any_rows="C",
    ),
}


_DEFAULTS: dict[str, tuple[str, ...]] = {"epilogues": _NOT_HOPPERS, "outputs": ()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a config set.

    Attributes:
        dtypes: the only types that it is for; empty for every type that is built.
        outputs: output types; empty means each input type's default.
        role: of its kernels: "product"; "partial" for sums of slices of K; "grouped_m" and "grouped_k" for products
            that are grouped along M or K.
        block_scales: block scales of B that its kernels take, "" for none.
    """

    family: str
    backends: tuple[str, ...]
    archs: tuple[str, ...]
    numbers: dict[str, int]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    epilogues: tuple[str, ...]
    outputs: tuple[str, ...]
    aligned: bool
    fast_accum: bool
    role: str
    block_scales: str
    source: str

    @property
    def split(self) -> bool:
        """Return whether its kernels give partial sums."""
        return self.role == "partial"


@dataclass(frozen=True, slots=True)
class ConfigSet:
    """A config set: its entries, and the types that each get a generic kernel with the set's richest epilogue."""

    name: str
    dtypes: tuple[str, ...]
    epilogues: tuple[str, ...]
    outputs: tuple[str, ...]
    entries: tuple[Entry, ...]


def set_names() -> list[str]:
    """Return the names of aotmm's own config sets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem not in PARTS_OF_SETS)


def config_set(name: str) -> ConfigSet:
    """Return the config set called `name`, or in the TOML file of that path.

    Raises:
        SpecError: neither exists, or an entry is wrong; the message names the file, the entry and the field.
    """
    path = FOLDER / f"{name}.toml"
    if name not in set_names():
        path = Path(name)
        if not path.is_file() and (path.suffix or path.parent.name):
            raise SpecError(f"config set {name!r} is not a file; known sets: {', '.join(set_names())}")
        if path.suffix != ".toml" or not path.is_file():
            raise SpecError(f"unknown config set {name!r}; known: {', '.join(set_names())}, or a path to a .toml file")
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # tomllib's errors, bytes that are no text, too deep
        raise SpecError(f"{path}: not a TOML file: {error}") from error
    where = path.name
    _known(table, {*_LISTS, "source", "config"}, where)
    lists = {key: _choices(table, key, where, default=_DEFAULTS.get(key, values)) for key, values in _LISTS.items()}
    rows = table.get("config", [])
    if not isinstance(rows, list) or not rows:
        raise SpecError(f"{where}: has no [[config]] entry")
    entries = tuple(
        _entry(row, f"{where}: config {number}", lists, table.get("source", "")) for number, row in enumerate(rows, 1)
    )
    return ConfigSet(path.stem, lists["dtypes"], lists["epilogues"], lists["outputs"], entries)


def variants(chosen: ConfigSet, target: Target, dtypes: tuple[str, ...] = ()) -> list[Variant]:
    """Return the variants for `target`: every entry for each of its types, and the generic kernels, ordered by name.

    Args:
        dtypes: input types to build instead of the set's own. Of the set's own, types that the arch lacks are left out.

    Raises:
        SpecError: one of `dtypes` is unknown, or the arch does not have it.
    """
    for name in dtypes:
        input_types(name)
        if name not in target.dtypes:
            raise SpecError(f"dtype {name!r} does not exist on {target.name}; it has: {', '.join(target.dtypes)}")
    wanted = dtypes or tuple(name for name in chosen.dtypes if name in target.dtypes)
    own = [variant for entry in chosen.entries for variant in _expand(entry, target, wanted)]
    generic = _generic_entries(chosen, own)
    products = own + [variant for entry in generic for variant in _expand(entry, target, wanted)]
    found = {variant.name: variant for variant in (*products, *_helpers(products, target))}
    return [found[name] for name in sorted(found)]


def _expand(entry: Entry, target: Target, wanted: tuple[str, ...]) -> Iterator[Variant]:
    archs = {target.name, target.like}
    if target.backend not in entry.backends or archs.isdisjoint(entry.archs) or entry.fast_accum > target.fast_accum:
        return
    for name in wanted:
        if entry.dtypes and name not in entry.dtypes:
            continue
        a, b = input_types(name)
        default = DTYPES[a].output
        integer = default not in OUTPUTS  # has one output type and no epilogue
        outputs = (default,) if integer or not entry.outputs else entry.outputs
        if "any" in entry.layouts and not integer and entry.role != "partial":
            outputs = tuple(sorted({default, *outputs}))
        epilogues = ("none",) if integer else entry.epilogues
        for output, layout, epilogue in itertools.product(outputs, entry.layouts, epilogues):
            yield Variant(
                target=target,
                family=entry.family,
                dtype_a=a,
                dtype_b=b,
                dtype_c=output,
                layout=layout,
                aligned=entry.aligned,
                epilogue=epilogue,
                fast_accum=entry.fast_accum,
                config=_config(entry.numbers, target),
                source=entry.source,
                role=entry.role,
                block_scales=entry.block_scales,
            )


def _config(numbers: dict[str, int], target: Target) -> Config:
    return Config(**{"num_stages": DEFAULT_STAGES[target.backend]} | numbers)


def _helpers(products: list[Variant], target: Target) -> Iterator[Variant]:
    """Yield the helper kernels of `products`: reduces for partial sums, copies of operands and results.

    There is a reduce for every type that the generic kernels write, with their epilogue, if their sums are split.
    """
    table = tomllib.loads((FOLDER / "helpers.toml").read_text())
    generic = [variant for variant in products if variant.layout == "any" and variant.role == "product"]
    roles = ("product", "partial")  # operands of grouped products are not copied
    special = [v for v in products if v.layout != "any" and v.role in roles and not set("AB") <= set(_free_rows(v))]
    summed = {variant.dtype_c for variant in products if variant.role == "partial"}
    sums = sorted({(_sums(v), v.dtype_c, v.epilogue) for v in generic if _sums(v) in summed})
    moved = {v.dtype_a for v in special} | {
        v.dtype_c for v in special if v.role == "product" and "C" not in _free_rows(v)
    }
    copied = sorted({_COPIED[DTYPES[name].bytes] for name in moved})
    wanted = {
        "reduce": sums,
        "copy": [(dtype, dtype, "none") for dtype in copied],
    }
    for row in table["config"]:
        numbers = {key: row[key] for key in NUMBERS if key in row}
        types = [types for types in wanted[row["family"]] if types[0] in row.get("dtypes", types)]
        for (dtype, output, epilogue), layout in itertools.product(types, row["layouts"]):
            yield Variant(
                target=target,
                family=row["family"],
                dtype_a=dtype,
                dtype_b=dtype,
                dtype_c=output,
                layout=layout,
                aligned=row["aligned"],
                epilogue=epilogue,
                fast_accum=False,
                config=_config(numbers, target),
                source=table["source"],
                role=row["family"],
            )


def _free_rows(variant: Variant) -> str:
    """Return the operands of a variant that need no 16-byte rows."""
    return "" if variant.aligned else _family(variant.family, variant.name).any_rows


def _sums(variant: Variant) -> str:
    """Return the type of a product's sums."""
    return "fp32" if variant.dtype_c in OUTPUTS else variant.dtype_c


def _generic_entries(chosen: ConfigSet, own: list[Variant]) -> list[Entry]:
    """Return the entries of the generic kernels: all types that the set's kernels write, its richest epilogue.

    If the set's `own` variants split K, there are generic ones that do so, too. If some are grouped, there are generic
    ones of their types, for results of the default type and of fp32 if the set has them, of fp8 for all types. Types of
    which some have block scales get generic ones with these, too, and in groups if some of those are grouped.
    """
    table = tomllib.loads((FOLDER / "generic.toml").read_text())
    epilogues = {*chosen.epilogues, *(name for entry in chosen.entries for name in entry.epilogues)}
    outputs = {*chosen.outputs, *(name for entry in chosen.entries for name in entry.outputs)}
    lists = dict(_LISTS) | {"epilogues": (max(epilogues, key=EPILOGUES.index),)}
    found = [
        dataclasses.replace(
            _entry(row, "generic.toml", lists, table["source"]), layouts=("any",), outputs=tuple(sorted(outputs))
        )
        for row in table["config"]
    ]
    scaled = {(variant.dtype_a, variant.dtype_b) for variant in own if variant.block_scales}
    in_blocks = tuple(name for name in INPUTS if input_types(name) in scaled)
    found += [
        dataclasses.replace(each, dtypes=dtypes, block_scales="any")
        for each in found
        if (dtypes := tuple(name for name in in_blocks if not each.dtypes or name in each.dtypes))
    ]
    found += [
        changed
        for role in dict.fromkeys(variant.role for variant in own if variant.role != "product")
        for each in found
        for changed in _generic_of(role, each, [variant for variant in own if variant.role == role])
    ]
    return found


def _generic_of(role: str, entry: Entry, own: list[Variant]) -> Iterator[Entry]:
    """Yield the generic entries of another role than "product", of which the set's `own` variants are."""
    if role != "grouped_m":
        entry = dataclasses.replace(entry, epilogues=("none",))
    if role == "partial":
        yield dataclasses.replace(entry, role=role, outputs=("fp32",))
        return
    mine = {
        (variant.dtype_a, variant.dtype_b) for variant in own if bool(variant.block_scales) == bool(entry.block_scales)
    }
    known = [name for name in entry.dtypes or INPUTS if input_types(name) in mine]
    of_fp8 = tuple(name for name in known if name.startswith("fp8"))
    others = tuple(name for name in known if name not in of_fp8)
    fp32 = tuple(name for name in entry.outputs if name == "fp32")
    for dtypes, outputs in ((of_fp8, entry.outputs), (others, fp32)):
        if dtypes:
            yield dataclasses.replace(entry, role=role, dtypes=dtypes, outputs=outputs)


def _entry(row: Any, where: str, lists: dict[str, tuple[str, ...]], source: str) -> Entry:
    if not isinstance(row, dict):
        raise SpecError(f"{where}: expected a table, found {row!r}")
    flags = {"aligned", "fast_accum", "split"}
    _known(row, {*_LISTS, *NUMBERS, *flags, "source", "backend", "family", "grouped", "block_scales"}, where)
    name = row.get("family", "tile")
    family = _family(name, where)
    numbers = _numbers(row, family, where)
    backends = BACKENDS if "backend" not in row else (_choice(row["backend"], "backend", BACKENDS, where),)
    for key in _HIP_ONLY:
        if key in row and backends != ("hip",):
            raise SpecError(f'{where}: {key} is for AMD; the entry needs backend = "hip"')
    text = row.get("source", source)
    if not isinstance(text, str) or not text:
        raise SpecError(f"{where}: source is missing; say where the entry comes from")
    entry = Entry(
        family=name,
        backends=backends,
        archs=_choices(row, "archs", where, default=lists["archs"]),
        numbers=numbers,
        dtypes=_choices(row, "dtypes", where, default=()),
        layouts=_choices(row, "layouts", where, default=lists["layouts"]),
        epilogues=_choices(row, "epilogues", where, default=lists["epilogues"]),
        outputs=_choices(row, "outputs", where, default=()),
        aligned=_flag(row, "aligned", where, default=True),
        fast_accum=_flag(row, "fast_accum", where, default=False),
        role=_role(row, where),
        block_scales=_choice(row.get("block_scales", ""), "block_scales", ("", *BLOCK_SCALES), where),
        source=text,
    )
    if entry.fast_accum and not (entry.dtypes and all(dtype.startswith("fp8") for dtype in entry.dtypes)):
        raise SpecError(f"{where}: fast_accum is for fp8; the entry needs dtypes, of fp8 alone")
    _check_block_scales(entry, where)
    _check_family(entry, family, where)
    _check_slices(entry, family, where)
    return entry if entry.role == "product" else _with_role(entry, family, row, where)


def _check_block_scales(entry: Entry, where: str) -> None:
    """Refuse an entry with block scales whose kernels do not move their sums at every block of K.

    Raises:
        SpecError: with what it needs.
    """
    if not entry.block_scales:
        return
    hopper = entry.family in WARP_SPECIALISED
    side, warpgroups = ("block_n" if entry.family == "swapped" else "block_m"), max(1, entry.numbers["num_warps"] // 4)
    rows = entry.numbers[side] // entry.numbers.get(f"cluster_{side[-1]}", 1) // warpgroups
    steps = (BLOCK_SCALE_K,) if hopper else tuple(size for size in NUMBERS["block_k"] if size <= BLOCK_SCALE_K)
    needs = {
        "family = tile, cooperative or swapped": entry.family in ("tile", "cooperative", "swapped"),
        "dtypes, of fp8 alone": entry.dtypes and all(dtype.startswith("fp8") for dtype in entry.dtypes),
        "no fast_accum": not entry.fast_accum,
        "no groups of K": entry.role != "grouped_k",
        f"block_k = {' or '.join(map(str, steps))} for each block": (
            entry.numbers["block_k"] // entry.numbers.get("cluster_k", 1) in steps
        ),
        f"{side} = 64 or 128 for each warpgroup": not hopper or rows in (64, 128),
        'block_scales = "any", which is what family tile has': hopper or entry.block_scales == "any",
    }
    if lacking := [need for need, met in needs.items() if not met]:
        raise SpecError(f"{where}: block_scales = {entry.block_scales!r}: the entry needs {'; '.join(lacking)}")


def _check_slices(entry: Entry, family: Family, where: str) -> None:
    """Refuse an entry whose clusters or blocks add slices of K, unless each warpgroup has one accumulator, of a slab.

    Block p of a cluster owns slab p. With two slabs at most, the first two slices are added first in each, whichever
    block owns it (`kernels.hopper.slices`). A block that adds slices one after another has sums of all of them, too.

    Raises:
        SpecError: with what it needs.
    """
    clustered, serial = (entry.numbers.get(name, 1) for name in ("cluster_k", "serial_k"))
    if clustered == serial == 1:
        return
    slabs, width = entry.numbers["num_warps"] // 4, entry.numbers[family.width]
    width //= entry.numbers.get(f"cluster_{family.width[-1]}", 1)
    along_k = family.width == "block_m" or all(layout[1] == "t" for layout in entry.layouts)
    one = {f"{family.width} that is one instruction": width.bit_count() == 1 or along_k}
    if clustered > 1:
        needs = {
            "neither split nor grouped": entry.role == "product",
            "no cluster_m and cluster_n": entry.numbers.get("cluster_m", 1) * entry.numbers.get("cluster_n", 1) == 1,
            "no serial_k": serial == 1,
            "num_warps = 4 or 8": slabs <= _TWO,
            "dtypes other than int8": "int8" not in entry.dtypes,
        }
    else:
        needs = {
            "no split and no groups of K": entry.role in ("product", "grouped_m"),
            "dtypes of fp16 and bf16 alone": {*entry.dtypes} <= {"fp16", "bf16"},
        }
    if lacking := [need for need, met in (needs | one).items() if not met]:
        what = f"cluster_k = {clustered}" if clustered > 1 else f"serial_k = {serial}"
        raise SpecError(f"{where}: {what}: the entry needs {'; '.join(lacking)}")


def _family(name: Any, where: str) -> Family:
    """Return the family called `name`; a name with a dot is a module of the user's own.

    Raises:
        SpecError: there is no such family, or its module has no `FAMILY`.
    """
    if not isinstance(name, str) or "." not in name:
        return FAMILIES[_choice(name, "family", tuple(FAMILIES), where)]
    try:
        family = getattr(module_of(name), "FAMILY", None)
    except ImportError as error:
        raise SpecError(f"{where}: family {name} cannot be imported: {error}; is it on PYTHONPATH?") from error
    if not isinstance(family, Family):
        raise SpecError(f"{where}: module {name} has no FAMILY = aotmm.kernels.Family(...), which says what it can do")
    return family


def _check_family(entry: Entry, family: Family, where: str) -> None:
    """Refuse an entry that its family does not support.

    Raises:
        SpecError: arch, type, layout or alignment are not among the family's.
    """
    name = entry.family
    if not set(entry.archs) <= set(family.archs):
        archs = ", ".join(f'"{arch}"' for arch in family.archs)
        raise SpecError(f"{where}: family {name} is for {archs} alone; the entry needs archs = [{archs}]")
    if family.dtypes != INPUTS and not (entry.dtypes and set(entry.dtypes) <= set(family.dtypes)):
        raise SpecError(f"{where}: family {name} needs dtypes in the entry, of these alone: {', '.join(family.dtypes)}")
    if not (family.any_rows or entry.aligned):
        able = " and ".join(name for name, other in FAMILIES.items() if "A" in other.any_rows)
        raise SpecError(f"{where}: family {name} reads and writes 16-byte rows; aligned = false is for {able}")
    if family.any_rows == "C" and entry.role != "product" and not entry.aligned:
        raise SpecError(
            f"{where}: aligned = false lets rows of C lie anywhere in family {name}, which is for products alone"
        )
    sums = entry.numbers["block_m"] * entry.numbers["block_n"] // (WARP * entry.numbers["num_warps"])
    if family.sums is not None and sums not in family.sums:
        least, most = family.sums[0], family.sums[-1]
        raise SpecError(f"{where}: each thread has {sums} sums; in family {name} it has {least} to {most}")
    _check_width(entry, family, where)
    if not set(entry.epilogues) <= set(family.epilogues):
        able = ", ".join(f'"{epilogue}"' for epilogue in family.epilogues)
        raise SpecError(f"{where}: family {name} has fewer epilogues; the entry needs epilogues = [{able}]")
    _check_layouts(entry, family, where)
    if family.warpgroups and family.width:
        _check_planes(entry, family, where)


def _check_planes(entry: Entry, family: Family, where: str) -> None:
    """Refuse an entry whose warpgroups cannot write planes of Y to shared memory (`kernels.hopper.mma`).

    They do so where they split fp32, and where they turn tf32 that lies across K on both sides. Each warpgroup writes
    as many lines or columns of Y. With fp32 it has 64 rows, and two sums for each element of C.

    Raises:
        SpecError: with what it needs.
    """
    split, turned = "fp32" in entry.dtypes, "tf32" in entry.dtypes and "tn" in entry.layouts
    if not (split or turned):
        return
    numbers = entry.numbers | {side: entry.numbers[side] // blocks for side, blocks in _blocks(entry.numbers).items()}
    slabs, step = numbers["num_warps"] // 4, LINE_BYTES // _FOUR
    rows, width = numbers[family.warpgroups], numbers[family.width]
    needs = {"num_warps = 4 or 8": slabs <= _TWO}
    if split:
        needs |= {
            f"{family.warpgroups} = 64 for each warpgroup": rows == 64 * slabs,
            f"{family.width} = 16, 32, 64 or 128": width in (16, 32, 64, 128),
            f"block_k = {step} for each block": numbers["block_k"] == step,
            "no groups of K": entry.role != "grouped_k",
        }
    if turned:
        needs |= {
            f"{family.warpgroups} = 64 or 128 for each warpgroup": rows in (64 * slabs, 128 * slabs),
            f"{family.width} = 16, 32, 64, 128 or 256": width in (16, 32, 64, 128, 256),
            f"block_k = {step} or {2 * step}": numbers["block_k"] in (step, 2 * step),
            "no clusters": set(_blocks(entry.numbers).values()) == {1},
        }
    if lacking := [need for need, met in needs.items() if not met]:
        what = "splits fp32 into bf16" if split else 'turns tf32 in layout "tn" in shared memory'
        has = ", ".join(f"{key} = {number}" for key, number in entry.numbers.items())
        raise SpecError(f"{where}: family {entry.family} {what}; the entry needs {'; '.join(lacking)}; it has {has}")


def _check_layouts(entry: Entry, family: Family, where: str) -> None:
    """Refuse layouts in which wgmma does not read a type: one byte along K alone; tf32 too, but X from registers.

    There Y lies along K, or X and Y both lie across it. fp32 is split into numbers of 16 bits first.

    A stage of a group of K may end with rows of another group, which are cleared: it has rows in layout "tn" alone.

    Raises:
        SpecError: with the layouts that are possible.
    """
    if not family.width:
        return
    wide = any(DTYPES[input_types(dtype)[0]].bytes != _TWO_BYTES for dtype in entry.dtypes)
    if entry.role == "grouped_k" in family.roles and (wide or entry.layouts != ("tn",)):
        raise SpecError(f'{where}: family {entry.family} sums groups of K of fp16 and bf16 in layouts = ["tn"] alone')
    for dtype in entry.dtypes:
        size = DTYPES[input_types(dtype)[0]].bytes
        along_k: tuple[str, ...] = LAYOUTS
        if size == 1 or (size == _FOUR and not family.warpgroups):
            along_k = ("nt",)
        elif size == _FOUR and dtype != "fp32":
            along_k = ("nt", "tt", "tn") if family.width == "block_n" else ("nt", "nn", "tn")
        if not set(entry.layouts) <= set(along_k):
            able = ", ".join(f'"{layout}"' for layout in along_k)
            raise SpecError(f"{where}: family {entry.family} multiplies {dtype} in layouts = [{able}] alone")


def _check_width(entry: Entry, family: Family, where: str) -> None:
    """Refuse a width that neither one instruction nor two have (`kernels.hopper.specialise`).

    Raises:
        SpecError: it is no power of two and no sum of two, and the entry does not meet the needs of one instruction.
    """
    if not family.width:
        return
    numbers = entry.numbers | {side: entry.numbers[side] // blocks for side, blocks in _blocks(entry.numbers).items()}
    width = numbers[family.width]
    swapped = family.width == "block_m"
    sliced = entry.numbers.get("cluster_k", 1) * entry.numbers.get("serial_k", 1) > 1
    alone = swapped or sliced  # two instructions have two accumulators
    if width.bit_count() == 1 or (width.bit_count() == _TWO and not alone):
        return
    rows = "block_n" if swapped else "block_m"
    groups = numbers["num_warps"] // 4 if family.warpgroups else 1
    x, along_k = ("B", "t") if swapped else ("A", "n")
    sizes = {DTYPES[input_types(dtype)[0]].bytes for dtype in entry.dtypes}
    if "int8" in entry.dtypes and width % _INT8_STEP and width > _INT8_ANY:
        raise SpecError(f"{where}: {family.width} = {width}: int8 has widths of multiples of {_INT8_STEP} alone")
    needs = {
        f"{rows} = {64 * groups} or {128 * groups}": numbers[rows] in (64 * groups, 128 * groups),
        f"block_k = {' and '.join(str(LINE_BYTES // size) for size in sorted(sizes))}": all(
            numbers["block_k"] * size == LINE_BYTES for size in sizes
        ),
        f"layouts in which {x} is contiguous along K": _FOUR not in sizes
        or all(row["AB".index(x)] == along_k for row in entry.layouts),
        f"{family.width} <= {MOST_COLUMNS}": width <= MOST_COLUMNS,
    }
    lacking = [need for need, met in needs.items() if not met]
    if lacking:
        whose = "" if numbers == entry.numbers else " of each block"
        raise SpecError(
            f"{where}: {family.width} = {width}{whose} is one instruction of {width} columns, which needs "
            f"{'; '.join(lacking)}"
        )


def _role(row: dict[str, Any], where: str) -> str:
    """Return the role of an entry's kernels. Raises SpecError for one that is both split and grouped."""
    split = _flag(row, "split", where, default=False)
    grouped = _choice(row.get("grouped", "none"), "grouped", tuple(GROUPED), where)
    if split and grouped != "none":
        raise SpecError(f"{where}: grouped products do not split K; leave out split or grouped")
    return "partial" if split else GROUPED[grouped]


def _with_role(entry: Entry, family: Family, row: dict[str, Any], where: str) -> Entry:
    """Return an entry of a role beside "product". Partial sums are fp32, of int8 int32, and before the epilogue.

    Raises:
        SpecError: its family does not have the role, or the entry sets what the role does not have.
    """
    does = "split K" if entry.role == "partial" else f"multiply groups of {entry.role[-1].upper()}"
    if entry.role not in family.roles:
        able = ", ".join(name for name, other in FAMILIES.items() if entry.role in other.roles)
        raise SpecError(f"{where}: family {entry.family} does not {does}; families that do: {able}")
    if entry.role == "grouped_m":
        return entry
    if entry.role == "grouped_k" and "epilogues" in row:
        raise SpecError(f'{where}: epilogues has no meaning with grouped = "K": sums of groups of K have no epilogue')
    if entry.role == "grouped_k":
        return dataclasses.replace(entry, epilogues=("none",))
    for key in ("epilogues", "outputs"):
        if key in row:
            raise SpecError(f"{where}: {key} has no meaning with split: partial sums have one type and no epilogue")
    return dataclasses.replace(entry, epilogues=("none",), outputs=("fp32",))


def _numbers(row: dict[str, Any], family: Family, where: str) -> dict[str, int]:
    for key in _REQUIRED:
        if key not in row:
            raise SpecError(f"{where}: {key} is missing")
    numbers = {key: row[key] for key in NUMBERS if key in row}
    if len(family.numbers["num_stages"]) == 1:
        numbers.setdefault("num_stages", family.numbers["num_stages"][0])
    blocks = _blocks(numbers)
    for key in sorted(numbers, key=_CLUSTER.__contains__):  # the tile last: it depends on clusters
        allowed = [number * blocks.get(key, 1) for number in family.numbers[key]]
        if type(numbers[key]) is not int or numbers[key] not in allowed:
            raise SpecError(f"{where}: {key} = {numbers[key]!r}; allowed: {', '.join(map(str, allowed))}")
    if (count := math.prod(blocks.values())) > MOST_BLOCKS:
        raise SpecError(
            f"{where}: cluster_m * cluster_n * cluster_k = {count}; a cluster has at most {MOST_BLOCKS} blocks"
        )
    warpgroups = numbers["num_warps"] // 4 * blocks.get(family.warpgroups, 1)
    if family.warpgroups and numbers[family.warpgroups] % (64 * warpgroups):
        raise SpecError(
            f"{where}: {family.warpgroups} = {numbers[family.warpgroups]} is not a multiple of {64 * warpgroups}, "
            f"64 for each of the {warpgroups} warpgroups of num_warps = {numbers['num_warps']}"
            + "".join(f" with {name} = {numbers[name]}" for name in _CLUSTER.values() if numbers.get(name, 1) > 1)
        )
    return numbers


def _blocks(numbers: dict[str, int]) -> dict[str, int]:
    """Return the blocks of a cluster by the side of its tile that they divide."""
    return {side: numbers.get(cluster, 1) for side, cluster in _CLUSTER.items()}


def _flag(row: dict[str, Any], key: str, where: str, *, default: bool) -> bool:
    value = row.get(key, default)
    if not isinstance(value, bool):
        raise SpecError(f"{where}: {key} = {value!r}; allowed: true, false")
    return value


def _known(table: dict[str, Any], keys: set[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise SpecError(f"{where}: unknown field {key!r}; known: {', '.join(sorted(keys))}")


def _choice(value: Any, key: str, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        renamed = f"; it is called {_RENAMED[value]} now" if isinstance(value, str) and value in _RENAMED else ""
        raise SpecError(f"{where}: {key} = {value!r}; allowed: {', '.join(allowed)}{renamed}")
    return str(value)


def _choices(table: dict[str, Any], key: str, where: str, *, default: tuple[str, ...]) -> tuple[str, ...]:
    if key not in table:
        return default
    if not isinstance(table[key], list) or not table[key]:
        raise SpecError(f"{where}: {key} = {table[key]!r}; expected a list of: {', '.join(_LISTS[key])}")
    return tuple(_choice(item, key, _LISTS[key], where) for item in table[key])
