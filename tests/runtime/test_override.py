"""`aotmm.override()` on a GPU that is not there: which products are ours, which torch's, and that it ends."""

from __future__ import annotations

import pytest
import torch

import aotmm
from aotmm.runtime import ops
from tests.runtime.pretend import run

# Without it a torch counts as older than 2.13, whose C functions log the exceptions that they catch.
SILENT = b"torch_exception_get_what_without_backtrace"
old_and_new = pytest.mark.parametrize("absent", [(), (SILENT,)], ids=["silent", "logging"])

MAKE = """
a, b, bias = torch.randn(4, 8).half(), torch.randn(8, 6).half(), torch.randn(6).half()
x, y = torch.randn(3, 4, 8).half(), torch.randn(3, 8, 6).half()
def close(c, to): return c.shape == to.shape and bool((c.double() - to).abs().max() <= 2.0**-8 * to.abs().max())
def launched(call):
    before = gpu.runs
    call()
    return gpu.runs - before
want, batch = a.double() @ b.double(), x.double() @ y.double()
"""


SCALED = """
e4 = torch.float8_e4m3fn
p, q = torch.randn(32, 64).to(e4), torch.randn(48, 64).to(e4).t()
one, two = torch.tensor(0.5), torch.tensor(2.0)
rows, cols = torch.rand(32, 1) + 0.5, torch.rand(1, 48) + 0.5
exact = p.double() @ q.double()
i, j = torch.randint(-9, 9, (32, 64), dtype=torch.int8), torch.randint(-9, 9, (64, 48), dtype=torch.int8)
"""


def test_without_gpu_support() -> None:
    """A torch that knows no GPU is left alone, and scripts that ask for it run."""
    if ops.serves_gpus():
        return
    x = torch.randn(3, 3)
    with aotmm.override() as override:
        assert torch.equal(torch.mm(x, x), x @ x)
    override.remove()


def test_which_products() -> None:
    """mm, bmm, addmm, baddbmm, matmul, linear, their out forms and gradients are ours and right; then torch's again."""
    run(
        MAKE
        + """
torch.backends.cuda.matmul.allow_tf32 = True  # without it float32 is torch's
out, outs = torch.empty(4, 6).half(), torch.empty(3, 4, 6).half()
calls = {
    "mm": (lambda: torch.mm(a, b), want),
    "mm.out": (lambda: torch.mm(a, b, out=out), want),
    "matmul": (lambda: a @ b, want),
    "bmm": (lambda: torch.bmm(x, y), batch),
    "bmm.out": (lambda: torch.bmm(x, y, out=outs), batch),
    "folded": (lambda: x @ b, x.double() @ b.double()),
    "addmm": (lambda: torch.addmm(bias, a, b), want + bias.double()),
    "addmm.out": (lambda: torch.addmm(bias, a, b, out=out), want + bias.double()),
    "beta 0": (lambda: torch.addmm(bias, a, b, beta=0), want),
    "baddbmm": (lambda: torch.baddbmm(outs[:1].zero_(), x, y), batch),
    "linear": (lambda: torch.nn.functional.linear(a, b.T, bias), want + bias.double()),
    "linear without bias": (lambda: torch.nn.functional.linear(a, b.T), want),
    "transposed": (lambda: torch.mm(b.T, a.T), want.T),
    "float32": (lambda: torch.mm(a.float(), b.float()), want),
    "empty": (lambda: torch.mm(a[:0], b), want[:0]),
}
own = {name: call() for name, (call, _) in calls.items()}
with aotmm.override():
    for name, (call, to) in calls.items():
        assert launched(call) == (name != "empty"), name
        got = call()
        assert close(got, to) if got.numel() else got.shape == to.shape, name
        assert got.stride() == own[name].stride() and got.dtype == own[name].dtype, name
    assert torch.mm(a, b, out=out) is out
    weight = b.clone().requires_grad_()
    first = a.clone().requires_grad_()
    assert launched(lambda: (first @ weight).double().sum().backward()) == 3
    assert close(weight.grad, a.double().T @ torch.ones(4, 6).double())
    assert launched(lambda: torch.func.vmap(torch.mm)(x, y)) == 1
    with torch.autocast("cpu", dtype=torch.half):
        assert launched(lambda: torch.mm(a.float(), b.float())) == 1
    with torch.inference_mode():
        assert torch.mm(a, b).is_inference()
assert launched(lambda: [call() for call, _ in calls.values()]) == 0
assert all(torch.equal(call(), own[name]) for name, (call, _) in calls.items())
"""
    )


def test_quantised_products() -> None:
    """_int_mm and _scaled_mm with one scale, or one for each row and column, and their out forms are ours and right."""
    run(
        MAKE
        + SCALED
        + """
from torch.nn.functional import ScalingType as kinds, scaled_mm as scaled
from aotmm.timing.correctness import block_scaled
half, shift = torch.empty(32, 48).half(), torch.randn(48).half()
u, v = torch.randn(32, 272).to(e4), torch.randn(144, 272).to(e4).t()
of_u, narrow = torch.rand(3, 32).t() + 0.5, torch.rand(3, 144) + 0.5
many, of_many = torch.randn(65, 272).to(e4), torch.rand(65, 3) + 0.5
padded = torch.rand(2, 4).t() + 0.5  # blocks of K to a multiple of 4
of_v = padded[:3]
in_blocks, in_narrow_blocks = (
    torch.matmul(*block_scaled(u.double(), v.double(), of_u.double(), scale.double())) for scale in (of_v, narrow)
)
calls = {
    "_int_mm": (lambda: torch._int_mm(i, j), i.double() @ j.double()),
    "_int_mm.out": (lambda: torch._int_mm(i, j, out=torch.empty(32, 48, dtype=torch.int32)), i.double() @ j.double()),
    "_scaled_mm": (lambda: torch._scaled_mm(p, q, one, two, out_dtype=torch.half), exact),
    "bias": (lambda: torch._scaled_mm(p, q, one, one, bias=shift, out_dtype=torch.half), exact / 4 + shift.double()),
    "rows": (lambda: torch._scaled_mm(p, q, rows, cols, out_dtype=torch.half), exact * rows.double() * cols.double()),
    "_scaled_mm.out": (lambda: torch._scaled_mm(p, q, one, two, out_dtype=torch.half, out=half), exact),
    "blocks": (lambda: torch._scaled_mm(u, v, of_u, of_v, out_dtype=torch.half), in_blocks),
    "narrow blocks": (lambda: torch._scaled_mm(u, v, of_u, narrow, out_dtype=torch.half), in_narrow_blocks),
    "v2": (lambda: scaled(p, q, one, kinds.TensorWise, two, kinds.TensorWise, output_dtype=torch.half), exact),
    "v2 rows": (
        lambda: scaled(p, q, rows, kinds.RowWise, cols, kinds.RowWise, output_dtype=torch.half),
        exact * rows.double() * cols.double(),
    ),
    "v2 blocks": (
        lambda: scaled(u, v, of_u, kinds.BlockWise1x128, padded, kinds.BlockWise128x128, output_dtype=torch.half),
        in_blocks,
    ),
    "v2 narrow blocks": (
        lambda: scaled(u, v, of_u, kinds.BlockWise1x128, narrow.t(), kinds.BlockWise1x128, output_dtype=torch.half),
        in_narrow_blocks,
    ),
}
with aotmm.override() as override:
    for name, (call, to) in calls.items():
        assert launched(call) == 1, name
        assert close(call(), to), name
    assert torch._int_mm(i, j).dtype is torch.int32
    assert torch.equal(torch._int_mm(i, j).double(), i.double() @ j.double())
    assert torch._scaled_mm(p, q, one, two, out_dtype=torch.half).dtype is torch.half
    wrong = [
        lambda: torch._scaled_mm(p, q, one, one, bias=shift.view(48, 1), out_dtype=torch.half),
        lambda: torch._scaled_mm(p, q, one, one, bias=shift[:1], out_dtype=torch.half),
        lambda: torch._scaled_mm(p, q, one, one, out_dtype=torch.bfloat16, out=half),
        lambda: torch._scaled_mm(u, v, of_u, padded, out_dtype=torch.half),
        lambda: torch._scaled_mm(many, v, of_many, narrow, out_dtype=torch.half),  # torch's are faster
        lambda: scaled(u, v, of_u, kinds.BlockWise1x128, of_v[:2], kinds.BlockWise128x128, output_dtype=torch.half),
    ]
    for call in wrong:
        before = gpu.runs
        try: call()
        except (RuntimeError, ValueError): pass
        assert gpu.runs == before  # what torch makes of them is its own
    assert launched(lambda: torch._scaled_mm(many, v, of_many, of_v, out_dtype=torch.half)) == 1
with aotmm.override(batch_invariant=True):
    assert launched(lambda: torch._scaled_mm(many, v, of_many, narrow, out_dtype=torch.half)) == 1
assert launched(lambda: [call() for name, (call, _) in calls.items() if "int" in name]) == 0
"""
    )


def test_repr_tells_the_fates_of_products() -> None:
    """It has the products that were ours, and torch's with the reasons, whatever way they came; each begins anew."""
    run(
        MAKE
        + SCALED
        + """
with aotmm.override() as override:
    assert repr(override) == "<aotmm.override: 0 products by aotmm, 0 by torch>"
    for _ in range(2):
        torch.mm(a, b), torch.addmm(bias, a, b), torch.baddbmm(bias, x, y), torch.addmm(bias, a, b, beta=0)
        torch._int_mm(i, j), torch._scaled_mm(p, q, one, two, out_dtype=torch.half)
    assert repr(override) == "<aotmm.override: 12 products by aotmm, 0 by torch>"
    torch.mm(a.double(), b.double()), torch.addmm(bias.double(), a.double(), b.double())
    torch.mm(a.float(), b.float()), torch.addmm(bias.float(), a.float(), b.float()), torch.bmm(x.float(), y.float())
    torch.addmm(bias, a, b, alpha=2), torch.addmm(bias, a, b, beta=0.5)
    gpu.refuse = "kernel"
    torch.addmm(bias, a, b)
    gpu.refuse = ""
    assert repr(override) == (
        "<aotmm.override: 12 products by aotmm, 8 by torch: 2 of other types, 3 of fp32 in full precision, "
        "3 of other forms (factors, scales, shapes, devices)>"
    )
assert repr(override).endswith("; removed>")
with aotmm.override() as override:
    assert repr(override) == "<aotmm.override: 0 products by aotmm, 0 by torch>"
"""
    )


@pytest.mark.parametrize(("order", "ours"), [("fma k1", 0), ("wgmma k16, promoted every 32", 1)])
def test_fp32_in_full_precision(order: str, ours: int) -> None:
    """A pack whose kernels split fp32 for tensor cores multiplies what is aligned; by threads it is left to torch."""
    run(
        MAKE
        + f"""
import ctypes
from aotmm.problem import DTYPE_CODES
class Product(ctypes.Structure):
    _fields_ = [("config_name", ctypes.c_char_p), ("order", ctypes.c_char_p), ("numbers", ctypes.c_int32 * 16)]
product, launcher = Product(order={order.encode()!r}), gpu.keep[1]
product.numbers[1] = DTYPE_CODES.index("fp32")
launcher.products, launcher.kernel_count = ctypes.addressof(product), 1
a, b, bias = torch.randn(8, 32), torch.randn(32, 12), torch.randn(12)
x, y = torch.randn(3, 32, 64), torch.randn(3, 64, 36)
sum_ = a.double() @ b.double() + bias
with aotmm.override():
    assert launched(lambda: torch.mm(a, b)) == {ours}
    assert launched(lambda: torch.mm(b.T, a.T)) == {ours}
    assert launched(lambda: torch.bmm(x, y)) == {ours}
    assert launched(lambda: torch.addmm(bias, a, b)) == {ours}
    assert close(torch.addmm(bias, a, b), sum_)
    sum_into = torch.empty(8, 12)
    for call in (lambda: torch.addmm(bias, a, b, beta=0), lambda: torch.addmm(bias, a, b, beta=0, out=sum_into)):
        assert launched(call) == {ours}
        assert close(call(), sum_ - bias)
    assert launched(lambda: torch.baddbmm(bias[:1], x, y, beta=0)) == {ours}
    try: torch.addmm(torch.zeros(7), a, b, beta=0)
    except RuntimeError: pass
    else: raise AssertionError("a bias that does not fit")
    try: torch.addmm(bias, a, b[0, 0], beta=0)
    except RuntimeError: pass
    else: raise AssertionError("no matrix")
    assert launched(lambda: torch.mm(a, b, out=torch.empty(8, 12))) == {ours}
    assert launched(lambda: torch.mm(a, b, out=torch.empty(8, 13)[:, :12])) == 0
    assert launched(lambda: torch.mm(a, b, out=torch.empty(12, 8).T)) == 0
    assert launched(lambda: torch.addmm(torch.randn(8, 12), a, b)) == 0
    assert launched(lambda: torch.mm(a[:1].expand(8, 32), b)) == 0
    wide = torch.randn(8, 33), torch.randn(33, 12)
    for left, right in ((a, b[:, :11]), (a[:7], b), (a, b[:, :4]), (a[:, :28], b[:28]), (wide[0][:, 1:], b), wide):
        assert launched(lambda: torch.mm(left, right)) == 0
    for left, right in ((x[:, :28], y), (x, y[:, :, :28]), (x, torch.randn(3, 64, 33))):
        assert launched(lambda: torch.bmm(left, right)) == 0
"""
    )


@old_and_new
def test_batches_that_would_be_copied(absent: tuple[bytes, ...]) -> None:
    """Batches of which more is copied than the L2 cache holds, with few sums for each byte, are torch's."""
    run(
        MAKE
        + """
torch.backends.cuda.matmul.allow_tf32 = True
def product(batch, m, k, n, dtype): return torch.randn(batch, m, k).to(dtype), torch.randn(batch, k, n).to(dtype)
for dtype, batch in ((torch.half, 64), (torch.float, 32)):
    odd = product(batch, 512, 515, 8, dtype)
    bias = torch.ones(8).to(dtype)
    out = torch.empty(batch, 512, 8).to(dtype)
    sums = odd[0].double() @ odd[1].double()
    with aotmm.override() as override:
        assert launched(lambda: torch.bmm(*odd)) == launched(lambda: torch.bmm(*odd, out=out)) == 0
        assert launched(lambda: torch.baddbmm(bias, *odd)) == launched(lambda: torch.baddbmm(bias, *odd, beta=0)) == 0
        assert repr(override) == "<aotmm.override: 0 products by aotmm, 4 by torch: 4 of batches that would be copied>"
        assert close(torch.bmm(*odd), sums) and close(out, sums)
        assert close(torch.baddbmm(bias, *odd), sums + 1)
        assert launched(lambda: torch.bmm(*product(batch, 512, 520, 8, dtype))) == 1  # whole vectors
        assert launched(lambda: torch.bmm(*product(batch // 2, 512, 515, 8, dtype))) == 1  # of the L2 cache
        assert launched(lambda: torch.mm(odd[0].view(-1, 515), odd[1][0])) == 1  # no batch
        assert launched(lambda: torch.bmm(*product(batch, 512, 520, 1, dtype))) == 1  # a vector: rows may be any
        assert launched(lambda: torch.bmm(*product(batch, 1024, 1, 1024, dtype))) == 1  # likewise
        assert launched(lambda: torch.bmm(*product(batch, 1, 515, 512, dtype))) == 1  # of which a small one is copied
        assert launched(lambda: torch.bmm(odd[0][:1].expand_as(odd[0]), odd[1])) == 1  # copied once
    with aotmm.override(batch_invariant=True):
        assert launched(lambda: torch.bmm(*odd)) >= 1
with aotmm.override():
    assert launched(lambda: torch.bmm(*product(2, 3000, 3001, 1500, torch.half))) == 1  # many sums
""",
        absent=absent,
    )


def test_scaled_products_pass_the_dispatcher_by() -> None:
    """_scaled_mm is computed without the op if tensors are plain, and by it if not; faults are the same."""
    run(
        MAKE
        + SCALED
        + """
from aotmm.runtime import ops
class Mine(torch.Tensor): pass
registered, half, shift = ops.registered(), ops.output_code(torch.half), torch.randn(48).half()
direct, found = registered.direct.scaled, []
def scaled(p, q, bias=None): return direct(0, p, q, one, two, bias, False, False, half)
assert close(scaled(p, q), exact) and scaled(p, q).dtype is torch.half
assert close(scaled(p, q, shift), exact + shift.double())
assert scaled(p.as_subclass(Mine), q) is NotImplemented
try: scaled(p, q[:60])
except RuntimeError as error: assert "inner sizes" in str(error), error
else: raise AssertionError
def seen(*arguments):
    found.append(direct(*arguments))
    return found[-1]
registered.direct = registered.direct._replace(scaled=seen)
with aotmm.override() as override:
    for call in (lambda: torch._scaled_mm(p, q, one, two, out_dtype=torch.half),
                 lambda: torch._scaled_mm(p.as_subclass(Mine), q, one, two, out_dtype=torch.half)):
        assert launched(call) == 1
        assert close(call(), exact)
    assert repr(override).startswith("<aotmm.override: 4 products by aotmm")
assert [each is NotImplemented for each in found] == [False, False, True, True]
"""
    )


LINES = """
import sys
from aotmm.runtime import override as module
def lines(call):
    seen = []
    def look(frame, event, _):
        if event == 'call' and frame.f_code.co_filename == module.__file__: seen.append(frame.f_code.co_name)
    sys.setprofile(look)
    try: call()
    finally: sys.setprofile(None)
    return seen
"""


def test_sums_leave_python() -> None:
    """addmm, baddbmm and linear of plain tensors, out or not, run no line of Python; other forms and subclasses do."""
    run(
        MAKE
        + LINES
        + """
class Mine(torch.Tensor): pass
out, batch = torch.empty(4, 6).half(), torch.empty(3, 4, 6).half()
with aotmm.override():
    for call in (lambda: torch.addmm(bias, a, b), lambda: torch.baddbmm(bias, x, y),
                 lambda: torch.addmm(bias, a, b, out=out), lambda: torch.baddbmm(bias, x, y, alpha=1, out=batch),
                 lambda: torch.nn.functional.linear(a, b.T, bias)):
        assert lib.has_direct_call and lines(call) == []
        assert launched(call) == 1
    for call in (lambda: torch.addmm(bias, a, b, beta=0), lambda: torch.addmm(bias, a, b, beta=0, out=out)):
        assert set(lines(call)) == {"_add_product", "<genexpr>"}, "a product of override.c"
    with torch._C.DisableTorchFunctionSubclass():
        assert "_add_product" in lines(lambda: torch.addmm(bias, a.as_subclass(Mine), b))
"""
    )


def test_python_repeats_what_torch_may_refuse() -> None:
    """On a torch that logs exceptions these products of torch's go through Python; fp32 that it must take does not."""
    run(
        MAKE
        + LINES
        + """
with aotmm.override():
    assert lines(lambda: torch.mm(a.float(), b.float())) == lines(lambda: torch.bmm(x.float(), y.float())) == []
    assert lines(lambda: torch.addmm(bias.float(), a.float(), b.float())) == []
    assert lines(lambda: torch.baddbmm(bias.float(), x.float(), y.float())) == []
    assert lines(lambda: torch.mm(a.float(), b.float(), out=torch.empty(4, 6))) == ["_repeat"]
    assert lines(lambda: torch.mm(a.double(), b.double())) == ["_repeat"]
""",
        absent=(SILENT,),
    )


@old_and_new
def test_everything_else_is_torchs(absent: tuple[bytes, ...]) -> None:
    """Other types, factors, memory and refusals are torch's own: values, and texts of errors."""
    run(
        MAKE
        + """
outs = torch.empty(1, 6).half()
calls = [
    lambda: torch.mm(a.double(), b.double()),
    lambda: torch.mm(a.to(torch.complex64).conj(), b.to(torch.complex64)),
    lambda: torch.mm(torch.arange(6).view(2, 3), torch.arange(3).view(3, 1)),
    lambda: torch.bmm(x.double(), y.double()),
    lambda: torch.addmm(bias, a, b, beta=2),
    lambda: torch.addmm(bias.float(), a.float(), b.float(), alpha=0.5),
    lambda: torch.baddbmm(bias.double(), x.double(), y.double()),
    lambda: torch.mm(a.to_sparse(), b),
    lambda: torch.mm(a[0], b),
    lambda: torch.mm(a, a),
    lambda: torch.mm(a, b.float()),
    lambda: torch.mm(a, b, out=torch.empty(4, 6)),
    lambda: torch.mm(a, b, out=outs.expand(4, 6)),
    lambda: torch.mm(a, b, out=torch.empty(0).half()),
    lambda: torch.bmm(x, y, out=torch.empty(0).half()),
    lambda: torch.bmm(x, y[:2]),
    lambda: torch.addmm(torch.zeros(5).half(), a, b),
    lambda: torch.addmm(bias, a, a),
    lambda: torch.mm(a.float(), b.float()),
    lambda: torch.bmm(x.float(), y.float()),
    lambda: torch.addmm(bias.float(), a.float(), b.float()),
    lambda: torch.addmm(torch.ones(4, 1), a.float(), b.float()),
    lambda: torch.addmm(torch.zeros(5), a.float(), b.float()),
    lambda: torch.baddbmm(bias.float(), x.float(), y.float()),
    lambda: torch.baddbmm(torch.ones(x.shape[0], 1, 1), x.float(), y.float()),
    lambda: torch.baddbmm(torch.zeros(5), x.float(), y.float()),
]
def answer(call):
    try: return call()
    except RuntimeError as error: return str(error)
own = [answer(call) for call in calls]
with aotmm.override():
    for number, (call, expected) in enumerate(zip(calls, own)):
        before, got = gpu.runs, answer(call)
        assert gpu.runs == before, number
        assert got == expected if isinstance(expected, str) else torch.equal(got, expected), (number, got, expected)
    gpu.refuse = "kernel"
    assert close(torch.mm(a, b), want) and close(torch.addmm(bias, a, b), want + bias.double())
    gpu.refuse = "driver"
    for call in (lambda: torch.mm(a, b), lambda: torch.bmm(x, y), lambda: torch.addmm(bias, a, b)):
        assert answer(call) == "the launch failed"
""",
        absent=absent,
    )


@old_and_new
def test_errors_are_torchs(absent: tuple[bytes, ...]) -> None:
    """What torch raises comes out as without the override, type and text, in every thread; nothing is on stderr."""
    said = run(
        MAKE
        + """
import os, threading
tall, wide = torch.zeros(1, 1).half().expand(2**24, 1), torch.zeros(1, 1).half().expand(1, 2**24)
compiled = torch.compile(torch.mm, backend="aot_eager")
def autocast(call):
    with torch.autocast("cpu", dtype=torch.bfloat16): return call()
refused = [
    lambda: torch.mm(a, a),
    lambda: torch.bmm(x, y[:2]),
    lambda: torch.bmm(x, x),
    lambda: torch.addmm(bias, a, a),
    lambda: torch.baddbmm(bias, x, y[:2]),
    lambda: torch.addmm(torch.zeros(5), a.float(), b.float()),
    lambda: torch.baddbmm(torch.zeros(5), x.float(), y.float()),
    lambda: torch.mm(a[0], b),
    lambda: torch.bmm(a, b),
    lambda: torch.mm(a, b.float()),
    lambda: torch.bmm(x, y.double()),
    lambda: torch.addmm(bias, a, b.float()),
    lambda: torch.mm(a.bool(), b.bool()),  # NotImplementedError
    lambda: torch.bmm(x.bool(), y.bool()),
    lambda: torch.addmm(bias.bool(), a.bool(), b.bool()),
    lambda: torch.mm(a, b, out=torch.empty(4, 6)),
    lambda: torch.bmm(x, y, out=torch.empty(3, 4, 6)),
    lambda: torch.mm(a, b, out=torch.empty(4, 6, device="meta").half()),
    lambda: torch.mm(a, b, out=torch.empty(1, 6).half().expand(4, 6)),
    lambda: torch.addmm(bias, a, b, out=torch.empty(4, 6)),
    lambda: a @ a,
    lambda: torch.nn.functional.linear(a, b, bias),
    lambda: torch.mm(a.clone().requires_grad_(), a),
    lambda: torch.func.vmap(torch.mm)(x, x),
    lambda: autocast(lambda: torch.mm(a.float(), a.float())),
    lambda: torch.mm(torch.zeros(1, 1).expand(2**40, 1), torch.zeros(1, 1).expand(1, 2**40)),
]
no_memory = [
    lambda: torch.mm(tall, wide),
    lambda: torch.mm(tall.double(), wide.double()),
    lambda: torch.bmm(tall[None], wide[None]),
    lambda: torch.addmm(wide, tall, wide),
    lambda: compiled(tall, wide),
]
def answer(call):
    try: call()
    except Exception as error: return type(error), str(error)
def elsewhere(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(answer(call)))
    thread.start(); thread.join()
    return found[0]
own = [answer(call) for call in refused], [answer(call) for call in no_memory]
assert all(own[0]) and all(own[1])
with aotmm.override():
    # Before 2.13 what torch has no memory for it logs too, when our product asks for it.
    assert [answer(call) for call in no_memory] == own[1]
    os.dup2(1, 2)
    for ask in (answer, elsewhere):
        assert [ask(call) for call in refused] == own[0]
""",
        absent=absent,
    )
    assert said == ""


def test_a_gpu_without_a_pack() -> None:
    """It is asked for once, and then everything is torch's."""
    run(
        MAKE
        + """
from aotmm.errors import NoKernelError
from aotmm.runtime import library
asked = []
def resolve(number, ordinal):
    asked.append(ordinal)
    raise NoKernelError("no pack")
lib._ops._resolve = resolve
with aotmm.override() as override:
    assert close(torch.addmm(bias, a, b, beta=0), want)
    for _ in range(3):
        assert close(torch.mm(a, b), want) and close(torch.addmm(bias, a, b), want + bias.double())
    assert repr(override) == "<aotmm.override: 0 products by aotmm, 7 by torch: 7 on a GPU without a pack>"
assert set(asked) == {0}
"""
    )


def test_nesting() -> None:
    """Blocks and handles nest; the last one that ends gives torch its kernels back, also after an exception."""
    run(
        MAKE
        + """
ours = lambda: launched(lambda: (torch.mm(a, b), torch.addmm(bias, a, b)))
handle = aotmm.override()
with aotmm.override():
    assert ours() == 2
assert ours() == 2
handle.remove()
assert ours() == 0
handle.remove()
with aotmm.override():
    handle.remove()
    assert ours() == 2
try:
    with aotmm.override() as override:
        raise KeyError
except KeyError:
    assert ours() == 0
for _ in range(100):
    with aotmm.override(): pass
assert ours() == 0
"""
    )


def test_batch_invariant() -> None:
    """All products ask for the same bits in every batch; fp32 and factors of sums, which torch has else, too."""
    run(
        MAKE
        + SCALED
        + """
torch.backends.cuda.matmul.allow_tf32 = False
out, exact_integers = torch.empty(4, 6).half(), i.double() @ j.double()
calls = {
    "mm": (lambda: torch.mm(a, b), want),
    "bmm": (lambda: torch.bmm(x, y), batch),
    "fp32": (lambda: torch.mm(a.float(), b.float()), want),
    "addmm": (lambda: torch.addmm(bias, a, b), want + bias.double()),
    "addmm fp32": (lambda: torch.addmm(bias.float(), a.float(), b.float()), want + bias.double()),
    "factors": (lambda: torch.addmm(bias, a, b, beta=0.5, alpha=3), 3 * want + 0.5 * bias.double()),
    "no bias": (lambda: torch.addmm(bias * torch.nan, a, b, beta=0, alpha=2), 2 * want),
    "factors.out": (lambda: torch.addmm(bias, a, b, beta=2, out=out), want + 2 * bias.double()),
    "baddbmm": (lambda: torch.baddbmm(bias, x, y, alpha=0.5), 0.5 * batch + bias.double()),
}
with aotmm.override(batch_invariant=True) as override:
    for name, (call, to) in calls.items():
        gpu.first = None
        assert launched(call) == 1 and gpu.first.batch_invariant, name
        assert close(call(), to), name
    gpu.first = None
    got = torch._scaled_mm(p, q, one, two, out_dtype=torch.float16)
    assert gpu.first.batch_invariant and close(got, exact)
    gpu.first = None
    assert torch.equal(torch._int_mm(i, j).double(), exact_integers) and gpu.first.batch_invariant
    resized = torch.empty(0).half()
    assert launched(lambda: torch.addmm(bias, a, b, alpha=2, out=resized)) == 0 and resized.shape == (4, 6)
    torch.mm(a.double(), b.double())
    assert repr(override).startswith("<aotmm.override(batch_invariant=True): "), override
    assert repr(override).endswith(
        " products by aotmm, 2 by torch: 1 of other types, 1 of other forms (factors, scales, shapes, devices)>"
    ), override
    for wrong in (lambda: aotmm.override(), lambda: aotmm.override(batch_invariant=False)):
        try:
            wrong()
            raise SystemExit("two kinds of overrides at once")
        except ValueError as error:
            assert "one with batch_invariant=True is active" in str(error), error
    with aotmm.override(batch_invariant=True):
        assert launched(lambda: torch.mm(a, b)) == 1
with aotmm.override():
    gpu.first = None
    torch.mm(a, b)
    assert not gpu.first.batch_invariant
"""
    )


def test_batches_without_a_kernel_of_the_order() -> None:
    """Where no kernel that batch_invariant allows takes a batch, its members are multiplied one by one.

    So they are where one does, but there is no memory for its workspace.
    """
    run(
        MAKE
        + """
import itertools
residual, out = torch.randn(3, 4, 6).half(), torch.empty(3, 4, 6).half()
added = {"bias": residual}, batch + residual.double()
into = {"bias": bias, "out": out}, batch + bias.double()
for gpu.refuse, (options, to) in itertools.product(("batch", "memory"), (({}, batch), added, into)):
    before = gpu.runs
    assert close(lib.matmul(x, y, batch_invariant=True, **options), to)
    assert gpu.runs == before + 3
"""
    )


def test_threads() -> None:
    """Overrides that begin and end in many threads are counted; products of many threads are right."""
    run(
        MAKE
        + """
import threading
wrong = []
def nest():
    for _ in range(50):
        with aotmm.override():
            if not close(torch.mm(a, b), want): wrong.append(1)
with aotmm.override():
    threads = [threading.Thread(target=nest) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert launched(lambda: torch.mm(a, b)) == 1
assert not wrong and launched(lambda: torch.mm(a, b)) == 0
"""
    )


def test_a_registration_that_fails_leaves_nothing() -> None:
    """If torch takes some of the kernels and then one no more, all of its own are back."""
    run(
        MAKE
        + """
from unittest import mock
own = torch.library.Library.impl
def refuse(self, name, *arguments, **options):
    if name == "baddbmm": raise RuntimeError("no more")
    return own(self, name, *arguments, **options)
with mock.patch("torch.library.Library.impl", refuse):
    try: aotmm.override()
    except RuntimeError as error: assert str(error) == "no more"
    else: raise AssertionError
assert launched(lambda: (torch.mm(a, b), torch.addmm(bias, a, b))) == 0
with aotmm.override():
    assert launched(lambda: (torch.mm(a, b), torch.addmm(bias, a, b))) == 2
"""
    )


@old_and_new
def test_nothing_leaks(absent: tuple[bytes, ...]) -> None:
    """Products by ours, by torch's and refused ones keep no tensor."""
    run(
        MAKE
        + """
import resource
def refused(call):
    try: call()
    except RuntimeError: pass
tall, wide, bias = torch.zeros(256, 1).half(), torch.zeros(1, 256).half(), torch.zeros(256).half()
exact, large = (tall.double(), wide.double()), torch.zeros(256, 512).half()
def new(): return large.clone()
with aotmm.override():
    ways = [
        lambda: torch.mm(tall, wide), lambda: torch.mm(*exact), lambda: torch.addmm(bias, tall, wide),
        lambda: refused(lambda: torch.mm(new(), new())),
        lambda: refused(lambda: torch.mm(new(), new(), out=new())),
        lambda: refused(lambda: torch.bmm(new()[None], new()[None])),
    ]
    for way in ways:
        for _ in range(10): way()
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(300): way()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 8192  # KiB; 300 tensors have 38 MB or more
""",
        absent=absent,
    )
