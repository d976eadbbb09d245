"""Functions of a user's own on this GPU: examples/own against torch, with any alignment, grids, streams and graphs.

They need packs: aotmm build --kernel FILE.py:NAME ... --arch sm90 --out build/own, for the kernels in examples/own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import aotmm
from aotmm.errors import ArtifactError, NoKernelError
from aotmm.pack.function_table import write
from aotmm.runtime.library import Library
from aotmm.tune.functions import tune
from tests.gpu.corpus import DIFFER, EQUAL, KINDS, compare, summary

PACKS = Path(__file__).parents[2] / "build" / "own"
NAMES = (
    *("add_kernel", "softmax_kernel", "layer_norm_kernel", "matmul_kernel", "attention_kernel"),
    *("descriptor_matmul_kernel", "double_kernel"),
)


@pytest.fixture(scope="module")
def own() -> Library:
    """The packs of examples/own."""
    try:
        found = aotmm.load(PACKS)
    except ArtifactError as error:
        pytest.skip(str(error))
    missing = [name for name in NAMES if not any(name in pack.head.functions for pack in found.packs)]
    if missing:
        pytest.skip(f"{PACKS} has no {', '.join(missing)}")
    return found


@pytest.mark.parametrize("count", [1, 1000, 1024, 4096, 1_000_003])
@pytest.mark.parametrize("offset", [0, 1])
def test_add(own: Library, count: int, offset: int) -> None:
    """Sums are exact for any size and alignment, in the pack's grid, in one that is said, and in a computed one."""
    x, y = (torch.randn(count + offset, device="cuda")[offset:] for _ in range(2))
    add = own["add_kernel"]
    for launch in (add, add[(-(-count // 1024),)], add[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)]):
        out = torch.full((count + offset + 8,), 7.0, device="cuda")
        launch(x, y, out[offset : offset + count], count)
        assert torch.equal(out[offset : offset + count], x + y)
        assert (out[:offset] == 7).all()
        assert (out[offset + count :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "cols", "block"), [(1, 1, 256), (33, 256, 256), (500, 1000, 1024), (7, 777, 1024)])
def test_softmax(own: Library, dtype: torch.dtype, rows: int, cols: int, block: int) -> None:
    """Rows are torch's in float64, up to the last bits of the type, and nothing beside them is written."""
    x = torch.randn(rows, cols + 5, device="cuda").mul(4).to(dtype)[:, :cols]
    whole = torch.full((rows, cols + 3), 7.0, device="cuda", dtype=dtype)
    out = whole[:, :cols]
    own["softmax_kernel"](out, x, out.stride(0), x.stride(0), rows, cols, BLOCK=block)
    error = (out.double() - x.double().softmax(1)).abs().max().item()
    assert error < (1e-3 if dtype is torch.float16 else 1e-6)
    assert (whole[:, cols:] == 7).all()


@pytest.mark.parametrize("warps", [None, 1, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm(own: Library, warps: int | None, with_bias: bool) -> None:  # noqa: FBT001 - an argument of a test
    """Each autotuned config, named or the first, normalises rows as torch does; a bias may be None."""
    x = torch.randn(100, 1500, device="cuda", dtype=torch.float16)
    weight, bias = torch.randn(1500, device="cuda"), torch.randn(1500, device="cuda")
    out = torch.empty_like(x)
    chosen = {} if warps is None else {"num_warps": warps}
    given = bias if with_bias else None
    own["layer_norm_kernel"][(100,)](x, out, weight, given, x.stride(0), 1500, 1e-5, **chosen)
    want = torch.nn.functional.layer_norm(x.float(), (1500,), weight, given, 1e-5)
    assert (out.float() - want).abs().max().item() < 2e-2


def drawn(rows: int, cols: int) -> torch.Tensor:
    """Small integers, whose sums of products are exact in fp16 up to 2048."""
    return torch.randint(-3, 4, (rows, cols), device="cuda").to(torch.float16)


@pytest.mark.parametrize("activation", ["", "leaky_relu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32), (200, 136, 80), (65, 33, 17)])
def test_matmul(own: Library, activation: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    """Products of fp16 and fp8 are exact, with an activation by name, by each config of @triton.autotune."""
    a, b = drawn(m, k).to(dtype), drawn(k, n).to(dtype)
    want = a.double() @ b.double()
    want = torch.where(want < 0, 0.01 * want, want) if activation else want
    for block in (64, 32):
        c = torch.full((m, n), 7.0, device="cuda", dtype=torch.float16)
        own["matmul_kernel"](a, b, c, m, n, k, k, n, n, ACTIVATION=activation, BLOCK_M=block)
        assert (c.double() - want).abs().max().item() <= (2**-6 if activation else 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_ctx", [1, 64, 333])
def test_attention(own: Library, causal: bool, n_ctx: int) -> None:  # noqa: FBT001 - an argument of a test
    """Each row is torch's attention in float64, for heads that end in the middle of a tile."""
    q, k, v = (torch.randn(3, n_ctx, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)
    grid = (-(-n_ctx // 32), 3)
    own["attention_kernel"][grid](q, k, v, out, 0.125, n_ctx, n_ctx * 64, 64, CAUSAL=causal)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    assert (out.double() - want).abs().max().item() < 4e-3


class Described(NamedTuple):
    """A descriptor of the caller, with the fields of Triton's TensorDescriptor."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 32), (200, 136, 80), (1, 8, 8)])
def test_descriptors_of_the_caller(own: Library, m: int, n: int, k: int) -> None:
    """A kernel takes matrices, or descriptors of them, through tensor maps of rows that are not contiguous, too."""
    wide, b = drawn(m, k + 16), drawn(k, n)
    a, want = wide[:, :k], wide[:, :k].double() @ b.double()
    for given in (a, Described(a, list(a.shape), list(a.stride()), [64, 32])):
        whole = torch.full((m, n + 8), 7.0, device="cuda", dtype=torch.float16)
        own["descriptor_matmul_kernel"](given, b, whole[:, :n])
        assert torch.equal(whole[:, :n].double(), want)
        assert (whole[:, n:] == 7).all()
    with pytest.raises(NoKernelError, match=r"b\.stride0=\d+ is not a multiple of 8"):
        own["descriptor_matmul_kernel"](a, drawn(k, n + 1)[:, :n], whole[:, :n])
    with pytest.raises(TypeError, match="takes a matrix of fp16"):
        own["descriptor_matmul_kernel"](a.float(), b, whole[:, :n])


@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (100, 72), (1, 4)])
def test_descriptors_of_the_kernel(own: Library, rows: int, cols: int) -> None:
    """Descriptors that a kernel makes lie in scratch memory, which comes from torch, also in a graph.

    Columns are whole 16 bytes: what Hopper's copy engine stores is (docs/own-kernels.md).
    """
    x = torch.randn(rows, 80, device="cuda")
    out = torch.full_like(x, 7)
    graph = torch.cuda.CUDAGraph()
    own["double_kernel"](out, x, rows, cols, 80)
    assert torch.equal(out[:, :cols], 2 * x[:, :cols])
    with torch.cuda.graph(graph):
        own["double_kernel"](out, x, rows, cols, 80)
    x.mul_(3)
    graph.replay()
    assert torch.equal(out[:, :cols], 2 * x[:, :cols])
    assert (out[:, cols:] == 7).all()


@pytest.mark.usefixtures("own")
def test_by_the_driver() -> None:
    """The driver alone, given the same images and arguments, leaves the same bits in memory."""
    names = ("add_kernel", "softmax_kernel", "layer_norm_kernel", "matmul_kernel", "double_kernel")
    found = compare([(PACKS, name) for name in names])
    results = {(row.name, kind): row.best(kind).result for row in found for kind in KINDS}
    # descriptors of memory that is not aligned are no use
    assert {each for each, result in results.items() if result != EQUAL} <= {("double_kernel", "generic")}, summary(
        found
    )
    assert DIFFER not in results.values(), summary(found)


def test_streams_and_graphs(own: Library) -> None:
    """Launches go to torch's current stream; a graph captures them, also a kernel's first use, and repeats them."""
    x, y, out = (torch.zeros(5000, device="cuda") for _ in range(3))
    add, graph = own["add_kernel"], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(x, y, out, 5000)
    x.fill_(2)
    y.fill_(3)
    assert (out == 0).all()
    graph.replay()
    assert (out == 5).all()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        x.fill_(4)
        add(x, y, out, 5000)
    side.synchronize()
    assert (out == 7).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # likewise, which begins with an empty one
def test_torch_op(own: Library) -> None:
    """torch.compile traces the op, Inductor keeps its operands as they are, and CUDA graphs repeat it."""
    add = own["add_kernel"].torch_op("aotmm_test::add")

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def scaled_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        add(x, y * 2, out, x.numel())
        return out + 1

    for _ in range(4):
        x, y = (torch.randn(3000, device="cuda") for _ in range(2))
        assert torch.equal(scaled_sum(x, y).clone(), x + y * 2 + 1)


def test_tuning(own: Library, tmp_path: Path) -> None:
    """Every variant that fits is right and timed; calls go by the table, at the measured sizes and between them."""
    calls, table = tmp_path / "calls.py", tmp_path / "table.json"
    calls.write_text(
        """
import torch
def layer_norm_kernel(launch):
    for n in (64, 4096):
        x, weight = torch.randn(256, n, device="cuda").half(), torch.randn(n, device="cuda")
        launch[(256,)](x, torch.empty_like(x), weight, weight.clone(), n, n, 1e-5)
"""
    )
    pack = own["layer_norm_kernel"].pack_for(0)
    found, left = tune(own, pack, ["layer_norm_kernel"], calls)
    assert left == []
    assert [row.sizes for row in found.measured] == [(64,), (4096,)]
    assert all(len(row.times) == 4 for row in found.measured), found
    table.write_bytes(write(found))
    tuned = aotmm.load(PACKS, table=table)["layer_norm_kernel"]
    x, weight = torch.randn(10, 80, device="cuda").half(), torch.randn(80, device="cuda")
    out = torch.empty_like(x)
    assert tuned.explain(x, out, weight, weight, 80, 80, 1e-5).chosen == found.measured[0].chosen
    tuned[(10,)](x, out, weight, weight, 80, 80, 1e-5)
    want = torch.nn.functional.layer_norm(x.float(), (80,), weight, weight, 1e-5)
    assert (out.float() - want).abs().max().item() < 2e-2


def test_errors(own: Library) -> None:
    """What no variant serves is refused before anything is launched; the GPU is as it was."""
    x = torch.ones(8, device="cuda")
    with pytest.raises(NoKernelError, match=r"add_kernel_special: n=2147483648 is not below 2147483648"):
        own["add_kernel"](x, x, x, 2**31)
    with pytest.raises(TypeError, match=r"x_ptr is \*fp16, it takes \*fp32"):
        own["add_kernel"](x.half(), x, x, 8)
    with pytest.raises(ValueError, match="layer_norm_kernel has no grid of its own"):
        own["layer_norm_kernel"](x.half(), x.half(), x, None, 8, 8, 1e-5)
    torch.cuda.synchronize()
