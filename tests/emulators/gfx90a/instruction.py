"""One instruction: its text taken apart, and the guard against loads that are outstanding."""

from __future__ import annotations

import re

from tests.emulators.core import Fault
from tests.emulators.gfx90a.operands import SREG, Operand, split

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


class Instruction:
    """Turns one instruction's text into a step."""

    def __init__(self, program, pc, text, words):
        self.program, self.pc, self.text, self.words = program, pc, text, words
        self.fall = pc + 4 * len(words)
        name, _, rest = text.partition(" ")
        self.base = re.sub(r"_(e32|e64|sdwa|dpp)$", "", name)
        self.encoding = name[len(self.base) + 1 :]
        self.mods = {}
        self.tokens = split(rest)
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
        known = self.program.operands
        for token in self.tokens:
            if token not in known:
                known[token] = Operand(token, self.program)
        return [known[token] for token in self.tokens]

    def guarded(self, reads, writes, step):
        """`step`, which must not touch a register that an outstanding load will write."""
        touched = frozenset(reads) | frozenset(writes)
        return lambda b: step(b) if b.pending.isdisjoint(touched) else _early(b, touched)

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


def _early(b, touched):
    """An instruction touches the target of an outstanding load."""
    number = min(b.pending & touched)
    name = f"s{number - SREG}" if number >= SREG else f"v{number}"
    raise Fault(f"touches {name} while a load into it is outstanding (missing s_waitcnt)")
