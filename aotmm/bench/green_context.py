"""Streams on a part of a GPU's multiprocessors: green contexts of the CUDA driver."""

from __future__ import annotations

from ctypes import CDLL, RTLD_GLOBAL, byref, c_int, c_uint, c_void_p
from pathlib import Path

import torch

from aotmm.bench import nvcc
from aotmm.bench.providers import NotRunError
from aotmm.timing.graph import recorded

_SOURCE = Path(__file__).with_suffix(".cu")


def stream(ordinal: int, multiprocessors: int) -> torch.cuda.Stream:
    """Return a stream of so many multiprocessors, which run its graphs too.

    Raises:
        NotRunError: as `nvcc.built`; or the driver makes no such stream, or of another number.
    """
    CDLL("libcuda.so.1", mode=RTLD_GLOBAL)  # whose functions the library takes from the process
    library = nvcc.opened(nvcc.built(_SOURCE, _SOURCE.name, []))
    library.visit.argtypes = [c_void_p, c_void_p]
    library.open_stream.argtypes = [c_int, c_uint, c_void_p, c_void_p]
    found, address = c_uint(), c_void_p()
    code = library.open_stream(ordinal, multiprocessors, byref(found), byref(address))
    if code or found.value != multiprocessors:
        raise NotRunError(
            f"a green context of {multiprocessors} multiprocessors: the driver's error is {code}, it has {found.value}"
        )
    place = torch.device("cuda", ordinal)
    made = torch.cuda.ExternalStream(address.value, device=place)  # type: ignore[no-untyped-call]
    seen = torch.zeros(1024, device=place, dtype=torch.uint8)
    torch.cuda.synchronize()
    with torch.cuda.stream(made):
        recorded(lambda each: library.visit(each.data_ptr(), made.cuda_stream), [seen])()
        torch.cuda.synchronize()
    ran = int(seen.sum())
    if ran != multiprocessors:
        raise NotRunError(f"a graph in a green context of {multiprocessors} multiprocessors ran on {ran}")
    return made
