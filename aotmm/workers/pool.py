"""Worker pools: processes of this machine here, those of a cluster in `aotmm.workers.dask`.

Compiling or running a kernel may crash or never end, and its own process cannot handle either. So tasks run in child
processes. A thread of the parent waits for each and kills it when its heartbeat stops.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from aotmm.errors import AotmmError

Heartbeat = Callable[[object], None]
Worker = Callable[[Any, Heartbeat], Any]  # does one task, and calls the heartbeat meanwhile
WorkerFactory = Callable[[], Worker]  # called once in each process

_SHUTDOWN_GRACE_S = 5.0
# Exit codes of a process without memory: killed by the kernel, or ended by itself.
_FOR_WANT_OF_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)
# The child's program. It finds modules as its parent does.
_PROGRAM = """
import json, sys
handle, folder, path = sys.argv[1:]
sys.path[:] = json.loads(path)
from aotmm.workers.pool import serve
serve(int(handle), folder)
"""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a process may take to start, then between two heartbeats, and a pool between two results."""

    start_s: float = 240.0
    silence_s: float = 20.0
    stall_s: float = 3600.0


class WorkerDiedError(Exception):
    """The process of a task is gone: it could not start, ended, raised, or was killed because its heartbeat stopped.

    Attributes:
        why: the cause, in words.
        last: the value of its last heartbeat during the task, None if there was none.
        starved: the machine may lack memory or files, so that fewer processes at once may help.
    """

    def __init__(self, why: str, last: Any = None, *, starved: bool = False) -> None:
        super().__init__(why, last)
        self.why, self.last, self.starved = why, last, starved


class WorkerPool(Protocol):
    """Executor of several tasks at once; `local` and `dask.cluster` yield one."""

    def submit(self, task: Any) -> Future[Any]:
        """Return the future result of `task`, which may be a WorkerDiedError."""

    def places(self) -> int:
        """Return the number of tasks at once."""


def completed(futures: Iterable[Future[Any]], pool: WorkerPool, stall_s: float) -> Iterator[Future[Any]]:
    """Yield the futures of `pool` as they are done. Raises AotmmError if none is for `stall_s` seconds."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=stall_s, return_when=FIRST_COMPLETED)
        if not done:
            raise AotmmError(
                f"no result for {stall_s:g} s while {len(waiting)} tasks are left; workers now: {pool.places()}"
            )
        yield from done


@contextmanager
def local(factories: Sequence[WorkerFactory], timeouts: Timeouts) -> Iterator[WorkerPool]:
    """Yield a pool of one process per factory on this machine; they end with the block."""
    processes = WorkerProcesses(factories, timeouts)
    threads = ThreadPoolExecutor(len(factories))
    try:
        yield _Local(threads, processes, len(factories))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        processes.end()
        threads.shutdown()


@dataclass(frozen=True, slots=True)
class _Local:
    threads: ThreadPoolExecutor
    processes: WorkerProcesses
    count: int

    def submit(self, task: Any) -> Future[Any]:
        try:
            return self.threads.submit(self.processes.run, task)
        except RuntimeError as error:
            raise AotmmError(
                f"{self.count} processes need a thread each, of which one cannot be started: {error}; "
                f"start fewer processes, or raise the limits on memory (ulimit -v) and processes (ulimit -u)"
            ) from error

    def places(self) -> int:
        return self.count


class WorkerProcesses:
    """Processes that each do one task after another, for any thread.

    They start when they are needed. A lost one is replaced by its factory's next.
    """

    def __init__(self, factories: Sequence[WorkerFactory], timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._unused = list(reversed(factories))
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._ended = False

    def run(self, task: Any) -> Any:
        """Return the result of `task`; at most one call per factory at once. Raises WorkerDiedError."""
        child = self._take()
        try:
            result = child.run(task, self._timeouts)
        except BaseException:
            with self._lock:
                self._busy.discard(child)
                self._unused.append(child.make)
            child.kill()
            raise
        with self._lock:
            self._busy.discard(child)
            self._idle.append(child)
        return result

    def _take(self) -> _Child:
        with self._lock:
            if self._ended:
                raise WorkerDiedError("there is no more to do")
            child = self._idle.pop() if self._idle else self._start()
            self._busy.add(child)
        return child

    def _start(self) -> _Child:
        make = self._unused.pop()
        try:
            return _Child(make)
        except OSError as error:
            self._unused.append(make)
            raise WorkerDiedError(f"a process for it cannot be started: {error}", starved=True) from error

    def end(self) -> None:
        """End all processes: idle ones by themselves, the others at once."""
        with self._lock:
            self._ended = True
            busy, idle = list(self._busy), self._idle
        for child in busy:
            child.kill()
        for child in idle:
            child.dismiss()
        for child in idle:
            child.kill(_SHUTDOWN_GRACE_S)


class _Child:
    """One process, in a session of its own: Ctrl-C does not reach it, and its children are killed with it.

    Its temporary files are removed with it.
    """

    def __init__(self, make: WorkerFactory) -> None:
        self.make = make
        self._started = False
        with ExitStack() as undo:
            self._folder = TemporaryDirectory(prefix="aotmm-", ignore_cleanup_errors=True)
            undo.callback(self._folder.cleanup)
            self._pipe, theirs = Pipe()
            undo.callback(self._pipe.close)
            with theirs:
                number, folder = theirs.fileno(), self._folder.name
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(number), folder, json.dumps(sys.path)],
                    pass_fds=[number],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=os.environ | {"TMPDIR": folder},
                )
            undo.pop_all()

    def run(self, task: Any, timeouts: Timeouts) -> Any:
        """Return the result of `task`. Raises WorkerDiedError, after which the process is of no use."""
        if not self._started:
            self._send(self.make)
            self._hear(timeouts.start_s, None)
            self._started = True
        self._send(task)
        last = None
        while True:
            kind, value = self._hear(timeouts.silence_s, last)
            if kind == "result":
                return value
            last = value

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it is gone: reading finds its end
            self._pipe.send(message)

    def _hear(self, limit_s: float, last: Any) -> tuple[str, Any]:
        try:
            heard = self._pipe.poll(limit_s)
            kind, value = self._pipe.recv() if heard else ("lost", f"it gave no sign of life for {limit_s:g} s")
        except (EOFError, OSError):
            code = self._process.wait()
            kind, value = "starved" if code in _FOR_WANT_OF_MEMORY else "lost", f"its process ended with code {code}"
        if kind in ("lost", "starved"):
            raise WorkerDiedError(value, last, starved=kind == "starved")
        return kind, value

    def dismiss(self) -> None:
        """Let the process end when it has done its task."""
        self._pipe.close()

    def kill(self, after_s: float = 0.0) -> None:
        """Kill the process unless it ends in time; do not wait for one that a driver holds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(after_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_GRACE_S)
        self._folder.cleanup()


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a child of this process, which begins as this process is and leaves nothing in it.

    What it raises is raised here. If the child ends otherwise, so does this process.
    """
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            theirs.send((True, work()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again
            theirs.send((False, error))
        finally:
            os._exit(0)  # without what Python does at its end, which is for this process to do
    theirs.close()
    with ours, suppress(EOFError):
        done, found = ours.recv()
        os.waitpid(child, 0)
        if done:
            return found
        raise found
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(handle: int, folder: str) -> None:
    """Do the tasks from the pipe `handle`, in the child, until its other end is closed.

    Temporary files are in `folder`, which the child removes too, in case the parent is gone.
    """
    pipe = Connection(handle)
    try:
        work = pipe.recv()()
        pipe.send(("ready", None))
        while True:
            pipe.send(("result", work(pipe.recv(), lambda sign: pipe.send(("sign", sign)))))
    except (EOFError, BrokenPipeError):  # the parent is done with it, or gone
        shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
        with suppress(OSError):
            kind = "starved" if isinstance(error, MemoryError) else "lost"
            pipe.send((kind, f"{type(error).__name__}: {error}"))
