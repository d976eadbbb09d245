"""Starts the command line: what the program `aotmm` and `python -m aotmm` run."""

from __future__ import annotations

import sys

from aotmm.errors import SpecError


def main() -> None:
    """Runs the command line, or says what to install for it."""
    try:
        from aotmm import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.stderr.write('error: the command line needs click: pip install "click>=8.1"\n')
        sys.exit(SpecError.exit_code)
    cli.main(prog_name="aotmm")


if __name__ == "__main__":
    main()
