"""DTensor's rules for products: on one process that takes itself for four, and in values between two."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from aotmm.runtime import dtensor
from aotmm.runtime.library import Library

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

WHOLE, SUM = Replicate(), Partial()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four processes, of which this is one and the others are imagined."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def split(mesh: DeviceMesh, placement: Placement, *shape: int) -> DTensor:
    """Random numbers on the mesh that require a gradient."""
    return distribute_tensor(torch.randn(shape).requires_grad_(), mesh, [placement])


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("a", "b", "result", "of_a", "of_b"),
    [
        (((8, 16), WHOLE), ((16, 12), WHOLE), WHOLE, WHOLE, WHOLE),
        (((8, 16), Shard(0)), ((16, 12), WHOLE), Shard(0), Shard(0), SUM),
        (((8, 16), WHOLE), ((16, 12), Shard(1)), Shard(1), SUM, Shard(1)),
        (((8, 16), Shard(1)), ((16, 12), Shard(0)), SUM, Shard(1), Shard(0)),
        (((4, 8, 16), Shard(0)), ((4, 16, 12), Shard(0)), Shard(0), Shard(0), Shard(0)),
        (((4, 8, 16), Shard(0)), ((16, 12), WHOLE), Shard(0), Shard(0), SUM),
        (((2, 8, 16), Shard(2)), ((16, 12), Shard(0)), SUM, Shard(2), Shard(0)),
    ],
    ids=["whole", "rows", "columns", "along K", "batch", "batch of rows", "batch along K"],
)
def test_placements(
    lib: Library, mesh: DeviceMesh, a: Any, b: Any, result: Placement, of_a: Placement, of_b: Placement
) -> None:
    """Each way to split a product gives the expected split of the result and, in backward, of the gradients."""
    x, w = split(mesh, a[1], *a[0]), split(mesh, b[1], *b[0])
    y = lib.matmul(x, w)
    assert isinstance(y, DTensor)
    assert y.placements == (result,)
    assert y.shape == torch.empty(a[0]).matmul(torch.empty(b[0])).shape
    part = WHOLE if result == SUM else result
    gradient = distribute_tensor(torch.ones(y.shape), mesh, [part])
    found = torch.autograd.grad(y, (x, w), gradient)
    assert [each.placements for each in found if isinstance(each, DTensor)] == [(of_a,), (of_b,)]
    assert [each.shape for each in found] == [x.shape, w.shape]


@pytest.mark.usefixtures("calls")
def test_epilogues(lib: Library, mesh: DeviceMesh) -> None:
    """A bias is split as the result is, and an activation is of whole sums."""
    x, w, bias = split(mesh, Shard(1), 8, 16), split(mesh, Shard(0), 16, 12), split(mesh, WHOLE, 12)
    summed = lib.matmul(x, w, bias=bias)
    with torch.no_grad():
        fused = lib.matmul(x, w, bias=bias, activation="gelu")
    assert isinstance(summed, DTensor)
    assert isinstance(fused, DTensor)
    assert (summed.placements, fused.placements) == ((SUM,), (WHOLE,))
    with torch.no_grad():
        rows = torch.ops.aotmm.mm(split(mesh, Shard(0), 8, 16), split(mesh, WHOLE, 16, 12), bias)
        scaled = torch.ops.aotmm.mm(x, w, None, split(mesh, WHOLE, 8, 1))
    assert (rows.placements, rows.to_local().shape) == ((Shard(0),), (2, 12))
    assert scaled.placements == (SUM,)


@pytest.mark.usefixtures("calls")
def test_two_dimensions(lib: Library, mesh: DeviceMesh) -> None:
    """On a mesh of two dimensions each may split another way."""
    grid = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.randn(8, 16), grid, [Shard(0), WHOLE])
    w = distribute_tensor(torch.randn(16, 12), grid, [WHOLE, Shard(1)])
    y = lib.matmul(x, w)
    assert mesh.size() == 4
    assert isinstance(y, DTensor)
    assert (y.placements, y.to_local().shape) == ((Shard(0), Shard(1)), (4, 6))


def test_nothing_without_dtensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody uses DTensor it is not imported."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    dtensor.register()
    assert "torch.distributed.tensor" not in sys.modules


def _values(rank: int, store: str) -> None:
    """One of two processes: every split gives torch's result and gradients, and their sum over the processes."""
    from tests.runtime.stand_in import stand_in

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    lib, registered, _ = stand_in()
    torch.manual_seed(0)
    a, b, bias = torch.randn(8, 16), torch.randn(16, 12), torch.randn(12)
    for places in ((Shard(0), WHOLE, WHOLE), (WHOLE, Shard(1), Shard(0)), (Shard(1), Shard(0), WHOLE)):
        plain = [tensor.clone().requires_grad_() for tensor in (a, b, bias)]
        spread = [
            distribute_tensor(tensor.clone(), mesh, [place]).requires_grad_()
            for tensor, place in zip((a, b, bias), places, strict=True)
        ]
        want = torch.nn.functional.gelu(plain[0] @ plain[1] + plain[2])
        got = lib.matmul(spread[0], spread[1], bias=spread[2], activation="gelu")
        torch.testing.assert_close(got.full_tensor(), want)  # type: ignore[attr-defined]
        want.sin().sum().backward()  # type: ignore[no-untyped-call]
        got.sin().sum().backward()  # type: ignore[no-untyped-call]
        for mine, right in zip(spread, plain, strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.full_tensor(), right.grad)  # type: ignore[attr-defined]
    assert registered
    dist.barrier()  # the other may still wait for something of this one's
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort a process that tears them down at its end, one in four of torch 2.13


def test_values_between_processes(tmp_path: Path) -> None:
    """Two processes compute by rows, columns and along K what one does, gradients too."""
    spawn(_values, (str(tmp_path / "store"),), nprocs=2)  # type: ignore[no-untyped-call]
