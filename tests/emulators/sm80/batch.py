"""Registers and memory of warps that run together, and constant banks."""

from __future__ import annotations

import struct

import numpy as np

from tests.emulators import core
from tests.emulators.core import U32, Fault, Fragment, Shared

LANES = 32
STOP = -1  # a step returns this when it has changed the fragments itself
STACK_TOP = 0xFFFFF0  # what constant bank 0 holds as the initial stack pointer (offset 0x28)


class Batch:
    """Registers and memory of the warps that run together.  W = warps.

    R     uint32 (registers, W, 32); P bool [8] of (W, 32); UR uint32 (64, W, 1); UP bool [8] of (W, 1)
    mask  bool (W, 32): lanes of the running fragment; full: all of them; warps bool (W, 1): their warps
    cp    (open, groups): cp.async copies not yet committed, and committed groups not yet waited for
    """

    def __init__(self, program, ids, warps_in_group, block, memory, constants, shared_bytes, options):
        self.program, self.memory, self.constants, self.options = program, memory, constants, options
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
        self.shared = Shared(groups, shared_bytes, program.shared_unit)
        self.lane_group = np.broadcast_to(self.group[:, None], shape)
        self.lane_wave = np.broadcast_to(self.wave[:, None], shape)
        self.thread = (self.lane_wave * LANES + np.arange(LANES)).astype(U32)
        frame = program.kernel.stack
        self.local = np.random.default_rng(3).integers(0, 256, (count * LANES, frame), dtype=np.uint8)
        self.local_known = np.zeros(self.local.shape, bool)
        self.barriers = np.zeros((16, *shape), bool)  # convergence barriers B0..B15
        self.alive = self.thread < block[0] * block[1] * block[2]
        self.fragments = [Fragment(0, self.alive, ([], []))]
        self.executed_pcs, self.executed = set(), 0

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
        """BSYNC / WARPSYNC: None to go on, or STOP to wait for other lanes of the same warps."""
        others = self._others([self.fragment])
        if not (self._needed(waiting) & others & self.warps).any():
            return None
        self.fragment.waiting = waiting
        self.fragment.pc = self.pc
        return STOP

    def split(self, taken, target):
        """Lanes `taken` go to instruction `target`, the rest of the fragment to the next one."""
        if not taken.any():
            return None
        if np.array_equal(taken, self.mask):
            return target
        stay = self.mask & ~taken
        queues = self.cp
        self.fragment.lanes, self.fragment.pc = stay, self.pc + 1
        self.fragment.queues = share(queues, stay)
        self.fragments.append(Fragment(target, taken, share(queues, taken)))
        return STOP

    def advance(self, fragment, limit):
        """Run `fragment` until it stops or reaches `limit` (pc of another fragment)."""
        program, pcs, pc = self.program, self.executed_pcs, fragment.pc
        steps, nwarps, budget = program.steps, self.nwarps, self.options["max_instructions"]
        while True:
            self.pc = pc
            try:
                step = (steps[pc] if pc < len(steps) else None) or program.step(pc)
                pcs.add(pc)
                self.executed += nwarps
                if self.executed > budget:
                    raise Fault(f"the launch exceeded {budget} instructions")
                target = step(self)
            except Fault as fault:
                raise self._located(fault, pc) from None
            if target is None:
                pc += 1
            elif target == STOP:
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

    def put_uniform(self, index, value, mask=None):
        """UR[index] := value in the warps of the fragment; with a mask, in those that have a lane of it."""
        if index != 63:
            np.copyto(
                self.UR[index], value, where=self.warps if mask is None else self.warps & mask.any(1, keepdims=True)
            )

    def check_known(self, index, count, mask):
        if index is None:
            return
        for k in range(index, index + count):
            if not self.known[k]:
                bad = ~self.known_lanes[k] & mask
                if bad.any():
                    raise Fault(f"uses R{k}, which was never written in an active lane", int(bad[mask].argmax()))


def share(queues, lanes):
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


class Constants:
    """Constant banks: 0 has block and grid size, stack pointer, parameters; 2 has ptxas's branch tables, literals."""

    def __init__(self, grid, block, packed, base, table):
        data = bytearray(base) + packed + bytes(-len(packed) % 4)
        struct.pack_into("<6I", data, 0, *block, *grid)
        struct.pack_into("<I", data, 0x28, STACK_TOP)
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
