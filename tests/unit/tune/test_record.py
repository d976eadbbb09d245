"""The record: what was measured survives every kind of end, and nothing is measured twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from aotmm.errors import ArtifactError
from aotmm.pack.table import Sample
from aotmm.tune.record import Environment, Record, recorded_seed
from tests.unit.tune.fakes import case

ENVIRONMENT = Environment("sm90", "NVIDIA H200", 132, 1980, 4916, 60 << 20, "580.1", "2.11.0", "0.1.0", "ab" * 32, 7)
SAMPLES = (
    Sample("ws_a", 1, pdl=True, copies=0, ns=1000),
    Sample("ws_b_split", 4, pdl=False, copies=3, ns=900),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record that does not exist yet, in a folder that does not either."""
    return tmp_path / "new" / "sm90.json.partial"


def test_what_was_added_is_there_again(path: Path) -> None:
    """Samples and what was left out come back in the next run."""
    with closing(Record(path, ENVIRONMENT)) as record:
        record.add(case(64), SAMPLES)
        record.leave_out("ws", "it hangs")
        record.add(case(128), ())
    with closing(Record(path, ENVIRONMENT)) as record:
        assert record.samples == {case(64): SAMPLES, case(128): ()}
        assert record.left_out == {"ws": "it hangs"}
        assert all(isinstance(sample, Sample) for sample in record.samples[case(64)])


def test_a_record_knows_its_seed(path: Path) -> None:
    """So that the next run draws the same; there is none before, without random problems, and in other files."""
    assert recorded_seed(path) is None
    with closing(Record(path, ENVIRONMENT)) as record:
        record.add(case(64), SAMPLES)
    assert recorded_seed(path) == 7
    path.unlink()
    with closing(Record(path, replace(ENVIRONMENT, seed=None))):
        assert recorded_seed(path) is None
    for text in ("", "[]\n", '{"arch": "sm', "[" * 100_000):
        path.write_text(text)
        assert recorded_seed(path) is None


@pytest.mark.parametrize("lost", [1, 5, 60])
def test_a_torn_line_is_dropped(path: Path, lost: int) -> None:
    """A run that ended while it wrote loses that line and no other, and the next line is whole."""
    with closing(Record(path, ENVIRONMENT)) as record:
        record.add(case(64), SAMPLES)
        record.add(case(65), SAMPLES)
    os.truncate(path, path.stat().st_size - lost)
    with closing(Record(path, ENVIRONMENT)) as record:
        assert list(record.samples) == [case(64)]
        record.add(case(66), SAMPLES)
    with closing(Record(path, ENVIRONMENT)) as record:
        assert list(record.samples) == [case(64), case(66)]


def test_a_torn_head_starts_anew(path: Path) -> None:
    """A record whose first line is not whole is empty."""
    path.parent.mkdir()
    path.write_bytes(b'{"arch": "sm')
    with closing(Record(path, ENVIRONMENT)) as record:
        assert record.samples == {}
    assert json.loads(path.read_text())["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(ENVIRONMENT, device="NVIDIA A100"), "device 'NVIDIA A100', not 'NVIDIA H200'"),
        (replace(ENVIRONMENT, memory_gbps=3352), "memory_gbps 3352, not 4916"),
        (replace(ENVIRONMENT, pack="cd" * 32), "pack 'cdcd"),
        (replace(ENVIRONMENT, seed=8, driver="1"), "driver '1', not '580.1'; seed 8, not 7"),
    ],
)
def test_another_gpu_or_pack_is_refused(path: Path, other: Environment, message: str) -> None:
    """Samples of one thing are not mixed with those of another; the message says which differ."""
    with closing(Record(path, other)):
        pass
    with pytest.raises(ArtifactError, match=message):
        Record(path, ENVIRONMENT)


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"case": {}}', b"x"])
def test_another_file_is_refused(path: Path, line: bytes) -> None:
    """What is no record is not overwritten."""
    path.parent.mkdir()
    path.write_bytes(line + b"\n")
    with pytest.raises(ArtifactError, match="is no record"):
        Record(path, ENVIRONMENT)
    assert path.read_bytes() == line + b"\n"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """The system's reason is in the error."""
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="cannot be written"):
        Record(tmp_path / "file" / "sm90.json.partial", ENVIRONMENT)


MEASURES = """
import sys
from pathlib import Path
from aotmm.tune.session import measure
from tests.unit.tune.fakes import Fake, case, pool
from tests.unit.tune.test_record import ENVIRONMENT
log, out, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
with pool(*(Fake(log, name, pause_s=pause) for name in ("gpu0", "gpu1"))) as gpus:
    measure([case(size) for size in range(1, 31)], gpus, ENVIRONMENT, out, budget_s=100, progress=lambda *_: None)
"""


def test_a_killed_measurement_goes_on(tmp_path: Path, path: Path) -> None:
    """Killed in the middle and run again: every case is in the record, and none that was is measured again."""
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(MEASURES)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(program), str(log), str(path)]
    first = subprocess.Popen([*command, "0.03"], env=environment)
    while not (path.exists() and path.read_bytes().count(b"\n") > 5):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(1)  # its workers notice that nobody listens
    with closing(Record(path, ENVIRONMENT)) as record:
        done = set(record.samples)
    assert 5 <= len(done) < 30
    log.unlink()
    subprocess.run([*command, "0"], env=environment, check=True)
    with closing(Record(path, ENVIRONMENT)) as record:
        assert set(record.samples) == {case(size) for size in range(1, 31)}
    begun = [int(line.split()[-1]) for line in log.read_text().splitlines() if "begins" in line]
    assert sorted(begun) == sorted({item.shape.M for item in record.samples} - {item.shape.M for item in done})
