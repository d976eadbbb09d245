"""The cost of a build as the work grows: with workers of both kinds, and with 2,000 variants. Needs no GPU or torch.

The compiler is simulated: it waits, and returns an image and a manifest entry of the usual size. All else is real:
processes, a Dask cluster of this machine, cache, linking, packs.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from aotmm.build import build
from aotmm.build.compile import Buildable, Compiled, linked_later
from aotmm.build.products import said_of
from aotmm.kernels import Variant
from aotmm.pack.schema import Guard, Kernel, Order, Parameter
from aotmm.problem import QUANTITIES

ARCHS = ("sm80", "sm90", "gfx90a")
TILES_OF_2000 = 56  # with every layout and epilogue, and the other kernels of each pack, in three packs
LATENCY_S = 0.25
_TILES = 19
_LOCAL, _DASK = (1, 2), (1, 2, 4)
_IMAGE_BYTES, _PTX_BYTES = 35_000, 35_000  # the mean of the default pack for sm90; about that of PTX for sm80
_PARAMETERS, _GUARDS = 31, 18  # likewise
# Prints the kernels built, the seconds by the clock and of the process's CPU, and its peak memory.
_BUILD = """
import json, resource, sys, time
from pathlib import Path
from aotmm.bench.build_scaling import ARCHS, anything, simulated
from aotmm.build import build
start = time.monotonic()
reports = build(ARCHS, Path(sys.argv[1]), configs=sys.argv[2], jobs=2, compiler=simulated, gate=anything)
seconds, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
kernels, compiled = (sum(getattr(report, name) for report in reports) for name in ("kernels", "compiled"))
cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
print(json.dumps({"kernels": kernels, "compiled": compiled, "s": seconds, "CPU s": cpu, "resident MB": memory}))
"""


def measure() -> dict[str, dict[str, float]]:
    """Return kernels per minute of each pool, from its first to its last; seconds and memory for 2,000 variants.

    Raises:
        AotmmError: as `build`.
    """
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="aotmm-") as name:
        folder = Path(name)
        configs = write_set(folder / "few.toml", _TILES)
        for count in _LOCAL:
            found[f"{count} local"] = _speed(folder / f"local{count}", configs, jobs=count)
        for count in _DASK:
            with _cluster(count) as address:
                found[f"{count} of Dask"] = _speed(folder / f"dask{count}", configs, scheduler=address)
        many = write_set(folder / "many.toml", TILES_OF_2000)
        for way in ("2,000 variants", "the same again"):
            found[way] = build_2000(folder / "many", many)
    return found


def build_2000(out: Path, configs: Path) -> dict[str, float]:
    """Return the cost of a build of `configs` for all of `ARCHS`, in its own process; its compilers do not wait."""
    command = [sys.executable, "-c", _BUILD, str(out), str(configs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def write_set(path: Path, tiles: int) -> Path:
    """Write a config set with that many tiles in every layout with every epilogue."""
    lines = [
        'dtypes = ["fp16"]',
        'layouts = ["nn", "nt", "tn", "tt"]',
        'epilogues = ["none", "bias_relu", "full"]',
        'source = "simulated"',
    ]
    sizes = itertools.product((32, 64, 128, 256), (32, 64, 128, 256), (32, 64), (2, 3))
    for block_m, block_n, block_k, num_stages in itertools.islice(sizes, tiles):
        lines += ["[[config]]", f"block_m = {block_m}", f"block_n = {block_n}", f"block_k = {block_k}"]
        lines += [f"num_stages = {num_stages}", "num_warps = 4"]
    path.write_text("\n".join(lines) + "\n")
    return path


def simulated(variant: Variant, key: str, *, latency_s: float = 0.0) -> Compiled:
    """Return bytes that depend only on `key`, after `latency_s` seconds."""
    time.sleep(latency_s)
    dice = random.Random(key)  # noqa: S311 - no secret
    image, target = dice.randbytes(_IMAGE_BYTES), variant.target
    ptx = dice.randbytes(_PTX_BYTES // 2).hex().encode() if target.ptx_version is not None else None
    quantities = QUANTITIES[variant.role]
    kernel = Kernel(
        **said_of(variant),
        symbol="simulated",
        persistent=False,
        pdl=False,
        threads=variant.config.num_warps * target.warp_size,
        shared_bytes=0,
        registers=128,
        spill_bytes=0,
        global_scratch_bytes=0,
        profile_scratch_bytes=0,
        vector_bytes=16,
        order=Order("wgmma", 16),
        parameters=tuple(
            Parameter(name, "i64", name, 8 * number, 8) for number, name in enumerate(quantities[:_PARAMETERS])
        ),
        quantities=quantities,
        guards=tuple(Guard(name, "multiple_of", 16) for name in quantities[:_GUARDS]),
        attributes=(),
        image=linked_later(image),
        ptx=None if ptx is None else linked_later(ptx),
        key=key,
    )
    return Compiled(kernel, image, ptx)


def anything(_variant: Buildable, _key: str, _compiled: Compiled) -> list[str]:
    """Accept everything, as a gate: simulated images are no kernels."""
    return []


def _speed(out: Path, configs: Path, *, jobs: int | None = None, scheduler: str | None = None) -> dict[str, float]:
    times: list[float] = []
    start = time.monotonic()
    build(
        ("sm90",),
        out,
        configs=str(configs),
        jobs=jobs,
        scheduler=scheduler,
        compiler=partial(simulated, latency_s=LATENCY_S),
        gate=anything,
        progress=lambda *_: times.append(time.monotonic()),
    )
    _, first, *_, last = times  # the first call is before any kernel
    count = len(times) - 1
    return {"kernels": count, "first after s": first - start, "per minute": 60 * (count - 1) / (last - first)}


@contextmanager
def _cluster(count: int) -> Iterator[str]:
    """Yield the address of a scheduler with workers of one thread each, all of them processes of this machine."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        yield str(cluster.scheduler_address)
