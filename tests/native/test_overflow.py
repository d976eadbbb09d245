"""Absurd numbers through the C code, compiled so that any undefined arithmetic ends the process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from aotmm.build import link, torch_library
from aotmm.errors import NoKernelError
from aotmm.problem import WORKSPACE_LIMIT
from aotmm.runtime.launcher import COPY_A, COPY_C, Plan, Problem
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice
from tests.build.packs import pack_of, plans_pack
from tests.native.emulation import Emulator, missing, own_process, panels
from tests.native.test_plans import changed_pack
from tests.native.test_torch_ops import FakeTorch
from tests.native.test_turned import CONFIGS as FMA

SANITIZED = ("-fsanitize=undefined", "-fsanitize-trap=undefined")
STRIDES = (0, 1, 2, 3, 8, 1000, 2**31, 2**32 - 1, 2**61, 2**61 + 1, 2**62, 2**63 - 8, 2**63 - 1)
SIZES = (1, 2, 8, 64, 520, 4096, 2**31 - 2**16, 2**33, 2**62, 2**63 - 1)
USUAL_SIZES = (1, 8, 70, 520)
ADDRESSES = (0, 256, 258, 2**40, 2**63 - 256, 2**63 - 2)
LIMITS = (0, 2**20, WORKSPACE_LIMIT, 2**64 - 1)
PROBLEMS = 400
MOST_PANELS = 64


@contextlib.contextmanager
def sanitized() -> Iterator[None]:
    """Whatever is linked inside traps where C leaves open how it goes on."""
    with mock.patch.object(link, "FLAGS", (*link.FLAGS, *SANITIZED)):
        yield


@pytest.fixture(scope="module")
def sanitized_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of all roles whose launcher traps."""
    with sanitized():
        return changed_pack(plans_pack("sm80"), tmp_path_factory.mktemp("sanitized"), lambda kernel: kernel)


@pytest.fixture(scope="module")
def sanitized_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a kernel of family fma, which may have A turned."""
    with sanitized():
        return changed_pack(pack_of("sm80", FMA, "threads"), tmp_path_factory.mktemp("threads"), lambda kernel: kernel)


@pytest.mark.parametrize("rows", [2**31 - 3, 2**62 - 1, 2**63 - 9, 2**63 - 4, 2**63 - 3, 2**63 - 1])
@own_process
def test_rows_up_to_whole_vectors(sanitized_threads: Path, rows: int) -> None:
    """A plan of many rows that are no whole vectors is refused; no arithmetic on the way is undefined."""
    emulator = Emulator(sanitized_threads, execute=False)
    problem = Problem(rows, 8, 8, (8, 1), (1, 8), (8, 1), "fp32", "fp32", "fp32", "none", 1 << 40, 2 << 40, 3 << 40)
    number = next(n for n, kernel in enumerate(emulator.kernels) if (kernel.role, kernel.layout) == ("product", "tt"))
    plan = Plan(number, copies=COPY_A | COPY_C, workspace_bytes=2**40)
    with contextlib.suppress(NoKernelError):  # the generic kernel takes what fits its grid
        emulator.launcher.select(problem, CDevice(108, 166_912), WORKSPACE_LIMIT)
    with pytest.raises(NoKernelError):
        emulator.launcher.run(plan, problem, 0, 0, 1 << 44)


def absurd(rng: np.random.Generator) -> Problem:
    """A product of any numbers that the C interface takes."""

    def of(values: tuple[int, ...]) -> Callable[[], int]:
        return lambda: int(values[rng.integers(len(values))])

    size, stride, address = of(SIZES if rng.random() < 0.5 else USUAL_SIZES), of(STRIDES), of(ADDRESSES)
    return Problem(
        M=size(),
        N=size(),
        K=size(),
        strides_a=(stride(), stride()),
        strides_b=(stride(), stride()),
        strides_c=(stride(), stride()),
        dtype_a="fp16",
        dtype_b="fp16",
        dtype_c="fp16",
        activation=("none", "relu")[rng.integers(2)],
        a_ptr=address(),
        b_ptr=address(),
        c_ptr=address(),
        batch=of((1, 1, 1, 2, 2**33, 2**63 - 1))(),
        batch_strides=(stride(), stride(), stride()),
        bias_ptr=address(),
        bias_strides=(stride(), stride(), stride()),
        scale_a_ptr=address(),
        scale_b_ptr=address(),
        scale_strides=(stride(), stride()),
    )


@own_process
def test_absurd_products_are_judged(sanitized_pack: Path) -> None:
    """Selection overflows nowhere for strides and sizes up to 2^63 - 1, with any limit: there is a plan or none."""
    mm, rng = open_pack(sanitized_pack).launcher, np.random.default_rng(14)
    device, planned = CDevice(108, 166_912), 0
    for number in range(PROBLEMS):
        problem, limit = absurd(rng), LIMITS[number % len(LIMITS)]
        plans = [mm.check(problem, device, kernel, limit).plan for kernel in range(len(mm.kernels))]
        try:
            assert mm.select(problem, device, limit) in plans
            planned += 1
        except NoKernelError:
            assert set(plans) == {None}
    assert 0 < planned < PROBLEMS


@own_process
def test_absurd_products_are_launched(sanitized_pack: Path) -> None:
    """Launching overflows nowhere: with any workspace, in any panels, plans are refused or launched."""
    if reason := missing("sm80"):
        pytest.skip(reason)
    emulator, rng = Emulator(sanitized_pack, execute=False), np.random.default_rng(15)
    workspaces, sizes = (0, 2**40, 2**63 - 256), (0, 128, 2**20, 2**62, 2**63 - 128, 2**63 - 1, -128)
    mains = [n for n, kernel in enumerate(emulator.kernels) if kernel.role in ("product", "partial")]
    launched = 0
    for _ in range(PROBLEMS):
        problem = absurd(rng)
        whole = rng.integers(2) == 0  # as every batch has to be
        plan = Plan(
            kernel=int(rng.choice(mains)),
            split=int(rng.choice((1, 1, 2, 16, 2**32 - 1))),
            copies=int(rng.choice((0, 0, 1, 2, 3, 7))),
            group_m=int(rng.choice((1, 8, 8, 16, 0, 2**32 - 1))),
            workspace_bytes=2**64 - 1,
            panel_m=0 if whole else sizes[rng.integers(len(sizes))],
            panel_n=0 if whole else sizes[rng.integers(len(sizes))],
        )
        if panels(plan, problem) > MOST_PANELS:  # it would never end
            continue
        workspace = workspaces[rng.integers(len(workspaces))]
        with contextlib.suppress(NoKernelError, ValueError):
            emulator.launcher.run(plan, problem, 0, 0, workspace)
            launched += 1
        with contextlib.suppress(NoKernelError):
            emulator.launcher.matmul(problem, 0, 0)
    assert launched > 0


@own_process
def test_absurd_tensors(tmp_path: Path) -> None:
    """The torch ops overflow nowhere for strides up to 2^63 - 1; a single row may have any."""
    with sanitized():
        torch_library.link_torch_library(tmp_path)
    fake = FakeTorch(tmp_path, library=tmp_path / torch_library.LIBRARY.name)
    strides = (ctypes.c_int64 * 6).in_dll(fake.torch, "strides")
    for chosen in itertools.product((0, 2**62, 2**63 - 1), repeat=6):
        strides[:] = list(chosen)
        for shape in ((1, 1, 1), (4, 5, 6), (1, 5, 1), (2**33, 1, 2**33)):
            for into_out in (True, False):
                fake.multiply(*shape, into_out=into_out)
    strides[:] = [2**63 - 1, 0, 0, 0, 2**62, 0]
    assert fake.multiply(1, 5, 6, into_out=True)[1] == ""
