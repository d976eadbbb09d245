"""The vector ALU."""

from __future__ import annotations

import re

import numpy as np

from tests.emulators import core
from tests.emulators.core import F16, F32, F64, I32, I64, MASK32, U16, U32, U64, Fault, fma32
from tests.emulators.gfx90a.arithmetic import RELATIONS
from tests.emulators.gfx90a.instruction import Instruction
from tests.emulators.gfx90a.operands import (
    LANES,
    SREG,
    VCC,
    half_bits,
    lanes64_of,
    lanes_of,
    mask_of,
    raw_lanes,
    read_by,
    scalar_of,
    unpack_mask,
)
from tests.emulators.gfx90a.tables import CLAMPED, FLOAT_RELATIONS, OUT, PACKED16, PACKED32, VALU

_ALIASES = {
    "v_mbcnt_lo_u32_b32": "_v_mbcnt",
    "v_mbcnt_hi_u32_b32": "_v_mbcnt",
    "v_mad_u64_u32": "_mad64",
    "v_mad_i64_i32": "_mad64",
    "v_lshlrev_b64": "_shift64",
    "v_lshrrev_b64": "_shift64",
    "v_ashrrev_i64": "_shift64",
    **dict.fromkeys(
        ("v_add_co_u32", "v_addc_co_u32", "v_sub_co_u32", "v_subb_co_u32", "v_subrev_co_u32", "v_subbrev_co_u32"),
        "_carry",
    ),
}


class Vector(Instruction):
    """The vector ALU: plain, compared, packed, mixed, and with lanes exchanged (DPP)."""

    def vector(self):
        base = self.base
        if self.encoding == "sdwa":
            self.allow("dst_sel", "dst_unused", "src0_sel", "src1_sel")
        elif self.encoding == "dpp":
            return self.dpp()
        elif base.startswith("v_pk_"):
            self.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
            return self.packed()
        elif base.startswith(("v_fma_mix", "v_mad_mix")):
            self.allow("op_sel", "op_sel_hi")
            return self.mixed()
        elif base in CLAMPED or (base in VALU and VALU[base][0] == "f"):
            self.allow("clamp")
        else:
            self.allow()
        found = re.match(r"v_cmp_(\w+?)_([iuf])(16|32|64)$", base)
        if found:
            return self.compare(*found.groups())
        if base in VALU:
            return self.simple(*VALU[base])
        special = getattr(self, "_" + base, None) or getattr(self, _ALIASES.get(base, "_"), None)
        if special is None:
            raise self.unknown()
        return special(*self.operands())

    def simple(self, out, kinds, function):
        target, *sources = self.operands()
        if base_is_fmac := self.base.startswith("v_fmac"):
            sources.append(target)
        if len(sources) != len(kinds):
            raise self.unknown("operand count")
        if "clamp" in self.mods:
            plain = function
            function = CLAMPED.get(self.base) or (
                lambda *values: np.clip(np.nan_to_num(plain(*values), nan=0.0), F32(0), F32(1))
            )
        selects = [self.mods.get(f"src{k}_sel") for k in range(len(sources))]
        fetch = [lanes_of(s, kind, 0, select) for s, kind, select in zip(sources, kinds, selects)]
        finish = OUT[out]
        place = self.mods.get("dst_sel", "DWORD")
        copies = self.base in ("v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32")
        copies = copies and sources[0].kind == "v"
        if place != "DWORD":
            if self.mods.get("dst_unused") not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
                raise self.unknown("dst_unused")
            width, number = place.split("_")
            keep = U32(0xFFFF if width == "WORD" else 0xFF)
            shift = U32(int(number) * (16 if width == "WORD" else 8))
            others = U32(MASK32 ^ (int(keep) << int(shift))) if self.mods["dst_unused"] == "UNUSED_PRESERVE" else U32(0)

        def step(b):
            values = [f(b) for f in fetch]
            result = function(*values)
            if out == "h" and b.clamp_half.any():
                made = np.isinf(result) & ~np.logical_or.reduce([np.isinf(v) for v in np.broadcast_arrays(*values)])
                result = np.where(made & b.clamp_half[:, None], np.copysign(F16(65504), result), result)
            value = finish(result)
            if place != "DWORD":
                value = ((value & keep) << shift) | (b.V[target.index] & others)
            b.put(target.index, value)
            if copies:
                _copy_known(b, target.index, sources[0].index)

        reads = read_by(*sources)
        if base_is_fmac or place != "DWORD":
            reads |= target.registers(1)
        return self.guarded(reads, target.registers(1), step)

    def dpp(self):
        """A VALU instruction whose first source comes from another lane (data parallel primitives)."""
        origin, inside = self._dpp_lanes()
        zero = "bound_ctrl" in self.mods
        target, *sources = self.operands()
        first = sources[0]
        if first.kind != "v":
            raise self.unknown("dpp of a scalar")
        if self.base == "v_mov_b32":
            out, kinds, function = "u", "u", lambda a: a
        elif self.base in VALU:
            out, kinds, function = VALU[self.base]
        else:
            raise self.unknown("dpp")
        if self.base.startswith("v_fmac"):
            sources.append(target)
        plain = lanes_of(first, kinds[0])
        others = [lanes_of(s, kind) for s, kind in zip(sources[1:], kinds[1:])]
        finish = OUT[out]
        empty = U32(0).astype({"f": F32, "h": F16, "i": I32}.get(kinds[0], U32))

        def step(b):
            # a lane whose source lane is outside or inactive reads 0 with bound_ctrl, else it is not written
            valid = inside[None, :] & b.mask[:, origin] & self._dpp_rows
            moved = np.where(valid, plain(b)[:, origin], empty)
            value = finish(function(moved, *[f(b) for f in others]))
            known = (b.known_lanes[first.index] | b.known[first.index])[:, origin] | ~valid
            write = b.mask & self._dpp_rows & (valid | zero)
            before = b.known_lanes[target.index] | b.known[target.index]
            np.copyto(b.V[target.index], value, where=write)
            if self.base != "v_mov_b32":
                known = np.ones_like(known)
            b.known_lanes[target.index] = np.where(write, known, before)
            b.known[target.index] = bool(b.known_lanes[target.index].all())

        return self.guarded(read_by(*sources, target), target.registers(1), step)

    def _dpp_lanes(self):
        """(source lane of every lane, whether it lies inside the row) of a DPP control."""
        self.allow(
            "row_shl",
            "row_shr",
            "row_ror",
            "quad_perm",
            "row_bcast",
            "row_newbcast",
            "row_mirror",
            "row_half_mirror",
            "row_mask",
            "bank_mask",
            "bound_ctrl",
        )
        lane = np.arange(LANES)
        rows, banks = int(self.mods.get("row_mask", "0xf"), 0), int(self.mods.get("bank_mask", "0xf"), 0)
        self._dpp_rows = ((rows >> (lane // 16)) & (banks >> (lane % 16 // 4)) & 1).astype(bool)
        row, column, inside = lane & ~15, lane & 15, np.ones(LANES, bool)
        mods = self.mods
        if "row_bcast" in mods:
            width = int(mods["row_bcast"]) + 1
            if width not in (16, 32):
                raise self.unknown("dpp control")
            origin = lane // width * width - 1
            inside = origin >= 0
            return np.maximum(origin, 0), inside & (lane % (2 * width) >= width if width == 32 else True)
        if "row_shl" in mods:
            column = column + int(mods["row_shl"])
        elif "row_shr" in mods:
            column = column - int(mods["row_shr"])
        elif "row_ror" in mods:
            column = (column - int(mods["row_ror"])) & 15
        elif "row_newbcast" in mods:
            column = np.full(LANES, int(mods["row_newbcast"]))
        elif "row_mirror" in mods:
            column = 15 - column
        elif "row_half_mirror" in mods:
            column = column ^ 7
        elif "quad_perm" in mods:
            order = np.array([int(x) for x in mods["quad_perm"].strip("[]").split(",")])
            column = (column & ~3) + order[column & 3]
        else:
            raise self.unknown("dpp control")
        return row + (column & 15), (column >= 0) & (column < 16)

    def packed(self):
        base, (target, *sources) = self.base, self.operands()

        def flags(name, default):
            value = self.mods.get(name)
            return [int(x) for x in value.strip("[]").split(",")] if value else [default] * len(sources)

        low, high = flags("op_sel", 0), flags("op_sel_hi", 1)
        neg_low, neg_high = flags("neg_lo", 0), flags("neg_hi", 0)
        if base == "v_pk_mov_b32":
            x, y = sources
            fx, fy = raw_lanes(x, low[0]), raw_lanes(y, low[1])

            def move(b):
                first, second = np.array(fx(b)), np.array(fy(b))
                b.put(target.index, first)
                b.put(target.index + 1, second)

            return self.guarded(read_by(*sources), target.registers(2), move)
        if base in PACKED32:
            function = PACKED32[base]

            def fetch(source, part, negate):
                raw = lanes_of(source, "f", part if source.kind != "k" else 0)
                return (lambda b: -raw(b)) if negate else raw

            first = [fetch(s, p, g) for s, p, g in zip(sources, low, neg_low)]
            second = [fetch(s, p, g) for s, p, g in zip(sources, high, neg_high)]

            def step(b):
                one = np.array(function(*[f(b) for f in first]), F32)
                two = np.array(function(*[f(b) for f in second]), F32)
                b.put(target.index, one.view(U32))
                b.put(target.index + 1, two.view(U32))

            return self.guarded(read_by(*sources), target.registers(2), step)
        if base in PACKED16:
            kind, function = PACKED16[base]

            def half(source, upper, negate):
                if source.kind == "k":
                    value = int(half_bits(source.real)) if source.real is not None else source.bits
                    constant = U16((value >> 16 if upper else value) & 0xFFFF)
                    raw = lambda b: constant
                else:
                    shift, lanes = U32(16 * upper), raw_lanes(source)
                    raw = lambda b: ((lanes(b) >> shift) & U32(0xFFFF)).astype(U16)
                if negate:
                    plain = raw
                    raw = lambda b: plain(b) ^ U16(0x8000)
                return (lambda b: raw(b).view(F16)) if kind == "h" else raw

            first = [half(s, p, g) for s, p, g in zip(sources, low, neg_low)]
            second = [half(s, p, g) for s, p, g in zip(sources, high, neg_high)]

            def step(b):
                one, two = function(*[f(b) for f in first]), function(*[f(b) for f in second])
                one, two = (np.asarray(x).view(U16).astype(U32) for x in (one, two))
                b.put(target.index, one | (two << U32(16)))

            return self.guarded(read_by(*sources), target.registers(1), step)
        raise self.unknown()

    def mixed(self):
        target, *sources = self.operands()
        chosen = [int(x) for x in self.mods.get("op_sel", "[0,0,0]").strip("[]").split(",")]
        is_half = [int(x) for x in self.mods.get("op_sel_hi", "[0,0,0]").strip("[]").split(",")]

        def fetch(source, upper, half):
            if not half:
                return lanes_of(source, "f")
            if source.kind == "k" or source.negate or source.absolute:
                raise self.unknown("half operand")
            lanes, shift = raw_lanes(source), U32(16 * upper)
            return lambda b: ((lanes(b) >> shift) & U32(0xFFFF)).astype(U16).view(F16).astype(F32)

        values = [fetch(*item) for item in zip(sources, chosen, is_half)]
        if self.base in ("v_fma_mix_f32", "v_mad_mix_f32"):
            return self.guarded(
                read_by(*sources),
                target.registers(1),
                lambda b: b.put(target.index, fma32(*[f(b) for f in values]).view(U32)),
            )
        upper = self.base.endswith("hi_f16")
        if self.base not in ("v_fma_mixlo_f16", "v_fma_mixhi_f16"):
            raise self.unknown()

        def step(b):
            half = fma32(*[f(b) for f in values]).astype(F16).view(U16).astype(U32)
            old = b.V[target.index]
            b.put(target.index, (old & U32(0xFFFF)) | (half << U32(16)) if upper else (old & U32(0xFFFF0000)) | half)

        return self.guarded(read_by(*sources) | target.registers(1), target.registers(1), step)

    def compare(self, relation, kind, width):
        target, x, y = self.operands()
        selects = self.mods.get("src0_sel"), self.mods.get("src1_sel")
        if width == "64":
            view = {"i": I64, "u": U64, "f": F64}[kind]
            raw = lanes64_of(x), lanes64_of(y)
            fx, fy = ((lambda b, f=f: f(b).view(view)) for f in raw)
        elif width == "16":
            if kind == "f":
                fx, fy = (lanes_of(o, "h", 0, s) for o, s in zip((x, y), selects))
            else:
                view = np.int16 if kind == "i" else U16
                raw = [lanes_of(o, "u", 0, s) for o, s in zip((x, y), selects)]
                fx, fy = ((lambda b, f=f: f(b).astype(U16).view(view)) for f in raw)
        else:
            fx, fy = (lanes_of(o, kind, 0, s) for o, s in zip((x, y), selects))
        if kind == "f" and relation in FLOAT_RELATIONS:
            function = FLOAT_RELATIONS[relation]
        elif relation in RELATIONS and not (kind == "f" and relation == "ne"):
            function = RELATIONS[relation]
        else:
            raise self.unknown()
        return self.guarded(
            read_by(x, y), target.registers(2), lambda b: b.put_mask(target.index, function(fx(b), fy(b)))
        )

    # ---- instructions with a form of their own; named after the mnemonic
    def _v_readfirstlane_b32(self, target, x):
        def step(b):
            lane = b.mask.argmax(1)
            wave = np.arange(b.W)
            if not b.known[x.index] and not b.known_lanes[x.index][wave, lane][b.waves].all():
                raise Fault("reads a lane that was never written")
            b.sput(target.index, b.V[x.index][wave, lane])

        return self.guarded(x.registers(), target.registers(1), step)

    def _v_readlane_b32(self, target, x, lane):
        index = scalar_of(lane)
        return self.guarded(
            read_by(x, lane),
            target.registers(1),
            lambda b: b.sput(target.index, b.V[x.index][np.arange(b.W), np.broadcast_to(index(b) & U32(63), (b.W,))]),
        )

    def _v_writelane_b32(self, target, x, lane):
        index, value = scalar_of(lane), scalar_of(x)

        def step(b):
            where = np.zeros(b.mask.shape, bool)
            where[np.arange(b.W), np.broadcast_to(index(b) & U32(63), (b.W,))] = True
            where &= b.waves[:, None]
            np.copyto(b.V[target.index], np.broadcast_to(value(b), (b.W,))[:, None], where=where)
            b.known_lanes[target.index] |= where

        return self.guarded(read_by(x, lane, target), target.registers(1), step)

    def _v_mbcnt(self, target, x, y):
        mask, add = lanes_of(x), lanes_of(y)
        upper = self.base == "v_mbcnt_hi_u32_b32"
        below = np.clip(np.arange(LANES) - (32 if upper else 0), 0, 32)
        ones = np.array([(1 << int(k)) - 1 for k in below], U64).astype(U32)
        return self.guarded(
            read_by(x, y), target.registers(1), lambda b: b.put(target.index, core.popcount(mask(b) & ones) + add(b))
        )

    def _carry(self, target, carry, x, y, carry_in=None):
        """v_add_co / v_addc_co / v_sub_co / v_subb_co / v_subrev_co / v_subbrev_co"""
        fx, fy = lanes_of(x), lanes_of(y)
        extra = mask_of(carry_in) if carry_in is not None else None
        add, reverse = self.base.startswith("v_add"), "rev" in self.base

        def step(b):
            one, two = fx(b).astype(I64), fy(b).astype(I64)
            more = extra(b) if extra else 0
            total = one + two + more if add else two - one - more if reverse else one - two - more
            b.put(target.index, total.astype(U32))
            b.put_mask(carry.index, (total >> 32) != 0)

        reads = read_by(x, y) | (carry_in.registers() if carry_in is not None else frozenset())
        return self.guarded(reads, target.registers(1) | carry.registers(2), step)

    def _mad64(self, target, carry, x, y, z):
        """v_mad_u64_u32, v_mad_i64_i32"""
        signed = self.base == "v_mad_i64_i32"
        fx, fy, fz = lanes_of(x, "i" if signed else "u"), lanes_of(y, "i" if signed else "u"), lanes64_of(z)

        def step(b):
            if signed:
                product = (fx(b).astype(I64) * fy(b).astype(I64)).astype(U64)
            else:
                product = fx(b).astype(U64) * fy(b).astype(U64)
            addend = fz(b)
            total = product + addend
            b.put64(target.index, total)
            b.put_mask(carry.index, total < addend)

        return self.guarded(read_by(x, y, z), target.registers(2) | carry.registers(2), step)

    def _shift64(self, target, x, y):
        """v_lshlrev_b64, v_lshrrev_b64, v_ashrrev_i64"""
        amount, value, name = lanes_of(x), lanes64_of(y), self.base

        def step(b):
            by, bits = amount(b).astype(U64) & U64(63), value(b)
            if name == "v_lshlrev_b64":
                bits = bits << by
            elif name == "v_lshrrev_b64":
                bits = bits >> by
            else:
                bits = (bits.astype(I64) >> by.astype(I64)).astype(U64)
            b.put64(target.index, bits)

        return self.guarded(read_by(x, y), target.registers(2), step)

    def _v_cndmask_b32(self, target, x, y, condition):
        fx, fy = (lanes_of(o, "u", 0, self.mods.get(s)) for o, s in ((x, "src0_sel"), (y, "src1_sel")))
        choose = mask_of(condition)
        if self.mods.get("dst_sel", "DWORD") != "DWORD":
            raise self.unknown("dst_sel")
        return self.guarded(
            read_by(x, y, condition),
            target.registers(1),
            lambda b: b.put(target.index, np.where(choose(b), fy(b), fx(b))),
        )

    def _v_perm_b32(self, target, x, y, z):
        fx, fy, fz = lanes_of(x), lanes_of(y), lanes_of(z)
        constant = int(z.bits) if z.kind == "k" else None

        def step(b):
            high, low = fx(b), fy(b)
            selector = fz(b)
            if constant is None and (first := np.ravel(selector)[0]) == selector.min() == selector.max():
                chosen = int(first)
            else:
                chosen = constant
            if chosen is not None:  # the usual case: one pattern for all lanes
                result = U32(0)
                for k in range(4):
                    s = chosen >> (8 * k) & 255
                    if s >= 8:
                        byte = U32(0 if s == 12 else 255)
                        if s < 12:
                            raise Fault("v_perm with sign selectors is not modelled")
                    else:
                        byte = ((low if s < 4 else high) >> U32(8 * (s & 3))) & U32(255)
                    result = result | (byte << U32(8 * k))
            else:
                both = np.stack(
                    [np.broadcast_to((w >> U32(8 * k)) & U32(255), b.mask.shape) for w in (low, high) for k in range(4)]
                )
                selector = np.broadcast_to(selector, b.mask.shape)
                result = U32(0)
                for k in range(4):
                    s = (selector >> U32(8 * k)) & U32(255)
                    if ((s >= 8) & (s < 12) & b.mask).any():
                        raise Fault("v_perm with sign selectors is not modelled")
                    byte = np.take_along_axis(both, np.minimum(s, 7)[None].astype(I64), 0)[0]
                    byte = np.where(s < 8, byte, np.where(s == 12, U32(0), U32(255)))
                    result = result | (byte << U32(8 * k))
            b.put(target.index, result)

        return self.guarded(read_by(x, y, z), target.registers(1), step)

    def _v_div_scale_f32(self, target, flag, x, y, z):
        fx, fy, fz = lanes_of(x, "f"), lanes_of(y, "f"), lanes_of(z, "f")

        def step(b):
            value, low, top = np.broadcast_arrays(fx(b), fy(b), fz(b), np.zeros(b.mask.shape))[:3]
            exponent = lambda v: ((np.ascontiguousarray(v).view(U32) >> U32(23)) & U32(255)).astype(I32)
            denormal = lambda v: (v != 0) & (np.abs(v) < 2.0**-126)
            quotient = top.astype(F64) / low
            zero = (low == 0) | (top == 0)
            huge = ~zero & (exponent(top) - exponent(low) >= 96)
            tiny_low = ~zero & ~huge & denormal(low)
            small = ~zero & ~huge & ~tiny_low & denormal(quotient)
            tiny_top = ~zero & ~huge & ~tiny_low & ~small & (exponent(top) <= 23)
            up = (huge & (value == low)) | tiny_low | (small & (value == top)) | tiny_top
            result = np.where(up, np.ldexp(value, 64), value)
            result = np.where(zero, F32(np.nan), result).astype(F32)
            b.put(target.index, result.view(U32))
            b.put_mask(flag.index, huge | small)

        return self.guarded(read_by(x, y, z), target.registers(1) | flag.registers(2), step)

    def _v_div_fmas_f32(self, target, x, y, z):
        fx, fy, fz = lanes_of(x, "f"), lanes_of(y, "f"), lanes_of(z, "f")

        def step(b):
            addend = fz(b)
            value = fma32(fx(b), fy(b), addend)
            scaled = unpack_mask(b.S[VCC : VCC + 2])
            if (scaled & b.mask).any():
                large = ((addend.view(U32) >> U32(23)) & U32(255)) > 127
                value = np.where(scaled, np.ldexp(value, np.where(large, 64, -64)), value).astype(F32)
            b.put(target.index, value.view(U32))

        reads = read_by(x, y, z) | {SREG + VCC, SREG + VCC + 1}
        return self.guarded(reads, target.registers(1), step)


def _copy_known(b, target, source):
    """A copied lane is as undefined as its source."""
    if b.known[source]:
        return
    before = b.known_lanes[target] | b.known[target]
    b.known_lanes[target] = np.where(b.mask, b.known_lanes[source], before)
    b.known[target] = bool(b.known_lanes[target].all())
