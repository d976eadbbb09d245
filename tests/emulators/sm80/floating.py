"""Arithmetic on float32, and conversions."""

from __future__ import annotations

import numpy as np

from tests.emulators import core, numerics
from tests.emulators.core import F16, F32, F64, I32, I64, U16, U32, U64, flush, fma32
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


_ROUNDINGS = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}


def _float64_of(value, signed):
    """float64 of 64-bit integers, with the lost bits in the last one: any later rounding to 24 bits is the only one."""
    negative = (value >> U64(63)).astype(bool) if signed else np.zeros(np.shape(value), bool)
    magnitude = np.where(negative, U64(0) - value, value)
    large = magnitude >= U64(1 << 53)
    sticky = (magnitude >> U64(11)) | ((magnitude & U64(0x7FF)) != 0)
    number = np.where(large, sticky.astype(F64) * 2048.0, np.where(large, U64(0), magnitude).astype(F64))
    return np.where(negative, -number, number)


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
        self.allow("RP", "U32", "S32", "RN", "U64", "S64")
        put, up = self.result(self.args[0]), "RP" in self.mods
        if {"U64", "S64"} & self.mods:
            wide, signed = self.source64(self.args[1]), "S64" in self.mods
            exact = lambda b: _float64_of(wide(b), signed)
        else:
            narrow, view = self.source(self.args[1]), U32 if "U32" in self.mods else I32
            exact = lambda b: np.asarray(narrow(b)).view(view).astype(F64)

        def step(b, mask, where):
            number = exact(b)
            value = number.astype(F32)
            if up:
                value = np.where(value.astype(F64) < number, np.nextafter(value, F32(np.inf)), value)
            put(b, np.asarray(value, F32).view(U32), where)

        return step

    _i2fp = _i2f

    def _f2i(self):
        self.allow("FTZ", "U32", "S32", "U64", "S64", "TRUNC", "NTZ", "FLOOR", "CEIL")
        wide, signed = bool({"U64", "S64"} & self.mods), not {"U32", "U64"} & self.mods
        bits = 64 if wide else 32
        put, x = (self.pair_result if wide else self.result)(self.args[0]), self.real(self.args[1])
        rounding, word = self._rounding(), U64 if wide else U32
        low, top = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
        highest, nan = word(int(top) - 1), word(1 << 63 if wide else 0)

        def step(b, mask, where):
            number = rounding(x(b).astype(F64))
            inside = np.where((number >= low) & (number < top), number, low)  # NaN is not
            value = inside.astype(I64 if signed else U64).astype(word)
            value = np.where(number >= top, highest, value)
            put(b, np.where(np.isnan(number), nan, value), where)

        return step

    def _rounding(self):
        return next((function for name, function in _ROUNDINGS.items() if name in self.mods), np.rint)

    def _frnd(self):
        self.allow("TRUNC", "FLOOR", "CEIL", "FTZ")
        put, x = self.result(self.args[0]), self.real(self.args[1])
        rounding = self._rounding()
        return lambda b, mask, where: put(b, np.asarray(rounding(x(b)), F32).view(U32), where)

    def _f2fp(self):
        """Two float32 to a packed pair; the first source is the upper half."""
        if {"E4M3", "E5M2"} & self.mods:
            return self._f2fp_bytes()
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

    def _f2fp_bytes(self):
        """Two float32, or a pair of halves, to two bytes of fp8, and back; the first source is the upper one."""
        dtype, put = "fp8e4" if "E4M3" in self.mods else "fp8e5", self.result(self.args[0])
        if "UNPACK_B" in self.mods:
            self.allow("F16", "E4M3", "E5M2", "UNPACK_B")
            word = self.source(self.args[1])

            def widened(code):
                value = numerics.decode(code, dtype)
                return np.where(np.isnan(value), U32(0x7FFF), value.astype(F16).view(U16).astype(U32))

            def unpack(b, mask, where):
                codes = np.asarray(word(b))
                put(b, (widened(codes >> U32(8) & U32(255)) << U32(16)) | widened(codes & U32(255)), where)

            return unpack
        self.allow("SATFINITE", "RELU", "E4M3", "E5M2", "F32", "F16", "PACK_AB_MERGE_C", "UNPACK_B_MERGE_C")
        if "SATFINITE" not in self.mods or self.args[-1] != "RZ":
            raise self.unknown("only saturated, into a register of zeros")
        relu = "RELU" in self.mods
        if "F16" in self.mods:
            pair = self.source(self.args[1])
            sources = [
                (lambda b: (np.asarray(pair(b)) >> U32(16)).astype(U16).view(F16)),
                (lambda b: np.asarray(pair(b)).astype(U16).view(F16)),
            ]
        else:
            sources = [self.real(self.args[1]), self.real(self.args[2])]

        def narrowed(value):
            value = np.where(value <= 0, 0.0, value) if relu else np.asarray(value)
            return np.where(np.isnan(value), U32(0x7F), numerics.encode(value, dtype).astype(U32))

        def pack(b, mask, where):
            high, low = (narrowed(source(b)) for source in sources)
            put(b, (high << U32(8)) | low, where)

        return pack
