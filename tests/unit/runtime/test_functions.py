"""Calls of a user's own functions: arguments become values of quantities, wrong ones are told by name."""

from __future__ import annotations

import dataclasses
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aotmm.errors import NoKernelError
from aotmm.pack.schema import WHOLE, Argument, Guard, Image, Option, OwnKernel
from aotmm.problem import POINTER_CODES
from aotmm.runtime import function_call, function_op, functions
from aotmm.runtime.functions import Function, blocks_of
from aotmm.runtime.signature import Signature

FP16, FP32, NONE = (POINTER_CODES.index(name) for name in ("*fp16", "*fp32", "None"))
QUANTITIES = ("x", "x.type", "bias", "bias.type", "n", "eps", "MODE", "TILE", "num_warps", "zero", "global_scratch")


def variant(x: str, bias: str, mode: str, tile: int) -> OwnKernel:
    """A kernel of f(x, bias, n, eps, MODE, TILE, ONLY): of types, a text, an autotuned tile with its warps."""
    types = (("x", x), ("bias", bias), ("n", "i32"), ("eps", "fp32"))
    constants = (("MODE", "constexpr", f'"{mode}"'), ("TILE", "autotune", str(tile)), ("ONLY", "constexpr", "true"))
    numbers = {
        "x.type": POINTER_CODES.index(x),
        "bias.type": POINTER_CODES.index(bias),
        "MODE": ("", "relu").index(mode),
        "TILE": tile,
        "num_warps": tile // 32,
    }
    return OwnKernel(
        name=f"f_{x}_{bias}_{mode}_{tile}",
        source="f.py",
        symbol="f",
        threads=tile,
        shared_bytes=0,
        registers=1,
        spill_bytes=0,
        global_scratch_bytes=0,
        profile_scratch_bytes=0,
        quantities=QUANTITIES,
        parameters=(),
        guards=tuple(Guard(name, "equals", number) for name, number in numbers.items()),
        attributes=(),
        image=Image(0, 1, "0" * 64, 1, WHOLE),
        ptx=None,
        key="",
        function="f",
        arguments=(*(Argument(*row, "") for row in types), *(Argument(*row) for row in constants)),
        options=(Option("num_warps", tile // 32),),
        grid=(),
        license="",
        writes=("x",),
        sizes=(),
    )


KERNELS = tuple(
    variant(x, bias, mode, tile)
    for x in ("*fp16", "*fp32")
    for bias in ("*fp32", "None")
    for mode in ("", "relu")
    for tile in (128, 64)
)
F = Signature("f", KERNELS)
X, BIAS = torch.ones(4, dtype=torch.float16), torch.ones(4)
BITS = struct.unpack("<i", struct.pack("<f", 1e-5))[0]


def bound(*arguments: Any, **named: Any) -> tuple[list[int], list[str]]:
    """The values of a call, and the quantities that it leaves open."""
    values, _ = F.bound(arguments, named)
    return list(values.array), [name for number, name in enumerate(QUANTITIES) if values.open >> number & 1]


def test_arguments_by_place_and_name() -> None:
    """Tensors are addresses and types, floats their bits, texts their place among those built for; configs are open."""
    wanted = [X.data_ptr(), FP16, BIAS.data_ptr(), FP32, 7, BITS, 1, 0, 0], ["TILE", "num_warps"]
    assert bound(X, BIAS, 7, 1e-5, "relu") == wanted
    assert bound(X, n=7, MODE="relu", eps=1e-5, bias=BIAS, ONLY=True) == wanted
    assert bound(X, None, np.int64(7), 0, MODE="")[0] == [X.data_ptr(), FP16, 0, NONE, 7, 0, 0, 0, 0]
    assert bound(X, BIAS, 7, 1e-5, "", TILE=64, num_warps=2)[0][-2:] == [64, 2]


def test_dlpack() -> None:
    """Anything with DLPack is a tensor, without a copy."""
    array = np.ones(4, np.float16)
    assert bound(array, None, 7, 0, "")[0][:2] == [array.ctypes.data, FP16]


@pytest.mark.parametrize(
    ("value", "found"),
    [(2**31, 2**31), (-1, -1), (True, 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**70, 2**63 - 1), (-(2**70), -(2**63))],
)
def test_integers(value: int, found: int) -> None:
    """Integers keep 64 bits; larger ones are still beyond every guard."""
    assert bound(X, None, value, 0, "")[0][4] == found


@pytest.mark.parametrize(
    ("arguments", "named", "error", "words"),
    [
        ((X, BIAS, 7), {"MODE": ""}, TypeError, "argument eps is missing; it takes fp32"),
        ((X, BIAS, 7, 0), {}, TypeError, 'constexpr MODE is missing; it was built for "", "relu"'),
        ((X, BIAS, 7, 0), {"MODE": "gelu"}, ValueError, r'MODE="gelu": it was built for .*its TOML: MODE = \["gelu"\]'),
        ((X, BIAS, 7, 0), {"MODE": "", "ONLY": False}, ValueError, "ONLY=false: it was built for true"),
        ((X, BIAS, 7, 0), {"MODE": "", "TILE": 32}, ValueError, "TILE=32: it was built for 128, 64"),
        ((X, BIAS, 7, 0), {"MODE": "", "num_stages": 3}, ValueError, "num_stages=3: it was built without it"),
        ((X, BIAS, 7, 0), {"MODE": "", "n": 3}, TypeError, "argument n is given twice"),
        ((X, BIAS, 7, 0), {"MODE": "", "m": 3}, TypeError, "f has no argument m; it has: x, bias, n"),
        ((X,) * 9, {}, TypeError, r"f takes 7 arguments \(x, bias, n, eps, MODE, TILE, ONLY\), not 9"),
        ((None, BIAS, 7, 0), {"MODE": ""}, TypeError, r"x is None, it takes \*fp16, \*fp32"),
        ((X.double(), BIAS, 7, 0), {"MODE": ""}, TypeError, r"x is \*fp64, it takes \*fp16, \*fp32"),
        ((X.to(torch.complex64), BIAS, 7, 0), {"MODE": ""}, TypeError, "x is torch.complex64, it takes"),
        ((16, BIAS, 7, 0), {"MODE": ""}, TypeError, r"x takes a tensor \(\*fp16, \*fp32\), found int"),
        ((X, BIAS, 7.0, 0), {"MODE": ""}, TypeError, r"n is a number \(i32\), found float 7.0"),
        ((X, BIAS, 7, "0"), {"MODE": ""}, TypeError, r"eps is a number \(fp32\), found str '0'"),
    ],
)
def test_wrong_arguments(arguments: Any, named: Any, error: type[Exception], words: str) -> None:
    """A wrong call is an error that names the argument, what was found, and what the function takes."""
    with pytest.raises(error, match=words):
        F.bound(arguments, named)


def test_an_op_takes_descriptors_as_tensors() -> None:
    """What it stores through is mutated in the op's schema, as pointers are."""
    types = {"a": "tensordesc<fp16[64,32]>", "c": "tensordesc<fp16[64,32]>", "n": "i32"}
    kernel = dataclasses.replace(
        KERNELS[0],
        arguments=tuple(Argument(name, type_, "") for name, type_ in types.items()),
        quantities=("a", "a.size0", "a.size1", "a.stride0", "a.stride1", "c", "n", "zero", "global_scratch"),
        guards=(),
        options=(),
        writes=("c",),
    )
    launched: Any = None
    op = function_op.register("aotmm_of_tests::described", Signature("described", [kernel]), [kernel], launched)
    assert str(op.default._schema) == (
        "aotmm_of_tests::described(Tensor a, Tensor(a1!) c, SymInt n, *, SymInt[] grid) -> ()"
    )


def test_grids() -> None:
    """A grid is one to three integers, or none, which is the pack's own."""
    assert [blocks_of("f", grid) for grid in (None, 5, (5,), [5, 6], (5, 6, 7))] == [
        None,
        (5, 1, 1),
        (5, 1, 1),
        (5, 6, 1),
        (5, 6, 7),
    ]
    for grid in ((), (1, 2, 3, 4), (1.5,)):
        with pytest.raises(TypeError, match="expected one to three integers, the blocks along x, y and z"):
            blocks_of("f", grid)


class _Launcher:
    """Takes note of launches; the second kernel serves all."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, Any, int, int]] = []

    address = 0

    def choose(self, _function: int, _values: Any, _ordinal: int) -> int:
        return 2

    def run(self, kernel: int, _values: Any, grid: Any, ordinal: int, stream: int) -> None:
        self.launches.append((kernel, grid, ordinal, stream))

    def launch(self, function: int, _values: Any, grid: Any, ordinal: int, stream: int) -> None:
        self.launches.append((function, grid, ordinal, stream))


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> tuple[Function, _Launcher]:
    """The function in a pack behind another function's kernel; CPU tensors count as being on GPU number 0."""
    launcher, other = _Launcher(), dataclasses.replace(KERNELS[0], function="e")
    pack: Any = SimpleNamespace(
        arch="sm90",
        own_launcher=launcher,
        head=SimpleNamespace(functions=("e", "f")),
        manifest=SimpleNamespace(own=(other, *KERNELS)),
    )
    monkeypatch.setattr(functions, "_GPU", "cpu")
    monkeypatch.setattr(function_call, "connected", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: SimpleNamespace(cuda_stream=77 + of))
    return Function("f", (pack,), lambda ordinal: [pack] if ordinal == 0 else []), launcher


def test_launches(launching: tuple[Function, _Launcher]) -> None:
    """A call goes to the tensors' GPU, on torch's stream, in the grid that is said, computed, or the pack's own."""
    function, launcher = launching
    function[(2, 3)](X, BIAS, 7, 0, "")
    function[lambda meta: (meta["n"] * meta["TILE"],)](X, BIAS, 7, 0, "")  # of the kernel that serves: TILE is 64
    function(X, BIAS, 7, 0, "")
    assert launcher.launches == [(1, (2, 3, 1), 0, 77), (2, (448, 1, 1), 0, 77), (1, None, 0, 77)]
    assert repr(function) == "<f(x, bias, n, eps, MODE, TILE, ONLY) of sm90>"


def test_several_devices(launching: tuple[Function, _Launcher]) -> None:
    """Tensors on two devices are refused before anything is launched."""
    function, launcher = launching
    with pytest.raises(ValueError, match="f: an argument is on meta, arguments before it on cpu"):
        function[(2, 3)](X, BIAS.to("meta"), 7, 0, "")
    assert launcher.launches == []


def test_no_gpu() -> None:
    """CPU tensors, and a call without a tensor, say no GPU."""
    function = Function("f", (SimpleNamespace(manifest=SimpleNamespace(own=KERNELS)),), lambda _: [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="f: the arguments say no GPU: they are on cpu"):
        function[(1,)](X, None, 7, 0, "")


def test_library_without_it() -> None:
    """A name that no pack has is an error with those that there are."""
    from aotmm.runtime.library import Library

    library = object.__new__(Library)
    library.packs, library._functions = (SimpleNamespace(head=SimpleNamespace(functions=("f", "e"))),), {}  # type: ignore[assignment]
    with pytest.raises(NoKernelError, match="no pack has a function 'g'; there are: e, f"):
        library["g"]
