"""`aotmm bench` on a machine without a GPU, and over results from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from aotmm.bench import results
from aotmm.cli import main
from aotmm.errors import SpecError, WrongResultError
from tests.unit.bench.samples import sample


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, words)], prog_name="aotmm")


def test_help_names_everything() -> None:
    """The help lists every measurement and provider that there is."""
    from aotmm.bench.providers import NAMES
    from aotmm.bench.run import WHAT

    text = " ".join(_run("--help").output.split())
    for name in (*WHAT, *NAMES):
        assert name in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(tmp_path: Path) -> None:
    """It says so, what to do elsewhere, and writes nothing."""
    for words in ((), ("--overhead",), ("--ablation",)):
        found = _run("--out", tmp_path / "out", *words)
        assert found.exit_code == SpecError.exit_code
        assert "sees no GPU to measure; --render DIR" in found.output
        assert not (tmp_path / "out").exists()


def test_unknown_names(tmp_path: Path) -> None:
    """A measurement or provider that there is not is named with those that there are."""
    found = _run("cubes", "--out", tmp_path)
    assert found.exit_code == SpecError.exit_code
    assert "unknown measurement cubes; known: squares256" in found.output
    found = _run("llm", "--provider", "mkl", "--out", tmp_path)
    assert "unknown provider mkl; known: aotmm" in found.output


def test_render(tmp_path: Path) -> None:
    """Tables on stdout and files in the folder, from results.json alone; --json prints the results themselves."""
    results.write(sample(), tmp_path)
    found = _run("--render", tmp_path)
    assert found.exit_code == 0, found.output
    assert "LLM layers, M >= 128" in found.stdout
    assert "first result, torch.matmul: 90 ms, ours 30 ms: 3.0 times sooner" in found.stdout
    assert "call, lib.matmul(a, b): 4.00 us, 0.50 of torch's, at most 0.55 met" in found.stdout
    assert (tmp_path / "report.html").is_file()
    assert json.loads(_run("--render", tmp_path, "--json").stdout) == json.loads(
        (tmp_path / "results.json").read_text()
    )


def test_wrong_products_fail_the_run(tmp_path: Path) -> None:
    """Everything is written, then the exit code and the text say that aotmm computed wrongly."""
    body = sample()
    row = body.of("llm")[0]
    row.not_run["aotmm"] = "wrong: the largest error is 7 times what is allowed"
    del row.times["aotmm"]
    results.write(body, tmp_path)
    found = _run("--render", tmp_path)
    assert found.exit_code == WrongResultError.exit_code
    assert f"{row.case}: wrong: the largest error is 7 times" in found.stderr
    assert (tmp_path / "report.html").is_file()
