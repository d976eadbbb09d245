"""The generated C: its tables say what the manifest says, and its header serves C and C++."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import re
import struct
import subprocess
import sys
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from aotmm.build import link, render
from aotmm.errors import ArtifactError, CompileError
from aotmm.pack.edits import edited
from aotmm.pack.schema import Config, Guard, Image, Kernel, Parameter, occupancy
from aotmm.pack.table import Model, Sample, ShapeTimes, Table
from aotmm.pack.time_model import FITTED, HIDDEN, INPUTS, SECOND, SUMS, Network, constants, fitted
from aotmm.pack.tuning import UNMEASURED
from aotmm.problem import (
    ABI,
    ACTIVATIONS,
    ATTRIBUTES,
    DTYPE_CODES,
    DTYPES,
    EPILOGUES,
    GROUPS,
    LAYOUTS,
    QUANTITIES,
    RELATIONS,
    ROLES,
    SPLITS,
    TENSOR_MAP_TYPES,
)
from aotmm.runtime import c_interface, launcher, tuning
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.build.packs import ROOT, default_pack, run_python
from tests.samples import SHIPPED, code_in, kernel

# Kernels of several types, guards and configs, in all generated C.
RENDER = """
from dataclasses import replace
from aotmm.build import render
from aotmm.pack.schema import Guard
from aotmm.target import target
from tests.samples import kernel
kernels = [kernel("one", ptx=True), kernel("two"), replace(kernel("three"), role="copy")]
for number, dtype in enumerate(("bf16", "fp32", "tf32", "int8", "fp8e5")):
    guards = tuple(Guard(name, "equals", 1) for name in ("stride_ak", "stride_bn", "stride_cn")[: number])
    kernels.append(replace(kernel(dtype), dtype_a=dtype, dtype_b=dtype, guards=guards, config_name=f"s_{dtype}"))
print(*render.texts(target("sm80"), tuple(kernels)).values(), render.header())
"""


class CParameter(Structure):
    """aotmm_parameter."""

    _fields_ = (("value", c_uint16), ("bytes", c_uint16), ("offset", c_uint32), ("map", c_uint32))


class CGuard(Structure):
    """aotmm_guard."""

    _fields_ = (("value", c_uint16), ("relation", c_uint16), ("operand", c_int64))


class CTensorMap(Structure):
    """aotmm_tensor_map."""

    _NUMBERS = ("type", "element_bytes", "inner", "outer", "batch", "stride", "batch_stride")
    _fields_ = (
        *((name, c_uint16) for name in (*_NUMBERS, "box_inner", "box_outer", "swizzle", "rank")),
        ("guard_count", c_uint32),
        ("guards", POINTER(CGuard)),
    )


class CAttribute(Structure):
    """aotmm_attribute."""

    _fields_ = (("id", c_int32), ("value", c_uint32 * 3))


TABLES = {"parameters": CParameter, "guards": CGuard, "attributes": CAttribute, "maps": CTensorMap}
FLAGS = ("persistent", "pdl")
SAME = ("threads", "shared_bytes", "global_scratch_bytes")
CLUSTER = ("cluster_m", "cluster_n")
BLOCK = ("block_m", "block_n", "block_k")


class CCode(Structure):
    """aotmm_code."""

    _fields_ = (("stored", c_void_p), ("base", c_void_p), ("bytes", c_uint64))


class CKernel(Structure):
    """aotmm_kernel."""

    _fields_ = (
        *((name, c_char_p) for name in ("name", "symbol")),
        ("image", CCode),
        ("ptx", CCode),
        *((name, c_int32) for name in FLAGS),
        *((name, c_uint32) for name in (*SAME, *CLUSTER)),
        ("quantity_count", c_uint32),
        *((f"{table[:-1]}_count", c_uint32) for table in TABLES),
        ("quantities", POINTER(c_char_p)),
        *((table, POINTER(row)) for table, row in TABLES.items()),
    )


class CProduct(Structure):
    """aotmm_product."""

    _fields_ = (
        ("config_name", c_char_p),
        ("order", c_char_p),
        *((name, c_int32) for name in ("role", "dtype_a", "dtype_b", "dtype_c", "epilogue", "width", "relaxed")),
        *((name, c_uint32) for name in (*BLOCK, "vector_bytes", "occupancy")),
    )


def expected(entry: Kernel, arch: str) -> dict[str, Any]:
    """What the C tables have to say of a kernel."""
    maps = [(p.offset, p.tensor_map) for p in entry.parameters if p.tensor_map is not None]
    numbers = {offset: number for number, (offset, _) in enumerate(maps, 1)}  # equal ones have numbers of their own
    of = entry.quantities.index

    def guards_of(guards: tuple[Guard, ...]) -> list[tuple[int, int, int]]:
        return [(of(guard.value), RELATIONS.index(guard.relation), guard.operand) for guard in guards]

    return {
        "name": entry.name.encode(),
        "symbol": entry.symbol.encode(),
        "config_name": entry.config_name.encode(),
        "order": str(entry.order).encode(),
        "role": ROLES.index(entry.role),
        "dtype_a": DTYPE_CODES.index(entry.dtype_a),
        "dtype_b": DTYPE_CODES.index(entry.dtype_b),
        "dtype_c": DTYPE_CODES.index(entry.dtype_c),
        "epilogue": EPILOGUES.index(entry.epilogue),
        "width": DTYPES[entry.dtype_a].bytes,
        **{name: int(getattr(entry, name)) for name in (*FLAGS, *SAME, "relaxed", "vector_bytes")},
        **{name: getattr(entry.config, name) for name in (*BLOCK, *CLUSTER)},
        "cluster_m": entry.config.cluster_m * entry.config.cluster_k,  # of a launch, whose first dimension has slices
        "occupancy": occupancy(entry, target(arch)),
        "parameters": [(of(p.value), p.bytes, p.offset, numbers.get(p.offset, 0)) for p in entry.parameters],
        "quantities": [name.encode() for name in entry.quantities],
        "guards": guards_of(entry.guards),
        "attributes": [(ATTRIBUTES[a.name], a.value) for a in entry.attributes],
        "maps": [
            (
                TENSOR_MAP_TYPES[row.dtype],
                DTYPES[row.dtype].bytes,
                *(of(name) for name in (row.inner, row.outer, row.batch, row.stride, row.batch_stride)),
                row.box_inner,
                row.box_outer,
                row.swizzle,
                row.rank,
                guards_of(row.guards),
            )
            for _, row in maps
        ],
    }


def found(entry: CKernel, product: CProduct) -> dict[str, Any]:
    """What the C tables say of a kernel."""
    counts = {table: f"{table[:-1]}_count" for table in TABLES}
    plain = {name for name, *_ in CKernel._fields_}
    plain -= {"image", "ptx", "quantity_count", "quantities", *counts, *counts.values()}
    tables = {
        table: [fields_of(getattr(entry, table)[number]) for number in range(getattr(entry, counts[table]))]
        for table in TABLES
    }
    names = [entry.quantities[number] for number in range(entry.quantity_count)]
    said = {name: getattr(entry, name) for name in plain} | tables | {"quantities": names}
    return said | {name: getattr(product, name) for name, *_ in CProduct._fields_}


def fields_of(row: Structure) -> tuple[object, ...]:
    """The values of a row: arrays as tuples, the guards of a tensor map as a list."""
    values = tuple(getattr(row, name) for name, *_ in row._fields_)
    if isinstance(row, CTensorMap):
        *numbers, count, guards = values
        return (*numbers, [fields_of(guards[number]) for number in range(count)])
    return tuple(tuple(value) if isinstance(value, ctypes.Array) else value for value in values)


@given(st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e30, max_value=1e30))
def test_floats_have_digits_enough(number: float) -> None:
    """C reads the float that is nearest to the number, whatever lies between two of them."""
    assert struct.pack("f", float(render._float(number))) == struct.pack("f", number)


@pytest.mark.parametrize("arch", SHIPPED)
def test_tables_say_what_the_manifest_says(arch: str) -> None:
    """Every kernel of the library's table equals its manifest entry, down to the bytes of image and text."""
    folder = default_pack(arch)
    pack, code = open_pack(folder), code_in(folder)
    table = ctypes.cast(pack.launcher._c.kernels, POINTER(CKernel))
    products = ctypes.cast(pack.launcher._c.products, POINTER(CProduct))
    sizes: dict[int, int] = {}
    whole_first = sorted(enumerate(pack.manifest.kernels), key=lambda row: row[1].image.base)
    for number, entry in whole_first:
        row = table[number]
        assert found(row, products[number]) == expected(entry, arch)
        for made, image in ((row.image, entry.image), (row.ptx, entry.ptx)):
            assert (made.stored is None) == (image is None)
            if image is not None:
                assert made.bytes == image.bytes
                assert made.stored % 64 == 0
                sizes[made.stored] = image.stored
                assert stored(made, image, sizes) == code(image)


def stored(made: CCode, image: Image, sizes: dict[int, int]) -> bytes:
    """The code of a kernel by what the C tables say of it, a 0 behind code that is whole; `sizes` are by address."""
    assert (made.base is None) == image.whole
    data = ctypes.string_at(made.stored, image.stored)
    if made.base is not None:
        return edited(ctypes.string_at(made.base, sizes[made.base]), data, image.bytes)
    assert ctypes.string_at(made.stored + image.stored, 1) == b"\0"
    return data


def test_ids_of_the_driver() -> None:
    """Launch attributes and types of tensor maps have the numbers of the driver's own header, which Triton brings."""
    folder = importlib.metadata.distribution("triton").locate_file("triton/backends/nvidia/include")
    text = Path(str(folder), "cuda.h").read_text(encoding="latin-1")
    ids = dict(re.findall(r"^ *,? CU_LAUNCH_ATTRIBUTE_(\w+) *= (\d+)", text, re.MULTILINE))
    assert {name: int(ids[name.upper()]) for name in ATTRIBUTES} == ATTRIBUTES
    listed = re.findall(r"^ +CU_TENSOR_MAP_DATA_TYPE_(\w+)", text[: text.index("} CUtensorMapDataType;")], re.MULTILINE)
    words = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32", "tf32": "TFLOAT32", "int32": "INT32"}
    assert {name: listed.index(words.get(name, "UINT8")) for name in TENSOR_MAP_TYPES} == TENSOR_MAP_TYPES


def test_attributes_in_the_table() -> None:
    """Launch attributes get the driver's ids."""
    text = render.source(target("sm80"), (kernel("one"),))
    assert "attributes_0[] = {\n    {4, {2, 4, 1}},\n    {0},\n};" in text


def test_same_bytes_each_time(tmp_path: Path) -> None:
    """Rendering is a function of its arguments: in processes whose sets are in another order, and in another folder."""
    (tmp_path / "link").symlink_to(ROOT)
    done = [
        run_python(RENDER, root=root, PYTHONHASHSEED=seed)
        for root, seed in ((ROOT, "1"), (ROOT, "2"), (tmp_path / "link", "3"))
    ]
    assert [process.returncode for process in done] == [0, 0, 0], done[0].stderr
    assert len({process.stdout for process in done}) == 1
    assert "aotmm_order" in done[0].stdout
    assert [place for place in (str(ROOT), str(tmp_path)) if place in done[0].stdout] == []


@pytest.mark.parametrize(("name", "expected"), [("launcher.c", "two_kernels.c"), ("tables.h", "two_kernels.h")])
def test_launcher_of_two_kernels(tmp_path: Path, name: str, expected: str) -> None:
    """A product and a copy give the C files in tests/golden, where reviewers see what a change of templates does."""
    parameters = (Parameter("source_ptr", "*i16", "source_ptr", 0, 8), Parameter("M", "i32", "M", 8, 4))
    copy = dataclasses.replace(
        kernel("copy"), role="copy", guards=(), parameters=parameters, quantities=QUANTITIES["copy"]
    )
    made = tmp_path / name
    made.write_text(render.texts(target("sm80"), (kernel("product", ptx=True), copy))[name])
    golden = ROOT / "tests" / "golden" / expected
    assert made.read_text() == golden.read_text(), f"if the change is meant: cp {made} {golden}"


def test_missing_value_is_an_error() -> None:
    """A template never prints a value that is not there."""
    with pytest.raises(UndefinedError):
        render._environment().get_template("launcher.c.jinja").render(version="0", arch="sm80", config_names=[])


def test_equal_guards_are_one_table() -> None:
    """Kernels of equal guards share one table, which is what selection goes by; others have their own."""
    other = dataclasses.replace(kernel("three"), guards=(Guard("a_ptr", "multiple_of", 8),))
    text = render.source(target("sm80"), (kernel("one"), other, kernel("two")))
    assert text.count("static const aotmm_guard guards_") == 3  # and that of the tensor maps
    assert [line[-1] for line in re.findall(r"\.guards = guards_\d", text)] == ["0", "1", "0"]
    assert "const uint16_t aotmm_order[] = {0, 2, 1};" in text
    assert "[AOTMM_FP16][AOTMM_FP16][AOTMM_FP32] = {0, 2}," in text
    fill = "    {0, 0},\n" * 7  # of an octet
    assert f"const aotmm_group aotmm_siblings[] = {{\n    {{0, 2}},\n{fill}    {{2, 1}},\n{fill}}};" in text
    assert "const aotmm_alike aotmm_alikes[] = {\n    {0, 1, 0},\n    {8, 1, 0},\n};" in text
    assert "{0x7, 0x0, 0x0, of_0_a_ptr},\n    {0},\n};\nconst aotmm_group aotmm_guard_tests_of[] = {\n    {0, " in text


def test_guard_tests_are_in_the_order_of_quantities() -> None:
    """Guards are looked at in the order of the kernel's quantities: addresses first, sums last."""
    guards = (
        Guard("workspace_stride_m", "multiple_of", 16),
        Guard("M", "below", 9),
        Guard("a_ptr", "multiple_of", 16),
        Guard("M", "at_least", 1),
    )
    rows = render._guard_tests(3, QUANTITIES["product"], guards)
    assert [name for _, name, *_ in rows] == ["a_ptr", "M", "M", "workspace_stride_m"]
    assert sorted(rows) == sorted((3, *render._guard_test(guard)) for guard in guards)


def lists_of(kernels: tuple[Kernel, ...]) -> list[tuple[int, list[list[int]]]]:
    """The numbers of kernels as selection goes through them: of each alike its strides, and groups of siblings."""
    made = render._groups(kernels)
    mains: Any = made.groups[0]["entries"]
    assert [row[1:] for row in mains] == [(0, len(made.alikes))]
    found = []
    for begin, groups, strides in made.alikes:
        siblings = made.siblings[begin : begin + groups]
        found.append((strides, [made.order[low : low + members] for low, members in siblings]))
    return found


STRICT = (Guard("stride_ak", "equals", 1), Guard("K", "multiple_of", 8))


def test_siblings_differ_in_their_epilogue_alone() -> None:
    """Kernels of one config with the same guards, in any order, are siblings, the plainer first."""
    kernels = tuple(
        dataclasses.replace(kernel(f"{guards}{epilogue}"), epilogue=epilogue, guards=guards)
        for guards in (STRICT[1:], STRICT, STRICT[::-1])
        for epilogue in ("full", "none")
    )
    assert lists_of(kernels) == [(0, [[1, 0]]), (2, [[3, 5, 2, 4]])]


def test_kernels_of_equal_guards_are_alike() -> None:
    """Guards are looked at once for all configs and kinds of sums that have them, in any order of the kernels."""
    rows = (("a", STRICT, True), ("b", (), True), ("b", STRICT[::-1], True), ("a", (), True), ("a", STRICT, False))
    kernels = tuple(
        dataclasses.replace(kernel(str(number)), config_name=config_name, guards=guards, fast_accum=fast_accum)
        for number, (config_name, guards, fast_accum) in enumerate(rows)
    )
    assert lists_of(kernels) == [(2, [[0], [2], [4]]), (0, [[1], [3]])]


OF_ROLE = {"product": "fp16", "partial": "fp32"}  # C or sums


def test_products_come_before_partials() -> None:
    """Selection rules most partials out by the times of products: these come first, and are alike among themselves."""
    rows = (("partial", ()), ("product", STRICT), ("partial", STRICT), ("product", ()), ("product", STRICT))
    kernels = tuple(
        dataclasses.replace(
            kernel(str(number)), role=role, dtype_c=OF_ROLE[role], config_name=f"{role}_{number}", guards=guards
        )
        for number, (role, guards) in enumerate(rows)
    )
    reduce = dataclasses.replace(kernel("reduce"), role="reduce", dtype_a="fp32", dtype_c="fp16")
    assert lists_of((*kernels, reduce)) == [(2, [[1], [4]]), (0, [[3]]), (0, [[0]]), (2, [[2]])]


def test_strides_of_alike_kernels() -> None:
    """A bit for each stride of A, B and C that has to be 1; other guards on strides have none."""
    strides = ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
    for bit, name in enumerate(strides):
        guards = (Guard(name, "equals", 1), Guard("stride_am", "multiple_of", 8), Guard("M", "equals", 1))
        assert lists_of((dataclasses.replace(kernel(name), guards=guards),)) == [(1 << bit, [[0]])]


def test_partials_are_with_products_of_every_type_that_a_reduce_gives() -> None:
    """What multiplies A and B in slices is looked for with what does so at once, also where there is no such kernel.

    A reduce of other sums gives nothing of it.
    """
    outputs = {"product": "fp32", "partial": "fp32", "reduce": "bf16", "another": "fp32", "of integers": "int32"}
    roles = {**{role: role for role in ("product", "partial", "reduce")}, "another": "reduce", "of integers": "reduce"}
    inputs = {"reduce": "fp32", "another": "fp32", "of integers": "int32"}
    kernels = tuple(
        dataclasses.replace(
            kernel(name), role=roles[name], dtype_a=inputs.get(name, "fp16"), dtype_c=out, config_name=name
        )
        for name, out in outputs.items()
    )
    made = render._groups(kernels)
    assert {group["name"]: group for group in made.groups}["mains"]["entries"] == [
        (("AOTMM_GROUPED_NONE", "AOTMM_FP16", "AOTMM_FP16", "AOTMM_BF16"), 0, 1),
        (("AOTMM_GROUPED_NONE", "AOTMM_FP16", "AOTMM_FP16", "AOTMM_FP32"), 1, 2),
    ]
    assert made.alikes == [(0, 1, 0), (8, 1, 0), (16, 1, 0)]
    siblings = [made.order[first : first + count] for first, count in made.siblings]
    assert siblings == [row for first in ([1], [0], [1]) for row in (first, *([[]] * 7))]  # each begins an octet


def test_parts_of_the_formula() -> None:
    """A tile, shares of a cluster, slices, tiles beside each other, bytes of a step of A, of sums, of elements of A."""
    rows: tuple[dict[str, Any], ...] = (
        {},
        {"role": "partial", "config": Config(64, 128, 32, 3, 4)},
        {"dtype_a": "fp8e5"},
        {"dtype_a": "tf32", "role": "reduce"},
        {"family": "fma"},
        {"config": Config(64, 128, 32, 3, 4, serial_k=4)},
        {"dtype_a": "fp32", "family": "swapped"},
    )
    kernels = tuple(dataclasses.replace(kernel(str(number)), **row) for number, row in enumerate(rows))
    text = render.source(target("sm80"), kernels)
    assert (
        "const aotmm_tile aotmm_tiles[] = {\n"
        "    {64, 128, 32, 1, 0.125, 0.5, 0.25, 1, 3, 1.5, 64, 0, 2},\n"
        "    {64, 128, 32, 1, 1.0, 1.0, 1.0, 1, 3, 1.5, 64, 4 * AOTMM_SUMS, 2},\n"
        "    {64, 128, 32, 1, 0.125, 0.5, 0.25, 1, 3, 1.5, 32, 0, 1},\n"
        "    {64, 128, 32, 1, 0.125, 0.5, 0.25, 1, 3, 1.5, 128, 0, 4},\n"
        "    {64, 128, 32, 1, 0.125, 0.5, 0.25, 1, 3, 3.5, 64, 0, 2},\n"
        "    {64, 128, 32, 1, 1.0, 1.0, 1.0, 4, 3, 1.5, 64, 0, 2},\n"
        "    {64, 128, 32, 1, 0.125, 0.5, 0.25, 1, 1, 1.0, 128, 0, 12},\n"
        "};" in text
    )
    assert re.findall(r"#define AOTMM_SUMS (\S+)", render.header()) == [str(SUMS)]


@pytest.mark.parametrize(
    ("guard", "holds", "broken"),
    [
        (Guard("K", "equals", 3), (3,), (2, 4, -1)),
        (Guard("K", "multiple_of", 16), (0, 16, 2**62), (1, 8, 2**62 + 8)),
        (Guard("K", "below", 100), (0, 99, -1), (100, 2**63 - 1)),
        (Guard("K", "at_least", 1), (1, 2**63 - 1), (0, -1)),
    ],
)
def test_guards_as_ranges(guard: Guard, holds: tuple[int, ...], broken: tuple[int, ...]) -> None:
    """The numbers by which a launcher looks at a guard admit the values that keep it, and no other."""
    name, mask, least, span = render._guard_test(guard)
    kept = [value for value in (*holds, *broken) if ((value % 2**64 & mask) - least) % 2**64 <= span]
    assert (name, kept) == ("K", list(holds))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"guards": (Guard("K", "multiple_of", 24),)}, "multiple_of 24: not a power of two"),
        ({"guards": (Guard("K", "multiple_of", 0),)}, "multiple_of 0: not a power of two"),
        ({"parameters": (dataclasses.replace(kernel("one").parameters[2], offset=32),)}, "b is no tensor map"),
    ],
)
def test_kernels_that_no_launcher_can_launch(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """What the launch core cannot check or fill is refused when the launcher is linked."""
    texts = render.texts(target("sm80"), (dataclasses.replace(kernel("one"), **change),))
    with pytest.raises(CompileError, match=words):
        link.link_launcher(target("sm80"), tmp_path, texts, b"images", link.compiler()[0])


def test_tuning_table_in_tables_h() -> None:
    """Constants, network and best times of a table are in tables.h; other configs' times and unaligned ones are not.

    Of a table without a network there are the constants alone.
    """
    one, copy = kernel("one"), dataclasses.replace(kernel("two"), role="copy")
    mine = one.config_name
    samples = (
        Sample("absent", 1, pdl=False, copies=0, ns=1),
        Sample(mine, 1, pdl=False, copies=0, ns=900),
        Sample(mine, 1, pdl=True, copies=0, ns=800),
        Sample(mine, 1, pdl=True, copies=1, ns=700),
        Sample(mine, 7, pdl=True, copies=0, ns=600),
    )

    def shape(layout: str, rows: int, times: tuple[Sample, ...], *, offset: int = 0) -> ShapeTimes:
        return ShapeTimes(2, layout, "relaxed", rows, 16, 32, offset, 0, held_out=False, times=times)

    shapes = (
        shape("nt", 8, samples[:4]),
        shape("nn", 8, samples[:1]),
        shape("nn", 9, samples[4:]),
        shape("nn", 10, samples[1:2]),
        shape("nn", 11, samples[1:2], offset=64),
    )
    weights_in = tuple((float(number),) * HIDDEN for number in range(len(INPUTS)))
    second = tuple((float(number),) * SECOND for number in range(HIDDEN))
    of_second = (0.25,) * SECOND, (0.125,) * SECOND
    network = Network(weights_in, (0.5,) * HIDDEN, second, *of_second, 2.0, (1.0,) * len(FITTED))
    factors = (2.0, 3.0, 4.0, 5.0, 6.0)
    models = tuple(
        Model(mine, width, one.kind, 0.25 * width, factors[::step], (-8.0 * width,) * HIDDEN)
        for width, step in ((1, -1), (2, 1))
    )
    facts = 108, 1410, 1555, 40 << 20
    table = Table("sm80", "a GPU", *facts, "none", "none", "0", "2026-11-20", 0, network, models, shapes)
    plain = dataclasses.replace(table, device="another", network=None, shapes=())
    text = render.devices(target("sm80"), (one, copy), (table, plain))
    sheet = [constants(entry, target("sm80"), table) for entry in (one, copy)]
    for number, rows in enumerate(([fitted(sheet[0], factors), sheet[1]], sheet)):
        lines = ["    {" + ", ".join(map(render._float, row)) + "},\n" for row in rows]
        assert f"constants_{number}[] = {{\n{''.join(lines)}}};" in text
    hidden, zeros = (", ".join([render._float(value)] * HIDDEN) for value in (network.hidden(one)[0] - 16.0, 0.0))
    of_nodes = "}, {".join(", ".join(map(render._float, row)) for row in second)
    last = (", ".join(map(render._float, row)) for row in of_second)
    assert f"#define CORRECTION_0_0 {{ {{{hidden}}}, 2.5, 0}}\n" in text
    assert f"#define CORRECTION_0_1 {{ {{{zeros}}}, 0, 0}}\n" in text
    assert "corrections_0[] = {\n    CORRECTION_0_0,\n    CORRECTION_0_1,\n};" in text
    assert "    {{{{{}}}}},\n    {{{}}},\n    {{{}}},\n}};".format(of_nodes, *last) in text
    assert "network_1" not in text
    assert "shapes_0[] = {\n    {10, 16, 32, 2, 1, 0},\n    {8, 16, 32, 2, 1, 1},\n    {0},\n};" in text
    assert "times_0[] = {\n    {900, 1, 0},\n    {800, 1, 1},\n    {0},\n};" in text
    other = 0 if copy.config_name == mine else UNMEASURED
    assert f"config_numbers_0[] = {{0, {other}}};" in text
    assert f"config_numbers_1[] = {{{UNMEASURED}, {UNMEASURED}}};" in text
    assert '.device = {108, 0, 1410, 1555, 41943040, "a GPU"},' in text
    assert '.device = {108, 0, 1410, 1555, 41943040, "another"},' in text


def test_abi_is_the_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rendered, what a pack's library says of itself and what the runtime accepts have the same ABI number."""
    assert f"#define AOTMM_ABI {ABI}\n" in render.header()
    mm = open_pack(default_pack("sm80")).launcher
    assert (mm._c.abi, mm._c.problem_bytes) == (ABI, ctypes.sizeof(launcher.CProblem))
    monkeypatch.setattr(c_interface, "ABI", ABI + 1)
    with pytest.raises(ArtifactError, match=rf"has ABI {ABI}, this version of aotmm {ABI + 1}; build the pack again"):
        launcher.Launcher(mm._library, "sm80", lambda: ())


PROGRAM = """
#include "launcher.h"
_Static_assert(AOTMM_PRODUCT_QUANTITIES == %d, "values");
_Static_assert(AOTMM_DTYPE_COUNT == %d, "dtypes");
_Static_assert(AOTMM_ACTIVATION_COUNT == %d, "activations");
_Static_assert(sizeof(aotmm_problem) == %d, "aotmm_problem");
_Static_assert(sizeof(aotmm_device) == %d, "aotmm_device");
_Static_assert(sizeof(aotmm_origin) == %d, "aotmm_origin");
_Static_assert(sizeof(aotmm_error) == %d, "aotmm_error");
_Static_assert(sizeof(aotmm_kernel) == %d, "aotmm_kernel");
_Static_assert(sizeof(aotmm_evaluation) == %d, "aotmm_evaluation");
_Static_assert(sizeof(aotmm_plan) == %d, "aotmm_plan");
_Static_assert(sizeof(aotmm_constants) == %d, "aotmm_constants");
_Static_assert(sizeof(aotmm_network) == %d, "aotmm_network");
_Static_assert(sizeof(aotmm_correction) == %d, "aotmm_correction");
_Static_assert(sizeof(aotmm_time) == %d, "aotmm_time");
_Static_assert(sizeof(aotmm_shape) == %d, "aotmm_shape");
_Static_assert(sizeof(aotmm_table) == %d, "aotmm_table");
_Static_assert(sizeof(aotmm_launcher) == %d, "aotmm_launcher");
const aotmm_launcher *(*entry)(void) = aotmm_launcher_sm90;
"""


@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_header_serves_c_and_cpp(tmp_path: Path, language: str) -> None:
    """The header compiles by itself, pedantically, as C and as C++, with the sizes that Python assumes."""
    model = (tuning.CConstants, tuning.CNetwork, tuning.CCorrection)
    tables = (launcher.CPlan, *model, tuning.CTime, tuning.CShape, tuning.CTable)
    inputs = (launcher.CProblem, tuning.CDevice, tuning.COrigin, c_interface.CError, CKernel)
    sizes = (*inputs, launcher.CEvaluation, *tables, launcher._CLauncher)
    text = PROGRAM % (len(QUANTITIES["product"]), len(DTYPES), len(ACTIVATIONS), *map(ctypes.sizeof, sizes))
    for kind, names in (
        ("", DTYPES),
        ("ACTIVATION_", ACTIVATIONS),
        ("EPILOGUE_", EPILOGUES),
        ("ROLE_", ROLES),
        ("LAYOUT_", LAYOUTS),
        ("PRODUCT_", QUANTITIES["product"]),
        ("COPY_", QUANTITIES["copy"]),
        ("", RELATIONS),
    ):
        for number, name in enumerate(names):
            text += f'_Static_assert(AOTMM_{kind}{name.upper()} == {number}, "{name}");\n'
    least = ", ".join(str(EPILOGUES.index(name)) for name in ACTIVATIONS.values())
    assert f"#define AOTMM_ACTIVATION_EPILOGUES {{{least}}}\n" in render.header()
    for name, values in (("SPLITS", SPLITS), ("GROUPS", GROUPS)):
        assert f"#define AOTMM_{name} {{{', '.join(map(str, values))}}}" in render.header()
    source = tmp_path / {"c11": "program.c", "c++17": "program.cc"}[language]
    source.write_text(text if language == "c11" else text.replace("_Static_assert", "static_assert"))
    (tmp_path / "launcher.h").write_text(render.header())
    compiler = [sys.executable, "-m", "ziglang", "cc" if language == "c11" else "c++"]
    flags = [f"-std={language}", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-c"]
    done = subprocess.run([*compiler, *flags, source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_function_is_documented() -> None:
    """In launcher.h a comment stands before each function of the table, and says what it returns but AOTMM_OK."""
    table = render.header(("sm80",)).partition("typedef struct aotmm_launcher {")[2].partition("} aotmm_launcher;")[0]
    functions = re.findall(r"/\*((?:(?!/\*).)*?)\*/\n  int \(\*(\w+)\)", table, re.DOTALL)
    assert [name for _, name in functions] == re.findall(r"  int \(\*(\w+)\)", table)
    for text, name in functions:
        assert "AOTMM_" in text or "What either returns" in text, name
