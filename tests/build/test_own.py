"""Functions of a user's own: what their file and TOML may be, and that what is built is Triton's own code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import tomllib
from click.testing import CliRunner

from aotmm.build import build
from aotmm.build import compile as compiling
from aotmm.build.own import OwnVariant, describe, specialise, variants
from aotmm.cli import main
from aotmm.errors import SpecError
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
        ("grid =", "gird =", r"\[scale\] has 'gird'; it may have: grid, arguments, options, specialise"),
        ("[scale.arg", "[scale.options]\nwarps = 4\n[scale.arg", r"\[scale.options\] has 'warps'"),
        ("[scale.arg", "[scale.options]\nnum_warps = 'x'\n[scale.arg", "option num_warps = .*: expected integers"),
        ("[other", "[[scale.specialise]]\nequal_to_1 = ['x_ptr']\n[other", "'x_ptr' cannot have this hint"),
        ("[other", "[[scale.specialise]]\nmultiple_of_16 = ['factor']\n[other", "'factor' cannot have this hint"),
        ("[scale]", "[scale", "not a TOML file"),
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
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
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
        ((f"{EXAMPLES}/add.py:add_kernel",) * 2, "two functions are called add_kernel"),
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


@pytest.mark.parametrize("words", OWN)
def test_described(words: str, tmp_path: Path) -> None:
    """What --describe prints is a TOML that the function can be built by, once its guesses are right."""
    file, name = words.split(":")
    (tmp_path / file).write_bytes((EXAMPLES / file).read_bytes())
    text = describe(f"{tmp_path}/{words}", target("sm80"))
    assert name in tomllib.loads(text)
    (tmp_path / file).with_suffix(".toml").write_text(text)
    assert len(variants([f"{tmp_path}/{words}"], target("sm80"))) >= 2


# ---------------------------------------------------------------------------------------------------------- guide
def blocks(language: str) -> list[str]:
    """The fenced blocks of one language in the guide, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "own-kernels.md").read_text(), re.DOTALL)


def test_guide_is_the_example() -> None:
    """The file and the TOML in the guide are those in examples/own; examples have fewer than 60 lines with theirs."""
    assert blocks("python") == [(EXAMPLES / "softmax.py").read_text()]
    assert blocks("toml") == [(EXAMPLES / "softmax.toml").read_text()]
    for words in OWN:
        path = EXAMPLES / words.split(":")[0]
        assert sum(len(each.read_text().splitlines()) for each in (path, path.with_suffix(".toml"))) < 60


def test_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command in the guide runs where its two files are, and its launches are Python."""
    for name, text in (("softmax.py", blocks("python")[0]), ("softmax.toml", blocks("toml")[0])):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    (shell,) = blocks("sh")
    for command in ["aotmm build --kernel softmax.py:softmax_kernel --describe", *shell.splitlines()]:
        result = CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert result.output
    compile(blocks("text")[0], "guide", "exec")


# ---------------------------------------------------------------------------------------------------------- packs
@pytest.mark.parametrize("arch", SHIPPED)
def test_pack(arch: str) -> None:
    """The examples' pack is intact, is found by its functions, and has their kernels in order."""
    folder = own_pack(arch)
    (found,) = verify(folder)
    assert found.violations == ()
    pack = open_pack(folder)
    assert pack.head.functions == ("add_kernel", "softmax_kernel", "layer_norm_kernel")
    assert pack.head.provenance.config_set == ", ".join(OWN)
    assert (pack.manifest.kernels, len(pack.manifest.own)) == ((), found.kernels)


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
    compiling.isolate()
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
            passed = {r.name: r.type for r in variant.arguments if r.type[0] in "*iuf" and r.name not in variant.ones}
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
