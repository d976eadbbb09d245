"""Products of any rank as few products of matrices: what torch would compute of the parts is what torch computes."""

from __future__ import annotations

import random
import re

import pytest
import torch

from aotmm.runtime.views import products, result_shape

CASES = 2000
RANKS = ((5,), (3, 5), (2, 3, 5), (4, 2, 3, 5), (2, 1, 4, 3, 5))


def laid_out(dice: random.Random, values: torch.Tensor) -> torch.Tensor:
    """The same values in memory of another order and with gaps."""
    order = list(range(values.dim()))
    dice.shuffle(order)
    step = dice.choice((1, 1, 2))
    sizes = [values.shape[dimension] for dimension in order]
    if sizes:
        sizes[-1] *= step
    memory = torch.full([size + dice.choice((0, 0, 1)) for size in sizes], torch.nan, dtype=values.dtype)
    view = memory[tuple(slice(0, size) for size in sizes)]
    view = view[..., ::step] if sizes else view
    view = view.permute([order.index(dimension) for dimension in range(values.dim())])
    return view.copy_(values)


def integers(dice: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Small integers, so that sums are exact in any order."""
    return torch.tensor([float(dice.randint(-9, 9)) for _ in range(torch.Size(shape).numel())]).reshape(shape)


def batches(dice: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch sizes of two operands that broadcast."""
    whole = [dice.choice((1, 2, 3)) for _ in range(dice.randint(0, 3))]
    found = []
    for _ in range(2):
        part = [1 if dice.random() < 0.3 else size for size in whole]
        found.append(tuple(part[dice.randint(0, len(part)) :] if dice.random() < 0.3 else part))
    return found[0], found[1]


def test_random_products() -> None:
    """Thousands of ranks, strides, broadcasts and biases: all parts together give torch.matmul's result."""
    dice = random.Random(11)  # noqa: S311 - no secret
    counts = set()
    for _ in range(CASES):
        batch_a, batch_b = batches(dice)
        m, n, k = (dice.choice((0, 1, 2, 5)) if dice.random() < 0.3 else dice.randint(1, 6) for _ in range(3))
        shape_a = (k,) if dice.random() < 0.1 else (*batch_a, m, k)
        shape_b = (k,) if dice.random() < 0.1 else (*batch_b, k, n)
        a, b = laid_out(dice, integers(dice, shape_a)), laid_out(dice, integers(dice, shape_b))
        if dice.random() < 0.2 and b.dim() > 2:
            b = b[:1].expand(b.shape)
        want = torch.matmul(a, b)
        assert result_shape(a, b) == want.shape
        bias = None
        if dice.random() < 0.5:
            shape = [1 if dice.random() < 0.3 else size for size in want.shape]
            bias = laid_out(dice, integers(dice, tuple(shape[dice.randint(0, len(shape)) :])))
            want = want + bias
        out = laid_out(dice, torch.full(want.shape, -99.0))
        scaled = a.dim() > 1 and dice.random() < 0.3
        found = products(a, b, out, bias, rows_scaled=scaled)
        for part in found:
            assert part.out.dim() in (2, 3)
            assert not scaled or part.a.shape[-2] == a.shape[-2]
            assert (part.a.dim(), part.b.dim()) == (part.out.dim(),) * 2
            assert part.bias is None or part.bias.shape in ((1,), part.out.shape[-1:], part.out.shape)
            result = torch.matmul(part.a, part.b)
            part.out.copy_(result if part.bias is None else result + part.bias)
        assert torch.equal(out, want), (shape_a, shape_b)
        assert (found == []) == (want.numel() == 0)
        counts.add(len(found))
    assert counts >= {0, 1, 2, 3}


@pytest.mark.parametrize("shape", RANKS)
def test_contiguous_rows_are_one_product(shape: tuple[int, ...]) -> None:
    """Whatever the rank, contiguous rows times one matrix are one product of two dimensions, without a batch."""
    a, b = torch.zeros(shape), torch.zeros(5, 7)
    (part,) = products(a, b, torch.zeros(result_shape(a, b)), torch.zeros(7), rows_scaled=False)
    assert part.a.shape == (a.numel() // 5, 5)
    assert part.out.shape == (a.numel() // 5, 7)
    assert part.b.data_ptr() == b.data_ptr()


def test_contiguous_batches_are_one_product() -> None:
    """Batches of several dimensions are one launch with one batch dimension."""
    a, b = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5, 7)
    (part,) = products(a, b, torch.zeros(2, 3, 4, 7), torch.zeros(2, 3, 4, 7), rows_scaled=False)
    assert (part.a.shape, part.b.shape, part.out.shape) == ((6, 4, 5), (6, 5, 7), (6, 4, 7))


def test_batches_that_do_not_merge() -> None:
    """Batch dimensions whose strides do not merge take one product each; nothing is copied."""
    a, b = torch.zeros(2, 3, 4, 5), torch.zeros(3, 2, 5, 7).transpose(0, 1)
    parts = products(a, b, torch.zeros(2, 3, 4, 7), None, rows_scaled=False)
    assert [part.b.data_ptr() for part in parts] == [b[0].data_ptr(), b[1].data_ptr()]
    assert [part.a.shape for part in parts] == [(3, 4, 5)] * 2


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "words"),
    [
        ((), (3, 4), "at least 1 dimension"),
        ((3,), (), "at least 1 dimension"),
        ((2, 3), (4, 5), r"the inner sizes differ: a is \(2, 3\) torch.float32, b is \(4, 5\)"),
        ((3,), (4,), "the inner sizes differ"),
        ((2, 2, 3), (3, 3, 5), r"the batch sizes do not broadcast: a is \(2, 2, 3\)"),
    ],
)
def test_shapes_that_do_not_multiply(shape_a: tuple[int, ...], shape_b: tuple[int, ...], words: str) -> None:
    """What torch.matmul refuses is refused with both shapes."""
    with pytest.raises(ValueError, match=words):
        result_shape(torch.zeros(shape_a), torch.zeros(shape_b))


@pytest.mark.parametrize("shape", [(5,), (2,), (3, 7), (3, 2, 7), (2, 7, 1)])
def test_bias_of_another_shape(shape: tuple[int, ...]) -> None:
    """A bias that does not broadcast to the result is refused with both shapes."""
    a, b = torch.zeros(2, 5), torch.zeros(5, 7)
    words = f"bias is {shape}, it must broadcast to (2, 7)"
    with pytest.raises(ValueError, match=re.escape(words)):
        products(a, b, torch.zeros(2, 7), torch.zeros(shape), rows_scaled=False)


def test_out_that_shares_memory() -> None:
    """Where it takes several products, an `out` that overlaps itself or an operand is refused before the first."""
    a, b = torch.zeros(2, 3, 4, 4), torch.zeros(3, 2, 4, 4).transpose(0, 1)
    assert len(products(a, b, torch.zeros(2, 3, 4, 4), None, rows_scaled=False)) == 2
    for out in (a, b, torch.zeros(1, 3, 4, 4).expand(2, 3, 4, 4)):
        with pytest.raises(ValueError, match="shares memory with itself or an operand"):
            products(a, b, out, None, rows_scaled=False)
