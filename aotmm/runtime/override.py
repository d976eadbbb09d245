"""`aotmm.override()`: these kernels compute torch's own products while it lasts; torch computes everything else."""

from __future__ import annotations

import threading
from functools import partial
from types import TracebackType
from typing import Any

import torch

import aotmm
from aotmm.problem import BLOCK_SCALE_K, LEAKY_SLOPE
from aotmm.runtime import ops
from aotmm.runtime.library import Library

_KEY = "CUDA"  # on ROCm too
_MATRIX = 2  # dimensions
# Rows of a product with scales of blocks of K and single columns that is ours: torch's is faster above (docs/torch.md).
_MOST_NARROW_ROWS = 64
_HALVES = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The fates of products, in the order of native/override.c.
OURS, OTHER_TYPE, FULL_PRECISION, NO_PACK, DECLINED, COPIED = range(6)
_REASONS = {
    OTHER_TYPE: "of other types",
    FULL_PRECISION: "of fp32 in full precision",
    NO_PACK: "on a GPU without a pack",
    DECLINED: "of other forms (factors, scales, shapes, devices)",
    COPIED: "of batches that would be copied",
}
# The ops that override.c cannot register, because alpha and beta are Scalars: dimensions by name.
_WITH_SCALARS = {"addmm": 2, "addmm.out": 2, "baddbmm": 3, "baddbmm.out": 3}
_PRODUCT = {2: torch.mm, 3: torch.bmm}  # by dimensions
_SCALED = ("_scaled_mm", "_scaled_mm.out")
_GROUPED = "_grouped_mm"
_SCALED_GROUPED = ("_scaled_grouped_mm", "_scaled_grouped_mm_v2")  # the second is not in every torch
_VECTOR_BYTES = 16  # torch rounds the rows of a grouped result up to it
_SCALED_V2 = ("_scaled_mm_v2", "_scaled_mm_v2.out")  # of torch.nn.functional.scaled_mm; not on every device

# The ops that it registers. A kernel of its own key calls torch's kernel, so that exceptions pass.
_WITHOUT = ("mm", "mm.out", "bmm", "bmm.out", "_int_mm", "_int_mm.out")
_OWN_KEY = "PrivateUse3"  # no GPU's

_lock = threading.Lock()
_active = 0
_kernels: torch.library.Library | None = None
_invariant = False  # of the active ones


class Override:
    """An override of torch's products, for the whole process, from its construction until `remove` or the block's end.

    Overrides nest: torch's own kernels are back when the last one is removed. `repr` tells how many products were ours
    and how many were left to torch, and why, since the outermost one began.

    Args:
        batch_invariant: as `aotmm.override` has it.

    Raises:
        ValueError: another override is active, with another `batch_invariant`.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._removed = False
        self._invariant = batch_invariant
        global _active, _invariant  # noqa: PLW0603 - torch's registry is one per process too
        with _lock:
            if _active == 0:
                _begin(aotmm.load(), batch_invariant=batch_invariant)
                _invariant = batch_invariant
            elif batch_invariant is not _invariant:
                raise ValueError(
                    f"aotmm.override(batch_invariant={batch_invariant}): one with batch_invariant={_invariant} is "
                    "active, and it is for the whole process; remove that one first, or ask for the same"
                )
            _active += 1

    def __repr__(self) -> str:
        if not ops.serves_gpus():
            return "<aotmm.override: this torch is not built for GPUs>"
        counts = ops.registered().counts(len(_REASONS) + 1)
        left = [f"{counts[fate]} {reason}" for fate, reason in _REASONS.items() if counts[fate]]
        text = f"{counts[OURS]} products by aotmm, {sum(counts) - counts[OURS]} by torch"
        kind = "override(batch_invariant=True)" if self._invariant else "override"
        return f"<aotmm.{kind}: {text}{': ' if left else ''}{', '.join(left)}{'; removed' if self._removed else ''}>"

    def remove(self) -> None:
        """End it; a second call does nothing. Raises ArtifactError if torch does not take its kernels back."""
        global _active  # noqa: PLW0603
        with _lock:
            if self._removed:
                return
            self._removed = True
            _active -= 1
            if _active == 0:
                _end()

    def __enter__(self) -> Override:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _begin(library: Library, *, batch_invariant: bool) -> None:
    global _kernels  # noqa: PLW0603
    if not ops.serves_gpus():
        return
    names = (*_WITHOUT, *_WITH_SCALARS, *_SCALED, *filter(_has_kernel, (*_SCALED_V2, *_SCALED_GROUPED)), _GROUPED)
    own = {name: torch.library.get_kernel(f"aten::{name}", _KEY) for name in names}
    registered = ops.registered()
    _kernels = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        _register(_kernels, registered, library.number, own, batch_invariant=batch_invariant)
    except BaseException:
        _end()
        raise


def _register(
    kernels: torch.library.Library, registered: ops.Ops, library: int, own: dict[str, Any], *, batch_invariant: bool
) -> None:
    """Register all kernels. Raises ArtifactError if this torch does not allow it."""
    for name in _WITHOUT:
        kernels.impl(name, partial(_repeat, registered, own[name]), _OWN_KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    registered.override(_KEY, library, _OWN_KEY, batch_invariant=batch_invariant)
    found: dict[str, Any] = {}
    for name, dim in _WITH_SCALARS.items():
        other_forms = partial(_add_product, library, registered, own[name], dim, batch_invariant)
        found[name] = registered.direct.adder(dim, other_forms, own[name].call_boxed)
    in_python: tuple[tuple[tuple[str, ...], Any], ...] = (
        (_SCALED, _scaled),
        (_SCALED_V2, _scaled_v2),
        ((_GROUPED,), _grouped),
        (_SCALED_GROUPED[:1], _scaled_grouped),
        (_SCALED_GROUPED[1:], _scaled_grouped_v2),
    )
    for names, kernel in in_python:
        found |= {
            name: partial(kernel, library, registered, own[name], batch_invariant) for name in names if name in own
        }
    for name, kernel in found.items():
        kernels.impl(name, kernel, _KEY, with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]


def _has_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY))  # noqa: SLF001


def _end() -> None:
    global _kernels  # noqa: PLW0603
    if _kernels is None:
        return
    ops.registered().restore()
    _kernels._destroy()  # type: ignore[no-untyped-call] # noqa: SLF001 - no other way ends it
    _kernels = None


def _repeat(registered: ops.Ops, own: Any, keys: Any, *operands: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """Compute mm, bmm, _int_mm or an out variant by `own`, torch's kernel. override.c cannot let an exception pass."""
    try:
        return own.call_boxed(keys, *operands, **out)  # type: ignore[no-any-return]
    except BaseException:
        registered.give_back()
        raise


def _add_product(
    library: int,
    registered: ops.Ops,
    own: Any,
    dim: int,
    invariant: bool,  # noqa: FBT001 - bound by `partial`
    keys: Any,
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **rest: Any,
) -> torch.Tensor:
    """Compute addmm, baddbmm or an out variant: `bias + a @ b` and `a @ b` by ours, the rest by `own`, torch's."""
    beta, alpha, out = rest.get("beta", 1), rest.get("alpha", 1), rest.get("out")
    tf32 = a.dtype is torch.float32 and ops.tf32_allowed()
    plain = alpha == 1 and beta in (0, 1)
    shape = (*a.shape[:-1], *b.shape[-1:])  # torch reports tensors without dimensions
    fits = (
        (plain or invariant)
        and a.dtype is b.dtype is bias.dtype
        and a.device == bias.device
        and a.dim() == b.dim() == dim >= bias.dim()
        and all(size in (1, whole) for size, whole in zip(reversed(bias.shape), reversed(shape), strict=False))
        and (dim == 2 or a.shape[0] == b.shape[0])  # noqa: PLR2004 - matrices
        and (out is None or (out.dtype is a.dtype and out.shape == shape))
    )
    if fits and beta == 0 and not invariant:  # a product alone, which override.c knows
        return _PRODUCT[dim](a, b) if out is None else _PRODUCT[dim](a, b, out=out)
    fate = OURS if fits else DECLINED
    if a.dtype is torch.float32:
        fate = fate if tf32 or invariant else FULL_PRECISION  # override.c has what is ours (docs/torch.md)
    elif a.dtype not in _HALVES:
        fate = OTHER_TYPE
    options: tuple[Any, ...] = (bias if beta and plain else None,)
    if tf32 or library or invariant:  # else the op fills in its defaults faster than Python passes them
        options += (None, None, 0, LEAKY_SLOPE, tf32, False, invariant, library)
    if not plain and fate == OURS:
        product = _computed(registered, library, fate, (a, b, *options, ops.output_code(torch.float32)), None)
        return own.call_boxed(keys, bias, a, b, **rest) if product is None else _combined(product, bias, a.dtype, rest)
    product = _computed(registered, library, fate, (a, b, *options), out)
    return own.call_boxed(keys, bias, a, b, **rest) if product is None else product


def _combined(product: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype, rest: dict[str, Any]) -> torch.Tensor:
    """Return beta * bias + alpha * product, computed in the product's fp32 by torch, in `out` or a new tensor."""
    product.mul_(rest.get("alpha", 1))
    if rest.get("beta", 1):
        product.add_(bias, alpha=rest.get("beta", 1))
    out: torch.Tensor | None = rest.get("out")
    return product.to(dtype) if out is None else out.copy_(product)


def _scaled(
    library: int,
    registered: ops.Ops,
    own: Any,
    invariant: bool,  # noqa: FBT001 - bound by `partial`
    keys: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    **into: torch.Tensor,
) -> torch.Tensor:
    """Compute _scaled_mm or its out variant: with scales that ours know and no scale of the result, or by torch's."""
    scales = (scale_a, scale_b) if scale_result is None else None
    found = _scaled_product(library, registered, (use_fast_accum, invariant), a, b, scales, bias, out_dtype, **into)
    if found is not None:
        return found
    rest = (scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    return own.call_boxed(keys, a, b, *rest, **into)  # type: ignore[no-any-return]


def _scaled_v2(
    library: int,
    registered: ops.Ops,
    own: Any,
    invariant: bool,  # noqa: FBT001 - bound by `partial`
    keys: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    scales_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scales_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    **into: torch.Tensor,
) -> torch.Tensor:
    """Compute _scaled_mm_v2 or its out variant, as `_scaled`."""
    scales = _plain_scales(scales_a, scales_b, (*swizzle_a, *swizzle_b, *contraction_dim))
    if scales is not None:
        scales = _scales_of_recipes(b, scales, (*recipe_a, *recipe_b))
    found = _scaled_product(library, registered, (use_fast_accum, invariant), a, b, scales, bias, out_dtype, **into)
    if found is not None:
        return found
    rest = (scales_a, recipe_a, swizzle_a, scales_b, recipe_b, swizzle_b, bias, out_dtype)
    return own.call_boxed(keys, a, b, *rest, contraction_dim, use_fast_accum, **into)  # type: ignore[no-any-return]


def _plain_scales(
    scales_a: list[torch.Tensor], scales_b: list[torch.Tensor], rest: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the scales of each operand if it has one level of them; None with `rest`, a swizzle or contraction_dim."""
    return (scales_a[0], scales_b[0]) if len(scales_a) == len(scales_b) == 1 and not any(rest) else None


def _scales_of_recipes(
    b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], recipes: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the scales of torch's recipes as `Library.matmul` has them, views; None for other recipes.

    For blocks of K, torch has those of columns of B transposed, and pads those of 128 columns to a multiple of 4.
    """
    kinds = torch.nn.functional.ScalingType
    of_a, of_b = scales
    if recipes in ((kinds.TensorWise.value,) * 2, (kinds.RowWise.value,) * 2):
        return of_a, of_b
    if of_b.dim() != _MATRIX:
        return None
    if recipes == (kinds.BlockWise1x128.value, kinds.BlockWise128x128.value):
        return of_a, of_b[: _blocks(b.shape[0])]
    return (of_a, of_b.t()) if recipes == (kinds.BlockWise1x128.value,) * 2 else None


def _scaled_product(
    library: int,
    registered: ops.Ops,
    flags: tuple[bool, bool],
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the product if it is ours, None if it is torch's, and count it.

    Args:
        flags: use_fast_accum, and whether rows have the same bits in every batch.
        scales: those of a and b; None for such as only torch knows.
    """
    result = out_dtype if out is None or out_dtype is not None else out.dtype
    fate, op, options = DECLINED, None, (bias, *(scales or (None, None)), 0, LEAKY_SLOPE, False, *flags, library)
    if a.dtype not in _FP8 or b.dtype not in _FP8:
        fate = OTHER_TYPE
    elif (
        result in _HALVES
        and a.dim() == b.dim() == _MATRIX
        and scales is not None
        and _has_known_scales(a, b, *scales)
        and (len(a) <= _MOST_NARROW_ROWS or flags[1] or not _in_narrow_blocks(b, *scales))
        and (bias is None or (bias.dtype is result and bias.shape == (b.shape[1],)))
        and (out is None or out.dtype is result)
    ):
        fate, op = OURS, partial(_by_scales, registered)
        options += () if out is not None else (ops.output_code(result),)
    return _computed(registered, library, fate, (a, b, *options), out, op)


def _by_scales(
    registered: ops.Ops,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """Compute the op's product of fp8 without torch's dispatcher, whose way takes longer than all of torch's call."""
    *_, fast_accum, invariant, library, output = rest
    found = registered.direct.scaled(library, a, b, scale_a, scale_b, bias, fast_accum, invariant, output)
    if found is NotImplemented:
        found = torch.ops.aotmm.mm.default(a, b, bias, scale_a, scale_b, *rest)
    return found  # type: ignore[no-any-return]


def _grouped(
    library: int,
    registered: ops.Ops,
    own: Any,
    invariant: bool,  # noqa: FBT001 - bound by `partial`
    keys: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `_grouped_mm` of rows or K in groups by ours, all else by torch's, which makes a bmm of two batches.

    Of columns in groups, and of K in tf32, torch's is faster (docs/experts.md).
    """
    fate = DECLINED
    tf32 = a.dtype is torch.float32 and ops.tf32_allowed()
    slower = a.dim() != _MATRIX or (tf32 and b.dim() == _MATRIX)
    if a.dtype not in (*_HALVES, torch.float32):
        fate = OTHER_TYPE
    elif (
        offs is not None
        and offs.dtype is torch.int32
        and bias is None
        and a.dtype is b.dtype
        and out_dtype in (None, a.dtype)
        and (invariant or not slower)
        and b.shape[-1] * b.itemsize % _VECTOR_BYTES == 0
    ):
        fate = OURS
    options = (offs, None, None, None, 0, LEAKY_SLOPE, tf32, False, invariant, library)
    product = _computed(registered, library, fate, (a, b, *options), None, torch.ops.aotmm.grouped_mm.default)
    if product is not None:
        return product
    return own.call_boxed(keys, a, b, offs, bias, out_dtype)  # type: ignore[no-any-return]


def _scaled_grouped(
    library: int,
    registered: ops.Ops,
    own: Any,
    invariant: bool,  # noqa: FBT001 - bound by `partial`
    keys: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> torch.Tensor:
    """Compute `_scaled_grouped_mm` of rows in groups by ours, all else by torch's."""
    scales = (scale_a, scale_b) if bias is None and scale_result is None else None
    product = _rows_scaled(library, registered, (use_fast_accum, invariant), a, b, offs, scales, out_dtype)
    if product is not None:
        return product
    rest = (scale_a, scale_b, offs, bias, scale_result, out_dtype, use_fast_accum)
    return own.call_boxed(keys, a, b, *rest)  # type: ignore[no-any-return]


def _scaled_grouped_v2(
    library: int,
    registered: ops.Ops,
    own: Any,
    invariant: bool,  # noqa: FBT001 - bound by `partial`
    keys: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    scales_a: list[torch.Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scales_b: list[torch.Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> torch.Tensor:
    """Compute `_scaled_grouped_mm_v2`, as `_scaled_grouped`."""
    scales = None
    if bias is None and (*recipe_a, *recipe_b) == (torch.nn.functional.ScalingType.RowWise.value,) * 2:
        scales = _plain_scales(scales_a, scales_b, (*swizzle_a, *swizzle_b, *contraction_dim))
    product = _rows_scaled(library, registered, (use_fast_accum, invariant), a, b, offs, scales, out_dtype)
    if product is not None:
        return product
    rest = (scales_a, recipe_a, swizzle_a, scales_b, recipe_b, swizzle_b, offs, bias, out_dtype)
    return own.call_boxed(keys, a, b, *rest, contraction_dim, use_fast_accum)  # type: ignore[no-any-return]


def _rows_scaled(
    library: int,
    registered: ops.Ops,
    flags: tuple[bool, bool],
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor | None:
    """Return the product of rows in groups, in bf16, if it is ours, None if it is torch's, and count it.

    Args:
        flags: use_fast_accum, and whether rows have the same bits in every batch.
        scales: (M) of rows of a, (groups, N) of columns of b; None for others.
    """
    factors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    fate = DECLINED
    if a.dtype not in _FP8 or b.dtype not in _FP8:
        fate = OTHER_TYPE
    elif (
        scales is not None
        and offs is not None
        and offs.dtype is torch.int32
        and (a.dim(), b.dim()) == (_MATRIX, _MATRIX + 1)
        and out_dtype is torch.bfloat16
        and scales[0].dtype is scales[1].dtype is torch.float32
        and (scales[0].shape, scales[1].shape) == (a.shape[:1], (b.shape[0], b.shape[2]))
        and b.shape[2] * out_dtype.itemsize % _VECTOR_BYTES == 0
    ):
        fate, factors = OURS, (scales[0].unsqueeze(1), scales[1].unsqueeze(1))
    options = (offs, None, *factors, 0, LEAKY_SLOPE, False, *flags, library, 0, ops.output_code(torch.bfloat16))
    return _computed(registered, library, fate, (a, b, *options), None, torch.ops.aotmm.grouped_mm.default)


def _has_known_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> bool:
    if not scale_a.dtype is scale_b.dtype is torch.float32:
        return False
    if scale_a.numel() == scale_b.numel() == 1:
        return True
    (M, K), N = a.shape, b.shape[1]
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    blocks = _blocks(K)
    return shapes in (
        ((M, 1), (1, N)),
        ((M, blocks), (blocks, _blocks(N))),
        ((M, blocks), (blocks, N)),
    )


def _in_narrow_blocks(b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> bool:
    """Return whether known scales are of several blocks of K, and of B of single columns."""
    return scale_a.numel() > 1 and scale_a.shape[1] > 1 and scale_b.shape[-1] == b.shape[1]


def _blocks(size: int) -> int:
    """Return the blocks of scales along a dimension of that size."""
    return -(-size // BLOCK_SCALE_K)


def _computed(
    registered: ops.Ops,
    library: int,
    fate: int,
    arguments: tuple[Any, ...],
    out: torch.Tensor | None,
    op: Any = None,
) -> torch.Tensor | None:
    """Return the product of the op's `arguments`, aotmm::mm or `op`, if it is ours, None if torch's, and count it."""
    where = library, arguments[0].device.index or 0
    if fate == OURS and where in registered.unsupported:
        fate = NO_PACK
    product: torch.Tensor | None = None
    if fate == OURS:
        try:
            if out is None:
                product = (op or torch.ops.aotmm.mm.default)(*arguments)
            else:
                product = torch.ops.aotmm.mm.out(*arguments, out=out)
        except RuntimeError:
            if not registered.declined():
                raise
            fate = NO_PACK if where in registered.unsupported else DECLINED
    registered.count(fate)
    return product
