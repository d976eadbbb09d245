"""examples/c against the fake driver: all programs compile without a warning and multiply right, in an interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotmm.build import render
from tests.build.packs import ROOT, default_pack
from tests.emulators.fake_driver import FakeDriver, Launch, build
from tests.native.emulation import Array, fresh_process, missing

EXAMPLES = ROOT / "examples" / "c"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")
C = (sys.executable, "-m", "ziglang", "cc", "-std=c11", "-D_DEFAULT_SOURCE")
CPP = ("c++", "-std=c++17")  # the system's: zig compiles all of libc++ first
needs_cpp = pytest.mark.skipif(shutil.which("c++") is None, reason="this needs a C++ compiler")
OUT_OF_MEMORY = 2


@pytest.fixture
def pack() -> Path:
    """The default pack for sm80."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    return default_pack("sm80")


def compiled(source: Path, language: tuple[str, ...], pack: Path, folder: Path) -> Path:
    """The program as a shared library, whose main can be called; every warning is an error."""
    output = folder / f"{source.name}.so"
    command = [*language, *WARNINGS, "-O1", "-shared", "-fPIC", f"-I{pack}"]
    done = subprocess.run(
        [*command, f"-I{EXAMPLES}", str(source), "-o", str(output), "-ldl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return output


class DriverWithMemory(FakeDriver):
    """A fake CUDA driver that has device memory; kernels may touch what is allocated when they are launched."""

    def __init__(self, folder: Path, *, devices: int = 1) -> None:
        super().__init__(
            "cuda", devices=devices, library=build("cuda", folder, Path(__file__).parent / "fake_memory.c")
        )

    def allocated(self) -> list[Array]:
        """The device memory that there is now."""
        addresses, sizes = ((ctypes.c_uint64 * 64)() for _ in range(2))
        count = self.lib.fake_memory(addresses, sizes)
        memory: list[Any] = [
            (ctypes.c_char * size).from_address(address)
            for address, size in zip(addresses[:count], sizes[:count], strict=True)
        ]
        return [np.frombuffer(buffer, np.uint8) for buffer in memory]

    def run(self, launch: Launch) -> None:
        """Executes a launch on what is allocated."""
        self.buffers = [(f"memory{number}", array, "rw") for number, array in enumerate(self.allocated())]
        super().run(launch)


@contextlib.contextmanager
def printed(folder: Path) -> Iterator[list[str]]:
    """What C code prints to stdout and stderr in the block, known after it."""
    lines: list[str] = []
    path = folder / "printed"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    saved = [(stream, os.dup(stream)) for stream in (1, 2)]
    for stream, _ in saved:
        os.dup2(handle, stream)
    try:
        yield lines
    finally:
        ctypes.CDLL(None).fflush(None)
        for stream, copy in saved:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(handle)
        lines += path.read_text().splitlines()


def run(program: Path, *words: str | Path) -> tuple[int, list[str]]:
    """What the program's main returns and prints."""
    main = ctypes.CDLL(str(program)).main
    arguments = [str(program).encode(), *(str(word).encode() for word in words)]
    with printed(program.parent) as lines:
        status = main(len(arguments), (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None))
    return status, lines


@fresh_process
def test_c_program(pack: Path, tmp_path: Path) -> None:
    """The C program is right on each of two GPUs, with a product and with slices of K, and gives all memory back."""
    driver = DriverWithMemory(tmp_path, devices=2)
    program, library = compiled(EXAMPLES / "matmul.c", C, pack, tmp_path), pack / "libaotmm_sm80.so"
    for sizes, slices in (((70, 72, 64), "in 1"), ((33, 40, 4096), r"in (\d\d|[2-9])")):
        status, lines = run(program, library, *map(str, sizes))
        assert (status, len(lines)) == (0, 2), lines
        for number, line in enumerate(lines):
            wanted = (
                rf"GPU {number}: tile_\w+.*, K {slices}, \d+ bytes of workspace: 0 of {sizes[0] * sizes[1]} elements"
            )
            assert re.match(wanted, line), line
    assert {launch.device for launch in driver.launches} == {0, 1}
    assert driver.allocated() == []
    assert driver.faults == driver.misuse == []


@fresh_process
def test_grouped_program(pack: Path, tmp_path: Path) -> None:
    """The C program of groups is right for each routing by one plan, leaves rows of no group, and gives memory back."""
    driver = DriverWithMemory(tmp_path)
    program, library = compiled(EXAMPLES / "grouped.c", C, pack, tmp_path), pack / "libaotmm_sm80.so"
    for sizes in ((70, 72, 64), (9, 33, 40)):
        status, (line,) = run(program, library, *map(str, sizes))
        assert status == 0, line
        wanted = rf"GPU 0: tile_bf16_\w+_grouped_m, 5 groups, 3 routings: 0 of {3 * sizes[0] * sizes[1]} elements"
        assert re.match(wanted, line), line
    assert len(driver.launches) == 2 * 3
    assert driver.allocated() == []
    assert driver.faults == driver.misuse == []
    driver.fail_next("cuLaunchKernelEx", OUT_OF_MEMORY)
    status, (line,) = run(program, library, "8", "8", "8")
    assert (status, driver.allocated()) == (1, [])
    assert "cuLaunchKernelEx failed on CUDA device 0" in line


@fresh_process
def test_c_program_says_what_fails(pack: Path, tmp_path: Path) -> None:
    """Whatever fails ends the program with the launcher's words and 1, and no memory stays behind."""
    driver = DriverWithMemory(tmp_path)
    program, library = compiled(EXAMPLES / "matmul.c", C, pack, tmp_path), pack / "libaotmm_sm80.so"
    for function, words in (
        ("cuLibraryLoadData", "cuLibraryLoadData failed on CUDA device 0 for kernel .*CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx failed on CUDA device 0"),
        ("cuMemAlloc_v2", "out of memory"),
        ("cuCtxSetCurrent", "the GPU's context cannot be used"),
    ):
        driver.fail_next(function, OUT_OF_MEMORY)
        status, (line,) = run(program, library, "8", "8", "8")
        assert status == 1
        assert re.match(words, line), line
        assert driver.allocated() == []
    copy = Path(shutil.copy(library, tmp_path / "libaotmm_sm90.so"))
    calls: list[tuple[tuple[str | Path, ...], str]] = [
        ((), "usage: matmul LIBRARY"),
        ((library, "8", "0", "8"), "sizes are numbers above 0"),
        ((tmp_path / "library.so",), "not a libaotmm_ARCH.so"),
        ((tmp_path / "libaotmm_sm99.so",), "cannot open shared object file"),
        ((copy,), "undefined symbol: aotmm_launcher_sm90"),
    ]
    for arguments, text in calls:
        status, (line,) = run(program, *arguments)
        assert status == 1
        assert text in line
    assert driver.misuse == []


@needs_cpp
@fresh_process
def test_cpp_program(pack: Path, tmp_path: Path) -> None:
    """The C++ program is right; what the launcher refuses is an exception with its words, and memory is given back."""
    driver = DriverWithMemory(tmp_path)
    program, library = compiled(EXAMPLES / "matmul.cpp", CPP, pack, tmp_path), pack / "libaotmm_sm80.so"
    status, (line,) = run(program, library, "sm80")
    assert status == 0, line
    assert re.match(r"tile_int8_int32_\w+: 0 of 60000 elements are wrong", line), line
    assert driver.allocated() == []
    driver.fail_next("cuLaunchKernelEx", 700)
    status, (line,) = run(program, library, "sm80")
    assert (status, driver.allocated()) == (1, [])
    assert "cuLaunchKernelEx failed on CUDA device 0" in line
    status, (line,) = run(program, library, "sm90")
    assert "undefined symbol: aotmm_launcher_sm90" in line
    assert driver.faults == driver.misuse == []


def test_wrapper_is_short() -> None:
    """aotmm.hpp is something that one reads before one copies it."""
    assert len((EXAMPLES / "aotmm.hpp").read_text().splitlines()) <= 100


@needs_cpp
def test_headers_of_several_packs(tmp_path: Path) -> None:
    """The headers of two packs can be included together, in C and C++, and say where each launcher is."""
    for arch in ("sm80", "sm90"):
        (tmp_path / arch).mkdir()
        (tmp_path / arch / "launcher.h").write_text(render.header((arch,)))
    source = '#include "sm80/launcher.h"\n#include "sm90/launcher.h"\n'
    source += "int use(void) { return aotmm_launcher_sm80()->abi == aotmm_launcher_sm90()->abi; }\n"
    for language, suffix in ((C, "c"), (CPP, "cpp")):
        (tmp_path / f"both.{suffix}").write_text(source)
        command = [*language, *WARNINGS, "-c", "-o", "both.o", f"both.{suffix}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_cmake(pack: Path, tmp_path: Path) -> None:
    """CMakeLists.txt builds all programs against a pack, and says what is missing where there is none."""
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("this needs cmake and a C++ compiler")
    done = subprocess.run([cmake, "-S", EXAMPLES, "-B", "build", f"-DAOTMM_PACK={pack}"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    done = subprocess.run([cmake, "--build", "build"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert {"matmul", "grouped", "matmul_cpp"} <= {path.name for path in (tmp_path / "build").iterdir()}
    empty = subprocess.run(
        [cmake, "-S", EXAMPLES, "-B", "empty"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 'AOTMM_PACK="" is no pack; build one: aotmm build' in " ".join(empty.stderr.split())
