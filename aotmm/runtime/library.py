"""The library that users hold: packs of prebuilt kernels, and the products that they launch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from aotmm.errors import NoKernelError
from aotmm.folders import data_folder
from aotmm.manifest import Kernel
from aotmm.problem import ACTIVATIONS
from aotmm.runtime import ops
from aotmm.runtime.devices import best_pack, device, what_to_build
from aotmm.runtime.pack import Pack, open_packs

if TYPE_CHECKING:
    from aotmm.runtime.launcher import Launcher

_ACTIVATION_CODES = {None: 0} | {name: code for code, name in enumerate(ACTIVATIONS) if name != "none"}


class Library:
    """Prebuilt matrix products for torch tensors. Made by `aotmm.load`; safe to use from any thread.

    Attributes:
        packs: the packs that were found, one per arch.
    """

    def __init__(self, packs: tuple[Pack, ...], number: int) -> None:
        self.packs = packs
        self._number = number
        self._ops = ops.register(_resolve)
        self._mm = torch.ops.aotmm.mm.default
        self._mm_out = torch.ops.aotmm.mm.out

    def __repr__(self) -> str:
        return f"<aotmm.Library of {', '.join(pack.arch for pack in self.packs)}>"

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel of every pack."""
        return tuple(kernel for pack in self.packs for kernel in pack.manifest.kernels)

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        activation: str | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(a @ b), accumulated in fp32 and rounded once.

        Runs on the tensors' device, on torch's current stream there, without waiting for it. fp32 operands are
        multiplied in tf32 where `torch.get_float32_matmul_precision()` is not "highest" and the arch has it.

        Args:
            a: (M, K) fp16, bf16, fp32, float8_e5m2 or (sm90) float8_e4m3fn; any strides, any alignment.
            b: (K, N) of the same dtype, likewise. A transposed view costs no copy.
            activation: None or "leaky_relu" (slope 0.01).
            out: (M, N) tensor to write to: fp16, bf16 or fp32, any strides, sharing memory with neither operand.
            out_dtype: dtype of the result if there is no `out`; by default that of the operands, fp16 for float8.

        Returns:
            `out`, or a new (M, N) tensor, row-major.

        Raises:
            TypeError: not GPU tensors, dtypes that differ or have no kernels, or both `out` and `out_dtype`.
            ValueError: ranks, sizes, devices or memory that do not fit together, or an unknown activation.
            NoKernelError: no pack has kernels for this GPU, or no kernel for these types.
            DriverError: the driver refused the launch.
            NotImplementedError: an operand requires a gradient; use `torch.no_grad()` or `detach()`.
        """
        if activation is not None and activation not in _ACTIVATION_CODES:
            names = ", ".join(repr(name) for name in _ACTIVATION_CODES)
            raise ValueError(f"unknown activation {activation!r}; known: {names}")
        if out is not None and out_dtype is not None:
            raise TypeError("out_dtype is for a new result; out has its own dtype")
        code = _ACTIVATION_CODES[activation]
        try:
            if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
                _refuse_gradient()
            tf32 = a.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
            if out is None:
                output = -1 if out_dtype is None else ops.OUTPUT_CODES[out_dtype]
                result: torch.Tensor = self._mm(a, b, code, output, tf32, self._number)
                return result
            self._mm_out(a, b, code, tf32, self._number, out=out)
        except RuntimeError as error:
            self._ops.reraise(error, a, b, out)
        except AttributeError:
            raise TypeError(f"matmul takes tensors, found {type(a).__name__} and {type(b).__name__}") from None
        except KeyError:
            known = ", ".join(str(dtype) for dtype in ops.OUTPUT_CODES)
            raise TypeError(f"unknown out_dtype {out_dtype}; known: {known}") from None
        return out

    def preload(self, device: int | None = None) -> None:
        """Loads every kernel that fits GPU number `device`, by default the current one, now and not at its first use.

        Raises:
            NoKernelError: no pack has kernels for this GPU. DriverError: the driver refused one.
        """
        ordinal = torch.cuda.current_device() if device is None else device
        self.launcher(ordinal).preload(ordinal)

    def launcher(self, ordinal: int) -> Launcher:
        """The launcher that serves GPU number `ordinal`.

        Raises:
            NoKernelError: no pack has kernels for it; the message names the GPU, the packs and the command to run.
            ArtifactError: the pack's library is missing or altered.
        """
        gpu = device(ordinal)
        found = best_pack(self.packs, gpu.arch)
        if found is None:
            packs = ", ".join(f"{pack.arch} ({pack.folder})" for pack in self.packs)
            advice = what_to_build(gpu.arch, self.packs[0].folder.parent)
            raise NoKernelError(f"no kernels for cuda:{ordinal}, {gpu.name} ({gpu.arch}); found: {packs}; {advice}")
        return found[0].launcher


def _refuse_gradient() -> NoReturn:
    raise NotImplementedError("matmul has no gradient, and an operand requires one; use torch.no_grad() or detach()")


_lock = threading.Lock()
_libraries: list[Library] = []


def load(path: str | Path | None = None) -> Library:
    """The library of the packs in `path`: a pack's folder, or a folder of packs; by default those of this installation.

    Reads and checks the manifests. Nothing touches a GPU before the first product. Loading the same packs again gives
    the same library.

    Raises:
        ArtifactError: there are no packs, or one is refused.
    """
    folder = data_folder("artifacts") if path is None else Path(path)
    packs = tuple(open_packs(folder.resolve()))
    identity = [(pack.folder, pack.head.digest) for pack in packs]
    with _lock:
        for library in _libraries:
            if [(pack.folder, pack.head.digest) for pack in library.packs] == identity:
                return library
        library = Library(packs, len(_libraries))
        _libraries.append(library)
        return library


def _resolve(number: int, ordinal: int) -> int:
    """Address of the C launcher that serves a GPU for library `number`; called by the ops at their first use."""
    return _libraries[number].launcher(ordinal).address
