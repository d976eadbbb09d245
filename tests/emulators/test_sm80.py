"""Instructions of sm_80 and sm_89, assembled from PTX one by one: results against exact arithmetic."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.emulators import core, sm80
from tests.emulators.core import Array

THREADS = 128
PTX = {  # a type of numpy -> type of PTX's loads and stores, prefix of its registers
    "u8": ("u8", "h"), "u16": ("u16", "h"), "u32": ("u32", "r"), "f32": ("f32", "f"), "u64": ("u64", "rd"),
}  # fmt: skip
STORAGE = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "f32": np.float32, "u64": np.uint64}
TEXT = """
.version 8.1
.target {arch}
.address_size 64
.visible .entry test(.param .u64 a, .param .u64 b, .param .u64 d) {{
  .reg .b16 %h<4>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %rd<12>;
  mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mov.u32 %r6, %tid.x; mad.lo.u32 %r7, %r4, %r5, %r6;
  ld.param.u64 %rd4, [a]; ld.param.u64 %rd5, [b]; ld.param.u64 %rd6, [d];
  mul.wide.u32 %rd7, %r7, {size}; add.u64 %rd8, %rd4, %rd7; add.u64 %rd9, %rd5, %rd7;
  mul.wide.u32 %rd10, %r7, {wide}; add.u64 %rd11, %rd6, %rd10;
  ld.global.{load} {a}, [%rd8]; ld.global.{load} {b}, [%rd9];
  {body};
  st.global.{store} [%rd11], {d};
  ret;
}}
"""


def assembled(text: str, arch: str, folder: Path) -> bytes:
    """The cubin of a PTX text."""
    source, output = folder / "test.ptx", folder / "test.cubin"
    source.write_text(text)
    ptxas = Path(core.find_nvdisasm()).with_name("ptxas")
    done = subprocess.run([ptxas, f"-arch={arch}", source, "-o", output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output.read_bytes()


Compute = Callable[..., Array]


@pytest.fixture
def compute(tmp_path: Path) -> Compute:
    """Computes {d} = body({a}, {b}) for every element of one or two arrays, by a kernel that is that PTX."""
    try:
        core.find_nvdisasm()
    except core.ToolMissingError as error:
        pytest.skip(str(error))

    def run(body: str, taken: str, given: str, a: Array, b: Array | None = None, arch: str = "sm_80") -> Array:
        size, wide = (np.dtype(STORAGE[name]).itemsize for name in (taken, given))
        (load, x), (store, d) = PTX[taken], PTX[given]
        names = {"a": f"%{x}1", "b": f"%{x}2", "d": f"%{d}3"}
        text = TEXT.format(arch=arch, size=size, wide=wide, load=load, store=store, body=body.format(**names), **names)
        blocks = -(-a.size // THREADS)
        memory = np.zeros((2, blocks * THREADS), STORAGE[taken])
        memory[0, : a.size], memory[1, : a.size] = a, 1 if b is None else b
        result = np.zeros(blocks * THREADS, STORAGE[given])
        addresses = [1 << 40, 2 << 40, 3 << 40]
        sm80.launch(
            assembled(text, arch, tmp_path),
            "test",
            (blocks, 1, 1),
            (THREADS, 1, 1),
            [(address, "*") for address in addresses],
            0,
            [
                ("a", memory[0], addresses[0], "r"),
                ("b", memory[1], addresses[1], "r"),
                ("d", result, addresses[2], "w1"),
            ],
        )
        return result[: a.size]

    return run


# -------------------------------------------------------------------------------------------------- 64-bit integers
def wide_integers(count: int) -> Array:
    """64-bit patterns of every magnitude: powers of two, their neighbours, and random ones."""
    rng = np.random.default_rng(0)
    edges = np.array([(1 << k) + more & (1 << 64) - 1 for k in range(64) for more in (-1, 0, 1)], np.uint64)
    random = rng.integers(0, 1 << 64, count, np.uint64, endpoint=False) >> rng.integers(0, 64, count).astype(np.uint64)
    return np.concatenate([edges, random, ~random])


def divided(a: int, b: int, *, signed: bool) -> tuple[int, int]:
    """The quotient and the remainder, which C and PTX cut toward zero, as 64-bit patterns."""
    if signed:
        a, b = (x - (x >> 63 << 64) for x in (a, b))
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient % 2**64, (a - quotient * b) % 2**64


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize("signed", [False, True])
def test_division(arch: str, signed: bool, compute: Compute) -> None:  # noqa: FBT001
    """64-bit quotients and remainders, which ptxas makes of reciprocals and carries, are exact for every magnitude."""
    a = wide_integers(800)
    b = np.random.default_rng(1).permutation(a)
    b[b == 0] = 3
    kind = "s64" if signed else "u64"
    want = [divided(int(x), int(y), signed=signed) for x, y in zip(a, b, strict=True)]
    for body, place in ((f"div.{kind} {{d}}, {{a}}, {{b}}", 0), (f"rem.{kind} {{d}}, {{a}}, {{b}}", 1)):
        found = compute(body, "u64", "u64", a, b, arch)
        assert found.tolist() == [pair[place] for pair in want]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_division_of_uniform_operands(arch: str, tmp_path: Path, compute: Compute) -> None:
    """So are those of a launch's parameters, which are the same in all threads: uniform registers."""
    del compute  # it skips where nothing can be assembled
    text = f"""
.version 8.1
.target {arch}
.address_size 64
.visible .entry test(.param .u64 a, .param .u64 b, .param .u64 d) {{
  .reg .b64 %rd<12>; .reg .b32 %r<4>;
  ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [d];
  div.s64 %rd4, %rd1, %rd2; rem.s64 %rd5, %rd1, %rd2;
  st.global.u64 [%rd3], %rd4; st.global.u64 [%rd3+8], %rd5;
  ret;
}}
"""
    image, values = assembled(text, arch, tmp_path), wide_integers(8)
    numbers = np.random.default_rng(2).permutation(values[values != 0])[:96].tolist()
    for a, b in zip(numbers[::2], numbers[1::2], strict=True):
        result = np.zeros(2, np.uint64)
        parameters = [(a, "*"), (b, "*"), (1 << 40, "*")]
        sm80.launch(image, "test", (1, 1, 1), (1, 1, 1), parameters, 0, [("d", result, 1 << 40, "w1")])
        assert tuple(result.tolist()) == divided(a, b, signed=True), (a, b)


# --------------------------------------------------------------------------------------------------- conversions
def rounded_up(value: Fraction) -> Fraction:
    """The least float32 that is not below a value of at least 1, or 0, in exact arithmetic."""
    return -rounded_down(-value)


def rounded_down(value: Fraction) -> Fraction:
    """The largest float32 that is not above."""
    if value == 0:
        return value
    bits = abs(value.numerator // value.denominator).bit_length()
    ulp = Fraction(2) ** (bits - 24)
    return value // ulp * ulp


def nearest(value: Fraction) -> Fraction:
    """The float32 that is nearest, of two the one whose last bit is 0."""
    low, high = rounded_down(value), rounded_up(value)
    middle = (low + high) / 2
    if value != middle or low == high:
        return low if value <= middle else high
    return min(low, high, key=lambda x: x.numerator.bit_length() - (x.numerator & -x.numerator).bit_length())


@pytest.mark.parametrize("kind", ["u64", "s64"])
@pytest.mark.parametrize(("rounding", "exact"), [("rn", nearest), ("rp", rounded_up)])
def test_integers_to_floats(kind: str, rounding: str, exact: Callable[[Fraction], Fraction], compute: Compute) -> None:
    """64-bit integers become the nearest float32, or the next one above."""
    values = wide_integers(400)
    found = compute(f"cvt.{rounding}.f32.{kind} {{d}}, {{a}}", "u64", "f32", values)
    numbers = values.tolist() if kind == "u64" else values.view(np.int64).tolist()
    assert [Fraction(float(x)) for x in found] == [exact(Fraction(x)) for x in numbers]


@pytest.mark.parametrize("kind", ["u64", "s64"])
@pytest.mark.parametrize(
    ("rounding", "exact"), [("rzi", int), ("rmi", lambda x: x // 1), ("rpi", lambda x: -(-x // 1)), ("rni", round)]
)
def test_floats_to_integers(kind: str, rounding: str, exact: Callable[[Fraction], int], compute: Compute) -> None:
    """float32 become 64-bit integers by every rounding; what is too large saturates, NaN is the highest bit alone."""
    rng = np.random.default_rng(0)
    finite = np.concatenate(
        [np.arange(-40, 41) / 4, rng.uniform(-1, 1, 800) * 2.0 ** rng.integers(-3, 70, 800), [2.0**63, 2.0**64]]
    ).astype(np.float32)
    found = compute(f"cvt.{rounding}.{kind}.f32 {{d}}, {{a}}", "f32", "u64", np.append(finite, np.float32(np.nan)))
    low, high = (0, 2**64 - 1) if kind == "u64" else (-(2**63), 2**63 - 1)
    want = [min(max(exact(Fraction(float(x))), low), high) % 2**64 for x in finite]
    assert found.tolist() == [*want, 1 << 63]


# ------------------------------------------------------------------------------------------------------------ fp8
@functools.cache
def fp8(kind: str) -> list[float]:
    """The value of each byte, by the OCP's specification of 8-bit floats."""
    mantissa, bias = (3, 7) if kind == "e4m3" else (2, 15)
    found = []
    for code in range(256):
        exponent, fraction = code >> mantissa & (1 << 7 - mantissa) - 1, code & (1 << mantissa) - 1
        value = (
            fraction * 2.0 ** (1 - bias - mantissa)
            if exponent == 0
            else (fraction + (1 << mantissa)) * 2.0 ** (exponent - bias - mantissa)
        )
        if kind == "e4m3" and code & 127 == 127:
            value = float("nan")
        if kind == "e5m2" and exponent == 31:
            value = float("nan") if fraction else float("inf")
        found.append(-value if code & 128 else value)
    return found


def fp8_of(value: float, kind: str) -> int:
    """The byte that is nearest, of two the one whose last bit is 0; the largest for what is larger."""
    if np.isnan(value):
        return 127
    magnitudes = np.array([x for x in fp8(kind)[:128] if np.isfinite(x)])
    distances = np.abs(min(abs(value), 1e9) - magnitudes)  # exact: float64 of float32
    code = min(np.flatnonzero(distances == distances.min()).tolist(), key=lambda n: n % 2)
    return int(code) | (128 if np.signbit(value) else 0)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_floats_to_fp8(kind: str, compute: Compute) -> None:
    """Pairs of float32 become the nearest bytes: of every value, every tie and what lies beside, infinities and NaN."""
    values = np.array([x for x in fp8(kind)[:128] if np.isfinite(x)], np.float32)
    ties = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(side)) for side in (0, np.inf)]
    a = np.concatenate([values, ties, *beside, np.array([1e6, np.inf], np.float32)])
    a = np.concatenate([a, -a, np.array([np.nan], np.float32)])
    b = np.random.default_rng(0).permutation(a)
    found = compute(f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{a}}, {{b}}", "f32", "u16", a, b, "sm_89")
    assert found.tolist() == [fp8_of(float(x), kind) << 8 | fp8_of(float(y), kind) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_halves_and_fp8(kind: str, compute: Compute) -> None:
    """Every byte becomes the half of its value, NaN the canonical one, and every pair of halves the nearest bytes."""
    codes: Array = np.random.default_rng(0).permutation(256).astype(np.uint16) * 256 + np.arange(256, dtype=np.uint16)
    found = compute(f"cvt.rn.f16x2.{kind}x2 {{d}}, {{a}}", "u16", "u32", codes, arch="sm_89")
    halves = np.array(fp8(kind), np.float16)
    bits: Array = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16)).astype(np.uint32)
    assert found.tolist() == (bits[codes >> 8] << 16 | bits[codes & 255]).tolist()
    half: Array = np.arange(0, 1 << 16, 211, dtype=np.uint32)
    pairs: Array = half << 16 | half[::-1]
    found = compute(f"cvt.rn.satfinite.{kind}x2.f16x2 {{d}}, {{a}}", "u32", "u16", pairs, arch="sm_89")
    high, low = ((pairs >> shift & 0xFFFF).astype(np.uint16).view(np.float16) for shift in (16, 0))
    assert found.tolist() == [
        fp8_of(float(x), kind) << 8 | fp8_of(float(y), kind) for x, y in zip(high, low, strict=True)
    ]


MMA = """
.version 8.4
.target sm_89
.address_size 64
.visible .entry test(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) {{
  .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<16>;
  mov.u32 %r0, %tid.x;
  ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c]; ld.param.u64 %rd4, [d];
  mul.wide.u32 %rd5, %r0, 16; mul.wide.u32 %rd6, %r0, 8;
  add.u64 %rd7, %rd1, %rd5; add.u64 %rd8, %rd2, %rd6; add.u64 %rd9, %rd3, %rd5; add.u64 %rd10, %rd4, %rd5;
  ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd7]; ld.global.v2.u32 {{%r5, %r6}}, [%rd8];
  ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd9];
  mma.sync.aligned.m16n8k32.row.col.f32.{a}.{b}.f32 {{%f0, %f1, %f2, %f3}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}},
    {{%f0, %f1, %f2, %f3}};
  st.global.v4.f32 [%rd10], {{%f0, %f1, %f2, %f3}};
  ret;
}}
"""


@pytest.mark.parametrize(
    "kinds", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")], ids="-".join
)
def test_product_of_fp8(kinds: tuple[str, str], tmp_path: Path, compute: Compute) -> None:
    """The tensor core's product of fp8 has the layout of PTX's m16n8k32, and is the exact sum, rounded once."""
    del compute  # it skips where nothing can be assembled
    rng, lane = np.random.default_rng(0), np.arange(32)
    group, thread = lane[:, None] >> 2, lane[:, None] & 3
    # finite, and of few enough magnitudes that float64 has every sum
    limits = {"e4m3": 0x78, "e5m2": 0x58}
    a, b = (
        (rng.integers(0x20, limits[kind], shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)
        for kind, shape in zip(kinds, ((16, 32), (32, 8)), strict=True)
    )
    c = rng.standard_normal((16, 8)).astype(np.float32)
    # PTX ISA, "Matrix fragments for mma.m16n8k32": rows and columns of the elements of a lane
    i = np.arange(16)
    held_a = a[group + 8 * (i // 4 % 2), thread * 4 + (i & 3) + 16 * (i // 8)]
    i = np.arange(8)
    held_b = b[thread * 4 + (i & 3) + 16 * (i // 4), group]
    i = np.arange(4)
    place = group + 8 * (i // 2), thread * 2 + (i & 1)
    memory = {"a": held_a, "b": held_b, "c": c[place], "d": np.zeros((32, 4), np.float32)}
    addresses = {name: number << 40 for number, name in enumerate(memory, 1)}
    sm80.launch(
        assembled(MMA.format(a=kinds[0], b=kinds[1]), "sm_89", tmp_path),
        "test",
        (1, 1, 1),
        (32, 1, 1),
        [(address, "*") for address in addresses.values()],
        0,
        [
            (name, np.ascontiguousarray(array) if name != "d" else array, addresses[name], "w1" if name == "d" else "r")
            for name, array in memory.items()
        ],
    )
    left, right = (np.array(fp8(kind))[codes] for kind, codes in zip(kinds, (a, b), strict=True))
    want = (left @ right + c).astype(np.float32)
    assert (memory["d"] == want[place]).all()
