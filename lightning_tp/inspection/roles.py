"""The role of every parameter of a model under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_tp.plan.linears import linear_adapter
from lightning_tp.plan.sharding_plan import Region, ShardingPlan, Split

Kind = Literal["column", "row", "part", "partial", "once", "whole"]


@dataclass(frozen=True)
class Role:
    """What becomes of one parameter.

    Attributes:
        kind: "column" and "row" of a linear; "part" of another parameter that is split; "partial": whole, gradients
            summed over the ranks; "once": whole, it counts on one rank only or after the sum; "whole".
        region: The region in which it has this role.
        split: Which indices along ``dim`` each rank has; None for a row, which is cut into equal chunks.
        dim: The dim of the parameter that is split, None if none is.
        reason: Why it is whole.
    """

    kind: Kind
    region: Region | None = None
    split: Split | None = None
    dim: int | None = None
    reason: str = ""

    @property
    def is_sharded(self) -> bool:
        """Whether no element of the parameter is held by two ranks."""
        return self.dim is not None and (self.split is None or self.split.is_sharded)


def parameter_roles(model: nn.Module, plan: ShardingPlan) -> dict[str, Role]:
    """The role of every parameter, by its name; a tied parameter has the role of the linear that is split, if any."""
    roles: dict[int, Role] = {}
    parameters = dict(model.named_parameters())
    for region in plan.regions:
        for column in region.columns:
            module = model.get_submodule(column.module)
            adapter = linear_adapter(module)
            assert adapter is not None  # the plan splits linears that an adapter knows
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    dim = adapter.output_dim if key == "weight" else 0
                    roles.setdefault(id(parameter), Role("column", region, column, dim))
        for row in region.rows:
            module = model.get_submodule(row)
            adapter = linear_adapter(module)
            assert adapter is not None
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                role = Role("row", region, None, adapter.input_dim)
                if key != "weight":
                    role = Role("once", region, reason="the bias of a row is added once, after the sum over the ranks")
                roles.setdefault(id(parameter), role)
        for shard in region.shards:
            roles.setdefault(id(parameters[shard.parameter]), Role("part", region, shard, shard.dim))
        once = region.boundary.once if region.boundary is not None else ()
        for name in once:
            role = Role("once", region, reason="what it adds is not split: it counts on the first rank only")
            roles.setdefault(id(parameters[name]), role)
        for name in region.partial:
            role = Role("partial", region, reason="every rank reads it inside a region: its gradients are summed")
            roles.setdefault(id(parameters[name]), role)
    for entry in plan.replicated:
        if entry.module in parameters:
            roles.setdefault(id(parameters[entry.module]), Role("whole", reason=entry.reason))
        else:
            for parameter in model.get_submodule(entry.module).parameters():
                roles.setdefault(id(parameter), Role("whole", reason=entry.reason))
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                roles.setdefault(id(parameter), Role("whole", reason=_reason(module, parameter)))
    return {name: roles[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _reason(module: nn.Module, parameter: nn.Parameter) -> str:
    if isinstance(module, nn.Embedding):
        return "embeddings are not split"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions are not split"
    if parameter.dim() < 2:
        return "a vector outside of the regions"
    return "no product of matrices with it was seen when the model was run"
