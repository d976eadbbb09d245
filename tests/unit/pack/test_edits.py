"""Code that is stored as edits of other code."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aotmm.pack.edits import edited, edits

CODE = st.binary(max_size=400)
CHANGES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 40), st.binary(max_size=40)), max_size=8)


def changed(code: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """The code with bytes put in place of others, here and there."""
    for place, dropped, added in changes:
        begin = place % (len(code) + 1)
        code = code[:begin] + added + code[begin + dropped :]
    return code


@given(CODE, CODE)
def test_any_code_comes_back(base: bytes, code: bytes) -> None:
    """Whatever the two are, the edits of one make the other."""
    assert edited(base, edits(base, code), len(code)) == code


@given(st.binary(min_size=1000, max_size=3000), CHANGES)
def test_alike_code_is_small(base: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    """Edits of code that differs in places of one size take what is new, and some bytes for each place."""
    same_size = [(place, len(added), added) for place, _, added in changes]
    code = changed(base, same_size)[: len(base)]
    code += base[len(code) :]
    found = edits(base, code)
    assert edited(base, found, len(code)) == code
    assert len(found) <= 6 + sum(len(added) + 12 for _, _, added in same_size)


def test_lines_and_blocks_are_found_again() -> None:
    """Text with other names in its lines, and code with blocks put in and left out, take less than a tenth."""
    text = b"".join(b"fma.rn.f32 %%r%d, %%r%d, %%r%d;\n" % (i, i + 1, i + 2) for i in range(2000))
    named = text.replace(b"fma.rn.f32 %r7", b"fma.rn.bf16 %r7")
    assert len(edits(text, named)) < len(named) / 10
    code = b"".join(i.to_bytes(16, "little") for i in range(3000))
    moved = code[:4800] + bytes(range(48)) + code[4832:30_000] + code[30_160:]
    assert edited(code, edits(code, moved), len(moved)) == moved
    assert len(edits(code, moved)) < len(moved) / 10


def test_a_number_without_an_end_takes_no_time() -> None:
    """Forged edits of a few megabytes are numbers of a few bytes each. As one number they would take hours."""
    assert len(edited(b"code", b"\xff" * 4_000_000, 10_000)) == 10_000


@given(CODE, st.binary(max_size=60), st.integers(0, 500))
def test_wrong_edits_make_something_else(base: bytes, wrong: bytes, size: int) -> None:
    """Bytes that are no edits end, with no more than was asked for: their digest then tells."""
    assert len(edited(base, wrong, size)) <= size
