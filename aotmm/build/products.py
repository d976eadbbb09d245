"""Products: how a variant of a family of `aotmm.kernels` is compiled, and what its manifest entry says of it."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aotmm.kernels
from aotmm.build.parameters import instruction
from aotmm.kernels import Descriptor, Specialisation, Variant, module_name, module_of
from aotmm.pack.schema import Attribute, Config, Guard, Kernel, Order
from aotmm.problem import DTYPES

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


entry = Kernel


def specialise(variant: Variant) -> Specialisation:
    """Return how the compiler must specialise the family's function. Raises ImportError for a family that is gone."""
    plan: Specialisation = module_of(variant.family).specialise(variant)
    return plan


def facts_of(variant: Variant) -> dict[str, Any]:
    """Return the facts of a variant that its image depends on."""
    return asdict(dataclasses.replace(variant, target=variant.target._replace(gpus="", status="", executed_on="")))


def sources_of(variants: Iterable[Variant]) -> list[str]:
    """Return the digests of the sources of `variants`."""
    families = [variant.family for variant in variants]
    digests = {family: kernel_sources(family) for family in set(families)}
    return [digests[family] for family in families]


def unneeded_passes(variant: Variant, plan: Specialisation) -> set[str]:
    """Return the passes of Triton for NVIDIA GPUs that have nothing to do in this kernel.

    The passes that add missing fences and barriers list every byte of shared memory that each operation may touch. In
    most kernels for Hopper they take more time than all others. Each other pass visits every operation.
    """
    names = set(plan.unneeded)
    names |= set(_TENSOR_MEMORY_PASSES if int(variant.target.triton_arch) < BLACKWELL else ())
    names |= set(_CLUSTER_PASSES)  # the clusters of `aotmm.kernels` are not the compiler's
    return names | set(() if plan.descriptors else ("add_proxy_fence_insertion",))


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
    """Return the options of the compiler that the variant's config sets."""
    config = variant.config
    chosen: dict[str, Any] = {"num_warps": variant.first_warps, "num_stages": config.num_stages}
    if variant.target.backend == "hip":
        chosen |= {
            "waves_per_eu": config.waves_per_eu,
            "matrix_instr_nonkdim": config.matrix_instr_nonkdim,
            "kpack": config.kpack,
        }
    return chosen


def descriptor_type(row: Descriptor) -> str:
    """Return Gluon's spelling of a tensor descriptor's type, with the layout of a box in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty

    element = DTYPES[row.dtype].triton
    layout = NVMMASharedLayout.get_default_for([1, *row.box], str_to_ty(element, None))
    return f"tensordesc<{element}[1,{row.box[0]},{row.box[1]}],{layout!r}>"


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


def seen_in(_plan: Specialisation, _module: Any) -> dict[str, Any]:
    """Return no fact of the first stage's module."""
    return {}


def read_of(variant: Variant, plan: Specialisation, text: str, _metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that follow from the compiler's text."""
    return {"order": _order_of(variant, plan, *instruction(variant.target, text))}


def read_again(variant: Variant, plan: Specialisation, kernel: Kernel) -> dict[str, Any]:
    """Return what these fields must be in the entry of a kernel whose text is not there."""
    return {"order": _order_of(variant, plan, kernel.order.instruction, kernel.order.k)}


def _order_of(variant: Variant, plan: Specialisation, instruction: str, k: int) -> Order:
    """Return the order of a kernel's sums, whose instructions multiply `k` steps of K at once."""
    if variant.role in ("reduce", "copy"):
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
    if config.num_ctas == 1 or config.cluster_k > 1:
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


def _guards(variant: Variant, plan: Specialisation) -> tuple[Guard, ...]:
    """Return the guards that selection checks before a launch: exactly the specialisation's assumptions."""
    fixed = {name: value for name, value in plan.constants.items() if name in plan.quantities and value is not None}
    found = [Guard(name, "equals", value) for name, value in fixed.items()]
    found += [Guard(name, "multiple_of", number) for name, number in plan.multiples.items()]
    if variant.dtype_a == "tf32":
        found.append(Guard("allow_tf32", "equals", 1))
    found += plan.guards
    found += [
        Guard(name, "below", I32_LIMIT)
        for name, type_ in plan.types.items()
        if type_ == "i32" and name not in ("split", "group_m", "block_columns", "k_shift")  # these are small
    ]
    return tuple(found)


def _attributes(config: Config) -> tuple[Attribute, ...]:
    """Return the launch attributes of clusters, whose blocks are spread over multiprocessors."""
    if config.num_ctas == 1:
        return ()
    return (
        Attribute("cluster_dimension", (config.cluster_m * config.cluster_k, config.cluster_n, 1)),
        Attribute("cluster_scheduling_policy_preference", (1, 0, 0)),
    )
