"""What README.md and docs/experts.md say works as they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from aotmm.build.variants import config_set, variants
from aotmm.cli import main
from aotmm.target import TARGETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXPERTS = (ROOT / "docs" / "experts.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(tool: str) -> list[str]:
    """The lines of README's shell blocks that call `tool`, without comments."""
    lines = "\n".join(blocks("sh")).splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.startswith(tool)]


def test_snippets_are_the_examples() -> None:
    """README's snippets are the examples, each of which the gpu ring runs; the experts' is in docs/experts.md."""
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert examples.pop("experts.py") in blocks("python", EXPERTS)
    assert sorted(blocks("python")) == sorted(examples.values())
    assert blocks("python")[0] == examples["matmul.py"]


def test_make_targets_exist() -> None:
    """Every make target that README names is one."""
    makefile = (ROOT / "Makefile").read_text()
    for command in [*commands("make"), "make wheel"]:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


@pytest.mark.parametrize("command", commands("aotmm"))
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every aotmm command in README runs and succeeds, with the packs of this checkout."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output


def test_config_set_snippet_builds(tmp_path: Path) -> None:
    """The config set that README shows is a valid one, with both of its layouts and a generic kernel."""
    path = tmp_path / "ours.toml"
    path.write_text(blocks("toml")[0])
    found = variants(config_set(str(path)), TARGETS["sm90"])
    layouts = sorted(variant.layout for variant in found if variant.role == "product")
    assert layouts == ["any", "nn", "nt"]


def test_targets_are_those_of_the_table() -> None:
    """The table of what runs where has a row for each architecture, as `aotmm list --targets` says it, and no other."""
    rows = [line for line in README.splitlines() if re.match(r"\| `(sm|gfx)", line)]
    assert rows == [f"| `{row.name}` | {row.gpus} | {row.status} | {row.executed_on} |" for row in TARGETS.values()]


def _headings(document: Path) -> list[str]:
    """The names by which links reach the headings of a document."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found]


def test_paths_exist() -> None:
    """Every file that the documents link to or name in `code` is there, with the heading that a link names."""
    for document in [*ROOT.glob("[A-Z]*.md"), *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        for target in re.findall(r"\]\(([^):]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            path, _, heading = target.partition("#")
            linked = document.parent / path if path else document
            assert linked.exists(), f"{document.name} links to {target}"
            assert not heading or heading in _headings(linked), f"{document.name} links to {target}"
        for name in re.findall(r"`(?:aotmm|docs|tests|examples|templates)/[\w./]*`", text):
            assert list(ROOT.glob(name.strip("`").rstrip("/"))), f"{document.name} names {name}"
