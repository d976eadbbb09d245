"""Crews of processes on this machine: results, signs of life, and every way to be lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from aotmm.errors import AotmmError
from aotmm.workers.pool import Heartbeat, Timeouts, Worker, WorkerDiedError, completed, in_child, local

TIMEOUTS = Timeouts(start_s=60, silence_s=1.5, stall_s=60)


def worker() -> Worker:
    """Does what a task says: ("say", x), ("hang",), ("die",), ("raise",), ("breathe", seconds), ("spawn", file)..."""

    def work(task: tuple[Any, ...], tell: Heartbeat) -> Any:
        what, *rest = task
        if what == "hang":
            tell("about to hang")
            time.sleep(3600)
        elif what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "starve":
            raise MemoryError
        elif what == "raise":
            raise RuntimeError("unspecified")
        elif what == "breathe":
            for _ in range(int(rest[0] / 0.2)):
                time.sleep(0.2)
                tell("still there")
        elif what == "folder":
            return [os.getpid(), tempfile.gettempdir()]
        elif what == "spawn":
            (Path(tempfile.mkdtemp()) / "file").write_text("")
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            Path(rest[0]).write_text(f"{child.pid} {tempfile.gettempdir()}")
            time.sleep(3600)
        return [os.getpid(), *rest]

    return work


def apart() -> Worker:
    """Does each task in a child of its process; "count" gives that process and the tasks that the child has seen."""
    seen = []

    def work(task: str, _tell: Heartbeat) -> Any:
        def in_the_child() -> list[int]:
            seen.append(task)
            if task == "raise":
                raise AotmmError("refused")
            if task == "starve":
                raise MemoryError
            if task == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if task == "leave":
                os._exit(3)
            return [os.getppid(), len(seen)]

        return in_child(in_the_child)

    return work


def broken() -> Worker:
    """Nobody."""
    raise OSError("no such thing")


def test_results() -> None:
    """Tasks are done side by side, each process doing one after the other; what they give comes back."""
    with local([worker, worker], TIMEOUTS) as pool:
        assert pool.places() == 2
        futures = [pool.submit(("say", number)) for number in range(20)]
        done = [future.result() for future in completed(futures, pool, 60)]
    assert sorted(number for _, number in done) == list(range(20))
    assert len({process for process, _ in done}) <= 2
    assert os.getpid() not in {process for process, _ in done}


@pytest.mark.parametrize(
    ("task", "why", "last", "starved"),
    [
        (("hang",), "it gave no sign of life for 1.5 s", "about to hang", False),
        (("die",), "its process ended with code -9", None, True),
        (("raise",), "RuntimeError: unspecified", None, False),
        (("starve",), "MemoryError: ", None, True),
    ],
)
def test_ways_to_be_lost(task: tuple[str, ...], why: str, last: str | None, starved: bool) -> None:  # noqa: FBT001
    """Who hangs, dies or raises is told with what it said last, and another process does what is left."""
    with local([worker], TIMEOUTS) as pool:
        bad, good = pool.submit(task), pool.submit(("say", 1))
        with pytest.raises(WorkerDiedError) as caught:
            bad.result()
        assert (caught.value.why, caught.value.last, caught.value.starved) == (why, last, starved)
        assert good.result()[1:] == [1]


def test_a_child_leaves_nothing() -> None:
    """Each child begins as its process is, whatever the children before it did there."""
    with local([apart], TIMEOUTS) as pool:
        (first, one), (second, two) = (pool.submit("count").result() for _ in range(2))
        assert (one, two) == (1, 1)
        assert first == second != os.getpid()


@pytest.mark.parametrize(
    ("task", "why", "starved"),
    [
        ("raise", "AotmmError: refused", False),
        ("starve", "MemoryError: ", True),
        ("die", "its process ended with code -11", False),
        ("leave", "its process ended with code 3", False),
    ],
)
def test_a_lost_child(task: str, why: str, starved: bool) -> None:  # noqa: FBT001
    """What befalls a child befalls its process: that is told, and another process does what is left."""
    with local([apart], TIMEOUTS) as pool:
        with pytest.raises(WorkerDiedError) as caught:
            pool.submit(task).result()
        assert (caught.value.why, caught.value.starved) == (why, starved)
        assert pool.submit("count").result()[1] == 1


def test_signs_of_life() -> None:
    """Who tells something now and then may take longer than a silence."""
    with local([worker], TIMEOUTS) as pool:
        assert pool.submit(("breathe", 2.4)).result()[1:] == [2.4]


def test_what_cannot_start() -> None:
    """Why a process could not be made is told for its task."""
    with local([broken], TIMEOUTS) as pool, pytest.raises(WorkerDiedError, match="OSError: no such thing"):
        pool.submit(("say",)).result()


FEW = """
import resource, sys
from aotmm.workers.pool import WorkerDiedError, Timeouts, local
from aotmm.errors import AotmmError
from tests.unit.workers.test_pool import worker
what, room = sys.argv[1:]
if what == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(room), int(room)))
else:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(room), used + int(room)))
try:
    with local([worker] * 16, Timeouts()) as pool:
        for future in [pool.submit(("say", number)) for number in range(64)]:
            try:
                print("did", future.result()[1])
            except WorkerDiedError as error:
                print(error.why, error.starved)
except AotmmError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "room", "words"),
    [
        ("files", "16", "a process for it cannot be started: [Errno 24] Too many open files True"),
        ("memory", "1000000", "of which one cannot be started: can't start new thread"),
    ],
)
def test_a_machine_that_refuses(tmp_path: Path, what: str, room: str, words: str) -> None:
    """Processes or threads that cannot be started are told for each task; no other error comes, and no file stays."""
    root = str(Path(__file__).parents[3])
    settings = os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FEW, what, room]
    done = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_crew_that_stalls() -> None:
    """No result for too long is an error that says how much is left."""
    with local([worker], Timeouts(silence_s=60)) as pool:
        futures = [pool.submit(("hang",)), pool.submit(("say",))]
        with pytest.raises(AotmmError, match="no result for 1 s while 2 tasks are left; workers now: 1"):
            list(completed(futures, pool, 1.0))


def test_nothing_is_left(tmp_path: Path) -> None:
    """What a killed process started ends with it, and its temporary files go."""
    note = tmp_path / "note"
    with local([worker], TIMEOUTS) as pool, pytest.raises(WorkerDiedError):
        pool.submit(("spawn", str(note))).result()
    number, folder = note.read_text().split()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{number}").exists() and "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path(folder).exists()


def test_a_killed_parent_leaves_nobody() -> None:
    """Processes whose parent is gone end by themselves, and take their temporary files along."""
    program = """
import os
from aotmm.workers.pool import Timeouts, local
from tests.unit.workers.test_pool import worker
with local([worker], Timeouts()) as pool:
    print(*pool.submit(("folder",)).result(), flush=True)
    os.kill(os.getpid(), 9)
"""
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    number, folder = done.stdout.split()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path(folder).exists()
