"""Kernels for sm80 on a newer GPU, through their PTX, against code of their own generation: `aotmm bench ampere`.

A GPU of 9.0 runs the instructions of an A100 (mma.sync, cp.async, ldmatrix), with another clock, memory and cache. So
this tells about code, tiles and choices, and nothing about an A100's speed. Problems are measured on the whole GPU and
on as many multiprocessors as make an A100's waves; selection is told their number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import aotmm
from aotmm.bench import facts, green_context
from aotmm.bench.cases import Work
from aotmm.bench.drawn import left, work
from aotmm.bench.drawn_summary import AMPERE
from aotmm.bench.protocol import Effort, GraphStopwatch, compare
from aotmm.bench.providers import Call, NotRunError, Provider, cutlass
from aotmm.bench.providers.own import described, launches
from aotmm.bench.regret import raced, schedule
from aotmm.bench.results import Results, Row, Times
from aotmm.bench.session import continued, gpu, keep
from aotmm.errors import ArtifactError
from aotmm.pack.files import build_command
from aotmm.pack.table import Sample, ShapeTimes, Table, write
from aotmm.runtime.launcher import Launcher, Plan, Problem
from aotmm.runtime.tuning import CDevice
from aotmm.timing.draw import distribution
from aotmm.timing.operands import Operands, Pool
from aotmm.timing.problems import Case
from aotmm.tune.candidates import Candidate, problem_of

ARCH = "sm80"
WHOLE, PART = "whole", "part"  # of the GPU
MULTIPROCESSORS = 104  # of a part: a green context on 9.0 has a multiple of 8, an A100 108
_COUNT = 60  # problems of all classes, each measured twice: about 2 minutes
_EFFORT = Effort(1000.0, 0.0, (5, 5), isolated=False)
_HOPELESS = 3.0  # as `race.HOPELESS`: predictions are for another GPU
_LOOK_TURNS, _LOOK_LAUNCHES = 3, 32  # of the first look at a kernel of CUTLASS


@dataclass(frozen=True, slots=True)
class _Context:
    """A GPU, or a part of it: the stream that runs there, and the device that selection is told."""

    stream: torch.cuda.Stream
    device: CDevice


class _Entry(NamedTuple):
    """One column: entries of equal keys are the same code, and timed once."""

    key: Hashable
    call: Call
    roundings: int
    note: str


def run_ampere(seed: int, folder: Path, progress: Callable[[Row], None], *, count: int | None = None) -> Results:
    """Measure random problems, and write `folder`/results.json every few seconds, so that a run can go on.

    Rows have the times of: "chosen", the plan that selection takes; "best", the fastest plan of a race of all;
    "cutlass", the fastest of CUTLASS' kernels for Ampere; "tile" and "cutlass_tile", kernels of both with the same
    tile, steps and stages, of such pairs that in which CUTLASS' is fastest, if the product has a whole tile. The times
    of all plans go to `folder`/whole.json and part.json, tables without models.

    Args:
        seed, count: as of `draw.draw`, of the classes that are not apart.
        folder: its results are kept and not measured again, if they are of the same seed, machine and software.
        progress: called with every row when it is done.

    Raises:
        SpecError: torch sees no GPU, or `folder` has results of another seed or software.
        ArtifactError: there is no pack for sm80.
    """
    ordinal = gpu()
    launcher = _launcher()
    found = continued(folder, facts.collect(ordinal) | {"seed": seed, "figure": AMPERE})
    contexts = {WHOLE: _Context(torch.cuda.Stream(), launcher.device(ordinal))}  # type: ignore[no-untyped-call]
    try:
        part = launcher.device(ordinal)
        part.multiprocessors = MULTIPROCESSORS
        contexts[PART] = _Context(green_context.stream(ordinal, MULTIPROCESSORS), part)
    except NotRunError as reason:
        found.facts["part"] = str(reason)
    classes = [each.name for each in distribution().classes if not each.apart]
    drawn = work(distribution(), seed, count or _COUNT, classes)
    todo = [replace(item, sweeps=(*item.sweeps, name), providers=()) for item in drawn for name in contexts]
    keep(left(todo, found), _measurer(launcher, ordinal, contexts, found), found, folder, progress, ordinal=ordinal)
    for name, each in contexts.items():
        (folder / f"{name}.json").write_bytes(write(_table(found, name, each.device)))
    return found


def _launcher() -> Launcher:
    packs = aotmm.load().packs
    for pack in packs:
        if pack.arch == ARCH:
            return pack.launcher
    raise ArtifactError(
        f"no pack for {ARCH}, only for {', '.join(pack.arch for pack in packs)}; build one: {build_command(ARCH, None)}"
    )


def _measurer(
    launcher: Launcher, ordinal: int, contexts: Mapping[str, _Context], found: Results
) -> Callable[[Work], Row]:
    pool = Pool(torch.device("cuda", ordinal))
    samples = found.other.setdefault("samples", {name: [] for name in contexts})

    def measured(item: Work) -> Row:
        name = item.sweeps[-1]
        with torch.cuda.stream(contexts[name].stream):
            sets = pool.operands(item.case, found.facts["cache_bytes"])
            row, plans = _measured(item, sets, launcher, ordinal, contexts[name])
        samples[name].append(asdict(plans))
        return row

    return measured


def _measured(
    item: Work, sets: Sequence[Operands], launcher: Launcher, ordinal: int, context: _Context
) -> tuple[Row, ShapeTimes]:
    """Return the row of a problem, and the times of all plans."""
    case, stopwatch = item.case, GraphStopwatch(context.stream)
    problems = [problem_of(case, case.output, *(x.data_ptr() for x in (row.a, row.b, row.out))) for row in sets]
    chosen = launcher.select(problems[0], context.device)
    plans, wrong = raced(case, sets, problems, launcher, context.device, ordinal, _HOPELESS)
    entries = {"chosen": _ours(launcher, chosen, sets, problems)}
    if plans:
        entries["best"] = _ours(launcher, min(plans, key=lambda row: row[0])[1].plan, sets, problems)
    not_run = dict(wrong)
    try:
        theirs = _cutlass(case, sets, context.device.multiprocessors, stopwatch)
        entries["cutlass"] = min(theirs.values(), key=lambda pair: pair[0])[1]
        pair = _same_tile(case, launcher, plans, theirs)
        if pair is not None:
            entries["tile"] = _ours(launcher, pair[0], sets, problems)
            entries["cutlass_tile"] = pair[1]
    except NotRunError as reason:
        not_run["cutlass"] = str(reason)
    times, refused = _in_turns(case, sets, entries, stopwatch)
    samples = case.timed((candidate.sample(ns) for ns, candidate in plans), drawn=True)
    return Row(case, item.sweeps, times, not_run | refused), samples


def _ours(launcher: Launcher, plan: Plan, sets: Sequence[Operands], problems: Sequence[Problem]) -> _Entry:
    by_set = {id(operands): problem for operands, problem in zip(sets, problems, strict=True)}
    call = launches(launcher, plan, by_set, sets[0].a.device)
    return _Entry(schedule(launcher, plan), call, 1, described(launcher, plan))


def _cutlass(
    case: Case, sets: Sequence[Operands], multiprocessors: int, stopwatch: GraphStopwatch
) -> dict[tuple[cutlass.Config, int], tuple[float, _Entry]]:
    """Return microseconds of each kernel and number of slices, in a short look. Raises NotRunError if there is none."""
    found = {}
    for config, slices, call in cutlass.calls(case, sets, cutlass.AMPERE_CONFIGS, multiprocessors):
        entry = _Entry((config, slices), call, slices, cutlass.described(config, slices))
        try:
            run = stopwatch.record(call, sets, min(len(sets), _LOOK_LAUNCHES))
        except NotRunError:
            continue  # this one does not take the sizes
        found[config, slices] = min(run() for _ in range(_LOOK_TURNS)), entry
    if not found:
        raise NotRunError("none of the CUTLASS kernels takes these sizes")
    return found


def _same_tile(
    case: Case,
    launcher: Launcher,
    plans: Sequence[tuple[int, Candidate]],
    theirs: Mapping[tuple[cutlass.Config, int], tuple[float, _Entry]],
) -> tuple[Plan, _Entry] | None:
    """Return our fastest plan of a tile, and CUTLASS' fastest kernel with its steps and stages; None if there is none.

    The product has one whole tile at least: ours load the rest of a tile again, theirs do not.
    """
    ours, shape = {}, case.shape
    for _, candidate in sorted(plans, key=lambda row: row[0], reverse=True):  # the fastest of a tile stays
        config = launcher.kernels[candidate.plan.kernel].config
        whole = config.block_m <= shape.M and config.block_n <= shape.N
        if whole and candidate.plan.split == 1 and not candidate.plan.copies:
            ours[config.block_m, config.block_n, config.block_k, config.num_stages] = candidate.plan
    pairs = [
        (us, ours[tile], entry)
        for (config, slices), (us, entry) in theirs.items()
        if slices == 1 and (tile := (*map(int, config[:3]), int(config[-1]))) in ours
    ]
    return min(pairs, key=lambda row: row[0])[1:] if pairs else None


def _in_turns(
    case: Case, sets: Sequence[Operands], entries: Mapping[str, _Entry], stopwatch: GraphStopwatch
) -> tuple[dict[str, Times], dict[str, str]]:
    """Return the times of all entries, checked and in turns, and why others have none."""
    first: dict[Hashable, str] = {}
    for name, entry in entries.items():
        first.setdefault(entry.key, name)

    def provider(name: str) -> Provider:
        call, roundings, note = entries[name][1:]
        return Provider(name, "", lambda _case, _sets: call, roundings, describe=lambda _case, _operands: note)

    providers = [provider(name) for name in entries if first[entries[name].key] == name]
    times, not_run = compare(case, sets, providers, stopwatch, _EFFORT)
    return {name: times[first[x.key]] for name, x in entries.items() if first[x.key] in times}, not_run


def _table(found: Results, name: str, device: CDevice) -> Table:
    """Return the times of all plans in one context as a table without models."""
    shapes: dict[tuple[object, ...], ShapeTimes] = {}
    for body in found.other["samples"].get(name, []):
        shape = ShapeTimes(**(body | {"times": tuple(Sample(*sample) for sample in body["times"])}))
        shapes[shape.product] = shape
    known: dict[str, Any] = found.facts
    return Table(
        arch=ARCH,
        device=device.name.decode(),
        multiprocessors=device.multiprocessors,
        clock_mhz=device.clock_mhz,
        memory_gbps=device.memory_gbps,
        l2_bytes=device.l2_bytes,
        driver=str(known.get("driver_version", "unknown")),
        torch=str(known["torch"]),
        aotmm=str(known["aotmm"]),
        date=str(known["date"]),
        seed=None,
        network=None,
        models=(),
        shapes=tuple(shapes.values()),
    )
