"""One product of 16384 x 16384 x 16384 in bf16 on 1, 2 and 4 GPUs of this machine, a process each, over NCCL."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import aotmm
from aotmm.timing.correctness import U_OUT, U_TENSOR_CORE, Epilogue, allowed, sizes, sum_errors
from aotmm.timing.graph import elapsed_ns

SIZE = 16384
_WORLDS = (1, 2, 4)
_REPEATS = 20
_WARM_UP = 5
_ROWS = 64  # that are checked


def measure(size: int = SIZE) -> dict[str, dict[str, float]]:
    """Return milliseconds of each way to split the product, and its speedup over one GPU of the same run.

    By columns: every GPU has all of A and its own columns of B and C, which stay there. Along K: every GPU has its own
    columns of A and rows of B, and an all-reduce adds up the products; "communication" is its share of the time.
    Each result is checked before it is timed.
    """
    found: dict[str, dict[str, float]] = {}
    for world in _WORLDS:
        if world <= torch.cuda.device_count():
            with tempfile.TemporaryDirectory() as folder:
                spawn(_process, (world, size, folder), nprocs=world)  # type: ignore[no-untyped-call]
                found |= json.loads((Path(folder) / "found.json").read_text())
    return found


def _process(rank: int, world: int, size: int, folder: str) -> None:
    """Measure on one GPU; the first one writes the results."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device)
    generator = torch.Generator(device).manual_seed(20261120)  # the same numbers everywhere
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    rows = torch.randint(size, (_ROWS,), device=device, generator=generator)
    lib, share = aotmm.load(), size // world
    mine = slice(rank * share, (rank + 1) * share)
    columns, a_part, b_part = b[:, mine].contiguous(), a[:, mine].contiguous(), b[mine]
    part, whole = (torch.empty(size, n, device=device, dtype=torch.bfloat16) for n in (share, size))

    def by_columns() -> None:
        lib.matmul(a, columns, out=part)

    def along_k() -> None:
        lib.matmul(a_part, b_part, out=whole)

    def reduced() -> None:
        along_k()
        dist.all_reduce(whole)

    by_columns()
    _check(part, rows, a, columns, (), f"by columns on {world} GPUs")
    found: dict[str, dict[str, float]] = {}
    if world == 1:
        found["1 GPU"] = {"ms": _ms(by_columns)}
    else:
        along_k()
        terms = _terms(whole, rows)
        dist.all_reduce(terms)
        dist.all_reduce(whole)
        _check(whole, rows, a, b, (terms,) * world, f"along K on {world} GPUs")
        one = _ms(lambda: lib.matmul(a, b, out=whole))
        split, product, total = _ms(by_columns), _ms(along_k), _ms(reduced)
        found[f"{world} GPUs, by columns, left so"] = {"ms": split, "speedup": one / split}
        shares = {"ms": total, "speedup": one / total, "communication": 1 - product / total}
        found[f"{world} GPUs, along K, all-reduce"] = shares
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _terms(c: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return c[rows].float().abs()


def _check(
    c: torch.Tensor, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rounded: tuple[torch.Tensor, ...], way: str
) -> None:
    """Raise RuntimeError if some rows of c are not a @ b within its bound.

    rounded: the intermediate values that were rounded to bf16.
    """
    x, y = a[rows].double(), b.double()
    want = x @ y
    sums = torch.minimum(*sum_errors(x.shape[1], *sizes(x, y), U_TENSOR_CORE))
    bound = allowed(want, want, sums + U_OUT["bf16"] * sum(rounded), Epilogue(), "bf16")
    error = float(((c[rows].double() - want).abs() / bound).nan_to_num(nan=float("inf")).max())
    if error > 1:
        raise RuntimeError(f"the product {way} is wrong: its error is {error:.2f} times what is allowed")


def _ms(step: Callable[[], object]) -> float:
    """Return the median over repetitions of the slowest GPU's milliseconds; all begin together."""
    times = []
    for repeat in range(_WARM_UP + _REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        slowest = torch.tensor(elapsed_ns(step) * 1e-6, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if repeat >= _WARM_UP:
            times.append(float(slowest))
    return statistics.median(times)
