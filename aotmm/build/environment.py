"""The environment's variables that compilers and users' own files see: what a pack has must not depend on others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Prefixes of the variables that programs need to start and to find their files.
_KEPT = ("HOME", "LANG", "LC_", "LD_", "NIX_LD", "PATH", "TMPDIR")


def isolate() -> None:
    """Remove all variables from this process's environment that may change Triton's results: no cache key has them.

    Variables of other Triton versions go too, because only those that are known to be needed stay.
    """
    for name in list(os.environ):
        if not name.startswith(_KEPT):
            del os.environ[name]


@contextmanager
def isolated() -> Iterator[None]:
    """Do the same for a while, after which all is as it was."""
    before = dict(os.environ)
    isolate()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
