"""Modules with prebuilt kernels that replace torch.nn's of the same name."""

from __future__ import annotations

import torch

import aotmm
from aotmm.runtime.library import Activation, activation_code


class Linear(torch.nn.Linear):
    """`torch.nn.Linear`, then an activation: the same parameters, initial values and state dict, on GPUs only.

    The product is the default library's (`aotmm.load()`). Bias and activation are fused into it. Where a gradient is
    required, torch applies the activation to the rounded sum.

    Attributes:
        activation, batch_invariant: as `aotmm.matmul` takes them.

    Raises:
        ValueError: the activation is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if activation is not None:
            activation_code(activation)
        self.activation = activation
        self.batch_invariant = batch_invariant
        self._library = aotmm.load()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Return activation(input @ weight.T + bias).

        Args:
            input: (..., in_features) of fp16, bf16 or fp32 on a GPU, of the weight's dtype or under autocast.

        Raises:
            TypeError: a tensor is not on a GPU, or no kernel multiplies these dtypes.
            ValueError, NoKernelError, DriverError: as `aotmm.matmul`.
        """
        return self._library.matmul(
            input, self.weight.T, bias=self.bias, activation=self.activation, batch_invariant=self.batch_invariant
        )

    def extra_repr(self) -> str:
        """Return the attributes as torch prints them."""
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return super().extra_repr() + activation + (", batch_invariant=True" if self.batch_invariant else "")
