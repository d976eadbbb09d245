"""Compiling one variant: what the manifest entry says is what the compiler was told and what the binary says."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotmm import build as building
from aotmm import kernels as sources
from aotmm.build import compile as compiling
from aotmm.build import parameters, products
from aotmm.build.compile import Compiled, compile_variant, key
from aotmm.build.products import I32_LIMIT, kernel_sources
from aotmm.build.variants import config_set, variants
from aotmm.errors import CompileError, SpecError
from aotmm.kernels import Descriptor, Specialisation, Variant, module_of
from aotmm.pack.manifest import room
from aotmm.pack.schema import Config, Parameter, TensorMap
from aotmm.pack.verify import verify
from aotmm.problem import DTYPES, PRODUCT_QUANTITIES
from aotmm.runtime.pack import open_pack
from aotmm.target import TARGETS, target
from tests.build.packs import SHAPES, clusters_pack, default_pack, run_python
from tests.emulators import elf
from tests.native.emulation import in_worker, own_process
from tests.samples import SHIPPED, code_in, installed

TENSOR_MAP_ALIGNMENT = 64  # Source: CUDA driver API, CUtensorMap
FP16 = Variant(
    target=target("sm80"),
    family="tile",
    dtype_a="fp16",
    dtype_b="fp16",
    dtype_c="fp16",
    layout="nn",
    aligned=True,
    epilogue="none",
    fast_accum=False,
    config=Config(64, 64, 32, 3, 4),
    source="tests",
)


@pytest.mark.parametrize("arch", SHIPPED)
def test_binaries_are_what_the_manifest_says(arch: str) -> None:
    """Every image of the default pack has the arch, parameters, registers and stack of its manifest entry, no paths."""
    folder = default_pack(arch)
    code = code_in(folder)
    for entry in open_pack(folder).manifest.kernels:
        info = elf.read(code(entry.image))
        assert (info.arch, info.debug, list(info.kernels)) == (arch, (), [entry.symbol])
        found = info.kernels[entry.symbol]
        visible = [(item.offset, item.size) for item in found.params if not item.kind.startswith("hidden_")]
        # ptxas lets a block with tensor maps begin where constant bank 0 is 64-byte aligned
        start = -found.param_base % TENSOR_MAP_ALIGNMENT if any(p.tensor_map for p in entry.parameters) else 0
        assert visible == [(start + item.offset, item.bytes) for item in entry.parameters]
        assert (found.regs, found.stack) == (entry.registers, entry.spill_bytes)
        threads = found.max_threads if found.reqntid is None else found.reqntid[0]
        assert threads == entry.threads
        assert entry.shared_bytes <= target(arch).shared_bytes
        assert entry.global_scratch_bytes == entry.profile_scratch_bytes == 0


def _with_every_pass(variant: Variant) -> bytes:
    """Its image, compiled with all that Triton runs."""
    needed = compiling._only_needed_passes
    compiling._only_needed_passes = lambda *_: nullcontext()  # type: ignore[assignment]
    try:
        return compile_variant(variant, "key").image
    finally:
        compiling._only_needed_passes = needed


def _as_built(variant: Variant) -> bytes:
    return compile_variant(variant, "key").image


def _after_its_twin(variant: Variant) -> tuple[Compiled, Compiled, int]:
    """The bf16 kernel made of this kernel's text, the same compiled alone, and how often the compiler ran for these."""
    lowered, count = compiling._lowered, 0

    def counted(variant: compiling.Buildable, plan: Specialisation) -> tuple[str, dict[str, Any]]:
        nonlocal count
        count += 1
        return lowered(variant, plan)

    twin = products.twin_of(variant)
    assert twin is not None
    compiling._lowered = counted
    try:
        compiling._known.clear()
        compile_variant(variant, "key")
        renamed = compile_variant(twin, "key")
        compiling._known.clear()
        return renamed, compile_variant(twin, "key"), count
    finally:
        compiling._lowered = lowered


def _one_of_each_kind() -> list[Variant]:
    """One fp16 kernel of the default sets for each family, role, epilogue and kind of guards, in clusters and not.

    It is that of the smallest tile, which compiles fastest.
    """
    found: dict[object, Variant] = {}

    def size(row: Variant) -> int:
        return row.config.block_m * row.config.block_n * row.config.block_k

    for arch in ("sm80", "sm90"):
        for row in variants(config_set("default"), target(arch)):
            if products.twin_of(row) is not None:
                kind = arch, row.family, row.role, row.epilogue, row.aligned, row.layout == "any", row.num_ctas > 1
                found[kind] = min(found.get(kind, row), row, key=size)
    return list(found.values())


@pytest.mark.parametrize("variant", _one_of_each_kind(), ids=lambda variant: f"{variant.target.name}-{variant.name}")
def test_a_twin_is_as_if_compiled_alone(variant: Variant) -> None:
    """A bf16 kernel made of the text of its fp16 twin has the entry and bytes of one compiled alone."""
    renamed, alone, lowered = in_worker(_after_its_twin, variant)
    assert renamed == alone
    assert lowered == 2, "the twin was not made of the text"


def test_which_kernels_have_twins() -> None:
    """Kernels with fp8, with bf16 or without fp16, for AMD, and of users' own families have none."""
    twin = products.twin_of(dataclasses.replace(FP16, dtype_c="fp32"))
    assert twin is not None
    assert (twin.dtype_a, twin.dtype_b, twin.dtype_c) == ("bf16", "bf16", "fp32")
    for changes in (
        {"dtype_a": "fp8e4", "dtype_b": "fp8e4"},
        {"dtype_c": "bf16"},
        {"dtype_a": "fp32", "dtype_b": "fp32", "dtype_c": "fp32"},
        {"target": target("gfx90a")},
        {"family": "mine.rowvector"},
    ):
        assert products.twin_of(dataclasses.replace(FP16, **changes)) is None, changes


def _in_shapes(family: str, epilogue: str) -> list[Variant]:
    """The fp16 kernels of one tile of a block in clusters of every shape."""
    m, n, warps = {"cooperative": (128, 64, 8), "pingpong": (64, 96, 8), "swapped": (104, 64, 4)}[family]
    made = dataclasses.replace(FP16, target=target("sm90"), family=family, layout="nt", epilogue=epilogue)
    return [
        dataclasses.replace(made, config=Config(m * down, n * across, 64, 3, warps, cluster_m=down, cluster_n=across))
        for down, across in SHAPES
        if down * across > 1
    ]


def _as_bf16(variant: Variant) -> Variant:
    return dataclasses.replace(variant, dtype_a="bf16", dtype_b="bf16", dtype_c="bf16")


def _texts(rows: list[Variant]) -> list[str]:
    """The PTX of each, compiled for itself."""
    return [compiling._lowered(row, module_of(row.family).specialise(row))[0] for row in rows]


def _together(rows: list[Variant]) -> tuple[list[Compiled], Counter[str]]:
    """The kernels of a process that compiles one after the other, and how often compiler and assembler ran."""
    stages, ran = compiling._stages, Counter[str]()

    def counting(word: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            ran[word] += 1
            return step(*arguments)

        return run

    def counted(variant: compiling.Buildable, plan: Specialisation) -> compiling._Stages:
        found = stages(variant, plan)
        first, *others = found.lower
        lower = [counting("compiler", first), *others]
        return found._replace(lower=lower, assemble=counting("assembler", found.assemble))

    compiling._known.clear()
    compiling._stages = counted
    try:
        return [compile_variant(row, "key") for row in rows], ran
    finally:
        compiling._stages = stages


@pytest.mark.parametrize("epilogue", ["none", "bias", "bias_relu"])
@pytest.mark.parametrize("family", ["cooperative", "pingpong", "swapped"])
def test_one_image_for_all_shapes_of_a_cluster(family: str, epilogue: str) -> None:
    """Kernels of one tile in clusters of any shape have the same text: one is compiled for all, and for bf16 too."""
    rows = _in_shapes(family, epilogue)
    assert len(set(in_worker(_texts, rows))) == 1
    twins = [_as_bf16(row) for row in rows]
    made, ran = in_worker(_together, [*rows, *twins])
    assert ran == {"compiler": 1, "assembler": 2}
    images = [item.image for item in made]
    assert images == [images[0]] * len(rows) + [images[-1]] * len(rows)
    assert images[0] != images[-1]
    for row, item in zip([*rows, *twins], made, strict=True):
        assert (item.kernel.name, item.kernel.config) == (row.name, row.config)
        size, _ = item.kernel.attributes
        assert (size.name, size.value) == ("cluster_dimension", (row.config.cluster_m, row.config.cluster_n, 1))


def test_tasks_of_compilers() -> None:
    """All shapes of a cluster are one task, and their twins follow; other tiles and lone blocks have their own."""
    shapes, single = _in_shapes("cooperative", "none"), dataclasses.replace(FP16, target=target("sm90"))
    other = [dataclasses.replace(row, config=dataclasses.replace(row.config, num_stages=4)) for row in shapes[:2]]
    rows = [*shapes, single, *other]
    mixed = [*map(_as_bf16, reversed(rows)), *rows]
    keys = {row: str(number) for number, row in enumerate(mixed)}
    found = {tuple(row for row, _ in task) for task in building._tasks(list(keys.items()))}
    wanted = {
        (*shapes, *map(_as_bf16, reversed(shapes))),
        (single, _as_bf16(single)),
        (*other, *map(_as_bf16, reversed(other))),
    }
    assert found == wanted
    assert building._tasks([(_as_bf16(single), "key")]) == [[(_as_bf16(single), "key")]]


def test_an_image_is_stored_once() -> None:
    """The library of a pack has one image for all shapes of a cluster, which their entries share."""
    folder = clusters_pack()
    pack, code = open_pack(folder).manifest, code_in(folder)
    shared = [kernel.image for kernel in pack.kernels if kernel.num_ctas > 1]
    assert len(shared) == len(SHAPES) - 1
    assert len(set(shared)) == 1
    others = {kernel.image for kernel in pack.kernels} - {*shared}
    assert {entry.sha256 for entry in others}.isdisjoint({shared[0].sha256})
    assert pack.images.bytes == sum(room(entry.bytes) for entry in (*others, shared[0]))
    assert hashlib.sha256(code(shared[0])).hexdigest() == shared[0].sha256
    assert [found.violations for found in verify(folder)] == [()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epilogue": "full"},
        {"target": target("sm90")},
        {"target": target("sm90"), "dtype_a": "fp8e4", "dtype_b": "fp8e5", "epilogue": "full"},
        {"target": target("sm90"), "dtype_a": "tf32", "dtype_b": "tf32", "dtype_c": "fp32", "layout": "nt"},
        {"target": target("sm100")},
        {"family": "copy", "role": "copy"},
    ],
    ids=str,
)
def test_passes_that_are_left_out_change_nothing(changes: dict[str, Any]) -> None:
    """Kernels without clusters, tensor maps and tensor memory have the same bytes as with all of Triton's passes."""
    variant = dataclasses.replace(FP16, **changes)
    assert in_worker(_as_built, variant) == in_worker(_with_every_pass, variant)


@pytest.mark.parametrize("arch", SHIPPED)
def test_text_beside_the_image(arch: str) -> None:
    """Where an arch ships text, it is PTX of the version that its oldest driver reads, for that arch, without paths."""
    folder, row = default_pack(arch), target(arch)
    code = code_in(folder)
    for entry in open_pack(folder).manifest.kernels:
        assert (entry.ptx is None) == (row.ptx_version is None)
        if entry.ptx is not None and row.ptx_version is not None:
            text = code(entry.ptx).decode()
            assert f".version {row.ptx_version // 10}.{row.ptx_version % 10}\n" in text
            assert f".target sm_{arch[2:]}\n" in text
            assert ".loc" not in text
            assert ".file" not in text


@pytest.mark.parametrize(
    "variant",
    [
        FP16,
        dataclasses.replace(FP16, layout="tt", dtype_c="fp32"),
        dataclasses.replace(FP16, layout="any"),
        dataclasses.replace(FP16, layout="nt", aligned=False, epilogue="full"),
        dataclasses.replace(FP16, dtype_a="int8", dtype_b="int8", dtype_c="int32", layout="tt"),
        dataclasses.replace(
            FP16,
            target=target("sm90"),
            dtype_a="fp8e4",
            dtype_b="fp8e5",
            layout="nt",
            epilogue="bias_relu",
            fast_accum=True,
        ),
        dataclasses.replace(FP16, target=target("sm90"), dtype_a="fp8e4", dtype_b="fp8e4", layout="nt"),
        dataclasses.replace(FP16, dtype_a="tf32", dtype_b="tf32", dtype_c="fp32", layout="tn"),
        dataclasses.replace(FP16, target=target("gfx90a"), dtype_a="bf16", dtype_b="bf16", dtype_c="bf16"),
    ],
    ids=lambda variant: f"{variant.target.name}-{variant.dtype_a}-{variant.layout}-{variant.epilogue}",
)
@own_process
def test_guards_are_what_the_compiler_was_told(variant: Variant) -> None:
    """Each assumption handed to the compiler is a guard in the manifest, and each guard was handed over."""
    entry = compile_variant(variant, "key").kernel
    source = compiling._stages(variant, module_of(variant.family).specialise(variant)).source
    names = source.fn.arg_names
    expected = {
        (names[place[0]], "multiple_of", number)
        for place, attributes in source.attrs.items()
        for kind, number in attributes
        if kind == "tt.divisibility"
    }
    buffers = {names[place[0]] for place, hints in source.attrs.items() if ["tt.pointer_range", 32] in hints}
    assert len(expected) + len(buffers) == sum(len(attributes) for attributes in source.attrs.values())
    assert buffers == ({"a_ptr", "b_ptr"} if variant.target.backend == "hip" and variant.layout != "any" else set())
    reach = (2**31 - 16) // DTYPES[variant.dtype_a].bytes
    expected |= {(f"{name.removesuffix('_ptr')}_reach", "below", reach) for name in buffers}
    expected |= {
        (names[place[0]], "equals", value)
        for place, value in source.constants.items()
        if names[place[0]] in PRODUCT_QUANTITIES and value is not None
    }
    if variant.dtype_a.startswith("fp8"):  # whose block scales are the constant None
        expected.add(("block_scale_a_ptr", "equals", 0))
    narrow = [name for name, type_ in source.signature.items() if type_ == "i32" and name != "group_m"]
    expected |= {(name, "below", I32_LIMIT) for name in narrow}
    if narrow:
        expected |= {(f"{matrix}_extent", "below", 2**31) for matrix in "abc"}
    if variant.dtype_a == "tf32":
        expected.add(("allow_tf32", "equals", 1))
    if variant.fast_accum:
        expected.add(("fast_accum", "equals", 1))
    assert {(p.value, p.relation, p.operand) for p in entry.guards} == expected
    assert len(entry.guards) == len(expected)
    assert bool(narrow) == (variant.layout != "any")
    assert bool([1 for _, relation, _ in expected if relation == "multiple_of"]) == (
        variant.aligned and variant.layout != "any"
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp8e5", "int8"])
def test_generic_kernels_guard_nothing(dtype: str) -> None:
    """Kernels that take any product guard the permission that tf32 needs, and whether fp8 has block scales, alone."""
    pack = open_pack(default_pack("sm80")).manifest
    kernels = [k for k in pack.kernels if (k.role, k.dtype_a, k.layout) == ("product", dtype, "any")]
    guards = {(p.value, p.relation, p.operand) for k in kernels for p in k.guards}
    assert kernels
    blocks = {("block_scale_a_ptr", "equals", 0), ("block_scale_a_ptr", "at_least", 1)}
    assert guards == {"tf32": {("allow_tf32", "equals", 1)}, "fp8e5": blocks}.get(dtype, set())


def test_tf32_operands_are_rounded() -> None:
    """Every tile kernel for tf32 rounds its operands to nearest, in the text that newer GPUs compile too."""
    folder = default_pack("sm80")
    code = code_in(folder)
    kernels = [each for each in open_pack(folder).manifest.kernels if each.dtype_a == "tf32"]
    assert {each.role for each in kernels} == {"product", "partial", "grouped_m", "grouped_k"}
    assert [each.name for each in kernels if each.ptx is None or b"cvt.rna.tf32.f32" not in code(each.ptx)] == []


def test_key_depends_on_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The key changes with every field of the variant, the sources, the tools, this step's code, and only then."""

    def changed(**fields: Any) -> Variant:
        return dataclasses.replace(FP16, **fields)

    sm80 = target("sm80")
    told = sm80._replace(executed_on="paper")
    assert key(FP16, "s", "a") == key(dataclasses.replace(FP16), "s", "a") == key(changed(target=told), "s", "a")
    found = [
        key(variant, "s", "a")
        for variant in (
            FP16,
            changed(target=target("sm90")),
            changed(target=sm80._replace(ptx_version=81)),
            changed(family="other"),
            changed(dtype_a="bf16"),
            changed(dtype_b="bf16"),
            changed(dtype_c="bf16"),
            changed(layout="nt"),
            changed(aligned=False),
            changed(epilogue="bias_relu"),
            changed(epilogue="full"),
            changed(fast_accum=True),
            changed(source="elsewhere"),
            *(
                changed(config=dataclasses.replace(FP16.config, **{field.name: 1 + getattr(FP16.config, field.name)}))
                for field in dataclasses.fields(Config)
            ),
        )
    ]
    found += [key(FP16, "t", "a"), key(FP16, "s", "b")]
    monkeypatch.setattr(compiling, "FP_FUSION", not compiling.FP_FUSION)
    found.append(key(FP16, "s", "a"))
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "3.10.0")
    found.append(key(FP16, "s", "a"))
    (tmp_path / "compile.py").write_text("")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compile.py"))
    found.append(key(FP16, "s", "a"))
    assert len(set(found)) == len(found)


def test_digest_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sources' digest changes with any file's name or content, and with the vocabulary."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (tmp_path / "problem.py").write_text("")
    monkeypatch.setattr(sources, "__file__", str(folder / "__init__.py"))
    found = [kernel_sources()]
    for name, text in (("a.py", ""), ("a.py", "1"), ("b.py", "1"), ("ab.py", "1")):
        (folder / name).write_text(text)
        found.append(kernel_sources())
    (folder / "a.py").rename(folder / "c.py")
    found.append(kernel_sources())
    (tmp_path / "problem.py").write_text("ROLES = ()")
    found.append(kernel_sources())
    assert len(set(found)) == len(found)


def test_digest_of_a_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A family's digest changes with its own file and with what it imports, directly or not, and with nothing else."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    texts = {
        "__init__": "",
        "one": "from aotmm.kernels.epilogue import finish",
        "two": "from aotmm.kernels import Variant, shared\nfrom aotmm.kernels.one import one",
        "shared": "def shared(): from aotmm.kernels import deep",
        "deep": "import triton",
        "epilogue": "import math",
        "other": "from aotmm.kernels.one import one",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (tmp_path / "problem.py").write_text("")
    monkeypatch.setattr(sources, "__file__", str(folder / "__init__.py"))
    before = {name: kernel_sources(name) for name in ("one", "two")}
    assert len({*before.values(), kernel_sources()}) == 3

    def moved(path: Path) -> set[str]:
        text = path.read_text()
        path.write_text(f"{text}\n")
        found = {name for name in before if kernel_sources(name) != before[name]}
        path.write_text(text)
        return found

    assert {name: moved(folder / f"{name}.py") for name in texts} == {
        "__init__": {"one", "two"},
        "one": {"one", "two"},
        "two": {"two"},
        "shared": {"two"},
        "deep": {"two"},
        "epilogue": {"one", "two"},
        "other": set(),
    }
    assert moved(tmp_path / "problem.py") == {"one", "two"}


def test_modules_that_families_use() -> None:
    """Families for Hopper share all of theirs, and nothing of it is in the others; none is imported for that."""
    folder = Path(sources.__file__).parent

    def used(name: str) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in products._used_by(name, folder)}

    hopper = {path.relative_to(folder).as_posix() for path in (folder / "hopper").glob("*.py")}
    assert used("tile") == {"__init__.py", "tile.py", "epilogue.py", "order.py"}
    for name in sources.WARP_SPECIALISED:
        assert used(name) == {"__init__.py", "epilogue.py", "order.py", *hopper}
    program = "import sys; from aotmm.build.products import kernel_sources as of; of('swapped'); print(*sys.modules)"
    assert "triton" not in run_python(program).stdout.split()


def specialisation(types: dict[str, str], descriptors: dict[str, Descriptor] | None = None) -> Specialisation:
    """Of a function whose arguments are the descriptors, then `types`."""
    described = descriptors or {}
    return Specialisation(SimpleNamespace(arg_names=[*described, *types]), types, {}, descriptors=described)


def test_parameters_that_nobody_knows() -> None:
    """A binary with another parameter list than ours is refused, not guessed: its Triton is not supported."""
    plan, metadata = specialisation({"a_ptr": "*fp16", "M": "i32"}), {"global_scratch_size": 0}
    good = (
        ".visible .entry tile(\n.param .u64 .ptr tile_0,\n.param .u32 tile_1,\n.param .u64 .ptr tile_2, .param .u64 x)"
    )
    slots = [(p.name, p.offset, p.bytes) for p in parameters.parameters(target("sm80"), good, "tile", plan, metadata)]
    assert slots == [("a_ptr", 0, 8), ("M", 8, 4), ("global_scratch", 16, 8), ("profile_scratch", 24, 8)]
    for wrong in (
        good.replace(".u32", ".u64"),
        good.replace(", .param .u64 x", ""),
        good.replace("x)", "x,.param .u8 y)"),
    ):
        with pytest.raises(CompileError, match="this version of Triton is not supported"):
            parameters.parameters(target("sm80"), wrong, "tile", plan, metadata)


def test_parameters_of_a_tensor_map() -> None:
    """A tensor descriptor takes its 128 bytes at a multiple of 64, its sizes and its strides; pointers may be tagged.

    The box is that of one transfer, as the compiler says it, which may be less than the kernel asks for.
    """
    text = """.visible .entry late(
	.param .u32 late_param_0,
	.param .align 64 .b8 late_param_1[128],
	.param .u32 late_param_2,
	.param .u32 late_param_3,
	.param .u32 late_param_4,
	.param .u64 late_param_5,
	.param .u64 late_param_6,
	.param .u64 late_param_7,
	.param .u64 .ptr .global .align 1 late_param_8,
	.param .u64 .ptr .global .align 1 late_param_9,
	.param .u64 .ptr .global .align 1 late_param_10
)
"""
    row = Descriptor("b_ptr", "bf16", ("batch", "K", "N"), ("stride_bz", "stride_bk", "stride_bn"), (64, 256))
    plan = dataclasses.replace(
        specialisation({"M": "i32", "bias_ptr": "*bf16"}, {"y_desc": row}),
        function=SimpleNamespace(arg_names=["M", "y_desc", "bias_ptr"]),
    )
    transfer = {"block_size": [1, 64, 64], "swizzle": 3, "elem_size": 2}
    metadata = {"global_scratch_size": 512, "tensordesc_meta": [transfer]}
    found = parameters.parameters(target("sm90"), text, "late", plan, metadata)
    tensor_map = TensorMap("bf16", "N", "K", "batch", "stride_bk", "stride_bz", 64, 64, 3)
    assert found == (
        Parameter("M", "i32", "M", 0, 4),
        Parameter("y_desc", "tensordesc", "b_ptr", 64, 128, tensor_map),
        Parameter("y_desc.batch", "i32", "batch", 192, 4),
        Parameter("y_desc.K", "i32", "K", 196, 4),
        Parameter("y_desc.N", "i32", "N", 200, 4),
        Parameter("y_desc.stride_bz", "i64", "stride_bz", 208, 8),
        Parameter("y_desc.stride_bk", "i64", "stride_bk", 216, 8),
        Parameter("y_desc.stride_bn", "i64", "stride_bn", 224, 8),
        Parameter("bias_ptr", "*bf16", "bias_ptr", 232, 8),
        Parameter("global_scratch", "*i8", "global_scratch", 240, 8),
        Parameter("profile_scratch", "*i8", "zero", 248, 8),
    )
    for wrong in (text.replace("[128]", "[64]"), text.replace("b8 late_param_1[128]", "b64 late_param_1")):
        with pytest.raises(CompileError, match="this version of Triton is not supported"):
            parameters.parameters(target("sm90"), wrong, "late", plan, metadata)


@pytest.mark.parametrize(
    ("declared", "slots"),
    [
        (".param .u32 f_0,.param .align 64 .b8 f_1[128],.param .u32 f_2", [(0, 4), (64, 128), (192, 4)]),
        (".param .u64 .ptr .global .align 1 f_0,.param .u32 f_1", [(0, 8), (8, 4)]),
        (".param .u32 f_0,.param .u64 .ptr .global .align 1 f_1", [(0, 4), (8, 8)]),
        (".param .u32 f_0,.param .u64 .ptr .global .align 16 f_1,.param .f32 f_2", [(0, 4), (8, 8), (16, 4)]),
    ],
    ids=["tensor-map", "pointer", "after-a-size", "pointee-of-16"],
)
def test_slots_of_ptx(declared: str, slots: list[tuple[int, int]]) -> None:
    """An array has its alignment; what a pointer says of its pointee's alignment does not move the pointer."""
    assert parameters._ptx_slots(f".visible .entry f(\n{declared}\n)\n", "f") == slots


@own_process
def test_profile_scratch_is_refused() -> None:
    """A kernel that wants profile scratch, which no launch gives, does not compile, and the error says for what."""
    lowered = compiling._lowered

    def instrumented(variant: compiling.Buildable, plan: Specialisation) -> tuple[str, dict[str, Any]]:
        text, metadata = lowered(variant, plan)
        return text, metadata | {"profile_scratch_size": 256}

    compiling._lowered = instrumented
    try:
        with pytest.raises(CompileError, match=rf"sm80: {FP16.name} needs 256 B of profile scratch.* out of it$"):
            compile_variant(FP16, "key")
    finally:
        compiling._lowered = lowered


def test_every_cause_of_an_error() -> None:
    """What failed to compile says why: Triton's outermost error names a call, the innermost what is wrong there."""

    def fail(depth: int) -> None:
        if depth == 0:
            raise ValueError("no such layout")
        try:
            fail(depth - 1)
        except ValueError as error:
            raise ValueError(f"at line {depth}") from error

    with pytest.raises(ValueError, match="at line 2") as caught:
        fail(2)
    assert compiling._words(caught.value) == "ValueError: at line 2\ncaused by ValueError: no such layout"
    assert compiling._words(ValueError("alone")) == "ValueError: alone"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the error says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    advice = installed(monkeypatch)
    with pytest.raises(SpecError) as caught:
        compiling.toolchain()
    assert str(caught.value) == f"aotmm build needs Triton{advice}"


def test_options_are_the_targets() -> None:
    """AMD's options go to AMD's compiler alone, and the PTX version only where text is shipped."""
    common, of_amd = {"num_warps", "num_stages", "enable_fp_fusion"}, {"waves_per_eu", "matrix_instr_nonkdim", "kpack"}
    for row in TARGETS.values():
        found = set(compiling.options(dataclasses.replace(FP16, target=row)))
        more = of_amd if row.backend == "hip" else {"ptx_version"} if row.name == "sm80" else set()
        assert found == common | more


def test_every_default_variant_has_its_own_key() -> None:
    """No two variants of the default sets share a key."""
    keys = [key(variant, "s", "a") for row in TARGETS.values() for variant in variants(config_set("default"), row)]
    assert len(set(keys)) == len(keys)
