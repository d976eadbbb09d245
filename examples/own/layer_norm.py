"""Layer normalisation of rows of any length, with a bias or without: a kernel as it is written for Triton's JIT."""

import triton
import triton.language as tl

ACCUMULATE = tl.constexpr(tl.float32)


@triton.autotune([triton.Config({"BLOCK": 512}, num_warps=4), triton.Config({"BLOCK": 128}, num_warps=1)], key=["N"])
@triton.jit
def layer_norm_kernel(x_ptr, y_ptr, weight_ptr, bias_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride
    y_ptr += row * stride
    total = tl.zeros([BLOCK], ACCUMULATE)
    squares = tl.zeros([BLOCK], ACCUMULATE)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(ACCUMULATE)
        total += x
        squares += x * x
    mean = tl.sum(total, axis=0) / N
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / N - mean * mean + eps)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(ACCUMULATE)
        y = (x - mean) * scale * tl.load(weight_ptr + cols, mask=cols < N)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + cols, mask=cols < N)
        tl.store(y_ptr + cols, y, mask=cols < N)
