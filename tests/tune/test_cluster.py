"""Tuning on a Dask cluster of real processes whose GPUs are fakes: one task per GPU, whatever becomes of a worker."""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotmm.cli import main
from aotmm.errors import AotmmError, NoKernelError
from aotmm.pack import table
from aotmm.pack.files import data_folder
from aotmm.runtime.pack import Pack, open_pack, open_packs
from aotmm.timing.problems import Shapes, Sweep
from aotmm.tune import remote, session
from aotmm.tune.workers import Done, LeftOut, device_of, measure_all, measuring
from aotmm.workers.dask import Cluster, cluster
from aotmm.workers.pool import Timeouts
from tests.dask_cluster import Dask, dask
from tests.unit.tune.fakes import case, on_worker, worker_facts

TIMEOUTS = Timeouts(start_s=60, silence_s=1.5)
GPU = ("--resources", "GPU=1")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Dask]:
    """A scheduler without workers."""
    with dask(tmp_path / "cluster") as found:
        yield found


@pytest.fixture(scope="module")
def pack() -> Pack:
    """The sm90 pack that `make artifacts` built."""
    return next(pack for pack in open_packs(data_folder("artifacts")) if pack.arch == "sm90")


def pool(running: Dask, log: Path, trouble: tuple[tuple[str, str], ...] = ()) -> AbstractContextManager[Cluster]:
    """A pool of fakes on the workers with a GPU."""
    make = partial(measuring, partial(on_worker, log, trouble))
    return cluster(running.address, make, TIMEOUTS, worker_facts, {}, gpus=True)


def test_one_task_per_gpu(running: Dask, tmp_path: Path) -> None:
    """Cases are measured on the workers with a GPU alone, one after the other on each, although these have threads."""
    log = tmp_path / "log"
    for name in ("gpu0", "gpu1"):
        running.worker(name, *GPU, "--nthreads", "4")
    running.worker("cpu")
    for name in ("gpu0", "gpu1", "cpu"):
        running.wait_for(name)
    cases = [case(size) for size in range(1, 13)]
    with pool(running, log) as gpus:
        assert gpus.places() == 2
        assert (device_of(gpus).multiprocessors, gpus.facts["GPU"]) == (132, "NVIDIA H200")
        events = list(measure_all(cases, gpus))
    assert Counter(event.case for event in events if isinstance(event, Done)) == Counter(cases)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {name for name, _, _ in lines} == {"gpu0", "gpu1"}
    for gpu in ("gpu0", "gpu1"):
        mine = [(what, size) for name, what, size in lines if name == gpu]
        assert [what for what, _ in mine] == ["begins", "ends"] * (len(mine) // 2)


def test_a_kernel_that_hangs_there_is_left_out(running: Dask, tmp_path: Path) -> None:
    """What a worker ran when it fell silent is named and left out, as on one machine; it is not tried elsewhere."""
    running.worker("gpu0", *GPU)
    with pool(running, tmp_path / "log", (("ws_b", "hang"),)) as gpus:
        events = list(measure_all([case(1), case(2)], gpus))
    assert [type(event) for event in events] == [LeftOut, Done, Done]
    assert isinstance(events[0], LeftOut)
    assert events[0].name == "ws_b"
    assert "no sign of life for 1.5 s, on tcp://" in events[0].why


def test_a_worker_is_killed(running: Dask, tmp_path: Path) -> None:
    """Its case is measured elsewhere, and every case once in the end."""
    log = tmp_path / "log"
    for name in ("gpu0", "gpu1"):
        running.worker(name, *GPU)
        running.wait_for(name)
    cases = [case(size) for size in range(1, 13)]
    found = []
    with pool(running, log) as gpus:
        for event in measure_all(cases, gpus):
            found.append(event)
            if len(found) == 4:
                running.send("gpu0", signal.SIGKILL)
    assert Counter(event.case for event in found if isinstance(event, Done)) == Counter(cases)
    assert [event for event in found if isinstance(event, LeftOut)] == []


def test_gpus_that_differ_are_refused(running: Dask, tmp_path: Path) -> None:
    """GPUs of two models are no one table, and a worker with several GPUs does not say which of them a task has."""
    running.worker("gpu0", *GPU)
    running.wait_for("gpu0")
    running.worker("other", *GPU)
    running.worker("many", "--resources", "GPU=2")
    for name in ("other", "many"):
        running.wait_for(name)
    with pytest.raises(AotmmError) as caught, pool(running, tmp_path / "log"):
        pass
    text = str(caught.value)
    assert "GPU NVIDIA H1" in text or "GPU NVIDIA H2" in text
    assert "has GPU=2; start one worker per GPU, with GPU=1 each" in text


def test_without_gpus_the_command_says_so(running: Dask, tmp_path: Path) -> None:
    """Workers without the resource are of no use, and one whose torch sees no GPU is refused with torch's words."""
    words = ["tune", "--arch=sm90", f"--out={tmp_path / 'sm90.json'}", f"--scheduler={running.address}"]
    running.worker("cpu")
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "has no worker with a GPU (dask worker --resources GPU=1)" in done.stderr) == (1, True)
    running.worker("gpu0", *GPU)
    running.wait_for("gpu0")
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "has not what is needed: " in done.stderr) == (1, True)
    assert not (tmp_path / "sm90.json").exists()


def test_the_command_on_a_cluster(running: Dask, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`aotmm tune --scheduler` measures the cases on the workers and writes their table, with what their GPU is."""
    running.worker("gpu0", *GPU)
    monkeypatch.setattr(remote, "gpu_facts", worker_facts)
    factory = partial(measuring, partial(on_worker, tmp_path / "log"))
    monkeypatch.setattr(remote, "worker_factory", lambda _pack: factory)
    monkeypatch.setattr(session, "fit", lambda _pack, raw, _dtypes: (raw, None))
    cases = [case(1), case(2)]
    shapes = Shapes(1, (Sweep("small", "two squares", tuple(each.shape for each in cases)),))
    monkeypatch.setattr(session, "cases", lambda *_: cases)
    monkeypatch.setattr(table, "TABLES", tmp_path)
    measured, _, out = session.tune(
        pack, [pack], shapes, None, budget_s=60, scheduler=running.address, progress=lambda *_: None
    )
    assert out == tmp_path / "sm90-h200.json"
    assert measured.complete
    gpu = measured.environment
    assert (gpu.device, gpu.driver, gpu.pack) == ("NVIDIA H200", "580", pack.head.digest)
    assert [(shape.M, len(shape.times)) for shape in table.read(out).shapes] == [(1, 4), (2, 4)]
    monkeypatch.setattr(session, "best_pack", lambda *_: None)
    with pytest.raises(NoKernelError, match=r"the cluster's GPUs, NVIDIA H200 \(sm90\), are not served by the pack"):
        session.tune(pack, [pack], shapes, out, budget_s=60, scheduler=running.address, progress=lambda *_: None)


def test_a_pack_travels(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a worker is a whole pack there: its library opens, with the kernels of the original."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a worker's goes with its process
    files = remote.packed(pack)
    there = open_pack(remote.unpacked(files))
    assert there.head == pack.head
    assert there.launcher.kernels == pack.launcher.kernels
    assert sum(map(len, files.values())) < (pack.folder / pack.head.library.path).stat().st_size / 2
