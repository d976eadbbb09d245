"""Triton's matmul, compiled ahead of time: prebuilt GPU kernels for torch tensors, with no compiler at run time."""

from __future__ import annotations

__version__ = "0.1.0"
