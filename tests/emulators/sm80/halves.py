"""Arithmetic on pairs of 16-bit floats."""

from __future__ import annotations

import re

import numpy as np

from tests.emulators import core
from tests.emulators.core import F16, F32, F64, U16, U32, odd_sum
from tests.emulators.sm80.floating import FLOAT_NAMES, float_relation
from tests.emulators.sm80.instruction import Instruction


class Halves(Instruction):
    """Arithmetic on pairs of fp16 or bf16 in one register."""

    def _half_operand(self, text, bf16):
        """function(batch) -> (low, high) float64"""
        negate = text.startswith("-")
        body = text.lstrip("-")
        absolute = body.startswith("|")
        body = body.replace("|", "")
        swizzle = re.search(r"\.(H[01]_H[01]|F32)$", body)
        raw = self.source(re.sub(r"\.(H[01]_H[01]|F32)$", "", body))
        parts = {"H0_H0": (0, 0), "H1_H1": (16, 16), "H1_H0": (0, 16), "H0_H1": (16, 0)}
        kind = swizzle.group(1) if swizzle else "H1_H0"

        def fetch(b):
            word = raw(b)
            if kind == "F32":
                pair = [word.view(F32).astype(F64)] * 2
            else:
                pair = []
                for shift in parts[kind]:
                    bits = (word >> U32(shift)) & U32(0xFFFF)
                    pair.append(((bits << U32(16)).view(F32) if bf16 else bits.astype(U16).view(F16)).astype(F64))
            if absolute:
                pair = [np.abs(v) for v in pair]
            return [-v for v in pair] if negate else pair

        return fetch

    def _half_arguments(self, count, bf16):
        """Fetchers of `count` packed operands; an immediate takes two arguments (upper, lower)."""
        rest, out = self.args[1:], []
        number = r"[+-]?(\d|INF|QNAN)"
        while rest:
            if re.match(number, rest[0]):
                if len(rest) < 2 or not re.match(number, rest[1]):
                    raise self.unknown("immediate")
                high, low = (F64(float(v.replace("QNAN", "nan"))) for v in rest[:2])
                out.append(lambda b, pair=(low, high): pair)
                rest = rest[2:]
            else:
                out.append(self._half_operand(rest[0], bf16))
                rest = rest[1:]
        if len(out) != count:
            raise self.unknown("operand count")
        return out

    def _half_math(self, count, function):
        self.allow("MMA", "BF16_V2", "F32", "RELU")
        if "RELU" in self.mods:
            raise self.unknown("relu")
        bf16 = "BF16_V2" in self.mods
        put, fetch = self.result(self.args[0]), self._half_arguments(count, bf16)
        single = "F32" in self.mods

        def encode(x):
            return core.bf16_bits(x) if bf16 else np.asarray(x).astype(F16).view(U16).astype(U32)

        def step(b, mask, where):
            pairs = [f(b) for f in fetch]
            low = function(*[p[0] for p in pairs])
            if single:
                put(b, np.asarray(low.astype(F32)).view(U32), where)
                return
            high = function(*[p[1] for p in pairs])
            put(b, (encode(high) << U32(16)) | encode(low), where)

        return step

    def _hmnmx2(self):
        self.allow("NAN", "BF16_V2")
        bf16 = "BF16_V2" in self.mods
        choose, self.args = self.predicate(self.args[-1]), self.args[:-1]
        put, (x, y) = self.result(self.args[0]), self._half_arguments(2, bf16)
        nan = "NAN" in self.mods

        def pick(least, p, q):
            value = np.where(least, np.fmin(p, q), np.fmax(p, q))
            value = np.where(np.isnan(p) | np.isnan(q), np.nan, value) if nan else value
            return core.bf16_bits(value) if bf16 else value.astype(F16).view(U16).astype(U32)

        def step(b, mask, where):
            (p0, p1), (q0, q1), least = x(b), y(b), choose(b)
            put(b, (pick(least, p1, q1) << U32(16)) | pick(least, p0, q0), where)

        return step

    def _hset2(self):
        self.allow(*FLOAT_NAMES, "BF", "AND", "OR", "XOR", "BF16_V2")
        if "BF" not in self.mods:
            raise self.unknown("integer result")
        bf16 = "BF16_V2" in self.mods
        combine, more = self._combine(), self.predicate(self.args[-1])
        self.args = self.args[:-1]
        put, (x, y), relation = self.result(self.args[0]), self._half_arguments(2, bf16), float_relation(self.order)
        one = U32(0x3F80 if bf16 else 0x3C00)

        def step(b, mask, where):
            (p0, p1), (q0, q1), other = x(b), y(b), more(b)
            low, high = (np.where(combine(relation(p, q), other), one, U32(0)) for p, q in ((p0, q0), (p1, q1)))
            put(b, (high << U32(16)) | low, where)

        return step

    def _hadd2(self):
        return self._half_math(2, lambda a, c: a + c)

    def _hmul2(self):
        return self._half_math(2, lambda a, c: a * c)

    def _hfma2(self):
        def fma(a, x, c):
            product, addend = np.broadcast_arrays(np.multiply(a, x), c)
            return odd_sum(np.ascontiguousarray(product), np.ascontiguousarray(addend))

        return self._half_math(3, fma)
