"""What each instruction of the vector ALU computes."""

from __future__ import annotations

import numpy as np

from tests.emulators import core
from tests.emulators.core import F16, F32, F64, I32, I64, MASK32, U16, U32, U64, flush, fma32, odd_sum
from tests.emulators.gfx90a.arithmetic import bfe, leading_zeros, reverse_bits, wide

FLOAT_RELATIONS = {
    "neq": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _integer(low, high):
    """float32 -> integer, toward zero, saturating, NaN -> 0; result as uint32."""
    return lambda a: (
        np.clip(np.nan_to_num(np.trunc(a.astype(F64)), nan=0.0, posinf=high, neginf=low), low, high)
        .astype(I64)
        .astype(U32)
    )


def _approximate(function):
    """float32 function computed in float64, subnormal results flushed (as the transcendental unit does)."""
    return lambda a: flush(function(a.astype(F64)).astype(F32))


def _fma16(a, b, c):
    product, addend = np.broadcast_arrays(np.multiply(a, b, dtype=F64), np.asarray(c, F64))
    return odd_sum(product, addend).astype(F16)


def _minimum(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def _maximum(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def _divide_fixup(q, low, top):
    """v_div_fixup_f32: quotient q of top / low with the special cases put right."""
    sign = np.signbit(low) ^ np.signbit(top)
    exponent = lambda v: ((np.asarray(v).view(U32) >> U32(23)) & U32(255)).astype(I32)
    result = np.where(sign, -np.abs(q), np.abs(q))
    result = np.where(exponent(top) - exponent(low) < -150, F32(0), result)
    result = np.where(np.isinf(low) | (top == 0), F32(0), result)
    result = np.where((low == 0) | np.isinf(top), F32(np.inf), result)
    result = np.where(sign, -np.abs(result), np.abs(result))
    result = np.where(((low == 0) & (top == 0)) | (np.isinf(low) & np.isinf(top)), F32(np.nan), result)
    return np.where(np.isnan(top), top, np.where(np.isnan(low), low, result))


def _sad(a):
    return a & U32(31)


def _u24(a):
    return a & U32(0xFFFFFF)


def _bfe_lanes(signed):
    def function(a, offset, width):
        return bfe(wide(a.view(I32)) if signed else wide(a), wide(offset) & 31, wide(width) & 31, signed)

    return function


OUT = {
    "u": lambda r: r,
    "i": lambda r: np.asarray(r, I32).view(U32),
    "f": lambda r: np.asarray(r, F32).view(U32),
    "h": lambda r: np.asarray(r, F16).view(U16).astype(U32),
    "x": lambda r: r & U32(0xFFFF),
}
VALU = {  # name -> (kind of result, kinds of operands, function)
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_accvgpr_read_b32": ("u", "u", lambda a: a),
    "v_accvgpr_write_b32": ("u", "u", lambda a: a),
    "v_accvgpr_mov_b32": ("u", "u", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: ~a),
    "v_bfrev_b32": ("u", "u", reverse_bits),
    "v_ffbh_u32": ("u", "u", leading_zeros),
    "v_cvt_f32_u32": ("f", "u", lambda a: a.astype(F32)),
    "v_cvt_f32_i32": ("f", "i", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": ("u", "f", _integer(0, MASK32)),
    "v_cvt_i32_f32": ("u", "f", _integer(-0x80000000, 0x7FFFFFFF)),
    "v_cvt_f16_f32": ("h", "f", lambda a: a.astype(F16)),
    "v_cvt_f32_f16": ("f", "h", lambda a: a.astype(F32)),
    "v_cvt_f32_ubyte0": ("f", "u", lambda a: (a & U32(255)).astype(F32)),
    "v_cvt_f32_ubyte1": ("f", "u", lambda a: (a >> U32(8) & U32(255)).astype(F32)),
    "v_cvt_f32_ubyte2": ("f", "u", lambda a: (a >> U32(16) & U32(255)).astype(F32)),
    "v_cvt_f32_ubyte3": ("f", "u", lambda a: (a >> U32(24)).astype(F32)),
    "v_rcp_f32": ("f", "f", _approximate(lambda a: 1.0 / a)),
    "v_rcp_iflag_f32": ("f", "f", _approximate(lambda a: 1.0 / a)),
    "v_exp_f32": ("f", "f", _approximate(np.exp2)),
    "v_log_f32": ("f", "f", _approximate(np.log2)),
    "v_sqrt_f32": ("f", "f", _approximate(np.sqrt)),
    "v_rsq_f32": ("f", "f", _approximate(lambda a: 1.0 / np.sqrt(a))),
    "v_rndne_f32": ("f", "f", np.rint),
    "v_trunc_f32": ("f", "f", np.trunc),
    "v_floor_f32": ("f", "f", np.floor),
    "v_ceil_f32": ("f", "f", np.ceil),
    "v_add_u32": ("u", "uu", lambda a, b: a + b),
    "v_sub_u32": ("u", "uu", lambda a, b: a - b),
    "v_subrev_u32": ("u", "uu", lambda a, b: b - a),
    "v_and_b32": ("u", "uu", lambda a, b: a & b),
    "v_or_b32": ("u", "uu", lambda a, b: a | b),
    "v_xor_b32": ("u", "uu", lambda a, b: a ^ b),
    "v_xnor_b32": ("u", "uu", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u", "uu", lambda a, b: b << _sad(a)),
    "v_lshrrev_b32": ("u", "uu", lambda a, b: b >> _sad(a)),
    "v_ashrrev_i32": ("i", "ui", lambda a, b: b >> _sad(a).view(I32)),
    "v_lshlrev_b16": ("x", "xx", lambda a, b: b << (a & U32(15))),
    "v_lshrrev_b16": ("x", "xx", lambda a, b: b >> (a & U32(15))),
    "v_add_u16": ("x", "xx", lambda a, b: a + b),
    "v_sub_u16": ("x", "xx", lambda a, b: a - b),
    "v_mul_lo_u16": ("x", "xx", lambda a, b: a * b),
    "v_mul_lo_u32": ("u", "uu", lambda a, b: a * b),
    "v_mul_hi_u32": ("u", "uu", lambda a, b: (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32)),
    "v_mul_hi_i32": ("u", "ii", lambda a, b: (wide(a) * wide(b) >> 32).astype(U32)),
    "v_mul_u32_u24": ("u", "uu", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_hi_u32_u24": ("u", "uu", lambda a, b: (_u24(a).astype(U64) * _u24(b).astype(U64) >> U64(32)).astype(U32)),
    "v_mul_f32": ("f", "ff", lambda a, b: a * b),
    "v_add_f32": ("f", "ff", lambda a, b: a + b),
    "v_sub_f32": ("f", "ff", lambda a, b: a - b),
    "v_subrev_f32": ("f", "ff", lambda a, b: b - a),
    "v_max_f32": ("f", "ff", _maximum),
    "v_min_f32": ("f", "ff", _minimum),
    "v_max_f16": ("h", "hh", _maximum),
    "v_min_f16": ("h", "hh", _minimum),
    "v_add_f16": ("h", "hh", lambda a, b: a + b),
    "v_sub_f16": ("h", "hh", lambda a, b: a - b),
    "v_mul_f16": ("h", "hh", lambda a, b: a * b),
    "v_fma_f16": ("h", "hhh", _fma16),
    "v_min_u32": ("u", "uu", np.minimum),
    "v_max_u32": ("u", "uu", np.maximum),
    "v_min_i32": ("i", "ii", np.minimum),
    "v_max_i32": ("i", "ii", np.maximum),
    "v_pack_b32_f16": ("u", "uu", lambda a, b: (a & U32(0xFFFF)) | (b << U32(16))),
    "v_cvt_pkrtz_f16_f32": ("u", "ff", lambda a, b: core.half_toward_zero(a) | (core.half_toward_zero(b) << U32(16))),
    "v_ldexp_f32": ("f", "fi", lambda a, b: np.ldexp(a.astype(F64), np.clip(b, -400, 400)).astype(F32)),
    "v_add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "v_or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_and_or_b32": ("u", "uuu", lambda a, b, c: (a & b) | c),
    "v_lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << _sad(b)) + c),
    "v_lshl_or_b32": ("u", "uuu", lambda a, b, c: (a << _sad(b)) | c),
    "v_add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << _sad(c)),
    "v_bfe_u32": ("u", "uuu", _bfe_lanes(False)),
    "v_bfe_i32": ("u", "uuu", _bfe_lanes(True)),
    "v_bfi_b32": ("u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    "v_mad_u32_u24": ("u", "uuu", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_alignbit_b32": (
        "u",
        "uuu",
        lambda a, b, c: ((a.astype(U64) << U64(32) | b.astype(U64)) >> (c.astype(U64) & U64(31))).astype(U32),
    ),
    "v_alignbyte_b32": (
        "u",
        "uuu",
        lambda a, b, c: ((a.astype(U64) << U64(32) | b.astype(U64)) >> ((c.astype(U64) & U64(3)) * U64(8))).astype(U32),
    ),
    "v_fma_f32": ("f", "fff", fma32),
    "v_fmac_f32": ("f", "fff", fma32),
    "v_med3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "v_min3_i32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_f32": (
        "f",
        "fff",
        lambda a, b, c: np.where(
            np.isnan(a) | np.isnan(b) | np.isnan(c),
            _minimum(_minimum(a, b), c),
            _maximum(_minimum(a, b), _minimum(_maximum(a, b), c)),
        ),
    ),
    "v_max3_f32": ("f", "fff", lambda a, b, c: _maximum(_maximum(a, b), c)),
    "v_min3_f32": ("f", "fff", lambda a, b, c: _minimum(_minimum(a, b), c)),
    "v_div_fixup_f32": ("f", "fff", _divide_fixup),
}


CLAMPED = {  # unsigned saturation
    "v_add_u32": lambda a, b: np.minimum(wide(a) + b, MASK32).astype(U32),
    "v_sub_u32": lambda a, b: np.maximum(wide(a) - b, 0).astype(U32),
    "v_subrev_u32": lambda a, b: np.maximum(wide(b) - a, 0).astype(U32),
}
PACKED32 = {"v_pk_fma_f32": fma32, "v_pk_mul_f32": lambda a, b: a * b, "v_pk_add_f32": lambda a, b: a + b}
PACKED16 = {
    "v_pk_add_f16": ("h", lambda a, b: a + b),
    "v_pk_mul_f16": ("h", lambda a, b: a * b),
    "v_pk_fma_f16": ("h", _fma16),
    "v_pk_max_f16": ("h", _maximum),
    "v_pk_min_f16": ("h", _minimum),
    "v_pk_lshlrev_b16": ("x", lambda a, b: b << (a & U16(15))),
    "v_pk_lshrrev_b16": ("x", lambda a, b: b >> (a & U16(15))),
    "v_pk_add_u16": ("x", lambda a, b: a + b),
    "v_pk_sub_u16": ("x", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("x", lambda a, b: a * b),
}
