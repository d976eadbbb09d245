"""Step 3, kernels -> C: renders the launcher's source and header from the compiled kernels."""

from __future__ import annotations

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from aotmm import __version__
from aotmm.folders import data_folder
from aotmm.kernel import Kernel
from aotmm.problem import (
    ABI,
    ACTIVATIONS,
    ATTRIBUTES,
    DTYPE_CODES,
    DTYPES,
    EPILOGUES,
    LAYOUTS,
    RELATIONS,
    ROLES,
    STATED_VALUES,
    VALUES,
    WORKSPACE_LIMIT,
)
from aotmm.target import TARGETS, Target


def header(archs: tuple[str, ...] = tuple(TARGETS)) -> str:
    """launcher.h: the C interface, and the entry point of each of `archs`."""
    return (
        _environment()
        .get_template("launcher.h.jinja")
        .render(
            version=__version__,
            abi=ABI,
            archs=archs,
            dtypes=tuple(DTYPES.values()),
            default_outputs=[DTYPE_CODES.index(row.output) for row in DTYPES.values()],
            activations=tuple(ACTIVATIONS),
            epilogues=EPILOGUES,
            least_epilogues=[EPILOGUES.index(name) for name in ACTIVATIONS.values()],
            roles=ROLES,
            layouts=LAYOUTS,
            values=VALUES,
            stated=VALUES[:STATED_VALUES],
            relations=RELATIONS,
            workspace_limit=WORKSPACE_LIMIT,
        )
    )


def source(target: Target, kernels: tuple[Kernel, ...]) -> str:
    """launcher.c: the tables of `kernels`, in order, and their images by reference to the files of the pack."""
    return (
        _environment()
        .get_template("launcher.c.jinja")
        .render(
            version=__version__,
            arch=target.name,
            backend=target.backend,
            capability=target.triton_arch,
            min_driver=target.min_driver,
            multiprocessors=target.multiprocessors,
            shared_bytes=target.shared_bytes,
            kernels=kernels,
            attribute_ids=ATTRIBUTES,
            mac_costs=[_mac_cost(kernel) for kernel in kernels],
        )
    )


def _mac_cost(kernel: Kernel) -> int:
    """Time of a multiply-add: fp8 sums that leave the tensor core to stay precise take an addition more."""
    precise = kernel.dtype_a.startswith("fp8") and not kernel.fast_accum
    return DTYPES[kernel.dtype_a].mac_cost + precise


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(data_folder("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is C
    )
