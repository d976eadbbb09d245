"""The computed part of the default set is what its committed input gives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from aotmm.build.variants import config_set
from aotmm.errors import SpecError
from aotmm.tune import default_set
from aotmm.tune.choose import MOST_IMAGES
from aotmm.tune.default_set import Chosen

BEGIN = "# ---- Begin of what `aotmm tune --arch sm90 --choose` writes"
END = "# ---- End of what `aotmm tune --arch sm90 --choose` writes"


@pytest.fixture(scope="module")
def chosen() -> Chosen:
    """The tiles of sm90 that are chosen now."""
    return default_set.choose("sm90")


def test_the_committed_set_is_the_chosen_one(chosen: Chosen, tmp_path: Path) -> None:
    """Choosing anew from the committed candidates and times changes nothing in the default set."""
    path = tmp_path / "default.toml"
    path.write_text(default_set.FILE.read_text())
    default_set.write(chosen, path)
    assert path.read_text() == default_set.FILE.read_text()


def test_losses_are_within_their_bounds(chosen: Chosen) -> None:
    """The sweeps lose no more than stated, no large class of random problems 2 %, and the set is not too large."""
    means = {row.name: row.mean for row in chosen.losses}
    (sweeps,) = (row for row in chosen.losses if row.name == "sweeps")
    assert sweeps.mean <= default_set.SWEEPS.mean
    assert sweeps.quantile <= default_set.SWEEPS.quantile
    random = [row for row in chosen.losses if row is not sweeps]
    total = sum(row.problems * math.log(row.mean) for row in random) / sum(row.problems for row in random)
    assert math.exp(total) <= 1.0065  # the number of images binds before `RANDOM` does
    assert {"layers", "multiples", "squares", "gradients", "fp8", "fp8_fast", "measured"} <= means.keys()
    assert max(row.mean for row in random if row.problems > 100) < 1.02
    assert sum(row.problems for row in chosen.losses) > 4000
    assert chosen.images <= MOST_IMAGES + 4  # tiles with bias_relu come on top


def test_entries_are_those_of_candidates(chosen: Chosen, tmp_path: Path) -> None:
    """Every chosen entry reads as one of the candidates, for all of its layouts or some."""
    path = tmp_path / "chosen.toml"
    path.write_text(f'source = "chosen"\n{chosen.text}')
    fields = ("family", "numbers", "dtypes", "outputs", "epilogues", "fast_accum", "split", "archs", "source")
    rows = [
        ([getattr(entry, name) for name in fields], set(entry.layouts))
        for entry in config_set(str(default_set.TILES / "sm90.toml")).entries
    ]
    for entry in config_set(str(path)).entries:
        own = [getattr(entry, name) for name in fields]
        assert any(own == row and set(entry.layouts) <= layouts for row, layouts in rows), entry


def test_what_stands_around_the_entries_stays(tmp_path: Path) -> None:
    """Only the lines between the marks are replaced."""
    path = tmp_path / "set.toml"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    default_set.write(Chosen("sm90", "new\n", 1, 1, []), path)
    assert path.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_a_set_without_marks_is_not_touched(tmp_path: Path) -> None:
    """Without both marks there is no place for the entries, and the file stays as it is."""
    path = tmp_path / "set.toml"
    path.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(SpecError, match="set them around the entries to replace"):
        default_set.write(Chosen("sm90", "new\n", 1, 1, []), path)
    assert path.read_text() == f"{END}\n{BEGIN}\n"


def test_an_arch_without_candidates() -> None:
    """The error names the archs that have candidates."""
    with pytest.raises(SpecError, match=r"no candidates for sm80 in .*tiles, only for sm90"):
        default_set.choose("sm80")
