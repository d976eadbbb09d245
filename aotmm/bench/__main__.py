"""Prints measurements as JSON: `python -m aotmm.bench [cold_start] [call_cost] [speed] [epilogue]`, all by default."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone

import torch

import aotmm
from aotmm.runtime.devices import device

MEASUREMENTS = ("cold_start", "call_cost", "speed", "epilogue")


def main(names: list[str]) -> int:
    """Runs the measurements called `names`; returns the exit code."""
    unknown = sorted(set(names) - set(MEASUREMENTS))
    if unknown or not torch.cuda.is_available():
        problem = f"unknown measurement {', '.join(unknown)}" if unknown else "torch sees no GPU to measure"
        sys.stderr.write(f"error: {problem}; usage: python -m aotmm.bench [{'] ['.join(MEASUREMENTS)}]\n")
        return 2
    facts = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device(0).name,
        "aotmm": aotmm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "packs": {pack.arch: pack.head.provenance.triton for pack in aotmm.load().packs},
    }
    results = {name: importlib.import_module(f"aotmm.bench.{name}").measure() for name in names or MEASUREMENTS}
    json.dump({**facts, **results}, sys.stdout, indent=1, default=_plain)
    sys.stdout.write("\n")
    return 0


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not for JSON")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
