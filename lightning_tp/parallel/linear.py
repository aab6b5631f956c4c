"""Column- and row-parallel linears, and the region that they belong to.

With ``R`` ranks, ``M`` rows of input, ``K`` input and ``N`` output features:

=======  ============  =================  ==============  =====================================
linear   x (per rank)  weight (per rank)  y (per rank)    communication
=======  ============  =================  ==============  =====================================
column   ``[M, K]``    ``[N/R, K]``       ``[M, N/R]``    backward: all-reduce of dx ``[M, K]``
row      ``[M, K/R]``  ``[N, K/R]``       ``[M, N]``      forward: all-reduce of y ``[M, N]``
=======  ============  =================  ==============  =====================================
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_tp.parallel.collectives import copy, reduce
from lightning_tp.parallel.local_parameters import ParallelState, Scope
from lightning_tp.parallel.random import RankRandomness
from lightning_tp.plan.linears import LinearAdapter
from lightning_tp.plan.sharding_plan import SizeRule
from lightning_tp.plan.sizes import RescaledSizes


class SharedCopy:
    """One copy for all columns that read the same tensor, so that their input gradients are reduced together."""

    def __init__(self, group: dist.ProcessGroup, readers: int) -> None:
        self._group, self._readers = group, readers
        self._source: Tensor | None = None
        self._copied: Tensor | None = None
        self._with_grad = False
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._readers == 1:
            return copy(x, self._group)
        with_grad = torch.is_grad_enabled()
        if self._source is not x or self._copied is None or self._with_grad != with_grad:
            # A copy made without gradients would not reduce those of a later pass.
            self._source, self._copied, self._left = x, copy(x, self._group), self._readers
            self._with_grad = with_grad
        copied = self._copied
        self._left -= 1
        if not self._left:
            self._source = self._copied = None
        return copied


@dataclass(frozen=True)
class ColumnRole:
    """A column's part in its region."""

    shared: SharedCopy
    randomness: RankRandomness | None


@dataclass(frozen=True)
class RowRole:
    """A row's part in its region."""

    group: dist.ProcessGroup
    adapter: LinearAdapter
    randomness: RankRandomness | None


def _only(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    """The one argument of a linear, by position or by keyword."""
    (x,) = (*args, *kwargs.values())
    return x


class ColumnParallel(nn.Module):
    """Mixin for a linear split over its output features."""

    _parallel: ParallelState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        role: ColumnRole = self._parallel.role
        y: Tensor = super().forward(role.shared(_only(args, kwargs)))
        if role.randomness is not None and self.training:
            role.randomness.enter()
        return y


class RowParallel(nn.Module):
    """Mixin for a linear split over its input features. The bias is added once, to the sum."""

    _parallel: ParallelState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        role: RowRole = self._parallel.role
        x = _only(args, kwargs)
        if role.randomness is not None:
            role.randomness.leave()
        y = reduce(role.adapter.product(x, self.weight), role.group)  # type: ignore[arg-type]
        bias: Any = self.bias
        # In mixed precision the product has the lower precision, as the whole linear would.
        return y if bias is None else y + bias.to(y.dtype)


@dataclass(frozen=True)
class RegionRole:
    """A module whose forward holds regions: their scopes, their rules for sizes, their random streams."""

    name: str
    scopes: Sequence[Scope]
    sizes: Sequence[SizeRule]
    randomness: Sequence[RankRandomness]


class RegionModule(nn.Module):
    """Mixin for the module around a region."""

    _parallel: ParallelState

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: RegionRole = self._parallel.role
        with ExitStack() as stack:
            for scope in role.scopes:
                stack.enter_context(scope)
            if role.sizes:
                stack.enter_context(RescaledSizes(role.name, role.sizes))
            for randomness in role.randomness:
                stack.callback(randomness.end)
            return super().__call__(*args, **kwargs)
