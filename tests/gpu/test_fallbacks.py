"""Which code of the packs this GPU takes, and which it refuses, by the real driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import aotmm
from aotmm.runtime.devices import device
from aotmm.runtime.diagnosis import diagnose
from aotmm.runtime.library import Library
from aotmm.runtime.pack import Pack
from aotmm.target import ways_to_run
from tests.gpu.driver import CallError, load
from tests.gpu.judge import integers
from tests.samples import code_in

NO_BINARY_FOR_GPU = 209


@pytest.fixture
def older(lib: Library) -> Pack:
    """The pack for sm80, where the GPU is of a newer major version."""
    if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this needs a GPU of a newer major version than the pack for sm80")
    return next(pack for pack in lib.packs if pack.arch == "sm80")


def test_cubins_of_another_major_version_are_refused(older: Pack) -> None:
    """The driver takes no cubin for sm80 here, which is why the launcher gives it the text; the GPU stays usable."""
    code = code_in(older.folder)
    for kernel in older.manifest.kernels:
        with pytest.raises(CallError) as caught:
            load(kernel, code(kernel.image))
        assert caught.value.code == NO_BINARY_FOR_GPU, kernel.name
    assert (torch.ones(3, device="cuda") == 1).all()


def test_text_for_what_is_newer(older: Pack, generator: torch.Generator, limit: Callable[[int], None]) -> None:
    """With the pack for sm80 alone its PTX runs, exactly; doctor says so, and every kernel of it can be loaded."""
    limit(600)  # the driver compiles each
    forced = aotmm.load(older.folder)
    assert forced.pack_for(0).arch == "sm80"
    assert ways_to_run("sm80", device(0).arch) == "ptx"
    state = diagnose(older.folder).devices[0]
    assert (state.pack, state.way, state.error) == ("sm80", "ptx", None)
    a, b = integers(300, 200, 264, "fp16", torch.float16, generator=generator)
    assert (forced.matmul(a.half(), b.half()) == (a @ b).half()).all()
    forced.preload()


def test_the_best_code_is_taken(lib: Library) -> None:
    """With every pack there the one of this very arch serves, where there is one."""
    archs = {pack.arch for pack in lib.packs}
    state = diagnose(None).devices[0]
    if device(0).arch in archs:
        assert (lib.pack_for(0).arch, state.way) == (device(0).arch, "exact")
    else:
        assert state.way in ("compatible", "ptx")
