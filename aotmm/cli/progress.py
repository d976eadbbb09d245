"""Progress of long work in lines, if there is no terminal to show a bar."""

from __future__ import annotations

import time
from collections.abc import Callable

_TENTHS = 10
_MOST_SECONDS = 90  # longer times are in minutes


class Lines:
    """Progress function that prints when a piece of work begins, then every tenth of it with the time left.

    It is called with the name of a piece, the number of items done and of all items: before anything is done, then with
    the items that need no work, then after each item.
    """

    def __init__(
        self, tell: Callable[[str], None], unit: str, how: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Print by `tell`; items are called `unit`; `how` names the workers in the first line of a piece."""
        self._tell, self._unit, self._how, self._clock = tell, unit, how, clock
        self._tenths: dict[str, int] = {}
        self._started: dict[str, tuple[float, int]] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        """Print a line if the piece `name` begins, or if a further tenth of it is done."""
        if name not in self._tenths:
            self._tenths[name] = 0
            self._tell(f"{name}: {total} {self._unit} {self._how}")
            return
        since, before = self._started.setdefault(name, (self._clock(), done))
        tenth = _TENTHS * done // total if total else _TENTHS
        if tenth > self._tenths[name]:
            self._tenths[name] = tenth
            text = f"{name}: {tenth * 100 // _TENTHS} % ({done} of {total} {self._unit})"
            if before < done < total:
                text += f", about {_duration((total - done) * (self._clock() - since) / (done - before))} left"
            self._tell(text)


def _duration(seconds: float) -> str:
    if seconds <= _MOST_SECONDS:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min"
