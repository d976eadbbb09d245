"""What compares a pack's launches with the driver's own (`tests/gpu/corpus.py`), over a fake driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import corpus
from tests.runtime.pretend import FUNCTIONS, run_functions

pytestmark = pytest.mark.skipif(not FUNCTIONS.is_dir(), reason="no packs of examples/own; build them: make own")

# A GPU whose launches write a digest of themselves to the beginning of the memory.
DIGESTS = """
import hashlib
from tests.gpu import corpus
from tests.runtime import pretend
corpus.Memory.ROOM = 1 << 16
seen = []
class Seen(corpus.Memory):
    def __init__(self, *given):
        super().__init__(*given)
        seen[:] = [self]
corpus.Memory = Seen
def digest(launch, *more):
    facts = launch.symbol, launch.grid, launch.block, launch.shared, launch.params, launch.stream, launch.image, more
    found = hashlib.sha256(repr(facts).encode()).digest()
    seen[0].whole[: len(found)] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
"""


def test_results() -> None:
    """Launches are equal in all that the driver gets; what differs, fails, varies or writes nothing is called so."""
    run_functions(
        DIGESTS
        + """
driver.execute, driver.run = True, digest
def tried(inputs, name="layer_norm_kernel"):
    found = corpus.tried(pretend.FUNCTIONS, name, inputs, "cpu")
    return found.result, found.reason
special, generic = (next(row for row in corpus.TRIES if row.kind == kind) for kind in ("special", "generic"))
for name in ("add_kernel", "softmax_kernel", "layer_norm_kernel"):
    for inputs in corpus.TRIES:
        found = corpus.tried(pretend.FUNCTIONS, name, inputs, "cpu")
        assert found.result == "equal", found
        assert 20 < found.changed <= 32  # some bytes are as they were by chance
        assert found.kernel.endswith(inputs.kind)
        assert driver.launches[-1].grid == inputs.grid
        assert len({launch.image for launch in driver.launches}) == 1
        driver.launches.clear()
driver.fail_next("cuLaunchKernel", 700)
assert tried(special) == ("does not run", "cuLaunchKernel: 700")
driver.fail_next("cuCtxSynchronize", 700)
assert tried(special) == ("does not run", "cuCtxSynchronize: 700")
driver.fail_next("cuLaunchKernelEx", 2)
result, reason = tried(special)
assert result == "differ" and reason.startswith("aotmm: DriverError: cuLaunchKernelEx failed"), reason
driver.run = lambda launch: digest(launch, len(driver.launches))
assert tried(special) == ("not deterministic", "the driver's two launches differ")
driver.run = lambda launch: digest(launch, len(driver.launches) // 3)
driver.launches.clear()
assert tried(special) == ("not deterministic", "some of the driver's launches differ")
driver.run = lambda launch: None
assert tried(special) == ("wrote nothing", "")
driver.run, right = digest, corpus.parameters
for number in range(9):  # seven arguments, two pointers to scratch memory
    def wrong(*given):
        values = right(*given)
        values[number] = type(values[number])(1)
        return values
    corpus.parameters = wrong
    assert tried(special) == tried(generic) == ("differ", "other bytes in x_ptr"), number
"""
    )


def test_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that a launch ends, or that never ends, costs that try alone; the summary and the status say all."""
    child = f"""
import os, time, torch
from tests.runtime import pretend
driver, _ = pretend.begin_functions()
{DIGESTS}
def run(launch):
    if launch.grid == (2, 2, 2):
        {{"add_kernel": os.abort, "softmax_kernel": lambda: time.sleep(60)}}.get(launch.symbol, int)()
    digest(launch, *[len(driver.launches)] * (launch.symbol == "layer_norm_kernel"))
driver.execute, driver.run, corpus.LIMIT_S, corpus.TRIES = True, run, 2, corpus.TRIES[:2]
work = corpus.work
corpus.work = lambda *given: work(*given, "cpu")
corpus.main()
"""
    monkeypatch.setattr(corpus, "LIMIT_S", 2)
    monkeypatch.setattr(corpus, "TRIES", corpus.TRIES[:2])
    monkeypatch.setattr(sys, "argv", ["corpus", str(FUNCTIONS), "--out", str(tmp_path / "out.json"), "--jobs", "2"])
    with pytest.raises(SystemExit) as ended:
        corpus.main((sys.executable, "-c", child))
    assert not ended.value.code
    rows = json.loads((tmp_path / "out.json").read_text())["functions"]
    found = {row["function"]: [(each["result"], each["reason"]) for each in row["tries"]] for row in rows}
    varying = ("not deterministic", "the driver's two launches differ")
    assert found["own/layer_norm_kernel"] == [varying, varying]
    assert found["own/softmax_kernel"] == [("does not run", "it does not end within 2 s"), ("equal", "")]
    (first, reason), second = found["own/add_kernel"]
    assert (first, second) == ("does not run", ("equal", ""))
    assert reason.startswith("its process ended with status -6")
    assert "special: of 3 functions 2 equal, 0 differ, 1 not deterministic, 0 wrote nothing, 0 does not run" in (
        printed := capsys.readouterr().out
    )
    assert "  own/layer_norm_kernel: not deterministic the driver's two launches differ" in printed
