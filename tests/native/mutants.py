"""Packs that are built from a copy of the sources with one line changed, and executed like any other."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.build.packs import checkout, run_python
from tests.native.emulation import Outcome, Product, execute, submit

BUILD = """
import sys
from pathlib import Path
from aotmm.build import build
from aotmm.build.cache import Cache
if __name__ == "__main__":
    arch, folder, configs, cache = sys.argv[1:]
    build((arch,), Path(folder), configs=configs, jobs=1, cache=Cache(cache))
"""


@dataclass(frozen=True)
class Mutant:
    """A line of a source and what it is changed to; `seen_by` names products that must show it."""

    file: str
    line: str
    planted: str
    seen_by: tuple[str, ...]


def executed(
    mutant: Mutant | None, arch: str, configs: str, products: Mapping[str, Product], cache: Path
) -> dict[str, Outcome]:
    """What becomes of the products that must show `mutant`; of all, if it is None, with the sources as they are."""
    with tempfile.TemporaryDirectory(prefix="aotmm-mutant-") as folder:
        root = checkout(Path(folder) / "sources")
        if mutant is not None:
            path = root / "aotmm" / mutant.file
            text = path.read_text()
            assert text.count(mutant.line) >= 1, mutant
            path.write_text(text.replace(mutant.line, mutant.planted))
        (root / "configs.toml").write_text(configs)
        done = run_python(BUILD, arch, root / "packs", root / "configs.toml", cache, root=root)
        assert done.returncode == 0, done.stderr
        names = list(products) if mutant is None else list(mutant.seen_by)
        results = submit(execute, root / "packs" / arch, [products[name] for name in names]).result()
    return dict(zip(names, results, strict=True))
