"""torch.compile, torch.export and Inductor's choice, down to the op that a stand-in for the kernels computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import aotmm
from aotmm.errors import NoKernelError
from aotmm.runtime.library import Library
from tests.runtime.stand_in import Call

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated", "ignore:.*LeafSpec")  # torch's own


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    """A product of a (..., 4) input with bias and activation."""

    def __init__(self, lib: Library) -> None:
        super().__init__()
        self.lib = lib
        self.weight = torch.nn.Parameter(torch.randn(5, 4))
        self.bias = torch.nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape (..., 5)."""
        return self.lib.matmul(x, self.weight.T, bias=self.bias, activation="gelu")


def gradients(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Result and gradients of one step."""
    x = x.clone().requires_grad_()
    y = layer(x)
    parameters = list(layer.parameters())  # type: ignore[attr-defined]
    return (y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *parameters]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layer(lib: Library, calls: list[Call], *, dynamic: bool) -> None:
    """Compiled without a graph break, a layer trains and infers as in eager mode, whatever the sizes."""
    layer = Layer(lib)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((3, 4), (6, 4), (5, 7, 4)):
        x = torch.randn(shape)
        for got, want in zip(gradients(compiled, x), gradients(layer, x), strict=True):
            torch.testing.assert_close(got, want)
        with torch.no_grad():
            calls.clear()
            torch.testing.assert_close(compiled(x), layer(x))
            assert [call.activation for call in calls] == [3, 3], "fused where nothing is recorded"


def test_sizes_do_not_recompile(lib: Library, calls: list[Call]) -> None:
    """With dynamic shapes a graph serves every size."""
    compiled = torch.compile(Layer(lib), fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(torch.randn(3, 7, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((5, 7, 4), (9, 6, 4), (33, 2, 4)):
            compiled(torch.randn(shape))
    assert len(calls) == 4


def graphs_of(function: Callable[..., Any], *arguments: torch.Tensor) -> list[str]:
    """The code of the graphs that AOTAutograd makes of `function`, forward and backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        found.append(graph.code)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    result = torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    if result.requires_grad:
        result.sum().backward()
    return found


@pytest.mark.usefixtures("calls")
def test_graphs_hold_the_hot_op(lib: Library) -> None:
    """Compilers get aotmm::mm alone: one in the forward, and one for each gradient, of views, in the backward."""
    forward, backward = graphs_of(Layer(lib), torch.randn(2, 3, 4, requires_grad=True))
    assert (forward.count("aotmm.mm.default"), backward.count("aotmm.mm.default")) == (1, 2)
    for code in (forward, backward):
        assert "aotmm.matmul" not in code
        assert "clone" not in code


@pytest.mark.usefixtures("calls")
def test_out_and_scales(lib: Library) -> None:
    """`out` and what has no gradient compile too."""
    a, b, out, scale = torch.randn(3, 4), torch.randn(4, 5), torch.empty(3, 5), torch.rand(3, 1)

    def into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        lib.matmul(a, b, out=out, scale_a=scale, activation=("leaky_relu", 0.2))
        return out + 1

    want = torch.nn.functional.leaky_relu(scale * (a @ b), 0.2)
    got = torch.compile(into, fullgraph=True, backend="aot_eager")(a, b, out, scale)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(got, want + 1)
    with pytest.raises(Exception, match="out= has no gradient"):
        torch.compile(into, fullgraph=True, backend="aot_eager")(a, b.clone().requires_grad_(), out, scale)


@pytest.mark.usefixtures("calls")
def test_compiled_transforms(lib: Library) -> None:
    """torch.func inside of torch.compile."""
    x, w = torch.randn(7, 3, 4), torch.randn(4, 5)

    def per_sample(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return product(x, w).sin().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))

    got = torch.compile(per_sample(lib.matmul), fullgraph=True, backend="aot_eager")(w, x)
    torch.testing.assert_close(got, per_sample(torch.matmul)(w, x))


@pytest.mark.usefixtures("calls")
def test_export(lib: Library) -> None:
    """An exported program has one op for the layer, any batch size, and the hot op once it is decomposed."""
    layer = Layer(lib)
    program = torch.export.export(layer, (torch.randn(2, 4),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"][
        -1
    ] == "aotmm.matmul.default"
    x = torch.randn(9, 4)
    torch.testing.assert_close(program.module()(x), layer(x))
    with torch.no_grad():
        lowered = torch.export.export(layer, (x,)).run_decompositions()
    targets = [str(node.target) for node in lowered.graph.nodes]
    assert targets.count("aotmm.mm.default") == 1
    assert "aotmm.matmul.default" not in targets


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_export_for_a_gpu(lib: Library, dtype: torch.dtype) -> None:
    """A program for a GPU is exported where there is none."""

    class Product(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return lib.matmul(a, b.mT)

    with FakeTensorMode(), torch.no_grad():
        a, b = (torch.empty(shape, device="cuda", dtype=dtype) for shape in ((2, 3, 4), (2, 5, 4)))
        program = torch.export.export(Product(), (a, b)).run_decompositions()
    (product,) = [node for node in program.graph.nodes if str(node.target) == "aotmm.mm.default"]
    value = product.meta["val"]
    want = torch.int32 if dtype is torch.int8 else dtype
    assert (value.shape, value.stride(), value.dtype) == ((2, 3, 5), (15, 5, 1), want)
    assert value.device.type == "cuda"


@pytest.mark.parametrize(
    ("a", "b", "shape", "strides"),
    [
        ((3, 4), (4, 5), (3, 5), (5, 1)),
        ((2, 3, 4), (2, 4, 5), (2, 3, 5), (15, 5, 1)),
        ((3, 4), (2, 4, 5), (2, 3, 5), (15, 5, 1)),
        ((2, 3, 4), (1, 4, 5), (2, 3, 5), (15, 5, 1)),
        ((0, 4), (4, 5), (0, 5), (5, 1)),
        ((3, 0), (0, 5), (3, 5), (5, 1)),
    ],
)
def test_fake_kernels(lib: Library, a: Any, b: Any, shape: Any, strides: Any) -> None:
    """Without memory, every op has the result's shape, strides and dtype, whatever the operands' strides."""
    assert lib.packs
    bias = torch.empty(5, device="meta")
    for layout in ("n", "t"):
        x, w = torch.empty(a, device="meta"), torch.empty(b, device="meta")
        if layout == "t":
            x, w = x.mT.contiguous().mT, w.mT.contiguous().mT
        for code, dtype in ((-1, torch.float32), (0, torch.float16)):
            c = torch.ops.aotmm.mm(x, w, bias, activation=1, out_dtype=code)
            assert (c.shape, c.stride(), c.dtype) == (shape, strides, dtype)
        c = torch.ops.aotmm.matmul(x, w, bias, activation="gelu", out_dtype=torch.bfloat16)
        assert (c.shape, c.stride(), c.dtype) == (shape, strides, torch.bfloat16)
        out = torch.empty(shape, device="meta")
        assert torch.ops.aotmm.mm.out(x, w, out=out) is out
    with pytest.raises(ValueError, match="inner sizes differ"):
        torch.ops.aotmm.mm(torch.empty(a, device="meta"), torch.empty(7, 5, device="meta"))


def test_order_in_memory_is_kept_by_inductor(lib: Library) -> None:
    """Inductor hands operands over in the order that they have in the graph, so that transposes stay views."""
    from torch._library.utils import get_layout_constraint_tag

    assert lib.packs
    for op in (torch.ops.aotmm.mm.default, torch.ops.aotmm.mm.out):
        assert get_layout_constraint_tag(op) is torch.Tag.needs_fixed_stride_order


@pytest.mark.usefixtures("calls")
def test_graphs_name_no_defaults(lib: Library) -> None:
    """A plain product has two arguments in a graph: each further one takes time in every call."""
    x, y, bias = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    assert "aotmm.mm.default(arg0_1, arg1_1)" in graphs_of(lib.matmul, x, y)[0]
    (code,) = graphs_of(lambda x, y, z: lib.matmul(x, y, bias=z), x, y, bias)
    assert "aotmm.mm.default(arg0_1, arg1_1, arg2_1)" in code


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("op", "options"),
    [("mm", {}), ("mm", {"activation": 3, "out_dtype": 0}), ("matmul", {}), ("matmul", {"activation": "gelu"})],
    ids=str,
)
def test_opcheck(lib: Library, op: str, options: dict[str, Any]) -> None:
    """torch.library.opcheck finds nothing wrong."""
    assert lib.packs
    overload = getattr(torch.ops.aotmm, op).default
    for requires_grad in (False, True) if op == "matmul" else (False,):
        arguments = (
            torch.randn(3, 4, requires_grad=requires_grad),
            torch.randn(4, 5),
            torch.randn(5).to(torch.float32),
        )
        torch.library.opcheck(overload, arguments, options)


def test_autocast(lib: Library) -> None:
    """Under autocast, operands of fp16, bf16 and fp32 are multiplied in the user's dtype; nothing else changes."""
    with FakeTensorMode():
        a, b, bias, batch = (torch.empty(shape, device="cuda") for shape in ((3, 4), (4, 5), (5,), (2, 4, 5)))
        codes = [tensor.to(torch.int8) for tensor in (a, b)]
        into = torch.empty(3, 5, device="cuda")
        for dtype in (torch.bfloat16, torch.float16):
            enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            torch.set_autocast_enabled("cuda", True)  # noqa: FBT003 - torch.autocast wants a GPU
            torch.set_autocast_dtype("cuda", dtype)
            try:
                for product in (lib.matmul, torch.ops.aotmm.matmul):
                    assert product(a, b, bias=bias).dtype is dtype
                    assert product(a.half(), batch.bfloat16(), bias=bias).dtype is dtype
                    assert product(a, b, bias=bias, out_dtype=torch.float32).dtype is torch.float32
                    assert product(*codes).dtype is torch.int32
                assert torch.ops.aotmm.mm(a, b, bias).dtype is dtype
                assert torch.ops.aotmm.mm(a, b, bias, out_dtype=2).dtype is torch.float32
                assert torch.ops.aotmm.mm(*codes).dtype is torch.int32
                assert lib.matmul(a, b, out=into).dtype is torch.float32
                assert torch.is_autocast_enabled("cuda")
            finally:
                torch.set_autocast_enabled("cuda", enabled)
                torch.set_autocast_dtype("cuda", before)
        assert lib.matmul(a, b).dtype is torch.float32


def test_max_autotune_is_opt_in_and_reversible() -> None:
    """Within `aotmm.max_autotune()`, and only there, Inductor has one more choice for torch.mm, by its name."""
    from torch._inductor import config
    from torch._inductor.select_algorithm import extern_kernels

    from aotmm.runtime.inductor import aotmm_mm

    assert config.external_matmul == []
    for _ in range(2):
        with aotmm.max_autotune():
            assert config.external_matmul == [aotmm_mm]
            assert vars(extern_kernels)[aotmm_mm.__name__] is aotmm_mm
        assert config.external_matmul == []
    double = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="aotmm multiplies CUDA"):
        aotmm_mm(double, double, out=double.clone())


def test_max_autotune_without_a_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that no pack serves Inductor is told to leave the choice out, and the model compiles."""
    from aotmm.runtime import inductor

    def no_kernels(*_: object, **__: object) -> None:
        raise NoKernelError("no kernels for cuda:0")

    monkeypatch.setattr(aotmm, "matmul", no_kernels)
    with pytest.raises(NotImplementedError, match="no kernels for cuda:0"):
        inductor.aotmm_mm(*(torch.zeros(2, 2) for _ in "abo"))
