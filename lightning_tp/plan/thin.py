"""Weights of linears as products of two thin random matrices: what a proof costs depends on activations only.

A region computes with a linear's weight W only by multiplying with it. So it is enough to look at ``W = A B`` with
random ``A [out, k]`` and ``B [k, in]``: outputs and the input's gradients are those of a random W, and the gradients of
A and B are random projections of the gradient of W (``dA = dW B^T``, ``dB = A^T dW``), which differ if the gradients of
W do, but with probability zero (the check of matrix products by R. Freivalds, 1977). Columns split A, rows split B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_tp.plan.linears import SplittableLinear

_RANK = 4


@dataclass(frozen=True)
class ThinWeight:
    """A weight ``A B`` of a linear that computes ``x (A B)^T``.

    Attributes:
        out: A, ``[out, k]``; on one rank of a column: its rows.
        into: B, ``[k, in]``; on one rank of a row: its columns.
        output_dim: Dim of the module's weight that runs over the output features.
    """

    out: Tensor
    into: Tensor
    output_dim: int

    @classmethod
    def random(cls, linear: SplittableLinear, dtype: torch.dtype, generator: torch.Generator) -> ThinWeight:
        """One for ``linear`` whose outputs have about the scale of its inputs."""
        device = linear.weight.device
        out = torch.randn(linear.output_features, _RANK, dtype=dtype, generator=generator)
        into = torch.randn(_RANK, linear.input_features, dtype=dtype, generator=generator)
        return cls(out.to(device), into.to(device) * linear.input_features**-0.5, linear.adapter.output_dim)

    def column_share(self, rows: Sequence[int]) -> ThinWeight:
        """The output features ``rows``."""
        return ThinWeight(
            self.out.index_select(0, torch.tensor(rows, device=self.out.device)), self.into, self.output_dim
        )

    def row_share(self, rank: int, size: int) -> ThinWeight:
        """The ``rank``-th of ``size`` chunks of the input features."""
        return ThinWeight(self.out, self.into.chunk(size, 1)[rank], self.output_dim)

    def leaves(self) -> ThinWeight:
        """The same values as leaves of a new graph."""
        out, into = (factor.detach().clone().requires_grad_(True) for factor in (self.out, self.into))
        return ThinWeight(out, into, self.output_dim)

    def product(self, x: Tensor) -> Tensor:
        """``x [..., in]`` times the weight: ``[..., out]``."""
        return (x @ self.into.t()) @ self.out.t()

    def stand_in(self) -> nn.Parameter:
        """A parameter that has the weight's shape, dtype and device, and needs no memory."""
        shape = (self.out.shape[0], self.into.shape[1])
        value = torch.zeros(1, 1, dtype=self.out.dtype, device=self.out.device)
        return nn.Parameter(value.expand(shape if self.output_dim == 0 else shape[::-1]))
