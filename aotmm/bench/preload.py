"""Time of a fresh process to load the kernels that products with block scales choose: random layers of DeepSeek-V3."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace

import torch

from aotmm.problem import BLOCK_SCALE_K
from aotmm.runtime.launcher import Problem
from aotmm.runtime.library import Library
from aotmm.timing.blocks import draw, layers
from aotmm.timing.experts import experts
from aotmm.timing.problems import Case

_LAYERS = 598  # and a third as many expert layers: 797 problems
_MODEL = "DeepSeek V3"
CHOSEN, ALL = "their kernels, ms", "all kernels, ms"
# Prints the milliseconds of each way to preload, the second in another process.
_PROBE = """
import json, sys, time, torch, aotmm
from aotmm.bench.preload import problems
lib, ordinal = aotmm.load(), torch.cuda.current_device()
drawn = problems(lib, int(sys.argv[1])) if sys.argv[1] else None
torch.cuda.synchronize()
start = time.perf_counter()
lib.preload(problems=drawn)
print(json.dumps(1e3 * (time.perf_counter() - start)))
"""


def measure(seed: int, processes: int = 3) -> dict[str, float]:
    """Return the number of problems, and milliseconds to load their kernels and to load all: medians over processes.

    One more process goes first, for file cache and bytecode.

    Raises:
        subprocess.CalledProcessError: a process failed; its output says why.
    """
    found = {"problems": float(len(cases(seed)))}
    for name, argument in ((CHOSEN, str(seed)), (ALL, "")):
        runs = [_run(argument) for _ in range(1 + processes)]
        found[name] = statistics.median(runs[1:])
    return found


def cases(seed: int) -> list[Case]:
    """Return the products that are drawn: layers, and expert layers with rows in groups."""
    known = experts()
    mine = replace(known, models=tuple(model for model in known.models if model.name.startswith(_MODEL)))
    drawn = draw(layers(), mine, seed, _LAYERS)
    return drawn["layers"] + drawn["experts"]


def problems(library: Library, seed: int) -> list[Problem]:
    """Return the problems of what is drawn, of operands that share their memory: they are not computed."""
    memory = _Memory()
    return [_problem(library, case, memory) for case in cases(seed)]


class _Memory:
    """Memory of the GPU that every operand begins with."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cuda")

    def view(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of any content."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > self._bytes.numel():
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self._bytes[:size].view(dtype).view(shape)


def _problem(library: Library, case: Case, memory: _Memory) -> Problem:
    M, N, K = case.shape.M, case.shape.N, case.shape.K
    groups = len(case.groups.sizes) if case.groups else 0
    blocks, wide = -(-K // BLOCK_SCALE_K), -(-N // BLOCK_SCALE_K)
    of_b = (groups,) * bool(groups)
    a = memory.view(M, K, dtype=torch.float8_e4m3fn)
    b = memory.view(*of_b, N, K, dtype=torch.float8_e4m3fn).mT
    scale_a = memory.view(blocks, M, dtype=torch.float32).mT
    scale_b = memory.view(*of_b, wide, blocks, dtype=torch.float32).mT
    options = {"offs": memory.view(groups, dtype=torch.int32)} if groups else {}
    return library.problem(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, **options)


def _run(argument: str) -> float:
    command = [sys.executable, "-c", _PROBE, argument]
    milliseconds: float = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return milliseconds
