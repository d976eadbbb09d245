"""fp8 products with block scales, drawn at random (`timing/blocks.py`), against torch and DeepGEMM.

All of our kernels that may be fast take turns with the chosen one, which gives the regret of the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aotmm.bench import facts, preload
from aotmm.bench.cases import Work
from aotmm.bench.drawn import left, mixed
from aotmm.bench.drawn_summary import BLOCKS, PRELOAD
from aotmm.bench.grouped import launches, provider, rivals, with_best
from aotmm.bench.protocol import Effort, GraphStopwatch, compare
from aotmm.bench.providers import Call, NotRunError, Provider
from aotmm.bench.providers.own import described, library
from aotmm.bench.results import Results, Row
from aotmm.bench.session import continued, gpu, keep
from aotmm.problem import BLOCK_SCALE_K, WORKSPACE_LIMIT
from aotmm.timing.blocks import draw, layers
from aotmm.timing.experts import experts
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case, read

_COUNT = 90  # layers: about 4 minutes, without compiling DeepGEMM's kernels
_EFFORT = Effort(3000.0, 40000.0, (3, 5), isolated=False)
_BANDS = (64, 128)  # rows up to so many are classes of their own
_PADDED = 4  # blocks of K of B's scales are a multiple, for torch
_OURS, _TORCH, _DEEP_GEMM, _UNSCALED = "aotmm", "torch", "deep_gemm", "unscaled"
_OTHERS = (_TORCH, _DEEP_GEMM, _UNSCALED)


def run_blocks(seed: int, folder: Path, progress: Callable[[Row], None], *, count: int | None = None) -> Results:
    """Measure random problems, and write `folder`/results.json every few seconds, so that a run can go on.

    Rows have the times of "aotmm", of "torch" and "deep_gemm" where these are and take the product, of our own fp8
    product without block scales for cubes ("unscaled"; all scales are 1 there), of our other kernels, and of the "best"
    of ours. Before them, the time to preload the kernels of 797 problems is taken (`bench.preload`).

    Args:
        seed, count: as of `blocks.draw`; by default as many as take 4 minutes.
        folder: its results are kept and not measured again, if they are of the same seed, machine and software.
        progress: called with every row when it is done.

    Raises:
        SpecError: torch sees no GPU, or `folder` has results of another seed or software.
        AotmmError: as `aotmm.load` and `matmul`.
    """
    ordinal = gpu()
    found = continued(folder, facts.collect(ordinal) | {"seed": seed, "figure": BLOCKS})
    if PRELOAD not in found.other:
        found.other[PRELOAD] = preload.measure(seed)
    todo = work(seed, count or _COUNT)
    keep(left(todo, found), _measurer(ordinal, found.facts["cache_bytes"]), found, folder, progress, ordinal=ordinal)
    return found


def work(seed: int, count: int) -> list[Work]:
    """Return problems that are drawn, each of its class; layers of few rows of a class for that, too.

    Layers are of the tenth that tuning never knows.
    """
    found = []
    for name, case in mixed(draw(layers(), experts(), seed, count, among=read().held_out)):
        bands = [f"{name}, M up to {most}" for most in _BANDS if name == "layers" and most >= case.shape.M]
        found.append(Work(case, (name, *bands), ()))
    return found


def scales(case: Case, x: Operands, *, ones: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block scales of A and B from 0.5 to 1.5, or ones, as torch wants: lines along M, padded blocks of K."""
    blocks, wide = -(-case.shape.K // BLOCK_SCALE_K), -(-case.shape.N // BLOCK_SCALE_K)
    padded = -(-blocks // _PADDED) * _PADDED
    shapes = (blocks, len(x.a)), (*x.b.shape[:-2], wide, padded)
    make = torch.ones if ones else lambda *shape, **on: torch.rand(*shape, **on) + 0.5
    of_a, of_b = (make(*shape, device=x.a.device) for shape in shapes)
    return of_a.t(), of_b[..., :blocks].mT


def with_scales(case: Case, x: Operands, *, ones: bool) -> Operands:
    """Return fp8 operands with block scales in the place of their others."""
    return replace(x, block_scales=scales(case, x, ones=ones), epilogue=replace(x.epilogue, scale_a=None, scale_b=None))


def _measurer(ordinal: int, cache_bytes: int) -> Callable[[Work], Row]:
    pool, stopwatch, launcher = Pool(torch.device("cuda", ordinal)), GraphStopwatch(), library().launcher(ordinal)

    def measured(item: Work) -> Row:
        torch.cuda.empty_cache()  # results in graphs of before have memory that no other graph can take
        ones = "cubes" in item.sweeps
        sets = [with_scales(item.case, x, ones=ones) for x in pool.operands(item.case, cache_bytes)]
        problems = {id(x): library().problem(x.a, x.b, **_options(x)) for x in sets}
        first = problems[id(sets[0])]
        chosen = launcher.plan(first, ordinal, WORKSPACE_LIMIT)
        providers = [
            provider(_OURS, _ours, described(launcher, chosen)),
            *([] if item.case.groups else [Provider(_TORCH, "", _torchs)]),
            Provider(_DEEP_GEMM, "", _deep_gemms),
            *([provider(_UNSCALED, _unscaled)] if ones else []),
            *(
                provider(name, launches(launcher, plan, problems), described(launcher, plan))
                for name, plan in rivals(launcher, ordinal, first, chosen).items()
            ),
        ]
        return with_best(Row(item.case, item.sweeps, *compare(item.case, sets, providers, stopwatch, _EFFORT)), _OTHERS)

    return measured


def _options(x: Operands) -> dict[str, Any]:
    """Return the other arguments of our product."""
    of_a, of_b = _scales(x)
    return {"scale_a": of_a, "scale_b": of_b, "out": x.out} | ({} if x.offs is None else {"offs": x.offs})


def _ours(x: Operands) -> torch.Tensor:
    multiply = library().matmul if x.offs is None else library().grouped_mm
    return multiply(x.a, x.b, **_options(x))


def _unscaled(x: Operands) -> torch.Tensor:
    return library().matmul(x.a, x.b, out=x.out)


def _torchs(_case: Case, _: Sequence[Operands]) -> Call:
    kinds = getattr(torch.nn.functional, "ScalingType", None)
    if kinds is None:
        raise NotRunError("this torch has no products with block scales")

    def call(x: Operands) -> torch.Tensor:
        of_a, of_b = _scales(x)
        of_b = of_b.as_strided((of_b.stride(1), of_b.shape[1]), of_b.stride())  # with the padding of `scales`
        recipes = of_a, kinds.BlockWise1x128, of_b, kinds.BlockWise128x128
        return torch.nn.functional.scaled_mm(x.a, x.b, *recipes, output_dtype=x.out.dtype)

    return call


def _deep_gemms(case: Case, sets: Sequence[Operands]) -> Call:
    try:
        import deep_gemm  # type: ignore[import-not-found] # only here: few have it, and it compiles at its first calls
    except ImportError as reason:
        raise NotRunError(f"deep_gemm is not here: {reason}") from None
    arguments = {}
    for x in sets:
        of_a, of_b = _scales(x)
        arguments[id(x)] = [(x.a, of_a), (x.b.mT, of_b.mT.contiguous()), x.out]
        if case.groups:
            groups = torch.arange(len(x.b), device=x.a.device, dtype=torch.int32)
            arguments[id(x)].append(groups.repeat_interleave(torch.tensor(case.groups.sizes, device=x.a.device)))
    multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous if case.groups else deep_gemm.fp8_gemm_nt
    return lambda x: multiply(*arguments[id(x)])


def _scales(x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block scales that the operands of every call here have. Raises NotRunError without any."""
    if x.block_scales is None:
        raise NotRunError("operands without block scales")
    return x.block_scales
