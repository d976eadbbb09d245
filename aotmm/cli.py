"""The command line. Beside `__main__`, which starts it, no module prints or exits.

A command imports what it needs when it runs.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from aotmm import __version__, report
from aotmm.assembly import FORMS, assembly
from aotmm.errors import (
    AotmmError,
    ArtifactError,
    NoKernelError,
    SpecError,
    WrongResultError,
    build_extra_missing,
    torch_missing,
)
from aotmm.folders import build_command, data_folder, in_checkout
from aotmm.manifest import kernel_to
from aotmm.problem import ACTIVATIONS, DTYPES, INPUTS, LAYOUTS, OUTPUTS, input_types
from aotmm.progress import Lines
from aotmm.table import shipped_path
from aotmm.target import HOSTS, TARGETS, host, target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aotmm.build import Progress, Report
    from aotmm.kernel import Kernel
    from aotmm.manifest import Head
    from aotmm.runtime.launcher import Plan, Selection, Verdict
    from aotmm.runtime.pack import Pack
    from aotmm.verify import Rebuild, Verification

INTERRUPTED = 130  # what shells give for SIGINT: 128 + 2
_MAX_SIZE = 2**63 - 1


class _Commands(click.Group):
    """Turns the library's errors into text and exit codes, in this one place."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As of any click group, and tells what the machine refuses (a full disk, no more memory) in one line."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.echo(f"error: the system refused: {error}", err=True)
        except MemoryError:
            click.echo("error: out of memory", err=True)
        sys.exit(AotmmError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AotmmError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as stop:
            click.echo(f"interrupted: {stop}" if str(stop) else "interrupted", err=True)
            ctx.exit(INTERRUPTED)


_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)

_pack_option = click.option(
    "--pack",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    show_default="the packs that aotmm.load() finds",
    default=None,
    help="Folder of one pack or of packs.",
)
_dtypes_option = click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help=f"Input type instead of the set's own; repeatable: {', '.join(INPUTS)}.",
)
_jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="all processors",
    help="Compiler processes.",
)
_scheduler_option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Do it on the Dask cluster of this scheduler, such as tcp://host:8786; needs the cluster extra.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _refuse_ignored(*rules: tuple[str, bool, tuple[str, ...]]) -> None:
    """Refuses parameters of the command that were given and would be ignored.

    Each rule has words for when, whether that is so now, and the names of the parameters that then have no effect.
    """
    context = click.get_current_context()
    for words, holds, names in rules:
        given = [
            parameter.opts[0] if isinstance(parameter, click.Option) else parameter.opts[0].upper()
            for parameter in context.command.params
            if parameter.name in names
            and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
            and context.params[parameter.name] != ()  # a list of arguments that is empty was given too, click says
        ]
        if holds and given:
            raise click.UsageError(f"{', '.join(given)}: no effect {words}")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="aotmm")
def main() -> None:
    """Triton's matmul, compiled ahead of time."""


@main.command()
@click.option(
    "--arch", "archs", multiple=True, metavar="ARCH", help=f"Build for it; repeatable: {', '.join(TARGETS)}, or all."
)
@click.option(
    "--configs",
    default="default",
    show_default=True,
    metavar="SET|FILE",
    help="Config set: tutorial, classic, default, or a TOML file.",
)
@_dtypes_option
@click.option(
    "--host",
    "machine",
    default="",
    metavar="HOST",
    show_default="this machine's",
    help=f"Processor of the machines that load the packs: {', '.join(HOSTS)}.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=lambda: data_folder("artifacts") if in_checkout() else None,
    show_default="artifacts/ of a checkout; an installation's own packs are not overwritten unasked",
    help="Folder to write DIR/<arch>/ to; replaces packs that are there.",
)
@_jobs_option
@_scheduler_option
@click.option(
    "--cache",
    "place",
    metavar="DIR|URL",
    help="Compiled kernels of earlier builds, which machines may share; a URL needs the cache extra.  "
    "[default: .cache in --out]",
)
@click.option(
    "--cache-size",
    metavar="SIZE",
    default="20G",
    show_default=True,
    help="What it may hold, as 500M or 20G; what was used least recently is dropped.",
)
@_json_option
def build(
    *,
    archs: tuple[str, ...],
    configs: str,
    dtypes: tuple[str, ...],
    machine: str,
    out: Path | None,
    jobs: int,
    scheduler: str | None,
    place: str | None,
    cache_size: str,
    as_json: bool,
) -> None:
    """Compile kernels and write one pack per arch. Needs no GPU.

    Kernels that an earlier build compiled are reused, and a pack that is already what would be built is left alone.
    """
    if not archs:
        raise click.UsageError(f"say at least one --arch; known: {', '.join(TARGETS)}, or all")
    if host(machine) != host() and click.get_current_context().get_parameter_source("out") is ParameterSource.DEFAULT:
        raise click.UsageError(f"say --out: the packs of a checkout are for {host()}, not for {host(machine)}")
    if out is None:
        raise click.UsageError("say --out: the packs that this installation brought are not overwritten unasked")
    _refuse_ignored(
        ("with --scheduler, whose workers say how many processes they run", scheduler is not None, ("jobs",))
    )
    with _needs_build_extra():
        from aotmm import build as builder
        from aotmm.build.cache import Cache
    cache = Cache(out / ".cache" if place is None else place, _bytes(cache_size))
    try:
        with _kernels_done(_processes(jobs) if scheduler is None else f"on {scheduler}") as progress:
            reports = builder.build(
                archs,
                out,
                configs=configs,
                dtypes=dtypes,
                machine=machine,
                jobs=jobs,
                scheduler=scheduler,
                cache=cache,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"packs in {out} that were not finished are as they were; kernels that did compile are kept"
        ) from None
    if as_json:
        _print_json([_report_to(row) for row in reports])
    else:
        click.echo(report.build_text(reports))


@main.command("list")
@click.option("--arch", metavar="ARCH", help=f"Only packs for it: {', '.join(TARGETS)}.")
@_pack_option
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="Only kernels for an A or B of it; repeatable.")
@click.option("--family", "families", multiple=True, metavar="FAMILY", help="Only kernels of it; repeatable.")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="LAYOUT",
    help=f"Only kernels for it; repeatable: {', '.join(LAYOUTS)}, or any, which is for all strides.",
)
@click.option("--targets", "of_targets", is_flag=True, help="Show instead what can be built for, and what that ran on.")
@_json_option
def list_(
    *,
    arch: str | None,
    folder: Path | None,
    dtypes: tuple[str, ...],
    families: tuple[str, ...],
    layouts: tuple[str, ...],
    of_targets: bool,
    as_json: bool,
) -> None:
    """Show packs and their kernels.

    Where several packs are for one arch, they are asked for kernels in the order in which they are shown.
    """
    _refuse_ignored(("with --targets", of_targets, ("folder", "dtypes", "families", "layouts")))
    if of_targets:
        targets = list(TARGETS.values()) if arch is None else [target(arch)]
        if as_json:
            _print_json([row._asdict() for row in targets])
        else:
            click.echo(report.targets_text(targets))
        return
    from aotmm.runtime.installed import find_packs

    packs = find_packs(folder)
    is_wanted = _filter(packs, {"dtype": dtypes, "family": families, "layout": layouts})
    if arch is not None:
        packs = _packs_of(packs, arch, folder)
    rows = [(pack, [kernel for kernel in pack.manifest.kernels if is_wanted(kernel)]) for pack in packs]
    if as_json:
        _print_json([_pack_to(pack, kernels) for pack, kernels in rows])
    else:
        click.echo(report.list_text(rows))


@main.command()
@click.argument("name", metavar="KERNEL")
@click.option("--arch", metavar="ARCH", help="Arch of the kernel, where several packs have one of that name.")
@_pack_option
@click.option("--asm", type=click.Choice(FORMS), help="Print the kernel's code instead.")
@_json_option
def inspect(*, name: str, arch: str | None, folder: Path | None, asm: str | None, as_json: bool) -> None:
    """Show one kernel, or its code.

    What it was compiled from, what it needs, and what a product must keep to for it. KERNEL is its exact name, as in
    aotmm list. Of the codes, sass needs nvdisasm or cuobjdump, and amdgcn needs llvm-objdump.
    """
    from aotmm.runtime.installed import find_packs

    if asm is not None and as_json:
        raise click.UsageError("--asm prints code, which is not JSON; leave out one of them")
    packs = find_packs(folder)
    pack, kernel = _kernel(packs if arch is None else _packs_of(packs, arch, folder), name)
    if asm is not None:
        click.echo(assembly(pack, kernel, asm), nl=False)
    elif as_json:
        provenance = asdict(pack.head.provenance)
        _print_json(
            {"arch": pack.arch, "folder": str(pack.folder), "kernel": kernel_to(kernel), "provenance": provenance}
        )
    else:
        click.echo(report.kernel_text(pack, kernel))


@main.command()
@click.argument("path", metavar="[PACK|WHEEL]", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--rebuild", is_flag=True, help="Compile every kernel again, and compare bit for bit; takes minutes.")
@click.option(
    "--configs",
    metavar="SET|FILE",
    help="Config set that it was built with, for --rebuild.  [default: the one that the pack names]",
)
@_dtypes_option
@_jobs_option
@click.option(
    "--sign",
    "signed",
    metavar="BUNDLE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Sign it with sigstore if it is whole, and write the proof to BUNDLE.",
)
@click.option(
    "--signature",
    metavar="BUNDLE",
    type=_FILE,
    help="Check that BUNDLE proves that --identity signed it.",
)
@click.option("--identity", metavar="WHO", help="Who has to have signed it: an e-mail address, or a CI job's URI.")
@click.option("--issuer", metavar="URL", help="The identity provider that knows WHO.")
@click.option(
    "--token",
    metavar="FILE",
    type=_FILE,
    help="Identity token to sign with.  [default: the CI job's, or what the browser is asked for]",
)
@click.option(
    "--trust",
    metavar="FILE",
    type=_FILE,
    help="Client trust configuration of another sigstore than the public one; with it, checking needs no network.",
)
@_json_option
def verify(
    *,
    path: Path | None,
    rebuild: bool,
    configs: str | None,
    dtypes: tuple[str, ...],
    jobs: int,
    signed: Path | None,
    signature: Path | None,
    identity: str | None,
    issuer: str | None,
    token: Path | None,
    trust: Path | None,
    as_json: bool,
) -> None:
    """Check that a pack or a wheel is whole, and nothing else.

    Every file is compared with its digest, the images in the library with those that are files, and what each image
    says of itself with the manifest. Nothing of it is run. Without an argument the packs that aotmm.load() finds are
    checked: those that other packages bring, and this installation's own. DTYPE is for --rebuild, of a pack that was
    built with it. Signatures need the sign extra.
    """
    _refuse_ignored(
        ("without --rebuild", not rebuild, ("configs", "dtypes", "jobs")),
        ("without --signature", signature is None, ("identity", "issuer")),
        ("without --sign", signed is None, ("token",)),
        ("without --sign or --signature", signed is None and signature is None, ("trust",)),
    )
    from aotmm.signature import check, sign
    from aotmm.verify import verify as verdicts_of

    if (signed is not None or signature is not None) and path is None:
        raise click.UsageError("say which pack or wheel is signed")
    if signature is not None and (identity is None or issuer is None):
        raise click.UsageError("--signature needs --identity and --issuer: anybody can sign")
    with TemporaryDirectory(prefix="aotmm-") as folder:
        again = _builder(Path(folder), configs, dtypes, jobs) if rebuild else None
        found = _installed_verified(again) if path is None else verdicts_of(path, again)
    if as_json:
        _print_json([asdict(row) for row in found])
    else:
        click.echo(report.verify_text(found, rebuilt=rebuild))
    violations = [f"{row.place}: {words}" for row in found for words in row.violations]
    if violations:
        raise ArtifactError("\n".join([f"{len(violations)} violations", *violations]))
    if path is not None and signed is not None:
        sign(path, signed, token=token, trust=trust)
        click.echo(f"wrote {signed}", err=True)
    if path is not None and signature is not None and identity is not None and issuer is not None:
        check(path, signature, identity=identity, issuer=issuer, trust=trust)
        click.echo(f"signed by {identity} ({issuer})", err=True)


def _builder(out: Path, configs: str | None, dtypes: tuple[str, ...], jobs: int) -> Rebuild:
    """Gives what builds the pack of a manifest again in `out`, of `configs` or the config set that it names."""

    def build(head: Head) -> Path:
        with _needs_build_extra():
            from aotmm import build as builder
            from aotmm.build.variants import set_names
        chosen = configs or head.provenance.config_set
        if configs is None and chosen not in set_names():
            raise SpecError(
                f"the pack for {head.arch} was built from {chosen}.toml, which aotmm does not bring along; "
                f"name the pack and that file: aotmm verify PACK --rebuild --configs {chosen}.toml"
            )
        with _kernels_done(_processes(jobs)) as progress:
            (done,) = builder.build(
                (head.arch,),
                out,
                configs=chosen,
                dtypes=dtypes,
                machine=head.host.partition("-")[0],
                jobs=jobs,
                progress=progress,
            )
        return done.folder

    return build


def _installed_verified(rebuild: Rebuild | None) -> list[Verification]:
    """The packs that `aotmm.load()` finds, verified; of those that cannot be found why, as a violation."""
    from aotmm.runtime.installed import entries, folder_of, own, owner
    from aotmm.verify import Verification, verify

    found = []
    for entry in entries():
        try:
            rows = verify(folder_of(entry), rebuild)
        except ArtifactError as error:
            rows = [Verification(entry.value, None, 0, 0, (str(error),))]
        found += [replace(row, owner=owner(entry)) for row in rows]
    return found + verify(own(), rebuild)


@main.command()
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
@click.option("--out-dtype", type=click.Choice(OUTPUTS), help="Type of C.  [default: what goes with --dtype]")
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
    help="Applied to the product.",
)
@click.option("--bias", type=click.Choice(("vector", "matrix")), help="Added before the activation: (N) or (M, N).")
@click.option(
    "--batch", type=click.IntRange(1, _MAX_SIZE), default=1, show_default=True, help="Equal products at once."
)
@click.option("--fast-accum", is_flag=True, help="fp8 sums may stay in the tensor cores' own precision.")
@click.option(
    "--align",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    metavar="BYTES",
    help="What the addresses of A, B and C are multiples of.",
)
@click.option("--all", "everything", is_flag=True, help="Show every plan and every kernel, as --json does.")
@_pack_option
@_json_option
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
    align: int,
    everything: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Show which kernel a product gets, and why. Needs no GPU.

    The product is C (M, N) = A (M, K) @ B (K, N). A and B are contiguous in their layout, C is row-major, and the GPU
    is the full model of its arch. DTYPE tf32 stands for fp32 operands with TF32 allowed.
    """
    from aotmm.runtime.installed import find_packs
    from aotmm.runtime.launcher import CDevice, Problem

    if batch * max(m * k, k * n, m * n) > _MAX_SIZE:
        raise SpecError(f"M={m} N={n} K={k} batch={batch}: an operand would have more than 2^63 - 1 elements")
    (element, other), gpu = (DTYPES[name] for name in input_types(dtype_in)), target(arch)
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
        batch=batch,
        batch_strides=(m * k, k * n, m * n) if batch > 1 else (0, 0, 0),
        bias_ptr=align if bias else 0,
        bias_strides=(m * n, n, 1) if bias == "matrix" else (0, 0, 1),
    )
    for pack in _packs_of(find_packs(folder), arch, folder):
        try:
            selection = pack.launcher.explain(problem, CDevice(gpu.multiprocessors, gpu.shared_bytes))
        except ValueError as error:
            raise SpecError(str(error)) from error
        if selection.chosen is not None:
            break
    judged = [row for row in selection.verdicts if row.kernel.role in ("product", "partial")]
    refused = [row for row in judged if row.rejected is not None]
    rejected = [row for row in refused if row.same_types]
    types = f"{element.name} x {other.name} -> {problem.dtype_c}"
    what = f"matmul M={m} N={n} K={k} {types}, layout {layout}, activation {activation}"
    if as_json:
        body = _selection_to(selection, rejected, len(refused) - len(rejected))
        device = {"multiprocessors": gpu.multiprocessors, "shared_bytes": gpu.shared_bytes}
        _print_json({"arch": arch, "folder": str(pack.folder), "problem": asdict(problem), "device": device, **body})
    else:
        more = f", {bias} bias" * bool(bias) + f", batch {batch}" * (batch > 1)
        click.echo(f"{what}{more}, addresses multiples of {align} B")
        click.echo(f"on {arch}: {gpu.multiprocessors} multiprocessors, {gpu.shared_bytes} B shared memory per block\n")
        click.echo(report.selection_text(selection, rejected, len(refused) - len(rejected), everything=everything))
    if selection.chosen is None:
        products = [kernel for kernel in pack.manifest.kernels if kernel.role == "product"]
        has = ", ".join(sorted({f"{report.types(kernel)} with epilogue {kernel.epilogue}" for kernel in products}))
        raise NoKernelError(
            f"no kernel in pack {arch} fits {what}, which needs epilogue {ACTIVATIONS[activation]}; it has: {has}",
            tuple(f"{row.kernel.name}: {row.rejected}" for row in refused),
        )


@main.command()
@_pack_option
@_json_option
@click.pass_context
def doctor(ctx: click.Context, *, folder: Path | None, as_json: bool) -> None:
    """Check torch, driver, packs and GPUs.

    For each GPU it says which pack it would use and how, or the command that builds what is missing. The exit code is
    0 unless a pack is missing or broken, or a driver fails; a machine without a GPU is fine.
    """
    from aotmm.doctor import diagnose

    found = diagnose(folder)
    if as_json:
        _print_json(asdict(found))
    else:
        click.echo(report.doctor_text(found))
    ctx.exit(found.exit_code)


@main.command()
@click.option("--arch", required=True, metavar="ARCH", help=f"Pack whose kernels are timed: {', '.join(TARGETS)}.")
@click.option(
    "--shapes",
    "file",
    metavar="FILE",
    type=_FILE,
    help="Shapes to time, written like aotmm/tune/shapes.json, which is the default.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Type that stands for all of its width; repeatable.  [default: fp16, fp8e4]",
)
@click.option(
    "--budget",
    default="8m",
    show_default=True,
    metavar="TIME",
    help="Begin no shape after that: 90s, 8m, 1h. The same command again goes on from there.",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Table to write.  [default: the one that packs of this checkout are built with]",
)
@click.option("--refit", is_flag=True, help="Time nothing; fit the models of the table again. Needs no GPU.")
@_scheduler_option
@_pack_option
@_json_option
def tune(
    *,
    arch: str,
    file: Path | None,
    dtypes: tuple[str, ...],
    budget: str,
    out: Path | None,
    refit: bool,
    scheduler: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Time the prebuilt kernels on this machine's GPUs, or a cluster's.

    The times, and models fitted to them, go to a table. aotmm build puts that of the checkout into its packs;
    aotmm.load(table=FILE) selects by any other. A kernel that hangs is killed, and one that is wrong is not timed; both
    are named, and are an error in the end. A fifth of the shapes judges what selection makes of the others.
    """
    _refuse_ignored(("with --refit", refit, ("file", "budget", "scheduler")))
    if out is None:
        if not in_checkout():
            raise click.UsageError("say --out: the table that this installation brought is not overwritten unasked")
        out = shipped_path(arch)
    from aotmm.runtime.installed import find_packs

    with _needs_torch("aotmm tune"):
        from aotmm.tune import session, shapes, summary
    seconds = _seconds(budget)
    packs = find_packs(folder)
    pack = _packs_of(packs, arch, folder)[0]
    measured = None
    if refit:
        verdict = session.refit(pack, out, dtypes)
    else:
        wanted = shapes.read() if file is None else shapes.read(file)
        with _shapes_done(arch, budget) as progress:
            measured, verdict = session.tune(
                pack, packs, wanted, out, dtypes=dtypes, budget_s=seconds, scheduler=scheduler, progress=progress
            )
    if as_json:
        _print_json(summary.body(measured, verdict) | {"table": str(out)})
    else:
        for line in summary.text(measured, verdict):
            click.echo(line)
        click.echo(f"wrote {out}")
    if measured is not None and measured.left_out:
        raise AotmmError(f"{len(measured.left_out)} left out: {', '.join(measured.left_out)}; the others are in {out}")


def _seconds(text: str) -> float:
    """The time in `text` ("90s", "8m", "1h") in seconds."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal():
        raise click.UsageError(f"--budget {text!r} is no time like 90s, 8m or 1h")
    return float(number) * units[unit]


def _bytes(text: str) -> int:
    """The size in `text` ("500M", "20G") in bytes."""
    units = {"M": 1 << 20, "G": 1 << 30}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal():
        raise click.UsageError(f"--cache-size {text!r} is no size like 500M or 20G")
    return int(number) * units[unit]


@contextmanager
def _shapes_done(arch: str, budget: str) -> Iterator[Callable[[int, int, str], None]]:
    """Gives what tuning calls as shapes get done: it shows a bar on a terminal, else lines, and what is left out."""
    if not sys.stderr.isatty():
        lines = Lines(_tell, "shapes", f"within {budget}")

        def tell(done: int, total: int, text: str) -> None:
            if text.startswith("left out"):
                _tell(text)
            lines(arch, done, total)

        yield tell
        return
    with click.progressbar(length=1, file=sys.stderr, show_pos=True, item_show_func=lambda text: text) as bar:

        def show(done: int, total: int, text: str) -> None:
            if text.startswith("left out"):
                _tell(text)
            bar.length = total
            bar.update(done - bar.pos, text)

        yield show


@main.command()
@click.argument("what", nargs=-1, metavar="[WHAT]...")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default="bench-results",
    show_default=True,
    help="Folder for results.json and what is made of it; a run whose results it has is continued.",
)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(("fp16", "bf16", "fp8e4")), help="Only this type.")
@click.option("--provider", "providers", multiple=True, metavar="NAME", help="Only this provider; repeatable.")
@click.option("--every", type=click.IntRange(min=1), default=1, metavar="N", help="One shape in N of each sweep.")
@click.option("--overhead", is_flag=True, help="Measure what calls cost, and nothing else, as WHAT overhead does.")
@click.option("--ablation", is_flag=True, help="Measure grouped against row-major order of tiles instead.")
@click.option(
    "--pack",
    metavar="DIR",
    type=_FOLDER,
    help="For --ablation: pack of aotmm/bench/ablation.toml.  [default: built now]",
)
@click.option(
    "--render",
    "rendered",
    metavar="DIR",
    type=_FOLDER,
    help="Measure nothing; make tables, plots and report of DIR/results.json again.",
)
@_json_option
def bench(
    *,
    what: tuple[str, ...],
    out: Path,
    dtypes: tuple[str, ...],
    providers: tuple[str, ...],
    every: int,
    overhead: bool,
    ablation: bool,
    pack: Path | None,
    rendered: Path | None,
    as_json: bool,
) -> None:
    """Measure this GPU and other libraries on it.

    WHAT is of: squares256, squares128, llm, tall_skinny, big_k, ragged, unaligned, fp8, epilogue (shapes, in
    aotmm/tune/shapes.json), first_result, overhead, epilogue_cost, scaling (1, 2 and 4 GPUs); everything without it.
    build_scaling, alone, measures builds with a simulated compiler; it needs no GPU but the build and cluster extras.
    Providers: aotmm, aotmm_plain, torch, scaled_mm, unfused, addmm, tutorial, cutlass. Every product is checked before
    it is timed.
    """
    of_sweeps = ("dtypes", "providers", "every")
    builds = what == ("build_scaling",)
    _refuse_ignored(
        ("with --render", rendered is not None, ("what", "out", *of_sweeps, "overhead", "ablation", "pack")),
        ("with --ablation", ablation, ("what", *of_sweeps, "overhead")),
        ("without --ablation", not ablation, ("pack",)),
        ("with --overhead", overhead, ("what", *of_sweeps)),
        ("on build_scaling", builds, ("out", *of_sweeps)),
    )
    if builds:
        _bench_builds(as_json=as_json)
        return
    with _needs_torch("aotmm bench"):
        from aotmm.bench import results, summary
        from aotmm.bench.cases import PLANS
        from aotmm.bench.render import render
        from aotmm.bench.run import run, run_ablation
    _refuse_ignored((f"on {', '.join(what)}", bool(what) and PLANS.keys().isdisjoint(what), of_sweeps))

    folder = rendered or out
    if rendered is not None:
        found = results.read(rendered)
    elif ablation:
        with _ablation_pack(pack) as built:
            found = run_ablation(built, out)
    else:

        def progress(row: results.Row | str) -> None:
            click.echo(row if isinstance(row, str) else summary.row_text(row), err=True)

        wanted = ("overhead",) if overhead else what
        found = run(wanted, out, progress, dtypes=dtypes, providers=providers, every=every)
    if as_json:
        _print_json(results.to_json(found))
    else:
        click.echo(report.table(summary.TARGET_HEADER, summary.target_table(found)))
        for name, text, verdict in [*summary.first_result(found), *summary.overhead(found)]:
            click.echo(f"{name}: {text} {verdict}")
        for name, values in found.other.items():
            click.echo(f"\n{report.table(*summary.other_table(name, values))}")
    for path in render(found, folder):
        click.echo(f"wrote {path}", err=True)
    wrong = summary.failures(found)
    if wrong:
        raise WrongResultError(f"aotmm did not compute, or not rightly: {'; '.join(wrong)}")


def _bench_builds(*, as_json: bool) -> None:
    """Prints what builds cost as the work grows."""
    with _needs_build_extra():
        from aotmm.bench import build_scaling
    found = build_scaling.measure()
    if as_json:
        _print_json(found)
        return
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    rows = [
        (name, *(f"{row[column]:.1f}" if column in row else "" for column in columns)) for name, row in found.items()
    ]
    click.echo(report.table(("build_scaling", *columns), rows))


@contextmanager
def _ablation_pack(given: Path | None) -> Iterator[Path]:
    """The pack for the ablation: the one that is given, or one that is built for this machine's GPU."""
    if given is not None:
        yield given
        return
    from aotmm.bench.ablation import CONFIGS
    from aotmm.runtime.devices import device

    with _needs_build_extra(), TemporaryDirectory() as folder:
        from aotmm import build as builder

        with _kernels_done(_processes(os.cpu_count() or 1)) as progress:
            builder.build((device(0).arch,), Path(folder), configs=str(CONFIGS), progress=progress)
        yield Path(folder)


@contextmanager
def _needs_build_extra() -> Iterator[None]:
    """Turns a failed import in the block into what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise build_extra_missing(str(error.name)) from error


@contextmanager
def _needs_torch(command: str) -> Iterator[None]:
    """Turns a failed import of torch in the block into what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise torch_missing(command) from error


def _processes(count: int) -> str:
    return f"on {count} process{'es' * (count > 1)}"


@contextmanager
def _kernels_done(how: str) -> Iterator[Progress]:
    """Gives what a build calls as kernels get done: it shows a bar per arch on a terminal, else lines on stderr.

    `how` says by what they are compiled.
    """
    if not sys.stderr.isatty():
        yield Lines(_tell, "kernels", how)
        return
    with _needs_build_extra():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def show(arch: str, done: int, total: int) -> None:
        if arch not in tasks:
            tasks[arch] = bars.add_task(arch, start=False, total=total, completed=done, rate=how)
            return
        task = bars.tasks[tasks[arch]]
        if not task.started:
            bars.reset(task.id, completed=done)  # what need not be compiled is no sign of the speed
            return
        bars.update(task.id, completed=done, rate=how if task.speed is None else f"{task.speed:.1f} kernels/s")

    with bars:
        yield show


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _print_json(body: object) -> None:
    click.echo(json.dumps(body, indent=2))


def _packs_of(packs: Sequence[Pack], arch: str, folder: Path | None) -> list[Pack]:
    """The packs of `arch`, at least one. Raises SpecError for an unknown arch, ArtifactError where there is none."""
    target(arch)
    found = [pack for pack in packs if pack.arch == arch]
    if not found:
        has = ", ".join(pack.arch for pack in packs)
        raise ArtifactError(
            f"no pack for {arch} in {folder or 'the installation'}, which has {has}; "
            f"build it: {build_command(arch, folder)}"
        )
    return found


_QUALITIES: dict[str, Callable[[Kernel], set[str]]] = {
    "dtype": lambda kernel: {kernel.dtype_a, kernel.dtype_b},
    "family": lambda kernel: {kernel.family},
    "layout": lambda kernel: {kernel.layout},
}


def _filter(packs: Sequence[Pack], wanted: dict[str, tuple[str, ...]]) -> Callable[[Kernel], bool]:
    """Tells for a kernel whether it has one of the values that are wanted of each quality, if any are.

    Raises SpecError for a value that no kernel of `packs` has.
    """
    kernels = [kernel for pack in packs for kernel in pack.manifest.kernels]
    for quality, values in wanted.items():
        known = {value for kernel in kernels for value in _QUALITIES[quality](kernel)}
        unknown = [repr(value) for value in values if value not in known]
        if unknown:
            has = ", ".join(sorted(known))
            raise SpecError(f"unknown {quality} {', '.join(unknown)}; the kernels of these packs have: {has}")
    return lambda kernel: all(
        not values or _QUALITIES[quality](kernel) & set(values) for quality, values in wanted.items()
    )


def _kernel(packs: Sequence[Pack], name: str) -> tuple[Pack, Kernel]:
    """The kernel called `name` and its pack. Raises SpecError if there is none, or one in several packs."""
    found = [(pack, kernel) for pack in packs for kernel in pack.manifest.kernels if kernel.name == name]
    if not found:
        names = sorted({kernel.name for pack in packs for kernel in pack.manifest.kernels})
        near = difflib.get_close_matches(name, names, cutoff=0.3)
        hint = f"did you mean {', '.join(near)}?" if near else "aotmm list shows them all"
        raise SpecError(f"no kernel {name!r} among {len(names)} of {', '.join(pack.arch for pack in packs)}; {hint}")
    if len(found) > 1:
        places = ", ".join(f"{pack.arch} in {pack.folder}" for pack, _ in found)
        raise SpecError(f"kernel {name} is in several packs; say --arch or --pack for one of them: {places}")
    return found[0]


def _report_to(row: Report) -> dict[str, object]:
    dropped = [{"kernel": name, "reason": reason} for name, reason in row.dropped]
    return asdict(row) | {"folder": str(row.folder), "dropped": dropped}


def _pack_to(pack: Pack, shown: Sequence[Kernel]) -> dict[str, object]:
    kernels = [
        {
            "name": kernel.name,
            "role": kernel.role,
            "schedule": kernel.schedule,
            "dtype_a": kernel.dtype_a,
            "dtype_b": kernel.dtype_b,
            "dtype_c": kernel.dtype_c,
            "layout": kernel.layout,
            "epilogue": kernel.epilogue,
            "fast_accum": kernel.fast_accum,
            "config": asdict(kernel.config),
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "shared_bytes": kernel.shared_bytes,
        }
        for kernel in shown
    ]
    head = pack.head
    where = {"arch": pack.arch, "folder": str(pack.folder), "owner": pack.owner, "host": head.host}
    return {**where, "provenance": asdict(head.provenance), "kernels": kernels}


def _selection_to(selection: Selection, rejected: Sequence[Verdict], other_types: int) -> dict[str, object]:
    chosen = selection.chosen
    return {
        "chosen": None if chosen is None or chosen.plan is None else _plan_to(chosen.kernel, chosen.plan),
        "fits": [_plan_to(row.kernel, row.plan) for row in selection.verdicts if row.plan is not None],
        "rejected": [{"kernel": row.kernel.name, "reason": row.rejected} for row in rejected],
        "other_types": other_types,
    }


def _plan_to(kernel: Kernel, plan: Plan) -> dict[str, object]:
    return {
        "kernel": kernel.name,
        "role": kernel.role,
        "schedule": kernel.schedule,
        "config": asdict(kernel.config),
        "launches": plan.launches,
        "split": plan.split,
        "grid": plan.grid,
        "programmatic": plan.programmatic,
        "cost_ns": plan.cost,
        "measured": plan.measured,
        "workspace_bytes": plan.workspace_bytes,
        "panel": (plan.panel_m, plan.panel_n) if plan.panel_m else None,
    }
