"""Products of tensors of any rank as products of matrices and batches of matrices: views only, nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Product(NamedTuple):
    """Tensors of 2 or 3 dimensions: a ([batch,] M, K), b ([batch,] K, N), out and perhaps bias ([batch,] M, N)."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None


def result_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Shape of a @ b, as `torch.matmul` has it.

    Raises:
        ValueError: a tensor without dimensions, inner sizes that differ, or batches that do not broadcast.
    """
    found = f"a is {tuple(a.shape)} {a.dtype}, b is {tuple(b.shape)} {b.dtype}"
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"matmul needs tensors of at least 1 dimension: {found}")
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ValueError(f"the inner sizes differ: {found}; a is (..., M, K), b must be (..., K, N)")
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"the batch sizes do not broadcast: {found}") from error
    return (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.dim() > 1 else ()))


def products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> list[Product]:
    """What to launch for out = a @ b (+ bias): as few products as the strides allow, none if out is empty.

    Batch dimensions become rows where b is the same for all, else one batch dimension; what does not merge is looped.

    Args:
        a, b: tensors that multiply (`result_shape`).
        out: tensor of `result_shape(a, b)`.
        bias: vector of N, or a tensor of out's shape.

    Raises:
        ValueError: bias of another shape; out shares memory with itself or, over several products, with an operand.
    """
    if bias is not None and bias.shape not in ((b.shape[-1],) if b.dim() > 1 else (), out.shape):
        raise ValueError(f"bias is {tuple(bias.shape)}, it must be a vector of N or {tuple(out.shape)}")
    matrix = bias if bias is not None and bias.shape == out.shape and (out.dim() > 1 or b.dim() == 1) else None
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
    vector = bias if matrix is None else None
    found = [Product(x, y, z, vector if part is None else part) for x, y, z, part in _split(a, b, out, matrix)]
    if len(found) > 1 and (_overlaps_itself(out) or any(_ranges_meet(out, operand) for operand in (a, b))):
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} shares memory with itself or an operand"
        )
    return found


def _split(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    count = out.dim() - 2
    if count == 0:
        yield a, b, out, bias
        return
    if all(size == 1 or stride == 0 for size, stride in zip(b.shape[:-2], b.stride()[:-2], strict=True)):
        rows = _merge([a, out, bias], count + 1)
        if rows is not None:
            yield rows[0], b[(0,) * count], rows[1], rows[2] if bias is not None else None
            return
    batches = _merge([a, b, out, bias], count)
    if batches is not None:
        yield batches[0], batches[1], batches[2], batches[3] if bias is not None else None
        return
    for index in range(out.shape[0]):
        yield from _split(a[index], b[index], out[index], None if bias is None else bias[index])


def _merge(tensors: list[torch.Tensor | None], count: int) -> list[torch.Tensor] | None:
    """Views of the tensors with their first `count` dimensions as one, or None if the strides of one do not allow it.

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
    def last(tensor: torch.Tensor) -> int:
        elements = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr() + elements * tensor.element_size()

    return bool(x.numel() and y.numel() and x.data_ptr() <= last(y) and y.data_ptr() <= last(x))
