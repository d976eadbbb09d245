"""What the assembler made of shipped kernels for Hopper, where it once cost time (docs/experiments/hopper-kernels.md).

No result depends on it. A newer assembler may well break these: then measure, and say so there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from aotmm.pack.schema import Kernel
from tests.build.packs import opened_pack
from tests.emulators import core
from tests.native.emulation import missing

HOPPER = ("cooperative", "swapped", "pingpong")
FEW = 16  # kernels of each kind: one takes a second
MOST_BEFORE_A_COPY = 64  # instructions; there were 190 to 340 with divisions


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel in their order, and the first and last of each loop."""

    instructions: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    def places(self, word: str) -> list[int]:
        """Where instructions with this name are."""
        return [at for at, text in enumerate(self.instructions) if word in text]

    def around(self, at: int) -> tuple[str, ...]:
        """The smallest loop that has an instruction; waits that were moved out of it jump back into it."""
        first, last = min((each for each in self.loops if each[0] <= at <= each[1]), key=lambda each: each[1] - each[0])
        return self.instructions[first : last + 1]


def code_of(kernel: Kernel) -> Code:
    """The assembly of a kernel of sm90's default pack."""
    image = opened_pack("sm90").code(kernel.image)
    listing = core.disassembly([core.find_nvdisasm(), "-c"], image, ".cubin")
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif text := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(text[1])
    jumps = [
        (at, target[1]) for at, text in enumerate(instructions) if (target := re.search(r"`\((\.L_x_\d+)\)", text))
    ]
    return Code(tuple(instructions), tuple((labels[to], at) for at, to in jumps if labels[to] <= at))


def some(kernels: list[Kernel]) -> list[Kernel]:
    """A few of them, from all places of the list."""
    return kernels[:: max(1, len(kernels) // FEW)]


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """The kernels for Hopper whose tiles are not in groups."""
    if reason := missing("sm90"):
        pytest.skip(reason)
    found = opened_pack("sm90").manifest.kernels
    return [kernel for kernel in found if kernel.family in HOPPER and kernel.role in ("product", "partial")]


def test_clusters_keep_addresses_in_uniform_registers(kernels: list[Kernel]) -> None:
    """No step of a kernel in clusters moves a register of threads to a uniform one: such a move takes ten cycles."""
    clustered = [
        kernel
        for kernel in kernels
        if kernel.num_ctas > 1 and kernel.dtype_a in ("fp16", "bf16") and kernel.epilogue in ("none", "bias")
    ]
    assert len(clustered) > FEW
    for kernel in some(clustered):
        code = code_of(kernel)
        for word in ("UTMALDG", "HGMMA"):
            assert code.places(word)
            for at in code.places(word):
                assert not [text for text in code.around(at) if "R2UR" in text], (kernel.name, word)


def test_products_of_a_step_follow_each_other(kernels: list[Kernel]) -> None:
    """No wgmma waits for the one before it: one kernel of each family, type, layout and role, all whose X is loaded.

    ptxas puts a wait behind every wgmma if it takes registers that one reads to be written meanwhile (its C7510 to
    C7514). That took up to a third of the time of tf32 in layouts nn and tt, whose X comes through registers.
    """
    grouped = [kernel for kernel in opened_pack("sm90").manifest.kernels if kernel.role.startswith("grouped")]
    chosen: dict[tuple[str, ...], Kernel] = {}
    for kernel in [*kernels, *(kernel for kernel in grouped if kernel.family in HOPPER)]:
        loaded = kernel.dtype_a == "tf32" and kernel.layout in ("nn", "tt") and kernel.epilogue in ("none", "bias")
        kind = kernel.family, kernel.dtype_a, kernel.layout, kernel.role
        chosen.setdefault((*kind, kernel.config_name) if loaded else kind, kernel)
    assert ("swapped", "tf32", "nn", "grouped_m", "swapped_128x128x32_s6_w8_grouped_m") in chosen
    for kernel in chosen.values():
        code = code_of(kernel)
        products, waits = code.places("GMMA."), code.places("WARPGROUP.DEPBAR")
        assert products, kernel.name
        assert 0 < 2 * len(waits) <= len(products), kernel.name


def test_nothing_is_divided_between_the_wait_and_the_first_copy(kernels: list[Kernel]) -> None:
    """Producers know their first tile before they wait for the previous kernel, and begin to load soon after.

    So it is in kernels of plain epilogues: others may load registers that were spilled. Block scales come first where
    there are any, and their addresses are found after the wait.
    """
    soon = [kernel for kernel in kernels if kernel.epilogue in ("none", "bias") and not kernel.block_scaled]
    assert len(soon) > FEW
    for kernel in some(soon):
        code = code_of(kernel)
        first = code.places("UTMALDG")[0]
        wait = max(at for at in code.places("ACQBULK") if at < first)
        between = code.instructions[wait:first]
        assert code.places("MUFU"), kernel.name  # it does divide
        assert not [text for text in between if "MUFU" in text], kernel.name
        assert len(between) <= MOST_BEFORE_A_COPY, kernel.name


def test_a_reduce_loads_right_after_its_wait() -> None:
    """A reduce finds its tile before it waits for the partial sums."""
    reducing = [kernel for kernel in opened_pack("sm90").manifest.kernels if kernel.role == "reduce"]
    assert reducing
    for kernel in some(reducing):
        code = code_of(kernel)
        (wait,) = code.places("ACQBULK")
        first = next(at for at in code.places("LDG") + code.places("LDGSTS") if at > wait)
        assert code.places("MUFU"), kernel.name
        assert not [text for text in code.instructions[wait:first] if "MUFU" in text], kernel.name
