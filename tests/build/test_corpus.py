"""Kernels of others, liger-kernel's and fla-core's: what Triton compiles of their files, aotmm compiles to equal bytes.

They need a package index: without one these tests fail. `python -m tests.build.corpus` compiles all, for every arch.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from aotmm.runtime.pack import open_pack
from tests.build import corpus
from tests.build.corpus import ARCHS, ROOT, environment, kernels, outcomes, summary

SAMPLE = 24
LEAST = 150


def test_sample() -> None:
    """Of 24 kernels, an arch each by turns, all that Triton compiles are compiled, and their images are Triton's."""
    every = kernels()
    assert len(set(every)) == len(every) >= LEAST
    step = len(every) / SAMPLE
    pairs = [(every[int(number * step)], ARCHS[number * len(ARCHS) // SAMPLE]) for number in range(SAMPLE)]
    found = list(outcomes(environment(), pairs))
    assert [(row.kernel, row.arch) for row in found] == pairs
    able = [row for row in found if not row.triton]
    assert len(able) >= SAMPLE - 2, summary(found)  # some take functions of CUDA's library
    assert [row for row in able if row.aotmm or not row.equal] == [], summary(found)


def test_packs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two kernels of one name are in two packs, each as its first variant and the generic one."""
    pair = [kernel for kernel in kernels() if kernel.endswith(":elementwise_mul_kernel")]
    tuned = "fla/ops/utils/softmax.py:softmax_fwd_kernel"
    monkeypatch.setattr(corpus, "kernels", lambda: [*pair, tuned])
    first, second = (open_pack(each / "sm90").manifest.own for each in corpus.keep(environment(), tmp_path, "sm90"))
    assert [kernel.function for kernel in first] == ["elementwise_mul_kernel"] * 2 + ["softmax_fwd_kernel"] * 2
    assert [kernel.function for kernel in second] == ["elementwise_mul_kernel"] * 2
    assert [kernel.name.rpartition("_")[2] for kernel in (*first, *second)] == ["special", "generic"] * 3


def test_asking_torch() -> None:
    """A package that torch refuses, because it knows no GPU, is imported as without one; a note says who asked."""
    program = """
        import liger_kernel
        from pathlib import Path
        from aotmm.build import own
        from aotmm.target import target
        path = Path(liger_kernel.__path__[0]).parent / "fla" / "ops" / "utils" / "cumsum.py"
        facts = 's = "*fp32"\\no = "*fp32"\\nscale = "fp32"\\ncu_seqlens = "None"'
        facts += '\\nchunk_indices = "None"\\nT = "i32"'
        name = "chunk_local_cumsum_scalar_kernel"
        facts += "\\nB = 1\\nH = 2\\nBT = 64\\nREVERSE = false"
        path.with_suffix(".toml").write_text(f"[{name}.arguments]\\n{facts}")
        print(*own.notes([f"{path}:{name}"], target("sm90")), sep="\\n")
    """
    command = [str(environment()), "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hardware.py:" in done.stdout
    assert "asks torch.cuda.get_device_name: torch knows nothing of sm90" in done.stdout


def test_no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a package index it is said what pip could not do, and nothing passes for want of it."""
    monkeypatch.setattr(corpus, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"pip install .* failed"):
        corpus.environment()
