"""`aotmm.deep_gemm`: DeepGEMM's four functions, its layouts of rows and of scales; NumPy multiplies (`pretend`)."""

from __future__ import annotations

from tests.runtime.pretend import run

MAKE = """
import aotmm.deep_gemm as deep_gemm
from aotmm.timing.correctness import block_scaled
torch.manual_seed(0)
e4, bf16 = torch.float8_e4m3fn, torch.bfloat16
def whole(*shape): return torch.randint(-1, 2, shape).float()
def powers(*shape): return torch.randint(-1, 2, shape).float().exp2()
def want(x, y, scale_x=None, scale_y=None):
    if scale_x is None:
        return x.double() @ y.double().T
    x, y = block_scaled(x.double(), y.double().T, scale_x.double(), scale_y.double().T)
    return x @ y
def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0)
G, N, K = 4, 144, 272
b, of_b = whole(G, N, K), powers(G, 2, 3)
"""


def test_contiguous() -> None:
    """Groups at multiples of 128 rows, by the group of each row or by ends; blocks of no group are never read back."""
    run(
        MAKE
        + """
counts, M = [100, 0, 130, 1], 640
a, of_a = whole(M, K), powers(M, 3)
ids, ends, begin, spans = torch.full((M,), -1, dtype=torch.int32), [], 0, []
for group, count in enumerate(counts):
    ids[begin : begin + count] = group
    spans.append((begin, begin + count))
    ends.append(begin + count)
    begin += -(-count // 128) * 128
assert begin == 512 and deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
major = torch.empty(3, 640).T.copy_(of_a)
def judged(d, scaled):
    for g, (lo, hi) in enumerate(spans):
        close(d[lo:hi], want(a[lo:hi], b[g], *((of_a[lo:hi], of_b[g]) if scaled else ())))
    assert d[512:].isnan().all(), "no group begins there"
for layout, psum in ((ids, False), (torch.tensor(ends, dtype=torch.int32), True)):
    d = torch.full((M, N), torch.nan, dtype=bf16)
    more = {"use_psum_layout": psum} | ({"expected_m_for_psum_layout": 60} if psum else {})
    assert deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a.to(bf16), b.to(bf16), d, layout, **more) is None
    judged(d, False)
    assert gpu.first.expected_rows == (240 if psum else 0)
    gpu.first = None
    for scales in (of_a, major):
        d.fill_(torch.nan)
        pairs = (a.to(e4), scales), (b.to(e4), of_b)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*pairs, d, layout, recipe=(1, 128, 128), **more)
        judged(d, True)
        assert gpu.first.block_scale_a_ptr == scales.data_ptr() and gpu.first.block_scale_b_ptr == of_b.data_ptr()
        gpu.first = None
between = torch.tensor([1, -1, 3, -1], dtype=torch.int32).repeat_interleave(128)
d = torch.full((512, N), torch.nan, dtype=bf16)
deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a[:512].to(bf16), b.to(bf16), d, between)
close(d[:128], want(a[:128], b[1])), close(d[256:384], want(a[256:384], b[3]))
assert d[384:].isnan().all()
"""
    )


def test_masked() -> None:
    """The first rows of each matrix count, by numbers on the device; an estimate of them goes to selection."""
    run(
        MAKE
        + """
masked_m = torch.tensor([3, 0, 7, 5], dtype=torch.int32)
a, of_a = whole(G, 7, K), powers(G, 7, 3)
major = torch.empty(G, 3, 8).mT[:, :7].copy_(of_a)
def judged(d, scaled):
    for g, count in enumerate(masked_m.tolist()):
        close(d[g, :count], want(a[g, :count], b[g], *((of_a[g, :count], of_b[g]) if scaled else ())))
        assert d[g, count:].isnan().all()
d = torch.full((G, 7, N), torch.nan, dtype=bf16)
assert deep_gemm.m_grouped_bf16_gemm_nt_masked(a.to(bf16), b.to(bf16), d, masked_m, 3) is None
judged(d, False)
assert gpu.first.expected_rows == 12 and gpu.first.group_rows == 7
for scales in (of_a, major):
    d.fill_(torch.nan)
    pairs = (a.to(e4), scales), (b.to(e4), of_b)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(*pairs, d, masked_m, 3, disable_ue8m0_cast=True)
    judged(d, True)
"""
    )


def test_errors() -> None:
    """Other recipes, types and shapes are refused by name, before anything is launched."""
    out = run(
        MAKE
        + """
a, d, ids = whole(128, K), torch.empty(128, N, dtype=bf16), torch.zeros(128, dtype=torch.int32)
of_a = powers(128, 3)
fp8 = (a.to(e4), of_a), (b.to(e4), of_b)
calls = {
    "recipe": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*fp8, d, ids, recipe=(1, 1, 128)),
    "recipe of b": lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(*fp8, d, ids, 1, None, (1, 128), (1, 128)),
    "type of a": lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a.half(), b.to(bf16), d, ids),
    "type of d": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*fp8, d.float(), ids),
    "type of b": lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked((a.to(e4), of_a), (b, of_b), d, ids, 1),
    "type of ids": lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a.to(bf16), b.to(bf16), d, ids.long()),
    "number of ids": lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a.to(bf16), b.to(bf16), d, ids[:9]),
    "packed scales": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((fp8[0][0], fp8[0][1].int()), fp8[1], d, ids),
    "shape of d": lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a.to(bf16), b.to(bf16), d[:, 1:], ids),
}
for name, call in calls.items():
    try:
        call()
        print(name, "passed")
    except (TypeError, ValueError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
assert gpu.runs == 0
"""
    )
    for words in (
        "recipe: ValueError: recipe=(1, 1, 128): kernels have (1, 128, 128) alone",
        "recipe of b: ValueError: recipe_b=(1, 128): kernels have (128, 128) alone",
        "type of a: TypeError: a must be torch.bfloat16, found torch.float16",
        "type of d: TypeError: d must be torch.bfloat16, found torch.float32",
        "type of b: TypeError: b must be torch.float8_e4m3fn, found torch.float32",
        "type of ids: TypeError: grouped_layout must be torch.int32, found torch.int64",
        "number of ids: ValueError: grouped_layout must be (128,), one group for each row, found (9,)",
        "packed scales: TypeError: scales must be float32",
        "shape of d: ValueError: out has the wrong shape",
    ):
        assert words in out
