"""The GPUs that torch sees, and which pack serves which."""

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
    """Device number `ordinal`; initialises torch's CUDA state if that has not happened."""
    import torch

    facts = torch.cuda.get_device_properties(ordinal)
    if torch.version.hip:
        return Device(ordinal, facts.name, facts.gcnArchName.partition(":")[0])
    return Device(ordinal, facts.name, f"sm{facts.major}{facts.minor}")


def devices() -> list[Device]:
    """Every GPU that torch sees; empty for a torch without GPU support."""
    import torch

    return [device(ordinal) for ordinal in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def what_to_build(arch: str, folder: Path | None) -> str:
    """What serves a GPU of `arch`: the command that adds it to the packs in `folder`, or that nothing does.

    No folder stands for the default library.
    """
    for name, _ in ranked(TARGETS, arch):
        return f"no pack runs on {arch}; build one: {build_command(name, folder)}"
    return f"no kernel can be built for {arch}; aotmm builds for: {', '.join(TARGETS)}"


def best_pack(packs: Sequence[Pack], arch: str) -> tuple[Pack, str] | None:
    """The pack to use on a GPU of `arch`, and how it runs there (`aotmm.target.ranked`); None if none runs.

    Of several packs for one arch it is the first.
    """
    for name, way in ranked(dict.fromkeys(pack.arch for pack in packs), arch):
        return next(pack for pack in packs if pack.arch == name), way
    return None
