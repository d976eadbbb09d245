"""Config sets: what they expand to, and what a wrong one is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aotmm import kernels
from aotmm.build.variants import BACKENDS, FAMILIES, ConfigSet, config_set, set_names
from aotmm.build.variants import variants as all_variants
from aotmm.errors import SpecError
from aotmm.kernels import Variant
from aotmm.pack.schema import Config
from aotmm.problem import INPUTS, LAYOUTS, OUTPUTS
from aotmm.target import TARGETS, Target, target

# Triton tutorial 03, copied by hand: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps
TUTORIAL_CUDA = {
    (128, 256, 64, 3, 8),
    (64, 256, 32, 4, 4),
    (128, 128, 32, 4, 4),
    (128, 64, 32, 4, 4),
    (64, 128, 32, 4, 4),
    (128, 32, 32, 4, 4),
    (64, 32, 32, 5, 2),
    (32, 64, 32, 5, 2),
    (128, 256, 128, 3, 8),
    (256, 128, 128, 3, 8),
    (256, 64, 128, 4, 4),
    (64, 256, 128, 4, 4),
    (128, 128, 128, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 32, 64, 4, 4),
}
TUTORIAL_HIP = {  # and waves_per_eu
    (128, 256, 16, 0, 4, 2),
    (256, 256, 16, 0, 8, 2),
    (128, 128, 32, 0, 8, 2),
    (64, 128, 32, 0, 4, 3),
    (64, 64, 32, 0, 4, 8),
}
CLASSIC = {  # BLOCK_M, BLOCK_N, BLOCK_K, num_warps
    (128, 128, 32, 4),
    (64, 128, 32, 4),
    (128, 64, 32, 4),
    (64, 64, 64, 4),
    (32, 128, 64, 4),
    (128, 32, 64, 4),
    (64, 32, 64, 2),
    (32, 64, 64, 2),
}
TILE = """
[[config]]
block_m = 64
block_n = 64
block_k = 32
num_warps = 4
"""
HEADER = 'source = "tests"\n'
SPLIT = TILE + "split = true\n"
FMA = (
    '[[config]]\nfamily = "fma"\narchs = ["sm80"]\ndtypes = ["fp32"]\n'
    "block_m = 32\nblock_n = 32\nblock_k = 16\nnum_warps = 1\n"
)
MULTISTAGE = (
    '[[config]]\nfamily = "multistage"\narchs = ["sm80"]\ndtypes = ["fp16"]\n'
    "block_m = 64\nblock_n = 64\nblock_k = 32\nnum_warps = 4\n"
)
TALL_FP8 = (
    '[[config]]\nfamily = "cooperative"\narchs = ["sm90"]\ndtypes = ["fp8e4"]\n'
    "block_m = 256\nblock_n = 64\nblock_k = 64\nnum_warps = 4\n"
)
WGMMA = TILE + 'family = "cooperative"\narchs = ["sm90"]\ndtypes = ["fp16"]\n'


def variants(chosen: ConfigSet, row: Target, dtypes: tuple[str, ...] = ()) -> list[Variant]:
    """What a set has for an arch, without the kernels that work for others."""
    return [v for v in all_variants(chosen, row, dtypes) if v.role in ("product", "partial")]


def helpers(chosen: ConfigSet, arch: str) -> set[tuple[str, str, str, str, str]]:
    """The kernels that work for others: family, type of what they read and write, layout, epilogue."""
    found = [v for v in all_variants(chosen, target(arch)) if v.role not in ("product", "partial")]
    assert all(v.role == v.family for v in found)
    return {(v.family, v.dtype_a, v.dtype_c, v.layout, v.epilogue) for v in found}


def numbers(config: Config, *more: str) -> tuple[int, ...]:
    """A config's numbers in the order of the tables above."""
    names = ("block_m", "block_n", "block_k", "num_stages", "num_warps", *more)
    return tuple(getattr(config, name) for name in names)


def written(folder: Path, text: str) -> ConfigSet:
    """The config set in a file with `text`."""
    path = folder / "mine.toml"
    path.write_text(text)
    return config_set(str(path))


# ------------------------------------------------------------------------------------------------- sets of aotmm's own
def test_set_names() -> None:
    """The sets that come along; the generic kernels are part of each and not a set."""
    assert set_names() == ["classic", "default", "tutorial"]


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_tutorial_on_cuda(arch: str) -> None:
    """The tutorial set has exactly the sixteen CUDA tiles of the tutorial, for fp16 and fp8, with both epilogues."""
    found = [v for v in variants(config_set("tutorial"), target(arch)) if v.layout != "any"]
    assert {numbers(v.config) for v in found} == TUTORIAL_CUDA
    assert {(v.dtype_a, v.epilogue, v.layout) for v in found} == {
        (dtype, epilogue, "nn") for dtype in ("fp16", "fp8e5") for epilogue in ("none", "bias_relu")
    }
    assert len(found) == 16 * 2 * 2


def test_tutorial_on_hip() -> None:
    """The tutorial set has exactly the five HIP tiles of the tutorial, with the occupancy hint of each."""
    found = [v for v in variants(config_set("tutorial"), target("gfx90a")) if v.layout != "any"]
    assert {numbers(v.config, "waves_per_eu") for v in found} == TUTORIAL_HIP
    assert len(found) == 5 * 2 * 2


def test_classic() -> None:
    """The classic set is eight tiles with both epilogues and one generic kernel: 17 kernels for fp16 on sm80."""
    found = variants(config_set("classic"), target("sm80"), ("fp16",))
    assert len(found) == 8 * 2 + 1
    assert {v.epilogue for v in found if v.layout != "any"} == {"none", "bias_relu"}
    assert [v.epilogue for v in found if v.layout == "any"] == ["bias_relu"]  # stands in for none
    tiles = {(*numbers(v.config)[:3], v.config.num_warps) for v in found if v.layout != "any"}
    assert tiles == CLASSIC


@pytest.mark.parametrize("arch", TARGETS)
def test_default(arch: str) -> None:
    """The default set has each type of the arch in each layout, and one generic kernel for each output type.

    16- and 32-bit types can have every epilogue, and split K, in every layout; mixed fp8 comes in its tensor cores' own
    layout alone. Every type has a generic kernel that splits K.
    """
    found = variants(config_set("default"), target(arch))
    special = {(inputs(v), v.layout) for v in found if v.layout != "any" and v.aligned}
    dtypes = TARGETS[arch].dtypes
    assert special == {(dtype, layout) for dtype in dtypes for layout in (("nt",) if "-" in dtype else LAYOUTS)}
    # in Hopper's families a bias costs nothing, so it stands in for none
    wide = {
        (v.dtype_a, v.layout, "none" if v.epilogue == "bias" else v.epilogue, v.role)
        for v in found
        if v.layout != "any" and v.aligned
    }
    kinds = [("full", "product"), ("none", "partial")]  # smooth stands in for linear, and on AMD's GPUs for none
    if target(arch).backend == "cuda":
        kinds.append(("none", "product"))
    assert {
        (dtype, layout, *kind) for dtype in ("fp16", "bf16", "fp32") for layout in LAYOUTS for kind in kinds
    } <= wide
    blocks = {(inputs(v), v.dtype_c, v.epilogue) for v in found if v.layout == "any" and v.block_scales}
    scaled = {inputs(v) for v in found if v.layout != "any" and v.block_scales}
    with_sums = [*((out, "full") for out in OUTPUTS), ("fp32", "none")]  # the last are partial
    assert blocks == {(dtype, *kind) for dtype in scaled for kind in with_sums}
    found = [v for v in found if not v.block_scales]
    generic = sorted((inputs(v), v.dtype_c, v.epilogue) for v in found if v.layout == "any" and v.role == "product")
    partial = sorted((inputs(v), v.dtype_c) for v in found if v.layout == "any" and v.role == "partial")
    assert partial == sorted((dtype, "int32" if dtype == "int8" else "fp32") for dtype in dtypes)
    assert generic == sorted(
        (dtype, out, "none" if dtype == "int8" else "full")
        for dtype in dtypes
        for out in (("int32",) if dtype == "int8" else OUTPUTS)
    )
    narrow = {(v.dtype_a, v.layout) for v in found if not v.aligned}
    assert narrow >= {(dtype, layout) for dtype in ("fp16", "bf16") for layout in LAYOUTS}
    assert {v.target.name for v in found if v.fast_accum} <= {"sm90"}
    assert {v.dtype_a[:3] for v in found if v.fast_accum} <= {"fp8"}
    assert all(v.source for v in found)


def test_tiles_of_multistage() -> None:
    """Each is family `tile`'s instead in the packs for GPUs whose blocks have less shared memory, and nowhere both."""

    def tiles(arch: str, family: str) -> set[tuple[object, ...]]:
        found = variants(config_set("default"), target(arch))
        return {(v.role, v.dtype_a, v.layout, v.epilogue, v.config) for v in found if v.family == family and v.aligned}

    made = tiles("sm80", "multistage")
    sizes = {(config.block_m, config.block_n) for *_, config in made}  # type: ignore[attr-defined]
    assert sizes == {(128, 256), (256, 128)}
    for arch in (name for name, row in TARGETS.items() if row.like == "sm80"):
        small = target(arch).shared_bytes < target("sm80").shared_bytes
        assert tiles(arch, "multistage") == made, "the build drops those that need more than there is"
        assert made & tiles(arch, "tile") == (made if small else set()), arch
    assert not made & tiles("sm80", "tile")
    assert not tiles("sm90", "multistage") | tiles("gfx90a", "multistage")


def inputs(variant: Variant) -> str:
    """The input type of a variant."""
    same = variant.dtype_a == variant.dtype_b
    return variant.dtype_a if same else f"{variant.dtype_a}-{variant.dtype_b}"


@pytest.mark.parametrize("name", ["classic", "default", "tutorial"])
@pytest.mark.parametrize("arch", TARGETS)
def test_order_and_names(arch: str, name: str) -> None:
    """Kernels come ordered by name, each name once, and only for the backend of the arch."""
    found = [v.name for v in all_variants(config_set(name), target(arch))]
    assert found == sorted(set(found))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_types_instead_of_those_of_the_set(dtype: str) -> None:
    """Types that are asked for take the place of the set's own: its tiles are built for them."""
    found = variants(config_set("classic"), target("sm80"), (dtype,))
    assert {v.dtype_a for v in found} == {dtype}
    assert len(found) == 17


def test_int8_has_no_epilogue_and_one_output() -> None:
    """Whatever a set asks for, int8 gives int32 as it is summed."""
    found = variants(config_set("classic"), target("sm80"), ("int8",))
    assert {(v.dtype_b, v.dtype_c, v.epilogue) for v in found} == {("int8", "int32", "none")}
    assert len(found) == 8 + 1


def test_mixed_types() -> None:
    """A pair of types is built with the first for A and the second for B."""
    found = variants(config_set("classic"), target("sm90"), ("fp8e4-fp8e5",))
    assert {(v.dtype_a, v.dtype_b, v.dtype_c) for v in found} == {("fp8e4", "fp8e5", "fp16")}
    assert all("_fp8e4_fp8e5_fp16_" in v.name for v in found)


def test_fast_accumulation_is_for_tensor_cores_that_have_it(tmp_path: Path) -> None:
    """An entry with fast_accum is built for Hopper only; its kernels are called so."""
    text = 'source = "mine"\ndtypes = ["fp8e5"]\nlayouts = ["nt"]\nepilogues = ["none"]\n'
    chosen = written(tmp_path, text + TILE + 'dtypes = ["fp8e5"]\nfast_accum = true\n')
    found = [v for v in variants(chosen, target("sm90")) if v.layout != "any"]
    assert [(v.name, v.fast_accum) for v in found] == [("tile_fp8e5_fp16_nt_64x64x32_s3_w4_none_fast", True)]
    for arch in ("sm80", "gfx90a"):
        assert [v.layout for v in variants(chosen, target(arch))] == ["any"]


def test_narrow_kernels(tmp_path: Path) -> None:
    """An entry that is not aligned gives kernels of their own name, in its layouts."""
    text = HEADER + 'dtypes = ["fp16"]\nlayouts = ["nn"]\nepilogues = ["none"]\n' + TILE + "aligned = false\n" + TILE
    found = [v for v in variants(written(tmp_path, text), target("sm80")) if v.layout != "any"]
    assert [(v.name, v.aligned) for v in found] == [
        ("tile_fp16_fp16_nn_64x64x32_s3_w4_none", True),
        ("tile_fp16_fp16_nn_64x64x32_s3_w4_none_unaligned", False),
    ]


def test_block_scales(tmp_path: Path) -> None:
    """An entry with block scales is called so; its types get generic kernels with them as well, and split ones."""
    top = HEADER + 'epilogues = ["none"]\nlayouts = ["nt"]\noutputs = ["bf16"]\ndtypes = ["fp8e5", "fp8e4"]\n'
    text = top + TILE + 'dtypes = ["fp8e4"]\noutputs = ["bf16"]\nblock_scales = "any"\n' + SPLIT
    found = [v for v in variants(written(tmp_path, text), target("sm90")) if v.block_scales]
    assert {v.block_scales for v in found} == {"any"}
    assert [v.name for v in found] == [
        "tile_fp8e4_bf16_any_64x64x32_s2_w4_none_blocks_any",
        "tile_fp8e4_bf16_nt_64x64x32_s3_w4_none_blocks_any",
        "tile_fp8e4_fp16_any_64x64x32_s2_w4_none_blocks_any",
        "tile_fp8e4_fp32_any_64x64x32_s2_w4_none_blocks_any",
        "tile_fp8e4_fp32_any_64x64x32_s2_w4_none_blocks_any_split",
    ]
    assert found[1].config_name == "tile_64x64x32_s3_w4", "the config of kernels without"


# ----------------------------------------------------------------------------------------------------- split K, copies
def test_partial_sums(tmp_path: Path) -> None:
    """An entry that splits K gives one kernel per layout and type, in the type of the sums and without an epilogue.

    A set that has one has a generic kernel of each type that splits K, too; others have none.
    """
    text = HEADER + 'dtypes = ["fp16", "int8"]\nlayouts = ["nn", "tt"]\n'
    found = variants(written(tmp_path, text + SPLIT), target("sm80"))
    assert [(v.name, v.role, v.dtype_c, v.epilogue) for v in found if v.layout != "any"] == [
        (f"tile_{types}_{layout}_64x64x32_s3_w4_none_split", "partial", types.split("_")[1], "none")
        for types in ("fp16_fp32", "int8_int32")
        for layout in ("nn", "tt")
    ]
    generic = [(v.dtype_a, v.dtype_c, v.epilogue) for v in found if v.layout == "any" and v.role == "partial"]
    assert generic == [("fp16", "fp32", "none"), ("int8", "int32", "none")]
    assert {v.role for v in variants(written(tmp_path, text + TILE), target("sm80"))} == {"product"}


def test_partial_sums_are_added_up(tmp_path: Path) -> None:
    """A set that splits K has reductions to all that its generic kernels write, with their epilogue."""
    text = HEADER + 'dtypes = ["fp16", "int8"]\nepilogues = ["bias_relu"]\noutputs = ["bf16"]\n'
    found = helpers(written(tmp_path, text + SPLIT), "sm80")
    assert {item for item in found if item[0] == "reduce"} == {
        ("reduce", "fp32", output, layout, "bias_relu")
        for output in ("fp16", "bf16", "fp32")
        for layout in ("nn", "any")
    } | {("reduce", "int32", "int32", layout, "none") for layout in ("nn", "any")}
    assert not {item for item in helpers(written(tmp_path, text + TILE), "sm80") if item[0] == "reduce"}


def test_copies(tmp_path: Path) -> None:
    """A set with kernels that need aligned rows has copies of every width that they read or write, in every order."""
    text = HEADER + 'dtypes = ["fp16", "int8"]\nepilogues = ["none"]\n' + TILE
    assert helpers(written(tmp_path, text), "gfx90a") == {
        ("copy", dtype, dtype, layout, "none")
        for dtype in ("int8", "fp16", "int32")  # 1, 2 and 4 bytes
        for layout in ("nn", "nt", "tn", "any")
    }
    by_words = [v for v in all_variants(written(tmp_path, text), target("gfx90a")) if v.family == "copy" and v.aligned]
    assert [(v.dtype_a, v.layout) for v in by_words] == [("int8", "tn")]
    assert helpers(written(tmp_path, text + "aligned = false"), "gfx90a") == set()


def test_some_archs_alone(tmp_path: Path) -> None:
    """An entry, or a set, can be for some archs alone; the generic kernels are for all."""
    text = HEADER + 'dtypes = ["fp16"]\nlayouts = ["nn"]\nepilogues = ["none"]\n'
    for chosen in (
        written(tmp_path, text + TILE + 'archs = ["sm90"]'),
        written(tmp_path, text + 'archs = ["sm90"]' + TILE),
    ):
        assert [v.layout for v in variants(chosen, target("sm80"))] == ["any"]
        assert [v.layout for v in variants(chosen, target("sm90"))] == ["any", "nn"]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("cooperative", (192, 192, 64, 12)),
        ("cooperative", (256, 144, 64, 8)),
        ("pingpong", (64, 32, 128, 8)),
        ("cooperative", (128, 208, 64, 8)),
        ("pingpong", (64, 112, 64, 8)),
        ("swapped", (16, 128, 64, 8)),
        ("cooperative", (256, 208, 64, 8)),
        ("swapped", (104, 192, 64, 12)),
        ("swapped", (96, 256, 64, 8)),
    ],
)
def test_families_of_hopper(tmp_path: Path, family: str, size: tuple[int, int, int, int]) -> None:
    """Tiles of warpgroups: any multiple of 64 rows for each, widths of one instruction or two, deep pipelines.

    A width that no tensor has is for 64 or 128 rows of each warpgroup.
    """
    names = ("block_m", "block_n", "block_k", "num_warps")
    text = "".join(f"{name} = {value}\n" for name, value in zip(names, size, strict=True))
    entry = f'[[config]]\nfamily = "{family}"\narchs = ["sm90"]\ndtypes = ["bf16"]\nnum_stages = 10\n{text}'
    chosen = written(tmp_path, HEADER + 'layouts = ["nt"]\nepilogues = ["full"]\n' + entry)
    found = [v for v in variants(chosen, target("sm90"), ("bf16",)) if v.layout != "any"]
    assert [(v.family, tuple(getattr(v.config, name) for name in names)) for v in found] == [(family, size)]


@pytest.mark.parametrize(
    ("family", "size", "layouts", "words"),
    [
        ("cooperative", (192, 208, 64, 4), '["nn"]', "block_m = 64 or 128"),
        ("cooperative", (192, 208, 64, 4), '["nt"]', "block_m = 64 or 128"),
        ("cooperative", (128, 208, 128, 8), '["nt"]', "block_k = 64"),
        ("swapped", (56, 128, 128, 8), '["tt"]', "block_k = 64$"),
        ("swapped", (72, 128, 32, 8), '["tn"]', "block_k = 64$"),
        ("swapped", (144, 192, 64, 4), '["nt"]', "block_n = 64 or 128"),
    ],
)
def test_widths_that_no_instruction_has(
    tmp_path: Path, family: str, size: tuple[int, int, int, int], layouts: str, words: str
) -> None:
    """A width that is no sum of two powers of two is one instruction; an entry that cannot have it is refused."""
    names = ("block_m", "block_n", "block_k", "num_warps")
    text = "".join(f"{name} = {value}\n" for name, value in zip(names, size, strict=True))
    entry = f'[[config]]\nfamily = "{family}"\narchs = ["sm90"]\ndtypes = ["bf16"]\nlayouts = {layouts}\n{text}'
    with pytest.raises(SpecError, match=words):
        config_set(str(written(tmp_path, HEADER + 'epilogues = ["none"]\n' + entry)))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            '"cooperative"\ndtypes = ["tf32"]\nlayouts = ["tt"]\nblock_m = 128\nblock_n = 112',
            "in which A is contiguous",
        ),
        ('"swapped"\ndtypes = ["tf32"]\nlayouts = ["nn"]\nblock_m = 40\nblock_n = 128', "in which B is contiguous"),
        (
            '"cooperative"\ndtypes = ["fp16", "fp8e4"]\nlayouts = ["nt"]\nblock_m = 128\nblock_n = 112',
            "needs block_k = 128 and 64",
        ),
    ],
)
def test_widths_that_no_instruction_has_for_a_type(tmp_path: Path, entry: str, words: str) -> None:
    """tf32 whose other operand comes through registers, and types of two sizes, have no such width."""
    text = f'[[config]]\nblock_k = 32\nnum_warps = 8\narchs = ["sm90"]\nfamily = {entry}\n'
    with pytest.raises(SpecError, match=words):
        written(tmp_path, HEADER + 'epilogues = ["none"]\n' + text)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("family", "size", "layouts"),
    [
        ("cooperative", (128, 208, 64, 8), '["nn", "tn"]'),
        ("cooperative", (256, 112, 64, 8), '["nt", "tn"]'),
        ("pingpong", (64, 240, 64, 8), '["nn"]'),
        ("swapped", (40, 128, 64, 8), '["tt"]'),
        ("swapped", (72, 128, 64, 8), '["tt"]'),
        ("swapped", (200, 128, 64, 8), '["tn", "nn"]'),
    ],
)
def test_widths_in_every_layout(
    tmp_path: Path, family: str, size: tuple[int, int, int, int], layouts: str, dtype: str
) -> None:
    """Of 16-bit types one instruction reads columns of any order."""
    names = ("block_m", "block_n", "block_k", "num_warps")
    text = "".join(f"{name} = {value}\n" for name, value in zip(names, size, strict=True))
    entry = f'[[config]]\nfamily = "{family}"\narchs = ["sm90"]\ndtypes = ["{dtype}"]\nlayouts = {layouts}\n{text}'
    chosen = written(tmp_path, HEADER + 'epilogues = ["none"]\n' + entry)
    found = [v for v in variants(chosen, target("sm90"), (dtype,)) if v.layout != "any"]
    assert {v.layout for v in found} == set(re.findall(r"\w\w", layouts))
    assert {(v.config.block_m, v.config.block_n) for v in found} == {size[:2]}


SQUARE = WGMMA.replace("= 4", "= 8").replace("block_m = 64", "block_m = 512").replace("block_n = 64", "block_n = 512")


SLICED = (
    '[[config]]\nfamily = "cooperative"\narchs = ["sm90"]\ndtypes = ["bf16"]\nlayouts = ["nt"]\nblock_m = 128\n'
    "block_n = 64\nblock_k = 128\nnum_warps = 8\n"
)


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_of_clusters(tmp_path: Path, slices: int) -> None:
    """A cluster of slices has a step as long as those of its blocks together, and one tile; the name tells both."""
    entry = SLICED.replace("128\nnum", f"{64 * slices}\nnum") + f"cluster_k = {slices}\n"
    chosen = written(tmp_path, HEADER + 'epilogues = ["none"]\n' + entry)
    (found,) = (v for v in variants(chosen, target("sm90"), ("bf16",)) if v.layout != "any")
    assert found.config == Config(128, 64, 64 * slices, 3, 8, cluster_k=slices)
    assert found.num_ctas == slices
    assert found.config_name.endswith(f"_c1x1x{slices}")


@pytest.mark.parametrize(("role", "word"), [("product", ""), ("grouped_m", 'grouped = "M"\n')])
def test_slices_of_a_block(tmp_path: Path, role: str, word: str) -> None:
    """A block that multiplies slices one after another has the step of one that does not; the name has their number."""
    entry = SLICED.replace("128\nnum", "64\nnum") + f"{word}serial_k = 4\ncluster_m = 2\n"
    chosen = written(tmp_path, HEADER + 'epilogues = ["none"]\n' + entry.replace("block_m = 128", "block_m = 256"))
    (found,) = (v for v in all_variants(chosen, target("sm90"), ("bf16",)) if (v.layout, v.role) == ("nt", role))
    assert found.config == Config(256, 64, 64, 3, 8, cluster_m=2, serial_k=4)
    assert (found.num_ctas, found.config.slices) == (2, 4)
    assert "_c2x1_k4" in found.config_name


@pytest.mark.parametrize(
    ("family", "tile", "cluster", "block"),
    [
        ("cooperative", (256, 64), (2, 1), (128, 64)),
        ("cooperative", (512, 512), (4, 2), (128, 256)),
        ("pingpong", (256, 256), (2, 2), (128, 128)),
        ("swapped", (16, 512), (1, 4), (16, 128)),
        ("swapped", (176, 256), (2, 2), (88, 128)),
    ],
)
def test_clusters(
    tmp_path: Path, family: str, tile: tuple[int, int], cluster: tuple[int, int], block: tuple[int, int]
) -> None:
    """A tile of a cluster is one that each block has, times the blocks along that side; the name ends with these."""
    (m, n), (across_m, across_n) = tile, cluster
    entry = (
        f'[[config]]\nfamily = "{family}"\narchs = ["sm90"]\ndtypes = ["bf16"]\nblock_m = {m}\nblock_n = {n}\n'
        f"block_k = 64\nnum_warps = 8\ncluster_m = {across_m}\ncluster_n = {across_n}\n"
    )
    chosen = written(tmp_path, HEADER + 'layouts = ["nt"]\nepilogues = ["none"]\n' + entry)
    (found,) = (v for v in variants(chosen, target("sm90"), ("bf16",)) if v.layout != "any")
    assert found.config == Config(m, n, 64, 3, 8, cluster_m=across_m, cluster_n=across_n)
    assert found.num_ctas == across_m * across_n
    assert (m // across_m, n // across_n) == block
    assert f"_c{across_m}x{across_n}" in found.config_name


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            SQUARE + "cluster_m = 4\ncluster_n = 4",
            "cluster_m * cluster_n * cluster_k = 16; a cluster has at most 8 blocks",
        ),
        (SQUARE + "cluster_m = 3", "config 1: cluster_m = 3; allowed: 1, 2, 4"),
        (SQUARE + "cluster_n = 8", "config 1: cluster_n = 8; allowed: 1, 2, 4"),
        (SQUARE + "cluster_n = 0", "config 1: cluster_n = 0; allowed: 1, 2, 4"),
        (SQUARE + "cluster_m = true", "config 1: cluster_m = True; allowed: 1, 2, 4"),
        (SQUARE + 'cluster_m = "2"', "config 1: cluster_m = '2'; allowed: 1, 2, 4"),
        (
            SQUARE.replace("block_m = 512", 'block_m = "512"') + "cluster_m = 2",
            "config 1: block_m = '512'; allowed: 128,",
        ),
        (
            SQUARE.replace("block_m = 512", "block_m = 320") + "cluster_m = 2",
            "block_m = 320; allowed: 128, 256, 384, 512",
        ),
        (SQUARE + "cluster_m = 4", "config 1: block_n = 512; allowed: 16, 32,"),
        (SLICED + "cluster_k = 3", "config 1: cluster_k = 3; allowed: 1, 2, 4, 8"),
        (SLICED.replace("block_k = 128", "block_k = 64") + "cluster_k = 4", "block_k = 64; allowed: 128, 256, 512"),
        (SLICED + "cluster_k = 2\nsplit = true", "cluster_k = 2: the entry needs neither split nor grouped"),
        (SLICED + 'cluster_k = 2\ngrouped = "M"', "cluster_k = 2: the entry needs neither split nor grouped"),
        (
            SLICED.replace("block_n = 64", "block_n = 128") + "cluster_k = 2\ncluster_n = 2",
            "cluster_k = 2: the entry needs no cluster_m and cluster_n",
        ),
        (
            SLICED.replace("block_m = 128", "block_m = 192").replace("num_warps = 8", "num_warps = 12")
            + "cluster_k = 2",
            "cluster_k = 2: the entry needs num_warps = 4 or 8",
        ),
        (
            SLICED.replace("block_n = 64", "block_n = 96").replace('"nt"', '"nn"') + "cluster_k = 2",
            "cluster_k = 2: the entry needs block_n that is one instruction",
        ),
        (
            SLICED.replace("block_n = 64", "block_n = 96").replace("block_k = 128", "block_k = 64") + "cluster_k = 2",
            "block_n = 96 of each block is one instruction of 96 columns, which needs block_k = 64",
        ),
        (
            SLICED.replace("block_n = 64", "block_n = 288") + "cluster_k = 2",
            "block_n = 288 of each block is one instruction of 288 columns, which needs block_n <= 256",
        ),
        (SLICED.replace('"bf16"', '"int8"') + "cluster_k = 2", "cluster_k = 2: the entry needs dtypes other than int8"),
        (
            SLICED.replace("cooperative", "pingpong") + "cluster_k = 2",
            "config 1: cluster_k = 2; allowed: 1",
        ),
        (SLICED + "serial_k = 3", "config 1: serial_k = 3; allowed: 1, 2, 4, 8"),
        (SLICED + "serial_k = 2\ncluster_k = 2", "cluster_k = 2: the entry needs no serial_k"),
        (SLICED + "serial_k = 4\nsplit = true", "serial_k = 4: the entry needs no split and no groups of K"),
        (
            SLICED.replace('"nt"', '"tn"') + 'serial_k = 4\ngrouped = "K"',
            "serial_k = 4: the entry needs no split and no groups of K",
        ),
        (
            SLICED.replace('"bf16"', '"fp8e4"') + "serial_k = 4",
            "serial_k = 4: the entry needs dtypes of fp16 and bf16 alone",
        ),
        (
            SLICED.replace("block_n = 64", "block_n = 96").replace('"nt"', '"nn"').replace("k = 128", "k = 64")
            + "serial_k = 4",
            "serial_k = 4: the entry needs block_n that is one instruction",
        ),
        (SLICED.replace("cooperative", "pingpong") + "serial_k = 4", "config 1: serial_k = 4; allowed: 1"),
        (TILE + "serial_k = 4", "config 1: serial_k = 4; allowed: 1"),
        (TILE + "cluster_m = 2", "config 1: cluster_m = 2; allowed: 1"),
        (TILE + "cluster_n = 2", "config 1: cluster_n = 2; allowed: 1"),
        (
            SQUARE.replace("block_n = 512", "block_n = 416").replace("block_k = 64", "block_k = 32")
            + 'cluster_m = 4\ncluster_n = 2\nlayouts = ["nn"]',
            "config 1: block_n = 208 of each block is one instruction of 208 columns, which needs block_k = 64",
        ),
    ],
)
def test_clusters_that_there_are_not(tmp_path: Path, entry: str, words: str) -> None:
    """A cluster has 1, 2 or 4 blocks along a side and 8 in all, of Hopper's own families; each of them has a tile."""
    with pytest.raises(SpecError, match=re.escape(words)):
        config_set(str(written(tmp_path, HEADER + 'epilogues = ["none"]\n' + entry)))


# -------------------------------------------------------------------------------------------------- files of others
def test_file(tmp_path: Path) -> None:
    """A file of the user's is a set: entries inherit its lists, override them, and get their backend's defaults."""
    text = """
    source = "mine"
    dtypes = ["fp16", "bf16", "fp8e4"]
    layouts = ["nt"]
    epilogues = ["none"]
    """
    more = TILE + 'source = "another"\ndtypes = ["bf16"]\nlayouts = ["tn"]\noutputs = ["fp32"]\nnum_stages = 4\n'
    found = variants(written(tmp_path, text + TILE + more), target("sm80"))
    assert [(v.name, v.source) for v in found if v.layout != "any"] == [
        ("tile_bf16_bf16_nt_64x64x32_s3_w4_none", "mine"),
        ("tile_bf16_fp32_tn_64x64x32_s4_w4_none", "another"),
        ("tile_fp16_fp16_nt_64x64x32_s3_w4_none", "mine"),
    ]
    assert sorted(v.name for v in found if v.layout == "any") == [
        f"tile_{dtype}_{output}_any_64x64x32_s2_w4_none"  # whatever an entry writes, for every type of the set
        for dtype, output in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"))
    ]


def test_generic_kernels_of_groups(tmp_path: Path) -> None:
    """Pairs of types with an entry in groups have generic kernels in groups, and no other pair has."""
    text = HEADER + 'dtypes = ["fp8e4", "fp8e5", "fp8e5-fp8e4"]\nepilogues = ["none"]\n' + TILE + TILE
    more = 'dtypes = ["fp8e5-fp8e4"]\ngrouped = "M"\noutputs = ["bf16"]\n'
    found = all_variants(written(tmp_path, text + more), target("sm90"))
    pairs = {(v.dtype_a, v.dtype_b, v.dtype_c) for v in found if v.role == "grouped_m" and v.layout == "any"}
    assert pairs == {("fp8e5", "fp8e4", "bf16"), ("fp8e5", "fp8e4", "fp16")}


def test_generic_kernels_do_what_any_entry_does(tmp_path: Path) -> None:
    """The generic kernels have the richest epilogue and all outputs of the set and its entries, and the default."""
    text = HEADER + 'dtypes = ["fp16", "int8"]\nepilogues = ["none"]\n' + TILE
    found = variants(written(tmp_path, text + 'epilogues = ["full"]\noutputs = ["fp32"]\n'), target("sm80"))
    generic = {(v.dtype_a, v.dtype_c, v.epilogue) for v in found if v.layout == "any"}
    assert generic == {("fp16", "fp16", "full"), ("fp16", "fp32", "full"), ("int8", "int32", "none")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block_m = ", "not a TOML file"),
        (HEADER, "mine.toml: has no [[config]] entry"),
        (HEADER + "config = 3", "mine.toml: has no [[config]] entry"),
        (HEADER + "config = [3]", "mine.toml: config 1: expected a table, found 3"),
        (TILE, "mine.toml: config 1: source is missing"),
        (HEADER + "tiles = 3" + TILE, "mine.toml: unknown field 'tiles'; known: archs, config, dtypes, epilogues"),
        (HEADER + 'dtypes = "fp16"' + TILE, "mine.toml: dtypes = 'fp16'; expected a list of: fp16, bf16, fp32"),
        (HEADER + "layouts = []" + TILE, "mine.toml: layouts = []; expected a list of: nn, nt, tn, tt"),
        (HEADER + 'dtypes = ["fp64"]' + TILE, "mine.toml: dtypes = 'fp64'; allowed: fp16, bf16, fp32, tf32"),
        (HEADER + 'epilogues = ["gelu"]' + TILE, "mine.toml: epilogues = 'gelu'; allowed: none, bias, bias_relu, full"),
        (HEADER + 'dtypes = ["fp16-bf16"]' + TILE, "mine.toml: dtypes = 'fp16-bf16'; allowed: fp16, bf16, fp32, tf32"),
        (HEADER + TILE + "aligned = 1", "config 1: aligned = 1; allowed: true, false"),
        (HEADER + TILE + 'fast_accum = "yes"', "config 1: fast_accum = 'yes'; allowed: true, false"),
        (HEADER + TILE + "fast_accum = true", "config 1: fast_accum is for fp8; the entry needs dtypes, of fp8 alone"),
        (
            HEADER + TILE + 'fast_accum = true\ndtypes = ["fp8e4", "fp16"]',
            "config 1: fast_accum is for fp8; the entry needs dtypes, of fp8 alone",
        ),
        (HEADER + 'outputs = ["int8"]' + TILE, "mine.toml: outputs = 'int8'; allowed: fp16, bf16, fp32"),
        (HEADER + TILE + TILE + "block = 3", "mine.toml: config 2: unknown field 'block'; known: "),
        (HEADER + "[[config]]\nblock_m = 64", "mine.toml: config 1: block_n is missing"),
        (HEADER + TILE.replace("32", "48"), "config 1: block_k = 48; allowed: 16, 32, 64, 128, 256, 512"),
        (HEADER + TILE.replace("32", "true"), "config 1: block_k = True; allowed: 16, 32"),
        (HEADER + TILE.replace("32", "32.0"), "config 1: block_k = 32.0; allowed: 16, 32"),
        (HEADER + TILE.replace("32", '"32"'), "config 1: block_k = '32'; allowed: 16, 32"),
        (HEADER + TILE.replace("= 4", "= 3"), "config 1: num_warps = 3; allowed: 1, 2, 4, 8, 16"),
        (HEADER + TILE + "num_stages = 9", "config 1: num_stages = 9; allowed: 0, 1, 2"),
        (HEADER + TILE + "group_m = 8", "config 1: unknown field 'group_m'; known: "),
        (HEADER + TILE + 'backend = "rocm"', "config 1: backend = 'rocm'; allowed: cuda, hip"),
        (
            HEADER + TILE + 'family = "wave"',
            "config 1: family = 'wave'; allowed: tile, short, fma, multistage, cooperative",
        ),
        (
            HEADER + TILE + 'family = "copy"',
            "config 1: family = 'copy'; allowed: tile, short, fma, multistage, cooperative",
        ),
        (HEADER + TILE + 'archs = ["sm75"]', f"config 1: archs = 'sm75'; allowed: {', '.join(TARGETS)}"),
        (HEADER + TILE + 'family = "swapped"', 'family swapped is for "sm90" alone; the entry needs archs = ["sm90"]'),
        (
            HEADER + WGMMA.replace('"fp16"', '"fp32"').replace("block_k = 32", "block_k = 64\nnum_stages = 4"),
            "config 1: family cooperative splits fp32 into bf16; the entry needs block_k = 32 for each block",
        ),
        (
            HEADER + WGMMA.replace('"fp16"', '"fp32"').replace("block_m = 64", "block_m = 128") + "num_stages = 4",
            "config 1: family cooperative splits fp32 into bf16; the entry needs block_m = 64 for each warpgroup",
        ),
        (
            HEADER
            + WGMMA.replace('"fp16"', '"fp32"').replace("cooperative", "pingpong").replace("warps = 4", "warps = 8"),
            "family pingpong needs dtypes in the entry, of these alone: fp16, bf16, tf32, fp8e5",
        ),
        (
            HEADER + TILE + 'family = "cooperative"\narchs = ["sm90"]',
            "config 1: family cooperative needs dtypes in the entry, of these alone: fp16, bf16, tf32, fp8e5",
        ),
        (
            HEADER + WGMMA.replace("fp16", "fp8e4"),
            'config 1: family cooperative multiplies fp8e4 in layouts = ["nt"] alone',
        ),
        (
            HEADER + WGMMA.replace("fp16", "int8"),
            'config 1: family cooperative multiplies int8 in layouts = ["nt"] alone',
        ),
        (
            HEADER
            + WGMMA.replace("fp16", "int8").replace("cooperative", "swapped").replace("block_m = 64", "block_m = 72")
            + 'layouts = ["nt"]',
            "config 1: block_m = 72: int8 has widths of multiples of 16 alone",
        ),
        (
            HEADER + WGMMA.replace("fp16", "tf32"),
            'config 1: family cooperative multiplies tf32 in layouts = ["nt", "tt", "tn"] alone',
        ),
        (
            HEADER + WGMMA.replace("fp16", "tf32").replace("cooperative", "swapped") + 'layouts = ["tt"]',
            'config 1: family swapped multiplies tf32 in layouts = ["nt", "nn", "tn"] alone',
        ),
        (
            HEADER + WGMMA.replace("fp16", "tf32").replace("block_n = 64", "block_n = 192") + 'layouts = ["tn"]',
            'family cooperative turns tf32 in layout "tn" in shared memory; the entry needs block_n = 16, 32, 64, 128',
        ),
        (
            HEADER + WGMMA.replace("fp16", "tf32").replace("= 32", "= 128") + 'layouts = ["nt", "tn"]',
            "the entry needs block_k = 32 or 64; it has block_m = 64, block_n = 64, block_k = 128, num_warps = 4",
        ),
        (
            HEADER
            + WGMMA.replace("fp16", "tf32").replace("cooperative", "swapped").replace("block_n = 64", "block_n = 192")
            + 'layouts = ["tn"]',
            "the entry needs block_n = 64 or 128 for each warpgroup",
        ),
        (
            HEADER
            + WGMMA.replace("fp16", "tf32").replace("block_m = 64", "block_m = 128")
            + 'cluster_m = 2\nlayouts = ["tn"]',
            'config 1: family cooperative turns tf32 in layout "tn" in shared memory; the entry needs no clusters',
        ),
        (
            HEADER
            + WGMMA.replace("fp16", "tf32").replace("cooperative", "pingpong").replace("= 4", "= 8")
            + 'layouts = ["tt"]',
            'config 1: family pingpong multiplies tf32 in layouts = ["nt"] alone',
        ),
        (
            HEADER + WGMMA + "aligned = false\nsplit = true",
            "aligned = false lets rows of C lie anywhere in family cooperative, which is for products alone",
        ),
        (HEADER + FMA.replace("= 1\n", "= 4\n"), "each thread has 8 sums; in family fma it has 16 to 128"),
        (
            HEADER + MULTISTAGE.replace("= 64\n", "= 256\n"),
            "each thread has 512 sums; in family multistage it has 16 to 128",
        ),
        (
            HEADER + MULTISTAGE.replace("fp16", "fp8e5"),
            "family multistage needs dtypes in the entry, of these alone: fp16, bf16",
        ),
        (
            HEADER + MULTISTAGE + "aligned = false",
            "family multistage reads and writes 16-byte rows; aligned = false is for tile and fma",
        ),
        (
            HEADER + WGMMA.replace("block_m = 64", "block_m = 128").replace("= 4", "= 8") + "cluster_m = 2",
            "64 for each of the 4 warpgroups of num_warps = 8 with cluster_m = 2",
        ),
        (HEADER + WGMMA.replace("block_n = 64", "block_n = 120"), "config 1: block_n = 120; allowed: 16, 32, 48, 64"),
        (HEADER + WGMMA.replace("= 4", "= 16"), "config 1: num_warps = 16; allowed: 4, 8, 12"),
        (
            HEADER + WGMMA.replace("= 4", "= 8"),
            "config 1: block_m = 64 is not a multiple of 128, 64 for each of the 2 warpgroups of num_warps = 8",
        ),
        (
            HEADER + WGMMA.replace("cooperative", "pingpong").replace("= 4", "= 8") + "split = true",
            "config 1: family pingpong does not split K; families that do: tile, fma, multistage, cooperative",
        ),
        (
            HEADER + SPLIT + 'epilogues = ["none"]',
            "config 1: epilogues has no meaning with split: partial sums",
        ),
        (
            HEADER + SPLIT + 'outputs = ["fp16"]',
            "config 1: outputs has no meaning with split: partial sums have one type",
        ),
        (HEADER + TILE + "split = 4", "config 1: split = 4; allowed: true, false"),
        (HEADER + TILE + 'grouped = "N"', "config 1: grouped = 'N'; allowed: none, M, K"),
        (HEADER + TILE + 'grouped = "M"\nsplit = true', "config 1: grouped products do not split K"),
        (HEADER + TILE + 'grouped = "K"\nepilogues = ["full"]', "config 1: epilogues has no meaning with grouped"),
        (
            HEADER + TILE + 'grouped = "K"\nfamily = "swapped"\narchs = ["sm90"]\ndtypes = ["fp16"]',
            "family swapped does not multiply groups of K; families that do: tile, fma, cooperative, pingpong",
        ),
        (
            HEADER + TILE + 'grouped = "K"\nfamily = "cooperative"\narchs = ["sm90"]\ndtypes = ["fp16"]',
            'config 1: family cooperative sums groups of K of fp16 and bf16 in layouts = ["tn"] alone',
        ),
        (
            HEADER
            + TILE
            + 'grouped = "K"\nfamily = "cooperative"\narchs = ["sm90"]\ndtypes = ["tf32"]\nlayouts = ["tn"]',
            'config 1: family cooperative sums groups of K of fp16 and bf16 in layouts = ["tn"] alone',
        ),
        (
            HEADER + TILE + 'block_scales = "1x128"',
            "config 1: block_scales = '1x128'; allowed: , any, 128x128",
        ),
        (
            HEADER + TILE + 'block_scales = "128x128"',
            "config 1: block_scales = '128x128': the entry needs dtypes, of fp8 alone; block_scales = \"any\"",
        ),
        (
            HEADER + WGMMA.replace("fp16", "fp8e4") + 'layouts = ["nt"]\nblock_scales = "128x128"\nfast_accum = true',
            "config 1: block_scales = '128x128': the entry needs no fast_accum; block_k = 128",
        ),
        (
            HEADER + TILE + 'dtypes = ["fp8e4"]\ngrouped = "K"\nlayouts = ["tn"]\nblock_scales = "any"',
            "config 1: block_scales = 'any': the entry needs no groups of K",
        ),
        (
            HEADER + TALL_FP8 + 'layouts = ["nt"]\nblock_scales = "128x128"',
            "block_scales = '128x128': the entry needs block_k = 128 for each block; block_m = 64 or 128 for each",
        ),
        (
            HEADER + FMA + 'block_scales = "any"',
            "config 1: block_scales = 'any': the entry needs family = tile, cooperative or swapped; dtypes, of fp8",
        ),
        (
            HEADER + TILE + 'epilogues = ["smooth"]',
            "config 1: epilogues = 'smooth'; allowed: none, bias, bias_relu, full; it is called full now",
        ),
        (HEADER + TILE + 'layouts = ["any"]', "config 1: layouts = 'any'; allowed: nn, nt, tn, tt"),
        (HEADER + TILE + 'layouts = [["nn"]]', "config 1: layouts = ['nn']; allowed: nn, nt, tn, tt"),
        (HEADER + TILE + 'backend = ["cuda"]', "config 1: backend = ['cuda']; allowed: cuda, hip"),
        (HEADER + TILE + 'layouts = ["nn", 3]', "config 1: layouts = 3; allowed: nn, nt, tn, tt"),
        (HEADER + TILE + "waves_per_eu = 2", 'config 1: waves_per_eu is for AMD; the entry needs backend = "hip"'),
        (HEADER + TILE + 'backend = "cuda"\nkpack = 2', "config 1: kpack is for AMD; the entry needs"),
        (HEADER + TILE + 'backend = "hip"\nkpack = 3', "config 1: kpack = 3; allowed: 1, 2"),
        (HEADER + TILE + "source = 3", "config 1: source is missing"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, words: str) -> None:
    """A wrong file is told with the file, the entry, the field, its value and what is allowed."""
    with pytest.raises(SpecError) as caught:
        written(tmp_path, text)
    assert words in str(caught.value)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A path that is no file is a SpecError with the reason."""
    (tmp_path / "mine.toml").mkdir()
    with pytest.raises(SpecError, match="mine"):
        config_set(str(tmp_path / "mine.toml"))


def test_file_that_is_not_text(tmp_path: Path) -> None:
    """A file that is not UTF-8 is a SpecError."""
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"mine\.toml: not a TOML file"):
        config_set(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("text", ["x = " + "[" * 5000 + "]" * 5000, "x = " + "{a=" * 5000, "x = " + "9" * 5000])
def test_file_that_no_parser_takes(tmp_path: Path, text: str) -> None:
    """A file whose values are too deep, or numbers of thousands of digits, is a SpecError."""
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(SpecError, match=r"mine\.toml: not a TOML file"):
        config_set(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", ["nothing.toml", "../configs/classic"])
def test_missing_file(name: str) -> None:
    """A path without a file is told as that."""
    with pytest.raises(SpecError, match=rf"config set '{re.escape(name)}' is not a file; known sets: classic, default"):
        config_set(name)


@pytest.mark.parametrize("name", ["nothing", "generic", "helpers", ""])
def test_unknown_set(name: str) -> None:
    """An unknown set is told with those that there are."""
    with pytest.raises(SpecError) as caught:
        config_set(name)
    assert str(caught.value) == (
        f"unknown config set {name!r}; known: classic, default, tutorial, or a path to a .toml file"
    )


def test_unknown_type() -> None:
    """An unknown type is told with all types, one that the arch lacks with those of the arch."""
    classic = config_set("classic")
    with pytest.raises(SpecError, match=f"unknown dtype 'fp64'; known: {', '.join(INPUTS)}"):
        variants(classic, target("sm80"), ("fp64",))
    with pytest.raises(SpecError, match="dtype 'fp8e4' does not exist on sm80; it has: fp16, bf16, fp32"):
        variants(classic, target("sm80"), ("fp16", "fp8e4"))


def test_backends_are_those_of_the_targets() -> None:
    """Config sets can name exactly the backends that there are targets for."""
    assert set(BACKENDS) == {row.backend for row in TARGETS.values()}


def test_families_are_modules() -> None:
    """Every family that config sets can name, and those that work for others, is in aotmm/kernels."""
    folder = Path(kernels.__file__).parent
    found = {path.stem for path in folder.glob("*.py")} | set(kernels.WARP_SPECIALISED)
    assert found >= {*FAMILIES, "reduce", "copy"}
    assert (folder / "hopper" / "__init__.py").is_file()
