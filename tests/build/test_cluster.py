"""Builds on a Dask cluster of real processes: the bytes of a local build, whatever becomes of workers meanwhile."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from aotmm import build as building
from aotmm.build import Progress, Report, build
from aotmm.build.cache import Cache
from aotmm.build.compile import Buildable, Compiled
from aotmm.cli import INTERRUPTED, main
from aotmm.errors import AotmmError, CompileError
from aotmm.workers import dask as clusters
from aotmm.workers.pool import Timeouts
from tests.build.packs import ROOT, checkout, content
from tests.config_sets import config_set, tile
from tests.dask_cluster import Dask, dask

CONFIGS = config_set(tile(64, 64, 32, 2, 4), dtypes=["fp16"], layouts=["nn", "tt"], epilogues=["none", "bias_relu"])
KERNELS = 10  # two layouts with two epilogues each, the generic one, and five copies


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a small config set."""
    path = tmp_path_factory.mktemp("configs") / "small.toml"
    path.write_text(CONFIGS)
    return str(path)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, configs: str) -> Path:
    """A folder with the pack and the cache of a local build."""
    out = tmp_path_factory.mktemp("local")
    (report,) = build(("sm90",), out, configs=configs)
    assert (report.kernels, report.compiled) == (KERNELS, KERNELS)
    return out


@pytest.fixture
def cluster(tmp_path: Path, local: Path) -> Iterator[Dask]:
    """A scheduler without workers, and beside it what `recalled` gives back."""
    with dask(tmp_path / "cluster", worker_ttl="8s") as running:
        (tmp_path / "cluster" / "compiled").symlink_to(local / ".cache")
        yield running


def recalled(variant: Buildable, key: str) -> Compiled:
    """What the local build compiled, after a while; notes the worker's name, and hangs or waits where it is told to."""
    home = Path.cwd()
    with (home.parent / "begun").open("a") as file:
        file.write(f"{home.name} {variant.name}\n")
    if (home / "hang").exists():
        time.sleep(3600)
    time.sleep(0.3)
    while (home.parent / "wait").exists():
        time.sleep(0.05)
    found = Cache(home.parent / "compiled").get(key)
    assert found is not None
    return found


def on(cluster: Dask, configs: str, out: Path, progress: Progress = lambda *_: None) -> Report:
    """A build whose kernels are recalled on a cluster."""
    (report,) = build(("sm90",), out, configs=configs, scheduler=cluster.address, compiler=recalled, progress=progress)
    return report


@contextmanager
def others_waiting(tmp_path: Path) -> Iterator[None]:
    """Workers finish no kernel in the block, however long that takes."""
    note = tmp_path / "cluster" / "wait"
    note.touch()
    yield
    note.unlink()


def begun(tmp_path: Path) -> list[str]:
    """Names of the workers, once for each kernel that one began."""
    return [line.split()[0] for line in (tmp_path / "cluster" / "begun").read_text().splitlines()]


def test_a_worker_is_killed(cluster: Dask, configs: str, local: Path, tmp_path: Path) -> None:
    """`aotmm build --scheduler` compiles on workers, one of which is killed meanwhile: the pack of a local build."""
    for name in ("a", "b"):
        cluster.worker(name)
    out = tmp_path / "out"

    def kill() -> None:
        while len(list((out / ".cache").glob("[!.]*"))) < 2:
            time.sleep(0.01)
        cluster.send("a", signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    words = ["build", "--arch=sm90", f"--configs={configs}", f"--out={out}", f"--scheduler={cluster.address}", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.stderr + cluster.log("b")
    (report,) = json.loads(done.stdout)
    assert (report["kernels"], report["compiled"]) == (KERNELS, KERNELS)
    assert content(out / "sm90") == content(local / "sm90")
    assert content(out / ".cache") == content(local / ".cache")


def test_a_worker_joins_late(cluster: Dask, configs: str, local: Path, tmp_path: Path) -> None:
    """Who comes when half is done does a part of the rest."""
    cluster.worker("a")

    def progress(_arch: str, done: int, _total: int) -> None:
        if done == 2:
            with others_waiting(tmp_path):
                cluster.worker("late")
                cluster.wait_for("late")

    assert on(cluster, configs, tmp_path / "out", progress).compiled == KERNELS
    assert set(begun(tmp_path)) == {"a", "late"}
    assert content(tmp_path / "out" / "sm90") == content(local / "sm90")


def test_a_worker_hangs(cluster: Dask, configs: str, local: Path, tmp_path: Path) -> None:
    """A worker that is stopped loses its tasks to the others when the scheduler has missed it for its `worker-ttl`."""
    for name in ("a", "b"):
        cluster.worker(name)

    def progress(_arch: str, done: int, _total: int) -> None:
        if done == 2:
            cluster.send("a", signal.SIGSTOP)

    assert on(cluster, configs, tmp_path / "out", progress).compiled == KERNELS
    assert content(tmp_path / "out" / "sm90") == content(local / "sm90")


def test_a_compiler_hangs(
    cluster: Dask, configs: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that gives no sign of life is killed, its kernel compiled elsewhere; if there is none, an error."""
    monkeypatch.setattr(building, "TIMEOUTS", Timeouts(silence_s=1.0))
    cluster.worker("sick")
    (tmp_path / "cluster" / "sick" / "hang").touch()
    with pytest.raises(
        CompileError, match=r"sm90: what compiled \S+ was lost: it gave no sign of life for 1 s, on tcp://"
    ):
        on(cluster, configs, tmp_path / "out")
    assert begun(tmp_path).count("sick") >= 4
    cluster.worker("well")
    assert on(cluster, configs, tmp_path / "out").compiled == KERNELS
    assert content(tmp_path / "out" / "sm90") == content(local / "sm90")


@pytest.mark.parametrize("who", ["worker", "scheduler"])
def test_another_aotmm_is_refused(configs: str, tmp_path: Path, who: str) -> None:
    """A worker or scheduler with other sources, or without any, is named with what it has; nothing is compiled."""
    root = checkout(tmp_path / "other")
    with (root / "aotmm" / "problem.py").open("a") as file:
        file.write("# changed\n")
    with dask(tmp_path / "cluster", sources=root if who == "scheduler" else ROOT) as cluster:
        cluster.worker("a", sources=root if who == "worker" else ROOT)
        with pytest.raises(AotmmError) as caught:
            build(("sm90",), tmp_path / "out", configs=configs, scheduler=cluster.address)
    first, *lines = str(caught.value).splitlines()
    assert first == f"the cluster at {cluster.address} cannot be used:"
    (line,) = lines
    address = "the scheduler" if who == "scheduler" else r"tcp://127\.0\.0\.1:\d+"
    version = r"0\.1\.0 \(sources \w{12}\)"
    assert re.fullmatch(f"{address} has aotmm {version}, not {version}; make them the same", line)
    assert not (tmp_path / "out" / "sm90").exists()


def test_a_worker_without_triton_is_refused(cluster: Dask, configs: str, tmp_path: Path) -> None:
    """A worker with another Triton, or none, is named with it; so is one that joins in the middle."""
    older = tmp_path / "older"
    (older / "triton-3.8.0.dist-info").mkdir(parents=True)
    (older / "triton-3.8.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.8.0\n")
    cluster.worker("a", sources=f"{ROOT}:{older}")
    with pytest.raises(
        AotmmError, match=r"cannot be used:\ntcp://\S+ has triton 3\.8\.0, not 3\.9\.0; make them the same"
    ):
        on(cluster, configs, tmp_path / "out")
    cluster.stop("a")
    cluster.worker("b")

    def progress(_arch: str, done: int, _total: int) -> None:
        if done == 2:
            with others_waiting(tmp_path):
                cluster.worker("late", sources=f"{ROOT}:{older}")
                cluster.wait_for("late")

    with pytest.raises(AotmmError, match=r"joined later cannot be used:\ntcp://\S+ has triton 3\.8\.0, not 3\.9\.0"):
        on(cluster, configs, tmp_path / "out", progress)


def test_a_cluster_that_is_none(cluster: Dask, configs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens, and a scheduler without workers, are told; nothing is waited for in vain."""
    monkeypatch.setattr(clusters, "_CONNECT_S", 1.0)
    words = {"scheduler": "tcp://127.0.0.1:9", "configs": configs}
    with pytest.raises(
        AotmmError, match=r"no Dask scheduler at tcp://127\.0\.0\.1:9: .*; say one like tcp://host:8786"
    ):
        build(("sm90",), tmp_path / "out", **words)  # type: ignore[arg-type]
    with pytest.raises(AotmmError, match=r"the cluster at tcp://\S+ has no worker; start some"):
        on(cluster, configs, tmp_path / "out")
    result = CliRunner().invoke(
        main, ["build", "--arch=sm90", f"--out={tmp_path}", "--scheduler=tcp://a:1", "--jobs=2"]
    )
    assert result.exit_code == 2
    assert "--jobs: no effect with --scheduler" in result.stderr


def test_nothing_stays_behind(cluster: Dask, configs: str, tmp_path: Path) -> None:
    """After a build no compiler of its runs on the workers."""
    cluster.worker("a")
    on(cluster, configs, tmp_path / "out")
    cluster.wait_without_children("a")


def test_interrupted(cluster: Dask, configs: str, tmp_path: Path) -> None:
    """Ctrl-C takes back what the cluster has not done: 130, no compiler is left there, what was compiled is kept."""
    cluster.worker("a")
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from aotmm.cli import main; main(prog_name='aotmm')", "build", "--arch=sm90"]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what runs in background
    process = subprocess.Popen(
        [*command, f"--configs={configs}", f"--out={out}", f"--scheduler={cluster.address}"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, handler)
    with process:
        while not list((out / ".cache").glob("[!.]*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert stderr.splitlines()[-1].startswith("interrupted: packs in ")
    assert 1 <= len(list((out / ".cache").glob("[!.]*"))) < KERNELS
    assert not (out / "sm90").exists()
    cluster.wait_without_children("a")


def test_task_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that reaches a worker after its pool has ended starts no process, for nobody would end it."""
    monkeypatch.setattr("distributed.get_worker", lambda: SimpleNamespace(address="tcp://a:1"))
    monkeypatch.setattr(clusters, "_processes", {})
    clusters._end("pool")
    assert clusters._do("pool", b"no contract is read", b"nor a task").why == "its pool has ended"
