"""The time model of the launcher (`templates/launcher.h.jinja`) as far as it depends on kernels: constants and inputs.

The formula's constants come from a kernel's tile and the data sheet of its architecture. A tuning table has factors of
them, and a network that corrects the formula: two layers. The inputs of the first, hidden one describe the kernel, the
problem and the plan.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

from aotmm.pack.schema import Kernel
from aotmm.problem import DTYPES, LONGEST_K, USUAL_SPLIT
from aotmm.target import Target

HIDDEN, SECOND = 64, 16  # nodes of the network's layers (docs/experiments/tuning.md)
FAMILIES = ("cooperative", "pingpong", "swapped")  # those that the network tells from all others
# Inputs of the network, in the order of its rows. The launcher computes those of problems and plans.
KERNEL_INPUTS = (
    "log2 block_m", "log2 block_n", "lines of K", "log2 ring", "warpgroups", *FAMILIES,
    "clustered", "log2 cluster_m", "log2 cluster_n", "partial", "1 byte",
    "fast_accum",
)  # fmt: skip
PROBLEM_INPUTS = (
    "log2 M", "log2 N", "log2 K", "log2 bytes", "A by columns", "B by columns", "lines_a", "lines_b", "sectors_a",
    "sectors_b", "log2 batch",
)  # fmt: skip
PLAN_INPUTS = (
    "log2 time", "multiply", "take", "read", "load", "fixed", "reread", "wave up to 1", "wave up to 2", "last wave",
    "1 / waves", "log2 steps", "past K", "past K / steps", "past K, across K", "rows", "columns", "last rows",
    "last columns", "1 / down", "1 / across", "one wave", "half a wave", "odd", "sums", "log2 split", "uneven",
    "clustered lines_a", "clustered lines_b",
)  # fmt: skip
PDL_INPUTS = ("pdl", "half a wave", "the other half", "log2 time", "log2 time, the other half", "wave up to 1")
INPUTS = (*KERNEL_INPUTS, *PROBLEM_INPUTS, *PLAN_INPUTS, *PDL_INPUTS)

# Shares of a data sheet's figures that kernels reach, and times that it does not have. Measured on an H200.
_BASE_NS = 2500.0  # of a launch and its first loads
_TILE_NS = 600.0  # from the last product of a tile to the first of the next
_READ = 0.9  # of the memory's bandwidth
_TAKE_MACS = 64.0  # fp16 multiply-adds in the time in which a multiprocessor takes in one element of 2 bytes
# fp16 elements that a compute unit of AMD's takes in per clock. Source: CDNA 2 white paper, 64 bytes. Never measured.
_TAKE_ELEMENTS = 32.0
_LOAD = 0.6  # of what all multiprocessors could take in, the L2 cache gives
# Of a copy, and the time of its bytes over that of memory's, since L2 keeps a part. Fitted to 878 products on an H100.
_COPY_NS, _COPIED = 1250.0, 0.42
_REDUCE_NS = 1000.0
# Cost of a multiply-add on Hopper without wgmma: of tf32 over that with it. Measured on an H100: up to 3.
_TF32_PLAIN = 3.0
# Cost of one with block scales in `swapped`, where each column of a thread's sums has its own. Fitted on an H100.
_SCALED_COLUMNS = 1.4
# Cost of one in full precision over the data sheet's: of the plain family, and of `fma`, where it grows with what
# threads read for each. Fitted on an H100 (docs/experiments/fp32.md), and taken for other GPUs of NVIDIA's.
_FP32_PLAIN, _FMA_READS = 3.0, 3.5
# Cost of one of fp32 as six of bf16, with the splitting: 95 TFLOP/s on an H200, where fp16 has 700.
_SPLIT = 7.4
# Blocks that keep a multiprocessor busy: of `fma`, likewise; and of `tile` on NVIDIA GPUs without wgmma, whose warps
# wait for each other in every step. Fitted to 47 problems on 104 multiprocessors of an H100, a proxy for an A100
# (docs/experiments/ampere.md), as the time of a step beside its products and what an element takes in. `multistage`
# and `short` have the constants of `tile`: none were fitted to them, and what they gain is not in these.
_BUSY = {"fma": 3.5, "tile": 1.5, "multistage": 1.5, "short": 1.5}
_STEP_NS, _STEP_MHZ = 40.0, 1980  # at this clock
_MMA_TAKE_MACS = 32.0  # as _TAKE_MACS: a multiprocessor takes in 64 bytes per cycle, and multiplies half as fast
_REGISTERS_BESIDE = 96  # of a thread, and one for each sum: about what the compiler takes
_REGISTERS, _RESERVED_BYTES = 65_536, 1024  # of a multiprocessor of NVIDIA's, and of shared memory for each block
_REDUCED = 0.7  # time of a byte of partial sums that is read again, over that of a byte of memory
SUMS = 1.4  # likewise of one that is written, and mostly kept in L2
USABLE = 10, 11  # of the multiprocessors, by clusters of more than two blocks: of 132 on an H100 and an H200 120
SPLIT_A, SPLIT_B = 0.9, 1.2  # what loads of A and of B take longer if all their lines begin within a cache line
LEAST_STEPS, MOST_WAVES = 2, 2  # along K, of a slice of it; of work tiles that are slices
# Plans of least time by the formula that the network sees, so many at once. It sees no more of them if its best takes
# less than this part of the formula's time for the next one (docs/experiments/selection.md).
SHORTLIST, AT_ONCE, LEAST_CORRECTION = 14, 2, 0.85
LONG_STEPS = 16  # likewise, if there are more than USUAL_SPLIT slices: a reduce has to be short against them
LINE_BYTES, SECTOR_BYTES = 128, 32  # of caches, and the part of a line that memory moves
# An operand that begins within a cache line may be copied, if it has at most so many bytes, so that it stays in the L2
# cache, and the copy takes at most one in LINE_PART of the product's time. It is copied if one in LINE_GAIN is gained.
LINE_COPY, LINE_PART, LINE_GAIN = 8 << 20, 8, 20
SHIFTED_K = 1024  # the least K of products whose steps may begin early, which may cost a step


class Device(Protocol):
    """The facts of a device that constants depend on, 0 for unknown: a tuning table has them."""

    @property
    def multiprocessors(self) -> int:
        """Return their number."""

    @property
    def clock_mhz(self) -> int:
        """Return the highest clock of the multiprocessors."""

    @property
    def memory_gbps(self) -> int:
        """Return 10^9 bytes per second."""


class Nominal(NamedTuple):
    """The `Device` that estimates are for; 0 for what they are not scaled by."""

    device: str
    multiprocessors: int
    clock_mhz: int
    memory_gbps: int


def nominal(target: Target) -> Nominal:
    """Return the device that estimates for an arch are for, without a name."""
    return Nominal("", target.multiprocessors, target.clock_mhz, int(target.bandwidth) if target.clock_mhz else 0)


class Constants(NamedTuple):
    """Constants of a kernel's time, in ns: `aotmm_constants` of core.h.

    Attributes:
        base_ns, ns_per_k_step, ns_per_tile: of a launch, of a step along K, of a tile's beginning and end.
        ns_per_byte: of memory. ns_per_taken_byte: taken in by one multiprocessor. ns_per_loaded_byte: by all together.
    """

    base_ns: float
    ns_per_k_step: float
    ns_per_tile: float
    ns_per_byte: float
    ns_per_taken_byte: float
    ns_per_loaded_byte: float


# Those that a tuning table has factors of.
FITTED = ("base_ns", "ns_per_tile", "ns_per_k_step", "ns_per_taken_byte", "ns_per_loaded_byte")

Weight = Annotated[float, (-1e6, 1e6)]
Node = range(HIDDEN, HIDDEN + 1)
SecondNode = range(SECOND, SECOND + 1)
MOST_FACTOR = 1e3
Factors = Annotated[tuple[Annotated[float, (1 / MOST_FACTOR, MOST_FACTOR)], ...], range(len(FITTED), len(FITTED) + 1)]


@dataclass(frozen=True, slots=True)
class Network:
    """The correction of the formula by a tuning table: log(time / formula) of a plan.

    Attributes:
        inputs: weights of each of `INPUTS` for each hidden node.
        bias: of the hidden nodes, whose values count from 0 on.
        second: weights of each hidden node for each node of the second layer, whose values count likewise.
        second_bias: of those.
        outputs: weights of the second layer's nodes.
        shift: added to their sum.
        factors: of the constants `FITTED`, for configs without a model.
    """

    inputs: Annotated[tuple[Annotated[tuple[Weight, ...], Node], ...], range(len(INPUTS), len(INPUTS) + 1)]
    bias: Annotated[tuple[Weight, ...], Node]
    second: Annotated[tuple[Annotated[tuple[Weight, ...], SecondNode], ...], Node]
    second_bias: Annotated[tuple[Weight, ...], SecondNode]
    outputs: Annotated[tuple[Weight, ...], SecondNode]
    shift: Weight
    factors: Factors

    @property
    def parts(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Return the weights of problem, plan and pdl inputs and of hidden nodes, as `aotmm_network` has them."""
        rows, of = iter(self.inputs[len(KERNEL_INPUTS) :]), (PROBLEM_INPUTS, PLAN_INPUTS, PDL_INPUTS)
        return (*(tuple(itertools.islice(rows, len(names))) for names in of), self.second)

    def hidden(self, kernel: Kernel) -> tuple[float, ...]:
        """Return what a kernel's inputs and the bias add to the hidden nodes."""
        values = kernel_inputs(kernel)
        return tuple(
            bias + sum(value * row[node] for value, row in zip(values, self.inputs, strict=False))
            for node, bias in enumerate(self.bias)
        )


def fitted(c: Constants, factors: tuple[float, ...]) -> Constants:
    """Return constants of the data sheet with a table's factors of `FITTED`."""
    return c._replace(**{name: getattr(c, name) * factor for name, factor in zip(FITTED, factors, strict=True)})


def constants(kernel: Kernel, target: Target, device: Device | None = None) -> Constants:
    """Return the constants of a kernel on a device, by default the nominal one of `target`."""
    clock = device.clock_mhz / target.clock_mhz if device and device.clock_mhz and target.clock_mhz else 1.0
    byte = 1 / (_READ * (device.memory_gbps if device and device.memory_gbps else target.bandwidth))
    if kernel.role == "copy":  # one side is not aligned; without a contiguous side each element is a transfer
        return Constants(_COPY_NS, 0.0, 0.0, byte * (2 * _COPIED if kernel.guards else 8), 0.0, 0.0)
    if kernel.role == "reduce":
        return Constants(_REDUCE_NS, 0.0, 0.0, byte * _REDUCED, 0.0, 0.0)
    config = kernel.config
    # fp16 multiply-adds per ns of a multiprocessor
    rate = target.tflops * 1000 / 2 / target.multiprocessors * clock
    macs = config.block_m * config.block_n * config.block_k / kernel.num_ctas
    shared = max(beside(kernel, target), busy(kernel, target))  # a tile has that part of a multiprocessor
    step, take = macs * _mac_cost(kernel, target) / rate, _TAKE_MACS
    if _by_mma(kernel, target):
        step, take = step + _STEP_NS * _STEP_MHZ / ((target.clock_mhz or _STEP_MHZ) * clock), _MMA_TAKE_MACS
    elif target.backend == "hip" and target.clock_mhz:
        take = 1000 * rate / (clock * target.clock_mhz) / _TAKE_ELEMENTS
    taken = shared * take / 2 / rate * (16 // kernel.vector_bytes)  # narrow loads are slower
    loaded = taken / (shared * _LOAD * (device.multiprocessors if device else target.multiprocessors))
    return Constants(_BASE_NS, shared * step, _TILE_NS, byte, taken, loaded)


def _by_mma(kernel: Kernel, target: Target) -> bool:
    """Return whether it multiplies by mma.sync, or is of plain Triton, for NVIDIA GPUs without wgmma."""
    return kernel.family in ("tile", "multistage", "short") and target.backend == "cuda" and not target.fast_accum


def beside(kernel: Kernel, target: Target) -> int:
    """Return the tiles that share a multiprocessor of an arch.

    It is about `schema.occupancy`, but the same for kernels that differ in their epilogue alone.
    """
    if kernel.family != "fma" and not _by_mma(kernel, target):
        return 1
    config, threads = kernel.config, 32 * kernel.config.num_warps
    stages = config.num_stages - (kernel.family == "tile")  # the last one's copies wait until there is room
    ring = stages * config.block_k * (config.block_m + config.block_n) * DTYPES[kernel.dtype_a].bytes
    registers = config.block_m * config.block_n + threads * _REGISTERS_BESIDE
    return max(1, min(_REGISTERS // registers, (target.shared_bytes + _RESERVED_BYTES) // (ring + _RESERVED_BYTES)))


def busy(kernel: Kernel, target: Target) -> float:
    """Return the tiles on a multiprocessor that take no longer than one alone: it waits for its own loads."""
    return _BUSY[kernel.family] if kernel.family == "fma" or _by_mma(kernel, target) else 1.0


def _mac_cost(kernel: Kernel, target: Target) -> float:
    """Return the cost of a multiply-add over that of fp16; precise fp8 sums leave the tensor core in between."""
    plain, config = kernel.family not in FAMILIES, kernel.config
    precise = kernel.dtype_a.startswith("fp8") and not kernel.fast_accum and plain
    cost = (DTYPES[kernel.dtype_a].mac_cost + precise) / DTYPES["fp16"].mac_cost
    if kernel.family == "fma":
        sums = config.block_m * config.block_n / (32 * config.num_warps)  # of a thread: about a square
        return cost * (1 + _FMA_READS / math.sqrt(sums))
    if kernel.dtype_a == "fp32" and not plain:
        return _SPLIT
    if kernel.dtype_a == "fp32" and target.backend == "cuda":
        return cost * _FP32_PLAIN
    if kernel.family == "swapped" and kernel.block_scaled:
        return cost * _SCALED_COLUMNS
    hopper = target.fast_accum  # no other arch has it
    return cost * (_TF32_PLAIN if plain and hopper and kernel.dtype_a == "tf32" else 1.0)


def most_slices(K: int, block_k: int) -> int:
    """Return the largest number of slices that K may have in steps of block_k."""
    steps = -(-K // block_k)
    usual = min(USUAL_SPLIT, steps // LEAST_STEPS)
    return max(usual, steps // LONG_STEPS) if K < LONGEST_K else usual


def concurrent_tiles(multiprocessors: int, num_ctas: int, beside: int = 1) -> int:
    """Return the tiles that a device computes at once, `beside` on each multiprocessor or cluster; at least 1."""
    usable = multiprocessors * USABLE[0] // USABLE[1] if num_ctas > 2 else multiprocessors  # noqa: PLR2004
    return max(1, usable // num_ctas) * beside


def kernel_inputs(kernel: Kernel) -> tuple[float, ...]:
    """Return the values of `KERNEL_INPUTS` for a product or partial."""
    config, line = kernel.config, kernel.config.block_k * DTYPES[kernel.dtype_a].bytes
    ring = config.num_stages * line * (config.block_m / config.cluster_m + config.block_n / config.cluster_n)
    ring /= config.cluster_k
    return (
        math.log2(config.block_m),
        math.log2(config.block_n),
        line / LINE_BYTES,
        math.log2(ring),
        config.num_warps / 4,
        *(float(kernel.family == name) for name in FAMILIES),
        float(kernel.num_ctas > 1),
        math.log2(config.cluster_m),
        math.log2(config.cluster_n),
        float(kernel.role == "partial"),
        float(DTYPES[kernel.dtype_a].bytes == 1),
        float(kernel.fast_accum),
    )
