"""Step 2, variant -> image: compile one kernel with Triton for a GPU that need not be there."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aotmm.kernels
from aotmm.build import parameters as reading
from aotmm.build.parameters import instruction, parameters, resources
from aotmm.errors import CompileError, build_extra_missing
from aotmm.kernels import Descriptor, Specialisation, Variant, module_name, module_of
from aotmm.pack.schema import Attribute, Config, Guard, Image, Kernel, Order
from aotmm.problem import DTYPES
from aotmm.target import Target

FP_FUSION = True  # Triton's default up to 3.9; 3.10 changes it
# 32-bit sizes leave room for the last tile to pass the edge without wrapping.
I32_LIMIT = 2**31 - 2**16
_SAID = (
    "name", "family", "role", "config_name", "source", "dtype_a", "dtype_b", "dtype_c", "layout", "epilogue",
    "fast_accum", "config",
)  # fmt: skip
BLACKWELL = 100
# Passes for tensor memory, which only Blackwell has, and for clusters.
_TENSOR_MEMORY_PASSES = (
    "add_optimize_tmem_layouts", "add_tmem_load_reduce", "add_interleave_tmem", "add_lower_mma",
    "add_allocate_tensor_memory", "add_tmem_barrier_insertion", "add_tmem_wait_insertion",
)  # fmt: skip
_CLUSTER_PASSES = (
    "add_assign_cga_layouts", "add_optimize_cta_locality", "add_check_matmul_two_cta",
    "add_cluster_barrier_mbar_allocator", "add_initialize_ws_cluster_barriers",
)  # fmt: skip
# Where operands that do not lie along K are turned in registers on their way to shared memory, so that waves read whole
# vectors there. Triton does that by itself for gfx942 and for RDNA. docs/experiments/gfx90a.md
_TRANSPOSING = ("gfx90a",)
# Prefixes of the variables that compiler processes keep.
_KEPT = ("HOME", "LANG", "LC_", "LD_", "NIX_LD", "PATH", "TMPDIR")


# What the last kernel's variants are made of, by `code_of`: the text, facts about it, and the image once it is there.
_known: dict[Variant, tuple[str, dict[str, Any], bytes | None]] = {}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled variant: its manifest entry and the bytes of its files."""

    kernel: Kernel
    image: bytes
    ptx: bytes | None


def toolchain() -> tuple[str, Path]:
    """Return the version of the installed Triton and the folder of its package; Triton itself is not imported.

    Raises:
        CompileError: Triton is not installed.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise build_extra_missing("Triton")
    return importlib.metadata.version("triton"), Path(spec.submodule_search_locations[0])


def assembler(target: Target) -> str:
    """Return the name and version of the assembler, which turns the compiler's text into an image.

    Raises:
        CompileError: it does not run.
    """
    version, folder = toolchain()
    if target.backend == "hip":
        return f"llvm of triton {version}"
    try:
        done = subprocess.run([_ptxas(folder), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"Triton's assembler does not run: {error}") from error
    return f"ptxas {re.findall(r'V([0-9.]+)', done.stdout)[0]}"


def kernel_sources(family: str | None = None) -> str:
    """Return the digest of all kernel sources, or of those that one family uses, and of their vocabulary."""
    folder = Path(aotmm.kernels.__file__).parent
    paths = set(folder.rglob("*.py")) if family is None else _used_by(family, folder)
    digest = hashlib.sha256()
    for path in [*sorted(paths, key=lambda path: (path.name, path.parent.name)), folder.parent / "problem.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _used_by(family: str, folder: Path) -> set[Path]:
    """Return the files that a family's module imports from `folder` and beside it, directly or not, and itself."""
    shared = aotmm.kernels.__name__
    package, folders = shared, {shared: folder}
    if "." in family:  # a user's own
        package, _, _ = family.rpartition(".")
        folders[package] = Path(str(module_of(family).__file__)).parent
    found, waiting = {folder / "__init__.py"}, [module_name(family)]
    while waiting:
        name = waiting.pop()
        parent = next((parent for parent in folders if name.startswith(f"{parent}.")), None)
        if parent is None:
            continue
        stem = folders[parent].joinpath(*name.removeprefix(f"{parent}.").split("."))
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if path in found or not path.exists():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = ".".join(filter(None, [package if node.level else "", node.module]))
                waiting += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return found


def options(variant: Variant) -> dict[str, Any]:
    """Return every compiler option that is not the target's default."""
    config, target = variant.config, variant.target
    chosen: dict[str, Any] = {
        "num_warps": variant.first_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": FP_FUSION,
    }
    if target.backend == "hip":
        chosen |= {
            "waves_per_eu": config.waves_per_eu,
            "matrix_instr_nonkdim": config.matrix_instr_nonkdim,
            "kpack": config.kpack,
        }
    if target.ptx_version is not None:
        chosen["ptx_version"] = target.ptx_version
    return chosen


def key(variant: Variant, sources: str, assembled_by: str) -> str:
    """Return the digest of everything that the binary of `variant` depends on."""
    facts = {
        "variant": asdict(
            dataclasses.replace(variant, target=variant.target._replace(gpus="", status="", executed_on=""))
        ),
        "options": options(variant),
        "sources": sources,
        "compile": [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (__file__, reading.__file__)],
        "triton": toolchain()[0],
        "assembler": assembled_by,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def said_of(variant: Variant) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that are known before it is compiled."""
    return {name: getattr(variant, name) for name in _SAID}


def planned_of(variant: Variant, plan: Specialisation) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that follow from the specialisation."""
    return {
        "symbol": plan.function.__name__,
        "persistent": plan.persistent,
        "pdl": plan.pdl,
        "vector_bytes": plan.vector_bytes,
        "quantities": plan.quantities,
        "guards": _guards(variant, plan),
        "attributes": _attributes(variant.config),
    }


def order_of(variant: Variant, plan: Specialisation, instruction: str, k: int) -> Order:
    """Return the order of a kernel's sums, whose instructions multiply `k` steps of K at once."""
    if variant.role not in ("product", "partial"):
        return Order("none")
    if "." in variant.family:
        return Order("unknown")
    if DTYPES[variant.dtype_a].output == "int32":
        return Order("exact")
    packed = variant.config.kpack if instruction == "mfma" else 1
    return Order(instruction, k, packed, plan.promoted, plan.rounded)


def code_of(variant: Variant) -> Variant:
    """Return the variant that has the same image: one serves all shapes of clusters of the same blocks."""
    config = variant.config
    if config.num_ctas == 1:
        return variant
    pair = dataclasses.replace(
        config,
        block_m=2 * config.block_m // config.cluster_m,
        block_n=config.block_n // config.cluster_n,
        cluster_m=2,
        cluster_n=1,
    )
    return dataclasses.replace(variant, config=pair)


def twin_of(variant: Variant) -> Variant | None:
    """Return the bf16 kernel that differs from this fp16 kernel in names of types only, up to the compiler's text.

    So it is for NVIDIA GPUs in the families of `aotmm.kernels`, which calculate in fp32. Kernels of fp8 have none:
    their conversions go through fp16.
    """
    types = {name: getattr(variant, name) for name in ("dtype_a", "dtype_b", "dtype_c")}
    if (
        variant.target.backend != "cuda"
        or "." in variant.family
        or not {"fp16"} <= {*types.values()} <= {"fp16", "fp32"}
    ):
        return None
    changes: dict[str, Any] = {name: "bf16" for name, type_ in types.items() if type_ == "fp16"}
    return dataclasses.replace(variant, **changes)


def compile_variant(variant: Variant, digest: str) -> Compiled:
    """Return the image of `variant` and its manifest entry; `digest` is its `key`.

    If the last kernel of this process had the same image (`code_of`), or was its twin (`twin_of`), it is made of that
    one's image or text. The bytes are the same, in no time or in a quarter of it.

    Raises:
        CompileError: the compiler refused it; the message has the arch, the configuration and the compiler's words.
    """
    target = variant.target
    plan: Specialisation = module_of(variant.family).specialise(variant)
    try:
        code = code_of(variant)
        if code not in _known:
            _known.clear()
            _known[code] = *_lowered(variant, plan), None
        text, metadata, known = _known[code]
        image = _stages(variant, plan).assemble(text, metadata) if known is None else known
    except Exception as error:  # the compiler raises many kinds
        raise CompileError(
            f"{target.name}: {variant.name} does not compile ({variant.config}, options {options(variant)}, "
            f"from {variant.source}):\n{_words(error)}"
        ) from error
    _known[code] = text, metadata, image
    if (twin := twin_of(code)) is not None and twin not in _known:
        _known[twin] = re.sub(r"\bf16(x2)?\b", r"bf16\1", text), metadata, None
    symbol = metadata["name"]
    if metadata["profile_scratch_size"]:
        raise CompileError(
            f"{target.name}: {variant.name} needs {metadata['profile_scratch_size']} B of profile scratch, which no "
            f"launch has; take the profiler's instructions out of family {variant.family}"
        )
    registers, spill_bytes = resources(target, image, text, symbol, _ptxas(toolchain()[1]).with_name("cuobjdump"))
    ptx = text.encode() if target.ptx_version is not None else None
    kernel = Kernel(
        **said_of(variant),
        **planned_of(variant, plan),
        threads=metadata["num_warps"] * target.warp_size,
        shared_bytes=metadata["shared"],
        registers=registers,
        spill_bytes=spill_bytes,
        global_scratch_bytes=metadata["global_scratch_size"],
        profile_scratch_bytes=0,
        order=order_of(variant, plan, *instruction(target, text)),
        parameters=parameters(target, text, symbol, plan, metadata),
        image=linked_later(image),
        ptx=None if ptx is None else linked_later(ptx),
        key=digest,
    )
    return Compiled(kernel, image, ptx)


class _Stages(NamedTuple):
    """The compiler's steps for a kernel: from its source to text, and from text to an image."""

    source: Any
    options: Any
    backend: Any
    lower: list[Callable[[Any, dict[str, Any]], Any]]
    assemble: Callable[[str, dict[str, Any]], bytes]


def _stages(variant: Variant, plan: Specialisation) -> _Stages:
    """Return the steps of `triton.compile`, whose cache on disk aotmm does not need."""
    prepare()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon import GluonASTSource

    target, arguments = variant.target, plan.function.arg_names
    types = plan.types | {name: _descriptor_type(row) for name, row in plan.descriptors.items()}
    attributes = {(arguments.index(name),): [["tt.divisibility", number]] for name, number in plan.multiples.items()}
    for name in plan.buffers:
        attributes.setdefault((arguments.index(name),), []).append(["tt.pointer_range", 32])
    source = (GluonASTSource if plan.function.is_gluon() else ASTSource)(
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


def _lowered(variant: Variant, plan: Specialisation) -> tuple[str, dict[str, Any]]:
    """Return PTX or the AMD assembler's text, and the compiler's facts about the kernel."""
    stages = _stages(variant, plan)
    from triton._C.libtriton import ir

    backend, context = stages.backend, ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(stages.options)
    metadata = {**stages.options.__dict__, "target": backend.target}
    text = stages.source.make_ir(backend.target, stages.options, functions, backend.get_module_map(), context)
    with _only_needed_passes(variant, plan), _transposing(variant.target):
        for stage in stages.lower:
            text = stage(text, metadata)
    return text, metadata


@contextmanager
def _only_needed_passes(variant: Variant, plan: Specialisation) -> Iterator[None]:
    """Compile without the Triton passes that have nothing to do in this kernel.

    The passes that add missing fences and barriers list every byte of shared memory that each operation may touch. In
    most kernels for Hopper they take more time than all others. Each other pass visits every operation.
    """
    if variant.target.backend != "cuda":
        yield
        return
    from triton._C.libtriton import nvidia, passes

    names = set(plan.unneeded)
    names |= set(_TENSOR_MEMORY_PASSES if int(variant.target.triton_arch) < BLACKWELL else ())
    names |= set(_CLUSTER_PASSES)  # the clusters of `aotmm.kernels` are not the compiler's
    names |= set(() if plan.descriptors else ("add_proxy_fence_insertion",))
    shared, own = (passes.common, passes.ttir, passes.ttgpuir, passes.gluon, passes.convert), nvidia.passes
    modules = (*shared, own.ttgpuir, own.ttnvgpuir, own.hopper)
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
def _transposing(target: Target) -> Iterator[None]:
    """Compile for an arch of `_TRANSPOSING` with the pass of that name."""
    from triton import knobs

    with knobs.amd.scope():
        if target.name in _TRANSPOSING:
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
    return Image(0, len(data), hashlib.sha256(data).hexdigest())


def isolate() -> None:
    """Remove all variables from this process's environment that may change Triton's results: no cache key has them.

    Only variables that programs need to start and to find their files stay (`_KEPT`), so that variables of other Triton
    versions go too.
    """
    for name in list(os.environ):
        if not name.startswith(_KEPT):
            del os.environ[name]


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


def _ptxas(folder: Path) -> Path:
    return folder / "backends" / "nvidia" / "bin" / "ptxas"


def _guards(variant: Variant, plan: Specialisation) -> tuple[Guard, ...]:
    """Return the guards that selection checks before a launch: exactly the specialisation's assumptions."""
    found = [Guard(name, "equals", value) for name, value in plan.constants.items() if name in plan.quantities]
    found += [Guard(name, "multiple_of", number) for name, number in plan.multiples.items()]
    if variant.dtype_a == "tf32":
        found.append(Guard("allow_tf32", "equals", 1))
    found += plan.guards
    found += [
        Guard(name, "below", I32_LIMIT)
        for name, type_ in plan.types.items()
        if type_ == "i32" and name not in ("split", "group_m")  # plans have small ones
    ]
    return tuple(found)


def _attributes(config: Config) -> tuple[Attribute, ...]:
    """Return the launch attributes of clusters, whose blocks are spread over multiprocessors."""
    if config.num_ctas == 1:
        return ()
    return (
        Attribute("cluster_dimension", (config.cluster_m, config.cluster_n, 1)),
        Attribute("cluster_scheduling_policy_preference", (1, 0, 0)),
    )


def _descriptor_type(row: Descriptor) -> str:
    """Return Gluon's spelling of a tensor descriptor's type, with the layout of a box in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty

    element = DTYPES[row.dtype].triton
    layout = NVMMASharedLayout.get_default_for([1, *row.box], str_to_ty(element, None))
    return f"tensordesc<{element}[1,{row.box[0]},{row.box[1]}],{layout!r}>"
