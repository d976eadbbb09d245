"""`aotmm tune` on the GPU that is there: two shapes, every config, from the measurement to a library that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from click.testing import CliRunner

import aotmm
from aotmm.cli import main
from aotmm.pack import table

SHAPES = [[512, 512, 512, "nn"], [256, 384, 4096, "nt"], [257, 129, 65, "tn"]]


def test_tune(tmp_path: Path) -> None:
    """Times of every shape, resumable in parts, in a table by which a library selects."""
    lib = aotmm.load()
    pack = lib.pack_for(0)
    shapes, out = tmp_path / "shapes.json", tmp_path / "tuned.json"
    sweeps = {"ours": {"about": "few", "shapes": SHAPES}}
    shapes.write_text(json.dumps({"held_out_seed": 1, "sweeps": sweeps}))
    command = ["tune", "--arch", pack.arch, "--shapes", str(shapes), "--out", str(out), "--json"]
    first = CliRunner().invoke(main, [*command, "--budget", "0s"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["measured"] == 0
    done = CliRunner().invoke(main, [*command, "--budget", "60s"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["measured"] == len(SHAPES)
    assert not Path(f"{out}.partial").exists()
    made = table.read(out)
    assert made.device == torch.cuda.get_device_name(0)
    kernels = {kernel.config_name for kernel in pack.manifest.kernels if kernel.dtype_a == "fp16"}
    for shape in made.shapes:
        assert shape.times
        assert {sample.config_name for sample in shape.times} <= kernels
        assert all(1_000 < sample.ns < 10_000_000 for sample in shape.times)
    tuned = aotmm.load(table=out)
    a, b = torch.randn(512, 512, device="cuda").half(), torch.randn(512, 512, device="cuda").half()
    chosen = tuned.explain(a, b).chosen
    assert chosen is not None
    assert chosen.plan is not None
    assert chosen.plan.measured
    assert torch.allclose(tuned.matmul(a, b).float(), a.float() @ b.float(), rtol=1e-2, atol=0.1)
