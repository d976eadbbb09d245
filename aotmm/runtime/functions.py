"""Functions of a user's own, `lib["name"]`: calls like those of Triton's JIT, of torch tensors and numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from aotmm.errors import NoKernelError
from aotmm.problem import (
    AUTOTUNE,
    CONSTEXPR,
    FLOAT_TYPES,
    INTEGER_TYPES,
    NO_POINTER,
    POINTER_CODES,
    POINTER_TYPES,
)
from aotmm.runtime.own import AXES, TRAILING, OwnLauncher, Values

if TYPE_CHECKING:
    from aotmm.pack.schema import OwnKernel
    from aotmm.runtime.pack import Pack

Grid = int | Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]] | None
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
_MASK = 2**64 - 1


class Function:
    """A function of a user's own: `lib["name"]`. Call it like a kernel of Triton's JIT.

    `function[grid](*arguments)` launches it in a grid: a tuple of up to three numbers, or a function of the arguments
    and constexprs by name that returns one. `function(*arguments)` launches it in the grid that its pack says.
    Arguments are those of the kernel, by place or name: tensors (of torch, or anything with DLPack), numbers, None
    where the pack was built for it. Of the constexprs those are named that have several values.

    It runs on the tensors' GPU, on torch's current stream there, and does not wait for it. The first variant that was
    built for such arguments is launched, in the order of the function's TOML.
    """

    def __init__(self, name: str, packs: tuple[Pack, ...], packs_for: Callable[[int], Sequence[Pack]]) -> None:
        """Take the packs that have the function, and what returns those that serve a GPU, the best first."""
        self.name = name
        self._packs = packs
        self._packs_for = packs_for
        self._launchers: dict[int, tuple[OwnLauncher, int]] = {}

    def __repr__(self) -> str:
        archs = ", ".join(pack.arch for pack in self._packs)
        return f"<{self.name}({', '.join(row.name for row in self.kernels[0].arguments)}) of {archs}>"

    @cached_property
    def kernels(self) -> tuple[OwnKernel, ...]:
        """Return its kernels in the first pack that has it, in the order in which they are tried."""
        return tuple(kernel for kernel in self._packs[0].manifest.own if kernel.function == self.name)

    @cached_property
    def _signature(self) -> _Signature:
        return _Signature(self.name, self.kernels)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """Return what launches the function in `grid`."""
        return lambda *arguments, **named: self._launch(grid, arguments, named)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Launch it in the grid that its pack says.

        Raises:
            TypeError: an argument is missing, unknown, or of a type that the function does not take.
            ValueError: a constexpr has no such value, or the grid is missing or not possible.
            NoKernelError: no variant serves these arguments, or no pack this GPU. DriverError.
        """
        self._launch(None, arguments, named)

    def explain(self, *arguments: Any, **named: Any) -> str:
        """Return the variant that serves these arguments, on any device, and why the others do not."""
        values, _, _ = self._signature.bound(arguments, named)
        launcher, number = self._launcher_in(self._packs[0])
        reasons = launcher.reasons(self.name, values)
        try:
            chosen = launcher.choose(number, values).name
        except NoKernelError:
            chosen = f"no kernel of {self.name} serves this call"
        return "\n  ".join([chosen, *reasons])

    def _launch(self, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        import torch

        values, device, meta = self._signature.bound(arguments, named)
        if device is None or device.type != "cuda":
            where = "there is no tensor among them" if device is None else f"they are on {device}"
            raise TypeError(f"{self.name}: the arguments say no GPU: {where}")
        ordinal = device.index
        found = self._launchers.get(ordinal)
        if found is None:
            found = self._launchers[ordinal] = self._launcher_in(self._packs_for(ordinal)[0])
        launcher, number = found
        if callable(grid):
            chosen = launcher.choose(number, values)
            grid = grid(meta | {row.name: json.loads(row.value) for row in chosen.arguments if row.value})
        stream = torch.cuda.current_stream(device).cuda_stream
        launcher.launch(number, values, _blocks(self.name, grid), ordinal, stream)

    def _launcher_in(self, pack: Pack) -> tuple[OwnLauncher, int]:
        return pack.own_launcher, pack.head.functions.index(self.name)


def _blocks(name: str, grid: Any) -> tuple[int, int, int] | None:
    """Return the blocks along x, y and z; None for the pack's own grid. Raises TypeError."""
    if grid is None:
        return None
    row = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(row) <= AXES or not all(isinstance(each, int) for each in row):
        raise TypeError(f"{name}: grid {grid!r}: expected one to three integers, the blocks along x, y and z")
    x, y, z = (*row, 1, 1)[:AXES]
    return x, y, z


class _Signature:
    """The arguments of a function: how those of a call become the values of its quantities."""

    def __init__(self, name: str, kernels: Sequence[OwnKernel]) -> None:
        self.name = name
        self.names = [row.name for row in kernels[0].arguments]
        self.quantities = kernels[0].quantities[:-TRAILING]
        self.types: dict[str, dict[str, None]] = {each: {} for each in self.names}
        self.choices: dict[str, dict[str, int]] = {}  # by quantity that is chosen by: the number of each value's text
        self.only: dict[str, str] = {}  # the text of constexprs and options with one value
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

    def bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Values, Any, dict[str, Any]]:
        """Return the values of a call, the device of its tensors or None, and its arguments by name.

        Raises:
            TypeError, ValueError: as `Function.__call__`.
        """
        given = self._by_name(arguments, named)
        found: dict[str, int] = {}
        device: Any = None
        for key in self.names:
            types = self.types[key]
            if CONSTEXPR in types or AUTOTUNE in types:
                self._choose(key, given, found)
            elif key not in given:
                raise TypeError(f"{self.name}: argument {key} is missing; it takes {', '.join(types)}")
            elif next(iter(types)) in POINTER_CODES:
                found[key], found[f"{key}.type"], where = self._pointer(key, given[key])
                if where is not None and device is not None and where != device:
                    raise ValueError(f"{self.name}: {key} is on {where}, arguments before it on {device}")
                device = device if where is None else where
            else:
                found[key] = self._number(key, given[key])
        for key in _OPTIONS:
            self._choose(key, given, found)
        open_ = sum(1 << number for number, key in enumerate(self.quantities) if key not in found)
        return Values([found.get(key, 0) for key in self.quantities], open_), device, given

    def _by_name(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name. Raises TypeError for too many, unknown ones, or one given twice."""
        if len(arguments) > len(self.names):
            has = ", ".join(self.names)
            raise TypeError(f"{self.name} takes {len(self.names)} arguments ({has}), not {len(arguments)}")
        given = dict(zip(self.names, arguments, strict=False))
        for key in named:
            if key in given:
                raise TypeError(f"{self.name}: argument {key} is given twice")
            if key not in self.types and key not in _OPTIONS:
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
            has = f"was built for {', '.join(known)}" if known else "was built without it"
            raise ValueError(f"{self.name}: {key}={text}: it {has}; build it for {text} by its TOML: {key} = [{text}]")
        if choices is not None:
            found[key] = choices[text]

    def _pointer(self, key: str, value: Any) -> tuple[int, int, Any]:
        """Return address, number of type, and device of an argument that is a pointer."""
        types = self.types[key]
        if value is None:
            type_, address, device = NO_POINTER, 0, None
        else:
            import torch

            if not isinstance(value, torch.Tensor):
                if not hasattr(value, "__dlpack__"):
                    raise TypeError(
                        f"{self.name}: {key} takes a tensor ({', '.join(types)}), found {type(value).__name__}"
                    )
                value = torch.utils.dlpack.from_dlpack(value)
            type_, address, device = _types().get(value.dtype, str(value.dtype)), value.data_ptr(), value.device
        if type_ not in types:
            raise TypeError(f"{self.name}: {key} is {type_}, it takes {', '.join(types)}")
        return address, POINTER_CODES.index(type_), device

    def _number(self, key: str, value: Any) -> int:
        (type_,) = self.types[key]
        if type_ in INTEGER_TYPES and hasattr(value, "__index__"):
            return _signed(value.__index__())
        if type_ in FLOAT_TYPES and isinstance(value, int | float):
            letter = FLOAT_TYPES[type_]
            return int.from_bytes(struct.pack(f"<{letter}", value), "little", signed=letter == "d")
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
