"""Which code of a CUDA pack a GPU gets: a cubin of its major version that fits, text if it is newer, else an error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from aotmm.errors import DriverError, NoKernelError
from aotmm.pack.schema import Kernel
from aotmm.runtime.pack import open_pack
from tests.build.packs import default_pack, tiny_pack
from tests.native.emulation import Emulator, Product, missing, own_process
from tests.native.test_driver import SPECIALISED, names
from tests.native.test_plans import changed_pack
from tests.samples import code_in

SHARED_OF_8_6 = 101_376  # Source: CUDA programming guide, table of compute capabilities
NEWER = ("sm90", "sm100", "sm120")


@pytest.fixture(params=["sm80"])
def pack(request: pytest.FixtureRequest) -> Path:
    """A small pack, for sm80 unless a test names the arch."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    return tiny_pack(request.param)


@pytest.mark.parametrize("gpu", ["sm80", "sm86", "sm89"])
@own_process
def test_gpus_of_the_major_version_run_the_cubin(pack: Path, gpu: str) -> None:
    """8.0, 8.6 and 8.9 run the sm80 cubin itself, and its products are right."""
    emulator = Emulator(pack, arch=gpu)
    assert emulator.run(Product(70, 90, 100)).complaints == ()
    assert emulator.run(Product(64, 64, 64)).complaints == ()


@pytest.mark.parametrize("gpu", ["sm80", "sm86", "sm89"])
@own_process
def test_kernels_that_do_not_fit_are_left_out(pack: Path, tmp_path: Path, gpu: str) -> None:
    """A kernel over the 99 KB of 8.6 and 8.9 is taken on 8.0 only; there it is never loaded, and another serves."""

    def larger(kernel: Kernel) -> Kernel:
        return (
            replace(kernel, shared_bytes=SHARED_OF_8_6 + 1024)
            if (kernel.role, kernel.layout) == ("product", "nn")
            else kernel
        )

    emulator = Emulator(changed_pack(pack, tmp_path, larger), arch=gpu, execute=False)
    fits = gpu == "sm80"
    emulator.launcher.matmul(SPECIALISED, 0, 0)
    emulator.launcher.preload(0)
    assert emulator.selected(SPECIALISED).layout == ("nn" if fits else "any")
    left_out = [kernel for kernel in emulator.kernels if kernel.shared_bytes > SHARED_OF_8_6]
    assert emulator.driver.live_modules == len(emulator.kernels) - (0 if fits else len(left_out))
    number = emulator.kernels.index(left_out[0])
    verdict = emulator.launcher.check(SPECIALISED, emulator.launcher.device(0), number)
    assert verdict.rejected == (
        None if fits else f"needs {SHARED_OF_8_6 + 1024} B of shared memory per block, the device has {SHARED_OF_8_6} B"
    )
    if not fits:
        with pytest.raises(NoKernelError, match="do not fit M=128"):
            emulator.launcher.launch(number, SPECIALISED, 0, 0)
    assert emulator.driver.misuse == []


@pytest.mark.parametrize("gpu", NEWER)
@own_process
def test_newer_gpus_get_the_text(pack: Path, gpu: str) -> None:
    """Every newer major version gets the PTX of each kernel and no cubin."""
    emulator = Emulator(pack, arch=gpu, execute=False)
    emulator.driver.fail_next("cuLaunchKernelEx", 700)  # the interpreter does not read text
    with pytest.raises(DriverError, match="cuLaunchKernelEx"):
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    emulator.launcher.preload(0)
    assert emulator.driver.live_modules == len(emulator.kernels)
    assert emulator.driver.misuse == [], "a cubin was tried"


def test_text_is_for_old_drivers() -> None:
    """Every kernel for sm80 is shipped as text of PTX ISA 8.0 for sm_80, which driver 12.0 reads already."""
    folder = default_pack("sm80")
    kernels, code = open_pack(folder).manifest.kernels, code_in(folder)
    for kernel in kernels:
        assert kernel.ptx is not None
        text = code(kernel.ptx).decode()
        assert re.findall(r"^\.(version|target) (.*)$", text, re.MULTILINE) == [("version", "8.0"), ("target", "sm_80")]
    assert open_pack(folder).head.min_driver == 12_000


@pytest.mark.parametrize(
    ("pack", "gpu"), [("sm80", "sm75"), ("sm80", "sm70"), ("sm90", "sm89"), ("sm90", "sm100")], indirect=["pack"]
)
@own_process
def test_gpus_that_a_pack_has_nothing_for(pack: Path, gpu: str) -> None:
    """What is older, or newer than a pack without text, is refused with both, before the driver is given anything."""
    emulator = Emulator(pack, arch=gpu, execute=False)
    since = {"sm80": r"8\.0 and later ones of that major version, and PTX", "sm90": r"9\.0 alone;"}[pack.name]
    words = rf"pack {pack.name} has no code for CUDA device 0 \(sm_{gpu[2:]}\): it has cubins for {since}"
    with pytest.raises(NoKernelError, match=words):
        emulator.launcher.matmul(SPECIALISED, 0, 0)
    with pytest.raises(NoKernelError, match=words):
        emulator.launcher.preload(0)
    assert "cuLibraryLoadData" not in names(emulator)
    assert emulator.driver.misuse == []
