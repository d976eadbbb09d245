"""A torch op of a function of a user's own: its schema and its launch; for fake tensors it does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from aotmm.errors import SpecError
from aotmm.problem import AUTOTUNE, CONSTEXPR, DESCRIPTOR, FLOAT_TYPES, NO_POINTER, OPTIONS, POINTER_CODES
from aotmm.runtime.signature import Signature

if TYPE_CHECKING:
    from aotmm.pack.schema import OwnKernel
    from aotmm.runtime.function_call import Calls

_OF_VALUES = {bool: "bool", int: "int", float: "float", str: "str"}


def register(qualified: str, signature: Signature, kernels: Iterable[OwnKernel], function: Calls) -> Any:
    """Register an op and return it.

    Args:
        qualified: its name, "namespace::name".
        signature: the arguments of the function.
        kernels: all kernels of the function, of every pack that may serve it.
        function: what launches it.

    Raises:
        SpecError: the name is no such name, or a constexpr has values of several types.
    """
    namespace, _, name = qualified.partition("::")
    if not namespace.isidentifier() or not name.isidentifier():
        raise SpecError(f'torch_op({qualified!r}): expected a name like "mylib::{signature.name}"')
    members = tuple(kernels)
    places, arguments = _schema(signature, {name for kernel in members for name in kernel.writes})
    grid = "SymInt[]? grid=None" if all(kernel.grid for kernel in members) else "SymInt[] grid"
    schema = f"({', '.join(['*' if row is None else row for row in arguments] + [grid])}) -> ()"

    def run(*given: Any, grid: Any = None, **named: Any) -> None:
        chosen = dict(zip(places, given, strict=False)) | {key: row for key, row in named.items() if row is not None}
        function[None if grid is None else tuple(grid)](**chosen)

    # Strides are arguments of their own, so that operands must be as they were when these were read.
    torch.library.define(qualified, schema, tags=(torch.Tag.needs_exact_strides,))
    torch.library.impl(qualified, "CompositeExplicitAutograd", run)  # on a CPU it says that there is no GPU
    torch.library.register_fake(qualified, _nothing)
    return getattr(getattr(torch.ops, namespace), name)


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """Return nothing: what the op writes is there already."""


def _schema(signature: Signature, writes: set[str]) -> tuple[list[str], list[str | None]]:
    """Return the arguments by place, and all in the schema's language; those behind None are given by name."""
    places, by_place, by_name = [], [], []
    for number, name in enumerate(signature.names):
        types = signature.types[name]
        if CONSTEXPR in types or AUTOTUNE in types:
            if name not in signature.choices:
                continue  # compiled in
            words = _choice(signature, name)
            if AUTOTUNE in types:
                by_name.append(f"{words.removesuffix('?')}? {name}=None")
                continue
        elif (first := next(iter(types))) in POINTER_CODES or first.startswith(DESCRIPTOR):
            words = ("Tensor" + f"(a{number}!)" * (name in writes)) + "?" * (NO_POINTER in types)
        else:
            words = "float" if first in FLOAT_TYPES else "SymInt"
        places.append(sys.intern(name))
        by_place.append(f"{words} {name}")
    by_name += [f"int? {name}=None" for name in OPTIONS if name in signature.choices]
    return places, [*by_place, None, *by_name]


def _choice(signature: Signature, name: str) -> str:
    """Return the type of a constexpr's values. Raises SpecError if they have several."""
    values = [value for value, _ in signature.values_of(name)]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 or not kinds <= _OF_VALUES.keys():
        raise SpecError(f"{signature.name}: {name} has values {values}; an op's argument has one type")
    return _OF_VALUES[kinds.pop()] + "?" * (None in values)
