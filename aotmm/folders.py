"""Where the data folders are: inside the package in a wheel, beside it in a checkout or an editable install."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def in_checkout() -> bool:
    """Whether this is a checkout or an editable install, where what is built lies beside its sources."""
    return not place(Path(__file__).parent / "templates").is_dir()


def data_folder(name: str) -> Path:
    """The folder "templates" or "artifacts" of this installation; it need not exist."""
    package = Path(__file__).parent
    installed = package / name
    return installed if place(installed).is_dir() else package.parent / name


def place(path: Path) -> Traversable:
    """What is at `path`, or would be, also where that leads into a zip file, as entries of `sys.path` may.

    A zip file is opened anew each time: a handle that is kept would be shared with the children of a fork.

    Raises:
        OSError: a folder on the way may not be searched.
    """
    if not path.exists():
        for parent in path.parents:
            if parent.is_file():
                import zipfile  # only here: `import aotmm` should be quick

                if zipfile.is_zipfile(parent):
                    return zipfile.Path(parent).joinpath(*path.relative_to(parent).parts)
    return path


def build_command(arch: str, folder: Path | None) -> str:
    """What adds a pack of `arch` to those in `folder`, or to those that `aotmm.load()` finds."""
    if folder is None and not in_checkout():
        return f'aotmm build --arch {arch} --out packs, then aotmm.load("packs")'
    return f"aotmm build --arch {arch} --out {data_folder('artifacts') if folder is None else folder}"
