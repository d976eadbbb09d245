"""Gradients on this GPU: each is one product of known operands, and is judged as such against float64."""

from __future__ import annotations

import pytest
import torch

from aotmm.problem import ACTIVATIONS
from aotmm.runtime.library import Library
from aotmm.timing.check import OUTPUT_NAMES
from aotmm.timing.correctness import U_OUT, U_TENSOR_CORE, Epilogue, allowed
from aotmm.timing.operands import torch_dtype
from tests.gpu.judge import integers, judge, lay_out
from tests.gpu.judge import random as normal

NAMES = ("fp16", "bf16", "fp32")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's forward mode
SHAPES = [(64, 64, 64), (128, 256, 512), (33, 65, 129), (257, 129, 255), (1, 300, 40)]


def right(gradient: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, name: str, *, exact: bool) -> None:
    """Asserts that the gradient is a @ b."""
    assert gradient is not None
    found = judge(gradient, a, b, name, Epilogue(), exact=exact)
    assert found.mismatches == 0
    assert max(found.det, found.prob) <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("exact", [True, False])
def test_first_and_second_order(
    lib: Library, generator: torch.Generator, name: str, layout: str, *, exact: bool
) -> None:
    """The gradients of a and b, and of their gradients, for every layout: bit for bit on integers, else in bounds."""
    dtype = torch_dtype(name)
    for m, n, k in SHAPES:
        longest = max(m, n, k)  # each of them is summed over

        def draw(rows: int, cols: int, longest: int = longest) -> torch.Tensor:
            if not exact:
                return normal(rows, cols, name, generator=generator)
            return integers(rows, 1, longest, name, dtype, generator=generator)[0][:, :cols]

        a, b, g, v = draw(m, k), draw(k, n), draw(m, n), draw(m, k)
        x, w = (
            lay_out(each, dtype, order).detach().requires_grad_() for each, order in zip((a, b), layout, strict=True)
        )
        upstream = g.to(dtype).requires_grad_()
        c = lib.matmul(x, w)
        of_a, of_b = torch.autograd.grad(c, (x, w), upstream, create_graph=True)
        right(of_a.detach(), g, b.T, name, exact=exact)
        right(of_b.detach(), a.T, g, name, exact=exact)
        of_g, again_b = torch.autograd.grad(of_a, (upstream, w), v.to(dtype))
        right(of_g, v, b, name, exact=exact)
        right(again_b, v.T, g, name, exact=exact)


@pytest.mark.parametrize("name", NAMES)
def test_shared_operands(lib: Library, generator: torch.Generator, name: str) -> None:
    """The gradient of an operand that is the same for a whole batch is one sum over all of it, rounded once."""
    batch, m, n, k = 5, 48, 72, 40
    dtype = torch_dtype(name)
    draw = [normal(batch * rows, cols, name, generator=generator) for rows, cols in ((m, k), (1, k * n), (m, n))]
    many, each, g = draw[0].view(batch, m, k), draw[1].view(batch, k, n), draw[2].view(batch, m, n)
    b = each[0]
    x, w = many.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
    lib.matmul(x, w).backward(g.to(dtype))  # type: ignore[no-untyped-call]
    right(w.grad, many.reshape(-1, k).T, g.reshape(-1, n), name, exact=False)
    assert x.grad is not None
    right(x.grad.view(-1, k), g.reshape(-1, n), b.T, name, exact=False)
    a = many[0]
    x, w = a.to(dtype).requires_grad_(), each.to(dtype).requires_grad_()
    lib.matmul(x, w).backward(g.to(dtype))  # type: ignore[no-untyped-call]
    right(x.grad, g.transpose(0, 1).reshape(m, -1), each.mT.reshape(-1, k), name, exact=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [(72,), (48, 72), (48, 1), (3, 1, 72)], ids=str)
def test_bias(lib: Library, generator: torch.Generator, name: str, bias: tuple[int, ...]) -> None:
    """A bias is fused into the forward, and its gradient is torch's sum."""
    dtype = torch_dtype(name)
    a, b = (normal(rows, cols, name, generator=generator) for rows, cols in ((3 * 48, 40), (40, 72)))
    z, g = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in (bias, (3, 48, 72)))
    x, w = a.view(3, 48, 40).to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
    z.requires_grad_()
    c = lib.matmul(x, w, bias=z)
    wanted = Epilogue(bias=z.detach().expand(3, 48, 72).reshape(-1, 72))
    found = judge(c.detach().view(-1, 72), a, b, name, wanted, exact=False)
    assert max(found.det, found.prob) <= 1
    c.backward(g)  # type: ignore[no-untyped-call]
    assert z.grad is not None
    want, spread = (value.double().sum_to_size(bias) for value in (g, g.abs()))
    bound = allowed(want, want, 3 * 48 * U_TENSOR_CORE * spread, Epilogue(), OUTPUT_NAMES[dtype])
    assert ((z.grad.double() - want).abs() <= bound).all()
    right(w.grad, a.T, g.double().reshape(-1, 72), name, exact=False)


@pytest.mark.parametrize("activation", [*list(ACTIVATIONS)[1:], ("leaky_relu", 0.3)], ids=str)
def test_activations(lib: Library, activation: str | tuple[str, float]) -> None:
    """With a gradient the activation is torch's own, of what the product without one gives, bit for bit."""
    torch.manual_seed(1)
    x, w, bias = (torch.randn(shape, device="cuda").half() for shape in ((96, 64), (64, 128), (128,)))
    functional = torch.nn.functional
    ours = {
        "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
        ("leaky_relu", 0.3): lambda y: functional.leaky_relu(y, 0.3),
    }.get(activation) or getattr(functional, str(activation))
    x.requires_grad_()
    got, want = lib.matmul(x, w, bias=bias, activation=activation), ours(lib.matmul(x, w, bias=bias))
    assert torch.equal(got, want)
    g = torch.randn_like(got)
    assert torch.equal(torch.autograd.grad(got, x, g)[0], torch.autograd.grad(want, x, g)[0])
    with torch.no_grad():
        fused = lib.matmul(x, w, bias=bias, activation=activation)
    assert ((fused - got).abs() <= 4 * U_OUT["fp16"] * (want.abs() + 1)).all()


def test_torch_func(lib: Library) -> None:
    """torch.func's transforms of fp32 products, against float64."""
    func = torch.func
    a, b, x = (torch.randn(shape, device="cuda") for shape in ((6, 8), (8, 5), (7, 6, 8)))
    for name in ("jacrev", "jacfwd", "hessian"):
        transform = getattr(func, name)
        results = [
            transform(lambda a, b, f=f: f(a, b).sin().sum(1))(a.to(dtype), b.to(dtype))
            for f, dtype in ((lib.matmul, torch.float32), (torch.matmul, torch.float64))
        ]
        torch.testing.assert_close(results[0].double(), results[1], rtol=1e-4, atol=1e-5, msg=name)
    per_sample = [
        func.vmap(func.grad(lambda b, x, f=f: f(x, b).sin().sum()), (None, 0))(b.to(dtype), x.to(dtype))
        for f, dtype in ((lib.matmul, torch.float32), (torch.matmul, torch.float64))
    ]
    torch.testing.assert_close(per_sample[0].double(), per_sample[1], rtol=1e-4, atol=1e-5)
    tangent = func.jvp(lib.matmul, (a, b), (a, b))[1]
    torch.testing.assert_close(tangent.double(), 2 * (a.double() @ b.double()), rtol=1e-4, atol=1e-5)


def test_gradcheck(lib: Library) -> None:
    """torch's own check, in fp32 and with its tolerances for it, where torch multiplies as exactly."""
    a, b, bias = (torch.rand(shape, device="cuda", requires_grad=True) for shape in ((3, 5), (5, 4), (4,)))

    def layer(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return lib.matmul(a, b, bias=bias)

    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(layer, (a, b, bias), eps=1e-2, atol=1e-2, nondet_tol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(lib: Library, dtype: torch.dtype) -> None:
    """Under autocast fp32 tensors are multiplied in the user's dtype, and their gradients are fp32, as torch's are."""
    x, w = (torch.randn(shape, device="cuda", requires_grad=True) for shape in ((64, 64), (64, 64)))
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for product, found in ((lib.matmul, ours), (torch.matmul, theirs)):
        with torch.autocast("cuda", dtype=dtype):
            y = product(x, w)
            assert torch.is_autocast_enabled("cuda")
        assert y.dtype is dtype
        found += [y, *torch.autograd.grad(y.float().square().sum(), (x, w))]
    for mine, right_one in zip(ours, theirs, strict=True):
        assert mine.dtype is right_one.dtype
        torch.testing.assert_close(mine, right_one, rtol=0.03, atol=0.03 * float(right_one.detach().abs().max()))
    with torch.autocast("cuda", dtype=dtype):
        assert torch.ops.aotmm.mm(x.detach(), w.detach()).dtype is dtype
        assert lib.matmul(x, w.half(), out_dtype=torch.float32).dtype is torch.float32
