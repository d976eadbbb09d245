"""A GPU that is not there: CPU tensors count as GPU tensors, a launcher of NumPy's multiplies them, all else is real.

Everything between a call and the driver runs as on a GPU: the direct call, torch's dispatcher and allocator, the ops,
the overrides. What pretends is torch's answers to a few questions about devices. `run` is for a process of its own,
because ops are registered once.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
FUNCTIONS = CHECKOUT / "build" / "own"


class Gpu:
    """What the stand-in was asked for, and how it is to answer.

    Attributes:
        runs: products that were launched.
        sizes: (batch, M, N, K) of the last one.
        first: the first of them since this was None.
        workspace: bytes that its plans need.
        refuse: "" or the status to answer with, "kernel" or "driver"; "batch": no kernel of the order takes a batch;
            "memory": none does without a workspace, for which there is no memory.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.sizes = (0, 0, 0, 0)
        self.first: Any = None
        self.workspace = 0
        self.refuse = ""


def run(body: str, *arguments: str, absent: tuple[bytes, ...] = ()) -> str:
    """What `body` prints, which has `gpu` and `lib`, in a process of its own.

    Args:
        absent: C functions that torch is not to have.

    Raises:
        AssertionError: it fails.
    """
    return _in_process(f"gpu, lib = pretend.begin({absent!r})\n{body}", *arguments)


def run_functions(body: str, before: str = "") -> str:
    """What `body` prints, which has the fake `driver` and `lib` with the functions of examples/own, likewise.

    Args:
        before: is run before aotmm is imported.
    """
    return _in_process(f"driver, lib = pretend.begin_functions()\n{body}", before=before)


def _in_process(body: str, *arguments: str, before: str = "") -> str:
    program = f"{before}\nfrom tests.runtime import pretend\nimport torch, aotmm\n{body}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def begin(absent: tuple[bytes, ...] = ()) -> tuple[Gpu, Any]:
    """Pretends from now on, of a torch without some functions; the GPU and the library whose products it computes."""
    import torch

    import aotmm
    from aotmm.runtime import library, ops, override

    gpu = Gpu()
    keep, addresses = _torch_answers()
    own = ops._address
    ops.find = ops._Find(lambda name: None if name in absent else addresses.get(name) or own(name))
    ops.serves_gpus = lambda: True
    override._KEY = "CPU"
    launcher = _launcher(gpu)
    library._resolve = lambda number, ordinal: [ctypes.addressof(launcher)]  # noqa: ARG005 - named as they are there
    lib = aotmm.load()
    lib.packs_for = lambda _ordinal: lib.packs[:1]  # type: ignore[assignment]
    gpu.keep = (keep, launcher)  # type: ignore[attr-defined]
    assert torch.ops.aotmm.mm
    return gpu, lib


def begin_functions(folder: Path = FUNCTIONS, arch: str = "sm80", *, execute: bool = False) -> tuple[Any, Any]:
    """Pretends from now on that CPU tensors are on a GPU of that arch; its driver, and the library in `folder`."""
    import aotmm
    from aotmm.runtime import function_call, functions, library, ops
    from aotmm.runtime.devices import Device
    from tests.emulators.fake_driver import FakeDriver

    driver: Any = FakeDriver("cuda", arch=arch, execute=execute)
    driver.keep, addresses = _torch_answers()
    own = ops._address
    ops.find = ops._Find(lambda name: addresses.get(name) or own(name))
    ops.serves_gpus = lambda: True
    functions._GPU = "cpu"
    function_call.current_stream = lambda ordinal: 0  # noqa: ARG005 - named as it is there
    vars(library)["device"] = lambda ordinal: Device(ordinal, "a GPU that is not there", arch)
    return driver, aotmm.load(folder)


def _torch_answers() -> tuple[list[Any], dict[bytes, int]]:
    from aotmm.runtime import ops

    def zero(_handle: int, answer: Any) -> int:
        answer[0] = 0
        return 0

    def stream(_device: int, answer: Any) -> int:
        answer[0] = None
        return 0

    index = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))(zero)
    current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(stream)
    torch_cpu: Any = ops.torch_library("torch_cpu")
    answers = {
        b"aoti_torch_device_type_cuda": torch_cpu.aoti_torch_device_type_cpu,
        b"aoti_torch_get_device_index": index,
        b"aoti_torch_get_current_cuda_stream": current,
        b"aoti_torch_cuda_mm_out": torch_cpu.aoti_torch_cpu_mm_out,
        b"aoti_torch_cuda_bmm_out": torch_cpu.aoti_torch_cpu_bmm_out,
        b"aoti_torch_cuda__int_mm_out": torch_cpu.aoti_torch_cpu__int_mm_out,
        b"aoti_torch_cuda_addmm_out": torch_cpu.aoti_torch_cpu_addmm_out,
        b"aoti_torch_cuda_baddbmm_out": torch_cpu.aoti_torch_cpu_baddbmm_out,
    }
    return [*answers.values()], {
        name: ctypes.cast(answer, ctypes.c_void_p).value or 0 for name, answer in answers.items()
    }


def _types() -> dict[int, Any]:
    """NumPy's types by those that the launcher multiplies; fp8 and bf16 are bits to it."""
    import numpy as np

    from aotmm.problem import DTYPE_CODES

    names = {"fp16": np.float16, "fp32": np.float32, "int8": np.int8, "int32": np.int32}
    names |= {"fp8e4": np.uint8, "fp8e5": np.uint8, "bf16": np.int16}
    return {DTYPE_CODES.index(name): dtype for name, dtype in names.items()}


def _array(address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    import numpy as np

    type_ = np.dtype(_types()[dtype])
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    memory: Any = (ctypes.c_char * (extent * type_.itemsize)).from_address(address)
    flat = np.frombuffer(memory, type_)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * type_.itemsize for stride in strides], writeable=True)


def _numbers(address: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """The values of such an array in float64."""
    import torch

    from aotmm.problem import DTYPE_CODES

    found = _array(address, dtype, shape, strides)
    named = {"fp8e4": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}
    of_bits = named.get(DTYPE_CODES[dtype])
    return torch.from_numpy(found.copy()).view(of_bits).double().numpy() if of_bits else found.astype(float)


def _product(p: Any) -> Any:
    """a @ b with scales and bias in float64."""
    from aotmm.problem import BLOCK_SCALE_K, DTYPE_CODES
    from aotmm.timing.correctness import block_scaled

    fp32 = DTYPE_CODES.index("fp32")
    a = _numbers(p.a_ptr, p.dtype_a, (p.batch, p.M, p.K), (p.stride_az, p.stride_am, p.stride_ak))
    b = _numbers(p.b_ptr, p.dtype_b, (p.batch, p.K, p.N), (p.stride_bz, p.stride_bk, p.stride_bn))
    if p.block_scale_a_ptr:
        blocks, cols = -(-p.K // BLOCK_SCALE_K), -(-p.N // p.block_columns)
        strides_a = p.stride_block_az, p.stride_block_am, p.stride_block_ak
        strides_b = p.stride_block_bz, p.stride_block_bk, p.stride_block_bn
        scale_a = _numbers(p.block_scale_a_ptr, fp32, (p.batch, p.M, blocks), strides_a)
        a, b = block_scaled(a, b, scale_a, _numbers(p.block_scale_b_ptr, fp32, (p.batch, blocks, cols), strides_b))
    c = a @ b
    if p.scale_a_ptr:
        c *= _numbers(p.scale_a_ptr, fp32, (p.M, 1), (p.stride_scale_a, 0))
    if p.scale_b_ptr:
        c *= _numbers(p.scale_b_ptr, fp32, (1, p.N), (0, p.stride_scale_b))
    if p.bias_ptr:
        strides = (p.stride_bias_z, p.stride_bias_m, p.stride_bias_n)
        c += _numbers(p.bias_ptr, p.dtype_c, (p.batch, p.M, p.N), strides)
    return c


def _multiply(p: Any) -> None:
    """Compute a problem, its bias and relu."""
    import numpy as np
    import torch

    from aotmm.problem import DTYPE_CODES

    c = _product(p)
    c = np.maximum(c, 0) if p.activation else c
    out = _array(p.c_ptr, p.dtype_c, (p.batch, p.M, p.N), (p.stride_cz, p.stride_cm, p.stride_cn))
    bits = p.dtype_c == DTYPE_CODES.index("bf16")
    out[...] = torch.from_numpy(c).bfloat16().view(torch.int16).numpy() if bits else c


def _multiply_groups(p: Any) -> None:
    """Compute a grouped problem as the products of its groups, each as a problem of its own."""
    import copy

    from aotmm.problem import DTYPE_CODES, DTYPES, GROUPED

    ends = _array(p.offsets_ptr, DTYPE_CODES.index("int32"), (p.batch,), (1,)).tolist()
    of_rows = p.grouped == list(GROUPED).index("M")
    size = [DTYPES[DTYPE_CODES[code]].bytes for code in (p.dtype_a, p.dtype_b, p.dtype_c)]
    spans = zip([0, *ends], ends, strict=False)
    if p.group_rows:
        begins = range(0, p.M, p.group_rows)
        spans = zip(begins, (i + min(rows, p.group_rows) for i, rows in zip(begins, ends, strict=True)), strict=True)
    for group, (begin, end) in enumerate(spans):
        part = copy.copy(p)
        part.batch, part.grouped = 1, 0
        if of_rows:
            part.M = end - begin
            part.a_ptr += begin * p.stride_am * size[0]
            part.b_ptr += group * p.stride_bz * size[1]
            part.c_ptr += begin * p.stride_cm * size[2]
            if p.scale_a_ptr:
                part.scale_a_ptr += begin * p.stride_scale_a * 4
            if p.scale_b_ptr:
                part.scale_b_ptr += group * p.stride_scale_bz * 4
            if p.block_scale_a_ptr:
                first = begin - group * p.group_rows if p.group_rows else begin
                part.block_scale_a_ptr += (group * p.stride_block_az + first * p.stride_block_am) * 4
                part.block_scale_b_ptr += group * p.stride_block_bz * 4
        else:
            part.K = end - begin
            part.a_ptr += begin * p.stride_ak * size[0]
            part.b_ptr += begin * p.stride_bk * size[1]
            part.c_ptr += group * p.stride_cz * size[2]
        if p.bias_ptr:
            part.bias_ptr += group * p.stride_bias_z * size[2]
        _multiply(part)


def _launcher(gpu: Gpu) -> ctypes.Structure:
    """A launcher of products with scales, bias and relu, of fp16, fp32, int8 and fp8."""
    from aotmm.problem import ABI
    from aotmm.runtime import c_interface as c
    from aotmm.runtime import launcher as real

    types, error = _types(), c.CError()

    def refused(status: int, text: bytes) -> int:
        error.status, error.text = status, text
        return status

    def plan(problem: Any, _ordinal: int, limit: int, answer: Any) -> int:
        p = problem.contents
        if gpu.refuse == "kernel" or p.dtype_a not in types:
            return refused(c.NO_KERNEL, b"no kernel fits")
        if gpu.refuse == "batch" and p.batch > 1:
            return refused(c.NO_ORDER, b"no kernel of that order fits")
        if gpu.refuse == "memory" and p.batch > 1:
            answer[0] = real.CPlan(workspace_bytes=2**60)
            return c.OK if limit else refused(c.NO_ORDER, b"no kernel of that order fits without a workspace")
        answer[0] = real.CPlan(workspace_bytes=min(gpu.workspace, limit))
        return c.OK

    def run(_plan: Any, problem: Any, _ordinal: int, _stream: int, workspace: int) -> int:
        if gpu.refuse == "driver" or bool(workspace) != bool(gpu.workspace):
            return refused(c.DRIVER, b"the launch failed")
        p = problem.contents
        (_multiply_groups if p.grouped else _multiply)(p)
        gpu.runs += 1
        gpu.sizes = (p.batch, p.M, p.N, p.K)
        gpu.first = gpu.first or real.Problem.from_c(p)
        return c.OK

    fields: dict[str, Any] = {field[0]: field[1] for field in real._CLauncher._fields_}
    made = real._CLauncher(abi=ABI, problem_bytes=ctypes.sizeof(real.CProblem))
    made.plan, made.run = fields["plan"](plan), fields["run"](run)
    last = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(error))
    made.last_error = ctypes.cast(last, fields["last_error"])
    return made
