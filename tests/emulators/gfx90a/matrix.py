"""Matrix cores."""

from __future__ import annotations

import re

import numpy as np

from tests.emulators import core
from tests.emulators.core import F16, F32, F64, I32, I64, U16, U32, flush
from tests.emulators.gfx90a.instruction import Instruction
from tests.emulators.gfx90a.operands import LANES


class Matrix(Instruction):
    """MFMA."""

    def mfma(self):
        self.allow("cbsz", "abid", "blgp")
        found = re.match(r"v_mfma_(f32|i32)_(\d+)x(\d+)x(\d+)_?(bf16|f16|f32|i8)(_1k)?$", self.base)
        if not found or any(value != "0" for value in self.mods.values()):
            raise self.unknown()
        out, m, n, k, kind, _ = found.groups()
        m, n, k = int(m), int(n), int(k)
        if (m, n) not in ((32, 32), (16, 16)):
            raise self.unknown()
        per = {"f16": 2, "bf16": 2, "f32": 1, "i8": 4}[kind]  # elements in a register
        slices = LANES // m  # groups of lanes; each holds k / slices of K
        if k % (slices * per):
            raise self.unknown("several blocks")
        regs_in, regs_out = k // slices // per, m * n // LANES
        target, a, b_, c = self.operands()

        def matrix(b, operand):
            """float64 (W, rows, k); k = slice * (k / slices) + register * per + element"""
            rows = b.V[operand.index : operand.index + regs_in]
            if kind == "i8":
                values = rows.view(np.int8).astype(F64)
            elif kind == "f32":
                values = rows.view(F32).astype(F64)
            else:
                half = rows.view(U16)
                exponent = U16(0x7C00 if kind == "f16" else 0x7F80)  # subnormals count as zero
                half = np.where((half & exponent) == 0, half & U16(0x8000), half)
                values = (half.view(F16) if kind == "f16" else (half.astype(U32) << U32(16)).view(F32)).astype(F64)
            values = values.reshape(regs_in, b.W, slices, m, per).transpose(1, 3, 2, 0, 4)
            return values.reshape(b.W, m, k)

        def multiply(b):
            lanes = np.broadcast_to(b.waves[:, None], b.mask.shape)
            b.active = lanes
            b.check_known(a.index, regs_in, lanes)
            b.check_known(b_.index, regs_in, lanes)
            if c.kind == "v":
                b.check_known(c.index, regs_out, lanes)
                start = b.V[c.index : c.index + regs_out]
            else:
                start = np.full((regs_out, b.W, LANES), c.bits, U32)
            # row of D = 4 * slices * (register // 4) + 4 * slice + register % 4, column = lane % m
            start = start.reshape(regs_out // 4, 4, b.W, slices, n).transpose(2, 0, 3, 1, 4).reshape(b.W, m, n)
            left, right = matrix(b, a), matrix(b, b_)
            if out == "i32":
                product = np.matmul(left, right.transpose(0, 2, 1)).astype(I64)
                result = (start.view(I32) + product).astype(U32)
            else:
                result = core.multiply_accumulate(left, right, start.view(F32))
                if kind in ("f16", "bf16"):
                    result = flush(result)
                result = np.ascontiguousarray(result, F32).view(U32)
            result = (
                result.reshape(b.W, regs_out // 4, slices, 4, n).transpose(1, 3, 0, 2, 4).reshape(regs_out, b.W, LANES)
            )
            span = slice(target.index, target.index + regs_out)
            if b.whole:
                b.V[span] = result
                for index in range(span.start, span.stop):
                    b.known[index] = True
            else:
                np.copyto(b.V[span], result, where=b.waves[:, None])
                b.known_lanes[span] |= lanes
            b.active = b.mask

        reads = a.registers(regs_in) | b_.registers(regs_in) | (c.registers(regs_out) if c.kind == "v" else frozenset())
        return self.guarded(reads, target.registers(regs_out), multiply)
