"""`aotmm tune`, from the cases to the table: measure -> record -> fit -> judge, each a module of this folder."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import aotmm
from aotmm import table
from aotmm.errors import AotmmError, NoKernelError
from aotmm.runtime.devices import Device, best_pack, devices
from aotmm.runtime.launcher import CDevice
from aotmm.runtime.pack import Pack
from aotmm.table import Sample, Shape, Table
from aotmm.target import target
from aotmm.tune import judge
from aotmm.tune.cases import Case
from aotmm.tune.measure import GpuMeasurer
from aotmm.tune.models import Fitted, Gpu, fit_models
from aotmm.tune.record import Head, Record
from aotmm.tune.workers import PATIENCE, Done, Measurer, Patience, measure_all

Progress = Callable[[int, int, str], None]  # cases done, all cases, what happened last


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement found: samples of `done` of `total` cases, and what was left out and why."""

    head: Head
    samples: dict[Case, tuple[Sample, ...]]
    left_out: dict[str, str]
    total: int

    @property
    def complete(self) -> bool:
        """Whether there was time for every case."""
        return len(self.samples) == self.total


@dataclass(frozen=True, slots=True)
class Verdict:
    """How good a table is.

    Attributes:
        held_out: regret on shapes that neither models nor selection saw.
        models: regret on the other shapes, of a selection that knows the models alone.
        spared: schedules whose absence costs next to nothing.
        fitted: the models, with their errors.
    """

    held_out: judge.Regret
    models: judge.Regret
    spared: list[judge.Spared]
    fitted: list[Fitted]


def serving(pack: Pack, packs: Sequence[Pack]) -> list[Device]:
    """The GPUs that `pack` serves, of one model: that of the first.

    Raises:
        NoKernelError: there is none.
    """
    found = devices()
    mine = [gpu for gpu in found if (best := best_pack(packs, gpu.arch)) is not None and best[0] is pack]
    if not mine:
        names = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in found) or "none"
        raise NoKernelError(f"no GPU here that the pack for {pack.arch} in {pack.folder} serves; GPUs: {names}")
    return [gpu for gpu in mine if gpu.name == mine[0].name]


def head_of(pack: Pack, gpu: Device, seed: int) -> Head:
    """What all samples of a measurement with `pack` on `gpu` have in common."""
    import torch

    return Head(pack.arch, gpu.name, _driver(), torch.__version__, aotmm.__version__, pack.head.digest, seed)


def gpu_makers(pack: Pack, gpus: Sequence[Device]) -> list[Callable[[], Measurer]]:
    """What makes the measurer of each GPU, in a worker's process."""
    return [functools.partial(GpuMeasurer, pack.folder, gpu.ordinal) for gpu in gpus]


def measure(
    cases: Sequence[Case],
    makers: Sequence[Callable[[], Measurer]],
    head: Head,
    path: Path,
    *,
    budget_s: float,
    progress: Progress,
    patience: Patience = PATIENCE,
) -> Measured:
    """Measures `cases` for `budget_s` seconds, going on from the record `path` if there is one.

    Raises:
        ArtifactError: the record is of another GPU or pack.
        AotmmError: a worker cannot start.
    """
    deadline = time.monotonic() + budget_s
    with closing(Record(path, head)) as record:
        todo = [case for case in cases if case not in record.samples]
        done = len(cases) - len(todo)
        progress(done, len(cases), "")
        for event in measure_all(
            todo, makers, left_out=frozenset(record.left_out), deadline=deadline, patience=patience
        ):
            if isinstance(event, Done):
                record.add(event.case, event.outcome.samples)
                done += 1
                progress(done, len(cases), str(event.case))
            else:
                record.leave_out(*event)
                progress(done, len(cases), f"left out {event.name}: {event.why}")
        wanted = set(cases)
        samples = {case: found for case, found in record.samples.items() if case in wanted}
        return Measured(head, samples, dict(record.left_out), len(cases))


def table_of(measured: Measured) -> Table:
    """The table of a measurement, without models. What was left out is not in it, wherever it did work."""
    head = measured.head
    shapes = [
        Shape(
            case.width,
            case.layout,
            case.fast_accum,
            case.M,
            case.N,
            case.K,
            case.held_out,
            tuple(sample for sample in samples if sample.schedule not in measured.left_out),
        )
        for case, samples in measured.samples.items()
    ]
    return Table(
        arch=head.arch,
        device=head.device,
        driver=head.driver,
        torch=head.torch,
        aotmm=head.aotmm,
        date=datetime.now(timezone.utc).date().isoformat(),
        seed=head.seed,
        models=(),
        shapes=tuple(shapes),
    )


def fit(pack: Pack, raw: Table, device: CDevice, dtypes: dict[int, str]) -> tuple[Table, Verdict]:
    """`raw` with models fitted to the shapes that are not held out, and how good that is. Needs no GPU.

    `dtypes` has the type that was measured for each width. The pack's launcher is left with the new table.
    """
    launcher = pack.launcher
    training = [shape for shape in raw.shapes if not shape.held_out]
    found = fit_models(launcher.kernels, Gpu(target(pack.arch), device.multiprocessors), training)
    # As it will be read: what is judged is what is written.
    done = table.parse(table.write(replace(raw, models=tuple(row.model for row in found))), "the new table")
    return done, Verdict(
        held_out=judge.held_out_regret(launcher, device, done, dtypes),
        models=judge.model_regret(launcher, device, done, dtypes),
        spared=judge.spare(done.shapes),
        fitted=found,
    )


def write(done: Table, out: Path) -> None:
    """Writes a table, whole or not at all. Raises AotmmError if it cannot."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(table.write(done))
        temporary.replace(out)
    except OSError as error:
        raise AotmmError(f"{out} cannot be written: {error}") from error


def _driver() -> str:
    """Version of the kernel's part of the GPU driver, "unknown" where the system does not tell."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            return Path(path).read_text().strip()
        except OSError:
            continue
    return "unknown"
