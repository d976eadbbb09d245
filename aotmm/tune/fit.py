"""The factors and the network of a tuning table, fitted to measured times.

First each config gets factors of the formula's constants, so that the best plans are among the few that the formula
likes most. Then the network learns log(time / formula). Both have the same loss of two parts: Huber's of the error of
log(time), in which plans that are far from the fastest of their product count less; and the regret of a choice by the
predictions, of which a soft minimum is the differentiable form. The second is what selection needs, the first keeps
times where they are.

The fit of a device may begin with the table of another one: the kernels are the same, and a few thousand problems less
tell as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import huber_loss, pad

from aotmm.pack.table import Model, Table
from aotmm.pack.time_model import FITTED, HIDDEN, INPUTS, MOST_FACTOR, SECOND, Network
from aotmm.tune.models import Key, Samples, corrected, inputs

_PRODUCTS = 48  # of one step
_EPOCHS, _RATE, _DECAY = 60, 1e-2, 1e-3
_RATE_FROM_START = 5e-3  # of a fit that begins with another device's table
_OWN_DECAY = 0.03  # of the weights of single configs
_NOISE = 0.05  # of inputs, whose spread is 1: a plan of about the same inputs takes about the same time
_RESTARTS = 2  # fits of other beginnings; the one of least loss is taken
_FACTOR_EPOCHS, _FACTOR_RATE, _FACTOR_DECAY = 12, 2e-2, 0.1
_OUTLIER = 0.1  # error from which on a sample counts less
_LEAST_WEIGHT = 0.02  # of a sample that is far from its product's best
FAR = 2.5  # times the best, from which on samples are not fitted
_REGRET = 0.3  # weight of the regret
_SOFT = 0.02  # relative difference of predictions at which both plans are likely chosen
_MOST_REGRET = 0.5


_Array = NDArray[np.float64]


class Fitted(NamedTuple):
    """The network, and the model of each config."""

    network: Network
    models: tuple[Model, ...]


class _Data(NamedTuple):
    """Samples in the order of their products. Times are logarithms of ns."""

    ns: torch.Tensor
    weight: torch.Tensor
    key: torch.Tensor
    products: list[torch.Tensor]  # row numbers of each


class _Start(NamedTuple):
    """Values from which a fit begins, all of them for scaled inputs.

    Attributes:
        weights: those of both layers and of the output, each with its biases; None for random ones.
        hidden, shifts: of each key, (keys, HIDDEN) and (keys, 1).
    """

    weights: tuple[torch.Tensor, ...] | None
    hidden: torch.Tensor
    shifts: torch.Tensor


def fit(samples: Samples, start: Table | None = None) -> Fitted:
    """Return the network and the models for samples of at least one product, from those of `start` on if it has any.

    There are models of the types that the samples or `start` have.
    """
    best = np.full(samples.product.max() + 1, np.inf)
    np.minimum.at(best, samples.product, samples.ns)
    best = best[samples.product]
    near = samples.ns < FAR * best
    of_products = np.split(np.arange(near.sum()), np.flatnonzero(np.diff(samples.product[near])) + 1)
    data = _Data(
        torch.tensor(np.log(samples.ns[near]), dtype=torch.float32),
        torch.tensor(np.maximum(_LEAST_WEIGHT, (best / samples.ns) ** 3)[near], dtype=torch.float32),
        torch.tensor(samples.key[near]),
        [torch.tensor(rows) for rows in of_products],
    )
    known = [] if start is None or start.network is None else start.models_of(samples.keys)
    with _one_thread():
        before = np.log([model.factors for model in known]) if known else np.zeros((len(samples.keys), len(FITTED)))
        common, own = _factors(data, _tensor(samples.parts[near]), _tensor(before))
        values, times = (each[near] for each in inputs(samples, own))
        mean, spread = values.mean(axis=0), values.std(axis=0)
        spread = np.where(spread > 1e-6, spread, 1.0)  # noqa: PLR2004 - an input that is the same everywhere
        scaled, formula = _tensor((values - mean) / spread), _tensor(np.log(times))
        begin = _start(samples.keys, start, mean, spread)
        fits = (_weights(data, scaled, formula, begin, seed) for seed in range(_RESTARTS))
        found = min(fits, key=lambda row: row[0])[1]
    weights = found["inputs"] / spread
    network = Network(
        tuple(map(tuple, weights.T.tolist())),
        tuple((found["bias"] - mean @ weights.T).tolist()),
        tuple(map(tuple, found["second"].T.tolist())),
        tuple(found["second_bias"].tolist()),
        tuple(found["outputs"][0].tolist()),
        float(found["shift"][0]),
        tuple(common.tolist()),
    )
    rows = zip(samples.keys, found["shifts"][:, 0].tolist(), own.tolist(), found["hidden"].tolist(), strict=True)
    every = tuple(Model(*key, shift, tuple(each), tuple(hidden)) for key, shift, each, hidden in rows)
    timed = {samples.keys[key][1:] for key in np.unique(samples.key)}
    timed |= {model.types for model in (start.models if start is not None else ())}
    models = tuple(model for model in every if model.types in timed)  # the network knows nothing of other types
    return Fitted(replace(network, shift=network.shift + _bias(samples, corrected(samples, network, every))), models)


def _bias(samples: Samples, times: _Array) -> float:
    """Return the mean logarithm of the time of the plan that `times` prefer for a product, over their value of it.

    The regret in the loss pushes these values down, by about 12 %. It counts beside copies, whose times no network
    predicts, and for people.
    """
    of_products = np.split(np.arange(times.size), np.flatnonzero(np.diff(samples.product)) + 1)
    preferred = np.array([rows[times[rows].argmin()] for rows in of_products])
    return float(np.log(samples.ns[preferred] / times[preferred]).mean())


def _start(keys: Sequence[Key], table: Table | None, mean: _Array, spread: _Array) -> _Start:
    """Return the values of the table's network, or none, for inputs less `mean` and divided by `spread`."""
    if table is None or table.network is None:
        return _Start(None, torch.zeros(len(keys), HIDDEN), torch.zeros(len(keys), 1))
    network, models = table.network, table.models_of(keys)
    first = np.array(network.inputs).T
    second = np.array(network.second).T, network.second_bias
    weights = first * spread, np.array(network.bias) + first @ mean, *second, [network.outputs], [network.shift]
    own = [model.hidden for model in models], [[model.shift] for model in models]
    return _Start(tuple(map(_tensor, weights)), *map(_tensor, own))


def _tensor(values: object) -> torch.Tensor:
    return torch.tensor(np.array(values), dtype=torch.float32)


def _factors(data: _Data, parts: torch.Tensor, begin: torch.Tensor) -> tuple[_Array, _Array]:
    """Return factors (FITTED,) of an unknown config, and those (keys, FITTED) of each, whose logarithms are `begin`.

    Configs without samples keep those of `begin`, changed as all are. Without a start they get the unknown config's.
    """
    torch.manual_seed(0)
    common, own = torch.nn.Parameter(torch.zeros(len(FITTED))), torch.nn.Parameter(torch.zeros_like(begin))
    others = parts.shape[1] - len(FITTED)  # memory and sums have no factors

    def predicted(rows: torch.Tensor) -> torch.Tensor:
        key = data.key[rows]
        scaled = parts[rows] * torch.exp(pad(begin[key] + common + own[key], (0, others)))
        squares = (scaled[:, 2:6] ** 2).sum(dim=1)
        return torch.log(scaled[:, 0] + scaled[:, 1] + torch.sqrt(squares + 1) + scaled[:, 6])  # 1: no root of 0

    groups = [{"params": [common], "weight_decay": 0.0}, {"params": [own], "weight_decay": _FACTOR_DECAY}]
    _descend(data, predicted, groups, _FACTOR_RATE, _FACTOR_EPOCHS)
    limit = np.log(MOST_FACTOR)
    timed = np.unique(data.key.numpy())
    fitted = (begin + common + own).detach().double().numpy()[timed]
    of_any = np.median(fitted, axis=0)
    of_each = (begin + common).detach().double().numpy() if begin.any() else np.tile(of_any, (len(begin), 1))
    of_each[timed] = fitted
    return np.exp(np.clip(of_any, -limit, limit)), np.exp(np.clip(of_each, -limit, limit))


def _weights(
    data: _Data, values: torch.Tensor, formula: torch.Tensor, begin: _Start, seed: int
) -> tuple[float, dict[str, _Array]]:
    """Return the mean loss of the last turn over all products, and the weights of the network."""
    torch.manual_seed(seed)
    first, second, last = (torch.nn.Linear(*size) for size in ((len(INPUTS), HIDDEN), (HIDDEN, SECOND), (SECOND, 1)))
    layers = [parameter for layer in (first, second, last) for parameter in layer.parameters()]
    if begin.weights is not None:
        for parameter, value in zip(layers, begin.weights, strict=True):
            parameter.data = value.clone()
    hidden = torch.nn.Parameter(torch.zeros_like(begin.hidden))
    shifts = torch.nn.Parameter(begin.shifts.clone())

    def predicted(rows: torch.Tensor) -> torch.Tensor:
        seen, key = values[rows], data.key[rows]
        nodes = torch.relu(first(seen + _NOISE * torch.randn_like(seen)) + begin.hidden[key] + hidden[key])
        times: torch.Tensor = (last(torch.relu(second(nodes))) + shifts[key])[:, 0] + formula[rows]
        return times

    groups = [{"params": [*layers, shifts], "weight_decay": _DECAY}, {"params": [hidden], "weight_decay": _OWN_DECAY}]
    rate = _RATE if begin.weights is None else _RATE_FROM_START
    loss = _descend(data, predicted, groups, rate, _EPOCHS)
    found = {"inputs": first.weight, "bias": first.bias, "second": second.weight, "second_bias": second.bias}
    found |= {"outputs": last.weight, "shift": last.bias}
    found |= {"hidden": begin.hidden + hidden, "shifts": shifts}
    return loss, {name: value.detach().double().numpy() for name, value in found.items()}


def _descend(
    data: _Data,
    predicted: Callable[[torch.Tensor], torch.Tensor],
    groups: list[dict[str, Any]],
    rate: float,
    epochs: int,
) -> float:
    """Fit the parameters in `groups`, and return the mean loss of the last turn.

    `predicted` maps numbers of rows to their log(ns).
    """
    optimizer = torch.optim.AdamW(groups, lr=rate)
    steps = -(-len(data.products) // _PRODUCTS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps)
    total = 0.0
    for _ in range(epochs):
        order, total = torch.randperm(len(data.products)).tolist(), 0.0
        for begin in range(0, len(order), _PRODUCTS):
            chosen = [data.products[number] for number in order[begin : begin + _PRODUCTS]]
            rows = torch.cat(chosen)
            group = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(each) for each in chosen]))
            loss = _loss(predicted(rows), data.ns[rows], data.weight[rows], group, len(chosen))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) / steps
    return total


def _loss(
    predicted: torch.Tensor, measured: torch.Tensor, weight: torch.Tensor, group: torch.Tensor, groups: int
) -> torch.Tensor:
    error = (weight * huber_loss(predicted, measured, delta=_OUTLIER, reduction="none")).sum() / weight.sum()
    least = _least(predicted.detach(), group, groups)
    likely = torch.exp((least[group] - predicted) / _SOFT)
    regret = (measured - _least(measured, group, groups)[group]).clamp(max=_MOST_REGRET)
    expected = _sums(likely * regret, group, groups) / _sums(likely, group, groups)
    return error + _REGRET * expected.mean()


def _least(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")


def _sums(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.zeros(groups).index_add(0, group, values)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread: more would only wait, and the order of sums would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
