"""What the two interpreters share: faults, statistics, checked memory, scheduling, parameters, tools.

Conventions used throughout this folder
  * A *wave* is one AMD wave64 or one NVIDIA warp; a *group* is a workgroup or CTA.
  * Waves run in batches: every register is an array over ``(waves, lanes)``, so one numpy call executes an
    instruction for all waves that are at the same place.  Waves at different places form `Fragment`s.
  * Addresses are int64 arrays in bytes, data are uint32 words, sizes are bytes.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.emulators import elf

Array = np.ndarray[Any, np.dtype[Any]]
Size = tuple[int, int, int]
Params = bytes | Sequence[tuple[int, str]]  # packed, or (value, Triton type) in declaration order
Buffers = Sequence[tuple[str, Array, int, str]]  # name, memory, address, mode: one of MODES

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, I64, F16, F32, F64 = np.int32, np.int64, np.float16, np.float32, np.float64
MASK32 = 0xFFFFFFFF

MODES = ("r", "rw", "w1")
MAX_INSTRUCTIONS = 200_000_000  # of one launch, over all waves


class Fault(Exception):  # noqa: N818 - what a processor calls it
    """The code did something illegal, unsafe or unknown; the message names the instruction and the place.

    ``lane`` is the position, among the lanes that took part, of the first offender (None if unknown)."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.lane = lane


class ToolMissingError(RuntimeError):
    """A disassembler is missing; the message says which package or wheel contains it."""


@dataclasses.dataclass
class Stats:
    """What a launch did.

    Attributes:
        pcs: addresses of the instructions that were executed.
        stores: by the name of a buffer, how often each byte was stored, at most 255.
    """

    pcs: set[int] = dataclasses.field(default_factory=set)
    stores: dict[str, Array] = dataclasses.field(default_factory=dict)


class Launch(Protocol):
    """What `launch` of both interpreters takes and gives."""

    def __call__(
        self,
        image: bytes,
        symbol: str,
        grid: Size,
        block: Size,
        params: Params,
        shared_bytes: int,
        buffers: Buffers,
        *,
        max_instructions: int = MAX_INSTRUCTIONS,
    ) -> Stats: ...


# ------------------------------------------------------------------------------------------- tools
def _run(command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def _knows_amdgpu(path):
    try:
        return "amdgcn" in _run([path, "--version"]).stdout
    except OSError:
        return False


@functools.cache
def find_objdump() -> str:
    """Path of an `llvm-objdump` that knows AMDGPU, on PATH or in /usr/lib/llvm-*/bin. Raises ToolMissingError."""
    found = shutil.which("llvm-objdump")
    places = [found] if found else []
    places += sorted((str(p) for p in Path("/usr/lib").glob("llvm-*/bin/llvm-objdump")), reverse=True)
    for place in places:
        if _knows_amdgpu(place):
            return place
    raise ToolMissingError(
        "llvm-objdump with the AMDGPU target was not found: install Debian's package `llvm` (any LLVM from 14 on)"
    )


@functools.cache
def find_nvdisasm() -> str:
    """Path of `nvdisasm`, on PATH or in the folder of an installed Triton wheel. Raises ToolMissingError."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            place = Path(folder, "backends", "nvidia", "bin", "nvdisasm")
            if os.access(place, os.X_OK):
                return str(place)
    raise ToolMissingError(
        "nvdisasm was not found: it is in the `triton` wheel (triton/backends/nvidia/bin) and in "
        "Debian's package `nvidia-cuda-toolkit` (non-free)"
    )


_LISTINGS: list[Path] = []


def share_listings(folder: Path) -> None:
    """Keeps what disassemblers print in `folder`, where other processes find it: nvdisasm takes half a second."""
    folder.mkdir(parents=True, exist_ok=True)
    _LISTINGS.append(folder)


def disassembly(command: list[str], image: bytes, suffix: str) -> str:
    """Text that `command`, one for each `suffix`, prints for `image` (bytes), which is passed as a temporary file."""
    tool = Path(command[0]).stat()
    digest = hashlib.sha256(f"{command} {tool.st_size} {tool.st_mtime_ns} ".encode() + image).hexdigest()
    names = [folder / (digest + suffix) for folder in _LISTINGS]
    for name in names:
        if name.exists():
            return name.read_text()
    with tempfile.TemporaryDirectory(prefix="aotmm-disassembly-") as folder:
        place = Path(folder, "image" + suffix)
        place.write_bytes(image)
        result = _run([*command, place])
    if result.returncode:
        raise Fault(f"{Path(command[0]).name} refused the image: {result.stderr.strip()[:300]}")
    for name in names:
        beside = name.with_suffix(f".{os.getpid()}")
        beside.write_text(result.stdout)
        beside.replace(name)  # whole, or not there
    return str(result.stdout)


# -------------------------------------------------------------------------------------- parameters
_FORMATS = {"i32": "<i", "i64": "<q"}


def _hidden(kind, grid, block):
    """Value of an implicit kernel argument of code object V5, as the HIP runtime fills it in."""
    axis = {"x": 0, "y": 1, "z": 2}.get(kind[-1], 0)
    if kind.startswith("hidden_block_count_"):
        return grid[axis]
    if kind.startswith("hidden_group_size_"):
        return block[axis]
    if kind == "hidden_grid_dims":
        return max((k + 1 for k in range(3) if grid[k] * block[k] > 1), default=1)
    if kind.startswith(("hidden_remainder_", "hidden_global_offset_", "hidden_none")):
        return 0
    return None  # pointers of the runtime: not modelled


def pack_params(params: Params, kernel: elf.Kernel, grid: Size = (1, 1, 1), block: Size = (1, 1, 1)) -> bytes:
    """The parameter bytes of a launch. Raises Fault when count, size or range do not agree with the binary.

    Args:
        params: bytes are checked for their length only. Of a list, trailing pointers that Triton adds by itself
            (scratch) may be left out: they are passed as null.
        kernel: of the entry: offsets and sizes come from the binary, not from the caller.
        grid: with `block`, fills the hidden arguments of AMD kernels.
    """
    if isinstance(params, bytes):
        if len(params) != kernel.param_bytes:
            raise Fault(f"{len(params)} parameter bytes were given, {kernel.name} takes {kernel.param_bytes}")
        return params
    explicit = [p for p in kernel.params if not p.kind.startswith("hidden_")]
    missing = explicit[len(params) :]
    if len(params) > len(explicit) or len(missing) > 2 or any(p.size != 8 for p in missing):
        raise Fault(f"{len(params)} parameters were given, {kernel.name} takes {len(explicit)}")
    out = bytearray(kernel.param_bytes)
    for place in kernel.params:
        if place.kind.startswith("hidden_"):
            value = _hidden(place.kind, grid, block)
            # a pointer that is not modelled gets one that no buffer covers
            piece = b"\xee" * place.size if value is None else int(value).to_bytes(place.size, "little")
            out[place.offset : place.offset + place.size] = piece
    for number, ((value, ctype), place) in enumerate(zip(params, explicit)):
        try:
            piece = struct.pack("<Q" if ctype.startswith("*") else _FORMATS[ctype], value)
        except (KeyError, struct.error) as error:
            raise Fault(f"parameter {number}: {value!r} as {ctype}: {error}") from None
        if len(piece) != place.size:
            raise Fault(f"parameter {number}: {ctype} has {len(piece)} bytes, the binary wants {place.size}")
        out[place.offset : place.offset + place.size] = piece
    return bytes(out)


# ------------------------------------------------------------------------------------------ memory
class Buffer:
    """One range of device memory over the bytes of a numpy array (no copy)."""

    def __init__(self, name, array, base, mode):
        if mode not in MODES:
            raise ValueError(f"buffer {name}: mode {mode!r} is none of {MODES}")
        if not array.flags.c_contiguous:
            raise ValueError(f"buffer {name}: the array must be C-contiguous (pass the base of a view)")
        if mode != "r" and not array.flags.writeable:
            raise ValueError(f"buffer {name}: mode {mode!r} needs a writeable array")
        self.name, self.mode, self.base = name, mode, int(base)
        self.bytes = array.reshape(-1).view(U8)
        self.size = self.bytes.size
        self.end = self.base + self.size
        self.stores = np.zeros(self.size if mode != "r" else 0, U8)
        self.typed = {1: self.bytes}
        for width, dtype in ((2, U16), (4, U32)):
            self.typed[width] = self.bytes[: self.size // width * width].view(dtype)


class Memory:
    """Device memory: a set of disjoint buffers with exact bounds."""

    def __init__(self, buffers):
        self.buffers = sorted((Buffer(*b) for b in buffers), key=lambda b: (b.base, b.end))
        for low, high in zip(self.buffers, self.buffers[1:]):
            if low.end > high.base:
                raise ValueError(f"buffers {low.name} and {high.name} overlap")
        names = collections.Counter(b.name for b in self.buffers)
        if any(count > 1 for count in names.values()):
            raise ValueError("two buffers have the same name")
        self.bases = [b.base for b in self.buffers]

    def _parts(self, address, nbytes, align):
        """Yield (buffer, selection or None for all, offsets) that cover every address."""
        if align > 1:
            bad = (address & (align - 1)) != 0
            if bad.any():
                at = int(bad.argmax())
                raise Fault(f"address {int(address[at]):#x} is not a multiple of {align}", at)
        low, high = int(address.min()), int(address.max()) + nbytes
        at = bisect.bisect_right(self.bases, low) - 1
        if at >= 0 and high <= self.buffers[at].end:
            yield self.buffers[at], None, address - self.buffers[at].base
            return
        which = np.searchsorted(np.array(self.bases, I64), address, side="right") - 1
        for k in np.unique(which):
            select = which == k
            offset = address[select] - self.bases[k]
            bad = offset + nbytes > self.buffers[k].size
            if k < 0 or bad.any():
                lane = int(np.flatnonzero(select)[0 if k < 0 else int(bad.argmax())])
                raise Fault(
                    f"{nbytes} bytes at {int(address[lane]):#x} lie in no buffer{self._near(int(address[lane]))}", lane
                )
            yield self.buffers[k], select, offset

    def _near(self, address):
        close = [b for b in self.buffers if b.base - (1 << 20) <= address < b.end + (1 << 20)]
        if not close:
            return ""
        best = min(close, key=lambda b: max(b.base - address, address - b.end))
        return f" (offset {address - best.base} of {best.name}, which has {best.size} bytes)"

    @staticmethod
    def _cut(offset, nbytes):
        """Widest unit (4, 2 or 1 bytes) in which all offsets and the size are whole."""
        unit = nbytes & -nbytes if nbytes < 4 else 4
        while unit > 1 and (offset & (unit - 1)).any():
            unit >>= 1
        return unit

    def load(self, address, nbytes, align):
        """uint32 (n, max(1, nbytes // 4)) words at int64 (n,) addresses; 1 and 2 bytes are zero-extended."""
        words = np.empty((address.size, max(1, nbytes >> 2)), U32)
        if not address.size:
            return words
        for buffer, select, offset in self._parts(address, nbytes, align):
            if buffer.mode == "w1":
                raise Fault(f"load from write-once buffer {buffer.name}", 0)
            unit = self._cut(offset, nbytes)
            piece = buffer.typed[unit][(offset // unit)[:, None] + np.arange(nbytes // unit)]
            if nbytes >= 4:
                piece = piece if unit == 4 else np.ascontiguousarray(piece).view(U32)
            elif unit < nbytes:
                piece = np.ascontiguousarray(piece).view(U16)
            if select is None:
                words[:] = piece
            else:
                words[select] = piece
        return words

    def _writable(self, buffer, select, atomic=False):
        lane = 0 if select is None else int(select.argmax())
        if buffer.mode == "r":
            raise Fault(f"store into read-only buffer {buffer.name}", lane)
        if atomic and buffer.mode == "w1":
            raise Fault(f"atomic on write-once buffer {buffer.name}", lane)

    def _count(self, buffer, index, unit, lane_of):
        """Count one store of each unit; `index` are unit numbers, flat; `lane_of(position)` names the culprit."""
        stores = buffer.stores
        place = index if unit == 1 else ((index * unit)[:, None] + np.arange(unit)).reshape(-1)
        seen = stores[place]
        if buffer.mode == "w1" and seen.any():
            at = int((seen > 0).argmax())
            raise Fault(
                f"byte {int(place[at])} of write-once buffer {buffer.name} is stored twice", lane_of(at // unit)
            )
        stores[place] = np.minimum(seen, 254) + 1

    def store(self, address, words, nbytes, align):
        """Store uint32 (n, k) words; the low bytes for nbytes < 4."""
        if not address.size:
            return
        for buffer, select, offset in self._parts(address, nbytes, align):
            self._writable(buffer, select)
            unit = self._cut(offset, nbytes)
            piece = words if select is None else words[select]
            if nbytes < 4 and unit == nbytes:
                piece = piece.astype({1: U8, 2: U16}[unit])
            elif unit < 4:
                piece = np.ascontiguousarray(piece).view({1: U8, 2: U16}[unit])[:, : nbytes // unit]
            count = nbytes // unit
            index = ((offset // unit)[:, None] + np.arange(count)).reshape(-1)

            def lane_of(position, select=select, count=count):
                lane = position // count
                return int(lane if select is None else np.flatnonzero(select)[lane])

            order = np.argsort(index, kind="stable")
            twice = index[order[1:]] == index[order[:-1]]
            if twice.any():
                raise Fault(
                    f"two lanes store the same bytes of {buffer.name} in one instruction",
                    lane_of(int(order[1:][int(twice.argmax())])),
                )
            self._count(buffer, index, unit, lane_of)
            buffer.typed[unit][index] = piece.reshape(-1)

    def atomic(self, address, function, nbytes=4):
        """Apply `function(old words (k,), lanes (k,)) -> new words` one lane at a time per address, in lane order.

        Returns the old words (n,) uint32.  Only 4-byte atomics exist here."""
        old = np.zeros(address.size, U32)
        todo = np.arange(address.size)
        while todo.size:
            _, first = np.unique(address[todo], return_index=True)
            now = todo[np.sort(first)]
            for buffer, select, offset in self._parts(address[now], nbytes, nbytes):
                lanes = now if select is None else now[select]
                self._writable(buffer, select, atomic=True)
                if (offset & 3).any():
                    raise Fault(f"atomic on {buffer.name}, whose base is not 4-byte aligned", int(lanes[0]))
                index = offset >> 2
                old[lanes] = buffer.typed[4][index]
                buffer.typed[4][index] = function(old[lanes], lanes)
                self._count(buffer, index, 4, lambda position, lanes=lanes: int(lanes[position]))
            todo = np.setdiff1d(todo, now, assume_unique=True)
        return old


_MANY = 63  # reader/writer tag: more than one wave of the group


class Shared:
    """LDS / shared memory of a batch of groups: exact size, definedness and race checks.

    `unit` is the granularity in bytes (1, 2 or 4): the smallest access in the program.  Between two barriers
    (one `epoch`) a byte may be written by one wave, or read by many, or written by several waves with equal
    values; anything else is a race and raises Fault.  From begin_copy to end_copy nothing else may touch a byte."""

    def __init__(self, groups, size, unit):
        self.size, self.unit = size, unit
        self.units = -(-size // unit)
        self.dtype = {1: U8, 2: U16, 4: U32}[unit]
        poison = np.random.default_rng(7).integers(0, 1 << (8 * unit), self.units, dtype=I64).astype(self.dtype)
        self.data = np.tile(poison, groups)
        self.writer = np.zeros(groups * self.units, I32)  # epoch << 6 | wave; 0: never written
        self.reader = np.zeros(groups * self.units, I32)
        self.coming = np.zeros(groups * self.units, I32)  # copies that have begun and not ended
        self.epoch = 1

    def _index(self, group, address, nbytes):
        bad = (address < 0) | (address + nbytes > self.size)
        if bad.any():
            at = int(bad.argmax())
            raise Fault(
                f"{nbytes} bytes at {int(address[at]):#x} of shared memory are past the {self.size} bytes granted", at
            )
        step = max(1, nbytes // self.unit)
        return (group * self.units + address // self.unit)[:, None] + np.arange(step)

    def load(self, group, wave, address, nbytes, align):
        """uint32 (n, max(1, nbytes // 4)) words for lanes of `group` (n,), `wave` (n,) at `address` (n,)."""
        if not address.size:
            return np.empty((0, max(1, nbytes >> 2)), U32)
        if align > 1 and (address & (align - 1)).any():
            raise Fault(f"shared address is not a multiple of {align}", int(((address & (align - 1)) != 0).argmax()))
        index = self._index(group, address, nbytes)
        now, me = self.epoch << 6, ((self.epoch << 6) | wave).astype(I32)[:, None]
        tag = self.writer[index]
        if not tag.all():
            raise Fault("reads shared bytes that this group never wrote", int((tag == 0).any(1).argmax()))
        race = (tag >= now) & (tag != me)
        if race.any():
            raise Fault(
                "race: reads shared bytes that another wave wrote since the last barrier", int(race.any(1).argmax())
            )
        self._no_copy(index, "reads")
        old = self.reader[index]
        new = np.where((old >= now) & (old != me), I32(now | _MANY), me)
        self.reader[index] = new
        lost = self.reader[index] != new
        if lost.any():
            self.reader[index[lost]] = now | _MANY
        piece = self.data[index]
        if nbytes >= 4:
            return piece if self.unit == 4 else np.ascontiguousarray(piece).view(U32)
        if nbytes > self.unit:
            piece = np.ascontiguousarray(piece).view(U16)
        return piece.astype(U32)

    def store(self, group, wave, address, words, nbytes, align):
        """Store uint32 (n, k) words; the low bytes for nbytes < 4."""
        if not address.size:
            return
        if align > 1 and (address & (align - 1)).any():
            raise Fault(f"shared address is not a multiple of {align}", int(((address & (align - 1)) != 0).argmax()))
        index = self._index(group, address, nbytes)
        if nbytes < 4 and self.unit == nbytes:
            piece = words.astype(self.dtype)
        else:
            piece = np.ascontiguousarray(words).view(self.dtype)[:, : index.shape[1]]
        now, me = self.epoch << 6, ((self.epoch << 6) | wave).astype(I32)[:, None]
        self._no_copy(index, "writes")
        self._no_reader(index, now, me)
        old = self.writer[index]
        other = (old >= now) & (old != me)
        differ = other & (self.data[index] != piece)
        if differ.any():
            raise Fault(
                "race: two waves write different values into the same shared bytes in one barrier interval",
                int(differ.any(1).argmax()),
            )
        new = np.where(other, I32(now | _MANY), me)
        self.writer[index] = new
        self.data[index] = piece
        lost = self.writer[index] != new
        if lost.any():
            differ = lost & (self.data[index] != piece)
            if differ.any():
                raise Fault(
                    "race: two waves write different values into the same shared bytes in one instruction",
                    int(differ.any(1).argmax()),
                )
            self.writer[index[lost]] = now | _MANY

    def begin_copy(self, group, wave, address, nbytes):
        """Lanes begin to copy nbytes each to `address` (n,), as `store` will have them when they end."""
        index = self._index(group, address, nbytes)
        self._no_reader(index, self.epoch << 6, ((self.epoch << 6) | wave).astype(I32)[:, None])
        np.add.at(self.coming, index.ravel(), I32(1))  # flat and of one type: numpy's fast way

    def end_copy(self, group, wave, address, words, nbytes):
        """Store what lanes began to copy."""
        np.subtract.at(self.coming, self._index(group, address, nbytes).ravel(), I32(1))
        self.store(group, wave, address, words, nbytes, nbytes)

    def _no_copy(self, index, what):
        coming = self.coming[index]
        if coming.any():
            raise Fault(
                f"race: {what} shared bytes to which a copy has begun that was not waited for",
                int((coming != 0).any(1).argmax()),
            )

    def _no_reader(self, index, now, me):
        reader = self.reader[index]
        race = (reader >= now) & (reader != me)
        if race.any():
            raise Fault(
                "race: writes shared bytes that another wave reads in the same barrier interval",
                int(race.any(1).argmax()),
            )


# ---------------------------------------------------------------------------------------- schedule
class Fragment:
    """Lanes (or waves) of a batch that are at the same instruction.

    lanes    bool array: who belongs here
    waiting  None, or a label of what it waits for
    queues   lists of outstanding asynchronous operations (meaning is the interpreter's)"""

    __slots__ = ("lanes", "pc", "queues", "waiting")

    def __init__(self, pc, lanes, queues, waiting=None):
        self.pc, self.lanes, self.queues, self.waiting = pc, lanes, queues, waiting


def run_fragments(batch):
    """Run a batch to its end: always the runnable fragment with the lowest pc; equal places merge."""
    while batch.fragments:
        ready = [f for f in batch.fragments if f.waiting is None]
        if not ready:
            batch.release()
            continue
        now = min(ready, key=lambda f: f.pc)
        limit = None
        for other in ready:
            if other is now:
                continue
            if other.pc == now.pc and batch.merge(now, other):
                batch.fragments.remove(other)
            elif limit is None or other.pc < limit:
                limit = other.pc
        batch.enter(now)
        batch.advance(now, limit)


def waves_per_batch(waves_in_group, groups, lanes):
    """How many groups to run together: about 4096 lanes, whole groups, at least one."""
    return max(1, min(groups, 4096 // (lanes * waves_in_group)))


def group_ids(grid):
    """int64 (n, 3): coordinates of all groups, x fastest."""
    x, y, z = (int(v) for v in grid)
    if min(x, y, z) < 1:
        raise Fault(f"grid {tuple(grid)} has an empty dimension")
    ids = np.empty((z, y, x, 3), I64)
    ids[..., 0], ids[..., 1], ids[..., 2] = np.arange(x), np.arange(y)[:, None], np.arange(z)[:, None, None]
    return ids.reshape(-1, 3)


# --------------------------------------------------------------------------------------- arithmetic
def poison(shape, seed):
    """uint32 start values for registers: NaN in fp16, bf16 and fp32, different from lane to lane."""
    return U32(0x7FFF7FFF) ^ np.random.default_rng(seed).integers(0, 2, shape, dtype=U32)


def popcount(x):
    """uint32 number of set bits of uint32 values."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(x).astype(U32)
    x = x - ((x >> U32(1)) & U32(0x55555555))
    x = (x & U32(0x33333333)) + ((x >> U32(2)) & U32(0x33333333))
    return (((x + (x >> U32(4))) & U32(0x0F0F0F0F)) * U32(0x01010101)) >> U32(24)


def odd_sum(product, addend):
    """float64 sum rounded to odd: any later rounding to at most 51 bits is then a single rounding."""
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(I64)
    fix = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(fix, bits + step, bits).view(F64)


def fma32(a, b, c):
    """float32 fused multiply-add with one rounding; operands float32 arrays or scalars that broadcast."""
    product = np.multiply(a, b, dtype=F64)
    total = np.asarray(product + c)
    low = total.view(I64) & 0x1FFFFFFF
    unsafe = (low == 0x10000000) | ((np.abs(total) < 2.0**-125) & (total != 0))
    if unsafe.any():
        total = odd_sum(np.broadcast_to(product, total.shape), np.broadcast_to(np.asarray(c, F64), total.shape))
    return total.astype(F32)


def flush(x):
    """float32 with subnormals replaced by zeros of the same sign."""
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def multiply_accumulate(a, b, c):
    """float32 (w, m, n): c + a @ b^T, exact and rounded once, for float64 a (w, m, k), b (w, n, k) and float32 c."""
    return (c + np.matmul(a, b.transpose(0, 2, 1))).astype(F32)


def half_toward_zero(x):
    """uint32 fp16 patterns (low 16 bits) of a float32 array, rounded toward zero."""
    half = np.asarray(x).astype(F16)
    over = np.abs(half.astype(F64)) > np.abs(x)
    return np.where(over, np.nextafter(half, F16(0)), half).view(U16).astype(U32)


def bf16_bits(x: Array) -> Array:
    """uint32 bf16 patterns (low 16 bits) of float64 values, round to nearest even, NaN as 0x7FFF."""
    x = np.asarray(x, F64)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(x)[1] - 1, -126)
        ulp = np.ldexp(1.0, exponent - 7)
        rounded = np.where(np.isfinite(x), np.rint(x / ulp) * ulp, x).astype(F32)
    return np.where(np.isnan(x), U32(0x7FFF), rounded.view(U32) >> U32(16)).astype(U32)


def f32_to_bf16_bits(x):
    """uint32 bf16 patterns (low 16 bits) of a float32 array, round to nearest even, NaN as 0x7FFF."""
    u = np.ascontiguousarray(x).view(U32)
    r = (u + U32(0x7FFF) + ((u >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FFF), r)
