"""What builds may cost as the work grows; times are for `aotmm bench build_scaling` to tell."""

from __future__ import annotations

from pathlib import Path

from aotmm.bench.build_scaling import ARCHS, TILES_OF_2000, build_2000, write_set


def test_2000_variants_stay_below_1_gb(tmp_path: Path) -> None:
    """The process that builds over 2,000 kernels of the usual size never has 1 GB; a second build compiles none."""
    configs = write_set(tmp_path / "many.toml", TILES_OF_2000)
    first = build_2000(tmp_path / "out", configs)
    assert first["kernels"] == first["compiled"] >= 2000
    again = build_2000(tmp_path / "out", configs)
    assert (again["kernels"], again["compiled"]) == (first["kernels"], 0)
    assert max(first["resident MB"], again["resident MB"]) < 1000
    assert {path.name for path in (tmp_path / "out").glob("*/manifest.json")} == {"manifest.json"}
    assert len(list((tmp_path / "out").glob("*/manifest.json"))) == len(ARCHS)
