"""The GPUs that torch sees, and the packs that serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aotmm.pack.files import build_command
from aotmm.target import TARGETS, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aotmm.runtime.pack import Pack


class Device(NamedTuple):
    """A GPU: torch's ordinal, the product's name, and its arch spelled like a target ("sm90", "gfx90a")."""

    ordinal: int
    name: str
    arch: str


def device(ordinal: int) -> Device:
    """Return device number `ordinal`; this may initialise torch's CUDA state."""
    import torch

    facts = torch.cuda.get_device_properties(ordinal)
    if torch.version.hip:
        return Device(ordinal, facts.name, facts.gcnArchName.partition(":")[0])
    return Device(ordinal, facts.name, f"sm{facts.major}{facts.minor}")


def devices() -> list[Device]:
    """Return every GPU that torch sees; none for a torch without GPU support."""
    import torch

    return [device(ordinal) for ordinal in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def what_to_build(arch: str, folder: Path | None) -> str:
    """Return the command that adds a pack for a GPU of `arch` to the packs in `folder`, or that there is none.

    Without a folder it is for the default library.
    """
    for name, _ in ranked(TARGETS, arch):
        return f"no pack runs on {arch}; build one: {build_command(name, folder)}"
    return f"no kernel can be built for {arch}; aotmm builds for: {', '.join(TARGETS)}"


def best_pack(packs: Sequence[Pack], arch: str) -> tuple[Pack, str] | None:
    """Return the pack of products for a GPU of `arch`, and how it runs there (`target.ranked`); None if none runs.

    Of several packs for one arch the first is used.
    """
    found = [pack for pack in packs if not pack.head.functions]
    for name, way in ranked(dict.fromkeys(pack.arch for pack in found), arch):
        return next(pack for pack in found if pack.arch == name), way
    return None
