"""What compiler processes see of the environment: nothing that decides about images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build.packs import ROOT, content, run_python, tiny_pack

# Debug builds: without optimisation, for another GPU, with other instructions, interpreted, instrumented.
HARMFUL = {
    "DISABLE_PTXAS_OPT": "1",
    "PTXAS_OPTIONS": "--maxrregcount=32",
    "DISABLE_LLVM_OPT": "1",
    "TRITON_OVERRIDE_ARCH": "sm89",
    "TRITON_DEFAULT_FP_FUSION": "0",
    "TRITON_FORCE_DISABLE_FP_FUSION": "1",
    "TRITON_F32_DEFAULT": "ieee",
    "TRITON_INTERPRET": "1",
    "TRITON_DEBUG": "1",
    "TRITON_ENABLE_ASAN": "1",
    "TRITON_INSTRUMENTATION_MODE": "fpsan",
    "AMDGCN_USE_BUFFER_OPS": "0",
    "AMDGCN_SCALARIZE_PACKED_FOPS": "1",
    "TRITON_HIP_USE_BLOCK_PINGPONG": "1",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES": "1",
}
BUILD = """
import sys
from pathlib import Path
from aotmm.build import build
build((sys.argv[1],), Path(sys.argv[2]), configs=sys.argv[3], jobs=2)
"""
# Every name that Triton looks at: its knobs, what its backends read themselves, and of all words in its library those
# that make it compile again when they are set.
NAMES = r"""
import json, os, re
from pathlib import Path
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from aotmm.build.environment import isolate
folder = Path(triton.__file__).parent
knobs = {knob.key for group in vars(triton.knobs).values() if isinstance(group, triton.knobs.base_knobs)
         for knob in group.knob_descriptors.values()}
text = "".join(path.read_text() for path in [folder / "knobs.py", *folder.glob("backends/*/compiler.py")])
read = set(re.findall(r'(?:getenv\w*|environ\.get|env_\w+)\(\s*"([A-Z][A-Z0-9_]+)"', text))
library = (folder / "_C/libtriton.so").read_bytes()
words = {word.decode() for word in re.findall(rb"\0([A-Z][A-Z0-9_]+)(?=\0)", library)}
os.environ.update(dict.fromkeys(words, "1"))
invalidating = set(get_cache_invalidating_env_vars())
for word in words - invalidating:
    os.environ.pop(word, None)
names = knobs | read | invalidating
os.environ.update(dict.fromkeys(names, "1"))
isolate()
print(json.dumps([sorted(names), sorted(names & os.environ.keys()), get_cache_invalidating_env_vars()]))
"""


def test_no_name_that_triton_knows_is_kept() -> None:
    """Of all variables that Triton looks at, whether in Python or in its library, none reaches a compiler."""
    done = run_python(NAMES)
    assert done.returncode == 0, done.stderr
    names, kept, invalidating = json.loads(done.stdout)
    assert {"PTXAS_OPTIONS", "TRITON_OVERRIDE_ARCH", "TRITON_DEBUG"} <= set(names)  # knobs
    assert {"DISABLE_LLVM_OPT", "DISABLE_MMA_V3"} <= set(names)  # of a backend, of the library
    assert (kept, invalidating) == ([], {})


@pytest.mark.parametrize("arch", ["sm80", "gfx90a"])
def test_images_are_the_same_in_every_environment(arch: str, tmp_path: Path) -> None:
    """A build under every switch of a debug build compiles the same images under the same keys."""
    configs = tiny_pack(arch).parents[1] / "tiny.toml"
    command = [sys.executable, "-c", BUILD, arch, str(tmp_path), str(configs)]
    settings = os.environ | {"PYTHONPATH": str(ROOT)} | HARMFUL
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / arch) == content(tiny_pack(arch))
    made = content(tmp_path / ".cache")
    assert made
    assert made.items() <= content(tiny_pack(arch).parent / ".cache").items()
