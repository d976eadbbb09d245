"""The names of the kernels that a call launches, by torch's profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity

from aotmm.bench.providers import Call
from aotmm.timing.operands import Operands


def launched(call: Call, operands: Operands) -> str:
    """Return the names of the kernels that one call launches, in order; "unknown" with the reason if none is seen."""
    try:
        call(operands)  # loads them
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            call(operands)
            torch.cuda.synchronize()
        events = [event for event in found.events() or () if event.device_type == torch.profiler.DeviceType.CUDA]
    except Exception as failure:  # noqa: BLE001 - the profiler needs rights that not every machine gives
        return f"unknown: {type(failure).__name__}: {failure}"
    names = [event.name for event in sorted(events, key=lambda event: event.time_range.start)]
    return " + ".join(names) or "unknown: the profiler saw no kernel"
