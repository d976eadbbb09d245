"""Reading of the compiler's text and images: a kernel's parameters, tensor maps, registers and spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from aotmm.errors import CompileError
from aotmm.kernels import Descriptor, Specialisation
from aotmm.pack.schema import Parameter, TensorMap
from aotmm.problem import DTYPES
from aotmm.target import Target

_PTX_INSTRUCTION = r"\b(wgmma|mma)\.(?:mma_async\.)?sync\.aligned\.m\d+n\d+k(\d+)"
_TCGEN05 = r"\btcgen05\.mma\.cta_group::\d\.kind::(\w+)"
_TCGEN05_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
_AMD_INSTRUCTION = r"\bv_(mfma|wmma)_[a-z0-9]+_\d+x\d+x(\d+)"
SCRATCH = ("global_scratch", "profile_scratch")
DESCRIPTOR_BYTES = 128  # Source: CUDA driver API, CUtensorMap
_PTX_BYTES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8, "f64": 8}


def parameters(
    target: Target, text: str, symbol: str, plan: Specialisation, metadata: dict[str, Any]
) -> tuple[Parameter, ...]:
    """Return the parameter list in the compiler's text, joined with the names that were passed.

    A tensor descriptor is passed as its tensor map, followed by its sizes and strides.

    Raises:
        CompileError: the two do not fit: this Triton passes a parameter that aotmm does not know.
    """
    transfers = iter(metadata.get("tensordesc_meta") or ())  # of every tensor map, in order
    expected = passed(plan, metadata["global_scratch_size"])
    slots = _ptx_slots(text, symbol) if target.backend == "cuda" else _amd_slots(text)
    if [size for _, size in slots] != [row.bytes for row in expected]:
        raise CompileError(
            f"{target.name}: the binary of {symbol} takes parameters of {[size for _, size in slots]} bytes, expected "
            f"{[row.bytes for row in expected]} for {[row.name for row in expected]}; this version of Triton is not "
            f"supported"
        )
    return tuple(
        Parameter(
            row.name,
            row.type,
            row.value,
            offset,
            size,
            None if row.descriptor is None else _tensor_map(row.descriptor, next(transfers)),
        )
        for row, (offset, size) in zip(expected, slots, strict=True)
    )


class Passed(NamedTuple):
    """An argument of a launch, as far as it is known before the kernel is compiled."""

    name: str
    type: str
    value: str
    descriptor: Descriptor | None = None

    @property
    def bytes(self) -> int:
        """Return its size."""
        if self.type == "tensordesc":
            return DESCRIPTOR_BYTES
        return 8 if self.type[0] == "*" else max(1, int(re.findall(r"\d+", self.type)[0]) // 8)


def passed(plan: Specialisation, global_scratch_bytes: int) -> list[Passed]:
    """Return the arguments of a kernel that is compiled by `plan`, in order."""
    expected: list[Passed] = []
    for name in plan.function.arg_names:
        if name in plan.types:
            expected.append(Passed(name, plan.types[name], name))
        elif name in plan.descriptors:
            row = plan.descriptors[name]
            expected += _descriptor(name, row)
            expected += [Passed(f"{name}.{size}", "i32", size) for size in row.sizes]
            expected += [Passed(f"{name}.{stride}", "i64", stride) for stride in row.strides]
    scratch = {"global_scratch": global_scratch_bytes}
    return expected + [Passed(name, "*i8", name if scratch.get(name) else "zero") for name in SCRATCH]


def _descriptor(name: str, row: Descriptor) -> list[Passed]:
    """Return what stands for a tensor descriptor itself; its sizes and strides follow it.

    Without tensor maps these are its address, sizes and strides, and whether it pads with NaN and rounds to tf32.
    """
    if row.mapped:
        return [Passed(name, "tensordesc", row.value, row)]
    from triton.tools.tensor_descriptor import TensorDescriptor

    flags = {field.name for field in fields(TensorDescriptor)} & {"padding", "round_f32_to_tf32"}  # by Triton's version
    return [
        Passed(name, f"*{DTYPES[row.dtype].triton}", row.value),
        *(Passed(f"{name}.{value}", "i64", value) for value in (*row.sizes, *row.strides)),
        *(Passed(f"{name}.{flag}", "i1", "zero") for flag in sorted(flags)),
    ]


def _tensor_map(row: Descriptor, transfer: dict[str, Any]) -> TensorMap:
    """Return the tensor map of a descriptor, with the compiler's box of one transfer; a wide box takes several."""
    *_, box_outer, box_inner = transfer["block_size"]
    outer = row.outer or box_outer
    swizzle = transfer["swizzle"]
    return TensorMap(row.dtype, *row.quantities, box_inner, outer, swizzle, row.guards, len(row.sizes), row.fits)


def _ptx_slots(text: str, symbol: str) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each `.param`, at natural alignment. Source: PTX ISA, "Kernel parameters"."""
    entry = text[text.index(f".entry {symbol}(") :]
    slots, end = [], 0
    for declared in entry[: entry.index(")")].split("(", 1)[1].split(","):
        alignment, type_, count = re.findall(r"\.param (?:\.align (\d+) )?\.(\w+).*?(?:\[(\d+)\])?\s*$", declared)[0]
        size = _PTX_BYTES[type_] * int(count or 1)
        alignment = int(alignment or size)
        offset = -(-end // alignment) * alignment
        slots.append((offset, size))
        end = offset + size
    return slots


def _amd_slots(text: str) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each explicit argument. Source: LLVM AMDGPU usage, code object v5 metadata."""
    arguments = text[text.index(".args:") : text.index(".group_segment_fixed_size")]
    found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", arguments)
    return [(int(offset), int(size)) for offset, size, kind in found if not kind.startswith("hidden_")]


def instruction(target: Target, text: str) -> tuple[str, int]:
    """Return the instruction that multiplies, and the steps of K that it takes; ("fma", 1) without tensor cores.

    Source: PTX ISA, "wgmma.mma_async", "mma", "tcgen05.mma"; AMD's ISA documents, "MFMA" and "WMMA".

    Raises:
        CompileError: the text has several such instructions.
    """
    pattern = _PTX_INSTRUCTION if target.backend == "cuda" else _AMD_INSTRUCTION
    found = {(name, int(k)) for name, k in re.findall(pattern, text)}
    found |= {("tcgen05", _TCGEN05_K[kind]) for kind in re.findall(_TCGEN05, text)}
    found = found or {("fma", 1)}
    if len(found) > 1:
        raise CompileError(
            f"{target.name}: one kernel multiplies by {sorted(found)}, which is no order that aotmm knows"
        )
    return found.pop()


def resources(target: Target, image: bytes, text: str, symbol: str, cuobjdump: Path) -> tuple[int, int]:
    """Return registers and spilled bytes per thread, from the binary."""
    if target.backend == "hip":
        number = {
            name: int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])
            for name in ("vgpr_count", "private_segment_fixed_size")
        }
        return number["vgpr_count"], number["private_segment_fixed_size"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as handle:
        handle.write(image)
        handle.flush()
        done = subprocess.run([cuobjdump, "-res-usage", handle.name], capture_output=True, text=True, check=False)
    line = re.search(rf"Function {symbol}:\s*REG:(\d+) STACK:(\d+)", done.stdout)
    if line is None:
        raise CompileError(f"{target.name}: cuobjdump says nothing of {symbol}:\n{done.stdout}{done.stderr}")
    return int(line[1]), int(line[2])
