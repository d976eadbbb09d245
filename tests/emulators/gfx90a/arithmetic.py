"""Arithmetic that the scalar and the vector ALU share."""

from __future__ import annotations

import numpy as np

from tests.emulators.core import F64, I64, MASK32, U32

RELATIONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def wide(x):
    return np.asarray(x).astype(I64)


def bfe(x, shift, width, signed):
    """Bit field of int64 x; width is an array or scalar."""
    field = (x >> shift) & ((I64(1) << width) - 1)
    if signed:
        top = I64(1) << np.maximum(width - 1, 0)
        field = np.where(width > 0, (field ^ top) - top, 0)
    return field.astype(U32)


def reverse_bits(x):
    for shift, keep in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = ((x >> U32(shift)) & U32(keep)) | ((x & U32(keep)) << U32(shift))
    return x


def leading_zeros(x):
    """Leading zeros, -1 for 0."""
    exponent = np.frexp(np.asarray(x).astype(F64))[1]
    return np.where(x == 0, U32(MASK32), (32 - exponent).astype(U32))
