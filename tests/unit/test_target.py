"""The table of architectures, and which packs run where."""

from __future__ import annotations

import pytest

from aotmm.errors import SpecError
from aotmm.problem import INPUTS
from aotmm.target import ALL, GPUS, HIDDEN_FACTS, STATUSES, TARGETS, ranked, target, targets, ways_to_run


@pytest.mark.parametrize("name", TARGETS)
def test_rows(name: str) -> None:
    """Each row fits together: spelling, backend, image, types, and text only where CUDA has it."""
    row = target(name)
    assert row.name == name
    assert (row.backend, row.image) in {("cuda", "cubin"), ("hip", "hsaco")}
    assert row.warp_size == (64 if name.startswith("gfx9") else 32)
    assert name == (f"sm{row.triton_arch}" if row.backend == "cuda" else row.triton_arch)
    assert row.capability == (divmod(int(name[2:]), 10) if row.backend == "cuda" else None)
    assert set(row.dtypes) <= set(INPUTS)
    assert row.fast_accum == (name == "sm90")
    assert row.backend == "cuda" or (row.ptx_version, row.min_driver) == (None, 0)
    assert row.gpus
    assert row.status in STATUSES
    assert (row.executed_on == "nothing") == (row.status == "compiled only")
    assert not row.like or TARGETS[row.like].backend == row.backend
    assert row.threads % row.warp_size == row.registers % (row.simds * row.granule) == 0


def test_figures_of_the_data_sheets() -> None:
    """Shared memory per block and multiprocessors are those of the CUDA guide and of AMD's documents."""
    figures = {
        "sm80": (163 * 1024, 108),
        "sm86": (99 * 1024, 84),
        "sm89": (99 * 1024, 142),
        "sm90": (227 * 1024, 132),
        "sm100": (227 * 1024, 148),
        "sm120": (99 * 1024, 170),
        "gfx90a": (64 * 1024, 104),
        "gfx942": (64 * 1024, 304),
        "gfx950": (160 * 1024, 256),
        "gfx1100": (64 * 1024, 96),
    }
    assert {name: (TARGETS[name].shared_bytes, TARGETS[name].multiprocessors) for name in figures} == figures


@pytest.mark.parametrize("name", GPUS)
def test_listed_gpus(name: str) -> None:
    """Each is of an arch with kernels, and its tensor cores do 256, 512 or 1024 multiply-adds per cycle, as told."""
    gpu = GPUS[name]
    assert gpu.arch in TARGETS
    per_cycle = gpu.tflops * 1e6 / 2 / gpu.multiprocessors / gpu.clock_mhz
    assert min(abs(per_cycle / rate - 1) for rate in (256, 512, 1024)) < 0.03
    assert HIDDEN_FACTS[name].tensor_tflops == gpu.tflops / gpu.multiprocessors


@pytest.mark.parametrize("name", ["", "sm_80", "SM80", "sm75", "gfx908", "80"])
def test_unknown_arch(name: str) -> None:
    """An unknown arch is told with those that there are."""
    with pytest.raises(SpecError) as caught:
        target(name)
    assert str(caught.value) == f"unknown arch {name!r}; known: {', '.join(TARGETS)}"


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
        ("sm86", "sm89", "compatible"),
        ("sm86", "sm80", None),
        ("sm86", "sm90", None),
        ("sm100", "sm103", None),
        ("sm120", "sm121", None),
        ("sm80", "sm121", "ptx"),
        ("gfx942", "gfx942", "exact"),
        ("gfx942", "gfx950", None),
        ("gfx1100", "gfx1101", None),
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
    """Images up to 8.9 run on newer ones of their major version, others on one arch; text runs on what is newer."""
    assert ways_to_run(pack, device) == way


@pytest.mark.parametrize(
    ("device", "packs"),
    [
        ("sm89", [("sm89", "exact"), ("sm86", "compatible"), ("sm80", "compatible")]),
        ("sm87", [("sm86", "compatible"), ("sm80", "compatible")]),
        ("sm90", [("sm90", "exact"), ("sm80", "ptx")]),
        ("sm103", [("sm80", "ptx")]),
        ("gfx942", [("gfx942", "exact")]),
        ("gfx1101", []),
    ],
)
def test_which_pack_is_best(device: str, packs: list[tuple[str, str]]) -> None:
    """The exact arch comes before the newest of the same major version, that before text."""
    assert ranked(reversed(TARGETS), device) == packs


def test_all_stands_for_every_arch() -> None:
    """Archs are in the order in which they are named, each once; "all" is every one that is not named before."""
    assert [row.name for row in targets([ALL])] == list(TARGETS)
    assert [row.name for row in targets(["sm90", "sm80", "sm90"])] == ["sm90", "sm80"]
    assert [row.name for row in targets(["gfx950", ALL])][:2] == ["gfx950", "sm80"]
    with pytest.raises(SpecError, match="unknown arch 'every'; known: sm80, sm86"):
        targets(["every"])
