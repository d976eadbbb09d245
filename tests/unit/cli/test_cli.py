"""The command line without Triton and without a GPU: help, errors, and what it says of packs."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

import aotmm
from aotmm.cli import INTERRUPTED, main, report
from aotmm.errors import (
    GET_TORCH,
    AotmmError,
    ArtifactError,
    CompileError,
    SpecError,
    build_extra_missing,
    torch_missing,
)
from aotmm.pack import manifest
from aotmm.pack.manifest import File, Manifest, Provenance
from aotmm.pack.schema import Config, Guard, Image, Kernel, Order, Parameter
from aotmm.problem import PRODUCT_QUANTITIES
from aotmm.runtime.launcher import Evaluation, Plan, Selection
from aotmm.target import EMULATED, TARGETS
from tests.samples import image, installed
from tests.samples import kernel as sample_kernel

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "cli.md").read_text()
COMMAND = (sys.executable, "-m", "aotmm")
# Runs first in a process that finds it on its path, and lets it import none of the modules in BLOCKED.
BLOCK = """
import os
import sys

class Block:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in os.environ["BLOCKED"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
HEAVY = "torch triton jinja2 rich numpy"
FRONT = 100  # bytes of the library in front of the images
NAME = "tile_fp16_fp16_nn_128x256x64_s3_w8_none"


def run(*words: str | Path) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="aotmm")


def write_pack(root: Path, arch: str, names: tuple[str, ...] = (NAME,), *, ptx: bool = True) -> Path:
    """A pack with a valid manifest whose binaries are not real."""
    folder = root / arch
    folder.mkdir(parents=True)
    library = bytearray(FRONT)

    def file(path: str, data: bytes) -> File:
        (folder / path).write_bytes(data)
        return manifest.file(path, data)

    def embedded(data: bytes) -> Image:
        library.extend(data.ljust(manifest.room(len(data)), b"\0"))
        return image(data, len(library) - manifest.room(len(data)) - FRONT)

    kernels = tuple(
        Kernel(
            name=name,
            family=family,
            role="product",
            config_name="tile_128x256x64_s3_w8",
            source="a paper",
            symbol="tile",
            dtype_a=dtype,
            dtype_b=dtype,
            dtype_c="fp16",
            layout=layout,
            epilogue="none",
            fast_accum=False,
            order=Order("fma", 1),
            persistent=False,
            pdl=False,
            config=Config(128, 256, 64, 3, 8),
            threads=256,
            shared_bytes=98_304,
            registers=242,
            spill_bytes=12,
            global_scratch_bytes=0,
            profile_scratch_bytes=0,
            vector_bytes=16,
            quantities=PRODUCT_QUANTITIES,
            parameters=(Parameter("M", "i32", "M", 24, 4),),
            guards=(Guard("stride_am", "multiple_of", 8),),
            attributes=(),
            image=embedded(b"image of " + name.encode()),
            ptx=embedded(b".version 8.0 // " + name.encode()) if ptx else None,
            key="0" * 64,
        )
        for name in names
        for family, dtype, _, layout in [name.split("_")[:4]]
    )
    pack = Manifest(
        format=manifest.FORMAT,
        arch=arch,
        min_driver=0,
        host=f"{platform.machine()}-linux-gnu",
        provenance=Provenance(
            "0.1.0",
            "3.9.0",
            "ptxas 12.9",
            "cc",
            "classic",
            "1" * 64,
            "a GPU",
            line_info=False,
            fp_fusion=True,
            status=EMULATED,
        ),
        library=file(f"libaotmm_{arch}.so", bytes(library)),
        images=manifest.Span(FRONT, len(library) - FRONT),
        library_key="2" * 64,
        sources=(file("launcher.c", b""),),
        kernels=kernels,
    )
    for name, data in manifest.write(pack).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """Packs for sm80 (two kernels) and sm90 (one of the same name, without PTX)."""
    write_pack(tmp_path / "packs", "sm80", (NAME, "tile_fp16_fp16_any_64x64x32_s2_w4_none"))
    write_pack(tmp_path / "packs", "sm90", ptx=False)
    return tmp_path / "packs"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH, without Triton and ROCm beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr("aotmm.cli.assembly._ROCM", tmp_path)
    return folder


def add_tool(folder: Path, name: str, script: str) -> None:
    """Puts a shell script called `name` into `folder`."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def without(modules: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that can import none of `modules`; `folder` is for this alone."""
    (folder / "sitecustomize.py").write_text(BLOCK)
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "BLOCKED": modules, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*COMMAND, *words], env=environment, capture_output=True, text=True, check=False)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by how it is called."""
    yield "aotmm", main
    for name, command in main.commands.items():
        yield f"aotmm {name}", command


# ------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_everything_has_help(name: str, command: click.Command) -> None:
    """Every command says what it does, every option what it is for, and both -h and --help say so."""
    assert command.help, name
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"
    words = name.split()[1:]
    texts = [run(*words, flag) for flag in ("-h", "--help")]
    assert [result.exit_code for result in texts] == [0, 0]
    assert texts[0].stdout == texts[1].stdout
    assert texts[0].stdout.startswith(f"Usage: {name} ")


def test_short_help_is_not_cut() -> None:
    """The list of commands shows whole sentences."""
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


def test_version() -> None:
    """--version says the package's version."""
    assert run("--version").stdout == f"aotmm, version {aotmm.__version__}\n"


@pytest.mark.parametrize(
    "words", [["--help"], ["build", "--help"], ["list", "--pack", "PACKS"], ["inspect", NAME, "--pack", "PACKS"]]
)
def test_light(words: list[str], tmp_path: Path) -> None:
    """Help, list and inspect run where torch, Triton, jinja2, rich and numpy cannot be imported."""
    pack = write_pack(tmp_path / "packs", "sm80")
    done = without(HEAVY, tmp_path, *(str(pack) if word == "PACKS" else word for word in words))
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------------- start


def test_the_module_is_the_program() -> None:
    """`python -m aotmm` is the command line, by its name; the program `aotmm` is the same function."""
    done = subprocess.run([*COMMAND, "list", "-h"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == run("list", "-h").stdout.split()
    assert done.stdout.startswith("Usage: aotmm list ")
    assert '\n[project.scripts]\naotmm = "aotmm.__main__:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_without_click(tmp_path: Path) -> None:
    """Where click is not installed the command line is one line that says so and what to do."""
    done = without("click", tmp_path, "list")
    assert (done.returncode, done.stdout) == (SpecError.exit_code, "")
    assert done.stderr == 'error: the command line needs click: pip install "click>=8.1"\n'


def test_another_missing_module_is_not_taken_for_click(tmp_path: Path) -> None:
    """What else fails to import is a bug, and stays a traceback."""
    done = without("difflib", tmp_path, "list")
    assert "ModuleNotFoundError: No module named 'difflib'" in done.stderr


@pytest.mark.parametrize(
    "words", [("tune", "--arch", "sm90", "--out", "OUT"), ("bench", "--out", "OUT"), ("bench", "--render", ".")]
)
def test_without_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    """Commands that need torch say where it is to be had, and write nothing."""
    done = without("torch", tmp_path, *(str(tmp_path / "out") if word == "OUT" else word for word in words))
    assert (done.returncode, done.stdout) == (SpecError.exit_code, "")
    advice = f"in a checkout: make setup, then .venv/bin/aotmm {words[0]}"
    assert done.stderr == f"error: aotmm {words[0]} needs torch; {advice}\n"
    assert not (tmp_path / "out").exists()


def test_without_what_fits(tmp_path: Path) -> None:
    """`aotmm tune` says which extra it needs before anything is timed."""
    done = without("numpy", tmp_path, "tune", "--arch", "sm90", "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (SpecError.exit_code, "")
    assert done.stderr.endswith('error: aotmm tune needs numpy, of the tune extra: pip install "aotmm[tune]"\n')


def test_without_torch_in_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no checkout, the advice is torch's own."""
    monkeypatch.setattr("aotmm.pack.files.in_checkout", lambda: False)
    assert str(torch_missing("aotmm tune")).endswith(f"install a build of it for this machine's GPUs: {GET_TORCH}")


@pytest.mark.parametrize("line", re.findall(r"^\s+(.*_AOTMM_COMPLETE=.*)$", DOCS, re.MULTILINE))
def test_shell_completion(line: str, tmp_path: Path) -> None:
    """Each documented line makes the program print the completion of that shell, which bash takes."""
    (shell,) = re.findall(r"_AOTMM_COMPLETE=(\w+)_source aotmm", line)
    program = tmp_path / "aotmm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aotmm "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def bash(text: str) -> str:
        command = [shutil.which("bash") or "bash", "-c", text]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    begins = {"bash": "_aotmm_completion() {", "zsh": "#compdef aotmm", "fish": "function _aotmm_completion;"}
    assert bash(f"_AOTMM_COMPLETE={shell}_source aotmm").strip().startswith(begins[shell])
    if shell == "bash":
        assert "-F _aotmm_completion aotmm" in bash(f"{line}; complete -p aotmm")
        assert "plain,list" in bash("COMP_WORDS='aotmm li' COMP_CWORD=1 _AOTMM_COMPLETE=bash_complete aotmm")


def test_completion_is_documented_for_every_shell() -> None:
    """There is a line for each shell that click knows."""
    assert sorted(re.findall(r"_AOTMM_COMPLETE=(\w+)_source", DOCS)) == ["bash", "fish", "zsh"]


# ------------------------------------------------------------------------------------------------------ errors


def error_classes() -> list[type[AotmmError]]:
    """The library's errors, the root included."""
    return [AotmmError, *AotmmError.__subclasses__()]


def test_exit_codes_are_unique() -> None:
    """No two errors share an exit code, nor with success, click's usage errors or Ctrl-C."""
    codes = [error.exit_code for error in error_classes()] + [0, click.UsageError.exit_code, INTERRUPTED]
    assert len(set(codes)) == len(codes)


def test_exit_codes_are_documented() -> None:
    """docs/cli.md has a row for each exit code, in their order, with the words of the error's class."""
    rows = [
        (0, "", "Success."),
        *((row.exit_code, row.__name__, (row.__doc__ or "").partition("\n")[0]) for row in error_classes()),
    ]
    rows += [(click.UsageError.exit_code, "", "Words that the command does not take; nothing was done.")]
    rows += [(INTERRUPTED, "", "Ctrl-C.")]
    found = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? *\| (.*) \|$", DOCS, re.MULTILINE)
    assert [(int(code), name, words) for code, name, words in found] == sorted(rows)


@pytest.mark.parametrize("error", error_classes())
def test_errors_become_text_and_exit_codes(error: type[AotmmError], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the library is one line on stderr, nothing on stdout, and its own exit code."""

    def fail(_path: Path) -> None:
        raise error("what failed; what to do")

    monkeypatch.setattr("aotmm.runtime.installed.find_packs", fail)
    result = run("list")
    assert (result.exit_code, result.stdout, result.stderr) == (error.exit_code, "", "error: what failed; what to do\n")


def test_other_exceptions_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug stays a traceback."""
    monkeypatch.setattr("aotmm.runtime.installed.find_packs", lambda _path: 1 / 0)
    assert isinstance(run("list").exception, ZeroDivisionError)


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends any command with 130 and a word on stderr."""

    def stop(_path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aotmm.runtime.installed.find_packs", stop)
    result = run("list")
    assert (result.exit_code, result.stdout, result.stderr) == (INTERRUPTED, "", "interrupted\n")


def test_real_process(packs: Path) -> None:
    """As a process: the exit code of the error, a clean stdout, the text on stderr, no traceback."""
    (packs / "sm90" / "kernels.json").write_bytes(b"[]")
    done = subprocess.run(
        [*COMMAND, "list", "--pack", packs, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (ArtifactError.exit_code, "")
    assert done.stderr.startswith(f"error: pack {packs / 'sm90'}: kernels.json was altered")


# ------------------------------------------------------------------------------------------------------- build


def test_build_needs_an_arch() -> None:
    """Without --arch nothing is built, and the message lists the architectures."""
    result = run("build")
    assert result.exit_code == click.UsageError.exit_code
    assert ", ".join(TARGETS) in result.stderr


def test_build_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package of the build extra is answered with the command that installs it."""
    for name in [name for name in sys.modules if name.startswith(("aotmm.build", "jinja2"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(aotmm, "build", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    advice = installed(monkeypatch)
    result = run("build", "--arch", "sm80")
    assert result.exit_code == SpecError.exit_code
    assert result.stderr == f"error: aotmm build needs jinja2{advice}\n"


def test_build_extra_of_a_bare_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where aotmm is on the path without being installed, nobody knows its extras: make does."""

    def refuse(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", refuse)
    assert "aotmm build needs Triton; in a checkout, make artifacts" in str(build_extra_missing("Triton"))


# -------------------------------------------------------------------------------------------------------- list


def test_list(packs: Path) -> None:
    """list shows every pack and one row per kernel with what it costs to run."""
    lines = run("list", "--pack", packs).stdout.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["arch", "kernels"], ["sm80", "2"], ["sm90", "1"]]
    row = next(line for line in lines if line.startswith("sm90") and NAME in line)
    assert " ".join(row.split()) == f"sm90 {NAME} product fp16 x fp16 -> fp16 nn 128x256x64 none 242 12 98304"
    assert len(lines) == 3 + 1 + 1 + 3


def test_list_json(packs: Path) -> None:
    """list --json has the packs with exactly the documented keys, from one pack's folder too."""
    body = json.loads(run("list", "--pack", packs, "--json").stdout)
    assert [(pack["arch"], len(pack["kernels"])) for pack in body] == [("sm80", 2), ("sm90", 1)]
    assert json.loads(run("list", "--pack", packs / "sm90", "--json").stdout) == body[1:]
    assert list(body[0]) == ["arch", "folder", "owner", "host", "provenance", "kernels"]
    assert body[1]["kernels"][0] == {
        "name": NAME,
        "role": "product",
        "config_name": "tile_128x256x64_s3_w8",
        "dtype_a": "fp16",
        "dtype_b": "fp16",
        "dtype_c": "fp16",
        "layout": "nn",
        "epilogue": "none",
        "fast_accum": False,
        "order": "fma k1",
        "config": dataclasses.asdict(Config(128, 256, 64, 3, 8)),
        "registers": 242,
        "spill_bytes": 12,
        "shared_bytes": 98_304,
    }


def test_list_of_one_arch(packs: Path) -> None:
    """list --arch shows the packs of that arch alone, and refuses one that does not exist or has no pack."""
    body = json.loads(run("list", "--pack", packs, "--json").stdout)
    assert json.loads(run("list", "--pack", packs, "--arch", "sm90", "--json").stdout) == body[1:]
    assert run("list", "--pack", packs, "--arch", "sm91").exit_code == SpecError.exit_code
    absent = run("list", "--pack", packs, "--arch", "gfx90a")
    assert absent.exit_code == ArtifactError.exit_code
    assert absent.stderr == (
        f"error: no pack for gfx90a in {packs}, which has sm80, sm90; "
        f"build it: aotmm build --arch gfx90a --out {packs}\n"
    )


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A pack with kernels of two families, two types and three layouts."""
    tail = "128x256x64_s3_w8_none"
    kinds = ("tile_fp16_fp16_nn", "tile_fp16_fp16_any", "tile_bf16_fp16_nt", "pingpong_bf16_fp16_nt")
    return write_pack(tmp_path / "mixed", "sm90", tuple(f"{kind}_{tail}" for kind in kinds))


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("--dtype bf16", ["tile_bf16_fp16_nt", "pingpong_bf16_fp16_nt"]),
        ("--family tile --layout nt", ["tile_bf16_fp16_nt"]),
        ("--layout nn --layout any", ["tile_fp16_fp16_nn", "tile_fp16_fp16_any"]),
        ("--dtype fp16 --dtype bf16 --family pingpong", ["pingpong_bf16_fp16_nt"]),
        ("--dtype fp16 --family pingpong", []),
    ],
)
def test_list_of_some_kernels(mixed: Path, words: str, kinds: list[str]) -> None:
    """list shows the kernels of the wanted types, families and layouts, in text and JSON; none is said in words."""
    (pack,) = json.loads(run("list", "--pack", mixed, *words.split(), "--json").stdout)
    assert [kernel["name"].rpartition("_128x")[0] for kernel in pack["kernels"]] == kinds
    result = run("list", "--pack", mixed, *words.split())
    assert result.exit_code == 0
    rows = [line.split()[1].rpartition("_128x")[0] for line in result.stdout.splitlines() if "_128x" in line]
    assert rows == kinds
    assert ("no kernel of these packs is of that dtype, family and layout\n" in result.stdout) == (not kinds)


@pytest.mark.parametrize(
    ("option", "has"), [("dtype", "bf16, fp16"), ("family", "pingpong, tile"), ("layout", "any, nn, nt")]
)
def test_list_of_unknown_kernels(mixed: Path, option: str, has: str) -> None:
    """A type, family or layout that no kernel of the packs has is refused with those that there are."""
    result = run("list", "--pack", mixed, f"--{option}", "foo")
    assert (result.exit_code, result.stdout) == (SpecError.exit_code, "")
    assert result.stderr == f"error: unknown {option} 'foo'; the kernels of these packs have: {has}\n"


def test_list_without_packs(tmp_path: Path) -> None:
    """An empty folder is an ArtifactError that says how to build packs there."""
    result = run("list", "--pack", tmp_path)
    assert result.exit_code == ArtifactError.exit_code
    assert f"aotmm build --arch ... --out {tmp_path}" in result.stderr


def test_table_aligns() -> None:
    """Text is aligned left and numbers right, each under its title, without trailing blanks."""
    assert report.table(("name", "bytes", "why"), [("a", 5, "x"), ("long name", 12345678, "")]) == (
        "name          bytes  why\na                 5  x\nlong name  12345678"
    )


# ----------------------------------------------------------------------------------------------------- inspect


def test_inspect(packs: Path) -> None:
    """inspect says everything that the manifest holds of a kernel."""
    text = run("inspect", NAME, "--arch", "sm80", "--pack", packs).stdout
    digest = hashlib.sha256(b"image of " + NAME.encode()).hexdigest()
    for line in (
        "BLOCK_M 128, BLOCK_N 256, BLOCK_K 64, num_stages 3, num_warps 8",
        "a paper",
        "242 per thread, 12 B spilled",
        "98304 B per block",
        f"{len(NAME) + 9} B at {FRONT} of libaotmm_sm80.so, sha256 {digest}",
        "ptxas 12.9",
    ):
        assert line in text
    assert "M          i32   M                24      4\n" in text
    assert "stride_am  multiple_of        8\n" in text


def test_inspect_json(packs: Path) -> None:
    """inspect --json is the manifest's own entry, with where it comes from."""
    body = json.loads(run("inspect", NAME, "--pack", packs / "sm90", "--json").stdout)
    assert list(body) == ["arch", "folder", "kernel", "provenance"]
    assert body["kernel"] == json.loads((packs / "sm90" / "kernels.json").read_text())[0]
    assert (body["arch"], body["provenance"]["triton"]) == ("sm90", "3.9.0")


def test_inspect_unknown_kernel(packs: Path) -> None:
    """A name that is not there is answered with the nearest ones."""
    result = run("inspect", NAME.replace("256", "255"), "--pack", packs)
    assert result.exit_code == SpecError.exit_code
    assert f"did you mean {NAME}" in result.stderr


def test_inspect_of_several_packs(packs: Path) -> None:
    """A name in two packs needs --arch, and the message says which there are."""
    result = run("inspect", NAME, "--pack", packs)
    assert result.exit_code == SpecError.exit_code
    assert f"say --arch or --pack for one of them: sm80 in {packs}/sm80, sm90 in {packs}/sm90" in result.stderr


@pytest.mark.parametrize(
    ("arch", "error", "text"), [("sm81", SpecError, "sm80, sm86"), ("gfx90a", ArtifactError, "build")]
)
def test_inspect_of_an_absent_arch(packs: Path, arch: str, error: type[AotmmError], text: str) -> None:
    """An unknown arch lists the known ones; one without a pack gets the command that builds it."""
    result = run("inspect", NAME, "--arch", arch, "--pack", packs)
    assert result.exit_code == error.exit_code
    assert text in result.stderr


def test_ptx(packs: Path) -> None:
    """--asm ptx prints the shipped text and nothing else."""
    result = run("inspect", NAME, "--arch", "sm80", "--pack", packs, "--asm", "ptx")
    assert (result.exit_code, result.stdout) == (0, f".version 8.0 // {NAME}")


@pytest.mark.parametrize(("asm", "text"), [("ptx", "ships no PTX"), ("amdgcn", "it has: ptx, sass")])
def test_code_that_a_pack_does_not_have(packs: Path, asm: str, text: str) -> None:
    """PTX that is not shipped and AMD code of an NVIDIA kernel are SpecErrors that say what there is."""
    result = run("inspect", NAME, "--pack", packs / "sm90", "--asm", asm)
    assert result.exit_code == SpecError.exit_code
    assert text in result.stderr


def test_sass_without_a_disassembler(packs: Path, tools: Path) -> None:
    """Without nvdisasm the error says what to install."""
    assert not list(tools.iterdir())
    result = run("inspect", NAME, "--pack", packs / "sm90", "--asm", "sass")
    assert result.exit_code == CompileError.exit_code
    assert "nvdisasm or cuobjdump" in result.stderr
    assert "pip install triton" in result.stderr


@pytest.mark.parametrize(("name", "words"), [("nvdisasm", "-c"), ("cuobjdump", "-sass")])
def test_sass(packs: Path, tools: Path, name: str, words: str) -> None:
    """A disassembler on PATH gets the image's bytes, and its output is printed as it is."""
    add_tool(tools, name, 'while read -r line || [ -n "$line" ]; do echo "$1 $2 $line"; done < "$2"')
    result = run("inspect", NAME, "--pack", packs / "sm90", "--asm", "sass")
    assert (result.exit_code, result.stdout) == (0, f"{words} {NAME}.cubin image of {NAME}\n")


def test_a_disassembler_that_refuses(packs: Path, tools: Path) -> None:
    """What a disassembler says against an image is passed on."""
    add_tool(tools, "nvdisasm", "echo this is no cubin >&2; exit 1")
    result = run("inspect", NAME, "--pack", packs / "sm90", "--asm", "sass")
    assert result.exit_code == CompileError.exit_code
    assert "this is no cubin" in result.stderr


def test_an_altered_image_is_not_disassembled(packs: Path, tools: Path) -> None:
    """The image is compared with the manifest before a tool sees it."""
    add_tool(tools, "nvdisasm", "echo seen")
    (packs / "sm90" / "libaotmm_sm90.so").write_bytes(b"other")
    result = run("inspect", NAME, "--pack", packs / "sm90", "--asm", "sass")
    assert (result.exit_code, result.stdout) == (ArtifactError.exit_code, "")
    assert "was altered" in result.stderr


def test_code_is_not_json(packs: Path) -> None:
    """--asm with --json is refused rather than half obeyed."""
    assert run("inspect", NAME, "--pack", packs, "--asm", "ptx", "--json").exit_code == click.UsageError.exit_code


# ----------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--arch", "sm90", "--dtype", "fp17"), "fp16, bf16, fp32, tf32"),
        (("--arch", "sm91"), ", ".join(TARGETS)),
    ],
)
def test_explain_of_what_does_not_exist(packs: Path, words: tuple[str, ...], text: str) -> None:
    """Unknown types and architectures are SpecErrors that list the known ones."""
    result = run("explain", *words, "64", "64", "64", "--pack", packs)
    assert result.exit_code == SpecError.exit_code
    assert text in result.stderr


@pytest.mark.parametrize(("arch", "device"), [("sm80", "NVIDIA A11"), ("sm90", "NVIDIA A10")])
def test_explain_of_a_gpu_that_is_not_listed(packs: Path, arch: str, device: str) -> None:
    """A GPU that is not in the list, or that runs no kernels of the arch, is refused with those that are and do."""
    result = run("explain", "--arch", arch, "--device", device, "64", "64", "64", "--pack", packs)
    assert result.exit_code == SpecError.exit_code
    assert f"no GPU {device!r} is known for {arch}; there are: " in result.stderr
    assert ("NVIDIA A10;" in result.stderr) == (arch == "sm80")


@pytest.mark.parametrize(
    "words", [("0", "1", "1"), ("1", "1", "-1"), ("1", "1", str(2**63)), ("--align", "0", "1", "1", "1"), ("1", "1")]
)
def test_explain_refuses_sizes(packs: Path, words: tuple[str, ...]) -> None:
    """Sizes without a launch, negative ones and those beyond 64 bits are usage errors that name the argument."""
    result = run("explain", "--arch", "sm90", "--pack", packs, *words)
    assert result.exit_code == click.UsageError.exit_code
    assert "Error: " in result.stderr


def selection(fit: int, reasons: dict[str, int]) -> Selection:
    """A selection with that many plans, each 100 ns slower than the one before, and as many kernels for each reason."""
    rejected = [reason for reason, count in reasons.items() for _ in range(count)]
    plans = [Plan(number, workspace_bytes=1000 + number, cost=1000 + 100 * number) for number in range(fit)]
    rows = [
        Evaluation(sample_kernel(f"k{number}"), same_types=True, rejected=reason, plan=plan)
        for number, (plan, reason) in enumerate(
            [*((plan, None) for plan in plans), *((None, reason) for reason in rejected)]
        )
    ]
    return Selection(rows[0] if fit else None, tuple(rows))


SHARED = "needs {} B of shared memory per block, the device has 1024 B"


def test_explain_shows_the_best() -> None:
    """Five plans with what memory they work in; of all others how many there are, and why, the most frequent first."""
    reasons = {
        "K=100 is not divisible by 8": 2,
        SHARED.format(2048): 2,
        SHARED.format(4096): 1,
        "stride_am=7 is not 1": 1,
    }
    found = selection(8, reasons)
    rejected = [row for row in found.evaluations if row.rejected]
    text = report.selection_text(found, rejected, 7)
    chosen, plans, others, types = text.split("\n\n")
    assert chosen.splitlines()[-1] == "workspace  1000 B"
    assert [line.split() for line in plans.splitlines()[1:]] == [
        [f"k{number}", f"{1 + number / 10:.2f}", f"{1 + number / 10:.2f}", "product", "0", str(1000 + number)]
        for number in range(1, 5)
    ]
    assert others.splitlines() == [
        "kernels  not shown; --all shows them",
        "      3  fit too",
        "      3  needs 2048 to 4096 B of shared memory per block, the device has 1024 B",
        "      2  K=100 is not divisible by 8",
        "      1  stride_am=7 is not 1",
    ]
    assert types.startswith("7 kernels of the pack are for other types")
    whole = report.selection_text(found, rejected, 7, everything=True).split("\n\n")
    assert [len(part.splitlines()) for part in whole] == [8, 1 + 7, 1 + 6, 1]
    assert "--all" not in "".join(whole)


@pytest.mark.parametrize(
    ("split", "more", "words"),
    [(1, {}, "unknown"), (4, {}, "unknown, K in 4 slices"), (1, {"serial_k": 8}, "unknown, K in 8 slices")],
)
def test_explain_shows_slices(split: int, more: dict[str, int], words: str) -> None:
    """The row of the sums has the slices of K, whichever way they are added."""
    kernel = sample_kernel("k")
    config = dataclasses.replace(kernel.config, **more)
    kernel = dataclasses.replace(kernel, order=Order("unknown"), config=config)
    row = Evaluation(kernel, same_types=True, rejected=None, plan=Plan(0, split=split, cost=1000))
    lines = report.selection_text(Selection(row, (row,)), [], 0).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("sums ")] == [words]


def test_explain_without_others() -> None:
    """Nothing is said of others where there are none."""
    assert report.selection_text(selection(1, {}), [], 0).count("\n\n") == 0


# ------------------------------------------------------------------------------------------------------ doctor


# ------------------------------------------------------------------------------------------------------ verify


def test_verify_tells_everything(packs: Path) -> None:
    """All that is wrong with all packs is on stderr, a row per pack on stdout, and the exit code is an artifact's."""
    (packs / "sm80" / "launcher.c").write_text("other")
    (packs / "sm90" / "manifest.json").write_text("{}")
    result = run("verify", packs)
    assert result.exit_code == ArtifactError.exit_code
    rows = [line.split()[:4] for line in result.stdout.splitlines()[1:]]
    assert rows == [[f"{packs}/sm80", "sm80", "4", "2"], [f"{packs}/sm90", "-", "4", "0"]]
    for words in (
        "sm80: launcher.c was altered",
        "sm80: tile_fp16_fp16_nn_128x256x64_s3_w8_none.cubin: no 64-bit ELF",
        "sm80: tile_fp16_fp16_any_64x64x32_s2_w4_none.ptx: no PTX",
        "sm90: manifest.json: pack format None",
    ):
        assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_verify_json(packs: Path) -> None:
    """Programs get the same, also where something is wrong."""
    result = run("verify", packs / "sm90", "--json")
    (body,) = json.loads(result.stdout)
    assert result.exit_code == ArtifactError.exit_code
    assert (body["place"], body["arch"], body["kernels"]) == (str(packs / "sm90"), "sm90", 1)
    assert f"{len(body['violations'])} violations" in result.stderr


def test_doctor_of_broken_packs(packs: Path) -> None:
    """doctor goes on after a pack that cannot be used, says why for each, and ends with the error's code."""
    (packs / "sm80" / "launcher.c").write_bytes(b"altered")
    (packs / "half").mkdir()
    result = run("doctor", "--pack", packs, "--json")
    body = json.loads(result.stdout)
    assert result.exit_code == body["exit_code"] == ArtifactError.exit_code
    errors = {Path(pack["folder"]).name: pack["error"] for pack in body["packs"]}
    assert "it has no manifest.json" in errors["half"]
    assert "launcher.c was altered" in errors["sm80"]
    assert "libaotmm_sm90.so cannot be loaded" in errors["sm90"]
    text = run("doctor", "--pack", packs)
    assert text.exit_code == ArtifactError.exit_code
    assert all(error in text.stdout for error in errors.values())


def test_doctor_without_packs(tmp_path: Path) -> None:
    """No packs is an error with the command that builds some."""
    result = run("doctor", "--pack", tmp_path)
    assert result.exit_code == ArtifactError.exit_code
    assert f"no packs in {tmp_path}; build some: aotmm build" in result.stdout


def test_doctor_json_keys(tmp_path: Path) -> None:
    """The keys that programs read."""
    body = json.loads(run("doctor", "--pack", tmp_path, "--json").stdout)
    keys = [
        "aotmm",
        "python",
        "torch",
        "torch_build",
        "load_error",
        "direct_call",
        "cuda_driver",
        "packs",
        "devices",
        "advice",
        "exit_code",
    ]
    assert list(body) == keys
    facts = ["functions", "kernels", "bytes", "executed_on", "tuning", "error"]
    assert list(body["packs"][0]) == ["folder", "owner", "arch", *facts]


@pytest.mark.parametrize(
    ("torch", "version", "build", "advice"),
    [
        (None, None, None, "torch is not installed"),
        (
            SimpleNamespace(cuda=None, hip=None),
            "9.9",
            "CPU",
            "is a CPU build, no GPU can be used; install a CUDA or ROCm",
        ),
        (SimpleNamespace(cuda="12.9", hip=None), "9.9", "CUDA 12.9", "torch sees no GPU"),
        (SimpleNamespace(cuda=None, hip="7.1"), "9.9", "ROCm 7.1", "torch sees no GPU"),
    ],
)
def test_doctor_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    torch: SimpleNamespace | None,
    version: str | None,
    build: str | None,
    advice: str,
) -> None:
    """doctor tells the builds of torch apart and says what to do where no GPU can be used."""
    module = torch and SimpleNamespace(
        __version__="9.9", version=torch, cuda=SimpleNamespace(is_available=lambda: False)
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    body = json.loads(run("doctor", "--pack", tmp_path, "--json").stdout)
    assert (body["torch"], body["torch_build"]) == (version, build)
    assert advice in body["advice"][0]


def test_doctor_of_a_torch_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error of torch while it looks for GPUs is passed on, not raised."""

    def fail() -> bool:
        raise RuntimeError("CUDA unknown error")

    module = SimpleNamespace(
        __version__="9.9", version=SimpleNamespace(cuda="12.9", hip=None), cuda=SimpleNamespace(is_available=fail)
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    result = run("doctor", "--pack", tmp_path)
    assert "torch sees no GPU: CUDA unknown error" in result.stdout


# ------------------------------------------------------------------------------------------------------------ targets


def test_list_of_targets() -> None:
    """Every architecture is listed, packs or not, with what its kernels were run on; or the one that is asked for."""
    rows = json.loads(run("list", "--targets", "--json").stdout)
    assert [row["name"] for row in rows] == list(TARGETS)
    assert {row["name"]: row["status"] for row in rows} == {name: row.status for name, row in TARGETS.items()}
    header, *lines = run("list", "--targets").stdout.splitlines()
    assert header.split()[:3] == ["arch", "GPUs", "status"]
    for row, line in zip(TARGETS.values(), lines, strict=True):
        assert re.fullmatch(rf"{row.name} +{re.escape(row.gpus)} +{row.status} +{re.escape(row.executed_on)}", line)
    assert run("list", "--targets", "--arch", "gfx950").stdout.splitlines()[1].startswith("gfx950")


@pytest.mark.parametrize("words", ["--pack DIR", "--dtype fp16", "--family tile", "--layout nn"])
def test_list_of_targets_has_no_kernels(words: str) -> None:
    """What is about packs and their kernels is refused beside --targets."""
    result = run("list", "--targets", *words.split())
    assert (result.exit_code, result.stdout) == (click.UsageError.exit_code, "")
    assert f"{words.partition(' ')[0]}: no effect with --targets" in result.stderr


# ------------------------------------------------------------------------------------------------- what has no effect


@pytest.mark.parametrize(
    ("words", "given", "why"),
    [
        ("--configs classic", "--configs", "without --rebuild"),
        ("--dtype fp16 --jobs 1", "--dtype, --jobs", "without --rebuild"),
    ],
)
def test_verify_refuses_what_has_no_effect(packs: Path, tmp_path: Path, words: str, given: str, why: str) -> None:
    """Options of what is not asked for are refused, each by its name, before anything is verified."""
    (tmp_path / "file").write_text("")
    result = run("verify", packs, *words.replace("FILE", str(tmp_path / "file")).split())
    assert (result.exit_code, result.stdout) == (click.UsageError.exit_code, "")
    assert f"Error: {given}: no effect {why}\n" in result.stderr


def values(command: str, without: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Every parameter of a command but those of that name: what it is called, and words that give it."""
    for parameter in main.commands[command].params:
        if parameter.name not in without:
            is_option = isinstance(parameter, click.Option)
            is_flag = isinstance(parameter, click.Option) and parameter.is_flag
            name = parameter.opts[0] if is_option else parameter.opts[0].upper()
            paths = {"file": __file__, "table": __file__, "calls": __file__, "start": __file__, "pack": "."}
            choices = getattr(parameter.type, "choices", [])
            value = next(iter(choices), None) or paths.get(str(parameter.name), "1")
            yield name, [name] * is_option + [value] * (not is_flag)


@pytest.mark.parametrize(
    ("name", "words"), list(values("tune", {"arch", "dtypes", "out", "refit", "start", "choose", "folder", "as_json"}))
)
def test_refit_refuses_what_has_no_effect(name: str, words: list[str], tmp_path: Path) -> None:
    """Beside tune --refit every option is refused that says how to measure."""
    result = run("tune", "--arch", "sm90", "--out", tmp_path / "table.json", "--refit", *words)
    assert result.exit_code == click.UsageError.exit_code
    assert f"Error: {name}: no effect with --refit\n" in result.stderr


def test_a_start_is_of_a_refit(tmp_path: Path) -> None:
    """tune --start is refused where times are measured."""
    result = run("tune", "--arch", "sm90", "--out", tmp_path / "table.json", "--start", __file__)
    assert result.exit_code == click.UsageError.exit_code
    assert "Error: --start: no effect without --refit\n" in result.stderr


@pytest.mark.parametrize(("name", "words"), list(values("tune", {"arch", "choose", "as_json"})))
def test_choose_refuses_what_has_no_effect(name: str, words: list[str]) -> None:
    """Beside tune --choose every option is refused but --json: its input is committed."""
    result = run("tune", "--arch", "sm90", "--choose", *words)
    assert result.exit_code == click.UsageError.exit_code
    assert f"Error: {name}: no effect with --choose\n" in result.stderr


@pytest.mark.parametrize(("name", "words"), list(values("bench", {"rendered", "as_json"})))
def test_render_refuses_what_has_no_effect(name: str, words: list[str]) -> None:
    """Beside bench --render everything is refused but --json."""
    result = run("bench", "--render", ".", *words)
    assert result.exit_code == click.UsageError.exit_code
    assert f"Error: {name}: no effect with --render\n" in result.stderr


@pytest.mark.parametrize(("name", "words"), list(values("bench", {"rendered", "as_json", "ablation", "out"})))
def test_ablation_refuses_what_has_no_effect(name: str, words: list[str]) -> None:
    """bench --ablation takes --out and --json alone."""
    result = run("bench", "--ablation", *words)
    assert result.exit_code == click.UsageError.exit_code
    assert f"Error: {name}: no effect with --ablation\n" in result.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("llm --overhead", "WHAT: no effect with --overhead"),
        ("--overhead --dtype fp16 --every 2", "--dtype, --every: no effect with --overhead"),
        ("scaling first_result --provider torch", "--provider: no effect on scaling, first_result"),
        ("build_scaling --out out", "--out: no effect on build_scaling"),
        ("random --every 2", "--every: no effect on random"),
        ("llm --seed 1 --regret", "--seed, --regret: no effect on anything but random"),
        ("random --regret --provider torch", "--provider: no effect with --regret"),
        (f"random --table {__file__}", "--table: no effect without --regret"),
    ],
)
def test_bench_refuses_what_has_no_effect(words: str, text: str) -> None:
    """Options that nothing of what is to be measured heeds are refused."""
    result = run("bench", *words.split())
    assert result.exit_code == click.UsageError.exit_code
    assert f"Error: {text}\n" in result.stderr


def test_jobs_on_a_cluster(tmp_path: Path) -> None:
    """--jobs is refused beside --scheduler."""
    result = run("build", "--arch", "sm80", "--out", tmp_path, "--scheduler", "tcp://host:1", "--jobs", "2")
    assert result.exit_code == click.UsageError.exit_code
    assert "Error: --jobs: no effect with --scheduler, whose workers say how many processes they run" in result.stderr


@pytest.mark.parametrize("words", [("--help",), ("list", "--targets"), ("list", "--targets", "--json")])
def test_output_that_nobody_can_take(words: tuple[str, ...]) -> None:
    """Where the output cannot be written, buffered or not, the error is one line, and the exit code tells it."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for environment in (buffered, buffered | {"PYTHONUNBUFFERED": "1"}):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*COMMAND, *words],
                cwd=ROOT,
                env=environment,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == AotmmError.exit_code
        assert done.stderr == "error: the system refused: [Errno 28] No space left on device\n"
