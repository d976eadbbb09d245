"""The table of architectures, and which packs run where."""

from __future__ import annotations

import pytest

from aotmm.errors import SpecError
from aotmm.problem import INPUTS
from aotmm.target import TARGETS, target, ways_to_run


@pytest.mark.parametrize("name", TARGETS)
def test_rows(name: str) -> None:
    """Each row fits together: spelling, backend, image, types, and text only where CUDA has it."""
    row = target(name)
    assert row.name == name
    assert (row.backend, row.image, row.warp_size) in {("cuda", "cubin", 32), ("hip", "hsaco", 64)}
    assert name == (f"sm{row.triton_arch}" if row.backend == "cuda" else row.triton_arch)
    assert row.capability == (divmod(int(name[2:]), 10) if row.backend == "cuda" else None)
    assert set(row.dtypes) <= set(INPUTS)
    assert row.fast_accum == (name == "sm90")
    assert row.backend == "cuda" or (row.ptx_version, row.min_driver) == (None, 0)
    assert row.executed_on


def test_figures_of_the_data_sheets() -> None:
    """Shared memory per block and multiprocessors are those of the CUDA guide and the CDNA2 documents."""
    assert {name: (row.shared_bytes, row.multiprocessors) for name, row in TARGETS.items()} == {
        "sm80": (163 * 1024, 108),
        "sm90": (227 * 1024, 132),
        "gfx90a": (64 * 1024, 104),
    }


@pytest.mark.parametrize("name", ["", "sm_80", "SM80", "sm89", "gfx942", "80"])
def test_unknown_arch(name: str) -> None:
    """An unknown arch is told with those that there are."""
    with pytest.raises(SpecError) as caught:
        target(name)
    assert str(caught.value) == f"unknown arch {name!r}; known: sm80, sm90, gfx90a"


@pytest.mark.parametrize(
    ("pack", "device", "way"),
    [
        ("sm80", "sm80", "exact"),
        ("sm80", "sm86", "compatible"),
        ("sm80", "sm89", "compatible"),
        ("sm80", "sm90", "ptx"),
        ("sm80", "sm100", "ptx"),
        ("sm80", "sm120", "ptx"),
        ("sm80", "sm75", None),
        ("sm90", "sm90", "exact"),
        ("sm90", "sm80", None),
        ("sm90", "sm89", None),
        ("sm90", "sm100", None),
        ("gfx90a", "gfx90a", "exact"),
        ("gfx90a", "gfx942", None),
        ("gfx90a", "gfx908", None),
        ("gfx90a", "sm80", None),
        ("sm80", "gfx90a", None),
        ("sm80", "", None),
        ("sm80", "sm", None),
        ("sm80", "smx", None),
    ],
)
def test_which_pack_runs_where(pack: str, device: str, way: str | None) -> None:
    """Images run on their own arch and newer ones of its major version, text on newer majors, AMD's on one arch."""
    assert ways_to_run(pack, device) == way
