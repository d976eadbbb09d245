"""What a GPU makes of the sm80 kernels is, bit for bit, what the interpreter makes of their cubins.

The PTX that is shipped for sm80, from which its cubins were assembled, is assembled for this GPU instead. Each image
does the launch of tests/agreement.py, which tests/kernels/test_agreement.py has the interpreter do with the cubin.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aotmm.pack.files import data_folder
from aotmm.pack.schema import Kernel
from aotmm.runtime.pack import Pack, open_pack
from tests.agreement import Launch, launch_of
from tests.gpu.driver import load
from tests.samples import code_in

CUDA = Path("/usr/local/cuda/bin/ptxas")


def assembler() -> str:
    """An assembler of PTX: on PATH, in its usual place, or in Triton's wheel."""
    found = shutil.which("ptxas") or (str(CUDA) if CUDA.exists() else None)
    if found is None:
        triton = pytest.importorskip("triton", reason="this needs ptxas, of the CUDA toolkit or of Triton")
        found = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")
    return found


@pytest.fixture(scope="module")
def pack() -> Pack:
    """The pack for sm80, where a GPU is newer."""
    if torch.version.hip or torch.cuda.get_device_capability() <= (8, 0):
        pytest.skip("this needs a GPU that is newer than the pack for sm80")
    return open_pack(data_folder("artifacts") / "sm80")


@pytest.fixture(scope="module")
def cubins(pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """The PTX of every kernel, assembled for this GPU, by name."""
    folder, ptxas = tmp_path_factory.mktemp("cubins"), assembler()
    code = code_in(pack.folder)
    major, minor = torch.cuda.get_device_capability()

    def assembled(kernel: Kernel) -> tuple[str, bytes]:
        assert kernel.ptx is not None
        text, image = folder / f"{kernel.name}.ptx", folder / f"{kernel.name}.cubin"
        text.write_bytes(code(kernel.ptx))
        done = subprocess.run(
            [ptxas, f"-arch=sm_{major}{minor}", "-o", image, text], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return kernel.name, image.read_bytes()

    with ThreadPoolExecutor() as pool:
        yield dict(pool.map(assembled, pack.manifest.kernels))


def wrong_on_gpu(kernel: Kernel, image: bytes, launch: Launch) -> int:
    """How many elements of the result are not what they must be."""
    memory = {name: torch.from_numpy(array).clone().cuda() for name, array in launch.memory.items()}
    function = load(kernel, image)
    addresses = {name: tensor.data_ptr() for name, tensor in memory.items()}
    function.launch(launch.programs, launch.parameters(kernel, addresses))
    torch.cuda.synchronize()
    function.unload()
    return launch.wrong(memory[launch.written].cpu().numpy())


def test_assembled_for_this_gpu(
    pack: Pack, cubins: dict[str, bytes], limit: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kernel for sm80, assembled for this GPU from the PTX that is shipped, gives the interpreter's bits."""
    limit(600)
    wrong = {}
    for kernel in pack.manifest.kernels:
        if count := wrong_on_gpu(kernel, cubins[kernel.name], launch_of(kernel)):
            wrong[kernel.name] = count
    assert wrong == {}
    report = {"sm80 PTX assembled for": torch.cuda.get_device_name(), "images equal to the interpreter's": len(cubins)}
    roles = Counter(kernel.role for kernel in pack.manifest.kernels)
    with capsys.disabled():
        print(json.dumps(report | dict(roles)))  # noqa: T201 - the figures that docs/reliability.md quotes


def test_compiled_by_the_driver(pack: Pack, limit: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """So does the same text compiled by the driver, which is how this GPU would run that pack."""
    limit(600)
    wrong, code = {}, code_in(pack.folder)
    for kernel in pack.manifest.kernels:
        assert kernel.ptx is not None
        image = code(kernel.ptx) + b"\0"
        if count := wrong_on_gpu(kernel, image, launch_of(kernel)):
            wrong[kernel.name] = count
    assert wrong == {}
    with capsys.disabled():
        print(json.dumps({"sm80 PTX compiled by the driver, images equal": len(pack.manifest.kernels)}))  # noqa: T201
