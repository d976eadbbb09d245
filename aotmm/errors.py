"""Errors of every step; each class has its own exit code for the command line."""

from __future__ import annotations

GET_TORCH = "https://pytorch.org/get-started/locally"


class AotmmError(Exception):
    """Root of the library's errors. Messages say what failed with its values, what was found and what to do."""

    exit_code = 1


class SpecError(AotmmError):
    """A request that cannot be met: an unknown name, a wrong entry of a config file, or a package that is missing."""

    exit_code = 3


class CompileError(AotmmError):
    """A kernel that the compiler refused, or a launcher that the C compiler refused."""

    exit_code = 4


class PackError(AotmmError):
    """A pack that could not be written."""

    exit_code = 5


class ArtifactError(AotmmError):
    """A pack that is missing, half written, altered, or of a format that this version does not read."""

    exit_code = 6


class NoKernelError(AotmmError):
    """No kernel of the loaded packs fits a product on a device.

    Attributes:
        trace: one line per rejected kernel with the guard that the product fails, where kernels were looked at.
    """

    exit_code = 7

    def __init__(self, message: str, trace: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.trace = trace


class DriverError(AotmmError):
    """A call of the CUDA or HIP driver that failed.

    Attributes:
        call: name of the driver function.
        code: the driver's error number.
        device: ordinal of the device, -1 if the call names none.
    """

    exit_code = 8

    def __init__(self, message: str, *, call: str = "", code: int = 0, device: int = -1) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.device = device


class WrongResultError(AotmmError):
    """A benchmark with products that aotmm computed wrongly, or not at all."""

    exit_code = 9


def torch_missing(command: str) -> SpecError:
    """Return the error for `command` without torch, with how to install it."""
    from aotmm.pack.files import in_checkout  # only here: `import aotmm` should be quick

    if in_checkout():
        return SpecError(f"{command} needs torch; in a checkout: make setup, then .venv/bin/{command}")
    return SpecError(f"{command} needs torch; install a build of it for this machine's GPUs: {GET_TORCH}")


def build_extra_missing(what: str) -> SpecError:
    """Return the error for a build without `what`, a library of the build extra, with how to install all."""
    import importlib.metadata  # these only here: `import aotmm` should be quick
    import re
    import shlex

    try:
        required = importlib.metadata.requires("aotmm") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return SpecError(f"aotmm build needs {what}; in a checkout, make artifacts installs all that a build needs")
    lines = [line for line in required if re.search(r"extra == .build.$", line)]
    wanted = shlex.join(line.partition(";")[0].strip() for line in lines if "python_version" not in line)
    return SpecError(
        f"aotmm build needs {what}; in an environment without torch, whose CUDA builds pin another Triton: "
        f"pip install {wanted}"
    )
