"""Storage arrays of every type, and integer operands whose product has to be bit-exact.

Types are named by strings; their storage arrays are

======== ================= ==================================================
name     storage           meaning
======== ================= ==================================================
fp16     float16
bf16     uint16            bit pattern
fp32     float32
tf32     float32           fp32 data that the kernel rounds
fp8e5    uint8             OCP e5m2 bit pattern
fp8e4    uint8             OCP e4m3fn bit pattern
int8     int8              products with int32 accumulation; always exact
int32    int32             output only
======== ================= ==================================================
"""

from __future__ import annotations

import numpy as np

from tests.emulators.core import Array, bf16_bits

LARGEST = {
    "fp16": 65504.0,
    "bf16": float.fromhex("0x1.fep127"),
    "fp32": float.fromhex("0x1.fffffep127"),
    "int32": 2.0**31 - 1,
}
# Largest integer that the type holds with every smaller one.
LARGEST_INTEGER = {"fp16": 2048, "bf16": 256, "fp32": 4096, "tf32": 2048, "fp8e5": 8, "fp8e4": 16, "int8": 127}
_STORAGE = {"fp16": np.float16, "fp32": np.float32, "tf32": np.float32, "int8": np.int8, "int32": np.int32}


def _fp8_values(exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    """The value of every byte."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    if exponent_bits == 5:  # e5m2 has infinities and NaN like IEEE
        value = np.where(exponent == 31, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    else:  # e4m3fn has NaN only
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return value


_FP8 = {"fp8e5": _fp8_values(5, 2, 15), "fp8e4": _fp8_values(4, 3, 7)}


def decode(array: Array, dtype: str) -> Array:
    """The float64 values of a storage array."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype in _FP8:
        return _FP8[dtype][array]
    return array.astype(np.float64)


def encode(values: Array, dtype: str) -> Array:
    """The storage array of real values, rounded to nearest even; fp8 saturates, tf32 keeps all that fp32 has."""
    values = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bf16":
            return bf16_bits(values).astype(np.uint16)
        if dtype in _STORAGE:
            return values.astype(_STORAGE[dtype])
    table = _FP8[dtype][:128]
    finite = np.flatnonzero(np.isfinite(table))  # magnitudes in increasing order
    grid = table[finite]
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = np.abs(values)
    code = np.searchsorted(middle, magnitude, side="left")
    tie = (code < middle.size) & (magnitude == middle[np.minimum(code, middle.size - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(values), 0x7F, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def nearest_tf32(values: Array) -> Array:
    """Float64 values of fp32 numbers, rounded to the 10 bits of tf32, ties away from zero (PTX ISA, cvt.rna.tf32)."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    finite = bits & 0x7F800000 != 0x7F800000
    rounded: Array = np.where(finite, bits + np.uint32(0x1000) & np.uint32(0xFFFFE000), bits)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


# -------------------------------------------------------------------------------------------- inputs
def integer_inputs(
    m: int,
    n: int,
    k: int,
    dtype: str,
    out: str,
    *,
    accumulator_bits: int = 24,
    signed: bool = False,
    batch: tuple[int, ...] = (),
) -> tuple[Array, Array, Array]:
    """Operands whose product must be bit-exact, and it: A (*batch, m, k), B (*batch, k, n), C as storage arrays.

    They are small integers, so that sum |a||b| < 2^accumulator_bits for every element: every partial sum is exact, in
    any order. Entries are as large as that allows, so that C needs rounding where possible. Raises ValueError when the
    exact result does not fit `out`.
    """
    rng = np.random.default_rng(0)
    limit = min(2.0**accumulator_bits, 60000.0 if out == "fp16" else np.inf)
    exact, mean = LARGEST_INTEGER[dtype], limit / max(1, k)
    top = int(max(1, min(exact, np.sqrt(mean))))
    if out == "fp16":  # mean of C is k * top**2 / 4, not its maximum
        top = int(max(1, min(exact, np.sqrt(2.5 * mean), np.sqrt(2.0**accumulator_bits / max(1, k)))))
    density = min(1.0, 2.0 * limit / max(1.0, k * top * top))

    def draw(shape: tuple[int, ...]) -> Array:
        values = rng.integers(-top if signed else 0, top + 1, shape).astype(np.float64)
        return values if density == 1.0 else values * (rng.random(shape) < density)

    while True:
        a, b = draw((*batch, m, k)), draw((*batch, k, n))
        total = np.abs(a) @ np.abs(b)
        if not total.size or total.max() < min(limit, LARGEST[out]):
            break
        if density < 1e-6:
            raise ValueError("no exact inputs for this shape and output type")
        if top > 1:
            top = max(1, int(top * 0.85))
        else:
            density *= 0.7
    return encode(a, dtype), encode(b, dtype), encode(a @ b, out)
