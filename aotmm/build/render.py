"""Step 3, kernels -> C: renders the launcher's source and header from the compiled kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict

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
    order, classes, groups = _groups(kernels, promise_lists)
    rows = [
        {
            "kernel": kernel,
            "schedule": schedules.index(kernel.schedule),
            "promises": promise_lists.index(kernel.promises),
            "width": DTYPES[kernel.dtype_a].bytes,
            "resident": resident(kernel, target),
            "constants": constants(kernel, target, tuning),
            "blocks": (kernel.config.block_m, kernel.config.block_n, kernel.config.block_k),
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
            min_driver=target.min_driver,
            multiprocessors=target.multiprocessors,
            shared_bytes=target.shared_bytes,
            attribute_ids=ATTRIBUTES,
            rows=rows,
            promise_lists=promise_lists,
            schedules=schedules,
            pointer_alignment=_pointer_alignment(promise_lists),
            order=order,
            classes=classes,
            groups=groups,
            shapes=known.shapes,
            times=known.times,
            measured_count=len(known.schedules),
        )
    )


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


def _groups(
    kernels: tuple[Kernel, ...], promise_lists: list[tuple[Promise, ...]]
) -> tuple[list[int], list[tuple[int, int, int]], list[dict[str, object]]]:
    """aotmm_order, aotmm_classes and the groups of core.h: what selection goes through, by what it looks for."""

    def storage(dtype: str) -> str:
        return f"AOTMM_{DTYPES[dtype].storage.upper()}"

    def rank(number: int) -> tuple[object, ...]:
        kernel = kernels[number]
        epilogue = EPILOGUES.index(kernel.epilogue)
        if kernel.role in ("product", "partial"):
            return promise_lists.index(kernel.promises), kernel.schedule, epilogue, number
        return epilogue, -kernel.vector_bytes, -len(kernel.promises), number

    types, widths = "AOTMM_DTYPE_COUNT", max(row.bytes for row in DTYPES.values()) + 1
    tables: dict[str, tuple[str, tuple[object, ...], Callable[[Kernel], tuple[object, ...]]]] = {
        "product": ("products", (types,) * 3, lambda k: (storage(k.dtype_a), storage(k.dtype_b), storage(k.dtype_c))),
        "partial": ("partials", (types,) * 2, lambda k: (storage(k.dtype_a), storage(k.dtype_b))),
        "reduce": ("reduces", (types,), lambda k: (storage(k.dtype_c),)),
        "copy": ("copies", (widths,), lambda k: (DTYPES[k.dtype_a].bytes,)),
    }
    order: list[int] = []
    classes: list[tuple[int, int, int]] = []
    groups: list[dict[str, object]] = []
    for role, (name, dimensions, key_of) in tables.items():
        found: dict[tuple[object, ...], list[int]] = {}
        for number, kernel in enumerate(kernels):
            if kernel.role == role:
                found.setdefault(key_of(kernel), []).append(number)
        entries = []
        for key in sorted(found, key=str):
            numbers = sorted(found[key], key=rank)
            if role in ("product", "partial"):
                runs = [list(run) for _, run in itertools.groupby(numbers, lambda number: kernels[number].promises)]
                entries.append((key, len(classes), len(runs)))
                for run in runs:
                    classes.append((len(order), len(run), _units(kernels[run[0]].promises)))
                    order += run
            else:
                entries.append((key, len(order), len(numbers)))
                order += numbers
        groups.append({"name": name, "dimensions": dimensions, "entries": entries})
    return order, classes, groups


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
