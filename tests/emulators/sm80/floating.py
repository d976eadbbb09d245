"""Arithmetic on float32, and conversions."""

from __future__ import annotations

import numpy as np

from tests.emulators import core
from tests.emulators.core import F16, F32, F64, I32, I64, MASK32, U16, U32, flush, fma32
from tests.emulators.sm80.instruction import INT_COMPARE, Instruction

FLOAT_NAMES = ("LT", "LE", "GT", "GE", "EQ", "NE", "LTU", "LEU", "GTU", "GEU", "EQU", "NEU", "NUM", "NAN")


def float_relation(order):
    name = next(m for m in order if m in FLOAT_NAMES)
    unordered = lambda a, c: np.isnan(a) | np.isnan(c)
    if name == "NAN":
        return unordered
    if name == "NUM":
        return lambda a, c: ~unordered(a, c)
    if name.endswith("U"):  # true for NaN
        plain = INT_COMPARE[name[:-1]]
        return lambda a, c: plain(a, c) | unordered(a, c)
    if name == "NE":
        return lambda a, c: (a != c) & ~unordered(a, c)
    return INT_COMPARE[name]


class Floating(Instruction):
    """Arithmetic on float32, and conversions."""

    def _float2(self, function, inputs):
        self.allow("FTZ", "RN")
        put, fetch = self.result(self.args[0]), [self.real(a) for a in self.args[1 : 1 + inputs]]
        if len(self.args) != 1 + inputs:
            raise self.unknown()
        zero = flush if "FTZ" in self.mods else (lambda x: x)

        def step(b, mask, where):
            put(b, np.asarray(zero(function(*[zero(f(b)) for f in fetch])), F32).view(U32), where)

        return step

    def _fadd(self):
        return self._float2(lambda a, c: a + c, 2)

    def _fmul(self):
        return self._float2(lambda a, c: a * c, 2)

    def _ffma(self):
        return self._float2(fma32, 3)

    def _fmnmx(self):
        self.allow("FTZ", "NAN")
        put, x, y, choose = (
            self.result(self.args[0]),
            self.real(self.args[1]),
            self.real(self.args[2]),
            self.predicate(self.args[3]),
        )
        nan, zero = "NAN" in self.mods, flush if "FTZ" in self.mods else (lambda v: v)

        def step(b, mask, where):
            p, q = zero(x(b)), zero(y(b))
            both_zero = (p == 0) & (q == 0)
            low = np.where(both_zero, np.where(np.signbit(p), p, q), np.fmin(p, q))
            high = np.where(both_zero, np.where(np.signbit(p), q, p), np.fmax(p, q))
            value = np.where(choose(b), low, high)
            if nan:
                value = np.where(np.isnan(p) | np.isnan(q), F32(np.nan), value)
            put(b, np.asarray(value, F32).view(U32), where)

        return step

    def _fsel(self):
        self.allow()
        put, x, y, choose = (
            self.result(self.args[0]),
            self.real(self.args[1]),
            self.real(self.args[2]),
            self.predicate(self.args[3]),
        )
        return lambda b, mask, where: put(b, np.asarray(np.where(choose(b), x(b), y(b)), F32).view(U32), where)

    def _fsetp(self):
        relation, combine = float_relation(self.order), self._combine()
        self.allow(*FLOAT_NAMES, "AND", "OR", "XOR", "FTZ")
        first, second = self.predicate_result(self.args[0]), self.predicate_result(self.args[1])
        x, y, more = self.real(self.args[2]), self.real(self.args[3]), self.predicate(self.args[4])
        zero = flush if "FTZ" in self.mods else (lambda v: v)

        def step(b, mask, where):
            value = relation(zero(x(b)), zero(y(b)))
            other = more(b)
            first(b, combine(value, other), mask)
            second(b, combine(~value, other), mask)

        return step

    def _fchk(self):
        """Does x / y need the slow path?  True more often than on hardware, which is harmless: the path is exact."""
        self.allow("DIVIDE")
        put, x, y = self.predicate_result(self.args[0]), self.real(self.args[1]), self.real(self.args[2])
        easy = lambda v: (np.abs(v) > F32(2.0**-50)) & (np.abs(v) < F32(2.0**50))
        return lambda b, mask, where: put(b, ~(easy(x(b)) & easy(y(b))), mask)

    def _mufu(self):
        self.allow("RCP", "EX2", "LG2", "SQRT", "RSQ", "TANH", "SIN", "COS")
        function = {
            "RCP": lambda a: 1.0 / a,
            "EX2": np.exp2,
            "LG2": np.log2,
            "SQRT": np.sqrt,
            "RSQ": lambda a: 1.0 / np.sqrt(a),
            "TANH": np.tanh,
            "SIN": lambda a: np.sin(2 * np.pi * a),
            "COS": lambda a: np.cos(2 * np.pi * a),
        }[self.order[0]]
        put, x = self.result(self.args[0]), self.real(self.args[1])
        return lambda b, mask, where: put(
            b, np.asarray(flush(function(flush(x(b)).astype(F64)).astype(F32)), F32).view(U32), where
        )

    def _i2f(self):
        self.allow("RP", "U32", "S32", "RN", "U8", "U16", "S8", "S16")
        put, x = self.result(self.args[0]), self.source(self.args[1])
        if {"U8", "U16", "S8", "S16"} & self.mods:
            raise self.unknown("narrow source")
        view = U32 if "U32" in self.mods else I32
        up = "RP" in self.mods

        def step(b, mask, where):
            exact = np.asarray(x(b)).view(view).astype(F64)
            value = exact.astype(F32)
            if up:
                value = np.where(value.astype(F64) < exact, np.nextafter(value, F32(np.inf)), value)
            put(b, np.asarray(value, F32).view(U32), where)

        return step

    _i2fp = _i2f

    def _f2i(self):
        self.allow("FTZ", "U32", "S32", "TRUNC", "NTZ", "FLOOR", "CEIL")
        put, x = self.result(self.args[0]), self.real(self.args[1])
        rounding = (
            np.trunc
            if "TRUNC" in self.mods
            else np.floor
            if "FLOOR" in self.mods
            else np.ceil
            if "CEIL" in self.mods
            else np.rint
        )
        low, high = (0, MASK32) if "U32" in self.mods else (-0x80000000, 0x7FFFFFFF)

        def step(b, mask, where):
            value = np.nan_to_num(rounding(x(b).astype(F64)), nan=0.0, posinf=high, neginf=low)
            put(b, np.clip(value, low, high).astype(I64).astype(U32), where)

        return step

    def _frnd(self):
        self.allow("TRUNC", "FLOOR", "CEIL", "FTZ")
        put, x = self.result(self.args[0]), self.real(self.args[1])
        rounding = (
            np.trunc
            if "TRUNC" in self.mods
            else np.floor
            if "FLOOR" in self.mods
            else np.ceil
            if "CEIL" in self.mods
            else np.rint
        )
        return lambda b, mask, where: put(b, np.asarray(rounding(x(b)), F32).view(U32), where)

    def _f2fp(self):
        """Two float32 to a packed pair; the first source is the upper half."""
        self.allow("BF16", "F16", "F32", "PACK_AB", "RELU", "RZ")
        put, high, low = self.result(self.args[0]), self.real(self.args[1]), self.real(self.args[2])
        bf16, relu, truncate = "BF16" in self.mods, "RELU" in self.mods, "RZ" in self.mods

        def half(x):
            if relu:
                x = np.where(x <= 0, F32(0), x)
            if truncate:
                return np.asarray(x).view(U32) >> U32(16) if bf16 else core.half_toward_zero(np.asarray(x))
            return (
                core.f32_to_bf16_bits(np.asarray(x, F32)) if bf16 else np.asarray(x).astype(F16).view(U16).astype(U32)
            )

        return lambda b, mask, where: put(b, (half(high(b)) << U32(16)) | half(low(b)), where)
