"""What the products over several GPUs are held to, on the CPU."""

from __future__ import annotations

import pytest
import torch

from aotmm.bench import scaling


def test_check_of_the_sum_over_gpus() -> None:
    """A product whose parts were rounded and added is accepted, one that lacks a part or a column is not."""
    torch.manual_seed(1)
    a, b = torch.randn(80, 96).bfloat16(), torch.randn(96, 64).bfloat16()
    rows = torch.arange(0, 80, 3)
    parts = [a[:, begin : begin + 24] @ b[begin : begin + 24] for begin in range(0, 96, 24)]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    terms = sum((part[rows].float().abs() for part in parts), torch.zeros(()))
    scaling._check(whole, rows, a, b, (terms,) * 4, "in parts")
    scaling._check((a.double() @ b.double()).bfloat16(), rows, a, b, (), "as it is")
    wrong = whole.clone()
    wrong[:, 7] = 0
    for product in (whole - parts[2], wrong, whole * torch.nan):
        with pytest.raises(RuntimeError, match="the product by chance is wrong"):
            scaling._check(product, rows, a, b, (terms,) * 4, "by chance")


def test_only_the_gpus_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are fewer GPUs, only so many are measured."""
    worlds: list[int] = []

    def begin(_: object, arguments: tuple[int, int, str], nprocs: int) -> None:
        worlds.append(nprocs)
        with open(f"{arguments[2]}/found.json", "w", encoding="utf-8") as file:  # noqa: PTH123 - a name
            file.write(f'{{"{nprocs} GPUs": {{"ms": {arguments[1]}}}}}')

    monkeypatch.setattr(scaling, "spawn", begin)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert scaling.measure(64) == {"1 GPUs": {"ms": 64}, "2 GPUs": {"ms": 64}}
    assert worlds == [1, 2]
