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
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aotmm.kernels
from aotmm.errors import CompileError, build_extra_missing
from aotmm.kernels import Descriptor, Specialisation, Variant, module_name, module_of
from aotmm.pack.schema import Attribute, Guard, Image, Kernel, Parameter, TensorMap
from aotmm.problem import DTYPES, VALUES
from aotmm.target import Target

FP_FUSION = True  # Triton's default up to 3.9; 3.10 changes it
SCRATCH = ("global_scratch", "profile_scratch")
# 32-bit sizes leave room for the last tile to pass the edge without wrapping.
I32_LIMIT = 2**31 - 2**16
DESCRIPTOR_BYTES = 128  # Source: CUDA driver API, CUtensorMap
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
# Prefixes of the variables that compiler processes keep.
_KEPT = ("HOME", "LANG", "LC_", "LD_", "NIX_LD", "PATH", "TMPDIR")
_PTX_BYTES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8, "f64": 8}


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
    if variant.num_ctas > 1:
        chosen["num_ctas"] = variant.num_ctas
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
        "compile": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
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
        "num_ctas": variant.num_ctas,
        "vector_bytes": plan.vector_bytes,
        "guards": _guards(variant, plan),
        "attributes": _attributes(variant.num_ctas),
    }


def compile_variant(variant: Variant, digest: str) -> Compiled:
    """Return the image of `variant` and its manifest entry; `digest` is its `key`.

    Raises:
        CompileError: the compiler refused it; the message has the arch, the configuration and the compiler's words.
    """
    prepare()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon import GluonASTSource

    target = variant.target
    family = module_of(variant.family)
    plan: Specialisation = family.specialise(variant)
    arguments = plan.function.arg_names
    gpu = GPUTarget(target.backend, target.triton_arch, target.warp_size)
    types = plan.types | {name: _descriptor_type(row) for name, row in plan.descriptors.items()}
    source = (GluonASTSource if plan.function.is_gluon() else ASTSource)(
        fn=plan.function,
        signature={name: types.get(name, "constexpr") for name in arguments},
        constexprs=plan.constants,
        attrs={(arguments.index(name),): [["tt.divisibility", number]] for name, number in plan.multiples.items()},
    )
    try:
        with _only_needed_passes(variant, plan), tempfile.TemporaryDirectory(prefix="aotmm-triton-") as folder:
            triton.knobs.cache.dir = folder
            parsed = make_backend(gpu).parse_options(options(variant))
            built = triton.compile(source, target=gpu, options=parsed.__dict__)
            image = built.asm[target.image]
            text = built.asm["ptx" if target.backend == "cuda" else "amdgcn"]
            symbol, metadata = built.metadata.name, built.metadata
    except Exception as error:  # the compiler raises many kinds
        raise CompileError(
            f"{target.name}: {variant.name} does not compile ({variant.config}, options {options(variant)}, "
            f"from {variant.source}):\n{_words(error)}"
        ) from error
    if metadata.profile_scratch_size:
        raise CompileError(
            f"{target.name}: {variant.name} needs {metadata.profile_scratch_size} B of profile scratch, which no "
            f"launch has; take the profiler's instructions out of family {variant.family}"
        )
    registers, spill_bytes = _resources(target, image, text, symbol)
    ptx = text.encode() if target.ptx_version is not None else None
    kernel = Kernel(
        **said_of(variant),
        **planned_of(variant, plan),
        threads=metadata.num_warps * target.warp_size,
        shared_bytes=metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        global_scratch_bytes=metadata.global_scratch_size,
        profile_scratch_bytes=0,
        parameters=_parameters(target, text, symbol, plan, metadata),
        image=linked_later(image),
        ptx=None if ptx is None else linked_later(ptx),
        key=digest,
    )
    return Compiled(kernel, image, ptx)


@contextmanager
def _only_needed_passes(variant: Variant, plan: Specialisation) -> Iterator[None]:
    """Compile without the Triton passes that have nothing to do in this kernel.

    The passes that add missing fences and barriers list every byte of shared memory that each operation may touch. In
    most kernels for Hopper they take more time than all others. Each other pass visits every operation.
    """
    from triton._C.libtriton import nvidia

    unneeded = []
    if variant.target.backend == "cuda" and int(variant.target.triton_arch) < BLACKWELL:
        unneeded += [(nvidia.passes.ttnvgpuir, name) for name in _TENSOR_MEMORY_PASSES]
    if variant.num_ctas == 1:
        unneeded += [(nvidia.passes.ttnvgpuir, name) for name in _CLUSTER_PASSES]
    if not plan.descriptors or plan.fenced:
        unneeded.append((nvidia.passes.ttnvgpuir, "add_proxy_fence_insertion"))
    if plan.synchronised:
        unneeded.append((nvidia.passes.ttgpuir, "add_membar"))
    adders = [getattr(module, name) for module, name in unneeded]
    for module, name in unneeded:
        setattr(module, name, lambda *_: None)
    try:
        yield
    finally:
        for (module, name), adder in zip(unneeded, adders, strict=True):
            setattr(module, name, adder)


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
    found = [Guard(name, "equals", value) for name, value in plan.constants.items() if name in VALUES]
    found += [Guard(name, "multiple_of", number) for name, number in plan.multiples.items()]
    if variant.dtype_a == "tf32":
        found.append(Guard("allow_tf32", "equals", 1))
    found += plan.guards
    found += [
        Guard(name, "below", I32_LIMIT) for name, type_ in plan.types.items() if type_ == "i32" and name != "split"
    ]
    return tuple(found)


def _attributes(num_ctas: int) -> tuple[Attribute, ...]:
    """Return the launch attributes of clusters of `num_ctas` blocks, which are spread over multiprocessors."""
    if num_ctas == 1:
        return ()
    return (
        Attribute("cluster_dimension", (num_ctas, 1, 1)),
        Attribute("cluster_scheduling_policy_preference", (1, 0, 0)),
    )


def _descriptor_type(row: Descriptor) -> str:
    """Return Gluon's spelling of a tensor descriptor's type, with the layout of a box in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty

    element = DTYPES[row.dtype].triton
    layout = NVMMASharedLayout.get_default_for(
        list(row.box), str_to_ty(element, None), cga_layout=[list(basis) for basis in row.cluster] or None
    )
    return f"tensordesc<{element}[{row.box[0]},{row.box[1]}],{layout!r}>"


def _parameters(target: Target, text: str, symbol: str, plan: Specialisation, metadata: Any) -> tuple[Parameter, ...]:
    """Return the parameter list in the compiler's text, joined with the names that were passed.

    A tensor descriptor is passed as its tensor map, followed by its sizes and strides.

    Raises:
        CompileError: the two do not fit: this Triton passes a parameter that aotmm does not know.
    """
    transfers = iter(getattr(metadata, "tensordesc_meta", None) or ())  # of every tensor descriptor, in order
    expected = passed(plan, metadata.global_scratch_size)
    slots = _ptx_slots(text, symbol) if target.backend == "cuda" else _amd_slots(text)
    if [size for _, size in slots] != [row.bytes for row in expected]:
        raise CompileError(
            f"{target.name}: the binary of {symbol} takes parameters of {[size for _, size in slots]} bytes, expected "
            f"{[row.bytes for row in expected]} for {[row.name for row in expected]}; this version of Triton is not "
            f"supported"
        )
    return tuple(
        Parameter(
            row.name,
            row.type,
            row.value,
            offset,
            size,
            None if row.descriptor is None else _tensor_map(row.descriptor, next(transfers)),
        )
        for row, (offset, size) in zip(expected, slots, strict=True)
    )


class Passed(NamedTuple):
    """An argument of a launch, as far as it is known before the kernel is compiled."""

    name: str
    type: str
    value: str
    descriptor: Descriptor | None = None

    @property
    def bytes(self) -> int:
        """Return its size."""
        if self.type == "tensordesc":
            return DESCRIPTOR_BYTES
        return 8 if self.type[0] == "*" or self.type == "i64" else 4


def passed(plan: Specialisation, global_scratch_bytes: int) -> list[Passed]:
    """Return the arguments of a kernel that is compiled by `plan`, in order."""
    expected: list[Passed] = []
    for name in plan.function.arg_names:
        if name in plan.types:
            expected.append(Passed(name, plan.types[name], name))
        elif name in plan.descriptors:
            row = plan.descriptors[name]
            expected.append(Passed(name, "tensordesc", row.value, row))
            expected += [Passed(f"{name}.{size}", "i32", size) for size in row.sizes]
            expected += [Passed(f"{name}.{stride}", "i64", stride) for stride in row.strides]
    scratch = {"global_scratch": global_scratch_bytes}
    return expected + [Passed(name, "*i8", name if scratch.get(name) else "zero") for name in SCRATCH]


def _tensor_map(row: Descriptor, transfer: dict[str, Any]) -> TensorMap:
    """Return the tensor map of a descriptor, with the compiler's box of one transfer; a wide box takes several."""
    box_outer, box_inner = transfer["block_size"]
    outer = row.outer or box_outer
    return TensorMap(row.dtype, row.sizes[1], row.sizes[0], row.strides[0], box_inner, outer, transfer["swizzle"])


def _ptx_slots(text: str, symbol: str) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each `.param`, at natural alignment. Source: PTX ISA, "Kernel parameters"."""
    entry = text[text.index(f".entry {symbol}(") :]
    slots, end = [], 0
    for declared in entry[: entry.index(")")].split("(", 1)[1].split(","):
        alignment, type_, count = re.findall(r"\.param (?:\.align (\d+) )?\.(\w+).*?(?:\[(\d+)\])?\s*$", declared)[0]
        size = _PTX_BYTES[type_] * int(count or 1)
        alignment = int(alignment or size)
        offset = -(-end // alignment) * alignment
        slots.append((offset, size))
        end = offset + size
    return slots


def _amd_slots(text: str) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each explicit argument. Source: LLVM AMDGPU usage, code object v5 metadata."""
    arguments = text[text.index(".args:") : text.index(".group_segment_fixed_size")]
    found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", arguments)
    return [(int(offset), int(size)) for offset, size, kind in found if not kind.startswith("hidden_")]


def _resources(target: Target, image: bytes, text: str, symbol: str) -> tuple[int, int]:
    """Return registers and spilled bytes per thread, from the binary."""
    if target.backend == "hip":
        number = {
            name: int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])
            for name in ("vgpr_count", "private_segment_fixed_size")
        }
        return number["vgpr_count"], number["private_segment_fixed_size"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as handle:
        handle.write(image)
        handle.flush()
        tool = _ptxas(toolchain()[1]).with_name("cuobjdump")
        done = subprocess.run([tool, "-res-usage", handle.name], capture_output=True, text=True, check=False)
    line = re.search(rf"Function {symbol}:\s*REG:(\d+) STACK:(\d+)", done.stdout)
    if line is None:
        raise CompileError(f"{target.name}: cuobjdump says nothing of {symbol}:\n{done.stdout}{done.stderr}")
    return int(line[1]), int(line[2])
