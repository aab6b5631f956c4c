"""The differentiable collectives that every tensor-parallel communication is made of.

=========  ==================  ===================
function   forward             backward
=========  ==================  ===================
copy       identity            all-reduce
reduce     all-reduce          identity
gather     all-gather          own part
=========  ==================  ===================

``copy`` stands where a tensor that all ranks hold enters a region, ``reduce`` where partial sums leave it (the
conjugate pair f and g of Megatron-LM, arXiv:1909.08053, section 3). ``gather`` stands where features that ranks have
computed leave it as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from torch import Tensor

from lightning_tp.parallel.kept import kept_outputs


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pass a replicated tensor into a region: same value, gradient summed over ``group``.

    The gradient is reduced in place, so the result must feed only operations that produce a gradient of their own
    (matrix products do). Use :func:`copy_parameter` for a tensor with other uses.

    Args:
        x: ``[...]``, equal on every rank.
        group: the tensor-parallel group.
    """
    return _Copy.apply(x, group, True) if torch.is_grad_enabled() and x.requires_grad else x


def copy_parameter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As :func:`copy`, for a replicated parameter whose gradients inside a region are partial sums."""
    return _Copy.apply(x, group, False) if torch.is_grad_enabled() and x.requires_grad else x


def copy_features(x: Tensor, features: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As :func:`copy`, for some of the last dim's features only: the gradients of the others are whole already.

    Args:
        x: ``[..., n]``, equal on every rank.
        features: indices into the last dim.
        group: the tensor-parallel group.
    """
    return _CopyFeatures.apply(x, features, group) if torch.is_grad_enabled() and x.requires_grad else x


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the partial results of a region over ``group``; the result is equal on every rank.

    ``x`` is overwritten: it must be the fresh output of a matrix product.

    Args:
        x: ``[...]``, one addend per rank.
        group: the tensor-parallel group.
    """
    kept = None if torch.compiler.is_compiling() else kept_outputs()
    if kept is None:
        return _Reduce.apply(x, group, None)
    reduced: Tensor = _Reduce.apply(x, group, kept.next())
    kept.keep(reduced)
    return reduced


def gather_features(x: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
    """Put the ranks' chunks of the last dim together; all but the last ranks have ``ceil(features/ranks)`` of it.

    Args:
        x: ``[..., features of this rank]``.
        features: size of the whole dim.
        group: the tensor-parallel group.

    Returns:
        ``[..., features]``, equal on every rank. Its gradient must be so too: each rank takes its own part.
    """
    return _GatherFeatures.apply(x, features, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, in_place: bool) -> Tensor:
        ctx.group, ctx.in_place = group, in_place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        owned = grad.contiguous() if ctx.in_place else grad.clone(memory_format=torch.contiguous_format)
        return _all_reduce(owned, ctx.group), None, None


class _CopyFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, features: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.features, ctx.group = features, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        summed = _all_reduce(grad.index_select(-1, ctx.features), ctx.group)
        return grad.index_copy(-1, ctx.features, summed), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, known: Tensor | None) -> Tensor:
        """``known`` is the sum, if it is known already."""
        if known is not None:
            return known.detach()
        if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
            x = x.clone()  # a mode may have kept the product: selective checkpoints do
        # Not the input itself, which would forbid code to change the result in place.
        return _all_reduce(x.contiguous(), group).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
        size = dist.get_world_size(group)
        share = -(-features // size)
        ctx.start, ctx.length = dist.get_rank(group) * share, x.shape[-1]
        padded = F.pad(x, (0, share - x.shape[-1])) if x.shape[-1] < share else x
        parts = _all_gather(padded.contiguous(), size, group).unbind(0)
        lengths = [min(share, features - rank * share) for rank in range(size)]
        return torch.cat([part.narrow(-1, 0, length) for part, length in zip(parts, lengths, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.start, ctx.length), None, None


def _all_gather(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """``x [...]`` of all ranks: ``[size, ...]``."""
    if torch.compiler.is_compiling():
        return functional_collectives.all_gather_tensor(x.unsqueeze(0), 0, group)
    gathered = x.new_empty(size * x.numel())
    dist.all_gather_into_tensor(gathered, x.view(-1), group=group)
    return gathered.view(size, *x.shape)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over ``group``: in place when eager, as a functional collective in a compiled graph."""
    if torch.compiler.is_compiling():
        return functional_collectives.all_reduce(x, "sum", group)
    dist.all_reduce(x, group=group)
    return x
