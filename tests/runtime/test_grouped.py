"""`lib.grouped_mm` up to the driver: forms, gradients, tracing, errors; NumPy multiplies (`pretend`)."""

from __future__ import annotations

import re
import textwrap

from tests.runtime import pretend

# Groups of 3, 0, 5 and 1 elements, and 2 behind them.
_BEGIN = """
torch.manual_seed(0)
offs = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
spans = [(0, 3), (3, 3), (3, 8), (8, 9)]
def whole(*shape, dtype=torch.float32):
    return torch.randint(-4, 5, shape).to(dtype)
def same(x, y):
    assert x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y), (x, y)
"""


def run(body: str) -> str:
    """What `body` prints behind the definitions of groups."""
    return pretend.run(_BEGIN + body)


def test_every_form() -> None:
    """Rows, columns and K in groups, and two batches: values, shapes and types, of matrices that lie either way."""
    run("""
a, b = whole(11, 6), whole(4, 6, 7)
for x in (a, a.T.contiguous().T):
    for y in (b, b.mT.contiguous().mT):
        c = lib.grouped_mm(x, y, offs=offs)
        same(c[:9], torch.cat([x[lo:hi] @ y[g] for g, (lo, hi) in enumerate(spans)]))
        assert c.shape == (11, 7) and c.is_contiguous()
a, b = whole(4, 5, 6), whole(6, 11)
same(lib.grouped_mm(a, b, offs=offs)[:, :9], torch.cat([a[g] @ b[:, lo:hi] for g, (lo, hi) in enumerate(spans)], 1))
a, b = whole(5, 11), whole(11, 7)
same(lib.grouped_mm(a, b, offs=offs), torch.stack([a[:, lo:hi] @ b[lo:hi] for lo, hi in spans]))
a, b = whole(4, 5, 6), whole(4, 6, 7)
same(lib.grouped_mm(a, b), a @ b)
assert gpu.first.grouped == "M" and lib.grouped_mm(a.half(), b.half(), out_dtype=torch.float32).dtype == torch.float32
same(aotmm.grouped_mm(a, b), a @ b)
""")


def test_bias_and_activation() -> None:
    """A bias for all groups or one for each, an activation, and a result of fp32."""
    run("""
a, b, each = whole(11, 6, dtype=torch.float16), whole(4, 6, 7, dtype=torch.float16), whole(4, 7)
for bias in (each, each[0], each[:, ::1].T.contiguous().T):
    c = lib.grouped_mm(a, b, offs=offs, bias=bias, activation="relu", out_dtype=torch.float32)
    of = [bias if bias.dim() == 1 else bias[g] for g in range(4)]
    want = [(a[lo:hi].float() @ b[g].float() + of[g]).relu() for g, (lo, hi) in enumerate(spans)]
    same(c[:9], torch.cat(want))
    assert gpu.runs == 1; gpu.runs = 0
three = whole(4, 5, 6), whole(4, 6, 7)
same(lib.grouped_mm(*three, bias=each), three[0] @ three[1] + each[:, None])
""")


def test_gradients() -> None:
    """Gradients of every form, of a bias and through an activation, are those of the products of the groups."""
    run("""
def of_rows(a, b, bias):
    return torch.cat([(a[lo:hi] @ b[g] + bias[g]).relu() for g, (lo, hi) in enumerate(spans)])
def of_columns(a, b, bias):
    return torch.cat([a[g] @ b[:, lo:hi] for g, (lo, hi) in enumerate(spans)], 1)
def of_sums(a, b, bias):
    return torch.stack([a[:, lo:hi] @ b[lo:hi] for lo, hi in spans])
cases = [
    (whole(9, 6), whole(4, 6, 7), of_rows, {"bias": whole(4, 7), "activation": "relu"}),
    (whole(9, 6), whole(4, 7, 6).mT, of_rows, {"bias": whole(4, 7), "activation": "relu"}),
    (whole(4, 5, 6), whole(6, 9), of_columns, {}),
    (whole(4, 5, 6), whole(9, 6).T, of_columns, {}),
    (whole(5, 9), whole(9, 7), of_sums, {}),
    (whole(5, 9), whole(7, 9).T, of_sums, {}),
]
for a, b, reference, more in cases:
    leaves = [x.requires_grad_() for x in (a, b, more.get("bias", torch.zeros(1)))]
    found, wanted = lib.grouped_mm(a, b, offs=offs, **more), reference(*leaves)
    same(found.detach(), wanted.detach())
    weights = whole(*wanted.shape)
    grads = torch.autograd.grad(found, leaves[: 2 + len(more) // 2], weights, create_graph=True)
    for x, y in zip(grads, torch.autograd.grad(wanted, leaves[: len(grads)], weights)):
        same(x.detach(), y)
    assert all(x.grad_fn is not None for x in grads[:1])
    assert grads[1].stride() == b.stride(), "torch would copy a gradient of another order"
""")


def test_tf32() -> None:
    """fp32 is rounded to tf32 where torch allows it, in gradients too, but in none of a bias, which is a mere sum."""
    run("""
a, b, each = whole(9, 6).requires_grad_(), whole(4, 6, 7).requires_grad_(), whole(4, 7).requires_grad_()
for allowed in (False, True):
    torch.backends.cuda.matmul.allow_tf32 = allowed
    for leaf, rounded in ((a, allowed), (b, allowed), (each, False)):
        gpu.first = None
        of_a, of_b, bias = (x if x is leaf else x.detach() for x in (a, b, each))
        c = lib.grouped_mm(of_a, of_b, offs=offs, bias=bias)
        assert gpu.first.allow_tf32 == allowed and gpu.first.dtype_a == gpu.first.dtype_c == "fp32"
        gpu.first = None
        c.sum().backward()
        assert gpu.first.allow_tf32 == rounded, leaf.shape
""")


def test_opcheck_and_compile() -> None:
    """The op's fake and gradients pass torch's own checks, and torch.compile gives one op for every number of rows."""
    run("""
from torch.library import opcheck
a, b, bias = whole(9, 6).requires_grad_(), whole(4, 6, 7).requires_grad_(), whole(4, 7).requires_grad_()
opcheck(torch.ops.aotmm.grouped_mm.default, (a, b, offs, bias))
opcheck(torch.ops.aotmm.grouped_mm.default, (whole(5, 9).requires_grad_(), whole(9, 7), offs))
opcheck(torch.ops.aotmm.grouped_mm.default, (whole(4, 5, 6), whole(6, 9).requires_grad_(), offs))
compiled = torch.compile(lambda a, b, offs: lib.grouped_mm(a, b, offs=offs), backend="aot_eager", fullgraph=True)
same(compiled(a.detach(), b.detach(), offs), lib.grouped_mm(a.detach(), b.detach(), offs=offs))
""")


def test_explained_problem() -> None:
    """With offs `problem`, and so `explain`, is that of `grouped_mm`: what it launches, or its error; nothing runs."""
    run("""
from dataclasses import replace
a, b, each = whole(11, 6), whole(4, 6, 7), whole(4, 7)
for operands, options in (((a, b), {"bias": each, "activation": "relu"}), ((b.mT[:, :5], a.T), {}), ((a.T, a), {})):
    found = lib.problem(*operands, offs=offs, **options)
    assert gpu.runs == 0
    lib.grouped_mm(*operands, offs=offs, **options)
    assert replace(found, c_ptr=0) == replace(gpu.first, c_ptr=0), (found, gpu.first)
    gpu.first, gpu.runs = None, 0
for options, words in (({"scale_a": each}, "scale_a"), ({"bias": whole(3)}, "bias must be")):
    try:
        lib.explain(a, b, offs=offs, **options)
    except (TypeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
""")


def test_scales_and_rows() -> None:
    """fp8 with scales of rows or of blocks, matrices of which some rows count, and a given result, of any strides."""
    run("""
from aotmm.timing.correctness import block_scaled
e4 = torch.float8_e4m3fn
def powers(*shape): return torch.randint(-2, 3, shape).float().exp2()
a, b = whole(11, 272).clamp(-1, 1), whole(4, 272, 144).clamp(-1, 1)
of_rows, of_columns = powers(11, 1), powers(4, 1, 144)
blocks, wide, narrow = powers(11, 3), powers(4, 3, 2), powers(4, 3, 144)
def want(x, y, scale_x, scale_y):
    if scale_x.dim() and scale_x.shape[-1] > 1:
        x, y = block_scaled(x.double(), y.double(), scale_x.double(), scale_y.double())
        return x @ y
    return (x.double() @ y.double()) * scale_x * scale_y
cases = [(of_rows, of_columns), (torch.tensor(2.0), of_columns), (of_rows, powers(1, 144)), (blocks, wide),
         (blocks, narrow), (blocks.T.contiguous().T, wide.mT.contiguous().mT)]
for scale_a, scale_b in cases:
    options = {"offs": offs, "scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.float32}
    c = lib.grouped_mm(a.to(e4), b.to(e4), **options)
    for g, (lo, hi) in enumerate(spans):
        x = scale_a[lo:hi] if scale_a.numel() > 1 else scale_a
        y = scale_b[g] if scale_b.dim() == 3 else scale_b
        same(c[lo:hi].double(), want(a[lo:hi], b[g], x, y))
e5 = torch.float8_e5m2
x, y = whole(11, 272).clamp(-1, 1), whole(4, 272, 144).clamp(-1, 1)
c = lib.grouped_mm(x.to(e5), y.to(e4), offs=offs, scale_a=of_rows, scale_b=of_columns, out_dtype=torch.float32)
same(c[:3].double(), want(x[:3], y[0], of_rows[:3], of_columns[0]))
left, right, each_row, each_column = b.mT, a.T, of_columns.mT, of_rows.T
in_columns = [(each_row, each_column), (powers(144, 1), torch.full((1, 1), 2.0))]
in_columns += [(narrow.mT, blocks.T), (wide.mT, blocks.T)]
for scale_a, scale_b in in_columns:
    options = {"offs": offs, "scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.float32}
    c = lib.grouped_mm(left.to(e4), right.to(e4), **options)
    for g, (lo, hi) in enumerate(spans):
        x = scale_a[g] if scale_a.dim() == 3 else scale_a
        y = scale_b[:, lo:hi] if scale_b.numel() > 1 else scale_b
        same(c[:, lo:hi].double(), want(right[:, lo:hi].T, left[g].T, y.T, x.T).T)
rows = torch.tensor([3, 0, 5, 1], dtype=torch.int32)
many, of_many, many_blocks = whole(4, 5, 272).clamp(-1, 1), powers(4, 5, 1), powers(4, 5, 3)
padded = torch.empty(4, 3, 8)[:, :, :5].mT.copy_(many_blocks)
out = torch.empty(4, 5, 150)[:, :, :144]
for scale_a, scale_b in ((None, None), (of_many, of_columns), (many_blocks, wide), (padded, narrow)):
    gpu.first = None
    x, y = (many.to(e4), b.to(e4)) if scale_a is not None else (many, b)
    out.fill_(torch.nan)
    assert lib.grouped_mm(x, y, rows=rows, scale_a=scale_a, scale_b=scale_b, out=out, expected_rows=9) is out
    assert gpu.first.group_rows == 5 and gpu.first.M == 20 and gpu.first.expected_rows == 9
    for g, count in enumerate(rows.tolist()):
        one = torch.ones(5, 1), torch.ones(1, 144)
        x, y = (scale_a[g], scale_b[g]) if scale_a is not None else one
        same(out[g, :count].double(), want(many[g, :count], b[g], x[:count], y).double())
        assert out[g, count:].isnan().all()
one = lib.grouped_mm(many[:1].to(e4), b[:1].to(e4), rows=rows[:1], scale_a=of_many[:1], scale_b=of_columns[:1])
same(one[0, :3].double(), want(many[0, :3], b[0], of_many[0, :3], of_columns[0]))
single = lib.grouped_mm(many[:, :1].contiguous(), b, rows=rows.clamp(max=1))
same(single[0], many[0, :1] @ b[0])
same(lib.grouped_mm(a, b, offs=offs, out=torch.empty(144, 11).T)[:3], a[:3] @ b[0])
from torch.library import opcheck
all_rows = torch.full((4,), 5, dtype=torch.int32)
opcheck(torch.ops.aotmm.grouped_mm.default, (many, b, all_rows), test_utils=("test_schema", "test_faketensor"))
for empty in (many[:, :0], many[:1, :0]):
    assert lib.grouped_mm(empty, b[: len(empty)], rows=rows[: len(empty)]).shape == (len(empty), 0, 144)
    assert lib.grouped_mm(empty, b[: len(empty)], rows=rows[: len(empty)], out=out[: len(empty), :0]).numel() == 0
version = out._version
lib.grouped_mm(many, b, rows=rows, out=out)
assert out._version == version + 1, "autograd is told of the write"
compiled = torch.compile(lambda x, y, n, o: lib.grouped_mm(x, y, rows=n, out=o), backend="aot_eager", fullgraph=True)
out.zero_()
compiled(many, b, rows, out)
same(out[0, :3], many[0, :3] @ b[0])
p = lib.problem(many, b, rows=rows)
assert p.group_rows == 5 and p.grouped == "M"
""")


def test_errors() -> None:
    """What does not fit together is refused with its shapes before anything is launched."""
    out = run("""
a, b = whole(9, 6), whole(4, 6, 7)
into, e4 = whole(9, 7), torch.float8_e4m3fn
calls = {
    "no offs": lambda: lib.grouped_mm(a, b),
    "offs of batches": lambda: lib.grouped_mm(b, b.mT, offs=offs),
    "type of offs": lambda: lib.grouped_mm(a, b, offs=offs.long()),
    "number of offs": lambda: lib.grouped_mm(a, b, offs=offs[:2]),
    "shape of offs": lambda: lib.grouped_mm(a, b, offs=offs[None]),
    "inner sizes": lambda: lib.grouped_mm(a[:, :5], b, offs=offs),
    "bias": lambda: lib.grouped_mm(a, b, offs=offs, bias=whole(7, 4)),
    "bias of sums": lambda: lib.grouped_mm(a.T, a, offs=offs, bias=whole(6)),
    "type of bias": lambda: lib.grouped_mm(a, b, offs=offs, bias=whole(7).half()),
    "activation": lambda: lib.grouped_mm(a, b, offs=offs, activation="cube"),
    "rows of a matrix": lambda: lib.grouped_mm(a, b, rows=offs),
    "number of rows": lambda: lib.grouped_mm(b, b.mT, rows=offs[:2]),
    "rows apart": lambda: lib.grouped_mm(whole(4, 8, 7)[:, :6], b.mT, rows=offs),
    "negative rows": lambda: lib.grouped_mm(a, b, offs=offs, expected_rows=-1),
    "rows of none": lambda: lib.grouped_mm(b, b.mT, expected_rows=3),
    "bias in out": lambda: lib.grouped_mm(a, b, offs=offs, out=into, bias=into[0]),
    "scales without groups": lambda: lib.grouped_mm(
        whole(9, 512).to(e4), whole(4, 512, 7).to(e4), offs=offs, scale_a=whole(9, 4), scale_b=whole(4, 7)
    ),
    "shared scales": lambda: lib.grouped_mm(
        whole(4, 5, 256).to(e4), whole(4, 256, 7).to(e4), rows=offs, scale_a=whole(5, 2), scale_b=whole(4, 2, 7)
    ),
    "scales of sums": lambda: lib.grouped_mm(a.T, a, offs=offs, scale_a=whole(1)),
    "scales of columns": lambda: lib.grouped_mm(b.mT, a.T, offs=offs, scale_b=whole(8, 1)),
    "scales of their rows": lambda: lib.grouped_mm(b.mT, a.T, offs=offs, scale_a=whole(4, 1, 6)),
    "scales of columns without groups": lambda: lib.grouped_mm(
        whole(4, 7, 512).to(e4), whole(512, 9).to(e4), offs=offs, scale_a=whole(7, 4), scale_b=whole(4, 9)
    ),
    "scales of rows": lambda: lib.grouped_mm(a, b, offs=offs, scale_a=whole(8, 1)),
    "uneven scales": lambda: lib.grouped_mm(b, b.mT, rows=offs, scale_a=whole(4, 9, 1)[:, :6]),
    "blocks of fp16": lambda: lib.grouped_mm(
        whole(9, 256).half(), whole(4, 256, 7).half(), offs=offs, scale_a=whole(9, 2), scale_b=whole(4, 2, 7)
    ),
    "shape of out": lambda: lib.grouped_mm(a, b, offs=offs, out=whole(9, 6)),
    "out is a": lambda: lib.grouped_mm(a, b.mT[:, :6, :6], offs=offs, out=a),
    "out and out_dtype": lambda: lib.grouped_mm(a, b, offs=offs, out=whole(9, 7), out_dtype=torch.float16),
    "gradient of rows": lambda: lib.grouped_mm(b.requires_grad_(), b.detach().mT, rows=offs),
    "gradient of scales": lambda: lib.grouped_mm(a, b.requires_grad_(), offs=offs, scale_a=whole(1)),
    "gradient of out": lambda: lib.grouped_mm(a, b.requires_grad_(), offs=offs, out=whole(9, 7)),
}
for name, call in calls.items():
    try:
        call()
        print(name, "passed")
    except (TypeError, ValueError, NotImplementedError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
    b = b.detach()
gpu.refuse = "kernel"
short = a.to(torch.int8), b.to(torch.int8)
refused = {"rows": (a.half(), b.half()), "sums": (a.T.half(), a.half())}
refused |= {"int8": short, "sums of int8": (short[0].T, short[0])}
for name, (x, y) in refused.items():
    try:
        lib.grouped_mm(x, y, offs=offs)
    except (aotmm.NoKernelError, TypeError) as error:
        print(f"{name} refused: {type(error).__name__}: {error}")
assert gpu.runs == 0
""")
    for words in (
        "no offs: ValueError: a matrix in groups takes offs, not rows: a is (9, 6), b is (4, 6, 7)",
        "rows of a matrix: ValueError: a matrix in groups takes offs, not rows: a is (9, 6)",
        "offs of batches: ValueError: two batches take rows, not offs",
        "number of rows: ValueError: offs, or rows, must have one number for each matrix",
        "rows apart: ValueError: the matrices of a, and of out, must follow each other as their rows do",
        "negative rows: ValueError: expected_rows=-1: a number of rows in groups, which is not negative",
        "rows of none: ValueError: expected_rows=3: a number of rows in groups",
        "bias in out: ValueError: out shares memory with bias",
        "scales without groups: ValueError: scale_b of blocks of K must be (groups, ceil(K / 128), N)",
        "shared scales: ValueError: scale_a of blocks of K must have the matrices' scales one behind the other",
        "scales of sums: ValueError: scales are for rows of a or columns of b in groups, not for K",
        "scales of columns: ValueError: scale_b must be one number, (1, N), or (ceil(K / 128), N)",
        "scales of their rows: ValueError: scale_a must be one number, (M, 1), or (M, ceil(K / 128))",
        "scales of columns without groups: ValueError: scale_a of blocks of K must be (groups, M, ceil(K / 128))",
        "scales of rows: ValueError: scale_a must be one number, (M, 1), or",
        "uneven scales: ValueError: scale_a must be one number, or have one for each row of all matrices, evenly",
        "blocks of fp16: TypeError: scales of blocks of K are for float8",
        "shape of out: ValueError: out has the wrong shape, it must be (M, N) or (groups, M, N)",
        "out is a: ValueError: out shares memory with an operand",
        "out and out_dtype: TypeError: out_dtype is for a new result",
        "gradient of rows: NotImplementedError: grouped_mm with rows or scales has no gradient",
        "gradient of scales: NotImplementedError: grouped_mm with rows or scales has no gradient",
        "gradient of out: NotImplementedError: a product with out= has no gradient",
        "type of offs: TypeError: offs, or rows, must be int32",
        "number of offs: ValueError: offs, or rows, must have one number for each matrix",
        "shape of offs: ValueError: offs must have one dimension",
        "inner sizes: ValueError: the inner sizes differ",
        "bias: ValueError: bias must be (N) or (groups, N)",
        "bias of sums: ValueError: a bias is for groups of rows of a",
        "type of bias: TypeError: bias must have the dtype of the result",
        "activation: ValueError: unknown activation 'cube'",
        "rows refused: NoKernelError: no kernel fits",
        "for these operands it has: fp16 x fp16 -> fp16, epilogue full",
        "sums refused: NoKernelError: no kernel fits",
        "multiplies int8 x int8 in groups: a is (9, 6) int8 on cpu",
        "offs is (4,) int32 on cpu; it has: bf16 x bf16, fp16 x fp16, fp32 x fp32",
        "sums of int8 refused: TypeError: no kernel of pack",
    ):
        assert words in out


def test_override() -> None:
    """`aotmm.override` takes torch's grouped products with offs, and leaves to torch what it writes in another way.

    K in groups is left to torch in tf32, where torch is faster, unless the same bits at any batch size are asked for.
    """
    out = run("""
a, b = whole(11, 6, dtype=torch.float16), whole(4, 6, 8, dtype=torch.float16)
want = torch.cat([a[lo:hi].float() @ b[g].float() for g, (lo, hi) in enumerate(spans)]).half()
with aotmm.override() as active:
    found = torch._grouped_mm(a, b, offs)
    same(found[:9], want)
    assert gpu.runs == 1 and gpu.first.grouped == "M"
    of_weights = whole(8, 11, dtype=torch.float16), whole(11, 16, dtype=torch.float16), offs
    gpu.first = None
    torch._grouped_mm(*of_weights)
    assert gpu.runs == 2 and gpu.first.grouped == "K"
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        gpu.first = None
        same(torch._grouped_mm(a.float(), b.float(), offs)[:9], want.float())
        assert gpu.first.dtype_a == gpu.first.dtype_c == "fp32" and gpu.first.allow_tf32 == allowed
    columns = b.mT.contiguous(), torch.zeros(6, 16).half(), offs
    in_tf32 = of_weights[0].float(), of_weights[1].float(), offs
    for other in ((a.double(), b.double(), offs), (a, b, offs, b[0, 0]), columns, in_tf32):
        try:
            torch._grouped_mm(*other)
        except (RuntimeError, NotImplementedError):
            pass  # torch has no such kernel here
    assert gpu.runs == 4
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._grouped_mm(*in_tf32)
    assert gpu.runs == 5
    print(active)
torch.backends.cuda.matmul.allow_tf32 = True
with aotmm.override(batch_invariant=True):
    torch._grouped_mm(*columns)
    torch._grouped_mm(*in_tf32)
assert gpu.runs == 7
""")
    assert "5 products by aotmm, 4 by torch: 1 of other types, 3 of other forms" in out


def test_override_with_scales() -> None:
    """Torch's scaled grouped products of fp8 rows come here, in the form of both ops; others are torch's."""
    out = run("""
e4, one = torch.float8_e4m3fn, torch.nn.functional.ScalingType.RowWise.value
def refuse(*arguments, **options): raise NotImplementedError("as torch's kernel on a GPU, which a CPU lacks")
kernels = torch.library.Library("aten", "IMPL")
for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
    kernels.impl(name, refuse, "CPU")
a, b = whole(11, 16), whole(4, 8, 16)
of_a, of_b = torch.rand(11) + 0.5, torch.rand(4, 8) + 0.5
x, y = a.to(e4), b.to(e4).mT
parts = [(a[lo:hi] @ b[g].T) * of_a[lo:hi, None] * of_b[g] for g, (lo, hi) in enumerate(spans)]
with aotmm.override() as active:
    for fast in (False, True):
        found = torch._scaled_grouped_mm(x, y, of_a, of_b, offs, out_dtype=torch.bfloat16, use_fast_accum=fast)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found[:9].float(), torch.cat(parts), rtol=2**-8, atol=0)
        assert gpu.first.fast_accum == fast and gpu.first.stride_scale_bz == 8
        gpu.first = None
    found = torch._scaled_grouped_mm_v2(x, y, [of_a], [one], [], [of_b], [one], [], offs, None, torch.bfloat16)
    torch.testing.assert_close(found[:9].float(), torch.cat(parts), rtol=2**-8, atol=0)
    assert gpu.runs == 3
    for other in ((x, y, of_a, of_b, offs), (x, y, of_a.double(), of_b, offs, None, None, torch.bfloat16)):
        try:
            torch._scaled_grouped_mm(*other)
        except (RuntimeError, ValueError, NotImplementedError, TypeError):
            pass  # torch has no such kernel here
    assert gpu.runs == 3
    print(active)
""")
    assert "3 products by aotmm, 2 by torch: 2 of other forms" in out


def test_document() -> None:
    """The first code of docs/experts.md runs, and gives each expert's rows its product; the second is an example."""
    code, _ = re.findall(r"```python\n(.*?)```", (pretend.CHECKOUT / "docs" / "experts.md").read_text(), re.DOTALL)
    given = """
        expert = torch.tensor([3, 0, 3, 7, 0, 5])
        order = expert.argsort()
        x, weights = whole(6, 16), whole(8, 24, 16)
    """
    judged = "\nsame(y, torch.stack([x[i] @ weights[expert[i]].T for i in order]))\n"
    run(textwrap.dedent(given) + code + judged)
