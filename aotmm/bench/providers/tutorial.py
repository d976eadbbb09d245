"""The kernel of Triton tutorial 03, compiled at its first use and autotuned over the `tutorial` config set.

Source: Triton tutorial 03, "Matrix Multiplication": the kernel, its configurations and its tuning key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import aotmm
from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.timing.operands import Operands
from aotmm.timing.problems import Case

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE = Path(aotmm.__file__).parent / "configs" / "tutorial.toml"


def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute C (M, N) = A (M, K) @ B (K, N), one BLOCK_M x BLOCK_N tile per program, in groups of GROUP_M rows."""
    pid = tl.program_id(axis=0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    first_m = pid // tiles_in_group * GROUP_M
    rows_in_group = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % tiles_in_group % rows_in_group
    tile_n = pid % tiles_in_group // rows_in_group

    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    cols = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=ks[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=ks[:, None] < K - k * BLOCK_K, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk

    c_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    c_cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + stride_cm * c_rows[:, None] + stride_cn * c_cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(c_rows[:, None] < M) & (c_cols[None, :] < N))


def configs(backend: str) -> list[Any]:
    """Return the configurations of the `tutorial` set for `backend`, "cuda" or "hip", for Triton.

    All take tiles in groups of 8 rows, as the tutorial's for CUDA.
    """
    entries = tomllib.loads(_FILE.read_text(encoding="utf-8"))["config"]
    config_name = {"backend", "source", "num_stages", "num_warps"}
    return [
        triton.Config(
            {
                name if name == "waves_per_eu" else name.upper(): value
                for name, value in entry.items()
                if name not in config_name
            }
            | {"GROUP_M": 8},
            num_stages=entry["num_stages"],
            num_warps=entry["num_warps"],
        )
        for entry in entries
        if entry["backend"] == backend
    ]


@cache
def _kernel(*, brief: bool) -> Any:
    """Return the autotuned kernel. brief: time each configuration for 10 ms instead of 100, Triton's default."""
    do_bench = _brief if brief else None
    tuned = configs("cuda" if torch.version.hip is None else "hip")
    return triton.autotune(tuned, key=["M", "N", "K"], do_bench=do_bench)(triton.jit(matmul_kernel))


def _brief(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    return triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, brief: bool = False) -> torch.Tensor:
    """Return `out` (M, N) = a (M, K) @ b (K, N); tune at the first call with these sizes."""
    M, N, K = a.shape[0], b.shape[1], a.shape[1]

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)

    _kernel(brief=brief)[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), *out.stride())
    return out


def _prepare(case: Case, sets: Sequence[Operands]) -> Call:
    if case.activation is not None or case.element_bytes == 1:
        raise NotRunError("the tutorial's kernel multiplies 16-bit types and has no bias")
    matmul(sets[0].a, sets[0].b, sets[0].out, brief=True)
    return lambda operands: matmul(operands.a, operands.b, operands.out, brief=True)


def _describe(_case: Case, _operands: Operands) -> str:
    return str(_kernel(brief=True).best_config)


PROVIDERS = (
    Provider(
        "tutorial",
        "Triton tutorial 03's kernel, compiled just in time and autotuned over its own configurations",
        _prepare,
        describe=_describe,
    ),
)
