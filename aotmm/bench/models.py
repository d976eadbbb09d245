"""Whole models with random weights, torch's products and ours (`aotmm.override()`) in turn in one run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import nn

import aotmm
from aotmm.bench.summary import LIMIT, RATIO
from aotmm.errors import SpecError

_ROUNDS = 15
_WINDOW_S = 0.08  # of steps that are timed together
_NOISE = 1.01  # our time over torch's that still counts as equal
_PAST = 512  # tokens before those that a decoder adds
_GPU = "cuda"
_OLDEST = {"transformers": 5, "timm": 1}  # of the extra `models`


class Workload(NamedTuple):
    """A step of a model, which returns logits, hidden states or a gradient, and the same in higher precision."""

    step: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    graph: bool = False
    tf32: bool = False
    torchs: Callable[[], AbstractContextManager[object]] = nullcontext
    ours: Callable[[], AbstractContextManager[object]] = aotmm.override


def measure() -> dict[str, dict[str, float]]:
    """Return by model: ms of a step, our time over torch's and its limit, and our error and memory over torch's.

    Errors are relative, in the Frobenius norm, against the same model and weights in fp32 (of fp32 and tf32: fp64).
    Memory is the most that a step takes beside what was there.

    Raises:
        SpecError: the package transformers or timm is not installed or too old.
    """
    need("models", *_OLDEST)
    found = {name: measured(make, _NOISE) for name, make in _WORKLOADS.items()}
    ratios = [row[RATIO] for row in found.values()]
    return found | {"geometric mean": {RATIO: statistics.geometric_mean(ratios), LIMIT: 1 / 1.05}}


def need(subject: str, *packages: str) -> None:
    """Raise SpecError, which names the measurement `subject`, if one of its packages is not installed or too old."""
    for package in packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            found = ""
        if int(found.partition(".")[0] or 0) < _OLDEST[package]:
            here = f"found {found}" if found else "it is not installed"
            raise SpecError(
                f"{subject} needs {package} {_OLDEST[package]}, of the models extra ({here}): "
                'pip install "aotmm[models]"'
            )


def measured(make: Callable[[], Workload], limit: float) -> dict[str, float]:
    """Return what `measure` does for one workload, made on the GPU; `limit` is that of our time over torch's."""
    torch.manual_seed(20261125)
    with torch.device(_GPU):
        workload = make()
    found = _measured(workload)
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return found | {LIMIT: limit}


def _measured(work: Workload) -> dict[str, float]:
    ways = {"torch": work.torchs, "aotmm": work.ours}
    with _precision("ieee"):
        exact = work.exact().double()
    calls: dict[str, Callable[[], object]] = {}
    errors, memory, times = {}, {}, {name: list[float]() for name in ways}
    with _precision("tf32" if work.tf32 else "ieee"):
        for name, way in ways.items():
            with way():
                work.step()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                result = work.step()
                memory[name] = torch.cuda.max_memory_allocated() - before
                errors[name] = float((result.double() - exact).norm() / exact.norm())
                calls[name] = _captured(work.step) if work.graph else work.step
        repeats = max(1, int(_WINDOW_S / _seconds(calls["torch"], 2)))
        for number in range(_ROUNDS):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                with ways[name]():
                    times[name].append(_seconds(calls[name], repeats))
    ms = {name: 1e3 * statistics.median(row) for name, row in times.items()}
    return {
        "torch ms": ms["torch"],
        "aotmm ms": ms["aotmm"],
        RATIO: statistics.median(ours / theirs for ours, theirs in zip(times["aotmm"], times["torch"], strict=True)),
        "error": errors["aotmm"] / errors["torch"],
        "memory": memory["aotmm"] / memory["torch"],
    }


def _seconds(call: Callable[[], object], repeats: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def _precision(of_fp32: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = of_fp32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# ---- inference


def _inferring(
    model: nn.Module, forward: Callable[[Any], torch.Tensor], *, dtype: torch.dtype, compiled: bool = False
) -> Workload:
    """Return the workload of `forward(model)`; a copy of the model in fp32 is exact."""
    model = model.to(dtype).eval()
    exact = copy.deepcopy(model).float()
    runs = torch.compile(model) if compiled else model

    @torch.no_grad()
    def step() -> torch.Tensor:
        return forward(runs)

    return Workload(step, torch.no_grad()(lambda: forward(exact)))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8
    )
    return LlamaForCausalLM(config)


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(30_000, (rows, length))


def _prefill(rows: int, length: int) -> Workload:
    tokens = _tokens(rows, length)
    return _inferring(_llama(), lambda model: model(tokens).logits, dtype=torch.float16)


def _decode(rows: int, *, graph: bool = False) -> Workload:
    """Return the workload of one more token, with those before it in a cache. Exact logits are computed without one."""
    from transformers import StaticCache

    model, tokens = _llama(), _tokens(rows, _PAST + 1)
    model = model.half().eval()
    exact = copy.deepcopy(model).float()
    cache = StaticCache(config=model.config, max_cache_len=2 * _PAST)
    places = torch.arange(_PAST + 1)

    @torch.no_grad()
    def forward(part: slice) -> torch.Tensor:
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):  # transformers 5 counts tokens itself; a step is repeated here
                layer.cumulative_length.fill_(part.start)
        logits: torch.Tensor = model(tokens[:, part], past_key_values=cache, cache_position=places[part]).logits
        return logits

    forward(slice(0, _PAST))
    last = torch.no_grad()(lambda: exact(tokens, logits_to_keep=1).logits)
    return Workload(lambda: forward(slice(_PAST, _PAST + 1)), last, graph=graph)


def _bert(*, compiled: bool) -> Workload:
    from transformers import BertConfig, BertModel

    tokens = _tokens(16, 256)

    def forward(model: Any) -> torch.Tensor:
        states: torch.Tensor = model(tokens).last_hidden_state
        return states

    return _inferring(BertModel(BertConfig()), forward, dtype=torch.float16, compiled=compiled)


def _vit(*, compiled: bool) -> Workload:
    import timm

    pixels = torch.randn(32, 3, 224, 224)

    def forward(model: Any) -> torch.Tensor:
        logits: torch.Tensor = model(pixels.to(next(model.parameters()).dtype))
        return logits

    return _inferring(timm.create_model("vit_base_patch16_224"), forward, dtype=torch.float16, compiled=compiled)


def _mixtral() -> Workload:
    from transformers import MixtralConfig, MixtralModel

    config = MixtralConfig(hidden_size=2048, intermediate_size=7168, num_hidden_layers=1, num_attention_heads=16)
    tokens = _tokens(4, 512)
    return _inferring(MixtralModel(config), lambda model: model(tokens).last_hidden_state, dtype=torch.bfloat16)


# ---- training


def _training(
    model: nn.Module,
    loss: Callable[[Any], torch.Tensor],
    weight: Callable[[Any], nn.Parameter],
    autocast: torch.dtype | None = None,
    *,
    tf32: bool = False,
) -> Workload:
    """Return the workload of a forward and backward pass, whose result is the gradient of a weight."""
    exact = copy.deepcopy(model)
    if autocast is None:
        exact = exact.double()

    def gradient(of: nn.Module, inner: AbstractContextManager[object]) -> torch.Tensor:
        of.zero_grad()
        with inner:
            value = loss(of)
        value.backward()  # type: ignore[no-untyped-call]
        found = weight(of).grad
        assert found is not None  # noqa: S101 - backward set it
        return found

    def context() -> AbstractContextManager[object]:
        return nullcontext() if autocast is None else torch.autocast(_GPU, dtype=autocast)

    return Workload(lambda: gradient(model, context()), lambda: gradient(exact, nullcontext()), tf32=tf32)


def _gpt2() -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = _tokens(8, 512)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return _training(
        model,
        lambda model: model(tokens, labels=tokens).loss,
        lambda model: model.transformer.h[0].mlp.c_fc.weight,
        torch.bfloat16,
    )


def _vit_large() -> Workload:
    import timm

    pixels, labels = torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))
    return _training(
        timm.create_model("vit_large_patch16_224"),
        lambda model: nn.functional.cross_entropy(model(pixels), labels),
        lambda model: model.patch_embed.proj.weight,
        torch.bfloat16,
    )


class _Adapted(nn.Module):
    """A frozen linear layer and a low-rank update of it."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, bias=False).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return found


def _lora() -> Workload:
    x = torch.randn(4096, 4096)
    model = nn.Sequential(*(_Adapted(4096, 16) for _ in range(4)))
    return _training(
        model, lambda model: model(x).float().square().mean(), lambda model: model[0].down.weight, torch.bfloat16
    )


def _encoder(*, tf32: bool) -> Workload:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    x = torch.randn(16, 256, 512)
    return _training(
        nn.TransformerEncoder(layer, 6),
        lambda model: model(x.to(next(model.parameters()).dtype)).square().mean(),
        lambda model: model.layers[0].linear1.weight,
        tf32=tf32,
    )


_WORKLOADS: dict[str, Callable[[], Workload]] = {
    "Llama prefill 1 x 2048, fp16": lambda: _prefill(1, 2048),
    "Llama prefill 4 x 512, fp16": lambda: _prefill(4, 512),
    "Llama decode 1, fp16": lambda: _decode(1),
    "Llama decode 7, fp16": lambda: _decode(7),
    "Llama decode 32, fp16": lambda: _decode(32),
    "Llama decode 1, fp16, graph": lambda: _decode(1, graph=True),
    "Llama decode 7, fp16, graph": lambda: _decode(7, graph=True),
    "Llama decode 32, fp16, graph": lambda: _decode(32, graph=True),
    "BERT base 16 x 256, fp16": lambda: _bert(compiled=False),
    "BERT base 16 x 256, fp16, compiled": lambda: _bert(compiled=True),
    "ViT base 32, fp16": lambda: _vit(compiled=False),
    "ViT base 32, fp16, compiled": lambda: _vit(compiled=True),
    "Mixtral layer 4 x 512, bf16": _mixtral,
    "GPT-2 training 8 x 512, bf16 autocast": _gpt2,
    "ViT large training 16, bf16 autocast": _vit_large,
    "LoRA training 4096, bf16 autocast": _lora,
    "TransformerEncoder training, tf32": lambda: _encoder(tf32=True),
    "TransformerEncoder training, fp32": lambda: _encoder(tf32=False),
}
