"""Selection: what it admits is compared with the manifest's guards, read here a second time."""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from aotmm.build import render
from aotmm.errors import ArtifactError, NoKernelError
from aotmm.pack import table
from aotmm.pack.schema import Guard, Kernel
from aotmm.pack.table import Model, Sample, ShapeTimes, Table
from aotmm.pack.time_model import FITTED, HIDDEN, INPUTS, PDL_INPUTS, SECOND, Network
from aotmm.problem import ACTIVATIONS, DTYPES, LAYOUTS, OUTPUTS, SPLITS, WORKSPACE_LIMIT, input_types
from aotmm.runtime.c_interface import INVALID
from aotmm.runtime.launcher import CPlan, Launcher, Plan, Problem
from aotmm.runtime.pack import load_verified, open_pack
from aotmm.runtime.tuning import CDevice, nominal_device
from aotmm.target import TARGETS, target
from tests.build.packs import default_pack, opened_pack, tiny_pack
from tests.native.emulation import ARCHS, Emulator, missing, own_process
from tests.native.reference import LONGEST_K, Choice, Reference, ceil_div, keeps_guards, quantities, same_types, tiles
from tests.native.test_plans import changed_pack
from tests.samples import SHIPPED

PROBLEMS = 4_000
COMPARED = 1_000
USUAL = 400  # and so many more of the usual ones, for kernels that start early are theirs
EXPLAINED = 200
SIZES = (0, 1, 1, 2, 7, 8, 16, 31, 64, 100, 127, 128, 129, 1000, 1024, 4096, 2**20, 2**31 - 2**16, 2**31, 2**33)
USUAL_SIZES = (1, 8, 24, 64, 100, 128, 256, 1000, 4096)
PADDINGS = {True: (0, 16, 112), False: (0, 1, 8, 100)}
BATCHES = (1, 2, 3, 7, 128, 2**16, 2**31)
BATCH_STRIDES = {True: (0, 16, 4096, 2**20), False: (0, 1, 8, 100, 4096, 2**33)}
STEPS = {True: (1,), False: (1, 1, 2)}
OFFSETS = {True: (0, 16, 64), False: (0, 0, 1, 2, 8)}
SHARED = (16_384, 49_152, 65_536, 101_376, 166_912, 232_448)
# Of the shipped table, of `tuning_for`, of the list in target.py, and others.
DEVICES = ("NVIDIA H200", "two", "two", "NVIDIA H20", "NVIDIA H100 NVL MIG 1g.12gb", "another", "")
DISPATCHES = 200
LIMITS = (0, 2**16, 2**20, 2**31, 2**40, 2**64 - 1)
MAX_GRID = 2**31 - 1
UNTIMED = 4, "plain"  # bytes and kind
ROUNDED = 1e-5  # relative error of a network in single precision


@functools.cache
def launcher(arch: str) -> Launcher:
    """The launcher of the default pack; selection needs no GPU."""
    return opened_pack(arch).launcher


def dense(m: int, n: int, k: int, dtype: str = "fp16") -> Problem:
    """A row-major product of aligned, dense operands."""
    row = DTYPES[dtype]
    strides, types = ((k, 1), (n, 1), (n, 1)), (row.storage, row.storage, row.output)
    return Problem(m, n, k, *strides, *types, a_ptr=256, b_ptr=256, c_ptr=256, allow_tf32=dtype == "tf32")


def draw(rng: np.random.Generator, arch: str) -> tuple[Problem, CDevice]:
    """A random product, from tidy to absurd, and a device."""
    tidy = bool(rng.random() < 0.5)
    sizes = USUAL_SIZES if tidy or rng.random() < 0.5 else SIZES
    m, n, k = (int(rng.choice(sizes)) for _ in range(3))
    if rng.random() < 0.1:
        m, n, k = *map(int, rng.choice((64, 100), 2)), int(rng.choice((2**14, 300_007, LONGEST_K)))
    name_a, name_b = input_types(str(rng.choice([name for name in TARGETS[arch].dtypes if name != "tf32"])))
    size = DTYPES[name_a].bytes

    def strides(rows: int, cols: int, *, transposed: bool) -> tuple[int, int]:
        lines, length = (cols, rows) if transposed else (rows, cols)
        along = int(rng.choice(STEPS[tidy]))
        leading = max(length, 1) * along + int(rng.choice(PADDINGS[tidy]))
        if rng.random() < 0.1 and lines > 1:  # an extent around 2^31 elements
            leading = max(0, 2**31 + int(rng.integers(-20, 20)) - length) // (lines - 1)
        if rng.random() < 0.1:
            leading = 0  # an expanded operand
        if lines == 1 and rng.random() < 0.5:
            leading = int(rng.choice([0, 1, 3, 2**40]))
        if length == 1 and rng.random() < 0.5:
            along = int(rng.choice([0, 5, 2**40]))
        return (along, leading) if transposed else (leading, along)

    pointers = [256 * int(rng.integers(1, 2**40)) + size * int(rng.choice(OFFSETS[tidy])) for _ in range(6)]
    output = DTYPES[name_a].output
    if output != "int32" and rng.random() < 0.3:
        output = str(rng.choice(OUTPUTS))
    finished = output != "int32"
    vector = bool(rng.random() < 0.5)
    problem = Problem(
        M=m,
        N=n,
        K=k,
        strides_a=strides(m, k, transposed=bool(rng.random() < 0.5)),
        strides_b=strides(k, n, transposed=bool(rng.random() < 0.5)),
        strides_c=strides(m, n, transposed=bool(rng.random() < 0.1)),
        dtype_a=name_a,
        dtype_b=name_b if rng.random() < 0.95 else "fp16",
        dtype_c=output,
        activation=str(rng.choice(list(ACTIVATIONS))) if finished and rng.random() < 0.5 else "none",
        a_ptr=pointers[0],
        b_ptr=pointers[1],
        c_ptr=pointers[2],
        allow_tf32=bool(rng.random() < 0.5),
        fast_accum=bool(rng.random() < 0.3),
        batch_invariant=bool(rng.random() < 0.3),
        batch=int(rng.choice(BATCHES)) if rng.random() < 0.5 else 1,
        batch_strides=(
            int(rng.choice(BATCH_STRIDES[tidy])),
            int(rng.choice(BATCH_STRIDES[tidy])),
            int(rng.choice(BATCH_STRIDES[tidy])),
        ),
        bias_ptr=pointers[3] if finished and rng.random() < 0.4 else 0,
        bias_strides=(0, 0, 1) if vector else (int(rng.choice(BATCH_STRIDES[False])), *strides(m, n, transposed=False)),
        scale_a_ptr=pointers[4] if finished and rng.random() < 0.3 else 0,
        scale_b_ptr=pointers[5] if finished and rng.random() < 0.3 else 0,
        scale_strides=(int(rng.choice([0, 1, 7])), int(rng.choice([0, 1, 2**33]))),
        slope=float(rng.choice([0.01, 0.0, -1.5, 3e38])),
    )
    if name_a.startswith("fp8") and rng.random() < 0.3:
        columns = int(rng.choice((1, 128)))
        strides_ = (0, 1, m), (0, 1, k // 128)
        problem = with_block_scales(problem, columns, strides_ if tidy else ((2**33, 0, 3), (0, 2**40, 1)))
    return problem, drawn_device(rng)


def with_block_scales(
    problem: Problem, columns: int, strides: tuple[tuple[int, int, int], tuple[int, int, int]] = ((0, 0, 0), (0, 0, 0))
) -> Problem:
    """A product of fp8 with block scales of so many columns of B."""
    return replace(
        problem,
        block_scale_a_ptr=260,
        block_scale_b_ptr=260,
        block_strides_a=strides[0],
        block_strides_b=strides[1],
        block_columns=columns,
    )


def usual(rng: np.random.Generator, arch: str) -> tuple[Problem, CDevice]:
    """A layer of a model with any number of rows, which many kernels fit, and a device of the usual size."""
    m = int(2 ** rng.uniform(0, 13))
    n, k = (8 * int(2 ** rng.uniform(3, 11)) for _ in range(2))
    problem = dense(m, n + bool(rng.random() < 0.2), k, str(rng.choice(("fp16", "bf16"))))
    if rng.random() < 0.7:
        problem = replace(problem, strides_b=(1, k))
    if rng.random() < 0.2:
        problem = replace(problem, a_ptr=272)
    if rng.random() < 0.3:
        problem = replace(problem, batch_invariant=True)
    if rng.random() < 0.1:  # K is cut under `batch_invariant`
        problem = replace(dense(m, 8 * int(rng.integers(1, 64)), int(rng.choice((8192, 16384)))), batch_invariant=True)
    facts = int(rng.choice((78, 114, 132))), target(arch).shared_bytes, 1980, int(rng.choice((3352, 4916))), 0
    return problem, CDevice(*facts, str(rng.choice(DEVICES)).encode())


def drawn_device(rng: np.random.Generator) -> CDevice:
    """A device of a table, one that drivers tell too little of, or one of which little is known."""
    facts = int(rng.integers(1, 200)), int(rng.choice(SHARED))
    clock, memory = int(rng.choice((0, 1410, 1980))), int(rng.choice((0, 1555, 4916)))
    return CDevice(*facts, clock, memory, 0, str(rng.choice(DEVICES)).encode())


def kind(rejected: str | None) -> str:
    """The kind of reason that the launcher gives, in the words of `Reference.check`."""
    words = {
        "it is for": "types",
        "adds up another way": "order",
        "adds slices of K one after another": "order",
        "which other kernels' plans launch": "no product",
        "K is not split": "no split",
        "more than a grid can have": "blocks",
        "of device memory to work in": "workspace",
        "of shared memory": "shared",
        "": "guard",
    }
    return next(name for text, name in words.items() if text in (rejected or ""))


def network_for(rng: np.random.Generator) -> Network:
    """Random weights, with which plans take up to some times longer or shorter than by the formula."""
    weights = rng.normal(0, 0.15, (len(INPUTS), HIDDEN))
    pdl = weights[-len(PDL_INPUTS) :]
    pdl /= np.array([[12.0 if name.startswith("log2") else 1.0] for name in PDL_INPUTS])  # of which none decides alone
    bias, second = rng.normal(0, 1, HIDDEN), rng.normal(0, 0.2, (HIDDEN, SECOND))
    second_bias, outputs = rng.normal(0, 1, SECOND), rng.normal(0, 0.1, SECOND)
    rows, second_rows = (tuple(map(tuple, each.tolist())) for each in (weights, second))
    sums, biases, weights_out = (tuple(each.tolist()) for each in (bias, second_bias, outputs))
    return Network(rows, sums, second_rows, biases, weights_out, -0.25, factors_for(rng))


def factors_for(rng: np.random.Generator) -> tuple[float, ...]:
    """Random factors of the formula's constants."""
    return tuple(np.exp(rng.normal(0, 0.5, len(FITTED))).tolist())


def model_for(rng: np.random.Generator, key: tuple[str, int, str]) -> Model:
    """A random model of a config."""
    hidden = tuple(rng.normal(0, 0.5, HIDDEN).tolist())
    return Model(*key, float(rng.normal(0, 0.3)), factors_for(rng), hidden)


def tuning_for(arch: str, *, network: bool) -> Table:
    """A random network, models for half of a pack's configs, and random times on shapes that `draw` often draws.

    fp32 in full precision has no model, so that its times are those of the formula.
    """
    rng = np.random.default_rng(5)  # with some, one config wins most products, with pdl or without alike
    kernels = launcher(arch).kernels
    kinds = sorted({(kernel.config_name, *kernel.types) for kernel in kernels})
    models = tuple(model_for(rng, key) for key in kinds if key[1:] != UNTIMED and rng.random() < 0.5)
    shapes = []
    sizes = itertools.product((8, 64, 256), repeat=3)
    for (m, n, k), width, layout, kind in itertools.product(sizes, (1, 2, 4), LAYOUTS, ("plain", "relaxed")):
        names = sorted({name for name, w, _ in kinds if w == width and rng.random() < 0.7})
        times = tuple(
            Sample(
                name,
                int(rng.choice(SPLITS)) if name.endswith("_split") else 1,
                pdl=bool(rng.random() < 0.5),
                copies=int(rng.choice([0, 0, 3])),
                ns=int(rng.integers(100, 9000)),
            )
            for name in names
        )
        offsets = (0, 0) if rng.random() < 0.9 else (16, 0)
        drawn = bool(rng.random() < 0.1)
        shapes.append(ShapeTimes(width, layout, kind, m, n, k, *offsets, held_out=False, times=times, drawn=drawn))
    facts = (100, 1700, 2000, 1 << 20)
    found = network_for(rng) if network else None
    return Table(arch, "two", *facts, "none", "none", "0", "2026-11-20", 0, found, models, tuple(shapes))


def same(problem: Problem, found: Plan, wanted: Choice, *, network: bool) -> bool:
    """Whether a plan is the wanted one, or by the reference as fast, but for the rounding of the network."""
    if not network:
        return found == wanted.plan
    panels = ceil_div(problem.M, found.panel_m) * ceil_div(problem.N, found.panel_n) if found.panel_m else 1
    tolerance = max(panels, ROUNDED * wanted.plan.cost)  # a cost lacks the fraction of a panel's
    costs = [plan.cost for plan in wanted.among if replace(plan, cost=found.cost) == found]
    return bool(costs) and max(abs(found.cost - costs[0]), costs[0] - wanted.plan.cost) <= tolerance


@pytest.mark.parametrize("tuned", ["as built", "with a network", "without one"])
@pytest.mark.parametrize("arch", SHIPPED)
def test_plans_are_those_of_the_reference(arch: str, tuned: str) -> None:
    """Over random products every verdict and every chosen plan equals that of the rules written down in Python.

    So nothing is admitted that breaks a guard, and what is chosen is the cheapest by the model of launcher.h.
    """
    rng = np.random.default_rng(20261125)
    pack = load_apart(arch)
    tables = table.shipped(arch)
    if tuned != "as built":
        tables = (tuning_for(arch, network=tuned == "with a network"),)
        pack.retune(*tables)
    reference, network = Reference(pack.kernels, target(arch), tables), any(table.network for table in tables)
    seen: dict[str, collections.Counter[str]] = {
        name: collections.Counter() for name in ("reasons", "plans", "layouts", "choices")
    }
    for number in range(COMPARED + USUAL):
        problem, device = usual(rng, arch) if number % 5 == 1 or number >= COMPARED else draw(rng, arch)
        if number % 20 == 0:  # one that `tuning_for` has
            m, n, k = map(int, rng.choice((8, 64, 256), 3))
            problem = dense(m, n, k)
        limit = LIMITS[rng.integers(len(LIMITS))]
        some = [n for n, k in enumerate(pack.kernels) if number % 10 == 0 and same_types(k, problem)]
        some.append(int(rng.integers(len(pack.kernels))))
        for kernel in some:
            found = pack.check(problem, device, kernel, limit)
            wanted = reference.check(problem, device, kernel, min(limit, 2**40))
            where = problem, pack.kernels[kernel], device.multiprocessors
            if isinstance(wanted, str):
                assert (found.plan or kind(found.rejected)) == wanted, where
            else:
                assert found.plan is not None, (where, found.rejected)
                assert same(problem, found.plan, wanted, network=network), (where, found.plan, wanted)
            seen["reasons"][wanted if isinstance(wanted, str) else "fits"] += 1
        best = reference.select(problem, device, min(limit, 2**40))
        plan = best.plan if best else None
        try:
            chosen = pack.select(problem, device, limit)
        except NoKernelError:
            assert best is None, (problem, best)
        else:
            assert best is not None, (problem, chosen)
            seen["choices"]["equal" if replace(chosen, cost=best.plan.cost) == best.plan else "as fast"] += 1
            where = problem, device.multiprocessors, limit
            assert same(problem, chosen, best, network=network), (where, chosen, best)
        if plan is not None:
            seen["plans"].update(
                [*plan.steps, *(name for name in ("pdl", "measured", "panel_m") if getattr(plan, name))]
            )
        seen["layouts"][pack.kernels[plan.kernel].layout if plan else "none"] += 1
    assert set(seen["reasons"]) >= {"types", "guard", "shared", "blocks", "no product", "order", "fits"}, seen
    launched = {"product", "partial", "reduce", "copy A", "copy B", "copy C", "panel_m"}
    if tuned != "as built":
        launched.add("measured")
    assert set(seen["plans"]) >= launched, seen
    assert arch != "sm90" or min(seen["plans"]["pdl"], seen["plans"]["product"] - seen["plans"]["pdl"]) > 20, seen
    assert seen["choices"]["equal"] > 0.99 * seen["choices"].total(), seen
    assert min(seen["layouts"][layout] for layout in ("nn", "nt", "tn", "tt", "any", "none")) > COMPARED // 100, seen


@pytest.mark.parametrize("arch", SHIPPED)
def test_no_verdict_is_better_than_the_plan(arch: str) -> None:
    """`explain` shows no plan that takes more workspace than a product may, or less time than the chosen one.

    The latter by the formula alone: the network does not see all plans, and slow ones may not have been timed.
    """
    mm, rng, cut = load_apart(arch), np.random.default_rng(21), 0
    mm.retune(replace(tuning_for(arch, network=False), shapes=()))
    for _ in range(EXPLAINED):
        problem, device = draw(rng, arch)
        limit = LIMITS[rng.integers(len(LIMITS))]
        found = mm.explain(problem, device, limit)
        if found.chosen is not None and found.chosen.plan is not None:
            plans = [verdict.plan for verdict in found.evaluations if verdict.plan is not None]
            assert min(plan.cost for plan in plans) == found.chosen.plan.cost, (problem, device.multiprocessors, limit)
            assert max(plan.workspace_bytes for plan in plans) <= limit
            cut += any(plan.panel_m for plan in plans)
    assert cut > 0


@pytest.mark.parametrize("arch", SHIPPED)
def test_explained_is_what_is_launched(arch: str) -> None:
    """Without a limit of its own `explain` keeps the one that products have, and shows panels where it has to."""
    device = CDevice(target(arch).multiprocessors, target(arch).shared_bytes)
    problem = replace(dense(20_000, 20_000, 60_000), strides_a=(60_001, 1), strides_b=(20_001, 1))
    found = launcher(arch).explain(problem, device)
    assert found.chosen is not None
    assert found.chosen.plan == launcher(arch).select(problem, device, WORKSPACE_LIMIT)
    assert found.chosen.plan.panel_m
    assert f"in panels of {found.chosen.plan.panel_m} x {found.chosen.plan.panel_n}, grid of" in str(found)
    assert found.chosen.plan.cost < launcher(arch).select(problem, device, 0).cost / 5
    assert {verdict.plan.workspace_bytes > WORKSPACE_LIMIT for verdict in found.evaluations if verdict.plan} == {False}


def load_apart(arch: str) -> Launcher:
    """A launcher with a library of its own, which a test may retune."""
    pack = opened_pack(arch)
    return Launcher(load_verified(pack.folder, pack.head.library), arch, lambda: pack.manifest.kernels)


@pytest.mark.parametrize("arch", SHIPPED)
def test_few_tiles_fill_the_device_if_k_is_large(arch: str) -> None:
    """One tile of any type, layout, alignment and strides takes at least a sixth of the GPU if K is large.

    Without slices of K one multiprocessor would compute all of it. Of int8, 16 slices are enough for memory's speed.
    """
    pack, device = launcher(arch), nominal_device(target(arch))
    sizes = itertools.product(((16, 16), (9, 11), (1, 33)), (200_000, 300_001))
    names = TARGETS[arch].dtypes
    for ((m, n), k), name, layout, step in itertools.product(sizes, names, LAYOUTS, (1, 3)):
        a, b = input_types(name)
        problem = replace(
            dense(m, n, k, a),
            dtype_b=DTYPES[b].storage,
            strides_a=(step, step * m) if layout[0] == "t" else (step * k, step),
            strides_b=(step, step * k) if layout[1] == "t" else (step * n, step),
        )
        plan = pack.select(problem, device, WORKSPACE_LIMIT)
        least = 16 if name == "int8" else device.multiprocessors / 6
        assert plan.grid >= least, (problem, pack.kernels[plan.kernel].name, plan)


@pytest.mark.parametrize("arch", SHIPPED)
def test_sums_of_integers_are_for_integers(arch: str) -> None:
    """A partial serves no product whose result has another kind of sums: int32 of int8, fp32 of all others."""
    pack, device = launcher(arch), nominal_device(target(arch))
    partials = [(number, kernel) for number, kernel in enumerate(pack.kernels) if kernel.role == "partial"]
    assert {kernel.dtype_c for _, kernel in partials} == {"fp32", "int32"}
    for number, kernel in partials:
        for output in (*OUTPUTS, "int32"):
            problem = dense(64, 64, 4096, kernel.dtype_a)
            problem = replace(problem, dtype_b=DTYPES[kernel.dtype_b].storage, dtype_c=output)
            refused = kind(pack.check(problem, device, number).rejected) == "types"
            assert refused == ((output == "int32") != (kernel.dtype_c == "int32")), (kernel.name, output)


@pytest.mark.parametrize("arch", SHIPPED)
def test_there_is_always_a_kernel(arch: str) -> None:
    """Every type and output has a kernel for any strides, alignment, size, batch and epilogue, on any device.

    Not with `batch_invariant`: tests/native/test_batch_invariance.py has that.
    """
    rng = np.random.default_rng(1)
    kinds = {
        (DTYPES[kernel.dtype_a].storage, DTYPES[kernel.dtype_b].storage, kernel.dtype_c)
        for kernel in launcher(arch).kernels
        if kernel.role == "product"
    }
    pairs = [input_types(name) for name in TARGETS[arch].dtypes]
    assert kinds == {
        (DTYPES[a].storage, DTYPES[b].storage, output)
        for a, b in pairs
        for output in (("int32",) if a == "int8" else {DTYPES[a].output, *OUTPUTS})
    }
    for number in range(PROBLEMS):
        problem, device = draw(rng, arch)
        dtype_a, dtype_b, output = sorted(kinds)[number % len(kinds)]
        problem = replace(problem, dtype_a=dtype_a, dtype_b=dtype_b, dtype_c=output, batch_invariant=False)
        problem = replace(problem, block_scale_a_ptr=0, block_scale_b_ptr=0)
        if output == "int32":
            problem = replace(problem, activation="none", bias_ptr=0, scale_a_ptr=0, scale_b_ptr=0)
        smallest = CDevice(device.multiprocessors, 49_152)
        found = selected(launcher(arch), problem, smallest)
        generic = any(
            tiles(kernel, problem.M, problem.N) * problem.batch <= largest_grid(arch, kernel)
            for kernel in launcher(arch).kernels
            if (kernel.role, kernel.layout) == ("product", "any")
            and same_types(kernel, replace(problem, activation="none", bias_ptr=0))
        )
        assert found is not None if generic else (found is None or found.layout != "any"), problem


def largest_grid(arch: str, kernel: Kernel) -> int:
    """Blocks that a grid of `kernel` may have: HIP counts its threads in 32 bits."""
    return MAX_GRID if target(arch).backend == "cuda" else min(MAX_GRID, (2**32 - 1) // kernel.threads)


def selected(mm: Launcher, problem: Problem, device: CDevice) -> Kernel | None:
    """The kernel that is chosen where there is no workspace."""
    try:
        return mm.kernels[mm.select(problem, device, 0).kernel]
    except NoKernelError:
        return None


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("arch", SHIPPED)
def test_each_broken_guard_alone_is_noticed(arch: str, dtype: str) -> None:
    """A product that fits a specialised kernel does not after any one guard broke, unless what broke it is copied.

    Of the kernels with the same guards one is asked.
    """
    device, fitting = CDevice(108, target(arch).shared_bytes), dense(256, 256, 256, dtype)
    batched = replace(fitting, batch=2)
    breaking = [
        replace(fitting, a_ptr=258),
        replace(fitting, b_ptr=264),
        replace(fitting, strides_a=(257, 1)),
        replace(fitting, strides_a=(256, 2)),
        replace(fitting, strides_b=(260, 1)),
        replace(fitting, strides_b=(512, 2)),
        replace(fitting, strides_b=(1, 256)),
        replace(fitting, strides_c=(512, 2)),
        *(replace(batched, batch_strides=odd) for odd in ((4, 0, 0), (0, 65_537, 0))),
    ]
    # Where threads store C, its rows may lie anywhere.
    rows_of_c = [
        *(replace(fitting, c_ptr=odd) for odd in (257, 258)),
        replace(fitting, strides_c=(257, 1)),
        replace(batched, batch_strides=(0, 0, 12)),
        replace(fitting, N=255),
    ]
    # A tensor map counts in 64 bits and ends where K does, but there is none for no K.
    addressed = [
        replace(fitting, K=255),
        replace(fitting, strides_a=(2**31 // 255 // 8 * 8 + 8, 1)),
        replace(fitting, strides_b=(2**31 // 255 // 8 * 8 + 8, 1)),
        replace(fitting, strides_c=(2**31 // 255 // 8 * 8 + 8, 1)),
    ]
    mapped = [replace(fitting, K=0)]
    asked = {
        verdict.kernel.guards: number
        for number, verdict in enumerate(launcher(arch).explain(fitting, device).evaluations)
        if verdict.plan
        and (verdict.kernel.role, verdict.kernel.layout, verdict.kernel.vector_bytes) == ("product", "nn", 16)
    }
    for number in asked.values():
        kernel = launcher(arch).kernels[number]
        maps = any(parameter.tensor_map for parameter in kernel.parameters)
        any_c = maps and kernel.config_name.endswith("_unaligned")
        for problem in (*breaking, *rows_of_c, *addressed, *mapped):
            plan = launcher(arch).check(problem, device, number).plan
            fits = (
                (problem in addressed and maps) or (problem in mapped and not maps) or (problem in rows_of_c and any_c)
            )
            assert (plan is not None and not plan.copies) == fits, (kernel, problem)
    assert len(asked) == {"sm90": 7, "gfx90a": 2}.get(arch, 1)
    for problem in (*breaking, *rows_of_c, *addressed, *mapped):
        assert selected(launcher(arch), problem, device) is not None


@pytest.mark.parametrize("arch", SHIPPED)
def test_threads_of_a_grid_are_counted(arch: str) -> None:
    """HIP takes fewer than 2^32 threads in a grid, CUDA 2^31 blocks: one matrix more finds no kernel and is told so."""
    kind = ("product", "any", "fp16", "fp16")
    generic = next(k for k in launcher(arch).kernels if (k.role, k.layout, k.dtype_a, k.dtype_c) == kind)
    most, device = largest_grid(arch, generic), CDevice(104, target(arch).shared_bytes)
    assert most == ((2**32 - 1) // 256 if arch == "gfx90a" else MAX_GRID)
    product = replace(dense(1, 1, 1), strides_a=(5, 7), c_ptr=258, activation="tanh")
    found = launcher(arch).explain(replace(product, batch=most), device)
    assert found.chosen is not None
    assert found.chosen.plan is not None
    assert found.chosen.plan.grid == most
    found = launcher(arch).explain(replace(product, batch=most + 1), device)
    assert found.chosen is None
    reasons = {verdict.rejected for verdict in found.evaluations if verdict.kernel == generic}
    text = f"would need {most + 1} blocks of {generic.threads} threads, which is more than a grid can have"
    assert reasons == {text}


def test_tf32_only_where_it_is_allowed() -> None:
    """fp32 operands go to a tf32 kernel if that is allowed and to an fp32 kernel if not."""
    device = CDevice(108, target("sm80").shared_bytes)
    chosen = [launcher("sm80").explain(dense(256, 256, 256, dtype), device).chosen for dtype in ("tf32", "fp32")]
    assert [verdict.kernel.dtype_a for verdict in chosen if verdict] == ["tf32", "fp32"]


def test_shared_memory_of_the_device_counts() -> None:
    """A device with less shared memory gets a kernel that fits it, and the verdict on the others says why."""
    problem = dense(4096, 4096, 4096)
    first = launcher("sm80").explain(problem, CDevice(108, 166_912)).chosen
    assert first is not None
    too_little = first.kernel.shared_bytes - 1
    selection = launcher("sm80").explain(problem, CDevice(108, too_little))
    assert selection.chosen is not None
    assert selection.chosen.kernel.shared_bytes <= too_little
    assert selection.evaluations[launcher("sm80").kernels.index(first.kernel)].rejected == (
        f"needs {first.kernel.shared_bytes} B of shared memory per block, the device has {too_little} B"
    )


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (dense(-1, 8, 8), "M=-1 N=8 K=8: sizes are not negative"),
        (dense(8, -2, 8), "M=8 N=-2 K=8: sizes are not negative"),
        (dense(8, 8, -(2**63)), f"M=8 N=8 K=-{2**63}: sizes are not negative"),
        (replace(dense(8, 8, 8), strides_a=(-8, 1)), "stride -8: strides are not negative"),
        (replace(dense(8, 8, 8), strides_b=(8, -1)), "stride -1: strides are not negative"),
        (replace(dense(8, 8, 8), strides_c=(8, -7)), "stride -7: strides are not negative"),
        (replace(dense(8, 8, 8), batch_strides=(0, -64, 0)), "stride -64: strides are not negative"),
        (replace(dense(8, 8, 8), bias_strides=(0, -8, 1)), "stride -8: strides are not negative"),
        (replace(dense(8, 8, 8), scale_strides=(0, -2)), "stride -2: strides are not negative"),
        (replace(dense(8, 8, 8), batch=0), "batch=0: at least 1"),
        (replace(dense(8, 8, 8), batch=-3), "batch=-3: at least 1"),
        (with_block_scales(dense(8, 8, 8), 128), "block scales of dtype_a=0: they are for fp8"),
        (with_block_scales(dense(8, 8, 8, "fp8e5"), 64), "block_columns=64: 1 or 128"),
        (with_block_scales(dense(8, 8, 8, "fp8e5"), 1, ((0, -1, 0), (0, 0, 0))), "stride -1: strides are not negative"),
        (replace(dense(8, 8, 8, "fp8e5"), block_scale_a_ptr=4), "block scales of A alone: both operands have them"),
        (replace(dense(8, 8, 8, "fp8e5"), block_scale_b_ptr=4), "block scales of B alone: both operands have them"),
        (
            replace(with_block_scales(dense(8, 8, 8, "fp8e5"), 1), grouped="K", offsets_ptr=4),
            "scales of a product with K in groups: it has none",
        ),
        (
            replace(with_block_scales(dense(8, 8, 8, "fp8e5"), 1, ((8, 1, 1), (0, 0, 0))), grouped="M", offsets_ptr=4),
            "stride_block_az=8: block scales of rows of one matrix are 0 apart",
        ),
        (replace(dense(8, 8, 8, "int8"), bias_ptr=64), "int32 results have no scales, bias or activation"),
        (replace(dense(8, 8, 8, "int8"), scale_b_ptr=64), "int32 results have no scales, bias or activation"),
        (replace(dense(8, 8, 8, "int8"), activation="relu"), "int32 results have no scales, bias or activation"),
    ],
)
def test_impossible_products(problem: Problem, words: str) -> None:
    """Negative sizes and strides are refused with the number, and so is what int32 results do not have."""
    with pytest.raises(ValueError, match=words):
        launcher("sm80").explain(problem, CDevice(108, 166_912))


@pytest.mark.parametrize("field", ["dtype_a", "dtype_b", "dtype_c", "activation"])
@pytest.mark.parametrize("number", [-1, 99])
def test_numbers_that_name_nothing(field: str, number: int) -> None:
    """Through the C interface an unknown dtype or activation number is an invalid call, told with the number."""
    mm, problem = launcher("sm80"), dense(8, 8, 8).to_c()
    setattr(problem, field, number)
    status = mm._c.select(ctypes.byref(problem), ctypes.byref(CDevice(108, 166_912)), 0, ctypes.byref(CPlan()))
    assert status == INVALID
    assert f"{field}={number}" in mm._c.last_error().contents.text.decode()


def test_library_of_another_pack_is_refused() -> None:
    """A list of kernels that is not the library's is noticed by its length."""
    pack = open_pack(default_pack("sm80"))
    count = len(pack.manifest.kernels)
    wrong = Launcher(pack.launcher._library, "sm80", lambda: pack.manifest.kernels[1:])
    with pytest.raises(ArtifactError, match=f"has {count - 1} kernels, its library {count}"):
        _ = wrong.kernels


@pytest.fixture(params=ARCHS)
def interpreted_pack(request: pytest.FixtureRequest) -> Path:
    """The default pack of an arch that there is a fake driver for."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return default_pack(request.param)


@own_process
def test_parameter_blocks(interpreted_pack: Path) -> None:
    """What reaches the driver is the manifest's parameter list, filled from the product, byte for byte."""
    emulator = Emulator(interpreted_pack, execute=False)
    rng, device, arch = np.random.default_rng(7), emulator.launcher.device(0), emulator.arch
    layouts, dispatched = collections.Counter[str](), 0
    for number in range(100_000):
        if dispatched == DISPATCHES:
            break
        problem, _ = draw(rng, arch)
        kernel = selected(emulator.launcher, problem, device)
        if kernel is None or 0 in (problem.M, problem.N) or (kernel.layout == "any" and number % 4):
            continue
        emulator.driver.launches.clear()
        emulator.launcher.matmul(problem, 0, 0)
        (launch,) = emulator.driver.launches
        values = quantities(problem)
        assert keeps_guards(kernel, values), (kernel.name, problem)
        values["group_m"] = emulator.launcher.select(problem, device, 0).group_m
        block = bytearray(launch.params)
        for item in kernel.parameters:
            value = (values[item.value] or 0) % 2 ** (8 * item.bytes)
            found = int.from_bytes(block[item.offset : item.offset + item.bytes], "little")
            assert found == value, (kernel.name, item, problem)
        assert kernel.parameters[-1].offset + kernel.parameters[-1].bytes == len(block)
        assert launch.grid == (tiles(kernel, problem.M, problem.N) * problem.batch * kernel.num_ctas, 1, 1)
        assert (launch.block, launch.shared) == ((kernel.threads, 1, 1), kernel.shared_bytes)
        assert hashlib.sha256(launch.image).hexdigest() == kernel.image.sha256
        layouts[kernel.layout] += 1
        dispatched += 1
    assert dispatched == DISPATCHES
    assert min(layouts[layout] for layout in ("nn", "nt", "tn", "tt", "any")) > 5, layouts
    assert emulator.driver.misuse == []


@pytest.mark.parametrize("arch", [arch for arch in SHIPPED if not table.shipped(arch)])
def test_estimates_are_sensible(arch: str) -> None:
    """Where nothing was measured, deep products are split, large ones not, and few rows get flat tiles."""
    mm, device = launcher(arch), CDevice(target(arch).multiprocessors, target(arch).shared_bytes)

    def chosen(m: int, n: int, k: int) -> tuple[int, int, int]:
        plan = mm.select(dense(m, n, k), device)
        config = mm.kernels[plan.kernel].config
        return plan.split, config.block_m, config.block_n

    assert chosen(512, 512, 65_536)[0] > 1
    for size in (1024, 2048, 4096, 8192):
        assert chosen(size, size, size)[0] == 1
    assert min(chosen(8192, 8192, 8192)[1:]) >= 128
    assert max(chosen(256, 256, 256)[1:]) <= 64
    assert chosen(16, 4096, 4096)[1] <= 32


@pytest.mark.parametrize("count", [0, -1])
def test_device_that_was_not_read(count: int) -> None:
    """Facts of a device that nobody filled in are an invalid call, not a division by zero."""
    launcher = open_pack(default_pack("sm80")).launcher
    with pytest.raises(ValueError, match=f"multiprocessors={count}: at least 1"):
        launcher.explain(Problem(8, 8, 8, (8, 1), (8, 1), (8, 1), "fp16", "fp16", "fp16"), CDevice(count, 0))


@own_process
def test_tables_that_contradict_each_other(interpreted_pack: Path, tmp_path: Path) -> None:
    """A kernel whose guards hold but not what is looked at for them is refused by name, not searched for ever."""

    def impossible(guard: Guard) -> tuple[str, int, int, int]:
        return guard.value, 2**64 - 1, 1, 0

    with mock.patch.object(render, "_guard_test", impossible):
        mm = open_pack(changed_pack(tiny_pack(interpreted_pack.name), tmp_path, lambda kernel: kernel)).launcher
    number = next(n for n, kernel in enumerate(mm.kernels) if (kernel.role, kernel.layout) == ("product", "nn"))
    with pytest.raises(ValueError, match=f"kernel {mm.kernels[number].name} keeps all .* guards of its list"):
        mm.check(dense(256, 256, 256), CDevice(108, 166_912), number)
