"""CPU time of launches of the functions in examples/own, and the time to the first: ours, the driver's, the JIT's."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import aotmm
from aotmm.bench import nvcc, own_cases
from aotmm.bench.own_cases import CASES, Case
from aotmm.errors import ArtifactError, SpecError
from aotmm.pack.files import in_checkout
from aotmm.runtime.functions import Function
from aotmm.runtime.signature import Signature

_ROOT = Path(aotmm.__file__).parents[1]
PACKS = _ROOT / "build" / "own"
_EXAMPLES = _ROOT / "examples" / "own"
_CALLS = 400  # fewer than the launch queue holds, so that no call waits for the GPU
_ROUNDS = 40
# Clocks for which the GPU is busy while launches are timed, about 20 ms. On a GPU that idles in between, a launch costs
# more the longer the pause before it. Then methods would differ by more than the CPU's work.
_BUSY = 40_000_000
_PROCESSES = 3
_OF_JIT, _ABOVE_C, _ABOVE_PYTHON, _SOONER = 0.45, 0.3, 1.2, 50.0  # asked for: at most, at most, at most, at least


def measure() -> dict[str, dict[str, float]]:
    """Return by function: least microseconds of a launch over the rounds, and milliseconds to the first one.

    A process starts with an empty cache of Triton, as a new container does. Its first launch counts by itself, and with
    the import of aotmm and `load`, or of the function's file, after `import torch` and a context.

    Raises:
        SpecError: there are no examples or packs of them. RuntimeError: a result is wrong; nothing was timed.
    """
    if not in_checkout():
        raise SpecError("own measures the functions of examples/own, which only a checkout has")
    try:
        lib = aotmm.load(PACKS)
    except ArtifactError as error:
        raise SpecError(f"{error}; own needs: {build_command()}") from error
    return {name: _measured(lib[name], _jit(name), make()) | _first(name) for name, make in CASES.items()}


def build_command() -> str:
    """Return the command that builds the packs."""
    kernels = " ".join(f"--kernel examples/own/{name.removesuffix('_kernel')}.py:{name}" for name in CASES)
    return f"aotmm build {kernels} --arch ARCH --out build/own"


def _jit(name: str) -> Any:
    """Return the function of Triton's JIT."""
    file = _EXAMPLES / f"{name.removesuffix('_kernel')}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SpecError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


# ------------------------------------------------------------------------------------------------------ launches
def _measured(ours: Function, jit: Any, case: Case) -> dict[str, float]:
    """Return the least times of a launch by each method."""

    def computed(_meta: Any) -> tuple[int, ...]:
        return case.grid

    loops: dict[str, Callable[[], float]] = {
        "JIT": _loop(jit, case.grid, case.arguments, case.jits),
        "JIT, computed grid": _loop(jit, computed, case.arguments, case.jits),
        "Python": _loop(ours, case.grid, case.arguments, case.ours),
        "Python, computed grid": _loop(ours, computed, case.arguments, case.ours),
    }
    loops |= _loops_in_c(ours, case)
    for name, loop in loops.items():
        case.out.zero_()
        loop()
        error = (case.out.double() - case.want.double()).abs().max().item()
        if not error <= case.error:
            raise RuntimeError(f"{ours.name}, {name}: its error is {error:.3g}, at most {case.error:.3g} is allowed")
    times: dict[str, list[float]] = {name: [] for name in loops}
    busy: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001 - torch has no public kernel that waits
    for _ in range(_ROUNDS):
        for name, loop in loops.items():
            torch.cuda.synchronize()
            busy(_BUSY)
            times[name].append(loop())
    least = {name: min(row) for name, row in times.items()}
    return {f"{name} us": us for name, us in least.items()} | {
        "C above driver us": least["C"] - least["driver"],
        "at most us (C)": _ABOVE_C,
        "Python above driver us": least["Python"] - least["driver"],
        "at most us (Python)": _ABOVE_PYTHON,
        "of JIT's": least["Python"] / least["JIT"],
        "computed grid, of JIT's": least["Python, computed grid"] / least["JIT, computed grid"],
        "at most of JIT's": _OF_JIT,
    }


def _loop(function: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], float]:
    """Return what launches many times, by a call as programs have it, of local names: microseconds per launch."""
    places = [f"a{number}" for number in range(len(arguments))]
    call = ", ".join([*places, *(f"{name}={value!r}" for name, value in named.items())])
    head = f"def calls(count, function, grid, {', '.join(places)}):"
    made: dict[str, Any] = {}
    exec(f"{head}\n    for _ in range(count):\n        function[grid]({call})", made)  # noqa: S102 - of our own text
    calls = made["calls"]

    def run() -> float:
        start = time.perf_counter()
        calls(_CALLS, function, grid, *arguments)
        return (time.perf_counter() - start) / _CALLS * 1e6

    return run


def _loops_in_c(ours: Function, case: Case) -> dict[str, Callable[[], float]]:
    """Return the loops of launches.cu: by the pack's library, and by the driver with the same image and values."""
    device = torch.cuda.current_device()
    pack = ours.pack_for(device)
    number = pack.head.functions.index(ours.name)
    kernels = [kernel for kernel in pack.manifest.own if kernel.function == ours.name]
    values, _ = Signature(ours.name, kernels).bound(case.arguments, case.ours)
    header = (pack.folder / "launcher.h").read_text()
    source = Path(__file__).with_name("launches.cu")
    library = nvcc.opened(nvcc.built(source, source.name, [f"-I{pack.folder}"], made_of=header))
    grid = (ctypes.c_int64 * 3)(*(*case.grid, 1, 1)[:3])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    launcher = pack.own_launcher
    kernel = launcher.kernels[launcher.choose(number, values, device)]
    image = pack.code(kernel.image)
    whole = (ctypes.c_int64 * len(kernel.quantities))(*values.array)
    places = [ctypes.addressof(whole) + 8 * kernel.quantities.index(row.value) for row in kernel.parameters]
    parameters = (ctypes.c_void_p * len(places))(*places)
    symbol, shared = kernel.symbol.encode(), kernel.shared_bytes

    def checked(function: Any, *arguments: Any) -> Callable[[], float]:
        function.restype = ctypes.c_double

        def run() -> float:
            ns: float = function(*arguments, _CALLS)
            if ns < 0:
                raise RuntimeError(f"{ours.name}: a launch from C failed with code {-ns:.0f}")
            return ns / 1e3

        run.held = (whole, image)  # type: ignore[attr-defined]
        return run

    table = ctypes.c_void_p(launcher.address)
    return {
        "C": checked(library.by_pack, table, number, values.array, ctypes.c_uint64(values.open), grid, device, stream),
        "driver": checked(library.by_driver, image, symbol, kernel.threads, shared, parameters, grid, stream),
    }


# -------------------------------------------------------------------------------------------------- first launch
_PROBE = """
import importlib, runpy, sys, time, torch
name, method, cases, examples, packs = sys.argv[1:]
sys.path.insert(0, examples)
case = runpy.run_path(cases)["CASES"][name]()
torch.cuda.synchronize()
start = time.perf_counter()
if method == "ours":
    import aotmm
    function, named = aotmm.load(packs)[name], case.ours
else:
    function, named = getattr(importlib.import_module(name.removesuffix("_kernel")), name), case.jits
ready = time.perf_counter()
function[case.grid](*case.arguments, **named)
torch.cuda.synchronize()
print(1e3 * (time.perf_counter() - ready), 1e3 * (time.perf_counter() - start))
assert (case.out.double() - case.want.double()).abs().max() <= case.error, "the result is wrong"
"""


def _first(name: str) -> dict[str, float]:
    """Return the milliseconds of the first launch in a fresh process, medians, and how much sooner ours is."""
    found = {}
    for method, count in (("ours", _PROCESSES), ("JIT", 1)):
        runs = [_process(name, method) for _ in range(count + (count > 1))][-count:]  # one more for the file cache
        found[method] = [statistics.median(times) for times in zip(*runs, strict=True)]
    (launch, whole), (jits_launch, jits_whole) = found["ours"], found["JIT"]
    return {
        "first launch ms": launch,
        "JIT's first launch ms": jits_launch,
        "times sooner": jits_launch / launch,
        "at least": _SOONER,
        "with imports ms": whole,
        "JIT's with imports ms": jits_whole,
        "times sooner with imports": jits_whole / whole,
    }


def _process(name: str, method: str) -> list[float]:
    """Return a fresh process's milliseconds to the end of its first launch: without and with imports and loading."""
    with tempfile.TemporaryDirectory() as cache:
        # pip compiles bytecode; in a checkout the first process does, unless that is switched off
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, "-c", _PROBE, name, method, own_cases.__file__, str(_EXAMPLES), str(PACKS)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: the first launch of {method} failed: {done.stderr.strip()[-500:]}")
    return [float(word) for word in done.stdout.split()]
