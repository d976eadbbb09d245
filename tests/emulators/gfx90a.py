"""Functional, strict interpreter for the part of AMD's gfx90a (CDNA2) ISA that Triton matmuls use.

It executes the bytes of an .hsaco, decoded by LLVM's `llvm-objdump`, on numpy arrays.  Written from AMD's public
ISA documents.  With ``strict=True`` it is stricter than the hardware on purpose:

  * device memory: exact bounds of the given buffers, read-only and write-once modes, natural alignment
  * LDS: only the bytes that the launch grants; reading bytes never written, and data races between waves inside
    one barrier interval, are faults
  * a register that an outstanding load will write must not be touched before an s_waitcnt that covers it; LDS
    writes must be waited for before s_barrier
  * a VGPR that was never written in an active lane must not feed a memory operation or an MFMA; registers start
    as NaN patterns

Not modelled: time, MFMA/VALU hazard wait states (s_nop distances), caches and the memory model, real MFMA rounding
(choose "round" or "chop"), exact bits of v_rcp/v_exp/v_log (correctly rounded here).  An instruction or modifier
that is not known raises `Fault` when it is reached; nothing is skipped.
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

LANES = 64
_MASK64 = (1 << 64) - 1
_STOP = -1  # a step returns this when it has changed the fragments itself
_VCC, _EXEC, _M0 = 106, 126, 124
_SCALARS = {
    "vcc": (_VCC, 2),
    "exec": (_EXEC, 2),
    "vcc_lo": (_VCC, 1),
    "vcc_hi": (_VCC + 1, 1),
    "exec_lo": (_EXEC, 1),
    "exec_hi": (_EXEC + 1, 1),
    "m0": (_M0, 1),
    "flat_scratch": (102, 2),
    "xnack_mask": (104, 2),
}
_KERNARG_BASE = 0x9F0000000000  # above every address of a 47-bit user space
_PRIVATE_BASE = 0x9E0000000000  # base in the private segment's buffer resource; recognised, never dereferenced
_SREG = 1024  # scalar register k is number 1024 + k in the scoreboard


# ------------------------------------------------------------------------------------------ operands
class _Operand:
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
        if self.kind == "v":
            return frozenset(range(self.index, self.index + (count or self.count)))
        if self.kind == "s":
            return frozenset(range(_SREG + self.index, _SREG + self.index + (count or self.count)))
        return frozenset()


def _split(text):
    """Split operands at commas outside brackets."""
    return [piece.strip() for piece in re.split(r",\s*(?![^\[]*\])(?![^(]*\))", text) if piece.strip()]


def _reads(*operands):
    return frozenset().union(*(o.registers() for o in operands))


# ---- fetchers: operand -> function(batch) -> array that broadcasts to (waves, 64), or (waves,) for scalars
def _raw(operand, part=0):
    """uint32 lanes of the operand's 32-bit part, without modifiers."""
    if operand.kind == "v":
        index = operand.index + part
        return lambda b: b.V[index]
    if operand.kind == "s":
        index = operand.index + part
        return lambda b: b.S[index][:, None]
    constant = U32(operand.high if part else operand.bits)
    return lambda b: constant


def _half_bits(real):
    return U32(np.float16(real).view(U16))


def _lanes(operand, kind="u", part=0, select=None):
    """Typed lanes: kind "u" uint32, "i" int32, "f" float32, "h" float16 (low half), "x" uint16 as uint32."""
    if kind == "h" and operand.kind == "k" and operand.real is not None:
        constant = _half_bits(operand.real)
        raw = lambda b: constant
    else:
        raw = _raw(operand, part)
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


def _lanes64(operand):
    """uint64 lanes of a register pair or constant."""
    low, high = _raw(operand, 0), _raw(operand, 1)
    return lambda b: low(b).astype(U64) | (high(b).astype(U64) << U64(32))


def _scalar(operand, part=0):
    """uint32 (waves,) or constant."""
    if operand.kind == "s":
        index = operand.index + part
        return lambda b: b.S[index]
    if operand.kind != "k":
        raise Fault(f"scalar operand {operand.text}")
    constant = U32(operand.high if part else operand.bits)
    return lambda b: constant


def _scalar64(operand):
    low, high = _scalar(operand, 0), _scalar(operand, 1)
    return lambda b: low(b).astype(U64) | (high(b).astype(U64) << U64(32))


def _lane_mask(operand):
    """bool (waves, 64) of a scalar register pair, or a constant."""
    if operand.kind == "k":
        words = np.array([operand.bits, operand.high], U32)
        constant = np.unpackbits(words.view(np.uint8), bitorder="little").view(bool)
        return lambda b: constant
    index = operand.index
    return lambda b: _unpack(b.S[index : index + 2])


def _unpack(pair):
    """(2, waves) uint32 -> (waves, 64) bool."""
    words = np.ascontiguousarray(pair.T)
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)


def _pack(mask):
    """(waves, 64) bool -> (waves, 2) uint32."""
    return np.packbits(mask, axis=1, bitorder="little").view(U32)


# ------------------------------------------------------------------------------------------- program
class _Program:
    """One kernel of an image: disassembly, descriptor facts and decoded steps (shared by all launches)."""

    def __init__(self, image, symbol, objdump):
        info = elf.read(image)
        if info.arch != "gfx90a":
            raise Fault(f"the image is for {info.arch}, not gfx90a")
        if symbol not in info.kernels:
            raise Fault(f"no kernel {symbol!r}; the image has {sorted(info.kernels)}")
        self.kernel = info.kernels[symbol]
        raw = image[self.kernel.descriptor : self.kernel.descriptor + 64]
        rsrc3, rsrc1, rsrc2, self.properties, preload = struct.unpack_from("<IIIHH", raw, 44)
        self.preload_count, self.preload_offset = preload & 0x7F, preload >> 7
        self.user_sgprs = (rsrc2 >> 1) & 0x1F
        self.group_id = [bool(rsrc2 >> bit & 1) for bit in (7, 8, 9)]
        self.wave_offset = bool(rsrc2 & 1)
        self.arch_vgprs = ((rsrc3 & 0x3F) + 1) * 4
        self.total_vgprs = max(((rsrc1 & 0x3F) + 1) * 8, self.arch_vgprs)
        mode = (rsrc1 >> 12) & 0xFF
        if mode != 0xF0:
            raise Fault(f"float mode {mode:#x} is not modelled (round to nearest, subnormals kept: 0xf0)")
        self.text = {}
        listing = core.disassembly([objdump, "-d", "--mcpu=gfx90a"], image, ".hsaco")
        for line in listing.splitlines():
            found = re.match(r"^\s+(\S.*?)\s*// ([0-9A-F]{12}): ((?:[0-9A-F]{8} ?)+)", line)
            if found:
                words = [int(word, 16) for word in found.group(3).split()]
                self.text[int(found.group(2), 16)] = (found.group(1), words)
        if not self.text:
            raise Fault("llvm-objdump printed no instructions")
        names = " ".join(text.split(" ", 1)[0] for text, _ in self.text.values())
        self.lds_unit = (
            1 if re.search(r"ds_\w*_[bui]8\b|ds_\w*_[ui]8_", names) else 2 if re.search(r"ds_\w*_[bui]16", names) else 4
        )
        self.steps = {}

    def step(self, pc):
        """(function(batch) -> None | pc | _STOP, next pc) of the instruction at byte address `pc`."""
        if pc not in self.text:
            raise Fault(f"pc {pc:#x} is not the start of an instruction")
        text, words = self.text[pc]
        self.steps[pc] = found = (_Decoder(self, pc, text, words).build(), pc + 4 * len(words))
        return found

    @property
    def entry(self):
        return self.kernel.address


@functools.lru_cache(maxsize=64)
def _program(image, symbol, objdump):
    return _Program(image, symbol, objdump)


# --------------------------------------------------------------------------------------------- batch
class _Batch:
    """Registers and memory of the waves that run together.  W = waves.

    V        uint32 (vgprs, W, 64); accumulation VGPRs follow the architectural ones
    S        uint32 (128, W); scc bool (W,); exec bool (W, 64)
    waves    bool (W,): waves of the running fragment; whole: all of them
    mask     bool (W, 64): lanes that execute now; full: all of them
    """

    def __init__(self, program, ids, waves_in_group, threads, memory, packed, lds, options):
        self.program, self.memory, self.options = program, memory, options
        self.strict = options["strict"]
        groups = len(ids)
        self.W = count = groups * waves_in_group
        self.ids = ids
        self.group = np.repeat(np.arange(groups), waves_in_group)
        self.wave = np.tile(np.arange(waves_in_group), groups)
        self.V = core.poison((program.total_vgprs, count, LANES), 1)
        self.known = [False] * program.total_vgprs  # whole register written
        self.known_lanes = np.zeros((program.total_vgprs, count, LANES), bool)
        self.S = np.random.default_rng(2).integers(0x20000000, 0xF0000000, (128, 1), dtype=np.uint32).repeat(count, 1)
        self.scc = np.zeros(count, bool)
        self.lds = Shared(groups, lds, program.lds_unit, self.strict)
        self.lane_group = np.repeat(self.group, LANES).reshape(count, LANES)
        self.lane_wave = np.repeat(self.wave, LANES).reshape(count, LANES)
        self.clamp_half = np.zeros(count, bool)  # MODE.FP16_OVFL: overflow gives the largest fp16
        self.private = None
        if program.kernel.stack:
            self.private = np.random.default_rng(3).integers(
                0, 256, (count * LANES, program.kernel.stack), dtype=np.uint8
            )
            self.private_known = np.zeros(self.private.shape, bool)
        thread = self.lane_wave * LANES + np.arange(LANES)
        self.V[0] = thread
        self.known_lanes[0] = True
        self.known[0] = True
        self.exec = np.zeros((count, LANES), bool)
        self.waves, self.whole = np.ones(count, bool), True
        self._start_scalars(packed)
        self.set_exec(_pack(thread < threads).T)
        preload = options["preload"] and program.preload_count
        start = program.entry + (256 if preload else 0)
        self.fragments = [Fragment(start, self.waves, ([], []))]
        self.counts = {}
        self.executed = 0
        self.active = self.mask

    def _start_scalars(self, packed):
        program, values = self.program, []
        properties = program.properties
        if properties & 1:
            values += [_PRIVATE_BASE & MASK32, _PRIVATE_BASE >> 32, MASK32, 0]  # private segment buffer
        for bit, name in ((2, "dispatch_ptr"), (4, "queue_ptr")):
            if properties & bit:
                raise Fault(f"the kernel wants {name}: not modelled")
        if properties & 8:
            values += [_KERNARG_BASE & MASK32, _KERNARG_BASE >> 32]
        if properties & 16:
            raise Fault("the kernel wants dispatch_id: not modelled")
        if properties & 32:
            values += [0, 0]  # flat scratch init
        if properties & 64:
            values += [0]  # private segment size
        if program.preload_count:
            words = struct.unpack_from(f"<{program.preload_count}I", packed, 4 * program.preload_offset)
            values += list(words) if self.options["preload"] else [None] * program.preload_count
        if len(values) != program.user_sgprs:
            raise Fault(f"the kernel descriptor asks for {program.user_sgprs} user SGPRs, {len(values)} are modelled")
        for axis, wanted in enumerate(program.group_id):
            if wanted:
                values.append(self.ids[self.group, axis])
        if program.wave_offset:
            values.append(0)
        for index, value in enumerate(values):
            if value is not None:
                self.S[index] = value

    # ---- scheduling (called by core.run_fragments)
    def enter(self, fragment):
        self.fragment = fragment
        self.vm, self.lg = fragment.queues
        self._pending()
        self.waves = fragment.lanes
        self.whole = bool(self.waves.all())
        self.nwaves = int(self.waves.sum())
        self._mask()

    def merge(self, one, other):
        if one.queues != other.queues:
            return False
        one.lanes = one.lanes | other.lanes
        return True

    def release(self):
        """All fragments wait at s_barrier: let them go."""
        self.lds.epoch += 1
        for fragment in self.fragments:
            fragment.waiting = None

    def split(self, condition, target, fall):
        """Branch: (W,) bool -> next pc, or _STOP after the fragment was split."""
        taken = condition & self.waves
        if not taken.any():
            return None
        if np.array_equal(taken, self.waves):
            return target
        one = self.fragment
        one.lanes, one.pc = self.waves & ~taken, fall
        self.fragments.append(Fragment(target, taken, ([*self.vm], [*self.lg])))
        return _STOP

    def advance(self, fragment, limit):
        """Run `fragment` until it stops or reaches `limit` (pc of another fragment)."""
        steps, counts, pc, nwaves = self.program.steps, self.counts, fragment.pc, self.nwaves
        budget = self.options["max_instructions"]
        while True:
            try:
                step, fall = steps.get(pc) or self.program.step(pc)
                counts[pc] = counts.get(pc, 0) + nwaves
                self.executed += nwaves
                if self.executed > budget:
                    raise Fault(f"the launch exceeded {budget} instructions")
                target = step(self)
            except Fault as fault:
                raise self._located(fault, pc) from None
            if target is None:
                pc = fall
            elif target == _STOP:
                return
            else:
                pc = target
            if limit is not None and pc >= limit:
                fragment.pc = pc
                return

    def _located(self, fault, pc):
        place = f"pc {pc:#x} `{self.program.text.get(pc, ('?',))[0]}`"
        if fault.lane is not None and fault.lane < int(self.active.sum()):
            wave, lane = (int(x) for x in np.argwhere(self.active)[fault.lane])
            group = tuple(int(x) for x in self.ids[self.group[wave]])
            place += f" workgroup {group} wave {int(self.wave[wave])} lane {lane}"
        return Fault(f"{place}: {fault}", fault.lane)

    # ---- state changes
    def _mask(self):
        self.mask = self.exec if self.whole else self.exec & self.waves[:, None]
        self.full = bool(self.mask.all())
        self.active = self.mask

    def _pending(self):
        self.pending = set().union(*self.vm, *(registers for _, registers in self.lg))

    def set_exec(self, pair):
        """EXEC of the running waves from (2, W) uint32."""
        if self.whole:
            self.S[_EXEC : _EXEC + 2] = pair
        else:
            np.copyto(self.S[_EXEC : _EXEC + 2], pair, where=self.waves)
        self.exec = _unpack(self.S[_EXEC : _EXEC + 2])
        self._mask()

    def put(self, index, value):
        """VGPR `index` := uint32 value in the active lanes."""
        if self.full:
            self.V[index] = value
            self.known[index] = True
        else:
            np.copyto(self.V[index], value, where=self.mask)
            if not self.known[index]:
                self.known_lanes[index] |= self.mask

    def put64(self, index, value):
        self.put(index, (value & U64(MASK32)).astype(U32))
        self.put(index + 1, (value >> U64(32)).astype(U32))

    def sput(self, index, value):
        if index >= _EXEC:
            pair = self.S[_EXEC : _EXEC + 2].copy()
            pair[index - _EXEC] = value
            self.set_exec(pair)
        elif self.whole:
            self.S[index] = value
        else:
            np.copyto(self.S[index], value, where=self.waves)

    def sput64(self, index, value):
        low, high = (value & U64(MASK32)).astype(U32), (value >> U64(32)).astype(U32)
        if index == _EXEC:
            pair = np.empty((2, self.W), U32)
            pair[0], pair[1] = low, high
            self.set_exec(pair)
        else:
            self.sput(index, low)
            self.sput(index + 1, high)

    def put_mask(self, index, mask):
        """Scalar pair := bool (W, 64), zero in inactive lanes."""
        pair = _pack(np.broadcast_to(mask, self.mask.shape) & self.mask).T
        if index == _EXEC:
            self.set_exec(pair)
        else:
            self.sput(index, pair[0])
            self.sput(index + 1, pair[1])

    def set_scc(self, value):
        if self.whole:
            self.scc = np.broadcast_to(value, (self.W,))
        else:
            self.scc = np.where(self.waves, value, self.scc)

    def check_known(self, index, count, mask=None):
        """Fault when a register that matters was never written."""
        if not self.strict:
            return
        mask = self.mask if mask is None else mask
        for k in range(index, index + count):
            if not self.known[k]:
                bad = ~self.known_lanes[k] & mask
                if bad.any():
                    raise Fault(f"uses v{k}, which was never written in an active lane", int(bad[mask].argmax()))


# ------------------------------------------------------------------------------------------ decoding
_SKIP = (
    "s_nop",
    "s_setprio",
    "s_sleep",
    "s_inst_prefetch",
    "s_dcache_wb",
    "s_icache_inv",
    "buffer_wbinvl1",
    "buffer_wbinvl1_vol",
    "buffer_wbl2",
    "buffer_invl2",
    "v_nop",
)
_WIDTHS = {
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}
_IGNORED = {"glc", "slc", "nt", "sc0", "sc1", "dlc"}  # cache policy


class _Decoder:
    """Turns one instruction's text into a step."""

    def __init__(self, program, pc, text, words):
        self.program, self.pc, self.text, self.words = program, pc, text, words
        self.fall = pc + 4 * len(words)
        name, _, rest = text.partition(" ")
        self.base = re.sub(r"_(e32|e64|sdwa|dpp)$", "", name)
        self.encoding = name[len(self.base) + 1 :]
        self.mods = {}
        self.tokens = _split(rest)
        if self.tokens:
            first, *others = re.split(r"\s+(?![^\[]*\])", self.tokens[-1])
            self.tokens[-1] = first
            for other in others:
                key, _, value = other.partition(":")
                self.mods[key] = value or True

    def unknown(self, why=""):
        return Fault("is not modelled" + (f" ({why})" if why else ""))

    def allow(self, *names):
        """Fault on any modifier that is not in `names`."""
        extra = set(self.mods) - set(names)
        if extra:
            raise self.unknown("modifier " + ", ".join(sorted(extra)))

    def operands(self):
        return [_Operand(token, self.program) for token in self.tokens]

    def guarded(self, reads, writes, step):
        """`step`, which must not touch a register that an outstanding load will write."""
        touched = frozenset(reads) | frozenset(writes)
        return lambda b: step(b) if b.pending.isdisjoint(touched) else _early(b, touched, step)

    def build(self):
        base = self.base
        if base in _SKIP:
            return lambda b: None
        for prefix, method in (
            ("s_", self.scalar),
            ("global_", self.global_),
            ("buffer_", self.buffer),
            ("ds_", self.ds),
            ("v_mfma", self.mfma),
            ("v_", self.vector),
        ):
            if base.startswith(prefix):
                return method()
        raise self.unknown()

    # ---------------------------------------------------------------------------------- control, SALU
    def scalar(self):
        base, fall = self.base, self.fall
        immediate = self.words[0] & 0xFFFF
        if base == "s_endpgm":

            def end(b):
                b.fragments.remove(b.fragment)
                return _STOP

            return end
        if base == "s_barrier":

            def barrier(b):
                if b.strict and any(kind == "write" for kind, _ in b.lg):
                    raise Fault("LDS writes of this wave are still outstanding at the barrier")
                b.fragment.pc, b.fragment.waiting = fall, "barrier"
                return _STOP

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
            reads = {_SREG + _VCC, _SREG + _VCC + 1} if "vcc" in base else ()
            return self.guarded(reads, (), lambda b: b.split(condition(b), target, fall))
        found = re.match(r"s_load_dword(?:x(\d+))?$", base)
        if found:
            return self.scalar_load(int(found.group(1) or 1))
        return self.salu()

    def scalar_load(self, count):
        self.allow("glc")
        target, address, offset = self.operands()
        pointer, shift, registers = _scalar64(address), _scalar(offset), target.registers(count)

        def load(b):
            at = (pointer(b) + shift(b).astype(U64)).astype(I64)
            b.active = b.waves[:, None]
            data = b.memory.load(at[b.waves], 4 * count, 4)
            for k in range(count):
                b.S[target.index + k][b.waves] = data[:, k]
            b.active = b.mask
            b.lg.append(("scalar", registers))
            b.pending |= registers

        return self.guarded(_reads(address, offset), registers, load)

    def salu(self):
        self.allow()
        name, ops = self.base[2:], self.operands()
        if name in _SALU2:
            (target, x, y), function = ops, _SALU2[name]
            fx, fy = _scalar(x), _scalar(y)

            def step(b):
                result, flag = function(b, fx(b), fy(b))
                b.sput(target.index, result)
                if flag is not None:
                    b.set_scc(result != 0 if flag is _NONZERO else flag)

            return self.guarded(_reads(x, y), target.registers(1), step)
        if name in _SALU64:
            (target, x, y), (shift, function) = ops, _SALU64[name]
            fx, fy = _scalar64(x), _scalar(y) if shift else _scalar64(y)

            def step(b):
                result = function(b, fx(b), fy(b))
                b.sput64(target.index, result)
                if name != "cselect_b64":
                    b.set_scc(result != 0)

            return self.guarded(_reads(x, y), target.registers(2), step)
        found = re.match(r"cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)$", name)
        if found:
            packed, relation, kind, width = found.groups()
            x, y = ops
            relation, signed = _RELATIONS[relation], kind == "i"
            fx = _scalar64(x) if width == "64" else _scalar(x)
            if packed:
                low = self.words[0] & 0xFFFF
                constant = U32((low - 0x10000 if signed and low & 0x8000 else low) & MASK32)
                fy = lambda b: constant
            else:
                fy = _scalar64(y) if width == "64" else _scalar(y)
            if signed:
                return self.guarded(_reads(x, y), (), lambda b: b.set_scc(relation(fx(b).view(I32), fy(b).view(I32))))
            return self.guarded(_reads(x, y), (), lambda b: b.set_scc(relation(fx(b), fy(b))))
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
            fx, combine = _scalar64(x), _SAVEEXEC.get(name)

            def step(b):
                value = fx(b)
                if combine is None:
                    value = ~value if name == "not_b64" else value
                    b.sput64(target.index, value)
                    if name == "not_b64":
                        b.set_scc(value != 0)
                    return
                old = b.S[_EXEC].astype(U64) | (b.S[_EXEC + 1].astype(U64) << U64(32))
                new = combine(value, old)
                b.sput64(target.index, old)
                b.sput64(_EXEC, new)
                b.set_scc(new != 0)

            return self.guarded(_reads(x), target.registers(2), step)
        if name in _SALU1:
            (target, x), (function, flag) = ops, _SALU1[name]
            fx = _scalar(x)

            def step(b):
                result = function(fx(b))
                b.sput(target.index, result)
                if flag:
                    b.set_scc(result != 0)

            return self.guarded(_reads(x), target.registers(1), step)
        if name in ("bitcmp0_b32", "bitcmp1_b32"):
            x, y = ops
            fx, fy, want = _scalar(x), _scalar(y), U32(name == "bitcmp1_b32")
            return self.guarded(_reads(x, y), (), lambda b: b.set_scc(((fx(b) >> (fy(b) & U32(31))) & U32(1)) == want))
        raise self.unknown()

    # ----------------------------------------------------------------------------------- device memory
    def global_(self):
        self.allow("offset", *_IGNORED)
        ops, offset = self.operands(), int(self.mods.get("offset", "0"), 0)
        found = re.match(r"global_(load|store)_(\w+?)(_d16_hi|_d16)?$", self.base)
        if found and found.group(2) in _WIDTHS:
            kind, what, half = found.groups()
            nbytes = _WIDTHS[what]
            align, count = min(nbytes, 4), max(1, nbytes // 4)
            if kind == "load":
                data, address, base = ops
                registers = data.registers(count)
                where = _global_address(address, base, offset)

                def load(b):
                    if b.full or b.mask.any():
                        _deliver(b, data.index, b.memory.load(where(b), nbytes, align), what, half)
                    b.vm.append(registers)
                    b.pending |= registers

                # loads return in order, so a half-register load may follow another into the same register
                return self.guarded(_reads(address, base), () if half else registers, load)
            address, data, base = ops
            where = _global_address(address, base, offset)

            def store(b):
                if b.full or b.mask.any():
                    b.check_known(data.index, count)
                    b.memory.store(where(b), _collect(b, data.index, count, half), nbytes, align)
                b.vm.append(frozenset())

            return self.guarded(_reads(address, base) | data.registers(count), (), store)
        found = re.match(r"global_atomic_(cmpswap|add_f32|add|pk_add_f16)$", self.base)
        if not found:
            raise self.unknown()
        kind, returns = found.group(1), "glc" in self.mods
        target, address, data, base = ops if returns else (None, *ops)
        where = _global_address(address, base, offset)
        width = 2 if kind == "cmpswap" else 1
        registers = target.registers(1) if returns else frozenset()

        def atomic(b):
            if b.full or b.mask.any():
                b.check_known(data.index, width)
                new = b.V[data.index][b.mask]
                compare = b.V[data.index + 1][b.mask] if width == 2 else None
                old = b.memory.atomic(where(b), lambda old, lanes: _ATOMICS[kind](old, new[lanes], compare, lanes))
                if returns:
                    _deliver(b, target.index, old[:, None], "dword", None)
            b.vm.append(registers)
            b.pending |= registers

        return self.guarded(_reads(address, base) | data.registers(width), registers, atomic)

    def buffer(self):
        self.allow("offset", "offen", *_IGNORED)
        found = re.match(r"buffer_(load|store)_(\w+?)(_d16_hi|_d16)?$", self.base)
        if not found or found.group(2) not in _WIDTHS:
            raise self.unknown()
        kind, what, half = found.groups()
        nbytes = _WIDTHS[what]
        count = max(1, nbytes // 4)
        data, address, resource, base = self.operands()
        offset = int(self.mods.get("offset", "0"), 0)
        fv, fs, use = _raw(address) if "offen" in self.mods else None, _scalar(base), resource.index

        def place(b):
            """(address int64 (W, 64), lanes inside the resource, whether it is the private segment)"""
            at = np.zeros(b.mask.shape, I64) + offset
            if fv is not None:
                b.check_known(address.index, 1)
                at = at + fv(b).astype(I64)
            shift = np.broadcast_to(fs(b), (b.W,)).astype(I64)[:, None]
            start = b.S[use].astype(I64) | ((b.S[use + 1].astype(I64) & 0xFFFF) << 32)
            private = start[b.waves] == _PRIVATE_BASE
            if private.all():
                if shift.any():
                    raise Fault("private memory with a scalar offset is not modelled")
                return at, b.mask, True
            if private.any() or ((b.S[use + 1] >> U32(16)) & U32(0x3FFF))[b.waves].any():
                raise Fault("buffer resource with a stride is not modelled")
            inside = b.mask & (at + nbytes <= b.S[use + 2].astype(I64)[:, None])
            return start[:, None] + shift + at, inside, False

        def load(b):
            at, inside, private = place(b)
            words = np.zeros((int(b.mask.sum()), count), U32)
            b.active = inside
            if private:
                words[:], known = _private_load(b, at, inside, nbytes)
            elif inside.any():
                words[inside[b.mask]] = b.memory.load(at[inside], nbytes, min(nbytes, 4))
            b.active = b.mask
            if words.size:
                _deliver(b, data.index, words, what, half)
                if private:
                    _forget(b, data.index, count, known)
            b.vm.append(registers)
            b.pending |= registers

        def store(b):
            at, inside, private = place(b)
            b.active = inside
            if inside.any():
                words = _collect(b, data.index, count, half, inside)
                if private:
                    _private_store(b, at, inside, nbytes, words, data.index, count)
                else:
                    b.check_known(data.index, count, inside)
                    b.memory.store(at[inside], words, nbytes, min(nbytes, 4))
            b.active = b.mask
            b.vm.append(frozenset())

        reads = _reads(resource, base) | (address.registers() if fv else frozenset())
        if kind == "load":
            registers = data.registers(count)
            return self.guarded(reads, () if half else registers, load)
        return self.guarded(reads | data.registers(count), (), store)

    # --------------------------------------------------------------------------------------------- LDS
    def ds(self):
        self.allow("offset", "offset0", "offset1")
        ops = self.operands()
        offset = int(self.mods.get("offset", "0"), 0)
        found = re.match(r"ds_(read|write)(2)?(st64)?_([bui])(\d+)(_d16_hi|_d16)?$", self.base)
        if found:
            kind, two, far, sign, bits, half = found.groups()
            nbytes = int(bits) // 8
            count = max(1, nbytes // 4)
            what = {("i", 1): "sbyte", ("i", 2): "sshort"}.get((sign, nbytes), "dword")
            offsets = [offset]
            if two:
                scale = nbytes * (64 if far else 1)
                offsets = [int(self.mods.get(key, "0"), 0) * scale for key in ("offset0", "offset1")]
            align = min(nbytes, 8) if nbytes != 16 else 16
            align = 4 if nbytes == 12 else align
            if kind == "read":
                target, address = ops
                registers = target.registers(count * len(offsets))

                def read(b):
                    start = _lds_address(b, address)  # first: the target may overlap the address
                    for k, more in enumerate(offsets):
                        words = b.lds.load(b.lane_group[b.mask], b.lane_wave[b.mask], start + more, nbytes, align)
                        _deliver(b, target.index + k * count, words, what, half)
                    b.lg.append(("read", registers))
                    b.pending |= registers

                return self.guarded(_reads(address), () if half else registers, read)
            address, *sources = ops

            def write(b):
                start = _lds_address(b, address)
                for source, more in zip(sources, offsets):
                    b.check_known(source.index, count)
                    b.lds.store(
                        b.lane_group[b.mask],
                        b.lane_wave[b.mask],
                        start + more,
                        _collect(b, source.index, count, half),
                        nbytes,
                        align,
                    )
                b.lg.append(("write", frozenset()))

            return self.guarded(_reads(*ops), (), write)
        if self.base in ("ds_bpermute_b32", "ds_permute_b32"):
            target, address, source = ops
            backward = self.base == "ds_bpermute_b32"

            def permute(b):
                lane = ((b.V[address.index].astype(I64) + offset) >> 2) & 63
                wave = np.arange(b.W)[:, None]
                if backward:
                    result = np.where(b.mask[wave, lane], b.V[source.index][wave, lane], U32(0))
                else:
                    result = np.zeros((b.W, LANES), U32)
                    rows = np.broadcast_to(wave, lane.shape)
                    result[rows[b.mask], lane[b.mask]] = b.V[source.index][b.mask]
                b.put(target.index, result)
                b.lg.append(("read", target.registers()))
                b.pending |= target.registers()

            return self.guarded(_reads(address, source), target.registers(), permute)
        raise self.unknown()

    # -------------------------------------------------------------------------------------------- MFMA
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
                if b.options["denorm_flush"]:
                    exponent = U16(0x7C00 if kind == "f16" else 0x7F80)
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
                result = core.multiply_accumulate(left, right, start.view(F32), b.options["mma"])
                if b.options["denorm_flush"] and kind in ("f16", "bf16"):
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

    # -------------------------------------------------------------------------------------------- VALU
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
        elif base in _CLAMPED or (base in _VALU and _VALU[base][0] == "f"):
            self.allow("clamp")
        else:
            self.allow()
        found = re.match(r"v_cmp_(\w+?)_([iuf])(16|32|64)$", base)
        if found:
            return self.compare(*found.groups())
        if base in _VALU:
            return self.simple(*_VALU[base])
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
            function = _CLAMPED.get(self.base) or (
                lambda *values: np.clip(np.nan_to_num(plain(*values), nan=0.0), F32(0), F32(1))
            )
        selects = [self.mods.get(f"src{k}_sel") for k in range(len(sources))]
        fetch = [_lanes(s, kind, 0, select) for s, kind, select in zip(sources, kinds, selects)]
        finish = _OUT[out]
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

        reads = _reads(*sources)
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
        elif self.base in _VALU:
            out, kinds, function = _VALU[self.base]
        else:
            raise self.unknown("dpp")
        if self.base.startswith("v_fmac"):
            sources.append(target)
        plain = _lanes(first, kinds[0])
        others = [_lanes(s, kind) for s, kind in zip(sources[1:], kinds[1:])]
        finish = _OUT[out]
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

        return self.guarded(_reads(*sources, target), target.registers(1), step)

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
            fx, fy = _raw(x, low[0]), _raw(y, low[1])

            def move(b):
                first, second = np.array(fx(b)), np.array(fy(b))
                b.put(target.index, first)
                b.put(target.index + 1, second)

            return self.guarded(_reads(*sources), target.registers(2), move)
        if base in _PACKED32:
            function = _PACKED32[base]

            def fetch(source, part, negate):
                raw = _lanes(source, "f", part if source.kind != "k" else 0)
                return (lambda b: -raw(b)) if negate else raw

            first = [fetch(s, p, g) for s, p, g in zip(sources, low, neg_low)]
            second = [fetch(s, p, g) for s, p, g in zip(sources, high, neg_high)]

            def step(b):
                one = np.array(function(*[f(b) for f in first]), F32)
                two = np.array(function(*[f(b) for f in second]), F32)
                b.put(target.index, one.view(U32))
                b.put(target.index + 1, two.view(U32))

            return self.guarded(_reads(*sources), target.registers(2), step)
        if base in _PACKED16:
            kind, function = _PACKED16[base]

            def half(source, upper, negate):
                if source.kind == "k":
                    value = int(_half_bits(source.real)) if source.real is not None else source.bits
                    constant = U16((value >> 16 if upper else value) & 0xFFFF)
                    raw = lambda b: constant
                else:
                    shift, lanes = U32(16 * upper), _raw(source)
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

            return self.guarded(_reads(*sources), target.registers(1), step)
        raise self.unknown()

    def mixed(self):
        target, *sources = self.operands()
        chosen = [int(x) for x in self.mods.get("op_sel", "[0,0,0]").strip("[]").split(",")]
        is_half = [int(x) for x in self.mods.get("op_sel_hi", "[0,0,0]").strip("[]").split(",")]

        def fetch(source, upper, half):
            if not half:
                return _lanes(source, "f")
            if source.kind == "k" or source.negate or source.absolute:
                raise self.unknown("half operand")
            lanes, shift = _raw(source), U32(16 * upper)
            return lambda b: ((lanes(b) >> shift) & U32(0xFFFF)).astype(U16).view(F16).astype(F32)

        values = [fetch(*item) for item in zip(sources, chosen, is_half)]
        if self.base in ("v_fma_mix_f32", "v_mad_mix_f32"):
            return self.guarded(
                _reads(*sources),
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

        return self.guarded(_reads(*sources) | target.registers(1), target.registers(1), step)

    def compare(self, relation, kind, width):
        target, x, y = self.operands()
        selects = self.mods.get("src0_sel"), self.mods.get("src1_sel")
        if width == "64":
            view = {"i": I64, "u": U64, "f": F64}[kind]
            raw = _lanes64(x), _lanes64(y)
            fx, fy = ((lambda b, f=f: f(b).view(view)) for f in raw)
        elif width == "16":
            if kind == "f":
                fx, fy = (_lanes(o, "h", 0, s) for o, s in zip((x, y), selects))
            else:
                view = np.int16 if kind == "i" else U16
                raw = [_lanes(o, "u", 0, s) for o, s in zip((x, y), selects)]
                fx, fy = ((lambda b, f=f: f(b).astype(U16).view(view)) for f in raw)
        else:
            fx, fy = (_lanes(o, kind, 0, s) for o, s in zip((x, y), selects))
        if kind == "f" and relation in _FLOAT_RELATIONS:
            function = _FLOAT_RELATIONS[relation]
        elif relation in _RELATIONS and not (kind == "f" and relation == "ne"):
            function = _RELATIONS[relation]
        else:
            raise self.unknown()
        return self.guarded(
            _reads(x, y), target.registers(2), lambda b: b.put_mask(target.index, function(fx(b), fy(b)))
        )

    # ---- instructions with a form of their own; named after the mnemonic
    def _v_readfirstlane_b32(self, target, x):
        def step(b):
            lane = b.mask.argmax(1)
            wave = np.arange(b.W)
            if b.strict and not b.known[x.index] and not b.known_lanes[x.index][wave, lane][b.waves].all():
                raise Fault("reads a lane that was never written")
            b.sput(target.index, b.V[x.index][wave, lane])

        return self.guarded(x.registers(), target.registers(1), step)

    def _v_readlane_b32(self, target, x, lane):
        index = _scalar(lane)
        return self.guarded(
            _reads(x, lane),
            target.registers(1),
            lambda b: b.sput(target.index, b.V[x.index][np.arange(b.W), np.broadcast_to(index(b) & U32(63), (b.W,))]),
        )

    def _v_writelane_b32(self, target, x, lane):
        index, value = _scalar(lane), _scalar(x)

        def step(b):
            where = np.zeros(b.mask.shape, bool)
            where[np.arange(b.W), np.broadcast_to(index(b) & U32(63), (b.W,))] = True
            where &= b.waves[:, None]
            np.copyto(b.V[target.index], np.broadcast_to(value(b), (b.W,))[:, None], where=where)
            b.known_lanes[target.index] |= where

        return self.guarded(_reads(x, lane, target), target.registers(1), step)

    def _v_mbcnt(self, target, x, y):
        mask, add = _lanes(x), _lanes(y)
        upper = self.base == "v_mbcnt_hi_u32_b32"
        below = np.clip(np.arange(LANES) - (32 if upper else 0), 0, 32)
        ones = np.array([(1 << int(k)) - 1 for k in below], U64).astype(U32)
        return self.guarded(
            _reads(x, y), target.registers(1), lambda b: b.put(target.index, core.popcount(mask(b) & ones) + add(b))
        )

    def _carry(self, target, carry, x, y, carry_in=None):
        """v_add_co / v_addc_co / v_sub_co / v_subb_co / v_subrev_co / v_subbrev_co"""
        fx, fy = _lanes(x), _lanes(y)
        extra = _lane_mask(carry_in) if carry_in is not None else None
        add, reverse = self.base.startswith("v_add"), "rev" in self.base

        def step(b):
            one, two = fx(b).astype(I64), fy(b).astype(I64)
            more = extra(b) if extra else 0
            total = one + two + more if add else two - one - more if reverse else one - two - more
            b.put(target.index, total.astype(U32))
            b.put_mask(carry.index, (total >> 32) != 0)

        reads = _reads(x, y) | (carry_in.registers() if carry_in is not None else frozenset())
        return self.guarded(reads, target.registers(1) | carry.registers(2), step)

    def _mad64(self, target, carry, x, y, z):
        """v_mad_u64_u32, v_mad_i64_i32"""
        signed = self.base == "v_mad_i64_i32"
        fx, fy, fz = _lanes(x, "i" if signed else "u"), _lanes(y, "i" if signed else "u"), _lanes64(z)

        def step(b):
            if signed:
                product = (fx(b).astype(I64) * fy(b).astype(I64)).astype(U64)
            else:
                product = fx(b).astype(U64) * fy(b).astype(U64)
            addend = fz(b)
            total = product + addend
            b.put64(target.index, total)
            b.put_mask(carry.index, total < addend)

        return self.guarded(_reads(x, y, z), target.registers(2) | carry.registers(2), step)

    def _shift64(self, target, x, y):
        """v_lshlrev_b64, v_lshrrev_b64, v_ashrrev_i64"""
        amount, value, name = _lanes(x), _lanes64(y), self.base

        def step(b):
            by, bits = amount(b).astype(U64) & U64(63), value(b)
            if name == "v_lshlrev_b64":
                bits = bits << by
            elif name == "v_lshrrev_b64":
                bits = bits >> by
            else:
                bits = (bits.astype(I64) >> by.astype(I64)).astype(U64)
            b.put64(target.index, bits)

        return self.guarded(_reads(x, y), target.registers(2), step)

    def _v_cndmask_b32(self, target, x, y, condition):
        fx, fy = (_lanes(o, "u", 0, self.mods.get(s)) for o, s in ((x, "src0_sel"), (y, "src1_sel")))
        choose = _lane_mask(condition)
        if self.mods.get("dst_sel", "DWORD") != "DWORD":
            raise self.unknown("dst_sel")
        return self.guarded(
            _reads(x, y, condition),
            target.registers(1),
            lambda b: b.put(target.index, np.where(choose(b), fy(b), fx(b))),
        )

    def _v_perm_b32(self, target, x, y, z):
        fx, fy, fz = _lanes(x), _lanes(y), _lanes(z)
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

        return self.guarded(_reads(x, y, z), target.registers(1), step)

    def _v_div_scale_f32(self, target, flag, x, y, z):
        fx, fy, fz = _lanes(x, "f"), _lanes(y, "f"), _lanes(z, "f")

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

        return self.guarded(_reads(x, y, z), target.registers(1) | flag.registers(2), step)

    def _v_div_fmas_f32(self, target, x, y, z):
        fx, fy, fz = _lanes(x, "f"), _lanes(y, "f"), _lanes(z, "f")

        def step(b):
            addend = fz(b)
            value = fma32(fx(b), fy(b), addend)
            scaled = _unpack(b.S[_VCC : _VCC + 2])
            if (scaled & b.mask).any():
                large = ((addend.view(U32) >> U32(23)) & U32(255)) > 127
                value = np.where(scaled, np.ldexp(value, np.where(large, 64, -64)), value).astype(F32)
            b.put(target.index, value.view(U32))

        reads = _reads(x, y, z) | {_SREG + _VCC, _SREG + _VCC + 1}
        return self.guarded(reads, target.registers(1), step)


def _early(b, touched, step):
    """An instruction touches the target of an outstanding load."""
    if not b.strict:
        return step(b)
    number = min(b.pending & touched)
    name = f"s{number - _SREG}" if number >= _SREG else f"v{number}"
    raise Fault(f"touches {name} while a load into it is outstanding (missing s_waitcnt)")


def _wait(b, vm, lgkm):
    """s_waitcnt: retire all but the newest `vm` / `lgkm` operations; scalar loads return out of order."""
    if len(b.vm) > vm:
        del b.vm[: len(b.vm) - vm]
    if len(b.lg) > lgkm and (lgkm == 0 or not any(kind == "scalar" for kind, _ in b.lg)):
        del b.lg[: len(b.lg) - lgkm]
    b._pending()


def _global_address(address, base, offset):
    """function(batch) -> int64 addresses of the active lanes, flat."""

    def where(b):
        b.check_known(address.index, address.count)
        if base.kind == "off":
            at = b.V[address.index].astype(I64) | (b.V[address.index + 1].astype(I64) << 32)
        else:
            at = pointer(b).astype(I64)[:, None] + b.V[address.index].astype(I64)
        at = at + offset
        return at.reshape(-1) if b.full else at[b.mask]

    if base.kind != "off":
        pointer = _scalar64(base)
    return where


def _lds_address(b, operand):
    b.check_known(operand.index, 1)
    at = b.V[operand.index].astype(I64)
    return at.reshape(-1) if b.full else at[b.mask]


def _deliver(b, index, words, what, half):
    """Loaded words (n, k) into VGPRs of the active lanes."""
    if what in ("sbyte", "sshort"):
        words = words.astype(np.int8 if what == "sbyte" else np.int16).astype(I32).view(U32)
    if half:
        old = b.V[index][b.mask]
        new = words[:, 0] & U32(0xFFFF)
        words = ((old & U32(0xFFFF)) | (new << U32(16)) if half == "_d16_hi" else (old & U32(0xFFFF0000)) | new)[
            :, None
        ]
    for k in range(words.shape[1]):
        if b.full:
            b.V[index + k] = words[:, k].reshape(b.W, LANES)
            b.known[index + k] = True
        else:
            b.V[index + k][b.mask] = words[:, k]
            if not b.known[index + k]:
                b.known_lanes[index + k] |= b.mask


def _collect(b, index, count, half, mask=None):
    """uint32 (n, count) of the active lanes, to be stored."""
    mask = b.mask if mask is None else mask
    words = np.stack([b.V[index + k][mask] for k in range(count)], 1)
    return words >> U32(16) if half == "_d16_hi" else words


def _private_place(b, at, inside, nbytes):
    """Index of bytes in the private (scratch) memory, which has one row per lane."""
    offset = at[inside]
    if b.private is None or ((offset < 0) | (offset + nbytes > b.private.shape[1])).any():
        raise Fault(f"private memory access past the {b.program.kernel.stack} bytes of the frame", 0)
    return np.flatnonzero(inside.reshape(-1))[:, None], offset[:, None] + np.arange(nbytes)


def _private_store(b, at, inside, nbytes, words, index, count):
    """Spill; a spilled register that was never written stays unwritten."""
    place = _private_place(b, at, inside, nbytes)
    b.private[place] = np.ascontiguousarray(words).view(np.uint8)[:, :nbytes]
    known = np.ones(int(inside.sum()), bool)
    for k in range(index, index + count):
        known &= b.known[k] | b.known_lanes[k][inside]
    b.private_known[place] = known[:, None]


def _private_load(b, at, inside, nbytes):
    """(uint32 words, bool known) of the lanes in `inside`."""
    place = _private_place(b, at, inside, nbytes)
    raw = np.zeros((int(inside.sum()), max(4, nbytes)), np.uint8)
    raw[:, :nbytes] = b.private[place]
    return raw.view(U32), b.private_known[place].all(1)


def _forget(b, index, count, known):
    """Registers just loaded are unwritten in the active lanes where `known` is False."""
    if known.all():
        return
    for k in range(index, index + count):
        lanes = b.known_lanes[k] | b.known[k]
        lanes[b.mask] = known
        b.known_lanes[k], b.known[k] = lanes, False


def _copy_known(b, target, source):
    """A copied lane is as undefined as its source."""
    if b.known[source]:
        return
    before = b.known_lanes[target] | b.known[target]
    b.known_lanes[target] = np.where(b.mask, b.known_lanes[source], before)
    b.known[target] = bool(b.known_lanes[target].all())


# ------------------------------------------------------------------------------------------- tables
_RELATIONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
_FLOAT_RELATIONS = {
    "neq": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}
_BRANCHES = {
    "s_branch": None,
    "s_cbranch_scc0": lambda b: ~b.scc,
    "s_cbranch_scc1": lambda b: b.scc,
    "s_cbranch_execz": lambda b: ~b.exec.any(1),
    "s_cbranch_execnz": lambda b: b.exec.any(1),
    "s_cbranch_vccz": lambda b: (b.S[_VCC] | b.S[_VCC + 1]) == 0,
    "s_cbranch_vccnz": lambda b: (b.S[_VCC] | b.S[_VCC + 1]) != 0,
}
_SAVEEXEC = {
    "and_saveexec_b64": lambda v, e: v & e,
    "or_saveexec_b64": lambda v, e: v | e,
    "andn2_saveexec_b64": lambda v, e: v & ~e,
    "xor_saveexec_b64": lambda v, e: v ^ e,
}
_NONZERO = object()  # "SCC = result is not zero"


def _wide(x):
    return np.asarray(x).astype(I64)


def _signed(x):
    return x.view(I32)


def _overflow(total):
    return total.astype(U32), (total > 0x7FFFFFFF) | (total < -0x80000000)


def _lshl_add(count):
    def function(b, x, y):
        total = (_wide(x) << count) + _wide(y)
        return total.astype(U32), (total >> 32) != 0

    return function


def _bfe(x, shift, width, signed):
    """Bit field of int64 x; width is an array or scalar."""
    field = (x >> shift) & ((I64(1) << width) - 1)
    if signed:
        top = I64(1) << np.maximum(width - 1, 0)
        field = np.where(width > 0, (field ^ top) - top, 0)
    return field.astype(U32)


def _u32_bfe(x, y, signed=False):
    width = np.minimum((_wide(y) >> 16) & 127, 32)
    source = _wide(_signed(x)) if signed else _wide(x)
    return _bfe(source, _wide(y) & 31, width, signed)


_SALU2 = {  # (batch, x, y) -> (result, None | _NONZERO | SCC)
    "add_u32": lambda b, x, y: (x + y, (x + y) < x),
    "sub_u32": lambda b, x, y: (x - y, y > x),
    "addc_u32": lambda b, x, y: ((_wide(x) + y + b.scc).astype(U32), (_wide(x) + y + b.scc) > MASK32),
    "subb_u32": lambda b, x, y: ((_wide(x) - y - b.scc).astype(U32), (_wide(y) + b.scc) > x),
    "add_i32": lambda b, x, y: _overflow(_wide(_signed(x)) + _signed(y)),
    "sub_i32": lambda b, x, y: _overflow(_wide(_signed(x)) - _signed(y)),
    "mul_i32": lambda b, x, y: (x * y, None),
    "mul_hi_u32": lambda b, x, y: ((x.astype(U64) * y.astype(U64) >> U64(32)).astype(U32), None),
    "mul_hi_i32": lambda b, x, y: ((_wide(_signed(x)) * _signed(y) >> 32).astype(U32), None),
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
    "abs_i32": (lambda x: np.abs(_wide(_signed(x))).astype(U32), True),
    "sext_i32_i16": (lambda x: np.asarray(x).astype(np.int16).astype(I32).view(U32), False),
    "sext_i32_i8": (lambda x: np.asarray(x).astype(np.int8).astype(I32).view(U32), False),
    "brev_b32": (lambda x: _reverse_bits(x), False),
    "bcnt1_i32_b32": (lambda x: core.popcount(x), True),
    "ff1_i32_b32": (lambda x: np.where(x == 0, U32(MASK32), core.popcount((x & (~x + U32(1))) - U32(1))), False),
    "flbit_i32_b32": (lambda x: _leading_zeros(x), False),
}


def _reverse_bits(x):
    for shift, keep in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = ((x >> U32(shift)) & U32(keep)) | ((x & U32(keep)) << U32(shift))
    return x


def _leading_zeros(x):
    """Leading zeros, -1 for 0."""
    exponent = np.frexp(np.asarray(x).astype(F64))[1]
    return np.where(x == 0, U32(MASK32), (32 - exponent).astype(U32))


def _integer(low, high):
    """float32 -> integer, toward zero, saturating, NaN -> 0; result as uint32."""
    return lambda a: (
        np.clip(np.nan_to_num(np.trunc(a.astype(F64)), nan=0.0, posinf=high, neginf=low), low, high)
        .astype(I64)
        .astype(U32)
    )


def _approximate(function):
    """float32 function computed in float64, subnormal results flushed (as the transcendental unit does)."""
    return lambda a: flush(function(a.astype(F64)).astype(F32))


def _fma16(a, b, c):
    product, addend = np.broadcast_arrays(np.multiply(a, b, dtype=F64), np.asarray(c, F64))
    return odd_sum(product, addend).astype(F16)


def _minimum(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def _maximum(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def _divide_fixup(q, low, top):
    """v_div_fixup_f32: quotient q of top / low with the special cases put right."""
    sign = np.signbit(low) ^ np.signbit(top)
    exponent = lambda v: ((np.asarray(v).view(U32) >> U32(23)) & U32(255)).astype(I32)
    result = np.where(sign, -np.abs(q), np.abs(q))
    result = np.where(exponent(top) - exponent(low) < -150, F32(0), result)
    result = np.where(np.isinf(low) | (top == 0), F32(0), result)
    result = np.where((low == 0) | np.isinf(top), F32(np.inf), result)
    result = np.where(sign, -np.abs(result), np.abs(result))
    result = np.where(((low == 0) & (top == 0)) | (np.isinf(low) & np.isinf(top)), F32(np.nan), result)
    return np.where(np.isnan(top), top, np.where(np.isnan(low), low, result))


def _sad(a):
    return a & U32(31)


def _u24(a):
    return a & U32(0xFFFFFF)


def _bfe_lanes(signed):
    def function(a, offset, width):
        return _bfe(_wide(a.view(I32)) if signed else _wide(a), _wide(offset) & 31, _wide(width) & 31, signed)

    return function


_OUT = {
    "u": lambda r: r,
    "i": lambda r: np.asarray(r, I32).view(U32),
    "f": lambda r: np.asarray(r, F32).view(U32),
    "h": lambda r: np.asarray(r, F16).view(U16).astype(U32),
    "x": lambda r: r & U32(0xFFFF),
}
_VALU = {  # name -> (kind of result, kinds of operands, function)
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_accvgpr_read_b32": ("u", "u", lambda a: a),
    "v_accvgpr_write_b32": ("u", "u", lambda a: a),
    "v_accvgpr_mov_b32": ("u", "u", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: ~a),
    "v_bfrev_b32": ("u", "u", _reverse_bits),
    "v_ffbh_u32": ("u", "u", _leading_zeros),
    "v_cvt_f32_u32": ("f", "u", lambda a: a.astype(F32)),
    "v_cvt_f32_i32": ("f", "i", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": ("u", "f", _integer(0, MASK32)),
    "v_cvt_i32_f32": ("u", "f", _integer(-0x80000000, 0x7FFFFFFF)),
    "v_cvt_f16_f32": ("h", "f", lambda a: a.astype(F16)),
    "v_cvt_f32_f16": ("f", "h", lambda a: a.astype(F32)),
    "v_cvt_f32_ubyte0": ("f", "u", lambda a: (a & U32(255)).astype(F32)),
    "v_cvt_f32_ubyte1": ("f", "u", lambda a: (a >> U32(8) & U32(255)).astype(F32)),
    "v_cvt_f32_ubyte2": ("f", "u", lambda a: (a >> U32(16) & U32(255)).astype(F32)),
    "v_cvt_f32_ubyte3": ("f", "u", lambda a: (a >> U32(24)).astype(F32)),
    "v_rcp_f32": ("f", "f", _approximate(lambda a: 1.0 / a)),
    "v_rcp_iflag_f32": ("f", "f", _approximate(lambda a: 1.0 / a)),
    "v_exp_f32": ("f", "f", _approximate(np.exp2)),
    "v_log_f32": ("f", "f", _approximate(np.log2)),
    "v_sqrt_f32": ("f", "f", _approximate(np.sqrt)),
    "v_rsq_f32": ("f", "f", _approximate(lambda a: 1.0 / np.sqrt(a))),
    "v_rndne_f32": ("f", "f", np.rint),
    "v_trunc_f32": ("f", "f", np.trunc),
    "v_floor_f32": ("f", "f", np.floor),
    "v_ceil_f32": ("f", "f", np.ceil),
    "v_add_u32": ("u", "uu", lambda a, b: a + b),
    "v_sub_u32": ("u", "uu", lambda a, b: a - b),
    "v_subrev_u32": ("u", "uu", lambda a, b: b - a),
    "v_and_b32": ("u", "uu", lambda a, b: a & b),
    "v_or_b32": ("u", "uu", lambda a, b: a | b),
    "v_xor_b32": ("u", "uu", lambda a, b: a ^ b),
    "v_xnor_b32": ("u", "uu", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u", "uu", lambda a, b: b << _sad(a)),
    "v_lshrrev_b32": ("u", "uu", lambda a, b: b >> _sad(a)),
    "v_ashrrev_i32": ("i", "ui", lambda a, b: b >> _sad(a).view(I32)),
    "v_lshlrev_b16": ("x", "xx", lambda a, b: b << (a & U32(15))),
    "v_lshrrev_b16": ("x", "xx", lambda a, b: b >> (a & U32(15))),
    "v_add_u16": ("x", "xx", lambda a, b: a + b),
    "v_sub_u16": ("x", "xx", lambda a, b: a - b),
    "v_mul_lo_u16": ("x", "xx", lambda a, b: a * b),
    "v_mul_lo_u32": ("u", "uu", lambda a, b: a * b),
    "v_mul_hi_u32": ("u", "uu", lambda a, b: (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32)),
    "v_mul_hi_i32": ("u", "ii", lambda a, b: (_wide(a) * _wide(b) >> 32).astype(U32)),
    "v_mul_u32_u24": ("u", "uu", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_hi_u32_u24": ("u", "uu", lambda a, b: (_u24(a).astype(U64) * _u24(b).astype(U64) >> U64(32)).astype(U32)),
    "v_mul_f32": ("f", "ff", lambda a, b: a * b),
    "v_add_f32": ("f", "ff", lambda a, b: a + b),
    "v_sub_f32": ("f", "ff", lambda a, b: a - b),
    "v_subrev_f32": ("f", "ff", lambda a, b: b - a),
    "v_max_f32": ("f", "ff", _maximum),
    "v_min_f32": ("f", "ff", _minimum),
    "v_max_f16": ("h", "hh", _maximum),
    "v_min_f16": ("h", "hh", _minimum),
    "v_add_f16": ("h", "hh", lambda a, b: a + b),
    "v_sub_f16": ("h", "hh", lambda a, b: a - b),
    "v_mul_f16": ("h", "hh", lambda a, b: a * b),
    "v_fma_f16": ("h", "hhh", _fma16),
    "v_min_u32": ("u", "uu", np.minimum),
    "v_max_u32": ("u", "uu", np.maximum),
    "v_min_i32": ("i", "ii", np.minimum),
    "v_max_i32": ("i", "ii", np.maximum),
    "v_pack_b32_f16": ("u", "uu", lambda a, b: (a & U32(0xFFFF)) | (b << U32(16))),
    "v_cvt_pkrtz_f16_f32": ("u", "ff", lambda a, b: core.half_toward_zero(a) | (core.half_toward_zero(b) << U32(16))),
    "v_ldexp_f32": ("f", "fi", lambda a, b: np.ldexp(a.astype(F64), np.clip(b, -400, 400)).astype(F32)),
    "v_add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "v_or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_and_or_b32": ("u", "uuu", lambda a, b, c: (a & b) | c),
    "v_lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << _sad(b)) + c),
    "v_lshl_or_b32": ("u", "uuu", lambda a, b, c: (a << _sad(b)) | c),
    "v_add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << _sad(c)),
    "v_bfe_u32": ("u", "uuu", _bfe_lanes(False)),
    "v_bfe_i32": ("u", "uuu", _bfe_lanes(True)),
    "v_bfi_b32": ("u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    "v_mad_u32_u24": ("u", "uuu", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_alignbit_b32": (
        "u",
        "uuu",
        lambda a, b, c: ((a.astype(U64) << U64(32) | b.astype(U64)) >> (c.astype(U64) & U64(31))).astype(U32),
    ),
    "v_alignbyte_b32": (
        "u",
        "uuu",
        lambda a, b, c: ((a.astype(U64) << U64(32) | b.astype(U64)) >> ((c.astype(U64) & U64(3)) * U64(8))).astype(U32),
    ),
    "v_fma_f32": ("f", "fff", fma32),
    "v_fmac_f32": ("f", "fff", fma32),
    "v_med3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "v_min3_i32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_f32": (
        "f",
        "fff",
        lambda a, b, c: np.where(
            np.isnan(a) | np.isnan(b) | np.isnan(c),
            _minimum(_minimum(a, b), c),
            _maximum(_minimum(a, b), _minimum(_maximum(a, b), c)),
        ),
    ),
    "v_max3_f32": ("f", "fff", lambda a, b, c: _maximum(_maximum(a, b), c)),
    "v_min3_f32": ("f", "fff", lambda a, b, c: _minimum(_minimum(a, b), c)),
    "v_div_fixup_f32": ("f", "fff", _divide_fixup),
}


_CLAMPED = {  # unsigned saturation
    "v_add_u32": lambda a, b: np.minimum(_wide(a) + b, MASK32).astype(U32),
    "v_sub_u32": lambda a, b: np.maximum(_wide(a) - b, 0).astype(U32),
    "v_subrev_u32": lambda a, b: np.maximum(_wide(b) - a, 0).astype(U32),
}
_PACKED32 = {"v_pk_fma_f32": fma32, "v_pk_mul_f32": lambda a, b: a * b, "v_pk_add_f32": lambda a, b: a + b}
_PACKED16 = {
    "v_pk_add_f16": ("h", lambda a, b: a + b),
    "v_pk_mul_f16": ("h", lambda a, b: a * b),
    "v_pk_fma_f16": ("h", _fma16),
    "v_pk_max_f16": ("h", _maximum),
    "v_pk_min_f16": ("h", _minimum),
    "v_pk_lshlrev_b16": ("x", lambda a, b: b << (a & U16(15))),
    "v_pk_lshrrev_b16": ("x", lambda a, b: b >> (a & U16(15))),
    "v_pk_add_u16": ("x", lambda a, b: a + b),
    "v_pk_sub_u16": ("x", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("x", lambda a, b: a * b),
}
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
_ATOMICS = {  # (old words, new words, compare words or None, lanes) -> words to store
    "cmpswap": lambda old, new, compare, lanes: np.where(old == compare[lanes], new, old),
    "add": lambda old, new, compare, lanes: old + new,
    "add_f32": lambda old, new, compare, lanes: (old.view(F32) + new.view(F32)).view(U32),
    "pk_add_f16": lambda old, new, compare, lanes: (
        np.ascontiguousarray(old).view(F16) + np.ascontiguousarray(new).view(F16)
    ).view(U32),
}


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
    denorm_flush: bool = True,
    preload: bool = True,
    max_instructions: int = core.MAX_INSTRUCTIONS,
) -> Stats:
    """Runs one kernel of a gfx90a code object.

    Args:
        image: bytes of the hsaco.
        symbol: the kernel's name, without ".kd".
        grid: workgroups.
        block: work-items in a workgroup.
        params: see `core.pack_params`.
        shared_bytes: dynamic LDS in bytes, Triton's metadata `shared`.
        buffers: what the kernel may touch. Mode "r", "rw", or "w1": every byte may be stored at most once, none may be
            loaded. Arrays are changed in place.
        strict: False: only bounds, modes and unknown instructions are checked.
        mma: "round": MFMA is an exact dot product rounded once; "chop": every step is cut toward zero.
        denorm_flush: MFMA flushes fp16 and bf16 subnormals, as AMD documents for MI200.
        preload: use the entry point that expects preloaded kernel arguments, when the kernel has one.
        max_instructions: the budget over all waves.

    Raises Fault (pc, instruction, place, reason), elf.ImageError, ToolMissingError, and ValueError for bad buffers.
    """
    if mma not in core.MMA_MODES:
        raise ValueError(f"mma must be one of {core.MMA_MODES}")
    program = _program(bytes(image), symbol, core.find_objdump())
    kernel = program.kernel
    packed = core.pack_params(params, kernel, grid, block)
    if block[1:] != (1, 1):
        raise Fault(f"block {block}: only one-dimensional blocks are modelled")
    threads = block[0]
    if not 0 < threads <= (kernel.max_threads or 1024):
        raise Fault(f"block of {threads} work-items; the kernel allows 1 to {kernel.max_threads}")
    lds = kernel.shared + int(shared_bytes)
    if shared_bytes < 0 or lds > 65536:
        raise Fault(f"{lds} bytes of LDS; gfx90a has 65536")
    memory = Memory([*buffers, ("kernarg", np.frombuffer(packed, np.uint8), _KERNARG_BASE, "r")], strict)
    options = {
        "strict": strict,
        "mma": mma,
        "denorm_flush": denorm_flush,
        "preload": preload,
        "max_instructions": max_instructions,
    }
    ids = core.group_ids(grid)
    waves = -(-threads // LANES)
    together = core.waves_per_batch(waves, len(ids), LANES)
    stats = Stats()
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), together):
            batch = _Batch(program, ids[start : start + together], waves, threads, memory, packed, lds, options)
            core.run_fragments(batch)
            options["max_instructions"] -= batch.executed
            stats.instructions += batch.executed
            for pc, count in batch.counts.items():
                stats.pcs.add(pc)
                stats.opcodes[program.text[pc][0].split(" ", 1)[0]] += count
    stats.stores = {b.name: b.stores for b in memory.buffers if b.mode != "r"}
    return stats
