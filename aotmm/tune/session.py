"""`aotmm tune`, from cases to the table: measure -> record -> join -> fit -> regret, each a module of this folder."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

import aotmm
from aotmm.errors import AotmmError, ArtifactError, NoKernelError
from aotmm.pack import table
from aotmm.pack.table import Sample, Table
from aotmm.runtime.devices import Device, best_pack, devices
from aotmm.runtime.pack import Pack
from aotmm.runtime.tuning import CDevice, measured_device
from aotmm.target import target
from aotmm.timing import blocks
from aotmm.timing.draw import distribution, draw
from aotmm.timing.problems import Case, Shapes
from aotmm.tune import fit as fitting
from aotmm.tune import regret, remote
from aotmm.tune.cases import cases, types_of
from aotmm.tune.join import joined
from aotmm.tune.measure import GpuMeasurer
from aotmm.tune.models import Gpu, samples
from aotmm.tune.record import Environment, Record, recorded_seed
from aotmm.tune.remote import driver
from aotmm.tune.workers import TIMEOUTS, Done, device_of, measure_all, measuring
from aotmm.workers.dask import cluster
from aotmm.workers.pool import WorkerPool, local

# Layers with block scales for each random problem that is asked for: the share of a class apart in distribution.json.
_BLOCK_SCALED = 0.16
_FEWER = 2  # a run may replace times of so many times its own random problems, and of no more
Progress = Callable[[int, int, str], None]  # cases done, all cases, the last event


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of a measurement: samples by case, and configs left out with reasons; of `total` cases."""

    environment: Environment
    samples: dict[Case, tuple[Sample, ...]]
    left_out: dict[str, str]
    total: int

    @property
    def complete(self) -> bool:
        """Return whether there was time for every case."""
        return len(self.samples) == self.total

    def leaves_out(self, config_name: str) -> bool:
        """Return whether the config or its family was left out."""
        return config_name in self.left_out or config_name.partition("_")[0] in self.left_out


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a table's models.

    Attributes:
        held_out: regret on shapes that neither models nor selection saw.
        models: regret on the other shapes, of a selection that knows only the models.
    """

    held_out: regret.Regret
    models: regret.Regret


def tune(
    pack: Pack,
    packs: Sequence[Pack],
    shapes: Shapes,
    out: Path | None,
    *,
    dtypes: Sequence[str] = (),
    seed: int | None = None,
    count: int = 0,
    keep: bool = False,
    budget_s: float,
    scheduler: str | None = None,
    progress: Progress,
) -> tuple[Measurement, Quality, Path]:
    """Measure the kernels of `pack` on every GPU that it serves, for `budget_s` seconds, and write their table.

    The best of `packs` for a GPU serves it. Samples are kept beside the table while cases are left to measure; the next
    call continues from there. Return the table's path too.

    Args:
        out: the file to write; None for the table of that GPU in this installation.
        seed: of the random problems; by default that of the samples beside `out`, or a new one.
        count: random problems beside the shapes, as of `draw.draw`.
        keep: whether the table's times stay, as of `join.joined`; else it is replaced.
        scheduler: address of a Dask scheduler, whose workers with the resource GPU=1 measure instead of this machine.

    Raises:
        NoKernelError: `pack` serves no GPU here, or those of the cluster.
        SpecError: a type that cannot be tuned.
        ArtifactError: the samples beside `out` are of another GPU or pack; or the table to keep is, or cannot be read.
        AotmmError: a measuring process cannot start, the cluster cannot be used, or `out` cannot be written, or has
            times of more than twice as many random problems, which are not kept.
    """
    row = target(pack.arch)
    types = types_of(dtypes, row)
    with _local_gpus(pack, packs) if scheduler is None else _cluster_gpus(pack, packs, scheduler) as (pool, gpu):
        device = device_of(pool)
        out = out or table.shipped_path(pack.arch, device.name.decode())
        record = out.with_name(f"{out.name}.partial")
        seed = _seed(record, seed) if count else None
        drawn = {} if seed is None else _drawn(seed, count)
        before = out.with_name(f"{out.name}.before")
        old = _to_keep(out, device, record, before) if keep else None
        if old is None:
            _refuse_to_lose(out, sum(map(len, drawn.values())))
        chosen = cases(shapes, drawn, types, row)
        environment = environment_of(pack, device, gpu["driver"], gpu["torch"], seed)
        measured = measure(chosen, pool, environment, record, budget_s=budget_s, progress=progress)
    raw = table_of(measured, shapes)
    if old is not None:
        found = {kernel.config_name for kernel in pack.launcher.kernels}
        raw = joined(old, raw, {name for name in found if not measured.leaves_out(name)})
    done, quality = fit(pack, raw, types)
    write(done, out)
    if measured.complete:
        record.unlink()
        before.unlink(missing_ok=True)
    return measured, quality, out


def _drawn(seed: int, count: int) -> dict[str, list[Case]]:
    """Return random problems by class: those of `draw.draw` without a bias, and layers with block scales."""
    known = distribution()
    plain = [each.name for each in known.classes if not each.bias]
    layers = blocks.draw_layers(blocks.layers(), seed)
    scaled = list(itertools.islice(layers, math.ceil(count * _BLOCK_SCALED)))
    return draw(known, seed, count, plain) | {"block_scaled": scaled}


def _refuse_to_lose(out: Path, count: int) -> None:
    """Raise AotmmError if `out` is a table of many more random problems than `count`, which would replace them."""
    path = table.drawn_path(out)
    known = len(table.read(path).shapes) if path.exists() else 0
    if known > _FEWER * count:
        raise AotmmError(
            f"{out} has times of {known} random problems, which {count} would replace; keep them with --keep, or write "
            f"to another file with --out"
        )


def _to_keep(path: Path, device: CDevice, record: Path, before: Path) -> Table:
    """Return the table in the file `path` as it was when the measurement in `record` began, which `before` remembers.

    An interrupted run has joined its samples to the table already, and the next one must not count them twice.

    Raises:
        ArtifactError: it is not of this device, or cannot be read. AotmmError: `before` cannot be written.
    """
    goes_on = record.exists() and before.exists()
    old = table.read(before) if goes_on else table.read_whole(path)
    name = device.name.decode()
    if old.device != name:
        raise ArtifactError(f"{path} has times of {old.device}, and this is {name}; write to another file with --out")
    if not goes_on:
        _replace({before: table.write(old)})
    return old


def _seed(record: Path, wanted: int | None) -> int:
    """Return the seed that is wanted, else that of the samples in `record`, else a new one."""
    found = recorded_seed(record) if wanted is None else wanted
    return secrets.randbits(32) if found is None else found


def environment_of(pack: Pack, device: CDevice, driver: str, torch_version: str, seed: int | None) -> Environment:
    """Return the facts of a measurement of `pack` on GPUs like `device`."""
    facts = device.multiprocessors, device.clock_mhz, device.memory_gbps, device.l2_bytes
    versions = driver, torch_version, aotmm.__version__
    return Environment(pack.arch, device.name.decode(), *facts, *versions, pack.head.digest, seed)


@contextmanager
def _local_gpus(pack: Pack, packs: Sequence[Pack]) -> Iterator[tuple[WorkerPool, dict[str, str]]]:
    """Yield a pool of this machine's GPUs, and their facts. Raises NoKernelError."""
    gpus = serving(pack, packs)
    facts = {"GPU": gpus[0].name, "driver": driver(), "torch": torch.__version__}
    factories = [partial(measuring, partial(GpuMeasurer, pack.folder, gpu.ordinal)) for gpu in gpus]
    with local(factories, TIMEOUTS) as pool:
        yield pool, facts


@contextmanager
def _cluster_gpus(pack: Pack, packs: Sequence[Pack], scheduler: str) -> Iterator[tuple[WorkerPool, dict[str, str]]]:
    """Yield a pool of the cluster's GPUs, and their facts. Raises AotmmError, NoKernelError."""
    with cluster(scheduler, remote.worker_factory(pack), TIMEOUTS, remote.gpu_facts, {}, gpus=True) as pool:
        name, arch = pool.facts["GPU"], pool.facts["arch"]
        best = best_pack(packs, arch)
        if best is None or best[0] is not pack:
            raise NoKernelError(f"the cluster's GPUs, {name} ({arch}), are not served by the pack for {pack.arch}")
        yield pool, pool.facts


def refit(pack: Pack, path: Path, dtypes: Sequence[str] = (), start: Path | None = None) -> Quality:
    """Fit the models of the table in `path` again, to its samples. Needs no GPU.

    Args:
        start: a table whose models the fit begins with, by default as of `fit`. Configs without samples keep these.

    Raises:
        ArtifactError: there is no table, it is refused, is for another arch, or has no times of the pack's kernels; or
            `start` is for another arch or has no models.
        SpecError: as `cases.types_of`. AotmmError: the table cannot be written.
    """
    types = types_of(dtypes, target(pack.arch))
    raw, begin = table.read_whole(path), None if start is None else table.read(start)
    for place, each in ((path, raw), (start, begin)):
        if each is not None and each.arch != pack.arch:
            raise ArtifactError(f"{place} is a table for {each.arch}, and the pack in {pack.folder} is for {pack.arch}")
    if begin is not None and begin.network is None:
        raise ArtifactError(f"{start} has no models to begin with; fit some: aotmm tune --refit --out {start}")
    mine = {kernel.config_name for kernel in pack.launcher.kernels}
    if not any(sample.config_name in mine for shape in raw.shapes if not shape.held_out for sample in shape.times):
        raise ArtifactError(f"{path} has no times of the kernels in {pack.folder}; it keeps its models")
    done, quality = fit(pack, raw, types, begin)
    write(done, path)
    return quality


def serving(pack: Pack, packs: Sequence[Pack]) -> list[Device]:
    """Return the GPUs that `pack` serves, of the first one's model. Raises NoKernelError if there is none."""
    found = devices()
    mine = [gpu for gpu in found if (best := best_pack(packs, gpu.arch)) is not None and best[0] is pack]
    if not mine:
        names = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in found) or "none"
        raise NoKernelError(f"no GPU here that the pack for {pack.arch} in {pack.folder} serves; GPUs: {names}")
    return [gpu for gpu in mine if gpu.name == mine[0].name]


def measure(
    chosen: Sequence[Case],
    pool: WorkerPool,
    environment: Environment,
    path: Path,
    *,
    budget_s: float,
    progress: Progress,
) -> Measurement:
    """Measure the cases for `budget_s` seconds with a pool, continuing from the record `path`.

    Raises:
        ArtifactError: the record is of another GPU or pack.
        AotmmError: as `workers.measure_all`.
    """
    deadline = time.monotonic() + budget_s
    with closing(Record(path, environment)) as record:
        todo = [case for case in chosen if case not in record.samples]
        progress(len(chosen) - len(todo), len(chosen), "")
        left_out = frozenset(record.left_out)
        for event in measure_all(todo, pool, left_out=left_out, deadline=deadline):
            if isinstance(event, Done):
                record.add(event.case, event.outcome.samples)
                text = str(event.case)
            else:
                record.leave_out(*event)
                text = f"left out {event.name}: {event.why}"
            progress(sum(case in record.samples for case in chosen), len(chosen), text)
        samples = {case: record.samples[case] for case in chosen if case in record.samples}
        return Measurement(environment, samples, dict(record.left_out), len(chosen))


def table_of(measured: Measurement, shapes: Shapes) -> Table:
    """Return the table of a measurement, without models; cases whose shape is not in `shapes` were drawn.

    It has no samples of configs that were left out, nor any that are too slow for the fit.
    """
    environment = asdict(measured.environment)
    del environment["pack"]
    return Table(
        **environment,
        date=datetime.now(timezone.utc).date().isoformat(),
        network=None,
        models=(),
        shapes=tuple(
            case.timed(
                _near([sample for sample in samples if not measured.leaves_out(sample.config_name)]),
                drawn=not shapes.swept(case),
                held_out=shapes.held_out(case),
            )
            for case, samples in measured.samples.items()
        ),
    )


def _near(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples within `fitting.FAR` of the best, those with copies and those without apart."""
    best = {copied: min((s.ns for s in samples if bool(s.copies) == copied), default=0) for copied in (False, True)}
    return tuple(sample for sample in samples if sample.ns < fitting.FAR * best[bool(sample.copies)])


def fit(pack: Pack, raw: Table, types: Mapping[str, str], start: Table | None = None) -> tuple[Table, Quality]:
    """Return `raw` with models fitted to all shapes but those held out, and their quality.

    The fit begins with the models of `start`, by default of the shipped table of the arch's own device, unless it is
    that. `types` are those that were measured, as of `cases.types_of`. The pack's launcher keeps the new table.
    Needs no GPU.
    """
    launcher, row = pack.launcher, target(pack.arch)
    usual = (each for each in table.shipped(pack.arch) if each.device == row.device != raw.device)
    start = start or next(usual, None)
    done = _fitted(pack, raw, start)
    device = measured_device(raw, row.shared_bytes)
    quality = Quality(
        held_out=regret.held_out_regret(launcher, device, done, types),
        models=regret.model_regret(launcher, device, done, types),
    )
    return done, quality


def _fitted(pack: Pack, raw: Table, start: Table | None) -> Table:
    """Return `raw` with models fitted from those of `start` on, as it will be read from its file."""
    training = [shape for shape in raw.shapes if not shape.held_out]
    found = samples(pack.launcher.kernels, Gpu(target(pack.arch), raw), training)
    network, models = fitting.fit(found, start) if found.ns.size else (None, ())  # the time may have run out at once
    return table.parse(table.write(replace(raw, network=network, models=models)), "the new table")


def write(done: Table, out: Path) -> None:
    """Write the files of a table. Raises AotmmError, and leaves all as they were, if there is no place for them."""
    _replace(table.files(done, out))


def _replace(files: Mapping[Path, bytes]) -> None:
    """Write files. None of them changes before all are on the disk. Raises AotmmError."""
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    try:
        for path, temporary in temporaries.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(files[path])
        for path, temporary in temporaries.items():
            temporary.replace(path)
    except OSError as error:
        raise AotmmError(f"{', '.join(map(str, files))} cannot be written: {error}") from error
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
