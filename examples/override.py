"""Trains an unmodified torch model on prebuilt kernels: torch's own products run on them while it lasts."""

import torch

import aotmm

model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda().half()
x = torch.randn(64, 256, device="cuda", dtype=torch.float16)

with aotmm.override():
    model(x).float().square().mean().backward()

print(f"largest gradient {model[0].weight.grad.abs().max():.4f}")
