"""Softmax of each row of a matrix, one row for a block: a kernel as it is written for Triton's JIT."""

import triton
import triton.language as tl


@triton.jit
def shifted_exp(row):
    return tl.exp(row - tl.max(row, axis=0))


@triton.jit
def softmax_kernel(out_ptr, in_ptr, out_stride, in_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(in_ptr + row * in_stride + cols, mask=inside, other=-float("inf"))
    parts = shifted_exp(x.to(tl.float32))
    tl.store(out_ptr + row * out_stride + cols, parts / tl.sum(parts, axis=0), mask=inside)
