"""Functions of a user's own by the oldest Triton that builds them: images are those of its own `triton.compile`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.build.corpus import ROOT, environment_of
from tests.build.packs import OWN

OLDEST = "3.6.0"
NEEDED = ("click", "jinja2")
PROGRAM = """
import json, os, sys
from aotmm.build import compile as compiling
from aotmm.build.environment import isolate
from aotmm.build.gate import mismatches
from aotmm.build.own import descriptor_type, options, specialise, variants
from aotmm.target import target
isolate()
compiling.prepare()
os.environ["TRITON_CACHE_DIR"] = sys.argv[2]
from triton import __version__
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
row = target(sys.argv[1])
for words in sys.argv[3:]:
    first = variants([words], row)[0]
    made, plan = compiling.compile_variant(first, "0" * 64), specialise(first)
    types = plan.types | {name: descriptor_type(each) for name, each in plan.descriptors.items()}
    names = plan.function.arg_names
    source = ASTSource(
        fn=plan.function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=plan.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in plan.multiples},
    )
    chosen = options(first) | ({} if row.ptx_version is None else {"ptx_version": row.ptx_version})
    wanted = triton_compile(source, target=GPUTarget(row.backend, row.triton_arch, row.warp_size), options=chosen)
    equal = wanted.asm[row.image] == made.image
    print(json.dumps([__version__, words, equal, mismatches(first, "0" * 64, made)]))
"""


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a"])
def test_oldest(arch: str, tmp_path: Path) -> None:
    """All examples compile by Triton 3.6, pass the gate, and their images have the bytes of its `triton.compile`."""
    python = environment_of("triton-oldest", NEEDED, {"triton": OLDEST})
    words = [str(ROOT / "examples" / "own" / place) for place in OWN]
    done = subprocess.run(
        [str(python), "-c", PROGRAM, arch, str(tmp_path), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f'["{OLDEST}", "{each}", true, []]' for each in words]
