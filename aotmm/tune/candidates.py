"""Candidates of a case: every plan worth timing, by the launcher's evaluation of each kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aotmm.pack.schema import Kernel
from aotmm.pack.table import Sample
from aotmm.pack.time_model import MOST_WAVES, beside, concurrent_tiles, most_slices
from aotmm.problem import BLOCK_SCALE_K, DTYPES, EPILOGUES, OUTPUTS, SPLITS, WORKSPACE_LIMIT
from aotmm.runtime.launcher import Launcher, Plan, Problem
from aotmm.runtime.tuning import CDevice
from aotmm.target import TARGETS
from aotmm.timing.problems import Case

LEAST_WAVES = 0.25  # of work tiles that are slices: fewer leave the GPU idle


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan for a case, and its kernel's names.

    Attributes:
        foreseen: selection would take this plan, if it took this config: `plan.cost` is its own prediction, not that
            of a plan with another split or pdl.
    """

    family: str
    config_name: str
    plan: Plan
    foreseen: bool = False

    def plain(self) -> Candidate:
        """Return the same without pdl."""
        return replace(self, plan=replace(self.plan, pdl=False), foreseen=False)

    def sample(self, ns: float) -> Sample:
        """Return its time as a table's sample."""
        plan = self.plan
        return Sample(self.config_name, plan.split, plan.pdl, plan.copies, max(1, round(ns)))

    def __str__(self) -> str:
        plan = self.plan
        return f"split {plan.split}, copies {plan.copies}" + ", pdl" * plan.pdl


def output_of(launcher: Launcher, dtype: str) -> str:
    """Return the output type of most products of `dtype` in the pack: kernels of one config are equally fast."""
    products = [kernel for kernel in launcher.kernels if kernel.role == "product"]
    outputs = [kernel.dtype_c for kernel in products if kernel.dtype_a == kernel.dtype_b == dtype]
    return max((*OUTPUTS, "int32"), key=lambda name: (outputs.count(name), name == DTYPES[dtype].output))


def problem_of(
    case: Case, dtype_c: str, a_ptr: int, b_ptr: int, c_ptr: int, scale_a_ptr: int = 0, scale_b_ptr: int = 0
) -> Problem:
    """Return the case's problem, with its matrices and block scales, if it has any, at these addresses.

    Scales of A lie along M and those of B along K, as torch has them.
    """
    M, N, K, layout = case.shape.M, case.shape.N, case.shape.K, case.shape.layout
    blocks = math.ceil(K / BLOCK_SCALE_K)
    return Problem(
        M=M,
        N=N,
        K=K,
        batch=case.batch,
        batch_strides=(M * K, K * N, M * N) if case.batch > 1 else (0, 0, 0),
        strides_a=(K, 1) if layout[0] == "n" else (1, M),
        strides_b=(N, 1) if layout[1] == "n" else (1, K),
        strides_c=(N, 1),
        dtype_a=DTYPES[case.dtype].storage,
        dtype_b=DTYPES[case.dtype].storage,
        dtype_c=dtype_c,
        allow_tf32=case.dtype == "tf32",
        a_ptr=a_ptr,
        b_ptr=b_ptr,
        c_ptr=c_ptr,
        fast_accum=case.fast_accum,
        block_scale_a_ptr=scale_a_ptr,
        block_scale_b_ptr=scale_b_ptr,
        block_strides_a=(0, 1, M) if case.block_scaled else (0, 0, 0),
        block_strides_b=(0, 1, blocks) if case.block_scaled else (0, 0, 0),
        block_columns=BLOCK_SCALE_K if case.block_scaled else 0,
    )


def candidates(
    launcher: Launcher, device: CDevice, problem: Problem, left_out: frozenset[str] = frozenset()
) -> list[Candidate]:
    """Return every plan worth timing for `problem`, those predicted to be fast first. Needs no GPU.

    Each is launched with and without pdl, as predicted first.

    Of the kernels of one config the plainest that fits stands for all, but of family fma one with A turned, and one
    without. Only kernels of this type and this `fast_accum` count: the others have rows of their own in the table.
    Guards tell kernels for block scales.
    """
    dtype = "tf32" if problem.allow_tf32 else problem.dtype_a
    plainest: dict[tuple[str, int], tuple[tuple[int, int], int, Plan]] = {}
    for number, kernel in enumerate(launcher.kernels):
        if (kernel.dtype_a, kernel.fast_accum) != (dtype, problem.fast_accum):
            continue
        if {kernel.config_name, kernel.family} & left_out:
            continue
        plan = launcher.check(problem, device, number).plan
        if plan is not None:
            rank = (EPILOGUES.index(kernel.epilogue), -kernel.vector_bytes)
            key = kernel.config_name, plan.copies if kernel.family == "fma" else 0
            plainest[key] = min(plainest.get(key, (rank, number, plan)), (rank, number, plan), key=lambda row: row[:2])
    found = []
    for (config_name, _), (_, number, plan) in sorted(plainest.items(), key=lambda item: item[1][2].cost):
        kernel = launcher.kernels[number]
        launches = (plan.pdl, not plan.pdl) if kernel.pdl else (False,)
        config = kernel.config
        tiles = problem.batch * math.ceil(problem.M / config.block_m) * math.ceil(problem.N / config.block_n)
        at_once = concurrent_tiles(device.multiprocessors, kernel.num_ctas, beside(kernel, TARGETS[launcher.arch]))
        slab = 4 * tiles * config.block_m * config.block_n
        splits = [1]
        if kernel.role == "partial":
            most = most_slices(problem.K, config.block_k)
            able = [split for split in SPLITS if split <= most and split * slab <= WORKSPACE_LIMIT]
            enough = max(SPLITS[0], MOST_WAVES * at_once // tiles)
            # Of tiles that are too few for any split the two largest: selection may choose either.
            few = min([0, *able][-2:][0], LEAST_WAVES * at_once / tiles)
            splits = [split for split in able if few <= split <= enough or split == plan.split]  # its own in any case
        for split in splits:
            workspace = plan.workspace_bytes + (split - plan.split) * slab
            for pdl in launches:
                variant = replace(plan, split=split, pdl=pdl, workspace_bytes=workspace)
                found.append(Candidate(kernel.family, config_name, variant, foreseen=variant == plan))
    return found


def to_time(
    launcher: Launcher, device: CDevice, problem: Problem, left_out: frozenset[str] = frozenset()
) -> list[Candidate]:
    """Return `candidates`, then plans of the kernels `for_invariance`."""
    invariant = candidates(launcher, device, replace(problem, batch_invariant=True), left_out)
    added = [each for each in invariant if for_invariance(launcher.kernels[each.plan.kernel])]
    return candidates(launcher, device, problem, left_out) + added


def for_invariance(kernel: Kernel) -> bool:
    """Return whether selection takes a kernel under `batch_invariant` alone: it adds slices of K one after another."""
    return kernel.config.serial_k > 1
