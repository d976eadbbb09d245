"""The runtime needs no Triton, no template engine, no compiler and nowhere to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Blocks the build half's libraries, then counts every file opened for writing and every process started.
PROBE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "jinja2", "click", "rich", "ziglang"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import torch
events = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        writes = arguments[1] is not None and any(letter in arguments[1] for letter in "wax+")
        if writes and not arguments[0].startswith("/proc/self/fd/"):
            events.append(arguments[0])
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "socket.connect"):
        events.append(event)
sys.addaudithook(watch)
import aotmm
lib = aotmm.load()
for pack in lib.packs:
    assert pack.launcher.kernels
x = torch.zeros(2, 2)
try:
    lib.matmul(x, x)
except TypeError as error:
    assert "CUDA" in str(error)
assert not torch.cuda.is_initialized()
print(events)
"""


def test_runtime_needs_nothing_else(tmp_path: Path) -> None:
    """Packs load and are used with the build half blocked, no HOME, nothing written and no process started."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    checkout = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert not list(tmp_path.iterdir())
