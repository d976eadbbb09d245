"""Output of the commands as text: aligned tables and paragraphs from the values that the library returns."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from aotmm.build import Report
    from aotmm.pack.schema import Config, Image, Kernel, OwnKernel
    from aotmm.pack.verify import Verification
    from aotmm.runtime.diagnosis import Diagnosis
    from aotmm.runtime.launcher import Evaluation, Plan, Selection
    from aotmm.runtime.pack import Pack
    from aotmm.target import Target

_BEST = 5  # plans of a product that are shown without --all
_AMOUNT = re.compile(r"\d+(?= B\b| blocks\b)")  # in a reason: differs from kernel to kernel
_WAYS = {
    "exact": "built for this very arch",
    "compatible": "binary compatible within the major version",
    "ptx": "as PTX, which the driver compiles at the first use",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    """Return a table with columns as wide as needed; numbers are right-aligned under their titles."""
    lines = [header, *rows]
    widths = [max(len(str(line[column])) for line in lines) for column in range(len(header))]
    numeric = [all(isinstance(line[column], int) for line in lines[1:]) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            str(cell).rjust(width) if right else str(cell).ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values in two columns."""
    lines = list(rows)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def types(kernel: Kernel) -> str:
    """Return the element types of A, B and C."""
    return f"{kernel.dtype_a} x {kernel.dtype_b} -> {kernel.dtype_c}"


def build_text(reports: Sequence[Report]) -> str:
    """Return one row per arch, one per dropped kernel, and one per note."""
    text = table(
        ("arch", "kernels", "bytes", "seconds", "compiled", "reused", "dropped", "pack"),
        [
            (
                row.arch,
                row.kernels,
                row.bytes,
                f"{row.seconds:.1f}",
                row.compiled,
                row.kernels + len(row.dropped) - row.compiled,
                len(row.dropped),
                f"{row.folder} ({'written' if row.linked else 'as it was'})",
            )
            for row in reports
        ],
    )
    dropped = [(row.arch, name, _last_words(reason)) for row in reports for name, reason in row.dropped]
    notes = [f"\n{row.arch}: {words}" for row in reports for words in row.notes]
    return text + ("\n\n" + table(("arch", "dropped", "why"), dropped) if dropped else "") + "".join(notes)


def _last_words(reason: str) -> str:
    """Return the last line of a reason that has words; below it Triton may point at a part of it."""
    return next((line.strip() for line in reversed(reason.splitlines()) if re.search(r"\w", line)), reason)


def list_text(
    packs: Sequence[tuple[Pack, Sequence[Kernel]]], own: Sequence[tuple[Pack, Sequence[OwnKernel]]] = ()
) -> str:
    """Return a line per pack, and a row per kernel to show: those of products, and those of `own` functions."""
    found = table(
        ("arch", "kernels", "config set", "triton", "folder"),
        [
            (pack.arch, len(pack.manifest.every), made.config_set, made.triton, _where(pack.folder, pack.owner))
            for pack, _ in packs
            for made in [pack.head.provenance]
        ],
    )
    rows = [
        (
            pack.arch,
            kernel.name,
            kernel.role,
            types(kernel),
            kernel.layout,
            f"{kernel.config.block_m}x{kernel.config.block_n}x{kernel.config.block_k}",
            kernel.epilogue,
            kernel.registers,
            kernel.spill_bytes,
            kernel.shared_bytes,
        )
        for pack, kernels in packs
        for kernel in kernels
    ]
    functions = [
        (
            pack.arch,
            kernel.function,
            kernel.name,
            ", ".join(f"{row.name}={row.value}" if row.value else row.type for row in kernel.arguments),
            kernel.registers,
            kernel.spill_bytes,
            kernel.shared_bytes,
        )
        for pack, kernels in own
        for kernel in kernels
    ]
    resources = ("registers", "spill bytes", "shared bytes")
    parts = [table(("arch", "function", "kernel", "arguments", *resources), functions)] if functions else []
    if not rows and not parts:
        return f"{found}\n\nno kernel of these packs is of that dtype, family and layout"
    header = ("arch", "kernel", "role", "types", "layout", "tile", "epilogue", *resources)
    return "\n\n".join([found, *([table(header, rows)] if rows else []), *parts])


def targets_text(rows: Sequence[Target]) -> str:
    """Return a row per architecture."""
    return table(
        ("arch", "GPUs", "status", "kernels that aotmm ships for it were run on"),
        [(row.name, row.gpus, row.status, row.executed_on) for row in rows],
    )


def kernel_text(pack: Pack, kernel: Kernel | OwnKernel) -> str:
    """Return everything in the manifest about one kernel."""
    from aotmm.pack.schema import OwnKernel  # as late as the manifest's own

    begin, library = pack.head.images.offset, pack.head.library.path
    rows = [
        ("kernel", kernel.name),
        ("arch", pack.arch),
        *(_of_function(kernel) if isinstance(kernel, OwnKernel) else _of_product(kernel)),
        ("source", kernel.source),
        ("symbol", kernel.symbol),
        ("threads", f"{kernel.threads} per block"),
        ("registers", f"{kernel.registers} per thread, {kernel.spill_bytes} B spilled"),
        ("shared memory", f"{kernel.shared_bytes} B per block"),
        ("scratch", f"{kernel.global_scratch_bytes} B, for profiling {kernel.profile_scratch_bytes} B per block"),
        *(
            (name, f"{image.bytes} B{_edits(image)} at {begin + image.offset} of {library}, sha256 {image.sha256}")
            for name, image in (("image", kernel.image), ("ptx", kernel.ptx))
            if image is not None
        ),
        ("key", kernel.key),
        ("pack", f"{_where(pack.folder, pack.owner)}, for {pack.head.host}"),
        *((f"made with {name}", str(value)) for name, value in asdict(pack.head.provenance).items()),
    ]
    parameters = [(item.name, item.type, item.value, item.offset, item.bytes) for item in kernel.parameters]
    guards = [(item.value, item.relation, item.operand) for item in kernel.guards]
    attributes = [(item.name, *item.value) for item in kernel.attributes]
    return "\n\n".join(
        [
            facts(rows),
            table(("parameter", "type", "filled with", "offset", "bytes"), parameters),
            table(("guard", "relation", "operand"), guards) if guards else "generic: no guards",
            *([table(("attribute", "x", "y", "z"), attributes)] if attributes else []),
        ]
    )


def _edits(image: Image) -> str:
    return "" if image.whole else f", by {image.stored} B of edits of other code,"


def _of_product(kernel: Kernel) -> list[tuple[str, str]]:
    return [
        ("role", kernel.role + ", persistent" * kernel.persistent + ", may start early" * kernel.pdl),
        ("family", kernel.family),
        ("config_name", kernel.config_name),
        ("types", f"{types(kernel)}, layout {kernel.layout}"),
        ("sums", _sums(kernel)),
        ("epilogue", kernel.epilogue + ", fast accumulation" * kernel.fast_accum),
        ("config", f"{_config(kernel.config)}, clusters of {kernel.num_ctas}"),
        ("widest access", f"{kernel.vector_bytes} B"),
    ]


def _sums(kernel: Kernel, split: int = 1) -> str:
    slices = split * kernel.config.slices
    return f"{kernel.order}, K in {slices} slices" if slices > 1 else str(kernel.order)


def _of_function(kernel: OwnKernel) -> list[tuple[str, str]]:
    return [
        ("function", kernel.function),
        *((f"argument {row.name}", f"{row.value} ({row.type})" if row.value else row.type) for row in kernel.arguments),
        ("options", ", ".join(f"{row.name}={row.value}" for row in kernel.options) or "Triton's"),
        ("grid", f"({', '.join(kernel.grid)})" if kernel.grid else "the caller's"),
        ("may write", ", ".join(kernel.writes) or "nothing"),
        ("measured by", ", ".join(kernel.sizes) or "types and constexprs alone"),
        ("left out", ", ".join(kernel.left_out) or "nothing"),
        ("licence", kernel.license or "not stated"),
    ]


def selection_text(
    selection: Selection, rejected: Sequence[Evaluation], other_types: int, *, everything: bool = False
) -> str:
    """Return the chosen plan, the best one with each other kernel that fits, and why each of `rejected` does not fit.

    Without `everything` it has only the best plans, and the number of kernels for each reason.
    """
    parts, counts = [], Counter[str]()
    chosen = selection.chosen
    if chosen is not None and chosen.plan is not None:
        best = chosen.plan
        parts.append(
            facts(
                [
                    ("chosen", chosen.kernel.name),
                    ("config", _config(chosen.kernel.config)),
                    ("steps", _steps(best)),
                    ("grid", f"{best.grid} blocks" + ", which may start early" * best.pdl),
                    ("order", best.order),
                    ("sums", _sums(chosen.kernel, best.split)),
                    ("time", f"{_microseconds(best)} us, {'measured' if best.measured else 'predicted'}"),
                    ("workspace", f"{best.workspace_bytes} B"),
                ]
            )
        )
        others = [row for row in selection.evaluations if row is not chosen]
        plans = sorted(
            ((row.kernel.name, row.plan) for row in others if row.plan is not None), key=lambda pair: pair[1].cost
        )
        rows = [
            (
                name,
                _microseconds(plan),
                f"{plan.cost / max(best.cost, 1):.2f}",
                _steps(plan),
                plan.grid,
                plan.workspace_bytes,
            )
            for name, plan in plans
        ]
        shown = rows if everything else rows[: _BEST - 1]
        if shown:
            header = ("fits as well", "us", "x chosen", "steps", "grid", "workspace bytes")
            parts.append(table(header, shown))
        counts["fit too"] = len(rows) - len(shown)
    if everything and rejected:
        parts.append(table(("does not fit", "why"), [(row.kernel.name, row.rejected or "") for row in rejected]))
    elif rejected:
        counts.update(_counted([row.rejected or "" for row in rejected]))
    left = [(count, reason) for reason, count in counts.items() if count]
    if left:
        parts.append(table(("kernels", "not shown; --all shows them"), left))
    if other_types:
        parts.append(f"{other_types} kernels of the pack are for other types, or lack what this one does after the sum")
    return "\n\n".join(parts)


def _counted(reasons: Sequence[str]) -> dict[str, int]:
    """Return the number of kernels per reason, most frequent first; reasons that differ only in an amount are one."""
    alike = defaultdict(list)
    for reason in reasons:
        alike[_AMOUNT.sub("#", reason)].append(reason)
    return {_ranged(group): len(group) for group in sorted(alike.values(), key=len, reverse=True)}


def _ranged(alike: Sequence[str]) -> str:
    """Return one text for texts that differ only in amounts: with the least and the greatest of each."""
    columns = zip(*(map(int, _AMOUNT.findall(text)) for text in alike), strict=True)
    ranges = iter([" to ".join(map(str, sorted({min(column), max(column)}))) for column in columns])
    return _AMOUNT.sub(lambda _: next(ranges), alike[0])


def verify_text(evaluations: Sequence[Verification], *, rebuilt: bool) -> str:
    """Return a row per pack and wheel."""
    good = "intact, built again bit for bit" if rebuilt else "intact"
    rows = [
        (
            _where(row.place, row.owner),
            row.arch or "-",
            row.files,
            row.kernels,
            f"{len(row.violations)} violations" if row.violations else good if row.arch else "intact",
        )
        for row in evaluations
    ]
    return table(("verified", "arch", "files", "kernels", "found"), rows)


def doctor_text(found: Diagnosis) -> str:
    """Return the whole diagnosis."""
    torch = "none" if found.torch is None else f"{found.torch}, {found.torch_build} build"
    rows = [
        ("aotmm", found.aotmm),
        ("python", found.python),
        ("torch", torch),
        ("NVIDIA driver", f"up to CUDA {found.cuda_driver}" if found.cuda_driver else "none"),
    ]
    for pack in found.packs:
        if pack.error is not None:
            rows.append(("pack", pack.error))
        else:
            size, where = f"{pack.bytes / 1e6:.1f} MB", _where(pack.folder, pack.owner)
            of = f" of {', '.join(pack.functions)}" * bool(pack.functions)
            rows.append(("pack", f"{pack.arch}: {pack.kernels} kernels{of}, {size}, intact, {where}"))
            if not pack.functions:
                rows.append(("", f"kernels that aotmm ships for it were run on {pack.executed_on}"))
                rows.append(("", f"times: {f'measured on {pack.tuning}' if pack.tuning else 'estimates'}"))
    for gpu in found.devices:
        rows.append((f"device {gpu.ordinal}", f"{gpu.name}, {gpu.arch}"))
        if gpu.error is not None:
            rows.append(("", gpu.error))
        else:
            rows.append(("", f"uses pack {gpu.pack}: {_WAYS[gpu.way or '']}"))
            rows.append(("", f"{gpu.multiprocessors} multiprocessors, {gpu.shared_bytes} B shared memory per block"))
            if gpu.tuning is not None:
                rows.append(("", f"times: {gpu.tuning}"))
            if gpu.functions:
                rows.append(("", f"functions: {', '.join(gpu.functions)}"))
    if found.load_error is not None:
        rows.append(("aotmm.load", found.load_error))
    if found.direct_call is not None:
        past, through = (
            "past torch's dispatcher",
            "through torch's dispatcher, as this Python or torch lacks another way",
        )
        rows.append(("lib.matmul", f"plain tensors go {past if found.direct_call else through}"))
    rows += [("to do", advice) for advice in found.advice]
    return facts(rows)


def _where(folder: Path | str, owner: str) -> str:
    return f"{folder} (added by {owner})" if owner else str(folder)


def _steps(plan: Plan) -> str:
    steps = ", ".join(plan.steps).replace("partial", f"{plan.split} slices of K")
    return steps + (f", in panels of {plan.panel_m} x {plan.panel_n}" if plan.panel_m else "")


def _microseconds(plan: Plan) -> str:
    return f"{plan.cost / 1000:.2f}"


def _config(config: Config) -> str:
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    shown = {name: value for name, (value, default) in values.items() if value not in (0, default)}
    field_terms = {name: name.upper() for name in ("block_m", "block_n", "block_k")}
    return ", ".join(f"{field_terms.get(name, name)} {value}" for name, value in shown.items())
