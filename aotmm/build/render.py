"""Step 3, kernels -> C: renders the launcher's source and header from the compiled kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aotmm import __version__
from aotmm.folders import data_folder
from aotmm.kernel import Kernel, Parameter, Promise, TensorMap, resident
from aotmm.problem import (
    ABI,
    ACTIVATIONS,
    ATTRIBUTES,
    DTYPE_CODES,
    DTYPES,
    EPILOGUES,
    LAYOUTS,
    RELATIONS,
    ROLES,
    SPLITS,
    STATED_VALUES,
    TENSOR_MAP_TYPES,
    VALUES,
    WORKSPACE_LIMIT,
)
from aotmm.table import Measured, Table, measured
from aotmm.target import TARGETS, Target

_LANES, _MAX_BLOCKS = 4, 32  # of core.h
_BASE_NS = 2000.0  # of a launch and its first loads, where no table says


def header(archs: tuple[str, ...] = tuple(TARGETS)) -> str:
    """launcher.h: the C interface, and the entry point of each of `archs`."""
    return (
        _environment()
        .get_template("launcher.h.jinja")
        .render(
            version=__version__,
            abi=ABI,
            archs=archs,
            dtypes=tuple(DTYPES.values()),
            default_outputs=[DTYPE_CODES.index(row.output) for row in DTYPES.values()],
            activations=tuple(ACTIVATIONS),
            epilogues=EPILOGUES,
            least_epilogues=[EPILOGUES.index(name) for name in ACTIVATIONS.values()],
            roles=ROLES,
            layouts=LAYOUTS,
            values=VALUES,
            stated=VALUES[:STATED_VALUES],
            relations=RELATIONS,
            workspace_limit=WORKSPACE_LIMIT,
            splits=SPLITS,
        )
    )


def source(target: Target, kernels: tuple[Kernel, ...], tuning: Table | None = None) -> str:
    """launcher.c: the tables of `kernels`, in order, and their images by reference to the files of the pack.

    `tuning` has their times; what it does not know is estimated.
    """
    promise_lists = list(dict.fromkeys(kernel.promises for kernel in kernels))
    schedules = sorted({kernel.schedule for kernel in kernels})
    known = Measured([], [], []) if tuning is None else measured(tuning, schedules)
    made = _groups(kernels, promise_lists)
    rows = [
        {
            "kernel": kernel,
            "schedule": schedules.index(kernel.schedule),
            "promises": promise_lists.index(kernel.promises),
            "first_condition": sum(map(len, promise_lists[: promise_lists.index(kernel.promises)])),
            "width": DTYPES[kernel.dtype_a].bytes,
            "resident": resident(kernel, target),
            "constants": constants(kernel, target, tuning),
            "measured": known.schedules.index(kernel.schedule)
            if kernel.schedule in known.schedules
            else "AOTMM_UNMEASURED",
            "maps": [_map(item.tensor_map) for item in kernel.parameters if item.tensor_map is not None],
            "parameters": _numbered_maps(kernel.parameters),
        }
        for kernel in kernels
    ]
    return (
        _environment()
        .get_template("launcher.c.jinja")
        .render(
            version=__version__,
            arch=target.name,
            backend=target.backend,
            capability=target.triton_arch,
            specific=target.specific,
            min_driver=target.min_driver,
            multiprocessors=target.multiprocessors,
            shared_bytes=target.shared_bytes,
            attribute_ids=ATTRIBUTES,
            rows=rows,
            promise_lists=promise_lists,
            conditions=[_condition(promise) for promises in promise_lists for promise in promises],
            schedules=schedules,
            pointer_alignment=_pointer_alignment(promise_lists),
            order=made.order,
            classes=made.classes,
            candidates_count=sum(row.blocks for row in made.classes),
            groups=made.groups,
            shapes=known.shapes,
            place_count=2 << max(0, len(known.shapes) - 1).bit_length(),
            times=known.times,
            measured_count=len(known.schedules),
        )
    )


def _condition(promise: Promise) -> tuple[str, int, int, int]:
    """The value that a promise is about, and mask, least and span of `aotmm_condition`."""
    whole, smallest, largest = 2**64 - 1, -(2**63), 2**63 - 1
    mask, least, most = {
        "equals": (whole, promise.operand, promise.operand),
        "multiple_of": (promise.operand - 1, 0, 0),
        "below": (whole, smallest, promise.operand - 1),
        "at_least": (whole, promise.operand, largest),
    }[promise.relation]
    return promise.value, mask & whole, least & whole, most - least


def _map(entry: TensorMap) -> dict[str, object]:
    row = DTYPES[entry.dtype]
    return asdict(entry) | {"type": TENSOR_MAP_TYPES[row.name], "element_bytes": row.bytes}


def _numbered_maps(parameters: tuple[Parameter, ...]) -> list[tuple[Parameter, int]]:
    """Each parameter with the number of its tensor map, from 1, or 0."""
    numbers = itertools.count(1)
    return [(item, next(numbers) if item.tensor_map is not None else 0) for item in parameters]


def _pointer_alignment(promise_lists: list[tuple[Promise, ...]]) -> int:
    """What addresses are reduced by without any promise seeing it; at least the 16 bytes that copies depend on."""
    seen = [p.operand for promises in promise_lists for p in promises if p.value.endswith("_ptr")]
    return max([16, *seen])


@dataclass(slots=True)
class _Class:
    """`aotmm_class` of core.h."""

    first: int
    count: int
    units: int
    candidates: int
    alike: int = 0

    @property
    def blocks(self) -> int:
        """How many candidates its kernels fill."""
        return -(-self.count // _LANES)


@dataclass(slots=True)
class _Groups:
    """aotmm_order, aotmm_classes and the groups of core.h: what selection goes through, by what it looks for."""

    order: list[int]
    classes: list[_Class]
    groups: list[dict[str, object]]


def _groups(kernels: tuple[Kernel, ...], promise_lists: list[tuple[Promise, ...]]) -> _Groups:
    def storage(dtype: str) -> str:
        return f"AOTMM_{DTYPES[dtype].storage.upper()}"

    def rank(number: int) -> tuple[object, ...]:
        kernel = kernels[number]
        epilogue = EPILOGUES.index(kernel.epilogue)
        if kernel.role in ("product", "partial"):  # what is promised most is fastest: it comes first
            promises = kernel.promises
            return -_units(promises), promise_lists.index(promises), kernel.schedule, epilogue, number
        return epilogue, -kernel.vector_bytes, -len(kernel.promises), number

    types, widths = "AOTMM_DTYPE_COUNT", max(row.bytes for row in DTYPES.values()) + 1
    tables: dict[str, tuple[str, tuple[object, ...], Callable[[Kernel], tuple[object, ...]]]] = {
        "product": ("products", (types,) * 3, lambda k: (storage(k.dtype_a), storage(k.dtype_b), storage(k.dtype_c))),
        "partial": ("partials", (types,) * 2, lambda k: (storage(k.dtype_a), storage(k.dtype_b))),
        "reduce": ("reduces", (types,), lambda k: (storage(k.dtype_c),)),
        "copy": ("copies", (widths,), lambda k: (DTYPES[k.dtype_a].bytes,)),
    }
    made = _Groups([], [], [])
    for role, (name, dimensions, key_of) in tables.items():
        found: dict[tuple[object, ...], list[int]] = {}
        for number, kernel in enumerate(kernels):
            if kernel.role == role:
                found.setdefault(key_of(kernel), []).append(number)
        entries = []
        for key in sorted(found, key=str):
            numbers = sorted(found[key], key=rank)
            if role in ("product", "partial"):
                classes = _classes([kernels[number] for number in numbers], made)
                entries.append((key, len(made.classes), len(classes)))
                made.classes += classes
            else:
                entries.append((key, len(made.order), len(numbers)))
            made.order += numbers
        made.groups.append({"name": name, "dimensions": dimensions, "entries": entries})
    return made


def _classes(ranked: list[Kernel], made: _Groups) -> list[_Class]:
    """The classes of a group of products or partials that comes after what is `made`."""
    place, candidates = len(made.order), sum(row.blocks for row in made.classes)
    found: list[_Class] = []
    before: tuple[Promise, ...] | None = None
    for (promises, _), run in itertools.groupby(ranked, lambda kernel: (kernel.promises, kernel.schedule)):
        size = len(list(run))
        if promises != before or found[-1].count + size > _MAX_BLOCKS * _LANES:
            found.append(_Class(place, 0, _units(promises), 0))
        found[-1].count += size
        place, before = place + size, promises
    first, blocks = found[0], 0
    for row in found:
        if row.units != first.units or blocks + row.blocks > _MAX_BLOCKS:
            first, blocks = row, 0
        row.candidates = candidates
        first.alike += 1
        blocks, candidates = blocks + row.blocks, candidates + row.blocks
    return found


def _units(promises: tuple[Promise, ...]) -> int:
    """The strides of A, B and C that are promised to be 1, as bits in the order of VALUES."""
    first = VALUES.index("stride_am")
    return sum(
        1 << (VALUES.index(p.value) - first)
        for p in promises
        if (p.relation, p.operand) == ("equals", 1) and p.value in VALUES[first : VALUES.index("stride_cn") + 1]
    )


def constants(kernel: Kernel, target: Target, tuning: Table | None) -> tuple[float, float, float, float, float, int]:
    """Base, step, tile, byte, load and blocks of launcher.h: fitted, or estimated from tile and data sheet."""
    key = (kernel.schedule, DTYPES[kernel.dtype_a].bytes, kernel.fast_accum)
    for model in tuning.models if tuning is not None else ():
        if (model.schedule, model.width, model.fast_accum) == key:
            return model.base, model.step, model.tile, model.byte, model.load, resident(kernel, target)
    byte = 1 / target.bandwidth
    if kernel.role == "copy":  # one side is not aligned; without a contiguous side each element is a transfer
        return _BASE_NS, 0.0, 0.0, byte * (2 if kernel.promises else 8), 0.0, 1
    if kernel.role == "reduce":
        return _BASE_NS, 0.0, 0.0, byte, 0.0, 1
    config = kernel.config
    # A step costs its multiply-adds and its loads, which are slower when they are narrow. 64 is where loading a tile of
    # 128 x 128 costs as much as multiplying it: a guess that was right enough on an H200 before there were tables.
    macs = config.block_m * config.block_n * _mac_cost(kernel) / DTYPES["fp16"].mac_cost
    loads = (config.block_m + config.block_n) * 64 * (16 // kernel.vector_bytes)
    rate = target.tflops * 1000 / 2 / target.multiprocessors  # fp16 multiply-adds per ns of a multiprocessor
    step = config.block_k * (macs + loads) / rate
    if kernel.role == "partial":  # slices are for where they win by more than the estimates may be wrong
        step *= 1.25
    return _BASE_NS, step, step, byte, 0.0, 1


def _mac_cost(kernel: Kernel) -> int:
    """Time of a multiply-add: fp8 sums that leave the tensor core to stay precise take an addition more."""
    precise = kernel.dtype_a.startswith("fp8") and not kernel.fast_accum
    return DTYPES[kernel.dtype_a].mac_cost + precise


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(data_folder("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is C
    )
