"""Measurers without a GPU, which real worker processes run: they note what they do, and hang or fail where asked to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aotmm.pack.table import Sample
from aotmm.runtime.tuning import CDevice, nominal_device
from aotmm.target import target
from aotmm.timing.problems import Case, Shape
from aotmm.tune.workers import Outcome, Running, measuring
from aotmm.workers.pool import Timeouts, WorkerPool, local

CONFIGS = {"ws_a": "ws", "ws_b": "ws", "ws_c": "ws", "tile_a": "tile"}  # and their families


def case(size: int) -> Case:
    """A square product."""
    return Case(Shape(size, size, size, "nn"), "fp16")


@dataclass(frozen=True)
class Fake:
    """Makes itself: a measurer that "times" every config in no time.

    Attributes:
        log: file that gets a line for each case that was begun and for each that was finished, with `name`.
        trouble: what happens to a config: "hang", "exit" (its process dies), "raise" or "wrong".
        after: trouble begins with cases of this size.
        configs: and their families.
    """

    log: Path
    name: str = "gpu0"
    trouble: tuple[tuple[str, str], ...] = ()
    after: int = 0
    pause_s: float = 0.0
    configs: tuple[tuple[str, str], ...] = tuple(CONFIGS.items())

    @property
    def device(self) -> CDevice:
        """An H200's facts."""
        return nominal_device(target("sm90"))

    def __call__(self) -> Fake:
        """Itself: it is what makes a measurer, and the measurer."""
        return self

    def measure(self, case: Case, left_out: frozenset[str], heartbeat: Callable[[Running], None]) -> Outcome:
        """One sample per config: 1000 ns."""
        self._note(f"{self.name} begins {case.shape.M}")
        samples, wrong = [], {}
        for config_name, family in self.configs:
            if {config_name, family} & left_out:
                continue
            heartbeat(Running(family, config_name, "split 1"))
            time.sleep(self.pause_s)
            what = dict(self.trouble).get(config_name) if self.after <= case.shape.M else None
            if what == "hang":
                time.sleep(3600)
            elif what == "exit":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif what == "raise":
                raise RuntimeError("unspecified launch failure")
            elif what == "wrong":
                wrong[config_name] = "error 7"
                continue
            samples.append(Sample(config_name, 1, pdl=False, copies=0, ns=1000))
        self._note(f"{self.name} ends {case.shape.M}")
        return Outcome(tuple(samples), wrong)

    def _note(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{line}\n")


def unable() -> Fake:
    """A measurer that cannot be made."""
    raise RuntimeError("no such GPU")


def pool(*factories: Callable[[], Fake], silence_s: float = 1.5) -> AbstractContextManager[WorkerPool]:
    """A pool of one process per maker, on this machine."""
    return local([partial(measuring, make) for make in factories], Timeouts(start_s=60, silence_s=silence_s))


def worker_facts() -> dict[str, str]:
    """What a worker with a fake GPU says of it."""
    name = Path.cwd().name
    return {"GPU": "NVIDIA H100" if name == "other" else "NVIDIA H200", "arch": "sm90", "driver": "580", "torch": "2"}


def on_worker(log: Path, trouble: tuple[tuple[str, str], ...] = ()) -> Fake:
    """A measurer that notes the name of its worker; one at a time may run there."""
    return Fake(log, Path.cwd().name, trouble=trouble, pause_s=0.05)
