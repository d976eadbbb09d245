"""A kernel's code as text: the PTX that a pack ships, or its image through a disassembler of this machine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from aotmm.errors import CompileError, SpecError
from aotmm.target import target

if TYPE_CHECKING:
    from aotmm.pack.schema import AnyKernel
    from aotmm.runtime.pack import Pack

FORMS = ("ptx", "sass", "amdgcn")
_FORMS_OF = {"cuda": ("ptx", "sass"), "hip": ("amdgcn",)}
_COMMANDS = {
    "sass": (("nvdisasm", "-c"), ("cuobjdump", "-sass")),
    "amdgcn": (("llvm-objdump", "-d"),),
}
_INSTALL = {
    "sass": "pip install triton, or install the CUDA toolkit",
    "amdgcn": "install LLVM (its AMDGPU target), or ROCm",
}
_ROCM = Path("/opt/rocm/llvm/bin")


def assembly(pack: Pack, kernel: AnyKernel, form: str) -> str:
    """Return the code of `kernel` as `form`, one of `FORMS`; the pack's bytes are compared with its manifest first.

    Raises:
        SpecError: kernels of this arch have no such form, or the pack ships no PTX.
        CompileError: no disassembler is installed, or it refused the image.
        ArtifactError: the library is missing or was altered.
    """
    known = _FORMS_OF[target(pack.arch).backend]
    if form not in known:
        raise SpecError(f"a kernel of {pack.arch} has no {form}; it has: {', '.join(known)}")
    if form == "ptx":
        if kernel.ptx is None:
            raise SpecError(f"pack {pack.folder} ships no PTX for {kernel.name}; its machine code: --asm sass")
        return pack.code(kernel.ptx).decode()
    image = pack.code(kernel.image)
    command = _disassembler(form)
    with tempfile.TemporaryDirectory(prefix="aotmm-") as folder:
        path = Path(folder, f"{kernel.name}.{target(pack.arch).image}")
        path.write_bytes(image)
        done = subprocess.run([*command, path.name], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{' '.join(command)} refused {path.name}:\n{done.stderr.strip()}")
    return done.stdout


def _disassembler(form: str) -> tuple[str, ...]:
    """Return the command that prints an image as `form`: a tool on PATH, else Triton's or ROCm's."""
    triton = importlib.util.find_spec("triton")
    inside = [] if triton is None else list(triton.submodule_search_locations or ())
    folders = [None, *(f"{folder}/backends/nvidia/bin" for folder in inside), str(_ROCM)]
    for folder in folders:
        for name, *flags in _COMMANDS[form]:
            tool = shutil.which(name, path=folder)
            if tool is not None:
                return tool, *flags
    names = " or ".join(name for name, *_ in _COMMANDS[form])
    raise CompileError(f"--asm {form} needs {names}, which is neither on PATH nor in Triton or ROCm; {_INSTALL[form]}")
