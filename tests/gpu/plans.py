"""Libraries that are made to take one config, by constants of the time model in which nothing else is as fast."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import torch

import aotmm
from aotmm.kernels import BLOCK_SCALED
from aotmm.pack import table
from aotmm.pack.schema import Kernel
from aotmm.pack.table import Sample, ShapeTimes, Table
from aotmm.problem import LAYOUTS
from aotmm.runtime.launcher import Plan
from aotmm.runtime.library import Library
from aotmm.runtime.tuning import CConstants, c_table

WIDTHS = (1, 2, 4)  # bytes of an element


def config_names(lib: Library, role: str, dtype: str) -> list[str]:
    """The configs of this GPU's pack with kernels of `role` for `dtype` that add up in fp32, without block scales."""
    kernels = [kernel for kernel in lib.pack_for(0).manifest.kernels if BLOCK_SCALED not in kernel.guards]
    return sorted({k.config_name for k in kernels if (k.role, k.dtype_a, k.fast_accum) == (role, dtype, False)})


def layout_of(lib: Library, config_name: str, dtype: str) -> str:
    """The first layout in which the pack has that config for `dtype`."""
    kernels = lib.pack_for(0).manifest.kernels
    found = {k.layout for k in kernels if (k.config_name, k.dtype_a) == (config_name, dtype)}
    return next(layout for layout in LAYOUTS if {layout, "any"} & found)


def chosen(lib: Library, a: torch.Tensor, b: torch.Tensor, **options: Any) -> tuple[Kernel, Plan]:
    """The kernel and the plan that `matmul` takes for these arguments."""
    found = lib.explain(a, b, **options).chosen
    assert found is not None
    assert found.plan is not None
    return found.kernel, found.plan


def preferring(
    lib: Library, config_name: str, folder: Path, *, splits: dict[tuple[int, int, int], int], layout: str = ""
) -> Library:
    """A library that takes `config` wherever it fits, copies included, because that and helpers cost it nothing.

    splits: into how many slices a config that splits divides contiguous operands of shape (M, N, K), of any layout;
        these products are launched programmatically.
    layout: of the kernels that are taken, "" for any.
    folder: where the table goes. Its name and the config's, in the table, tell the library from others.
    """
    gpu = lib.pack_for(0).launcher.device(0)
    tuned = Table(
        arch=lib.pack_for(0).arch,
        device=gpu.name.decode(),
        multiprocessors=gpu.multiprocessors,
        clock_mhz=gpu.clock_mhz,
        memory_gbps=gpu.memory_gbps,
        l2_bytes=gpu.l2_bytes,
        driver=f"{folder.name} {config_name} {layout}",
        torch="none",
        aotmm=aotmm.__version__,
        date="2026-11-20",
        seed=0,
        network=None,
        models=(),
        shapes=tuple(
            ShapeTimes(
                width,
                order,
                kind,
                *shape,
                offset_a=0,
                offset_b=0,
                held_out=False,
                times=(Sample(config_name, split, pdl=True, copies=0, ns=1),),
            )
            for shape, split in (splits.items() if config_name.endswith("_split") else ())
            for width, order, kind in itertools.product(WIDTHS, LAYOUTS, ("plain", "relaxed"))
        ),
    )
    path = folder / f"{config_name}{layout}.json"
    path.write_bytes(table.write(tuned))
    ours = aotmm.load(table=path)
    launcher = ours.pack_for(0).launcher
    by = c_table(tuned, launcher.kernels)
    for number, kernel in enumerate(launcher.kernels):
        preferred = kernel.config_name == config_name and layout in ("", kernel.layout)
        if preferred or kernel.role in ("reduce", "copy"):
            by.constants[number] = CConstants()
    launcher._raise(launcher._c.retune(ctypes.byref(by)))
    return ours
