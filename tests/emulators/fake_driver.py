"""Stand-ins for libcuda.so.1 and libamdhip64.so: builds and loads them, runs their launches in an interpreter.

    driver = FakeDriver("cuda", buffers=[("A", a, "r"), ("B", b, "r"), ("C", c, "w1")])
    ...  # calls of the driver's functions; device pointers are the arrays' own addresses
    driver.launches[-1].stats, driver.misuse, driver.calls

Only one FakeDriver of a kind can be active at a time: the library has one state. A process that later opens
"libcuda.so.1" or "libamdhip64.so" by name gets the stand-in too (same SONAME), so it needs a process of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.emulators import core, elf, gfx90a, sm80

SOURCES = Path(__file__).resolve().parent
_KINDS = {
    "hip": ("fake_hip.c", "libamdhip64.so", "gfx90a:sramecc+:xnack-", 60300000),
    "cuda": ("fake_cuda.c", "libcuda.so.1", "sm80", 12080),
}
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
)
_LAUNCH_FAILED = 719


class CompilerMissingError(RuntimeError):
    """There is no C compiler: `cc`, `gcc`, `clang`, or the `ziglang` wheel."""


def compiler() -> list[str]:
    """The command of a C compiler: $CC, cc, gcc, clang, or `python -m ziglang cc`. Raises CompilerMissingError."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise CompilerMissingError("no C compiler: install Debian's package `gcc` or the `ziglang` wheel, or set CC")


@functools.cache
def built(kind: str) -> Path:
    """The stand-in of `kind` ("hip" or "cuda"), compiled once per process into a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="aotmm-fake-"))
    atexit.register(shutil.rmtree, folder)
    return build(kind, folder)


def build(kind: str, folder: Path, source: Path | None = None) -> Path:
    """Compiles the stand-in of `kind` into `folder`, from `source` if it includes the usual one; the library's path."""
    usual, name, _, _ = _KINDS[kind]
    command = [*compiler(), "-O1", "-Wall", "-Wextra", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread"]
    paths = [f"-I{SOURCES}", "-o", str(folder / name), str(source or SOURCES / usual)]
    done = subprocess.run([*command, f"-Wl,-soname,{name}", *paths], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)} failed:\n{done.stderr}")
    return folder / name


@dataclasses.dataclass(frozen=True)
class Call:
    """One line of the log: the function's name and the arguments that it noted."""

    name: str
    arguments: dict[str, str]


@dataclasses.dataclass
class Launch:
    """One launch that reached the callback.

    Attributes:
        params: the packed parameter block.
        stats: None where the launch was captured, skipped or failed.
        fault: the interpreter's message, None without one.
    """

    symbol: str
    grid: core.Size
    block: core.Size
    shared: int
    params: bytes
    stream: int
    device: int
    captured: bool
    image: bytes = dataclasses.field(repr=False)
    stats: core.Stats | None = None
    fault: str | None = None


class FakeDriver:
    """A loaded stand-in.

    Attributes:
        buffers: (name, array, mode) of all that kernels may touch; the address is the array's own.
        launches: those that reached the driver, in order.
        lib: the library.
    """

    def __init__(
        self,
        kind: str,
        buffers: Sequence[tuple[str, core.Array, str]] = (),
        *,
        devices: int = 1,
        arch: str | None = None,
        version: int | None = None,
        execute: bool = True,
        library: Path | None = None,
        **options: Any,
    ) -> None:
        """Loads the stand-in of `kind`, "hip" or "cuda".

        Args:
            arch: of the devices: "gfx90a...", or "sm80", "sm90"...
            version: the driver's own.
            execute: False if launches are to be recorded and packed, and not run.
            library: another one than the usual, which includes it.
            options: of the interpreter's `launch`.
        """
        _, _, default_arch, default_version = _KINDS[kind]
        self.kind, self.buffers, self.execute, self.options = kind, list(buffers), execute, options
        self.launches: list[Launch] = []
        self.lib = ctypes.CDLL(str(library or built(kind)))
        self.lib.fake_log.restype = ctypes.c_char_p
        self.lib.fake_stream.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._callback = _CALLBACK(self._launched)
        self.lib.fake_setup(self._callback, devices, (arch or default_arch).encode(), version or default_version)

    # ---- state of the stand-in
    def capture(self, *, on: bool = True) -> None:
        """Begins or ends stream capture on all streams; captured launches are kept for `replay`."""
        self.lib.fake_capture(int(on))

    @property
    def capture_broken(self) -> bool:
        """Whether a forbidden call has invalidated the capture."""
        return bool(self.lib.fake_capture_broken())

    def replay(self) -> None:
        """Runs the captured launches, in order. Raises Fault."""
        for launch in self.launches:
            if launch.captured:
                self.run(launch)
                if launch.fault:
                    raise core.Fault(launch.fault)

    def fail_next(self, function: str = "*", error: int = 2, skip: int = 0) -> None:
        """Lets the next call of `function` ("*": any) return `error`, after `skip` calls that succeed."""
        self.lib.fake_fail_next(function.encode(), error, skip)

    def bind_stream(self, stream: int, device: int) -> None:
        """Declares that the handle `stream` belongs to `device`; launches elsewhere are refused."""
        self.lib.fake_stream(stream, device)

    def name(self, device: int, name: str) -> None:
        """Gives a device another name than the stand-in's own, before anything asks for it."""
        self.lib.fake_name(device, name.encode())

    def clusters(self, count: int) -> None:
        """Lets the driver say that so many clusters run at once, whatever their size."""
        self.lib.fake_clusters(count)

    @property
    def live_modules(self) -> int:
        """How many modules and libraries are loaded and not unloaded."""
        return int(self.lib.fake_live())

    # ---- log
    @property
    def _log(self) -> list[str]:
        text: bytes = self.lib.fake_log()
        return text.decode().splitlines()

    @property
    def calls(self) -> list[Call]:
        """What was called, in order."""
        found = []
        for line in self._log:
            if not line.startswith("MISUSE "):
                name, *rest = line.split()
                arguments = dict(item.split("=", 1) for item in rest if "=" in item)
                found.append(Call(name, arguments))
        return found

    @property
    def misuse(self) -> list[str]:
        """What the stand-in refused or found wrong."""
        return [line.removeprefix("MISUSE ") for line in self._log if line.startswith("MISUSE ")]

    @property
    def faults(self) -> list[str]:
        """Messages of launches that the interpreter stopped."""
        return [launch.fault for launch in self.launches if launch.fault]

    # ---- launches
    def _launched(
        self,
        image: int,
        size: int,
        name: bytes,
        grid: Any,
        block: Any,
        shared: int,
        params: Any,
        stream: int | None,
        device: int,
        captured: int,
    ) -> int:
        try:
            data = ctypes.string_at(image, size)
            launch = Launch(
                name.decode(), tuple(grid[:3]), tuple(block[:3]), shared, b"", stream or 0, device, bool(captured), data
            )
            self.launches.append(launch)
            try:
                launch.params = self._pack(data, launch, params)
            except (core.Fault, elf.ImageError, KeyError) as error:
                launch.fault = f"{type(error).__name__}: {error}"
                return _LAUNCH_FAILED
            if self.execute and not captured:
                self.run(launch)
        except Exception as error:  # noqa: BLE001 - nothing may escape into C
            sys.stderr.write(f"fake driver: {type(error).__name__}: {error}\n")
            return _LAUNCH_FAILED
        return _LAUNCH_FAILED if launch.fault else 0

    @staticmethod
    def _pack(data: bytes, launch: Launch, pointers: Any) -> bytes:
        """Every parameter, read through kernelParams; sizes come from the binary."""
        kernel = elf.read(data).kernels[launch.symbol]
        hidden = tuple(p for p in kernel.params if p.kind.startswith("hidden_"))
        block = bytearray(core.pack_params([], dataclasses.replace(kernel, params=hidden), launch.grid, launch.block))
        for number, param in enumerate(p for p in kernel.params if not p.kind.startswith("hidden_")):
            if not pointers[number]:
                raise core.Fault(f"kernelParams[{number}] is NULL")
            block[param.offset : param.offset + param.size] = ctypes.string_at(pointers[number], param.size)
        return bytes(block)

    def run(self, launch: Launch) -> None:
        """Executes a launch; what stops it becomes its `fault`."""
        interpreter = gfx90a.launch if self.kind == "hip" else sm80.launch
        memory = [(name, array, int(array.ctypes.data), mode) for name, array, mode in self.buffers]
        try:
            launch.stats = interpreter(
                launch.image,
                launch.symbol,
                launch.grid,
                launch.block,
                launch.params,
                launch.shared,
                memory,
                **self.options,
            )
        except (core.Fault, elf.ImageError, core.ToolMissingError, ValueError) as error:
            launch.fault = f"{type(error).__name__}: {error}"
