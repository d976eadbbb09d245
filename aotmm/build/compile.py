"""Step 2, variant -> image: compile one kernel with Triton for a GPU that need not be there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from aotmm.build import own, products
from aotmm.build import parameters as reading
from aotmm.build.parameters import parameters, resources
from aotmm.errors import CompileError, build_extra_missing
from aotmm.kernels import Specialisation, Variant
from aotmm.pack.schema import WHOLE, Image
from aotmm.problem import COMPILED_OUT
from aotmm.target import Target

FP_FUSION = True  # Triton's default up to 3.9; 3.10 changes it
# Where operands of products that do not lie along K are turned in registers on their way to shared memory, so that
# waves read whole vectors there. Triton does that by itself for gfx942 and for RDNA. docs/experiments/gfx90a.md
_TRANSPOSING = ("gfx90a",)
Buildable = Variant | own.OwnVariant
# What the last kernel's variants are made of, by `code_of`: the text, facts about it, and the image once it is there.
_known: dict[Buildable, tuple[str, dict[str, Any], bytes | None]] = {}


class RefusedError(CompileError):
    """The compiler refused a kernel, as it would on any machine."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled variant: its manifest entry, a Kernel or an OwnKernel, and the bytes of its files."""

    kernel: Any
    image: bytes
    ptx: bytes | None


def toolchain() -> tuple[str, Path]:
    """Return the version of the installed Triton and the folder of its package; Triton itself is not imported.

    Raises:
        SpecError: Triton is not installed.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise build_extra_missing("Triton")
    return importlib.metadata.version("triton"), Path(spec.submodule_search_locations[0])


def assembler(target: Target) -> str:
    """Return the name and version of the assembler, which turns the compiler's text into an image.

    Raises:
        CompileError: it does not run. SpecError: Triton is not installed.
    """
    version, folder = toolchain()
    if target.backend == "hip":
        return f"llvm of triton {version}"
    try:
        done = subprocess.run([_ptxas(folder), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"Triton's assembler does not run: {error}") from error
    return f"ptxas {re.findall(r'V([0-9.]+)', done.stdout)[0]}"


def rules(variant: Buildable) -> ModuleType:
    """Return the module that knows how variants of this kind are compiled and entered: `products` or `own`.

    Both have these: `entry`, the type of the manifest's entry; `specialise`; `options`, of the compiler;
    `descriptor_type`, its word for the type of a descriptor; `said_of` and `planned_of`, fields of the entry;
    `seen_in`, facts of the first stage's module; `read_of`, fields that follow from these and from the compiler's text,
    and `read_again`, which checks them; `facts_of` and `sources_of`, for keys; `code_of` and `twin_of`, variants of
    equal image and of nearly equal text; `unneeded_passes`.
    """
    return products if isinstance(variant, Variant) else own


def options(variant: Buildable) -> dict[str, Any]:
    """Return every compiler option that is not the target's default."""
    chosen: dict[str, Any] = {**rules(variant).options(variant), "enable_fp_fusion": FP_FUSION}
    if variant.target.ptx_version is not None:
        chosen["ptx_version"] = variant.target.ptx_version
    return chosen


def key(variant: Buildable, sources: str, assembled_by: str) -> str:
    """Return the digest of everything that the binary of `variant` depends on."""
    own_folder = getattr(rules(variant), "__path__", ())
    ways = [__file__, reading.__file__, str(rules(variant).__file__)]
    ways += sorted(str(path) for folder in own_folder for path in Path(folder).glob("[!_]*.py"))
    facts = {
        "variant": rules(variant).facts_of(variant),
        "options": options(variant),
        "sources": sources,
        "compile": [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in ways],
        "triton": toolchain()[0],
        "assembler": assembled_by,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def compile_variant(variant: Buildable, digest: str) -> Compiled:
    """Return the image of `variant` and its manifest entry; `digest` is its `key`.

    If the last kernel of this process had the same image (`code_of`), or was its twin (`twin_of`), it is made of that
    one's image or text. The bytes are the same, in no time or in a quarter of it.

    Raises:
        RefusedError: the compiler refused it; the message has the arch, the configuration and the compiler's words.
        CompileError: the same for want of files or memory; the source changed; or no launch has what the kernel needs.
    """
    target, ways = variant.target, rules(variant)
    plan: Specialisation = ways.specialise(variant)
    try:
        code = ways.code_of(variant)
        if code not in _known:
            _known.clear()
            _known[code] = *_lowered(variant, plan), None
        text, metadata, known = _known[code]
        image = _stages(variant, plan).assemble(text, metadata) if known is None else known
    except Exception as error:  # the compiler raises many kinds
        lost = isinstance(error, OSError | MemoryError) or _was_stopped(error)
        kind = CompileError if lost else RefusedError
        raise kind(
            f"{target.name}: {variant.name} does not compile ({variant.config_name}, options {options(variant)}, "
            f"from {variant.source}):\n{_words(error)}"
        ) from error
    _known[code] = text, metadata, image
    if (twin := ways.twin_of(code)) is not None and twin not in _known:
        _known[twin] = re.sub(r"\bf16(x2)?\b", r"bf16\1", text), metadata, None
    symbol = metadata["name"]
    if metadata["profile_scratch_size"]:
        raise CompileError(
            f"{target.name}: {variant.name} needs {metadata['profile_scratch_size']} B of profile scratch, which no "
            f"launch has; take the profiler's instructions out of it"
        )
    registers, spill_bytes = resources(target, image, text, symbol, _ptxas(toolchain()[1]).with_name("cuobjdump"))
    ptx = text.encode() if target.ptx_version is not None else None
    kernel = ways.entry(
        **ways.said_of(variant),
        **ways.planned_of(variant, plan),
        threads=metadata["num_warps"] * target.warp_size,
        shared_bytes=metadata["shared"],
        registers=registers,
        spill_bytes=spill_bytes,
        global_scratch_bytes=metadata["global_scratch_size"],
        profile_scratch_bytes=0,
        **ways.read_of(variant, plan, text, metadata),
        parameters=parameters(target, text, symbol, plan, metadata),
        image=linked_later(image),
        ptx=None if ptx is None else linked_later(ptx),
        key=digest,
    )
    return Compiled(kernel, image, ptx)


def _was_stopped(error: BaseException) -> bool:
    """Return whether somebody, or the kernel for want of memory, ended the assembler."""
    code = getattr(error.__cause__ or error.__context__, "returncode", 0)
    return -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Stages(NamedTuple):
    """The compiler's steps for a kernel: from its source to text, and from text to an image."""

    source: Any
    options: Any
    backend: Any
    lower: list[Callable[[Any, dict[str, Any]], Any]]
    assemble: Callable[[str, dict[str, Any]], bytes]


def _stages(variant: Buildable, plan: Specialisation) -> _Stages:
    """Return the steps of `triton.compile`, whose cache on disk aotmm does not need."""
    prepare()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    if plan.function.is_gluon():
        from triton.experimental.gluon import GluonASTSource as Source
    else:
        Source = ASTSource

    target, arguments = variant.target, plan.function.arg_names
    types = plan.types | {name: rules(variant).descriptor_type(row) for name, row in plan.descriptors.items()}
    attributes = {(arguments.index(name),): [["tt.divisibility", number]] for name, number in plan.multiples.items()}
    for name in plan.buffers:
        attributes.setdefault((arguments.index(name),), []).append(["tt.pointer_range", 32])
    source = Source(
        fn=plan.function,
        signature={name: types.get(name, "constexpr") for name in arguments},
        constexprs=plan.constants,
        attrs=attributes,
    )
    backend = make_backend(GPUTarget(target.backend, target.triton_arch, target.warp_size))
    chosen = backend.parse_options(options(variant))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, chosen, source.language)
    *lower, assemble = list(stages.values())[list(stages).index(source.ext) :]
    return _Stages(source, chosen, backend, lower, assemble)


def _lowered(variant: Buildable, plan: Specialisation) -> tuple[str, dict[str, Any]]:
    """Return PTX or the AMD assembler's text, and the compiler's facts about the kernel."""
    stages = _stages(variant, plan)
    from triton._C.libtriton import ir

    backend, context = stages.backend, ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(stages.options)
    none = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)  # of Triton 3.6 for AMD
    metadata = {**none, **stages.options.__dict__, "target": backend.target}
    with _without_prints() as left_out:
        text = stages.source.make_ir(backend.target, stages.options, functions, backend.get_module_map(), context)
    metadata["left_out"] = tuple(sorted(left_out))
    with _only_needed_passes(variant, plan), _transposing(variant):
        for number, stage in enumerate(stages.lower):
            text = stage(text, metadata)
            if number == 0:
                metadata |= rules(variant).seen_in(plan, text)
    return text, metadata


@contextmanager
def _only_needed_passes(variant: Buildable, plan: Specialisation) -> Iterator[None]:
    """Compile without the Triton passes that have nothing to do in this kernel."""
    if variant.target.backend != "cuda":
        yield
        return
    from triton._C.libtriton import nvidia, passes

    names = rules(variant).unneeded_passes(variant, plan)
    shared = (passes.common, passes.ttir, passes.ttgpuir, passes.gluon, passes.convert)
    nvidias = nvidia.passes
    modules = (*shared, nvidias.ttgpuir, nvidias.ttnvgpuir, nvidias.hopper)
    unneeded = [(module, name) for module in modules for name in names if hasattr(module, name)]
    adders = [getattr(module, name) for module, name in unneeded]
    for module, name in unneeded:
        setattr(module, name, lambda *_: None)
    try:
        yield
    finally:
        for (module, name), adder in zip(unneeded, adders, strict=True):
            setattr(module, name, adder)


@contextmanager
def _without_prints() -> Iterator[set[str]]:
    """Leave prints and assertions out of kernels; yield the names of those in the kernels that are compiled."""
    from triton.language.semantic import TritonSemantic

    found: set[str] = set()
    before = {name: getattr(TritonSemantic, name) for name in COMPILED_OUT}

    def leave_out(name: str) -> Callable[..., None]:
        def called(*_arguments: Any, **_named: Any) -> None:
            if sys._getframe(1).f_code.co_name == name:  # noqa: SLF001 - else it is an assertion of Triton's own
                found.add(name)

        return called

    for name in COMPILED_OUT:
        setattr(TritonSemantic, name, leave_out(name))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(TritonSemantic, name, function)


@contextmanager
def _transposing(variant: Buildable) -> Iterator[None]:
    """Compile a product for an arch of `_TRANSPOSING` with the pass of that name."""
    from triton import knobs

    with knobs.amd.scope():
        if isinstance(variant, Variant) and variant.target.name in _TRANSPOSING:
            knobs.amd.use_in_thread_transpose = True
        yield


def _words(error: BaseException) -> str:
    """Return the message of an error and of its innermost cause: Triton wraps it once per inlined call."""
    words, first = f"{type(error).__name__}: {error}", error
    while first.__cause__ is not None:
        first = first.__cause__
    return words if first is error else f"{words}\ncaused by {type(first).__name__}: {first}"


def linked_later(data: bytes) -> Image:
    """Return the manifest entry of the image or PTX `data`, whose offset is not known yet."""
    return Image(0, len(data), hashlib.sha256(data).hexdigest(), len(data), WHOLE)


def prepare() -> None:
    """Set Triton's environment variables: no paths in images, and its own 12.x assembler everywhere.

    ptxas 12.x rather than the 13.x that Triton prefers for sm90: its cubins load on drivers from 525 on.
    """
    ptxas = str(_ptxas(toolchain()[1]))
    os.environ |= {
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_PTXAS_PATH": ptxas,
        "TRITON_PTXAS_BLACKWELL_PATH": ptxas,
    }


def load() -> None:
    """Import Triton, which each child of a compiling process would do anew. Raises SpecError as `toolchain`."""
    prepare()
    import triton.compiler
    import triton.experimental.gluon  # noqa: F401


def _ptxas(folder: Path) -> Path:
    return folder / "backends" / "nvidia" / "bin" / "ptxas"
