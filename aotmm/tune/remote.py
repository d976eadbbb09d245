"""Measuring on the GPUs of other machines: their facts, and the pack that travels there."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from tempfile import mkdtemp

import torch

from aotmm.pack.files import read
from aotmm.pack.manifest import FILE_NAME, MAX_MANIFEST_BYTES
from aotmm.runtime.devices import device
from aotmm.runtime.pack import Pack, read_verified
from aotmm.tune.measure import GpuMeasurer
from aotmm.tune.workers import TIMEOUTS, measuring
from aotmm.workers.pool import Heartbeat, Worker, WorkerFactory, local

Files = dict[str, bytes]


def worker_factory(pack: Pack) -> WorkerFactory:
    """Return a worker factory that measures `pack` on a process's first GPU, on any machine. Raises ArtifactError."""
    return functools.partial(measuring, functools.partial(_measurer, packed(pack)))


def packed(pack: Pack) -> Files:
    """Return the files of `pack` that a launch needs, compressed. Raises ArtifactError."""
    files = {file.path: read_verified(pack.folder, file) for file in (pack.head.kernels_file, pack.head.library)}
    files[FILE_NAME] = read(pack.folder, FILE_NAME, MAX_MANIFEST_BYTES)
    return {name: zlib.compress(data) for name, data in files.items()}


def unpacked(files: Files) -> Path:
    """Return the folder of a pack from `packed`, among the temporary files of this process."""
    folder = Path(mkdtemp(prefix="aotmm-"))
    for name, data in files.items():
        (folder / name).write_bytes(zlib.decompress(data))
    return folder


def gpu_facts() -> dict[str, str]:
    """Return driver, torch, and this process's first GPU; read in another process, which then releases the GPU.

    Raises:
        WorkerDiedError: there is no GPU.
    """
    with local([_facts_worker], TIMEOUTS) as pool:
        found: dict[str, str] = pool.submit(None).result()
    return found


def driver() -> str:
    """Return the version of the GPU driver's kernel module, "unknown" if the system does not tell."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            return Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
    return "unknown"


def _measurer(files: Files) -> GpuMeasurer:
    return GpuMeasurer(unpacked(files), 0)


def _facts_worker() -> Worker:
    def work(_task: None, _heartbeat: Heartbeat) -> dict[str, str]:
        gpu = device(0)
        return {"GPU": gpu.name, "arch": gpu.arch, "driver": driver(), "torch": torch.__version__}

    return work
