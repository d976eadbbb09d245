"""Block scales of fp8 through `lib.matmul`, on a GPU that is not there: their shapes say what they are."""

from __future__ import annotations

from tests.runtime.pretend import run

MAKE = """
from aotmm.timing.correctness import block_scaled
e4 = torch.float8_e4m3fn
def close(c, to): return c.shape == to.shape and bool((c.double() - to).abs().max() <= 2.0**-9 * to.abs().max())
def want(a, b, scale_a, scale_b):
    x, y = block_scaled(a.double(), b.double(), scale_a.double(), scale_b.double())
    return x @ y
def matmul(a, b, scale_a, scale_b, **options): return lib.matmul(a, b, scale_a=scale_a, scale_b=scale_b, **options)
a, b = torch.randn(5, 272).to(e4), torch.randn(144, 272).to(e4).t()
of_a, of_b, narrow = torch.rand(5, 3) + 0.5, torch.rand(3, 2) + 0.5, torch.rand(3, 144) + 0.5
many, several = torch.randn(2, 5, 272).to(e4), torch.randn(2, 144, 272).to(e4).mT
of_many, of_several = torch.rand(2, 5, 3) + 0.5, torch.rand(2, 3, 2) + 0.5
"""


def test_layouts_and_batches() -> None:
    """Scales of any strides are taken as they lie, in every granularity, also of a batch and where one is for all."""
    run(
        MAKE
        + """
def launched(*arguments, **options):
    gpu.first = None
    assert close(matmul(*arguments, **options), want(*arguments))
    return gpu.first
for scale_a in (of_a, of_a.t().contiguous().t(), torch.cat([of_a, of_a], 1)[:, :3]):
    for scale_b in (of_b, of_b.t().contiguous().t(), narrow, narrow.t().contiguous().t()):
        p = launched(a, b, scale_a, scale_b)
        assert (p.block_scale_a_ptr, p.block_scale_b_ptr) == (scale_a.data_ptr(), scale_b.data_ptr())
        assert p.block_strides_a == (0, *scale_a.stride()) and p.block_strides_b == (0, *scale_b.stride())
        assert p.block_columns == (1 if scale_b.shape[1] == 144 else 128) and p.scale_a_ptr == p.scale_b_ptr == 0
assert launched(many, b, of_many, of_b).batch == 1, "rows of all matrices"
assert launched(many, several, of_many, of_several).batch == 2
assert launched(many, several, of_a, of_b).block_strides_a[0] == 0
assert close(matmul(a, b, torch.tensor(2.0), of_b), 2 * want(a, b, torch.ones(5, 3), of_b))
assert close(matmul(a, b, of_a, torch.tensor(2.0)), 2 * want(a, b, of_a, torch.ones(3, 2)))
few = a[:, :100], b[:100], of_a[:, :1], of_b[:1]
assert launched(*few).block_scale_a_ptr and launched(few[0], few[1], few[2], narrow[:1]).scale_a_ptr, "one block of K"
assert matmul(a[:, :0], b[:0], of_a[:, :0], of_b[:0]).count_nonzero() == 0
out = torch.empty(5, 144, dtype=torch.float32)
assert matmul(a, b, of_a, of_b, out=out) is out and close(out, want(a, b, of_a, of_b))
compiled = torch.compile(matmul, backend="aot_eager")
assert close(compiled(a, b, of_a, of_b), want(a, b, of_a, of_b))
assert close(compiled(many, b, of_many, of_b), want(many, b, of_many, of_b))
"""
    )


def test_errors() -> None:
    """Scales that fit no granularity, or are of one operand alone, and operands that are not fp8 are refused."""
    run(
        MAKE
        + """
def error(*arguments):
    try: matmul(*arguments)
    except (TypeError, ValueError) as raised: return f"{type(raised).__name__}: {raised}"
assert error(a, b, of_a, None).startswith("ValueError: scales of blocks of K need both scale_a and scale_b: a is (5,")
assert error(a, b, None, narrow).startswith("ValueError: scales of blocks of K need both")
assert error(a, b, of_a, of_b[:2]).startswith("ValueError: scale_b must be one number, (1, N), or (ceil(K / 128), N)")
assert error(a, b, of_a, of_b[:2]).endswith("scale_a is (5, 3) float32 on cpu, scale_b is (2, 2) float32 on cpu")
assert error(a, b, of_a[:, :2], of_b).startswith("ValueError: scale_a must be one number, (M, 1), or (M, ceil(K /")
assert error(a, b, of_many, of_b).startswith("ValueError: scale_a must be")
assert error(many, b, of_many[:, :, :1], narrow[:1]).startswith("ValueError: scales of rows and columns are the same")
assert error(a, b, of_a.half(), of_b).startswith("TypeError: scales must be float32")
assert error(a.half(), b.half(), of_a, of_b).startswith("TypeError: scales of blocks of K are for float8")
"""
    )
