"""Functional, strict interpreter for the SASS that ptxas emits for Triton matmuls on sm_80.

It executes the bytes of a cubin, decoded by `nvdisasm`, on numpy arrays.  HMMA/IMMA/LDSM follow the PTX ISA's
published fragment layouts of mma.m16n8k* and ldmatrix; integer opcodes follow their names and were checked through
results.  Cubins of the same PTX assembled for sm_86, sm_89 and sm_90 use the same opcodes and run too (so results
can be calibrated on such a device).  With ``strict=True`` it is stricter than the hardware on purpose:

  * device memory: exact bounds of the given buffers, read-only and write-once modes, natural alignment
  * shared memory: only the bytes that the launch grants; reading bytes never written, and data races between warps
    inside one barrier interval, are faults; cp.async data appears only after DEPBAR
  * an indirect branch (BRX) may only reach the targets declared for it
  * a register that was never written in an active lane must not feed a store, an address or an MMA; registers start
    as NaN patterns

Not modelled: time, scoreboards and stall counts (control bits), caches and the memory model, real tensor-core
rounding (choose "round" or "chop"), exact bits of MUFU (correctly rounded here), named barriers, wgmma/TMA.
An instruction or modifier that is not known raises `Fault` when it is reached; nothing is skipped.
"""

from __future__ import annotations

import functools
import re
import struct

import numpy as np

from tests.emulators import core, elf
from tests.emulators.core import (
    F16,
    F32,
    F64,
    I32,
    I64,
    MASK32,
    U16,
    U32,
    U64,
    Fault,
    Fragment,
    Memory,
    Shared,
    Stats,
    flush,
    fma32,
    odd_sum,
)

LANES = 32
_STOP = -1  # a step returns this when it has changed the fragments itself
_STACK_TOP = 0xFFFFF0  # what constant bank 0 holds as the initial stack pointer (offset 0x28)
_ARCHS = ("sm80", "sm86", "sm87", "sm89", "sm90")
_LABEL = re.compile(r"`?\(?(\.L_\w+)\)?")
_BANKS = ("0x0", "0x2")  # constant banks that are known


# ------------------------------------------------------------------------------------------- program
class _Program:
    """One kernel of a cubin: disassembly and decoded steps (shared by all launches)."""

    def __init__(self, image, symbol, nvdisasm):
        info = elf.read(image)
        if info.arch not in _ARCHS:
            raise Fault(f"the image is for {info.arch}, not one of {', '.join(_ARCHS)}")
        if symbol not in info.kernels:
            raise Fault(f"no kernel {symbol!r}; the image has {sorted(info.kernels)}")
        self.kernel = info.kernels[symbol]
        offset, size = self.kernel.table
        self.table = image[offset : offset + size]
        self.registers = self.kernel.regs
        self.text, self.labels, self.index = [], {}, {}
        listing, inside, pending = core.disassembly([nvdisasm, "-c"], image, ".cubin"), False, []
        for line in listing.splitlines():
            found = re.match(r"\s*\.section\s+\.text\.([^\s,]+)", line)
            if found:
                inside, pending = found.group(1) == symbol, []
            elif inside:
                label = re.match(r"^(\S+):", line)
                found = re.match(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line)
                if label:
                    pending.append(label.group(1))
                elif found:
                    for name in pending:
                        self.labels[name] = len(self.text)
                    pending = []
                    self.index[int(found.group(1), 16)] = len(self.text)
                    self.text.append((int(found.group(1), 16), found.group(2)))
        if not self.text:
            raise Fault(f"nvdisasm printed no instructions of {symbol}")
        names = " ".join(text for _, text in self.text)
        self.shared_unit = (
            1
            if re.search(r"\b(LDS|STS)\S*\.[US]8\b", names)
            else 2
            if re.search(r"\b(LDS|STS)\S*\.[US]16\b", names)
            else 4
        )
        self.steps = [None] * len(self.text)

    def step(self, pc):
        if not 0 <= pc < len(self.text):
            raise Fault("runs past the end of the function")
        self.steps[pc] = step = _Decoder(self, pc).build()
        return step


@functools.lru_cache(maxsize=64)
def _program(image, symbol, nvdisasm):
    return _Program(image, symbol, nvdisasm)


# --------------------------------------------------------------------------------------------- batch
class _Batch:
    """Registers and memory of the warps that run together.  W = warps.

    R     uint32 (registers, W, 32); P bool [8] of (W, 32); UR uint32 (64, W, 1); UP bool [8] of (W, 1)
    mask  bool (W, 32): lanes of the running fragment; full: all of them; warps bool (W, 1): their warps
    cp    (open, groups): cp.async copies not yet committed, and committed groups not yet waited for
    """

    def __init__(self, program, ids, warps_in_group, block, memory, constants, shared_bytes, options):
        self.program, self.memory, self.constants, self.options = program, memory, constants, options
        self.strict = options["strict"]
        groups = len(ids)
        self.W = count = groups * warps_in_group
        self.group = np.repeat(np.arange(groups), warps_in_group)
        self.wave = np.tile(np.arange(warps_in_group), groups)
        self.ids, self.block = ids, block
        shape = (count, LANES)
        self.R = core.poison((program.registers + 1, *shape), 1)
        self.known = [False] * (program.registers + 1)
        self.known_lanes = np.zeros(self.R.shape, bool)
        self.P = [np.zeros(shape, bool) for _ in range(8)]
        self.P[7][:] = True
        self.UR = (
            np.random.default_rng(2).integers(0x20000000, 0xF0000000, (64, 1, 1), dtype=np.uint32).repeat(count, 1)
        )
        self.UR[63] = 0
        self.UP = [np.zeros((count, 1), bool) for _ in range(8)]
        self.UP[7][:] = True
        self.shared = Shared(groups, shared_bytes, program.shared_unit, self.strict)
        self.lane_group = np.broadcast_to(self.group[:, None], shape)
        self.lane_wave = np.broadcast_to(self.wave[:, None], shape)
        self.thread = (self.lane_wave * LANES + np.arange(LANES)).astype(U32)
        frame = program.kernel.stack
        self.local = np.random.default_rng(3).integers(0, 256, (count * LANES, frame), dtype=np.uint8)
        self.local_known = np.zeros(self.local.shape, bool)
        self.barriers = np.zeros((16, *shape), bool)  # convergence barriers B0..B15
        self.alive = self.thread < block[0] * block[1] * block[2]
        self.fragments = [Fragment(0, self.alive, ([], []))]
        self.counts, self.executed = {}, 0

    # ---- scheduling (called by core.run_fragments)
    def enter(self, fragment):
        self.fragment, self.mask = fragment, fragment.lanes
        self.full = bool(self.mask.all())
        self.warps = self.mask.any(1, keepdims=True)
        self.nwarps = int(self.warps.sum())
        self.cp = fragment.queues
        self.active = self.mask

    def merge(self, one, other):
        idle = ([], []) in (one.queues, other.queues)  # one of them has no cp.async under way
        if not idle and (one.queues[0] or other.queues[0] or len(one.queues[1]) != len(other.queues[1])):
            return False
        one.lanes = one.lanes | other.lanes
        one.queues = (
            one.queues[0] + other.queues[0],
            [a + b for a, b in zip(one.queues[1], other.queues[1])] or one.queues[1] or other.queues[1],
        )
        return True

    def release(self):
        """Nothing can run: open convergence barriers that are complete, else the block barrier."""
        together = {}
        for fragment in self.fragments:
            if fragment.waiting != "block":
                together.setdefault((fragment.pc, fragment.waiting), []).append(fragment)
        moved = False
        for (_, waiting), fragments in together.items():
            lanes = np.logical_or.reduce([f.lanes for f in fragments])
            if not (self._needed(waiting) & self._others(fragments) & lanes.any(1, keepdims=True)).any():
                for fragment in fragments:
                    fragment.waiting, fragment.pc = None, fragment.pc + 1
                moved = True
        if moved:
            return
        if any(f.waiting != "block" for f in self.fragments):
            raise Fault("deadlock: lanes wait for a convergence barrier that others never reach")
        for fragment in self.fragments:
            fragment.waiting = None
        self.shared.epoch += 1

    def _needed(self, waiting):
        kind, value = waiting
        if kind == "sync":
            return self.barriers[value]
        return np.array([value >> k & 1 for k in range(LANES)], bool)[None, :]

    def _others(self, fragments):
        """Lanes that are alive but in none of `fragments`."""
        lanes = [f.lanes for f in self.fragments if f not in fragments]
        return np.logical_or.reduce(lanes) if lanes else np.zeros_like(self.mask)

    def converge(self, waiting):
        """BSYNC / WARPSYNC: None to go on, or _STOP to wait for other lanes of the same warps."""
        others = self._others([self.fragment])
        if not (self._needed(waiting) & others & self.warps).any():
            return None
        self.fragment.waiting = waiting
        self.fragment.pc = self.pc
        return _STOP

    def split(self, taken, target):
        """Lanes `taken` go to instruction `target`, the rest of the fragment to the next one."""
        if not taken.any():
            return None
        if np.array_equal(taken, self.mask):
            return target
        stay = self.mask & ~taken
        queues = self.cp
        self.fragment.lanes, self.fragment.pc = stay, self.pc + 1
        self.fragment.queues = _share(queues, stay)
        self.fragments.append(Fragment(target, taken, _share(queues, taken)))
        return _STOP

    def advance(self, fragment, limit):
        """Run `fragment` until it stops or reaches `limit` (pc of another fragment)."""
        program, counts, pc = self.program, self.counts, fragment.pc
        steps, nwarps, budget = program.steps, self.nwarps, self.options["max_instructions"]
        while True:
            self.pc = pc
            try:
                step = (steps[pc] if pc < len(steps) else None) or program.step(pc)
                counts[pc] = counts.get(pc, 0) + nwarps
                self.executed += nwarps
                if self.executed > budget:
                    raise Fault(f"the launch exceeded {budget} instructions")
                target = step(self)
            except Fault as fault:
                raise self._located(fault, pc) from None
            if target is None:
                pc += 1
            elif target == _STOP:
                return
            else:
                pc = target
            if limit is not None and pc >= limit:
                fragment.pc = pc
                return

    def _located(self, fault, pc):
        address, text = self.program.text[pc] if pc < len(self.program.text) else (16 * pc, "?")
        place = f"pc {address:#06x} `{text}`"
        if fault.lane is not None and fault.lane < int(self.active.sum()):
            warp, lane = (int(x) for x in np.argwhere(self.active)[fault.lane])
            place += f" CTA {tuple(int(x) for x in self.ids[self.group[warp]])} warp {int(self.wave[warp])} lane {lane}"
        return Fault(f"{place}: {fault}", fault.lane)

    # ---- state changes; `mask` is the instruction's lanes, None for "all lanes of the batch"
    def put(self, index, value, mask):
        """R[index] := uint32 value; index None is RZ."""
        if index is None:
            return
        if mask is None:
            self.R[index] = value
            self.known[index] = True
        else:
            np.copyto(self.R[index], value, where=mask)
            if not self.known[index]:
                self.known_lanes[index] |= mask

    def put_uniform(self, index, value):
        if index != 63:
            np.copyto(self.UR[index], value, where=self.warps)

    def check_known(self, index, count, mask):
        if not self.strict or index is None:
            return
        for k in range(index, index + count):
            if not self.known[k]:
                bad = ~self.known_lanes[k] & mask
                if bad.any():
                    raise Fault(f"uses R{k}, which was never written in an active lane", int(bad[mask].argmax()))


def _share(queues, lanes):
    """The part of cp.async queues that belongs to `lanes` (bool (W, 32))."""
    flat = lanes.reshape(-1)

    def part(copies):
        return [
            tuple(item[keep] if isinstance(item, np.ndarray) else item for item in copy)
            for copy in copies
            for keep in [flat[copy[0]]]
            if keep.any()
        ]

    return part(queues[0]), [part(group) for group in queues[1]]


# ------------------------------------------------------------------------------------------ decoding
def _split(text):
    return [piece.strip() for piece in re.split(r",\s*(?![^\[\(\{]*[\]\)\}])", text) if piece.strip()]


_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_CACHE = {
    "E",
    "CONSTANT",
    "STRONG",
    "WEAK",
    "GPU",
    "SYS",
    "CTA",
    "SM",
    "LTC64B",
    "LTC128B",
    "LTC256B",
    "EF",
    "EL",
    "LU",
    "NA",
    "BYPASS",
    "ACCESS",
    "PRIVATE",
    "ZFILL",
}
_NOTHING = {"NOP", "YIELD", "NANOSLEEP", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL"}  # no effect on values here
_INT_COMPARE = {
    "GE": np.greater_equal,
    "GT": np.greater,
    "LT": np.less,
    "LE": np.less_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


class _Decoder:
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
        self.args = [re.sub(r"\.reuse\b", "", a) for a in _split(rest)]

    def unknown(self, why=""):
        return Fault("is not modelled" + (f" ({why})" if why else ""))

    def allow(self, *names):
        extra = self.mods.difference(names)
        if extra:
            raise self.unknown("modifier " + ", ".join(sorted(extra)))

    def build(self):
        """step(batch) -> None | instruction number | _STOP"""
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

    # ---------------------------------------------------------------------------------------- operands
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
        """(bank, register or None, byte offset) of a constant operand such as c[0x0][0x160] or c[0x2][R0+0x8]."""
        found = re.match(r"c\[(\w+)\]\[(?:(R\d+)(?:\+(?=0x))?)?(0x[0-9a-f]+)?\]$", text)
        if not found or found.group(1) not in _BANKS:
            raise self.unknown(f"operand {text}")
        bank, register, offset = found.groups()
        return int(bank, 16), None if register is None else self.checked(register), int(offset or "0", 16)

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
            return lambda b, value, where: b.put_uniform(index, value)
        index = self.checked(text)
        return lambda b, value, where: b.put(index, value, where)

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

    # ----------------------------------------------------------------------------------------- control
    def _exit(self):
        self.allow()

        def step(b, mask, where):
            b.alive = b.alive & ~mask
            rest = b.mask & ~mask
            b.fragments.remove(b.fragment)
            if rest.any():
                b.fragments.append(Fragment(b.pc + 1, rest, _share(b.cp, rest)))
            return _STOP

        return step

    def _bra(self):
        self.allow("DIV", "CONV")
        target = self.program.labels[_LABEL.search(self.args[-1]).group(1)]
        extra = self.predicate(self.args[0]) if len(self.args) > 1 else None
        return lambda b, mask, where: b.split(mask if extra is None else mask & extra(b), target)

    def _call(self):
        """CALL.REL.NOINC only jumps; the return address, if any, was put into registers before."""
        self.allow("REL", "NOINC")
        found = _LABEL.search(self.args[-1])
        name = found.group(1) if found else re.sub(r"[`()]", "", self.args[-1])
        if name not in self.program.labels:
            raise self.unknown("call target")
        target = self.program.labels[name]
        return lambda b, mask, where: b.split(mask, target)

    def _ret(self):
        self.allow("REL", "NODEC")
        return self._indirect(self.checked(self.args[0]), 1, 0, self.program.index)

    def _brx(self):
        """BRX Ra offset (*"BRANCH_TARGETS ..."*): to the next instruction's address + offset + Ra (64 bits)."""
        self.allow()
        found = re.match(r'(R\d+) (-?0x[0-9a-f]+)\s+\(\*"BRANCH_TARGETS ([^"]*)"\*\)$', ",".join(self.args))
        if not found:
            raise self.unknown("indirect branch without declared targets")
        labels, text = self.program.labels, self.program.text
        targets = {text[labels[name]][0]: labels[name] for name in found.group(3).split(",")}
        base = text[self.pc][0] + 16 + int(found.group(2), 16)
        return self._indirect(self.checked(found.group(1), 2), 2, base, targets)

    def _indirect(self, index, count, base, targets):
        """Step that goes to `base` + `count` registers; `targets`: {legal address: instruction number}."""

        def step(b, mask, where):
            b.check_known(index, count, mask)
            address = b.R[index].astype(I64) + base
            if count == 2:
                address += b.R[index + 1].astype(I64) << 32
            places = [int(place) for place in np.unique(address[mask])]
            for place in places:
                if place not in targets:
                    lane = int((address[mask] == place).argmax())
                    raise Fault(f"jumps to {place:#x}, which is not one of its targets", lane)
            if len(places) == 1:
                return b.split(mask, targets[places[0]])
            if not np.array_equal(mask, b.mask):
                raise self.unknown("predicated jump to several places")
            b.fragments.remove(b.fragment)
            for place in places:
                lanes = mask & (address == place)
                b.fragments.append(Fragment(targets[place], lanes, _share(b.cp, lanes)))
            return _STOP

        return step

    def _bssy(self):
        self.allow("RECONVERGENT", "RELIABLE")
        number = int(self.args[0][1:])

        def step(b, mask, where):
            np.copyto(b.barriers[number], mask, where=b.warps)

        return step

    def _bsync(self):
        self.allow("RECONVERGENT", "RELIABLE")
        number = int(self.args[0][1:])
        return lambda b, mask, where: b.converge(("sync", number))

    def _warpsync(self):
        self.allow("ALL")
        lanes = MASK32 if not self.args else int(self.literal(self.args[0]) or 0)
        if self.guard or not lanes:
            raise self.unknown()
        return lambda b, mask, where: b.converge(("lanes", lanes))

    def _bar(self):
        self.allow("SYNC", "DEFER_BLOCKING")
        if "SYNC" not in self.mods or self.args[0] not in ("0x0", "RZ") or len(self.args) > 1:
            raise self.unknown("only BAR.SYNC 0")

        def step(b, mask, where):
            if (b.alive & b.warps & ~mask).any():
                raise Fault("only some lanes of a warp reach the barrier")
            b.fragment.pc, b.fragment.waiting = b.pc + 1, "block"
            return _STOP

        return step

    # -------------------------------------------------------------------------------- special registers
    def _s2r(self):
        self.allow()
        name = self.args[1]
        axis = {"X": 0, "Y": 1, "Z": 2}.get(name[-1])
        if name.startswith("SR_CTAID."):
            value = lambda b: b.ids[b.group, axis].astype(U32)[:, None]
        elif name == "SR_TID.X":
            value = lambda b: b.thread % U32(b.block[0])
        elif name == "SR_TID.Y":
            value = lambda b: b.thread // U32(b.block[0]) % U32(b.block[1])
        elif name == "SR_TID.Z":
            value = lambda b: b.thread // U32(b.block[0] * b.block[1])
        elif name == "SR_LANEID":
            value = lambda b: b.thread % U32(LANES)
        elif name == "SR_CgaCtaId":
            value = lambda b: U32(0)
        else:
            raise self.unknown()
        if self.name == "S2UR":
            put = self._uniform_put()
            return lambda b, mask, where: put(b, value(b)[:, :1] if np.ndim(value(b)) else value(b), where)
        put = self.result(self.args[0])
        return lambda b, mask, where: put(b, value(b), where)

    def _uniform_put(self):
        index = 63 if self.args[0] == "URZ" else int(self.args[0][2:])
        return lambda b, value, where: b.put_uniform(index, value)

    _s2ur = _s2r

    def _cs2r(self):
        self.allow("32")
        if self.args[1] != "SRZ":
            raise self.unknown()
        index, count = self.checked(self.args[0]), 1 if "32" in self.mods else 2

        def step(b, mask, where):
            for k in range(count):
                b.put(index + k, U32(0), where)

        return step

    def _ldc(self):
        self.allow("64", "U8", "U16")
        (bank, register, offset), count = self.constant(self.args[1]), 2 if "64" in self.mods else 1
        if self.uniform and register is not None:
            raise self.unknown(f"operand {self.args[1]}")
        keep = U32({"U8": 0xFF, "U16": 0xFFFF}.get(self.order[0] if self.order else "", MASK32))
        index = int(self.args[0][2:]) if self.uniform else self.checked(self.args[0])

        def step(b, mask, where):
            if register is not None:
                b.check_known(register, 1, mask)
                start = b.R[register].astype(I64) + offset
                values = [b.constants.gather(bank, start + 4 * k, mask) & keep for k in range(count)]
            else:
                values = [b.constants.word(bank, offset + 4 * k) & keep for k in range(count)]
            for k, value in enumerate(values):
                if self.uniform:
                    b.put_uniform(index + k, value)
                else:
                    b.put(index + k, value, where)

        return step

    def _r2ur(self):
        self.allow()
        put, source = self._uniform_put(), self.source(self.args[1])

        def step(b, mask, where):
            value = np.broadcast_to(source(b), b.mask.shape)
            first = value[np.arange(b.W), mask.argmax(1)][:, None]
            if b.strict and ((value != first) & mask).any():
                raise Fault("the register is not uniform in the warp", int(((value != first) & mask)[mask].argmax()))
            put(b, first, where)

        return step

    def _r2p(self):
        self.allow()
        if self.args[0] != "PR":
            raise self.unknown()
        source, bits = self.source(self.args[1]), int(self.args[2], 0)

        def step(b, mask, where):
            value = source(b)
            for k in range(7):
                if bits >> k & 1:
                    np.copyto(b.P[k], (value >> U32(k) & U32(1)).astype(bool), where=mask)

        return step

    def _p2r(self):
        self.allow()
        if self.args[1] != "PR":
            raise self.unknown()
        put, source, bits = self.result(self.args[0]), self.source(self.args[2]), int(self.args[3], 0)

        def step(b, mask, where):
            value = source(b) & U32(~bits & MASK32)
            for k in range(7):
                if bits >> k & 1:
                    value = value | (b.P[k].astype(U32) << U32(k))
            put(b, value, where)

        return step

    # ------------------------------------------------------------------------------------------ memory
    def _size(self):
        return next((_SIZES[m] for m in self.order if m in _SIZES), 4)

    def _ldg(self):
        self.allow(*_CACHE, *_SIZES)
        if len(self.args) != 2:
            raise self.unknown()
        size = self._size()
        index = self.checked(self.args[0], max(1, size // 4))
        where_is = self.address(self.args[1], wide="E" in self.mods)

        def step(b, mask, where):
            b.active = mask
            _deliver(b, index, b.memory.load(where_is(b, mask)[mask], size, size), self.mods, mask, where)
            b.active = b.mask

        return step

    def _stg(self):
        self.allow(*_CACHE, *_SIZES)
        size = self._size()
        count = max(1, size // 4)
        where_is, index = self.address(self.args[0], wide="E" in self.mods), self.checked(self.args[1], count)

        def step(b, mask, where):
            b.active = mask
            b.check_known(index, count, mask)
            b.memory.store(where_is(b, mask)[mask], _collect(b, index, count, mask), size, size)
            b.active = b.mask

        return step

    def _lds(self):
        if "M88" in self.mods:
            raise self.unknown()
        self.allow(*_SIZES)
        size = self._size()
        index, where_is = self.checked(self.args[0], max(1, size // 4)), self.address(self.args[1], False)

        def step(b, mask, where):
            b.active = mask
            at = where_is(b, mask)[mask]
            if index is None:  # a dummy load that ptxas places; reads nothing
                if (at + size > b.shared.size).any():
                    raise Fault("shared address out of range", 0)
                return
            words = b.shared.load(b.lane_group[mask], b.lane_wave[mask], at, size, size)
            _deliver(b, index, words, self.mods, mask, where)
            b.active = b.mask

        return step

    def _sts(self):
        self.allow(*_SIZES)
        size = self._size()
        count = max(1, size // 4)
        where_is, index = self.address(self.args[0], False), self.checked(self.args[1], count)

        def step(b, mask, where):
            b.active = mask
            b.check_known(index, count, mask)
            b.shared.store(
                b.lane_group[mask],
                b.lane_wave[mask],
                where_is(b, mask)[mask],
                _collect(b, index, count, mask),
                size,
                size,
            )
            b.active = b.mask

        return step

    def _ldgsts(self):
        """cp.async: the data reach shared memory when DEPBAR has waited for their group."""
        self.allow(*_CACHE, "64", "128")
        size = self._size()
        shared_at, global_at = self.address(self.args[0], False), self.address(self.args[1], True)
        keep = self.predicate(self.args[2]) if len(self.args) > 2 else None

        def step(b, mask, where):
            load = mask if keep is None else mask & keep(b)
            to = shared_at(b, mask)
            words = np.zeros((*b.mask.shape, size // 4), U32)
            b.active = load
            if load.any():
                words[load] = b.memory.load(global_at(b, load)[load], size, size)
            b.active = b.mask
            if (to[mask] % size).any():
                raise Fault("cp.async to a misaligned shared address")
            b.cp[0].append((np.flatnonzero(mask), to[mask], words[mask], size))

        return step

    def _ldgdepbar(self):
        self.allow()

        def step(b, mask, where):
            b.cp[1].append(b.cp[0][:])
            b.cp[0].clear()

        return step

    def _depbar(self):
        self.allow("LE")
        if self.args[0] != "SB0":  # other scoreboards are not modelled; cp.async uses SB0
            return lambda b, mask, where: None
        count = int(self.args[1], 0)

        def step(b, mask, where):
            while len(b.cp[1]) > count:
                for lanes, address, words, size in b.cp[1].pop(0):
                    b.shared.store(
                        b.lane_group.reshape(-1)[lanes], b.lane_wave.reshape(-1)[lanes], address, words, size, size
                    )

        return step

    def _ldsm(self):
        self.allow("16", "M88", "MT88", "2", "4")
        count = {"4": 4, "2": 2}.get(self.order[-1], 1)
        transposed = "MT88" in self.mods
        index, where_is = self.checked(self.args[0], count), self.address(self.args[1], False)

        def step(b, mask, where):
            warps = np.flatnonzero(mask.all(1))
            if (mask.any(1) != mask.all(1)).any():
                raise Fault("ldmatrix with inactive lanes")
            used = np.zeros_like(mask)
            used[warps, : 8 * count] = True
            b.active = used
            words = b.shared.load(b.lane_group[used], b.lane_wave[used], where_is(b, used)[used], 16, 16)
            b.active = b.mask
            words = words.reshape(warps.size, count, 8, 4)  # row, pair of columns
            if transposed:
                halves = words.view(U16).reshape(warps.size, count, 8, 8)
                words = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(U32)
            words = words.reshape(warps.size, count, LANES)
            for k in range(count):
                if where is None:
                    b.put(index + k, words[:, k], None)
                else:
                    b.R[index + k][warps] = words[:, k]
                    b.known_lanes[index + k] |= mask

        return step

    def _ldl(self):
        self.allow("LU", *_SIZES)
        return self._local(load=True)

    def _stl(self):
        self.allow(*_SIZES)
        return self._local(load=False)

    def _local(self, load):
        """Local memory: one frame of `kernel.stack` bytes per thread below the initial stack pointer."""
        size = self._size()
        count = max(1, size // 4)
        where_is = self.address(self.args[1 if load else 0], False)
        index = self.checked(self.args[0 if load else 1], count)
        frame = self.program.kernel.stack

        def step(b, mask, where):
            b.active = mask
            at = where_is(b, mask)[mask] - (_STACK_TOP - frame)
            if ((at < 0) | (at + size > frame) | (at % size != 0)).any():
                raise Fault("local address outside the frame or misaligned", 0)
            place = np.flatnonzero(mask)[:, None], at[:, None] + np.arange(size)
            if load:  # spilled registers may be unwritten in some lanes
                raw = np.zeros((at.size, max(4, size)), np.uint8)
                raw[:, :size] = b.local[place]
                _deliver(b, index, raw.view(U32), self.mods, mask, where)
                known = b.local_known[place].all(1)
                if index is not None and not known.all():
                    for k in range(index, index + count):
                        lanes = b.known_lanes[k] | b.known[k]
                        lanes[mask] = known
                        b.known_lanes[k], b.known[k] = lanes, False
            else:
                b.local[place] = np.ascontiguousarray(_collect(b, index, count, mask)).view(np.uint8)[:, :size]
                known = np.ones(at.size, bool)
                for k in range(index, index + count) if index is not None else ():
                    known &= b.known[k] | b.known_lanes[k][mask]
                b.local_known[place] = known[:, None]
            b.active = b.mask

        return step

    def _red(self):
        return self._atomic(None, self.args[0], self.args[1], None)

    _redg = _red  # sm_90's name

    def _atomg(self):
        self.mods.discard("PT")
        if self.args[0] != "PT":
            raise self.unknown("predicate result")
        if "CAS" in self.mods:
            return self._atomic(self.args[1], self.args[2], self.args[4], self.args[3])
        return self._atomic(self.args[1], self.args[2], self.args[3], None)

    def _atomic(self, target, place, value, compare):
        self.allow("E", "ADD", "CAS", "F32", "FTZ", "RN", "F16x2", "S32", "STRONG", "GPU", "SYS", "CTA")
        ftz = "FTZ" in self.mods
        if "CAS" in self.mods:
            function = lambda old, new, other: np.where(old == other, new, old)
        elif "F32" in self.mods:
            zero = flush if ftz else (lambda x: x)
            function = lambda old, new, other: zero(zero(old.view(F32)) + zero(new.view(F32))).astype(F32).view(U32)
        elif "F16x2" in self.mods:
            function = lambda old, new, other: (old[:, None].view(F16) + new[:, None].view(F16)).view(U32)[:, 0]
        else:
            function = lambda old, new, other: old + new
        where_is = self.address(place, wide=True)
        index = self.checked(value)
        other = self.checked(compare) if compare else None
        out = self.checked(target) if target else None

        def step(b, mask, where):
            b.active = mask
            b.check_known(index, 1, mask)
            new = _collect(b, index, 1, mask)[:, 0]
            expected = _collect(b, other, 1, mask)[:, 0] if compare else new
            at = where_is(b, mask)[mask]
            old = b.memory.atomic(at, lambda old, lanes: function(old, new[lanes], expected[lanes]))
            if target:
                _deliver(b, out, old[:, None], (), mask, where)
            b.active = b.mask

        return step

    # ------------------------------------------------------------------------------------- tensor core
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
                d = core.multiply_accumulate(a, right, c, b.options["mma"])
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
        types = [m for m in self.order if m in ("S8", "U8")]
        k = {"16832": 32, "16816": 16}[self.order[0]]
        blocks = k // 16
        fetch_a, fetch_b = self._registers(self.args[1], 2 * blocks), self._registers(self.args[2], blocks)
        fetch_c, target = self._registers(self.args[3], 4), self.checked(self.args[0], 4)
        saturate = "SAT" in self.mods

        def values(words, kind):
            return np.ascontiguousarray(words).view(np.int8 if kind == "S8" else np.uint8).astype(F64)

        def step(b, mask, where):
            _whole_warps(mask)
            a = (
                values(fetch_a(b, mask), types[0])
                .reshape(blocks, 2, b.W, 8, 4, 4)
                .transpose(2, 1, 3, 0, 4, 5)
                .reshape(b.W, 16, k)
            )
            right = (
                values(fetch_b(b, mask), types[1])
                .reshape(blocks, b.W, 8, 4, 4)
                .transpose(1, 2, 0, 3, 4)
                .reshape(b.W, 8, k)
            )
            c = np.ascontiguousarray(_accumulator(fetch_c(b, mask))).view(I32).astype(I64)
            total = c + np.matmul(a, right.transpose(0, 2, 1)).astype(I64)
            if saturate:
                total = np.clip(total, -0x80000000, 0x7FFFFFFF)
            words = _accumulator_words(total.astype(U32))
            for q in range(4):
                b.put(target + q, words[q], where)

        return step

    # ----------------------------------------------------------------------------------------- floating
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
        relation, combine = _float_relation(self.order), self._combine()
        self.allow(*_FLOAT_NAMES, "AND", "OR", "XOR", "FTZ")
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

    def _combine(self):
        return np.logical_and if "AND" in self.mods else np.logical_or if "OR" in self.mods else np.logical_xor

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

    # ---- packed halves
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
        self.allow(*_FLOAT_NAMES, "BF", "AND", "OR", "XOR", "BF16_V2")
        if "BF" not in self.mods:
            raise self.unknown("integer result")
        bf16 = "BF16_V2" in self.mods
        combine, more = self._combine(), self.predicate(self.args[-1])
        self.args = self.args[:-1]
        put, (x, y), relation = self.result(self.args[0]), self._half_arguments(2, bf16), _float_relation(self.order)
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

    # ------------------------------------------------------------------------- integer, logic, predicates
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
            if outs:
                over = total >> 32
                outs[0](b, over > 0, mask)
                if len(outs) > 1:
                    outs[1](b, over > 1, mask)

        return step

    def _viadd(self):
        self.allow()
        put, x, y = self.result(self.args[0]), self.source(self.args[1]), self.source(self.args[2])
        return lambda b, mask, where: put(b, x(b) + y(b), where)

    def _imad(self):
        self.allow("WIDE", "HI", "U32", "MOV", "IADD", "SHL", "X", "S32")
        if self.is_predicate(self.args[1]):
            raise self.unknown("carry out")
        signed = "U32" not in self.mods
        if not {"WIDE", "HI"} & self.mods:
            put, (x, y, z) = self.result(self.args[0]), (self.source(a) for a in self.args[1:4])
            carry = self.predicate(self.args[4]) if len(self.args) > 4 else None
            if carry is None:
                return lambda b, mask, where: put(b, x(b) * y(b) + z(b), where)
            return lambda b, mask, where: put(b, x(b) * y(b) + z(b) + carry(b).astype(U32), where)
        if len(self.args) != 4:
            raise self.unknown()
        # operand c is 64 bits wide
        x, y, low, high = (
            self.source(self.args[1]),
            self.source(self.args[2]),
            self.source(self.args[3]),
            self.source(self.args[3], 1),
        )

        def total(b):
            p, q = x(b), y(b)
            if signed:
                product = (p.view(I32).astype(I64) * q.view(I32).astype(I64)).astype(U64)
            else:
                product = p.astype(U64) * q.astype(U64)
            return product + (low(b).astype(U64) | (high(b).astype(U64) << U64(32)))

        if "HI" in self.mods:
            put = self.result(self.args[0])
            return lambda b, mask, where: put(b, (total(b) >> U64(32)).astype(U32), where)
        if self.uniform:
            index = int(self.args[0][2:])

            def step_uniform(b, mask, where):
                value = total(b)
                b.put_uniform(index, (value & U64(MASK32)).astype(U32))
                b.put_uniform(index + 1, (value >> U64(32)).astype(U32))

            return step_uniform
        index = self.checked(self.args[0], 2)

        def step(b, mask, where):
            value = total(b)
            b.put(index, (value & U64(MASK32)).astype(U32), where)
            b.put(index + 1, (value >> U64(32)).astype(U32), where)

        return step

    def _isetp(self):
        self.allow(*_INT_COMPARE, "U32", "AND", "OR", "XOR", "EX", "S32")
        name = next(m for m in self.order if m in _INT_COMPARE)
        relation, combine = _INT_COMPARE[name], self._combine()
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

    def _popc(self):
        self.allow()
        put, x = self.result(self.args[0]), self.source(self.args[1])
        return lambda b, mask, where: put(b, core.popcount(x(b)), where)

    def _shfl(self):
        self.allow("IDX", "BFLY", "UP", "DOWN")
        if self.args[0] != "PT" or self.args[4] not in ("0x1f", "0x0") or self.guard is not None:
            raise self.unknown()
        put, x, n = self.result(self.args[1]), self.source(self.args[2]), self.source(self.args[3])
        kind, clamp = self.order[0], int(self.args[4], 16)
        if (kind == "UP") != (clamp == 0):
            raise self.unknown("segment")
        lane = np.arange(LANES)

        def step(b, mask, where):
            by = np.broadcast_to(n(b), b.mask.shape).astype(I64) & 31
            origin = {"IDX": by, "BFLY": lane ^ by, "UP": lane - by, "DOWN": lane + by}[kind]
            origin = np.where((origin < 0) | (origin > 31), lane, origin)
            rows = np.arange(b.W)[:, None]
            if b.strict and not mask[rows, origin][mask].all():
                raise Fault("shuffle from an inactive lane")
            put(b, np.broadcast_to(x(b), b.mask.shape)[rows, origin], where)

        return step


# --------------------------------------------------------------------------------------- small parts
def _deliver(b, index, words, mods, mask, where):
    """Loaded words (n, k) into registers of the lanes in `mask`."""
    if index is None:
        return
    if "S8" in mods:
        words = words.astype(np.int8).astype(I32).view(U32)
    elif "S16" in mods:
        words = words.astype(np.int16).astype(I32).view(U32)
    for k in range(words.shape[1]):
        if where is None:
            b.put(index + k, words[:, k].reshape(b.W, LANES), None)
        else:
            b.R[index + k][mask] = words[:, k]
            if not b.known[index + k]:
                b.known_lanes[index + k] |= mask


def _collect(b, index, count, mask):
    """uint32 (n, count) of the lanes in `mask`; RZ is zero."""
    if index is None:
        return np.zeros((int(mask.sum()), count), U32)
    return np.stack([b.R[index + k][mask] for k in range(count)], 1)


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


_FLOAT_NAMES = ("LT", "LE", "GT", "GE", "EQ", "NE", "LTU", "LEU", "GTU", "GEU", "EQU", "NEU", "NUM", "NAN")


def _float_relation(order):
    name = next(m for m in order if m in _FLOAT_NAMES)
    unordered = lambda a, c: np.isnan(a) | np.isnan(c)
    if name == "NAN":
        return unordered
    if name == "NUM":
        return lambda a, c: ~unordered(a, c)
    if name.endswith("U"):  # true for NaN
        plain = _INT_COMPARE[name[:-1]]
        return lambda a, c: plain(a, c) | unordered(a, c)
    if name == "NE":
        return lambda a, c: (a != c) & ~unordered(a, c)
    return _INT_COMPARE[name]


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


class _Constants:
    """Constant banks: 0 has block and grid size, stack pointer, parameters; 2 has ptxas's branch tables, literals."""

    def __init__(self, grid, block, packed, base, table):
        data = bytearray(base) + packed + bytes(-len(packed) % 4)
        struct.pack_into("<6I", data, 0, *block, *grid)
        struct.pack_into("<I", data, 0x28, _STACK_TOP)
        self.banks = {0: np.frombuffer(data, U32), 2: np.frombuffer(table + bytes(-len(table) % 4), U32)}

    def word(self, bank, offset, lane=None):
        """uint32 at byte `offset`; `lane` as in `Fault`."""
        words = self.banks[bank]
        if offset % 4 or not 0 <= offset < 4 * words.size:
            raise Fault(f"constant bank {bank} read at {offset:#x}: misaligned or past {4 * words.size} bytes", lane)
        return words[offset >> 2]

    def gather(self, bank, offsets, mask):
        """uint32 (W, 32) at byte `offsets` of the lanes in `mask`; 0 elsewhere."""
        value, wanted = np.zeros(mask.shape, U32), offsets[mask]
        for offset in np.unique(wanted):
            value[mask & (offsets == offset)] = self.word(bank, int(offset), int((wanted == offset).argmax()))
        return value


# ------------------------------------------------------------------------------------------- launch
def launch(
    image: bytes,
    symbol: str,
    grid: core.Size,
    block: core.Size,
    params: core.Params,
    shared_bytes: int,
    buffers: core.Buffers,
    *,
    strict: bool = True,
    mma: str = "round",
    max_instructions: int = core.MAX_INSTRUCTIONS,
) -> Stats:
    """Runs one kernel of a cubin for sm_80, or one of its instructions for sm_86, sm_89, sm_90.

    Args:
        image: bytes of the cubin.
        symbol: the kernel's name.
        grid: CTAs.
        block: threads in a CTA.
        params: see `core.pack_params`.
        shared_bytes: dynamic shared memory in bytes, Triton's metadata `shared`.
        buffers: what the kernel may touch. Mode "r", "rw", or "w1": every byte may be stored at most once, none may be
            loaded. Arrays are changed in place.
        strict: False: only bounds, modes and unknown instructions are checked.
        mma: "round": MMA is an exact dot product rounded once; "chop": every step is cut toward zero.
        max_instructions: the budget over all warps.

    Raises Fault (pc, instruction, place, reason), elf.ImageError, ToolMissingError, and ValueError for bad buffers.
    """
    if mma not in core.MMA_MODES:
        raise ValueError(f"mma must be one of {core.MMA_MODES}")
    program = _program(bytes(image), symbol, core.find_nvdisasm())
    kernel = program.kernel
    packed = core.pack_params(params, kernel)
    threads = block[0] * block[1] * block[2]
    if kernel.reqntid is not None and block != kernel.reqntid:
        raise Fault(f"block {block}; the kernel requires {kernel.reqntid}")
    if not 0 < threads <= (kernel.max_threads or 1024):
        raise Fault(f"block of {threads} threads; the kernel allows 1 to {kernel.max_threads or 1024}")
    # on sm_90 the first KiB is the system's and is counted as static
    size = kernel.shared + int(shared_bytes)
    limit = 232448 if elf.read(image).arch == "sm90" else 166912
    if shared_bytes < 0 or size > limit:
        raise Fault(f"{size} bytes of shared memory; the limit is {limit}")
    memory = Memory(buffers, strict)
    constants = _Constants(grid, block, packed, kernel.param_base, program.table)
    options = {"strict": strict, "mma": mma, "max_instructions": max_instructions}
    ids = core.group_ids(grid)
    warps = -(-threads // LANES)
    together = core.waves_per_batch(warps, len(ids), LANES)
    stats = Stats()
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), together):
            batch = _Batch(program, ids[start : start + together], warps, block, memory, constants, size, options)
            core.run_fragments(batch)
            options["max_instructions"] -= batch.executed
            stats.instructions += batch.executed
            for pc, count in batch.counts.items():
                address, text = program.text[pc]
                stats.pcs.add(address)
                stats.opcodes[re.sub(r"^@\S+\s+", "", text).split(" ", 1)[0]] += count
    stats.stores = {b.name: b.stores for b in memory.buffers if b.mode != "r"}
    return stats
