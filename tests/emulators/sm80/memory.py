"""Loads, stores and atomics."""

from __future__ import annotations

import numpy as np

from tests.emulators.core import F16, F32, I32, U16, U32, Fault, flush
from tests.emulators.sm80.batch import LANES, STACK_TOP
from tests.emulators.sm80.instruction import Instruction

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


class MemoryAccess(Instruction):
    """Loads, stores and atomics: global, shared, cp.async, ldmatrix and local."""

    def _size(self):
        return next((_SIZES[m] for m in self.order if m in _SIZES), 4)

    def _ldg(self):
        self.allow(*_CACHE, *_SIZES)
        if len(self.args) != 2:
            raise self.unknown()
        size = self._size()
        index = self.checked(self.args[0], max(1, size // 4))
        where_is = self.address(self.args[1], "E" in self.mods)

        def step(b, mask, where):
            b.active = mask
            deliver(b, index, b.memory.load(where_is(b, mask)[mask], size, size), self.mods, mask, where)
            b.active = b.mask

        return step

    def _stg(self):
        self.allow(*_CACHE, *_SIZES)
        size = self._size()
        count = max(1, size // 4)
        where_is, index = self.address(self.args[0], "E" in self.mods), self.checked(self.args[1], count)

        def step(b, mask, where):
            b.active = mask
            b.check_known(index, count, mask)
            b.memory.store(where_is(b, mask)[mask], collect(b, index, count, mask), size, size)
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
            deliver(b, index, words, self.mods, mask, where)
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
                collect(b, index, count, mask),
                size,
                size,
            )
            b.active = b.mask

        return step

    def _ldgsts(self):
        """cp.async: the data reach shared memory when DEPBAR has waited for their group, at the latest.

        So from here on nothing else may touch their place.
        """
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
            b.shared.begin_copy(b.lane_group[mask], b.lane_wave[mask], to[mask], size)
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
                    b.shared.end_copy(
                        b.lane_group.reshape(-1)[lanes], b.lane_wave.reshape(-1)[lanes], address, words, size
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
            at = where_is(b, mask)[mask] - (STACK_TOP - frame)
            if ((at < 0) | (at + size > frame) | (at % size != 0)).any():
                raise Fault("local address outside the frame or misaligned", 0)
            place = np.flatnonzero(mask)[:, None], at[:, None] + np.arange(size)
            if load:  # spilled registers may be unwritten in some lanes
                raw = np.zeros((at.size, max(4, size)), np.uint8)
                raw[:, :size] = b.local[place]
                deliver(b, index, raw.view(U32), self.mods, mask, where)
                known = b.local_known[place].all(1)
                if index is not None and not known.all():
                    for k in range(index, index + count):
                        lanes = b.known_lanes[k] | b.known[k]
                        lanes[mask] = known
                        b.known_lanes[k], b.known[k] = lanes, False
            else:
                b.local[place] = np.ascontiguousarray(collect(b, index, count, mask)).view(np.uint8)[:, :size]
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
        where_is = self.address(place, True)
        index = self.checked(value)
        other = self.checked(compare) if compare else None
        out = self.checked(target) if target else None

        def step(b, mask, where):
            b.active = mask
            b.check_known(index, 1, mask)
            new = collect(b, index, 1, mask)[:, 0]
            expected = collect(b, other, 1, mask)[:, 0] if compare else new
            at = where_is(b, mask)[mask]
            old = b.memory.atomic(at, lambda old, lanes: function(old, new[lanes], expected[lanes]))
            if target:
                deliver(b, out, old[:, None], (), mask, where)
            b.active = b.mask

        return step


def deliver(b, index, words, mods, mask, where):
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


def collect(b, index, count, mask):
    """uint32 (n, count) of the lanes in `mask`; RZ is zero."""
    if index is None:
        return np.zeros((int(mask.sum()), count), U32)
    return np.stack([b.R[index + k][mask] for k in range(count)], 1)
