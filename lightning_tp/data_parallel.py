"""Data parallelism around the tensor-parallel model: parameters sharded over ``dp_shard`` by FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_tp.errors import ParallelConfigError
from lightning_tp.layout import DATA_AXIS


def shard_data_parallel(model: nn.Module, mesh: DeviceMesh, step_methods: Iterable[str]) -> None:
    """Shard the tensor-parallel ``model`` over the ``dp_shard`` axis, in place; gradients are averaged over it.

    Repeated blocks (children of one class in a ``ModuleList`` or ``Sequential``) gather their parameters one by one,
    what is left when a step begins. Nothing happens on an axis of one rank, or to a model that is sharded already.

    Args:
        model: A model whose parameters are DTensors on the ``tp`` axis of ``mesh``.
        mesh: The mesh with the axes ``dp_shard`` and ``tp``.
        step_methods: Names of methods of ``model`` that use its parameters without calling its forward.

    Raises:
        ParallelConfigError: a parameter has no dim to shard.
    """
    data_mesh = mesh[DATA_AXIS]
    if data_mesh.size() == 1 or isinstance(model, FSDPModule):
        return
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ParallelConfigError(
                f"{name} has no dims, and data-parallel sharding needs one: store it with the shape (1,)."
            )
    for block in repeated_blocks(model):
        fully_shard(block, mesh=data_mesh, shard_placement_fn=_data_parallel_placement)
    fully_shard(model, mesh=data_mesh, shard_placement_fn=_data_parallel_placement)
    for method in step_methods:
        register_fsdp_forward_method(model, method)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost children that repeat in a ``ModuleList`` or ``Sequential`` and hold parameters."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = [child for child in module if next(child.parameters(), None) is not None]
        kinds = [type(child) for child in children]
        repeated = [child for child in children if kinds.count(type(child)) > 1 and next(child.children(), None)]
        for child in repeated:
            if id(child) not in inside:
                blocks.append(child)
                inside |= {id(descendant) for descendant in child.modules()}
    return blocks


def _data_parallel_placement(parameter: nn.Parameter) -> Shard | None:
    """Fused weights and uneven shards are sharded over their other dim: torch cannot reassemble two over one."""
    if isinstance(parameter, DTensor):
        placement = parameter.placements[-1]
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % parameter.device_mesh.size():
            return Shard(1 - placement.dim)
        if not isinstance(placement, (Shard, Replicate)):
            return Shard(1 - placement.dim)  # type: ignore[attr-defined]
    return None
