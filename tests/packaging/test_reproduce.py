"""Two builds of a small config set; `make reproduce` builds the default one."""

from __future__ import annotations

from pathlib import Path

from tests.build.packs import TINY
from tests.packaging.reproduce import build_twice, traces

ARCHS = ("sm80", "gfx90a")  # one of each vendor


def test_two_people_build_the_same(tmp_path: Path) -> None:
    """All that is built and shipped is equal, whoever builds it where, and does not say so."""
    configs = tmp_path / "tiny.toml"
    configs.write_text(TINY)
    one, other = build_twice(tmp_path, ARCHS, str(configs))
    assert sorted(one) == sorted(other)
    assert [name for name in one if one[name] != other[name]] == []
    kinds = {Path(name).suffix for name in one}
    assert kinds >= {".whl", ".so", ".c", ".h", ".json"}
    assert [(name, trace) for name, data in one.items() for trace in traces(tmp_path) if trace in data] == []
