"""torch's own tests of operators, as its users would run them: opcheck, and the sample inputs of its matmul family."""

from __future__ import annotations

import pytest
import torch

from aotmm.runtime.library import Library
from aotmm.timing.check import OUTPUT_NAMES
from aotmm.timing.correctness import U_OUT, U_TENSOR_CORE, Epilogue, allowed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# torch's operators that are products, and how the library says the same.
PRODUCTS = ("matmul", "mm", "bmm", "mv", "__rmatmul__", "addmm", "nn.functional.linear")


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((5, 7), (7, 9)), {}),
        (((2, 5, 7), (2, 7, 9)), {}),
        (((5, 7), (7, 9), (9,)), {"activation": 3, "out_dtype": 0}),
    ],
    ids=["matrices", "batches", "epilogue"],
)
def test_opcheck(lib: Library, shapes: tuple[tuple[int, ...], ...], options: dict[str, int]) -> None:
    """torch.library.opcheck finds nothing wrong with schema, fake kernel and dispatch of both overloads."""
    assert lib.packs
    arguments = tuple(torch.randn(shape, device="cuda").half() for shape in shapes)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.aotmm.mm.default, arguments, options, test_utils=tests)
    out = torch.empty_like(torch.ops.aotmm.mm(*arguments, **options))
    options = {name: value for name, value in options.items() if name != "out_dtype"}
    torch.library.opcheck(torch.ops.aotmm.mm.out, arguments, {**options, "out": out}, test_utils=tests[:2])


def ours(lib: Library, name: str, sample: object) -> torch.Tensor:
    """The library's answer for one of torch's sample inputs; alpha of addmm is a scale, beta is in the bias."""
    first, arguments, options = sample.input.detach(), sample.args, sample.kwargs  # type: ignore[attr-defined]
    tensors = [value.detach() for value in arguments if isinstance(value, torch.Tensor)]
    with torch.no_grad():
        if name == "addmm":
            alpha = torch.tensor(float(options.get("alpha", 1)), device="cuda")
            bias = (first * options.get("beta", 1)).expand(tensors[0].shape[0], tensors[1].shape[1])
            return lib.matmul(*tensors, bias=bias, scale_a=alpha)
        if name == "nn.functional.linear":
            weight, bias = tensors[0], tensors[1] if len(tensors) > 1 else None
            return lib.matmul(first, weight.mT if weight.dim() > 1 else weight, bias=bias)
        if name == "__rmatmul__":
            return lib.matmul(tensors[0], first)
        return lib.matmul(first, tensors[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch's test module imports
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_sample_inputs(lib: Library, name: str, dtype: torch.dtype) -> None:
    """Every sample input that torch keeps for its products gives torch's shape, and its value within the bound."""
    pytest.importorskip("expecttest", reason="torch's sample inputs need the package expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (entry for entry in op_db if entry.name == name and not entry.variant_test_name)
    done = 0
    for sample in info.sample_inputs("cuda", dtype):  # type: ignore[no-untyped-call]
        got = ours(lib, name, sample)
        inputs, arguments = sample.input.double(), [x.double() if torch.is_tensor(x) else x for x in sample.args]
        want = info.op(inputs, *arguments, **sample.kwargs).detach()
        spread = info.op(inputs.abs(), *(x.abs() if torch.is_tensor(x) else x for x in arguments), **sample.kwargs)
        assert got.shape == want.shape
        assert got.dtype is dtype
        output = OUTPUT_NAMES[dtype]
        error = 64 * U_TENSOR_CORE * spread.detach()  # no sample is longer
        bound = allowed(want, want, error, Epilogue(), output)
        if name == "addmm":  # beta * input is rounded before
            bound += U_OUT[output] * inputs.detach().abs()
        assert ((got.double() - want).abs() <= bound).all()
        done += 1
    assert done
