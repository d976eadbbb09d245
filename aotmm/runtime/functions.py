"""Functions of a user's own, `lib["name"]`: calls like those of Triton's JIT, of torch tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aotmm.errors import NoKernelError
from aotmm.runtime import function_call, scratch
from aotmm.runtime.own import AXES, Choice, OwnLauncher
from aotmm.runtime.signature import Signature

if TYPE_CHECKING:
    from aotmm.pack.schema import OwnKernel
    from aotmm.runtime.pack import Pack

Grid = int | Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]] | None
_GPU = "cuda"  # torch's name of the type of device, for AMD GPUs too


class _Served(NamedTuple):
    """What serves a GPU: a pack's launcher, the number of the function and of its first kernel there, its signature."""

    launcher: OwnLauncher
    number: int
    first: int
    signature: Signature


class Function(function_call.Calls):
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
        self._served: dict[int, _Served] = {}  # by GPU
        self._signature = Signature(name, self.kernels)
        self._prepare(*function_call.arguments_of(self._signature), Function._launch, partial(_fail, self._served))

    def __repr__(self) -> str:
        archs = ", ".join(pack.arch for pack in self._packs)
        return f"<{self.name}({', '.join(row.name for row in self.kernels[0].arguments)}) of {archs}>"

    @cached_property
    def kernels(self) -> tuple[OwnKernel, ...]:
        """Return its kernels in the first pack that has it, in the order in which they are tried."""
        return self._kernels_in(self._packs[0])

    def pack_for(self, ordinal: int) -> Pack:
        """Return the pack that serves GPU number `ordinal`. Raises NoKernelError."""
        return self._packs_for(ordinal)[0]

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Launch it in the grid that its pack says.

        Raises:
            TypeError: an argument is missing, unknown, or of a type that the function does not take.
            ValueError: a constexpr has no such value, a number is too large for its type, or the grid is missing or not
                possible.
            NoKernelError: no variant serves these arguments, or no pack this GPU. DriverError.
        """
        self[None](*arguments, **named)

    def explain(self, *arguments: Any, **named: Any) -> Choice:
        """Return the variant that serves these arguments on any device, and why the others do not; print it.

        It is that of the pack for the tensors' GPU, of the first pack if they are on none that a pack is for.

        Raises:
            TypeError, ValueError: as a call. No GPU is needed, and tensors may be anywhere.
        """
        try:
            pack = self.pack_for(self.device_of((*arguments, *named.values())).index or 0)
        except (TypeError, NoKernelError):
            pack = self._packs[0]
        served = self._served_by(pack)
        values, _ = served.signature.bound(arguments, named)
        return served.launcher.explain(served.number, values)

    def torch_op(self, name: str) -> Any:
        """Return a torch op of this function, registered once by a name such as "mylib::softmax".

        torch.compile traces it. Its arguments are the function's, `grid` among them by name, and constexprs and options
        that have several values. The schema says which tensors it may write. It returns nothing and has no gradient.

        Raises:
            SpecError: the name is not of that form, or a constexpr has values of several types. RuntimeError: there is
            an op of that name.
        """
        from aotmm.runtime import function_op  # only here: most programs need none

        kernels = [kernel for pack in self._packs for kernel in self._kernels_in(pack)]
        return function_op.register(name, self._signature, kernels, self)

    def _launch(self, grid: Grid, *arguments: Any, **named: Any) -> None:
        """Launch step by step: any call, with words for what is wrong with it."""
        device = self.device_of((*arguments, *named.values()))
        ordinal = device.index or 0
        served = self._served.get(ordinal)
        if served is None:
            served = self._serve(ordinal)
        values, given = served.signature.bound(arguments, named)
        stream = function_call.current_stream(ordinal)
        if callable(grid):
            kernel = served.launcher.choose(served.number, values, ordinal)
            blocks = blocks_of(self.name, grid(given | served.signature.constants[kernel - served.first]))
            served.launcher.run(kernel, values, blocks, ordinal, stream)
        else:
            served.launcher.launch(served.number, values, blocks_of(self.name, grid), ordinal, stream)

    def _serve(self, ordinal: int) -> _Served:
        """Return what serves a GPU, from now on without a step of Python if the pack is like the first one."""
        served = self._served[ordinal] = self._served_by(self.pack_for(ordinal))
        if served.signature.like(self._signature) and function_call.connected():
            self._bind(ordinal, served.launcher.address, served.number)
        return served

    def device_of(self, arguments: Sequence[Any]) -> Any:
        """Return the tensors' GPU. Raises TypeError if there is none, ValueError if there are several."""
        found: Any = None
        for value in arguments:
            where = _where(value)
            if where is not None and found is not None and where != found:
                raise ValueError(f"{self.name}: an argument is on {where}, arguments before it on {found}")
            found = found if where is None else where
        if found is None or found.type != _GPU:
            where = "there is no tensor among them" if found is None else f"they are on {found}"
            raise TypeError(f"{self.name}: the arguments say no GPU: {where}")
        return found

    def _served_by(self, pack: Pack) -> _Served:
        kernels = self._kernels_in(pack)
        if any(kernel.global_scratch_bytes for kernel in kernels):
            pack.own_launcher.allocate_by(*scratch.callbacks())
        first = pack.manifest.own.index(kernels[0])
        number = pack.head.functions.index(self.name)
        return _Served(pack.own_launcher, number, first, Signature(self.name, kernels))

    def _kernels_in(self, pack: Pack) -> tuple[OwnKernel, ...]:
        return tuple(kernel for kernel in pack.manifest.own if kernel.function == self.name)


def _fail(served: Mapping[int, _Served], ordinal: int) -> None:
    """Raise the last error of a GPU's launcher."""
    served[ordinal].launcher.fail()


def blocks_of(name: str, grid: Any) -> tuple[int, int, int] | None:
    """Return the blocks along x, y and z; None for the pack's own grid. Raises TypeError."""
    if grid is None:
        return None
    row = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(row) <= AXES or not all(isinstance(each, int) for each in row):
        raise TypeError(f"{name}: grid {grid!r}: expected one to three integers, the blocks along x, y and z")
    x, y, z = (*row, 1, 1)[:AXES]
    return x, y, z


def _where(value: Any) -> Any:
    """Return the device of a tensor, of torch or of anything with DLPack; None for anything else."""
    import torch

    if hasattr(value, "block_shape"):  # Triton's TensorDescriptor
        value = value.base
    if isinstance(value, torch.Tensor):
        return value.device
    return torch.utils.dlpack.from_dlpack(value).device if hasattr(value, "__dlpack__") else None
