"""The bounds of a right product: docs/numerics.md in numbers, the same for arrays of torch and of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aotmm.problem import ACTIVATIONS
from aotmm.timing.correctness import ETA, U_FP8, U_OUT, Epilogue, allowed, argument, sizes, sum_errors


def test_bounds_of_a_sum() -> None:
    """Those of the docs for one sum of 64; without end where K u reaches 1, also for a sum of zeros."""
    a, b = np.full((1, 64), 2.0), np.full((64, 1), -3.0)
    spread, deviation = sizes(a, b)
    assert (spread.item(), deviation.item()) == (6 * 64, 6 * 8)
    deterministic, probabilistic = sum_errors(64, spread, deviation, 2.0**-23)
    assert deterministic.item() == 64 * 2.0**-23 / (1 - 64 * 2.0**-23) * 384
    assert probabilistic.item() == 8 * 2.0**-23 * 2 * 6 * 48
    deterministic, _ = sum_errors(2**13, 0 * spread, 0 * deviation, U_FP8)
    assert deterministic.item() == float("inf")


def test_no_bound_is_none_in_an_epilogue_either() -> None:
    """Where no deterministic bound holds, for many products in fp8, the epilogue's is infinite too, and a number."""
    error, probable = sum_errors(8192, 1.0, 1.0, U_FP8)
    assert error == float("inf") > probable
    for epilogue in (Epilogue(), Epilogue(bias=1.0), Epilogue(scale_a=2.0, bias=1.0), Epilogue("relu")):
        x, inexact = argument(1.0, error, epilogue)
        assert inexact == allowed(x, x, inexact, epilogue, "fp32") == float("inf")


def test_bounds_of_scales_and_a_bias() -> None:
    """Two scales round twice, a bias rounds what is left of the sum, and both pass on the sum's error."""
    epilogue = Epilogue(bias=np.array([-99.0]), scale_a=np.array([[-2.0]]), scale_b=np.array([[0.5]]))
    x, error = argument(np.array([[-100.0]]), np.array([[1e-3]]), epilogue)
    assert x.item() == 1.0
    scaled = 1e-3 + 2 * 2.0**-24 / (1 - 2 * 2.0**-24) * (100 + 1e-3)
    assert error.item() == pytest.approx(scaled + 2.0**-24 * (1 + scaled), rel=1e-12)


@pytest.mark.parametrize("output", U_OUT)
def test_a_plain_result_is_rounded_once(output: str) -> None:
    """Neither relu nor the absence of an activation adds anything; gelu does, and magnifies the sum's error."""
    want, error = np.array([2.0]), np.array([1e-3])
    once = 1e-3 + U_OUT[output] * (2.0 + 1e-3) + ETA[output]
    assert allowed(want, want, error, Epilogue(), output) == once
    assert allowed(want, want, error, Epilogue("relu"), output) == once
    assert allowed(want, want, error, Epilogue("leaky_relu", -3.0), output) > 3e-3
    assert allowed(want, want, error, Epilogue("gelu"), output) > 1.13e-3 + 2.0**-19 * 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_and_numpy_agree(activation: str) -> None:
    """One formula serves both, to the last bits of float64."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape) for shape in ((5, 7), (7, 3), (3,), (5, 1), (1, 3))]
    found = []
    for a, b, bias, scale_a, scale_b in (arrays, [torch.tensor(array) for array in arrays]):
        epilogue = Epilogue(activation, 0.3, bias, scale_a, scale_b)
        for error in sum_errors(7, *sizes(a, b), 2.0**-23):
            x, inexact = argument(a @ b, error, epilogue)
            found.append(np.asarray(allowed(x, x, inexact, epilogue, "fp16")))
    for one, other in zip(found[:2], found[2:], strict=True):
        assert one == pytest.approx(other, rel=1e-12)
