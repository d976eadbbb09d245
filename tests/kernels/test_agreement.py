"""The interpreters' half of tests/agreement.py: what an image of each kind gives there, bit for bit.

The other half is tests/gpu/test_emulator_agreement.py: the same launch of every image on a GPU. That every image is
right in the interpreters is for test_tile.py and test_helpers.py to show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aotmm.pack.schema import Kernel
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.agreement import encode, launch_of
from tests.build.packs import generic_pack
from tests.emulators import numerics
from tests.native.emulation import ARCHS, interpreter, missing, submit
from tests.samples import code_in

IMAGES_PER_CALL = 8


def disagreeing(arch: str, folder: Path, kernels: list[Kernel]) -> list[str]:
    """The kernels whose result is not the one that is wanted, and in how many elements."""
    wrong, code = [], code_in(folder)
    for kernel in kernels:
        launch = launch_of(kernel)
        addresses = {name: int(array.ctypes.data) for name, array in launch.memory.items()}
        interpreter(arch)(
            code(kernel.image),
            kernel.symbol,
            (launch.programs, 1, 1),
            (kernel.threads, 1, 1),
            launch.parameters(kernel, addresses),
            kernel.shared_bytes,
            [
                (name, array, addresses[name], "rw" if name == launch.written else "r")
                for name, array in launch.memory.items()
            ],
        )
        if count := launch.wrong(launch.memory[launch.written]):
            wrong.append(f"{kernel.name}: {count} elements")
    return wrong


def all_disagreeing(arch: str, folder: Path, kernels: list[Kernel]) -> list[str]:
    """Likewise, with several images at a time."""
    futures = [
        submit(disagreeing, arch, folder, kernels[first : first + IMAGES_PER_CALL])
        for first in range(0, len(kernels), IMAGES_PER_CALL)
    ]
    return [name for future in futures for name in future.result()]


@pytest.mark.parametrize("arch", ARCHS)
def test_an_image_of_each_kind_agrees(arch: str, interpreted_pack: Callable[[str], Path]) -> None:
    """An image of each role, type and epilogue gives exactly what is wanted and stores nothing else."""
    folder = interpreted_pack(arch)
    kinds = {
        (k.role, k.dtype_a, k.dtype_b, k.dtype_c, k.epilogue, k.layout == "any"): k
        for k in open_pack(folder).manifest.kernels
    }
    assert all_disagreeing(arch, folder, list(kinds.values())) == []


@pytest.mark.parametrize("arch", ["sm86", "sm89"])
def test_images_for_others_of_the_major(arch: str) -> None:
    """Images for 8.6 and 8.9 agree too: generic ones of every type, which divide 64-bit integers, and fp8 of 8.9."""
    if reason := missing(arch):
        pytest.skip(reason)
    folder = generic_pack(arch)
    kernels = list(open_pack(folder).manifest.kernels)
    generic = {
        (kernel.dtype_a, kernel.dtype_b) for kernel in kernels if (kernel.role, kernel.layout) == ("product", "any")
    }
    assert len(generic) == len(target(arch).dtypes)
    assert all_disagreeing(arch, folder, kernels) == []


def test_formulas_are_those_of_the_interpreters() -> None:
    """Rounding to every type is what the interpreters' own is, for integers and halves, ties included."""
    values = np.arange(-60_000, 60_000, dtype=np.int64)
    for dtype in ("fp16", "bf16", "fp32", "int32"):
        for numbers in (values, values * 0.5) if dtype != "int32" else (values,):
            want = numerics.encode(numbers, dtype)
            assert (encode(numbers, dtype) == want).all()
    for dtype in ("fp8e5", "fp8e4", "int8"):
        small = np.arange(-128, 128) if dtype == "int8" else np.arange(-4, 5)
        assert (encode(small, dtype) == numerics.encode(small, dtype)).all()


def test_one_bit_is_seen(interpreted_pack: Callable[[str], Path]) -> None:
    """What is wanted agrees with itself, and one flipped bit of it, of an element or beside C, does not."""
    kernels = {kernel.role: kernel for kernel in open_pack(interpreted_pack("sm80")).manifest.kernels}
    for kernel in kernels.values():
        launch = launch_of(kernel)
        assert launch.wrong(launch.want) == 0
        assert launch.wrong(launch.memory[launch.written]) > launch.want.size // 4
        for place in (0, -1) if launch.edge is None else (0,):
            altered = launch.want.copy()
            altered.reshape(-1).view(np.uint8)[place] ^= 1
            assert launch.wrong(altered) == 1
