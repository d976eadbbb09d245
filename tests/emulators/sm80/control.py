"""Jumps, barriers and registers that are not general."""

from __future__ import annotations

import re

import numpy as np

from tests.emulators.core import I64, MASK32, U32, Fault, Fragment
from tests.emulators.sm80.batch import LANES, STOP, share
from tests.emulators.sm80.instruction import Instruction

_LABEL = re.compile(r"`?\(?(\.L_\w+)\)?")


class Control(Instruction):
    """Jumps, barriers, and registers that are not general: special ones, constants, uniform ones, predicates."""

    def _exit(self):
        self.allow()

        def step(b, mask, where):
            b.alive = b.alive & ~mask
            rest = b.mask & ~mask
            b.fragments.remove(b.fragment)
            if rest.any():
                b.fragments.append(Fragment(b.pc + 1, rest, share(b.cp, rest)))
            return STOP

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
                b.fragments.append(Fragment(targets[place], lanes, share(b.cp, lanes)))
            return STOP

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
            return STOP

        return step

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
        return lambda b, value, where: b.put_uniform(index, value, where)

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
        keep = U32({"U8": 0xFF, "U16": 0xFFFF}.get(self.order[0] if self.order else "", MASK32))
        index = int(self.args[0][2:]) if self.uniform else self.checked(self.args[0])

        def step(b, mask, where):
            if register is not None and self.uniform:
                start = b.UR[register].astype(I64) + offset
                values = [b.constants.gather(bank, start + 4 * k, b.warps) & keep for k in range(count)]
            elif register is not None:
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
            if ((value != first) & mask).any():
                raise Fault("the register is not uniform in the warp", int(((value != first) & mask)[mask].argmax()))
            put(b, first, where)

        return step

    def _redux(self):
        self.allow("MAX", "MIN", "SUM", "S32")
        put, source = self._uniform_put(), self.source(self.args[1])
        reduced = {"MAX": np.max, "MIN": np.min}.get(self.order[0] if self.order else "SUM", np.sum)

        def step(b, mask, where):
            value = np.broadcast_to(source(b), b.mask.shape).astype(U32).view(np.int32).astype(I64)
            if not mask.any(1).all() or (mask != mask[:, :1]).any():
                raise Fault("a reduction without all lanes of a warp")
            put(b, reduced(value, axis=1, keepdims=True).astype(U32), where)

        return step

    def _voteu(self):
        self.allow("ANY")
        if "ANY" not in self.mods or len(self.args) != 2:
            raise self.unknown()
        put, source = self.predicate_result(self.args[0]), self.predicate(self.args[1])

        def step(b, mask, where):
            put(b, (np.broadcast_to(source(b), mask.shape) & mask).any(1, keepdims=True), mask)

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
        return self._packed("PR", lambda b: b.P)

    def _p2ur(self):
        return self._packed("UPR", lambda b: b.UP)

    def _packed(self, name, predicates):
        """Predicates as bits of a register, those that the mask has; the others are the source's."""
        self.allow()
        if self.args[1] != name:
            raise self.unknown()
        put, source, bits = self.result(self.args[0]), self.source(self.args[2]), int(self.args[3], 0)

        def step(b, mask, where):
            value = source(b) & U32(~bits & MASK32)
            for k in range(7):
                if bits >> k & 1:
                    value = value | (predicates(b)[k].astype(U32) << U32(k))
            put(b, value, where)

        return step
