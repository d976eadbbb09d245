"""A kernel of a cubin, disassembled, and decoded as far as it was run."""

from __future__ import annotations

import functools
import re

from tests.emulators import core, elf
from tests.emulators.core import Fault
from tests.emulators.sm80.control import Control
from tests.emulators.sm80.floating import Floating
from tests.emulators.sm80.halves import Halves
from tests.emulators.sm80.integer import Integer
from tests.emulators.sm80.matrix import Matrix
from tests.emulators.sm80.memory import MemoryAccess

_ARCHS = ("sm80", "sm86", "sm87", "sm89", "sm90")


class Program:
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
        self.operands = {}  # what the decoder made of each text

    def step(self, pc):
        if not 0 <= pc < len(self.text):
            raise Fault("runs past the end of the function")
        self.steps[pc] = step = Decoder(self, pc).build()
        return step


class Decoder(Control, MemoryAccess, Matrix, Floating, Halves, Integer):
    """Every instruction that is modelled; a method has the name of its mnemonic."""


@functools.lru_cache(maxsize=64)
def program(image: bytes, symbol: str) -> Program:
    return Program(image, symbol, core.find_nvdisasm())
