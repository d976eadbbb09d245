"""The check of a compiled kernel before it gets into a pack, from a cache, the previous pack or a compiler.

Anyone who can write to a cache can write any entry under any key. So everything that follows from the wanted variant
is computed again and compared, also with the facts in the image. No text of an entry becomes C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aotmm.build.compile import Buildable, Compiled, linked_later, rules
from aotmm.build.parameters import passed
from aotmm.errors import ArtifactError
from aotmm.kernels import Specialisation
from aotmm.pack.binary import differences, guarded, read_image, read_ptx
from aotmm.pack.schema import WHOLE, AnyKernel, Parameter

Gate = Callable[[Buildable, str, Compiled], list[str]]
"""Return how a compiled kernel differs from the variant with that key; an empty list if it does not."""


def mismatches(variant: Buildable, key: str, compiled: Compiled) -> list[str]:
    """Return how `compiled` differs from any result for `variant`, whose key is `key`; [] if it may be one."""
    kernel, target = compiled.kernel, variant.target
    if (compiled.ptx is None) != (target.ptx_version is None):
        return [f"its PTX is {'missing' if compiled.ptx is None else 'not wanted'}"]
    ways = rules(variant)
    if not isinstance(kernel, ways.entry):
        return [f"it is the entry of another kind of kernel, {type(kernel).__name__}"]
    plan: Specialisation = ways.specialise(variant)
    wanted = ways.said_of(variant) | ways.planned_of(variant, plan) | {"key": key, "profile_scratch_bytes": 0}
    wanted |= ways.read_again(variant, plan, kernel)
    found = [
        f"its {name} is {getattr(kernel, name)!r}, not {value!r}"
        for name, value in wanted.items()
        if getattr(kernel, name) != value
    ]
    if kernel.threads % target.warp_size or kernel.threads < variant.first_warps * target.warp_size:
        found.append(f"it has {kernel.threads} threads, not {variant.first_warps} warps or more")
    for name, entry, data in (("image", kernel.image, compiled.image), ("PTX", kernel.ptx, compiled.ptx)):
        expected = None if data is None else linked_later(data)
        # how an earlier pack stored it does not matter
        if expected != (entry and replace(entry, offset=0, stored=entry.bytes, base=WHOLE)):
            found.append(f"its {name} is {entry}, not {expected}")
    found += _parameters(kernel, plan)
    return found or _files(variant, compiled)


def _parameters(kernel: AnyKernel, plan: Specialisation) -> list[str]:
    """Return the faults of the parameters; if the first is at 0, the image confirms offsets and sizes."""
    rows = [_known(item) for item in kernel.parameters]
    wanted = [
        (
            row.name,
            row.type,
            row.value,
            row.bytes,
            row.descriptor
            and (
                row.descriptor.dtype,
                *row.descriptor.quantities,
                row.descriptor.guards,
                len(row.descriptor.sizes),
                row.descriptor.fits,
            ),
        )
        for row in passed(plan, kernel.global_scratch_bytes)
    ]
    if rows == wanted and kernel.parameters[0].offset == 0:
        return []
    return [f"its parameters are {rows}, from {kernel.parameters[:1]} on, not {wanted}"]


def _known(item: Parameter) -> tuple[object, ...]:
    """Return a parameter as far as it follows from the specialisation: the compiler chooses boxes and swizzles."""
    row = item.tensor_map
    return (
        item.name,
        item.type,
        item.value,
        item.bytes,
        row
        and (row.dtype, row.inner, row.outer, row.batch, row.stride, row.batch_stride, row.guards, row.rank, row.fits),
    )


def _files(variant: Buildable, compiled: Compiled) -> list[str]:
    """Return the differences between the facts of image and PTX and the manifest entry."""
    wanted, found = guarded(compiled.kernel, variant.target), []
    for data, reader in ((compiled.image, read_image), (compiled.ptx, read_ptx)):
        if data is not None:
            try:
                found += differences(reader(data, variant.name), wanted)
            except ArtifactError as error:
                found.append(str(error))
    return found
