"""Compares bits of random batch-invariant products over all numbers of rows, and those of two GPUs.

python -m tests.gpu.bits --seed 7 --count 1000 --out h100.txt    # on one GPU
python -m tests.gpu.bits --seed 7 --count 1000 --against h100.txt    # on the other
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

import aotmm
from tests.gpu.test_batch_invariance import compared, digest


@click.command()
@click.option("--seed", required=True, type=int)
@click.option("--count", default=1000, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write digests of operands and results.")
@click.option(
    "--against", type=click.Path(exists=True, path_type=Path), help="Compare with what another GPU has written."
)
def main(seed: int, count: int, out: Path | None, against: Path | None) -> None:
    """Multiply COUNT random problems over every number of rows; exit with 1 if a bit differs."""
    lines, wrong = [], []
    for product, whole, differing in compared(aotmm.load(), count, seed):
        given = (product.a, product.b, product.bias, *product.scales)
        operands = [digest(operand) for operand in given if operand is not None]
        lines.append(f"{product.drawn} {operands} {digest(whole)}")
        if int(differing.sum()):
            wrong.append(f"{product.drawn}: {differing.tolist()}")
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    click.echo(f"{torch.cuda.get_device_name()}, seed {seed}: {len(lines)} problems, {len(wrong)} with differing bits")
    if against is not None:
        others = against.read_text().splitlines()
        # Two GPUs may draw other operands from one seed.
        pairs = zip(lines, others, strict=True)
        same = [pair for pair in pairs if pair[0].rpartition(" ")[0] == pair[1].rpartition(" ")[0]]
        other = [mine for mine, theirs in same if mine != theirs]
        click.echo(f"{len(same)} problems with the same operands on both, {len(other)} with other bits")
        wrong += other
    for line in wrong:
        click.echo(line)
    sys.exit(bool(wrong) or (against is not None and not same))


if __name__ == "__main__":
    main()
