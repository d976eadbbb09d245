"""One instruction: its text taken apart, and its operands as functions of a batch."""

from __future__ import annotations

import functools
import re

import numpy as np

from tests.emulators.core import F32, I64, MASK32, U32, U64, Fault

_BANKS = ("0x0", "0x2")  # constant banks that are known
_NOTHING = {"NOP", "YIELD", "NANOSLEEP", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL"}  # no effect on values here
INT_COMPARE = {
    "GE": np.greater_equal,
    "GT": np.greater,
    "LT": np.less,
    "LE": np.less_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def _pieces(text):
    return [piece.strip() for piece in re.split(r",\s*(?![^\[\(\{]*[\]\)\}])", text) if piece.strip()]


def _shared(method):
    """`method` of an operand's text, called once per kernel and text: most operands occur often."""

    @functools.wraps(method)
    def known(self, *text):
        found = self.program.operands
        key = (method, *text)
        if key not in found:
            found[key] = method(self, *text)
        return found[key]

    return known


class Instruction:
    """Turns one instruction's text into a step."""

    def __init__(self, program, pc):
        self.program, self.pc = program, pc
        text = program.text[pc][1]
        self.guard = None
        found = re.match(r"@(!?U?P\w)\s+(.*)$", text)
        if found:
            self.guard, text = found.group(1), found.group(2)
        name, _, rest = text.partition(" ")
        self.name, *mods = name.split(".")
        self.order, self.mods = mods, set(mods)
        self.args = [re.sub(r"\.reuse\b", "", a) for a in _pieces(rest)]

    def unknown(self, why=""):
        return Fault("is not modelled" + (f" ({why})" if why else ""))

    def allow(self, *names):
        extra = self.mods.difference(names)
        if extra:
            raise self.unknown("modifier " + ", ".join(sorted(extra)))

    def build(self):
        """step(batch) -> None | instruction number | STOP"""
        uniform = self.name.startswith("U") and self.name != "UNDEF"
        method = getattr(self, "_" + (self.name[1:] if uniform else self.name).lower(), None)
        if self.name in _NOTHING:
            return lambda b: None
        if method is None:
            raise self.unknown()
        self.uniform = uniform
        body = method()
        if self.guard is None:
            return lambda b: body(b, b.mask, None if b.full else b.mask)
        guard = self.predicate(self.guard)

        def step(b):
            mask = b.mask & guard(b)
            if not mask.any() and not uniform:
                return None
            if uniform:  # a uniform instruction runs once per warp
                keep = b.warps
                b.warps = keep & mask.any(1, keepdims=True)
                target = body(b, mask, mask) if b.warps.any() else None
                b.warps = keep
                return target
            return body(b, mask, mask)

        return step

    @staticmethod
    def register(text):
        """Register number, None for RZ."""
        text = text.lstrip("-~|!").rstrip("|")
        found = re.match(r"R(\d+|Z)", text)
        if not found:
            raise Fault(f"operand {text} is not a register")
        return None if found.group(1) == "Z" else int(found.group(1))

    def checked(self, text, count=1):
        """Register number that must be inside the kernel's allocation."""
        index = self.register(text)
        if index is not None and index + count > self.program.registers:
            raise Fault(f"{text} is past the {self.program.registers} registers of the kernel")
        return index

    def literal(self, text):
        """uint32 of an integer literal or a code label, or None."""
        if re.match(r"-?(0x[0-9a-f]+|\d+)$", text):
            return U32(int(text, 0) & MASK32)
        found = re.match(r"32@(lo|hi)\(\(?\S+ \+ (\.L_\w+)@srel\)?\)$", text)
        if found:
            place = self.program.text[self.program.labels[found.group(2)]][0]
            return U32(place if found.group(1) == "lo" else 0)
        return None

    @_shared
    def source(self, text, part=0, signs=True):
        """function(batch) -> uint32 lanes of an integer operand; `part` 1 is the upper word of a 64-bit operand."""
        text = re.sub(r"\.(64|X4|X8|X16|U32|ROW|COL)\b", "", text)
        constant = self.literal(text)
        if constant is not None:
            if part:
                constant = U32(MASK32 if text.startswith("-") else 0)
            return lambda b: constant
        negate, invert = text.startswith("-"), text.startswith("~")
        if (negate or invert) and not signs:
            raise self.unknown("sign")
        body = text[1:] if negate or invert else text
        if body.startswith("|"):
            raise self.unknown("absolute value of an integer")
        if re.match(r"R(\d+|Z)$", body):
            index = self.checked(body, part + 1)
            if index is None:
                zero = U32(0)
                raw = lambda b: zero
            else:
                raw = lambda b: b.R[index + part]
        elif re.match(r"UR(\d+|Z)$", body):
            index = 63 if body == "URZ" else int(body[2:]) + part
            raw = lambda b: b.UR[index]
        else:
            bank, register, offset = self.constant(body)
            if register is not None:
                raise self.unknown(f"operand {text}")
            raw = lambda b: b.constants.word(bank, offset + 4 * part)
        if negate:
            if part:
                raise self.unknown("negative 64-bit operand")
            return lambda b: ~raw(b) + U32(1)
        return (lambda b: ~raw(b)) if invert else raw

    def constant(self, text):
        """(bank, register or None, byte offset) of a constant operand such as c[0x0][0x160] or c[0x2][R0+0x8].

        In a uniform instruction the register is a uniform one.
        """
        kind = "UR" if self.uniform else "R"
        found = re.match(rf"c\[(\w+)\]\[(?:({kind}\d+)(?:\+(?=0x))?)?(0x[0-9a-f]+)?\]$", text)
        if not found or found.group(1) not in _BANKS:
            raise self.unknown(f"operand {text}")
        bank, register, offset = found.groups()
        index = None if register is None else int(register[2:]) if self.uniform else self.checked(register)
        return int(bank, 16), index, int(offset or "0", 16)

    @_shared
    def real(self, text):
        """function(batch) -> float32 lanes of a floating operand (literals are values here, not patterns)."""
        negate = text.startswith("-") and not re.match(r"-[\d.I]", text)
        body = text[1:] if negate else text
        absolute = body.startswith("|")
        body = body.strip("|")
        found = re.match(r"([+-]?)(INF|QNAN|SNAN)$", body)
        if found or re.match(r"[+-]?\d", body):
            value = (
                float(body.replace("QNAN", "nan").replace("SNAN", "nan")) if not body.lower().startswith("0x") else None
            )
            constant = F32(value) if value is not None else U32(int(body, 16)).view(F32)
            constant = np.abs(constant) if absolute else constant
            constant = -constant if negate else constant
            return lambda b: constant
        raw = self.source(body)
        sign = U32(0x80000000)
        if absolute and negate:
            return lambda b: (raw(b) | sign).view(F32)
        if absolute:
            return lambda b: (raw(b) & ~sign).view(F32)
        if negate:
            return lambda b: (raw(b) ^ sign).view(F32)
        return lambda b: raw(b).view(F32)

    @_shared
    def predicate(self, text):
        invert, name = text.startswith("!"), text.lstrip("!")
        found = re.match(r"(U?)P([0-6T])$", name)
        if not found:
            raise self.unknown(f"predicate {text}")
        index = 7 if found.group(2) == "T" else int(found.group(2))
        if found.group(1):
            return (lambda b: ~b.UP[index]) if invert else (lambda b: b.UP[index])
        return (lambda b: ~b.P[index]) if invert else (lambda b: b.P[index])

    @staticmethod
    def is_predicate(text):
        return re.match(r"!?U?P[0-6T]$", text) is not None

    def result(self, text):
        """function(batch, uint32 value, where) that writes a destination register."""
        if self.uniform:
            index = 63 if text == "URZ" else int(text[2:])
            return lambda b, value, where: b.put_uniform(index, value, where)
        index = self.checked(text)
        return lambda b, value, where: b.put(index, value, where)

    def pair_result(self, text):
        """function(batch, uint64 value, where) that writes a pair of registers."""
        if text in ("RZ", "URZ"):
            return lambda b, value, where: None
        if self.uniform:
            index = int(text[2:])
            put = lambda b, k, word, where: b.put_uniform(index + k, word, where)
        else:
            index = self.checked(text, 2)
            put = lambda b, k, word, where: b.put(index + k, word, where)

        def write(b, value, where):
            put(b, 0, (value & U64(MASK32)).astype(U32), where)
            put(b, 1, (value >> U64(32)).astype(U32), where)

        return write

    def source64(self, text):
        """function(batch) -> uint64 lanes of a pair of registers or constants."""
        low, high = self.source(text), self.source(text, 1)
        return lambda b: low(b).astype(U64) | (high(b).astype(U64) << U64(32))

    @_shared
    def predicate_result(self, text):
        """function(batch, bool value, mask) that writes a predicate; PT discards."""
        if text in ("PT", "UPT"):
            return lambda b, value, mask: None
        if text.startswith("UP"):
            index = int(text[2:])

            def put_uniform(b, value, mask):
                np.copyto(b.UP[index], np.asarray(value)[..., :1] if np.ndim(value) else value, where=b.warps)

            return put_uniform
        index = int(text[1:])
        return lambda b, value, mask: np.copyto(b.P[index], value, where=mask)

    @_shared
    def address(self, text, wide):
        """function(batch) -> int64 (W, 32); `wide`: a plain register is the low half of a 64-bit address."""
        text = re.sub(r"^desc\[[^\]]*\]", "", text)
        terms, offset, needs = [], 0, []
        for piece in re.findall(r"[+-]?[^+-]+", text[1:-1]):
            sign, body = (-1 if piece.startswith("-") else 1), piece.lstrip("+-")
            if re.match(r"(0x[0-9a-f]+|\d+)$", body):
                offset += sign * int(body, 0)
                continue
            found = re.match(r"(U?R)(\d+|Z)((?:\.(?:64|U32|X4|X8|X16))*)$", body)
            if not found or sign < 0:
                raise self.unknown(f"address {text}")
            kind, number, suffix = found.groups()
            if number == "Z":
                continue
            scale = {".X4": 4, ".X8": 8, ".X16": 16}.get(re.sub(r"\.64|\.U32", "", suffix), 1)
            index, pair = (
                int(number),
                ".64" in suffix or (kind == "R" and wide and ".U32" not in suffix and "UR" not in text),
            )
            if kind == "UR":
                terms.append(
                    (
                        lambda index, pair: (
                            lambda b: b.UR[index].astype(I64) | ((b.UR[index + 1].astype(I64) << 32) if pair else 0)
                        )
                    )(index, pair or wide)
                )
            else:
                self.checked(body.split(".")[0], 2 if pair else 1)
                needs.append((index, 2 if pair else 1))
                if pair:
                    terms.append(
                        (lambda index: lambda b: b.R[index].astype(I64) | (b.R[index + 1].astype(I64) << 32))(index)
                    )
                else:
                    terms.append((lambda index, scale: lambda b: b.R[index].astype(I64) * scale)(index, scale))

        def where(b, mask):
            for index, count in needs:
                b.check_known(index, count, mask)
            at = np.full((1, 1), offset, I64)
            for term in terms:
                at = at + term(b)
            return np.broadcast_to(at, b.mask.shape)

        return where

    def _combine(self):
        return np.logical_and if "AND" in self.mods else np.logical_or if "OR" in self.mods else np.logical_xor
