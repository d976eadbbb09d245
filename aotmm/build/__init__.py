"""Build packs: configs -> variants -> compile -> render -> link -> pack, one step per module, no GPU needed."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotmm import __version__
from aotmm.build import compile as compiling
from aotmm.build import link, own, products, render
from aotmm.build.cache import Cache
from aotmm.build.compile import Buildable, Compiled, RefusedError
from aotmm.build.environment import isolate
from aotmm.build.gate import Gate, mismatches
from aotmm.build.own import OwnVariant
from aotmm.build.pack import new_pack
from aotmm.build.torch_library import link_torch_library
from aotmm.build.variants import config_set, variants
from aotmm.errors import AotmmError, ArtifactError, CompileError, PackError, SpecError
from aotmm.pack import manifest, table
from aotmm.pack.decode import MAX_ITEMS
from aotmm.pack.files import in_checkout
from aotmm.pack.manifest import FORMAT, File, Manifest, Provenance, Span
from aotmm.pack.schema import AnyKernel, Kernel, OwnKernel
from aotmm.problem import COMPILED_OUT
from aotmm.target import COMPILED, HOSTS, Target, host, target, targets
from aotmm.workers.dask import cluster
from aotmm.workers.pool import Timeouts, Worker, WorkerDiedError, WorkerPool, completed, in_child, local


@dataclass(frozen=True, slots=True)
class Report:
    """Result of building one pack.

    `compiled` counts kernels that no cache held. `dropped` has (kernel, reason); of a reason the last line is shown.
    `notes` says what of functions' files a pack does not do, or does not know.
    """

    arch: str
    folder: Path
    kernels: int
    bytes: int
    seconds: float
    compiled: int
    linked: bool
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


Progress = Callable[[str, int, int], None]
"""Show progress: the arch, the number of kernels done and the number of all.

It is called for every arch with 0 at the start, then with the kernels that need no compiling, then after each kernel.
"""
Compiler = Callable[[Buildable, str], Compiled]
"""Compile a variant with its key, in another process, perhaps on another machine. Raises CompileError."""

_OF_PACKS = re.compile(r"kernels\.json|launcher\.[ch]|libaotmm_\w+\.so")  # files, beside the manifest
TIMEOUTS = Timeouts(silence_s=900.0)  # far more than any kernel takes


def build(
    archs: tuple[str, ...],
    out: Path,
    *,
    configs: str = "default",
    dtypes: tuple[str, ...] = (),
    kernels: tuple[str, ...] = (),
    machine: str = "",
    jobs: int | None = None,
    scheduler: str | None = None,
    cache: Cache | None = None,
    compiler: Compiler = compiling.compile_variant,
    gate: Gate = mismatches,
    progress: Progress = lambda _arch, _done, _total: None,
) -> list[Report]:
    """Build one pack per arch under `out`; a pack that is up to date is left alone.

    Args:
        archs: names of `aotmm.target.TARGETS`; "all" stands for every one.
        configs: name of a config set, or the path of a TOML file.
        dtypes: input types, instead of the config set's own.
        kernels: functions of a user's own, "FILE.py:NAME", instead of products: docs/own-kernels.md.
        machine: processor of the machines that load the packs, one of `HOSTS`; "" for one like this.
        jobs: compiler processes; all processors by default.
        scheduler: address of a Dask scheduler, whose workers compile instead.
        cache: compiled kernels of earlier builds; a folder under `out` by default.
        compiler, gate: compile a variant and check the result; a benchmark may replace them.

    Raises:
        SpecError: an unknown arch, dtype, processor or config set, a wrong entry in one, or a wrong fact of a
            function; nothing was done.
        CompileError: a kernel or the launcher does not compile. PackError: a pack cannot be written.
            In both cases, as after Ctrl-C, earlier packs are unchanged, and compiled kernels are kept for the next
            build.
        AotmmError: the cluster cannot be used; nothing was done.
    """
    if machine and machine not in HOSTS:
        raise SpecError(f"unknown host {machine!r}; known: {', '.join(HOSTS)}")
    rows = targets(archs)
    content = _functions(kernels, rows) if kernels else _products(configs, dtypes, rows)
    for row in rows:
        _check_replaced(out / row.name, content)
    with _locked(out):
        for name, wanted in content.variants.items():
            progress(name, 0, len(wanted))
        if in_checkout():  # wheels bring it along
            link_torch_library(None if host(machine) == host() else out, machine)
        kept = cache or Cache(out / ".cache")
        with _worker_pool(jobs, scheduler, compiler) as pool, kept.settled():
            compilers = _Compilers(pool, kept, gate, progress)
            return [_build_pack(row, content, out, machine, compilers) for row in rows]


@dataclass(frozen=True, slots=True)
class _Content:
    """What packs hold: products, or functions of a user's own.

    Attributes:
        name: the config set, or the functions, as provenance has them.
        sources: digest of the kernels' sources.
        variants: the kernels to compile, by arch.
        core: the files of `native` that their launcher is linked from.
        status: what was done with kernels of an arch, one of `STATUSES`.
        render: returns the generated C of compiled kernels, by file.
        tuning: returns what provenance says of the tables of an arch.
        notes: what authors should know of the files of an arch.
    """

    name: str
    sources: Mapping[str, str]
    status: Callable[[Target], str]
    variants: Mapping[str, Sequence[Buildable]]
    core: tuple[str, ...]
    render: Callable[[Target, tuple[Any, ...]], dict[str, str]]
    tuning: Callable[[Target], str]
    notes: Callable[[Target], Sequence[str]]


def _products(configs: str, dtypes: tuple[str, ...], rows: Sequence[Target]) -> _Content:
    """Return the products of a config set. Raises SpecError."""
    chosen = config_set(configs)
    work = {row.name: variants(chosen, row, dtypes) for row in rows}
    for row in rows:
        if not work[row.name]:
            raise SpecError(
                f"config set {configs!r} has no kernel for {row.name}, which is {row.backend} and has "
                f"{', '.join(row.dtypes)}"
            )
    every = [variant for of_arch in work.values() for variant in of_arch]
    if all(variant.layout == "any" for variant in every) and any("any" not in each.layouts for each in chosen.entries):
        raise SpecError(
            f"config set {configs!r}: no entry is for {' or '.join(work)} and a type that is built "
            f"({', '.join(dtypes or chosen.dtypes)}); only the generic kernels, which are slow, would be built"
        )
    return _Content(
        name=chosen.name,
        sources=dict.fromkeys(work, products.kernel_sources()),
        status=lambda row: row.status,
        variants=work,
        core=link.LAUNCH_CORE,
        render=lambda row, kernels: render.texts(row, kernels, table.shipped(row.name)),
        tuning=lambda row: "; ".join(
            f"{each.device}, driver {each.driver}, {each.date}" for each in table.shipped(row.name)
        ),
        notes=lambda _row: (),
    )


def _functions(wanted: tuple[str, ...], rows: Sequence[Target]) -> _Content:
    """Return functions of a user's own ("FILE.py:NAME"). Raises SpecError."""
    compiling.toolchain()  # says so if there is no Triton
    work = {row.name: own.variants(wanted, row) for row in rows}
    sources = {arch: "".join(sorted({variant.sources for variant in found})) for arch, found in work.items()}
    return _Content(
        name=", ".join(dict.fromkeys(f"{v.source}:{v.function}" for v in work[rows[0].name])),
        status=lambda _row: COMPILED,  # nobody ran them yet
        sources={arch: hashlib.sha256(text.encode()).hexdigest() for arch, text in sources.items()},
        variants=work,
        core=link.OWN_CORE,
        render=render.own_texts,
        tuning=lambda _row: "",
        notes=lambda row: own.notes(wanted, row),
    )


def _check_replaced(folder: Path, content: _Content) -> None:
    """Refuse to replace a pack of products by one of functions, or the other way round, or what is no pack.

    Raises:
        SpecError: `folder` is such a place.
    """
    others = [path.name for path in folder.iterdir() if not _OF_PACKS.fullmatch(path.name)] if folder.is_dir() else []
    if not (folder / manifest.FILE_NAME).exists() and (others or folder.is_file()):
        raise SpecError(f"{folder} is there, and is no pack, which would replace it; use another --out")
    try:
        previous = manifest.read_head((folder / manifest.FILE_NAME).read_bytes(), str(folder))
    except (OSError, ArtifactError):
        return  # none, or one that is built again in any case
    if bool(previous.functions) != (content.core is link.OWN_CORE):
        raise SpecError(
            f"{folder} is a pack of {previous.provenance.config_set}, and a pack has products or functions, not both; "
            "use another --out"
        )


@dataclass(frozen=True, slots=True)
class _Compilers:
    """Sources of compiled kernels, beside the previous pack, and the gate that each kernel passes."""

    pool: WorkerPool
    cache: Cache
    gate: Gate
    progress: Progress


def _build_pack(row: Target, content: _Content, out: Path, machine: str, compilers: _Compilers) -> Report:
    start = time.monotonic()
    folder = out / row.name
    assembler = compiling.assembler(row)
    previous, known = _previous(folder)
    wanted = content.variants[row.name]
    results, dropped, compiled = _compile(row, wanted, assembler, known, compilers)
    kept = [item for item in results if item.kernel.shared_bytes <= row.shared_bytes]
    dropped += [
        (item.kernel.name, f"needs {item.kernel.shared_bytes} B of shared memory, {row.name} has {row.shared_bytes} B")
        for item in results
        if item.kernel.shared_bytes > row.shared_bytes
    ]
    _check_cases(row, wanted, dict(dropped))
    kernels, images = render.arranged(kept)
    command, compiler_name = link.compiler(machine)
    texts = content.render(row, kernels)
    library_key = link.library_key(row, texts, images, compiler_name, machine, content.core)
    provenance = Provenance(
        aotmm=__version__,
        triton=compiling.toolchain()[0],
        assembler=assembler,
        c_compiler=compiler_name,
        config_set=content.name,
        kernel_sources=content.sources[row.name],
        tuning=content.tuning(row),
        line_info=False,
        fp_fusion=compiling.FP_FUSION,
        status=content.status(row),
    )
    linked = previous is None or (previous.library_key, previous.provenance, previous.every) != (
        library_key,
        provenance,
        kernels,
    )
    if linked:
        with new_pack(folder) as fresh:
            library, begin = link.link_launcher(row, fresh, texts, images, command, machine, content.core)
            entry = Manifest(
                format=FORMAT,
                arch=row.name,
                min_driver=row.min_driver,
                host=host(machine),
                provenance=provenance,
                library=manifest.file(library.name, library.read_bytes()),
                images=Span(begin, len(images)),
                library_key=library_key,
                sources=tuple(manifest.file(name, texts[name].encode()) for name in render.KEPT),
                functions=_names(kernels),
                kernels=tuple(kernel for kernel in kernels if isinstance(kernel, Kernel)),
                own=tuple(kernel for kernel in kernels if isinstance(kernel, OwnKernel)),
            )
            _write_manifest(fresh, entry)
    size = sum(item.bytes for item in {item for kernel in kernels for item in (kernel.image, kernel.ptx)} if item)
    seconds, notes = time.monotonic() - start, (*content.notes(row), *_left_out(kernels))
    return Report(row.name, folder, len(kernels), size, seconds, compiled, linked, tuple(dropped), notes)


def _check_cases(row: Target, wanted: Sequence[Buildable], dropped: Mapping[str, str]) -> None:
    """Refuse a pack of functions that would miss calls. Raises CompileError.

    Of a function without configs of @triton.autotune no variant can be dropped; of one with them, one config of each
    case has to stay.
    """
    cases: dict[str, list[str]] = {}
    for variant in wanted:
        if isinstance(variant, OwnVariant):
            cases.setdefault(variant.case or variant.name, []).append(variant.name)
    for names in cases.values():
        if all(name in dropped for name in names):
            reasons = "; ".join(f"{name}: {dropped[name]}" for name in names)
            raise CompileError(
                f"{row.name}: no variant is left for some calls. {reasons}; leave this arch out, or give smaller values"
            )


def _left_out(kernels: tuple[AnyKernel, ...]) -> Iterator[str]:
    """Yield a note for each function whose kernels lack what its source calls."""
    own_kernels = [each for each in kernels if isinstance(each, OwnKernel)]
    found = dict.fromkeys((k.function, tuple(c for c in k.left_out if c in COMPILED_OUT)) for k in own_kernels)
    yield from (f"{name}: {' and '.join(calls)} are compiled out" for name, calls in found if calls)


def _names(kernels: tuple[AnyKernel, ...]) -> tuple[str, ...]:
    """Return the functions that `kernels` are of, in their order; none of products."""
    return tuple(dict.fromkeys(kernel.function for kernel in kernels if isinstance(kernel, OwnKernel)))


def _compile(
    row: Target, wanted: Sequence[Buildable], assembler: str, known: dict[str, Compiled], compilers: _Compilers
) -> tuple[list[Compiled], list[tuple[str, str]], int]:
    """Return the variants' kernels, in order, what was dropped and why, and the number that had to be compiled.

    A config of @triton.autotune that the compiler refuses is dropped, as Triton's own tuning does.
    """
    pool, progress = compilers.pool, compilers.progress
    sources = compiling.rules(wanted[0]).sources_of(wanted)
    keys = [compiling.key(variant, digest, assembler) for variant, digest in zip(wanted, sources, strict=True)]
    found = {key: _found(variant, key, known, compilers) for variant, key in zip(wanted, keys, strict=True)}
    missing = [(variant, key) for variant, key in zip(wanted, keys, strict=True) if found[key] is None]
    refused: dict[str, str] = {}
    done = len(wanted) - len(missing)
    progress(row.name, done, len(wanted))
    tasks = {pool.submit(task): task for task in _tasks(missing)}
    for future in completed(tasks, pool, TIMEOUTS.stall_s):
        task = tasks[future]
        try:
            results = future.result()
        except WorkerDiedError as error:
            advice = "; if that was for want of memory or files, try fewer --jobs" if error.starved else ""
            names = " and ".join(variant.name for variant, _ in task)
            raise CompileError(f"{row.name}: what compiled {names} was lost: {error.why}{advice}") from error
        if isinstance(results, AotmmError):
            tuned = all(isinstance(variant, OwnVariant) and variant.case for variant, _ in task)
            if not tuned or not isinstance(results, RefusedError):
                raise results
            refused |= {variant.name: str(results) for variant, _ in task}
            done += len(task)
            progress(row.name, done, len(wanted))
            continue
        for (variant, key), result in zip(task, results, strict=True):
            wrong = compilers.gate(variant, key, result)
            if wrong:
                words = "; ".join(wrong)
                raise CompileError(f"{row.name}: a compiler gave for {variant.name} what cannot be it: {words}")
            compilers.cache.put(key, result)
            found[key] = result
            done += 1
            progress(row.name, done, len(wanted))
    dropped = [(variant.name, refused[variant.name]) for variant in wanted if variant.name in refused]
    return [item for key in keys if (item := found[key]) is not None], dropped, len(missing)


_Task = list[tuple[Buildable, str]]
_ERROR = re.compile(r"(^|\s)error: ")  # LLVM's and MLIR's; ptxas' come as exceptions
_MOST_PRINTED, _MOST_ERRORS = 1 << 20, 5


def _tasks(missing: _Task) -> list[_Task]:
    """Return the variants to compile, with their keys, by process: those of one image, and their twins after them."""
    same: dict[Buildable, _Task] = {}
    for variant, key in missing:
        same.setdefault(compiling.rules(variant).code_of(variant), []).append((variant, key))
    for code in list(same):
        twin = compiling.rules(code).twin_of(code)
        if twin in same:
            same[code] += same.pop(twin)
    return list(same.values())


def _found(variant: Buildable, key: str, known: dict[str, Compiled], compilers: _Compilers) -> Compiled | None:
    """Return the kernel of the previous pack or the cache; one that the gate refuses counts as absent."""
    for get in (known.get, compilers.cache.get):
        item = get(key)
        if item is not None and not compilers.gate(variant, key, item):
            return item
    return None


def _worker_pool(jobs: int | None, scheduler: str | None, compiler: Compiler) -> AbstractContextManager[WorkerPool]:
    """Return a pool of compilers: processes of this machine, or the workers of a cluster."""
    make = functools.partial(_compiling, compiler)
    if scheduler is None:
        return local([make] * (jobs or os.cpu_count() or 1), TIMEOUTS)
    return cluster(scheduler, make, TIMEOUTS, _facts, _facts())


def _compiling(compiler: Compiler) -> Worker:
    """Prepare a compiler process, and return the function that does its tasks."""
    isolate()
    if compiler is compiling.compile_variant:
        compiling.load()
    printed = _Printed()

    def compiled(task: _Task) -> list[Compiled] | AotmmError:
        found = []
        for variant, key in task:
            printed.forget()
            try:
                found.append(compiler(variant, key))
            except AotmmError as error:
                return type(error)("\n".join([str(error), *printed.errors(str(error))]))
            if errors := printed.errors():
                words = "\n".join(errors)
                name = f"{variant.target.name}: {variant.name}"
                return RefusedError(f"{name} does not compile, though the compiler went on:\n{words}")
        return found

    # LLVM's text for some of AMD's kernels depends on what its process compiled before: docs/experiments/platforms.md.
    return lambda task, _tell: in_child(functools.partial(compiled, task))


class _Printed:
    """What this process prints from now on: LLVM prints some errors, of inline assembly for one, and goes on."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        for stream in (1, 2):
            os.dup2(self._file.fileno(), stream)

    def forget(self) -> None:
        """Forget what was printed."""
        self._file.seek(0)  # the streams share its position
        self._file.truncate()

    def errors(self, known: str = "") -> list[str]:
        """Return the lines with errors that are not `known`."""
        sys.stdout.flush()
        sys.stderr.flush()
        text = os.pread(self._file.fileno(), _MOST_PRINTED, 0).decode(errors="replace")
        lines = dict.fromkeys(line.strip() for line in text.splitlines() if _ERROR.search(line))
        return [line for line in lines if line not in known][:_MOST_ERRORS]


def _facts() -> dict[str, str]:
    """Return the versions that images depend on, beside aotmm and the variant."""
    return {"triton": compiling.toolchain()[0], "assembler": compiling.assembler(target("sm80"))}


def _write_manifest(folder: Path, entry: Manifest) -> None:
    """Write both files of the manifest after reading them back: a pack too large to load replaces no other."""
    written = manifest.write(entry)
    try:
        head = manifest.read_head(written[manifest.FILE_NAME], manifest.FILE_NAME)
        manifest.read_kernels(head, written[manifest.KERNELS_NAME], manifest.KERNELS_NAME)
    except ArtifactError as error:
        many = len(entry.every) > MAX_ITEMS or max(map(len, written.values())) > manifest.MAX_MANIFEST_BYTES
        advice = "; build fewer kernels" if many else ""
        raise PackError(f"pack {entry.arch} cannot be read back: {error}{advice}") from error
    for name, data in written.items():
        (folder / name).write_bytes(data)


def _previous(folder: Path) -> tuple[Manifest | None, dict[str, Compiled]]:
    """Return the manifest of the pack in `folder` and its kernels by key; None and {} if that pack is not whole."""
    try:
        where = str(folder)
        head = manifest.read_head((folder / manifest.FILE_NAME).read_bytes(), where)
        entry = manifest.read_kernels(head, _read(folder, head.kernels_file), where)
        for source in head.sources:
            _read(folder, source)
        library = _read(folder, head.library)
        kernels = {}
        for kernel in entry.every:
            image = manifest.code(head, kernel.image, library, where)
            ptx = None if kernel.ptx is None else manifest.code(head, kernel.ptx, library, where)
            kernels[kernel.key] = Compiled(kernel, image, ptx)
    except (OSError, ArtifactError):
        return None, {}
    return entry, kernels


def _read(folder: Path, file: File) -> bytes:
    """Return the bytes of a pack's file. Raises OSError, ArtifactError if they differ from the manifest."""
    data = (folder / file.path).read_bytes()
    if (words := manifest.altered(file, data)) is not None:
        raise ArtifactError(words)
    return data


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Allow one build at a time under `out`.

    Raises:
        PackError: another build runs there, or the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise PackError(f"packs cannot be written to {out}: {error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PackError(f"another aotmm build is writing to {out}; wait for it or use another --out") from error
        except OSError as error:
            raise PackError(f"packs cannot be written to {out}, which cannot be locked: {error}") from error
        yield
    finally:
        os.close(handle)
