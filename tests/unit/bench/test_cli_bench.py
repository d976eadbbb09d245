"""`aotmm bench` on a machine without a GPU, and over results from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from aotmm.bench import results
from aotmm.cli import main
from aotmm.errors import SpecError, WrongResultError
from tests.unit.bench.samples import drawn_sample, sample


def _run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, words)], prog_name="aotmm")


def test_help_names_everything() -> None:
    """The help lists every measurement and provider that there is."""
    from aotmm.bench.providers import NAMES
    from aotmm.bench.run import WHAT

    text = " ".join(_run("--help").output.split())
    for name in (*WHAT, *NAMES, "random", "invariant", "grouped", "blocks", "ampere", "build_scaling"):
        assert name in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(tmp_path: Path) -> None:
    """It says so, what to do elsewhere, and writes nothing."""
    for words in (
        (),
        ("random",),
        ("random", "--regret"),
        ("invariant",),
        ("grouped",),
        ("blocks",),
        ("ampere",),
        ("--overhead",),
        ("--ablation",),
    ):
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
    found = _run("random", "llm", "--out", tmp_path)
    assert found.exit_code == SpecError.exit_code
    assert "random, invariant, grouped, blocks, ampere and build_scaling are no part of another run" in found.output


def test_render(tmp_path: Path) -> None:
    """Tables on stdout and files in the folder, from results.json alone; --json prints the results themselves."""
    results.write(sample(), tmp_path)
    found = _run("--render", tmp_path)
    assert found.exit_code == 0, found.output
    assert "LLM layers, M >= 128" in found.stdout
    assert "first result, torch.matmul: 90 ms, ours 30 ms: 3.0 times sooner" in found.stdout
    assert "call, lib.matmul(a, b): 0.50 of torch's time, at most 0.55 met" in found.stdout
    assert (tmp_path / "report.html").is_file()
    assert json.loads(_run("--render", tmp_path, "--json").stdout) == json.loads(
        (tmp_path / "results.json").read_text()
    )


def test_render_random_problems(tmp_path: Path) -> None:
    """Several seeds make one report, in a folder of its own; --json prints the figures and all that was measured."""
    for seed in (1, 2):
        results.write(drawn_sample(seed), tmp_path / str(seed))
    words: list[str | Path] = ["--render", tmp_path / "1", "--render", tmp_path / "2", "--out", tmp_path / "both"]
    found = _run(*words)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("Random problems against torch, seeds 1, 2\n")
    assert len(re.findall(r"^layers, M 1\.\.16 +(2 seeds|1|2) ", found.stdout, re.MULTILINE)) == 3
    names = ["results.csv", "report.md", "figures.png", "report.html"]
    assert [line.split("/")[-1] for line in found.stderr.splitlines()] == names
    assert all((tmp_path / "both" / name).is_file() for name in names)
    body = json.loads(_run(*words, "--json").stdout)
    assert body["runs"] == [json.loads((tmp_path / seed / "results.json").read_text()) for seed in "12"]
    assert {line["seed"] for line in body["lines"]} == {"2 seeds", "1", "2"}
    assert _run("--render", tmp_path / "1").exit_code == 0
    assert (tmp_path / "1" / "report.md").is_file()


def test_a_random_run_is_new_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed is printed first, names the folder, and comes from the operating system without --seed."""
    given: list[tuple[int, Path, dict[str, Any]]] = []

    def run(seed: int, folder: Path, _progress: object, **options: Any) -> results.Results:
        given.append((seed, folder, options))
        return drawn_sample(seed)

    monkeypatch.setattr("aotmm.bench.drawn.run_drawn", run)
    monkeypatch.setattr("aotmm.bench.regret.run_regret", run)
    monkeypatch.chdir(tmp_path)
    for words in (("random",), ("random",), ("random", "--seed", "7", "--count", "9", "--classes", "odd,fp8")):
        found = _run(*words)
        assert found.exit_code == 0, found.output
        seed, folder, _ = given[-1]
        assert found.stderr.startswith(f"seed {seed}\n")
        assert folder == Path(f"bench-results/random-{seed}")
    assert len({seed for seed, *_ in given}) == 3
    assert given[-1][0] == 7
    assert given[-1][2] == {"count": 9, "classes": ["odd", "fp8"], "providers": ()}
    _run("random", "--regret", "--seed", "7", "--table", __file__)
    assert given[-1][1:] == (Path("bench-results/regret-7"), {"count": None, "classes": [], "table": Path(__file__)})


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
