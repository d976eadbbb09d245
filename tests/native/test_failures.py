"""Faults in the driver, 10,000 times each: a typed error every time, nothing left behind, and the next call works."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from aotmm.errors import DriverError
from aotmm.runtime.launcher import COPY_A, COPY_B, Plan
from tests.build.packs import plans_pack
from tests.native.emulation import ARCHS, Emulator, fresh_process, missing, own_process
from tests.native.test_driver import LOAD, ON_CUDA, SPECIALISED, current
from tests.native.test_plans import number_of, problem_of

FAILURES = 10_000
LOG_LINES = 1_000  # failures between two times that the fake driver forgets what it was called with
GROWTH = 1 << 20  # bytes that memory may grow by: 100 for each failure
OUT_OF_MEMORY, INVALID_CONTEXT, NOT_FOUND, ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED = 2, 201, 500, 700, 709
LAUNCH = {"sm80": "cuLaunchKernelEx", "gfx90a": "hipModuleLaunchKernel"}


class Fault(NamedTuple):
    """A driver function of the fake's that fails, with which number.

    Attributes:
        loaded: the kernel was loaded before.
        copied: each time the fake has loaded the image, and keeps a copy of what it unloads.
    """

    arch: str
    function: str
    code: int
    loaded: bool = False
    copied: bool = False


FAULTS = [
    Fault("sm80", "cuInit", OUT_OF_MEMORY),
    Fault("sm80", "cuDevicePrimaryCtxRetain", OUT_OF_MEMORY),
    Fault("sm80", "cuCtxPushCurrent_v2", CONTEXT_IS_DESTROYED),
    Fault("sm80", "cuLibraryLoadData", OUT_OF_MEMORY),
    Fault("sm80", "cuLibraryGetKernel", NOT_FOUND, copied=True),
    Fault("sm80", "cuKernelSetAttribute", OUT_OF_MEMORY, copied=True),
    Fault("sm80", "cuKernelGetFunction", OUT_OF_MEMORY, copied=True),
    Fault("sm80", "cuLaunchKernelEx", OUT_OF_MEMORY, loaded=True),
    Fault("sm80", "cuLaunchKernelEx", ILLEGAL_ADDRESS, loaded=True),
    Fault("sm80", "*", ILLEGAL_ADDRESS, loaded=True),
    Fault("gfx90a", "hipInit", OUT_OF_MEMORY),
    Fault("gfx90a", "hipSetDevice", OUT_OF_MEMORY),
    Fault("gfx90a", "hipModuleLoadData", OUT_OF_MEMORY),
    Fault("gfx90a", "hipModuleGetFunction", NOT_FOUND, copied=True),
    Fault("gfx90a", "hipModuleLaunchKernel", OUT_OF_MEMORY, loaded=True),
    Fault("gfx90a", "*", ILLEGAL_ADDRESS, loaded=True),
]


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """File descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def fail(emulator: Emulator, fault: Fault, times: int) -> None:
    """Has the fault happen that often on device 1; each is an error with the call and its number."""
    for turn in range(times):
        emulator.driver.fail_next(fault.function, fault.code)
        with pytest.raises(DriverError) as caught:
            emulator.launcher.matmul(SPECIALISED, 1, 0)
        assert caught.value.code == fault.code
        assert fault.function in ("*", caught.value.call, f"{caught.value.call}_v2")
        if turn % LOG_LINES == 0:
            assert emulator.driver.misuse == []
            emulator.driver.lib.fake_log_clear()


@pytest.mark.parametrize(
    ("pack", "fault"),
    [pytest.param(fault.arch, fault, id=f"{fault.arch}-{fault.function}-{fault.code}") for fault in FAULTS],
    indirect=["pack"],
)
@fresh_process
def test_nothing_leaks(pack: Path, fault: Fault) -> None:
    """No handle, no memory and no file descriptor stays; then the same call works, on this device and another."""
    emulator = Emulator(pack, devices=2, execute=False)
    if fault.loaded:
        emulator.launcher.matmul(SPECIALISED, 1, 0)
    fail(emulator, fault, LOG_LINES)  # what is allocated once, and the log
    memory, files = resident_bytes(), open_files()
    fail(emulator, fault, FAILURES)
    copies = FAILURES * (emulator.selected(SPECIALISED).image.bytes + 1024) if fault.copied else 0
    assert resident_bytes() - memory < GROWTH + copies
    assert open_files() == files
    assert emulator.driver.live_modules == int(fault.loaded)
    emulator.driver.launches.clear()
    for device in (1, 0):
        emulator.launcher.matmul(SPECIALISED, device, 0)
    assert [launch.device for launch in emulator.driver.launches] == [1, 0]
    assert emulator.driver.live_modules == 2
    assert current(emulator) == {"cuda": None, "hip": 0}[emulator.driver.kind]
    assert emulator.driver.misuse == []


@own_process
def test_other_devices_go_on(pack: Path) -> None:
    """While every call on one device fails, as after a fault in a kernel, another multiplies."""
    emulator = Emulator(pack, devices=2, execute=False)
    for _ in range(100):
        fail(emulator, Fault(emulator.arch, "*", ILLEGAL_ADDRESS), 1)
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert [launch.device for launch in emulator.driver.launches] == [0] * 100


@ON_CUDA
@own_process
def test_context_that_was_destroyed(pack: Path) -> None:
    """A primary context that someone else resets is a typed error each time; made again, it serves again."""
    emulator = Emulator(pack, devices=2, execute=False)
    for device in (0, 1):
        emulator.launcher.matmul(SPECIALISED, device, 0)
    lib = emulator.driver.lib
    assert lib.cuDevicePrimaryCtxRelease_v2(1) == 0
    for _ in range(100):
        with pytest.raises(DriverError, match="cuCtxPushCurrent failed on CUDA device 1") as caught:
            emulator.launcher.matmul(SPECIALISED, 1, 0)
        assert caught.value.code == INVALID_CONTEXT
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 1) == 0
    emulator.launcher.matmul(SPECIALISED, 1, 0)
    assert emulator.driver.misuse == []


@pytest.fixture(params=ARCHS)
def plans(request: pytest.FixtureRequest) -> Path:
    """A pack that has plans of every kind."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return plans_pack(request.param)


@own_process
def test_every_launch_of_a_plan(plans: Path) -> None:
    """Whichever load or launch of a plan of three fails, it is told, nothing is launched after, and the next runs."""
    emulator = Emulator(plans, execute=False)
    problem = problem_of(70, 136, 520, a_ptr=(1 << 40) + 2, b_ptr=(2 << 40) + 2)
    plan = Plan(number_of(emulator, "partial"), 3, COPY_A | COPY_B, workspace_bytes=1 << 30)
    images = launches = 3  # one launch copies A and B

    def fails(function: str, skip: int) -> None:
        emulator.driver.launches.clear()
        emulator.driver.fail_next(function, OUT_OF_MEMORY, skip)
        with pytest.raises(DriverError, match=function):
            emulator.launcher.run(plan, problem, 0, 0, 1 << 44)

    for loaded in range(images):
        fails(LOAD[emulator.arch], min(loaded, 1))  # each time one more is loaded before the one that is not
        assert emulator.driver.live_modules == loaded
    for position in range(launches):
        fails(LAUNCH[emulator.arch], position)
        assert len(emulator.driver.launches) == position
        emulator.driver.launches.clear()
        emulator.launcher.run(plan, problem, 0, 0, 1 << 44)
        assert len(emulator.driver.launches) == launches
    assert emulator.driver.live_modules == images
    assert emulator.driver.misuse == []
