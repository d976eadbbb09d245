"""Constants and inputs of the time model, as far as they depend on kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotmm.pack.schema import Config, Guard
from aotmm.pack.time_model import (
    FITTED,
    HIDDEN,
    INPUTS,
    KERNEL_INPUTS,
    PDL_INPUTS,
    PLAN_INPUTS,
    PROBLEM_INPUTS,
    SECOND,
    Network,
    beside,
    busy,
    concurrent_tiles,
    constants,
    fitted,
    kernel_inputs,
)
from aotmm.problem import DTYPES
from aotmm.target import target
from tests.samples import kernel
from tests.unit.pack.test_table import TABLE

H200 = target("sm90")
TILE = replace(kernel("tile"), role="product", config=Config(128, 256, 64, 4, 8), vector_bytes=16, fast_accum=False)


def test_a_step_is_bound_by_the_tensor_cores() -> None:
    """A step takes its multiply-adds at the data sheet's rate of one multiprocessor, by type and by clock."""
    rate = H200.tflops * 1e12 / 2 / H200.multiprocessors  # multiply-adds per second
    step = constants(TILE, H200).ns_per_k_step
    assert step == pytest.approx(128 * 256 * 64 / rate * 1e9)
    assert constants(replace(TILE, dtype_a="int8"), H200).ns_per_k_step == pytest.approx(step / 2)
    tf32 = replace(TILE, dtype_a="tf32", family="cooperative")
    assert constants(tf32, H200).ns_per_k_step == pytest.approx(2 * step)
    assert constants(replace(tf32, family="tile"), H200).ns_per_k_step == pytest.approx(6 * step), "without wgmma"
    a100 = target("sm80")
    (once, _), (twice, _) = (
        (constants(replace(TILE, dtype_a=name, family="cooperative"), a100).ns_per_k_step, name)
        for name in ("fp16", "tf32")
    )
    assert twice == pytest.approx(2 * once), "no GPU before has wgmma"
    pair = replace(TILE, config=replace(TILE.config, cluster_n=2))
    assert constants(pair, H200).ns_per_k_step == pytest.approx(step / 2), "each has a half"
    slow = replace(TABLE, clock_mhz=H200.clock_mhz // 2)
    assert constants(TILE, H200, slow).ns_per_k_step == pytest.approx(2 * step)


def test_blocks_of_fma_share_a_multiprocessor() -> None:
    """As many as fit do, by registers and by shared memory, and 3.5 keep it busy; each takes in its part."""
    one = replace(TILE, dtype_a="fp32", config=Config(64, 64, 16, 4, 2))
    six = replace(one, family="fma")
    large = replace(six, config=Config(128, 64, 16, 4, 2))
    assert [beside(each, H200) for each in (one, six, large)] == [1, 6, 4]
    assert beside(six, H200._replace(shared_bytes=99 << 10)) == 3
    assert (busy(one, H200), busy(six, H200)) == (1, 3.5)
    assert constants(six, H200).ns_per_taken_byte == pytest.approx(6 * constants(one, H200).ns_per_taken_byte)
    assert constants(six, H200).ns_per_loaded_byte == pytest.approx(constants(one, H200).ns_per_loaded_byte)
    assert concurrent_tiles(132, 1, 6) == 792


def test_blocks_of_tile_share_a_multiprocessor_without_wgmma() -> None:
    """Those of large tiles by registers, of many stages by shared memory; each takes as long as its part, and waits."""
    a100, made = target("sm80"), replace(TILE, family="tile")
    for config, count in (
        (Config(128, 256, 64, 3, 8), 1),
        (Config(128, 128, 32, 4, 4), 2),
        (Config(64, 64, 64, 4, 4), 3),
        (Config(16, 64, 128, 4, 4), 2),
    ):
        kernel = replace(made, config=config)
        assert [beside(kernel, row) for row in (a100, H200, target("gfx90a"))] == [count, 1, 1]
        macs = config.block_m * config.block_n * config.block_k
        step = macs / (a100.tflops * 1e3 / 2 / a100.multiprocessors) + 40 * 1980 / 1410
        assert constants(kernel, a100).ns_per_k_step == pytest.approx(max(count, 1.5) * step)
        bytes_per_ns = max(count, 1.5) / constants(kernel, a100).ns_per_taken_byte
        assert bytes_per_ns == pytest.approx(64 * 1.410, rel=0.01), "64 in a cycle, for all of them together"
    assert (busy(made, a100), busy(made, H200), busy(made, target("gfx90a"))) == (1.5, 1, 1)


def test_multistage_and_short_are_estimated_as_tile() -> None:
    """They have the constants of `tile` for the same tile; the ring of `multistage` has a stage more in memory."""
    large = Config(128, 256, 64, 3, 8)
    for row in (target("sm80"), H200):
        tile, own = (replace(TILE, family=family, config=large) for family in ("tile", "multistage"))
        assert constants(own, row) == constants(tile, row)
        assert (beside(own, row), busy(own, row)) == (beside(tile, row), busy(tile, row))
        short = replace(TILE, family="short", config=replace(large, num_stages=2))
        assert (constants(short, row), busy(short, row)) == (constants(tile, row), busy(tile, row))
    small = replace(TILE, family="multistage", config=Config(64, 64, 64, 4, 4))
    assert [beside(each, target("sm80")) for each in (small, replace(small, family="tile"))] == [2, 3]


def test_full_precision_costs_what_threads_read() -> None:
    """A multiply-add of `fma` takes longer the fewer sums a thread has; one of `tile` three times the data sheet's."""
    rate = H200.tflops * 1e12 / 2 / H200.multiprocessors / (DTYPES["fp32"].mac_cost / DTYPES["fp16"].mac_cost)
    costs = []
    for block, warps in ((32, 2), (32, 1), (64, 4), (64, 2)):
        made = replace(TILE, dtype_a="fp32", family="fma", config=Config(block, block, 16, 4, warps))
        costs.append(constants(made, H200).ns_per_k_step / beside(made, H200) / (block * block * 16 / rate * 1e9))
    assert costs[1] == pytest.approx(costs[2])
    assert costs[0] > costs[1] > costs[3] > 1
    plain = replace(TILE, dtype_a="fp32", config=Config(64, 64, 32, 2, 4))
    assert constants(plain, H200).ns_per_k_step == pytest.approx(3 * 64 * 64 * 32 / rate * 1e9)


def test_split_fp32_costs_its_products_of_bf16() -> None:
    """A multiply-add of Hopper's families takes the time of six in 16 bits, and of splitting."""
    split, half = (
        replace(TILE, dtype_a=dtype, family="swapped", config=Config(64, 128, 32, 6, 8)) for dtype in ("fp32", "fp16")
    )
    assert 6 < constants(split, H200).ns_per_k_step / constants(half, H200).ns_per_k_step < 8


def test_precise_sums_of_fp8_cost_as_much_again() -> None:
    """Of `tile` alone, which adds up outside of the tensor cores; Hopper's families hide it."""
    fast, precise = (replace(TILE, dtype_a="fp8e4", fast_accum=fast) for fast in (True, False))
    assert constants(precise, H200).ns_per_k_step > constants(fast, H200).ns_per_k_step
    own = [replace(each, family="pingpong") for each in (fast, precise)]
    assert constants(own[0], H200) == constants(own[1], H200)


def test_memory_is_the_devices() -> None:
    """A byte takes what the table's device has; a fact that is not known is the data sheet's."""
    of_h200 = constants(TILE, H200).ns_per_byte
    assert of_h200 * 0.9 == pytest.approx(1 / H200.bandwidth)
    slow = replace(TABLE, memory_gbps=int(H200.bandwidth / 4))
    assert constants(TILE, H200, slow).ns_per_byte == pytest.approx(4 * of_h200)
    unknown = replace(TABLE, memory_gbps=0, clock_mhz=0)
    assert constants(TILE, H200, unknown) == constants(TILE, H200)


def test_narrow_loads_are_slow() -> None:
    """A multiprocessor takes in 4 bytes at a time a fourth as fast as 16."""
    wide, narrow = (constants(replace(TILE, vector_bytes=each), H200) for each in (16, 4))
    assert narrow.ns_per_taken_byte == pytest.approx(4 * wide.ns_per_taken_byte)
    assert narrow.ns_per_loaded_byte == pytest.approx(4 * wide.ns_per_loaded_byte)
    assert narrow.ns_per_k_step == wide.ns_per_k_step


def test_helpers_are_bound_by_memory() -> None:
    """A reduce and a copy have no steps; a copy without a contiguous side takes far longer."""
    reduce, copy = (constants(replace(TILE, role=role), H200) for role in ("reduce", "copy"))
    for helper in (reduce, copy):
        assert helper.base_ns > 0
        assert helper.ns_per_byte > 0
        assert (helper.ns_per_k_step, helper.ns_per_tile, helper.ns_per_loaded_byte) == (0, 0, 0)
    guarded, free = (
        constants(replace(TILE, role="copy", guards=guards), H200) for guards in ((Guard("M", "below", 9),), ())
    )
    assert free.ns_per_byte == pytest.approx(8 / 0.84 * guarded.ns_per_byte)


def test_factors_of_constants() -> None:
    """Each of a table is that of its constant, in the order of their names; a byte of memory has none."""
    plain, factors = constants(TILE, H200), (2.0, 3.0, 5.0, 7.0, 11.0)
    found = fitted(plain, factors)
    assert FITTED == ("base_ns", "ns_per_tile", "ns_per_k_step", "ns_per_taken_byte", "ns_per_loaded_byte")
    assert [getattr(found, name) / getattr(plain, name) for name in FITTED] == pytest.approx(factors)
    assert found.ns_per_byte == plain.ns_per_byte


def test_inputs_of_a_kernel() -> None:
    """Tile, ring, family, cluster, role and type, in the order of their names; a ring is that of one block."""
    swapped = replace(TILE, family="swapped", role="partial", dtype_a="fp8e4", fast_accum=True)
    found = dict(zip(KERNEL_INPUTS, kernel_inputs(swapped), strict=True))
    assert found == {
        "log2 block_m": 7, "log2 block_n": 8, "lines of K": 0.5, "log2 ring": pytest.approx(16.585, abs=1e-3),
        "warpgroups": 2, "cooperative": 0, "pingpong": 0, "swapped": 1, "clustered": 0,
        "log2 cluster_m": 0, "log2 cluster_n": 0, "partial": 1, "1 byte": 1, "fast_accum": 1,
    }  # fmt: skip
    shared = replace(TILE, config=replace(TILE.config, cluster_m=2, cluster_n=4))
    found = dict(zip(KERNEL_INPUTS, kernel_inputs(shared), strict=True))
    assert {name: found[name] for name in ("log2 block_m", "log2 ring", "clustered", "log2 cluster_m")} == {
        "log2 block_m": 7, "log2 ring": 16, "clustered": 1, "log2 cluster_m": 1,
    }  # fmt: skip
    assert found["log2 cluster_n"] == 2


def test_weights_in_parts() -> None:
    """Launchers get the rows of kernels summed up, and those of problems, plans, pdl and hidden nodes as they are."""
    rows = tuple((float(row), *(0.0,) * (HIDDEN - 1)) for row in range(len(INPUTS)))
    second, of_second = ((2.0,) * SECOND,) * HIDDEN, ((0.0,) * SECOND, (1.0,) * SECOND)
    network = Network(rows, (0.5,) * HIDDEN, second, *of_second, 0.0, (1.0,) * len(FITTED))
    first, *others = network.hidden(TILE)
    assert first == pytest.approx(0.5 + sum(row * value for row, value in enumerate(kernel_inputs(TILE))))
    assert others == [0.5] * (HIDDEN - 1)
    *parts, of_hidden = network.parts
    assert of_hidden == second
    assert [len(part) for part in parts] == [len(PROBLEM_INPUTS), len(PLAN_INPUTS), len(PDL_INPUTS)]
    assert [row for part in parts for row in part] == list(rows[len(KERNEL_INPUTS) :])
