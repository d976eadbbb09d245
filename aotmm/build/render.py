"""Step 3, kernels -> C: render the launcher's source and header from the compiled kernels."""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aotmm import __version__
from aotmm.build.compile import Compiled
from aotmm.build.own.choices import TRAILING, grid_values
from aotmm.kernels import MOST_BLOCKS, WARP_SPECIALISED
from aotmm.pack.edits import edits
from aotmm.pack.files import data_folder
from aotmm.pack.grid import in_c
from aotmm.pack.manifest import IMAGE_ALIGNMENT, room
from aotmm.pack.schema import WHOLE, AnyKernel, Guard, Image, Kernel, OwnKernel, Parameter, TensorMap, occupancy
from aotmm.pack.table import Table
from aotmm.pack.time_model import (
    AT_ONCE,
    HIDDEN,
    LEAST_CORRECTION,
    LEAST_STEPS,
    LINE_BYTES,
    LINE_COPY,
    LINE_GAIN,
    LINE_PART,
    LONG_STEPS,
    MOST_WAVES,
    PDL_INPUTS,
    PLAN_INPUTS,
    PROBLEM_INPUTS,
    SECOND,
    SHIFTED_K,
    SHORTLIST,
    SPLIT_A,
    SPLIT_B,
    SUMS,
    USABLE,
    beside,
    busy,
    nominal,
)
from aotmm.pack.tuning import UNMEASURED, tuning
from aotmm.problem import (
    ABI,
    ACTIVATIONS,
    ALTERNATING_NEIGHBOURS,
    ATTRIBUTES,
    AUTOTUNE,
    BLOCK_SCALE_K,
    CONSTEXPR,
    DESCRIPTOR,
    DEVICE_NAME_BYTES,
    DTYPE_CODES,
    DTYPES,
    EPILOGUES,
    FEW_SLICES,
    FLOAT_TYPES,
    GROUPED,
    GROUPS,
    LAYOUTS,
    LONGEST_K,
    MAX_SIZES,
    NEIGHBOURS,
    POINTER_CODES,
    PRODUCT_QUANTITIES,
    QUANTITIES,
    RELATIONS,
    ROLES,
    SPLITS,
    STATED_QUANTITIES,
    TENSOR_MAP_TYPES,
    USUAL_SPLIT,
    WHOLE_STEPS,
    WORKSPACE_LIMIT,
)
from aotmm.target import HIDDEN_FACTS, TARGETS, Target

_OF_SIZES = tuple((size, "multiple_of") for size in "MNK")  # guards that copies of operands do not help to keep
SOURCE, HEADER, TABLES, IMAGES = "launcher.c", "launcher.h", "tables.h", "images.bin"
KEPT = (SOURCE, HEADER)  # of these, by packs; launcher.c takes the others in
_LANES = 8  # of core.h
_SPLIT_BYTES = 6 * DTYPES["bf16"].bytes  # of an element of split fp32, as tensor cores multiply it
_CDNA_LANES = 64  # of a wave. With 32, on RDNA, HIP counts pairs of compute units. Source: ROCm CLR, "WGP mode"
# Words that arguments of a C function cannot be called. Source: C11 and C++17, keywords.
_TAKEN = frozenset(
    """
    alignas alignof and asm auto bool break case catch char class const constexpr continue default delete do double else
    enum explicit export extern false float for friend goto if inline int long mutable namespace new not operator or
    private protected public register restrict return short signed sizeof static struct switch template this throw true
    try typedef typeid typename union unsigned using virtual void volatile while xor grid device stream values
    """.split()  # noqa: SIM905 - sixty quotes less
)
_OF_OWN_TABLE: dict[str, Any] = {"pointer_codes": POINTER_CODES, "most_sizes": MAX_SIZES}
_GuardTest = tuple[int, str, int, int, int]  # number of the list of quantities, and `_guard_test`
_GuardList = tuple[int, tuple[Guard, ...]]  # likewise


def header(archs: tuple[str, ...] = tuple(TARGETS)) -> str:
    """Return launcher.h: the C interface, and the entry point of each of `archs`."""
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
            grouped=GROUPED,
            layouts=LAYOUTS,
            quantities={role: QUANTITIES[role] for role in ("product", "copy")},
            stated=PRODUCT_QUANTITIES[:STATED_QUANTITIES],
            relations=RELATIONS,
            name_bytes=DEVICE_NAME_BYTES,
            workspace_limit=WORKSPACE_LIMIT,
            splits=SPLITS,
            usual_split=USUAL_SPLIT,
            least_steps=LEAST_STEPS,
            long_steps=LONG_STEPS,
            longest_k=LONGEST_K,
            most_waves=MOST_WAVES,
            shortlist=SHORTLIST,
            at_once=AT_ONCE,
            least_correction=LEAST_CORRECTION,
            line_copy=LINE_COPY,
            line_part=LINE_PART,
            line_gain=LINE_GAIN,
            shifted_k=SHIFTED_K,
            groups=GROUPS,
            neighbours=NEIGHBOURS,
            alternating_neighbours=ALTERNATING_NEIGHBOURS,
            whole_steps=WHOLE_STEPS,
            few_slices=FEW_SLICES,
            hidden=HIDDEN,
            second=SECOND,
            problem_inputs=PROBLEM_INPUTS,
            plan_inputs=PLAN_INPUTS,
            pdl_inputs=PDL_INPUTS,
            unmeasured=UNMEASURED,
            split_a=SPLIT_A,
            split_b=SPLIT_B,
            sums=SUMS,
            most_blocks=MOST_BLOCKS,
            usable=USABLE,
            block_scale_k=BLOCK_SCALE_K,
        )
    )


def arranged(compiled: Iterable[Compiled]) -> tuple[tuple[Any, ...], bytes]:
    """Return the kernels with the offsets of their images in one block of bytes, and that block.

    Those that resemble each other stand side by side, and PTX behind all images: wheels, which find what is repeated
    within 32 KB, are a tenth smaller. Of kernels that differ in types of one size, code of all but the first is stored
    as edits of that one's, where it then takes less than half.
    """
    items = list(compiled)
    block = bytearray()
    added: dict[str, Image] = {}  # one image serves all shapes of a cluster
    bases: dict[tuple[str, ...], tuple[int, bytes]] = {}

    def add(image: Image, data: bytes, kind: tuple[str, ...]) -> None:
        if image.sha256 in added:
            return
        offset, base = bases.setdefault(kind, (len(block), data))
        stored = data if base is data else edits(base, data)
        if 2 * len(stored) > len(data):
            stored = data
        whole = stored is data
        added[image.sha256] = replace(image, offset=len(block), stored=len(stored), base=WHOLE if whole else offset)
        block.extend(stored.ljust(room(len(stored)), b"\0"))

    def placed(image: Image) -> Image:
        return added[image.sha256]

    alike = sorted(items, key=_likeness)
    for item in alike:
        add(item.kernel.image, item.image, ("image", *_twins(item)))
    for item in alike:
        if item.kernel.ptx is not None and item.ptx is not None:
            add(item.kernel.ptx, item.ptx, ("ptx", *_twins(item)))
    kernels = (
        replace(kernel, image=placed(kernel.image), ptx=kernel.ptx and placed(kernel.ptx))
        for kernel in (item.kernel for item in items)
    )
    return tuple(kernels), bytes(block)


def _likeness(item: Compiled) -> tuple[str, ...]:
    """Return what orders kernels so that the code of neighbours is alike: a bf16 kernel follows its twin in fp16."""
    kernel = item.kernel
    types = (kernel.dtype_c, kernel.dtype_b, kernel.dtype_a) if isinstance(kernel, Kernel) else ()
    return *_twins(item), *types


def _twins(item: Compiled) -> tuple[str, ...]:
    """Return what kernels have in common that differ in types of one size: fp16 and bf16, both kinds of fp8."""
    kernel = item.kernel
    if not isinstance(kernel, Kernel):
        return (kernel.name,)
    types = kernel.dtype_a, kernel.dtype_b, kernel.dtype_c
    a, b, c = (name.replace("bf16", "fp16").replace("fp8e5", "fp8e4") for name in types)
    return kernel.family, kernel.role, a, kernel.config_name, kernel.epilogue, kernel.layout, b, c


def texts(target: Target, kernels: tuple[Kernel, ...], tables: Sequence[Table] = ()) -> dict[str, str]:
    """Return the generated C of a pack of products by file, for `link_launcher`; for `tables` see `devices`."""
    return {
        SOURCE: source(target, kernels),
        HEADER: header((target.name,)),
        TABLES: devices(target, kernels, tables),
    }


def source(target: Target, kernels: tuple[Kernel, ...]) -> str:
    """Return launcher.c: what `kernels` are, in order, whose images are in the block that `arranged` made."""
    config_names = sorted({kernel.config_name for kernel in kernels})
    orders = sorted({_order(kernel) for kernel in kernels})
    made = _groups(kernels)
    shared = _shared(target, kernels)
    for row, kernel in zip(shared["rows"], kernels, strict=True):
        row |= {
            "persistent": kernel.persistent,
            "pdl": kernel.pdl,
            "cluster": (kernel.config.cluster_m * kernel.config.cluster_k, kernel.config.cluster_n),
            "config_name": config_names.index(kernel.config_name),
            "order": orders.index(_order(kernel)),
            "element_bytes": DTYPES[kernel.dtype_a].bytes,
            "tensor_bytes": _SPLIT_BYTES if _is_split(kernel) else DTYPES[kernel.dtype_a].bytes,
            "beside": beside(kernel, target),
            "busy": busy(kernel, target),
            "occupancy": occupancy(kernel, target),
        }
    return (
        _environment()
        .get_template("launcher.c.jinja")
        .render(
            **shared,
            config_names=config_names,
            orders=orders,
            classes=[(*key, orders.index(order), sliced) for key, (order, sliced) in sorted(_classes(kernels).items())],
            pointer_alignment=_pointer_alignment(kernels),
            begins_early=int(any(kernel.family in WARP_SPECIALISED for kernel in kernels)),
            threads_multiply=int(_threads_multiply(kernels)),
            order=made.order,
            siblings=made.siblings,
            lanes=_LANES,
            alikes=made.alikes,
            groups=made.groups,
            tables_name=TABLES,
            hidden=[(name, *facts) for name, facts in HIDDEN_FACTS.items()],
        )
    )


def devices(target: Target, kernels: tuple[Kernel, ...], tables: Sequence[Table] = ()) -> str:
    """Return tables.h, which launcher.c includes: models and times of `kernels`, of one device in each table.

    Without a table there are the estimates of `target`.
    """
    found = [_tuning(kernels, target, table) for table in tables or (None,)]
    return _environment().get_template("tables.h.jinja").render(version=__version__, tunings=found)


def _shared(target: Target, kernels: Sequence[AnyKernel]) -> dict[str, Any]:
    """Return what templates/kernels.c.jinja needs: the tables of any kernels.

    Each row still lacks `persistent`, `pdl` and the shape of a `cluster`.
    """
    quantity_lists = list(dict.fromkeys(kernel.quantities for kernel in kernels))
    own_guards = [(quantity_lists.index(kernel.quantities), kernel.guards) for kernel in kernels]
    map_guards = [
        (number, row.tensor_map.guards)
        for (number, _), kernel in zip(own_guards, kernels, strict=True)
        for row in kernel.parameters
        if row.tensor_map is not None and row.tensor_map.guards
    ]
    guard_lists = list(dict.fromkeys((*own_guards, *map_guards)))
    guard_tests: list[_GuardTest] = []
    guarded: dict[_GuardList, tuple[int, int]] = {}  # begin and count of their tests
    for number, guards in dict.fromkeys(own_guards):
        guarded[number, guards] = len(guard_tests), len(guards)
        guard_tests += _guard_tests(number, quantity_lists[number], guards)
    rows = [
        {
            "kernel": kernel,
            "quantities": number,
            "guards": guard_lists.index((number, guards)),
            "guard_tests": guarded[number, guards],
            "maps": [
                _map(item.tensor_map)
                | {"guards": guard_lists.index((number, item.tensor_map.guards)) if item.tensor_map.guards else None}
                for item in kernel.parameters
                if item.tensor_map is not None
            ],
            "parameters": _numbered_maps(kernel.parameters),
        }
        for kernel, (number, guards) in zip(kernels, own_guards, strict=True)
    ]
    return {
        "version": __version__,
        "arch": target.name,
        "backend": target.backend,
        "capability": target.triton_arch,
        "specific": target.specific,
        "min_driver": target.min_driver,
        "counted_units": _CDNA_LANES // target.warp_size,
        "shared_bytes": target.shared_bytes,
        "attribute_ids": ATTRIBUTES,
        "images_name": IMAGES,
        "image_alignment": IMAGE_ALIGNMENT,
        "rows": rows,
        "quantity_lists": quantity_lists,
        "guard_lists": guard_lists,
        "guard_tests": guard_tests,
    }


def own_texts(target: Target, kernels: tuple[OwnKernel, ...]) -> dict[str, str]:
    """Return the generated C of a pack of a user's own functions by file, for `link_launcher`."""
    return {SOURCE: own_source(target, kernels), HEADER: own_header(target, kernels)}


def own_source(target: Target, kernels: tuple[OwnKernel, ...]) -> str:
    """Return launcher.c of a pack of a user's own functions: `source` without what products add, and the grids."""
    shared, grids = _shared(target, kernels), []
    for row, kernel in zip(shared["rows"], kernels, strict=True):
        known = grid_values(kernel.arguments, kernel.quantities)
        chosen = {option.name: option.value for option in kernel.options}
        row |= {
            "persistent": False,
            "pdl": bool(chosen.get("launch_pdl")),
            "cluster": (chosen.get("num_ctas", 1), 1),
        }
        grids.append(tuple(in_c(expression, known) for expression in kernel.grid))
    unique = [grid for grid in dict.fromkeys(grids) if grid]
    shared |= {"grids": unique, "grid_numbers": [unique.index(grid) if grid else None for grid in grids]}
    return _environment().get_template("own.c.jinja").render(**shared, functions=_functions(kernels))


def own_table() -> str:
    """Return own_table.h: the part of `own_header` that is the same for all packs."""
    return _environment().get_template("own_table.h.jinja").render(**_OF_OWN_TABLE)


def own_header(target: Target, kernels: tuple[OwnKernel, ...]) -> str:
    """Return launcher.h of a pack of a user's own functions: the C interface, and a typed function of each."""
    return (
        _environment()
        .get_template("own.h.jinja")
        .render(
            version=__version__,
            abi=ABI,
            arch=target.name,
            relations=RELATIONS,
            name_bytes=DEVICE_NAME_BYTES,
            most_blocks=MOST_BLOCKS,
            **_OF_OWN_TABLE,
            functions=_functions(kernels),
        )
    )


def _functions(kernels: Sequence[OwnKernel]) -> list[dict[str, Any]]:
    """Return each function: its place in the list of kernels, and its arguments in C."""
    found = []
    for name in dict.fromkeys(kernel.function for kernel in kernels):
        numbers = [number for number, kernel in enumerate(kernels) if kernel.function == name]
        members = [kernels[number] for number in numbers]
        found.append(
            {
                "name": name,
                "source": members[0].source.replace("*/", ""),
                "first": numbers[0],
                "count": len(numbers),
                "value_count": len(members[0].quantities) - len(TRAILING),
                "sizes": [members[0].quantities.index(size) for size in members[0].sizes],
                "grid": members[0].grid,
                **_c_arguments(members),
            }
        )
    return found


def _c_arguments(members: Sequence[OwnKernel]) -> dict[str, Any]:
    """Return the arguments of a function in C with their comments, the values of a call, and those left open."""
    arguments, comments, values, open_ = [], [], [], 0
    of_name = {row.name: row for row in members[0].arguments}
    for number, name in enumerate(members[0].quantities[: -len(TRAILING)]):
        argument, _, part = name.partition(".")
        types = dict.fromkeys(row.type for kernel in members for row in kernel.arguments if row.name == argument)
        choice = {
            guard.operand: next((row.value for row in kernel.arguments if row.name == argument), "")
            for kernel in members
            for guard in kernel.guards
            if (guard.value, guard.relation) == (name, "equals")
        }
        c_name = _c_name(f"{argument}_{part}" if part else argument)
        if part == "type":
            comments.append(f"{c_name}: {', '.join(_c_type(type_) for type_ in types)}")
        elif part:  # a size or a stride of a descriptor
            comments.append(f"{c_name}: elements")
        elif name not in of_name or of_name[name].type == AUTOTUNE:  # the order of kernels decides
            open_ |= 1 << number
            values.append("0")
            continue
        elif of_name[name].type == CONSTEXPR:
            listed = [text if str(key) == text else f"{key} for {text}" for key, text in choice.items()]
            comments.append(f"{c_name}: {', '.join(listed)}".replace("*/", ""))
        else:
            comments.append(f"{c_name}: {', '.join(types)}")
        first = next(iter(types), "")
        if not part and (first in POINTER_CODES or first.startswith(DESCRIPTOR)):
            writes = any(argument in kernel.writes for kernel in members)
            arguments.append(f"void *{c_name}" if writes else f"const void *{c_name}")
            values.append(f"(int64_t)(intptr_t){c_name}")
        elif not part and first in FLOAT_TYPES:
            arguments.append(f"{'float' if first == 'fp32' else 'double'} {c_name}")
            values.append(f"aotmm_bits_{first}({c_name})")
        else:
            arguments.append(f"int64_t {c_name}")
            values.append(c_name)
    return {"c_arguments": arguments, "comments": comments, "c_values": values, "open": open_}


def _c_name(name: str) -> str:
    """Return the C name of an argument: Python allows keywords of C, other letters, and names of the function's own."""
    plain = name.encode("ascii", "replace").decode().replace("?", "_")
    return f"{plain}_" if plain in _TAKEN or plain != name else plain


def _c_type(name: str) -> str:
    return f"AOTMM_TYPE_{name.lstrip('*').upper()}"


def _tuning(kernels: tuple[Kernel, ...], target: Target, table: Table | None) -> dict[str, object]:
    """Return a row of aotmm_built_tunings: a table, or the estimates of a pack without one."""
    found = tuning(table, kernels, target)
    of = nominal(target) if table is None else table
    rows = list(dict.fromkeys(found.corrections))
    numbers = {row: number for number, row in enumerate(rows)}
    return {
        "device": of.device,
        "facts": [of.multiprocessors, 0, of.clock_mhz, of.memory_gbps, 0 if table is None else table.l2_bytes],
        "network": None if table is None else table.network,
        "place_count": 2 << max(0, len(found.shapes) - 1).bit_length(),
        **{field.name: getattr(found, field.name) for field in fields(found)},
        "corrections": [numbers[row] for row in found.corrections],
        "correction_rows": rows,
    }


def _guard_tests(number: int, quantities: tuple[str, ...], guards: tuple[Guard, ...]) -> list[_GuardTest]:
    """Return the tests of `guards` in the order of their quantities: addresses, which fail most, come first."""
    ordered = sorted(guards, key=lambda guard: quantities.index(guard.value))
    return [(number, *_guard_test(guard)) for guard in ordered]


def _guard_test(guard: Guard) -> tuple[str, int, int, int]:
    """Return the value of a guard, and mask, least and span of `aotmm_guard_test`."""
    whole, smallest, largest = 2**64 - 1, -(2**63), 2**63 - 1
    mask, least, most = {
        "equals": (whole, guard.operand, guard.operand),
        "multiple_of": (guard.operand - 1, 0, 0),
        "below": (whole, smallest, guard.operand - 1),
        "at_least": (whole, guard.operand, largest),
    }[guard.relation]
    return guard.value, mask & whole, least & whole, most - least


def _map(entry: TensorMap) -> dict[str, object]:
    row = DTYPES[entry.dtype]
    return asdict(entry) | {
        "type": TENSOR_MAP_TYPES[row.name],
        "element_bytes": row.bytes,
        "guard_count": len(entry.guards),
    }


def _numbered_maps(parameters: tuple[Parameter, ...]) -> list[tuple[Parameter, int]]:
    """Return each parameter with the number of its tensor map, from 1, or 0."""
    numbers = itertools.count(1)
    return [(item, next(numbers) if item.tensor_map is not None else 0) for item in parameters]


def _pointer_alignment(kernels: tuple[Kernel, ...]) -> int:
    """Return the modulus of addresses that no guard can tell apart; at least a cache line, on which times depend."""
    return max(
        [LINE_BYTES, *(guard.operand for kernel in kernels for guard in kernel.guards if guard.value.endswith("_ptr"))]
    )


@dataclass(slots=True)
class _Groups:
    """aotmm_order, aotmm_siblings, aotmm_alikes and groups of core.h: the lists that selection searches."""

    order: list[int]
    siblings: list[tuple[int, int]]
    alikes: list[tuple[int, int, int]]
    groups: list[dict[str, object]]


def _groups(kernels: tuple[Kernel, ...]) -> _Groups:
    def helper_rank(number: int) -> tuple[object, ...]:
        kernel = kernels[number]
        return EPILOGUES.index(kernel.epilogue), -kernel.vector_bytes, -len(kernel.guards), number

    types, widths = "AOTMM_DTYPE_COUNT", max(row.bytes for row in DTYPES.values()) + 1
    made = _Groups([], [], [], [])
    reduces = _numbers(kernels, "reduce", lambda k: (_storage(k.dtype_c),))
    sums = {out: {kernels[number].dtype_a for number in numbers} for out, numbers in reduces.items()}
    copies = _numbers(kernels, "copy", lambda k: (DTYPES[k.dtype_a].bytes,))
    mains = {
        (f"AOTMM_GROUPED_{grouped}".upper(), *storage): numbers
        for grouped, role in GROUPED.items()
        for storage, numbers in _numbers(
            kernels, role, lambda k: (_storage(k.dtype_a), _storage(k.dtype_b), _storage(k.dtype_c))
        ).items()
    }
    for number, kernel in enumerate(kernels):
        for out in reduces:
            if kernel.role == "partial" and kernel.dtype_c in sums[out]:
                key = "AOTMM_GROUPED_NONE", _storage(kernel.dtype_a), _storage(kernel.dtype_b), *out
                mains.setdefault(key, []).append(number)
    entries = []
    for key in sorted(mains, key=str):
        first = len(made.alikes)
        _add_mains(kernels, mains[key], made)
        entries.append((key, first, len(made.alikes) - first))
    made.groups.append({"name": "mains", "dimensions": ("AOTMM_GROUPED_COUNT", *(types,) * 3), "entries": entries})
    for name, size, helpers in (("reduces", types, reduces), ("copies", widths, copies)):
        entries = []
        for key in sorted(helpers, key=str):
            entries.append((key, len(made.order), len(helpers[key])))
            made.order += sorted(helpers[key], key=helper_rank)
        made.groups.append({"name": name, "dimensions": (size,), "entries": entries})
    return made


def _order(kernel: Kernel) -> str:
    """Return the text of a kernel's order; unknown ones are equal only for equal configs."""
    return f"unknown, {kernel.config_name}" if kernel.order.instruction == "unknown" else str(kernel.order)


# Types in memory, epilogue; whether tf32 or fast sums are allowed; the kind of scales, as core.h has it.
_Class = tuple[tuple[str, ...], str, int, str]


def _classes(kernels: tuple[Kernel, ...]) -> dict[_Class, tuple[str, int]]:
    """Return the order of products under `batch_invariant`, and how kernels of that order slice K.

    That is 0 for not at all, 1 for slices side by side, and 2 if they also do so one after another, by 4.

    Orders count if one of their kernels takes any operands, as they lie or copied. Of these it is that of most kernels,
    whatever their epilogue; of fp8, one whose sums move to fp32 least often; where tf32 or fast sums are allowed, one
    for these. Exact products may add up in any order.
    """
    found: dict[_Class, dict[str, tuple[bool, bool, float]]] = {}
    counts = Counter[tuple[object, ...]]()
    summed, serial = set(), set[tuple[object, ...]]()
    for kernel in kernels:
        types = tuple(DTYPES[name].storage for name in (kernel.dtype_a, kernel.dtype_b, kernel.dtype_c))
        special, order = kernel.relaxed, _order(kernel)
        if kernel.role == "partial" and kernel.config.block_k <= WHOLE_STEPS:
            summed.add((types[:2], order))
        able = EPILOGUES[: EPILOGUES.index(kernel.epilogue) + 1]
        if kernel.role == "product" and kernel.config.serial_k == FEW_SLICES:
            serial.update((types, epilogue, order) for epilogue in able)
        if kernel.role != "product" or kernel.order.instruction == "exact" or kernel.config.slices > 1:
            continue
        for epilogue, relaxed, scales in itertools.product(able, (0, 1), _scales(kernel)):
            if special <= relaxed:
                orders = found.setdefault((types, epilogue, relaxed, scales), {})
                any_operands, *_ = orders.get(order, (False,))
                any_operands |= not any((g.value, g.relation) in _OF_SIZES for g in kernel.guards)
                seldom = kernel.order.promoted or math.inf if kernel.dtype_a.startswith("fp8") else 0
                orders[order] = any_operands, special, seldom
                counts[types, relaxed, scales, order] += epilogue == "none"  # which every kernel has
    chosen = {
        key: max(orders, key=lambda order: (*orders[order], counts[key[0], key[2], key[3], order], order))
        for key, orders in found.items()
    }
    return {
        key: (order, ((key[0][:2], order) in summed) * (1 + ((*key[:2], order) in serial)))
        for key, order in chosen.items()
    }


def _threads_multiply(kernels: Sequence[Kernel]) -> bool:
    """Return whether the fast kernels for fp32 in full precision are of family `fma`."""
    return any(kernel.family == "fma" for kernel in kernels) and not any(map(_is_split, kernels))


def _is_split(kernel: Kernel) -> bool:
    """Return whether it multiplies fp32 as six products of bf16 (`kernels.hopper.mma.multiply_split`)."""
    return kernel.dtype_a == "fp32" and kernel.family in WARP_SPECIALISED


def _scales(kernel: Kernel) -> tuple[str, ...]:
    """Return the kinds of scales that a kernel takes, by its guards."""
    if kernel.block_scaled:
        return ("BLOCK_SCALES",)
    return ("NO_SCALES",) if Guard("scale_a_ptr", "equals", 0) in kernel.guards else ("NO_SCALES", "SCALES")


def _storage(dtype: str) -> str:
    return f"AOTMM_{DTYPES[dtype].storage.upper()}"


def _numbers(
    kernels: tuple[Kernel, ...], role: str, key_of: Callable[[Kernel], tuple[object, ...]]
) -> dict[tuple[object, ...], list[int]]:
    """Return the numbers of the kernels of a role, by key."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number, kernel in enumerate(kernels):
        if kernel.role == role:
            found.setdefault(key_of(kernel), []).append(number)
    return found


def _add_mains(kernels: tuple[Kernel, ...], numbers: list[int], made: _Groups) -> None:
    """Add products and partials of equal types to `made`: by slices and guards, then siblings by rows of the tile.

    Groups of no siblings fill octets of the launcher up.
    """
    found: dict[tuple[str, int, frozenset[Guard]], dict[tuple[str, bool], list[int]]] = {}

    def rank(number: int) -> tuple[object, ...]:  # products first: their times rule most partials out
        kernel = kernels[number]
        return kernel.role == "partial", EPILOGUES.index(kernel.epilogue), number

    for number in sorted(numbers, key=rank):
        kernel = kernels[number]
        alike = found.setdefault((kernel.role, kernel.config.slices, frozenset(kernel.guards)), {})
        alike.setdefault((kernel.config_name, kernel.fast_accum), []).append(number)
    for (*_, guards), siblings in found.items():
        made.alikes.append((len(made.siblings), len(siblings), _contiguous(guards)))
        for members in sorted(siblings.values(), key=lambda row: kernels[row[0]].config.block_m):
            made.siblings.append((len(made.order), len(members)))
            made.order += members
        made.siblings += [(0, 0)] * (-len(made.siblings) % _LANES)


def _contiguous(guards: Iterable[Guard]) -> int:
    """Return the strides of A, B and C that are guarded to be 1, as bits in the order of PRODUCT_QUANTITIES."""
    first, last = (PRODUCT_QUANTITIES.index(name) for name in ("stride_am", "stride_cn"))
    strides = PRODUCT_QUANTITIES[first : last + 1]
    unit = {guard.value for guard in guards if (guard.relation, guard.operand) == ("equals", 1)}
    return sum(1 << number for number, name in enumerate(strides) if name in unit)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(data_folder("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is C
    )
    environment.filters["c"] = lambda name: name.replace(".", "__")  # of a quantity
    environment.filters["floats"] = lambda numbers: ", ".join(map(_float, numbers))
    return environment


def _float(number: float) -> str:
    """Return the shortest text of those with 6 to 9 digits that C reads as the float nearest to `number`."""
    (nearest,) = struct.unpack("f", struct.pack("f", number))
    texts = [f"{nearest:.{digits}g}" for digits in range(6, 10)]  # nine digits tell any float from its neighbours
    return next((text for text in texts if struct.pack("f", float(text)) == struct.pack("f", nearest)), texts[-1])
