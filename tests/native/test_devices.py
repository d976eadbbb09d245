"""Tuning tables and the devices they are for: which one counts, and how models are scaled for devices without."""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aotmm.pack.schema import Kernel
from aotmm.pack.table import Model, Sample, ShapeTimes, Table, read
from aotmm.pack.time_model import HIDDEN, INPUTS, SECOND, Network, beside, busy, constants
from aotmm.runtime.launcher import Launcher, Plan, Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice, listed_device, measured_device, nominal_device
from aotmm.target import GPUS, target, ways_to_run
from aotmm.timing.problems import Case, Shape
from aotmm.tune.candidates import problem_of
from tests.build.packs import clusters_pack, default_pack, plans_pack, relinked
from tests.native.emulation import Emulator, missing, own_process

SHARED = 232_448
LIMIT = 64 << 20  # of workspaces
MEASURED, UNMEASURED = (
    Problem(512, 512, k, (k, 1), (512, 1), (512, 1), "fp16", "fp16", "fp16", "none", 1 << 40, 2 << 40, 3 << 40)
    for k in (1024, 1088)
)


def described(name: str, *facts: int) -> CDevice:
    """A device: multiprocessors, MHz, GB/s."""
    multiprocessors, clock, memory = facts
    return CDevice(multiprocessors, SHARED, clock, memory, 0, name.encode())


def table_for(kernel: Kernel, device: CDevice, ns: int) -> Table:
    """A table that has measured one config on MEASURED, and corrects no prediction."""
    times = (Sample(kernel.config_name, 1, pdl=False, copies=0, ns=ns),)
    shape = ShapeTimes(2, "nn", "plain", 512, 512, 1024, 0, 0, False, times)  # noqa: FBT003
    facts = device.multiprocessors, device.clock_mhz, device.memory_gbps, device.l2_bytes
    words = "none", "none", "0", "2026-11-20"
    return Table("sm80", device.name.decode(), *facts, *words, 0, None, (), (shape,))


ONE, TWO = described("one", 100, 1000, 1000), described("two", 200, 2000, 4000)


def product(kernels: tuple[Kernel, ...]) -> Kernel:
    """The one that `table_for` is about."""
    return next(kernel for kernel in kernels if (kernel.role, kernel.layout) == ("product", "nn"))


def with_tables(folder: Path, *devices: CDevice) -> Path:
    """A pack with a table of each device: 100 ns the first, 200 ns the second."""
    kernels = open_pack(plans_pack("sm80")).manifest.kernels
    tables = [table_for(product(kernels), device, 100 * (1 + i)) for i, device in enumerate(devices)]
    return relinked(plans_pack("sm80"), folder, kernels, tables)


@pytest.fixture
def two(tmp_path: Path) -> Launcher:
    """The launcher of a pack with two tables."""
    return open_pack(with_tables(tmp_path, ONE, TWO)).launcher


def cost(mm: Launcher, device: CDevice) -> tuple[int, bool]:
    """Of the product of `table_for`: the time of MEASURED, and whether it was measured."""
    number = mm.kernels.index(product(mm.kernels))
    plan = mm.check(MEASURED, device, number).plan
    assert plan is not None
    return plan.cost, plan.measured


def test_tables_are_picked_by_name(two: Launcher) -> None:
    """Of two tables in a pack, that of the device's name counts, whatever its other facts are."""
    for device, ns in (
        (ONE, 100),
        (TWO, 200),
        (described("one", 7, 0, 0), 100),
        (described("two", 100, 1000, 1000), 200),
    ):
        assert cost(two, device) == (ns, True)
        found = two.origin(device)
        assert (found.table, found.measured, found.compute, found.memory) == (device.name.decode(), True, 1.0, 1.0)
        assert str(found) == f"table of {device.name.decode()}"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (described("", 100, 1000, 1000), "one"),
        (described("other", 200, 2000, 4000), "two"),
        (described("other", 110, 1100, 900), "one"),
        (described("other", 110, 1000, 4000), "two"),  # 1.1 of the compute of one, but 4 of its memory
        (described("other", 200, 0, 0), "two"),
        (described("one or two", 3, 0, 0), "one"),  # equally far in what is known, and nearer in multiprocessors
    ],
)
def test_others_go_by_the_nearest(two: Launcher, device: CDevice, name: str) -> None:
    """A device without a table has no measured times; its models are those of the table nearest in speed."""
    found = two.origin(device)
    assert (found.table, found.measured) == (name, False)
    assert not cost(two, device)[1]


@own_process
def test_gpus_of_several_models(tmp_path: Path) -> None:
    """Plans for GPUs of different names in one process are those of each one's table, also remembered ones."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    emulator = Emulator(with_tables(tmp_path, ONE, TWO), devices=3, execute=False)
    emulator.driver.name(1, "two")
    emulator.driver.name(2, "one")
    for _ in range(3):
        plans = [emulator.launcher.plan(MEASURED, ordinal, LIMIT) for ordinal in range(3)]
        assert [plan.measured for plan in plans] == [False, True, True]
        assert [plan.cost for plan in plans[1:]] == [200, 100]


def predicted(mm: Launcher, device: CDevice) -> int:
    """Time of the product of `table_for` on UNMEASURED, in ns."""
    plan = mm.check(UNMEASURED, device, mm.kernels.index(product(mm.kernels))).plan
    assert plan is not None
    return plan.cost


def test_models_are_scaled(tmp_path: Path) -> None:
    """All but the begin of a launch takes twice as long at half of all speeds; a slower clock or memory alone, less.

    What is listed of a GPU counts also for a slice of it: 148 TFLOP/s of an H20, and 0.59 of what an H100 SXM sustains.
    """
    mm = open_pack(with_tables(tmp_path, ONE)).launcher
    whole, half, quarter = (predicted(mm, described("", 100, 1000 // part, 1000 // part)) for part in (1, 2, 4))
    assert quarter - half == pytest.approx(2 * (half - whole), abs=4)
    assert half > whole
    for facts in ((100, 500, 1000), (100, 1000, 500)):
        assert whole < predicted(mm, described("", *facts)) < half
    for facts in ((100, 0, 0), (100, 1000, 0), (100, 0, 1000)):
        assert predicted(mm, described("", *facts)) == whole, "what is unknown is taken to be as fast"
    for name, sustained in (("NVIDIA H100 NVL", 488.5 / 821.2), ("NVIDIA H200 NVL", 835.5 / 989.5)):
        slower = predicted(mm, described(name, 100, 1000, 1000))
        assert whole < slower < whole / sustained
        assert predicted(mm, described(f"{name} MIG 7g.94gb", 100, 1000, 1000)) == slower
        assert predicted(mm, described(f"{name}s", 100, 1000, 1000)) == whole
    config = product(mm.kernels).config
    macs = config.block_m * config.block_n * config.block_k * -(-UNMEASURED.K // config.block_k)
    assert predicted(mm, described("NVIDIA H20", 100, 1000, 1000)) > macs * 2 / (1000 * 148 / 78) > whole / 4


def test_factors_are_of_every_device(two: Launcher) -> None:
    """A table's factors of constants count on others too: what they make of its device's constants is scaled."""
    kernel, nothing, none = product(two.kernels), (0.0,) * HIDDEN, (0.0,) * SECOND
    network = Network((nothing,) * len(INPUTS), nothing, (none,) * HIDDEN, none, none, 0.0, (1.0,) * 5)
    plain = replace(table_for(kernel, ONE, 100), network=network)
    model = Model(kernel.config_name, 2, kernel.kind, 0.0, (3.0, 50.0, 1.0, 1.0, 1.0), nothing)

    def costs(table: Table) -> tuple[int, int]:
        two.retune(table)
        fast, slow = (predicted(two, described("", 100, 1000 // part, 1000 // part)) for part in (1, 2))
        return fast, slow

    (fast, slow), (fitted_fast, fitted_slow) = costs(plain), costs(replace(plain, models=(model,)))
    c, row = constants(kernel, target("sm80"), plain), target("sm80")
    tile = c.ns_per_tile * busy(kernel, row) / max(beside(kernel, row), busy(kernel, row))  # of one on a multiprocessor
    assert 2 * fast - slow == pytest.approx(c.base_ns, abs=4), "the begin of a launch is not scaled"
    assert fitted_fast - fast == pytest.approx(2 * c.base_ns + 49 * tile, abs=4)
    assert fitted_slow - slow == pytest.approx(2 * c.base_ns + 2 * 49 * tile, abs=4)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (described("", 100, 1000, 1000), "compute 1.00, memory 1.00"),
        (described("", 150, 500, 2000), "compute 0.75, memory 2.00"),
        (described("", 150, 0, 0), "compute 1.50, memory 1.00"),
        (described("NVIDIA H100 NVL", 100, 900, 500), "compute 0.59, memory 0.50"),
        (described("NVIDIA H20", 78, 1000, 1000), "compute 0.78, memory 1.00, tensor cores 148 TFLOP/s"),
    ],
)
def test_scaling_is_told(tmp_path: Path, device: CDevice, words: str) -> None:
    """In words, as `aotmm doctor` and `aotmm explain` print it."""
    mm = open_pack(with_tables(tmp_path, ONE)).launcher
    assert str(mm.origin(device)) == f"models scaled from one: {words}, no measured times"


def test_a_pack_without_tables() -> None:
    """Goes by estimates for its arch's GPU, scaled to the device by its facts and by what is listed, and says so."""
    mm = open_pack(plans_pack("sm80")).launcher
    for device, words in (
        (nominal_device(target("sm80")), "compute 1.00, memory 1.00"),
        (described("", 54, 1410, 3110), "compute 0.50, memory 2.00"),
        (described("", 108, 0, 0), "compute 1.00, memory 1.00"),
        (listed_device("NVIDIA A10"), "compute 0.80, memory 0.39, tensor cores 125 TFLOP/s"),
    ):
        said = f"estimates from tiles and data sheets, scaled: {words}; never measured on such a GPU"
        assert str(mm.origin(device)) == said
    assert mm.origin(ONE).table is None
    half, whole = (predicted(mm, described("", 108, clock, clock)) for clock in (500, 1000))
    assert half > 1.2 * whole
    clock = ((1410, 1555), (705, 1555), (1410, 777))
    usual, slow, narrow = (predicted(mm, described("", 108, *each)) for each in clock)
    assert usual < min(slow, narrow)


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if ways_to_run("sm80", gpu.arch)])
def test_listed_gpus(name: str) -> None:
    """Plans of the shipped pack fit a listed GPU, and are no faster than its data sheet allows.

    Few rows take the time of their weights, large products that of the tensor cores, by which GPUs differ.
    """
    mm, gpu, device = open_pack(default_pack("sm80")).launcher, GPUS[name], listed_device(name)
    for m, n, k in ((4, 8192, 8192), (16, 4096, 14336), (300, 6144, 4096), (1000, 1000, 1000), (4096, 4096, 4096)):
        problem = replace(MEASURED, M=m, N=n, K=k, strides_a=(k, 1), strides_b=(1, k), strides_c=(n, 1))
        plan = mm.select(problem, device)
        assert mm.kernels[plan.kernel].shared_bytes <= device.shared_bytes
        weights, products = 2 * n * k / gpu.memory_gbps, 2 * m * n * k / (1000 * gpu.tflops)  # ns
        assert plan.cost > max(weights, products)
        assert plan.cost < 3 * (weights + products) + 15_000
        if m == 4:
            assert mm.kernels[plan.kernel].config.block_m == 16


def test_plans_for_an_a100_and_an_l40s() -> None:
    """The L40S multiplies as fast with half of the bandwidth: few rows take longer. Its waves of tiles are others."""
    mm = open_pack(default_pack("sm80")).launcher
    a100, l40s = listed_device("NVIDIA A100-SXM4-40GB"), listed_device("NVIDIA L40S")
    few = replace(MEASURED, M=8, N=8192, K=8192, strides_a=(8192, 1), strides_b=(1, 8192), strides_c=(8192, 1))
    assert mm.select(few, l40s).cost > 1.5 * mm.select(few, a100).cost
    tiles = [
        [
            (mm.kernels[plan.kernel].config_name, plan.split)
            for size in range(512, 4096, 256)
            for problem in [replace(MEASURED, M=size, N=size, strides_b=(size, 1), strides_c=(size, 1))]
            for plan in [mm.select(problem, device)]
        ]
        for device in (a100, l40s)
    ]
    assert sum(one != other for one, other in zip(*tiles, strict=True)) >= 4
    assert len({*tiles[0]}) >= 3, "squares take several tiles"


@pytest.mark.parametrize("multiprocessors", [132, 104])
def test_choices_and_ranks_by_proxy(multiprocessors: int) -> None:
    """Of plans of sm80 that an H100 timed (docs/experiments/ampere.md), on the whole GPU and on a part of it.

    The choice loses 6 % at most in the mean to the fastest, and 20 % at worst. Of two tiles of which one is 1.2 times
    faster, the model says so nine times in ten. What is family `multistage` now was timed as family `tile`.
    """
    mm = open_pack(default_pack("sm80")).launcher
    times = read(Path(__file__).with_name(f"ampere-{multiprocessors}.json"))
    device = measured_device(times, SHARED)
    assert (times.multiprocessors, len(times.shapes)) == (multiprocessors, 31)
    names = [kernel.config_name.replace("multistage", "tile") for kernel in mm.kernels]
    halves = [i for i, kernel in enumerate(mm.kernels) if kernel.dtype_a == kernel.dtype_c == "fp16"]
    numbers = {(names[i], mm.kernels[i].layout): i for i in halves}
    regrets, right = [], []
    for shape in times.shapes:
        case = Case(Shape(shape.M, shape.N, shape.K, shape.layout), "fp16")
        problem = problem_of(case, "fp16", 1 << 40, 2 << 40, 3 << 40)
        plan = mm.select(problem, device)
        timed = {sample[:-1]: sample.ns for sample in shape.times}
        chosen = names[plan.kernel], plan.split, plan.pdl, plan.copies
        regrets.append(timed[chosen] / min(timed.values()))
        costs = [
            (plan.cost, ns)
            for (config, split, _, copies), ns in timed.items()
            if (config, shape.layout) in numbers and (split, copies) == (1, 0)
            for plan in [mm.check(problem, device, numbers[config, shape.layout]).plan]
            if plan is not None
        ]
        pairs = itertools.combinations(costs, 2)
        right += [(a < b) == (x < y) for (a, x), (b, y) in pairs if max(x, y) > 1.2 * min(x, y)]
    assert np.exp(np.mean(np.log(regrets))) <= 1.06
    assert max(regrets) <= 1.2
    assert len(right) > 1000
    assert np.mean(right) > 0.9


def test_a_retuned_launcher_knows_one_table(two: Launcher) -> None:
    """It replaces all that were built in; on other devices than its own it is scaled, also on those that had one."""
    three = described("three", 100, 1000, 1000)
    two.retune(table_for(product(two.kernels), three, 300))
    assert cost(two, three) == (300, True)
    for device in (ONE, TWO, described("", 100, 1000, 1000)):
        assert two.origin(device).table == "three"
        assert not cost(two, device)[1]


def test_scaled_models_are_made_by_many_threads(two: Launcher) -> None:
    """Threads that ask for devices without a table at once, while others retune, get what one alone gets."""
    devices = [described("", 100, clock, 1000) for clock in range(100, 1100, 100)]
    made = table_for(product(two.kernels), ONE, 100)
    two.retune(made)
    alone = [two.select(UNMEASURED, device) for device in devices]
    wrong: list[object] = []

    def work() -> None:
        for _ in range(50):
            if [two.select(UNMEASURED, device) for device in devices] != alone:
                wrong.append(devices)
            two.retune(made)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_devices_that_are_none() -> None:
    """No multiprocessors and a name without an end are invalid."""
    mm = open_pack(plans_pack("sm80")).launcher
    with pytest.raises(ValueError, match="multiprocessors=0: at least 1"):
        mm.origin(described("", 0, 0, 0))
    endless = described("", 100, 0, 0)
    ctypes.memset(ctypes.addressof(endless) + CDevice.name.offset, ord("x"), CDevice.name.size)
    for ask in (mm.origin, lambda device: mm.select(MEASURED, device)):
        with pytest.raises(ValueError, match="the name of the device has no end in its 108 bytes"):
            ask(endless)


@pytest.mark.parametrize(
    ("sizes", "multiprocessors", "tile", "split"),
    [
        ((1280, 1280, 8192), 78, (128, 128), 3),  # 300 slices of tiles, two on a multiprocessor: two waves
        ((1280, 1280, 8192), 108, (128, 128), 2),  # 200: one wave
        ((1280, 1280, 8192), 144, (64, 128), 1),  # 200 tiles
        ((1536, 1536, 4096), 114, (128, 128), 1),  # 144 tiles
        ((1536, 1536, 4096), 144, (64, 128), 1),  # 288: a whole wave
    ],
)
def test_plans_suit_the_number_of_multiprocessors(
    sizes: tuple[int, int, int], multiprocessors: int, tile: tuple[int, int], split: int
) -> None:
    """Where waves decide, described devices of several numbers of multiprocessors get tiles and slices that fill them.

    By estimates, which know no shape.
    """
    mm, (m, n, k) = open_pack(default_pack("sm80")).launcher, sizes
    problem = replace(MEASURED, M=m, N=n, K=k, strides_a=(k, 1), strides_b=(n, 1), strides_c=(n, 1))
    plan = mm.select(problem, described("", multiprocessors, 0, 0))
    kernel = mm.kernels[plan.kernel]
    config = kernel.config
    assert (config.block_m, config.block_n, plan.split) == (*tile, split)
    units = -(-m // config.block_m) * -(-n // config.block_n) * split
    at_once = multiprocessors * beside(kernel, target("sm80"))
    assert units / (-(-units // at_once) * at_once) > 0.6


@pytest.mark.parametrize(
    ("shape", "multiprocessors", "tiles"),
    [
        ((1, 1), 132, 132),
        ((2, 1), 132, 66),
        ((1, 2), 114, 57),
        ((2, 2), 132, 30),
        ((2, 2), 114, 25),
        ((1, 4), 132, 30),
        ((4, 2), 132, 15),
        ((2, 4), 114, 12),
        ((4, 2), 34, 3),
    ],
)
def test_clusters_that_run_at_once(shape: tuple[int, int], multiprocessors: int, tiles: int) -> None:
    """By the formula, clusters of more than two blocks leave a part of the GPU over: then a next round begins."""
    mm, device = open_pack(clusters_pack()).launcher, described("", multiprocessors, 0, 0)
    shapes = [(k.config.cluster_m, k.config.cluster_n, k.layout) for k in mm.kernels]
    number = shapes.index((*shape, "nn"))
    config, n, k = mm.kernels[number].config, mm.kernels[number].config.block_n, 1 << 16

    def ns(count: int) -> int:
        """Predicted time of so many tiles, each of which takes long to multiply."""
        m = count * config.block_m
        problem = replace(MEASURED, M=m, N=n, K=k, strides_a=(k, 1), strides_b=(n, 1), strides_c=(n, 1))
        plan = mm.check(problem, device, number).plan
        assert plan is not None
        return plan.cost

    assert ns(tiles + 1) - ns(tiles) > 5 * (ns(tiles) - ns(tiles - 1))


@pytest.mark.parametrize(
    ("name", "facts"),
    [("NVIDIA H20", (78, 1980, 4000)), ("NVIDIA H100 PCIe", (114, 1755, 2039)), ("", (144, 1980, 4800))],
)
def test_scaled_models_suit_the_number_of_multiprocessors(name: str, facts: tuple[int, int, int]) -> None:
    """Of Hopper's tiles, devices without a table get those that fill their waves, more than the H200's choice would.

    By the models of the nearest table, and by no measured time.
    """
    mm, rng = open_pack(default_pack("sm90")).launcher, np.random.default_rng(3)
    here, h200 = described(name, *facts), described("NVIDIA H200", 132, 1980, 4917)

    def fill(plan: Plan, m: int, n: int) -> float:
        """Which part of the waves of this device a plan's tiles fill."""
        kernel = mm.kernels[plan.kernel]
        tiles = -(-m // kernel.config.block_m) * -(-n // kernel.config.block_n) * plan.split * kernel.num_ctas
        return tiles / (-(-tiles // facts[0]) * facts[0])

    filled = []
    for _ in range(100):
        m, n, k = (64 * int(x) for x in np.exp2(rng.uniform(3, 6, 3)))
        problem = replace(MEASURED, M=m, N=n, K=k, strides_a=(k, 1), strides_b=(n, 1), strides_c=(n, 1))
        plan = mm.select(problem, here)
        assert not plan.measured
        filled.append((fill(plan, m, n), fill(mm.select(problem, h200), m, n)))
    ours, of_the_h200 = np.mean(filled, axis=0)
    assert ours > 0.85
    assert ours > of_the_h200 + 0.04
