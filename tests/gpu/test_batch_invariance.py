"""`batch_invariant` on a GPU: the bits of a row do not depend on other rows, their number, or the operands' places."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import aotmm
import aotmm.nn
from aotmm.problem import SPLITS
from aotmm.runtime.launcher import Plan
from aotmm.runtime.library import Library

LIMIT_S = 600
SEED = 20261125
ROWS = (*range(1, 18), 31, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096, 8192)
MOST = max(ROWS)
PROBLEMS, PLACED, GRAPHS, COMPILED = 60, 30, 6, 4
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
# Types of A, B and the result; whether fp32 may be tf32, and fp8 sums fast.
TYPES = [
    (torch.float16, torch.float16, torch.float16, False),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float16, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, torch.float32, False),
    (torch.float32, torch.float32, torch.float32, False),
    (torch.float32, torch.float32, torch.float32, True),
    (E4, E4, torch.bfloat16, False),
    (E4, E4, torch.bfloat16, True),
    (E4, E4, torch.float16, False),
    (E5, E5, torch.float16, True),
    (E4, E5, torch.bfloat16, False),
    (E5, E4, torch.float16, True),
    (torch.int8, torch.int8, torch.int32, False),
]
ACTIVATIONS = (None, "relu", ("leaky_relu", 0.125), "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
LAYERS = [(256, 4096), (512, 8192), (1024, 4096), (1152, 896), (128, 16384), (768, 3072), (896, 4864), (1536, 7168)]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Drawn:
    """A problem without its rows: types, sizes, B's memory order and the epilogue."""

    types: tuple[torch.dtype, torch.dtype, torch.dtype, bool]
    N: int
    K: int
    layout_b: str
    activation: Any
    bias: str  # "", "vector" or "matrix"
    scales: str  # "", "one" or "rows"

    @property
    def tf32(self) -> bool:
        """Whether fp32 may be rounded to tf32."""
        return self.types[0] is torch.float32 and self.types[3]


def draw(source: random.Random, *, most: int = 2048) -> Drawn:
    """A random problem; sizes are log-uniform, half of them multiples of 16, some of them layers that K is cut for."""
    types = source.choice(TYPES)

    def size() -> int:
        found = round(16 * float((most / 16) ** source.random()))
        return found if source.random() < 0.5 else max(16, found // 16 * 16)

    N, K = size(), size()
    if source.random() < 0.15:
        N, K = source.choice(LAYERS)
    integer = types[0] is torch.int8
    fp8 = types[0].itemsize == 1 and not integer
    return Drawn(
        types,
        N,
        K,
        source.choice("nt"),
        None if integer else source.choice((None, None, None, *ACTIVATIONS)),
        "" if integer else source.choice(("", "", "vector", "matrix")),
        "" if integer else source.choice(("one", "rows") if fp8 else ("", "", "", "one", "rows")),
    )


def numbers(rows: int, cols: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers of many magnitudes, so that sums in another order differ; of fp32 some are ties of tf32."""
    if dtype is torch.int8:
        return torch.randint(-128, 128, (rows, cols), device="cuda", dtype=torch.int8, generator=generator)
    found = torch.randn(rows, cols, device="cuda", generator=generator)
    found *= torch.randint(-4, 5, (rows, cols), device="cuda", generator=generator).float().exp2()
    if dtype is torch.float32:
        bits = found.view(torch.int32)
        bits[:, ::7] = bits[:, ::7] & ~0x1FFF | 0x1000
    return found.to(dtype)


def laid_out(values: torch.Tensor, layout: str, *, pad: int = 0, offset: int = 0) -> torch.Tensor:
    """The matrix in memory that is NaN (or 127) around it: rows ("n") or columns ("t"), padded, moved by `offset`."""
    rows, cols = values.shape if layout == "n" else values.T.shape
    around = float("nan") if values.is_floating_point() else 127.0
    whole = torch.full((rows * (cols + pad) + offset,), around, device="cuda").to(values.dtype)
    view = whole[offset:].view(rows, cols + pad)[:, :cols]
    view = view if layout == "n" else view.T
    view.copy_(values)
    return view


class Product:
    """A drawn problem with operands of the most rows, and its results for some of them."""

    def __init__(self, lib: Library, drawn: Drawn, generator: torch.Generator) -> None:
        self.lib, self.drawn = lib, drawn
        dtype_a, dtype_b, self.output, self.fast = drawn.types
        self.a = numbers(MOST, drawn.K, dtype_a, generator)
        self.b = laid_out(numbers(drawn.K, drawn.N, dtype_b, generator), drawn.layout_b)
        if dtype_a.is_floating_point:
            self.a.view(_BITS[dtype_a.itemsize])[5::11] = (
                torch.tensor(-0.0).to(dtype_a).view(_BITS[dtype_a.itemsize]).cuda()
            )
        self.bias = {
            "": None,
            "vector": torch.randn(drawn.N, device="cuda", generator=generator).to(self.output),
            "matrix": torch.randn(MOST, drawn.N, device="cuda", generator=generator).to(self.output)
            if drawn.bias == "matrix"
            else None,
        }[drawn.bias]
        count_a, count_b = (MOST, drawn.N) if drawn.scales == "rows" else (1, 1)
        self.scales = (
            (
                torch.rand(count_a, 1, device="cuda", generator=generator),
                torch.rand(1, count_b, device="cuda", generator=generator),
            )
            if drawn.scales
            else (None, None)
        )

    def __call__(
        self, first: int, count: int, place: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Rows `first` to `first + count` of the result, multiplied without the others."""
        rows = slice(first, first + count)
        scale_a, scale_b = self.scales
        a = self.a[rows] if place is None else place(self.a[rows])
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32" if self.drawn.tf32 else "ieee"
        try:
            return self.lib.matmul(
                a,
                self.b,
                bias=self.bias if self.drawn.bias != "matrix" or self.bias is None else self.bias[rows],
                activation=self.drawn.activation,
                scale_a=scale_a[rows] if scale_a is not None and self.drawn.scales == "rows" else scale_a,
                scale_b=scale_b,
                out_dtype=self.output,
                fast_accum=self.fast and self.a.itemsize == 1,
                batch_invariant=True,
            )
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers: NaN equals itself, and -0 differs from 0."""
    return tensor.contiguous().view(_BITS[tensor.itemsize])


def differing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How many elements differ, on the GPU."""
    return (bits(x) != bits(y)).sum()


def compared(lib: Library, count: int, seed: int) -> Iterator[tuple[Product, torch.Tensor, torch.Tensor]]:
    """`count` random problems, results of the most rows, and how many elements of them differ by each of ROWS."""
    source = random.Random(seed)  # noqa: S311 - no secret
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        product = Product(lib, draw(source), generator)
        whole = product(0, MOST)
        yield product, whole, torch.stack([differing(product(0, rows), whole[:rows]) for rows in ROWS])


def failures(lib: Library, count: int, seed: int = SEED) -> list[str]:
    """Those of `count` random problems whose rows have other bits in a product of another number of rows."""
    return [
        f"{product.drawn}: {dict(zip(ROWS, wrong.tolist(), strict=True))}"
        for product, _, wrong in compared(lib, count, seed)
        if int(wrong.sum())
    ]


def digest(tensor: torch.Tensor) -> int:
    """A number that two tensors share only if their bits are, but for one chance in millions."""
    weights = torch.arange(1, tensor.numel() + 1, device="cuda").view(tensor.shape)
    return int((bits(tensor).long() * (weights * 0x9E3779B1 % 1000003)).sum())


def every_other(values: torch.Tensor) -> torch.Tensor:
    """The matrix in every other column of one that is NaN."""
    rows, cols = values.shape
    whole = torch.full((rows, 2 * cols), float("nan") if values.is_floating_point() else 127.0, device="cuda")
    view = whole.to(values.dtype)[:, ::2]
    view.copy_(values)
    return view


def placements(source: random.Random) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Other places of A in memory; what lies around it is NaN."""
    odd = source.choice((1, 3, 5))
    return {
        "padded": lambda a: laid_out(a, "n", pad=16 // a.itemsize),
        "unaligned rows": lambda a: laid_out(a, "n", pad=odd),
        "unaligned": lambda a: laid_out(a, "n", offset=odd),
        "columns": lambda a: laid_out(a, "t"),
        "unaligned columns": lambda a: laid_out(a, "t", pad=odd, offset=1),
        "strided": every_other,
    }


def moved(lib: Library, count: int, seed: int = SEED) -> list[str]:
    """Those of `count` random problems whose rows change with their place, A's strides, NaN beside them or a batch."""
    source = random.Random(seed + 1)  # noqa: S311 - no secret
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    found = []
    for _ in range(count):
        drawn = draw(source, most=1024)
        product = Product(lib, drawn, generator)
        whole = product(0, MOST)
        wrong = {}
        for rows in (1, 7, 64, 200, 1000):
            first = source.randrange(MOST - rows)
            part = slice(first, first + rows)
            wrong[f"{rows} rows from {first}"] = differing(product(first, rows), whole[part])
            for name, place in placements(source).items():
                wrong[f"{rows} rows, {name}"] = differing(product(first, rows, place), whole[part])
        if product.a.is_floating_point():
            kept, nan = product.a, torch.full(product.a.shape, float("nan"), device="cuda").to(product.a.dtype)
            product.a = nan
            bits(nan)[100:129] = bits(kept)[100:129]
            wrong["NaN beside"] = differing(product(0, 1000)[100:129], whole[100:129])
            wrong["NaN beside few"] = differing(product(98, 33)[2:31], whole[100:129])
            product.a = kept
        if drawn.scales != "rows":
            wrong |= batches(product, whole)
        if sum(int(number) for number in wrong.values()):
            found.append(f"{drawn}: { {name: int(number) for name, number in wrong.items() if int(number)} }")
    return found


def batches(product: Product, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """What differs between the product and members of batches that equal it."""
    wrong, drawn, first, rows = {}, product.drawn, 64, 48
    kept = product.a, product.b, product.bias
    by_columns = drawn.layout_b == "t"  # B's memory order stays: the order of sums depends on it
    lines = kept[1].T if by_columns else kept[1]
    for count in (2, 5):
        part = slice(first, first + count * rows)
        a = kept[0][part].view(count, rows, drawn.K)
        aligned = lines.expand(count, *lines.shape).clone(memory_format=torch.contiguous_format)
        interleaved = torch.stack([bits(lines)] * count, -1).permute(2, 0, 1).view(kept[1].dtype)
        for name, b in {
            "batch with one B": kept[1],
            "batch": aligned.mT if by_columns else aligned,
            "unaligned batch": interleaved.mT if by_columns else interleaved,
        }.items():
            product.a, product.b = a, b
            if drawn.bias == "matrix":
                assert kept[2] is not None
                product.bias = kept[2][part].view(count, rows, drawn.N)
            got = product(0, count)
            wrong[f"{name} of {count}"] = differing(got.reshape(count * rows, drawn.N), whole[part])
        product.a, product.b, product.bias = kept
    return wrong


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """The setting for fp32 as it was."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_rows(lib: Library) -> None:
    """A row has the same bits in a product of any number of rows, for random types, sizes, layouts and epilogues."""
    assert failures(lib, PROBLEMS) == []


def test_places(lib: Library) -> None:
    """It has the same bits at any place, from any strides of A, beside NaN, and in a batch."""
    assert moved(lib, PLACED) == []


def classes(
    lib: Library, types: tuple[torch.dtype, torch.dtype, torch.dtype, bool], layout: str, N: int, K: int
) -> Any:
    """The results of every kernel that takes such operands, by (order, slices): kernels by digests of their bits."""
    generator = torch.Generator("cuda").manual_seed(SEED + N + K)
    drawn = Drawn(types, N, K, layout[1], None, "", "one" if types[0] in (E4, E5) else "")
    product = Product(lib, drawn, generator)
    a = laid_out(product.a[:300], layout[0])
    out = torch.empty(300, N, device="cuda", dtype=types[2])
    torch.backends.cuda.matmul.fp32_precision = "tf32" if drawn.tf32 else "ieee"
    scale_a, scale_b = product.scales
    problem = lib.problem(
        a, product.b, out=out, scale_a=scale_a, scale_b=scale_b, fast_accum=types[3] and types[0] in (E4, E5)
    )
    launcher, stream = lib.launcher(0), torch.cuda.current_stream().cuda_stream
    device = launcher.device(0)
    workspace = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    found: dict[tuple[str, int], dict[int, list[str]]] = {}
    for number, kernel in enumerate(launcher.kernels):
        if kernel.role not in ("product", "partial") or K % (128 * kernel.config.slices):
            continue
        ways = (problem, replace(problem, batch_invariant=True))  # some kernels are for the latter alone
        plan = next(filter(None, (launcher.check(way, device, number).plan for way in ways)), None)
        if plan is None:
            continue
        splits = [s for s in SPLITS if s <= 8 and K % (128 * s) == 0] if kernel.role == "partial" else [1]
        for split in splits:
            out.fill_(0)
            which = Plan(number, split=split, copies=plan.copies, workspace_bytes=workspace.numel())
            launcher.run(which, problem, 0, stream, workspace.data_ptr())
            slices = split * kernel.config.slices
            found.setdefault((str(kernel.order), slices), {}).setdefault(digest(out), []).append(kernel.name)
    return found


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(str(part) for part in types).replace("torch.", ""))
def test_orders(lib: Library, types: tuple[torch.dtype, torch.dtype, torch.dtype, bool]) -> None:
    """Kernels of one order, in as many slices, give the same bits in every layout."""
    for layout in ("nn", "nt", "tn", "tt"):
        for N, K in ((512, 4096), (272, 1040)):
            for order, digests in classes(lib, types, layout, N, K).items():
                assert len(digests) == 1, (order, layout, N, K, digests)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_zeros_have_one_sign(lib: Library, sign: float) -> None:
    """Sums of -0 alone, or of 0, have the same bits in slices side by side, in a cluster and one after another."""
    b = torch.full((1024, 4096), sign, device="cuda", dtype=torch.float16).T
    a = torch.full((8192, 4096), -0.0, device="cuda", dtype=torch.float16)
    odd = laid_out(a[:100], "n", pad=1)
    whole = lib.matmul(a, b, batch_invariant=True)
    for rows in (1, 16, 64, 100, 700):
        assert not int(differing(lib.matmul(a[:rows], b, batch_invariant=True), whole[:rows])), rows
    assert not int(differing(lib.matmul(odd, b, batch_invariant=True), whole[:100]))


def test_graph(lib: Library) -> None:
    """A replayed graph gives the bits of the product alone."""
    source = random.Random(SEED + 2)  # noqa: S311 - no secret
    generator = torch.Generator("cuda").manual_seed(SEED + 2)
    for _ in range(GRAPHS):
        product = Product(lib, draw(source), generator)
        whole = product(0, MOST)
        for rows in (3, 200):
            product(0, rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = product(0, rows)
            got.zero_()
            graph.replay()
            assert int(differing(got, whole[:rows])) == 0, product.drawn


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_compiled(lib: Library) -> None:
    """Code compiled for any number of rows gives the bits of eager mode for each."""
    pytest.importorskip("triton", reason="Inductor needs Triton for what is not a product")
    torch._dynamo.reset()
    for N, K in ((512, 4096), (1000, 640), (4096, 4096), (96, 40))[:COMPILED]:
        b = torch.randn(N, K, device="cuda", dtype=torch.bfloat16).T
        a = torch.randn(MOST, K, device="cuda", dtype=torch.bfloat16)
        whole = lib.matmul(a, b, batch_invariant=True)
        compiled = torch.compile(lambda x, b=b: lib.matmul(x, b, batch_invariant=True), fullgraph=True, dynamic=True)
        for rows in (2, 17, 129, 1000, MOST):
            assert int(differing(compiled(a[:rows]), whole[:rows])) == 0, (N, K, rows)


def test_gradients(lib: Library) -> None:
    """The gradient of a row of A has the same bits in every batch."""
    for dtype, N, K in ((torch.bfloat16, 1024, 4096), (torch.float16, 4096, 512), (torch.float32, 200, 300)):
        b = torch.randn(K, N, device="cuda", dtype=dtype, requires_grad=True)
        a = torch.randn(1000, K, device="cuda", dtype=dtype)
        gradient = torch.randn(1000, N, device="cuda", dtype=dtype)
        found = []
        for rows in (1000, 7, 1, 129):
            x = a[:rows].clone().requires_grad_()
            lib.matmul(x, b, batch_invariant=True).backward(gradient[:rows])  # type: ignore[no-untyped-call]
            assert x.grad is not None
            found.append(x.grad)
        assert all(int(differing(part, found[0][: len(part)])) == 0 for part in found)


class Model(torch.nn.Module):
    """A small language model of torch's own modules."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
        self.embedding = torch.nn.Embedding(1000, 512)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(512, 1000)
        self.to("cuda", dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) to (batch, tokens, 1000)."""
        out: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return out


@pytest.mark.filterwarnings("ignore")  # torch's own, of overridden kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_model(dtype: torch.dtype) -> None:
    """In the override a prompt's logits are the same bits alone and in a batch of 64, in training mode too."""
    torch.manual_seed(1)
    model = Model(dtype)
    tokens = torch.randint(1000, (64, 33), device="cuda")
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        aotmm.override(batch_invariant=True) as used,
    ):
        for mode in (torch.no_grad(), nullcontext()):
            with mode:
                assert int(differing(model(tokens[5:6])[0], model(tokens)[5])) == 0
        assert "0 by torch" in repr(used)


def test_linear() -> None:
    """A layer with the flag gives the bits of the flag."""
    layer = aotmm.nn.Linear(4096, 512, device="cuda", dtype=torch.float16, batch_invariant=True)
    x = torch.randn(300, 4096, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        assert int(differing(layer(x)[:3], layer(x[:3]))) == 0
