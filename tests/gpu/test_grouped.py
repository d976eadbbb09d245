"""Grouped products on the GPU: each kernel over ragged groups, graphs whose groups change, gradients, torch's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import aotmm
from aotmm import deep_gemm
from aotmm.errors import NoKernelError
from aotmm.kernels import BLOCK_SCALED
from aotmm.runtime.launcher import Problem
from aotmm.runtime.library import Library
from aotmm.tune.candidates import for_invariance
from tests.gpu.judge import lay_out

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = (torch.float16, torch.bfloat16, torch.float32)
COUNTS = (1, 3, 8, 64, 512)  # of groups
FORMS = ("rows", "columns", "K")


@pytest.fixture(params=["fp32", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether torch allows tf32, which it forgets afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = before


def integers(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Small integers: sums of a few hundred products are exact in fp32."""
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").double()


def ends(size: int, groups: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """The ends of groups of `size` elements and less: at random, so that some are empty, or all in one."""
    if kind == "one":
        found = torch.full((groups,), size, device="cuda")
        found[: groups // 2] = 0
    else:
        found = torch.randint(0, size + 1, (groups,), generator=generator, device="cuda").sort().values
    return found.to(torch.int32)


def spans(offs: torch.Tensor) -> list[tuple[int, int]]:
    """The begin and the end of each group."""
    numbers = offs.tolist()
    return list(zip([0, *numbers[:-1]], numbers, strict=True))


def operands(
    form: str, groups: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands with `size` elements in groups, each row-major or not as models have them."""
    if form == "rows":
        a, b = integers(size, 208, generator=generator), integers(groups, 208, 72, generator=generator)
        return lay_out(a, dtype, "n", pad=0), b.to(dtype).mT.contiguous().mT
    if form == "columns":
        a, b = integers(groups, 72, 208, generator=generator), integers(208, size, generator=generator)
        return a.to(dtype), lay_out(b, dtype, "t", pad=0)
    a, b = integers(72, size, generator=generator), integers(size, 88, generator=generator)
    return lay_out(a, dtype, "t", pad=0), lay_out(b, dtype, "n", pad=0)


def wanted(form: str, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product of each group in float64, with NaN behind the last group."""
    a, b = a.double(), b.double()
    if form == "K":
        return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in spans(offs)])
    M, N = a.shape[-2], b.shape[-1]
    found = torch.full((M, N), float("nan"), device="cuda", dtype=torch.float64)
    for group, (begin, end) in enumerate(spans(offs)):
        if form == "rows":
            found[begin:end] = a[begin:end] @ b[group]
        else:
            found[:, begin:end] = a[group] @ b[:, begin:end]
    return found


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits wherever a group is; elsewhere `want` is NaN, and anything may be there."""
    inside = ~want.isnan()
    assert torch.equal(found[inside], want.to(found.dtype)[inside])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.usefixtures("tf32")
def test_ragged_groups(lib: Library, form: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Products of any groups are exact: empty ones, one row, all in one, 1 to 512 of them, elements behind the last."""
    for groups in COUNTS:
        for size in (8, 200, 1032):
            for kind in ("random", "one"):
                a, b = operands(form, groups, size, dtype, generator)
                offs = ends(size, groups, kind, generator)
                same(lib.grouped_mm(a, b, offs=offs), wanted(form, a, b, offs))


def right_by_each_kernel(
    lib: Library, problem: Problem, want: torch.Tensor, dtype: torch.dtype, only: str = ""
) -> set[str]:
    """The names of the kernels that take a problem: each gives the bits of `want`, and writes nothing but them.

    With `only` they are those whose operands are of that type.
    """
    launcher, stream = lib.launcher(0), torch.cuda.current_stream().cuda_stream
    tried: set[str] = set()
    memory = torch.empty(want.numel() + 64, device="cuda", dtype=dtype)
    problem = replace(problem, c_ptr=memory[32:].data_ptr())
    for number, kernel in enumerate(launcher.kernels):
        plan = launcher.check(problem, launcher.device(0), number).plan
        if plan is None or kernel.dtype_a != (only or kernel.dtype_a):
            continue
        memory.fill_(float("nan"))
        launcher.run(plan, problem, 0, stream, 0)
        found = memory[32:-32].view(want.shape)
        same(found, want)
        assert found[want.isnan()].isnan().all()
        assert memory[:32].isnan().all()
        assert memory[-32:].isnan().all()
        tried.add(kernel.name)
    return tried


def kernels_for(lib: Library, form: str, *, tf32: bool) -> set[str]:
    """The names of the grouped kernels of a form, rows or K, with results of their operands' type.

    Those that add slices of K are for `batch_invariant`, which has tests of its own.
    """
    role = "grouped_k" if form == "K" else "grouped_m"
    of_type = [k for k in lib.launcher(0).kernels if k.role == role and k.dtype_a in (k.dtype_c, "tf32")]
    return {k.name for k in of_type if (tf32 or k.dtype_a != "tf32") and not for_invariance(k)}


@pytest.mark.parametrize("form", ["rows", "K"])
def test_every_kernel(lib: Library, form: str, tf32: bool, generator: torch.Generator) -> None:  # noqa: FBT001
    """Each kernel with results of its operands' type gives exact products, and writes nothing but them."""
    tried: set[str] = set()
    for dtype in PLAIN:
        for groups, size in ((1, 64), (5, 200), (40, 1032)):
            a, b = operands(form, groups, size, dtype, generator)
            offs = ends(size, groups, "random", generator)
            want = wanted(form, a, b, offs)
            for right in (b, b.contiguous()):
                problem = lib.problem(a, right, offs=offs)
                tried |= right_by_each_kernel(lib, problem, want, dtype)
    assert tried == kernels_for(lib, form, tf32=tf32) != set()


@pytest.mark.parametrize("form", ["rows", "K"])
def test_tf32_is_rounded(lib: Library, form: str, generator: torch.Generator) -> None:
    """Operands just below a number of tf32 count as that number by each kernel of tf32: none cuts them."""
    below = 1 - 2.0**-13
    a, b = operands(form, 5, 200, torch.float32, generator)
    offs = ends(200, 5, "random", generator)
    want, tried = wanted(form, a, b, offs), set()
    for right in (b, b.contiguous()):
        problem = replace(lib.problem(a, right, offs=offs), allow_tf32=True)
        less = a * below, right * below
        problem = replace(problem, a_ptr=less[0].data_ptr(), b_ptr=less[1].data_ptr())
        tried |= right_by_each_kernel(lib, problem, want, torch.float32, only="tf32")
    assert tried == kernels_for(lib, form, tf32=True) - kernels_for(lib, form, tf32=False) != set()


def scaled(
    groups: int,
    size: int,
    room: int,
    columns: int,
    generator: torch.Generator,
    types: tuple[torch.dtype, torch.dtype] = (E4, E4),
) -> tuple[dict[str, Any], torch.Tensor]:
    """fp8 operands of rows in groups, with power-of-two scales of rows (columns = 0) or blocks, and the exact product.

    With `room` each group is the first rows of a matrix. The product is NaN where no group is.
    """
    N, K = 208, 400
    offs = ends(size, groups, "random", generator)
    counts = torch.randint(0, room + 1, (groups,), generator=generator, device="cuda", dtype=torch.int32)
    M = groups * room if room else size
    a, b = integers(M, K, generator=generator), integers(groups, K, N, generator=generator)
    blocks = -(-K // 128) if columns else 1

    def powers(*shape: int) -> torch.Tensor:
        return torch.pow(2.0, torch.randint(-1, 2, shape, generator=generator, device="cuda")).float()

    scale_a, scale_b = powers(M, blocks), powers(groups, blocks, -(-N // (columns or 1)))
    of_k = torch.arange(K, device="cuda") // 128 * (columns > 0)
    of_n = torch.arange(N, device="cuda") // (columns or 1)
    x, y = a * scale_a[:, of_k], b * scale_b[:, of_k][..., of_n]
    want = torch.full((M, N), float("nan"), device="cuda", dtype=torch.float64)
    rows = [(g * room, g * room + n) for g, n in enumerate(counts.tolist())] if room else spans(offs)
    for group, (begin, end) in enumerate(rows):
        want[begin:end] = x[begin:end] @ y[group]
    left, right = a.to(types[0]), b.mT.contiguous().to(types[1]).mT
    options: dict[str, Any] = {"a": left, "b": right, "offs": offs, "scale_a": scale_a, "scale_b": scale_b}
    if room:
        padded = torch.full((groups, blocks, room + 4), float("nan"), device="cuda")
        many = (
            padded[..., :room].mT.copy_(scale_a.view(groups, room, blocks))
            if columns
            else scale_a.view(groups, room, 1)
        )
        options |= {"a": left.view(groups, room, K), "offs": None, "rows": counts, "scale_a": many}
        want = want.view(groups, room, N)
    return options, want


@pytest.mark.parametrize(
    ("types", "columns"), [((E4, E4), 0), ((E4, E4), 128), ((E4, E4), 1), ((E5, E5), 0), ((E4, E5), 0), ((E5, E4), 0)]
)
@pytest.mark.parametrize("room", [0, 70])
def test_every_scaled_kernel(
    lib: Library, types: tuple[torch.dtype, torch.dtype], columns: int, room: int, generator: torch.Generator
) -> None:
    """Each fp8 kernel gives exact products with scales of rows or of blocks, of both forms, and writes nothing else."""
    tried: set[str] = set()
    for groups, size in ((1, 64), (5, 200), (40, 1032)):
        options, want = scaled(groups, size, room, columns, generator, types)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            same(lib.grouped_mm(**options, out_dtype=dtype), want)
            for fast in (False, True):
                problem = lib.problem(**options, out_dtype=dtype, fast_accum=fast)
                tried |= right_by_each_kernel(lib, problem, want, dtype)
    names = {E4: "fp8e4", E5: "fp8e5"}
    pair = names[types[0]], names[types[1]]
    mine = [k for k in lib.launcher(0).kernels if k.role == "grouped_m" and (k.dtype_a, k.dtype_b) == pair]
    blocks = [k.name for k in mine if (BLOCK_SCALED in k.guards) == (columns > 0)]
    assert tried == {name for name in blocks if columns != 1 or "128x128" not in name} != set()


def test_scaled_columns(lib: Library, generator: torch.Generator) -> None:
    """fp8 columns in groups with scales of rows and columns are, transposed, the rows of the transposed operands."""
    options, want = scaled(6, 200, 0, 0, generator)
    turned = {"a": options["b"].mT, "b": options["a"].T, "scale_a": options["scale_b"].mT}
    found = lib.grouped_mm(**turned, scale_b=options["scale_a"].T, offs=options["offs"], out_dtype=torch.float32)
    same(found, want.T)


def test_deep_gemm(lib: Library, generator: torch.Generator) -> None:
    """DeepGEMM's functions of rows give exact products, captured too, and leave other rows as they were."""
    del lib
    groups, room = 4, 256
    options, want = scaled(groups, 1, room, 128, generator)
    pairs = (options["a"], options["scale_a"]), (options["b"].mT, options["scale_b"].mT)
    d = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(*pairs, d, options["rows"], 100)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(*pairs, d, options["rows"], 100)
    d.fill_(float("nan"))
    graph.replay()
    same(d, want)
    assert d[want.isnan()].isnan().all()
    ids = torch.full((groups, room), -1, device="cuda", dtype=torch.int32)
    for group, count in enumerate(options["rows"].tolist()):
        ids[group, :count] = group
    (a, of_a), of_b = pairs[0], pairs[1]
    flat = a.view(groups * room, -1), of_a.reshape(groups * room, -1)
    d = torch.full((groups * room, want.shape[2]), float("nan"), device="cuda", dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(flat, of_b, d, ids.flatten())
    same(d.view(want.shape), want)
    plain = a.bfloat16(), of_b[0].bfloat16()
    exact = torch.where(want.isnan(), want, a.double() @ plain[1].double().mT)
    d = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(*plain, d, options["rows"], 100)
    same(d, exact)
    d = torch.full((groups * room, want.shape[2]), float("nan"), device="cuda", dtype=torch.bfloat16)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(plain[0].view(groups * room, -1), plain[1], d, ids.flatten())
    same(d.view(want.shape), exact)


def test_torchs_scaled_grouped_mm(lib: Library, generator: torch.Generator) -> None:
    """Inside the override torch's own fp8 function gives the same integers, with both kinds of sums."""
    del lib
    options, want = scaled(8, 256, 0, 0, generator)
    options["offs"][-1] = 256
    arguments = options["a"], options["b"], options["scale_a"][:, 0], options["scale_b"][:, 0], options["offs"]
    with aotmm.override() as active:
        for fast in (False, True):
            found = torch._scaled_grouped_mm(*arguments, out_dtype=torch.bfloat16, use_fast_accum=fast)
            same(found, want)
    assert "2 products by aotmm" in repr(active)


def test_groups_of_k_see_no_others(lib: Library, tf32: bool, generator: torch.Generator) -> None:  # noqa: FBT001
    """By each kernel, sums over groups of K are exact beside groups of NaN, for many tiles and any rows of a stage."""
    launcher, stream, tried = lib.launcher(0), torch.cuda.current_stream().cuda_stream, set()
    M, N, groups, size = 264, 392, 24, 1500
    for dtype in PLAIN:
        a, b = integers(M, size, generator=generator), integers(size, N, generator=generator)
        offs = ends(size, groups, "random", generator)
        want = torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in spans(offs)])
        nan = torch.zeros(size, dtype=torch.bool, device="cuda")
        for group, (begin, end) in enumerate(spans(offs)):
            nan[begin:end] = group % 2 == 1
        nan[int(offs[-1]) :] = True
        a[:, nan], b[nan] = torch.nan, torch.inf
        left, right = lay_out(a, dtype, "t", pad=0), lay_out(b, dtype, "n", pad=0)
        c = torch.empty(groups, M, N, device="cuda", dtype=dtype)
        problem = replace(lib.problem(left, right, offs=offs), c_ptr=c.data_ptr())
        for number, kernel in enumerate(launcher.kernels):
            plan = launcher.check(problem, launcher.device(0), number).plan
            if plan is not None:
                c.fill_(7)
                launcher.run(plan, problem, 0, stream, 0)
                assert torch.equal(c[::2], want[::2].to(dtype)), kernel.name
                tried.add(kernel.name)
    assert kernels_for(lib, "K", tf32=tf32) == tried != set()


def test_graph_with_other_groups(lib: Library, generator: torch.Generator) -> None:
    """A captured graph is right for whatever groups its replays find."""
    groups, size = 16, 512
    for form in FORMS:
        a, b = operands(form, groups, size, torch.bfloat16, generator)
        offs = ends(size, groups, "random", generator)
        lib.grouped_mm(a, b, offs=offs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            c = lib.grouped_mm(a, b, offs=offs)
        for kind in ("random", "one", "random"):
            offs.copy_(ends(size, groups, kind, generator))
            graph.replay()
            same(c, wanted(form, a, b, offs))


@pytest.mark.usefixtures("tf32")
def test_gradients(lib: Library, generator: torch.Generator) -> None:
    """Gradients of both operands and of a bias for each group are those of the products one by one."""
    for dtype in PLAIN:
        a, b = operands("rows", 6, 100, dtype, generator)
        bias = integers(6, 72, generator=generator).to(dtype)
        offs = ends(100, 6, "random", generator)
        offs[-1] = 100
        leaves = [x.detach().requires_grad_() for x in (a, b, bias)]
        gradient = integers(100, 72, generator=generator).to(dtype)
        torch.autograd.backward(lib.grouped_mm(leaves[0], leaves[1], offs=offs, bias=leaves[2]), gradient)
        exact = [x.double().requires_grad_() for x in (a, b, bias)]
        parts = [exact[0][begin:end] @ exact[1][g] + exact[2][g] for g, (begin, end) in enumerate(spans(offs))]
        torch.autograd.backward(torch.cat(parts), gradient.double())
        for mine, other in zip(leaves, exact, strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine.grad, other.grad.to(dtype))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_have_the_bits_of_the_single_product(lib: Library, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Under batch_invariant each group's rows are, bit for bit, those of `matmul` of its matrix alone."""
    options: dict[str, Any] = {"batch_invariant": True}
    for groups, K in ((4, 512), (32, 512), (8, 4096)):  # 16 bits of the last are in slices of K
        a = torch.randn(600, K, device="cuda", dtype=dtype, generator=generator)
        b = torch.randn(groups, 768, K, device="cuda", dtype=dtype, generator=generator).mT
        for kind in ("random", "one", "random"):
            offs = ends(600, groups, kind, generator)
            c = lib.grouped_mm(a, b, offs=offs, **options)
            for group, (begin, end) in enumerate(spans(offs)):
                if begin < end:
                    assert torch.equal(c[begin:end], lib.matmul(a[begin:end], b[group], **options))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_grouped_mm(lib: Library, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Inside the override torch's own function gives the same integers, and its products are counted as ours."""
    del lib
    a, b = operands("rows", 8, 256, dtype, generator)
    offs = ends(256, 8, "random", generator)
    with aotmm.override() as active:
        found = torch.nn.functional.grouped_mm(a, b, offs=offs)
    same(found, wanted("rows", a, b, offs))
    assert "1 products by aotmm" in repr(active)


def test_op(lib: Library, generator: torch.Generator) -> None:
    """The op's schema, fake and gradients are consistent for torch."""
    del lib
    for form, dtype in itertools.product(FORMS, (torch.float16, torch.float32)):
        a, b = operands(form, 4, 64, dtype, generator)
        offs = ends(64, 4, "random", generator)
        offs[-1] = 64  # what lies behind the last group is undefined, and the check compares all of it
        arguments = a.requires_grad_(), b.requires_grad_(), offs
        torch.library.opcheck(torch.ops.aotmm.grouped_mm.default, arguments)


def test_preloaded_problems(lib: Library, generator: torch.Generator) -> None:
    """Kernels of problems are loaded once and serve the products afterwards; a problem that has none is an error."""
    options, want = scaled(5, 200, 0, 128, generator)
    problem = lib.problem(**options, out_dtype=torch.bfloat16)
    lib.preload(problems=[problem, problem])
    same(lib.grouped_mm(**options, out_dtype=torch.bfloat16), want)
    with pytest.raises(NoKernelError):
        lib.preload(problems=[replace(problem, dtype_c="int32")])
