"""Code that is stored as edits of other code: a kernel for bf16 differs from its twin for fp16 in a few bytes.

Edits are a sequence of (kept, dropped, added, bytes): so many bytes are kept of the other code, from where the last
edit ended, so many are left out, and so many are put in, which follow. The numbers are unsigned LEB128. `rebuilt` in
native/kernel.c reads the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import groupby

_BLOCK = 16  # bytes of an instruction of NVIDIA's
_SPAN = 64  # bytes that are compared at once
_LEAST = 5  # equal bytes between two differences that an edit of their own pays for
_MORE = 0x80  # of a byte of a number: others follow
_LONGEST = 9  # bytes of a number
_Edit = tuple[int, int, bytes]


def edits(base: bytes, code: bytes) -> bytes:
    """Return the edits that make `code` of `base`."""
    found: list[_Edit] = [(0, 0, b"")]
    for dropped, added in _parts(base, code):
        last = found[-1]
        if dropped != added or (len(added) < _LEAST and last[1:] != (0, b"")):
            found[-1] = last[0], last[1] + len(dropped), last[2] + added
        elif last[1:] == (0, b""):
            found[-1] = last[0] + len(added), 0, b""
        else:
            found.append((len(added), 0, b""))
    return b"".join(b"".join(map(_number, (kept, dropped, len(added)))) + added for kept, dropped, added in found)


def edited(base: bytes, edits: bytes, size: int) -> bytes:
    """Return the `size` bytes that `edits` make of `base`; fewer or others if they are not what `edits` returned."""
    found, at, begin = bytearray(), 0, 0
    while len(found) < size and at < len(edits):
        kept, at = _read(edits, at)
        dropped, at = _read(edits, at)
        added, at = _read(edits, at)
        found += base[begin : begin + kept] + edits[at : at + added]
        begin, at = begin + kept + dropped, at + added
    return bytes(found[:size])


def _read(edits: bytes, at: int) -> tuple[int, int]:
    """Return the number at byte `at` of the edits, and the byte behind it; what is missing counts as 0."""
    number, begin = 0, at
    while at < min(len(edits), begin + _LONGEST):
        byte = edits[at]
        number |= (byte & ~_MORE) << 7 * (at - begin)
        at += 1
        if not byte & _MORE:
            break
    return number, at


def _number(value: int) -> bytes:
    found = bytearray()
    while value >= _MORE:
        found.append(value & ~_MORE & 0xFF | _MORE)
        value >>= 7
    found.append(value)
    return bytes(found)


def _parts(base: bytes, code: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield parts of `base` and `code` that follow each other in both; many of them are equal."""
    for old, new in _pieces(base, code):
        if len(old) == len(new):
            for begin in range(0, len(old), _SPAN):
                yield from _runs(old[begin : begin + _SPAN], new[begin : begin + _SPAN])
        else:
            first = _common(old, new)
            last = _common(old[first:][::-1], new[first:][::-1])
            yield old[:first], new[:first]
            yield old[first : len(old) - last], new[first : len(new) - last]
            yield old[len(old) - last :], new[len(new) - last :]


def _runs(old: bytes, new: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield runs of equal and of different bytes of parts of one size."""
    if old == new:
        yield old, new
        return
    end = 0
    for _, pairs in groupby(zip(old, new, strict=True), key=lambda pair: pair[0] == pair[1]):
        begin, end = end, end + sum(1 for _ in pairs)
        yield old[begin:end], new[begin:end]


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes at the beginning are equal."""
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


def _pieces(base: bytes, code: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield all of both if they are of one size, else lines or blocks that they have in common, and those between."""
    if len(base) == len(code):
        yield base, code
        return
    old, new = _tokens(base), _tokens(code)
    if len(old) == len(new):
        yield from zip(old, new, strict=True)
        return
    for _, i, i_end, j, j_end in SequenceMatcher(None, old, new).get_opcodes():
        yield b"".join(old[i:i_end]), b"".join(new[j:j_end])


def _tokens(code: bytes) -> list[bytes]:
    """Return the lines of a text, or the blocks of other code."""
    if b"\0" not in code:
        return code.splitlines(keepends=True)
    return [code[begin : begin + _BLOCK] for begin in range(0, len(code), _BLOCK)]
