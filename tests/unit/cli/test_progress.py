"""Progress in lines, by a clock that the tests set."""

from __future__ import annotations

from itertools import pairwise

from aotmm.cli.progress import Lines


class Log:
    """Lines about kernels; every one takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.told: list[str] = []
        self.now = 0.0
        self.seconds = seconds
        self.lines = Lines(self.told.append, "kernels", "on 2 processes", lambda: self.now)

    def work(self, name: str, total: int, before: int = 0) -> None:
        """Does one piece, of which some items are done already."""
        self.lines(name, 0, total)
        for done in range(before, total + 1):
            self.lines(name, done, total)
            self.now += self.seconds


def test_a_line_for_each_tenth() -> None:
    """The first line comes at once, then one for each tenth, with the time that the rest takes at the speed so far."""
    log = Log(2.0)
    log.work("sm90", 328)
    assert len(log.told) == 1 + 10
    assert log.told[0] == "sm90: 328 kernels on 2 processes"
    assert log.told[4] == "sm90: 40 % (132 of 328 kernels), about 7 min left"
    assert log.told[9] == "sm90: 90 % (296 of 328 kernels), about 60 s left"
    assert log.told[10] == "sm90: 100 % (328 of 328 kernels)"


def test_what_is_done_before_is_no_sign_of_the_speed() -> None:
    """Kernels that an earlier build compiled are counted as done, not as quick; one after another piece has its own."""
    log = Log(60.0)
    log.work("sm80", 3)
    log.told.clear()
    log.work("sm90", 10, before=6)
    assert log.told == [
        "sm90: 10 kernels on 2 processes",
        "sm90: 60 % (6 of 10 kernels)",
        "sm90: 70 % (7 of 10 kernels), about 3 min left",
        "sm90: 80 % (8 of 10 kernels), about 2 min left",
        "sm90: 90 % (9 of 10 kernels), about 60 s left",
        "sm90: 100 % (10 of 10 kernels)",
    ]


def test_nothing_to_do() -> None:
    """Where all is done there is one line more, and no time left."""
    log = Log(1.0)
    log.work("sm80", 6, before=6)
    assert log.told == ["sm80: 6 kernels on 2 processes", "sm80: 100 % (6 of 6 kernels)"]


def test_few_items() -> None:
    """With fewer than ten items each has a line, and none has two."""
    log = Log(1.0)
    log.work("sm80", 7)
    assert len(log.told) == 1 + 7
    assert all(first != second for first, second in pairwise(log.told))
