"""Gradients of `matmul`, of either mode and order and under torch.func, computed through a stand-in for the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from aotmm.problem import ACTIVATIONS
from aotmm.runtime.library import Library
from tests.runtime.stand_in import Call
from tests.unit.runtime.test_views import batches, integers, laid_out

# Shapes of a, b and bias, in all the ways in which matmul broadcasts.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = [
    ((3, 4), (4, 5), None),
    ((3, 4), (4, 5), (5,)),
    ((3, 4), (4, 5), (1,)),
    ((3, 4), (4, 5), (3, 5)),
    ((3, 4), (4, 5), (3, 1)),
    ((4,), (4,), None),
    ((4,), (4, 5), (5,)),
    ((3, 4), (4,), (3,)),
    ((2, 3, 4), (4,), (3,)),
    ((4,), (2, 4, 5), None),
    ((2, 3, 4), (4, 5), (5,)),
    ((2, 3, 4), (4, 5), (2, 1, 5)),
    ((2, 3, 4), (2, 4, 5), (2, 1, 5)),
    ((1, 3, 4), (2, 4, 5), (5,)),
    ((3, 4), (2, 4, 5), (5,)),
    ((2, 3, 4), (1, 4, 5), None),
    ((2, 1, 3, 4), (3, 4, 5), (2, 3, 3, 5)),
    ((2, 0), (0, 3), (3,)),
    ((0, 4), (4, 5), (5,)),
]
CASES = 400
func = torch.func
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's forward mode


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal random numbers."""
    return torch.randn(*shape, dtype=dtype)


def leaf(*shape: int) -> torch.Tensor:
    """Normal random numbers that require a gradient."""
    return normal(*shape).requires_grad_()


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("a", [(3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rows", "columns"])
def test_order_of_a_weights_gradient(lib: Library, a: tuple[int, ...], order: tuple[int, int]) -> None:
    """It lies in memory as the weight does, so that torch need not copy it; of W.T, too."""
    x, weight = normal(*a), normal(*((4, 5)[i] for i in order)).permute(order).requires_grad_()
    (found,) = torch.autograd.grad(lib.matmul(x, weight).sum(), weight)
    assert found.stride() == weight.stride()
    assert torch.allclose(found, x.reshape(-1, 4).sum(0)[:, None].expand(4, 5), rtol=1e-12)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(("a", "b", "bias"), SHAPES, ids=str)
def test_derivatives(lib: Library, a: tuple[int, ...], b: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
    """First and second derivatives of both modes, and batches of them, are those that differences give."""

    def product(a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return lib.matmul(a, b, bias=bias[0] if bias else None)

    operands = [leaf(*shape) for shape in (a, b, bias) if shape is not None]
    modes = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(product, operands, **modes)
    assert gradgradcheck(product, operands, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.usefixtures("calls")
def test_random_products(lib: Library) -> None:
    """Hundreds of ranks, strides, broadcasts and biases: results and gradients are torch.matmul's."""
    dice = random.Random(11)  # noqa: S311 - no secret
    for _ in range(CASES):
        batch_a, batch_b = batches(dice)
        m, n, k = (dice.choice((0, 1, 2, 5)) if dice.random() < 0.3 else dice.randint(1, 6) for _ in range(3))
        shape_a = (k,) if dice.random() < 0.1 else (*batch_a, m, k)
        shape_b = (k,) if dice.random() < 0.1 else (*batch_b, k, n)
        tensors = [laid_out(dice, integers(dice, shape)).double().requires_grad_() for shape in (shape_a, shape_b)]
        want, bias = torch.matmul(*tensors), None
        if dice.random() < 0.5:
            shape = [1 if dice.random() < 0.3 else size for size in want.shape]
            bias = laid_out(dice, integers(dice, tuple(shape[dice.randint(0, len(shape)) :]))).double().requires_grad_()
            tensors.append(bias)
            want = want + bias
        got = lib.matmul(*tensors[:2], bias=bias)
        assert torch.equal(got, want), (shape_a, shape_b)
        upstream = integers(dice, tuple(want.shape)).double()
        for mine, right in zip(*(torch.autograd.grad(y, tensors, upstream) for y in (got, want)), strict=True):
            assert torch.equal(mine, right), (shape_a, shape_b)


@pytest.mark.parametrize("activation", [*list(ACTIVATIONS)[1:], ("leaky_relu", 0.3)], ids=str)
def test_activations(lib: Library, calls: list[Call], activation: str | tuple[str, float]) -> None:
    """With a gradient the activation is torch's, without one it is fused, and both say the same."""
    x, w, bias = leaf(3, 4), leaf(4, 5), leaf(5)

    def layer(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return lib.matmul(x, w, bias=bias, activation=activation)

    assert gradcheck(layer, (x, w, bias))
    seen = layer(x, w, bias)
    assert {call.activation for call in calls} == {0}
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(layer(x, w, bias), seen.detach())
    assert [call.activation > 0 for call in calls] == [True]


def test_gradients_are_products_of_views(lib: Library, calls: list[Call]) -> None:
    """Forward and backward of a layer are three products, and the transposed operands are views."""
    x, w, bias = leaf(2, 3, 4), leaf(5, 4), leaf(5)
    lib.matmul(x, w.T, bias=bias).backward(normal(2, 3, 5))  # type: ignore[no-untyped-call]
    assert [call.shapes for call in calls] == [((6, 4), (4, 5)), ((6, 5), (5, 4)), ((5, 6), (6, 4))]
    assert [call.strides for call in calls] == [((4, 1), (1, 4)), ((5, 1), (4, 1)), ((1, 5), (4, 1))]


def test_batch_invariant_gradients(lib: Library, calls: list[Call]) -> None:
    """Gradients of rows ask for the same bits in every batch; a weight's, a sum over all rows, does not."""
    x, w = leaf(2, 3, 4), leaf(5, 4)
    lib.matmul(x, w.T, batch_invariant=True).backward(normal(2, 3, 5))  # type: ignore[no-untyped-call]
    assert [call.batch_invariant for call in calls] == [True, True, False]
    calls.clear()
    x, y = leaf(2, 3, 4), leaf(2, 4, 5)
    lib.matmul(x, y, batch_invariant=True).backward(normal(2, 3, 5))  # type: ignore[no-untyped-call]
    assert [call.batch_invariant for call in calls] == [True, True, True]
    calls.clear()
    lib.matmul(x, y).backward(normal(2, 3, 5))  # type: ignore[no-untyped-call]
    assert not any(call.batch_invariant for call in calls)


@pytest.mark.parametrize("required", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_asked_for(lib: Library, calls: list[Call], required: tuple[bool, bool, bool]) -> None:
    """Backward computes no gradient that nobody asked for, and forward keeps nothing for it."""
    tensors = [
        normal(*shape).requires_grad_(wanted) for shape, wanted in zip(((3, 4), (4, 5), (5,)), required, strict=True)
    ]
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = lib.matmul(tensors[0], tensors[1], bias=tensors[2])
    assert [tensor.shape for tensor in kept] == [(3, 4)] * required[1] + [(4, 5)] * required[0]
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert [tensor.grad is not None for tensor in tensors] == list(required)
    assert len(calls) == 1 + sum(required[:2])


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_dtypes(lib: Library, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    """Gradients have the dtypes of what they are for, also where the result has another."""
    a, b = normal(3, 4, dtype=dtype).requires_grad_(), normal(4, 5, dtype=dtype).requires_grad_()
    bias = normal(5, dtype=out_dtype or dtype).requires_grad_()
    c = lib.matmul(a, b, bias=bias, out_dtype=out_dtype)
    assert c.dtype is (out_dtype or dtype)
    c.sum().backward()  # type: ignore[no-untyped-call]
    assert [tensor.grad.dtype for tensor in (a, b, bias) if tensor.grad is not None] == [dtype, dtype, c.dtype]


@pytest.mark.usefixtures("calls")
def test_refusals(lib: Library) -> None:
    """What has no gradient is refused where one may be asked for, and computed where none may."""
    x, w = leaf(3, 4).float(), normal(4, 5, dtype=torch.float32)
    scale = torch.ones(1)
    cases: list[tuple[str, tuple[torch.Tensor, torch.Tensor], dict[str, Any]]] = [
        ("out= has no gradient", (x, w), {"out": torch.empty(3, 5)}),
        ("with scales has no gradient", (x, w), {"scale_a": scale}),
        ("with scales has no gradient", (x.detach(), w), {"scale_a": scale.clone().requires_grad_()}),
        ("of torch.float8_e5m2 x torch.float8_e5m2", (x.to(torch.float8_e5m2), w.to(torch.float8_e5m2)), {}),
    ]
    for words, operands, options in cases:
        with pytest.raises(NotImplementedError, match=words):
            lib.matmul(*operands, **options)
        with torch.no_grad():
            assert not lib.matmul(*operands, **options).requires_grad
    with pytest.raises(NotImplementedError, match="out= has no gradient"):
        lib.matmul(x.detach(), w, out=torch.empty(3, 5, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"compute it outside of torch\.func"):
        torch.func.vmap(lambda row: lib.matmul(row, w, scale_a=scale))(x.detach()[:, None])
    with pytest.raises(ValueError, match="inner sizes differ"):
        lib.matmul(x[None], w[None, 1:])
    with pytest.raises(ValueError, match=r"bias is \(1, 4\), it must broadcast"):
        lib.matmul(x[None], w, bias=x[:1])


@pytest.mark.usefixtures("calls")
def test_out_in_forward_mode(lib: Library) -> None:
    """`out` loses no tangent silently, however deep the transforms are; where nothing is followed it is written."""
    x, w = normal(3, 4, dtype=torch.float32), normal(4, 5, dtype=torch.float32)
    out = torch.empty(3, 5)

    def into(x: torch.Tensor) -> torch.Tensor:
        return lib.matmul(x, w, out=torch.empty(3, 5))

    def inside_grad(x: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = torch.func.grad(lambda other: (into(x) * other.sum()).sum())(w)
        return gradient

    for function in (into, inside_grad):
        with pytest.raises(NotImplementedError, match="out= is for neither"):
            torch.func.jvp(function, (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="out= is for neither"):
            lib.matmul(forward_ad.make_dual(x, x), w, out=out)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(lib.matmul(x, w, out=out), x @ w)


def test_changes_between_the_passes_are_found(lib: Library, calls: list[Call]) -> None:
    """An operand that was overwritten before backward is torch's error, not a wrong gradient."""
    x, w = leaf(3, 4), normal(4, 5)
    y = lib.matmul(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert len(calls) == 1


def test_checkpoints(lib: Library, calls: list[Call]) -> None:
    """A checkpointed layer is computed again in backward, and has the same gradients."""
    x, w = leaf(3, 4), normal(4, 5)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return lib.matmul(x, w, activation="gelu")

    (want,) = torch.autograd.grad(layer(x).sum(), x)
    calls.clear()
    (got,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
    assert torch.equal(got, want)
    assert len(calls) == 3


def test_no_grad_and_inference(lib: Library, calls: list[Call]) -> None:
    """Where gradients are off nothing is recorded."""
    x, w = leaf(3, 4), normal(4, 5)
    with torch.no_grad():
        assert not lib.matmul(x, w).requires_grad
    with torch.inference_mode():
        assert lib.matmul(x, w).is_inference()
    assert len(calls) == 2


@pytest.mark.usefixtures("calls")
def test_forward_mode(lib: Library) -> None:
    """A dual tensor's tangent goes through, also where no gradient is required."""
    x, w, t = normal(3, 4), normal(4, 5), normal(3, 4)
    with forward_ad.dual_level():
        y = lib.matmul(forward_ad.make_dual(x, t), w)  # type: ignore[no-untyped-call]
        tangent = forward_ad.unpack_dual(y).tangent  # type: ignore[no-untyped-call]
        torch.testing.assert_close(tangent, t @ w)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("way", ["lib.matmul", "op"])
def test_torch_func(lib: Library, way: str) -> None:
    """vmap, grad, jacrev, jacfwd, hessian, jvp and per-sample gradients are those of torch.matmul."""
    ours = lib.matmul if way == "lib.matmul" else torch.ops.aotmm.matmul
    a, b, x = normal(3, 4), normal(4, 5), normal(7, 3, 4)
    transforms: dict[str, Callable[[Any], Any]] = {
        "vmap": lambda f: func.vmap(f)(x, b.expand(7, 4, 5)),
        "vmap of one": lambda f: func.vmap(f, (0, None))(x, b),
        "vmap of the other": lambda f: func.vmap(f, (None, 2))(a, normal(4, 5, 1).expand(4, 5, 6)),
        "vmap of vmap": lambda f: func.vmap(func.vmap(f, (None, 0)), (0, None))(x, b.expand(2, 4, 5)),
        "grad": lambda f: func.grad(lambda a, b: f(a, b).sin().sum())(a, b),
        "jacrev": lambda f: func.jacrev(f)(a, b),
        "jacfwd": lambda f: func.jacfwd(f)(a, b),
        "hessian": lambda f: func.hessian(lambda a, b: f(a, b).sin().sum())(a, b),
        "jvp": lambda f: func.jvp(f, (a, b), (a + 1, 2 * b))[1],
        "jvp of one": lambda f: func.jvp(lambda b: f(a, b), (b,), (2 * b,))[1],
        "per sample": lambda f: func.vmap(func.grad(lambda b, x: f(x, b).sin().sum()), (None, 0))(b, x),
    }
    for name, transform in transforms.items():
        torch.manual_seed(1)
        got = transform(ours)
        torch.manual_seed(1)
        want = transform(torch.matmul)
        torch.testing.assert_close(got, want, msg=name)


def test_vmap_is_one_product(lib: Library, calls: list[Call]) -> None:
    """vmap over batches and over rows is one launch."""
    func.vmap(lib.matmul)(normal(7, 3, 4), normal(7, 4, 5))
    func.vmap(lib.matmul, (0, None))(normal(7, 3, 4), normal(4, 5))
    assert [call.shapes for call in calls] == [((7, 3, 4), (7, 4, 5)), ((21, 4), (4, 5))]


@pytest.mark.usefixtures("calls")
def test_vmap_of_the_hot_op(lib: Library) -> None:
    """torch.vmap of torch.ops.aotmm.mm takes bias, activation and scales of its own."""
    assert lib.packs
    op = torch.ops.aotmm.mm
    x, w, bias = (normal(*shape, dtype=torch.float32) for shape in ((7, 3, 4), (4, 5), (5, 7)))
    got = torch.vmap(lambda x, bias: op(x, w, bias, activation=1), (0, 1))(x, bias)
    torch.testing.assert_close(got, torch.relu(x @ w + bias.T[:, None]))
    rows = torch.rand(3, 1)
    got = torch.vmap(lambda x: op(x, w, None, rows))(x)
    torch.testing.assert_close(got, rows * (x @ w))
    with pytest.raises(NotImplementedError, match="over the scales"):
        torch.vmap(lambda x, s: op(x, w, None, s))(x, torch.rand(7, 1))
