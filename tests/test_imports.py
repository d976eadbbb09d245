"""The rooms of the house: which module may import what, deferred and type-only imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HALL = {
    "aotmm", "aotmm.errors", "aotmm.target", "aotmm.problem", "aotmm.manifest", "aotmm.kernel", "aotmm.table",
    "aotmm.folders", "aotmm.crew",
}  # fmt: skip
RUNTIME = HALL | {"aotmm.runtime", "aotmm.native", "torch"}  # native: the fast module, where Python loads it
BUILD = HALL | {"aotmm.kernels", "aotmm.build", "aotmm.cluster"}
CLI = {
    "aotmm.assembly",
    "aotmm.doctor",
    "aotmm.progress",
    "aotmm.report",
    "aotmm.verify",
    "aotmm.tune",
    "aotmm.bench",
    "click",
    "rich",
}

# Room -> what it may import beside the standard library; a name stands for everything below it, but "aotmm" for
# itself. A file belongs to the longest room that its name starts with.
ROOMS = {
    "aotmm": HALL | {"aotmm.runtime", "torch"},
    "aotmm.errors": HALL,
    "aotmm.target": HALL,
    "aotmm.problem": HALL,
    "aotmm.manifest": HALL,
    "aotmm.kernel": HALL,
    "aotmm.table": HALL,
    "aotmm.folders": HALL,
    "aotmm.crew": HALL,
    "aotmm.cluster": HALL | {"distributed"},
    "aotmm.kernels": HALL | {"aotmm.kernels", "triton"},
    "aotmm.build": BUILD,
    "aotmm.build.cache": BUILD | {"fsspec"},
    "aotmm.build.compile": BUILD | {"triton"},
    "aotmm.build.render": BUILD | {"jinja2"},
    "aotmm.build.variants": BUILD | {"tomli"},
    "aotmm.runtime": RUNTIME,
    "aotmm.nn": RUNTIME,
    "aotmm.tune": RUNTIME | {"aotmm.tune", "aotmm.cluster"},
    "aotmm.bench.build_scaling": BUILD | {"distributed"},
    "aotmm.bench": RUNTIME
    | {"aotmm.bench", "aotmm.tune.measure", "aotmm.tune.shapes", "triton", "matplotlib", "jinja2", "tomli"},
    # The command line and what its commands are made of.
    "aotmm.assembly": RUNTIME,
    "aotmm.doctor": RUNTIME,
    "aotmm.image": HALL,
    "aotmm.build.gate": BUILD | {"aotmm.image"},
    "aotmm.verify": HALL | {"aotmm.image"},
    "aotmm.report": RUNTIME | BUILD | {"aotmm.doctor", "aotmm.verify"},
    "aotmm.cli": RUNTIME | BUILD | CLI,
    "aotmm.progress": set(),
    "aotmm.__main__": {"aotmm.errors", "aotmm.cli"},
}


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "aotmm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted name of everything that a file imports, at any depth; `import_module("name...")` counts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "import_module"}:
            if ast.unparse(node.args[0]) == "family":  # a module of the user's own
                continue
            text = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            assert isinstance(text, ast.Constant), f"line {node.lineno} imports a name that this test cannot read"
            yield str(text.value).rstrip(".")


def _room(module: str) -> str | None:
    """The longest room that `module` is in."""
    rooms = [room for room in ROOMS if module == room or (module.startswith(f"{room}.") and room != "aotmm")]
    return max(rooms, key=len, default=None)


def _within(name: str, allowed: set[str]) -> bool:
    return name in allowed or any(name.startswith(f"{room}.") for room in allowed - {"aotmm"})


@pytest.mark.parametrize("module", MODULES)
def test_imports_stay_in_their_room(module: str) -> None:
    """No file imports, at any depth, what its room is not allowed to."""
    room = _room(module)
    assert room is not None, f"{module} is in no room; add it to ROOMS"
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    outside = {name for name in _imports(tree) if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in outside if not _within(name, ROOMS[room])} == set(), f"room {room}"


def test_every_form_of_import_is_seen() -> None:
    """The walk sees plain, deferred, aliased and dynamic imports, and takes `from package import module` apart."""
    text = """
import a.b as c
from aotmm import __version__, manifest
def f():
    from torch.nn import Linear
    if x:
        import triton
    importlib.import_module(f"aotmm.kernels.{x}")
"""
    found = sorted(_imports(ast.parse(text)))
    assert found == ["a.b", "aotmm", "aotmm.kernels", "aotmm.manifest", "torch.nn", "triton"]


def test_importing_the_package_is_light() -> None:
    """`import aotmm` loads neither torch nor triton, jinja2, click or numpy."""
    program = (
        "import sys, aotmm; print(sorted({'torch', 'triton', 'jinja2', 'click', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
