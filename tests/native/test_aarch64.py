"""Packs for aarch64, as GH200 has it: examples/c and selection run there, under an emulator of the processor."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from aotmm.build import link, torch_library
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import CPlan, Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice
from aotmm.target import target
from tests.build.packs import ROOT, default_pack, other_host
from tests.emulators import fake_driver

ARCH, EXAMPLES_ARCH = "sm90", "sm80"  # of selection with a network, and of kernels that take pointers
# Where Debian's libc6-arm64-cross and other distributions' packages for cross compilers have their libraries.
LIBRARIES = Path("/usr/aarch64-linux-gnu")
EXAMPLE = ROOT / "examples/c/matmul.c"
FIELDS = [name for name, *_ in CPlan._fields_]
# Opens a library and finds a function in it.
LOAD = """
#include <dlfcn.h>
int main(int argc, char **argv) {
  void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : 0;
  return !library || !dlsym(library, argv[2]);
}
"""
# Reads sizes, writes the fields of plans.
SELECT = f"""
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include "launcher.h"
int main(int argc, char **argv) {{
  void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
  const aotmm_launcher *(*entry)(void) = library ? dlsym(library, "aotmm_launcher_{ARCH}") : NULL;
  if (!entry) return fprintf(stderr, "%s\\n", dlerror()), 1;
  const aotmm_device device = {{{target(ARCH).multiprocessors}, {target(ARCH).shared_bytes}}};
  int64_t m, n, k;
  while (scanf("%" SCNd64 "%" SCNd64 "%" SCNd64, &m, &n, &k) == 3) {{
    const aotmm_problem problem = {{
        .a_ptr = 16, .b_ptr = 16, .c_ptr = 16, .M = m, .N = n, .K = k, .batch = 1,
        .stride_am = k, .stride_ak = 1, .stride_bk = n, .stride_bn = 1, .stride_cm = n, .stride_cn = 1,
        .slope = 0.01f, .dtype_a = AOTMM_FP16, .dtype_b = AOTMM_FP16, .dtype_c = AOTMM_FP16,
    }};
    aotmm_plan plan;
    if (entry()->select(&problem, &device, AOTMM_WORKSPACE_LIMIT, &plan)) return 1;
    printf("{" ".join("%lld" for _ in FIELDS)}\\n", {", ".join(f"(long long)plan.{name}" for name in FIELDS)});
  }}
  return 0;
}}
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pack for aarch64, its launcher.h and a fake CUDA driver there whose launches multiply."""
    if not shutil.which("qemu-aarch64") or not LIBRARIES.is_dir():
        pytest.skip("this needs qemu-aarch64 and glibc for it: Debian's qemu-user and libc6-arm64-cross")
    folder = tmp_path_factory.mktemp("aarch64")
    for arch in (ARCH, EXAMPLES_ARCH):
        shutil.copy(other_host("aarch64", arch) / arch / f"libaotmm_{arch}.so", folder)
    shutil.copy(default_pack(ARCH) / "launcher.h", folder)
    (values,) = {  # of the kernels for such products, which take the same parameters
        tuple(item.value for item in entry.parameters)
        for entry in open_pack(default_pack(EXAMPLES_ARCH)).manifest.kernels
        if (entry.role, entry.dtype_a, entry.dtype_c, entry.layout) == ("product", "tf32", "fp32", "nn")
        if entry.epilogue == "bias_relu" and not entry.name.endswith("unaligned")
    }
    numbers = "".join(f"#define P_{value} {number}\n" for number, value in enumerate(values))
    (folder / "parameters.h").write_text(numbers)
    sources = (f"-I{fake_driver.SOURCES}", f"-I{folder}", f"-I{Path(__file__).parent}")
    fake = Path(__file__).parent / "fake_multiplying.c"
    _compile(folder / "libcuda.so.1", fake, *sources, "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1")
    return folder


def _compile(output: Path, source: Path, *words: str) -> Path:
    command, _ = link.compiler("aarch64")
    done = subprocess.run(
        [*command, "-O1", *words, "-o", output, source, "-ldl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return output


def _run(machine: Path, program: Path, *words: str | Path, driver: bool = True, given: str = "") -> tuple[int, str]:
    """What a program for aarch64 returns and prints."""
    found = ["-E", f"LD_LIBRARY_PATH={machine}"] if driver else []
    command = ["qemu-aarch64", "-L", str(LIBRARIES), *found, str(program), *map(str, words)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_c_program(machine: Path) -> None:
    """examples/c/matmul.c opens the pack on aarch64, finds a kernel, hands the driver what it has to, and is right."""
    program = _compile(machine / "matmul", EXAMPLE, "-std=c11", "-D_DEFAULT_SOURCE", f"-I{machine}")
    library = machine / f"libaotmm_{EXAMPLES_ARCH}.so"
    status, printed = _run(machine, program, library, "512", "384", "64")
    assert status == 0, printed
    assert ": 0 of 196608 elements are wrong" in printed
    assert "GPU 0: tile_tf32_fp32_nn_" in printed
    status, printed = _run(machine, program, library, driver=False)
    assert (status, "libcuda.so.1: cannot open shared object file" in printed) == (1, True), printed


def test_torch_library_loads(machine: Path) -> None:
    """What serves torch loads on aarch64, every symbol of glibc's found, and shows what the runtime asks for."""
    (machine / "load.c").write_text(LOAD)
    program = _compile(machine / "load", machine / "load.c")
    library = other_host("aarch64", ARCH) / torch_library.LIBRARY.name
    assert _run(machine, program, library, "aotmm_torch_multiply") == (0, "")
    assert _run(machine, program, library, "absent")[0] == 1


def test_selection_is_the_same(machine: Path) -> None:
    """Selection takes the same plan on aarch64 as here, for the same cost, to the nanosecond."""
    (machine / "select.c").write_text(SELECT)
    program = _compile(machine / "select", machine / "select.c", f"-I{machine}")
    rng = random.Random(0)  # noqa: S311 - no secrets
    sizes = [tuple(round(2 ** rng.uniform(0, 14)) * rng.choice((1, 8)) for _ in range(3)) for _ in range(400)]
    given = "".join(f"{m} {n} {k}\n" for m, n, k in sizes)
    status, printed = _run(machine, program, machine / f"libaotmm_{ARCH}.so", given=given)
    assert status == 0, printed
    launcher, row = open_pack(default_pack(ARCH)).launcher, target(ARCH)
    device = CDevice(row.multiprocessors, row.shared_bytes)
    wanted = []
    for m, n, k in sizes:
        problem = Problem(m, n, k, (k, 1), (n, 1), (n, 1), "fp16", "fp16", "fp16", "none", 16, 16, 16)
        plan = launcher.select(problem, device, WORKSPACE_LIMIT).to_c()
        wanted.append(" ".join(str(getattr(plan, name)) for name in FIELDS))
    assert printed.splitlines() == wanted
    assert len(set(wanted)) > 100
