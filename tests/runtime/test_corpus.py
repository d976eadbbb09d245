"""What compares a pack's launches with the driver's own (`tests/gpu/corpus.py`), over a fake driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu import corpus
from tests.runtime import digests
from tests.runtime.pretend import FUNCTIONS, run_functions

pytestmark = pytest.mark.skipif(not FUNCTIONS.is_dir(), reason="no packs of examples/own; build them: make own")


def test_results() -> None:
    """Launches are equal in all that the driver gets; what differs, fails, varies or writes nothing is called so."""
    run_functions(
        """
from dataclasses import replace
import pytest
from tests.gpu import corpus
from tests.runtime.digests import digests
digest = digests()
driver.execute, driver.run = True, digest
def tried(inputs, name="layer_norm_kernel"):
    found = corpus.tried(pretend.FUNCTIONS, name, inputs, "cpu")
    return found.result, found.reason
special, generic = (replace(corpus.TRIES[0], kind=kind) for kind in corpus.KINDS)
for name in ("add_kernel", "softmax_kernel", "layer_norm_kernel"):
    for inputs in (replace(row, kind=kind) for row in corpus.TRIES for kind in corpus.KINDS):
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
told = []
driver.run = digest
driver.fail_next("cuCtxSynchronize", 700, 3)  # after what is compared
with pytest.raises(corpus.driver.CallError):
    corpus.attempt((pretend.FUNCTIONS, "add_kernel", special), told.append, "cpu")
assert [row.result for row in told] == ["does not run", "equal"]
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
    """A process that a launch ends, or that never ends, costs that try alone; the file, summary and status say all."""
    out, saved, save = tmp_path / "out.json", [], corpus.save

    def seen(path: Path, all_found: Sequence[corpus.Found]) -> None:
        save(path, all_found)
        saved.append(sum(row["done"] for row in json.loads(out.read_text())["functions"]))

    monkeypatch.setattr(corpus, "LIMIT_S", 2)
    monkeypatch.setattr(corpus, "save", seen)
    monkeypatch.setattr(sys, "argv", ["corpus", str(FUNCTIONS), "--out", str(out), "--jobs", "2"])
    with pytest.raises(SystemExit) as ended:
        corpus.main(digests.worker)
    assert not ended.value.code
    assert saved == [1, 2, 3, 3]
    rows = json.loads(out.read_text())["functions"]
    found = {row["function"]: [(each["result"], each["reason"]) for each in row["tries"]] for row in rows}
    varying = ("not deterministic", "the driver's two launches differ")
    assert found["own/layer_norm_kernel"] == [varying, varying]
    assert found["own/softmax_kernel"] == [("does not run", "it gave no sign of life for 2 s"), *[("equal", "")] * 2]
    assert found["own/add_kernel"] == [("does not run", "its process ended with code -6"), *[("equal", "")] * 2]
    kinds = [[each["inputs"]["kind"] for each in row["tries"]] for row in rows]
    assert sorted(kinds) == [["special", "generic"], *[["special", "special", "generic"]] * 2]
    printed = capsys.readouterr().out
    counts = "0 differ, 2 equal, 1 not deterministic, 0 wrote nothing, 0 does not run, 0 not tried"
    assert printed.startswith(f"3 of 3 functions are done\nspecial: {counts}\n")
    assert f"\ngeneric: {counts}\n" in printed
    assert "  own/layer_norm_kernel: not deterministic the driver's two launches differ" in printed


def test_limit() -> None:
    """What is left when the time is over counts as not tried; what never runs is tried in all ways, and no further."""
    wanted = corpus.functions_in(FUNCTIONS)
    all_found = corpus.compare(wanted, digests.worker, 1, 0.1)  # before a process is there
    text = corpus.summary(all_found)
    assert text.startswith("0 of 3 functions are done\n")
    assert "generic: 0 differ, 0 equal, 0 not deterministic, 0 wrote nothing, 0 does not run, 3 not tried\n" in text
    found = corpus.Found(*wanted[0])
    while (inputs := found.following()) is not None:
        found.tries.append(corpus.Result(inputs, found.name, corpus.FAILED))
    assert [row.inputs for row in found.tries] == list(corpus.TRIES)
