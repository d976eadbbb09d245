"""Time of a fresh process to its first product, beyond `import torch`, a CUDA context and the operands."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

# A process's milliseconds per step. Every step ends with a wait for the GPU.
_PROBE = """
import json, sys, time, torch
a, b, out = (torch.randn(1024, 1024, device="cuda").half() for _ in range(3))
torch.cuda.synchronize()
times = []
for step in json.loads(sys.argv[1]):
    start = time.perf_counter()
    exec(step)
    torch.cuda.synchronize()
    times.append(1e3 * (time.perf_counter() - start))
from aotmm.timing.check import truth
roundings = 2 if "torch.matmul" in sys.argv[1] else 1  # cuBLAS may add parts of a sum in fp16
assert truth(a, b, out.dtype).error(out, roundings) <= 1, "the product is wrong"
print(json.dumps(times))
"""
_MATMUL = "lib.matmul(a, b, out=out)"
# By method: its steps. The tutorial's kernel starts with an empty cache, as in a new container.
_METHODS = {
    "aotmm": {"import": "import aotmm", "load()": "lib = aotmm.load()", "first": _MATMUL, "second": _MATMUL},
    "torch.matmul": {"first": "torch.matmul(a, b, out=out)", "second": "torch.matmul(a, b, out=out)"},
    "tutorial, JIT and autotune": {
        "import": "from aotmm.bench.providers.tutorial import matmul",
        "first": "matmul(a, b, out)",
        "second": "matmul(a, b, out)",
    },
}
_PROCESSES = {"tutorial, JIT and autotune": 1}  # it takes a minute and does not need an average


def measure(processes: int = 5) -> dict[str, dict[str, float]]:
    """Return milliseconds of each step of each method, and to the first result ("sum"): medians over fresh processes.

    One more process goes first, for file cache and bytecode. A method that fails has no entry; stderr has the reason.
    """
    found: dict[str, dict[str, float]] = {}
    for method, steps in _METHODS.items():
        count = _PROCESSES.get(method, processes)
        try:
            runs = [_run(list(steps.values())) for _ in range(count + (count > 1))][-count:]
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"first_result: {method} failed: {error.stderr.strip().splitlines()[-1:]}\n")
            continue
        medians = [statistics.median(times) for times in zip(*runs, strict=True)]
        found[method] = dict(zip(steps, medians, strict=True))
        found[method]["sum"] = sum(medians[:-1])
    return found


def _run(steps: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as cache:
        # pip compiles bytecode; in a checkout the first process does, unless that is switched off
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, "-c", _PROBE, json.dumps(steps)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
    return times
