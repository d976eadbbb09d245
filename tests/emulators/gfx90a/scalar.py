"""Control, scalar loads and the scalar ALU."""

from __future__ import annotations

import functools
import re

import numpy as np

from tests.emulators import core
from tests.emulators.core import I32, I64, MASK32, U32, U64, Fault
from tests.emulators.gfx90a.arithmetic import RELATIONS, bfe, leading_zeros, reverse_bits, wide
from tests.emulators.gfx90a.batch import STOP
from tests.emulators.gfx90a.instruction import Instruction
from tests.emulators.gfx90a.operands import EXEC, SREG, VCC, read_by, scalar64_of, scalar_of

_BRANCHES = {
    "s_branch": None,
    "s_cbranch_scc0": lambda b: ~b.scc,
    "s_cbranch_scc1": lambda b: b.scc,
    "s_cbranch_execz": lambda b: ~b.exec.any(1),
    "s_cbranch_execnz": lambda b: b.exec.any(1),
    "s_cbranch_vccz": lambda b: (b.S[VCC] | b.S[VCC + 1]) == 0,
    "s_cbranch_vccnz": lambda b: (b.S[VCC] | b.S[VCC + 1]) != 0,
}
_SAVEEXEC = {
    "and_saveexec_b64": lambda v, e: v & e,
    "or_saveexec_b64": lambda v, e: v | e,
    "andn2_saveexec_b64": lambda v, e: v & ~e,
    "xor_saveexec_b64": lambda v, e: v ^ e,
}
_NONZERO = object()  # "SCC = result is not zero"


def _signed(x):
    return x.view(I32)


def _overflow(total):
    return total.astype(U32), (total > 0x7FFFFFFF) | (total < -0x80000000)


def _lshl_add(count):
    def function(b, x, y):
        total = (wide(x) << count) + wide(y)
        return total.astype(U32), (total >> 32) != 0

    return function


def _u32_bfe(x, y, signed=False):
    width = np.minimum((wide(y) >> 16) & 127, 32)
    source = wide(_signed(x)) if signed else wide(x)
    return bfe(source, wide(y) & 31, width, signed)


_SALU2 = {  # (batch, x, y) -> (result, None | _NONZERO | SCC)
    "add_u32": lambda b, x, y: (x + y, (x + y) < x),
    "sub_u32": lambda b, x, y: (x - y, y > x),
    "addc_u32": lambda b, x, y: ((wide(x) + y + b.scc).astype(U32), (wide(x) + y + b.scc) > MASK32),
    "subb_u32": lambda b, x, y: ((wide(x) - y - b.scc).astype(U32), (wide(y) + b.scc) > x),
    "add_i32": lambda b, x, y: _overflow(wide(_signed(x)) + _signed(y)),
    "sub_i32": lambda b, x, y: _overflow(wide(_signed(x)) - _signed(y)),
    "mul_i32": lambda b, x, y: (x * y, None),
    "mul_hi_u32": lambda b, x, y: ((x.astype(U64) * y.astype(U64) >> U64(32)).astype(U32), None),
    "mul_hi_i32": lambda b, x, y: ((wide(_signed(x)) * _signed(y) >> 32).astype(U32), None),
    "ashr_i32": lambda b, x, y: ((_signed(x) >> _signed(y & U32(31))).view(U32), _NONZERO),
    "lshl_b32": lambda b, x, y: (x << (y & U32(31)), _NONZERO),
    "lshr_b32": lambda b, x, y: (x >> (y & U32(31)), _NONZERO),
    "and_b32": lambda b, x, y: (x & y, _NONZERO),
    "or_b32": lambda b, x, y: (x | y, _NONZERO),
    "xor_b32": lambda b, x, y: (x ^ y, _NONZERO),
    "andn2_b32": lambda b, x, y: (x & ~y, _NONZERO),
    "orn2_b32": lambda b, x, y: (x | ~y, _NONZERO),
    "nand_b32": lambda b, x, y: (~(x & y), _NONZERO),
    "nor_b32": lambda b, x, y: (~(x | y), _NONZERO),
    "xnor_b32": lambda b, x, y: (~(x ^ y), _NONZERO),
    "min_i32": lambda b, x, y: (np.minimum(_signed(x), _signed(y)).view(U32), _signed(x) < _signed(y)),
    "max_i32": lambda b, x, y: (np.maximum(_signed(x), _signed(y)).view(U32), _signed(x) > _signed(y)),
    "min_u32": lambda b, x, y: (np.minimum(x, y), x < y),
    "max_u32": lambda b, x, y: (np.maximum(x, y), x > y),
    "cselect_b32": lambda b, x, y: (np.where(b.scc, x, y), None),
    "bfe_u32": lambda b, x, y: (_u32_bfe(x, y), _NONZERO),
    "bfe_i32": lambda b, x, y: (_u32_bfe(x, y, True), _NONZERO),
    "bfm_b32": lambda b, x, y: (((U32(1) << (x & U32(31))) - U32(1)) << (y & U32(31)), None),
    "lshl1_add_u32": _lshl_add(1),
    "lshl2_add_u32": _lshl_add(2),
    "lshl3_add_u32": _lshl_add(3),
    "lshl4_add_u32": _lshl_add(4),
    "pack_ll_b32_b16": lambda b, x, y: ((x & U32(0xFFFF)) | (y << U32(16)), None),
    "pack_lh_b32_b16": lambda b, x, y: ((x & U32(0xFFFF)) | (y & U32(0xFFFF0000)), None),
    "pack_hh_b32_b16": lambda b, x, y: ((x >> U32(16)) | (y & U32(0xFFFF0000)), None),
}
_SALU64 = {  # name -> (second operand is a 32-bit amount, function)
    "and_b64": (False, lambda b, x, y: x & y),
    "or_b64": (False, lambda b, x, y: x | y),
    "xor_b64": (False, lambda b, x, y: x ^ y),
    "andn2_b64": (False, lambda b, x, y: x & ~y),
    "orn2_b64": (False, lambda b, x, y: x | ~y),
    "nor_b64": (False, lambda b, x, y: ~(x | y)),
    "nand_b64": (False, lambda b, x, y: ~(x & y)),
    "xnor_b64": (False, lambda b, x, y: ~(x ^ y)),
    "cselect_b64": (False, lambda b, x, y: np.where(b.scc, x, y)),
    "lshl_b64": (True, lambda b, x, y: x << (y.astype(U64) & U64(63))),
    "lshr_b64": (True, lambda b, x, y: x >> (y.astype(U64) & U64(63))),
    "ashr_i64": (True, lambda b, x, y: (x.astype(I64) >> (y.astype(I64) & 63)).astype(U64)),
}
_SALU1 = {  # name -> (function, SCC = result is not zero)
    "mov_b32": (lambda x: x, False),
    "not_b32": (lambda x: ~x, True),
    "abs_i32": (lambda x: np.abs(wide(_signed(x))).astype(U32), True),
    "sext_i32_i16": (lambda x: np.asarray(x).astype(np.int16).astype(I32).view(U32), False),
    "sext_i32_i8": (lambda x: np.asarray(x).astype(np.int8).astype(I32).view(U32), False),
    "brev_b32": (lambda x: reverse_bits(x), False),
    "bcnt1_i32_b32": (lambda x: core.popcount(x), True),
    "ff1_i32_b32": (lambda x: np.where(x == 0, U32(MASK32), core.popcount((x & (~x + U32(1))) - U32(1))), False),
    "flbit_i32_b32": (lambda x: leading_zeros(x), False),
}


class Scalar(Instruction):
    """Control, scalar loads and the scalar ALU."""

    def scalar(self):
        base, fall = self.base, self.fall
        immediate = self.words[0] & 0xFFFF
        if base == "s_endpgm":

            def end(b):
                b.fragments.remove(b.fragment)
                return STOP

            return end
        if base == "s_barrier":

            def barrier(b):
                if any(kind == "write" for kind, _ in b.lg):
                    raise Fault("LDS writes of this wave are still outstanding at the barrier")
                b.fragment.pc, b.fragment.waiting = fall, "barrier"
                return STOP

            return barrier
        if base == "s_waitcnt":
            vm, lgkm = (immediate & 15) | (immediate >> 14) << 4, (immediate >> 8) & 15
            return functools.partial(_wait, vm=vm, lgkm=lgkm)
        if base == "s_setreg_imm32_b32":
            found = re.match(r"s_setreg_imm32_b32 hwreg\(HW_REG_MODE, 23, 1\), ([01])$", self.text)
            if not found:
                raise self.unknown()
            clamp = found.group(1) == "1"

            def set_mode(b):
                b.clamp_half = np.where(b.waves, clamp, b.clamp_half)

            return set_mode
        if base in _BRANCHES:
            target = fall + 4 * (immediate - 0x10000 if immediate & 0x8000 else immediate)
            condition = _BRANCHES[base]
            if condition is None:
                return lambda b: target
            reads = {SREG + VCC, SREG + VCC + 1} if "vcc" in base else ()
            return self.guarded(reads, (), lambda b: b.split(condition(b), target, fall))
        found = re.match(r"s_load_dword(?:x(\d+))?$", base)
        if found:
            return self.scalar_load(int(found.group(1) or 1))
        return self.salu()

    def scalar_load(self, count):
        self.allow("glc")
        target, address, offset = self.operands()
        pointer, shift, registers = scalar64_of(address), scalar_of(offset), target.registers(count)

        def load(b):
            at = (pointer(b) + shift(b).astype(U64)).astype(I64)
            b.active = b.waves[:, None]
            data = b.memory.load(at[b.waves], 4 * count, 4)
            for k in range(count):
                b.S[target.index + k][b.waves] = data[:, k]
            b.active = b.mask
            b.lg.append(("scalar", registers))
            b.pending |= registers

        return self.guarded(read_by(address, offset), registers, load)

    def salu(self):
        self.allow()
        name, ops = self.base[2:], self.operands()
        if name in _SALU2:
            (target, x, y), function = ops, _SALU2[name]
            fx, fy = scalar_of(x), scalar_of(y)

            def step(b):
                result, flag = function(b, fx(b), fy(b))
                b.sput(target.index, result)
                if flag is not None:
                    b.set_scc(result != 0 if flag is _NONZERO else flag)

            return self.guarded(read_by(x, y), target.registers(1), step)
        if name in _SALU64:
            (target, x, y), (shift, function) = ops, _SALU64[name]
            fx, fy = scalar64_of(x), scalar_of(y) if shift else scalar64_of(y)

            def step(b):
                result = function(b, fx(b), fy(b))
                b.sput64(target.index, result)
                if name != "cselect_b64":
                    b.set_scc(result != 0)

            return self.guarded(read_by(x, y), target.registers(2), step)
        found = re.match(r"cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)$", name)
        if found:
            packed, relation, kind, width = found.groups()
            x, y = ops
            relation, signed = RELATIONS[relation], kind == "i"
            fx = scalar64_of(x) if width == "64" else scalar_of(x)
            if packed:
                low = self.words[0] & 0xFFFF
                constant = U32((low - 0x10000 if signed and low & 0x8000 else low) & MASK32)
                fy = lambda b: constant
            else:
                fy = scalar64_of(y) if width == "64" else scalar_of(y)
            if signed:
                return self.guarded(read_by(x, y), (), lambda b: b.set_scc(relation(fx(b).view(I32), fy(b).view(I32))))
            return self.guarded(read_by(x, y), (), lambda b: b.set_scc(relation(fx(b), fy(b))))
        if name in ("movk_i32", "addk_i32", "mulk_i32", "cmovk_i32"):
            target = ops[0]
            low = self.words[0] & 0xFFFF
            value = low - 0x10000 if low & 0x8000 else low
            if name == "movk_i32":
                constant = U32(value & MASK32)
                return self.guarded((), target.registers(1), lambda b: b.sput(target.index, constant))
            if name == "cmovk_i32":
                raise self.unknown()

            def step(b):
                old = b.S[target.index].view(I32).astype(I64)
                result = old + value if name == "addk_i32" else old * value
                b.sput(target.index, result.astype(U32))
                if name == "addk_i32":
                    b.set_scc(result != result.astype(I32))

            return self.guarded((), target.registers(1), step)
        if name in (
            "mov_b64",
            "not_b64",
            "and_saveexec_b64",
            "or_saveexec_b64",
            "andn2_saveexec_b64",
            "xor_saveexec_b64",
        ):
            target, x = ops
            fx, combine = scalar64_of(x), _SAVEEXEC.get(name)

            def step(b):
                value = fx(b)
                if combine is None:
                    value = ~value if name == "not_b64" else value
                    b.sput64(target.index, value)
                    if name == "not_b64":
                        b.set_scc(value != 0)
                    return
                old = b.S[EXEC].astype(U64) | (b.S[EXEC + 1].astype(U64) << U64(32))
                new = combine(value, old)
                b.sput64(target.index, old)
                b.sput64(EXEC, new)
                b.set_scc(new != 0)

            return self.guarded(read_by(x), target.registers(2), step)
        if name in _SALU1:
            (target, x), (function, flag) = ops, _SALU1[name]
            fx = scalar_of(x)

            def step(b):
                result = function(fx(b))
                b.sput(target.index, result)
                if flag:
                    b.set_scc(result != 0)

            return self.guarded(read_by(x), target.registers(1), step)
        if name in ("bitcmp0_b32", "bitcmp1_b32"):
            x, y = ops
            fx, fy, want = scalar_of(x), scalar_of(y), U32(name == "bitcmp1_b32")
            return self.guarded(read_by(x, y), (), lambda b: b.set_scc(((fx(b) >> (fy(b) & U32(31))) & U32(1)) == want))
        raise self.unknown()


def _wait(b, vm, lgkm):
    """s_waitcnt: retire all but the newest `vm` / `lgkm` operations; scalar loads return out of order."""
    if len(b.vm) > vm:
        del b.vm[: len(b.vm) - vm]
    if len(b.lg) > lgkm and (lgkm == 0 or not any(kind == "scalar" for kind, _ in b.lg)):
        del b.lg[: len(b.lg) - lgkm]
    b._pending()
