"""The stand-ins for the drivers: a host program's mistakes are refused and recorded, as a driver would or stricter."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.emulators.fake_driver import FakeDriver
from tests.emulators.variants import Image, Problem, Variant, image, problem
from tests.native.emulation import ARCHS, missing, own_process

PLAIN = Variant()
KINDS = {"sm80": "cuda", "gfx90a": "hip"}
MAX_SHARED = 8  # CUfunction_attribute
INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT = 1, 3, 201
NO_BINARY_FOR_GPU, INVALID_HANDLE, CAPTURE_UNSUPPORTED = 209, 400, 900


@pytest.fixture(autouse=True)
def _tools(request: pytest.FixtureRequest) -> None:
    arch = request.getfixturevalue("arch") if "arch" in request.fixturenames else "sm80"
    if reason := missing(arch):
        pytest.skip(reason)


def must(error: int) -> None:
    """Raises AssertionError if a call failed."""
    assert error == 0, error


def enter(driver: FakeDriver) -> None:
    """Starts the driver and makes device 0 current."""
    if driver.kind == "hip":
        must(driver.lib.hipInit(0))
        return
    context = ctypes.c_void_p()
    must(driver.lib.cuInit(0))
    must(driver.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(driver.lib.cuCtxSetCurrent(context))


def load(driver: FakeDriver, data: bytes) -> tuple[int, ctypes.c_void_p]:
    """What loading an image returns, and the module."""
    module = ctypes.c_void_p()
    function = driver.lib.hipModuleLoadData if driver.kind == "hip" else driver.lib.cuModuleLoadData
    return int(function(ctypes.byref(module), data)), module


def loaded(driver: FakeDriver, compiled: Image) -> ctypes.c_void_p:
    """The kernel of an image, which may have the shared memory that it needs."""
    error, module = load(driver, compiled.data)
    must(error)
    kernel = ctypes.c_void_p()
    if driver.kind == "hip":
        must(driver.lib.hipModuleGetFunction(ctypes.byref(kernel), module, compiled.symbol.encode()))
    else:
        must(driver.lib.cuModuleGetFunction(ctypes.byref(kernel), module, compiled.symbol.encode()))
        must(driver.lib.cuFuncSetAttribute(kernel, MAX_SHARED, compiled.shared))
    return kernel


def launch(driver: FakeDriver, kernel: ctypes.c_void_p, compiled: Image, task: Problem, **wrong: Any) -> int:
    """What a launch returns; `wrong` is in the place of the grid, block or shared memory that are right."""
    types = {"*": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
    values = [types[kind](value) for value, kind in task.parameters]
    values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # Triton's scratch
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    function = driver.lib.hipModuleLaunchKernel if driver.kind == "hip" else driver.lib.cuLaunchKernel
    grid, block = wrong.get("grid", task.grid), wrong.get("block", (compiled.threads, 1, 1))
    return int(function(kernel, *grid, *block, wrong.get("shared", compiled.shared), None, pointers, None))


def placed(driver: FakeDriver) -> Problem:
    """A problem at its memory's own addresses, which the driver's kernels may touch."""
    task = problem(PLAIN, 70, 90, 101)
    for place, (name, array) in enumerate(task.memory.items()):
        task.parameters[place] = (int(array.ctypes.data), "*")
        task.addresses[name] = int(array.ctypes.data)
    driver.buffers = [(name, array, task.modes[name]) for name, array in task.memory.items()]
    driver.launches.clear()
    return task


@pytest.mark.parametrize("arch", ARCHS)
@own_process
def test_mistakes_of_launches(arch: str) -> None:
    """A right launch is right; each wrong grid, block, shared memory or parameter fails and says why."""
    driver, compiled = FakeDriver(KINDS[arch]), image(PLAIN, arch)
    enter(driver)
    kernel, task = loaded(driver, compiled), placed(driver)
    must(launch(driver, kernel, compiled, task))
    (done,) = driver.launches
    assert done.stats is not None
    assert task.complaints(done.stats) == driver.misuse == driver.faults == []
    for wrong in (
        {"shared": 0},
        {"shared": 1 << 20},
        {"block": (compiled.threads // 2, 1, 1)},
        {"block": (2048, 1, 1)},
        {"grid": (0, 1, 1)},
    ):
        before = len(driver.misuse)
        assert launch(driver, kernel, compiled, placed(driver), **wrong) != 0, wrong
        assert driver.faults or len(driver.misuse) > before, wrong
    for order in (
        [0, 1, 2, 4, 3, *range(5, len(task.parameters))],  # M for N
        [0, 1, 2, 3, 4, 5, 7, 6, *range(8, len(task.parameters))],  # a stride for another
    ):
        task = placed(driver)
        task.parameters = [task.parameters[number] for number in order]
        assert launch(driver, kernel, compiled, task) != 0, order
        assert len(driver.faults) == 1, order


@pytest.mark.parametrize("arch", ARCHS)
@own_process
def test_capture(arch: str) -> None:
    """Nothing runs while a stream captures, replaying is right, and loading meanwhile breaks the capture."""
    driver, compiled = FakeDriver(KINDS[arch]), image(PLAIN, arch)
    enter(driver)
    kernel, task = loaded(driver, compiled), placed(driver)
    driver.capture()
    must(launch(driver, kernel, compiled, task))
    assert not task.memory["C"].any()
    driver.capture(on=False)
    driver.replay()
    stats = driver.launches[0].stats
    assert stats is not None
    assert task.complaints(stats) == []
    driver.capture()
    assert load(driver, compiled.data)[0] == CAPTURE_UNSUPPORTED
    assert driver.capture_broken


@pytest.mark.parametrize(("arch", "other"), [("sm80", "sm90"), ("gfx90a", "gfx942")])
@own_process
def test_wrong_device(arch: str, other: str) -> None:
    """A GPU refuses code for another, and a kernel that was loaded on another device."""
    compiled = image(PLAIN, arch)
    driver = FakeDriver(KINDS[arch], arch=other, execute=False)
    enter(driver)
    assert load(driver, compiled.data)[0] == NO_BINARY_FOR_GPU
    driver = FakeDriver(KINDS[arch], devices=2, execute=False)
    enter(driver)
    kernel = loaded(driver, compiled)
    if arch == "gfx90a":
        must(driver.lib.hipSetDevice(1))
    else:
        context = ctypes.c_void_p()
        must(driver.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1))
        must(driver.lib.cuCtxSetCurrent(context))
    assert launch(driver, kernel, compiled, placed(driver)) == INVALID_HANDLE
    assert len(driver.misuse) == 1


@own_process
def test_order_of_calls() -> None:
    """CUDA answers no call before it is started, loads nothing without a context, and encodes no odd tensor map."""
    driver, compiled = FakeDriver("cuda", execute=False), image(PLAIN, "sm80")
    assert driver.lib.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALIZED
    must(driver.lib.cuInit(0))
    assert load(driver, compiled.data)[0] == INVALID_CONTEXT
    enter(driver)
    memory = (ctypes.c_uint64 * 24)()
    place = ctypes.c_void_p(-(-ctypes.addressof(memory) // 64) * 64)
    sizes, box = (ctypes.c_uint64 * 2)(64, 64), (ctypes.c_uint32 * 2)(64, 64)

    def encode(stride: int) -> int:
        steps = (ctypes.c_uint64 * 1)(stride)
        address = ctypes.c_void_p(1 << 20)
        return int(driver.lib.cuTensorMapEncodeTiled(place, 6, 2, address, sizes, steps, box, box, 0, 0, 0, 0))

    assert (encode(128), encode(120)) == (0, 1)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, a size of clusters."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


@pytest.mark.parametrize(
    ("arch", "cluster", "grid", "count"),
    [
        ("sm80", (1, 1, 1), (7, 1, 1), 108),
        ("sm80", (2, 1, 1), (8, 1, 1), None),  # before sm_90
        ("sm90", (1, 1, 1), (7, 1, 1), 132),
        ("sm90", (2, 1, 1), (8, 1, 1), 66),
        ("sm90", (2, 2, 1), (8, 2, 1), 30),
        ("sm90", (4, 2, 1), (4, 2, 1), 15),
        ("sm90", (2, 1, 1), (7, 1, 1), None),  # half of a cluster
        ("sm90", (1, 2, 1), (8, 1, 1), None),
        ("sm90", (4, 4, 1), (4, 4, 1), None),  # more than every GPU can
        ("sm90", (0, 1, 1), (8, 1, 1), None),
    ],
)
@own_process
def test_clusters(arch: str, cluster: tuple[int, int, int], grid: tuple[int, int, int], count: int | None) -> None:
    """CUDA says how many clusters of a size run at once, if the GPU has such and the grid is made of them."""
    driver = FakeDriver("cuda", arch=arch, execute=False)
    enter(driver)
    error, module = load(driver, b".version 8.0\n.visible .entry tile()")
    must(error)
    kernel, found = ctypes.c_void_p(), ctypes.c_int(-1)
    must(driver.lib.cuModuleGetFunction(ctypes.byref(kernel), module, b"tile"))
    size = Attribute(4, 0, (ctypes.c_uint32 * 16)(*cluster))
    config = Config(grid, (128, 1, 1), 0, None, ctypes.pointer(size), 1)
    error = driver.lib.cuOccupancyMaxActiveClusters(ctypes.byref(found), kernel, ctypes.byref(config))
    assert (error, found.value) == ((0, count) if count else (INVALID_VALUE, -1))
    assert bool(driver.misuse) == (count is None)
    driver.clusters(5)
    again = driver.lib.cuOccupancyMaxActiveClusters(ctypes.byref(found), kernel, ctypes.byref(config))
    assert (again, found.value) == ((0, 5) if count else (INVALID_VALUE, -1))
    if count is None:
        assert driver.lib.cuLaunchKernelEx(ctypes.byref(config), kernel, (ctypes.c_void_p * 1)(), None) == INVALID_VALUE
