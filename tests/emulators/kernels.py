"""A Triton kernel with what aotmm's own kernels do not use, and the instructions that come of it (it needs Triton).

C[z] = activation(A[z] @ B[z]), z = program_id(2), with A (M, K), B (K, N), C (M, N) and all strides in elements.
`variants.py` says which combinations of the constexprs are compiled:

BM, BN, BK: the tile.
SPLIT: above 1, program_id(1) takes every SPLIT-th block of K and adds its part to C atomically, in memory order SEM.
SWITCH: the run-time argument `act` chooses between nothing, relu, leaky_relu of 0.5 and more, by a table of branches.
CAST: "fp8e4" for operands that are bytes, widened to fp16 by integer operations.
ACC: the type of the sums; PREC: the input precision of fp32 operands.
"""

import triton
import triton.language as tl


@triton.jit
def widened(x):
    """Bytes of e4m3 to fp16 (exact, NaN kept): shift the fields, then rescale by 2^8."""
    w = x.to(tl.uint16)
    magnitude = w & 0x7F
    bits = ((w & 0x80) << 8) | (magnitude << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    nan = (bits | 0x7E00).to(tl.float16, bitcast=True)
    return tl.where(magnitude == 0x7F, nan, value.to(tl.float16))


@triton.jit
def switched(x, act):
    """One of eight functions, so that ptxas makes a table of branches."""
    if act == 1:
        x = tl.maximum(x, 0.0)
    elif act == 2:
        x = tl.where(x >= 0, x, 0.5 * x)
    elif act == 3:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif act == 4:
        x = x * x
    elif act == 5:
        x = x * tl.sigmoid(x)
    elif act == 6:
        x = tl.sigmoid(x)
    elif act == 7:
        x = tl.abs(x)
    return x


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    saz,
    sam,
    sak,
    sbz,
    sbk,
    sbn,
    scz,
    scm,
    scn,
    act,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    SWITCH: tl.constexpr,
    CAST: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
    SEM: tl.constexpr,
):
    pid = tl.program_id(0)
    piece = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    tiles_n = tl.cdiv(N, BN)
    rm = pid // tiles_n * BM + tl.arange(0, BM)
    rn = pid % tiles_n * BN + tl.arange(0, BN)
    rk = piece * BK + tl.arange(0, BK)
    a = a_ptr + batch * saz + (rm[:, None] % M).to(tl.int64) * sam + rk[None, :].to(tl.int64) * sak
    b = b_ptr + batch * sbz + rk[:, None].to(tl.int64) * sbk + (rn[None, :] % N).to(tl.int64) * sbn
    acc = tl.zeros((BM, BN), dtype=ACC)
    for k in range(piece * BK, K, BK * SPLIT):
        left = K - k + piece * BK
        av = tl.load(a, mask=rk[None, :] < left, other=0.0)
        bv = tl.load(b, mask=rk[:, None] < left, other=0.0)
        if CAST == "fp8e4":
            av = widened(av)
            bv = widened(bv)
        acc = tl.dot(av, bv, acc, input_precision=PREC, out_dtype=acc.dtype)
        a += BK * SPLIT * sak
        b += BK * SPLIT * sbk
    if SWITCH:
        acc = switched(acc, act)
    c = acc.to(c_ptr.dtype.element_ty)
    to = c_ptr + batch * scz + rm[:, None].to(tl.int64) * scm + rn[None, :].to(tl.int64) * scn
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    if SPLIT == 1:
        tl.store(to, c, mask=inside)
    else:
        tl.atomic_add(to, c, mask=inside, sem=SEM)
