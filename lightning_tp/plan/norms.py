"""Normalisations over all features of a tensor, recognised by their numbers, and how they run on split features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last dim: layer norm, or root-mean-square norm (arXiv:1910.07467).

    Attributes:
        features: Size of the dim in the unsplit model.
        centred: Whether the mean is subtracted (layer norm).
        eps: Added to the variance, or to the mean square; None is the precision of the input's dtype.
        offset: Added to the weight (0 or 1).
        single: Whether it computes in float32 whatever its input is.
    """

    features: int
    centred: bool
    eps: float | None
    offset: float
    single: bool

    def statistic(self, x: Tensor) -> Tensor:
        """The sums that all ranks' shares must be added for: ``[..., features on this rank] -> [..., 1 or 2]``."""
        wide = x.float() if self.single or x.dtype in (torch.bfloat16, torch.float16) else x
        squares = wide.square().sum(-1, keepdim=True)
        return torch.cat([wide.sum(-1, keepdim=True), squares], -1) if self.centred else squares

    def apply(self, x: Tensor, statistic: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """``x [..., features on this rank]`` normalised with the summed ``statistic``; weight and bias are shares."""
        wide = x.to(statistic.dtype)
        # No slices: while sizes are rescaled, those of the module's own code are counted.
        sums = [part.unsqueeze(-1) / self.features for part in statistic.unbind(-1)]
        mean_square = sums[-1]
        if self.centred:
            wide = wide - sums[0]
            mean_square = mean_square - sums[0].square()
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = wide * torch.rsqrt(mean_square + eps)
        if weight is not None:
            y = y * (weight + self.offset if self.offset else weight)
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)


def recognised_norm(module: nn.Module) -> Norm | None:
    """The :class:`Norm` that ``module`` computes, or None. It is run on a small batch of float64 numbers to see it."""
    weight: Any = module._parameters.get("weight")
    plain = set(module._parameters) <= {"weight", "bias"} and not module._modules and not module._buffers
    if not plain or weight is None or weight.dim() != 1 or weight.is_meta:
        return None
    saved = dict(module._parameters)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        # Of several scales, so that the small ones tell what is added under the root.
        scale = torch.tensor([[3.0], [1e-2], [1e-3]], dtype=torch.float64, device=weight.device)
        x = (torch.randn(3, weight.shape[0], dtype=torch.float64, device=weight.device) + 0.5) * scale
        try:
            for key, parameter in saved.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(torch.randn_like(parameter, dtype=torch.float64))
            found = module(x)
            own: Any = module._parameters["weight"]
            bias = module._parameters.get("bias")
            return next((norm for norm in _norms(module, own) if _is(norm, found, x, own, bias)), None)
        except Exception:  # it takes other arguments, or other tensors: no such norm
            return None
        finally:
            module._parameters.update(saved)


def _norms(module: nn.Module, weight: Tensor) -> list[Norm]:
    floats: list[float | None] = [value for value in vars(module).values() if isinstance(value, float)]
    floats += [None, 0.0]
    return [
        Norm(weight.shape[0], centred, eps, offset, single)
        for centred in (False, True)
        for eps in floats
        for offset in (0.0, 1.0)
        for single in (False, True)
    ]


def _is(norm: Norm, found: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    expected = norm.apply(x, norm.statistic(x), weight, bias)
    rtol, atol = (1e-5, 1e-6) if norm.single else (1e-12, 1e-12)
    return isinstance(found, Tensor) and torch.allclose(found.double(), expected, rtol=rtol, atol=atol)
