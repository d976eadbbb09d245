"""Trains a layer: product, bias and gradients are prebuilt kernels. Where nothing is trained, gelu is fused too."""

import torch

import aotmm.nn

layer = aotmm.nn.Linear(256, 512, activation="gelu", device="cuda", dtype=torch.bfloat16)
x = torch.randn(8, 64, 256, device="cuda", dtype=torch.bfloat16)

layer(x).float().square().mean().backward()

print(f"{layer}: largest gradient {layer.weight.grad.abs().max():.6f}")
