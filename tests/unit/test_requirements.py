"""requirements-build.txt pins, with hashes, what pyproject.toml asks for to build and to test packs."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib
from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PINS = (ROOT / "requirements-build.txt").read_text()


def test_every_pin_has_hashes() -> None:
    """Each entry is one version with sha256 digests, and nothing says where it comes from."""
    entries = re.split(r"\n(?=\S)", PINS.strip())
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; [^\n]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n|$))+", entry), entry
    assert "://" not in PINS


def test_pins_are_what_is_asked_for() -> None:
    """Everything that a build environment needs is pinned, each pin as pyproject.toml allows: else `make lock`."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = facts["project"]["optional-dependencies"]
    tested = resolve_dependency_groups(facts["dependency-groups"], "test")
    assert set(facts["build-system"]["requires"]) <= set(tested)
    asked = facts["project"]["dependencies"] + list(tested)
    asked += [text for extra in ("build", "cluster", "cache") for text in extras[extra]]
    pinned: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", PINS, re.MULTILINE):
        pinned.setdefault(name, []).append(version)
    for text in asked:
        wanted = Requirement(text)
        if wanted.name != "torch" and (wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"})):
            assert pinned.get(wanted.name.lower()), text
            assert all(version in wanted.specifier for version in pinned[wanted.name.lower()]), text
