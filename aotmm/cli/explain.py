"""`aotmm explain`: the kernel for a product, and the reasons."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotmm.cli import report
from aotmm.cli.options import json_option, pack_option, packs_of, refuse_ignored
from aotmm.cli.output import print_json
from aotmm.errors import NoKernelError, SpecError
from aotmm.problem import (
    ACTIVATIONS,
    BLOCK_SCALE_K,
    DTYPES,
    EPILOGUES,
    GROUPED,
    INPUTS,
    LAYOUTS,
    OUTPUTS,
    input_types,
)
from aotmm.target import GPUS, TARGETS, target, ways_to_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aotmm.pack.schema import Kernel
    from aotmm.runtime.launcher import Evaluation, Plan, Selection
    from aotmm.runtime.signature import Signature
    from aotmm.runtime.tuning import CDevice

_MAX_SIZE = 2**63 - 1
_ALIGNED = 256  # the address of a tensor of torch, but for the higher bits


@click.command()
@click.option("--arch", required=True, metavar="ARCH", help=f"Arch of the GPU: {', '.join(TARGETS)}.")
@click.argument("m", metavar="M", type=click.IntRange(1, _MAX_SIZE), required=False)
@click.argument("n", metavar="N", type=click.IntRange(1, _MAX_SIZE), required=False)
@click.argument("k", metavar="K", type=click.IntRange(0, _MAX_SIZE), required=False)
@click.option("--kernel", "function", metavar="NAME", help="Explain a call of this function of your own instead.")
@click.option(
    "--argument",
    "-a",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="For --kernel: an argument. A tensor is its type, perhaps with its address: x=fp16, x=fp16@8, or None.",
)
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
    "--batch",
    type=click.IntRange(1, _MAX_SIZE),
    default=1,
    show_default=True,
    help="Number of equal products, or of groups.",
)
@click.option(
    "--grouped",
    type=click.Choice(tuple(GROUPED)),
    default="none",
    show_default=True,
    help="Dimension in groups of any sizes: M, each group with its own B and bias, or K, each with its own C.",
)
@click.option("--fast-accum", is_flag=True, help="Let fp8 sums stay in the tensor cores' own precision.")
@click.option(
    "--block-scales",
    type=click.Choice(("1", str(BLOCK_SCALE_K))),
    help="fp8 with block scales: of so many columns of B.",
)
@click.option("--batch-invariant", is_flag=True, help="Give each row of C the same bits in every batch.")
@click.option(
    "--align",
    type=click.IntRange(1, 4096),
    default=256,
    show_default=True,
    metavar="BYTES",
    help="Address of A, B and C: 256 is that of a tensor of torch, 16 that of a view which begins within a cache line.",
)
@click.option(
    "--device",
    "product",
    metavar="GPU",
    help="Another GPU: one that has a table, as aotmm doctor names it, or one of these: " + "; ".join(GPUS) + ".",
)
@click.option("--all", "everything", is_flag=True, help="Show every plan and every kernel, as --json does.")
@pack_option
@json_option
def explain(
    *,
    arch: str,
    m: int | None,
    n: int | None,
    k: int | None,
    function: str | None,
    arguments: tuple[str, ...],
    dtype_in: str,
    out_dtype: str | None,
    layout: str,
    activation: str,
    bias: str | None,
    batch: int,
    grouped: str,
    fast_accum: bool,
    block_scales: str | None,
    batch_invariant: bool,
    align: int,
    product: str | None,
    everything: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Show the kernel that a product or a function gets, and why. Needs no GPU.

    The product is C (M, N) = A (M, K) @ B (K, N). A and B are contiguous in their layout, C is row-major, and the GPU
    is the full model of its arch, or that of --device by its data sheet. DTYPE tf32 stands for fp32 operands with TF32
    allowed.
    """
    products_alone = tuple(
        parameter.name or ""
        for parameter in click.get_current_context().command.params
        if parameter.name not in ("arch", "function", "arguments", "folder", "as_json", "help")
    )
    refuse_ignored(
        ("with --kernel", function is not None, products_alone), ("without --kernel", function is None, ("arguments",))
    )
    if function is not None:
        _explain_function(arch, function, arguments, folder, as_json=as_json)
        return
    if m is None or n is None or k is None:
        raise click.UsageError("say M N K of a product, or --kernel NAME")
    from aotmm.runtime.installed import find_packs
    from aotmm.runtime.launcher import Problem
    from aotmm.runtime.tuning import nominal_device

    if batch * max(m * k, k * n, m * n) > _MAX_SIZE:
        raise SpecError(f"M={m} N={n} K={k} batch={batch}: an operand would have more than 2^63 - 1 elements")
    element, other = (DTYPES[name] for name in input_types(dtype_in))
    device = nominal_device(target(arch)) if product is None else _device(product, arch)
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
        grouped=grouped,
        offsets_ptr=0 if grouped == "none" else _ALIGNED,
        batch_strides=_batch_strides(grouped, batch, m, n, k),
        bias_ptr=align if bias else 0,
        bias_strides=_bias_strides(bias, grouped, m, n),
        block_scale_a_ptr=align if block_scales else 0,
        block_scale_b_ptr=align if block_scales else 0,
        block_columns=int(block_scales or 0),
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
    roles = ("product", "partial") if grouped == "none" else (GROUPED[grouped],)
    evaluated = [row for row in selection.evaluations if row.kernel.role in roles]
    refused = [row for row in evaluated if row.rejected is not None]
    rejected = [row for row in refused if row.same_types]
    types = f"{element.name} x {other.name} -> {problem.dtype_c}"
    what = (
        f"matmul M={m} N={n} K={k} {types}, layout {layout}, activation {activation}"
        + ", batch-invariant" * batch_invariant
        + (f", block scales of {block_scales} columns" if block_scales else "")
        + (f", {grouped} in {batch} groups" if grouped != "none" else "")
    )
    if as_json:
        body = _selection_to(selection, rejected, len(refused) - len(rejected))
        head = {"arch": arch, "folder": str(pack.folder), "problem": asdict(problem)}
        facts = {"multiprocessors": device.multiprocessors, "shared_bytes": device.shared_bytes}
        print_json({**head, "device": facts, "tuning": asdict(origin), **body})
    else:
        more = f", {bias} bias" * bool(bias) + f", batch {batch}" * (batch > 1 and grouped == "none")
        click.echo(f"{what}{more}, operands at address {align}")
        name = product or target(arch).device or arch
        click.echo(
            f"as on {name}: {device.multiprocessors} multiprocessors, {device.shared_bytes} B shared memory per block"
        )
        click.echo(f"times: {origin}\n")
        click.echo(report.selection_text(selection, rejected, len(refused) - len(rejected), everything=everything))
    if selection.chosen is None:
        able = [kernel for kernel in pack.manifest.kernels if kernel.role == roles[0]]
        mine = [kernel for kernel in able if (kernel.dtype_a, kernel.dtype_b) == (element.name, other.name)]
        has = ", ".join(sorted({f"{report.types(kernel)} with epilogue {kernel.epilogue}" for kernel in mine}))
        if not has:
            has = ", ".join(sorted({f"{kernel.dtype_a} x {kernel.dtype_b}" for kernel in able})) or "none of that form"
        added = {None: "none", "vector": "bias", "matrix": "bias_relu"}[bias]
        needs = max(ACTIVATIONS[activation], added, key=EPILOGUES.index)
        raise NoKernelError(
            f"no kernel in pack {arch} fits {what}, which needs epilogue {needs}; it has: {has}",
            tuple(f"{row.kernel.name}: {row.rejected}" for row in refused),
        )


def _batch_strides(grouped: str, batch: int, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Return the distances between the matrices of A, B and C; 0 for an operand that is one matrix."""
    if grouped == "none":
        return (m * k, k * n, m * n) if batch > 1 else (0, 0, 0)
    return (0, k * n, 0) if grouped == "M" else (0, 0, m * n)


def _bias_strides(bias: str | None, grouped: str, m: int, n: int) -> tuple[int, int, int]:
    """Return the strides of a bias by matrix, row and column. Each group of rows has a vector of its own."""
    if bias == "matrix":
        return (m * n if grouped == "none" else 0), n, 1
    return (n if grouped == "M" else 0), 0, 1


def _explain_function(arch: str, name: str, given: tuple[str, ...], folder: Path | None, *, as_json: bool) -> None:
    """Print the variant that serves a call of a function in the first pack of `arch` that has it."""
    from aotmm.runtime.installed import find_packs
    from aotmm.runtime.signature import Signature

    packs = find_packs(folder)
    found = [pack for pack in packs_of(packs, arch, folder) if name in pack.head.functions]
    if not found:
        known = sorted({each for pack in packs for each in pack.head.functions})
        raise SpecError(f"no pack for {arch} has a function {name!r}; there are: {', '.join(known) or 'none'}")
    pack = found[0]
    kernels = [kernel for kernel in pack.manifest.own if kernel.function == name]
    signature = Signature(name, kernels)
    try:
        values, _ = signature.bound((), dict(_argument(words, signature) for words in given))
    except (TypeError, ValueError) as error:
        raise SpecError(str(error)) from error
    choice = pack.own_launcher.explain(pack.head.functions.index(name), values)
    if as_json:
        print_json({"arch": arch, "folder": str(pack.folder), "function": name, **choice._asdict()})
    else:
        click.echo(str(choice))
    if choice.chosen is None:
        reasons = tuple(f"{kernel}: {reason}" for kernel, reason in choice.rejected.items())
        raise NoKernelError(f"no kernel of {name} in pack {arch} serves this call", reasons)


def _argument(words: str, signature: Signature) -> tuple[str, object]:
    """Return name and value of an argument that was given in words."""
    from aotmm.problem import POINTER_CODES
    from aotmm.runtime.signature import Pointer

    name, equals, text = words.partition("=")
    if not equals:
        raise SpecError(f"--argument {words!r}: expected NAME=VALUE")
    if text == "None":
        return name, None
    if next(iter(signature.types.get(name, ())), "") in POINTER_CODES:
        type_, _, address = text.lstrip("*").partition("@")
        if f"*{type_}" not in POINTER_CODES or not (address or "0").isdecimal():
            known = ", ".join(code.lstrip("*") for code in POINTER_CODES[1:])
            raise SpecError(f"--argument {words!r}: expected a type, or TYPE@ADDRESS; types: {known}")
        return name, Pointer(f"*{type_}", int(address or _ALIGNED))
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _device(product: str, arch: str) -> CDevice:
    """Return a listed GPU, or one that this installation has a table of. Raises SpecError if it cannot run `arch`."""
    from aotmm.pack.table import shipped
    from aotmm.runtime.tuning import listed_device, measured_device

    able = [name for name, gpu in GPUS.items() if ways_to_run(arch, gpu.arch)]
    if product in able:
        return listed_device(product)
    tables = {each.device: each for each in shipped(arch)}
    if product not in tables:
        known = "; ".join((*able, *tables)) or "none, so leave --device out"
        raise SpecError(f"no GPU {product!r} is known for {arch}; there are: {known}")
    return measured_device(tables[product], target(arch).shared_bytes)


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
        "steps": plan.steps,
        "split": plan.split,
        "grid": plan.grid,
        "group_m": plan.group_m,
        "pdl": plan.pdl,
        "cost_ns": plan.cost,
        "measured": plan.measured,
        "workspace_bytes": plan.workspace_bytes,
        "panel": (plan.panel_m, plan.panel_n) if plan.panel_m else None,
    }
