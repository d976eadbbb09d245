"""What the epilogues cost: kernels of one tile with more and more in their epilogue, unused and used."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

import aotmm
from aotmm.bench.speed import replay
from aotmm.runtime.launcher import Launcher, Problem

_TILE = (64, 64, 64)  # the one tile that the default set has with every epilogue
_SIZES = (2048, 4096)
_ROUNDS = 25
_LAUNCHES = 8  # in one graph


def measure() -> dict[str, dict[str, float]]:
    """Time relative to the kernel that has scales only, by size and by what is done; medians of rounds in turn."""
    launcher = aotmm.load().launcher(0)
    return {f"{size}^3": _relative(launcher, size) for size in _SIZES}


def _relative(launcher: Launcher, size: int) -> dict[str, float]:
    a, b, bias = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(3))
    product = a.double() @ b.double()
    out = torch.empty(size, size, device="cuda", dtype=torch.float16)
    rows = (size, 1)
    plain = Problem(
        size, size, size, rows, rows, rows, "fp16", "fp16", "fp16",
        a_ptr=a.data_ptr(), b_ptr=b.data_ptr(), c_ptr=out.data_ptr(),
    )  # fmt: skip
    vector = replace(plain, bias_ptr=bias.data_ptr())
    matrix = replace(vector, bias_strides=(0, *rows))
    functional = torch.nn.functional
    cases = {
        "none": ("none", plain, product),
        "linear, unused": ("linear", plain, product),
        "linear, bias vector": ("linear", vector, product + bias[0].double()),
        "linear, bias matrix": ("linear", matrix, product + bias.double()),
        "linear, leaky_relu": ("linear", replace(plain, activation="leaky_relu"), functional.leaky_relu(product)),
        "smooth, unused": ("smooth", plain, product),
        "smooth, silu": ("smooth", replace(plain, activation="silu"), functional.silu(product)),
        "smooth, gelu": ("smooth", replace(plain, activation="gelu"), functional.gelu(product)),
        "smooth, tanh": ("smooth", replace(plain, activation="tanh"), product.tanh()),
    }
    graphs = {}
    for name, (epilogue, problem, want) in cases.items():
        number = _kernel(launcher, epilogue)
        launcher.launch(number, problem, 0, torch.cuda.current_stream().cuda_stream)
        worst = float(((out.double() - want).abs() / (want.abs() + 1)).max())
        if not worst < 2.0**-9:
            raise RuntimeError(f"{name} is wrong: relative error {worst}")
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(_LAUNCHES):
                launcher.launch(number, problem, 0, torch.cuda.current_stream().cuda_stream)
    rounds = [{name: replay(graph) for name, graph in graphs.items()} for _ in range(_ROUNDS)]
    return {name: statistics.median(times[name] / times["none"] for times in rounds) for name in graphs}


def _kernel(launcher: Launcher, epilogue: str) -> int:
    """Number of the fp16 nn kernel of the tile that has `epilogue`."""
    for number, kernel in enumerate(launcher.kernels):
        tile = (kernel.config.block_m, kernel.config.block_n, kernel.config.block_k)
        found = (kernel.dtype_a, kernel.dtype_c, kernel.layout, kernel.epilogue, tile)
        if found == ("fp16", "fp16", "nn", epilogue, _TILE):
            return number
    raise RuntimeError(f"no fp16 nn kernel {_TILE} with epilogue {epilogue}: this needs the default packs")
