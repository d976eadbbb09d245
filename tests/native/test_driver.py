"""The launch path, cuda.c and hip.c: which calls a fake driver sees, and what becomes of failures.

The fake drivers refuse what real ones refuse (`driver.misuse`); what they do not model stands in their README.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import shlex
import struct
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotmm.build import link
from aotmm.errors import DriverError, NoKernelError
from aotmm.pack.schema import Attribute, Kernel
from aotmm.runtime.launcher import CProblem, Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice
from aotmm.target import target
from tests.build.packs import SHAPES, TINY, clusters_pack, pack_of, relinked, run_python, slices_pack
from tests.native.emulation import Case, Emulator, Product, missing, own_process
from tests.samples import code_in

ON_CUDA = pytest.mark.parametrize("pack", ["sm80"], indirect=True)
ON_HIP = pytest.mark.parametrize("pack", ["gfx90a"], indirect=True)
STREAM = 0x5EA0
OUT_OF_MEMORY = 2
# In the order in which the first launch on the second device makes them: the fake's name, ours, the device it names.
CALLS = {
    "sm80": [
        ("cuDriverGetVersion", "cuDriverGetVersion", -1),
        ("cuInit", "cuInit", -1),
        ("cuDeviceGet", "cuDeviceGet", 1),
        ("cuDeviceGetAttribute", "cuDeviceGetAttribute", 1),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 1),
        ("cuCtxGetCurrent", "cuCtxGetCurrent", 1),
        ("cuCtxPushCurrent_v2", "cuCtxPushCurrent", 1),
        ("cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode", 1),
        ("cuLibraryLoadData", "cuLibraryLoadData", 1),
        ("cuLibraryGetKernel", "cuLibraryGetKernel", 1),
        ("cuKernelSetAttribute", "cuKernelSetAttribute", 1),
        ("cuKernelGetFunction", "cuKernelGetFunction", 1),
        ("cuLaunchKernelEx", "cuLaunchKernelEx", 1),
    ],
    "gfx90a": [
        ("hipInit", "hipInit", -1),
        ("hipGetDeviceCount", "hipGetDeviceCount", -1),
        ("hipGetDevice", "hipGetDevice", 1),
        ("hipSetDevice", "hipSetDevice", 1),
        ("hipThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", 1),
        ("hipModuleLoadData", "hipModuleLoadData", 1),
        ("hipModuleGetFunction", "hipModuleGetFunction", 1),
        ("hipModuleLaunchKernel", "hipModuleLaunchKernel", 1),
    ],
}
LOAD = {"sm80": "cuLibraryLoadData", "gfx90a": "hipModuleLoadData"}
WARM = {
    "sm80": ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernelEx", "cuCtxPopCurrent_v2"],
    "gfx90a": ["hipGetDevice", "hipModuleLaunchKernel"],
}


def problem_of(m: int, n: int, k: int) -> Problem:
    """A row-major fp16 product at addresses that nothing is read from."""
    return Problem(m, n, k, (k, 1), (n, 1), (n, 1), "fp16", "fp16", "fp16", "none", 1 << 40, 2 << 40, 3 << 40)


SPECIALISED, GENERIC = problem_of(128, 64, 64), problem_of(130, 65, 33)


def current(emulator: Emulator) -> int | None:
    """The calling thread's CUDA context (None without one) or HIP device."""
    if emulator.driver.kind == "cuda":
        context = ctypes.c_void_p()
        assert emulator.driver.lib.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value
    device = ctypes.c_int()
    assert emulator.driver.lib.hipGetDevice(ctypes.byref(device)) == 0
    return device.value


def make_current(emulator: Emulator, device: int) -> None:
    """Makes `device` current in the calling thread."""
    if emulator.driver.kind == "cuda":
        context, lib = ctypes.c_void_p(), emulator.driver.lib
        assert lib.cuInit(0) == 0
        assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert lib.cuCtxPushCurrent_v2(context) == 0
    else:
        assert emulator.driver.lib.hipSetDevice(device) == 0


def names(emulator: Emulator) -> list[str]:
    """The driver calls so far."""
    return [call.name for call in emulator.driver.calls]


def arguments(kernel: Kernel, block: bytes) -> dict[str, int]:
    """The values in a parameter block, by quantity."""
    return {
        item.value: int.from_bytes(block[item.offset : item.offset + item.bytes], "little", signed=True)
        for item in kernel.parameters
    }


# --------------------------------------------------------------------------------------------------- what a launch is
@pytest.mark.parametrize(("problem", "layout"), [(SPECIALISED, "nn"), (GENERIC, "any")], ids=["specialised", "generic"])
@own_process
def test_launch(pack: Path, problem: Problem, layout: str) -> None:
    """A launch has the manifest's block, shared memory and parameters, one block per tile, and the caller's stream."""
    emulator = Emulator(pack, execute=False)
    emulator.launcher.matmul(problem, 0, STREAM)
    (launch,) = emulator.driver.launches
    kernel = emulator.selected(problem)
    tiles = -(-problem.M // kernel.config.block_m) * -(-problem.N // kernel.config.block_n)
    assert kernel.layout == layout
    assert launch.symbol == kernel.symbol
    assert launch.grid == (tiles, 1, 1)
    assert launch.block == (kernel.threads, 1, 1)
    assert launch.shared == kernel.shared_bytes
    assert launch.stream == STREAM
    given = {name: int(getattr(problem.to_c(), name)) for name, *_ in CProblem._fields_ if name != "slope"}
    given["group_m"] = emulator.launcher.plan(problem, 0, 0).group_m
    (given["slope"],) = struct.unpack("<i", struct.pack("<f", problem.slope))
    assert arguments(kernel, launch.params) == {p.value: given.get(p.value, 0) for p in kernel.parameters}
    assert emulator.driver.misuse == []


@own_process
def test_parameters_keep_what_the_kernel_was_promised(pack: Path) -> None:
    """The numbers that reach a kernel keep its guards, also where a stride that multiplies only 0 did not."""
    emulator = Emulator(pack, execute=False)
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(300):
        m, n, k = (int(rng.choice([1, 8, 64, 72])) for _ in range(3))
        strides = [(int(rng.choice([3, 2**40])) if rows == 1 else cols, int(rng.choice([0, 5])) if cols == 1 else 1)
                   for rows, cols in ((m, k), (k, n), (m, n))]  # fmt: skip
        problem = dataclasses.replace(
            problem_of(m, n, k), strides_a=strides[0], strides_b=strides[1], strides_c=strides[2]
        )
        emulator.launcher.matmul(problem, 0, 0)
        kernel = emulator.selected(problem)
        found = arguments(kernel, emulator.driver.launches[-1].params)
        seen.add((kernel.layout, 1 in (m, n, k)))
        for guard in kernel.guards:
            if guard.value in found:
                value = found[guard.value]
                kept = value < guard.operand if guard.relation == "below" else value % guard.operand == 0
                assert kept, (problem, guard, value)
    assert seen == {("nn", False), ("nn", True), ("any", True)}


@own_process
def test_warm_launch_asks_nothing_again(pack: Path) -> None:
    """From the second launch on, the driver is asked for nothing but the current device and the launch."""
    emulator = Emulator(pack, execute=False)
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    before = len(names(emulator))
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert names(emulator)[before:] == WARM[emulator.arch]
    if emulator.driver.kind == "cuda":
        make_current(emulator, 0)
        before = len(names(emulator))
        emulator.launcher.matmul(SPECIALISED, 0, 0)
        assert names(emulator)[before:] == ["cuCtxGetCurrent", "cuLaunchKernelEx"]


@own_process
def test_empty_products_launch_nothing(pack: Path) -> None:
    """M or N of 0 succeeds without a launch, and without a driver call."""
    emulator = Emulator(pack, execute=False)
    for problem in (problem_of(0, 64, 64), problem_of(64, 0, 64), problem_of(0, 0, 0)):
        emulator.launcher.matmul(problem, 0, 0)
    assert emulator.driver.launches == []
    assert names(emulator) == []
    generic = next(n for n, k in enumerate(emulator.kernels) if (k.role, k.layout) == ("product", "any"))
    emulator.launcher.launch(generic, problem_of(0, 64, 64), 0, 0)
    assert emulator.driver.launches == []


@own_process
def test_one_kernel_launched_by_number(pack: Path) -> None:
    """`launch` takes any product whose guards hold, and refuses other kernels and numbers that do not exist."""
    emulator = Emulator(pack, execute=False)
    products = [number for number, kernel in enumerate(emulator.kernels) if kernel.role == "product"]
    for number, kernel in enumerate(emulator.kernels):
        if number in products:
            emulator.launcher.launch(number, SPECIALISED, 0, 0)
            assert emulator.driver.launches[-1].image == code_in(pack)(kernel.image)
        else:
            with pytest.raises(NoKernelError, match=f"{kernel.name}, split 1, .* do not fit M=128 N=64 K=64"):
                emulator.launcher.launch(number, SPECIALISED, 0, 0)
    specialised = next(number for number in products if emulator.kernels[number].layout != "any")
    with pytest.raises(NoKernelError, match="do not fit M=130 N=65 K=33"):
        emulator.launcher.launch(specialised, GENERIC, 0, 0)
    count = len(emulator.kernels)
    with pytest.raises(ValueError, match=f"kernel {count}: the pack has {count}"):
        emulator.launcher.launch(count, GENERIC, 0, 0)
    assert len(emulator.driver.launches) == len(products) == 2


@ON_CUDA
@own_process
def test_launch_attributes_reach_the_driver(pack: Path, tmp_path: Path) -> None:
    """The launch attributes of a kernel's manifest entry are those of cuLaunchKernelEx, id and value."""
    whole = open_pack(pack).manifest
    attributes = (Attribute("programmatic_stream_serialization", (1, 0, 0)), Attribute("cluster_dimension", (1, 1, 1)))
    kernels = tuple(dataclasses.replace(kernel, attributes=attributes) for kernel in whole.kernels)
    emulator = Emulator(relinked(pack, tmp_path, kernels), execute=False)
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    found = [call.arguments for call in emulator.driver.calls if call.name == "attribute"]
    assert found == [{"id": "6", "value": "1,0,0"}, {"id": "4", "value": "1,1,1"}]
    assert emulator.driver.misuse == []


# ---------------------------------------------------------------------------------------------------------- clusters
LARGE = problem_of(4096, 4096, 64)
ASK = "cuOccupancyMaxActiveClusters"


@pytest.fixture
def clusters() -> Path:
    """The folder of a pack for sm90 with one tile in clusters of every shape."""
    if reason := missing("sm90"):
        pytest.skip(reason)
    return clusters_pack()


def in_clusters(emulator: Emulator, down: int, across: int) -> int:
    """The number of the kernel whose clusters have so many blocks along M and N."""
    shapes = [(k.config.cluster_m, k.config.cluster_n, k.layout) for k in emulator.kernels]
    return shapes.index((down, across, "nn"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@own_process
def test_launch_in_clusters(clusters: Path, shape: tuple[int, int]) -> None:
    """A launch has the clusters of its kernel, whose blocks are in the second dimension along N; all have one image."""
    emulator = Emulator(clusters, execute=False)
    number, pair, (down, across) = in_clusters(emulator, *shape), in_clusters(emulator, 2, 1), shape
    emulator.launcher.launch(number, dataclasses.replace(LARGE, M=192 * down), 0, STREAM)
    (launch,) = emulator.driver.launches
    tiles = 3 * 4096 // (64 * across)
    most = {1: 132, 2: 132, 4: 120, 8: 120}[down * across]
    blocks = min(tiles * down * across, most)
    assert launch.grid == (blocks // across, across, 1)
    same = launch.image == code_in(clusters)(emulator.kernels[pair].image)
    assert same == (down * across > 1)
    found = [
        call.arguments for call in emulator.driver.calls if call.name == "attribute" and call.arguments["id"] == "4"
    ]
    assert {each["value"] for each in found} == ({f"{down},{across},1"} if down * across > 1 else set())
    assert emulator.driver.misuse == []


@own_process
def test_launch_of_slices() -> None:
    """Each tile has a cluster along the first dimension, however many run at once, and each slice a step of K."""
    if reason := missing("sm90"):
        pytest.skip(reason)
    emulator = Emulator(slices_pack(), execute=False)
    number = next(n for n, kernel in enumerate(emulator.kernels) if kernel.config.cluster_k == 4)
    emulator.launcher.launch(number, problem_of(640, 1280, 4096), 0, STREAM)
    (launch,) = emulator.driver.launches
    assert launch.grid == (4 * 10 * 20, 1, 1)
    found = [c.arguments["value"] for c in emulator.driver.calls if c.name == "attribute" and c.arguments["id"] == "4"]
    assert set(found) == {"4,1,1"}
    device = emulator.launcher.device(0)
    least = [k for k in (128, 192, 193, 256) if emulator.launcher.check(problem_of(64, 64, k), device, number).plan]
    assert least == [193, 256]
    told = emulator.launcher.check(dataclasses.replace(LARGE, K=4096, batch_invariant=True), device, number)
    assert told.plan is None
    assert emulator.driver.misuse == []


@own_process
def test_no_more_clusters_than_run_at_once(clusters: Path) -> None:
    """A launch of persistent blocks has as many clusters as the driver says run at once, or as there are tiles."""
    for said, blocks in ((0, 120), (7, 28), (1, 4), (33, 132), (99, 132)):
        emulator = Emulator(clusters, execute=False)
        emulator.driver.clusters(said)
        number = in_clusters(emulator, 2, 2)
        plan = emulator.plan(LARGE, number)
        assert (plan.kernel, plan.grid) == (number, 132), "without the driver, every multiprocessor has a block"
        emulator.launcher.run(plan, LARGE, 0, STREAM)
        emulator.launcher.launch(number, problem_of(129, 128, 64), 0, STREAM)  # two tiles
        assert [launch.grid for launch in emulator.driver.launches] == [
            (blocks // 2, 2, 1),
            (min(blocks, 8) // 2, 2, 1),
        ]
        assert emulator.driver.misuse == []


@own_process
def test_the_driver_is_asked_once_for_each_size(clusters: Path) -> None:
    """Kernels with clusters of the same size have one answer on each device; kernels without ask nothing."""
    emulator = Emulator(clusters, devices=2, execute=False)
    asked = []
    for device in (0, 1, 0):
        for shape in SHAPES:
            emulator.launcher.launch(in_clusters(emulator, *shape), LARGE, device, 0)
            asked.append((device, math.prod(shape), names(emulator).count(ASK)))
    assert [count for *_, count in asked] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 6, 6, *[6] * 8]
    of_first = [call.arguments for call in emulator.driver.calls if call.name == ASK][:3]
    assert [(call["grid"], call["device"]) for call in of_first] == [("2,1,1", "0"), ("2,2,1", "0"), ("4,2,1", "0")]
    assert emulator.driver.misuse == []


@own_process
def test_answers_are_of_their_device(clusters: Path) -> None:
    """Where two devices run other numbers of clusters at once, each launch has those of its own device."""
    emulator = Emulator(clusters, devices=2, execute=False)
    number = in_clusters(emulator, 1, 4)
    for device, count in ((0, 9), (1, 20)):
        emulator.driver.clusters(count)
        emulator.launcher.launch(number, LARGE, device, 0)
    for device in (0, 1):
        emulator.launcher.launch(number, LARGE, device, 0)
    assert [launch.grid for launch in emulator.driver.launches] == [(9, 4, 1), (20, 4, 1)] * 2


@own_process
def test_a_driver_that_cannot_tell_of_clusters(clusters: Path) -> None:
    """A failing question is told with call and kernel, leaves nothing behind, and is asked again at the next launch."""
    emulator = Emulator(clusters, execute=False)
    number = in_clusters(emulator, 2, 2)
    emulator.driver.fail_next(ASK, OUT_OF_MEMORY)
    name = emulator.kernels[number].name
    words = f"{ASK} failed on CUDA device 0 for kernel {name}: CUDA_ERROR_OUT_OF_MEMORY .2.: out of memory"
    with pytest.raises(DriverError, match=words) as caught:
        emulator.launcher.launch(number, LARGE, 0, 0)
    assert (caught.value.call, caught.value.code, caught.value.device) == (ASK, OUT_OF_MEMORY, 0)
    assert (emulator.driver.launches, emulator.driver.live_modules) == ([], 0)
    emulator.launcher.launch(number, LARGE, 0, 0)
    assert [launch.grid for launch in emulator.driver.launches] == [(60, 2, 1)]
    assert names(emulator).count(ASK) == 2
    assert emulator.driver.live_modules == 1
    assert emulator.driver.misuse == []


@own_process
def test_clusters_are_first_launched_during_capture(clusters: Path) -> None:
    """The question to the driver, too, does not break a capture."""
    emulator = Emulator(clusters, execute=False)
    emulator.driver.capture()
    emulator.launcher.launch(in_clusters(emulator, 4, 2), LARGE, 0, 0)
    assert not emulator.driver.capture_broken
    assert [launch.grid for launch in emulator.driver.launches] == [(60, 2, 1)]
    assert emulator.driver.misuse == []


# ---------------------------------------------------------------------------------------------------------- devices
@pytest.mark.parametrize("device", [0, 1])
@own_process
def test_launches_on_the_device_that_is_asked_for(pack: Path, device: int) -> None:
    """A launch goes to its own device, whichever is current, and leaves that current."""
    emulator = Emulator(pack, devices=2, execute=False)
    emulator.driver.bind_stream(STREAM, device)
    make_current(emulator, 1)
    before = current(emulator)
    emulator.launcher.matmul(SPECIALISED, device, STREAM)
    emulator.launcher.matmul(SPECIALISED, device, STREAM)
    assert [launch.device for launch in emulator.driver.launches] == [device, device]
    assert current(emulator) == before
    assert emulator.driver.misuse == []


@ON_CUDA
@own_process
def test_thread_without_a_context_keeps_none(pack: Path) -> None:
    """A thread that had no current context has none after a launch."""
    emulator = Emulator(pack, execute=False)
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert current(emulator) is None


@own_process
def test_every_device_gets_the_kernel(pack: Path) -> None:
    """Both devices launch the same image, each after loading it for itself once."""
    emulator = Emulator(pack, devices=2, execute=False)
    for device in (0, 1, 0, 1):
        emulator.launcher.matmul(SPECIALISED, device, 0)
    assert [launch.device for launch in emulator.driver.launches] == [0, 1, 0, 1]
    assert len({launch.image for launch in emulator.driver.launches}) == 1
    assert names(emulator).count(LOAD[emulator.arch]) == 2
    assert emulator.driver.misuse == []


@own_process
def test_device_numbers_that_do_not_exist(pack: Path) -> None:
    """Device numbers below 0, past the table and past the last device are refused before anything is launched."""
    emulator = Emulator(pack, devices=2, execute=False)
    for ordinal in (-1, 32, 1 << 20):
        with pytest.raises(ValueError, match=f"device {ordinal}: ordinals are 0 to 31"):
            emulator.launcher.matmul(SPECIALISED, ordinal, 0)
    if emulator.driver.kind == "cuda":
        with pytest.raises(DriverError, match="cuDeviceGet failed on CUDA device 2: CUDA_ERROR_INVALID_DEVICE"):
            emulator.launcher.matmul(SPECIALISED, 2, 0)
    else:
        with pytest.raises(ValueError, match="device 2: HIP has 2 devices"):
            emulator.launcher.matmul(SPECIALISED, 2, 0)
    assert emulator.driver.launches == []
    assert emulator.driver.misuse == []


@own_process
def test_device_facts(pack: Path) -> None:
    """Selection sees the device's name, multiprocessors, memories and speeds; asking creates no context."""
    emulator = Emulator(pack, devices=2, execute=False)
    emulator.driver.name(1, "another fake")
    row, facts = target(emulator.arch), emulator.launcher.device(0)
    assert facts.shared_bytes == row.shared_bytes
    wanted = {"cuda": (108, 1410, 1555, 40 << 20), "hip": (110, 1700, 1638, 8 << 20)}[emulator.driver.kind]
    assert (facts.multiprocessors, facts.clock_mhz, facts.memory_gbps, facts.l2_bytes) == wanted
    assert [emulator.launcher.device(ordinal).name for ordinal in (0, 1)] == [b"a fake", b"another fake"]
    assert "cuDevicePrimaryCtxRetain" not in names(emulator)


# ---------------------------------------------------------------------------------------------------------- loading
@own_process
def test_preload(pack: Path) -> None:
    """After `preload` no launch loads anything."""
    emulator = Emulator(pack, execute=False)
    emulator.launcher.preload(0)
    load = LOAD[emulator.arch]
    assert names(emulator).count(load) == len(emulator.kernels) == emulator.driver.live_modules
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    emulator.launcher.matmul(GENERIC, 0, 0)
    assert names(emulator).count(load) == len(emulator.kernels)
    assert emulator.driver.misuse == []


@own_process
def test_first_launch_during_capture(pack: Path) -> None:
    """The first launch of a kernel may be captured: loading does not break the capture, and the replay is right."""
    emulator = Emulator(pack)
    case = Case(Product(70, 90, 100))
    emulator.driver.buffers = case.buffers()
    emulator.driver.capture()
    emulator.launcher.matmul(case.problem, 0, 0)
    assert not emulator.driver.capture_broken
    emulator.driver.capture(on=False)
    (launch,) = emulator.driver.launches
    assert launch.captured
    emulator.driver.replay()
    assert case.complaints(case.judge(emulator.arch)) == []
    assert emulator.driver.misuse == []


@own_process
def test_preload_during_capture(pack: Path) -> None:
    """`preload` does not break a capture."""
    emulator = Emulator(pack, execute=False)
    emulator.driver.capture()
    emulator.launcher.preload(0)
    assert not emulator.driver.capture_broken
    assert emulator.driver.misuse == []


@own_process
def test_threads_load_once(many_kernels: Path) -> None:
    """32 threads that want every kernel at once load each image once, and each then launches."""
    emulator = Emulator(many_kernels, execute=False)
    fitting = [kernel for kernel in emulator.kernels if kernel.shared_bytes <= target(emulator.arch).shared_bytes]
    barrier, failures = threading.Barrier(32), []

    def work() -> None:
        barrier.wait()
        try:
            emulator.launcher.preload(0)
            emulator.launcher.matmul(SPECIALISED, 0, 0)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(emulator.driver.launches) == 32
    assert names(emulator).count(LOAD[emulator.arch]) == len(fitting)
    assert emulator.driver.misuse == []


@own_process
def test_threads_race_the_first_launch(pack: Path) -> None:
    """32 threads whose first call of anything is the same product open the driver and load its image once."""
    emulator = Emulator(pack, execute=False)
    barrier = threading.Barrier(32)

    def work() -> None:
        barrier.wait()
        emulator.launcher.matmul(SPECIALISED, 0, 0)

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(emulator.driver.launches) == 32
    first = {"sm80": ["cuInit", "cuDevicePrimaryCtxRetain"], "gfx90a": ["hipInit"]}[emulator.arch]
    assert [names(emulator).count(name) for name in (*first, LOAD[emulator.arch])] == [1] * (len(first) + 1)
    assert emulator.driver.misuse == []


@own_process
def test_packs_share_a_process(pack: Path) -> None:
    """Two packs in one process, here the same one twice, share the driver and nothing else."""
    emulator = Emulator(pack, execute=False)
    other = open_pack(pack).launcher
    for launcher in (emulator.launcher, other, emulator.launcher, other):
        launcher.matmul(SPECIALISED, 0, 0)
    assert len(emulator.driver.launches) == 4
    assert names(emulator).count(LOAD[emulator.arch]) == 2 == emulator.driver.live_modules
    assert in_child(lambda: other.device(0)) == FORKED
    assert emulator.driver.misuse == []


@ON_CUDA
@own_process
def test_newer_gpu_gets_the_text(pack: Path) -> None:
    """A GPU of a newer major version gets the PTX of the sm80 pack, byte for byte; the driver compiles it."""
    emulator = Emulator(pack, arch="sm90")
    emulator.launcher.preload(0)
    assert emulator.driver.misuse == []
    with pytest.raises(DriverError, match="cuLaunchKernelEx"):  # the interpreter does not run text
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    ptx = emulator.selected(SPECIALISED).ptx
    assert ptx is not None
    assert emulator.driver.launches[-1].image == code_in(pack)(ptx)


@pytest.fixture(params=[("sm80", "sm80"), ("sm80", "sm90"), ("gfx90a", "gfx90a")], ids="-on-".join)
def twins(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A pack of one tile for fp16 and bf16, and a GPU for it; one of another major version gets the text."""
    arch, gpu = request.param
    if reason := missing(arch):
        pytest.skip(reason)
    return pack_of(arch, TINY.replace('dtypes = ["fp16"]', 'dtypes = ["fp16", "bf16"]')), gpu


@own_process
def test_code_that_is_stored_as_edits(twins: tuple[Path, str]) -> None:
    """A driver gets all bytes of a kernel of which a pack has edits of its twin's: cubin, PTX and hsaco."""
    pack, gpu = twins
    emulator = Emulator(pack, arch=gpu, execute=False)
    code, whole = code_in(pack), []
    for number, kernel in enumerate(emulator.kernels):
        image = kernel.image if gpu == emulator.arch else kernel.ptx
        if kernel.role == "product" and kernel.layout != "any" and image is not None:
            types: dict[str, Any] = {"dtype_a": kernel.dtype_a, "dtype_b": kernel.dtype_b, "dtype_c": kernel.dtype_c}
            # the pretended GPU does not run text
            with nullcontext() if image is kernel.image else pytest.raises(DriverError, match="cuLaunchKernelEx"):
                emulator.launcher.launch(number, dataclasses.replace(SPECIALISED, **types), 0, 0)
            assert emulator.driver.launches[-1].image == code(image)
            whole.append(image.whole)
    assert sorted(whole) == [False, True]
    assert emulator.driver.misuse == []


@ON_CUDA
@own_process
def test_same_major_gpu_gets_the_cubin(pack: Path) -> None:
    """A GPU of the same major version runs the sm80 image itself."""
    emulator = Emulator(pack, arch="sm86", execute=False)
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert emulator.driver.launches[-1].image == code_in(pack)(emulator.selected(SPECIALISED).image)
    assert emulator.driver.misuse == []


# --------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize(
    ("pack", "function", "call", "device"),
    [(arch, *row) for arch, rows in CALLS.items() for row in rows],
    indirect=["pack"],
)
@own_process
def test_failing_call(pack: Path, function: str, call: str, device: int) -> None:
    """A failing driver call is told with name, number, text and device; nothing stays behind; the next call works."""
    emulator = Emulator(pack, devices=2, execute=False)
    emulator.driver.fail_next(function, OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=f"{call} failed on .* device {device}.*{OUT_OF_MEMORY}") as caught:
        emulator.launcher.matmul(SPECIALISED, 1, 0)
    assert (caught.value.call, caught.value.code, caught.value.device) == (call, OUT_OF_MEMORY, device)
    assert emulator.driver.launches == []
    loaded = function in ("cuLaunchKernelEx", "hipModuleLaunchKernel")
    assert emulator.driver.live_modules == int(loaded)
    emulator.launcher.matmul(SPECIALISED, 1, 0)
    assert [launch.device for launch in emulator.driver.launches] == [1]
    assert emulator.driver.live_modules == 1
    assert current(emulator) == {"cuda": None, "hip": 0}[emulator.driver.kind]
    assert emulator.driver.misuse == []


@own_process
def test_failure_leaves_capture_mode_alone(pack: Path) -> None:
    """After a failed load the thread may again break a capture, as before: its capture mode is restored."""
    emulator = Emulator(pack, execute=False)
    emulator.driver.fail_next(LOAD[emulator.arch], OUT_OF_MEMORY)
    with pytest.raises(DriverError):
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    modes = [call.arguments["mode"] for call in emulator.driver.calls if "ExchangeStreamCaptureMode" in call.name]
    assert modes == ["2", "0"]


@own_process
def test_error_number_that_the_driver_does_not_know(pack: Path) -> None:
    """An error number without a name is told by its number."""
    emulator = Emulator(pack, execute=False)
    emulator.driver.fail_next(LOAD[emulator.arch], 12345)
    with pytest.raises(DriverError, match=r"\(12345\)") as caught:
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert caught.value.code == 12345


@ON_CUDA
@own_process
def test_old_driver(pack: Path) -> None:
    """A driver that is too old is told with what it is and what the pack needs."""
    emulator = Emulator(pack, version=11080, execute=False)
    with pytest.raises(DriverError, match=r"driver is 11\.8; pack sm80 needs 12\.0 or newer") as caught:
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert caught.value.call == "cuDriverGetVersion"


@ON_HIP
@own_process
def test_gpu_that_the_hip_images_are_not_for(pack: Path) -> None:
    """An AMD GPU of another arch is a driver error with the driver's number for it."""
    emulator = Emulator(pack, arch="gfx942", execute=False)
    with pytest.raises(DriverError, match="hipModuleLoadData") as caught:
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert caught.value.code == 209


@pytest.mark.parametrize("pack", ["sm90"], indirect=True)
@own_process
def test_gpu_that_the_cuda_images_are_not_for(pack: Path) -> None:
    """A pack without text says which pack to build for a GPU of another major version."""
    emulator = Emulator(pack, arch="sm80", execute=False)
    with pytest.raises(NoKernelError, match=r"no code for CUDA device 0 \(sm_80\): .* 9\.0 alone; use"):
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert emulator.driver.misuse == []


def in_child(action: Callable[[], object]) -> str:
    """What `action` raises in a child of a fork, "" if nothing; "crashed" where the child says nothing at all."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "crashed"
        try:
            action()
            text = ""
        except DriverError as error:
            text = f"{error.call} {error.device} {error}"
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(reader, 4096).decode()
    os.close(reader)
    return said if status == 0 else "crashed"


FORKED = (
    "fork 0 device 0 cannot be used: this process was forked after the GPU's driver had been opened, and GPU contexts "
    'do not survive fork; start such processes with multiprocessing.get_context("spawn")'
)


@pytest.mark.parametrize("first_use", ["device", "preload", "launch"])
@own_process
def test_child_of_fork(pack: Path, first_use: str) -> None:
    """In a child that was forked after the driver was opened, and in its own, every use says so; the parent goes on."""
    emulator = Emulator(pack, execute=False)
    uses: dict[str, Callable[[], object]] = {
        "device": lambda: emulator.launcher.device(0),
        "preload": lambda: emulator.launcher.preload(0),
        "launch": lambda: emulator.launcher.matmul(SPECIALISED, 0, 0),
    }

    def grandchild() -> None:
        assert in_child(uses["launch"]) == FORKED

    uses[first_use]()
    before = len(names(emulator))
    assert [in_child(use) for use in uses.values()] == [FORKED] * len(uses)
    assert in_child(grandchild) == ""
    assert len(names(emulator)) == before
    uses["launch"]()
    assert emulator.driver.misuse == []


@own_process
def test_fork_before_first_use(pack: Path) -> None:
    """A pack may be opened and asked what it would launch, then a fork: child and parent both launch."""
    emulator = Emulator(pack, execute=False)
    row = target(emulator.arch)
    emulator.launcher.select(SPECIALISED, CDevice(row.multiprocessors, row.shared_bytes))
    assert in_child(lambda: emulator.launcher.matmul(SPECIALISED, 0, 0)) == ""
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert emulator.driver.misuse == []


TELL = """
import sys
from pathlib import Path
from aotmm.errors import DriverError
from aotmm.runtime.pack import open_pack
launcher = open_pack(Path(sys.argv[1])).launcher
for attempt in range(2):
    try:
        launcher.device(0)
    except DriverError as error:
        print(error.code, error.device, error.call, error)
"""
LIBRARIES = {"sm80": ["libcuda.so.1"], "gfx90a": [f"libamdhip64.so{version}" for version in (".7", ".6", ".5", "")]}


def test_no_driver(pack: Path, tmp_path: Path) -> None:
    """Without a driver library the error says so, each time, and what to install."""
    for name in LIBRARIES[pack.name]:
        (tmp_path / name).write_text("not a library")
    done = run_python(TELL, pack, LD_LIBRARY_PATH=str(tmp_path))
    lines = done.stdout.splitlines()
    what = {"sm80": "the CUDA driver cannot be opened: ", "gfx90a": "the HIP runtime cannot be opened: "}[pack.name]
    todo = {"sm80": "; install the NVIDIA driver", "gfx90a": "; install ROCm"}[pack.name]
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert line.startswith(f"0 -1 dlopen {what}")
        assert line.endswith(todo)


def test_driver_without_a_function(pack: Path, tmp_path: Path) -> None:
    """A driver library that lacks a function is told with the function and what is needed."""
    (tmp_path / "empty.c").write_text("int nothing;\n")
    for name in LIBRARIES[pack.name]:
        command = [*link.compiler()[0], "-O2", "-s", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "empty.c"]
        subprocess.run(command, cwd=tmp_path, check=True)
    done = run_python(TELL, pack, LD_LIBRARY_PATH=str(tmp_path))
    words = {
        "sm80": "0 -1 cuDriverGetVersion the CUDA driver has no cuDriverGetVersion; pack sm80 needs driver 12.0 or "
        "newer; update the NVIDIA driver",
        "gfx90a": "0 -1 hipInit the HIP runtime has no hipInit; update ROCm",
    }[pack.name]
    assert done.stdout.splitlines() == [words, words], shlex.join(command) + done.stderr


@ON_CUDA
def test_old_driver_without_a_function(pack: Path, tmp_path: Path) -> None:
    """A real driver that is too old lacks functions too, but is told by its version."""
    (tmp_path / "old.c").write_text(
        "int cuDriverGetVersion(int *v) { return *v = 11040, 0; }\n"
        "int cuGetErrorName(int e, const char **t) { return *t = 0, e; }\n"
        "int cuGetErrorString(int e, const char **t) { return *t = 0, e; }\n"
    )
    command = [*link.compiler()[0], "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "old.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = run_python(TELL, pack, LD_LIBRARY_PATH=str(tmp_path))
    words = "the CUDA driver is 11.4; pack sm80 needs 12.0 or newer; update the NVIDIA driver"
    assert done.stdout.splitlines() == [f"0 -1 cuDriverGetVersion {words}"] * 2, done.stderr
