"""The judge itself: with a bug planted in the kernel or the launcher products are wrong, without one right."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.config_sets import config_set, tile
from tests.emulators import numerics
from tests.native.emulation import Case, Outcome, Product, missing
from tests.native.mutants import Mutant, executed
from tests.native.truth import truth

ARCH = "gfx90a"  # compiles in a second
CONFIGS = config_set(
    tile(32, 32, 32, 2, 2),
    tile(32, 32, 32, 2, 2, split=True),
    dtypes=["fp16"],
    layouts=["nn"],
    epilogues=["bias_relu"],
)
KERNEL, EPILOGUE = "kernels/tile.py", "kernels/epilogue.py"
PROBLEM, GUARDS, LAUNCH, CORE = "native/problem.c", "native/kernel.h", "native/launch.c", "native/core.h"
REDUCE, COPY = "kernels/reduce.py", "kernels/copy.py"

EDGE = Product(40, 72, 104)
LOOSE = replace(EDGE, M=37, N=70, K=59, padding=1, offset=1)  # too few steps along K for slices
DEEP = replace(EDGE, K=1024, exact=False)
PRODUCTS = {
    "exact": EDGE,
    "random": replace(EDGE, exact=False),
    "deep": DEEP,
    "loose": LOOSE,
    "padded": replace(EDGE, padding=8),
    "batch": replace(EDGE, batch=2, gap=8),
    "finished": replace(EDGE, bias="matrix", activation="relu", scales="rows"),
    "vector": replace(LOOSE, bias="vector", activation="leaky_relu", exact=False),
    "special": replace(EDGE, special=True, exact=False, activation="relu"),
    "empty": replace(EDGE, K=0, bias="vector"),
    "split": replace(EDGE, K=2048, bias="vector"),
    "copied": replace(EDGE, M=352, N=352, K=256, offset=1, padding=1),  # too many tiles for slices
}


STORE = "mask=(rows[:, None] < M) & (cols[None, :] < N))\n\n\n@triton.jit\ndef partial"
MUTANTS = {
    "one K block dropped": Mutant(
        KERNEL, "in range(first_k,", "in range(first_k + BLOCK_K,", ("exact", "random", "deep", "loose", "split")
    ),
    "fp16 accumulator": Mutant(
        KERNEL, "out_dtype=ACC)\n", "out_dtype=ACC).to(tl.float16).to(ACC)\n", ("exact", "random", "deep")
    ),
    "output truncated": Mutant(
        KERNEL,
        "tl.store(c_ptrs, acc.to",
        "acc = (acc.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n    tl.store(c_ptrs, acc.to",
        ("exact", "random", "loose"),
    ),
    "M and N swapped": Mutant(
        KERNEL, STORE, STORE.replace("< M", "< ?").replace("< N", "< M").replace("?", "N"), ("exact", "loose")
    ),
    "tiles of M and N swapped": Mutant(KERNEL, "tiles_n = tl.cdiv(N,", "tiles_n = tl.cdiv(M,", ("exact", "random")),
    "a stride off by one": Mutant(
        KERNEL, "rows[:, None] * stride_cm +", "rows[:, None] * (stride_cm + 1) +", ("exact", "random", "loose")
    ),
    "a batch stride off by one": Mutant(KERNEL, "z * stride_bz", "z * (stride_bz + 1)", ("batch",)),
    "K tail of A unmasked": Mutant(
        KERNEL, "tl.load(a_ptrs, mask=ks[None, :] < K - k, other=0.0)", "tl.load(a_ptrs)", ("exact", "padded", "loose")
    ),
    "K tail unmasked": Mutant(KERNEL, "< K - k", "< K + BLOCK_K", ("exact", "random", "loose")),
    "N edge unmasked": Mutant(KERNEL, STORE, STORE.replace(" & (cols[None, :] < N)", ""), ("exact", "random", "loose")),
    "M edge unmasked": Mutant(KERNEL, STORE, STORE.replace("(rows[:, None] < M) & ", ""), ("exact", "random", "loose")),
    "activation before bias": Mutant(
        EPILOGUE,
        '    if EPILOGUE != "none":\n',
        '    acc = linear(acc, activation, slope)\n    if EPILOGUE != "none":\n',
        ("finished",),
    ),
    "NaN lost in the activation": Mutant(EPILOGUE, "PropagateNan.ALL", "PropagateNan.NONE", ("special",)),
    "scale of the wrong row": Mutant(
        EPILOGUE, "rows.to(tl.int64) * stride_scale_a", "(rows ^ 1).to(tl.int64) * stride_scale_a", ("finished",)
    ),
    "bias of the next column": Mutant(
        EPILOGUE,
        "cols.to(tl.int64) * stride_bias_n, mask=cols < N",
        "(cols ^ 1).to(tl.int64) * stride_bias_n, mask=cols < N",
        ("empty", "vector", "split"),
    ),
    "no launch bounds of N": Mutant(
        CORE, "saturated(tiles_of(kernel, M, N)", "saturated(tiles_of(kernel, M, ((void)N, M))", ("exact",)
    ),
    "batch not launched": Mutant(
        CORE, "saturated(tiles_of(kernel, M, N), p->batch)", "tiles_of(kernel, M, N)", ("batch",)
    ),
    "guards of alignment not checked": Mutant(
        GUARDS, "return ((uint64_t)q->value", "return c->mask != UINT64_MAX || ((uint64_t)q->value", ("loose",)
    ),
    "a slice left out": Mutant(REDUCE, "tl.range(0, split,", "tl.range(1, split,", ("split",)),
    "sums of the next row": Mutant(
        REDUCE,
        "rows.to(tl.int64)[:, None] * workspace_stride_m",
        "(rows ^ 1).to(tl.int64)[:, None] * workspace_stride_m",
        ("split",),
    ),
    "an operand copied to where another lies": Mutant(
        PROBLEM, "    address = behind(address, layouts[i].bytes);", "", ("copied",)
    ),
    "lines of copies overlap": Mutant(
        PROBLEM, "found.pitch = bytes / element_bytes;", "found.pitch = bytes / element_bytes - 64;", ("copied",)
    ),
    "C not copied back": Mutant(LAUNCH, "status == AOTMM_OK && plan->copies & AOTMM_COPY_C", "0", ("copied",)),
    "a copy shifted": Mutant(
        COPY, "tl.load(source_ptrs, mask=inside)", "tl.load(source_ptrs + 1, mask=inside)", ("copied",)
    ),
    "strides swapped": Mutant(
        PROBLEM,
        "memcpy(value, p, AOTMM_PRODUCT_SLOPE * sizeof *value);",
        "memcpy(value, p, AOTMM_PRODUCT_SLOPE * sizeof *value);"
        " value[AOTMM_PRODUCT_STRIDE_AM] = p->stride_bk; value[AOTMM_PRODUCT_STRIDE_BK] = p->stride_am;",
        ("exact", "random"),
    ),
    "bias taken for a vector": Mutant(PROBLEM, "? 2 : 1;", "? 1 : 1;", ("finished",)),
}


@functools.cache
def outcomes() -> dict[str, Future[dict[str, Outcome]]]:
    """What becomes of the products by mutant; "" is the unmodified kernel. Its build comes first.

    The others then start at once, on every processor, and compile only what their mutation changes.
    """
    cache = Path(tempfile.mkdtemp(prefix="aotmm-mutants-"))
    atexit.register(shutil.rmtree, cache)
    pool, what = ThreadPoolExecutor(2), (ARCH, CONFIGS, PRODUCTS, cache)
    found = {"": pool.submit(executed, None, *what)}
    wait(found.values())
    found |= {name: pool.submit(executed, mutant, *what) for name, mutant in MUTANTS.items()}
    pool.shutdown(wait=False)
    return found


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if reason := missing(ARCH):
        pytest.skip(reason)


def test_what_is_right_is_called_right() -> None:
    """The unmodified kernels pass every product that the mutants fail, those that guard something and the generic."""
    found = outcomes()[""].result()
    assert [name for name, outcome in found.items() if outcome.complaints] == []
    assert {"_any_" in outcome.kernel for outcome in found.values()} == {True, False}
    assert {name for mutant in MUTANTS.values() for name in mutant.seen_by} == set(PRODUCTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrong_is_called_wrong(name: str) -> None:
    """A planted bug is noticed by each product that can show it."""
    found = outcomes()[name].result()
    assert [product for product, outcome in found.items() if not outcome.complaints] == []


@pytest.mark.parametrize(
    "name", ["one K block dropped", "fp16 accumulator", "output truncated", "activation before bias"]
)
def test_wrong_numbers_are_noticed_by_the_numbers(name: str) -> None:
    """Bugs that touch no memory they should not are found by exact comparison or the bounds, not by the interpreter."""
    for outcome in outcomes()[name].result().values():
        (complaint,) = outcome.complaints
        assert complaint.startswith("error/bound ")
        assert outcome.mismatches


@pytest.mark.parametrize(
    "product",
    [
        EDGE,
        replace(EDGE, dtype="bf16", out="bf16", activation="leaky_relu", bias="matrix"),
        replace(EDGE, out="fp32", scales="rows"),
        replace(EDGE, dtype="int8", out="int32"),
        replace(EDGE, dtype="int8", out="int32", exact=False, batch=2),
    ],
    ids=lambda product: f"{product.dtype}-{product.out}-{product.batch}",
)
def test_one_bit_of_one_element(product: Product) -> None:
    """The right values are called right; with the last bit of one of them flipped they are wrong. No kernel runs."""
    case = Case(product)
    a, b = numerics.decode(case.a, product.dtype), numerics.decode(case.b, product.dtype)
    c = case.operands["C"].view
    with np.errstate(all="ignore"):
        c[...] = numerics.encode(truth(a, b, case.epilogue, dtype=product.dtype, flushes=True)[1], product.out)
    assert case.complaints(case.judge(ARCH)) == []
    c[-1, 7:8, 9:10].view(f"u{c.itemsize}")[...] ^= 1
    assert case.judge(ARCH).mismatches == 1
    assert len(case.complaints(case.judge(ARCH))) == 1
