"""A small transformer learns with these kernels as it does with torch's: its losses agree within their own noise.

The noise is what another order of summation does to torch's own run: the same products, with rows, columns and inner
dimension of every linear layer in a random order, so that each sum of the forward and of both gradients is the same in
exact arithmetic and rounded otherwise. Six such runs and the plain one say how far apart runs are that differ in
nothing but rounding. Runs with other kernels differ from them in nothing else, and must be no further away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import aotmm
import aotmm.nn

STEPS, NOISY_RUNS = 50, 6
SYMBOLS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 128, 4, 2, 64, 16
DEVICE = "cuda"


class Shuffled(nn.Linear):
    """torch's linear layer, with every sum in another order."""

    dice: torch.Generator

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """(..., in_features) to (..., out_features)."""
        x = input.reshape(-1, self.in_features)
        rows, inner, columns = (
            torch.randperm(size, generator=self.dice).to(x.device)
            for size in (x.shape[0], self.in_features, self.out_features)
        )
        assert self.bias is not None
        y = nn.functional.linear(x[rows][:, inner], self.weight[columns][:, inner], self.bias[columns])
        return y[rows.argsort()][:, columns.argsort()].reshape(*input.shape[:-1], self.out_features)


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same; attention by torch.matmul, so that an override takes it too."""
        heads = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(heads[0], heads[1].mT) * (WIDTH // HEADS) ** -0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed = torch.matmul(scores.masked_fill(mask, -torch.inf).softmax(-1), heads[2])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return out


def losses(linear: type[nn.Linear], precision: torch.dtype) -> torch.Tensor:
    """The loss of every step, from the same weights on the same data: a symbol follows from the two before it."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Embedding(SYMBOLS, WIDTH),
        *(Block(linear) for _ in range(LAYERS)),
        nn.LayerNorm(WIDTH),
        linear(WIDTH, SYMBOLS),
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(STEPS):
        text = torch.randint(SYMBOLS, (BATCH, LENGTH + 1))
        for place in range(2, LENGTH + 1):
            text[:, place] = (text[:, place - 1] + 3 * text[:, place - 2] + 1) % SYMBOLS
        text = text.to(DEVICE)
        with torch.autocast(DEVICE, precision) if precision is not torch.float32 else nullcontext():
            logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.detach().double().cpu())
    return torch.stack(found)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far apart two curves are: root mean square over the steps."""
    return float((one - other).square().mean().sqrt())


def replaced() -> tuple[type[nn.Linear], AbstractContextManager[object]]:
    """The model with our layers."""
    return aotmm.nn.Linear, nullcontext()


def overridden() -> tuple[type[nn.Linear], AbstractContextManager[object]]:
    """The model as it is, under `aotmm.override()`."""
    return nn.Linear, aotmm.override()


@pytest.mark.parametrize("way", [replaced, overridden])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_curve(
    way: Callable[[], tuple[type[nn.Linear], AbstractContextManager[object]]], precision: torch.dtype
) -> None:
    """The curve is no further from torch's, in the mean, than torch's are from each other at most; and it learns."""
    torchs = [losses(nn.Linear, precision)]
    for seed in range(NOISY_RUNS):
        Shuffled.dice = torch.Generator().manual_seed(seed)
        torchs.append(losses(Shuffled, precision))
    linear, routed = way()
    with routed:
        ours = losses(linear, precision)
    noise = max(apart(one, other) for one, other in itertools.combinations(torchs, 2))
    distance = sum(apart(ours, each) for each in torchs) / len(torchs)
    assert noise > 0
    assert distance <= noise, f"{distance} from torch's curves, which are {noise} apart"
    assert ours[-1] < 0.8 * ours[0]
