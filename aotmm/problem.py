"""The vocabulary of one product C = activation(A @ B): types, layouts, activations and named quantities.

Everything that the generated C and Python must agree on by number is listed here once; positions in the tuples are
those numbers, so they only grow at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotmm.errors import SpecError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: ours.
        bytes: size of one element.
        storage: name of the type with the same bytes in memory (tf32 is stored as fp32).
        triton: Triton's spelling.
        torch: torch's spelling.
        output: the output type by default.
        mac_cost: time of one multiply-add relative to fp16 on the same device, for choosing between kernels that
            both fit (tf32 or fp32). Source: A100 and H100 data sheets, dense rates.
    """

    name: str
    bytes: int
    storage: str
    triton: str
    torch: str
    output: str
    mac_cost: int


DTYPES = {
    row.name: row
    for row in (
        DType("fp16", 2, "fp16", "fp16", "float16", "fp16", 1),
        DType("bf16", 2, "bf16", "bf16", "bfloat16", "bf16", 1),
        DType("fp32", 4, "fp32", "fp32", "float32", "fp32", 16),
        DType("tf32", 4, "fp32", "fp32", "float32", "fp32", 2),
        DType("fp8e5", 1, "fp8e5", "fp8e5", "float8_e5m2", "fp16", 1),
        DType("fp8e4", 1, "fp8e4", "fp8e4nv", "float8_e4m3fn", "fp16", 1),
    )
}
DTYPE_CODES = tuple(DTYPES)

OUTPUTS = ("fp16", "bf16", "fp32")
ACTIVATIONS = ("none", "leaky_relu")
LAYOUTS = ("nn", "nt", "tn", "tt")

# Quantities of a product, which parameters are filled from and promises are made about. Pointers are byte addresses,
# strides count elements, extents are the distance in elements from the first to the last element of an operand.
VALUES = (
    "a_ptr", "b_ptr", "c_ptr", "M", "N", "K",
    "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn",
    "allow_tf32", "a_extent", "b_extent", "c_extent", "zero",
)  # fmt: skip
STATED_VALUES = VALUES.index("a_extent")  # what comes before is the caller's, what follows is computed from it

RELATIONS = ("equals", "multiple_of", "below")

# Launch attributes, with the ids of CUlaunchAttributeID (CUDA driver API, section "Types").
ATTRIBUTES = {"cooperative": 2, "cluster_dimension": 4, "programmatic_stream_serialization": 6}


def dtype(name: str) -> DType:
    """The element type called `name`.

    Raises:
        SpecError: there is none; the message lists them.
    """
    if name not in DTYPES:
        raise SpecError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def unit_strides(layout: str) -> tuple[str, str]:
    """The two operand strides that are 1 in `layout`: "n" is row-major, "t" column-major; first A, then B."""
    return (
        "stride_ak" if layout[0] == "n" else "stride_am",
        "stride_bn" if layout[1] == "n" else "stride_bk",
    )
