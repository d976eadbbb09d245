"""Registers and memory of waves that run together."""

from __future__ import annotations

import struct

import numpy as np

from tests.emulators import core
from tests.emulators.core import MASK32, U32, U64, Fault, Fragment, Shared
from tests.emulators.gfx90a.operands import EXEC, LANES, pack_mask, unpack_mask

STOP = -1  # a step returns this when it has changed the fragments itself
KERNARG_BASE = 0x9F0000000000  # above every address of a 47-bit user space
PRIVATE_BASE = 0x9E0000000000  # base in the private segment's buffer resource; recognised, never dereferenced


class Batch:
    """Registers and memory of the waves that run together.  W = waves.

    V        uint32 (vgprs, W, 64); accumulation VGPRs follow the architectural ones
    S        uint32 (128, W); scc bool (W,); exec bool (W, 64)
    waves    bool (W,): waves of the running fragment; whole: all of them
    mask     bool (W, 64): lanes that execute now; full: all of them
    """

    def __init__(self, program, ids, waves_in_group, threads, memory, packed, lds, options):
        self.program, self.memory, self.options = program, memory, options
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
        self.lds = Shared(groups, lds, program.lds_unit)
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
        self.set_exec(pack_mask(thread < threads).T)
        preload = options["preload"] and program.preload_count
        start = program.entry + (256 if preload else 0)
        self.fragments = [Fragment(start, self.waves, ([], []))]
        self.executed_pcs = set()
        self.executed = 0
        self.active = self.mask

    def _start_scalars(self, packed):
        program, values = self.program, []
        properties = program.properties
        if properties & 1:
            values += [PRIVATE_BASE & MASK32, PRIVATE_BASE >> 32, MASK32, 0]  # private segment buffer
        for bit, name in ((2, "dispatch_ptr"), (4, "queue_ptr")):
            if properties & bit:
                raise Fault(f"the kernel wants {name}: not modelled")
        if properties & 8:
            values += [KERNARG_BASE & MASK32, KERNARG_BASE >> 32]
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
        """Branch: (W,) bool -> next pc, or STOP after the fragment was split."""
        taken = condition & self.waves
        if not taken.any():
            return None
        if np.array_equal(taken, self.waves):
            return target
        one = self.fragment
        one.lanes, one.pc = self.waves & ~taken, fall
        self.fragments.append(Fragment(target, taken, ([*self.vm], [*self.lg])))
        return STOP

    def advance(self, fragment, limit):
        """Run `fragment` until it stops or reaches `limit` (pc of another fragment)."""
        steps, pcs, pc, nwaves = self.program.steps, self.executed_pcs, fragment.pc, self.nwaves
        budget = self.options["max_instructions"]
        while True:
            try:
                step, fall = steps.get(pc) or self.program.step(pc)
                pcs.add(pc)
                self.executed += nwaves
                if self.executed > budget:
                    raise Fault(f"the launch exceeded {budget} instructions")
                target = step(self)
            except Fault as fault:
                raise self._located(fault, pc) from None
            if target is None:
                pc = fall
            elif target == STOP:
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
            self.S[EXEC : EXEC + 2] = pair
        else:
            np.copyto(self.S[EXEC : EXEC + 2], pair, where=self.waves)
        self.exec = unpack_mask(self.S[EXEC : EXEC + 2])
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
        if index >= EXEC:
            pair = self.S[EXEC : EXEC + 2].copy()
            pair[index - EXEC] = value
            self.set_exec(pair)
        elif self.whole:
            self.S[index] = value
        else:
            np.copyto(self.S[index], value, where=self.waves)

    def sput64(self, index, value):
        low, high = (value & U64(MASK32)).astype(U32), (value >> U64(32)).astype(U32)
        if index == EXEC:
            pair = np.empty((2, self.W), U32)
            pair[0], pair[1] = low, high
            self.set_exec(pair)
        else:
            self.sput(index, low)
            self.sput(index + 1, high)

    def put_mask(self, index, mask):
        """Scalar pair := bool (W, 64), zero in inactive lanes."""
        pair = pack_mask(np.broadcast_to(mask, self.mask.shape) & self.mask).T
        if index == EXEC:
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
        mask = self.mask if mask is None else mask
        for k in range(index, index + count):
            if not self.known[k]:
                bad = ~self.known_lanes[k] & mask
                if bad.any():
                    raise Fault(f"uses v{k}, which was never written in an active lane", int(bad[mask].argmax()))
