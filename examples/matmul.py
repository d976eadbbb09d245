"""Multiplies two matrices on the GPU with a prebuilt kernel: no compiler, no Triton, nothing written to disk."""

import torch

import aotmm

lib = aotmm.load()
a = torch.randn(512, 256, device="cuda", dtype=torch.float16)
b = torch.randn(384, 256, device="cuda", dtype=torch.float16).T  # any strides

c = lib.matmul(a, b, activation="leaky_relu")

want = torch.nn.functional.leaky_relu(a.double() @ b.double(), 0.01)
print(f"{tuple(c.shape)} {c.dtype}, largest error {(c.double() - want).abs().max():.4f}")
