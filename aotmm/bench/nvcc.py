"""Libraries of CUDA sources, which nvcc builds at their first use."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from aotmm.bench.providers import NotRunError

_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC", "-shared")
_HOPPER = 9  # major compute capability


def built(source: Path, name: str, options: Sequence[str], made_of: str = "") -> Path:
    """Return the library of `source` for torch's GPU; nvcc compiles it if the folder of such libraries lacks it.

    Args:
        name: of the code, for errors. made_of: what else it depends on.

    Raises:
        NotRunError: there is no nvcc, or it does not compile the source.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NotRunError("there is no nvcc on the PATH")
    capability = torch.cuda.get_device_capability()
    arch = "sm_{}{}{}".format(*capability, "a" if capability[0] == _HOPPER else "")
    flags = [*_FLAGS, f"-arch={arch}", *options]
    made_by = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\n".join([source.read_text(), made_by, made_of, *flags]).encode()).hexdigest()[:32]
    library = _folder() / f"{key}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        temporary = library.with_name(f".{key}.{os.getpid()}")
        done = subprocess.run(
            [nvcc, *flags, "-o", str(temporary), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NotRunError(f"nvcc does not compile {name}: {done.stderr.strip()[:500]}")
        temporary.replace(library)
    return library


def opened(library: Path) -> ctypes.CDLL:
    """Return an open library."""
    return ctypes.CDLL(str(library))


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aotmm" / "nvcc"
