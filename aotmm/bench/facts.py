"""Facts of the machine and its software, which are recorded with every figure."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import torch

import aotmm
from aotmm.runtime.devices import device
from aotmm.timing.graph import elapsed_ns

STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # nvidia-smi's names: MHz, MHz, W, degrees C
_LIMITS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")
_PERIOD_MS = 250  # between two readings of the state
_COPIED = 1 << 30  # bytes
_COPIES = 11


def collect(ordinal: int) -> dict[str, Any]:
    """Return device, limits, versions and the copy bandwidth, which is measured here."""
    properties = torch.cuda.get_device_properties(ordinal)
    library = aotmm.load()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device(ordinal).name,
        "arch": device(ordinal).arch,
        "multiprocessors": properties.multi_processor_count,
        "cache_bytes": properties.L2_cache_size,
        **dict(zip(_LIMITS, _nvidia_smi(_LIMITS, ordinal), strict=False)),
        "copy_bytes_per_s": copy_bandwidth(),
        "aotmm": aotmm.__version__,
        "packs": {
            pack.arch: f"{pack.head.digest[:16]}, Triton {made.triton}, tuned on {made.tuning or 'nothing'}"
            for pack in library.packs
            for made in [pack.head.provenance]
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: _version(name) for name in ("triton", "nvidia-cutlass", "nvidia-cublas", "transformers", "timm")},
    }


def copy_bandwidth() -> float:
    """Return the bytes per second that a copy on the device reads and writes, at best."""
    source = torch.randn(_COPIED // 4, device="cuda")
    goal = torch.empty_like(source)
    return 2e9 * _COPIED / min(elapsed_ns(lambda: goal.copy_(source)) for _ in range(_COPIES))


class State:
    """The GPU's clocks, power and temperature, read beside the measurements."""

    def __init__(self) -> None:
        self._readings: list[dict[str, float]] = []

    def take(self) -> dict[str, float]:
        """Return medians of the readings since the last call; empty without readings."""
        readings, self._readings = self._readings, []
        return {name: statistics.median(row[name] for row in readings) for name in STATE} if readings else {}

    def read(self, lines: Iterable[str]) -> None:
        """Read nvidia-smi's lines as they come."""
        for line in lines:
            fields = [field.strip() for field in line.split(",")]
            if len(fields) == len(STATE) and not any(field.startswith("[") for field in fields):  # "[N/A]"
                self._readings.append(dict(zip(STATE, map(float, fields), strict=True)))


@contextmanager
def watched(ordinal: int) -> Iterator[State]:
    """Yield the state of GPU `ordinal`, which is read during the block; without nvidia-smi it stays empty."""
    state = State()
    if shutil.which("nvidia-smi") is None:
        yield state
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader,nounits"]
    command += [f"--id={_uuid(ordinal)}", f"--loop-ms={_PERIOD_MS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        output = process.stdout
        assert output is not None  # noqa: S101 - it was asked for
        reader = threading.Thread(target=state.read, args=(output,), daemon=True)
        reader.start()
        try:
            yield state
        finally:
            process.terminate()
            reader.join()


def _nvidia_smi(names: tuple[str, ...], ordinal: int) -> list[str]:
    """Return nvidia-smi's facts of a GPU; nothing without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={_uuid(ordinal)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [field.strip() for field in done.stdout.strip().split(",")]


def _uuid(ordinal: int) -> str:
    """Return nvidia-smi's name of a GPU: its numbers do not follow CUDA_VISIBLE_DEVICES."""
    return f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
