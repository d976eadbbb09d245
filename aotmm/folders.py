"""Where the data folders are: inside the package in a wheel, beside it in a checkout or an editable install."""

from __future__ import annotations

from pathlib import Path


def in_checkout() -> bool:
    """Whether this is a checkout or an editable install, where what is built lies beside its sources."""
    return not (Path(__file__).parent / "templates").is_dir()


def data_folder(name: str) -> Path:
    """The folder "templates" or "artifacts" of this installation; it need not exist."""
    package = Path(__file__).parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name
