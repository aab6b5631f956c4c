"""Whole tensors out of a parallel model, and whole tensors back into one of any layout.

What is saved is what one device would save: the model's own names, global shapes, the model's own order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_tp.errors import ParallelConfigError


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of ``module`` with whole tensors on the CPU. Collective over the model's mesh."""
    return {name: _full(value) for name, value in module.state_dict().items()}


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of ``optimizer`` with whole tensors on the CPU. Collective over the model's mesh."""
    return tree_map(_full, optimizer.state_dict())


def distribute_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Give whole tensors the layout of ``module``'s parameters; what has no parameter of its name stays as it is."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: _distributed_like(value, parameters[name], name) if name in parameters else value
        for name, value in state_dict.items()
    }


def distribute_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Give whole tensors of an optimizer's state dict the layout of the parameters that they belong to."""
    saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(saved_ids) != len(parameters):
        raise ParallelConfigError(
            f"The checkpoint's optimizer has {len(saved_ids)} parameters, this one has {len(parameters)}."
        )
    of_id = dict(zip(saved_ids, parameters, strict=True))
    state = {
        index: {
            key: _distributed_like(value, of_id[index], key)
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == of_id[index].shape
            else value
            for key, value in entries.items()
        }
        for index, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone().cpu()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _distributed_like(value: Any, like: Tensor, name: str) -> Any:
    """``value`` (whole) as a DTensor with the mesh and the placements of ``like``."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != like.shape:
        return value  # load_state_dict names the mismatch
    part = value.to(like.device)
    mesh = like.device_mesh
    # FSDP shards what tensor parallelism left: the last axis of the mesh is taken first.
    for axis in reversed(range(mesh.ndim)):
        part = _part(
            part, like.placements[axis], mesh.size(axis), mesh.get_local_rank(axis), nested=axis < mesh.ndim - 1
        )
    local = like.to_local()
    if part.shape != local.shape:
        raise ParallelConfigError(
            f"{name}: this rank holds {tuple(local.shape)}, the checkpoint gives {tuple(part.shape)}."
        )
    return DTensor.from_local(
        part.contiguous(), mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _part(value: Tensor, placement: Placement, size: int, rank: int, nested: bool) -> Tensor:
    if isinstance(placement, Replicate) or size == 1:
        return value
    dim: int = placement.dim  # type: ignore[attr-defined]
    sections = 1 if nested else getattr(placement, "split_factor", 1)
    if sections > 1:
        return torch.cat(value.chunk(size * sections, dim)[rank::size], dim)
    chunks = value.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)
