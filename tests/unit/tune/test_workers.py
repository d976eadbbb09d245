"""Workers in real processes: dealt out, watched, killed and replaced."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from aotmm.errors import AotmmError
from aotmm.tune.workers import Done, LeftOut, device_of, measure_all
from tests.unit.tune.fakes import CONFIGS, Fake, case, pool, unable


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where fakes note what they do."""
    return tmp_path / "log"


def _configs(event: Done) -> list[str]:
    return [sample.config_name for sample in event.outcome.samples]


def test_cases_are_dealt_out(log: Path) -> None:
    """Two workers measure every case once between them, both of them some."""
    cases = [case(size) for size in range(1, 13)]
    with pool(*(Fake(log, name, pause_s=0.02) for name in ("gpu0", "gpu1"))) as gpus:
        events = list(measure_all(cases, gpus))
    assert Counter(event.case for event in events if isinstance(event, Done)) == Counter(cases)
    begun = [line for line in log.read_text().splitlines() if "begins" in line]
    assert len(begun) == len(cases)
    assert {line.split()[0] for line in begun} == {"gpu0", "gpu1"}


@pytest.mark.parametrize(("trouble", "why"), [("hang", "no sign of life"), ("exit", "code -11"), ("raise", "launch")])
def test_what_hangs_or_fails_is_left_out(log: Path, trouble: str, why: str) -> None:
    """A config that hangs, kills its process or raises is named and left out; its case is measured without it."""
    cases = [case(1), case(2), case(3)]
    with pool(Fake(log, trouble=(("ws_b", trouble),), after=2)) as gpus:
        events = list(measure_all(cases, gpus))
    assert [type(event) for event in events] == [Done, LeftOut, Done, Done]
    first, left, *rest = events
    assert isinstance(first, Done)
    assert _configs(first) == list(CONFIGS)
    assert isinstance(left, LeftOut)
    assert left.name == "ws_b"
    assert why in left.why
    assert "2x2x2 nn fp16, split 1" in left.why
    for event in rest:
        assert isinstance(event, Done)
        assert _configs(event) == ["ws_a", "ws_c", "tile_a"]


def test_a_family_that_hangs_twice_is_left_out(log: Path) -> None:
    """The second config of a family that hangs takes the family along, so that hanging costs little time."""
    fake = Fake(log, trouble=(("ws_a", "hang"), ("ws_b", "hang"), ("ws_c", "hang")))
    with pool(fake) as gpus:
        events = list(measure_all([case(1)], gpus))
    assert [event.name for event in events if isinstance(event, LeftOut)] == ["ws_a", "ws_b", "ws"]
    done = events[-1]
    assert isinstance(done, Done)
    assert _configs(done) == ["tile_a"]


def test_a_wrong_result_is_left_out(log: Path) -> None:
    """A config with a wrong result has no time there, and is named and run no more."""
    cases = [case(1), case(2)]
    with pool(Fake(log, trouble=(("tile_a", "wrong"),))) as gpus:
        events = list(measure_all(cases, gpus))
    assert [type(event) for event in events] == [Done, LeftOut, Done]
    assert events[1] == LeftOut("tile_a", "its result is wrong on 1x1x1 nn fp16: error 7")
    assert all("tile_a" not in _configs(event) for event in events if isinstance(event, Done))


def test_the_other_worker_goes_on(log: Path) -> None:
    """While one worker hangs, the other measures."""
    cases = [case(size) for size in range(1, 9)]
    with pool(Fake(log, "gpu0", trouble=(("ws_a", "hang"),)), Fake(log, "gpu1", pause_s=0.02)) as gpus:
        events = list(measure_all(cases, gpus))
    assert Counter(event.case for event in events if isinstance(event, Done)) == Counter(cases)
    assert [event.name for event in events if isinstance(event, LeftOut)] == ["ws_a"]


def test_nothing_begins_after_the_deadline(log: Path) -> None:
    """At the deadline what runs is finished, and the rest is left for another time."""
    cases = [case(size) for size in range(1, 1000)]
    with pool(Fake(log, pause_s=0.05)) as gpus:
        found = list(measure_all(cases, gpus, deadline=time.monotonic() + 3))
    assert len(found) < len(cases)
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * len(found)  # what began has ended


def test_nothing_at_all_without_time(log: Path) -> None:
    """A deadline that has passed measures nothing."""
    with pool(Fake(log)) as gpus:
        assert list(measure_all([case(1)], gpus, deadline=time.monotonic() - 1)) == []


def test_a_worker_that_cannot_start_is_an_error() -> None:
    """What goes wrong before any kernel is no kernel's fault."""
    with pool(unable) as gpus:
        with pytest.raises(AotmmError, match="failed before its first case: RuntimeError: no such GPU"):
            device_of(gpus)
        with pytest.raises(
            AotmmError, match="failed before the first kernel of 1x1x1 nn fp16: RuntimeError: no such GPU"
        ):
            list(measure_all([case(1)], gpus))


def test_processes_end_with_their_pool(log: Path) -> None:
    """Who stops listening in the middle leaves no process behind."""
    with pool(Fake(log, pause_s=0.05)) as gpus:
        next(measure_all([case(1), case(2)], gpus))
    length = len(log.read_text())
    time.sleep(0.5)
    assert len(log.read_text()) == length
