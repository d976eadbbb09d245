"""What users are told where something is not as it should be: what was looked for, what was found, what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import aotmm
from aotmm.errors import ArtifactError, DriverError, NoKernelError
from aotmm.pack.files import data_folder
from aotmm.pack.manifest import FILE_NAME, FORMAT
from aotmm.runtime import devices, library
from aotmm.runtime import diagnosis as doctor
from aotmm.runtime.devices import Device
from aotmm.runtime.diagnosis import diagnose
from aotmm.runtime.library import Library
from aotmm.target import TARGETS
from tests.runtime.installation import DROP_CAPABILITIES, ROOT, run

PACKS = data_folder("artifacts")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Copies of the packs of this checkout."""
    ignored = shutil.ignore_patterns(".cache", ".lock")
    return Path(shutil.copytree(PACKS, tmp_path / "packs", ignore=ignored))


def pretend(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Device, ...] = (), *, driver: int | None = None, hip: str = ""
) -> None:
    """Has torch be a build for GPUs that sees these, with an NVIDIA driver of that version or none."""
    monkeypatch.setattr(torch.version, "hip", hip or None)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "12.9")
    monkeypatch.setattr(devices, "devices", lambda: list(gpus))
    monkeypatch.setattr(library, "device", lambda ordinal: gpus[ordinal])
    monkeypatch.setattr(doctor, "_cuda_driver", lambda: driver)


def errors(root: Path) -> dict[str, str | None]:
    """What doctor says against each pack in `root`."""
    return {Path(pack.folder).name: pack.error for pack in diagnose(root).packs}


# ------------------------------------------------------------------------------------------------ torch and drivers
def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CUDA without a driver: doctor says that there is none, and to install it."""
    pretend(monkeypatch)
    assert diagnose(None).advice == ("torch sees no GPU; there is no NVIDIA driver; install it",)


def test_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver that is new enough doctor says where to look for the GPU."""
    pretend(monkeypatch, driver=12_090)
    (advice,) = diagnose(None).advice
    assert advice.startswith("torch sees no GPU; there is an NVIDIA driver; see whether nvidia-smi lists a GPU and")


def test_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is too old: what it is for, what the packs need, and the exit code of driver errors."""
    pretend(monkeypatch, driver=11_080)
    found = diagnose(None)
    wanted = "the NVIDIA driver is for CUDA 11.8, sm80, sm90 need 12.0 or newer; update the driver"
    assert found.advice[0] == wanted
    assert (found.cuda_driver, found.exit_code) == ("11.8", DriverError.exit_code)


def test_torch_without_gpus(lib: Library) -> None:
    """A torch for CPUs: doctor says so and where to get another; matmul and preload say what they found."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    (advice,) = diagnose(None).advice
    assert advice.startswith(f"torch {torch.__version__} is a CPU build, no GPU can be used; install a CUDA or ROCm")
    with pytest.raises(TypeError, match=r"a is \(4, 4\) float16 on cpu"):
        lib.matmul(torch.zeros(4, 4).half(), torch.zeros(4, 4).half())
    with pytest.raises(NoKernelError, match=r"sees no GPU to load kernels for; `aotmm doctor` says why"):
        lib.preload()


def test_rocm_torch_with_packs_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch for ROCm where only packs for CUDA are: the GPU, the packs, and the command that builds another."""
    copies = tmp_path / "packs"
    for arch in ("sm80", "sm90"):
        shutil.copytree(PACKS / arch, copies / arch)
    pretend(monkeypatch, (Device(0, "AMD Instinct MI210", "gfx90a"), Device(1, "MI100", "gfx908")), hip="7.1")
    lib = aotmm.load(copies)
    assert errors(copies) == {"sm80": None, "sm90": None}
    build = f"no pack runs on gfx90a; build one: aotmm build --arch gfx90a --out {copies}"
    none = f"no kernel can be built for gfx908; aotmm builds for: {', '.join(TARGETS)}"
    assert [gpu.error for gpu in diagnose(copies).devices] == [build, none]
    found = rf"found: sm80 \({copies}/sm80\), sm90 \({copies}/sm90\)"
    with pytest.raises(NoKernelError, match=rf"no kernels for cuda:0, AMD Instinct MI210 \(gfx90a\); {found}; {build}"):
        lib.launcher(0)
    with pytest.raises(NoKernelError, match=rf"no kernels for cuda:1, MI100 \(gfx908\); {found}; {none}"):
        lib.launcher(1)


def test_rocm_torch_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm that sees no GPU is not told of NVIDIA's driver."""
    pretend(monkeypatch, hip="7.1")
    assert diagnose(None).advice == (
        "torch sees no GPU; see whether rocminfo lists one, and whether this user may open /dev/kfd",
    )


def test_gpu_that_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that no pack serves are told one by one; those that can be used are not in the way."""
    gpus = (Device(0, "Tesla T4", "sm75"), Device(1, "A100", "sm80"))
    pretend(monkeypatch, gpus, driver=12_090)
    first, second = diagnose(None).devices
    assert first.error == f"no kernel can be built for sm75; aotmm builds for: {', '.join(TARGETS)}"
    assert (second.pack, second.way) == ("sm80", "exact")
    lib = aotmm.load()
    with pytest.raises(NoKernelError, match=r"no kernels for cuda:0, Tesla T4 \(sm75\); found: .*; no kernel can"):
        lib.launcher(0)


def test_driver_that_fails_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch sees and the launcher cannot use: doctor has the launcher's words and the exit code."""
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    pretend(monkeypatch, (Device(0, "H200", "sm90"),))
    found = diagnose(None)
    (gpu,) = found.devices
    assert (gpu.pack, found.exit_code) == ("sm90", DriverError.exit_code)
    assert gpu.error is not None
    assert gpu.error.startswith("the CUDA driver cannot be opened: ")
    assert gpu.error.endswith("; install the NVIDIA driver")


# ----------------------------------------------------------------------------------------------------------- packs
def test_pack_of_a_newer_format(copies: Path) -> None:
    """A pack that a newer aotmm wrote: both formats, and what to do, before anything else of it is read."""
    path = copies / "sm80" / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b'"format": %d' % FORMAT, b'"format": %d' % (FORMAT + 1)))
    wanted = (
        f"{path}: pack format {FORMAT + 1}, this version of aotmm reads {FORMAT}; install the aotmm that wrote the pack"
    )
    with pytest.raises(ArtifactError) as caught:
        aotmm.load(copies)
    assert str(caught.value).startswith(wanted)
    error = errors(copies)["sm80"]
    assert error is not None
    assert error.startswith(wanted)


def test_half_written_pack(copies: Path) -> None:
    """A pack whose writing was interrupted has no manifest yet, and a file that is cut short is not used."""
    (copies / "sm90" / FILE_NAME).unlink()
    path = copies / "sm80" / "libaotmm_sm80.so"
    path.write_bytes(path.read_bytes()[:-1])
    found = errors(copies)
    wanted = (
        f"{copies / 'sm90'} is not a pack: it has no manifest.json; build one: aotmm build --arch sm90 --out {copies}"
    )
    assert found["sm90"] == wanted
    assert "libaotmm_sm80.so was altered" in str(found["sm80"])
    with pytest.raises(ArtifactError) as caught:
        aotmm.load(copies)
    assert str(caught.value) == wanted


@pytest.mark.parametrize("closed", ["", "sm80", "sm80/manifest.json", "sm80/libaotmm_sm80.so"])
def test_permission_denied(copies: Path, tmp_path: Path, closed: str) -> None:
    """What this user may not read is told by its name, by load and by doctor, and that it is to be made readable."""
    where = copies / closed
    where.chmod(0)
    program = """
import sys
from pathlib import Path
import aotmm
from aotmm.runtime.diagnosis import diagnose
root = Path(sys.argv[1])
found = diagnose(root)
print(found.exit_code, *(pack.error for pack in found.packs if pack.error and "Errno 13" in pack.error), sep="|")
try:
    print(aotmm.load(root).packs[1].launcher)
except aotmm.ArtifactError as error:
    print(error)
"""
    try:
        doctor_says, load_says = run(ROOT, tmp_path, DROP_CAPABILITIES + program, str(copies)).splitlines()
    finally:
        where.chmod(0o755)
    exit_code, _, error = doctor_says.partition("|")
    assert int(exit_code) == ArtifactError.exit_code
    for text in (error, load_says):
        assert "cannot be read: [Errno 13] Permission denied: " in text
        assert str(where) in text
        assert text.endswith("; let this user read it")
