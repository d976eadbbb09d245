"""The vocabulary: numbers that C and Python share, and names."""

from __future__ import annotations

import pytest

from aotmm.errors import SpecError
from aotmm.problem import (
    ACTIVATIONS,
    DTYPE_CODES,
    DTYPES,
    EPILOGUES,
    GROUPED,
    INPUTS,
    LAYOUTS,
    OUTPUTS,
    PRODUCT_QUANTITIES,
    RELATIONS,
    ROLES,
    STATED_QUANTITIES,
    input_types,
    unit_strides,
)


def test_numbers_of_the_c_interface() -> None:
    """The numbers that compiled programs know stay what they are; lists only grow at the end."""
    assert DTYPE_CODES[:8] == ("fp16", "bf16", "fp32", "tf32", "fp8e5", "fp8e4", "int8", "int32")
    names = ("none", "relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
    assert tuple(ACTIVATIONS)[:8] == names
    assert EPILOGUES[:4] == ("none", "bias", "bias_relu", "full")
    assert RELATIONS[:4] == ("equals", "multiple_of", "below", "at_least")
    assert ROLES[:6] == ("product", "partial", "reduce", "copy", "grouped_m", "grouped_k")
    assert list(GROUPED.items()) == [("none", "product"), ("M", "grouped_m"), ("K", "grouped_k")]
    block_scales = ("block_scale_a_ptr", "block_scale_b_ptr")
    assert PRODUCT_QUANTITIES[:6] == ("a_ptr", "b_ptr", "c_ptr", "M", "N", "K")
    assert PRODUCT_QUANTITIES[6:12] == ("stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn")
    assert PRODUCT_QUANTITIES[12:16] == ("batch", "stride_az", "stride_bz", "stride_cz")
    assert PRODUCT_QUANTITIES[16:20] == ("bias_ptr", "stride_bias_z", "stride_bias_m", "stride_bias_n")
    assert PRODUCT_QUANTITIES[20:24] == ("scale_a_ptr", "scale_b_ptr", "stride_scale_a", "stride_scale_b")
    assert PRODUCT_QUANTITIES[24:29] == ("stride_scale_bz", "activation", "allow_tf32", "fast_accum", "batch_invariant")
    assert PRODUCT_QUANTITIES[29:33] == ("grouped", "offsets_ptr", "group_rows", "expected_rows")
    assert PRODUCT_QUANTITIES[33:38] == (*block_scales, "stride_block_az", "stride_block_am", "stride_block_ak")
    assert PRODUCT_QUANTITIES[38:42] == ("stride_block_bz", "stride_block_bk", "stride_block_bn", "block_columns")
    assert PRODUCT_QUANTITIES[42:48] == ("slope", "a_extent", "b_extent", "c_extent", "bias_rank", "zero")
    assert PRODUCT_QUANTITIES[STATED_QUANTITIES] == "slope"
    sums = ("workspace_ptr", "workspace_stride_m", "workspace_stride_z", "split")
    assert PRODUCT_QUANTITIES[48:53] == (*sums, "global_scratch")
    assert PRODUCT_QUANTITIES[53:] == ("c_span", "group_m", "a_reach", "b_reach", "c_reach", "k_shift")


@pytest.mark.parametrize("name", DTYPES)
def test_types(name: str) -> None:
    """Each type is stored as itself or as another of the same size, and gives an output type that there is."""
    row = DTYPES[name]
    assert row.name == name
    assert row.storage == ("fp32" if name == "tf32" else name)
    assert DTYPES[row.storage].bytes == row.bytes
    assert row.output == "int32" if name.startswith("int") else row.output in OUTPUTS
    assert DTYPES[row.output].output == row.output


@pytest.mark.parametrize("name", INPUTS)
def test_input_types(name: str) -> None:
    """Each input type is one element type for both operands, or one for each; the first decides the output."""
    a, b = input_types(name)
    assert name == (a if a == b else f"{a}-{b}")
    assert a in DTYPES
    assert b in DTYPES
    assert DTYPES[a].output == DTYPES[b].output
    assert "int32" not in (a, b)


def test_epilogues_by_activation() -> None:
    """Each activation names the least epilogue that has it; the identity needs none."""
    assert set(ACTIVATIONS.values()) <= set(EPILOGUES)
    assert [name for name, least in ACTIVATIONS.items() if least == "none"] == ["none"]
    assert [name for name, least in ACTIVATIONS.items() if least == "bias_relu"] == ["relu", "leaky_relu"]


def test_unknown_type() -> None:
    """An unknown type is told with those that there are."""
    with pytest.raises(SpecError, match=f"unknown dtype 'fp64'; known: {', '.join(INPUTS)}"):
        input_types("fp64")
    for name in ("int32", "fp16-bf16", "fp8e4-fp8e4", "fp16-", "-fp16", ""):
        with pytest.raises(SpecError, match=f"unknown dtype '{name}'"):
            input_types(name)


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
