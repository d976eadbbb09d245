"""Kernel sources, one module per family; `hopper` has four.

A family module, `aotmm.kernels.NAME` or one of a user's own, has the jit function and `specialise(variant)`, which says
how the compiler is to specialise it. What a specialisation assumes becomes the kernel's guards
(`aotmm.build.compile`). A user's own module also has `FAMILY`, what config sets may ask of it: docs/extending.md.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from aotmm.pack.schema import Config, Guard
from aotmm.problem import EPILOGUES, INPUTS
from aotmm.target import TARGETS, Target

VECTOR_BYTES = 16  # of the widest access to global memory
# Partial sums are (split, M, N) in whole tiles, the narrowest of which has 16 columns, in memory that starts at a
# multiple of 256 bytes.
WORKSPACE_TYPES = {"workspace_ptr": "*fp32", "workspace_stride_m": "i64", "workspace_stride_z": "i64", "split": "i32"}
WORKSPACE_MULTIPLES = {"workspace_ptr": VECTOR_BYTES, "workspace_stride_m": 16, "workspace_stride_z": 16}
WARPGROUP = 4  # warps that issue one wgmma together
# Source: PTX ISA, "wgmma.mma_async" and "Matrix descriptor". Lines are what the widest swizzle permutes, and rows of
# shared memory without bank conflicts.
MOST_COLUMNS = 256
LINE_BYTES = 128
WARP_SPECIALISED = ("clustered", "cooperative", "pingpong", "swapped")  # families whose warps have parts to play
CLUSTERED = {"clustered": 2}  # families whose blocks work in clusters, of that many

_POWERS = tuple(2**i for i in range(4, 10))
NUMBERS: dict[str, tuple[int, ...]] = {
    "block_m": _POWERS,
    "block_n": _POWERS,
    "block_k": _POWERS,
    "group_m": tuple(range(1, 17)),  # more could overflow the tile's number at N near 2^31
    "num_stages": tuple(range(9)),
    "num_warps": (1, 2, 4, 8, 16),
    "waves_per_eu": tuple(range(11)),
    "matrix_instr_nonkdim": (0, 16, 32),
    "kpack": (1, 2),
}


class Family(NamedTuple):
    """What the entries of one kernel family may say.

    Attributes:
        numbers: the values that each number may have.
        archs: what it can be built for; an entry names them unless these are all.
        dtypes: input types that it multiplies; an entry names its own unless these are all.
        warpgroups: the side of the tile of which every four warps take 64 rows or a multiple, "" if no side is cut so.
        width: the other side, if it need not be a power of two.
        roles: what its kernels can be for.
        epilogues: what its kernels can do to their sums.
        num_ctas: blocks of a cluster, which share a tile.
    """

    numbers: dict[str, tuple[int, ...]] = NUMBERS
    archs: tuple[str, ...] = tuple(TARGETS)
    dtypes: tuple[str, ...] = INPUTS
    warpgroups: str = ""
    width: str = ""
    roles: tuple[str, ...] = ("product", "partial")
    epilogues: tuple[str, ...] = EPILOGUES
    num_ctas: int = 1


def module_name(family: str) -> str:
    """Return the name of the module of `family`: one of this package or, with a dot in its name, a user's own."""
    if "." in family:
        return family
    return f"aotmm.kernels.{'hopper' if family in WARP_SPECIALISED else family}"


def module_of(family: str) -> ModuleType:
    """Import the module of `family`. Raises ImportError."""
    return importlib.import_module(module_name(family))


@dataclass(frozen=True, slots=True)
class Variant:
    """The unit of building: one kernel of one family for one arch.

    `layout` "any" makes no guard at all; the others guard unit strides and, if `aligned`, 16-byte rows. `role` is
    what the kernel is for (`problem.ROLES`).
    """

    target: Target
    family: str
    dtype_a: str
    dtype_b: str
    dtype_c: str
    layout: str
    aligned: bool
    epilogue: str
    fast_accum: bool
    config: Config
    source: str
    role: str = "product"

    @property
    def first_warps(self) -> int:
        """Warps that the kernel starts with: one that is warp-specialised adds others to its first consumer itself."""
        return WARPGROUP if self.family in WARP_SPECIALISED else self.config.num_warps

    @property
    def num_ctas(self) -> int:
        """Blocks of a cluster."""
        return CLUSTERED.get(self.family, 1)

    @property
    def config_name(self) -> str:
        """What the time of the kernel depends on, apart from types and epilogue."""
        access = "_any" if self.layout == "any" else "" if self.aligned else "_unaligned"
        return f"{self.family}_{self.config}{access}" + ("_split" if self.role == "partial" else "")

    @property
    def name(self) -> str:
        """A label, unique among the variants of one arch."""
        inputs = self.dtype_a if self.dtype_a == self.dtype_b else f"{self.dtype_a}_{self.dtype_b}"
        name = f"{self.family}_{inputs}_{self.dtype_c}_{self.layout}_{self.config}_{self.epilogue}"
        access = "" if self.aligned or self.layout == "any" else "_unaligned"
        return name + access + ("_fast" if self.fast_accum else "") + ("_split" if self.role == "partial" else "")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A matrix in global memory that the kernel reads or writes in boxes, through a tensor map.

    Attributes:
        value: the quantity that is its address ("a_ptr").
        dtype: element type (`problem.DTYPES`).
        sizes: the quantities that are its sizes, the contiguous dimension last.
        strides: the quantities that are its strides, in elements, in the same order; the last one is 1.
        box: what the kernel transfers at a time, in the same order.
        cluster: how the blocks of a cluster divide a box (Gluon's `cga_layout`); empty without a cluster.
        outer: the box's outer size, if it is not the one that the compiler is told.
    """

    value: str
    dtype: str
    sizes: tuple[str, str]
    strides: tuple[str, str]
    box: tuple[int, int]
    cluster: tuple[tuple[int, int], ...] = ()
    outer: int = 0


@dataclass(frozen=True, slots=True)
class Specialisation:
    """How a family's function is compiled for a variant; every key is an argument of the function.

    Attributes:
        function: the Triton or Gluon jit function.
        types: run-time arguments and their Triton types.
        constants: compile-time arguments. A constant whose name is in `problem.VALUES` is a guard.
        multiples: what the value of a run-time argument is a multiple of (bytes for pointers).
        guards: conditions beside those, e.g. that offsets fit 32 bits.
        vector_bytes: widest global access that all this allows.
        descriptors: tensor descriptor arguments, which a launch fills with tensor maps by value.
        persistent: blocks take tile after tile, so that a grid need not have one for each.
        pdl: waits for the kernel before it (griddepcontrol) where it first touches memory, so that a launch
            may let it start early.
        fenced: has every fence between what threads write to shared memory and what TMA or wgmma read there, so that
            the compiler need not look for missing ones.
        synchronised: likewise, has every barrier between threads that share memory.
    """

    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    multiples: dict[str, int] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    vector_bytes: int = 0
    descriptors: dict[str, Descriptor] = field(default_factory=dict)
    persistent: bool = False
    pdl: bool = False
    fenced: bool = False
    synchronised: bool = False
