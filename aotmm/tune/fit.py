"""The network of a tuning table, fitted to measured times.

It predicts log(time / formula). The loss has two parts: Huber's of that error, in which plans that are far from the
fastest of their product count less; and the regret of a choice by the predictions, of which a soft minimum is the
differentiable form. The second is what selection needs, the first keeps times where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import huber_loss

from aotmm.pack.table import Model
from aotmm.pack.time_model import HIDDEN, INPUTS, Network
from aotmm.tune.models import Samples

_EPOCHS = 60
_PRODUCTS = 24  # of one step
_RATE, _DECAY = 1e-2, 1e-3
_OUTLIER = 0.1  # error from which on a sample counts less
_LEAST_WEIGHT = 0.02  # of a sample that is far from its product's best
FAR = 2.5  # times the best, from which on samples are not fitted
_REGRET = 0.3  # weight of the regret
_SOFT = 0.03  # relative difference of predictions at which both plans are likely chosen
_MOST_REGRET = 0.5
_RESTARTS = 4  # fits of other beginnings; the one of least loss is taken


class Fitted(NamedTuple):
    """The network, and each config's shift."""

    network: Network
    models: tuple[Model, ...]


def fit(samples: Samples) -> Fitted:
    """Return the network for samples of at least one product."""
    best = np.full(samples.product.max() + 1, np.inf)
    np.minimum.at(best, samples.product, samples.ns)
    best = best[samples.product]
    near = samples.ns < FAR * best
    mean, spread = samples.inputs[near].mean(axis=0), samples.inputs[near].std(axis=0)
    spread = np.where(spread > 1e-6, spread, 1.0)  # noqa: PLR2004 - an input that is the same everywhere
    data = _Data(
        torch.tensor((samples.inputs[near] - mean) / spread, dtype=torch.float32),
        torch.tensor(np.log(samples.ns / samples.formula)[near], dtype=torch.float32),
        torch.tensor(np.log(samples.formula)[near], dtype=torch.float32),
        torch.tensor(np.maximum(_LEAST_WEIGHT, (best / samples.ns) ** 3)[near], dtype=torch.float32),
        torch.tensor(samples.key[near]),
        samples.product[near],
    )
    with _one_thread():
        found = min((_fitted(data, len(samples.keys), seed) for seed in range(_RESTARTS)), key=lambda row: row[0])[1]
    inputs = found["inputs"] / spread
    bias = found["bias"] - mean @ inputs.T
    shift = float(found["shift"][0])
    network = Network(
        tuple(tuple(row) for row in inputs.T.tolist()),
        tuple(bias.tolist()),
        tuple(found["outputs"][0].tolist()),
        shift,
    )
    own = found["own"][:, 0].tolist()
    models = tuple(Model(*key, value) for key, value in zip(samples.keys, own, strict=True))
    return Fitted(network, models)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread: more would only wait, and the order of sums would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Data(NamedTuple):
    inputs: torch.Tensor
    wanted: torch.Tensor  # log(measured / formula)
    formula: torch.Tensor  # log
    weight: torch.Tensor
    key: torch.Tensor
    product: NDArray[np.int64]


def _fitted(data: _Data, keys: int, seed: int) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Return the mean loss of the last turn over all products, and the weights."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    first, last = torch.nn.Linear(len(INPUTS), HIDDEN), torch.nn.Linear(HIDDEN, 1)
    own = torch.nn.Parameter(torch.zeros(keys, 1))
    parameters = [*first.parameters(), *last.parameters(), own]
    rows = [
        torch.tensor(each) for each in np.split(np.arange(len(data.product)), np.flatnonzero(np.diff(data.product)) + 1)
    ]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
    steps = -(-len(rows) // _PRODUCTS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_EPOCHS * steps)
    total = 0.0
    for _ in range(_EPOCHS):
        order, total = torch.randperm(len(rows), generator=generator).tolist(), 0.0
        for begin in range(0, len(order), _PRODUCTS):
            chosen = [rows[number] for number in order[begin : begin + _PRODUCTS]]
            which = torch.cat(chosen)
            group = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(each) for each in chosen]))
            output = (last(torch.relu(first(data.inputs[which]))) + own[data.key[which]])[:, 0]
            loss = _loss(output, data, which, group, len(chosen))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) / steps
    found = {"inputs": first.weight, "bias": first.bias, "outputs": last.weight, "shift": last.bias, "own": own}
    return total, {name: value.detach().double().numpy() for name, value in found.items()}


def _loss(output: torch.Tensor, data: _Data, which: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    wanted, weight, formula = data.wanted[which], data.weight[which], data.formula[which]
    error = (weight * huber_loss(output, wanted, delta=_OUTLIER, reduction="none")).sum() / weight.sum()
    predicted, measured = output + formula, wanted + formula
    least = _least(predicted.detach(), group, groups)
    likely = torch.exp((least[group] - predicted) / _SOFT)
    regret = (measured - _least(measured, group, groups)[group]).clamp(max=_MOST_REGRET)
    expected = _sums(likely * regret, group, groups) / _sums(likely, group, groups)
    return error + _REGRET * expected.mean()


def _least(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")


def _sums(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.zeros(groups).index_add(0, group, values)
