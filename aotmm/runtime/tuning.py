"""Devices and tuning tables as a launcher's C interface has them."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char, c_double, c_float, c_int32, c_int64, c_uint16, c_uint32, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aotmm.pack.time_model import HIDDEN, PDL_INPUTS, PLAN_INPUTS, PROBLEM_INPUTS, SECOND, Constants
from aotmm.problem import DEVICE_NAME_BYTES
from aotmm.target import GPUS, TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aotmm.pack.schema import Kernel
    from aotmm.pack.table import Table
    from aotmm.target import Target


class CDevice(Structure):
    """aotmm_device."""

    _fields_ = [
        *((name, c_int32) for name in ("multiprocessors", "shared_bytes", "clock_mhz", "memory_gbps", "l2_bytes")),
        ("name", c_char * DEVICE_NAME_BYTES),
    ]


class COrigin(Structure):
    """aotmm_origin."""

    _fields_ = [
        ("name", c_char * DEVICE_NAME_BYTES),
        ("measured", c_int32),
        *((name, c_double) for name in ("compute", "memory", "tensor_tflops")),
    ]


_Nodes, _SecondNodes = c_float * HIDDEN, c_float * SECOND


class CNetwork(Structure):
    """aotmm_network."""

    _fields_ = [
        ("problem", _Nodes * len(PROBLEM_INPUTS)),
        ("plan", _Nodes * len(PLAN_INPUTS)),
        ("pdl", _Nodes * len(PDL_INPUTS)),
        ("second", _SecondNodes * HIDDEN),
        ("second_bias", _SecondNodes),
        ("outputs", _SecondNodes),
    ]


class CConstants(Structure):
    """aotmm_constants."""

    _fields_ = [(name, c_float) for name in Constants._fields]


class CCorrection(Structure):
    """aotmm_correction."""

    _fields_ = [("hidden", _Nodes), ("shift", c_float), ("alternates", c_int32)]


class CTime(Structure):
    """aotmm_time."""

    _fields_ = [("ns", c_uint32), ("split", c_uint16), ("pdl", c_uint16)]


class CShape(Structure):
    """aotmm_shape."""

    _fields_ = [
        *((name, c_int64) for name in ("M", "N", "K")),
        *((name, c_int32) for name in ("element_bytes", "relaxed", "layout")),
    ]


class CTable(Structure):
    """aotmm_table."""

    _fields_ = [
        ("device", CDevice),
        ("config_count", c_uint32),
        ("shape_count", c_uint32),
        ("constants", POINTER(CConstants)),
        ("network", POINTER(CNetwork)),
        ("corrections", POINTER(CCorrection)),
        ("config_numbers", POINTER(c_uint16)),
        ("shapes", POINTER(CShape)),
        ("times", POINTER(CTime)),
    ]


@dataclass(frozen=True, slots=True)
class Origin:
    """What selection on a device goes by, a tuning table or estimates: `aotmm_origin` of launcher.h.

    Attributes:
        table: the device of the table; None if there are estimates only.
        measured: it is the device's own table: measured times count, and nothing is scaled.
        compute, memory: speed of the device over that of the table's or, of estimates, over that of the arch's GPU.
        tensor_tflops: a lower limit of its tensor cores in fp16, None for no limit.
    """

    table: str | None
    measured: bool
    compute: float
    memory: float
    tensor_tflops: float | None

    @classmethod
    def from_c(cls, origin: COrigin) -> Origin:
        """Return a C origin as a value."""
        tflops = origin.tensor_tflops or None
        return cls(origin.name.decode() or None, bool(origin.measured), origin.compute, origin.memory, tflops)

    def __str__(self) -> str:
        if self.measured:
            return f"table of {self.table}"
        limit = "" if self.tensor_tflops is None else f", tensor cores {self.tensor_tflops:.0f} TFLOP/s"
        speeds = f"compute {self.compute:.2f}, memory {self.memory:.2f}{limit}"
        if self.table is None:
            return f"estimates from tiles and data sheets, scaled: {speeds}; never measured on such a GPU"
        return f"models scaled from {self.table}: {speeds}, no measured times"


def nominal_device(row: Target) -> CDevice:
    """Return the device that stands for an arch where no GPU is asked."""
    facts = (row.multiprocessors, row.shared_bytes, row.clock_mhz, int(row.bandwidth), 0)
    return CDevice(*facts, row.device.encode())


def listed_device(name: str) -> CDevice:
    """Return the GPU called `name` of `target.GPUS`, as its data sheet describes it."""
    gpu = GPUS[name]
    facts = (gpu.multiprocessors, TARGETS[gpu.arch].shared_bytes, gpu.clock_mhz, gpu.memory_gbps)
    return CDevice(*facts, gpu.l2_megabytes << 20, name.encode())


def measured_device(table: Table, shared_bytes: int) -> CDevice:
    """Return the device that `table` was measured on."""
    facts = (table.multiprocessors, shared_bytes, table.clock_mhz, table.memory_gbps, table.l2_bytes)
    return CDevice(*facts, table.device.encode())


def c_table(table: Table, kernels: Sequence[Kernel]) -> CTable:
    """Return `table` for `retune` of a launcher with these kernels."""
    from aotmm.pack.tuning import tuning  # only here: the first product should be quick

    found = tuning(table, kernels, TARGETS[table.arch])
    c = CTable(measured_device(table, 0), found.config_count, len(found.shapes))
    c.constants = (CConstants * len(kernels))(*(CConstants(*row) for row in found.constants))
    if table.network is not None:
        c.network = pointer(CNetwork(*table.network.parts, table.network.second_bias, table.network.outputs))
        rows = (CCorrection(_Nodes(*row.hidden), row.shift, row.alternates) for row in found.corrections)
        c.corrections = (CCorrection * len(kernels))(*rows)
    c.config_numbers = (c_uint16 * len(kernels))(*found.config_numbers)
    c.shapes = (CShape * len(found.shapes))(*(CShape(*row) for row in found.shapes))
    times = [CTime(*time) for row in found.times for time in row]
    c.times = (CTime * len(times))(*times)
    return c
