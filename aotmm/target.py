"""The GPU architectures that kernels are built for. Adding one is a row here, a config set and a rebuild."""

from __future__ import annotations

import platform
from typing import NamedTuple

from aotmm.errors import SpecError


class Target(NamedTuple):
    """One architecture.

    Attributes:
        name: how users, folders and manifests spell it.
        backend: "cuda" or "hip".
        triton_arch: how Triton spells it: an int for CUDA, a string for HIP.
        warp_size: threads per warp (wavefront).
        image: suffix of a compiled kernel, "cubin" or "hsaco".
        shared_bytes: most shared memory (LDS) that one block can have, in bytes.
        multiprocessors: nominal count, used by selection where no device is asked (SMs of the full product; CUs of
            one die for gfx90a).
        tflops: nominal speed with dense fp16 operands, for estimates where nothing was measured.
        bandwidth: nominal bandwidth of its memory in GB/s, likewise.
        min_driver: lowest value of cuDriverGetVersion, 0 where none is known.
        ptx_version: PTX ISA version times ten of the text shipped beside the image, None for no text.
        dtypes: input types (`problem.INPUTS`) that can be built.
        executed_on: what the kernels of this architecture have run on, for people.
        fast_accum: the tensor cores keep fp8 sums in a precision of their own, below fp32.
    """

    name: str
    backend: str
    triton_arch: int | str
    warp_size: int
    image: str
    shared_bytes: int
    multiprocessors: int
    tflops: float
    bandwidth: float
    min_driver: int
    ptx_version: int | None
    dtypes: tuple[str, ...]
    executed_on: str
    fast_accum: bool = False

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability (major, minor), None for HIP."""
        return divmod(self.triton_arch, 10) if isinstance(self.triton_arch, int) else None


# Shared memory: CUDA programming guide, table of compute capabilities (163 KB and 227 KB per block); CDNA2 ISA, 64 KB.
# Speeds: data sheets of A100 40GB, H200, MI210.
# Driver 12.0 brought the context-independent loading that the launcher uses, and reads PTX ISA 8.0.
_ROWS = (
    Target(
        "sm80", "cuda", 80, 32, "cubin", 166_912, 108, 312.0, 1555.0, 12_000, 80,
        ("fp16", "bf16", "fp32", "tf32", "fp8e5", "int8"),
        "an H200 through its PTX, and a CPU interpreter for the cubins; never an A100",
    ),
    Target(
        "sm90", "cuda", 90, 32, "cubin", 232_448, 132, 989.5, 4800.0, 12_000, None,
        ("fp16", "bf16", "fp32", "tf32", "fp8e5", "fp8e4", "fp8e4-fp8e5", "fp8e5-fp8e4", "int8"),
        "an H200",
        fast_accum=True,
    ),
    Target(
        "gfx90a", "hip", "gfx90a", 64, "hsaco", 65_536, 104, 181.0, 1638.4, 0, None,
        ("fp16", "bf16", "fp32", "fp8e5", "int8"),
        "a CPU interpreter; never an AMD GPU",
    ),
)  # fmt: skip

TARGETS = {row.name: row for row in _ROWS}

# Processors of machines that packs are linked for, by the machine number of their ELF files. Source: ELF-64 gABI.
HOSTS = {"x86_64": 62, "aarch64": 183}


def host(machine: str = "") -> str:
    """How packs spell the machines that their library is for: those like this one, or with processor `machine`."""
    return f"{machine or platform.machine()}-linux-gnu"


def target(name: str) -> Target:
    """The architecture called `name`.

    Raises:
        SpecError: there is none; the message lists them.
    """
    if name not in TARGETS:
        raise SpecError(f"unknown arch {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def ways_to_run(pack_arch: str, device_arch: str) -> str | None:
    """How kernels built for `pack_arch` run on a device: "exact", "compatible" (same major), "ptx", or not (None).

    `device_arch` is spelled like a target name ("sm89", "gfx942") but need not be one.
    Source: CUDA programming guide, binary and PTX compatibility.
    """
    if pack_arch == device_arch:
        return "exact"
    built = TARGETS[pack_arch].capability
    if built is None or not device_arch.startswith("sm") or not device_arch[2:].isdigit():
        return None
    device = divmod(int(device_arch[2:]), 10)
    if device[0] == built[0] and device[1] >= built[1]:
        return "compatible"
    if TARGETS[pack_arch].ptx_version is not None and device > built:
        return "ptx"
    return None
