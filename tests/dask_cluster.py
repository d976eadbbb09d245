"""A Dask cluster of real processes on this machine: a scheduler, and workers that tests start, stop and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
_START_S = 60.0


class Dask:
    """A scheduler that runs, and its workers by name; `address` is the scheduler's."""

    def __init__(self, folder: Path, *, worker_ttl: str, sources: Path | str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        file = folder / "scheduler.json"
        settings = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": worker_ttl}
        words = ("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
        self._start("scheduler", words, settings, sources)
        deadline = time.monotonic() + _START_S
        while not file.exists() or not file.read_text().rstrip().endswith("}"):
            assert self._processes["scheduler"].poll() is None, (folder / "scheduler.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.address: str = json.loads(file.read_text())["address"]

    def worker(self, name: str, *options: str, nanny: bool = False, sources: Path | str = ROOT) -> None:
        """Starts a worker of one thread; its aotmm is that of `sources`."""
        words = ("worker", self.address, "--name", name, "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1")
        self._start(name, (*words, "--nanny" if nanny else "--no-nanny", *options), {}, sources)

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a worker."""
        self._processes[name].send_signal(number)

    def wait_for(self, name: str) -> None:
        """Waits until a worker has found the scheduler."""
        deadline = time.monotonic() + _START_S
        while "Registered to:" not in self.log(name):
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.05)

    def stop(self, name: str) -> None:
        """Ends a worker, which says good-bye."""
        self.send(name, signal.SIGTERM)
        self._processes[name].wait()

    def wait_without_children(self, name: str) -> None:
        """Waits until nothing that a worker has started runs any more."""
        tasks = Path("/proc") / str(self._processes[name].pid) / "task"
        deadline = time.monotonic() + _START_S
        while any(path.read_text() for path in tasks.glob("*/children")):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        """Ends all processes."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()

    def _start(self, name: str, words: tuple[str, ...], settings: dict[str, str], sources: Path | str) -> None:
        """Starts `dask` with `words`, in a folder of its own, as on another machine; temporary files are there too."""
        home = self._folder / name
        home.mkdir()
        environment = os.environ | settings | {"PYTHONPATH": str(sources), "TMPDIR": str(home)}
        command = [sys.executable, "-W", "ignore", "-m", "dask", *words]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)


@contextmanager
def dask(folder: Path, *, worker_ttl: str = "5 minutes", sources: Path | str = ROOT) -> Iterator[Dask]:
    """A cluster without workers; its logs are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Dask(folder, worker_ttl=worker_ttl, sources=sources)
    try:
        yield cluster
    finally:
        cluster.close()
