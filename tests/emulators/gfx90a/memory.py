"""Loads, stores and atomics: global, private and LDS."""

from __future__ import annotations

import re

import numpy as np

from tests.emulators.core import F16, F32, I32, I64, U32, Fault
from tests.emulators.gfx90a.batch import PRIVATE_BASE
from tests.emulators.gfx90a.instruction import Instruction
from tests.emulators.gfx90a.operands import LANES, raw_lanes, read_by, scalar64_of, scalar_of

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
_ATOMICS = {  # (old words, new words, compare words or None, lanes) -> words to store
    "cmpswap": lambda old, new, compare, lanes: np.where(old == compare[lanes], new, old),
    "add": lambda old, new, compare, lanes: old + new,
    "add_f32": lambda old, new, compare, lanes: (old.view(F32) + new.view(F32)).view(U32),
    "pk_add_f16": lambda old, new, compare, lanes: (
        np.ascontiguousarray(old).view(F16) + np.ascontiguousarray(new).view(F16)
    ).view(U32),
}


class MemoryAccess(Instruction):
    """Global memory, buffers (with them private memory) and LDS."""

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
                return self.guarded(read_by(address, base), () if half else registers, load)
            address, data, base = ops
            where = _global_address(address, base, offset)

            def store(b):
                if b.full or b.mask.any():
                    b.check_known(data.index, count)
                    b.memory.store(where(b), _collect(b, data.index, count, half), nbytes, align)
                b.vm.append(frozenset())

            return self.guarded(read_by(address, base) | data.registers(count), (), store)
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

        return self.guarded(read_by(address, base) | data.registers(width), registers, atomic)

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
        fv, fs, use = raw_lanes(address) if "offen" in self.mods else None, scalar_of(base), resource.index

        def place(b):
            """(address int64 (W, 64), lanes inside the resource, whether it is the private segment)"""
            at = np.zeros(b.mask.shape, I64) + offset
            if fv is not None:
                b.check_known(address.index, 1)
                at = at + fv(b).astype(I64)
            shift = np.broadcast_to(fs(b), (b.W,)).astype(I64)[:, None]
            start = b.S[use].astype(I64) | ((b.S[use + 1].astype(I64) & 0xFFFF) << 32)
            private = start[b.waves] == PRIVATE_BASE
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

        reads = read_by(resource, base) | (address.registers() if fv else frozenset())
        if kind == "load":
            registers = data.registers(count)
            return self.guarded(reads, () if half else registers, load)
        return self.guarded(reads | data.registers(count), (), store)

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

                return self.guarded(read_by(address), () if half else registers, read)
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

            return self.guarded(read_by(*ops), (), write)
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

            return self.guarded(read_by(address, source), target.registers(), permute)
        raise self.unknown()


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
        pointer = scalar64_of(base)
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
