"""Diagnosis of this machine: torch, driver, packs, and the pack that each GPU would use."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aotmm
from aotmm.errors import GET_TORCH, AotmmError, ArtifactError, DriverError
from aotmm.pack import manifest
from aotmm.pack.files import build_command
from aotmm.runtime.installed import added, entries, own, owner
from aotmm.runtime.pack import open_pack, read_verified, unreadable
from aotmm.target import TARGETS, ways_to_run

if TYPE_CHECKING:
    from pathlib import Path

    from aotmm.runtime.devices import Device
    from aotmm.runtime.pack import Pack
    from aotmm.runtime.tuning import Origin


@dataclass(frozen=True, slots=True)
class PackState:
    """One pack folder: its content, or `error`, why it cannot be used. A pack of products has no `functions`.

    `owner` is the distribution that added it, "" for those of the installation or of a given folder. `tuning` names the
    GPU, driver and date of the times that its launcher selects by; "" if it has estimates only.
    """

    folder: str
    owner: str = ""
    arch: str | None = None
    functions: tuple[str, ...] = ()
    kernels: int = 0
    bytes: int = 0
    executed_on: str | None = None
    tuning: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One GPU: the pack that it would use and how (`aotmm.target.ways_to_run`), or `error`, why it has none.

    `multiprocessors` and `shared_bytes` are the driver's numbers, which selection uses, and `tuning` is the table of
    products. `functions` of a user's own are those that run on it.
    """

    ordinal: int
    name: str
    arch: str
    pack: str | None = None
    way: str | None = None
    multiprocessors: int | None = None
    shared_bytes: int | None = None
    tuning: Origin | None = None
    functions: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole diagnosis. `exit_code` is that of the worst error of a pack or a driver, 0 without one.

    Attributes:
        torch: its version; None if it cannot be imported.
        torch_build: "CUDA 12.9", "ROCm 7.1" or "CPU".
        load_error: why `aotmm.load` fails although torch and the packs are there.
        direct_call: whether `lib.matmul` of plain tensors bypasses torch's dispatcher; None if nothing could be loaded.
        cuda_driver: the newest CUDA that NVIDIA's driver supports, as "12.9"; None without that driver.
        advice: steps to make GPUs usable.
    """

    aotmm: str
    python: str
    torch: str | None
    torch_build: str | None
    load_error: str | None
    direct_call: bool | None
    cuda_driver: str | None
    packs: tuple[PackState, ...]
    devices: tuple[DeviceState, ...]
    advice: tuple[str, ...]
    exit_code: int


def diagnose(root: Path | None) -> Diagnosis:
    """Diagnose this machine and the packs in `root`, or those that `aotmm.load()` finds.

    It never raises for broken packs or drivers.
    """
    packs = _packs(root) if root is not None else [*_added(), *_packs(own())]
    usable = [pack for pack, _ in packs if pack is not None]
    exit_code = 0 if len(usable) == len(packs) else ArtifactError.exit_code
    version, build, advice = _torch()
    load_error = direct_call = None
    if version is not None and exit_code == 0:
        load_error, exit_code, direct_call = _load(root)
    driver = _cuda_driver()
    if driver is not None and (old := _old_driver(driver, usable)):
        advice.append(old)
        exit_code = exit_code or DriverError.exit_code
    found: list[Device] = []
    if build is not None and build != "CPU":
        found, reason = _devices()
        if not found:
            advice.append(f"torch sees no GPU{reason}; {_where_gpus_are(build, driver)}")
    devices = []
    for gpu in found:
        state, code = _device(gpu, usable, root)
        devices.append(state)
        exit_code = exit_code or code
    return Diagnosis(
        aotmm.__version__,
        platform.python_version(),
        version,
        build,
        load_error,
        direct_call,
        None if driver is None else _version(driver),
        tuple(state for _, state in packs),
        tuple(devices),
        tuple(advice),
        exit_code,
    )


def _added() -> list[tuple[Pack | None, PackState]]:
    """Return the packs that other distributions add."""
    found = []
    for entry in entries():
        try:
            found += [_pack(pack.folder, pack.owner) for pack in added(entry)]
        except ArtifactError as error:
            found.append((None, PackState(entry.value, owner(entry), error=str(error))))
    return found


def _packs(root: Path) -> list[tuple[Pack | None, PackState]]:
    """Return the pack in `root`, or those in its subfolders: the state, and the pack if it can be used."""
    try:
        if (root / manifest.FILE_NAME).is_file():
            return [_pack(root)]
        inside = root.iterdir() if root.is_dir() else ()
        names = sorted(entry.name for entry in inside if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        return [(None, PackState(str(root), error=str(unreadable(f"packs in {root}", error))))]
    if not names:
        advice = build_command("...", None if root == own() else root)
        return [(None, PackState(str(root), error=f"no packs in {root}; build some: {advice}"))]
    return [_pack(root / name) for name in names]


def _pack(folder: Path, owner: str = "") -> tuple[Pack | None, PackState]:
    """Return the pack in `folder`, with every file compared with the manifest."""
    try:
        pack = open_pack(folder)
        files = manifest.files(pack.manifest)
        for file in files:
            read_verified(folder, file)
        functions = tuple(pack.head.functions)
        kernels = len(pack.own_launcher.kernels if functions else pack.launcher.kernels)
    except ArtifactError as error:
        return None, PackState(str(folder), owner, error=str(error))
    size = sum(file.bytes for file in files)
    tuning = pack.head.provenance.tuning
    ran_on = TARGETS[pack.arch].executed_on
    return pack, PackState(str(folder), owner, pack.arch, functions, kernels, size, ran_on, tuning)


def _torch() -> tuple[str | None, str | None, list[str]]:
    """Return the version and build of torch, and advice."""
    try:
        import torch
    except (ImportError, OSError) as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
        return (
            None,
            None,
            [f"torch {why}; not needed to build packs; to use them install a CUDA or ROCm build: {GET_TORCH}"],
        )
    if torch.version.hip:
        return torch.__version__, f"ROCm {torch.version.hip}", []
    if torch.version.cuda:
        return torch.__version__, f"CUDA {torch.version.cuda}", []
    why = f"torch {torch.__version__} is a CPU build, no GPU can be used"
    return torch.__version__, "CPU", [f"{why}; install a CUDA or ROCm build of it: {GET_TORCH}"]


def _load(root: Path | None) -> tuple[str | None, int, bool | None]:
    """Return why `aotmm.load` fails, its exit code, and whether there is the direct call.

    torch may be too old, or the native library not built.
    """
    try:
        library = aotmm.load(root)
    except AotmmError as error:
        return str(error), error.exit_code, None
    return None, 0, library.has_direct_call


def _cuda_driver() -> int | None:
    """Return the newest CUDA that NVIDIA's driver supports, 12090 for 12.9; None without that driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return None if driver.cuDriverGetVersion(ctypes.byref(version)) else version.value


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"  # Source: CUDA driver API, "Version Management"


def _old_driver(driver: int, packs: list[Pack]) -> str:
    """Return advice for a driver that is too old for some of `packs`; "" if it is not."""
    older = [pack for pack in packs if pack.head.min_driver > driver]
    if not older:
        return ""
    needed = _version(max(pack.head.min_driver for pack in older))
    archs = ", ".join(sorted({pack.arch for pack in older}))
    return f"the NVIDIA driver is for CUDA {_version(driver)}, {archs} need {needed} or newer; update the driver"


def _where_gpus_are(build: str, driver: int | None) -> str:
    """Return advice for a torch of that build that sees no GPU."""
    if build.startswith("ROCm"):
        return "see whether rocminfo lists one, and whether this user may open /dev/kfd"
    if driver is None:
        return "there is no NVIDIA driver; install it"
    return "there is an NVIDIA driver; see whether nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES hides none"


def _devices() -> tuple[list[Device], str]:
    """Return the GPUs that torch sees, or why it cannot list them."""
    from aotmm.runtime.devices import devices

    try:
        return devices(), ""
    except RuntimeError as error:
        return [], f": {error}"


def _device(gpu: Device, packs: list[Pack], root: Path | None) -> tuple[DeviceState, int]:
    """Return the pack that `gpu` would use, for products if there are any, and the exit code if its driver fails."""
    from aotmm.runtime.devices import best_pack, what_to_build

    found = best_pack([pack for pack in packs if not pack.head.functions] or packs, gpu.arch)
    if found is None:
        return DeviceState(gpu.ordinal, gpu.name, gpu.arch, error=what_to_build(gpu.arch, root)), 0
    pack, way = found
    try:
        launcher = pack.own_launcher if pack.head.functions else pack.launcher
        facts = launcher.device(gpu.ordinal)
        origin = None if pack.head.functions else pack.launcher.origin(facts)
    except AotmmError as error:
        return DeviceState(gpu.ordinal, gpu.name, gpu.arch, pack.arch, way, error=str(error)), error.exit_code
    numbers = int(facts.multiprocessors), int(facts.shared_bytes)
    runs = {name for each in packs if ways_to_run(each.arch, gpu.arch) for name in each.head.functions}
    where = gpu.ordinal, gpu.name, gpu.arch, pack.arch, way
    return DeviceState(*where, *numbers, origin, tuple(sorted(runs))), 0
