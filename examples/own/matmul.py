"""Matrix product with an activation by name: C = f(A B) in fp32, of fp16 or fp8, tiles by @triton.autotune."""

import triton
import triton.language as tl


@triton.jit
def leaky_relu(x):
    return tl.where(x < 0, 0.01 * x, x)


@triton.autotune(
    [
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, num_warps=2, num_stages=2),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr = "",
):  # fmt: skip
    tile, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    rows = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        along = begin + tl.arange(0, BLOCK_K)
        a_inside = (rows < M)[:, None] & (along < K)[None, :]
        b_inside = (along < K)[:, None] & (cols < N)[None, :]
        a = tl.load(a_ptr + rows[:, None] * stride_a + along[None, :], mask=a_inside, other=0.0)
        b = tl.load(b_ptr + along[:, None] * stride_b + cols[None, :], mask=b_inside, other=0.0)
        total = tl.dot(a, b, total)
    if ACTIVATION == "leaky_relu":
        total = leaky_relu(total)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(c_ptr + rows[:, None] * stride_c + cols[None, :], total.to(c_ptr.dtype.element_ty), mask=inside)
