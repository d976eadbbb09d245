"""Start the command line, for `aotmm` and for `python -m aotmm`."""

from __future__ import annotations

import sys

from aotmm.errors import SpecError


def main() -> None:
    """Run the command line, or tell how to install click."""
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
