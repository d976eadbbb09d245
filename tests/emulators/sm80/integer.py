"""Integers, logic, predicates, moves and shuffles."""

from __future__ import annotations

import re

import numpy as np

from tests.emulators import core
from tests.emulators.core import I32, I64, MASK32, U32, U64, Fault
from tests.emulators.sm80.batch import LANES
from tests.emulators.sm80.instruction import INT_COMPARE, Instruction

_LOGIC = {  # the truth tables that occur most
    0xC0: lambda p, q, r: p & q,
    0xFC: lambda p, q, r: p | q,
    0x3C: lambda p, q, r: p ^ q,
    0xFE: lambda p, q, r: p | q | r,
    0xF8: lambda p, q, r: p | (q & r),
    0x80: lambda p, q, r: p & q & r,
    0x96: lambda p, q, r: p ^ q ^ r,
    0x30: lambda p, q, r: p & ~q,
    0x0C: lambda p, q, r: ~p & q,
    0x33: lambda p, q, r: ~q,
    0x0F: lambda p, q, r: ~p,
    0xEC: lambda p, q, r: q | (p & r),
    0x78: lambda p, q, r: p ^ (q & r),
    0x6C: lambda p, q, r: q ^ (p & r),
}


class Integer(Instruction):
    """Integers, logic and predicates; moves, permutations and shuffles."""

    def _mov(self):
        self.allow()
        put, x = self.result(self.args[0]), self.source(self.args[1])
        if self.uniform or not re.match(r"R\d+$", self.args[1]):
            return lambda b, mask, where: put(b, x(b), where)
        index, origin = self.checked(self.args[0]), self.checked(self.args[1])

        def step(b, mask, where):
            put(b, x(b), where)
            if not b.known[origin] and index is not None:  # a copied lane is as undefined as its source
                before = b.known_lanes[index] | b.known[index]
                b.known_lanes[index] = np.where(mask, b.known_lanes[origin], before)
                b.known[index] = bool(b.known_lanes[index].all())

        return step

    def _iadd3(self):
        self.allow("X")
        put, rest = self.result(self.args[0]), self.args[1:]
        outs = []
        while len(rest) > 3 and self.is_predicate(rest[0]) and not rest[0].startswith("!"):
            outs.append(self.predicate_result(rest[0]))
            rest = rest[1:]
        values, carries = rest[:3], [self.predicate(p) for p in rest[3:]]
        terms = []
        for text in values:
            sign = text[0] if text[0] in "-~" and self.literal(text) is None else ""
            terms.append((self.source(text[len(sign) :]), sign))
        extended = "X" in self.mods
        if carries and not extended:
            raise self.unknown("carry in")

        def step(b, mask, where):
            total = I64(0)
            for fetch, sign in terms:
                value = fetch(b).astype(I64)
                total = total + ((~value & MASK32) + (sign == "-") if sign else value)
            for carry in carries:
                total = total + carry(b)
            put(b, (total & MASK32).astype(U32), where)
            for number, out in enumerate(outs):
                out(b, (total >> 32) > number, mask)

        if outs or carries or any(sign == "~" for _, sign in terms):
            return step
        (x, *more) = [self.source(text) for text in values if text not in ("RZ", "URZ")] or [self.source("RZ")]

        def without_carry(b, mask, where):
            total = x(b)
            for fetch in more:
                total = total + fetch(b)
            put(b, total, where)

        return without_carry

    def _viadd(self):
        self.allow()
        put, x, y = self.result(self.args[0]), self.source(self.args[1]), self.source(self.args[2])
        return lambda b, mask, where: put(b, x(b) + y(b), where)

    def _imad(self):
        self.allow("WIDE", "HI", "U32", "MOV", "IADD", "SHL", "X", "S32")
        signed = "U32" not in self.mods
        if not {"WIDE", "HI"} & self.mods:
            if self.is_predicate(self.args[1]):
                raise self.unknown("carry out")
            put, (x, y, z) = self.result(self.args[0]), (self.source(a) for a in self.args[1:4])
            carry = self.predicate(self.args[4]) if len(self.args) > 4 else None
            if carry is None:
                return lambda b, mask, where: put(b, x(b) * y(b) + z(b), where)
            return lambda b, mask, where: put(b, x(b) * y(b) + z(b) + carry(b).astype(U32), where)
        return self._imad64(signed)

    def _imad64(self, signed):
        """IMAD.WIDE and IMAD.HI: both words, or the upper one, of a product and a 64-bit addend, and their carry."""
        (target, *sources), out = self.args, None
        if self.is_predicate(sources[0]):
            if signed:
                raise self.unknown("signed carry out")
            out, sources = self.predicate_result(sources[0]), sources[1:]
        if len(sources) != 3:
            raise self.unknown("operand count")
        x, y, addend = self.source(sources[0]), self.source(sources[1]), self.source64(sources[2])
        if "HI" in self.mods:
            word = self.result(target)
            put = lambda b, value, where: word(b, (value >> U64(32)).astype(U32), where)
        else:
            put = self.pair_result(target)

        def step(b, mask, where):
            p, q, more = x(b), y(b), addend(b)
            if signed:
                product = (p.view(I32).astype(I64) * q.view(I32).astype(I64)).astype(U64)
            else:
                product = p.astype(U64) * q.astype(U64)
            total = product + more
            put(b, total, where)
            if out is not None:
                out(b, total < more, mask)

        return step

    def _isetp(self):
        self.allow(*INT_COMPARE, "U32", "AND", "OR", "XOR", "EX", "S32")
        name = next(m for m in self.order if m in INT_COMPARE)
        relation, combine = INT_COMPARE[name], self._combine()
        view = U32 if "U32" in self.mods else I32
        first, second = self.predicate_result(self.args[0]), self.predicate_result(self.args[1])
        x, y, more = self.source(self.args[2]), self.source(self.args[3]), self.predicate(self.args[4])
        low = self.predicate(self.args[5]) if "EX" in self.mods else None

        def step(b, mask, where):
            p, q = x(b).view(view), y(b).view(view)
            if low is None:
                value = relation(p, q)
            elif name == "EQ":
                value = (p == q) & low(b)
            elif name == "NE":
                value = (p != q) | low(b)
            else:  # upper words; the lower ones decide a tie
                value = (p > q if name in ("GE", "GT") else p < q) | ((p == q) & low(b))
            other = more(b)
            first(b, combine(value, other), mask)
            second(b, combine(np.logical_not(value), other), mask)

        return step

    def _lop3(self):
        self.allow("LUT", "PAND")
        args, out = self.args, None
        if self.is_predicate(args[0]):
            out, args = self.predicate_result(args[0]), args[1:]
        put, (x, y, z) = self.result(args[0]), (self.source(a) for a in args[1:4])
        table = int(args[4], 0)
        function = _LOGIC.get(table)
        if "PAND" in self.mods or (len(args) > 5 and args[5] not in ("!PT", "!UPT")):
            raise self.unknown("predicate")

        def step(b, mask, where):
            p, q, r = x(b), y(b), z(b)
            if function is not None:
                value = function(p, q, r)
            else:
                value = U32(0)
                for k in range(8):
                    if table >> k & 1:
                        value = value | ((p if k & 4 else ~p) & (q if k & 2 else ~q) & (r if k & 1 else ~r))
            put(b, value, where)
            if out is not None:
                out(b, value != 0, mask)

        return step

    def _plop3(self):
        self.allow("LUT")
        first, second = self.predicate_result(self.args[0]), self.predicate_result(self.args[1])
        x, y, z = (self.predicate(a) for a in self.args[2:5])
        tables = int(self.args[5], 0), int(self.args[6], 0)

        def step(b, mask, where):
            index = x(b) * 4 + y(b) * 2 + z(b) * 1
            first(b, (tables[0] >> index & 1).astype(bool), mask)
            second(b, (tables[1] >> index & 1).astype(bool), mask)

        return step

    def _shf(self):
        self.allow("L", "R", "HI", "W", "U32", "S32", "U64", "S64")
        put, (x, n, y) = self.result(self.args[0]), (self.source(a) for a in self.args[1:4])
        left, high, wrap = "L" in self.mods, "HI" in self.mods, "W" in self.mods
        signed, wide = bool({"S32", "S64"} & self.mods), bool({"U64", "S64"} & self.mods)
        if ("U64" in self.mods and wrap) or ("S64" in self.mods and left):
            raise self.unknown()

        def step(b, mask, where):
            low, top, by = x(b).astype(U64), y(b), n(b).astype(U64)
            by = by & U64(31) if wrap else np.minimum(by, U64(63))
            if left:
                value = ((low | (top.astype(U64) << U64(32))) << by) >> U64(32) if high else low << by
            elif high and not wide:  # the upper word alone is shifted
                value = (
                    (top.view(I32).astype(I64) >> np.minimum(by, U64(31)).astype(I64)).astype(U64)
                    if signed
                    else top.astype(U64) >> by
                )
            elif high:
                value = (
                    ((low | (top.astype(U64) << U64(32))).astype(I64) >> by.astype(I64) >> 32).astype(U64)
                    if signed
                    else (low | (top.astype(U64) << U64(32))) >> by >> U64(32)
                )
            else:
                value = low | (top.astype(U64) << U64(32))
                value = (value.astype(I64) >> by.astype(I64)).astype(U64) if signed else value >> by
            put(b, (value & U64(MASK32)).astype(U32), where)

        return step

    def _lea(self):
        self.allow("HI", "X", "SX32")
        put, rest = self.result(self.args[0]), self.args[1:]
        out = None
        if self.is_predicate(rest[0]):
            out, rest = self.predicate_result(rest[0]), rest[1:]
        high, sign = "HI" in self.mods, "SX32" in self.mods
        x, y = self.source(rest[0]), self.source(rest[1])
        rest = rest[2:]
        top = None
        if high and not sign:
            top, rest = self.source(rest[0]), rest[1:]
        shift = 0
        if rest and not self.is_predicate(rest[0]):
            shift, rest = int(rest[0], 0), rest[1:]
        carry = self.predicate(rest[0]) if "X" in self.mods else None
        if len(rest) > (carry is not None):
            raise self.unknown("operand count")

        def without_carry(b, mask, where):
            value = x(b)
            if high:
                upper = (value.view(I32) >> 31).view(U32) if sign else top(b)
                value = (upper << U32(shift)) | (value >> U32(32 - shift)) if shift else upper
            else:
                value = value << U32(shift)
            put(b, value + y(b), where)

        if out is None and carry is None:
            return without_carry

        def step(b, mask, where):
            low = x(b)
            if high:
                upper = (low.view(I32).astype(I64) >> 32).astype(U64) if sign else top(b).astype(U64)
                value = (((upper << U64(32)) | low.astype(U64)) << U64(shift)) >> U64(32)
            else:
                value = (low.astype(U64) << U64(shift)) & U64(MASK32)
            total = value + y(b).astype(U64)
            if carry is not None:
                total = total + carry(b).astype(U64)
            put(b, (total & U64(MASK32)).astype(U32), where)
            if out is not None:
                out(b, (total >> U64(32)) != 0, mask)

        return step

    def _iabs(self):
        self.allow()
        put, x = self.result(self.args[0]), self.source(self.args[1])
        return lambda b, mask, where: put(b, np.abs(x(b).view(I32).astype(I64)).astype(U32), where)

    def _imnmx(self):
        self.allow("U32", "S32")
        put, x, y, choose = (
            self.result(self.args[0]),
            self.source(self.args[1]),
            self.source(self.args[2]),
            self.predicate(self.args[3]),
        )
        view = U32 if "U32" in self.mods else I32

        def step(b, mask, where):
            p, q = x(b).view(view), y(b).view(view)
            put(b, np.where(choose(b), np.minimum(p, q), np.maximum(p, q)).view(U32), where)

        return step

    _vimnmx = _imnmx

    def _sel(self):
        self.allow()
        put, x, y, choose = (
            self.result(self.args[0]),
            self.source(self.args[1]),
            self.source(self.args[2]),
            self.predicate(self.args[3]),
        )
        return lambda b, mask, where: put(b, np.where(choose(b), x(b), y(b)), where)

    def _sgxt(self):
        self.allow("U32")
        put, x, width = self.result(self.args[0]), self.source(self.args[1]), int(self.args[2], 0)
        signed = "U32" not in self.mods

        def step(b, mask, where):
            value = x(b).astype(I64) & ((1 << width) - 1)
            if signed:
                value = value - ((value >> (width - 1)) << width)
            put(b, value.astype(U32), where)

        return step

    def _prmt(self):
        self.allow()
        put, (x, s, y) = self.result(self.args[0]), (self.source(a) for a in self.args[1:4])

        def byte(p, q, code):
            value = ((p if code & 4 == 0 else q) >> U32(8 * (code & 3))) & U32(255)
            return np.where(value >> U32(7), U32(255), U32(0)) if code & 8 else value

        code = self.literal(self.args[2])
        if code is not None and not code & 0x8888:
            return self._bytes_moved(put, x, y, int(code))

        def step(b, mask, where):
            p, q, selector = x(b), y(b), s(b)
            codes = np.unique(selector[mask] if np.shape(selector) == mask.shape else selector) & U32(0xFFFF)
            result = None
            for code in (int(c) for c in np.unique(codes)):  # nearly always one pattern
                value = U32(0)
                for k in range(4):
                    value = value | (byte(p, q, code >> (4 * k) & 15) << U32(8 * k))
                result = value if result is None else np.where((selector & U32(0xFFFF)) == code, value, result)
            put(b, result, where)

        return step

    @staticmethod
    def _bytes_moved(put, x, y, code):
        """PRMT by a constant: bytes that move by the same distance move together."""
        moves = {}
        for k in range(4):
            origin = code >> (4 * k) & 7
            key = origin > 3, 8 * (k - (origin & 3))
            moves[key] = moves.get(key, 0) | 0xFF << (8 * k)
        moves = [(upper, distance, U32(kept)) for (upper, distance), kept in moves.items()]

        def step(b, mask, where):
            words, value = (x(b), y(b)), U32(0)
            for upper, distance, kept in moves:
                word = words[upper]
                word = word << U32(distance) if distance > 0 else word >> U32(-distance) if distance else word
                value = value | (word & kept)
            put(b, value, where)

        return step

    def _popc(self):
        self.allow()
        put, x = self.result(self.args[0]), self.source(self.args[1])
        return lambda b, mask, where: put(b, core.popcount(x(b)), where)

    def _shfl(self):
        self.allow("IDX", "BFLY", "UP", "DOWN")
        if self.args[0] != "PT" or self.args[4] not in ("0x1f", "0x0", "RZ") or self.guard is not None:
            raise self.unknown()
        put, x, n = self.result(self.args[1]), self.source(self.args[2]), self.source(self.args[3])
        kind, clamp = self.order[0], 0 if self.args[4] == "RZ" else int(self.args[4], 16)
        if (kind == "UP") != (clamp == 0):
            raise self.unknown("segment")
        lane = np.arange(LANES)

        def step(b, mask, where):
            by = np.broadcast_to(n(b), b.mask.shape).astype(I64) & 31
            origin = {"IDX": by, "BFLY": lane ^ by, "UP": lane - by, "DOWN": lane + by}[kind]
            origin = np.where((origin < 0) | (origin > 31), lane, origin)
            rows = np.arange(b.W)[:, None]
            if not mask[rows, origin][mask].all():
                raise Fault("shuffle from an inactive lane")
            put(b, np.broadcast_to(x(b), b.mask.shape)[rows, origin], where)

        return step
