"""CUTLASS: kernels that nvcc builds from the headers in the package nvidia-cutlass; the fastest one is timed."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.timing.graph import elapsed_ns
from aotmm.timing.operands import Operands
from aotmm.timing.problems import Case

_SOURCE = Path(__file__).parent / "cutlass.cu"
_PACKAGE = "nvidia-cutlass"
_ELEMENTS = {"fp16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}
_SIZES = range(512, 8193)  # that a product is measured for
_SWIZZLES = (1, 8)  # rows of tiles that Hopper's kernels take side by side, at run time
_HOPPER = 9  # major compute capability

Config = tuple[int | str, ...]
# Hopper: tile, cluster, schedule. Source: the configurations that CUTLASS' own profiler generates for dense 16-bit
# products on sm90, and those that cuBLAS picks on an H200 at 1024, 2048 and 4096.
HOPPER_CONFIGS = (
    (128, 256, 64, 2, 1, "Cooperative"),
    (256, 128, 64, 2, 1, "Cooperative"),
    (256, 128, 64, 1, 2, "Cooperative"),
    (128, 128, 64, 2, 1, "Cooperative"),
    (128, 128, 64, 2, 1, "Pingpong"),
    (64, 128, 64, 1, 1, "Pingpong"),
    (64, 64, 64, 1, 1, "Pingpong"),
)
# Ampere: tile, tile of a warp, stages. Source: the default configurations of CUTLASS' profiler for sm80.
AMPERE_CONFIGS = (
    (128, 256, 32, 64, 64, 3),
    (128, 128, 32, 64, 64, 4),
    (64, 64, 32, 32, 32, 6),
)


def definitions(config: Config, dtype: str) -> list[str]:
    """Return the macros of cutlass.cu for `config`."""
    rest = ("CLUSTER_M", "CLUSTER_N", "SCHEDULE") if config in HOPPER_CONFIGS else ("WARP_M", "WARP_N", "STAGES")
    macros = zip(("TILE_M", "TILE_N", "TILE_K", *rest), config, strict=True)
    return [f"-DELEMENT={_ELEMENTS[dtype]}", *(f"-D{name}={value}" for name, value in macros)]


def build(dtype: str, capability: tuple[int, int], folder: Path) -> dict[Config, Path]:
    """Return libraries by configuration, in `folder`; compile missing ones, side by side.

    Raises:
        NotRunError: there is no nvcc, or no nvidia-cutlass, or a kernel does not compile.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NotRunError("there is no nvcc on the PATH")
    package = importlib.util.find_spec("cutlass_library")
    if package is None or package.origin is None:
        raise NotRunError(f'{_PACKAGE} is not installed: pip install --no-deps "{_PACKAGE}"')
    sources = Path(package.origin).parent / "source"
    configs = (*HOPPER_CONFIGS, *AMPERE_CONFIGS) if capability[0] == _HOPPER else AMPERE_CONFIGS
    arch = "sm_{}{}{}".format(*capability, "a" if capability[0] == _HOPPER else "")
    flags = [
        f"-arch={arch}",
        "-O3",
        "-std=c++17",
        "--expt-relaxed-constexpr",
        "-DNDEBUG",
        "-Xcompiler=-fPIC",
        "-shared",
    ]
    made_by = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = importlib.metadata.version(_PACKAGE)

    def compiled(config: Config) -> Path:
        options = [*flags, *definitions(config, dtype)]
        key = hashlib.sha256("\n".join([_SOURCE.read_text(), made_by, version, *options]).encode()).hexdigest()
        library = folder / f"{key[:32]}.so"
        if not library.is_file():
            temporary = folder / f".{key[:32]}.{os.getpid()}"
            includes = [f"-I{sources / 'include'}", f"-I{sources / 'tools' / 'util' / 'include'}"]
            command = [nvcc, *options, *includes, "-o", str(temporary), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotRunError(f"nvcc does not compile CUTLASS' {name(config)}: {done.stderr.strip()[:500]}")
            temporary.replace(library)
        return library

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(configs, threads.map(compiled, configs), strict=True))


def name(config: Config) -> str:
    """Return the name of a configuration in the results."""
    m, n, k, *rest = config
    kind = "cluster {}x{} {}" if config in HOPPER_CONFIGS else "warp {}x{} stages {}"
    return f"{m}x{n}x{k} {kind.format(*rest)}"


def cache_folder() -> Path:
    """Return the folder of built kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aotmm" / "cutlass"


@cache
def _libraries(dtype: str, capability: tuple[int, int]) -> dict[Config, ctypes.CDLL]:
    found = {}
    for config, path in build(dtype, capability, cache_folder()).items():
        library = ctypes.CDLL(str(path))
        library.matmul.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_void_p]
        library.workspace.argtypes = [ctypes.c_int] * 4
        library.workspace.restype = ctypes.c_size_t
        found[config] = library
    return found


_chosen: dict[Case, str] = {}


def _prepare(case: Case, sets: Sequence[Operands]) -> Call:
    shape = case.shape
    if case.dtype not in _ELEMENTS or case.activation is not None or shape.layout != "nn":
        raise NotRunError("CUTLASS is built for plain 16-bit products in layout nn")
    if not all(size in _SIZES for size in (shape.M, shape.N, shape.K)):
        raise NotRunError(f"CUTLASS is measured for sizes {_SIZES.start} to {_SIZES.stop - 1}")
    if torch.version.hip is not None:
        raise NotRunError("CUTLASS is for NVIDIA's GPUs")
    times: dict[str, float] = {}
    calls: dict[str, Call] = {}
    libraries = _libraries(case.dtype, torch.cuda.get_device_capability())
    for config, swizzle in itertools.product(libraries, _SWIZZLES):
        if config in AMPERE_CONFIGS and swizzle != _SWIZZLES[0]:
            continue
        library = libraries[config]
        size = library.workspace(shape.M, shape.N, shape.K, swizzle)
        workspace = torch.empty(size, device=sets[0].out.device, dtype=torch.uint8)
        named = name(config) + (f" swizzle {swizzle}" if config in HOPPER_CONFIGS else "")
        call = partial(_launch, library, swizzle, workspace)
        try:
            times[named] = _microseconds(call, sets)
        except NotRunError:
            continue  # this one does not fit the sizes
        calls[named] = call
    if not times:
        raise NotRunError("none of the CUTLASS kernels takes these sizes")
    _chosen[case] = min(times, key=times.__getitem__)
    return calls[_chosen[case]]


def _launch(library: ctypes.CDLL, swizzle: int, workspace: torch.Tensor, operands: Operands) -> None:
    (M, K), N = operands.a.shape, operands.b.shape[1]
    addresses = [tensor.data_ptr() for tensor in (operands.a, operands.b, operands.out)]
    stream = torch.cuda.current_stream().cuda_stream
    status = library.matmul(*addresses, M, N, K, swizzle, workspace.data_ptr(), stream)
    if status:
        raise NotRunError(f"CUTLASS refuses the product with status {status}")


def _microseconds(call: Callable[[Operands], object], sets: Sequence[Operands], turns: int = 3) -> float:
    """Return the least time per product over a few turns through the sets."""
    call(sets[0])
    few = sets[:16]

    def turn() -> None:
        for operands in few:
            call(operands)

    return min(elapsed_ns(turn) for _ in range(turns)) * 1e-3 / len(few)


PROVIDERS = (
    Provider(
        "cutlass",
        f"the fastest of {len(HOPPER_CONFIGS)} Hopper and {len(AMPERE_CONFIGS)} Ampere configurations of CUTLASS",
        _prepare,
        describe=lambda case, _: _chosen[case],
    ),
)
