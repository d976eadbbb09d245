"""The vocabulary: numbers that C and Python share, and names."""

from __future__ import annotations

import pytest

from aotmm.errors import SpecError
from aotmm.problem import (
    ACTIVATIONS,
    ATTRIBUTES,
    DTYPE_CODES,
    DTYPES,
    LAYOUTS,
    OUTPUTS,
    RELATIONS,
    STATED_VALUES,
    VALUES,
    dtype,
    unit_strides,
)


def test_numbers_of_the_c_interface() -> None:
    """The numbers that compiled programs know stay what they are; lists only grow at the end."""
    assert DTYPE_CODES[:6] == ("fp16", "bf16", "fp32", "tf32", "fp8e5", "fp8e4")
    assert ACTIVATIONS[:2] == ("none", "leaky_relu")
    assert RELATIONS[:3] == ("equals", "multiple_of", "below")
    assert VALUES[:6] == ("a_ptr", "b_ptr", "c_ptr", "M", "N", "K")
    assert VALUES[6:12] == ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
    assert VALUES[STATED_VALUES:][:3] == ("a_extent", "b_extent", "c_extent")


def test_ids_of_the_driver() -> None:
    """Launch attributes have the numbers of CUlaunchAttributeID."""
    assert ATTRIBUTES == {"cooperative": 2, "cluster_dimension": 4, "programmatic_stream_serialization": 6}


@pytest.mark.parametrize("name", DTYPES)
def test_types(name: str) -> None:
    """Each type is stored as itself or as another of the same size, and gives an output type that there is."""
    row = dtype(name)
    assert row.name == name
    assert row.storage == ("fp32" if name == "tf32" else name)
    assert DTYPES[row.storage].bytes == row.bytes
    assert row.output in OUTPUTS


def test_unknown_type() -> None:
    """An unknown type is told with those that there are."""
    with pytest.raises(SpecError, match=f"unknown dtype 'fp64'; known: {', '.join(DTYPES)}"):
        dtype("fp64")


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("nn", ("stride_ak", "stride_bn")),
        ("nt", ("stride_ak", "stride_bk")),
        ("tn", ("stride_am", "stride_bn")),
        ("tt", ("stride_am", "stride_bk")),
    ],
)
def test_layouts(layout: str, strides: tuple[str, str]) -> None:
    """Row-major operands have unit column strides, column-major ones unit row strides."""
    assert unit_strides(layout) == strides
    assert set(LAYOUTS) == {"nn", "nt", "tn", "tt"}
