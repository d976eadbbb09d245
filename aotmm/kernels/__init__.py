"""Kernel sources, one module per family; `hopper` has three.

A family module, `aotmm.kernels.NAME` or a user's own, has the jit function and `specialise(variant)`, which returns how
the compiler must specialise it. The assumptions of a specialisation become the kernel's guards (`aotmm.build.compile`).
A user's own module also has `FAMILY`, the limits of its entries in config sets: docs/extending.md.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from aotmm.pack.schema import Config, Guard
from aotmm.problem import BLOCK_SCALE_K, EPILOGUES, INPUTS, PRODUCT_QUANTITIES
from aotmm.target import TARGETS, Target

VECTOR_BYTES = 16  # of the widest access to global memory
WARP = 32  # threads, on NVIDIA GPUs
# Partial sums are (split, M, N) in whole tiles, the narrowest of which has 16 columns, in memory that starts at a
# multiple of 256 bytes; of int8 they are int32.
WORKSPACE_TYPES = {"workspace_ptr": "*fp32", "workspace_stride_m": "i64", "workspace_stride_z": "i64", "split": "i32"}
WORKSPACE_MULTIPLES = {"workspace_ptr": VECTOR_BYTES, "workspace_stride_m": 16, "workspace_stride_z": 16}
WARPGROUP = 4  # warps that issue one wgmma together
# Source: PTX ISA, "wgmma.mma_async" and "Matrix descriptor". The widest swizzle permutes a line; a line is a row of
# shared memory without bank conflicts.
MOST_COLUMNS = 256
LINE_BYTES = 128
GROUP_LINES = 8  # of a period of the swizzle
# Hopper's kernels multiply fp32 as the sum of so many bf16 numbers (`hopper.mma.multiply_split`). Planes of Y are in
# buffers of shared memory in turn, one of which is multiplied while the other is filled.
PLANES, PLANE_BUFFERS = 3, 2
# Of a cluster that every GPU with clusters can launch. Source: CUDA programming guide, "Thread Block Clusters".
MOST_BLOCKS = 8
_SUFFIXES = {"partial": "_split", "grouped_m": "_grouped_m", "grouped_k": "_grouped_k"}  # of names, by role
# Block scales of B that a kernel takes: of any number of columns, which it learns at run time, or of BLOCK_SCALE_K.
BLOCK_SCALES = ("any", f"{BLOCK_SCALE_K}x{BLOCK_SCALE_K}")
BLOCK_SCALED = Guard("block_scale_a_ptr", "at_least", 1)  # of kernels with block scales
BLOCK_SCALE_TYPES = {
    **dict.fromkeys(("block_scale_a_ptr", "block_scale_b_ptr"), "*fp32"),
    **dict.fromkeys(("stride_block_az", "stride_block_am", "stride_block_ak"), "i64"),
    **dict.fromkeys(("stride_block_bz", "stride_block_bk", "stride_block_bn"), "i64"),
    "block_columns": "i32",
}
WARP_SPECIALISED = ("cooperative", "pingpong", "swapped")  # families whose warps have roles

# Passes of Triton (`Specialisation.unneeded`) for tensor descriptors, warps with roles, nested or unrolled loops,
# reductions and 3xTF32, of which kernels of plain Triton here have none.
NOT_FOR_PLAIN_KERNELS = (
    "add_rewrite_tensor_descriptor_to_pointer", "add_tma_lowering", "add_optimize_descriptor_encoding",
    "add_proxy_fence_insertion", "add_hoist_mbarrier_lifecycle", "add_hopper_warpspec", "add_allocate_warp_groups",
    "add_warp_specialize_to_llvm", "add_fuse_nested_loops", "add_loop_unroll", "add_combine_tensor_select_and_if",
    "add_optimize_thread_locality", "add_reorder_broadcast", "add_combine", "add_f32_dot_tc", "add_symbol_dce",
    "add_nvvm_to_llvm",
)  # fmt: skip

_POWERS = tuple(2**i for i in range(4, 10))
NUMBERS: dict[str, tuple[int, ...]] = {
    "block_m": _POWERS,
    "block_n": _POWERS,
    "block_k": _POWERS,
    "num_stages": tuple(range(9)),
    "num_warps": (1, 2, 4, 8, 16),
    "waves_per_eu": tuple(range(11)),
    "matrix_instr_nonkdim": (0, 16, 32),
    "kpack": (1, 2),
    "cluster_m": (1,),
    "cluster_n": (1,),
    "cluster_k": (1,),
    "serial_k": (1,),
}


class Family(NamedTuple):
    """Limits of the entries of one kernel family.

    Attributes:
        numbers: the values that each number may have.
        archs: archs that it can be built for; an entry names them unless these are all.
        dtypes: input types that it multiplies; an entry names its own unless these are all.
        warpgroups: the side of the tile of which every four warps take 64 rows or a multiple, "" if no side is cut so.
        width: the other side, if it need not be a power of two.
        roles: possible roles of its kernels.
        epilogues: possible epilogues of its kernels.
        any_rows: the operands whose rows may lie anywhere if an entry is not `aligned`; "" if it has to be.
        sums: possible numbers of sums of a thread, if they are limited.
    """

    numbers: dict[str, tuple[int, ...]] = NUMBERS
    archs: tuple[str, ...] = tuple(TARGETS)
    dtypes: tuple[str, ...] = INPUTS
    warpgroups: str = ""
    width: str = ""
    roles: tuple[str, ...] = ("product", "partial")
    epilogues: tuple[str, ...] = EPILOGUES
    any_rows: str = "ABC"
    sums: range | None = None


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

    `layout` "any" makes the kernel generic: it has no guard. The others guard unit strides and, if `aligned`, 16-byte
    rows; if not, those of operands that are not among the family's `any_rows`. `role` is one of `problem.ROLES`.
    `block_scales` is one of BLOCK_SCALES, or "" for a kernel without.
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
    block_scales: str = ""

    @property
    def first_warps(self) -> int:
        """Return the warps that the kernel starts with; a warp-specialised kernel adds others to its first consumer."""
        return WARPGROUP if self.family in WARP_SPECIALISED else self.config.num_warps

    @property
    def num_ctas(self) -> int:
        """Return the blocks of a cluster."""
        return self.config.num_ctas

    @property
    def config_name(self) -> str:
        """Return the config's name, which with types, epilogue and block scales determines the kernel's time."""
        access = "_any" if self.layout == "any" else "" if self.aligned else "_unaligned"
        return f"{self.family}_{self.config}{access}{_SUFFIXES.get(self.role, '')}"

    @property
    def name(self) -> str:
        """Return a label, unique among the variants of one arch."""
        inputs = self.dtype_a if self.dtype_a == self.dtype_b else f"{self.dtype_a}_{self.dtype_b}"
        name = f"{self.family}_{inputs}_{self.dtype_c}_{self.layout}_{self.config}_{self.epilogue}"
        access = "" if self.aligned or self.layout == "any" else "_unaligned"
        name += f"_blocks_{self.block_scales}" if self.block_scales else ""
        return name + access + ("_fast" if self.fast_accum else "") + _SUFFIXES.get(self.role, "")


def block_guards(variant: Variant) -> tuple[Guard, ...]:
    """Return the guards on block scales, which products of fp8 alone may have."""
    if not variant.dtype_a.startswith("fp8"):
        return ()
    if not variant.block_scales:
        return (Guard("block_scale_a_ptr", "equals", 0),)
    narrow = variant.block_scales == "any"
    return (BLOCK_SCALED,) if narrow else (BLOCK_SCALED, Guard("block_columns", "equals", BLOCK_SCALE_K))


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A batch of matrices, or one, in global memory that the kernel reads or writes in boxes, through a tensor map.

    Attributes:
        value: the quantity of its address ("a_ptr").
        dtype: element type (`problem.DTYPES`).
        sizes: the quantities of its sizes, the matrices first (unless there is but one), the contiguous dimension last.
        strides: the quantities of its strides, in elements, in the same order; the last one is 1. If that of the
            matrices is 0, there is one matrix, number 0.
        box: elements of one transfer within a matrix, in the same order.
        outer: the box's outer size, if it differs from the compiler's.
        fits: as of `schema.TensorMap`.
        guards: conditions without which a launch leaves the map zero, because the kernel does not use it then.
        mapped: whether the arch has tensor maps; else the kernel gets the address, sizes and strides themselves.
    """

    value: str
    dtype: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[int, int]
    outer: int = 0
    fits: bool = False
    guards: tuple[Guard, ...] = ()
    mapped: bool = True

    @property
    def quantities(self) -> tuple[str, str, str, str, str]:
        """Return those of the tensor map, in the order of `schema.TensorMap`."""
        *batch, outer, inner = self.sizes
        *between, stride, _ = self.strides
        return inner, outer, (batch or ["zero"])[0], stride, (between or ["zero"])[0]


@dataclass(frozen=True, slots=True)
class Specialisation:
    """Specialisation of a family's function for a variant; every key is an argument of the function.

    Attributes:
        function: the Triton or Gluon jit function.
        types: run-time arguments and their Triton types.
        constants: compile-time arguments. A constant that is a quantity is a guard.
        multiples: by run-time argument: a divisor of its value (bytes for pointers).
        guards: conditions beside those, e.g. that offsets fit 32 bits.
        vector_bytes: widest global access that all this allows.
        promoted, rounded: of the kernel's order (`schema.Order`).
        descriptors: tensor descriptor arguments, which a launch fills with tensor maps by value.
        persistent: blocks take tile after tile, so that a grid need not have one for each.
        pdl: waits for the previous kernel (griddepcontrol) before its first access to memory, so that a launch may let
            it start early.
        unneeded: passes of Triton for NVIDIA GPUs that change nothing in this kernel, by the functions that add them.
            Tests compare images with and without them.
        quantities: the values that a launch gives it, in their order; arguments and guards are called as these.
        buffers: pointers to operands of less than 2 GiB, which AMD's compiler reads by buffer instructions: one address
            and 32-bit offsets, and no branch for a mask. `guards` has to have the reaches.
    """

    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    multiples: dict[str, int] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    vector_bytes: int = 0
    promoted: int = 0
    rounded: str = ""
    descriptors: dict[str, Descriptor] = field(default_factory=dict)
    persistent: bool = False
    pdl: bool = False
    unneeded: tuple[str, ...] = ()
    quantities: tuple[str, ...] = PRODUCT_QUANTITIES
    buffers: tuple[str, ...] = ()
