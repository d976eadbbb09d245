"""The order of CUDA's calls, with stand-ins for its graphs and events."""

from __future__ import annotations

import gc
from unittest.mock import Mock

import pytest
import torch

from aotmm.timing.graph import idle, recorded


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand-ins that note their calls; every time is 3 ms."""
    found = Mock()
    found.event.elapsed_time.return_value = 3.0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: found.graph)
    monkeypatch.setattr(torch.cuda, "_sleep", found.pause)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: found.event)  # noqa: ARG005
    return found


def _names(cuda: Mock) -> list[str]:
    return [name for name, *_ in cuda.mock_calls]


def test_launches_are_recorded_once_and_replayed_between_events(cuda: Mock) -> None:
    """Every set is launched once, in order, without garbage collection; a replay's time is divided by the launches.

    The GPU pauses before the first event, so that the time of launching the graph does not count.
    """
    launched = []
    replay = recorded(lambda number: launched.append((number, gc.isenabled())), [1, 2, 1])
    assert launched == [(1, False), (2, False), (1, False)]
    assert gc.isenabled()
    assert replay() == 1e6
    recording, timing = ["graph.capture_begin", "graph.capture_end"], ["pause", "event.record", "graph.replay"]
    assert _names(cuda) == [*recording, *timing, "event.record", "event.synchronize", "event.elapsed_time"]


def test_a_launch_that_fails_ends_the_recording(cuda: Mock) -> None:
    """The capture is over and garbage is collected again, and the error is the launch's own."""
    with pytest.raises(ZeroDivisionError):
        recorded(lambda number: 1 / number, [0])
    assert _names(cuda) == ["graph.capture_begin", "graph.capture_end"]
    assert gc.isenabled()


def test_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process sleeps, for nanoseconds."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    idle(2e6)
    assert slept == pytest.approx([0.002])
