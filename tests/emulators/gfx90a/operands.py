"""Operands: registers and constants, and functions that fetch their lanes from a batch."""

from __future__ import annotations

import functools
import re
import struct

import numpy as np

from tests.emulators.core import F16, F32, I32, MASK32, U16, U32, U64, Fault

LANES = 64
VCC, EXEC, _M0 = 106, 126, 124
_SCALARS = {
    "vcc": (VCC, 2),
    "exec": (EXEC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (_M0, 1),
    "flat_scratch": (102, 2),
    "xnack_mask": (104, 2),
}
SREG = 1024  # scalar register k is number 1024 + k in the scoreboard


class Operand:
    """kind: "v" vector register, "s" scalar register, "k" constant, "off".

    index/count: registers; bits: constant as 32-bit pattern; real: value of a floating inline constant."""

    __slots__ = ("absolute", "bits", "count", "high", "index", "kind", "negate", "real", "text")

    def __init__(self, text, program):
        self.text, self.negate, self.absolute, self.real, self.count = text, False, False, None, 1
        if re.match(r"-[vsa|(\[]", text):
            self.negate, text = True, text[1:]
        wrapped = re.match(r"neg\((.*)\)$", text)
        if wrapped:
            self.negate, text = True, wrapped.group(1)
        wrapped = re.match(r"\|(.*)\|$", text) or re.match(r"abs\((.*)\)$", text)
        if wrapped:
            self.absolute, text = True, wrapped.group(1)
        found = re.match(r"([vsa])(\d+)$", text) or re.match(r"([vsa])\[(\d+):(\d+)\]$", text)
        if found:
            self.kind, self.index = found.group(1), int(found.group(2))
            if found.lastindex == 3:
                self.count = int(found.group(3)) - self.index + 1
            if self.kind == "s":
                if self.index + self.count > 102:
                    raise Fault(f"{text} is past the scalar registers")
            else:
                limit = program.arch_vgprs if self.kind == "v" else program.total_vgprs - program.arch_vgprs
                if self.index + self.count > limit:
                    raise Fault(f"{text} is past the {limit} registers that the kernel descriptor allocates")
                if self.kind == "a":
                    self.kind, self.index = "v", self.index + program.arch_vgprs
        elif text in _SCALARS:
            self.kind, (self.index, self.count) = "s", _SCALARS[text]
        elif text == "off":
            self.kind, self.index = "off", 0
        elif re.match(r"-?\d+$|0x[0-9a-f]+$", text):
            value = int(text, 0)
            self.kind, self.bits, self.high = "k", value & MASK32, MASK32 if value < 0 else 0
        elif re.match(r"-?\d+\.\d+(e[+-]?\d+)?$", text):
            self.kind, self.real, self.high = "k", float(text), 0
            (self.bits,) = struct.unpack("<I", struct.pack("<f", self.real))
        else:
            raise Fault(f"operand {text} is not modelled")

    def registers(self, count=None):
        """Scoreboard numbers of the registers named here."""
        if self.kind not in ("v", "s"):
            return frozenset()
        return _numbers(self.index + (SREG if self.kind == "s" else 0), count or self.count)


@functools.cache
def _numbers(first, count):
    return frozenset(range(first, first + count))


def split(text):
    """Split operands at commas outside brackets."""
    return [piece.strip() for piece in re.split(r",\s*(?![^\[]*\])(?![^(]*\))", text) if piece.strip()]


def read_by(*operands):
    return frozenset().union(*(o.registers() for o in operands))


# ---- fetchers: operand -> function(batch) -> array that broadcasts to (waves, 64), or (waves,) for scalars
def raw_lanes(operand, part=0):
    """uint32 lanes of the operand's 32-bit part, without modifiers."""
    if operand.kind == "v":
        index = operand.index + part
        return lambda b: b.V[index]
    if operand.kind == "s":
        index = operand.index + part
        return lambda b: b.S[index][:, None]
    constant = U32(operand.high if part else operand.bits)
    return lambda b: constant


def half_bits(real):
    return U32(np.float16(real).view(U16))


def lanes_of(operand, kind="u", part=0, select=None):
    """Typed lanes: kind "u" uint32, "i" int32, "f" float32, "h" float16 (low half), "x" uint16 as uint32."""
    if kind == "h" and operand.kind == "k" and operand.real is not None:
        constant = half_bits(operand.real)
        raw = lambda b: constant
    else:
        raw = raw_lanes(operand, part)
    if select is not None:
        raw = _selected(raw, select)
    if operand.negate or operand.absolute:
        plain, sign = raw, U32(0x8000 if kind == "h" else 0x80000000)
        if operand.absolute:
            plain = (lambda inner: lambda b: inner(b) & ~sign)(plain)
        if operand.negate:
            plain = (lambda inner: lambda b: inner(b) ^ sign)(plain)
        raw = plain
    if kind == "u":
        return raw
    if kind == "i":
        return lambda b: raw(b).view(I32)
    if kind == "f":
        return lambda b: raw(b).view(F32)
    if kind == "h":
        return lambda b: raw(b).astype(U16).view(F16)
    if kind == "x":
        return lambda b: raw(b) & U32(0xFFFF)
    raise AssertionError(kind)


def _selected(raw, select):
    """SDWA source selection such as "WORD_1", "BYTE_3"."""
    if select == "DWORD":
        return raw
    width, number = select.split("_")
    shift = U32(int(number) * (16 if width == "WORD" else 8))
    keep = U32(0xFFFF if width == "WORD" else 0xFF)
    return lambda b: (raw(b) >> shift) & keep


def lanes64_of(operand):
    """uint64 lanes of a register pair or constant."""
    low, high = raw_lanes(operand, 0), raw_lanes(operand, 1)
    return lambda b: low(b).astype(U64) | (high(b).astype(U64) << U64(32))


def scalar_of(operand, part=0):
    """uint32 (waves,) or constant."""
    if operand.kind == "s":
        index = operand.index + part
        return lambda b: b.S[index]
    if operand.kind != "k":
        raise Fault(f"scalar operand {operand.text}")
    constant = U32(operand.high if part else operand.bits)
    return lambda b: constant


def scalar64_of(operand):
    low, high = scalar_of(operand, 0), scalar_of(operand, 1)
    return lambda b: low(b).astype(U64) | (high(b).astype(U64) << U64(32))


def mask_of(operand):
    """bool (waves, 64) of a scalar register pair, or a constant."""
    if operand.kind == "k":
        words = np.array([operand.bits, operand.high], U32)
        constant = np.unpackbits(words.view(np.uint8), bitorder="little").view(bool)
        return lambda b: constant
    index = operand.index
    return lambda b: unpack_mask(b.S[index : index + 2])


def unpack_mask(pair):
    """(2, waves) uint32 -> (waves, 64) bool."""
    words = np.ascontiguousarray(pair.T)
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)


def pack_mask(mask):
    """(waves, 64) bool -> (waves, 2) uint32."""
    return np.packbits(mask, axis=1, bitorder="little").view(U32)
