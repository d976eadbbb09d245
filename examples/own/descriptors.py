"""Tensor descriptors, which Hopper copies tiles by: made by the caller, and made in the kernel."""

import triton
import triton.language as tl


@triton.jit
def descriptor_matmul_kernel(a, b, c, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, a.shape[1], BLOCK_K):
        total = tl.dot(a.load([row, k]), b.load([k, col]), total)
    c.store([row, col], total.to(tl.float16))


@triton.jit
def double_kernel(out_ptr, x_ptr, rows, cols, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, cols], [stride, 1], [BLOCK_M, BLOCK_N])
    out = tl.make_tensor_descriptor(out_ptr, [rows, cols], [stride, 1], [BLOCK_M, BLOCK_N])
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    tile = x.load([row, col])
    out.store([row, col], tile + tile)
