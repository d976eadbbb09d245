"""aotmm, launched as by `lib.matmul`, and the same without pdl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

import aotmm
from aotmm.bench.providers import Call, Provider
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.library import Library
from aotmm.timing.correctness import Epilogue
from aotmm.timing.operands import Operands
from aotmm.timing.problems import Case

if TYPE_CHECKING:
    from aotmm.runtime.launcher import Launcher, Plan, Problem


@cache
def library() -> Library:
    """Return the library of this installation's packs."""
    return aotmm.load()


def _options(case: Case, operands: Operands) -> dict[str, Any]:
    """Return the arguments of `matmul` beside A, B and C; none for a plain product, which is the shortest call."""
    epilogue = operands.epilogue
    if epilogue.scale_a is not None:
        return {"scale_a": epilogue.scale_a, "scale_b": epilogue.scale_b, "fast_accum": case.fast_accum}
    if case.activation is None:
        return {}
    return {"bias": epilogue.bias, "activation": activation_of(epilogue)}


def activation_of(epilogue: Epilogue) -> str | None:
    """Return the argument `activation` of `lib.matmul`, which has no "none"."""
    return None if epilogue.activation == "none" else epilogue.activation


def _prepare(case: Case, _: Sequence[Operands]) -> Call:
    matmul = library().matmul

    def call(operands: Operands) -> object:
        return matmul(operands.a, operands.b, out=operands.out, **_options(case, operands))

    return call


def _prepare_plain(case: Case, sets: Sequence[Operands]) -> Call:
    """Return the launches of `matmul`, without pdl."""
    device = sets[0].a.device
    plan = replace(plan_of(case, sets[0]), pdl=False)
    return launches(library().launcher(device.index), plan, problems_of(case, sets), device)


def problems_of(case: Case, sets: Sequence[Operands]) -> dict[int, Problem]:
    """Return the problem of each set of operands, by its id."""
    return {id(operands): _problem(case, operands) for operands in sets}


def launches(launcher: Launcher, plan: Plan, problems: Mapping[int, Problem], device: torch.device) -> Call:
    """Return the launches of a plan; `problems` has that of each set of operands, by its id."""
    workspace = torch.empty(plan.workspace_bytes, device=device, dtype=torch.uint8)

    def call(operands: Operands) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        launcher.run(plan, problems[id(operands)], device.index, stream, workspace.data_ptr())

    return call


def plan_of(case: Case, operands: Operands) -> Plan:
    """Return the plan of `matmul`."""
    ordinal = operands.a.device.index
    return library().launcher(ordinal).plan(_problem(case, operands), ordinal, WORKSPACE_LIMIT)


def _problem(case: Case, operands: Operands) -> Problem:
    """Return the case for the launcher's C interface."""
    return library().problem(operands.a, operands.b, out=operands.out, **_options(case, operands))


def _describe(case: Case, operands: Operands) -> str:
    return described(library().launcher(operands.a.device.index), plan_of(case, operands))


def described(launcher: Launcher, plan: Plan) -> str:
    """Return the plan in words: its kernel, slices of K, copies, and the time that it was chosen for."""
    words = [launcher.kernels[plan.kernel].name, f"split {plan.split}" * (plan.split > 1)]
    words += [*(x for x in plan.steps if x.startswith("copy")), "pdl" * plan.pdl]
    words += [f"{plan.cost / 1000:.2f} us {'measured' if plan.measured else 'predicted'}"]
    return ", ".join(filter(None, words))


PROVIDERS = (
    Provider("aotmm", "lib.matmul(a, b, out=out)", _prepare, describe=_describe),
    Provider("aotmm_plain", "the same without pdl dependent launch", _prepare_plain, isolated=False),
)
