"""`aotmm.load` and what `matmul` refuses, on a machine without a GPU."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aotmm
from aotmm.cli.report import doctor_text
from aotmm.errors import AotmmError, ArtifactError, CompileError, DriverError, NoKernelError, PackError, SpecError
from aotmm.pack import table
from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.runtime import direct_call, library
from aotmm.runtime.devices import Device, best_pack
from aotmm.runtime.diagnosis import diagnose
from aotmm.runtime.launcher import Problem
from aotmm.runtime.library import Library
from aotmm.runtime.ops import Ops
from aotmm.runtime.tuning import CDevice
from aotmm.target import TARGETS
from tests.runtime.pretend import run

ROOT = Path(__file__).parents[2]


def test_load_is_the_same_library_each_time(lib: Library) -> None:
    """Loading the same packs again gives the same object, by default path or by name."""
    assert aotmm.load() is lib
    assert aotmm.load(lib.packs[0].folder.parent) is lib
    one = aotmm.load(lib.packs[0].folder)
    assert one is not lib
    assert one.kernels == lib.packs[0].manifest.kernels


def test_load_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    """A folder without packs is an ArtifactError with the command that builds some."""
    with pytest.raises(ArtifactError, match=r"no packs in .*aotmm build"):
        aotmm.load(tmp_path)
    with pytest.raises(ArtifactError, match="is not a folder"):
        aotmm.load(tmp_path / "absent")


def tuned(arch: str, *shapes: ShapeTimes, device: str = "a test") -> bytes:
    """A tuning table that knows nothing but these shapes."""
    facts = 132, 1980, 4916, 60 << 20
    return table.write(
        Table(arch, device, *facts, "none", "none", aotmm.__version__, "2026-11-20", 0, None, (), shapes)
    )


def test_a_table_makes_another_library(lib: Library, tmp_path: Path) -> None:
    """A table goes to the pack of its arch; each has a library of its own, and the same table gives the same one."""
    paths = [tmp_path / name for name in ("one.json", "copy of one.json", "two.json")]
    for path, device in zip(paths, ("a", "a", "b"), strict=True):
        path.write_bytes(tuned("sm90", device=device))
    one, copy, two = (aotmm.load(table=path) for path in paths)
    assert one is copy
    assert len({id(lib), id(one), id(two)}) == 3
    assert aotmm.load(table=str(paths[0])) is one
    assert aotmm.load() is lib
    for library_, wanted in ((lib, None), (one, "a"), (two, "b")):
        tables = {pack.arch: pack.table and pack.table.device for pack in library_.packs}
        assert tables == {"gfx90a": None, "sm80": None, "sm90": wanted}


def test_libraries_go_by_their_own_tables(lib: Library, tmp_path: Path) -> None:
    """What one table says of a shape decides in its library, is called measured there, and changes no other.

    Asked for a config of each family.
    """
    pack = next(pack for pack in lib.packs if pack.arch == "sm90")
    problem = Problem(512, 512, 512, (512, 1), (512, 1), (512, 1), "fp16", "fp16", "fp16", "none", 256, 256, 256)
    device = CDevice(132, 232_448, name=b"a test")
    before = pack.launcher.explain(problem, device)
    fits = [row.kernel for row in before.evaluations if row.rejected is None and row.kernel.role == "product"]
    config_names = sorted({kernel.family: kernel.config_name for kernel in fits}.values())
    assert len(config_names) > 1
    chosen = []
    for config_name in config_names:
        path = tmp_path / f"{config_name}.json"
        times = (Sample(config_name, split=1, pdl=False, copies=0, ns=7),)
        path.write_bytes(tuned("sm90", ShapeTimes(2, "nn", "plain", 512, 512, 512, 0, 0, False, times)))  # noqa: FBT003
        (mine,) = [other for other in aotmm.load(table=path).packs if other.arch == "sm90"]
        chosen.append(mine.launcher.explain(problem, device).chosen)
    assert [row and row.kernel.config_name for row in chosen] == config_names
    assert all(row and row.plan and (row.plan.cost, row.plan.measured) == (7, True) for row in chosen)
    assert pack.launcher.explain(problem, device) == before


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("absent.json", None, r"tuning table .*absent\.json cannot be read: .*; make one: aotmm tune"),
        ("sm90.json", b"{}", r"sm90\.json: tuning table format None"),
        ("sm90.json", tuned("sm90")[:-3], r"sm90\.json: not a tuning table"),
        (
            "sm90.json",
            tuned("sm90"),
            r"sm90\.json is for sm90 \(a test\), the packs in .* are for sm80; build one: aotmm build --arch sm90",
        ),
    ],
)
def test_a_table_that_cannot_be_used(lib: Library, tmp_path: Path, name: str, data: bytes | None, text: str) -> None:
    """A table that is not there, is broken or for another arch is an error that says so and what to do."""
    (folder,) = [pack.folder for pack in lib.packs if pack.arch == "sm80"]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=text):
        aotmm.load(folder, table=tmp_path / name)


def test_load_touches_no_gpu(lib: Library) -> None:
    """Loading initialises nothing of torch's CUDA state and opens no pack's library."""
    assert lib.packs
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("stride", "reason"),
    [
        (50, "K=50, which is stride_am too, is not divisible by 8"),
        (52, "stride_am=52 is not divisible by 8"),
        (56, "K=50 is not divisible by 8"),
    ],
)
def test_explain_blames_what_is_to_blame(lib: Library, stride: int, reason: str) -> None:
    """A stride that is not divisible because a size is not is told by the size; a stride of its own by itself."""
    problem = Problem(512, 512, 50, (stride, 1), (512, 1), (512, 1), "fp16", "fp16", "fp16", "none", 256, 256, 256)
    batch = dataclasses.replace(problem, batch=2, batch_strides=(1 << 20,) * 3)  # whose operands are not copied
    launcher = lib.packs[1].launcher
    wanted = ("product", "fp16", "nn", 16)
    number = next(n for n, k in enumerate(launcher.kernels) if (k.role, k.dtype_a, k.layout, k.vector_bytes) == wanted)
    verdict = launcher.check(batch, CDevice(108, 166_912), number)
    assert verdict.rejected == reason


def test_copies_are_the_library_itself(lib: Library, tmp_path: Path) -> None:
    """A library is copied as itself, and unpickled as `load` gives it for its path and table, the file gone too."""
    path = tmp_path / "sm90.json"
    path.write_bytes(tuned("sm90", device="for copies"))
    for library_ in (lib, aotmm.load(lib.packs[0].folder), aotmm.load(table=path)):
        assert copy.deepcopy(library_) is copy.copy(library_) is library_
        assert copy.deepcopy({"model": [library_]})["model"][0] is library_
        assert pickle.loads(pickle.dumps(library_)) is library_  # noqa: S301 - our own bytes
    held = pickle.dumps(aotmm.load(table=path))
    path.unlink()
    found = in_another_process(held, "[pack.table and pack.table.device for pack in held.packs]")
    assert found == [None, None, "for copies"]


def test_what_users_hold_is_pickled(lib: Library) -> None:
    """Kernels, problems, plans and what selection says of them are equal in another process, and packs open there."""
    pack = lib.packs[1]
    problem = Problem(512, 512, 512, (512, 1), (512, 1), (512, 1), "fp16", "fp16", "fp16", "none", 256, 256, 256)
    selection = pack.launcher.explain(problem, CDevice(108, 166_912))
    values = [pack.manifest.kernels[0], problem, selection.chosen and selection.chosen.plan, selection]
    for value in values:
        assert copy.deepcopy(value) == value
        assert in_another_process(pickle.dumps(value), "held") == value
    other = in_another_process(pickle.dumps(pack), "held")
    assert (other.folder, other.head, other.owner, repr(other)) == (pack.folder, pack.head, "", repr(pack))
    assert other.manifest.kernels == pack.manifest.kernels
    assert copy.deepcopy(pack).launcher.kernels == pack.launcher.kernels


@pytest.mark.parametrize(
    "error",
    [
        NoKernelError("no kernel", ("one: K=50 is odd",)),
        DriverError("failed", call="cuInit", code=3, device=1),
        ArtifactError("altered"),
        SpecError("unknown"),
        CompileError("refused"),
        PackError("full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes(error: AotmmError) -> None:
    """An error has its type, text and fields in another process, as a pool of processes hands it on."""
    for other in (copy.deepcopy(error), in_another_process(pickle.dumps(error), "held")):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def in_another_process(held: bytes, expression: str) -> Any:
    """What `expression` is of the unpickled object `held` in a process of its own."""
    program = (
        f"import pickle, sys; held = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(pickle.dumps({expression}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=held,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    return pickle.loads(done.stdout)  # noqa: S301 - our own bytes


def test_repr(lib: Library) -> None:
    """A library says what it has, and where from if that was named."""
    assert repr(lib) == "<aotmm.Library of gfx90a, sm80, sm90>"
    folder = lib.packs[1].folder
    assert repr(aotmm.load(folder)) == f"<aotmm.Library of sm80 in {folder}>"
    assert repr(lib.packs[1]) == f"<sm80 pack in {folder}>"


def test_doctor_tells_of_the_direct_call(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """`aotmm doctor` says whether this Python and torch carry it."""
    assert ("plain tensors go past torch's dispatcher" in doctor_text(diagnose(None))) is lib.has_direct_call
    monkeypatch.setattr(lib, "_direct_call", direct_call.DECLINED.matmul)
    assert "plain tensors go through torch's dispatcher, as this Python" in doctor_text(diagnose(None))


def test_native_library_of_another_version() -> None:
    """A native library that is older than the Python beside it is refused, before anything of it is called."""
    with pytest.raises(ArtifactError, match=r"libaotmm_torch\.so is of another version; .*`make artifacts`"):
        Ops(ctypes.CDLL(None), lambda _library, _device: [])


X = torch.zeros(4, 8, dtype=torch.float16)
ON_CPU = r"CUDA and ROCm tensors, so move these to a GPU \(tensor\.cuda\(\)\): a is \(4, 8\)"


@pytest.mark.parametrize(
    ("error", "text", "arguments", "options"),
    [
        (TypeError, ON_CPU + r" float16 on cpu, b is \(8, 4\)", (X, X.T), {}),
        (TypeError, r"out is \(4, 4\) float16 on cpu", (X, X.T), {"out": torch.zeros(4, 4, dtype=torch.float16)}),
        (TypeError, "takes tensors, found Tensor and list", (X, [1.0]), {}),
        (TypeError, "takes tensors, found NoneType and Tensor", (None, X), {}),
        (TypeError, r"unknown out_dtype torch\.int16; known: .*torch\.float32", (X, X.T), {"out_dtype": torch.int16}),
        (TypeError, "out has its own dtype", (X, X.T), {"out": X, "out_dtype": torch.float16}),
        (
            ValueError,
            "unknown activation 'swish'; known: None, 'relu', 'leaky_relu'",
            (X, X.T),
            {"activation": "swish"},
        ),
        (ValueError, "unknown activation 'none'; known: None, 'relu'", (X, X.T), {"activation": "none"}),
        (ValueError, r"unknown activation \('relu', 0\.1\)", (X, X.T), {"activation": ("relu", 0.1)}),
        (ValueError, r"unknown activation \('leaky_relu',\)", (X, X.T), {"activation": ("leaky_relu",)}),
        (ValueError, r"""known: .*, 'tanh', \("leaky_relu", slope\)""", (X, X.T), {"activation": 3}),
        (TypeError, ON_CPU + " float32", (X.float().requires_grad_(), X.T.float()), {}),
        (TypeError, "bias must be a tensor, found list", (X, X.T), {"bias": [0.0] * 4}),
        (TypeError, "out must be a tensor, found list", (X, X.T), {"out": [0.0] * 4}),
    ],
)
def test_wrong_arguments(
    lib: Library, error: type[Exception], text: str, arguments: tuple[Any, Any], options: dict[str, Any]
) -> None:
    """What cannot be multiplied is refused with the type of error, shapes, dtypes and devices that a user needs."""
    with pytest.raises(error, match=text):
        lib.matmul(*arguments, **options)


def test_explained_is_what_matmul_launches() -> None:
    """`problem` is what `matmul` launches first, or its error with the same words; it launches and writes nothing."""
    run(
        """
from dataclasses import replace
import contextlib
def outcome(call, *arguments, **options):
    try: return call(*arguments, **options)
    except Exception as error: return f"{type(error).__name__}: {error}"
def launched(*arguments, **options):
    gpu.first, runs = None, gpu.runs
    versions = [x._version for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
    found = outcome(lib.problem, *arguments, **options)
    assert gpu.runs == runs, "nothing was launched"
    assert versions == [x._version for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
    result = outcome(lib.matmul, *arguments, **options)
    if isinstance(result, str):
        assert found == result, (found, result)
        return result
    if gpu.first is None: return found
    if "out" not in options: gpu.first, found = (replace(each, c_ptr=0) for each in (gpu.first, found))
    assert found == gpu.first, (found, gpu.first)
    return found.batch, found.M, found.N, found.K
a, b, bias = torch.randn(4, 8).half(), torch.randn(8, 6).half(), torch.randn(6).half()
out = torch.empty(6, 4).half().T
assert launched(a, b) == launched(a, b, out=out) == launched(a.float(), b.float()) == (1, 4, 6, 8)
assert launched(a, b, bias=bias, activation="relu") == launched(a, b, out_dtype=torch.float32) == (1, 4, 6, 8)
for mode in (contextlib.nullcontext(), torch.no_grad()):
    with mode: assert launched(a, b.clone().requires_grad_(), bias=bias, activation="relu") == (1, 4, 6, 8)
assert launched(a.expand(3, 4, 8), b) == (3, 4, 6, 8)
assert launched(torch.randn(3, 4, 8).half(), b) == launched(torch.randn(3, 2, 2, 8).half(), b) == (1, 12, 6, 8)
x, y = torch.randn(2, 3, 4, 8).half(), torch.randn(3, 2, 8, 6).half().transpose(0, 1)
assert launched(x, y) == (3, 4, 6, 8), "the first of two"
assert launched(a[0], b[:, 0]) == (1, 1, 1, 8)
assert launched(a[:0], b) == "ValueError: nothing is launched: the result of shape (0, 6) is empty"
assert launched(a.to("meta"), b.to("meta")) == "ValueError: nothing is launched: the result of shape (4, 6) is on meta"
for options, words in (
    ({"out": torch.empty(4, 5).half()}, "ValueError: out has the wrong shape"),
    ({"out": torch.empty(4, 6).short()}, "TypeError: aotmm has no kernels for this dtype"),
    ({"out": [0.0] * 4}, "TypeError: out must be a tensor, found list"),
    ({"out": out, "out_dtype": torch.float16}, "TypeError: out_dtype is for a new result"),
    ({"out": a.new_empty(4, 6).requires_grad_()}, "NotImplementedError: a product with out= has no gradient"),
    ({"bias": bias[:5]}, "ValueError: bias must broadcast"),
    ({"activation": "swish"}, "ValueError: unknown activation 'swish'"),
    ({"scale_a": bias}, "TypeError: scales must be float32"),
):
    assert launched(a, b, **options).startswith(words), words
assert launched(a, a).startswith("ValueError: the inner sizes differ")
assert launched(a, [1.0]).startswith("TypeError: matmul takes tensors, found Tensor and list")
"""
    )


def test_op_refuses_too(lib: Library) -> None:
    """The torch op itself raises torch's error for the same reason."""
    assert lib.packs
    with pytest.raises(RuntimeError, match="CUDA and ROCm tensors"):
        torch.ops.aotmm.mm(X, X.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fake_kernel_tells_shape_and_dtype(lib: Library, dtype: torch.dtype) -> None:
    """On meta tensors the op answers with the shape, dtype and strides that the real one has."""
    assert lib.packs
    a, b = torch.empty(3, 5, dtype=dtype, device="meta"), torch.empty(7, 5, dtype=dtype, device="meta").T
    c = torch.ops.aotmm.mm(a, b)
    assert (c.shape, c.dtype, c.stride()) == ((3, 7), dtype, (7, 1))
    assert torch.ops.aotmm.mm(a, b, out_dtype=2).dtype is torch.float32


@pytest.mark.parametrize(
    ("arch", "pack", "way"),
    [
        ("sm80", "sm80", "exact"),
        ("sm86", "sm80", "compatible"),
        ("sm89", "sm80", "compatible"),
        ("sm90", "sm90", "exact"),
        ("sm100", "sm80", "ptx"),
        ("sm120", "sm80", "ptx"),
        ("gfx90a", "gfx90a", "exact"),
    ],
)
def test_pack_for_each_gpu(lib: Library, arch: str, pack: str, way: str) -> None:
    """Each GPU gets the pack of its own arch, else compatible binaries, else text for the driver to compile."""
    found = best_pack(lib.packs, arch)
    assert found is not None
    assert (found[0].arch, found[1]) == (pack, way)


@pytest.mark.parametrize(
    ("arch", "packs", "advice"),
    [
        ("sm75", slice(0, 3), f"no kernel can be built for sm75; aotmm builds for: {', '.join(TARGETS)}"),
        ("gfx908", slice(0, 3), "no kernel can be built for gfx908"),
        ("sm89", slice(0, 1), "aotmm build --arch sm89 --out"),
        ("sm90", slice(0, 1), "aotmm build --arch sm90 --out"),
    ],
)
def test_gpu_without_a_pack(
    lib: Library, arch: str, packs: slice, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that no pack serves is an error that names it, the packs and the command to run."""
    monkeypatch.setattr(library, "device", lambda ordinal: Device(ordinal, "Some GPU", arch))
    monkeypatch.setattr(lib, "packs", lib.packs[packs])
    with pytest.raises(NoKernelError, match=rf"cuda:3, Some GPU \({arch}\); found: gfx90a .*{advice}"):
        lib.launcher(3)


def test_preload_of_every_pack(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preloading is for each pack that is asked for kernels, on the current device or the one that is named."""
    loaded: list[tuple[str, int]] = []
    monkeypatch.setattr(lib, "packs", lib.packs[1:] * 2)
    monkeypatch.setattr(library, "device", lambda ordinal: Device(ordinal, "Some GPU", "sm90"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for pack in lib.packs[:2]:
        monkeypatch.setattr(pack.launcher, "preload", lambda ordinal, arch=pack.arch: loaded.append((arch, ordinal)))
    lib.preload()
    lib.preload(5)
    assert loaded == [("sm90", 2)] * 2 + [("sm90", 5)] * 2


def test_preload_without_a_gpu(lib: Library) -> None:
    """Preloading where torch sees no GPU says so."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(NoKernelError, match="sees no GPU to load kernels for"):
        lib.preload()
