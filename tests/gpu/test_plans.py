"""Products of several launches: split along K, with copies of operands, and started before the last one has ended."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aotmm
from aotmm.kernels import LINE_BYTES, VECTOR_BYTES
from aotmm.problem import DTYPES, LAYOUTS, SPLITS, USUAL_SPLIT, WORKSPACE_LIMIT
from aotmm.runtime.launcher import COPY_A, COPY_B, COPY_C, Problem
from aotmm.runtime.library import Library
from aotmm.timing.operands import torch_dtype
from aotmm.tune.candidates import for_invariance
from tests.gpu.judge import integers, lay_out
from tests.gpu.plans import chosen, config_names, layout_of, preferring

LIMIT_S = 60
# A shape for each number of slices, so that one table can ask for all of them; K ends inside a step. If there are more
# slices than the usual ones, each needs 16 steps, of up to 128 elements.
SPLIT_SHAPES = [
    ((200 + 8 * split, 264, 8192 + 16 * split) if split <= USUAL_SPLIT else (8 + split, 72, 2048 * split + 16), split)
    for split in SPLITS
]
LARGE = (1024, 1024, 16_384)  # 8 slices of 4 MiB: more than torch keeps for small tensors
CAPTURED = (256, 384, 8192)
LINKS = 200
CHAINS = ((16, 256), (128, 128), (256, 512), (520, 136))  # sizes of what is passed from link to link
ODD_CHAINS = ((65, 257), (129, 1023), (513, 135))
LONG = 4096  # K of the links that take their time
TABLE = {
    **dict(SPLIT_SHAPES),
    LARGE: 8,
    CAPTURED: 8,
    **{(m, n, k): 2 for m, n in CHAINS for k in (m, n)},
    **{(m, n, LONG): 4 for m, n in CHAINS},
}


def found(role: str, *dtypes: str) -> list[Any]:
    """The configs that this GPU has for `role`, with each of `dtypes`."""
    if not torch.cuda.is_available():
        return [pytest.param("none", "fp16", marks=pytest.mark.skip(reason="no GPU here"))]
    pairs = [(config_name, dtype) for dtype in dtypes for config_name in config_names(aotmm.load(), role, dtype)]
    return pairs or [pytest.param("none", "fp16", marks=pytest.mark.skip(reason=f"no {role} kernels for this GPU"))]


@pytest.fixture(scope="session")
def prefer(lib: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Library]:
    """The library that takes a config, made once for each."""
    made: dict[str, Library] = {}
    folder = tmp_path_factory.mktemp("tables")

    def of(config_name: str) -> Library:
        if config_name not in made:
            made[config_name] = preferring(lib, config_name, folder, splits=TABLE)
        return made[config_name]

    return of


def operands(
    shape: tuple[int, int, int], dtype: str, layout: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous integer operands of `shape` in `layout`, and their exact product."""
    m, n, k = shape
    kind, output = torch_dtype(dtype), torch_dtype(DTYPES[dtype].output)
    a, b = integers(m, n, k, dtype, output, generator=generator)
    return lay_out(a, kind, layout[0]), lay_out(b, kind, layout[1]), (a @ b).to(output)


# ------------------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16", "bf16", "fp8e4"))
def test_split(prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str) -> None:
    """Any number of slices gives the exact product, and of random numbers the same bits 20 times."""
    ours = prefer(config_name)
    layout = layout_of(ours, config_name, dtype)
    for shape, split in SPLIT_SHAPES:
        a, b, want = operands(shape, dtype, layout, generator)
        kernel, plan = chosen(ours, a, b)
        assert (kernel.config_name, plan.split, plan.measured) == (config_name, split, True)
        assert torch.equal(ours.matmul(a, b), want), (shape, split)
        a.copy_(torch.randn(a.shape, generator=generator, device="cuda"))
        first = ours.matmul(a, b)
        assert all(torch.equal(first, ours.matmul(a, b)) for _ in range(20)), (shape, split)


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16"))
def test_split_beside_a_full_gpu(
    prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str
) -> None:
    """While another stream keeps every multiprocessor busy, split products end, with the same bits."""
    ours = prefer(config_name)
    a, b, want = operands(CAPTURED, dtype, layout_of(ours, config_name, dtype), generator)
    assert torch.equal(ours.matmul(a, b), want)
    big = torch.randn(8192, 8192, generator=generator, device="cuda").half()
    product, side = torch.empty_like(big), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            torch.matmul(big, big, out=product)
    beside = [ours.matmul(a, b) for _ in range(20)]
    assert not side.query(), "the other stream ended before it was in the way"
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in beside)


# --------------------------------------------------------------------------------------------------- workspace


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16")[:3])
def test_workspaces_of_streams(
    prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str
) -> None:
    """Streams at once, each with its own operands, and memory that is used again as soon as it is given back."""
    ours = prefer(config_name)
    streams = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call]
    work = [operands(CAPTURED, dtype, layout_of(ours, config_name, dtype), generator) for _ in streams]
    outs = [torch.empty_like(want) for _, _, want in work]
    wrong = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in streams]
    sums = 8 * CAPTURED[0] * CAPTURED[1]
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, (a, b, want), out, count in zip(streams, work, outs, wrong, strict=True):
            with torch.cuda.stream(stream):
                ours.matmul(a, b, out=out)
                torch.full((sums,), float("nan"), device="cuda")  # in the block that the workspace had, most likely
                count.add_((out != want).sum())
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * len(streams)


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16")[:1])
def test_nothing_is_kept(
    prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str
) -> None:
    """Workspaces go back to torch: after 50 products as much is allocated as before."""
    ours = prefer(config_name)
    a, b, want = operands(CAPTURED, dtype, layout_of(ours, config_name, dtype), generator)
    out = torch.empty_like(want)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        ours.matmul(a, b, out=out)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16")[:1])
def test_without_memory_for_a_workspace(
    prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str
) -> None:
    """Where torch has no memory left, a product that would be split is computed by a kernel that needs none."""
    ours = prefer(config_name)
    a, b, want = operands(LARGE, dtype, layout_of(ours, config_name, dtype), generator)
    out = torch.empty_like(want)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = []  # what torch keeps for later
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty((1 << 20) + 1, device="cuda", dtype=torch.int8))
        failures = torch.cuda.memory_stats()["num_ooms"]
        ours.matmul(a, b, out=out)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_stats()["num_ooms"] > failures
    del held
    assert torch.equal(out, want)
    assert torch.equal(ours.matmul(a, b), want), "with memory it is split again"


# ------------------------------------------------------------------------------------------------------- panels


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_panels(lib: Library, generator: torch.Generator, layout: str, bias: bool) -> None:  # noqa: FBT001
    """Odd sizes in panels, along rows, columns and both, are exact, whatever the limit; 20 runs give the same bits."""
    m, n, k = 2049, 3001, 1023
    exact_a, exact_b = integers(m, n, k, "fp16", torch.float16, generator=generator)
    a, b = lay_out(exact_a, torch.float16, layout[0]), lay_out(exact_b, torch.float16, layout[1])
    residual = torch.randint(-8, 9, (m, n), generator=generator, device="cuda").half() if bias else None
    want = (exact_a @ exact_b + (0 if residual is None else residual.double())).half()
    launcher, out, seen = lib.launcher(0), torch.empty_like(want), set()
    problem = lib.problem(a, b, out=out, bias=residual)
    for limit in (1 << 21, 1 << 22, 3 << 21, 1 << 23, 1 << 24):
        plan = launcher.plan(problem, 0, limit)
        assert plan.workspace_bytes <= limit
        seen.add((plan.panel_m, plan.panel_n))
        workspace = torch.empty(plan.workspace_bytes, device="cuda", dtype=torch.uint8)
        for _ in range(20):
            out.fill_(float("nan"))
            launcher.run(plan, problem, 0, torch.cuda.current_stream().cuda_stream, workspace.data_ptr())
            assert torch.equal(out, want), (limit, plan)
    if lib.pack_for(0).arch == "sm90":
        assert len(seen - {(0, 0)}) > 1, seen


def test_copies_beyond_the_limit(lib: Library, generator: torch.Generator) -> None:
    """A product of 50001 columns, whose copies need 2.3 GiB, is exact, and not much slower than one of 50000."""
    m, n, k = 8192, 50_001, 16_384
    a = torch.randint(-1, 2, (m, k), generator=generator, device="cuda").half()
    b = torch.randint(-1, 2, (k, n), generator=generator, device="cuda").half()
    kernel, plan = chosen(lib, a, b)
    assert plan.workspace_bytes <= WORKSPACE_LIMIT
    assert plan.panel_m or lib.pack_for(0).arch != "sm90", (kernel.name, plan)
    assert torch.equal(lib.matmul(a, b), torch.matmul(a, b))  # no sum has more than 11 bits
    _, even = chosen(lib, a, b[:, :50_000].contiguous())
    assert plan.cost < 2 * even.cost or lib.pack_for(0).arch != "sm90", "as predicted"


def test_a_turned_for_any_number_of_rows(lib: Library, generator: torch.Generator) -> None:
    """fp32 products of any number of rows are exact with A turned; nothing is stored behind C's last row."""
    launcher = lib.pack_for(0).launcher
    numbers = [
        number
        for number, kernel in enumerate(launcher.kernels)
        if (kernel.family, kernel.layout, kernel.role, kernel.vector_bytes) == ("fma", "tt", "product", 16)
    ]
    if not numbers:
        pytest.skip("no kernels of family fma for this GPU")
    n, k = 264, 1000
    for number, m in itertools.product(numbers, (61, 1026, 2051)):
        a, b, want = operands((m, n, k), "fp32", "nt", generator)
        frame = torch.full((m + 8, n), -7.0, device="cuda")
        problem = Problem(
            m, n, k, (k, 1), (1, k), (n, 1), "fp32", "fp32", "fp32",
            a_ptr=a.data_ptr(), b_ptr=b.data_ptr(), c_ptr=frame.data_ptr(),
        )  # fmt: skip
        plan = launcher.check(problem, launcher.device(0), number).plan
        assert plan is not None
        assert plan.copies == COPY_A | COPY_C
        workspace = torch.full((plan.workspace_bytes,), -1, device="cuda", dtype=torch.int8)  # NaN as fp32
        launcher.run(plan, problem, 0, torch.cuda.current_stream().cuda_stream, workspace.data_ptr())
        assert torch.equal(frame[:m], want), (launcher.kernels[number].name, m)
        assert (frame[m:] == -7).all(), (launcher.kernels[number].name, m)


# -------------------------------------------------------------------------------------------------- CUDA graphs


def captured(work: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """The launches of `work` as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16")[:3] + found("product", "fp16"))
@pytest.mark.parametrize("pad", [0, 1])
def test_capture(
    lib: Library,
    tmp_path: Path,
    generator: torch.Generator,
    config_name: str,
    dtype: str,
    pad: int,
) -> None:
    """Captured at their first use and again, split products and copies compute with what a replay finds."""
    ours = preferring(lib, config_name, tmp_path, splits={CAPTURED: 8})  # its own, so that no kernel is loaded yet
    layout = layout_of(ours, config_name, dtype)
    contents = [operands(CAPTURED, dtype, layout, generator) for _ in range(3)]
    a, b, out = (
        lay_out(tensor, tensor.dtype, order, pad=pad) for tensor, order in zip(contents[0], layout + "n", strict=True)
    )
    for _ in range(2):
        graph = captured(lambda: ours.matmul(a, b, out=out))
        for new_a, new_b, want in contents:
            a.copy_(new_a)
            b.copy_(new_b)
            graph.replay()
            assert torch.equal(out, want)


@pytest.mark.parametrize(("config_name", "dtype"), found("partial", "fp16")[:3])
def test_two_graphs_at_once(
    prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str
) -> None:
    """Graphs that were captured on one stream and replay on two have workspaces of their own."""
    ours = prefer(config_name)
    origin = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    work = [operands(CAPTURED, dtype, layout_of(ours, config_name, dtype), generator) for _ in streams]
    outs = [[torch.empty_like(want) for _ in range(20)] for _, _, want in work]

    def products(number: int) -> None:
        a, b, _ = work[number]
        for out in outs[number]:
            ours.matmul(a, b, out=out)

    graphs = [captured(lambda number=number: products(number), origin) for number in range(2)]  # type: ignore[misc]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, _, want), results in zip(work, outs, strict=True):
        assert all(torch.equal(out, want) for out in results)


# ------------------------------------------------------------------------------------------------------ copies


@dataclass(frozen=True)
class Form:
    """Where an operand or result lies: `pad` elements between rows, `offset` elements from the start, `step` apart.

    A result may be `turned`: column-major.
    """

    pad: int = 0
    offset: int = 0
    step: int = 1
    turned: bool = False

    def lay_out(self, values: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
        """`values` as such a view."""
        if self.step == 1:
            return lay_out(values, dtype, layout, pad=self.pad, offset=self.offset)
        rows, cols = values.shape
        wide = torch.zeros(rows, cols, self.step, device=values.device, dtype=dtype)
        wide[..., 0] = values
        return wide[..., 0]

    def frame(self, m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A place for (m, n) results, and the whole memory that it is in, filled with -7."""
        if self.turned:
            out, memory = replace(self, turned=False).frame(n, m, dtype)
            return out.T, memory
        pitch = (n + 31) // 16 * 16 * self.step + self.pad
        memory = torch.full((m + 2, pitch), -7.0, device="cuda").to(dtype)
        return memory[1 : m + 1, self.offset :: self.step][:, :n], memory


ALIGNED, SHIFTED, RAGGED, APART = Form(), Form(pad=16, offset=1), Form(pad=3), Form(step=2)
TURNED, RAGGED_TURNED = Form(turned=True), Form(pad=3, turned=True)
FORMS = [
    (SHIFTED, ALIGNED, ALIGNED),
    (ALIGNED, RAGGED, ALIGNED),
    (ALIGNED, ALIGNED, SHIFTED),
    (RAGGED, SHIFTED, RAGGED),
    (APART, RAGGED, APART),
    (ALIGNED, APART, RAGGED),
    (ALIGNED, ALIGNED, TURNED),
    (SHIFTED, ALIGNED, RAGGED_TURNED),
]


@pytest.fixture
def allow_tf32() -> Iterator[Callable[[], None]]:
    """Lets fp32 products run in tf32 until the test ends. `monkeypatch` cannot take this attribute back."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield lambda: setattr(settings, "fp32_precision", "tf32")
    settings.fp32_precision = before


of_every_config = pytest.mark.parametrize(
    ("config_name", "dtype"),
    found("product", "fp16", "bf16", "fp32", "tf32", "fp8e4", "int8") + found("partial", "fp16", "fp32", "fp8e4"),
)


@of_every_config
def test_operands_that_are_not_aligned(
    prefer: Callable[[str], Library],
    generator: torch.Generator,
    allow_tf32: Callable[[], None],
    config_name: str,
    dtype: str,
) -> None:
    """Copies in every layout and for each operand: the product is exact, and nothing beside the result is written."""
    ours, kind, output = prefer(config_name), torch_dtype(dtype), torch_dtype(DTYPES[dtype].output)
    if dtype == "tf32":
        if layout_of(ours, config_name, dtype) == "tn":
            pytest.skip("copies of tf32 operands lie along K, and this config takes operands across it alone")
        allow_tf32()
    invariant = is_for_invariance(ours, config_name)
    sizes = [(137, 208, 2560)] if invariant else [(137, 203, 331), (256, 272, 528)]  # of few columns, with slices
    taken = set()
    for (m, n, k), layout, forms in itertools.product(sizes, LAYOUTS, FORMS):
        a, b = integers(m, n, k, dtype, output, generator=generator)
        form_a, form_b, form_c = forms
        x, y = form_a.lay_out(a, kind, layout[0]), form_b.lay_out(b, kind, layout[1])
        out, memory = form_c.frame(m, n, output)
        kernel, plan = chosen(ours, x, y, out=out, batch_invariant=invariant)
        taken.add(kernel.config_name)
        ours.matmul(x, y, out=out, batch_invariant=invariant)
        assert torch.equal(out, (a @ b).to(output)), (layout, forms, kernel.name, plan)
        out.fill_(-7)
        assert (memory == -7).all(), (layout, forms, kernel.name, plan)
    assert config_name in taken, taken


@pytest.mark.parametrize("dtype", ["fp16", "tf32", "fp8e4", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_with_copies(
    lib: Library, generator: torch.Generator, allow_tf32: Callable[[], None], layout: str, dtype: str
) -> None:
    """Matrices of a batch that lie anywhere, a B that all share, and results among others: all exact, by copies too."""
    kind, output = torch_dtype(dtype), torch_dtype(DTYPES[dtype].output)
    if dtype == "tf32":
        allow_tf32()
    copied = 0
    for (m, n, k), shared, gap in itertools.product(((137, 203, 331), (256, 272, 528)), (False, True), (0, 3)):
        a, b = integers(m, n, k, dtype, output, generator=generator, batch=(5,))
        b = b[:1] if shared else b
        x, y = lay_out(a, kind, layout[0], pad=gap, offset=gap), lay_out(b, kind, layout[1], pad=gap, offset=gap)
        y = y.expand(5, k, n)
        memory = torch.full((5, m + 2, n + gap), -7.0, device="cuda").to(output)
        out = memory[:, 1 : m + 1, :n]
        copied += bool(chosen(lib, x, y, out=out)[1].copies)
        lib.matmul(x, y, out=out)
        assert torch.equal(out, (a @ b).to(output)), (m, n, k, shared, gap)
        out.fill_(-7)
        assert (memory == -7).all(), (m, n, k, shared, gap)
    assert copied


# Bytes from a cache line to A and to B.
WITHIN_LINES = [(16, 48), (48, 112), (112, 64), (80, 80), (96, 48), (0, 16)]


@of_every_config
def test_operands_within_cache_lines(
    prefer: Callable[[str], Library],
    generator: torch.Generator,
    allow_tf32: Callable[[], None],
    config_name: str,
    dtype: str,
) -> None:
    """Steps that begin before K, so that boxes lie on lines: products are exact, with NaN before the operands."""
    ours, kind, output = prefer(config_name), torch_dtype(dtype), torch_dtype(DTYPES[dtype].output)
    if is_for_invariance(ours, config_name):
        pytest.skip("only under batch_invariant, where no kernel begins before K")
    if dtype == "tf32":
        allow_tf32()
    line, vector = LINE_BYTES // kind.itemsize, VECTOR_BYTES // kind.itemsize
    m, n, k = 128, 384, 9 * max(line, 128) + vector
    taken = set()
    for layout, (off_a, off_b) in itertools.product(LAYOUTS, WITHIN_LINES):
        a, b = integers(m, n, k, dtype, output, generator=generator)
        pads = [line - vector if along_k else 0 for along_k in (layout[0] == "n", layout[1] == "t")]  # whole lines
        x = lay_out(a, kind, layout[0], pad=pads[0], offset=off_a // kind.itemsize)
        y = lay_out(b, kind, layout[1], pad=pads[1], offset=off_b // kind.itemsize)
        kernel, plan = chosen(ours, x, y)
        taken.add(kernel.config_name)
        assert torch.equal(ours.matmul(x, y), (a @ b).to(output)), (layout, off_a, off_b, kernel.name, plan)
    assert config_name in taken, taken


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "fp8e4"])
def test_large_operands_that_are_not_aligned(lib: Library, generator: torch.Generator, layout: str, dtype: str) -> None:
    """What the packs themselves choose for large odd sizes is exact."""
    if not config_names(lib, "product", dtype):
        pytest.skip(f"this GPU has no kernels for {dtype}")
    kind, output = torch_dtype(dtype), torch_dtype(DTYPES[dtype].output)
    for shape in ((1023, 1025, 1027), (2049, 1100, 3001)):
        a, b = integers(*shape, dtype, output, generator=generator)
        assert torch.equal(lib.matmul(lay_out(a, kind, layout[0]), lay_out(b, kind, layout[1])), (a @ b).to(output))


@pytest.mark.parametrize(("config_name", "dtype"), found("product", "fp32") + found("partial", "fp32"))
def test_a_turned(lib: Library, tmp_path: Path, generator: torch.Generator, config_name: str, dtype: str) -> None:
    """fp32 operands that both lie along K, with a copy of A along M: exact, and with the bits of A as it lies."""
    kernels = lib.pack_for(0).manifest.kernels
    fma = [kernel for kernel in kernels if (kernel.family, kernel.vector_bytes) == ("fma", 16)]
    if config_name not in {kernel.config_name for kernel in fma if kernel.layout == "tt"}:
        pytest.skip("A is turned for aligned kernels of family fma in layout tt")
    as_it_lies = next(kernel.config_name for kernel in fma if (kernel.role, kernel.layout) == ("product", "nt"))
    ours = preferring(lib, config_name, tmp_path, splits={}, layout="tt")
    other = preferring(lib, as_it_lies, tmp_path, splits={}, layout="nt")
    sliced = config_name.endswith("_split")
    for shape in ((64, 96, 8192),) if sliced else ((136, 204, 332), (1024, 520, 1000)):
        a, b, want = operands(shape, dtype, "nt", generator)
        kernel, plan = chosen(ours, a, b)
        assert (kernel.config_name, kernel.layout, plan.copies, plan.split > 1) == (config_name, "tt", COPY_A, sliced)
        assert torch.equal(ours.matmul(a, b), want), (kernel.name, plan)
        if not sliced:
            kernel, plan = chosen(other, a, b)
            assert (kernel.layout, plan.copies, plan.split) == ("nt", 0, 1)
            a.copy_(torch.randn(a.shape, generator=generator, device="cuda"))
            assert torch.equal(ours.matmul(a, b), other.matmul(a, b)), (kernel.name, plan)


# ------------------------------------------------------------------------------------- pdl launches


@dataclass(frozen=True)
class Chain:
    """Launches each of which needs what the ones before have done: the state at first, and link number `i`."""

    start: tuple[torch.Tensor, ...]
    link: Callable[[Library | Invariant, tuple[torch.Tensor, ...], int], object]

    def run(
        self, libraries: Sequence[Library | Invariant], state: tuple[torch.Tensor, ...], after: Callable[[], object]
    ) -> None:
        """All links from the start, by the libraries in turn, with `after` called after each."""
        for tensor, first in zip(state, self.start, strict=True):
            tensor.copy_(first)
        for number in range(LINKS):
            self.link(libraries[number % len(libraries)], state, number)
            after()


def rotations(count: int, size: int, order: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Orthogonal matrices: no error in a chain of products fades."""
    noise = torch.randn(count, size, size, generator=generator, device="cuda")
    return [lay_out(matrix, torch.float16, order) for matrix in torch.linalg.qr(noise)[0]]


def chains(m: int, n: int, layout: str, generator: torch.Generator) -> dict[str, Chain]:
    """Chains over matrices of (m, n); what is no result of a link lies as `layout` says.

    Every link reads what the last one wrote and overwrites what that one read. Nothing that goes wrong is forgotten:
    the state is turned or added to, never scaled down.
    """
    left, right = rotations(4, m, layout[0], generator), rotations(4, n, layout[1], generator)
    x = torch.randn(m, n, generator=generator, device="cuda").half()
    long_a = lay_out(torch.randn(m, LONG, generator=generator, device="cuda"), torch.float16, layout[0])
    long_b = torch.randn(LONG, n, generator=generator, device="cuda") / LONG**0.5
    long_b = lay_out(long_b, torch.float16, layout[1])
    thin = [torch.randn(m, 32, generator=generator, device="cuda").half() for _ in range(3)]
    wide = torch.randn(32, LONG, generator=generator, device="cuda").half() / 8

    def first_operand(ours: Library | Invariant, state: tuple[torch.Tensor, ...], i: int) -> None:
        ours.matmul(state[i % 2], right[i % 4], out=state[1 - i % 2])

    def second_operand(ours: Library | Invariant, state: tuple[torch.Tensor, ...], i: int) -> None:
        ours.matmul(left[i % 4], state[i % 2], out=state[1 - i % 2])

    def bias(ours: Library | Invariant, state: tuple[torch.Tensor, ...], i: int) -> None:
        ours.matmul(x, right[i % 4], bias=state[0], out=state[0])

    def beside_torch(ours: Library | Invariant, state: tuple[torch.Tensor, ...], i: int) -> None:
        ours.matmul(state[i % 2], right[i % 4], out=state[1 - i % 2])
        state[i % 2].fill_(float("nan"))  # what the product has read
        if i % 3 == 0:
            torch.sub(x, state[1 - i % 2], out=state[i % 2])
            state[1 - i % 2].copy_(state[i % 2])

    def operand_overwritten(ours: Library | Invariant, state: tuple[torch.Tensor, ...], i: int) -> None:
        operand, total, part = state
        ours.matmul(operand, long_b, out=part)
        ours.matmul(thin[i % 3], wide, out=operand)  # soon done, and written where the product before it still reads
        if i % 2:
            total.add_(part)
        else:
            ours.matmul(part, right[i % 4], bias=total, out=total)

    empty = torch.zeros_like(x)
    return {
        "first operand": Chain((x, empty), first_operand),
        "second operand": Chain((x, empty), second_operand),
        "bias": Chain((x,), bias),
        "beside torch": Chain((x, empty), beside_torch),
        "operand overwritten": Chain((long_a, empty, empty), operand_overwritten),
    }


@pytest.mark.parametrize(("config_name", "dtype"), found("product", "fp16") + found("partial", "fp16"))
def test_chains(prefer: Callable[[str], Library], generator: torch.Generator, config_name: str, dtype: str) -> None:
    """Back to back, in a graph and without, chains give the bits that they give with a wait after every link.

    A kernel that was started early and does not wait where it must reads or overwrites what is not ready.
    """
    ours = prefer(config_name)
    layout = layout_of(ours, config_name, dtype)
    a, b, _ = operands((256, 512, LONG), dtype, layout, generator)
    kernel, plan = chosen(ours, a, b, batch_invariant=is_for_invariance(ours, config_name))
    assert (kernel.config_name, plan.pdl) == (config_name, kernel.pdl)
    check_chains([Invariant(ours) if is_for_invariance(ours, config_name) else ours], layout, generator)


def test_chains_of_all_schedules(prefer: Callable[[str], Library], lib: Library, generator: torch.Generator) -> None:
    """The same with every fifth config in turn (each is a library of its own): each waits for any other."""
    names = [name for role in ("product", "partial") for name in config_names(lib, role, "fp16")]
    names = [name for name in names if not is_for_invariance(lib, name)][::5]
    check_chains([prefer(name) for name in names], "nt", generator)
    check_chains([prefer(name) for name in names[::-1]], "nn", generator)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chains_of_copies(lib: Library, generator: torch.Generator, layout: str) -> None:
    """The same with rows that are not aligned: a copy of A, one of B beside it, and the product that waits for both."""
    early = set()
    for m, n in ODD_CHAINS:
        a, b, _ = operands((m, n, n), "fp16", layout, generator)
        plan = chosen(lib, a, b)[1]
        early.add((plan.copies & (COPY_A | COPY_B), plan.pdl))
    assert (COPY_A | COPY_B, True) in early
    check_chains([lib], layout, generator, ODD_CHAINS)


@dataclass(frozen=True)
class Invariant:
    """A library whose products are all `batch_invariant`."""

    lib: Library

    def matmul(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        """As that of the library."""
        return self.lib.matmul(*operands, batch_invariant=True, **options)


def is_for_invariance(lib: Library, config_name: str) -> bool:
    """Whether only `batch_invariant` takes the kernels of a config."""
    return any(for_invariance(k) for k in lib.pack_for(0).manifest.kernels if k.config_name == config_name)


def check_chains(
    libraries: Sequence[Library | Invariant],
    layout: str,
    generator: torch.Generator,
    sizes: tuple[tuple[int, int], ...] = CHAINS,
) -> None:
    """Compares chains back to back with the same after a wait for every link."""
    for m, n in sizes:
        for name, chain in chains(m, n, layout, generator).items():
            want, state = (tuple(tensor.clone() for tensor in chain.start) for _ in range(2))

            def hurry(chain: Chain = chain, state: tuple[torch.Tensor, ...] = state) -> None:
                chain.run(libraries, state, lambda: None)

            chain.run(libraries, want, torch.cuda.synchronize)
            assert any(tensor.isfinite().all() for tensor in want), (name, m, n)
            for work in (hurry, *[captured(hurry).replay] * 3):
                work()
                torch.cuda.synchronize()
                equal = [
                    torch.equal(x.nan_to_num(nan=9.0), y.nan_to_num(nan=9.0)) for x, y in zip(state, want, strict=True)
                ]
                assert all(equal), (name, m, n, equal)
