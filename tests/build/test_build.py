"""Whole builds: reproducible, incremental, and never at the cost of the pack that was there."""

from __future__ import annotations

import fcntl
import getpass
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from aotmm.build import Report, build
from aotmm.errors import PackError, SpecError
from aotmm.pack import manifest
from aotmm.pack.decode import MAX_ITEMS
from aotmm.pack.manifest import MAX_FILE_BYTES, MAX_MANIFEST_BYTES
from aotmm.runtime.pack import open_pack
from aotmm.target import TARGETS
from tests.build.packs import ROOT, checkout, content, default_pack, run_python
from tests.config_sets import config_set, tile
from tests.samples import SHIPPED, code_in

ARCHS = ("sm80", "gfx90a")
CONFIGS = config_set(tile(64, 64, 32, 2, 4), dtypes=["fp16"], layouts=["nn", "tt"], epilogues=["none"])
TILES = 3  # two layouts and the generic kernel
COPIES = 5  # one for each layout of helpers.toml, and one over the ends of rows
KERNELS = TILES + COPIES
TOO_LARGE = {(128, 256, 128), (256, 128, 128), (256, 64, 128), (64, 256, 128), (128, 128, 128)}

BUILD = """
import os, resource, sys
from pathlib import Path
from aotmm.build import build
if __name__ == "__main__":
    configs, out, jobs, umask, largest_file, *archs = sys.argv[1:]
    os.umask(int(umask, 8))
    if int(largest_file):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest_file), int(largest_file)))
    for report in build(tuple(archs), Path(out), configs=configs, jobs=int(jobs)):
        print(report.arch, report.kernels, report.compiled, report.linked)
"""


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a small config set."""
    path = tmp_path_factory.mktemp("configs") / "small.toml"
    path.write_text(CONFIGS)
    return str(path)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, configs: str) -> Path:
    """A folder with packs of the small set and their cache; only to be read."""
    out = tmp_path_factory.mktemp("packs")
    build(ARCHS, out, configs=configs, jobs=1)
    return out


@pytest.fixture
def packs(tmp_path: Path, built: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "packs"))


def codes(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """The image and the PTX of every kernel of a pack for sm80."""
    code = code_in(folder)
    kernels = open_pack(folder).manifest.kernels
    return {kernel.name: (code(kernel.image), code(kernel.ptx)) for kernel in kernels if kernel.ptx is not None}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Identity and modification time of every file."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def done(reports: list[Report]) -> list[tuple[str, int, int, bool]]:
    """What each report says was done."""
    return [(report.arch, report.kernels, report.compiled, report.linked) for report in reports]


# ------------------------------------------------------------------------------------------------------- what comes out
def test_pack(built: Path) -> None:
    """A pack holds exactly the files of its manifest, each with the bytes that the manifest says."""
    for arch in ARCHS:
        pack = open_pack(built / arch)
        listed = {file.path: file for file in manifest.files(pack.manifest)}
        found = content(built / arch)
        assert found.keys() == {manifest.FILE_NAME, *listed}
        for path, file in listed.items():
            assert manifest.File(path, file.sha256, len(found[path])) == file
        assert len(pack.manifest.kernels) == KERNELS
        assert pack.head.provenance.config_set == "small"


def test_two_builds_are_bit_identical(built: Path, configs: str, tmp_path: Path) -> None:
    """Another copy of the sources, in another folder, environment, umask and number of jobs, gives the same bytes."""
    root = checkout(tmp_path / "a folder with spaces" / "and another")
    home = tmp_path / "home"
    home.mkdir()
    settings = {"HOME": str(home), "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "0"}
    result = run_python(
        BUILD, configs, root / "packs", "2", "077", "0", *reversed(ARCHS), root=root, USER="somebody", **settings
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == [f"{arch} {KERNELS} {KERNELS} True" for arch in reversed(ARCHS)]
    for arch in ARCHS:
        assert content(root / "packs" / arch) == content(built / arch)


def test_nothing_tells_where_it_was_built(built: Path) -> None:
    """No file of a pack holds a path, a user's name or the machine's name."""
    traces = [str(path) for path in (built, Path.cwd(), Path.home(), Path(__file__).parents[2], Path("/tmp/"))]  # noqa: S108
    traces += [name for name in (platform.node(), getpass.getuser()) if len(name) > 4]
    for arch in ARCHS:
        for path, data in content(built / arch).items():
            assert [trace for trace in traces if trace.encode() in data] == [], path


def test_tutorial_kernels_that_no_gpu_could_run(tmp_path: Path) -> None:
    """Five tiles of the tutorial need more shared memory than the GPU has: dropped with the figures, not built."""
    text = (ROOT / "aotmm" / "configs" / "tutorial.toml").read_text()
    (tmp_path / "small.toml").write_text(re.sub("(?m)^epilogues = .*$", 'epilogues = ["none"]', text))
    limit = TARGETS["sm80"].shared_bytes
    (report,) = build(("sm80",), tmp_path, configs=str(tmp_path / "small.toml"), dtypes=("fp16",))
    dropped, kernels = dict(report.dropped), open_pack(report.folder).manifest.kernels
    assert {tuple(map(int, re.findall(r"_(\d+)x(\d+)x(\d+)_", name)[0])) for name in dropped} == TOO_LARGE
    for reason in dropped.values():
        needed = int(reason.split()[1])
        assert reason == f"needs {needed} B of shared memory, sm80 has {limit} B"
        assert needed > limit
    assert len(dropped) == len(TOO_LARGE)
    assert not dropped.keys() & {kernel.name for kernel in kernels}
    assert max(kernel.shared_bytes for kernel in kernels) <= limit


# ------------------------------------------------------------------------------------------------------ building again
def test_nothing_changed(packs: Path, configs: str) -> None:
    """A second build compiles nothing, links nothing and touches no file of the pack."""
    before = stamps(packs)
    assert done(build(ARCHS, packs, configs=configs)) == [(arch, KERNELS, 0, False) for arch in ARCHS]
    assert stamps(packs) == before


def test_progress(packs: Path, configs: str) -> None:
    """Progress names every arch before any work, then starts with what is there and ends with everything."""
    seen: list[tuple[str, int, int]] = []
    build(("sm80", "sm90"), packs, configs=configs, progress=lambda *step: seen.append(step))
    steps = [("sm90", number, KERNELS) for number in range(KERNELS + 1)]
    assert seen == [("sm80", 0, KERNELS), ("sm90", 0, KERNELS), ("sm80", KERNELS, KERNELS), *steps]


def test_same_arch_twice(packs: Path, configs: str) -> None:
    """An arch that is named twice is built once."""
    assert len(build(("sm80", "sm80"), packs, configs=configs)) == 1


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_damaged_cache_entry(packs: Path, configs: str, harm: str) -> None:
    """A damaged cache entry is compiled again, for a pack that is lost, and the new one is as that was."""
    entry = min((packs / ".cache").iterdir())
    data = entry.read_bytes()
    entry.write_bytes({"cut": data[:-9], "flip": data[:99] + bytes([data[99] ^ 4]) + data[100:], "empty": b""}[harm])
    before = content(packs)
    for arch in ARCHS:
        shutil.rmtree(packs / arch)
    reports = build(ARCHS, packs, configs=configs)
    assert sum(report.compiled for report in reports) == 1
    assert {path for path, file in content(packs).items() if before.get(path) != file} == {f".cache/{entry.name}"}
    assert entry.read_bytes() == data


@pytest.mark.parametrize("name", ["manifest.json", "kernels.json", "launcher.c", "libaotmm_sm80.so"])
@pytest.mark.parametrize("harm", ["removed", "altered"])
def test_damaged_pack(packs: Path, built: Path, configs: str, name: str, harm: str) -> None:
    """A pack with a missing or altered file is made anew from the cache."""
    path = packs / "sm80" / name
    if harm == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"\n")
    assert done(build(("sm80",), packs, configs=configs)) == [("sm80", KERNELS, 0, True)]
    assert content(packs / "sm80") == content(built / "sm80")


def test_other_configs(packs: Path, tmp_path: Path) -> None:
    """A kernel that is no longer asked for leaves the pack, code and all, without compiling the others again."""
    before = codes(packs / "sm80")
    (tmp_path / "small.toml").write_text(CONFIGS.replace('"nn", "tt"', '"tt"'))
    assert done(build(("sm80",), packs, configs=str(tmp_path / "small.toml"))) == [("sm80", KERNELS - 1, 0, True)]
    (gone,) = (name for name in before if name.startswith("tile_fp16_fp16_nn_"))
    assert codes(packs / "sm80") == {name: data for name, data in before.items() if name != gone}
    assert before[gone][0] not in (packs / "sm80" / "libaotmm_sm80.so").read_bytes()


@pytest.mark.parametrize(
    ("path", "compiled"), [("kernels/tile.py", TILES), ("kernels/copy.py", COPIES), ("problem.py", KERNELS)]
)
def test_changed_source(packs: Path, configs: str, tmp_path: Path, path: str, compiled: int) -> None:
    """A changed source: every kernel that comes from it is compiled again, whatever the cache holds, and no other."""
    root = checkout(tmp_path / "sources")
    with (root / "aotmm" / path).open("a") as handle:
        handle.write("# changed\n")
    result = run_python(BUILD, configs, packs, "2", "022", "0", "sm80", root=root)
    assert (result.returncode, result.stdout) == (0, f"sm80 {KERNELS} {compiled} True\n"), result.stderr


@pytest.mark.parametrize("arch", SHIPPED)
def test_room_for_the_most_kernels(arch: str) -> None:
    """As many kernels as a pack may have, of the default pack's average, stay below every other limit of the format."""
    whole = open_pack(default_pack(arch)).manifest
    times = MAX_ITEMS / len(whole.kernels)
    assert times * whole.kernels_file.bytes < MAX_MANIFEST_BYTES
    assert times * max(file.bytes for file in (whole.library, *whole.sources)) < MAX_FILE_BYTES


# ------------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize(
    ("archs", "options", "words"),
    [
        (("sm80", "sm99"), {}, f"unknown arch 'sm99'; known: {', '.join(TARGETS)}"),
        (("sm80",), {"configs": "nothing"}, "unknown config set 'nothing'; known: classic, default, tutorial"),
        (("sm80",), {"dtypes": ("fp64",)}, "unknown dtype 'fp64'; known: fp16, bf16"),
        (("sm80", "gfx90a"), {"dtypes": ("tf32",)}, "dtype 'tf32' does not exist on gfx90a; it has: fp16, bf16"),
    ],
)
def test_request_that_cannot_be_meant(
    tmp_path: Path, archs: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    """A wrong arch, set or type is told with what there is, before anything is written."""
    with pytest.raises(SpecError) as caught:
        build(archs, tmp_path / "out", **options)
    assert str(caught.value).startswith(words)
    assert not (tmp_path / "out").exists()


def test_kernel_that_does_not_compile(packs: Path, configs: str, tmp_path: Path) -> None:
    """A refused kernel fails the build with arch, config and the compiler's words; the previous pack stays."""
    root = checkout(tmp_path / "sources")
    path = root / "aotmm" / "kernels" / "tile.py"
    text = path.read_text()
    marker = "    tiles_m = tl.cdiv(M, BLOCK_M)\n"
    assert marker in text
    path.write_text(text.replace(marker, f'    tl.static_assert(EPILOGUE == "gelu", "no such thing")\n{marker}'))
    before = content(packs / "gfx90a")
    result = run_python(BUILD, configs, packs, "2", "022", "0", "gfx90a", root=root)
    assert result.returncode == 1
    message = result.stderr[result.stderr.index("aotmm.build.compile.RefusedError: gfx90a: tile_fp16_fp16_") :]
    assert re.search(r"does not compile \(tile_64x64x32_s2_w4\w*, options {'num_warps': 4,", message)
    assert "from tests" in message or "from aotmm" in message
    assert "no such thing" in message
    assert content(packs / "gfx90a") == before
    assert open_pack(packs / "gfx90a").launcher.kernels
    assert sorted(path.name for path in packs.iterdir()) == [".cache", ".lock", "gfx90a", "sm80"]


def test_second_build_in_the_same_folder(packs: Path, configs: str) -> None:
    """While a build runs, another in the same folder is refused; afterwards it works."""
    with (packs / ".lock").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(PackError, match=r"another aotmm build is writing to .*packs; wait for it or use another"):
            build(("sm80",), packs, configs=configs)
    assert done(build(("sm80",), packs, configs=configs)) == [("sm80", KERNELS, 0, False)]


def test_folder_that_cannot_be_made(tmp_path: Path, configs: str) -> None:
    """An output folder that cannot be made is a PackError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match=r"packs cannot be written to .*/file/packs: "):
        build(("sm80",), tmp_path / "file" / "packs", configs=configs)


def test_full_disk(packs: Path, configs: str, tmp_path: Path) -> None:
    """When writing fails half way the error is a PackError, and the previous pack is as it was and loads."""
    (tmp_path / "other.toml").write_text(Path(configs).read_text())  # another name: the pack has to be written again
    before = content(packs / "sm80")
    largest = open_pack(packs / "sm80").head.images.bytes - 1
    result = run_python(BUILD, tmp_path / "other.toml", packs, "1", "022", str(largest), "sm80")
    assert result.returncode == 1
    assert "aotmm.errors.PackError: pack " in result.stderr
    assert "File too large; the previous pack is as it was" in " ".join(result.stderr.split())
    assert content(packs / "sm80") == before
    assert open_pack(packs / "sm80").launcher.kernels
    assert sorted(path.name for path in packs.iterdir()) == [".cache", ".lock", "gfx90a", "sm80"]


def test_first_build_on_a_full_disk(configs: str, tmp_path: Path) -> None:
    """When nothing can be written the error names the reason, and no half pack stays."""
    result = run_python(BUILD, configs, tmp_path / "out", "1", "022", "20000", "gfx90a")
    assert result.returncode == 1
    assert "\naotmm.errors." in result.stderr
    assert result.stderr.endswith("File too large\n")
    assert not (tmp_path / "out" / "gfx90a").exists()


def test_killed_build(packs: Path, built: Path, configs: str) -> None:
    """What a killed build leaves behind does not get into the next pack."""
    shutil.copytree(packs / "sm80", packs / ".sm80.new")
    (packs / ".sm80.new" / "half").write_text("")
    (packs / "sm80" / "manifest.json").unlink()
    assert done(build(("sm80",), packs, configs=configs)) == [("sm80", KERNELS, 0, True)]
    assert content(packs / "sm80") == content(built / "sm80")
    assert not (packs / ".sm80.new").exists()
