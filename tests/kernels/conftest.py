"""Packs whose images can be executed here, and the figures of what was executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from aotmm.runtime.pack import open_pack
from tests.build.packs import default_pack
from tests.native.emulation import Outcome, missing

_FIGURES: dict[str, list[Outcome]] = {}
_EXECUTED: dict[str, set[str]] = {}


@pytest.fixture
def interpreted_pack() -> Callable[[str], Path]:
    """The default pack of an arch, where its images can be executed."""

    def pack(arch: str) -> Path:
        if reason := missing(arch):
            pytest.skip(reason)
        return default_pack(arch)

    return pack


@pytest.fixture
def figures() -> Callable[[str, list[Outcome]], None]:
    """Remembers outcomes for the summary at the end of the session."""

    def remember(title: str, outcomes: list[Outcome]) -> None:
        _FIGURES.setdefault(title, []).extend(outcomes)

    return remember


@pytest.fixture
def counted() -> Callable[[str, Iterable[str]], None]:
    """Remembers which images of an arch's default pack were executed and right, for the summary."""

    def remember(arch: str, kernels: Iterable[str]) -> None:
        _EXECUTED.setdefault(arch, set()).update(kernels)

    return remember


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many images were executed, and the largest errors that were seen."""
    for arch, names in sorted(_EXECUTED.items()):
        kernels = open_pack(default_pack(arch)).manifest.kernels
        missing_roles = Counter(kernel.role for kernel in kernels if kernel.name not in names)
        lacking = ", ".join(f"{count} {role}" for role, count in missing_roles.items())
        terminalreporter.write_line(
            f"executed {len(names)} of the {len(kernels)} images for {arch}{f'; not: {lacking}' if lacking else ''}"
        )
    for title, outcomes in sorted(_FIGURES.items()):
        terminalreporter.write_line(
            f"executed {title}: {len(outcomes)} products of {len({o.kernel for o in outcomes})} images, "
            f"{sum(o.mismatches for o in outcomes if o.product.exact)} mismatches, "
            f"largest error/bound {max(o.det for o in outcomes):.3f}, "
            f"probabilistic {max(o.prob for o in outcomes):.3f}, {sum(o.seconds for o in outcomes):.0f} s"
        )
