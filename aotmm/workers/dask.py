"""A Dask cluster as a pool: the same tasks in the same child processes, on the machines of its workers.

Scheduler and workers need aotmm, and the tasks' packages, in the versions of this machine. No common folder is needed:
a task brings its inputs, and its result comes back.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aotmm import __version__
from aotmm.errors import AotmmError
from aotmm.workers.pool import Timeouts, WorkerDiedError, WorkerFactory, WorkerProcesses

Facts = dict[str, str]

_RETRIES = 3
_CONNECT_S = 30.0
_ANSWER_S = 60.0  # may be the first import of torch
_SHUTDOWN_GRACE_S = 10.0


@contextmanager
def cluster(
    scheduler: str,
    factory: WorkerFactory,
    timeouts: Timeouts,
    facts: Callable[[], Facts],
    expected: Facts,
    *,
    gpus: bool = False,
) -> Iterator[Cluster]:
    """Yield a pool of the workers of the Dask cluster at `scheduler`; workers that join later take part too.

    A task whose worker or process is lost is tried three times again, elsewhere if possible. The scheduler notices a
    worker that hangs after its `worker-ttl`.

    Args:
        factory: worker factory for each process; it is pickled.
        facts: returns facts that must be the same on all workers, beside aotmm itself; it is pickled. `expected` has
            required values.
        gpus: one task at a time for each worker that has the resource GPU=1, none for others.

    Raises:
        AotmmError: distributed is not installed, the cluster cannot be reached or has no workers, or one is refused.
    """
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise AotmmError('a cluster needs the cluster extra: pip install "aotmm[cluster]"') from error
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller's own may have a running loop
            thread.submit(asyncio.run, _reach(scheduler)).result()
        client = Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError, ImportError) as error:  # TypeError: TLS without a configuration
        raise AotmmError(f"no Dask scheduler at {scheduler}: {error}; say one like tcp://host:8786") from error
    with client:
        pool = Cluster(client, gpus=gpus)
        pool.start(scheduler, factory, timeouts, facts, expected)
        try:
            yield pool
        finally:
            pool.end()


async def _reach(scheduler: str) -> None:
    """Connect to `scheduler` once, before a Client tries: a failed Client waits a minute when it closes."""
    from distributed import Security
    from distributed.comm import connect

    comm = await connect(scheduler, timeout=_CONNECT_S, **Security().get_connection_args("client"))
    await comm.close()


class Cluster:
    """The pool of `cluster`.

    Attributes:
        facts: those that all workers have in common.
    """

    def __init__(self, client: Any, *, gpus: bool) -> None:
        self.facts: Facts = {}
        self._client = client
        self._gpus = gpus
        self._name = uuid.uuid4().hex
        self._contract: Any = None
        self._sent: dict[Future[Any], tuple[Any, str | None]] = {}  # Dask's future, and the preferred worker

    def submit(self, task: Any) -> Future[Any]:
        """Submit as `WorkerPool.submit`; `task` is pickled. Its result may be an AotmmError: a worker is refused."""
        result: Future[Any] = Future()
        self._send(result, pickle.dumps(task), ())
        return result

    def places(self) -> int:
        """Return the number of tasks at once on the current workers."""
        found = self._workers().values()
        return len(found) if self._gpus else sum(row["nthreads"] for row in found)

    def start(
        self, scheduler: str, factory: WorkerFactory, timeouts: Timeouts, facts: Callable[[], Facts], expected: Facts
    ) -> None:
        """Wait for a worker, compare all present ones, and give them the worker factory."""
        from distributed import TimeoutError as NoneCame

        with suppress(NoneCame):
            self._client.wait_for_workers(1, timeout=_CONNECT_S)
        found = self._ask(partial(_facts, facts), _ANSWER_S)
        if not found:
            what = "worker with a GPU (dask worker --resources GPU=1)" if self._gpus else "worker"
            raise AotmmError(f"the cluster at {scheduler} has no {what}; start some")
        try:
            theirs: object = self._client.run_on_scheduler(_facts, dict)
        except Exception as error:  # noqa: BLE001 (whatever another machine raises)
            theirs = error
        mine = _facts(dict)
        refused = _differences("the scheduler", theirs, mine)
        first = next((row for row in found.values() if isinstance(row, dict)), {})
        self.facts = first | expected | mine
        for address, row in found.items():
            refused += _differences(address, row, self.facts)
        for address, row in self._workers().items():
            if self._gpus and row["resources"]["GPU"] != 1:
                refused.append(
                    f"{address} has GPU={row['resources']['GPU']:g}; start one worker per GPU, with GPU=1 each"
                )
        if refused:
            raise AotmmError("\n".join([f"the cluster at {scheduler} cannot be used:", *refused]))
        contract = _Contract(factory, timeouts, facts, self.facts)
        self._contract = self._client.submit(bytes, pickle.dumps(contract), pure=False)

    def end(self) -> None:
        """Cancel open tasks, and end the processes of this pool on the workers that answer."""
        self._client.cancel([sent for sent, _ in self._sent.values()])
        self._sent.clear()
        self._ask(partial(_end, self._name), _SHUTDOWN_GRACE_S)

    def _workers(self) -> dict[str, Any]:
        found = self._client.scheduler_info(n_workers=-1)["workers"]
        return {address: row for address, row in found.items() if not self._gpus or "GPU" in row["resources"]}

    def _ask(self, question: Callable[[], Any], limit_s: float) -> dict[str, Any]:
        """Return each worker's answer; an exception if it cannot answer, or not in time."""

        async def ask() -> dict[str, Any]:
            async def one(address: str) -> Any:
                answer = self._client.run(question, workers=[address], on_error="return")
                return (await asyncio.wait_for(answer, limit_s))[address]

            return dict(zip(found, await asyncio.gather(*map(one, found), return_exceptions=True), strict=True))

        found = list(self._workers())
        answers: dict[str, Any] = self._client.sync(ask)
        return answers

    def _send(self, result: Future[Any], task: bytes, lost: tuple[str, ...]) -> None:
        """Give `task` to a worker, if possible to none of those where it was `lost`."""
        where = self._where(lost) if self._gpus or lost else None
        sent = self._client.submit(
            _do,
            self._name,
            self._contract,
            task,
            pure=False,
            workers=where,
            allow_other_workers=where is not None,  # if that one is gone
            resources={"GPU": 1} if self._gpus else None,
            priority=len(lost),  # a failure on all workers is reported soon
        )
        self._sent[result] = sent, where
        sent.add_done_callback(partial(self._done, result, task, lost))

    def _where(self, lost: tuple[str, ...]) -> str | None:
        """Return the worker with the fewest tasks that were sent to it by name, if possible none of `lost`.

        Dask itself lets tasks that need a resource wait for one worker while another has it free.
        """
        found = list(self._workers())
        busy = Counter(where for _, where in list(self._sent.values()))
        return min([name for name in found if name not in lost] or found, key=busy.__getitem__, default=None)

    def _done(self, result: Future[Any], task: bytes, lost: tuple[str, ...], sent: Any) -> None:
        """Set the result of `task`, or try it again."""
        if self._sent.pop(result, None) is None:
            return  # the pool has ended
        try:
            done = sent.result()
            if isinstance(done, _Lost) and done.last is None and len(lost) < _RETRIES:
                self._send(result, task, (*lost, done.address))
            elif isinstance(done, _Lost):
                why = f"{done.why}, on {done.address}"
                result.set_exception(WorkerDiedError(why, done.last, starved=done.starved))
            elif isinstance(done, _Refused):
                result.set_exception(AotmmError(f"a worker that joined later cannot be used:\n{done.why}"))
            else:
                result.set_result(done)
        except Exception as error:  # noqa: BLE001 (as Dask has it: workers died again and again, or the scheduler did)
            result.set_exception(WorkerDiedError(f"the cluster gave it up: {type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class _Contract:
    """A pool's data for a worker, beside the tasks."""

    factory: WorkerFactory
    timeouts: Timeouts
    facts: Callable[[], Facts]
    agreed: Facts


@dataclass(frozen=True, slots=True)
class _Lost:
    """A WorkerDiedError with the worker's address, as a result: Dask logs errors."""

    address: str
    why: str
    last: Any
    starved: bool


@dataclass(frozen=True, slots=True)
class _Refused:
    why: str


def _differences(who: str, found: object, agreed: Facts) -> list[str]:
    """Return why worker `who` cannot be used: one line, or none."""
    if isinstance(found, asyncio.TimeoutError):  # before Python 3.11 no TimeoutError
        return [f"{who} gave no answer in {_ANSWER_S:g} s; end it or wait for it"]
    if not isinstance(found, dict):
        return [f"{who} has not what is needed: {found}; install there what is installed here"]
    other = [f"{name} {found.get(name)}, not {value}" for name, value in agreed.items() if found.get(name) != value]
    return [f"{who} has {', '.join(other)}; make them the same"] if other else []


def _facts(further: Callable[[], Facts]) -> Facts:
    """Return the version of aotmm, the digest of its sources, and further facts."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {"aotmm": f"{__version__} (sources {digest.hexdigest()[:12]})"} | further()


# The processes of each pool, in a worker's process; None when it has ended, for a task of it may still come.
_processes: dict[str, WorkerProcesses | None] = {}
_lock = threading.Lock()


def _do(name: str, pickled: bytes, task: bytes) -> Any:
    """Do `task` in a process of the pool `name`; this runs in a thread of a worker."""
    from distributed import get_worker

    worker = get_worker()
    with _lock:
        if name not in _processes:
            contract: _Contract = pickle.loads(pickled)  # noqa: S301 (from this pool's own client)
            try:
                found: object = _facts(contract.facts)
            except Exception as error:  # noqa: BLE001 (whatever is missing here)
                found = error
            refused = _differences(worker.address, found, contract.agreed)
            if refused:
                return _Refused(refused[0])
            _processes[name] = WorkerProcesses([contract.factory] * worker.state.nthreads, contract.timeouts)
        processes = _processes[name]
    if processes is None:
        return _Lost(worker.address, "its pool has ended", None, starved=False)
    try:
        return processes.run(pickle.loads(task))  # noqa: S301 (likewise)
    except WorkerDiedError as error:
        return _Lost(worker.address, error.why, error.last, error.starved)


def _end(name: str) -> None:
    """End the processes of the pool `name` on a worker."""
    with _lock:
        processes = _processes.get(name)
        _processes[name] = None
    if processes is not None:
        processes.end()
