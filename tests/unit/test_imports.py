"""The rooms of the house: which module may import what, deferred and type-only imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HALL = {"aotmm", "aotmm.errors", "aotmm.target", "aotmm.problem", "aotmm.pack", "aotmm.workers.pool"}
RUNTIME = HALL | {"aotmm.runtime", "aotmm.native", "torch"}  # native: the direct call's module, where Python loads it
BUILD = HALL | {"aotmm.kernels", "aotmm.build", "aotmm.workers.dask"}

# Room -> what it may import beside the standard library; a name stands for everything below it, but "aotmm" for
# itself. A file belongs to the longest room that its name starts with.
ROOMS = {
    "aotmm": HALL | {"aotmm.runtime", "torch"},
    "aotmm.errors": HALL,
    "aotmm.target": HALL,
    "aotmm.problem": HALL,
    "aotmm.pack": HALL - {"aotmm.workers.pool"},
    "aotmm.workers": HALL | {"aotmm.workers"},
    "aotmm.workers.dask": HALL | {"distributed"},
    "aotmm.kernels": HALL | {"aotmm.kernels", "triton"},
    "aotmm.build": BUILD,
    "aotmm.build.cache": BUILD | {"fsspec"},
    "aotmm.build.compile": BUILD | {"triton"},
    "aotmm.build.own": BUILD | {"tomli", "triton"},
    "aotmm.build.parameters": BUILD | {"triton"},
    "aotmm.build.products": BUILD | {"triton"},
    "aotmm.build.own.file": BUILD | {"triton", "torch"},  # torch: a device, for a file that asks the driver for it
    "aotmm.build.render": BUILD | {"jinja2"},
    "aotmm.build.variants": BUILD | {"tomli"},
    "aotmm.runtime": RUNTIME,
    "aotmm.nn": RUNTIME,
    "aotmm.deep_gemm": HALL | {"torch"},
    "aotmm.timing": HALL | {"aotmm.timing", "torch"},
    "aotmm.timing.correctness": HALL,  # for tests without torch too
    "aotmm.tune": RUNTIME | {"aotmm.timing", "aotmm.tune", "aotmm.workers.dask"},
    "aotmm.tune.choose": {"numpy"},
    "aotmm.tune.default_set": HALL
    | {"aotmm.kernels", "aotmm.build.products", "aotmm.build.variants", "aotmm.timing", "aotmm.tune", "numpy"},
    "aotmm.tune.fit": {"aotmm.pack", "aotmm.tune.models", "numpy", "torch"},
    "aotmm.tune.models": HALL | {"aotmm.tune.cases", "numpy"},
    "aotmm.bench.build_scaling": BUILD | {"distributed"},
    "aotmm.bench": RUNTIME
    | {"aotmm.timing", "aotmm.bench", "triton", "matplotlib", "jinja2", "tomli", "transformers", "timm"},
    "aotmm.bench.ampere": RUNTIME | {"aotmm.timing", "aotmm.bench", "aotmm.tune"},
    "aotmm.bench.blocks": RUNTIME | {"aotmm.timing", "aotmm.bench", "deep_gemm"},
    "aotmm.bench.grouped": RUNTIME | {"aotmm.timing", "aotmm.bench", "aotmm.tune"},
    "aotmm.bench.regret": RUNTIME | {"aotmm.timing", "aotmm.bench", "aotmm.tune"},
    "aotmm.cli": RUNTIME | BUILD | {"aotmm.cli", "aotmm.timing", "aotmm.tune", "aotmm.bench", "click", "rich"},
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
            if ast.unparse(node.args[0]) in {"module_name(family)", "own_module"}:  # of kernels, or a user's own
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


def test_no_module_imports_itself_by_way_of_others() -> None:
    """The graph of imports has no circle, deferred and type-only ones included.

    Only the package itself is left out: modules take its version and folder, and it starts what users call.
    """
    modules = MODULES.keys() - {"aotmm"}
    graph = {name: _dependencies(name) & modules - {name} for name in modules}
    found = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert set(found) == modules


def _dependencies(name: str) -> set[str]:
    """The modules that a module imports, or imports something from."""
    found = _imports(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    return {each if each in MODULES else each.rpartition(".")[0] for each in found}


def test_every_form_of_import_is_seen() -> None:
    """The walk sees plain, deferred, aliased and dynamic imports, and takes `from package import module` apart."""
    text = """
import a.b as c
from aotmm import __version__
from aotmm.pack import manifest
def f():
    from torch.nn import Linear
    if x:
        import triton
    importlib.import_module(f"aotmm.kernels.{x}")
"""
    found = sorted(_imports(ast.parse(text)))
    assert found == ["a.b", "aotmm", "aotmm.kernels", "aotmm.pack.manifest", "torch.nn", "triton"]


def test_importing_the_package_is_light() -> None:
    """`import aotmm` loads neither torch nor triton, jinja2, click or numpy."""
    program = (
        "import sys, aotmm; print(sorted({'torch', 'triton', 'jinja2', 'click', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
