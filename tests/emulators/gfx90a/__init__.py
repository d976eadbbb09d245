"""Interpreter for the part of AMD's gfx90a (CDNA2) ISA that Triton matmuls use.

It executes the bytes of an hsaco, decoded by LLVM's `llvm-objdump`, on numpy arrays. Written from AMD's public ISA
documents. It is stricter than the hardware on purpose:

  * device memory: exact bounds of the given buffers, read-only and write-once modes, natural alignment
  * LDS: only the bytes that the launch grants; reading bytes never written, and data races between waves inside
    one barrier interval, are faults
  * a register that an outstanding load will write must not be touched before an s_waitcnt that covers it; LDS
    writes must be waited for before s_barrier
  * a VGPR that was never written in an active lane must not feed a memory operation or an MFMA; registers start
    as NaN patterns

MFMA flushes fp16 and bf16 subnormals, as AMD documents for MI200. Not modelled: time, MFMA/VALU hazard wait states
(s_nop distances), caches and the memory model, real MFMA rounding (a dot product is exact and rounded once), exact bits
of v_rcp/v_exp/v_log (correctly rounded here). An instruction or modifier that is not known raises `Fault` when it is
reached; nothing is skipped.
"""

from __future__ import annotations

import numpy as np

from tests.emulators import core
from tests.emulators.core import Fault, Memory, Stats
from tests.emulators.gfx90a.batch import KERNARG_BASE, Batch
from tests.emulators.gfx90a.operands import LANES
from tests.emulators.gfx90a.program import program


def launch(
    image: bytes,
    symbol: str,
    grid: core.Size,
    block: core.Size,
    params: core.Params,
    shared_bytes: int,
    buffers: core.Buffers,
    *,
    preload: bool = True,
    max_instructions: int = core.MAX_INSTRUCTIONS,
) -> Stats:
    """Runs one kernel of a gfx90a code object.

    Args:
        image: bytes of the hsaco.
        symbol: the kernel's name, without ".kd".
        grid: workgroups.
        block: work-items in a workgroup.
        params: see `core.pack_params`.
        shared_bytes: dynamic LDS in bytes, Triton's metadata `shared`.
        buffers: what the kernel may touch. Mode "r", "rw", or "w1": every byte may be stored at most once, none may be
            loaded. Arrays are changed in place.
        preload: use the entry point that expects preloaded kernel arguments, when the kernel has one.
        max_instructions: the budget over all waves.

    Raises Fault (pc, instruction, place, reason), elf.ImageError, ToolMissingError, and ValueError for bad buffers.
    """
    code = program(image, symbol)
    kernel = code.kernel
    packed = core.pack_params(params, kernel, grid, block)
    if block[1:] != (1, 1):
        raise Fault(f"block {block}: only one-dimensional blocks are modelled")
    threads = block[0]
    if not 0 < threads <= (kernel.max_threads or 1024):
        raise Fault(f"block of {threads} work-items; the kernel allows 1 to {kernel.max_threads}")
    lds = kernel.shared + int(shared_bytes)
    if shared_bytes < 0 or lds > 65536:
        raise Fault(f"{lds} bytes of LDS; gfx90a has 65536")
    memory = Memory([*buffers, ("kernarg", np.frombuffer(packed, np.uint8), KERNARG_BASE, "r")])
    options = {
        "preload": preload,
        "max_instructions": max_instructions,
    }
    ids = core.group_ids(grid)
    waves = -(-threads // LANES)
    together = core.waves_per_batch(waves, len(ids), LANES)
    stats = Stats()
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), together):
            batch = Batch(code, ids[start : start + together], waves, threads, memory, packed, lds, options)
            core.run_fragments(batch)
            options["max_instructions"] -= batch.executed
            stats.pcs |= batch.executed_pcs
    stats.stores = {b.name: b.stores for b in memory.buffers if b.mode != "r"}
    return stats
