"""Providers of products: one interface, and one module per library, imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotmm.timing.operands import Operands
from aotmm.timing.problems import Case

# Writes `out`, or returns another tensor with the product, on torch's current stream, without waiting for it.
Call = Callable[[Operands], object]


class NotRunError(Exception):
    """A provider cannot multiply here; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One column of the results.

    Attributes:
        name: of the column. about: explanation for the reader.
        prepare: returns the call for a case and its operands; compiles and tunes. Raises NotRunError.
        roundings: number of roundings to the output's type: 1, but for separate kernels and sums in that type.
        isolated: whether its single calls are timed too.
        describe: returns the call's launches in words.
    """

    name: str
    about: str
    prepare: Callable[[Case, Sequence[Operands]], Call]
    roundings: int = 1
    isolated: bool = True
    describe: Callable[[Case, Operands], str] = lambda _case, _operands: ""


_MODULES = {
    "aotmm": "own",
    "aotmm_plain": "own",
    "torch": "library",
    "scaled_mm": "library",
    "int_mm": "library",
    "unfused": "library",
    "addmm": "library",
    "tutorial": "tutorial",
    "cutlass": "cutlass",
}
NAMES = tuple(_MODULES)


def provider(name: str) -> Provider:
    """Return the provider called `name`, one of `NAMES`; without its library, one that is not run."""
    try:
        module = importlib.import_module(f"aotmm.bench.providers.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        return _absent(name, f"{error.name} is not installed")
    found: Provider = {row.name: row for row in module.PROVIDERS}[name]
    return found


def _absent(name: str, reason: str) -> Provider:
    def refuse(_case: Case, _sets: Sequence[Operands]) -> Call:
        raise NotRunError(reason)

    return Provider(name, f"not run: {reason}", refuse)
