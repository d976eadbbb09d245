"""An upper bound of the use of gfx90a's matrix units by the main loop of a kernel, from its code alone.

    python -m tests.emulators.bound [PACK]     # the bounds of a pack's kernels, and the best tiles of some products

Nothing runs: this is the only figure of speed that there is without the GPU. It is computed, not measured. A compute
unit has 4 SIMDs, each with a matrix unit, and the waves of a block are spread over them. All times are clocks.

    m   in which the matrix unit is busy in a loop of one wave: 2 * rows * columns * K of each instruction over a
        quarter of the compute unit's rate (`RATES`)
    t   from a barrier to the next one, of one wave that has its SIMD alone, by llvm-mca; m' is the part of m there
    w   waves of a block on a SIMD
    b   blocks on the compute unit (`schema.occupancy`)

The bound is the least of these, each at most 1:

    issue   b * w * m / sum of max(t, w * m') over the stretches between barriers. No wave of a block is ahead of the
            others by more than a barrier, so its loop takes the time of each stretch, or of its matrix instructions.
            Only other blocks fill what is left. It never exceeds (m / t of the whole loop) * waves of a SIMD.
    lds     m / 4 over the clocks that the LDS needs for the loads and stores of a wave's loop. It serves 32 lanes of 4
            bytes in a clock, so less than 4 bytes cost as much as 4.
    loads   bytes on the way, over the latency of memory, over the bytes that a loop needs in its time m * w * b. On the
            way are at most the loads that the loop's waits (s_waitcnt vmcnt) leave open.

It does not know what else costs time: hits and channels of the L2 cache, conflicts of banks in the LDS, latencies that
are longer than LLVM's, the beginning and the end of a tile, clocks that fall under load. Copies and reductions have no
matrix instructions, and no bound. That of a whole product (`product_use`) adds rounds of blocks, and bytes over the
bandwidths of L2 and memory.

Sources. Rates, LDS, L2, memory: AMD, CDNA 2 white paper and MI200 ISA guide: fp16, bf16 and int8 1024 operations per
clock of a compute unit, fp32 256; 32 banks of 4 bytes; L2 with 32 channels of 128 bytes; 1638.4 GB/s of a die at 1.7
GHz. Times of instructions, among them 5 issue cycles of 4 clocks for the LDS and 80 for memory: LLVM's scheduling model
of gfx90a, as llvm-mca applies it, which issues in order and knows s_waitcnt. LLVM 14 has no gfx942 and no gfx950, so
these have no bounds. Bytes, latency and rate: Little's law.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from aotmm.kernels import VECTOR_BYTES
from aotmm.pack.files import data_folder
from aotmm.pack.schema import Kernel, occupancy
from aotmm.pack.time_model import LEAST_STEPS
from aotmm.problem import DTYPES, LAYOUTS, SPLITS
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.emulators import core
from tests.emulators.gfx90a.program import program
from tests.samples import code_in

SIMDS = 4
LANES = 64
ISSUE = 4  # clocks of an issue cycle, in which LLVM counts
RATES = {"f16": 1024, "bf16": 512, "bf16_1k": 1024, "f32": 256, "i8": 1024}  # operations per clock of a compute unit
LDS_BYTES = 128  # of a clock
L2_BYTES = 32 * 128  # likewise, from all channels of a die
MEMORY_BYTES = 1638.4 / 1.7  # likewise
LATENCY = 80 * ISSUE  # of a load from memory
_MFMA = re.compile(r"v_mfma_[fi]32_(\d+)x(\d+)x(\d+)_?(bf16_1k|bf16|f16|f32|i8)")
_LDS = re.compile(r"ds_(?:read|write)(2)?(?:st64)?_[bui](\d+)")
_LOAD = re.compile(r"(?:global|buffer)_load_(?:dword(?:x(\d))?|[us]?(byte|short))")
_VMCNT = re.compile(r"s_waitcnt.*vmcnt\((\d+)\)")
_JUMP = re.compile(r"s_c?branch")
_TARGET = re.compile(r"^(s_c?branch\w*) .*")
_CARRY = re.compile(r"^v_(?:add|sub)\w*_co_u32_(e32|e64) (v\d+), [^,]+, ([^,]+, [^,]+).*")
_TRIALS = 100
_ITERATIONS = 4  # of the loop in llvm-mca: the third is in full swing


class Bound(NamedTuple):
    """The three terms, each at most 1, of `blocks` blocks on a compute unit; `alone`: m / t of one wave, for people."""

    blocks: int
    alone: float
    issue: float
    lds: float
    loads: float

    @property
    def use(self) -> float:
        """The bound: the part of the time in which matrix units can be busy."""
        return min(self.issue, self.lds, self.loads)


@dataclass(frozen=True)
class Loop:
    """A loop of one wave, unrolled: its instructions, and the stretches between its barriers as clocks (t, m')."""

    lines: tuple[str, ...]
    stretches: tuple[tuple[int, int], ...]

    @property
    def matrix_clocks(self) -> int:
        """m: clocks in which the matrix unit is busy."""
        return sum(map(_matrix_clocks, self.lines))

    @property
    def products(self) -> int:
        """Multiplications and additions of one wave."""
        return sum(math.prod(map(int, found.groups()[:3])) for found in map(_MFMA.match, self.lines) if found)

    def bound(self, waves: int, blocks: int) -> Bound:
        """What `blocks` blocks of so many waves can make of a compute unit."""
        m, on_simd = self.matrix_clocks, _ceil(waves, SIMDS)
        of_block = sum(max(t, on_simd * part) for t, part in self.stretches)
        lds = sum(map(_lds_clocks, self.lines))
        loaded, on_way = self._loads()
        return Bound(
            blocks,
            m / sum(t for t, _ in self.stretches),
            min(1.0, blocks * waves / SIMDS * m / of_block),
            min(1.0, m / SIMDS / lds) if lds else 1.0,
            min(1.0, blocks * waves / SIMDS * m / LATENCY * on_way / loaded) if loaded else 1.0,
        )

    def _loads(self) -> tuple[int, int]:
        """Bytes that a wave loads in one loop, and the most that are on the way at once."""
        open_: deque[int] = deque()
        loaded = most = 0
        for line in self.lines * 2:
            if found := _LOAD.match(line):
                bytes_ = {"byte": 1, "short": 2, None: 4 * int(found[1] or 1)}[found[2]] * LANES
                open_.append(bytes_)
                loaded += bytes_
                most = max(most, sum(open_))
            elif found := _VMCNT.match(line):
                while len(open_) > int(found[1]):
                    open_.popleft()
        return loaded // 2, most


def _matrix_clocks(line: str) -> int:
    found = _MFMA.match(line)
    return 2 * math.prod(map(int, found.groups()[:3])) * SIMDS // RATES[found[4]] if found else 0


def _lds_clocks(line: str) -> int:
    found = _LDS.match(line)
    return LANES * max(4, int(found[2]) // 8) * (2 if found[1] else 1) // LDS_BYTES if found else 0


def main_loop(text: Mapping[int, tuple[str, Sequence[int]]]) -> Loop | None:
    """The loop with the most matrix instructions of a disassembled kernel, None for none.

    Args:
        text: by address, an instruction and its 32-bit words (`gfx90a.program.Program.text`).
    """
    begins = {to for at, (line, words) in text.items() if (to := _target(at, line, words)) is not None and to <= at}
    bodies = [_body(text, first) for first in sorted(begins)]
    lines = max(bodies, key=lambda body: (sum(map(_matrix_clocks, body)), -len(body)), default=())  # an inner one
    return Loop(lines, _stretches(lines)) if any(map(_matrix_clocks, lines)) else None


def _target(at: int, line: str, words: Sequence[int]) -> int | None:
    """Where a jump goes: the word's lower half has the distance in words, from the next instruction."""
    if not _JUMP.match(line):
        return None
    distance = words[0] & 0xFFFF
    return at + 4 + 4 * (distance - ((distance & 0x8000) << 1))


def _body(text: Mapping[int, tuple[str, Sequence[int]]], first: int) -> tuple[str, ...]:
    """A loop's instructions in their order, where every lane takes part; none, if what begins at `first` is no loop.

    So jumps over loads (execz) are not taken, nor others that leave the loop or skip a part of it.
    """
    at, lines = first, []
    for _ in range(len(text)):
        line, words = text[at]
        to, at = _target(at, line, words), at + 4 * len(words)
        lines.append(line)
        if to is not None and (line.startswith("s_branch") or (to == first and "execz" not in line)):
            at = to
        if at == first:
            return tuple(lines)
        if at not in text:
            break
    return ()


def _stretches(lines: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(clocks, matrix clocks) from each barrier to the next; of the whole loop, if it has none."""
    count = len(lines)
    issued = [ISSUE * row["CycleIssued"] for row in _timeline(lines)][2 * count :]
    barriers = [number for number, line in enumerate(lines) if line.startswith("s_barrier")] or [0]
    ends = [*barriers[1:], barriers[0] + count]
    return tuple(
        (issued[end] - issued[begin], sum(_matrix_clocks(lines[each % count]) for each in range(begin, end)))
        for begin, end in zip(barriers, ends, strict=True)
    )


def _timeline(lines: Sequence[str]) -> list[dict[str, int]]:
    """What llvm-mca says of each instruction of each iteration, in issue cycles.

    LLVM 14's crashes, by chance, on instructions with two results, so additions with a carry stand as ones without,
    which take as long; the few others (v_mad_u64_u32) are tried again.
    """
    source = "\n".join(_CARRY.sub(r"v_add_u32_\1 \2, \3", _TARGET.sub(r"\1 0", line)) for line in lines)
    options = [f"-iterations={_ITERATIONS}", "-json", "-timeline", f"-timeline-max-iterations={_ITERATIONS}"]
    options += ["-timeline-max-cycles=0", "-mtriple=amdgcn", "-mcpu=gfx90a"]
    for _ in range(_TRIALS):
        done = subprocess.run([find_mca(), *options], input=source, capture_output=True, text=True, check=False)
        if done.returncode != -signal.SIGSEGV:
            break
    done.check_returncode()
    rows: list[dict[str, int]] = json.loads(done.stdout)["CodeRegions"][0]["TimelineView"]["TimelineInfo"]
    return rows


def find_mca() -> str:
    """Path of the `llvm-mca` beside the `llvm-objdump` that decodes images. Raises core.ToolMissingError."""
    place = Path(core.find_objdump()).with_name("llvm-mca")
    if not place.exists():
        raise core.ToolMissingError(f"{place} was not found: install Debian's package `llvm` (any LLVM from 14 on)")
    return str(place)


class Bounded(NamedTuple):
    """A kernel of a pack, its main loop, and the bound at the occupancy that it reaches."""

    kernel: Kernel
    loop: Loop
    waves: int
    bound: Bound


def bounds(folder: Path) -> list[Bounded]:
    """The products and partials of the pack for gfx90a in `folder`, in their order."""
    arch, code, found = target("gfx90a"), code_in(folder), []
    for kernel in open_pack(folder).manifest.kernels:
        if kernel.role.startswith("grouped"):
            continue
        loop = main_loop(program(code(kernel.image), kernel.symbol).text)
        if loop is not None:
            waves = kernel.threads // arch.warp_size
            found.append(Bounded(kernel, loop, waves, loop.bound(waves, occupancy(kernel, arch))))
    return found


def product_use(row: Bounded, product: tuple[int, int, int], split: int, units: int) -> float:
    """A bound of the use of all matrix units of a GPU with `units` compute units by a product of M, N, K.

    Its time is at least that of the compute unit which gets the most blocks, at most `bound.blocks` of them at once, in
    whole tiles and steps; that of the loads of all blocks from L2; and that of A, B and C in memory. Slices of K also
    take the time of their sums, written to L2 and read again.
    """
    (M, N, K), config, bytes_ = product, row.kernel.config, DTYPES[row.kernel.dtype_a].bytes
    down, across = _ceil(M, config.block_m), _ceil(N, config.block_n)
    steps, most = _ceil(_ceil(K, config.block_k), split), _ceil(down * across * split, units)
    rate = row.loop.products * SIMDS / row.loop.matrix_clocks  # multiplications of a compute unit in a clock
    use = row.loop.bound(row.waves, min(most, row.bound.blocks)).use
    computed = most * steps * row.loop.products * row.waves / rate / use
    loaded = (M * across + N * down) * K * bytes_ / L2_BYTES
    moved = (M * K + K * N + M * N) * bytes_ / MEMORY_BYTES
    summed = 2 * 4 * M * N * split / L2_BYTES if split > 1 else 0.0
    return M * N * K / rate / units / (max(computed, loaded, moved) + summed)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def best(rows: Sequence[Bounded], product: tuple[int, int, int], units: int) -> tuple[float, int, Bounded]:
    """The highest bound of a product, the slices of K and the kernel; of equals the fewest slices, the largest tile."""
    plans = [(row, split) for row in rows for split in (SPLITS if row.kernel.role == "partial" else (1,))]
    able = [plan for plan in plans if product[2] // plan[0].kernel.config.block_k >= LEAST_STEPS * plan[1]]

    def rank(plan: tuple[Bounded, int]) -> tuple[float, int, int]:
        row, split = plan
        config = row.kernel.config
        return round(product_use(row, product, split, units), 2), -split, config.block_m * config.block_n

    row, split = max(able, key=rank)
    return product_use(row, product, split, units), split, row


PRODUCTS = ((4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (16, 4096, 4096))
UNITS = {"MI210, MI250": 104, "MI250X": 110}  # of a die


def main(folder: Path) -> None:
    """Write the tables in Markdown."""
    rows = bounds(folder)
    lines = [
        "| kernel | registers | LDS | blocks | waves / SIMD | m / t | issue | lds | loads | bound |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        kernel, bound = row.kernel, row.bound
        facts = f"{kernel.registers} | {kernel.shared_bytes} | {bound.blocks} | {bound.blocks * row.waves / SIMDS:g}"
        terms = " | ".join(f"{term:.2f}" for term in (*bound[1:], bound.use))
        lines.append(f"| {kernel.name} | {facts} | {terms} |")
    lines += ["", f"| product | layout | {' | '.join(UNITS)} |", "|---" * (2 + len(UNITS)) + "|"]
    for product, dtype, layout in itertools.product(PRODUCTS, ("fp16", "bf16"), LAYOUTS):
        aligned = dtype, layout, VECTOR_BYTES
        able = [row for row in rows if (row.kernel.dtype_a, row.kernel.layout, row.kernel.vector_bytes) == aligned]
        cells = [f"{'x'.join(map(str, product))} {dtype}", layout]
        for units in UNITS.values():
            use, split, row = best(able, product, units)
            config = row.kernel.config
            slices = f", K in {split}" if split > 1 else ""
            cells.append(f"{config.block_m}x{config.block_n}x{config.block_k}{slices}: {use:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else data_folder("artifacts") / "gfx90a")
