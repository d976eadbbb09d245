"""Functions of a user's own on this GPU: examples/own against torch, with any alignment, grids, streams and graphs.

They need packs: aotmm build --kernel FILE.py:NAME ... --arch sm90 --out build/own, for the three of examples/own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aotmm
from aotmm.errors import ArtifactError, NoKernelError
from aotmm.runtime.library import Library

PACKS = Path(__file__).parents[2] / "build" / "own"
NAMES = ("add_kernel", "softmax_kernel", "layer_norm_kernel")


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
