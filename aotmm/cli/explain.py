"""`aotmm explain`: the kernel for a product, and the reasons."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotmm.cli import report
from aotmm.cli.options import json_option, pack_option, packs_of
from aotmm.cli.output import print_json
from aotmm.errors import NoKernelError, SpecError
from aotmm.problem import ACTIVATIONS, DTYPES, INPUTS, LAYOUTS, OUTPUTS, input_types
from aotmm.target import GPUS, TARGETS, target, ways_to_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aotmm.pack.schema import Kernel
    from aotmm.runtime.launcher import Evaluation, Plan, Selection

_MAX_SIZE = 2**63 - 1


@click.command()
@click.option("--arch", required=True, metavar="ARCH", help=f"Arch of the GPU: {', '.join(TARGETS)}.")
@click.argument("m", metavar="M", type=click.IntRange(1, _MAX_SIZE))
@click.argument("n", metavar="N", type=click.IntRange(1, _MAX_SIZE))
@click.argument("k", metavar="K", type=click.IntRange(0, _MAX_SIZE))
@click.option(
    "--dtype",
    "dtype_in",
    default="fp16",
    show_default=True,
    metavar="DTYPE",
    help=f"Types of A and B: {', '.join(INPUTS)}.",
)
@click.option("--out-dtype", type=click.Choice(OUTPUTS), help="Type of C.  [default: the one for --dtype]")
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="nn",
    show_default=True,
    help="A, then B: n row-major, t column-major.",
)
@click.option(
    "--activation",
    type=click.Choice(tuple(ACTIVATIONS)),
    default="none",
    show_default=True,
    help="Function applied to the product.",
)
@click.option("--bias", type=click.Choice(("vector", "matrix")), help="Add it before the activation: (N) or (M, N).")
@click.option(
    "--batch", type=click.IntRange(1, _MAX_SIZE), default=1, show_default=True, help="Number of equal products."
)
@click.option("--fast-accum", is_flag=True, help="Let fp8 sums stay in the tensor cores' own precision.")
@click.option("--batch-invariant", is_flag=True, help="Give each row of C the same bits in every batch.")
@click.option(
    "--align",
    type=click.IntRange(1, 4096),
    default=256,
    show_default=True,
    metavar="BYTES",
    help="Address of A, B and C: 256 is that of a tensor of torch, 16 that of a view which begins within a cache line.",
)
@click.option("--device", "product", metavar="GPU", help="A listed GPU instead: " + "; ".join(GPUS) + ".")
@click.option("--all", "everything", is_flag=True, help="Show every plan and every kernel, as --json does.")
@pack_option
@json_option
def explain(
    *,
    arch: str,
    m: int,
    n: int,
    k: int,
    dtype_in: str,
    out_dtype: str | None,
    layout: str,
    activation: str,
    bias: str | None,
    batch: int,
    fast_accum: bool,
    batch_invariant: bool,
    align: int,
    product: str | None,
    everything: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Show the kernel that a product gets, and why. Needs no GPU.

    The product is C (M, N) = A (M, K) @ B (K, N). A and B are contiguous in their layout, C is row-major, and the GPU
    is the full model of its arch, or that of --device by its data sheet. DTYPE tf32 stands for fp32 operands with TF32
    allowed.
    """
    from aotmm.runtime.installed import find_packs
    from aotmm.runtime.launcher import Problem
    from aotmm.runtime.tuning import listed_device, nominal_device

    if batch * max(m * k, k * n, m * n) > _MAX_SIZE:
        raise SpecError(f"M={m} N={n} K={k} batch={batch}: an operand would have more than 2^63 - 1 elements")
    element, other = (DTYPES[name] for name in input_types(dtype_in))
    device = nominal_device(target(arch)) if product is None else listed_device(_listed(product, arch))
    problem = Problem(
        M=m,
        N=n,
        K=k,
        strides_a=(k, 1) if layout[0] == "n" else (1, m),
        strides_b=(n, 1) if layout[1] == "n" else (1, k),
        strides_c=(n, 1),
        dtype_a=element.storage,
        dtype_b=other.storage,
        dtype_c=out_dtype or element.output,
        activation=activation,
        a_ptr=align,
        b_ptr=align,
        c_ptr=align,
        allow_tf32=element.name == "tf32",
        fast_accum=fast_accum,
        batch_invariant=batch_invariant,
        batch=batch,
        batch_strides=(m * k, k * n, m * n) if batch > 1 else (0, 0, 0),
        bias_ptr=align if bias else 0,
        bias_strides=(m * n, n, 1) if bias == "matrix" else (0, 0, 1),
    )
    found = [pack for pack in find_packs(folder) if not pack.head.functions]
    for pack in packs_of(found, arch, folder):
        try:
            selection = pack.launcher.explain(problem, device)
        except ValueError as error:
            raise SpecError(str(error)) from error
        if selection.chosen is not None:
            break
    origin = pack.launcher.origin(device)
    evaluated = [row for row in selection.evaluations if row.kernel.role in ("product", "partial")]
    refused = [row for row in evaluated if row.rejected is not None]
    rejected = [row for row in refused if row.same_types]
    types = f"{element.name} x {other.name} -> {problem.dtype_c}"
    what = (
        f"matmul M={m} N={n} K={k} {types}, layout {layout}, activation {activation}"
        + ", batch-invariant" * batch_invariant
    )
    if as_json:
        body = _selection_to(selection, rejected, len(refused) - len(rejected))
        head = {"arch": arch, "folder": str(pack.folder), "problem": asdict(problem)}
        facts = {"multiprocessors": device.multiprocessors, "shared_bytes": device.shared_bytes}
        print_json({**head, "device": facts, "tuning": asdict(origin), **body})
    else:
        more = f", {bias} bias" * bool(bias) + f", batch {batch}" * (batch > 1)
        click.echo(f"{what}{more}, operands at address {align}")
        name = product or target(arch).device or arch
        click.echo(
            f"as on {name}: {device.multiprocessors} multiprocessors, {device.shared_bytes} B shared memory per block"
        )
        click.echo(f"times: {origin}\n")
        click.echo(report.selection_text(selection, rejected, len(refused) - len(rejected), everything=everything))
    if selection.chosen is None:
        products = [kernel for kernel in pack.manifest.kernels if kernel.role == "product"]
        has = ", ".join(sorted({f"{report.types(kernel)} with epilogue {kernel.epilogue}" for kernel in products}))
        raise NoKernelError(
            f"no kernel in pack {arch} fits {what}, which needs epilogue {ACTIVATIONS[activation]}; it has: {has}",
            tuple(f"{row.kernel.name}: {row.rejected}" for row in refused),
        )


def _listed(product: str, arch: str) -> str:
    """Return the name of a listed GPU. Raises SpecError if there is none that runs the kernels of `arch`."""
    able = [name for name, gpu in GPUS.items() if ways_to_run(arch, gpu.arch)]
    if product not in able:
        raise SpecError(f"no GPU {product!r} is listed for {arch}; there are: {'; '.join(able) or 'none'}")
    return product


def _selection_to(selection: Selection, rejected: Sequence[Evaluation], other_types: int) -> dict[str, object]:
    chosen = selection.chosen
    return {
        "chosen": None if chosen is None or chosen.plan is None else _plan_to(chosen.kernel, chosen.plan),
        "fits": [_plan_to(row.kernel, row.plan) for row in selection.evaluations if row.plan is not None],
        "rejected": [{"kernel": row.kernel.name, "reason": row.rejected} for row in rejected],
        "other_types": other_types,
    }


def _plan_to(kernel: Kernel, plan: Plan) -> dict[str, object]:
    return {
        "kernel": kernel.name,
        "role": kernel.role,
        "config_name": kernel.config_name,
        "config": asdict(kernel.config),
        "launches": plan.launches,
        "split": plan.split,
        "grid": plan.grid,
        "group_m": plan.group_m,
        "pdl": plan.pdl,
        "cost_ns": plan.cost,
        "measured": plan.measured,
        "workspace_bytes": plan.workspace_bytes,
        "panel": (plan.panel_m, plan.panel_n) if plan.panel_m else None,
    }
