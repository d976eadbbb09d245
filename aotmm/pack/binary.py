"""A reader of cubins, hsacos and PTX that needs no tool of CUDA or ROCm.

It is total: for any bytes it ends with facts or with an ArtifactError.
"""

from __future__ import annotations

import re
import struct
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aotmm.errors import ArtifactError
from aotmm.pack.schema import AnyKernel
from aotmm.target import Target

# Source: ELF-64 object file format.
_HEADER, _SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _NOTE = struct.Struct("<IBBHQQ"), struct.Struct("<III")
_CUDA, _AMDGPU = 190, 224
_SYMBOLS, _NOTES, _EMPTY = 2, 7, 8
_GLOBAL_FUNCTION = 0x12
# Source: nvdisasm and cuobjdump of CUDA 12.9, which spell these EIATTR_... and EIFMT_...
_FORMAT_OF_A_BLOCK, _ABI_OF_CUDA_13 = 4, 8
_THREADS, _FRAME, _PARAMETER, _PARAMETER_BLOCK, _REGISTERS, _CLUSTER = 0x10, 0x11, 0x17, 0x0A, 0x2F, 0x3D
_ATTRIBUTE, _PARAMETER_ROW = struct.Struct("<BBH"), struct.Struct("<IHHI")
_BLOCK_ROW, _COUNT_ROW, _THREE = struct.Struct("<IHH"), struct.Struct("<II"), struct.Struct("<III")
_RESERVED_SHARED = 1024  # the system's own, in front of the kernel's, from compute capability 9.0 on
_UNWINDING = ".debug_frame"  # ptxas always writes it; it has no line and no path
# Source: LLVM, "User guide for AMDGPU backend", code object v5 metadata.
_AMD_METADATA = 32
_MAX_DEPTH = 16
# By the first byte of a value: its type, its number or length, and the bytes that follow and hold it instead.
# Source: MessagePack specification, "Formats".
_KINDS: Mapping[int, tuple[type, int, int]] = (
    {number: (int, number, 0) for number in range(128)}
    | {0x80 + count: (dict, count, 0) for count in range(16)}
    | {0x90 + count: (list, count, 0) for count in range(16)}
    | {0xA0 + count: (str, count, 0) for count in range(32)}
    | {0xC2 + truth: (bool, truth, 0) for truth in range(2)}
    | {0xCC + power: (int, 0, 1 << power) for power in range(4)}
    | {0xD9 + power: (str, 0, 1 << power) for power in range(3)}
    | {0xDC + power: (list, 0, 2 << power) for power in range(2)}
    | {0xDE + power: (dict, 0, 2 << power) for power in range(2)}
)
_PTX_PARAMETER = re.compile(r"\s*\.param\s+(?:\.align (\d{1,3}) )?\.[bufs](8|16|32|64)\b[^\[\]]*(?:\[(\d{1,6})\]\s*)?")
_PTX_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a kernel in its file; None for facts that files of its kind do not have.

    Attributes:
        arch: name of the target.
        symbol: its only entry point.
        parameters: offset from the first and size in bytes of each, in order. ptxas puts padding before the first if
            that needs a larger alignment than the block.
        registers, spill_bytes: per thread. threads: per block.
        num_ctas: blocks of a cluster, if every launch must have one of that size, else 1.
        shared_bytes: static shared memory of a block.
        ptx_version: PTX ISA version times ten.
        debug: sections or directives with source lines or paths of the machine that built it.
    """

    arch: str
    symbol: str
    parameters: tuple[tuple[int, int], ...]
    registers: int | None = None
    spill_bytes: int | None = None
    threads: int | None = None
    num_ctas: int | None = None
    shared_bytes: int | None = None
    ptx_version: int | None = None
    debug: tuple[str, ...] = ()


def guarded(kernel: AnyKernel, target: Target) -> Facts:
    """Return the facts that the files of `kernel` must have; all of its shared memory is dynamic."""
    return Facts(
        arch=target.name,
        symbol=kernel.symbol,
        parameters=_from_the_first([(item.offset, item.bytes) for item in kernel.parameters]),
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        threads=kernel.threads,
        num_ctas=kernel.demanded_ctas,
        shared_bytes=0,
        ptx_version=target.ptx_version,
    )


def differences(found: Facts, wanted: Facts) -> list[str]:
    """Return the facts of a file that differ from the wanted ones, in words."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in Facts.__slots__]
    return [f"{name} {says!r}, the manifest has {guard!r}" for name, says, guard in pairs if says not in (None, guard)]


def read_image(data: bytes, where: str) -> Facts:
    """Return the facts of the cubin or hsaco `data`; `where` names it in errors.

    Raises:
        ArtifactError: it is neither, is damaged, or does not have exactly one kernel.
    """
    elf = _Elf(data, where)
    if elf.machine == _CUDA:
        return _cubin(elf)
    if elf.machine == _AMDGPU:
        return _hsaco(elf)
    raise elf.error(f"machine {elf.machine} is neither CUDA ({_CUDA}) nor AMDGPU ({_AMDGPU})")


def read_ptx(data: bytes, where: str) -> Facts:
    """Return the facts of the PTX text `data`.

    Raises:
        ArtifactError: it is no PTX, or does not have exactly one kernel.
    """
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{where}: no PTX: {error}") from error
    version = re.search(r"^\.version (\d)\.(\d)$", text, re.MULTILINE)
    arch = re.search(r"^\.target sm_(\w+)", text, re.MULTILINE)
    entries = re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", text)
    if version is None or arch is None or len(entries) != 1:
        raise ArtifactError(f"{where}: no PTX with a version, a target and one kernel; it has {len(entries)}")
    symbol, declared = entries[0]
    parameters, end = [], 0
    for line in filter(None, declared.split(",")):
        found = _PTX_PARAMETER.fullmatch(line)
        if found is None:
            raise ArtifactError(f"{where}: parameter {line.strip()!r} cannot be read")
        size = _PTX_SIZES[found[2]] * int(found[3] or 1)
        alignment = int(found[1] or size) or 1
        end = -(-end // alignment) * alignment  # Source: PTX ISA, kernel parameters lie at their natural alignment
        parameters.append((end, size))
        end += size
    threads = re.search(r"^\.reqntid (\d{1,6})", text, re.MULTILINE)
    return Facts(
        arch=f"sm{arch[1]}",
        symbol=symbol,
        parameters=_from_the_first(parameters),
        threads=None if threads is None else int(threads[1]),
        ptx_version=int(version[1]) * 10 + int(version[2]),
        debug=tuple(sorted(set(re.findall(r"^[ \t]*(\.file|\.loc|\.section\s+\.debug\w*)\b", text, re.MULTILINE)))),
    )


def _from_the_first(parameters: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((offset - parameters[0][0], size) for offset, size in parameters)


class _Section(NamedTuple):
    name: str
    kind: int
    size: int
    data: bytes


class _Elf:
    """The sections of a 64-bit little-endian ELF file; nothing outside `data` is ever read."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        if data[:6] != b"\x7fELF\x02\x01":
            raise self.error("no 64-bit ELF file")
        (
            ident,
            _,
            self.machine,
            _,
            _,
            segments,
            start,
            self.flags,
            _,
            segment_size,
            segment_count,
            size,
            count,
            names,
        ) = self.unpack(_HEADER, data, 0)
        if size != _SECTION.size or names >= count:
            raise self.error("an ELF file without sections")
        self.abi = ident[8]
        rows = [self.unpack(_SECTION, data, start + number * size) for number in range(count)]
        ends = [start + count * size, segments + segment_count * segment_size]
        ends += [row[4] + row[5] for row in rows if row[1] != _EMPTY]
        if max(ends) != len(data):
            raise self.error(f"it ends at byte {max(ends)}, the file at {len(data)}")
        contents = [b"" if row[1] == _EMPTY else data[row[4] : row[4] + row[5]] for row in rows]
        self.sections = [
            _Section(self.text(contents[names], row[0]), row[1], row[5], content)
            for row, content in zip(rows, contents, strict=True)
        ]
        self.links = [row[6] for row in rows]

    def error(self, words: str) -> ArtifactError:
        return ArtifactError(f"{self.where}: {words}; build the pack again")

    def unpack(self, form: struct.Struct, data: bytes, start: int) -> tuple[typing.Any, ...]:
        if start + form.size > len(data):
            raise self.error(f"{form.size} bytes at {start} are not in {len(data)}")
        return form.unpack_from(data, start)

    def text(self, table: bytes, start: int) -> str:
        end = table.find(b"\0", start)
        if end < 0 or not table[start:end].isascii():
            raise self.error(f"no name at {start} of a table of {len(table)} bytes")
        return table[start:end].decode("ascii")

    def section(self, name: str) -> _Section:
        """Return the section called `name`; raises ArtifactError if there is none, or several."""
        found = [row for row in self.sections if row.name == name]
        if len(found) != 1:
            raise self.error(f"{len(found)} sections {name}, expected one")
        return found[0]

    def functions(self) -> dict[int, str]:
        """Return the global functions by their number in the symbol table."""
        found = {}
        for section, link in zip(self.sections, self.links, strict=True):
            if section.kind == _SYMBOLS and link < len(self.sections):
                for number in range(len(section.data) // _SYMBOL.size):
                    name, info, *_ = self.unpack(_SYMBOL, section.data, number * _SYMBOL.size)
                    if info == _GLOBAL_FUNCTION:
                        found[number] = self.text(self.sections[link].data, name)
        return found

    def debug(self) -> tuple[str, ...]:
        """Return the names of sections that hold source lines or paths."""
        return tuple(row.name for row in self.sections if "debug" in row.name and not row.name.endswith(_UNWINDING))


def _cubin(elf: _Elf) -> Facts:
    functions = elf.functions()
    if len(functions) != 1:
        raise elf.error(f"kernels {sorted(functions.values())}, expected one")
    (number, symbol), *_ = functions.items()
    parameters: dict[int, tuple[int, int]] = {}
    block, threads, num_ctas = 0, None, 1
    for attribute, body in _attributes(elf, elf.section(f".nv.info.{symbol}").data):
        if attribute == _PARAMETER:
            _, ordinal, offset, bits = elf.unpack(_PARAMETER_ROW, body, 0)
            parameters[ordinal] = (offset, bits >> 18)
        elif attribute == _PARAMETER_BLOCK:
            block = elf.unpack(_BLOCK_ROW, body, 0)[2]
        elif attribute == _THREADS:
            x, y, z = elf.unpack(_THREE, body, 0)
            threads = x * y * z
        elif attribute == _CLUSTER:
            x, y, z = elf.unpack(_THREE, body, 0)
            num_ctas = x * y * z
    if sorted(parameters) != list(range(len(parameters))):
        raise elf.error(f"parameters {sorted(parameters)} are not one after the other")
    listed = [parameters[ordinal] for ordinal in range(len(parameters))]
    if listed and sum(listed[-1]) != block:
        raise elf.error(f"parameters end at {sum(listed[-1])}, their block has {block} bytes")
    per_function = {
        attribute: elf.unpack(_COUNT_ROW, body, 0)[1]
        for attribute, body in _attributes(elf, elf.section(".nv.info").data)
        if attribute in (_REGISTERS, _FRAME) and elf.unpack(_COUNT_ROW, body, 0)[0] == number
    }
    if threads is None or len(per_function) != len((_REGISTERS, _FRAME)):
        raise elf.error(f"it does not say what {symbol} needs: registers, stack and threads")
    # Compute capability: the low byte of the flags, in newer files the next byte.
    capability = (elf.flags >> 8 if elf.abi >= _ABI_OF_CUDA_13 else elf.flags) & 0xFF
    shared = sum(row.size for row in elf.sections if row.name == f".nv.shared.{symbol}")
    return Facts(
        arch=f"sm{capability}",
        symbol=symbol,
        parameters=_from_the_first(listed),
        registers=per_function[_REGISTERS],
        spill_bytes=per_function[_FRAME],
        threads=threads,
        num_ctas=num_ctas,
        shared_bytes=0 if shared == _RESERVED_SHARED else shared,
        debug=elf.debug(),
    )


def _attributes(elf: _Elf, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each attribute in a section of .nv.info that has a block of bytes."""
    place = 0
    while place < len(data):
        form, attribute, size = elf.unpack(_ATTRIBUTE, data, place)
        place += 4
        if form == _FORMAT_OF_A_BLOCK:
            yield attribute, data[place : place + size]
            place += size


def _hsaco(elf: _Elf) -> Facts:
    body = _MessagePack(elf, _metadata(elf)).value()
    kernels = body.get("amdhsa.kernels") if isinstance(body, dict) else None
    if not isinstance(kernels, list) or len(kernels) != 1 or not isinstance(kernels[0], dict):
        raise elf.error("its metadata does not have one kernel")
    kernel = kernels[0]

    def number(of: dict[object, object], name: str) -> int:
        value = of.get(name)
        if not isinstance(value, int):
            raise elf.error(f"its metadata says {value!r} for {name}")
        return value

    arguments = kernel.get(".args")
    if not isinstance(arguments, list) or not all(isinstance(item, dict) for item in arguments):
        raise elf.error("its metadata has no list of arguments")
    explicit = [item for item in arguments if not str(item.get(".value_kind")).startswith("hidden_")]
    return Facts(
        arch=str(body.get("amdhsa.target")).rpartition("-")[2].partition(":")[0],
        symbol=str(kernel.get(".name")),
        parameters=_from_the_first([(number(item, ".offset"), number(item, ".size")) for item in explicit]),
        registers=number(kernel, ".vgpr_count"),
        spill_bytes=number(kernel, ".private_segment_fixed_size"),
        threads=number(kernel, ".max_flat_workgroup_size"),
        shared_bytes=number(kernel, ".group_segment_fixed_size"),
        debug=elf.debug(),
    )


def _metadata(elf: _Elf) -> bytes:
    """Return the note with the kernel's metadata, in MessagePack."""
    for section in elf.sections:
        if section.kind == _NOTES:
            names, size, kind = elf.unpack(_NOTE, section.data, 0)
            if kind == _AMD_METADATA:
                start = _NOTE.size + (names + 3 & ~3)
                return section.data[start : start + size]
    raise elf.error("it has no AMDGPU metadata")


class _MessagePack:
    """Reader of the types in `_KINDS`; all others are refused."""

    def __init__(self, elf: _Elf, data: bytes) -> None:
        self.elf, self.data, self.place = elf, data, 0

    def value(self, depth: int = 0) -> typing.Any:
        kind, number, more = _KINDS.get(self._bytes(1)[0], (None, 0, 0))
        if kind is None or depth > _MAX_DEPTH:
            raise self.elf.error(f"its metadata has something unknown, or too deep, before byte {self.place}")
        if more:
            number = int.from_bytes(self._bytes(more), "big")
        if kind is str:
            return self._bytes(number).decode("ascii", "replace")
        if kind is list:
            return [self.value(depth + 1) for _ in range(number)]
        if kind is dict:
            return {str(self.value(depth + 1)): self.value(depth + 1) for _ in range(number)}
        return kind(number)

    def _bytes(self, size: int) -> bytes:
        found = self.data[self.place : self.place + size]
        if len(found) != size:
            raise self.elf.error("its metadata ends early")
        self.place += size
        return found
