"""Threads, forks and other processes: each test is a process of its own, whose first product is what is looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START = """
import os, threading
import torch
import aotmm
lib = aotmm.load()
a = torch.ones(64, 64, device="cuda", dtype=torch.float16)
"""
RACE = """
barrier, found = threading.Barrier(32), []
def work():
    barrier.wait()
    found.append(bool((lib.matmul(a, a) == 64).all()))
threads = [threading.Thread(target=work) for _ in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found.count(True))
"""
FORK = """
c = lib.matmul(a, a)
child = os.fork()
if child == 0:
    try:
        lib.matmul(a, a, out=c)
    except aotmm.DriverError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(bool((lib.matmul(a, a) == 64).all()))
"""


def printed(program: str) -> list[str]:
    """The lines that a process prints which runs `program`."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", START + program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_threads_race_the_first_product() -> None:
    """32 threads that make the first product of a process at once all get it right."""
    assert printed(RACE) == ["32"]


def test_child_of_fork() -> None:
    """A child that was forked after a product is told so and what to do; the parent goes on."""
    told, goes_on = printed(FORK)
    assert "GPU contexts do not survive fork" in told
    assert 'multiprocessing.get_context("spawn")' in told
    assert goes_on == "True"
