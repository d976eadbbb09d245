"""Products over several GPUs by DTensor and NCCL: integers, so that every sum is exact in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import aotmm
import aotmm.nn

LIMIT_S = 300  # of a test: processes start
M, N, K = 64, 96, 128


def begin(world: int, check: Callable[..., None], folder: Path) -> None:
    """Runs `check(mesh, device)` in a process per GPU."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"fewer than {world} GPUs here")
    spawn(_process, (world, check, str(folder / "store")), nprocs=world)  # type: ignore[no-untyped-call]


def _process(rank: int, world: int, check: Callable[..., None], store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    torch.manual_seed(0)
    check(init_device_mesh("cuda", (world,)), device)
    dist.barrier()  # another may still wait for something of this one's
    dist.destroy_process_group()


def units(device: torch.device, *shape: int) -> torch.Tensor:
    """Random -1, 0 and 1, the same on every process."""
    return torch.randint(-1, 2, shape).double().to(device)


def check_splits(mesh: Any, device: torch.device) -> None:
    """Rows, columns, batch and K, in fp32 and bf16, forward and backward, are exact."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    lib = aotmm.load()
    whole = Replicate()
    cases: tuple[tuple[Any, Any, tuple[int, ...]], ...] = (
        (Shard(0), whole, ()),
        (whole, Shard(1), ()),
        (Shard(1), Shard(0), ()),
        (Shard(0), Shard(0), (8,)),
    )
    for dtype in (torch.float32, torch.bfloat16):
        for place_a, place_b, batch in cases:
            a, b, g = units(device, *batch, M, K), units(device, *batch, K, N), units(device, *batch, M, N)
            x, w = (
                distribute_tensor(each.to(dtype), mesh, [place]).requires_grad_()
                for each, place in ((a, place_a), (b, place_b))
            )
            c = lib.matmul(x, w)
            c.backward(distribute_tensor(g.to(dtype), mesh, [whole]))  # type: ignore[no-untyped-call]
            for found, want in ((c, a @ b), (x.grad, g @ b.mT), (w.grad, a.mT @ g)):
                assert isinstance(found, DTensor)
                assert torch.equal(found.full_tensor().double(), want), (dtype, place_a, place_b)


def check_tensor_parallel(mesh: Any, device: torch.device) -> None:
    """torch's own plans for tensor parallel layers take `aotmm.nn.Linear` as they take torch.nn.Linear."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def model() -> torch.nn.Sequential:
        first = aotmm.nn.Linear(K, 4 * N, device=device, activation="relu")
        second = aotmm.nn.Linear(4 * N, K, device=device)
        for layer in (first, second):
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(units(device, *parameter.shape))
        return torch.nn.Sequential(first, second)

    alone = model()
    torch.manual_seed(0)
    spread = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    placements = {name: value.placements for name, value in spread.state_dict().items()}
    values = alone.state_dict().items()
    spread.load_state_dict({name: distribute_tensor(value, mesh, placements[name]) for name, value in values})
    x = units(device, M, K).float()
    want, got = alone(x), spread(x)
    assert torch.equal(got, want)
    for result in (want, got):
        result.sum().backward()
    for mine, right in zip(spread.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert right.grad is not None
        assert torch.equal(mine.grad.full_tensor(), right.grad)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", [check_splits, check_tensor_parallel])
def test_processes(tmp_path: Path, world: int, check: Callable[..., None]) -> None:
    """Over two and four GPUs, forward and backward."""
    begin(world, check, tmp_path)
