"""The interpreters themselves: kernels unlike aotmm's own are right in them, and what is wrong ends in a fault.

Whatever aotmm's kernels do is tested with their images, in tests/kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.emulators import core, elf, numerics
from tests.emulators.gfx90a.program import program as amd_program
from tests.emulators.sm80.program import program as nvidia_program
from tests.emulators.variants import Image, Problem, Variant, image, problem, run
from tests.native.emulation import ARCHS, missing

PLAIN, UNALIGNED = Variant(), Variant(aligned=False)
SWITCH = Variant(out="fp32", switch=True, tile=(32, 32, 32))
SMALL = Variant(tile=(32, 32, 32))
BOTH = {
    "plain": PLAIN,
    "unaligned": UNALIGNED,
    "bytes that are fp8": replace(SMALL, dtype="fp8e4"),
    "atomic fp32": replace(SMALL, out="fp32", split=3, order="acq_rel"),
    "atomic fp16": replace(SMALL, split=2),
    "one warp": Variant(tile=(16, 16, 16), warps=1),
}
AMD = {
    "spills": Variant(tile=(128, 128, 32), warps=1, aligned=False),
    **{
        f"16x16 MFMA of {dtype}": Variant(dtype, out, options=(("matrix_instr_nonkdim", 16),))
        for dtype, out in (("fp16", "fp16"), ("bf16", "bf16"), ("int8", "int32"), ("fp32", "fp32"))
    },
}
NVIDIA = {"tf32 in three parts": replace(SMALL, dtype="tf32", out="fp32", precision="tf32x3")}
VARIANTS = [
    pytest.param(arch, variant, id=f"{arch} {name}")
    for arch, more in (("gfx90a", AMD), ("sm80", NVIDIA))
    for name, variant in {**BOTH, **more}.items()
]


@pytest.fixture(autouse=True)
def _tools(request: pytest.FixtureRequest) -> None:
    arch = request.getfixturevalue("arch") if "arch" in request.fixturenames else "sm80"
    if reason := missing(arch):
        pytest.skip(reason)


@pytest.mark.parametrize(("arch", "variant"), VARIANTS)
def test_variant(arch: str, variant: Variant) -> None:
    """Products of integers are exact, with every byte of C stored as often as it should be and none beside it."""
    compiled = image(variant, arch)
    assert bool(elf.read(compiled.data).kernels[compiled.symbol].stack) == (variant == AMD["spills"])
    for m, n, k, batch in ((70, 90, 101, 2), (1, 2, 1, 1)):
        task = problem(variant, m, n, k, batch=batch)
        assert task.complaints(run(compiled, task)) == []


def test_table_of_branches() -> None:
    """A branch by a table goes where the argument says; one by an altered table, to no declared target, faults."""
    compiled = image(SWITCH, "sm80")
    for act in (0, 1, 2):
        task = problem(SWITCH, 33, 40, 50, act=act)
        assert task.complaints(run(compiled, task)) == []
    altered = bytearray(compiled.data)
    altered[elf.read(compiled.data).kernels[compiled.symbol].table[0]] ^= 16  # one instruction off
    with pytest.raises(core.Fault, match="not one of its targets"):
        run(replace(compiled, data=bytes(altered)), problem(SWITCH, 33, 40, 50, act=1))


@pytest.mark.parametrize("arch", ARCHS)
def test_special_values(arch: str) -> None:
    """NaN and infinity stay in their rows."""
    compiled, task = image(UNALIGNED, arch), problem(UNALIGNED, 70, 90, 37)
    task.memory["A"][0, 5, 3], task.memory["A"][0, 9, 36] = np.nan, np.inf
    run(compiled, task)
    found, special = task.memory["C"][0, :70, :90], np.zeros(70, bool)
    special[[5, 9]] = True
    assert np.isnan(found[5]).all()
    assert not np.isfinite(found[9]).any()
    assert (found[~special] == task.c[0, ~special]).all()


def one_row_more(task: Problem) -> None:
    """Says that A and C have a row more than they have."""
    task.parameters[3] = (71, "i32")


def swapped(task: Problem) -> None:
    """Says M for N and N for M."""
    task.parameters[3], task.parameters[4] = task.parameters[4], task.parameters[3]


def read_only(task: Problem) -> None:
    """Forbids stores into C."""
    task.modes["C"] = "r"


def same_tile_twice(task: Problem) -> None:
    """Launches two matrices at the same place."""
    task.grid = (*task.grid[:2], 2)
    for place in (6, 8, 10):  # the strides between matrices
        task.parameters[place] = (0, "i64")


def misaligned(task: Problem) -> None:
    """Moves A to an address that its kernel was told it does not have."""
    task.addresses["A"] += 2
    task.parameters[0] = (task.addresses["A"], "*")


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (one_row_more, "lie in no buffer"),
        (swapped, "lie in no buffer"),
        (read_only, "read-only"),
        (same_tile_twice, "is stored twice|two lanes store"),
        (misaligned, "multiple of"),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_mistakes_of_a_launch(arch: str, mistake: Callable[[Problem], None], words: str) -> None:
    """A launch that breaks its memory's bounds, modes or alignment ends in a fault that names the instruction."""
    task = problem(PLAIN, 70, 90, 101)
    mistake(task)
    with pytest.raises(core.Fault, match=rf"^pc 0x[0-9a-f]+ `.*: .*({words})"):
        run(image(PLAIN, arch), task)


@pytest.mark.parametrize("arch", ARCHS)
def test_mistakes_of_a_caller(arch: str) -> None:
    """Too little shared memory, a kernel that is not there, another block and too few parameters are told."""
    compiled, task = image(PLAIN, arch), problem(PLAIN, 70, 90, 101)
    with pytest.raises(core.Fault, match="past the 512 bytes granted"):
        run(compiled, task, shared=512)
    for altered, words in (({"symbol": "absent"}, "no kernel 'absent'"), ({"threads": 2048}, "block")):
        with pytest.raises(core.Fault, match=words):
            run(replace(compiled, **altered), task)
    task.parameters = task.parameters[:5]
    with pytest.raises(core.Fault, match="5 parameters were given"):
        run(compiled, task)


@pytest.mark.parametrize("arch", ARCHS)
def test_budget(arch: str) -> None:
    """A launch that executes more instructions than it may is stopped."""
    with pytest.raises(core.Fault, match="exceeded 1000 instructions"):
        run(image(PLAIN, arch), problem(PLAIN, 70, 90, 101), budget=1000)


def instructions(compiled: Image) -> dict[int, tuple[int, int, str]]:
    """By address: where in the file an instruction begins, how long it is, and its text."""
    code = elf.read(compiled.data).kernels[compiled.symbol].code[0]
    if compiled.arch == "sm80":
        return {pc: (code + pc, 16, text) for pc, text in nvidia_program(compiled.data, compiled.symbol).text}
    listed = amd_program(compiled.data, compiled.symbol).text
    first = min(listed)  # .text starts with an instruction
    return {pc: (code + pc - first, 4 * len(words), text) for pc, (text, words) in listed.items()}


WANTED = {
    "sm80": ("BAR.SYNC", "LDSM", "HMMA", "LDGSTS", "LDGDEPBAR"),
    "gfx90a": ("s_barrier", "v_mfma", "ds_", "s_waitcnt"),
}


@pytest.mark.parametrize(("arch", "prefix"), [(arch, prefix) for arch in ARCHS for prefix in WANTED[arch]])
def test_deleted_instructions_are_noticed(arch: str, prefix: str) -> None:
    """An image that lacks a barrier, a wait, a copy or a step of the product faults, or its product is wrong."""
    compiled = image(PLAIN, arch)
    listed = instructions(compiled)
    nop = next((compiled.data[at : at + size] for at, size, text in listed.values() if text == "NOP"), None)
    blank = nop or bytes.fromhex("000080bf")  # s_nop 0
    executed = run(compiled, problem(PLAIN, 70, 90, 128)).pcs
    found = [listed[pc] for pc in sorted(executed) if listed[pc][2].startswith(prefix)]
    survivors = []
    for at, size, text in found[:: -(-len(found) // 3)]:
        data = bytearray(compiled.data)
        data[at : at + size] = blank * (size // len(blank))
        task = problem(PLAIN, 70, 90, 128)
        try:
            stats = run(replace(compiled, data=bytes(data)), task, budget=400_000)
        except core.Fault:
            continue
        if not task.complaints(stats):
            survivors.append(text)
    assert found
    assert survivors == []


# ---------------------------------------------------------------------------------------------------- the oracle
@pytest.mark.parametrize(
    ("dtype", "out"),
    [("fp16", "fp16"), ("bf16", "bf16"), ("tf32", "fp32"), ("fp8e4", "fp16"), ("fp8e5", "bf16"), ("int8", "int32")],
)
def test_integer_operands(dtype: str, out: str) -> None:
    """Integer operands are small enough for exact sums, large enough to need rounding, and their product is right."""
    a, b, c = numerics.integer_inputs(40, 30, 500, dtype, out)
    left, right = (numerics.decode(x, dtype).astype(np.int64) for x in (a, b))
    exact = left @ right
    assert (numerics.encode(exact.astype(np.float64), out).view(np.uint8) == c.view(np.uint8)).all()
    assert (np.abs(left) @ np.abs(right)).max() < 2**24
    assert (numerics.decode(c, out) != exact).any() == (out in {"fp16", "bf16"})


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8e5", "fp8e4"])
def test_every_value_keeps_its_pattern(dtype: str) -> None:
    """Decoding and encoding gives back every finite pattern."""
    codes = np.arange(256, dtype=np.uint8) if dtype.startswith("fp8") else np.arange(1 << 16, dtype=np.uint16)
    stored = codes.view(np.float16) if dtype == "fp16" else codes
    with np.errstate(invalid="ignore"):  # bf16's signalling NaN
        values = numerics.decode(stored, dtype)
    finite = np.isfinite(values)
    assert (numerics.encode(values[finite], dtype).view(codes.dtype) == codes[finite]).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_reader_of_broken_images(arch: str) -> None:
    """Whatever is done to an image, its reader returns or raises ImageError and nothing else."""
    data, rng, refused = image(PLAIN, arch).data, np.random.default_rng(1), 0
    for number in range(1000):
        altered, place = bytearray(data), int(rng.integers(len(data) - 8))
        if number % 4 == 0:
            del altered[place:]
        elif number % 4 == 1:
            altered[int(rng.integers(64))] ^= 1 << int(rng.integers(8))
        elif number % 4 == 2:
            altered[place : place + 8] = (b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f" * 2)[number % 3]
        else:
            altered[place:place] = rng.bytes(int(rng.integers(1, 64)))
        try:
            elf.read(bytes(altered))
        except elf.ImageError:
            refused += 1
    assert refused > 400
