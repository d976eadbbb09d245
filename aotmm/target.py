"""The GPU architectures that kernels are built for. Adding one is a row here: docs/extending.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import NamedTuple

from aotmm.errors import SpecError

ALL = "all"  # every architecture, where several can be named
# Status of an architecture's kernels: images tried on such a GPU, in an interpreter, or not at all.
STATUSES = ("executed on hardware", "emulated", "compiled only")
EXECUTED, EMULATED, COMPILED = STATUSES
# From here on Triton compiles for one compute capability ("sm_90a"). Source: PTX ISA, ".target"
_SPECIFIC_SINCE = (9, 0)
_PDL_SINCE = (9, 0)
_WAYS = ("exact", "compatible", "ptx")  # of running kernels, the best first


class Target(NamedTuple):
    """One architecture.

    Attributes:
        name: its spelling for users, folders and manifests; "sm" and the compute capability, or AMD's own name.
        gpus: products that have it, for people.
        status: one of `STATUSES`.
        executed_on: the GPU or interpreter that has run the kernels of this architecture, for people.
        dtypes: input types (`problem.INPUTS`) that can be built.
        multiprocessors: nominal count, for selection without a device (SMs of the full product; CUs of one die for
            gfx90a).
        tflops: nominal speed with dense fp16 operands, for estimates without measurements.
        bandwidth: nominal bandwidth of its memory in GB/s, likewise.
        shared_bytes: most shared memory (LDS) that one block can have, in bytes.
        device: its driver's name for the product of these figures, "" if it has no tuning table.
        clock_mhz: highest clock of the multiprocessors of the product of these figures, 0 if unknown. Estimates are
            scaled to other products by their clock and bandwidth only if it is known.
        like: the architecture whose entries of config sets are for this one too, "" for none.
        min_driver: lowest value of cuDriverGetVersion, 0 if none is known.
        ptx_version: PTX ISA version times ten of the text shipped beside the image, None for no text.
        fast_accum: the tensor cores keep fp8 sums in a precision of their own, below fp32.
        warp_size: threads per warp (wavefront).
        threads: most threads that one multiprocessor holds.
        registers: those of one multiprocessor, which gives them to warps by `granule`.
        simds: parts of a multiprocessor, each with registers of its own.
    """

    name: str
    gpus: str
    status: str
    executed_on: str
    dtypes: tuple[str, ...]
    multiprocessors: int
    tflops: float
    bandwidth: float
    shared_bytes: int
    device: str = ""
    clock_mhz: int = 0
    like: str = ""
    min_driver: int = 0
    ptx_version: int | None = None
    fast_accum: bool = False
    warp_size: int = 32
    threads: int = 2048
    registers: int = 65_536
    granule: int = 256
    simds: int = 1

    @property
    def backend(self) -> str:
        """Return Triton's compiler for it: "cuda" or "hip"."""
        return "cuda" if self.name.startswith("sm") else "hip"

    @property
    def image(self) -> str:
        """Return the suffix of a compiled kernel."""
        return {"cuda": "cubin", "hip": "hsaco"}[self.backend]

    @property
    def triton_arch(self) -> int | str:
        """Return Triton's spelling of it: an int for CUDA, a string for HIP."""
        return int(self.name[2:]) if self.backend == "cuda" else self.name

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the CUDA compute capability (major, minor), None for HIP."""
        return divmod(int(self.name[2:]), 10) if self.backend == "cuda" else None

    @property
    def pdl(self) -> bool:
        """Return whether a kernel can begin before the one before it ends. Source: PTX ISA, "griddepcontrol"."""
        return self.capability is not None and self.capability >= _PDL_SINCE

    @property
    def specific(self) -> bool:
        """Return whether its images run on this architecture alone, not on later ones of the same major version."""
        return self.capability is None or self.capability >= _SPECIFIC_SINCE


# Types that tensor cores multiply.
_AMPERE = ("fp16", "bf16", "fp32", "tf32", "fp8e5", "int8")
_HOPPER = ("fp16", "bf16", "fp32", "tf32", "fp8e5", "fp8e4", "fp8e4-fp8e5", "fp8e5-fp8e4", "int8")
_CDNA = ("fp16", "bf16", "fp32", "fp8e5", "int8")

# Shared memory, registers and threads: CUDA programming guide, table of compute capabilities (163, 99 and 227 KB per
# block); AMD's ISA guides of CDNA2, CDNA3, CDNA4 (64, 64 and 160 KB; 4 SIMDs with 512 registers per lane, given out by
# 8, and 8 waves each), RDNA3 and RDNA4 (64 KB; 2 SIMDs with 1536 registers per lane, given out by 24, 16 waves each).
# Speeds: data sheets of A100 40GB, A40, L40S, H200, B200, RTX 5090, MI210, MI300X, MI355X, RX 7900 XTX and 9070 XT.
# Driver 12.0 brought the context-independent loading that the launcher uses, and reads PTX ISA 8.0; 12.8 the first
# GPUs of 10.0 and 12.0.
_ROWS = (
    Target(
        name="sm80", gpus="A100; others from 8.0 on through the same cubins or, from 9.0 on, PTX", status=EMULATED,
        executed_on="an H200 and an H100 through its PTX (not grouped products), a CPU interpreter for the cubins; "
        "never an A100",
        dtypes=_AMPERE, multiprocessors=108, tflops=312.0, bandwidth=1555.0, shared_bytes=166_912,
        clock_mhz=1410, min_driver=12_000, ptx_version=80,
    ),
    Target(
        name="sm86", gpus="A10, A40, RTX A6000, RTX 30", status=EMULATED,
        executed_on="a CPU interpreter; never a GPU of 8.6",
        dtypes=_AMPERE, multiprocessors=84, tflops=149.7, bandwidth=696.0, shared_bytes=101_376,
        clock_mhz=1740, like="sm80", min_driver=12_000, threads=1536,
    ),
    Target(
        name="sm89", gpus="L4, L40, L40S, RTX 40", status=EMULATED,
        executed_on="a CPU interpreter; never a GPU of 8.9",
        dtypes=_HOPPER, multiprocessors=142, tflops=362.0, bandwidth=864.0, shared_bytes=101_376,
        clock_mhz=2520, like="sm80", min_driver=12_000, threads=1536,
    ),
    Target(
        name="sm90", gpus="H100, H200", status=EXECUTED,
        executed_on="an H200, but for some grouped products; an H100, but for the last changes in clusters, fp32 and "
        "steps along K",
        dtypes=_HOPPER, multiprocessors=132, tflops=989.5, bandwidth=4800.0, shared_bytes=232_448,
        device="NVIDIA H200", clock_mhz=1980, min_driver=12_000, fast_accum=True,
    ),
    Target(
        name="sm100", gpus="B200, GB200", status=COMPILED, executed_on="nothing",
        dtypes=_HOPPER, multiprocessors=148, tflops=2250.0, bandwidth=8000.0, shared_bytes=232_448,
        like="sm80", min_driver=12_080,
    ),
    Target(
        name="sm120", gpus="RTX 50, RTX PRO 6000 Blackwell", status=COMPILED, executed_on="nothing",
        dtypes=_HOPPER, multiprocessors=170, tflops=209.5, bandwidth=1792.0, shared_bytes=101_376,
        like="sm80", min_driver=12_080, threads=1536,
    ),
    Target(
        name="gfx90a", gpus="MI210, MI250, MI250X", status=EMULATED,
        executed_on="a CPU interpreter; never an AMD GPU, nor under ROCm",
        dtypes=_CDNA, multiprocessors=104, tflops=181.0, bandwidth=1638.4, shared_bytes=65_536,
        clock_mhz=1700, warp_size=64, registers=131_072, granule=512, simds=4,
    ),
    Target(
        name="gfx942", gpus="MI300A, MI300X, MI325X", status=COMPILED, executed_on="nothing",
        dtypes=_CDNA, multiprocessors=304, tflops=1307.4, bandwidth=5300.0, shared_bytes=65_536,
        like="gfx90a", warp_size=64, registers=131_072, granule=512, simds=4,
    ),
    Target(
        name="gfx950", gpus="MI350X, MI355X", status=COMPILED, executed_on="nothing",
        dtypes=(*_CDNA, "fp8e4", "fp8e4-fp8e5", "fp8e5-fp8e4"),
        multiprocessors=256, tflops=2516.6, bandwidth=8000.0, shared_bytes=163_840,
        like="gfx90a", warp_size=64, registers=131_072, granule=512, simds=4,
    ),
    Target(
        name="gfx1100", gpus="RX 7900, PRO W7900", status=COMPILED, executed_on="nothing",
        dtypes=_CDNA, multiprocessors=96, tflops=122.8, bandwidth=960.0, shared_bytes=65_536,
        threads=1024, registers=98_304, granule=768, simds=2,
    ),
    Target(
        name="gfx1201", gpus="RX 9070, R9700", status=COMPILED, executed_on="nothing",
        dtypes=_CDNA, multiprocessors=64, tflops=194.6, bandwidth=640.0, shared_bytes=65_536,
        like="gfx1100", threads=1024, registers=98_304, granule=768, simds=2,
    ),
)  # fmt: skip

TARGETS = {row.name: row for row in _ROWS}


class Gpu(NamedTuple):
    """A product, by its data sheet.

    Attributes:
        arch: of its kernels.
        multiprocessors: their number. clock_mhz: the highest of them. memory_gbps: bandwidth of its memory.
        tflops: dense fp16 products with sums in fp32.
        l2_megabytes: of its L2 cache, in 2^20 bytes.
    """

    arch: str
    multiprocessors: int
    clock_mhz: int
    memory_gbps: int
    tflops: float
    l2_megabytes: int


# By the driver's name. Sources: NVIDIA's data sheets of A100, A10, A40, L4 and L40S; for multiprocessors, clocks and
# caches, and for the GeForce cards, whose tensor cores have half of their rate with fp32 sums, its white papers on the
# architectures of A100, GA102 and Ada.
GPUS = {
    "NVIDIA A100-SXM4-40GB": Gpu("sm80", 108, 1410, 1555, 312.0, 40),
    "NVIDIA A100-PCIE-40GB": Gpu("sm80", 108, 1410, 1555, 312.0, 40),
    "NVIDIA A100-SXM4-80GB": Gpu("sm80", 108, 1410, 2039, 312.0, 40),
    "NVIDIA A100 80GB PCIe": Gpu("sm80", 108, 1410, 1935, 312.0, 40),
    "NVIDIA A10": Gpu("sm86", 72, 1695, 600, 125.0, 6),
    "NVIDIA A40": Gpu("sm86", 84, 1740, 696, 149.7, 6),
    "NVIDIA GeForce RTX 3090": Gpu("sm86", 82, 1695, 936, 71.0, 6),
    "NVIDIA L4": Gpu("sm89", 58, 2040, 300, 121.0, 48),
    "NVIDIA L40S": Gpu("sm89", 142, 2520, 864, 362.0, 96),
    "NVIDIA GeForce RTX 4090": Gpu("sm89", 128, 2520, 1008, 165.2, 72),
    # AMD's data sheets of MI210, MI250 and MI250X. The latter two have two dies, each of which is a device.
    "AMD Instinct MI210": Gpu("gfx90a", 104, 1700, 1638, 181.0, 8),
    "AMD Instinct MI250": Gpu("gfx90a", 104, 1700, 1638, 181.0, 8),
    "AMD Instinct MI250X": Gpu("gfx90a", 110, 1700, 1638, 191.5, 8),
}


class HiddenFacts(NamedTuple):
    """Speeds of one multiprocessor that follow from no attribute of the driver.

    Attributes:
        tensor_tflops: dense fp16 products, if its tensor cores are slower than others' at that clock; 0 if not.
        sustained: large products at the device's power limit, over those of an H100 SXM.
    """

    tensor_tflops: float = 0.0
    sustained: float = 1.0


# By the driver's name. An H20 has the multiprocessors and clock of others, but 148 TFLOP/s (NVIDIA's data sheet;
# 989.5 of an H100 SXM); GPUs of 8.6 and 8.9 differ likewise from an A100. Cards have 350 W (H100 PCIe, 114
# multiprocessors) and 400 W (H100 NVL) for 700 W: the best products that github.com/mag-/gpu_benchmark lists have 499.5
# and 488.5 TFLOP/s for 821.2 of an H100 SXM. For an H200 NVL (600 W) there is only its data sheet: 835.5 for 989.5. Not
# here, because attributes tell all of them: GH200 (852.5 for 821.2 there; 4.0 or 4.9 TB/s by the clock of its memory),
# and slices of MIG, which have bus and L2 cache of their share (measured on an A100: 640 of 5120 bits for 10 of 80 GB;
# arcs-njit-edu.github.io/Docs/MIG/profile-comparison).
HIDDEN_FACTS = {
    "NVIDIA H20": HiddenFacts(tensor_tflops=148.0 / 78),
    "NVIDIA H20-3e": HiddenFacts(tensor_tflops=148.0 / 78),
    "NVIDIA H100 PCIe": HiddenFacts(sustained=499.5 / 821.2 * 132 / 114),
    "NVIDIA H100 NVL": HiddenFacts(sustained=488.5 / 821.2),
    "NVIDIA H200 NVL": HiddenFacts(sustained=835.5 / 989.5),
    **{name: HiddenFacts(tensor_tflops=gpu.tflops / gpu.multiprocessors) for name, gpu in GPUS.items()},
}

# Processors of machines that packs are linked for, by the machine number of their ELF files. Source: ELF-64 gABI.
HOSTS = {"x86_64": 62, "aarch64": 183}


def host(machine: str = "") -> str:
    """Return packs' spelling of machines with processor `machine`, or of machines like this one."""
    return f"{machine or platform.machine()}-linux-gnu"


def target(name: str) -> Target:
    """Return the architecture called `name`.

    Raises:
        SpecError: there is none; the message lists them.
    """
    if name not in TARGETS:
        raise SpecError(f"unknown arch {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def targets(names: Iterable[str]) -> list[Target]:
    """Return the architectures called `names`, each once, in that order; `ALL` stands for every one.

    Raises:
        SpecError: there is no such arch; the message lists them.
    """
    spelled = [each for name in names for each in (TARGETS if name == ALL else (name,))]
    return [target(name) for name in dict.fromkeys(spelled)]


def ways_to_run(pack_arch: str, device_arch: str) -> str | None:
    """Return how kernels for `pack_arch` run on a device: "exact", "compatible" (same major), "ptx", or not (None).

    `device_arch` is spelled like a target name ("sm87", "gfx908") but need not be one.
    Source: CUDA programming guide, binary and PTX compatibility.
    """
    if pack_arch == device_arch:
        return "exact"
    pack = TARGETS[pack_arch]
    built = pack.capability
    if built is None or not device_arch.startswith("sm") or not device_arch[2:].isdigit():
        return None
    device = divmod(int(device_arch[2:]), 10)
    if not pack.specific and device[0] == built[0] and device[1] >= built[1]:
        return "compatible"
    if pack.ptx_version is not None and device > built:
        return "ptx"
    return None


def ranked(names: Iterable[str], device_arch: str) -> list[tuple[str, str]]:
    """Return those of `names` whose kernels run on a device of `device_arch`, and how, the best first.

    First is the exact arch, then the newest of the same major version, then the newest whose PTX the driver compiles.
    """
    found = [(name, way) for name in names if (way := ways_to_run(name, device_arch)) is not None]
    newest = sorted(found, key=lambda pair: TARGETS[pair[0]].capability or (), reverse=True)
    return sorted(newest, key=lambda pair: _WAYS.index(pair[1]))
