"""CUTLASS: kernels that nvcc builds from the headers in the package nvidia-cutlass; the fastest one is timed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from aotmm.bench import nvcc
from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.timing.graph import elapsed_ns
from aotmm.timing.operands import Operands
from aotmm.timing.problems import Case

_SOURCE = Path(__file__).parent / "cutlass.cu"
_PACKAGE = "nvidia-cutlass"
_ELEMENTS = {"fp16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}
_LAYOUTS = {"n": "RowMajor", "t": "ColumnMajor"}
_VECTOR = 8  # elements that contiguous rows and columns are multiples of
_SIZES = range(512, 8193)  # that a product of the sweeps is measured for
_SWIZZLES = (1, 8)  # rows of tiles that Hopper's kernels take side by side, at run time
_SLICES = (2, 4, 8)  # of K, at run time, for Ampere's kernels
_LEAST_STEPS, _MOST_WAVES = 4, 2  # along K, of a slice; of tiles that are slices
_HOPPER = 9  # major compute capability
ROUNDINGS = _SLICES[-1]  # to the type of C, at most: slices are added there

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
# Ampere: tile, tile of a warp, stages. Source: the configurations of CUTLASS' profiler for 16-bit products on sm80, of
# all its tiles one or two; stages also such as kernels of ours have.
AMPERE_CONFIGS = (
    (256, 128, 32, 64, 64, 3),
    (128, 128, 32, 64, 64, 4),
    (256, 64, 32, 64, 64, 4),
    (64, 256, 32, 64, 64, 4),
    (128, 64, 32, 64, 32, 6),
    (64, 128, 32, 32, 64, 6),
    (128, 256, 64, 64, 64, 3),
    (128, 128, 64, 64, 64, 3),
    (64, 64, 64, 32, 32, 4),
)


def definitions(config: Config, dtype: str, layout: str) -> list[str]:
    """Return the macros of cutlass.cu for `config`."""
    rest = ("CLUSTER_M", "CLUSTER_N", "SCHEDULE") if config in HOPPER_CONFIGS else ("WARP_M", "WARP_N", "STAGES")
    macros = zip(("TILE_M", "TILE_N", "TILE_K", *rest), config, strict=True)
    layouts = [f"-DLAYOUT_{operand}={_LAYOUTS[order]}" for operand, order in zip("AB", layout, strict=True)]
    return [f"-DELEMENT={_ELEMENTS[dtype]}", *layouts, *(f"-D{name}={value}" for name, value in macros)]


def build(configs: Sequence[Config], dtype: str, layout: str) -> dict[Config, Path]:
    """Return libraries by configuration; compile missing ones, side by side.

    Raises:
        NotRunError: there is no nvcc, or no nvidia-cutlass, or a kernel does not compile.
    """
    package = importlib.util.find_spec("cutlass_library")
    if package is None or package.origin is None:
        raise NotRunError(f'{_PACKAGE} is not installed: pip install --no-deps "{_PACKAGE}"')
    sources, version = Path(package.origin).parent / "source", importlib.metadata.version(_PACKAGE)
    includes = [f"-I{sources / 'include'}", f"-I{sources / 'tools' / 'util' / 'include'}"]

    def compiled(config: Config) -> Path:
        options = [*includes, "--expt-relaxed-constexpr", "-DNDEBUG", *definitions(config, dtype, layout)]
        return nvcc.built(_SOURCE, f"CUTLASS' {name(config)}", options, version)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(configs, threads.map(compiled, configs), strict=True))


def name(config: Config) -> str:
    """Return the name of a configuration in the results."""
    m, n, k, *rest = config
    kind = "cluster {}x{} {}" if config in HOPPER_CONFIGS else "warp {}x{} stages {}"
    return f"{m}x{n}x{k} {kind.format(*rest)}"


@cache
def _library(config: Config, dtype: str, layout: str) -> ctypes.CDLL:
    library = nvcc.opened(build((config,), dtype, layout)[config])
    library.matmul.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_void_p]
    library.workspace.argtypes = [ctypes.c_int] * 4
    library.workspace.restype = ctypes.c_size_t
    return library


def calls(
    case: Case, sets: Sequence[Operands], configs: Sequence[Config], multiprocessors: int
) -> Iterator[tuple[Config, int, Call]]:
    """Yield the calls that may be fast on so many multiprocessors: configuration, option as in cutlass.cu, call.

    Raises:
        NotRunError: the product is none for CUTLASS, or as `build`.
    """
    shape = case.shape
    if case.dtype not in _ELEMENTS or case.activation is not None or case.batch > 1:
        raise NotRunError("CUTLASS is built for plain 16-bit products")
    contiguous = shape.K if shape.layout[0] == "n" else shape.M, shape.N if shape.layout[1] == "n" else shape.K, shape.N
    if any(size % _VECTOR for size in contiguous) or case.offset_a % 16 or case.offset_b % 16:
        raise NotRunError("CUTLASS is built for 16-byte rows")
    if torch.version.hip is not None:
        raise NotRunError("CUTLASS is for NVIDIA's GPUs")
    build(configs, case.dtype, shape.layout)
    for config in configs:
        library = _library(config, case.dtype, shape.layout)
        for option in _options(config, case, multiprocessors):
            size = library.workspace(shape.M, shape.N, shape.K, option)
            workspace = torch.empty(size, device=sets[0].out.device, dtype=torch.uint8)
            yield config, option, partial(_launch, library, option, workspace)


def _options(config: Config, case: Case, multiprocessors: int) -> tuple[int, ...]:
    if config in HOPPER_CONFIGS:
        return _SWIZZLES
    tile_m, tile_n, tile_k = map(int, config[:3])
    shape = case.shape
    tiles, steps = math.ceil(shape.M / tile_m) * math.ceil(shape.N / tile_n), math.ceil(shape.K / tile_k)
    return 1, *(x for x in _SLICES if steps >= _LEAST_STEPS * x and tiles * x <= _MOST_WAVES * multiprocessors)


_chosen: dict[Case, str] = {}


def _prepare(case: Case, sets: Sequence[Operands]) -> Call:
    shape = case.shape
    if shape.layout != "nn":
        raise NotRunError("CUTLASS is measured in layout nn")
    if not all(size in _SIZES for size in (shape.M, shape.N, shape.K)):
        raise NotRunError(f"CUTLASS is measured for sizes {_SIZES.start} to {_SIZES.stop - 1}")
    hopper = torch.cuda.get_device_capability()[0] == _HOPPER
    configs = (*HOPPER_CONFIGS, *AMPERE_CONFIGS) if hopper else AMPERE_CONFIGS
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    found: dict[str, tuple[float, Call]] = {}
    for config, option, call in calls(case, sets, configs, multiprocessors):
        try:
            found[described(config, option)] = _microseconds(call, sets), call
        except NotRunError:
            continue  # this one does not fit the sizes
    if not found:
        raise NotRunError("none of the CUTLASS kernels takes these sizes")
    _chosen[case] = min(found, key=lambda each: found[each][0])
    return found[_chosen[case]][1]


def described(config: Config, option: int) -> str:
    """Return a call in words."""
    return name(config) + f" {'swizzle' if config in HOPPER_CONFIGS else 'slices'} {option}"


def _launch(library: ctypes.CDLL, option: int, workspace: torch.Tensor, operands: Operands) -> None:
    (M, K), N = operands.a.shape, operands.b.shape[1]
    addresses = [tensor.data_ptr() for tensor in (operands.a, operands.b, operands.out)]
    stream = torch.cuda.current_stream().cuda_stream
    status = library.matmul(*addresses, M, N, K, option, workspace.data_ptr(), stream)
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
        roundings=ROUNDINGS,
        describe=lambda case, _: _chosen[case],
    ),
)
