"""The runtime needs no Triton, no template engine, no compiler and nowhere to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.installation import WATCHED_USE

# Blocks the build half's libraries and the command line's, then counts what is written and started.
PROBE = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "jinja2", "click", "rich", "ziglang"):
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
{WATCHED_USE}
assert not torch.cuda.is_initialized()
print(events)
"""


def test_runtime_needs_nothing_else(tmp_path: Path) -> None:
    """Packs load and are used with the build half blocked, no HOME, nothing written and no process started."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    checkout = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert not list(tmp_path.iterdir())
