"""lightning_tp: the plan is found, and the model runs on it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from benchmarks.engine.one_process import OneProcessCompiled
from benchmarks.engine.peer import Peer
from lightning_tp import ParallelLayout, find_plan, parallelize


class LightningTP(Peer):
    name = "lightning_tp"
    note = "the recipe's model, unchanged"

    def build(self) -> nn.Module:
        model = self.setting.model()
        ranks = dist.get_world_size()
        plans = [find_plan(model, self.tokens[:, :-1], ranks) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(plans)
        (plan,) = plans
        assert plan is not None
        return parallelize(model, ParallelLayout(1, ranks).device_mesh("cpu"), plan)


class LightningTPCompiled(LightningTP):
    name = "lightning_tp, compiled"
    note = "`torch.compile` of the whole model"
    whole = OneProcessCompiled.name

    def build(self) -> nn.Module:
        model = super().build()
        model.compile()
        return model
