"""The record of a measurement in progress: JSON lines that survive a crash, so that the next run continues."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from aotmm.errors import ArtifactError
from aotmm.pack.table import Sample
from aotmm.timing.problems import Case, case_of


@dataclass(frozen=True, slots=True)
class Environment:
    """Common facts of the samples of one record: GPU, as in `Table`, versions, and the digest of the measured pack.

    `seed` is that of the drawn cases, None if there are none.
    """

    arch: str
    device: str
    multiprocessors: int
    clock_mhz: int
    memory_gbps: int
    l2_bytes: int
    driver: str
    torch: str
    aotmm: str
    pack: str
    seed: int | None


def recorded_seed(path: Path) -> int | None:
    """Return the seed of the record `path`; None if there is none."""
    try:
        with path.open("rb") as file:
            return int(json.loads(file.readline())["seed"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


class Record:
    """An open record. Every `add` is on disk when it returns.

    Attributes:
        samples: of the measured cases, also by earlier runs.
        left_out: configs and families not to run, and why.
    """

    def __init__(self, path: Path, environment: Environment) -> None:
        """Open the record `path`, or start it.

        Raises:
            ArtifactError: it cannot be opened, is no record, or is of another GPU, pack or version.
        """
        self.samples: dict[Case, tuple[Sample, ...]] = {}
        self.left_out: dict[str, str] = {}
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be written: {error}") from error
        try:
            self._resume(environment)
        except ArtifactError:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, case: Case, samples: tuple[Sample, ...]) -> None:
        """Add all samples of `case`."""
        self.samples[case] = samples
        self._write({"case": asdict(case), "times": samples})

    def leave_out(self, name: str, why: str) -> None:
        """Record that the config or family `name` must not run, and why."""
        self.left_out[name] = why
        self._write({"left_out": name, "why": why})

    def _resume(self, environment: Environment) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # the last run ended while it wrote this line
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if not lines:
            self._write(asdict(environment))
            return
        try:
            first, *rest = [json.loads(line) for line in lines]
            found = Environment(**first)
            for row in rest:
                if "case" in row:
                    self.samples[case_of(row["case"])] = tuple(Sample(*item) for item in row["times"])
                else:
                    self.left_out[row["left_out"]] = row["why"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ArtifactError(f"{self._path} is no record of a measurement: {error}; delete it") from error
        if found != environment:
            other = [
                f"{name} {value!r}, not {getattr(environment, name)!r}"
                for name, value in asdict(found).items()
                if value != getattr(environment, name)
            ]
            raise ArtifactError(
                f"{self._path} was measured with {'; '.join(other)}; delete it or write to another --out"
            )

    def _write(self, row: dict[str, object]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
