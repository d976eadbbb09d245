"""A small run of the fuzzer; `make fuzz` is the long one."""

from __future__ import annotations

import json
from pathlib import Path

from tests.attacks.fuzz import Fuzzer

MUTANTS = 2000


def test_mutants(tmp_path: Path) -> None:
    """No altered pack loads or verifies, and nothing but an ArtifactError comes of any mutant."""
    tallies = Fuzzer(tmp_path, seed=1).run(MUTANTS)
    assert {name: tally.foreign for name, tally in tallies.items() if tally.foreign} == {}
    taken = {name: tally.taken for name, tally in tallies.items() if tally.taken}
    assert all(name.endswith("digests right") for name in taken), json.dumps(taken)
    assert sum(tally.refused for tally in tallies.values()) > MUTANTS / 2
