"""The step beside the packs: link the libraries through which torch calls any launcher.

They depend on no arch and on no kernel, so a checkout has them once, and every wheel brings them along.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from aotmm.build import link, render
from aotmm.errors import PackError
from aotmm.target import host

NATIVE = link.NATIVE
LIBRARY = NATIVE / "libaotmm_torch.so"
DIRECT_CALL = NATIVE / "_direct_call.abi3.so"
SOURCES = (
    *("arithmetic.h", "torch_ops.h", "torch_ops.c", "torch_memory.c", "override.c"),
    *("limited_api.h", "function_call.h", "direct_call.c", "function_call.c"),
)


def link_torch_library(folder: Path | None = None, machine: str = "") -> bool:
    """Link the torch libraries if they are missing or older than their sources; return whether they were linked.

    These are libaotmm_torch.so, and _direct_call.abi3.so, a Python module for every Python of the stable ABI: those of
    this checkout, or for processor `machine` in `folder`.

    Raises:
        CompileError: the C compiler failed. PackError: a library cannot be written.
    """
    command, name = link.compiler(machine)
    headers = {"launcher.h": render.header(), "own_table.h": render.own_table()}
    digest = hashlib.sha256(f"{name}\0{host(machine)}\0{link.FLAGS}\0{headers}\0".encode())
    for source in SOURCES:
        digest.update((NATIVE / source).read_bytes() + b"\0")
    key = digest.hexdigest()
    sources_of = {
        LIBRARY: ("torch_ops.c", "torch_memory.c", "override.c"),
        DIRECT_CALL: ("direct_call.c", "function_call.c"),
    }
    libraries = {(folder or path.parent) / path.name: sources for path, sources in sources_of.items()}
    if all(library.exists() and key.encode() in library.read_bytes() for library in libraries):
        return False
    # c10 exceptions pass through these functions, so they need unwind tables
    flags = (*link.FLAGS, "-fexceptions", f'-DAOTMM_KEY="{key}"')
    for library, sources in libraries.items():
        try:
            with tempfile.TemporaryDirectory(prefix=".torch-", dir=library.parent) as place:
                work = Path(place)
                for file, text in headers.items():
                    (work / file).write_text(text)
                output = work / library.name
                paths = [str(NATIVE / source) for source in sources]
                link.link([*command, *flags, "-I.", f"-I{NATIVE}", *paths, "-ldl"], output, work, machine)
                output.replace(library)
        except OSError as error:
            raise PackError(f"{library} cannot be written: {error}") from error
    return True
