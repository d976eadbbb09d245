"""Expert layers of transformers with random weights: examples/experts.py and transformers' own grouped_mm in turn."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import aotmm
from aotmm.bench.models import Workload, measured, need
from aotmm.errors import SpecError

_EXAMPLE = Path(aotmm.__file__).parents[1] / "examples" / "experts.py"
_TOKENS = (64, 512, 4096)
_OF_FORWARD, _OF_TRAINING = 1 / 1.2, 1 / 1.1  # our time over that of transformers' grouped_mm, at most


def measure() -> dict[str, dict[str, float]]:
    """Return by layer and tokens what `models.measure` does by model: "torch" is transformers' grouped_mm.

    A layer has its router, and the experts' sizes of the published model. Errors are against the experts in fp32 that
    get the same tokens by the same router: of the result, in training of the tokens' gradient.

    Raises:
        SpecError: transformers is not installed or too old, or this is no checkout, which alone has the example.
    """
    need("expert_layers", "transformers")
    if not _EXAMPLE.is_file():
        raise SpecError(f"expert_layers measures the example of a checkout; there is no {_EXAMPLE}")
    runpy.run_path(str(_EXAMPLE))  # makes its function the backend "aotmm" of transformers' experts
    found = {}
    for name, make in {"Mixtral 8x7B": _mixtral, "Qwen3 30B A3B": _qwen3}.items():
        for tokens in _TOKENS:
            for graph in (False, True):
                words = f"{name}, {tokens} tokens{', graph' if graph else ''}"
                found[words] = measured(partial(_inferring, make, tokens, graph=graph), _OF_FORWARD)
            found[f"{name}, {tokens} tokens, training"] = measured(partial(_training, make, tokens), _OF_TRAINING)
    return found


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralModel

    return MixtralModel(MixtralConfig(vocab_size=1, num_hidden_layers=1))


def _qwen3() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        vocab_size=1, num_hidden_layers=1,
    )  # fmt: skip
    return Qwen3MoeModel(config)


class _Layer:
    """The expert layer of a model in bf16, random tokens for it, and the two backends."""

    def __init__(self, make: Callable[[], Any], tokens: int) -> None:
        self.model = make().bfloat16()
        self.layer = self.model.layers[0].mlp
        for weight in self.layer.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        self.x = torch.randn(1, tokens, self.model.config.hidden_size, dtype=torch.bfloat16)
        self.experts = copy.deepcopy(self.layer.experts).float()
        self.experts.config._experts_implementation = "eager"  # noqa: SLF001 - as set_experts_implementation does
        self.torchs, self.ours = partial(self._backend, "grouped_mm"), partial(self._backend, "aotmm")

    @contextmanager
    def _backend(self, name: str) -> Iterator[None]:
        self.model.set_experts_implementation(name)
        yield

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is right for tokens in fp32, which the layer's own router sends to experts in fp32."""
        weights, index = self.layer.gate(x[0].to(self.x.dtype))[1:]
        found: torch.Tensor = self.experts(x[0], index, weights.float())
        return found[None]


def _inferring(make: Callable[[], Any], tokens: int, *, graph: bool) -> Workload:
    by, inference = _Layer(make, tokens), torch.no_grad()
    step, exact = inference(lambda: by.layer(by.x)), inference(lambda: by.exact(by.x.float()))
    return Workload(step, exact, graph=graph, torchs=by.torchs, ours=by.ours)


def _training(make: Callable[[], Any], tokens: int) -> Workload:
    by = _Layer(make, tokens)
    of_result = torch.randn(by.x.shape)

    def gradient(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        by.layer.zero_grad()
        x = x.detach().requires_grad_()
        of(x).backward(of_result.to(x.dtype))  # type: ignore[no-untyped-call]
        assert x.grad is not None  # noqa: S101 - backward set it
        return x.grad

    return Workload(
        lambda: gradient(by.layer, by.x), lambda: gradient(by.exact, by.x.float()), torchs=by.torchs, ours=by.ours
    )
