"""Step 4, C -> shared library: link a launcher with a compiler that pip can install.

`python -m ziglang cc` makes the same bytes on every machine and needs no C toolchain; CC overrides it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aotmm.build import render
from aotmm.errors import CompileError, build_extra_missing
from aotmm.target import HOSTS, Target, host

NATIVE = Path(__file__).parent.parent / "native"
_ELF_MACHINE = 18  # offset of the machine in an ELF file
GLIBC = "2.17"  # manylinux2014, the oldest that torch's own wheels accept
# Without contraction, predicted times are the same on every machine. Functions of vectors are inlined: no ABI matters.
_STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off")
KERNEL_CORE = ("arithmetic.h", "kernel.h", "driver.c", "guards.c", "kernel.c")  # of any pack
LAUNCH_CORE = (
    *KERNEL_CORE,
    *("core.h", "problem.c", "fit.c", "order.c", "tuning.c", "time_model.c", "select.c", "remember.c", "launch.c"),
)
OWN_CORE = (*KERNEL_CORE, "own.h", "own.c")
FLAGS = ("-std=gnu11", "-O2", *_STRICT, "-s", "-shared", "-fPIC", "-fvisibility=hidden")


def compiler(machine: str = "") -> tuple[tuple[str, ...], str]:
    """Return the C compiler's command, for this machine or for processor `machine`, and its name in provenance.

    CC is used unchanged; if it links for another machine, `link_launcher` refuses the result.

    Raises:
        CompileError: CC is none. SpecError: there is none.
    """
    if os.environ.get("CC"):
        try:
            command = tuple(shlex.split(os.environ["CC"]))  # ValueError: an open quote
            done = subprocess.run([*command, "--version"], capture_output=True, check=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise CompileError(f"CC={os.environ['CC']} does not run: {error}; unset CC to use ziglang") from error
        lines = done.stdout.decode(errors="replace").splitlines()
        if not lines:
            raise CompileError(f"CC={os.environ['CC']} has no --version, so it is no compiler; unset CC to use ziglang")
        return command, lines[0]
    if importlib.util.find_spec("ziglang") is None:
        raise build_extra_missing("a C compiler (ziglang, or set CC)")
    command = (sys.executable, "-m", "ziglang", "cc", "-target", f"{host(machine)}.{GLIBC}")
    return command, f"ziglang {importlib.metadata.version('ziglang')}, glibc {GLIBC}"


def library_key(
    target: Target,
    texts: Mapping[str, str],
    images: bytes,
    compiler_name: str,
    machine: str = "",
    core: tuple[str, ...] = LAUNCH_CORE,
) -> str:
    """Return the digest of all inputs of the launcher of `target`; `texts` are those that `render` made, by file."""
    generated = _digest(_inputs(texts, images))
    digest = hashlib.sha256(f"{compiler_name}\0{host(machine)}\0{FLAGS}\0{generated}\0".encode())
    for path in _launcher_sources(target, core):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def link_launcher(
    target: Target,
    folder: Path,
    texts: Mapping[str, str],
    images: bytes,
    command: tuple[str, ...],
    machine: str = "",
    core: tuple[str, ...] = LAUNCH_CORE,
) -> tuple[Path, int]:
    """Link launcher.c among `texts` to libaotmm_<arch>.so in `folder`, which holds `images`.

    Return the library, and the byte of it at which `images` begin. Of the texts, which `render` made, the folder keeps
    those that packs have (`render.KEPT`).

    Raises:
        CompileError: the C compiler failed, or the library does not hold the images' bytes, or is for another machine.
    """
    output = folder / f"libaotmm_{target.name}.so"
    sources = [path for path in _launcher_sources(target, core) if path.suffix == ".c"]
    files = _inputs(texts, images)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    # zig's cache knows a file by its text and name: the digest tells equal ones apart, beside other headers or images
    inputs = f"-DAOTMM_INPUTS={_digest(files)}"
    link(
        [*command, *FLAGS, inputs, "-I.", f"-I{NATIVE}", render.SOURCE, *map(str, sources), "-ldl", "-lpthread", "-lm"],
        output,
        folder,
        machine,
    )
    for name in files.keys() - render.KEPT:
        (folder / name).unlink()
    begin = output.read_bytes().find(images)
    if begin < 0:
        raise CompileError(f"{output.name} does not hold {render.IMAGES}; the C compiler ignored .incbin")
    return output, begin


def _inputs(texts: Mapping[str, str], images: bytes) -> dict[str, bytes]:
    """Return the generated files of a link by name."""
    return {name: text.encode() for name, text in texts.items()} | {render.IMAGES: images}


def _digest(files: Mapping[str, bytes]) -> str:
    """Return one digest of files, of their names too."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return digest.hexdigest()


def _zig_cache() -> dict[str, str]:
    """Return the variable that gives ziglang a folder for its parts of the C library, if it would find none.

    Without HOME it refuses to work, and below some read-only folders it never ends.
    """
    below = {"ZIG_GLOBAL_CACHE_DIR": "", "XDG_CACHE_HOME": "zig", "HOME": ".cache/zig"}
    found = [Path(place, rest) for name, rest in below.items() if (place := os.environ.get(name))]
    with suppress(OSError):
        for folder in found[:1]:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return {}
    return {"ZIG_GLOBAL_CACHE_DIR": _temporary_folder()}


@functools.cache
def _temporary_folder() -> str:
    """Return a folder that lasts as long as this process."""
    folder = tempfile.mkdtemp(prefix="aotmm-zig-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _launcher_sources(target: Target, core: tuple[str, ...]) -> list[Path]:
    return [NATIVE / name for name in (*core, f"{target.backend}.c")]


def link(command: list[str], output: Path, folder: Path, machine: str) -> None:
    """Run the C compiler's `command` in `folder`, which writes the library `output` there for processor `machine`.

    Raises:
        CompileError: it failed, or the library is for another machine.
    """
    try:
        done = subprocess.run(
            [*command, f"-Wl,-soname,{output.name}", "-o", output.name],
            cwd=folder,
            capture_output=True,
            check=False,
            env=os.environ | {"LC_ALL": "C"} | (_zig_cache() if "ziglang" in command else {}),
        )
    except OSError as error:
        raise CompileError(f"linking {output.name} failed: {command[0]} does not run: {error}") from error
    if done.returncode or not output.is_file():
        words = done.stderr.decode(errors="replace")
        raise CompileError(f"linking {output.name} failed with code {done.returncode}: {shlex.join(command)}\n{words}")
    (found,) = struct.unpack_from("<H", output.read_bytes(), _ELF_MACHINE)
    wanted = HOSTS.get(host(machine).partition("-")[0], found)
    if found != wanted:
        raise CompileError(
            f"linking {output.name} for {host(machine)} gave a library for ELF machine {found}, not {wanted}: "
            f"{shlex.join(command[:3])}; name a CC that links for it, or unset CC"
        )
