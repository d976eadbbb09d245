"""The direct call on a GPU that is not there: what it computes, what it leaves to the op, and its cost in memory."""

from __future__ import annotations

import ast
import ctypes
import importlib
from collections.abc import Callable

import pytest
import torch

import aotmm
from aotmm.runtime import direct_call, ops
from tests.runtime.pretend import run

MAKE = """
a, b = torch.randn(4, 8).half(), torch.randn(8, 6).half()
want = a.double() @ b.double()
def close(c, to): return bool((c.double() - to).abs().max() <= 2.0**-10 * to.abs().max())
"""


def test_products() -> None:
    """New results and `out`, matrices and batches, with bias and activation: right, plain tensors, never by the op."""
    run(
        MAKE
        + """
lib._mm = lib._mm_out = None  # nothing may need them
c = lib.matmul(a, b)
assert close(c, want) and type(c) is torch.Tensor and c.stride() == (6, 1) and not c.requires_grad
out, before = torch.empty(6, 4).half().T, 0
before = out._version
assert lib.matmul(a, b, out=out) is out and out._version == before + 1 and close(out, want)
x, y = torch.randn(3, 4, 8).half(), torch.randn(3, 8, 6).half()
assert close(lib.matmul(x, y), x.double() @ y.double())
bias = torch.randn(6).half()
assert close(lib.matmul(a, b, bias=bias, activation="relu"), (want + bias.double()).relu())
weight = torch.nn.Parameter(b)
with torch.no_grad():
    assert close(lib.matmul(a, weight), want)
with torch.inference_mode():
    assert lib.matmul(a, b).is_inference()
gpu.workspace = 4096
assert close(lib.matmul(a, b), want), "a plan's workspace is torch's memory"
gpu.workspace = 0
c = lib.matmul(a, b)
c.resize_(9, 9)
"""
    )


def test_rows_of_all_matrices() -> None:
    """Where b is the same for a whole batch the rows are those of one matrix, if they lie evenly; never by views."""
    run(
        MAKE
        + """
lib._any_rank = None
x, y = torch.randn(3, 4, 8).half(), torch.randn(3, 8, 6).half()
vector, each, same = torch.randn(6).half(), torch.randn(3, 4, 6).half(), torch.randn(4, 6).half()
wide, out = torch.randn(3, 2, 16).half(), torch.zeros(3, 5, 6).half()
def sizes(*arguments, **options):
    got = lib.matmul(*arguments, **options)
    want = arguments[0].double() @ arguments[1].double()
    assert close(got, want + options["bias"].double() if "bias" in options else want) and got.shape == want.shape
    return gpu.sizes
one, batch = (1, 12, 6, 8), (3, 4, 6, 8)
assert sizes(x, b) == sizes(x, b[None]) == sizes(x, b.expand(3, 8, 6)) == one
assert sizes(x, b, bias=vector) == sizes(x, b, bias=each) == one
assert sizes(wide[:, :1, :8], b) == (1, 3, 6, 8), "one row of each"
assert sizes(x, b, bias=same) == sizes(x, b, out=out[:, :4]) == sizes(a, y) == sizes(a.expand(3, 4, 8), b) == batch
assert not out[:, 4].any()
"""
    )


def test_recorded() -> None:
    """Where nothing but a gradient keeps the direct call from serving, autograd records it, forward and backward."""
    run(
        MAKE
        + """
lib._by_op = None
def gradients(product, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    result = product(*inputs)
    return [result, *torch.autograd.grad(result.double().square().sum(), inputs)]
bias = torch.randn(6).half()
for x in (a, torch.randn(3, 4, 8).half(), torch.randn(3, 8, 8).half()[:, ::2]):
    before = gpu.runs
    ours = gradients(lambda x, y, z: lib.matmul(x, y, bias=z), x, b, bias)
    assert gpu.runs == before + 3
    theirs = gradients(lambda x, y, z: x @ y + z, *(t.double() for t in (x, b, bias)))
    assert all(got.shape == want.shape and (got - want).abs().max() < 0.01 * want.abs().max()
               for got, want in zip(ours, theirs, strict=True))
frozen = lib.matmul(a, b.clone().requires_grad_())
assert frozen.requires_grad and frozen.grad_fn.saved_tensors[1] is None
with torch.no_grad(): assert not lib.matmul(a, b.clone().requires_grad_()).requires_grad
"""
    )


def test_what_the_op_serves() -> None:
    """Whatever else of torch's has a say in is not the direct call's: modes, autograd, subclasses, lazy views."""
    told = run(
        MAKE
        + """
import warnings
warnings.simplefilter("ignore")  # torch's own, of complex halves and of its jit
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
class Mine(torch.Tensor): pass
def asked(x=a, y=b, out=None, bias=None):
    return isinstance(lib._direct_call(0, x, y, out, bias, None, False), torch.Tensor)
def inside(mode):
    with mode: return asked()
found = {"plain": asked()}
found["grad"] = asked(a.clone().requires_grad_())
found["bias with grad"] = asked(bias=torch.zeros(6).half().requires_grad_())
found["out with grad"] = asked(out=torch.zeros(4, 6).half().requires_grad_())
with torch.no_grad(): found["grad, no_grad"] = asked(a.clone().requires_grad_())
found["inference_mode"] = inside(torch.inference_mode())
found["autocast"] = inside(torch.autocast("cpu", dtype=torch.bfloat16))
found["dispatch mode"] = inside(TorchDispatchMode())
found["function mode"] = inside(TorchFunctionMode())
found["default device"] = inside(torch.device("meta"))
found["dual level"] = inside(forward_ad.dual_level())
found["subclass"] = asked(a.as_subclass(Mine))
found["negated"] = asked(torch.zeros(4, 16, dtype=torch.complex32).conj().imag[:, ::2])
found["negated column"] = asked(y=torch.zeros(8, dtype=torch.complex32).conj().imag.unsqueeze(-1))
found["imaginary"] = asked(torch.zeros(4, 16, dtype=torch.complex32).imag[:, ::2])
found["zero"] = asked(torch._efficientzerotensor(4, 8, dtype=torch.half))
found["meta"] = asked(a.to("meta"))
found["sparse"] = asked(a.to_sparse())
found["float32"] = asked(a.float(), b.float())
found["vector"] = asked(a[0])
found["no sums"] = asked(a[:, :0], b[:0])
assert not lib.matmul(a[:, :0], b[:0]).any()
found["shared b"] = asked(a.expand(3, 4, 8), b.expand(3, 8, 6))
found["list"] = asked([1.0])
torch.func.vmap(lambda x: found.update({"vmap": asked(x, b)}) or x)(a[None])
torch.func.grad(lambda x: found.update({"func.grad": asked(x, b)}) or x.sum())(a)
torch.func.jvp(lambda x: found.update({"func.jvp": asked(x, b)}) or x, (a,), (a,))
torch.func.functionalize(lambda x: found.update({"functionalize": asked(x, b)}) or x)(a)
torch.jit.trace(lambda x: found.update({"trace": asked(x, b)}) or x + 1, (a,), check_trace=False)
found["again"] = asked()
print(found)
"""
    )
    found = ast.literal_eval(told)
    assert {name for name, taken in found.items() if taken} == {
        "plain",
        "grad, no_grad",
        "inference_mode",
        "imaginary",
        "shared b",
        "again",
    }


def test_errors() -> None:
    """What is refused on the way is the typed error of the op, with shapes and dtypes."""
    run(
        MAKE
        + """
def error(*arguments, **options):
    try: lib.matmul(*arguments, **options)
    except Exception as error: return f"{type(error).__name__}: {error}"
def both(*arguments, **options):
    first = error(*arguments, **options)
    lib._direct_call = lambda *_: NotImplemented
    second = error(*arguments, **options)
    lib._direct_call = lib._ops.direct_call
    assert first == second, (first, second)
    return first
assert both(a, a).startswith("ValueError: the inner sizes differ: a is (M, K), b must be (K, N): a is (4, 8) float16")
assert "out has the wrong shape" in both(a, b, out=torch.empty(4, 5).half())
assert "bias must have the dtype of the result" in both(a, b, bias=torch.empty(6).bfloat16())
assert "elements of out share memory" in both(a, b, out=torch.empty(4, 1).half().expand(4, 6))
assert both(a[:0], b, out=torch.empty(0, 1).half().expand(0, 6)) is None, "no elements do"
gpu.refuse = "driver"
assert both(a, b) == "DriverError: the launch failed"
gpu.refuse = "kernel"
assert both(a, b).startswith("NoKernelError: no kernel fits: a is (4, 8) float16 on cpu")
"""
    )


def test_nothing_leaks() -> None:
    """After 100,000 calls of each kind every reference count and the memory are what they were."""
    run(
        MAKE
        + """
import sys, resource
out, lib._direct_call(0, a, b, None, None, None, False)
out = torch.empty(4, 6).half()
ways = (
    lambda: lib.matmul(a, b),
    lambda: lib.matmul(a, b, out=out),
    lambda: lib._direct_call(0, a, b.float(), None, None, None, False),
)
def counts(): return [sys.getrefcount(x) for x in (a, b, out, None, NotImplemented)]
for way in ways:
    for _ in range(100): way()
    before, size = counts(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100_000): way()
    assert all(abs(x - y) < 20 for x, y in zip(counts(), before)), (counts(), before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 4096  # KiB; a leaked tensor has 200 B
""".replace("out, lib._direct_call(0, a, b, None, None, None, False)\n", "")
    )


def test_threads() -> None:
    """Every thread has its own dispatcher state and error."""
    run(
        MAKE
        + """
import threading
wrong = []
def work(number):
    for turn in range(200):
        if number % 2:
            try: lib.matmul(a, a)
            except ValueError: continue
            wrong.append(number)
        elif not close(lib.matmul(a, b), want): wrong.append(number)
threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong
"""
    )


def test_traced() -> None:
    """torch.compile sees an op of aotmm and not the direct call, without a break in its graph."""
    run(
        MAKE
        + """
seen = []
def backend(module, _):
    seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return module
compiled = torch.compile(lambda x, y: lib.matmul(x, y), backend=backend, fullgraph=True)
assert close(compiled(a, b), want)
assert any(name.startswith("aotmm.") for name in seen), seen
"""
    )


@pytest.mark.parametrize(
    "key_set",
    [
        pytest.param(lambda: (0, 0), id="never changes"),
        pytest.param(lambda: (1, 2), id="never quiet"),
        pytest.param(iter(range(9)).__next__, id="something else"),
    ],
)
def test_self_test(key_set: Callable[[], tuple[int, int]]) -> None:
    """Words that do not follow torch's modes are not trusted."""
    assert direct_call.inference_keys(key_set) is None


def test_self_test_passes_on_this_torch() -> None:
    """The words of this torch do, and are the same whatever mode the caller is in."""
    if not aotmm.load().has_direct_call:
        pytest.skip("this Python does not load the module")
    key_set = importlib.import_module("aotmm.native._direct_call").key_set
    found = direct_call.inference_keys(key_set)
    assert found not in (None, (0, 0))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert direct_call.inference_keys(key_set) == found


def test_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python does not load it, or torch lacks something, everything is the op's."""
    lib = aotmm.load()
    ours = lib._ops._native

    def no_module(_name: str) -> None:
        raise ImportError

    assert direct_call.connect(ours, lambda _: None) is direct_call.DECLINED
    monkeypatch.setattr(importlib, "import_module", no_module)
    assert direct_call.connect(ours, ops.torch_library) is direct_call.DECLINED
    assert direct_call.DECLINED.matmul(0, 1, 2) is NotImplemented


def test_what_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another build than the library, whose structures it shares, or with another torch, the module is not used."""
    assert aotmm.load()
    other = ops.torch_library("torch_cpu")
    assert other is not None
    assert direct_call.connect(other, ops.torch_library) is direct_call.DECLINED
    monkeypatch.setattr(direct_call, "place_of_tensor", lambda: None)
    assert direct_call.connect(ops.registered()._native, ops.torch_library) is direct_call.DECLINED
    monkeypatch.undo()
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    assert direct_call.connect(ops.registered()._native, ops.torch_library) is direct_call.DECLINED


def test_what_is_not_connected_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of another build is left alone: it read the dispatcher's state by a library that it did not have."""

    class Stranger:
        @staticmethod
        def connect(*_: object) -> str:
            return "a libaotmm_torch.so of the same build"

        @staticmethod
        def key_set() -> tuple[int, int]:
            pytest.fail("called")

    monkeypatch.setattr(importlib, "import_module", lambda _: Stranger)
    assert direct_call.connect(ctypes.CDLL(None), lambda _: ctypes.CDLL(None)) is direct_call.DECLINED
