"""Compiles a function around a prebuilt product, without a graph break and for any number of rows."""

import torch

import aotmm

lib = aotmm.load()
w = torch.randn(256, 128, device="cuda", dtype=torch.float16)

layer = torch.compile(lambda x: lib.matmul(x, w, activation="relu").softmax(-1), fullgraph=True, dynamic=True)

for rows in (5, 64):
    print(tuple(layer(torch.randn(rows, 256, device="cuda", dtype=torch.float16)).shape))
