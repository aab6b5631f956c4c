"""Which share of the weights in a model's repeated blocks a plan splits."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from lightning_tp.plan.sharding_plan import ShardingPlan

_LEFT_OUT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase, _ConvNd)


def block_weights(model: nn.Module) -> dict[str, int]:
    """Number of elements of every weight in a repeated block, by name.

    A repeated block is an entry of an ``nn.ModuleList``, or one of several entries of one class in an
    ``nn.Sequential``, that has modules of its own. Its weights are the parameters of at least two dims, but for those
    of embeddings, convolutions and norms (torch's, and classes that are called Norm).
    """
    weights = {}
    for prefix, block in _blocks(model):
        for name, module in block.named_modules(prefix=prefix):
            if isinstance(module, _LEFT_OUT) or type(module).__name__.endswith("Norm"):
                continue
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    weights[f"{name}.{attribute}"] = parameter.numel()
    return weights


def split_weights(plan: ShardingPlan) -> set[str]:
    """Names of the parameters of which each rank computes its part only, a linear's by its weight."""
    linears = {column.module for _, column in plan.columns()} | {row for region in plan.regions for row in region.rows}
    return {f"{name}.weight" for name in linears} | {
        shard.parameter for region in plan.regions for shard in region.shards
    }


def block_share(model: nn.Module, plan: ShardingPlan) -> float:
    """Share of the elements of :func:`block_weights` that ``plan`` splits, 0 to 1.

    Raises:
        ValueError: the model has no repeated block.
    """
    weights = block_weights(model)
    if not weights:
        raise ValueError(f"{type(model).__name__} has no repeated block: no share of it can be split.")
    split = split_weights(plan)
    return sum(size for name, size in weights.items() if name in split) / sum(weights.values())


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module.named_children())
        classes = [type(child) for _, child in children]
        for child_name, child in children:
            repeated = isinstance(module, nn.ModuleList) or classes.count(type(child)) > 1
            if repeated and any(child.children()):
                blocks.append((f"{name}.{child_name}" if name else child_name, child))
    return blocks
