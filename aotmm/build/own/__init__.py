"""Functions of a user's own: how a variant is compiled, and what its manifest entry says of it.

`file` imports the Python file, `describe` prints a TOML to start from, `facts` joins the two, `choices` lists the
variants, `writes` reads what a kernel writes. These rules have the names of those of `products`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aotmm.build.own.choices import ALIGNMENT, COMPILED, OwnVariant, notes, variants
from aotmm.build.own.facts import DESCRIPTOR_TYPE, MAPPED, has_maps, value_in
from aotmm.build.own.file import kernel_in
from aotmm.build.own.writes import written
from aotmm.errors import CompileError
from aotmm.kernels import Descriptor, Specialisation
from aotmm.pack.schema import Attribute, OwnKernel
from aotmm.problem import DTYPES, NO_POINTER

__all__ = ["OwnVariant", "notes", "variants"]

entry = OwnKernel


def options(variant: OwnVariant) -> dict[str, Any]:
    """Return the options of the compiler that the variant has."""
    return {option.name: option.value for option in variant.chosen}


def facts_of(variant: OwnVariant) -> dict[str, Any]:
    """Return the facts of a variant that its image depends on."""
    bare = variant.target._replace(gpus="", status="", executed_on="")
    return asdict(dataclasses.replace(variant, target=bare, path=variant.source))


def sources_of(variants: Iterable[OwnVariant]) -> list[str]:
    """Return the digests of the sources of `variants`."""
    return [variant.sources for variant in variants]


def specialise(variant: OwnVariant) -> Specialisation:
    """Return how the compiler must specialise the function.

    Raises:
        CompileError: the file is not the one that the variant was made of.
    """
    function = kernel_in(Path(variant.path), variant.function, variant.target).function
    if function.cache_key != variant.sources:
        raise CompileError(f"{variant.path} changed, or is another file on this machine, since the build began")
    types, constants = {}, {}
    descriptors = {}
    for row in variant.arguments:
        if row.type in COMPILED:
            constants[row.name] = value_in(row.value)
        elif match := DESCRIPTOR_TYPE.fullmatch(row.type):
            descriptors[row.name] = Descriptor(
                value=row.name,
                dtype=MAPPED[match[1]],
                sizes=(f"{row.name}.size0", f"{row.name}.size1"),
                strides=(f"{row.name}.stride0", f"{row.name}.stride1"),
                box=(int(match[2]), int(match[3])),
                mapped=has_maps(variant.target),
            )
        elif row.type == NO_POINTER:
            constants[row.name] = None
        elif row.name in variant.ones:
            constants[row.name] = 1
        else:
            types[row.name] = row.type
    return Specialisation(
        function=function,
        types=types,
        constants=constants,
        multiples=dict.fromkeys(variant.aligned, ALIGNMENT),
        guards=variant.guards,
        descriptors=descriptors,
        quantities=variant.quantities,
    )


def descriptor_type(row: Descriptor) -> str:
    """Return Triton's spelling of a tensor descriptor's type."""
    return f"tensordesc<{DTYPES[row.dtype].triton}[{row.box[0]},{row.box[1]}]>"


def said_of(variant: OwnVariant) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that are known before it is compiled."""
    return {
        "name": variant.name,
        "source": variant.source,
        "function": variant.function,
        "arguments": variant.arguments,
        "options": variant.chosen,
        "grid": variant.grid,
        "sizes": variant.sizes,
        "license": variant.license,
    }


def planned_of(variant: OwnVariant, _plan: Specialisation) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that follow from the variant."""
    return {
        "quantities": variant.quantities,
        "guards": variant.guards,
        "attributes": _attributes(options(variant)),
    }


def _attributes(chosen: dict[str, Any]) -> tuple[Attribute, ...]:
    """Return the launch attributes that options of the compiler ask for, as Triton's own launcher sets them."""
    found = []
    if chosen.get("launch_cooperative_grid"):
        found.append(Attribute("cooperative", (1, 0, 0)))
    if (blocks := chosen.get("num_ctas", 1)) > 1:
        found.append(Attribute("cluster_dimension", (blocks, 1, 1)))
        found.append(Attribute("cluster_scheduling_policy_preference", (1, 0, 0)))
    return tuple(found)


def seen_in(plan: Specialisation, module: Any) -> dict[str, Any]:
    """Return which arguments the kernel writes through, by the first stage's module."""
    pointers = [
        name for name in plan.function.arg_names if plan.types.get(name, "").startswith("*") or name in plan.descriptors
    ]
    return {"writes": written(str(module), pointers)}


def read_of(variant: OwnVariant, _plan: Specialisation, _text: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that were seen while it was compiled."""
    return {
        "symbol": metadata["name"],
        "writes": metadata["writes"],
        "left_out": (*metadata["left_out"], *variant.not_run),
    }


def read_again(_variant: OwnVariant, _plan: Specialisation, _kernel: OwnKernel) -> dict[str, Any]:
    """Return no field: nothing else says what a kernel writes, and what was left out of it."""
    return {}


def code_of(variant: OwnVariant) -> OwnVariant:
    """Return the variant that has the same image: itself."""
    return variant


def twin_of(_variant: OwnVariant) -> None:
    """Return None: no two variants differ in names of types alone, as far as is known."""


def unneeded_passes(_variant: OwnVariant, _plan: Specialisation) -> set[str]:
    """Return no pass: images are those of `triton.compile`."""
    return set()
