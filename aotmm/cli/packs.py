"""`aotmm list`, `aotmm inspect` and `aotmm verify`: the content of packs."""

from __future__ import annotations

import difflib
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING

import click

from aotmm.cli import report
from aotmm.cli.assembly import FORMS, assembly
from aotmm.cli.options import dtypes_option, jobs_option, json_option, pack_option, packs_of, refuse_ignored
from aotmm.cli.output import kernels_done, needs_build_extra, print_json, processes
from aotmm.errors import ArtifactError, SpecError
from aotmm.pack.manifest import kernel_to
from aotmm.problem import LAYOUTS
from aotmm.target import TARGETS, target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aotmm.pack.manifest import Head
    from aotmm.pack.schema import Kernel, OwnKernel
    from aotmm.pack.verify import Rebuild, Verification
    from aotmm.runtime.pack import Pack


@click.command("list")
@click.option("--arch", metavar="ARCH", help=f"Only packs for it: {', '.join(TARGETS)}.")
@pack_option
@click.option("--dtype", "dtypes", multiple=True, metavar="DTYPE", help="Only kernels for an A or B of it; repeatable.")
@click.option("--family", "families", multiple=True, metavar="FAMILY", help="Only kernels of it; repeatable.")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="LAYOUT",
    help=f"Only kernels for it; repeatable: {', '.join(LAYOUTS)}, or any for all strides.",
)
@click.option("--targets", "of_targets", is_flag=True, help="Show the archs to build for, and their status.")
@json_option
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

    If several packs are for one arch, they are asked for kernels in the order shown.
    """
    refuse_ignored(("with --targets", of_targets, ("folder", "dtypes", "families", "layouts")))
    if of_targets:
        targets = list(TARGETS.values()) if arch is None else [target(arch)]
        if as_json:
            print_json([row._asdict() for row in targets])
        else:
            click.echo(report.targets_text(targets))
        return
    from aotmm.runtime.installed import find_packs

    packs = find_packs(folder)
    narrowed = bool(dtypes or families or layouts)
    is_wanted = _filter(packs, {"dtype": dtypes, "family": families, "layout": layouts})
    if arch is not None:
        packs = packs_of(packs, arch, folder)
    rows = [(pack, [kernel for kernel in pack.manifest.kernels if is_wanted(kernel)]) for pack in packs]
    own = [] if narrowed else [(pack, pack.manifest.own) for pack in packs]
    if as_json:
        print_json([_pack_to(pack, kernels, narrowed=narrowed) for pack, kernels in rows])
    else:
        click.echo(report.list_text(rows, own))


@click.command()
@click.argument("name", metavar="KERNEL")
@click.option("--arch", metavar="ARCH", help="Arch of the kernel, if several packs have one of that name.")
@pack_option
@click.option("--asm", type=click.Choice(FORMS), help="Print the kernel's code instead.")
@json_option
def inspect(*, name: str, arch: str | None, folder: Path | None, asm: str | None, as_json: bool) -> None:
    """Show one kernel, or its code.

    This includes its sources, its resources, and its guards. KERNEL is its exact name, as in aotmm list. Of the codes,
    sass needs nvdisasm or cuobjdump, and amdgcn needs llvm-objdump.
    """
    from aotmm.runtime.installed import find_packs

    if asm is not None and as_json:
        raise click.UsageError("--asm prints code, which is not JSON; leave out one of them")
    packs = find_packs(folder)
    pack, kernel = _kernel(packs if arch is None else packs_of(packs, arch, folder), name)
    if asm is not None:
        click.echo(assembly(pack, kernel, asm), nl=False)
    elif as_json:
        provenance = asdict(pack.head.provenance)
        print_json(
            {"arch": pack.arch, "folder": str(pack.folder), "kernel": kernel_to(kernel), "provenance": provenance}
        )
    else:
        click.echo(report.kernel_text(pack, kernel))


@click.command()
@click.argument("path", metavar="[PACK|WHEEL]", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--rebuild", is_flag=True, help="Compile every kernel again, and compare bit for bit; takes minutes.")
@click.option(
    "--configs",
    metavar="SET|FILE",
    help="Config set that it was built with, for --rebuild.  [default: the one that the pack names]",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="FILE.py:NAME",
    help="Where a function of the packs is, for --rebuild; repeatable.",
)
@dtypes_option
@jobs_option
@json_option
def verify(
    *,
    path: Path | None,
    rebuild: bool,
    configs: str | None,
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    jobs: int,
    as_json: bool,
) -> None:
    """Verify a pack or wheel without running it.

    Every file is compared with its digest, and the facts in each image with the manifest. Without an argument the packs
    that aotmm.load() finds are verified: those that other packages add, and this installation's own. DTYPE is for
    --rebuild of a pack that was built with it.
    """
    refuse_ignored(("without --rebuild", not rebuild, ("configs", "kernels", "dtypes", "jobs")))
    from aotmm.pack.verify import verify as verify_path

    with TemporaryDirectory(prefix="aotmm-") as folder:
        again = _builder(Path(folder), configs, kernels, dtypes, jobs) if rebuild else None
        found = _installed_verified(again) if path is None else verify_path(path, again)
    if as_json:
        print_json([asdict(row) for row in found])
    else:
        click.echo(report.verify_text(found, rebuilt=rebuild))
    violations = [f"{row.place}: {words}" for row in found for words in row.violations]
    if violations:
        raise ArtifactError("\n".join([f"{len(violations)} violations", *violations]))


def _builder(out: Path, configs: str | None, kernels: tuple[str, ...], dtypes: tuple[str, ...], jobs: int) -> Rebuild:
    """Return a function that builds the pack of a manifest again in `out`, of `configs` or the set that it names.

    A pack of functions is built of those of `kernels`, "FILE.py:NAME", that it names.
    """

    def build(head: Head) -> Path:
        apart = Path(mkdtemp(dir=out))  # two packs may be for one arch
        with needs_build_extra():
            from aotmm import build as builder
            from aotmm.build.variants import set_names
        mine = _of_pack(head, kernels)
        chosen = configs or head.provenance.config_set
        if not mine and configs is None and chosen not in set_names():
            raise SpecError(
                f"the pack for {head.arch} was built from {chosen}.toml, which aotmm does not bring along; "
                f"name the pack and that file: aotmm verify PACK --rebuild --configs {chosen}.toml"
            )
        with kernels_done(processes(jobs)) as progress:
            (done,) = builder.build(
                (head.arch,),
                apart,
                configs=chosen,
                dtypes=dtypes,
                kernels=mine,
                machine=head.host.partition("-")[0],
                jobs=jobs,
                progress=progress,
            )
        return done.folder

    return build


def _of_pack(head: Head, kernels: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `kernels` that a pack was built of, in its order; none for a pack of products.

    Raises:
        SpecError: one is not among them.
    """
    if not head.functions:
        return ()
    found = {Path(words).name: words for words in kernels}
    wanted = head.provenance.config_set.split(", ")
    missing = [words for words in wanted if words not in found]
    if missing:
        raise SpecError(
            f"the pack for {head.arch} was built of {', '.join(wanted)}; say where they are: "
            "aotmm verify PACK --rebuild " + " ".join(f"--kernel {words}" for words in missing)
        )
    return tuple(found[words] for words in wanted)


def _installed_verified(rebuild: Rebuild | None) -> list[Verification]:
    """Verify the packs that `aotmm.load()` finds; a pack that cannot be found is a violation."""
    from aotmm.pack.verify import Verification, verify
    from aotmm.runtime.installed import entries, folder_of, own, owner

    found = []
    for entry in entries():
        try:
            rows = verify(folder_of(entry), rebuild)
        except ArtifactError as error:
            rows = [Verification(entry.value, None, 0, 0, (str(error),))]
        found += [replace(row, owner=owner(entry)) for row in rows]
    return found + verify(own(), rebuild)


_QUALITIES: dict[str, Callable[[Kernel], set[str]]] = {
    "dtype": lambda kernel: {kernel.dtype_a, kernel.dtype_b},
    "family": lambda kernel: {kernel.family},
    "layout": lambda kernel: {kernel.layout},
}


def _filter(packs: Sequence[Pack], values_of: dict[str, tuple[str, ...]]) -> Callable[[Kernel], bool]:
    """Return a test of kernels: whether one has a given value of each quality that has any.

    Raises SpecError for a value that no kernel of `packs` has.
    """
    kernels = [kernel for pack in packs for kernel in pack.manifest.kernels]
    for quality, values in values_of.items():
        known = {value for kernel in kernels for value in _QUALITIES[quality](kernel)}
        unknown = [repr(value) for value in values if value not in known]
        if unknown:
            has = ", ".join(sorted(known))
            raise SpecError(f"unknown {quality} {', '.join(unknown)}; the kernels of these packs have: {has}")
    return lambda kernel: all(
        not values or _QUALITIES[quality](kernel) & set(values) for quality, values in values_of.items()
    )


def _kernel(packs: Sequence[Pack], name: str) -> tuple[Pack, Kernel | OwnKernel]:
    """Return the kernel called `name` and its pack. Raises SpecError if there is none, or one in several packs."""
    every: list[tuple[Pack, Kernel | OwnKernel]] = []
    for pack in packs:
        every += [(pack, kernel) for kernel in pack.manifest.kernels]
        every += [(pack, kernel) for kernel in pack.manifest.own]
    found = [(pack, kernel) for pack, kernel in every if kernel.name == name]
    if not found:
        names = sorted({kernel.name for _, kernel in every})
        near = difflib.get_close_matches(name, names, cutoff=0.3)
        hint = f"did you mean {', '.join(near)}?" if near else "aotmm list shows them all"
        raise SpecError(f"no kernel {name!r} among {len(names)} of {', '.join(pack.arch for pack in packs)}; {hint}")
    if len(found) > 1:
        places = ", ".join(f"{pack.arch} in {pack.folder}" for pack, _ in found)
        raise SpecError(f"kernel {name} is in several packs; say --arch or --pack for one of them: {places}")
    return found[0]


def _pack_to(pack: Pack, shown: Sequence[Kernel], *, narrowed: bool) -> dict[str, object]:
    kernels: list[dict[str, object]] = [
        {
            "name": kernel.name,
            "role": kernel.role,
            "config_name": kernel.config_name,
            "dtype_a": kernel.dtype_a,
            "dtype_b": kernel.dtype_b,
            "dtype_c": kernel.dtype_c,
            "layout": kernel.layout,
            "epilogue": kernel.epilogue,
            "fast_accum": kernel.fast_accum,
            "order": str(kernel.order),
            "config": asdict(kernel.config),
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "shared_bytes": kernel.shared_bytes,
        }
        for kernel in shown
    ]
    kernels += [
        {
            "name": kernel.name,
            "function": kernel.function,
            "arguments": [asdict(row) for row in kernel.arguments],
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "shared_bytes": kernel.shared_bytes,
        }
        for kernel in (() if narrowed else pack.manifest.own)
    ]
    head = pack.head
    where = {"arch": pack.arch, "folder": str(pack.folder), "owner": pack.owner, "host": head.host}
    return {**where, "provenance": asdict(head.provenance), "kernels": kernels}
