"""An installed wheel, and programs that run with it and nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Starts every program.
BLOCK_BUILD_LIBRARIES = """
import sys

class Block:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "jinja2", "ziglang"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
"""
# Uses all that needs no GPU, and keeps in `events` what was opened for writing and whether a process was started.
WATCHED_USE = """
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
"""
# Without capabilities root may do what the permissions of files say. Source: capset(2), version 3 of its structures.
DROP_CAPABILITIES = """
import ctypes
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
"""
# What is in a wheel does not depend on how small it is; the best level takes 20 times as long as the fastest.
# tests/packaging makes wheels as they ship.
PACK_FAST = """
import runpy, sys, zlib
packer = zlib.compressobj
zlib.compressobj = lambda _level, *options: packer(1, *options)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def module(*command: str | Path, cwd: Path = ROOT) -> None:
    """Runs a module of this Python, which packs wheels fast if it makes any."""
    start = [sys.executable, "-c", PACK_FAST]
    done = subprocess.run([*start, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def install(folder: Path) -> Path:
    """Makes a wheel in `folder` and installs it in a folder `site` beside it; the wheel."""
    module("hatchling", "build", "-t", "wheel", "-d", folder)
    (wheel,) = folder.glob("*.whl")
    module("pip", "install", "-q", "--no-deps", "--target", folder / "site", wheel)
    return wheel


def run(path: str | Path, cwd: Path, program: str, *arguments: str, fails: bool = False, homeless: bool = False) -> str:
    """What `program` prints when it runs with `path` ahead of everything, far from the checkout.

    Args:
        fails: it has to fail, and what it says of that is wanted too.
        homeless: there is no HOME, and permissions bind the program even where this runs as root.
    """
    environment = os.environ | {"PYTHONPATH": str(path), "PATH": ""}
    if homeless:
        environment = {name: value for name, value in environment.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    start = DROP_CAPABILITIES * homeless + BLOCK_BUILD_LIBRARIES
    done = subprocess.run(
        [sys.executable, "-c", start + program, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr if fails else done.stdout
