"""Functions of a user's own through their launcher: on the fake drivers, whose launches run in the interpreters."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotmm.build import render
from aotmm.errors import ArtifactError, DriverError, NoKernelError
from aotmm.pack.function_table import FunctionTable, Measured, Time
from aotmm.pack.schema import Guard, OwnKernel
from aotmm.problem import POINTER_CODES
from aotmm.runtime.own import Allocate, OwnLauncher, Release, Values
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.build.packs import own_pack
from tests.emulators.fake_driver import FakeDriver, compiler
from tests.native.emulation import ARCHS, Array, in_worker, missing, own_process

FP16, FP32, NONE = (POINTER_CODES.index(name) for name in ("*fp16", "*fp32", "None"))
FP8 = POINTER_CODES.index("*fp8e5")
ADD, SOFTMAX, LAYER_NORM, MATMUL, ATTENTION, DESCRIBED, DOUBLE = range(7)  # by number in the pack


def fake(arch: str, *buffers: tuple[str, Array, str], execute: bool = True) -> FakeDriver:
    """A driver for `arch` with these buffers."""
    return FakeDriver(target(arch).backend, buffers, arch=arch, execute=execute)


@contextmanager
def launching(arch: str, pack: Path, *buffers: tuple[str, Array, str]) -> Iterator[tuple[OwnLauncher, FakeDriver]]:
    """The launcher of a pack over a driver with these buffers; what was launched was without fault."""
    driver = fake(arch, *buffers)
    yield open_pack(pack).own_launcher, driver
    assert (driver.faults, driver.misuse) == ([], [])


def address(array: Array) -> int:
    """Where its first element is."""
    return int(array.ctypes.data)


def aligned(count: int, dtype: Any, offset: int = 0) -> Array:
    """Memory for so many elements, which begins so many of them behind a multiple of 16 bytes."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 256, np.uint8)
    begin = -address(raw) % 256
    found: Array = raw[begin:].view(dtype)[offset : offset + count]
    return found


def launched(driver: FakeDriver, launcher: OwnLauncher) -> set[str]:
    """The names of the kernels that have the image that was launched last: hints may change nothing in it."""
    digest = hashlib.sha256(driver.launches[-1].image).hexdigest()
    return {kernel.name for kernel in launcher.kernels if kernel.image.sha256 == digest}


def executed(arch: str) -> Callable[..., None]:
    """What runs a function below in a worker, or skips the test."""

    def run(body: Callable[..., None], *arguments: Any) -> None:
        if reason := missing(arch):
            pytest.skip(reason)
        in_worker(body, arch, own_pack(arch), *arguments)

    return run


def adds(arch: str, pack: Path, count: int, offset: int, kind: str) -> None:
    """Run `add_kernel` in the pack's own grid."""
    rng = np.random.default_rng(1)
    x, y, out = (aligned(count, np.float32, offset) for _ in range(3))
    x[:], y[:] = rng.standard_normal(count), rng.standard_normal(count)
    with launching(arch, pack, ("x", x, "r"), ("y", y, "r"), ("out", out, "w1")) as (launcher, driver):
        launcher.launch(ADD, Values([address(x), address(y), address(out), count]), None, 0, 0)
        assert driver.launches[-1].grid == (-(-count // 1024), 1, 1)
        assert launched(driver, launcher) == {f"add_kernel_{kind}"}
    assert (out == x + y).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("count", "offset", "kind"), [(2048, 0, "special"), (1500, 0, "generic"), (1024, 1, "generic")]
)
def test_add(arch: str, count: int, offset: int, kind: str) -> None:
    """Sums are exact, in as many blocks as the grid's expression says; hints that do not hold are not used."""
    executed(arch)(adds, count, offset, kind)


def softmaxes(arch: str, pack: Path, dtype: Any, cols: int, block: int) -> None:
    """Run `softmax_kernel` on five rows of a wider matrix."""
    stride = cols + 3
    x, out = aligned(5 * stride, dtype), aligned(5 * stride, dtype)
    x[:] = np.random.default_rng(2).standard_normal(5 * stride) * 4
    code = FP16 if dtype is np.float16 else FP32
    with launching(arch, pack, ("x", x, "r"), ("out", out, "w1")) as (launcher, driver):
        values = [address(out), code, address(x), code, stride, stride, 5, cols, block]
        launcher.launch(SOFTMAX, Values(values), None, 0, 0)
        assert driver.launches[-1].grid == (5, 1, 1)
    rows = x.reshape(5, stride)[:, :cols].astype(np.float64)
    want = np.exp(rows - rows.max(1, keepdims=True))
    want /= want.sum(1, keepdims=True)
    found = out.reshape(5, stride)
    assert np.abs(found[:, :cols] - want).max() < (1e-3 if dtype is np.float16 else 1e-6)
    assert (found[:, cols:] == 0).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "cols", "block"), [(np.float16, 200, 256), (np.float32, 700, 1024)])
def test_softmax(arch: str, dtype: Any, cols: int, block: int) -> None:
    """Types and constexprs of a call choose the variant; rows are as in float64, and nothing beside them is written."""
    executed(arch)(softmaxes, dtype, cols, block)


def normalises(arch: str, pack: Path, bias: bool, warps: int) -> None:  # noqa: FBT001 - an argument of a test
    """Run `layer_norm_kernel` on three rows, by the first config or the one with so many warps."""
    rows, cols = 3, 96
    rng = np.random.default_rng(3)
    x, y = aligned(rows * cols, np.float16), aligned(rows * cols, np.float16)
    weight, added = aligned(cols, np.float32), aligned(cols, np.float32)
    x[:], weight[:], added[:] = rng.standard_normal(rows * cols), rng.standard_normal(cols), rng.standard_normal(cols)
    with launching(arch, pack, ("x", x, "r"), ("y", y, "w1"), ("w", weight, "r"), ("b", added, "r")) as (
        launcher,
        driver,
    ):
        eps = int(np.float32(1e-5).view(np.int32))
        of_bias = [address(added), FP32] if bias else [0, NONE]
        given = [address(x), address(y), address(weight), *of_bias, cols, cols, eps]
        names = next(k.quantities for k in launcher.kernels if k.function == "layer_norm_kernel")
        open_ = 1 << names.index("BLOCK") | (0 if warps else 1 << names.index("num_warps"))
        launcher.launch(LAYER_NORM, Values([*given, 0, warps], open_), (rows, 1, 1), 0, 0)
        assert driver.launches[-1].block[0] == (warps or 4) * target(arch).warp_size
    exact = x.reshape(rows, cols).astype(np.float64)
    want = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5) * weight + bias * added
    assert np.abs(y.reshape(rows, cols) - want).max() < 1e-2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("bias", "warps"), [(True, 0), (False, 0), (True, 1)])
def test_layer_norm(arch: str, bias: bool, warps: int) -> None:  # noqa: FBT001 - an argument of a test
    """A pointer may be None where a variant is for that; of autotuned configs the first serves, or the one named."""
    executed(arch)(normalises, bias, warps)


def values_of(launcher: OwnLauncher, function: int, given: dict[str, int]) -> Values:
    """The values of a call by the names of its quantities; what is not given is left open."""
    names = list(dict.fromkeys(kernel.function for kernel in launcher.kernels))
    kernel = next(kernel for kernel in launcher.kernels if kernel.function == names[function])
    quantities = kernel.quantities[:-2]
    assert set(given) <= set(quantities)
    open_ = sum((name not in given) << number for number, name in enumerate(quantities))
    return Values([given.get(name, 0) for name in quantities], open_)


def multiplies(arch: str, pack: Path, fp8: bool, activation: int, block: int) -> None:  # noqa: FBT001
    """Run `matmul_kernel` on a ragged product of small integers, whose sums are exact."""
    m, n, k = 70, 40, 48
    rng = np.random.default_rng(4)
    a, b, c = aligned(m * k, np.float16), aligned(k * n, np.float16), aligned(m * n, np.float16)
    a[:], b[:] = rng.integers(-3, 4, m * k), rng.integers(-3, 4, k * n)
    wanted = a.reshape(m, k).astype(np.float64) @ b.reshape(k, n).astype(np.float64)
    wanted = np.where((wanted < 0) & (activation == 1), 0.01 * wanted, wanted)
    if fp8:  # the upper byte of an fp16 whose lower byte is 0
        a, b = (aligned_copy(np.ascontiguousarray(x.view(np.uint8)[1::2])) for x in (a, b))
    code = FP8 if fp8 else FP16
    with launching(arch, pack, ("a", a, "r"), ("b", b, "r"), ("c", c, "w1")) as (launcher, driver):
        given = {"a_ptr": address(a), "a_ptr.type": code, "b_ptr": address(b), "b_ptr.type": code, "c_ptr": address(c)}
        given |= {"M": m, "N": n, "K": k, "stride_a": k, "stride_b": n, "stride_c": n, "ACTIVATION": activation}
        given |= {"BLOCK_M": block} if block else {}
        launcher.launch(MATMUL, values_of(launcher, MATMUL, given), None, 0, 0)
        side = block or 64
        assert driver.launches[-1].grid == (-(-m // side) * -(-n // side), 1, 1)
    assert np.abs(c.reshape(m, n) - wanted).max() <= (2**-6 if activation else 0)


def aligned_copy(array: Array) -> Array:
    """A copy that begins at a multiple of 16 bytes."""
    found = aligned(array.size, array.dtype)
    found[:] = array.ravel()
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("fp8", "activation", "block"), [(False, 0, 0), (False, 1, 32), (True, 1, 32)])
def test_matmul(arch: str, fp8: bool, activation: int, block: int) -> None:  # noqa: FBT001 - an argument of a test
    """Products of fp16 and fp8 are exact, with an activation by name, by the first config or the one that is named."""
    executed(arch)(multiplies, fp8, activation, block)


def attends(arch: str, pack: Path, causal: int) -> None:
    """Run `attention_kernel` on two heads of a ragged number of rows."""
    heads, rows, width = 2, 45, 64
    rng = np.random.default_rng(5)
    q, k, v, out = (aligned(heads * rows * width, np.float16) for _ in range(4))
    for each in (q, k, v):
        each[:] = rng.standard_normal(each.size)
    with launching(arch, pack, ("q", q, "r"), ("k", k, "r"), ("v", v, "r"), ("out", out, "w1")) as (launcher, _):
        given = {"q_ptr": address(q), "k_ptr": address(k), "v_ptr": address(v), "out_ptr": address(out), "n_ctx": rows}
        given |= {"scale": int(np.float32(0.125).view(np.int32)), "stride_head": rows * width, "stride_row": width}
        values = values_of(launcher, ATTENTION, given | {"CAUSAL": causal})
        launcher.launch(ATTENTION, values, (-(-rows // 32), heads, 1), 0, 0)
    q, k, v = (each.reshape(heads, rows, width).astype(np.float64) for each in (q, k, v))
    score = q @ k.transpose(0, 2, 1) * 0.125
    score = np.where(causal & (np.arange(rows)[:, None] < np.arange(rows)), -np.inf, score)
    parts = np.exp(score - score.max(2, keepdims=True))
    wanted = parts / parts.sum(2, keepdims=True) @ v
    assert np.abs(out.reshape(heads, rows, width) - wanted).max() < 4e-3


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("causal", [0, 1])
def test_attention(arch: str, causal: int) -> None:
    """Each row is its softmax over the rows that it sees, as in float64, for heads that end in the middle of a tile."""
    executed(arch)(attends, causal)


def matrix(name: str, array: Array, rows: int, cols: int) -> dict[str, int]:
    """The values of a descriptor of a contiguous matrix."""
    parts = {"size0": rows, "size1": cols, "stride0": cols, "stride1": 1}
    return {name: address(array)} | {f"{name}.{part}": value for part, value in parts.items()}


def describes(arch: str, pack: Path) -> None:
    """Run both kernels of descriptors: where there are no tensor maps they are addresses, sizes and strides."""
    m, n, k = 70, 40, 48
    rng = np.random.default_rng(6)
    a, b, c = aligned(m * k, np.float16), aligned(k * n, np.float16), aligned(m * n, np.float16)
    a[:], b[:] = rng.integers(-3, 4, m * k), rng.integers(-3, 4, k * n)
    x, out = aligned(20 * 48, np.float32), aligned(20 * 48, np.float32)
    x[:] = rng.standard_normal(x.size)
    with launching(arch, pack, ("a", a, "r"), ("b", b, "r"), ("c", c, "w1"), ("x", x, "r"), ("out", out, "w1")) as (
        launcher,
        driver,
    ):
        given = matrix("a", a, m, k) | matrix("b", b, k, n) | matrix("c", c, m, n)
        launcher.launch(DESCRIBED, values_of(launcher, DESCRIBED, given), None, 0, 0)
        assert driver.launches[-1].grid == (2, 1, 1)
        given = {"out_ptr": address(out), "x_ptr": address(x), "rows": 20, "cols": 40, "stride": 48}
        launcher.launch(DOUBLE, values_of(launcher, DOUBLE, given), None, 0, 0)
        assert driver.launches[-1].grid == (2, 2, 1)
    assert (c.reshape(m, n) == a.reshape(m, k).astype(np.float64) @ b.reshape(k, n).astype(np.float64)).all()
    assert (out.reshape(20, 48)[:, :40] == 2 * x.reshape(20, 48)[:, :40]).all()
    assert (out.reshape(20, 48)[:, 40:] == 0).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_descriptors(arch: str) -> None:
    """Descriptors of the caller and of the kernel keep to the sizes that they have; products are exact."""
    executed(arch)(describes)


# ----------------------------------------------------------------------------------------------------- no execution
def holds(guard: Guard, value: int) -> bool:
    """Whether a guard holds, by its definition in docs/format.md."""
    if guard.relation == "multiple_of":
        return value % guard.operand == 0
    compare = {"equals": operator.eq, "below": operator.lt, "at_least": operator.ge}[guard.relation]
    return bool(compare(value, guard.operand))


def drawn(kernel: OwnKernel, rng: random.Random) -> tuple[list[int], int]:
    """Values of a call that is mostly near what the kernel guards, and what it leaves open."""
    values, open_ = [], 0
    for number, name in enumerate(kernel.quantities[:-2]):
        guards = [guard for guard in kernel.guards if guard.value == name]
        value = rng.choice((0, 1, 7, 16, 48, 100, 4096, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, -16, 2**40, 2**62))
        if guards and rng.random() < 0.8:
            value = rng.choice(guards).operand + rng.choice((0, 0, 0, 0, 1, -1, 16))
        values.append(max(-(2**63), min(2**63 - 1, value)))
        open_ |= (rng.random() < 0.1) << number
    return values, open_


@pytest.mark.parametrize("arch", ARCHS)
def test_fuzzed_launches(arch: str) -> None:
    """Each of 10,000 calls with any values launches the first kernel whose guards hold, or says why none does."""
    if reason := missing(arch):
        pytest.skip(reason)
    in_worker(fuzzes, arch, own_pack(arch))


def fuzzes(arch: str, pack: Path) -> None:
    """Compare every call with the manifest."""
    driver, launcher, rng = fake(arch, execute=False), open_pack(pack).own_launcher, random.Random(20)  # noqa: S311 - a test
    names = open_pack(pack).head.functions
    counts = {"served": 0, "refused": 0}
    for _ in range(10_000):
        function = rng.randrange(len(names))
        members = [kernel for kernel in launcher.kernels if kernel.function == names[function]]
        values, open_ = drawn(rng.choice(members), rng)
        of = members[0].quantities.index
        broken = {
            kernel.name: [g for g in kernel.guards if not (open_ >> of(g.value) & 1 or holds(g, values[of(g.value)]))]
            for kernel in members
        }
        fitting = [name for name, guards in broken.items() if not guards]
        before = len(driver.launches)
        counts["served" if fitting else "refused"] += 1
        if not fitting:
            with pytest.raises(NoKernelError) as refused:
                launcher.launch(function, Values(values, open_), (2, 3, 4), 0, 0)
            assert all(f"\n  {kernel.name}: " in str(refused.value) for kernel in members)
            continue
        launcher.launch(function, Values(values, open_), (2, 3, 4), 0, 0)
        assert fitting[0] in launched(driver, launcher)
        assert (len(driver.launches), driver.launches[-1].grid) == (before + 1, (2, 3, 4))
        if before > 100:
            driver.launches.clear()
    assert min(counts.values()) > 1000, counts
    assert driver.misuse == []


@own_process
def test_grids() -> None:
    """A grid without blocks launches nothing; one that is missing, too large or not computable is refused."""
    driver, launcher = fake("sm80", execute=False), open_pack(own_pack("sm80")).own_launcher

    def add(count: int, grid: tuple[int, int, int] | None) -> None:
        launcher.launch(ADD, Values([16, 16, 16, count]), grid, 0, 0)

    add(0, None)
    add(5, (3, 0, 1))
    assert driver.launches == []
    for count, grid, words in (
        (5, (2**31, 1, 1), "a grid of 2147483648 x 1 x 1 blocks is not possible"),
        (5, (1, 65536, 1), "1 x 65536 x 1 blocks"),
        (5, (1, 1, -1), "1 x 1 x -1 blocks"),
        (-5000, None, "a grid of -4 x 1 x 1 blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            add(count, grid)
    with pytest.raises(ValueError, match="layer_norm_kernel has no grid of its own; give one"):
        launcher.launch(LAYER_NORM, Values([16, 16, 16, 16, FP32, 16, 16, 0, 0, 0], 0x300), None, 0, 0)
    with pytest.raises(ValueError, match="function 7: the pack has 7"):
        launcher.launch(7, Values([0] * 9), None, 0, 0)
    driver.fail_next("cuLaunchKernelEx", 2)
    with pytest.raises(DriverError, match="cuLaunchKernelEx failed on CUDA device 0 for kernel add_kernel_generic"):
        add(5, None)
    add(5, None)
    assert len(driver.launches) == 1


@own_process
def test_measured_choices() -> None:
    """Of variants that fit, the fastest at the nearest sizes serves; a table of other kernels is refused."""
    pack = open_pack(own_pack("sm80"))
    driver, launcher = fake("sm80", execute=False), pack.own_launcher
    kernels = [kernel for kernel in launcher.kernels if kernel.function == "layer_norm_kernel"]
    names = [kernel.name for kernel in kernels]
    first, other = (f"layer_norm_kernel_fp32_BLOCK{words}_special" for words in ("512_num_warps4", "128_num_warps1"))
    assert {first, other} < set(names)
    of = kernels[0].quantities.index
    rest_open = 1 << of("BLOCK") | 1 << of("num_warps")

    def served(columns: int, address: int = 16, open_: int = rest_open) -> str:
        values = Values([16, 16, address, 16, FP32, 16, columns, 0, 512, 4], open_)
        launcher.launch(LAYER_NORM, values, (1, 1, 1), 0, 0)
        chosen = launcher.kernels[launcher.choose(LAYER_NORM, values, 0)].name
        assert chosen in launched(driver, launcher)
        assert launcher.explain(LAYER_NORM, values).chosen == chosen
        return chosen

    def measured(columns: int, fastest: str) -> Measured:
        times = [Time(name, 5 if name == fastest else 9) for name in (first, other)]
        return Measured("layer_norm_kernel", first, (columns,), tuple(times))

    def table(*rows: Measured) -> FunctionTable:
        return FunctionTable("sm80", "A100", "2.13", "0.1", "2026-11-25", rows)

    assert served(1024) == first
    launcher.retune(table(measured(64, other), measured(1024, first), measured(16384, other)))
    assert [served(n) for n in (16, 64, 240, 272, 1024, 4080, 4112, 2**20, 0)] == [
        *(other, other, other),  # 256 is as near to 64 as to 1024
        *(first, first, first),
        *(other, other, other),
    ]
    assert served(64, address=1) == "layer_norm_kernel_fp32_BLOCK512_num_warps4_generic", "another first: not measured"
    assert served(64, open_=0) == first, "the caller named the config"
    launcher.retune(table())
    assert served(64) == first
    right = measured(64, other)
    for wrong in ({"first": "gone"}, {"sizes": (1, 2)}, {"times": (Time("gone", 1),)}):
        with pytest.raises(ArtifactError, match="the tuning table of 2026-11-25 is of other kernels than"):
            launcher.retune(table(dataclasses.replace(right, **wrong)))
    assert driver.misuse == []


@own_process
def test_tensor_maps() -> None:
    """On Hopper the launch encodes a map of two dimensions for each descriptor, which must lie as the driver asks."""
    driver, launcher = fake("sm90", execute=False), open_pack(own_pack("sm90")).own_launcher
    a, b, c = (aligned(64 * 64, np.float16) for _ in range(3))
    given = matrix("a", a, 64, 48) | matrix("b", b, 48, 40) | matrix("c", c, 64, 40)
    launcher.launch(DESCRIBED, values_of(launcher, DESCRIBED, given), None, 0, 0)
    made = [call.arguments for call in driver.calls if call.name == "cuTensorMapEncodeTiled"]
    keys = ("rank", "dim0", "dim1", "box0", "box1")
    assert [[int(each[key]) for key in keys] for each in made] == [
        [2, 48, 64, 32, 64],
        [2, 40, 48, 64, 32],
        [2, 40, 64, 64, 64],
    ]
    for name, value, words in (
        ("a", given["a"] + 2, "a=[0-9]+ is not a multiple of 16"),
        ("b.stride0", 42, "b.stride0=42 is not a multiple of 8"),
        ("c.stride1", 2, "c.stride1=2 is not 1"),
        ("a.size1", 0, "a.size1=0 is below 1"),
    ):
        with pytest.raises(NoKernelError, match=words):
            launcher.launch(DESCRIBED, values_of(launcher, DESCRIBED, given | {name: value}), None, 0, 0)
    assert driver.misuse == []


@own_process
def test_scratch() -> None:
    """Kernels that need memory of their own get it for each block, and give it back behind the launch."""
    driver, launcher = fake("sm90", execute=False), open_pack(own_pack("sm90")).own_launcher
    (size,) = {kernel.global_scratch_bytes for kernel in launcher.kernels if kernel.function == "double_kernel"}
    given = {"out_ptr": 4096, "x_ptr": 8192, "rows": 33, "cols": 70, "stride": 80}
    values = values_of(launcher, DOUBLE, given)
    with pytest.raises(ValueError, match=f"needs {size * 9} B of scratch memory; say by allocate_by"):
        launcher.launch(DOUBLE, values, None, 0, 0)
    log: list[tuple[object, ...]] = []

    def allocate(size: int, ordinal: int, stream: int | None, found: Any) -> int | None:
        log.append((size, ordinal, stream, len(driver.launches)))
        found[0] = 1 << 20
        return 7 if len(log) < 3 else None

    kept = Allocate(allocate), Release(lambda memory: log.append((memory, len(driver.launches))))
    launcher.allocate_by(*kept)
    launcher.launch(DOUBLE, values, None, 0, 0)
    assert log == [(size * 9, 0, None, 0), (7, 1)]
    assert (1 << 20).to_bytes(8, "little") in driver.launches[-1].params
    with pytest.raises(DriverError, match=f"no {size * 9} B of scratch memory for kernel double_kernel"):
        launcher.launch(DOUBLE, values, None, 0, 0)
    assert len(driver.launches) == 1


PROGRAM = """
#include <stdio.h>
#include "products.h"
#include <launcher.h>
int main(void) {
  float x[4] = {0}, out[4] = {0};
  const int64_t grid[3] = {1, 1, 1};
  int status = add_kernel_sm80(x, x, out, 4, NULL, 0, NULL);
  status |= softmax_kernel_sm80(out, AOTMM_TYPE_FP32, x, AOTMM_TYPE_FP32, 4, 4, 1, 4, 256, grid, 0, NULL);
  status |= layer_norm_kernel_sm80(x, out, x, NULL, AOTMM_TYPE_NONE, 4, 4, 1e-5f, grid, 0, NULL);
  printf("%d %s\\n", status, aotmm_own_sm80()->last_error()->text);
  status = softmax_kernel_sm80(out, AOTMM_TYPE_BF16, x, AOTMM_TYPE_FP32, 4, 4, 1, 4, 256, grid, 0, NULL);
  printf("%d %s\\n", status, aotmm_own_sm80()->last_error()->text);
}
"""


@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_typed_functions(language: str, tmp_path: Path) -> None:
    """The header's function of each kernel compiles without a warning, in C and C++, beside a header of products."""
    pack = own_pack("sm80")
    source = tmp_path / f"program.{'c' if language == 'c11' else 'cc'}"
    source.write_text(PROGRAM)
    (tmp_path / "products.h").write_text(render.header(("sm80",)))
    command = compiler() if language == "c11" else [shutil.which("c++") or shutil.which("clang++") or ""]
    if not command[0]:
        pytest.skip("no C++ compiler here")
    words = [f"-std={language}", "-Wall", "-Wextra", "-Werror", f"-I{pack}", "-o", f"{tmp_path}/program", str(source)]
    done = subprocess.run(
        [*command, *words, f"{pack}/libaotmm_sm80.so", f"-Wl,-rpath,{pack}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("3 the CUDA driver cannot be opened")  # this machine has none
    assert second.startswith("3 the CUDA driver cannot be opened")
