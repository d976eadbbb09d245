"""Tensor cores."""

from __future__ import annotations

import numpy as np

from tests.emulators import core, numerics
from tests.emulators.core import F16, F32, F64, I32, I64, U16, U32, Fault
from tests.emulators.sm80.batch import LANES
from tests.emulators.sm80.instruction import Instruction


class Matrix(Instruction):
    """HMMA, IMMA and QMMA, by the PTX ISA's fragment layouts of mma.m16n8k*."""

    def _registers(self, text, count):
        index = self.checked(text.split(".")[0], count)

        def fetch(b, mask):
            """uint32 (count, W, 32)"""
            if index is None:
                return np.zeros((count, b.W, LANES), U32)
            b.check_known(index, count, mask)
            return b.R[index : index + count]

        return fetch

    def _hmma(self):
        self.allow("16816", "1688", "1684", "F32", "F16", "BF16", "TF32")
        shape = self.order[0]
        kind = "tf32" if "TF32" in self.mods else "bf16" if "BF16" in self.mods else "f16"
        k = {"16816": 16, "1688": 8, "1684": 4}[shape]
        wide = "F32" in self.mods
        per = 1 if kind == "tf32" else 2  # elements in a register
        blocks = k // (4 * per)  # registers along K
        if blocks not in (1, 2):
            raise self.unknown("shape")
        fetch_a, fetch_b = self._registers(self.args[1], 2 * blocks), self._registers(self.args[2], blocks)
        outs = 4 if wide else 2
        fetch_c, target = self._registers(self.args[3], outs), self.checked(self.args[0], outs)

        def values(words):
            if kind == "tf32":
                return (words & U32(0xFFFFE000)).view(F32).astype(F64)[..., None]
            half = np.ascontiguousarray(words).view(U16).reshape(*words.shape, 2)
            if kind == "bf16":
                return (half.astype(U32) << U32(16)).view(F32).astype(F64)
            return half.view(F16).astype(F64)

        def step(b, mask, where):
            _whole_warps(mask)
            a = (
                values(fetch_a(b, mask))
                .reshape(blocks, 2, b.W, 8, 4, per)
                .transpose(2, 1, 3, 0, 4, 5)
                .reshape(b.W, 16, k)
            )
            right = values(fetch_b(b, mask)).reshape(blocks, b.W, 8, 4, per).transpose(1, 2, 0, 3, 4).reshape(b.W, 8, k)
            c = fetch_c(b, mask)
            if wide:
                c = np.ascontiguousarray(_accumulator(c)).view(F32)
                d = core.multiply_accumulate(a, right, c)
                words = _accumulator_words(np.ascontiguousarray(d, F32).view(U32))
            else:  # fp16 accumulators: two columns in a register
                c = (
                    np.ascontiguousarray(c)
                    .view(F16)
                    .reshape(2, b.W, 8, 4, 2)
                    .transpose(1, 0, 2, 3, 4)
                    .reshape(b.W, 16, 8)
                )
                d = (c.astype(F64) + np.matmul(a, right.transpose(0, 2, 1))).astype(F16)
                d = d.reshape(b.W, 2, 8, 4, 2).transpose(1, 0, 2, 3, 4)
                words = np.ascontiguousarray(d).view(U32).reshape(2, b.W, LANES)
            for q in range(outs):
                b.put(target + q, words[q], where)

        return step

    def _imma(self):
        self.allow("16832", "16816", "S8", "U8", "SAT")
        saturate, types = "SAT" in self.mods, {"S8": np.int8, "U8": np.uint8}
        kinds = [types[m] for m in self.order if m in types]

        def multiply(b, left, right, c):
            total = c.view(I32).astype(I64) + np.matmul(left, right.transpose(0, 2, 1)).astype(I64)
            return (np.clip(total, -0x80000000, 0x7FFFFFFF) if saturate else total).astype(U32)

        return self._bytes([lambda codes, kind=kind: codes.view(kind).astype(F64) for kind in kinds], multiply)

    def _qmma(self):
        """fp8 of sm_89, by the layout of IMMA."""
        self.allow("16832", "16816", "F32", "E4M3", "E5M2")
        types = {"E4M3": "fp8e4", "E5M2": "fp8e5"}
        kinds = [types[m] for m in self.order if m in types]
        if "F32" not in self.mods:
            raise self.unknown("fp16 sums")

        def multiply(b, left, right, c):
            result = core.multiply_accumulate(left, right, c.view(F32))
            return np.ascontiguousarray(result, F32).view(U32)

        return self._bytes([lambda codes, kind=kind: numerics.decode(codes, kind) for kind in kinds], multiply)

    def _bytes(self, values, multiply):
        """A product of operands of one byte: `values` of A and B decode bytes, `multiply`(b, A, B, C) gives words."""
        k = {"16832": 32, "16816": 16}[self.order[0]]
        blocks = k // 16
        fetch_a, fetch_b = self._registers(self.args[1], 2 * blocks), self._registers(self.args[2], blocks)
        fetch_c, target = self._registers(self.args[3], 4), self.checked(self.args[0], 4)

        def codes(words):
            return np.ascontiguousarray(words).view(np.uint8)

        def step(b, mask, where):
            _whole_warps(mask)
            left = values[0](codes(fetch_a(b, mask))).reshape(blocks, 2, b.W, 8, 4, 4).transpose(2, 1, 3, 0, 4, 5)
            right = values[1](codes(fetch_b(b, mask))).reshape(blocks, b.W, 8, 4, 4).transpose(1, 2, 0, 3, 4)
            c = np.ascontiguousarray(_accumulator(fetch_c(b, mask)))
            words = _accumulator_words(multiply(b, left.reshape(b.W, 16, k), right.reshape(b.W, 8, k), c))
            for q in range(4):
                b.put(target + q, words[q], where)

        return step


def _whole_warps(mask):
    if (mask.any(1) != mask.all(1)).any():
        raise Fault("tensor-core instruction with inactive lanes")


def _accumulator(words):
    """(4, W, 32) registers -> (W, 16, 8) matrix of words."""
    w = words.shape[1]
    return words.reshape(2, 2, w, 8, 4).transpose(2, 0, 3, 4, 1).reshape(w, 16, 8)


def _accumulator_words(matrix):
    """(W, 16, 8) -> (4, W, 32)"""
    w = matrix.shape[0]
    return matrix.reshape(w, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, w, LANES)
