"""A kernel of an hsaco, disassembled, and decoded as far as it was run."""

from __future__ import annotations

import functools
import re
import struct

from tests.emulators import core, elf
from tests.emulators.core import Fault
from tests.emulators.gfx90a.matrix import Matrix
from tests.emulators.gfx90a.memory import MemoryAccess
from tests.emulators.gfx90a.scalar import Scalar
from tests.emulators.gfx90a.vector import Vector


class Program:
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
        self.steps, self.operands = {}, {}  # as far as they were decoded, by address and by text

    def step(self, pc):
        """(function(batch) -> None | pc | STOP, next pc) of the instruction at byte address `pc`."""
        if pc not in self.text:
            raise Fault(f"pc {pc:#x} is not the start of an instruction")
        text, words = self.text[pc]
        self.steps[pc] = found = (Decoder(self, pc, text, words).build(), pc + 4 * len(words))
        return found

    @property
    def entry(self):
        return self.kernel.address


class Decoder(Scalar, MemoryAccess, Matrix, Vector):
    """Every instruction that is modelled."""


@functools.lru_cache(maxsize=64)
def program(image: bytes, symbol: str) -> Program:
    return Program(image, symbol, core.find_objdump())
