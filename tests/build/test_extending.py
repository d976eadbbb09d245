"""docs/extending.md, done as it is written there: tiles, an activation, a kernel family and an arch of one's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aotmm.build import build
from aotmm.build.products import kernel_sources
from aotmm.build.variants import config_set, variants
from aotmm.errors import SpecError
from aotmm.pack.verify import verify
from aotmm.runtime.pack import open_pack
from aotmm.target import target
from tests.build.packs import PLANS, ROOT, checkout, run_python
from tests.native.emulation import Product, execute, in_worker, missing

GUIDE = (ROOT / "docs" / "extending.md").read_text()
EXAMPLE = ROOT / "examples" / "own"
ACTIVATION, ROW = re.findall(r"```(?:python|text)\n(.*?)```", GUIDE, re.DOTALL)
TILES, ENTRY = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)

AOTMM = "from aotmm.cli import main; main()"
NAMES = """
import sys
from aotmm.build.variants import config_set, variants
from aotmm.target import target

print(*(variant.name for variant in variants(config_set("default"), target(sys.argv[1]))))
"""

EXECUTE = """
import sys
from pathlib import Path

sys.path.append(sys.argv[2])  # the tests, of the checkout that was copied
from tests.native.emulation import Product, execute

plain = Product(33, 40, 0, bias="matrix", activation="hardsigmoid", exact=False, extreme=True)
sums = Product(64, 64, 64, activation="hardsigmoid", exact=False)
silu = Product(33, 40, 50, activation="silu", exact=False)
for outcome in execute(Path(sys.argv[1]), [plain, sums, silu]):
    print(outcome.product.activation, *outcome.complaints)
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples on the path, for this process and the compiler processes that it starts."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{EXAMPLE.parent}")


@pytest.fixture
def interpreted(tmp_path: Path) -> Callable[[str, list[Product]], list[str]]:
    """Executes products of the pack that was built for an arch; the kernels that they got, and what is wrong."""

    def run(arch: str, products: list[Product]) -> list[str]:
        if reason := missing(arch):
            pytest.skip(reason)
        found = in_worker(execute, tmp_path / arch, products)
        assert [outcome.complaints for outcome in found] == [()] * len(products)
        return [outcome.kernel for outcome in found]

    return run


# ------------------------------------------------------------------------------------------------------------- tiles
def test_tiles(tmp_path: Path) -> None:
    """The set in the guide is one: its tile with both epilogues, and what every set gets."""
    (tmp_path / "ours.toml").write_text(TILES)
    found = variants(config_set(str(tmp_path / "ours.toml")), target("sm80"))
    tiles = [(v.dtype_a, v.layout, v.epilogue) for v in found if v.role == "product" and v.layout != "any"]
    assert tiles == [("bf16", "nt", "bias_relu"), ("bf16", "nt", "none")]


# -------------------------------------------------------------------------------------------------------- activation
def test_activation(tmp_path: Path) -> None:
    """The guide's activation, in its one place: kernels compute it for every argument, and the others as before."""
    root = checkout(tmp_path / "copy")
    path = root / "aotmm" / "problem.py"
    text, count = re.subn(r"^FORMULAS.*$", lambda _: ACTIVATION.strip(), path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    (tmp_path / "set.toml").write_text(PLANS.replace('"none", "bias_relu"', '"full"').replace(', "nt"', ""))
    words = ("build", "--arch", "sm80", "--configs", str(tmp_path / "set.toml"), "--out", str(tmp_path / "packs"))
    done = run_python(AOTMM, *words, root=root)
    assert done.returncode == 0, done.stderr
    header = (tmp_path / "packs" / "sm80" / "launcher.h").read_text()
    assert "AOTMM_ACTIVATION_HARDSIGMOID" in header
    asked = ("explain", "--arch", "sm80", "64", "64", "64", "--activation", "hardsigmoid")
    done = run_python(AOTMM, *asked, "--pack", tmp_path / "packs", root=root)
    assert "_full" in done.stdout.partition("chosen")[2].splitlines()[0], done.stderr
    if reason := missing("sm80"):
        pytest.skip(reason)
    done = run_python(EXECUTE, tmp_path / "packs" / "sm80", ROOT, root=root)
    assert done.stdout.splitlines() == ["hardsigmoid", "hardsigmoid", "silu"], done.stderr


# ------------------------------------------------------------------------------------------------------------ family
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("arch", ["sm80", "gfx90a"])
def test_family(arch: str, tmp_path: Path, interpreted: Callable[[str, list[Product]], list[str]]) -> None:
    """The example's kernels are built, are intact, are chosen for what they guard alone, and are right."""
    build((arch,), tmp_path, configs=str(EXAMPLE / "rowvector.toml"), dtypes=("fp16",))
    assert [row.violations for row in verify(tmp_path, None)] == [()]
    kernels = [k for k in open_pack(tmp_path / arch).manifest.kernels if k.family == "own.rowvector"]
    assert [k.epilogue for k in kernels] == ["full", "none"]
    row = Product(1, 40, 520, layout="nt")
    mine = [row, replace(row, scales="rows"), replace(row, activation="gelu", exact=False)]
    others = [replace(row, M=2), replace(row, batch=2), replace(row, layout="nn")]
    found = interpreted(arch, [*mine, *others])
    assert [name.partition("_")[0] for name in found[:3]] == ["own.rowvector"] * 3
    assert {name.partition("_")[0] for name in found[3:]} == {"tile"}


def test_family_of_the_guide() -> None:
    """The entry in the guide is the example's."""
    assert (EXAMPLE / "rowvector.toml").read_text().endswith(ENTRY)


def test_key_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's key changes with its module and with what that imports from beside it, not with other modules."""
    folder = tmp_path / "mine"
    folder.mkdir()
    texts = {
        "one": "from aotmm.kernels import Family\nfrom mine import shared\nFAMILY = Family()",
        "shared": "from mine.deep import X",
        "deep": "X = 1",
        "other": "",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before, changed = kernel_sources("mine.one"), []
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(f"{text}\n")
        if kernel_sources("mine.one") != before:
            changed.append(name)
        (folder / f"{name}.py").write_text(text)
    assert kernel_sources("mine.one") == before
    assert changed == ["one", "shared", "deep"]


@pytest.mark.parametrize(
    ("family", "text", "words"),
    [
        (
            "absent.family",
            None,
            "family absent.family cannot be imported: No module named 'absent'",
        ),
        ("mute.family", "", "module mute.family has no FAMILY = aotmm.kernels.Family"),
        (
            "able.family",
            "from aotmm.kernels import Family\nFAMILY = Family(epilogues=('none',))",
            "family able.family has fewer epilogues",
        ),
    ],
)
def test_wrong_families(
    family: str, text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that is not there, does not say what it can do, or cannot do what an entry asks for is told."""
    package, _, module = family.partition(".")
    if text is not None:
        (tmp_path / package).mkdir()
        (tmp_path / package / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "set.toml"
    path.write_text(TILES.replace("[[config]]", f'[[config]]\nfamily = "{family}"'))
    with pytest.raises(SpecError, match=words):
        config_set(str(path))


# -------------------------------------------------------------------------------------------------------------- arch
def test_arch(tmp_path: Path) -> None:
    """The guide's row, in its one place: the arch is listed, and its pack is built, is intact, and is its own."""
    root = checkout(tmp_path / "copy")
    path = root / "aotmm" / "target.py"
    head, end, tail = path.read_text().partition("\n)  # fmt: skip\n")
    path.write_text(f"{head}\n{ROW.rstrip()}{end}{tail}")
    (name,) = re.findall(r'name="(\w+)"', ROW)
    (tmp_path / "set.toml").write_text(PLANS)
    build_, packs = ("build", "--arch", name, "--out", str(tmp_path / "packs")), tmp_path / "packs"
    done = run_python(AOTMM, *build_, "--configs", tmp_path / "set.toml", root=root)
    assert done.returncode == 0, done.stderr
    done = run_python(AOTMM, "verify", packs, "--json", root=root)
    assert [(row["arch"], row["violations"]) for row in json.loads(done.stdout)] == [(name, [])]
    done = run_python(AOTMM, "list", "--targets", "--arch", name, "--json", root=root)
    (row,) = json.loads(done.stdout)
    assert (row["name"], row["status"]) == (name, "compiled only")
    assert json.loads((packs / name / "manifest.json").read_bytes())["provenance"]["status"] == row["status"]
    done = run_python(NAMES, name, root=root)
    assert done.stdout.split() == [v.name for v in variants(config_set("default"), target("sm80"))]
