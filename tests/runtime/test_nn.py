"""`aotmm.nn.Linear` in the place of torch.nn.Linear."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import aotmm.nn
from tests.runtime.stand_in import Call


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
def test_drop_in(shape: tuple[int, ...], *, bias: bool) -> None:
    """The same seed, state dict, results and gradients as torch's."""
    torch.manual_seed(1)
    theirs = torch.nn.Linear(4, 5, bias)
    torch.manual_seed(1)
    ours = aotmm.nn.Linear(4, 5, bias)
    assert isinstance(ours, torch.nn.Linear)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(shape)
    for module in (ours, theirs):
        module(x).sin().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    for mine, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, right)
        torch.testing.assert_close(mine.grad, right.grad)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.usefixtures("calls")
def test_activation() -> None:
    """An activation is applied behind the bias, with gradients and without, and shown."""
    layer = aotmm.nn.Linear(4, 5, activation=("leaky_relu", 0.2))
    x = torch.randn(3, 4)
    want = torch.nn.functional.leaky_relu(torch.nn.functional.linear(x, layer.weight, layer.bias), 0.2)
    torch.testing.assert_close(layer(x), want)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want)
    assert repr(layer) == "Linear(in_features=4, out_features=5, bias=True, activation=('leaky_relu', 0.2))"


def test_batch_invariant(calls: list[Call]) -> None:
    """The flag reaches the product, traced or not, and is shown."""
    layer = aotmm.nn.Linear(4, 5, batch_invariant=True)
    layer(torch.randn(3, 4))
    with torch.no_grad():
        torch.export.export(layer, (torch.randn(3, 4),)).module()(torch.randn(3, 4))
    assert [call.batch_invariant for call in calls] == [True, True]
    assert repr(layer) == "Linear(in_features=4, out_features=5, bias=True, batch_invariant=True)"


@pytest.mark.usefixtures("calls")
def test_copies() -> None:
    """deepcopy, pickle and torch.save give a layer that computes the same."""
    layer = aotmm.nn.Linear(4, 5, activation="gelu")
    x = torch.randn(3, 4)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    copies = (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),  # noqa: S301 - our own
        torch.load(stream, weights_only=False),
    )
    for other in copies:
        assert other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


@pytest.mark.usefixtures("calls")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_compiles() -> None:
    """It compiles without a graph break, and trains."""
    layer = aotmm.nn.Linear(4, 5, activation="silu")
    x = torch.randn(3, 4)
    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, layer(x))
    got.sum().backward()
    assert layer.weight.grad is not None


def test_cpu_is_refused() -> None:
    """Tensors on the CPU are an error that says where they are, with gradients and without."""
    layer = aotmm.nn.Linear(4, 5)
    for recording in (True, False):
        with torch.set_grad_enabled(recording), pytest.raises(TypeError, match=r"CUDA and ROCm.*on cpu"):
            layer(torch.randn(3, 4))
