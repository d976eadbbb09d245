"""Products of different shapes, layouts and types, for `compute-sanitizer python -m tests.gpu.sanitize [FAMILY]...`.

Those by kernels of the families named are left out.
"""

from __future__ import annotations

import sys

import torch

import aotmm

SHAPES = ((1, 1, 1), (3, 5, 7), (70, 90, 100), (128, 128, 128), (33, 65, 0), (48, 64, 4096), (130, 257, 1001))


def main(left_out: list[str]) -> int:
    """Runs and checks them; the exit code is 0 if all are right."""
    lib, run, wrong = aotmm.load(), 0, 0
    for number, (m, n, k) in enumerate(SHAPES * 5):
        turn = number // len(SHAPES)
        dtype = (torch.float16, torch.bfloat16, torch.float32, torch.float16, torch.float32)[turn]
        torch.backends.cuda.matmul.allow_tf32 = turn == 4  # with both operands across K
        a = torch.randint(-3, 4, (m, k + number % 3), device="cuda").to(dtype)[:, :k]
        a = a.T.contiguous().T if turn == 4 else a
        b = torch.randint(-3, 4, (n, k), device="cuda").to(dtype).T if number % 2 and turn != 4 else None
        b = torch.randint(-3, 4, (k, n), device="cuda").to(dtype) if b is None else b
        bias = torch.zeros(n, device="cuda", dtype=dtype)
        activation = "gelu" if turn == 3 else None
        chosen = lib.explain(a, b, activation=activation, bias=bias).chosen if left_out else None
        if chosen is not None and chosen.kernel.family in left_out:
            continue
        run += 1
        c = lib.matmul(a, b, activation=activation, bias=bias)
        want = a.double() @ b.double()
        want = torch.nn.functional.gelu(want) if turn == 3 else want
        wrong += not torch.allclose(c.double(), want, rtol=2.0**-7, atol=1e-3)
    torch.cuda.synchronize()
    sys.stdout.write(f"{run - wrong} of {run} right\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
