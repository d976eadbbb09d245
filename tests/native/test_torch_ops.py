"""torch_ops.c between a torch and a launcher that are not there: what it asks both for, and in which order."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from aotmm.build import link, render, torch_library
from aotmm.problem import WORKSPACE_LIMIT
from tests.native.emulation import own_process

HERE = Path(__file__).parent
PLAN = f"plan{WORKSPACE_LIMIT}"


class FakeTorch:
    """The ops, registered with the stand-in."""

    def __init__(
        self, folder: Path, launchers: tuple[str, ...] = ("launcher",), library: Path = torch_library.LIBRARY
    ) -> None:
        """Builds the stand-in in `folder`; these of its launchers are asked in turn, by a copy of `library`."""
        command, _ = link.compiler()
        (folder / "launcher.h").write_text(render.header())
        torch = folder / "libfake_torch.so"
        subprocess.run(
            [*command, "-shared", "-fPIC", f"-I{folder}", str(HERE / "fake_torch.c"), "-o", str(torch)], check=True
        )
        torch_library.link_torch_library()
        self.torch = ctypes.CDLL(str(torch))
        self.ops = ctypes.CDLL(str(shutil.copy(library, folder / "libops.so")))  # with a state of its own
        find_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
        self.find = find_type(lambda name: ctypes.cast(self.torch[name.decode()], ctypes.c_void_p).value)
        connect = self.ops.aotmm_torch_connect
        connect.argtypes, connect.restype = [find_type, ctypes.c_void_p], ctypes.c_char_p
        assert connect(self.find, None) is None
        self.ops.aotmm_torch_bind.argtypes = [*[ctypes.c_int] * 3, ctypes.c_void_p]
        for rank, launcher in enumerate(launchers):
            address = ctypes.addressof(ctypes.c_char.in_dll(self.torch, launcher))
            assert self.ops.aotmm_torch_bind(0, 3, rank, address) == 0
        self.torch.multiply.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 3]

    def multiply(
        self, *shape: int, into_out: bool = False, wanted: int = 0, short: bool = False, fails: bool = False
    ) -> tuple[str, str]:
        """What torch and the launcher were asked for, and the error that was raised."""
        ctypes.c_uint64.in_dll(self.torch, "wanted").value = wanted
        ctypes.c_int.in_dll(self.torch, "memory_is_short").value = short
        ctypes.c_int.in_dll(self.torch, "run_fails").value = fails
        self.torch.multiply(into_out, *shape)
        buffer = ctypes.c_char * 600
        texts = (ctypes.string_at(ctypes.addressof(buffer.in_dll(self.torch, name))) for name in ("events", "raised"))
        events, raised = (text.decode() for text in texts)
        return events, raised


@pytest.mark.parametrize("into_out", [False, True])
@own_process
def test_workspace(tmp_path: Path, into_out: bool) -> None:  # noqa: FBT001
    """A plan's workspace is torch's memory, given back after the launch, and not asked for where none is needed."""
    fake = FakeTorch(tmp_path)
    assert fake.multiply(4, 5, 6, into_out=into_out) == (f"{PLAN} run0", "")
    assert fake.multiply(4, 5, 6, into_out=into_out, wanted=4096) == (f"{PLAN} allocate4096 run4096 free4096", "")
    assert fake.multiply(4, 0, 6, into_out=into_out, wanted=4096) == ("", ""), "an empty result asks for nothing"


@own_process
def test_without_memory(tmp_path: Path) -> None:
    """Where torch has no memory for a workspace, the product is planned again without one."""
    fake = FakeTorch(tmp_path)
    events = f"{PLAN} allocate4096 plan0 run0"
    assert fake.multiply(4, 5, 6, into_out=True, wanted=4096, short=True) == (events, "")
    assert fake.multiply(4, 5, 6, wanted=4096, short=True) == ("", "torch cannot allocate the result")


@own_process
def test_failed_launch(tmp_path: Path) -> None:
    """A launch that fails gives the workspace back too, and raises the launcher's words."""
    fake = FakeTorch(tmp_path)
    events = f"{PLAN} allocate64 run64 free64"
    assert fake.multiply(4, 5, 6, into_out=True, wanted=64, fails=True) == (events, "the launch failed")


@pytest.mark.parametrize(
    ("into_out", "short", "fails", "raised"),
    [
        (True, True, False, ""),
        (False, True, False, "torch cannot allocate the result"),
        (True, False, True, "the launch failed"),
        (False, False, True, "the launch failed"),
    ],
)
@own_process
def test_nothing_leaks(tmp_path: Path, into_out: bool, short: bool, fails: bool, raised: str) -> None:  # noqa: FBT001
    """Over 10,000 products without memory for the workspace or the result, or that fail, every tensor is deleted."""
    fake = FakeTorch(tmp_path)
    for _ in range(10_000):
        assert fake.multiply(4, 5, 6, into_out=into_out, wanted=4096, short=short, fails=fails)[1] == raised
    assert ctypes.c_int64.in_dll(fake.torch, "live").value == 0
    assert fake.multiply(4, 5, 6, into_out=into_out, wanted=64) == (f"{PLAN} allocate64 run64 free64", "")


@own_process
def test_packs_are_asked_in_turn(tmp_path: Path) -> None:
    """The first pack that has a kernel launches it; what a later one has is not asked for."""
    refuse = f"refuse{WORKSPACE_LIMIT}"
    fake = FakeTorch(tmp_path, ("lacking", "lacking", "launcher", "lacking"))
    assert fake.multiply(4, 5, 6, into_out=True) == (f"{refuse} {refuse} {PLAN} run0", "")
    for library, rank in ((0, 8), (0, -1), (255, 0)):
        assert fake.ops.aotmm_torch_bind(library, 3, rank, None) != 0


@own_process
def test_packs_that_all_lack_a_kernel(tmp_path: Path) -> None:
    """Where no pack has one, the last one's words are raised."""
    fake = FakeTorch(tmp_path, ("lacking", "lacking"))
    refuse = f"refuse{WORKSPACE_LIMIT}"
    assert fake.multiply(4, 5, 6, into_out=True) == (f"{refuse} {refuse}", "no kernel")
