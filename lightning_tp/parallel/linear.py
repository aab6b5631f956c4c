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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_tp.parallel.collectives import copy, copy_features, copy_parameter, reduce
from lightning_tp.parallel.compiled_dropout import RankDropout
from lightning_tp.parallel.local_parameters import ParallelState
from lightning_tp.parallel.random import RankRandomness
from lightning_tp.parallel.scope import Entered, Scope, change
from lightning_tp.plan.arguments import sliced_arguments
from lightning_tp.plan.linears import LinearAdapter
from lightning_tp.plan.norms import Norm
from lightning_tp.plan.sharding_plan import ArgumentSlice, SizeRule
from lightning_tp.plan.sizes import RescaledSizes


class SharedCopy:
    """One copy for all columns of a region that read one tensor, so that their input gradients are reduced together.

    Args:
        calls: How often the columns are called in one run of the region.
    """

    def __init__(self, group: dist.ProcessGroup, calls: int) -> None:
        self._group, self._calls = group, calls
        self._made: list[tuple[Tensor, int, Tensor]] = []
        self._left = calls

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not x.requires_grad:
            return x
        if self._calls == 1:
            return copy(x, self._group)
        # Compiled code has no versions.
        version = 0 if torch.compiler.is_compiling() else x._version
        copied = next((made for source, then, made in self._made if source is x and then == version), None)
        if copied is None:
            copied = copy(x, self._group)
            change(self._remember, x, version, copied)
        if self._left == 1:
            self.end()
        else:
            change(self._count)
        return copied

    def end(self) -> None:
        """Forget the copies: the region has run."""
        change(self._forget)

    def _remember(self, x: Tensor, version: int, copied: Tensor) -> None:
        self._made = [*self._made, (x, version, copied)]

    def _count(self) -> None:
        self._left -= 1

    def _forget(self) -> None:
        self._made, self._left = [], self._calls


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
    """A module whose forward holds regions.

    Attributes:
        scope: Active while the regions run.
        sizes: Rules for the calls that name sizes.
        arguments: Arguments of which this rank takes its part, with the names of all by position.
        copies: The copies of each region.
        randomness: The random stream of each region that has one.
    """

    name: str
    group: dist.ProcessGroup
    rank: int
    scope: Scope
    sizes: Sequence[SizeRule]
    arguments: Sequence[ArgumentSlice]
    argument_names: Sequence[str]
    copies: Sequence[SharedCopy]
    randomness: Sequence[RankRandomness]


class RegionModule(nn.Module):
    """Mixin for the module around a region."""

    _parallel: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        role: RegionRole = self._parallel.region
        if role.arguments:
            args, kwargs = sliced_arguments(
                role.argument_names, role.arguments, role.rank, args, kwargs, lambda x: copy_parameter(x, role.group)
            )
        traced = torch.compiler.is_compiling()
        for randomness in role.randomness:
            randomness.forget()
        try:
            with Entered(role.scope):
                return self._run(role, traced, args, kwargs)
        finally:
            for randomness in role.randomness:
                randomness.end()
            for copies in role.copies:
                copies.end()

    def _run(self, role: RegionRole, traced: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        random = role.randomness if self.training else ()
        if not role.sizes and not random:
            return super().forward(*args, **kwargs)
        if not traced:
            return _uncompiled(self._with_local_sizes, role, args, kwargs)
        if not random:
            return self._with_local_sizes(role, args, kwargs)
        with RankDropout(random):
            return self._with_local_sizes(role, args, kwargs)

    def _with_local_sizes(self, role: RegionRole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not role.sizes:
            return super().forward(*args, **kwargs)
        with RescaledSizes(role.name, role.sizes):
            return super().forward(*args, **kwargs)


@torch.compiler.disable
def _uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """What changes calls on their way is compiled as a whole or not at all: behind a graph break it would miss some."""
    return function(*args)


@dataclass(frozen=True)
class BoundaryRole:
    """A module whose communication stands at its edges.

    Attributes:
        local_forward: What runs instead of the module's forward, if that cannot run on a share.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    local_forward: Callable[..., Any] | None
    randomness: RankRandomness | None


class BoundaryParallel(nn.Module):
    """Mixin for a module whose arguments are copied in and whose results are sums over the ranks."""

    _parallel: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        role: BoundaryRole = self._parallel.role
        known: dict[int, Tensor] = {}

        def entering(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if id(value) not in known:
                known[id(value)] = copy_parameter(value, role.group)
            return known[id(value)]

        args, kwargs = tree_map(entering, (args, kwargs))
        if role.randomness is not None and self.training:
            role.randomness.enter()
        if role.local_forward is None:
            results = super().forward(*args, **kwargs)
        else:
            results = role.local_forward(self, role.rank, role.size, *args, **kwargs)
        if role.randomness is not None:
            role.randomness.end()
        # Reduced in place, so never the tensor itself: autograd may have kept it.
        return tree_map(lambda y: reduce(y.clone(), role.group) if _is_floating(y) else y, results)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class EntryRole:
    """Which output features of a linear enter a region."""

    group: dist.ProcessGroup
    rows: Tensor


class EntryLinear(nn.Module):
    """Mixin for a linear whose output every rank has whole: gradients that come out of a region are summed."""

    _parallel: ParallelState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        role: EntryRole = self._parallel.entry
        return copy_features(super().forward(*args, **kwargs), role.rows, role.group)


@dataclass(frozen=True)
class NormRole:
    """A normalisation over features that are split."""

    group: dist.ProcessGroup
    norm: Norm


class ParallelNorm(nn.Module):
    """Mixin for a normalisation whose statistics are summed over the ranks."""

    _parallel: ParallelState

    def forward(self, x: Tensor) -> Tensor:
        role: NormRole = self._parallel.role
        statistic = copy_parameter(reduce(role.norm.statistic(x), role.group), role.group)
        bias: Any = self._parameters.get("bias")
        return role.norm.apply(x, statistic, self.weight, None if bias is None else self.bias)  # type: ignore[arg-type]
