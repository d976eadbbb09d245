"""Products of tensors of any rank as products of matrices and batches of matrices: views only, no copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

_MATRIX = 2  # dimensions


class Product(NamedTuple):
    """Tensors of 2 or 3 dimensions: a ([batch,] M, K), b ([batch,] K, N), out and perhaps bias ([batch,] M, N)."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None


def grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a grouped product: (groups, M, N) of two matrices or two batches, else (M, N)."""
    shape = a.shape[-2], b.shape[-1]
    return (offs.shape[0], *shape) if a.dim() == b.dim() else shape


def result_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a @ b, as `torch.matmul` has it.

    Raises:
        ValueError: a tensor without dimensions, inner sizes that differ, or batches that do not broadcast.
    """
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"matmul needs tensors of at least 1 dimension: {_found(a, b)}")
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ValueError(f"the inner sizes differ: {_found(a, b)}; a is (..., M, K), b must be (..., K, N)")
    try:
        batch = a.shape[:-2]
        if b.dim() > _MATRIX and b.shape[:-2] != batch:
            batch = torch.broadcast_shapes(batch, b.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"the batch sizes do not broadcast: {_found(a, b)}") from error
    return (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.dim() > 1 else ()))


def _found(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"a is {tuple(a.shape)} {a.dtype}, b is {tuple(b.shape)} {b.dtype}"


def products(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, rows_scaled: bool
) -> list[Product]:
    """Return the products to launch for out = a @ b (+ bias), none if out is empty.

    If b is the same for all, batch dimensions become rows, else one batch dimension. The first dimension that does
    not merge is looped over.

    Args:
        a, b: tensors that multiply (`result_shape`).
        out: tensor of `result_shape(a, b)`.
        bias: tensor that broadcasts to out.
        rows_scaled: every row of a has a scale of its own, so batch dimensions must not become rows.

    Raises:
        ValueError: bias does not broadcast; out shares memory with itself or, over several products, with a tensor that
            is read.
    """
    vector, matrix = _bias_of(bias, tuple(out.shape), b)
    if b.dim() == 1:
        b, out = b.unsqueeze(-1), out.unsqueeze(-1)
        matrix = None if matrix is None else matrix.unsqueeze(-1)
    if a.dim() == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
        matrix = None if matrix is None else matrix.unsqueeze(-2)
    if not out.numel():
        return []
    batch = out.shape[:-2]
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    parts = _split(a, b, out, matrix, rows_scaled=rows_scaled)
    found = [Product(x, y, z, vector if part is None else part) for x, y, z, part in parts]
    if len(found) > 1:
        read = [a, b] if vector is None else [a, b, vector]
        if matrix is not None and (matrix.data_ptr(), matrix.stride()) != (out.data_ptr(), out.stride()):
            read.append(matrix)  # where it is out itself, each element is read before it is written
        if _overlaps_itself(out) or any(_ranges_meet(out, operand) for operand in read):
            raise ValueError(
                f"out of shape {tuple(out.shape)}, strides {out.stride()} shares memory with itself or an operand"
            )
    return found


def by_views(
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rows_scaled: bool,
) -> torch.Tensor:
    """Compute a @ b (+ bias) by one call of `product`, with the arguments of aotmm::mm, between torch's reshapes.

    It is for code that must see every step: autograd, tracing, functorch, sharding. Unlike `products` it decides by
    shapes alone. A tensor that does not reshape as a view is copied, as by `torch.matmul`.

    Raises:
        ValueError: the shapes do not multiply, or bias does not broadcast.
    """
    if b.dim() == _MATRIX <= a.dim() and (bias is None or bias.dim() == 1) and not rows_scaled:
        # rows times a matrix, as in most layers, in the fewest steps; `product` checks sizes itself
        if a.dim() == _MATRIX:
            return product(a, b, bias)
        return product(a.flatten(0, -2), b, bias).reshape(*a.shape[:-1], b.shape[1])
    shape = result_shape(a, b)
    vector, matrix = _bias_of(bias, shape, b)
    if b.dim() == 1:
        b = b.unsqueeze(-1)
    if a.dim() == 1:
        a = a.unsqueeze(0)
    batch, (M, K), N = shape[: max(a.dim(), b.dim()) - 2], a.shape[-2:], b.shape[-1]
    count = math.prod(batch)
    whole: tuple[int, ...]
    if math.prod(b.shape[:-2]) == 1 and not rows_scaled:
        a, b, whole = _shaped(a, (count * M, K)), _shaped(b, (K, N)), (count * M, N)
    else:
        a, b = (_batch(x, batch, count) for x in (a, b))
        whole = (count, M, N) if max(a.dim(), b.dim()) > _MATRIX else (M, N)
    result = product(a, b, vector if matrix is None else _shaped(matrix, whole))
    return _shaped(result, shape)


def _batch(tensor: torch.Tensor, batch: tuple[int, ...], count: int) -> torch.Tensor:
    """Return the `count` matrices of a batch as one dimension, or the matrix that is the same for all."""
    last = tensor.shape[-2:]
    if math.prod(tensor.shape[:-2]) == 1:
        return _shaped(tensor, last)
    tensor = tensor if tensor.shape[:-2] == batch else tensor.expand(*batch, *last)
    return _shaped(tensor, (count, *last))


def _shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape, but skip the step if there is nothing to do: steps cost time in eager mode."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _bias_of(
    bias: torch.Tensor | None, shape: tuple[int, ...], b: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the bias as a vector of N, or expanded to the result's shape."""
    if bias is None:
        return None, None
    if bias.dim() == 1 and b.dim() > 1 and bias.shape[0] in (1, b.shape[-1]):
        return bias, None
    try:
        return None, bias.expand(shape)
    except RuntimeError as error:
        raise ValueError(f"bias is {tuple(bias.shape)}, it must broadcast to {tuple(shape)}") from error


def _split(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, rows_scaled: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    count = out.dim() - 2
    if count == 0:
        yield a, b, out, bias
        return
    shared = all(size == 1 or stride == 0 for size, stride in zip(b.shape[:-2], b.stride()[:-2], strict=True))
    if shared and not rows_scaled:
        rows = _merge([a, out, bias], count + 1)
        if rows is not None:
            yield rows[0], b[(0,) * count], rows[1], rows[2] if bias is not None else None
            return
    batches = _merge([a, b, out, bias], count)
    if batches is not None:
        yield batches[0], batches[1], batches[2], batches[3] if bias is not None else None
        return
    for index in range(out.shape[0]):
        part = None if bias is None else bias[index]
        yield from _split(a[index], b[index], out[index], part, rows_scaled=rows_scaled)


def _merge(tensors: list[torch.Tensor | None], count: int) -> list[torch.Tensor] | None:
    """Return views of the tensors with their first `count` dimensions as one, or None if strides do not allow it.

    Tensors that are None stay out of the list.
    """
    views = []
    for tensor in tensors:
        if tensor is None:
            continue
        size, stride = 1, 0
        for dimension in range(count - 1, -1, -1):
            if tensor.shape[dimension] == 1:
                continue
            if size == 1:
                stride = tensor.stride(dimension)
            elif tensor.stride(dimension) != stride * size:
                return None
            size *= tensor.shape[dimension]
        views.append(tensor.as_strided((size, *tensor.shape[count:]), (stride, *tensor.stride()[count:])))
    return views


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < covered:
                return True
            covered += (size - 1) * stride
    return False


def _ranges_meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    def end(tensor: torch.Tensor) -> int:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr() + (last + 1) * tensor.element_size()

    return bool(x.numel() and y.numel() and x.data_ptr() < end(y) and y.data_ptr() < end(x))
