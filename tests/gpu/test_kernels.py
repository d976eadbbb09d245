"""Every kernel of the packs that run on this GPU, launched one by one and judged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from aotmm.kernels import BLOCK_SCALED
from aotmm.pack.files import data_folder
from aotmm.pack.schema import Kernel
from aotmm.problem import ACTIVATIONS, DTYPES, EPILOGUES, GROUPS, LAYOUTS
from aotmm.runtime.devices import device
from aotmm.runtime.launcher import COPY_A, COPY_B, COPY_C, Plan, Problem
from aotmm.runtime.pack import Pack, open_packs
from aotmm.target import ways_to_run
from aotmm.timing.correctness import Epilogue
from aotmm.timing.operands import torch_dtype
from tests.gpu.judge import Judgement, integers, judge, lay_out, random

# Folders of packs to go through; AOTMM_TEST_PACKS adds some to those of the checkout.
FOLDERS = [data_folder("artifacts"), *map(Path, filter(None, os.environ.get("AOTMM_TEST_PACKS", "").split(":")))]
LIMIT_S = 60  # of each kernel; the driver may have to compile it first
SPLITS = (2, 3, 4, 6, 8, 12, 16, 128)
WORKSPACE_BYTES = 1 << 30
# Of a number of tf32: fp32 holds the product exactly, and tf32's nearest number is the one before. A cut gives another.
BELOW = 1 - 2.0**-13


class Run(NamedTuple):
    """One product of a kernel: sizes, slices of K, the layout if it is not the kernel's, and what is not aligned."""

    m: int
    n: int
    k: int
    split: int = 1
    layout: str = ""
    copies: int = 0
    gap: int | None = None  # bytes between rows of C, each of whole 16 bytes, though the kernel asks for neither


def runs_of(kernel: Kernel) -> list[Run]:
    """Products that the kernel's guards allow.

    Less than a tile, several tiles with ragged edges, a K that passes the pipeline's depth, one that ends inside a
    step, none at all, and more tiles than can run at once where blocks take several. A kernel of aligned operands gets
    copies of others too, and one that splits K every number of slices.
    """
    step = {guard.value: guard.operand for guard in kernel.guards if guard.relation == "multiple_of"}
    least = {guard.value: guard.operand for guard in kernel.guards if guard.relation == "at_least"}
    below = [(guard.value, guard.operand) for guard in kernel.guards if guard.relation == "below"]
    tile, split = kernel.config, kernel.role == "partial"
    any_n = step.get("N", 1)  # of the product, where C in the workspace has longer rows
    step["N"] = max(any_n, step.get("c_span", 1))

    def fit(value: str, size: int) -> int:
        multiple = step.get(value, 1)
        size = min([size, *(limit - 1 for name, limit in below if name == value)])
        return max(multiple, -(-least.get(value, 0) // multiple) * multiple, size // multiple * multiple)

    sizes = [
        (1, 1, 1),
        (tile.block_m - 3, tile.block_n - 5, tile.block_k - 1),
        (2 * tile.block_m + 17, 3 * tile.block_n - 9, (tile.num_stages + 2) * tile.block_k + 7),
        (8 * tile.block_m + 1, 9 * tile.block_n - 1, 1000),
    ]
    if kernel.persistent:
        sizes.append((23 * tile.block_m + 5, 24 * tile.block_n + 3, 3 * tile.block_k + 5))
    found = [Run(fit("M", m), fit("N", n), fit("K", k)) for m, n, k in sizes]
    if "K" not in least:
        found.append(Run(fit("M", 33), fit("N", 65), 0))
    if split:
        found = [
            run._replace(k=fit("K", (2 * slices + number) * tile.block_k + 7), split=slices)
            for slices in SPLITS
            for number, run in enumerate(found[:3])
        ]
    if kernel.layout != "any" and "a_ptr" in step:
        copies = COPY_A | COPY_B | (0 if split else COPY_C)
        along_k = DTYPES[kernel.dtype_a].bytes == 1 or kernel.dtype_a == "tf32"  # copies of such operands are nt
        orders = (kernel.layout,) if not along_k else LAYOUTS if kernel.layout == "nt" else ()
        odd = found[2]._replace(n=sizes[2][1] // any_n * any_n)
        found += [odd._replace(layout=order, copies=copies) for order in orders]
        found += [] if split else [odd._replace(copies=COPY_C)]
        if not split and "c_ptr" not in step:
            vector = 16 // DTYPES[kernel.dtype_c].bytes
            widths = tile.block_n // tile.cluster_n - vector, 2 * tile.block_n + vector
            found += [Run(found[2].m, n, found[2].k, gap=gap) for n, gap in zip(widths, (0, 48), strict=True)]
    return found


def strides(matrix: torch.Tensor) -> tuple[int, int]:
    """The two strides of a matrix, or of those of a batch, in elements."""
    return matrix.stride(-2), matrix.stride(-1)


def between(matrices: torch.Tensor) -> int:
    """The distance between the matrices of a batch, 0 for one."""
    return matrices.stride(0) if matrices.dim() > 2 else 0


def epilogue_of(kernel: Kernel, turn: int, m: int, n: int, *, exact: bool, generator: torch.Generator) -> Epilogue:
    """Something that the kernel's epilogue can do; which of it depends on `turn`. Exact: integers and powers of two."""
    device_, integer = generator.device, kernel.dtype_c == "int32"
    if integer or turn % 2 == 0:
        return Epilogue()

    def factors(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-2, 1, shape, generator=generator, device=device_).float()
        return exponents.exp2() if exact else torch.rand(shape, generator=generator, device=device_) + 0.5

    scaled = turn % 4 == 1 and not any(guard.value == "scale_a_ptr" for guard in kernel.guards)
    scale_a, scale_b = (factors(m, 1), factors(1, n)) if scaled else (None, None)
    if kernel.epilogue == "none":
        return Epilogue(scale_a=scale_a, scale_b=scale_b)
    shape = (n,) if turn % 4 == 1 or kernel.epilogue == "bias" else (m, n)
    bias = torch.randint(-64, 65, shape, generator=generator, device=device_).to(torch_dtype(kernel.dtype_c))
    names = [name for name, least in ACTIVATIONS.items() if EPILOGUES.index(least) <= EPILOGUES.index(kernel.epilogue)]
    if exact:
        names = [name for name in names if ACTIVATIONS[name] != "full"]
    return Epilogue(names[turn // 2 % len(names)], 0.125, bias, scale_a, scale_b)


def result_of(
    pack: Pack, number: int, kernel: Kernel, run: Run, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue, turn: int
) -> torch.Tensor:
    """C of kernel `number` for float64 values a, b, in operands that keep its guards; checks what lies around C.

    a may be a batch, and then b one of as many or the B of all. A kernel of tf32 gets numbers that it has to round to
    those values.
    """
    guarded = [guard.value.removeprefix("stride_") for guard in kernel.guards if guard.relation == "multiple_of"]
    aligned = {value[0] for value in guarded}  # "a" of am, az and a_ptr
    layout = run.layout or ("nn" if kernel.layout == "any" else kernel.layout)

    def padding(length: int, free: bool) -> int:  # noqa: FBT001
        """What follows each row (column) of that length; rows of a multiple of 16 elements are aligned in any type."""
        return 3 if free else 16 + -length % 16

    def place(values: torch.Tensor, dtype: str, order: str, free: bool) -> torch.Tensor:  # noqa: FBT001
        pad = padding(values.shape[-1 if order == "n" else -2], free)
        values = values * BELOW if dtype == "tf32" else values
        return lay_out(values, torch_dtype(dtype), order, pad=pad, offset=int(free))

    free_a, free_b, free_c = ("abc"[i] not in aligned or bool(run.copies >> i & 1) for i in range(3))
    a_view = place(a, kernel.dtype_a, layout[0], free_a)
    b_view = place(b, kernel.dtype_b, layout[1], free_b)
    gap = padding(run.n, free_c) if run.gap is None else run.gap // DTYPES[kernel.dtype_c].bytes
    pitch = run.n + gap
    c_memory = torch.full((*a.shape[:-2], run.m + 2, pitch), -7.0, device=a.device).to(torch_dtype(kernel.dtype_c))
    c = c_memory[..., 1 : run.m + 1, : run.n]
    bias, scale_a, scale_b = epilogue.bias, epilogue.scale_a, epilogue.scale_b
    problem = Problem(
        run.m, run.n, run.k, strides(a_view), strides(b_view), strides(c),
        DTYPES[kernel.dtype_a].storage, DTYPES[kernel.dtype_b].storage, kernel.dtype_c,
        activation=epilogue.activation, slope=epilogue.slope,
        a_ptr=a_view.data_ptr(), b_ptr=b_view.data_ptr(), c_ptr=c.data_ptr(),
        allow_tf32=kernel.dtype_a == "tf32", fast_accum=kernel.fast_accum,
        bias_ptr=0 if bias is None else bias.data_ptr(),
        bias_strides=(0, 0, 1) if bias is None or bias.dim() == 1 else (between(bias), *strides(bias)),
        batch=len(a) if a.dim() > 2 else 1,
        batch_strides=(between(a_view), between(b_view), between(c)),
        scale_a_ptr=0 if scale_a is None else scale_a.data_ptr(),
        scale_b_ptr=0 if scale_b is None else scale_b.data_ptr(),
        scale_strides=(1, 1),
    )  # fmt: skip
    plan = Plan(
        kernel=number,
        split=run.split,
        copies=run.copies,
        group_m=GROUPS[turn % len(GROUPS)],
        pdl=kernel.pdl and turn % 2 == 1,
        workspace_bytes=WORKSPACE_BYTES,
    )
    workspace = torch.full((WORKSPACE_BYTES,), -1, device="cuda", dtype=torch.int8)  # NaN as fp32
    stream = torch.cuda.current_stream().cuda_stream
    pack.launcher.run(plan, problem, a.device.index, stream, workspace.data_ptr())
    torch.cuda.synchronize()
    frame = c_memory.clone()
    frame[..., 1 : run.m + 1, : run.n] = -7
    assert (frame == -7).all(), "stored outside C"
    return c


def writes_products(kernel: Kernel) -> bool:
    """Whether products are its work, alone or with a reduce; those with block scales are in test_block_scales.py."""
    return kernel.role in ("product", "partial") and BLOCK_SCALED not in kernel.guards


def inputs_of(kernel: Kernel) -> str:
    """Its input types, one of `problem.INPUTS`."""
    return kernel.dtype_a if kernel.dtype_a == kernel.dtype_b else f"{kernel.dtype_a}-{kernel.dtype_b}"


def adds_matrices(kernel: Kernel) -> bool:
    """Whether it adds a matrix to a product."""
    return writes_products(kernel) and kernel.role == "product" and kernel.epilogue not in ("none", "bias")


def packs(wanted: Callable[[Kernel], bool]) -> list[Any]:
    """The packs that run on this GPU, by whatever way, each with every config of the kernels that are wanted."""
    if not torch.cuda.is_available():
        return [pytest.param(None, "none", id="none", marks=pytest.mark.skip(reason="no GPU here"))]
    arch = device(0).arch
    found = [pack for folder in FOLDERS for pack in open_packs(folder) if ways_to_run(pack.arch, arch)]
    return [
        pytest.param(pack, config_name, id=f"{pack.folder.parent.name}/{pack.arch}-{config_name}")
        for pack in found
        for config_name in sorted({kernel.config_name for kernel in pack.manifest.kernels if wanted(kernel)})
    ]


@pytest.mark.parametrize(("pack", "config_name"), packs(writes_products))
def test_every_kernel_is_right(
    pack: Pack,
    config_name: str,
    generator: torch.Generator,
    capsys: pytest.CaptureFixture[str],
    limit: Callable[[int], None],
) -> None:
    """Each kernel of the pack gives bit-exact integer products and errors within both bounds, and stores only C."""
    worst: dict[str, Judgement] = {}
    runs = 0
    reduces = sorted({(k.dtype_c, k.epilogue) for k in pack.launcher.kernels if k.role == "reduce"})
    with torch.cuda.device(0):
        for number, found in enumerate(pack.launcher.kernels):
            if found.config_name != config_name or not writes_products(found):
                continue
            limit(LIMIT_S)
            name = inputs_of(found)
            for turn, run in enumerate(runs_of(found)):
                kernel = found
                if kernel.role == "partial":  # what follows it writes C and has the epilogue
                    theirs = [row for row in reduces if (row[0] == "int32") == (found.dtype_c == "int32")]
                    dtype_c, does = theirs[turn % len(theirs)]
                    kernel = replace(found, dtype_c=dtype_c, epilogue=does)
                output = torch_dtype(kernel.dtype_c)
                where = f"{kernel.name} {run}"
                a, b = integers(*run[:3], name, output, generator=generator)
                epilogue = epilogue_of(kernel, turn, *run[:2], exact=True, generator=generator)
                c = result_of(pack, number, kernel, run, a, b, epilogue, turn)
                exact = judge(c, a, b, name, epilogue, exact=True)
                assert exact.mismatches == 0, f"{where} {epilogue.activation}: {exact}"
                a = random(run.m, run.k, kernel.dtype_a, generator=generator)
                b = random(run.k, run.n, kernel.dtype_b, generator=generator)
                epilogue = epilogue_of(kernel, 2 * (turn + number) + 1, *run[:2], exact=False, generator=generator)
                c = result_of(pack, number, kernel, run, a, b, epilogue, turn + 1)
                noisy = judge(c, a, b, name, epilogue, exact=output is torch.int32, fast=kernel.fast_accum)
                assert noisy.det <= 1, f"{where} {epilogue.activation}: {noisy}"
                assert noisy.prob < 1, f"{where} {epilogue.activation}: {noisy}"
                key = f"{name} -> {kernel.dtype_c}"
                before = worst.get(key, Judgement(0, 0.0, 0.0))
                worst[key] = Judgement(0, max(before.det, noisy.det), max(before.prob, noisy.prob))
                runs += 2
    report = {
        "pack": f"{pack.folder.parent.name}/{pack.arch}",
        "way": ways_to_run(pack.arch, device(0).arch),
        "config_name": config_name,
        "products": runs,
        "mismatches": 0,
        "largest error / bound (det, prob)": {key: (round(j.det, 3), round(j.prob, 3)) for key, j in worst.items()},
    }
    with capsys.disabled():
        print(json.dumps(report))  # noqa: T201 - the figures that docs/performance.md quotes
    assert runs


MEMBERS = 3  # of a batch


@pytest.mark.parametrize("shared", [False, True], ids=["", "one B"])
@pytest.mark.parametrize(("pack", "config_name"), packs(writes_products))
def test_batches(
    pack: Pack,
    config_name: str,
    shared: bool,  # noqa: FBT001
    generator: torch.Generator,
    limit: Callable[[int], None],
) -> None:
    """Each kernel gives bit-exact products of a batch, with a bias of each or of all, and stores nothing between.

    Errors of random numbers are within both bounds.
    """
    with torch.cuda.device(0):
        for number, found in enumerate(pack.launcher.kernels):
            if found.config_name != config_name or not writes_products(found):
                continue
            limit(LIMIT_S)
            kernel = found
            if found.role == "partial":
                kernel = replace(found, dtype_c="int32" if found.dtype_c == "int32" else "fp32", epilogue="none")
            output, name = torch_dtype(kernel.dtype_c), inputs_of(found)
            runs = [run for run in runs_of(found) if not run.copies and run.k]
            for turn, run in enumerate((runs[1], runs[2], *(run for run in runs if run.gap is not None))):
                a, b = integers(*run[:3], name, output, generator=generator, batch=(MEMBERS,))
                b = b[0] if shared else b
                epilogue = Epilogue()
                if kernel.epilogue != "none":
                    shape = (MEMBERS, run.m, run.n) if adds_matrices(kernel) and turn != 1 else (run.n,)
                    bias = torch.randint(-64, 65, shape, generator=generator, device=a.device).double()
                    bias = bias.to(output) if len(shape) == 1 else lay_out(bias, output, "n", pad=8 * turn)
                    epilogue = Epilogue("relu" if adds_matrices(kernel) else "none", 0.0, bias)
                c = result_of(pack, number, kernel, run, a, b, epilogue, turn)
                exact = judge(c, a, b, name, epilogue, exact=True)
                assert exact.mismatches == 0, f"{kernel.name} {run}: {exact}"
                a, b = (
                    torch.stack([random(rows, columns, dtype, generator=generator) for _ in range(MEMBERS)])
                    for rows, columns, dtype in ((run.m, run.k, kernel.dtype_a), (run.k, run.n, kernel.dtype_b))
                )
                b = b[0] if shared else b
                c = result_of(pack, number, kernel, run, a, b, epilogue, turn + 1)
                noisy = judge(c, a, b, name, epilogue, exact=output is torch.int32, fast=kernel.fast_accum)
                assert noisy.det <= 1, f"{kernel.name} {run}: {noisy}"
                assert noisy.prob < 1, f"{kernel.name} {run}: {noisy}"


# How a residual may lie in memory: order, elements between its rows (columns), elements before it.
RESIDUALS = {
    "whole": ("n", 0, 0),
    "16 bytes apart": ("n", 8, 0),
    "odd rows": ("n", 3, 0),
    "off": ("n", 0, 1),
    "columns": ("t", 0, 0),
}


@pytest.mark.parametrize(("pack", "config_name"), packs(adds_matrices))
def test_residuals_of_every_layout(
    pack: Pack, config_name: str, generator: torch.Generator, limit: Callable[[int], None]
) -> None:
    """A matrix is added bit-exactly wherever it lies: in rows that TMA copies, others, and columns; over many tiles."""
    with torch.cuda.device(0):
        for number, kernel in enumerate(pack.launcher.kernels):
            if kernel.config_name != config_name or not adds_matrices(kernel):
                continue
            limit(LIMIT_S)
            name = inputs_of(kernel)
            output = torch_dtype(kernel.dtype_c)
            aligned = [run for run in runs_of(kernel) if not run.copies and run.k]
            for run in (aligned[2], aligned[-1]):
                a, b = integers(*run[:3], name, output, generator=generator)
                values = torch.randint(-64, 65, (run.m, run.n), generator=generator, device=a.device).double()
                for turn, (form, (order, pad, offset)) in enumerate(RESIDUALS.items()):
                    bias = lay_out(values, output, order, pad=pad, offset=offset)
                    epilogue = Epilogue("relu", 0.0, bias)
                    c = result_of(pack, number, kernel, run, a, b, epilogue, turn)
                    found = judge(c, a, b, name, epilogue, exact=True)
                    assert found.mismatches == 0, f"{kernel.name} {run} {form}: {found}"
