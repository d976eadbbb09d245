"""The vocabulary of one product C = activation(scale_a * scale_b * (A @ B) + bias): types and named quantities.

Everything that the generated C and Python must agree on by number is listed here once: positions in the tuples are
those numbers. Packs and C callers keep them, so a position that changes raises `ABI` and the format of packs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from aotmm.errors import SpecError


class DType(NamedTuple):
    """One element type.

    Attributes:
        name: ours.
        bytes: size of one element.
        storage: name of the type with the same bytes in memory (tf32 is stored as fp32).
        triton: Triton's spelling.
        torch: torch's spelling.
        output: the output type by default.
        mac_cost: relative time of one multiply-add, 8 for fp16, to choose between kernels that both fit (tf32 or fp32).
            Source: A100 and H100 data sheets, dense rates.
    """

    name: str
    bytes: int
    storage: str
    triton: str
    torch: str
    output: str
    mac_cost: int


ABI = 18  # of the launcher's C interface: raised when `templates/launcher.h.jinja` changes for callers
DEVICE_NAME_BYTES = 108  # of a device's name in the C interface, with the 0 behind it

DTYPES = {
    row.name: row
    for row in (
        DType("fp16", 2, "fp16", "fp16", "float16", "fp16", 8),
        DType("bf16", 2, "bf16", "bf16", "bfloat16", "bf16", 8),
        DType("fp32", 4, "fp32", "fp32", "float32", "fp32", 128),
        DType("tf32", 4, "fp32", "fp32", "float32", "fp32", 16),
        DType("fp8e5", 1, "fp8e5", "fp8e5", "float8_e5m2", "fp16", 8),
        DType("fp8e4", 1, "fp8e4", "fp8e4nv", "float8_e4m3fn", "fp16", 8),
        DType("int8", 1, "int8", "i8", "int8", "int32", 4),
        DType("int32", 4, "int32", "i32", "int32", "int32", 128),
    )
}
DTYPE_CODES = tuple(DTYPES)

# Input types: two element types joined by "-", or one for both operands.
INPUTS = ("fp16", "bf16", "fp32", "tf32", "fp8e5", "fp8e4", "fp8e4-fp8e5", "fp8e5-fp8e4", "int8")
OUTPUTS = ("fp16", "bf16", "fp32")
LAYOUTS = ("nn", "nt", "tn", "tt")

# Operations of a kernel on its sums before it stores them: scales only; a bias vector too; a matrix and the piecewise
# linear activations too; all. Each epilogue can replace those before it.
EPILOGUES = ("none", "bias", "bias_relu", "full")
# More activations, which kernels compute by these formulas: docs/extending.md. Names are those of torch.nn.functional,
# which gives the gradient.
FORMULAS: dict[str, Callable[[float], float]] = {}
# The activations, by the plainest epilogue that has them. `aotmm.kernels.epilogue.activate` has the formulas of these.
ACTIVATIONS = {
    "none": "none",
    "relu": "bias_relu",
    "leaky_relu": "bias_relu",
    "gelu": "full",
    "gelu_tanh": "full",
    "silu": "full",
    "sigmoid": "full",
    "tanh": "full",
} | dict.fromkeys(FORMULAS, "full")
LEAKY_SLOPE = 0.01  # torch's default

# Roles of kernels: a product writes C; a partial writes the sums of slices of K, which a reduce adds up in
# order before the epilogue; a copy brings an operand to an aligned place, or C from one. Of grouped products, a
# grouped_m multiplies groups of rows of A, each by its own B; a grouped_k sums groups of K, each to its own C.
ROLES = ("product", "partial", "reduce", "copy", "grouped_m", "grouped_k")
# The dimension of a product that is in groups of any sizes, by the role of the kernels for it. `batch` is their number.
GROUPED = {"none": "product", "M": "grouped_m", "K": "grouped_k"}

# Quantities: the values of a kernel's parameters, and the subjects of its guards. Every kernel declares its own, in the
# order of the array that a launch gives it. A product's, a partial's and a reduce's are these. Pointers are byte
# addresses, strides count elements, slope is the bits of an fp32, extents are the distance in elements from the first
# to the last element of one matrix of an operand, reaches that from the first to the last of all its matrices;
# bias_rank is 0 without a bias, 1 for a vector of N, 2 for a matrix.
# Partial sums are fp32 (split, batch, M_pad, N_pad), whole tiles, at workspace_ptr, a matrix every workspace_stride_z
# elements; split is 1 for a product. grouped is the place of a dimension in GROUPED, and offsets_ptr the address of the
# int32 ends of its groups; of groups of rows with room for group_rows each, if that is not 0, their numbers of rows.
# expected_rows is how many rows they have together by the caller's estimate, 0 for M: kernels are chosen by it.
# global_scratch is the address of the memory that Triton's compiler needs. c_span is the number of elements of a row of
# C that may be written: N, or the whole pitch of a C in the workspace. Tiles are computed in groups of group_m rows of
# tiles of C. Hopper's kernels begin their steps k_shift elements before the first along K, where TMA finds zeros, so
# that boxes of an operand which begins within a cache line lie on lines.
# Block scales are one factor for BLOCK_SCALE_K products along K of a row of A, and of block_columns columns of B: 1 or
# BLOCK_SCALE_K. Both addresses are 0 without them.
PRODUCT_QUANTITIES = (
    "a_ptr", "b_ptr", "c_ptr", "M", "N", "K",
    "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn",
    "batch", "stride_az", "stride_bz", "stride_cz",
    "bias_ptr", "stride_bias_z", "stride_bias_m", "stride_bias_n",
    "scale_a_ptr", "scale_b_ptr", "stride_scale_a", "stride_scale_b", "stride_scale_bz",
    "activation", "allow_tf32", "fast_accum", "batch_invariant",
    "grouped", "offsets_ptr", "group_rows", "expected_rows",
    "block_scale_a_ptr", "block_scale_b_ptr", "stride_block_az", "stride_block_am", "stride_block_ak",
    "stride_block_bz", "stride_block_bk", "stride_block_bn", "block_columns",
    "slope", "a_extent", "b_extent", "c_extent", "bias_rank", "zero",
    "workspace_ptr", "workspace_stride_m", "workspace_stride_z", "split", "global_scratch", "c_span", "group_m",
    "a_reach", "b_reach", "c_reach", "k_shift",
)  # fmt: skip
BLOCK_SCALE_K = 128
STATED_QUANTITIES = PRODUCT_QUANTITIES.index("slope")  # those before it are the caller's, the others are computed
# A copy's: sources and destinations of M rows and N columns, `batch` of each, in elements of equal size; the same of
# the other operand, of 0 x 0 if there is one alone.
_OF_COPY = (
    "source_ptr", "dest_ptr", "M", "N", "batch", "stride_sz", "stride_dz",
    "stride_sm", "stride_sn", "stride_dm", "stride_dn",
)  # fmt: skip
COPY_QUANTITIES = (*_OF_COPY, *(f"other_{name}" for name in _OF_COPY), "zero")
QUANTITIES = {  # by role
    "product": PRODUCT_QUANTITIES,
    "partial": PRODUCT_QUANTITIES,
    "reduce": PRODUCT_QUANTITIES,
    "copy": COPY_QUANTITIES,
    "grouped_m": PRODUCT_QUANTITIES,
    "grouped_k": PRODUCT_QUANTITIES,
}
MAX_QUANTITIES = 64  # of one kernel
MAX_SIZES = 8  # that measured choices of a function go by

# Numbers of slices of K. Those above USUAL_SPLIT are for few tiles and a K so large that each slice is long. From
# LONGEST_K on there are none of them: steps along K, of 16 elements at least, times the number of slices fit 32 bits.
SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
USUAL_SPLIT, LONGEST_K = 16, 2**27

# Choices of group_m. More than 16 could overflow the number of a tile at N near 2^31.
GROUPS = (1, 2, 4, 8, 16)
USUAL_GROUP = 8  # of plans that name none
# Blocks beside each other whose reads decide about group_m: if the device computes all tiles at once, and of ping-pong
# kernels in clusters (docs/experiments/hopper-kernels.md, "Groups with rests"). Else it is half of what it computes.
NEIGHBOURS, ALTERNATING_NEIGHBOURS = 24, 8
# Slices under `batch_invariant` are multiples of so many elements of K. Kernels step along K by 16 to this, and fp8
# sums move to fp32 after so many products, so such slices are the same for every kernel of an order. Kernels of longer
# steps are left out.
WHOLE_STEPS = 128
FEW_SLICES = 4  # of K under `batch_invariant`, if K is cut and not very large

# Most device memory, in bytes, of a product's workspace from torch: enough for copies of two operands of 1 GiB each,
# and for more slices of K than pay.
WORKSPACE_LIMIT = 2 << 30

RELATIONS = ("equals", "multiple_of", "below", "at_least")

# Launch attributes, with the ids of CUlaunchAttributeID (CUDA driver API, section "Types").
ATTRIBUTES = {
    "cooperative": 2,
    "cluster_dimension": 4,
    "cluster_scheduling_policy_preference": 5,
    "programmatic_stream_serialization": 6,
}

# Element types of tensor maps, with the numbers of CUtensorMapDataType (there; "Tensor Map Object Management").
TENSOR_MAP_TYPES = {
    "fp16": 6, "bf16": 9, "fp32": 7, "tf32": 11, "fp8e5": 0, "fp8e4": 0, "int8": 0, "int32": 3,
}  # fmt: skip


def input_types(name: str) -> tuple[str, str]:
    """Return the element types of A and B in the input type called `name`.

    Raises:
        SpecError: there is none; the message lists them.
    """
    if name not in INPUTS:
        raise SpecError(f"unknown dtype {name!r}; known: {', '.join(INPUTS)}")
    first, _, second = name.partition("-")
    return first, second or first


def unit_strides(layout: str) -> tuple[str, str]:
    """Return the two operand strides that are 1 in `layout`: "n" is row-major, "t" column-major; first A, then B."""
    return (
        "stride_ak" if layout[0] == "n" else "stride_am",
        "stride_bn" if layout[1] == "n" else "stride_bk",
    )


# Element types behind pointers of a user's own functions, in Triton's spelling, with torch's. In C a type is its place
# from 1 on; 0 is None, no pointer.
POINTER_TYPES = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2", "fp8e4b8": "float8_e4m3fnuz", "fp8e5b16": "float8_e5m2fnuz",
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
NO_POINTER = "None"
DESCRIPTOR = "tensordesc<"  # begins the type of a host's tensor descriptor: tensordesc<fp16[64,32]>
POINTER_CODES = (NO_POINTER, *(f"*{name}" for name in POINTER_TYPES))
# Types of its numbers, with the least value and the first that is too large; of floats a launch passes the bits.
INTEGER_TYPES = {
    "i1": (0, 2), "i8": (-(2**7), 2**7), "i16": (-(2**15), 2**15), "i32": (-(2**31), 2**31), "i64": None,
    "u8": (0, 2**8), "u16": (0, 2**16), "u32": (0, 2**32), "u64": None,
}  # fmt: skip
FLOAT_TYPES = {"fp32": "f", "fp64": "d"}  # with struct's letter
# Arguments that a kernel was compiled for: the caller says which value, or @triton.autotune had several, in order.
CONSTEXPR, AUTOTUNE = "constexpr", "autotune"
# Options of the compiler that a variant may have.
OPTIONS = (
    *("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack"),
    *("launch_pdl", "launch_cooperative_grid"),
)
# What Triton kernels may call and no kernel of a pack does; and what a JIT does before launches and a pack does not.
COMPILED_OUT = ("device_print", "device_assert")
LEFT_OUT = (*COMPILED_OUT, "pre_hook", "early_config_prune")


def in_toml(value: str) -> str:
    """Return the JSON text of a constexpr as the TOML of a function has it, where None is a text."""
    return f'"{NO_POINTER}"' if value == "null" else value
