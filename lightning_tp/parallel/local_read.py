"""From a parameter to the tensor that this rank computes with, and back from its gradient: once a step for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_read(parameter: Tensor) -> Tensor:
    """This rank's part of ``parameter``, attached to its graph: what ``to_local`` of a DTensor gives, in less time.

    ``to_local`` works out anew for each gradient how it lies on the mesh. Here it lies as its parameter does, which is
    a shard or a copy on every rank: sums over ranks are taken before.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter.to_local()
    return _LocalRead.apply(parameter)


class _LocalRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        local = parameter._local_tensor
        ctx.spec, ctx.stride = parameter._spec, local.stride()
        ctx.set_materialize_grads(False)
        return local.view_as(local)  # another tensor object, for autograd writes into it

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        if not torch.is_grad_enabled() and grad.stride() == ctx.stride:
            return DTensor(grad, ctx.spec, requires_grad=False)
        # A graph of the backward pass is asked for, or the gradient lies in memory in another order.
        spec = ctx.spec
        return DTensor.from_local(
            grad.contiguous(), spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
