"""Block scales of fp8 on the GPU: each kernel that takes them, every layout of scales, against float64 and torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotmm.kernels import BLOCK_SCALED
from aotmm.runtime.library import Library
from aotmm.timing.check import OUTPUT_NAMES
from aotmm.timing.correctness import (
    U_FP8,
    Epilogue,
    allowed,
    block_scaled,
    block_scaled_error,
    sizes,
    sum_errors,
)
from tests.gpu.judge import lay_out

E4 = torch.float8_e4m3fn
SIZES = [(1, 128, 128), (3, 256, 7168), (33, 100, 304), (65, 2112, 2048), (130, 388, 1040), (257, 1536, 1664)]
SCALES = ("rows", "columns", "padded")


def needs_e4m3(lib: Library) -> None:
    """Skips where no kernel with block scales multiplies e4m3."""
    kernels = [kernel for pack in lib.packs_for(0) for kernel in pack.manifest.kernels]
    if not any(BLOCK_SCALED in kernel.guards and kernel.dtype_a == "fp8e4" for kernel in kernels):
        pytest.skip("no kernel with block scales for e4m3 here")


def made(
    sizes_: tuple[int, int, int], layout: str, columns: int, *, exact: bool, generator: torch.Generator
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Operands and scales of a product, and the float64 operands times their scales.

    Rows or columns of the scales are contiguous, or as DeepGEMM pads them; NaN lies around all of them.
    """
    M, N, K = sizes_
    blocks, wide = -(-K // 128), -(-N // columns)

    def draw(rows: int, cols: int) -> torch.Tensor:
        shape = (rows, cols)
        if exact:
            return torch.randint(-3, 4, shape, generator=generator, device="cuda").double()
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)

    def scale(rows: int, cols: int) -> torch.Tensor:
        whole = torch.pow(2.0, torch.randint(-2, 3, (rows, cols), generator=generator, device="cuda")).double()
        found = whole if exact else torch.rand(rows, cols, generator=generator, device="cuda").double() + 0.5
        lines = cols if layout == "rows" else rows
        pad = -lines % 4 if layout == "padded" else 3
        return lay_out(found.float(), torch.float32, "n" if layout == "rows" else "t", pad=pad)

    a = lay_out(draw(M, K), E4, "n", pad=-K % 16)
    b = lay_out(draw(K, N), E4, "t", pad=-K % 16)
    scale_a, scale_b = scale(M, blocks), scale(blocks, wide)
    x, y = block_scaled(a.double(), b.double(), scale_a.double(), scale_b.double())
    return {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}, x, y


def check(c: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, exact: bool) -> None:
    """Integers and powers of two are exact; else the error is within the bounds."""
    want = x @ y
    if exact:
        assert torch.equal(c, want.to(c.dtype))
        return
    spread, deviation = sizes(x, y)
    for error in sum_errors(x.shape[1], spread, deviation, U_FP8):
        bound = allowed(want, want, block_scaled_error(error, spread), Epilogue(), OUTPUT_NAMES[c.dtype])
        assert ((c.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("columns", [128, 1])
@pytest.mark.parametrize("layout", SCALES)
def test_products(lib: Library, layout: str, columns: int, generator: torch.Generator) -> None:
    """Selected products with results of every type are right, and nothing beside them is written."""
    needs_e4m3(lib)
    for sizes_ in SIZES:
        for exact in (True, False):
            operands, x, y = made(sizes_, layout, columns, exact=exact, generator=generator)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                M, N, _ = sizes_
                memory = torch.full((M + 2, N + 8), float("nan"), device="cuda", dtype=dtype)
                lib.matmul(**operands, out=memory[1:-1, :N])
                check(memory[1:-1, :N], x, y, exact=exact)
                assert memory[[0, -1]].isnan().all()
                assert memory[:, N:].isnan().all()


@pytest.mark.parametrize("columns", [128, 1])
def test_every_kernel(lib: Library, columns: int, generator: torch.Generator) -> None:
    """Each kernel that takes these block scales computes the same exact products, by its best plan."""
    needs_e4m3(lib)
    launcher, stream, tried = lib.launcher(0), torch.cuda.current_stream().cuda_stream, set()
    for sizes_ in SIZES:
        operands, x, y = made(sizes_, "columns", columns, exact=True, generator=generator)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            out = torch.empty(*sizes_[:2], device="cuda", dtype=dtype)
            problem = lib.problem(**operands, out=out)
            for number, kernel in enumerate(launcher.kernels):
                plan = launcher.check(problem, launcher.device(0), number).plan
                if plan is None:
                    continue
                out.fill_(float("nan"))
                memory = torch.empty(plan.workspace_bytes + 256, device="cuda", dtype=torch.uint8)
                launcher.run(plan, problem, 0, stream, memory.data_ptr() if plan.workspace_bytes else 0)
                check(out, x, y, exact=True)
                tried.add(kernel.name)
    wanted = {
        kernel.name
        for kernel in launcher.kernels
        if BLOCK_SCALED in kernel.guards
        and kernel.role in ("product", "partial")
        and kernel.dtype_a == "fp8e4"
        and (columns == 128 or "128x128" not in kernel.name)
    }
    assert tried >= wanted != set()  # where K is one block, its scales are also those of rows


def test_rows_have_the_same_bits_in_every_batch(lib: Library, generator: torch.Generator) -> None:
    """Under batch_invariant the first rows alone have the bits that they have among 300."""
    needs_e4m3(lib)
    for columns in (128, 1):
        operands, _, _ = made((300, 2112, 7168), "columns", columns, exact=False, generator=generator)
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "batch_invariant": True}
        whole = lib.matmul(**operands, **options)
        for M in (1, 2, 16, 17, 33, 64, 65, 100, 128, 200, 299):
            part = operands | {name: operands[name][:M] for name in ("a", "scale_a")}
            assert torch.equal(lib.matmul(**part, **options), whole[:M])


def test_torchs_scaled_mm(lib: Library, generator: torch.Generator) -> None:
    """torch's own product of the same scales, in its layouts, differs by no more than two bounds."""
    needs_e4m3(lib)
    kinds = torch.nn.functional.ScalingType
    M, N, K = 256, 512, 1024
    for columns in (128, 1):
        operands, x, y = made((M, N, K), "columns", columns, exact=False, generator=generator)
        scale_a, scale_b = operands["scale_a"].t().contiguous().t(), operands["scale_b"]
        scale_b = scale_b.contiguous().t() if columns == 1 else scale_b.t().contiguous().t()
        kind = kinds.BlockWise1x128 if columns == 1 else kinds.BlockWise128x128
        try:
            torchs = torch.nn.functional.scaled_mm(
                operands["a"], operands["b"], scale_a, kinds.BlockWise1x128, scale_b, kind
            )
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"torch {torch.__version__} does not take it here: {error}")
        check(torchs, x, y, exact=False)
        check(lib.matmul(**operands, out_dtype=torch.bfloat16), x, y, exact=False)
