"""How many parameters a parallel model has, in all and on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_tp.parallel.local_parameters import local_tensor
from lightning_tp.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class ParameterSummary:
    """Numbers of parameter elements.

    Attributes:
        total: Of the whole model.
        per_rank: Held by this rank.
        split: Of the whole model, split over the ``tp`` axis.
        split_share: Share of the parameters of linears that is split, 0 to 1.
    """

    total: int
    per_rank: int
    split: int
    split_share: float


def summarize_parameters(model: nn.Module, plan: ShardingPlan) -> ParameterSummary:
    """Count the parameters of a model that follows ``plan``."""
    parameters = list(model.parameters())
    return ParameterSummary(
        total=sum(p.numel() for p in parameters),
        per_rank=sum(local_tensor(p).numel() for p in parameters),
        split=sum(p.numel() for p in parameters if isinstance(p, DTensor) and not p.placements[-1].is_replicate()),
        split_share=plan.split_share,
    )
