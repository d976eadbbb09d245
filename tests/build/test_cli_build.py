"""The command line with real packs: building them, stopping half way, and what it says of them."""

from __future__ import annotations

import json
import os
import platform
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from aotmm.cli import INTERRUPTED, main
from aotmm.errors import ArtifactError, CompileError, DriverError, NoKernelError, SpecError
from aotmm.pack import table
from aotmm.runtime.launcher import Launcher
from aotmm.runtime.tuning import CDevice
from aotmm.target import HOSTS, TARGETS, host
from tests.config_sets import config_set, tile

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "aotmm")

NN = "tile_fp16_fp16_nn_32x64x64_s2_w4_none"
ANY = "tile_fp16_fp16_any_64x64x32_s2_w4_none"


def generic(arch: str) -> str:
    """The generic kernel of an arch; the name of AMD's has its matrix instruction."""
    return ANY if TARGETS[arch].backend == "cuda" else ANY.replace("_none", "_i16_p2_none")


def write_set(folder: Path, *entries: str, dtypes: Sequence[str] = ("fp16",)) -> Path:
    """A config set in `folder`."""
    path = folder / "tests.toml"
    path.write_text(config_set(*entries, dtypes=dtypes, layouts=["nn"], epilogues=["none"]))
    return path


def run(*words: str | Path) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="aotmm")


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config set of one tile; with the generic kernel and five copies, every arch gets seven kernels."""
    return write_set(tmp_path_factory.mktemp("configs"), tile(32, 64, 64, 2, 4))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory, configs: Path) -> Path:
    """Packs of `configs` for every arch, and the cache of their build."""
    out = tmp_path_factory.mktemp("packs")
    result = run("build", "--arch", "all", "--configs", configs, "--out", out)
    assert result.exit_code == 0, result.stderr
    return out


# ------------------------------------------------------------------------------------------------------- build


def test_build_again(packs: Path, configs: Path) -> None:
    """A second build compiles nothing and leaves the packs alone; stdout is the table, stderr how far it is."""
    before = content(packs / "sm80")
    command: list[str | Path] = [
        *COMMAND,
        "build",
        "--arch",
        "sm80",
        "--arch",
        "sm90",
        "--configs",
        configs,
        "--out",
        packs,
    ]
    done = subprocess.run([*command, "--jobs=2"], cwd=ROOT, capture_output=True, text=True, check=False)
    begin = [f"{arch}: 7 kernels on 2 processes" for arch in ("sm80", "sm90")]
    end = [f"{arch}: 100 % (7 of 7 kernels)" for arch in ("sm80", "sm90")]
    assert (done.returncode, done.stderr.splitlines()) == (0, [*begin, *end])
    header, *rows = [line.split() for line in done.stdout.splitlines()]
    assert header == ["arch", "kernels", "bytes", "seconds", "compiled", "reused", "dropped", "pack"]
    for arch, row in zip(("sm80", "sm90"), rows, strict=True):
        assert (row[:2], row[4:8]) == ([arch, "7"], ["0", "7", "0", str(packs / arch)])
        assert row[8:] == ["(as", "it", "was)"]
    assert content(packs / "sm80") == before


def test_build_says_what_it_drops(packs: Path, tmp_path: Path) -> None:
    """A kernel that needs more shared memory than the arch has is named with its reason, in text and in JSON."""
    shutil.copytree(packs / ".cache", tmp_path / "out" / ".cache")
    path = write_set(tmp_path, tile(256, 64, 64, 8, 4))
    words = ("build", "--arch", "sm80", "--configs", path, "--out", tmp_path / "out")
    text = run(*words)
    assert text.exit_code == 0, text.stderr
    last = text.stdout.splitlines()[-1]
    name = "tile_fp16_fp16_nn_256x64x64_s8_w4_none"
    assert last.split()[:3] == ["sm80", name, "needs"]
    assert "sm80 has 166912 B" in last
    (row,) = json.loads(run(*words, "--json").stdout)
    assert (row["kernels"], row["compiled"], row["linked"]) == (6, 0, False)
    assert row["dropped"][0]["kernel"] == name
    assert row["folder"] == str(tmp_path / "out" / "sm80")


def test_build_shows_progress_on_a_terminal(packs: Path, configs: Path) -> None:
    """Where stderr is a terminal it gets a bar per arch; stdout still has the table alone."""
    master, slave = pty.openpty()
    command: list[str | Path] = [*COMMAND, "build", "--arch", "sm80", "--configs", configs, "--out", packs, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=slave, check=False)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert "sm80" in shown
    assert "7/7" in shown
    assert f"on {os.cpu_count()} process" in shown
    assert [row["arch"] for row in json.loads(done.stdout)] == ["sm80"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--arch", "sm81"), f"unknown arch 'sm81'; known: {', '.join(TARGETS)}"),
        (("--arch", "sm80", "--dtype", "fp8e4"), "'fp8e4' does not exist on sm80"),
        (("--arch", "sm80", "--configs", "best"), "unknown config set 'best'; known: classic, default, tutorial"),
        (("--arch", "sm80", "--host", "arm64"), "unknown host 'arm64'; known: x86_64, aarch64"),
    ],
)
def test_build_of_what_does_not_exist(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    """Unknown names are SpecErrors that list the known ones, and nothing is written."""
    result = run("build", *words, "--out", tmp_path / "out")
    assert result.exit_code == SpecError.exit_code
    assert text in result.stderr
    assert not (tmp_path / "out").exists()


def test_build_of_nothing_but_generic_kernels(tmp_path: Path) -> None:
    """A config set without an entry for any arch and type that are asked for is an error, and nothing is built."""
    path = tmp_path / "mine.toml"
    tile = "block_m = 64\nblock_n = 64\nblock_k = 32\nnum_stages = 2\nnum_warps = 4\n"
    path.write_text(f'dtypes = ["fp16"]\nsource = "a test"\n[[config]]\nfamily = "tile"\narchs = ["sm90"]\n{tile}')
    out = tmp_path / "packs"
    result = run("build", "--arch", "sm80", "--arch", "gfx90a", "--configs", path, "--out", out)
    assert result.exit_code == SpecError.exit_code
    assert f"{path}': no entry is for sm80 or gfx90a and a type that is built (fp16)" in result.stderr
    assert not out.exists()


def test_build_for_another_processor(packs: Path, configs: Path, tmp_path: Path) -> None:
    """--host links the same kernels for another machine, never in the place of this one's packs; it can be verified."""
    other = next(name for name in HOSTS if name != platform.machine())
    words = ("build", "--arch", "sm80", "--configs", configs, "--host", other)
    refused = run(*words)
    assert refused.exit_code == click.UsageError.exit_code
    assert f"say --out: the packs of a checkout are for {host()}, not for {host(other)}" in refused.stderr
    shutil.copytree(packs / ".cache", tmp_path / ".cache")
    made = run(*words, "--out", tmp_path, "--json")
    assert made.exit_code == 0, made.stderr
    assert [row["compiled"] for row in json.loads(made.stdout)] == [0]
    assert f"is for {host(other)}, this machine is {host()}" in run("list", "--pack", tmp_path).stderr
    rebuilt = run("verify", tmp_path / "sm80", "--rebuild", "--configs", configs)
    assert rebuilt.exit_code == 0, rebuilt.stderr


def test_a_failing_kernel_leaves_the_pack_alone(packs: Path, tmp_path: Path) -> None:
    """What the compiler refuses is named with arch, config and the compiler's words; the previous pack stays."""
    shutil.copytree(packs / "sm80", tmp_path / "sm80")
    before = content(tmp_path / "sm80")
    path = write_set(tmp_path, tile(64, 64, 16, 2, 4), dtypes=["fp8e5"])
    result = run("build", "--arch", "sm80", "--configs", path, "--out", tmp_path)
    assert result.exit_code == CompileError.exit_code
    for text in ("error: sm80: tile_fp8e5_fp16_nn_64x64x16_s2_w4_none does not compile", "from tests", "K >= 32"):
        assert text in result.stderr
    assert content(tmp_path / "sm80") == before
    assert not list(tmp_path.glob(".*.new"))


def add_packs(site: Path, distribution: str, package: str, *folders: Path) -> None:
    """Puts a distribution with copies of packs into `site`."""
    metadata = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[aotmm.packs]\nours = {package}\n")
    for folder in folders:
        shutil.copytree(folder, site.joinpath(*package.split("."), folder.name))


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that run and have `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue  # it has just ended
    return found


def test_interrupted_build(packs: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a build: 130 and the previous pack; what did compile is kept, no process is left."""
    shutil.copytree(packs / "sm80", tmp_path / "sm80")
    before = content(tmp_path / "sm80")
    path = write_set(tmp_path, *(tile(64, 64, 64, stages, 4) for stages in range(2, 9)))
    command: list[str | Path] = [
        *COMMAND,
        "build",
        "--arch",
        "sm80",
        "--configs",
        path,
        "--out",
        tmp_path,
        "--jobs=2",
    ]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what runs in background
    mark = f"MARK={tmp_path}"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"MARK": str(tmp_path)},
    )
    signal.signal(signal.SIGINT, handler)
    with process:
        deadline = time.monotonic() + 120
        while not list((tmp_path / ".cache").glob("[!.]*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(processes_with(mark)) >= 3
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (INTERRUPTED, "")
    assert stderr.splitlines()[-1].startswith("interrupted: packs in ")
    assert "Traceback" not in stderr
    assert processes_with(mark) == []
    assert content(tmp_path / "sm80") == before
    assert not list(tmp_path.glob(".*.new"))
    assert 1 <= len(list((tmp_path / ".cache").glob("[!.]*"))) < 8


# --------------------------------------------------------------------------------------------- list and inspect


def test_list_of_a_build(packs: Path) -> None:
    """Every kernel that was built is listed, by arch."""
    body = json.loads(run("list", "--pack", packs, "--json").stdout)
    assert [pack["arch"] for pack in body] == sorted(TARGETS)
    for pack in body:
        assert [kernel["name"] for kernel in pack["kernels"] if kernel["role"] == "product"] == [
            generic(pack["arch"]),
            NN,
        ]
        assert [kernel["role"] for kernel in pack["kernels"]].count("copy") == 5


def test_inspect_of_a_build(packs: Path) -> None:
    """What inspect shows is what the kernel was built with."""
    kernel = json.loads(run("inspect", NN, "--arch", "sm90", "--pack", packs, "--json").stdout)["kernel"]
    assert (kernel["source"], kernel["config"]["block_m"], kernel["layout"]) == ("tests", 32, "nn")
    assert kernel["registers"] > 0
    assert [row["name"] for row in kernel["parameters"]][:4] == ["a_ptr", "b_ptr", "c_ptr", "M"]
    assert {"value": "stride_am", "relation": "multiple_of", "operand": 8} in kernel["guards"]


def test_verify_a_build(packs: Path) -> None:
    """A build verifies, every arch of it."""
    result = run("verify", packs, "--json")
    assert result.exit_code == 0, result.stderr
    assert [(row["arch"], row["kernels"], row["violations"]) for row in json.loads(result.stdout)] == [
        (arch, 7, []) for arch in sorted(TARGETS)
    ]


def test_verify_by_rebuilding(packs: Path, configs: Path, tmp_path: Path) -> None:
    """A pack is what its sources give here; one of other sources is told file by file, with what made it."""
    result = run("verify", packs / "gfx90a", "--rebuild", "--configs", configs)
    assert result.exit_code == 0, result.stderr
    assert "intact, built again bit for bit" in result.stdout
    assert result.stderr.startswith(f"gfx90a: 7 kernels on {os.cpu_count()} process")
    assert result.stderr.splitlines()[-1] == "gfx90a: 100 % (7 of 7 kernels)"
    (tmp_path / "ours").mkdir()
    other = write_set(tmp_path / "ours", tile(64, 64, 64, 2, 4))
    result = run("verify", packs / "gfx90a", "--rebuild", "--configs", other)
    assert result.exit_code == ArtifactError.exit_code
    for words in (
        "kernels.json is not what is built here",
        "launcher.c is not what is built here",
        "libaotmm_gfx90a.so is not what is built here",
    ):
        assert words in result.stderr
    result = run("verify", packs / "gfx90a", "--rebuild")
    assert result.exit_code == SpecError.exit_code
    assert result.stderr == (
        "error: the pack for gfx90a was built from tests.toml, which aotmm does not bring along; name the pack and "
        "that file: aotmm verify PACK --rebuild --configs tests.toml\n"
    )


def test_verify_of_what_other_distributions_add(packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a path the packs of plugins are verified too, each with whose it is."""
    monkeypatch.setattr("aotmm.runtime.installed.own", lambda: packs / "sm80")
    site = tmp_path / "site"
    add_packs(site, "acme-kernels", "acme.packs", packs / "sm90")
    monkeypatch.syspath_prepend(site)
    result = run("verify", "--json")
    assert result.exit_code == 0, result.stderr
    assert [(row["place"], row["owner"], row["arch"], row["kernels"]) for row in json.loads(result.stdout)] == [
        (str(site / "acme/packs/sm90"), "acme-kernels 1.0", "sm90", 7),
        (str(packs / "sm80"), "", "sm80", 7),
    ]
    assert f"{site}/acme/packs/sm90 (added by acme-kernels 1.0)  sm90" in run("verify").stdout


def test_verify_of_broken_plugins(packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's altered pack and one that is not there are violations; all others are verified."""
    monkeypatch.setattr("aotmm.runtime.installed.own", lambda: packs / "sm80")
    add_packs(tmp_path, "acme-kernels", "acme", packs / "sm90")
    add_packs(tmp_path, "void-kernels", "void")
    (tmp_path / "acme" / "sm90" / "launcher.c").write_text("other")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("verify", "--json")
    assert result.exit_code == ArtifactError.exit_code
    assert [(row["owner"], len(row["violations"])) for row in json.loads(result.stdout)] == [
        ("acme-kernels 1.0", 1),
        ("void-kernels 1.0", 1),
        ("", 0),
    ]
    assert "sm90: launcher.c was altered" in result.stderr
    assert "void: there is no package void" in result.stderr


def test_sass_of_a_build(packs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's own nvdisasm is found without Triton being imported and shows tensor core instructions."""
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("inspect", NN, "--arch", "sm90", "--pack", packs, "--asm", "sass")
    assert result.exit_code == 0, result.stderr
    assert "MMA" in result.stdout
    assert "tmp" not in result.stdout


def test_ptx_of_a_build(packs: Path) -> None:
    """The PTX of sm80 is the text of this kernel."""
    text = run("inspect", NN, "--arch", "sm80", "--pack", packs, "--asm", "ptx").stdout
    assert ".target sm_80" in text
    assert ".entry tile(" in text


@pytest.mark.skipif(shutil.which("llvm-objdump") is None, reason="llvm-objdump is not installed")
def test_amdgcn_of_a_build(packs: Path) -> None:
    """llvm-objdump shows matrix instructions of gfx90a."""
    result = run("inspect", NN, "--arch", "gfx90a", "--pack", packs, "--asm", "amdgcn")
    assert result.exit_code == 0, result.stderr
    assert "v_mfma_f32_" in result.stdout


# ----------------------------------------------------------------------------------------------------- explain


def explain(packs: Path, *words: str | int, arch: str = "sm90") -> dict[str, Any]:
    """The answer of explain --json."""
    result = run("explain", "--arch", arch, *map(str, words), "--pack", packs, "--json")
    assert result.exit_code == 0, result.stderr
    body: dict[str, Any] = json.loads(result.stdout)
    return body


@pytest.mark.parametrize("arch", TARGETS)
def test_explain(packs: Path, arch: str) -> None:
    """A product that keeps every guard gets the tile, on the arch's nominal device; the others have their cost."""
    body = explain(packs, 512, 256, 128, arch=arch)
    device = TARGETS[arch]
    assert body["device"] == {"multiprocessors": device.multiprocessors, "shared_bytes": device.shared_bytes}
    measured = [each.device for each in table.shipped(arch) if each.device == device.device]
    assert (body["tuning"]["table"], body["tuning"]["measured"]) == (measured[0] if measured else None, bool(measured))
    assert (body["chosen"]["kernel"], body["chosen"]["grid"], body["chosen"]["steps"]) == (NN, 16 * 4, ["product"])
    assert [row["kernel"] for row in body["fits"]] == [generic(arch), NN]
    assert body["fits"][0]["cost_ns"] > body["fits"][1]["cost_ns"]
    assert body["rejected"] == []
    addresses = [body["problem"][name] for name in ("a_ptr", "b_ptr", "c_ptr")]
    assert not any(address % 256 for address in addresses)  # as torch's; off a line takes longer


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((512, 256, 100), "K=100, which is stride_am too, is not divisible by 8"),
        ((512, 257, 128), "N=257, which is stride_bk too, is not divisible by 8"),
        ((512, 256, 128, "--layout", "nt"), "stride_bn=128 is not 1"),
        ((512, 256, 128, "--layout", "tn"), "stride_ak=512 is not 1"),
        ((2**20, 2**20, 128), "c_extent=1099511627775 is not below 2147483648"),
    ],
)
def test_explain_names_the_broken_guard(packs: Path, words: tuple[str | int, ...], reason: str) -> None:
    """What breaks a guard of the tile is named with its value, and the generic kernel is chosen."""
    body = explain(packs, *words)
    assert body["chosen"]["kernel"] == ANY
    assert body["rejected"] == [{"kernel": NN, "reason": reason}]


def test_explain_tells_copies(packs: Path) -> None:
    """A tile that needs aligned operands gets copies of others, for which the plan has a workspace."""
    (row,) = [row for row in explain(packs, 512, 256, 128, "--align", 8)["fits"] if row["kernel"] == NN]
    assert row["steps"] == ["copy A", "copy B", "product", "copy C"]
    assert row["workspace_bytes"] == 2 * (512 * 128 + 128 * 256 + 512 * 256)


def test_explain_text(packs: Path) -> None:
    """The text has the chosen kernel with its plan, times of what else fits, and how many break which guard."""
    text = run("explain", "--arch", "sm90", "512", "256", "128", "--pack", packs).stdout
    assert "matmul M=512 N=256 K=128 fp16 x fp16 -> fp16, layout nn, activation none" in text
    assert f"chosen     {NN}\nconfig     BLOCK_M 32, BLOCK_N 64, BLOCK_K 64, " in text
    assert "steps      product\ngrid       64 blocks\norder      tiles row by row\nsums       " in text
    assert any(line.startswith(ANY) for line in text.splitlines())
    text = run("explain", "--arch", "sm90", "512", "256", "100", "--pack", packs).stdout
    assert "\n      1  K=100, which is stride_am too, is not divisible by 8" in text
    assert NN not in text
    text = run("explain", "--arch", "sm90", "512", "256", "100", "--pack", packs, "--all").stdout
    assert f"{NN}  K=100, which is stride_am too, is not divisible by 8" in text


def test_explain_on_a_gpu_that_has_a_table(packs: Path) -> None:
    """A product is planned for it, and by the pack's times of it if there are any."""
    words = ("512", "256", "128", "--device", "NVIDIA H100 80GB HBM3", "--pack", packs)
    text = run("explain", "--arch", "sm90", *words).stdout
    assert "as on NVIDIA H100 80GB HBM3: 132 multiprocessors" in text
    assert "times: table of NVIDIA H100 80GB HBM3" in text


def test_explain_tells_workspaces(packs: Path) -> None:
    """Each plan has the bytes that it works in."""
    text = run("explain", "--arch", "sm90", "2048", "2048", "2048", "--align", "8", "--pack", packs).stdout
    assert f"chosen     {NN}\n" in text
    assert f"workspace  {2 * 3 * 2048 * 2048} B\n" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("tile_")]
    assert (row[0], row[-1]) == (ANY, "0")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--dtype", "bf16"), "which needs epilogue none; it has: fp16 x fp16\n"),
        (("--activation", "leaky_relu"), "needs epilogue bias_relu; it has: fp16 x fp16 -> fp16 with epilogue none\n"),
        (("--bias", "vector"), "needs epilogue bias; it has: fp16 x fp16 -> fp16 with epilogue none\n"),
        (("--bias", "matrix"), "needs epilogue bias_relu; it has: fp16 x fp16 -> fp16 with epilogue none\n"),
        (("--out-dtype", "fp32"), "needs epilogue none; it has: fp16 x fp16 -> fp16 with epilogue none\n"),
    ],
)
def test_explain_without_a_kernel(packs: Path, words: tuple[str, ...], text: str) -> None:
    """Where nothing fits, the answer is on stdout all the same and the exit code is NoKernelError's."""
    result = run("explain", "--arch", "sm90", "64", "64", "64", *words, "--pack", packs, "--json")
    body = json.loads(result.stdout)
    assert (body["chosen"], body["rejected"], body["other_types"]) == (None, [], 2)
    assert result.exit_code == NoKernelError.exit_code
    assert text in result.stderr


def test_explain_of_groups(tmp_path: Path) -> None:
    """A grouped product gets a kernel of its form, for any sizes of that many groups; a form without one is refused."""
    path = write_set(tmp_path, tile(32, 64, 64, 2, 4), tile(64, 64, 64, 2, 4, grouped="M"))
    assert run("build", "--arch", "sm80", "--configs", path, "--out", tmp_path).exit_code == 0
    rows = ("--grouped", "M", "--batch", 4, "--bias", "vector")
    body = explain(tmp_path, 512, 256, 128, *rows[:4], arch="sm80")
    assert body["chosen"]["kernel"] == NN.replace("_32x", "_64x") + "_grouped_m"
    assert body["chosen"]["grid"] == ((512 - 4) // 64 + 4) * 4
    assert {row["role"] for row in body["fits"]} == {"grouped_m"}
    assert (body["problem"]["grouped"], body["problem"]["batch_strides"]) == ("M", [0, 128 * 256, 0])
    words = [str(word) for word in rows]
    result = run("explain", "--arch", "sm80", "512", "256", "128", *words, "--pack", tmp_path)
    assert "fp16 x fp16 -> fp16 with epilogue none" in result.stderr
    assert "layout nn, activation none, M in 4 groups, vector bias" in result.stdout
    words[1] = "K"
    result = run("explain", "--arch", "sm80", "512", "256", "128", *words[:4], "--pack", tmp_path)
    assert result.exit_code == NoKernelError.exit_code
    assert "M=512 N=256 K=128 fp16 x fp16 -> fp16, layout nn, activation none, K in 4 groups" in result.stderr
    assert "it has: none of that form" in result.stderr
    assert "grouped_m" in run("list", "--pack", tmp_path).stdout


def test_explain_tf32(tmp_path: Path) -> None:
    """tf32 asks for fp32 operands with TF32 allowed, fp32 for the same without."""
    path = write_set(tmp_path, tile(32, 64, 32, 2, 4), dtypes=["fp32", "tf32"])
    assert run("build", "--arch", "sm80", "--configs", path, "--out", tmp_path).exit_code == 0
    chosen = explain(tmp_path, 64, 64, 64, "--dtype", "tf32", arch="sm80")["chosen"]["kernel"]
    assert chosen == "tile_tf32_fp32_nn_32x64x32_s2_w4_none"
    body = explain(tmp_path, 64, 64, 64, "--dtype", "fp32", arch="sm80")
    assert body["chosen"]["kernel"] == "tile_fp32_fp32_nn_32x64x32_s2_w4_none"
    assert {"kernel": chosen, "reason": "allow_tf32=0 is not 1"} in body["rejected"]


# ------------------------------------------------------------------------------------------------------ doctor


ESTIMATES = {"table": None, "measured": False, "compute": 1.0, "memory": 1.0, "tensor_tflops": None}
# Of a GPU with 100 multiprocessors and nearly an H200's bandwidth, by pack.
TUNINGS = {
    "sm80": ESTIMATES | {"compute": 100 / 108, "memory": 4800 / 1555},
    "sm86": ESTIMATES | {"compute": 100 / 84, "memory": 4800 / 696},
    "sm90": ESTIMATES | {"table": "NVIDIA H200", "compute": 100 / 132, "memory": 4800 / 4814},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A torch that sees one GPU, whose properties a test may change, and a driver that answers."""
    facts = SimpleNamespace(name="a GPU", major=9, minor=0)
    module = SimpleNamespace(
        __version__="9.9",
        version=SimpleNamespace(cuda="12.9", hip=None),
        cuda=SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda _ordinal: facts
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr("aotmm.load", lambda _path: SimpleNamespace(has_direct_call=True))
    monkeypatch.setattr(Launcher, "device", lambda _self, _ordinal: CDevice(100, 99_999, memory_gbps=4800))
    return facts


def test_doctor_of_a_build(packs: Path, tmp_path: Path) -> None:
    """Intact packs are so described, with what their kernels have run on; one altered byte changes the answer."""
    shutil.copytree(packs, tmp_path / "packs")
    result = run("doctor", "--pack", tmp_path / "packs", "--json")
    body = json.loads(result.stdout)
    assert [(pack["arch"], pack["kernels"], pack["error"]) for pack in body["packs"]] == [
        (arch, 7, None) for arch in sorted(TARGETS)
    ]
    assert result.exit_code == body["exit_code"] == 0
    text = run("doctor", "--pack", tmp_path / "packs").stdout
    for row in TARGETS.values():
        assert f"{row.name}: 7 kernels" in text
        assert f"kernels that aotmm ships for it were run on {row.executed_on}" in text
    assert text.count("times: ") == len(TARGETS)
    library = tmp_path / "packs" / "sm80" / "libaotmm_sm80.so"
    library.write_bytes(library.read_bytes()[:-1] + b"x")
    result = run("doctor", "--pack", tmp_path / "packs")
    assert result.exit_code == ArtifactError.exit_code
    assert "libaotmm_sm80.so was altered" in result.stdout
    assert "sm90: 7 kernels" in result.stdout


@pytest.mark.parametrize(
    ("capability", "pack", "way", "words"),
    [
        ((9, 0), "sm90", "exact", "uses pack sm90: built for this very arch"),
        ((8, 7), "sm86", "compatible", "uses pack sm86: binary compatible"),
        ((12, 1), "sm80", "ptx", "uses pack sm80: as PTX"),
    ],
)
def test_doctor_of_a_gpu(
    packs: Path, gpu: SimpleNamespace, capability: tuple[int, int], pack: str, way: str, words: str
) -> None:
    """For each GPU: its arch, the pack it would use, how, and the facts that selection goes by."""
    gpu.major, gpu.minor = capability
    result = run("doctor", "--pack", packs, "--json")
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)["devices"]
    assert row == {
        "ordinal": 0,
        "name": "a GPU",
        "arch": f"sm{capability[0]}{capability[1]}",
        "pack": pack,
        "way": way,
        "multiprocessors": 100,
        "shared_bytes": 99_999,
        "tuning": TUNINGS[pack],
        "functions": [],
        "error": None,
    }
    text = run("doctor", "--pack", packs).stdout
    assert words in text
    assert {
        "sm90": "times: models scaled from NVIDIA H200: compute 0.76, memory 1.00, no measured times",
    }.get(pack, "times: estimates from tiles and data sheet") in text


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((8, 0), "no pack runs on sm80; build one: aotmm build --arch sm80"),
        ((8, 9), "no pack runs on sm89; build one: aotmm build --arch sm89"),
        ((7, 5), f"no kernel can be built for sm75; aotmm builds for: {', '.join(TARGETS)}"),
    ],
)
def test_doctor_of_a_gpu_without_a_pack(
    packs: Path, gpu: SimpleNamespace, capability: tuple[int, int], words: str
) -> None:
    """A GPU that no pack serves is answered with the command that builds one which does."""
    gpu.major, gpu.minor = capability
    result = run("doctor", "--pack", packs / "sm90")
    assert result.exit_code == 0
    assert words in result.stdout


@pytest.mark.usefixtures("gpu")
def test_doctor_of_a_torch_without_ops(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch and the packs are fine but `aotmm.load` fails, doctor says why and has its exit code."""

    def fail(_path: Path) -> None:
        raise ArtifactError("torch 2.9 does not take aotmm's ops")

    monkeypatch.setattr("aotmm.load", fail)
    result = run("doctor", "--pack", packs)
    assert result.exit_code == ArtifactError.exit_code
    assert "aotmm.load     torch 2.9 does not take aotmm's ops" in result.stdout


def test_doctor_of_a_driver_that_fails(packs: Path, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the driver is said of its GPU, and its exit code is the command's."""

    def fail(_self: Launcher, _ordinal: int) -> CDevice:
        raise DriverError(f"driver 11.4 is too old for {gpu.name}")

    monkeypatch.setattr(Launcher, "device", fail)
    result = run("doctor", "--pack", packs)
    assert result.exit_code == DriverError.exit_code
    assert "driver 11.4 is too old for a GPU" in result.stdout
