"""Functions of a user's own: what their file and TOML may be, and that what is built is Triton's own code."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tomllib
from click.testing import CliRunner

from aotmm.build import build
from aotmm.build import compile as compiling
from aotmm.build.compile import Buildable, Compiled
from aotmm.build.environment import isolate
from aotmm.build.gate import mismatches
from aotmm.build.own import OwnVariant, notes, specialise, variants
from aotmm.build.own.describe import describe
from aotmm.build.render import arranged, own_source
from aotmm.cli import main
from aotmm.cli.report import build_text as report_text
from aotmm.errors import CompileError, SpecError
from aotmm.pack.verify import verify
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.build.packs import OWN, ROOT, content, own_pack, tiny_pack
from tests.native.emulation import own_process

EXAMPLES = ROOT / "examples" / "own"
SHIPPED = ("sm80", "sm90", "gfx90a")

KERNEL = """
import triton
import triton.language as tl

STEP = tl.constexpr(2)


@triton.jit
def doubled(x):
    return x * STEP


@triton.jit
def scale(x_ptr, n, factor: tl.float32, BLOCK: tl.constexpr, TWICE: tl.constexpr = True):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n) * factor
    if TWICE:
        x = doubled(x)
    tl.store(x_ptr + at, x, mask=at < n)


@triton.jit
def other(x_ptr):
    tl.store(x_ptr, 1.0)
"""
FACTS = """
[scale]
grid = "cdiv(n, BLOCK)"
[scale.arguments]
x_ptr = "*fp32"
n = "i32"
BLOCK = 128
[other.arguments]
x_ptr = "*fp32"
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., list[OwnVariant]]:
    """Write a file and its TOML, and return the variants of one of its functions."""

    def make(facts: str = FACTS, text: str = KERNEL, name: str = "scale", arch: str = "sm80") -> list[OwnVariant]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # a file is imported once
        folder.mkdir()
        (folder / "mine.py").write_text(text)
        (folder / "mine.toml").write_text(facts)
        return variants([f"{folder}/mine.py:{name}"], target(arch))

    return make


def guards(variant: OwnVariant) -> list[str]:
    """Its guards in words."""
    return [f"{row.value} {row.relation} {row.operand}" for row in variant.guards]


RANGE = ["n at_least -2147483648", "n below 2147483648"]


def test_variants_by_default(own: Callable[..., list[OwnVariant]]) -> None:
    """Pointers and integers are multiples of 16 in a first variant, free in a second; what Triton knows is derived."""
    first, second = own()
    assert (guards(first), guards(second)) == ([*RANGE, "x_ptr multiple_of 16", "n multiple_of 16"], RANGE)
    assert [(row.name, row.type, row.value) for row in first.arguments] == [
        ("x_ptr", "*fp32", ""),
        ("n", "i32", ""),
        ("factor", "fp32", ""),  # by its annotation
        ("BLOCK", "constexpr", "128"),
        ("TWICE", "constexpr", "true"),  # by its default
    ]
    assert first.quantities == ("x_ptr", "n", "factor", "zero", "global_scratch")
    assert (first.grid, specialise(first).multiples) == (("cdiv(n, BLOCK)",), {"x_ptr": 16, "n": 16})


def test_lists_give_variants(own: Callable[..., list[OwnVariant]]) -> None:
    """Types, constexprs, options and hints are combined in the order of the file; a generic variant ends each."""
    facts = FACTS.replace('"*fp32"', '["*fp16", "*fp32"]', 1).replace("128", "128\nTWICE = [true, false]")
    facts += "[scale.options]\nnum_warps = [4, 8]\n[[scale.specialise]]\nequal_to_1 = ['n']\n"
    found = own(facts)
    assert [row.name for row in found[:5]] == [
        "scale_fp16_TWICETrue_num_warps4_special",
        "scale_fp16_TWICETrue_num_warps4_generic",
        "scale_fp16_TWICETrue_num_warps8_special",
        "scale_fp16_TWICETrue_num_warps8_generic",
        "scale_fp16_TWICEFalse_num_warps4_special",
    ]
    assert len(found) == 16
    assert found[0].quantities == ("x_ptr", "x_ptr.type", "n", "factor", "TWICE", "num_warps", "zero", "global_scratch")
    assert guards(found[0]) == ["x_ptr.type equals 1", "TWICE equals 1", "num_warps equals 4", "n equals 1"]
    assert guards(found[1])[3:] == RANGE
    assert [row.first_warps for row in found[:3]] == [4, 4, 8]


def test_texts_are_numbered(own: Callable[..., list[OwnVariant]]) -> None:
    """A constexpr whose values are no natural numbers is chosen by their places."""
    found = own(FACTS.replace("128", '128\nTWICE = ["", "yes", "no"]'))
    assert [row.operand for variant in found for row in variant.guards if row.value == "TWICE"] == [0, 0, 1, 1, 2, 2]
    assert [json.loads(variant.arguments[-1].value) for variant in found[::2]] == ["", "yes", "no"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'x_ptr = "*fp32"\nn',
            "n",
            r"argument x_ptr has no type; add it under \[scale.arguments\], as x_ptr = \"\*fp16\"",
        ),
        ("BLOCK = 128", "", r"constexpr BLOCK has no value; add its values under \[scale.arguments\], as BLOCK = 128"),
        ("BLOCK = 128", "BLOCK = []", r"constexpr BLOCK = \[\]: expected numbers, texts"),
        ('"i32"', '"int"', "argument n has type 'int', which is not supported"),
        ('"i32"', '["i32", "i64"]', "a number has one: the widest that it needs"),
        ('"i32"', '["i32", "*fp32"]', "expected different ones, all pointers or none"),
        ("n =", "m =", r"\[scale.arguments\] has 'm'; it may have: x_ptr, n, factor, BLOCK, TWICE"),
        ("cdiv(n, BLOCK)", "cdiv(m, BLOCK)", "m is no integer argument or constexpr; those are: n, BLOCK"),
        ("cdiv(n, BLOCK)", "n / BLOCK", "'n / BLOCK' is not one of integers, arguments"),
        ('"cdiv(n, BLOCK)"', "[1, 2]", r"grid = \[1, 2\]: expected at most 3 texts"),
        ('"cdiv(n, BLOCK)"', "1", r"grid = 1: expected at most 3 texts"),
        ("BLOCK = 128", "BLOCK = {value = 128, when = 16}", "when = 16: expected an integer argument"),
        ("BLOCK = 128", "BLOCK = {valve = 128}", r"BLOCK: \{'valve': 128\}: expected \{value = "),
        (
            "[other",
            "[[scale.specialise]]\nmultiple_of_16 = true\n[other",
            "specialise: .*: expected lists of arguments",
        ),
        ("grid =", "gird =", r"\[scale\] has 'gird'; it may have: grid, arguments, options, specialise"),
        ("[scale.arg", "[scale.options]\nwarps = 4\n[scale.arg", r"\[scale.options\] has 'warps'"),
        ("[scale.arg", "[scale.options]\nnum_warps = 'x'\n[scale.arg", "option num_warps = .*: expected integers"),
        ("[other", "[[scale.specialise]]\nequal_to_1 = ['x_ptr']\n[other", "'x_ptr' cannot have this hint"),
        ("[other", "[[scale.specialise]]\nmultiple_of_16 = ['factor']\n[other", "'factor' cannot have this hint"),
        ("[scale]", "[scale", "not a TOML file"),
        (
            'n = "i32"',
            'n = "i32"\nfactor = "fp64"',
            "factor has type 'fp64', but scale annotates it as fp32, which a JIT",
        ),
        ("BLOCK = 128", "BLOCK = [64, 64]", r"constexpr BLOCK = \[64, 64\] has a value twice; .* tuples"),
    ],
)
def test_wrong_facts(old: str, new: str, words: str, own: Callable[..., list[OwnVariant]]) -> None:
    """A missing or contradictory fact is told with the file, the argument, and the line to add."""
    assert old in FACTS
    with pytest.raises(SpecError, match=rf"mine.toml.*{words}"):
        own(FACTS.replace(old, new))


def test_no_facts(own: Callable[..., list[OwnVariant]], tmp_path: Path) -> None:
    """Where the TOML or the function's table in it is missing, the command is named that prints one to start from."""
    with pytest.raises(
        SpecError, match=r"mine.toml: has no table \[scale\]; start from .* --kernel mine.py:scale --describe"
    ):
        own("")
    (tmp_path / "mine.py").write_text(KERNEL)
    with pytest.raises(SpecError, match=r"mine.toml is missing: .* of scale; start from .* --kernel mine.py:scale"):
        variants([f"{tmp_path}/mine.py:scale"], target("sm80"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_there_at_all", "imports not_there_at_all, which is not installed here; install it beside Triton"),
        ("import torch.nowhere", r"imports torch.*a CPU build of torch is enough"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine.py:25\)"),
        ("scale = 3", "scale is no kernel of it; those with @triton.jit are: doubled, other"),
    ],
)
def test_wrong_files(text: str, words: str, own: Callable[..., list[OwnVariant]]) -> None:
    """A file that cannot be imported is told with what it lacks, and one without the kernel with those that it has."""
    with pytest.raises(SpecError, match=words):
        own(text=KERNEL + text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mine.py",), "expected FILE.py:NAME"),
        (("nowhere/mine.py:scale",), "mine.py is not a file"),
        ((f"{EXAMPLES}/add.py:add_kernel",) * 2, "--kernel .*add.py:add_kernel is given twice"),
        ((f"{EXAMPLES}/add.py:add_kernel", "other/add.py:add_kernel"), "two functions are called add_kernel"),
    ],
)
def test_wrong_words(words: tuple[str, ...], message: str) -> None:
    """What is no file and function, and two functions of one name, are refused."""
    with pytest.raises(SpecError, match=message):
        variants(words, target("sm80"))


def test_driver_answers_for_the_target(own: Callable[..., list[OwnVariant]]) -> None:
    """A module that asks Triton's driver while it is imported is told of the target, in every arch its own."""
    asks = """
target = triton.runtime.driver.active.get_current_target()
assert triton.runtime.driver.active.get_current_device() == 0
facts = triton.runtime.driver.active.utils.get_device_properties(0)
STEP = tl.constexpr(1000 * (target.backend == "hip") + target.warp_size + facts["multiprocessor_count"])
"""
    sources = {own(text=KERNEL + asks, arch=arch)[0].sources for arch in SHIPPED}
    assert len(sources) == 3  # Triton's digest has the values of constexprs in the file
    from triton.runtime import driver

    assert driver._active is None  # as it was


HEURISTICS = """
import triton
import triton.language as tl
from .parts import copied


@triton.heuristics({"HAS_BIAS": lambda args: args["bias_ptr"] is not None, "TWICE": lambda args: args["BLOCK"] * 2})
@triton.jit
def kernel(x_ptr, bias_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr, HAS_BIAS: tl.constexpr):
    copied(x_ptr, n, TWICE)
    if HAS_BIAS:
        copied(bias_ptr, n, BLOCK)


@triton.heuristics({"EVEN": lambda args: args["n"] % 16 == 0})
@triton.jit
def even(x_ptr, n, EVEN: tl.constexpr):
    copied(x_ptr, n, 16)
"""
PARTS = """
import triton
import triton.language as tl


@triton.jit
def copied(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A module in a package, which imports a part of its package, and has heuristics."""
    folder = tmp_path / f"package_{tmp_path.name}" / "kernels"
    folder.mkdir(parents=True)
    for place, text in (("__init__", ""), ("../__init__", ""), ("parts", PARTS), ("module", HEURISTICS)):
        (folder / f"{place}.py").write_text(text)
    return folder / "module.py"


def test_heuristics(package: Path) -> None:
    """A file may be a package's module. Constexprs that follow from others, and from None, are computed."""
    package.with_suffix(".toml").write_text(
        '[kernel.arguments]\nx_ptr = "*fp32"\nbias_ptr = ["*fp32", "None"]\nn = "i32"\nBLOCK = 16'
    )
    found = {arch: variants([f"{package}:kernel"], target(arch)) for arch in ("sm80", "gfx90a")}
    for rows in found.values():
        constants = [{row.name: (row.type, row.value) for row in variant.arguments if row.value} for variant in rows]
        assert [each["HAS_BIAS"] for each in constants[::2]] == [("autotune", "true"), ("autotune", "false")]
        assert {each["TWICE"] for each in constants} == {("autotune", "32")}
    (report,) = build(("sm80",), package.parent / "packs", kernels=(f"{package}:kernel",), jobs=1)
    assert report.kernels == 4


def test_heuristics_of_a_launch(package: Path) -> None:
    """A constexpr that only a launch could compute is refused by name; values in the TOML are taken instead."""
    facts = '[even.arguments]\nx_ptr = "*fp32"\nn = "i32"\n'
    package.with_suffix(".toml").write_text(facts)
    with pytest.raises(
        SpecError, match=r"computes EVEN of what only a launch knows \(the value of n\); say its values"
    ):
        variants([f"{package}:even"], target("sm80"))
    package.with_suffix(".toml").write_text(facts + "EVEN = [true, false]")
    rows = [row.arguments[-1] for row in variants([f"{package}:even"], target("sm80"))]
    assert [(row.type, row.value) for row in rows[::2]] == [("constexpr", "true"), ("constexpr", "false")]


CONDITIONS = """
[even.arguments]
x_ptr = "*fp32"
n = "i32"
EVEN = [{value = true, when = "n multiple_of 16"}, {value = false}]
"""


def test_heuristics_by_condition(package: Path) -> None:
    """A constexpr that only a launch could compute is chosen by conditions on its arguments, checked at each launch."""
    package.with_suffix(".toml").write_text(CONDITIONS)
    rows = variants([f"{package}:even"], target("sm80"))
    found = [(row.arguments[-1].type, row.arguments[-1].value, guards(row)[-1]) for row in rows[1::2]]
    assert found == [("autotune", "true", "n multiple_of 16"), ("autotune", "false", "n below 2147483648")]
    for wrong in ("n multiple_of 12", "n % 16", "x_ptr multiple_of 16", "n like 3"):
        package.with_suffix(".toml").write_text(CONDITIONS.replace("n multiple_of 16", wrong))
        with pytest.raises(
            SpecError, match="expected an integer argument, one of equals, multiple_of, below, at_least"
        ):
            variants([f"{package}:even"], target("sm80"))


CHOICES = """
import triton
import triton.language as tl


class Tuned:
    def __init__(self, fn, configs):
        self.fn, self.configs, self.arg_names = fn, configs, fn.arg_names


@triton.autotune([triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 64}, num_warps=2)], key=[])
@triton.heuristics({"num_warps": lambda args: 8 if args["BLOCK"] > 256 else 1})
@triton.jit
def warps(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)


@triton.heuristics({"num_warps": lambda args: 8 if args["n"] > 256 else 1})
@triton.jit
def warps_of_n(x_ptr, n):
    tl.store(x_ptr, n)


@triton.heuristics({"num_warp": lambda args: 8})
@triton.jit
def misspelt(x_ptr):
    tl.store(x_ptr, 1)


@triton.jit
def missing(x_ptr, y_ptr, SCALE: tl.constexpr, HAS_Y: tl.constexpr):
    if SCALE is None:
        tl.store(x_ptr, 1.0)
    else:
        tl.store(x_ptr, SCALE)
    if HAS_Y:
        tl.store(x_ptr, tl.load(y_ptr))


@triton.jit
def defaults(x_ptr, flag: tl.int1, half: tl.float16, stride_scale, USE_IT: tl.constexpr,
             BLOCK: tl.constexpr = tl.constexpr(128), ACT: tl.constexpr = missing, NONE: tl.constexpr = None):
    tl.store(x_ptr, flag)


own_tuned = Tuned(warps.fn.fn, [triton.Config({"BLOCK": 32}, num_warps=1)])
"""


def test_options_of_heuristics(own: Callable[..., list[OwnVariant]]) -> None:
    """What @triton.heuristics says of an option is compiled, over a config's own; the TOML's values go first."""
    facts = '[warps.arguments]\nx_ptr = "*fp32"\nn = "i32"\n'
    rows = own(facts, CHOICES, "warps")[::2]
    assert [row.first_warps for row in rows] == [8, 1]
    assert len({row.case for row in rows}) == 1
    of_n = facts.replace("warps", "warps_of_n")
    with pytest.raises(SpecError, match=r"computes num_warps .*the value of n.* under \[warps_of_n.options\], as num_"):
        own(of_n, CHOICES, "warps_of_n")
    rows = own(of_n + "[warps_of_n.options]\nnum_warps = [2, 4]", CHOICES, "warps_of_n")[::2]
    assert [row.first_warps for row in rows] == [2, 4]
    with pytest.raises(SpecError, match=r"@triton.heuristics sets num_warp, which is no argument and no option"):
        own('[misspelt.arguments]\nx_ptr = "*fp32"', CHOICES, "misspelt")


def test_none(own: Callable[..., list[OwnVariant]], tmp_path: Path) -> None:
    """The text "None" is None, of a constexpr too, whose value may hold for a pointer that is None, or is not."""
    facts = (
        '[missing.arguments]\nx_ptr = "*fp32"\ny_ptr = ["*fp32", "None"]\nSCALE = ["None", 1.5]\n'
        'HAS_Y = [{value = true, when = "y_ptr is not None"}, {value = false, when = "y_ptr is None"}]\n'
    )
    rows = own(facts, CHOICES, "missing")[1::2]
    found = [[arg.value or arg.type for arg in row.arguments[1:]] for row in rows]
    assert found == [
        ["*fp32", "null", "true"],
        ["*fp32", "1.5", "true"],
        ["None", "null", "false"],
        ["None", "1.5", "false"],
    ]
    file = next(path for path in tmp_path.rglob("mine.py"))
    (report,) = build(("sm80",), tmp_path / "packs", kernels=(f"{file}:missing",), jobs=1)
    assert report.kernels == len(rows) * 2
    told = CliRunner().invoke(
        main,
        shlex.split(
            f"explain --pack {tmp_path}/packs --arch sm80 --kernel missing -a x_ptr=fp32 -a y_ptr=None -a SCALE=2"
        ),
    )
    assert 'SCALE=2: it was built for "None", 1.5; build it for 2 by its TOML: SCALE = [2]' in told.output
    with pytest.raises(SpecError, match='or "POINTER is None" or "POINTER is not None" of a pointer with "None"'):
        own(facts.replace("y_ptr is None", "x_ptr is None"), CHOICES, "missing")


def test_what_is_described(tmp_path: Path) -> None:
    """Defaults that a TOML has no words for are told; bools, strides and flags have their types and values."""
    (tmp_path / "mine.py").write_text(CHOICES)
    text = describe(f"{tmp_path}/mine.py:defaults", target("sm80"))
    assert tomllib.loads(text)["defaults"]["arguments"]["stride_scale"] == "i32"
    assert tomllib.loads(text)["defaults"]["arguments"]["USE_IT"] is True
    assert "# flag: i1, by its annotation" in text
    assert "# BLOCK = 128  # its default" in text
    assert '# NONE = "None"  # its default' in text
    assert re.search("# ACT: JITFunction.* by default, which a pack cannot have", text)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(SpecError, match=r"argument half has type 'fp16', which is not supported; .* numbers i1, i8"):
        variants([f"{tmp_path}/mine.py:defaults"], target("sm80"))
    assert "num_warps" not in describe(f"{tmp_path}/mine.py:warps_of_n", target("sm80"))


def test_an_autotuner_of_a_package(own: Callable[..., list[OwnVariant]]) -> None:
    """Configs of a decorator that is not Triton's are variants, too."""
    row, _ = own('[own_tuned.arguments]\nx_ptr = "*fp32"\nn = "i32"\n', CHOICES, "own_tuned")
    assert row.first_warps == 1
    assert [(arg.name, arg.type, arg.value) for arg in row.arguments[2:]] == [("BLOCK", "autotune", "32")]


FEATURES = """
import triton
import triton.language as tl


@triton.jit
def shown(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.device_assert(x > 0, "positive")
    tl.device_print("x", x)
    tl.store(x_ptr + tl.arange(0, BLOCK), x + 1)


def pruned(configs, named_args, **kwargs):
    return [config for config in configs if config.kwargs["BLOCK"] <= kwargs["LIMIT"] * (named_args["n"] or 1)]


def few(configs, named_args, **kwargs):
    return [config for config in configs if config.kwargs["BLOCK"] <= kwargs["LIMIT"]]


CONFIGS = [triton.Config({"BLOCK": block}, pre_hook=lambda _: None) for block in (64, 32)]


@triton.autotune(CONFIGS, key=[], prune_configs_by={"early_config_prune": few})
@triton.jit
def kept(x_ptr, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@triton.autotune(CONFIGS, key=[], prune_configs_by={"early_config_prune": pruned})
@triton.jit
def asks(x_ptr, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@triton.jit
def converted(x_ptr, TYPE: tl.constexpr, OTHER: tl.constexpr = tl.float32):
    tl.store(x_ptr, tl.load(x_ptr).to(TYPE).to(OTHER))
"""
FEATURED = """
[shown.arguments]
x_ptr = "*fp32"
BLOCK = 32
[kept.arguments]
x_ptr = "*fp32"
n = "i32"
LIMIT = 32
[asks.arguments]
x_ptr = "*fp32"
n = "i32"
LIMIT = 32
[converted.arguments]
x_ptr = "*fp32"
TYPE = "tl.float16"
"""


def compiled(variant: OwnVariant) -> compiling.Compiled:
    """A variant, compiled and past the gate."""
    found = compiling.compile_variant(variant, "0" * 64)
    assert mismatches(variant, "0" * 64, found) == []
    return found


VARIOUS = """
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 128, "EVEN": True}), triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def lacking(x_ptr, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    tl.store(x_ptr, BLOCK)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({})], key=[])
@triton.jit
def nothing(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, BLOCK)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 128}, maxnreg=128)], key=[]
)
@triton.jit
def registers(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, BLOCK)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=8)], key=[])
@triton.jit
def warps(x_ptr, BLOCK: tl.constexpr, num_warps: tl.constexpr):
    tl.store(x_ptr, num_warps)


@triton.jit
def text(x_ptr, KIND: tl.constexpr = "None", OTHER: tl.constexpr = None):
    tl.store(x_ptr, 1.0 if KIND == "None" else 2.0)


@triton.jit
def type_by_text(x_ptr, KIND: tl.constexpr = "tl.float16"):
    tl.store(x_ptr, 1.0)


@triton.jit
def like(x_ptr, n, MODE: tl.constexpr):
    tl.store(x_ptr, n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 128})],
    key=[],
    prune_configs_by={"early_config_prune": lambda configs, known, **_: configs if known["LIMIT"] > 64 else []},
)
@triton.jit
def pruned(x_ptr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr, LIMIT)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 128})],
    key=[],
    prune_configs_by={"early_config_prune": lambda configs, known, **_: [triton.Config({"BLOCK": 32}, num_warps=1)]},
)
@triton.jit
def replaced(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, BLOCK)


@triton.jit
def twice(x, x_type, N: tl.constexpr):
    tl.store(x, x_type)
"""


def various(name: str, *lines: str) -> str:
    """A TOML for one of `VARIOUS`."""
    return "\n".join([f"[{name}.arguments]", 'x_ptr = "*fp32"', *lines, ""])


def test_a_condition_needs_no_list(own: Callable[..., list[OwnVariant]]) -> None:
    """A constexpr with one value may have a condition all the same."""
    found = own(FACTS.replace("BLOCK = 128", 'BLOCK = {value = 128, when = "n multiple_of 128"}'))
    assert all("n multiple_of 128" in guards(variant) for variant in found)


def test_what_a_config_leaves_out(own: Callable[..., list[OwnVariant]]) -> None:
    """A constexpr that a config does not set has its default, without one it is an error; an option the compiler's."""
    found = [{row.name: row.value for row in each.arguments} for each in own(various("lacking"), VARIOUS, "lacking")]
    assert [(row["BLOCK"], row["EVEN"]) for row in found[::2]] == [("128", "true"), ("64", "false")]
    with pytest.raises(SpecError, match=r"a config of @triton.autotune, .*, does not set BLOCK, others do"):
        own(various("nothing"), VARIOUS, "nothing")
    free, limited = own(various("registers"), VARIOUS, "registers")[::2]
    assert (free.name, limited.name) == ("registers_maxnregNone_special", "registers_maxnreg128_special")
    of_free, of_limited = ({option.name: option.value for option in each.chosen} for each in (free, limited))
    assert of_limited == of_free | {"maxnreg": 128}
    assert "maxnreg" not in of_free


def test_an_option_that_is_a_constexpr_too(own: Callable[..., list[OwnVariant]], tmp_path: Path) -> None:
    """The warps of a config are the compiler's, as of a JIT; a constexpr in the TOML is none, which a note says."""
    first, *_ = own(various("warps"), VARIOUS, "warps")
    assert (first.first_warps, first.arguments[-1].value) == (8, "8")
    own(
        FACTS.replace("BLOCK = 128", "BLOCK = 128\nnum_stages = 2"),
        KERNEL.replace("BLOCK: tl", "num_stages: tl.constexpr, BLOCK: tl"),
    )
    said = notes([f"{tmp_path}/1/mine.py:scale"], target("sm80"))
    assert said == ["scale: num_stages is a constexpr here; what the compiler takes is set under [options]"]


def test_texts_that_look_like_something_else(own: Callable[..., list[OwnVariant]]) -> None:
    """The text "None" of a Python file stays one; a text that names a type is refused."""
    first, *_ = own(various("text"), VARIOUS, "text")
    assert specialise(first).constants == {"KIND": "None", "OTHER": None}
    with pytest.raises(SpecError, match=r"constexpr KIND = .tl\.float16.: the text .tl\.float16. would be read as"):
        own(various("type_by_text"), VARIOUS, "type_by_text")
    first, *_ = own(various("like", 'n = "i32"', 'MODE = "n"'), VARIOUS, "like")  # which is an argument's name
    assert specialise(first).constants == {"MODE": "n"}


def test_pruning_may_replace_configs_but_has_to_leave_one(own: Callable[..., list[OwnVariant]]) -> None:
    """What it returns is built, whatever it was given; a call without a config is an error."""
    first, *_ = own(various("replaced"), VARIOUS, "replaced")
    assert (first.arguments[-1].value, first.first_warps) == ("32", 1)
    assert len(own(various("pruned", "LIMIT = 128"), VARIOUS, "pruned")) == 2
    with pytest.raises(SpecError, match=r"the pruning of @triton.autotune leaves no config for LIMIT = 32; take"):
        own(various("pruned", "LIMIT = [128, 32]"), VARIOUS, "pruned")


def test_no_value_holds(own: Callable[..., list[OwnVariant]]) -> None:
    """Values that hold for nothing leave no variant, which is an error."""
    lines = ('x_ptr = "*fp32"', 'n = ["*fp32", "None"]', 'MODE = [{value = 1, when = ["n is None", "n is not None"]}]')
    with pytest.raises(SpecError, match="no variant is left"):
        own("\n".join(["[like.arguments]", *lines]), VARIOUS, "like")


def test_names_that_are_one_in_c(own: Callable[..., list[OwnVariant]]) -> None:
    """The type of a pointer is an argument in C, so no other may have its name."""
    with pytest.raises(SpecError, match=r"two of its values have one name: x, x.type, x_type, .*; rename an argument"):
        own('[twice.arguments]\nx = ["*fp32", "*fp16"]\nx_type = "i32"\nN = 1', VARIOUS, "twice")


def test_helpers_are_those_beside_the_file(tmp_path: Path) -> None:
    """Of two files with helpers of one name each has its own, in any order and again."""
    helped = "import triton\nimport triton.language as tl\nfrom helper import STEP\n\n\n@triton.jit\n"
    helped += "def {}(x_ptr):\n    tl.store(x_ptr, STEP)\n"
    for number, name in enumerate(("first", "second")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper.py").write_text(f"import triton.language as tl\n\nSTEP = tl.constexpr({number + 5})\n")
        (folder / f"{name}.py").write_text(helped.format(name))
        (folder / f"{name}.toml").write_text(f'[{name}.arguments]\nx_ptr = "*fp32"\n')
    words = [f"{tmp_path}/{name}/{name}.py:{name}" for name in ("first", "second")]
    for arch in ("sm80", "sm90", "sm80"):
        for variant in variants(words, target(arch)):
            found = specialise(variant).function.fn.__globals__["STEP"].value
            assert found == {"first": 5, "second": 6}[variant.function]


def test_variables_of_the_environment_do_not_matter(
    own: Callable[..., list[OwnVariant]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file does not see what compiler processes do not see; afterwards they are there again."""
    monkeypatch.setenv("MY_STEP", "7")
    text = KERNEL.replace("tl.constexpr(2)", 'tl.constexpr(int(os.environ.get("MY_STEP", "3")))')
    first, *_ = own(text=f"import os\n{text}")
    assert specialise(first).function.fn.__globals__["STEP"].value == 3
    assert os.environ["MY_STEP"] == "7"


def test_files_in_other_encodings(tmp_path: Path) -> None:
    """A file may say its encoding, as Python's files may."""
    folder = tmp_path / "latin"
    folder.mkdir()
    (folder / "mine.py").write_bytes(f"# coding: latin-1\n# caf\xe9\n{KERNEL}".encode("latin-1"))
    (folder / "mine.toml").write_text(FACTS)
    assert len(variants([f"{folder}/mine.py:scale"], target("sm80"))) == 2


def test_what_is_no_pack_is_not_replaced(tmp_path: Path) -> None:
    """A folder of the user's own that is called like the arch stays, and so does a file."""
    folder = tmp_path / "sm80"
    folder.mkdir()
    (folder / "mine.py").write_text(KERNEL)
    (folder / "mine.toml").write_text(FACTS)
    before = content(tmp_path)
    with pytest.raises(SpecError, match="sm80 is there, and is no pack, which would replace it; use another --out"):
        build(("sm80",), tmp_path, kernels=(f"{folder}/mine.py:scale",), jobs=1)
    assert content(tmp_path) == before
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "sm80").write_text("mine")
    with pytest.raises(SpecError, match="sm80 is there, and is no pack"):
        build(("sm80",), tmp_path / "packs", kernels=(f"{folder}/mine.py:scale",), jobs=1)
    assert [each.name for each in (tmp_path / "packs").iterdir()] == ["sm80"]


STOPPED = """
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (32, 64)], key=[])
@triton.jit
def two(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, at)
"""


def killed(variant: Buildable, _key: str) -> Compiled:
    """A compiler whose assembler is killed for want of memory."""
    from triton.backends.nvidia import compiler

    def run(command: list[str], **_options: object) -> None:
        raise subprocess.CalledProcessError(-signal.SIGKILL, command)

    compiler.subprocess = SimpleNamespace(run=run, CalledProcessError=subprocess.CalledProcessError)
    return compiling.compile_variant(variant, _key)


def test_an_assembler_that_is_killed_ends_the_build(tmp_path: Path) -> None:
    """That is no refusal of a config of @triton.autotune, which would be dropped."""
    (tmp_path / "mine.py").write_text(STOPPED)
    (tmp_path / "mine.toml").write_text('[two.arguments]\nx_ptr = "*i32"\n')
    with pytest.raises(CompileError, match="two_BLOCK32_special does not compile"):
        build(("sm80",), tmp_path / "packs", kernels=(f"{tmp_path}/mine.py:two",), jobs=1, compiler=killed)


def test_a_pack_does_not_depend_on_other_archs(tmp_path: Path) -> None:
    """The digest of sources is that of the arch's own, for files whose constexprs follow the device."""
    text = KERNEL.replace("tl.constexpr(2)", "tl.constexpr(triton.runtime.driver.active.get_current_target().arch)")
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "mine.toml").write_text(FACTS)
    words = (f"{tmp_path}/mine.py:other", f"{tmp_path}/mine.py:scale")
    build(("sm80",), tmp_path / "alone", kernels=words, jobs=1)
    build(("sm80", "sm90"), tmp_path / "both", kernels=words, jobs=1)
    assert content(tmp_path / "alone" / "sm80") == content(tmp_path / "both" / "sm80")
    result = CliRunner().invoke(
        main, ["verify", str(tmp_path / "both" / "sm90"), "--rebuild", *(f"--kernel={each}" for each in words)]
    )
    assert result.exit_code == 0, result.output


LAUNCHING = """
import torch
import triton
import triton.language as tl

STEP = tl.constexpr(3)


@triton.jit
def scale(x_ptr, n, factor: tl.float32, BLOCK: tl.constexpr, TWICE: tl.constexpr = True):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, STEP, mask=at < n)


x = torch.ones(98432, device=triton.runtime.driver.active.get_active_torch_device())
scale[(1,)](x, 98432, 2.0, 128)


@triton.jit
def behind(x_ptr):
    tl.store(x_ptr, 1.0)
"""
TORCH = """
class device:
    def __init__(self, *_):
        pass


def ones(*_, device):
    raise AssertionError("Torch not compiled with CUDA enabled")
"""


def test_a_script_that_launches(
    own: Callable[..., list[OwnVariant]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tutorial's kernels are those in front of its first launch, which needs a GPU; a note says where it ended."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    first, *_ = own(text=LAUNCHING)
    assert specialise(first).function.fn.__globals__["STEP"].value == 3
    (note,) = notes([first.path + ":scale"], target("sm80"))
    assert re.fullmatch(
        r".*mine.py was imported up to where it failed: AssertionError: Torch not compiled with CUDA enabled "
        r"\(.*mine.py:15\); kernels see nothing behind that",
        note,
    )
    with pytest.raises(SpecError, match=r"mine.py cannot be imported: AssertionError: Torch not compiled .*mine.py:15"):
        variants([first.path + ":behind"], target("sm80"))
    sys.modules.pop("torch", None)


def test_a_file_that_answers_for_torch(package: Path) -> None:
    """A kernel may come from another file; so a file of one's own can say first what that one asks torch."""
    folder, (*_, answering) = package.parent, blocks("text")
    (folder / "asks.py").write_text("import torch\nassert torch.cuda.get_device_capability()[0] == 9\n" + KERNEL)
    (folder / "answers.py").write_text(answering.replace("attention import attention_kernel", ".asks import scale"))
    (folder / "answers.toml").write_text(FACTS)
    sys.modules["torch"] = torch = ModuleType("torch")
    torch.cuda = SimpleNamespace()  # type: ignore[attr-defined]
    try:
        assert len(variants([f"{folder}/answers.py:scale"], target("sm90"))) == 2
    finally:
        sys.modules.pop("torch", None)


def test_what_can_be_done_once(own: Callable[..., list[OwnVariant]], tmp_path: Path) -> None:
    """A file that cannot be imported for a second arch names the way out."""
    once = "import sys\nassert not hasattr(sys, 'aotmm_was_here'), 'again'\nsys.aotmm_was_here = True\n"
    own(text=once + KERNEL, arch="sm90")
    words = r"AssertionError: again .*; it was imported for sm90 before; .* build one arch at a time"
    with pytest.raises(SpecError, match=words):
        variants([f"{tmp_path}/0/mine.py:scale"], target("sm80"))
    del sys.aotmm_was_here  # type: ignore[attr-defined]


def test_a_folder_above_that_is_no_package(tmp_path: Path) -> None:
    """An import by the name of a folder above the file says how to find it."""
    folder = tmp_path / "top_of_mine" / "inner"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("import top_of_mine.other\n" + KERNEL)
    with pytest.raises(SpecError, match=rf"that is a folder above the file: put {tmp_path} on PYTHONPATH"):
        variants([f"{folder}/mine.py:scale"], target("sm80"))


EVEN = """
import triton
import triton.language as tl


def is_even(args):
    return args["K"] % (args["BLOCK_K"] * args["SPLIT_K"]) == 0


@triton.autotune(configs=[triton.Config({"BLOCK_K": 32}), triton.Config({"BLOCK_K": 64})], key=["K"])
@triton.heuristics({"EVEN_K": is_even})
@triton.jit
def tuned(x_ptr, K, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr):
    tl.store(x_ptr, K)


@triton.heuristics({"EVEN_K": is_even})
@triton.jit
def rowsum(x_ptr, K, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr):
    tl.store(x_ptr, K)
"""


def test_conditions_are_what_heuristics_compute(own: Callable[..., list[OwnVariant]]) -> None:
    """A condition that lets a launch have another value than a JIT computes is refused; its number may be a product."""
    facts = '[rowsum.arguments]\nx_ptr = "*fp32"\nK = "i32"\nBLOCK_K = [64, 128]\nSPLIT_K = 2\n'
    even = 'EVEN_K = [{{value = true, when = "{}"}}, {{value = false}}]\n'
    found = own(facts + even.format("K multiple_of BLOCK_K * SPLIT_K"), EVEN, "rowsum")
    assert [row for row in guards(found[0]) if "multiple_of 128" in row] == ["K multiple_of 128"]
    for wrong, shown in (
        ("K multiple_of 16", "K = 16"),
        ("K multiple_of BLOCK_K", "K = 64"),
        ("K at_least 256", "K = 257"),
    ):
        words = rf"EVEN_K = true would be launched with {shown}, for which @triton.heuristics computes false"
        with pytest.raises(SpecError, match=words):
            own(facts + even.format(wrong), EVEN, "rowsum")
    of_configs = 'x_ptr = "*fp32"\nK = "i32"\nSPLIT_K = 1\n' + even.format("K multiple_of BLOCK_K")
    rows = own("[tuned.arguments]\n" + of_configs, EVEN, "tuned")[::2]  # the first of each pair has hints
    assert [[row for row in guards(each) if row.startswith("K multiple_of")][-1:] for each in rows] == [
        ["K multiple_of 32"],
        ["K multiple_of 64"],
        ["K multiple_of 16"],
        ["K multiple_of 16"],
    ]
    with pytest.raises(SpecError, match=r"EVEN_K = true would be launched with K = 32, .* computes false"):
        own("[tuned.arguments]\n" + of_configs.replace("of BLOCK_K", "of 32"), EVEN, "tuned")
    with pytest.raises(SpecError, match=r'EVEN_K = \[\{value = ..., when = "K multiple_of ..."\}, \{value = ...\}\]'):
        own(facts, EVEN, "rowsum")


NAMED = """
import triton
import triton.language as tl


def named(specialization):
    return f"named_{specialization.constants['BLOCK']}"


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 64})], key=[])
@triton.jit(repr=named)
def twice(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, BLOCK)
"""


@own_process
def test_a_name_of_its_own() -> None:
    """An image has the symbol that @triton.jit(repr=...) gives it; of equal configs there is one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(NAMED)
        path.with_suffix(".toml").write_text('[twice.arguments]\nx_ptr = "*i32"\n')
        made = [compiled(each) for each in variants([f"{path}:twice"], target("sm80"))]
    assert [(each.kernel.name, each.kernel.symbol) for each in made] == [
        ("twice_special", "named_64"),
        ("twice_generic", "named_64"),
    ]


@pytest.mark.parametrize("arch", SHIPPED)
@own_process
def test_prints_are_left_out(arch: str) -> None:
    """Prints and assertions are not in the image, and the manifest says so; the store is there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shown.py"
        path.write_text(FEATURES)
        path.with_suffix(".toml").write_text(FEATURED)
        first, *_ = variants([f"{path}:shown"], target(arch))
        made = compiled(first)
    assert made.kernel.left_out == ("device_assert", "device_print")
    assert made.kernel.writes == ("x_ptr",)
    assert b"printf" not in (made.ptx or made.image)


HELPED = """
import triton
import triton.language as tl


@triton.jit
def loaded(ptr, offsets, step):
    return tl.load(ptr + offsets * step)


@triton.jit
def stored(offsets, *, ptr, value):
    where = ptr + offsets
    tl.store(where, value)


@triton.jit
def kernel(A, B, C, D, stride, drop_p, WHICH: tl.constexpr, PADDED_HEAD: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = loaded(A if WHICH else B, offsets, stride)
    stored(offsets, ptr=C + 1, value=x * drop_p + loaded(ptr=D, offsets=offsets, step=stride))
"""


def test_described_through_helpers(tmp_path: Path) -> None:
    """What helpers load and store through is a pointer, whichever of two; a flag is no size, and a part no integer."""
    (tmp_path / "mine.py").write_text(HELPED)
    lines = describe(f"{tmp_path}/mine.py:kernel", target("sm80")).splitlines()
    assert [f'{name} = "*fp16"' in lines for name in ("A", "B", "C", "D")] == [True] * 4
    assert {'stride = "i32"', 'drop_p = "fp32"', "BLOCK = 128  # a constexpr"} <= set(lines)
    assert "PADDED_HEAD = true  # a constexpr: or false, or both as [true, false]" in lines
    assert "# equal_to_1 = []  # of stride" in lines


CARRIED = """
import triton
import triton.language as tl


@triton.jit
def product(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    x_ptrs, y_ptrs = x_ptr + tl.arange(0, BLOCK), y_ptr + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, n, BLOCK):
        if k > 64:
            sums += tl.load(x_ptrs) * tl.load(y_ptrs)
        x_ptrs += BLOCK
        y_ptrs += BLOCK
    tl.store(out_ptr + tl.arange(0, BLOCK), sums)


@triton.jit
def turns(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    one, other = x_ptr, y_ptr
    for k in range(0, n):
        one, other = other, one
    tl.store(one + tl.arange(0, BLOCK), tl.load(out_ptr + tl.arange(0, BLOCK)))


@triton.jit
def chosen(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    where = x_ptr
    if n > 3:
        where = y_ptr
    tl.atomic_add(where + tl.arange(0, BLOCK), tl.load(out_ptr + tl.arange(0, BLOCK)))
"""
CARRIED_FACTS = "".join(
    f'[{name}.arguments]\nx_ptr = "*fp32"\ny_ptr = "*fp32"\nout_ptr = "*fp32"\nn = "i32"\nBLOCK = 32\n'
    for name in ("product", "turns", "chosen")
)


@own_process
def test_what_loops_carry_is_told_apart() -> None:
    """A loop that carries pointers beside sums does not write through them; one that exchanges pointers may."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(CARRIED)
        path.with_suffix(".toml").write_text(CARRIED_FACTS)
        for name in ("product", "turns", "chosen"):
            first, *_ = variants([f"{path}:{name}"], target("sm90"))
            found[name] = compiled(first).kernel.writes
    assert found == {"product": ("out_ptr",), "turns": ("x_ptr", "y_ptr"), "chosen": ("x_ptr", "y_ptr")}


ASSEMBLY = """
import triton
import triton.language as tl


@triton.jit
def moved(x_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    y = tl.inline_asm_elementwise("mov.u16 $0, 7;", "=h,r", [o], dtype=tl.int16, is_pure=True, pack=1)
    tl.store(x_ptr + o, y)
"""


def test_errors_that_are_only_printed(tmp_path: Path) -> None:
    """LLVM prints that an instruction of another GPU has no register, and goes on: its words are an error."""
    (tmp_path / "mine.py").write_text(ASSEMBLY)
    (tmp_path / "mine.toml").write_text('[moved.arguments]\nx_ptr = "*i16"\nBLOCK = 32\n')
    for arch, words in (("gfx90a", "could not allocate output register for constraint 'h'"), ("sm90", "")):
        command = ["build", "--kernel", f"{tmp_path}/mine.py:moved", "--arch", arch, "--out", str(tmp_path / "packs")]
        result = CliRunner().invoke(main, command)
        assert words in result.output
        assert (result.exit_code == 0) == (not words) == (tmp_path / "packs" / arch).exists()


@pytest.mark.parametrize(("status", "words"), [("", "SystemExit"), ("'needs a GPU'", "SystemExit: needs a GPU")])
def test_a_file_that_exits(own: Callable[..., list[OwnVariant]], status: str, words: str) -> None:
    """A file that ends the process while it is imported is an error that says so, and ends nothing."""
    with pytest.raises(SpecError, match=rf"mine.py cannot be imported: {words}.*mine.py:2"):
        own(text=f"import sys\nsys.exit({status})\n" + KERNEL)


def test_modules_that_triton_has_no_more(own: Callable[..., list[OwnVariant]]) -> None:
    """What another version of Triton had is not to be installed beside it."""
    with pytest.raises(SpecError, match=r"imports triton.ops, which Triton \S+ does not have"):
        own(text="import triton.ops\n" + KERNEL)


COPIED = """
import triton
import triton.language as tl


class Autotuner(triton.KernelInterface):
    def __init__(self, fn, arg_names, configs, key, prune):
        self.fn, self.configs, self.early_config_prune, self.arg_names = fn, configs, prune, arg_names
        self.key_idx = [arg_names.index(name) for name in key]


def autotune(configs, key, prune=None):
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, prune)


CONFIGS = [triton.Config({"BLOCK": block}) for block in (64, 32)]


@autotune(CONFIGS, ["n"], lambda configs, known: [each for each in configs if each.kwargs["BLOCK"] <= known["MOST"]])
@triton.jit
def few(x_ptr, n, MOST: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@autotune(CONFIGS, ["n"], lambda configs, known: [each for each in configs if each.kwargs["BLOCK"] <= known["n"]])
@triton.jit
def asks(x_ptr, n, MOST: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)
"""


def test_a_copy_of_tritons_autotuner(own: Callable[..., list[OwnVariant]], tmp_path: Path) -> None:
    """The pruning and the key of a package's own autotuner count as those of Triton's."""
    facts = "".join(f'[{name}.arguments]\nx_ptr = "*fp32"\nn = "i32"\nMOST = 32\n' for name in ("few", "asks"))
    assert [row.arguments[-1].value for row in own(facts, COPIED, "few")] == ["32", "32"]
    whole = own(facts, COPIED, "asks")
    assert sorted(row.arguments[-1].value for row in whole) == ["32", "32", "64", "64"]
    assert whole[0].sizes == ("n",)
    words = [f"{tmp_path}/{number}/mine.py:{name}" for number, name in enumerate(("few", "asks"))]
    assert notes(words, target("sm80")) == ["asks: its configs are not pruned, which needs a launch (the value of n)"]


def test_pruning(own: Callable[..., list[OwnVariant]], tmp_path: Path) -> None:
    """Configs are pruned by the file's own function where constexprs are enough for it; else a note says why not."""
    assert [row.name for row in own(FEATURED, FEATURES, "kept")] == ["kept_special", "kept_generic"]
    assert len(own(FEATURED, FEATURES, "asks")) == 4
    words = [f"{tmp_path}/{number}/mine.py:{name}" for number, name in enumerate(("kept", "asks"))]
    assert notes(words, target("sm80")) == [
        "kept: a pre_hook of its configs is not run before launches",
        "asks: its configs are not pruned, which needs a launch (the value of n)",
        "asks: a pre_hook of its configs is not run before launches",
    ]


def test_notes_of_a_build(tmp_path: Path) -> None:
    """The build's output has a note for each thing of the file that a pack does not do."""
    path = tmp_path / "mine.py"
    path.write_text(FEATURES)
    path.with_suffix(".toml").write_text(FEATURED)
    words = [word for name in ("shown", "kept") for word in ("--kernel", f"{path}:{name}")]
    result = CliRunner().invoke(main, ["build", *words, "--arch", "sm80", "--out", str(tmp_path / "packs")])
    assert result.exit_code == 0, result.output
    assert result.output.endswith(
        "\nsm80: kept: a pre_hook of its configs is not run before launches"
        "\nsm80: shown: device_assert and device_print are compiled out\n"
    )


REFUSED = """
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=[])
@triton.jit
def picky(x_ptr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK >= LEAST, "too few elements")
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@triton.jit
def broad(x_ptr, n):
    at = tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for step in range(n):
        tile = tl.load(x_ptr + step * 4096 + at[:, None] * 64 + at[None, :])
        total = tl.dot(tile, tile, total)
    tl.store(x_ptr + at[:, None] * 64 + at[None, :], total.to(tl.float16))
"""
REFUSED_FACTS = """
[picky.arguments]
x_ptr = "*fp32"
LEAST = 64
[broad.arguments]
x_ptr = "*fp16"
n = "i32"
[broad.options]
num_stages = 30
"""


def test_configs_that_do_not_compile(tmp_path: Path) -> None:
    """A config of @triton.autotune that the compiler refuses is dropped with its words, and others serve its calls."""
    (tmp_path / "mine.py").write_text(REFUSED)
    (tmp_path / "mine.toml").write_text(REFUSED_FACTS)
    (report,) = build(("sm80",), tmp_path / "packs", kernels=(f"{tmp_path}/mine.py:picky",), jobs=1)
    assert [name for name, _ in report.dropped] == ["picky_BLOCK32_special", "picky_BLOCK32_generic"]
    assert all("too few elements" in reason for _, reason in report.dropped)
    names = [kernel.name for kernel in open_pack(report.folder).manifest.every]
    assert names == ["picky_BLOCK64_special", "picky_BLOCK64_generic"]
    assert "too few elements" in report_text([report])


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [("picky", "LEAST = 64", "LEAST = 128", "too few elements"), ("broad", "", "", "B of shared memory")],
)
def test_no_variant_left(name: str, old: str, new: str, words: str, tmp_path: Path) -> None:
    """A pack without a variant for some calls is not written; the error has the reasons."""
    (tmp_path / "mine.py").write_text(REFUSED)
    (tmp_path / "mine.toml").write_text(REFUSED_FACTS.replace(old, new))
    with pytest.raises(CompileError, match=f"(?s)no variant is left for some calls.*{words}"):
        build(("sm80",), tmp_path / "packs", kernels=(f"{tmp_path}/mine.py:{name}",), jobs=1)
    assert not (tmp_path / "packs" / "sm80").exists()


def changed(_variant: Buildable, _key: str) -> Compiled:
    """What a compiler does that finds another file."""
    raise CompileError("the file changed")


def test_only_the_compilers_refusals_are_dropped(tmp_path: Path) -> None:
    """Any other failure of a config of @triton.autotune ends the build."""
    (tmp_path / "mine.py").write_text(REFUSED)
    (tmp_path / "mine.toml").write_text(REFUSED_FACTS)
    with pytest.raises(CompileError, match=r"^the file changed$"):
        build(("sm80",), tmp_path / "packs", kernels=(f"{tmp_path}/mine.py:picky",), jobs=1, compiler=changed)


def test_types_as_constexprs(own: Callable[..., list[OwnVariant]]) -> None:
    """A constexpr may be a type of Triton's, also by default."""
    first, *_ = own(FEATURED, FEATURES, "converted")
    assert [json.loads(row.value) for row in first.arguments[1:]] == ["tl.float16", "tl.float32"]
    assert str(specialise(first).constants["TYPE"]) == "fp16"


@pytest.mark.parametrize(
    ("arch", "options", "attributes"),
    [
        ("sm90", "num_ctas = 2\nlaunch_pdl = true", ["cluster_dimension", "cluster_scheduling_policy_preference"]),
        ("sm80", "launch_cooperative_grid = true\nmaxnreg = 64", ["cooperative"]),
        ("gfx90a", "launch_pdl = true", []),
    ],
)
@own_process
def test_options_of_launches(arch: str, options: str, attributes: list[str]) -> None:
    """Clusters, programmatic and cooperative launches are launch attributes, as in Triton's own launcher."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(KERNEL)
        path.with_suffix(".toml").write_text(FACTS + f"[scale.options]\n{options}\n")
        first, *_ = variants([f"{path}:scale"], target(arch))
        entry = compiled(first).kernel
        row = target(arch)
        source = own_source(row, arranged([compiled(first)])[0])
    assert [attribute.name for attribute in entry.attributes] == attributes
    assert f".pdl = {int('pdl' in options)}," in source
    assert f".cluster_m = {2 if 'num_ctas' in options else 1}, .cluster_n = 1" in source


@pytest.mark.parametrize(
    ("arch", "old", "new", "words"),
    [
        ("sm90", "[other", "[scale.options]\nnum_ctas = 3\n[other", "num_ctas = 3: expected 1, 2, 4 or 8"),
        (
            "gfx90a",
            "[other",
            "[scale.options]\nlaunch_cooperative_grid = true\n[other",
            "launches on gfx90a do not have",
        ),
        (
            "sm80",
            '"*fp32"',
            '[["*fp32", "*fp32"]]',
            "argument x_ptr is a tuple, .*: make its elements arguments of their",
        ),
        ("sm80", '"*fp32"', '"tensordesc<fp32[8]>"', "expected a descriptor of two dimensions"),
        ("sm80", '"*fp32"', '"tensordesc<fp64[8, 8]>"', "descriptors are of fp16, .*, not of fp64"),
        ("sm80", '"*fp32"', '"tensordesc<fp16[8, SIDE]>"', "SIDE is no constexpr and no number"),
    ],
)
def test_refused(arch: str, old: str, new: str, words: str, own: Callable[..., list[OwnVariant]]) -> None:
    """What no launch has is refused by its name."""
    with pytest.raises(SpecError, match=words):
        own(FACTS.replace(old, new, 1), arch=arch)


@pytest.mark.parametrize("words", OWN)
def test_described(words: str, tmp_path: Path) -> None:
    """What --describe prints is a TOML that the function can be built by, once its guesses are right."""
    file, name = words.split(":")
    (tmp_path / file).write_bytes((EXAMPLES / file).read_bytes())
    text = describe(f"{tmp_path}/{words}", target("sm80"))
    assert name in tomllib.loads(text)
    (tmp_path / file).with_suffix(".toml").write_text(text)
    assert variants([f"{tmp_path}/{words}"], target("sm80"))


# ---------------------------------------------------------------------------------------------------------- guide
def blocks(language: str) -> list[str]:
    """The fenced blocks of one language in the guide, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "own-kernels.md").read_text(), re.DOTALL)


def test_guide_is_the_example() -> None:
    """The file and the TOML in the guide are those in examples/own; examples have fewer than 60 lines with theirs."""
    assert blocks("python") == [(EXAMPLES / "softmax.py").read_text()]
    first, *others = blocks("toml")
    assert first == (EXAMPLES / "softmax.toml").read_text()
    assert all(tomllib.loads(other) for other in others)
    for words in OWN:
        path = EXAMPLES / words.split(":")[0]
        assert sum(len(each.read_text().splitlines()) for each in (path, path.with_suffix(".toml"))) < 60


def test_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command in the guide runs where its two files are, and its launches are Python."""
    for name, text in (("softmax.py", blocks("python")[0]), ("softmax.toml", blocks("toml")[0])):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    (shell,) = blocks("sh")
    commands = shell.replace("\\\n", "").splitlines()
    for command in ["aotmm build --kernel softmax.py:softmax_kernel --describe", *commands]:
        result = CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert result.output
    for program in blocks("text")[:2]:
        compile(program, "guide", "exec")
    result = CliRunner().invoke(main, ["tune", "--help"])
    assert all(option in result.output for option in re.findall("--[a-z]+", blocks("text")[2]))


# ---------------------------------------------------------------------------------------------------------- packs
@pytest.mark.parametrize("arch", SHIPPED)
def test_pack(arch: str) -> None:
    """The examples' pack is intact, is found by its functions, and has their kernels in order."""
    folder = own_pack(arch)
    (found,) = verify(folder)
    assert found.violations == ()
    pack = open_pack(folder)
    assert pack.head.functions == tuple(words.split(":")[1] for words in OWN)
    assert pack.head.provenance.config_set == ", ".join(OWN)
    assert (pack.manifest.kernels, len(pack.manifest.own)) == ((), found.kernels)


def said(*words: str | Path) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_explained() -> None:
    """A call in words gets the variant that serves it and the guard against each other one, also as JSON."""
    common: tuple[str | Path, ...] = ("explain", "--pack", own_pack("sm80"), "--arch", "sm80", "--kernel")
    strides = [word for name in ("out_stride", "in_stride", "n_rows") for word in ("-a", f"{name}=16")]
    call: tuple[str | Path, ...] = (
        *common,
        "softmax_kernel",
        *strides,
        "-a",
        "in_ptr=fp16@8",
        "-a",
        "out_ptr=fp16",
        "-a",
        "n_cols=256",
    )
    lines = said(*call, "-a", "BLOCK=256").splitlines()
    assert lines[0] == "softmax_kernel_fp16_fp16_BLOCK256_generic"
    assert "  softmax_kernel_fp16_fp16_BLOCK256_special: in_ptr=8 is not a multiple of 16" in lines
    found = json.loads(said(*call, "-a", "BLOCK=256", "--json"))
    assert (found["function"], found["chosen"], len(found["rejected"])) == ("softmax_kernel", lines[0], 7)
    for words, message in (
        ((*call, "-a", "BLOCK=512"), "BLOCK=512: it was built for 256, 1024"),
        ((*call, "-a", "BLOCK"), "--argument 'BLOCK': expected NAME=VALUE"),
        ((*call, "-a", "BLOCK=256", "-a", "in_ptr=fp17"), "expected a type, or TYPE@ADDRESS"),
        ((*common, "none"), "no pack for sm80 has a function 'none'; there are: add_kernel"),
        ((*common, "add_kernel", "3"), "M: no effect with --kernel"),
        (common[:-1], "say M N K of a product, or --kernel NAME"),
    ):
        result = CliRunner().invoke(main, list(map(str, words)))
        assert result.exit_code
        assert message in result.output + str(result.exception)


def test_built_again() -> None:
    """`verify --rebuild` builds a pack of functions from their files, in any order, and compares it bit for bit."""
    pack = own_pack("sm80")
    places = [word for words in reversed(OWN) for word in ("--kernel", EXAMPLES / words)]
    assert "built again bit for bit" in said("verify", pack, "--rebuild", *places)
    result = CliRunner().invoke(main, ["verify", str(pack), "--rebuild", *map(str, places[:2])])
    assert "aotmm verify PACK --rebuild --kernel add.py:add_kernel --kernel softmax.py:" in result.output


def test_seen_in_the_file(own: Callable[..., list[OwnVariant]]) -> None:
    """The licence is the file's, or that of the TOML; sizes are the integers of autotune's key, writes the stores."""
    text = "# SPDX-License-Identifier: MIT\n" + KERNEL
    assert {variant.license for variant in own()} == {""}
    assert {variant.license for variant in own(text=text)} == {"MIT"}
    stated = FACTS.replace("[scale]\n", '[scale]\nlicense = "Apache-2.0"\n')
    assert {variant.license for variant in own(stated, text=text)} == {"Apache-2.0"}
    with pytest.raises(SpecError, match=r"license = 7: expected the name of one, as license = .Apache-2.0."):
        own(stated.replace('"Apache-2.0"', "7"))
    kernels = open_pack(own_pack("sm80")).manifest.own
    found = {kernel.function: (kernel.sizes, kernel.writes) for kernel in kernels}
    assert found == {
        "add_kernel": ((), ("out_ptr",)),
        "softmax_kernel": ((), ("out_ptr",)),
        "layer_norm_kernel": (("N",), ("y_ptr",)),
        "matmul_kernel": (("M", "N", "K"), ("c_ptr",)),
        "attention_kernel": ((), ("out_ptr",)),
        "descriptor_matmul_kernel": ((), ("c",)),
        "double_kernel": ((), ("out_ptr",)),
    }


def test_again(tmp_path: Path) -> None:
    """A build again compiles nothing, elsewhere gives equal bytes, and compiles a function whose helper changed."""
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "mine.toml").write_text(FACTS)
    words = tuple(f"{tmp_path}/mine.py:{name}" for name in ("scale", "other"))
    (first,) = build(("sm80",), tmp_path / "a", kernels=words, jobs=1)
    (second,) = build(("sm80",), tmp_path / "a", kernels=words, jobs=1)
    assert (first.kernels, first.compiled, second.compiled, second.linked) == (4, 4, 0, False)
    build(("sm80",), tmp_path / "b", kernels=words, jobs=1)
    assert content(tmp_path / "a" / "sm80") == content(tmp_path / "b" / "sm80")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "mine.py").write_text(KERNEL.replace("x * STEP", "x + x"))
    (changed / "mine.toml").write_text(FACTS)
    (third,) = build(
        ("sm80",), tmp_path / "a", kernels=tuple(f"{changed}/mine.py:{n}" for n in ("scale", "other")), jobs=1
    )
    assert (third.compiled, third.linked) == (2, True)


def test_other_contents_are_not_replaced() -> None:
    """A pack of products is not replaced by one of functions, nor the other way round."""
    with pytest.raises(SpecError, match="sm80 is a pack of tiny, and a pack has products or functions, not both"):
        build(("sm80",), tiny_pack("sm80").parent, kernels=(f"{EXAMPLES}/add.py:add_kernel",))
    with pytest.raises(SpecError, match=r"sm80 is a pack of add\.py:add_kernel"):
        build(("sm80",), own_pack("sm80").parent, configs="classic")


@pytest.mark.parametrize("arch", SHIPPED)
@own_process
def test_images_are_those_of_triton(arch: str) -> None:
    """Every image of the examples has the bytes that `triton.compile` gives for the same signature and options."""
    isolate()
    compiling.prepare()
    import os
    import tempfile

    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pack, row = open_pack(own_pack(arch)), target(arch)
    words = [str(EXAMPLES / place) for place in OWN]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for variant, kernel in zip(variants(words, row), pack.manifest.own, strict=True):
            function = specialise(variant).function
            passed = {r.name: r.type for r in variant.arguments if r.type[0] in "*iuft" and r.name not in variant.ones}
            values = {r.name: json.loads(r.value) for r in variant.arguments if r.value}
            values |= {r.name: None for r in variant.arguments if r.type == "None"}
            hints = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
            signature = {name: passed.get(name, "constexpr") for name in function.arg_names}
            source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=hints)
            options = {option.name: option.value for option in variant.chosen}
            options |= {} if row.ptx_version is None else {"ptx_version": row.ptx_version}
            made = triton_compile(
                source, target=GPUTarget(row.backend, row.triton_arch, row.warp_size), options=options
            )
            assert pack.code(kernel.image) == made.asm[row.image], variant.name
