"""Tuning tables and the devices they are for: which one counts, and how models are scaled for devices without."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from aotmm.pack import table
from aotmm.pack.schema import Kernel, occupancy
from aotmm.pack.table import MIN_M, Model, Sample, ShapeTimes, Table
from aotmm.problem import DTYPES
from aotmm.runtime.launcher import Launcher
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice, nominal_device
from aotmm.target import HIDDEN_FACTS, target
from tests.build.packs import default_pack, plans_pack, relinked
from tests.native.emulation import Emulator, missing, own_process
from tests.native.reference import Reference
from tests.native.test_plans import BIG, problem_of

SHARED = 232_448
MEASURED, UNMEASURED = problem_of(512, 512, 1024), problem_of(512, 512, 1088)
STEPS = 17  # of K = 1088
TILES = 64  # of 512 x 512, in one wave of 100 multiprocessors


def described(name: str, *facts: int) -> CDevice:
    """A device: multiprocessors, MHz, GB/s."""
    multiprocessors, clock, memory = facts
    return CDevice(multiprocessors, SHARED, clock, memory, 0, name.encode())


def table_for(kernel: Kernel, device: CDevice, ns: int) -> Table:
    """A table of one config: `ns` for MEASURED and for each step, 1 for a tile, almost nothing for bytes and loads."""
    shape = ShapeTimes(2, "nn", False, 512, 512, 1024, False, (Sample(kernel.config_name, 1, False, 0, ns),))  # noqa: FBT003
    facts = device.multiprocessors, device.clock_mhz, device.memory_gbps, device.l2_bytes
    models = tuple(Model(kernel.config_name, 2, False, rows, 0.0, float(ns), 1.0, 1e-9, 1e-9) for rows in MIN_M)  # noqa: FBT003
    return Table("sm80", device.name.decode(), *facts, "none", "none", "0", "2026-11-20", 0, models, (shape,))


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
        plans = [emulator.launcher.plan(MEASURED, ordinal, BIG) for ordinal in range(3)]
        assert [plan.measured for plan in plans] == [False, True, True]
        assert [plan.cost for plan in plans[1:]] == [200, 100]


def step_ns(mm: Launcher, device: CDevice) -> float:
    """What `table_for`'s kernel takes for a step along K, but for the 1 ns of a tile and 1 ns of everything else."""
    plan = mm.check(UNMEASURED, device, mm.kernels.index(product(mm.kernels))).plan
    assert plan is not None
    return plan.cost / STEPS


@pytest.mark.parametrize(
    ("device", "step", "words"),
    [
        (described("", 100, 1000, 1000), 100, "compute 1.00, memory 1.00"),
        (described("", 100, 500, 1000), 200, "compute 0.50, memory 1.00"),
        (described("", 100, 2000, 500), 50, "compute 2.00, memory 0.50"),
        (described("", 150, 0, 0), 100, "compute 1.50, memory 1.00"),
        (described("NVIDIA H100 NVL", 100, 1000, 1000), 100 / 0.5949, "compute 0.59, memory 1.00"),
        (described("NVIDIA H100 NVL", 100, 500, 1000), 100 / 0.5949, "compute 0.59, memory 1.00"),
        (described("NVIDIA H100 NVL MIG 1g.12gb", 100, 1000, 1000), 100 / 0.5949, "compute 0.59, memory 1.00"),
        (described("NVIDIA H20", 78, 1000, 1000), 0, "compute 0.78, memory 1.00, tensor cores 148 TFLOP/s"),
        (described("NVIDIA H200", 100, 1000, 1000), 100, "compute 1.00, memory 1.00"),
    ],
)
def test_models_are_scaled(tmp_path: Path, device: CDevice, step: float, words: str) -> None:
    """By clock and memory; by what is listed of a GPU whose driver hides it, of a slice of it too.

    An H20 takes what its tensor cores need for a step where that is longer.
    """
    mm = open_pack(with_tables(tmp_path, ONE)).launcher
    kernel = product(mm.kernels)
    config = kernel.config
    if not step:
        macs = config.block_m * config.block_n * config.block_k * occupancy(kernel, target("sm80"))
        step = max(100.0, macs * DTYPES["fp16"].bytes / (1000 * HIDDEN_FACTS["NVIDIA H20"].tensor_tflops))
        assert step > 100
    assert step_ns(mm, device) == pytest.approx(step, rel=0.01)
    assert str(mm.origin(device)) == f"models scaled from one: {words}, no measured times"


def test_a_pack_without_tables() -> None:
    """Goes by estimates on any device, and says so."""
    mm = open_pack(plans_pack("sm80")).launcher
    for device in (ONE, nominal_device(target("sm80")), described("NVIDIA H20", 78, 1980, 4022)):
        assert str(mm.origin(device)) == "estimates from tiles and data sheet"
    assert mm.origin(ONE).table is None
    same = [mm.select(MEASURED, device) for device in (ONE, described("NVIDIA H20", 100, 500, 9))]
    assert same[0] == same[1]


def test_a_retuned_launcher_knows_one_table(two: Launcher) -> None:
    """It replaces all that were built in; on other devices than its own it is scaled, also on those that had one."""
    three = described("three", 100, 1000, 1000)
    two.retune(table_for(product(two.kernels), three, 300))
    assert cost(two, three) == (300, True)
    for device in (ONE, TWO, described("", 100, 1000, 1000)):
        assert two.origin(device).table == "three"
        assert not cost(two, device)[1]
    assert step_ns(two, TWO) == pytest.approx(150, rel=0.01)
    nothing = replace(table_for(product(two.kernels), described("half", 50, 500, 500), 1), models=(), shapes=())
    two.retune(nothing)
    assert step_ns(two, described("half", 50, 500, 500)) == pytest.approx(200, rel=0.01), "those of `one`, scaled"


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


# ------------------------------------------------------------------------------------------------- the number of waves
ALIKE = problem_of(1536, 1536, 8192, strides_b=(1, 8192))


def equal_rates(mm: Launcher) -> Table:
    """A table of an H200 by which large tiles multiply equally fast and nothing else counts: waves alone decide."""
    h200 = nominal_device(target("sm90"))
    facts = h200.multiprocessors, h200.clock_mhz, h200.memory_gbps, h200.l2_bytes
    kinds = {(k.config_name, DTYPES[k.dtype_a].bytes, k.fast_accum): k for k in mm.kernels if k.role != "copy"}
    models = []
    for key, kernel in kinds.items():
        config = kernel.config
        macs = config.block_m * config.block_n * config.block_k * occupancy(kernel, target("sm90"))
        large = kernel.role == "product" and kernel.num_ctas == 1 and config.block_m * config.block_n >= 128 * 128
        step = macs / 3000 if large else 1e6
        models += [Model(*key, rows, 0.0, step, 0.0, 0.0, 0.0) for rows in MIN_M]
    return Table("sm90", "NVIDIA H200", *facts, "none", "none", "0", "2026-11-20", 0, tuple(models), ())


@pytest.mark.parametrize("multiprocessors", [78, 114, 144])
def test_plans_suit_the_number_of_multiprocessors(multiprocessors: int) -> None:
    """A described device gets the reference's plan for its number of multiprocessors, whose waves are nearly full.

    Each number gets another one, of which one would take at least a third longer here.
    """
    mm = open_pack(default_pack("sm90")).launcher
    made = equal_rates(mm)
    before = Reference(mm.kernels, target("sm90"), table.shipped("sm90"))
    mm.retune(made)
    reference = Reference(mm.kernels, target("sm90"), (made,), before=before)
    devices = {count: described("", count, 1980, 4916) for count in (78, 114, 144)}
    plans = {count: mm.select(ALIKE, device) for count, device in devices.items()}
    mine, device = plans[multiprocessors], devices[multiprocessors]
    assert mine == reference.select(ALIKE, device, 2 << 30)
    assert len({plan.kernel for plan in plans.values()}) == 3
    costs = [plan.cost for other in plans.values() if (plan := mm.check(ALIKE, device, other.kernel).plan)]
    assert min(costs) == mine.cost < 0.75 * max(costs) + 1
    kernel = mm.kernels[mine.kernel]
    tiles = -(-1536 // kernel.config.block_m) * -(-1536 // kernel.config.block_n)
    held = multiprocessors * occupancy(kernel, target("sm90")) // kernel.num_ctas
    assert tiles / (-(-tiles // held) * held) > 0.8
