"""torch.compile, AOTInductor and max-autotune on this GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aotmm
import aotmm.nn
from aotmm.runtime.library import Library
from aotmm.timing.correctness import Epilogue
from tests.gpu.judge import judge
from tests.gpu.judge import random as normal

pytest.importorskip("triton", reason="Inductor needs Triton for what is not a product")
LIMIT_S = 600  # of a test, because Inductor compiles
# What torch itself warns of while it compiles, of its own and Triton's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Layers(torch.nn.Module):
    """Two products with fused epilogues, one by `lib.matmul` and one by a module, and a residual."""

    def __init__(self, lib: Library, activation: str | None) -> None:
        super().__init__()
        self.lib = lib
        self.activation = activation
        self.first = torch.nn.Parameter(torch.randn(96, 64, device="cuda", dtype=torch.float16) / 8)
        self.bias = torch.nn.Parameter(torch.randn(96, device="cuda", dtype=torch.float16))
        self.second = aotmm.nn.Linear(96, 64, device="cuda", dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 64) to (..., 64)."""
        y = self.lib.matmul(x, self.first.T, bias=self.bias, activation=self.activation)
        out: torch.Tensor = x + self.second(y)
        return out


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(lib: Library, activation: str | None, mode: str, *, dynamic: bool) -> None:
    """Without a graph break, results and gradients are those of eager mode, up to what fusing rounds less often."""
    torch.manual_seed(1)
    model = Layers(lib, activation)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, mode=mode)
    for rows in (8, 40, 7):
        x = torch.randn(3, rows, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        found = []
        for _ in range(3):  # graphs are captured at the second call
            y = compiled(x)
            found = [y.clone(), *(g.clone() for g in torch.autograd.grad(y.sum(), [x, *model.parameters()]))]
        y = model(x)
        for got, want in zip(found, [y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-3 * float(want.abs().max()))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_numerics(lib: Library, generator: torch.Generator, name: str, layout: str) -> None:
    """A compiled product keeps the bounds of an eager one, and its operands their strides."""
    m, n, k = 130, 200, 300
    a, b = normal(m, k, name, generator=generator), normal(k, n, name, generator=generator)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
    x, w = a.to(dtype), b.to(dtype)
    x = x if layout == "nn" else x.T.contiguous().T
    c = torch.compile(lambda x, w: lib.matmul(x * 1, w), fullgraph=True)(x, w)
    found = judge(c, a, b, name, Epilogue(), exact=False)
    assert max(found.det, found.prob) <= 1
    assert torch.equal(c, lib.matmul(x, w)) or layout == "tn"


AOT_INDUCTOR = """
import torch
import aotmm
from tests.gpu.test_compile import Layers

model = Layers(aotmm.load(), "relu").eval()
x = torch.randn(12, 64, device="cuda", dtype=torch.float16)
with torch.no_grad():
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=4096)},))
    package = torch._inductor.aoti_compile_and_package(program, package_path="model.pt2")
    loaded = torch._inductor.aoti_load_package(package)
    for count in (12, 33):
        x = torch.randn(count, 64, device="cuda", dtype=torch.float16)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-2, atol=1e-2)
print("equal")
"""


def test_aot_inductor(tmp_path: Path) -> None:
    """A model that calls `lib.matmul` becomes a package, which computes what the model does.

    A process of its own, in which the C++ library comes first: with that of Ubuntu 24.04, torch 2.11 crashes in its
    own code when it loads any package, one layer of torch's without ours too.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("Inductor needs g++ for what it packages")
    first = subprocess.run([compiler, "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True)
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    environment["LD_PRELOAD"] = first.stdout.strip()
    words = [sys.executable, "-W", "ignore", "-c", AOT_INDUCTOR]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()[-5:]) == (0, "equal"), done.stderr


def test_max_autotune(generator: torch.Generator) -> None:
    """Within `aotmm.max_autotune()` Inductor's product can be ours; outside, and before, it is not."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    a, b = (normal(256, 256, "fp16", generator=generator).half() for _ in range(2))

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b) + 1

    def compiled() -> tuple[torch.Tensor, str]:
        torch._dynamo.reset()
        found, codes = run_and_get_code(torch.compile(product, mode="max-autotune-no-cudagraphs"), a, b)
        return found, "".join(codes)

    want = a.double() @ b.double() + 1
    with aotmm.max_autotune():
        timed, _ = compiled()
        with config.patch(max_autotune_gemm_backends="", force_disable_caches=True):  # no other choice
            forced, code = compiled()
    assert "extern_kernels.aotmm_mm" in code
    for found in (timed, forced):
        assert float((found.double() - want).abs().max()) < 2.0**-9 * float(want.abs().max())
    _, code = compiled()
    assert "aotmm" not in code
