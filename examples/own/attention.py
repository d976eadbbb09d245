"""Attention of each head without its matrix in memory: softmax(Q K^T * scale) V, causal or not."""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, n_ctx, stride_head, stride_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    begin, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64) * stride_head
    rows, keys, dims = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, HEAD)
    mine = head + rows[:, None] * stride_row + dims[None, :]
    q = tl.load(q_ptr + mine, mask=(rows < n_ctx)[:, None], other=0.0)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, HEAD), tl.float32)
    end = tl.minimum(begin + BLOCK_M, n_ctx) if CAUSAL else n_ctx
    for start in range(0, end, BLOCK_N):
        at = start + keys
        theirs = head + at[:, None] * stride_row + dims[None, :]
        k = tl.load(k_ptr + theirs, mask=(at < n_ctx)[:, None], other=0.0)
        v = tl.load(v_ptr + theirs, mask=(at < n_ctx)[:, None], other=0.0)
        seen = (at < n_ctx)[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= rows[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        high = tl.maximum(top, tl.max(score, axis=1))
        parts = tl.exp(score - high[:, None])
        shrink = tl.exp(top - high)
        weight = weight * shrink + tl.sum(parts, axis=1)
        total = tl.dot(parts.to(v.dtype), v, total * shrink[:, None])
        top = high
    tl.store(out_ptr + mine, (total / weight[:, None]).to(q.dtype), mask=(rows < n_ctx)[:, None])
