"""What a process pays before its first product: import, load, the first launch; figures from fresh processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

# One process's figures in milliseconds. The context exists before the first product: its operands were made.
_PROBE = """
import json, sys, time
t = [time.perf_counter()]
import torch; t.append(time.perf_counter())
import aotmm; t.append(time.perf_counter())
lib = aotmm.load(); t.append(time.perf_counter())
a = torch.randn(512, 512, device="cuda").half(); torch.cuda.synchronize(); t.append(time.perf_counter())
lib.matmul(a, a); torch.cuda.synchronize(); t.append(time.perf_counter())
lib.matmul(a, a); torch.cuda.synchronize(); t.append(time.perf_counter())
torch.matmul(a, a); torch.cuda.synchronize(); t.append(time.perf_counter())
names = ["import torch", "import aotmm", "load()", "operands", "first matmul", "second matmul", "first torch.matmul"]
print(json.dumps(dict(zip(names, (1e3 * (y - x) for x, y in zip(t, t[1:]))))))
"""


def measure(processes: int = 5) -> dict[str, float]:
    """Median milliseconds of each step over fresh processes; one more goes first, for file cache and bytecode."""
    # pip compiles what it installs; in a checkout the first process does, unless it is told not to
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(processes + 1):
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout))
    return {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
