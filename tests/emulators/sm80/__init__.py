"""Interpreter for the SASS that ptxas emits for Triton matmuls: sm_80, and what sm_86 and sm_89 have beside it.

It executes the bytes of a cubin, decoded by `nvdisasm`, on numpy arrays. HMMA, IMMA, QMMA and LDSM follow the PTX ISA's
published fragment layouts of mma.m16n8k* and ldmatrix; integer opcodes follow their names and were checked through
results. It is stricter than the hardware on purpose:

  * device memory: exact bounds of the given buffers, read-only and write-once modes, natural alignment
  * shared memory: only the bytes that the launch grants; reading bytes never written, and data races between warps
    inside one barrier interval, are faults; cp.async data appears only after DEPBAR, and nothing else may touch its
    place before, nor may another warp have read it since the last barrier
  * an indirect branch (BRX) may only reach the targets declared for it
  * a register that was never written in an active lane must not feed a store, an address or an MMA; registers start
    as NaN patterns

Not modelled: time, scoreboards and stall counts (control bits), caches and the memory model, real tensor-core rounding
(a dot product is exact and rounded once), exact bits of MUFU (correctly rounded here), named barriers, wgmma and TMA.
An instruction or modifier that is not known raises `Fault` when it is reached; nothing is skipped.
"""

from __future__ import annotations

import numpy as np

from tests.emulators import core, elf
from tests.emulators.core import Fault, Memory, Stats
from tests.emulators.sm80.batch import LANES, Batch, Constants
from tests.emulators.sm80.program import program


def launch(
    image: bytes,
    symbol: str,
    grid: core.Size,
    block: core.Size,
    params: core.Params,
    shared_bytes: int,
    buffers: core.Buffers,
    *,
    max_instructions: int = core.MAX_INSTRUCTIONS,
) -> Stats:
    """Runs one kernel of a cubin for sm_80, or one of its instructions for sm_86, sm_89, sm_90.

    Args:
        image: bytes of the cubin.
        symbol: the kernel's name.
        grid: CTAs.
        block: threads in a CTA.
        params: see `core.pack_params`.
        shared_bytes: dynamic shared memory in bytes, Triton's metadata `shared`.
        buffers: what the kernel may touch. Mode "r", "rw", or "w1": every byte may be stored at most once, none may be
            loaded. Arrays are changed in place.
        max_instructions: the budget over all warps.

    Raises Fault (pc, instruction, place, reason), elf.ImageError, ToolMissingError, and ValueError for bad buffers.
    """
    code = program(image, symbol)
    kernel = code.kernel
    packed = core.pack_params(params, kernel)
    threads = block[0] * block[1] * block[2]
    if kernel.reqntid is not None and block != kernel.reqntid:
        raise Fault(f"block {block}; the kernel requires {kernel.reqntid}")
    if not 0 < threads <= (kernel.max_threads or 1024):
        raise Fault(f"block of {threads} threads; the kernel allows 1 to {kernel.max_threads or 1024}")
    # on sm_90 the first KiB is the system's and is counted as static
    size = kernel.shared + int(shared_bytes)
    limit = 232448 if elf.read(image).arch == "sm90" else 166912
    if shared_bytes < 0 or size > limit:
        raise Fault(f"{size} bytes of shared memory; the limit is {limit}")
    memory = Memory(buffers)
    constants = Constants(grid, block, packed, kernel.param_base, code.table)
    options = {"max_instructions": max_instructions}
    ids = core.group_ids(grid)
    warps = -(-threads // LANES)
    together = core.waves_per_batch(warps, len(ids), LANES)
    stats = Stats()
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), together):
            batch = Batch(code, ids[start : start + together], warps, block, memory, constants, size, options)
            core.run_fragments(batch)
            options["max_instructions"] -= batch.executed
            stats.pcs.update(code.text[pc][0] for pc in batch.executed_pcs)
    stats.stores = {b.name: b.stores for b in memory.buffers if b.mode != "r"}
    return stats
