"""Facts that a launcher relies on, read straight from a cubin or an hsaco.

The interpreters' own reader, apart from aotmm/pack/binary.py, so that each is held against the other. `read` is total:
whatever the bytes are, it returns or raises `ImageError`, nothing else.

Sources: of a cubin the flags of the ELF header and .nv.info sections; of an hsaco these flags, the 64-byte kernel
descriptor and the NT_AMDGPU_METADATA note (msgpack).
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any, NamedTuple

MAX_IMAGE = 64 << 20


class ImageError(Exception):
    """The bytes are not a well-formed cubin or hsaco."""


class Param(NamedTuple):
    """One kernel parameter: byte offset, size in bytes, kind ("" for cubins, AMD's value_kind for hsacos)."""

    offset: int
    size: int
    kind: str


@dataclasses.dataclass
class Kernel:
    """One kernel of an image; sizes in bytes.

    Attributes:
        params: in the order of their declaration, Triton's two hidden scratch pointers included.
        param_base: offset of the parameters in constant bank 0 (cubin).
        regs: 32-bit registers per thread (hsaco: without accumulation registers).
        stack: private memory per thread.
        shared: static shared memory; Triton's is dynamic, so that this is 0 there.
        reqntid: the required block, None without one.
        max_threads: the largest block that is allowed, None where nothing is said.
        address: virtual address of the first instruction (hsaco).
        code: file offset and size of the section with the code.
        descriptor: file offset of the kernel descriptor (hsaco).
        table: file offset and size of constant bank 2 (cubin): branch tables and literals of ptxas.
    """

    name: str
    params: tuple[Param, ...] = ()
    param_bytes: int = 0
    param_base: int = 0
    regs: int = 0
    stack: int = 0
    shared: int = 0
    reqntid: tuple[int, int, int] | None = None
    max_threads: int | None = None
    address: int = 0
    code: tuple[int, int] = (0, 0)
    descriptor: int = 0
    table: tuple[int, int] = (0, 0)


@dataclasses.dataclass
class Info:
    """What an image says of itself.

    Attributes:
        kind: "cubin" or "hsaco".
        arch: such as "sm80", "gfx90a".
        kernels: by symbol.
        debug: names of sections that carry source lines or paths.
    """

    kind: str
    arch: str
    kernels: dict[str, Kernel]
    debug: tuple[str, ...]


class _View:
    """Bounds-checked reads."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)

    def at(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise ImageError(f"read of {size} bytes at {offset} outside the {len(self.data)} bytes of the image")
        return self.data[offset : offset + size]

    def unpack(self, form: str, offset: int) -> tuple[Any, ...]:
        return struct.unpack(form, self.at(offset, struct.calcsize(form)))

    def text(self, offset: int) -> str:
        piece = bytes(self.at(offset, min(4096, len(self.data) - offset))).split(b"\0", 1)
        if len(piece) != 2:
            raise ImageError("a string is not terminated")
        return piece[0].decode("utf-8")


class _Section(NamedTuple):
    name: str
    type: int
    address: int
    offset: int
    size: int
    link: int
    info: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int
    size: int


def _sections(view: _View) -> list[_Section]:
    if bytes(view.at(0, 7)) != b"\x7fELF\x02\x01\x01":
        raise ImageError("not a little-endian ELF64 file")
    (start,) = view.unpack("<Q", 40)
    entry, count, names = view.unpack("<HHH", 58)
    if count > 4096 or (count and entry != 64) or names >= max(1, count):
        raise ImageError("implausible section table")
    raw = [view.unpack("<IIQQQQIIQQ", start + 64 * i) for i in range(count)]
    sections = []
    for name, kind, _, address, offset, size, link, info, _, _ in raw:
        if kind not in (0, 8):  # SHT_NULL, SHT_NOBITS
            view.at(offset, size)
        sections.append(_Section(view.text(raw[names][4] + name), kind, address, offset, size, link, info))
    return sections


def _symbols(view: _View, sections: list[_Section], kind: int) -> list[_Symbol]:
    out = []
    for section in sections:
        if section.type != kind:
            continue
        if section.link >= len(sections):
            raise ImageError("symbol table without string table")
        for k in range(section.size // 24):
            name, _, _, index, value, size = view.unpack("<IBBHQQ", section.offset + 24 * k)
            out.append(_Symbol(view.text(sections[section.link].offset + name), index, value, size))
    return out


# ------------------------------------------------------------------------------------------ NVIDIA
_PARAM_CBANK, _PARAM_INFO, _REQNTID, _MAX_THREADS, _PARAM_SIZE = 0x0A, 0x17, 0x10, 0x05, 0x19
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11


def _attributes(view: _View, section: _Section) -> list[tuple[int, Any]]:
    """(attribute, value) items of a .nv.info section; value is bytes or int."""
    at, end, out = section.offset, section.offset + section.size, []
    while at < end:
        form, attribute, value = view.unpack("<BBH", at)
        at += 4
        if form == 4:
            if at + value > end:
                raise ImageError("a .nv.info item runs past its section")
            out.append((attribute, bytes(view.at(at, value))))
            at += value
        elif form in (1, 2, 3):
            out.append((attribute, value))
        else:
            raise ImageError(f".nv.info item of format {form}")
    return out


def _cubin(view: _View) -> Info:
    sections = _sections(view)
    abi, flags = view.unpack("<B", 8)[0], view.unpack("<I", 48)[0]
    # ABI 7 (CUDA 12 and older) has the SM in bits 7:0 of the flags, ABI 8 (CUDA 13) in bits 15:8
    number = flags & 0xFF if abi <= 7 else (flags >> 8) & 0xFF
    symbols = _symbols(view, sections, 2)
    kernels = {}
    for section in sections:
        if not section.name.startswith(".nv.info."):
            continue
        kernel = Kernel(section.name[len(".nv.info.") :])
        params = {}
        for attribute, value in _attributes(view, section):
            if attribute == _PARAM_CBANK:
                packed = struct.unpack("<II", value)[1]
                kernel.param_base, kernel.param_bytes = packed & 0xFFFF, packed >> 16
            elif attribute == _PARAM_INFO:
                _, ordinal, offset, packed = struct.unpack("<IHHI", value)
                if ordinal in params:
                    raise ImageError(f"parameter {ordinal} occurs twice")
                params[ordinal] = Param(offset, packed >> 18, "")
            elif attribute == _PARAM_SIZE:
                kernel.param_bytes = value
            elif attribute == _REQNTID:
                kernel.reqntid = struct.unpack("<III", value[:12])
            elif attribute == _MAX_THREADS:
                x, y, z = struct.unpack("<III", value[:12])
                kernel.max_threads = x * y * z
        if sorted(params) != list(range(len(params))):
            raise ImageError("parameter numbers have a gap")
        kernel.params = tuple(params[i] for i in range(len(params)))
        if any(p.offset + p.size > kernel.param_bytes for p in kernel.params):
            raise ImageError("a parameter lies outside the parameter block")
        code = next((s for s in sections if s.name == ".text." + kernel.name), None)
        if code is not None:
            kernel.code = (code.offset, code.size)
            kernel.regs = code.info >> 24  # .text sh_info: registers in bits 31:24
            kernels[kernel.name] = kernel
        table = next((s for s in sections if s.name == ".nv.constant2." + kernel.name and s.type == 1), None)
        if table is not None:
            kernel.table = (table.offset, table.size)
    for section in sections:
        name = section.name.removeprefix(".nv.shared.")
        if name != section.name and name in kernels:
            kernels[name].shared = section.size
        if section.name != ".nv.info":
            continue
        for attribute, value in _attributes(view, section):
            if attribute in (_REGCOUNT, _FRAME_SIZE):
                symbol, number_of = struct.unpack("<II", value)
                found = kernels.get(symbols[symbol].name) if symbol < len(symbols) else None
                if found is not None and attribute == _REGCOUNT:
                    found.regs = number_of
                elif found is not None:
                    found.stack = number_of
    leaks = (".nv_debug_ptx_txt", ".debug_line", ".debug_str", ".nv_debug_line_sass")
    debug = tuple(s.name for s in sections if s.name in leaks)
    return Info("cubin", f"sm{number}", kernels, debug)


# --------------------------------------------------------------------------------------------- AMD
_MACH = {0x30: "gfx908", 0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}


def _msgpack(data: memoryview, at: int = 0, depth: int = 0) -> tuple[Any, int]:
    """One msgpack value and the offset behind it. Raises ImageError for anything odd."""
    if depth > 16 or at >= len(data):
        raise ImageError("metadata is nested too deeply or ends early")
    tag = data[at]
    at += 1

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise ImageError("metadata ends early")
        at += size
        return bytes(data[at - size : at])

    def number(size: int) -> int:
        return int.from_bytes(take(size), "big")

    def items(count: int) -> list[Any]:
        nonlocal at
        if count > len(data):
            raise ImageError("metadata count is too large")
        out = []
        for _ in range(count):
            value, at = _msgpack(data, at, depth + 1)
            out.append(value)
        return out

    def mapping(count: int) -> dict[Any, Any]:
        flat = items(2 * count)
        if len(set(map(str, flat[::2]))) != count:
            raise ImageError("duplicate key in the metadata")
        return dict(zip(flat[::2], flat[1::2], strict=True))

    value: Any
    if tag < 0x80:
        value = tag
    elif tag < 0x90:
        value = mapping(tag & 15)
    elif tag < 0xA0:
        value = items(tag & 15)
    elif tag < 0xC0:
        value = take(tag & 31).decode()
    elif tag == 0xC0:
        value = None
    elif tag in (0xC2, 0xC3):
        value = tag == 0xC3
    elif 0xCC <= tag <= 0xCF:
        value = number(1 << (tag - 0xCC))
    elif 0xD0 <= tag <= 0xD3:
        value = int.from_bytes(take(1 << (tag - 0xD0)), "big", signed=True)
    elif 0xD9 <= tag <= 0xDB:
        value = take(number(1 << (tag - 0xD9))).decode()
    elif tag in (0xDC, 0xDD):
        value = items(number(2 << (tag - 0xDC)))
    elif tag in (0xDE, 0xDF):
        value = mapping(number(2 << (tag - 0xDE)))
    elif tag >= 0xE0:
        value = tag - 256
    else:
        raise ImageError(f"metadata of type {tag:#x}")
    return value, at


def _hsaco(view: _View) -> Info:
    sections = _sections(view)
    (flags,) = view.unpack("<I", 48)
    metadata = None
    for section in sections:
        if section.type == 7:  # SHT_NOTE
            name, size, kind = view.unpack("<III", section.offset)
            if kind == 32 and bytes(view.at(section.offset + 12, name)) == b"AMDGPU\0":
                metadata, _ = _msgpack(view.at(section.offset + 12 + (name + 3 & ~3), size))
    if metadata is None:
        raise ImageError("no AMDGPU metadata")
    symbols = {s.name: s for s in _symbols(view, sections, 11)}
    kernels = {}
    for entry in metadata["amdhsa.kernels"]:
        symbol = symbols[entry[".symbol"]]
        section = sections[symbol.section]
        place = section.offset + symbol.value - section.address
        raw = view.at(place, 64)
        lds, private, kernarg = struct.unpack_from("<III", raw, 0)
        address = symbol.value + struct.unpack_from("<q", raw, 16)[0]
        text = next((s for s in sections if s.name == ".text" and s.address <= address < s.address + s.size), None)
        if text is None:
            raise ImageError("the kernel's entry is not inside .text")
        if (kernarg, lds, private) != (
            entry[".kernarg_segment_size"],
            entry[".group_segment_fixed_size"],
            entry[".private_segment_fixed_size"],
        ):
            raise ImageError("kernel descriptor and metadata disagree")
        params = tuple(Param(int(a[".offset"]), int(a[".size"]), str(a[".value_kind"])) for a in entry[".args"])
        if any(p.offset < 0 or p.size < 1 or p.offset + p.size > kernarg for p in params):
            raise ImageError("a parameter lies outside the parameter block")
        required = entry.get(".reqd_workgroup_size")
        kernels[entry[".name"]] = Kernel(
            entry[".name"],
            params,
            kernarg,
            regs=int(entry[".vgpr_count"]),
            stack=private,
            shared=lds,
            reqntid=tuple(required) if required else None,
            max_threads=int(entry[".max_flat_workgroup_size"]),
            address=address,
            code=(text.offset, text.size),
            descriptor=place,
        )
    arch = _MACH.get(flags & 0xFF, f"amdgcn-{flags & 0xFF:#x}")
    debug = tuple(s.name for s in sections if s.name.startswith(".debug"))
    return Info("hsaco", arch, kernels, debug)


@functools.lru_cache(maxsize=64)  # a driver reads an image at every load
def read(image: bytes) -> Info:
    """What a cubin or an hsaco says of itself. Raises ImageError, and nothing else, for any other bytes."""
    try:
        if len(image) > MAX_IMAGE:
            raise ImageError(f"larger than {MAX_IMAGE >> 20} MiB")
        view = _View(image)
        (machine,) = view.unpack("<H", 18)
        if machine == 190:
            return _cubin(view)
        if machine == 224:
            return _hsaco(view)
        raise ImageError("neither a cubin nor an hsaco")
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
        struct.error,
    ) as error:
        raise ImageError(f"malformed: {type(error).__name__}: {error}") from None
