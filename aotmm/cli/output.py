"""Output of commands: progress, JSON, and advice if an import fails."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from aotmm.cli.progress import Lines
from aotmm.errors import SpecError, build_extra_missing, torch_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aotmm.build import Progress


def tell(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, err=True)


def print_json(body: object) -> None:
    """Print JSON on stdout."""
    click.echo(json.dumps(body, indent=2))


def processes(count: int) -> str:
    """Return progress's words for `count` compiler processes."""
    return f"on {count} process{'es' * (count > 1)}"


@contextmanager
def kernels_done(how: str) -> Iterator[Progress]:
    """Yield the progress function of a build: it shows a bar per arch on a terminal, else lines on stderr.

    `how` names the compilers.
    """
    if not sys.stderr.isatty():
        yield Lines(tell, "kernels", how)
        return
    with needs_build_extra():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def show(arch: str, done: int, total: int) -> None:
        if arch not in tasks:
            tasks[arch] = bars.add_task(arch, start=False, total=total, completed=done, rate=how)
            return
        task = bars.tasks[tasks[arch]]
        if not task.started:
            bars.reset(task.id, completed=done)  # kernels that need no compiling tell nothing of the speed
            return
        bars.update(task.id, completed=done, rate=how if task.speed is None else f"{task.speed:.1f} kernels/s")

    with bars:
        yield show


@contextmanager
def shapes_done(arch: str, budget: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield the progress function of tuning: it shows a bar on a terminal, else lines, and configs left out."""
    if not sys.stderr.isatty():
        lines = Lines(tell, "shapes", f"within {budget}")

        def show_line(done: int, total: int, text: str) -> None:
            if text.startswith("left out"):
                tell(text)
            lines(arch, done, total)

        yield show_line
        return
    with click.progressbar(length=1, file=sys.stderr, show_pos=True, item_show_func=lambda text: text) as bar:

        def show(done: int, total: int, text: str) -> None:
            if text.startswith("left out"):
                tell(text)
            bar.length = total
            bar.update(done - bar.pos, text)

        yield show


@contextmanager
def needs_build_extra() -> Iterator[None]:
    """Turn a failed import in the block into an error that tells how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise build_extra_missing(str(error.name)) from error


@contextmanager
def needs_torch(command: str) -> Iterator[None]:
    """Turn a failed import of torch or of the tune extra in the block into an error that tells how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "numpy":
            raise SpecError(f'{command} needs {error.name}, of the tune extra: pip install "aotmm[tune]"') from error
        if error.name != "torch":
            raise
        raise torch_missing(command) from error
