"""The arguments of a function of a user's own: how those of a call become the values of its quantities."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from aotmm.problem import (
    AUTOTUNE,
    CONSTEXPR,
    DESCRIPTOR,
    FLOAT_TYPES,
    INTEGER_TYPES,
    NO_POINTER,
    OPTIONS,
    POINTER_CODES,
    POINTER_TYPES,
    in_toml,
)
from aotmm.runtime.own import TRAILING, Values

if TYPE_CHECKING:
    from aotmm.pack.schema import OwnKernel

MATRIX = 2  # dimensions
_MASK = 2**64 - 1


class Pointer(NamedTuple):
    """A tensor that is not there, for explaining: Triton's type ("*fp16") and the address."""

    type: str
    address: int


class Signature:
    """The arguments of a function in one pack.

    Attributes:
        names: of the arguments, in order.
        quantities: those whose values a call gives.
        types: by argument, what it may be.
        choices: by quantity that variants are chosen by, the number of each value, which is its JSON text.
        only: by constexpr or option that has one value, its text.
        constants: of each kernel, the values of its constexprs by name.
    """

    def __init__(self, name: str, kernels: Sequence[OwnKernel]) -> None:
        """Take the function's name and its kernels in a pack."""
        self.name = name
        self.names = [row.name for row in kernels[0].arguments]
        self.quantities = kernels[0].quantities[:-TRAILING]
        self.types: dict[str, dict[str, None]] = {each: {} for each in self.names}
        self.choices: dict[str, dict[str, int]] = {}
        self.only: dict[str, str] = {}
        self.constants = tuple(
            {row.name: json.loads(row.value) for row in kernel.arguments if row.value} for kernel in kernels
        )
        for kernel in kernels:
            numbers = {guard.value: guard.operand for guard in kernel.guards if guard.relation == "equals"}
            values = {row.name: row.value for row in kernel.arguments if row.value}
            values |= {option.name: str(option.value) for option in kernel.options}
            for row in kernel.arguments:
                self.types[row.name][row.type] = None
            for key, text in values.items():
                if key in self.quantities:
                    self.choices.setdefault(key, {})[text] = numbers[key]
                else:
                    self.only[key] = text

    def like(self, other: Signature) -> bool:
        """Return whether a call has the same values by the signature of another pack."""
        return vars(self) == vars(other)

    def values_of(self, key: str) -> tuple[tuple[Any, int], ...]:
        """Return the values that a call may name for a constexpr or an option, with their numbers; 0 for one alone."""
        if key in self.choices:
            return tuple((json.loads(text), number) for text, number in self.choices[key].items())
        return ((json.loads(self.only[key]), 0),) if key in self.only else ()

    def bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Values, dict[str, Any]]:
        """Return the values of a call, and its arguments by name.

        Raises:
            TypeError, ValueError: as `Function.__call__`.
        """
        given = self._by_name(arguments, named)
        found: dict[str, int] = {}
        for key in self.names:
            types = self.types[key]
            if CONSTEXPR in types or AUTOTUNE in types:
                self._choose(key, given, found)
            elif key not in given:
                raise TypeError(f"{self.name}: argument {key} is missing; it takes {', '.join(types)}")
            elif next(iter(types)) in POINTER_CODES:
                found[key], found[f"{key}.type"] = self._pointer(key, given[key])
            elif next(iter(types)).startswith(DESCRIPTOR):
                found |= self._descriptor(key, given[key])
            else:
                found[key] = self._number(key, given[key])
        for key in OPTIONS:
            self._choose(key, given, found)
        open_ = sum(1 << number for number, key in enumerate(self.quantities) if key not in found)
        return Values([found.get(key, 0) for key in self.quantities], open_), given

    def _by_name(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name. Raises TypeError for too many, unknown ones, or one given twice."""
        if len(arguments) > len(self.names):
            has = ", ".join(self.names)
            raise TypeError(f"{self.name} takes {len(self.names)} arguments ({has}), not {len(arguments)}")
        given = dict(zip(self.names, arguments, strict=False))
        for key in named:
            if key in given:
                raise TypeError(f"{self.name}: argument {key} is given twice")
            if key not in self.types and key not in OPTIONS:
                raise TypeError(f"{self.name} has no argument {key}; it has: {', '.join(self.names)}")
        return given | named

    def _choose(self, key: str, given: dict[str, Any], found: dict[str, int]) -> None:
        """Add to `found` the number of a constexpr's or option's value, unless that is left open."""
        choices = self.choices.get(key)
        if key not in given:
            if choices is not None and CONSTEXPR in self.types.get(key, {}):
                raise TypeError(f"{self.name}: constexpr {key} is missing; it was built for {', '.join(choices)}")
            return
        text = json.dumps(getattr(given[key], "value", given[key]))
        known = [self.only[key]] if choices is None and key in self.only else list(choices or ())
        if text not in known:
            has = f"was built for {', '.join(map(in_toml, known))}" if known else "was built without it"
            said = in_toml(text)
            raise ValueError(f"{self.name}: {key}={said}: it {has}; build it for {said} by its TOML: {key} = [{said}]")
        if choices is not None:
            found[key] = choices[text]

    def _pointer(self, key: str, value: Any) -> tuple[int, int]:
        """Return address and number of type of an argument that is a pointer."""
        types = self.types[key]
        if value is None:
            type_, address = NO_POINTER, 0
        elif isinstance(value, Pointer):
            type_, address = value
        else:
            import torch

            if not isinstance(value, torch.Tensor):
                if not hasattr(value, "__dlpack__"):
                    raise TypeError(
                        f"{self.name}: {key} takes a tensor ({', '.join(types)}), found {type(value).__name__}"
                    )
                value = torch.utils.dlpack.from_dlpack(value)
            type_, address = _types().get(value.dtype, str(value.dtype)), value.data_ptr()
        if type_ not in types:
            raise TypeError(f"{self.name}: {key} is {type_}, it takes {', '.join(types)}")
        return address, POINTER_CODES.index(type_)

    def _descriptor(self, key: str, value: Any) -> dict[str, int]:
        """Return the values of an argument that is a matrix: a tensor, or Triton's TensorDescriptor of one."""
        base = getattr(value, "base", value) if hasattr(value, "block_shape") else value
        (element,) = {type_.removeprefix(DESCRIPTOR).partition("[")[0] for type_ in self.types[key]}
        type_ = _types().get(getattr(base, "dtype", None), "")
        sizes = [int(size) for size in getattr(value, "shape", ())]
        if type_ != f"*{element}" or len(sizes) != MATRIX:
            raise TypeError(
                f"{self.name}: {key} takes a matrix of {element}, or a descriptor of one; found {type(value).__name__} "
                f"of {type_.lstrip('*') or 'no such type'}, sizes {sizes}"
            )
        if getattr(value, "padding", "zero") != "zero" or getattr(value, "round_f32_to_tf32", False):
            raise ValueError(f"{self.name}: {key} pads with NaN or rounds to tf32, for which no variant is built")
        strides = value.strides if base is not value else base.stride()
        parts = {f"size{n}": size for n, size in enumerate(sizes)}
        parts |= {f"stride{n}": int(stride) for n, stride in enumerate(strides)}
        return {key: base.data_ptr(), **{f"{key}.{part}": number for part, number in parts.items()}}

    def _number(self, key: str, value: Any) -> int:
        (type_,) = self.types[key]
        if type_ in INTEGER_TYPES and hasattr(value, "__index__"):
            return _signed(value.__index__())
        if type_ in FLOAT_TYPES and isinstance(value, int | float):
            letter = FLOAT_TYPES[type_]
            try:
                packed = struct.pack(f"<{letter}", float(value))
            except OverflowError as error:
                raise ValueError(f"{self.name}: {key}={value!r} is too large for {type_}") from error
            return int.from_bytes(packed, "little", signed=letter == "d")
        raise TypeError(f"{self.name}: {key} is a number ({type_}), found {type(value).__name__} {value!r}")


def _signed(value: int) -> int:
    """Return a 64-bit integer with the same bits; one that has more is as far from every guard's range."""
    if not -(2**63) <= value <= _MASK:
        return 2**63 - 1 if value > 0 else -(2**63)
    return value - 2**64 if value >= 2**63 else value


@cache
def _types() -> dict[Any, str]:
    """Return Triton's pointer type of each of torch's types."""
    import torch

    return {getattr(torch, row): f"*{name}" for name, row in POINTER_TYPES.items()}
