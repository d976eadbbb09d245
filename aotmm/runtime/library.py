"""The library object: packs of prebuilt kernels, and the products that they compute."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from aotmm.errors import ArtifactError, DriverError, NoKernelError
from aotmm.pack.files import build_command
from aotmm.problem import ACTIVATIONS, LEAKY_SLOPE, WORKSPACE_LIMIT
from aotmm.runtime import autograd, composite, direct_call, grouped, ops
from aotmm.runtime.devices import best_pack, device, what_to_build
from aotmm.runtime.functions import Function
from aotmm.runtime.installed import find_packs
from aotmm.runtime.views import products, result_shape
from aotmm.target import ranked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aotmm.pack.schema import Kernel
    from aotmm.runtime.launcher import Launcher, Plan, Problem, Selection
    from aotmm.runtime.pack import AnyTable, Pack

Activation = str | tuple[str, float] | None
_NAMES = tuple(ACTIVATIONS)
_ACTIVATION_CODES = {name: code for code, name in enumerate(_NAMES) if name != "none"}
_NO_ACTIVATION = (0, LEAKY_SLOPE)
_MATRIX, _BATCH = 2, 3  # the op's operands have so many dimensions
_PLAIN = (0, LEAKY_SLOPE, False, False, False, 0)  # the op's defaults
_PAIR = 2


class Library:
    """Prebuilt matrix products for torch tensors. `aotmm.load` makes it. It is thread-safe.

    A copy is the library itself. A pickle holds the path and the table, which are loaded again when it is unpickled.

    Attributes:
        packs: the packs that were found. If several are for a GPU's arch, the first that has kernels for a product's
            types and epilogue serves it.
    """

    def __init__(
        self, packs: tuple[Pack, ...], number: int, path: Path | None, table: tuple[Path, AnyTable] | None
    ) -> None:
        """Make library number `number` of the packs that `_load` found."""
        self.packs = packs
        self._number = number
        self._options = {
            invariant: (0, LEAKY_SLOPE, False, False, invariant, number, -1) for invariant in (False, True)
        }
        self._path = path
        self._table = table
        self._functions: dict[str, Function] = {}
        self._ops = ops.register(_resolve)
        composite.register()
        grouped.register()
        self._direct_call = self._ops.direct_call
        self._mm = torch.ops.aotmm.mm.default
        self._mm_out = torch.ops.aotmm.mm.out
        self._grouped_mm = torch.ops.aotmm.grouped_mm.default
        self._grouped_mm_out = torch.ops.aotmm.grouped_mm.out
        self._matmul = torch.ops.aotmm.matmul.default

    def __repr__(self) -> str:
        packs = ", ".join(f"{pack.arch} of {pack.owner}" if pack.owner else pack.arch for pack in self.packs)
        return f"<aotmm.Library of {packs}{f' in {self._path}' if self._path else ''}>"

    def __reduce__(self) -> tuple[Callable[..., Library], tuple[object, ...]]:
        return _load, (self._path, self._table)

    @property
    def has_direct_call(self) -> bool:
        """Return whether `matmul` of plain tensors bypasses torch's dispatcher; this depends on Python and torch."""
        return self._direct_call is not direct_call.DECLINED.matmul

    @property
    def number(self) -> int:
        """Return the library's number in this process, as the ops count them."""
        return self._number

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Return every kernel of every pack."""
        return tuple(kernel for pack in self.packs for kernel in pack.manifest.kernels)

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: Activation = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        fast_accum: bool = False,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """Return activation(scale_a * scale_b * (a @ b) + bias), computed in fp32 and rounded once.

        Takes the shapes that `torch.matmul` takes. Runs on the tensors' device, on torch's current stream there,
        and does not wait for it. fp32 operands are multiplied in tf32 if torch's settings allow it
        (`torch.backends.cuda.matmul.fp32_precision` is "tf32") and the arch has it.

        For fp16, bf16 and fp32 it is differentiable, in either mode and any number of times. Where a gradient may be
        required, torch applies the activation to the rounded sum (docs/torch.md).

        Some products are faster with a workspace, for slices of K or copies of operands. It comes from torch,
        has at most `aotmm.problem.WORKSPACE_LIMIT` bytes, and is freed before this returns. If no memory is left,
        the product is computed without.

        Args:
            a: (..., M, K) or (K) of fp16, bf16, fp32, float8 or int8; any strides, any alignment.
            b: (..., K, N) or (K) of the same dtype, likewise; float8_e4m3fn and float8_e5m2 may be mixed.
            out: tensor of the result's shape to write to: fp16, bf16 or fp32 (int32 for int8), any strides. It must not
                share memory with an operand.
            bias: tensor that broadcasts to the result (a vector of N, or a residual), of the result's dtype. It may be
                `out` itself.
            activation: None, "relu", "leaky_relu" (slope 0.01) or ("leaky_relu", slope), "gelu" (erf), "gelu_tanh",
                "silu", "sigmoid" or "tanh".
            scale_a: fp32, one number or (M, 1), the same for every matrix of a batch; or of float8 for blocks of K
                (..., M, ceil(K / 128)), any strides.
            scale_b: fp32, one number or (1, N), likewise; or for blocks (..., ceil(K / 128), N), or
                (..., ceil(K / 128), ceil(N / 128)) for 128 columns together. Blocks need both scales, and
                (docs/numerics.md) multiply the sum of each 128 products along K.
            out_dtype: dtype of a result without `out`; by default that of the operands, fp16 for float8, int32 for
                int8.
            fast_accum: float8 sums may stay in the tensor cores' own precision (about 14 bits on Hopper).
            batch_invariant: a row of the result has the same bits whatever the other rows are, and however many
                (docs/numerics.md).

        Returns:
            `out`, or a new row-major tensor.

        Raises:
            TypeError: not GPU tensors, dtypes that no kernel multiplies on this GPU, or both `out` and `out_dtype`.
            ValueError: sizes, devices or memory do not fit together, or the activation is unknown.
            NoKernelError: no pack has kernels for this GPU, or none writes this type with this epilogue, or
                `batch_invariant` needs a workspace and there is no memory for it.
            DriverError: the driver refused the launch.
            NotImplementedError: a gradient is required of a product that has none: with `out` or scales, of fp8 or
                int8.
        """
        if is_dynamo_compiling():
            flags = fast_accum, batch_invariant
            return self._traced(a, b, out, (bias, scale_a, scale_b), activation, out_dtype, flags)
        try:
            if scale_a is None and scale_b is None and out_dtype is None and not fast_accum:
                code = None if activation is None else activation_code(activation)
                product = self._direct_call(self._number, a, b, out, bias, code, batch_invariant)
                if product is None:
                    return autograd.record(a, b, bias, self._options[batch_invariant])
                if product is not NotImplemented:
                    return product  # type: ignore[no-any-return]
            flags = fast_accum, batch_invariant
            return self._by_op(a, b, out, bias, activation, scale_a, scale_b, out_dtype, flags)
        except RuntimeError as error:
            tensors = {"a": a, "b": b, "out": out, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
            self._ops.reraise(
                error, {name: value for name, value in tensors.items() if value is not None}, self.packs_for
            )
        except AttributeError:
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                raise
            raise TypeError(f"matmul takes tensors, found {type(a).__name__} and {type(b).__name__}") from None

    def grouped_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        expected_rows: int | None = None,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: Activation = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        fast_accum: bool = False,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """Return the products of groups, as `torch.nn.functional.grouped_mm`: activation(a @ b + bias) of each.

        One launch computes all groups. The ends of groups stay on the device: nothing is copied to the host, so a
        captured graph is right whatever they are at each replay. A group may be empty. What lies behind the last group
        is not read, and there the result is undefined. fp32 operands are multiplied as `matmul` does.

        For fp16, bf16 and fp32 with offs it is differentiable, any number of times, in reverse mode.

        Args:
            a: (M, K), its rows in groups, with b (groups, K, N); or (groups, M, K) with b (K, N), its columns in
                groups; or (M, K) with b (K, N), K in groups. fp16, bf16, fp32 or float8; any strides, any alignment.
                With both (groups, M, K) and (groups, K, N) it is `matmul`, without offs, or has `rows`.
            b: as above, of the same dtype.
            offs: int32 (groups), on the device, ascending: the end of each group, in elements of what is in groups.
            rows: int32 (groups), on the device: of two batches, how many rows of each matrix of a count, from its
                first on. The others of the result are undefined. The matrices of a and of out must follow each other as
                their rows do.
            expected_rows: an estimate of the rows that all groups have together, by which kernels are chosen; by
                default all rows of a.
            out: tensor of the result's shape to write to, likewise. It must not share memory with an operand.
            bias: (N), or (groups, N) with one vector for each group, of the result's dtype; for rows in groups alone.
            activation: as `matmul` has it.
            scale_a: fp32, for rows in groups: one number or (..., M, 1), or of float8 for blocks of K
                (..., M, ceil(K / 128)).
            scale_b: fp32, likewise: one number, (1, N) or (groups, 1, N), or for blocks (groups, ceil(K / 128), N) or
                (groups, ceil(K / 128), ceil(N / 128)). Both are as in `matmul`, any strides.
            out_dtype: dtype of a result without `out`; by default that of the operands, fp16 for float8.
            fast_accum: as `matmul` has it.
            batch_invariant: a row has the same bits as in `matmul` of its group's matrix alone with `batch_invariant`.

        Returns:
            `out`, or a new row-major tensor: (M, N), or (groups, M, N) if K is in groups or a has matrices of rows.

        Raises:
            TypeError: not GPU tensors, dtypes that no kernel multiplies on this GPU, or both `out` and `out_dtype`.
            ValueError: shapes, devices, memory or offs do not fit together, or the activation is unknown.
            NoKernelError: no pack has grouped kernels for this GPU, types and epilogue.
            DriverError: the driver refused the launch.
            NotImplementedError: a gradient is required of a product that has none: with `out`, rows or scales, or of
                another dtype.
        """
        batches = a.dim() == b.dim() == _BATCH
        if (offs is None) is not batches or (rows is not None and not batches):
            found = f"a is {tuple(a.shape)}, b is {tuple(b.shape)}"
            needs = "two batches take rows, not offs" if batches else "a matrix in groups takes offs, not rows"
            raise ValueError(f"{needs}: {found}")
        if expected_rows is not None and (expected_rows < 0 or (offs is None and rows is None)):
            raise ValueError(f"expected_rows={expected_rows}: a number of rows in groups, which is not negative")
        if offs is None and rows is None:
            whole = bias.unsqueeze(1) if bias is not None and bias.dim() == _MATRIX else bias
            options: dict[str, Any] = {"bias": whole, "scale_a": scale_a, "scale_b": scale_b, "activation": activation}
            options |= {"fast_accum": fast_accum, "batch_invariant": batch_invariant}
            return self.matmul(a, b, out=out, out_dtype=out_dtype, **options)
        code, slope = _NO_ACTIVATION if activation is None else activation_code(activation)
        if out is not None:
            _check_out(out_dtype, out, a, b, bias, scale_a, scale_b)
        tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, bias))
        if tracked and (rows is not None or scale_a is not None or scale_b is not None):
            raise NotImplementedError("grouped_mm with rows or scales has no gradient; use torch.no_grad() or detach()")
        # Dynamo knows the older name of the setting alone, and compiles again when it changes
        allowed = torch.backends.cuda.matmul.allow_tf32 if is_dynamo_compiling() else ops.tf32_allowed()
        tf32 = a.dtype is torch.float32 and allowed
        fused = _NO_ACTIVATION if tracked else (code, slope)
        flags = tf32, fast_accum, batch_invariant, self._number, expected_rows or 0
        arguments = (a, b, offs if rows is None else rows, bias, scale_a, scale_b, *fused, *flags)
        try:
            if out is None:
                result = self._grouped_mm(*arguments, -1 if out_dtype is None else ops.output_code(out_dtype))
            elif is_compiling():  # a copy, which Inductor removes
                result = self._grouped_mm(*arguments, ops.output_code(out.dtype))
                _check_shape(out, result.shape)
                result = out.copy_(result)
            else:
                result = self._grouped_mm_out(*arguments, out=out)
                if not out.is_inference():
                    torch.autograd.graph.increment_version(out)
        except RuntimeError as error:
            tensors = {"a": a, "b": b, "offs": offs, "rows": rows, "out": out, "bias": bias}
            tensors |= {"scale_a": scale_a, "scale_b": scale_b}
            given = {name: value for name, value in tensors.items() if value is not None}
            self._ops.reraise(error, given, self.packs_for)
        return composite.activated(result, _NAMES[code], slope) if tracked and code else result

    def _by_op(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        activation: Activation,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        flags: tuple[bool, bool],
    ) -> torch.Tensor:
        """Compute `matmul` through torch's dispatcher; `flags` are fast_accum and batch_invariant."""
        if is_compiling():  # torch.export without Dynamo
            return self._traced(a, b, out, (bias, scale_a, scale_b), activation, out_dtype, flags)
        code, slope = _NO_ACTIVATION if activation is None else activation_code(activation)
        if bias is not None or scale_a is not None or scale_b is not None:
            _check_factors(bias, scale_a, scale_b)
        if out is not None:
            _check_out(out_dtype, out, a, b, bias, scale_a, scale_b)
            if autograd.tracked(out, a, b, bias, scale_a, scale_b):
                raise NotImplementedError("matmul with out= is for neither torch.func nor forward mode; use no out")
        elif composite.needed(a, b, bias, scale_a, scale_b):
            rest = (_NAMES[code], slope, *flags, out_dtype, self._number)
            return composite.matmul(a, b, bias, scale_a, scale_b, *rest)
        tf32 = a.dtype is torch.float32 and ops.tf32_allowed()
        options = (code, slope, tf32, *flags, self._number)
        if not (_MATRIX <= a.dim() <= _BATCH and _MATRIX <= b.dim() <= _BATCH):
            return self._any_rank(a, b, out, bias, scale_a, scale_b, out_dtype, options)
        if options == _PLAIN and bias is None and scale_a is None and scale_b is None and out_dtype is None:
            # most calls; the op fills in its defaults faster than Python passes them
            return self._mm(a, b) if out is None else self._into(out, a, b)
        if out is None:
            output = -1 if out_dtype is None else ops.output_code(out_dtype)
            return self._mm(a, b, bias, scale_a, scale_b, *options, output)  # type: ignore[no-any-return]
        return self._into(out, a, b, bias, scale_a, scale_b, *options)

    def _traced(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        factors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        activation: Activation,
        out_dtype: torch.dtype | None,
        flags: tuple[bool, bool],
    ) -> torch.Tensor:
        """Compute `matmul` for torch.compile and torch.export: one op, and a copy to `out`, which Inductor removes."""
        if out is None and activation is None and out_dtype is None:  # most calls; unread arguments need no guard
            named = {"fast_accum": flags[0], "batch_invariant": flags[1], "library": self._number}
            return self._matmul(a, b, *factors, **named)  # type: ignore[no-any-return]
        code, slope = _NO_ACTIVATION if activation is None else activation_code(activation)
        rest = (_NAMES[code], slope, *flags)
        if out is None:
            return self._matmul(a, b, *factors, *rest, out_dtype, self._number)  # type: ignore[no-any-return]
        _check_out(out_dtype, out, a, b, *factors)
        result = self._matmul(a, b, *factors, *rest, out.dtype, self._number)
        _check_shape(out, result.shape)
        return out.copy_(result)

    def _into(self, out: torch.Tensor, *arguments: object) -> torch.Tensor:
        """Write the product to `out`, tell autograd of the change, and return `out`."""
        self._mm_out(*arguments, out=out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return out

    def _any_rank(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        options: tuple[int, float, bool, bool, bool, int],
    ) -> torch.Tensor:
        shape = result_shape(a, b)
        if out is None:
            output = ops.default_output(a.dtype) if out_dtype is None else ops.output_dtype(out_dtype)
            out = torch.empty(shape, dtype=output, device=a.device)
        else:
            _check_shape(out, shape)
        found = products(a, b, out, bias, rows_scaled=_per_row(scale_a))
        for product in found:
            self._into(product.out, product.a, product.b, product.bias, scale_a, scale_b, *options)
        if not found:  # nothing to launch; operands that do not multiply are still refused
            self._mm(a.new_empty(0, 1), b.new_empty(1, 0))
        return out

    def explain(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> Selection:
        """Return the kernel that `matmul` launches for these arguments, its plan, and why others do not fit.

        With `offs` or `rows` it is that of `grouped_mm`. If the strides need several launches, it explains the first.

        Args:
            a: as in `matmul`, or with `offs` or `rows` in `grouped_mm`.
            b: likewise.
            options: the other arguments of that method.

        Raises:
            ValueError: nothing is launched, because the result is empty.
            TypeError, ValueError, NoKernelError, DriverError, NotImplementedError: as that method.
        """
        problem = self.problem(a, b, **options)
        ordinal = a.device.index
        launchers = [pack.launcher for pack in self.packs_for(ordinal)]
        answers = [launcher.explain(problem, launcher.device(ordinal)) for launcher in launchers]
        return next((answer for answer in answers if answer.chosen), answers[0])

    def problem(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> Problem:
        """Return the problem that `matmul` launches first for these arguments, for the functions of `launcher`.

        With `offs` or `rows` it is that of `grouped_mm`. It is the method up to that launch, which is left out. So
        torch computes what comes before it, such as the casts of autocast. A result without `out` is allocated, and
        freed at once. An `out` stays as it is.

        Raises:
            ValueError: nothing is launched, because the result is empty.
            TypeError, ValueError, NotImplementedError: as that method.
        """
        dry_run = _dry_run(self._ops.dry_run)
        grouped_ = any(options.get(name) is not None for name in ("offs", "rows"))
        multiply = dry_run.grouped_mm if grouped_ else dry_run.matmul
        try:
            result = multiply(a, b, **options)
        except DriverError:  # the launch that is left out; nothing else of a dry run needs a driver
            return self._ops.problem()
        why = f"is on {result.device}" if result.numel() else "is empty"
        raise ValueError(f"nothing is launched: the result of shape {tuple(result.shape)} {why}")

    def preload(self, device: int | None = None, *, problems: Iterable[Problem] | None = None) -> None:
        """Load kernels for GPU number `device` now, not at their first use; the default is the current GPU.

        Args:
            problems: those of which kernels are chosen and loaded, as `problem` returns them; by default every kernel
                that fits the GPU is loaded, which takes longer.

        Raises:
            NoKernelError: no pack has kernels for this GPU, or for one of the problems. DriverError: the driver refused
                one.
        """
        if not torch.cuda.is_available():
            raise NoKernelError(f"torch {torch.__version__} sees no GPU to load kernels for; `aotmm doctor` says why")
        ordinal = torch.cuda.current_device() if device is None else device
        launchers = [pack.launcher for pack in self.packs_for(ordinal)]
        if problems is None:
            for launcher in launchers:
                launcher.preload(ordinal)
            return
        for problem in problems:
            launcher, plan = _planned(launchers, problem, ordinal)
            launcher.load(plan, problem, ordinal)

    def launcher(self, ordinal: int) -> Launcher:
        """Return the launcher that serves GPU number `ordinal`.

        Raises:
            NoKernelError: no pack has kernels for it; the message names the GPU, the packs and the command to run.
            ArtifactError: the pack's library is missing or altered.
        """
        return self.pack_for(ordinal).launcher

    def pack_for(self, ordinal: int) -> Pack:
        """Return the first pack that runs on GPU number `ordinal`. Raises NoKernelError as `launcher`."""
        return self.packs_for(ordinal)[0]

    def packs_for(self, ordinal: int) -> tuple[Pack, ...]:
        """Return the packs that may serve GPU number `ordinal`, in order: the best pack, then the others of its arch.

        Raises:
            NoKernelError: as `launcher`.
        """
        gpu = device(ordinal)
        found = best_pack(self.packs, gpu.arch)
        if found is None:
            packs = ", ".join(f"{pack.arch} ({pack.folder})" for pack in self.packs)
            advice = what_to_build(gpu.arch, self._path)
            raise NoKernelError(f"no kernels for cuda:{ordinal}, {gpu.name} ({gpu.arch}); found: {packs}; {advice}")
        return tuple(pack for pack in self.packs if pack.arch == found[0].arch and not pack.head.functions)

    def __getitem__(self, name: str) -> Function:
        """Return the function called `name`, of a user's own (docs/own-kernels.md): `lib[name][grid](*arguments)`.

        Raises:
            NoKernelError: no pack has it.
        """
        if name not in self._functions:
            packs = tuple(pack for pack in self.packs if name in pack.head.functions)
            if not packs:
                known = sorted({each for pack in self.packs for each in pack.head.functions})
                raise NoKernelError(f"no pack has a function {name!r}; there are: {', '.join(known) or 'none'}")
            self._functions[name] = Function(name, packs, functools.partial(self._own_packs_for, name, packs))
        return self._functions[name]

    def _own_packs_for(self, name: str, packs: tuple[Pack, ...], ordinal: int) -> list[Pack]:
        """Return those of `packs` that run on GPU number `ordinal`, the best first. Raises NoKernelError."""
        gpu = device(ordinal)
        archs = [arch for arch, _ in ranked(dict.fromkeys(pack.arch for pack in packs), gpu.arch)]
        if not archs:
            has = ", ".join(f"{pack.arch} ({pack.folder})" for pack in packs)
            raise NoKernelError(
                f"{name}: no kernels for cuda:{ordinal}, {gpu.name} ({gpu.arch}); found: {has}; "
                f"build them: aotmm build --kernel FILE.py:{name} --arch {gpu.arch}"
            )
        return sorted((pack for pack in packs if pack.arch in archs), key=lambda pack: archs.index(pack.arch))


def _planned(launchers: list[Launcher], problem: Problem, ordinal: int) -> tuple[Launcher, Plan]:
    """Return the first launcher that has a plan for a product, as the ops choose it. Raises NoKernelError."""
    for launcher in launchers[:-1]:
        try:
            return launcher, launcher.plan(problem, ordinal, WORKSPACE_LIMIT)
        except NoKernelError:
            continue
    return launchers[-1], launchers[-1].plan(problem, ordinal, WORKSPACE_LIMIT)


def activation_code(activation: str | tuple[str, float]) -> tuple[int, float]:
    """Return number and slope of an activation."""
    name, slope = (
        activation if isinstance(activation, tuple) and len(activation) == _PAIR else (activation, LEAKY_SLOPE)
    )
    if not isinstance(name, str) or name not in _ACTIVATION_CODES or (name is not activation and name != "leaky_relu"):
        known = ", ".join(repr(known) for known in _ACTIVATION_CODES)
        raise ValueError(f'unknown activation {activation!r}; known: None, {known}, ("leaky_relu", slope)')
    return _ACTIVATION_CODES[name], float(slope)


def _per_row(scale_a: torch.Tensor | None) -> bool:
    return scale_a is not None and scale_a.numel() > 1


def _check_factors(bias: object, scale_a: object, scale_b: object) -> None:
    for name, value in (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b)):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, found {type(value).__name__}")


def _check_out(out_dtype: torch.dtype | None, out: object, *read: torch.Tensor | None) -> None:
    """Refuse an `out` that is no tensor, and arguments that exclude `out`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a tensor, found {type(out).__name__}")
    if out_dtype is not None:
        raise TypeError("out_dtype is for a new result; out has its own dtype")
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (out, *read)):
        raise NotImplementedError("a product with out= has no gradient; use torch.no_grad(), detach(), or no out")


def _check_shape(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    if out.shape != shape:
        raise ValueError(f"out is {tuple(out.shape)}, it must be {tuple(shape)}")


@functools.cache
def _dry_run(number: int) -> Library:
    """Return the library of that number, whose launches are left out."""
    return Library((), number, None, None)


_lock = threading.Lock()
_libraries: list[Library] = []


def load(path: str | Path | None = None, *, table: str | Path | None = None) -> Library:
    """Return the library of the packs in `path`: a pack's folder, or a folder of packs.

    The default is this installation's packs. Packs that other distributions add (docs/packs.md) come before them.

    Reads and checks the manifests. Nothing touches a GPU before the first product. The same packs with the same table
    give the same library, from any thread. Another table gives a library of its own, which disturbs no other.

    Args:
        table: a tuning table, as `aotmm tune` writes it. The packs of its arch choose by it instead of by the tables
            that they were built with; on other GPUs than its own by its models, scaled. Other packs stay as they are.
            One of `aotmm tune --kernel` is for packs of functions alone, on any GPU of its arch.

    Raises:
        ArtifactError: there are no packs, a pack or the table is refused, no pack is for the table's arch, or another
            copy of aotmm is in use in this process.
    """
    folder = None if path is None else Path(path).resolve()
    if table is None:
        return _load(folder, None)
    from aotmm.pack import function_table  # only here: most libraries have none
    from aotmm.pack import table as products

    name = Path(table)
    return _load(folder, (name, (function_table if function_table.is_one(name) else products).read(name)))


def _load(path: Path | None, table: tuple[Path, AnyTable] | None) -> Library:
    """Load with a table that was read; `table` has its path and its content."""
    packs = tuple(find_packs(path))
    if table is not None:
        _tune(packs, *table, path)
    identity = [(pack.folder, pack.head.digest, pack.table) for pack in packs]
    with _lock:
        for library in _libraries:
            if [(pack.folder, pack.head.digest, pack.table) for pack in library.packs] == identity:
                return library
        library = Library(packs, len(_libraries), path, table)
        _libraries.append(library)
        return library


def _tune(packs: tuple[Pack, ...], name: Path, table: AnyTable, path: Path | None) -> None:
    """Give the table in the file `name` to the packs of its arch, and of its functions."""
    functions = {row.function for row in getattr(table, "measured", ())}
    of_arch = [pack for pack in packs if pack.arch == table.arch]
    mine = [p for p in of_arch if (functions.intersection(p.head.functions) if functions else not p.head.functions)]
    if of_arch and not mine:
        raise ArtifactError(
            f"tuning table {name} is for {', '.join(sorted(functions)) or 'products'}; no pack for {table.arch} in "
            f"{path or 'the installation'} has them"
        )
    if not mine:
        raise ArtifactError(
            f"tuning table {name} is for {table.arch} ({table.device}), the packs in {path or 'the installation'} are "
            f"for {', '.join(pack.arch for pack in packs)}; build one: {build_command(table.arch, path)}"
        )
    for pack in mine:
        pack.table = table


def _resolve(number: int, ordinal: int) -> list[int]:
    """Return the addresses of the launchers of library `number` for a GPU. The ops call this at their first use."""
    return [pack.launcher.address for pack in _libraries[number].packs_for(ordinal)]
